"""Signals that arrive while a program is still being imported.

Light to import, and imported first: imports take half a second, and an exception that a
signal raises within one may get lost.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Mapping
from types import FrameType
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM)


def exit_zero(number: int, frame: FrameType | None) -> None:
    """Exit with 0: nothing was started yet."""
    os._exit(0)


def exit_failed(number: int, frame: FrameType | None) -> None:
    """Exit with an error line and the signal's exit code: the work was not started."""
    with contextlib.suppress(OSError):
        os.write(2, f"error: {reason(number)}\n".encode())
    os._exit(code(number))


def reason(number: int) -> str:
    """The error of work that a signal ended."""
    return "ended by SIGTERM" if number == signal.SIGTERM else "interrupted"


def code(number: int) -> int:
    """The exit code of work that a signal ended, as shells have it: 130 or 143."""
    return 128 + number


def install(*, expected: bool) -> None:
    """Handle SIGINT and SIGTERM until the command installs handlers of its own.

    `expected`: a signal is the normal end of the command, also if the shell started it with
    SIGINT ignored. Otherwise a signal that was ignored stays ignored.
    """
    for number in SIGNALS:
        if expected:
            signal.signal(number, exit_zero)
        elif signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, exit_failed)


def restore(handlers: Mapping[signal.Signals, Any]) -> None:
    """Put back the handlers from the time before some work."""
    for number, handler in handlers.items():
        # Work was started: the exit code now reports its result.
        signal.signal(number, signal.SIG_IGN if handler is exit_zero else handler)
