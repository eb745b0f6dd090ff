"""Compares pages of a stream that is open for writing with what was written.

Owns what is known of a damaged page: which entries it held. Reads a page that the disk cannot read
as zeros. Changes nothing.
"""

from __future__ import annotations

from datastreamer.errors import DamagedPage
from datastreamer.format import HEADER_PAGE_SIZE, PAGE_SIZE, page_start
from datastreamer.storage.disk.bad_sectors import read_around
from datastreamer.storage.header.records import Head
from datastreamer.storage.pages.hashes import hash_page
from datastreamer.storage.read.range_sums import page_with
from datastreamer.storage.write.owned_file import OwnedFile


def damage_of(owned: OwnedFile, page: int, advice: str = "") -> DamagedPage | None:
    """How a page differs from its checksum, with `advice`; None if it does not, or has none."""
    with owned.lock:
        if page == owned.end.sums.page:
            owned.pages.judge_end(owned.written, owned.end.sums.sum())
        found = owned.pages.damage(page, still=True)
        if found is None:
            return None
        first = end_before(owned, page).entries
    return DamagedPage(owned.path, found.offset, found.why + advice, page, first, found.end)


def end_before(owned: OwnedFile, page: int) -> Head:
    """The end of the pages before a page; of fewer if the number of the entry after them is not
    known."""
    file = read_around(owned.file, owned.path)
    while page > 0:
        before, start = page - 1, page_start(page - 1)
        known = owned.sums.get(before) or hash_page(file.read(PAGE_SIZE, start), before)
        if known is not None:
            return Head(page_start(page), known.next_number)
        page = before
    return Head(HEADER_PAGE_SIZE, 0)


def page_of_entry(owned: OwnedFile, number: int) -> int:
    """The page of a committed entry, by checksums if all that are needed are known. Raises
    `DamagedEntry`."""
    return page_with(owned, owned.sums, number, owned.end.sums.page)
