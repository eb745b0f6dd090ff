"""Frees the local disk of pages that the archive has: the retention of a stream's file.

Owns which pages are evicted: only those that this process has just read back from the archive and
compared. `storage/write/floor.py` has the order of the writes in the file.
"""

from __future__ import annotations

import logging
import os
import tempfile
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Final

from datastreamer.archive.archived_file import now_ms
from datastreamer.archive.options import ArchiveOptions
from datastreamer.errors import DamagedArchive, DatastreamerError, RetentionNotPossible
from datastreamer.format import PAGE_SIZE, page_start
from datastreamer.storage.disk.file_ops import OsFile
from datastreamer.storage.header.records import MOST_URL, Evicted
from datastreamer.storage.objects.manifest import ArchiveManifest
from datastreamer.storage.objects.opened import OpenArchive
from datastreamer.storage.objects.store import Store
from datastreamer.storage.pages.hashes import NO_CHAIN, last_page
from datastreamer.storage.stream import DataStream

_log = logging.getLogger(__name__)

# Pages that are evicted at once, and those at the end that never are.
_BATCH: Final = 64
_NEVER: Final = 64
# Between the new floor and the hole. Processes that read the file beside this one see the floor
# before they use what they have read; this is for what they pass to sendfile.
_SETTLE_SECONDS: Final = 2.0

Newest = Callable[[], tuple[OpenArchive, ArchiveManifest]]


class Eviction:
    """Evicts what is older or more than the retention; one thread calls `step`."""

    def __init__(
        self, stream: DataStream, newest: Newest, retention: int | timedelta, url: str
    ) -> None:
        """`newest()` is the archive with its newest manifest, which is this process's own if it
        writes the archive. `retention` is the number of bytes that remain, or for how long pages
        do. Raises `RetentionNotPossible`."""
        self._stream = stream
        self._newest = newest
        self._retention = retention
        # Whether what is below the floor has no space in the file.
        self._punched = False
        _ensure_possible(stream.absolute_path, url)

    def step(self) -> int:
        """Evict up to `_BATCH` pages; returns their number. Raises `DamagedArchive` if the archive
        does not have what it should, `WriteFailed`, `OSError`, and what the store raises."""
        pages = self._stream.parts.pages
        floor = pages.floor_page
        if not self._punched and floor:
            # A process that was killed may have left it.
            time.sleep(_SETTLE_SECONDS)
            pages.punch(0, floor)
        self._punched = True
        length = self._stream.reader.head.length
        if floor_for(self._retention, length, None, floor) <= floor:
            return 0
        archive, manifest = self._newest()
        stop = min(floor_for(self._retention, length, manifest, floor), floor + _BATCH)
        # None if a page has no checksum.
        chain = pages.chain_before(stop)
        if stop <= floor or chain is None:
            return 0
        if archive.chain_before(manifest, stop) != chain:
            raise DamagedArchive(
                archive.url, f"its first {stop} pages are not those of {self._stream.path}"
            )
        _read_back(archive, manifest, floor, stop)
        again, newest = self._newest()
        if newest.whole_pages < stop or _places(newest, floor, stop) != _places(
            manifest, floor, stop
        ):
            # Other objects have the pages now, as after an update: the next call reads those back.
            return 0
        archive_id = bytes.fromhex(again.id)
        self._punched = False  # until it has the space back
        mark = Evicted(stop, manifest.generation, archive_id, chain, archive.url)
        pages.raise_floor(mark, floor)
        time.sleep(_SETTLE_SECONDS)
        pages.punch(floor, stop)
        self._punched = True
        _log.info("%s: the first %d pages are in %s alone", self._stream.path, stop, archive.url)
        return stop - floor


def local_numbers(stream: DataStream, options: ArchiveOptions) -> tuple[int, int, int]:
    """For the metrics: the evicted pages, the bytes of the others, how many the retention keeps."""
    floor, length = stream.parts.pages.floor_page, stream.reader.head.length
    kept = options.local_retention
    return floor, max(0, length - page_start(floor)), kept if isinstance(kept, int) else 0


def floor_for(
    retention: int | timedelta, length: int, manifest: ArchiveManifest | None, floor: int = 0
) -> int:
    """The page up to which pages of a stream of `length` bytes are in the archive alone by this
    retention, where the floor is `floor`; without `manifest`, if the archive has them, and they are
    old enough."""
    end = last_page(length)
    most = end - _NEVER
    if isinstance(retention, int):
        most = min(most, end + 1 - -(-retention // PAGE_SIZE))
    if manifest is None:
        return max(floor, most)
    most = min(most, manifest.whole_pages)
    if isinstance(retention, int):
        return max(floor, most)
    before = now_ms() - int(retention.total_seconds() * 1000)
    for row in manifest.segments:
        # The pages of a segment go together; a time that is not known is an old one.
        if row.stop > most or row.time >= before:
            break
        floor = max(floor, row.stop)
    return floor


class LocalRetention:
    """Evicts pages of a stream whose archive another process writes, until `close`."""

    def __init__(self, stream: DataStream, options: ArchiveOptions) -> None:
        """Raises `RetentionNotPossible`."""
        assert options.local_retention is not None
        self._options = options
        self._store = Store(options.url, timeout=options.timeout)
        self._archive: OpenArchive | None = None
        self._eviction = Eviction(stream, self._newest, options.local_retention, options.url)
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name="retention", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._ending.set()
        self._store.abandon()
        self._thread.join()

    def _newest(self) -> tuple[OpenArchive, ArchiveManifest]:
        if self._archive is None:
            self._archive = OpenArchive(self._store)
        return self._archive, self._archive.newest()[0]

    def _run(self) -> None:
        trouble: Exception | None = None
        while not self._ending.is_set():
            try:
                while self._eviction.step() and not self._ending.is_set():
                    pass
                trouble = None
            except (DatastreamerError, OSError) as error:
                if type(error) is not type(trouble) and not self._ending.is_set():
                    _log.error("nothing is evicted: %s", error)
                trouble = error
            self._ending.wait(self._options.interval)


def _places(manifest: ArchiveManifest, first: int, stop: int) -> list[tuple[str, int]]:
    """The object of each of these pages, and the frame in it."""
    rows = [(page, manifest.row_of(page)) for page in range(first, stop)]
    return [(row.object, page - row.first_page + row.frame) for page, row in rows]


def _read_back(archive: OpenArchive, manifest: ArchiveManifest, first: int, stop: int) -> None:
    """Read pages of an archive; each is decoded, and compared with the hash that leads to the
    manifest's chain. Raises `DamagedArchive`."""
    before = NO_CHAIN.hex()
    for row in manifest.segments:
        if row.first_page < stop and row.stop > first:
            archive.ensure_chained(row, before)
            archive.pages(row, max(first, row.first_page), min(stop, row.stop))
        before = row.chain


def _ensure_possible(path: str, url: str) -> None:
    """Raises `RetentionNotPossible` if the file system makes no holes in files, or takes no direct
    writes, which keep bytes that connections have queued from being cleared."""
    if len(url.encode()) > MOST_URL:
        raise RetentionNotPossible(
            f"{path}: --local-retention needs an archive's URL of at most {MOST_URL} bytes"
        )
    folder = os.path.dirname(path)
    try:
        with tempfile.TemporaryFile(dir=folder) as made:
            os.posix_fallocate(made.fileno(), 0, 3 * PAGE_SIZE)
            file = OsFile(os.dup(made.fileno()))
            try:
                file.punch(PAGE_SIZE, 2 * PAGE_SIZE)
            finally:
                file.close()
    except OSError as error:
        raise RetentionNotPossible(
            f"{path}: --local-retention is not possible: the file system of {folder} makes no "
            f"holes in files ({error.strerror or error}); leave it out, or move the stream"
        ) from error
