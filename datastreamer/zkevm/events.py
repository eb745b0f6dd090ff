"""The events of zkEVM streams of version 2 and later, as typed tuples.

Owns the names of the fields in the order of their numbers, their types and defaults. Sequencers
write hashes and roots of 32 bytes and addresses of 20; the sizes are not checked here. Timestamps
are in seconds. A field that a message lacks has its default; `debug` is None without a debug
message. `unknown` has the fields that have no name here, as they came: an event that is read and
written again keeps them. Those of a `BookMark` are skipped.
"""

from __future__ import annotations

from enum import IntEnum
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from datastreamer.zkevm.transactions import OpenedTransaction


class BookmarkType(IntEnum):
    """What a bookmark points to."""

    UNSPECIFIED = 0
    BATCH = 1
    L2_BLOCK = 2


class BatchType(IntEnum):
    """The origin of a batch."""

    UNSPECIFIED = 0
    REGULAR = 1
    FORCED = 2
    INJECTED = 3
    INVALID = 4


class BookMark(NamedTuple):
    """A bookmark: `value` is the number of the batch or block. An unknown type is an int."""

    type: BookmarkType | int = BookmarkType.UNSPECIFIED
    value: int = 0


class BatchStart(NamedTuple):
    """The beginning of a batch. An unknown type is an int."""

    number: int = 0
    type: BatchType | int = BatchType.UNSPECIFIED
    fork_id: int = 0
    chain_id: int = 0
    debug: str | None = None
    unknown: bytes = b""


class L2Block(NamedTuple):
    """The beginning of a block; its transactions follow.

    `base_fee` is in wei, big-endian without leading zeros; empty before London.
    """

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
    base_fee: bytes = b""
    unknown: bytes = b""


class Transaction(NamedTuple):
    """A transaction of the block; `encoded` is an Ethereum transaction.

    `effective_gas_price_percentage` is 0 to 255 of 255.
    """

    l2block_number: int = 0
    index: int = 0  # type: ignore[assignment]  # the name in the message
    is_valid: bool = False
    encoded: bytes = b""
    effective_gas_price_percentage: int = 0
    im_state_root: bytes = b""
    debug: str | None = None
    unknown: bytes = b""

    def open(self, *, sender: bool = True) -> OpenedTransaction:
        """Decode `encoded`, as `datastreamer.zkevm.open_transaction` does."""
        from datastreamer.zkevm.transactions import open_transaction

        return open_transaction(self.encoded, sender=sender)


class BatchEnd(NamedTuple):
    """The end of a batch."""

    number: int = 0
    local_exit_root: bytes = b""
    state_root: bytes = b""
    debug: str | None = None
    unknown: bytes = b""


class UpdateGER(NamedTuple):
    """A new global exit root, between blocks."""

    batch_number: int = 0
    timestamp: int = 0
    global_exit_root: bytes = b""
    coinbase: bytes = b""
    fork_id: int = 0
    chain_id: int = 0
    state_root: bytes = b""
    debug: str | None = None
    unknown: bytes = b""


class L2BlockEnd(NamedTuple):
    """The end of a block."""

    number: int = 0
    unknown: bytes = b""
