"""Orders complete payloads in a chain: parents before children, with reorgs.

Owns which blocks are known, applied, or waiting for a parent. Knows the `Block` that the
application assigns to a payload, not its content.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Generic, Literal, NamedTuple, TypeVar

from datastreamer.errors import BadArgument, UsageError

T = TypeVar("T")


class Block(NamedTuple):
    """The block of a payload: its number, its hash, its parent's hash.

    `weight` decides between branches, for example the total difficulty: at least 0, and rising from
    parent to child. None: the number, so that the longest branch counts.
    """

    number: int
    hash: bytes
    parent: bytes
    weight: int | None = None

    @property
    def heavy(self) -> int:
        """The weight, or the number if there is none."""
        return self.number if self.weight is None else self.weight


@dataclass(frozen=True, slots=True)
class Applied(Generic[T]):
    """The next block: its parent is the last one applied."""

    block: Block
    payload: T


@dataclass(frozen=True, slots=True)
class Reorg(Generic[T]):
    """Another branch is heavier: roll back `rolled_back`, newest first, then apply `applied`,
    oldest first. Neither is empty."""

    rolled_back: list[tuple[Block, T]]
    applied: list[tuple[Block, T]]


@dataclass(frozen=True, slots=True)
class Gap:
    """`block`, from `source`, waits for a missing parent. Reported once per parent."""

    missing: bytes
    number: int
    block: Block
    source: str | None


@dataclass(frozen=True, slots=True)
class Rejected(Generic[T]):
    """A block that will not be applied unless it arrives again.

    `why` is "old": it, or the fork of its branch, is too far down to be rolled back; "weight": it
    is not heavier than its parent, or its number does not follow its parent's; "room": too many
    blocks or bytes wait, and it is the furthest ahead.
    """

    why: Literal["old", "weight", "room"]
    block: Block
    payload: T


class _KnownBlock(NamedTuple, Generic[T]):
    block: Block
    payload: T


class Orderer(Generic[T]):
    """Orderer(after=None, *, applied=(), reorg_threshold=1000, most_waiting=10000,
    budget=None, size_of=None): orders payloads.

    `after` is the hash of the first block's parent: what precedes it is final. `applied` is the
    `chain` of an earlier run to continue. Without either, the first block to arrive is the first.

    Blocks are known, with their payloads, down to `reorg_threshold` numbers below the last one
    applied; a branch that forks further down is never applied. At most `most_waiting` blocks wait
    for parents, and with `budget` at most that many bytes, or one block; `size_of` returns the size
    of a payload that waits. Between branches of equal weight, the applied one stays.
    """

    def __init__(
        self,
        after: bytes | None = None,
        *,
        applied: Iterable[tuple[Block, T]] = (),
        reorg_threshold: int = 1000,
        most_waiting: int = 10_000,
        budget: int | None = None,
        size_of: Callable[[T], int] | None = None,
    ) -> None:
        if reorg_threshold < 0:
            raise BadArgument(f"reorg_threshold must be at least 0, not {reorg_threshold}")
        if most_waiting < 1:
            raise BadArgument(f"most_waiting must be at least 1, not {most_waiting}")
        if budget is not None and budget < 1:
            raise BadArgument(f"budget must be at least 1 byte, not {budget}")
        if (budget is None) != (size_of is None):
            raise UsageError("pass `budget` and `size_of` together")
        self._after = after
        self._threshold = reorg_threshold
        self._most_waiting = most_waiting
        self._budget = budget
        self._size_of = size_of
        self._known: dict[bytes, _KnownBlock[T]] = {}
        self._chain: OrderedDict[bytes, None] = OrderedDict()  # hashes, oldest first
        self._by_number: dict[int, set[bytes]] = {}
        self._lowest = 0
        self._head: Block | None = None
        self._waiting: dict[bytes, dict[bytes, _KnownBlock[T]]] = {}  # by the parent's hash
        self._waits_for: dict[bytes, bytes] = {}
        self._sizes: dict[bytes, int] = {}  # of waiting blocks
        self._waiting_bytes = 0
        self._lowest_waiting = 0  # at most the lowest number of a waiting block
        for block, payload in applied:
            if self._head is None:
                self._after = block.parent
                self._add_fork(_KnownBlock(block, payload))
            elif block.parent != self._head.hash or block.number != self._head.number + 1:
                raise UsageError(
                    f"`applied` is not a chain: {block.number} does not follow {self._head.number}"
                )
            self._add(_KnownBlock(block, payload))
            self._chain[block.hash] = None
            self._head = block
        if self._head is not None:
            if after is not None:
                raise UsageError("`applied` says where to continue: omit `after`")
            self._forget()

    @property
    def head(self) -> Block | None:
        """The last block applied."""
        return self._head

    @property
    def chain(self) -> list[tuple[Block, T]]:
        """What is applied and can be rolled back, oldest first."""
        found = [self._known[own] for own in self._chain if own != self._after]
        return [(block, payload) for block, payload in found]

    @property
    def waiting(self) -> int:
        """The number of blocks that wait for a parent."""
        return len(self._waits_for)

    @property
    def missing(self) -> list[bytes]:
        """The hashes of missing parents; not of those that wait themselves."""
        return [parent for parent in self._waiting if parent not in self._waits_for]

    def receive(
        self, block: Block, payload: T, source: str | None = None
    ) -> list[Applied[T] | Reorg[T] | Gap | Rejected[T]]:
        """Process a block; returns what to do now, in order. A block that is known or waiting is
        ignored. Raises `UsageError` if a block is its own parent."""
        if block.hash == block.parent:
            raise UsageError(f"block 0x{block.hash.hex()} is its own parent")
        events: list[Applied[T] | Reorg[T] | Gap | Rejected[T]] = []
        if block.hash in self._known or block.hash in self._waits_for:
            return events
        fits = self._is_first(block) or block.parent in self._known
        if not fits and self._head is not None and block.number <= self._floor():
            return [Rejected("old", block, payload)]
        if not fits:
            if not self._waits_for or block.number < self._lowest_waiting:
                self._lowest_waiting = block.number
            reported = block.parent in self._waiting or block.parent in self._waits_for
            self._waiting.setdefault(block.parent, {})[block.hash] = _KnownBlock(block, payload)
            self._waits_for[block.hash] = block.parent
            if self._size_of is not None:
                self._sizes[block.hash] = size = self._size_of(payload)
                self._waiting_bytes += size
            if not reported:
                events.append(Gap(block.parent, block.number - 1, block, source))
            while self._too_much():
                events.append(self._reject_furthest())
            return events
        ready = [_KnownBlock(block, payload)]
        while ready:
            found = ready.pop()
            # Children of one parent are processed in order of arrival.
            if self._append(found, events):
                children = self._waiting.pop(found.block.hash, {})
                for child in children:
                    self._stop_waiting(child)
                ready.extend(reversed(children.values()))
        events.extend(self._forget())
        return events

    def _is_first(self, block: Block) -> bool:
        return self._head is None and self._after in (None, block.parent)

    def _floor(self) -> int:
        """Blocks up to this number, and their children, can no longer be applied."""
        assert self._head is not None
        return self._head.number - self._threshold

    def _append(
        self, found: _KnownBlock[T], events: list[Applied[T] | Reorg[T] | Gap | Rejected[T]]
    ) -> bool:
        """Append a block to its parent, which is known; False if it does not follow it."""
        block = found.block
        if self._head is None:
            self._lowest = block.number
            if self._after is not None:
                self._add_fork(found)
        else:
            parent = self._known[block.parent].block
            if block.heavy <= parent.heavy or block.number != parent.number + 1:
                events.append(Rejected("weight", *found))
                return False
        self._add(found)
        if self._head is None or block.parent == self._head.hash:
            self._chain[block.hash] = None
            self._head = block
            events.append(Applied(*found))
        elif block.heavy > self._head.heavy:
            events.append(self._reorg(found))
        return True

    def _add_fork(self, first: _KnownBlock[T]) -> None:
        """Add the parent of the first block, so that branches can fork from it."""
        self._lowest = first.block.number - 1
        before = Block(self._lowest, first.block.parent, b"", -1)
        self._add(_KnownBlock(before, first.payload))
        self._chain[before.hash] = None

    def _add(self, found: _KnownBlock[T]) -> None:
        self._known[found.block.hash] = found
        self._by_number.setdefault(found.block.number, set()).add(found.block.hash)

    def _reorg(self, found: _KnownBlock[T]) -> Reorg[T] | Rejected[T]:
        applied = [found]
        while applied[-1].block.parent not in self._chain:
            parent = self._known.get(applied[-1].block.parent)
            if parent is None:
                return Rejected("old", *found)
            applied.append(parent)
        fork = applied[-1].block.parent
        rolled_back = []
        while (last := next(reversed(self._chain))) != fork:
            rolled_back.append(self._known[last])
            del self._chain[last]
        applied.reverse()
        for known in applied:
            self._chain[known.block.hash] = None
        self._head = found.block
        return Reorg([(b, p) for b, p in rolled_back], [(b, p) for b, p in applied])

    def _forget(self) -> list[Rejected[T]]:
        """Forget blocks too old to be rolled back, and reject what waits below them."""
        assert self._head is not None
        floor = self._floor()
        while self._lowest < floor:
            for old in self._by_number.pop(self._lowest, ()):
                del self._known[old]
                self._chain.pop(old, None)
            self._lowest += 1
        if not self._waits_for or self._lowest_waiting > floor:
            return []
        all_waiting = [k for children in self._waiting.values() for k in children.values()]
        waited = [known for known in all_waiting if known.block.number <= floor]
        for known in waited:
            self._remove_waiting(known.block)
        numbers = [known.block.number for known in all_waiting if known.block.number > floor]
        self._lowest_waiting = min(numbers, default=0)
        return [Rejected("old", *known) for known in waited]

    def _too_much(self) -> bool:
        waiting = len(self._waits_for)
        if self._budget is not None and self._waiting_bytes > self._budget and waiting > 1:
            return True
        return waiting > self._most_waiting

    def _stop_waiting(self, own: bytes) -> bytes:
        self._waiting_bytes -= self._sizes.pop(own, 0)
        return self._waits_for.pop(own)

    def _remove_waiting(self, block: Block) -> None:
        parent = self._stop_waiting(block.hash)
        siblings = self._waiting[parent]
        del siblings[block.hash]
        if not siblings:
            del self._waiting[parent]

    def _reject_furthest(self) -> Rejected[T]:
        known = max(
            (known for children in self._waiting.values() for known in children.values()),
            key=lambda known: (known.block.number, known.block.hash),
        )
        self._remove_waiting(known.block)
        return Rejected("room", *known)
