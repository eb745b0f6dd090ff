"""How far a reassembly of several streams has come: what is kept between two runs.

Owns the shape, and what is asked of whoever keeps it. Must not know how or where it is kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

from datastreamer.position import Position
from datastreamer.reassembly.orderer import Block

Name: TypeAlias = tuple[bytes, tuple[bytes, ...]]
"""What is known of a payload that was given out: its id, and its prefixes."""


@dataclass(frozen=True, slots=True)
class SourceProgress:
    """Where one source stands. It is read again from entry `position` on; `seen` is how far it
    had been read, and `read` how far in whole batches, with what tells its history from another.
    """

    position: int
    seen: int
    read: Position


@dataclass(frozen=True, slots=True)
class ReassemblyProgress:
    """Where a reassembly goes on, and what it must not give out again.

    To be kept: `places` by source (those of other sources stay); `known`, the payloads given
    out since the last time, as (id, prefixes), of which the last `known_count` are needed; and
    where payloads are ordered, `chain`: the blocks that are applied now, each with its payload's
    id and prefixes, from the lowest number on at which something has changed since. What is kept
    of the chain at that number and above goes, and what is below `chain_floor`.

    When it is loaded, `known` and `chain` are all that was kept.
    """

    places: dict[str, SourceProgress] = field(default_factory=dict)
    known: Sequence[Name] = ()
    known_count: int = 0
    chain: Sequence[tuple[Block, Name]] = ()
    chain_floor: int = 0


class ReassemblyStore(Protocol):
    """Where a reassembly keeps its progress.

    The Trio version calls both in a thread, one at a time; what they raise ends the iteration.
    """

    def load(self) -> ReassemblyProgress | None:
        """What was saved, all together; None where nothing was yet."""

    def save(self, progress: ReassemblyProgress) -> None:
        """Keep this, beside what `ReassemblyProgress` says stays: all of it, or nothing."""
