"""Signals that come while a program is still being loaded.

Light to import, and imported first. Loading takes a good part of a second, and an exception
that a signal raises in the middle of an import may get lost there.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Mapping
from types import FrameType
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM)


def end_at_once(number: int, frame: FrameType | None) -> None:
    """The good end of a process that has not begun anything yet."""
    os._exit(0)


def fail_at_once(number: int, frame: FrameType | None) -> None:
    """The end of a process that was to do something and has not begun it yet."""
    what = b"ended by SIGTERM" if number == signal.SIGTERM else b"interrupted"
    with contextlib.suppress(OSError):
        os.write(2, b"error: " + what + b"\n")
    os._exit(1)


def fail_from_now_on() -> None:
    """SIGINT and SIGTERM end this process with a line, until its work sees to them; what was
    ignored when it began stays so."""
    for number in SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, fail_at_once)


def end_well_from_now_on() -> None:
    """SIGINT and SIGTERM are the good end of this process, until its work sees to them.

    For processes that end with the program that they were started for: behind its work both
    are ignored.
    """
    for number in SIGNALS:
        signal.signal(number, end_at_once)


def restore(handlers: Mapping[signal.Signals, Any]) -> None:
    """Behind some work: the handlers that were there before it."""
    for number, handler in handlers.items():
        # Work was begun: no end at once any more, and what there is to say is the exit code.
        signal.signal(number, signal.SIG_IGN if handler is end_at_once else handler)
