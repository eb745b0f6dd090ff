"""The records in the header page: their offsets and bytes, and that damage is noticed."""

from __future__ import annotations

import struct

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from datastreamer.format import HEADER_PAGE_SIZE, MAGIC, Header
from datastreamer.storage.header import records
from datastreamer.storage.header.page import HeaderPage
from datastreamer.storage.header.records import (
    Change,
    CommitRecord,
    Head,
    SyncedHeader,
    VisibleMark,
    Writer,
)
from datastreamer.storage.pages.hashes import EndSum

u64 = st.integers(0, 2**64 - 1)
heads = st.builds(Head, u64, u64)
sixteen = st.binary(min_size=16, max_size=16)
headers = st.builds(Header, st.integers(0, 255), u64, u64, u64, u64)
end_sums = st.tuples(sixteen, sixteen)


@st.composite
def commit_records(draw: st.DrawFn) -> CommitRecord:
    """The chains of its three sums begin with the same page."""
    chained_from = draw(st.integers(0, 2**32 - 1))
    sums = [EndSum(chain, chained_from, tail) for chain, tail in (draw(end_sums) for _ in "123")]
    return CommitRecord(
        *(draw(sixteen), draw(u64), draw(sixteen)), *(draw(heads) for _ in "123"), *sums
    )


HEADER = Header(3, 1101, 1, 5000, 7)
SUMS = [EndSum(bytes([n]) * 16, 9, bytes([n + 1]) * 16) for n in (1, 3, 5)]
RECORD = CommitRecord(
    *(b"stream id of 16.", 5, b"boot id of 16 b."),
    *(Head(4096, 0), Head(4500, 3), Head(5000, 7)),
    *SUMS,
)


def page() -> bytearray:
    made = records.new_page(HEADER)
    records.put_record(made, RECORD)
    return made


def test_the_layout() -> None:
    """It never changes: later versions read the files of this one."""
    made = page()
    assert made[:16] == MAGIC == b"polygonDATSTREAM"
    assert made[16:54] == struct.pack(">BIBQQQQ", 1, 38, 3, 1101, 1, 5000, 7)
    fields = struct.pack(
        ">8sII16sQ16sQQQQQQ",
        *(b"DSrecord", 2, 9, b"stream id of 16.", 5, b"boot id of 16 b."),
        *(4096, 0, 4500, 3, 5000, 7),
    )
    fields += b"".join(bytes([n]) * 16 for n in range(1, 7))
    assert made[64:264] == fields
    assert made[264:272] == xxhash.xxh3_64_digest(bytes(made[:264]))
    assert made[54:64] == bytes(10)
    assert made[272:] == bytes(HEADER_PAGE_SIZE - 272)

    records.put_synced(made, 0, SyncedHeader(8, b"s" * 16, 5, HEADER))
    records.put_synced(made, 1, SyncedHeader(9, b"s" * 16, 5, HEADER))
    for start, sequence in ((512, 8), (1024, 9)):
        slot = struct.pack(">8sIIQ16sQ", b"DSsynced", 1, 0, sequence, b"s" * 16, 5)
        slot += HEADER.pack() + bytes(2)
        assert made[start : start + len(slot)] == slot
        assert made[start + len(slot) :][:8] == xxhash.xxh3_64_digest(slot)
    records.put_mark(made, 5, Head(5000, 7))
    mark = struct.pack(">8sIIQQQ", b"DSmarked", 1, 0, 5, 5000, 7)
    assert made[1536:1576] == mark
    assert made[1576:1584] == xxhash.xxh3_64_digest(mark)
    assert records.put_writer(made, Writer(1234, b"b" * 16)) == (2048, 2112)
    writer = struct.pack(">8sIQ16s20x", b"DSwriter", 1, 1234, b"b" * 16)
    assert made[2048:2104] == writer
    assert made[2104:2112] == xxhash.xxh3_64_digest(writer)


def test_each_kind_has_its_own_sectors() -> None:
    """Header and commit record are written together, in a sector without other records."""
    assert records.BEFORE_SYNC == (0, 272)
    assert records.AFTER_SYNC == (512, 1584)
    assert records.WITHOUT_SYNC == (0, 1584)
    sectors = [records.RECORD_OFFSET, *records.SLOT_OFFSETS, records.MARK_OFFSET]
    sectors.append(records.WRITER_OFFSET)
    assert len({offset // 512 for offset in sectors}) == len(sectors)


@given(headers, commit_records())
def test_a_commit_record_is_read_as_it_was_written(header: Header, record: CommitRecord) -> None:
    made = records.new_page(header)
    assert records.get_record(made) is None
    records.put_record(made, record)
    assert records.get_record(made) == record
    assert records.get_record(bytes(made)) == record
    assert Header.unpack(made[16:]) == header


@given(st.integers(0, 264 * 8 + 63))
def test_every_flipped_bit_is_noticed(bit: int) -> None:
    made = page()
    made[bit // 8] ^= 1 << bit % 8
    assert records.get_record(made) is None


def test_a_foreign_header_is_noticed() -> None:
    made = page()
    records.put_header(made, HEADER._replace(total_entries=8, total_length=5100))
    assert records.get_record(made) is None


@given(headers, sixteen, u64, st.integers(0, 2**63))
def test_synced_headers_in_turn(header: Header, stream_id: bytes, epoch: int, at: int) -> None:
    made = page()
    assert records.get_synced(made) == []
    older = SyncedHeader(at, stream_id, epoch, header)
    newer = SyncedHeader(at + 1, stream_id, epoch, header._replace(version=header.version ^ 1))
    records.put_synced(made, at & 1, older)
    assert records.get_synced(made) == [older]
    records.put_synced(made, at + 1 & 1, newer)
    assert records.get_synced(made) == [newer, older]
    made[records.SLOT_OFFSETS[at & 1] + 60] ^= 1
    assert records.get_synced(made) == [newer]


@given(u64, heads, st.integers(0, 48 * 8 - 1))
def test_marks(epoch: int, head: Head, bit: int) -> None:
    made = page()
    assert records.get_mark(made) is None
    records.put_mark(made, epoch, head)
    assert records.get_mark(made) == VisibleMark(epoch, head)
    made[1536 + bit // 8] ^= 1 << bit % 8
    assert records.get_mark(made) is None


@given(u64, sixteen, st.integers(0, 64 * 8 - 1))
def test_writers(pid: int, boot: bytes, bit: int) -> None:
    made = page()
    assert records.get_writer(made) is None
    records.put_writer(made, Writer(pid, boot))
    assert records.get_writer(made) == Writer(pid, boot)
    made[2048 + bit // 8] ^= 1 << bit % 8
    assert records.get_writer(made) is None


def test_records_do_not_overlap() -> None:
    made = page()
    records.put_synced(made, 0, SyncedHeader(1, b"s" * 16, 5, HEADER))
    records.put_synced(made, 1, SyncedHeader(2, b"s" * 16, 5, HEADER))
    records.put_mark(made, 5, Head(5000, 7))
    records.put_writer(made, Writer(1, b"b" * 16))
    made[3000:3005] = b"other"  # other bytes of the page are kept
    assert records.get_record(made) == RECORD
    assert [synced.sequence for synced in records.get_synced(made)] == [2, 1]
    assert records.get_mark(made) == VisibleMark(5, Head(5000, 7))
    assert records.get_writer(made) == Writer(1, b"b" * 16)
    assert made[3000:3005] == b"other"


@pytest.mark.parametrize(("offset", "width"), [(72, 4), (520, 4), (1544, 4), (2056, 4)])
def test_a_record_of_a_later_version_is_ignored(offset: int, width: int) -> None:
    made = page()
    records.put_synced(made, 0, SyncedHeader(1, b"s" * 16, 5, HEADER))
    records.put_mark(made, 5, Head(5000, 7))
    records.put_writer(made, Writer(1, b"b" * 16))
    made[offset : offset + width] = (4).to_bytes(width, "big")
    for start, size in ((0, 264), (512, 88), (1536, 40), (2048, 56)):
        if start <= offset < start + size:
            end = start + size
            made[end : end + 8] = xxhash.xxh3_64_digest(bytes(made[start:end]))
    found = [
        records.get_record(made),
        records.get_synced(made) or None,
        records.get_mark(made),
        records.get_writer(made),
    ]
    assert found.count(None) == 1


def test_the_layout_of_changes() -> None:
    made = page()
    assert records.get_changes(made) == []
    assert records.put_change(made, Change(5, 100, 101)) == (3072, 3480)
    assert records.put_change(made, Change(6, 40, None)) == (3072, 3480)
    packed = struct.pack(">8sIIQQQQQQ", b"DSchange", 1, 2, 5, 100, 101, 6, 40, 2**64 - 1)
    assert made[3072 : 3072 + len(packed)] == packed
    assert made[3472:3480] == xxhash.xxh3_64_digest(bytes(made[3072:3472]))
    assert records.get_changes(made) == [Change(5, 100, 101), Change(6, 40, None)]
    assert records.get_record(made) == RECORD


def test_the_page_keeps_the_newest_changes() -> None:
    made = page()
    for epoch in range(1, 41):
        records.put_change(made, Change(epoch, epoch, None))
    assert [change.epoch for change in records.get_changes(made)] == list(range(25, 41))
    between = HeaderPage(made).changes_between(38, 40)
    assert between == [Change(39, 39, None), Change(40, 40, None)]
    assert HeaderPage(made).changes_between(23, 40) is None  # the page has dropped one of them
    assert HeaderPage(made).changes_between(38, 41) is None  # one was never recorded
    assert HeaderPage(made).changes_between(40, 40) is None


def test_a_change_that_was_not_completed_is_replaced() -> None:
    made = page()
    records.put_change(made, Change(6, 10, None))
    records.put_change(made, Change(6, 20, 21))
    assert records.get_changes(made) == [Change(6, 20, 21)]


@given(at=st.integers(3072, 3479), bit=st.integers(0, 7))
def test_damaged_changes_are_ignored(at: int, bit: int) -> None:
    made = page()
    records.put_change(made, Change(6, 10, None))
    made[at] ^= 1 << bit
    assert records.get_changes(made) == []
    assert HeaderPage(made).changes_between(5, 6) is None


@given(st.data())
def test_after_commits_alone_the_short_check_finds_the_visible_end(
    data: st.DataObject,
) -> None:
    """If more was changed, or the page is not whole, it finds none."""
    before = page()
    records.put_mark(before, RECORD.epoch, RECORD.after)
    after = data.draw(heads)
    mark = Head(data.draw(u64 | st.just(after.length)), data.draw(u64))
    made = bytearray(before)
    changed = data.draw(
        st.fixed_dictionaries(
            {},
            optional={
                "stream_id": sixteen,
                "boot_id": sixteen,
                "epoch": st.integers(4, 7),
                "marked_epoch": st.integers(4, 7),
                "version": st.integers(0, 255),
            },
        )
    )
    version = changed.pop("version", HEADER.version)
    marked_epoch = changed.pop("marked_epoch", RECORD.epoch)
    record = RECORD._replace(
        after=after, after_sum=EndSum(data.draw(sixteen), 9, data.draw(sixteen)), **changed
    )
    records.put_header(made, Header(version, 1101, 1, *after))
    records.put_record(made, record)
    records.put_mark(made, marked_epoch, mark)
    found = records.committed_since(bytes(made[:1584]), bytes(before[:1584]))
    same = record._replace(after_sum=SUMS[2]) == RECORD._replace(after=after)
    if same and (version, marked_epoch) == (HEADER.version, RECORD.epoch):
        assert (found and (found, record.epoch)) == HeaderPage(made).visible
    else:
        assert found is None


@given(st.data())
def test_the_short_check_ignores_a_page_that_is_not_whole(data: st.DataObject) -> None:
    before = page()
    records.put_mark(before, RECORD.epoch, RECORD.after)
    made = bytearray(before)
    after = Head(6000, 9)
    records.put_header(made, Header(3, 1101, 1, *after))
    records.put_record(made, RECORD._replace(after=after))
    records.put_mark(made, RECORD.epoch, after)
    assert records.committed_since(bytes(made[:1584]), bytes(before[:1584])) == after
    spoiled = data.draw(st.integers(0, 271) | st.integers(1536, 1583))
    made[spoiled] ^= data.draw(st.integers(1, 255))
    assert records.committed_since(bytes(made[:1584]), bytes(before[:1584])) is None
