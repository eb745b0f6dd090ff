"""Keeps an index up to date with its file, in a background thread.

Reads from the file what memory does not hold: all at once if the index is empty, otherwise step by
step. Writes bookmarks that are in memory after the file has them durably. A caller that needs the
index sooner interrupts work that can be repeated. `keeper.py` does the look-ups.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Iterator

from datastreamer._codec import EntryBatch
from datastreamer.errors import DamagedEntry, IndexFailed, NotFound, StreamFileError
from datastreamer.format import PAGE_SIZE, page_start
from datastreamer.storage.bookmarks._pairs import Pairs
from datastreamer.storage.bookmarks.interface import (
    BookmarkIndex,
    IndexDamaged,
    IndexElsewhere,
    Pace,
    at_once,
)
from datastreamer.storage.bookmarks.recent import MovedError, in_parts
from datastreamer.storage.bookmarks.trust import TrustedIndex
from datastreamer.storage.header.records import Head
from datastreamer.storage.objects.waits import interrupted_by
from datastreamer.storage.read.evicted import PagedFile
from datastreamer.storage.read.skip_damage import run_or_skip
from datastreamer.storage.read.spans import Cursor

_log = logging.getLogger(__package__)

# Interval between writes to the index: derived data is not worth a transaction per commit.
_FLUSH_SECONDS = 2.0
_CATCH_UP_BYTES = 64 * PAGE_SIZE
# The maximum number of bookmarks per transaction, which keeps its changes in memory.
_CATCH_UP_KEYS = 250_000
# For a file of at least this size, an empty index is filled at once, not step by step.
_FILL_BYTES = 4 * PAGE_SIZE
# While a writer commits, the index is written with pauses: each commit releases the GIL, and takes
# up to 5 ms to acquire it again from a thread that never waits.
_PAUSE = 0.0002
# The number of keys removed from memory at a time, under the lock that a commit needs too.
_AT_ONCE = 500


class _InterruptedError(Exception):
    """Another thread needs the index now: the write to it is repeated later."""


class IndexBuilder:
    """The thread that keeps one index up to date with its file."""

    def __init__(self, trusted: TrustedIndex) -> None:
        self._trusted = trusted
        self.closing = False
        # Whether the last attempt failed.
        self.failing = False
        # The first damage that the index was built around.
        self.damage: DamagedEntry | None = None
        self.lacking: Cursor | None = None
        """Where it was met."""
        # The current thread, and a reader's earlier ones that have not noticed yet that their index
        # was dropped.
        self.thread: threading.Thread | None = None
        self._threads: tuple[threading.Thread, ...] = ()
        # The end of the stream at the last pause.
        self._seen_at: Head | None = None

    def wait(self) -> None:
        self._catch_up()
        if self._trusted.write:
            self._flush()
            self._keep_up()

    def _keep_up(self) -> None:
        trusted = self._trusted

        def pace() -> None:
            trusted.ensure_in_place()
            self._pause_or_end()

        # An index that belongs to another file is not changed.
        with contextlib.suppress(_InterruptedError, IndexElsewhere), trusted.writing:
            trusted.settle()
            if trusted.index is not None:
                trusted.ensure_in_place()
                trusted.index.upkeep(pace)

    def rebuild(self) -> None:
        with self._trusted.urgently():
            self._trusted.reset()
            self.damage = self.lacking = None
        self._catch_up()

    # The thread.

    def start(self, *, once: bool = False) -> None:
        """Start the thread; with `once` it ends when the index covers what is on disk now."""
        what, work = ("private bookmarks of", self.work) if once else ("bookmarks of", self._run)
        name = f"{what} {self._trusted.path}"
        self.thread = threading.Thread(target=work, name=name, daemon=True)
        self._threads = (*(it for it in self._threads if it.is_alive()), self.thread)
        self.thread.start()

    def _run(self) -> None:
        self.work()
        while self._sleep():
            self.work()

    def _sleep(self) -> bool:
        with self._trusted.guard:
            if not self.closing:
                self._trusted.changed.wait(_FLUSH_SECONDS)
            return not self.closing

    def work(self) -> None:
        """As `wait`, but logs errors."""
        trusted = self._trusted
        try:
            self.wait()
        except (StreamFileError, NotFound, OSError) as error:
            if not self.failing and not self.closing:
                # A reader's error may come from a truncation of the stream.
                _log.log(
                    logging.ERROR if trusted.write else logging.DEBUG,
                    "%s: the bookmark index cannot be written, look-ups read the stream: %s",
                    trusted.path,
                    error,
                )
            self.failing = True
            if isinstance(error, IndexDamaged):
                with trusted.urgently():
                    trusted.reset()
        else:
            self.failing = False

    def _pause(self) -> None:
        """Let a writer at work have the GIL."""
        end = self._trusted.recent.end
        if end is not self._seen_at:
            self._seen_at = end
            time.sleep(_PAUSE)

    def _pause_or_end(self) -> None:
        """As `_pause`, for work that can be repeated. Raises `_InterruptedError`."""
        if self.closing or self._trusted.urgent:
            raise _InterruptedError
        self._pause()

    # From the file.

    def _catch_up(self) -> None:
        """Index what neither memory nor the index holds."""
        trusted = self._trusted
        if not self.closing:
            trusted.recreate()
        while not self.closing:
            try:
                with interrupted_by(self._pause_or_end):
                    if not (self._fill() or self._catch_up_some()):
                        return
            except MovedError:
                return
            except _InterruptedError:
                with trusted.guard:
                    trusted.changed.wait_for(lambda: self.closing or not trusted.urgent)

    def _to_catch_up(self) -> tuple[BookmarkIndex | None, Head, Cursor]:
        """The index, the head that it covers, and the position that it should cover at least."""
        trusted = self._trusted
        with trusted.guard:
            target = trusted.recent.start
            if trusted.write:
                target = min(target, Cursor(*trusted.recent.synced), key=lambda it: it.number)
            return trusted.index, trusted.indexed, target

    def _fill(self) -> bool:
        """Index a large file from its start to where memory continues; False if the index is not
        empty or the file is small."""
        trusted = self._trusted
        index, start, target = self._to_catch_up()
        if index is None or start.entries or target.offset < _FILL_BYTES:
            return False
        truncations = trusted.truncations

        def parts() -> Iterator[Pairs]:
            cursor = Cursor(*start)
            while cursor.number < target.number:
                part, cursor = self._gather(cursor, target)
                yield part

        with trusted.writing:
            moved = truncations != trusted.truncations or index is not trusted.index
            if moved or trusted.indexed.entries:
                return True
            try:
                index.fill(parts(), lambda: trusted.mark(Head(*target)), self._pause_or_end)
            except BaseException:
                with contextlib.suppress(IndexFailed):
                    trusted.clear(index)
                raise
            trusted.record(index, Head(*target))
        return True

    def _gather(self, cursor: Cursor, target: Cursor) -> tuple[Pairs, Cursor]:
        """The bookmarks of the next part of the file up to `target`, and the part's end."""
        found, start, file = Pairs(), cursor.offset, self._trusted.file
        while (
            cursor.number < target.number
            and cursor.offset - start < _CATCH_UP_BYTES
            and len(found) < _CATCH_UP_KEYS
        ):
            self._pause_or_end()
            if isinstance(file, PagedFile) and (listed := file.bookmarks_at(*cursor)):
                following = Cursor(page_start(listed.stop), listed.number)
                if following.number <= target.number:
                    found.extend(listed.pairs)
                    cursor = following
                    continue
            batch, cursor = self.read(cursor, self._pause_or_end)
            if batch is None:
                continue
            if not batch:
                raise MovedError  # a truncation that this reader has not seen yet
            if cursor.number > target.number:
                batch = batch[: target.number - batch.first_number]
                cursor = target
            found.take(batch)
        return found, cursor

    def read(self, cursor: Cursor, pace: Pace = at_once) -> tuple[EntryBatch | None, Cursor]:
        """The entries at the cursor; None if they are damaged: those of later pages are indexed
        nevertheless. `pace` is called for each page that is skipped."""
        trusted = self._trusted
        if not trusted.skips_damage:
            return trusted.reader.run(cursor)
        found, following = run_or_skip(trusted.reader, cursor, pace)
        if not isinstance(found, DamagedEntry):
            return found, following
        if self.damage is None:
            self.damage, self.lacking = found, cursor
        _log.error(
            "%s: entries %d to %d cannot be read; bookmarks among them are not in the index",
            *(trusted.path, cursor.number, following.number - 1),
        )
        return None, following

    def _catch_up_some(self) -> bool:
        """Index the next part in one transaction; False if nothing was left to do."""
        trusted = self._trusted
        with trusted.writing:
            trusted.settle()
            index, start, target = self._to_catch_up()
            if index is None or start.entries >= target.number:
                return False
            found, cursor = self._gather(Cursor(*start), target)
            index.add(found, trusted.mark(Head(*cursor)), self._pause_or_end)
            trusted.record(index, Head(*cursor))
            return True

    # From memory.

    def _flush(self) -> None:
        """Write the waiting bookmarks that are on disk to the index, in one transaction."""
        trusted, recent = self._trusted, self._trusted.recent
        with trusted.writing:
            trusted.settle()
            with trusted.guard:
                index, upto = trusted.index, recent.synced
                try:
                    recent.read_from(trusted.reader)
                except MovedError:
                    return
                if index is None or not (
                    recent.start.number <= trusted.indexed.entries < upto.entries
                ):
                    return
                ready = recent.waiting.before(upto.entries)
            index.add(ready, trusted.mark(upto), self._pause)
            trusted.record(index, upto)
            with trusted.guard:
                recent.indexed(upto)
            for part in in_parts(ready, _AT_ONCE):
                with trusted.guard:
                    recent.drop(part)

    # The end.

    def close(self) -> None:
        trusted = self._trusted
        with trusted.guard:
            self.closing = True
            trusted.changed.notify_all()
        for thread in self._threads:
            thread.join()
        self.thread = None
        if trusted.write:
            try:
                self._flush()
            except StreamFileError as error:
                _log.warning("%s: the bookmark index lags: %s", trusted.path, error)
        if trusted.index is not None:
            trusted.index.close()

    def abandon(self) -> None:
        self._trusted.index = None
        self.thread = None
        self._threads = ()
