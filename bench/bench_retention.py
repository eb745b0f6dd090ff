"""Evicted pages: how fast a client catches up over them, and what they cost an open.

The store is a folder, so that these are the costs of this program, and not of a network.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from bench.measure import Done
from bench.readers import catch_up
from datastreamer import DataStream
from datastreamer.archive.archived_file import ArchivedFile
from datastreamer.archive.writer import ArchiveWriter
from datastreamer.format import PAGE_SIZE
from datastreamer.service.embedded import StreamServer
from datastreamer.storage.header.records import Evicted
from datastreamer.storage.objects.opened import OpenArchive
from datastreamer.storage.objects.store import Store

Versus = Callable[..., None]
Record = Callable[..., None]
SIZE = 1000
MB = 1_000_000


class Files:
    """A stream, a copy of it whose pages are evicted but for the last, and their archive."""

    def __init__(self, folder: Path, pages: int) -> None:
        self.whole, self.evicted = folder / "whole.bin", folder / "evicted.bin"
        self.archive = folder / "archive"
        self.entries = pages * (PAGE_SIZE // (SIZE + 17))
        with DataStream.create(self.whole, sync="os") as stream:
            for start in range(0, self.entries, 1000):
                # So that it compresses by half.
                data = [os.urandom(SIZE // 2) * 2 for _ in range(min(1000, self.entries - start))]
                with stream.atomic_op() as op:
                    op.add_entries(2, data)
        with DataStream.open(self.whole, read_only=True) as stream:
            stream.snapshot(self.evicted)
        source, url = ArchivedFile(self.evicted), self.archive.as_uri()
        ArchiveWriter(source, Store(url)).publish()
        source.close()
        archive = OpenArchive.open(url)
        manifest, _ = archive.newest()
        with DataStream.open(self.evicted) as stream:
            floor = manifest.whole_pages - 1
            chain = archive.chain_before(manifest, floor)
            assert chain is not None
            archive_id = bytes.fromhex(archive.id)
            mark = Evicted(floor, manifest.generation, archive_id, chain, url)
            stream.parts.pages.raise_floor(mark)
            stream.parts.pages.punch(0, floor)
            stream.bookmarks.wait()


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Files:
    smoke = request.config.getoption("benchmark_disable")
    return Files(tmp_path_factory.mktemp("evicted"), 3 if smoke else 300)


@pytest.fixture
def cold(files: Files) -> Iterator[Callable[[], None]]:
    fd = os.open(files.whole, os.O_RDONLY)

    def drop() -> None:
        if hasattr(os, "posix_fadvise"):
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)

    yield drop
    os.close(fd)


def test_catch_up(versus: Versus, files: Files, cold: Callable[[], None]) -> None:
    def served(path: Path) -> Done:
        # A process that has fetched nothing yet.
        with StreamServer(path, host="127.0.0.1", port=0, create=False) as server:
            done = catch_up(("127.0.0.1", server.port), entries=files.entries, size=SIZE)
        return Done(files.entries * (SIZE + 17) / MB, done.seconds)

    def local() -> Done:
        cold()
        return served(files.whole)

    versus(
        "catch-up over pages that are in the archive alone",
        lambda: served(files.evicted),
        {"the goal": 500.0, "pages of the file, from the disk": local},
        unit="MB/s",
        at_least={"the goal": 1.0, "pages of the file, from the disk": 1.0},
    )


def test_first_entry(record: Record, files: Files) -> None:
    waits = []
    for _ in range(5):
        with StreamServer(files.evicted, host="127.0.0.1", port=0, create=False) as server:
            begin = time.perf_counter()
            catch_up(("127.0.0.1", server.port), entries=1, size=SIZE)
            waits.append(1e3 * (time.perf_counter() - begin))
    record(
        "first entry of an evicted page, in a process that has fetched nothing",
        sorted(waits)[len(waits) // 2],
        {"the goal": 20.0},
        unit="ms",
        at_least=1.0,
        less_is_better=True,
    )


def test_open_without_the_store(record: Record, files: Files) -> None:
    def opened(path: Path) -> float:
        begin = time.perf_counter()
        with DataStream.open(path, read_only=True) as stream:
            stream.entry(stream.total_entries - 1)
        return 1e3 * (time.perf_counter() - begin)

    away = files.archive.with_name("away")
    files.archive.rename(away)
    try:
        without = sorted(opened(files.evicted) for _ in range(5))[2]
    finally:
        away.rename(files.archive)
    record(
        "open of a file with evicted pages while the store is away, and its last entry",
        without,
        {"100 ms more than the whole file": 100 + sorted(opened(files.whole) for _ in range(5))[2]},
        unit="ms",
        at_least=1.0,
        less_is_better=True,
    )
