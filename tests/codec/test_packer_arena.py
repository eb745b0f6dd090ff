"""The packer's arena: spilled while it packs, looked at, and given back."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from datastreamer._packer import EntryPacker
from datastreamer.errors import NoOperation
from tests.codec.generated import usual
from tests.codec.packing import CALLS, batch_of, begun, check, do, joined, places, steps, written
from tests.oracle import lay_out, pack

STATM = Path("/proc/self/statm")


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
    view, spans = packer.arena, [part for _, part in packer.entry_parts()]
    packer.add_entries(2, [b"x" * 1000] * 500)
    assert view == before
    everything, all_spans = packer.arena, [part for _, part in packer.entry_parts()]
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


def test_the_arena_is_kept_if_there_is_no_view_of_it() -> None:
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
