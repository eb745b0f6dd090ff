"""The hot path beside the same work in `struct`, and beside a copy of the same bytes.

Owns the figures of packing, scanning and decoding; no file, no socket.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Callable

import pytest

from bench.measure import Done
from datastreamer._codec import Entry, EntryBatch, scan
from datastreamer._packer import EntryPacker
from datastreamer._pages import PageTable, entry_at
from tests.oracle import HEAD, PAGE
from tests.oracle import scan as oracle_scan

Versus = Callable[..., None]
MIB = 1 << 20
# Data of 32 B, a transaction's 200 B, and large.
SIZES = [32, 200, 4096]


def written(size: int, total: int) -> tuple[bytes, int]:
    """Pages of a file with entries of `size` bytes of data, some `total` bytes, and their count."""
    count = total // (17 + size)
    packer = EntryPacker()
    packer.begin(4096, 0)
    packer.add_entries(1, [b"\x5a" * size] * count)
    file = bytearray(packer.total_length - 4096)
    for offset, at, length in packer.segments:
        file[offset - 4096 : offset - 4096 + length] = packer.arena[at : at + length]
    return bytes(file), count


def copying(amount: int) -> Callable[[], None]:
    """A copy of `amount` bytes to memory that is there already: memcpy."""
    source, target = memoryview(b"\x5a" * amount), memoryview(bytearray(amount))

    def copy() -> None:
        target[:] = source

    return copy


def filling(size: int, count: int) -> Callable[[], None]:
    """The pages of `count` entries by struct, one call for each."""
    data = b"\x5a" * size
    buffer = bytearray(2 * PAGE + (17 + size) * count)
    pack_into = struct.Struct(f">BIIQ{size}s").pack_into

    def add(at: int, number: int, kind: int, content: bytes) -> int:
        length = 17 + len(content)
        room = PAGE - at % PAGE
        if length > room:
            buffer[at] = 0
            at += room
        pack_into(buffer, at, 2, length, kind, number, content)
        return at + length

    def fill() -> None:
        at = 0
        for number in range(count):
            at = add(at, number, 1, data)

    return fill


@pytest.mark.parametrize("size", [32, 200])
def test_add_one_by_one(versus: Versus, smoke: bool, size: int) -> None:
    count = 1000 if smoke else 100_000
    packer = EntryPacker()
    items = [b"\x5a" * size] * count

    def ours() -> None:
        packer.begin(4096, 0)
        add = packer.add_entry
        for data in items:
            add(1, data)

    versus(
        f"pack, one call an entry, {size} B",
        ours,
        {"struct": filling(size, count), "memcpy": copying(count * (17 + size))},
        unit="entries/s",
        amount=count,
        at_least=2.5,
    )


@pytest.mark.parametrize("size", [32, 200])
def test_add_in_bulk(versus: Versus, smoke: bool, size: int) -> None:
    count = 1000 if smoke else 4 * MIB // (17 + size)
    packer = EntryPacker()
    items = [bytes([i % 256]) * size for i in range(count)]

    def ours() -> None:
        packer.begin(4096, 0)
        packer.add_entries(1, items)

    versus(
        f"pack, in bulk, {size} B",
        ours,
        {"struct": filling(size, count), "memcpy": copying(count * (17 + size))},
        unit="entries/s",
        amount=count,
        rounds=15,
        at_least=3.0,
    )


@pytest.mark.parametrize("size", [32, 200])
def test_add_batch(versus: Versus, smoke: bool, size: int) -> None:
    content, count = written(size, MIB // 20 if smoke else 4 * MIB)
    batch = scan(content, 0, file_offset=4096)
    packer = EntryPacker()

    def ours() -> None:
        packer.begin(4096, 0)
        packer.add_batch(batch)

    versus(
        f"pack, a batch with new numbers, {size} B",
        ours,
        {"memcpy": copying(batch.nbytes)},
        unit="entries/s",
        amount=count,
        rounds=15,
    )


@pytest.mark.parametrize("size", SIZES)
def test_scan(versus: Versus, smoke: bool, size: int) -> None:
    """Eight pages at a time: more than the cache of a core holds, columns and all."""
    content, _ = written(size, MIB // 20 if smoke else 8 * MIB)

    def ours() -> EntryBatch:
        return scan(content, 0, file_offset=4096)

    versus(
        f"scan, {size} B",
        ours,
        {
            "struct": lambda: oracle_scan(content, 0, 4096),
            "memcpy": copying(len(content)),
        },
        unit="B/s",
        amount=len(content),
        rounds=15,
        at_least={"struct": 3.0 if size > 1000 else 10.0, "memcpy": 0.3},
    )


@pytest.mark.parametrize("size", [32, 200])
def test_decode_to_objects(versus: Versus, smoke: bool, size: int) -> None:
    content, count = written(size, MIB // 20 if smoke else 8 * MIB)
    batch = scan(content, 0, file_offset=4096)

    def ours() -> list[Entry]:
        return list(batch)

    def by_struct() -> list[tuple[int, int, bytes]]:
        unpack_from = HEAD.unpack_from
        entries = []
        at = 0
        while at < len(content):
            if content[at] == 0:
                at += PAGE - at % PAGE
                continue
            _, length, kind, number = unpack_from(content, at)
            entries.append((number, kind, content[at + 17 : at + length]))
            at += length
        return entries

    versus(
        f"decode to objects, {size} B",
        ours,
        {"struct, tuples": by_struct, "memcpy": copying(len(content))},
        unit="entries/s",
        amount=count,
        at_least=4.0,
    )


@pytest.mark.parametrize("size", [32, 200])
def test_iterate(versus: Versus, smoke: bool, size: int) -> None:
    content, count = written(size, MIB // 20 if smoke else 8 * MIB)
    batch = scan(content, 0, file_offset=4096)

    def ours() -> None:
        for _ in batch:
            pass

    versus(f"iterate over objects, {size} B", ours, unit="entries/s", amount=count)


def test_small_scans(versus: Versus, smoke: bool) -> None:
    """What a live client gets: five entries at a time."""
    content, _ = written(200, 217 * 5)
    count = 100 if smoke else 50_000

    def ours() -> None:
        for _ in range(count):
            scan(content, 0)

    def by_struct() -> Done:
        begin = time.perf_counter()
        for _ in range(count // 10):
            oracle_scan(content, 0, None)
        return Done(count // 10, time.perf_counter() - begin)

    versus(
        "scan 5 entries of 200 B",
        ours,
        {"struct": by_struct},
        unit="scans/s",
        amount=count,
        at_least=5.0,
    )


@pytest.mark.parametrize("size", [32, 200])
def test_point_reads(versus: Versus, smoke: bool, size: int) -> None:
    """One entry of a page, by the page's table and by a walk from the page's start."""
    content, _ = written(size, MIB // 20 if smoke else MIB - 100)
    table = PageTable(0, 4096)
    count = table.extend(content, 4096)
    numbers = [i * 7919 % count for i in range(10 if smoke else 10_000)]

    def ours() -> None:
        for number in numbers:
            offset, near, limit = table.find(number)
            entry_at(content[offset - 4096 : limit - 4096], number, start_number=near)

    def by_walk() -> None:
        for number in numbers:
            entry_at(content, number, start_number=0)

    versus(
        f"find an entry in a page, {size} B",
        ours,
        {"walk from its start": by_walk},
        unit="entries/s",
        amount=len(numbers),
        at_least=5.0,
    )
