"""Reads of what is not in the page cache.

Owns the threads that wait for the disk instead of the event loop: a client that reads cold pages
does not delay the others. What is read from the disk is compared with its checksum there, before
any of it is sent. `storage/pages/page_states.py` knows which pages those are. Knows offsets and
pages, not entries.
"""

from __future__ import annotations

import contextlib
import os
import resource
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import trio

from datastreamer.errors import DamagedPage, EvictedEntry
from datastreamer.format import page_of, page_start
from datastreamer.storage.disk.file_ops import File
from datastreamer.storage.objects.waits import NotAtHand, at_hand_only
from datastreamer.storage.pages.page_states import PageRegister
from datastreamer.storage.read.evicted import PagedFile

# Read ahead beyond the requested bytes, so that the next span is resident in time.
_AHEAD = 2 << 20
_PIECE = 256 * 1024
# Concurrent disk reads for all clients of a server.
_THREADS = 8
# After this many consecutive look-ups without a page fault the index is taken to be resident.
_QUICK_LOOKUPS = 16
# Page faults of this thread alone; Linux only.
_THREAD: int | None = getattr(resource, "RUSAGE_THREAD", None)

T = TypeVar("T")
A = TypeVar("A")


class ColdReads:
    """Reads one open file, which it does not close."""

    def __init__(self, file: File, pages: PageRegister) -> None:
        self._file = file
        self._fd = file.fileno()
        self._pages = pages
        self.reads = 0
        """How often a thread read the file."""
        self._limiter = trio.CapacityLimiter(_THREADS)
        # For pages that are in the archive alone, whose store may not answer for long.
        self._far = trio.CapacityLimiter(_THREADS)
        self._quick_lookups = 0
        # Of the event loop's thread, after the last slow look-up.
        self._loop_waits: int | None = None

    async def read(self, start: int, count: int) -> None:
        """Read `count` bytes from `start`, which are not resident or in a page that is due, in a
        thread, compare their page, and begin to read the bytes after them; of pages that are
        fetched those after it, too, that are at hand. Raises `DamagedPage` for the page of `start`.

        If cancelled, it returns when the thread is done; the descriptor may be closed then.
        """
        number, stop = page_of(start), start + count + _AHEAD
        paged = self._file if isinstance(self._file, PagedFile) else None
        ahead = range(number + 1, page_of(stop) + 1)
        self._pages.suspect([number])
        # What is read ahead will be resident, and compared by the client that comes to it.
        self._pages.before_read(ahead)
        self.reads += 1

        def read() -> None:
            self._read(start, count)
            self._pages.compare([number])
            self._pages.ensure_good_on_disk(number)
            with contextlib.suppress(DamagedPage, EvictedEntry):
                self._pages.compare(page for page in ahead if paged and paged.fetched(page))

        await self._in_thread(read, far=paged is not None and paged.holder(start) is None)

    async def run(
        self, call: Callable[[A], T], what: A, *, limiter: trio.CapacityLimiter | None = None
    ) -> T:
        """`call(what)`, which reads from the file, in one of these threads, or one that `limiter`
        limits. Where that would wait for an archive, it is repeated in another thread."""
        self.reads += 1
        return await self._in_thread(call, what, limiter=limiter)

    async def _in_thread(
        self,
        call: Callable[..., T],
        *what: Any,
        far: bool = False,
        limiter: trio.CapacityLimiter | None = None,
    ) -> T:
        def near() -> T:
            with at_hand_only():
                return call(*what)

        if not far:
            with contextlib.suppress(NotAtHand):
                return await trio.to_thread.run_sync(near, limiter=limiter or self._limiter)
        return await trio.to_thread.run_sync(call, *what, limiter=self._far, abandon_on_cancel=True)

    async def run_verified(
        self, call: Callable[[A], T], what: A, pages: Callable[[T], Iterable[int]]
    ) -> T:
        """As `run`; then compares `pages(result)`, the pages that the result was read from, except
        those that are whole and `ready`. Raises `DamagedPage`, and what `call` raises."""

        def verified(what: A) -> T:
            found = call(what)
            known, ready = self._pages, self._pages.ready
            # A page that was whole may come from the disk again.
            read = [
                page
                for page in pages(found)
                if not (known.is_whole(page) and page_start(page) in ready)
            ]
            known.suspect(read)
            known.compare(read)
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
        if isinstance(self._file, PagedFile) and self._file.fetch(start, count):
            return
        # The sender of these bytes meets disk errors itself and reports them.
        with contextlib.suppress(OSError):
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(self._fd, start, count + _AHEAD, os.POSIX_FADV_WILLNEED)
            for offset in range(start, start + count, _PIECE):
                os.pread(self._fd, min(_PIECE, start + count - offset), offset)


def _waits() -> int:
    """Major page faults of this thread."""
    return 0 if _THREAD is None else resource.getrusage(_THREAD).ru_majflt
