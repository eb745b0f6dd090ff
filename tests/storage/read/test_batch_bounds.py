"""Portions: as many entries as limits allow, counted as a scan of the file counts them."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from datastreamer import DataStream
from datastreamer.errors import DamagedEntry
from datastreamer.storage.read.batch_bounds import KEPT_BYTES, Measure, Portion
from datastreamer.storage.read.reader import Reader
from tests.storage.made import FIRST, PAGE, Scanned, make, scan_file
from tests.storage.read.test_reader import HISTORY


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("portions") / "stream.bin"
    make(made, *HISTORY)
    return made


def packed(entries: list[Scanned]) -> bytes:
    return b"".join(
        b"\2"
        + (17 + len(e.data)).to_bytes(4, "big")
        + e.type.to_bytes(4, "big")
        + e.number.to_bytes(8, "big")
        + e.data
        for e in entries
    )


def expected(entries: list[Scanned], number: int, most: int, size: int) -> list[Scanned]:
    """As the rule says it: stop before the entry that would pass a limit, but for the first."""
    found: list[Scanned] = []
    for entry in entries[number : number + most]:
        size -= 17 + len(entry.data)
        if size < 0 and found:
            break
        found.append(entry)
    return found


def check(
    reader: Reader, entries: list[Scanned], number: int, most: int, size: int, likely: int
) -> Portion:
    wanted = Measure(reader.cursor(number).offset, number, most, size, likely)
    portion = reader.portion(wanted)
    due = expected(entries, number, most, size)
    bytes_due = packed(due)
    assert (portion.entries, portion.size) == (len(due), len(bytes_due))
    assert portion.number == number + len(due)
    # A page taken as a whole is not read, however little is in it.
    assert portion.data in (None, bytes_due)
    if most * max(likely, 17) < KEPT_BYTES // 2 or size < KEPT_BYTES:
        assert (portion.data is None) == (len(bytes_due) > KEPT_BYTES)
    # The place is good to go on from.
    if portion.number < len(entries):
        batch, _ = reader.run(reader.cursor(portion.number)._replace(offset=portion.offset))
        assert batch[0].data == entries[portion.number].data
    return portion


@settings(deadline=None, max_examples=300)
@given(data=st.data())
def test_limits_are_kept_and_used_up(path: Path, data: st.DataObject) -> None:
    entries = scan_file(path)
    with DataStream.open(path, read_only=True) as stream:
        number = data.draw(st.integers(0, len(entries)), label="number")
        sizes = [17 + len(e.data) for e in entries[number : number + 4]]
        near = [sum(sizes[:k]) + d for k in range(len(sizes) + 1) for d in (-1, 0, 1)]
        size = data.draw(
            st.sampled_from([*[n for n in near if n >= 0], PAGE, 3 * PAGE, 9 * PAGE])
            | st.integers(0, 60_000),
            label="size",
        )
        most = data.draw(st.sampled_from([1, 2, 100, 10_000]) | st.integers(1, 250), label="most")
        likely = data.draw(st.sampled_from([0, 17, 100, 100_000]), label="likely")
        check(stream.reader, entries, number, most, size, likely)


def test_a_page_that_is_taken_as_a_whole_after_a_look_into_it(tmp_path: Path) -> None:
    """What was due in the one page says nothing of the next."""
    made = tmp_path / "stream.bin"
    sizes = [90, 200, 5_000, 40_000, 300_000] * 4 + [20] * 4_000
    make(made, [(1, b"x" * size) for size in sizes])
    entries = scan_file(made)
    with DataStream.open(made, read_only=True) as stream:
        for likely in range(20, 300, 20):
            check(stream.reader, entries, 0, 1 << 18, PAGE, likely)


def test_a_portion_of_a_page_that_fits_is_not_read_twice(path: Path) -> None:
    entries = scan_file(path)
    with DataStream.open(path, read_only=True) as stream:
        reader = stream.reader
        portion = check(reader, entries, 0, 1 << 20, 9 * PAGE, 100)
        assert portion.entries == len(entries)
        assert portion.data is None


def test_damage_is_reported_at_its_first_entry_and_not_before(path: Path, tmp_path: Path) -> None:
    entries = scan_file(path)
    damaged = entries[50]
    content = bytearray(path.read_bytes())
    content[damaged.offset] = 7
    copy = tmp_path / "damaged.bin"
    copy.write_bytes(content)
    with DataStream.open(copy, read_only=True) as stream:
        reader = stream.reader
        start = reader.cursor(10).offset
        portion = reader.portion(Measure(start, 10, 1000, PAGE, 100))
        assert (portion.number, portion.offset) == (50, damaged.offset)
        assert portion.data == packed(entries[10:50])
        with pytest.raises(DamagedEntry, match=f"at byte {damaged.offset}: packet type 7"):
            reader.portion(Measure(damaged.offset, 50, 1000, PAGE, 100))


def test_data_that_ends_before_the_header_says_so(tmp_path: Path) -> None:
    made = tmp_path / "stream.bin"
    make(made, [(1, b"one"), (1, b"two")])
    with DataStream.open(made, read_only=True) as stream:
        reader = Reader(stream._file.file, stream.path, stream.reader.head)
        reader.head = reader.head._replace(entries=3)
        assert reader.portion(Measure(FIRST, 0, 2, PAGE, 1)).entries == 2
        end = reader.head.length
        with pytest.raises(DamagedEntry, match="the data ends before entry 2, the header counts 3"):
            reader.portion(Measure(end, 2, 9, PAGE, 1))
