"""What a `Reassembler` says of itself: where to go on, and how it is doing.

Owns the shape of both; how a checkpoint is kept is the caller's business.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from datastreamer.errors import BadPosition
from datastreamer.format import U64_MAX


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Where a reassembly goes on, for whoever keeps it together with the payloads.

    `positions` is where each source is read from again, `seen` how far each had been read,
    `known` the payloads that were given out and may come again, as (id, prefixes).
    """

    positions: Mapping[str, int]
    seen: Mapping[str, int]
    known: Sequence[tuple[bytes, Sequence[bytes]]]

    def to_json(self) -> str:
        """One line of text, from which `from_json` makes the same again."""
        known = [
            [own.hex(), *(prefix.hex() for prefix in prefixes)] for own, prefixes in self.known
        ]
        return json.dumps(
            {"positions": dict(self.positions), "seen": dict(self.seen), "known": known}
        )

    @classmethod
    def from_json(cls, text: str | bytes) -> Checkpoint:
        """What `to_json` wrote. Raises `BadPosition`."""
        try:
            told = json.loads(text)
            positions, seen = (dict(told[name]) for name in ("positions", "seen"))
            numbers = [*positions.values(), *seen.values()]
            known = []
            for found in told["known"]:
                own, *prefixes = (bytes.fromhex(name) for name in found)
                known.append((own, tuple(prefixes)))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise BadPosition(f"no checkpoint of a reassembly: {error!r}") from error
        if any(type(number) is not int or not 0 <= number < U64_MAX for number in numbers) or any(
            len(own) != 32 or any(len(prefix) != 33 for prefix in prefixes)
            for own, prefixes in known
        ):
            raise BadPosition("no checkpoint of a reassembly: a number or a name in it is none")
        return cls(positions, seen, known)


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
