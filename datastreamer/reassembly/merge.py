"""Reassembles payloads from batches of several sources, orders them if asked, and tracks progress.

Owns what `ReassemblyProgress` must hold at any moment so that a later run continues after what was
delivered. The reassembler owns the meaning of messages, the orderer their order. Knows batches and
numbers; must not know streams or clocks.
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
from datastreamer.reassembly._messages import scan_records, unpack_message
from datastreamer.reassembly._reassembler import Reassembler
from datastreamer.reassembly.checkpoint import Checkpoint, Stats
from datastreamer.reassembly.events import Conflict, Event, PayloadComplete
from datastreamer.reassembly.orderer import Applied, Block, Gap, Orderer, Rejected, Reorg
from datastreamer.reassembly.portions import NESTED
from datastreamer.reassembly.producer import MESSAGE_TYPE
from datastreamer.reassembly.progress import (
    Name,
    ReassemblyProgress,
    SourceProgress,
    shown,
    subscription,
)

_PART_BYTES: Final = 128
"""Memory of a part beside its bytes, as Python objects."""

_MOST_READ_AGAIN: Final = 100_000
"""Payloads that stay known at most only because a later run may read them again. Without a limit, a
block whose parent never arrives would keep all of them."""

_LEAST_KNOWN: Final = 100_000
"""Further payloads for which a delivered one stays known, at least, with several sources. These are
read a batch at a time; a batch of 1 MiB may hold ten thousand payloads, and the next source sends
them again. A known payload takes 144 bytes."""

_MOST_UNMATCHED: Final = 100
"""Payloads of a source without a part of the subscription, after which the log warns."""

Order = Callable[[PayloadComplete], Block | None]
"""The block of a payload; None: the payload is delivered without an order."""


@dataclass(slots=True)
class Payload:
    """A payload of a block. `complete` is None if an earlier run delivered it and it has not been
    read again yet."""

    id: bytes
    complete: PayloadComplete | None


MergeEvent = Event | Applied[Payload] | Reorg[Payload] | Gap | Rejected[Payload]
"""The events of a batch."""

OrderedItem = Applied[Payload] | Reorg[Payload]
Item = PayloadComplete | OrderedItem
"""The events that a consumer processes; the others are reports."""


class Merge:
    """Reassembles the messages of several sources.

    `sources` are those that are read now; the other arguments are those of `reassemble`. One caller
    at a time. An event is returned before the next message is processed, so that `progress` is
    exact for the last event.
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
            raise UsageError(f"messages need a u32 entry type that is not 0xb0, not {type}")
        before = ReassemblyProgress() if resume is None else resume
        wanted = None if subscribe is None else tuple(subscribe)
        known = reorg_threshold
        if order is not None:
            # A later run reads the payloads of the chain again, and those between them.
            known = 2 * reorg_threshold
        self._sources = list(sources)
        if len(self._sources) > 1:
            known = max(known, _LEAST_KNOWN)
        self._type = type
        self._places = {
            name: place for name, place in before.places.items() if name in self._sources
        }
        self._reassembler = Reassembler(
            wanted,
            reorg_threshold=known,
            budget=budget,
            max_age=max_age,
            resume=Checkpoint(
                {name: place.position for name, place in self._places.items()},
                {name: place.seen for name, place in self._places.items()},
                before.known,
            ),
        )
        self._subscribed = subscription(wanted)
        before.check(self._subscribed)
        # Entries below were processed; a source sends them if its batch begins earlier.
        self._floors = {name: place.position for name, place in self._places.items()}
        # Rewound sources: how far they are, until they are where they were before.
        self._rewound: dict[str, int] = {}
        self._delivered = _DeliveredNames(before.known)
        self._ordering = None
        if order is not None:
            self._ordering = _Ordering(
                order, after, reorg_threshold, budget, before, self._delivered
            )
        self.conflicts: Counter[str] = Counter()
        self._seconds = {name: Tally("datastreamer_reassembly_seconds") for name in self._sources}
        self._unmatched = _Unmatched(self._subscribed)

    def source_progress(self, source: str) -> SourceProgress | None:
        """Where a source continues; None if it has not been read."""
        return self._places.get(source)

    def begin(self, source: str, read: Position) -> None:
        """Set where a source begins that has not been read before."""
        if source not in self._places:
            self._places[source] = SourceProgress(read.next_entry, read.next_entry, read)
            if self._ordering is not None:
                self._ordering.begin(source, read.next_entry)

    def receive(
        self, source: str, batch: EntryBatch, read: Position, now: float | None = None
    ) -> Iterator[MergeEvent]:
        """The events of a batch; `read` is the position after it. The batch counts as received only
        once the iteration has ended."""
        batch = batch.since(self._floors.get(source, 0))
        positions = {} if self._ordering is None else self._positions()
        # During a replay, payloads that an earlier run delivered may arrive from anywhere.
        self._delivered.begun = 0 if self._reassembler.replaying else self._delivered.count
        if source in self._rewound:
            self._rewound[source] = batch.first_number
        for event in self._reassembler.receive_batch(batch, source, type=self._type, now=now):
            if isinstance(event, PayloadComplete):
                self._unmatched.count(event, batch)
            yield from self._events_of(event, positions, now)
        if source in self._rewound:
            self._rewound[source] = read.next_entry
            seen = self._reassembler.checkpoint(known=False).seen
            if read.next_entry >= seen.get(source, 0):
                del self._rewound[source]
        self._places[source] = SourceProgress(read.next_entry, read.next_entry, read)

    def expire(self, now: float) -> Iterator[MergeEvent]:
        """Drop what is too old at this time."""
        for event in self._reassembler.expire(now):
            yield from self._events_of(event, {}, now)

    def rewind(self, source: str, read: Position) -> None:
        """A source has truncated its entries from that position on and will send others.

        Their messages are kept, since other sources may have sent the same ones.
        """
        self._floors[source] = min(self._floors.get(source, 0), read.next_entry)
        self._rewound[source] = read.next_entry
        self._places[source] = SourceProgress(read.next_entry, read.next_entry, read)

    def progress(self) -> ReassemblyProgress:
        """What to save once every event so far has been processed."""
        positions = self._positions()
        seen = self._reassembler.checkpoint(known=False).seen
        read_again = self._delivered.count
        if self._ordering is not None:
            positions, read_again = self._ordering.held(positions)
        places = {}
        for name, place in self._places.items():
            position = positions[name]
            furthest = seen.get(name, place.seen)
            furthest = max(position, min(furthest, self._rewound.get(name, furthest)))
            places[name] = SourceProgress(position, furthest, place.read)
        known = list(self._delivered.unsaved)
        count = self._delivered.needed(self._reassembler.known_count, read_again)
        chain: Sequence[tuple[Block, Name]] = ()
        floor = 0
        if self._ordering is not None:
            chain, floor = self._ordering.changed()
        return ReassemblyProgress(places, known, count, chain, floor, self._subscribed)

    def saved(self) -> None:
        """The last `progress` has been saved."""
        self._delivered.unsaved.clear()
        if self._ordering is not None:
            self._ordering.saved()

    def warnings(self) -> list[str]:
        """What the log is to say about subscriptions; each once."""
        found, self._unmatched.warnings = self._unmatched.warnings, []
        return found

    @property
    def stats(self) -> Stats:
        """The statistics of the `Reassembler`."""
        return self._reassembler.stats()

    def samples(self, age: float | None) -> Samples:
        """The values of the metrics; `age` is that of the oldest thing in flight."""
        stats = self.stats
        samples: Samples = {
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
            samples[f"datastreamer_reassembly_{field}_total"] = [
                ([name], getattr(counts, field)) for name, counts in stats.sources.items()
            ]
        return samples

    def _positions(self) -> dict[str, int]:
        found = {name: place.position for name, place in self._places.items()}
        found.update(self._reassembler.positions())
        for name, at in self._rewound.items():
            found[name] = min(found.get(name, at), at)
        return found

    def _events_of(
        self, event: Event, positions: dict[str, int], now: float | None
    ) -> Iterator[MergeEvent]:
        if isinstance(event, Conflict):
            self.conflicts[event.source or ""] += 1
        if isinstance(event, PayloadComplete):
            self._delivered.count += 1
            if now is not None and event.source in self._seconds:
                self._seconds[event.source].add(max(0.0, now - event.since))
            block = None if self._ordering is None else self._ordering.block_of(event)
            if block is not None and self._ordering is not None:
                yield from self._ordering.receive(block, event, positions)
                return
            self._delivered.add((event.id, event.prefixes), self._delivered.count)
        yield event


class _Unmatched:
    """Warns, once a source, of a subscription that matches nothing that the source announces."""

    def __init__(self, subscribed: tuple[bytes, ...]) -> None:
        self._subscribed = subscribed
        self._counts: Counter[str] = Counter()
        self._done: set[str] = set()
        self.warnings: list[str] = []

    def count(self, event: PayloadComplete, batch: EntryBatch) -> None:
        """Process a payload; the message that completed it is in `batch`."""
        source = event.source
        if source in self._done or self._subscribed in ((), (NESTED,)):
            return
        self._counts[source] += 1
        if any(prefix[:1] != NESTED for prefix in event.prefixes):
            self._done.add(source)
        elif self._counts[source] >= _MOST_UNMATCHED:
            # Without parts, the message that completes it is its header, or a nested one.
            _, records = unpack_message(batch.since(event.position or 0)[0].data)
            prefixes = [prefix for prefix, _ in scan_records(records)]
            announced = [prefix for prefix in prefixes if prefix[:1] != NESTED] or prefixes
            if announced:
                self._done.add(source)
                self.warnings.append(
                    f"{source} has sent {self._counts[source]} payloads without a part of the "
                    f"subscription to {shown(self._subscribed)}; the last one has the prefixes "
                    f"{shown(announced[:3])}"
                )


class _DeliveredNames:
    """The payloads that a later run must not deliver again, in the order in which they are saved,
    and how many of them it needs: those that this run knows, and those that it reads again.

    Payloads are numbered as they are completed, which is the order in which they are forgotten.
    They are saved in another order: those of a block when it is final.
    """

    def __init__(self, known: Sequence[Name]) -> None:
        numbers: dict[bytes, int] = {}
        for own, _ in known:
            numbers.setdefault(own, len(numbers) + 1)
        self.count = len(numbers)  # the number of the last completed payload
        self.begun = self.count  # the number of the last one before the current batch
        self.unsaved: list[Name] = []
        self._numbers = deque(numbers[own] for own, _ in known)

    def add(self, name: Name, number: int) -> None:
        self.unsaved.append(name)
        self._numbers.append(number)

    def needed(self, known: int, read_again: int) -> int:
        """How many of the last ones a later run needs, if `known` payloads are known and those
        after number `read_again` may be read again."""
        read_again = max(read_again, self.count - _MOST_READ_AGAIN)
        unneeded = min(self.count - known, read_again)
        while self._numbers and self._numbers[0] <= unneeded:
            self._numbers.popleft()
        return len(self._numbers)


@dataclass(slots=True)
class _HeldBlock:
    """A block that the orderer may still need: its payload, and where that came from."""

    name: Name
    number: int
    positions: dict[str, int]
    begun: int  # payloads with higher numbers came after these positions


class _Ordering:
    """Payloads in the order of a chain, and what a later run needs to continue it.

    The chain is saved without its payloads: sources are read again from where the oldest block
    began that can be rolled back or is waiting.
    """

    def __init__(
        self,
        order: Order,
        after: bytes | None,
        threshold: int,
        budget: int,
        before: ReassemblyProgress,
        delivered: _DeliveredNames,
    ) -> None:
        self.block_of = order
        self._delivered = delivered
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
        # The chain as delivered; that of the orderer may be some events ahead.
        self._chain = {block.number: (block, name) for block, name in before.chain}
        # The chain of the previous run: a reorg may return to a block that is not yet read.
        self._before = {block.hash: name for block, name in before.chain}
        self._head = max(self._chain, default=0)
        self._changed: int | None = None
        # By hash, in order of arrival.
        self._held: dict[bytes, _HeldBlock] = {}
        self._by_number: dict[int, set[bytes]] = {}
        self._numbers: list[int] = []  # a heap of the keys
        # Payloads of the previous run's chain that became final before they were read again.
        self._unread = {name[0] for _, name in before.chain}
        self._final_unread: set[bytes] = set()

    def begin(self, source: str, position: int) -> None:
        """A new source: what it sends of later blocks is also held by the older ones."""
        for held in self._held.values():
            held.positions.setdefault(source, position)

    def receive(
        self, block: Block, event: PayloadComplete, positions: dict[str, int]
    ) -> Iterator[MergeEvent]:
        name, number = (event.id, event.prefixes), self._delivered.count
        if event.id in self._final_unread:
            self._final_unread.remove(event.id)
            self._delivered.add(name, number)
            return
        self._unread.discard(event.id)
        payload = self._payloads.get(event.id)
        if payload is None:
            payload = self._payloads[event.id] = Payload(event.id, event)
        payload.complete = event
        if block.hash in self._held:
            self._delivered.add(name, number)
        else:
            self._held[block.hash] = _HeldBlock(name, number, positions, self._delivered.begun)
            if block.number not in self._by_number:
                heappush(self._numbers, block.number)
            self._by_number.setdefault(block.number, set()).add(block.hash)
        for ordered in self._orderer.receive(block, payload, event.source):
            match ordered:
                case Applied():
                    self._apply([ordered.block])
                case Reorg():
                    self._apply([each for each, _ in ordered.applied])
                case Rejected(why="room"):
                    # A later run reads it again; in this one it cannot arrive again.
                    self._payloads.pop(self._held[ordered.block.hash].name[0], None)
                case Rejected():
                    self._finish(ordered.block.hash)
            # Before the event is returned, so that progress no longer includes them.
            self._finish_old()
            yield ordered

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

    def _finish(self, own: bytes) -> None:
        held = self._held.pop(own, None)
        if held is not None:
            self._delivered.add(held.name, held.number)
            self._payloads.pop(held.name[0], None)

    def _finish_old(self) -> None:
        floor = self._head - self._threshold
        while self._chain and self._numbers and self._numbers[0] < floor:
            for own in self._by_number.pop(heappop(self._numbers)):
                self._finish(own)
        while self._chain and (lowest := next(iter(self._chain))) < floor:
            _, name = self._chain.pop(lowest)
            self._payloads.pop(name[0], None)
            if name[0] in self._unread:
                self._unread.remove(name[0])
                self._final_unread.add(name[0])
                self._delivered.add(name, self._delivered.count)

    def held(self, positions: dict[str, int]) -> tuple[dict[str, int], int]:
        """Where sources must be read again, at `positions` or before; and the number of the last
        payload that will not arrive again then."""
        oldest = next(iter(self._held.values()), None)
        if oldest is None:
            return positions, self._delivered.begun
        held = {name: min(at, oldest.positions.get(name, at)) for name, at in positions.items()}
        return held, min(self._delivered.begun, oldest.begun)

    def changed(self) -> tuple[list[tuple[Block, Name]], int]:
        """The changed end of the chain, and the lowest number that is still kept of it."""
        lowest = max(0, self._head - self._threshold)
        if self._changed is None:
            return [], lowest
        numbers = [number for number in self._chain if number >= (self._changed or 0)]
        return [self._chain[number] for number in numbers], lowest

    def saved(self) -> None:
        self._changed = None


def _size_of(payload: Payload) -> int:
    """The memory of a payload while its block waits."""
    if payload.complete is None:
        return 0
    parts = payload.complete.parts
    return sum(len(key) + len(value) for key, value in parts) + _PART_BYTES * len(parts)
