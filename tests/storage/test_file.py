"""The file: made, opened, locked, grown; and a disk that refuses at every step."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import warnings
from pathlib import Path
from typing import IO, Any

import pytest

from datastreamer import DataStream
from datastreamer.errors import (
    CommitInDoubt,
    EntriesLost,
    FileExists,
    FileMissing,
    NotAStream,
    StreamClosed,
    StreamFileError,
    StreamLocked,
    StreamReadOnly,
    WriteFailed,
    WrongStreamType,
)
from datastreamer.format import Header
from datastreamer.storage import record as records
from datastreamer.storage import room as module
from datastreamer.storage.writer import StreamWriter
from tests.conftest import Golden
from tests.storage.made import (
    BOOKMARK,
    FIRST,
    LARGEST,
    PAGE,
    FaultyDisk,
    Item,
    add,
    bookmarks_of,
    copied,
    header_of,
    items,
    make,
    power_cut,
    scan_file,
    trace_of,
)

ONE: list[Item] = [(BOOKMARK, b"k"), (1, b"one")]
TWO: list[Item] = [(2, b"two" * 100), (BOOKMARK, b"k")]
ROOT = Path(__file__).resolve().parents[2]


def size_of(path: Path) -> int:
    size = path.stat().st_size
    assert (size - FIRST) % PAGE == 0
    return size


# Making.


def test_a_new_stream(tmp_path: Path) -> None:
    path = tmp_path / "s.bin"
    with DataStream.create(path, version=3, system_id=2**64 - 1, stream_type=7) as stream:
        assert stream.header == Header(3, 2**64 - 1, 7, FIRST, 0)
        assert stream.total_entries == 0
        assert stream.writable
        assert repr(stream) == f"<DataStream '{path}': 0 entries>"
        assert len(stream.stream_id) == 16
        assert stream.epoch == 0
    assert header_of(path) == (1, 38, 3, 2**64 - 1, 7, FIRST, 0)
    assert size_of(path) == FIRST + PAGE == 1_052_672
    assert path.stat().st_blocks * 512 <= FIRST + PAGE + 65536
    assert sorted(p.name for p in tmp_path.iterdir()) == ["s.bin", "s.bin.index"]
    assert path.stat().st_mode & 0o777 == 0o644
    assert repr(stream) == f"<DataStream '{path}': closed>"


def test_every_stream_has_an_id_of_its_own(tmp_path: Path) -> None:
    ids = set()
    for name in ("a", "b"):
        with DataStream.create(tmp_path / name, index="memory") as stream:
            ids.add(stream.stream_id)
        with DataStream.open(tmp_path / name, read_only=True) as stream:
            assert stream.stream_id in ids
    assert len(ids) == 2


@pytest.mark.parametrize(
    "options",
    [
        {"version": 256},
        {"version": -1},
        {"system_id": 2**64},
        {"system_id": -1},
        {"stream_type": 2**64},
        {"sync": "always"},
        {"index": "nosuch"},
    ],
    ids=str,
)
def test_create_refuses(tmp_path: Path, options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"not|no bookmark index"):
        DataStream.create(tmp_path / "s.bin", **options)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("what", ["file", "folder", "link to nothing", "stream"])
def test_create_replaces_nothing(tmp_path: Path, what: str) -> None:
    path = tmp_path / "s.bin"
    match what:
        case "file":
            path.write_text("mine")
        case "folder":
            path.mkdir()
        case "link to nothing":
            path.symlink_to("nowhere")
        case "stream":
            make(path, ONE, index="memory")
    before = path.lstat()
    with pytest.raises(FileExists, match=r"s\.bin: exists already") as caught:
        DataStream.create(path)
    assert isinstance(caught.value, FileExistsError)
    assert (path.lstat().st_mtime_ns, path.lstat().st_ino) == (before.st_mtime_ns, before.st_ino)
    assert [p.name for p in tmp_path.iterdir()] == ["s.bin"]


def test_create_while_somebody_else_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The look before is a courtesy; the link is what never replaces."""
    path, disk = tmp_path / "s.bin", FaultyDisk()
    disk.before["sync"] = lambda: path.write_text("first") if not path.exists() else None
    with pytest.raises(FileExists):
        DataStream.create(path, disk=disk)
    assert path.read_text() == "first"
    assert [p.name for p in tmp_path.iterdir()] == ["s.bin"]


@pytest.mark.parametrize("fails", ["resize", "write", "sync"])
def test_create_on_a_disk_that_refuses(tmp_path: Path, fails: str) -> None:
    disk = FaultyDisk()
    disk.faults[fails] = errno.ENOSPC
    with pytest.raises(StreamFileError, match="cannot be created: No space left on device"):
        DataStream.create(tmp_path / "s.bin", disk=disk)
    assert list(tmp_path.iterdir()) == []


def test_create_where_there_is_no_folder(tmp_path: Path) -> None:
    for make_it in (DataStream.create, DataStream.open_or_create):
        with pytest.raises(FileMissing, match=r"nowhere/s\.bin: no such folder"):
            make_it(tmp_path / "nowhere" / "s.bin")


def test_open_or_create(tmp_path: Path) -> None:
    path = tmp_path / "s.bin"
    with DataStream.open_or_create(path, version=2, system_id=5, index="memory") as stream:
        add(stream, ONE)
    with DataStream.open_or_create(path, version=9, system_id=6, index="memory") as stream:
        assert stream.header[:3] == (2, 5, 1)
        assert items(stream) == ONE
    with pytest.raises(WrongStreamType, match="the stream is of type 1, not 2"):
        DataStream.open_or_create(path, stream_type=2)


# Opening.


@pytest.mark.parametrize("mode", [{}, {"read_only": True}, {"follow": True}], ids=str)
@pytest.mark.parametrize("what", ["nothing", "folder", "pipe", "device", "text", "text of a page"])
def test_what_is_no_stream(tmp_path: Path, what: str, mode: dict[str, Any]) -> None:
    path = tmp_path / "s.bin"
    error: type[StreamFileError] = NotAStream
    match what:
        case "nothing":
            error, says = FileMissing, "no such file"
        case "folder":
            path.mkdir()
            says = "is a folder, not a stream file"
        case "pipe":
            os.mkfifo(path)
            says = "is a device or a pipe, not a stream file"
        case "device":
            path.symlink_to("/dev/null")
            says = "is a device or a pipe, not a stream file"
        case _:
            path.write_text("hello " * (1000 if "page" in what else 1))
            says = "no stream file: it does not begin with polygonDATSTREAM"
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(error) as caught:
        DataStream.open(path, **mode)
    assert str(caught.value) == f"{path}: {says}"
    assert caught.value.path == str(path)
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.skipif(os.geteuid() == 0, reason="root may do anything")
def test_a_file_that_may_not_be_read(tmp_path: Path) -> None:
    path = make(tmp_path / "s.bin", index="memory")
    path.chmod(0)
    with pytest.raises(StreamFileError, match="cannot be opened: Permission denied"):
        DataStream.open(path)


@pytest.mark.parametrize("mode", [{}, {"read_only": True}, {"follow": True}], ids=str)
def test_the_wrong_type(tmp_path: Path, mode: dict[str, Any]) -> None:
    path = make(tmp_path / "s.bin", stream_type=7, index="memory")
    with pytest.raises(WrongStreamType, match=r"s\.bin: the stream is of type 7, not 1"):
        DataStream.open(path, stream_type=1, **mode)
    with DataStream.open(path, stream_type=7, **mode) as stream:
        assert stream.header.stream_type == 7


def test_a_name_in_any_form(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with DataStream.create("s.bin") as stream:
        add(stream, ONE)
    for name in ("s.bin", "./s.bin", str(tmp_path / "s.bin"), Path("s.bin")):
        with DataStream.open(name) as stream:
            assert stream.bookmark(b"k") == 0
    assert sorted(p.name for p in tmp_path.iterdir()) == ["s.bin", "s.bin.index"]


def test_by_descriptor(tmp_path: Path) -> None:
    path = make(tmp_path / "s.bin", ONE)
    fd = os.open(path, os.O_RDONLY)
    with DataStream.open(fd, follow=True, name=str(path)) as stream:
        os.close(fd)  # the stream has one of its own
        assert stream.path == str(path)
        assert items(stream) == ONE
        assert stream.bookmark(b"k") == 0
        with DataStream.open(path) as writer:
            add(writer, TWO)
        assert stream.refresh()
        assert items(stream) == ONE + TWO
    with pytest.raises(StreamFileError, match="descriptor 98765: cannot be opened: Bad file"):
        DataStream.open(98765, read_only=True)


# One writer.


HOLD = """
import os, sys
from datastreamer import DataStream
stream = DataStream.open(sys.argv[1])
if "fork" in sys.argv[2:]:
    reading, writing = os.pipe()
    if not os.fork():
        os.write(writing, b"here")
        sys.stdin.readline()
        os._exit(0)
    os.read(reading, 4)
print(os.getpid(), flush=True)
if "write" in sys.argv[2:]:
    at = stream.total_entries
    while True:
        with stream.atomic_op() as op:
            for n in range(3):
                assert op.add_bookmark(at.to_bytes(4, "big")) == at
                op.add_entry(1, at.to_bytes(8, "big") * (at % 300))
                at += 2
        print(at, flush=True)
sys.stdin.readline()
"""


class Other:
    """Another process that has the stream open for writing."""

    def __init__(self, path: Path, *what: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", HOLD, str(path), *what],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        )
        self.pid = int(self.out.readline())

    @property
    def out(self) -> IO[str]:
        assert self.process.stdout is not None
        return self.process.stdout

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    def __enter__(self) -> Other:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None and self.process.stdin is not None:
            self.process.stdin.close()
            self.process.wait(30)
        for pipe in (self.process.stdin, self.out):
            if pipe is not None:
                pipe.close()


def test_the_second_writer_is_told_the_first_one_s_pid(tmp_path: Path) -> None:
    path = make(tmp_path / "s.bin", ONE)
    with Other(path) as other:
        with pytest.raises(StreamLocked) as caught:
            DataStream.open(path)
        assert caught.value.pid == other.pid
        assert str(caught.value) == (
            f"{path}: locked by another writer, process {other.pid}; only one process may write"
        )
        with DataStream.open(path, read_only=True) as reader:
            assert items(reader) == ONE
        with pytest.raises(StreamLocked):  # and the reader's close freed nothing
            DataStream.open(path)
    with DataStream.open(path) as stream:
        add(stream, TWO)


def test_twice_in_one_process(tmp_path: Path) -> None:
    path = tmp_path / "s.bin"
    with DataStream.create(path) as stream:
        with pytest.raises(StreamLocked) as caught:
            DataStream.open(path)
        assert caught.value.pid == os.getpid()
        add(stream, ONE)
        with pytest.raises(StreamLocked):
            DataStream.open(path)
    with DataStream.open(path) as stream:
        assert items(stream) == ONE


def test_a_pid_of_another_boot_is_nobody_s(tmp_path: Path) -> None:
    path = tmp_path / "s.bin"
    with DataStream.create(path, index="memory"):
        with path.open("r+b") as file:
            page = bytearray(file.read(FIRST))
            records.put_writer(page, records.Writer(os.getpid(), b"an earlier boot."))
            file.seek(0)
            file.write(page)
        with pytest.raises(StreamLocked, match="locked by another writer, another process") as seen:
            DataStream.open(path)
        assert seen.value.pid == 0


def test_a_killed_writer_frees_the_lock(tmp_path: Path) -> None:
    """Whatever it was doing: what it said was committed is there, in whole operations."""
    path = make(tmp_path / "s.bin")
    told = 0
    for commits in (1, 40):
        with Other(path, "write") as other:
            for _ in range(commits):
                told = int(other.out.readline())
            other.kill()
            rest = other.out.read().split("\n")
            told = int(rest[-2]) if len(rest) > 1 else told
        with DataStream.open(path) as stream:
            assert told <= stream.total_entries <= told + 6
            assert stream.total_entries % 6 == 0
            known = bookmarks_of(scan_file(path))
            assert {key: stream.bookmark(key) for key in known} == known
            assert known == {n.to_bytes(4, "big"): n for n in range(0, stream.total_entries, 2)}
        size_of(path)


def test_a_follower_beside_another_process(tmp_path: Path) -> None:
    """What the writer has said it committed is seen at the next look, index and all."""
    path = make(tmp_path / "s.bin")
    with Other(path, "write") as other:  # leaves an index with a watermark behind
        told = [int(other.out.readline()) for _ in range(30)][-1]
        other.kill()
    with DataStream.open(path) as stream:
        stream.bookmarks.wait()
    with Other(path, "write") as other, DataStream.open(path, follow=True) as follower:
        for round_ in range(200):
            told = int(other.out.readline())
            follower.refresh()
            total = follower.total_entries
            assert total >= told
            assert total % 6 == 0
            for number in (0, told * round_ // 200 // 2 * 2, told - 2):
                assert follower.bookmark(number.to_bytes(4, "big")) == number
                data = number.to_bytes(8, "big") * (number % 300)
                assert follower.entry(number + 1).data == data
        assert follower.bookmarks._index is not None
        assert follower.bookmarks._thread is None  # the writer's index, none of its own
        other.kill()
        follower.refresh()
        assert [e.number for e in follower.entries()] == [*range(follower.total_entries)]


def test_a_forked_child_does_not_keep_the_lock(tmp_path: Path) -> None:
    path = make(tmp_path / "s.bin", ONE)
    with Other(path, "fork") as other:
        with pytest.raises(StreamLocked):
            DataStream.open(path)
        other.kill()  # its child lives on, with a copy of all its descriptors
        with DataStream.open(path) as stream:
            add(stream, TWO)
            assert items(stream) == ONE + TWO


def in_a_child(work: Any) -> str:
    """What `work()` gives in a forked child; its errors by name."""
    reading, writing = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of forks beside threads
        child = os.fork()
    if not child:
        os.close(reading)
        try:
            said = str(work())
        except BaseException as error:  # noqa: BLE001
            said = f"{type(error).__name__}: {error}"
        os.write(writing, said.encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as source:
        said = source.read()
    assert os.waitpid(child, 0)[1] == 0
    return said


def test_a_forked_child_has_nothing_of_the_stream(tmp_path: Path) -> None:
    path = tmp_path / "s.bin"
    with DataStream.create(path) as stream:
        add(stream, ONE)
        assert stream.bookmark(b"k") == 0
        stream.start_atomic_op()
        stream.add_entry(2, b"half an operation")
        closed = f"StreamClosed: {path}: the stream is closed"
        before = path.read_bytes()
        assert in_a_child(stream.commit_atomic_op) == closed
        assert in_a_child(stream.start_atomic_op) == closed
        assert in_a_child(lambda: stream.entry(0)) == closed
        assert in_a_child(lambda: stream.bookmark(b"k")) == closed
        assert in_a_child(lambda: stream.truncate(0)) == closed
        assert in_a_child(lambda: (stream.close(), stream.closed)[1]) == "True"
        assert in_a_child(lambda: os.fstat(stream.fileno())).startswith("OSError")

        def read_again() -> object:
            with DataStream.open(path, follow=True) as mine:
                return mine.bookmark(b"k"), mine.total_entries

        def write_again() -> object:
            return DataStream.open(path)

        def write_another() -> object:
            with DataStream.create(tmp_path / "child.bin") as mine:
                add(mine, ONE, TWO)
                return mine.bookmark(b"k")

        assert in_a_child(read_again) == "(0, 2)"
        assert in_a_child(write_again).startswith("StreamLocked")
        assert in_a_child(write_another) == "3"
        assert path.read_bytes() == before
        # Here everything goes on.
        stream.add_entry(2, b"the other half")
        stream.commit_atomic_op()
        assert [data for _, data in items(stream)][2:] == [b"half an operation", b"the other half"]
        add(stream, TWO)
        stream.bookmarks.wait()
        assert stream.bookmark(b"k") == 5
        with pytest.raises(StreamLocked):
            DataStream.open(path)


# Readers leave no trace.


@pytest.mark.parametrize("mode", [{"read_only": True}, {"follow": True}], ids=str)
@pytest.mark.parametrize("what", ["with an index", "without", "went back", "golden", "no header"])
def test_a_reader_leaves_no_trace(
    tmp_path: Path, golden: Golden, mode: dict[str, Any], what: str
) -> None:
    folder = tmp_path / "streams"
    folder.mkdir()
    path = folder / "s.bin"
    match what:
        case "with an index":
            make(path, ONE, TWO)
            assert (folder / "s.bin.index" / "lock.mdb").exists()
        case "without":
            make(path, ONE, TWO, index="memory")
        case "golden":
            path.write_bytes(golden.content("small"))
        case "went back":
            with DataStream.create(tmp_path / "w.bin", index="memory") as stream:
                add(stream, ONE, TWO)
                found = copied(tmp_path / "w.bin", "found.bin")
            power_cut(found, path, (FIRST + 40, FIRST + 60))
        case "no header":
            path.write_bytes(b"polygonDATSTREAM")
    path.chmod(0o444)
    before = trace_of(folder)
    try:
        stream = DataStream.open(path, **mode)
    except NotAStream:
        assert what == "no header"
    else:
        with stream:
            assert len(list(stream.entries())) == stream.total_entries > 0
            key = next(e.data for e in stream.entries() if e.type == BOOKMARK)
            for _ in range(3):
                stream.bookmark(key)
            stream.refresh()
            len(stream.bookmarks)
            stream.bookmarks.wait()
            with pytest.raises(StreamReadOnly, match="open for reading only"):
                stream.start_atomic_op()
            with pytest.raises(StreamReadOnly):
                stream.truncate(0)
            with pytest.raises(StreamReadOnly):
                stream.update_entry(1, 1, b"xxx")
            with pytest.raises(StreamReadOnly):
                stream.sync()
    assert trace_of(folder) == before


# Size.


def test_grows_by_pages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [1000.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: clock[0])
    path, sizes = tmp_path / "s.bin", []
    with DataStream.create(path, index="memory", sync="os") as stream:
        for _ in range(4):  # slowly: a page when it is needed
            add(stream, [(1, bytes(LARGEST - 40))])
            sizes.append((size_of(path) - FIRST) // PAGE)
            clock[0] += 60
        assert sizes == [1, 2, 3, 4]
        grown = []
        for _ in range(40):  # and in ever larger steps where there is no end of it
            add(stream, [(1, bytes(LARGEST - 40))])
            pages = (size_of(path) - FIRST) // PAGE
            if not grown or grown[-1] != pages:
                grown.append(pages)
        assert grown == [5, 7, 11, 19, 35, 67]
        assert stream.file_size == size_of(path)
    assert size_of(path) == FIRST + 67 * PAGE


def test_the_steps_have_a_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MAX_STEP", 4)
    disk = FaultyDisk()
    with DataStream.create(tmp_path / "s.bin", index="memory", sync="os", disk=disk) as stream:
        for _ in range(30):
            add(stream, [(1, bytes(LARGEST - 40))])
    steps = [(b - a) // PAGE for a, b in zip(disk.resized, disk.resized[1:], strict=False)]
    assert steps == [1, 2, *[4] * 7]


@pytest.mark.parametrize("sync", ["commit", "os"])
def test_a_full_last_page_has_the_next_one_behind_it(tmp_path: Path, sync: Any) -> None:
    """And it has it before a header says so."""
    path, disk = tmp_path / "s.bin", FaultyDisk()
    seen: list[int] = []
    disk.before["commit header"] = lambda: seen.append(size_of(path))
    with DataStream.create(path, index="memory", sync=sync, disk=disk) as stream:
        add(stream, [(1, bytes(LARGEST))])
        assert stream.header.total_length == FIRST + PAGE
        assert stream.file_size == FIRST + 2 * PAGE
        assert seen == [FIRST + 2 * PAGE]
        add(stream, [(1, bytes(LARGEST - 1))])
        assert stream.file_size == FIRST + 2 * PAGE  # one byte is unused
        assert list(stream.reader.batches(0))[-1].next_number == 2
    assert size_of(path) == FIRST + 2 * PAGE


def test_a_file_without_room_behind_its_end_is_given_some(tmp_path: Path, golden: Golden) -> None:
    path = tmp_path / "s.bin"
    path.write_bytes(golden.content("boundary")[: FIRST + 2 * PAGE])
    with DataStream.open(path, read_only=True) as stream:
        assert stream.total_entries == 4
    assert size_of(path) == FIRST + 2 * PAGE
    with DataStream.open(path, index="memory") as stream:
        assert size_of(path) == FIRST + 3 * PAGE
        add(stream, ONE)


def test_rollbacks_leave_the_size_in_form(tmp_path: Path) -> None:
    path = tmp_path / "s.bin"
    with DataStream.create(path, index="memory") as stream:
        stream.start_atomic_op()
        for _ in range(12):
            stream.add_entry(1, bytes(LARGEST))
        stream.rollback_atomic_op()
        size_of(path)
        assert stream.total_entries == 0
        add(stream, ONE)
        assert items(stream) == ONE
    assert scan_file(path)[0].data == b"k"


# A disk that refuses.


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
        add(stream, TWO)  # what needs no more room goes on
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
            while len(stream.atomic_op().arena) <= 4 * PAGE:
                want.append((7, bytes([len(want)]) * 1_000_000))
                stream.add_entry(*want[-1])
            for _ in range(2):
                with pytest.raises(WriteFailed, match=r"s\.bin: the system refused to write: "):
                    stream.add_entry(8, b"its turn comes after the others are placed")
            disk.faults = {}
            stream.add_entry(7, b"goes on")
            want.append((7, b"goes on"))
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
            with pytest.raises(CommitInDoubt, match="until the disk takes writes again"):
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
        assert stream._file.synced == (end, 4)
        assert items(stream) == ONE + TWO


def test_what_a_failed_sync_lost(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The bytes are not what they were: the entries are named, and the stream goes back."""
    path, disk = tmp_path / "s.bin", FaultyDisk()
    with DataStream.create(path, sync="os", disk=disk) as stream:
        add(stream, ONE)
        stream.sync()
        add(stream, TWO)
        changes: list[tuple[int, int | None, bool]] = []
        stream.on_change(lambda *what: changes.append(what))

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
        with pytest.raises(EntriesLost, match=r"entries 2 to 3 are lost.*goes on with entry 2"):
            stream.start_atomic_op()
        assert changes == [(2, None, False), (2, None, True)]
        assert "entries 2 to 3 are lost" in caplog.text
        assert items(stream) == ONE
        assert stream.epoch == 1
        add(stream, TWO)
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
        assert stream._file.synced.entries == 2
        assert items(stream) == ONE
    with DataStream.open(path, index="memory") as stream:
        assert items(stream) == ONE


def test_a_disk_that_stays_dead(tmp_path: Path) -> None:
    """Not even the old header can be put back: in doubt it stays, and the close is quiet."""
    path, disk = tmp_path / "s.bin", FaultyDisk()
    stream = DataStream.create(path, index="memory", disk=disk)
    add(stream, ONE)
    disk.faults = dict.fromkeys(["commit sync", "write", "sync", "resize"], errno.EIO)
    with pytest.raises(CommitInDoubt):
        add(stream, TWO)
    assert items(stream) == ONE
    stream.close()
    with DataStream.open(path) as stream:
        assert items(stream) in (ONE, ONE + TWO)


@pytest.mark.parametrize("what", ["write", "sync"])
def test_a_truncation_that_fails(tmp_path: Path, what: str) -> None:
    path, disk = tmp_path / "s.bin", FaultyDisk()
    with DataStream.create(path, disk=disk) as stream:
        add(stream, ONE, TWO)
        stream.bookmarks.wait()
        disk.faults = {what: errno.EIO}
        with pytest.raises(CommitInDoubt):
            stream.truncate(2)
        disk.faults = {}
        assert items(stream) == ONE + TWO
        assert stream.bookmark(b"k") == 3
    with DataStream.open(path) as stream:
        assert items(stream) in (ONE, ONE + TWO)
        stands = bookmarks_of(scan_file(path))
        assert stream.bookmark(b"k") == stands[b"k"]


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
    with DataStream.open(path, index="memory") as stream:  # and the lock is gone
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


# Closed.


def test_closed(tmp_path: Path) -> None:
    path = make(tmp_path / "s.bin", ONE)
    stream = DataStream.open(path)
    iteration = stream.batches()
    stream.close()
    stream.close()
    assert stream.closed
    for call in (
        lambda: stream.entry(0),
        lambda: stream.entries().__next__(),
        lambda: list(iteration),
        stream.batches,
        lambda: stream.bookmark(b"k"),
        lambda: stream.first_event_after_bookmark(b"k"),
        lambda: stream.data_between_bookmarks(b"k", b"k"),
        stream.start_atomic_op,
        lambda: stream.add_entry(1, b""),
        lambda: stream.add_bookmark(b"k"),
        lambda: stream.add_entries(1, [b""]),
        stream.commit_atomic_op,
        stream.rollback_atomic_op,
        lambda: stream.truncate(0),
        lambda: stream.update_entry(1, 1, b"two"),
        stream.sync,
        stream.refresh,
        lambda: stream.atomic_op().__enter__(),
    ):
        with pytest.raises(StreamClosed, match=r"s\.bin: the stream is closed"):
            call()  # type: ignore[no-untyped-call]


def test_an_exception_in_the_block_closes(tmp_path: Path) -> None:
    path = tmp_path / "s.bin"
    stream = DataStream.create(path, index="memory")

    def fail() -> None:
        with stream:
            stream.start_atomic_op()
            stream.add_entry(1, b"never")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert stream.closed
    assert scan_file(path) == []


def test_a_stream_file_alone(tmp_path: Path) -> None:
    """Without operations and bookmarks: what stands below `DataStream`."""
    path = tmp_path / "s.bin"
    file = StreamWriter.create(path, Header(1, 2, 3))
    assert file.policy == "commit"
    assert file.head == file.synced == (FIRST, 0)
    file.close()
    file.close()
    with pytest.raises(StreamClosed):
        file.sync()
