"""The ticks of a server: its periodic checks happen at the same moments.

Owns these moments. An idle server wakes for events and for its ticks alone.
"""

from __future__ import annotations

from typing import Final

import trio

TICK_SECONDS: Final = 0.5
"""Interval of the ticks."""


def next_tick(seconds: float = TICK_SECONDS) -> float:
    """The loop's time in `seconds`, or up to a tick earlier so that it is one."""
    now = trio.current_time()
    tick = (now + seconds) // TICK_SECONDS * TICK_SECONDS
    return tick if tick > now else now + seconds


async def until_tick(seconds: float = TICK_SECONDS) -> None:
    """Sleep until `next_tick`."""
    await trio.sleep_until(next_tick(seconds))
