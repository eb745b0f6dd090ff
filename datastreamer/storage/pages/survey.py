"""Finds the damaged pages of a file, and what is known of the entries that they held.

Owns which pages are damaged: their checksums decide, and for want of these their form and their
neighbours. Reads pages and records, changes nothing, and does not know where entries come from.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

from xxhash import xxh3_128_digest

from datastreamer.format import ENTRY_HEAD_STRUCT, PAGE_SIZE, page_start
from datastreamer.storage.disk.file_ops import Readable
from datastreamer.storage.header.judgement import hash_last_page, sums_up_to
from datastreamer.storage.header.records import Head
from datastreamer.storage.pages.compare import RecordSource
from datastreamer.storage.pages.hashes import NO_CHAIN, EndSum, PageHash, hash_page, last_page
from datastreamer.storage.pages.proof import ChainWalk, KnownChain
from datastreamer.storage.pages.records import RecordReader
from datastreamer.storage.pages.sidecar import PageSum


class LostPages(NamedTuple):
    """Consecutive damaged pages, which held the entries from `first` up to, not including, `stop`.

    `digests` are the hashes of their entries, None for a page without a checksum. `end` is the
    offset at which the stream ends in the last of them, None if it continues in another page.
    `before` and `after` say whether the neighbouring pages are whole.
    """

    page: int
    first: int
    stop: int
    digests: list[bytes | None]
    end: int | None
    before: bool
    after: bool

    @property
    def end_page(self) -> int:
        """The first page after it."""
        return self.page + len(self.digests)

    @property
    def span(self) -> tuple[int, int, int, int]:
        """As `HealedPages` has it."""
        return self.page, self.end_page, self.first, self.stop

    @property
    def proven(self) -> bool:
        """Whether each page has a checksum."""
        return None not in self.digests


class Survey(NamedTuple):
    """The damaged pages of a file; and the pages of which only the padding mark is, with the bytes
    of their entries.

    `unproven` is the commit record's chain if the hashes of the pages do not lead to it, and no
    proven checksum says which pages differ. `refuted`: all pages have one nevertheless, so their
    form does not show which are damaged.
    """

    lost: list[LostPages]
    padding: list[tuple[int, int]]
    unproven: KnownChain | None = None
    refuted: bool = False


class _Page(NamedTuple):
    """The entries of a page; `first` is None if it is damaged, `stop` if that is not known."""

    first: int | None
    stop: int | None
    digest: bytes | None


def find_lost_pages(
    file: Readable,
    end: Head,
    end_sum: EndSum | None,
    chains: Sequence[KnownChain],
    records: RecordSource | None,
    loose: RecordReader | None,
) -> Survey:
    """Look for the damaged pages of a stream that ends at `end`.

    `end_sum` is what a record knows of the entries up to there, and `chains` of the pages;
    `records` are the checksums of whole pages. They are None or empty if there are none that can be
    relied on. A page that differs from its record in `loose`, which nothing proves, counts as
    damaged: what is written over it needs another proof.
    """
    pages: list[_Page] = []
    padding: list[tuple[int, int]] = []
    walk = ChainWalk(chains)
    if end.entries:
        last = last_page(end.length)
        for page in range(last):
            known = None if records is None else records.get(page)
            content = file.read(PAGE_SIZE, page_start(page))
            found = hash_page(content, page)
            digest = None if found is None else found.digest
            walk.add(page, digest if known is None else known.digest)
            pages.append(_look_at(content, found, known))
            if known is None and loose is not None:
                (suspected,) = loose.unproven(page, page + 1)
                if suspected is not None and suspected.digest != digest:
                    pages[-1] = _Page(None, None, None)
            if pages[-1].first is not None and known is not None and found is None:
                padding.append((page, known.end))
        pages.append(_look_at_last(file, end, end_sum))
        _compare_neighbours(pages)
    unproven = None if walk.fits else walk.known
    lost = list(_runs_of_damage(pages, end))
    return Survey(lost, padding, unproven, refuted=walk.fits is False)


def _look_at(content: bytes, found: PageHash | None, known: PageSum | None) -> _Page:
    if known is None or known.digest == NO_CHAIN:
        if found is None:
            return _Page(None, None, None)
        return _Page(_first_number(content), found.next_number, None)
    entries = memoryview(content)[: known.end]
    whole = xxh3_128_digest(entries) == known.digest
    # If the writer could not read the damaged page, its record may have another end.
    whole = whole or (found is not None and found.digest == known.digest)
    return _Page(_first_number(content) if whole else None, known.next_number, known.digest)


def _look_at_last(file: Readable, end: Head, end_sum: EndSum | None) -> _Page:
    start = page_start(last_page(end.length))
    known = end_sum if end_sum is not None and end_sum.tail != NO_CHAIN else None
    found = hash_last_page(file, end) if known is None else sums_up_to(file, end, known)
    first = None if found is None else _first_number(file.read(PAGE_SIZE, start))
    return _Page(first, end.entries, None if known is None else known.tail)


def _first_number(content: bytes) -> int:
    return int(ENTRY_HEAD_STRUCT.unpack_from(content)[3])


def _compare_neighbours(pages: list[_Page]) -> None:
    """Of two pages that do not continue each other, those without a checksum are damaged."""
    if pages[0].first != 0 and pages[0].digest is None:
        pages[0] = _Page(None, None, None)
    wrong = set()
    for at, (left, right) in enumerate(pairwise(pages)):
        if left.first is not None and right.first is not None and left.stop != right.first:
            wrong |= {page for page in (at, at + 1) if pages[page].digest is None}
    last = len(pages) - 1
    for page in wrong:
        # (The last entry of the stream is known in any case.)
        pages[page] = _Page(None, pages[page].stop if page == last else None, None)


def _runs_of_damage(pages: list[_Page], end: Head) -> Iterator[LostPages]:
    page = 0
    while page < len(pages):
        if pages[page].first is not None:
            page += 1
            continue
        first = pages[page - 1].stop if page else 0
        beyond = page + 1
        while (stop := _end_of(pages, beyond)) is None:
            beyond += 1
        within = end.length if beyond == len(pages) else None
        digests = [each.digest for each in pages[page:beyond]]
        before = page > 0 and pages[page - 1].first is not None
        after = beyond < len(pages) and pages[beyond].first is not None
        assert first is not None, "a run of damage ends where the next entry is known"
        yield LostPages(page, first, stop, digests, within, before, after)
        page = beyond


def _end_of(pages: list[_Page], beyond: int) -> int | None:
    """The entry after the pages before `beyond`."""
    stop = pages[beyond - 1].stop
    return stop if stop is not None or beyond == len(pages) else pages[beyond].first
