"""What the server, publishing and relays of this package use of a stream, apart from its users.

Five parts, each for one kind of user: a user of storage holds a part, and never the stream's
fields. Owns the listeners to changes and the shared counters; the lease, the records in the header
page and the writer's state belong to the stream's file, and are reached here.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from datastreamer._codec import scan
from datastreamer.errors import DamagedPage
from datastreamer.format import page_of
from datastreamer.metrics.writer_numbers import WriterNumbers
from datastreamer.storage.bookmarks.keeper import BookmarkKeeper
from datastreamer.storage.disk.file_ops import File, read_ahead
from datastreamer.storage.header.page import HeaderPage
from datastreamer.storage.header.records import Agreement, Evicted, Head, PublisherRecord
from datastreamer.storage.objects import TIMEOUT
from datastreamer.storage.pages.hashes import Sum, last_page
from datastreamer.storage.pages.page_states import PageRegister, Verify
from datastreamer.storage.pages.restore import HealedPages, Peer
from datastreamer.storage.pages.restore_open import heal_page
from datastreamer.storage.read.evicted import HasFileno, PagedFile
from datastreamer.storage.read.file import StreamFile
from datastreamer.storage.read.range_sums import sums_from
from datastreamer.storage.summaries.records import Mark
from datastreamer.storage.summaries.times import StreamTimes
from datastreamer.storage.write.atomic_op import AtomicOp
from datastreamer.storage.write.changes import ChangeWriter
from datastreamer.storage.write.owned_file import OwnedFile
from datastreamer.storage.write.writer import StreamWriter


@dataclass(frozen=True, slots=True)
class ChangeBegins:
    """The entries from `start` up to, not including, `stop` (None: a truncation) are about to be
    changed. The change waits for the listeners. Entry `start` is at `offset` (0: to be found),
    which a listener could not find without the archive if its page is evicted."""

    start: int
    stop: int | None
    offset: int = field(default=0, compare=False)


@dataclass(frozen=True, slots=True)
class ChangeEnds:
    """The change of these entries is done, or has failed."""

    start: int
    stop: int | None


Listener = Callable[[ChangeBegins | ChangeEnds], None]


class PartsOwner(Protocol):
    """The stream that the parts belong to."""

    _file: StreamFile
    _op: AtomicOp
    _times: StreamTimes
    _writer: StreamWriter | None

    @property
    def bookmarks(self) -> BookmarkKeeper: ...
    def _ensure_open(self) -> None: ...
    def _ensure_writable(self) -> StreamWriter: ...
    def _ensure_changeable(self, what: str) -> ChangeWriter: ...
    def _repaired(self) -> StreamWriter: ...


class StreamFeed:
    """Where the stream ends, and what changes in it: for those who send it."""

    def __init__(self, stream: PartsOwner) -> None:
        self._stream = stream
        self._listeners: list[Listener] = []

    def settled_page(self) -> bytes | None:
        return self._stream._file.settled_page()

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

    def subscribe(self, listener: Listener) -> Callable[[], None]:
        """Call `listener` before and after each change of committed entries by this process.

        It runs in the writer's thread, and the change waits for it. Returns a function that ends
        the subscription.
        """
        self._listeners.append(listener)
        return lambda: self._listeners.remove(listener)

    @contextlib.contextmanager
    def change(self, start: int, stop: int | None, offset: int = 0) -> Iterator[None]:
        """The block changes the entries from `start` up to `stop`: notify the listeners."""
        notified = []
        try:
            for listener in list(self._listeners):
                listener(ChangeBegins(start, stop, offset))
                notified.append(listener)
            yield
        finally:
            for listener in notified:
                listener(ChangeEnds(start, stop))


class StreamPages:
    """What is known of the file's pages, their restoration, and where they are."""

    def __init__(self, stream: PartsOwner, feed: StreamFeed) -> None:
        self._stream = stream
        self._feed = feed

    @property
    def file(self) -> File:
        """The open file, for reads past the page cache."""
        return self._stream._file.file

    def holder(self, offset: int) -> tuple[HasFileno, int] | None:
        """As `PagedFile.holder`."""
        file = self.file
        return file.holder(offset) if isinstance(file, PagedFile) else (file, sys.maxsize)

    @property
    def verify(self) -> Verify:
        """When the stream's own reader compares a page."""
        return self._stream._file.verify

    def keep_fetched(self, most: int, folder: str | None = None, timeout: float = TIMEOUT) -> None:
        """As `PagedFile.keep_fetched`."""
        if isinstance(self.file, PagedFile):
            self.file.keep_fetched(most, folder, timeout)

    def for_server(self) -> PageRegister:
        """What is known of the file's pages. Where they can be compared, the system reads nothing
        of the file ahead by itself from now on."""
        pages = self._stream._file.pages
        if pages.usable:
            read_ahead(self.file, False)
        return pages

    @property
    def floor_page(self) -> int:
        """The first page that is in the file; those before it are in its archive."""
        return self._stream._file.pages.floor

    @property
    def mark(self) -> Evicted | None:
        """Where the evicted pages are; None if there are none."""
        return HeaderPage.of(self.file).evicted

    def chain_before(self, page: int) -> bytes | None:
        """The chain over all pages before one; None if not all of them have proven checksums."""
        chain, first = self._stream._ensure_writable().owned.sums.chain_before(page)
        return None if first else chain

    def raise_floor(self, evicted: Evicted, first: int = 0) -> None:
        """The pages below a new floor are read from this archive from now on, by all processes;
        durable on return. Raises what `Floor.raise_to` raises, with the same `first`, and
        `ServerFailed` if a serving process does not confirm that it has looked."""
        self._stream._ensure_writable().floor.raise_to(evicted, first)
        self._stream.bookmarks.changed()
        total = self._stream._file.head.entries
        with self._feed.change(total, total):
            pass

    def bring_back(self, page: int) -> None:
        """Have the pages from `page` on in the file. Raises `EvictedEntry` and `WriteFailed`."""
        with self._stream._ensure_writable().floor.bringing_back(page, sys.maxsize):
            pass

    def punch(self, first: int, stop: int) -> None:
        """Return the space of pages below the floor. Raises `OSError`."""
        self._stream._ensure_writable().floor.punch(first, stop)

    def sums(self, number: int, most: int) -> tuple[list[Sum], Sum | None]:
        return sums_from(self._stream._file, number, most)

    def heal(self, page: int, peers: Sequence[Peer]) -> HealedPages | None:
        """Restore a damaged page of the file from servers of the same stream; None if the page is
        whole or has no checksum. From any thread.

        Raises `StreamClosed`, and `WriteFailed` if the disk refuses.
        """
        self._stream._ensure_open()
        return heal_page(self._stream._ensure_writable().owned, self._stream.bookmarks, page, peers)

    def damaged(self, first: int, stop: int) -> list[DamagedPage]:
        """The pages that hold the entries from `first` up to, not including, `stop`, and do not
        match their checksums. Raises `DamagedEntry` if the entries' pages cannot be found."""
        if not 0 <= first < stop:
            return []
        owned = self._stream._ensure_writable().owned
        low, high = owned.page_of_entry(first), owned.page_of_entry(stop - 1)
        return _damaged(owned, range(low, high + 1))

    def damaged_around(self, offset: int) -> list[DamagedPage]:
        """The same for the page at a file offset and the two beside it: a reader that meets damage
        at this offset may have been misled by one of these."""
        owned, page = self._stream._ensure_writable().owned, page_of(offset)
        return _damaged(owned, range(max(0, page - 1), min(page + 1, owned.end.sums.page) + 1))


class WriterPart:
    """The writer's state, its lease and its wakers. Raises `StreamReadOnly` where a writer is
    needed."""

    def __init__(self, stream: PartsOwner) -> None:
        self._stream = stream

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

    def put_source(self, source: PublisherRecord) -> None:
        """Record the source that is about to be granted a lease; on disk on return.

        Raises `StreamClosed`, and `WriteFailed` if the disk refuses.
        """
        self._stream._repaired().notes.put_publisher(source)

    # The state.

    @property
    def next_entry(self) -> int:
        """The first entry of the next operation, after all that are committed, visible or not."""
        return self._stream._ensure_writable().end.written.entries

    @property
    def durable_entries(self) -> int:
        """The number of entries that are known to be on disk."""
        return self._stream._ensure_writable().end.base.entries

    def fits(self, size: int) -> bool:
        """Whether ``commit(wait=False)`` of `size` bytes of entries, with their heads, does not
        wait for the disk: the file need not grow for it, and no sync has failed."""
        return self._stream._ensure_writable().can_commit_at_once(size)

    def fills_page(self, size: int) -> bool:
        """Whether an operation of `size` bytes of entries, with their heads, may make the last page
        whole."""
        length = self._stream._ensure_writable().end.written.length
        return last_page(length + size) != last_page(length)

    def ensure_in_place(self, *, always: bool = False) -> None:
        """Raises `FileReplaced` if the stream's path has not led to the open file for a second or
        longer; with `always`, if it does not now."""
        self._stream._ensure_writable().owned.ensure_in_place(always=always)

    # Notification of commits. Without a writer, these do nothing.

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


class RelayPart:
    """What a relay records in its file, and replaces in it."""

    def __init__(self, stream: PartsOwner, feed: StreamFeed) -> None:
        self._stream = stream
        self._feed = feed

    @property
    def agreement(self) -> Agreement | None:
        """With which state of an upstream a relay's file agrees; None if that is not known."""
        return self._stream._ensure_writable().notes.agreement

    def put_agreement(self, agreement: Agreement | None) -> None:
        self._stream._repaired().notes.put_agreement(agreement)

    def replace_page(self, page: int, entries: bytes) -> str:
        """As `ChangeWriter.replace_page`. Raises as `DataStream.update_entry`, too."""
        stream = self._stream
        changes = stream._ensure_changeable("replacement of a page")
        # The places of entries near the page may not be known.
        writer = stream._ensure_writable()
        with (
            writer.floor.bringing_back(page),
            self._feed.change(0, writer.end.written.entries),
        ):
            kept = changes.replace_page(page, entries)
            stream.bookmarks.changed()
            stream.bookmarks.restored(scan(entries, None).bookmarks())
        return kept

    def leave_times(self) -> None:
        """The times of entries are the upstream's: do not note when they are committed here."""
        self._stream._ensure_writable().owned.summaries.leave_times()

    @property
    def times_known_to(self) -> int:
        """The entry after the last one whose time is known."""
        return self._stream._times.known_to()

    def put_time_marks(self, marks: Sequence[Mark], resolution: int, next: int) -> None:
        """Record the times of entries from an upstream's answer, `DataStream.time_marks` there."""
        owned = self._stream._ensure_writable().owned
        with owned.lock:
            owned.summaries.put_marks(marks, resolution, next, owned.reader.page_holding)

    def end_before(self, page: int) -> Head:
        """The end of the pages before a page; of fewer if the number of the entry after them is not
        known."""
        return self._stream._ensure_writable().owned.end_before(page)


class Counters:
    """What the writer counts, in memory that other processes can share."""

    def __init__(self, stream: PartsOwner) -> None:
        self._stream = stream
        self._numbers: WriterNumbers | None = None

    def share(self) -> WriterNumbers | None:
        """The writer's counters; the same on each call until the stream is closed. None if it is
        open for reading."""
        writer = self._stream._writer
        if writer is None:
            return None
        self._stream._ensure_open()
        with writer.owned.exclusive():
            if self._numbers is None:
                self._numbers = WriterNumbers.create()
                writer.end.count_in(self._numbers.memory)
            return self._numbers

    @property
    def shared(self) -> bool:
        return self._numbers is not None

    def close(self) -> None:
        """Stop counting in shared memory: the writer is closed."""
        if self._stream._writer is not None and self._numbers is not None:
            self._stream._writer.end.count_in(None)
            self._numbers.close()
            self._numbers = None


class Parts:
    """The five parts of one stream."""

    def __init__(self, stream: PartsOwner) -> None:
        self.feed = StreamFeed(stream)
        self.pages = StreamPages(stream, self.feed)
        self.writer = WriterPart(stream)
        self.relay = RelayPart(stream, self.feed)
        self.counters = Counters(stream)


def _damaged(owned: OwnedFile, pages: range) -> list[DamagedPage]:
    found = (owned.damage_of(page) for page in pages)
    return [damage for damage in found if damage is not None]
