"""The bytes of `FILE.pages`, and that a record which is not whole says nothing."""

from __future__ import annotations

import random
import struct
from typing import Any

import pytest
import xxhash

from datastreamer.storage.summaries._counting import count
from datastreamer.storage.summaries.records import (
    UNKNOWN_TIME,
    Mark,
    PageSummary,
    StoredSummaries,
    pack_header,
    thinned,
)
from tests.storage.summaries.oracle import FIELDS, NONE, Page, message

ID = bytes(range(16))
NUMBERS = tuple(range(100, 118))
SUMMARY = PageSummary(
    *(b"d" * 16, 1 << 40, 500, 7, 2000, ((1 << 40, 5), ((1 << 40) + 3, 1 << 41))),
    *(1, NUMBERS, ((2, 4), (0xB0, 3))),
)


def packed_by_hand() -> bytes:
    packed = b"d" * 16
    packed += struct.pack(">QIIIHHQ", 1 << 40, 500, 7, 1, 2, 2, 2000)
    packed += struct.pack(">18Q", *NUMBERS)
    packed += struct.pack(">IIII", 2, 4, 0xB0, 3) + bytes(80)
    packed += bytes([0, 0]) + (5).to_bytes(6, "big") + bytes([0, 3]) + (1 << 41).to_bytes(6, "big")
    packed = packed.ljust(1016, b"\0")
    return packed + xxhash.xxh3_64_digest(packed + (9).to_bytes(8, "big") + ID)


def test_the_bytes_of_a_record() -> None:
    assert SUMMARY.pack(9, ID) == packed_by_hand()
    assert PageSummary.unpack(packed_by_hand(), 9, ID) == SUMMARY
    assert StoredSummaries.offset_of(9) == 512 + 9 * 1024


def test_what_a_record_says() -> None:
    assert SUMMARY.counts == {2: 4, 0xB0: 3}
    assert SUMMARY.range(1) == (102, 103)
    assert SUMMARY.range(8) == (116, 117)
    assert SUMMARY.has_ranges
    assert SUMMARY.next_number == (1 << 40) + 7
    marks_only = SUMMARY._replace(flags=0)
    assert (marks_only.counts, marks_only.counted, marks_only.has_ranges) == (None, False, False)
    assert not SUMMARY._replace(flags=3).has_ranges
    assert SUMMARY._replace(types=None).counts is None
    assert PageSummary(b"", 0, 0, 0, flags=1).range(1) is None


def test_more_types_than_a_record_holds() -> None:
    many = SUMMARY._replace(types=None)
    packed = many.pack(0, ID)
    assert packed[36:38] == b"\xff\xff"
    assert packed[192:288] == bytes(96)
    assert PageSummary.unpack(packed, 0, ID) == many


def test_the_bytes_of_the_header() -> None:
    packed = b"DSpages_" + struct.pack(">II", 1, 0) + ID
    assert pack_header(ID) == (packed + xxhash.xxh3_64_digest(packed)).ljust(512, b"\0")


@pytest.mark.parametrize("at", [*range(0, 1024, 37), 1015, 1016, 1023])
def test_a_torn_record_says_nothing(at: int) -> None:
    packed = bytearray(packed_by_hand())
    packed[at] ^= 1
    assert PageSummary.unpack(bytes(packed), 9, ID) is None


def test_a_record_of_another_page_or_stream_says_nothing() -> None:
    packed = packed_by_hand()
    assert PageSummary.unpack(packed, 8, ID) is None
    assert PageSummary.unpack(packed, 9, ID[::-1]) is None
    assert PageSummary.unpack(packed[:1023], 9, ID) is None
    assert PageSummary.unpack(b"", 9, ID) is None


FIRST = 1 << 40


@pytest.mark.parametrize(
    "fields",
    [
        {"resolution": NONE},
        {"covered": 1 << 20 | 1},
        {"entries": 0xFFFFFFFF},
        {"first": NONE - 3, "marks": ()},
        {"marks": ((FIRST, UNKNOWN_TIME),)},
        {"marks": ((FIRST, UNKNOWN_TIME - 1),)},
        {"marks": ((FIRST, 9), (FIRST + 1, 8))},
        {"marks": ((FIRST, 9), (FIRST + 1, UNKNOWN_TIME), (FIRST + 2, 8))},
        {"marks": ((FIRST + 1, 8), (FIRST, 9))},
        {"marks": ((FIRST, 8), (FIRST, 9))},
        {"marks": ((FIRST, 8), (FIRST + 8, 9))},
    ],
)
def test_numbers_that_no_record_can_have(fields: dict[str, Any]) -> None:
    assert PageSummary.unpack(SUMMARY._replace(**fields).pack(9, ID), 9, ID) is None


def test_the_entries_whose_times_are_known() -> None:
    marks = ((FIRST, 5), (FIRST + 2, UNKNOWN_TIME), (FIRST + 4, 6), (FIRST + 7, UNKNOWN_TIME))
    made = SUMMARY._replace(marks=marks)
    assert made.spans == [(FIRST, FIRST + 2, 5), (FIRST + 4, FIRST + 7, 6)]
    assert PageSummary.unpack(made.pack(9, ID), 9, ID) == made


class InMemory:
    def __init__(self, content: bytes) -> None:
        self.content = content

    def size(self) -> int:
        return len(self.content)

    def read(self, size: int, offset: int) -> bytes:
        return self.content[offset : offset + size]

    def close(self) -> None:
        pass


def test_a_file_that_is_read() -> None:
    header = pack_header(ID).ljust(512, b"\0")
    records = bytes(1024) + SUMMARY.pack(1, ID) + SUMMARY.pack(7, ID)
    stored = StoredSummaries(InMemory(header + records))
    assert stored.stream_id() == ID
    assert stored.get_many(0, 5, ID) == [None, SUMMARY, None, None, None]
    assert StoredSummaries(InMemory(b"")).stream_id() is None
    assert StoredSummaries(InMemory(header[:39])).stream_id() is None
    damaged = bytearray(header)
    damaged[20] ^= 1
    assert StoredSummaries(InMemory(bytes(damaged))).stream_id() is None


@pytest.mark.parametrize("seed", range(20))
def test_thinned_marks_are_never_too_late(seed: int) -> None:
    """The rule that readers rely on: commits between two marks are less than a resolution after
    the first."""
    chance = random.Random(seed)
    marks: list[Mark] = []
    resolution, now, commits = 1000, 0, []
    for entry in range(2000):
        now += int(chance.choice([1, 50, 700, 3000, 50_000]) * chance.random() * 2)
        commits.append(now)
        if not marks or now >= marks[-1][1] + resolution:
            marks, resolution = thinned([*marks, (entry, now)], resolution)
        assert len(marks) <= 89
    assert marks[0] == (0, commits[0])
    assert len(marks) > 20
    following = [entry for entry, _ in marks[1:]] + [2000]
    for (entry, ms), stop in zip(marks, following, strict=True):
        assert commits[entry] == ms
        assert max(commits[entry:stop]) < ms + resolution


def test_an_unknown_time_is_not_left_out() -> None:
    marks = [(entry, entry) for entry in range(90)] + [(90, UNKNOWN_TIME)]
    kept, _ = thinned(marks, 1000)
    assert kept == [(0, 0), (90, UNKNOWN_TIME)]


def test_unknown_times_between_others() -> None:
    """They remain known to be unknown, unless the times around them are near enough."""
    marks = []
    for at in range(30):
        ms = at // 2 * 60_000 + at % 2 * 1500
        marks += [(3 * at, ms), (3 * at + 1, UNKNOWN_TIME), (3 * at + 2, ms + 1100)]
    kept, resolution = thinned(marks, 1000)
    assert resolution == 2000
    assert kept[:3] == [(0, 0), (1, UNKNOWN_TIME), (2, 1100)]
    assert kept[3:6] == [(4, UNKNOWN_TIME), (5, 2600), (6, 60_000)]
    assert len(kept) == 75


# Counts.


def packed(*entries: tuple[int, bytes], first: int = 5) -> bytes:
    found = b""
    for number, (kind, data) in enumerate(entries, first):
        found += struct.pack(">BIIQ", 2, 17 + len(data), kind, number) + data
    return found


def test_a_count_by_hand() -> None:
    content = packed(
        (2, b"\x08\x07\x10\x02\x18\x80\x02"),  # block 7 of batch 2, timestamp 256
        (2, b"\x08\x03\x12\x02xy\x08\x05"),  # twice a number: the last; field 2 of another kind
        (0xB0, b"key"),
        (3, b""),  # absent: 0
        (9, b"\xff\xff"),
    )
    ranges = [(NONE, 0)] * 9
    ranges[1], ranges[2], ranges[3], ranges[5] = (5, 7), (0, 2), (0, 256), (0, 0)
    flat = tuple(number for pair in ranges for number in pair)
    assert count(content + b"\0", len(content), FIELDS, 12) == (
        *(5, False, flat),
        ((2, 2), (3, 1), (9, 1), (0xB0, 1)),
    )


@pytest.mark.parametrize(
    "data", [b"\x08", b"\x08\xff", b"\x00\x01", b"\x0b", b"\x22\x05abc", b"\x0f", b"\x0c"]
)
def test_a_payload_that_cannot_be_read(data: bytes) -> None:
    found = count(content := packed((2, data), (1, b"")), len(content), FIELDS, 12)
    assert found is not None
    assert found[:2] == (2, True)
    assert found[3] == ((1, 1), (2, 1))


def test_payloads_of_other_types_are_not_read() -> None:
    found = count(content := packed((7, b"\x08"), (0xB0, b"\x08")), len(content), FIELDS, 12)
    assert found is not None
    assert found[1] is False


def test_thirteen_types() -> None:
    twelve = [(kind + 100, b"") for kind in range(12)]
    found = count(content := packed(*twelve), len(content), FIELDS, 12)
    assert found is not None
    assert found[3] is not None
    found = count(content := packed(*twelve, *twelve, (1, b"\x08\x03")), len(content), FIELDS, 12)
    assert found is not None
    assert (found[0], found[2][:2], found[3]) == (25, (3, 3), None)


def test_bytes_that_are_no_entries() -> None:
    content = packed((1, b""), (2, b"\x08\x01"))
    assert count(content, len(content) - 1, FIELDS, 12) is None
    assert count(content[:17] + content[:17], 34, FIELDS, 12) is None  # not in sequence
    assert count(content, 16, FIELDS, 12) is None
    assert count(b"", 0, FIELDS, 12) == (0, False, (NONE, 0) * 9, ())
    with pytest.raises(ValueError, match="ends before"):
        count(content, len(content) + 1, FIELDS, 12)


@pytest.mark.parametrize("seed", range(300))
def test_any_payload_as_a_slow_decoder_reads_it(seed: int) -> None:
    chance = random.Random(seed)
    entries = []
    for _ in range(8):
        data = b""
        for _ in range(chance.randrange(5)):
            wire = chance.choice([0, 0, 0, 1, 2, 2, 3, 4, 5, 6, 7])
            tag = chance.choice([1, 1, 2, 3, 4, 16, 700, 0]) << 3 | wire
            data += bytes([tag & 127 | 128, tag >> 7]) if tag > 127 else bytes([tag])
            body = chance.randbytes(chance.randrange(6))
            data += (
                bytes([len(body)]) + body
                if wire == 2
                else chance.randbytes({1: 8, 5: 4}.get(wire, chance.randrange(4)))
            )
        entries.append((chance.randrange(8), data))
    content = packed(*entries)
    found = count(content, len(content), FIELDS, 12)
    assert found is not None
    ranges, readable = [(NONE, 0)] * 9, True
    for kind, data in entries:
        watched = [at for at, (of, _) in enumerate(FIELDS) if of == kind]
        try:
            values = message(data)[0] if watched else {}
        except (ValueError, IndexError):
            readable = False
            break
        for at in watched:
            value, (least, greatest) = values.get(FIELDS[at][1], 0), ranges[at]
            ranges[at] = min(least, value), max(greatest, value)
    assert found[1] is not readable
    if readable:
        assert found[2] == tuple(number for pair in ranges for number in pair)


def test_the_oracle_takes_the_same_record_apart() -> None:
    page = Page(packed_by_hand(), 9, ID)
    assert (page.first, page.covered, page.entries, page.resolution) == (1 << 40, 500, 7, 2000)
    assert page.marks == [*SUMMARY.marks]
