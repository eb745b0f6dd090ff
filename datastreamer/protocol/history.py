"""Hashes of the last entries received, which distinguish one history of a stream from another.

Owns the hashing of entries and their comparison. One entry proves little (the end of a replaced
block has the same bytes), so the last 256 are remembered.
"""

from __future__ import annotations

from typing import Final

from xxhash import xxh3_64_digest

from datastreamer._codec import EntryBatch
from datastreamer.format import ENTRY_HEAD_SIZE
from datastreamer.position import HASH_SIZE, KEPT, Identity, Position

HELD: Final = 8
"""Batches that are held unhashed, at most; each holds a buffer of up to some MiB."""


class Trail:
    """The hashes of up to 256 entries before `next_number`."""

    types: frozenset[int] | None = None
    """None: entries of all types are remembered."""

    def __init__(self, next_number: int, hashes: bytes = b"") -> None:
        self.next_number = next_number
        self._hashes = hashes
        # Hashed when needed: in a fast stream, the next batches replace them anyway.
        self._unhashed: list[EntryBatch] = []

    @classmethod
    def of(cls, position: Position) -> Trail:
        """The trail of a position."""
        return cls(position.next_entry, position.trail)

    def position(self, stream: Identity | None) -> Position:
        """The position after the remembered entries."""
        return Position(self.next_number, self.hashes, stream)

    def certain(self, differing: int) -> bool:
        """Whether an entry before this one is remembered, and was therefore found to be equal."""
        return differing > self.first_number

    @property
    def hashes(self) -> bytes:
        """8 bytes per entry, oldest first."""
        if self._unhashed:
            found = b"".join([hashes_of(batch[-KEPT:]) for batch in self._unhashed])
            self._hashes = (self._hashes + found)[-KEPT * HASH_SIZE :]
            self._unhashed = []
        return self._hashes

    @property
    def first_number(self) -> int:
        """The oldest remembered entry; `next_number` if there is none."""
        return self.next_number - len(self.hashes) // HASH_SIZE

    def extend(self, batch: EntryBatch) -> None:
        """Add the next entries. The batch and its buffer may be held until more are added."""
        if len(batch) >= KEPT:
            self._hashes, self._unhashed = b"", [batch]
        else:
            self._unhashed.append(batch)
            if len(self._unhashed) > HELD:
                self._reduce()
        self.next_number = batch.next_number

    def _reduce(self) -> None:
        """Drop the batches that later ones have replaced; hash all if there is none."""
        entries = 0
        for at in range(len(self._unhashed) - 1, 0, -1):
            entries += len(self._unhashed[at])
            if entries >= KEPT:
                self._hashes, self._unhashed = b"", self._unhashed[at:]
                return
        _ = self.hashes

    def extended(self, batch: EntryBatch) -> Trail:
        """A copy with these entries added."""
        longer = Trail(self.next_number, self.hashes)
        longer.extend(batch)
        return longer

    def cut(self, number: int) -> None:
        """Forget the entries from `number` on, which must be remembered."""
        self._hashes = self.hashes[: (number - self.first_number) * HASH_SIZE]
        self.next_number = number

    def first_difference(self, batch: EntryBatch) -> int | None:
        """The first entry of `batch` that differs from the remembered one; all must be
        remembered."""
        at = (batch.first_number - self.first_number) * HASH_SIZE
        found = hashes_of(batch)
        known = self.hashes[at : at + len(found)]
        if found == known:
            return None
        places = range(0, len(found), HASH_SIZE)
        differing = next(
            place
            for place in places
            if found[place : place + HASH_SIZE] != known[place : place + HASH_SIZE]
        )
        return batch.first_number + differing // HASH_SIZE


def hashes_of(batch: EntryBatch) -> bytes:
    """8 bytes for each entry, of its head and data."""
    packed = memoryview(batch.packed())
    hashes = []
    begin = 0
    for length in batch.lengths:
        end = begin + ENTRY_HEAD_SIZE + length
        hashes.append(xxh3_64_digest(packed[begin:end]))
        begin = end
    return b"".join(hashes)
