"""Restores that fail: what they leave, and what they do not do twice."""

from __future__ import annotations

import errno
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from datastreamer.archive import restore as restore_module
from datastreamer.archive.restore import restore
from datastreamer.errors import (
    ArchiveDenied,
    ArchiveUnreachable,
    DamagedArchive,
    DatastreamerError,
    WriteFailed,
)
from datastreamer.format import page_start
from datastreamer.storage.bookmarks import lmdb
from datastreamer.storage.bookmarks.keeper import bookmarks_of
from datastreamer.storage.disk.file_ops import OsDisk, OsFile
from datastreamer.storage.objects.opened import OpenArchive
from datastreamer.storage.objects.store import Store
from datastreamer.storage.stream import DataStream
from tests.archive.evicting import pushed
from tests.archive.stores import URL, MemoryStore, fill, opened, push


@pytest.fixture
def memory(tmp_path: Path) -> MemoryStore:
    memory = MemoryStore()
    with DataStream.create(tmp_path / "s.bin", sync="os") as stream:
        fill(stream, 30)
    push(tmp_path / "s.bin", memory)
    return memory


def ensure_no_threads() -> None:
    assert not [it for it in threading.enumerate() if it.name.startswith("archive_")]


def test_results_wait_for_their_consumer() -> None:
    """Only some are made before they are taken."""
    taken = []

    def numbers() -> Iterator[int]:
        for number in range(100):
            taken.append(number)
            yield number

    store = Store(URL, timeout=0.0, backend=MemoryStore())
    found = store.in_threads(2, lambda number: number, numbers())
    assert not taken
    assert next(found) == 0
    assert len(taken) == 4
    assert [*found] == list(range(1, 100))


@pytest.mark.parametrize(
    ("fault", "error"),
    [("timeout", ArchiveUnreachable), ("403", ArchiveDenied), ("full disk", WriteFailed)],
)
def test_a_failure_is_not_taken_for_the_indexs(
    memory: MemoryStore,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    fault: str,
    error: type[DatastreamerError],
) -> None:
    """The pages are not fetched a second time."""
    archive, passes = opened(memory), []
    in_threads, write, fetched = Store.in_threads, OsFile.write, OpenArchive.fetched

    def counted(store: Store, *arguments: Any) -> Any:
        passes.append(arguments)
        return in_threads(store, *arguments)

    def full(file: OsFile, data: Any, offset: int) -> None:
        if offset >= page_start(16):
            raise OSError(errno.ENOSPC, "No space left on device")
        write(file, data, offset)

    def failing(archive: OpenArchive, row: Any, first: int, stop: int, **last: bool) -> Any:
        if first == 16 and fault != "full disk":
            memory.fault = lambda *_: fault
        return fetched(archive, row, first, stop, **last)

    monkeypatch.setattr(Store, "in_threads", counted)
    monkeypatch.setattr(OpenArchive, "fetched", failing)
    if fault == "full disk":
        monkeypatch.setattr(OsFile, "write", full)
    with pytest.raises(error):
        restore(archive, tmp_path / "r.bin", archive.newest()[0])
    assert len(passes) == 2  # of the footers, and of the pages


def test_an_interrupted_sort_ends_the_fetches(
    memory: MemoryStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(parts: Iterator[Any], _: Any) -> None:
        next(parts)
        raise KeyboardInterrupt

    monkeypatch.setattr(lmdb, "_runs", interrupted)
    archive = opened(memory)
    with pytest.raises(
        KeyboardInterrupt
    ) as caught:  # which keeps all frames, as a program's handler does
        restore(archive, tmp_path / "r.bin", archive.newest()[0])
    ensure_no_threads()
    del caught


def test_a_wrong_chain_ends_the_fetches(
    memory: MemoryStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(restore_module, "chained", lambda chain, digest: chain)
    archive = opened(memory)
    with pytest.raises(
        DamagedArchive
    ) as caught:  # which keeps all frames, as a program's handler does
        restore(archive, tmp_path / "r.bin", archive.newest()[0])
    ensure_no_threads()
    del caught


def test_the_index_of_a_failed_restore_is_not_that_of_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The end of both files is the same, by which an index is known to be of a file."""
    path, out, url = tmp_path / "s.bin", tmp_path / "r.bin", (tmp_path / "archive").as_uri()

    def grow(stream: DataStream, name: bytes, first: int) -> None:
        for page in range(first, 12):
            with stream.atomic_op() as op:
                op.add_bookmark(b"%s%04d" % (name, page))
                for _ in range(9):
                    op.add_entry(2, bytes(110_000))

    with DataStream.create(path, sync="os") as stream:
        grow(stream, b"a", 0)
    pushed(path, url, segment_pages=4)
    archive = OpenArchive.open(url)
    old = archive.newest()[0]
    with DataStream.open(path, sync="os") as stream:
        stream.truncate(60)
        grow(stream, b"b", 6)
    pushed(path, url, segment_pages=4)

    def fail(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(OsDisk, "publish", fail)
        with pytest.raises(WriteFailed):
            restore(archive, out, old)
    restore(archive, out, archive.newest()[0], from_page=2)
    with DataStream.open(out) as made:
        made.bookmarks.wait()
        wanted = bookmarks_of(made.batches())
        assert {key: made.bookmarks.newest(key) for key in wanted} == wanted
        assert made.bookmarks.newest(b"a0008") is None
