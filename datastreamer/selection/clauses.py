"""Which entries a reader wants: by their type, and by bytes at a fixed place in their data.

Owns the normal form of a selection, and its limits. `_selection.pxd` compares entries with it.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from typing import Final, NamedTuple, TypeAlias

from datastreamer.errors import BadEntryType, UsageError
from datastreamer.format import MAX_CLAUSES, U32_MAX

MOST_OFFSET: Final = 0xFFFF
MOST_PREFIX: Final = 0xFF
_PREFIX: Final = re.compile(r"(?:([0-9]{1,5}):)?0[xX]((?:[0-9a-fA-F]{2}){1,255})")


class Where(NamedTuple):
    """Entries of a type whose data holds `prefix` (0 to 255 bytes) at `offset` (bytes from the
    begin of the data, 0 to 65,535); without a prefix, all entries of the type."""

    type: int
    offset: int = 0
    prefix: bytes = b""

    def __str__(self) -> str:
        if not self.prefix:
            return str(self.type)
        return f"{self.type} with 0x{self.prefix.hex()} at byte {self.offset}"


Clause: TypeAlias = "int | Where"
"""A type selects all of its entries. A `Where` in a selection has a prefix."""
Selection: TypeAlias = tuple[Clause, ...]
"""Clauses in normal form, as `selected` gives them: an entry is wanted if one of them matches."""


def selected(
    types: Collection[int] | None = None, where: Iterable[Where | int] | None = None
) -> Selection | None:
    """The normal form of a selection: no clause is covered by another one, and they are in order.

    None if neither is given. Raises `UsageError` if both are, if one is empty, and as `checked`.
    """
    if types is not None and where is not None:
        raise UsageError("types=[2] is short for where=[Where(2)]: name one of them")
    if types is None and where is None:
        return None
    if isinstance(where, Where):
        raise UsageError(f"where is a list, such as [{where!r:.80}]")
    clauses: list[Clause] = [checked_type(each) for each in types or ()]
    clauses += [checked(clause) for clause in where or ()]
    if not clauses:
        raise UsageError("an empty list selects nothing; leave it out for all entries")
    return normal(clauses)


def checked_type(type: object) -> int:
    """Raises `BadEntryType` unless it is the type of an entry."""
    if not isinstance(type, int) or not 0 <= type <= U32_MAX:
        raise BadEntryType(f"an entry type must be 0 to 2**32 - 1, not {type!r}")
    return type


def checked(clause: object) -> Clause:
    """Raises `UsageError` and `BadEntryType` unless it is a clause with values in range."""
    if isinstance(clause, int):
        return checked_type(clause)
    if not isinstance(clause, tuple) or len(clause) != 3:
        raise UsageError(f"where is a list such as [Where(16, 2, b'x')], without {clause!r:.80}")
    kind, offset, prefix = clause
    checked_type(kind)
    if not isinstance(offset, int) or not 0 <= offset <= MOST_OFFSET:
        raise UsageError(f"the offset of a prefix must be 0 to {MOST_OFFSET:,}, not {offset!r:.80}")
    if not isinstance(prefix, bytes) or len(prefix) > MOST_PREFIX:
        raise UsageError(f"a prefix must be bytes, at most {MOST_PREFIX}, not {prefix!r:.80}")
    return Where(kind, offset, bytes(prefix)) if prefix else kind


def normal(clauses: Collection[Clause]) -> Selection:
    """The normal form of valid clauses."""
    whole = {clause for clause in clauses if isinstance(clause, int)}
    partial: list[Where] = []
    for clause in sorted({it for it in clauses if not isinstance(it, int)}):
        if clause.type in whole:
            continue
        # Clauses that begin with another one's prefix follow it.
        last = partial[-1] if partial else None
        follows = last is not None and clause[:2] == last[:2]
        if last is None or not (follows and clause.prefix.startswith(last.prefix)):
            partial.append(clause)
    return (*sorted(whole), *partial)


def within(clauses: Selection, most: int = MAX_CLAUSES) -> Selection:
    """At most that many clauses that select no fewer entries: prefixes lose bytes, the longest ones
    first; then their types are whole. Still more if there are as many types."""
    while len(clauses) > most and not all(isinstance(clause, int) for clause in clauses):
        longest = max(len(it.prefix) for it in clauses if isinstance(it, Where))
        clauses = normal(
            [
                (it._replace(prefix=it.prefix[:-1]) if longest > 1 else it.type)
                if isinstance(it, Where) and len(it.prefix) == longest
                else it
                for it in clauses
            ]
        )
    return clauses


def with_prefixes(types: Collection[int], prefixes: Iterable[str]) -> Selection | None:
    """The entries of these types whose data begins one of the prefixes, each as ``[OFFSET:]0xHEX``;
    without prefixes, all of the types; None for all entries. Raises `UsageError`."""
    found = [read_prefix(text) for text in prefixes]
    if not types:
        if found:
            raise UsageError("a prefix is compared in entries of a type: name the type, too")
        return None
    if not found:
        return selected(types)
    return selected(where=[Where(each, *prefix) for each in types for prefix in found])


def read_prefix(text: str) -> tuple[int, bytes]:
    """The offset and the bytes of a prefix such as ``2:0x01`` or ``0x01``. Raises `UsageError`."""
    found = _PREFIX.fullmatch(text)
    offset = 0 if found is None else int(found[1] or 0)
    content = b"" if found is None else bytes.fromhex(found[2])
    if not 1 <= len(content) <= MOST_PREFIX or offset > MOST_OFFSET:
        raise UsageError(
            f"a prefix is [OFFSET:]0xHEX, with 1 to {MOST_PREFIX} bytes and an offset up to "
            f"{MOST_OFFSET:,}, such as 2:0x01, not {text!r:.80}"
        )
    return offset, content
