"""A stream: entries and bookmarks in one file, which atomic operations append to.

Keeps file and bookmark index consistent. Synchronous; knows no network. One thread writes at a
time; any number may read.
"""

from __future__ import annotations

import contextlib
import os
import warnings
import weakref
from collections.abc import Callable, Iterable, Sequence
from types import TracebackType

from datastreamer.errors import (
    BadArgument,
    CommitInDoubt,
    EntriesLost,
    FileMissing,
    OperationOpen,
    StreamReadOnly,
    UnknownEntry,
)
from datastreamer.format import ENTRY_HEAD_SIZE, Header, page_of
from datastreamer.storage.bookmarks.registry import index_opener
from datastreamer.storage.disk.file_ops import Buffer, Disk
from datastreamer.storage.disk.mounts import ensure_local
from datastreamer.storage.maintain.snapshot import Snapshot, snapshot_of
from datastreamer.storage.pages.hashes import last_page
from datastreamer.storage.pages.page_states import Verify, check_verify
from datastreamer.storage.parts import Parts
from datastreamer.storage.read.file import StreamFile
from datastreamer.storage.view import IndexName, StreamView
from datastreamer.storage.write._lane import Appending
from datastreamer.storage.write.atomic_op import AtomicOp, raised_after
from datastreamer.storage.write.changes import ChangeWriter
from datastreamer.storage.write.opening import create_stream, open_to_write
from datastreamer.storage.write.pending_bookmarks import PendingBookmarks
from datastreamer.storage.write.sync_policy import SyncPolicy, check_policy
from datastreamer.storage.write.writer import StreamWriter

PathLike = str | os.PathLike[str]

_open_streams: weakref.WeakSet[DataStream] = weakref.WeakSet()


class DataStream(StreamView, Appending):
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
        deferred = None
        if writer is not None:
            try:
                deferred = PendingBookmarks(writer.owned, self.bookmarks)
            except BaseException:
                writer.close()
                raise
            writer.durability.on_settled = deferred.settled
            writer.floor.falling = self.bookmarks.emptied
        self._deferred = deferred
        self._op = AtomicOp(self, writer, deferred)
        self._appender = self._op.appender
        self.parts = Parts(self)
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
        check_policy(sync)
        index_opener(index)
        header = Header(version, system_id, stream_type)
        writer = create_stream(path, header, sync=sync, disk=disk)
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
        verify: Verify = "cold",
        name: str | None = None,
        disk: Disk | None = None,
    ) -> DataStream:
        """Open an existing stream, for writing by default.

        `read_only` opens it as it is and writes nothing, not even beside the file: later commits
        are not visible, and an iteration over entries that are truncated raises `NotFound`.
        `follow` does the same and sees what another process commits (`refresh`). `stream_type`
        is the expected type. `verify` says when a page is compared with its checksum: "cold", when
        this stream first reads it, if it is not in the page cache; "always", when this stream first
        reads it; "never". A page that differs raises `DamagedPage`; one without a checksum is read
        as it is. `path` may be a descriptor that is open for reading; then `name` is
        the path that messages and the index use.

        Raises `FileMissing`, `NotAStream`, `WrongStreamType`, `StreamLocked`,
        `DamagedHeader`, `BadFileSize`, `BadArgument`.
        """
        check_policy(sync)
        check_verify(verify)
        if follow and not isinstance(path, int):
            ensure_local(path, "following")
        if read_only or follow:
            read = StreamFile.open(path, stream_type=stream_type, disk=disk, name=name)
            read.verify_reads(verify)
            return cls(read, index, follow=follow)
        if isinstance(path, int):
            raise BadArgument("a descriptor is opened for reading only")
        index_opener(index)
        writer = open_to_write(path, stream_type=stream_type, sync=sync, disk=disk)
        writer.owned.verify_reads(verify)
        return cls(writer.owned, index, writer=writer)

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

    @property
    def commit_guard(self) -> Callable[[], None] | None:
        """Called before each commit, which is not written if it raises."""
        return self._appender.commit_guard

    @commit_guard.setter
    def commit_guard(self, guard: Callable[[], None] | None) -> None:
        self._appender.commit_guard = guard

    def add_entries(self, type: int | Sequence[int], data: Iterable[Buffer]) -> range:
        """Add many events in one call; returns their numbers. On an error, none is added.

        `type` is one type for all, or one for each of `data`.
        """
        return self._op.add_entries(type, data)

    def rollback_atomic_op(self) -> None:
        """Roll the open operation back, and return the space that it used in the file. After that
        no open finds the operation.

        Raises `NoOperation`. Raises `CommitInDoubt` if a commit of the operation failed or was
        interrupted and the disk does not accept the previous header: another open may find the
        operation. It is closed; the next `sync` or begin of an operation that succeeds rolls it
        back.
        """
        self._op.rollback()

    # Syncs.

    @property
    def sync_policy(self) -> SyncPolicy:
        """ "commit", "os", or milliseconds; can be set while the stream is open.

        Setting it to "commit" syncs first.
        """
        return self._ensure_writable().durability.policy

    @sync_policy.setter
    def sync_policy(self, sync: SyncPolicy) -> None:
        check_policy(sync)
        self._repaired().durability.policy = sync

    def sync(self) -> None:
        """Return when all that is committed is on disk, whatever the policy.

        Raises `CommitInDoubt` if the disk refuses, `EntriesLost`, `FileReplaced`.
        """
        self._repaired().durability.sync()

    def _ensure_writable(self) -> StreamWriter:
        """The file as its writer. Raises `StreamReadOnly`."""
        if self._writer is not None:
            return self._writer
        raise StreamReadOnly(f"{self.path}: the stream is open for reading only")

    def _repaired(self) -> StreamWriter:
        """The writer, after recovery from a failed sync. Raises if recovery fails."""
        self._ensure_open()
        writer = self._ensure_writable()
        if writer.owned.failed:
            self._repair()
        return writer

    def _repair(self) -> None:
        writer = self._ensure_writable()
        lost_from = writer.durability.repair()
        if lost_from is None:
            return
        with (
            self.parts.feed.change(lost_from.entries, None, lost_from.length),
            writer.owned.exclusive(),
            self.bookmarks.truncation(lost_from),
        ):
            loss = writer.changes.give_up(lost_from)
            if self._deferred is not None:
                self._deferred.clear()
        raise loss

    # Changing what is committed.

    def update_entry(self, number: int, type: int, data: Buffer) -> None:
        """Replace a committed event's data with the same number of bytes; durable on return.

        Raises `UnknownEntry`, `BadEntryType` and `UpdateRefused` (another type or length,
        a bookmark), `OperationOpen`, `FileReplaced`, `DamagedPage` if the entry's page does not
        match its checksum, and `ServerFailed` if a serving process does not confirm the change.
        """
        changes = self._ensure_changeable("update")
        new = bytes(memoryview(data))  # bytes() alone would make zeros of a number
        old = changes.updatable(number, type, new).data
        offset = self._file.reader.cursor(number).offset + ENTRY_HEAD_SIZE
        # What is in the archive alone is fetched before anyone has to wait.
        with (
            self._ensure_writable().floor.bringing_back(page_of(offset)),
            self.parts.feed.change(number, number + 1),
        ):
            changes.update(number, offset, old, new)
            self.bookmarks.changed()

    def truncate(self, number: int) -> None:
        """Truncate the stream to `number` entries (0 up to, not including, the total); durable.

        Raises `UnknownEntry`, `OperationOpen`, `FileReplaced`, `DamagedEntry` if the page that is
        to keep a part of its entries is damaged, and `ServerFailed` if a serving process does not
        confirm the change.
        """
        changes = self._ensure_changeable("truncation")
        if not 0 <= number < self.total_entries:
            raise UnknownEntry(number, self.total_entries)
        head = changes.end_at(number)
        writer = self._ensure_writable()
        # What is in the archive alone is fetched before anyone has to wait.
        with (
            writer.floor.truncating(last_page(head.length)) as settle,
            self.parts.feed.change(number, None, head.length),
            writer.owned.exclusive(),
        ):
            writer.durability.sync()
            with self.bookmarks.truncation(head):
                changes.truncate(head, settle)

    def _ensure_changeable(self, what: str) -> ChangeWriter:
        self._ensure_open()
        writer = self._ensure_writable()
        if self._appender.lease is not None:
            raise self._op.lent(what)
        if self._op.is_open:
            raise OperationOpen(f"no {what} while an atomic operation is open")
        writer.uncommitted.release()
        self._repaired().durability.sync()
        return writer.changes

    # A copy.

    def snapshot(
        self,
        out: PathLike,
        *,
        verify: bool = True,
        whole: bool = False,
        advance: Callable[[int, int], None] = lambda done, total: None,
    ) -> Snapshot:
        """Copy what is committed to a new file `out`, on disk on return. The source is the open
        file, also if the stream's path does not lead to it any more (`FileReplaced`).

        The options and exceptions are as in `datastreamer.storage.maintain.snapshot`.
        """
        self._ensure_open()
        writer = self._writer
        if writer is not None and not writer.owned.failed:
            # Also what was committed without waiting; if the disk refuses, what is visible.
            with contextlib.suppress(CommitInDoubt):
                writer.durability.sync_open_file()
        opened_by = self._file.opened_by
        disk = None if opened_by is None else opened_by.disk
        options = {"verify": verify, "whole": whole}
        return snapshot_of(self._file, out, **options, advance=advance, disk=disk)

    # The end.

    def close(self) -> None:
        """Roll back the open operation, bring all that is committed to disk, and close the file.

        Entries of an open operation are discarded with a `ResourceWarning`; not so at the end of a
        `with` block that an exception ends, and those of a lease.

        Raises `CommitInDoubt` if the disk refuses, with the entries that may not be on disk, or
        may be; also after a commit or change that was interrupted. Raises `EntriesLost`, and
        `FileReplaced` if the path does not lead to the open file any more. The stream is closed
        nevertheless: a file that was removed is lost. Idempotent.
        """
        if self._file.closed:
            return
        writer = self._writer
        if writer is None:
            discarded = self._op.discard()
        else:
            with writer.owned.lock:  # a commit of another thread ends first
                discarded = self._op.discard()
        try:
            if writer is not None:
                if writer.owned.failed:
                    self._repair()
                writer.uncommitted.release()
                writer.durability.sync_open_file()
        except EntriesLost:
            raise
        except CommitInDoubt:
            pass  # the writer's close tries again, and raises
        finally:
            try:
                self._close_bookmarks()
            finally:
                try:
                    (self._file if writer is None else writer).close()
                finally:
                    self.parts.counters.close()
        if discarded:
            warnings.warn(discarded, ResourceWarning, stacklevel=2)

    def __enter__(self) -> DataStream:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is not None:
            self._op.close()  # the exception rolls back, as that of `with stream.atomic_op()`
        with raised_after(error):
            self.close()

    def _abandon(self) -> None:
        """In the child of a fork: close the descriptor, which holds the lock."""
        if not self._file.closed:
            self._op.close()
            if self._keeper is not None:
                self._keeper.abandon()
            self._file.close()


def _abandon_all() -> None:
    for stream in list(_open_streams):
        stream._abandon()


os.register_at_fork(after_in_child=_abandon_all)
