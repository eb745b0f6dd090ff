"""What the server, publishing and relays of this package use of a stream, apart from its users.

Owns the callbacks on changes and the shared counters. The lease, the records in the header page
and the writer's state are parts of the stream's file; they are reached here.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from datastreamer._codec import scan
from datastreamer.errors import DamagedPage
from datastreamer.format import page_of
from datastreamer.metrics.writer_numbers import WriterNumbers
from datastreamer.storage.bookmarks.keeper import BookmarkKeeper
from datastreamer.storage.header.records import Agreement, Head, PublisherRecord
from datastreamer.storage.maintain.heal import HealedPages, Peer
from datastreamer.storage.maintain.heal_open import heal_page
from datastreamer.storage.read.file import StreamFile
from datastreamer.storage.read.range_sums import Sum, sums_from
from datastreamer.storage.sums.hashes import last_page
from datastreamer.storage.write.atomic_op import AtomicOp
from datastreamer.storage.write.changes import ChangeWriter
from datastreamer.storage.write.owned_file import OwnedFile
from datastreamer.storage.write.page_damage import damage_of, end_before, page_of_entry
from datastreamer.storage.write.writer import StreamWriter

ChangeCallback = Callable[[int, int | None, bool], None]


class InternalsOwner(Protocol):
    """The stream that these internals belong to."""

    _file: StreamFile
    _op: AtomicOp
    _writer: StreamWriter | None

    @property
    def bookmarks(self) -> BookmarkKeeper: ...
    def _ensure_open(self) -> None: ...
    def _ensure_writable(self) -> StreamWriter: ...
    def _ensure_changeable(self, what: str) -> ChangeWriter: ...
    def _repaired(self) -> StreamWriter: ...


class StreamInternals:
    """The internals of a stream. Raises `StreamReadOnly` where a writer is needed."""

    def __init__(self, stream: InternalsOwner) -> None:
        self._stream = stream
        self._on_change: list[ChangeCallback] = []
        self._numbers: WriterNumbers | None = None

    # The lease.

    def lend(self, lease: object) -> None:
        """Until `end_lease`, only operations with this `lease` begin, and no entries are changed.

        Raises `OperationOpen` if an operation is open, and `LeaseHeld` if the stream is lent
        already. From any thread.
        """
        self._stream._ensure_open()
        self._stream._ensure_writable()
        self._stream._op.lend(lease)

    def end_lease(self, lease: object) -> None:
        """End the lease, and roll back its open operation. Does nothing if another holds the
        lease.

        Raises `CommitInDoubt` as `rollback_atomic_op`; the lease has ended nevertheless.
        """
        self._stream._op.end_lease(lease)

    # The writer's state.

    @property
    def next_entry(self) -> int:
        """The first entry of the next operation, after all that are committed, visible or not."""
        return self._stream._ensure_writable().end.written.entries

    @property
    def synced_entries(self) -> int:
        """The number of entries that are known to be on disk."""
        return self._stream._ensure_writable().end.base.entries

    def can_commit_at_once(self, size: int) -> bool:
        """Whether ``commit(wait=False)`` of `size` bytes of entries, with their heads, does not
        wait for the disk: the file need not grow for it, and no sync has failed."""
        return self._stream._ensure_writable().can_commit_at_once(size)

    def ensure_in_place(self, *, always: bool = False) -> None:
        """Raises `FileReplaced` if the stream's path has not led to the open file for a second or
        longer; with `always`, if it does not now."""
        self._stream._ensure_writable().owned.ensure_in_place(always=always)

    @property
    def misplaced(self) -> str:
        """Why others do not find everything committed here at the stream's path, judged by names
        and sizes; empty if they do."""
        file = self._stream._file
        if why := file.replaced:
            return f"{file.path}: {why}"
        end, size = file.head.length, file.file.size()
        if size < end:
            return f"{file.path}: the stream has {end} bytes, and the file {size}"
        return ""

    # Checksums.

    def fills_page(self, size: int) -> bool:
        """Whether an operation of `size` bytes of entries, with their heads, may make the last page
        whole."""
        length = self._stream._ensure_writable().end.written.length
        return last_page(length + size) != last_page(length)

    def page_sums(self, number: int, most: int) -> tuple[list[Sum], Sum | None]:
        """As `range_sums.sums_from`."""
        return sums_from(self._stream._file, number, most)

    @property
    def file(self) -> StreamFile:
        """The open file, to compare its pages with their checksums (`new_verifier`, `end_sum`)."""
        return self._stream._file

    # Records in the file.

    def put_publisher(self, source: PublisherRecord) -> None:
        """Record the source that is about to be granted a lease; on disk on return.

        Raises `StreamClosed`, and `WriteFailed` if the disk refuses.
        """
        self._stream._repaired().notes.put_publisher(source)

    @property
    def agreement(self) -> Agreement | None:
        """With which state of an upstream a relay's file agrees; None if that is not known."""
        return self._stream._ensure_writable().notes.agreement

    def put_agreement(self, agreement: Agreement | None) -> None:
        """Record in the file with which state of an upstream it agrees."""
        self._stream._repaired().notes.put_agreement(agreement)

    # Damaged pages.

    def heal_page(self, page: int, peers: Sequence[Peer]) -> HealedPages | None:
        """Restore a damaged page of the file from servers of the same stream; None if the page is
        whole or has no checksum. From any thread.

        Raises `StreamClosed`, and `WriteFailed` if the disk refuses.
        """
        self._stream._ensure_open()
        return heal_page(self._stream._ensure_writable().owned, self._stream.bookmarks, page, peers)

    def damaged_pages(self, first: int, stop: int) -> list[DamagedPage]:
        """The pages that hold the entries from `first` up to, not including, `stop`, and do not
        match their checksums. Raises `DamagedEntry` if the entries' pages cannot be found."""
        if not 0 <= first < stop:
            return []
        owned = self._stream._ensure_writable().owned
        low, high = page_of_entry(owned, first), page_of_entry(owned, stop - 1)
        return _damaged(owned, range(low, high + 1))

    def damaged_around(self, offset: int) -> list[DamagedPage]:
        """The same for the page at a file offset and the two beside it: a reader that meets damage
        at this offset may have been misled by one of these."""
        owned, page = self._stream._ensure_writable().owned, page_of(offset)
        return _damaged(owned, range(max(0, page - 1), min(page + 1, owned.end.sums.page) + 1))

    def replace_page(self, page: int, entries: bytes) -> str:
        """As `ChangeWriter.replace_page`. Raises as `DataStream.update_entry`, too."""
        changes = self._stream._ensure_changeable("replacement of a page")
        # The places of entries near the page may not be known.
        with self.change(0, self.next_entry):
            kept = changes.replace_page(page, entries)
            self._stream.bookmarks.changed()
            self._stream.bookmarks.restored(scan(entries, None).bookmarks())
        return kept

    def end_before(self, page: int) -> Head:
        """The end of the pages before a page; of fewer if the number of the entry after them is not
        known."""
        return end_before(self._stream._ensure_writable().owned, page)

    # Notification of commits and changes.

    def add_waker(self, fd: int, *, inside: bool = False) -> None:
        """Write 8 bytes to the non-blocking descriptor `fd` after every commit.

        `inside` is for a reader in this process: the write follows when `total_entries` includes
        the commit, which is later than the file does.
        """
        if self._stream._writer is not None:
            self._stream._writer.owned.add_waker(fd, inside=inside)

    def add_early_waker(self, fd: int) -> None:
        """Write to the eventfd `fd` when a commit of up to 64 KiB begins that is visible at its
        end, more than 0.1 ms after the last one: a reader that waits can be awake when it ends.
        The value is the number of the writer's CPU, plus 1."""
        if self._stream._writer is not None:
            self._stream._writer.owned.add_early_waker(fd)

    def remove_waker(self, fd: int) -> None:
        """Nothing is written to `fd` after this returns."""
        if self._stream._writer is not None:
            self._stream._writer.owned.remove_waker(fd)

    def on_change(self, callback: ChangeCallback) -> Callable[[], None]:
        """Call `callback(start, stop, done)` before and after changes of committed entries.

        `done` is false before the entries from `start` up to `stop` (None: a truncation) are
        changed, and true after. It runs in the writer's thread, and the change waits for it.
        Returns a function that removes the callback.
        """
        self._on_change.append(callback)
        return lambda: self._on_change.remove(callback)

    @contextlib.contextmanager
    def change(self, start: int, stop: int | None) -> Iterator[None]:
        """The block changes the entries from `start` up to `stop`: call the callbacks."""
        called = []
        try:
            for callback in list(self._on_change):
                callback(start, stop, False)
                called.append(callback)
            yield
        finally:
            for callback in called:
                callback(start, stop, True)

    # What is counted.

    def share_numbers(self) -> WriterNumbers | None:
        """The writer's counters, in memory that other processes can share; the same on each
        call until the stream is closed. None if it is open for reading."""
        writer = self._stream._writer
        if writer is None:
            return None
        self._stream._ensure_open()
        with writer.owned.exclusive():
            if self._numbers is None:
                self._numbers = WriterNumbers.create()
                writer.end.count_in(self._numbers.memory)
            return self._numbers

    def close(self) -> None:
        """Stop counting in shared memory: the writer is closed."""
        if self._stream._writer is not None and self._numbers is not None:
            self._stream._writer.end.count_in(None)
            self._numbers.close()
            self._numbers = None


def _damaged(owned: OwnedFile, pages: range) -> list[DamagedPage]:
    found = (damage_of(owned, page) for page in pages)
    return [damage for damage in found if damage is not None]
