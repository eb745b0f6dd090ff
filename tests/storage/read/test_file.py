"""The file: made, opened, locked, grown; and a disk that refuses at every step."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from datastreamer import DataStream
from datastreamer.errors import (
    FileExists,
    FileMissing,
    NotAStream,
    StreamClosed,
    StreamFileError,
    StreamReadOnly,
    UsageError,
    WrongStreamType,
)
from datastreamer.format import Header
from datastreamer.storage.disk import preallocation as module
from datastreamer.storage.write.opening import create_stream
from tests.conftest import Golden
from tests.storage.made import (
    BOOKMARK,
    FIRST,
    LARGEST,
    ONE,
    PAGE,
    TWO,
    FaultyDisk,
    add,
    copied,
    header_of,
    items,
    make,
    power_cut,
    scan_file,
    size_of,
    trace_of,
)

ROOT = Path(__file__).resolve().parents[3]


# Making.


def test_a_new_stream(tmp_path: Path) -> None:
    path = tmp_path / "s.bin"
    with DataStream.create(path, version=3, system_id=2**64 - 1, stream_type=7) as stream:
        assert stream.header == Header(3, 2**64 - 1, 7, FIRST, 0)
        assert stream.total_entries == 0
        assert stream.writable
        assert repr(stream) == f"<DataStream '{path}': 0 entries, writable>"
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
        {"stream_type": 1.5},
        {"version": "2"},
        {"sync": "always"},
        {"sync": 0},
        {"index": "nosuch"},
    ],
    ids=str,
)
def test_create_refuses(tmp_path: Path, options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"not|unknown bookmark index") as caught:
        DataStream.create(tmp_path / "s.bin", **options)
    assert isinstance(caught.value, UsageError)
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
    before, there = path.lstat(), {*tmp_path.iterdir()}
    with pytest.raises(FileExists, match=r"s\.bin: exists already") as caught:
        DataStream.create(path)
    assert isinstance(caught.value, FileExistsError)
    assert (path.lstat().st_mtime_ns, path.lstat().st_ino) == (before.st_mtime_ns, before.st_ino)
    assert {*tmp_path.iterdir()} == there


def test_create_while_another_process_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
def test_what_is_not_a_stream(tmp_path: Path, what: str, mode: dict[str, Any]) -> None:
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
            says = "not a stream file: it does not begin with polygonDATSTREAM"
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
    names = ["s.bin", "s.bin.index", "s.bin.pages"]
    assert sorted(p.name for p in tmp_path.iterdir()) == names


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
    """Without operations and bookmarks: what is below `DataStream`."""
    path = tmp_path / "s.bin"
    writer = create_stream(path, Header(1, 2, 3))
    assert writer.durability.policy == "commit"
    assert writer.owned.head == writer.owned.end.base == (FIRST, 0)
    writer.close()
    writer.close()
    with pytest.raises(StreamClosed):
        writer.durability.sync()
