"""How much of a stream's index can be trusted.

The index is derived from the file. It records which file it was made from, up to where, and after
which changes; if that does not match, none of it is trusted. Owns the backend, its locks, and the
recovery from changes that did not finish. `keeper.py` reads the index, `builder.py` writes it.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator, Sequence

from xxhash import xxh3_128_digest

from datastreamer.errors import EvictedEntry, IndexFailed
from datastreamer.format import HEADER_PAGE_SIZE
from datastreamer.storage.bookmarks.interface import (
    BookmarkIndex,
    IndexElsewhere,
    IndexReadOnly,
    IndexUntrusted,
    Watermark,
)
from datastreamer.storage.bookmarks.recent import RecentBookmarks
from datastreamer.storage.bookmarks.registry import index_opener
from datastreamer.storage.disk.file_ops import File
from datastreamer.storage.disk.identity import OpenPath
from datastreamer.storage.header.records import MARKED_BYTES, Change, Head, floor_in
from datastreamer.storage.objects.waits import NotAtHand, at_hand_only
from datastreamer.storage.read.reader import Reader

# One logger for all messages about bookmarks.
_log = logging.getLogger(__package__)

_DIGEST_SIZE = 64 * 1024


class TrustedIndex:
    """The index of one stream, and the bookmarks in memory that are newer than it.

    `index` is None while there is none; it covers the entries before `indexed`. Two locks:
    `writing` is held around changes of the index, `guard` around changes of the fields. If both
    are held, `writing` was acquired first.
    """

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
        changes_since: Callable[[int], Sequence[Change] | None] = lambda epoch: None,
        opened_by: OpenPath | None = None,
    ) -> None:
        self.path = path
        self.file = file
        self.reader = reader
        self.write = write
        self._backend = backend
        self._opened_by = opened_by
        self._stream_id = stream_id
        self._epoch = epoch
        # As `StreamFile.recorded_changes`.
        self._changes_since = changes_since
        # The epoch in a writer's index; None if the index is empty.
        self._recorded_epoch: int | None = None
        self.writing = threading.Lock()
        self.guard = threading.Lock()
        self.changed = threading.Condition(self.guard)
        # Callers that wait for `writing` and must not wait long.
        self._urgent: set[object] = set()
        # The number of truncations of the file or the index.
        self.truncations = 0
        self.recent = RecentBookmarks(reader.head, self.guard, for_writer=write)
        # For a reader: whether the index is its own, in memory; if not, whether it was opened while
        # no process wrote the stream.
        self.private = False
        self.unlocked = False
        self.index: BookmarkIndex | None = None
        self.indexed = Head()
        self.open()

    def open(self) -> None:
        self.unlocked = not (self.write or self.file.locked_elsewhere())
        try:
            self.index = self.opened(self._backend, write=self.write)
        except IndexReadOnly as error:
            foreign = isinstance(error.__cause__, IndexUntrusted)
            level = logging.WARNING if foreign else logging.DEBUG
            _log.log(level, "%s; bookmarks are looked up in the stream itself", error)
            return
        try:
            self.indexed = self.trusted(self.index)
            if self.write:
                self.renew_mark()
        except IndexFailed as error:
            _log.warning("%s: the bookmark index cannot be read: %s", self.path, error)
            if not self.write:
                self.drop()
                return
            try:
                self.clear(self.index)
            except IndexFailed:
                self.drop()
                raise

    def opened(self, backend: str, *, write: bool = True) -> BookmarkIndex:
        return index_opener(backend)(self.path, write, self.file.access())

    @property
    def skips_damage(self) -> bool:
        """Whether to continue after entries that cannot be read. Beside a writer they may have been
        truncated, and this reader has not seen that yet."""
        return self.write or not self.file.locked_elsewhere()

    # Whether the index belongs to the file.

    def identity(self, length: int) -> bytes:
        return fingerprint(self.file, self._stream_id, self._epoch(), length)

    def clear(self, index: BookmarkIndex) -> None:
        """Empty the index. Raises `IndexFailed`."""
        self.ensure_in_place()
        index.clear()

    def ensure_in_place(self) -> None:
        """Raise `IndexElsewhere` if the index at the stream's path belongs to another file now."""
        why = "" if self._opened_by is None else self._opened_by.difference()
        if why:
            what = f"{why}; the bookmark index there belongs to another stream"
            raise IndexElsewhere(self.path, what)

    def mark(self, upto: Head) -> Watermark:
        return Watermark(upto.length, upto.entries, self.identity(upto.length))

    def trusted(self, index: BookmarkIndex) -> Head:
        """The head that the index covers, or zero if it does not belong to this file."""
        mark, head = index.watermark(), self.reader.head
        if (
            mark is not None
            and mark.entries <= head.entries
            and mark.length <= head.length
            and self._is_of(mark)
        ):
            return Head(mark.length, mark.entries)
        if not self.write:
            # A writer, if there is one, is about to fill it or to write its watermark.
            if not self.file.locked_elsewhere():
                self.drop()
        elif mark is not None or index:
            _log.info("%s: the bookmark index belongs to another file; it is rebuilt", self.path)
            self.clear(index)
        return Head()

    def _is_of(self, mark: Watermark) -> bool:
        """Whether it is about this file; entries after it may have been truncated since."""
        epoch = int.from_bytes(mark.identity[16:24], "big")
        changes = () if epoch == self._epoch() else self._changes_since(epoch)
        if changes is None or any(
            stop is not None or start < mark.entries for _, start, stop in changes
        ):
            return False
        if mark.identity != fingerprint(self.file, self._stream_id, epoch, mark.length):
            return False
        self._recorded_epoch = epoch
        return True

    def record(self, index: BookmarkIndex, upto: Head) -> None:
        """The index covers the entries before `upto`."""
        with self.guard:
            if self.index is index:
                self.indexed, self._recorded_epoch = upto, self._epoch()

    def renew_mark(self, *, always: bool = False) -> None:
        """Write a new watermark if the epoch has changed, or `always` if the index has one.
        Requires `writing`."""
        recorded = self._recorded_epoch
        if self.index is None or recorded is None or (recorded == self._epoch() and not always):
            return
        try:
            with at_hand_only():
                mark = self.mark(self.indexed)
            self.index.add((), mark)
            self._recorded_epoch = self._epoch()
        except (IndexFailed, EvictedEntry, NotAtHand) as error:
            if always:
                self._recorded_epoch = -1
            _log.warning("%s: the bookmark index will be rebuilt: %s", self.path, error)

    # Recovery.

    def settle(self) -> None:
        """After a truncation that did not finish: read the file, and check the index as at an open.
        Requires `writing`."""
        if not self.recent.unfinished:
            return
        index = self._restart()
        with self.guard:
            self.recent.synced = min(self.recent.synced, self.reader.head)
        if index is not None:
            try:
                self.indexed = self.trusted(index)
            except IndexFailed:
                self.reset()
        self.recent.unfinished = False

    def _restart(self) -> BookmarkIndex | None:
        self.truncations += 1
        with self.guard:
            self.indexed, self._recorded_epoch = Head(), None
            self.recent.begin_at(self.reader.head)
            return self.index

    def reset(self) -> None:
        """Empty the index and build it again from the file's start. Requires `writing`."""
        index = self._restart()
        if index is not None:
            try:
                self.clear(index)
            except IndexFailed as error:
                _log.error(
                    "%s: the bookmark index cannot be emptied, look-ups read the stream: %s",
                    self.path,
                    error,
                )
                with self.guard:
                    self.drop()

    def recreate(self) -> None:
        """Create the index again if a writer had to drop it. Raises `IndexFailed`."""
        if self.index is not None or not self.write:
            return
        with self.writing:
            self.settle()
            if self.index is not None:
                return
            self.ensure_in_place()
            index = self.opened(self._backend)
            try:
                # It may be the index that was dropped.
                index.clear()
            except IndexFailed:
                index.close()
                raise
            with self.guard:
                self.index = index

    def drop(self) -> None:
        """Continue without an index."""
        if self.index is not None:
            self.index.close()
        self.index, self.indexed, self.private = None, Head(), False

    # Urgent changes.

    @property
    def urgent(self) -> bool:
        """Whether a caller of `urgently` waits."""
        return bool(self._urgent)

    @contextlib.contextmanager
    def urgently(self) -> Iterator[None]:
        """Hold `writing`, without waiting for work that can be repeated."""
        # A signal's exception between any two lines must leave no lock held.
        caller = object()
        try:
            self._urgent.add(caller)
            with self.writing:
                self._stop_waiting(caller)
                yield
        finally:
            self._stop_waiting(caller)

    def _stop_waiting(self, caller: object) -> None:
        if caller in self._urgent:
            with self.guard:
                self._urgent.discard(caller)
                self.changed.notify_all()


def fingerprint(file: File, stream_id: bytes, epoch: int, length: int) -> bytes:
    """Distinguishes the file up to `length` from others, by stream id, epoch, device, inode, the
    last fall of its floor and the last bytes before that offset."""
    device, inode = file.identity()
    floor = floor_in(file.read(MARKED_BYTES, 0))
    fall = b"" if floor is None or not floor.fall else b"%d " % floor.fall
    start = max(HEADER_PAGE_SIZE, length - _DIGEST_SIZE)
    tail = file.read(length - start, start)
    which = stream_id + epoch.to_bytes(8, "big")
    return which + xxh3_128_digest(b"%d %d " % (device, inode) + fall + tail)
