"""Commands that select entries, as values and as bytes, and the heads of their frames.

A selection of types alone has the older of two forms, which older servers know.

Owns their layout. Must not know which of them is allowed when (`server`, `client`).
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, TypeAlias

from datastreamer.errors import UsageError
from datastreamer.format import (
    CHOSEN_HEAD_SIZE,
    CHOSEN_HEAD_STRUCT,
    COMMAND_FILTERED_READ,
    COMMAND_FILTERED_START,
    COMMAND_FILTERED_START_BOOKMARK,
    COMMAND_SELECTED_READ,
    COMMAND_SELECTED_START,
    COMMAND_SELECTED_START_BOOKMARK,
    MAX_BOOKMARK_SIZE,
    MAX_CLAUSES,
    PACKET_CHOSEN,
    U32_MAX,
    U64_MAX,
)
from datastreamer.protocol.arguments import check_key
from datastreamer.selection.clauses import Clause, Selection, Where, checked, normal

# The command with clauses for each of those with types.
_SELECTED: Final = {
    COMMAND_FILTERED_READ: COMMAND_SELECTED_READ,
    COMMAND_FILTERED_START: COMMAND_SELECTED_START,
    COMMAND_FILTERED_START_BOOKMARK: COMMAND_SELECTED_START_BOOKMARK,
}
_FILTERED: Final = {selected: filtered for filtered, selected in _SELECTED.items()}
COMMANDS: Final = (*_SELECTED, *_FILTERED)

_PLAIN = struct.Struct(">QQ")
_READ = struct.Struct(">QQIII")
_NUMBER = struct.Struct(">Q")
_LENGTH = struct.Struct(">I")
_CLAUSE = struct.Struct(">IHB")


@dataclass(frozen=True, slots=True)
class FilteredRead:
    """Request the entries that `where` selects from `from_entry` up to `stop`, as many as the
    limits allow, or fewer; the limits are those of a `BatchQuery`.

    If there are none up to the end of the stream, the server waits up to `wait_ms` milliseconds.
    """

    from_entry: int
    where: Selection
    stop: int = U64_MAX
    max_count: int = 0
    max_bytes: int = 0
    wait_ms: int = 0

    def __str__(self) -> str:
        return f"entries of types {_named(self.where)} from entry {self.from_entry}"


@dataclass(frozen=True, slots=True)
class FilteredStart:
    """Stream the entries that `where` selects from `from_entry` on."""

    from_entry: int
    where: Selection

    def __str__(self) -> str:
        return f"Start from entry {self.from_entry}, types {_named(self.where)}"


@dataclass(frozen=True, slots=True)
class FilteredStartBookmark:
    """Stream the entries that `where` selects from a bookmark's entry on."""

    key: bytes
    where: Selection

    def __str__(self) -> str:
        return f"Start from bookmark 0x{self.key.hex()}, types {_named(self.where)}"


FilteredCommand: TypeAlias = FilteredRead | FilteredStart | FilteredStartBookmark


def encode(command: FilteredCommand, stream_type: int) -> bytes:
    """Encode a command. Raises `UsageError`, `BadBookmark` and `BadEntryType`."""
    match command:
        case FilteredRead(from_entry, where, stop, max_count, max_bytes, wait_ms):
            _check_numbers(from_entry, stop)
            for value in (max_count, max_bytes, wait_ms):
                if not 0 <= value <= U32_MAX:
                    raise UsageError(f"a limit must be 0 to 2**32 - 1, not {value}")
            number = COMMAND_FILTERED_READ
            what = _READ.pack(from_entry, stop, max_count, max_bytes, wait_ms)
        case FilteredStart(from_entry, where):
            _check_numbers(from_entry)
            number, what = COMMAND_FILTERED_START, _NUMBER.pack(from_entry)
        case FilteredStartBookmark(key, where):
            check_key(key)
            number, what = COMMAND_FILTERED_START_BOOKMARK, _LENGTH.pack(len(key)) + key
    if not 1 <= len(where) <= MAX_CLAUSES:
        raise UsageError(f"a selection must have 1 to {MAX_CLAUSES} clauses, not {len(where)}")
    clauses = [checked(clause) for clause in where]
    if all(isinstance(clause, int) for clause in clauses):
        parts = struct.pack(f">{len(clauses)}I", *clauses)
    else:
        number = _SELECTED[number]
        parts = b"".join(map(_encode_clause, clauses))
    return _PLAIN.pack(number, stream_type) + what + _LENGTH.pack(len(clauses)) + parts


def _encode_clause(clause: Clause) -> bytes:
    kind, offset, prefix = Where(clause) if isinstance(clause, int) else clause
    return _CLAUSE.pack(kind, offset, len(prefix)) + prefix


def _check_numbers(*numbers: int) -> None:
    for number in numbers:
        if not 0 <= number <= U64_MAX:
            raise UsageError(f"entry numbers must be 0 to 2**64 - 1, not {number}")


def decode(command: int, data: bytes, at: int) -> tuple[FilteredCommand, int] | None:
    """The command whose parameters begin at `at`, and where they end; None until complete. Raises
    `ValueError` for invalid parameters, as soon as they have arrived."""
    filtered = _FILTERED.get(command, command)
    if filtered == COMMAND_FILTERED_START_BOOKMARK:
        if len(data) < at + _LENGTH.size:
            return None
        (length,) = _LENGTH.unpack_from(data, at)
        if not 1 <= length <= MAX_BOOKMARK_SIZE:
            raise ValueError(f"a bookmark of {length} bytes, not 1 to {MAX_BOOKMARK_SIZE}")
        begin, at = at, at + _LENGTH.size + length
    else:
        begin, at = at, at + (_READ if filtered == COMMAND_FILTERED_READ else _NUMBER).size
    if len(data) < at + _LENGTH.size:
        return None
    (count,) = _LENGTH.unpack_from(data, at)
    if not 1 <= count <= MAX_CLAUSES:
        raise ValueError(f"a selection of {count} clauses, not of 1 to {MAX_CLAUSES}")
    key = data[begin + _LENGTH.size : at]
    found = _decode_clauses(data, at + _LENGTH.size, count, typed=filtered == command)
    if found is None:
        return None
    where, end = found
    if filtered == COMMAND_FILTERED_START_BOOKMARK:
        return FilteredStartBookmark(key, where), end
    if filtered == COMMAND_FILTERED_START:
        (number,) = _NUMBER.unpack_from(data, begin)
        return FilteredStart(number, where), end
    number, *rest = _READ.unpack_from(data, begin)
    return FilteredRead(number, where, *rest), end


def _decode_clauses(
    data: bytes, at: int, count: int, *, typed: bool
) -> tuple[Selection, int] | None:
    """The clauses that begin at `at`, and where they end; None until complete. `typed`: each is a
    type."""
    if typed:
        end = at + 4 * count
        return (
            None if len(data) < end else (normal(struct.unpack_from(f">{count}I", data, at)), end)
        )
    clauses: list[Clause] = []
    for _ in range(count):
        begin = at + _CLAUSE.size
        if len(data) < begin:
            return None
        kind, offset, size = _CLAUSE.unpack_from(data, at)
        at = begin + size
        if len(data) < at:
            return None
        clauses.append(Where(kind, offset, data[begin:at]) if size else kind)
    return normal(clauses), at


def encode_head(
    count: int, first_entry: int, next_entry: int, total_entries: int, epoch: int, size: int
) -> bytes:
    """The head of a frame; its entries, `size` bytes, follow."""
    return CHOSEN_HEAD_STRUCT.pack(
        PACKET_CHOSEN,
        CHOSEN_HEAD_SIZE + size,
        count,
        first_entry,
        next_entry,
        total_entries,
        epoch,
    )


def _named(where: Iterable[Clause]) -> str:
    return ", ".join(map(str, where))
