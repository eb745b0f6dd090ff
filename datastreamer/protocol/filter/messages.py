"""Commands that filter entries by type, as values and as bytes, and the heads of their frames.

Owns their layout. Must not know which of them is allowed when (`server`, `client`).
"""

from __future__ import annotations

import struct
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Final, TypeAlias

from datastreamer.errors import BadEntryType, UsageError
from datastreamer.format import (
    CHOSEN_HEAD_SIZE,
    CHOSEN_HEAD_STRUCT,
    COMMAND_FILTERED_READ,
    COMMAND_FILTERED_START,
    COMMAND_FILTERED_START_BOOKMARK,
    MAX_BOOKMARK_SIZE,
    MAX_FILTER_TYPES,
    PACKET_CHOSEN,
    U32_MAX,
    U64_MAX,
)
from datastreamer.protocol.arguments import check_key

COMMANDS: Final = (COMMAND_FILTERED_READ, COMMAND_FILTERED_START, COMMAND_FILTERED_START_BOOKMARK)

_PLAIN = struct.Struct(">QQ")
_READ = struct.Struct(">QQIII")
_NUMBER = struct.Struct(">Q")
_LENGTH = struct.Struct(">I")


@dataclass(frozen=True, slots=True)
class FilteredRead:
    """Request the entries of `types` from `from_entry` up to `stop`, as many as the limits allow,
    or fewer; the limits are those of a `BatchQuery`.

    If there are none up to the end of the stream, the server waits up to `wait_ms` milliseconds.
    """

    from_entry: int
    types: tuple[int, ...]
    stop: int = U64_MAX
    max_count: int = 0
    max_bytes: int = 0
    wait_ms: int = 0

    def __str__(self) -> str:
        return f"entries of types {_named(self.types)} from entry {self.from_entry}"


@dataclass(frozen=True, slots=True)
class FilteredStart:
    """Stream the entries of `types` from `from_entry` on."""

    from_entry: int
    types: tuple[int, ...]

    def __str__(self) -> str:
        return f"Start from entry {self.from_entry}, types {_named(self.types)}"


@dataclass(frozen=True, slots=True)
class FilteredStartBookmark:
    """Stream the entries of `types` from a bookmark's entry on."""

    key: bytes
    types: tuple[int, ...]

    def __str__(self) -> str:
        return f"Start from bookmark 0x{self.key.hex()}, types {_named(self.types)}"


FilteredCommand: TypeAlias = FilteredRead | FilteredStart | FilteredStartBookmark


def servable(types: Collection[int] | None) -> tuple[int, ...] | None:
    """`types` in the form of a request; None if a server cannot be asked for them."""
    if types is None or not 1 <= len(set(types)) <= MAX_FILTER_TYPES:
        return None
    return tuple(sorted(set(types)))


def encode(command: FilteredCommand, stream_type: int) -> bytes:
    """Encode a command. Raises `UsageError`, `BadBookmark` and `BadEntryType`."""
    match command:
        case FilteredRead(from_entry, types, stop, max_count, max_bytes, wait_ms):
            _check_numbers(from_entry, stop)
            for value in (max_count, max_bytes, wait_ms):
                if not 0 <= value <= U32_MAX:
                    raise UsageError(f"a limit must be 0 to 2**32 - 1, not {value}")
            number = COMMAND_FILTERED_READ
            what = _READ.pack(from_entry, stop, max_count, max_bytes, wait_ms)
        case FilteredStart(from_entry, types):
            _check_numbers(from_entry)
            number, what = COMMAND_FILTERED_START, _NUMBER.pack(from_entry)
        case FilteredStartBookmark(key, types):
            check_key(key)
            number, what = COMMAND_FILTERED_START_BOOKMARK, _LENGTH.pack(len(key)) + key
    return _PLAIN.pack(number, stream_type) + what + _encode_types(types)


def _encode_types(types: tuple[int, ...]) -> bytes:
    if not 1 <= len(types) <= MAX_FILTER_TYPES:
        raise UsageError(f"a filter must have 1 to {MAX_FILTER_TYPES} types, not {len(types)}")
    for kind in types:
        if not 0 <= kind <= U32_MAX:
            raise BadEntryType(f"an entry type must be 0 to {U32_MAX}, not {kind}")
    return struct.pack(f">I{len(types)}I", len(types), *types)


def _check_numbers(*numbers: int) -> None:
    for number in numbers:
        if not 0 <= number <= U64_MAX:
            raise UsageError(f"entry numbers must be 0 to 2**64 - 1, not {number}")


def decode(command: int, data: bytes, at: int) -> tuple[FilteredCommand, int] | None:
    """The command whose parameters begin at `at`, and where they end; None until complete. Raises
    `ValueError` for invalid parameters, as soon as they have arrived."""
    if command == COMMAND_FILTERED_START_BOOKMARK:
        if len(data) < at + _LENGTH.size:
            return None
        (length,) = _LENGTH.unpack_from(data, at)
        if not 1 <= length <= MAX_BOOKMARK_SIZE:
            raise ValueError(f"a bookmark of {length} bytes, not 1 to {MAX_BOOKMARK_SIZE}")
        begin, at = at, at + _LENGTH.size + length
    else:
        begin, at = at, at + (_READ if command == COMMAND_FILTERED_READ else _NUMBER).size
    if len(data) < at + _LENGTH.size:
        return None
    (count,) = _LENGTH.unpack_from(data, at)
    if not 1 <= count <= MAX_FILTER_TYPES:
        raise ValueError(f"a set of {count} types, not of 1 to {MAX_FILTER_TYPES}")
    at += _LENGTH.size
    end = at + 4 * count
    if len(data) < end:
        return None
    types = tuple(sorted(set(struct.unpack_from(f">{count}I", data, at))))
    if command == COMMAND_FILTERED_START_BOOKMARK:
        key = data[begin + _LENGTH.size : at - _LENGTH.size]
        return FilteredStartBookmark(key, types), end
    if command == COMMAND_FILTERED_START:
        (number,) = _NUMBER.unpack_from(data, begin)
        return FilteredStart(number, types), end
    number, *rest = _READ.unpack_from(data, begin)
    return FilteredRead(number, types, *rest), end


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


def _named(types: Iterable[int]) -> str:
    return ", ".join(map(str, types))
