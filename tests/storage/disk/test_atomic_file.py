"""A new file appears whole or not at all, and what a killed process left of one goes."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from datastreamer.storage.disk.access import Access
from datastreamer.storage.disk.atomic_file import (
    keep_beside,
    new_file,
    remove_left_overs,
    remove_older,
)
from datastreamer.storage.disk.file_ops import OsDisk, OsFile
from datastreamer.storage.maintain.snapshot import snapshot
from tests.storage.made import make, scan_file

KILLED = """
import os, signal, sys
from datastreamer.storage.maintain.snapshot import snapshot
snapshot(*sys.argv[1:], advance=lambda done, total: os.kill(os.getpid(), signal.SIGKILL))
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "new"


def names(folder: Path) -> list[str]:
    return sorted(it.name for it in folder.iterdir())


def test_it_appears_when_it_is_done(path: Path) -> None:
    with new_file(OsDisk(), str(path)) as file:
        file.write(b"all of it", 0)
        assert not path.exists()
    assert names(path.parent) == ["new"]
    assert path.read_bytes() == b"all of it"


def test_it_takes_the_place_of_nothing(path: Path) -> None:
    with pytest.raises(FileExistsError), new_file(OsDisk(), str(path)):
        path.write_bytes(b"made meanwhile")
    assert names(path.parent) == ["new"]
    assert path.read_bytes() == b"made meanwhile"


def test_an_exception_leaves_nothing(path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), new_file(OsDisk(), str(path)):
        raise KeyboardInterrupt
    assert names(path.parent) == []


def test_its_lock_is_free_afterwards(path: Path) -> None:
    with new_file(OsDisk(), str(path)) as file:
        forked = os.dup(file.fileno())  # as the child of a fork has it
    found = OsDisk().open(str(path), write=True)
    assert not found.locked_elsewhere()
    assert found.lock()
    found.close()
    os.close(forked)


class NoLocks(OsDisk):
    """A file system that knows no locks."""

    class File(OsFile):
        def lock(self) -> bool:
            raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

        def unlock(self) -> None:
            self.lock()

    def create(self, path: str, beside: Access | None = None) -> OsFile:
        return self.File(OsDisk.create(self, path, beside).fileno())

    def open(self, path: str, *, write: bool, beside: Access | None = None) -> OsFile:
        return self.File(OsDisk.open(self, path, write=write, beside=beside).fileno())


def test_where_there_are_no_locks(path: Path) -> None:
    disk = NoLocks()
    with new_file(disk, str(path)) as file:
        file.write(b"all of it", 0)
        # Nothing shows whether it is being written.
        assert remove_left_overs(disk, str(path), Access.private()) == []
    assert names(path.parent) == ["new"]


# What was left.


def test_a_snapshot_that_was_killed(tmp_path: Path) -> None:
    stream, out = make(tmp_path / "stream.bin", [(1, b"one")]), tmp_path / "copies" / "out.bin"
    out.parent.mkdir()
    ended = subprocess.run([sys.executable, "-c", KILLED, stream, out], check=False, timeout=60)
    assert ended.returncode == -signal.SIGKILL
    (left,) = names(out.parent)
    assert left.endswith(".new")
    snapshot(stream, out)
    assert names(out.parent) == ["out.bin", "out.bin.pages"]
    assert scan_file(out) == scan_file(stream)


def test_a_file_that_is_being_written_stays(path: Path) -> None:
    with new_file(OsDisk(), str(path)) as file:
        assert remove_left_overs(OsDisk(), str(path), Access.private()) == []
        file.write(b"all of it", 0)
    assert path.read_bytes() == b"all of it"


def test_what_is_named_otherwise_stays(path: Path) -> None:
    others = ["new", "new.0123456.new", "new.0123abcg.new", "new.0123abcd.new.gz", "newer", "a.new"]
    others.append("new2.0123abcd.new")
    for name in [*others, "new.0123abcd.new"]:
        path.with_name(name).touch()
    assert remove_left_overs(OsDisk(), str(path), Access.private()) == [f"{path}.0123abcd.new"]
    assert names(path.parent) == sorted(others)


def test_a_name_without_a_folder(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(path.parent)
    Path("new.0123abcd.new").touch()
    assert remove_left_overs(OsDisk(), "new", Access.private()) == ["new.0123abcd.new"]
    assert remove_left_overs(OsDisk(), "no/new", Access.private()) == []
    assert names(path.parent) == []


class Cleaned(OsDisk):
    """Another process mistakes the first file for a left-over before it has its lock."""

    def __init__(self, held: bool) -> None:
        self.held = held
        self.cleaner: OsFile | None = None
        self.created: list[str] = []

    def create(self, path: str, beside: Access | None = None) -> OsFile:
        file = super().create(path, beside)
        self.created.append(path)
        if len(self.created) == 1:
            if self.held:
                self.cleaner = self.open(path, write=True)
                assert self.cleaner.lock()
            else:
                self.unlink(path)
        return file


@pytest.mark.parametrize("held", [True, False])
def test_taken_for_a_left_over_too_soon(path: Path, held: bool) -> None:
    disk = Cleaned(held)
    with new_file(disk, str(path)) as file:
        assert len(disk.created) == 2
        if disk.cleaner is not None:  # he ends what he has begun
            disk.unlink(disk.created[0])
            disk.cleaner.close()
        file.write(b"all of it", 0)
    assert names(path.parent) == ["new"]
    assert path.read_bytes() == b"all of it"


def test_the_oldest_copies_are_removed(path: Path) -> None:
    made = [f"{path}.2026010{day}T030405.{n:04x}.repair" for day in range(1, 5) for n in range(2)]
    others = [f"{path}.20250101T030405.0001.cut", f"{path}er.20250101T030405.0001.repair"]
    for name in [*made, *others]:
        Path(name).write_bytes(b"kept")
    # A link is not ours to remove, even if it is the oldest.
    link = Path(f"{path}.20250101T030405.0000.repair")
    link.symlink_to(others[0])
    removed = remove_older(OsDisk(), str(path), "repair", Access.private(), 3)
    assert removed == made[:-3]
    assert names(path.parent) == sorted(Path(it).name for it in [*made[-3:], *others, link])


def test_copies_of_the_same_second(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two draw the same random name."""
    drawn = iter(["aaaa", "00000001", "aaaa", "00000002", "bbbb", "00000003"])
    monkeypatch.setattr("time.strftime", lambda form: "20260102T030405")
    monkeypatch.setattr("secrets.token_hex", lambda size: next(drawn))
    path.write_bytes(b"damaged")
    file = OsDisk().open(str(path), write=False)
    made = [keep_beside(OsDisk(), str(path), "repair", b"", file, 0, 7) for _ in range(2)]
    file.close()
    assert [it[-11:] for it in made] == ["aaaa.repair", "bbbb.repair"]
    assert len(names(path.parent)) == 3
