"""Compares a snapshot with the checksums of its stream, and makes the copy's `FILE.sums`.

Owns which difference is damage: a page that the stream's writer has changed since it was copied
has none. Reads the copy, so that what was written is compared. Knows neither how the copy is made
nor its name.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from xxhash import xxh3_64_intdigest

from datastreamer.errors import DamagedEntry, DamagedPage
from datastreamer.format import PAGE_SIZE, page_start
from datastreamer.storage.disk.file_ops import File
from datastreamer.storage.header.judgement import hash_last_page, sums_up_to
from datastreamer.storage.header.page import HeaderPage
from datastreamer.storage.header.records import Head
from datastreamer.storage.pages.compare import differs
from datastreamer.storage.pages.hashes import NO_CHAIN, EndSum, chained, hash_page, last_page
from datastreamer.storage.pages.keeper import ALL_TRUSTED
from datastreamer.storage.pages.proof import KnownChain, known_chains
from datastreamer.storage.pages.records import SidecarRecords
from datastreamer.storage.pages.sidecar import PageSum, SumsFile, SumsHeader, identity_of
from datastreamer.storage.read.change_watch import ChangedError, Changes, ChangeWatch
from datastreamer.storage.read.file import StreamFile

# Pages whose records are read at once.
_MANY = 16


class Copied(NamedTuple):
    """A copy without its header page: the file, its path, and which moment of the stream it holds.

    `end_sum` is what the stream's commit record knows of the entries up to `head`; the pages before
    `floor` are in an archive alone.
    """

    file: File
    path: str
    head: Head
    epoch: int
    end_sum: EndSum | None
    floor: int = 0


class CopySums:
    """The checksums of one copy. `verified` counts the pages that were compared with one."""

    def __init__(
        self, source: StreamFile, watch: ChangeWatch, sidecar: Callable[[], File], *, verify: bool
    ) -> None:
        """`watch` collects what changes in the stream since the copy's moment. `sidecar()` makes
        the file for the checksums. Unless `verify`, the copy is not read."""
        self._source = source
        self._watch = watch
        self._sidecar = sidecar
        self._verify = verify
        self._changes = Changes()
        self._known: SidecarRecords | None = None
        place = source.place()
        # At another file's path is another file's sidecar.
        if place is not None and not source.replaced:
            self._known = SidecarRecords(
                *place,
                source.file,
                self._state,
                lambda: known_chains(HeaderPage.of(source.file).record),
                again_seconds=0,
            )
        self._chain = NO_CHAIN
        self._complete = True
        # The first entry of the next page; 0 if it is not known.
        self._first = 0
        self.verified = 0

    def _state(self) -> tuple[bytes, int | None]:
        return self._source.stream_id, self._watch.epoch

    def make(self, copied: Copied, advance: Callable[[int, int], None]) -> EndSum:
        """Write the records of all whole pages, and return what is known of the copy's end.

        Raises `DamagedPage`, and `ChangedError` if it is not known what was changed.
        """
        pages = last_page(copied.head.length)
        try:
            if pages:
                self._write(copied, pages, advance)
        finally:
            if self._known is not None:
                self._known.close()
        tail = self._tail(copied, pages)
        known = KnownChain.of(copied.head, copied.end_sum) if self._verify else None
        if known is not None and known.first == 0 and self._complete and known.chain != self._chain:
            raise DamagedEntry(self._source.path, page_start(0), known.refuted())
        if self._complete:
            return EndSum(self._chain, 0, tail)
        if copied.end_sum is not None:
            return copied.end_sum._replace(tail=tail)
        return EndSum(NO_CHAIN, pages, tail)

    # Whole pages.

    def _write(self, copied: Copied, pages: int, advance: Callable[[int, int], None]) -> None:
        stream_id, epoch = self._source.stream_id, copied.epoch
        sums = SumsFile(self._sidecar(), copied.path)
        for first in range(0, pages, _MANY):
            stop = min(first + _MANY, pages)
            # Often enough: the header page names the newest changes only. And records are those of
            # the epoch that was seen last.
            self._changes.extend(self._watch.take())
            known: list[PageSum | None] = [None] * (stop - first)
            if self._known is not None:
                known = self._known.get_many(first, stop)
            records = [self._record(copied, at, each) for at, each in enumerate(known, first)]
            sums.put(first, records, stream_id)
            if self._verify:
                advance(page_start(stop), copied.head.length)
        # (The next writer makes the records that are unknown.)
        identity = identity_of(copied.file, stream_id)
        sums.write_header(SumsHeader(stream_id, identity, epoch, epoch, ALL_TRUSTED))

    def _record(self, copied: Copied, page: int, known: PageSum | None) -> PageSum:
        if self._verify and page >= copied.floor:
            content = copied.file.read(PAGE_SIZE, page_start(page))
            if known is None or not self._matches(copied, page, content, known):
                known = _record_of(content, page)
        elif known is not None and self._is_changed(known):
            known = None
        if known is None:
            known = PageSum(NO_CHAIN, NO_CHAIN, 0, 0, 0, known=False)
            self._complete = False
        self._first = known.next_number
        self._chain = chained(self._chain, known.digest)
        return known._replace(chain=self._chain)

    def _matches(self, copied: Copied, page: int, content: bytes, known: PageSum) -> bool:
        """Whether the page of the copy matches its record; False if the record may be that of a
        later moment. Raises `DamagedPage`."""
        why = differs(content, known)
        if not why:
            self.verified += 1
            return True
        if self._is_changed(known):
            return False
        # If only the copy differs, it is the copy's disk that fails.
        whole = not differs(self._source.file.read(PAGE_SIZE, page_start(page)), known)
        path = copied.path if whole else self._source.path
        raise DamagedPage(path, page_start(page), why, page, self._first, known.next_number)

    def _is_changed(self, known: PageSum) -> bool:
        """Whether the stream's page may have changed since the copy's moment."""
        self._changes.extend(self._watch.take())
        if self._changes.unknown:
            raise ChangedError("entries were truncated or updated, which ones is not known", 1)
        lowest, end = self._changes.lowest, known.next_number
        if lowest is not None and lowest.start <= end:
            return True
        return any(number >= self._first for number in self._changes.updated_below(end))

    # The last page.

    def _tail(self, copied: Copied, page: int) -> bytes:
        """The hash of the entries in the last page. Raises `DamagedPage`."""
        file, head, known = copied.file, copied.head, copied.end_sum
        if known is not None:
            if self._verify and sums_up_to(file, head, known) is None:
                what = "the entries do not match their checksum"
                first = self._first
                raise DamagedPage(
                    self._source.path, page_start(page), what, page, first, head.entries
                )
            return known.tail
        found = hash_last_page(file, head)
        if found is None and self._verify:
            raise DamagedEntry(self._source.path, page_start(page), "damaged")
        return NO_CHAIN if found is None else found.sum().tail


def _record_of(content: bytes, page: int) -> PageSum | None:
    """The record of a page with this content; None if it cannot be read as entries."""
    found = hash_page(content, page)
    if found is None:
        return None
    padding = xxh3_64_intdigest(memoryview(content)[found.end :])
    return PageSum(NO_CHAIN, found.digest, found.next_number, found.end, padding)
