"""The values of a measurement: an amount of work and its duration, and latencies."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Done(NamedTuple):
    """What a measured callable may return if the duration of the call is not that of the work:
    the amount of work and its duration. None: the amount that `versus` got, the call's duration."""

    amount: float | None = None
    seconds: float | None = None


class Latencies(NamedTuple):
    """Of `count` waits, in milliseconds."""

    p50: float
    p99: float
    longest: float
    count: int

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Latencies:
        ordered = sorted(seconds)
        last = len(ordered) - 1
        places = (last // 2, last * 99 // 100, last)
        return cls(*(ordered[place] * 1e3 for place in places), len(ordered))
