"""Keeps an index in step with its file, and answers from both.

The scan of the file is the truth and the index is derived from it. A look-up asks what
is newer than the index first, then the index. What is newer is, for a writer, kept in
memory until a thread of the keeper has written it; for a reader beside a writer, or
while the index still catches up, it is scanned from the file, newest page first.

Owns the backend and its thread. Knows nothing of locks, headers or commits.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator
from itertools import islice

from xxhash import xxh3_128_digest

from datastreamer._codec import EntryBatch
from datastreamer.errors import DamagedEntry, IndexFailed, NotFound, StreamFileError
from datastreamer.format import HEADER_PAGE_SIZE, PAGE_SIZE, page_of, page_start
from datastreamer.storage.bookmarks._pairs import Pairs, newest_in
from datastreamer.storage.bookmarks.base import (
    BookmarkIndex,
    IndexDamaged,
    IndexReadOnly,
    Watermark,
    opener,
)
from datastreamer.storage.disk import File
from datastreamer.storage.reader import Cursor, Reader
from datastreamer.storage.record import Head

_log = logging.getLogger(__name__)

# The index is written when so many bookmarks wait, or so long after the first of them:
# derived data is worth neither a transaction a commit nor an unbounded memory.
_FLUSH_KEYS = 20_000
_FLUSH_SECONDS = 2.0
_DIGEST_SIZE = 64 * 1024
_CATCH_UP_BYTES = 64 * PAGE_SIZE
# From so many bytes on an empty index is filled in one go, not step by step.
_FILL_BYTES = _CATCH_UP_BYTES
# Beside a writer at work the index is written with pauses: each commit lets go of the GIL
# and has to get it back, and from a thread that always wants it that takes up to 5 ms.
_PAUSE = 0.0002
# So many keys are taken out of memory under the lock that a commit needs too.
_AT_ONCE = 500
_TRIES = 100


class _MovedError(Exception):
    """The index changed while it was asked."""


class _InterruptedError(Exception):
    """Somebody else needs the index now: what is being written to it can wait."""


class BookmarkKeeper:
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
    ) -> None:
        self._backend = backend
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
        # A reader's: up to which change of the stream the fields here are right.
        self._changes = reader.changes
        self._guard = threading.Lock()
        self._work = threading.Condition(self._guard)
        # Bookmarks of the entries from `_known_from` on, in memory.
        self._recent: dict[bytes, int] = {}
        self._known_from = Cursor(*reader.head)
        self._known_to = self._known_from
        # The writer's: the same, in the order of the file, all of them.
        self._waiting = Pairs()
        self._seen_at = self._known_to
        self._synced = reader.head
        self._closing = False
        self._failing = False
        # A reader's: whether the index is one of its own, in memory; where it is not, whether
        # it was opened when nobody wrote; the head at the last look at where it stands.
        self._private = False
        self._alone = False
        self._looked_at = reader.head
        self._questions = 0
        self._index: BookmarkIndex | None = None
        self._indexed = Head()
        self._open()
        # The one at work; before it, a reader's that has yet to see that its index is gone.
        self._thread: threading.Thread | None = None
        self._threads: list[threading.Thread] = []
        if write:
            self._start("bookmarks of", self._run)

    def _open(self) -> None:
        self._alone = not (self._write or self._file.locked_elsewhere())
        try:
            self._index = opener(self._backend)(self._path, self._write)
        except IndexReadOnly as error:
            _log.debug("%s; bookmarks are looked up in the stream itself", error)
            return
        try:
            self._indexed = self._trusted(self._index)
        except IndexFailed as error:
            _log.warning("%s: the bookmark index cannot be read: %s", self._path, error)
            if not self._write:
                self._drop_index()
                return
            try:
                self._index.clear()
            except IndexFailed:
                self._drop_index()
                raise

    def _start(self, what: str, work: Callable[[], None]) -> None:
        self._thread = threading.Thread(target=work, name=f"{what} {self._path}", daemon=True)
        self._threads = [*(it for it in self._threads if it.is_alive()), self._thread]
        self._thread.start()

    # Whether the index belongs to the file.

    def _identity(self, length: int) -> bytes:
        return fingerprint(self._file, self._stream_id, self._epoch(), length)

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
            index.clear()
        return Head()

    # Questions.

    def newest(self, key: bytes) -> int | None:
        """The highest committed entry number that is a bookmark with this key."""
        for _ in range(_TRIES):
            changes = self._reader.changes
            if self._unfinished:
                self._begin_again()
            try:
                return self._newest(key)
            except _MovedError:
                continue
            except DamagedEntry:
                if changes == self._reader.changes:
                    raise
                # The stream was cut back while its end was read.
            except IndexFailed as error:
                self._mend(lambda: True, str(error))
        return bookmarks_of(self._reader.batches(0)).get(key)

    def _newest(self, key: bytes) -> int | None:
        with self._guard:
            self._follow()
            found = self._recent.get(key)
            index, indexed, known_from = self._index, self._indexed, self._known_from
        if found is not None:
            return found
        if indexed.entries < known_from.number:
            found = self._scan_gap(key, indexed, known_from)
            if found is not None:
                return found
        if index is None or not indexed.entries:
            return None
        found = index.newest(key)
        if self._index is not index or self._indexed.entries < indexed.entries:
            raise _MovedError  # it was emptied or cut back while it was asked
        return found

    def unread(self) -> int:
        """How many bytes of the stream the next look-up may have to read."""
        if self._unfinished or (self._changes != self._reader.changes and not self._write):
            return self._reader.head.length  # it begins again
        gap = self._known_from.offset - self._indexed.length
        behind = self._reader.head.length - self._known_to.offset
        return max(0, gap) + max(0, behind)

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
            except (_MovedError, DamagedEntry):
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

    def lag(self) -> int:
        """How many entries at the end of the stream the index does not cover yet."""
        return self._reader.head.entries - self._indexed.entries

    def __len__(self) -> int:
        """The number of distinct keys. Reads what the index does not hold."""
        # To the end of the count nothing goes from memory into the index.
        with self._urgently():
            with self._guard:
                with contextlib.suppress(_MovedError):
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
                    raise _MovedError
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

    def _take_in(self) -> None:
        """Read the bookmarks of what was committed and has not been told. Holds the guard.

        A writer is told of his own commits; but a signal may have come between a commit and
        the telling, or another thread may ask before it.
        """
        while self._known_to.number < self._reader.head.entries:
            batch, cursor = self._reader.run(self._known_to)
            if not batch:
                raise _MovedError
            found = batch.bookmarks()
            self._recent.update(found)
            if self._write:
                self._waiting.extend(found)
            self._known_to = cursor

    def _follow_index(self) -> None:
        mark = None if self._index is None else self._index.watermark()
        if mark is not None and self._indexed.entries < mark.entries <= self._known_to.number:
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
            self._index, self._private = opener("memory")(self._path, True), True
            self._start("private bookmarks of", self._work_once)

    def _drop_index(self) -> None:
        if self._index is not None:
            self._index.close()
        self._index, self._indexed, self._private = None, Head(), False

    def _rewind(self) -> None:
        """Start again from what is on disk where the stream was changed since the last time.
        Holds the guard."""
        changes = self._reader.changes
        if changes == self._changes:
            return
        self._recent.clear()
        self._known_from = self._known_to = Cursor(*self._reader.head)
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
            if not self._unfinished and start == self._known_to.number:
                self._recent.update(bookmarks)
                self._waiting.extend(bookmarks)
                self._known_to = Cursor(*head)
            self._synced = synced
            # Only where the thread may write some of it: else it would be woken for nothing.
            if (
                len(self._waiting) >= _FLUSH_KEYS
                and self._waiting.first_number() < synced.entries
                and not self._failing
            ):
                self._work.notify()

    def passed(self, start: int, head: Head, synced: Head) -> None:
        """As `committed`, for an operation without bookmarks."""
        if start == self._known_to.number and not self._unfinished:
            # As Cursor(*head) makes it, in half the time.
            self._known_to = tuple.__new__(Cursor, head)
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
                if head.entries < self._known_to.number:
                    self._known_to = Cursor(*head)
                self._unfinished = False
                if not self._indexed.entries:
                    self._work.notify()

    def _begin_again(self) -> None:
        """After a truncation that an exception ended: wait for one that is under way, and
        trust nothing else."""
        with self._urgently():
            self._settle()

    def _settle(self) -> None:
        """Believe the index as at an open, and the file. Holds `_writing`."""
        if not self._unfinished:
            return
        self._taken_back += 1
        with self._guard:
            index, self._indexed, self._said = self._index, Head(), None
            self._waiting = Pairs()
            self._recent.clear()
            self._known_from = self._known_to = Cursor(*self._reader.head)
            self._synced = min(self._synced, self._reader.head)
        if index is not None:
            try:
                self._indexed = self._trusted(index)
            except IndexFailed:
                self._forget_index()
        self._unfinished = False

    def changed(self) -> None:
        """Entries that are no bookmarks were changed: the index is as right as before."""
        with self._urgently():
            self._settle()
            if self._said is not None:
                self._said = -1  # whatever was said meanwhile
            self._say_again()

    def _say_again(self) -> None:
        """Have the index say how the file is now, where that was changed. Holds `_writing`."""
        if self._index is None or self._said in (None, self._epoch()):
            return
        try:
            self._index.add((), self._mark(self._indexed))
            self._said = self._epoch()
        except IndexFailed as error:
            _log.warning("%s: the bookmark index will be built again: %s", self._path, error)

    # The thread.

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

    def _catch_up(self) -> None:
        """Index what the file holds, memory does not and the index does not."""
        while not self._closing:
            try:
                if not (self._fill() or self._catch_up_some()):
                    return
            except _MovedError:
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
            if taken_back != self._taken_back or index is not self._index:
                return True
            try:
                index.fill(parts(), watermark, self._pause_or_end)
            except BaseException:
                with contextlib.suppress(IndexFailed):
                    index.clear()
                raise
            self._has_indexed(index, Head(*target))
        return True

    def _gather(self, cursor: Cursor, target: Cursor) -> tuple[Pairs, Cursor]:
        """The bookmarks of the next stretch of the file up to `target`, and where it ends."""
        found, start = Pairs(), cursor.offset
        while cursor.number < target.number and cursor.offset - start < _CATCH_UP_BYTES:
            self._pause_or_end()
            batch, cursor = self._reader.run(cursor)
            if not batch:
                raise _MovedError  # cut back, which this reader has yet to be told
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

    def _flush(self) -> None:
        """Write what waits and is on disk into the index, in one transaction."""
        with self._writing:
            self._settle()
            with self._guard:
                index, upto = self._index, self._synced
                try:
                    self._take_in()
                except _MovedError:
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
                self._known_from = Cursor(*upto)
            # What the index holds need not be in memory as well.
            items = iter(ready)
            while some := list(islice(items, _AT_ONCE)):
                with self._guard:
                    for key, number in some:
                        if self._recent.get(key) == number:
                            del self._recent[key]

    def _mark(self, upto: Head) -> Watermark:
        return Watermark(upto.length, upto.entries, self._identity(upto.length))

    def _has_indexed(self, index: BookmarkIndex, upto: Head) -> None:
        with self._guard:
            if self._index is index:
                self._indexed, self._said = upto, self._epoch()

    def wait(self) -> None:
        """Return when the index covers all that was on disk when this was called."""
        self._catch_up()
        if self._write:
            self._flush()

    def rebuild(self) -> None:
        """Forget the index and build it again from the file."""
        with self._urgently():
            self._forget_index()
        self._catch_up()

    def _forget_index(self) -> None:
        """Empty the index; it begins again from the file's start. Holds `_writing`."""
        self._taken_back += 1
        with self._guard:
            index, self._indexed, self._said = self._index, Head(), None
            self._waiting = Pairs()
            self._recent.clear()
            self._known_from = self._known_to = Cursor(*self._reader.head)
        if index is not None:
            try:
                index.clear()
            except IndexFailed as error:
                _log.error("%s: there is no bookmark index any more: %s", self._path, error)
                with self._guard:
                    self._drop_index()

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
        self._threads = []


def fingerprint(file: File, stream_id: bytes, epoch: int, length: int) -> bytes:
    """Tells the file up to `length` from others: which file it is, after which changes of
    what was committed, and its bytes before there."""
    device, inode = file.identity()
    start = max(HEADER_PAGE_SIZE, length - _DIGEST_SIZE)
    tail = file.read(length - start, start)
    which = stream_id + epoch.to_bytes(8, "big")
    return which + xxh3_128_digest(b"%d %d " % (device, inode) + tail)


def _later(one: int | None, other: int | None) -> int | None:
    """The higher number, where there is one."""
    return max((it for it in (one, other) if it is not None), default=None)


def bookmarks_of(batches: Iterator[EntryBatch]) -> dict[bytes, int]:
    """The truth: each key's highest number in a scan."""
    found: dict[bytes, int] = {}
    for batch in batches:
        found.update(batch.bookmarks())
    return found
