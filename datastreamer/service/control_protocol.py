"""The protocol between a writing process and its serving processes.

Owns the bytes on their control socket. The writing process sends requests: a letter, the request's
number (u32), and its arguments. The serving process answers with ``y`` or ``n``, that number, so
that a late answer is not taken for another one, and the length (u32) and bytes of the result, empty
for most requests. Its first byte, without a request, reports that it serves (``r``).
"""

from __future__ import annotations

import signal
import struct
from typing import Final

OF_PARENT: Final = (signal.SIGINT, signal.SIGTERM)
"""Signals that end the program: the writing process handles them, serving processes ignore them."""

READY: Final = b"r"
YES: Final = b"y"
NO: Final = b"n"

DRAIN: Final = b"d"
"""Wait until every client was sent all entries, for at most this many ms (u32)."""

QUIT: Final = b"q"
"""Shut down in order, within this many ms (u32)."""

CHANGE: Final = b"c"
"""Entries from a number (u64) to another (u64, excluded; the highest: all) are about to change. The
file offset of the first one follows (u64; 0: unknown). The serving process answers once it sends
none of them any more."""

CHANGED: Final = b"e"
"""They have changed."""

RELOAD: Final = b"t"
"""Read TLS certificates and keys again: answered when they are in use."""

METRICS: Final = b"m"
"""Send the metrics, with at most N (u32) clients: answered with a `MetricsSnapshot` as JSON."""

NUMBER: Final = struct.Struct(">I")
ANSWER: Final = struct.Struct(">cII")
"""``y`` or ``n``, the request's number, the length of the result."""
RANGE: Final = struct.Struct(">QQQ")
SIZES: Final = {
    DRAIN: NUMBER.size,
    QUIT: NUMBER.size,
    CHANGE: RANGE.size,
    CHANGED: RANGE.size,
    RELOAD: 0,
    METRICS: NUMBER.size,
}
"""The size of a request's arguments, by its letter."""
