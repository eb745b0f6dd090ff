"""The agreement of a relay's file with its upstream, and which changes a file can report."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from datastreamer.errors import StreamReadOnly
from datastreamer.format import Header
from datastreamer.storage.header import records
from datastreamer.storage.header.records import Agreement, Change
from datastreamer.storage.maintain.snapshot import snapshot
from datastreamer.storage.stream import DataStream

KNOWN = Agreement(b"id of an upstream"[:16], 7, 0, 3, 9, -7)

u64 = st.integers(0, 2**64 - 1)
agreements = st.builds(
    Agreement,
    st.binary(min_size=16, max_size=16),
    *(u64, u64, u64, u64),
    st.integers(-(2**63), 2**63 - 1),
)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "stream.bin"
    with DataStream.create(path, sync="os", index="memory") as stream, stream.atomic_op() as op:
        for number in range(60):
            op.add_entry(1, bytes([number]) * 8)
    return path


def opened(path: Path) -> DataStream:
    return DataStream.open(path, sync="os", index="memory")


def test_its_offset_and_its_bytes() -> None:
    page = records.new_page(Header())
    before = bytes(page)
    assert records.get_agreement(page) is None
    assert records.put_agreement(page, KNOWN) == (3712, 3712 + 80)
    fields = struct.pack(">8sII16sQQQQq", b"DSupstrm", 1, 0, *KNOWN)
    assert page[3712:3784] == fields
    assert page[3784:3792] == xxhash.xxh3_64_digest(fields)
    records.put_agreement(page, None)
    assert page == before


@given(agreement=agreements, at=st.integers(0, 79), bits=st.integers(1, 255))
def test_damage_is_noticed(agreement: Agreement, at: int, bits: int) -> None:
    page = records.new_page(Header())
    records.put_agreement(page, agreement)
    assert records.get_agreement(page) == agreement
    page[3712 + at] ^= bits
    assert records.get_agreement(page) is None


def test_commits_and_changes_keep_it(path: Path) -> None:
    with opened(path) as stream:
        assert stream.parts.relay.agreement is None
        stream.parts.relay.put_agreement(KNOWN)
        with stream.atomic_op() as op:
            op.add_entry(1, b"more")
        stream.update_entry(3, 1, b"updated!")
        stream.truncate(50)
        assert stream.parts.relay.agreement == KNOWN
    with opened(path) as stream:
        assert stream.parts.relay.agreement == KNOWN
        stream.parts.relay.put_agreement(None)
    with opened(path) as stream:
        assert stream.parts.relay.agreement is None


def test_a_copy_has_none(path: Path, tmp_path: Path) -> None:
    """A copy was not compared with the upstream."""
    with opened(path) as stream:
        stream.parts.relay.put_agreement(KNOWN)
    snapshot(path, tmp_path / "copy.bin")
    with opened(tmp_path / "copy.bin") as stream:
        assert stream.parts.relay.agreement is None


def test_readers_cannot_write_it(path: Path) -> None:
    with (
        DataStream.open(path, read_only=True, index="memory") as stream,
        pytest.raises(StreamReadOnly),
    ):
        stream.parts.relay.put_agreement(KNOWN)


# Which changes can be reported.


def test_changes_that_a_file_reports(path: Path) -> None:
    """The writer knows all of its own changes; another open finds the last 16."""
    with opened(path) as stream, DataStream.open(path, follow=True, index="memory") as follower:
        assert stream.recorded_changes(0) == []
        made = []
        for number in range(30):
            stream.update_entry(number, 1, bytes([100 + number]) * 8)
            made.append(Change(number + 1, number, number + 1))
            if number % 7 == 0:
                follower.refresh()
        stream.truncate(40)
        made.append(Change(31, 40, None))
        follower.refresh()
        late = DataStream.open(path, follow=True, index="memory")
        for reader in (stream, follower, late):
            assert reader.recorded_epoch == 31
            assert reader.recorded_changes(31) == []
            assert reader.recorded_changes(30) == made[30:]
            assert reader.recorded_changes(15) == made[15:]
            assert reader.recorded_changes(32) is None
        assert stream.recorded_changes(0) == made
        assert follower.recorded_changes(0) == made
        assert late.recorded_changes(14) is None
        late.close()
    with opened(path) as stream:
        assert stream.recorded_changes(14) is None
        assert stream.recorded_changes(15) == made[15:]


def test_a_change_that_a_crash_interrupted_is_not_known(path: Path) -> None:
    """The epoch rises when it is undone, and a relay has to compare the entries."""
    with opened(path) as stream:
        stream.update_entry(3, 1, b"updated!")
    page = bytearray(path.read_bytes()[:4096])
    record = records.get_record(page)
    assert record is not None
    # Epoch 2 was begun: the mark's epoch is lower.
    records.put_change(page, Change(2, 20, None))
    records.put_record(page, record._replace(epoch=2))
    with open(path, "r+b") as file:
        file.write(page)
    with opened(path) as stream:
        assert stream.epoch == 3
        assert stream.recorded_changes(0) is None
        assert stream.recorded_changes(1) is None
        assert stream.recorded_changes(2) is None
        assert stream.recorded_changes(3) == []


def test_a_program_without_records_reports_nothing(path: Path) -> None:
    with DataStream.open(path, follow=True, index="memory") as follower:
        with open(path, "r+b") as file:
            file.seek(16 + 30)
            file.write((59).to_bytes(8, "big"))
            file.seek(16 + 22)
            file.write((4096 + 59 * 25).to_bytes(8, "big"))
        follower.refresh()
        assert follower.total_entries == 59
        assert follower.recorded_epoch is None
        assert follower.recorded_changes(0) is None
    with opened(path) as stream:
        # After a writer of this package has opened it, changes are reported again.
        assert stream.epoch == 1
        assert stream.recorded_changes(0) is None
        assert stream.recorded_changes(1) == []
