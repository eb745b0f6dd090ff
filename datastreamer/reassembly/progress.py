"""The progress of a reassembly of several streams, which is saved for a later run.

Owns its form, and the interface of a store. Must not know how or where it is stored.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

from datastreamer.position import Position
from datastreamer.reassembly.orderer import Block

Name: TypeAlias = tuple[bytes, tuple[bytes, ...]]
"""A delivered payload: its id and its prefixes."""


@dataclass(frozen=True, slots=True)
class SourceProgress:
    """The progress of one source. It is read again from entry `position` on; `seen` is how far it
    had been read, `read` how far in whole batches, with the hashes that identify its history.
    """

    position: int
    seen: int
    read: Position


@dataclass(frozen=True, slots=True)
class ReassemblyProgress:
    """Where a reassembly continues, and what it must not deliver again.

    To be saved: `places` by source (keep those of other sources); `known`, the payloads delivered
    since the last save, as (id, prefixes), of which the last `known_count` are needed; and with an
    order `chain`, the applied blocks with the id and prefixes of their payloads, from the lowest
    number on that has changed. Replace the saved chain from that number on, and delete it below
    `chain_floor`.

    When it is loaded, `known` and `chain` are all that was saved.
    """

    places: dict[str, SourceProgress] = field(default_factory=dict)
    known: Sequence[Name] = ()
    known_count: int = 0
    chain: Sequence[tuple[Block, Name]] = ()
    chain_floor: int = 0


class ReassemblyStore(Protocol):
    """Stores the progress of a reassembly.

    The Trio driver calls both methods in a thread, one at a time; an exception ends the iteration.
    """

    def load(self) -> ReassemblyProgress | None:
        """Everything that was saved; None before the first save."""

    def save(self, progress: ReassemblyProgress) -> None:
        """Save this atomically, and keep the rest as `ReassemblyProgress` describes."""
