"""Keeps an index in step with its file, and answers from both.

A look-up asks what is newer than the index first, then the index. What is newer is, for a
writer, kept in memory until a thread has written it; for a reader beside a writer, or while
the index still catches up, it is scanned from the file, newest page first.

Owns the answers, what a writer tells of its commits and truncations, and what a reader finds
out of them by itself. Knows nothing of locks, headers or commits.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator

from datastreamer._codec import EntryBatch
from datastreamer.errors import DamagedEntry, IndexFailed, StreamClosed
from datastreamer.format import HEADER_PAGE_SIZE, PAGE_SIZE, page_of, page_start
from datastreamer.storage.bookmarks._pairs import Pairs, newest_in
from datastreamer.storage.bookmarks.builder import IndexBuilder
from datastreamer.storage.bookmarks.interface import IndexWentBack
from datastreamer.storage.bookmarks.trust import MovedError
from datastreamer.storage.disk.file_ops import File
from datastreamer.storage.disk.identity import OpenPath
from datastreamer.storage.header.records import Head
from datastreamer.storage.read.reader import Reader
from datastreamer.storage.read.spans import Cursor

_log = logging.getLogger(__package__)

# The index is written when this many bookmarks wait.
_FLUSH_KEYS = 20_000
# Scans of more than this many bytes of the file take turns: they must not keep the thread that
# makes them needless from its work.
_LONG_SCAN = 4 * PAGE_SIZE
_TRIES = 100


class NotAtHandError(Exception):
    """The answer takes longer than a look into memory and the index."""


class BookmarkKeeper(IndexBuilder):
    """Bookmarks of one stream. `newest` is exact at any moment, however far the index is."""

    def __init__(
        self,
        backend: str,
        path: str,
        file: File,
        reader: Reader,
        *,
        write: bool,
        stream_id: bytes,
        epoch: Callable[[], int],
        opened_by: OpenPath | None = None,
    ) -> None:
        super().__init__(
            *(backend, path, file, reader),
            write=write,
            stream_id=stream_id,
            epoch=epoch,
            opened_by=opened_by,
        )
        self._scanning = threading.Lock()
        if write:
            self._start("bookmarks of", self._run)

    # Questions.

    def newest(self, key: bytes) -> int | None:
        """The highest committed entry number that is a bookmark with this key."""
        for _ in range(_TRIES):
            changes = self._reader.changes
            if self._unfinished:
                self._begin_again()
            try:
                return self._newest(key)
            except MovedError:
                continue
            except DamagedEntry:
                if changes == self._reader.changes:
                    raise
                # The stream was cut back while its end was read.
            except IndexWentBack as error:
                self._went_back(key, str(error))
            except IndexFailed as error:
                self._mend(lambda: True, str(error))
        return bookmarks_of(self._reader.batches(0)).get(key)

    def newest_at_hand(self, key: bytes) -> int | None:
        """As `newest`, where nothing has to be mended or begun again first. Raises
        `NotAtHandError` otherwise."""
        if not self._unfinished:
            with contextlib.suppress(MovedError, DamagedEntry, IndexFailed):
                return self._newest(key)
        raise NotAtHandError

    def _went_back(self, key: bytes, why: str) -> None:
        """The index covers less than it did. A writer's never does that by itself; a reader's
        writer may just be cutting the stream back."""
        if self._write:

            def wrong() -> bool:
                self._newest(key)
                return False

            self._mend(wrong, why)
            return
        with self._guard:
            mark = None if self._index is None else self._index.watermark()
            if mark is None:
                self._drop_index()
            elif mark.entries < self._indexed.entries:
                self._indexed = Head(mark.length, mark.entries)

    def _newest(self, key: bytes) -> int | None:
        with self._guard:
            self._follow()
            found = self._recent.get(key)
            index, indexed, known_from = self._index, self._indexed, self._known_from
        if found is not None:
            return found
        if indexed.entries < known_from.number:
            long = known_from.offset - indexed.length > _LONG_SCAN
            with self._scanning if long else contextlib.nullcontext():
                # Less may be left to scan by now.
                index, indexed = self._index, max(indexed, self._indexed)
                found = self._scan_gap(key, indexed, known_from)
            if found is not None:
                return found
        if index is None or not indexed.entries:
            return None
        found = index.newest(key)
        if self._index is not index or self._indexed.entries < indexed.entries:
            raise MovedError  # it was emptied or cut back while it was asked
        return found

    def unread(self) -> int:
        """How many bytes of the stream the next look-up may have to read."""
        if self._unfinished or (self._changes != self._reader.changes and not self._write):
            return self._reader.head.length  # it begins again
        gap = self._known_from.offset - self._indexed.length
        behind = self._reader.head.length - self._known_to.length
        return max(0, gap) + max(0, behind)

    def behind(self) -> tuple[int, int]:
        """How many entries, and bytes of the stream, the index is behind the head; what is
        newer is looked for in memory or in the file. Raises `IndexFailed`."""
        head, index = self._reader.head, self._index
        mark = None if index is None or self._write else index.watermark()
        entries, length = (
            (self._indexed.entries, self._indexed.length)
            if mark is None
            else (mark.entries, mark.length)
        )
        return max(0, head.entries - entries), max(0, head.length - length)

    @property
    def on_disk(self) -> bool:
        """Whether look-ups are answered by an index that outlives the process."""
        index = self._index
        return index is not None and index.on_disk

    def distrust(self, key: bytes, number: int) -> bool:
        """Entry `number` is no bookmark `key`, as `newest` said: if it still says so, the
        index is wrong, and is built again in the background (a reader does without)."""
        return self._mend(
            lambda: self._newest(key) == number,
            f"it says that entry {number} is the bookmark 0x{key.hex()}",
        )

    def _mend(self, wrong: Callable[[], bool], why: str) -> bool:
        with self._urgently():
            try:
                if not wrong():
                    return False
            except (MovedError, DamagedEntry):
                return False
            except IndexFailed as error:
                why = str(error)
            _log.warning("%s: the bookmark index is wrong, it is built again: %s", self._path, why)
            if self._write:
                self._forget_index()
        with self._guard:
            if self._write:
                self._work.notify()
            else:
                self._drop_index()
        return True

    def __len__(self) -> int:
        """The number of distinct keys. Reads what the index does not hold."""
        if self._closing:
            raise StreamClosed(f"{self._path}: the stream is closed")
        # To the end of the count nothing goes from memory into the index.
        with self._urgently():
            with self._guard:
                with contextlib.suppress(MovedError):
                    self._follow()
                recent, indexed, until = set(self._recent), self._indexed, self._known_from
                index = self._index
            for batch in self._reader.batches(indexed.entries, until.number):
                recent.update(key for key, _ in batch.bookmarks())
            if index is None:
                return len(recent)
            return len(index) + sum(index.newest(key) is None for key in recent)

    def _scan_gap(self, key: bytes, indexed: Head, until: Cursor) -> int | None:
        """The newest `key` between the index and what memory holds, page by page backwards."""
        page = page_of(max(until.offset - 1, HEADER_PAGE_SIZE))
        for at in range(page, page_of(indexed.length) - 1, -1):
            start, found = page_start(at), None
            if start >= until.offset:
                continue
            if start < indexed.length:
                cursor = Cursor(*indexed)
            else:
                cursor = Cursor(start, self._reader.first_number(at))
            while cursor.number < until.number and cursor.offset < page_start(at + 1):
                batch, cursor = self._reader.run(cursor)
                if not batch:
                    raise MovedError
                if cursor.number > until.number:
                    batch = batch[: until.number - batch.first_number]
                found = _later(newest_in(batch, key), found)
            if found is not None:
                return found
        return None

    # A reader's side.

    def _follow(self) -> None:
        """Take in what has been committed, and what a writer elsewhere has indexed.

        Holds the guard.
        """
        if self._write:
            self._take_in()
            return
        self._rewind()
        self._take_in()
        if self._index is None:
            self._begin_private()
        elif not self._private:
            if self._looked_at != self._reader.head:
                self._looked_at = self._reader.head
                # Opened when nobody wrote, an index has no lock.
                if self._alone or not self._index.in_place():
                    self._drop_index()
                    self._open()
            self._follow_index()

    def _follow_index(self) -> None:
        mark = None if self._index is None else self._index.watermark()
        if mark is not None and self._indexed.entries < mark.entries <= self._known_to.entries:
            if not self._indexed.entries and mark.identity != self._identity(mark.length):
                if not self._file.locked_elsewhere():
                    self._drop_index()
                return
            self._indexed = Head(mark.length, mark.entries)
            # What the index holds need not be in memory as well.
            if mark.entries > self._known_from.number and len(self._recent) > _FLUSH_KEYS:
                self._recent = {k: n for k, n in self._recent.items() if n >= mark.entries}
                self._known_from = Cursor(*self._indexed)

    def _begin_private(self) -> None:
        """No index to read: keep one in memory from the second question on."""
        self._questions += 1
        if self._questions > 1 and self._known_from.number:
            self._index, self._private = self._opened("memory"), True
            self._start("private bookmarks of", self._work_once)

    def _rewind(self) -> None:
        """Start again from what is on disk where the stream was changed since the last time.
        Holds the guard."""
        changes = self._reader.changes
        if changes == self._changes:
            return
        self._recent.clear()
        self._known_to = self._reader.head
        self._known_from = Cursor(*self._known_to)
        if self._private:
            self._drop_index()
        elif self._index is not None:
            try:
                self._indexed = self._trusted(self._index)
            except IndexFailed:
                self._drop_index()
        self._changes = changes

    # The writer's side.

    def committed(
        self, bookmarks: list[tuple[bytes, int]], start: int, head: Head, synced: Head
    ) -> None:
        """Bookmarks of an operation that was just committed: from entry `start` to `head`.

        `synced` is on disk. Should this not be called, the file is read in its place.
        """
        with self._guard:
            # Else somebody has asked meanwhile, and they were read from the file.
            if not self._unfinished and start == self._known_to.entries:
                self._recent.update(bookmarks)
                self._waiting.extend(bookmarks)
                self._known_to = head
            self._synced = synced
            self._limit_memory()
            # Only where the thread may write some of it: else it would be woken for nothing.
            if (
                len(self._waiting) >= _FLUSH_KEYS
                and self._waiting.first_number() < synced.entries
                and not self._failing
            ):
                self._work.notify()

    def committed_unread(self, start: int, head: Head, synced: Head) -> None:
        """As `committed`, for an operation with more bookmarks than were kept in memory: the
        index reads them from the file, and look-ups do until it has."""
        with self._guard:
            if not self._unfinished and start == self._known_to.entries:
                self._known_to = head
                self._forget_memory()
            self._synced = synced
            if not self._failing:
                self._work.notify()

    def passed(self, start: int, head: Head, synced: Head) -> None:
        """As `committed`, for an operation without bookmarks."""
        if start == self._known_to.entries and not self._unfinished:
            self._known_to = head
        self._synced = synced

    def synced(self, head: Head) -> None:
        """Everything up to `head` is on disk and may be indexed."""
        with self._guard:
            self._synced = head

    @contextlib.contextmanager
    def truncation(self, head: Head) -> Iterator[None]:
        """Around the stream's going back to `head`: the index goes first, durably."""
        with self._urgently():
            self._settle()
            self._unfinished = True
            self._taken_back += 1
            index = self._index
            if index is not None and head.entries < self._indexed.entries:
                gone = Pairs()
                for batch in self._reader.batches(head.entries, self._indexed.entries):
                    gone.take(batch)
                try:
                    index.remove(gone, self._mark(head))
                    self._indexed = head
                except IndexFailed as error:
                    # Should it not even be emptied: after the truncation, its watermark is
                    # not this file's.
                    _log.warning(
                        "%s: the bookmark index cannot go back, it is built again: %s",
                        self._path,
                        error,
                    )
                    self._forget_index()
            yield
            self._say_again()
            with self._guard:
                self._waiting.drop_from(head.entries)
                self._recent = dict(self._waiting)
                self._synced = min(self._synced, head)
                if head.entries < self._known_from.number:
                    self._known_from = Cursor(*head)
                if head.entries < self._known_to.entries:
                    self._known_to = head
                self._unfinished = False
                if not self._indexed.entries:
                    self._work.notify()

    def _begin_again(self) -> None:
        """After a truncation that an exception ended: wait for one that is under way, and
        trust nothing else."""
        with self._urgently():
            self._settle()

    def changed(self) -> None:
        """Entries that are no bookmarks were changed: the index is as right as before."""
        with self._urgently():
            self._settle()
            if self._said is not None:
                self._said = -1  # whatever was said meanwhile
            self._say_again()


def _later(one: int | None, other: int | None) -> int | None:
    """The higher number, where there is one."""
    return max((it for it in (one, other) if it is not None), default=None)


def bookmarks_of(batches: Iterator[EntryBatch]) -> dict[bytes, int]:
    """The truth: each key's highest number in a scan."""
    found: dict[bytes, int] = {}
    for batch in batches:
        found.update(batch.bookmarks())
    return found
