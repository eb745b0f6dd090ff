"""A stream: entries and bookmarks in one file, changed by atomic operations.

Owns the state of the operation and keeps file and bookmark index in step. Synchronous;
knows no network. One thread writes at a time; any number may read.
"""

from __future__ import annotations

import contextlib
import operator
import os
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import TracebackType

from datastreamer._packer import KEPT_BOOKMARKS
from datastreamer.errors import (
    BadArgument,
    BadEntryType,
    CommitInDoubt,
    EntriesLost,
    FileMissing,
    LeaseHeld,
    NoOperation,
    OperationOpen,
    StreamReadOnly,
    UnknownEntry,
    UpdateRefused,
)
from datastreamer.format import ENTRY_HEAD_SIZE, TYPE_BOOKMARK, U64_MAX, Header
from datastreamer.metrics.block import WriterNumbers
from datastreamer.storage.bookmarks.registry import index_opener
from datastreamer.storage.disk.file_ops import Buffer, Disk
from datastreamer.storage.disk.mounts import ensure_local
from datastreamer.storage.header.records import Agreement, Head, PublisherRecord
from datastreamer.storage.maintain.snapshot import Snapshot, snapshot_of
from datastreamer.storage.read.file import StreamFile
from datastreamer.storage.read.reader import Reader
from datastreamer.storage.view import IndexName, StreamView
from datastreamer.storage.write.atomic_op import AtomicOp
from datastreamer.storage.write.commit_doubt import raised_after
from datastreamer.storage.write.durability import PendingCommit, SyncPolicy
from datastreamer.storage.write.opening import create_stream, open_to_write
from datastreamer.storage.write.writer import StreamWriter

PathLike = str | os.PathLike[str]
ChangeCallback = Callable[[int, int | None, bool], None]

_MOST_MILLISECONDS = 24 * 60 * 60 * 1000

_open_streams: weakref.WeakSet[DataStream] = weakref.WeakSet()


class DataStream(StreamView):
    """A stream file with its bookmark index.

    Made by `create`, `open` or `open_or_create`; a context manager that closes it.
    """

    def __init__(
        self,
        file: StreamFile,
        index: IndexName,
        *,
        follow: bool = False,
        writer: StreamWriter | None = None,
    ) -> None:
        super().__init__(file, index, follow=follow)
        self._writer = writer
        # Called before each commit, which is not written if it raises.
        self.commit_guard: Callable[[], None] | None = None
        self._op = AtomicOp(self)
        # Only its holder may begin operations; while there is one, no entries are changed.
        self._lease: object = None
        self._on_change: list[ChangeCallback] = []
        self._numbers: WriterNumbers | None = None
        # Committed operations that become visible once they are on disk, and the number of
        # bookmarks that they keep in memory.
        self._unseen: deque[tuple[list[tuple[bytes, int]] | None, int, Head]] = deque()
        self._unseen_bookmarks = 0
        if writer is not None:
            try:
                self._bookmarks()
            except BaseException:
                writer.close()
                raise
            writer.durability.on_settled = self._settled
        _open_streams.add(self)

    # Making and opening.

    @classmethod
    def create(
        cls,
        path: PathLike,
        *,
        version: int = 1,
        system_id: int = 0,
        stream_type: int = 1,
        sync: SyncPolicy = "commit",
        index: IndexName = "lmdb",
        disk: Disk | None = None,
    ) -> DataStream:
        """Make a new, empty stream and open it for writing.

        `version` is a u8, `system_id` (the chain id, say) and `stream_type` are u64.
        `sync` is the sync policy. Under "commit" a commit returns when it is on disk. Under a
        number of milliseconds (at most a day) it returns at once and is on disk within that
        time. Under "os" it returns at once, and the system decides. Raises `FileExists`,
        `BadArgument`.
        """
        _check_number("stream version is a byte", version, 255)
        _check_number("system id is a u64", system_id, U64_MAX)
        _check_number("stream type is a u64", stream_type, U64_MAX)
        _check_policy(sync)
        index_opener(index)
        header = Header(version, system_id, stream_type)
        return cls._of(create_stream(path, header, sync=sync, disk=disk), index)

    @classmethod
    def _of(cls, writer: StreamWriter, index: IndexName) -> DataStream:
        return cls(writer.owned, index, writer=writer)

    @classmethod
    def open(
        cls,
        path: PathLike | int,
        *,
        stream_type: int | None = None,
        read_only: bool = False,
        follow: bool = False,
        sync: SyncPolicy = "commit",
        index: IndexName = "lmdb",
        name: str | None = None,
        disk: Disk | None = None,
    ) -> DataStream:
        """Open an existing stream, for writing by default.

        `read_only` opens it as it is and writes nothing, not even beside the file: later commits
        are not visible, and an iteration over entries that are truncated raises `NotFound`.
        `follow` does the same and sees what another process commits (`refresh`). `stream_type`
        is the expected type. `path` may be a descriptor that is open for reading; then `name` is
        the path that messages and the index use.

        Raises `FileMissing`, `NotAStream`, `WrongStreamType`, `StreamLocked`,
        `DamagedHeader`, `BadFileSize`, `BadArgument`.
        """
        _check_policy(sync)
        if follow and not isinstance(path, int):
            ensure_local(path, "following")
        if read_only or follow:
            read = StreamFile.open(path, stream_type=stream_type, disk=disk, name=name)
            return cls(read, index, follow=follow)
        if isinstance(path, int):
            raise BadArgument("a descriptor is opened for reading only")
        index_opener(index)
        writer = open_to_write(path, stream_type=stream_type, sync=sync, disk=disk)
        return cls._of(writer, index)

    @classmethod
    def open_or_create(
        cls,
        path: PathLike,
        *,
        version: int = 1,
        system_id: int = 0,
        stream_type: int = 1,
        sync: SyncPolicy = "commit",
        index: IndexName = "lmdb",
    ) -> DataStream:
        """Open the stream for writing, or create it; an existing one keeps its header."""
        try:
            return cls.open(path, stream_type=stream_type, sync=sync, index=index)
        except FileMissing:
            return cls.create(
                path,
                version=version,
                system_id=system_id,
                stream_type=stream_type,
                sync=sync,
                index=index,
            )

    # Atomic operations.

    def atomic_op(self) -> AtomicOp:
        """``with stream.atomic_op() as op: op.add_entry(...)``: commits, or rolls back."""
        return self._op

    def start_atomic_op(self, *, lease: object = None) -> None:
        """Open an operation. Raises `OperationOpen` if one is open, and `LeaseHeld` if another
        holds the lease."""
        writer, op = self._writer, self._op
        if self._lease is not lease:
            raise self._lent("operation")
        if writer is None or op.is_open or op._committing or not writer.end.ready:
            writer = self._ensure_startable()
        # First: after a sync that fails from now on, the commit checks again.
        op._failures = writer.owned.failures
        op._hasher = None
        op._start = start = writer.end.written
        op.begin(start[0], start[1])
        if self._lease is not lease:
            # Another thread lent the stream between the two checks; `lend` checks for an operation.
            op.close()
            raise self._lent("operation")

    def lend(self, lease: object) -> None:
        """Until `end_lease`, only operations with this `lease` begin, and no entries are changed.

        Raises `OperationOpen` if an operation is open, and `LeaseHeld` if the stream is lent
        already. From any thread.
        """
        self._ensure_open()
        self.writer()
        if self._lease is not None:
            raise self._lent("lease")
        self._lease = lease
        if self._op.is_open or self._op._committing:
            self._lease = None
            raise OperationOpen("an atomic operation of this process is open")

    def end_lease(self, lease: object) -> None:
        """End the lease, and roll back its open operation. Does nothing if another holds the
        lease.

        Raises `CommitInDoubt` as `rollback_atomic_op`; the lease has ended nevertheless.
        """
        if self._lease is lease and lease is not None:
            try:
                if not self.closed and self._op.is_open:
                    self.rollback_atomic_op()
            finally:
                self._lease = None

    def _lent(self, what: str) -> LeaseHeld:
        return LeaseHeld(
            f"{self.path}: no {what} here while a publisher holds the lease of the stream"
        )

    def _ensure_startable(self) -> StreamWriter:
        self._ensure_open()
        writer = self.writer()
        self._ensure_uninterrupted(writer)
        if self._op.is_open:
            raise OperationOpen("an atomic operation is open already; commit it or roll it back")
        if writer.owned.failed:
            self._repair()
            writer.owned.ensure_writable()
        # Of an earlier operation, if the system refused then.
        writer.uncommitted.release()
        return writer

    def _ensure_uninterrupted(self, writer: StreamWriter) -> None:
        """Raises `CommitInDoubt` if a signal's exception interrupted a commit: whether it was
        made is unknown."""
        op = self._op
        if op._committing:
            writer.owned.interrupt()
            op._committing = False
            op.close()
            writer.owned.ensure_writable()

    def add_entry(self, type: int, data: Buffer) -> int:
        """Add an event to the open operation; returns its number.

        `type` is any u32 but 0xb0, `data` at most 1,048,559 bytes. Raises `NoOperation`,
        `BadEntryType`, `EntryTooLarge`; the operation goes on without the entry.
        """
        try:
            return self._op.add_entry(type, data)
        except NoOperation:
            self._ensure_open()
            raise

    def add_bookmark(self, key: Buffer) -> int:
        """Add a bookmark of 1 to 16 bytes to the open operation; returns its entry number."""
        try:
            return self._op.add_bookmark(key)
        except NoOperation:
            self._ensure_open()
            raise

    def add_entries(self, type: int | Sequence[int], data: Iterable[Buffer]) -> range:
        """Add many events in one call; returns their numbers. On an error, none is added.

        `type` is one type for all, or one for each of `data`.
        """
        try:
            return self._op.add_entries(type, data)
        except NoOperation:
            self._ensure_open()
            raise

    def commit_atomic_op(self, *, wait: bool = True) -> PendingCommit | None:
        """Make the operation part of the stream.

        Under the sync policy "commit" it is on disk when this returns. With ``wait=False``
        this returns a `PendingCommit` at once under any policy; under "commit" the operation is
        not visible until it is on disk. Operations that do not wait share their syncs.

        Raises `NoOperation`; `WriteFailed` if the disk refused, `CommitInDoubt` if a header or a
        sync failed, and `FileReplaced` if the stream's path does not lead to the open file any
        more: the operation is still open then; try again, or roll back. Raises `EntriesLost` if
        a failed sync lost entries before it.
        """
        op = self._op
        if not op.is_open:
            self._ensure_open()
            raise NoOperation("no atomic operation is open")
        if self.commit_guard is not None:
            self.commit_guard()
        writer = self._writer
        assert writer is not None
        if op._committing:
            self._ensure_uninterrupted(writer)
        start = op._start.entries
        if op.next_number == start:
            op.close()
            return None if wait else PendingCommit(writer.durability, writer.end.commits)
        if writer.owned.failures != op._failures:
            self._ensure_repeatable(writer, op)
        op._committing = True
        if not wait:
            self._defer(op.bookmarks, start, Head(op.total_length, op.next_number))
        try:
            hasher = None if op._hasher is None else op._hash_of_placed
            head = writer.commit(op, hasher, wait=wait, begins=op._start)
        except Exception:
            # (A signal's exception leaves `_committing` set: whether it was made is unknown.)
            if not wait:
                self._unseen_bookmarks -= len(self._unseen.pop()[0] or ())
            if writer.owned.interrupted:
                op.close()
            op._committing = False
            raise
        op.close()
        pending = None
        if wait:
            bookmarks, keeper = op.bookmarks, self._keeper
            if bookmarks or bookmarks is None or keeper is None:
                self._index_committed(bookmarks, start, head, writer.end.base)
            else:
                keeper.passed(start, head, writer.end.base)
        else:
            pending = PendingCommit(writer.durability, writer.end.commits)
            writer.durability.announce()
        op._committing = False
        return pending

    @property
    def next_entry(self) -> int:
        """The first entry of the next operation, after all that are committed, visible or not."""
        return self.writer().end.written.entries

    @property
    def synced_entries(self) -> int:
        """How many entries are known to be on disk."""
        return self.writer().end.base.entries

    def ensure_in_place(self, *, always: bool = False) -> None:
        """Raises `FileReplaced` if the stream's path has not led to the open file for a second or
        longer; with `always`, if it does not now."""
        self.writer().owned.ensure_in_place(always=always)

    def can_commit_at_once(self, size: int) -> bool:
        """Whether ``commit(wait=False)`` of `size` bytes of entries, with their heads, does not
        wait for the disk: the file need not grow for it, and no sync has failed."""
        return self.writer().can_commit_at_once(size)

    def _ensure_repeatable(self, writer: StreamWriter, op: AtomicOp) -> None:
        """Recover from a failed sync. Raises if the open operation cannot be committed any more."""
        self._repair()
        written = writer.end.written
        if op._start != written:
            op.close()
            writer.uncommitted.release()
            raise EntriesLost(self.path, written.entries, op._start.entries)
        if op._hasher is not None:
            raise op.too_large_to_repeat()
        op._failures = writer.owned.failures

    def _defer(self, bookmarks: list[tuple[bytes, int]] | None, start: int, head: Head) -> None:
        """Keep an operation's bookmarks until it is on disk, for the index. All operations that
        wait keep at most as many as one may; the index reads the others from the file."""
        if bookmarks is not None:
            if self._unseen_bookmarks + len(bookmarks) > KEPT_BOOKMARKS:
                bookmarks = None
            else:
                self._unseen_bookmarks += len(bookmarks)
        self._unseen.append((bookmarks, start, head))

    def _index_committed(
        self, bookmarks: list[tuple[bytes, int]] | None, start: int, head: Head, synced: Head
    ) -> None:
        keeper = self._keeper
        if keeper is None:
            keeper = self._bookmarks()
        if bookmarks == []:
            keeper.passed(start, head, synced)
        else:
            keeper.committed(bookmarks, start, head, synced)

    def rollback_atomic_op(self) -> None:
        """Roll the open operation back, and return the space that it used in the file. No later
        open finds the operation once this returned.

        Raises `NoOperation`. Raises `CommitInDoubt` after a commit of the operation that failed or
        was interrupted, while the disk does not accept the previous header: another open may find
        the operation then. It is not open any more; once `sync`, or the begin of another
        operation, succeeds, it is rolled back.
        """
        self._ensure_open()
        op, writer = self._op, self.writer()
        if not op.is_open:
            raise NoOperation("no atomic operation is open")
        op.close()
        try:
            self._ensure_uninterrupted(writer)
            writer.durability.withdraw_header()
        finally:
            writer.uncommitted.release()

    # Syncs.

    @property
    def sync_policy(self) -> SyncPolicy:
        """ "commit", "os", or milliseconds; can be set while the stream is open.

        Setting it to "commit" syncs first.
        """
        return self.writer().durability.policy

    @sync_policy.setter
    def sync_policy(self, sync: SyncPolicy) -> None:
        _check_policy(sync)
        self._repaired().durability.policy = sync

    def sync(self) -> None:
        """Return when all that is committed is on disk, whatever the policy.

        Raises `CommitInDoubt` if the disk refuses, `EntriesLost`, `FileReplaced`.
        """
        self._repaired().durability.sync()

    def put_publisher(self, source: PublisherRecord) -> None:
        """Record the source that is about to be granted a lease; on disk on return.

        Raises `StreamClosed`, `StreamReadOnly`, and `WriteFailed` if the disk refuses.
        """
        self._repaired().notes.put_publisher(source)

    def _settled(self) -> None:
        """More is on disk than before. Called with the writer's lock held, from any thread."""
        head, unseen = self._file.head, self._unseen
        while unseen and unseen[0][2].entries <= head.entries:
            bookmarks, start, upto = unseen.popleft()
            self._unseen_bookmarks -= len(bookmarks or ())
            self._index_committed(bookmarks, start, upto, self.writer().end.base)
        if self._keeper is not None:
            self._keeper.synced(self.writer().end.base)

    def _repaired(self) -> StreamWriter:
        """The writer, recovered from a failed sync. Raises if that cannot be."""
        self._ensure_open()
        writer = self.writer()
        if writer.owned.failed:
            self._repair()
        return writer

    def _repair(self) -> None:
        writer = self.writer()
        lost_from = writer.durability.repair()
        if lost_from is None:
            return
        keeper = self._bookmarks()
        with (
            self._change(lost_from.entries, None),
            writer.owned.exclusive(),
            keeper.truncation(lost_from),
        ):
            loss = writer.changes.give_up(lost_from)
            self._unseen.clear()
            self._unseen_bookmarks = 0
        raise loss

    def add_waker(self, fd: int, *, inside: bool = False) -> None:
        """Write 8 bytes to the non-blocking descriptor `fd` after every commit.

        `inside` is for a reader in this process: it is woken when `total_entries` includes the
        commit, which is later than the file does.
        """
        if self._writer is not None:
            self._writer.owned.add_waker(fd, inside=inside)

    def remove_waker(self, fd: int) -> None:
        """Nothing is written to `fd` after this returns."""
        if self._writer is not None:
            self._writer.owned.remove_waker(fd)

    # Changing what is committed.

    def update_entry(self, number: int, type: int, data: Buffer) -> None:
        """Replace a committed event's data with the same number of bytes; durable on return.

        Raises `UnknownEntry`, `BadEntryType` and `UpdateRefused` (another type or length,
        a bookmark), `OperationOpen`, `FileReplaced`.
        """
        reader = self._ensure_changeable("update")
        entry = reader.entry(number)
        new = bytes(memoryview(data))  # bytes() alone would make zeros of a number
        if entry.type == TYPE_BOOKMARK:
            raise UpdateRefused(f"entry {number} is a bookmark, and those are not updated")
        if type == TYPE_BOOKMARK:
            raise BadEntryType("0xb0 is the bookmarks' own type")
        if entry.type != type:
            raise UpdateRefused(f"entry {number} is of type {entry.type}, not {type}")
        if len(entry.data) != len(new):
            raise UpdateRefused(f"entry {number} has {len(entry.data)} bytes, not {len(new)}")
        with self._change(number, number + 1):
            offset = reader.cursor(number).offset + ENTRY_HEAD_SIZE
            self.writer().changes.update(number, offset, entry.data, new)
            self._bookmarks().changed()

    def truncate(self, number: int) -> None:
        """Truncate the stream to `number` entries (0 up to, not including, the total); durable.

        Raises `UnknownEntry`, `OperationOpen`, `FileReplaced`.
        """
        reader = self._ensure_changeable("truncation")
        if not 0 <= number < self.total_entries:
            raise UnknownEntry(number, self.total_entries)
        offset = reader.cursor(number).offset
        keeper = self._bookmarks()
        writer, head = self.writer(), Head(offset, number)
        with self._change(number, None), writer.owned.exclusive():
            writer.durability.sync()
            with keeper.truncation(head):
                writer.changes.truncate(number, offset)

    @property
    def agreement(self) -> Agreement | None:
        """With which state of an upstream a relay's file agrees; None if that is not known."""
        return self.writer().notes.agreement

    def put_agreement(self, agreement: Agreement | None) -> None:
        """Record in the file with which state of an upstream it agrees."""
        self._repaired().notes.put_agreement(agreement)

    def _ensure_changeable(self, what: str) -> Reader:
        self._ensure_open()
        writer = self.writer()
        if self._lease is not None:
            raise self._lent(what)
        if self._op.is_open:
            raise OperationOpen(f"no {what} while an atomic operation is open")
        writer.uncommitted.release()
        self._repaired().durability.sync()
        return writer.owned.reader

    @contextlib.contextmanager
    def _change(self, start: int, stop: int | None) -> Iterator[None]:
        called = []
        try:
            for callback in list(self._on_change):
                callback(start, stop, False)
                called.append(callback)
            yield
        finally:
            for callback in called:
                callback(start, stop, True)

    def on_change(self, callback: ChangeCallback) -> Callable[[], None]:
        """Call `callback(start, stop, done)` before and after changes of committed entries.

        `done` is false before the entries from `start` up to `stop` (None: a truncation) are
        changed, and true after. It runs in the writer's thread, and the change waits for it.
        Returns a function that removes the callback.
        """
        self._on_change.append(callback)
        return lambda: self._on_change.remove(callback)

    # A copy.

    def snapshot(
        self,
        out: PathLike,
        *,
        advance: Callable[[int, int], None] = lambda done, total: None,
    ) -> Snapshot:
        """Copy what is committed to a new file `out`, on disk on return. The source is the open
        file, also if the stream's path does not lead to it any more (`FileReplaced`).

        `advance`, `out` and exceptions are as in `datastreamer.storage.maintain.snapshot`.
        """
        self._ensure_open()
        writer = self._writer
        if writer is not None and not writer.owned.failed:
            # Also what was committed without waiting; if the disk refuses, what is visible.
            with contextlib.suppress(CommitInDoubt):
                writer.durability.sync_open_file()
        opened_by = self._file.opened_by
        disk = None if opened_by is None else opened_by.disk
        return snapshot_of(self._file, out, advance=advance, disk=disk)

    # What is counted.

    def share_numbers(self) -> WriterNumbers | None:
        """The writer's counters, in memory that other processes can share; the same on each
        call until the stream is closed. None if it is open for reading."""
        writer = self._writer
        if writer is None:
            return None
        self._ensure_open()
        with writer.owned.exclusive():
            if self._numbers is None:
                self._numbers = WriterNumbers.create()
                writer.end.count_in(self._numbers.memory)
            return self._numbers

    # The end.

    def writer(self) -> StreamWriter:
        """The file as its writer. Raises `StreamReadOnly`."""
        if self._writer is not None:
            return self._writer
        raise StreamReadOnly(f"{self.path}: the stream is open for reading only")

    def close(self) -> None:
        """Roll back the open operation, bring all that is committed to disk, and close the file.

        Raises `CommitInDoubt` if the disk refuses, with the entries that may not be on disk, or
        may be; also after a commit or change that was interrupted. Raises `EntriesLost`, and
        `FileReplaced` if the path does not lead to the open file any more. The stream is closed
        nevertheless: a file that was removed is lost. Idempotent.
        """
        if self._file.closed:
            return
        writer = self._writer
        if writer is not None and self._op._committing:
            writer.owned.interrupt()
        self._op.close()
        try:
            if writer is not None:
                if writer.owned.failed:
                    self._repair()
                writer.uncommitted.release()
                writer.durability.sync_open_file()
        except EntriesLost:
            raise
        except CommitInDoubt:
            pass  # the writer's close tries once more, and raises
        finally:
            try:
                self._close_bookmarks()
            finally:
                try:
                    (self._file if writer is None else writer).close()
                finally:
                    if writer is not None and self._numbers is not None:
                        writer.end.count_in(None)
                        self._numbers.close()
                        self._numbers = None

    def __enter__(self) -> DataStream:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with raised_after(error):
            self.close()

    def _abandon(self) -> None:
        """In the child of a fork: close the descriptor, which holds the lock."""
        if not self._file.closed:
            self._op.close()
            if self._keeper is not None:
                self._keeper.abandon()
            self._file.abandon()


def _check_number(what: str, number: int, most: int) -> None:
    try:
        if 0 <= operator.index(number) <= most:
            return
    except TypeError:
        pass
    raise BadArgument(f"the {what}, not {number!r}")


def _check_policy(sync: object) -> None:
    milliseconds = (
        isinstance(sync, int) and not isinstance(sync, bool) and 0 < sync <= _MOST_MILLISECONDS
    )
    if not milliseconds and sync not in ("commit", "os"):
        raise BadArgument(
            f'the sync policy is "commit", "os" or a number of milliseconds, at most '
            f"{_MOST_MILLISECONDS} (a day), not {sync!r}"
        )


def _abandon_all() -> None:
    for stream in list(_open_streams):
        stream._abandon()


os.register_at_fork(after_in_child=_abandon_all)
