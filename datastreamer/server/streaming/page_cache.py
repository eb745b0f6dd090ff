"""Whether bytes of the file are in the page cache, and reads of those that are not.

Owns the threads that wait for the disk instead of the event loop: a client that reads cold pages
does not delay the others. Knows offsets, not entries.
"""

from __future__ import annotations

import contextlib
import os
import resource
from collections.abc import Callable
from typing import TypeVar

import trio

from datastreamer.format import PAGE_SIZE, page_of, page_start

# One byte in this many is probed: less than the kernel's read-ahead.
_PROBE_STEP = 64 * 1024
# Read ahead beyond the requested bytes, so that the next span is resident in time.
_AHEAD = 2 << 20
_PIECE = 256 * 1024
# Concurrent disk reads for all clients of a server.
_THREADS = 8
# Pages found resident are taken to be resident for this long.
_WARM_SECONDS = 1.0
# After this many consecutive look-ups without a page fault the index is taken to be resident.
_QUICK_LOOKUPS = 16
# Page faults of this thread alone; Linux only.
_THREAD: int | None = getattr(resource, "RUSAGE_THREAD", None)
# Not on macOS, and not on every file system.
_NOWAIT: int | None = getattr(os, "RWF_NOWAIT", None)

T = TypeVar("T")
A = TypeVar("A")


class ColdReads:
    """Reads one file through descriptor `fd`, which it does not close."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._limiter = trio.CapacityLimiter(_THREADS)
        self._byte = [bytearray(1)]
        self.warm: set[int] = set()
        """Offsets of regions that were resident when `is_warm` last probed them."""
        self._warm_until = 0.0
        self._quick_lookups = 0

    def resident(self, start: int, count: int) -> bool:
        """Whether `count` bytes from `start` can be read without waiting for the disk, judged by
        samples; True if the system cannot say."""
        if _NOWAIT is None or count <= 0:
            return True
        last = start + count - 1
        try:
            for offset in range(start, last, _PROBE_STEP):
                os.preadv(self._fd, self._byte, offset, _NOWAIT)
            os.preadv(self._fd, self._byte, last, _NOWAIT)
        except BlockingIOError:
            return False
        except OSError:
            return True
        return True

    def is_warm(self, start: int, count: int) -> bool:
        """As `resident`; remembers a positive answer in `warm`."""
        if start in self.warm:
            return True
        if not self.resident(start, count):
            return False
        self.warm.add(start)
        return True

    def is_warm_range(self, start: int, count: int, length: int) -> bool:
        """As `is_warm`, for the pages with `count` bytes from `start`, in a file of `length`
        bytes."""
        last = min(start + count, length) - 1
        pages = [page_start(page) for page in range(page_of(start), page_of(last) + 1)]
        return all(self.is_warm(page, min(PAGE_SIZE, length - page)) for page in pages)

    def look_again(self, now: float) -> None:
        """Forget `warm` once a second: pages may have been evicted. `now` is the loop's time."""
        if now > self._warm_until:
            self._warm_until = now + _WARM_SECONDS
            self.warm.clear()

    async def read(self, start: int, count: int) -> None:
        """Read `count` bytes from `start` in a thread, and begin to read those after them.

        If cancelled, it returns when the thread is done; the descriptor may be closed then.
        """
        await trio.to_thread.run_sync(self._read, start, count, limiter=self._limiter)

    async def run(self, call: Callable[[A], T], what: A) -> T:
        """`call(what)`, which reads from the file, in one of these threads."""
        return await trio.to_thread.run_sync(call, what, limiter=self._limiter)

    @property
    def index_at_hand(self) -> bool:
        """Whether the last look-ups in the index needed no disk read."""
        return _THREAD is None or self._quick_lookups >= _QUICK_LOOKUPS

    def look_up(self, call: Callable[[A], T], what: A) -> T:
        """`call(what)`, which reads a memory map; records for `index_at_hand` whether it waited for
        the disk."""
        before = _waits()
        try:
            return call(what)
        finally:
            # Several threads may write this; a lost count only delays the fast path.
            self._quick_lookups = self._quick_lookups + 1 if _waits() == before else 0

    def _read(self, start: int, count: int) -> None:
        # The sender of these bytes meets disk errors itself and reports them.
        with contextlib.suppress(OSError):
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(self._fd, start, count + _AHEAD, os.POSIX_FADV_WILLNEED)
            for offset in range(start, start + count, _PIECE):
                os.pread(self._fd, min(_PIECE, start + count - offset), offset)


def _waits() -> int:
    """Major page faults of this thread."""
    return 0 if _THREAD is None else resource.getrusage(_THREAD).ru_majflt
