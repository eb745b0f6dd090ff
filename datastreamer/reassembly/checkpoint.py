"""What a `Reassembler` says of itself: where to go on, and how it is doing.

Owns the shape of both; how a checkpoint is kept is the caller's business.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Where a reassembly goes on, for whoever keeps it together with the payloads.

    `positions` is where each source is read from again, `seen` how far each had been read,
    `known` the payloads that were given out and may come again, as (id, prefixes).
    """

    positions: Mapping[str, int]
    seen: Mapping[str, int]
    known: Sequence[tuple[bytes, Sequence[bytes]]]


@dataclass(frozen=True, slots=True)
class SourceCounts:
    """What came from one source: messages in all, and those that nothing came of."""

    received: int
    duplicates: int
    conflicts: int
    malformed: int
    outside: int


@dataclass(frozen=True, slots=True)
class Stats:
    """`in_flight` counts payloads with a header and prefixes without; `messages` and
    `message_bytes` are what they have; `used` is what is charged against the budget,
    with what is known of payloads given out; `oldest` is when the first message of the
    oldest came."""

    in_flight: int
    messages: int
    message_bytes: int
    used: int
    known: int
    completed: int
    dropped: int
    oldest: float | None
    sources: Mapping[str, SourceCounts]
