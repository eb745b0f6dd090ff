"""Looks up bookmarks in a stream and its index.

A look-up searches the entries that the index does not cover yet, then the index. A writer keeps
their bookmarks in memory until a thread has written them to the index; a reader, and a writer whose
index is catching up, scans the file for them, newest page first.

Owns the look-ups, the notices of a writer's commits and truncations, and a reader's detection of
them. Knows nothing of headers or commits.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator

from datastreamer._codec import EntryBatch
from datastreamer.errors import DamagedEntry, IndexFailed, StreamClosed
from datastreamer.format import HEADER_PAGE_SIZE, PAGE_SIZE, page_of, page_start
from datastreamer.storage.bookmarks._at_hand import LookUpsAtHand, NotAtHandError
from datastreamer.storage.bookmarks._pairs import Pairs, newest_in
from datastreamer.storage.bookmarks.builder import IndexBuilder
from datastreamer.storage.bookmarks.interface import IndexWentBack
from datastreamer.storage.bookmarks.recent import FLUSH_KEYS, MovedError
from datastreamer.storage.bookmarks.trust import TrustedIndex
from datastreamer.storage.header.records import Head
from datastreamer.storage.objects.waits import NotAtHand, at_hand_only
from datastreamer.storage.pages.hashes import last_page
from datastreamer.storage.read.evicted import PagedFile
from datastreamer.storage.read.spans import Cursor

_log = logging.getLogger(__package__)

# Scans of more than this many bytes of the file run one at a time, so that they do not slow down
# the thread that extends the index.
_LONG_SCAN = 4 * PAGE_SIZE
_TRIES = 100


class BookmarkKeeper:
    """Bookmarks of one stream. `newest` is exact at any time, however far the index lags."""

    def __init__(self, trusted: TrustedIndex) -> None:
        self.trusted = trusted
        self.builder = IndexBuilder(trusted)
        self._reader = reader = trusted.reader
        self.recent = trusted.recent
        # For a reader: the reader's change count that the fields reflect, the head at the last
        # check of the index's files, and the number of look-ups without an index.
        self._changes = reader.turn
        self._checked_at = reader.head
        self._questions = 0
        # The reader's state at the last `_follow` of `at_hand`.
        self._followed: object = None
        self._scanning = threading.Lock()
        if trusted.write:
            self.builder.start()

    def wait(self) -> None:
        """Return when the index covers everything that was on disk at the call."""
        self.builder.wait()

    def rebuild(self) -> None:
        """Empty the index and build it again from the file. It lacks bookmarks that cannot be read:
        see `damage`."""
        self.builder.rebuild()

    @property
    def damage(self) -> DamagedEntry | None:
        """The first damage that keeps bookmarks from being in the index; None if none was met."""
        return self.builder.damage

    def close(self) -> None:
        """Stop the thread, write the waiting bookmarks, close the index."""
        self.builder.close()

    def abandon(self) -> None:
        """Forget the index and the threads without touching them: for the child of a fork."""
        self.builder.abandon()

    # Look-ups.

    def at_hand(self, most: int) -> LookUpsAtHand:
        """For look-ups that follow each other at once. Raises `NotAtHandError` if the index has to
        be repaired, or more than `most` bytes of the stream to be read."""
        trusted, recent, state = self.trusted, self.recent, self._reader.state
        try:
            if state is not self._followed or recent.unfinished or trusted.index is None:
                if self.unread() > most:
                    raise NotAtHandError
                with trusted.guard:
                    self._follow()
                self._followed = state
            with trusted.guard:
                memory, indexed, start = recent.newest, trusted.indexed, recent.start
            if indexed.entries >= start.number:
                return LookUpsAtHand(trusted, self.builder, memory, indexed, state)
        except (MovedError, DamagedEntry, IndexFailed):
            pass
        raise NotAtHandError

    def newest(self, key: bytes) -> int | None:
        """The highest committed entry number that is a bookmark with this key."""
        for _ in range(_TRIES):
            changes = self._reader.turn
            if self.recent.unfinished:
                self._settle()
            try:
                found = self._look_up(key)
                if found is None:
                    self._ensure_complete()
                return found
            except MovedError:
                continue
            except DamagedEntry:
                if changes == self._reader.turn:
                    raise
                # The stream was truncated while its end was read.
            except IndexWentBack as error:
                self._went_back(key, str(error))
            except IndexFailed as error:
                self._repair(lambda: True, str(error))
        return bookmarks_of(self._reader.batches(0)).get(key)

    def _ensure_complete(self) -> None:
        """Raises `DamagedEntry` if bookmarks that cannot be read are not in the index, and
        `MovedError` if they can be read again."""
        builder = self.builder
        damage, lacking = builder.damage, builder.lacking
        if damage is None or lacking is None:
            return
        if lacking.number < self._reader.head.entries:
            self._reader.run(lacking)
            with self.trusted.urgently():
                self.trusted.reset()
                builder.damage = builder.lacking = None
            with self.trusted.guard:
                self.trusted.changed.notify()
            raise MovedError
        builder.damage = builder.lacking = None

    def _look_up(self, key: bytes) -> int | None:
        trusted, recent = self.trusted, self.recent
        with trusted.guard:
            self._follow()
            found = recent.newest.get(key)
            index, indexed, start = trusted.index, trusted.indexed, recent.start
        if found is not None:
            return found
        if indexed.entries < start.number:
            long, local = start.offset - indexed.length > _LONG_SCAN, self._first_local()
            with self._scanning if long else contextlib.nullcontext():
                # While this waited, the index may have grown.
                index, indexed = trusted.index, max(indexed, trusted.indexed)
                found = self._scan_gap(key, max(indexed, local), start)
            if found is None and indexed < local:
                # Without the lock: this may wait for the archive.
                found = self._scan_gap(key, indexed, min(Cursor(*local), start))
            if found is not None:
                return found
        if index is None or not indexed.entries:
            return None
        found = index.newest(key)
        if trusted.index is not index or trusted.indexed.entries < indexed.entries:
            raise MovedError  # the index was emptied or truncated during the look-up
        return found

    def _first_local(self) -> Head:
        """The first entry that is in the file, as the end of those before it."""
        file = self.trusted.file
        if page := file.floor() if isinstance(file, PagedFile) else 0:
            with contextlib.suppress(DamagedEntry):
                return Head(page_start(page), self._reader.first_number(page))
        return Head()

    def _scan_gap(self, key: bytes, indexed: Head, until: Cursor) -> int | None:
        """The newest `key` in the pages between the index and memory, newest page first."""
        page = page_of(max(until.offset - 1, HEADER_PAGE_SIZE))
        for at in range(page, page_of(indexed.length) - 1, -1):
            start, found = page_start(at), None
            if start >= until.offset:
                continue
            if start < indexed.length:
                cursor = Cursor(*indexed)
            else:
                try:
                    cursor = Cursor(start, self._reader.first_number(at))
                except DamagedEntry:
                    if not self.trusted.skips_damage:
                        raise
                    continue
            while cursor.number < until.number and cursor.offset < page_start(at + 1):
                batch, cursor = self.builder.read(cursor)
                if batch is None:
                    continue
                if not batch:
                    raise MovedError
                if cursor.number > until.number:
                    batch = batch[: until.number - batch.first_number]
                here = newest_in(batch, key)
                found = found if here is None else here
            if found is not None:
                return found
        return None

    def unread(self) -> int:
        """How many bytes of the stream the next look-up may have to read."""
        trusted, head = self.trusted, self._reader.head
        if self.recent.unfinished or (self._changes != self._reader.turn and not trusted.write):
            return head.length  # it starts again from the whole file
        gap = self.recent.start.offset - trusted.indexed.length
        unreported = head.length - self.recent.end.length
        return max(0, gap) + max(0, unreported)

    def lag(self) -> int:
        """How many entries at the end of the stream the index does not cover yet."""
        return self._reader.head.entries - self.trusted.indexed.entries

    def index_lag(self) -> tuple[int, int]:
        """How many entries and bytes the index lacks, also if another process writes it; a look-up
        finds these in memory or in the file. Raises `IndexFailed`."""
        trusted, head = self.trusted, self._reader.head
        index, covered = trusted.index, trusted.indexed
        mark = None if index is None or trusted.write else index.watermark()
        if mark is not None:
            covered = Head(mark.length, mark.entries)
        return max(0, head.entries - covered.entries), max(0, head.length - covered.length)

    @property
    def on_disk(self) -> bool:
        """Whether look-ups use an index on disk."""
        index = self.trusted.index
        return index is not None and index.on_disk

    def __len__(self) -> int:
        """The number of distinct keys. Reads what the index does not hold."""
        trusted = self.trusted
        if self.builder.closing:
            raise StreamClosed(f"{trusted.path}: the stream is closed")
        # `urgently` keeps bookmarks from moving to the index during the count.
        with trusted.urgently():
            with trusted.guard:
                with contextlib.suppress(MovedError):
                    self._follow()
                keys, indexed = set(self.recent.newest), trusted.indexed
                until, index = self.recent.start, trusted.index
            for batch in self._reader.batches(indexed.entries, until.number):
                keys.update(key for key, _ in batch.bookmarks())
            if index is None:
                return len(keys)
            return len(index) + sum(index.newest(key) is None for key in keys)

    # Repair.

    def distrust(self, key: bytes, number: int) -> bool:
        """Report that entry `number`, which `newest` returned, is not the bookmark `key`.

        If a look-up returns it again, the index is wrong: a writer rebuilds it in the background,
        a reader drops it; True then.
        """
        return self._repair(
            lambda: self._look_up(key) == number,
            f"it wrongly lists entry {number} for the bookmark 0x{key.hex()}",
        )

    def _repair(self, wrong: Callable[[], bool], why: str) -> bool:
        trusted = self.trusted
        with trusted.urgently():
            try:
                with at_hand_only():
                    if not wrong():
                        return False
            except (MovedError, DamagedEntry, NotAtHand):
                return False
            except IndexFailed as error:
                why = str(error)
            _log.warning("%s: the bookmark index is wrong and is rebuilt: %s", trusted.path, why)
            if trusted.write:
                trusted.reset()
        with trusted.guard:
            if trusted.write:
                trusted.changed.notify()
            else:
                trusted.drop()
        return True

    def _went_back(self, key: bytes, why: str) -> None:
        """The index covers less than before. For a writer that is damage; for a reader, the writer
        may be truncating the stream."""
        trusted = self.trusted
        if trusted.write:

            def wrong() -> bool:
                self._look_up(key)
                return False

            self._repair(wrong, why)
            return
        with trusted.guard:
            mark = None if trusted.index is None else trusted.index.watermark()
            if mark is None:
                trusted.drop()
            elif mark.entries < trusted.indexed.entries:
                trusted.indexed = Head(mark.length, mark.entries)

    def _settle(self) -> None:
        """Wait for a truncation in progress; recover from one that an exception ended."""
        with self.trusted.urgently():
            self.trusted.settle()

    # For a reader.

    def _follow(self) -> None:
        """Read what has been committed, and what a writer in another process has indexed.
        Requires `guard`."""
        trusted = self.trusted
        if trusted.write:
            self.recent.read_from(self._reader)
            return
        self._rewind()
        self.recent.read_from(self._reader)
        if trusted.index is None:
            self._begin_private()
        elif not trusted.private:
            if self._checked_at != self._reader.head:
                self._checked_at = self._reader.head
                # An index that was opened while no process wrote has no lock.
                if trusted.unlocked or not trusted.index.in_place():
                    trusted.drop()
                    trusted.open()
            self._follow_index()

    def _follow_index(self) -> None:
        trusted, recent = self.trusted, self.recent
        if trusted.indexed.entries == recent.end.entries:
            return  # a newer watermark cannot be trusted yet, and an older one shows at a look-up
        mark = None if trusted.index is None else trusted.index.watermark()
        if mark is not None and trusted.indexed.entries < mark.entries <= recent.end.entries:
            if not trusted.indexed.entries and mark.identity != trusted.identity(mark.length):
                if not trusted.file.locked_elsewhere():
                    trusted.drop()
                return
            trusted.indexed = Head(mark.length, mark.entries)
            if mark.entries > recent.start.number and len(recent.newest) > FLUSH_KEYS:
                recent.drop_before(trusted.indexed)

    def _begin_private(self) -> None:
        """Without an index to read, build one in memory from the second look-up on."""
        self._questions += 1
        if self._questions > 1 and self.recent.start.number:
            self.trusted.index, self.trusted.private = self.trusted.opened("memory"), True
            self.builder.start(once=True)

    def _rewind(self) -> None:
        """Start again from what is on disk if the stream was truncated or updated since the last
        look-up. Requires `guard`."""
        changes, trusted = self._reader.turn, self.trusted
        if changes == self._changes:
            return
        self.recent.begin_at(self._reader.head)
        if trusted.private:
            trusted.drop()
        elif trusted.index is not None:
            try:
                trusted.indexed = trusted.trusted(trusted.index)
            except IndexFailed:
                trusted.drop()
        self._changes = changes

    # For a writer.

    def committed(
        self, bookmarks: list[tuple[bytes, int]] | None, start: int, head: Head, synced: Head
    ) -> None:
        """An operation was committed: from entry `start` to `head`, with these bookmarks (None:
        too many for memory; the index and look-ups read them from the file).

        `synced` is on disk. Without this call, look-ups read the file instead.
        """
        if self.recent.committed(bookmarks, start, head, synced):
            self.wake()

    def wake(self) -> None:
        """Wake the thread: it has something to write or read."""
        if not self.builder.failing:
            with self.trusted.guard:
                self.trusted.changed.notify()

    def synced(self, head: Head) -> None:
        """Everything up to `head` is on disk and may be written to the index."""
        with self.trusted.guard:
            self.recent.synced = head

    @contextlib.contextmanager
    def emptied(self) -> Iterator[None]:
        """Around a fall of the floor: of the pages below it, the index may lack bookmarks of a key
        that is in their archive's lists with a newer one. It is built again."""
        with self.trusted.urgently():
            self.trusted.settle()
            self.trusted.reset()
            yield
        self.wake()

    @contextlib.contextmanager
    def truncation(self, head: Head) -> Iterator[None]:
        """Around a truncation of the stream to `head`: truncates the index first, durably."""
        trusted, file = self.trusted, self.trusted.file
        with trusted.urgently():
            trusted.settle()
            self.recent.unfinished = True
            trusted.truncations += 1
            index = trusted.index
            if isinstance(file, PagedFile) and last_page(head.length) < file.floor():
                trusted.reset()  # as in `emptied`
            elif index is not None and head.entries < trusted.indexed.entries:
                removed = Pairs()
                try:
                    for batch in self._reader.batches(head.entries, trusted.indexed.entries):
                        removed.take(batch)
                    index.remove(removed, trusted.mark(head))
                    trusted.indexed = head
                except (IndexFailed, DamagedEntry) as error:
                    # If the reset fails too, the truncation makes the watermark invalid.
                    _log.warning(
                        "%s: the bookmark index cannot be truncated and is rebuilt: %s",
                        trusted.path,
                        error,
                    )
                    trusted.reset()
            yield
            trusted.renew_mark()
            with trusted.guard:
                self.recent.truncate(head)
                self.recent.synced = min(self.recent.synced, head)
                self.recent.unfinished = False
                if not trusted.indexed.entries:
                    trusted.changed.notify()

    def changed(self) -> None:
        """Entries other than bookmarks were updated, or the floor was raised: the index remains
        valid."""
        with self.trusted.urgently():
            self.trusted.settle()
            self.trusted.renew_mark(always=True)

    def restored(self, bookmarks: list[tuple[bytes, int]]) -> None:
        """Entries that could not be read were restored, these bookmarks among them: a writer's
        index that was built without them is built again in the background."""
        trusted = self.trusted
        with trusted.urgently():
            trusted.settle()
            if not self._lacks(bookmarks):
                return
            trusted.reset()
            self.builder.damage = self.builder.lacking = None
        with trusted.guard:
            trusted.changed.notify()

    def _lacks(self, bookmarks: list[tuple[bytes, int]]) -> bool:
        index, indexed = self.trusted.index, self.trusted.indexed.entries
        if index is None:
            return False
        try:
            for key, number in bookmarks:
                newest = index.newest(key) if number < indexed else number
                if newest is None or newest < number:
                    return True
        except IndexFailed:
            return True
        return False


def bookmarks_of(batches: Iterator[EntryBatch]) -> dict[bytes, int]:
    """Each key's highest number, by a scan."""
    found: dict[bytes, int] = {}
    for batch in batches:
        found.update(batch.bookmarks())
    return found
