"""A stream's end and the one call that moves it on, in C or through a test's own file."""

from __future__ import annotations

import errno
import itertools
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest

from datastreamer import DataStream
from datastreamer._packer import EntryPacker
from datastreamer.errors import OperationOpen, StreamClosed, WriteFailed
from datastreamer.format import HEADER_PAGE_SIZE, PAGE_SIZE, Header
from datastreamer.storage.disk._commit import EntriesNotWritten
from datastreamer.storage.disk.file_ops import OsDisk, OsFile
from datastreamer.storage.header import records
from datastreamer.storage.header.records import CommitRecord, Head, SyncedHeader, VisibleMark
from datastreamer.storage.pages._page_sums import PageSums
from datastreamer.storage.pages.hashes import EMPTY
from datastreamer.storage.write._lane import CommitLane
from datastreamer.storage.write.sync_policy import SyncPolicy
from tests.storage.made import FaultyDisk, sum_at
from tests.storage.steps import SteppedCommit, Writes, before_the_report

SIZES: dict[str, list[int]] = {
    "one entry": [200],
    "five entries": [200] * 5,
    "two pages, padded": [PAGE_SIZE - 1000, 2000],
    "a full page": [PAGE_SIZE - 17, 3],
    "more pages than are planned for": [PAGE_SIZE // 2] * 20,
}


class PythonFile(SteppedCommit, OsFile):
    """Has the arguments of a commit, as any other file."""

    def do_step(self, step: str, writes: Writes) -> None:
        for data, offset in writes:
            self.write(data, offset)


def end_of(file: OsFile) -> tuple[CommitLane, bytearray]:
    page, empty = records.new_page(Header(1, 2, 3)), Head()
    record = CommitRecord(b"s" * 16, 0, b"b" * 16, *[empty] * 3, *[EMPTY] * 3)
    records.put_record(page, record)
    records.put_mark(page, 0, empty)
    records.put_synced(page, 0, SyncedHeader(0, b"s" * 16, 7, Header(1, 2, 3)))
    file.write(page, 0)
    return CommitLane(file, page, empty, PageSums()), page


def packed(end: CommitLane, sizes: list[int]) -> EntryPacker:
    packer = EntryPacker(spill_size=1 << 30)
    packer.begin(*end.written)
    packer.add_entries(1, [bytes([size % 251]) * size for size in sizes])
    return packer


@pytest.fixture
def opened(tmp_path: Path) -> Callable[[type[OsFile]], OsFile]:
    def opened(kind: type[OsFile]) -> OsFile:
        return kind(OsDisk().create(str(tmp_path / kind.__name__)).fileno())

    return opened


@pytest.mark.parametrize("sync", [True, False])
@pytest.mark.parametrize("seen", [True, False])
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_in_c_as_through_any_file(
    opened: Callable[[type[OsFile]], OsFile], sizes: list[int], seen: bool, sync: bool
) -> None:
    contents = []
    for kind in (OsFile, PythonFile):
        file = opened(kind)
        end, page = end_of(file)
        for _ in range(2):
            start, before = end.written, end.sums.sum()
            packer = packed(end, sizes)
            head = end.commit(packer, None, None if seen else Head(), sync, ())
            assert head == end.written == (packer.total_length, packer.next_number)
            assert type(head) is Head
            assert end.state == "writing"
            assert end.base == (head if sync else Head())
            known = sum_at(file.read(head.length, 0), head)
            assert end.sums.sum() == known
            stored = file.read(HEADER_PAGE_SIZE, 0)
            record = records.get_record(stored)
            assert record is not None
            assert record[3:] == (
                (start if sync else Head()),
                (start if sync else Head()),
                head,
                (before if sync else EMPTY),
                (before if sync else EMPTY),
                known,
            )
            # Without a sync, what is not to be seen leaves the mark in the file alone.
            moved = VisibleMark(0, head if seen else Head())
            assert records.get_mark(stored) == moved
            assert records.get_mark(page) == moved
            ends = [head, start] if sync else [Head()]
            assert records.get_synced(stored) == [
                SyncedHeader(end.sequence - at, b"s" * 16, 7, Header(1, 2, 3, *upto))
                for at, upto in enumerate(ends)
            ]
        assert (end.commits, end.durable) == ((2, 2) if sync else (2, 0))
        assert end.sequence == end.durable
        contents.append(file.read(head.length, 0))
        file.close()
    assert contents[0] == contents[1]


@pytest.mark.parametrize("sync", [True, False])
def test_a_commit_that_fails_leaves_end_and_page(
    opened: Callable[[type[OsFile]], OsFile], sync: bool
) -> None:
    def state() -> tuple[object, ...]:
        counted = end.commits, end.durable, end.sequence
        return bytes(page), end.written, end.base, end.sums.sum(), *counted

    file = opened(OsFile)
    end, page = end_of(file)
    end.commit(packed(end, [7]), None, None, sync, ())
    before = state()
    fd, file._fd = file._fd, -1
    again = packed(end, [7])
    with pytest.raises(EntriesNotWritten) as failed:
        end.commit(again, None, None, sync, ())
    assert failed.value.errno == errno.EBADF
    assert before == state()
    file._fd = fd
    assert end.commit(again, None, None, sync, ()) == (again.total_length, again.next_number)


def test_what_a_stream_s_end_refuses(opened: Callable[[type[OsFile]], OsFile]) -> None:
    file, page = opened(OsFile), records.new_page(Header(1, 2, 3))
    with pytest.raises(ValueError, match="4096 bytes"):
        CommitLane(file, page[:-1], Head(), PageSums())
    end = CommitLane(file, page, Head(), PageSums())
    with pytest.raises(BufferError):
        page.append(0)
    with pytest.raises(TypeError, match="pair of numbers"):
        end.put(Head(), Head(), (1, 2, 3), *[EMPTY] * 3, Head())  # type: ignore[arg-type]
    with pytest.raises(OverflowError):
        end.put(Head(), Head(), Head(-1, 0), *[EMPTY] * 3, Head())
    with pytest.raises(ValueError, match="16 bytes"):
        end.put(*[Head()] * 3, EMPTY, EMPTY, EMPTY._replace(tail=b"short"), Head())
    with pytest.raises(TypeError):
        end.commit(object(), None, None, False, ())  # type: ignore[arg-type]


def add(stream: DataStream, data: bytes = b"x") -> None:
    with stream.atomic_op() as op:
        op.add_entry(1, data)


def test_the_short_way_ends_where_something_is_to_be_seen_to(tmp_path: Path) -> None:
    with DataStream.create(tmp_path / "s.bin", sync="os") as stream:
        writer = stream._ensure_writable()
        end = writer.end
        assert end.state == "check"
        add(stream)
        assert end.state == "ready"
        # Not after the end of the file, where a byte has to be left.
        assert end.limit == HEADER_PAGE_SIZE + PAGE_SIZE - 1
        for _ in range(3):
            add(stream, bytes(400_000))
            assert stream.file_size > end.limit >= writer.owned.head.length
        stream.sync_policy = "commit"
        assert end.state == "check"
        add(stream)
        assert end.state == "ready"
        assert end.base == end.written
        stream.sync_policy = "os"
        assert end.state == "check"
        add(stream)
        assert end.state == "ready"
        assert end.base != end.written
    assert end.state == "closed"
    with pytest.raises(StreamClosed):
        stream.start_atomic_op()


def test_a_mutant_whose_commits_go_by_the_policy_from_before_the_lock(tmp_path: Path) -> None:
    def mutant(self: DataStream) -> None:
        if self.commit_guard is not None:
            self.commit_guard()
        writer = self._ensure_writable()
        waits = writer.end.waits
        with writer.owned.lock:
            now, writer.end.waits = writer.end.waits, waits
            commit(self)
            writer.end.waits = now

    commit = DataStream.commit_atomic_op
    with mock.patch.object(DataStream, "commit_atomic_op", mutant), pytest.raises(AssertionError):
        test_a_policy_that_is_set_while_a_commit_begins(tmp_path, "commit")


@pytest.mark.parametrize("call", ["append", "commit"])
def test_a_policy_that_is_set_while_a_commit_begins(tmp_path: Path, call: str) -> None:
    """A commit that waits for the lock meanwhile goes by the policy that it finds then."""
    with DataStream.create(tmp_path / "s.bin", sync="os") as stream:
        writer = stream._ensure_writable()
        add(stream)
        held = threading.Event()

        def set_policy() -> None:
            with writer.owned.exclusive():
                held.set()
                time.sleep(0.05)
                stream.sync_policy = "commit"

        setting = threading.Thread(target=set_policy)

        def begin() -> None:  # the commit looks at the policy, and waits for the lock, after this
            stream.commit_guard = None
            setting.start()
            held.wait()

        if call == "commit":
            stream.start_atomic_op()
            stream.add_entry(1, b"x")
        stream.commit_guard = begin
        if call == "commit":
            stream.commit_atomic_op()
        else:
            stream.append(1, b"x")
        setting.join()
        assert writer.end.base == writer.end.written
        assert stream.total_entries == 2


@pytest.mark.parametrize("sync", ["commit", "os", 5])
def test_what_is_taken_at_once_does_not_grow_the_file(tmp_path: Path, sync: SyncPolicy) -> None:
    with DataStream.create(tmp_path / "s.bin", sync=sync, index="memory") as stream:
        for size in (1, 500_000, 500_000, 40_000, 8_000, 100_000, 700_000, 1_048_000):
            before = (tmp_path / "s.bin").stat().st_size
            at_once = stream.parts.writer.fits(size + 17)
            with stream.atomic_op() as op:
                op.add_entry(1, bytes(size))
                op.commit(wait=False)
            grown = (tmp_path / "s.bin").stat().st_size > before
            assert at_once is not grown


def test_an_append_waits_for_that_of_another_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A commit that runs is none that was interrupted."""
    with DataStream.create(tmp_path / "s.bin", index="memory") as stream:
        numbers: list[int] = []
        other = threading.Thread(target=lambda: numbers.append(stream.append(1, b"second")))

        def begin_another() -> None:
            if not other.ident:
                other.start()
                other.join(0.05)
                assert numbers == []

        before_the_report(stream, monkeypatch, begin_another)
        assert stream.append(1, b"first") == 0
        other.join()
        assert numbers == [1]
        assert stream.append(1, b"third") == 2
        assert [entry.data for entry in stream.entries()] == [b"first", b"second", b"third"]


@pytest.mark.parametrize("sync", ["commit", "os"])
def test_threads_that_append(tmp_path: Path, sync: SyncPolicy) -> None:
    with DataStream.create(tmp_path / "s.bin", sync=sync, index="memory") as stream:
        many, numbers = 100, [list[int]() for _ in range(3)]

        def append(at: int) -> None:
            for _ in range(many):
                numbers[at].append(stream.append(at, b"%d" % at, bookmark=b"%d" % at) + 1)

        threads = [threading.Thread(target=append, args=(at,)) for at in range(3)]
        interval = sys.getswitchinterval()
        sys.setswitchinterval(1e-5)
        try:
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        finally:
            sys.setswitchinterval(interval)
        assert sorted(itertools.chain(*numbers)) == [*range(2, 6 * many + 1, 2)]
        for at, found in enumerate(numbers):
            assert found == sorted(found)
            assert stream.bookmark(b"%d" % at) == found[-1] - 2
            assert all(stream.entry(number - 1).type == at for number in found)


def test_an_append_within_a_change_of_its_thread(tmp_path: Path) -> None:
    """As in the handler of a signal: waiting for the change to end would be for ever."""
    with DataStream.create(tmp_path / "s.bin", index="memory") as stream:
        add(stream)
        owned = stream._ensure_writable().owned

        def work() -> None:
            for call in (lambda: stream.append(1, b"x"), stream.start_atomic_op):
                with pytest.raises(OperationOpen):
                    call()

        with owned.exclusive():
            owned.end.changing(work)
        assert stream.append(1, b"x") == 1


def test_an_append_beside_an_operation_of_another_thread(tmp_path: Path) -> None:
    with DataStream.create(tmp_path / "s.bin", index="memory") as stream:
        other = threading.Thread(target=stream.start_atomic_op)
        other.start()
        other.join()
        with pytest.raises(OperationOpen):
            stream.append(1, b"x")
        stream.add_entry(1, b"one")
        stream.commit_atomic_op()
        assert stream.append(1, b"x") == 1


def test_a_handle_whose_operation_becomes_durable_with_another_commit(tmp_path: Path) -> None:
    with DataStream.create(tmp_path / "s.bin", index="memory") as stream:
        owned = stream._ensure_writable().owned
        done: list[bool] = []
        with owned.syncing:  # no sync in the background meanwhile
            stream.start_atomic_op()
            stream.add_entry(1, b"not waited for")
            handle = stream.commit_atomic_op(wait=False)
            assert handle is not None
            waiting = threading.Thread(target=lambda: done.append(handle.wait()), daemon=True)
            waiting.start()
            waiting.join(0.05)
            assert done == []
            stream.append(1, b"waited for")
        waiting.join(10)
        assert done == [True]


@pytest.mark.parametrize("sync", ["commit", "os"])
def test_nobody_sees_a_commit_before_it_is_written(tmp_path: Path, sync: SyncPolicy) -> None:
    seen, disk = [], FaultyDisk()
    with DataStream.create(tmp_path / "s.bin", index="memory", sync=sync, disk=disk) as stream:
        add(stream)
        for step in ("data", "header", "sync", "mark"):
            disk.before[f"commit {step}"] = lambda: seen.append(stream.total_entries)
        stream.start_atomic_op()
        stream.add_entry(1, b"x")
        stream.commit_atomic_op()
        assert seen == [1] * (4 if sync == "commit" else len(seen))
        assert seen
        assert stream.total_entries == 2


def test_a_mutant_whose_commits_are_seen_before_they_are_written(tmp_path: Path) -> None:
    def mutant(self: DataStream) -> None:
        self._file.reader.head = Head(self._op.total_length, self._op.next_number)
        commit(self)

    commit = DataStream.commit_atomic_op
    with mock.patch.object(DataStream, "commit_atomic_op", mutant), pytest.raises(AssertionError):
        test_nobody_sees_a_commit_before_it_is_written(tmp_path, "commit")


def test_an_append_that_fails_beside_a_sync_in_the_background(tmp_path: Path) -> None:
    """A sync acquires its lock before that of commits; so does what an append withdraws."""
    disk = FaultyDisk()
    stream = DataStream.create(tmp_path / "s.bin", index="memory", sync="os", disk=disk)
    add(stream)
    owned, failed = stream._ensure_writable().owned, threading.Event()

    def sync() -> None:
        with owned.syncing:
            failed.set()
            time.sleep(0.05)  # until the append waits for this lock
            with owned.lock:
                disk.faults = {}

    def begin_sync() -> None:
        threading.Thread(target=sync, daemon=True).start()
        failed.wait()
        del disk.before["commit header"]

    def append() -> None:
        with pytest.raises(WriteFailed, match="rolled back"):
            stream.append(1, b"refused")
        done.append(stream.append(1, b"stored"))

    done: list[int] = []
    disk.faults = dict.fromkeys(["sync", "write", "commit header"], errno.EIO)
    disk.before["commit header"] = begin_sync
    appending = threading.Thread(target=append, daemon=True)
    appending.start()
    appending.join(20)
    assert done == [1]
    assert [entry.data for entry in stream.entries()] == [b"x", b"stored"]
    stream.close()
