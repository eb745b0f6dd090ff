"""One atomic operation: entries that become visible together, or not at all.

Owns what was added and not committed yet, and the hash of what a huge operation has already
written to its place. What makes it part of the stream is `stream.py`.
"""

from __future__ import annotations

from types import TracebackType
from typing import Protocol

from xxhash import xxh3_64

from datastreamer._codec import EntryBatch
from datastreamer._packer import EntryPacker
from datastreamer.errors import CommitInDoubt, EntriesLost, WriteFailed
from datastreamer.storage.disk.file_ops import Buffer, Segments
from datastreamer.storage.header.records import Head
from datastreamer.storage.write.commit_doubt import raised_after
from datastreamer.storage.write.durability import PendingCommit
from datastreamer.storage.write.writer import StreamWriter


class OperationOwner(Protocol):
    """The stream that an atomic operation belongs to."""

    @property
    def path(self) -> str: ...
    def writer(self) -> StreamWriter: ...
    def start_atomic_op(self) -> None: ...
    def commit_atomic_op(self, *, wait: bool = True) -> PendingCommit | None: ...
    def rollback_atomic_op(self) -> None: ...


class AtomicOp(EntryPacker):
    """One atomic operation: what is added here becomes visible together, or not at all.

    A context manager: leaving it commits, an exception rolls back. A commit that fails is rolled
    back, too: `WriteFailed`, or `CommitInDoubt` if the disk may keep it. `add_entry`,
    `add_bookmark`, `add_entries` and `add_batch` are `EntryPacker`'s.
    """

    __slots__ = (
        "_committing",
        "_failures",
        "_hashed_from",
        "_hasher",
        "_placed",
        "_start",
        "_stream",
    )

    def __init__(self, stream: OperationOwner) -> None:
        super().__init__()
        self._stream = stream
        # True from the begin of a commit until it is about to return.
        self._committing = False
        # Where it begins, and how many syncs had failed by then.
        self._start = Head()
        self._failures = 0
        # The running hash over what was spilled, from which head, and up to where.
        self._hasher: xxh3_64 | None = None
        self._hashed_from = self._placed = Head()

    def __enter__(self) -> AtomicOp:
        self._stream.start_atomic_op()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if not self.is_open:
            return  # ended by hand inside the block
        if kind is not None:
            with raised_after(error):
                self._stream.rollback_atomic_op()
            return
        try:
            self._stream.commit_atomic_op()
        except EntriesLost:
            # Entries of other operations are lost, which is what the caller has to know.
            if self.is_open:
                self._stream.rollback_atomic_op()
            raise
        except CommitInDoubt as doubt:
            if not self.is_open:
                raise
            self._stream.rollback_atomic_op()
            why = doubt.what.partition(";")[0]
            raise WriteFailed(
                self._stream.path,
                f"{why}; the operation was rolled back, and nothing of it is there",
            ) from doubt
        except Exception as error:
            if self.is_open:
                with raised_after(error):
                    self._stream.rollback_atomic_op()
            raise
        except BaseException:
            self.close()
            raise

    def commit(self, *, wait: bool = True) -> PendingCommit | None:
        """As `DataStream.commit_atomic_op`; leaving the block does nothing then."""
        return self._stream.commit_atomic_op(wait=wait)

    def place_batch(self, batch: EntryBatch) -> range:
        """Add the entries of a batch that have the next numbers; returns the range of these.

        As `add_batch`, and nothing is copied: the bytes go from the batch's memory to their
        place in the file, invisible, by a thread while the caller continues. That memory must not
        change before the commit.

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
        entries = [memory[start:end] for start, end in layout.spans]
        hasher, since = self._place(
            memory, layout.segments, layout.total_length, entries, in_background=True
        )
        placed = Head(layout.total_length, layout.next_number)
        # No call between these: a signal finds all of it done, or none.
        self._hasher, self._hashed_from, self._placed = hasher, since, placed
        self.follow(layout)
        return range(first, layout.next_number)

    def spill(self) -> None:
        """A huge operation: write what has piled up to its place, still unseen.

        From the second time on a thread writes, while this hashes and the caller packs on.
        """
        hasher, since = self._place(
            self.arena,
            self.segments,
            self.total_length,
            self.entry_spans(),
            in_background=self._hasher is not None,
        )
        placed = Head(self.total_length, self.next_number)
        self._hasher, self._hashed_from, self._placed = hasher, since, placed
        self.drain()

    def _place(
        self,
        arena: Buffer,
        segments: Segments,
        length: int,
        entries: list[memoryview],
        *,
        in_background: bool,
    ) -> tuple[xxh3_64, Head]:
        """Write parts of `arena`; returns the hash over all placed entries, `entries` included, and
        the head where it began."""
        writer = self._stream.writer()
        if self._hasher is None:
            hasher, since = writer.hasher()
        else:
            hasher, since = self._hasher.copy(), self._hashed_from
        writer.uncommitted.place(arena, segments, length, in_background=in_background)
        for part in entries:
            hasher.update(part)
        return hasher, since

    def _hash_of_placed(self) -> xxh3_64:
        """The hash up to what `spill` has written; with the writer's lock held.

        Raises `WriteFailed` where a sync has failed since: another may succeed, and leave out
        what that one took for clean.
        """
        writer = self._stream.writer()
        assert self._hasher is not None
        if writer.owned.failures != self._failures:
            raise self.too_large_to_repeat()
        if self._hashed_from != writer.hashed_from:
            self._hasher = writer.hasher_after_sync(self._placed)
            self._hashed_from = writer.hashed_from
        return self._hasher

    def too_large_to_repeat(self) -> WriteFailed:
        """Why an operation of which something was placed is over once a sync has failed."""
        return WriteFailed(
            self._stream.path,
            "a sync failed, and the operation is too large to be still in memory; roll it "
            "back and begin it again",
        )
