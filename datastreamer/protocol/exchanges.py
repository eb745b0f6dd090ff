"""The exchanges of a client with a server, as generators.

Owns the sequence of requests and answers, and what an answer means to the caller. Must not know
sockets, tasks or time: an `Exchange` is a generator that yields the bytes to send, or None if more
must be received into the connection, and returns the result. Every driver runs the same ones.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterable
from itertools import chain, islice
from typing import Final, Protocol, TypeAlias, TypeVar

from datastreamer._codec import Entry, EntryBatch, scan
from datastreamer.errors import (
    BadRange,
    ConnectionLost,
    PeerError,
    ProtocolViolation,
    UnknownBookmark,
    UnknownEntry,
    UsageError,
    refusal,
)
from datastreamer.format import RESULT_OK, TYPE_NOT_FOUND, U64_MAX, Header
from datastreamer.protocol.arguments import check_number
from datastreamer.protocol.client import ClientConnection
from datastreamer.protocol.commands import (
    BookmarkQuery,
    Command,
    CommitStart,
    EntryQuery,
    FilteredStart,
    FilteredStartBookmark,
    FollowStart,
    HeaderQuery,
    KnownHistory,
    Start,
    StartBookmark,
    Stop,
)
from datastreamer.protocol.events import (
    EntriesReceived,
    EntryReceived,
    Event,
    PeerEnded,
    ResultReceived,
)
from datastreamer.protocol.following import ChangeReceived, FollowBegun
from datastreamer.selection.clauses import Selection

T = TypeVar("T")
Part_co = TypeVar("Part_co", covariant=True)
Exchange: TypeAlias = Generator[bytes | None, None, T]

TIMEOUT: Final = 10.0
"""Default timeout for connecting, in seconds."""

WINDOW: Final = 256
"""Default number of queries in flight."""

DRAIN_LIMIT: Final = 16 << 20
"""Bytes worth reading after a Stop before a new connection is cheaper."""

MAX_WINDOW: Final = 1024
"""Maximum number of queries in flight. Their 24 KiB of requests fit into the system's buffers; with
more, both sides could wait for each other to read."""


def next_event(connection: ClientConnection) -> Exchange[Event]:
    """The next event. Raises for a refusal, and if the connection has ended."""
    while (event := connection.next_event()) is None:
        yield None
    if isinstance(event, PeerEnded):
        raise unexpected(connection, event)
    if isinstance(event, ResultReceived) and event.number != RESULT_OK:
        raise unexpected(connection, event)
    return event


def expect(connection: ClientConnection, kind: type[T]) -> Exchange[T]:
    """The next event, of this class. Raises as `next_event`, and for another one."""
    event = yield from next_event(connection)
    if not isinstance(event, kind):
        raise unexpected(connection, event)
    return event


def ask(connection: ClientConnection, query: Command, kind: type[T]) -> Exchange[T]:
    """The answer to a query, of this class."""
    yield connection.request(query)
    return (yield from expect(connection, kind))


def unexpected(connection: ClientConnection, event: Event) -> PeerError:
    """The exception for an event other than the expected one."""
    closed = f"{connection.peer} closed the connection"
    if isinstance(event, ResultReceived) and event.number != RESULT_OK:
        return refusal(event.number, event.text, str(event.command))
    if not isinstance(event, PeerEnded):
        return ProtocolViolation(f"{connection.peer} sent {type(event).__name__} at the wrong time")
    if event.unread:
        return ConnectionLost(f"{closed} in the middle of an answer or entry; connect again")
    if not connection.received_bytes:
        return unanswered(connection, closed)
    return ConnectionLost(f"{closed}; connect again")


def unanswered(connection: ClientConnection, closed: str) -> ConnectionLost:
    """The exception for a connection that ended before anything was received on it."""
    return ConnectionLost(
        f"{closed} without an answer: servers of another stream type than "
        f"{connection.stream_type} do that, servers that accept no more clients, and metrics ports"
    )


def header(connection: ClientConnection) -> Exchange[Header]:
    return (yield from ask(connection, HeaderQuery(), Header))


def entry(connection: ClientConnection, number: int) -> Exchange[Entry]:
    """Request one entry. Raises `UnknownEntry` if it does not exist."""
    total = -1
    while True:
        event = yield from ask(connection, EntryQuery(number), EntryReceived)
        if event.entry is not None:
            return event.entry
        before, total = total, (yield from header(connection)).total_entries
        # It may have been committed between the two answers: then request it again.
        if number == 0 < total == before:
            # An empty entry 0 of the type of this answer looks like "not found".
            return Entry(0, TYPE_NOT_FOUND, b"")
        if number >= total or total == before:
            raise UnknownEntry(number, total)


def bookmark(connection: ClientConnection, key: bytes) -> Exchange[Entry]:
    """Request the first event at or after a bookmark. Raises `UnknownBookmark` if there is none."""
    event = yield from ask(connection, BookmarkQuery(key), EntryReceived)
    if event.entry is None:
        # The answer is the same if the bookmark is the last entry of the stream.
        why = f"no bookmark 0x{key.hex()} in the stream, or no event follows it"
        raise UnknownBookmark(key, why)
    if event.entry.is_bookmark:
        # The answer of some servers if only bookmarks follow.
        raise UnknownBookmark(key, f"no event follows bookmark 0x{key.hex()}")
    return event.entry


def ensure_marked(connection: ClientConnection, found: Entry, key: bytes) -> None:
    """Raise `ProtocolViolation` unless `found` is the requested bookmark; an index that lags its
    stream may name another entry."""
    if not found.is_bookmark or found.data != key:
        raise ProtocolViolation(
            f"{connection.peer} sent entry {found.number} instead of bookmark 0x{key.hex()}: "
            "its index does not match its stream"
        )


class Work(Protocol[Part_co]):
    """An exchange of many calls, which may pause between them."""

    def begin(self, connection: ClientConnection) -> Exchange[None]:
        """Send the request. If this raises, nothing has begun."""

    def advance(self) -> Exchange[Part_co | None]:
        """The next entries, at least one; None if there are no more."""

    def request_stop(self) -> bytes:
        """Request the end while `advance` waits: the bytes to send, or b"".

        What has arrived until then is still returned; then `advance` returns None.
        """

    def end(self, limit: int | None) -> Exchange[bool]:
        """Prepare the connection for the next request, dropping what still arrives.

        False if more than `limit` bytes had to be dropped; then the connection is not usable.
        """


def restore(
    connection: ClientConnection, work: Work[object] | None, suspect: bool, limit: int | None
) -> Exchange[bool]:
    """End `work`, and test a connection that is `suspect` after a refusal.

    The server may have closed it, or refuse every further request. Returns whether the connection
    can be used; a `PeerError` also means that it cannot.
    """
    if work is not None and not (yield from work.end(limit)):
        return False
    if suspect:
        yield from header(connection)
    return True


class Streaming:
    """A streaming, from Start to Stop.

    `start` is an entry number or a bookmark's key; `stop` is the entry before which to end: without
    it, the streaming continues with later commits. With `where`, which the server must be able to
    select, batches have gaps and may be empty. With `commits`, which the server must report,
    `commit_ahead` is where they end. With `known`, from a server that reports changes, `changes`
    receives the changes since that state in order; an empty batch is returned for each.
    """

    def __init__(
        self,
        start: int | bytes,
        stop: int | None = None,
        where: Selection | None = None,
        *,
        commits: bool = False,
        known: KnownHistory | None = None,
    ) -> None:
        self._command: Command
        if isinstance(start, int):
            self._command = Start(start) if where is None else FilteredStart(start, where)
            if commits:
                self._command = CommitStart(start)
            if known is not None:
                self._command = FollowStart(start, known)
            if stop is not None and stop < start:
                raise BadRange(f"the range {start} to {stop} ends before it begins")
        elif where is None:
            self._command = StartBookmark(bytes(start))
        else:
            self._command = FilteredStartBookmark(bytes(start), where)
        self._stop = stop
        self._complete = stop == start
        self._stop_sent = self._complete
        self._stopped = self._complete
        # The batch that contains `stop`.
        self._last: EntryBatch | None = None
        self._connection: ClientConnection
        self.begun: FollowBegun | None = None
        self.changes: deque[ChangeReceived] = deque()

    @property
    def commit_ahead(self) -> int | None:
        """Where the operations of the returned entries end; None if the server does not report
        it."""
        return self._connection.streamed.commit_ahead

    def begin(self, connection: ClientConnection) -> Exchange[None]:
        self._connection = connection
        if self._complete:
            return
        yield from ask(connection, self._command, ResultReceived)
        if isinstance(self._command, FollowStart):
            self.begun = yield from expect(connection, FollowBegun)

    @property
    def hungry(self) -> bool:
        """Whether `advance` cannot do anything before more bytes arrive."""
        return self._open and self._connection.hungry

    @property
    def _open(self) -> bool:
        return not (self._complete or self._stopped) and self._last is None

    def arrived(self) -> EntryBatch | None:
        """The batch that `advance` would return, if it has arrived and is not the last; else None:
        call `advance`."""
        if not self._open:
            return None
        run = self._connection.next_run()
        if run is not None and self._stop is not None and run.next_number >= self._stop:
            self._last = run
            return None
        return run

    def advance(self) -> Exchange[EntryBatch | None]:
        if self._complete or self._stopped:
            return None
        batch = self._last
        if batch is None:
            event = yield from next_event(self._connection)
            if isinstance(event, ResultReceived):
                self._stopped = True
                return None
            if isinstance(event, ChangeReceived):
                self.changes.append(event)
                return scan(b"", self._connection.streamed.next_number)
            if not isinstance(event, EntriesReceived):
                raise unexpected(self._connection, event)
            batch = event.batch
        if self._stop is not None and batch.next_number >= self._stop:
            # Send the Stop at once, so that the server stops sending; what it has sent already is
            # read when the connection is needed.
            self._complete = True
            yield self.request_stop()
            batch = batch.before(self._stop)
        return batch if batch.next_number > batch.first_number else None

    def request_stop(self) -> bytes:
        if self._stop_sent:
            return b""
        self._stop_sent = True
        return self._connection.request(Stop())

    def end(self, limit: int | None) -> Exchange[bool]:
        yield self.request_stop()
        passed = 0
        while not self._stopped:
            event = yield from next_event(self._connection)
            if isinstance(event, ResultReceived):
                self._stopped = True
            elif isinstance(event, EntriesReceived):
                passed += event.batch.nbytes
                if limit is not None and passed > limit:
                    return False
        return True


class Lookup:
    """Looks up entries by number, with up to `window` queries in flight; returns lists.

    `begin` on another connection requests there what was not returned.
    """

    def __init__(self, numbers: Iterable[int], window: int) -> None:
        if not 1 <= window <= MAX_WINDOW:
            raise UsageError(f"the window must be 1 to {MAX_WINDOW} queries, not {window}")
        self._numbers = iter(numbers)
        self._window = window
        # Requested and not returned.
        self._due: list[int] = []
        self._missing: EntryQuery | BookmarkQuery | None = None
        self._connection: ClientConnection

    def begin(self, connection: ClientConnection) -> Exchange[None]:
        self._connection = connection
        self._numbers = chain(self._due, self._numbers)
        self._due, self._missing = [], None
        yield b""

    def advance(self) -> Exchange[list[Entry] | None]:
        connection = self._connection
        found: list[Entry] = []
        while self._missing is None and not found:
            free = self._window - connection.outstanding
            if 2 * free >= self._window:
                yield self._ask(free)
            if not connection.outstanding:
                return None
            event: Event | None = yield from next_event(connection)
            while event is not None and not isinstance(event, PeerEnded):
                if not isinstance(event, EntryReceived):
                    raise unexpected(connection, event)
                if event.entry is None:
                    self._missing = event.command
                    break
                found.append(event.entry)
                event = connection.next_event()
        if found:
            del self._due[: len(found)]
            return found
        assert isinstance(self._missing, EntryQuery)
        yield from self.end(None)
        raise UnknownEntry(self._missing.number, (yield from header(connection)).total_entries)

    def _ask(self, count: int) -> bytes:
        """Requests for the next `count` numbers, or as many as there are."""
        numbers = list(islice(self._numbers, count))
        for number in numbers:
            # The common case without a call.
            if type(number) is not int or not 0 <= number <= U64_MAX:
                check_number("an entry's number", number)
        self._due += numbers
        return b"".join([self._connection.request(EntryQuery(number)) for number in numbers])

    def request_stop(self) -> bytes:
        self._numbers = iter(())
        return b""

    def end(self, limit: int | None) -> Exchange[bool]:
        while self._connection.outstanding:
            yield from next_event(self._connection)
        return True


def lines(entries: Iterable[Entry]) -> str:
    """One line per entry: number, type, length of the data."""
    return "".join([f"{entry.number} {entry.type} {len(entry.data)}\n" for entry in entries])
