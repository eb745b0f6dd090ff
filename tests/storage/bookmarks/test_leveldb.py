"""The reference's database: its content, and that reading does not change it."""

from __future__ import annotations

import fcntl
import sys
import tempfile
from pathlib import Path

import pytest

from datastreamer.errors import FileMissing, IndexFailed
from datastreamer.storage.bookmarks.leveldb import ReferenceBookmarks, database_folder
from tests.conftest import Golden
from tests.storage.made import trace_of

plyvel = pytest.importorskip("plyvel")


@pytest.fixture(autouse=True)
def scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of temporary files: none may be left there."""
    folder = tmp_path / "scratch"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


@pytest.mark.parametrize(
    "name, kind",
    [
        *((name, "db") for name in ("small", "duplicates", "crashed", "rollback", "empty")),
        *((name, "db-table") for name in ("small", "duplicates")),
    ],
)
def test_its_content(golden: Golden, scratch: Path, name: str, kind: str) -> None:
    folder = golden.database(name, kind)
    before = trace_of(folder)
    want = {bytes.fromhex(k): n for k, n in golden.manifest(name)["bookmarks_leveldb"].items()}
    with ReferenceBookmarks(str(folder)) as theirs:
        assert dict(theirs.items()) == want
        assert list(theirs.items()) == sorted(want.items())
        assert all(key in theirs for key in want)
        assert b"never a key" not in theirs
    assert trace_of(folder) == before
    assert list(scratch.iterdir()) == []


def test_a_value_that_is_not_a_number(tmp_path: Path) -> None:
    with plyvel.DB(str(tmp_path / "a.db"), create_if_missing=True) as database:
        database.put(b"good", (7).to_bytes(8, "big"))
        database.put(b"long", bytes(9))
        database.put(b"none", b"")
    with ReferenceBookmarks(str(tmp_path / "a.db")) as theirs:
        assert list(theirs.items()) == [(b"good", 7), (b"long", None), (b"none", None)]


@pytest.mark.parametrize(
    "path, folder",
    [
        ("stream.bin", "stream.db"),
        ("/data/stream", "/data/stream.db"),
        ("/data/a.b/stream.bin", "/data/a.db"),
        ("./stream.bin", ".db"),
    ],
)
def test_its_name(path: str, folder: str) -> None:
    assert database_folder(path) == folder


def test_no_database(tmp_path: Path) -> None:
    with pytest.raises(FileMissing, match="no such folder"):
        ReferenceBookmarks(str(tmp_path / "none.db"))
    with pytest.raises(IndexFailed, match="is not a LevelDB database"):
        ReferenceBookmarks(str(tmp_path))
    (tmp_path / "file").write_text("")
    with pytest.raises(IndexFailed, match="is not a LevelDB database"):
        ReferenceBookmarks(str(tmp_path / "file"))


@pytest.mark.parametrize("name", ["CURRENT", "MANIFEST-000004", "000002.ldb"])
def test_a_damaged_one(golden: Golden, scratch: Path, name: str) -> None:
    folder = golden.database("small", "db-table")
    content = (folder / name).read_bytes()
    (folder / name).write_bytes(bytes(byte ^ 0x55 for byte in content))
    before = trace_of(folder)
    with (
        pytest.raises(IndexFailed, match="the database cannot be read: "),
        ReferenceBookmarks(str(folder)) as theirs,
    ):
        list(theirs.items())
    assert trace_of(folder) == before
    assert list(scratch.iterdir()) == []


def test_in_use(golden: Golden) -> None:
    folder = golden.database("small")
    with (folder / "LOCK").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(IndexFailed, match="stop the program that has it open"):
            ReferenceBookmarks(str(folder))
    with ReferenceBookmarks(str(folder)) as theirs:
        assert list(theirs.items())


def test_without_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "plyvel", None)
    with pytest.raises(IndexFailed, match=r"pip install 'datastreamer\[leveldb\]'"):
        ReferenceBookmarks(str(tmp_path))
