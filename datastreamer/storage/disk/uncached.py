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
    """Reads `file` with O_DIRECT. Where the system refuses that, reads it through the page cache
    without read-ahead, and evicts what was not resident before. For one thread at a time."""

    def __init__(self, file: File, resident: Callable[[int, int], bool]) -> None:
        """`resident(start, count)` says whether bytes are in the page cache."""
        self._file = file
        self._resident = resident
        self._buffer = mmap.mmap(-1, PAGE_SIZE)  # aligned, as direct reads require
        self._direct = bool(_DIRECT)
        self._fd = self._open()

    def _open(self) -> int:
        """The second descriptor, or -1."""
        fd = -1
        for direct in (_DIRECT, 0) if self._direct else (0,):
            with contextlib.suppress(OSError):
                name = f"/proc/self/fd/{self._file.fileno()}"
                fd = os.open(name, os.O_RDONLY | os.O_CLOEXEC | direct)
                break
        self._direct = bool(direct)
        if fd >= 0 and not direct and hasattr(os, "posix_fadvise"):
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)
        return fd

    def size(self) -> int:
        return self._file.size()

    def read(self, size: int, offset: int) -> bytes:
        """Up to `size` bytes, a page at most; fewer only at the end of the file."""
        if self._direct and size <= PAGE_SIZE and not (size % _BLOCK or offset % _BLOCK):
            try:
                with memoryview(self._buffer) as whole, whole[:size] as view:
                    count = os.preadv(self._fd, [view], offset)
                    return self._rest(bytes(view[:count]), size, offset)
            except OSError as error:
                if error.errno not in _REFUSED:
                    raise
                self.close()
                self._direct = False
                self._fd = self._open()
        resident = self._resident(offset, size)
        data = b"" if self._fd < 0 or self._direct else os.pread(self._fd, size, offset)
        data = self._rest(data, size, offset)
        if not resident and hasattr(os, "posix_fadvise"):
            with contextlib.suppress(OSError):
                os.posix_fadvise(self._file.fileno(), offset, size, os.POSIX_FADV_DONTNEED)
        return data

    def _rest(self, data: bytes, size: int, offset: int) -> bytes:
        """What a read returned, and what it left out."""
        if len(data) == size:
            return data
        return data + self._file.read(size - len(data), offset + len(data))

    def close(self) -> None:
        """Close the second descriptor. Idempotent."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)
