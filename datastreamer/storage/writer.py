"""The one writer of a stream file: commits, syncs, truncations, updates.

Owns the writer's lock, the order of writes that makes a commit whole or absent, what is
known to be on disk, and what to do when a sync fails. The reasons stand in
``docs/FILE.md``. Knows nothing of bookmarks' keys or of operations' state; `stream.py`
does.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import threading
from collections.abc import Callable, Iterator
from typing import Literal, NoReturn

from xxhash import xxh3_64

from datastreamer._packer import EntryPacker
from datastreamer.errors import (
    CommitInDoubt,
    DamagedEntry,
    EntriesLost,
    FileExists,
    StreamClosed,
    StreamLocked,
    WriteFailed,
)
from datastreamer.format import HEADER_PAGE_SIZE, PAGE_SIZE, Header
from datastreamer.storage import journal
from datastreamer.storage import record as records
from datastreamer.storage._commit import STEP_DATA, CommitStepFailed, StreamEnd
from datastreamer.storage.disk import Disk, File, OsDisk, boot_id
from datastreamer.storage.file import StreamFile, open_file, os_error, read_page
from datastreamer.storage.journal import Undo
from datastreamer.storage.newfile import new_file
from datastreamer.storage.record import CommitRecord, Head, SyncedHeader, Writer
from datastreamer.storage.recovery import (
    NO_HASH,
    Judgement,
    hash_entries,
    judge,
    longest_whole,
    read_header,
)
from datastreamer.storage.room import Room
from datastreamer.storage.side import keep_beside
from datastreamer.storage.syncer import Syncer

SyncPolicy = Literal["commit", "os"] | int

_log = logging.getLogger(__name__)

# Under the policy "os" syncs follow at this distance, so that a power cut leaves a bounded
# part of the stream to be checked, and bookmarks do not wait in memory for ever.
_OS_SYNC_SECONDS = 10.0
_OS_SYNC_BYTES = 64 << 20
_INTERRUPTED = (
    "a commit or change was interrupted, by Ctrl-C perhaps; it may be in the file; open the "
    "stream again to go on"
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


class StreamWriter(StreamFile):
    """A stream file open for writing.

    `head` is how far readers go, `written` where the next operation begins: what was
    committed without waiting lies between them until it is on disk, under the policy
    "commit". Safe between threads; one operation at a time is the caller's to see to.
    """

    writable = True

    def __init__(
        self, file: File, path: str, page: bytes, judged: Judgement, sync: SyncPolicy, disk: Disk
    ) -> None:
        super().__init__(file, path, page, judged)
        # Called, with the lock held, when more is on disk, and maybe to be seen, than before.
        self.on_settled: Callable[[], None] | None = None
        # Descriptors that a commit writes to: those of other processes, which read the mark,
        # and those of threads of this one, which read `head`.
        self.wakers: list[int] = []
        self.inside_wakers: list[int] = []
        self._disk = disk
        self._place = os.path.abspath(path)
        self._policy: SyncPolicy = sync
        self._boot = boot_id()
        # Its `limit` is set by a commit that has looked at all there is, and taken back by
        # whatever changes what that commit saw: policy, failure, a sync that has been asked for.
        self.end = StreamEnd(file, self._page, judged.head, records.COMMIT_LAYOUT)
        self._room = Room(file)
        # Taken before the lock by whoever syncs: of two syncs at once, only one is told of a
        # failure.
        self._syncing = threading.RLock()
        # (Entering and leaving a lock is one step to a signal; a condition it can come into.)
        self._reaching = threading.Lock()
        self._reached = threading.Condition(self._reaching)
        self._syncer = Syncer(self._sync_behind)
        self._sync_asked = False
        self._sync_at = 0
        # Why nothing is written any more, whether that can be mended, and where not all could.
        self._failure: str | None = None
        self._mendable = False
        self._gone_from: Head | None = None
        # Whether nobody but the log has heard of it.
        self.untold = False
        self._losses: list[tuple[int, int, EntriesLost]] = []
        self.failures = 0

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
            undone = undo_update(disk, file, os.path.abspath(path))
            page = read_page(file)
            header = read_header(page, shown, stream_type)
            judged = judge(file, page, shown, header, boot_id())
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
        if went_back:
            assert record is not None
            self._keep_cut_bytes(record)
        if undone or went_back or (record is None and slots):
            # Entries were taken back, or another program may have.
            self.epoch += 1
        self._room.round_up()
        self._room.make(self.head.length)
        if record is not None and not went_back:
            # What was not synced may still be on its way to the disk; and should a sync have
            # failed, the system takes it for clean without having written it.
            if longest_whole(self.file, record) != record.after:
                raise DamagedEntry(
                    self.path,
                    record.base.length,
                    f"entries {record.base.entries} to {record.after.entries - 1} are not what "
                    "was written there, by a sync that failed, perhaps, or another program; "
                    "`datastreamer repair` says what it can keep",
                )
            _write_again(self.file, record.base, record.after)
        self.file.sync()
        span = records.put_writer(self._page, Writer(os.getpid(), self._boot))
        self.file.write(memoryview(self._page)[slice(*span)], span[0])
        self._write_clean()
        self._forget_doubt()
        self.file.sync()

    def _keep_cut_bytes(self, record: CommitRecord) -> None:
        """Copy what is about to be forgotten to a file beside, and say so."""
        cut, kept = self.head, record.after
        side = keep_beside(
            self._disk, self.path, "cut", self._page, self.file, cut.length, kept.length
        )
        in_doubt = record != records.get_record(self._page)
        _log.warning(
            "%s: entries %d to %d (bytes %d to %d) did not reach the disk %s; "
            "the stream goes back to %d entries; the header page and those bytes are kept in %s",
            self.path,
            cut.entries,
            kept.entries - 1,
            cut.length,
            kept.length,
            "after a sync that failed" if in_doubt else "before the power cut",
            cut.entries,
            side,
        )

    # State.

    @property
    def written(self) -> Head:
        """Where the next operation begins."""
        return self.end.written

    @property
    def commits(self) -> int:
        """How many commits were written."""
        return self.end.commits

    @property
    def synced(self) -> Head:
        """How far it is known to be on disk."""
        return self.end.base

    @property
    def hashed_from(self) -> Head:
        """Where the running hash began, which `hasher` gives."""
        return self.end.mid

    @property
    def policy(self) -> SyncPolicy:
        """When what is committed is brought to disk: "commit", "os", or milliseconds.

        It may be changed at any time; a change to "commit" syncs first.
        """
        return self._policy

    @policy.setter
    def policy(self, policy: SyncPolicy) -> None:
        with self.alone():
            if policy == "commit":
                self.sync()
            self._policy = policy
            self._sync_asked = False
            self.end.limit = -1
            if self.end.base != self.written:
                self._ask_for_sync()

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """No commit, sync or change by another thread meanwhile."""
        with self._syncing, self._lock:
            yield

    def refresh(self) -> bool:
        return False  # nobody else writes

    # Writing.

    def place(self, packer: EntryPacker) -> None:
        """Write the packed entries to their place behind the end, unseen until a commit.

        Raises `WriteFailed`; nothing visible has changed then.
        """
        with self._syncing, self._lock:
            self.ensure_writable()
            self._make_room(packer.total_length)
            try:
                for offset, start, length in packer.segments:
                    self.file.write(packer.arena[start : start + length], offset)
            except OSError as error:
                raise WriteFailed(self.path, refused(error)) from error

    def commit(
        self,
        packer: EntryPacker,
        hasher: Callable[[], xxh3_64] | None = None,
        *,
        wait: bool = True,
    ) -> Head:
        """Make the packer's entries part of the stream; gives its new end.

        `hasher()` gives the running hash over what `place` wrote before (None: nothing
        was). Returns as the sync policy says: under "commit" when all is on disk, unless
        `wait` is false; then it is not seen before it is.

        Raises `WriteFailed` where nothing happened and the same call may be made again,
        `CommitInDoubt` where the disk does not tell; the stream is read-only until `mend`
        has done its work.
        """
        if hasher is None:
            head = self.end.commit_on(packer, self, wait)
            if head is not None:
                return head
        policy = self._policy
        sync = wait and policy == "commit"
        if sync or packer.total_length >= self._room.size:
            with self._syncing:
                return self._commit(packer, hasher, policy, sync)
        return self._commit(packer, hasher, policy, sync)

    def _commit(
        self,
        packer: EntryPacker,
        hasher: Callable[[], xxh3_64] | None,
        policy: SyncPolicy,
        sync: bool,
    ) -> Head:
        with self._lock:
            end = self.end
            self.ensure_writable()
            if packer.total_length >= self._room.size:
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

    def not_committed(self, error: OSError) -> NoReturn:
        """After a commit's writes that failed: page and end are as they were."""
        if isinstance(error, CommitStepFailed) and error.step == STEP_DATA:
            self.end.unfinished = False
        else:
            self._fail(error)
        raise WriteFailed(self.path, refused(error)) from error

    def hasher(self) -> xxh3_64:
        """A copy of the running hash, for an operation that spills."""
        with self._lock:
            copy: xxh3_64 = self.end.running.copy()
            return copy

    def hasher_after_sync(self, placed: Head) -> xxh3_64:
        """The same, where the running hash began anew after a part of the operation, which
        ends at `placed`, was placed: that part is read again."""
        with self._lock:
            hasher: xxh3_64 = self.end.running.copy()
            if not hash_entries(self.file, self.written, placed, hasher):
                what = "what was placed of the operation is not there any more"
                raise DamagedEntry(self.path, self.written.length, what)
            return hasher

    # Syncs.

    def sync(self) -> None:
        """All that is committed is on disk when this returns."""
        with self.alone():
            self.ensure_writable()
            if self.end.base == self.written:
                return
            self.end.unfinished = True
            try:
                self.file.sync()
            except OSError as error:
                self._fail(error)
            else:
                self._settle(self.written, self.commits)
                self.end.unfinished = False

    def _ask_for_sync(self) -> None:
        policy = self._policy
        self._sync_asked = True
        self._sync_at = self.end.base.length + _OS_SYNC_BYTES
        if policy == "commit" or self.written.length > self._sync_at:
            self._sync_at = self.written.length + _OS_SYNC_BYTES
            self._syncer.ask()
        elif policy == "os":
            self._syncer.ask(_OS_SYNC_SECONDS)
        else:
            # The sync takes its time too.
            self._syncer.ask(policy / 2000)

    def _sync_behind(self) -> None:
        """A sync while commits go on; in the syncer's thread."""
        with self._syncing:
            with self._lock:
                self._sync_asked = False
                self.end.limit = -1
                if self.failed:
                    self._tell_who_waits()
                if self._failure or self._closed or self.end.base == self.written:
                    return
                head, commits, failures = self.written, self.commits, self.failures
                end = self.end
                end.first, end.mid = end.running.intdigest(), head
                end.running = xxh3_64()
            try:
                self.file.sync()
            except OSError as error:
                failed = error
            else:
                with self._lock:
                    # After a failure meanwhile, mending has settled more than this, or will.
                    if not self._failure and failures == self.failures:
                        try:
                            self._settle(head, commits)
                        except CommitInDoubt as doubt:
                            _log.error("%s", doubt)
                return
            with self._lock:
                try:
                    self._fail(failed)
                except WriteFailed as doubt:
                    self.untold = True
                    _log.error("%s", doubt)

    def _settle(self, head: Head, commits: int) -> None:
        """Everything up to `head`, the first `commits` commits, is on disk. Holds the lock."""
        end = self.end
        if head == end.written:
            end.all_on_disk(head)
        else:
            end.base = end.mid = head
            end.first = NO_HASH
        seen = max(self.reader.head, head)
        end.put(head, head, end.written, NO_HASH, end.running.intdigest(), seen)
        self._put_synced(head)
        try:
            self._write_back()
        except OSError as error:
            self._fail(error)
            return
        end.durable = commits
        moved = seen != self.reader.head
        if moved:
            self.reader.head = seen
        if self.on_settled is not None:
            self.on_settled()
        if moved:
            _wake([*self.wakers, *self.inside_wakers])
        if head != self.written and not self._sync_asked:
            self._ask_for_sync()
        self._tell_who_waits()

    def _tell_who_waits(self) -> None:
        with self._reaching:
            self._reached.notify_all()

    def announce(self) -> None:
        """Have `on_settled` called now."""
        with self._lock:
            if self.on_settled is not None:
                self.on_settled()

    def reached(self, number: int) -> bool:
        """Whether commit `number` is on disk. Raises `CommitInDoubt` where it may never be."""
        for first, last, loss in self._losses:
            if first < number <= last:
                raise loss
        if number <= self.end.durable:
            return True
        if self._failure is not None:
            self.untold = False
            raise CommitInDoubt(self.path, self._failure)
        if self._closed:
            raise StreamClosed(f"{self.path}: the stream was closed before the sync")
        return False

    def wait_for(self, number: int, timeout: float | None) -> bool:
        """Return when commit `number` is on disk; False after `timeout` seconds."""
        if self.reached(number):
            return True
        self._syncer.ask()
        with self._reaching:
            return self._reached.wait_for(lambda: self.reached(number), timeout)

    # Failures.

    def _fail(self, error: OSError) -> None:
        """After a header or sync that failed: nothing is trusted to be on disk that was not
        before. Returns where the unsynced commits are on disk after all; the caller's own
        writes are not."""
        self.failures += 1
        base, written = self.end.base.entries, self.written.entries
        waiting = f"entries {base} to {written - 1} may not be on disk; " if written > base else ""
        self._failure = (
            f"{refused(error)}; {waiting}whether the last operation is on disk is not known; "
            "nothing more is written until the disk takes writes again"
        )
        self._mendable = True
        self.end.limit = -1
        self.end.unfinished = False
        try:
            self._mend()
        except OSError as again:
            raise CommitInDoubt(self.path, self._failure) from again
        finally:
            self._tell_who_waits()
        if self._gone_from is not None:
            raise CommitInDoubt(self.path, self._failure) from error

    def mend(self) -> Head | None:
        """Try to get over a failed sync: None where that is done (or nothing was to do).

        A head where the entries behind it cannot be brought to disk any more: the caller
        has to `give_up` them. Raises `CommitInDoubt` while the disk refuses.
        """
        if not self._mendable:
            return None
        with self.alone():
            if self._mendable and self._gone_from is None:
                try:
                    self._mend()
                except OSError as error:
                    assert self._failure is not None
                    raise CommitInDoubt(self.path, self._failure) from error
            return self._gone_from

    def _mend(self) -> None:
        """First make what is on disk for sure the whole stream, on disk; then bring the rest
        there once more: the system may have marked it clean without having written it."""
        end = self.end
        base, mid, written = end.base, end.mid, end.written
        hashes = end.first, end.running.intdigest()
        seen = self.reader.head
        try:
            if written != base:
                # Should the process end in between, the next open finds here what there was.
                span = records.put_doubt(
                    self._page,
                    CommitRecord(
                        self.stream_id, self.epoch, self._boot, base, mid, written, *hashes
                    ),
                )
                self.file.write(memoryview(self._page)[slice(*span)], span[0])
            end.put(base, base, base, NO_HASH, NO_HASH, seen)
            self._write_header()
            self.file.sync()
            for start, stop, expected in ((base, mid, hashes[0]), (mid, written, hashes[1])):
                if not self._is_whole(start, stop, expected):
                    self._gone_from = base
                    return
                _write_again(self.file, start, stop)
            end.put(base, mid, written, *hashes, seen)
            self._write_header()
            self.file.sync()
        except OSError:
            # Should the process end now, the system still has what the disk does not take.
            end.put(base, mid, written, *hashes, seen)
            with contextlib.suppress(OSError):
                self._write_header()
            raise
        if written != base:
            _log.warning(
                "%s: a sync failed; entries %d to %d were written again and are on disk",
                self.path,
                base.entries,
                written.entries - 1,
            )
        self._failure, self._mendable, self.untold = None, False, False
        self._settle(written, self.commits)
        with contextlib.suppress(OSError):
            self._forget_doubt()

    def _forget_doubt(self) -> None:
        start, size = records.DOUBT_OFFSET, 512
        if any(self._page[start : start + size]):
            self._page[start : start + size] = bytes(size)
            self.file.write(bytes(size), start)

    def _is_whole(self, start: Head, stop: Head, expected: int) -> bool:
        hasher = xxh3_64()
        return hash_entries(self.file, start, stop, hasher) and hasher.intdigest() == expected

    def give_up(self, head: Head) -> EntriesLost:
        """Go back to `head`, behind which the entries could not be brought to disk."""
        with self.alone():
            loss = EntriesLost(self.path, head.entries, self.written.entries)
            self._losses.append((self.end.durable, self.commits, loss))
            self._failure, self._mendable, self._gone_from = None, False, None
            self.untold = False
            self._change(lambda: None, head)
            self.end.durable = self.commits
            with contextlib.suppress(OSError):
                self._forget_doubt()
            _log.error("%s", loss)
            return loss

    # Changes of what is committed.

    def truncate(self, number: int, offset: int) -> None:
        """Cut back to `number` entries, which end at `offset`; durable on return."""
        with self.alone():
            self.ensure_writable()
            self.sync()
            self._change(lambda: None, Head(offset, number))

    def update(self, offset: int, old: bytes, new: bytes) -> None:
        """Replace the `old` bytes of an entry's data at `offset`; durable on return, and
        after a crash the one or the other."""
        with self.alone():
            self.ensure_writable()
            self.sync()
            # No range of the record may cover what is about to change: a power cut would
            # take its hash for lost bytes.
            try:
                self.file.sync()
            except OSError as error:
                self._fail(error)
                raise WriteFailed(self.path, refused(error)) from error
            undo = Undo(self.stream_id, self.epoch, self.header.pack(), offset, old, new)
            self.end.unfinished = True
            try:
                journal.put(self._disk, self._place, undo)
            except OSError as error:
                if self._disk.exists(self._place + journal.SUFFIX):
                    # The next open would take it for an update that was cut off.
                    self._failure = f"{refused(error)}; open the stream again to go on"
                    raise CommitInDoubt(self.path, self._failure) from error
                self.end.unfinished = False
                raise WriteFailed(self.path, refused(error)) from error
            self._change(
                lambda: self.file.write(new, offset),
                self.head,
                lambda: journal.remove(self._disk, self._place),
            )

    def _change(
        self,
        write: Callable[[], None],
        head: Head,
        clean_up: Callable[[], None] = lambda: None,
    ) -> None:
        """Raise the epoch around a change of what was committed; `clean_up` once it is on disk."""
        with self.reader.changing():
            self._change_held(write, head, clean_up)
        _wake([*self.wakers, *self.inside_wakers])

    def _change_held(
        self, write: Callable[[], None], head: Head, clean_up: Callable[[], None]
    ) -> None:
        self.end.unfinished = True
        self.epoch += 1
        header = self._header_at(head)
        try:
            records.put_header(self._page, header)
            self._put_record(head)
            self._write_header()
            write()
            self.file.sync()
            self._put_synced(head)
            records.put_mark(self._page, self.epoch, head)
            self._write_back()
            clean_up()
        except OSError as error:
            # Half done, maybe; what is to be believed is for the next open to say.
            self._failure = (
                f"{refused(error)} in the middle of a truncation or update; open the stream again"
            )
            self.end.limit = -1
            self.end.unfinished = False
            raise CommitInDoubt(self.path, self._failure) from error
        self.end.written = head
        self.end.all_on_disk(head)
        self.reader.head = head
        self.end.unfinished = False

    # The header page.

    def _write_clean(self) -> None:
        """A record with an empty range: nothing is left that a power cut could take."""
        head = self.written
        self.end.all_on_disk(head)
        records.put_header(self._page, self._header_at(head))
        self._put_record(head)
        self._put_synced(head)
        records.put_mark(self._page, self.epoch, head)
        self._write_back()

    def _write_header(self) -> None:
        start, end = records.BEFORE_SYNC
        self.file.write(memoryview(self._page)[start:end], start)

    def _write_back(self) -> None:
        start, end = records.WITHOUT_SYNC
        self.file.write(memoryview(self._page)[start:end], start)

    def _put_record(self, head: Head) -> None:
        records.put_record(
            self._page,
            CommitRecord(
                self.stream_id, self.epoch, self._boot, head, head, head, NO_HASH, NO_HASH
            ),
        )

    def _put_synced(self, head: Head) -> None:
        self.end.sequence += 1
        sequence = self.end.sequence
        records.put_synced(
            self._page,
            sequence & 1,
            SyncedHeader(sequence, self.stream_id, self.epoch, self._header_at(head)),
        )

    def _make_room(self, length: int) -> None:
        """Have at least one unused byte behind `length`; holds both locks."""
        try:
            grown = self._room.make(length)
        except OSError as error:
            raise WriteFailed(self.path, refused(error)) from error
        if grown and self._policy == "commit":
            # A header must not say more than the size on disk can hold.
            try:
                self.file.sync()
            except OSError as error:
                self._room.give_back()
                self._fail(error)
                raise WriteFailed(self.path, refused(error)) from error

    # Who is told.

    def wake_inside(self) -> None:
        _wake(self.inside_wakers)

    def add_waker(self, fd: int, *, inside: bool) -> None:
        with self._lock:
            (self.inside_wakers if inside else self.wakers).append(fd)

    def remove_waker(self, fd: int) -> None:
        """Nothing is written to `fd` any more when this returns."""
        with self._lock:
            for wakers in (self.wakers, self.inside_wakers):
                with contextlib.suppress(ValueError):
                    wakers.remove(fd)

    # The end.

    def ensure_writable(self) -> None:
        """Raises `StreamClosed`, `CommitInDoubt`."""
        if self._closed:
            raise StreamClosed(f"{self.path}: the stream is closed")
        if self.failed:
            self.untold = False
            raise CommitInDoubt(self.path, self._failure or "")

    @property
    def failed(self) -> bool:
        """Whether a header or sync failed, or was interrupted: nothing more is written."""
        if self._failure is None and not self.end.unfinished:
            return False  # without the lock: a commit may fail right behind any answer
        with self._lock:
            if self.end.unfinished and self._failure is None:
                self._failure = _INTERRUPTED
            return self._failure is not None

    def interrupt(self) -> None:
        """Write nothing more until another open: a signal came, and it is not known to whom a
        commit was told."""
        with self._lock:
            self.end.unfinished = True
            self.end.limit = -1

    @property
    def interrupted(self) -> bool:
        """Whether only another open can tell what was written."""
        return self.failed and not self._mendable

    def close(self) -> None:
        """Leave a clean file behind: synced, with nothing for a power cut to take."""
        self._syncer.close()
        with self.alone():
            if self._closed:
                return
            if self._mendable:
                with contextlib.suppress(CommitInDoubt):
                    self.mend()
            try:
                if not self.failed:
                    try:
                        self.sync()
                        self._write_clean()
                        self.file.sync()
                    except OSError as error:
                        raise CommitInDoubt(self.path, refused(error)) from error
            finally:
                self._closed = True
                self.end.limit = -1
                self.file.close()
        self._tell_who_waits()

    def abandon(self) -> None:
        self.end.limit = -1
        super().abandon()


def refused(error: OSError) -> str:
    """What went wrong, for a message."""
    return f"the system refused to write: {error.strerror or error}"


def _write_again(file: File, start: Head, stop: Head) -> None:
    """Write what stands between two heads to its place, so that the next sync syncs it."""
    offset = start.length
    while offset < stop.length:
        part = file.read(min(PAGE_SIZE, stop.length - offset), offset)
        if not part:
            return
        file.write(part, offset)
        offset += len(part)


def locked_by(page: bytes, path: str) -> StreamLocked:
    """The error for a lock that somebody else holds; the header page says who."""
    writer = records.get_writer(page)
    known = writer is not None and writer.boot_id == boot_id()
    return StreamLocked(path, writer.pid if writer and known else 0)


def undo_update(disk: Disk, file: File, path: str) -> bool:
    """Put back what an update that a crash cut off has overwritten; True if there was one."""
    if not disk.exists(path + journal.SUFFIX):
        return False
    undo = journal.find(disk, path)
    if undo is None:
        # The update had not begun.
        journal.remove(disk, path)
        return False
    page = read_page(file)
    record = records.get_record(page)
    same = (
        record is not None
        and record.stream_id == undo.stream_id
        and undo.epoch <= record.epoch <= undo.epoch + 1
        and read_header(page, path).pack() == undo.header
    )
    found = undo.standing(file) if same else None
    if found is None:
        _log.warning(
            "%s: the journal of an update does not fit the file, which was changed since; it is "
            "kept as %s",
            path,
            journal.set_aside(disk, path),
        )
        return False
    # Also where they stand there: an open before this one may have put them back, and failed
    # to bring them to disk.
    file.write(undo.old, undo.offset)
    file.sync()
    _log.warning(
        "%s: a crash cut off an update; the %d bytes at %d are as before it",
        path,
        len(undo.old),
        undo.offset,
    )
    journal.remove(disk, path)
    return True


def _wake(wakers: list[int]) -> None:
    for waker in wakers:
        with contextlib.suppress(BlockingIOError):
            os.write(waker, b"\0\0\0\0\0\0\0\1")
