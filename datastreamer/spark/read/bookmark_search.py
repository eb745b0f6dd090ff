"""Where blocks and batches stand in a file, found by halves without any index.

Owns the search. It relies on what sequencers write and `datastreamer zkevm check` proves: a
bookmark stands before its block or batch, and their numbers rise. Reads as little as it can:
of each page that it looks at, up to the first bookmark of the kind.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, NamedTuple

from datastreamer.errors import DamagedEntry, UnknownBookmark
from datastreamer.format import page_start, pages_for
from datastreamer.spark.read.pushdown import ALL, NumberRange
from datastreamer.storage.read.reader import Reader
from datastreamer.storage.read.spans import Cursor
from datastreamer.zkevm.keys import BookmarkName, Kind, key_of, name_of_key

# Of a page that is looked at; twice as much where no bookmark stands in it.
_LOOK: Final = 64 << 10
# So many pages without a bookmark of the kind: they are of no help where it is not needed.
_PATIENCE: Final = 32


class Found(NamedTuple):
    """A bookmark: the number of its block or batch, and its entry's."""

    number: int
    entry: int


class BookmarkSearch:
    """The bookmarks of one kind in one file. Raises what reading raises."""

    def __init__(self, reader: Reader, path: str, version: int, kind: Kind) -> None:
        self._reader = reader
        self._path = path
        self._version = version
        self._kind = kind
        self._pages = pages_for(reader.head.length)
        self._firsts: dict[int, Found | None] = {}
        self._damage: DamagedEntry | None = None

    def exact(self, number: int) -> int:
        """The entry of the bookmark of this block or batch, whatever it takes to find it.

        Raises `UnknownBookmark`; the damage, where that may hide it.
        """
        before, _ = self._around(number, self._pages)
        if before is None or before.number != number:
            if self._damage is not None:
                raise self._damage
            key = key_of(self._version, BookmarkName(self._kind, number))
            raise UnknownBookmark(key, f"{self._path}: no bookmark {self._kind}:{number}")
        return before.entry

    def entries_of(self, wanted: NumberRange) -> NumberRange:
        """Entries that hold all of these blocks or batches, and perhaps others."""
        found = ALL
        before = behind = None
        if wanted.first > ALL.first:
            before, behind = self._around(wanted.first, _PATIENCE)
        if wanted.last == ALL.last:
            behind = None
        elif behind is None or wanted.last > wanted.first:
            behind = self._around(wanted.last, _PATIENCE)[1]
        if before is not None:
            found &= NumberRange(first=before.entry)
        if behind is not None:
            found &= NumberRange(last=behind.entry - 1)
        return found

    def _around(self, number: int, patience: int) -> tuple[Found | None, Found | None]:
        """The last bookmark with at most this number, and the first one behind it; None where
        there is none, or more than `patience` pages behind one another have none."""
        low, high = 0, self._pages
        before = behind = None
        while low < high:
            middle = (low + high) // 2
            for page in range(middle, min(high, middle + patience)):
                found = self._first_in(page)
                if found is not None:
                    break
            else:
                if high - middle > patience:
                    return None, None
                high = middle
                continue
            if found.number > number:
                behind, high = found, middle
            else:
                before, low = (found, page), page + 1
        if before is None:
            return None, behind
        last, page = before
        for found in self._marks_in(page):
            if found.number > number:
                return last, found
            last = found
        return last, behind

    def _first_in(self, page: int) -> Found | None:
        """The first bookmark in a page; None where there is none, or damage before it."""
        if page not in self._firsts:
            self._firsts[page] = None
            try:
                self._firsts[page] = next(self._marks_in(page), None)
            except DamagedEntry as error:
                self._damage = error
        return self._firsts[page]

    def _marks_in(self, page: int) -> Iterator[Found]:
        """The bookmarks in a page, in order."""
        reader = self._reader
        cursor, size = Cursor(page_start(page), reader.first_number(page)), _LOOK
        beyond = reader.head.entries
        if page + 1 < self._pages:
            beyond = reader.first_number(page + 1)
        while cursor.number < beyond:
            batch, cursor = reader.run(cursor, size)
            size *= 2
            for key, entry in batch.bookmarks():
                mark = name_of_key(self._version, key)
                if mark is not None and mark.kind == self._kind:
                    yield Found(mark.number, entry)
