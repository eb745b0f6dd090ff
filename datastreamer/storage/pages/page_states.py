"""What is known of the pages of one open stream file: its readers and its server share it.

Owns which pages are compared before their bytes are used, which are damaged, and which are in the
page cache. Where records come from is the `RecordSource`'s matter: a writer has them, a reader
reads the sidecar. What cannot be compared is not damaged. Who compares when: `VerifiedFile` for
readers; `server/streaming/cold_reads.py` and `server/scrub.py` for clients.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import threading
import time
from collections.abc import Callable, Iterable
from typing import Final, Literal

from datastreamer.errors import BadArgument, DamagedPage
from datastreamer.format import HEADER_PAGE_SIZE, PAGE_SIZE, page_of, page_start
from datastreamer.storage.disk.file_ops import Readable
from datastreamer.storage.disk.residency import CAN_SAY, Residency
from datastreamer.storage.header.judgement import sums_up_to
from datastreamer.storage.header.records import Head
from datastreamer.storage.pages.compare import MOVED, PAUSE_SECONDS, RecordSource, compare
from datastreamer.storage.pages.hashes import EndSum, last_page
from datastreamer.storage.read.evicted import PagedFile

_log = logging.getLogger(__name__)

Verify = Literal["cold", "always", "never"]
"""When a page that is read is compared with its checksum: if it comes from the disk, always, or
never. Each page is compared once while the stream is open."""

# The last page differs from its checksum if it does so this often.
_END_TRIES = 3
# Whether there are proofs of pages without one is asked at most once in this time.
_ASK_SECONDS = 1.0
# The records of this many pages before the last one may still be on their way.
_RECENT = 2
# Pages found resident are taken to be resident for this long.
_RESIDENT_SECONDS = 1.0

# The states of a page. Nothing is known: its bytes are used if they are resident. Due: it is
# compared before its bytes are used, resident or not. Unproven: it was read and has no proven
# checksum; due when it gets one. Whole: it matched its checksum, or was resident when a reader
# first used it; it is due again if it is found not to be resident. `_at_hand.pyx` knows the last.
UNCHECKED: Final = 0
DUE: Final = 1
UNPROVEN: Final = 2
WHOLE: Final = 3
_CHANGED: Final = bytes([UNCHECKED, DUE, UNCHECKED, UNCHECKED]) + bytes(252)
_PROVEN: Final = bytes([UNCHECKED, DUE, DUE, WHOLE]) + bytes(252)


def check_verify(verify: object) -> None:
    """Raises `BadArgument` unless it is a `Verify`."""
    if verify not in ("cold", "always", "never"):
        raise BadArgument(f'verify is "cold", "always" or "never", not {verify!r}')


class PageRegister:
    """The pages of one file.

    Safe to use from several threads, apart from `found`, `on_damage` and `ready`, which belong to
    the event loop of the server: at worst a page is compared twice.
    """

    def __init__(
        self,
        file: Readable,
        path: str,
        records: RecordSource | None,
        end: Callable[[], Head],
        end_sum: Callable[[], tuple[Head, EndSum | None]] | None = None,
        *,
        fd: int | None = None,
    ) -> None:
        """`end()` is the end of the stream; only the pages before its last one are whole.
        `end_sum()` is the end and what is known of the entries up to it. Without `records` no page
        is ever compared. `fd` is the file's descriptor, if it has one."""
        self.states = bytearray()
        """The state of each page. `forget` replaces it."""
        self.ready: set[int] = set()
        """Offsets of pages that `is_ready` found resident, and not due, within the last second."""
        self.on_damage: Callable[[], object] | None = None
        """Called when a page is found damaged that was not known to be."""
        self._file = file
        self._fd = fd
        self._path = path
        self._records = records
        self._end = end
        self._end_sum = end_sum
        self._residency = Residency(-1 if fd is None else fd)
        self._paged = file if isinstance(file, PagedFile) else None
        self._ready_until = 0.0
        self._guard = threading.Lock()
        # The number of calls of `forget`, and of `_proven`.
        self._changes = self._proofs = 0
        # When to ask for proofs again.
        self._ask_at = 0.0
        # The comparison of each page that runs; none once the page is suspected by another thread.
        self._comparing: dict[int, object] = {}
        self._damaged: dict[int, DamagedPage] = {}
        # Those of them that are damaged on the disk, whatever the page cache holds.
        self._on_disk: set[int] = set()
        self._bad_end: tuple[DamagedPage, Head, EndSum] | None = None
        if records is not None:
            records.on_proven = self._proven

    # What is known.

    @property
    def usable(self) -> bool:
        """Whether pages can be compared at all."""
        return self._records is not None

    @property
    def damaged(self) -> list[DamagedPage]:
        """The pages that differed when they were last compared, as the server found."""
        return list(self._damaged.values())

    @property
    def whole_pages(self) -> int:
        """The number of pages that can be compared: those before the last one."""
        return last_page(self._end().length) if self.usable else 0

    @property
    def floor(self) -> int:
        """The first page that is in the file; those before it are in its archive."""
        return 0 if self._paged is None else self._paged.floor()

    def can_differ(self, page: int) -> bool:
        """Whether the page can be compared, or is known to be damaged."""
        return page < self.whole_pages or self.is_due(page)

    def needs(self, page: int) -> bool:
        """Whether a reader has to look at the page before it uses its bytes."""
        state = self._state(page)
        if state == UNPROVEN:
            return self._is_proven_now(page)
        return state == DUE or (state == UNCHECKED and page < self.whole_pages)

    def is_due(self, page: int) -> bool:
        """Whether the page is to be compared before its bytes are used, resident or not."""
        return self._state(page) == DUE

    def is_whole(self, page: int) -> bool:
        """Whether the page needs no comparison if it is resident."""
        return self._state(page) == WHOLE

    def _state(self, page: int) -> int:
        states = self.states
        return states[page] if page < len(states) else UNCHECKED

    # What is in memory.

    def resident(self, start: int, count: int) -> bool:
        """Whether bytes are in memory, or in evicted pages that were fetched and compared."""
        fetched = self._is_fetched(start, count)
        return self._residency.holds(start, count) if fetched is None else fetched

    def _is_fetched(self, start: int, count: int) -> bool | None:
        """None for bytes of the file."""
        paged = self._paged
        return None if paged is None else paged.is_fetched(start, count, compared=self.usable)

    def is_ready(self, start: int, count: int) -> bool:
        """Whether `count` bytes from `start`, the begin of a page, can be sent at once; remembers a
        positive answer in `ready`, for a page of the file. What is not resident is due."""
        if start in self.ready:
            return True
        page, resident = page_of(start), self.resident(start, count)
        if not resident:
            self.suspect([page])
        if not resident or self.is_due(page):
            return False
        self.note_ready(page)
        return True

    def note_ready(self, page: int) -> None:
        """The page is resident, and not due. (What was fetched may be dropped at any time.)"""
        if page >= self.floor:
            self.ready.add(page_start(page))

    def are_ready(self, start: int, count: int, length: int) -> bool:
        """As `is_ready`, for the pages with `count` bytes from `start`, in a file of `length`
        bytes."""
        pages = map(page_start, pages_between(start, min(start + count, length)))
        # Each of them is examined, so that all that are not resident are compared.
        ready = [self.is_ready(page, min(PAGE_SIZE, length - page)) for page in pages]
        return all(ready)

    def forget_residency(self, now: float) -> None:
        """Forget `ready` once a second: pages may have been evicted. `now` is the loop's time."""
        if now > self._ready_until:
            self._ready_until = now + _RESIDENT_SECONDS
            self.ready.clear()

    def before_read(self, pages: Iterable[int]) -> None:
        """These pages may be resident after a read: those that are not now, and those that were
        never compared, are due."""
        self.suspect(
            [
                page
                for page in pages
                if not (self.is_whole(page) and self.resident(page_start(page), PAGE_SIZE))
            ]
        )

    # Comparison.

    def suspect(self, pages: Iterable[int]) -> None:
        """Compare these pages, whole or not, before their bytes are used."""
        whole = self.whole_pages
        if not whole:
            return
        with self._guard:
            for page in pages:
                if page < whole:
                    self._put(page, DUE)
                    self._comparing.pop(page, None)
                self.ready.discard(page_start(page))

    def compare(self, pages: Iterable[int]) -> None:
        """Compare the pages that are not whole. Reads the file. Raises `DamagedPage`."""
        for page in pages:
            if self.usable and not self.is_whole(page):
                # A client that is sent the page meets other errors of the disk itself.
                with contextlib.suppress(OSError):
                    self.verify(page)

    def verify(self, page: int, *, past_cache: Readable | None = None) -> bool:
        """Compare a page with its checksum; False if it has none. `past_cache` reads the disk.
        Raises `DamagedPage`, also if the disk cannot read the page, and `OSError`."""
        if not self.usable:
            return False
        if past_cache is None and not self.is_whole(page):
            # No thread may take it for one that needs no comparison because it is resident.
            self.suspect([page])
        began, mine = (self._changes, self._proofs), object()
        before = None if past_cache is None or self._paged is None else self._paged.look()
        if past_cache is None:
            self._comparing[page] = mine
        try:
            proven = self._is_as_written(page, past_cache or self._file)
        except DamagedPage:
            paged = self._paged
            if before and paged is not None and not paged.look().was_above(page, before):
                return False  # it was evicted meanwhile
            with self._guard:
                self._put(page, DUE)
                if past_cache is not None:
                    self._on_disk.add(page)
            if past_cache is None:
                self._evict(page)
            raise
        if past_cache is not None:
            self._on_disk.discard(page)
            if proven:
                self._damaged.pop(page, None)
        elif proven is not None and self._comparing.pop(page, None) is mine:
            self._matches(page, proven, *began)
        return bool(proven)

    def verify_all(self, pages: Iterable[int]) -> None:
        """Compare these pages, also those that are whole. Raises `DamagedPage` and `OSError`."""
        whole = self.whole_pages
        for page in pages:
            if page < whole:
                self.verify(page)
            else:
                self.verify_last_page()

    def verify_last_page(self) -> bool:
        """Compare the entries of the last page; False if nothing is known of them, or they are
        being changed. Raises `DamagedPage` and `OSError`."""
        if not self.usable or self._end_sum is None:
            return False
        for attempt in range(_END_TRIES):
            if attempt:
                time.sleep(PAUSE_SECONDS)
            changes = self._changes
            head, known = self._end_sum()
            if known is None:
                return False
            if self._end_matches(head, known):
                page = last_page(head.length)
                self._end_is_good(page)
                self._damaged.pop(page, None)
                return True
        if known is None or changes != self._changes:
            return False
        raise self._end_differs(head, known)

    def judge_end(self, head: Head, known: EndSum | None) -> None:
        """Compare the entries of the last page up to `head` with what a record knows of them. If
        they differ, reads of this page raise `DamagedPage`."""
        if known is None:
            return
        if self._end_matches(head, known):
            self._end_is_good(last_page(head.length))
        else:
            self._end_differs(head, known)

    def examine(self, page: int) -> DamagedPage | None:
        """How this page, or the next, differs from its checksum; an entry in one that cannot be
        read may show damage in the other. Clients are sent what they were sent before of them."""
        with contextlib.suppress(OSError):
            return self.damage(page) or self.damage(page + 1)
        return None

    def damage(self, page: int, *, still: bool = False) -> DamagedPage | None:
        """How a page differs from its checksum; None if it does not, or has none. `still`: the
        caller keeps it from changing, and it is compared once. Raises `OSError`."""
        try:
            self._is_as_written(page, self._file, still=still)
        except DamagedPage as error:
            return error
        return None

    def is_bad_on_disk(self, page: int) -> bool:
        return page in self._on_disk

    def ensure_good_on_disk(self, page: int) -> None:
        """Raises `DamagedPage` if the page is known to be damaged on the disk, whatever the page
        cache holds."""
        damage = self._damaged.get(page) if page in self._on_disk else None
        if damage is not None:
            raise damage

    def found(self, error: DamagedPage) -> bool:
        """A page that a client is due, or that was examined, is damaged; False if that is known
        already."""
        known = self._damaged.get(error.page)
        self._damaged[error.page] = error
        if known is not None:
            return False
        _log.error("%s; the server rejects requests for its entries", error)
        if self.on_damage is not None:
            self.on_damage()
        return True

    def written(self, page: int) -> None:
        """All of a page was written, and is on the disk."""
        self._on_disk.discard(page)
        self.suspect([page])

    def recompare(self, page: int) -> None:
        """Compare a damaged page again. Reads the file."""
        with contextlib.suppress(DamagedPage, OSError):
            self.verify_all([page])

    def use_resident(self, page: int) -> None:
        """A reader uses the page, which is resident, for the first time."""
        with self._guard:
            if self._state(page) == UNCHECKED:
                self._put(page, WHOLE)

    # Changes.

    def forget(self) -> None:
        """Entries were changed: compare all pages again. Those that were due stay due."""
        with self._guard:
            self._changes += 1
            self.states = self.states.translate(_CHANGED)
            self._bad_end = None
        whole = self.whole_pages
        # Lists, because other threads add and remove pages meanwhile.
        for page in [each for each in list(self._damaged) if each > whole]:
            self._damaged.pop(page, None)
        self._on_disk.difference_update([each for each in list(self._on_disk) if each >= whole])

    def _proven(self) -> None:
        with self._guard:
            self._proofs += 1
            if self.states.find(UNPROVEN) >= 0:
                self.states = self.states.translate(_PROVEN)
                self.ready.clear()

    def _is_proven_now(self, page: int) -> bool:
        """Whether a page that had no proven checksum has one now, asked once a second."""
        now = time.monotonic()
        if self._records is None or now < self._ask_at:
            return False
        self._ask_at = now + _ASK_SECONDS
        if self._records.get(page) is not None:
            self.suspect([page])
        return self.is_due(page)

    def _is_as_written(self, page: int, file: Readable, *, still: bool = False) -> bool | None:
        """Compare a page; False if it has no checksum, None if nothing can be said because entries
        are being changed. Raises `DamagedPage` and `OSError`."""
        records, bad = self._records, self._bad_end
        if records is None or page >= self.whole_pages:
            if bad is not None and bad[0].page == page:
                damage, head, known = bad
                if not self._end_matches(head, known):
                    raise damage
                self._end_is_good(page)
            elif self.is_due(page) and self._end_sum is not None:
                # It was damaged, and entries were changed since.
                return False if self.verify_last_page() else None
            return False
        if self._paged is not None and (held := self._paged.fetched(page)) is not None:
            proven = records.get(page)
            if proven is None or proven.digest == held.pages[page]:
                held.compared.add(page)
                return proven is not None
        try:
            record, why = compare(file, records, page, still=still)
        except OSError as error:
            if error.errno != errno.EIO:
                raise
            record, why = records.get(page), "the disk cannot read it"
        if record is None and why is MOVED:
            return None
        if why and record is not None:
            first = records.first_number(page)
            span = page, first, record.next_number
            raise DamagedPage(self._path, page_start(page), why, *span)
        return record is not None

    def _matches(self, page: int, proven: bool, changes: int, proofs: int) -> None:
        """A page was read, and has no checksum or matches it."""
        whole = self.whole_pages
        with self._guard:
            # If entries were changed meanwhile, this may have been the page before.
            if changes != self._changes or page in self._on_disk:
                return
            if proven:
                self._put(page, WHOLE)
            elif proofs == self._proofs:
                # The last page, also if it was whole when it was suspected, has no checksum.
                self._put(page, UNPROVEN if page < whole - _RECENT else UNCHECKED)
        if proven:
            self._damaged.pop(page, None)

    def _end_matches(self, head: Head, known: EndSum) -> bool:
        try:
            return sums_up_to(self._file, head, known) is not None
        except OSError as error:
            if error.errno != errno.EIO:
                raise
            return False

    def _end_is_good(self, page: int) -> None:
        """The last page, `page`, holds what was written."""
        last = page >= self.whole_pages
        with self._guard:
            self._bad_end = None
            if last and self._state(page) == DUE:
                self._put(page, UNCHECKED)

    def _end_differs(self, head: Head, known: EndSum) -> DamagedPage:
        page = last_page(head.length)
        first = 0 if self._records is None else self._records.first_number(page)
        what = "the entries do not match their checksum"
        damage = DamagedPage(self._path, page_start(page), what, page, first, head.entries)
        with self._guard:
            self._bad_end = damage, head, known
            self._put(page, DUE)
        return damage

    def _evict(self, page: int) -> None:
        """Other processes must not take a damaged page for one that needs no comparison because it
        is resident."""
        if hasattr(os, "posix_fadvise") and self._fd is not None:
            with contextlib.suppress(OSError):
                os.posix_fadvise(self._fd, page_start(page), PAGE_SIZE, os.POSIX_FADV_DONTNEED)

    def _put(self, page: int, state: int) -> None:
        """Requires the guard."""
        states = self.states
        if page >= len(states):
            states.extend(bytes(max(page + 1 - len(states), len(states) // 2, 64)))
        states[page] = state
        if state == DUE:
            self.ready.discard(page_start(page))


class VerifiedFile:
    """Reads a file, and verifies each page when it is first read."""

    def __init__(self, file: Readable, register: PageRegister, *, cold: int | None = None) -> None:
        """With `cold`, the file's descriptor: only pages that are not in the page cache when they
        are first read."""
        self._file = file
        self._register = register
        self._fd = cold if CAN_SAY else None

    def size(self) -> int:
        return self._file.size()

    def close(self) -> None:
        self._file.close()

    def read(self, size: int, offset: int) -> bytes:
        """Up to `size` bytes. Raises `DamagedPage`."""
        page, start = divmod(offset - HEADER_PAGE_SIZE, PAGE_SIZE)
        if page >= 0 and (start + size > PAGE_SIZE or self._register.needs(page)):
            for each in range(page, page_of(offset + size - 1) + 1):
                if self._register.needs(each):
                    self._look_at(each)
        return self._file.read(size, offset)

    def _look_at(self, page: int) -> None:
        register = self._register
        # Of a last page that is resident, what is before the damage can be read.
        due = register.is_due(page) and page < register.whole_pages
        if not due and self._fd is not None and register.resident(page_start(page), PAGE_SIZE):
            register.use_resident(page)
            return
        register.suspect([page])
        if self._fd is not None and hasattr(os, "posix_fadvise"):
            # The system reads nothing ahead by itself (`file_ops.read_ahead`).
            register.before_read([page + 1])
            start = page_start(page)
            os.posix_fadvise(self._fd, start, 2 * PAGE_SIZE, os.POSIX_FADV_WILLNEED)
        register.verify(page)


def pages_between(start: int, stop: int) -> range:
    """The pages that bytes from file offset `start` to `stop` are in; at least that of `start`."""
    return range(page_of(start), page_of(max(stop - 1, start)) + 1)
