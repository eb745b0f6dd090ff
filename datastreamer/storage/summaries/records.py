"""`FILE.pages`: of each page a count of its entries by type, the least and greatest numbers in its
events, and when its entries were committed.

Owns the bytes of that file, which ``docs/FILE.md`` specifies. Nothing depends on it: readers ignore
a record that is missing or torn, or whose digest is not the page's. `keeper.py` decides what is
written, and when.
"""

from __future__ import annotations

import struct
from itertools import pairwise
from typing import Final, NamedTuple

from xxhash import xxh3_64_intdigest

from datastreamer.format import PAGE_SIZE, U64_MAX
from datastreamer.selection.times import LATEST_MS
from datastreamer.storage.pages.sidecar import RECORDS_OFFSET, StoredRecords, is_signed, signed
from datastreamer.storage.summaries._counting import count

SUFFIX: Final = ".pages"
RECORD_SIZE: Final = 1024
MOST_MARKS: Final = 89
RESOLUTION: Final = 1000
"""The least time between two marks of a page, in ms, except at the start of a page."""
UNKNOWN_TIME: Final = (1 << 48) - 1
"""In the place of a mark's time: the times of the entries up to the next mark are not known."""

# The type of the event, and the number of its field, of each range.
_FIELDS: Final = ((1, 1), (2, 1), (2, 2), (2, 3), (6, 1), (3, 1), (4, 1), (5, 1), (5, 2))

_LETTERS: Final = b"DSpages_"
_HEADER: Final = struct.Struct(">8sII16s")
_RECORD: Final = struct.Struct(">16sQIIIHHQ18Q24I")
_SUM: Final = struct.Struct(">Q")
_MOST_TYPES: Final = 12
_MORE_TYPES: Final = 0xFFFF
_COUNTED: Final = 1
_UNREADABLE: Final = 2
_NO_RANGES: Final = (U64_MAX, 0) * len(_FIELDS)
_ANY: Final = (0, U64_MAX) * len(_FIELDS)

Mark = tuple[int, int]
"""An entry and Unix ms: the commit that begins with this entry was made then."""


class PageSummary(NamedTuple):
    """What the first `covered` bytes of a page hold: `entries` entries from number `first` on,
    whose hash is `digest`.

    Of consecutive marks, the commits between the first and the second were made less than
    `resolution` ms after the first. `types` are pairs of a type and its count (None: too many
    types). Read counts and ranges by `counts` and `range`.
    """

    digest: bytes
    first: int
    covered: int
    entries: int
    resolution: int = RESOLUTION
    marks: tuple[Mark, ...] = ()
    flags: int = 0
    ranges: tuple[int, ...] = _NO_RANGES
    types: tuple[tuple[int, int], ...] | None = ()

    @property
    def next_number(self) -> int:
        """The number of the entry after those that it covers."""
        return self.first + self.entries

    @property
    def spans(self) -> list[tuple[int, int, int]]:
        """The entries whose times are known, by `marks`: of each mark the first one, the one after
        the last, and Unix ms."""
        stops = [*(entry for entry, _ in self.marks[1:]), self.next_number]
        known = zip(self.marks, stops, strict=False)
        return [(entry, stop, ms) for (entry, ms), stop in known if ms != UNKNOWN_TIME]

    @property
    def counted(self) -> bool:
        """Whether it is more than marks."""
        return bool(self.flags & _COUNTED)

    @property
    def counts(self) -> dict[int, int] | None:
        """The number of entries of each type, bookmarks included; None if that is not known."""
        return dict(self.types) if self.counted and self.types is not None else None

    @property
    def has_ranges(self) -> bool:
        """Whether `range` knows anything."""
        return self.counted and not self.flags & _UNREADABLE

    def range(self, which: int) -> tuple[int, int] | None:
        """The least and the greatest number of a field, by its place in `ranges`, if `has_ranges`;
        None if the page has no such event."""
        least, greatest = self.ranges[2 * which : 2 * which + 2]
        return None if least > greatest else (least, greatest)

    def counting(self, content: bytes) -> PageSummary | None:
        """The same with counts and ranges of the page, which begins with `content`; None if these
        are no such entries."""
        found = count(content, self.covered, _FIELDS, _MOST_TYPES)
        if found is None or found[0] != self.entries:
            return None
        _, unreadable, ranges, types = found
        flags = _COUNTED | _UNREADABLE if unreadable else _COUNTED
        return self._replace(flags=flags, ranges=_ANY if unreadable else ranges, types=types)

    def pack(self, page: int, stream_id: bytes) -> bytes:
        types = self.types or ()
        packed = _RECORD.pack(
            *(self.digest, self.first, self.covered, self.entries, self.flags),
            *(_MORE_TYPES if self.types is None else len(types), len(self.marks), self.resolution),
            *self.ranges,
            *(number for pair in types for number in pair),
            *(0,) * (2 * (_MOST_TYPES - len(types))),
        )
        marks = ((entry - self.first) << 48 | ms for entry, ms in self.marks)
        packed += struct.pack(f">{len(self.marks)}Q", *marks)
        return signed(packed.ljust(RECORD_SIZE - _SUM.size, b"\0"), page, stream_id)

    @classmethod
    def unpack(cls, packed: bytes, page: int, stream_id: bytes) -> PageSummary | None:
        """None unless it is the whole record of that page, of numbers that a record can have."""
        if not is_signed(packed, page, stream_id):
            return None
        digest, first, covered, entries, flags, types, marks, resolution, *numbers = (
            _RECORD.unpack_from(packed)
        )
        found = struct.unpack_from(f">{min(marks, MOST_MARKS)}Q", packed, _RECORD.size)
        counts = numbers[18 : 18 + 2 * min(types, _MOST_TYPES)]
        summary = cls(
            *(digest, first, covered, entries, resolution),
            tuple((first + (mark >> 48), mark & UNKNOWN_TIME) for mark in found),
            *(flags, tuple(numbers[:18])),
            None if types == _MORE_TYPES else tuple(zip(counts[::2], counts[1::2], strict=True)),
        )
        return summary if summary._is_possible() else None

    def _is_possible(self) -> bool:
        times = [ms for *_, ms in self.spans]
        return (
            max(self.covered, self.entries) <= PAGE_SIZE
            and max([self.resolution, *times]) <= LATEST_MS
            and times == sorted(times)
            and all(one[0] < other[0] for one, other in pairwise(self.marks))
            and self.next_number <= U64_MAX
            and all(entry <= self.next_number for entry, _ in self.marks[-1:])
            and all(ms != UNKNOWN_TIME for _, ms in self.marks[:1])
        )


def thinned(marks: list[Mark], resolution: int) -> tuple[list[Mark], int]:
    """At most as many marks as a record has room for, and their resolution: that of the marks that
    are given, doubled until enough of these can be left out."""
    while len(marks) > MOST_MARKS:
        kept = marks[:1]
        for before, mark in pairwise(marks):
            # What is left out, and all up to the next mark, is less than twice as late; also what
            # is not known between two that are.
            if mark[1] != UNKNOWN_TIME and mark[1] - kept[-1][1] > resolution:
                kept += [before, mark] if before[1] == UNKNOWN_TIME else [mark]
        kept += [mark for mark in marks[-1:] if mark[1] == UNKNOWN_TIME]
        marks, resolution = kept, 2 * resolution
    return marks, resolution


class StoredSummaries(StoredRecords[PageSummary]):
    """The records in an open `FILE.pages` that is read."""

    size = RECORD_SIZE

    def unpack(self, packed: bytes, page: int, stream_id: bytes) -> PageSummary | None:
        return PageSummary.unpack(packed, page, stream_id)

    def stream_id(self) -> bytes | None:
        """The id of the stream that the records are about; None if the header is not whole."""
        packed = self._readable.read(_HEADER.size + _SUM.size, 0)
        same = packed == pack_header(packed[16:32])[: _HEADER.size + _SUM.size]
        return packed[16:32] if same else None


def pack_header(stream_id: bytes) -> bytes:
    packed = _HEADER.pack(_LETTERS, 1, 0, stream_id)
    return (packed + _SUM.pack(xxh3_64_intdigest(packed))).ljust(RECORDS_OFFSET, b"\0")
