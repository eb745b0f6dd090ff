"""Completes the checksums of a stream that is open for writing, in the background.

Owns when pages are read for that: a part of the time, so that commits and readers are not
disturbed. `storage/pages/keeper.py` knows which pages lack a record.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import NamedTuple

from datastreamer.errors import WriteFailed
from datastreamer.format import PAGE_SIZE, page_start
from datastreamer.storage.pages.compare import hash_page
from datastreamer.storage.pages.proof import KnownChain
from datastreamer.storage.write.owned_file import OwnedFile
from datastreamer.storage.write.syncer import Syncer

_log = logging.getLogger(__name__)

_TURN_SECONDS = 0.02
_PAUSE_SECONDS = 0.08


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
        owned.sums.on_doubt = lambda: self._thread.request(_PAUSE_SECONDS)

    def start(self) -> None:
        """Begin, if there is anything to do."""
        sums = self._owned.sums
        if sums.usable and sums.incomplete(self._owned.end.sums.page):
            self._thread.request(_PAUSE_SECONDS)

    def stop(self) -> None:
        """Return when it does nothing any more."""
        self._thread.close()

    def _take_turn(self) -> None:
        self._owned.sums.sync()
        until = time.monotonic() + _TURN_SECONDS
        while time.monotonic() < until:
            if not self.complete_page():
                return
        self._thread.request(_PAUSE_SECONDS)

    def complete(self, progress: Callable[[int, int], None]) -> MadeSums:
        """Make all missing records now. Raises `WriteFailed` if they cannot be written."""
        self.stop()
        pages = self._owned.end.sums.page
        while self.complete_page():
            progress(self._owned.sums.looked_at, pages)
        made, damaged = self._owned.sums.made, self._owned.sums.damaged
        if self._owned.sums.incomplete(pages):
            raise WriteFailed(self._owned.path, "the checksums cannot be written; see the log")
        known = KnownChain.of(self._owned.written, self._owned.end.sums.sum())
        refuted = known.refuted() if known is not None and self._owned.sums.refuted else ""
        return MadeSums(pages, made, damaged, refuted)

    def complete_page(self) -> bool:
        """Make the next missing record; False if there is none."""
        owned = self._owned
        with owned.lock:
            if owned.closed:
                return False
            end, epoch = owned.end, owned.epoch
            known = KnownChain.of(end.written, end.sums.sum())
            page = owned.sums.next_to_hash(end.sums.page, known)
            if page is None:
                if owned.sums.walking:
                    return True
                self._rechain()
                return False
        try:
            content = owned.file.read(PAGE_SIZE, page_start(page))
        except OSError as error:
            _log.warning("%s: page %d cannot be read: %s", owned.path, page, error.strerror)
            content = b""
        found = hash_page(content, page)
        with owned.lock:
            if not owned.closed and owned.epoch == epoch and page < owned.end.sums.page:
                owned.sums.hashed(page, found)
        return True

    def _rechain(self) -> None:
        """If a chain over more pages than the commit record's is known, continue that. Requires the
        lock."""
        end = self._owned.end
        if end.base == end.written and self._owned.continue_chain():
            # (The next commit writes it.)
            self._owned.put_header(end.written, end.base_sum)
