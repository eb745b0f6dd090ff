"""Writes what arrives from an upstream to the relay's file, in the event loop or in a thread.

Owns the order of writes, and that the event loop does not wait for the disk. Knows no
connection.
"""

from __future__ import annotations

from collections.abc import Iterator, MutableSequence
from typing import Final

import trio

from datastreamer._codec import EntryBatch
from datastreamer.errors import ProtocolViolation
from datastreamer.format import TYPE_BOOKMARK
from datastreamer.relay.apply_changes import ChangeApplier, Compared
from datastreamer.relay.checksums import ReceivedCheck
from datastreamer.relay.client import RelayBatches
from datastreamer.storage.stream import DataStream

AT_ONCE: Final = 64 << 10
"""Batches up to this size are written in the event loop: starting a thread takes longer. Larger
ones are usually followed by more, which a thread receives and writes."""

TURN_SECONDS: Final = 0.1
"""Time after which a thread returns to the event loop to report progress."""

COMMIT_BYTES: Final = 8 << 20
"""Bytes per commit, if entries arrive faster than they are written and the upstream does not report
operation boundaries."""

BACKLOG_BYTES: Final = 64 << 20
"""A backlog up to this size is one commit; a longer one is committed in parts of at least this
size, each of which ends before a bookmark."""

UNMARKED_BYTES: Final = 512 << 20
"""Bytes per commit of a backlog without bookmarks."""


class RelayWriter:
    """Appends what one upstream sends after a join, in order.

    If the upstream reports the ends of its commits, a commit here is one or more whole commits of
    the upstream: entries before the end are written to their place but are not visible, and
    memory is bounded. Only a long backlog, whose inner boundaries are not reported, is committed
    in parts, each of which ends before a bookmark. If no ends are reported, a commit is what has
    arrived, up to some MiB. No commit waits for the disk; readers see it according to the
    stream's sync policy.

    Changes that the upstream reports are applied in order: at once, or at the end of the operation
    that is being received. One thread at a time.
    """

    def __init__(
        self,
        stream: DataStream,
        batches: RelayBatches,
        commits: MutableSequence[int],
        backlog: int,
        change_applier: ChangeApplier,
        check: ReceivedCheck | None = None,
    ) -> None:
        """`commits` gets the total of each commit that ends at an end of an upstream's commit;
        `backlog` is the number of entries that the upstream held at the join. `check` compares each
        operation before its commit."""
        self._commits = commits
        self._backlog = backlog
        self._stream = stream
        self._batches = batches
        self._change_applier = change_applier
        self._check = check
        # Whether the commit is to be compared: it is made in a thread then.
        self._checks = False
        # Held during writes.
        self._writing = trio.Lock()
        self._next = stream.parts.writer.next_entry
        self._op = stream.atomic_op()
        # Bytes of the open operation.
        self._size = 0

    async def write(self, batch: EntryBatch) -> int:
        """Write a batch and those after it that arrive without a wait; returns the number of the
        next entry.

        Raises what `place` does, and what the batches do; earlier commits remain.
        """
        try:
            # Without a turn of the event loop if no other task writes.
            self._writing.acquire_nowait()
        except trio.WouldBlock:
            await self._writing.acquire()
        try:
            size = self._size + batch.nbytes
            changed = self._change_applier.waiting or self._batches.changes
            due = self._check is not None and self._check.is_due(batch.next_number, size)
            quick = size <= AT_ONCE and not changed and not due
            self._checks = not quick or not self._stream.parts.writer.fits(size)
            if not self._checks:
                self.add(batch)
            else:
                has_ends = self._batches.commit_ahead is not None
                await trio.to_thread.run_sync(self.place if has_ends else self.add, batch)
                await self._batches.pour(self.place, self.end_turn, TURN_SECONDS)
            await self._apply_all()
        finally:
            self._writing.release()
        return self._next

    async def compared(self, found: Compared) -> None:
        """Take what a comparison of older entries found. Raises what `place` does."""
        async with self._writing:
            self._change_applier.compared(found)
            await self._apply_all()

    def add(self, batch: EntryBatch) -> None:
        """Append a small batch by copying it, and commit if no ends are reported. As `place`."""
        self._begin(batch)
        self._op.add_batch(batch)
        self._advance(batch, 0)

    def place(self, batch: EntryBatch) -> None:
        """Write a batch; its memory is not to change before the next call or the commit.

        Raises `ProtocolViolation` for entries that are not the next, and what a commit raises; an
        operation that failed is rolled back. A batch without entries carries changes.
        """
        if self._batches.changes:
            self._change_applier.add_reports(self._batches.changes, self._next)
            self._apply()
        for part in self._parts(batch) if batch else ():
            self._begin(part)
            self._op.place_batch(part)
            self._advance(part, COMMIT_BYTES)

    def end_turn(self) -> None:
        """Everything that has arrived was written: without ends of commits, commit it."""
        if self._batches.commit_ahead is None:
            self.commit()

    def commit(self) -> None:
        """Commit the open operation, if it matches the upstream's checksums. Raises what a commit
        and `ReceivedCheck.before_commit` do; then none of it is appended."""
        if not self._op.is_open:
            return
        try:
            if self._checks and self._check is not None:
                self._check.before_commit(self._op)
            self._stream.commit_atomic_op(wait=False)
        finally:
            self.drop()

    def drop(self) -> None:
        """Roll back what is not committed."""
        if self._op.is_open:
            self._stream.rollback_atomic_op()
        self._size = 0

    def _parts(self, batch: EntryBatch) -> Iterator[EntryBatch]:
        """The batch, or the part of it that belongs to the open commit and then the rest."""
        ahead, size = self._batches.commit_ahead, self._size + batch.nbytes
        there = self._backlog - batch.first_number
        if there < 0 or ahead in (None, batch.next_number) or size < BACKLOG_BYTES:
            yield batch
            return
        cut = _last_bookmark(batch[: there + 1])
        if cut is None and size >= UNMARKED_BYTES:
            cut = min(there, len(batch))
        if cut:
            yield batch[:cut]
        if cut is not None:
            self.commit()
            self._apply()
        if cut != len(batch):
            yield batch[cut:]

    def _begin(self, batch: EntryBatch) -> None:
        if not self._op.is_open:
            self._stream.start_atomic_op()
            self._size = 0
        if batch.first_number != self._op.next_number:
            raise ProtocolViolation(
                f"received entry {batch.first_number}, but entry {self._op.next_number} is the next"
            )

    async def _apply_all(self) -> None:
        """As `_apply`, until everything is applied; can be cancelled between its turns."""
        while self._change_applier.waiting and not self._op.is_open:
            await trio.to_thread.run_sync(self._apply)

    def _apply(self) -> None:
        """Apply changes for a moment; within an operation they wait for its end."""
        if self._change_applier.waiting and not self._op.is_open:
            self._change_applier.apply(TURN_SECONDS)

    def _advance(self, batch: EntryBatch, most: int) -> None:
        self._size += batch.nbytes
        self._next = batch.next_number
        ahead = self._batches.commit_ahead
        if ahead is None:
            if self._size >= most:
                self.commit()
        elif batch.next_number == ahead:
            self.commit()
            self._commits.append(ahead)
            self._apply()


def _last_bookmark(batch: EntryBatch) -> int | None:
    """The index of the batch's last bookmark; None if it has none."""
    if not batch.count(TYPE_BOOKMARK):
        return None
    types = batch.types
    return next(at for at in reversed(range(len(types))) if types[at] == TYPE_BOOKMARK)
