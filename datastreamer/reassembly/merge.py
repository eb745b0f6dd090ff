"""Batches of several sources in, whole payloads out, in order where that is wanted; and at each
moment what to keep so that a later run goes on behind what was given out.

Owns what `ReassemblyProgress` says at which moment. What a message means is the reassembler's, what
follows what the orderer's. Knows batches and numbers; must not know streams or clocks.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Final

from datastreamer._codec import EntryBatch
from datastreamer.errors import UsageError
from datastreamer.format import TYPE_BOOKMARK, U32_MAX
from datastreamer.metrics.exposition import Samples, Tally
from datastreamer.position import Position
from datastreamer.reassembly._reassembler import Reassembler
from datastreamer.reassembly.checkpoint import Checkpoint, Stats
from datastreamer.reassembly.events import Conflict, Event, PayloadComplete
from datastreamer.reassembly.orderer import Applied, Block, Gap, Orderer, Rejected, Reorg
from datastreamer.reassembly.producer import MESSAGE_TYPE
from datastreamer.reassembly.progress import Name, ReassemblyProgress, SourceProgress

_PART_BYTES: Final = 128
"""What a part costs beside its own bytes, as Python's objects."""

_MOST_READ_AGAIN: Final = 100_000
"""So many payloads are known at most for no other reason than that a later run may read them again:
a block that waits for a parent for ever, as one that lies does, must not make them all stay."""

_LEAST_KNOWN: Final = 100_000
"""Of several sources a payload stays known for so many further ones at least, whatever less was
asked for. They are read a batch at a time, and a batch of 1 MiB may hold some ten thousand: the
next source brings those again. A known payload takes 144 bytes."""

Order = Callable[[PayloadComplete], Block | None]
"""Where a payload stands; None: nowhere, and it is given out as it comes."""


@dataclass(slots=True)
class Payload:
    """A payload that has its place in a chain. `complete` is None where a run before gave it out
    and it has not been read again yet."""

    id: bytes
    complete: PayloadComplete | None


Told = Event | Applied[Payload] | Reorg[Payload] | Gap | Rejected[Payload]
"""What comes of a batch."""

Item = PayloadComplete | Applied[Payload] | Reorg[Payload]
"""What a consumer waits for; all else it may want to know of."""


class Merge:
    """The messages of several sources, made whole.

    `sources` are those that are read now, the rest as `reassemble` has it. One caller at a time.
    An event is given before the next message is looked at: what `progress` says is true to the
    event that was given last.
    """

    def __init__(
        self,
        sources: Iterable[str],
        subscribe: Iterable[bytes] | None = None,
        *,
        type: int = MESSAGE_TYPE,
        order: Order | None = None,
        after: bytes | None = None,
        reorg_threshold: int = 1000,
        budget: int = 1 << 30,
        max_age: float | None = 600.0,
        resume: ReassemblyProgress | None = None,
    ) -> None:
        if not 0 <= type <= U32_MAX or type == TYPE_BOOKMARK:
            raise UsageError(
                f"messages are entries of one type that is no bookmark's, not of {type}"
            )
        before = ReassemblyProgress() if resume is None else resume
        known = reorg_threshold
        if order is not None:
            # A later run reads the chain's payloads again, and those that came between them.
            known = 2 * reorg_threshold
        self._sources = list(sources)
        if len(self._sources) > 1:
            known = max(known, _LEAST_KNOWN)
        self._type = type
        self._places = {
            name: place for name, place in before.places.items() if name in self._sources
        }
        self._reassembler = Reassembler(
            subscribe,
            reorg_threshold=known,
            budget=budget,
            max_age=max_age,
            resume=Checkpoint(
                {name: place.position for name, place in self._places.items()},
                {name: place.seen for name, place in self._places.items()},
                before.known,
            ),
        )
        # Entries below are done with; they come where a source is joined before its position.
        self._floors = {name: place.position for name, place in self._places.items()}
        # Sources that took entries back: where they are now, until they are where they were.
        self._back: dict[str, int] = {}
        self._given = _Given(before.known)
        self._ordering = None
        if order is not None:
            self._ordering = _Ordering(order, after, reorg_threshold, budget, before, self._given)
        self.conflicts: Counter[str] = Counter()
        self._seconds = {name: Tally("datastreamer_reassembly_seconds") for name in self._sources}

    def place(self, source: str) -> SourceProgress | None:
        """Where a source goes on; None: it has not been read."""
        return self._places.get(source)

    def begin(self, source: str, read: Position) -> None:
        """A source that had no place begins there."""
        if source not in self._places:
            self._places[source] = SourceProgress(read.next_entry, read.next_entry, read)
            if self._ordering is not None:
                self._ordering.begin(source, read.next_entry)

    def take(
        self, source: str, batch: EntryBatch, read: Position, now: float | None = None
    ) -> Iterator[Told]:
        """What comes of a batch; `read` is the place behind it. A batch that is not iterated to
        its end has not been taken whole."""
        floor = self._floors.get(source, 0)
        if batch.first_number < floor:
            batch = batch[min(len(batch), floor - batch.first_number) :]
        positions = {} if self._ordering is None else self._positions()
        # What a run before gave out may come from anywhere in what is read again.
        self._given.begun = 0 if self._reassembler.replaying else self._given.count
        if batch:
            if source in self._back:
                self._back[source] = batch.first_number
            for event in self._reassembler.receive_batch(batch, source, type=self._type, now=now):
                yield from self._tell(event, positions, now)
        if source in self._back:
            self._back[source] = read.next_entry
            seen = self._reassembler.checkpoint(known=False).seen
            if read.next_entry >= seen.get(source, 0):
                del self._back[source]
        self._places[source] = SourceProgress(read.next_entry, read.next_entry, read)

    def expire(self, now: float) -> Iterator[Told]:
        """Tell the time where nothing comes."""
        for event in self._reassembler.expire(now):
            yield from self._tell(event, {}, now)

    def take_back(self, source: str, read: Position) -> None:
        """A source has taken back its entries from that place on; others are to come.

        What came of them stays, as other sources may have sent the same.
        """
        self._floors[source] = min(self._floors.get(source, 0), read.next_entry)
        self._back[source] = read.next_entry
        self._places[source] = SourceProgress(read.next_entry, read.next_entry, read)

    def progress(self) -> ReassemblyProgress:
        """What to keep once everything that was given so far has been dealt with."""
        positions = self._positions()
        seen = self._reassembler.checkpoint(known=False).seen
        read_again = self._given.count
        if self._ordering is not None:
            positions, read_again = self._ordering.held(positions)
        places = {}
        for name, place in self._places.items():
            position = positions[name]
            furthest = seen.get(name, place.seen)
            furthest = max(position, min(furthest, self._back.get(name, furthest)))
            places[name] = SourceProgress(position, furthest, place.read)
        known = list(self._given.fresh)
        count = self._given.needed(self._reassembler.known_count, read_again)
        if self._ordering is None:
            return ReassemblyProgress(places, known, count)
        return ReassemblyProgress(places, known, count, *self._ordering.changed())

    def kept(self) -> None:
        """What `progress` said is kept."""
        self._given.fresh.clear()
        if self._ordering is not None:
            self._ordering.kept()

    # Telling

    @property
    def stats(self) -> Stats:
        """As `Reassembler.stats`."""
        return self._reassembler.stats()

    def samples(self, age: float | None) -> Samples:
        """The metrics' values; `age` is that of the oldest thing in flight."""
        stats = self.stats
        told: Samples = {
            "datastreamer_reassembly_in_flight": [([], stats.in_flight)],
            "datastreamer_reassembly_messages": [([], stats.messages)],
            "datastreamer_reassembly_message_bytes": [([], stats.message_bytes)],
            "datastreamer_reassembly_used_bytes": [([], stats.used)],
            "datastreamer_reassembly_oldest_seconds": [([], age or 0.0)],
            "datastreamer_reassembly_payloads_total": [([], stats.completed)],
            "datastreamer_reassembly_dropped_total": [([], stats.dropped)],
            "datastreamer_reassembly_conflicts_total": [
                ([name], self.conflicts[name]) for name in sorted({*self.conflicts, *self._sources})
            ],
            "datastreamer_reassembly_seconds": [
                ([name], tally.histogram()) for name, tally in self._seconds.items()
            ],
        }
        for field in ("received", "duplicates", "malformed", "outside"):
            told[f"datastreamer_reassembly_{field}_total"] = [
                ([name], getattr(counts, field)) for name, counts in stats.sources.items()
            ]
        return told

    def _positions(self) -> dict[str, int]:
        found = {name: place.position for name, place in self._places.items()}
        found.update(self._reassembler.positions())
        for name, at in self._back.items():
            found[name] = min(found.get(name, at), at)
        return found

    def _tell(self, event: Event, positions: dict[str, int], now: float | None) -> Iterator[Told]:
        if isinstance(event, Conflict):
            self.conflicts[event.source or ""] += 1
        if isinstance(event, PayloadComplete):
            self._given.count += 1
            if now is not None and event.source in self._seconds:
                self._seconds[event.source].add(max(0.0, now - event.since))
            block = None if self._ordering is None else self._ordering.block_of(event)
            if block is not None and self._ordering is not None:
                yield from self._ordering.take(block, event, positions)
                return
            self._given.add((event.id, event.prefixes), self._given.count)
        yield event


class _Given:
    """The names of payloads that a later run must not give out, in the order in which they are
    kept, and how many of them it needs: those that this run knows, and those that it reads again.

    Payloads have numbers in the order in which they were whole, which is that in which they are
    forgotten. They are kept in another: a block's when it is settled.
    """

    def __init__(self, known: Sequence[Name]) -> None:
        numbers: dict[bytes, int] = {}
        for own, _ in known:
            numbers.setdefault(own, len(numbers) + 1)
        self.count = len(numbers)  # payloads that were whole, before too: the last one's number
        self.begun = self.count  # the last one's before the batch that is being taken
        self.fresh: list[Name] = []  # what is not kept yet
        self._numbers = deque(numbers[own] for own, _ in known)

    def add(self, name: Name, number: int) -> None:
        self.fresh.append(name)
        self._numbers.append(number)

    def needed(self, known: int, read_again: int) -> int:
        """How many of the last ones, where so many payloads are known, and those behind that
        number may be read again."""
        read_again = max(read_again, self.count - _MOST_READ_AGAIN)
        done_with = min(self.count - known, read_again)
        while self._numbers and self._numbers[0] <= done_with:
            self._numbers.popleft()
        return len(self._numbers)


@dataclass(slots=True)
class _Held:
    """A block that the orderer may still need: what it came of, and from where."""

    name: Name
    number: int
    positions: dict[str, int]
    begun: int  # payloads with higher numbers came from behind these positions


class _Ordering:
    """Payloads in the order of a chain, and what a later run needs to go on with it.

    Sources are read again from where the oldest block was on its way that can still be rolled
    back, or waits: the chain is kept, payloads are not.
    """

    def __init__(
        self,
        order: Order,
        after: bytes | None,
        threshold: int,
        budget: int,
        before: ReassemblyProgress,
        given: _Given,
    ) -> None:
        self.block_of = order
        self._given = given
        self._threshold = threshold
        self._payloads = {name[0]: Payload(name[0], None) for _, name in before.chain}
        applied = [(block, self._payloads[name[0]]) for block, name in before.chain]
        self._orderer: Orderer[Payload] = Orderer(
            None if applied else after,
            applied=applied,
            reorg_threshold=threshold,
            budget=budget,
            size_of=_size_of,
        )
        # What was given out of the chain; the orderer's may be ahead of it by some events.
        self._chain = {block.number: (block, name) for block, name in before.chain}
        # Of the chain of the run before: a reorg may come back to a block that is not read yet.
        self._before = {block.hash: name for block, name in before.chain}
        self._head = max(self._chain, default=0)
        self._changed: int | None = None
        # By hash, in the order in which they came.
        self._held: dict[bytes, _Held] = {}
        self._by_number: dict[int, set[bytes]] = {}
        self._numbers: list[int] = []  # a heap of the keys
        # Of the chain of the run before what was settled before it was read again.
        self._unread = {name[0] for _, name in before.chain}
        self._silenced: set[bytes] = set()

    def begin(self, source: str, position: int) -> None:
        """A source is new: what it brings of later blocks is held by the older ones, too."""
        for held in self._held.values():
            held.positions.setdefault(source, position)

    def take(
        self, block: Block, event: PayloadComplete, positions: dict[str, int]
    ) -> Iterator[Told]:
        name, number = (event.id, event.prefixes), self._given.count
        if event.id in self._silenced:
            self._silenced.remove(event.id)
            self._given.add(name, number)
            return
        self._unread.discard(event.id)
        payload = self._payloads.get(event.id)
        if payload is None:
            payload = self._payloads[event.id] = Payload(event.id, event)
        payload.complete = event
        if block.hash in self._held:
            self._given.add(name, number)
        else:
            self._held[block.hash] = _Held(name, number, positions, self._given.begun)
            if block.number not in self._by_number:
                heappush(self._numbers, block.number)
            self._by_number.setdefault(block.number, set()).add(block.hash)
        for told in self._orderer.receive(block, payload, event.source):
            match told:
                case Applied():
                    self._apply([told.block])
                case Reorg():
                    self._apply([each for each, _ in told.applied])
                case Rejected(why="room"):
                    # A later run reads it again: here it cannot come a second time.
                    self._payloads.pop(self._held[told.block.hash].name[0], None)
                case Rejected():
                    self._settle(told.block.hash)
            # Before it is given: what is kept then is already without them.
            self._settle_old()
            yield told

    def _apply(self, blocks: list[Block]) -> None:
        first = blocks[0].number
        self._changed = first if self._changed is None else min(self._changed, first)
        for number in range(first, self._head + 1):
            self._chain.pop(number, None)
        for block in blocks:
            held = self._held.get(block.hash)
            name = self._before[block.hash] if held is None else held.name
            self._chain[block.number] = (block, name)
        self._head = blocks[-1].number

    def _settle(self, own: bytes) -> None:
        held = self._held.pop(own, None)
        if held is not None:
            self._given.add(held.name, held.number)
            self._payloads.pop(held.name[0], None)

    def _settle_old(self) -> None:
        floor = self._head - self._threshold
        while self._chain and self._numbers and self._numbers[0] < floor:
            for own in self._by_number.pop(heappop(self._numbers)):
                self._settle(own)
        while self._chain and (lowest := next(iter(self._chain))) < floor:
            _, name = self._chain.pop(lowest)
            self._payloads.pop(name[0], None)
            if name[0] in self._unread:
                self._unread.remove(name[0])
                self._silenced.add(name[0])
                self._given.add(name, self._given.count)

    def held(self, positions: dict[str, int]) -> tuple[dict[str, int], int]:
        """From where sources are to be read again, `positions` or before; and the number of the
        last payload that does not come again then."""
        oldest = next(iter(self._held.values()), None)
        if oldest is None:
            return positions, self._given.begun
        held = {name: min(at, oldest.positions.get(name, at)) for name, at in positions.items()}
        return held, min(self._given.begun, oldest.begun)

    def changed(self) -> tuple[list[tuple[Block, Name]], int]:
        """The chain from where it has changed on, and the lowest number that is kept of it."""
        lowest = max(0, self._head - self._threshold)
        if self._changed is None:
            return [], lowest
        numbers = [number for number in self._chain if number >= (self._changed or 0)]
        return [self._chain[number] for number in numbers], lowest

    def kept(self) -> None:
        self._changed = None


def _size_of(payload: Payload) -> int:
    """The bytes that a payload takes while its block waits."""
    if payload.complete is None:
        return 0
    parts = payload.complete.parts
    return sum(len(key) + len(value) for key, value in parts) + _PART_BYTES * len(parts)
