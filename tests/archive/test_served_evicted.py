"""A server sends evicted entries."""

from __future__ import annotations

import contextlib
import json
import sys
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from urllib.request import urlopen

import pytest
from xxhash import xxh3_128_digest

from datastreamer import BlockingClient, HttpOptions, Limits, StreamServer
from datastreamer.errors import DatastreamerError
from datastreamer.format import PAGE_SIZE, page_start
from datastreamer.storage.objects.opened import Content, OpenArchive
from datastreamer.storage.objects.page_cache import PageCache
from datastreamer.storage.read.evicted import PagedFile
from tests.archive.evicting import entries, fields, made, marked_copy
from tests.network.drivers import client_of_kind, kinds


@kinds
def test_from_the_beginning(kind: str, tmp_path: Path) -> None:
    twin = made(tmp_path / "twin.bin")
    url = (tmp_path / "archive").as_uri()
    wanted, marked = entries(twin), marked_copy(twin, tmp_path / "s.bin", url, 6)
    with (
        StreamServer(marked, host="127.0.0.1", port=0, create=False, in_process=True) as server,
        client_of_kind(kind, "127.0.0.1", server.port, resume=False) as client,
    ):
        found = [
            fields(each)
            for batch in client.batches(from_entry=0, stop=len(wanted))
            for each in batch
        ]
        assert found == wanted
        for number in range(0, len(wanted), 13):
            assert fields(client.entry(number)) == wanted[number]
        key = next(data for _, kind_of, data in wanted if kind_of == 176)
        assert client.bookmark(key).number > 0


@pytest.mark.parametrize("cached", [2, 64])
def test_what_follows_is_fetched_before_a_client_comes_to_it(
    cached: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Into the cache, by the threads that fetch; a cache of two pages is of no use for that."""
    twin, put = made(tmp_path / "twin.bin", 24), PageCache.put
    marked = marked_copy(twin, tmp_path / "s.bin", (tmp_path / "archive").as_uri(), 22)
    by_fetchers: list[int] = []

    def noted(self: PageCache, page: int, content: Content) -> None:
        if threading.current_thread().name.startswith("archive"):
            by_fetchers.append(page)
        put(self, page, content)

    monkeypatch.setattr(PageCache, "put", noted)
    limits = Limits(archive_cache=cached * PAGE_SIZE)
    wanted = entries(twin)
    with StreamServer(
        *(marked,), host="127.0.0.1", port=0, create=False, in_process=True, limits=limits
    ) as server:
        floor = server.stream.floor
        for _ in range(2):
            with BlockingClient("127.0.0.1", server.port) as client:
                found = [fields(each) for each in client.entries(from_entry=0, stop=floor)]
            assert found == wanted[:floor]
    # Each once, also for the second client.
    assert sorted(by_fetchers) == (list(range(22)) if cached == 64 else [])


def test_a_page_that_is_fetched_again_is_compared_again(tmp_path: Path) -> None:
    marked = marked_copy(made(tmp_path / "twin.bin"), tmp_path / "s.bin", tmp_path.as_uri(), 6)
    with StreamServer(marked, host="127.0.0.1", port=0, create=False, in_process=True) as server:
        with BlockingClient("127.0.0.1", server.port) as client:
            assert list(client.entries(from_entry=0, stop=server.stream.floor))
        core = vars(server._serving)["_server"]
        register, file = core.broadcast.pages, server.stream.parts.pages.file
        assert isinstance(file, PagedFile)
        evicted = file.evicted()
        assert evicted is not None
        assert evicted._cache is not None
        assert register.is_whole(2)
        evicted._cache._halves.clear()
        assert file.fetch(page_start(2), 10)
        assert not register.is_ready(page_start(2), PAGE_SIZE)
        assert register.is_due(2)
        register.compare([2])
        assert register.is_ready(page_start(2), PAGE_SIZE)


def test_a_page_that_differs_in_the_archive_fails_no_client_of_those_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    twin = made(tmp_path / "twin.bin", 12)
    marked = marked_copy(twin, tmp_path / "s.bin", tmp_path.as_uri(), 10)
    fetched = OpenArchive.fetched

    def differing(page: int, decode: Callable[[], Content]) -> Content:
        found = decode()
        if page != 6:
            return found
        # A byte of an entry's data.
        at = found.data.index(found.data[500_000:500_001] * 50, 400_000)
        data = found.data[:at] + b"\xff" + found.data[at + 1 :]
        return Content(data, xxh3_128_digest(data))

    monkeypatch.setattr(
        OpenArchive,
        "fetched",
        lambda self, row, first, stop, *, last=False: [
            partial(differing, page, decode)
            for page, decode in enumerate(fetched(self, row, first, stop, last=last), first)
        ],
    )
    wanted = entries(twin)
    with StreamServer(marked, host="127.0.0.1", port=0, create=False, in_process=True) as server:
        stop = server.stream.reader.first_number(6)
        for _ in range(3):
            with BlockingClient("127.0.0.1", server.port, resume=False) as client:
                found = [fields(each) for each in client.entries(from_entry=0, stop=stop)]
            assert found == wanted[:stop]
        with (
            BlockingClient("127.0.0.1", server.port, resume=False) as client,
            pytest.raises(DatastreamerError),
        ):
            client.entry(stop)


def kept(folder: Path) -> list[int]:
    """Sizes on the disk of this process's open files without a name in a folder, in bytes."""
    found = []
    for each in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            if each.readlink().parent == folder and each.stat().st_nlink == 0:
                found.append(each.stat().st_blocks * 512)
    return found


@pytest.mark.skipif(sys.platform != "linux", reason="finds open files in /proc")
def test_where_and_how_much_is_kept(tmp_path: Path) -> None:
    twin = made(tmp_path / "twin.bin")
    marked = marked_copy(twin, tmp_path / "s.bin", (tmp_path / "archive").as_uri(), 7)
    cache = tmp_path / "cache"
    cache.mkdir()
    limits = Limits(archive_cache=4 * PAGE_SIZE, archive_cache_dir=str(cache))
    with (
        StreamServer(
            marked,
            host="127.0.0.1",
            port=0,
            create=False,
            in_process=True,
            limits=limits,
            http=HttpOptions(port=0),
        ) as server,
        BlockingClient("127.0.0.1", server.port) as client,
    ):
        floor = server.stream.floor
        assert floor > 0
        assert kept(cache) == []
        assert len(list(client.entries(from_entry=0, stop=floor))) == floor
        sizes = kept(cache)
        # A run of four pages may be in one file, which has half.
        assert 1 <= len(sizes) <= 2
        assert sum(sizes) <= 8 * PAGE_SIZE
        # (A sidecar that is being written has no name either: it is small.)
        assert sum(kept(tmp_path)) < PAGE_SIZE
        with urlopen(f"http://127.0.0.1:{server.http_port}/v1/stream") as answer:
            assert json.load(answer)["floor"] == floor
