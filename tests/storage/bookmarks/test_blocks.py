"""Blocks of sorted bookmarks: their checksums."""

from __future__ import annotations

import random

import pytest
from xxhash import xxh3_64_intdigest

from datastreamer.storage.bookmarks._blocks import DamagedBlockError, empty_block, merged, unpacked
from datastreamer.storage.bookmarks._pairs import Pairs

SUM = 8


def blocks() -> dict[int, bytes]:
    """One of each size."""
    chance = random.Random(1)
    found = {}
    for _ in range(3000):
        count = chance.randint(0, 120)
        pairs = Pairs(
            (chance.randbytes(chance.randint(1, 16)), chance.randrange(2**64)) for _ in range(count)
        )
        made = merged(empty_block(), pairs.sorted(), 0)[0] if count else [(b"", empty_block())]
        found.update((len(block), block) for _, block in made)
    return found


def test_the_checksum_of_blocks_of_every_size() -> None:
    """It is xxh3, as the library computes it, whichever way it was computed here."""
    found = blocks()
    assert len(found) > 1000
    for block in found.values():
        assert int.from_bytes(block[:SUM], "big") == xxh3_64_intdigest(block[SUM:])


def test_every_flipped_byte_is_found() -> None:
    block = max(blocks().items())[1]
    before = block[SUM : SUM + 25]
    unpacked(block, before)
    for at in range(len(block)):
        flipped = bytearray(block)
        flipped[at] ^= 1
        with pytest.raises(DamagedBlockError):
            unpacked(flipped, before)
