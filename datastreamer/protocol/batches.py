"""Reads entries in batches: a server's capabilities, single batches, and long reads.

Owns the capabilities query, queries of times, single batches with their checks, and long reads,
with the next request sent before the last one is answered. Generators like those of `exchanges`: no
sockets, tasks or time.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final

from datastreamer._codec import Entry, EntryBatch, scan
from datastreamer.errors import (
    BadRange,
    ConnectionLost,
    NotSupported,
    ServerRefused,
    TimeUnknown,
    UnknownEntry,
    UsageError,
    refusal,
)
from datastreamer.format import (
    ENTRY_HEAD_SIZE,
    RESULT_BAD_FROM_ENTRY,
    RESULT_INVALID_COMMAND,
    RESULT_TEXTS,
    RESULT_TIME_UNKNOWN,
    U32_MAX,
    U64_MAX,
    Header,
)
from datastreamer.protocol import exchanges
from datastreamer.protocol.arguments import check_number, is_number
from datastreamer.protocol.client import ClientConnection
from datastreamer.protocol.commands import (
    BatchQuery,
    CapabilitiesQuery,
    EntryQuery,
    FilteredRead,
    HeaderQuery,
    MarksQuery,
    RangeQuery,
    TimeQuery,
)
from datastreamer.protocol.events import (
    BatchReceived,
    EntriesReceived,
    EntryReceived,
    RangeReceived,
    ResultReceived,
)
from datastreamer.protocol.exchanges import Exchange, expect, next_event, unexpected
from datastreamer.protocol.messages import NO_EXTENSIONS, Capabilities
from datastreamer.selection.clauses import Selection, within
from datastreamer.selection.times import TimeMarks

REQUESTS: Final = 2
"""Default number of requests in flight during a long read."""

BATCH_BYTES: Final = 1 << 20
"""Default limit of a batch in bytes during a long read."""

MAX_REQUESTS: Final = 64
MAX_BATCH_BYTES: Final = 64 << 20
"""Limit of a request, whatever the server offers: an answer is in memory as a whole."""

WAIT_MS: Final = 1000
"""How long the server waits for a commit at the stream's end before the client asks again."""


def probe(connection: ClientConnection) -> Exchange[Capabilities]:
    """The server's capabilities, which are requested once per connection, with the header.

    A server that does not know the query refuses it, or closes the connection; `probing` is true
    after the latter.
    """
    if connection.capabilities is not None:
        return connection.capabilities
    connection.asked_at = connection.received_bytes
    yield connection.request(CapabilitiesQuery()) + connection.request(HeaderQuery())
    while (event := connection.next_event()) is None:
        yield None
    if isinstance(event, ResultReceived) and event.number == RESULT_INVALID_COMMAND:
        capabilities = NO_EXTENSIONS
        connection.refused = True
    elif isinstance(event, Capabilities):
        capabilities = event
    else:
        raise unexpected(connection, event)
    # Some servers that refuse a query answer nothing more; the header shows that.
    while (event := connection.next_event()) is None:
        yield None
    if not isinstance(event, Header):
        raise unexpected(connection, event)
    connection.asked_at = None
    connection.capabilities = capabilities
    return capabilities


def ask_times(connection: ClientConnection, query: TimeQuery | MarksQuery) -> Exchange[TimeMarks]:
    """The answer about times; to a `TimeQuery` it is `next`. Raises `TimeUnknown`, and
    `NotSupported`."""
    if not (yield from probe(connection)).times:
        raise NotSupported(
            f"{connection.peer} does not report when entries were committed: begin at an entry or "
            "a bookmark"
        )
    try:
        return (yield from exchanges.ask(connection, query, TimeMarks))
    except ServerRefused as error:
        if error.number != RESULT_TIME_UNKNOWN:
            raise
        why = error.text.removeprefix(f"{RESULT_TEXTS[RESULT_TIME_UNKNOWN]}: ")
        raise TimeUnknown(f"{connection.peer}: {why}") from None


@dataclass(frozen=True, slots=True)
class Read:
    """A request for one batch. `from_entry`: if negative, counted from the total; `checked`:
    compare it with the total first; `fallback`: request single entries from a server without
    batches; `where`: only the entries that it selects, by the server if it can."""

    from_entry: int
    max_count: int = 0
    max_bytes: int = 0
    wait_ms: int = 0
    checked: bool = True
    fallback: bool = True
    where: Selection | None = None


def read(connection: ClientConnection, wanted: Read) -> Exchange[EntryBatch]:
    """At least one entry, or none at the end of the stream. A server without batches does not wait
    for a commit: the caller repeats the request.

    Raises `NotSupported`; for an entry after the end `UnknownEntry` if `checked`, else
    `BadFromEntry`; `UsageError` and `BadEntryType` for invalid arguments.
    """
    check_number("from_entry", wanted.from_entry, -U64_MAX)
    check_number("max_count", wanted.max_count, most=U32_MAX)
    check_number("max_bytes", wanted.max_bytes, most=U32_MAX)
    # The capabilities query requests the header, too.
    is_new = connection.capabilities is None
    capabilities = yield from probe(connection)
    if not capabilities.batch_reads and not wanted.fallback:
        raise not_supported(connection, "batches")
    where = asked_for(capabilities, wanted.where)
    singly = where is None and not capabilities.batch_reads
    number, count, wait_ms = wanted.from_entry, wanted.max_count, wanted.wait_ms
    paused = wait_ms > 0 and connection.ended_at == number
    connection.ended_at = None
    total = -1 if connection.total_entries is None else connection.total_entries
    due = number < 0 or (number > total and (wanted.checked or singly))
    # While a caller waits at the end, the query of the entry itself is enough.
    due = due or (singly and number == total and not wait_ms)
    if due and not is_new:
        total = (yield from exchanges.header(connection)).total_entries
    if number < 0:
        count = min(count or U32_MAX, -number)
        number = max(0, total + number)
    if number > total and wanted.checked:
        raise UnknownEntry(number, total)
    if number > total and singly:
        raise past_the_end(number)
    if number == total and singly and (is_new or due or paused):
        connection.ended_at = None if wait_ms else number
        return scan(b"", number)
    size = bytes_to_ask_for(capabilities, wanted.max_bytes)
    if singly:
        wanted = replace(wanted, from_entry=number, max_count=count, max_bytes=size)
        batch = yield from _one_by_one(connection, wanted, at_end=number == total)
    else:
        query = _query(number, where, U64_MAX, count, size, wait_ms)
        batch = (yield from exchanges.ask(connection, query, BatchReceived)).batch
    return batch if wanted.where in (None, where) else batch.select(wanted.where)


def asked_for(capabilities: Capabilities, where: Selection | None) -> Selection | None:
    """The selection to ask a server for, which may select more; None if it has to send all."""
    near = () if where is None else within(where)
    return near if near and capabilities.selects(near) else None


def wait_ms(seconds: float) -> int:
    """A wait in milliseconds, as requests carry it. Raises `UsageError`."""
    try:
        if 0 <= seconds * 1000 <= U32_MAX:
            return round(seconds * 1000)
    except TypeError:
        pass
    raise UsageError(f"wait must be 0 to {U32_MAX // 1000} seconds, not {seconds!r}")


def not_supported(connection: ClientConnection, what: str) -> NotSupported:
    """The exception for an extension that the server does not have."""
    return NotSupported(f"{connection.peer} does not support {what}: request single entries")


def bytes_to_ask_for(capabilities: Capabilities, wanted: int) -> int:
    """The byte limit for a request, given the limit that the caller wants (0: none)."""
    return min(wanted or capabilities.max_batch_bytes or BATCH_BYTES, MAX_BATCH_BYTES)


def _one_by_one(
    connection: ClientConnection, wanted: Read, *, at_end: bool
) -> Exchange[EntryBatch]:
    """Read from a server without batches, by single queries. `at_end`: there was no such entry when
    the total was known last, and it may still be so."""
    number, size, found, ended = wanted.from_entry, wanted.max_bytes, 0, False
    packed: list[bytes] = []
    # Few at first, since the sizes of the entries are unknown.
    window = 1 if at_end else 16
    while not ended and (not wanted.max_count or found < wanted.max_count):
        count = window if not wanted.max_count else min(window, wanted.max_count - found)
        queries = [EntryQuery(number + at) for at in range(count)]
        yield b"".join([connection.request(query) for query in queries])
        for _ in queries:
            entry = (yield from expect(connection, EntryReceived)).entry
            if ended or entry is None or (packed and size < _size(entry)):
                ended = True
                continue
            packed.append(entry.pack())
            size -= _size(entry)
            number += 1
            found += 1
        window = max(1, min(exchanges.WINDOW, size * found // (sum(map(len, packed)) or 1)))
    if not packed and not at_end:
        total = (yield from exchanges.header(connection)).total_entries
        if number > total:
            raise past_the_end(number)
        if number < total:
            # Either committed meanwhile, or indistinguishable from "not found": ask again.
            packed.append((yield from exchanges.entry(connection, number)).pack())
    return scan(b"".join(packed), wanted.from_entry)


def _size(entry: Entry) -> int:
    return ENTRY_HEAD_SIZE + len(entry.data)


@dataclass(frozen=True, slots=True)
class BatchLimits:
    """Limits of a long read: of each batch, and the number of requests in flight.

    Raises `UsageError`.
    """

    max_count: int = 0
    max_bytes: int = BATCH_BYTES
    requests: int = REQUESTS

    def __post_init__(self) -> None:
        if not is_number(self.requests, 1, MAX_REQUESTS):
            raise UsageError(f"requests must be 1 to {MAX_REQUESTS}, not {self.requests!r}")
        if not all(is_number(limit, most=U32_MAX) for limit in (self.max_count, self.max_bytes)):
            raise UsageError(
                f"the limits of a batch must be 0 to 2**32 - 1, not {self.max_count!r} entries and "
                f"{self.max_bytes!r} bytes"
            )


class BatchReading:
    """Reads entries in batches from `start` up to `stop`, or (None) up to the stream's total at
    `begin`; streams them from a server that has no batches.

    With `where`, only what it selects, from a server that can; batches have gaps then, and may be
    empty.
    """

    def __init__(
        self, start: int, stop: int | None, limits: BatchLimits, where: Selection | None = None
    ) -> None:
        if stop is not None and stop < start:
            raise BadRange(f"the range {start} to {stop} ends before it begins")
        self.stop = stop
        self._limits = limits
        self._where = where
        self._size = limits.max_bytes
        # The next entry, the next one to request, and the start of the last request.
        self._next = self._asked = self._last = start
        # Entries per request while batches are full: then requests can be sent ahead. 0: send the
        # next one only when an answer shows where it ends.
        self._stride = limits.max_count if where is None else 0
        self._epoch: int | None = None
        self._streaming: exchanges.Streaming | None = None
        # What was streamed and is not yet returned.
        self._rest: EntryBatch | None = None
        self._stopping = False
        self._connection: ClientConnection
        # Called with the total that an empty answer reports; may raise.
        self.on_nothing: Callable[[int], object] = lambda total: None

    def begin(self, connection: ClientConnection) -> Exchange[None]:
        self._connection = connection
        capabilities = yield from probe(connection)
        total = connection.total_entries
        if total is None or self._next > total:
            total = (yield from exchanges.header(connection)).total_entries
        if self._next > total:
            raise past_the_end(self._next)
        if self.stop is None:
            self.stop = total
        self._size = bytes_to_ask_for(capabilities, self._limits.max_bytes)
        if self._where is None and not capabilities.batch_reads:
            self._streaming = exchanges.Streaming(self._next, self.stop)
            yield from self._streaming.begin(connection)
        elif self._stride > capabilities.max_batch_count > 0:
            self._stride = capabilities.max_batch_count

    def advance(self) -> Exchange[EntryBatch | None]:
        connection = self._connection
        if self._streaming is not None:
            run = self._rest or (yield from self._streaming.advance())
            batch = run and self._within_limits(run)
            self._rest = None if batch is None or run is None else run.since(batch.next_number)
            return batch
        assert self.stop is not None
        while self._next < self.stop and not self._stopping:
            yield self._ask(self.stop)
            while (answer := connection.next_event()) is None:
                yield self._ask_ahead(self.stop) or None
            if isinstance(answer, ResultReceived) and answer.number == RESULT_BAD_FROM_ENTRY:
                raise truncated(connection)
            if not isinstance(answer, BatchReceived):
                raise unexpected(connection, answer)
            query, batch, total = answer.command, answer.batch, answer.total_entries
            if query.from_entry != self._next:
                continue  # of no use after a short answer
            if self._epoch not in (None, answer.epoch):
                # Comparing the last entries after reconnecting shows which ones.
                raise ConnectionLost(f"{connection.peer} truncated or changed entries meanwhile")
            self._epoch = answer.epoch
            self._next = batch.next_number
            if self._next < min(query.from_entry + query.max_count, total):
                self._stride = 0
            if batch.next_number > batch.first_number:
                return batch
            self.on_nothing(total)
        return None

    def _within_limits(self, run: EntryBatch) -> EntryBatch:
        """The first entries of a run, as a server with batches would limit them."""
        offsets, size = run.offsets, self._limits.max_bytes or run.nbytes
        fit = bisect_right(offsets, offsets[0] + size) - (size < run.nbytes)
        return run[: max(1, min(fit, self._limits.max_count or fit))]

    @property
    def _known_end(self) -> int:
        """Entries before this one are known to exist, and are wanted."""
        return min(self.stop or 0, self._connection.total_entries or 0)

    def _ask(self, stop: int) -> bytes:
        """The requests that may be sent now, for entries that are known to exist."""
        connection, sent = self._connection, []
        until = self._known_end
        if not connection.outstanding:
            self._asked = self._next
            if self._asked >= until:
                return self._request(stop, WAIT_MS)
            sent.append(self._request(stop))
        while self._stride and self._asked < until:
            if connection.outstanding >= self._limits.requests:
                break
            sent.append(self._request(stop))
        return b"".join(sent)

    def _ask_ahead(self, stop: int) -> bytes:
        """The next request, once the beginning of an answer shows where it will end; or b""."""
        connection, ahead = self._connection, self._connection.batch_ahead
        if self._stride or ahead is None or ahead >= self._known_end:
            return b""
        if self._limits.requests == 1 or connection.outstanding != 1 or self._last != self._next:
            return b""
        self._asked = ahead
        return self._request(stop)

    def _request(self, stop: int, wait_ms: int = 0) -> bytes:
        most, number = self._limits.max_count, self._asked
        if self._where is None:
            most = min(self._stride or most or U32_MAX, stop - number)
        self._last = number
        self._asked += most
        query = _query(number, self._where, stop, most, self._size, wait_ms)
        return self._connection.request(query)

    def request_stop(self) -> bytes:
        self._stopping = True
        return b"" if self._streaming is None else self._streaming.request_stop()

    def end(self, limit: int | None) -> Exchange[bool]:
        if self._streaming is not None:
            return (yield from self._streaming.end(limit))
        passed = 0
        while self._connection.outstanding:
            event = yield from next_event(self._connection)
            if isinstance(event, BatchReceived):
                passed += event.batch.nbytes
            if limit is not None and passed > limit:
                return False
        return True


def _query(
    number: int, where: Selection | None, stop: int, count: int, size: int, wait_ms: int
) -> BatchQuery | FilteredRead:
    if where is None:
        return BatchQuery(number, count, size, wait_ms)
    return FilteredRead(number, where, stop, count, size, wait_ms)


def truncated(connection: ClientConnection) -> ConnectionLost:
    """The exception for a stream that lost entries since the server reported its total: the next
    attempt shows how many."""
    return ConnectionLost(f"the stream of {connection.peer} was truncated meanwhile")


def past_the_end(number: int) -> ServerRefused:
    """The exception for a read that begins after the stream's end."""
    text = RESULT_TEXTS[RESULT_BAD_FROM_ENTRY]
    return refusal(RESULT_BAD_FROM_ENTRY, text, f"entries from {number} on")


class RangeReading:
    """The entries from one bookmark's entry to another's, both included."""

    def __init__(self, first: bytes, last: bytes) -> None:
        self._query = RangeQuery(bytes(first), bytes(last))
        self._last: int | None = None
        self._begun = False
        self._connection: ClientConnection

    def begin(self, connection: ClientConnection) -> Exchange[None]:
        self._connection = connection
        if not (yield from probe(connection)).ranges:
            raise not_supported(connection, "ranges between bookmarks")
        self._last = (yield from exchanges.ask(connection, self._query, RangeReceived)).last

    def advance(self) -> Exchange[EntryBatch | None]:
        if self._last is None:
            return None
        batch = (yield from expect(self._connection, EntriesReceived)).batch
        begun, self._begun = self._begun, True
        if not begun:
            exchanges.ensure_marked(self._connection, batch[0], self._query.first)
        if batch.next_number > self._last:
            exchanges.ensure_marked(self._connection, batch[-1], self._query.last)
            self._last = None
        return batch

    def request_stop(self) -> bytes:
        return b""

    def end(self, limit: int | None) -> Exchange[bool]:
        passed = 0
        while self._last is not None:
            batch = yield from self.advance()
            passed += 0 if batch is None else batch.nbytes
            if limit is not None and passed > limit:
                return False
        return True
