"""The protobuf messages of zkEVM streams: names, numbers and kinds of their fields.

Every decoder of these messages uses this table; `proto/datastream.proto` is its equivalent for
other programs.
"""

from __future__ import annotations

from typing import Final, NamedTuple

# Kinds of fields. The numbers are shared with the compiled decoder.
U64: Final = 1
U32: Final = 2
BOOL: Final = 3
ENUM: Final = 4
BYTES: Final = 5
# The text of a message ``Debug { string message = 1; }``.
DEBUG: Final = 6

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


class Field(NamedTuple):
    """A field. The fields of a message are numbered from 1 without gaps."""

    number: int
    name: str
    kind: int


class Message(NamedTuple):
    """A message: its entry type, its name, and its fields in order."""

    type: int
    name: str
    fields: tuple[Field, ...]


def _message(type: int, name: str, *fields: tuple[str, int]) -> Message:
    numbered = tuple(Field(at, *field) for at, field in enumerate(fields, 1))
    return Message(type, name, numbered)


MESSAGES: Final = {
    message.type: message
    for message in (
        _message(TYPE_BOOK_MARK, "BookMark", ("type", ENUM), ("value", U64)),
        _message(
            TYPE_BATCH_START,
            "BatchStart",
            ("number", U64),
            ("type", ENUM),
            ("fork_id", U64),
            ("chain_id", U64),
            ("debug", DEBUG),
        ),
        _message(
            TYPE_L2_BLOCK,
            "L2Block",
            ("number", U64),
            ("batch_number", U64),
            ("timestamp", U64),
            ("delta_timestamp", U32),
            ("min_timestamp", U64),
            ("l1_blockhash", BYTES),
            ("l1_infotree_index", U32),
            ("hash", BYTES),
            ("state_root", BYTES),
            ("global_exit_root", BYTES),
            ("coinbase", BYTES),
            ("block_gas_limit", U64),
            ("block_info_root", BYTES),
            ("debug", DEBUG),
        ),
        _message(
            TYPE_TRANSACTION,
            "Transaction",
            ("l2block_number", U64),
            ("index", U64),
            ("is_valid", BOOL),
            ("encoded", BYTES),
            ("effective_gas_price_percentage", U32),
            ("im_state_root", BYTES),
            ("debug", DEBUG),
        ),
        _message(
            TYPE_BATCH_END,
            "BatchEnd",
            ("number", U64),
            ("local_exit_root", BYTES),
            ("state_root", BYTES),
            ("debug", DEBUG),
        ),
        _message(
            TYPE_UPDATE_GER,
            "UpdateGER",
            ("batch_number", U64),
            ("timestamp", U64),
            ("global_exit_root", BYTES),
            ("coinbase", BYTES),
            ("fork_id", U64),
            ("chain_id", U64),
            ("state_root", BYTES),
            ("debug", DEBUG),
        ),
        _message(TYPE_L2_BLOCK_END, "L2BlockEnd", ("number", U64)),
    )
}
