"""The page directory: the first entry of each page, where its entries end, and its table.

Uses bounded memory. Trusts no number that contradicts the page before or after. The caller passes
the head, and begins with an empty directory after truncations and changes.
"""

from __future__ import annotations

import contextlib
import threading
from bisect import bisect_left, bisect_right
from typing import cast

from datastreamer._pages import PageTable, walk
from datastreamer.errors import CorruptEntries, DamagedEntry, DamagedPage, UnknownEntry
from datastreamer.format import (
    ENTRY_HEAD_SIZE,
    ENTRY_HEAD_STRUCT,
    PACKET_ENTRY,
    PAGE_SIZE,
    page_of,
    page_start,
    pages_for,
)
from datastreamer.storage.disk.file_ops import Numbered, Readable
from datastreamer.storage.header.records import Head
from datastreamer.storage.read.evicted import PagedFile

# Bounds of the directory's memory: 16 bytes and two small ints for each page; tables (4 KB for a
# page with entries of 200 bytes, at most 32 KB) of the pages that point reads used last.
_KNOWN_PAGES = 1 << 16
_TABLES = 1024
# The number of damaged pages that errors name.
_KNOWN_DAMAGED = 64
# A table covers its page up to the entry that was looked up; it grows in steps that double.
_FIRST_LOOK = 64 * 1024


class Pages:
    """What is known of the pages of one history of the stream.

    After a truncation or change a new directory is made: a thread that still reads keeps what it
    finds in the old one. `path` is for messages.
    """

    def __init__(self, file: Readable, path: str, data: Readable) -> None:
        """`data` reads the same file, for tables of entries."""
        self._file = file
        self._data = data
        # Through which the first numbers of pages are read.
        self._numbers = file
        self._path = path
        self._numbered = cast("Numbered", file) if hasattr(file, "page_holding") else None
        self._evictable = file if isinstance(file, PagedFile) else None
        self._guard = threading.Lock()
        self._forget()

    def clear(self) -> None:
        """Forget everything, so that it is read again. There is or was damage: from now on the
        numbers in a page are believed only if the page matches its checksum."""
        with self._guard:
            self._numbers = self._data
            self._forget()

    def _forget(self) -> None:
        self._first_numbers: dict[int, int] = {}
        self._ends: dict[int, int] = {}
        self._damaged: list[DamagedPage] = []
        # The tables by their first numbers, ascending; replaced, never changed.
        self.directory: tuple[list[int], list[PageTable]] = [], []
        # The table that is evicted next, unless it was used since.
        self._hand = 0

    def near(self, head: Head, number: int) -> tuple[int, int, int]:
        """A known entry at or before `number`: offset, number, end of the search.

        Raises `UnknownEntry`, `DamagedEntry`.
        """
        if not 0 <= number < head.entries:
            raise UnknownEntry(number, head.entries)
        self._fetch(number, whole=True)
        with self._guard:
            first_numbers, tables = self.directory
            at = bisect_right(first_numbers, number) - 1
            if at >= 0 and number < tables[at].next_number:
                table = tables[at]
            else:
                table = self._find(head, number)
            if not table.first_number <= number < table.next_number:
                for damage in self._damaged:
                    if damage.first <= number < damage.end:
                        raise damage
                raise DamagedEntry(
                    self._path,
                    table.end_offset,
                    f"the page ends before entry {table.next_number}, and entry {number} is due",
                )
            return table.find(number)

    def _find(self, head: Head, number: int) -> PageTable:
        """The table of the page that holds an entry, if one does. Requires the guard."""
        page = self._page_holding(head, number)
        try:
            return self._tabulate(head, page, number)
        except DamagedEntry as damage:
            # The page may begin with a wrong number, that of an entry in the page before it.
            with contextlib.suppress(DamagedEntry):
                table = self._tabulate(head, page - 1, number) if page else None
                if table is not None and table.first_number <= number < table.next_number:
                    return table
            raise damage from None

    def holding(self, head: Head, number: int) -> int:
        """The page that holds entry `number`, whose content is not read.

        Raises `UnknownEntry`, `DamagedEntry`.
        """
        if not 0 <= number < head.entries:
            raise UnknownEntry(number, head.entries)
        self._fetch(number, whole=False)
        with self._guard:
            return self._page_holding(head, number)

    def _fetch(self, number: int, *, whole: bool) -> None:
        """Have at hand what a look-up of an evicted entry reads: no other look-up waits for it."""
        evicted = None if self._evictable is None else self._evictable.evicted()
        if evicted is not None and number < self.first_number(evicted.floor):
            page = evicted.page_holding(number)
            if whole:
                evicted.page(page)

    def _tabulate(self, head: Head, page: int, number: int) -> PageTable:
        """The page's table, at least up to `number`, as far as the head allows now. Damage after
        `number` is not examined. Requires the guard."""
        start = page_start(page)
        table = self._table_of(page, start)
        until, size = min(start + PAGE_SIZE, head.length), _FIRST_LOOK
        while number >= table.next_number and not table.full:
            since = table.end_offset
            content = self._data.read(min(until - since, size), since)
            try:
                table.extend(content, since)
            except CorruptEntries as error:
                table.extend(content[: error.offset], since)
                if number >= table.next_number:
                    raise DamagedEntry(self._path, since + error.offset, error.reason) from None
                if page and table.next_number == table.first_number + 1:
                    # The previous page shows which of the two numbers is wrong.
                    self._walk(page - 1, table.first_number)
            if since + size >= until:
                break
            size *= 2
        return table

    def _table_of(self, page: int, start: int) -> PageTable:
        """The table of a page, made if there is none yet. Requires the guard."""
        first_number = self.first_number(page)
        first_numbers, tables = self.directory
        at = bisect_left(first_numbers, first_number)
        if at < len(tables) and tables[at].page_file_offset == start:
            return tables[at]
        first_numbers, tables = first_numbers.copy(), tables.copy()
        table = PageTable(first_number, start)
        first_numbers.insert(at, first_number)
        tables.insert(at, table)
        while len(tables) > _TABLES:
            self._hand %= len(tables)
            oldest = tables[self._hand]
            if oldest is table or oldest.used:
                oldest.used = False
                self._hand += 1
            else:
                del first_numbers[self._hand], tables[self._hand]
        self.directory = first_numbers, tables
        return table

    def _page_holding(self, head: Head, number: int) -> int:
        """The page that holds an entry, if one does; skips pages that do not begin with an
        entry."""
        if self._numbered is not None:
            return self._numbered.page_holding(number)
        low, high, least = 0, pages_for(head.length), 0
        evicted = None if self._evictable is None else self._evictable.evicted()
        if evicted is not None:
            low = least = evicted.floor
            if number < self.first_number(low):
                return evicted.page_holding(number)
        # Most look-ups are for the newest entries.
        newest = self._start_of(head, high - 1)
        if newest is not None:
            low, high = (high - 1, high) if number >= newest else (low, high - 1)
        while high - low > 1:
            found = self._near_middle(head, low, high)
            if found is None:
                break
            middle, first_number = found
            if first_number <= number:
                low = middle
            else:
                high = middle
        if low > least:
            before, first = self._start_of(head, low - 1), self.first_number(low)
            if before is not None and before >= first:
                raise DamagedEntry(
                    self._path,
                    page_start(low),
                    f"a page starts with entry {first}, the one before it with {before}",
                )
        return low

    def _near_middle(self, head: Head, low: int, high: int) -> tuple[int, int] | None:
        """The page nearest to the middle between two that begins with an entry, and its first
        number."""
        middle = (low + high) // 2
        for pages in (range(middle, low, -1), range(middle + 1, high)):
            for page in pages:
                first_number = self._start_of(head, page)
                if first_number is not None:
                    return page, first_number
        return None

    def _start_of(self, head: Head, page: int) -> int | None:
        """As `first_number`; None if the page is damaged there."""
        try:
            number = self.first_number(page)
        except DamagedPage as damage:
            self._damaged = [*self._damaged, damage][-_KNOWN_DAMAGED:]
            return None
        except DamagedEntry:
            return None
        return number if number <= head.entries else None

    def first_number(self, page: int) -> int:
        """The number of the entry that data page `page` starts with."""
        first_numbers = self._first_numbers
        known = first_numbers.get(page)
        if known is not None:
            return known
        offset = page_start(page)
        number = self.head_at(offset) if self._numbered else self._head_in(self._numbers, offset)
        if number is None:
            raise DamagedEntry(self._path, offset, "the page does not start with an entry")
        if number < page or (number and not page):
            # Each page before it holds at least one entry.
            raise DamagedEntry(
                self._path, offset, f"data page {page} cannot start with entry {number}"
            )
        if len(first_numbers) >= _KNOWN_PAGES:
            first_numbers.clear()
        first_numbers[page] = number
        return number

    def head_at(self, offset: int) -> int | None:
        """The number of the entry at `offset`; None if there is no valid entry."""
        if self._numbered is not None and offset == page_start(page_of(offset)):
            return self._numbered.first_number(page_of(offset))
        return self._head_in(self._file, offset)

    def _head_in(self, file: Readable, offset: int) -> int | None:
        if self._evictable is not None and (evicted := self._evictable.evicted()) is not None:
            page = page_of(offset)
            if page < evicted.floor and offset == page_start(page):
                return evicted.first_number(page)
        found = file.read(ENTRY_HEAD_SIZE, offset)
        if len(found) < ENTRY_HEAD_SIZE:
            return None
        packet, length, _, number = ENTRY_HEAD_STRUCT.unpack(found)
        room = page_start(page_of(offset) + 1) - offset
        sane = packet == PACKET_ENTRY and ENTRY_HEAD_SIZE <= length <= room
        return int(number) if sane else None

    def end_of(self, page: int, beyond: int) -> int:
        """Where the entries of a page end; `beyond` is the number of the one after it."""
        known = self._ends.get(page)
        return self._walk(page, beyond) if known is None else known

    def _walk(self, page: int, beyond: int) -> int:
        """The same, from the page itself."""
        start, ends = page_start(page), self._ends
        content = self._data.read(PAGE_SIZE, start)
        try:
            end, number = walk(content, self.first_number(page), file_offset=start)
        except CorruptEntries as error:
            raise DamagedEntry(self._path, start + error.offset, error.reason) from None
        if number != beyond:
            raise DamagedEntry(
                self._path,
                start + end,
                f"the page ends before entry {number}, after it comes entry {beyond}",
            )
        if len(ends) >= _KNOWN_PAGES:
            ends.clear()
        ends[page] = start + end
        return int(start + end)
