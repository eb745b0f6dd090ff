"""The sources of a reassembly, each read by a task of its own: servers, and files.

Owns which of a source's failures is waited out, which is tried again more rarely and which is
its end, and that none of them is another's. What arrives is sent on in order; a source that is
not taken from waits with what it has. How a server is followed is the client's.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Final, Literal

import trio

from datastreamer._codec import EntryBatch
from datastreamer.client.trio_driver import connect
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
from datastreamer.protocol.history import Trail
from datastreamer.protocol.resume import Rollback, different_stream
from datastreamer.protocol.retry import BACKOFF, Backoff, Endurance, Recovery, check_waits
from datastreamer.reassembly.progress import SourceProgress
from datastreamer.storage.stream import DataStream

# How often a file is looked at that another process writes.
_POLL_SECONDS: Final = 0.05
# Who reads up to the end asks a server so soon whether it is still there.
_SILENT_SECONDS: Final = 10.0

_RARER: Final = 60
"""A source that failed is tried again after the longest wait for one that is lost, then after
twice as long each time, up to so many times that: with `BACKOFF` after 5 s to 5 minutes."""

Start = int | bytes | Literal["latest"]
"""Where a source begins that has no place: an entry, a bookmark, or behind what is there."""


@dataclass(frozen=True, slots=True)
class Reading:
    """How sources are read; what `reassemble` says of each."""

    follow: bool = True
    start: Start = 0
    stream_type: int | None = None
    timeout: float = exchanges.TIMEOUT
    heartbeat: float | None = None
    backoff: Backoff = BACKOFF
    retry_for: float | None = None

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


class Sources:
    """All of them. `arrivals` ends when each has ended or failed."""

    def __init__(
        self,
        sources: Mapping[str, Upstream | str],
        places: Mapping[str, SourceProgress | None],
        reading: Reading,
    ) -> None:
        self._sources = sources
        self._places = places
        self._reading = reading
        # Each source has a batch underway here, and another in its hands.
        self._send, self.arrivals = trio.open_memory_channel[Arrival](len(sources))

    async def run(self) -> None:
        """Read until all is over, or until cancelled."""
        async with trio.open_nursery() as nursery:
            with self._send:
                for name, address in self._sources.items():
                    source: _Server | _File
                    put, place = self._send.clone(), self._places.get(name)
                    if isinstance(address, str):
                        memory = Memory(name, place, always=True)
                        source = _File(name, address, memory, self._reading, put)
                    else:
                        source = _Server(name, address, Memory(name, place), self._reading, put)
                    nursery.start_soon(source.run)


class _Source:
    """What servers and files have in common."""

    def __init__(
        self,
        name: str,
        memory: Memory,
        reading: Reading,
        put: trio.MemorySendChannel[Arrival],
    ) -> None:
        self._name = name
        self._memory = memory
        self._reading = reading
        self._put = put
        first = reading.backoff.most
        self._waits = Backoff(first, _RARER * first)
        # The place behind what was sent, and what need not be sent another time.
        self._at: Position | None = None
        self._due = 0
        self._begun = False
        # What is told of it now: whether it is lost, and what it failed with.
        self._down = False
        self._failure: DatastreamerError | None = None
        self._failed_at = 0.0
        self._attempts = 0

    async def run(self) -> None:
        """Until its end, or a failure that is final. Both are told, as all failures are."""
        with self._put:
            while True:
                failure: DatastreamerError
                try:
                    await self._read()
                    await self._put.send(Ended(self._name))
                    return
                except (DatastreamerError, OSError) as error:
                    failure = (
                        error if isinstance(error, DatastreamerError) else PeerError(str(error))
                    )
                if not await self._outlives(failure):
                    return
                self._read_again()

    async def _read(self) -> None:
        raise NotImplementedError

    # Failures

    async def _outlives(self, failure: DatastreamerError) -> bool:
        """Tell of a failure, unless it is the one before; whether to try again, now."""
        now, luck = trio.current_time(), random.random()  # noqa: S311
        if self._failure is None:
            self._failed_at, self._attempts = now, 0
        wait = self._waits.wait(self._attempts, luck)
        self._attempts += 1
        again = self._reading.follow and self._may_pass(failure, now + wait)
        if not again or type(failure) is not type(self._failure):
            await self._put.send(SourceFailed(self._name, failure, again))
        self._failure, self._down = failure, True
        if again:
            await trio.sleep(wait)
        return again

    def _may_pass(self, failure: DatastreamerError, due: float) -> bool:
        """Whether the source may be as it should be at the time `due`, without anybody's
        decision here: where its history is another it will not."""
        final = isinstance(failure, HistoryChanged | UsageError)
        if final and not isinstance(failure, DifferentStream):
            return False
        seconds = self._reading.retry_for
        if seconds is None:
            return True
        # A loss has been waited for so long when it comes here.
        lost = isinstance(failure, ConnectFailed | ConnectionLost)
        return not lost and due <= self._failed_at + seconds

    def _read_again(self) -> None:
        """Go on behind what was sent."""
        self._memory = self._memory.behind(self._at)
        if self._at is not None:
            self._due = self._at.next_entry

    async def _lost(self, error: PeerError) -> None:
        if not self._down:
            await self._put.send(SourceLost(self._name, error))
            self._down = True

    async def _joined(self, next_entry: int | None, total: int | None) -> None:
        """It is read, from there on. One that had failed is so when it sends what is due."""
        if self._failure is None or (next_entry is not None and next_entry == total):
            await self._back(next_entry)

    async def _back(self, next_entry: int | None) -> None:
        if self._down:
            await self._put.send(SourceBack(self._name, next_entry))
            self._down, self._failure = False, None

    # What it has

    async def _begin(self, header: Header) -> Position | bytes:
        """Where to begin; tells of entries that are gone. Raises `HistoryChanged`."""
        stream = Identity.of(header)
        total = header.total_entries
        place = self._memory.start
        if place is not None:
            if place.stream is not None and place.stream != stream:
                raise different_stream(self._name, place.stream, header, place.next_entry)
            rollback = self._memory.meet(total)
            if rollback is not None:
                await self._roll_back(rollback)
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

    async def _send_begun(self, read: Position) -> None:
        if not self._begun:
            await self._put.send(Begun(self._name, read))
            self._begun, self._at = True, read

    async def _send_batch(self, batch: EntryBatch, read: Position) -> None:
        rollback = self._memory.compare(batch)
        if rollback is not None:
            await self._roll_back(rollback)
        await self._back(batch.first_number)
        if batch.first_number < self._due:
            batch = batch[min(len(batch), self._due - batch.first_number) :]
        if batch:
            await self._put.send(Arrived(self._name, batch, read))
            self._at = read

    async def _roll_back(self, rollback: Rollback) -> None:
        await self._put.send(SourceRolledBack(self._name, rollback))
        self._at = rollback.position
        self._due = min(self._due, rollback.to_entry)


class _Server(_Source):
    def __init__(
        self,
        name: str,
        upstream: Upstream,
        memory: Memory,
        reading: Reading,
        put: trio.MemorySendChannel[Arrival],
    ) -> None:
        super().__init__(name, memory, reading, put)
        self._upstream = upstream
        heartbeat = reading.heartbeat
        if heartbeat is None and not reading.follow:
            heartbeat = _SILENT_SECONDS
        self._connect = partial(
            connect,
            upstream.host,
            upstream.port,
            stream_type=(
                STREAM_TYPE_SEQUENCER if reading.stream_type is None else reading.stream_type
            ),
            timeout=reading.timeout,
            tls=upstream.tls,
            tls_server_name=upstream.tls_server_name,
            resume=reading.follow,
            retry_for=reading.retry_for,
            backoff=reading.backoff,
            heartbeat=heartbeat,
        )

    async def _read(self) -> None:
        if not self._reading.follow:
            await self._read_once(None)
            return
        recovery: Recovery | None = None
        endurance = Endurance(True, self._reading.retry_for, self._reading.backoff)
        while True:
            began = False

            def begin() -> None:
                nonlocal began
                began = True

            try:
                await self._read_once(begin)
            except (ConnectFailed, ConnectionLost) as error:
                # A connection that was good is the client's to make again: then it has given up.
                if began:
                    raise
                now, luck = trio.current_time(), random.random()  # noqa: S311
                recovery = recovery or Recovery(endurance, now)
                answered = isinstance(error, ConnectFailed)
                recovery.lost(error, answered=answered, now=now, luck=luck)
                await self._lost(error)
                await trio.sleep_until(recovery.due)

    async def _read_once(self, begun: object) -> None:
        async with self._connect() as client:
            with trio.move_on_after(self._reading.timeout) as patience:
                header = await client.header()
            if patience.cancelled_caught:
                raise ConnectionLost(
                    f"no answer from {client.peer} within {self._reading.timeout:g} s"
                )
            start = await self._begin(header)
            stop = None if self._reading.follow else header.total_entries
            if isinstance(start, Position) and self._memory.start is None:
                if start.next_entry > header.total_entries:
                    raise UnknownEntry(start.next_entry, header.total_entries)
            elif stop is not None and isinstance(start, Position) and start.next_entry > stop:
                raise self._changed(stop, start.next_entry)
            batches = client.batches(
                from_position=start if isinstance(start, Position) else None,
                from_bookmark=start if isinstance(start, bytes) else None,
                stop=stop,
                on_rollback=self._roll_back,
            )

            async def on_outage(error: PeerError | None) -> None:
                if error is None:
                    place = batches.position
                    due = None if place is None else place.next_entry
                    await self._joined(due, client.total_entries)
                else:
                    await self._lost(error)

            batches.report_outages(on_outage)
            async with batches:
                if callable(begun):
                    begun()
                next_entry = None
                if isinstance(start, Position):
                    await self._send_begun(start)
                    next_entry = start.next_entry
                await self._joined(next_entry, header.total_entries)
                async for batch in batches:
                    position = batches.position
                    assert position is not None
                    if isinstance(start, bytes):
                        await self._send_begun(Position(batch.first_number, b"", position.stream))
                    await self._send_batch(batch, position)


class _File(_Source):
    def __init__(
        self,
        name: str,
        path: str,
        memory: Memory,
        reading: Reading,
        put: trio.MemorySendChannel[Arrival],
    ) -> None:
        super().__init__(name, memory, reading, put)
        self._path = path

    async def _read(self) -> None:
        stream = await trio.to_thread.run_sync(self._open)
        try:
            while await self._read_from(stream):
                self._read_again()
        finally:
            with trio.CancelScope(shield=True):
                await trio.to_thread.run_sync(stream.close)

    def _open(self) -> DataStream:
        return DataStream.open(
            self._path,
            stream_type=self._reading.stream_type,
            read_only=True,
            follow=self._reading.follow,
        )

    async def _read_from(self, stream: DataStream) -> bool:
        """Whether what was read has changed since: then it is to be compared."""
        header = stream.header
        identity = Identity.of(header)
        start = await self._begin(header)
        number = stream.bookmark(start) if isinstance(start, bytes) else start.next_entry
        if number > header.total_entries:
            raise UnknownEntry(number, header.total_entries)
        await self._send_begun(Position(number, b"", identity))
        await self._joined(number, header.total_entries)
        trail = Trail(number)
        epoch = stream.epoch
        while True:
            batches = stream.batches(number, None)
            while (batch := await trio.to_thread.run_sync(next, batches, None)) is not None:
                number = batch.next_number
                trail.extend(batch)
                await self._send_batch(batch, Position(number, trail.hashes, identity))
            if not self._reading.follow:
                return False
            while not stream.refresh():  # noqa: ASYNC110 - another process tells no event
                await trio.sleep(_POLL_SECONDS)
            if stream.epoch != epoch or stream.total_entries < number:
                return True
