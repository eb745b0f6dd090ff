"""A follower when the header goes back: another program's doing, or a failed sync's."""

from __future__ import annotations

import errno
import struct
from pathlib import Path

import pytest

from datastreamer import DataStream
from tests.storage.lab.disk import Interruption, SimDisk
from tests.storage.made import FIRST, HEADER, add, header_of, items, make

THREE = [[(1, b"one")], [(1, b"two")], [(1, b"three")]]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return make(tmp_path / "s.bin", *THREE, index="memory")


def another_program_cuts_back(path: Path, entries: int) -> None:
    """To this number of the entries with three bytes each: a header, and no record of it."""
    with path.open("r+b") as file:
        file.seek(16)
        file.write(HEADER.pack(*header_of(path)[:-2], FIRST + 20 * entries, entries))


def test_the_next_change_has_an_epoch_of_its_own(path: Path) -> None:
    """What the follower took for a change must not hide the one that the file reports, and no file
    has its epoch: positions with it may be kept, and be used elsewhere."""
    with DataStream.open(path, follow=True) as follower:
        another_program_cuts_back(path, 2)
        assert follower.refresh()
        taken = follower.epoch
        assert 1 << 52 <= taken < 1 << 53
        another_program_cuts_back(path, 1)
        with DataStream.open(path, index="memory") as stream:
            add(stream, [(1, b"new")])
            assert stream.epoch == 1
        assert follower.refresh()
        assert follower.epoch == taken + 1
        assert items(follower) == [(1, b"one"), (1, b"new")]


@pytest.mark.parametrize("data", [b"longer than before", b"", b"ab"])
def test_another_program_truncates_and_continues_between_two_looks(path: Path, data: bytes) -> None:
    """What is there shows to be another by its length, where it has as many entries."""
    entries = [b"one", b"two", data]
    with DataStream.open(path, follow=True) as follower:
        assert items(follower)[2:] == [(1, b"three")]
        packed = b"".join(
            b"\2" + struct.pack(">IIQ", 17 + len(each), 1, number) + each
            for number, each in enumerate(entries)
        )
        with path.open("r+b") as file:
            file.seek(FIRST)
            file.write(packed)
            file.seek(16)
            file.write(HEADER.pack(*header_of(path)[:-2], FIRST + len(packed), len(entries)))
        assert follower.refresh()
        assert follower.epoch != 0
        assert follower.changes_since(0) is None
        assert items(follower) == [(1, each) for each in entries]


def test_a_commit_under_an_iteration_cuts_nothing_back(path: Path) -> None:
    with DataStream.open(path, follow=True) as follower:
        for entries in (2, 1):
            another_program_cuts_back(path, entries)
            assert follower.refresh()
        with DataStream.open(path, index="memory") as stream:
            add(stream, [(1, b"two")])
            assert follower.refresh()
            batches = follower.batches(max_bytes=20)
            assert [e.data for e in next(batches)] == [b"one"]
            add(stream, [(1, b"three")])
            assert [e.data for e in next(batches)] == [b"two"]


def test_a_header_that_is_written_half_takes_nothing_back() -> None:
    """It goes back to what is on disk while a failed sync is got over, and comes again."""
    disk = SimDisk()
    process = disk.process()
    with DataStream.create("/s.bin", index="memory", sync="os", disk=process) as stream:
        add(stream, *THREE)
        with DataStream.open("/s.bin", follow=True, disk=disk.process()) as follower:
            batches = follower.batches(max_bytes=20)
            found = [next(batches).data(0)]

            def read_on(what: str) -> None:
                if what.startswith("half of") and len(found) < 3:
                    found.append(next(batches).data(0))

            # The header's totals are new then, and the record behind them is not.
            disk.watch, disk.tear = read_on, 50
            process.interruption = Interruption(0, errno.EIO, only="sync")
            stream.sync()
            disk.watch = None
            assert found == [b"one", b"two", b"three"]
            assert items(follower) == items(stream)
            assert follower.epoch == 0
