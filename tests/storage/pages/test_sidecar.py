"""The bytes of `FILE.sums`, and that a record which is not whole says nothing."""

from __future__ import annotations

import struct
from pathlib import Path

import xxhash
from hypothesis import given
from hypothesis import strategies as st

from datastreamer.storage.disk.access import Access
from datastreamer.storage.disk.file_ops import OsDisk
from datastreamer.storage.pages.sidecar import PageSum, SumsFile, SumsHeader

HEADER = SumsHeader(b"stream id of 16.", 0, 5, 6, 2**64 - 1)
RECORD = PageSum(b"c" * 16, b"d" * 16, 1000, 1_048_000, 77)


def test_the_layout() -> None:
    packed = struct.pack(">8sIIQ16sQQQ", b"DSpgsums", 1, 0, 0, b"stream id of 16.", 5, 6, 2**64 - 1)
    assert HEADER.pack() == packed + xxhash.xxh3_64_digest(packed)
    packed = struct.pack(">16s16sQIIQ", b"c" * 16, b"d" * 16, 1000, 1_048_000, 0, 77)
    bound = packed + struct.pack(">Q", 3) + b"stream id of 16."
    assert RECORD.pack(3, HEADER.stream_id) == packed + xxhash.xxh3_64_digest(bound)
    assert len(RECORD.pack(3, HEADER.stream_id)) == 64
    flagged = RECORD._replace(known=False).pack(3, HEADER.stream_id)
    assert flagged[44:48] == b"\0\0\0\1"


def test_what_was_packed_is_unpacked() -> None:
    assert SumsHeader.unpack(HEADER.pack() + b"more") == HEADER
    for record in (RECORD, RECORD._replace(known=False)):
        assert PageSum.unpack(record.pack(3, b"i" * 16), 3, b"i" * 16) == record


@given(at=st.integers(0, 63), bit=st.integers(0, 7))
def test_a_damaged_record_is_none(at: int, bit: int) -> None:
    packed = bytearray(RECORD.pack(3, b"i" * 16))
    packed[at] ^= 1 << bit
    assert PageSum.unpack(bytes(packed), 3, b"i" * 16) is None


@given(at=st.integers(0, 71), bit=st.integers(0, 7))
def test_a_damaged_header_is_none(at: int, bit: int) -> None:
    packed = bytearray(HEADER.pack())
    assert len(packed) == 72
    packed[at] ^= 1 << bit
    assert SumsHeader.unpack(bytes(packed)) is None


def test_a_record_of_another_page_or_stream_is_none() -> None:
    packed = RECORD.pack(3, b"i" * 16)
    assert PageSum.unpack(packed, 4, b"i" * 16) is None
    assert PageSum.unpack(packed, 3, b"j" * 16) is None
    assert PageSum.unpack(packed[:63], 3, b"i" * 16) is None
    assert SumsHeader.unpack(HEADER.pack()[:71]) is None


def test_records_in_a_file(tmp_path: Path) -> None:
    disk, path = OsDisk(), str(tmp_path / "s.bin.sums")
    assert SumsFile.open(disk, path, Access.private()) is None
    disk.create(path).close()
    file = SumsFile.open(disk, path, Access.private(), write=True)
    assert file is not None
    assert (file.header(), file.count()) == (None, 0)
    file.write_header(HEADER)
    records = [RECORD._replace(next_number=n) for n in range(5)]
    file.put(0, records[:2], HEADER.stream_id)
    file.put(2, records[2:], HEADER.stream_id)
    assert (file.header(), file.count()) == (HEADER, 5)
    assert file.get_many(1, 4, HEADER.stream_id) == records[1:4]
    assert file.get_many(3, 7, HEADER.stream_id) == [*records[3:], None, None]
    assert file.get(4, HEADER.stream_id) == records[4]
    assert file.get(5, HEADER.stream_id) is None
    file.truncate(3)
    file.truncate(9)
    assert file.count() == 3
    file.close()
