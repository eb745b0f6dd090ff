"""The state of a reassembly over connections: its sources, and what is due next.

Owns what follows from each arrival: the events to deliver, and when progress is to be saved. Must
not know sockets, tasks or clocks. How messages are merged is `datastreamer.reassembly.merge`'s.
"""

from __future__ import annotations

import enum
import logging
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final, TypeGuard

from datastreamer._codec import EntryBatch
from datastreamer.errors import DatastreamerError, HistoryChanged, StreamClosed
from datastreamer.metrics.exposition import Samples
from datastreamer.position import KEPT, Position
from datastreamer.printable import counted
from datastreamer.protocol.history import Trail
from datastreamer.protocol.resume import Rollback
from datastreamer.reassembly.checkpoint import Stats
from datastreamer.reassembly.events import PayloadComplete
from datastreamer.reassembly.merge import Item, Merge, MergeEvent
from datastreamer.reassembly.orderer import Applied, Reorg
from datastreamer.reassembly.progress import ReassemblyProgress, SourceProgress

_log = logging.getLogger(__name__)

SAVE_SECONDS: Final = 10.0
"""Interval between saves while no payload is delivered: after a crash, unsaved entries are only
read again."""

LOOK_SECONDS: Final = 1.0
"""Interval between checks for what has expired, while nothing arrives."""


class SourceState(enum.Enum):
    """Whether a source is read."""

    connecting = "connecting"
    reading = "reading"
    ended = "ended"
    failed = "failed"


# What arrives from the sources.


@dataclass(frozen=True, slots=True)
class Begun:
    """A source is being read, from position `read` on."""

    source: str
    read: Position


@dataclass(frozen=True, slots=True)
class Arrived:
    """A batch; `read` is the position after it."""

    source: str
    batch: EntryBatch
    read: Position


@dataclass(frozen=True, slots=True)
class SourceLost:
    """A source's server cannot be reached, and is retried. The other sources continue."""

    source: str
    error: DatastreamerError


@dataclass(frozen=True, slots=True)
class SourceBack:
    """A source that was lost, or had failed, is read again, from entry `next_entry` on; None if it
    begins at a bookmark that has not been received yet."""

    source: str
    next_entry: int | None


@dataclass(frozen=True, slots=True)
class SourceRolledBack:
    """A source truncated its entries `rollback.to_entry` to `rollback.from_entry` - 1. Their
    messages stay: a message means the same whenever it is sent."""

    source: str
    rollback: Rollback


@dataclass(frozen=True, slots=True)
class SourceFailed:
    """A source cannot be read, for a reason that does not pass by itself; the others are read.

    `again`: whether it is retried at long intervals, in case the cause is removed.
    """

    source: str
    error: DatastreamerError
    again: bool = False


@dataclass(frozen=True, slots=True)
class Ended:
    """A source was read to its end."""

    source: str


Arrival = Begun | Arrived | SourceLost | SourceBack | SourceRolledBack | SourceFailed | Ended
Notice = MergeEvent | SourceLost | SourceBack | SourceRolledBack | SourceFailed
"""What `on_event` is called with."""


class Memory:
    """What a saved position remembers of a source's history, to be compared with what it holds.

    If reading continues after what is remembered, the client compares that itself. If earlier
    entries are read again, and with `always`, the `trail` is compared first, by a reading of its
    own: what is read again may be another selection of the entries.
    """

    def __init__(self, source: str, place: SourceProgress | None, *, always: bool = False) -> None:
        self._source = source
        self._place = place
        self._always = always
        self.trail: Trail | None = None
        self.start: Position | None = None
        if place is not None:
            self.start = place.read
            if always or place.position < place.read.next_entry:
                self.trail = Trail.of(place.read)
                begin = min(place.position, _compared_from(self.trail))
                self.start = Position(begin, b"", place.read.stream)

    def behind(self, read: Position | None) -> Memory:
        """What is remembered if the source was lost after `read` (None: before it began)."""
        place = self._place
        if read is not None:
            known = read
            if self.trail is not None and self.rereads(read):
                known = self.trail.position(read.stream)
            place = SourceProgress(read.next_entry, known.next_entry, known)
        return Memory(self._source, place, always=self._always)

    def rereads(self, read: Position | None) -> bool:
        """Whether a source that was read up to `read` sends again what is remembered."""
        return (
            read is not None and self.trail is not None and read.next_entry < self.trail.next_number
        )

    def judge(self, differing: int | None, total: int) -> Rollback | None:
        """The source holds `total` entries, and `differing` is the first that is not the remembered
        one. A `Rollback` if it lacks some of the remembered ones; raises `HistoryChanged` if it
        lacks all of them."""
        trail, place = self.trail, self._place
        if differing is None and trail is not None and total < trail.next_number:
            differing = total
        if differing is None or trail is None or place is None:
            return None
        due = trail.next_number
        if not trail.certain(differing) and trail.first_number > 0:
            what = f"entry {differing} is not the one that was received"
            if differing >= total:
                what = f"it holds {counted(total)}"
            raise HistoryChanged(
                f"{self._source} changed its history: {what}; entry {due} is the next one needed",
                next_entry=due,
                total_entries=total,
                first_differing=None,
            )
        trail.cut(differing)
        read = trail.position(place.read.stream)
        position = min(place.position, differing)
        self._place = SourceProgress(position, differing, read)
        self.start = Position(min(position, _compared_from(trail)), b"", read.stream)
        return Rollback(differing, due, read)


def _compared_from(trail: Trail) -> int:
    """Where reading begins again after a comparison, so that the client remembers as much."""
    return max(trail.first_number, trail.next_number - KEPT)


class ConsumerState:
    """Arrivals in; payloads, other events and progress to save out."""

    def __init__(self, merge: Merge, sources: Iterable[str]) -> None:
        self.merge = merge
        self.states = dict.fromkeys(sources, SourceState.connecting)
        self.errors: dict[str, DatastreamerError] = {}
        # Sources that were read at least once.
        self._begun: set[str] = set()
        self._losses: Counter[str] = Counter()
        # Those of them that failed, and are retried.
        self._tried_again: set[str] = set()
        self._events: Iterator[Notice] = iter(())
        self._dirty = self._in_batch = self._broken = False
        # Whether the last event was not a payload: the same message may have completed one.
        self._amid = False
        self._saved_at: float | None = None
        self._spent = 0.0
        self._left_at: float | None = None

    # Time: nothing expires while the consumer processes a payload.

    def clock(self, now: float) -> float:
        """The time, without what the consumer has spent on payloads."""
        if self._left_at is not None:
            self._spent += now - self._left_at
            self._left_at = None
        return now - self._spent

    def leave(self, now: float) -> None:
        """A payload is being delivered: the time that the consumer spends on it begins."""
        self._left_at = now

    # Arrivals

    def arrive(self, arrival: Arrival, now: float) -> None:
        """Process an arrival; `next_event` returns the events that follow from it."""
        source = arrival.source
        match arrival:
            case Begun():
                self.merge.begin(source, arrival.read)
                self._begun.add(source)
                if self.states[source] is SourceState.connecting:
                    self.states[source] = SourceState.reading
            case Arrived():
                self._in_batch = True
                self._events = self.merge.receive(source, arrival.batch, arrival.read, now)
            case SourceRolledBack():
                self.merge.rewind(source, arrival.rollback.position)
                self._events = iter((arrival,))
            case SourceLost():
                self._losses[source] += source in self._begun
                self.states[source] = SourceState.connecting
                self._events = iter((arrival,))
            case SourceBack():
                self.states[source] = SourceState.reading
                self.errors.pop(source, None)
                self._tried_again.discard(source)
                self._events = iter((arrival,))
            case SourceFailed():
                if self.states[source] is SourceState.reading:
                    self._losses[source] += 1
                self.states[source] = SourceState.failed
                self.errors[source] = arrival.error
                if arrival.again and source in self._begun:
                    self._tried_again.add(source)
                else:
                    self._tried_again.discard(source)
                self._events = iter((arrival,))
            case Ended():
                self.states[source] = SourceState.ended

    def next_event(self) -> Notice | None:
        """The next event to deliver or report; None until something arrives."""
        if self._broken:
            raise StreamClosed("this reassembly was interrupted; make another, which resumes")
        try:
            event = next(self._events, None)
        except BaseException:
            self.interrupt()
            raise
        self._amid = event is not None and not is_item(event)
        if event is None and self._in_batch:
            # Only now is the source's position after the whole batch.
            self._in_batch, self._dirty = False, True
            for warning in self.merge.warnings():
                _log.warning("%s", warning)
        return event

    def expire(self, now: float) -> None:
        """Nothing has arrived up to the time `now`."""
        self._events = self.merge.expire(now)

    @property
    def over(self) -> bool:
        """Whether all sources have ended or failed. Raises the last error if all of them failed and
        none of those that were read before is retried."""
        states = self.states.values()
        if any(state in (SourceState.connecting, SourceState.reading) for state in states):
            return False
        if self._tried_again:
            return False
        if all(state is SourceState.failed for state in states):
            raise next(reversed(self.errors.values()))
        return True

    def interrupt(self) -> None:
        """A message may be lost: nothing more is delivered or saved."""
        self._broken = True

    # Saving

    def given(self) -> None:
        """A payload is delivered: the consumer has processed it when it requests the next one."""
        self._dirty = True
        self._saved_at = None

    def to_save(self, now: float, *, at_end: bool = False) -> ReassemblyProgress | None:
        """The progress to save now; None if nothing is due."""
        if not self._dirty or self._broken or self._amid:
            return None
        if self._saved_at is not None and not at_end and now < self._saved_at + SAVE_SECONDS:
            return None
        return self.merge.progress()

    def saved(self, now: float) -> None:
        """The progress of `to_save` has been saved."""
        self.merge.saved()
        self._dirty = False
        self._saved_at = now

    # Reports

    @property
    def stats(self) -> Stats:
        """As `Reassembler.stats`."""
        return self.merge.stats

    def oldest_seconds(self, now: float) -> float | None:
        """The age of the oldest incomplete payload."""
        oldest = self.stats.oldest
        here = (now if self._left_at is None else self._left_at) - self._spent
        return None if oldest is None else max(0.0, here - oldest)

    def samples(self, now: float) -> Samples:
        """The metrics' values."""
        found = self.merge.samples(self.oldest_seconds(now))
        found["datastreamer_reassembly_source_state"] = [
            ([name, state.value], int(state is current))
            for name, current in self.states.items()
            for state in SourceState
        ]
        found["datastreamer_reassembly_source_losses_total"] = [
            ([name], self._losses[name]) for name in self.states
        ]
        return found


def say(event: Notice) -> None:
    """Log the event of a source, in place of an `on_event`."""
    if isinstance(event, SourceFailed):
        what = "cannot be read, and is retried later" if event.again else "is not read any more"
        _log.error("%s %s: %s", event.source, what, event.error)
    elif isinstance(event, SourceLost):
        _log.warning("%s cannot be reached, and is retried: %s", event.source, event.error)
    elif isinstance(event, SourceBack):
        _log.warning("%s is back", event.source)
    elif isinstance(event, SourceRolledBack):
        back = event.rollback
        _log.warning(
            "%s truncated entries %d to %d", event.source, back.to_entry, back.from_entry - 1
        )


def is_item(event: Notice) -> TypeGuard[Item]:
    """Whether this is delivered by the iterator, not reported to `on_event`."""
    return isinstance(event, PayloadComplete | Applied | Reorg)
