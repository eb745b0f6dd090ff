"""A server's index: on disk, in memory while there is no space, and on disk again."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from datastreamer import DataStream
from datastreamer.errors import FileReplaced, IndexFailed
from datastreamer.storage.bookmarks import builder, fallback
from datastreamer.storage.bookmarks import lmdb_environment as environment
from datastreamer.storage.bookmarks.fallback import LMDB_OR_MEMORY, FallbackIndex
from datastreamer.storage.disk.access import Access, Folder
from tests.storage.bookmarks.keeping import (
    HISTORY,
    check,
    check_index,
    index_of,
    known_of,
    operation,
)
from tests.storage.made import add, make


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return make(tmp_path / "s.bin", *HISTORY, index="memory")


class Disk:
    """A disk that refuses space for files with the error `full`; None: it does not."""

    full: int | None = None


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    disk, real = Disk(), environment._reserve

    def reserve(place: Folder, name: str, size: int) -> None:
        if disk.full is not None:
            raise OSError(disk.full, os.strerror(disk.full))
        real(place, name, size)

    monkeypatch.setattr(environment, "_reserve", reserve)
    monkeypatch.setattr(fallback, "_RETRY_SECONDS", 0)
    monkeypatch.setattr(builder, "_FLUSH_SECONDS", 1000)  # the tests start each attempt
    return disk


REASONS = [errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EFBIG]


@pytest.mark.parametrize("reason", REASONS, ids=lambda number: errno.errorcode[number])
def test_it_starts_in_memory_and_returns_to_disk(
    path: Path, disk: Disk, reason: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    disk.full = reason
    with DataStream.open(path, index=LMDB_OR_MEMORY) as stream:
        (warning,) = [it.message for it in caplog.records if it.levelno == logging.WARNING]
        assert "the bookmark index is kept in memory until it fits on disk" in warning
        assert os.strerror(reason) in warning
        bookmarks = stream.bookmarks
        for number in range(2):
            bookmarks.wait()
            assert not bookmarks.on_disk
            assert bookmarks.lag() == 0
            check(stream, known_of(path))
            add(stream, operation(b"more%d" % number))
        stream.truncate(stream.total_entries - 2)
        check(stream, known_of(path))
        disk.full = None
        bookmarks.wait()
        assert bookmarks.on_disk
        assert "on disk now" in caplog.records[-1].message
        check(stream, known_of(path))
        add(stream, operation(b"later"))
        check(stream, known_of(path))
        assert len([it for it in caplog.records if it.levelno == logging.WARNING]) == 1
    check_index(path, known_of(path))


def test_it_leaves_the_last_free_space_to_the_stream(
    path: Path, disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk.full = errno.ENOSPC
    monkeypatch.setattr(fallback, "_free", lambda path: fallback._LEAST_FREE)
    with DataStream.open(path, index=LMDB_OR_MEMORY) as stream:
        disk.full = None
        stream.bookmarks.wait()
        assert not stream.bookmarks.on_disk
        monkeypatch.setattr(fallback, "_free", lambda path: 2 * fallback._LEAST_FREE)
        stream.bookmarks.wait()
        assert stream.bookmarks.on_disk


def test_a_failed_return_to_disk_leaves_no_files(
    path: Path, disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk.full = errno.ENOSPC
    with DataStream.open(path, index=LMDB_OR_MEMORY) as stream:

        def fill(*_: object) -> None:
            raise IndexFailed("index", os.strerror(errno.ENOSPC))

        with monkeypatch.context() as patch:
            patch.setattr(fallback.lmdb.LmdbIndex, "fill", fill)
            disk.full = None  # from now on the thread may try too
            stream.bookmarks.wait()
            assert not stream.bookmarks.on_disk
            # The index's thread may be in another attempt, which removes its files.
            deadline = time.monotonic() + 60
            while index_of(path).exists():
                assert time.monotonic() < deadline
                time.sleep(0.001)
            check(stream, known_of(path))
        stream.bookmarks.wait()
        assert stream.bookmarks.on_disk


@pytest.mark.parametrize("step", ["add", "fill"])
def test_space_that_ends_during_the_first_write(
    path: Path, disk: Disk, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    def fail(*_: object) -> None:
        raise IndexFailed("index", os.strerror(errno.ENOSPC))

    monkeypatch.setattr(fallback, "_RETRY_SECONDS", 1000)
    monkeypatch.setattr(builder, "_FILL_BYTES", 0 if step == "fill" else 1 << 40)
    with monkeypatch.context() as patch:
        patch.setattr(fallback.lmdb.LmdbIndex, step, fail)
        with DataStream.open(path, index=LMDB_OR_MEMORY) as stream:
            stream.bookmarks.builder.work()
            stream.bookmarks.builder.work()
            assert not stream.bookmarks.on_disk
            assert stream.bookmarks.lag() == 0
            check(stream, known_of(path))


def test_an_index_that_has_entries_stays_on_disk(
    path: Path, disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its content is not copied to memory because more does not fit."""

    def fail(*_: object) -> None:
        raise IndexFailed("index", os.strerror(errno.ENOSPC))

    with DataStream.open(path, index=LMDB_OR_MEMORY) as stream:
        stream.bookmarks.wait()
        with monkeypatch.context() as patch:
            patch.setattr(fallback.lmdb.LmdbIndex, "add", fail)
            add(stream, operation(b"more"))
            stream.bookmarks.builder.work()
            assert stream.bookmarks.on_disk
            check(stream, known_of(path))


def test_a_file_at_the_path_of_the_index_is_refused(path: Path) -> None:
    index_of(path).write_text("another file")
    with pytest.raises(IndexFailed, match="is in the place of the bookmark index"):
        DataStream.open(path, index=LMDB_OR_MEMORY)


def test_a_reader_makes_none(path: Path) -> None:
    with DataStream.open(path, read_only=True, index=LMDB_OR_MEMORY) as stream:
        check(stream, known_of(path))
    assert not index_of(path).exists()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A folder on a disk of 8 MiB."""
    folder = tmp_path / "small"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(folder)]
    if os.geteuid() or subprocess.run(mount, check=False, capture_output=True).returncode:
        pytest.skip("mounting a small disk needs more rights than there are here")
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


@pytest.mark.parametrize("left", [0, 1 << 16, 1 << 18])
def test_a_real_full_disk(small_disk: Path, left: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fallback, "_RETRY_SECONDS", 0)
    path = make(small_disk / "s.bin", operation(*(b"%d" % n for n in range(5))), index="memory")
    ballast = small_disk / "ballast"
    file = os.open(ballast, os.O_CREAT | os.O_WRONLY)
    with contextlib.suppress(OSError):
        while os.write(file, bytes(4096)):
            pass
    os.close(file)
    os.truncate(ballast, ballast.stat().st_size - left)
    with DataStream.open(path, index=LMDB_OR_MEMORY) as stream:
        stream.bookmarks.builder.work()
        stream.bookmarks.builder.work()
        check(stream, known_of(path))
        if not left:
            assert not stream.bookmarks.on_disk
        ballast.unlink()
        stream.bookmarks.wait()
        stream.bookmarks.wait()
        assert stream.bookmarks.on_disk
        check(stream, known_of(path))
    check_index(path, known_of(path))


def test_the_message(tmp_path: Path, disk: Disk) -> None:
    disk.full = errno.ENOSPC
    index = FallbackIndex(str(tmp_path / "s.bin"), Access.private())
    assert (index.watermark(), len(index), index.on_disk, bool(index)) == (None, 0, False, False)
    index.close()


def test_another_stream_s_index_is_not_changed(path: Path, disk: Disk) -> None:
    """The file is replaced while its writer keeps the index in memory: the index that the new
    file's writer makes is not overwritten when there is space."""
    disk.full = errno.ENOSPC
    first = DataStream.open(path, index=LMDB_OR_MEMORY)
    path.rename(path.with_name("moved.bin"))
    make(path, *HISTORY[:1], index="memory")
    disk.full = None  # from now on the thread may try too
    with DataStream.open(path) as second:
        second.bookmarks.wait()
        first.bookmarks.wait()
        assert not first.bookmarks.on_disk
        check(second, known_of(path))
    check_index(path, known_of(path))
    with pytest.raises(FileReplaced):
        first.close()
    check_index(path, known_of(path))
