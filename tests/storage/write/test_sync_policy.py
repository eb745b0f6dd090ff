"""When what is committed is on disk, and what is notified: policies, handles, shared syncs."""

from __future__ import annotations

import errno
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from datastreamer import DataStream
from datastreamer.errors import CommitInDoubt, EntriesLost, StreamClosed, WriteFailed
from datastreamer.storage.write.background import PendingCommit
from tests.storage.made import BOOKMARK, FaultyDisk, add, items

EVENT = (1, b"event")


class SlowDisk(FaultyDisk):
    """Syncs wait until they are let through; they are counted."""

    def __init__(self) -> None:
        super().__init__()
        self.syncs = self.ended = 0
        self.begun = threading.Semaphore(0)
        self.let = threading.Semaphore(0)
        self.slow = False
        self.before["sync"] = self._sync

    def _sync(self) -> None:
        self.syncs += 1
        if self.slow:
            self.begun.release()
            try:
                assert self.let.acquire(timeout=20)
            finally:
                self.ended += 1


@pytest.fixture
def disk() -> Iterator[SlowDisk]:
    disk = SlowDisk()
    yield disk
    disk.slow = False
    disk.let.release(100)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "s.bin"


def commit(stream: DataStream, *data: bytes, wait: bool = False) -> PendingCommit:
    stream.start_atomic_op()
    for one in data:
        stream.add_entry(1, one)
    handle = stream.commit_atomic_op(wait=wait)
    assert handle is not None
    return handle


def test_a_commit_that_does_not_wait(path: Path, disk: SlowDisk) -> None:
    """Under "commit": neither seen here nor elsewhere before it is on disk."""
    with (
        DataStream.create(path, disk=disk) as stream,
        DataStream.open(path, follow=True) as follower,
    ):
        disk.slow = True
        with stream.atomic_op() as op:
            op.add_bookmark(b"k")
            op.add_entry(1, b"one")
            first = op.commit(wait=False)
        assert first is not None
        assert disk.begun.acquire(timeout=20)
        second = commit(stream, b"two")
        assert not first.done()
        assert not first.wait(0)
        assert stream.total_entries == 0
        assert not follower.refresh()
        with pytest.raises(LookupError):
            stream.bookmark(b"k")
        disk.let.release()
        assert first.wait(20)
        assert stream.total_entries == 2
        assert stream.bookmark(b"k") == 0
        assert follower.refresh()
        assert items(follower) == [(BOOKMARK, b"k"), (1, b"one")]
        assert not second.done()
        disk.let.release(10)
        assert second.wait(20)
        assert first.done()
        assert items(stream) == [(BOOKMARK, b"k"), (1, b"one"), (1, b"two")]
    with DataStream.open(path) as again:
        assert again.total_entries == 3
        assert again.bookmark(b"k") == 0


def test_operations_that_do_not_wait_share_syncs(path: Path, disk: SlowDisk) -> None:
    with DataStream.create(path, disk=disk) as stream:
        disk.slow, before = True, disk.syncs
        handles = [commit(stream, b"first")]
        assert disk.begun.acquire(timeout=20)
        handles += [commit(stream, b"%d" % n) for n in range(100)]
        disk.let.release(10)
        assert all(handle.wait(20) for handle in handles)
        assert disk.syncs - before == 2
        assert stream.total_entries == 101


def test_threads_that_wait_share_syncs(path: Path) -> None:
    with DataStream.create(path) as stream:
        turns = threading.Lock()

        def work(name: int) -> None:
            for at in range(20):
                with turns:
                    handle = commit(stream, b"%d %d" % (name, at))
                assert handle.wait(20)
                assert (1, b"%d %d" % (name, at)) in items(stream)

        threads = [threading.Thread(target=work, args=(name,)) for name in range(5)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert stream.total_entries == 100


def test_a_commit_that_waits_takes_those_before_it_along(path: Path, disk: SlowDisk) -> None:
    with DataStream.create(path, disk=disk) as stream:
        stream.start_atomic_op()
        stream.add_entry(1, b"zero")
        stream.commit_atomic_op()
        disk.slow = True
        first = commit(stream, b"one")
        assert disk.begun.acquire(timeout=20)
        second = commit(stream, b"two")
        assert stream.total_entries == 1
        disk.slow = False
        disk.let.release()
        stream.start_atomic_op()
        stream.add_entry(1, b"three")
        stream.commit_atomic_op()
        assert (first.done(), second.done()) == (True, True)
        assert items(stream) == [(1, b"zero"), (1, b"one"), (1, b"two"), (1, b"three")]


@pytest.mark.parametrize("sync", ["os", 60_000])
def test_seen_at_once_where_the_policy_says_so(path: Path, disk: SlowDisk, sync: Any) -> None:
    with DataStream.create(path, sync=sync, disk=disk) as stream:
        before = disk.syncs
        handle = commit(stream, b"one")
        assert stream.total_entries == 1
        assert not handle.done()
        assert disk.syncs == before
        assert handle.wait(20)
        assert disk.syncs == before + 1
        assert stream.parts.writer.durable_entries == stream.total_entries


def test_an_interval_syncs_by_itself(path: Path, disk: SlowDisk) -> None:
    with DataStream.create(path, sync=20, disk=disk) as stream:
        assert stream.sync_policy == 20
        disk.slow = True
        handle = commit(stream, b"one")
        assert disk.begun.acquire(timeout=20)  # without a request
        more = commit(stream, b"two")
        disk.let.release()
        assert disk.begun.acquire(timeout=20)  # for what came during the first
        assert handle.done()
        disk.slow = False
        disk.let.release()
        assert more.wait(20)


@pytest.mark.parametrize("behind", [False, True])
def test_the_file_grows_while_a_sync_is_under_way(path: Path, disk: SlowDisk, behind: bool) -> None:
    """Who does not wait for the disk does not wait for it there either; seen at once, as ever."""
    large = b"x" * 1_000_000
    with DataStream.create(path, sync=1, disk=disk) as stream:
        disk.slow = True
        with stream.atomic_op() as op:
            op.add_entry(1, b"one")
        assert disk.begun.acquire(timeout=20)
        size = path.stat().st_size
        with stream.atomic_op() as op:
            for _ in range(5):
                op.add_entry(1, large)
                if behind:
                    op.spill()
        assert path.stat().st_size > size
        assert stream.total_entries == 6
        assert not disk.ended
        disk.let.release(10)
        stream.sync()
    with DataStream.open(path) as again:
        assert items(again) == [(1, b"one"), *[(1, large)] * 5]


def test_the_record_while_a_sync_is_under_way(path: Path, disk: SlowDisk) -> None:
    """Two segments: a power cut after the sync keeps all that was committed before it began."""
    from datastreamer.storage.header.records import get_record

    with DataStream.create(path, sync="os", disk=disk) as stream:
        first = commit(stream, b"one")
        disk.slow = True
        thread = threading.Thread(target=first.wait)
        thread.start()
        assert disk.begun.acquire(timeout=20)
        commit(stream, b"two")
        record = get_record(path.read_bytes()[:4096])
        assert record is not None
        assert [h.entries for h in (record.base, record.mid, record.after)] == [0, 1, 2]
        disk.let.release()
        thread.join()
        record = get_record(path.read_bytes()[:4096])
        assert record is not None
        assert [h.entries for h in (record.base, record.mid, record.after)] == [1, 1, 2]
        disk.slow = False
        disk.let.release(10)


def test_the_policy_changes_while_open(path: Path, disk: SlowDisk) -> None:
    with DataStream.create(path, sync="os", disk=disk) as stream:
        handle = commit(stream, b"one")
        before = disk.syncs
        stream.sync_policy = "commit"
        assert disk.syncs == before + 1
        assert handle.done()
        commit(stream, b"two").wait(20)
        stream.sync_policy = "os"
        before = disk.syncs
        commit(stream, b"three")
        assert stream.total_entries == 3
        assert disk.syncs == before
        for wrong in ("sometimes", 0, -5, 1.5, True, None):
            with pytest.raises(ValueError, match="the sync policy is"):
                stream.sync_policy = wrong  # type: ignore[assignment]
        assert stream.sync_policy == "os"


def test_a_sync_in_the_background_that_fails_for_a_while(
    path: Path, disk: SlowDisk, caplog: pytest.LogCaptureFixture
) -> None:
    with DataStream.create(path, disk=disk) as stream:
        stream.start_atomic_op()
        stream.add_entry(1, b"before")
        stream.commit_atomic_op()
        disk.faults = dict.fromkeys(["sync", "commit sync"], errno.EIO)
        handle = commit(stream, b"one")
        with pytest.raises(CommitInDoubt, match="entries 1 to 1 may not be on disk"):
            handle.wait(20)
        assert items(stream) == [(1, b"before")]
        with pytest.raises(CommitInDoubt):
            stream.start_atomic_op()
        disk.faults = {}
        stream.start_atomic_op()
        # It was written again, and is on disk now.
        assert handle.done()
        assert items(stream) == [(1, b"before"), (1, b"one")]
        assert "entries 1 to 1 were written again and are on disk" in caplog.text
        assert stream.add_entry(1, b"two") == 2
        stream.commit_atomic_op()
    with DataStream.open(path) as again:
        assert [data for _, data in items(again)] == [b"before", b"one", b"two"]


def test_a_sync_in_the_background_that_lost_something(path: Path, disk: SlowDisk) -> None:
    """What waits is notified, and so is the operation that was to come after it."""
    with DataStream.create(path, disk=disk) as stream:
        disk.slow = True
        lost = commit(stream, b"lost")
        assert disk.begun.acquire(timeout=20)
        behind = commit(stream, b"too")
        stream.start_atomic_op()
        stream.add_entry(1, b"behind it")

        def drop() -> None:
            with open(path, "r+b") as file:
                file.seek(4096 + 17)
                file.write(bytes(4))

        drop()
        disk.slow = False
        disk.faults = {"sync": errno.EIO}
        disk.let.release()
        with pytest.raises(CommitInDoubt):
            lost.wait(20)
        disk.faults = {}
        with pytest.raises(EntriesLost, match="entries 0 to 1 are lost"):
            stream.commit_atomic_op()
        for handle in (lost, behind):
            with pytest.raises(EntriesLost, match="entries 0 to 1 are lost"):
                handle.wait(20)
            with pytest.raises(EntriesLost):
                handle.done()
        with pytest.raises(EntriesLost):
            stream.commit_atomic_op()  # numbered after what is lost
        assert commit(stream, b"new").wait(20)
        assert items(stream) == [(1, b"new")]


def test_a_spilled_operation_is_not_repeated_after_a_failed_sync(
    path: Path, disk: SlowDisk
) -> None:
    with DataStream.create(path, disk=disk) as stream:
        stream.start_atomic_op()
        for _ in range(12):
            stream.add_entry(1, bytes(1 << 19))
        disk.faults = {"commit sync": errno.EIO}
        with pytest.raises(WriteFailed):
            stream.commit_atomic_op()
        disk.faults = {}
        for _ in range(2):
            with pytest.raises(WriteFailed, match=r"no longer in memory.*begin it"):
                stream.commit_atomic_op()
        stream.rollback_atomic_op()
        assert commit(stream, b"small").wait(20)
        assert items(stream) == [(1, b"small")]


def test_a_handle_outlives_the_stream(path: Path, disk: SlowDisk) -> None:
    stream = DataStream.create(path, disk=disk)
    handle = commit(stream, b"one")
    stream.close()
    assert handle.done()
    assert handle.wait()
    with pytest.raises(StreamClosed):
        stream.start_atomic_op()


def test_nothing_to_commit(path: Path) -> None:
    with DataStream.create(path) as stream:
        stream.start_atomic_op()
        handle = stream.commit_atomic_op(wait=False)
        assert handle is not None
        assert handle.done()


@pytest.mark.parametrize("sync", [86_400_001, 2 * 10**13, 10**40])
def test_a_policy_that_no_clock_can_wait_for(tmp_path: Path, sync: int) -> None:
    path = tmp_path / "s.bin"
    with pytest.raises(ValueError, match=r"milliseconds, at most 86400000 \(a day\), not"):
        DataStream.create(path, sync=sync, index="memory")
    with DataStream.create(path, sync=86_400_000, index="memory") as stream:
        with pytest.raises(ValueError, match="a day"):
            stream.sync_policy = sync
        add(stream, [(1, b"one")])


def test_waiting_for_longer_than_a_clock_goes(tmp_path: Path) -> None:
    with DataStream.create(tmp_path / "s.bin", index="memory") as stream:
        stream.start_atomic_op()
        stream.add_entry(1, b"one")
        pending = stream.commit_atomic_op(wait=False)
        assert pending is not None
        with pytest.raises(ValueError, match="not nan"):
            pending.wait(float("nan"))
        assert pending.wait(1e300)
