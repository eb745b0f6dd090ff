"""Verifies the pages of one open stream file when they are read.

Owns which pages were verified. Where records come from is the `RecordSource`'s matter: a writer
has them, a reader reads the sidecar. What cannot be compared is not damaged.
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable
from typing import Final, Literal, Protocol

from datastreamer.errors import BadArgument, DamagedPage
from datastreamer.format import HEADER_PAGE_SIZE, PAGE_SIZE, page_of, page_start
from datastreamer.storage.disk.file_ops import Readable
from datastreamer.storage.header.records import Head
from datastreamer.storage.header.recovery import sums_up_to
from datastreamer.storage.pages.compare import differs
from datastreamer.storage.pages.hashes import EndSum, last_page
from datastreamer.storage.pages.sidecar import PageSum

Verify = Literal["cold", "always", "never"]
"""When a page that is read is compared with its checksum: if it comes from the disk, always, or
never. Each page is compared once while the stream is open."""

_NOWAIT: Final[int | None] = getattr(os, "RWF_NOWAIT", None)
# A page that is being changed differs for a moment: this often it is read again.
_TRIES = 20
_PAUSE_SECONDS = 0.002
# The records of this many pages before the last one may still be on their way.
_RECENT = 2
# One byte in this many is probed.
_PROBE_STEP = 256 * 1024


def check_verify(verify: object) -> None:
    """Raises `BadArgument` unless it is a `Verify`."""
    if verify not in ("cold", "always", "never"):
        raise BadArgument(f'verify is "cold", "always" or "never", not {verify!r}')


class RecordSource(Protocol):
    """Knows the checksums of whole pages."""

    def get(self, page: int) -> PageSum | None:
        """The record of a page, if it is proven."""

    def get_many(self, first: int, stop: int) -> list[PageSum | None]:
        """The same for the pages from `first` up to, not including, `stop`, with one read."""

    def first_number(self, page: int) -> int:
        """The first entry of a page, as far as records say; else 0."""

    def renew(self) -> bool:
        """A page differs from its record: make sure that the record is not an outdated one. False
        if the stream has changed since the state that the records are about."""


def compare(
    file: Readable, records: RecordSource, page: int, content: bytes | None = None
) -> tuple[PageSum | None, str]:
    """The record of a whole page, and how the page differs from it; None without a proven record.

    `content` is that of the page if it was read. If it differs, the page is read again: another
    process may be changing it.
    """
    known = records.get(page)
    why = ""
    for attempt in range(_TRIES):
        if known is None:
            break
        if content is None:
            content = file.read(PAGE_SIZE, page_start(page))
        why = differs(content, known)
        if not why:
            break
        if attempt == 1 and not records.renew():
            return None, ""
        before, known = known, records.get(page)
        if attempt > 1 and known == before:
            break
        time.sleep(_PAUSE_SECONDS)
        content = None
    return known, why if known is not None else ""


class PageVerifier:
    """The pages of one file.

    Safe to use from several threads: at worst a page is compared twice.
    """

    def __init__(
        self, file: Readable, path: str, records: RecordSource, end: Callable[[], Head]
    ) -> None:
        """`end()` is the end of the stream; only the pages before its last one are whole."""
        self._file = file
        self._path = path
        self._records = records
        self._end = end
        self.seen = bytearray()
        """For each page, 1 if it needs no comparison any more. `forget` replaces it."""
        self._bad_tail: DamagedPage | None = None
        self._tail: tuple[Head, EndSum] | None = None
        # Pages that are being compared, or differed when they were compared last.
        self._doubtful: set[int] = set()

    def forget(self) -> None:
        """Entries were changed: verify all pages again. Those that differed stay doubtful."""
        self.seen = bytearray()
        self._bad_tail = None

    def needs(self, page: int) -> bool:
        """Whether the page is to be compared, or is known to be damaged."""
        seen = self.seen
        if page < len(seen) and seen[page]:
            return False
        return self._bad_tail is not None or page < last_page(self._end().length)

    def doubts(self, page: int) -> bool:
        """Whether the page is being compared, or differed when it was compared last."""
        return page in self._doubtful

    def doubt(self, page: int) -> None:
        """The page is about to be compared: no thread may take it for one that needs none."""
        self._doubtful.add(page)
        if page < len(self.seen):
            self.seen[page] = 0

    def mark(self, page: int) -> None:
        """The page needs no comparison any more."""
        seen = self.seen
        if page >= len(seen):
            seen.extend(bytes(max(page + 1 - len(seen), len(seen) // 2, 64)))
        seen[page] = 1

    def verify_last_page(self, head: Head, known: EndSum | None) -> None:
        """Compare the entries of the last page up to `head` with what a record knows of them. If
        they differ, reads of this page raise `DamagedPage`."""
        if known is None:
            return
        if sums_up_to(self._file, head, known) is not None:
            self._bad_tail = None
            return
        page = last_page(head.length)
        self._tail = head, known
        self._bad_tail = DamagedPage(
            self._path,
            page_start(page),
            "the entries do not match their checksum",
            page,
            self._records.first_number(page),
            head.entries,
        )

    @property
    def damaged_last_page(self) -> int | None:
        """The last page at the time of `verify_last_page`, if its entries differed."""
        return None if self._bad_tail is None else self._bad_tail.page

    def verify(self, page: int, file: Readable | None = None) -> bool:
        """Compare a page with its checksum; False if it has none. `file` reads the same file in
        another way. Raises `DamagedPage`, also if the disk cannot read the page, and `OSError`."""
        last = last_page(self._end().length)
        if page >= last:
            if self._bad_tail is not None and self._bad_tail.page == page:
                self._raise_unless_restored(self._bad_tail)
            return False
        self.doubt(page)
        seen = self.seen
        try:
            known, why = compare(file or self._file, self._records, page)
        except OSError as error:
            if error.errno != errno.EIO:
                raise
            known, why = self._records.get(page), "the disk cannot read it"
        if why and known is not None:
            first = self._records.first_number(page)
            raise DamagedPage(self._path, page_start(page), why, page, first, known.next_number)
        # If entries were changed meanwhile, this may have been the page before.
        if seen is self.seen and (known is not None or page < last - _RECENT):
            self.mark(page)
        self._doubtful.discard(page)
        return known is not None

    def _raise_unless_restored(self, damage: DamagedPage) -> None:
        assert self._tail is not None
        if sums_up_to(self._file, *self._tail) is None:
            raise damage
        self._bad_tail = None


class VerifiedFile:
    """Reads a file, and verifies each page when it is first read."""

    def __init__(self, file: Readable, verifier: PageVerifier, *, cold: int | None = None) -> None:
        """With `cold`, the file's descriptor: only pages that are not in the page cache when they
        are first read."""
        self._file = file
        self._verifier = verifier
        self._fd = cold if _NOWAIT is not None else None
        self._byte = [bytearray(1)]
        # A page that was read ahead from the disk for this reader.
        self._ahead = -1

    def size(self) -> int:
        return self._file.size()

    def close(self) -> None:
        self._file.close()

    def read(self, size: int, offset: int) -> bytes:
        """Up to `size` bytes. Raises `DamagedPage`."""
        page, start = divmod(offset - HEADER_PAGE_SIZE, PAGE_SIZE)
        if page >= 0 and (start + size > PAGE_SIZE or self._verifier.needs(page)):
            for each in range(page, page_of(offset + size - 1) + 1):
                if self._verifier.needs(each):
                    self._look_at(each)
        return self._file.read(size, offset)

    def _look_at(self, page: int) -> None:
        doubtful = page == self._ahead or self._verifier.doubts(page)
        if not doubtful and self._is_resident(page):
            self._verifier.mark(page)
            return
        self._verifier.doubt(page)
        if self._fd is not None and hasattr(os, "posix_fadvise"):
            # The system reads nothing ahead by itself (`file_ops.read_ahead`).
            self._ahead = page + 1
            start = page_start(page)
            os.posix_fadvise(self._fd, start, 2 * PAGE_SIZE, os.POSIX_FADV_WILLNEED)
        self._verifier.verify(page)

    def _is_resident(self, page: int) -> bool:
        """Whether the page is in the page cache, judged by samples."""
        if self._fd is None or _NOWAIT is None:
            return False
        start = page_start(page)
        try:
            for offset in range(start, start + PAGE_SIZE, _PROBE_STEP):
                os.preadv(self._fd, self._byte, offset, _NOWAIT)
        except BlockingIOError:
            return False
        except OSError:
            return True
        return True
