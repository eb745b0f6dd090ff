"""Failed syncs and writes, and what a process that ends in the middle of one leaves."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path

import pytest

from datastreamer import DataStream
from datastreamer.errors import CommitInDoubt, WriteFailed
from datastreamer.storage.disk import file_ops
from datastreamer.storage.header.undo_journal import SUFFIX
from tests.storage.made import FaultyDisk, add, copied, half_update, items, scan_file

THREE = [[(1, b"one")], [(2, b"two")], [(3, b"three")]]
ALL = [item for operation in THREE for item in operation]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "s.bin"


def fails_at(disk: FaultyDisk, what: str, turn: int) -> None:
    """The turn-th of these operations from now on is refused, no other."""
    turns = 0

    def count() -> None:
        nonlocal turns
        turns += 1
        if turns == turn:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    disk.before[what] = count


@pytest.mark.parametrize("at", [2, 3, 4])
def test_a_process_that_ends_while_a_failed_sync_is_got_over(path: Path, at: int) -> None:
    """Nothing that was committed is lost to it: the next open finds what the header said."""
    disk = FaultyDisk()
    with DataStream.create(path, index="memory", sync="os", disk=disk) as stream:
        add(stream, *THREE)
        syncs, kept = 0, []

        def keep() -> None:
            nonlocal syncs
            syncs += 1
            if syncs == 1:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            if syncs == at - 1:
                kept.append(copied(path, "killed.bin"))

        disk.before["sync"] = keep
        stream.sync()
        disk.before.clear()
        if not kept:
            kept.append(copied(path, "killed.bin"))
    for mode in ({"read_only": True}, {"follow": True}, {}):
        with DataStream.open(kept[0], index="memory", **mode) as again:  # type: ignore[arg-type]
            assert items(again) == ALL
            assert again.epoch == (not mode)  # a writer cannot know that nothing is lost
    with DataStream.open(kept[0], index="memory") as again:
        add(again, [(4, b"four")])
        assert items(again) == [*ALL, (4, b"four")]


def test_bytes_that_went_while_a_failed_sync_was_got_over(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Then the next open says what is lost, and keeps the old content."""
    disk = FaultyDisk()
    with DataStream.create(path, index="memory", sync="os", disk=disk) as stream:
        add(stream, THREE[0])
        stream.sync()
        add(stream, *THREE[1:])
        syncs = 0

        def keep() -> None:
            nonlocal syncs
            syncs += 1
            if syncs == 1:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            if syncs == 2:
                killed = copied(path, "killed.bin")
                content = bytearray(killed.read_bytes())
                at = content.index(b"three")
                content[at : at + 5] = bytes(5)
                killed.write_bytes(content)

        disk.before["sync"] = keep
        stream.sync()
        disk.before.clear()
    killed = path.with_name("killed.bin")
    with DataStream.open(killed, index="memory") as again:
        assert items(again) == ALL[:1]
        assert again.epoch == 1
    assert "entries 1 to 2" in caplog.text
    assert len(list(path.parent.glob("killed.bin.*.cut"))) == 1


def test_a_journal_that_cannot_be_made_durable_is_not_left(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with DataStream.create(path, index="memory") as stream:
        add(stream, [(1, b"aaaa"), (1, b"old")])

        def refuse(name: str) -> None:
            monkeypatch.undo()
            raise OSError(errno.EIO, os.strerror(errno.EIO))

        monkeypatch.setattr(file_ops, "sync_folder", refuse)
        with pytest.raises(WriteFailed):
            stream.update_entry(1, 1, b"new")
        assert not Path(f"{path}{SUFFIX}").exists()
        stream.truncate(1)
        add(stream, [(1, b"new")])
    with DataStream.open(path, index="memory") as stream:
        assert items(stream) == [(1, b"aaaa"), (1, b"new")]


def test_an_undo_that_failed_is_done_again(path: Path) -> None:
    with DataStream.create(path, index="memory") as stream:
        add(stream, [(1, b"o" * 2000)])
    entry = scan_file(path)[0]
    half_update(path, entry.offset + 17, entry.data, b"n" * 2000)
    disk = FaultyDisk()
    fails_at(disk, "sync", 1)
    with pytest.raises(Exception, match="Input/output error"):
        DataStream.open(path, index="memory", disk=disk)
    assert Path(f"{path}{SUFFIX}").exists()
    written: list[int] = []
    disk.before = {"write": lambda: written.append(1)}
    with DataStream.open(path, index="memory", disk=disk) as stream:
        assert items(stream) == [(1, b"o" * 2000)]
    assert written
    assert not Path(f"{path}{SUFFIX}").exists()


def test_close_reports_what_was_only_logged(path: Path) -> None:
    disk = FaultyDisk()
    stream = DataStream.create(path, index="memory", sync=1, disk=disk)
    disk.faults = {"sync": errno.EIO}
    add(stream, THREE[0])
    failed = threading.Event()
    disk.before["sync"] = failed.set
    assert failed.wait(20)
    while not stream._ensure_writable().owned.failed:
        failed.wait(0.01)
    with pytest.raises(CommitInDoubt, match="entries 0 to 0 may not be on disk"):
        stream.close()
    assert stream.closed
    with DataStream.open(path, index="memory") as again:
        assert items(again) == ALL[:1]


def test_a_sync_that_ends_after_a_failure_was_mended(path: Path) -> None:
    """What was settled further stays so."""
    disk = FaultyDisk()
    with DataStream.create(path, index="memory", sync="os", disk=disk) as stream:
        begun, let = threading.Event(), threading.Event()

        def slow() -> None:
            if threading.current_thread() is not threading.main_thread():
                begun.set()
                assert let.wait(20)

        disk.before["sync"] = slow
        add(stream, THREE[0])
        stream.start_atomic_op()
        stream.add_entry(2, b"two")
        first = stream.commit_atomic_op(wait=False)
        assert first is not None
        waiter = threading.Thread(target=first.wait)
        waiter.start()
        assert begun.wait(20)
        add(stream, THREE[2])
        disk.faults = {"commit mark": errno.EIO}
        with pytest.raises(WriteFailed):
            add(stream, [(4, b"never")])
        disk.faults = {}
        assert stream._file.end.base.entries == 3  # type: ignore[attr-defined]
        let.set()
        waiter.join()
        stream.sync()
        assert stream._file.end.base.entries == 3  # type: ignore[attr-defined]
        add(stream, [(4, b"four")])
        assert items(stream) == [*ALL, (4, b"four")]
    with DataStream.open(path, index="memory") as again:
        assert items(again) == [*ALL, (4, b"four")]


def test_a_follower_that_opens_while_a_commit_syncs(path: Path) -> None:
    disk = FaultyDisk()
    found: list[tuple[int, int]] = []
    with DataStream.create(path, index="memory", disk=disk) as stream:
        add(stream, THREE[0])
        opened: list[DataStream] = []
        disk.before["commit sync"] = lambda: opened.append(DataStream.open(path, follow=True))
        add(stream, THREE[1])
        disk.before.clear()
        [follower] = opened
        found.append((follower.total_entries, follower.epoch))
        iteration = follower.entries()
        assert next(iteration).data == b"one"
        assert follower.refresh()
        assert [e.data for e in iteration] == []
        assert items(follower) == ALL[:2]
        follower.close()
    assert found == [(1, 0)]


def test_a_close_whose_last_header_is_refused(path: Path) -> None:
    """The sync succeeded: everything is on disk, and so says each pending commit."""
    disk = FaultyDisk()
    stream = DataStream.create(path, index="memory", sync="os", disk=disk)
    op = stream.atomic_op()
    with op:
        op.add_entry(1, b"one")
        pending = op.commit(wait=False)
    assert pending is not None
    synced: list[bool] = []

    def refuse() -> None:
        if synced:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    disk.before["sync"] = lambda: synced.append(True)
    disk.before["write"] = refuse
    stream.close()
    assert pending.done()
