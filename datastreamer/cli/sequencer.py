"""A made-up sequencer: blocks with plausible bytes, written to a stream.

Owns what the demos write. Each operation is one batch with one block: a batch bookmark,
a block bookmark, StartL2Block, one L2Tx, EndL2Block, in the fixed layouts of version 1.
A block's bytes follow from the seed and its number alone, so that a stream written in
one go and one written in several are the same.
"""

from __future__ import annotations

import hashlib

from datastreamer.cli.outcome import Failure
from datastreamer.storage.stream import DataStream
from datastreamer.zkevm.fixed import (
    TYPE_END_L2_BLOCK,
    TYPE_L2_TX,
    TYPE_START_L2_BLOCK,
    EndL2Block,
    L2Tx,
    StartL2Block,
    started,
)
from datastreamer.zkevm.keys import Mark, key_of

VERSION = 1
SYSTEM_ID = 137
ENTRIES_PER_OPERATION = 5

_FORK_ID = 9
_GENESIS = 1_700_000_000
_BLOCK_SECONDS = 2
_LOOK_BACK = 4096


class Sequencer:
    """Writes one block after another to a stream that is open for writing.

    Numbers go on from the last block that the stream holds. Raises `Failure` for a
    stream whose entries are protobuf messages.
    """

    def __init__(self, stream: DataStream, seed: int = 0) -> None:
        version = stream.header.version
        if version != VERSION:
            raise Failure(
                f"{stream.path}: a stream of version {version}; the made-up blocks are of "
                f"version {VERSION}"
            )
        self._stream = stream
        self._seed = seed
        self.batch, self.block = _following(stream)

    def write(self) -> None:
        """Commit the next block, an atomic operation of its own."""
        with self._stream.atomic_op():
            self.add()

    def add(self) -> None:
        """Add the next block to the operation that is open."""
        stream = self._stream
        start, transaction, end = self._make()
        stream.add_bookmark(key_of(VERSION, Mark("batch", self.batch)))
        stream.add_bookmark(key_of(VERSION, Mark("block", self.block)))
        stream.add_entry(TYPE_START_L2_BLOCK, start)
        stream.add_entry(TYPE_L2_TX, transaction)
        stream.add_entry(TYPE_END_L2_BLOCK, end)
        self.batch += 1
        self.block += 1

    def _make(self) -> tuple[bytes, bytes, bytes]:
        """StartL2Block, L2Tx and EndL2Block of the block that is due."""
        seed, block = self._seed, self.block
        block_hash, state_root = _hash(seed, block, b"block"), _hash(seed, block, b"state")
        start = StartL2Block(
            batch=self.batch,
            block=block,
            timestamp=_GENESIS + _BLOCK_SECONDS * block,
            delta_timestamp=_BLOCK_SECONDS,
            l1_info_tree_index=block // 100,
            l1_block_hash=_hash(seed, block // 6, b"l1"),
            global_exit_root=_hash(seed, block // 100, b"exit"),
            coinbase=_hash(seed, 0, b"coinbase")[:20],
            fork_id=_FORK_ID,
            chain_id=self._stream.header.system_id & 0xFFFFFFFF,
        )
        transaction = L2Tx(255, 1, state_root, _transaction(seed, block))
        return start.pack(), transaction.pack(), EndL2Block(block, block_hash, state_root).pack()


def _following(stream: DataStream) -> tuple[int, int]:
    """Batch and block after the newest that the stream holds; 0 and 0 where it holds none."""
    stop = stream.total_entries
    while stop:
        start = max(0, stop - _LOOK_BACK)
        found = None
        for batch in stream.batches(start, stop):
            for at, kind in enumerate(batch.types):
                if kind == TYPE_START_L2_BLOCK:
                    found = started(batch.data(at)) or found
        if found is not None:
            return found[0] + 1, found[1] + 1
        stop = start
    return 0, 0


def _hash(seed: int, number: int, what: bytes) -> bytes:
    return hashlib.blake2b(b"%d %d" % (seed, number), digest_size=32, person=what).digest()


def _transaction(seed: int, block: int) -> bytes:
    """A legacy transaction in RLP with a signature's shape: 9 items in a list."""
    noise = hashlib.shake_256(b"%d %d" % (seed, block)).digest(20 + 64 + 2 + 128)
    size = noise[84] & 0x7F
    return _rlp_list(
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


def _rlp(item: int | bytes) -> bytes:
    if isinstance(item, int):
        item = item.to_bytes((item.bit_length() + 7) // 8, "big")
    if len(item) == 1 and item[0] < 0x80:
        return item
    return _rlp_head(0x80, len(item)) + item


def _rlp_list(items: list[bytes]) -> bytes:
    content = b"".join(items)
    return _rlp_head(0xC0, len(content)) + content


def _rlp_head(kind: int, size: int) -> bytes:
    if size < 56:
        return bytes([kind + size])
    digits = size.to_bytes((size.bit_length() + 7) // 8, "big")
    return bytes([kind + 55 + len(digits)]) + digits
