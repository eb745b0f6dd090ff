"""The hashes of a stream's end, compared with an independent computation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from datastreamer import DataStream
from datastreamer._packer import EntryPacker
from datastreamer.storage.pages._page_sums import PageSums
from datastreamer.storage.pages.hashes import EMPTY, PageHash, SealedTail, last_page
from tests.storage.made import FIRST, LARGEST, PAGE, record_of, sum_at

sizes = st.one_of(
    st.sampled_from([0, 1, 200, 3000, PAGE // 2, PAGE - 17 - 17, LARGEST]),
    st.integers(0, LARGEST),
)


def test_an_empty_stream() -> None:
    assert PageSums().sum() == EMPTY == (bytes(16), 0, xxhash.xxh3_128_digest(b""))


@pytest.mark.parametrize(
    ("length", "page"),
    [(FIRST, 0), (FIRST + 17, 0), (FIRST + PAGE, 0), (FIRST + PAGE + 17, 1), (FIRST + 2 * PAGE, 1)],
)
def test_the_last_page_holds_the_last_byte(length: int, page: int) -> None:
    assert last_page(length) == page


@given(st.lists(st.lists(sizes, max_size=4), max_size=5))
def test_the_hashes_of_packed_entries(operations: list[list[int]]) -> None:
    sums, content = PageSums(), bytearray(FIRST)
    packer = EntryPacker(spill_size=1 << 30)
    packer.begin(FIRST, 0)
    length, number = FIRST, 0
    for operation in operations:
        packer.begin(length, number)
        for size in operation:
            packer.add_entry(7, bytes([size % 251]) * size)
        for offset, part in packer.entry_parts():
            sums.add(part, offset)
        for offset, start, size in packer.segments:
            content.extend(bytes(max(0, offset + size - len(content))))
            content[offset : offset + size] = packer.arena[start : start + size]
        length, number = packer.total_length, packer.next_number
        assert sums.sum() == sum_at(bytes(content), (length, number))
        assert sums.page == last_page(length)
    found = sums.finished
    assert [page.page for page in found] == list(range(sums.page))
    for page in found:
        start = FIRST + page.page * PAGE
        assert page.digest == xxhash.xxh3_128_digest(bytes(content[start : start + page.end]))
    numbers = [page.next_number for page in found]
    assert numbers == sorted(set(numbers))
    assert all(0 < each <= number for each in numbers)


def test_a_copy_is_independent() -> None:
    packer = EntryPacker(spill_size=1 << 30)
    packer.begin(FIRST, 0)
    packer.add_entries(1, [b"x" * LARGEST, b"y" * 100])
    (first, one), (second, other) = packer.entry_parts()
    sums = PageSums()
    sums.add(one, first)
    copy = sums.copy()
    sums.add(other, second)
    assert (copy.page, copy.finished) == (0, [])
    copy.add(other, second)
    assert copy.sum() == sums.sum()
    assert copy.finished == sums.finished
    assert sums.copy().finished == sums.finished


def test_a_new_chain_before_finished_pages() -> None:
    sums = PageSums(3)
    sums.finished.append(PageHash(3, 5, 9, b"d" * 16))
    sums.rechain(b"c" * 16, 0)
    assert sums.chain == xxhash.xxh3_128_digest(b"c" * 16 + b"d" * 16)
    assert sums.chained_from == 0


@pytest.mark.parametrize(
    ("entries", "offset"), [(b"short", FIRST), (bytes(17), FIRST + 2 * PAGE), (b"", FIRST)]
)
def test_what_is_refused(entries: bytes, offset: int) -> None:
    with pytest.raises(ValueError, match=r"entry|page"):
        PageSums().add(entries, offset)


def test_a_sealed_page_takes_no_entries() -> None:
    sums = PageSums(0, end=FIRST + 40, tail=SealedTail(b"t" * 16))
    assert sums.sum().tail == b"t" * 16
    with pytest.raises(ValueError, match="damaged"):
        sums.add(bytes(17), FIRST + 40)
    number = (12).to_bytes(8, "big")
    sums.add(b"\2" + bytes(8) + number + bytes(3), FIRST + PAGE)
    assert sums.finished == [PageHash(0, 40, 12, b"t" * 16)]


@pytest.mark.parametrize("sync", ["commit", "os", 20])
@pytest.mark.parametrize("spill", [4 << 20, 1000])
def test_the_record_of_a_stream_has_them(tmp_path: Path, sync: Any, spill: int) -> None:
    """However the entries were written: packed, spilled, placed, after a truncation."""
    path, other = tmp_path / "s.bin", tmp_path / "other.bin"
    with DataStream.create(other, index="memory") as source, source.atomic_op() as op:
        op.add_entries(4, [b"b" * 700_000, b"c" * 500_000, b"d" * 30])
    with DataStream.create(path, sync=sync, index="memory") as stream:
        for size in (10, LARGEST, 5, PAGE // 3, PAGE // 2, 200_000):
            with stream.atomic_op() as op:
                EntryPacker.__init__(op, spill)
                op.add_entries(2, [b"x" * size, b"y", b"z" * (size // 2)])
        assert stream._ensure_writable().end.sums.sum() == expected(stream)
        for number in (stream.total_entries - 3, 4, 3):
            stream.truncate(number)
            assert stream._ensure_writable().end.sums.sum() == expected(stream)
        with DataStream.open(other, read_only=True) as source, stream.atomic_op() as op:
            for entry in source.entries():
                op.add_entry(entry.type, entry.data)
        stream.update_entry(3, 4, b"B" * 700_000)
        assert stream._ensure_writable().end.sums.sum() == expected(stream)
    record = record_of(path)
    assert record.base == record.after
    assert record.after_sum == sum_at(path.read_bytes(), record.after)


def expected(stream: DataStream) -> Any:
    return sum_at(Path(stream.path).read_bytes(), stream._ensure_writable().end.written)
