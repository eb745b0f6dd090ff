"""The client for plain threads: the same exchanges as the Trio client's, on a plain socket.

Owns the public face; connections are `blocking_link`'s. Must not import trio: this is what a
Spark executor or a notebook loads.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterable
from dataclasses import replace
from types import TracebackType

from datastreamer._codec import Entry, EntryBatch
from datastreamer.client.thread_driver import BlockingLink
from datastreamer.client.thread_iteration import Batches, Entries
from datastreamer.format import Header
from datastreamer.position import CursorStore, Position
from datastreamer.protocol import flows as exchanges
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
from datastreamer.protocol.messages import Capabilities
from datastreamer.protocol.resume import Resumable, Rollback, streaming


class BlockingClient(BlockingLink):
    """A connection to a server, made at once. One thread at a time: a call while another is
    underway raises `UsageError`, but for `stop` and `close`.

    `host`, `port`, `tls`, `tls_server_name` and `token` are those of `connect`.

    `timeout` (seconds) bounds the making of a connection and the wait for an answer;
    the wait for streamed entries has no bound. Raises `ConnectFailed` and
    `TLSFailed`.

    With `resume` a streaming goes on by itself when its server is lost and comes back:
    `backoff` says when it is tried, `retry_for` for how many seconds (None: for ever).
    `heartbeat` tells a silent server from a quiet stream: when nothing came for so many
    seconds, the server is asked on a second connection; without an answer, or where
    entries are due, the connection is taken for lost. Without `batch_reads` a server is not
    asked what it can do, and no batches are asked for.

    What is raised, and what it leaves: `ServerRefused` - the client is usable; a refusal
    may cost the connection, and the next call makes another. `ConnectionLost`,
    `ProtocolViolation` - the next call makes another. With `resume` a query over a
    connection that turns out to be lost is asked once more over another, and a streaming
    goes on from the next entry whenever the server comes back with the same history. A
    call ends an iteration that was left open.
    """

    def __enter__(self) -> BlockingClient:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    # Queries

    def header(self) -> Header:
        """The stream's header as it is now: what is committed."""
        return self.call(exchanges.header)

    def entry(self, number: int) -> Entry:
        """The entry of this number. Raises `UnknownEntry`."""
        return self.call(exchanges.entry, number)

    def bookmark(self, key: bytes) -> Entry:
        """The first event at or after the bookmark `key`. Raises `UnknownBookmark`."""
        return self.call(exchanges.bookmark, key)

    # Batches

    @property
    def total_entries(self) -> int | None:
        """The newest total that the server told on this connection; None before the first."""
        return self._connection.total_entries

    def capabilities(self) -> Capabilities:
        """What the server can do beyond the published protocol; asked once a connection."""
        return self.call(probe)

    def batch_read(
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
        return self._read(Read(from_entry, max_count, max_bytes, types=types), wait)

    def batch_read_unconfirmed(
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
        return self._read(wanted, wait)

    def batch_read_with_fallback(
        self,
        from_entry: int,
        max_count: int = 0,
        max_bytes: int = 0,
        *,
        types: Collection[int] | None = None,
    ) -> EntryBatch:
        """As `batch_read`, from any server: one without batches is asked for single entries."""
        wanted = Read(from_entry, max_count, max_bytes, fallback=True, types=types)
        return self._read(wanted)

    def batch_read_unconfirmed_with_fallback(
        self,
        from_entry: int,
        max_count: int = 0,
        max_bytes: int = 0,
        *,
        types: Collection[int] | None = None,
    ) -> EntryBatch:
        """As `batch_read_unconfirmed`, from any server."""
        return self._read(
            Read(
                from_entry,
                max_count,
                max_bytes,
                checked=False,
                fallback=True,
                types=types,
            )
        )

    def _read(self, wanted: Read, wait: float = 0.0) -> EntryBatch:
        timeout = self._timeout
        wanted = replace(wanted, wait_ms=wait_ms(wait))
        self._timeout += wait
        try:
            return self.call(read, wanted)
        finally:
            self._timeout = timeout

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
            careful=self._endurance.resume,
            batched=Limits(max_count, max_bytes, requests),
        )
        return Batches(self, work, None, cursor, on_rollback)

    def between_bookmarks(self, first: bytes, last: bytes) -> Batches:
        """The entries from one bookmark's to another's, both included, as they are now.

        Raises `BadFromBookmark`, `BadToBookmark` (also where the second stands before the
        first), and `NotSupported`: few servers know this.
        """
        return Batches(self, RangeReading(first, last), self._timeout)

    def entries_by_number(
        self, numbers: Iterable[int], *, window: int = exchanges.WINDOW
    ) -> Entries:
        """The entries of these numbers, in this order, with `window` queries underway.

        Raises `UnknownEntry` at the first that is not there.
        """
        return Entries(self, exchanges.Lookup(numbers, window), self._timeout)

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
        number `stop`. The iteration begins when it is entered (``with``) or asked for
        its first item, and raises `BadFromEntry` or `BadFromBookmark` then. `types`
        leaves out entries of all other types before any object is made of them.

        With `cursor` it begins at the position saved there, if there is one. Saved is the
        place behind an item when the next is asked for, and when the block is left without
        an error: each item is handed out at least once. Who keeps the iteration's `position`
        together with what was made of the entries, and gives it as `from_position` the next
        time, gets each exactly once.

        A server that comes back with other entries than those that were handed out, or
        with fewer, raises `HistoryChanged`. With `on_rollback`, that is called instead
        wherever the last entry in common can be told, among the last 256; the iteration
        then goes on behind it.
        """
        work = self._streaming(from_entry, from_bookmark, from_position, stop, types, on_rollback)
        return Entries(self, work, None, cursor, on_rollback)

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
        return Batches(self, work, None, cursor, on_rollback)

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
            careful=self._endurance.resume,
            commits=commits,
        )

    def run(
        self,
        callback: Callable[[Entry], object] | None = None,
        *,
        from_entry: int | None = None,
        from_bookmark: bytes | None = None,
        stop: int | None = None,
    ) -> None:
        """Call `callback` for each entry; it may call the method `stop` to end this.

        Without a callback each entry is printed as a line: number, type, length of data.
        """
        if callback is None:
            with self.batches(
                from_entry=from_entry, from_bookmark=from_bookmark, stop=stop
            ) as batches:
                for batch in batches:
                    sys.stdout.write(exchanges.lines(batch))
                    sys.stdout.flush()
            return
        with self.entries(from_entry=from_entry, from_bookmark=from_bookmark, stop=stop) as entries:
            for entry in entries:
                callback(entry)
