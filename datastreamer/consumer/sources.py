"""The sources of a reassembly, each read by a task of its own: servers, files and archives.

Owns which of a source's failures is retried at once, which at longer intervals and which is final,
and that a failure of one source does not stop another. A source appends what it reads to the
`Arrivals`, in order, and waits while they are full. The connection to a server is the client's.
Written as steps for every driver: must not know sockets, tasks or clocks.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from functools import partial
from typing import Final, TypeAlias

from datastreamer._codec import EntryBatch
from datastreamer.archive import open_to_read
from datastreamer.client.effects import (
    AsyncDriver,
    Beside,
    Driver,
    DriverTo,
    InThread,
    Now,
    Race,
    Sleep,
    Steps,
)
from datastreamer.client.engine import ClientEngine
from datastreamer.client.iteration import Iteration
from datastreamer.client.upstream import Upstream
from datastreamer.consumer.arrivals import Arrivals
from datastreamer.consumer.options import ReassemblyOptions
from datastreamer.consumer.state import (
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
from datastreamer.format import Header
from datastreamer.position import Identity, Position
from datastreamer.printable import counted
from datastreamer.protocol import exchanges
from datastreamer.protocol.filter.compare import compare, difference
from datastreamer.protocol.history import Trail, different_stream
from datastreamer.protocol.resume import Resumable, Rollback
from datastreamer.protocol.retry import Backoff, Recovery, RetryPolicy
from datastreamer.reassembly.merge import Merge
from datastreamer.selection.times import moment_ms
from datastreamer.storage.stream import DataStream
from datastreamer.transport.connection_errors import answer_timeout

# Interval between checks of a file that another process writes.
_POLL_SECONDS: Final = 0.05
# Without `follow`, the seconds of silence after which a server is checked on a second connection.
_SILENT_SECONDS: Final = 10.0

_RARER: Final = 60
"""A source that failed is retried after the longest wait of `backoff`; each further wait is twice
as long, up to this many times the first: with `BACKOFF` 5 s to 5 minutes."""

Compare: TypeAlias = Callable[[Trail, int], Steps[int | None]]
"""Finds the first entry before a number that a source has not as it is remembered."""


def readers_of(
    sources: Mapping[str, Upstream | str],
    merge: Merge,
    options: ReassemblyOptions,
    arrivals: Arrivals,
    driver_to: DriverTo,
) -> list[Steps[None]]:
    """The steps that read each source, by a driver of its own. Raises `UsageError`."""
    found: list[Steps[None]] = []
    for name, address in sources.items():
        place = merge.source_progress(name)
        source: _Server | _File
        if isinstance(address, str):
            driver = driver_to()
            memory = Memory(name, place, always=True)
            source = _File(name, memory, options, arrivals.put, address)
        else:
            endpoint = address.endpoint(options.asked_type)
            driver = driver_to(endpoint)
            memory = Memory(name, place)
            source = _Server(name, memory, options, arrivals.put, driver, endpoint.peer)
        found.append(_guarded(source.run(), driver, arrivals))
    return found


def _guarded(steps: Steps[None], driver: AsyncDriver, arrivals: Arrivals) -> Steps[None]:
    try:
        yield Beside(steps, driver)
    except Exception as error:  # noqa: BLE001 - raised where arrivals are waited for
        arrivals.fail(error)


@dataclass(eq=False)
class _SourceReader:
    """The part that servers and files have in common."""

    _name: str
    _memory: Memory
    _options: ReassemblyOptions
    _put: Callable[[Arrival], Steps[None]]
    # The position after what was delivered, and the first entry that was not.
    _at: Position | None = field(default=None, init=False)
    _due: int = field(default=0, init=False)
    _begun: bool = field(default=False, init=False)
    # What was reported: whether the source is lost, and its failure.
    _down: bool = field(default=False, init=False)
    _failure: DatastreamerError | None = field(default=None, init=False)
    _failed_at: float = field(default=0.0, init=False)
    _attempts: int = field(default=0, init=False)

    def run(self) -> Steps[None]:
        """Read until the end or a final failure. Reports both, and every other failure."""
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
        """Report a failure, unless it is like the last one; then wait. Whether to retry."""
        now, luck = (yield Now()), random.random()  # noqa: S311
        if self._failure is None:
            self._failed_at, self._attempts = now, 0
        first = self._options.given["backoff"].most
        wait = Backoff(first, _RARER * first).wait(self._attempts, luck)
        self._attempts += 1
        again = self._options.given["follow"] and self._may_pass(failure, now + wait)
        if not again or type(failure) is not type(self._failure):
            yield from self._put(SourceFailed(self._name, failure, again))
        self._failure, self._down = failure, True
        if again:
            yield Sleep(now + wait)
        return again

    def _may_pass(self, failure: DatastreamerError, due: float) -> bool:
        """Whether the failure may have passed at the time `due`. A rewritten history needs a
        decision of the user."""
        final = isinstance(failure, HistoryChanged | UsageError)
        if final and not isinstance(failure, DifferentStream):
            return False
        seconds = self._options.given["retry_for"]
        if seconds is None:
            return True
        # The client has retried a loss for that long already.
        lost = isinstance(failure, ConnectFailed | ConnectionLost)
        return not lost and due <= self._failed_at + seconds

    def _read_again(self) -> None:
        """Continue after what was delivered."""
        self._memory = self._memory.behind(self._at)
        if self._at is not None:
            self._due = self._at.next_entry

    def _lost(self, error: PeerError) -> Steps[None]:
        if not self._down:
            yield from self._put(SourceLost(self._name, error))
            self._down = True

    def _joined(self, next_entry: int | None, total: int | None) -> Steps[None]:
        """The source is read, from `next_entry` on. After a failure it counts as back only when it
        sends entries that are due."""
        if self._failure is None or (next_entry is not None and next_entry == total):
            yield from self._back(next_entry)

    def _back(self, next_entry: int | None) -> Steps[None]:
        if self._down:
            yield from self._put(SourceBack(self._name, next_entry))
            self._down, self._failure = False, None

    # What it has

    def _begin(self, header: Header, compare: Compare) -> Steps[Position | bytes | datetime]:
        """Where to begin; reports entries that were truncated. Raises `HistoryChanged`."""
        stream = Identity.of(header)
        total = header.total_entries
        memory, place = self._memory, self._memory.start
        if place is not None:
            if place.stream is not None and place.stream != stream:
                raise different_stream(self._name, place.stream, header, place.next_entry)
            trail, differing = memory.trail, None
            if trail is not None:
                until = min(trail.next_number, total)
                if trail.first_number < until:
                    differing = yield from compare(trail, until)
                rollback = memory.judge(differing, total)
                if rollback is not None:
                    yield from self._roll_back(rollback)
            return memory.start or place
        start = self._options.given["start"]
        if isinstance(start, bytes | datetime):
            return start
        return Position(total if start == "latest" else start, b"", stream)

    def _changed(self, total: int, due: int) -> HistoryChanged:
        return HistoryChanged(
            f"{self._name} changed its history: it holds {counted(total)}, where entry {due} is "
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
        yield from self._back(batch.first_number)
        batch = batch.since(self._due)
        # One without entries moves the position.
        if batch.first_number < batch.next_number:
            yield from self._put(Arrived(self._name, batch, read))
            self._at = read

    def _roll_back(self, rollback: Rollback) -> Steps[None]:
        yield from self._put(SourceRolledBack(self._name, rollback))
        if self._at is not None and self._at.next_entry > rollback.to_entry:
            self._at = rollback.position
        self._due = min(self._due, rollback.to_entry)


@dataclass(eq=False)
class _Server(_SourceReader):
    _driver: Driver
    _peer: str
    # Whether the current client has begun to stream.
    _streaming: bool = field(default=False, init=False)

    def _read(self) -> Steps[None]:
        options = self._options
        recovery: Recovery | None = None
        while True:
            self._streaming = False
            try:
                yield from self._read_once()
            except (ConnectFailed, ConnectionLost) as error:
                # The client itself retries a connection that was good: it has given up.
                again = self._memory.rereads(self._at)
                if (self._streaming and not again) or not options.given["follow"]:
                    raise
                if self._streaming:
                    recovery = None
                    self._read_again()
                now, luck = (yield Now()), random.random()  # noqa: S311
                if recovery is None:
                    recovery = Recovery(
                        RetryPolicy(True, options.given["retry_for"], options.given["backoff"]), now
                    )
                answered = isinstance(error, ConnectFailed)
                recovery.lost(error, answered=answered, now=now, luck=luck)
                yield from self._lost(error)
                yield Sleep(recovery.due)
            else:
                return

    def _read_once(self) -> Steps[None]:
        given = self._options.given
        heartbeat = given["heartbeat"]
        if heartbeat is None and not given["follow"]:
            heartbeat = _SILENT_SECONDS
        engine = ClientEngine(
            self._driver,
            self._peer,
            stream_type=self._options.asked_type,
            timeout=given["timeout"],
            answer_timeout=given["timeout"],
            resume=given["follow"],
            retry_for=given["retry_for"],
            backoff=given["backoff"],
            heartbeat=heartbeat,
            batch_reads=given["batch_reads"],
        )
        yield from engine.open()
        try:
            yield from self._read_from(engine)
        finally:
            yield from engine.close()

    def _read_from(self, engine: ClientEngine) -> Steps[None]:
        options = self._options
        header = yield from self._header(engine)
        start = yield from self._begin(header, partial(engine.ask, compare))
        stop = None if self._options.given["follow"] else header.total_entries
        if isinstance(start, Position) and self._memory.start is None:
            if start.next_entry > header.total_entries:
                raise UnknownEntry(start.next_entry, header.total_entries)
        elif stop is not None and isinstance(start, Position) and start.next_entry > stop:
            raise self._changed(stop, start.next_entry)
        work = Resumable(
            None,
            start if isinstance(start, bytes) else None,
            stop,
            from_position=start if isinstance(start, Position) else None,
            from_ms=moment_ms(start) if isinstance(start, datetime) else None,
            where=options.where,
            follow_rollbacks=True,
            careful=engine.resumes,
        )
        batches = _Following(self, engine, work)
        yield from batches.begin()
        self._streaming = True
        next_entry = None
        if isinstance(start, Position):
            yield from self._send_begun(start)
            next_entry = start.next_entry
        yield from self._joined(next_entry, header.total_entries)
        while (batch := (yield from batches.next())) is not None:
            position = batches.position
            assert position is not None
            if not isinstance(start, Position):
                yield from self._send_begun(Position(batch.first_number, b"", position.stream))
            yield from self._send_batch(batch, position)

    def _header(self, engine: ClientEngine) -> Steps[Header]:
        """The header, within the timeout as a whole: a server may send it byte by byte."""
        found: list[Header] = []

        def ask() -> Steps[None]:
            found.append((yield from engine.ask(exchanges.header)))

        def expire() -> Steps[None]:
            yield Sleep((yield Now()) + self._options.given["timeout"])

        yield Race((ask(), expire()))
        if not found:
            raise answer_timeout(self._peer, self._options.given["timeout"])
        return found[0]


class _Following(Iteration[EntryBatch]):
    """A server's batches; reports outages and rollbacks to the reader."""

    reports_outages = True
    keeps_empty = True

    def __init__(self, source: _Server, engine: ClientEngine, work: Resumable) -> None:
        super().__init__(engine, work)
        self._source = source
        self._client = engine

    def report_rollback(self, rollback: Rollback) -> Steps[None]:
        return self._source._roll_back(rollback)

    def report_outage(self, error: PeerError | None) -> Steps[None]:
        if error is not None:
            again = self._source._memory.rereads(self._source._at)
            if again and isinstance(error, ConnectionLost):
                # What is remembered is compared again, over a new connection.
                raise error
            return self._source._lost(error)
        place = self.position
        due = None if place is None else place.next_entry
        return self._source._joined(due, self._client.total_entries)


@dataclass(eq=False)
class _File(_SourceReader):
    _path: str

    def _read(self) -> Steps[None]:
        stream = yield InThread(self._open)
        try:
            while (yield from self._read_from(stream)):
                self._read_again()
        finally:
            yield InThread(stream.close)

    def _open(self) -> DataStream:
        given = self._options.given
        return open_to_read(self._path, stream_type=given["stream_type"], follow=given["follow"])

    def _read_from(self, stream: DataStream) -> Steps[bool]:
        """Read to the end. True if entries that were read may have changed: compare them."""
        header = stream.header
        identity, epoch = Identity.of(header), stream.epoch
        start = yield from self._begin(header, partial(self._compare, stream))
        if isinstance(start, datetime):
            number = yield InThread(stream.entry_at, (moment_ms(start),))
        elif isinstance(start, bytes):
            number = yield InThread(stream.bookmark, (start,))
        else:
            number = start.next_entry
        if number > header.total_entries:
            raise UnknownEntry(number, header.total_entries)
        yield from self._send_begun(Position(number, b"", identity))
        yield from self._joined(number, header.total_entries)
        trail = Trail(number)
        while True:
            batches = stream.batches(number, None)
            while (batch := (yield InThread(next, (batches, None)))) is not None:
                number = batch.next_number
                trail.extend(batch)
                yield from self._send_batch(batch, trail.position(identity))
            if not self._options.given["follow"]:
                return False
            while not (yield InThread(stream.refresh)):
                yield Sleep((yield Now()) + _POLL_SECONDS)
            if stream.epoch != epoch or stream.total_entries < number:
                return True

    def _compare(self, stream: DataStream, trail: Trail, until: int) -> Steps[int | None]:
        """The first entry before `until` that differs from the remembered ones; None if none."""
        batches = stream.batches(trail.first_number, until)
        while (batch := (yield InThread(next, (batches, None)))) is not None:
            differing = difference(trail, batch)
            if differing is not None:
                return differing
        return None
