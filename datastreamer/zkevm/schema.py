"""The protobuf messages of zkEVM streams: numbers and kinds of the fields of `events`.

Every decoder of these messages uses this table; `proto/datastream.proto` is its equivalent for
other programs.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Any, Final, NamedTuple

from datastreamer.zkevm import events

# Kinds of fields. The numbers are shared with the compiled decoder.
U64: Final = 1
U32: Final = 2
BOOL: Final = 3
ENUM: Final = 4
# A u64 of which chains use all 64 bits.
FULL_U64: Final = 5
BYTES: Final = 6
# The text of a message ``Debug { string message = 1; }``.
DEBUG: Final = 7
# Bytes that are an amount in wei, big-endian.
WEI: Final = 8

TYPE_BATCH_START: Final = 1
TYPE_L2_BLOCK: Final = 2
TYPE_TRANSACTION: Final = 3
TYPE_BATCH_END: Final = 4
TYPE_UPDATE_GER: Final = 5
TYPE_L2_BLOCK_END: Final = 6
TYPE_BOOK_MARK: Final = 0xB0

# Streams of this version and later hold protobuf messages, earlier ones fixed layouts.
FIRST_PROTOBUF_VERSION: Final = 2
# From this version on each block has an L2BlockEnd.
FIRST_BLOCK_END_VERSION: Final = 3

_SPECIAL: Final = {
    "delta_timestamp": U32,
    "l1_infotree_index": U32,
    "effective_gas_price_percentage": U32,
    "block_gas_limit": FULL_U64,
    "base_fee": WEI,
}


class Field(NamedTuple):
    """A field. The fields of a message are numbered from 1 without gaps."""

    number: int
    name: str
    kind: int


class Message(NamedTuple):
    """A message: the class of its events, its name, and its fields in order."""

    cls: type[Any]
    name: str
    fields: tuple[Field, ...]


def _kind(name: str, default: object) -> int:
    if isinstance(default, IntEnum):
        return ENUM
    if name in _SPECIAL:
        return _SPECIAL[name]
    return {bool: BOOL, int: U64, bytes: BYTES, type(None): DEBUG}[type(default)]


def _message(cls: type[Any]) -> Message:
    fields = [field for field in cls._field_defaults.items() if field[0] != "unknown"]
    numbered = tuple(Field(at, name, _kind(name, it)) for at, (name, it) in enumerate(fields, 1))
    return Message(cls, cls.__name__, numbered)


MESSAGES: Final = {
    TYPE_BOOK_MARK: _message(events.BookMark),
    TYPE_BATCH_START: _message(events.BatchStart),
    TYPE_L2_BLOCK: _message(events.L2Block),
    TYPE_TRANSACTION: _message(events.Transaction),
    TYPE_BATCH_END: _message(events.BatchEnd),
    TYPE_UPDATE_GER: _message(events.UpdateGER),
    TYPE_L2_BLOCK_END: _message(events.L2BlockEnd),
}
"""The message of each entry type."""
