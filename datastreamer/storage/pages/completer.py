"""Completes the checksums of a stream that is open for writing, in the background.

Owns which pages are read for that, and when: a part of the time, so that commits and readers are
not disturbed. First those without a record; then all, if the records do not lead to the chain in
the commit record; then those before the first page that this chain covers. `keeper.py` has the
records.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable
from typing import Final, NamedTuple

from datastreamer.errors import EvictedEntry, WriteFailed
from datastreamer.format import PAGE_SIZE, page_start
from datastreamer.storage.objects.waits import NotAtHand, interrupted_by
from datastreamer.storage.pages.hashes import HASH_SIZE, PageHash, hash_page
from datastreamer.storage.pages.proof import Digests, KnownChain
from datastreamer.storage.summaries.keeper import count_page
from datastreamer.storage.write.background import Syncer
from datastreamer.storage.write.owned_file import OwnedFile

_log = logging.getLogger(__name__)

_TURN_SECONDS = 0.02
_PAUSE_SECONDS = 0.08
_CLOSE_SECONDS = 1.0
# After an evicted page that the archive does not give.
_LATER_SECONDS = 10.0
# Records that are looked at while commits wait for the lock.
_FEW: Final = 256
# In the place of the hash of a page that cannot be read as entries.
_NO_HASH: Final = b"\xff" * HASH_SIZE


class MadeSums(NamedTuple):
    """The number of whole pages, the number of checksums that were made now, and the number of
    pages that cannot be read as entries. `refuted` says that the pages together do not match the
    commit record; empty if they do, or it has nothing to compare with."""

    pages: int
    made: int
    damaged: int
    refuted: str


class SumsCompleter:
    """Makes the missing records of one stream."""

    def __init__(self, owned: OwnedFile) -> None:
        self._owned = owned
        self._thread = Syncer(self._take_turn)
        self._sums = owned.sums
        self._sums.on_doubt = lambda: self._thread.request(_PAUSE_SECONDS)
        owned.summaries.on_news = self._thread.request
        self._made = self._damaged = 0
        self._settled = False
        # The next record to look at, since the sidecar was begun.
        self._record_at = self._begun = 0
        self._begin(owned.epoch)

    def _begin(self, epoch: int) -> None:
        """Forget what was found out about pages at another epoch."""
        self._epoch = epoch
        # The hashes of pages as they are in the file.
        self._fresh = Digests()
        # The next page to hash because the records do not lead to the chain; None: they may.
        self._hash_at: int | None = None
        self._refuted: KnownChain | None = None
        # The page at which the hashes before the chain end.
        self._barrier = -1

    def start(self) -> None:
        """Begin, if there is anything to do."""
        if self.incomplete(self._owned.end.sums.page):
            self._thread.request(_PAUSE_SECONDS)

    def stop(self) -> None:
        """Return when it does nothing any more."""
        self._thread.close()

    def incomplete(self, pages: int) -> bool:
        """Whether a record of the first `pages` pages may be missing, or was not checked."""
        done = self._settled and self._begun == self._sums.begun
        return self._sums.usable and pages > 0 and not done

    def _take_turn(self) -> None:
        self._sums.sync()
        until, pause = time.monotonic() + _TURN_SECONDS, _PAUSE_SECONDS
        try:
            while time.monotonic() < until:
                if not (self.complete_page() or self.count_page()):
                    return
        except EvictedEntry as error:
            _log.warning("checksums are completed later: %s", error)
            pause = _LATER_SECONDS
        self._thread.request(pause)

    def complete(self, progress: Callable[[int, int], None]) -> MadeSums:
        """Make all missing records now. Raises `WriteFailed` if they cannot be written, and
        `EvictedEntry`."""
        self.stop()
        pages = self._owned.end.sums.page
        while self.complete_page():
            progress(self._record_at, pages)
        while self.count_page():
            pass
        if not self._sums.usable:
            raise WriteFailed(self._owned.path, "the checksums cannot be written; see the log")
        refuted = ""
        if self._refuted is not None and not self._damaged:  # else these pages are the reason
            refuted = self._refuted.refuted()
        return MadeSums(pages, self._made, self._damaged, refuted)

    def complete_page(self) -> bool:
        """Make the next missing record; False if there is none. Raises `EvictedEntry`."""
        owned = self._owned
        with owned.lock:
            if owned.closed:
                return False
            end, epoch = owned.end, owned.epoch
            known = KnownChain.of(end.written, end.sums.sum())
            page, more = self._next(end.sums.page, known)
            if page is None and not more and self._sums.usable:
                self._settled = True
                if end.base == end.written and owned.continue_chain():
                    # (The next commit writes it.)
                    owned.put_header(end.written, end.base_sum)
            if page is None or not self._sums.usable:
                return more and self._sums.usable
        try:
            with interrupted_by(self._ensure_open):
                content = owned.file.read(PAGE_SIZE, page_start(page))
        except NotAtHand:
            return False  # it is closed
        except OSError as error:
            _log.warning("%s: page %d cannot be read: %s", owned.path, page, error.strerror)
            content = b""
        found = hash_page(content, page)
        with owned.lock:
            if not owned.closed and owned.epoch == epoch and page < owned.end.sums.page:
                self.hashed(page, found)
        return True

    def count_page(self, *, fresh: bool = False) -> bool:
        """Count the entries of the next page that lacks it (`fresh`: of those that this process
        finished); False if there is none."""
        owned, found = self._owned, None
        with owned.lock:
            if not (owned.closed or owned.replaced):
                found = owned.summaries.next_to_count(fresh=fresh)
        if found is None:
            return False
        page, known = found
        if page < owned.pages.floor:
            return True  # not worth a fetch
        with contextlib.suppress(OSError, EvictedEntry):
            if not owned.pages.resident(page_start(page), PAGE_SIZE):
                # A reader has to compare what comes from the disk.
                owned.pages.suspect([page])
            content = owned.file.read(PAGE_SIZE, page_start(page))
            counted = count_page(known, content)
            with owned.lock:
                if counted is not None and not owned.closed:
                    owned.summaries.counted(page, known, counted, content)
        return True

    def _ensure_open(self) -> None:
        """The end does not wait for an archive."""
        if self._thread.closing:
            raise NotAtHand

    def finish(self) -> None:
        """Count the pages that this process finished, before it closes the stream; for a moment."""
        until = time.monotonic() + _CLOSE_SECONDS
        while self.count_page(fresh=True) and time.monotonic() < until:
            pass

    def hashed(self, page: int, found: PageHash | None) -> None:
        """A page that was to be hashed has this hash; None: it is damaged. Requires the lock."""
        self._fresh.put(page, _NO_HASH if found is None else found.digest)
        if page == self._record_at:
            self._record_at += 1
            if self._sums.complete(page, found):
                self._made += 1
                self._damaged += found is None
                self._owned.summaries.look_at(page)

    def _next(self, pages: int, known: KnownChain | None) -> tuple[int | None, bool]:
        """The next page to hash so that the records of the first `pages` pages are made and proven;
        None if there is none, and whether there is more to do. The commit record has `known`.
        Requires the lock."""
        if self._epoch != self._owned.epoch:
            self._begin(self._owned.epoch)
        if self._begun != self._sums.begun:
            self._begun, self._record_at = self._sums.begun, 0
        while self._record_at < pages and self._sums.usable:
            stop = min(self._record_at + _FEW, pages)
            missing = self._sums.first_missing(self._record_at, stop)
            self._record_at = stop if missing is None else missing
            if missing is not None:
                return missing, True
        if not self._sums.usable:
            return None, False
        if known is not None and self._sums.proven.known_from(known.stop) > known.first:
            return self._next_unlinked(known)
        page, more = self._next_before(pages if known is None else known.first)
        if page is None and not more:
            self._sums.write_chains(pages)
            more = self._sums.rechain_at is not None
        return page, more

    def _next_unlinked(self, known: KnownChain) -> tuple[int | None, bool]:
        """The next page to hash to find out whether the pages lead to the chain."""
        if self._refuted is not None:
            return None, False
        if self._hash_at is None:
            if self._sums.links(known):
                return None, True
            self._hash_at = known.first
        for page in range(max(self._hash_at, known.first), known.stop):
            if self._fresh.get(page) is None and self._sums.proven.get(page) is None:
                self._hash_at = page
                return page, True
        if not self._sums.is_led_to(known, self._fresh):
            self._refuted = known
            return None, False
        # The records of other hashes are made again.
        self._record_at = known.first
        return None, True

    def _next_before(self, first: int) -> tuple[int | None, bool]:
        """The next page to hash so that the chain can begin before page `first`."""
        start = self._sums.proven.known_from(first)
        for page in range(start - 1, max(start - 1 - _FEW, self._barrier), -1):
            fresh = self._fresh.get(page)
            if fresh is None:
                return page, True
            if fresh == _NO_HASH or not self._sums.accepts(page, fresh):
                self._barrier = page
                return None, True
            self._record_at = min(self._record_at, page)
        return None, start - 1 > self._barrier
