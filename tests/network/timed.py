"""A stream whose commits have the times that a test says."""

from __future__ import annotations

from datastreamer.storage.stream import DataStream

SEVEN = 1_795_935_600_000
"""2026-11-29T07:00:00Z."""

# Entries and when they were committed, in seconds after seven.
COMMITS = [(0, 0.0), (3, 1.2), (5, 60.0), (9, 3600.0)]
TOTAL = 12


class Clock:
    """Appends entries at times of its own."""

    def __init__(self, stream: DataStream) -> None:
        self.stream = stream
        stream.parts.relay.leave_times()

    def commit(self, count: int, seconds: float | None = None, *, size: int = 0) -> None:
        """Append entries `seconds` after seven; None: it is not known when."""
        first = self.stream.total_entries
        with self.stream.atomic_op() as op:
            for number in range(first, first + count):
                data = b"entry %d, %r" % (number, seconds)
                op.add_entry(1 + number % 3, data.ljust(size, b"."))
        if seconds is not None:
            marks = [(first, ms(seconds))]
            self.stream.parts.relay.put_time_marks(marks, 1000, first + count)


def timed(stream: DataStream) -> Clock:
    """Write `COMMITS` to an empty stream."""
    clock = Clock(stream)
    ends = [first for first, _ in COMMITS[1:]] + [TOTAL]
    for (first, seconds), end in zip(COMMITS, ends, strict=True):
        clock.commit(end - first, seconds)
    return clock


# A time in seconds after seven, and the entry that it leads to.
PLACES = [
    *((-3600.0, 0), (0.0, 0), (0.5, 0), (1.0, 3), (1.2, 3), (1.5, 3), (2.2, 5), (2.3, 5)),
    *((60.0, 5), (60.9, 5), (61.0, 9), (3600.0, 9), (3600.9, 9), (3601.0, 12), (1e6, 12)),
]


def ms(seconds: float) -> int:
    return SEVEN + round(seconds * 1000)
