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

from datastreamer.errors import BadPosition, UsageError
from datastreamer.format import U64_MAX, Header
from datastreamer.selection.clauses import Clause, Selection, Where, selected

HASH_SIZE: Final = 8
"""Bytes of an entry's hash."""

KEPT: Final = 256
"""Number of the last entries that are remembered."""

SPAN: Final = 1 << 20
"""For a selection: the number of the last entries of all among which its entries are."""


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
    """Says that a trail has only selected entries: among those from `first_entry` on, exactly
    these `numbers`, which rise. The clauses are in normal form."""

    where: Selection
    first_entry: int
    numbers: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Position:
    """Where to continue: all entries before `next_entry` have been processed.

    `trail` holds the hashes of the last of them, 8 bytes each, oldest first, at most 256 and fewer
    if fewer are known. `stream` is None if unknown. `chosen` describes a trail of selected
    entries.
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
        try:
            named = bool(chosen.where) and selected(where=chosen.where) == chosen.where
        except UsageError:
            named = False
        if chosen.first_entry < 0 or len(chosen.numbers) != count or not rise or not named:
            raise BadPosition(
                f"invalid trail of {count} entries from entry {chosen.first_entry} up to "
                f"{self.next_entry}, of clauses {list(chosen.where)}: clauses must be in "
                "normal form, numbers must rise, and each entry needs its number"
            )

    def to_json(self) -> str:
        """One line of text, some kB (up to 40 with 64 long clauses), for `from_json`."""
        stored: dict[str, Any] = {"next_entry": self.next_entry}
        if self.stream is not None:
            stored["version"] = self.stream.version
            stored["system_id"] = self.stream.system_id
            stored["stream_type"] = self.stream.stream_type
        where = () if self.chosen is None else self.chosen.where
        typed = all(isinstance(clause, int) for clause in where)
        # Programs that know no clauses take no trail of them for one of all entries.
        stored["trail" if typed else "kept"] = base64.b64encode(self.trail).decode("ascii")
        if self.chosen is not None:
            # Differences of the numbers, which are small.
            first, numbers = self.chosen.first_entry, self.chosen.numbers
            stored["types" if typed else "clauses"] = list(map(_stored_clause, where))
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
            kept = stored.get("kept", stored.get("trail", ""))
            trail = base64.b64decode(kept, validate=True)
            where = tuple(map(_read_clause, stored.get("clauses", stored.get("types", ()))))
            steps = list(stored.get("steps", ()))
            first = stored["first_entry"] if where else 0
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise BadPosition(f"not a position in a stream: {_shown(text)}") from error
        if any(type(part) is not int for part in (number, *parts, first, *steps)):
            raise BadPosition(f"not a position in a stream: {_shown(text)}")
        chosen = None
        if where:
            numbers = tuple(accumulate(steps, initial=first))[1:]
            chosen = Chosen(where, first, numbers)
        return cls(number, trail, Identity(*parts) if parts else None, chosen)


def _stored_clause(clause: Clause) -> int | list[int | str]:
    if isinstance(clause, int):
        return clause
    return [clause.type, clause.offset, clause.prefix.hex()]


def _read_clause(stored: Any) -> Clause:
    """The inverse of `_stored_clause`. Raises `ValueError` and `TypeError`."""
    if type(stored) is int:
        return stored
    kind, offset, prefix = stored
    if type(kind) is not int or type(offset) is not int:
        raise TypeError
    return Where(kind, offset, bytes.fromhex(prefix))


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
