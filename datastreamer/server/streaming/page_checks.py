"""Which pages of the stream match their checksums, as far as this server has compared them.

Owns the state of each page, and which pages are damaged. `page_cache.py` and `scrub.py` decide when
a page is compared. A page without a checksum is never damaged.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Callable, Iterable
from typing import Final

from datastreamer.errors import DamagedPage
from datastreamer.format import PAGE_SIZE, page_start
from datastreamer.storage.disk.file_ops import Readable, read_ahead
from datastreamer.storage.pages.hashes import last_page
from datastreamer.storage.pages.verifier import PageVerifier
from datastreamer.storage.read.file import StreamFile

_log = logging.getLogger(__name__)

# Nothing is known: its bytes are sent if they are resident. Doubted: it is compared before its
# bytes are sent, resident or not. Verified: it matched its checksum since entries were changed, and
# since it was last found not to be resident.
_UNKNOWN: Final = 0
_DOUBTED: Final = 1
_VERIFIED: Final = 2
_FORGET: Final = bytes([_UNKNOWN, _DOUBTED, _UNKNOWN]) + bytes(253)


class PageChecks:
    """The pages of one stream. Safe to use from several threads, apart from `found` and
    `on_damage`, which belong to the event loop."""

    def __init__(self, file: StreamFile | None = None) -> None:
        """Without a file, or without its path, no page is ever doubted. The system reads nothing
        of the file ahead by itself from now on."""
        self.file = file
        self.on_damage: Callable[[], object] | None = None
        """Called when a page is found damaged that was not known to be."""
        self._verifier: PageVerifier | None = None if file is None else file.new_verifier()
        if file is not None and self._verifier is not None:
            read_ahead(file.file, False)
        self._states = bytearray()
        self._guard = threading.Lock()
        # The number of calls of `forget`.
        self._changes = 0
        self._damaged: dict[int, DamagedPage] = {}
        # Those of them that are damaged on the disk, whatever the page cache holds.
        self._on_disk: set[int] = set()
        self._doubt_last_page()

    @property
    def damaged(self) -> list[DamagedPage]:
        """The pages that differed when they were last compared."""
        return list(self._damaged.values())

    @property
    def whole(self) -> int:
        """The number of pages that can be compared: those before the last one."""
        return 0 if self.file is None else last_page(self.file.head.length)

    def can_differ(self, page: int) -> bool:
        """Whether the page can be compared, or is known to be damaged."""
        return page < self.whole or self.doubted(page)

    def doubted(self, page: int) -> bool:
        """Whether the page is to be compared before its bytes are sent, resident or not."""
        states = self._states
        return page < len(states) and states[page] == _DOUBTED

    def verified(self, page: int) -> bool:
        """Whether the page matched its checksum, and needs no comparison if it is resident."""
        return self._state(page) == _VERIFIED

    def doubt(self, pages: Iterable[int]) -> None:
        """Compare these pages, verified or not, before their bytes are sent."""
        whole = self.whole
        if self._verifier is None:
            return
        with self._guard:
            for page in pages:
                if page < whole:
                    self._extend(page + 1)
                    self._states[page] = _DOUBTED

    def compare(self, pages: Iterable[int]) -> None:
        """Compare the pages that are not verified. Reads the file. Raises `DamagedPage`."""
        for page in pages:
            if self._verifier is not None and not self.verified(page):
                # A client that is sent the page meets other errors of the disk itself.
                with contextlib.suppress(OSError):
                    self.verify(page)

    def verify(self, page: int, *, past_cache: Readable | None = None) -> bool:
        """Compare a page; False if it has no checksum. `past_cache` reads the disk. Raises
        `DamagedPage` and `OSError`."""
        verifier, changes = self._verifier, self._changes
        if verifier is None or self.file is None:
            return False
        try:
            known = verifier.verify(page, past_cache)
        except DamagedPage:
            with self._guard:
                self._extend(page + 1)
                self._states[page] = _DOUBTED
                if past_cache is not None:
                    self._on_disk.add(page)
            if past_cache is None:
                _evict(self.file.file.fileno(), page)
            raise
        if past_cache is None:
            self._matches(page, known, changes)
        else:
            self._on_disk.discard(page)
            if known:
                self._damaged.pop(page, None)
        return known

    def examine(self, page: int) -> DamagedPage | None:
        """How this page, or the next, differs from its checksum; an entry in one that cannot be
        read may show damage in the other. Their clients are sent what they were sent before."""
        if self._verifier is not None:
            for each in (page, page + 1):
                try:
                    self._verifier.verify(each)
                except DamagedPage as error:
                    return error
                except OSError:
                    return None
        return None

    def verify_all(self, pages: Iterable[int]) -> None:
        """Compare these pages, also those that were verified before. Raises `DamagedPage` and
        `OSError`."""
        whole = self.whole
        for page in pages:
            if page < whole:
                self.verify(page)
            else:
                self.verify_last_page()

    def verify_last_page(self) -> bool:
        """Compare the entries of the last page; False if nothing is known of them, or they are
        being changed. Raises `DamagedPage` and `OSError`."""
        verifier, file = self._verifier, self.file
        if verifier is None or file is None:
            return False
        head, known = file.end_sum()
        if known is None:
            return False
        verifier.verify_last_page(head, known)
        page = verifier.damaged_last_page
        if page is None:
            self._damaged.pop(last_page(head.length), None)
        else:
            self._doubt_last_page()
            verifier.verify(page)
        return True

    def found(self, error: DamagedPage) -> bool:
        """A page is damaged; False if that is known already."""
        known = self._damaged.get(error.page)
        self._damaged[error.page] = error
        if known is not None:
            return False
        _log.error("%s; clients that are due its entries are refused or disconnected", error)
        if self.on_damage is not None:
            self.on_damage()
        return True

    def look_again(self, page: int) -> None:
        """A damaged page was written again on the disk: compare it. Reads the file."""
        self._on_disk.discard(page)
        with contextlib.suppress(DamagedPage, OSError):
            self.verify_all([page])

    def forget(self) -> None:
        """Entries were changed: compare all pages again."""
        with self._guard:
            self._changes += 1
            self._states = self._states.translate(_FORGET)
        if self._verifier is not None:
            self._verifier.forget()
        whole = self.whole
        for page in [page for page in self._damaged if page >= whole]:
            del self._damaged[page]

    def _matches(self, page: int, known: bool, changes: int) -> None:
        """A page was read, and has no checksum or matches it."""
        with self._guard:
            if changes != self._changes:
                return
            self._extend(page + 1)
            # The last page, also if it was whole when it was doubted, has no checksum.
            self._states[page] = _VERIFIED if known else _UNKNOWN
        if known and page not in self._on_disk:
            self._damaged.pop(page, None)

    def _doubt_last_page(self) -> None:
        page = None if self._verifier is None else self._verifier.damaged_last_page
        if page is not None:
            with self._guard:
                self._extend(page + 1)
                self._states[page] = _DOUBTED

    def _state(self, page: int) -> int:
        states = self._states
        return states[page] if page < len(states) else _UNKNOWN

    def _extend(self, size: int) -> None:
        """Make room for the states of `size` pages. Requires the guard."""
        if size > len(self._states):
            self._states.extend(bytes(max(size - len(self._states), len(self._states) // 2, 64)))


def _evict(fd: int, page: int) -> None:
    """Other processes must not take a damaged page for one that needs no comparison because it is
    resident."""
    if hasattr(os, "posix_fadvise"):
        with contextlib.suppress(OSError):
            os.posix_fadvise(fd, page_start(page), PAGE_SIZE, os.POSIX_FADV_DONTNEED)
