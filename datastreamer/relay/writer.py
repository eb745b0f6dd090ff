"""What arrives from an upstream, written to our file: in the loop's turn or in a thread.

Owns the order of writes, and that the event loop does not wait for the disk. Knows no
connection.
"""

from __future__ import annotations

from collections.abc import Iterator, MutableSequence
from typing import Final

import trio

from datastreamer._codec import EntryBatch
from datastreamer.client.async_client import Batches
from datastreamer.errors import ProtocolViolation
from datastreamer.format import TYPE_BOOKMARK
from datastreamer.relay.apply_changes import ChangeApplier, Compared
from datastreamer.storage.stream import DataStream

AT_ONCE: Final = 64 << 10
"""Bytes that are written in the loop's own turn: that takes less time than a thread does to
begin. Behind more than that comes more, as a rule, and a thread receives and writes it."""

TURN_SECONDS: Final = 0.1
"""So long a thread goes on before the loop looks at how far it is."""


COMMIT_BYTES: Final = 8 << 20
"""Where more comes than is written, and nobody tells where operations end, so many bytes are a
commit."""

BACKLOG_BYTES: Final = 64 << 20
"""So much of what there was on joining is kept unseen; of a longer backlog a commit is at least so
much, up to a bookmark."""

UNMARKED_BYTES: Final = 512 << 20
"""Where no bookmark comes, so many bytes of a backlog are a commit."""


class RelayWriter:
    """What one upstream sends after a join, appended to the file in order.

    Where it tells the ends of its commits a commit here is one or more of its own, whole: what
    comes before the end is written to its place, unseen, and memory is bounded however long
    that takes. A long backlog alone, whose inner ends nobody knows, is committed in parts that end
    before a bookmark; what comes behind it never is. Where no end is told, a commit is what has
    arrived, up to some MiB. None waits for the disk; readers see it as the stream's sync policy
    says.

    What the upstream reports as changed is applied in order: at once where no operation is being
    received, else at its end. One thread at a time.
    """

    def __init__(
        self,
        stream: DataStream,
        batches: Batches,
        commits: MutableSequence[int],
        backlog: int,
        applying: ChangeApplier,
    ) -> None:
        """`commits` is given the total of each commit that ends where one of the upstream's
        does; `backlog` is how many entries the upstream held on joining."""
        self._commits = commits
        self._backlog = backlog
        self._stream = stream
        self._batches = batches
        self._applying = applying
        # Held while anything is written.
        self._writing = trio.Lock()
        self._next = stream.next_entry
        self._op = stream.atomic_op()
        # Bytes of the open operation.
        self._size = 0

    async def keep(self, batch: EntryBatch) -> int:
        """Take a batch, and of those behind it such as come without a wait; gives the number
        of the next entry.

        Raises what `take` does, and what the batches do; what was committed before stays.
        """
        try:
            # Without a turn of the loop, where nobody else writes.
            self._writing.acquire_nowait()
        except trio.WouldBlock:
            await self._writing.acquire()
        try:
            size = self._size + batch.nbytes
            changed = self._applying.waiting or self._batches.changes
            if size <= AT_ONCE and not changed and self._stream.can_commit_at_once(size):
                self.add(batch)
            else:
                told = self._batches.commit_ahead is not None
                await trio.to_thread.run_sync(self.take if told else self.add, batch)
                await self._batches.pour(self.take, self.settle, TURN_SECONDS)
            await self._apply_all()
        finally:
            self._writing.release()
        return self._next

    async def compared(self, found: Compared) -> None:
        """Take what a comparison of older entries found. Raises what `take` does."""
        async with self._writing:
            self._applying.compared(found)
            await self._apply_all()

    def add(self, batch: EntryBatch) -> None:
        """Take a small batch by a copy of its bytes, and commit where no end is told. As `take`."""
        self._begin(batch)
        self._op.add_batch(batch)
        self._went_on(batch, 0)

    def take(self, batch: EntryBatch) -> None:
        """Write a batch; its memory is not to change before the next call or the commit.

        Raises `ProtocolViolation` for entries that are not due, and what a commit raises; an
        operation that failed is rolled back. A batch of no entries comes with changes.
        """
        if self._batches.changes:
            self._applying.hear(self._batches.changes, self._next)
            self._apply()
        for part in self._parts(batch) if batch else ():
            self._begin(part)
            self._op.place_batch(part)
            self._went_on(part, COMMIT_BYTES)

    def settle(self) -> None:
        """All that has arrived was taken."""
        if not self._told:
            self.commit()

    def commit(self) -> None:
        """Make known what was taken. Raises what a commit does; none of it is appended then."""
        if not self._op.is_open:
            return
        try:
            self._stream.commit_atomic_op(wait=False)
        finally:
            self.drop()

    def drop(self) -> None:
        """Forget what was taken and is not committed."""
        if self._op.is_open:
            self._stream.rollback_atomic_op()
        self._size = 0

    @property
    def _told(self) -> bool:
        return self._batches.commit_ahead is not None

    def _parts(self, batch: EntryBatch) -> Iterator[EntryBatch]:
        """The batch, or what of it belongs to the commit that is open and then the rest."""
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
                f"entry {batch.first_number} came, where entry {self._op.next_number} was due"
            )

    async def _apply_all(self) -> None:
        """As `_apply`, until all is applied: each turn of the thread can be the last."""
        while self._applying.waiting and not self._op.is_open:
            await trio.to_thread.run_sync(self._apply)

    def _apply(self) -> None:
        """Apply what was changed, for a moment; in the middle of an operation that waits for its
        end."""
        if self._applying.waiting and not self._op.is_open:
            self._applying.apply(TURN_SECONDS)

    def _went_on(self, batch: EntryBatch, most: int) -> None:
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
    """Where in the batch its last bookmark stands; None where it has none."""
    if not batch.count(TYPE_BOOKMARK):
        return None
    types = batch.types
    return next(at for at in reversed(range(len(types))) if types[at] == TYPE_BOOKMARK)
