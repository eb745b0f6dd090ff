"""Whether bytes of an open file are in the page cache.

Owns how the system is asked. Knows no pages of a stream; the answer is about the moment.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
from typing import Final

# One byte in this many is read.
_STEP: Final = 64 * 1024
# Not on macOS, and not on every file system.
_NOWAIT: int | None = getattr(os, "RWF_NOWAIT", None)
CAN_SAY: Final = _NOWAIT is not None
"""Whether this system can say what is in the page cache."""
# cachestat(2), on all architectures: Linux 6.5 and later.
_CACHESTAT: Final = 451
_BLOCK: Final = os.sysconf("SC_PAGE_SIZE")
_libc = ctypes.CDLL(None) if sys.platform == "linux" else None


class Residency:
    """What is in the page cache of one file, through descriptor `fd`, which it does not close."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._byte = [bytearray(1)]
        # Whether `cachestat` says what is true of this file; None: not known yet.
        self._says: bool | None = None if _libc is not None else False

    def holds(self, start: int, count: int) -> bool:
        """Whether `count` bytes from `start` can be read without waiting for the disk, judged by
        samples; True if the system cannot say."""
        if _NOWAIT is None or count <= 0:
            return True
        # A read of a byte that is not there has the system read it, and succeeds if the disk is
        # faster than this process: so ask first. Bytes that are on their way count as there, and
        # cannot be read.
        if self._misses(start, count):
            return False
        last = start + count - 1
        try:
            for offset in (*range(start, last, _STEP), last):
                os.preadv(self._fd, self._byte, offset, _NOWAIT)
        except BlockingIOError:
            return False
        except OSError:
            return True
        return True

    def _misses(self, start: int, count: int) -> bool:
        """Whether the system says that some of these bytes are not in the page cache. It says
        nothing if it is older, or if the file is another user's and may not be written."""
        if self._says is None:
            # Of a file in a layered file system (overlayfs) it sees no block.
            with contextlib.suppress(OSError):
                os.pread(self._fd, 1, 0)
            self._says = self._cached(0, 1) == 1
        if not self._says:
            return False
        first, stop = start // _BLOCK, -(-(start + count) // _BLOCK)
        cached = self._cached(first, stop - first)
        return cached is not None and cached < stop - first

    def _cached(self, first: int, count: int) -> int | None:
        """The number of these blocks in the page cache."""
        assert _libc is not None
        span = (ctypes.c_uint64 * 2)(first * _BLOCK, count * _BLOCK)
        stat = (ctypes.c_uint64 * 5)()
        failed = _libc.syscall(_CACHESTAT, self._fd, span, stat, 0) != 0
        return None if failed else int(stat[0])
