"""What a writing process and the one that serves for it say to each other.

Owns the bytes on their control socket. The writing side asks: a letter, the question's
number (u32), and what belongs to it. The serving one answers with ``y`` or ``n`` and that
number, so that an answer that comes too late is not taken for another's, and with the
length (u32) and the bytes of what was asked for, which is nothing in most cases; its first
byte, unasked, says that it serves (``r``).
"""

from __future__ import annotations

import signal
import struct
from typing import Final

OF_PARENT: Final = (signal.SIGINT, signal.SIGTERM)
"""Signals that ask for the end: the writing side's to answer, the serving one ignores them."""

READY: Final = b"r"
YES: Final = b"y"
NO: Final = b"n"

DRAIN: Final = b"d"
"""Wait until every client has been sent all, at most so many ms (u32)."""

QUIT: Final = b"q"
"""End in good order, within so many ms (u32)."""

CHANGE: Final = b"c"
"""Entries from a number (u64) to another (u64, excluded; the highest: all) are about to
change: answered when nobody is sent any of them any more."""

CHANGED: Final = b"e"
"""They have changed."""

RELOAD: Final = b"t"
"""Read certificates and keys again: answered when they are in use."""

STATS: Final = b"s"
"""Tell what was done so far: answered with a JSON object."""

METRICS: Final = b"m"
"""Send the metrics, with at most N (u32) clients: answered with a `MetricsSnapshot` as JSON."""

NUMBER: Final = struct.Struct(">I")
ANSWER: Final = struct.Struct(">cII")
"""``y`` or ``n``, the question's number, the length of what follows."""
MILLISECONDS: Final = struct.Struct(">I")
RANGE: Final = struct.Struct(">QQ")
SIZES: Final = {
    DRAIN: MILLISECONDS.size,
    QUIT: MILLISECONDS.size,
    CHANGE: RANGE.size,
    CHANGED: RANGE.size,
    RELOAD: 0,
    STATS: 0,
    METRICS: NUMBER.size,
}
"""The bytes that follow the letter and the number."""
