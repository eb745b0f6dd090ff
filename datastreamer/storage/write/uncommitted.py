"""The space after a stream's end: preallocated, claimed, and written before a commit.

Owns the size of the file, and what an operation writes to its place before readers see it. The
header page records the claimed space, so that the next open returns it if this process is killed.
"""

from __future__ import annotations

import logging
from collections import deque

from datastreamer.errors import WriteFailed
from datastreamer.storage.disk.file_ops import Buffer, Placing, Segments
from datastreamer.storage.disk.preallocation import Preallocation
from datastreamer.storage.header import records
from datastreamer.storage.header.records import Claim, CommitRecord
from datastreamer.storage.write.owned_file import OwnedFile, refusal
from datastreamer.storage.write.sync_policy import Durability

_log = logging.getLogger(__name__)

# If this many parts of an operation wait for the thread that writes them, the caller writes the
# next one.
_MOST_PLACING = 2


class UncommittedSpace:
    """The space that one operation uses before its commit."""

    def __init__(self, owned: OwnedFile, durability: Durability) -> None:
        self._owned = owned
        self._durability = durability
        self.room = Preallocation(owned.file)
        # Segments that a thread writes, in order.
        self._placing: deque[Placing] = deque()
        # The file's size before the open operation, or one that was rolled back, claimed space;
        # None if none did.
        self._size_before: int | None = None

    def place(self, arena: Buffer, segments: Segments, length: int) -> None:
        """Write parts of `arena` to their place after the end, invisible until a commit; the
        operation ends at `length` with them.

        A thread writes them if it is not too busy. If it fails, a later `place`, or the commit of
        this operation, raises its error.

        Raises `WriteFailed`; nothing visible has changed then, and the call can be repeated.
        """
        owned = self._owned
        # Under the other policies no caller waits for the sync after commits. (If the policy
        # becomes "commit" before the lock is acquired, two syncs run at once.)
        syncs = length >= self.room.size and self._durability.policy == "commit"
        with owned.exclusive() if syncs else owned.lock:
            while self._placing and self._placing[0].ended:
                self._finish_first()
            owned.ensure_writable()
            owned.abandon_truncated()
            self.claim()
            self.grow(length)
            try:
                if len(self._placing) < _MOST_PLACING:
                    # The commit has to wait for the thread.
                    owned.end.revoke()
                    self._placing.append(owned.file.place(arena, segments))
                    return
                view = memoryview(arena)
                for offset, start, size in segments:
                    owned.file.write(view[start : start + size], offset)
            except OSError as error:
                raise self._write_failed(error) from error

    def finish_placing(self, *, wanted: bool) -> None:
        """On return no thread writes, and if `wanted`, what it wrote is in the file. Requires the
        lock, which the thread does not acquire."""
        while wanted and self._placing:
            self._finish_first()
        while self._placing:
            # The last one first, which waits for all: after a signal's exception here the file may
            # be closed, and its descriptor belong to another.
            self._placing[-1].drop()
            self._placing.pop()

    def _finish_first(self) -> None:
        """Wait until the first part is in the file. Requires the lock."""
        try:
            self._placing[0].finish()
        except OSError as error:
            raise self._write_failed(error) from error
        self._placing.popleft()

    def claim(self) -> None:
        """Record that an operation uses space before its commit. Requires the lock."""
        if self._size_before is not None:
            return
        owned = self._owned
        claim = Claim(owned.epoch, owned.written.length, self.room.size)
        try:
            owned.write_span(records.put_claim(owned.page, claim))
        except OSError as error:
            raise self._write_failed(error) from error
        self._size_before = self.room.size
        owned.end.revoke()

    def committed(self) -> None:
        """The operation is committed: its space is the stream's."""
        self._size_before = None

    def release(self) -> None:
        """The operation ended without a commit: on return nothing of it is written any more, and
        the file has its size from before the operation.

        A refusal to shrink the file is logged, and tried again when the next operation begins.
        Nothing is shrunk while it is not known what the header on disk says.
        """
        owned = self._owned
        with owned.lock:
            self.finish_placing(wanted=False)
            if self._size_before is None or owned.closed or owned.failed:
                return
            owned.end.revoke()
            try:
                self.room.shrink(owned.written.length, self._size_before)
            except OSError as error:
                _log.warning(
                    "%s: the space of an operation that was rolled back is not returned: %s",
                    owned.path,
                    error.strerror or error,
                )
            else:
                self._size_before = None

    def release_left_over(self, record: CommitRecord) -> None:
        """At an open: release the space of an operation whose process ended before its commit.

        Only if this stream's own writer wrote the header last: another program may want the
        pages that it has allocated.
        """
        owned = self._owned
        claim = records.get_claim(owned.page)
        if claim is not None and claim.epoch == record.epoch and claim.length >= owned.head.length:
            self.room.shrink(owned.head.length, claim.size)

    def grow(self, length: int) -> None:
        """Ensure at least one unused byte after `length`. Requires the lock."""
        try:
            grown = self.room.grow(length)
        except OSError as error:
            raise self._write_failed(error) from error
        if grown and self._durability.policy == "commit":
            # A header must not claim more than the size on disk can hold.
            self._owned.end.changing(self._sync_size)

    def _sync_size(self) -> None:
        try:
            self._owned.file.sync()
        except OSError as error:
            self.room.undo_growth()
            self._durability.fail(error)
            raise self._write_failed(error) from error

    def _write_failed(self, error: OSError) -> WriteFailed:
        """The error for a write other than a commit's own; counted as those are."""
        self._owned.end.refused()
        return WriteFailed(self._owned.path, refusal(error))
