"""A stream whose path does not lead to its file any more: nothing is acknowledged into it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from datastreamer import errors
from datastreamer.errors import FileReplaced, IndexFailed, StreamLocked, UnknownBookmark
from datastreamer.storage import view
from datastreamer.storage.disk import identity
from datastreamer.storage.disk.file_ops import OsDisk
from datastreamer.storage.disk.identity import OpenPath
from datastreamer.storage.maintain.snapshot import snapshot
from datastreamer.storage.stream import DataStream
from datastreamer.storage.write import owned_file as owned
from datastreamer.storage.write.sync_policy import SyncPolicy
from tests.storage.lab.disk import SimDisk

POLICIES: list[SyncPolicy] = ["commit", "os", 5]
LINUX = sys.platform.startswith("linux")


@pytest.fixture(autouse=True)
def always_look(monkeypatch: pytest.MonkeyPatch) -> None:
    """No look is spared: what a second does is one test's to see."""
    monkeypatch.setattr(owned, "LOOK_SECONDS", 0.0)
    monkeypatch.setattr(view, "LOOK_SECONDS", 0.0)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    folder = tmp_path / "folder"
    folder.mkdir()
    return folder / "s.bin"


class Way(NamedTuple):
    """How a path ceases to lead to the open file, what is said of it, and the way back."""

    go: Callable[[Path], object]
    said: str
    back: Callable[[Path], object] | None = None


def unlink(path: Path) -> None:
    path.unlink()


def move_away(path: Path) -> None:
    path.rename(path.with_name("moved.bin"))


def move_back(path: Path) -> None:
    path.with_name("moved.bin").rename(path)


def put_another(path: Path) -> None:
    """As `mv other path`."""
    other = path.with_name("other.bin")
    DataStream.create(other, index="memory").close()
    os.replace(other, path)


def make_anew(path: Path) -> None:
    """Another process removes the file and makes a stream at its path."""
    path.unlink()
    program = (
        "import sys; from datastreamer import DataStream; DataStream.create(sys.argv[1]).close()"
    )
    subprocess.run([sys.executable, "-c", program, str(path)], check=True)


def put_junk(path: Path) -> None:
    path.unlink()
    path.write_text("no stream")


def put_a_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def rename_folder(path: Path) -> None:
    path.parent.rename(path.parent.with_name("renamed"))


def rename_folder_back(path: Path) -> None:
    path.parent.with_name("renamed").rename(path.parent)


def put_a_loop(path: Path) -> None:
    move_away(path)
    path.symlink_to(path)


def end_the_loop(path: Path) -> None:
    path.unlink()
    move_back(path)


REMOVED = "the file was removed"
MOVED = "the file was moved away"
THERE = ", and another file is at its path now"
WAYS = {
    "unlink": Way(unlink, REMOVED),
    "move": Way(move_away, MOVED, move_back),
    "replace": Way(put_another, REMOVED + THERE),
    "make anew": Way(make_anew, REMOVED + THERE),
    "junk": Way(put_junk, REMOVED + THERE),
    "folder": Way(put_a_folder, REMOVED + THERE),
    "folder renamed": Way(rename_folder, MOVED, rename_folder_back),
    "loop": Way(put_a_loop, MOVED, end_the_loop),
}
every_way = pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)


def commit(stream: DataStream, data: bytes, **options: bool) -> None:
    with stream.atomic_op() as op:
        op.add_bookmark(data[:16])
        op.add_entry(1, data)
        op.commit(**options)


def events(stream: DataStream) -> list[bytes]:
    return [bytes(entry.data) for entry in stream.entries() if entry.type == 1]


def lost(stream: DataStream, call: Callable[[], object], said: str) -> str:
    """The one line with which `call` is refused."""
    with pytest.raises(FileReplaced) as caught:
        call()
    reported = str(caught.value)
    assert reported.startswith(f"{stream.path}: {said}; "), reported
    assert "\n" not in reported
    return reported


@every_way
@pytest.mark.parametrize("sync", POLICIES)
def test_nothing_is_committed_where_the_path_leads_elsewhere(
    path: Path, sync: SyncPolicy, way: Way
) -> None:
    stream = DataStream.create(path, sync=sync, index="memory")
    commit(stream, b"one")
    way.go(path)
    stream.start_atomic_op()
    stream.add_entry(1, b"two")
    reported = lost(stream, stream.commit_atomic_op, way.said)
    assert "nothing more is committed" in reported
    assert "stream.snapshot(OUT)" in reported
    # Still open: again, and rolled back.
    lost(stream, stream.commit_atomic_op, way.said)
    if way.back is None:
        stream.rollback_atomic_op()
        assert events(stream) == [b"one"]
        closed = lost(stream, stream.close, way.said)
        assert "its 2 entries are not at this path" in closed
        assert stream.closed
        stream.close()
        return
    way.back(path)
    stream.commit_atomic_op()
    assert events(stream) == [b"one", b"two"]
    stream.close()
    with DataStream.open(path) as again:
        assert events(again) == [b"one", b"two"]


@every_way
@pytest.mark.parametrize("sync", POLICIES)
def test_what_waits_for_a_sync_is_not_acknowledged(path: Path, sync: SyncPolicy, way: Way) -> None:
    stream = DataStream.create(path, sync=sync, index="memory")
    stream.start_atomic_op()
    stream.add_entry(1, b"one")
    pending = stream.commit_atomic_op(wait=False)
    assert pending is not None
    way.go(path)
    lost(stream, pending.wait, way.said)
    lost(stream, pending.done, way.said)
    lost(stream, stream.sync, way.said)
    stream.start_atomic_op()
    stream.add_entry(1, b"two")
    lost(stream, lambda: stream.commit_atomic_op(wait=False), way.said)
    stream.rollback_atomic_op()
    if way.back is not None:
        way.back(path)
        assert pending.wait()
        assert pending.done()
        stream.close()
        assert pending.done()
        return
    lost(stream, stream.close, way.said)
    with pytest.raises(FileReplaced, match="the stream is closed"):
        pending.done()


@every_way
def test_nothing_committed_is_changed(path: Path, way: Way) -> None:
    stream = DataStream.create(path, index="memory")
    commit(stream, b"one")
    commit(stream, b"two")
    way.go(path)
    lost(stream, lambda: stream.truncate(2), way.said)
    lost(stream, lambda: stream.update_entry(1, 1, b"new"), way.said)
    assert events(stream) == [b"one", b"two"]
    assert not list(path.parent.parent.rglob("*.undo*"))
    if way.back is not None:
        way.back(path)
        stream.update_entry(1, 1, b"new")
        stream.truncate(2)
        assert events(stream) == [b"new"]
        stream.close()
    else:
        lost(stream, stream.close, way.said)


def test_a_symbolic_link_that_is_set_to_another_file(path: Path) -> None:
    DataStream.create(path, index="memory").close()
    other = path.with_name("other.bin")
    DataStream.create(other, index="memory").close()
    link = path.with_name("link")
    link.symlink_to(path)
    stream = DataStream.open(link, index="memory")
    commit(stream, b"one")
    link.unlink()
    link.symlink_to(other)
    with stream.atomic_op() as op:
        op.add_entry(1, b"two")
        lost(stream, op.commit, MOVED + THERE)
        link.unlink()
        link.symlink_to(path.name)  # the same file again, by another way
    assert events(stream) == [b"one", b"two"]
    stream.close()


def test_a_relative_path_and_another_working_folder(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is the path as it was opened, and a link's own "..", that are looked at."""
    (path.parent / "deep").mkdir()
    (path.parent.parent / "link").symlink_to(path.parent / "deep")
    monkeypatch.chdir(path.parent.parent)
    DataStream.create(path, index="memory").close()
    with DataStream.open("link/../s.bin", index="memory") as stream:
        monkeypatch.chdir(path.parent)
        commit(stream, b"one")
        unlink(path)
        lost(stream, lambda: commit(stream, b"two"), REMOVED)
        with pytest.raises(FileReplaced):
            stream.close()


def test_a_path_that_cannot_be_looked_up(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> tuple[int, int]:
        raise PermissionError(13, "Permission denied")

    with DataStream.create(path, index="memory") as stream:
        with monkeypatch.context() as patched:
            patched.setattr(OsDisk, "identity", refuse)
            said = "the path cannot be looked up (Permission denied)"
            lost(stream, lambda: commit(stream, b"one"), said)
        commit(stream, b"two")
        assert events(stream) == [b"two"]


def test_another_name_is_not_the_path(path: Path) -> None:
    """A file with two links, of which the one that it was opened by goes."""
    stream = DataStream.create(path, index="memory")
    os.link(path, path.with_name("copy.bin"))
    commit(stream, b"one")
    unlink(path)
    lost(stream, lambda: commit(stream, b"two"), MOVED)
    os.link(path.with_name("copy.bin"), path)
    commit(stream, b"three")
    stream.close()


def test_a_huge_operation_is_refused_too(path: Path) -> None:
    """One whose entries were written to their place before the commit."""
    stream = DataStream.create(path, index="memory")
    stream.start_atomic_op()
    for _ in range(12):
        stream.add_entry(1, bytes(1_000_000))
    unlink(path)
    lost(stream, stream.commit_atomic_op, REMOVED)
    stream.rollback_atomic_op()
    assert stream.total_entries == 0
    with pytest.raises(FileReplaced):
        stream.close()


def test_every_second_a_look(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between two looks commits go on as before; the next after a second looks."""
    monkeypatch.setattr(owned, "LOOK_SECONDS", identity.LOOK_SECONDS)
    assert identity.LOOK_SECONDS < 1
    looks = []
    look = OpenPath.difference

    def counted(self: OpenPath) -> str:
        looks.append(self.absolute)
        return look(self)

    monkeypatch.setattr(OpenPath, "difference", counted)
    with DataStream.create(path, sync="os", index="memory") as stream:
        looks.clear()
        commit(stream, b"first")
        assert len(looks) == 1
        writer = stream._ensure_writable()
        end = writer.end
        end.path_check_at = end.coarse_time() + 3600 * 10**9
        with monkeypatch.context() as patch:
            patch.setattr(writer, "prepare", None)
            for _ in range(100):
                commit(stream, b"more")
        assert len(looks) == 1
        end.path_check_at = end.coarse_time()  # the time has come
        commit(stream, b"then")
        assert len(looks) == 2
        assert end.coarse_time() < end.path_check_at
        stream.sync()
        assert len(looks) == 3


def test_an_open_that_comes_too_late(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file is replaced between its opening and its lock."""
    DataStream.create(path, index="memory").close()
    opened = OsDisk.open

    def late(self: OsDisk, name: str, *, write: bool) -> object:
        file = opened(self, name, write=write)
        if write and name == str(path) and not path.with_name("moved.bin").exists():
            move_away(path)
            DataStream.create(path, index="memory").close()
        return file

    monkeypatch.setattr(OsDisk, "open", late)
    with pytest.raises(FileReplaced, match="moved away, and another file"):
        DataStream.open(path, index="memory")
    DataStream.open(path, index="memory").close()


def test_the_error_is_of_the_tree() -> None:
    assert issubclass(FileReplaced, errors.StreamFileError)
    assert not issubclass(FileReplaced, errors.WriteFailed)
    assert "FileReplaced" in errors.__all__


# What is saved.


@pytest.mark.parametrize("how", [unlink, put_another, put_junk])
@pytest.mark.parametrize("sync", POLICIES)
def test_a_snapshot_from_the_open_file(
    path: Path, sync: SyncPolicy, how: Callable[[Path], None]
) -> None:
    stream = DataStream.create(path, system_id=7, sync=sync, index="memory")
    for number in range(100):
        commit(stream, b"%d" % number)
    stream.start_atomic_op()
    stream.add_entry(1, b"waits")
    stream.commit_atomic_op(wait=False)
    how(path)
    saved = path.with_name("saved.bin")
    made = stream.snapshot(saved)
    assert made.header.total_entries == 201
    with pytest.raises(errors.FileExists):
        stream.snapshot(saved)
    with pytest.raises(FileReplaced):
        stream.close()
    with DataStream.open(saved) as again:
        assert again.header.system_id == 7
        assert events(again) == [*(b"%d" % number for number in range(100)), b"waits"]
        commit(again, b"more")


def test_a_snapshot_to_the_streams_own_path(path: Path) -> None:
    stream = DataStream.create(path, index="memory")
    commit(stream, b"one")
    unlink(path)
    stream.snapshot(path)
    lost(stream, lambda: commit(stream, b"two"), REMOVED + THERE)
    with pytest.raises(FileReplaced):
        stream.close()
    with DataStream.open(path) as again:
        assert events(again) == [b"one"]


@pytest.mark.parametrize("follow", [False, True])
def test_a_snapshot_by_a_reader(path: Path, follow: bool) -> None:
    with DataStream.create(path, index="memory") as stream:
        commit(stream, b"one")
        with DataStream.open(path, read_only=True, follow=follow) as reader:
            commit(stream, b"two")
            move_away(path)
            reader.snapshot(path.with_name("saved.bin"))
            assert reader.total_entries == 2  # nothing was looked for in its name
            move_back(path)
    with DataStream.open(path.with_name("saved.bin")) as again:
        assert events(again) == [b"one", b"two"]


def test_a_snapshot_of_a_stream_that_moves_on(path: Path) -> None:
    """Commits of another thread, and a truncation while it is copied."""
    stream = DataStream.create(path, sync="os", index="memory")
    for number in range(50):
        commit(stream, b"%d" % number)
    begun = []

    def advance(done: int, total: int) -> None:
        if not begun:
            begun.append(total)
            stream.truncate(80)

    made = stream.snapshot(path.with_name("saved.bin"), advance=advance)
    assert made.header.total_entries == 80
    stream.close()


@pytest.mark.skipif(not LINUX, reason="there is no /proc")
@pytest.mark.parametrize("how", [unlink, move_away, put_another])
def test_the_command_that_the_error_names(path: Path, how: Callable[[Path], None]) -> None:
    stream = DataStream.create(path, index="memory")
    commit(stream, b"one")
    how(path)
    with pytest.raises(FileReplaced) as caught:
        commit(stream, b"two")
    reported = str(caught.value)
    saved = path.with_name("saved.bin")
    words = (
        reported[reported.index("`") + 1 : reported.rindex("`")].replace("OUT", str(saved)).split()
    )
    subprocess.run([sys.executable, "-m", *words], check=True, capture_output=True)
    with DataStream.open(saved) as again:
        assert events(again) == [b"one"]
    with pytest.raises(FileReplaced):
        stream.close()


@pytest.mark.skipif(not LINUX, reason="there is no /proc")
def test_no_stream_is_written_by_the_path_of_a_removed_file(path: Path) -> None:
    DataStream.create(path, index="memory").close()
    descriptor = os.open(path, os.O_RDWR)
    try:
        unlink(path)
        name = f"/proc/self/fd/{descriptor}"
        with pytest.raises(FileReplaced, match="was removed, before it was open"):
            DataStream.open(name, index="memory")
        snapshot(name, path)  # to read it is another thing
    finally:
        os.close(descriptor)


# Files beside it.


def test_a_second_writer_has_an_index_of_its_own(path: Path) -> None:
    """Both in this process, where environments of LMDB are shared."""
    first = DataStream.create(path)
    commit(first, b"shared")
    commit(first, b"of the first")
    first.bookmarks.wait()
    unlink(path)
    with DataStream.create(path) as second:
        commit(second, b"of the second")
        second.bookmarks.wait()
        with pytest.raises(IndexFailed, match="belongs to another stream"):
            first.bookmarks.rebuild()
        second.bookmarks.wait()
        assert second.bookmark(b"of the second") == 0
        assert first.bookmark(b"of the first") == 2
        with pytest.raises(UnknownBookmark):
            second.bookmark(b"shared")
        with pytest.raises(FileReplaced):
            first.close()
        assert second.bookmark(b"of the second") == 0
        commit(second, b"later")
    with DataStream.open(path, read_only=True) as reader:
        index = reader.bookmarks.trusted.index
        assert index is not None
        assert index.newest(b"later") == 2
        assert index.newest(b"shared") is None


SECOND = """
import sys
from datastreamer import DataStream
with DataStream.create(sys.argv[1]) as second, second.atomic_op() as op:
    op.add_bookmark(b"of the second")
    op.add_entry(1, b"event")
    op.commit()
    second.bookmarks.wait()
    print("ready", flush=True)
    sys.stdin.readline()
    second.bookmarks.wait()
"""


def test_a_second_writer_elsewhere_has_an_index_of_its_own(path: Path) -> None:
    first = DataStream.create(path)
    commit(first, b"of the first")
    first.bookmarks.wait()
    unlink(path)
    words = [sys.executable, "-c", SECOND, str(path)]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        before = (path.parent / "s.bin.index" / "data.mdb").stat().st_ino
        with pytest.raises(IndexFailed, match="belongs to another stream"):
            first.bookmarks.rebuild()
        assert first.bookmark(b"of the first") == 0
        with pytest.raises(FileReplaced):
            first.close()
        process.communicate(b"\n", timeout=60)
        assert process.returncode == 0
    assert (path.parent / "s.bin.index" / "data.mdb").stat().st_ino == before
    with DataStream.open(path, read_only=True) as reader:
        index = reader.bookmarks.trusted.index
        assert index is not None
        assert index.newest(b"of the second") == 0
        assert index.newest(b"of the first") is None


def test_the_journal_of_another_file_is_left_alone(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file is replaced while an update is under way, and the second writer has a journal."""
    first = DataStream.create(path, index="memory")
    commit(first, b"old")
    journal = path.with_name("s.bin.undo")
    writer = first._ensure_writable()
    part = writer.owned.file.part

    def replace(start: int, stop: int) -> None:
        assert journal.exists()
        path.unlink()
        journal.unlink()
        journal.write_bytes(b"the second writer's")
        part(start, stop)

    monkeypatch.setattr(writer.owned.file, "part", replace)
    first.update_entry(1, 1, b"new")
    assert journal.read_bytes() == b"the second writer's"
    with pytest.raises(FileReplaced):
        first.close()


def test_no_update_begins_beside_another_file(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file goes between the look and the journal."""
    first = DataStream.create(path, index="memory")
    commit(first, b"old")
    publish = OsDisk.publish

    def late(self: OsDisk, temporary: str, name: str) -> None:
        publish(self, temporary, name)
        path.unlink()

    monkeypatch.setattr(OsDisk, "publish", late)
    with pytest.raises(FileReplaced):
        first.update_entry(1, 1, b"new")
    assert not path.with_name("s.bin.undo").exists()
    assert events(first) == [b"old"]
    with pytest.raises(FileReplaced):
        first.close()


def test_the_lock_goes_with_the_close(path: Path) -> None:
    first = DataStream.create(path, index="memory")
    move_away(path)
    with pytest.raises(StreamLocked):
        DataStream.open(path.with_name("moved.bin"), index="memory")
    with pytest.raises(FileReplaced):
        first.close()
    DataStream.open(path.with_name("moved.bin"), index="memory").close()


# Readers.


@every_way
def test_a_follower_is_notified(path: Path, way: Way) -> None:
    stream = DataStream.create(path, index="memory")
    commit(stream, b"one")
    with DataStream.open(path, follow=True) as follower:
        assert not follower.refresh()
        found = follower.entries()
        way.go(path)
        lost(follower, follower.refresh, way.said)
        with pytest.raises(FileReplaced):
            list(found)
        if way.back is not None:
            way.back(path)
            assert not follower.refresh()
            assert events(follower) == [b"one"]
    if way.back is None:
        with pytest.raises(FileReplaced):
            stream.close()
    else:
        stream.close()


def test_a_reader_that_does_not_follow_reads_on(path: Path) -> None:
    with DataStream.create(path, index="memory") as stream:
        commit(stream, b"one")
        with DataStream.open(path, read_only=True) as reader:
            move_away(path)
            assert not reader.refresh()
            assert events(reader) == [b"one"]
            move_back(path)


# On the simulated disk.


def test_on_a_simulated_disk() -> None:
    disk, path = SimDisk(), "/simulated/s.bin"
    process = disk.process()
    stream = DataStream.create(path, index="memory", disk=process)
    commit(stream, b"one")
    disk.rename(path, "/simulated/away")
    lost(stream, lambda: commit(stream, b"two"), MOVED)
    disk.rename("/simulated/away", path)
    commit(stream, b"three")
    disk.unlink(path)
    DataStream.create(path, index="memory", disk=disk.process()).close()
    lost(stream, lambda: commit(stream, b"four"), REMOVED + THERE)
    stream.snapshot("/simulated/saved")
    with pytest.raises(FileReplaced):
        stream.close()
    with DataStream.open("/simulated/saved", index="memory", disk=disk.process()) as saved:
        assert events(saved) == [b"one", b"three"]
