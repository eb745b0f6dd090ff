"""A batch as a sequence, as columns, and as the keeper of its buffer."""

from __future__ import annotations

import array
import gc
import pickle
import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from datastreamer._codec import Entry, EntryBatch, scan
from datastreamer.errors import BadEntryType
from tests.codec.generated import kinds, pages, usual
from tests.oracle import PAGE, pack

DATA = [b"", b"a", b"bb", b"ccc", b"dddd"]
WIRE = b"".join(pack(10 + i, i, data) for i, data in enumerate(DATA))
ENTRIES = [Entry(10 + i, i, data) for i, data in enumerate(DATA)]


@given(pages(), st.slices(12))
@usual
def test_a_sequence_of_entries(made: tuple[bytes, int, int], part: slice) -> None:
    content, first, file_offset = made
    batch = scan(content, first, file_offset=file_offset)
    entries = list(batch)
    assert len(entries) == len(batch) == batch.next_number - batch.first_number
    assert bool(batch) is bool(entries)
    assert [batch[i] for i in range(len(batch))] == entries
    assert [batch[i - len(batch)] for i in range(len(batch))] == entries
    assert [entry.number for entry in entries] == list(range(first, batch.next_number))
    assert b"".join(entry.pack() for entry in entries) == batch.packed()
    assert batch.nbytes == len(batch.packed())
    for kind in {entry.type for entry in entries} | {7}:
        assert batch.count(kind) == sum(entry.type == kind for entry in entries)
    if part.step not in (1, None):
        with pytest.raises(ValueError, match=f"step 1, not {part.step}"):
            batch[part]
        return
    sliced = batch[part]
    assert list(sliced) == entries[part]
    assert sliced.packed() == b"".join(entry.pack() for entry in entries[part])
    assert sliced.nbytes == len(sliced.packed())
    assert list(sliced.offsets) == list(batch.offsets)[part]
    assert list(sliced.lengths) == list(batch.lengths)[part]
    assert list(sliced.types) == list(batch.types)[part]
    assert [bytes(sliced.data(i)) for i in range(len(sliced))] == [e.data for e in entries[part]]
    assert batch.start <= sliced.start <= sliced.end <= batch.end
    if entries[part]:
        assert sliced.first_number == entries[part][0].number
        assert (sliced.start, sliced.end - sliced.start >= sliced.nbytes) == (
            sliced.offsets[0],
            True,
        )
    assert (sliced.more, sliced.needed, sliced.stopped_at) == (False, 0, -1)


def test_slices_of_slices() -> None:
    batch = scan(WIRE)
    inner = batch[1:][1:3][:1]
    assert (list(inner), inner.first_number, inner.next_number) == ([ENTRIES[2]], 12, 13)
    assert WIRE[inner.start : inner.end] == ENTRIES[2].pack()
    assert list(inner[5:]) == list(batch[3:2]) == []
    assert batch[3:2].first_number == 13
    assert inner.base is batch.base


def test_empty_slices_of_empty_batches() -> None:
    empty = scan(b"", 5)[:]
    assert (list(empty), empty.first_number, empty.nbytes, empty.packed()) == ([], 5, 0, b"")
    assert empty.lengths.tolist() == []


@pytest.mark.parametrize("index", [5, -6, sys.maxsize, -sys.maxsize - 1])
def test_no_such_index(index: int) -> None:
    batch = scan(WIRE)
    for access in (batch.__getitem__, batch.data):
        with pytest.raises(IndexError, match=f"no entry at {index} in a batch of 5"):
            access(index)


@pytest.mark.parametrize("index", ["1", 1.0, None])
def test_wrong_kinds_of_index(index: Any) -> None:
    batch = scan(WIRE)
    for access in (batch.__getitem__, batch.data):
        with pytest.raises(TypeError):
            access(index)


def test_columns_are_buffers() -> None:
    batch = scan(WIRE)
    for column, code, values in (
        (batch.offsets, "q", [0, 17, 35, 54, 74]),
        (batch.lengths, "I", [0, 1, 2, 3, 4]),
        (batch.types, "I", [0, 1, 2, 3, 4]),
    ):
        assert (column.format, column.itemsize) == (code, array.array(code).itemsize)
        assert (column.ndim, column.shape, column.contiguous) == (1, (5,), True)
        assert column.tolist() == values
        assert array.array(code, column.tobytes()).tolist() == values
        assert column.readonly
        with pytest.raises(TypeError):
            column[0] = 1


def test_data_is_not_copied() -> None:
    base = bytearray(WIRE)
    view = scan(base).data(4)
    assert (bytes(view), view.readonly, view.format) == (b"dddd", True, "B")
    base[-1] = ord("!")
    assert bytes(view) == b"ddd!"
    assert bytes(scan(base).data(-5)) == b""


def resizable(base: bytearray) -> bool:
    try:
        base.append(0)
    except BufferError:
        return False
    base.pop()
    return True


@pytest.mark.parametrize(
    "part",
    [
        lambda batch: batch,
        lambda batch: batch[1:2],
        lambda batch: batch[4:4],
        lambda batch: batch.data(1),
        iter,
    ],
)
def test_the_buffer_is_held_as_long_as_anything_needs_it(part: Any) -> None:
    base = bytearray(WIRE)
    kept = part(scan(base))
    assert not resizable(base)
    del kept
    assert resizable(base)


def test_entries_and_columns_do_not_hold_the_buffer() -> None:
    base = bytearray(WIRE)
    batch = scan(base)
    kept = [*batch], batch.offsets, batch.lengths, batch.types
    del batch
    assert resizable(base)
    base[:] = bytes(len(base))
    assert kept[0] == ENTRIES
    assert kept[2].tolist() == kept[3].tolist() == [0, 1, 2, 3, 4]


def test_a_failed_scan_lets_the_buffer_go() -> None:
    base = bytearray(WIRE)
    for options in ({"first_number": 3}, {"start": -1}):
        with pytest.raises(ValueError):  # noqa: PT011
            scan(base, **options)
        assert resizable(base)


def test_views_outlive_everything_else() -> None:
    batch = scan(bytes(bytearray(WIRE)))
    part = batch[2:]
    views = batch.data(4), part.offsets, part.lengths, memoryview(part.types)[1:]
    del batch, part
    gc.collect()
    scan(b"".join(pack(i, 9, b"other") for i in range(5)))
    assert [view.tolist() for view in views] == [[100] * 4, [35, 54, 74], [2, 3, 4], [3, 4]]


def test_a_batch_in_a_cycle_is_collected() -> None:
    class Buffer(bytearray):
        batch: EntryBatch

    dead: list[int] = []

    class Witness:
        def __del__(self) -> None:
            dead.append(1)

    base = Buffer(WIRE)
    base.batch = scan(base)
    base.witness = Witness()
    del base
    gc.collect()
    assert dead == [1]


def test_iterators() -> None:
    batch = scan(WIRE)
    entries = iter(batch)
    assert iter(entries) is entries
    assert next(entries) == ENTRIES[0]
    assert entries.__length_hint__() == 4  # type: ignore[attr-defined]
    assert list(entries) == ENTRIES[1:]
    assert list(entries) == []
    assert list(batch) == list(batch)


def test_made_by_scan_alone() -> None:
    with pytest.raises(TypeError, match=r"made by scan\(\)"):
        EntryBatch()
    bare = EntryBatch.__new__(EntryBatch)
    assert (len(bare), list(bare), bare.base, bare.packed(), list(bare[:])) == (
        0,
        [],
        None,
        b"",
        [],
    )
    assert bare.offsets.tolist() == []
    with pytest.raises(IndexError):
        bare.data(0)
    iterator = type(iter(bare)).__new__(type(iter(bare)))
    assert list(iterator) == []


def test_not_pickled() -> None:
    with pytest.raises(TypeError, match="cannot be pickled"):
        pickle.dumps(scan(WIRE))


def test_repr() -> None:
    assert repr(scan(WIRE)) == "<EntryBatch of 5 entries from number 10, 95 bytes>"


def test_next_number_past_the_largest() -> None:
    """The last number that there can be still has a next one."""
    assert scan(pack(2**64 - 2, 1, b"")).next_number == 2**64 - 1


def test_packed_leaves_padding_out() -> None:
    content = pack(0, 1, b"x") + b"\0??" + pack(1, 1, b"y") + pack(2, 1, b"z")
    batch = scan(content, 0, file_offset=4096 + PAGE - 21)
    assert batch.packed() == pack(0, 1, b"x") + pack(1, 1, b"y") + pack(2, 1, b"z")
    assert (batch.nbytes, batch.end) == (54, 57)


@given(pages(), st.lists(kinds, max_size=3), st.data())
@usual
def test_a_selection(made: tuple[bytes, int, int], types: list[int], data: st.DataObject) -> None:
    content, first, file_offset = made
    batch = scan(content, first, file_offset=file_offset)
    if batch:
        types += data.draw(st.lists(st.sampled_from(list(batch.types)), max_size=2))
    selected = batch.select(types)
    expected = [entry for entry in batch if entry.type in types]
    assert list(selected) == expected
    assert [selected[i] for i in range(len(selected))] == expected
    assert list(selected.numbers) == [entry.number for entry in expected]
    assert list(batch.numbers) == [entry.number for entry in batch]
    assert list(selected.types) == [entry.type for entry in expected]
    assert list(selected.lengths) == [len(entry.data) for entry in expected]
    assert [bytes(selected.data(i)) for i in range(len(selected))] == [e.data for e in expected]
    assert selected.packed() == b"".join(entry.pack() for entry in expected)
    assert selected.nbytes == len(selected.packed())
    assert (selected.first_number, selected.next_number) == (batch.first_number, batch.next_number)
    keys = [(e.data, e.number) for e in expected if e.is_bookmark and 1 <= len(e.data) <= 16]
    assert selected.bookmarks() == keys
    assert list(selected.select([3, 0xB0])) == [e for e in expected if e.type in (3, 0xB0)]
    if not expected:
        return
    # A slice of it, and what is before and behind the slice, cover the same numbers.
    low, high = sorted(data.draw(st.tuples(st.integers(0, 12), st.integers(0, 12))))
    parts = [selected[:low], selected[low:high], selected[high:]]
    assert [entry for part in parts for entry in part] == expected
    assert parts[0].first_number == batch.first_number
    assert parts[2].next_number == batch.next_number
    assert parts[0].next_number == parts[1].first_number
    assert parts[1].next_number == parts[2].first_number
    for part in parts:
        assert list(part.numbers) == [entry.number for entry in part]
        assert all(part.first_number <= number < part.next_number for number in part.numbers)


def test_a_selection_keeps_the_buffer() -> None:
    buffer = bytearray(WIRE)
    selected = scan(buffer).select([3])
    with pytest.raises(BufferError):
        buffer.clear()
    assert selected[0] == ENTRIES[3]
    del selected
    gc.collect()
    buffer.clear()


def test_a_selection_of_all_is_the_batch() -> None:
    batch = scan(WIRE)
    assert batch.select(range(5)) is batch
    assert list(batch.select([])) == []


@pytest.mark.parametrize("types", [[-1], [2**32]])
def test_no_such_type_to_select(types: list[int]) -> None:
    with pytest.raises(BadEntryType):
        scan(WIRE).select(types)
