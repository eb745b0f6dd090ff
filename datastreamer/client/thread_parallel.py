"""As `parallel`, for plain threads: one for each connection.

Owns the threads and what they wait for. Must not import trio.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

from datastreamer._codec import EntryBatch
from datastreamer.client.blocking import BlockingClient
from datastreamer.client.parallel import AHEAD, WAITING, Story, bounds_of_pieces, part_held
from datastreamer.errors import (
    ConnectFailed,
    ConnectionLost,
    DatastreamerError,
    HistoryChanged,
    PeerError,
    StreamClosed,
    TLSFailed,
    UnknownEntry,
    UsageError,
)
from datastreamer.format import Header
from datastreamer.protocol.batches import BATCH_BYTES, past_the_end


def blocking_parallel_read(
    servers: Sequence[tuple[str, int]],
    from_entry: int = 0,
    stop: int | None = None,
    *,
    connections: int = 4,
    max_bytes: int = BATCH_BYTES,
    **options: Any,
) -> Iterator[EntryBatch]:
    """As `parallel_read`: an iterator over batches, in order. Its end, by ``close()`` too, is
    the end of its threads. `options` are those of `BlockingClient`."""
    if not servers or connections < 1:
        raise UsageError("entries are read from one server at least, over one connection at least")
    options.setdefault("resume", len(servers) == 1)
    return _Reading(list(servers), max_bytes, options).run(from_entry, stop, connections)


class _Piece:
    """Entries `number` to `stop` (excluded): what is still to be read of it, and what waits."""

    def __init__(self, number: int, stop: int) -> None:
        self.number = number
        self.stop = stop
        self.waiting: deque[EntryBatch] = deque()
        self.whole = False


class _Reading:
    def __init__(
        self, servers: list[tuple[str, int]], max_bytes: int, options: dict[str, Any]
    ) -> None:
        self._servers = servers
        self._max_bytes = max_bytes
        self._options = options
        self._story = Story()
        self._pieces: list[_Piece] = []
        # All below is changed, and waited for, with this held.
        self._changed = threading.Condition()
        self._next = 0
        self._allowed = 0
        self._failure: Exception | None = None
        self._closed = False
        self._clients: set[BlockingClient] = set()

    def run(self, start: int, stop: int | None, connections: int) -> Iterator[EntryBatch]:
        bounds = bounds_of_pieces(self._first_header(stop), start, stop, connections)
        self._pieces = [_Piece(*place) for place in bounds]
        self._allowed = connections * AHEAD
        threads = [
            threading.Thread(target=self._work, args=(at,), name="parallel read", daemon=True)
            for at in range(min(connections, len(self._pieces)))
        ]
        try:
            for thread in threads:
                thread.start()
            for piece in self._pieces:
                while (batch := self._await_batch(piece)) is not None:
                    yield batch
            self._ask_again()
        finally:
            self._close()
            for thread in threads:
                if thread.ident is not None:
                    thread.join()

    def _close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            clients = list(self._clients)
        for client in clients:
            client.close()

    def _first_header(self, stop: int | None) -> Header:
        failure: DatastreamerError | None = None
        for at in range(len(self._servers)):
            try:
                with BlockingClient(*self._servers[at], **self._options) as client:
                    header = self._recognize(at, client)
            except PeerError as error:
                failure = error
            else:
                if stop is None or stop <= header.total_entries:
                    return header
                failure = UnknownEntry(stop - 1, header.total_entries)
        assert failure is not None
        raise failure

    def _ask_again(self) -> None:
        lost: list[PeerError] = []
        for at in self._story.tellers:
            try:
                with BlockingClient(*self._servers[at], **self._options) as client:
                    self._recognize(at, client)
            except (ConnectFailed, ConnectionLost) as error:
                lost.append(error)
        if lost and len(lost) == len(self._story.tellers):
            raise lost[0]

    def _recognize(self, at: int, client: BlockingClient) -> Header:
        capabilities, header = client.capabilities(), client.header()
        with self._changed:
            self._story.recognize(at, client.peer, capabilities, header)
        return header

    # The reader.

    def _await_batch(self, piece: _Piece) -> EntryBatch | None:
        with self._changed:
            self._changed.wait_for(lambda: piece.waiting or piece.whole or self._failure)
            if self._failure is not None:
                raise self._failure
            self._changed.notify_all()
            if piece.waiting:
                return piece.waiting.popleft()
            self._allowed += 1
            return None

    # The threads.

    def _work(self, at: int) -> None:
        try:
            self._read_pieces(at)
        except StreamClosed:
            pass  # so it is told that nobody reads any more
        except Exception as error:  # noqa: BLE001 - raised where the batches are waited for
            with self._changed:
                self._failure = self._failure or error
                self._changed.notify_all()

    def _read_pieces(self, at: int) -> None:
        failed = 0
        piece: _Piece | None = None
        while True:
            server = at % len(self._servers)
            try:
                with BlockingClient(*self._servers[server], **self._options) as client:
                    self._clients.add(client)
                    try:
                        total = self._recognize(server, client).total_entries
                        while (piece := piece or self._take()) is not None:
                            for batch in client.read_batches(
                                from_entry=piece.number,
                                stop=part_held(piece.number, piece.stop, total),
                                max_bytes=self._max_bytes,
                            ):
                                self._put(piece, batch)
                                failed = 0
                            if piece.number < piece.stop:
                                raise past_the_end(piece.number)
                            with self._changed:
                                piece.whole = True
                                self._changed.notify_all()
                            piece = None
                        return
                    finally:
                        self._clients.discard(client)
            except PeerError as error:
                failed, at = failed + 1, at + 1
                if isinstance(error, HistoryChanged | TLSFailed) or failed >= len(self._servers):
                    raise

    def _take(self) -> _Piece | None:
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._next < self._allowed)
            if self._closed or self._next >= len(self._pieces):
                return None
            self._next += 1
            return self._pieces[self._next - 1]

    def _put(self, piece: _Piece, batch: EntryBatch) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._closed or len(piece.waiting) < WAITING)
            if self._closed:
                raise StreamClosed("nobody reads any more")
            piece.waiting.append(batch)
            piece.number = batch.next_number
            self._changed.notify_all()
