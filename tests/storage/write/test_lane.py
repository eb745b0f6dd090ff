"""A stream's end and the one call that moves it on, in C or through a test's own file."""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from datastreamer import DataStream
from datastreamer._packer import EntryPacker
from datastreamer.errors import StreamClosed
from datastreamer.format import HEADER_PAGE_SIZE, PAGE_SIZE, Header
from datastreamer.storage.disk._commit import EntriesNotWritten
from datastreamer.storage.disk.file_ops import OsDisk, OsFile
from datastreamer.storage.header import records
from datastreamer.storage.header.records import CommitRecord, Head, SyncedHeader, VisibleMark
from datastreamer.storage.pages._page_sums import PageSums
from datastreamer.storage.pages.hashes import EMPTY
from datastreamer.storage.write._lane import StreamEnd
from datastreamer.storage.write.durability import SyncPolicy
from tests.storage.made import sum_at
from tests.storage.steps import SteppedCommit, Writes

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


def end_of(file: OsFile) -> tuple[StreamEnd, bytearray]:
    page, empty = records.new_page(Header(1, 2, 3)), Head()
    record = CommitRecord(b"s" * 16, 0, b"b" * 16, *[empty] * 3, *[EMPTY] * 3)
    records.put_record(page, record)
    records.put_mark(page, 0, empty)
    records.put_synced(page, 0, SyncedHeader(0, b"s" * 16, 7, Header(1, 2, 3)))
    file.write(page, 0)
    return StreamEnd(file, page, empty, PageSums(), records.COMMIT_LAYOUT), page


def packed(end: StreamEnd, sizes: list[int]) -> EntryPacker:
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
    file, layout = opened(OsFile), records.COMMIT_LAYOUT
    page = records.new_page(Header(1, 2, 3))
    with pytest.raises(ValueError, match="4096 bytes"):
        StreamEnd(file, page[:-1], Head(), PageSums(), layout)
    with pytest.raises(ValueError, match="outside the page"):
        StreamEnd(file, page, Head(), PageSums(), (4090, *layout[1:]))
    with pytest.raises(ValueError, match="outside the page"):
        StreamEnd(file, page, Head(), PageSums(), (*layout[:8], (512, 4000), layout[9]))
    with pytest.raises(ValueError, match="another size"):
        StreamEnd(file, page, Head(), PageSums(), (*layout[:3], layout[4], layout[3], *layout[5:]))
    end = StreamEnd(file, page, Head(), PageSums(), layout)
    with pytest.raises(BufferError):
        page.append(0)
    with pytest.raises(RuntimeError, match="initialised once"):
        end.__init__(file, page, Head(), PageSums(), layout)  # type: ignore[misc]
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
