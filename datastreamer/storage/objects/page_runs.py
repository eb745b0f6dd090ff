"""Pages of an archive, fetched in runs, ahead of a reader that continues with the next one.

Owns which runs are in memory, or being fetched.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Final, NoReturn

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


class _FetchedRun:
    """Pages that are being fetched, or were, and how many readers wait for one."""

    __slots__ = ("pages", "waiting")

    def __init__(self, count: int) -> None:
        self.pages: list[Future[Content]] = [Future() for _ in range(count)]
        self.waiting = 0

    def cancel(self) -> None:
        for page in self.pages:
            page.cancel()
            # This wakes a reader that waits already; `cancel` alone does not.
            page.set_running_or_notify_cancel()


class PageRuns:
    """The pages of a manifest; the runs that were read last are in memory. The threads that fetch
    put pages into the cache, if that has room for what a reader is ahead. Pages from `stop` on are
    neither fetched ahead nor put there. A run that is forgotten before its turn is not fetched,
    unless a reader waits for it."""

    def __init__(
        self,
        archive: OpenArchive,
        manifest: ArchiveManifest,
        threads: ThreadPoolExecutor,
        stop: int | None = None,
        cache: PageCache | None = None,
    ) -> None:
        """By default `stop` is the end."""
        if stop is None:
            stop = manifest.rows[-1].stop if manifest.rows else 0
        self.archive = archive
        self.manifest = manifest
        self.stop = stop
        self._threads = threads
        self._cache = cache if cache is not None and cache.half > _AHEAD * _RUN else None
        self._guard = threading.Lock()
        # By their first pages.
        self._runs: OrderedDict[int, _FetchedRun] = OrderedDict()
        # The pages that sequential readers continue with.
        self._next: OrderedDict[int, None] = OrderedDict()

    def get(self, page: int) -> Content:
        """The content of a page."""
        with self._guard:
            row, first, stop = self._bounds(page)
            run = self._run(row, first, stop, page)
            self._came(first, stop)
            run.waiting += 1
        wanted = run.pages[page - first]
        try:
            waits.until_done(wanted)
            return wanted.result()
        except CancelledError:
            raise self._closed() from None
        finally:
            with self._guard:
                run.waiting -= 1

    def reach(self, page: int) -> None:
        """A reader has come to a page that it need not get."""
        with self._guard:
            self._came(*self._bounds(page)[1:])

    def _came(self, first: int, stop: int) -> None:
        """A reader is in this run; if it comes from the one before, what follows is fetched.
        Requires the guard."""
        ahead, cache = stop, self._cache
        if first in self._next:
            del self._next[first]
            for _ in range(_AHEAD):
                if ahead < self.stop:
                    row, begin, ahead = self._bounds(ahead)
                    if cache is None or not all(map(cache.holder, range(begin, ahead))):
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
        return row, first, min(first + _RUN, row.stop)

    def _run(self, row: Row, first: int, stop: int, page: int) -> _FetchedRun:
        """A run, which is being fetched for a reader that is at `page`. Requires the guard."""
        if (known := self._runs.get(first)) is not None:
            self._runs.move_to_end(first)
            return known
        run = self._runs[first] = _FetchedRun(stop - first)
        while len(self._runs) > _MOST_RUNS:
            self._runs.popitem(last=False)
        try:
            fetching = self._threads.submit(self._fetch, row, first, run, page - first)
        except RuntimeError:
            del self._runs[first]
            raise self._closed() from None
        # (The end of the threads.)
        fetching.add_done_callback(lambda it: run.cancel() if it.cancelled() else None)
        return run

    def _fetch(self, row: Row, first: int, run: _FetchedRun, begin: int) -> None:
        """Fetch pages; a reader has the one at `begin` before the others are decoded."""
        with self._guard:
            if not run.waiting and self._runs.get(first) is not run:
                return
        pages = run.pages
        try:
            stop, last = first + len(pages), row is self.manifest.tail
            decode = self.archive.fetched(row, first, stop, last=last)
        except BaseException as error:  # noqa: BLE001 - raised where the pages are read
            decode = [partial(_raise, error)] * len(pages)
        for at in [*range(begin, len(pages)), *range(begin)]:
            try:
                found = decode[at]()
                if self._cache is not None and first + at < self.stop:
                    self._cache.put(first + at, found)
            except BaseException as error:  # noqa: BLE001 - the same
                with self._guard:
                    if self._runs.get(first) is run:
                        # Who comes to it later tries again.
                        del self._runs[first]
                pages[at].set_exception(error)
            else:
                pages[at].set_result(found)


def _raise(error: BaseException) -> NoReturn:
    raise error
