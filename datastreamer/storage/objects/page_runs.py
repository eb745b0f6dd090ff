"""Pages of an archive, fetched in runs, ahead of a reader that continues with the next one.

Owns which runs are in memory, and that what is fetched ahead is at hand when a reader comes to it.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Final

from datastreamer.errors import StreamClosed
from datastreamer.storage.objects import waits
from datastreamer.storage.objects.manifest import ArchiveManifest, Row

if TYPE_CHECKING:
    from datastreamer.storage.objects.opened import Content, OpenArchive
    from datastreamer.storage.objects.page_cache import PageCache

# Pages that are fetched at once; runs of them that a sequential reader is ahead; threads that
# fetch; runs in memory.
_RUN: Final = 4
_AHEAD: Final = 4
_THREADS: Final = 4
_MOST_RUNS: Final = 8


def fetching_threads() -> ThreadPoolExecutor:
    """The threads that fetch, for `PageRuns`."""
    return ThreadPoolExecutor(_THREADS, "archive")


class PageRuns:
    """The pages of a manifest up to, not including, `stop`; the runs that were read last are in
    memory."""

    def __init__(
        self,
        archive: OpenArchive,
        manifest: ArchiveManifest,
        threads: ThreadPoolExecutor,
        stop: int | None = None,
        cache: PageCache | None = None,
    ) -> None:
        """`stop` is the end by default. The threads put what they fetch into the cache, if that has
        room for what a reader is ahead; otherwise who gets a page may do that."""
        self.archive = archive
        self.manifest = manifest
        if stop is None:
            stop = manifest.rows[-1].stop if manifest.rows else 0
        self.stop = stop
        self._threads = threads
        self._cache = cache if cache is not None and cache.half > _AHEAD * _RUN else None
        self._guard = threading.Lock()
        # By their first pages.
        self._runs: OrderedDict[int, list[Future[Content]]] = OrderedDict()
        # The pages that sequential readers continue with.
        self._next: OrderedDict[int, None] = OrderedDict()

    def get(self, page: int) -> Content:
        """The content of a page."""
        with self._guard:
            row, first, stop = self._bounds(page)
            pages = self._run(row, first, stop, page)
            self._came(first, stop)
        wanted = pages[page - first]
        waits.until_done(wanted)
        try:
            return wanted.result()
        except CancelledError:
            raise self._closed() from None
        except BaseException:
            with self._guard:
                self._runs.pop(first, None)
            raise

    def reach(self, page: int) -> int:
        """A reader has come to a page that it need not get. Returns where the page's run ends."""
        with self._guard:
            _, first, stop = self._bounds(page)
            self._came(first, stop)
        return stop

    def _came(self, first: int, stop: int) -> None:
        """A reader is in this run; if it comes from the one before, what follows is fetched.
        Requires the guard."""
        ahead = stop
        if first in self._next:
            del self._next[first]
            for _ in range(_AHEAD):
                if ahead < self.stop:
                    row, begin, ahead = self._bounds(ahead)
                    if self._cache is None or not self._cache.has(range(begin, ahead)):
                        self._run(row, begin, ahead, begin)
        self._next[stop] = None
        if len(self._next) > _MOST_RUNS:
            self._next.popitem(last=False)

    def _closed(self) -> StreamClosed:
        return StreamClosed(f"{self.archive.url}: it was closed while it was read")

    def _bounds(self, page: int) -> tuple[Row, int, int]:
        """The row of a page, and from where up to, not including, where its run is."""
        row = self.manifest.row_of(page)
        first = page - (page - row.first_page) % _RUN
        return row, first, min(first + _RUN, row.stop, self.stop)

    def _run(self, row: Row, first: int, stop: int, page: int) -> list[Future[Content]]:
        """The pages of a run, which is being fetched for a reader that is at `page`. Requires the
        guard."""
        if first not in self._runs:
            pages: list[Future[Content]] = [Future() for _ in range(first, stop)]
            try:
                fetching = self._threads.submit(self._fetch, row, first, pages, page - first)
            except RuntimeError:
                raise self._closed() from None
            # (The end of the threads.)
            fetching.add_done_callback(
                lambda it: it.cancelled() and [each.cancel() for each in pages]
            )
            self._runs[first] = pages
        self._runs.move_to_end(first)
        while len(self._runs) > _MOST_RUNS:
            self._runs.popitem(last=False)
        return self._runs[first]

    def _fetch(self, row: Row, first: int, pages: list[Future[Content]], begin: int) -> None:
        """Fetch pages; a reader has the one at `begin` before the others are decoded."""
        order = [*range(begin, len(pages)), *range(begin)]
        try:
            stop, last = first + len(pages), row is self.manifest.tail
            decode = self.archive.fetched(row, first, stop, last=last)
        except BaseException as error:  # noqa: BLE001 - raised where the pages are read
            for each in pages:
                each.set_exception(error)
            return
        for at in order:
            try:
                found = decode[at]()
                if self._cache is not None:
                    self._cache.put(first + at, found)
                pages[at].set_result(found)
            except BaseException as error:  # noqa: BLE001 - the same
                pages[at].set_exception(error)
