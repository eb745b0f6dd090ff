"""With an index that fails, is damaged or has no space, the stream works and look-ups are right."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import ClassVar

import lmdb
import pytest

from datastreamer import DataStream
from datastreamer.errors import IndexFailed
from datastreamer.storage.bookmarks import builder, recent, registry
from datastreamer.storage.bookmarks.interface import IndexDamaged, Pace, Watermark, at_once
from datastreamer.storage.bookmarks.memory import MemoryIndex
from datastreamer.storage.disk.access import Access
from datastreamer.storage.maintain.check import verify
from tests.storage.bookmarks.keeping import (
    HISTORY,
    PATIENCE,
    check,
    check_index,
    index_of,
    known_of,
    operation,
)
from tests.storage.made import BOOKMARK, add, make


class Flaky(MemoryIndex):
    """An index whose methods fail while they are in a set."""

    failing: ClassVar[set[str]] = set()

    def _meet(self, what: str) -> None:
        if what in self.failing:
            raise IndexFailed("flaky", f"no {what} today")

    def add(
        self, bookmarks: Iterable[tuple[bytes, int]], watermark: Watermark, pace: Pace = at_once
    ) -> None:
        self._meet("add")
        super().add(bookmarks, watermark, pace)

    def remove(self, bookmarks: Iterable[tuple[bytes, int]], watermark: Watermark) -> None:
        self._meet("remove")
        super().remove(bookmarks, watermark)

    def newest(self, key: bytes) -> int | None:
        self._meet("newest")
        return super().newest(key)

    def clear(self) -> None:
        self._meet("clear")
        super().clear()

    def watermark(self) -> Watermark | None:
        self._meet("watermark")
        return super().watermark()


@pytest.fixture
def flaky() -> Iterator[set[str]]:
    Flaky.failing = set()

    def opened(path: str, write: bool, access: Access) -> Flaky:
        index = Flaky()
        index._meet("open")
        return index

    registry.register_index("flaky", opened)
    yield Flaky.failing
    del registry._openers["flaky"]


def test_a_lost_index_is_made_again(tmp_path: Path, flaky: set[str]) -> None:
    """It could be neither emptied nor made again, for example on a full disk; later it can."""
    path = make(tmp_path / "s.bin", *HISTORY)
    with DataStream.open(path, index="flaky") as stream:
        stream.bookmarks.wait()
        flaky.update({"clear", "open"})
        for _ in range(2):
            with pytest.raises(IndexFailed, match="no open today"):
                stream.bookmarks.rebuild()
            add(stream, operation(b"twice", b"new"))
            check(stream, known_of(path))
        flaky.remove("open")
        with pytest.raises(IndexFailed, match="no clear today"):
            stream.bookmarks.wait()
        flaky.clear()
        stream.bookmarks.wait()
        assert stream.bookmarks.lag() == 0
        check(stream, known_of(path))
        assert len(stream.bookmarks.trusted.index or ()) == len(known_of(path))


@pytest.mark.parametrize("lost", [True, False])
def test_memory_while_an_index_cannot_be_written(
    tmp_path: Path, flaky: set[str], lost: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recent, "_MAX_KEYS", 10)
    path = make(tmp_path / "s.bin", *HISTORY)
    with DataStream.open(path, index="flaky") as stream:
        bookmarks = stream.bookmarks
        bookmarks.wait()
        flaky.update({"clear", "open"} if lost else {"add"})
        if lost:
            with pytest.raises(IndexFailed):
                bookmarks.rebuild()
        else:
            add(stream, operation(b"first"))
            bookmarks.builder.work()
        for number in range(35):
            add(stream, [(BOOKMARK, b"%d" % number), (BOOKMARK, b"often")])
            assert len(bookmarks.trusted.recent.waiting) < 10
            assert len(bookmarks.trusted.recent.newest) < 10
        check(stream, known_of(path))
        flaky.clear()
        bookmarks.wait()
        assert bookmarks.lag() == 0
        check(stream, known_of(path))
        assert len(bookmarks.trusted.index or ()) == len(known_of(path))


@pytest.mark.parametrize("name", ["data.mdb", "lock.mdb"])
def test_a_pipe_at_the_path_of_the_index(tmp_path: Path, name: str) -> None:
    path = make(tmp_path / "s.bin", *HISTORY)
    index_of(path).joinpath(name).unlink()
    os.mkfifo(index_of(path) / name)
    with DataStream.open(path, read_only=True) as stream:
        check(stream, known_of(path))
    with pytest.raises(IndexFailed, match=f"{name}: is in the place of a file"):
        DataStream.open(path)
    if name == "data.mdb":
        [problem] = verify(path).problems
        assert problem.repair == f"run `datastreamer reindex {path}`"
    with DataStream.open(path, index=registry.LMDB_ANEW) as stream:
        stream.bookmarks.wait()
    check_index(path, known_of(path))


def test_a_block_of_another_size(tmp_path: Path) -> None:
    path = make(tmp_path / "s.bin", *HISTORY)
    with DataStream.open(path) as stream:
        stream.bookmarks.wait()
    with lmdb.open(str(index_of(path)), max_dbs=1) as env:
        blocks = env.open_db(b"blocks")
        with env.begin(db=blocks, write=True) as transaction, transaction.cursor() as cursor:
            assert cursor.first()
            transaction.put(cursor.key(), b"abc")
    for read_only in (True, False):
        with DataStream.open(path, read_only=read_only) as stream:
            check(stream, known_of(path))
            if not read_only:
                stream.bookmarks.wait()
    check_index(path, known_of(path))


def test_an_index_that_cannot_be_written(
    tmp_path: Path, flaky: set[str], caplog: pytest.LogCaptureFixture
) -> None:
    path = make(tmp_path / "s.bin", *HISTORY)
    flaky.add("add")
    with DataStream.open(path, index="flaky") as stream:
        with pytest.raises(IndexFailed, match="no add today"):
            stream.bookmarks.wait()
        check(stream, known_of(path))
        add(stream, operation(b"twice", b"new"))
        check(stream, known_of(path))
        flaky.clear()
        stream.bookmarks.wait()
        assert stream.bookmarks.lag() == 0
        check(stream, known_of(path))
        assert len(stream.bookmarks) == len(known_of(path))
    logged = [r for r in caplog.records if "the bookmark index cannot be written" in r.message]
    assert len(logged) <= 1


@pytest.mark.parametrize("fails", [{"newest"}, {"newest", "clear"}, {"newest", "clear", "add"}])
def test_an_index_that_cannot_be_read(tmp_path: Path, flaky: set[str], fails: set[str]) -> None:
    path = make(tmp_path / "s.bin", *HISTORY)
    with DataStream.open(path, index="flaky") as stream:
        stream.bookmarks.wait()
        flaky |= fails
        check(stream, known_of(path))
        add(stream, operation(b"twice", b"new"))
        check(stream, known_of(path))
        stream.truncate(4)
        check(stream, {b"old": 0, b"twice": 2})
        flaky.clear()
        check(stream, {b"old": 0, b"twice": 2})


@pytest.mark.parametrize("fails", [{"remove"}, {"remove", "clear"}])
def test_a_truncation_does_not_need_the_index(
    tmp_path: Path, flaky: set[str], fails: set[str], caplog: pytest.LogCaptureFixture
) -> None:
    path = make(tmp_path / "s.bin", *HISTORY)
    with DataStream.open(path, index="flaky") as stream:
        stream.bookmarks.wait()
        flaky |= fails
        stream.truncate(4)
        check(stream, {b"old": 0, b"twice": 2})
        flaky.clear()
        stream.bookmarks.wait()
        check(stream, {b"old": 0, b"twice": 2})
        assert len(stream.bookmarks) == 2
        if "clear" not in fails:
            assert stream.bookmarks.lag() == 0
    assert [r for r in caplog.records if "cannot be truncated" in r.message]


class Damaged(MemoryIndex):
    """An index that cannot be written until it is cleared."""

    damaged: ClassVar[bool] = False
    # Set when it covers this number of entries.
    due: ClassVar[int] = 0
    whole_again: ClassVar[threading.Event] = threading.Event()

    def add(
        self, bookmarks: Iterable[tuple[bytes, int]], watermark: Watermark, pace: Pace = at_once
    ) -> None:
        if self.damaged:
            raise IndexDamaged("damaged", "a page of the wrong kind")
        super().add(bookmarks, watermark, pace)
        if watermark.entries == self.due:
            self.whole_again.set()

    def clear(self) -> None:
        Damaged.damaged = False
        super().clear()


def test_damage_that_a_write_finds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(registry._openers, "damaged", lambda path, write, access: Damaged())
    monkeypatch.setattr(builder, "_FLUSH_SECONDS", 0.01)
    path, again = make(tmp_path / "s.bin", *HISTORY), operation(b"twice", b"new")
    with DataStream.open(path, index="damaged") as stream:
        stream.bookmarks.wait()
        monkeypatch.setattr(Damaged, "damaged", True)
        monkeypatch.setattr(Damaged, "due", stream.total_entries + len(again))
        monkeypatch.setattr(Damaged, "whole_again", threading.Event())
        add(stream, again)
        stream.sync()
        assert Damaged.whole_again.wait(PATIENCE)
        stream.bookmarks.wait()  # until the thread has ended its present work
        assert stream.bookmarks.lag() == 0
        assert not Damaged.damaged
        check(stream, known_of(path))


def test_the_whole_lock_file_is_allocated(tmp_path: Path) -> None:
    """It is mapped: a write to an unallocated page would end the process on a full disk."""
    make(tmp_path / "s.bin", *HISTORY)
    lock = (tmp_path / "s.bin.index" / "lock.mdb").stat()
    assert lock.st_size <= lock.st_blocks * 512


@pytest.mark.skipif(not hasattr(os, "posix_fallocate"), reason="no posix_fallocate here")
def test_no_space_for_an_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = make(tmp_path / "s.bin", *HISTORY, index="memory")

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", full)
        with pytest.raises(IndexFailed, match=r"s\.bin\.index: .*No space.*index='memory'"):
            DataStream.open(path)
    with DataStream.open(path) as stream:  # no lock is held
        stream.bookmarks.wait()
        check(stream, known_of(path))


def test_a_name_that_is_not_utf_8(tmp_path: Path) -> None:
    path = tmp_path / os.fsdecode(b"s\xff.bin")
    try:
        make(path, *HISTORY)
    except OSError:
        pytest.skip("the file system wants UTF-8")
    check_index(path, known_of(path))


def pages_of(path: Path) -> int:
    return (index_of(path) / "data.mdb").stat().st_size // 4096


def test_damage_that_a_truncation_finds(tmp_path: Path) -> None:
    """One leaf page replaces others."""
    keys = [b"%06d" % n for n in range(20_000)]
    path = make(tmp_path / "s.bin", [(BOOKMARK, key) for key in keys])
    data = bytearray((index_of(path) / "data.mdb").read_bytes())
    for page in range(6, pages_of(path), 3):
        data[page * 4096 : (page + 1) * 4096] = data[4 * 4096 : 5 * 4096]
    (index_of(path) / "data.mdb").write_bytes(data)
    with DataStream.open(path) as stream:
        for total in (15_000, 9_000, 8_999):
            stream.truncate(total)
        stream.bookmarks.wait()


@pytest.mark.parametrize("part", [0.1, 0.5, 0.9])
def test_a_large_index_that_lost_its_end(tmp_path: Path, part: float) -> None:
    path = tmp_path / "s.bin"
    with DataStream.create(path) as stream:
        for start in range(0, 4000, 500):
            add(stream, [(BOOKMARK, b"%06d" % n) for n in range(start, start + 500)])
            stream.bookmarks.wait()
    os.truncate(index_of(path) / "data.mdb", int(pages_of(path) * part) * 4096)
    # In another process, which the damage may end.
    code = (
        "import sys; from datastreamer import DataStream\n"
        "with DataStream.open(sys.argv[1]) as s:\n"
        "    s.truncate(3000); s.bookmarks.wait(); print(s.bookmark(b'000001'))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, path], check=False, capture_output=True, text=True
    )
    assert (done.returncode, done.stdout) == (0, "1\n"), done.stderr


def test_a_file_at_the_path_of_the_index(tmp_path: Path) -> None:
    path = make(tmp_path / "s.bin", *HISTORY, index="memory")
    index_of(path).write_text("another file")
    with pytest.raises(IndexFailed, match=r"s\.bin\.index: is in the place of the bookmark index"):
        DataStream.open(path)
    assert index_of(path).read_text() == "another file"
    with DataStream.open(path, index="memory") as stream:  # no lock is held
        check(stream, known_of(path))
    with DataStream.open(path, read_only=True) as stream:
        check(stream, known_of(path))
