"""Reads of what the disk holds of a file, whatever the page cache holds.

Owns the second descriptor that this needs, and what happens where the system refuses it. Knows no
pages or entries.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
from collections.abc import Callable

from datastreamer.format import PAGE_SIZE
from datastreamer.storage.disk.file_ops import File

# The unit of direct reads, in bytes.
_BLOCK = 4096
_DIRECT: int = getattr(os, "O_DIRECT", 0)
_REFUSED = (errno.EINVAL, errno.EOPNOTSUPP)


class UncachedFile:
    """Reads `file` with O_DIRECT. Where the system refuses that, reads it through the page cache,
    and evicts what was not resident before. For one thread at a time."""

    def __init__(self, file: File, resident: Callable[[int, int], bool]) -> None:
        """`resident(start, count)` says whether bytes are in the page cache."""
        self._file = file
        self._resident = resident
        self._fd = -1
        self._buffer = mmap.mmap(-1, PAGE_SIZE)  # aligned, as direct reads require
        if _DIRECT:
            with contextlib.suppress(OSError):
                self._fd = os.open(
                    f"/proc/self/fd/{file.fileno()}", os.O_RDONLY | os.O_CLOEXEC | _DIRECT
                )

    def size(self) -> int:
        return self._file.size()

    def read(self, size: int, offset: int) -> bytes:
        """Up to `size` bytes, a page at most; fewer only at the end of the file."""
        if self._fd >= 0 and size <= PAGE_SIZE and not (size % _BLOCK or offset % _BLOCK):
            try:
                with memoryview(self._buffer) as whole, whole[:size] as view:
                    count = os.preadv(self._fd, [view], offset)
                    data = bytes(view[:count])
            except OSError as error:
                if error.errno not in _REFUSED:
                    raise
                self.close()
            else:
                return (
                    data
                    if len(data) == size
                    else data + self._file.read(size - len(data), offset + len(data))
                )
        return self._read_and_evict(size, offset)

    def _read_and_evict(self, size: int, offset: int) -> bytes:
        resident = self._resident(offset, size)
        data = self._file.read(size, offset)
        if not resident and hasattr(os, "posix_fadvise"):
            with contextlib.suppress(OSError):
                os.posix_fadvise(self._file.fileno(), offset, size, os.POSIX_FADV_DONTNEED)
        return data

    def close(self) -> None:
        """Close the second descriptor; later reads are made through the page cache. Idempotent."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)
