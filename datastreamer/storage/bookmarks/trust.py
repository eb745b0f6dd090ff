"""How far an index can be believed, and what stands in memory beyond it.

The scan of the file is the truth and the index is derived from it: it says which file it was
made from, up to where, and after which changes. Where that does not fit, all of it is
doubted. Owns the backend, the locks around it, and the way back from anything half done.
Neither asks nor fills it; `keeper.py` and `builder.py` do.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator

from xxhash import xxh3_128_digest

from datastreamer.errors import IndexFailed
from datastreamer.format import HEADER_PAGE_SIZE, PAGE_SIZE
from datastreamer.storage.bookmarks._pairs import Pairs
from datastreamer.storage.bookmarks.interface import (
    BookmarkIndex,
    IndexElsewhere,
    IndexReadOnly,
    IndexUntrusted,
    Watermark,
)
from datastreamer.storage.bookmarks.registry import index_opener
from datastreamer.storage.disk.file_ops import File
from datastreamer.storage.disk.identity import OpenPath
from datastreamer.storage.header.records import Head
from datastreamer.storage.read.reader import Reader
from datastreamer.storage.read.spans import Cursor

# One name for all that is said about bookmarks.
_log = logging.getLogger(__package__)

_DIGEST_SIZE = 64 * 1024
# At most this many bookmarks are kept in memory; the file has all of them.
_MOST_KEYS = 200_000
# Of entries that nobody reported, at most this many bytes are read for one look-up and kept.
_MOST_UNTOLD_BYTES = 16 * PAGE_SIZE


class MovedError(Exception):
    """The index, or the stream, changed while it was asked."""


class TrustedIndex:
    """The index of one stream, and the bookmarks that are newer than it."""

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
        self._backend = backend
        self._opened_by = opened_by
        self._path = path
        self._file = file
        self._reader = reader
        self._write = write
        self._stream_id = stream_id
        self._epoch = epoch
        # The epoch that a writer's index says; None where nothing is in it.
        self._said: int | None = None
        # Two locks: `_writing` around what changes the index, `_guard` around the fields
        # here; where both are held, `_writing` was taken first.
        self._writing = threading.Lock()
        # Who waits for `_writing` and must not wait long; how often what stood in the file or
        # the index was taken back.
        self._urgent: set[object] = set()
        self._taken_back = 0
        # True between the begin and the end of a truncation, also after one that an exception
        # ended: what stands here is doubtful then.
        self._unfinished = False
        self._guard = threading.Lock()
        self._work = threading.Condition(self._guard)
        # Bookmarks of the entries from `_known_from` on, in memory.
        self._recent: dict[bytes, int] = {}
        self._known_from = Cursor(*reader.head)
        self._known_to = reader.head
        # The writer's: the same, in the order of the file, all of them.
        self._waiting = Pairs()
        self._synced = reader.head
        # A reader's: up to which change of the stream the fields here are right; whether the
        # index is one of its own, in memory; where it is not, whether it was opened when nobody
        # wrote; the head at the last look at where it stands.
        self._changes = reader.changes
        self._private = False
        self._alone = False
        self._looked_at = reader.head
        self._questions = 0
        self._index: BookmarkIndex | None = None
        self._indexed = Head()
        self._open()

    def _open(self) -> None:
        self._alone = not (self._write or self._file.locked_elsewhere())
        try:
            self._index = self._opened(self._backend, write=self._write)
        except IndexReadOnly as error:
            foreign = isinstance(error.__cause__, IndexUntrusted)
            level = logging.WARNING if foreign else logging.DEBUG
            _log.log(level, "%s; bookmarks are looked up in the stream itself", error)
            return
        try:
            self._indexed = self._trusted(self._index)
        except IndexFailed as error:
            _log.warning("%s: the bookmark index cannot be read: %s", self._path, error)
            if not self._write:
                self._drop_index()
                return
            try:
                self._clear(self._index)
            except IndexFailed:
                self._drop_index()
                raise

    def _opened(self, backend: str, *, write: bool = True) -> BookmarkIndex:
        return index_opener(backend)(self._path, write, self._file.access())

    # Whether the index belongs to the file.

    def _identity(self, length: int) -> bytes:
        return fingerprint(self._file, self._stream_id, self._epoch(), length)

    def _clear(self, index: BookmarkIndex) -> None:
        """Begin anew with an empty index. Raises `IndexFailed`."""
        self._ensure_in_place()
        index.clear()

    def _ensure_in_place(self) -> None:
        """Raises `IndexElsewhere` where the index at the stream's path is another file's by now."""
        why = "" if self._opened_by is None else self._opened_by.difference()
        if why:
            what = f"{why}; the bookmark index there is not this stream's"
            raise IndexElsewhere(self._path, what)

    def _mark(self, upto: Head) -> Watermark:
        return Watermark(upto.length, upto.entries, self._identity(upto.length))

    def _trusted(self, index: BookmarkIndex) -> Head:
        """How far the index can be believed: all of it or nothing."""
        mark, head = index.watermark(), self._reader.head
        if (
            mark is not None
            and mark.entries <= head.entries
            and mark.length <= head.length
            and mark.identity == self._identity(mark.length)
        ):
            self._said = self._epoch()
            return Head(mark.length, mark.entries)
        if not self._write:
            # Somebody who writes is about to fill it, or to say that it is right.
            if not self._file.locked_elsewhere():
                self._drop_index()
        elif mark is not None or index:
            _log.info("%s: the bookmark index is not this file's; it is built again", self._path)
            self._clear(index)
        return Head()

    def _say_again(self) -> None:
        """Have the index say how the file is now, where that was changed. Holds `_writing`."""
        if self._index is None or self._said in (None, self._epoch()):
            return
        try:
            self._index.add((), self._mark(self._indexed))
            self._said = self._epoch()
        except IndexFailed as error:
            _log.warning("%s: the bookmark index will be built again: %s", self._path, error)

    # What memory holds.

    def _take_in(self) -> None:
        """Read the bookmarks of what was committed and has not been told. Holds the guard.

        A writer is told of his own commits; but a signal may have come between a commit and
        the telling, or another thread may ask before it.
        """
        head = self._reader.head
        if head.length - self._known_to.length > _MOST_UNTOLD_BYTES:
            self._known_to = head
            self._forget_memory()
            return
        while self._known_to.entries < self._reader.head.entries:
            batch, cursor = self._reader.run(Cursor(*self._known_to))
            if not batch:
                raise MovedError
            found = batch.bookmarks()
            self._recent.update(found)
            if self._write:
                self._waiting.extend(found)
            self._known_to = Head(*cursor)
        self._limit_memory()

    def _limit_memory(self) -> None:
        """Forget the bookmarks in memory where they are too many. Holds the guard."""
        if len(self._recent) >= _MOST_KEYS or len(self._waiting) >= _MOST_KEYS:
            self._forget_memory()

    def _forget_memory(self) -> None:
        """Have the file tell it again. Holds the guard."""
        self._waiting = Pairs()
        self._recent.clear()
        self._known_from = Cursor(*self._known_to)

    # The way back.

    def _settle(self) -> None:
        """Believe the index as at an open, and the file. Holds `_writing`."""
        if not self._unfinished:
            return
        self._taken_back += 1
        with self._guard:
            index, self._indexed, self._said = self._index, Head(), None
            self._waiting = Pairs()
            self._recent.clear()
            self._known_to = self._reader.head
            self._known_from = Cursor(*self._known_to)
            self._synced = min(self._synced, self._reader.head)
        if index is not None:
            try:
                self._indexed = self._trusted(index)
            except IndexFailed:
                self._forget_index()
        self._unfinished = False

    def _forget_index(self) -> None:
        """Empty the index; it begins again from the file's start. Holds `_writing`."""
        self._taken_back += 1
        with self._guard:
            index, self._indexed, self._said = self._index, Head(), None
            self._waiting = Pairs()
            self._recent.clear()
            self._known_to = self._reader.head
            self._known_from = Cursor(*self._known_to)
        if index is not None:
            try:
                self._clear(index)
            except IndexFailed as error:
                _log.error(
                    "%s: there is no bookmark index until it can be made again: %s",
                    self._path,
                    error,
                )
                with self._guard:
                    self._drop_index()

    def _begin_anew(self) -> None:
        """Make the index again where a writer has lost it, for want of room perhaps. Raises
        `IndexFailed`."""
        if self._index is not None or not self._write:
            return
        with self._writing:
            self._settle()
            if self._index is not None:
                return
            self._ensure_in_place()
            index = self._opened(self._backend)
            try:
                # What stands there may be what was given up.
                index.clear()
            except IndexFailed:
                index.close()
                raise
            with self._guard:
                self._index = index

    def _drop_index(self) -> None:
        if self._index is not None:
            self._index.close()
        self._index, self._indexed, self._private = None, Head(), False

    # Who has to wait.

    @contextlib.contextmanager
    def _urgently(self) -> Iterator[None]:
        """`_writing`, without waiting for the end of what can be done again."""
        # A signal's exception may come between any two lines, and leaves no lock behind.
        who = object()
        try:
            self._urgent.add(who)
            with self._writing:
                self._has_its_turn(who)
                yield
        finally:
            self._has_its_turn(who)

    def _has_its_turn(self, who: object) -> None:
        if who in self._urgent:
            with self._guard:
                self._urgent.discard(who)
                self._work.notify_all()


def fingerprint(file: File, stream_id: bytes, epoch: int, length: int) -> bytes:
    """Tells the file up to `length` from others: which file it is, after which changes of
    what was committed, and its bytes before there."""
    device, inode = file.identity()
    start = max(HEADER_PAGE_SIZE, length - _DIGEST_SIZE)
    tail = file.read(length - start, start)
    which = stream_id + epoch.to_bytes(8, "big")
    return which + xxh3_128_digest(b"%d %d " % (device, inode) + tail)
