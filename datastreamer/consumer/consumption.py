"""What the reassembly over connections does between them: its sources, and who is told what.

Owns the turns of a consumer - when its progress is saved, what it waits for and what it is told
beside that - once for `reassemble` and its blocking twin. Knows no loop: what arrives is given to
it. What is made of it stands in `datastreamer.reassembly.merge`.
"""

from __future__ import annotations

import enum
import logging
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final, TypeAlias, TypeGuard

from datastreamer._codec import EntryBatch
from datastreamer.client.upstream import Upstream
from datastreamer.errors import DatastreamerError, HistoryChanged, StreamClosed, UsageError
from datastreamer.metrics.exposition import Samples
from datastreamer.position import Position
from datastreamer.protocol.history import Trail
from datastreamer.protocol.resume import Rollback
from datastreamer.reassembly.checkpoint import Stats
from datastreamer.reassembly.events import PayloadComplete
from datastreamer.reassembly.merge import Item, Merge, MergeEvent
from datastreamer.reassembly.orderer import Applied, Reorg
from datastreamer.reassembly.progress import ReassemblyProgress, SourceProgress

_log = logging.getLogger(__name__)

SAVE_SECONDS: Final = 10.0
"""So long progress without a payload is not saved: it costs no more than reading again."""

LOOK_SECONDS: Final = 1.0
"""Where nothing comes, how often it is looked whether something has become too old."""

Address: TypeAlias = Upstream | tuple[str, int] | os.PathLike[str]
Addresses: TypeAlias = Iterable[Address] | Mapping[str, Address]


class SourceState(enum.Enum):
    """How a source is."""

    connecting = "connecting"
    reading = "reading"
    ended = "ended"
    failed = "failed"


# What arrives from the sources.


@dataclass(frozen=True, slots=True)
class Begun:
    """A source is being read, from that place on."""

    source: str
    read: Position


@dataclass(frozen=True, slots=True)
class Arrived:
    """A batch; `read` is the place behind it."""

    source: str
    batch: EntryBatch
    read: Position


@dataclass(frozen=True, slots=True)
class SourceLost:
    """A source's server cannot be had now; it is waited for. What the others have goes on."""

    source: str
    error: DatastreamerError


@dataclass(frozen=True, slots=True)
class SourceBack:
    """A source that was lost, or had failed, is read again: from entry `next_entry` on, which is
    None where it begins at a bookmark that nothing has come behind yet."""

    source: str
    next_entry: int | None


@dataclass(frozen=True, slots=True)
class SourceRolledBack:
    """A source took back its entries `rollback.to_entry` to `rollback.from_entry` - 1. What came
    of them stays: messages mean the same, whoever sends them when."""

    source: str
    rollback: Rollback


@dataclass(frozen=True, slots=True)
class SourceFailed:
    """A source cannot be read, for a reason that does not pass by itself; the others are.

    `again` says whether it is tried again now and then, in case somebody mends it there.
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
"""What is told beside the payloads."""


def named(addresses: Addresses) -> dict[str, Upstream | str]:
    """Sources by name; a file is its path. Raises `UsageError`."""
    pairs: list[tuple[str | None, Address]]
    if isinstance(addresses, Mapping):
        pairs = list(addresses.items())
    else:
        pairs = [(None, address) for address in addresses]
    found: dict[str, Upstream | str] = {}
    for name, address in pairs:
        place: Upstream | str
        if isinstance(address, tuple):
            place = Upstream(*address)
        elif isinstance(address, Upstream):
            place = address
        else:
            place = os.fspath(address)
        own = name or (place if isinstance(place, str) else place.name)
        if own in found:
            raise UsageError(f"{own} is named twice; each source is read once")
        found[own] = place
    if not found:
        raise UsageError("payloads come from one source at least")
    return found


class Memory:
    """What is remembered of a source's history by its place: whether it still tells the same.

    Where it goes on behind what is remembered, the client compares that itself. Where it is read
    again from before there, and with `always`, entries are compared as they pass.
    """

    def __init__(self, source: str, place: SourceProgress | None, *, always: bool = False) -> None:
        self._source = source
        self._place = place
        self._always = always
        self._trail: Trail | None = None
        self.start: Position | None = None
        if place is not None:
            self.start = place.read
            if always or place.position < place.read.next_entry:
                trail = Trail.of(place.read)
                begin = min(place.position, trail.first_number)
                self.start = Position(begin, b"", place.read.stream)
                self._trail = trail

    def behind(self, read: Position | None) -> Memory:
        """What is remembered where the source was lost behind `read`; None: before it began."""
        place = self._place
        if read is not None:
            trail = self._trail
            known = read
            if trail is not None and read.next_entry < trail.next_number:
                known = trail.position(read.stream)
            place = SourceProgress(read.next_entry, known.next_entry, known)
        return Memory(self._source, place, always=self._always)

    def meet(self, total: int) -> Rollback | None:
        """The source holds so many entries. A `Rollback` where some of those that are remembered
        are gone; raises `HistoryChanged` where all of them are."""
        trail = self._trail
        if trail is None or total >= trail.next_number:
            return None
        first, due = trail.first_number, trail.next_number
        if total <= first and first > 0:
            self._trail = None
            raise self._changed(f"it holds {total} entries", due, total)
        trail.cut(total)
        return self._rollback(trail, due)

    def compare(self, batch: EntryBatch) -> Rollback | None:
        """Look at a batch that passes. A `Rollback` where its history has changed from an entry
        on that will be read again; raises `HistoryChanged` where that is not certain."""
        trail = self._trail
        if trail is None:
            return None
        first, due = trail.first_number, trail.next_number
        begin, end = max(first, batch.first_number), min(due, batch.next_number)
        if begin < end:
            at = batch.first_number
            differing = trail.first_difference(batch[begin - at : end - at])
            if differing is not None:
                self._trail = None
                if differing == first and first > 0:
                    what = f"entry {first} is not the one that was received"
                    raise self._changed(what, due, due)
                trail.cut(differing)
                return self._rollback(trail, due)
        if batch.next_number >= due:
            self._trail = None
        return None

    def _rollback(self, trail: Trail, due: int) -> Rollback:
        stream = None if self.start is None else self.start.stream
        place = Position(trail.next_number, trail.hashes, stream)
        return Rollback(trail.next_number, due, place)

    def _changed(self, what: str, due: int, total: int) -> HistoryChanged:
        return HistoryChanged(
            f"{self._source} changed its history: {what}; entry {due} is the next one needed",
            next_entry=due,
            total_entries=total,
            first_differing=None,
        )


class Consumption:
    """A consumer's turns: arrivals in, what it waits for and what it is told beside that out."""

    def __init__(self, merge: Merge, sources: Iterable[str]) -> None:
        self.merge = merge
        self.states = dict.fromkeys(sources, SourceState.connecting)
        self.errors: dict[str, DatastreamerError] = {}
        # Those that were read and failed, and are tried again.
        self._begun: set[str] = set()
        self._losses: Counter[str] = Counter()
        self._tried_again: set[str] = set()
        self._told: Iterator[Notice] = iter(())
        self._dirty = self._in_batch = self._broken = False
        # Whether the last event was no payload: the message may have made one whole, too.
        self._amid = False
        self._saved_at: float | None = None
        self._spent = 0.0
        self._left_at: float | None = None

    # Time: what the consumer takes for itself makes nothing old.

    def clock(self, now: float) -> float:
        """The time that has passed here."""
        if self._left_at is not None:
            self._spent += now - self._left_at
            self._left_at = None
        return now - self._spent

    def leave(self, now: float) -> None:
        """The consumer has its turn."""
        self._left_at = now

    # Arrivals

    def arrive(self, arrival: Arrival, now: float) -> None:
        """Something has come; `next_event` gives what follows from it."""
        source = arrival.source
        match arrival:
            case Begun():
                self.merge.begin(source, arrival.read)
                self._begun.add(source)
                if self.states[source] is SourceState.connecting:
                    self.states[source] = SourceState.reading
            case Arrived():
                self._in_batch = True
                self._told = self.merge.receive(source, arrival.batch, arrival.read, now)
            case SourceRolledBack():
                self.merge.rewind(source, arrival.rollback.position)
                self._told = iter((arrival,))
            case SourceLost():
                self._losses[source] += source in self._begun
                self.states[source] = SourceState.connecting
                self._told = iter((arrival,))
            case SourceBack():
                self.states[source] = SourceState.reading
                self.errors.pop(source, None)
                self._tried_again.discard(source)
                self._told = iter((arrival,))
            case SourceFailed():
                if self.states[source] is SourceState.reading:
                    self._losses[source] += 1
                self.states[source] = SourceState.failed
                self.errors[source] = arrival.error
                if arrival.again and source in self._begun:
                    self._tried_again.add(source)
                else:
                    self._tried_again.discard(source)
                self._told = iter((arrival,))
            case Ended():
                self.states[source] = SourceState.ended

    def next_event(self) -> Notice | None:
        """What is to be given or told next; None: something has to arrive first."""
        if self._broken:
            raise StreamClosed("this reassembly was interrupted in the middle; begin it anew")
        try:
            event = next(self._told, None)
        except BaseException:
            self.interrupt()
            raise
        self._amid = event is not None and not is_item(event)
        if event is None and self._in_batch:
            # Only now its place is behind all of the batch.
            self._in_batch, self._dirty = False, True
        return event

    def expire(self, now: float) -> None:
        """Nothing came, up to now."""
        self._told = self.merge.expire(now)

    @property
    def over(self) -> bool:
        """Whether no source is read any more. Raises the error where all of them failed, but for
        some that had been read, and may be again."""
        states = self.states.values()
        if any(state in (SourceState.connecting, SourceState.reading) for state in states):
            return False
        if self._tried_again:
            return False
        if all(state is SourceState.failed for state in states):
            raise next(reversed(self.errors.values()))
        return True

    def interrupt(self) -> None:
        """Something may be lost on the way: no more is given, and nothing is saved."""
        self._broken = True

    # Saving

    def given(self) -> None:
        """A payload is with the consumer: it has dealt with it when it asks for the next."""
        self._dirty = True
        self._saved_at = None

    def to_save(self, now: float, *, at_end: bool = False) -> ReassemblyProgress | None:
        """What is to be saved now; None: nothing is."""
        if not self._dirty or self._broken or self._amid:
            return None
        if self._saved_at is not None and not at_end and now < self._saved_at + SAVE_SECONDS:
            return None
        return self.merge.progress()

    def saved(self, now: float) -> None:
        """That is done."""
        self.merge.saved()
        self._dirty = False
        self._saved_at = now

    # Telling

    @property
    def stats(self) -> Stats:
        """As `Reassembler.stats`."""
        return self.merge.stats

    def oldest_seconds(self, now: float) -> float | None:
        """How old the oldest thing is that is not whole, by the time that has passed here."""
        oldest = self.stats.oldest
        here = (now if self._left_at is None else self._left_at) - self._spent
        return None if oldest is None else max(0.0, here - oldest)

    def samples(self, now: float) -> Samples:
        """The metrics' values."""
        told = self.merge.samples(self.oldest_seconds(now))
        told["datastreamer_reassembly_source_state"] = [
            ([name, state.value], int(state is found))
            for name, found in self.states.items()
            for state in SourceState
        ]
        told["datastreamer_reassembly_source_losses_total"] = [
            ([name], self._losses[name]) for name in self.states
        ]
        return told


def say(event: Notice) -> None:
    """Log what must not go unnoticed where nobody asked to be told."""
    if isinstance(event, SourceFailed):
        what = "cannot be read, and is tried again later" if event.again else "is not read any more"
        _log.error("%s %s: %s", event.source, what, event.error)
    elif isinstance(event, SourceLost):
        _log.warning("%s cannot be had, and is tried again: %s", event.source, event.error)
    elif isinstance(event, SourceBack):
        _log.warning("%s is back", event.source)
    elif isinstance(event, SourceRolledBack):
        back = event.rollback
        _log.warning(
            "%s took back entries %d to %d", event.source, back.to_entry, back.from_entry - 1
        )


def is_item(event: Notice) -> TypeGuard[Item]:
    """Whether a consumer waits for this, not only wants to know of it."""
    return isinstance(event, PayloadComplete | Applied | Reorg)
