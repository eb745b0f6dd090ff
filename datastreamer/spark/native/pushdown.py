"""Which entries a scan needs, as far as its filters say.

Owns what filters say about the numbers of entries, blocks and batches. Filters only narrow what is
read: Spark applies all of them.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from typing import Any, Final, NamedTuple

from datastreamer.errors import DamagedEntry, DecodeFailed
from datastreamer.format import U64_MAX
from datastreamer.spark.read.bookmark_search import BookmarkSearch, Found
from datastreamer.spark.read.schemas import number_column
from datastreamer.zkevm.bookmark_keys import Kind
from datastreamer.zkevm.decoding import decode_data
from datastreamer.zkevm.events import BatchStart, L2Block
from datastreamer.zkevm.fixed import StartL2Block

_BLOCKS: Final = (L2Block, StartL2Block)

# Pages without a bookmark of the kind after which a search gives up.
_MOST_PAGES: Final = 32

# Columns whose numbers rise with the entry numbers: (table, column) -> what they number.
_RISING: Final[dict[tuple[str, str], Kind]] = {
    ("blocks", "number"): "block",
    ("blocks", "batch_number"): "batch",
    ("block_ends", "number"): "block",
    ("transactions", "l2block_number"): "block",
    ("batches", "number"): "batch",
    ("batch_ends", "number"): "batch",
}


class NumberRange(NamedTuple):
    """A range of integers, both ends included."""

    first: int = 0
    last: int = U64_MAX

    def __and__(self, other: NumberRange) -> NumberRange:
        return NumberRange(max(self.first, other.first), min(self.last, other.last))


ALL: Final = NumberRange()
"""All numbers that an entry, a block or a batch can have."""


class Wanted(NamedTuple):
    """The numbers of the entries that a scan needs, and of the blocks and batches that they belong
    to."""

    entries: NumberRange = ALL
    blocks: NumberRange = ALL
    batches: NumberRange = ALL


def wanted(table: str, filters: Iterable[Mapping[str, Any]]) -> Wanted:
    """What all of these filters together accept. A filter is a column and the least and greatest
    value that it accepts (None: no limit)."""
    found = Wanted()
    for each in filters:
        column, least, most = each["column"], each["least"], each["most"]
        accepted = NumberRange(
            ALL.first if least is None else least, ALL.last if most is None else most
        )
        kind = _RISING.get((table, column))
        if column == number_column(table):
            found = found._replace(entries=found.entries & accepted)
        elif kind == "block":
            found = found._replace(blocks=found.blocks & accepted)
        elif kind == "batch":
            found = found._replace(batches=found.batches & accepted)
    return found


class RangeSearch(BookmarkSearch):
    """Finds the entries of several blocks or batches."""

    def range_of(self, wanted: NumberRange) -> NumberRange:
        """A range of entries that holds all of these blocks or batches, and maybe others.

        All entries if the stream does not look as sequencers write it, or damage or missing
        bookmarks hide where they are: the bookmarks and pages that the search reads have to rise,
        and the two that limit the range have to be those of the blocks or batches after them.
        """
        try:
            before = self._between(wanted.first)[0] if wanted.first > ALL.first else None
            after = self._between(wanted.last)[1] if wanted.last < ALL.last else None
            limits = [found for found in (before, after) if found is not None]
            if not all(self._names_what_follows(found) for found in limits):
                return ALL
        except (DamagedEntry, DecodeFailed):
            return ALL
        seen = [found for _, found in sorted(self._firsts.items()) if found is not None]
        if any(one.number >= two.number for one, two in itertools.pairwise(seen)):
            return ALL
        return NumberRange(
            ALL.first if before is None else before.entry,
            ALL.last if after is None else after.entry - 1,
        )

    def _names_what_follows(self, found: Found) -> bool:
        """Whether the next event is the start of the block or batch that the bookmark names."""
        entry = self._reader.first_event(found.entry)
        if entry is None:
            return False
        event = decode_data(entry.type, entry.data, version=self._version, number=entry.number)
        if self._kind == "block":
            return isinstance(event, _BLOCKS) and event.number == found.number
        if isinstance(event, BatchStart):
            return event.number == found.number
        # Version 1 has no event for the start of a batch.
        return isinstance(event, StartL2Block) and event.batch_number == found.number

    def _between(self, number: int) -> tuple[Found | None, Found | None]:
        """The last bookmark with at most this number, and the first with a higher one.

        None for one that does not exist; both None after `_MOST_PAGES` pages without a bookmark.
        """
        low, high = 0, self._pages
        before = after = None
        while low < high:
            middle = (low + high) // 2
            for page in range(middle, min(high, middle + _MOST_PAGES)):
                found = self._first_in(page)
                if found is not None:
                    break
            else:
                if high - middle > _MOST_PAGES:
                    return None, None
                high = middle
                continue
            if found.number > number:
                after, high = found, middle
            else:
                before, low = (found, page), page + 1
        if before is None:
            return None, after
        last, page = before
        for found in self._bookmarks_in(page):
            if found.number > number:
                return last, found
            last = found
        return last, after
