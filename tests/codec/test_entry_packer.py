"""The packer against the oracle's layout: pages, padding, bulk calls, spilling, views."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from datastreamer._codec import EntryBatch, scan
from datastreamer._packer import EntryPacker
from datastreamer.errors import (
    BadBookmark,
    BadEntryType,
    EntryTooLarge,
    NoOperation,
    UsageError,
)
from tests.codec.made_up import U32, U64, data, event_kinds, kinds, thorough, usual
from tests.oracle import PAGE, lay_out, pack

LARGEST = bytes(PAGE - 17)
STATM = Path("/proc/self/statm")


def begun(
    total_length: int = 4096, total_entries: int = 0, spill_size: int = 4 << 20
) -> EntryPacker:
    packer = EntryPacker(spill_size)
    packer.begin(total_length, total_entries)
    return packer


def written(packer: EntryPacker) -> dict[int, bytes]:
    """The file's bytes by offset, as the segments say."""
    arena = packer.arena
    return {offset: bytes(arena[at : at + length]) for offset, at, length in packer.segments}


def joined(pieces: dict[int, bytes]) -> dict[int, bytes]:
    """Adjacent pieces of one page, joined."""
    whole: dict[int, bytes] = {}
    last = -1
    for offset, piece in pieces.items():
        if last >= 0 and offset == last + len(whole[last]) and (offset - 4096) % PAGE:
            whole[last] += piece
        else:
            last = offset
            whole[last] = piece
    return whole


def check(packer: EntryPacker, entries: list[tuple[int, bytes]], length: int, number: int) -> None:
    """The packer holds exactly `entries`, for a stream that ended at `length` and `number`."""
    pieces, end = lay_out(entries, length, number)
    assert written(packer) == joined(pieces)
    assert (packer.total_length, packer.next_number) == (end, number + len(entries))
    spans = b"".join(bytes(span) for span in packer.entry_spans())
    assert spans == b"".join(pack(number + i, *entry) for i, entry in enumerate(entries))
    assert packer.bookmarks == [
        (data, number + i)
        for i, (kind, data) in enumerate(entries)
        if kind == 0xB0 and 1 <= len(data) <= 16
    ]
    at = 0
    for offset, begin, size in packer.segments:
        assert begin == at
        assert size > 0
        assert (offset - 4096) // PAGE == (offset + size - 1 - 4096) // PAGE
        at += size
    assert at == len(packer.arena)


keys = st.binary(min_size=1, max_size=16)
places = st.one_of(
    st.sampled_from([4096, 4096 + PAGE, 4096 + 5 * PAGE - 1]),
    st.integers(1, 400).map(lambda before: 4096 + 9 * PAGE - before),
)
steps = st.one_of(
    st.tuples(st.just("add_entry"), event_kinds, data),
    st.tuples(st.just("add_bookmark"), keys),
    st.tuples(st.just("add_entries"), event_kinds, st.lists(data, max_size=5)),
    st.tuples(st.just("with types"), st.lists(st.tuples(event_kinds, data), max_size=5)),
    st.tuples(st.just("add_batch"), st.lists(st.tuples(kinds, data), max_size=5)),
    st.tuples(st.just("drain")),
)


def batch_of(entries: list[tuple[int, bytes]]) -> EntryBatch:
    return scan(b"".join(pack(50 + i, *entry) for i, entry in enumerate(entries)))


def do(packer: EntryPacker, step: Any) -> list[tuple[int, bytes]]:
    """Take the step; what it added."""
    first = packer.next_number
    match step:
        case "add_entry", kind, content:
            assert packer.add_entry(kind, content) == first
            return [(kind, content)]
        case "add_bookmark", key:
            assert packer.add_bookmark(key) == first
            return [(0xB0, key)]
        case "add_entries", kind, contents:
            assert packer.add_entries(kind, contents) == range(first, first + len(contents))
            return [(kind, content) for content in contents]
        case "with types", entries:
            types = [kind for kind, _ in entries]
            numbers = packer.add_entries(types, (content for _, content in entries))
            assert numbers == range(first, first + len(entries))
            return list(entries)
        case "add_batch", entries:
            assert packer.add_batch(batch_of(entries)) == range(first, first + len(entries))
            return list(entries)
    raise AssertionError(step)


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
            assert (packer.segments, bytes(packer.arena), packer.entry_spans()) == ([], b"", [])
            # The rest goes on as if committed; bookmarks stay.
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
    assert [bytes(span) for span in packer.entry_spans()] == [pack(9, 1, b"x")]
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


CALLS = [
    lambda p: p.add_entry(1, b""),
    lambda p: p.add_entry(1, bytearray()),
    lambda p: p.add_bookmark(b"k"),
    lambda p: p.add_entries(1, [b""]),
    lambda p: p.add_entries(1, []),
    lambda p: p.add_batch(batch_of([(1, b"")])),
    lambda p: p.add_batch(batch_of([])),
]


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
    with pytest.raises(ValueError, match=r"not |no place"):
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


# Spilling


class Spiller(EntryPacker):
    """Writes to a dictionary what a stream would write to its file."""

    def __init__(self, spill_size: int) -> None:
        super().__init__(spill_size)
        self.file: dict[int, bytes] = {}
        self.largest = 0
        self.fail = False

    def spill(self) -> None:
        self.largest = max(self.largest, len(self.arena))
        if self.fail:
            raise OSError("disk full")
        self.file |= written(self)
        self.drain()

    def finished(self) -> dict[int, bytes]:
        return joined(self.file | written(self))


@given(places, st.integers(0, 500), st.lists(steps.filter(lambda s: s[0] != "drain"), max_size=20))
@usual
def test_spilling_makes_the_same_file(length: int, spill_size: int, taken: list[Any]) -> None:
    packer, whole = Spiller(spill_size), begun(length, 3)
    packer.begin(length, 3)
    for step in taken:
        do(packer, step)
        do(whole, step)
    assert packer.finished() == written(whole)
    assert packer.largest <= spill_size + 17 + 300 + 1
    assert packer.bookmarks == whole.bookmarks
    assert (packer.total_length, packer.next_number) == (whole.total_length, whole.next_number)


@pytest.mark.parametrize("size", [0, 32, 2000])
@pytest.mark.parametrize("kind", [bytes, bytearray])
def test_bulk_calls_spill_in_the_middle(size: int, kind: Any) -> None:
    packer = Spiller(10_000)
    packer.begin(4096, 0)
    contents = [kind(bytes([i % 256]) * size) for i in range(3000)]
    assert packer.add_entries(1, contents) == range(3000)
    packer.add_batch(batch_of([(2, bytes(content)) for content in contents]))
    assert 10_000 < packer.largest <= 10_000 + 17 + size + 1
    pieces, end = lay_out([(k, bytes(c)) for k in (1, 2) for c in contents], 4096, 0)
    assert (packer.finished(), packer.total_length) == (joined(pieces), end)


def test_nothing_may_change_the_items_while_they_are_packed() -> None:
    class Emptying(Spiller):
        items: list[bytes]

        def spill(self) -> None:
            super().spill()
            self.items.clear()
            self.others = [[None] * 100 for _ in range(50)]  # takes the memory, if it can

    packer = Emptying(200)
    packer.begin(4096, 0)
    for made in (bytes, bytearray):
        packer.items = [made(b"%d" % i * 20) for i in range(100)]
        expected = [bytes(item) for item in packer.items]
        first = packer.next_number
        assert packer.add_entries(1, packer.items) == range(first, first + 100)
        assert not packer.items
    pieces, _ = lay_out([(1, content) for content in expected * 2], 4096, 0)
    assert packer.finished() == joined(pieces)


def test_types_may_not_change_the_items_either() -> None:
    items = [b"some data" * 9 for _ in range(50)]

    class Evil:
        def __index__(self) -> int:
            items.clear()
            gc.collect()
            return 1

    packer = begun()
    with pytest.raises(ValueError, match="2 types for 0 entries"):
        packer.add_entries([Evil(), 1], items)  # type: ignore[list-item]
    check(packer, [], 4096, 0)


def test_a_failing_spill_leaves_the_entry_out() -> None:
    packer = Spiller(100)
    packer.begin(4096, 0)
    packer.add_entry(1, bytes(200))
    packer.fail = True
    for call in CALLS:
        if call not in (CALLS[4], CALLS[6]):  # nothing to add
            with pytest.raises(OSError, match="disk full"):
                call(packer)
        check(packer, [(1, bytes(200))], 4096, 0)
    packer.fail = False
    packer.add_entry(2, b"again")
    pieces, end = lay_out([(1, bytes(200)), (2, b"again")], 4096, 0)
    assert (packer.finished(), packer.total_length) == (joined(pieces), end)


def test_a_spill_that_fails_within_a_bulk_call_leaves_the_entries_before_it() -> None:
    packer = Spiller(100)
    packer.begin(4096, 0)
    packer.fail = True
    with pytest.raises(OSError, match="disk full"):
        packer.add_entries(1, [bytes(40)] * 10)
    assert packer.next_number == 2
    check(packer, [(1, bytes(40))] * 2, 4096, 0)
    packer.fail = False
    packer.add_entries(1, [bytes(40)] * 8)
    pieces, _ = lay_out([(1, bytes(40))] * 10, 4096, 0)
    assert packer.finished() == joined(pieces)


def test_a_spill_may_end_the_operation_and_may_not_add() -> None:
    class Closing(EntryPacker):
        def spill(self) -> None:
            self.close()

    class Adding(EntryPacker):
        def spill(self) -> None:
            self.drain()
            self.add_entry(9, b"no")

    for kind, error in ((Closing, NoOperation), (Adding, RuntimeError)):
        packer = kind(0)
        packer.begin(4096, 0)
        packer.add_entry(1, b"x")
        with pytest.raises(error):
            packer.add_entry(1, b"y")


def test_a_spill_that_does_not_drain_is_called_seldom() -> None:
    calls = []

    class Counting(EntryPacker):
        def spill(self) -> None:
            calls.append(len(self.arena))

    packer = Counting(10_000)
    packer.begin(4096, 0)
    for _ in range(1000):
        packer.add_entry(1, bytes(83))
    assert calls == [10_100, 20_200, 30_300, 40_400, 50_500, 60_600, 70_700, 80_800, 90_900]
    packer.begin(4096, 0)
    packer.add_entries(1, [bytes(83)] * 102)
    assert calls[9:] == [10_100]


def test_the_plain_packer_keeps_everything() -> None:
    packer = begun(spill_size=0)
    packer.add_entries(1, [bytes(5)] * 100)
    check(packer, [(1, bytes(5))] * 100, 4096, 0)


# Views


def test_views_neither_move_nor_change() -> None:
    packer = begun()
    packer.add_entries(1, [b"first", b"second"])
    before = bytes(packer.arena)
    view, spans = packer.arena, packer.entry_spans()
    packer.add_entries(2, [b"x" * 1000] * 500)
    assert view == before
    everything, all_spans = packer.arena, packer.entry_spans()
    copy = bytes(everything)
    packer.drain()
    packer.add_entries(3, [b"y" * 40] * 100)
    assert everything == b"".join(all_spans) == copy
    last = packer.arena
    copy_of_last = bytes(last)
    packer.begin(4096, 0)
    packer.add_entry(4, b"z" * 40)
    check(packer, [(4, b"z" * 40)], 4096, 0)
    assert last == copy_of_last
    del packer
    gc.collect()
    assert view == before
    assert b"".join(spans) == before
    assert view.readonly
    assert (view.format, view.itemsize, view.ndim) == ("B", 1, 1)
    with pytest.raises(TypeError):
        view[0] = 1


def test_the_arena_is_kept_where_nobody_looks_at_it() -> None:
    packer = begun()
    packer.add_entry(1, b"x")
    first = packer.arena.obj
    for forget in (packer.drain, lambda: packer.begin(4096, 0)):
        forget()
        packer.add_entry(1, b"y")
        assert packer.arena.obj is first
    view = packer.arena
    packer.drain()
    assert packer.arena.obj is not first
    assert view.tobytes() == pack(0, 1, b"y")


def test_data_from_the_arena_itself() -> None:
    packer = begun()
    packer.add_entry(1, b"abc" * 100)
    for _ in range(12):
        packer.add_entry(1, packer.arena[17:317])
        packer.add_entries(1, [packer.arena[17:317]] * 50)
    check(packer, [(1, b"abc" * 100)] * 613, 4096, 0)


@pytest.mark.skipif(not STATM.exists(), reason="no /proc to see a process's memory in")
@pytest.mark.skipif("ASAN_OPTIONS" in os.environ, reason="a sanitizer keeps what is freed")
def test_a_huge_operation_does_not_keep_its_memory() -> None:
    """In a process of its own: what other tests left of the heap would be used again."""
    code = """
import resource
from datastreamer._packer import EntryPacker

def resident():
    with open("/proc/self/statm") as source:
        return int(source.read().split()[1]) * resource.getpagesize()

class Packer(EntryPacker):
    def spill(self):
        pass

packer = Packer(spill_size=1000)
packer.begin(4096, 0)
packer.add_entries(1, [bytes(1_048_559)] * 64)
huge = resident()
packer.begin(4096, 0)
print(huge - resident())
packer.add_entry(1, b"small")
assert packer.next_number == 1
"""
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(found.stdout) > 48 << 20


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
