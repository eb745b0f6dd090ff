"""A part of a stream, read over several connections at once, and handed out in order.

Owns who reads which piece next, and what is kept in memory; how the part is divided stands in
`pieces`. Each connection is a client like any other (`client`); what a lost one means is the
client's.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from typing import Any

import trio

from datastreamer._codec import EntryBatch
from datastreamer.client.parallel import AHEAD, WAITING, Story, bounds_of_pieces, part_held
from datastreamer.client.trio import Client, connect
from datastreamer.errors import (
    ConnectFailed,
    ConnectionLost,
    DatastreamerError,
    HistoryChanged,
    PeerError,
    TLSFailed,
    UnknownEntry,
    UsageError,
)
from datastreamer.format import Header
from datastreamer.protocol.batches import BATCH_BYTES, past_the_end


@asynccontextmanager
async def parallel_read(
    servers: Sequence[tuple[str, int]],
    from_entry: int = 0,
    stop: int | None = None,
    *,
    connections: int = 4,
    max_bytes: int = BATCH_BYTES,
    **options: Any,
) -> AsyncIterator[AsyncIterator[EntryBatch]]:
    """The entries from `from_entry` up to `stop` (None: where the stream ends now), in batches
    and in order, over so many `connections` to `servers`, one or several that serve the same
    stream, as (host, port)::

        async with parallel_read([("a", 6900), ("b", 6900)], 0, 1_000_000) as batches:
            async for batch in batches:
                ...

    `options` are those of `connect`. With one server a lost connection is made again as
    `connect` says; with several a piece that one did not give to its end is read on from the
    next, and an error is raised where none of them has it. Kept in memory are at most 6 batches
    of `max_bytes` for each connection, whatever the reader does.

    Raises `UnknownEntry` where no server holds as much as `stop` says, whatever is committed
    later; `HistoryChanged` where the servers' streams are not the same kind, and where one
    that can tell (servers that have batches can) has taken entries back or changed them while
    it was read, at the latest at the end: of several that can tell one is to be there then.
    What is raised cancels the block.
    """
    if not servers or connections < 1:
        raise UsageError("entries are read from one server at least, over one connection at least")
    options.setdefault("resume", len(servers) == 1)
    reading = _Reading(list(servers), max_bytes, options)
    await reading.prepare(from_entry, stop, connections)
    failure: Exception | None = None
    async with trio.open_nursery() as nursery:
        for at in range(min(connections, len(reading.pieces))):
            nursery.start_soon(reading.work, at, nursery.cancel_scope)
        try:
            async with aclosing(reading.deliver()) as batches:
                try:
                    yield batches
                finally:
                    # Before what they write to is closed.
                    nursery.cancel_scope.cancel()
        except Exception as error:  # noqa: BLE001 - raised below, without a group around it
            failure = error
    if failure is not None:
        raise failure
    if reading.failure is not None:
        raise reading.failure


class _Piece:
    """Entries `number` to `stop` (excluded): what is still to be read of it, and what waits."""

    def __init__(self, number: int, stop: int) -> None:
        self.number = number
        self.stop = stop
        self.put, self.taken = trio.open_memory_channel[EntryBatch](WAITING)


class _Reading:
    def __init__(
        self, servers: list[tuple[str, int]], max_bytes: int, options: dict[str, Any]
    ) -> None:
        self.pieces: list[_Piece] = []
        self.failure: PeerError | None = None
        self._servers = servers
        self._max_bytes = max_bytes
        self._options = options
        self._story = Story()
        self._next = 0
        self._room = trio.Semaphore(0)

    async def prepare(self, start: int, stop: int | None, connections: int) -> None:
        """Divide what is to be read."""
        bounds = bounds_of_pieces(await self._first_header(stop), start, stop, connections)
        self.pieces = [_Piece(*place) for place in bounds]
        self._room = trio.Semaphore(connections * AHEAD)

    async def _first_header(self, stop: int | None) -> Header:
        """That of the first server that holds all that is to be read."""
        failure: DatastreamerError | None = None
        for at in range(len(self._servers)):
            try:
                async with connect(*self._servers[at], **self._options) as client:
                    header = await self._recognize(at, client)
            except PeerError as error:
                failure = error
            else:
                if stop is None or stop <= header.total_entries:
                    return header
                failure = UnknownEntry(stop - 1, header.total_entries)
        assert failure is not None
        raise failure

    async def _recognize(self, at: int, client: Client) -> Header:
        capabilities, header = await client.capabilities(), await client.header()
        self._story.recognize(at, client.peer, capabilities, header)
        return header

    async def work(self, at: int, scope: trio.CancelScope) -> None:
        """Read one piece after the other, over one connection at a time."""
        failed = 0
        piece: _Piece | None = None
        while self._next < len(self.pieces) or piece is not None:
            server = at % len(self._servers)
            try:
                async with connect(*self._servers[server], **self._options) as client:
                    total = (await self._recognize(server, client)).total_entries
                    while (piece := piece or await self._take()) is not None:
                        reading = client.read_batches(
                            from_entry=piece.number,
                            stop=part_held(piece.number, piece.stop, total),
                            max_bytes=self._max_bytes,
                        )
                        async for batch in reading:
                            await piece.put.send(batch)
                            piece.number = batch.next_number
                            failed = 0
                        if piece.number < piece.stop:
                            raise past_the_end(piece.number)
                        piece.put.close()
                        piece = None
                return
            except PeerError as error:
                failed, at = failed + 1, at + 1
                final = isinstance(error, HistoryChanged | TLSFailed)
                if final or failed >= len(self._servers):
                    self.failure = self.failure or error
                    scope.cancel()
                    return

    async def _take(self) -> _Piece | None:
        if self._next >= len(self.pieces):
            return None
        await self._room.acquire()
        if self._next >= len(self.pieces):
            self._room.release()
            return None
        self._next += 1
        return self.pieces[self._next - 1]

    async def deliver(self) -> AsyncGenerator[EntryBatch, None]:
        for piece in self.pieces:
            with piece.taken:  # no checkpoint: the scope may be cancelled
                async for batch in piece.taken:
                    yield batch
            self._room.release()
        await self._ask_again()

    async def _ask_again(self) -> None:
        """Those that can tell, whether that was the history to its end."""
        lost: list[PeerError] = []
        for at in self._story.tellers:
            try:
                async with connect(*self._servers[at], **self._options) as client:
                    await self._recognize(at, client)
            except (ConnectFailed, ConnectionLost) as error:
                lost.append(error)
        if lost and len(lost) == len(self._story.tellers):
            raise lost[0]
