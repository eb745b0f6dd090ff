"""Signals that come while a program is still being loaded.

Light to import, and imported first. Loading takes a good part of a second, and an exception
that a signal raises in the middle of an import may get lost there.
"""

from __future__ import annotations

import os
import signal
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM)


def end_at_once(number: int, frame: FrameType | None) -> None:
    """The good end of a process that has not begun anything yet."""
    os._exit(0)


def end_well_from_now_on() -> None:
    """SIGINT and SIGTERM are the good end of this process, until its work sees to them.

    For processes that end with the program that they were started for: behind its work both
    are ignored.
    """
    for number in SIGNALS:
        signal.signal(number, end_at_once)
