"""The one writer of a stream file: makes and opens it, commits to it, closes it.

Owns the writer's lock, what an open has to put right, and the order of writes that makes a
commit whole or absent. The reasons stand in ``docs/FILE.md``. Knows nothing of bookmarks' keys
or of operations' state; `stream.py` does.
"""

from __future__ import annotations

import logging
import os
import secrets
from collections.abc import Callable
from typing import NoReturn

from xxhash import xxh3_64

from datastreamer._packer import EntryPacker
from datastreamer.errors import (
    CommitInDoubt,
    DamagedEntry,
    EntriesLost,
    FileExists,
    FileReplaced,
    StreamLocked,
    WriteFailed,
)
from datastreamer.format import HEADER_PAGE_SIZE, PAGE_SIZE, Header, page_of, page_start
from datastreamer.storage.disk._commit import STEP_DATA, CommitStepFailed
from datastreamer.storage.disk.atomic_file import new_file, remove_left_overs
from datastreamer.storage.disk.file_ops import (
    Buffer,
    Disk,
    File,
    OsDisk,
    Placing,
    Segments,
    boot_id,
)
from datastreamer.storage.disk.identity import OpenPath
from datastreamer.storage.disk.preallocation import Room
from datastreamer.storage.disk.salvage import keep_beside, remove_begun
from datastreamer.storage.header import records
from datastreamer.storage.header import undo_journal as journal
from datastreamer.storage.header.records import Claim, CommitRecord, Head, Writer
from datastreamer.storage.header.recovery import (
    NO_HASH,
    Judgement,
    changing,
    hash_entries,
    judge,
    read_header,
)
from datastreamer.storage.read.file import open_file, os_error, read_page
from datastreamer.storage.write.changes import ChangeableFile, undo_update
from datastreamer.storage.write.state import refused
from datastreamer.storage.write.sync_policy import SyncPolicy, write_again

_log = logging.getLogger(__name__)

_CLOSED = (
    "the stream is closed; open it for writing when the disk works: that keeps the entries that "
    "are whole, and says which are not"
)


class PendingCommit:
    """An operation that was committed without waiting for the disk."""

    __slots__ = ("_number", "_writer")

    def __init__(self, writer: StreamWriter, number: int) -> None:
        self._writer = writer
        self._number = number

    def done(self) -> bool:
        """Whether it is on disk. Raises `CommitInDoubt` where it may never be."""
        return self._writer.reached(self._number)

    def wait(self, timeout: float | None = None) -> bool:
        """Return when it is on disk: True, or False after `timeout` seconds.

        Asks for a sync; all who wait share it. Raises `CommitInDoubt`, `EntriesLost`.
        """
        return self._writer.wait_for(self._number, timeout)


class StreamWriter(ChangeableFile):
    """A stream file open for writing.

    `head` is how far readers go, `written` where the next operation begins: what was
    committed without waiting lies between them until it is on disk, under the policy
    "commit". Safe between threads; one operation at a time is the caller's to see to.
    """

    def __init__(
        self, file: File, path: str, page: bytes, judged: Judgement, sync: SyncPolicy, disk: Disk
    ) -> None:
        super().__init__(file, path, page, judged, sync, disk)
        self._room = Room(file)
        # What `place` left to a thread; nothing is written behind the end before it is over.
        self._placing: Placing | None = None
        # The file's size before the open operation, or one that was rolled back, took space in
        # it before a commit; None where none did.
        self._claimed: int | None = None

    # Making and opening.

    @classmethod
    def create(
        cls,
        path: str | os.PathLike[str],
        header: Header,
        *,
        sync: SyncPolicy = "commit",
        disk: Disk | None = None,
    ) -> StreamWriter:
        """Make an empty stream, durably, and open it for writing.

        Raises `FileExists` where anything stands at `path`.
        """
        disk = disk or OsDisk()
        name = os.fspath(path)
        if disk.exists(name):
            raise FileExists(name, "exists already; a stream is never created over something")
        boot = boot_id()
        page = records.new_page(header)
        stream_id = secrets.token_bytes(16)
        empty = Head()
        records.put_record(
            page, CommitRecord(stream_id, 0, boot, empty, empty, empty, NO_HASH, NO_HASH)
        )
        try:
            with new_file(disk, name) as file:
                file.resize(HEADER_PAGE_SIZE + PAGE_SIZE)
                file.write(page, 0)
        except FileExistsError:
            raise FileExists(name, "exists already; a stream is never created over it") from None
        except OSError as error:
            raise os_error(name, error, "cannot be created", "no such folder") from error
        return cls.open_to_write(name, sync=sync, disk=disk)

    @classmethod
    def open_to_write(
        cls,
        path: str | os.PathLike[str],
        *,
        stream_type: int | None = None,
        sync: SyncPolicy = "commit",
        disk: Disk | None = None,
    ) -> StreamWriter:
        """Open an existing stream file for writing; takes the lock.

        Raises what `errors.StreamFileError` has below it.
        """
        disk = disk or OsDisk()
        shown = os.fspath(path)
        file = open_file(disk, path, shown, write=True)
        try:
            page = read_page(file)
            read_header(page, shown, stream_type)
            if not file.lock():
                raise locked_by(page, shown)
            why = OpenPath(disk, shown, file).difference()
            if why:
                raise FileReplaced(shown, f"{why}, before it was open; nothing was written")
            place = journal.place_of(path)
            for left in (shown, place + journal.SUFFIX):
                remove_left_overs(disk, left, file.access())
            remove_begun(disk, shown, file)
            undone = undo_update(disk, file, place, shown)
            page = read_page(file)
            header = read_header(page, shown, stream_type)
            judged = judge(file, page, shown, header)
            opened = cls(file, shown, page, judged, sync, disk)
            opened._take_over(judged.record, undone)
            return opened
        except OSError as error:
            file.close()
            raise os_error(shown, error, "cannot be opened for writing") from error
        except BaseException:
            file.close()
            raise

    def _take_over(self, record: CommitRecord | None, undone: bool) -> None:
        """Make the file this writer's: act on the judgement, sync, write a fresh record."""
        slots = records.get_synced(bytes(self._page))
        self.end.sequence = slots[0].sequence if slots else 0
        went_back = record is not None and record.after != self.head
        # With nothing written since.
        truncation = (self.head.entries, None)
        cut_back = any(change[1:] == truncation for change in records.get_changes(self._page))
        if went_back:
            assert record is not None
            self._keep_cut_bytes(record)
        if undone or went_back or (record is None and slots) or changing(bytes(self._page)):
            # Entries were taken back, or another program may have; or a change was cut off, and
            # who saw it begin has to hear of its end.
            self.epoch += 1
            self._forget_changes()
        self._room.round_up()
        if record is not None:
            self._return_claimed(record)
        if went_back or cut_back:
            self._note_taken_back(self._room.size)
        self._room.make(self.head.length)
        if record is not None:
            # What was not synced may still be on its way to the disk; and should a sync have
            # failed, the system takes it for clean without having written it.
            write_again(self.file, record.base, self.head)
        self.file.sync()
        span = records.put_writer(self._page, Writer(os.getpid(), self._boot))
        self.file.write(memoryview(self._page)[slice(*span)], span[0])
        self._write_clean()
        self._forget_doubt()
        self.file.sync()

    def _return_claimed(self, record: CommitRecord) -> None:
        """Return the space of an operation whose process ended before its commit.

        Only where this stream's own writer wrote the header last: another program may want the
        pages that it has allocated.
        """
        claim = records.get_claim(self._page)
        if claim is not None and claim.epoch == record.epoch and claim.length >= self.head.length:
            self._room.cut_back(self.head.length, claim.size)

    def _keep_cut_bytes(self, record: CommitRecord) -> None:
        """Copy what is about to be forgotten to a file beside, and say so."""
        cut, kept = self.head, record.after
        side = keep_beside(
            self._disk, self.path, "cut", self._page, self.file, cut.length, kept.length
        )
        if record != records.get_record(self._page):
            why = "did not reach the disk after a sync that failed"
        elif record.boot_id != self._boot:
            why = "did not reach the disk before the power cut"
        else:
            why = (
                "are not what was written, though the machine has not restarted since (its disk "
                "was detached or failed, or the file is damaged)"
            )
        _log.warning(
            "%s: entries %d to %d (bytes %d to %d) %s; the stream goes back to %d entries; "
            "the header page and those bytes are kept in %s",
            self.path,
            cut.entries,
            kept.entries - 1,
            cut.length,
            kept.length,
            why,
            cut.entries,
            side,
        )

    # Commits.

    def place(
        self, arena: Buffer, segments: Segments, length: int, *, behind: bool = False
    ) -> None:
        """Write parts of `arena` to their place behind the end, unseen until a commit; the
        operation ends at `length` with them.

        `behind`: a thread writes them; the next `place` or commit of this operation waits for
        it, and raises what it raised.

        Raises `WriteFailed`; nothing visible has changed then, and the same call may be made
        again.
        """
        if self._syncs_to_grow(length):
            with self._syncing:
                self._write_placed(arena, segments, length, behind)
        else:
            self._write_placed(arena, segments, length, behind)

    def _write_placed(self, arena: Buffer, segments: Segments, length: int, behind: bool) -> None:
        with self._lock:
            self._finish_placing(wanted=True)
            self.ensure_writable()
            self._abandon_taken_back()
            self._claim()
            self._make_room(length)
            try:
                if behind:
                    # `commit` has to look.
                    self.end.limit = -1
                    self._placing = self.file.place(arena, segments)
                    return
                view = memoryview(arena)
                for offset, start, size in segments:
                    self.file.write(view[start : start + size], offset)
            except OSError as error:
                raise self._write_failed(error) from error

    def _claim(self) -> None:
        """Record that an operation takes space before its commit, for the next open to return
        should this process end; holds the lock."""
        if self._claimed is not None:
            return
        claim = Claim(self.epoch, self.written.length, self._room.size)
        span = records.put_claim(self._page, claim)
        try:
            self.file.write(memoryview(self._page)[slice(*span)], span[0])
        except OSError as error:
            raise self._write_failed(error) from error
        self._claimed = self._room.size
        # `commit` has to look.
        self.end.limit = -1

    def return_claimed(self) -> None:
        """The operation that was open is over without a commit: nothing of it is written any
        more, and the file has the size that it had before, when this returns.

        A system that refuses to shrink the file is logged, and asked again when the next operation
        begins. Nothing is shrunk while it is not known what the header on disk says.
        """
        with self._lock:
            self._finish_placing(wanted=False)
            if self._claimed is None or self._closed or self.failed:
                return
            self.end.limit = -1
            try:
                self._room.cut_back(self.written.length, self._claimed)
            except OSError as error:
                _log.warning(
                    "%s: the space of an operation that was rolled back is not returned: %s",
                    self.path,
                    error.strerror or error,
                )
            else:
                self._claimed = None

    def _finish_placing(self, *, wanted: bool) -> None:
        """What a thread writes is in the file, or is not `wanted` any more, and no thread writes;
        holds the lock, which the thread does not take."""
        placing = self._placing
        if placing is None:
            return
        if wanted:
            try:
                placing.finish()
            except OSError as error:
                raise self._write_failed(error) from error
        else:
            placing.drop()
        self._placing = None

    def commit(
        self,
        packer: EntryPacker,
        hasher: Callable[[], xxh3_64] | None = None,
        *,
        wait: bool = True,
        begins: Head | None = None,
    ) -> Head:
        """Make the packer's entries part of the stream; gives its new end.

        `hasher()` gives the running hash over what `place` wrote before (None: nothing
        was). `begins` is where its entries begin; `EntriesLost` where the stream went back
        from there meanwhile. Returns as the sync policy says: under "commit" when all is on
        disk, unless `wait` is false; then it is not seen before it is.

        Raises `WriteFailed` or `FileReplaced` where nothing happened and the same call may be
        made again, `CommitInDoubt` where the disk does not tell; the stream is read-only until
        `mend` has done its work.
        """
        if hasher is None:
            head = self.end.commit_on(packer, self, wait)
            if head is not None:
                return head
        policy = self._policy
        sync = wait and policy == "commit"
        if sync or self._syncs_to_grow(packer.total_length):
            with self._syncing:
                return self._commit(packer, hasher, policy, sync, begins)
        return self._commit(packer, hasher, policy, sync, begins)

    def _commit(
        self,
        packer: EntryPacker,
        hasher: Callable[[], xxh3_64] | None,
        policy: SyncPolicy,
        sync: bool,
        begins: Head | None,
    ) -> Head:
        with self._lock:
            end = self.end
            self._finish_placing(wanted=hasher is not None)
            self.ensure_writable()
            self.ensure_in_place()
            if begins is not None and begins != end.written:
                raise EntriesLost(self.path, end.written.entries, begins.entries)
            self._abandon_taken_back()
            if packer.total_length >= self._room.size:
                self._claim()
                self._make_room(packer.total_length)
            placed = None if hasher is None else hasher()
            visible = sync or policy != "commit"
            settled = end.durable
            try:
                head = end.commit(
                    packer,
                    placed,
                    None if visible else self.reader.head,
                    sync,
                    self.wakers if visible else (),
                )
            except OSError as error:
                self.not_committed(error)
            if visible:
                self.reader.head = head
            end.unfinished = False
            self._claimed = None
            if sync:
                if settled + 1 < self.commits and self.on_settled is not None:
                    self.on_settled()
            else:
                if not self._sync_asked or head.length > self._sync_at:
                    self._ask_for_sync()
            # (Another may have been set between the question for it and the lock.)
            if visible and policy == self._policy:
                end.synced = sync
                end.limit = self._room.size - 1
                if not sync:
                    end.limit = min(end.limit, self._sync_at)
            if visible and self.inside_wakers:
                self.wake_inside()
            return head

    def takes_at_once(self, size: int) -> bool:
        """Whether an operation of `size` packed bytes goes into the file as large as it is: a
        commit that does not wait is some writes then, and no sync."""
        offset = self.written.length
        following = page_start(page_of(offset) + 1)
        end = offset + size if offset + size <= following else following + size
        return not self.failed and end < self._room.size

    def not_committed(self, error: OSError) -> NoReturn:
        """After a commit's writes that failed: page and end are as they were."""
        if isinstance(error, CommitStepFailed) and error.step == STEP_DATA:
            self.end.unfinished = False
        else:
            self._header_ahead = True
            self._fail(error)
        raise WriteFailed(self.path, refused(error)) from error

    def hasher(self) -> tuple[xxh3_64, Head]:
        """A copy of the running hash, for an operation that places, and where it began."""
        with self._lock:
            return self.end.running.copy(), self.end.mid

    def hasher_after_sync(self, placed: Head) -> xxh3_64:
        """The same, where the running hash began anew after a part of the operation, which
        ends at `placed`, was placed: that part is read again."""
        with self._lock:
            hasher: xxh3_64 = self.end.running.copy()
            if not hash_entries(self.file, self.written, placed, hasher):
                what = "what was placed of the operation is not there any more"
                raise DamagedEntry(self.path, self.written.length, what)
            return hasher

    def _write_failed(self, error: OSError) -> WriteFailed:
        """For what a commit needs beside its own writes; counted with those that fail."""
        self.end.refused()
        return WriteFailed(self.path, refused(error))

    def _syncs_to_grow(self, length: int) -> bool:
        """Whether the file grows for an operation that ends at `length`, by a sync of its own.

        Under the other policies nobody waits for the sync that follows commits, which takes as
        long as the disk does. (The policy may become "commit" before the lock is had: then two
        syncs are under way at the same time.)
        """
        return length >= self._room.size and self._policy == "commit"

    def _make_room(self, length: int) -> None:
        """Have at least one unused byte behind `length`; holds the lock."""
        try:
            grown = self._room.make(length)
        except OSError as error:
            raise self._write_failed(error) from error
        if grown and self._policy == "commit":
            # A header must not say more than the size on disk can hold.
            try:
                self.file.sync()
            except OSError as error:
                self._room.give_back()
                self._fail(error)
                raise self._write_failed(error) from error

    # The end.

    def close(self) -> None:
        """Leave a clean file behind: synced, with nothing for a power cut to take.

        Raises `CommitInDoubt` where what is committed cannot be brought to disk, or a commit or
        change was cut off, and `FileReplaced` where the path does not lead to that file; the file
        is closed all the same.
        """
        self._syncer.close()
        try:
            with self.alone():
                if self._closed:
                    return
                try:
                    self._finish_placing(wanted=False)
                    self._settle_all()
                    self.return_claimed()
                    self._leave_clean()
                except CommitInDoubt as doubt:
                    elsewhere = self._elsewhere_at_close()
                    if elsewhere is None:
                        raise
                    what = f"{doubt.what}; besides, {elsewhere.what}"
                    raise CommitInDoubt(self.path, what) from doubt
                else:
                    elsewhere = self._elsewhere_at_close()
                    if elsewhere is not None:
                        raise elsewhere
                finally:
                    self._closed = True
                    self.end.limit = -1
                    self.file.close()
        finally:
            self._tell_who_waits()

    def _settle_all(self) -> None:
        """Everything that is committed is on disk, and nothing else of ours, when this returns."""
        try:
            if self.mend() is None:
                self.sync_open_file()
        except CommitInDoubt as doubt:
            if not self._mendable:
                # Cut off by a signal, as a rule. What was acknowledged before is not at fault.
                try:
                    self.file.sync()
                except OSError as error:
                    base, written = self.end.base.entries, self.written.entries
                    if written > base:
                        what = f"entries {base} to {written - 1} may not be on disk"
                        why = f"{doubt.what}; {what}: {refused(error)}"
                        raise CommitInDoubt(self.path, why) from doubt
                raise
            if self._header_ahead or self.end.base != self.written:
                raise self.in_doubt(_CLOSED) from doubt
            # The sync succeeded, and only the header page's last write failed.
            self.end.durable = self.commits
        if self._gone_from is not None:
            raise self.in_doubt(_CLOSED)

    def _leave_clean(self) -> None:
        try:
            self._write_clean()
            self.file.sync()
        except OSError as error:
            _log.warning(
                "%s: all %d entries are on disk, but the clean end could not be written (%s); the "
                "next open compares the last entries with their hashes",
                self.path,
                self.written.entries,
                refused(error),
            )

    def _elsewhere_at_close(self) -> FileReplaced | None:
        """The error where the path does not lead to the file that is about to be closed."""
        why = self.opened_by.difference()
        if why:
            entries = self.written.entries
            self._closed_elsewhere = FileReplaced(
                self.path,
                f"{why}; the stream is closed, and its {entries} entries are not at this path as "
                "far as that can be looked up",
            )
        return self._closed_elsewhere


def locked_by(page: bytes, path: str) -> StreamLocked:
    """The error for a lock that another process holds. The header page names the process that
    opened the stream last: while another one is about to, or repairs it, that one has ended."""
    writer = records.get_writer(page)
    known = writer is not None and writer.boot_id == boot_id() and _is_alive(writer.pid)
    return StreamLocked(path, writer.pid if writer and known else 0)


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        pass  # another user's
    return True
