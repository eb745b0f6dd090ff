"""The Trio client: queries, and streaming as asynchronous iteration.

Owns the public face alone: how a connection is used, ended and replaced stands in
`link`, what is said on it in `datastreamer.protocol`.
"""

from __future__ import annotations

import socket
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from inspect import isawaitable
from typing import TYPE_CHECKING

import trio

from datastreamer._codec import Entry, EntryBatch
from datastreamer.client.trio_driver import Link
from datastreamer.client.trio_iteration import Batches, Entries
from datastreamer.format import DEFAULT_PORT, STREAM_TYPE_SEQUENCER, Header
from datastreamer.position import CursorStore, Position
from datastreamer.protocol import flows as exchanges
from datastreamer.protocol.arguments import check_number
from datastreamer.protocol.authentication import token_request
from datastreamer.protocol.batches import (
    BATCH_BYTES,
    REQUESTS,
    Limits,
    RangeReading,
    Read,
    probe,
    read,
    wait_ms,
)
from datastreamer.protocol.following import HashQuery, KnownHistory, RangeHash
from datastreamer.protocol.messages import Capabilities
from datastreamer.protocol.resume import Resumable, Rollback, streaming
from datastreamer.protocol.retry import BACKOFF, Backoff, Endurance, check_waits
from datastreamer.transport.client_stream import dial
from datastreamer.transport.endpoint import endpoint_of

if TYPE_CHECKING:
    import ssl


@asynccontextmanager
async def connect(
    host: str,
    port: int = DEFAULT_PORT,
    *,
    stream_type: int = STREAM_TYPE_SEQUENCER,
    timeout: float = exchanges.TIMEOUT,
    tls: bool | ssl.SSLContext = False,
    tls_server_name: str | None = None,
    resume: bool = True,
    retry_for: float | None = None,
    backoff: Backoff = BACKOFF,
    heartbeat: float | None = None,
    batch_reads: bool = True,
    token: bytes | str | None = None,
) -> AsyncIterator[Client]:
    """A client of the server at `host` and `port`, closed at the end of the block.

    A `host` of ``unix:PATH`` is a Unix socket. `tls` is what `client_tls` makes, or any
    other `ssl.SSLContext`, or True for the CAs that the system trusts; the certificate is
    to be for `tls_server_name` (None: for `host`).

    `timeout` bounds, in seconds, the making of a connection, also of a later one, and
    where `resume` is on the silence at the beginning of a streaming; how long another
    answer may take is the caller's to say (`trio.fail_after`). Raises `ConnectFailed` and
    `TLSFailed`. A server of another stream type shows at the first request.

    With `resume` a streaming goes on by itself when its server is lost and comes back:
    `backoff` says when it is tried, `retry_for` for how many seconds (None: for ever).
    `heartbeat` tells a silent server from a quiet stream: when nothing came for so many
    seconds, the server is asked on a second connection; without an answer, or where
    entries are due, the connection is taken for lost. Without `batch_reads` a server is not
    asked what it can do, and no batches are asked for.

    `token` is shown first on each connection: a server whose operator gave it out serves this
    client in a reserved place when it is full. Raises `NotAllowed` where it is wrong; a server
    that accepts no tokens is connected to without it, with a warning in the log. Without TLS a
    token can be read on the way.
    """
    check_number("stream_type", stream_type)
    check_waits(timeout, retry_for, heartbeat)
    request = token_request(stream_type, token)
    place = endpoint_of(host, port, tls, tls_server_name, request)
    redial = partial(dial, place, timeout)
    client = Client(
        await redial(),
        stream_type=stream_type,
        timeout=timeout,
        redial=redial,
        peer=place.peer,
        resume=resume,
        retry_for=retry_for,
        backoff=backoff,
        heartbeat=heartbeat,
        batch_reads=batch_reads,
    )
    try:
        yield client
    finally:
        await client.aclose()


class Client:
    """A connection to a server.

    Made by `connect`; or from a `stream` of one's own, which it takes over (`redial`
    makes another where one is needed). One task at a time: a call while another is
    underway raises `UsageError`, but for `stop`. A call ends an iteration that was left
    open.

    What is raised, and what it leaves: `ServerRefused` - the client is usable; a refusal
    may cost the connection, and the next call makes another. `ConnectionLost`,
    `ProtocolViolation` - the next call makes another, or raises `ConnectionLost` where
    it cannot. With `resume` (and a way to connect again) a query over a connection that
    turns out to be lost is asked once more over another, and a streaming goes on from the
    next entry whenever the server comes back with the same history. A cancelled query may
    cost the connection too; a cancelled wait for streamed entries loses nothing, and the
    iteration can go on.
    """

    def __init__(
        self,
        stream: trio.abc.Stream,
        *,
        stream_type: int = STREAM_TYPE_SEQUENCER,
        timeout: float = exchanges.TIMEOUT,
        redial: Callable[[], Awaitable[trio.abc.Stream]] | None = None,
        peer: str = "the server",
        resume: bool = True,
        retry_for: float | None = None,
        backoff: Backoff = BACKOFF,
        heartbeat: float | None = None,
        batch_reads: bool = True,
    ) -> None:
        check_number("stream_type", stream_type)
        check_waits(timeout, retry_for, heartbeat)
        endurance = Endurance(resume, retry_for, backoff, heartbeat)
        self._link = Link(stream, stream_type, timeout, redial, peer, endurance, batch_reads)

    @property
    def stream_type(self) -> int:
        """The type that every request names."""
        return self._link.stream_type

    @property
    def peer(self) -> str:
        """The server as messages name it."""
        return self._link.peer

    def leads_to(self, listeners: Iterable[socket.socket]) -> bool:
        """Whether one of `listeners`, which are this process's, is at the other end."""
        return self._link.leads_to(listeners)

    async def aclose(self) -> None:
        """Close the connection. A second call does nothing."""
        await self._link.aclose()

    # Queries

    async def header(self) -> Header:
        """The stream's header as it is now: what is committed."""
        return await self._link.call(exchanges.header)

    async def entry(self, number: int) -> Entry:
        """The entry of this number. Raises `UnknownEntry`."""
        return await self._link.call(exchanges.entry, number)

    async def bookmark(self, key: bytes) -> Entry:
        """The first event at or after the bookmark `key`. Raises `UnknownBookmark`."""
        return await self._link.call(exchanges.bookmark, key)

    # Batches

    @property
    def total_entries(self) -> int | None:
        """The newest total that the server told on this connection; None before the first."""
        return self._link.total_entries

    @property
    def closed_on_asking(self) -> bool:
        """Whether the server closed a connection on the question what it can do, and is taken
        for one that can do no more than others: that may have been an accident."""
        return self._link.closed_on_asking

    async def capabilities(self) -> Capabilities:
        """What the server can do beyond the published protocol; asked once a connection."""
        return await self._link.call(probe)

    async def batch_read(
        self,
        from_entry: int,
        max_count: int = 0,
        max_bytes: int = 0,
        *,
        wait: float = 0.0,
        types: Collection[int] | None = None,
    ) -> EntryBatch:
        """The entries from `from_entry` on, in one answer: at most `max_count`, of at most
        `max_bytes` with their heads (0: as many as the server gives).

        Any number from one to the limits may come, whatever is there: the first entry comes
        even when it is larger than `max_bytes`. None only at the end of the stream, when
        `wait` seconds brought none. Raises `UnknownEntry` past the end, as the server says
        now; `NotSupported` where it has no batches.

        With `types` entries of these alone, up to before `next_number`: maybe none, for a server
        looks through so much and no more, and one that cannot choose gives what it gives
        without.
        """
        return await self._read(Read(from_entry, max_count, max_bytes, types=types), wait)

    async def batch_read_unconfirmed(
        self,
        from_entry: int,
        max_count: int = 0,
        max_bytes: int = 0,
        *,
        wait: float = 0.0,
        types: Collection[int] | None = None,
    ) -> EntryBatch:
        """As `batch_read`, without a look at where the stream ends: past that the server
        refuses, which is `BadFromEntry`."""
        wanted = Read(from_entry, max_count, max_bytes, checked=False, types=types)
        return await self._read(wanted, wait)

    async def batch_read_with_fallback(
        self,
        from_entry: int,
        max_count: int = 0,
        max_bytes: int = 0,
        *,
        types: Collection[int] | None = None,
    ) -> EntryBatch:
        """As `batch_read`, from any server: one without batches is asked for single entries."""
        wanted = Read(from_entry, max_count, max_bytes, fallback=True, types=types)
        return await self._read(wanted)

    async def batch_read_unconfirmed_with_fallback(
        self,
        from_entry: int,
        max_count: int = 0,
        max_bytes: int = 0,
        *,
        types: Collection[int] | None = None,
    ) -> EntryBatch:
        """As `batch_read_unconfirmed`, from any server."""
        return await self._read(
            Read(
                from_entry,
                max_count,
                max_bytes,
                checked=False,
                fallback=True,
                types=types,
            )
        )

    async def _read(self, wanted: Read, wait: float = 0.0) -> EntryBatch:
        wanted = replace(wanted, wait_ms=wait_ms(wait))
        return await self._link.call(read, wanted)

    def read_batches(
        self,
        *,
        from_entry: int = 0,
        from_position: Position | None = None,
        stop: int | None = None,
        max_count: int = 0,
        max_bytes: int = BATCH_BYTES,
        requests: int = REQUESTS,
        types: Collection[int] | None = None,
        cursor: CursorStore | None = None,
        on_rollback: Callable[[Rollback], object] | None = None,
    ) -> Batches:
        """As `batches`, asked for in batches of `max_count` entries and `max_bytes`, with
        `requests` underway: no more is sent than is asked for.

        Ends before entry `stop`, or where the stream ends when it begins. A server without
        batches is asked to stream as far.
        """
        work = streaming(
            from_entry if from_position is None else None,
            None,
            stop,
            from_position=from_position,
            types=types,
            follow_rollbacks=on_rollback is not None,
            careful=self._link.resumes,
            batched=Limits(max_count, max_bytes, requests),
        )
        return Batches(self._link, work, cursor, on_rollback)

    def between_bookmarks(self, first: bytes, last: bytes) -> Batches:
        """The entries from one bookmark's to another's, both included, as they are now.

        Raises `BadFromBookmark`, `BadToBookmark` (also where the second stands before the
        first), and `NotSupported`: few servers know this.
        """
        return Batches(self._link, RangeReading(first, last))

    def entries_by_number(
        self, numbers: Iterable[int], *, window: int = exchanges.WINDOW
    ) -> Entries:
        """The entries of these numbers, in this order, with `window` queries underway.

        Raises `UnknownEntry` at the first that is not there.
        """
        return Entries(self._link, exchanges.Lookup(numbers, window))

    # Streaming

    def entries(
        self,
        *,
        from_entry: int | None = None,
        from_bookmark: bytes | None = None,
        from_position: Position | None = None,
        stop: int | None = None,
        types: Collection[int] | None = None,
        cursor: CursorStore | None = None,
        on_rollback: Callable[[Rollback], object] | None = None,
    ) -> Entries:
        """Entries one by one, from a number (0 if nothing is said), a bookmark's entry or a
        position on.

        Goes on with what is committed later, without end, or up to and not including
        number `stop`. The iteration begins when it is entered (``async with``) or asked
        for its first item, and raises `BadFromEntry` or `BadFromBookmark` then. `types`
        leaves out entries of all other types before any object is made of them.

        With `cursor` it begins at the position saved there, if there is one. Saved is the
        place behind an item when the next is asked for, and when the block is left without
        an error: each item is handed out at least once. Who keeps the iteration's `position`
        together with what was made of the entries, and gives it as `from_position` the next
        time, gets each exactly once.

        A server that comes back with other entries than those that were handed out, or
        with fewer, raises `HistoryChanged`. With `on_rollback`, that is called (and waited
        for) instead wherever the last entry in common can be told, among the last 256; the
        iteration then goes on behind it.
        """
        work = self._streaming(from_entry, from_bookmark, from_position, stop, types, on_rollback)
        return Entries(self._link, work, cursor, on_rollback)

    def batches(
        self,
        *,
        from_entry: int | None = None,
        from_bookmark: bytes | None = None,
        from_position: Position | None = None,
        stop: int | None = None,
        types: Collection[int] | None = None,
        cursor: CursorStore | None = None,
        on_rollback: Callable[[Rollback], object] | None = None,
        commits: bool = False,
    ) -> Batches:
        """As `entries`, in runs as they arrive: for many entries the quick way.

        A batch keeps its bytes, within a receive buffer of up to 1 MiB. With `commits` a server
        that can is asked to tell where atomic operations end, which `commit_ahead` says; from an
        entry on, for all types.
        """
        work = self._streaming(
            from_entry, from_bookmark, from_position, stop, types, on_rollback, commits
        )
        return Batches(self._link, work, cursor, on_rollback)

    def follow(self, from_entry: int, known: KnownHistory) -> Batches:
        """As `batches` with `commits`, from a server that can with each change of committed
        entries since the state `known`: see `Batches.begun` and `Batches.changes`.

        For clients that do not resume: one that does is sent all changes since `known` again
        after a reconnection.
        """
        return Batches(self._link, streaming(from_entry, None, None, commits=True, known=known))

    async def range_hash(self, first: int, end: int, max_bytes: int = 0) -> RangeHash:
        """The server's hash of the entries from `first` up to `end`, or of the first of them
        that `max_bytes` and the server's limit allow. For servers whose capabilities say
        `changes`. Raises `BadFromEntry` where it does not hold entry `first`."""
        return await self._link.call(exchanges.range_hash, HashQuery(first, end, max_bytes))

    def _streaming(
        self,
        from_entry: int | None,
        from_bookmark: bytes | None,
        from_position: Position | None,
        stop: int | None,
        types: Collection[int] | None,
        on_rollback: object,
        commits: bool = False,
    ) -> Resumable:
        return streaming(
            from_entry,
            from_bookmark,
            stop,
            from_position=from_position,
            types=types,
            follow_rollbacks=on_rollback is not None,
            careful=self._link.resumes,
            commits=commits,
        )

    async def run(
        self,
        callback: Callable[[Entry], object] | None = None,
        *,
        from_entry: int | None = None,
        from_bookmark: bytes | None = None,
        stop: int | None = None,
    ) -> None:
        """Call `callback` (and wait for what it returns, if it can be) for each entry.

        Without a callback each entry is printed as a line: number, type, length of data.
        Returns at `stop`, or when another task calls the method of that name.
        """
        if callback is None:
            async with self.batches(
                from_entry=from_entry, from_bookmark=from_bookmark, stop=stop
            ) as batches:
                async for batch in batches:
                    sys.stdout.write(exchanges.lines(batch))
                    sys.stdout.flush()
            return
        async with self.entries(
            from_entry=from_entry, from_bookmark=from_bookmark, stop=stop
        ) as entries:
            async for entry in entries:
                outcome = callback(entry)
                if isawaitable(outcome):
                    await outcome

    async def stop(self) -> None:
        """End the iteration that is open, if there is one; it ends without an error.

        The one method that may be called while another task waits for entries; that
        task still gets what arrives before the server's answer.
        """
        await self._link.stop()
