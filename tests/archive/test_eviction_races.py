"""What happens between two looks at the floor."""

from __future__ import annotations

import dataclasses
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from datastreamer import DataStream
from datastreamer.archive import eviction
from datastreamer.errors import ArchiveUnreachable, BadArgument, StreamClosed
from datastreamer.format import PAGE_SIZE, page_start
from datastreamer.storage.disk.file_ops import OsFile
from datastreamer.storage.header.records import FloorSeen, floor_in
from datastreamer.storage.maintain.snapshot import snapshot
from datastreamer.storage.objects import CACHE_BYTES, page_runs
from datastreamer.storage.objects.manifest import ArchiveManifest, Row
from datastreamer.storage.objects.opened import Content, OpenArchive
from datastreamer.storage.objects.page_cache import PageCache
from datastreamer.storage.objects.page_runs import PageRuns, fetching_threads
from datastreamer.storage.objects.waits import NotAtHand, at_hand_only
from datastreamer.storage.read.evicted import EvictedPages, PagedFile
from tests.archive.evicting import entries, everything, evict, made, marked_copy, pushed
from tests.archive.stores import fill, until


@pytest.fixture
def twin(tmp_path: Path) -> Path:
    return made(tmp_path / "twin" / "s.bin", 5)


def test_pages_that_were_changed_and_evicted_again(twin: Path, tmp_path: Path, url: str) -> None:
    path = marked_copy(twin, tmp_path / "s.bin", url, 3)
    with (
        DataStream.open(path, sync="os") as stream,
        DataStream.open(path, follow=True) as follower,
    ):
        # So that what it fetches is kept as in a server.
        follower.parts.pages.keep_fetched(CACHE_BYTES)
        assert everything(follower) == everything(stream)
        before = next(it for it in stream.entries(60) if it.type != 176 and it.data)
        stream.update_entry(before.number, before.type, b"x" * len(before.data))
        wanted = everything(stream)
        for change in range(2):
            stream.sync()
            pushed(path, url)
            evict(stream, url, 3 + change)
            follower.refresh()
            assert everything(stream) == wanted
            assert everything(follower) == wanted
            with DataStream.open(path, read_only=True) as fresh:
                assert everything(fresh) == wanted
            if not change:
                stream.truncate(70)
                fill(stream, 4, seed=9)
                wanted = everything(stream)


def test_a_read_while_pages_are_brought_back(
    twin: Path, tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = marked_copy(twin, tmp_path / "s.bin", url, 3)
    content = twin.read_bytes()
    with DataStream.open(path, sync="os") as stream, DataStream.open(path, follow=True) as reader:
        read, due = OsFile.read, [True]

        def read_first(self: OsFile, size: int, offset: int) -> bytes:
            found = read(self, size, offset)
            if offset > 4096 and due and self is reader.parts.pages.file:
                due.clear()
                stream.parts.pages.bring_back(0)
            return found

        monkeypatch.setattr(OsFile, "read", read_first)
        at = page_start(1)
        assert reader.parts.pages.file.read(1000, at) == content[at : at + 1000]
        assert not due


@pytest.mark.parametrize("floor", [0, 1])
def test_a_read_while_pages_are_evicted_and_brought_back(
    floor: int, twin: Path, tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that was stopped before its read, and after it, sees the same floor twice; with
    floor 0 the file is not marked both times."""
    path = marked_copy(twin, tmp_path / "s.bin", url, 1)
    if not floor:
        with DataStream.open(path) as stream:
            stream.parts.pages.bring_back(0)
    content = twin.read_bytes()
    with DataStream.open(path, sync="os") as stream, DataStream.open(path, follow=True) as reader:
        read, due = OsFile.read, [True]

        def read_between(self: OsFile, size: int, offset: int) -> bytes:
            if offset <= 4096 or not due or self is not reader.parts.pages.file:
                return read(self, size, offset)
            due.clear()
            evict(stream, url, 3)
            found = read(self, size, offset)
            stream.parts.pages.bring_back(floor)
            return found

        monkeypatch.setattr(OsFile, "read", read_between)
        at = page_start(2)
        assert reader.parts.pages.file.read(1000, at) == content[at : at + 1000]
        assert not due


def test_a_comparison_past_the_page_cache_beside_an_eviction_that_is_undone(
    twin: Path, tmp_path: Path, url: str
) -> None:
    path = marked_copy(twin, tmp_path / "s.bin", url, 1)
    with DataStream.open(path, sync="os") as stream:
        pages = stream.parts.pages
        pages.bring_back(0)

        class Disk:
            def read(self, size: int, offset: int) -> bytes:
                if offset >= page_start(0):
                    evict(stream, url, 3)
                    pages.bring_back(0)
                    return bytes(size)  # as it was in the hole
                return pages.file.read(size, offset)

        disk = Disk()
        assert not pages.for_server().verify(2, past_cache=disk)
        pages.for_server().verify(2)


def test_a_file_that_was_marked_and_is_no_longer_differs(
    twin: Path, tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At each step: a reader that was stopped in between would use what it read in the hole."""
    path = marked_copy(twin, tmp_path / "s.bin", url, 1)
    with DataStream.open(path, sync="os") as stream:
        stream.parts.pages.bring_back(0)
        sync, seen = OsFile.sync, set[FloorSeen | None]()

        def looked(self: OsFile) -> None:
            sync(self)
            seen.add(floor_in(path.read_bytes()[:4096]))

        monkeypatch.setattr(OsFile, "sync", looked)
        evict(stream, url, 3)
        unmarked = {each for each in seen if each is not None and not each.floor}
        seen.clear()
        stream.parts.pages.bring_back(0)
    after = {each for each in seen if each is not None and not each.floor}
    assert unmarked
    assert after
    assert not unmarked & after


def test_a_file_that_is_closed_before_its_archive_is_opened(
    twin: Path, tmp_path: Path, url: str
) -> None:
    path = marked_copy(twin, tmp_path / "s.bin", url, 3)
    with DataStream.open(path, read_only=True) as stream:
        file = stream.parts.pages.file
        assert isinstance(file, PagedFile)
    file._prepare()


def test_pages_of_an_archive_that_is_closed(twin: Path, url: str) -> None:
    pushed(twin, url)
    archive, threads = OpenArchive.open(url), fetching_threads()
    runs = PageRuns(archive, archive.newest()[0], threads)
    assert runs.get(1).data
    threads.shutdown()
    assert runs.get(1).data
    with pytest.raises(StreamClosed, match="it was closed while it was read"):
        runs.get(4)


def test_a_reader_that_waits_while_an_archive_is_closed(
    twin: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread that fetches has not come to its page."""
    pushed(twin, url)
    archive, answers, ended = OpenArchive.open(url), threading.Event(), list[BaseException]()
    ask, threads = OpenArchive.fetched, ThreadPoolExecutor(1)

    def late(self: OpenArchive, *what: Any, **options: Any) -> Any:
        assert answers.wait(20)
        return ask(self, *what, **options)

    def read() -> None:
        try:
            runs.get(4)
        except StreamClosed as error:
            ended.append(error)

    monkeypatch.setattr(OpenArchive, "fetched", late)
    runs = PageRuns(archive, archive.newest()[0], threads)
    with pytest.raises(NotAtHand), at_hand_only():
        runs.get(0)
    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    until(lambda: 4 in runs._runs and runs._runs[4].pages[0]._waiters)
    threads.shutdown(wait=False, cancel_futures=True)
    answers.set()
    reader.join(5)
    assert len(ended) == 1


def test_runs_that_readers_left_are_not_fetched(
    twin: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the store does not answer, no queue grows of pages that readers gave up. A reader that
    still waits is served, although its run is forgotten."""
    pushed(twin, url)
    archive, answers, fetched = OpenArchive.open(url), threading.Event(), list[int]()
    ask = OpenArchive.fetched

    def late(self: OpenArchive, row: Row, first: int, stop: int, **options: Any) -> Any:
        fetched.append(first)
        assert answers.wait(20)
        return ask(self, row, first, stop, **options)

    monkeypatch.setattr(OpenArchive, "fetched", late)
    for name in ("_RUN", "_MOST_RUNS"):
        monkeypatch.setattr(page_runs, name, 1)
    monkeypatch.setattr(page_runs, "_AHEAD", 0)
    with ThreadPoolExecutor(1) as fetching, ThreadPoolExecutor(2) as readers:
        runs = PageRuns(archive, archive.newest()[0], fetching)
        waiting = []
        for page in (0, 1):
            waiting.append(readers.submit(runs.get, page))
            until(lambda page=page: page in runs._runs)
        for page in (2, 3, 4):
            with pytest.raises(NotAtHand), at_hand_only():
                runs.get(page)
        answers.set()
        assert all(it.result(20).data for it in waiting)
    assert fetched == [0, 1, 4]


def test_pages_above_the_floor_are_not_fetched_ahead(tmp_path: Path, url: str) -> None:
    """Neither a partial one, nor one that is changed before the floor is above it."""
    path, caches = made(tmp_path / "s.bin", 11.5), []
    pushed(path, url)
    with (
        DataStream.open(path, sync="os") as stream,
        DataStream.open(path, follow=True) as follower,
    ):
        evict(stream, url, 6)
        file = follower.parts.pages.file
        assert isinstance(file, PagedFile)
        file.keep_fetched(CACHE_BYTES)

        def fetched() -> set[int]:
            evicted = file.evicted()
            assert evicted is not None
            assert evicted._cache is not None
            caches.append(evicted._cache)
            return {page for page in range(13) if evicted.holder(page)}

        assert everything(follower) == everything(stream)
        assert fetched() == set(range(6))
        for page in range(6, 11):
            after = stream.entries(stream.reader.first_number(page))
            found = next(it for it in after if it.type != 176 and len(it.data) > 100)
            stream.update_entry(found.number, found.type, b"u" * len(found.data))
        with stream.atomic_op() as op:
            op.add_entry(2, b"after what was the end")
        fill(stream, 2, seed=5)
        stream.sync()
        pushed(path, url)
        evict(stream, url, 12)
        follower.refresh()
        wanted = everything(stream)
        assert everything(follower) == wanted
        assert fetched() == set(range(12))
    caches[-1].put(1, Content(b"after the end", bytes(16)))
    assert caches[-1].holder(1) is None


def test_a_floor_that_falls_while_the_archive_is_opened(
    twin: Path, tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, content = marked_copy(twin, tmp_path / "s.bin", url, 4), twin.read_bytes()
    opened, due = EvictedPages._opened, [True]
    with DataStream.open(path, sync="os") as stream, DataStream.open(path, follow=True) as reader:
        file = reader.parts.pages.file
        assert isinstance(file, PagedFile)

        def opened_late(self: EvictedPages) -> PageRuns:
            if due and self is file._evicted:
                due.clear()
                stream.parts.pages.bring_back(2)
            return opened(self)

        monkeypatch.setattr(EvictedPages, "_opened", opened_late)
        at = page_start(3)
        assert file.read(1000, at) == content[at : at + 1000]
        assert not due
        assert file.floor() == 2


def test_what_was_read_ahead_in_an_outage_is_tried_again(
    tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = marked_copy(made(tmp_path / "longer.bin", 14), tmp_path / "s.bin", url, 12)
    fetched, failed = OpenArchive.fetched, threading.Event()

    def away(self: OpenArchive, row: Row, first: int, *words: Any, **more: Any) -> Any:
        if first < 8:
            return fetched(self, row, first, *words, **more)
        failed.set()
        raise ArchiveUnreachable(self.url, "it is away")

    with DataStream.open(path, read_only=True) as stream:
        file = stream.parts.pages.file
        assert isinstance(file, PagedFile)
        file.keep_fetched(CACHE_BYTES)
        with monkeypatch.context() as patch:
            patch.setattr(OpenArchive, "fetched", away)
            file.fetch(page_start(0), 10)
            file.fetch(page_start(4), 10)
            assert failed.wait(30)
            evicted = file.evicted()
            assert evicted is not None
            assert evicted._runs is not None
            until(lambda: 8 not in evicted._runs._runs)
        assert file.fetch(page_start(8), 10)
        # For a page that is at hand nothing is opened.
        evicted._runs = None
        monkeypatch.setattr(EvictedPages, "_opened", lambda self: pytest.fail("it was opened"))
        assert file.fetch(page_start(8), 10)


def test_a_page_that_a_full_disk_takes_in_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pwrite, cache = os.pwrite, PageCache(str(tmp_path), CACHE_BYTES)
    cache.put(1, Content(b"one", bytes(16)))
    with monkeypatch.context() as patch:
        parts = [1000]
        patch.setattr(
            os,
            "pwrite",
            lambda fd, data, at: pwrite(fd, data[: parts.pop() if parts else None], at),
        )
        cache.put(2, Content(b"two" * 1000, bytes(16)))
    held = cache.holder(2)
    assert held is not None
    assert os.pread(held.fileno(), PAGE_SIZE, page_start(2)) == (b"two" * 1000).ljust(
        PAGE_SIZE, b"\0"
    )
    assert "No space left on device" in caplog.text


def test_pages_that_were_read_back_from_other_objects_stay(
    twin: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(eviction, "_NEVER", 1)
    monkeypatch.setattr(eviction, "_SETTLE_SECONDS", 0.0)
    pushed(twin, url)
    archive = OpenArchive.open(url)
    read, _ = archive.newest()
    others = tuple(row._replace(object="s/other") for row in read.segments)
    fewer = dataclasses.replace(read, segments=())
    found = [read, dataclasses.replace(read, segments=others), read, fewer, read, read]
    with DataStream.open(twin, sync="os") as stream:
        evicting = eviction.Eviction(stream, lambda: (archive, found.pop(0)), 1, url)
        for floor in (0, 0, 4):
            assert evicting.step() == floor
            assert stream.parts.pages.floor_page == floor


def test_pages_that_come_back_while_others_are_read_back_stay(
    twin: Path, tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(eviction, "_NEVER", 1)
    monkeypatch.setattr(eviction, "_SETTLE_SECONDS", 0.0)
    path = marked_copy(twin, tmp_path / "s.bin", url, 3)
    archive = OpenArchive.open(url)
    with DataStream.open(path, sync="os") as stream:
        pages, looks = stream.parts.pages, [0]

        def newest() -> tuple[OpenArchive, ArchiveManifest]:
            looks[0] += 1
            if looks[0] == 2:
                pages.bring_back(2)
            return archive, archive.newest()[0]

        evicting = eviction.Eviction(stream, newest, 1, url)
        with pytest.raises(BadArgument, match="page 2 was brought back into the file meanwhile"):
            evicting.step()
        assert pages.floor_page == 2
        assert evicting.step() == 2
    assert entries(path) == entries(twin)


def test_the_floor_stays_during_a_change(twin: Path, tmp_path: Path, url: str) -> None:
    path = marked_copy(twin, tmp_path / "s.bin", url, 1)
    with DataStream.open(path, sync="os") as stream:
        floor = stream._ensure_writable().floor
        evicting = threading.Thread(target=evict, args=(stream, url, 3))
        with floor.bringing_back(2):
            evicting.start()
            evicting.join(0.1)
            assert evicting.is_alive()
            assert floor.page == 1
        evicting.join()
        assert floor.page == 3


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("verify", [False, True])
def test_a_snapshot_beside_an_eviction(
    verify: bool, whole: bool, twin: Path, tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = marked_copy(twin, tmp_path / "s.bin", url, 1)
    copy, real = os.copy_file_range, [4]
    with DataStream.open(path, sync="os") as stream:

        def copy_later(*words: Any) -> int:
            if real:
                evict(stream, url, real.pop())
            return copy(*words)

        monkeypatch.setattr(os, "copy_file_range", copy_later)
        out = tmp_path / "out.bin"
        snapshot(path, out, verify=verify, whole=whole)
        assert whole or not real
    assert entries(out) == entries(twin)


@pytest.mark.parametrize("verify", [False, True])
def test_a_snapshot_beside_an_eviction_that_is_undone(
    verify: bool, twin: Path, tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = marked_copy(twin, tmp_path / "s.bin", url, 1)
    copy, due = os.copy_file_range, [True]
    with DataStream.open(path, sync="os") as stream:
        stream.parts.pages.bring_back(0)

        def copy_between(*words: Any) -> int:
            if not due:
                return copy(*words)
            due.clear()
            evict(stream, url, 3)
            done = copy(*words)
            stream.parts.pages.bring_back(0)
            return done

        monkeypatch.setattr(os, "copy_file_range", copy_between)
        snapshot(path, tmp_path / "out.bin", verify=verify)
        assert not due
    assert entries(tmp_path / "out.bin") == entries(twin)
