"""A position in a stream that can be found again, and distinguished from one in another stream.

Owns what a reader keeps between runs: the number of the next entry, the hashes of the last entries
before it, and the stream's identity. Must not know how it is stored or how entries are hashed.
"""

from __future__ import annotations

import base64
import json
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, Final, Protocol

from datastreamer.errors import BadPosition
from datastreamer.format import U32_MAX, U64_MAX, Header

HASH_SIZE: Final = 8
"""Bytes of an entry's hash."""

KEPT: Final = 256
"""Number of the last entries that are remembered."""

SPAN: Final = 1 << 20
"""For entries of some types: the number of last entries of all types among which they are."""


@dataclass(frozen=True, slots=True)
class Identity:
    """The fields of a header that identify the stream; the others change with each commit."""

    version: int
    system_id: int
    stream_type: int

    @classmethod
    def of(cls, header: Header) -> Identity:
        """The identity of the stream with this header."""
        return cls(header.version, header.system_id, header.stream_type)

    def __str__(self) -> str:
        return f"version {self.version}, system id {self.system_id}, type {self.stream_type}"


@dataclass(frozen=True, slots=True)
class Chosen:
    """Says that a trail has only entries of some types: among those from `first_entry` on, exactly
    these `numbers`. Types and numbers rise."""

    types: tuple[int, ...]
    first_entry: int
    numbers: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Position:
    """Where to continue: all entries before `next_entry` have been processed.

    `trail` holds the hashes of the last of them, 8 bytes each, oldest first, at most 256 and fewer
    if fewer are known. `stream` is None if unknown. `chosen` describes a trail of entries of some
    types.
    """

    next_entry: int
    trail: bytes = b""
    stream: Identity | None = None
    chosen: Chosen | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.next_entry <= U64_MAX:
            raise BadPosition(f"entry numbers must be 0 to 2**64 - 1, not {self.next_entry}")
        count, odd = divmod(len(self.trail), HASH_SIZE)
        if odd or count > min(KEPT, self.next_entry):
            raise BadPosition(
                f"invalid trail of {len(self.trail)} bytes before entry {self.next_entry}: it must "
                f"have {HASH_SIZE} bytes for each of at most {KEPT} entries"
            )
        if self.chosen is not None:
            self._check(self.chosen, count)

    @property
    def last_number(self) -> int:
        """The entry of the last hash of the trail."""
        return self.next_entry - 1 if self.chosen is None else self.chosen.numbers[-1]

    def _check(self, chosen: Chosen, count: int) -> None:
        places = (chosen.first_entry - 1, *chosen.numbers, self.next_entry)
        rise = all(a < b for a, b in pairwise(places))
        types = (-1, *chosen.types, U32_MAX + 1)
        named = len(types) > 2 and all(a < b for a, b in pairwise(types))
        if chosen.first_entry < 0 or len(chosen.numbers) != count or not rise or not named:
            raise BadPosition(
                f"invalid trail of {count} entries from entry {chosen.first_entry} up to "
                f"{self.next_entry}, of types {list(chosen.types)}: types and numbers must rise, "
                "and each entry needs its number"
            )

    def to_json(self) -> str:
        """One line of text, at most some kB, for `from_json`."""
        stored: dict[str, Any] = {"next_entry": self.next_entry}
        if self.stream is not None:
            stored["version"] = self.stream.version
            stored["system_id"] = self.stream.system_id
            stored["stream_type"] = self.stream.stream_type
        stored["trail"] = base64.b64encode(self.trail).decode("ascii")
        if self.chosen is not None:
            # Differences of the numbers, which are small.
            first, numbers = self.chosen.first_entry, self.chosen.numbers
            stored["types"] = list(self.chosen.types)
            stored["first_entry"] = first
            stored["steps"] = [b - a for a, b in pairwise((first, *numbers))]
        return json.dumps(stored)

    @classmethod
    def from_json(cls, text: str | bytes) -> Position:
        """The inverse of `to_json`. Raises `BadPosition`."""
        try:
            stored = json.loads(text)
            names = ("version", "system_id", "stream_type")
            parts = [stored[name] for name in names] if "version" in stored else []
            number = stored["next_entry"]
            trail = base64.b64decode(stored.get("trail", ""), validate=True)
            types, steps = list(stored.get("types", ())), list(stored.get("steps", ()))
            first = stored["first_entry"] if types else 0
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise BadPosition(f"not a position in a stream: {_shown(text)}") from error
        if any(type(part) is not int for part in (number, *parts, first, *types, *steps)):
            raise BadPosition(f"not a position in a stream: {_shown(text)}")
        chosen = None
        if types:
            numbers = tuple(accumulate(steps, initial=first))[1:]
            chosen = Chosen(tuple(types), first, numbers)
        return cls(number, trail, Identity(*parts) if parts else None, chosen)


class CursorStore(Protocol):
    """Stores a client's position between runs.

    The Trio client calls both methods in a thread, one at a time; an exception ends the iteration.
    """

    def load(self) -> Position | None:
        """The last position saved; None before the first save."""

    def save(self, position: Position) -> None:
        """Replace the saved position, atomically."""


def _shown(text: str | bytes) -> str:
    shown = repr(text)
    return shown if len(shown) <= 60 else f"{shown[:57]}..."
