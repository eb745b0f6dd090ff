"""Resumes a streaming over new connections: what to request again, and what to compare.

Owns the decisions for all drivers: the next entry, and whether a server still has the same history.
`retry` decides which errors are worth another attempt. Must not know sockets or clocks.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from functools import partial
from operator import index

from xxhash import xxh3_64_digest

from datastreamer._codec import EntryBatch
from datastreamer.errors import (
    BadFromEntry,
    BadRange,
    ConnectionLost,
    EntriesDamaged,
    HistoryChanged,
    ServerBehind,
    ServerRefused,
    UnknownEntry,
    UsageError,
)
from datastreamer.format import Header
from datastreamer.position import HASH_SIZE, Identity, Position
from datastreamer.printable import counted
from datastreamer.protocol import exchanges
from datastreamer.protocol.arguments import check_key, check_number
from datastreamer.protocol.batches import BatchLimits, BatchReading, ask_times, probe, truncated
from datastreamer.protocol.client import ClientConnection
from datastreamer.protocol.commands import KnownHistory, TimeQuery
from datastreamer.protocol.exchanges import Exchange, Streaming
from datastreamer.protocol.filter.compare import (
    Reading,
    compare,
    difference,
    filter_of,
)
from datastreamer.protocol.following import ChangeReceived, FollowBegun
from datastreamer.protocol.history import Trail, different_stream
from datastreamer.selection.clauses import Selection


@dataclass(frozen=True, slots=True)
class Rollback:
    """The server truncated entries `to_entry` to `from_entry` - 1, which had been returned.

    The next entry is `to_entry` as it is now. `position` is the position to save once the reader
    has rewound itself.
    """

    to_entry: int
    from_entry: int
    position: Position


class Resumable:
    """A streaming over any number of connections; a `Work`.

    It starts at an entry, a bookmark, a position or a time; without any, at entry 0. `begin` joins
    the stream, for the first time or again: after the last entry that `advance` returned, or at a
    position. It requests the last entries again and compares them. A difference raises
    `HistoryChanged`, or with `follow_rollbacks` sets `rollback`, to be reported before the next
    `advance`.

    With `where`, only the entries that it selects are returned, and batches may be empty; a server
    that can sends only these. Unless `careful`, the server's identity is not requested. With
    `batched` limits, entries are read in batches, from a number up to `stop`, or to the total at
    the beginning. With `commits`, a server that can reports where atomic operations end; with
    `known` too, one that can reports what changed since that state.
    """

    def __init__(
        self,
        from_entry: int | None = None,
        from_bookmark: bytes | None = None,
        stop: int | None = None,
        *,
        from_position: Position | None = None,
        from_ms: int | None = None,
        where: Selection | None = None,
        follow_rollbacks: bool = False,
        careful: bool = True,
        batched: BatchLimits | None = None,
        commits: bool = False,
        known: KnownHistory | None = None,
    ) -> None:
        places = (from_entry, from_bookmark, from_position, from_ms)
        if sum(place is not None for place in places) > 1:
            raise UsageError("pass only one of from_entry, from_bookmark, from_position, from_time")
        for what, number in (("from_entry", from_entry), ("stop", stop)):
            check_number(what, 0 if number is None else number)
        if commits and (from_bookmark, where) != (None, None):
            raise UsageError("commits are not reported from a bookmark, nor with types or where")
        self._start: int | bytes = index(from_entry or 0)
        if from_bookmark is not None:
            check_key(from_bookmark)
            self._start = bytes(from_bookmark)
        elif from_ms is None and stop is not None and stop < self._start:
            raise BadRange(f"the range {self._start} to {stop} ends before it begins")
        # A server says where this is, until anything was received.
        self._from_ms = from_ms
        self._stop = stop
        self._where = where
        self._follow_rollbacks = follow_rollbacks
        self._careful = careful
        self._batched = batched
        self._commits = commits
        self._known = known
        self._stream: Identity | None = None
        self._trail: Trail | None = None
        # What the server of this connection selects; None: it sends all.
        self._filter: Selection | None = None
        # The first entry ever requested; None if entries before it are remembered too.
        self._origin: int | None = None
        self._connection: ClientConnection
        self._streaming: Reading | None = None
        self._ahead: EntryBatch | None = None
        self._handed: EntryBatch | None = None
        self._missed: int | None = None
        # The next entry when the last connection was begun.
        self._begun_at: int | None = None
        # The servers that held everything up to `stop`: then it is not waited for again.
        self._there: set[str] = set()
        # The server that holds, or sent, all that was returned.
        self._holder: str | None = None
        self.may_lag = False
        """Whether other servers may hold what this one lacks; see `ServerBehind`."""
        self.starved = False
        """Whether the server has answered that it does not hold the next entry."""
        self.stopping = False
        self.rollback: Rollback | None = None
        if from_position is not None:
            self.go_on_from(from_position)

    def go_on_from(self, position: Position) -> None:
        """Begin at a saved position instead of the start."""
        self._trail = Trail.of(position)
        self._stream = position.stream
        self._careful = True
        if not position.trail and position.chosen is None:
            self._origin = position.next_entry  # nothing before it is remembered

    @property
    def next_number(self) -> int | None:
        """The next entry; None if only a bookmark is known."""
        if self._handed is not None:
            return self._handed.next_number
        if self._trail is not None:
            return self._trail.next_number
        return self._start if isinstance(self._start, int) else None

    def position(self, before: int | None = None) -> Position | None:
        """The position after the last returned entry, or before entry `before` of the last batch.

        None if nothing is known yet.
        """
        trail = self._trail
        if trail is None:
            return None
        if before is None or self._handed is None or before >= self._handed.next_number:
            self._settle()
        else:
            trail = trail.extended(self._handed.before(before))
        return trail.position(self._stream)

    def _settle(self) -> None:
        if self._handed is not None and self._trail is not None:
            self._trail.extend(self._handed)
        self._handed = None

    @property
    def commit_ahead(self) -> int | None:
        """Where the operations of the last returned entries end; None if the server does not
        report it."""
        streaming = self._streaming
        return streaming.commit_ahead if isinstance(streaming, Streaming) else None

    @property
    def begun(self) -> FollowBegun | None:
        """The server's packet about changes since `known`; None if it does not report changes."""
        streaming = self._streaming
        return streaming.begun if isinstance(streaming, Streaming) else None

    @property
    def changes(self) -> deque[ChangeReceived]:
        """Changes reported between the entries returned already and the next ones, for the caller
        to remove."""
        streaming = self._streaming
        return streaming.changes if isinstance(streaming, Streaming) else deque()

    def begin(self, connection: ClientConnection) -> Exchange[None]:
        yield from self._join(connection)
        self._holder = connection.peer

    def _join(self, connection: ClientConnection) -> Exchange[None]:
        self._connection = connection
        self._settle()
        self._streaming = self._ahead = None
        self.starved = False
        if self._from_ms is not None and self._trail is None:
            self._start = (yield from ask_times(connection, TimeQuery(self._from_ms))).next
        due = self.next_number
        if self._stop is not None and due is not None and due >= self._stop:
            return
        self._filter = yield from filter_of(connection, self._where)
        if self._careful:
            header = yield from exchanges.header(connection)
            self._recognize(header, connection.peer)
            if due is not None:
                yield from self._ask_why(connection, due, header.total_entries)
            if self._trail is not None:
                yield from self._rejoin(connection, self._trail, header)
                return
        self._streaming = yield from self._begin(connection, self._start)
        if isinstance(self._start, int):
            self._trail = Trail(self._start, self._filter)
            self._origin = self._start

    def _ask_why(self, connection: ClientConnection, due: int, total: int) -> Exchange[None]:
        """If the last connection ended before entry `due` came, request it alone: a server whose
        copy of it is damaged says so, and raises `EntriesDamaged`."""
        stuck, self._begun_at = self._begun_at == due < total, due
        if stuck:
            # Not each time: some servers do not know the request, and end the connection.
            self._begun_at = None
            try:
                yield from exchanges.entry(connection, due)
            except EntriesDamaged:
                self._begun_at = due
                raise
            except (UnknownEntry, ServerRefused):
                pass

    def _begin(self, connection: ClientConnection, start: int | bytes) -> Exchange[Reading]:
        self._note_total(connection)
        if self._batched is None or not isinstance(start, int):
            commits, known = False, None
            if self._commits and isinstance(start, int) and self._filter is None:
                capabilities = yield from probe(connection)
                commits = capabilities.commits
                known = self._known if capabilities.changes else None
            streaming = Streaming(start, self._stop, self._filter, commits=commits, known=known)
            yield from streaming.begin(connection)
            return streaming
        reading = BatchReading(start, self._stop, self._batched, self._filter)
        yield from reading.begin(connection)
        self._stop = reading.stop
        self._note_total(connection)
        reading.on_nothing = partial(self._starve, connection.peer)
        return reading

    def _starve(self, peer: str, total: int) -> None:
        self.starved = True
        self._ensure_there(total, peer)

    def _note_total(self, connection: ClientConnection) -> None:
        total, stop = connection.total_entries, self._stop
        if total is not None and stop is not None and stop <= total and not self._follow_rollbacks:
            self._there.add(connection.peer)

    def _ensure_there(self, total: int, peer: str) -> None:
        """Raise `HistoryChanged` if a stream with `total` entries lacks entries that existed when
        they were requested; `ServerBehind` if they existed on another server."""
        if self._there and self._stop is not None and total < self._stop:
            if self.may_lag and peer not in self._there:
                raise behind(peer, total, self._stop - 1)
            raise HistoryChanged(
                f"{peer} changed its history: it holds {counted(total)}, but entries up to "
                f"{self._stop - 1} existed when they were requested",
                next_entry=self.next_number or 0,
                total_entries=total,
                first_differing=total,
            )

    @property
    def last_read(self) -> EntryBatch | Position | None:
        """Entries received last, or the position after them."""
        return self._handed or (None if self._trail is None else self._trail.position(self._stream))

    @property
    def hungry(self) -> bool:
        """Whether `advance` cannot do anything before more bytes arrive."""
        streaming = self._streaming
        return self._ahead is None and isinstance(streaming, Streaming) and streaming.hungry

    def arrived(self) -> EntryBatch | None:
        """The batch that `advance` would return, if it has arrived; None: call `advance`."""
        streaming = self._streaming
        if self._ahead is not None or self._trail is None or not isinstance(streaming, Streaming):
            return None
        self._settle()
        batch = streaming.arrived()
        if batch is None:
            return None
        self._handed = batch
        return self._wanted(batch)

    def advance(self) -> Exchange[EntryBatch | None]:
        self._settle()
        if self._ahead is not None:
            batch, self._ahead = self._ahead, None
        else:
            streaming = self._streaming
            received = None if streaming is None else (yield from streaming.advance())
            if received is None:
                return None
            batch, self.starved = received, False
        if self._trail is None:
            if isinstance(self._start, bytes) and self._filter is None:
                exchanges.ensure_marked(self._connection, batch[0], self._start)
            self._trail = Trail(batch.first_number, self._filter)
            self._origin = batch.first_number
        self._handed = batch
        return self._wanted(batch)

    def _wanted(self, batch: EntryBatch) -> EntryBatch:
        # What this server selects was compared with the selection when it came.
        return batch if self._where in (None, self._filter) else batch.select(self._where or ())

    def request_stop(self) -> bytes:
        self.stopping = True
        return b"" if self._streaming is None else self._streaming.request_stop()

    def end(self, limit: int | None) -> Exchange[bool]:
        if self._streaming is None:
            return True
        return (yield from self._streaming.end(limit))

    def _recognize(self, header: Header, peer: str) -> None:
        found = Identity.of(header)
        if self._stream is None:
            self._stream = found
        elif found != self._stream:
            raise different_stream(peer, self._stream, header, self.next_number or 0)

    def _rejoin(self, connection: ClientConnection, trail: Trail, header: Header) -> Exchange[None]:
        """Request the remembered entries again, compare them, and continue after them."""
        first, due, total = trail.first_number, trail.next_number, header.total_entries
        if total < due and self.may_lag and connection.peer != self._holder:
            raise behind(connection.peer, total, due - 1)
        if total < first:
            raise self._changed(connection.peer, trail, total, None)
        common = min(due, total)
        rest, differing = None, None
        # If the remembered entries are of another selection, they are read separately.
        apart = trail.where != self._filter
        fresh = Trail(first, self._filter)
        if apart:
            differing = yield from compare(connection, trail, common, fresh)
        else:
            try:
                reading = yield from self._begin(connection, first)
            except BadFromEntry as error:
                raise truncated(connection) from error
            at = first
            while at < common and differing is None:
                batch = yield from reading.advance()
                if batch is None:
                    return
                part = batch.before(common)
                differing = difference(trail, part)
                rest = batch.since(part.next_number if differing is None else differing)
                at = batch.next_number
        if differing is None and total < due:
            differing = total
        if differing is not None:
            # If no remembered entry is equal, only the beginning of the stream is certain.
            certain = trail.certain(differing) or first in (0, self._origin)
            if not certain or not self._follow_rollbacks:
                raise self._changed(connection.peer, trail, total, differing if certain else None)
            trail.cut(differing)
            self.rollback = Rollback(differing, due, trail.position(self._stream))
        if apart:
            go_on = common if differing is None else differing
            if fresh.next_number != go_on:
                fresh = Trail(go_on, self._filter)
            reading = yield from self._begin(connection, go_on)
            self._trail = fresh
        if rest is not None and rest.next_number == rest.first_number:
            rest = None
        self._streaming, self._ahead = reading, rest

    def _changed(
        self, peer: str, trail: Trail, total: int, differing: int | None
    ) -> HistoryChanged:
        due, first = trail.next_number, trail.first_number
        if differing is None:
            where = f"all of entries {first} to {due - 1} differ from those that were received"
            if total <= first:
                where = f"entry {due} is the next one needed"
        elif differing >= total:
            where = f"entries {differing} to {due - 1}, which were received, are missing"
        else:
            where = f"entry {differing} is not the one that was received"
        return HistoryChanged(
            f"{peer} changed its history: it holds {counted(total)}, and {where}",
            next_entry=due,
            total_entries=total,
            first_differing=differing,
        )

    def lags(self, header: Header, bound: int) -> bool:
        """Whether a server with this header has the same stream, and from the next entry on more
        than `bound` entries."""
        due = self.next_number
        same = self._stream is None or Identity.of(header) == self._stream
        return same and (due is None or header.total_entries - due > bound)

    @property
    def incomplete(self) -> bool:
        """Whether it ends at an entry that has not arrived."""
        due = self.next_number
        return self._stop is not None and (due is None or due < self._stop)

    def ahead(self, connection: ClientConnection, bound: int) -> Exchange[Header | None]:
        """The header of another server if this one lags it by more than `bound` entries. Raises
        `HistoryChanged` if the last remembered entry differs. Not to be used within an item."""
        header = yield from exchanges.header(connection)
        if not self.lags(header, bound):
            return None
        trail, position = self._trail, self.position()
        if trail is not None and position is not None and position.trail:
            last = position.last_number
            found = yield from exchanges.entry(connection, last)
            if xxh3_64_digest(found.pack()) != position.trail[-HASH_SIZE:]:
                raise self._changed(connection.peer, trail, header.total_entries, last)
        return header

    def silent(self, header: Header, peer: str, seconds: float) -> None:
        """Nothing arrived for `seconds`, but the server answered `header` on another connection.

        Raises `ConnectionLost` if entries have been outstanding since the last call, by the total
        or a reported commit, or if the stream is another one; `HistoryChanged` if it no longer
        holds entries that it had.
        """
        due, total = self.next_number, header.total_entries
        reported = max(total, self.commit_ahead or 0)
        another = self._stream is not None and Identity.of(header) != self._stream
        if another or (due is not None and total < due):
            raise ConnectionLost(f"{peer} serves another stream, or another history")
        if due is None and self._filter is None:
            raise ConnectionLost(
                f"{peer} sent nothing for {seconds:g} s, not even the bookmark's own entry: its "
                "index may not match its stream"
            )
        self._ensure_there(total, peer)
        if due is None or reported == due:
            self._missed = None
        elif self._missed == due:
            commit = f", reported a commit to entry {reported}" if reported > total else ""
            raise ConnectionLost(
                f"{peer} holds {counted(total)}{commit}, but sent nothing for {seconds:g} s after "
                f"entry {due - 1}"
            )
        else:
            self._missed = due


def behind(peer: str, total: int, last: int) -> ServerBehind:
    """The exception for a server that holds `total` entries, and not yet entry `last`."""
    return ServerBehind(f"{peer} holds {counted(total)}, and not entry {last} yet", total)
