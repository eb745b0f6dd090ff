"""Whether bytes of the file are in the page cache, and reads of those that are not.

Owns the threads that wait for the disk instead of the event loop: a client that reads cold pages
does not delay the others. What is read from the disk is compared with its checksum there, before
any of it is sent. Knows offsets and pages, not entries.
"""

from __future__ import annotations

import contextlib
import os
import resource
from collections.abc import Callable, Iterable
from typing import TypeVar

import trio

from datastreamer.errors import DamagedPage
from datastreamer.format import PAGE_SIZE, page_of, page_start
from datastreamer.server.streaming.page_checks import PageChecks

# One byte in this many is probed.
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

    def __init__(self, fd: int, checks: PageChecks | None = None) -> None:
        """`checks` compares pages (None: no page is compared)."""
        self._fd = fd
        self.checks = checks or PageChecks()
        self.reads = 0
        """How often a thread read the file."""
        self._limiter = trio.CapacityLimiter(_THREADS)
        self._byte = [bytearray(1)]
        self.warm: set[int] = set()
        """Offsets of regions that were resident when `is_warm` last probed them."""
        self._warm_until = 0.0
        self._quick_lookups = 0
        # Of the event loop's thread, after the last slow look-up.
        self._loop_waits: int | None = None

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
        """As `resident`, for bytes from `start` on in its page; remembers a positive answer in
        `warm`. False if the page is to be compared first, as one that is not resident is."""
        if start in self.warm:
            return True
        page, resident = page_of(start), self.resident(start, count)
        if not resident:
            self.checks.doubt([page])
        if not resident or self.checks.doubted(page):
            return False
        self.warm.add(start)
        return True

    def is_warm_range(self, start: int, count: int, length: int) -> bool:
        """As `is_warm`, for the pages with `count` bytes from `start`, in a file of `length`
        bytes."""
        pages = map(page_start, pages_between(start, min(start + count, length)))
        # Each of them is examined, so that all that are not resident are compared.
        warm = [self.is_warm(page, min(PAGE_SIZE, length - page)) for page in pages]
        return all(warm)

    def look_again(self, now: float) -> None:
        """Forget `warm` once a second: pages may have been evicted. `now` is the loop's time."""
        if now > self._warm_until:
            self._warm_until = now + _WARM_SECONDS
            self.warm.clear()

    def doubt(self, pages: Iterable[int]) -> None:
        """These pages may be resident after a read: before their bytes are sent, compare those that
        are not resident now, and those that were never compared."""
        checks, resident = self.checks, self.resident
        self._compare_first(
            [
                page
                for page in pages
                if not (checks.verified(page) and resident(page_start(page), PAGE_SIZE))
            ]
        )

    def _compare_first(self, pages: list[int]) -> None:
        """Compare these pages before their bytes are sent, resident or not."""
        self.checks.doubt(pages)
        self.warm.difference_update(map(page_start, pages))

    def damaged(self, error: DamagedPage) -> bool:
        """A page was found damaged: compare it before its bytes are sent. False if that was known
        already."""
        self._compare_first([error.page])
        return self.checks.found(error)

    async def read(self, start: int, count: int) -> None:
        """Read `count` bytes from `start`, which are not resident or in a doubted page, in a
        thread, compare their page, and begin to read the bytes after them. Raises `DamagedPage`.

        If cancelled, it returns when the thread is done; the descriptor may be closed then.
        """
        number, stop = page_of(start), start + count + _AHEAD
        self._compare_first([number])
        # What is read ahead will be resident, and compared by the client that comes to it.
        self.doubt(range(number + 1, page_of(stop) + 1))
        self.reads += 1

        def read() -> None:
            self._read(start, count)
            self.checks.compare([number])

        await trio.to_thread.run_sync(read, limiter=self._limiter)

    async def run(self, call: Callable[[A], T], what: A) -> T:
        """`call(what)`, which reads from the file, in one of these threads."""
        self.reads += 1
        return await trio.to_thread.run_sync(call, what, limiter=self._limiter)

    async def run_verified(
        self,
        call: Callable[[A], T],
        what: A,
        pages: Callable[[T], Iterable[int]],
    ) -> T:
        """As `run`; then compares `pages(result)`, the pages that the result was read from, except
        those that are verified and `warm`. Raises `DamagedPage`, and what `call` raises."""

        def verified(what: A) -> T:
            found = call(what)
            checks, warm = self.checks, self.warm
            # A page that was verified before may come from the disk again.
            read = [
                page
                for page in pages(found)
                if not (checks.verified(page) and page_start(page) in warm)
            ]
            checks.doubt(read)
            checks.compare(read)
            return found

        return await self.run(verified, what)

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

    def looked_up_slowly(self) -> None:
        """The event loop's thread read a memory map, and may have waited for the disk."""
        before, self._loop_waits = self._loop_waits, _waits()
        if before is not None and before != self._loop_waits:
            self._quick_lookups = 0

    def _read(self, start: int, count: int) -> None:
        # The sender of these bytes meets disk errors itself and reports them.
        with contextlib.suppress(OSError):
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(self._fd, start, count + _AHEAD, os.POSIX_FADV_WILLNEED)
            for offset in range(start, start + count, _PIECE):
                os.pread(self._fd, min(_PIECE, start + count - offset), offset)


def pages_between(start: int, stop: int) -> range:
    """The pages that bytes from file offset `start` to `stop` are in; at least that of `start`."""
    return range(page_of(start), page_of(max(stop - 1, start)) + 1)


def _waits() -> int:
    """Major page faults of this thread."""
    return 0 if _THREAD is None else resource.getrusage(_THREAD).ru_majflt
