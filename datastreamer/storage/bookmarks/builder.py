"""Brings an index up to its file, in a thread, without being in anybody's way.

What memory does not hold is read from the file, all at once where the index is empty and step
by step where it is not; what waits in memory is written when it is on disk in the file.
Whoever needs the index sooner interrupts what can be done again. Answers no questions;
`keeper.py` does.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator
from itertools import islice

from datastreamer.errors import IndexFailed, NotFound, StreamFileError
from datastreamer.format import PAGE_SIZE
from datastreamer.storage.bookmarks._pairs import Pairs
from datastreamer.storage.bookmarks.interface import (
    BookmarkIndex,
    IndexDamaged,
    IndexElsewhere,
    Watermark,
)
from datastreamer.storage.bookmarks.trust import MovedError, TrustedIndex
from datastreamer.storage.header.records import Head
from datastreamer.storage.read.spans import Cursor

_log = logging.getLogger(__package__)

# The index is written so long after the first bookmark that waits: derived data is not worth a
# transaction a commit.
_FLUSH_SECONDS = 2.0
_CATCH_UP_BYTES = 64 * PAGE_SIZE
# So many bookmarks at a time: a transaction keeps in memory what it changes.
_CATCH_UP_KEYS = 250_000
# From so many bytes on an empty index is filled in one go, not step by step.
_FILL_BYTES = 4 * PAGE_SIZE
# Beside a writer at work the index is written with pauses: each commit lets go of the GIL
# and has to get it back, and from a thread that always wants it that takes up to 5 ms.
_PAUSE = 0.0002
# So many keys are taken out of memory under the lock that a commit needs too.
_AT_ONCE = 500


class _InterruptedError(Exception):
    """Somebody else needs the index now: what is being written to it can wait."""


class IndexBuilder(TrustedIndex):
    """An index that a thread keeps up with its file."""

    _closing = False
    _failing = False
    # The one at work; before it, a reader's that has yet to see that its index is gone.
    _thread: threading.Thread | None = None
    _threads: tuple[threading.Thread, ...] = ()
    # How far the stream was at the last pause.
    _seen_at: Head | None = None

    def lag(self) -> int:
        """How many entries at the end of the stream the index does not cover yet."""
        return self._reader.head.entries - self._indexed.entries

    def wait(self) -> None:
        """Return when the index covers all that was on disk when this was called."""
        self._catch_up()
        if self._write:
            self._flush()
            self._keep_up()

    def _keep_up(self) -> None:
        def pace() -> None:
            self._ensure_in_place()
            self._pause_or_end()

        # An index that is not this stream's stays as it is.
        with contextlib.suppress(_InterruptedError, IndexElsewhere), self._writing:
            self._settle()
            if self._index is not None:
                self._ensure_in_place()
                self._index.upkeep(pace)

    def rebuild(self) -> None:
        """Forget the index and build it again from the file."""
        with self._urgently():
            self._forget_index()
        self._catch_up()

    # The thread.

    def _start(self, what: str, work: Callable[[], None]) -> None:
        self._thread = threading.Thread(target=work, name=f"{what} {self._path}", daemon=True)
        self._threads = (*(it for it in self._threads if it.is_alive()), self._thread)
        self._thread.start()

    def _run(self) -> None:
        self._work_once()
        while self._wait():
            self._work_once()

    def _wait(self) -> bool:
        with self._guard:
            if not self._closing:
                self._work.wait(_FLUSH_SECONDS)
            return not self._closing

    def _work_once(self) -> None:
        try:
            self.wait()
        except (StreamFileError, NotFound, OSError) as error:
            if not self._failing and not self._closing:
                # To a reader it happens that the stream is cut back under the thread.
                _log.log(
                    logging.ERROR if self._write else logging.DEBUG,
                    "%s: bookmarks are not indexed, look-ups read the stream: %s",
                    self._path,
                    error,
                )
            self._failing = True
            if isinstance(error, IndexDamaged):
                with self._urgently():
                    self._forget_index()
        else:
            self._failing = False

    def _pause(self) -> None:
        """Let a writer at work have the GIL."""
        if self._known_to is not self._seen_at:
            self._seen_at = self._known_to
            time.sleep(_PAUSE)

    def _pause_or_end(self) -> None:
        """The same, for what is as good done later."""
        if self._closing or self._urgent:
            raise _InterruptedError
        self._pause()

    # From the file.

    def _catch_up(self) -> None:
        """Index what the file holds, memory does not and the index does not."""
        if not self._closing:
            self._begin_anew()
        while not self._closing:
            try:
                if not (self._fill() or self._catch_up_some()):
                    return
            except MovedError:
                return
            except _InterruptedError:
                with self._guard:
                    self._work.wait_for(lambda: self._closing or not self._urgent)

    def _to_catch_up(self) -> tuple[BookmarkIndex | None, Head, Cursor]:
        """The index, how far it goes, and how far it should go at least."""
        with self._guard:
            target = self._known_from
            if self._write:
                target = min(target, Cursor(*self._synced), key=lambda it: it.number)
            return self._index, self._indexed, target

    def _fill(self) -> bool:
        """Index a large file from its start to where memory goes on; False where that is not
        what is to be done."""
        index, start, target = self._to_catch_up()
        if index is None or start.entries or target.offset < _FILL_BYTES:
            return False
        taken_back = self._taken_back

        def parts() -> Iterator[Pairs]:
            cursor = Cursor(*start)
            while cursor.number < target.number:
                part, cursor = self._gather(cursor, target)
                yield part

        def watermark() -> Watermark:
            return self._mark(Head(*target))

        with self._writing:
            if taken_back != self._taken_back or index is not self._index or self._indexed.entries:
                return True
            try:
                index.fill(parts(), watermark, self._pause_or_end)
            except BaseException:
                with contextlib.suppress(IndexFailed):
                    self._clear(index)
                raise
            self._has_indexed(index, Head(*target))
        return True

    def _gather(self, cursor: Cursor, target: Cursor) -> tuple[Pairs, Cursor]:
        """The bookmarks of the next stretch of the file up to `target`, and where it ends."""
        found, start = Pairs(), cursor.offset
        while (
            cursor.number < target.number
            and cursor.offset - start < _CATCH_UP_BYTES
            and len(found) < _CATCH_UP_KEYS
        ):
            self._pause_or_end()
            batch, cursor = self._reader.run(cursor)
            if not batch:
                raise MovedError  # cut back, which this reader has yet to be told
            if cursor.number > target.number:
                batch = batch[: target.number - batch.first_number]
                cursor = target
            found.take(batch)
        return found, cursor

    def _catch_up_some(self) -> bool:
        """One transaction of it; False where nothing was left to do."""
        with self._writing:
            self._settle()
            index, start, target = self._to_catch_up()
            if index is None or start.entries >= target.number:
                return False
            found, cursor = self._gather(Cursor(*start), target)
            index.add(found, self._mark(Head(*cursor)), self._pause_or_end)
            self._has_indexed(index, Head(*cursor))
            return True

    # From memory.

    def _flush(self) -> None:
        """Write what waits and is on disk into the index, in one transaction."""
        with self._writing:
            self._settle()
            with self._guard:
                index, upto = self._index, self._synced
                try:
                    self._take_in()
                except MovedError:
                    return
                if index is None or not (
                    self._known_from.number <= self._indexed.entries < upto.entries
                ):
                    return
                ready = self._waiting.before(upto.entries)
            index.add(ready, self._mark(upto), self._pause)
            self._has_indexed(index, upto)
            with self._guard:
                self._waiting.drop_before(upto.entries)
                if self._known_from.number < upto.entries:  # else it was forgotten meanwhile
                    self._known_from = Cursor(*upto)
            # What the index holds need not be in memory as well.
            items = iter(ready)
            while some := list(islice(items, _AT_ONCE)):
                with self._guard:
                    for key, number in some:
                        if self._recent.get(key) == number:
                            del self._recent[key]

    def _has_indexed(self, index: BookmarkIndex, upto: Head) -> None:
        with self._guard:
            if self._index is index:
                self._indexed, self._said = upto, self._epoch()

    # The end.

    def close(self) -> None:
        """Write what waits, stop the thread, give up the backend."""
        with self._guard:
            self._closing = True
            self._work.notify_all()
        for thread in self._threads:
            thread.join()
        self._thread = None
        if self._write:
            try:
                self._flush()
            except StreamFileError as error:
                _log.warning("%s: the bookmark index lags behind: %s", self._path, error)
        if self._index is not None:
            self._index.close()

    def abandon(self) -> None:
        """Forget everything without touching it: for the child of a fork."""
        self._index = None
        self._thread = None
        self._threads = ()
