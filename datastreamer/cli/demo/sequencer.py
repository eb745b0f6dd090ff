"""A made-up sequencer: blocks with plausible bytes, written to a stream.

Owns what the demos write. Each operation is one batch with one block of one transaction, in
the layouts that the stream's version has. A block's bytes follow from the seed and its number
alone, so that a stream written in one go and one written in several are the same.
"""

from __future__ import annotations

import hashlib
from typing import Any

from datastreamer.storage.stream import DataStream
from datastreamer.zkevm.rlp import rlp_bytes, rlp_list
from datastreamer.zkevm.schema import FIRST_PROTOBUF_VERSION
from datastreamer.zkevm.sequencer import Atomic
from datastreamer.zkevm.sequencer import Sequencer as Publisher

VERSION = 1
SYSTEM_ID = 137
# Of a stream of version 1.
ENTRIES_PER_OPERATION = 5

_FORK_ID = 9
_GENESIS = 1_700_000_000
_BLOCK_SECONDS = 2


class DemoSequencer:
    """Writes one block after another to a stream that is open for writing.

    Numbers go on from the last block that the stream holds, and a batch that was left open is
    gone on with.
    """

    def __init__(self, stream: DataStream, seed: int = 0) -> None:
        self._seed = seed
        self._stream = stream
        self._alone = self._publisher("batch")
        self._inside = self._publisher("caller")

    @property
    def entries_per_operation(self) -> int:
        """How many entries a block and its batch are."""
        if self._alone.version < FIRST_PROTOBUF_VERSION:
            return ENTRIES_PER_OPERATION
        return 6 + self._alone.state.block_ends

    @property
    def block(self) -> int:
        """The number of the block that is due."""
        newest = self._alone.state.block
        return 0 if newest is None else newest + 1

    def write(self) -> None:
        """Commit the next block, an atomic operation of its own."""
        self._add(self._alone)

    def add(self) -> None:
        """Add the next block to the operation that is open."""
        self._inside.state = self._alone.state
        self._add(self._inside)
        self._alone.state = self._inside.state

    def _publisher(self, atomic: Atomic) -> Publisher:
        return Publisher(self._stream, fork_id=_FORK_ID, atomic=atomic)

    def _add(self, publisher: Publisher) -> None:
        batch = publisher.resume() if publisher.state.batch_open else publisher.batch()
        number = self.block
        with batch, batch.block(number, **self._fields(number)) as block:
            block.tx(_transaction(self._seed, number))

    def _fields(self, block: int) -> dict[str, Any]:
        seed = self._seed
        return {
            "timestamp": _GENESIS + _BLOCK_SECONDS * block,
            "delta_timestamp": _BLOCK_SECONDS,
            "hash": _hash(seed, block, b"block"),
            "state_root": _hash(seed, block, b"state"),
            "l1_infotree_index": block // 100,
            "l1_blockhash": _hash(seed, block // 6, b"l1"),
            "global_exit_root": _hash(seed, block // 100, b"exit"),
            "coinbase": _hash(seed, 0, b"coinbase")[:20],
        }


def _hash(seed: int, number: int, what: bytes) -> bytes:
    return hashlib.blake2b(b"%d %d" % (seed, number), digest_size=32, person=what).digest()


def _transaction(seed: int, block: int) -> bytes:
    """A legacy transaction in RLP with a signature's shape: 9 items in a list."""
    noise = hashlib.shake_256(b"%d %d" % (seed, block)).digest(20 + 64 + 2 + 128)
    size = noise[84] & 0x7F
    return rlp_list(
        b"".join(
            [
                _rlp(block),
                _rlp(1_000_000_000 + noise[85]),
                _rlp(21_000 + 16 * size),
                _rlp(noise[:20]),
                _rlp(block * 1_000_000_007),
                _rlp(noise[86 : 86 + size]),
                _rlp(27 + (noise[85] & 1)),
                _rlp(int.from_bytes(noise[20:52], "big")),
                _rlp(int.from_bytes(noise[52:84], "big")),
            ]
        )
    )


def _rlp(item: int | bytes) -> bytes:
    if isinstance(item, int):
        item = item.to_bytes((item.bit_length() + 7) // 8, "big")
    return rlp_bytes(item)
