"""The last epoch of a stream's source: in the header page, over copies, damage and crashes."""

from __future__ import annotations

import errno
import random
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from datastreamer import DataStream
from datastreamer.errors import DamagedHeader, StreamClosed, StreamReadOnly, WriteFailed
from datastreamer.storage.header.records import (
    SOURCE,
    SOURCE_OFFSETS,
    PublisherRecord,
    get_source,
)
from datastreamer.storage.maintain.check import verify
from datastreamer.storage.maintain.repair import plan, repair
from datastreamer.storage.maintain.snapshot import snapshot
from tests.storage.lab.disk import Gone, Interruption, SimDisk, Unsettled
from tests.storage.lab.model import abandon, booted
from tests.storage.made import FaultyDisk, make

SOURCES = [PublisherRecord(number, bytes([number]) * 16) for number in range(1, 6)]
PATH = "/folder/s.bin"
FIRST, SECOND = SOURCE_OFFSETS


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return make(tmp_path / "s.bin", [(1, b"one")], [(2, b"two")])


@pytest.fixture
def granted(path: Path) -> Path:
    """A stream whose last source is the last but one of `SOURCES`."""
    with DataStream.open(path, index="memory") as stream:
        for source in SOURCES[:-1]:
            stream.parts.writer.put_source(source)
    return path


def source_of(path: Path) -> PublisherRecord:
    with DataStream.open(path, read_only=True, index="memory") as stream:
        return stream.source


def overwrite(path: Path, at: int, content: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        file.write(content)


def flip(path: Path, *places: int) -> None:
    page = path.read_bytes()[:4096]
    for at in places:
        overwrite(path, at, bytes([page[at] ^ 0x10]))


def test_what_is_kept_is_there(path: Path) -> None:
    assert source_of(path) == PublisherRecord()
    with DataStream.open(path, index="memory") as stream:
        for source in SOURCES:
            stream.parts.writer.put_source(source)
            assert stream.source == source
            assert source_of(path) == source
    assert source_of(path) == SOURCES[-1]
    with pytest.raises(StreamClosed):
        stream.parts.writer.put_source(SOURCES[0])
    with (
        DataStream.open(path, follow=True, index="memory") as follower,
        pytest.raises(StreamReadOnly),
    ):
        follower.parts.writer.put_source(SOURCES[0])


def truncated(path: Path) -> Path:
    with DataStream.open(path, index="memory") as stream:
        stream.truncate(1)
    return path


def updated(path: Path) -> Path:
    with DataStream.open(path, index="memory") as stream:
        stream.update_entry(0, 1, b"neu")
    return path


def appended(path: Path) -> Path:
    with DataStream.open(path, index="memory") as stream, stream.atomic_op() as op:
        op.add_entry(1, b"more")
    return path


def repaired(path: Path) -> Path:
    flip(path, 64)
    assert not verify(path).ok
    assert repair(path).report.ok
    return path


def snapshotted(path: Path) -> Path:
    out = path.with_name("out.bin")
    snapshot(path, out)
    return out


def snapshotted_beside_its_writer(path: Path) -> Path:
    with DataStream.open(path, index="memory"):
        return snapshotted(path)


def copied(path: Path) -> Path:
    return Path(shutil.copyfile(path, path.with_name("copy.bin")))


@pytest.mark.parametrize(
    "change",
    [
        truncated,
        updated,
        appended,
        repaired,
        snapshotted,
        snapshotted_beside_its_writer,
        copied,
        lambda path: snapshotted(truncated(copied(path))),
    ],
)
def test_whatever_is_done_to_the_stream_keeps_it(
    granted: Path, change: Callable[[Path], Path]
) -> None:
    changed = change(granted)
    assert source_of(changed) == SOURCES[-2]
    assert verify(changed).ok
    assert [*granted.parent.glob("*.source")] == []


@pytest.mark.parametrize("copy", SOURCE_OFFSETS)
def test_a_damaged_copy_is_never_an_older_epoch(granted: Path, copy: int) -> None:
    """At any byte, also where all of it is overwritten with zeros."""
    page = granted.read_bytes()[copy : copy + SOURCE.size]
    for at in range(SOURCE.size):
        flip(granted, copy + at)
        assert source_of(granted) == SOURCES[-2]
        overwrite(granted, copy, page)
    overwrite(granted, copy, bytes(SOURCE.size))
    assert source_of(granted) == SOURCES[-2]


def test_damage_to_both_copies_is_never_no_epoch(granted: Path) -> None:
    page = granted.read_bytes()[:4096]
    for at in range(SOURCE.size):
        flip(granted, FIRST + at, SECOND + at)
        assert get_source(granted.read_bytes()[:4096], page[80:96]) is None
        overwrite(granted, 0, page)
    flip(granted, FIRST, SECOND)
    copy = snapshotted(granted)
    for damaged in (granted, copy):
        with pytest.raises(DamagedHeader, match="datastreamer repair") as raised:
            source_of(damaged)
        assert raised.value.offset == FIRST
    overwrite(granted, SECOND, bytes(SOURCE.size))
    with pytest.raises(DamagedHeader):
        source_of(granted)


@pytest.mark.parametrize("sector", [2048, 3584])
def test_a_sector_that_reads_as_zeros_is_not_no_epoch(granted: Path, sector: int) -> None:
    before = source_of(granted)
    assert before.epoch
    overwrite(granted, sector, bytes(512))
    assert source_of(granted) == before


def test_a_whole_record_of_another_stream_is_not_taken_for_none(
    granted: Path, tmp_path: Path
) -> None:
    other = make(tmp_path / "other.bin", [(1, b"x")])
    overwrite(other, FIRST, granted.read_bytes()[FIRST:4096])
    with pytest.raises(DamagedHeader):
        source_of(other)
    [problem] = verify(other).problems
    assert "about another stream" in problem.what


def test_repair_writes_the_damaged_copy_again(granted: Path) -> None:
    flip(granted, FIRST + 60)
    [problem] = verify(granted).problems
    assert (problem.where, problem.what) == (
        f"byte {FIRST}",
        "the record of the source is damaged: its sum does not fit it",
    )
    assert repair(granted).report.ok
    flip(granted, SECOND)
    assert source_of(granted) == SOURCES[-2]


def test_repair_says_that_it_clears_what_is_lost(granted: Path) -> None:
    flip(granted, FIRST, SECOND)
    planned = plan(granted)
    assert any("first end all sources of the stream" in step for step in planned.steps)
    repair(granted)
    assert source_of(granted) == PublisherRecord()
    with DataStream.open(granted, index="memory") as stream:
        stream.parts.writer.put_source(SOURCES[0])
    assert source_of(granted) == SOURCES[0]


def test_the_source_s_record_names_the_stream_where_nothing_else_does(granted: Path) -> None:
    before = granted.read_bytes()[:4096]
    flip(granted, 64, 512, 1024)
    assert repair(granted).report.ok
    with DataStream.open(granted, read_only=True, index="memory") as stream:
        assert stream.stream_id == before[80:96]
        assert stream.source == SOURCES[-2]


@pytest.mark.parametrize("policy", ["commit", "os"])
def test_a_sync_that_fails_loses_no_entry(tmp_path: Path, policy: str) -> None:
    disk = FaultyDisk()
    path = tmp_path / "s.bin"
    with DataStream.create(path, sync=policy, index="memory", disk=disk) as stream:
        with stream.atomic_op() as op:
            op.add_entry(1, b"one")
        for refused in ("write", "sync"):
            disk.faults[refused] = errno.EIO
            with pytest.raises(WriteFailed):
                stream.parts.writer.put_source(SOURCES[1])
            disk.faults.clear()
            assert stream.source in (PublisherRecord(), SOURCES[1])
        stream.parts.writer.put_source(SOURCES[1])
        with stream.atomic_op() as op:
            op.add_entry(1, b"two")
    with DataStream.open(path, read_only=True, index="memory") as stream:
        assert [entry.data for entry in stream.entries()] == [b"one", b"two"]
        assert stream.source == SOURCES[1]


@given(
    done=st.integers(0, 3),
    after=st.integers(0, 8),
    error=st.sampled_from([None, errno.ENOSPC, errno.EIO]),
    power=st.booleans(),
    seed=st.integers(0, 1 << 16),
)
def test_an_epoch_that_was_kept_is_never_gone(
    done: int, after: int, error: int | None, power: bool, seed: int
) -> None:
    """And one whose call was cut off is there, or the one before it."""
    disk = SimDisk()
    process = disk.process()
    with booted(lambda: disk.boot):
        stream = DataStream.create(PATH, index="memory", disk=process)
        for source in SOURCES[:done]:
            stream.parts.writer.put_source(source)
        before = SOURCES[done - 1] if done else PublisherRecord()
        process.interruption = Interruption(after, error, lasting=error is not None)
        returned = False
        try:
            stream.parts.writer.put_source(SOURCES[done])
            returned = True
        except (Gone, WriteFailed):
            pass
        process.end()
        if power:
            luck = random.Random(seed)

            def choose(things: Sequence[Unsettled]) -> list[int]:
                return [luck.randrange(thing.versions) for thing in things]

            disk = disk.power_cut(choose)
        abandon(stream)
        with DataStream.open(PATH, index="memory", disk=disk.process()) as again:
            assert again.source in ([SOURCES[done]] if returned else [before, SOURCES[done]])
            again.parts.writer.put_source(SOURCES[done + 1])
        with DataStream.open(PATH, read_only=True, index="memory", disk=disk.process()) as reader:
            assert reader.source == SOURCES[done + 1]
