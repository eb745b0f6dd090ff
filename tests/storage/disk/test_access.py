"""Files beside a stream: no wider than it, no foreign link or file is used.

Every kind of file that is made beside a stream, or from one, is in `MADE`.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
import struct
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from datastreamer import DataStream, FileCursor, LmdbCursor, SqliteStore
from datastreamer.arrow.export import export
from datastreamer.errors import (
    CommitInDoubt,
    CursorFailed,
    DatastreamerError,
    FileExists,
    IndexFailed,
    StreamFileError,
    UntrustedFile,
)
from datastreamer.storage.bookmarks import lmdb_environment as environment
from datastreamer.storage.bookmarks.registry import LMDB_ANEW
from datastreamer.storage.disk.access import Access, make_folder
from datastreamer.storage.disk.atomic_file import new_file, remove_left_overs
from datastreamer.storage.disk.file_ops import OsDisk
from datastreamer.storage.header import undo_journal as journal
from datastreamer.storage.maintain.check import verify
from datastreamer.storage.maintain.repair import repair
from datastreamer.storage.maintain.snapshot import snapshot
from tests.storage.made import FaultyDisk, add, half_update, items, make, power_cut, scan_file
from tests.storage.test_cursors import SOME
from tests.storage.write.test_failures import fails_at

NEIGHBOUR, OTHER = 4000, 4001
KEY = b"key"
OPERATION = [(0xB0, KEY), (1, b"x" * 600)]
EXACTLY = "a secret of this stream alone"

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="plays several users: needs root")


@pytest.fixture
def shared() -> Iterator[Path]:
    """A folder that every user may write in, as /tmp."""
    folder = Path(tempfile.mkdtemp(prefix="datastreamer-shared-"))
    folder.chmod(0o1777)
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def stream(shared: Path) -> Path:
    path = make(shared / "s.bin", OPERATION, OPERATION, index="memory")
    path.with_name("s.bin.pages").unlink()  # it has the permissions that the stream has now
    return path


@contextlib.contextmanager
def umask(mask: int) -> Iterator[None]:
    before = os.umask(mask)
    try:
        yield
    finally:
        os.umask(before)


# Every kind of file.


def index(path: Path) -> None:
    with DataStream.open(path) as stream:
        assert stream.bookmark(KEY) == 2


def index_anew(path: Path) -> None:
    index(path)
    with DataStream.open(path, index=LMDB_ANEW) as stream:
        assert stream.bookmark(KEY) == 2


def undo_journal(path: Path) -> None:
    disk = FaultyDisk()
    with (
        contextlib.suppress(CommitInDoubt),
        DataStream.open(path, index="memory", disk=disk) as stream,
    ):
        fails_at(disk, "sync", 3)
        stream.update_entry(1, 1, b"y" * 600)
    assert path.with_name("s.bin.undo").exists()


def unused_journal(path: Path) -> None:
    entry = scan_file(path)[1]
    half_update(path, entry.offset + 17, b"x" * 600, b"y" * 600)
    with path.open("r+b") as file:
        file.seek(entry.offset + 17)
        file.write(b"z" * 600)
    DataStream.open(path, index="memory").close()
    assert len(list(path.parent.glob("s.bin.undo.*.unused"))) == 1


def cut_bytes(path: Path) -> None:
    mode = stat.S_IMODE(path.stat().st_mode)
    with DataStream.open(path, sync="os", index="memory") as stream:
        start = stream.header.total_length
        add(stream, OPERATION)
        content = path.read_bytes()
    path.write_bytes(content)
    power_cut(path, path, (start, len(content)))
    assert stat.S_IMODE(path.stat().st_mode) == mode
    DataStream.open(path, index="memory").close()
    assert len(list(path.parent.glob("s.bin.*.cut"))) == 1


def repaired(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(scan_file(path)[-1].offset)
        file.write(b"\xff" * 17)
    repair(path, cut=True)
    assert len(list(path.parent.glob("s.bin.*.repair"))) == 1


def begun_file(path: Path) -> None:
    with (
        contextlib.suppress(KeyboardInterrupt),
        DataStream.open(path, read_only=True, index="memory") as stream,
        new_file(OsDisk(), str(path) + ".x", stream.access),
    ):
        [begun] = path.parent.glob("s.bin.x.*.new")
        os.link(begun, path.with_name("begun"))
        raise KeyboardInterrupt


def snapshot_file(path: Path) -> None:
    snapshot(path, path.with_name("out.bin"))


def exported(name: str) -> Callable[[Path], None]:
    def made(path: Path) -> None:
        export(path, path.with_name(name))

    return made


def file_cursor(path: Path) -> None:
    FileCursor(path.with_name("cursor")).save(SOME)


def lmdb_cursor(path: Path) -> None:
    with LmdbCursor(path.with_name("cursor")) as cursor:
        cursor.save(SOME)


def sqlite_store(path: Path) -> None:
    with SqliteStore(path.with_name("progress.db")) as store:
        assert store.load() is None
        # They are removed when it is closed.
        for side in path.parent.glob("progress.db-*"):
            os.link(side, path.with_name(f"kept{side.name}"))


MADE: dict[str, Callable[[Path], None]] = {
    "index": index,
    "index built anew": index_anew,
    "journal of an update": undo_journal,
    "journal that is of no use": unused_journal,
    "bytes that a recovery cuts": cut_bytes,
    "bytes that a repair cuts": repaired,
    "file that is being written": begun_file,
    "snapshot": snapshot_file,
    "exported folder": exported("parts"),
    "exported Parquet": exported("out.parquet"),
    "exported CSV": exported("out.csv"),
    "exported lines": exported("out.jsonl"),
    "cursor": file_cursor,
    "cursor in LMDB": lmdb_cursor,
    "store of a reassembly": sqlite_store,
}
# What has no stream beside it belongs to its user alone.
PRIVATE = {"cursor", "cursor in LMDB", "store of a reassembly"}


def permissions(folder: Path) -> dict[str, int]:
    """Of all that is there but the stream, as octal digits."""
    return {
        str(path.relative_to(folder)): stat.S_IMODE(path.lstat().st_mode)
        for path in folder.rglob("*")
        if path.name != "s.bin"
    }


@pytest.mark.parametrize(
    "mode, mask",
    [(mode, mask) for mode in (0o600, 0o640, 0o644, 0o604) for mask in (0, 0o022, 0o077)]
    + [(0o660, 0)],
)
@pytest.mark.parametrize("kind", MADE)
def test_nothing_allows_more_than_the_stream(stream: Path, kind: str, mode: int, mask: int) -> None:
    stream.chmod(mode)
    with umask(mask):
        MADE[kind](stream)
    found = permissions(stream.parent)
    assert found
    most = 0o600 if kind in PRIVATE else mode & ~mask
    for name, got in found.items():
        folder = (stream.parent / name).is_dir()
        allowed = most | 0o600 | (0o100 | (most & 0o044) >> 2) * folder
        assert not got & ~allowed, f"{name} has {got:04o}, and {allowed:04o} is allowed"
        # No user loses what the stream allows, either.
        assert got & 0o444 == allowed & 0o444, f"{name} has {got:04o}, not {allowed:04o}"


@as_root
@pytest.mark.parametrize("kind", [kind for kind in MADE if kind not in PRIVATE])
def test_another_group_gets_nothing_by_its_own_bits(stream: Path, kind: str) -> None:
    """New files have this process's group; the stream's has other members."""
    os.chown(stream, 0, OTHER)
    stream.chmod(0o660)
    with umask(0):
        MADE[kind](stream)
    assert [got for got in permissions(stream.parent).values() if got & 0o077] == []


@as_root
def test_the_stream_s_group_reads_in_a_folder_that_hands_it_on(stream: Path) -> None:
    os.chown(stream.parent, 0, OTHER)
    stream.parent.chmod(0o2770)
    os.chown(stream, 0, OTHER)
    stream.chmod(0o640)
    index(stream)
    snapshot_file(stream)
    assert permissions(stream.parent) == {
        "s.bin.index": 0o2750,
        "s.bin.index/data.mdb": 0o640,
        "s.bin.index/lock.mdb": 0o640,
        "out.bin": 0o640,
    }


def access_list(path: Path, kind: str, user: int, group: int, other: int) -> None:
    """A list that gives the neighbour `user`, by the system's bytes."""
    no_id = 0xFFFFFFFF
    mask = 7 if kind == "default" else user | group
    entries = [(1, 7, no_id), (2, user, NEIGHBOUR), (4, group, no_id)]
    entries += [(0x10, mask, no_id), (0x20, other, no_id)]
    packed = struct.pack("<I", 2) + b"".join(struct.pack("<HHI", *entry) for entry in entries)
    try:
        os.setxattr(path, f"system.posix_acl_{kind}", packed)
    except (AttributeError, OSError) as error:
        pytest.skip(f"this file system has no access control lists: {error}")


def lists(folder: Path) -> dict[str, list[str]]:
    """The access control lists of all that is there but the stream."""
    found = {
        str(path.relative_to(folder)): [name for name in os.listxattr(path) if "acl" in name]
        for path in folder.rglob("*")
        if path.name != "s.bin"
    }
    return {name: lists for name, lists in found.items() if lists}


@pytest.mark.parametrize("mode", [0o640, 0o660, 0o644])
@pytest.mark.parametrize("kind", MADE)
def test_the_folder_s_default_list_gives_no_access(stream: Path, kind: str, mode: int) -> None:
    stream.chmod(mode)
    access_list(stream.parent, "default", 7, 5, 0)
    MADE[kind](stream)
    assert permissions(stream.parent)
    if kind not in PRIVATE:
        assert lists(stream.parent) == {}
    # With a list these are the most that it allows.
    most = 0o700 if kind in PRIVATE else mode | (mode & 0o444) >> 2
    assert [oct(got) for got in permissions(stream.parent).values() if got & 0o077 & ~most] == []


def test_a_writer_removes_the_lists_of_an_index(stream: Path) -> None:
    stream.chmod(0o660)
    index(stream)
    folder = stream.with_name("s.bin.index")
    for path in (folder, folder / "data.mdb", folder / "lock.mdb"):
        access_list(path, "access", 7, 7, 0)
    access_list(folder, "default", 7, 7, 0)
    with DataStream.open(stream, read_only=True) as reader:
        assert reader.bookmark(KEY) == 2
        assert reader.bookmarks.trusted.index is None
    index(stream)
    assert lists(stream.parent) == {}


@pytest.mark.parametrize(
    ("user", "other", "allowed"), [(6, 0, 0o600), (0, 4, 0o600), (4, 4, 0o644), (6, 6, 0o644)]
)
def test_a_stream_that_has_a_list(stream: Path, user: int, other: int, allowed: int) -> None:
    """Its files allow what each of those on the list may do."""
    access_list(stream, "access", user, 4, other)
    with umask(0):
        index(stream)
        snapshot_file(stream)
    assert {got & 0o666 for got in permissions(stream.parent).values()} == {allowed}
    assert lists(stream.parent) == {}


def test_an_index_follows_a_stream_whose_permissions_are_taken_away(stream: Path) -> None:
    with umask(0):
        stream.chmod(0o644)
        index(stream)
        assert permissions(stream.parent)["s.bin.index"] == 0o755
        stream.chmod(0o600)
        index(stream)
    assert set(permissions(stream.parent).values()) == {0o700, 0o600}


def test_a_cursor_keeps_the_permissions_that_it_was_given(tmp_path: Path) -> None:
    cursor = FileCursor(tmp_path / "cursor")
    cursor.save(SOME)
    (tmp_path / "cursor").chmod(0o644)
    cursor.save(SOME)
    assert permissions(tmp_path) == {"cursor": 0o644}


# Links.


def opened(path: Path) -> None:
    """By a writer and readers."""
    for options in ({}, {"read_only": True}, {"follow": True}):
        with (
            contextlib.suppress(DatastreamerError),
            DataStream.open(path, **options) as stream,  # type: ignore[arg-type]
        ):
            assert stream.bookmark(KEY) == 2
    with (
        contextlib.suppress(DatastreamerError),
        DataStream.open(path) as writer,
        DataStream.open(path, follow=True) as beside,
    ):
        add(writer, OPERATION)
        writer.update_entry(1, 1, b"y" * 600)
        assert beside.refresh()
        assert beside.bookmark(KEY) == 4
    with contextlib.suppress(DatastreamerError):
        DataStream.open(path, index=LMDB_ANEW).close()
    verify(path)


PLANTED: dict[str, Callable[[Path], None]] = {
    "s.bin.index": opened,
    "s.bin.index/data.mdb": opened,
    "s.bin.index/lock.mdb": opened,
    "s.bin.undo": opened,
    "s.bin.0123abcd.new": opened,
    "s.bin.undo.0123abcd.new": opened,
    "s.bin.20200101T000000.abcd.cut.0123abcd.new": opened,
    "out.bin": snapshot_file,
    "out.bin.0123abcd.new": snapshot_file,
    "out.csv": exported("out.csv"),
    "out.parquet": exported("out.parquet"),
    "cursor": file_cursor,
    "cursor.new": file_cursor,
    "cursor/data.mdb": lmdb_cursor,
    "cursor/lock.mdb": lmdb_cursor,
    "progress.db": sqlite_store,
    "progress.db-wal": sqlite_store,
    "progress.db-journal": sqlite_store,
    "progress.db-shm": sqlite_store,
}


# A hard link to SQLite's files is not refused: they are the user's own choice.
@pytest.mark.parametrize(
    "name, hard",
    [
        (name, hard)
        for name in PLANTED
        for hard in (False, True)
        if not (hard and "progress" in name)
    ],
)
def test_a_planted_link_changes_nothing_elsewhere(
    stream: Path, tmp_path: Path, name: str, hard: bool
) -> None:
    target = tmp_path / "target"
    planted = stream.parent / name
    if planted.parent != stream.parent:
        planted.parent.mkdir()
    if name == "s.bin.index":
        target.mkdir(mode=0o700)
        for part in ("data.mdb", "lock.mdb"):
            (target / part).write_text(EXACTLY)
        planted.symlink_to(target)
    else:
        target.write_text(EXACTLY)
        target.chmod(0o600)
        if hard:
            planted.hardlink_to(target)
        else:
            planted.symlink_to(target)
    before = items_in(tmp_path)
    with contextlib.suppress(DatastreamerError):
        PLANTED[name](stream)
    assert items_in(tmp_path) == before


def items_in(folder: Path) -> dict[str, tuple[int, int, bytes]]:
    return {
        str(path): (path.stat().st_mode, path.stat().st_size, path.read_bytes())
        for path in folder.rglob("*")
        if path.is_file()
    }


@pytest.mark.parametrize(
    ("name", "to_folder"),
    [("s.bin.index", True), ("s.bin.index/data.mdb", False), ("s.bin.index/lock.mdb", False)],
)
@pytest.mark.parametrize("dangling", [False, True])
def test_a_planted_index_is_refused_in_one_line(
    stream: Path,
    tmp_path: Path,
    name: str,
    to_folder: bool,
    dangling: bool,
    caplog: pytest.LogCaptureFixture,
) -> None:
    target, planted = tmp_path / "target", stream.parent / name
    if to_folder:
        if not dangling:
            index(stream)
            planted.rename(target)
    else:
        index(stream)
        planted.rename(target)
        if dangling:
            target.unlink()
    planted.symlink_to(target)
    for backend in ("lmdb", LMDB_ANEW):
        with pytest.raises(IndexFailed) as refused:
            DataStream.open(stream, index=backend)
        assert str(refused.value) == (
            f"{planted}: is a symbolic link, which is not followed here; the bookmark index is not "
            "used: remove it; or open the stream with index='memory'"
        )
    assert target.exists() != dangling
    for options in ({"read_only": True}, {"follow": True}):
        caplog.clear()
        with DataStream.open(stream, **options) as reader:  # type: ignore[arg-type]
            assert reader.bookmark(KEY) == 2
        if not (dangling and to_folder):
            assert "is a symbolic link, which is not followed here" in caplog.text
    assert verify(stream).ok
    with DataStream.open(stream, index="memory") as writer:
        assert writer.bookmark(KEY) == 2


# Neighbours.


def given_away(path: Path) -> None:
    for each in (path, *(path.rglob("*") if path.is_dir() else ())):
        os.chown(each, NEIGHBOUR, NEIGHBOUR)


@as_root
@pytest.mark.parametrize("name", ["s.bin.index", "s.bin.index/data.mdb", "s.bin.index/lock.mdb"])
def test_an_index_of_another_user_is_not_used(
    stream: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    index(stream)
    os.chown(stream.parent / name, NEIGHBOUR, NEIGHBOUR)
    with pytest.raises(IndexFailed, match="belongs to user 4000, who is not the user of this"):
        DataStream.open(stream)
    with DataStream.open(stream, read_only=True) as reader:
        assert reader.bookmark(KEY) == 2
    assert "belongs to user 4000" in caplog.text
    assert any("belongs to user 4000" in note for note in verify(stream).notes)
    # But the owner of the stream is trusted.
    os.chown(stream, NEIGHBOUR, NEIGHBOUR)
    index(stream)


def test_an_index_folder_that_others_can_change(stream: Path) -> None:
    """A writer that owns it closes it; a reader does without."""
    index(stream)
    folder = stream.with_name("s.bin.index")
    folder.chmod(0o777)
    with DataStream.open(stream, read_only=True) as reader:
        assert reader.bookmark(KEY) == 2
        assert reader.bookmarks.trusted.index is None
    index(stream)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o755
    with DataStream.open(stream, read_only=True) as reader:
        assert reader.bookmark(KEY) == 2
        assert reader.bookmarks.trusted.index is not None


@pytest.mark.parametrize("name", ["data.mdb", "lock.mdb"])
def test_an_index_file_that_others_can_change(
    stream: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A writer that owns it closes it; a reader does without."""
    index(stream)
    file = stream.with_name("s.bin.index") / name
    file.chmod(0o666)
    with DataStream.open(stream, read_only=True) as reader:
        assert reader.bookmark(KEY) == 2
        assert reader.bookmarks.trusted.index is None
    assert f"{name}: can be changed by other users (its mode is 0666)" in caplog.text
    report = verify(stream)
    assert report.ok
    assert any("can be changed by other users" in note for note in report.notes)
    index(stream)
    assert stat.S_IMODE(file.stat().st_mode) == 0o644
    with DataStream.open(stream, read_only=True) as reader:
        assert reader.bookmark(KEY) == 2
        assert reader.bookmarks.trusted.index is not None


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="lists the open descriptors")
def test_a_forked_child_does_not_keep_the_index_folder_open(stream: Path) -> None:
    folder = os.path.realpath(stream.with_name("s.bin.index"))

    def is_open() -> bool:
        with os.scandir("/proc/self/fd") as entries:
            names = [entry.path for entry in entries]
        return any(os.path.lexists(name) and os.readlink(name) == folder for name in names)

    with DataStream.open(stream) as writer:
        assert is_open()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            pid = os.fork()
        if pid == 0:
            os._exit(is_open())
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        assert is_open()
        add(writer, OPERATION)
        assert writer.bookmark(KEY) == 4


@as_root
def test_a_journal_of_another_user_is_not_put_back(
    stream: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It fits the stream, and would bring a neighbour's bytes into it."""
    with DataStream.open(stream, read_only=True, index="memory") as reader:
        before = items(reader)
        offset = scan_file(stream)[1].offset + 17
        undo = journal.Undo(
            reader.stream_id, reader.epoch, reader.header.pack(), offset, b"e" * 600, b"x" * 600
        )
    journal.put(OsDisk(), str(stream), undo, Access.private())
    given_away(stream.with_name("s.bin.undo"))
    with DataStream.open(stream, read_only=True, index="memory") as reader:
        assert items(reader) == before
    with DataStream.open(stream, index="memory") as writer:
        assert items(writer) == before
        assert "is a link or another user's" in caplog.text
        writer.update_entry(1, 1, b"y" * 600)
    assert not stream.with_name("s.bin.undo").exists()


@as_root
def test_what_a_neighbour_left_is_not_removed(stream: Path) -> None:
    left = stream.with_name("s.bin.0123abcd.new")
    left.write_text("x")
    given_away(left)
    assert remove_left_overs(OsDisk(), str(stream), Access.private()) == []
    os.chown(left, 0, 0)
    assert remove_left_overs(OsDisk(), str(stream), Access.private()) == [str(left)]


@as_root
@pytest.mark.parametrize(
    ("make_it", "name"),
    [
        (file_cursor, "cursor"),
        (lmdb_cursor, "cursor"),
        (lmdb_cursor, "cursor/data.mdb"),
        (lmdb_cursor, "cursor/lock.mdb"),
        (sqlite_store, "progress.db"),
    ],
)
def test_a_position_of_another_user_is_not_believed(
    stream: Path, make_it: Callable[[Path], None], name: str
) -> None:
    make_it(stream)
    os.chown(stream.parent / name, NEIGHBOUR, NEIGHBOUR)
    again = FileCursor(stream.with_name("cursor")).load if make_it is file_cursor else None
    with pytest.raises(CursorFailed, match="belongs to user 4000"):
        again() if again else make_it(stream)


@as_root
def test_the_owner_of_a_cursor_s_folder_is_trusted(tmp_path: Path) -> None:
    """Where a mount maps users, our own file seems to be that user's."""
    cursor = FileCursor(tmp_path / "cursor")
    cursor.save(SOME)
    for path in (tmp_path, tmp_path / "cursor"):
        os.chown(path, OTHER, OTHER)
    assert cursor.load() == SOME


@as_root
def test_a_hot_journal_of_another_user_is_not_rolled_back(stream: Path) -> None:
    sqlite_store(stream)
    side = stream.with_name("progress.db-journal")
    side.write_bytes(b"\xd9\xd5\x05\xf9\x20\xa1\x63\xd7")
    given_away(side)
    with pytest.raises(CursorFailed, match=r"progress\.db-journal: belongs to user 4000"):
        sqlite_store(stream)


SERVICE = """
import os, sys
import codecs, lmdb, datastreamer.storage.bookmarks.memory
from datastreamer import DataStream
from datastreamer.storage.maintain.check import verify
from datastreamer.storage.maintain.snapshot import snapshot

codecs.lookup("ascii")  # from here on nothing of this Python can be loaded
os.umask(0)
os.setgroups([])
os.setgid(4001)
os.setuid(4001)
path = sys.argv[1]
with DataStream.create(path) as stream:
    os.chmod(path, 0o600)
with DataStream.open(path) as stream:
    for _ in range(3):
        with stream.atomic_op() as op:
            op.add_bookmark(b"key")
            op.add_entry(1, b"x" * 600)
    stream.bookmarks.wait()
    stream.update_entry(1, 1, b"y" * 600)
with DataStream.open(path) as stream:
    assert stream.bookmark(b"key") == 4
snapshot(path, path + ".copy")
assert verify(path).ok
"""

LOOK = """
import os, sys

os.setgroups([])
os.setgid(4000)
os.setuid(4000)
sys.exit(any(os.access(name, os.R_OK) for name in sys.argv[1:]))
"""


@as_root
def test_a_service_of_its_own_user_in_a_shared_folder(shared: Path) -> None:
    """It needs no rights but its own user's, and a neighbour reads none of its files."""
    path = shared / "s.bin"
    subprocess.run([sys.executable, "-c", SERVICE, str(path)], check=True, timeout=60)
    names = [str(each) for each in shared.rglob("*")]
    assert {os.path.basename(name) for name in names} >= {"s.bin.index", "data.mdb", "s.bin.copy"}
    subprocess.run([sys.executable, "-c", LOOK, *names], check=True, timeout=60)
    # Root trusts the owner of the stream.
    with DataStream.open(path) as stream:
        assert stream.bookmark(KEY) == 4


@as_root
def test_the_folder_is_changed_under_an_open_index(shared: Path, tmp_path: Path) -> None:
    """A neighbour who may rename puts a link in its place; nothing is written through it."""
    shared.chmod(0o777)
    path = make(shared / "s.bin", OPERATION)
    target = tmp_path / "target"
    target.mkdir()
    for part in ("data.mdb", "lock.mdb"):
        (target / part).write_text(EXACTLY)
    before = items_in(tmp_path)
    with DataStream.open(path) as stream:
        folder = path.with_name("s.bin.index")
        folder.rename(folder.with_name("elsewhere"))
        folder.symlink_to(target)
        for _ in range(50):
            add(stream, OPERATION)
        stream.bookmarks.wait()
        stream.truncate(4)
        assert stream.bookmark(KEY) == 2
    assert items_in(tmp_path) == before
    with pytest.raises(IndexFailed, match="symbolic link"):
        DataStream.open(path)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="a path to an open folder")
def test_the_folder_is_changed_between_the_check_and_lmdb(
    stream: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, folder = tmp_path / "target", stream.with_name("s.bin.index")
    target.mkdir()
    for part in ("data.mdb", "lock.mdb"):
        (target / part).write_text(EXACTLY)
    before, lmdb_open = items_in(tmp_path), environment.lmdb.open

    def swapped(*arguments: object, **options: object) -> object:
        monkeypatch.undo()
        folder.rename(folder.with_name("elsewhere"))
        folder.symlink_to(target)
        return lmdb_open(*arguments, **options)

    monkeypatch.setattr(environment.lmdb, "open", swapped)
    with DataStream.open(stream) as writer:
        assert writer.bookmark(KEY) == 2
        add(writer, OPERATION)
        assert writer.bookmark(KEY) == 4
    assert items_in(tmp_path) == before
    assert folder.is_symlink()


def test_a_new_folder_is_changed_before_its_permissions_are_set(
    shared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A neighbour who may rename puts a link in its place; what it leads to keeps its mode."""
    target, folder, mkdir = tmp_path / "target", shared / "folder", os.mkdir
    target.mkdir()
    target.chmod(0o777)

    def swapped(path: str, mode: int) -> None:
        mkdir(path, mode)
        os.rename(path, path + ".elsewhere")
        os.symlink(target, path)

    monkeypatch.setattr(os, "mkdir", swapped)
    lstat = os.lstat

    def looked_at_before(path: str) -> os.stat_result:
        return lstat(path + ".elsewhere" if path == str(folder) else path)

    for look in (lstat, looked_at_before):
        monkeypatch.setattr(os, "lstat", look)
        shutil.rmtree(str(folder) + ".elsewhere", ignore_errors=True)
        folder.unlink(missing_ok=True)
        with pytest.raises(UntrustedFile):
            make_folder(str(folder), Access.private())
        assert stat.S_IMODE(target.stat().st_mode) == 0o777


@pytest.mark.parametrize("name", ["", "data.mdb", "lock.mdb"])
def test_a_cursor_that_others_can_change(stream: Path, name: str) -> None:
    lmdb_cursor(stream)
    stream.parent.joinpath("cursor", name).chmod(0o777)
    with pytest.raises(CursorFailed, match="can be changed by other users"):
        lmdb_cursor(stream)


@pytest.mark.parametrize("name", ["data.mdb", "lock.mdb"])
def test_a_pipe_in_the_place_of_a_cursor(stream: Path, name: str) -> None:
    lmdb_cursor(stream)
    pipe = stream.with_name("cursor") / name
    pipe.unlink()
    os.mkfifo(pipe)
    with pytest.raises(CursorFailed, match=f"{name}: is not a regular file"):
        lmdb_cursor(stream)


def test_a_stream_may_be_opened_by_a_symbolic_link(stream: Path, tmp_path: Path) -> None:
    link = tmp_path / "link.bin"
    link.symlink_to(stream)
    index(link)
    assert verify(link).ok


# In an export's folder.


def test_an_export_s_out_may_be_a_symbolic_link(stream: Path, tmp_path: Path) -> None:
    """The operator names it, as the stream's own path."""
    target = tmp_path / "target"
    target.mkdir()
    (stream.parent / "parts").symlink_to(target)
    export(stream, stream.parent / "parts")
    assert [path.suffix for path in target.iterdir()] == [".parquet"]
    export(stream, stream.parent / "parts", "all", on_error="null")
    assert (target / "entries").is_dir()


@pytest.mark.parametrize("dangling", [False, True])
def test_a_link_in_the_place_of_a_table_s_folder(
    stream: Path, tmp_path: Path, dangling: bool
) -> None:
    out, target = stream.parent / "out", tmp_path / "target"
    out.mkdir()
    if not dangling:
        target.mkdir()
    (out / "entries").symlink_to(target)
    why = "cannot be created" if dangling else "is a symbolic link, which is not followed here"
    with pytest.raises(StreamFileError, match=why):
        export(stream, out, "all", on_error="null")
    assert dangling != target.exists()
    assert items_in(tmp_path) == {}


def test_a_link_in_the_place_of_a_part(stream: Path, tmp_path: Path) -> None:
    out = stream.parent / "out"
    export(stream, out)
    [part] = out.iterdir()
    part.rename(tmp_path / "part")
    part.symlink_to(tmp_path / "part")
    with DataStream.open(stream, index="memory") as writer:
        add(writer, OPERATION)
    with pytest.raises(UntrustedFile, match="is a symbolic link"):
        export(stream, out)
    assert list(out.iterdir()) == [part]


@as_root
def test_an_export_s_folders_of_another_user(stream: Path) -> None:
    """They are not used, unless they are those of the owner of OUT."""
    out = stream.parent / "out"
    export(stream, out, "all", on_error="null")
    with DataStream.open(stream, index="memory") as writer:
        add(writer, OPERATION)
    [part] = (out / "entries").iterdir()
    for path in (out / "entries", part):
        os.chown(path, NEIGHBOUR, NEIGHBOUR)
        with pytest.raises(UntrustedFile, match="belongs to user 4000"):
            export(stream, out, "all", on_error="null")
        os.chown(path, 0, 0)
    given_away(out)
    assert export(stream, out, "all", on_error="null").rows["entries"] == 2


def test_a_file_in_the_way_of_a_snapshot(stream: Path) -> None:
    (stream.parent / "out.bin").symlink_to("nowhere")
    with pytest.raises(FileExists):
        snapshot_file(stream)


def test_the_disk_refuses_links_and_pipes_beside_a_stream(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("file")
    (tmp_path / "file").touch()
    os.mkfifo(tmp_path / "pipe")
    for name, what in (("link", "symbolic link"), ("pipe", "not a regular file")):
        for write in (False, True):
            with pytest.raises(UntrustedFile, match=what):
                OsDisk().open(str(tmp_path / name), write=write, beside=Access.private())
    assert issubclass(UntrustedFile, StreamFileError)
