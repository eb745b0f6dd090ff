"""What measurements are made of: how much was done in which time, and latencies."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Done(NamedTuple):
    """What a measured callable may return: how much it did, in which time, where the
    clock around the call would tell something else. None: as `versus` was told."""

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
