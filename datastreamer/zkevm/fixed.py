"""The fixed binary layouts of the events in streams of version 1, newest generation.

Owns how an event becomes bytes. Knows no stream. All integers are big-endian.
"""

from __future__ import annotations

import struct
from typing import Final, NamedTuple

TYPE_START_L2_BLOCK: Final = 1
TYPE_L2_TX: Final = 2
TYPE_END_L2_BLOCK: Final = 3

# The layouts of a StartL2Block over time; all begin with batch, block and timestamp.
START_L2_BLOCK_SIZES: Final = frozenset({78, 110, 122, 142})

_START: Final = struct.Struct(">QQQII32s32s20sHI")
_START_NUMBERS: Final = struct.Struct(">QQ")
_TX: Final = struct.Struct(">BB32sI")
_END: Final = struct.Struct(">Q32s32s")


class StartL2Block(NamedTuple):
    """A block begins. Timestamps in seconds; hashes of 32 bytes, an address of 20."""

    batch: int
    block: int
    timestamp: int
    delta_timestamp: int
    l1_info_tree_index: int
    l1_block_hash: bytes
    global_exit_root: bytes
    coinbase: bytes
    fork_id: int
    chain_id: int

    def pack(self) -> bytes:
        """The event's 122 bytes."""
        return _START.pack(*self)


class L2Tx(NamedTuple):
    """A transaction. `gas_price_percentage` is 0 to 255 of 255; `encoded` is its RLP."""

    gas_price_percentage: int
    is_valid: int
    state_root: bytes
    encoded: bytes

    def pack(self) -> bytes:
        """The event's 38 bytes and those of the transaction."""
        head = _TX.pack(
            self.gas_price_percentage, self.is_valid, self.state_root, len(self.encoded)
        )
        return head + self.encoded


class EndL2Block(NamedTuple):
    """A block ends. Hashes of 32 bytes."""

    block: int
    block_hash: bytes
    state_root: bytes

    def pack(self) -> bytes:
        """The event's 72 bytes."""
        return _END.pack(*self)


def started(data: bytes | memoryview) -> tuple[int, int] | None:
    """Batch and block of a StartL2Block of any generation; None where it is none."""
    if len(data) not in START_L2_BLOCK_SIZES:
        return None
    batch, block = _START_NUMBERS.unpack_from(data)
    return batch, block
