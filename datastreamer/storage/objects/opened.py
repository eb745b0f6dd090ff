"""An archive that is read: its manifests, footers and pages, each compared with what proves it.

Owns the names of objects. What is missing or differs raises `DamagedArchive`.
"""

from __future__ import annotations

import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import partial
from typing import Final, NamedTuple

from datastreamer._codec import scan
from datastreamer.errors import ArchiveMissing, DamagedArchive, NotAnArchive, UnknownEntry
from datastreamer.storage.header.records import Evicted
from datastreamer.storage.objects import TIMEOUT, waits
from datastreamer.storage.objects.manifest import (
    ArchiveManifest,
    BadManifest,
    Row,
    archive_id_of,
    digest_of,
)
from datastreamer.storage.objects.segment import (
    END_SIZE,
    BadSegment,
    Footer,
    footer_size,
    read_footer,
    read_page,
)
from datastreamer.storage.objects.store import Gone, Store, Stored
from datastreamer.storage.pages._page_sums import chain_over
from datastreamer.storage.pages.hashes import NO_CHAIN, Sum

STREAM: Final = "stream.json"
MANIFESTS: Final = "m/"
SEGMENTS: Final = "s/"
RESTORED_EPOCHS: Final = 1 << 16
"""How much later the epoch of a restored file is than all in the archive: later than any that the
lost file may have had."""

_NUMBER = re.compile(r"m/(\d{16})\.json\.zst")
# Footers of 64 pages have some 10 kB without bookmarks.
_MOST_FOOTERS: Final = 256


def manifest_name(number: int) -> str:
    return f"{MANIFESTS}{number:016d}.json.zst"


def segment_name(first: int, pages: int, random: str) -> str:
    return f"{SEGMENTS}{first:012d}-{pages:04x}-{random}.zst"


class ListedBookmarks(NamedTuple):
    """The bookmarks of a segment, of each key the newest; the page after it, and the number of that
    page's first entry."""

    pairs: Iterable[tuple[bytes, int]]
    stop: int
    number: int


class Content(NamedTuple):
    """The content of a page, and the hash of its entries, with which it was compared."""

    data: bytes
    digest: bytes


class OpenArchive:
    """The objects of one archive. Safe to use from several threads.

    Raises `ArchiveMissing`, `NotAnArchive`, and what `Store` raises.
    """

    def __init__(self, store: Store) -> None:
        self.store = store
        self.url = store.url
        try:
            self.id = archive_id_of(store.get(STREAM))
        except Gone:
            raise ArchiveMissing(
                self.url, "no archive there: the bucket or folder is missing, or has no stream.json"
            ) from None
        except BadManifest as error:
            raise NotAnArchive(self.url, str(error)) from None
        self._footers: OrderedDict[tuple[str, str], Footer] = OrderedDict()
        self._reading: dict[tuple[str, str], threading.Lock] = {}
        self._guard = threading.Lock()

    @classmethod
    def open(cls, url: str, *, timeout: float = TIMEOUT) -> OpenArchive:
        return cls(Store(url, timeout=timeout))

    # Manifests.

    def listed(self, after: int = 0) -> list[tuple[int, Stored]]:
        """The manifests with their numbers, in order, from the one after `after` on."""
        found = self.store.list(MANIFESTS, manifest_name(after) if after else None)
        named = ((_NUMBER.fullmatch(each.name), each) for each in found)
        return [(int(name[1]), each) for name, each in named if name]

    def numbers(self, after: int = 0) -> list[int]:
        return [number for number, _ in self.listed(after)]

    def manifest(self, number: int) -> tuple[ArchiveManifest, str]:
        """A manifest, and its digest."""
        name = manifest_name(number)
        try:
            packed = self.store.get(name)
            found = ArchiveManifest.unpack(packed)
        except Gone:
            raise DamagedArchive(self.url, f"{name} is missing") from None
        except BadManifest as error:
            raise DamagedArchive(self.url, f"{name}: {error}") from None
        if found.archive_id != self.id or found.number != number:
            raise DamagedArchive(self.url, f"{name} belongs to another archive or place")
        return found, digest_of(packed)

    def newest(self, known: int = 0) -> tuple[ArchiveManifest, str]:
        """The newest manifest, and its digest; `known` is the number of one that is there.

        A missing bucket lists nothing: without a newer one, `known` is read.
        """
        numbers = self.numbers(known)
        if not numbers and not known:
            raise ArchiveMissing(self.url, "the archive has no manifest yet: nothing was pushed")
        return self.manifest(numbers[-1] if numbers else known)

    def chosen(
        self, *, number: int | None = None, generation: int | None = None
    ) -> ArchiveManifest:
        """The newest manifest, that of a number, or the newest of a generation."""
        if number is not None:
            return self.manifest(number)[0]
        for found in self.generations():
            if generation is None or found.generation == generation:
                return found
            if found.generation < generation:
                break
        raise ArchiveMissing(self.url, f"no manifest of generation {generation} is there")

    def generations(self) -> Iterator[ArchiveManifest]:
        """The newest manifest of each generation, from the newest generation back."""
        numbers = self.numbers()
        if not numbers:
            self.newest()  # raises
        stop = len(numbers)
        while stop:
            found = self.manifest(numbers[stop - 1])[0]
            yield found
            low, stop = 0, stop - 1
            while low < stop:
                middle = (low + stop) // 2
                if self.manifest(numbers[middle])[0].generation < found.generation:
                    low = middle + 1
                else:
                    stop = middle

    def with_pages(self, mark: Evicted) -> ArchiveManifest:
        """The manifest in which to look for a file's evicted pages: the newest one, if it has them
        all; else the newest one of the mark's generation. Raises `DamagedArchive` if neither has
        them, and for another archive."""
        if bytes.fromhex(self.id) != mark.archive_id:
            raise DamagedArchive(self.url, "it is another archive than the one that the file names")
        newest, _ = self.newest()
        if self.chain_before(newest, mark.floor) == mark.chain:
            return newest
        with suppress(ArchiveMissing):
            found = self.chosen(generation=mark.generation)
            if self.chain_before(found, mark.floor) == mark.chain:
                return found
        raise DamagedArchive(self.url, "it has no history any more with the file's evicted pages")

    def chain_before(self, manifest: ArchiveManifest, page: int) -> bytes | None:
        """The chain over the pages before a page; None if the manifest has fewer whole ones."""
        before = NO_CHAIN
        for row in manifest.segments:
            if page <= row.first_page:
                break
            if page < row.stop:
                digests = self.digests(row)
                return chain_over(digests, 0, page - row.first_page, before)
            before = bytes.fromhex(row.chain)
        return before if not manifest.segments or page <= manifest.segments[-1].stop else None

    # Segments.

    def footer(self, row: Row) -> Footer:
        """The footer of a row's object, which the row names by its digest."""
        key = row.object, row.footer
        with self._guard:
            # Runs of pages that are fetched together need the same one: it is read once.
            reading = self._reading.setdefault(key, threading.Lock())
        try:
            with waits.held(reading):
                with self._guard:
                    found = self._footers.get(key)
                found = found or self._read_footer(row)
                with self._guard:
                    self._footers[key] = found
                    self._footers.move_to_end(key)
                    while len(self._footers) > _MOST_FOOTERS:
                        self._footers.popitem(last=False)
                return found
        finally:
            self._reading.pop(key, None)

    def _read_footer(self, row: Row) -> Footer:
        try:
            size = min(row.size, END_SIZE)
            end = bytes(self.store.get_range(row.object, row.size - size, size))
            wanted = footer_size(end)
            if wanted > row.size:
                raise BadSegment("its footer is longer than the object")
            if wanted > size:
                end = bytes(self.store.get_range(row.object, row.size - wanted, wanted))
            found = read_footer(end)
        except Gone:
            raise self.damaged(row, "is missing, or shorter than it was") from None
        except BadSegment as error:
            raise self.damaged(row, str(error)) from None
        if found.digest.hex() != row.footer:
            raise self.damaged(row, "its footer is not the one that the manifest names")
        if len(found.places) < row.frame + row.pages:
            raise self.damaged(row, "it has fewer pages than the manifest says")
        return found

    def digests(self, row: Row) -> bytes:
        """The hashes of a row's pages."""
        pages = self.footer(row).pages[row.frame : row.frame + row.pages]
        return b"".join(page.sum.digest for page in pages)

    def page_sums(self, manifest: ArchiveManifest, most: int) -> list[Sum]:
        """The checksums of the first whole pages, at most that many."""
        sums: list[Sum] = []
        for row in manifest.segments:
            if len(sums) >= most:
                break
            for page in self.footer(row).pages[row.frame : row.frame + row.pages]:
                first = sums[-1][1] if sums else 0
                sums.append((first, page.sum.next_number, page.sum.digest))
        return sums[:most]

    def ensure_chained(self, row: Row, before: str) -> None:
        """Raises `DamagedArchive` unless a row's pages lead from the chain `before` it to its."""
        chain = chain_over(self.digests(row), 0, row.pages, bytes.fromhex(before))
        if chain.hex() != row.chain:
            raise self.damaged(row, "the hashes of its pages do not lead to the manifest's chain")

    def pages(self, row: Row, first: int, stop: int, *, last: bool = False) -> list[bytes]:
        """The content of pages of a row. `last`: of the tail."""
        return [decode().data for decode in self.fetched(row, first, stop, last=last)]

    def fetched(
        self, row: Row, first: int, stop: int, *, last: bool = False
    ) -> list[Callable[[], Content]]:
        """Fetch pages of a row, as `pages`; each call decodes one."""
        footer, at = self.footer(row), first - row.first_page + row.frame
        places = footer.places[at : at + stop - first]
        start, end = places[0][0], sum(places[-1])
        try:
            packed = memoryview(self.store.get_range(row.object, start, end - start))
        except Gone:
            raise self.damaged(row, "is missing, or shorter than it was", first, stop) from None

        def decode(page: int) -> Content:
            offset, size = places[page]
            frame, known = packed[offset - start :][:size], footer.pages[at + page].sum
            try:
                return Content(read_page(frame, known, last=last), known.digest)
            except BadSegment as error:
                raise self.damaged(row, str(error), first + page, first + page + 1) from None

        return [partial(decode, page) for page in range(stop - first)]

    def damaged(
        self, row: Row, what: str, first: int | None = None, stop: int | None = None
    ) -> DamagedArchive:
        first, stop = row.first_page if first is None else first, row.stop if stop is None else stop
        pages = f"page {first}" if stop == first + 1 else f"pages {first} to {stop - 1}"
        return DamagedArchive(
            self.url, f"{row.object} ({pages}, entries from {row.first_entry} on): {what}"
        )

    # Places.

    def page_with(self, manifest: ArchiveManifest, number: int) -> int:
        """The page that an entry is in. Raises `UnknownEntry`."""
        if not 0 <= number < manifest.head.entries:
            raise UnknownEntry(number, manifest.head.entries)
        rows, low, high = manifest.rows, 0, len(manifest.rows)
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if rows[middle].first_entry <= number else (low, middle)
        row = rows[low]
        pages = self.footer(row).pages[row.frame : row.frame + row.pages]
        return row.first_page + next(
            at for at, page in enumerate(pages) if number < page.sum.next_number
        )

    def first_number(self, manifest: ArchiveManifest, page: int) -> int:
        """The number of the first entry of a page."""
        row = manifest.row_of(page)
        if page == row.first_page:
            return row.first_entry
        return self.footer(row).pages[row.frame + page - row.first_page - 1].sum.next_number

    def at_time(self, manifest: ArchiveManifest, ms: int) -> int:
        """The first entry of the first page with a commit at or after a time, in Unix ms, or of an
        unknown time; the number of entries if there is none."""
        row = next((row for row in manifest.rows if not row.time or row.time >= ms), None)
        if row is None:
            return manifest.head.entries
        first = row.first_entry
        for page in self.footer(row).pages[row.frame : row.frame + row.pages]:
            if not page.time or page.time >= ms:
                break
            first = page.sum.next_number
        return first

    def bookmarks_at(self, manifest: ArchiveManifest, page: int) -> ListedBookmarks | None:
        """The bookmarks of the segment that begins with a page; None if no row is that segment."""
        row = manifest.row_of(page)
        footer = self.footer(row)
        if (row.first_page, row.frame, row.pages) != (page, 0, len(footer.pages)):
            return None
        self.ensure_chained(row, manifest.row_of(page - 1).chain if page else NO_CHAIN.hex())
        return ListedBookmarks(footer.bookmarks, row.stop, footer.pages[-1].sum.next_number)

    def bookmark(self, manifest: ArchiveManifest, key: bytes) -> int | None:
        """The newest entry with a key; the footers are asked from the last one back."""
        for row in reversed(manifest.rows):
            footer = self.footer(row)
            found, stop = footer.bookmarks.get(key), row.frame + row.pages
            if found is None:
                continue
            if row.first_entry <= found < footer.pages[stop - 1].sum.next_number:
                return found
            # A row that names a part of an object: the newest one may be in another part.
            for page in range(row.stop - 1, row.first_page - 1, -1):
                (content,) = self.pages(row, page, page + 1, last=row is manifest.tail)
                held = dict(scan(content, None).bookmarks())
                if key in held:
                    return held[key]
        return None
