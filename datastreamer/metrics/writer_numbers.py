"""The writer's counters: 64-bit values in memory that the serving process shares.

Owns the layout. The writer increments them within a commit, in C; a reader may see a value
late, never torn.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from itertools import accumulate
from typing import Final

from datastreamer.metrics.exposition import Histogram, Samples
from datastreamer.metrics.names import TIME_BOUNDS_NS

_BUCKETS: Final = len(TIME_BOUNDS_NS) + 1

# Slots, 8 bytes each, in the machine's byte order.
ENTRIES: Final = 0
BYTES: Final = 1
FAILURES: Final = 2
COMMIT_NS: Final = 3
COMMIT_BUCKETS: Final = 4
SYNC_NS: Final = COMMIT_BUCKETS + _BUCKETS
SYNC_BUCKETS: Final = SYNC_NS + 1
SLOTS: Final = SYNC_BUCKETS + _BUCKETS


def shared_memory(name: str, size: int) -> int:
    """A descriptor of memory of zeros, for this process and those that inherit it."""
    if hasattr(os, "memfd_create"):
        fd = os.memfd_create(name, os.MFD_CLOEXEC)
    else:
        with tempfile.TemporaryFile() as file:
            fd = os.dup(file.fileno())
    try:
        os.ftruncate(fd, size)
    except OSError:
        os.close(fd)
        raise
    return fd


class WriterNumbers:
    """The counters of one writer, in the memory of the descriptor `fd`."""

    def __init__(self, fd: int, *, write: bool) -> None:
        """Owns `fd` from now on: `close` closes it."""
        self.fd = fd
        access = mmap.ACCESS_WRITE if write else mmap.ACCESS_READ
        self.memory = mmap.mmap(fd, SLOTS * 8, access=access)

    @classmethod
    def create(cls) -> WriterNumbers:
        """New counters, all 0, to share with a process that inherits the descriptor."""
        fd = shared_memory("datastreamer-numbers", SLOTS * 8)
        try:
            return cls(fd, write=True)
        except BaseException:
            os.close(fd)
            raise

    def samples(self) -> Samples:
        """The current values."""
        with memoryview(self.memory) as view, view.cast("Q") as numbers:
            slots = numbers.tolist()
        commits = _histogram(slots, COMMIT_NS, COMMIT_BUCKETS)
        return {
            "datastreamer_committed_operations_total": [([], commits["buckets"][-1])],
            "datastreamer_committed_entries_total": [([], slots[ENTRIES])],
            "datastreamer_committed_bytes_total": [([], slots[BYTES])],
            "datastreamer_commit_failures_total": [([], slots[FAILURES])],
            "datastreamer_commit_seconds": [([], commits)],
            "datastreamer_sync_seconds": [([], _histogram(slots, SYNC_NS, SYNC_BUCKETS))],
        }

    def close(self) -> None:
        """Unmap the memory. The writer must have stopped using it."""
        self.memory.close()
        os.close(self.fd)


def _histogram(slots: list[int], total: int, first: int) -> Histogram:
    buckets = list(accumulate(slots[first : first + _BUCKETS]))
    return {"buckets": buckets, "sum": slots[total] / 1e9}
