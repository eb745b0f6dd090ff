"""What a client says and hears, in order: each exchange as steps for whoever has a socket.

Owns the sequence of requests and answers, and what an answer means to the caller.
Must not know sockets, tasks or time: a `Flow` is a generator that yields the bytes to
send, or None where more is to be received into the connection, and returns the
outcome. The Trio client and the blocking one drive the same flows.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterable
from itertools import islice
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
from datastreamer.protocol.events import (
    EntriesReceived,
    EntryReceived,
    Event,
    HashReceived,
    HeaderReceived,
    PeerEnded,
    ResultReceived,
)
from datastreamer.protocol.filter.messages import FilteredStart, FilteredStartBookmark
from datastreamer.protocol.following import (
    ChangeReceived,
    FollowBegun,
    FollowStart,
    HashQuery,
    KnownHistory,
    RangeHash,
)
from datastreamer.protocol.messages import (
    BookmarkQuery,
    CommitStart,
    EntryQuery,
    HeaderQuery,
    Start,
    StartBookmark,
    Stop,
)

T = TypeVar("T")
Part_co = TypeVar("Part_co", covariant=True)
Flow: TypeAlias = Generator[bytes | None, None, T]

TIMEOUT: Final = 10.0
"""Seconds for making a connection, unless the caller says otherwise."""

WINDOW: Final = 256
"""Queries underway at once, unless the caller says otherwise."""

DRAIN_LIMIT: Final = 16 << 20
"""Bytes that are worth reading behind a Stop before a new connection is cheaper."""

MAX_WINDOW: Final = 1024
"""Queries underway at once. 24 KiB of requests fit into the system's buffers: with
more, both sides could wait for each other to read."""


def next_event(connection: ClientConnection) -> Flow[Event]:
    """The next event; a refusal and the end of the connection are raised."""
    while (event := connection.next_event()) is None:
        yield None
    if isinstance(event, PeerEnded):
        raise unexpected(connection, event)
    if isinstance(event, ResultReceived) and event.number != RESULT_OK:
        raise unexpected(connection, event)
    return event


def unexpected(connection: ClientConnection, event: Event) -> PeerError:
    """The exception for an event that is not the one that was due."""
    told = f"{connection.peer} closed the connection"
    if isinstance(event, ResultReceived) and event.number != RESULT_OK:
        return refusal(event.number, event.text, str(event.command))
    if not isinstance(event, PeerEnded):
        return ProtocolViolation(f"{connection.peer} sent {type(event).__name__} out of turn")
    if event.unread:
        return ConnectionLost(f"{told} in the middle of an answer or entry; connect again")
    if not connection.received_bytes:
        return unanswered(connection, told)
    return ConnectionLost(f"{told}; connect again")


def unanswered(connection: ClientConnection, told: str) -> ConnectionLost:
    """The exception for a connection that ended before anything was received on it."""
    return ConnectionLost(
        f"{told} without an answer: servers do that to a client of another stream type "
        f"than theirs (is it {connection.stream_type}?), and where they have no place for more"
    )


def header(connection: ClientConnection) -> Flow[Header]:
    """Ask for the header."""
    yield connection.request(HeaderQuery())
    while (event := connection.next_event()) is None:
        yield None
    if not isinstance(event, HeaderReceived):
        raise unexpected(connection, event)
    return event.header


def entry(connection: ClientConnection, number: int) -> Flow[Entry]:
    """Ask for one entry; `UnknownEntry` where there is none."""
    total = -1
    while True:
        yield connection.request(EntryQuery(number))
        while (event := connection.next_event()) is None:
            yield None
        if not isinstance(event, EntryReceived):
            raise unexpected(connection, event)
        if event.entry is not None:
            return event.entry
        before, total = total, (yield from header(connection)).total_entries
        # It may have been committed between the two answers: then it is asked for again.
        if number == 0 < total == before:
            # Entry 0 without data looks like that where its type is the one of this answer.
            return Entry(0, TYPE_NOT_FOUND, b"")
        if number >= total or total == before:
            raise UnknownEntry(number, total)


def bookmark(connection: ClientConnection, key: bytes) -> Flow[Entry]:
    """Ask for the first event at or after a bookmark; `UnknownBookmark` where there is none."""
    yield connection.request(BookmarkQuery(key))
    while (event := connection.next_event()) is None:
        yield None
    if not isinstance(event, EntryReceived):
        raise unexpected(connection, event)
    if event.entry is None:
        # The answer is the same where the bookmark is the stream's last entry.
        told = f"no bookmark 0x{key.hex()} in the stream, or no event follows it"
        raise UnknownBookmark(key, told)
    if event.entry.is_bookmark:
        # So say some servers where only bookmarks follow.
        raise UnknownBookmark(key, f"no event follows bookmark 0x{key.hex()}")
    return event.entry


def range_hash(connection: ClientConnection, wanted: HashQuery) -> Flow[RangeHash]:
    """Ask for a hash of entries, or of the first of them that the server's limits allow."""
    yield connection.request(wanted)
    event = yield from next_event(connection)
    if not isinstance(event, HashReceived):
        raise unexpected(connection, event)
    return event.hashed


def ensure_marked(connection: ClientConnection, found: Entry, key: bytes) -> None:
    """Raise where a server has sent another entry in place of a bookmark that was asked for: an
    index that is behind its stream names one."""
    if not found.is_bookmark or found.data != key:
        raise ProtocolViolation(
            f"{connection.peer} sent entry {found.number} in place of bookmark 0x{key.hex()}, "
            "which it is not: its index does not fit its stream"
        )


class Work(Protocol[Part_co]):
    """An exchange that goes on over many calls, between which it can be left alone."""

    def begin(self, connection: ClientConnection) -> Flow[None]:
        """Ask for it. What is raised here leaves nothing begun."""

    def advance(self) -> Flow[Part_co | None]:
        """The next entries, one or more; None when there are no more."""

    def request_stop(self) -> bytes:
        """End it while `advance` waits: what to send for that, b"" for nothing.

        What still comes counts; `advance` says None after it.
        """

    def end(self, limit: int | None) -> Flow[bool]:
        """Make the connection fit for the next request; what still comes is dropped.

        False if more than `limit` bytes stand before that, which were not read.
        """


def restore(
    connection: ClientConnection, work: Work[object] | None, suspect: bool, limit: int | None
) -> Flow[bool]:
    """End `work`, and try a connection that is `suspect` because of a refusal.

    A server may have closed it, or refuse everything from then on. Whether the
    connection is fit for a request; `PeerError` says no as well.
    """
    if work is not None and not (yield from work.end(limit)):
        return False
    if suspect:
        yield from header(connection)
    return True


class Streaming:
    """From a Start to its Stop: runs of entries.

    `start` is an entry number or a bookmark's key; `stop` is the number at which to
    end, not included: without it the streaming goes on with what is committed later. With
    `types`, which the server is known to choose by, runs have gaps and may be empty. With
    `commits`, which the server is known to tell, `commit_ahead` says where they end. With
    `known`, from a server that reports changes, `changes` receives those since that state in
    order: a run of no entries is handed out for each.
    """

    def __init__(
        self,
        start: int | bytes,
        stop: int | None = None,
        types: tuple[int, ...] | None = None,
        *,
        commits: bool = False,
        known: KnownHistory | None = None,
    ) -> None:
        self._command: (
            Start
            | CommitStart
            | FollowStart
            | StartBookmark
            | FilteredStart
            | FilteredStartBookmark
        )
        if isinstance(start, int):
            self._command = Start(start) if types is None else FilteredStart(start, types)
            if commits:
                self._command = CommitStart(start)
            if known is not None:
                self._command = FollowStart(start, known)
            if stop is not None and stop < start:
                raise BadRange(f"the range {start} to {stop} ends before it begins")
        elif types is None:
            self._command = StartBookmark(bytes(start))
        else:
            self._command = FilteredStartBookmark(bytes(start), types)
        self._stop = stop
        self._complete = stop == start
        self._stop_sent = self._complete
        self._stopped = self._complete
        # The run in which it ends.
        self._last: EntryBatch | None = None
        self._connection: ClientConnection
        self.begun: FollowBegun | None = None
        self.changes: deque[ChangeReceived] = deque()

    @property
    def commit_ahead(self) -> int | None:
        """Where the operations end of which entries are handed out now; None: it is not told."""
        return self._connection.commit_ahead

    def begin(self, connection: ClientConnection) -> Flow[None]:
        self._connection = connection
        if self._complete:
            return
        yield connection.request(self._command)
        event = yield from next_event(connection)
        if not isinstance(event, ResultReceived):
            raise unexpected(connection, event)
        if isinstance(self._command, FollowStart):
            event = yield from next_event(connection)
            if not isinstance(event, FollowBegun):
                raise unexpected(connection, event)
            self.begun = event

    @property
    def hungry(self) -> bool:
        """Whether `advance` would do nothing before more bytes are there."""
        return self._open and self._connection.hungry

    @property
    def _open(self) -> bool:
        return not (self._complete or self._stopped) and self._last is None

    def arrived(self) -> EntryBatch | None:
        """What `advance` would say, without its steps, where the next run has arrived and is not
        the last; None: ask `advance`."""
        if not self._open:
            return None
        run = self._connection.next_run()
        if run is not None and self._stop is not None and run.next_number >= self._stop:
            self._last = run
            return None
        return run

    def advance(self) -> Flow[EntryBatch | None]:
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
                return scan(b"", self._connection.next_number)
            if not isinstance(event, EntriesReceived):
                raise unexpected(self._connection, event)
            batch = event.batch
        if self._stop is not None and batch.next_number >= self._stop:
            # The Stop goes out at once, so that the server does not send on; what it
            # has sent already is read when the connection is needed.
            self._complete = True
            yield self.request_stop()
            batch = batch.before(self._stop)
        return batch if batch.next_number > batch.first_number else None

    def request_stop(self) -> bytes:
        if self._stop_sent:
            return b""
        self._stop_sent = True
        return self._connection.request(Stop())

    def end(self, limit: int | None) -> Flow[bool]:
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
    """Entries by number, with up to `window` queries underway: lists of entries."""

    def __init__(self, numbers: Iterable[int], window: int) -> None:
        if not 1 <= window <= MAX_WINDOW:
            raise UsageError(f"the window is 1 to {MAX_WINDOW} queries, not {window}")
        self._numbers = iter(numbers)
        self._window = window
        self._missing: EntryQuery | BookmarkQuery | None = None
        self._connection: ClientConnection

    def begin(self, connection: ClientConnection) -> Flow[None]:
        self._connection = connection
        yield b""

    def advance(self) -> Flow[list[Entry] | None]:
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
        return b"".join([self._connection.request(EntryQuery(number)) for number in numbers])

    def request_stop(self) -> bytes:
        self._numbers = iter(())
        return b""

    def end(self, limit: int | None) -> Flow[bool]:
        while self._connection.outstanding:
            yield from next_event(self._connection)
        return True


def lines(entries: Iterable[Entry]) -> str:
    """A line for each entry: number, type, length of data."""
    return "".join([f"{entry.number} {entry.type} {len(entry.data)}\n" for entry in entries])
