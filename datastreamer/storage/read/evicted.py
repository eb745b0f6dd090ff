"""A stream file whose first pages may be in an archive alone: what is below the *floor* is read
there.

Owns that no byte below the floor is read from the file, which may have a hole there: also if
another process has raised the floor since the file was opened. `header/records.py` has the mark
that says so.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Final, Protocol, TypeVar

from datastreamer.errors import (
    ArchiveError,
    DamagedArchive,
    EvictedEntry,
    ExtraMissing,
    StreamClosed,
)
from datastreamer.format import (
    ENTRY_HEAD_SIZE,
    ENTRY_HEAD_STRUCT,
    HEADER_PAGE_SIZE,
    PAGE_SIZE,
    page_of,
    page_start,
)
from datastreamer.storage.disk.file_ops import OsFile
from datastreamer.storage.header.page import HeaderPage
from datastreamer.storage.header.records import MARKED_BYTES, Evicted, FloorSeen, floor_in
from datastreamer.storage.objects import TIMEOUT, waits
from datastreamer.storage.objects.page_cache import CachedPages, PageCache

if TYPE_CHECKING:
    from datastreamer.storage.objects.opened import Content, ListedBookmarks
    from datastreamer.storage.objects.page_runs import PageRuns

# After a failure to open the archive, others fail at once for this long.
_AGAIN_SECONDS: Final = 2.0

T = TypeVar("T")


class HasFileno(Protocol):
    def fileno(self) -> int: ...


class PagedFile(OsFile):
    """A stream file of the operating system."""

    def __init__(self, fd: int, path: str) -> None:
        super().__init__(fd)
        self._path = path
        self._guard = threading.Lock()
        self._evicted: EvictedPages | None = None
        self._cache: tuple[str, int] | None = None
        self._timeout = TIMEOUT
        # Once it is set, nothing waits for an archive.
        self._ended = threading.Event()

    @classmethod
    def of(cls, file: OsFile, path: str) -> PagedFile:
        """The same open file, which `file` is not used for any more."""
        fd, file._fd = file._fd, -1
        return cls(fd, path)

    def floor(self) -> int:
        """The first page that is in the file, as it says now. Raises `EvictedEntry` if that is
        damaged."""
        return self.look().floor

    def look(self) -> FloorSeen:
        """The floor, as the file says now. Raises `EvictedEntry`."""
        found = floor_in(super().read(MARKED_BYTES, 0))
        if found is None:
            raise EvictedEntry(
                self._path,
                "the record that says which of its pages are in an archive alone is damaged: "
                "restore the file from its archive (`datastreamer archive restore`)",
            )
        return found

    def evicted(self) -> EvictedPages | None:
        """The pages below the floor; None if there are none."""
        seen = self.look()
        return self._evicted_at(seen) if seen.floor else None

    def _evicted_at(self, seen: FloorSeen) -> EvictedPages:
        with self._guard:
            if self._evicted is None or self._evicted.fall != seen.fall:
                # Pages that were fetched before may be others now. A thread that waits for
                # these gets them.
                cache = None if self._cache is None else PageCache(*self._cache)
                mark, fall = lambda: HeaderPage.of(self).evicted, seen.fall
                self._evicted = EvictedPages(
                    self._path, mark, cache, fall, self._timeout, self._ended
                )
            self._evicted.floor = seen.floor
            return self._evicted

    def read(self, size: int, offset: int) -> bytes:
        """Raises `EvictedEntry` for an evicted page that its archive does not give."""
        if offset + size <= HEADER_PAGE_SIZE:
            return super().read(size, offset)
        while True:
            before, data, seen = self.look(), super().read(size, offset), self.look()
            # The page may have been evicted, or brought back, before or after it was read; or both,
            # and then the floor is the same again.
            if before.floor <= seen.floor and before.fall == seen.fall:
                break
        local = page_start(seen.floor)
        if not seen.floor or offset >= local:
            return data
        first = data[: max(0, HEADER_PAGE_SIZE - offset)]
        offset += len(first)
        found = self._evicted_at(seen).read(min(size - len(first), local - offset), offset)
        return first + found + data[len(first) + len(found) :]

    def bookmarks_at(self, offset: int, number: int) -> ListedBookmarks | None:
        """The bookmarks of the evicted pages from an entry on, as their archive lists them; None if
        it lists none for pages that begin with this entry. Raises `EvictedEntry`."""
        # The entry's own, or the one after the padding that the offset is in.
        evicted, page = self.evicted(), page_of(offset + PAGE_SIZE - 1)
        if evicted is None or page >= evicted.floor or evicted.first_number(page) != number:
            return None
        return evicted.bookmarks_at(page)

    # For a server, which sends pages from a file, and reads what is not at hand in a thread.

    def keep_fetched(self, most: int, folder: str | None = None, timeout: float = TIMEOUT) -> None:
        """From now on keep up to `most` bytes of the pages that are fetched, in `folder` (None: the
        file's); wait `timeout` seconds for the store."""
        folder = folder or os.path.dirname(os.path.abspath(self._path))
        with self._guard:
            self._cache, self._timeout = (folder, most), timeout
            self._evicted = None  # the next one has the cache
        with contextlib.suppress(EvictedEntry):
            if self.floor():
                threading.Thread(target=self._prepare, name="archive", daemon=True).start()

    def _prepare(self) -> None:
        """Open the archive, so that the first client does not wait for that."""
        # (The file may be closed meanwhile.)
        with contextlib.suppress(ArchiveError, EvictedEntry, ExtraMissing, StreamClosed, OSError):
            if (evicted := self.evicted()) is not None:
                evicted.prepare()

    def is_fetched(self, start: int, count: int, *, compared: bool) -> bool | None:
        """Whether the evicted pages of these bytes are at hand, and `compared`; None if all are in
        the file."""
        evicted = self.evicted()
        found = () if evicted is None else evicted.within(start, count)
        if not evicted or not found:
            return None
        held = [(evicted.holder(page), page) for page in found]
        return all(by and (page in by.compared or not compared) for by, page in held)

    def fetch(self, start: int, count: int) -> bool:
        """Have the evicted pages of these bytes at hand; False if there are none. Raises
        `EvictedEntry`."""
        evicted = self.evicted()
        found = () if evicted is None else evicted.within(start, count)
        for page in found:
            assert evicted is not None
            evicted.have(page)
        return bool(found)

    def fetched(self, page: int) -> CachedPages | None:
        """What has an evicted page at hand."""
        evicted = self.evicted()
        return None if evicted is None or page >= evicted.floor else evicted.holder(page)

    def holder(self, offset: int) -> tuple[HasFileno, int] | None:
        """The file that has the byte at this offset of the stream, and up to which offset; None if
        it is not at hand."""
        evicted, page = self.evicted(), page_of(offset)
        if evicted is None or page >= evicted.floor:
            return self, sys.maxsize
        found = evicted.holder(page)
        return None if found is None else (found, page_start(page + 1))

    def close(self) -> None:
        super().close()
        self._ended.set()
        with self._guard:
            if self._evicted is not None:
                self._evicted.close()


class EvictedPages:
    """The pages below the `floor` of a file, read from the archive that its mark names."""

    def __init__(
        self,
        path: str,
        mark: Callable[[], Evicted | None],
        cache: PageCache | None,
        fall: int,
        timeout: float,
        ended: threading.Event,
    ) -> None:
        """`mark()` is that in the file, now; `fall` is that of `FloorSeen`; once `ended` is set,
        nothing waits for the archive."""
        from datastreamer.storage.objects.page_runs import fetching_threads

        self.floor = 0
        self.fall = fall
        self._path = path
        self._mark = mark
        self._cache = cache
        self._timeout = timeout
        self._guard = threading.Lock()
        self._threads = fetching_threads()
        self._runs: PageRuns | None = None
        self._ended = ended
        self._failure: tuple[Exception | None, float] = None, 0.0

    def within(self, start: int, count: int) -> range:
        """The evicted pages that bytes of the stream are in."""
        stop = min(start + count, page_start(self.floor))
        return range(page_of(start), page_of(stop - 1) + 1) if start < stop else range(0)

    def holder(self, page: int) -> CachedPages | None:
        """The file that has a fetched page at its offset."""
        return None if self._cache is None else self._cache.holder(page)

    # Each raises `EvictedEntry`.

    def read(self, size: int, offset: int) -> bytes:
        parts, stop = [], offset + size
        while offset < stop:
            page = page_of(offset)
            content, start = self.page(page), page_start(page)
            parts.append(content[offset - start : stop - start])
            offset = start + PAGE_SIZE
        return b"".join(parts)

    def page(self, page: int) -> bytes:
        """A page, with zeros as its padding."""
        if (held := self.holder(page)) is not None:
            return os.pread(held.fileno(), PAGE_SIZE, page_start(page))
        return self._fetched(page).data.ljust(PAGE_SIZE, b"\0")

    def have(self, page: int) -> None:
        """Have a page at hand, and what a reader that came to it continues with soon."""
        if self.holder(page) is None:
            self._fetched(page)
        elif (runs := self._runs) is not None:
            runs.reach(page)

    def _fetched(self, page: int) -> Content:
        found = self._ask(f"page {page}", page, lambda runs: runs.get(page))
        if self._cache is not None:
            # Unless the thread that fetched it did that.
            self._cache.put(page, found)
        return found

    def page_holding(self, number: int) -> int:
        """The page that holds an entry."""
        return self._ask(
            f"entry {number}",
            self.floor - 1,
            lambda runs: runs.archive.page_with(runs.manifest, number),
        )

    def first_number(self, page: int) -> int:
        """The number of the first entry of a page."""
        if (held := self.holder(page)) is not None:
            head = os.pread(held.fileno(), ENTRY_HEAD_SIZE, page_start(page))
            return int(ENTRY_HEAD_STRUCT.unpack(head)[3])
        return self._ask(
            f"page {page}", page, lambda runs: runs.archive.first_number(runs.manifest, page)
        )

    def bookmarks_at(self, page: int) -> ListedBookmarks | None:
        """The bookmarks of the segment that begins with a page; None if there is none, or not all
        of its pages are known to be the file's."""
        found, proven = self._ask(
            *(f"page {page}", page),
            lambda runs: (runs.archive.bookmarks_at(runs.manifest, page), runs.stop),
        )
        return None if found is None or found.stop > min(self.floor, proven) else found

    def _ask(self, what: str, page: int, question: Callable[[PageRuns], T]) -> T:
        try:
            runs = self._runs_with(page)
            try:
                return question(runs)
            except DamagedArchive:
                # Its objects may have been replaced by others that a later manifest names.
                with waits.held(self._guard):
                    if self._runs is runs:
                        self._runs = None
                return question(self._runs_with(page))
        except (ArchiveError, ExtraMissing, StreamClosed, OSError) as error:
            why = str(error) or type(error).__name__
            raise EvictedEntry(
                self._path, f"{what} is in the stream's archive alone, and cannot be read: {why}"
            ) from error

    def _runs_with(self, page: int) -> PageRuns:
        with waits.held(self._guard):
            if self._runs is None or page >= self._runs.stop:
                failure, until = self._failure
                if failure is not None and time.monotonic() < until:
                    raise failure
                try:
                    self._runs = self._opened()
                except (ArchiveError, ExtraMissing, OSError) as error:
                    # Those who wait for the same do not try it again, one after the other.
                    self._failure = error, time.monotonic() + _AGAIN_SECONDS
                    raise
            return self._runs

    def prepare(self) -> None:
        """Open the archive, and read what leads to its first page. Who asks meanwhile does not wait
        for that. Raises what the archive raises."""
        runs = self._opened()
        runs.archive.footer(runs.manifest.row_of(0))
        with waits.held(self._guard):
            if self._runs is None:
                self._runs = runs

    def _opened(self) -> PageRuns:
        """The archive's pages that are known to be the file's: those below the floor, now."""
        mark = self._mark()
        if mark is None:
            raise StreamClosed("the record that says where pages are archived is damaged")
        from datastreamer.storage.objects.opened import OpenArchive
        from datastreamer.storage.objects.page_runs import PageRuns
        from datastreamer.storage.objects.store import Store

        archive = OpenArchive(Store(mark.url, timeout=self._timeout, abandoned=self._ended))
        manifest = archive.with_pages(mark)
        return PageRuns(archive, manifest, self._threads, mark.floor, self._cache)

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
        if self._cache is not None:
            self._cache.close()
