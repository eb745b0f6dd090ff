"""A stream as it is read: its properties, its entries, its bookmarks.

Answers look-ups while this process or another one truncates or changes entries. Writes nothing;
`stream.py` does. Safe to use from several threads.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Literal, TypeVar

from datastreamer._codec import Entry, EntryBatch
from datastreamer.errors import (
    BadBookmark,
    BadRange,
    DamagedEntry,
    FileReplaced,
    NotFound,
    StreamClosed,
    UnknownBookmark,
    UnknownEntry,
)
from datastreamer.format import (
    ENTRY_HEAD_SIZE,
    MAX_BOOKMARK_SIZE,
    PAGE_SIZE,
    TYPE_BOOKMARK,
    Header,
)
from datastreamer.printable import counted
from datastreamer.selection.times import TimeMarks
from datastreamer.storage.bookmarks.keeper import BookmarkKeeper
from datastreamer.storage.bookmarks.trust import TrustedIndex
from datastreamer.storage.disk.access import Access
from datastreamer.storage.disk.file_ops import Buffer
from datastreamer.storage.disk.identity import LOOK_SECONDS
from datastreamer.storage.header.records import Change, PublisherRecord
from datastreamer.storage.read.file import StreamFile
from datastreamer.storage.read.reader import Reader, truncated_below
from datastreamer.storage.summaries.times import StreamTimes

IndexName = Literal["lmdb", "memory"] | str
T = TypeVar("T")


class StreamView:
    """The reading half of a stream: a file and its bookmark index."""

    def __init__(self, file: StreamFile, index: IndexName, *, follow: bool = False) -> None:
        self._file = file
        self._follows = follow
        self._index = index
        # The index may be opened later, when the process works in another folder.
        self._place = os.path.abspath(file.path)
        self._keeper: BookmarkKeeper | None = None
        # Held while the keeper is made: a second one would never be closed.
        self._keeping = threading.Lock()
        self._closing = False
        # When a follower next checks its path, by the monotonic clock.
        self._check_at = 0.0
        self._times = StreamTimes(file)

    # What it is.

    @property
    def path(self) -> str:
        return self._file.path

    @property
    def header(self) -> Header:
        """The header as it is committed and visible."""
        return self._file.header

    @property
    def total_entries(self) -> int:
        """The number of committed, visible entries.

        It is the next entry's number, unless operations wait to be on disk that were committed
        with ``wait=False`` under the sync policy "commit".
        """
        return self._file.head.entries

    @property
    def stream_id(self) -> bytes:
        """16 random bytes made with the stream; zeros for a file of another program."""
        return self._file.stream_id

    @property
    def epoch(self) -> int:
        """Raised by every truncation, update and recovery that truncated entries."""
        return self._file.epoch

    @property
    def source(self) -> PublisherRecord:
        """The epoch and id of the last source that was granted a lease to publish; all zeros if
        there was none. Raises `DamagedHeader` if its record is damaged."""
        self._ensure_open()
        return self._file.source()

    @property
    def index_name(self) -> str:
        """The bookmark index's backend."""
        return self._index

    @property
    def changing(self) -> bool:
        """Whether a writer in another process is truncating or changing entries, as of the last
        `refresh`."""
        return self._file.changing

    def changes_since(self, epoch: int) -> Sequence[Change] | None:
        """What a writer in another process truncated or changed since `epoch`, as of the last
        `refresh`; None if that is not known, and may be anything."""
        return self._file.changes_since(epoch)

    @property
    def recorded_epoch(self) -> int | None:
        """The epoch in the file, which other processes see too; None if a program that keeps no
        records writes the file."""
        return self._file.recorded_epoch

    def recorded_changes(self, epoch: int) -> Sequence[Change] | None:
        """What was truncated or changed after `recorded_epoch` was `epoch`, in order; None if that
        is not known, and may be anything."""
        return self._file.recorded_changes(epoch)

    @property
    def access(self) -> Access:
        """Which users may read and write the stream file."""
        self._ensure_open()
        return self._file.file.access()

    @property
    def outdated(self) -> bool:
        """Whether a writer in another process truncated or updated entries that this stream still
        counts."""
        return not self._file.writable and self._file.outdated()

    @property
    def writable(self) -> bool:
        return self._file.writable

    @property
    def closed(self) -> bool:
        return self._file.closed

    @property
    def reader(self) -> Reader:
        """Positions, spans and runs of the committed file, for a server."""
        return self._file.reader

    @property
    def file_size(self) -> int:
        """The file's size in bytes, preallocated pages included."""
        self._ensure_open()
        return self._file.file.size()

    @property
    def floor(self) -> int:
        """The first entry that is in the file; those before it are in the stream's archive
        alone."""
        self._ensure_open()
        page = self._file.pages.floor
        return self.reader.first_number(page) if page else 0

    def new_reader(self) -> Reader:
        """A reader of the file with its own head, which its owner moves."""
        return self._file.new_reader()

    @property
    def follows(self) -> bool:
        """Whether this sees what another process commits."""
        return self._follows

    @property
    def absolute_path(self) -> str:
        """`path`, independent of the process's current folder."""
        opened_by = self._file.opened_by
        return self._place if opened_by is None else opened_by.absolute

    @property
    def way_to_save(self) -> str:
        """What to call to copy the open file wherever `path` leads, for a message."""
        opened_by = self._file.opened_by
        return "call stream.snapshot(OUT)" if opened_by is None else opened_by.way_to_save

    @property
    def replaced(self) -> str:
        """Why `path` does not lead to the open file any more; empty while it does, or if only a
        descriptor is known."""
        return self._file.replaced

    def fileno(self) -> int:
        """The stream file's descriptor; good for reading until `close`."""
        return self._file.file.fileno()

    def __repr__(self) -> str:
        access = "writable" if self.writable else "read-only"
        state = "closed" if self.closed else f"{counted(self.total_entries)}, {access}"
        return f"<DataStream {self.path!r}: {state}>"

    def _ensure_open(self) -> None:
        if self._file.closed:
            raise StreamClosed(f"{self.path}: the stream is closed")

    # Entries.

    def entry(self, number: int) -> Entry:
        """The committed entry `number`. Raises `UnknownEntry`."""
        self._ensure_open()
        return self._unchanged(lambda: self._file.reader.entry(number))

    def _unchanged(self, read: Callable[[], T]) -> T:
        """The result of `read()`, repeated until no entries were truncated or changed meanwhile."""
        while True:
            changes = self._file.reader.turn
            try:
                found = read()
            except (DamagedEntry, NotFound):
                if not self._is_another_history(changes):
                    raise
                continue
            if not self._was_changed(changes):
                return found

    def _was_changed(self, changes: int) -> bool:
        """Whether entries were truncated or changed since `reader.turn` was `changes`."""
        if self._follows and self._file.outdated():
            self.refresh_open_file()
            return True
        return self._file.reader.turn != changes

    def entries(self, start: int = 0, stop: int | None = None) -> Iterator[Entry]:
        """The committed entries from `start` up to, not including, `stop` (None: the head)."""
        for batch in self.batches(start, stop):
            yield from batch

    def batches(
        self, start: int = 0, stop: int | None = None, *, max_bytes: int = PAGE_SIZE
    ) -> Iterator[EntryBatch]:
        """The same entries in runs of about `max_bytes` of file, without an object each.

        With `follow`, both raise `FileReplaced` as `refresh` does.
        """
        self._ensure_open()
        if max_bytes < 1:
            raise ValueError(f"max_bytes is at least 1, not {max_bytes}")
        if stop is None:
            stop = max(start, self._file.head.entries)
        return self._while_open(start, stop, max_bytes)

    def _while_open(self, number: int, stop: int, max_bytes: int) -> Iterator[EntryBatch]:
        file, begun = self._file, False
        while True:
            self._ensure_open()
            changes, epoch = file.reader.turn, file.epoch
            try:
                for batch in file.reader.batches(number, stop, max_bytes):
                    # A writer's reader has checked that itself.
                    if not file.writable and self._is_another_history(changes):
                        break
                    number, begun = batch.next_number, True
                    yield batch
                    self._ensure_open()
                    if self._follows:
                        self._ensure_in_place()
                else:
                    return
            except (DamagedEntry, NotFound):
                if not self._is_another_history(changes):
                    raise
            found = file.changes_since(epoch)
            truncated = found is None or any(c.stop is None and c.start < number for c in found)
            if begun and truncated:
                raise truncated_below(number)
            # The truncated or changed entries are still ahead.
            stop = min(stop, file.head.entries)

    def _is_another_history(self, changes: int) -> bool:
        """As `_was_changed`, also if the stream does not follow: truncated entries must not be read
        on, since others may be in their place."""
        if not (self._follows or self._file.writable) and self._file.outdated():
            self._file.refresh()
            return True
        return self._was_changed(changes)

    # Bookmarks.

    def bookmark(self, key: Buffer) -> int:
        """The number of the newest entry that is this bookmark. Raises `UnknownBookmark`."""
        self._ensure_open()
        if type(key) is not bytes:
            key = bytes(memoryview(key))
        if not 1 <= len(key) <= MAX_BOOKMARK_SIZE:
            raise BadBookmark(f"a bookmark is 1 to {MAX_BOOKMARK_SIZE} bytes, not {len(key)}")
        keeper, doubts = self.bookmarks, 0
        while doubts < 3:
            changes = self._file.reader.turn
            try:
                number = keeper.newest(key)
                if number is None:
                    break
                if self.is_bookmark(number, key):
                    return number
            except DamagedEntry:
                if not self._is_another_history(changes):
                    raise
                continue
            self._file.ensure_undamaged(number)
            # The stream was truncated meanwhile, or the index is wrong.
            if not (self._follows and self.refresh_open_file()):
                doubts += keeper.distrust(key, number)
        raise UnknownBookmark(key)

    def is_bookmark(self, number: int, key: bytes) -> bool:
        """Whether entry `number` is this bookmark."""
        try:
            packed = self._file.reader.packed(number)
        except UnknownEntry:
            return False
        kind = int.from_bytes(packed[5:9], "big")
        return kind == TYPE_BOOKMARK and packed[ENTRY_HEAD_SIZE:] == key

    def first_event_after_bookmark(self, key: Buffer) -> Entry:
        """The first entry after the bookmark that is not a bookmark itself.

        Raises `UnknownBookmark`, also if no event follows.
        """
        entry = self._unchanged(lambda: self._file.reader.first_event(self.bookmark(key)))
        if entry is None:
            key = bytes(key)
            raise UnknownBookmark(key, f"no event follows the bookmark 0x{key.hex()}")
        return entry

    def data_between_bookmarks(self, first: Buffer, last: Buffer) -> bytes:
        """The data of the events from `first` up to `last`, joined.

        Raises `UnknownBookmark`; `BadRange` if `last` precedes `first`.
        """
        return self._unchanged(lambda: self._between(first, last))

    def _between(self, first: Buffer, last: Buffer) -> bytes:
        start, stop = self.bookmark(first), self.bookmark(last)
        if start > stop:
            raise BadRange(
                f"bookmark 0x{bytes(last).hex()} (entry {stop}) precedes "
                f"0x{bytes(first).hex()} (entry {start})"
            )
        parts = []
        for batch in self._file.reader.batches(start, stop):
            for at, kind in enumerate(batch.types):
                if kind != TYPE_BOOKMARK:
                    parts.append(batch.data(at))
        return b"".join(parts)

    @property
    def bookmarks(self) -> BookmarkKeeper:
        """The stream's bookmarks as a whole, and the state of their index."""
        keeper = self._keeper
        if keeper is not None:
            return keeper
        # In the child of a fork, another thread's lock is never released.
        self._ensure_open()
        with self._keeping:
            if self._closing:
                raise StreamClosed(f"{self.path}: the stream is closed")
            if self._keeper is None:
                self._keeper = BookmarkKeeper(
                    TrustedIndex(
                        self._index,
                        self._place,
                        self._file.file,
                        self._file.reader,
                        write=self._file.writable,
                        stream_id=self._file.stream_id,
                        epoch=lambda: self._file.epoch,
                        changes_since=self._file.recorded_changes,
                        opened_by=self._file.opened_by,
                    )
                )
            return self._keeper

    def _close_bookmarks(self) -> None:
        with self._keeping:
            self._closing = True
        if self._keeper is not None:
            self._keeper.close()

    # Times.

    def time_of(self, number: int) -> int | None:
        """When an entry was committed, in Unix ms: exact, or earlier by less than the resolution of
        its page, a second unless that took more than a minute to fill. None if it is not known.
        Raises `UnknownEntry`."""
        self._ensure_open()
        return self._unchanged(lambda: self._times.time_of(number))

    def entry_at(self, ms: int) -> int:
        """The first entry that may have been committed at or after a time, in Unix ms: the first
        one that was, or one from up to a resolution earlier; `total_entries` if none was. Raises
        `TimeUnknown`."""
        self._ensure_open()
        return self._unchanged(lambda: self._times.entry_at(ms))

    def time_marks(self, first: int, count: int) -> TimeMarks:
        """At most `count` marks of the first entries from `first` on whose times are known. If the
        time of `first` is known, the first mark is at or before it. No marks: no time is known."""
        self._ensure_open()
        return self._unchanged(lambda: self._times.marks(first, max(1, count)))

    # Following.

    def refresh(self) -> bool:
        """Read what another process has committed; True if the stream moved.

        Raises `FileReplaced` within a second after the path ceases to lead to the open file, until
        it leads there again.
        """
        moved = self.refresh_open_file()
        if self._follows:
            self._ensure_in_place()
        return moved

    def refresh_open_file(self) -> bool:
        """As `refresh`, wherever the path leads."""
        self._ensure_open()
        if not self._follows:
            return False
        return self._file.refresh()

    def _ensure_in_place(self) -> None:
        """Raises `FileReplaced`. Checks if the last check is nearly a second old, or failed."""
        now = time.monotonic()
        if now < self._check_at:
            return
        why = self.replaced
        if why:
            raise FileReplaced(self.path, f"{why}; open this path again to follow what is there")
        self._check_at = now + LOOK_SECONDS
