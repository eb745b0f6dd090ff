"""The size of a stream file that is written: whole pages, and at least one unused byte.

Decides when a file grows and by how much. Syncs nothing.
"""

from __future__ import annotations

import contextlib
import time

from datastreamer.format import HEADER_PAGE_SIZE, PAGE_SIZE, page_of, page_start
from datastreamer.storage.disk.file_ops import File

# A file grows by one page at first; a growth within a second of the previous one doubles the step,
# up to 256 MiB.
_MAX_STEP = 256


class Preallocation:
    """`size` is the size of the file in bytes."""

    def __init__(self, file: File) -> None:
        self._file = file
        self.size = file.size()
        self._before = self.size
        self._step = 1
        self._grown_at = 0.0

    def round_up(self) -> None:
        """Grow the file to 4096 + k x 1 MiB: a power cut may have left another size."""
        short = -(self.size - HEADER_PAGE_SIZE) % PAGE_SIZE
        if short:
            self._resize(self.size + short)

    def grow(self, length: int) -> bool:
        """Ensure at least one unused byte after `length`, in whole pages; True if the file grew."""
        if length < self.size:
            return False
        needed = page_start(page_of(length) + 1)
        now = time.monotonic()
        self._step = min(2 * self._step, _MAX_STEP) if now - self._grown_at < 1 else 1
        self._grown_at = now
        size = max(needed, self.size + self._step * PAGE_SIZE)
        try:
            self._resize(size)
        except OSError:
            # The disk has no space for the whole step; the needed part of it may fit.
            if size == needed:
                raise
            self._resize(needed)
        return True

    def shrink(self, length: int, size: int) -> None:
        """Shrink the file to `size`, but not below what a stream that ends at `length` needs.

        Raises `OSError`; the file keeps its size then.
        """
        size = max(size, page_start(page_of(length) + 1))
        if size < self.size:
            self._resize(size)
            self._step = 1

    def undo_growth(self) -> None:
        """Undo the last growth, if the system allows it."""
        with contextlib.suppress(OSError):
            self._file.resize(self._before)
            self.size = self._before

    def _resize(self, size: int) -> None:
        self._file.resize(size)
        self._before, self.size = self.size, size
