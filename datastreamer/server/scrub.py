"""The scrub: reads all pages of the stream again and again while the server is idle, and compares
them with their checksums.

Owns the order of the pages, the rate, and when the server counts as idle. Pages are read past the
page cache, so that the disk is examined and the cache keeps what clients need; what is resident is
compared too. `storage/pages/page_states.py` compares, and knows which pages are damaged.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Final, NamedTuple, TypeVar

import trio

from datastreamer.errors import DamagedPage
from datastreamer.format import PAGE_SIZE, page_start
from datastreamer.metrics.counters import Counts
from datastreamer.server.streaming.broadcast import Broadcast
from datastreamer.storage.disk.uncached import UncachedFile

_log = logging.getLogger(__name__)

A = TypeVar("A")
T = TypeVar("T")

# The server is idle if it did no work for a backlog for this long.
_QUIET_SECONDS: Final = 1.0
# A pass begins at the earliest this long after the one before began: a short stream is not read
# without a pause.
_PASS_SECONDS: Final = 60.0
# Pages without a checksum that are passed over in one turn of the thread.
_PASSED_OVER: Final = 256

MATCHES: Final = "matches"
DAMAGED: Final = "damaged"
UNVERIFIED: Final = "unverified"
RESULTS: Final = (MATCHES, DAMAGED, UNVERIFIED)
"""What comes of the examination of a page."""


class _Turn(NamedTuple):
    """What one turn of the thread examined: pages without a checksum, then perhaps one with."""

    unverified: int
    examined: bool
    error: DamagedPage | None


class Scrub:
    """Examines the stream of one server at most at `rate` bytes per second; None: never."""

    def __init__(self, rate: float | None, counts: Counts) -> None:
        self.rate = rate
        self._counts = counts
        self._began = self._passed = 0.0
        self._scope: trio.CancelScope | None = None
        self._stopped = False

    @property
    def age(self) -> float:
        """Seconds since the last full pass ended, or since the first one began."""
        return trio.current_time() - (self._passed or self._began)

    def stop(self) -> None:
        """Begin no further read: `run` returns when the one in progress is done."""
        self._stopped = True
        if self._scope is not None:
            self._scope.cancel()

    async def run(self, broadcast: Broadcast) -> None:
        """Examine the stream of `broadcast` until `stop`, forever. If cancelled, it returns when no
        thread reads the file any more."""
        if self.rate is None or self._stopped:
            return
        self._began, self._passed = trio.current_time(), 0.0
        disk = UncachedFile(broadcast.stream.parts.pages.file, broadcast.pages.resident)
        try:
            with trio.CancelScope() as self._scope:
                while True:
                    began = trio.current_time()
                    await self._pass(broadcast, disk)
                    self._passed = trio.current_time()
                    await trio.sleep_until(began + _PASS_SECONDS)
        finally:
            disk.close()

    async def _pass(self, broadcast: Broadcast, disk: UncachedFile) -> None:
        assert self.rate is not None
        page, due = 0, trio.current_time()
        idle = _Idleness(broadcast)
        while (page := max(page, broadcast.pages.floor)) < broadcast.pages.whole_pages:
            await idle.wait()
            turn = await self._in_thread(partial(_examine, broadcast, disk), page)
            page += turn.unverified + turn.examined
            self._counts.scrubbed[UNVERIFIED] += turn.unverified
            if turn.examined:
                self._counts.scrub_bytes += PAGE_SIZE
                self._count(broadcast, turn.error)
                # After a delay the rate stays the same.
                due = max(due, trio.current_time()) + PAGE_SIZE / self.rate
            await trio.sleep_until(due)
        await self._examine_last_page(broadcast)

    async def _examine_last_page(self, broadcast: Broadcast) -> None:
        """Compare the entries after the whole pages, which are usually resident."""
        known, error = False, None
        try:
            known = await self._in_thread(_verify_last_page, broadcast)
        except DamagedPage as found:
            known, error = True, found
        except OSError as found:
            _log.warning("%s: the last page cannot be read: %s", broadcast.stream.path, found)
        if known:
            self._count(broadcast, error)
        elif broadcast.stream.reader.head.entries:
            self._counts.scrubbed[UNVERIFIED] += 1

    async def _in_thread(self, call: Callable[[A], T], what: A) -> T:
        return await trio.to_thread.run_sync(call, what)

    def _count(self, broadcast: Broadcast, error: DamagedPage | None) -> None:
        """A page was examined: it matches its checksum, or `error` says why not."""
        self._counts.scrubbed[MATCHES if error is None else DAMAGED] += 1
        if error is not None and not broadcast.pages.found(error):
            _log.error("%s; it is still damaged", error)


class _Idleness:
    """Whether the server is idle: for a second no client was sent entries far from the head, and
    nothing was read from the disk for a client."""

    def __init__(self, broadcast: Broadcast) -> None:
        self._broadcast = broadcast
        self._seen = self._work()
        self._since = trio.current_time()

    async def wait(self) -> None:
        while True:
            now, work = trio.current_time(), self._work()
            if work != self._seen:
                self._seen, self._since = work, now
            left = self._since + _QUIET_SECONDS - now
            if left <= 0:
                return
            await trio.sleep(left)

    def _work(self) -> tuple[int, int]:
        return self._broadcast.backlog_turns, self._broadcast.cold.reads


def _verify_last_page(broadcast: Broadcast) -> bool:
    return broadcast.pages.verify_last_page()


def _examine(broadcast: Broadcast, disk: UncachedFile, page: int) -> _Turn:
    """In a thread: examine the next page from `page` on that has a checksum, on the disk and, if it
    is resident, in memory."""
    pages = broadcast.pages
    first, stop = page, min(page + _PASSED_OVER, pages.whole_pages)
    for page in range(first, stop):
        try:
            known = pages.verify(page, past_cache=disk)
            if known and pages.resident(page_start(page), PAGE_SIZE):
                pages.verify(page)
        except DamagedPage as error:
            return _Turn(page - first, True, error)
        except OSError as error:
            _log.warning("%s: page %d cannot be read: %s", broadcast.stream.path, page, error)
            known = False
        if known:
            return _Turn(page - first, True, None)
    return _Turn(stop - first, False, None)
