"""Finds blocks and batches in a file by binary search over its pages, without an index.

Relies on what sequencers write and `datastreamer zkevm check` verifies: a bookmark precedes its
block or batch, and their numbers rise. Reads each page only up to the first bookmark of the kind.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, NamedTuple

from datastreamer.errors import DamagedEntry, UnknownBookmark
from datastreamer.format import page_start, pages_for
from datastreamer.storage.read.reader import Reader
from datastreamer.storage.read.spans import Cursor
from datastreamer.zkevm.bookmark_keys import BookmarkName, Kind, key_of, name_of_key

# Bytes to read of a page at first; doubled until a bookmark is found.
_FIRST_READ: Final = 64 << 10


class Found(NamedTuple):
    """A bookmark: the number of its block or batch, and the number of its entry."""

    number: int
    entry: int


class BookmarkSearch:
    """The bookmarks of one kind in one file. Methods raise what reading raises."""

    def __init__(self, reader: Reader, path: str, version: int, kind: Kind) -> None:
        self._reader = reader
        self._path = path
        self._version = version
        self._kind = kind
        self._pages = pages_for(reader.head.length)
        self._firsts: dict[int, Found | None] = {}
        self._damage: DamagedEntry | None = None

    def entry_of(self, number: int) -> int:
        """The entry of the bookmark of this block or batch.

        Raises `UnknownBookmark`, or `DamagedEntry` if damage may hide the bookmark.
        """
        found = self._last_up_to(number)
        if found is None or found.number != number:
            if self._damage is not None:
                raise self._damage
            key = key_of(self._version, BookmarkName(self._kind, number))
            raise UnknownBookmark(key, f"{self._path}: no bookmark {self._kind}:{number}")
        return found.entry

    def _last_up_to(self, number: int) -> Found | None:
        """The last bookmark with at most this number."""
        low, high = 0, self._pages
        within: int | None = None
        while low < high:
            middle = (low + high) // 2
            found = None
            for page in range(middle, high):
                found = self._first_in(page)
                if found is not None:
                    break
            if found is None or found.number > number:
                high = middle
            else:
                within, low = page, page + 1
        last = None
        if within is not None:
            for found in self._bookmarks_in(within):
                if found.number > number:
                    break
                last = found
        return last

    def _first_in(self, page: int) -> Found | None:
        """The first bookmark in a page; None if there is none, or if damage precedes it."""
        if page not in self._firsts:
            self._firsts[page] = None
            try:
                self._firsts[page] = next(self._bookmarks_in(page), None)
            except DamagedEntry as error:
                self._damage = error
        return self._firsts[page]

    def _bookmarks_in(self, page: int) -> Iterator[Found]:
        """The bookmarks in a page, in order."""
        reader = self._reader
        cursor, size = Cursor(page_start(page), reader.first_number(page)), _FIRST_READ
        stop = reader.head.entries
        if page + 1 < self._pages:
            stop = reader.first_number(page + 1)
        while cursor.number < stop:
            batch, cursor = reader.run(cursor, size)
            size *= 2
            for key, entry in batch.bookmarks():
                name = name_of_key(self._version, key)
                if name is not None and name.kind == self._kind:
                    yield Found(name.number, entry)
