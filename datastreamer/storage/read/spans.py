"""Positions in a stream file, and runs of whole entries between two of them."""

from __future__ import annotations

from bisect import bisect_right
from typing import NamedTuple

from datastreamer._codec import EntryBatch


class Cursor(NamedTuple):
    """A place between two entries: the next one is `number`, at `offset` or after padding there."""

    offset: int
    number: int


class Span(NamedTuple):
    """Contiguous whole entries in the file, and the place after them."""

    start: int
    end: int
    next: Cursor


class Chunk(NamedTuple):
    """The same, read."""

    start: int
    data: memoryview
    batch: EntryBatch
    next: Cursor

    def boundary(self, offset: int) -> Cursor:
        """The last place between two entries at or before file offset `offset`."""
        if offset >= self.start + len(self.data):
            return self.next
        at = bisect_right(self.batch.offsets, offset - self.start) - 1
        return Cursor(self.start + self.batch.offsets[at], self.batch.first_number + at)
