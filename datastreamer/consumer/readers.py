"""The sources of a reassembly, each read by a task of its own: servers and files.

Owns which of a source's failures is retried at once, which at longer intervals and which is final,
and that a failure of one source does not stop another. Arrivals are handed over in order; a source
waits while nobody receives them. How a server is followed is the client's. Written as steps for
every driver: must not know sockets, tasks or clocks.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final, Literal, TypeVar

from datastreamer._codec import EntryBatch
from datastreamer.client.effects import Driver, InThread, Now, Race, Sleep, Steps, Wait
from datastreamer.client.engine import ClientEngine
from datastreamer.client.face import engine_of
from datastreamer.client.iteration import Iteration
from datastreamer.client.upstream import Upstream
from datastreamer.consumer.consumption import (
    Arrival,
    Arrived,
    Begun,
    Ended,
    Memory,
    SourceBack,
    SourceFailed,
    SourceLost,
    SourceRolledBack,
)
from datastreamer.errors import (
    ConnectFailed,
    ConnectionLost,
    DatastreamerError,
    DifferentStream,
    HistoryChanged,
    PeerError,
    UnknownEntry,
    UsageError,
)
from datastreamer.format import STREAM_TYPE_SEQUENCER, U64_MAX, Header
from datastreamer.position import Identity, Position
from datastreamer.protocol import flows as exchanges
from datastreamer.protocol.arguments import check_number
from datastreamer.protocol.authentication import token_request
from datastreamer.protocol.history import Trail
from datastreamer.protocol.resume import Resumable, Rollback, different_stream, streaming
from datastreamer.protocol.retry import BACKOFF, Backoff, Recovery, RetryPolicy, check_waits
from datastreamer.reassembly.merge import Merge
from datastreamer.storage.stream import DataStream
from datastreamer.transport.connection_errors import answer_timeout
from datastreamer.transport.endpoint import Endpoint, endpoint_of

# Interval between looks at a file that another process writes.
_POLL_SECONDS: Final = 0.05
# Without `follow`, the seconds of silence after which a server is asked whether it is there.
_SILENT_SECONDS: Final = 10.0

_RARER: Final = 60
"""A source that failed is tried again after the longest wait of `backoff`, then after twice as
long each time, up to this many times that: with `BACKOFF` after 5 s to 5 minutes."""

Start = int | bytes | Literal["latest"]
"""Where a source without a saved position begins: an entry, a bookmark, or its end."""


@dataclass(frozen=True, slots=True)
class Reading:
    """How sources are read: options of `reassemble`."""

    follow: bool = True
    start: Start = 0
    stream_type: int | None = None
    timeout: float = exchanges.TIMEOUT
    heartbeat: float | None = None
    backoff: Backoff = BACKOFF
    retry_for: float | None = None

    @property
    def asked_type(self) -> int:
        """The stream type that requests name."""
        return STREAM_TYPE_SEQUENCER if self.stream_type is None else self.stream_type

    def __post_init__(self) -> None:
        if self.stream_type is not None:
            check_number("stream_type", self.stream_type)
        check_waits(self.timeout, self.retry_for, self.heartbeat)
        start = self.start
        number = isinstance(start, int) and 0 <= start <= U64_MAX
        if not number and not (isinstance(start, bytes) and start) and start != "latest":
            raise UsageError(
                "sources begin at an entry's number, a bookmark's key or \"latest\", "
                f"not at {start!r}"
            )


AnyDriver = TypeVar("AnyDriver", bound=Driver)

Put = Callable[[Arrival], Steps[None]]


class Arrivals:
    """What has arrived from all sources, up to `size` of them; a source that has more waits."""

    def __init__(self, driver: Driver, size: int) -> None:
        self._driver = driver
        self._size = size
        self._waiting: deque[Arrival] = deque()
        self._failure: Exception | None = None
        self._put = driver.signal()
        self._received = driver.signal()

    @property
    def full(self) -> bool:
        """Whether a source that has more waits."""
        return len(self._waiting) >= self._size

    def put(self, arrival: Arrival) -> Steps[None]:
        """Hand it over, as soon as there is room."""
        while self.full:
            if self._received.is_set():
                self._received = self._driver.signal()
            yield Wait(self._received)
        self._waiting.append(arrival)
        self._put.set()

    def receive(self, seconds: float) -> Steps[Arrival | None]:
        """The next one; None after that many seconds. Raises what a source failed with that is
        no source's to fail with."""
        while not self._waiting:
            if self._failure is not None:
                raise self._failure
            if self._put.is_set():
                self._put = self._driver.signal()
            try:
                yield Wait(self._put, seconds)
            except TimeoutError:
                return None
        self._received.set()
        return self._waiting.popleft()

    def fail(self, error: Exception) -> None:
        """Nothing more can be relied on."""
        self._failure = error
        self._put.set()


def readers_of(
    sources: Mapping[str, Upstream | str],
    merge: Merge,
    reading: Reading,
    arrivals: Arrivals,
    driver_to: Callable[[Upstream | None, float, int], tuple[AnyDriver, str]],
) -> list[tuple[AnyDriver, Steps[None]]]:
    """The steps that read each source, and the driver to run them."""
    found: list[tuple[AnyDriver, Steps[None]]] = []
    for name, address in sources.items():
        place = merge.source_progress(name)
        source: _Server | _File
        if isinstance(address, str):
            driver, _ = driver_to(None, reading.timeout, reading.asked_type)
            memory = Memory(name, place, always=True)
            source = _File(name, address, memory, reading, arrivals.put)
        else:
            driver, peer = driver_to(address, reading.timeout, reading.asked_type)
            memory = Memory(name, place)
            source = _Server(name, memory, reading, arrivals.put, driver, peer)
        found.append((driver, _guarded(source.run(), arrivals)))
    return found


def endpoint_to(upstream: Upstream, stream_type: int) -> Endpoint:
    """Where an upstream is. Raises `UsageError`."""
    request = token_request(stream_type, upstream.token)
    return endpoint_of(
        upstream.host, upstream.port, upstream.tls, upstream.tls_server_name, request
    )


def _guarded(steps: Steps[None], arrivals: Arrivals) -> Steps[None]:
    try:
        yield from steps
    except Exception as error:  # noqa: BLE001 - raised where arrivals are waited for
        arrivals.fail(error)


class _SourceReader:
    """What servers and files have in common."""

    def __init__(
        self,
        name: str,
        memory: Memory,
        reading: Reading,
        put: Put,
    ) -> None:
        self._name = name
        self._memory = memory
        self._reading = reading
        self._put = put
        first = reading.backoff.most
        self._waits = Backoff(first, _RARER * first)
        # The position after what was handed over, and the first entry that was not.
        self._at: Position | None = None
        self._due = 0
        self._begun = False
        # What was reported of it: whether it is lost, and what it failed with.
        self._down = False
        self._failure: DatastreamerError | None = None
        self._failed_at = 0.0
        self._attempts = 0

    def run(self) -> Steps[None]:
        """Read until its end or a final failure. Both are reported, as all failures are."""
        while True:
            failure: DatastreamerError
            try:
                yield from self._read()
                yield from self._put(Ended(self._name))
                return
            except DatastreamerError as error:
                failure = error
            except OSError as error:
                failure = PeerError(str(error))
            if not (yield from self._outlives(failure)):
                return
            self._read_again()

    def _read(self) -> Steps[None]:
        raise NotImplementedError

    # Failures

    def _outlives(self, failure: DatastreamerError) -> Steps[bool]:
        """Report a failure, unless it is like the last one; whether to try again, now."""
        now, luck = (yield Now()), random.random()  # noqa: S311
        if self._failure is None:
            self._failed_at, self._attempts = now, 0
        wait = self._waits.wait(self._attempts, luck)
        self._attempts += 1
        again = self._reading.follow and self._may_pass(failure, now + wait)
        if not again or type(failure) is not type(self._failure):
            yield from self._put(SourceFailed(self._name, failure, again))
        self._failure, self._down = failure, True
        if again:
            yield Sleep(now + wait)
        return again

    def _may_pass(self, failure: DatastreamerError, due: float) -> bool:
        """Whether the failure may have passed at the time `due`. Another history does not pass
        without a decision here."""
        final = isinstance(failure, HistoryChanged | UsageError)
        if final and not isinstance(failure, DifferentStream):
            return False
        seconds = self._reading.retry_for
        if seconds is None:
            return True
        # A loss has been retried for that long already.
        lost = isinstance(failure, ConnectFailed | ConnectionLost)
        return not lost and due <= self._failed_at + seconds

    def _read_again(self) -> None:
        """Go on after what was handed over."""
        self._memory = self._memory.behind(self._at)
        if self._at is not None:
            self._due = self._at.next_entry

    def _lost(self, error: PeerError) -> Steps[None]:
        if not self._down:
            yield from self._put(SourceLost(self._name, error))
            self._down = True

    def _joined(self, next_entry: int | None, total: int | None) -> Steps[None]:
        """It is read, from there on. One that had failed counts as back when it sends what is
        due."""
        if self._failure is None or (next_entry is not None and next_entry == total):
            yield from self._back(next_entry)

    def _back(self, next_entry: int | None) -> Steps[None]:
        if self._down:
            yield from self._put(SourceBack(self._name, next_entry))
            self._down, self._failure = False, None

    # What it has

    def _begin(self, header: Header) -> Steps[Position | bytes]:
        """Where to begin; reports entries that were taken back. Raises `HistoryChanged`."""
        stream = Identity.of(header)
        total = header.total_entries
        place = self._memory.start
        if place is not None:
            if place.stream is not None and place.stream != stream:
                raise different_stream(self._name, place.stream, header, place.next_entry)
            rollback = self._memory.meet(total)
            if rollback is not None:
                yield from self._roll_back(rollback)
            return place
        start = self._reading.start
        if isinstance(start, bytes):
            return start
        return Position(total if start == "latest" else start, b"", stream)

    def _changed(self, total: int, due: int) -> HistoryChanged:
        return HistoryChanged(
            f"{self._name} changed its history: it holds {total} entries, where entry {due} is "
            "the next that is due",
            next_entry=due,
            total_entries=total,
            first_differing=None,
        )

    def _send_begun(self, read: Position) -> Steps[None]:
        if not self._begun:
            yield from self._put(Begun(self._name, read))
            self._begun, self._at = True, read

    def _send_batch(self, batch: EntryBatch, read: Position) -> Steps[None]:
        rollback = self._memory.compare(batch)
        if rollback is not None:
            yield from self._roll_back(rollback)
        yield from self._back(batch.first_number)
        if batch.first_number < self._due:
            batch = batch[min(len(batch), self._due - batch.first_number) :]
        if batch:
            yield from self._put(Arrived(self._name, batch, read))
            self._at = read

    def _roll_back(self, rollback: Rollback) -> Steps[None]:
        yield from self._put(SourceRolledBack(self._name, rollback))
        self._at = rollback.position
        self._due = min(self._due, rollback.to_entry)


class _Server(_SourceReader):
    def __init__(
        self,
        name: str,
        memory: Memory,
        reading: Reading,
        put: Put,
        driver: Driver,
        peer: str,
    ) -> None:
        super().__init__(name, memory, reading, put)
        self._driver = driver
        self._peer = peer

    def _read(self) -> Steps[None]:
        if not self._reading.follow:
            yield from self._read_once(None)
            return
        recovery: Recovery | None = None
        retry_policy = RetryPolicy(True, self._reading.retry_for, self._reading.backoff)
        while True:
            began = False

            def begin() -> None:
                nonlocal began
                began = True

            try:
                yield from self._read_once(begin)
            except (ConnectFailed, ConnectionLost) as error:
                # The client itself retries a connection that was good: it has given up.
                if began:
                    raise
                now, luck = (yield Now()), random.random()  # noqa: S311
                recovery = recovery or Recovery(retry_policy, now)
                answered = isinstance(error, ConnectFailed)
                recovery.lost(error, answered=answered, now=now, luck=luck)
                yield from self._lost(error)
                yield Sleep(recovery.due)

    def _read_once(self, begun: Callable[[], None] | None) -> Steps[None]:
        reading = self._reading
        heartbeat = reading.heartbeat
        if heartbeat is None and not reading.follow:
            heartbeat = _SILENT_SECONDS
        engine = engine_of(
            self._driver,
            self._peer,
            stream_type=reading.asked_type,
            timeout=reading.timeout,
            answer_timeout=reading.timeout,
            resume=reading.follow,
            retry_for=reading.retry_for,
            backoff=reading.backoff,
            heartbeat=heartbeat,
        )
        yield from engine.open()
        try:
            yield from self._read_from(engine, begun)
        finally:
            yield from engine.close()

    def _read_from(self, engine: ClientEngine, begun: Callable[[], None] | None) -> Steps[None]:
        header = yield from self._header(engine)
        start = yield from self._begin(header)
        stop = None if self._reading.follow else header.total_entries
        if isinstance(start, Position) and self._memory.start is None:
            if start.next_entry > header.total_entries:
                raise UnknownEntry(start.next_entry, header.total_entries)
        elif stop is not None and isinstance(start, Position) and start.next_entry > stop:
            raise self._changed(stop, start.next_entry)
        work = streaming(
            None,
            start if isinstance(start, bytes) else None,
            stop,
            from_position=start if isinstance(start, Position) else None,
            follow_rollbacks=True,
            careful=engine.resumes,
        )
        batches = _Following(self, engine, work)
        yield from batches.begin()
        if begun is not None:
            begun()
        next_entry = None
        if isinstance(start, Position):
            yield from self._send_begun(start)
            next_entry = start.next_entry
        yield from self._joined(next_entry, header.total_entries)
        while (batch := (yield from batches.next())) is not None:
            position = batches.position
            assert position is not None
            if isinstance(start, bytes):
                yield from self._send_begun(Position(batch.first_number, b"", position.stream))
            yield from self._send_batch(batch, position)

    def _header(self, engine: ClientEngine) -> Steps[Header]:
        """The header, within the timeout as a whole: a server may send it byte by byte."""
        found: list[Header] = []

        def ask() -> Steps[None]:
            found.append((yield from engine.ask(exchanges.header)))

        def expire() -> Steps[None]:
            yield Sleep((yield Now()) + self._reading.timeout)

        yield Race((ask(), expire()))
        if not found:
            raise answer_timeout(self._peer, self._reading.timeout)
        return found[0]


class _Following(Iteration[EntryBatch]):
    """A server's batches, which reports to its source."""

    reports_outages = True

    def __init__(self, source: _Server, engine: ClientEngine, work: Resumable) -> None:
        super().__init__(engine, work)
        self._source = source
        self._client = engine

    def report_rollback(self, rollback: Rollback) -> Steps[None]:
        return self._source._roll_back(rollback)

    def report_outage(self, error: PeerError | None) -> Steps[None]:
        if error is not None:
            return self._source._lost(error)
        place = self.position
        due = None if place is None else place.next_entry
        return self._source._joined(due, self._client.total_entries)


class _File(_SourceReader):
    def __init__(
        self,
        name: str,
        path: str,
        memory: Memory,
        reading: Reading,
        put: Put,
    ) -> None:
        super().__init__(name, memory, reading, put)
        self._path = path

    def _read(self) -> Steps[None]:
        stream = yield InThread(self._open)
        try:
            while (yield from self._read_from(stream)):
                self._read_again()
        finally:
            yield InThread(stream.close)

    def _open(self) -> DataStream:
        return DataStream.open(
            self._path,
            stream_type=self._reading.stream_type,
            read_only=True,
            follow=self._reading.follow,
        )

    def _read_from(self, stream: DataStream) -> Steps[bool]:
        """Whether what was read has changed since: then it must be compared."""
        header = stream.header
        identity = Identity.of(header)
        start = yield from self._begin(header)
        number = stream.bookmark(start) if isinstance(start, bytes) else start.next_entry
        if number > header.total_entries:
            raise UnknownEntry(number, header.total_entries)
        yield from self._send_begun(Position(number, b"", identity))
        yield from self._joined(number, header.total_entries)
        trail = Trail(number)
        epoch = stream.epoch
        while True:
            batches = stream.batches(number, None)
            while (batch := (yield InThread(next, (batches, None)))) is not None:
                number = batch.next_number
                trail.extend(batch)
                yield from self._send_batch(batch, Position(number, trail.hashes, identity))
            if not self._reading.follow:
                return False
            while not stream.refresh():
                yield Sleep((yield Now()) + _POLL_SECONDS)
            if stream.epoch != epoch or stream.total_entries < number:
                return True
