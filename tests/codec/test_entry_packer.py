"""The packer against the oracle's layout: pages, padding, bulk calls, what is refused."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from datastreamer._codec import scan
from datastreamer._packer import EntryPacker
from datastreamer.errors import BadBookmark, BadEntryType, EntryTooLarge, NoOperation, UsageError
from tests.codec.generated import U32, U64, kinds, thorough, usual
from tests.codec.packing import (
    CALLS,
    LARGEST,
    batch_of,
    begun,
    check,
    do,
    joined,
    places,
    steps,
    written,
)
from tests.oracle import PAGE, pack


@given(places, st.integers(0, 2**40), st.lists(steps, max_size=12))
@thorough
def test_layout(length: int, number: int, taken: list[Any]) -> None:
    packer = begun(length, number)
    entries: list[tuple[int, bytes]] = []
    bookmarks: list[tuple[bytes, int]] = []
    for step in taken:
        if step[0] == "drain":
            check(packer, entries, length, number)
            bookmarks += packer.bookmarks
            packer.drain()
            assert (packer.segments, bytes(packer.arena), packer.entry_parts()) == ([], b"", [])
            # The rest continues as if committed; bookmarks stay.
            length, number = packer.total_length, packer.next_number
            entries = []
            assert packer.bookmarks == bookmarks
            packer.begin(length, number)
            bookmarks = []
        else:
            entries += do(packer, step)
    check(packer, entries, length, number)


@given(places, st.lists(steps, max_size=12))
@usual
def test_drained_pieces_make_the_same_file(length: int, taken: list[Any]) -> None:
    packer, whole = begun(length, 3), begun(length, 3)
    file: dict[int, bytes] = {}
    for step in taken:
        if step[0] == "drain":
            file |= written(packer)
            packer.drain()
        else:
            do(packer, step)
            do(whole, step)
    file |= written(packer)
    assert joined(file) == written(whole)
    assert (packer.total_length, packer.next_number) == (whole.total_length, whole.next_number)
    assert packer.bookmarks == whole.bookmarks


@pytest.mark.parametrize("left", [0, 1, 16, 17, 18, 39, 40, 41, 42])
def test_what_is_left_of_a_page(left: int) -> None:
    """An entry of 40 bytes into a page with `left` bytes left."""
    entries = [(1, bytes(PAGE - 17 - 17 - left)), (2, b""), (3, bytes(23)), (4, b"next")]
    packer = begun()
    for kind, content in entries:
        packer.add_entry(kind, content)
    check(packer, entries, 4096, 0)
    last_of_page = packer.segments[0][2]
    if left < 40:
        assert last_of_page == PAGE - left + (left > 0)
        assert left == 0 or packer.arena[last_of_page - 1] == 0
    else:
        assert last_of_page == PAGE - (left - 40) + (left > 40)


def test_full_pages_have_no_padding() -> None:
    packer = begun()
    packer.add_entries(1, [LARGEST, LARGEST, b""])
    assert packer.segments == [
        (4096, 0, PAGE),
        (4096 + PAGE, PAGE, PAGE),
        (4096 + 2 * PAGE, 2 * PAGE, 17),
    ]
    assert packer.total_length == 4096 + 2 * PAGE + 17
    full = begun()
    full.add_entry(1, LARGEST)
    assert full.total_length == 4096 + PAGE
    full.drain()
    full.add_entry(1, b"")
    assert full.segments == [(4096 + PAGE, 0, 17)]


def test_operation_begins_with_a_padding_mark() -> None:
    packer = begun(4096 + PAGE - 5, 9)
    assert packer.add_entry(1, b"x") == 9
    assert packer.segments == [(4096 + PAGE - 5, 0, 1), (4096 + PAGE, 1, 18)]
    assert [bytes(part) for _, part in packer.entry_parts()] == [pack(9, 1, b"x")]
    assert bytes(packer.arena) == b"\0" + pack(9, 1, b"x")


def test_a_padding_mark_finds_its_place_in_the_arena() -> None:
    """The first entry makes the arena just as large as it needs to be."""
    packer = begun(4096 + PAGE - 5)
    packer.add_entry(1, bytes(100_000))
    check(packer, [(1, bytes(100_000))], 4096 + PAGE - 5, 0)


def test_any_bytes_like_data() -> None:
    packer = begun()
    for like in (bytes, bytearray, memoryview, lambda b: memoryview(b"<" + b + b">")[1:-1]):
        packer.add_entry(1, like(b"data"))
        packer.add_bookmark(like(b"key"))
        packer.add_entries(1, [like(b"one"), b"two"])
        packer.add_entries(1, (like(b"one") for _ in range(2)))
    kinds_and_data = [(1, b"data"), (0xB0, b"key"), (1, b"one"), (1, b"two")]
    check(packer, [*kinds_and_data, (1, b"one"), (1, b"one")] * 4, 4096, 0)
    assert all(type(key) is bytes for key, _ in packer.bookmarks)


def test_types_from_any_iterable() -> None:
    packer = begun()

    class Kind:
        def __index__(self) -> int:
            return 5

    for types in ([1, 2], (1, 2), range(1, 3), memoryview(b"\1\2"), iter([1, 2])):
        packer.add_entries(types, [b"a", b"b"])
    packer.add_entries(Kind(), [b"a"])  # type: ignore[arg-type]
    packer.add_entry(Kind(), b"b")  # type: ignore[arg-type]
    check(packer, [(1, b"a"), (2, b"b")] * 5 + [(5, b"a"), (5, b"b")], 4096, 0)


def test_batches_are_copied_with_new_numbers() -> None:
    source = begun(4096 + PAGE - 60, 100)
    source.add_entries(1, [b"before", b"the page ends"])
    source.add_bookmark(b"key")
    file = bytearray(200)
    for offset, at, size in source.segments:
        begin = offset - (4096 + PAGE - 60)
        file[begin : begin + size] = source.arena[at : at + size]
    batch = scan(file[:127], 100, file_offset=4096 + PAGE - 60)
    packer = begun(5000, 7)
    assert packer.add_batch(batch[1:]) == range(7, 9)
    check(packer, [(1, b"the page ends"), (0xB0, b"key")], 5000, 7)


def test_bookmarks_of_other_lengths_are_copied_and_not_noted() -> None:
    entries = [(0xB0, b""), (0xB0, b"1"), (0xB0, bytes(16)), (0xB0, bytes(17))]
    packer = begun()
    packer.add_batch(batch_of(entries))
    check(packer, entries, 4096, 0)
    assert packer.bookmarks == [(b"1", 1), (bytes(16), 2)]


def test_a_batch_of_its_own_arena() -> None:
    packer = begun()
    packer.add_entries(1, [b"x" * 100] * 300)
    for _ in range(4):
        packer.add_batch(scan(packer.arena)[:300])
    check(packer, [(1, b"x" * 100)] * 1500, 4096, 0)


@given(places, st.data())
@usual
def test_a_batch_with_the_numbers_that_are_due(length: int, drawn: st.DataObject) -> None:
    """It is copied in runs: the pages are the same as for any other."""
    sizes = st.integers(0, 60) | st.sampled_from([PAGE // 2, PAGE // 3, PAGE - 17, PAGE - 18])
    several = drawn.draw(st.lists(st.tuples(kinds, sizes), min_size=1, max_size=40))
    entries = [(kind, bytes([n + 1]) * size) for n, (kind, size) in enumerate(several)]
    due = drawn.draw(st.integers(0, 2**40))
    packed = b"".join(pack(due + i, *entry) for i, entry in enumerate(entries))
    packer = begun(length, due)
    assert packer.add_batch(scan(packed)) == range(due, due + len(entries))
    check(packer, entries, length, due)


# What is refused


def refusals() -> Iterator[tuple[type[Exception], str, Any]]:
    for kind in (-1, U32 + 1, 2**80):
        yield BadEntryType, f"not {kind}", lambda p, kind=kind: p.add_entry(kind, b"")
        yield BadEntryType, f"not {kind}", lambda p, kind=kind: p.add_entries(kind, [b""])
        yield BadEntryType, f"not {kind}", lambda p, kind=kind: p.add_entries([1, kind], [b""] * 2)
    yield BadEntryType, "0xb0 belongs to bookmarks", lambda p: p.add_entry(0xB0, b"")
    yield BadEntryType, "0xb0 belongs to bookmarks", lambda p: p.add_entries(0xB0, [b""])
    yield BadEntryType, "0xb0 belongs to bookmarks", lambda p: p.add_entries([1, 0xB0], [b""] * 2)
    large = LARGEST + b"!"
    yield EntryTooLarge, "1,048,560$", lambda p: p.add_entry(1, large)
    yield EntryTooLarge, "1,048,560$", lambda p: p.add_entry(1, bytearray(large))
    yield EntryTooLarge, "item 2", lambda p: p.add_entries(1, [b"a", b"b", large, b"c"])
    yield EntryTooLarge, "item 1", lambda p: p.add_entries(1, [b"a", bytearray(large), b"c"])
    for key in (b"", bytes(17), bytearray(), memoryview(bytes(40))):
        yield BadBookmark, f"not {len(key)}", lambda p, key=key: p.add_bookmark(key)
    yield TypeError, "bytes-like", lambda p: p.add_entry(1, "text")
    yield TypeError, "bytes-like", lambda p: p.add_bookmark("text")
    yield TypeError, "bytes-like", lambda p: p.add_entries(1, [b"a", None])
    yield TypeError, "bytes-like", lambda p: p.add_entries(1, b"abc")
    yield TypeError, "object", lambda p: p.add_entries(1, 7)
    yield TypeError, "object", lambda p: p.add_entry("1", b"")
    yield TypeError, "object", lambda p: p.add_entries(["1"], [b""])
    yield TypeError, "expected .*EntryBatch", lambda p: p.add_batch([b""])
    yield ValueError, "1 types for 2 entries", lambda p: p.add_entries([1], [b"", b""])
    yield ValueError, "2 types for 1 entries", lambda p: p.add_entries([1, 2], [bytearray()])


@pytest.mark.parametrize("error, words, call", [*refusals()])
def test_refused_calls_change_nothing(error: type[Exception], words: str, call: Any) -> None:
    packer = begun(4096 + PAGE - 40, 5)
    packer.add_entry(1, b"before")
    with pytest.raises(error, match=words):
        call(packer)
    check(packer, [(1, b"before")], 4096 + PAGE - 40, 5)
    packer.add_entry(2, b"behind")
    check(packer, [(1, b"before"), (2, b"behind")], 4096 + PAGE - 40, 5)


def test_data_that_fails_in_the_middle_changes_nothing() -> None:
    def failing() -> Iterator[bytes]:
        yield b"fine"
        raise LookupError("no more")

    packer = begun()
    with pytest.raises(LookupError):
        packer.add_entries(1, failing())
    with pytest.raises(LookupError):
        packer.add_entries((len(item) for item in failing()), [b"a"])
    check(packer, [], 4096, 0)


@pytest.mark.parametrize("call", CALLS)
def test_nothing_is_added_without_an_operation(call: Any) -> None:
    packer = EntryPacker()
    assert not packer.is_open
    with pytest.raises(NoOperation, match="begin one first"):
        call(packer)
    packer.begin(4096, 0)
    assert packer.is_open
    call(packer)
    number = packer.next_number
    packer.close()
    assert not packer.is_open
    with pytest.raises(NoOperation):
        call(packer)
    assert packer.next_number == number


def test_what_was_packed_stays_until_the_next_operation() -> None:
    packer = begun()
    packer.add_bookmark(b"key")
    packer.close()
    check(packer, [(0xB0, b"key")], 4096, 0)
    kept = packer.bookmarks
    packer.begin(9000, 4)
    check(packer, [], 9000, 4)
    assert kept == [(b"key", 0)]


@pytest.mark.parametrize(
    "place", [(4095, 0), (-1, 0), (2**63, 0), (2**63 - 1, 0), (4096, -1), (4096, 2**64)]
)
def test_impossible_beginnings(place: tuple[int, int]) -> None:
    packer = begun(5000, 1)
    packer.add_entry(1, b"x")
    with pytest.raises(ValueError, match=r"not |no space"):
        packer.begin(*place)
    check(packer, [(1, b"x")], 5000, 1)


def test_numbers_end() -> None:
    packer = begun(4096, U64 - 1)
    for call in (
        lambda: packer.add_entries(1, [b"", b""]),
        lambda: packer.add_batch(batch_of([(1, b"")] * 2)),
    ):
        with pytest.raises(UsageError, match="no numbers are left for 2 entries"):
            call()
    assert packer.add_entry(1, b"last") == U64 - 1
    for call in CALLS:
        if call not in (CALLS[4], CALLS[6]):  # nothing to add
            with pytest.raises(UsageError, match="no numbers are left"):
                call(packer)
    check(packer, [(1, b"last")], 4096, U64 - 1)


def test_bad_spill_size() -> None:
    with pytest.raises(ValueError, match="at least 0, not -1"):
        EntryPacker(-1)
