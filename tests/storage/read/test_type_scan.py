"""Looking for entries of some types: what is found, against a scan of the file."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from datastreamer import DataStream
from datastreamer._filtered import Choice
from datastreamer.errors import BadEntryType, DamagedEntry, UsageError
from datastreamer.format import U32_MAX
from datastreamer.storage.read.reader import Reader
from datastreamer.storage.read.type_scan import SLICE_BYTES, Matches, Wanted
from tests.storage.made import FIRST, PAGE, Scanned, make, scan_file
from tests.storage.read.test_batch_bounds import packed
from tests.storage.read.test_reader import HISTORY

LONG_RUN = 64 << 10
TYPES = [1, 2, 3, 4, 5, 6, 7, 9, 0xB0]
RUNS = [
    *HISTORY,
    # Runs of one type, of all lengths about the one from which they are found by their place.
    [(9, bytes([n]) * 3_000) for n in range(60)],
    [(9 if n % 23 else 1, bytes([n % 256]) * (700 + n)) for n in range(400)],
    [(n % 3, b"x" * (n % 90)) for n in range(12_000)],
    [(9, b"l" * 70_000), (9, b"s"), (9, b"l" * 400_000), (1, b""), (9, b"l" * 65_000)],
]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("matching") / "stream.bin"
    make(made, *RUNS)
    return made


@pytest.fixture(scope="module")
def entries(path: Path) -> list[Scanned]:
    return scan_file(path)


def check(
    reader: Reader,
    entries: list[Scanned],
    offset: int,
    number: int,
    stop: int,
    types: set[int],
    most: int,
    size: int,
) -> Matches:
    found = reader.matches(Wanted(offset, number, stop, Choice(types), most, size))
    stop = min(stop, len(entries))
    assert number < found.number <= stop or number == found.number >= stop
    due = [entry for entry in entries[number : found.number] if entry.type in types]
    bytes_due = packed(due)
    assert (found.entries, found.size) == (len(due), len(bytes_due))
    assert len(due) <= most
    assert len(bytes_due) <= size or len(due) == 1
    if found.data is not None:
        assert found.data == bytes_due
    else:
        # All of them together, and long.
        assert found.size >= LONG_RUN
        assert found.start == due[0].offset
        assert reader.raw(found.start, found.size) == bytes_due
        assert found.start + found.size == found.offset
    if found.number < stop and not found.full:
        assert found.scanned >= SLICE_BYTES
    if found.full and found.data is not None and found.number < stop:
        following = entries[found.number]
        assert following.type in types
        over = len(due) == most or len(bytes_due) + 17 + len(following.data) > size
        assert over or not long_run_is_alone(entries, found.number, types)
    return found


def long_run_is_alone(entries: list[Scanned], number: int, types: set[int]) -> bool:
    """Whether no long run begins there."""
    length = 0
    for entry in entries[number:]:
        if entry.type not in types:
            break
        length += 17 + len(entry.data)
    return length < LONG_RUN


@settings(deadline=None, max_examples=150)
@given(data=st.data())
def test_a_scan_continues_where_the_last_one_ended(
    path: Path, entries: list[Scanned], data: st.DataObject
) -> None:
    with DataStream.open(path, read_only=True) as stream:
        types = data.draw(st.sets(st.sampled_from(TYPES), min_size=1, max_size=4), label="types")
        number = data.draw(st.integers(0, len(entries)), label="number")
        stop = data.draw(st.integers(number, len(entries) + 3) | st.just(2**64 - 1), label="stop")
        most = data.draw(st.sampled_from([1, 2, 100, 1 << 18]), label="most")
        size = data.draw(
            st.sampled_from([0, 17, 1_000, 128 * 1024, 4 << 20]) | st.integers(0, 300_000),
            label="size",
        )
        offset = stream.reader.cursor(number).offset
        for _ in range(30):
            if number >= min(stop, len(entries)):
                break
            found = check(stream.reader, entries, offset, number, stop, types, most, size)
            offset, number = found.offset, found.number


def test_all_of_it(path: Path, entries: list[Scanned]) -> None:
    with DataStream.open(path, read_only=True) as stream:
        for types in ({2}, {9}, {0, 1}, {77}, set(TYPES) | {0}):
            offset, number, count = FIRST, 0, 0
            while number < len(entries):
                found = check(
                    stream.reader, entries, offset, number, 2**64 - 1, types, 1 << 18, 128 * 1024
                )
                offset, number, count = found.offset, found.number, count + found.entries
            assert count == sum(entry.type in types for entry in entries)


def test_large_entries_that_are_not_wanted_are_not_read(tmp_path: Path) -> None:
    made = tmp_path / "stream.bin"
    make(made, [(1, b"l" * (PAGE - 100)), (2, b"small")], [(1, b"l" * (PAGE - 100)), (2, b"")])
    with DataStream.open(made, read_only=True) as stream:
        read = 0
        file = stream._file.file

        class Counted:
            def read(self, size: int, offset: int) -> bytes:
                nonlocal read
                data = file.read(size, offset)
                read += len(data)
                return data

            size, close = file.size, file.close

        reader = Reader(Counted(), stream.path, stream.reader.head)
        found = reader.matches(Wanted(FIRST, 0, 4, Choice([2]), 10, 1000))
        assert (found.entries, found.number) == (1, 3)
        assert read < 600_000


@pytest.mark.parametrize("number", [50, 0])
def test_damage_is_reported_at_its_first_entry_and_not_before(
    path: Path, tmp_path: Path, number: int
) -> None:
    entries = scan_file(path)
    damaged = entries[50]
    content = bytearray(path.read_bytes())
    content[damaged.offset] = 7
    copy = tmp_path / "damaged.bin"
    copy.write_bytes(content)
    with DataStream.open(copy, read_only=True) as stream:
        reader = stream.reader
        found = reader.matches(Wanted(reader.cursor(10).offset, 10, 1000, Choice([2]), 1000, PAGE))
        assert (found.number, found.offset) == (50, damaged.offset)
        assert found.data == packed([entry for entry in entries[10:50] if entry.type == 2])
        with pytest.raises(DamagedEntry, match=f"at byte {damaged.offset}: packet type 7"):
            reader.matches(Wanted(damaged.offset, 50, 1000, Choice([2]), 1000, PAGE))


def test_padding_is_believed_if_the_next_page_continues(tmp_path: Path) -> None:
    made = tmp_path / "stream.bin"
    make(made, [(1, b"a"), (2, b"b" * (PAGE - 100)), (2, b"c" * 200)])
    entries = scan_file(made)
    content = bytearray(made.read_bytes())
    padding = entries[1].offset
    assert entries[1].offset - FIRST == 18
    with DataStream.open(made, read_only=True) as stream:
        found = stream.reader.matches(Wanted(FIRST, 0, 3, Choice([1]), 9, PAGE))
        assert (found.number, found.entries) == (3, 1)
    # As a stale cache of a network shows it: zeros where the entry is.
    content[padding : padding + PAGE // 2] = bytes(PAGE // 2)
    made.write_bytes(content)
    with DataStream.open(made, read_only=True) as stream:
        found = stream.reader.matches(Wanted(FIRST, 0, 3, Choice([1]), 9, PAGE))
        assert (found.number, found.offset) == (1, padding)
        with pytest.raises(DamagedEntry, match="the next page does not begin with entry 1"):
            stream.reader.matches(Wanted(padding, 1, 3, Choice([1]), 9, PAGE))


def test_data_that_ends_before_the_header_says_so(tmp_path: Path) -> None:
    made = tmp_path / "stream.bin"
    make(made, [(1, b"one"), (1, b"two")])
    with DataStream.open(made, read_only=True) as stream:
        reader = Reader(stream._file.file, stream.path, stream.reader.head)
        reader.head = reader.head._replace(entries=3)
        assert reader.matches(Wanted(FIRST, 0, 3, Choice([1]), 9, PAGE)).number == 2
        end = reader.head.length
        with pytest.raises(DamagedEntry, match="the data ends before entry 2, the header counts 3"):
            reader.matches(Wanted(end, 2, 9, Choice([1]), 9, PAGE))


@pytest.mark.parametrize("types", [[], range(65)])
def test_types_are_1_to_64(types: list[int]) -> None:
    with pytest.raises(UsageError, match=r"1 to 64 clauses|selects nothing"):
        Choice(types)


@pytest.mark.parametrize("kind", [-1, U32_MAX + 1])
def test_types_that_are_none(kind: int) -> None:
    with pytest.raises(BadEntryType):
        Choice([1, kind])


def test_a_type_that_is_named_twice_is_named_once() -> None:
    assert Choice([3, 1, 3, *[1] * 100]).where == (1, 3)
