"""The space and the memory that an operation takes before its commit, and that it returns."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from datastreamer import DataStream
from datastreamer._codec import scan
from datastreamer._packer import KEPT_BOOKMARKS
from datastreamer.errors import WriteFailed
from datastreamer.format import Header
from datastreamer.storage.bookmarks import recent
from datastreamer.storage.header import records
from datastreamer.storage.maintain.repair import repair
from tests.storage.made import FIRST, PAGE, FaultyDisk, items, size_of
from tests.storage.steps import before_the_report

SMALL = FIRST + PAGE
HUGE = 12


def huge(stream: DataStream) -> None:
    """Some of an operation of `HUGE` MiB, most of which is in the file."""
    for number in range(HUGE):
        stream.add_entry(1, bytes([number + 1]) * 1_000_000)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "s.bin"
    with DataStream.create(path, index="memory") as stream, stream.atomic_op() as op:
        op.add_entry(1, b"first")
        op.add_entry(1, b"second")
    assert size_of(path) == SMALL
    return path


def rolls_back(stream: DataStream) -> None:
    stream.start_atomic_op()
    huge(stream)
    assert size_of(Path(stream.path)) > SMALL
    stream.rollback_atomic_op()


def raises_in_the_block(stream: DataStream) -> None:
    def half() -> None:
        with stream.atomic_op():
            huge(stream)
            _ = 1 / 0

    with pytest.raises(ZeroDivisionError):
        half()


def places_a_batch(stream: DataStream) -> None:
    other = DataStream.create(f"{stream.path}.other", index="memory")
    with other:
        with other.atomic_op() as op:
            op.add_entries(1, [b"x", b"y"])
        with other.atomic_op():
            huge(other)
        packed = b"".join(batch.packed() for batch in other.batches(2))
    stream.start_atomic_op()
    stream.atomic_op().place_batch(scan(packed, 2))
    assert size_of(Path(stream.path)) > SMALL
    stream.rollback_atomic_op()


def loses_its_source(stream: DataStream) -> None:
    lease = object()
    stream.parts.writer.lend(lease)
    stream.start_atomic_op(lease=lease)
    huge(stream)
    stream.parts.writer.end_lease(lease)


ENDS = [rolls_back, raises_in_the_block, places_a_batch, loses_its_source]


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("sync", ["commit", "os"])
def test_the_space_of_an_operation_without_a_commit_is_returned(
    path: Path, end: Callable[[DataStream], None], sync: str
) -> None:
    with (
        DataStream.open(path, index="memory", sync=sync) as stream,  # type: ignore[arg-type]
        DataStream.open(path, index="memory", follow=True) as follower,
    ):
        for _ in range(2):
            end(stream)
            assert size_of(path) == SMALL
            assert os.stat(path).st_blocks * 512 <= SMALL + 8192
            (path.parent / "s.bin.other").unlink(missing_ok=True)
        assert [data for _, data in items(follower)] == [b"first", b"second"]
        with stream.atomic_op():
            huge(stream)
        assert follower.refresh()
        assert follower.total_entries == HUGE + 2
        assert follower.entry(HUGE + 1).data == bytes([HUGE]) * 1_000_000
    with DataStream.open(path, index="memory") as stream:
        assert stream.total_entries == HUGE + 2


def test_the_space_of_an_operation_that_is_open_at_the_close(path: Path) -> None:
    stream = DataStream.open(path, index="memory")
    stream.start_atomic_op()
    huge(stream)
    with pytest.warns(ResourceWarning, match="discarded"):
        stream.close()
    assert size_of(path) == SMALL


def test_the_space_of_a_commit_that_the_disk_refused(path: Path) -> None:
    disk = FaultyDisk()
    with DataStream.open(path, index="memory", disk=disk) as stream:
        op = stream.atomic_op().__enter__()
        huge(stream)
        disk.faults["commit data"] = errno.ENOSPC
        with pytest.raises(WriteFailed):
            op.__exit__(None, None, None)
        assert size_of(path) == SMALL
        assert stream.total_entries == 2


def test_space_that_could_not_be_returned_at_once(path: Path) -> None:
    """The system refuses to shrink the file, or it is not known what the header on disk says."""
    disk = FaultyDisk()
    with DataStream.open(path, index="memory", disk=disk) as stream:
        stream.start_atomic_op()
        huge(stream)
        disk.faults["resize"] = errno.EIO
        stream.rollback_atomic_op()
        assert size_of(path) > SMALL
        disk.faults.clear()
        stream.start_atomic_op()
        assert size_of(path) == SMALL
        huge(stream)
        while stream.atomic_op().total_length < size_of(path):
            stream.add_entry(1, bytes(1_000_000))
        # The commit has to grow the file, which fails.
        disk.faults.update({"commit sync": errno.EIO, "sync": errno.EIO})
        with pytest.raises(WriteFailed):
            stream.commit_atomic_op()
        stream.rollback_atomic_op()
        assert size_of(path) > SMALL
        disk.faults.clear()
        with stream.atomic_op() as op:
            assert size_of(path) == SMALL
            op.add_entry(1, b"third")
        assert [data for _, data in items(stream)] == [b"first", b"second", b"third"]


KILLED = """
import os, sys
from datastreamer import DataStream
stream = DataStream.open(sys.argv[1], index="memory")
stream.start_atomic_op()
for number in range(12):
    stream.add_entry(1, bytes([number + 1]) * 1_000_000)
os._exit(0)
"""


def kill_a_writer(path: Path) -> None:
    subprocess.run([sys.executable, "-c", KILLED, path], check=True)


def test_the_next_writer_returns_the_space_of_one_that_was_killed(path: Path) -> None:
    kill_a_writer(path)
    assert size_of(path) > SMALL + 5 * PAGE
    for how in ({"read_only": True}, {"follow": True}):
        with DataStream.open(path, index="memory", **how) as stream:  # type: ignore[arg-type]
            assert stream.total_entries == 2
    assert size_of(path) > SMALL + 5 * PAGE
    DataStream.open(path, index="memory").close()
    assert size_of(path) == SMALL


def test_space_that_belongs_to_the_stream_since_is_kept(path: Path) -> None:
    """What a killed writer recorded says nothing once the stream has moved on."""
    with DataStream.open(path, index="memory") as stream:
        with stream.atomic_op():
            huge(stream)
        size = size_of(path)
    DataStream.open(path, index="memory").close()
    assert size_of(path) == size
    with DataStream.open(path, index="memory") as stream:
        stream.truncate(1)
    DataStream.open(path, index="memory").close()
    assert size_of(path) == size


def test_pages_that_another_program_allocated_are_kept(tmp_path: Path) -> None:
    """As the reference makes a file: 100 pages, no records."""
    path, size = tmp_path / "s.bin", FIRST + 100 * PAGE
    page = records.new_page(Header(1, 1, 1))
    with path.open("wb") as file:
        file.write(page[:64] + bytes(FIRST - 64))
        file.truncate(size)
    for _ in range(2):
        DataStream.open(path, index="memory").close()
        assert size_of(path) == size
    with DataStream.open(path, index="memory") as stream:
        stream.start_atomic_op()
        huge(stream)
        stream.rollback_atomic_op()
        assert size_of(path) == size
    kill_a_writer(path)
    DataStream.open(path, index="memory").close()
    assert size_of(path) == size


# Memory.


def key(number: int) -> bytes:
    return b"k%07d" % number


def test_an_operation_with_many_bookmarks(tmp_path: Path) -> None:
    """It keeps none of them, and all are found from the commit on."""
    count = KEPT_BOOKMARKS + 1
    with DataStream.create(tmp_path / "s.bin") as stream:
        with stream.atomic_op() as op:
            op.add_bookmark(key(5))
            op.add_bookmark(b"old")
        with stream.atomic_op() as op:
            for number in range(KEPT_BOOKMARKS):
                op.add_bookmark(key(number))
            assert len(op.bookmarks or ()) == KEPT_BOOKMARKS
            op.add_bookmark(key(KEPT_BOOKMARKS))
            assert op.bookmarks is None
        assert stream.bookmark(key(5)) == 7
        assert stream.bookmark(key(count - 1)) == count + 1
        assert stream.bookmark(b"old") == 1
        stream.bookmarks.wait()
        assert stream.bookmarks.lag() == 0
        assert stream.bookmark(key(5)) == 7
        assert len(stream.bookmarks) == count + 1
        with stream.atomic_op() as op:  # and the next is kept as ever
            op.add_bookmark(b"new")
            assert op.bookmarks == [(b"new", count + 2)]
        assert stream.bookmark(b"new") == count + 2


def test_batches_with_many_bookmarks(tmp_path: Path) -> None:
    with DataStream.create(tmp_path / "one.bin", index="memory") as stream:
        with stream.atomic_op() as op:
            for number in range(KEPT_BOOKMARKS + 5):
                op.add_bookmark(key(number))
        packed = b"".join(batch.packed() for batch in stream.batches(0))
    for name in ("add_batch", "place_batch"):
        with DataStream.create(tmp_path / f"{name}.bin", index="memory") as stream:
            with stream.atomic_op() as op:
                getattr(op, name)(scan(packed, 0)[:KEPT_BOOKMARKS])
                assert len(op.bookmarks or ()) == KEPT_BOOKMARKS
                getattr(op, name)(scan(packed, 0)[KEPT_BOOKMARKS:])
                assert op.bookmarks is None
            assert stream.bookmark(key(KEPT_BOOKMARKS + 4)) == KEPT_BOOKMARKS + 4
            assert stream.bookmark(key(0)) == 0


def test_operations_that_wait_for_the_disk_share_the_bound(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("datastreamer.storage.write.pending_bookmarks.KEPT_BOOKMARKS", 10)
    with DataStream.create(tmp_path / "s.bin", index="memory") as stream:
        file = stream._ensure_writable()
        with file.owned.syncing:  # no sync meanwhile
            for start in range(0, 24, 4):
                with stream.atomic_op() as op:
                    for number in range(start, start + 4):
                        op.add_bookmark(key(number))
                    op.commit(wait=False)
            deferred = stream._deferred
            assert deferred is not None
            assert sum(len(waiting[0] or ()) for waiting in deferred._waiting) <= 10
            assert len(deferred._waiting) == 6
        stream.sync()
        assert not deferred._waiting
        assert deferred._kept == 0
        assert [stream.bookmark(key(number)) for number in range(24)] == [*range(24)]


@pytest.mark.parametrize("how", [{"follow": True}, {}])
def test_a_look_up_takes_no_huge_operation_into_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: dict[str, bool]
) -> None:
    monkeypatch.setattr(recent, "_MAX_UNREPORTED_BYTES", 1000)
    path = tmp_path / "s.bin"
    with DataStream.create(path, index="memory") as stream:
        asked = DataStream.open(path, index="memory", **how) if how else stream
        with stream.atomic_op() as op:
            op.add_bookmark(b"one")
        asked.refresh()
        assert asked.bookmark(b"one") == 0

        def look_up() -> None:
            asked.refresh()
            assert asked.bookmark(key(150)) == 151
            assert asked.bookmark(b"one") == 0

        if not how:
            # As another thread may, before the commit has reported its bookmarks.
            before_the_report(stream, monkeypatch, look_up)
        with stream.atomic_op() as op:
            for number in range(200):
                op.add_bookmark(key(number))
        look_up()
        assert len(asked.bookmarks.trusted.recent.newest) == 0
        if asked is not stream:
            asked.close()


def test_memory_of_a_million_bookmarks(tmp_path: Path) -> None:
    code = (
        "import sys; from datastreamer import DataStream\n"
        "def peak():\n"
        "    return int(open('/proc/self/status').read().split('VmHWM:')[1].split()[0])\n"
        "with DataStream.create(sys.argv[1], index='memory') as stream:\n"
        "    before = peak()\n"
        "    stream.start_atomic_op()\n"
        "    for number in range(1_000_000):\n"
        "        stream.add_bookmark(number.to_bytes(8, 'big'))\n"
        "    print(peak() - before)\n"
        "    stream.rollback_atomic_op()\n"
    )
    if not os.path.exists("/proc/self/status"):
        pytest.skip("no /proc here")
    done = subprocess.run(
        [sys.executable, "-c", code, tmp_path / "s.bin"], check=True, capture_output=True, text=True
    )
    assert int(done.stdout) < 40_000  # kB; 150,000 with an object for each


GROWING = """
import os, sys
from datastreamer import DataStream
from datastreamer.storage.disk.file_ops import OsFile
stream = DataStream.open(sys.argv[1], index="memory")
stream.start_atomic_op()
for number in range(3):
    stream.add_entry(1, bytes([number + 1]) * 1_000_000)
OsFile.commit = OsFile.sync = lambda *words: os._exit(0)  # the file has grown by then
stream.commit_atomic_op()
"""


def test_the_space_of_a_commit_that_was_killed(path: Path) -> None:
    subprocess.run([sys.executable, "-c", GROWING, path], check=True)
    assert size_of(path) > SMALL
    with DataStream.open(path, index="memory") as stream:
        assert stream.total_entries == 2
    assert size_of(path) == SMALL


def test_a_repair_leaves_the_space_to_the_next_writer(path: Path) -> None:
    kill_a_writer(path)
    with path.open("r+b") as file:
        file.seek(records.MARK_OFFSET + 20)
        file.write(b"\xff")
    repair(path)
    DataStream.open(path, index="memory").close()
    assert size_of(path) == SMALL
