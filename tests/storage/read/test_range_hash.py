"""Hashes of ranges of entries: the same in every copy, wherever entries are in the file."""

from __future__ import annotations

from pathlib import Path

import pytest
import xxhash

from datastreamer.errors import UnknownEntry
from datastreamer.storage.read.range_sums import hash_range
from datastreamer.storage.stream import DataStream


@pytest.fixture
def stream(tmp_path: Path) -> DataStream:
    made = DataStream.create(tmp_path / "stream.bin", sync="os", index="memory")
    with made.atomic_op() as op:
        for number in range(4000):
            op.add_entry(1, bytes([number % 256]) * (number % 1500))
    return made


def expected(stream: DataStream, first: int, end: int) -> bytes:
    packed = b"".join(entry.pack() for entry in stream.entries(first, end))
    return xxhash.xxh3_128_digest(packed)


@pytest.mark.parametrize("first, end", [(0, 4000), (0, 1), (3999, 4000), (700, 2500)])
def test_the_hash_is_that_of_the_packed_entries(stream: DataStream, first: int, end: int) -> None:
    """Over the ends of pages, without the padding."""
    with stream:
        assert hash_range(stream.reader, first, end, 1 << 30) == (end, expected(stream, first, end))


@pytest.mark.parametrize("most", [1, 1000, 100_000, 2_000_000])
def test_bytes_are_bounded(stream: DataStream, most: int) -> None:
    with stream:
        end, digest = hash_range(stream.reader, 100, 4000, most)
        assert 100 < end < 4000
        assert digest == expected(stream, 100, end)
        hashed = sum(17 + len(entry.data) for entry in stream.entries(100, end))
        assert hashed <= most + (1 << 20)


def test_entries_that_are_not_there(stream: DataStream) -> None:
    with stream, pytest.raises(UnknownEntry):
        hash_range(stream.reader, 4001, 4002, 100)
