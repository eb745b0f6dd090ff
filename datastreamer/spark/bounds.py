"""Which entries a query is about: by number and type, by block and batch.

Owns what filters and offsets mean for a stream. Knows no file and no server.
"""

from __future__ import annotations

from dataclasses import dataclass

from datastreamer.format import U64_MAX


@dataclass(frozen=True, slots=True)
class Bounds:
    """The entries from `start` up to, not including, `stop`."""

    start: int = 0
    stop: int = U64_MAX
