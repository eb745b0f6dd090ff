"""Single entries: the object, its bytes, and packing one of them."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from datastreamer._codec import Entry, pack_entry, scan
from datastreamer.errors import BadEntryType, EntryTooLarge
from tests.codec.generated import U32, U64, data, kinds, usual
from tests.oracle import PAGE, pack

all_numbers = st.one_of(st.integers(0, 9), st.integers(0, U64), st.just(U64))
ENTRY = Entry(7, 2, b"data")


@given(all_numbers, kinds, data, st.sampled_from([2, 0xFE, 0, 0xFF]))
@usual
def test_pack(number: int, kind: int, content: bytes, packet: int) -> None:
    expected = pack(number, kind, content, packet)
    assert pack_entry(number, kind, content, packet) == expected
    assert Entry(number, kind, content).pack(packet) == expected
    assert pack_entry(number, kind, memoryview(bytearray(content)), packet_type=packet) == expected


def test_largest_data() -> None:
    largest = bytes(PAGE - 17)
    assert len(pack_entry(0, 1, largest)) == PAGE
    assert Entry(0, 1, largest).data is largest
    for packing in (pack_entry, Entry):
        with pytest.raises(EntryTooLarge, match=r"at most 1,048,559 bytes of data, not 1,048,560$"):
            packing(0, 1, largest + b"!")


@pytest.mark.parametrize("kind", [-1, U32 + 1, 2**64, -(2**70)])
def test_bad_types(kind: int) -> None:
    for packing in (lambda: pack_entry(0, kind, b""), lambda: Entry(0, kind, b"")):
        with pytest.raises(BadEntryType, match=f"0 to 4294967295, not {kind}"):
            packing()


@pytest.mark.parametrize("number", [-1, U64 + 1])
def test_bad_numbers(number: int) -> None:
    for packing in (lambda: pack_entry(number, 1, b""), lambda: Entry(number, 1, b"")):
        with pytest.raises(ValueError, match=f"not {number}"):
            packing()


@pytest.mark.parametrize("packet", [-1, 256])
def test_bad_packet_types(packet: int) -> None:
    with pytest.raises(ValueError, match=f"packet type.*not {packet}"):
        pack_entry(0, 1, b"", packet)


@pytest.mark.parametrize(
    "arguments", [(1.0, 1, b""), (1, "1", b""), (1, 1, "text"), (1, 1, 3), (None, 1, b"")]
)
def test_wrong_kinds_of_arguments(arguments: Any) -> None:
    with pytest.raises(TypeError):
        pack_entry(*arguments)
    with pytest.raises(TypeError):
        Entry(*arguments)


def test_an_entry_has_fields() -> None:
    assert (ENTRY.number, ENTRY.type, ENTRY.data) == (7, 2, b"data")
    assert Entry(number=U64, type=U32, data=b"") == Entry(U64, U32, b"")
    assert repr(ENTRY) == "Entry(number=7, type=2, data=b'data')"


@pytest.mark.parametrize("kind, is_bookmark", [(0xB0, True), (0xAF, False), (0, False)])
def test_bookmarks_are_entries(kind: int, is_bookmark: bool) -> None:
    assert Entry(0, kind, b"key").is_bookmark is is_bookmark


def test_an_entry_never_changes() -> None:
    for name in ("number", "type", "data", "is_bookmark", "other"):
        with pytest.raises(AttributeError):
            setattr(ENTRY, name, 1)
    with pytest.raises(TypeError, match="is immutable"):
        ENTRY.__init__(8, 3, b"")  # type: ignore[misc]
    assert (ENTRY.number, ENTRY.type, ENTRY.data) == (7, 2, b"data")


@given(st.lists(st.tuples(all_numbers, kinds, data), min_size=1, max_size=4))
@usual
def test_equality_is_that_of_the_fields(fields: list[tuple[int, int, bytes]]) -> None:
    for ours in fields:
        for others in fields:
            assert (Entry(*ours) == Entry(*others)) is (ours == others)
            assert (Entry(*ours) != Entry(*others)) is (ours != others)
    assert len({Entry(*f) for f in fields}) == len(set(fields))


def test_an_entry_equals_nothing_else() -> None:
    assert ENTRY != (7, 2, b"data")
    assert ENTRY != None  # noqa: E711
    assert ENTRY.__eq__(7) is NotImplemented


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_pickles(protocol: int) -> None:
    assert pickle.loads(pickle.dumps(ENTRY, protocol)) == ENTRY
    assert copy.deepcopy(ENTRY) == ENTRY


def test_an_entry_without_fields_is_harmless() -> None:
    empty = Entry.__new__(Entry)
    assert empty == Entry.__new__(Entry)
    assert empty != ENTRY
    assert "None" in repr(empty)
    with pytest.raises(TypeError):
        empty.pack()


def test_no_subclasses() -> None:
    with pytest.raises(TypeError):
        type("Mine", (Entry,), {})


def test_packed_entry_scans_to_itself() -> None:
    assert list(scan(ENTRY.pack())) == [ENTRY]
