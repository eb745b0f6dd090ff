"""Bytes of the file that are not in memory: found out, and read where nobody waits for it.

Owns the threads that wait for the disk, so that the loop does not: a client that reads what
nobody has read for long costs the others nothing. Knows offsets, not entries.
"""

from __future__ import annotations

import contextlib
import os
import resource
from collections.abc import Callable
from typing import TypeVar

import trio

# One byte of so many is looked at: less than what the system reads at once by itself.
_PROBE_STEP = 64 * 1024
# Told to the disk beyond what is waited for, so that the next span is there in time.
_AHEAD = 2 << 20
_PIECE = 256 * 1024
# So many wait for the disk at a time, for all clients of a server.
_THREADS = 8
# What was in memory is taken to be there for so long.
_WARM_SECONDS = 1.0
# After so many look-ups in a row that waited for nothing an index is taken to be in memory.
_QUICK_LOOKUPS = 16
# Of this thread alone, where the system counts so (Linux).
_THREAD: int | None = getattr(resource, "RUSAGE_THREAD", None)
# Not everywhere (macOS), and not by every file system.
_NOWAIT: int | None = getattr(os, "RWF_NOWAIT", None)

T = TypeVar("T")
A = TypeVar("A")


class ColdReads:
    """Reading of one file by descriptor `fd`, which stays its owner's."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._limiter = trio.CapacityLimiter(_THREADS)
        self._byte = [bytearray(1)]
        self.warm: set[int] = set()
        """Offsets of regions that were in memory when `is_warm` looked, not long ago."""
        self._warm_until = 0.0
        self._quick_lookups = 0

    def resident(self, start: int, count: int) -> bool:
        """Whether `count` bytes from `start` can be read without waiting for the disk, as far
        as a look at some of them tells; True where nothing is known."""
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
        """As `resident`; what was found to be so stands in `warm`."""
        if start in self.warm:
            return True
        if not self.resident(start, count):
            return False
        self.warm.add(start)
        return True

    def look_again(self, now: float) -> None:
        """Call this often, with the loop's time: what was in memory may have left it."""
        if now > self._warm_until:
            self._warm_until = now + _WARM_SECONDS
            self.warm.clear()

    async def read(self, start: int, count: int) -> None:
        """Have `count` bytes from `start` read, in a thread; those after them on their way.

        Cancelled, it returns when the thread is done: the descriptor may be closed then.
        """
        await trio.to_thread.run_sync(self._read, start, count, limiter=self._limiter)

    async def run(self, call: Callable[[A], T], what: A) -> T:
        """`call(what)` in one of these threads: it reads from the file."""
        return await trio.to_thread.run_sync(call, what, limiter=self._limiter)

    @property
    def index_at_hand(self) -> bool:
        """Whether look-ups in the index wait for nothing, as far as the last ones tell."""
        return _THREAD is None or self._quick_lookups >= _QUICK_LOOKUPS

    def look_up(self, call: Callable[[A], T], what: A) -> T:
        """`call(what)`, which looks into a memory map: whether it had to wait for the disk
        counts for `index_at_hand`."""
        before = _waits()
        try:
            return call(what)
        finally:
            # From several threads at a time; a count that is lost delays a little.
            self._quick_lookups = self._quick_lookups + 1 if _waits() == before else 0

    def _read(self, start: int, count: int) -> None:
        # Errors of the disk are met, and told, by who sends these bytes.
        with contextlib.suppress(OSError):
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(self._fd, start, count + _AHEAD, os.POSIX_FADV_WILLNEED)
            for offset in range(start, start + count, _PIECE):
                os.pread(self._fd, min(_PIECE, start + count - offset), offset)


def _waits() -> int:
    """How often this thread has waited for the disk at a look into a memory map."""
    return 0 if _THREAD is None else resource.getrusage(_THREAD).ru_majflt
