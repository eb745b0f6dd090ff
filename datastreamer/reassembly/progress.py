"""The progress of a reassembly of several streams, which is saved for a later run.

Owns its form, and the interface of a store. Must not know how or where it is stored.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

from datastreamer.errors import UsageError
from datastreamer.position import Position
from datastreamer.reassembly.orderer import Block
from datastreamer.reassembly.portions import NESTED

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
    `chain_floor`. `subscribed` are the prefixes that were subscribed to, in the form of
    `subscription`, and replace the saved ones.

    When it is loaded, `known` and `chain` are all that was saved; without a saved subscription,
    as from an earlier version's store, `subscribed` is None and any may follow.
    """

    places: dict[str, SourceProgress] = field(default_factory=dict)
    known: Sequence[Name] = ()
    known_count: int = 0
    chain: Sequence[tuple[Block, Name]] = ()
    chain_floor: int = 0
    subscribed: tuple[bytes, ...] | None = None

    def check(self, subscribed: tuple[bytes, ...]) -> None:
        """Raise `UsageError` for a subscription to more than was subscribed to: its parts before
        the saved positions would be missing."""
        before = subscribed if self.subscribed is None else self.subscribed
        more = [prefix for prefix in subscribed if not prefix.startswith(before)]
        if more:
            raise UsageError(
                f"the store has the progress of a subscription to {shown(before)}, and parts of "
                f"{shown(more)} before its positions would be missing: subscribe to no more than "
                "that, or begin with a new store"
            )


def subscription(subscribe: Iterable[bytes] | None) -> tuple[bytes, ...]:
    """The prefixes of a subscription, sorted and without those that another one includes; b"" is
    everything."""
    found: list[bytes] = []
    for prefix in sorted([b""] if subscribe is None else subscribe):
        if not prefix.startswith(tuple(found)):
            found.append(prefix)
    return tuple(found)


def shown(prefixes: Iterable[bytes]) -> str:
    """Prefixes for a message, without nested headers, which every subscription has."""
    names = [f"0x{prefix.hex()}" if prefix else "everything" for prefix in prefixes]
    return ", ".join(name for name in names if name != f"0x{NESTED.hex()}") or "nothing"


class ReassemblyStore(Protocol):
    """Stores the progress of a reassembly.

    The Trio driver calls both methods in a thread, one at a time; an exception ends the iteration.
    """

    def load(self) -> ReassemblyProgress | None:
        """Everything that was saved; None before the first save."""

    def save(self, progress: ReassemblyProgress) -> None:
        """Save this atomically, and keep the rest as `ReassemblyProgress` describes."""
