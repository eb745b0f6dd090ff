"""Pages that were fetched, in files without a name, where a page has the offset that it has in the
stream: so they are read and sent as from the stream's own file.

Owns how much of the disk they take. When half of that is used a second file begins, and the older
one is closed when it is not in use: that frees it whole, and leaves what connections have queued
intact.
"""

from __future__ import annotations

import errno
import logging
import os
import tempfile
import threading
from typing import TYPE_CHECKING, Final

from datastreamer.format import PAGE_SIZE, page_start
from datastreamer.metrics.writer_numbers import shared_memory

if TYPE_CHECKING:
    from datastreamer.storage.objects.opened import Content

_log = logging.getLogger(__name__)

# Pages in each half, if the folder takes none.
_IN_MEMORY: Final = 32


class CachedPages:
    """One of the files: `pages` are those that it has, with the hashes of their entries in the
    archive; those in `compared` were compared with the stream's own checksums."""

    def __init__(self, folder: str | None) -> None:
        self._fd = -1
        if folder is None:
            self._fd = shared_memory("fetched pages", 0)
        else:
            with tempfile.TemporaryFile(dir=folder) as file:
                self._fd = os.dup(file.fileno())
        self.pages: dict[int, bytes] = {}
        self.compared: set[int] = set()

    def fileno(self) -> int:
        return self._fd

    def __del__(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)


class PageCache:
    """At most about `most` bytes of pages, in `folder`. Safe to use from several threads."""

    def __init__(self, folder: str, most: int) -> None:
        self._folder: str | None = folder
        self.half = max(1, most // 2 // PAGE_SIZE)
        """Pages in each of the files; 0 once it is closed."""
        self._guard = threading.Lock()
        # The newer one first.
        self._halves: list[CachedPages] = []

    def put(self, page: int, content: Content) -> None:
        """Keep a page, unless it is here or the cache is closed. Raises `OSError`."""
        with self._guard:
            if not self.half or self.holder(page) is not None:
                return
            try:
                self._put(page, content)
            except OSError as error:
                if self._folder is None:
                    raise
                _log.warning(
                    "%s: pages that are fetched from the archive cannot be kept there, and up to "
                    "%d are kept in memory: %s",
                    *(self._folder, 2 * _IN_MEMORY, error.strerror or error),
                )
                self._folder, self.half = None, min(self.half, _IN_MEMORY)
                self._halves.clear()
                self._put(page, content)

    def _put(self, page: int, content: Content) -> None:
        if not self._halves or len(self._halves[0].pages) >= self.half:
            self._halves[:] = [CachedPages(self._folder), *self._halves[:1]]
        half = self._halves[0]
        data = content.data.ljust(PAGE_SIZE, b"\0")
        if os.pwrite(half.fileno(), data, page_start(page)) < len(data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        half.pages[page] = content.digest

    def holder(self, page: int) -> CachedPages | None:
        """The file that has a page, whose bytes remain as long as it is referred to."""
        return next((half for half in list(self._halves) if page in half.pages), None)

    @property
    def bytes(self) -> int:
        return sum(len(half.pages) for half in list(self._halves)) * PAGE_SIZE

    def close(self) -> None:
        with self._guard:
            self.half = 0
            self._halves.clear()
