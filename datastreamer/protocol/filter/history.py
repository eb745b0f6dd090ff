"""Hashes of the last entries received of a selection, with their numbers.

Like `history`, for a streaming whose entries have gaps. A trail claims that the selected entries
from `first_number` up to `next_number` are these, and no others.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import zip_longest

from datastreamer._codec import EntryBatch
from datastreamer.position import HASH_SIZE, KEPT, SPAN, Chosen, Identity, Position
from datastreamer.protocol.history import HELD, hashes_of
from datastreamer.selection.clauses import Selection


class FilteredTrail:
    """Up to `KEPT` entries that `where` selects before `next_number`, among the last `SPAN` of
    all."""

    def __init__(
        self,
        where: Selection,
        next_number: int,
        first_number: int | None = None,
        kept: Iterable[tuple[int, bytes]] = (),
    ) -> None:
        self.where: Selection | None = where
        self.next_number = next_number
        self._first = next_number if first_number is None else first_number
        self._kept = list(kept)
        # Hashed when needed: in a fast stream, the next batches replace them anyway.
        self._unhashed: list[EntryBatch] = []

    @classmethod
    def of(cls, position: Position, chosen: Chosen) -> FilteredTrail:
        """The trail of a position."""
        hashes = [
            position.trail[at : at + HASH_SIZE] for at in range(0, len(position.trail), HASH_SIZE)
        ]
        kept = zip(chosen.numbers, hashes, strict=True)
        return cls(chosen.where, position.next_entry, chosen.first_entry, kept)

    def position(self, stream: Identity | None) -> Position:
        """The position after the remembered entries."""
        self._hash_all()
        numbers = tuple([number for number, _ in self._kept])
        hashes = b"".join([found for _, found in self._kept])
        chosen = Chosen(self.where or (), self._first, numbers)
        return Position(self.next_number, hashes, stream, chosen)

    @property
    def first_number(self) -> int:
        """The beginning of the remembered range of the stream."""
        self._hash_all()
        return self._first

    def certain(self, differing: int) -> bool:
        """Whether an entry before this one is remembered, and was therefore found to be equal."""
        return any(number < differing for number, _ in self._kept)

    def extend(self, batch: EntryBatch) -> None:
        """Add the next entries, all of them selected. The batch and its buffer may be held until
        more are added."""
        self._unhashed.append(batch)
        self.next_number = batch.next_number
        if len(batch) >= KEPT:
            last = batch[-KEPT:]
            self._kept, self._unhashed, self._first = [], [last], last.first_number
        elif len(self._unhashed) > HELD:
            self._hash_all()

    def extended(self, batch: EntryBatch) -> FilteredTrail:
        """A copy with these entries added."""
        self._hash_all()
        longer = FilteredTrail(self.where or (), self.next_number, self._first, self._kept)
        longer.extend(batch)
        return longer

    def cut(self, number: int) -> None:
        """Forget the entries from `number` on."""
        self._hash_all()
        self._kept = [pair for pair in self._kept if pair[0] < number]
        self.next_number = number
        self._first = min(self._first, number)

    def first_difference(self, batch: EntryBatch) -> int | None:
        """The first entry that differs in the range of `batch`: another one, a missing one or an
        additional one. The batch holds only selected entries."""
        self._hash_all()
        first, end = batch.first_number, batch.next_number
        known = [pair for pair in self._kept if first <= pair[0] < end]
        for there, remembered in zip_longest(_pairs(batch), known):
            if there == remembered:
                continue
            if there is None or remembered is None:
                return int((there or remembered)[0])
            return int(min(there[0], remembered[0]))
        return None

    def _hash_all(self) -> None:
        for batch in self._unhashed:
            self._kept += _pairs(batch)
        self._unhashed = []
        if len(self._kept) > KEPT:
            del self._kept[:-KEPT]
            self._first = self._kept[0][0]
        floor = self.next_number - SPAN
        if floor > self._first:
            self._first = floor
            self._kept = [pair for pair in self._kept if pair[0] >= floor]


def _pairs(batch: EntryBatch) -> list[tuple[int, bytes]]:
    hashes = hashes_of(batch)
    return [
        (number, hashes[at * HASH_SIZE : (at + 1) * HASH_SIZE])
        for at, number in enumerate(batch.numbers)
    ]
