"""All entries of a file in their order, page by page, on past damage.

For files that may be too damaged to open: knows bytes from the first page on and how far to
go, and neither believes nor reads a header. Takes no decisions; `check.py` does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from datastreamer._codec import EntryBatch, scan
from datastreamer.errors import CorruptEntries
from datastreamer.format import HEADER_PAGE_SIZE, PAGE_SIZE, page_of, page_start
from datastreamer.storage.disk import File
from datastreamer.storage.record import Head

Visit = Callable[[EntryBatch, bool], None]


class Damage(NamedTuple):
    """A place where the chain of entries breaks: the byte, and what stands there instead.

    `first` is the entry that was due there, None where a page before is broken too; `after`
    the next entry that can be read again, None where none is known.
    """

    offset: int
    what: str
    first: int | None
    after: int | None


class Walk(NamedTuple):
    """What a walk came to.

    `whole` is the end of the last entry before the first damage: how far a stream can go.
    `padded` tells that padding follows there. `pages` were read. With `unread` the system
    refused to read on: an error that no repair of ours helps against.
    """

    whole: Head
    padded: bool
    pages: int
    damages: list[Damage]
    unread: bool

    def ends_at(self, head: Head) -> bool:
        """Whether the entries end exactly there, perhaps behind the padding of their page."""
        if self.damages or head.entries != self.whole.entries:
            return False
        page_end = page_start(page_of(self.whole.length) + 1)
        return head.length == self.whole.length or (self.padded and head.length == page_end)


def walk_file(
    file: File,
    stop: int,
    *,
    visit: Visit | None = None,
    progress: Callable[[int], None] | None = None,
    to_first_damage: bool = False,
) -> Walk:
    """Go over the entries up to file offset `stop`.

    `visit(batch, whole)` is given each page's entries that can be read; `whole` is false
    behind damage. `progress(offset)` is told how far it is. After damage it goes on with the
    next page, which begins with an entry whose number says what is missing.
    """
    due: int | None = 0
    whole, end, padded, pages, unread = Head(), HEADER_PAGE_SIZE, False, 0, False
    damages: list[Damage] = []
    missing: list[Damage] = []  # of broken pages, until an entry is found behind them
    start = HEADER_PAGE_SIZE
    while start < stop and not (to_first_damage and (damages or missing)):
        try:
            content = file.read(min(PAGE_SIZE, stop - start), start)
        except OSError as error:
            what = f"the system cannot read the page: {error.strerror or error}"
            missing.append(Damage(start, what, due, None))
            unread = True
            break
        if not content:
            break
        pages += 1
        batch, broken = _read_page(content, start, due)
        if batch:
            found = batch.first_number
            if due not in (None, found):
                what = f"the page begins with entry {found} where entry {due} is due"
                if padded:  # zeros over the end of a page pass for it
                    what = f"padding where entry {due} is due: the next page begins with {found}"
                missing.append(Damage(end if padded else start, what, due, None))
            damages += [it._replace(after=found) for it in missing]
            missing.clear()
            due, end = batch.next_number, start + batch.end
        intact = not damages and not missing
        if intact and batch:
            whole = Head(end, batch.next_number)
        if batch and visit is not None:
            visit(batch, intact)
        padded = broken is None and not batch.more and batch.end < len(content)
        if batch.more:
            broken = batch.end, f"the entry goes on past byte {start + len(content)}, the data not"
        if broken is not None:
            offset, what = broken
            missing.append(Damage(start + offset, what, due, None))
            due = None
        if progress is not None:
            progress(start + len(content))
        start += PAGE_SIZE
    return Walk(whole, padded, pages, damages + missing, unread)


def _read_page(
    content: bytes, start: int, due: int | None
) -> tuple[EntryBatch, tuple[int, str] | None]:
    """The page's entries up to the first that is none, and what stands there."""
    try:
        return scan(content, due, file_offset=start), None
    except CorruptEntries as error:
        offset, what = error.offset, error.reason
    if offset == 0 and due is not None:
        try:
            # Whole, but of another place: stale, or swapped with another page.
            return scan(content, None, file_offset=start), None
        except CorruptEntries:
            pass
    return scan(content, due, file_offset=start, end=offset), (offset, what)


def entries_before(file: File, length: int) -> int | None:
    """How many entries the stream has if it ends at file offset `length`, by the numbers in
    that page; None where no entry ends there. For an offset inside a whole chain."""
    if length <= HEADER_PAGE_SIZE:
        return 0 if length == HEADER_PAGE_SIZE else None
    start = page_start(page_of(length - 1))
    content = file.read(length - start, start)
    try:
        batch = scan(content, None, file_offset=start)
    except CorruptEntries:
        return None
    padded = len(content) == PAGE_SIZE and not batch.more
    ends = bool(batch) and (start + batch.end == length or padded)
    return batch.next_number if ends else None
