"""Batches that go from their memory to their place in the file: as `add_batch`, byte for byte."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from datastreamer import DataStream
from datastreamer._codec import EntryBatch, pack_entry, scan
from datastreamer._packer import EntryPacker, Layout
from datastreamer.errors import CorruptEntries, NoOperation, UsageError
from tests.storage.made import BOOKMARK, FIRST, PAGE, Item, items, scan_file


def wire(entries: list[Item], first: int = 0) -> bytearray:
    numbered = enumerate(entries, first)
    return bytearray(b"".join([pack_entry(number, *item) for number, item in numbered]))


def batch_of(entries: list[Item], first: int = 0) -> EntryBatch:
    return scan(wire(entries, first), first)


def new(path: Path) -> DataStream:
    return DataStream.create(path, index="memory", sync="os")


# Sizes in bytes of data; negative: the number of bytes that are left in the page after it.
SIZES = st.sampled_from([0, 1, 16, 200, 40_000, 400_000, 900_000, PAGE - 17, -1, -16, -17, -18])


def sized(sizes: list[int]) -> list[Item]:
    found: list[Item] = []
    at = 0
    for number, size in enumerate(sizes):
        room = PAGE - at % PAGE
        length = 17 + size if size >= 0 else max(17, room + size + (size == -1))
        if length > room:
            at += room
        at += length
        found.append((number % 3, bytes([number % 251 + 1]) * (length - 17)))
    return found


def lay(batch: EntryBatch, at: int, first: int) -> Layout:
    packer = EntryPacker()
    packer.begin(at, first)
    return packer.lay_out(batch)


@given(st.lists(SIZES, max_size=8), st.lists(SIZES, max_size=8))
def test_a_layout_is_what_packing_gives(before: list[int], sizes: list[int]) -> None:
    entries = sized(before + sizes)
    old, more = entries[: len(before)], entries[len(before) :]
    packer, other = EntryPacker(1 << 30), EntryPacker(1 << 30)
    packer.begin(FIRST, 0)
    packer.add_batch(batch_of(old))
    other.begin(packer.total_length, packer.next_number)
    memory = wire(more, len(old))
    batch = scan(memory, len(old))
    layout = other.lay_out(batch)
    begin = packer.total_length
    packer.add_batch(batch)
    expected = bytearray(b"\xee" * (packer.total_length - begin + 1))
    found = bytearray(expected)
    for image, arena, segments in (
        (expected, packer.arena, packer.segments),
        (found, memoryview(memory), layout.segments),
    ):
        for offset, start, length in segments:
            if offset >= begin:
                image[offset - begin : offset - begin + length] = arena[start : start + length]
            elif offset + length > begin:
                image[: offset + length - begin] = arena[start + begin - offset : start + length]
    assert found == expected
    assert layout.total_length == packer.total_length
    assert layout.next_number == packer.next_number
    assert b"".join([memory[at : at + size] for _, at, size in layout.entries]) == memory
    other.follow(layout)
    other.add_entry(1, b"behind")
    packer.add_entry(1, b"behind")
    assert other.total_length == packer.total_length
    assert other.next_number == packer.next_number


def test_a_page_s_rest_is_marked_over_its_old_content(tmp_path: Path) -> None:
    """And a batch of a file, with padding in its memory, is one like any other."""
    entries = [(1, b"x" * 700_000), (BOOKMARK, b"key"), (2, b"y" * 700_000), (3, b"z" * 500_000)]
    with new(tmp_path / "s.bin") as stream:
        with stream.atomic_op() as op:
            op.add_entries(9, [b"\xff" * 500] * 8000)
        paged = [*stream.batches(0, 8000)]
        stream.truncate(0)
        with stream.atomic_op() as op:
            assert op.place_batch(batch_of(entries)) == range(4)
            assert op.bookmarks == [(b"key", 1)]
        assert items(stream) == entries
        assert stream.bookmark(b"key") == 1
        assert [(e.type, e.data) for e in scan_file(tmp_path / "s.bin")] == entries
        stream.truncate(0)
        with stream.atomic_op() as op:
            for batch in paged:
                op.place_batch(batch)
        assert items(stream) == [(9, b"\xff" * 500)] * 8000
    with DataStream.open(tmp_path / "s.bin", read_only=True) as stream:
        assert stream.total_entries == 8000


def test_among_entries_that_are_added(tmp_path: Path) -> None:
    with new(tmp_path / "s.bin") as stream:
        with stream.atomic_op() as op:
            op.add_entry(1, b"one")
            op.place_batch(batch_of([(2, b"two"), (BOOKMARK, b"k")], 1))
            op.place_batch(batch_of([(2, b"three")], 3))
            op.add_bookmark(b"l")
            op.place_batch(batch_of([(2, b"five")], 5))
            assert stream.total_entries == 0
        assert items(stream) == [
            (1, b"one"), (2, b"two"), (BOOKMARK, b"k"), (2, b"three"), (BOOKMARK, b"l"),
            (2, b"five"),
        ]  # fmt: skip
        assert (stream.bookmark(b"k"), stream.bookmark(b"l")) == (2, 4)
        stream.start_atomic_op()
        stream.atomic_op().place_batch(batch_of([(7, b"no")] * 3, 6))
        stream.rollback_atomic_op()
        with stream.atomic_op() as op:
            assert op.place_batch(batch_of([], 6)) == range(6, 6)
            op.place_batch(batch_of([(8, b"yes")], 6))
        assert items(stream)[6:] == [(8, b"yes")]


def other_numbers(memory: bytearray, batch: EntryBatch) -> EntryBatch:
    return batch[1:]


def with_gaps(memory: bytearray, batch: EntryBatch) -> EntryBatch:
    return batch.select([1])


def changed(at: int) -> Callable[[bytearray, EntryBatch], EntryBatch]:
    def change(memory: bytearray, batch: EntryBatch) -> EntryBatch:
        memory[at] ^= 1
        return batch

    return change


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (other_numbers, UsageError),
        (with_gaps, UsageError),
        *[(changed(at), CorruptEntries) for at in (0, 4, 8, 16, 20, 28)],
    ],
)
def test_what_is_refused_and_the_operation_continues(
    tmp_path: Path,
    change: Callable[[bytearray, EntryBatch], EntryBatch],
    error: type[Exception],
) -> None:
    with new(tmp_path / "s.bin") as stream:
        memory = wire([(1, b"one"), (2, b"two"), (1, b"three")])
        batch = change(memory, scan(memory, 0))
        with stream.atomic_op() as op:
            with pytest.raises(error):
                op.place_batch(batch)
            op.add_entry(5, b"five")
        assert items(stream) == [(5, b"five")]
        with pytest.raises(NoOperation):
            stream.atomic_op().place_batch(batch_of([(1, b"")], 1))


def test_a_layout_of_another_place(tmp_path: Path) -> None:
    packer = EntryPacker()
    packer.begin(FIRST, 0)
    layout = packer.lay_out(batch_of([(1, b"a")]))
    packer.add_entry(1, b"a")
    with pytest.raises(RuntimeError, match="not for the current position"):
        packer.follow(layout)
    assert lay(batch_of([(1, b"a")], 5), FIRST, 5).next_number == 6
