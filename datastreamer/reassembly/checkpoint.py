"""The checkpoint and the statistics of a `Reassembler`.

Owns the form of both; the caller stores checkpoints.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from datastreamer.errors import BadPosition
from datastreamer.format import U64_MAX


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The state for a later run, to be stored together with the payloads.

    `positions` is where each source must be read again, `seen` how far it had been read; `known`
    has the delivered payloads that may arrive again, as (id, prefixes).
    """

    positions: Mapping[str, int]
    seen: Mapping[str, int]
    known: Sequence[tuple[bytes, Sequence[bytes]]]

    def to_json(self) -> str:
        """One line of text for `from_json`."""
        known = [
            [own.hex(), *(prefix.hex() for prefix in prefixes)] for own, prefixes in self.known
        ]
        return json.dumps(
            {"positions": dict(self.positions), "seen": dict(self.seen), "known": known}
        )

    @classmethod
    def from_json(cls, text: str | bytes) -> Checkpoint:
        """The inverse of `to_json`. Raises `BadPosition`."""
        try:
            stored = json.loads(text)
            positions, seen = (dict(stored[name]) for name in ("positions", "seen"))
            numbers = [*positions.values(), *seen.values()]
            known = []
            for found in stored["known"]:
                own, *prefixes = (bytes.fromhex(name) for name in found)
                known.append((own, tuple(prefixes)))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise BadPosition(f"not a checkpoint of a reassembly: {error!r}") from error
        if any(type(number) is not int or not 0 <= number < U64_MAX for number in numbers) or any(
            len(own) != 32 or any(len(prefix) != 33 for prefix in prefixes)
            for own, prefixes in known
        ):
            raise BadPosition("not a checkpoint of a reassembly: it has an invalid number or name")
        return cls(positions, seen, known)


@dataclass(frozen=True, slots=True)
class SourceCounts:
    """Counts of the messages of one source: all of them, and those that had no effect."""

    received: int
    duplicates: int
    conflicts: int
    malformed: int
    outside: int


@dataclass(frozen=True, slots=True)
class Stats:
    """`in_flight` counts payloads with a header, and prefixes without one; `messages` and
    `message_bytes` are theirs. `used` is charged against the budget, and includes what is known of
    delivered payloads. `oldest` is the arrival time of the oldest message in flight."""

    in_flight: int
    messages: int
    message_bytes: int
    used: int
    known: int
    completed: int
    dropped: int
    oldest: float | None
    sources: Mapping[str, SourceCounts]
