"""Applies a publisher's operation to the file: appends it, or compares it if it is there already.

Owns the choice between the two, and the Result of an operation that is refused. Knows no connection
and no event loop: its functions block, and are called in threads if that takes long.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Final

from datastreamer._codec import EntryBatch, scan
from datastreamer.errors import CommitInDoubt, CorruptEntries, DatastreamerError, WriteFailed
from datastreamer.format import (
    RESULT_BAD_OPERATION,
    RESULT_IN_DOUBT,
    RESULT_NOT_WRITTEN,
    RESULT_OTHER_ENTRIES,
    RESULT_PAST_THE_END,
    RESULT_TOO_LARGE,
    TYPE_BOOKMARK,
)
from datastreamer.protocol.publish.messages import Commit, encode_refusal
from datastreamer.storage.stream import DataStream
from datastreamer.storage.write.background import PendingCommit

CLOSING: Final = (RESULT_BAD_OPERATION,)
"""Results after which the connection is closed: its further requests cannot be trusted."""


class OperationRefused(Exception):
    """The operation was refused; `answer` is the Result for the publisher."""

    def __init__(self, number: int, why: str) -> None:
        super().__init__(why)
        self.number = number
        self.answer = encode_refusal(number, why)


def commit_together(
    stream: DataStream, lease: object, commits: Sequence[Commit]
) -> PendingCommit | None:
    """Append consecutive operations with one commit: all or none.

    None if that cannot be done; then the stream is unchanged, and applying each operation alone
    shows the reason.
    """
    payload = b"".join([commit.payload for commit in commits])
    first = commits[0].first
    try:
        stream.start_atomic_op(lease=lease)
    except DatastreamerError:
        return None
    op = stream.atomic_op()
    try:
        batch = scan(payload, first)
        if op.next_number != first or not _is_made_of(batch, commits, len(payload)):
            return None
        op.add_batch(batch)
        return stream.commit_atomic_op(wait=False)
    except DatastreamerError:
        return None
    finally:
        if op.is_open:
            # If it is in doubt, applying the first operation alone reports it.
            with contextlib.suppress(CommitInDoubt):
                stream.rollback_atomic_op()


def _is_made_of(batch: EntryBatch, commits: Sequence[Commit], size: int) -> bool:
    """Whether `batch` consists of exactly the entries that `commits` declare."""
    offsets, count = batch.offsets, len(batch)
    entries = at = 0
    for commit in commits:
        if (offsets[entries] - offsets[0] if entries < count else batch.nbytes) != at:
            return False
        entries += commit.entries
        at += len(commit.payload)
        if entries > count:
            return False
    return entries == count and batch.nbytes == size and _has_good_bookmarks(batch)


def _has_good_bookmarks(batch: EntryBatch) -> bool:
    return batch.count(TYPE_BOOKMARK) == len(batch.bookmarks())


class PublishedOperation:
    """An operation that begins with entry `first`, of the holder of `lease`.

    Raises `OperationRefused`, here and in its methods; then it has ended and none of it is in the
    stream. `size` is the number of bytes of its entries, at most `most`.
    """

    def __init__(self, stream: DataStream, lease: object, first: int, most: int) -> None:
        self.first = self.next = first
        self.size = 0
        self._stream = stream
        self._most = most
        try:
            stream.start_atomic_op(lease=lease)
        except CommitInDoubt as error:
            # The operation in doubt may be this one, sent before.
            raise OperationRefused(RESULT_IN_DOUBT, str(error)) from error
        except DatastreamerError as error:
            raise OperationRefused(RESULT_NOT_WRITTEN, str(error)) from error
        end = stream.atomic_op().next_number
        if first > end:
            self.roll_back()
            raise OperationRefused(
                RESULT_PAST_THE_END,
                f"the operation begins with entry {first}; the next entry is {end}",
            )
        self.compared = first < end
        """Whether it is compared with entries in the stream instead of appended."""
        if self.compared:
            self.roll_back()

    def add(self, payload: bytes) -> None:
        """Add packed entries with the next numbers."""
        try:
            batch = self._checked(payload)
            if self.compared:
                self._compare(batch, payload)
            else:
                self._stream.atomic_op().add_batch(batch)
        except WriteFailed as error:
            self.roll_back()
            raise OperationRefused(RESULT_NOT_WRITTEN, str(error)) from error
        except BaseException:
            self.roll_back()
            raise
        self.next = batch.next_number

    def _checked(self, payload: bytes) -> EntryBatch:
        try:
            batch = scan(payload, self.next)
        except CorruptEntries as error:
            raise OperationRefused(RESULT_BAD_OPERATION, f"in its entries, {error}") from None
        if batch.nbytes != len(payload):
            raise OperationRefused(
                RESULT_BAD_OPERATION,
                f"{len(payload) - batch.nbytes} bytes after entry {batch.next_number - 1} are no "
                "entry",
            )
        if not _has_good_bookmarks(batch):
            raise OperationRefused(RESULT_BAD_OPERATION, "a bookmark's key is 1 to 16 bytes")
        self.size += len(payload)
        if self.size > self._most:
            raise OperationRefused(
                RESULT_TOO_LARGE, f"an operation of more than {self._most} bytes of entries"
            )
        return batch

    def _compare(self, batch: EntryBatch, payload: bytes) -> None:
        stream, at = self._stream, 0
        stop = batch.next_number
        if stop > stream.total_entries:
            self._sync()
            if stop > stream.total_entries:
                raise OperationRefused(
                    RESULT_OTHER_ENTRIES,
                    f"the operation ends with entry {stop - 1}, but the stream ends with entry "
                    f"{stream.total_entries - 1}",
                )
        for stored in stream.batches(self.next, stop):
            packed = stored.packed()
            if payload[at : at + len(packed)] != packed:
                raise OperationRefused(
                    RESULT_OTHER_ENTRIES,
                    f"entries {stored.first_number} to {stored.next_number - 1} of the operation "
                    "differ from those in the stream",
                )
            at += len(packed)
        if at != len(payload):
            raise OperationRefused(
                RESULT_OTHER_ENTRIES, f"entries {self.next} to {stop - 1} were truncated meanwhile"
            )

    def _sync(self) -> None:
        try:
            self._stream.sync()
        except DatastreamerError as error:
            raise OperationRefused(RESULT_IN_DOUBT, str(error)) from error

    def commit(self, count: int) -> PendingCommit | None:
        """Commit: the entries are in the stream now, and on disk when the pending commit is done;
        None: they are on disk already."""
        try:
            if self.next - self.first != count:
                raise OperationRefused(
                    RESULT_BAD_OPERATION,
                    f"the commit declares {count} entries, but {self.next - self.first} were sent",
                )
            if self.compared:
                self._sync()
                return None
            return self._stream.commit_atomic_op(wait=False)
        except CommitInDoubt as error:
            raise OperationRefused(RESULT_IN_DOUBT, str(error)) from error
        except DatastreamerError as error:
            raise OperationRefused(RESULT_NOT_WRITTEN, str(error)) from error
        finally:
            self.roll_back()

    def roll_back(self) -> None:
        """Discard what is not committed. Idempotent. After an `OperationRefused` raised here, part
        of the operation may be in the stream."""
        if self._stream.atomic_op().is_open:
            try:
                self._stream.rollback_atomic_op()
            except CommitInDoubt as error:
                raise OperationRefused(RESULT_IN_DOUBT, str(error)) from error
