"""The scanner against the oracle: whole runs, partial ones, damage."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from datastreamer._codec import EntryBatch, scan
from datastreamer.errors import CorruptEntries
from datastreamer.format import Header
from tests.codec.generated import damaged, exactly, pages, thorough, usual, wires
from tests.oracle import HEAD, PAGE, Damage, pack
from tests.oracle import scan as oracle_scan

WIRE = b"".join(pack(7 + i, 1, bytes(i)) for i in range(5))


def outcome(content: Any, due: int | None, file_offset: int | None) -> Any:
    try:
        batch = scan(exactly(content), due, file_offset=file_offset)
    except CorruptEntries as error:
        return Damage, error.offset
    first = batch.first_number
    columns = zip(batch.offsets, batch.lengths, batch.types, strict=True)
    found = [(*column, first + i) for i, column in enumerate(columns)]
    return found, batch.end, batch.needed, batch.stopped_at


def expected(content: bytes, due: int | None, file_offset: int | None) -> Any:
    try:
        return tuple(oracle_scan(content, due, file_offset))
    except Damage as damage:
        return Damage, damage.args[0]


@given(wires(), st.booleans())
@usual
def test_wire(made: tuple[bytes, int], given_number: bool) -> None:
    content, first = made
    due = first if given_number else None
    assert outcome(content, due, None) == expected(content, due, None)
    assert scan(content, due).end == len(content)


@given(pages(), st.booleans())
@usual
def test_file(made: tuple[bytes, int, int], given_number: bool) -> None:
    content, first, file_offset = made
    due = first if given_number else None
    assert outcome(content, due, file_offset) == expected(content, due, file_offset)
    assert not scan(content, due, file_offset=file_offset).more


@given(st.data(), wires())
@thorough
def test_damaged_wire(data: st.DataObject, made: tuple[bytes, int]) -> None:
    content, first = data.draw(damaged(made[0])), made[1]
    for due in (first, None):
        assert outcome(content, due, None) == expected(content, due, None)


@given(st.data(), pages())
@thorough
def test_damaged_file(data: st.DataObject, made: tuple[bytes, int, int]) -> None:
    content, first, file_offset = data.draw(damaged(made[0])), made[1], made[2]
    for due in (first, None):
        assert outcome(content, due, file_offset) == expected(content, due, file_offset)


@given(st.binary(max_size=120), st.sampled_from([None, 4096, 4097, 4096 + PAGE - 40]))
@usual
def test_noise(content: bytes, file_offset: int | None) -> None:
    for due in (0, None):
        assert outcome(content, due, file_offset) == expected(content, due, file_offset)


@given(st.data(), pages(), st.binary(max_size=60), st.binary(max_size=60))
@usual
def test_what_surrounds_the_span_does_not_matter(
    data: st.DataObject, made: tuple[bytes, int, int], before: bytes, behind: bytes
) -> None:
    content, first, file_offset = made
    end = data.draw(st.integers(0, len(content)))
    alone = outcome(content[:end], first, file_offset)
    embedded = before + content[:end] + behind
    span = {"start": len(before), "end": len(before) + end}
    batch = scan(embedded, first, file_offset=file_offset, **span)
    shifted = [offset - len(before) for offset in batch.offsets]
    assert [offset for offset, *_ in alone[0]] == shifted
    assert (batch.end - len(before), batch.needed) == alone[1:3]
    assert batch.packed() == scan(content[:end], first, file_offset=file_offset).packed()


@given(wires(), st.lists(st.integers(0, 400), max_size=6))
@usual
def test_wire_in_pieces(made: tuple[bytes, int], cuts: list[int]) -> None:
    """What one pass calls "more to come" is found by the next, with more bytes."""
    content, due = made
    got = []
    kept = b""
    ends = sorted({min(cut, len(content)) for cut in cuts} | {len(content)})
    for begin, end in zip([0, *ends], ends, strict=False):
        kept += content[begin:end]
        batch = scan(kept, due)
        got += list(batch)
        due = batch.next_number
        kept = kept[batch.end :]
        assert batch.more == bool(kept)
        assert batch.needed > len(kept) if kept else batch.needed == 0
    assert got == list(scan(content))


@pytest.mark.parametrize("have", range(1, 20))
def test_incomplete_entry_says_what_it_needs(have: int) -> None:
    entry = pack(0, 1, b"abc")
    batch = scan(entry + pack(1, 1, b"de!")[:have], 0)
    assert (len(batch), batch.end, batch.more) == (1, 20, True)
    assert batch.needed == (17 if have < 17 else 20)


def test_needed_counts_from_the_end_over_padding() -> None:
    content = pack(0, 1, b"") + bytes(3) + pack(1, 1, b"ab")[:18]
    batch = scan(content, 0, file_offset=4096 + PAGE - 20)
    assert (batch.end, batch.more, batch.needed) == (17, True, 3 + 19)


@pytest.mark.parametrize("byte", [0, 1, 3, 0xFE, 0xFF])
def test_wire_ends_at_another_packet(byte: int) -> None:
    batch = scan(WIRE + bytes([byte]) + WIRE, 7)
    assert (len(batch), batch.end, batch.stopped_at) == (5, len(WIRE), byte)
    assert not batch.more
    first = scan(bytes([byte]), 7)
    assert (len(first), first.end, first.stopped_at, first.first_number) == (0, 0, byte, 7)


def damage(content: bytes, **options: Any) -> tuple[int, str]:
    with pytest.raises(CorruptEntries) as caught:
        scan(content, **options)
    assert str(caught.value) == f"at byte {caught.value.offset}: {caught.value.reason}"
    return caught.value.offset, caught.value.reason


def test_each_damage_has_its_reason_and_offset() -> None:
    good = pack(0, 1, b"good")
    file = {"first_number": 0, "file_offset": 5000}
    assert damage(good + b"\3" * 40, **file) == (
        21,
        "packet type 3 is neither an entry (2) nor padding (0)",
    )
    assert damage(good + HEAD.pack(2, 16, 1, 1), first_number=0) == (
        21,
        "entry length 16 does not cover the head of 17 bytes",
    )
    assert damage(good + HEAD.pack(2, PAGE + 1, 1, 1), first_number=0) == (
        21,
        "entry length 1048577 is above the maximum of 1048576 bytes",
    )
    assert damage(good + pack(2, 1, b""), first_number=0) == (21, "entry number 2 where 1 is due")
    assert damage(good, first_number=1) == (0, "entry number 0 where 1 is due")
    assert damage(good, first_number=0, file_offset=4096 + PAGE - 20) == (
        0,
        "the entry extends past the end of its page, which is 20 bytes away",
    )
    assert damage(good[:3], first_number=0, file_offset=4096 + PAGE - 16)[0] == 0
    assert damage(bytes(8), first_number=0, file_offset=4096 + PAGE) == (
        0,
        "the page begins with padding, not with an entry",
    )
    assert damage(good + bytes(20), first_number=0, file_offset=4096 + PAGE - 21)[0] == 21
    last = pack(2**64 - 1, 1, b"")
    assert damage(last)[1] == "entry number 18446744073709551615 is due, and no entry can have it"


def test_padding_may_begin_the_span_or_end_it() -> None:
    entry = pack(5, 1, b"x")
    padded = b"\0stale" + entry
    batch = scan(padded, 5, file_offset=4096 + PAGE - 6)
    assert (batch.start, batch.end, len(batch), batch.offsets[0]) == (0, 24, 1, 6)
    assert batch.packed() == entry
    assert scan(entry + b"\0", 5, file_offset=4096 + PAGE - 300).end == len(entry)
    assert scan(b"\0", 5, file_offset=4096 + PAGE - 1).end == 0


def test_largest_entry_fills_a_page() -> None:
    content = pack(0, 1, bytes(PAGE - 17)) + pack(1, 1, b"next")
    batch = scan(content, 0, file_offset=4096)
    assert list(batch.lengths) == [PAGE - 17, 4]
    assert list(scan(content, 0).lengths) == [PAGE - 17, 4]
    partial = scan(content[: PAGE - 1], 0)
    assert (len(partial), partial.more, partial.needed) == (0, True, PAGE)


def test_empty_batches() -> None:
    for number in (None, 0, 12):
        batch = scan(b"", number)
        assert (len(batch), batch.first_number, batch.next_number) == (0, number or 0, number or 0)
        assert list(batch) == []
        assert (batch.packed(), batch.nbytes, batch.more, batch.needed) == (b"", 0, False, 0)
        assert batch.offsets.tolist() == batch.lengths.tolist() == batch.types.tolist() == []
    assert scan(pack(9, 1, b"abc")[:18]).first_number == 9
    assert scan(pack(9, 1, b"abc")[:16]).first_number == 0


@pytest.mark.parametrize(
    "options",
    [
        {"start": -1},
        {"start": 4, "end": 3},
        {"end": 10_000},
        {"start": 10_000},
        {"first_number": -1},
        {"first_number": 2**64},
        {"file_offset": 4095},
        {"file_offset": -1},
        {"file_offset": 2**63},
    ],
)
def test_impossible_arguments(options: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="not ") as caught:
        scan(WIRE, **options)
    assert not isinstance(caught.value, CorruptEntries)


@pytest.mark.parametrize(
    "buffer", [bytes, bytearray, memoryview, lambda b: memoryview(bytearray(b))]
)
def test_any_buffer(buffer: Any) -> None:
    base = buffer(WIRE)
    batch = scan(base)
    assert batch.base is base
    assert batch.packed() == WIRE


def test_no_buffer() -> None:
    with pytest.raises(TypeError):
        scan("text")  # type: ignore[arg-type]
    with pytest.raises(BufferError):
        scan(memoryview(WIRE)[::2])


def test_many_entries_in_a_large_buffer() -> None:
    """Large enough to let the GIL go and to outgrow the first guess at the columns."""
    sizes = [0] * 300 + [3000] * 400 + [5] * 60_000
    content = b"".join(pack(i, i % 7, bytes(size)) for i, size in enumerate(sizes))
    batch = scan(content, 0)
    assert batch.lengths.tolist() == sizes
    assert batch.types.tolist() == [i % 7 for i in range(len(sizes))]
    assert (batch.end, batch.nbytes, batch.stopped_at) == (len(content), len(content), -1)
    with pytest.raises(CorruptEntries) as caught:
        scan(content + b"\2" + bytes(16), 0)
    assert caught.value.offset == len(content)


# Recorded streams


def whole(content: bytes) -> tuple[EntryBatch, Header]:
    header = Header.unpack(content[16:54])
    return scan(content, 0, start=4096, end=header.total_length, file_offset=4096), header


def test_golden_files(golden: Any) -> None:
    for name in golden.names():
        content = golden.content(name)
        batch, header = whole(content)
        assert (len(batch), batch.end) == (
            header.total_entries,
            header.total_length if header.total_entries else 4096,
        )
        listed = golden.entries(name)
        assert batch.offsets.tolist() == [line["offset"] for line in listed]
        for entry, line in zip(batch, listed, strict=True):
            assert (entry.number, entry.type) == (line["number"], line["type"])
            assert 17 + len(entry.data) == line["length"]
        sums = golden.manifest(name)["file"]["sha256_entries"]
        assert hashlib.sha256(batch.packed()).hexdigest() == sums


@pytest.fixture(scope="module")
def real(real_stream: Path) -> tuple[bytes, EntryBatch]:
    content = real_stream.read_bytes()
    return content, whole(content)[0]


def test_real_stream(real: tuple[bytes, EntryBatch]) -> None:
    content, batch = real
    header = Header.unpack(content[16:54])
    assert len(batch) == header.total_entries == 34_723
    assert batch.end == header.total_length
    span = content[4096 : header.total_length]
    assert outcome(span, 0, 4096) == expected(span, 0, 4096)


@given(st.data())
@thorough
def test_damaged_real_stream(real: tuple[bytes, EntryBatch], data: st.DataObject) -> None:
    content, batch = real
    at = data.draw(st.integers(0, len(batch) - 1))
    start = batch.offsets[at]
    edited = data.draw(damaged(content[start : start + data.draw(st.integers(1, 3000))]))
    for due in (batch.first_number + at, None):
        for file_offset in (None, start):
            assert outcome(edited, due, file_offset) == expected(edited, due, file_offset)
