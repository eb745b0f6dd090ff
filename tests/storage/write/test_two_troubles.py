"""Two troubles at once: a disk that refuses and a path that leads elsewhere; an error in a block
and entries that are lost."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
import trio

from datastreamer import DataStream
from datastreamer.errors import CommitInDoubt, EntriesLost, FileReplaced, WriteFailed
from datastreamer.storage.header.records import Agreement
from tests.storage.lab.cuts import Cut
from tests.storage.lab.disk import Interruption, SimDisk
from tests.storage.lab.model import booted
from tests.storage.made import FaultyDisk, add, items

ONE, TWO = [(1, b"one")], [(2, b"two" * 500)]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "s.bin"


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, GeneratorExit])
def test_a_removed_file_does_not_mask_the_end_of_the_process(
    path: Path, error: type[BaseException], caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(error), DataStream.create(path, index="memory") as stream:  # noqa: PT012
        add(stream, ONE)
        path.unlink()
        raise error
    assert stream.closed
    assert "the file was removed" in caplog.text


async def test_a_removed_file_does_not_mask_a_cancelled_task(path: Path) -> None:
    with trio.CancelScope() as scope, DataStream.create(path, index="memory") as stream:
        add(stream, ONE)
        path.unlink()
        scope.cancel()
        await trio.sleep_forever()
    assert scope.cancelled_caught
    assert stream.closed


def test_a_close_in_doubt_says_that_the_file_was_removed(path: Path) -> None:
    disk = FaultyDisk()
    stream = DataStream.create(path, sync="os", index="memory", disk=disk)
    add(stream, ONE)
    stream.start_atomic_op()
    stream.add_entry(2, b"two")
    handle = stream.commit_atomic_op(wait=False)
    assert handle is not None
    disk.faults = dict.fromkeys(["sync", "write", "commit header", "commit sync"], errno.EIO)
    path.unlink()
    with pytest.raises(CommitInDoubt, match=r"may not be on disk.*besides, the file was removed"):
        stream.close()
    assert stream.closed
    with pytest.raises((CommitInDoubt, FileReplaced)):
        handle.done()


def test_entries_that_are_lost_within_a_block() -> None:
    """Not an error about the block's own operation alone: a caller that begins it again would
    go on behind a hole."""
    disk = SimDisk()
    process = disk.process()
    with booted(lambda: disk.boot):
        stream = DataStream.create("/simulated/s.bin", sync="os", index="memory", disk=process)
        add(stream, ONE)
        stream.sync()
        add(stream, TWO)
        with pytest.raises(EntriesLost), stream.atomic_op() as op:  # noqa: PT012
            op.add_entry(3, b"three")
            cut = Cut("nothing arrived")
            process.interruption = Interruption(0, errno.EIO, only="sync", evicts=cut)
            stream._ensure_writable().durability.sync_in_background()
        add(stream, ONE)
        assert items(stream) == ONE + ONE
        stream.close()


def test_a_guard_s_error_takes_the_header_back(path: Path) -> None:
    """A commit in doubt within a block that a guard then ends: the next open does not find it."""
    disk = FaultyDisk()
    stream = DataStream.create(path, index="memory", disk=disk)
    add(stream, ONE)

    def refuse() -> None:
        raise ValueError("the serving process has ended")

    with pytest.raises(ValueError, match="serving process"), stream.atomic_op() as op:  # noqa: PT012
        op.add_entry(2, b"two")
        disk.faults = dict.fromkeys(["sync", "write", "commit sync"], errno.EIO)
        with pytest.raises(CommitInDoubt):
            op.commit()
        disk.faults.clear()
        stream.commit_guard = refuse
    stream._file.close()  # as a kill does
    with DataStream.open(path, index="memory") as again:
        assert items(again) == ONE


@pytest.mark.parametrize("policy", ["commit", 50])
def test_every_call_that_needs_the_disk_tries_again(path: Path, policy: str | int) -> None:
    disk = FaultyDisk()
    with DataStream.create(path, index="memory", disk=disk) as stream:
        stream.start_atomic_op()
        stream.add_entry(1, b"one")
        disk.faults = dict.fromkeys(["sync", "write", "commit sync"], errno.EIO)
        with pytest.raises(CommitInDoubt):
            stream.commit_atomic_op()
        with pytest.raises(CommitInDoubt):
            stream.sync_policy = "os"
        disk.faults.clear()
        stream.sync_policy = policy  # type: ignore[assignment]
        assert not stream._ensure_writable().owned.failed
        stream.commit_atomic_op()
        assert items(stream) == ONE


def test_an_agreement_that_was_not_written_is_not_kept(path: Path) -> None:
    disk = FaultyDisk()
    with DataStream.create(path, sync="os", index="memory", disk=disk) as stream:
        first = Agreement(b"upstream".ljust(16), 1, 1, 0, 0, 0)
        stream.parts.relay.put_agreement(first)
        disk.faults["write"] = errno.EIO
        with pytest.raises(WriteFailed):
            stream.parts.relay.put_agreement(first._replace(epoch=2))
        disk.faults.clear()
        assert stream.parts.relay.agreement == first
    assert os.path.exists(path)
