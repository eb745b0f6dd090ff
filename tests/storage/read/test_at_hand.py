"""Entries and events that are read from the page cache in one call."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from datastreamer._pages import PageTable, entry_at
from datastreamer.errors import CorruptEntries
from datastreamer.storage.disk.file_ops import OsFile
from datastreamer.storage.read._at_hand import ReadsAtHand
from tests.codec.generated import damaged, thorough
from tests.oracle import PAGE, pack
from tests.storage.made import BOOKMARK, evict

FIRST = 1000
START = 4096 + 3 * PAGE
# Of sizes that make points by count and by bytes, and two that are read to the heap.
SIZES = [*range(70), *([1] * 200), 9000, 3000, 3000, 17_000, 100_000, *([500] * 40), 7]
KEYS = [b"key %d" % at for at in range(70)]
# Each block is a bookmark, now and then a second one, and an event.
BLOCKS: list[tuple[int, bytes]] = []
for _at, _key in enumerate(KEYS):
    BLOCKS += [(BOOKMARK, _key), *([(BOOKMARK, b"more")] * (_at % 9 == 0)), (_at, _key * 20)]


class Rig:
    """A file whose page at START holds `content`, and the table of `of` (None: of `content`)."""

    def __init__(self, content: bytes, of: bytes | None = None, register: object = None) -> None:
        with tempfile.TemporaryFile() as file:
            self.file = OsFile(os.dup(file.fileno()))
        self.file.write(content, START)
        self.table = PageTable(FIRST, START)
        self.table.extend(content if of is None else of, START)
        self.pages = {START}
        self.total = 2**64 - 1
        self.reads = ReadsAtHand(self.file, register)  # type: ignore[arg-type]

    def packed(self, number: int, key: bytes | None = None) -> bytes | None:
        try:
            return self.reads.packed([self.table], self.total, self.pages, number, b"OK", 254, key)
        finally:
            assert self.reads.packed([], self.total, self.pages, number, b"OK", 254, key) is None

    def close(self) -> None:
        self.file.close()


class Register:
    """Knows two kinds of pages that need no comparison."""

    def __init__(self, states: bytes, needed: bool) -> None:
        self.states = bytearray(states)
        self.needed = needed
        self.asked: list[int] = []

    def needs(self, page: int) -> bool:
        self.asked.append(page)
        return self.needed


@pytest.fixture
def entries() -> Iterator[tuple[Rig, list[bytes]]]:
    packed = [pack(FIRST + at, at, bytes([at % 251]) * size) for at, size in enumerate(SIZES)]
    rig = Rig(b"".join(packed))
    yield rig, packed
    rig.close()


def test_every_entry(entries: tuple[Rig, list[bytes]]) -> None:
    rig, packed = entries
    for at, entry in enumerate(packed):
        assert rig.packed(FIRST + at) == b"OK\xfe" + entry[1:]
    for outside in (0, FIRST - 1, FIRST + len(packed), 2**64 - 1):
        assert rig.packed(outside) is None
    for wrong in (-1, 2**64):
        with pytest.raises(OverflowError):
            rig.packed(wrong)


def test_the_table_of_an_entry() -> None:
    """Of many tables with gaps between them."""
    rig = Rig(pack(FIRST, 1, b"data"))
    before = [PageTable(number, 4096 + at * PAGE) for at, number in enumerate((0, 10, 999))]
    after = [PageTable(number, 4096 + (4 + at) * PAGE) for at, number in enumerate((1001, 5000))]
    tables = [*before, rig.table, *after]
    for number in (0, 5, 10, 998, 999, 1001, 4999, 5000, 6000):
        assert rig.reads.packed(tables, rig.total, rig.pages, number, b"", 2) is None
    assert rig.reads.packed(tables, rig.total, rig.pages, FIRST, b"", 2) == pack(FIRST, 1, b"data")
    for wrong in ([None], [rig.file]):
        with pytest.raises(TypeError):
            rig.reads.packed(wrong, rig.total, rig.pages, FIRST, b"", 2)  # type: ignore[arg-type]
    rig.close()


def test_a_page_that_is_not_known_to_be_resident(entries: tuple[Rig, list[bytes]]) -> None:
    rig, _ = entries
    rig.pages = {START - PAGE, START + PAGE}
    assert rig.packed(FIRST) is None


@pytest.mark.parametrize(
    ("states", "needed", "asked", "found"),
    [
        (b"\3\3\3\3", True, [], True),
        (b"\3\3\3\2", True, [3], False),
        (b"\3\3\3\1\3", False, [3], True),
        (b"", True, [3], False),
        (b"\3\3\3", False, [3], True),
    ],
)
def test_a_page_to_be_compared(states: bytes, needed: bool, asked: list[int], found: bool) -> None:
    register = Register(states, needed)
    rig = Rig(pack(FIRST, 1, b"data"), register=register)
    assert (rig.packed(FIRST) is not None) == found
    assert register.asked == asked
    rig.close()


def test_a_shorter_and_a_closed_file(entries: tuple[Rig, list[bytes]]) -> None:
    rig, packed = entries
    os.ftruncate(rig.file.fileno(), START + len(packed[0]) + 10)
    assert rig.packed(FIRST) == b"OK\xfe" + packed[0][1:]
    assert rig.packed(FIRST + 1) is None
    os.ftruncate(rig.file.fileno(), START - 1)
    assert rig.packed(FIRST) is None
    rig.close()
    assert rig.packed(FIRST) is None


def test_what_left_the_page_cache(tmp_path: Path) -> None:
    """It is not waited for."""
    with (tmp_path / "file").open("w+b") as made:
        rig = Rig(pack(FIRST, 1, b"data"))
        rig.close()
        rig.file = OsFile(os.dup(made.fileno()))
        rig.reads = ReadsAtHand(rig.file, None)
        rig.file.write(pack(FIRST, 1, b"data"), START)
        rig.file.sync()
        try:
            os.preadv(made.fileno(), [bytearray(1)], START, os.RWF_NOWAIT)
        except BlockingIOError:
            pass
        except OSError:
            pytest.skip("the file system does not say what is in the page cache")
        found = []
        for _ in range(20):
            evict(tmp_path / "file")
            # The look has the system read the entry, which may be there before it returns.
            found.append(rig.packed(FIRST))
        assert None in found
        rig.file.read(1, START)
        assert rig.packed(FIRST) == b"OK\xfe" + pack(FIRST, 1, b"data")[1:]
        rig.close()


def test_the_event_after_a_bookmark() -> None:
    packed = [pack(FIRST + at, kind, data) for at, (kind, data) in enumerate(BLOCKS)]
    rig = Rig(b"".join(packed))
    for at, (kind, data) in enumerate(BLOCKS):
        found = rig.packed(FIRST + at, data)
        if kind != BOOKMARK:
            assert found is None
            continue
        event = next(i for i in range(at, len(BLOCKS)) if BLOCKS[i][0] != BOOKMARK)
        assert found == b"OK\xfe" + packed[event][1:]
        for other in (b"key", data + b"0", data[:-1] + b"x"):
            assert rig.packed(FIRST + at, other) is None
    rig.close()


def test_no_more_than_the_entries_of_the_stream() -> None:
    rig = Rig(pack(FIRST, BOOKMARK, b"key") + pack(FIRST + 1, 1, b"event"))
    for rig.total, found in ((FIRST + 2, 3), (FIRST + 1, 1), (FIRST, 0)):
        asked = [rig.packed(FIRST), rig.packed(FIRST + 1), rig.packed(FIRST, b"key")]
        assert sum(one is not None for one in asked) == found
    rig.close()


def test_no_event_after_a_bookmark() -> None:
    for rest in ([], [BOOKMARK] * 80):
        kinds = [BOOKMARK, *rest]
        rig = Rig(b"".join(pack(FIRST + at, kind, b"key") for at, kind in enumerate(kinds)))
        assert rig.packed(FIRST, b"key") is None
        rig.close()


@given(st.data())
@thorough
def test_the_event_in_damage(data: st.DataObject) -> None:
    """What a walk from the same point would not find is not given; what it finds is."""
    whole = b"".join(pack(FIRST + at, kind, key) for at, (kind, key) in enumerate(BLOCKS[:9]))
    content = bytes(data.draw(damaged(whole)))[: len(whole)]
    rig = Rig(content, of=whole)
    found = rig.packed(FIRST, KEYS[0])
    rig.close()
    entries = []
    try:
        for number in range(FIRST, FIRST + 9):
            at, size, kind = entry_at(content, number, start_number=FIRST)
            entries.append((kind, content[at + 1 : at + 17 + size]))
            if kind != BOOKMARK:
                break
    except CorruptEntries:
        pass
    expected = None
    if len(entries) > 1 and entries[0] == (BOOKMARK, pack(FIRST, BOOKMARK, KEYS[0])[1:]):
        kind, event = entries[-1]
        expected = None if kind == BOOKMARK else b"OK\xfe" + event
    assert found == expected
