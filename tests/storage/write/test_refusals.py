"""A disk that refuses, at any step: what a writer says, leaves, and gets over."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from datastreamer import DataStream
from datastreamer.errors import (
    CommitInDoubt,
    EntriesLost,
    NoOperation,
    StreamFileError,
    WriteFailed,
)
from datastreamer.storage.parts import ChangeBegins, ChangeEnds
from tests.storage.made import (
    BOOKMARK,
    FIRST,
    LARGEST,
    ONE,
    PAGE,
    TWO,
    FaultyDisk,
    Item,
    add,
    bookmarks_of,
    header_of,
    items,
    make,
    scan_file,
    size_of,
)

ROOT = Path(__file__).resolve().parents[3]


def check_untouched(stream: DataStream, path: Path, want: list[Item]) -> None:
    assert items(stream) == want
    assert stream.total_entries == len(want)
    assert header_of(path)[-1] == len(want)
    size_of(path)


@pytest.mark.parametrize("sync", ["commit", "os"])
def test_a_full_disk_when_the_file_grows(tmp_path: Path, sync: Any) -> None:
    path, disk = tmp_path / "s.bin", FaultyDisk()
    with DataStream.create(path, index="memory", sync=sync, disk=disk) as stream:
        add(stream, ONE)
        disk.largest = FIRST + PAGE
        stream.start_atomic_op()
        stream.add_entry(1, bytes(LARGEST))
        for _ in range(2):
            with pytest.raises(WriteFailed, match="No space left on device") as caught:
                stream.commit_atomic_op()
            assert not isinstance(caught.value, CommitInDoubt)
            check_untouched(stream, path, ONE)
        disk.largest = None
        stream.commit_atomic_op()  # the same operation, made again
        assert items(stream) == [*ONE, (1, bytes(LARGEST))]
        disk.largest = stream.file_size
        with pytest.raises(WriteFailed), stream.atomic_op() as op:
            op.add_entries(2, [bytes(LARGEST)] * 20)
        assert stream.total_entries == 3
        add(stream, TWO)  # what needs no more room continues
        assert items(stream) == [*ONE, (1, bytes(LARGEST)), *TWO]


def test_a_step_that_is_too_generous(tmp_path: Path) -> None:
    """Where the disk has no room for a large step, a small one is tried."""
    path, disk = tmp_path / "s.bin", FaultyDisk()
    with DataStream.create(path, index="memory", sync="os", disk=disk) as stream:
        disk.largest = FIRST + 20 * PAGE
        for number in range(19):
            assert stream.total_entries == number
            add(stream, [(1, bytes(LARGEST))])
        assert size_of(path) == FIRST + 20 * PAGE
        with pytest.raises(WriteFailed):
            add(stream, [(1, bytes(LARGEST))])
        assert stream.total_entries == 19


@pytest.mark.parametrize("spilled", [False, True])
@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC, errno.EDQUOT])
def test_data_that_cannot_be_written(tmp_path: Path, number: int, spilled: bool) -> None:
    path, disk = tmp_path / "s.bin", FaultyDisk()
    with DataStream.create(path, index="memory", disk=disk) as stream:
        add(stream, ONE)
        stream.start_atomic_op()
        want: list[Item] = [(9, b"a")]
        stream.add_entry(9, b"a")
        if spilled:
            disk.faults = {"write": number}
            while len(stream.atomic_op().arena) <= PAGE:
                want.append((7, bytes([len(want)]) * 1_000_000))
                stream.add_entry(*want[-1])
            for _ in range(2):
                with pytest.raises(WriteFailed, match=r"s\.bin: the system refused to write: "):
                    stream.add_entry(8, b"its turn comes after the others are placed")
            disk.faults = {}
            stream.add_entry(7, b"continues")
            want.append((7, b"continues"))
        disk.faults = {"commit data": number}
        for _ in range(2):
            with pytest.raises(WriteFailed) as caught:
                stream.commit_atomic_op()
            assert not isinstance(caught.value, CommitInDoubt)
            said = f"{path}: the system refused to write: {os.strerror(number)}"
            assert str(caught.value) == said
            check_untouched(stream, path, ONE)
        disk.faults = {}
        stream.commit_atomic_op()
        assert items(stream) == ONE + want
    with DataStream.open(path, read_only=True) as stream:
        assert items(stream) == ONE + want


def test_rolled_back_after_a_failed_write(tmp_path: Path) -> None:
    path, disk = tmp_path / "s.bin", FaultyDisk()
    with DataStream.create(path, index="memory", disk=disk) as stream:
        disk.faults = {"commit data": errno.EIO}
        with pytest.raises(WriteFailed):
            add(stream, [(1, b"lost"), (BOOKMARK, b"lost")])
        disk.faults = {}
        add(stream, ONE)  # the operation was given up with the block
        assert items(stream) == ONE
        assert len(stream.bookmarks) == 1


STEPS_BEHIND_THE_DATA = [
    ("commit", "header"),
    ("commit", "sync"),
    ("commit", "mark"),
    ("os", "mark"),
]


@pytest.mark.parametrize(("sync", "step"), STEPS_BEHIND_THE_DATA)
def test_a_step_that_fails_once(tmp_path: Path, sync: Any, step: str) -> None:
    """The header goes back at once, so that the operation is not there and can be repeated."""
    path, disk = tmp_path / "s.bin", FaultyDisk()
    with DataStream.create(path, sync=sync, disk=disk) as stream:
        add(stream, ONE)
        stream.start_atomic_op()
        stream.add_entry(2, b"again")
        disk.faults = {f"commit {step}": errno.EIO}
        with pytest.raises(WriteFailed, match=r"s\.bin: .*Input/output error") as caught:
            stream.commit_atomic_op()
        assert not isinstance(caught.value, CommitInDoubt)
        assert items(stream) == ONE
        with DataStream.open(path, follow=True) as follower:
            assert items(follower) == ONE
        disk.faults = {}
        stream.commit_atomic_op()
        assert items(stream) == [*ONE, (2, b"again")]
        assert stream.bookmark(b"k") == 0
    with DataStream.open(path) as stream:
        assert items(stream) == [*ONE, (2, b"again")]


@pytest.mark.parametrize(("sync", "step"), STEPS_BEHIND_THE_DATA)
def test_a_commit_in_doubt(tmp_path: Path, sync: Any, step: str) -> None:
    path, disk = tmp_path / "s.bin", FaultyDisk()
    with DataStream.create(path, sync=sync, disk=disk) as stream:
        add(stream, ONE)
        disk.faults = dict.fromkeys([f"commit {step}", "write", "sync"], errno.EIO)
        with (
            pytest.raises(CommitInDoubt, match=r"s\.bin: .*Input/output error.*until the disk"),
            stream.atomic_op() as op,
        ):
            op.add_entry(2, b"in doubt")
        # Read at its last commit, written no more while the disk refuses.
        assert items(stream) == ONE
        assert stream.bookmark(b"k") == 0
        for refused in (
            lambda: add(stream, TWO),
            lambda: stream.truncate(0),
            lambda: stream.update_entry(1, 1, b"two"),
            stream.sync,
        ):
            with pytest.raises(CommitInDoubt, match="until the disk accepts writes again"):
                refused()
        assert items(stream) == ONE
        with DataStream.open(path, follow=True) as follower:
            assert items(follower) == ONE
        disk.faults = {}
        add(stream, TWO)
        assert items(stream) == ONE + TWO
    with DataStream.open(path) as stream:
        assert items(stream) == ONE + TWO


def test_what_a_failed_sync_left_clean_is_written_again(tmp_path: Path) -> None:
    """The system may forget what it could not write: it is not trusted to have it on disk."""
    path, disk = tmp_path / "s.bin", FaultyDisk()
    with DataStream.create(path, index="memory", sync="os", disk=disk) as stream:
        add(stream, ONE, TWO)
        written: list[tuple[int, int]] = []

        def fail_once() -> None:
            del disk.before["sync"]
            stream._file.file.write = note  # type: ignore[method-assign]
            raise OSError(errno.EIO, "Input/output error")

        def note(data: Any, offset: int) -> None:
            written.append((offset, len(data)))
            type(stream._file.file).write(stream._file.file, data, offset)

        disk.before["sync"] = fail_once
        stream.sync()
        end = stream.header.total_length
        assert (FIRST, end - FIRST) in written
        assert stream._file.end.base == (end, 4)
        assert items(stream) == ONE + TWO


def test_what_a_failed_sync_lost(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The bytes are not what they were: the entries are named, and the stream goes back."""
    path, disk = tmp_path / "s.bin", FaultyDisk()
    with DataStream.create(path, sync="os", disk=disk) as stream:
        add(stream, ONE)
        stream.sync()
        add(stream, TWO)
        changes: list[ChangeBegins | ChangeEnds] = []
        stream.parts.feed.subscribe(changes.append)

        def fail_once() -> None:
            del disk.before["sync"]
            with open(path, "r+b") as file:  # the page was dropped, and read back as it was
                file.seek(stream.header.total_length - 5)
                file.write(bytes(5))
            raise OSError(errno.EIO, "Input/output error")

        disk.before["sync"] = fail_once
        with pytest.raises(CommitInDoubt, match="entries 2 to 3 may not be on disk"):
            stream.sync()
        assert [(e.type, e.data) for e in stream.entries(0, 2)] == ONE
        with pytest.raises(EntriesLost, match=r"entries 2 to 3 are lost.*continues with entry 2"):
            stream.start_atomic_op()
        assert changes == [ChangeBegins(2, None), ChangeEnds(2, None)]
        assert "entries 2 to 3 are lost" in caplog.text
        assert items(stream) == ONE
        assert stream.epoch == 1
        add(stream, TWO)
    with DataStream.open(path) as stream:
        assert items(stream) == ONE + TWO


def test_entries_given_up_by_another_thread_while_a_commit_begins(tmp_path: Path) -> None:
    """What was numbered behind them has no place any more."""
    path, disk = tmp_path / "s.bin", FaultyDisk()
    with DataStream.create(path, index="memory", sync="os", disk=disk) as stream:
        add(stream, ONE)
        stream.sync()
        add(stream, TWO)
        stream.start_atomic_op()
        stream.add_entry(7, b"behind")
        writer = stream._ensure_writable()
        prepare = writer.prepare
        writer.end.path_check_at = 0

        def given_up_first(*args: Any) -> bool:
            def drop() -> None:
                del disk.before["sync"]
                with open(path, "r+b") as file:
                    file.seek(stream.header.total_length - 5)
                    file.write(bytes(5))
                raise OSError(errno.EIO, "Input/output error")

            disk.before["sync"] = drop
            for reported in (CommitInDoubt, EntriesLost):  # the sync fails; then it is mended
                with pytest.raises(reported):
                    stream.sync()
            return prepare(*args)

        with (
            mock.patch.object(writer, "prepare", given_up_first),
            pytest.raises(EntriesLost, match="entries 2 to 3 are lost"),
        ):
            stream.commit_atomic_op()
        assert items(stream) == ONE
        with pytest.raises(NoOperation):
            stream.commit_atomic_op()
        add(stream, TWO)
        assert items(stream) == ONE + TWO
    with DataStream.open(path) as stream:
        assert items(stream) == ONE + TWO


def test_a_sync_whose_record_cannot_be_written(tmp_path: Path) -> None:
    """The data is on disk, the record that says so is not: it is written again."""
    path, disk = tmp_path / "s.bin", FaultyDisk()
    with DataStream.create(path, index="memory", sync="os", disk=disk) as stream:
        add(stream, ONE)

        def fail_once() -> None:
            del disk.before["write"]
            raise OSError(errno.EIO, "Input/output error")

        disk.before["write"] = fail_once
        stream.sync()
        assert stream._file.end.base.entries == 2
        assert items(stream) == ONE
    with DataStream.open(path, index="memory") as stream:
        assert items(stream) == ONE


def test_a_disk_that_stays_dead(tmp_path: Path) -> None:
    """Not even the old header can be put back: in doubt it stays, and the close says so."""
    path, disk = tmp_path / "s.bin", FaultyDisk()
    stream = DataStream.create(path, index="memory", disk=disk)
    add(stream, ONE)
    disk.faults = dict.fromkeys(["commit sync", "write", "sync", "resize"], errno.EIO)
    with pytest.raises(CommitInDoubt):
        add(stream, TWO)
    assert items(stream) == ONE
    with pytest.raises(CommitInDoubt, match="whether the operation from entry 2 on is on disk"):
        stream.close()
    stream.close()
    with DataStream.open(path) as stream:
        assert items(stream) in (ONE, ONE + TWO)


@pytest.mark.parametrize("what", ["write", "sync"])
def test_a_truncation_that_fails(tmp_path: Path, what: str) -> None:
    path, disk = tmp_path / "s.bin", FaultyDisk()
    stream = DataStream.create(path, disk=disk)
    add(stream, ONE, TWO)
    stream.bookmarks.wait()
    disk.faults = {what: errno.EIO}
    epoch = stream.epoch
    with pytest.raises(CommitInDoubt):
        stream.truncate(2)
    disk.faults = {}
    assert items(stream) == ONE + TWO
    assert stream.epoch == epoch, "these entries are not those of another epoch"
    assert stream.bookmark(b"k") == 3
    with pytest.raises(CommitInDoubt, match="in the middle of a truncation or update"):
        stream.close()
    with DataStream.open(path) as stream:
        assert items(stream) in (ONE, ONE + TWO)
        stored = bookmarks_of(scan_file(path))
        assert stream.bookmark(b"k") == stored[b"k"]


def test_a_close_that_fails(tmp_path: Path) -> None:
    path, disk = tmp_path / "s.bin", FaultyDisk()
    stream = DataStream.create(path, index="memory", sync="os", disk=disk)
    add(stream, ONE)
    disk.faults = {"sync": errno.EIO}
    with pytest.raises(CommitInDoubt, match="Input/output error"):
        stream.close()
    assert stream.closed
    disk.faults = {}
    stream.close()
    with DataStream.open(path, index="memory") as stream:  # and the lock is free
        assert items(stream) == ONE


def test_an_open_that_cannot_write(tmp_path: Path) -> None:
    path, disk = make(tmp_path / "s.bin", ONE, index="memory"), FaultyDisk()
    for what in ("sync", "write"):
        disk.faults = {what: errno.EIO}
        with pytest.raises(StreamFileError, match="cannot be opened for writing: Input/output"):
            DataStream.open(path, index="memory", disk=disk)
    with DataStream.open(path, index="memory") as stream:
        assert items(stream) == ONE


def test_a_full_disk_in_earnest(tmp_path: Path) -> None:
    """The real C path, with the real system refusing, in a process with a limit of its own."""
    code = """
import resource, sys
from datastreamer import DataStream
from datastreamer.errors import WriteFailed, CommitInDoubt
stream = DataStream.create(sys.argv[1], index="memory")
with stream.atomic_op() as op:
    op.add_entry(1, b"first")
resource.setrlimit(resource.RLIMIT_FSIZE, (4096 + 3 * 2**20, resource.RLIM_INFINITY))
count = 1
try:
    while count < 10:
        with stream.atomic_op() as op:
            op.add_entry(1, bytes(900_000))
        count += 1
except WriteFailed as error:
    assert not isinstance(error, CommitInDoubt)
    print(count, stream.total_entries, stream.file_size, error.what)
with stream.atomic_op() as op:
    op.add_entry(1, b"last")
stream.close()
"""
    path = tmp_path / "s.bin"
    found = subprocess.run(
        [sys.executable, "-c", code, str(path)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=False,
    )
    assert found.stderr == ""
    assert found.stdout == (f"4 4 {FIRST + 3 * PAGE} the system refused to write: File too large\n")
    assert [len(e.data) for e in scan_file(path)] == [5, 900_000, 900_000, 900_000, 4]
