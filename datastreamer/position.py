"""A place in a stream that can be found again, and told from the same place in another.

Owns what a reader keeps between two runs: the number of the next entry, the hashes of
the last entries before it, and which stream it was. Must not know how or where it is
kept, nor how entries are hashed.
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
"""How many of the last entries are remembered."""

SPAN: Final = 1 << 20
"""Of entries of some types, those among so many of the last ones."""


@dataclass(frozen=True, slots=True)
class Identity:
    """What a header says about whose stream it is; the rest of it changes with each commit."""

    version: int
    system_id: int
    stream_type: int

    @classmethod
    def of(cls, header: Header) -> Identity:
        """The identity of the stream that has this header."""
        return cls(header.version, header.system_id, header.stream_type)

    def __str__(self) -> str:
        return f"version {self.version}, system id {self.system_id}, type {self.stream_type}"


@dataclass(frozen=True, slots=True)
class Chosen:
    """That a trail is of entries of some types alone: of those from `first_entry` on, these
    `numbers`, and no others. Types and numbers rise."""

    types: tuple[int, ...]
    first_entry: int
    numbers: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Position:
    """Where to go on: all entries before `next_entry` are done with.

    `trail` holds the hashes of the last of them, 8 bytes each, oldest first, up to 256;
    fewer or none where fewer are known. `stream` is None where it is not known. `chosen` says
    whose hashes they are where that is not each of the last entries'.
    """

    next_entry: int
    trail: bytes = b""
    stream: Identity | None = None
    chosen: Chosen | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.next_entry <= U64_MAX:
            raise BadPosition(f"entry numbers run from 0 to 2**64 - 1, not {self.next_entry}")
        count, odd = divmod(len(self.trail), HASH_SIZE)
        if odd or count > min(KEPT, self.next_entry):
            raise BadPosition(
                f"a trail of {len(self.trail)} bytes before entry {self.next_entry} is none: it "
                f"has {HASH_SIZE} bytes for each of the last entries, at most {KEPT} of them"
            )
        if self.chosen is not None:
            self._check(self.chosen, count)

    def _check(self, chosen: Chosen, count: int) -> None:
        places = (chosen.first_entry - 1, *chosen.numbers, self.next_entry)
        rise = all(a < b for a, b in pairwise(places))
        types = (-1, *chosen.types, U32_MAX + 1)
        named = len(types) > 2 and all(a < b for a, b in pairwise(types))
        if chosen.first_entry < 0 or len(chosen.numbers) != count or not rise or not named:
            raise BadPosition(
                f"a trail of {count} entries from entry {chosen.first_entry} to before "
                f"{self.next_entry}, of types {list(chosen.types)}, is none: types and numbers "
                f"rise, and each entry has its number"
            )

    def to_json(self) -> str:
        """One line of text, some kB at most, from which `from_json` makes the same again."""
        told: dict[str, Any] = {"next_entry": self.next_entry}
        if self.stream is not None:
            told["version"] = self.stream.version
            told["system_id"] = self.stream.system_id
            told["stream_type"] = self.stream.stream_type
        told["trail"] = base64.b64encode(self.trail).decode("ascii")
        if self.chosen is not None:
            # Small numbers: how far it is from one to the next.
            first, numbers = self.chosen.first_entry, self.chosen.numbers
            told["types"] = list(self.chosen.types)
            told["first_entry"] = first
            told["steps"] = [b - a for a, b in pairwise((first, *numbers))]
        return json.dumps(told)

    @classmethod
    def from_json(cls, text: str | bytes) -> Position:
        """What `to_json` wrote. Raises `BadPosition`."""
        try:
            told = json.loads(text)
            names = ("version", "system_id", "stream_type")
            parts = [told[name] for name in names] if "version" in told else []
            number = told["next_entry"]
            trail = base64.b64decode(told.get("trail", ""), validate=True)
            types, steps = list(told.get("types", ())), list(told.get("steps", ()))
            first = told["first_entry"] if types else 0
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise BadPosition(f"no position in a stream: {_shown(text)}") from error
        if any(type(part) is not int for part in (number, *parts, first, *types, *steps)):
            raise BadPosition(f"no position in a stream: {_shown(text)}")
        chosen = None
        if types:
            numbers = tuple(accumulate(steps, initial=first))[1:]
            chosen = Chosen(tuple(types), first, numbers)
        return cls(number, trail, Identity(*parts) if parts else None, chosen)


class CursorStore(Protocol):
    """Where a client keeps its position between two runs.

    The Trio client calls both in a thread, one at a time; what they raise ends the
    iteration.
    """

    def load(self) -> Position | None:
        """What was saved last; None where nothing was yet."""

    def save(self, position: Position) -> None:
        """Keep this instead of what was saved before: all of it, or nothing."""


def _shown(text: str | bytes) -> str:
    shown = repr(text)
    return shown if len(shown) <= 60 else f"{shown[:57]}..."
