"""One atomic operation: entries that become visible together, or not at all.

Owns what was added and not committed yet, the hash of what a large operation has already written
to its place, and the steps from its begin to its end.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from types import TracebackType
from typing import Literal, NoReturn, Protocol, overload

from datastreamer._codec import EntryBatch
from datastreamer._packer import EntryPacker
from datastreamer.errors import (
    CommitInDoubt,
    EntriesLost,
    FileReplaced,
    LeaseHeld,
    NoOperation,
    OperationOpen,
    WriteFailed,
)
from datastreamer.storage.disk.file_ops import Buffer, Segments
from datastreamer.storage.header.records import Head
from datastreamer.storage.pages._page_sums import PageSums
from datastreamer.storage.pages.hashes import PageHash
from datastreamer.storage.read.reader import Reader
from datastreamer.storage.write._lane import Appender
from datastreamer.storage.write.background import PendingCommit
from datastreamer.storage.write.pending_bookmarks import PendingBookmarks
from datastreamer.storage.write.writer import StreamWriter

_log = logging.getLogger(__name__)


class OperationOwner(Protocol):
    """The stream that an atomic operation belongs to."""

    @property
    def path(self) -> str: ...
    def _ensure_writable(self) -> StreamWriter: ...
    def _ensure_open(self) -> None: ...
    def _repair(self) -> None: ...


class AtomicOp(EntryPacker):
    """One atomic operation: what is added here becomes visible together, or not at all.

    A context manager: leaving it commits, an exception rolls back. A commit that fails is rolled
    back, too: `WriteFailed`, or `CommitInDoubt` if the disk may keep it. `add_entry`,
    `add_bookmark`, `add_entries` and `add_batch` are `EntryPacker`'s.
    """

    __slots__ = (
        "_stream",
        "_writer",
        "appender",
    )

    def __init__(
        self,
        stream: OperationOwner,
        writer: StreamWriter | None,
        deferred: PendingBookmarks | None,
    ) -> None:
        super().__init__()
        self._stream = stream
        # None for a stream that is open for reading: no operation begins on it.
        self._writer = writer
        self.appender = Appender(self, writer, deferred)

    def __enter__(self) -> AtomicOp:
        self.appender.begin()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if not self.is_open:
            return  # the block has ended it
        if kind is not None:
            with raised_after(error):
                self.rollback()
            return
        try:
            self.commit()
        except BaseException as error:
            was_open = self.is_open
            self.close()
            if was_open and isinstance(error, Exception):
                self.rolled_back_after(error)
            raise

    def rolled_back_after(self, error: Exception) -> None:
        """Withdraw the operation, which is closed because of `error`. Raises what replaces that
        error."""
        if isinstance(error, CommitInDoubt) and not isinstance(error, EntriesLost):
            self._withdraw()
            why = error.what.partition(";")[0]
            raise WriteFailed(
                self._stream.path,
                f"{why}; the operation was rolled back, and nothing of it is stored",
            ) from error
        with raised_after(error):
            self._withdraw()

    # From begin to end.

    def lent(self, what: str) -> LeaseHeld:
        """The error for `what` is not allowed while a publisher holds the lease."""
        return LeaseHeld(
            f"{self._stream.path}: no {what} here while a publisher holds the lease of the stream"
        )

    def lend(self, lease: object) -> None:
        """As `WriterPart.lend`."""
        if self.appender.lease is not None:
            raise self.lent("lease")
        self.appender.lease = lease
        if self.is_open:
            self.appender.lease = None
            raise OperationOpen("an atomic operation of this process is open")

    def end_lease(self, lease: object) -> None:
        """As `WriterPart.end_lease`."""
        if self.appender.lease is lease and lease is not None:
            try:
                if self.is_open:
                    self.rollback()
            finally:
                self.appender.lease = None

    def ensure_startable(self, lease: object) -> None:
        """Wait for the commit of another thread, and recover from a failed sync. Raises if no
        operation may begin."""
        stream = self._stream
        stream._ensure_open()
        writer = stream._ensure_writable()
        if self.appender.lease is not lease:
            raise self.lent("operation")
        if self.is_open:
            with writer.owned.lock:
                if self.is_open:
                    raise OperationOpen(
                        "an atomic operation is open already; commit it or roll it back"
                    )
        if writer.owned.failed:
            stream._repair()
            writer.owned.ensure_writable()
        # The space of an earlier operation, if the system refused to shrink the file then.
        writer.uncommitted.release()

    @overload
    def commit(self, *, wait: Literal[False]) -> PendingCommit: ...

    @overload
    def commit(self, *, wait: bool = True) -> PendingCommit | None: ...

    def commit(self, *, wait: bool = True) -> PendingCommit | None:
        """As `DataStream.commit_atomic_op`; leaving the block does nothing then."""
        return self.appender.commit(wait)

    def refuse_without_operation(self) -> NoReturn:
        self._stream._ensure_open()
        raise NoOperation("no atomic operation is open")

    def recover(self) -> None:
        """Recover from a failed sync."""
        self._stream._repair()

    def discard(self) -> str:
        """Close it because its stream is being closed. Returns what its program has to know, and
        logs that: how many of its entries are discarded. Empty if there are none, or if they are
        those of a publisher, which is not acknowledged and sends them again."""
        count, writer = 0, self._writer
        ours = self.is_open and not self.appender.lease
        if ours and writer is not None and writer.end.state != "interrupted":
            count = self.next_number - self.appender.start.entries
        self.close()
        if not count:
            return ""
        what = (
            f"{self._stream.path}: the stream was closed while an atomic operation was open; its "
            f"{count} entries are discarded (commit an operation, or roll it back)"
        )
        _log.warning("%s", what)
        return what

    def rollback(self) -> None:
        """As `DataStream.rollback_atomic_op`."""
        self._stream._ensure_open()
        self._stream._ensure_writable()
        if not self.is_open:
            self.refuse_without_operation()
        self.close()
        self._withdraw()

    def _withdraw(self) -> None:
        """Return the space of the operation, which is closed, and withdraw its header if that was
        written. Requires no lock. Raises `CommitInDoubt`."""
        writer = self._stream._ensure_writable()
        owned = writer.owned
        with owned.exclusive() if owned.header_ahead else owned.lock:
            try:
                if writer.end.state == "interrupted":
                    owned.ensure_writable()
                writer.durability.withdraw_header()
            finally:
                if not self.is_open:  # another thread may have begun the next one
                    writer.uncommitted.release()

    # A large operation, which is written before its commit.

    def place_batch(self, batch: EntryBatch) -> range:
        """Add the entries of a batch that have the next numbers; returns the range of these.

        As `add_batch`, but nothing is copied: a thread writes the batch's memory to its place in
        the file, where readers do not see it, while the caller continues, or the caller if the
        thread is busy. That memory must not change before the commit.

        Raises `UsageError` for other numbers, `CorruptEntries` if the memory is not what was
        scanned, and `WriteFailed`; the operation continues without the batch.
        """
        if self.segments:
            self.spill()
        layout = self.lay_out(batch)
        first = self.next_number
        if not layout.segments:
            return range(first, first)
        memory = memoryview(batch.base).cast("B")
        entries = [(offset, memory[at : at + size]) for offset, at, size in layout.entries]
        placed = self._place(memory, layout.segments, layout.total_length, entries)
        # No call between these statements: a signal's exception finds both done, or neither.
        self.appender.placed = placed
        self.follow(layout)
        return range(first, layout.next_number)

    def spill(self) -> None:
        """Write what was packed to its place, where readers do not see it.

        A thread writes if it is not busy, while this hashes and the caller packs more.
        """
        self.appender.placed = self._place(
            self.arena, self.segments, self.total_length, self.entry_parts()
        )
        self.drain()

    def _place(
        self,
        arena: Buffer,
        segments: Segments,
        length: int,
        entries: list[tuple[int, memoryview]],
    ) -> PageSums:
        """Write parts of `arena`; returns the hashes up to their end. `entries` are the entries in
        them, with file offsets."""
        self._stream._ensure_writable().uncommitted.place(arena, segments, length)
        return self._sums_with(entries)

    def _sums_with(self, entries: list[tuple[int, memoryview]]) -> PageSums:
        """The hashes up to the end of what was placed, and of these entries after it."""
        end, placed = self._stream._ensure_writable().end, self.appender.placed
        sums = (end.sums if placed is None else placed).copy()
        for offset, part in entries:
            sums.add(part, offset)
        return sums

    # What it holds so far.

    def finished_pages(self) -> list[PageHash]:
        """The pages of the file that its commit makes whole."""
        return self._sums_with(self.entry_parts()).finished

    def preview(self) -> Reader:
        """A reader of the stream as its commit leaves it; valid until the operation ends.

        Writes what was added to its place. Raises `WriteFailed`.
        """
        if self.segments:
            self.spill()
        writer = self._stream._ensure_writable()
        owned = writer.owned
        with owned.lock:
            writer.uncommitted.finish_placing(wanted=True)
        return Reader(owned.file, owned.path, Head(self.total_length, self.next_number))


@contextlib.contextmanager
def raised_after(error: BaseException | None) -> Iterator[None]:
    """For an ``__exit__`` with `error`: raise what the block raises, with `error` as its context.

    But doubt about a commit must not replace an `error` that is no `Exception` (Ctrl-C, a
    cancelled task, the end of the process): then the doubt is logged.
    """
    try:
        yield
    except (CommitInDoubt, FileReplaced) as doubt:
        if error is None or isinstance(error, Exception):
            raise
        _log.error("%s", doubt)
