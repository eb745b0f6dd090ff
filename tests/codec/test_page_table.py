"""Walks over a page, and the table that shortens them."""

from __future__ import annotations

import bisect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from datastreamer._codec import scan
from datastreamer._pages import PageTable, entry_at, walk
from datastreamer.errors import CorruptEntries
from datastreamer.format import Header
from tests.codec.generated import damaged, exactly, pages, thorough, usual
from tests.oracle import PAGE, Damage, pack
from tests.oracle import scan as oracle_scan

# One page that begins with the first entry, of sizes that make points by count and by bytes.
SIZES = [*range(70), *([1] * 200), 9000, 3000, 3000, 3000, 20_000, *([500] * 40), 8175, 8176, 7]
FIRST = 1000
START = 4096 + 3 * PAGE
CONTENT = b"".join(pack(FIRST + i, i, bytes([i % 251]) * size) for i, size in enumerate(SIZES))
OFFSETS = [0]
for _size in SIZES:
    OFFSETS.append(OFFSETS[-1] + 17 + _size)
PADDED = CONTENT + b"\0" + b"stale" * 10


def one_page(content: bytes, due: int, file_offset: int) -> Any:
    """What a walk finds, by the oracle: up to the page's end."""
    try:
        found = oracle_scan(content[: PAGE - (file_offset - 4096) % PAGE], due, file_offset)
    except Damage as damage:
        return Damage, damage.args[0]
    return found.end, due + len(found.entries)


def walked(content: bytes, due: int, file_offset: int) -> Any:
    try:
        return walk(exactly(content), due, file_offset=file_offset)
    except CorruptEntries as error:
        return Damage, error.offset


@given(pages())
@usual
def test_walk(made: tuple[bytes, int, int]) -> None:
    assert walked(*made) == one_page(*made)


@given(st.data(), pages())
@thorough
def test_walk_over_damage(data: st.DataObject, made: tuple[bytes, int, int]) -> None:
    content = data.draw(damaged(made[0]))
    assert walked(content, *made[1:]) == one_page(content, *made[1:])


@given(st.integers(0, 200), st.binary(max_size=9))
@usual
def test_walk_keeps_to_its_span(size: int, behind: bytes) -> None:
    content = CONTENT[:size]
    found = walk(content, FIRST, file_offset=START)
    assert walk(content + behind, FIRST, file_offset=START, end=size) == found


@pytest.mark.parametrize("end", [-1, 10**7])
def test_impossible_spans(end: int) -> None:
    with pytest.raises(ValueError, match="not a span"):
        walk(CONTENT, FIRST, file_offset=START, end=end)


def test_walk_stops_at_the_end_of_the_page() -> None:
    content = pack(0, 1, bytes(23)) + pack(1, 1, b"next page")
    assert walk(content, 0, file_offset=START - 40) == (40, 1)
    with pytest.raises(CorruptEntries):
        walk(content, 0, file_offset=START - 39)
    assert walk(PADDED, FIRST, file_offset=START) == (len(CONTENT), FIRST + len(SIZES))
    with pytest.raises(CorruptEntries, match="the page begins with padding"):
        walk(b"\0", 0, file_offset=START)


@pytest.mark.parametrize("index", [0, 1, 69, 70, 275, len(SIZES) - 1])
def test_entry_at(index: int) -> None:
    for begin in {0, index // 2, index}:
        found = entry_at(PADDED[OFFSETS[begin] :], FIRST + index, start_number=FIRST + begin)
        assert found == (OFFSETS[index] - OFFSETS[begin], SIZES[index], index)
    content = exactly(CONTENT[: OFFSETS[index + 1]])
    assert entry_at(content, FIRST + index, start_number=FIRST)[0] == OFFSETS[index]
    for missing in (1, 16, 17 + SIZES[index]):
        with pytest.raises(CorruptEntries) as caught:
            entry_at(content[:-missing], FIRST + index, start_number=FIRST)
        assert caught.value.offset <= OFFSETS[index]


def test_entry_at_says_what_is_wrong() -> None:
    def reason(content: bytes, number: int, start_number: int = FIRST) -> tuple[int, str]:
        with pytest.raises(CorruptEntries) as caught:
            entry_at(content, number, start_number=start_number)
        return caught.value.offset, caught.value.reason

    end = len(CONTENT)
    assert reason(CONTENT, FIRST + len(SIZES)) == (end, "the entries end before entry 1318")
    assert reason(PADDED, FIRST + len(SIZES)) == (end, "padding where an entry is due")
    assert reason(CONTENT, FIRST + 5, FIRST + 1) == (0, "entry number 1000 where 1001 is due")
    assert reason(CONTENT[:20], FIRST + 1) == (17, "the entry is not whole")
    assert reason(CONTENT[:17] + b"\x09" + CONTENT[18:], FIRST + 1)[0] == 17
    with pytest.raises(ValueError, match="precedes entry 1001"):
        entry_at(CONTENT, FIRST, start_number=FIRST + 1)


@given(st.data())
@thorough
def test_entry_at_in_damage(data: st.DataObject) -> None:
    count = data.draw(st.integers(1, 12))
    content = data.draw(damaged(CONTENT[: OFFSETS[count]]))
    wanted = data.draw(st.integers(0, count))
    try:
        entries, at = oracle_scan(content, FIRST, None).entries, None
    except Damage as damage:
        at = damage.args[0]
        entries = oracle_scan(content[:at], FIRST, None).entries
    if wanted < len(entries):
        found = entry_at(exactly(content), FIRST + wanted, start_number=FIRST)
        assert (*found, FIRST + wanted) == entries[wanted]
    else:
        with pytest.raises(CorruptEntries) as caught:
            entry_at(exactly(content), FIRST + wanted, start_number=FIRST)
        assert at in (caught.value.offset, None)


# Tables


def check(table: PageTable, reach: int) -> None:
    """The table finds each of the first `reach` entries, after a short walk."""
    assert (table.first_number, table.next_number) == (FIRST, FIRST + reach)
    assert table.end_offset == START + OFFSETS[reach]
    for index in range(reach):
        offset, number, limit = table.find(FIRST + index)
        begin = OFFSETS[number - FIRST]
        assert offset == START + begin
        assert number <= FIRST + index < number + 32
        assert OFFSETS[index] - begin < 8192
        assert OFFSETS[index + 1] <= limit - START <= OFFSETS[reach]
        region = CONTENT[begin : limit - START]
        found = entry_at(region, FIRST + index, start_number=number)
        assert found == (OFFSETS[index] - begin, SIZES[index], index)
        entry = CONTENT[OFFSETS[index] : OFFSETS[index + 1]]
        assert table.read(FIRST + index, part_of(CONTENT), b"", 2) == entry
        assert table.read(FIRST + index, part_of(CONTENT), b"ok", 254) == b"ok\xfe" + entry[1:]
    for outside in {0, FIRST - 1, FIRST + reach}:
        with pytest.raises(IndexError, match=f"no entry {outside} in a table of 1000 to"):
            table.find(outside)
        with pytest.raises(IndexError, match=f"no entry {outside} in a table of 1000 to"):
            table.read(outside, part_of(CONTENT), b"", 2)


def part_of(content: bytes) -> Callable[[int, int], bytes]:
    """A file whose page at START holds `content`."""

    def read(size: int, offset: int) -> bytes:
        assert offset >= START
        return content[offset - START : offset - START + size]

    return read


@given(st.data())
@thorough
def test_reading_by_a_table_of_other_bytes(data: st.DataObject) -> None:
    """What a walk from the same point would not find is not given; what it finds is."""
    table = PageTable(FIRST, START)
    table.extend(CONTENT, START)
    content = data.draw(damaged(CONTENT))
    number = FIRST + data.draw(st.integers(0, len(SIZES) - 1))
    offset, near, limit = table.find(number)
    region = bytes(content[offset - START : limit - START])
    try:
        at, size, _ = entry_at(region, number, start_number=near)
    except CorruptEntries:
        expected = None
    else:
        expected = b"\xfe" + region[at + 1 : at + 17 + size]
    assert table.read(number, lambda *_: region, b"", 254) == expected


def test_reading_with_what_is_no_reader() -> None:
    table = PageTable(FIRST, START)
    table.extend(CONTENT, START)
    for given_back in (None, bytearray(8192), "text"):
        with pytest.raises(TypeError):
            table.read(FIRST, lambda *_, it=given_back: it, b"", 2)
    for packet in (-1, 256):
        with pytest.raises(ValueError, match=r"one byte|0 to"):
            table.read(FIRST, part_of(CONTENT), b"", packet)
    with pytest.raises(ZeroDivisionError):
        table.read(FIRST, lambda *_: 1 // 0, b"", 2)


def test_a_table_says_that_it_was_used() -> None:
    table = PageTable(FIRST, START)
    table.extend(CONTENT, START)
    assert not table.used
    table.find(FIRST)
    assert table.used
    table.used = False
    table.read(FIRST, part_of(CONTENT), b"", 2)
    assert table.used


def test_table_of_a_page() -> None:
    table = PageTable(FIRST, START)
    check(table, 0)
    assert table.extend(CONTENT, START) == len(SIZES)
    check(table, len(SIZES))
    assert not table.full
    assert table.extend(PADDED, START) == 0
    assert table.full
    assert 0 < table.nbytes < 1000
    assert repr(table).startswith("<PageTable of the page at 3149824: ")


@given(st.lists(st.integers(0, len(PADDED)), max_size=8), st.data())
@settings(max_examples=30, deadline=None)
def test_table_grows_with_the_page(ends: list[int], data: st.DataObject) -> None:
    table = PageTable(FIRST, START)
    before = 0
    for end in sorted(ends):
        begin = data.draw(st.integers(0, table.end_offset - START))
        reach = bisect.bisect_right(OFFSETS, end) - 1
        assert table.extend(PADDED[begin:end], START + begin) == reach - before
        assert table.next_number == FIRST + reach
        assert table.full == (end > len(CONTENT))
        before = reach
    check(table, before)


def test_table_needs_bytes_from_where_it_ends() -> None:
    table = PageTable(FIRST, START)
    with pytest.raises(ValueError, match="begin at file offset 3149825"):
        table.extend(CONTENT, START + 1)
    table.extend(CONTENT[:100], START)
    assert table.extend(b"", START) == 0
    assert table.extend(CONTENT[:10], START) == 0
    assert table.extend(CONTENT[: table.end_offset - START], START) == 0
    assert table.extend(CONTENT, START) > 0
    check(table, len(SIZES))


def test_table_of_a_full_page() -> None:
    content = b"".join(pack(i, 1, b"") for i in range(PAGE // 17))
    content += pack(PAGE // 17, 1, bytes(PAGE - len(content) - 17)) if PAGE % 17 > 16 else b""
    table = PageTable(0, 4096)
    assert table.extend(content + b"\0" * (PAGE - len(content)), 4096) == PAGE // 17
    assert table.full
    assert table.find(61_000)[1] == 61_000 // 16 * 16
    assert table.nbytes < 33_000
    largest = PageTable(0, 4096)
    assert largest.extend(pack(0, 1, bytes(PAGE - 17)) + b"next page", 4096) == 1
    assert (largest.full, largest.find(0)) == (True, (4096, 0, 4096 + PAGE))
    assert largest.extend(pack(0, 1, bytes(PAGE - 17)), 4096) == 0


@given(st.data())
@thorough
def test_a_damaged_page_leaves_the_table_as_it_was(data: st.DataObject) -> None:
    count = data.draw(st.integers(0, 120))
    table = PageTable(FIRST, START)
    table.extend(CONTENT[: OFFSETS[count]], START)
    edited = data.draw(damaged(CONTENT[OFFSETS[count] : OFFSETS[count] + 900]))
    before = repr(table), table.next_number, table.end_offset, table.full
    expected = one_page(edited, FIRST + count, START + OFFSETS[count])
    if expected[0] is Damage:
        with pytest.raises(CorruptEntries) as caught:
            table.extend(exactly(edited), START + OFFSETS[count])
        assert caught.value.offset == expected[1]
        assert (repr(table), table.next_number, table.end_offset, table.full) == before
        check(table, count)
    else:
        table.extend(exactly(edited), START + OFFSETS[count])
        assert (table.end_offset - START - OFFSETS[count], table.next_number) == expected


@pytest.mark.parametrize("offset", [0, 4095, 4097, START + 1, 2**63, 2**63 - PAGE + 4096])
def test_no_page_begins_there(offset: int) -> None:
    with pytest.raises(ValueError, match=f"{offset}"):
        PageTable(0, offset)


def test_real_pages(real_stream: Path) -> None:
    content = real_stream.read_bytes()
    header = Header.unpack(content[16:54])
    batch = scan(content, 0, start=4096, end=header.total_length, file_offset=4096)
    first = 0
    for start in range(4096, header.total_length, PAGE):
        page = memoryview(content)[start : min(start + PAGE, header.total_length)]
        table = PageTable(first, start)
        table.extend(page, start)
        assert walk(page, first, file_offset=start) == (table.end_offset - start, table.next_number)
        for number in range(first, table.next_number, 97):
            offset, near, limit = table.find(number)
            at, size, kind = entry_at(content[offset:limit], number, start_number=near)
            found = (offset + at, size, kind)
            assert found == (batch.offsets[number], batch.lengths[number], batch.types[number])
        first = table.next_number
    assert first == header.total_entries
