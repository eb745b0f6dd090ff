"""A stream file: created, opened, appended to, cut back, updated.

Owns the header page, the file's size, the writer's lock and the order of writes that
makes a commit whole or absent. Knows nothing of bookmarks' keys or of operations'
state; `stream.py` does.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import threading
import time
from collections.abc import Callable
from typing import Literal

from xxhash import xxh3_64

from datastreamer._packer import EntryPacker
from datastreamer.errors import (
    CommitInDoubt,
    DamagedEntry,
    FileExists,
    FileMissing,
    NotAStream,
    StreamClosed,
    StreamFileError,
    StreamLocked,
    StreamReadOnly,
    WriteFailed,
)
from datastreamer.format import (
    HEADER_OFFSET,
    HEADER_PAGE_SIZE,
    PAGE_SIZE,
    Header,
    page_of,
    page_start,
)
from datastreamer.storage import record as records
from datastreamer.storage._commit import STEP_DATA, CommitStepFailed
from datastreamer.storage.disk import Disk, File, OsDisk, OsFile, boot_id
from datastreamer.storage.reader import Reader
from datastreamer.storage.record import CommitRecord, Head, SyncedHeader, Writer
from datastreamer.storage.recovery import (
    NO_HASH,
    Judgement,
    changing,
    hash_entries,
    judge,
    read_header,
    visible,
)

SyncPolicy = Literal["commit", "os"]

_log = logging.getLogger(__name__)

# A file grows by a page at first; a growth that follows the one before within a second
# doubles the step, up to 256 MiB.
_MAX_STEP = 256
_TORN_READS = 20
# The part of the header page that commits and changes write.
_SEEN_BYTES = records.WITHOUT_SYNC[1]
_INTERRUPTED = (
    "a commit or change was interrupted, by Ctrl-C perhaps; it may be in the file; open the "
    "stream again to go on"
)
_NOTHING = (0, 0)


class StreamFile:
    """One stream file, open.

    `header` is what is committed and may be read; `reader` reads it. A writer holds the
    lock until `close`. `path` is for messages only once the file is open.
    """

    def __init__(self, file: File, path: str, page: bytes, judged: Judgement) -> None:
        self.path = path
        self.file = file
        self._header = judged.header
        self.stream_id = judged.stream_id
        self.epoch = judged.epoch
        self.writable = False
        self.reader = Reader(file, path, judged.head)
        # Descriptors that a commit writes to: those of other processes, which read the mark,
        # and those of threads of this one, which read `head`.
        self.wakers: list[int] = []
        self.inside_wakers: list[int] = []
        self._page = bytearray(page)
        # What of it a reader beside a writer looked at last.
        self._seen = bytes(page[:_SEEN_BYTES])
        self._unsettled = False
        self._closed = False
        self._lock = threading.RLock()
        # Writer's state. `_base` is the last head known to be on disk, `_running` the hash
        # of the entries from there to the head. (A sync in the background of commits would
        # begin a second segment at the record's `mid`; without one, mid is base.)
        self._policy: SyncPolicy = "commit"
        self._boot = b""
        self._base = judged.head
        self._running = xxh3_64()
        self._sequence = 0
        self._size = 0
        self._step = 1
        self._grown_at = 0.0
        self._failure: str | None = None

    # Making and opening.

    @classmethod
    def create(
        cls,
        path: str | os.PathLike[str],
        header: Header,
        *,
        sync: SyncPolicy = "commit",
        disk: Disk | None = None,
    ) -> StreamFile:
        """Make an empty stream, durably, and open it for writing.

        Raises `FileExists` where anything stands at `path`.
        """
        disk = disk or OsDisk()
        name = os.fspath(path)
        if disk.exists(name):
            raise FileExists(name, "exists already; a stream is never created over something")
        temporary = f"{name}.{secrets.token_hex(4)}.new"
        boot = boot_id()
        page = records.new_page(header)
        stream_id = secrets.token_bytes(16)
        empty = Head()
        records.put_record(
            page, CommitRecord(stream_id, 0, boot, empty, empty, empty, NO_HASH, NO_HASH)
        )
        try:
            file = disk.create(temporary)
            try:
                file.resize(HEADER_PAGE_SIZE + PAGE_SIZE)
                file.write(page, 0)
                file.sync()
                disk.publish(temporary, name)
            except BaseException:
                with contextlib.suppress(OSError):
                    disk.unlink(temporary)
                raise
            finally:
                file.close()
        except FileExistsError:
            raise FileExists(name, "exists already; a stream is never created over it") from None
        except OSError as error:
            raise _os_error(name, error, "cannot be created", "no such folder") from error
        return cls.open(name, sync=sync, disk=disk)

    @classmethod
    def open(
        cls,
        path: str | os.PathLike[str] | int,
        *,
        stream_type: int | None = None,
        write: bool = True,
        sync: SyncPolicy = "commit",
        disk: Disk | None = None,
        name: str | None = None,
    ) -> StreamFile:
        """Open an existing stream file; `path` may be a descriptor (for reading only).

        Raises what `errors.StreamFileError` has below it.
        """
        disk = disk or OsDisk()
        shown = name or (f"descriptor {path}" if isinstance(path, int) else os.fspath(path))
        file = _open_file(disk, path, shown, write)
        try:
            page = _read_page(file)
            header = read_header(page, shown, stream_type)
            if write and not file.lock():
                writer = records.get_writer(page)
                known = writer is not None and writer.boot_id == boot_id()
                raise StreamLocked(shown, writer.pid if writer and known else 0)
            if write:
                page = _read_page(file)
                header = read_header(page, shown, stream_type)
            boot = boot_id()
            if not write and file.locked_elsewhere() and not _of_another_boot(page, boot):
                return cls._open_beside_writer(file, shown, page, header)
            judged = judge(file, page, shown, header, boot)
            opened = cls(file, shown, page, judged)
            if write:
                opened._take_over(judged, sync, disk)
            return opened
        except OSError as error:
            file.close()
            doing = "cannot be opened for writing" if write else "cannot be read"
            raise _os_error(shown, error, doing) from error
        except BaseException:
            file.close()
            raise

    @classmethod
    def _open_beside_writer(cls, file: File, path: str, page: bytes, header: Header) -> StreamFile:
        """Nothing is judged while somebody writes: his mark says how far to go."""
        head = Head(header.total_length, header.total_entries)
        judged = Judgement(header, head, head, None, records.NO_ID, 0, False)
        opened = cls(file, path, page, judged)
        opened._see(page)
        return opened

    def _take_over(self, judged: Judgement, sync: SyncPolicy, disk: Disk) -> None:
        """Make the file this writer's: act on the judgement, sync, write a fresh record."""
        self.writable = True
        self._policy = sync
        self._boot = boot_id()
        slots = records.get_synced(bytes(self._page))
        self._sequence = slots[0].sequence if slots else 0
        if judged.went_back:
            self._keep_cut_bytes(judged, disk)
        if judged.went_back or (judged.record is None and slots):
            # Entries were taken back, or another program may have.
            self.epoch += 1
        self._size = self.file.size()
        short = -(self._size - HEADER_PAGE_SIZE) % PAGE_SIZE
        if short:
            self._resize(self._size + short)
        self._make_room(judged.head.length)
        # What the judgement let stand may still be on its way to the disk.
        self.file.sync()
        span = records.put_writer(self._page, Writer(os.getpid(), self._boot))
        self.file.write(memoryview(self._page)[slice(*span)], span[0])
        self._write_clean()

    def _keep_cut_bytes(self, judged: Judgement, disk: Disk) -> None:
        """Copy what is about to be forgotten to a file beside, and say so."""
        record = judged.record
        assert record is not None
        cut, kept = judged.head, record.after
        side = f"{self.path}.{time.strftime('%Y%m%dT%H%M%S')}.{secrets.token_hex(2)}.cut"
        saved = disk.create(f"{side}.new")
        try:
            saved.write(self._page, 0)
            offset, at = cut.length, HEADER_PAGE_SIZE
            while offset < kept.length:
                part = self.file.read(min(PAGE_SIZE, kept.length - offset), offset)
                if not part:
                    break
                saved.write(part, at)
                offset, at = offset + len(part), at + len(part)
            saved.sync()
        finally:
            saved.close()
        disk.publish(f"{side}.new", side)
        _log.warning(
            "%s: entries %d to %d (bytes %d to %d) did not reach the disk before the power cut; "
            "the stream goes back to %d entries; the header page and those bytes are kept in %s",
            self.path,
            cut.entries,
            kept.entries - 1,
            cut.length,
            kept.length,
            cut.entries,
            side,
        )

    # State.

    @property
    def header(self) -> Header:
        """The header as it is committed and may be seen."""
        return self._header_at(self.reader.head)

    def _header_at(self, head: Head) -> Header:
        version, system_id, stream_type, _, _ = self._header
        return Header(version, system_id, stream_type, *head)

    @property
    def head(self) -> Head:
        """How far the committed, visible stream goes."""
        return self.reader.head

    @property
    def synced(self) -> Head:
        """How far it is known to be on disk (for a writer)."""
        return self._base

    @property
    def policy(self) -> SyncPolicy:
        return self._policy

    def refresh(self) -> bool:
        """Look at the header page again (a reader beside a writer); True if it moved.

        A rise of `epoch` means that entries were taken back or changed.
        """
        # As it was: also what an open judged not to have reached the disk stays so.
        if self.file.read(_SEEN_BYTES, 0) == self._seen:
            return False
        with self._lock:
            return self._see(_read_page(self.file))

    def outdated(self) -> bool:
        """Whether entries were taken back or changed since this reader last looked.

        What he reads without looking may be of another history then, or of none: bytes of
        an operation that is not committed, where entries stood that he still counts.
        """
        for _ in range(_TORN_READS):
            page = _read_page(self.file)
            if page[:_SEEN_BYTES] == self._seen:
                return False
            record = records.get_record(page)
            if record is not None:
                return record.epoch != self.epoch
        # Another program's header.
        return read_header(page, self.path).total_entries < self.head.entries

    @property
    def changing(self) -> bool:
        """Whether a writer elsewhere takes back or changes entries, as `refresh` saw it.

        What is read of them meanwhile may be half of each.
        """
        return self._unsettled and self.file.locked_elsewhere()

    def _see(self, page: bytes) -> bool:
        """Believe a header page; True if the stream moved."""
        before = (self.head, self.epoch)
        for _ in range(_TORN_READS):
            header = read_header(page, self.path)
            seen = visible(page)
            if seen is not None:
                record = records.get_record(page)
                assert record is not None
                self.stream_id = record.stream_id
                break
            again = _read_page(self.file)
            if again == page and not self.file.locked_elsewhere():
                # It holds still, and no writer of ours is at work: written by a program
                # that keeps no records.
                seen = Head(header.total_length, header.total_entries), self.epoch
                break
            page = again
        else:
            return False
        self._page[:] = page
        self._seen = page[:_SEEN_BYTES]
        self._unsettled = changing(page)
        if seen == before:
            return False
        head, epoch = seen
        back = head.entries < before[0].entries
        changed = back or epoch != self.epoch
        self.epoch = max(epoch, self.epoch + back)
        self._header, self.reader.head = header, head
        if changed:
            self.reader.forget()
        return True

    # Writing.

    def place(self, packer: EntryPacker) -> None:
        """Write the packed entries to their place behind the end, unseen until a commit.

        Raises `WriteFailed`; nothing visible has changed then.
        """
        self._ensure_writable()
        try:
            self._make_room(packer.total_length)
            for offset, start, length in packer.segments:
                self.file.write(packer.arena[start : start + length], offset)
        except OSError as error:
            raise WriteFailed(self.path, _refused(error)) from error

    def commit(self, packer: EntryPacker, hasher: xxh3_64 | None) -> None:
        """Make the packer's entries part of the stream.

        `hasher` continues the running hash over what `place` wrote before (None: nothing
        was). Returns as the sync policy says: under "commit" when all is on disk.

        Raises `WriteFailed` where nothing happened and the same call may be made again,
        `CommitInDoubt` where the disk does not tell; the stream is then read-only.
        """
        with self._lock:
            self._ensure_writable()
            # As Head(...) makes it, in half the time.
            head = tuple.__new__(Head, (packer.total_length, packer.next_number))
            # A copy, so that a commit that fails may be made again.
            running = (hasher or self._running).copy()
            for part in packer.entry_spans():
                running.update(part)
            if packer.total_length >= self._size:
                try:
                    self._make_room(packer.total_length)
                except OSError as error:
                    raise WriteFailed(self.path, _refused(error)) from error
            sync = self._policy == "commit"
            # A signal's handler may raise between any two of these lines.
            self._failure = _INTERRUPTED
            self._write(packer, head, running.intdigest(), sync=sync)
            if sync:
                self._base, self._running = head, xxh3_64()
            else:
                self._running = running
            self.reader.head = head
            self._failure = None
            if self.inside_wakers:
                _wake(self.inside_wakers)

    def hasher(self) -> xxh3_64:
        """A copy of the running hash, for an operation that spills."""
        copy: xxh3_64 = self._running.copy()
        return copy

    def hasher_after_sync(self, placed: Head) -> xxh3_64:
        """The same, where a sync came after a part of the operation was placed, which ends at
        `placed`: the running hash began anew, so the part is read again."""
        hasher = hash_entries(self.file, self.head, placed)
        if hasher is None:
            what = "what was placed of the operation is not there any more"
            raise DamagedEntry(self.path, self.head.length, what)
        return hasher

    def _write(self, packer: EntryPacker, head: Head, hashed: int, *, sync: bool) -> None:
        """Data, header and record, sync, mark. `hashed` covers all from the base to `head`."""
        page, base = self._page, self._base
        before, sequence = page[: records.WITHOUT_SYNC[1]], self._sequence
        if sync:
            records.put_commit(page, base, head, head, hashed, NO_HASH)
            self._put_synced(self._header_at(head))
        else:
            records.put_commit(page, base, base, head, NO_HASH, hashed)
        try:
            self.file.commit(
                packer.arena,
                packer.segments,
                page,
                records.BEFORE_SYNC if sync else _NOTHING,
                records.AFTER_SYNC if sync else records.WITHOUT_SYNC,
                sync,
                self.wakers,
            )
        except OSError as error:
            page[: len(before)] = before
            self._sequence = sequence
            step = error.step if isinstance(error, CommitStepFailed) else STEP_DATA + 1
            if step == STEP_DATA:
                self._failure = None
                raise WriteFailed(self.path, _refused(error)) from error
            self._fail(error)

    def _fail(self, error: OSError) -> None:
        """After a header or sync that failed: back to the last head, and no more writes."""
        self._failure = (
            f"{_refused(error)}; whether the last operation is on disk is not known; the stream "
            "can be read up to the one before; open it again to go on"
        )
        with contextlib.suppress(OSError):
            self.file.write(self._page[HEADER_OFFSET : records.WITHOUT_SYNC[1]], HEADER_OFFSET)
            self.file.sync()
        raise CommitInDoubt(self.path, self._failure) from error

    def sync(self) -> None:
        """All that is committed is on disk when this returns."""
        with self._lock:
            self._ensure_writable()
            if self._base == self.head:
                return
            head = self.head
            before = bytes(self._page[: records.WITHOUT_SYNC[1]])
            try:
                self.file.sync()
                self._put_record(head, head, head, NO_HASH, NO_HASH)
                self._put_synced(self.header)
                self._write_back()
            except OSError as error:
                self._page[: len(before)] = before
                self._fail(error)
            self._base, self._running = head, xxh3_64()

    def truncate(self, number: int, offset: int) -> None:
        """Cut back to `number` entries, which end at `offset`; durable on return."""
        with self._lock:
            self._ensure_writable()
            self.sync()
            self._change(lambda: None, Head(offset, number))

    def update(self, offset: int, data: bytes) -> None:
        """Replace the bytes of an entry's data at `offset`; durable on return."""
        with self._lock:
            self._ensure_writable()
            self.sync()
            self._change(lambda: self.file.write(data, offset), self.head)

    def _change(self, write: Callable[[], None], head: Head) -> None:
        """Raise the epoch around a change of what was committed."""
        with self.reader.changing():
            self._change_held(write, head)
        _wake([*self.wakers, *self.inside_wakers])

    def _change_held(self, write: Callable[[], None], head: Head) -> None:
        before = bytes(self._page[: records.WITHOUT_SYNC[1]])
        self._failure = _INTERRUPTED
        self.epoch += 1
        header = self._header_at(head)
        try:
            records.put_header(self._page, header)
            self._put_record(head, head, head, NO_HASH, NO_HASH)
            start, end = records.BEFORE_SYNC
            self.file.write(memoryview(self._page)[start:end], start)
            write()
            self.file.sync()
            self._put_synced(header)
            records.put_mark(self._page, self.epoch, head)
            self._write_back()
        except OSError as error:
            self._page[: len(before)] = before
            self._fail(error)
        self._base, self._running = head, xxh3_64()
        self.reader.head = head
        self._failure = None

    def _write_clean(self) -> None:
        """A record with an empty range: nothing is left that a power cut could take."""
        head = self.head
        self._base, self._running = head, xxh3_64()
        records.put_header(self._page, self.header)
        self._put_record(head, head, head, NO_HASH, NO_HASH)
        self._put_synced(self.header)
        records.put_mark(self._page, self.epoch, head)
        self._write_back()
        self.file.sync()

    def _write_back(self) -> None:
        start, end = records.WITHOUT_SYNC
        self.file.write(memoryview(self._page)[start:end], start)

    def _put_record(self, base: Head, mid: Head, after: Head, first: int, second: int) -> None:
        records.put_record(
            self._page,
            CommitRecord(self.stream_id, self.epoch, self._boot, base, mid, after, first, second),
        )

    def _put_synced(self, header: Header) -> None:
        self._sequence += 1
        records.put_synced(
            self._page,
            self._sequence & 1,
            SyncedHeader(self._sequence, self.stream_id, self.epoch, header),
        )

    def add_waker(self, fd: int, *, inside: bool) -> None:
        with self._lock:
            (self.inside_wakers if inside else self.wakers).append(fd)

    def remove_waker(self, fd: int) -> None:
        """Nothing is written to `fd` any more when this returns."""
        with self._lock:
            for wakers in (self.wakers, self.inside_wakers):
                with contextlib.suppress(ValueError):
                    wakers.remove(fd)

    # Size.

    def _make_room(self, length: int) -> None:
        """Have at least one unused byte behind `length`, in whole pages."""
        if length < self._size:
            return
        needed = page_start(page_of(length) + 1)
        now = time.monotonic()
        self._step = min(2 * self._step, _MAX_STEP) if now - self._grown_at < 1 else 1
        self._grown_at = now
        self._resize(max(needed, self._size + self._step * PAGE_SIZE), needed)

    def _resize(self, size: int, least: int | None = None) -> None:
        try:
            self.file.resize(size)
        except OSError:
            # A step that the disk has no room for may have been a generous one.
            if least is None or least == size:
                raise
            size = least
            self.file.resize(size)
        if self._policy == "commit":
            self.file.sync()
        self._size = size

    # The end.

    def _ensure_writable(self) -> None:
        if self._closed:
            raise StreamClosed(f"{self.path}: the stream is closed")
        if not self.writable:
            raise StreamReadOnly(f"{self.path}: the stream is open for reading only")
        if self._failure:
            raise CommitInDoubt(self.path, self._failure)

    @property
    def closed(self) -> bool:
        return self._closed

    @property
    def failed(self) -> bool:
        """Whether a header or sync failed: nothing more is written until a new open."""
        return self._failure is not None

    def close(self) -> None:
        """Leave a clean file behind: synced, with nothing for a power cut to take."""
        with self._lock:
            if self._closed:
                return
            try:
                if self.writable and self._failure is None:
                    try:
                        self.file.sync()
                        self._write_clean()
                    except OSError as error:
                        raise CommitInDoubt(self.path, _refused(error)) from error
            finally:
                self._closed = True
                self.file.close()

    def abandon(self) -> None:
        """Close the descriptor and touch nothing: for the child of a fork."""
        self._closed = True
        self.file.close()


def _open_file(disk: Disk, path: str | os.PathLike[str] | int, shown: str, write: bool) -> File:
    try:
        if isinstance(path, int):
            return OsFile(os.dup(path))
        if os.path.isdir(path):
            raise NotAStream(shown, "is a folder, not a stream file")
        if os.path.exists(path) and not os.path.isfile(path):
            # Merely opening a named pipe would wait for somebody at its other end.
            raise NotAStream(shown, "is a device or a pipe, not a stream file")
        return disk.open(os.fspath(path), write=write)
    except OSError as error:
        raise _os_error(shown, error, "cannot be opened") from error


def _wake(wakers: list[int]) -> None:
    for waker in wakers:
        with contextlib.suppress(BlockingIOError):
            os.write(waker, b"\0\0\0\0\0\0\0\1")


def _read_page(file: File) -> bytes:
    return file.read(HEADER_PAGE_SIZE, 0)


def _of_another_boot(page: bytes, boot: bytes) -> bool:
    """Whether the record is older than this boot: whoever holds the lock has yet to judge it."""
    record = records.get_record(page)
    return record is not None and record.boot_id != boot


def _refused(error: OSError) -> str:
    return f"the system refused to write: {error.strerror or error}"


def _os_error(
    path: str, error: OSError, doing: str, missing: str = "no such file"
) -> StreamFileError:
    if isinstance(error, StreamFileError):
        return error
    why = error.strerror or str(error)
    if isinstance(error, FileNotFoundError):
        return FileMissing(path, missing)
    return StreamFileError(path, f"{doing}: {why}")
