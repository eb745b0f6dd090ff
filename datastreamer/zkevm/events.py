"""The events of zkEVM streams from version 2 on, typed.

Owns what the fields are called and which type they have in Python; `schema` has the same
fields in the same order. Hashes and roots are 32 bytes and addresses 20 where a sequencer
wrote them; nothing here holds them to that. Timestamps are in seconds. A field that is not
in the message has its default; `debug` is None where there is no debug message.
"""

from __future__ import annotations

from enum import IntEnum
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from datastreamer.zkevm.transactions import OpenedTransaction


class BookmarkType(IntEnum):
    """What a bookmark marks."""

    UNSPECIFIED = 0
    BATCH = 1
    L2_BLOCK = 2


class BatchType(IntEnum):
    """Where a batch comes from."""

    UNSPECIFIED = 0
    REGULAR = 1
    FORCED = 2
    INJECTED = 3
    INVALID = 4


class BookMark(NamedTuple):
    """A bookmark: `value` is the batch's or block's number. An unknown type is an int."""

    type: BookmarkType | int = BookmarkType.UNSPECIFIED
    value: int = 0


class BatchStart(NamedTuple):
    """A batch begins. An unknown type is an int."""

    number: int = 0
    type: BatchType | int = BatchType.UNSPECIFIED
    fork_id: int = 0
    chain_id: int = 0
    debug: str | None = None


class L2Block(NamedTuple):
    """A block begins; its transactions follow."""

    number: int = 0
    batch_number: int = 0
    timestamp: int = 0
    delta_timestamp: int = 0
    min_timestamp: int = 0
    l1_blockhash: bytes = b""
    l1_infotree_index: int = 0
    hash: bytes = b""
    state_root: bytes = b""
    global_exit_root: bytes = b""
    coinbase: bytes = b""
    block_gas_limit: int = 0
    block_info_root: bytes = b""
    debug: str | None = None


class Transaction(NamedTuple):
    """A transaction of the block; `encoded` is an Ethereum transaction.

    `effective_gas_price_percentage` is 0 to 255 of 255.
    """

    l2block_number: int = 0
    index: int = 0  # type: ignore[assignment]  # the message calls it so
    is_valid: bool = False
    encoded: bytes = b""
    effective_gas_price_percentage: int = 0
    im_state_root: bytes = b""
    debug: str | None = None

    def open(self, *, sender: bool = True) -> OpenedTransaction:
        """What `encoded` holds; as `datastreamer.zkevm.open_transaction`."""
        from datastreamer.zkevm.transactions import open_transaction

        return open_transaction(self.encoded, sender=sender)


class BatchEnd(NamedTuple):
    """A batch ends."""

    number: int = 0
    local_exit_root: bytes = b""
    state_root: bytes = b""
    debug: str | None = None


class UpdateGER(NamedTuple):
    """A global exit root came in outside of blocks."""

    batch_number: int = 0
    timestamp: int = 0
    global_exit_root: bytes = b""
    coinbase: bytes = b""
    fork_id: int = 0
    chain_id: int = 0
    state_root: bytes = b""
    debug: str | None = None


class L2BlockEnd(NamedTuple):
    """A block ends."""

    number: int = 0
