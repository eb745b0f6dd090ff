"""The writer's counters: 64-bit values in memory that the serving process shares.

Owns the layout. The writer increments them within a commit, in C; a reader may see a value
late, never torn.
"""

from __future__ import annotations

import mmap
import os
import tempfile
import time
from collections.abc import Sequence
from itertools import accumulate, product
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
ARCHIVE: Final = SYNC_BUCKETS + _BUCKETS
_REQUESTS: Final = ARCHIVE + 16
REQUESTS: Final = tuple(product(("create", "get", "list", "delete"), ("ok", "missing", "failed")))
SLOTS: Final = _REQUESTS + len(REQUESTS)

# What the archiver of the stream writes, as pairs of metric and place from `ARCHIVE` on.
_ARCHIVED: Final = (
    ("entries", 2),
    ("lag_bytes", 3),
    ("generation", 4),
    ("term", 5),
    ("uploaded_bytes_total", 6),
    ("publications_total", 7),
    ("failures_total", 8),
    ("failures_in_a_row", 9),
    ("fenced", 10),
    ("diverged", 11),
    ("evicted_pages", 13),
    ("local_bytes", 14),
    ("retention_bytes", 15),
)


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
            **_archive_samples(slots[ARCHIVE:]),
            "datastreamer_committed_operations_total": [([], commits["buckets"][-1])],
            "datastreamer_committed_entries_total": [([], slots[ENTRIES])],
            "datastreamer_committed_bytes_total": [([], slots[BYTES])],
            "datastreamer_commit_failures_total": [([], slots[FAILURES])],
            "datastreamer_commit_seconds": [([], commits)],
            "datastreamer_sync_seconds": [([], _histogram(slots, SYNC_NS, SYNC_BUCKETS))],
        }

    def put_archive(self, values: Sequence[int]) -> None:
        """Set what the archiver counts: 1, Unix ms since when it lacks entries (0: it lacks none),
        then as the metrics say; for how many ms it may lack them (0: it does not matter), and its
        requests in the order of `REQUESTS`."""
        with memoryview(self.memory) as view, view.cast("Q") as numbers:
            for at, value in enumerate(values, ARCHIVE):
                numbers[at] = value

    def close(self) -> None:
        """Unmap the memory. The writer must have stopped using it."""
        self.memory.close()
        os.close(self.fd)


def _histogram(slots: list[int], total: int, first: int) -> Histogram:
    buckets = list(accumulate(slots[first : first + _BUCKETS]))
    return {"buckets": buckets, "sum": slots[total] / 1e9}


def unready_archive(numbers: WriterNumbers | None) -> str:
    """The reason of its archive why new clients should use another server; empty: there is none."""
    if numbers is None:
        return ""
    with memoryview(numbers.memory) as view, view.cast("Q") as slots:
        since, most = slots[ARCHIVE + 1], slots[ARCHIVE + 12]
    lag = time.time() - since / 1000
    if not (since and most) or 1000 * lag < most:
        return ""
    return f"the archive lags by {lag:.0f} s; at most {most / 1000:g} are allowed"


def _archive_samples(values: list[int]) -> Samples:
    """The samples of the archiver; empty if the stream is not archived."""
    if not values[0]:
        return {}
    lag = max(0.0, time.time() - values[1] / 1000) if values[1] else 0.0
    found: Samples = {"datastreamer_archive_lag_seconds": [([], round(lag, 3))]}
    for name, at in _ARCHIVED:
        found[f"datastreamer_archive_{name}"] = [([], values[at])]
    counts = zip(REQUESTS, values[_REQUESTS - ARCHIVE :], strict=True)
    found["datastreamer_archive_requests_total"] = [([*labels], count) for labels, count in counts]
    return found
