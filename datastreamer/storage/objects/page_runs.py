"""Pages of an archive, fetched in runs, ahead of a reader that continues with the next one.

Owns which runs are in memory.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Final

from datastreamer.errors import DamagedArchive, StreamClosed
from datastreamer.storage.objects import waits
from datastreamer.storage.objects.manifest import ArchiveManifest

if TYPE_CHECKING:
    from datastreamer.storage.objects.opened import OpenArchive

# Pages that are fetched at once; runs of them that a sequential reader is ahead; threads that
# fetch; runs in memory.
_RUN: Final = 4
_AHEAD: Final = 4
_THREADS: Final = 4
_MOST_RUNS: Final = 8

_Fetched = Future[list[bytes]]


def fetching_threads() -> ThreadPoolExecutor:
    """The threads that fetch, for `PageRuns`."""
    return ThreadPoolExecutor(_THREADS, "archive")


class PageRuns:
    """The pages of one manifest; the runs that were read last are in memory."""

    def __init__(
        self, archive: OpenArchive, manifest: ArchiveManifest, threads: ThreadPoolExecutor
    ) -> None:
        self.manifest = manifest
        self.stop = manifest.rows[-1].stop if manifest.rows else 0
        self.archive = archive
        self._threads = threads
        self._guard = threading.Lock()
        # By their first pages.
        self._runs: OrderedDict[int, _Fetched] = OrderedDict()
        # The page that a sequential reader continues with.
        self._next = -1

    def get(self, page: int) -> bytes:
        """The content of a page."""
        first, found = self.run(page)
        return found[page - first]

    def run(self, page: int) -> tuple[int, list[bytes]]:
        """The pages that are fetched together with a page, and the number of their first one."""
        with self._guard:
            first, stop, run = self._run(page)
            ahead = stop
            for _ in range(_AHEAD if first == self._next else 0):
                if ahead < self.stop:
                    _, ahead, _ = self._run(ahead)
            self._next = stop
        waits.until_done(run)
        try:
            return first, run.result()
        except CancelledError:
            raise StreamClosed(f"{self.archive.url}: it was closed while it was read") from None
        except BaseException as error:
            with self._guard:
                self._runs.pop(first, None)
            if isinstance(error, DamagedArchive) and stop > first + 1:
                # Perhaps in another page of the run.
                return page, self.archive.pages(self.manifest.row_of(page), page, page + 1)
            raise

    def _run(self, page: int) -> tuple[int, int, _Fetched]:
        """The run that a page is in, from one page up to, not including, another; it is being
        fetched. Requires the guard."""
        row = self.manifest.row_of(page)
        first = page - (page - row.first_page) % _RUN
        stop, last = min(first + _RUN, row.stop), row is self.manifest.tail
        if first not in self._runs:
            self._runs[first] = self._threads.submit(
                self.archive.pages, row, first, stop, last=last
            )
        self._runs.move_to_end(first)
        while len(self._runs) > _MOST_RUNS:
            self._runs.popitem(last=False)
        return first, stop, self._runs[first]
