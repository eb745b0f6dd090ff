"""Scans all entries of a file in their order, page by page, and continues after damage.

For files that may be too damaged to open: knows the pages up to an offset, and reads no header.
Decides nothing; `check.py` does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from datastreamer._codec import EntryBatch, scan
from datastreamer.errors import CorruptEntries
from datastreamer.format import (
    ENTRY_HEAD_SIZE,
    HEADER_PAGE_SIZE,
    PACKET_ENTRY,
    PAGE_SIZE,
    page_of,
    page_start,
)
from datastreamer.storage.disk.file_ops import File, Readable
from datastreamer.storage.header.records import Head

# Of an entry's number in its head.
_NUMBER_OFFSET = 9

Visit = Callable[[EntryBatch, bool], None]


class Damage(NamedTuple):
    """A place where the sequence of entries breaks: the byte, and what was found there.

    `first` is the entry that was due there, None if an earlier page is broken too; `after` is the
    next entry that can be read, or None if it is not known. `order`: the page and its neighbour
    both look whole, and do not continue each other.
    """

    offset: int
    what: str
    first: int | None
    after: int | None
    order: bool = False


class Walk(NamedTuple):
    """The result of a walk.

    `whole` is the end of the last entry before the first damage. `padded`: padding follows there.
    `pages` were read. `unread`: the system refused to read on, which no repair helps against.
    """

    whole: Head
    padded: bool
    pages: int
    damages: list[Damage]
    unread: bool

    def ends_at(self, head: Head) -> bool:
        """Whether the entries end exactly there, or before the padding of their page."""
        if self.damages or head.entries != self.whole.entries:
            return False
        page_end = page_start(page_of(self.whole.length) + 1)
        return head.length == self.whole.length or (self.padded and head.length == page_end)


def walk_file(
    file: File,
    stop: int,
    *,
    visit: Visit | None = None,
    inspect: Callable[[int, bytes], None] | None = None,
    progress: Callable[[int], None] | None = None,
    to_first_damage: bool = False,
) -> Walk:
    """Scan the entries up to file offset `stop`.

    `visit(batch, whole)` is called with each page's readable entries; `whole` is false after
    damage. `inspect(page, content)` is called with each page's number and bytes up to `stop`.
    `progress(offset)` is called with the present offset. After damage the walk continues
    with the next page, whose first entry number shows what is missing.
    """
    chain = Chain()
    pages, unread = 0, False
    start = HEADER_PAGE_SIZE
    while start < stop and not (to_first_damage and not chain.intact):
        try:
            content = file.read(min(PAGE_SIZE, stop - start), start)
        except OSError as error:
            chain.miss(start, f"the system cannot read the page: {error.strerror or error}")
            unread = True
            break
        if not content:
            break
        pages += 1
        if inspect is not None:
            inspect(page_of(start), content)
        intact = chain.goes_on(read_page(file, content, start, chain.due))
        batch = chain.take(to_the_end=start + PAGE_SIZE <= stop)
        if batch and visit is not None:
            visit(batch, intact)
        if progress is not None:
            progress(start + len(content))
        start += PAGE_SIZE
    return Walk(chain.whole, chain.padded, pages, chain.damages + chain.missing, unread)


class Chain:
    """The pages that were read so far, and whether they continue each other.

    `due` is the next entry, None after what cannot be read and before the first page of a part of
    a file. `missing` are damages after which no entry was found yet. For the rest see `Walk`.
    """

    def __init__(self, due: int | None = 0) -> None:
        self.due = due
        self.whole = Head()
        self.padded = False
        self.damages: list[Damage] = []
        self.missing: list[Damage] = []
        self._page = Page(HEADER_PAGE_SIZE, b"", scan(b""), None)

    @property
    def intact(self) -> bool:
        return not (self.damages or self.missing)

    def miss(self, offset: int, what: str, *, order: bool = False) -> None:
        self.missing.append(Damage(offset, what, self.due, None, order))

    def goes_on(self, page: Page) -> bool:
        """Append the next page; returns whether nothing is broken up to its start."""
        before, self._page = self._page, page
        found = page.batch.first_number if page.batch else None
        if self.due is not None and found != self.due:
            if self.padded:
                self._doubt_padding(before, self.due, found)
            elif found is not None:
                what = f"the page begins with entry {found} where entry {self.due} is due"
                self.miss(page.start, what, order=True)
        if found is not None:
            self.damages += [it._replace(after=found) for it in self.missing]
            self.missing.clear()
            self.due = page.batch.next_number
        return self.intact

    def _doubt_padding(self, before: Page, due: int, found: int | None) -> None:
        """Zeros over the end of a page look like padding, and so does a length's first byte if the
        entry before is parsed one byte too long."""
        what = f"padding where entry {due} is due: the next page begins with entry {found}"
        doubted = before.broken_at(what)
        shorter = doubted.batch.next_number < due
        if shorter and self.intact:
            self.whole = doubted.end
        if shorter or found is not None:
            self.missing.append(doubted.damage(due)._replace(order=not shorter))

    def take(self, *, to_the_end: bool) -> EntryBatch:
        """The page's readable entries. `to_the_end`: the data continues to the end of the page."""
        page, intact = self._page, self.intact
        self.padded = page.broken is None and page.batch.end < len(page.content)
        if self.padded and not to_the_end:
            page = page.broken_at(
                f"padding in place of entry {self.due}, although more entries follow"
            )
        if intact and page.batch:
            self.whole = page.end
        if page.broken is not None:
            self.missing.append(page.damage(self.due))
            self.due = None
        return page.batch


class Page(NamedTuple):
    """A page, or a part of one: its entries up to the first damage.

    `broken` is the damage: an offset in the page, and what was found there.
    """

    start: int
    content: bytes
    batch: EntryBatch
    broken: tuple[int, str] | None

    @property
    def end(self) -> Head:
        return Head(self.start + self.batch.end, self.batch.next_number)

    def damage(self, due: int | None) -> Damage:
        assert self.broken is not None
        offset, what = self.broken
        if self.batch:
            due = self.batch.next_number
        elif due is not None:
            due = min(due, self.batch.first_number)
        return Damage(self.start + offset, what, due, None)

    def broken_at(self, what: str, following: bytes = b"") -> Page:
        """The page with damage after its entries, or at the last one if its length is wrong.

        Only the place of the next entry confirms an entry's length: if the next one is elsewhere,
        the entry before is the damaged one. `following` is the head of the next page, where the
        next entry may be.
        """
        batch = self.batch
        if not batch:
            return self._replace(broken=(batch.end, what))
        last, end = batch.offsets[-1], batch.end
        due = batch.next_number.to_bytes(8, "big")
        follows = self.content.find(due, last + ENTRY_HEAD_SIZE) - _NUMBER_OFFSET
        found = follows > last and self.content[follows] == PACKET_ENTRY
        if not found:
            follows = page_start(page_of(self.start) + 1) - self.start
            found = following[_NUMBER_OFFSET:] == due
        if not found or follows == end:
            return self._replace(broken=(end, what))
        what = (
            f"entry {batch.next_number - 1} of {batch.lengths[-1] + ENTRY_HEAD_SIZE} bytes ends at "
            f"byte {self.start + end}, but entry {batch.next_number} begins at byte "
            f"{self.start + follows}; the length or the padding is wrong"
        )
        return self._replace(batch=batch[:-1], broken=(last, what))


def read_page(file: Readable, content: bytes, start: int, due: int | None) -> Page:
    """The page that begins at file offset `start`, of which `content` was read."""
    try:
        batch = scan(content, due, file_offset=start)
    except CorruptEntries as error:
        offset, what = error.offset, error.reason
    else:
        page = Page(start, content, batch, None)
        if batch.more:
            what = f"the entry extends past the end of the data, byte {start + len(content)}"
            page = page._replace(broken=(batch.end, what))
        return page
    if offset == 0 and due is not None:
        try:
            # Whole, but of another place: stale, or swapped with another page.
            return Page(start, content, scan(content, None, file_offset=start), None)
        except CorruptEntries as error:
            before = scan(content, None, file_offset=start, end=error.offset)
            # Damage may have hidden the entries that were due, as false padding does. One entry
            # does not show that: its own number may be the damage.
            if len(before) > 1 and before.first_number > due:
                offset, what, due = error.offset, error.reason, before.first_number
    batch = scan(content, due, file_offset=start, end=offset)
    following = file.read(ENTRY_HEAD_SIZE, start + PAGE_SIZE)
    return Page(start, content, batch, None).broken_at(what, following)


def entries_before(file: Readable, length: int) -> int | None:
    """How many entries the stream has if it ends at file offset `length`, by the numbers in
    that page; None where no entry ends there. For an offset inside a whole chain."""
    if length <= HEADER_PAGE_SIZE:
        return 0 if length == HEADER_PAGE_SIZE else None
    count, why = _ends_at(file, length)
    return None if why else count


def doubt(file: Readable, head: Head) -> str:
    """Why the entries of the last page do not end exactly at `head`; empty if they do.

    A head at the start of a page may follow the padding of the page before.
    """
    if head.entries == 0:
        empty = head.length == HEADER_PAGE_SIZE
        return "" if empty else "an empty stream ends with the header page"
    count, why = _ends_at(file, head.length)
    if why or count == head.entries:
        return why
    return f"the last entry is {count - 1}, which does not match the header"


def _ends_at(file: Readable, length: int) -> tuple[int, str]:
    """The number after the last entry that ends at file offset `length`, or why none does."""
    start = page_start(page_of(length - 1))
    content = file.read(length - start, start)
    if len(content) < length - start:
        return 0, "the file ends before"
    try:
        batch = scan(content, None, file_offset=start)
    except CorruptEntries as error:
        return 0, f"at byte {start + error.offset}: {error.reason}"
    end = start + batch.end
    if end == length or (len(content) == PAGE_SIZE and not batch.more):
        return batch.next_number, ""
    return 0, f"at byte {end}: {'an entry is cut off' if batch.more else 'there is padding'}"
