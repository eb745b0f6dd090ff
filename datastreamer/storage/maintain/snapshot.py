"""A consistent copy of a stream, whoever writes it meanwhile.

Committed bytes change only under a new epoch, and the header page names the changes of the last
epochs. What was truncated or updated during the copy is copied again, until nothing changed
meanwhile; where that does not end, the copy is cut back to the lowest truncation, after which the
stream held exactly that. The copy is the same stream at an earlier moment, closed in good order:
same id, same epoch, records that leave nothing to be judged. It has no bookmark index; its first
writer makes one.

Owns the copy until it has its name. Writes nothing to the stream and takes no lock.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import sys
import time
from collections.abc import Callable
from typing import Literal, NamedTuple

from datastreamer.errors import (
    DamagedEntry,
    DamagedHeader,
    FileExists,
    FileMissing,
    NotFound,
    StreamBusy,
    StreamFileError,
    WriteFailed,
)
from datastreamer.format import HEADER_PAGE_SIZE, PAGE_SIZE, Header, page_of, page_start
from datastreamer.storage.disk.atomic_file import new_file, remove_left_overs
from datastreamer.storage.disk.file_ops import Disk, File, OsDisk, OsFile, boot_id
from datastreamer.storage.header import records
from datastreamer.storage.header import undo_journal as journal
from datastreamer.storage.header.page import HeaderPage
from datastreamer.storage.header.records import CommitRecord, Head, PublisherRecord, SyncedHeader
from datastreamer.storage.header.recovery import NO_HASH, undone_by
from datastreamer.storage.read.change_watch import Changes, ChangeWatch, steady_page
from datastreamer.storage.read.file import StreamFile
from datastreamer.storage.read.reader import Reader, doubt, end_of

_log = logging.getLogger(__name__)

_TRIES = 10
# How often what changed is copied again before the copy is cut back, or begun again.
_ROUNDS = 20
_PAUSE_SECONDS = 0.05
# A change takes some syncs: how long the end of one is waited for, and between two looks.
_PATIENCE_SECONDS = 10.0
_LOOK_SECONDS = 0.001
_PART = 16 * PAGE_SIZE
# ioctl of Linux: the other file's blocks become this one's too, until one of them is written.
_FICLONE = 0x40049409
# What the system says where it cannot copy by itself between these two files.
_NOT_HERE = {
    errno.EBADF,
    errno.EINVAL,
    errno.ENOSYS,
    errno.ENOTTY,
    errno.EOPNOTSUPP,
    errno.EPERM,
    errno.ETXTBSY,
    errno.EXDEV,
}

Means = Literal["reflink", "copy_file_range", "read and write"]


class Snapshot(NamedTuple):
    """What a copy holds: the header that it has, its size in bytes, how the data came there."""

    header: Header
    size: int
    means: Means


class _MovedError(Exception):
    """Entries were truncated or updated while they were copied, `changes` times."""

    def __init__(self, what: str, changes: int = 0) -> None:
        super().__init__(what)
        self.changes = changes


class _WrongEndError(_MovedError):
    """The copy does not end as its header says; `at` is the byte where that ends."""

    def __init__(self, what: str, at: int) -> None:
        super().__init__(what)
        self.at = at


class _StreamState(NamedTuple):
    """A moment of the stream: how far it goes, under which epoch."""

    head: Head
    epoch: int


def snapshot(
    path: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    advance: Callable[[int, int], None] = lambda done, total: None,
    disk: Disk | None = None,
) -> Snapshot:
    """Copy the stream at `path`, as far as it may be read now, to a new file `out`; durable
    on return.

    `advance` is told how many bytes of how many are copied; it counts anew when the copy is
    begun again. `out` appears when it is complete, and never in the place of something. What
    a snapshot to `out` that was killed has left beside it (``OUT.<8 hex digits>.new``) goes.

    Raises `FileExists`, what opening the stream for reading raises, `WriteFailed` where the
    copy cannot be made, `DamagedEntry` where the stream is damaged at its end, `StreamBusy`
    where it changes faster than it can be copied, and `StreamFileError` where a crash left an
    update or truncation unfinished.
    """
    disk = disk or OsDisk()

    def opened() -> contextlib.closing[StreamFile]:
        return contextlib.closing(StreamFile.open(path, disk=disk))

    return _snapshot(opened, journal.path_of(path), path, out, advance, disk)


def snapshot_of(
    file: StreamFile,
    out: str | os.PathLike[str],
    *,
    advance: Callable[[int, int], None] = lambda done, total: None,
    disk: Disk | None = None,
) -> Snapshot:
    """As `snapshot`, of a file that is open, wherever its path leads by now."""

    def opened() -> contextlib.AbstractContextManager[StreamFile]:
        if file.writable:
            return contextlib.nullcontext(file)
        # Another view of it: the one that is there stays where it is.
        descriptor = file.file.fileno()
        return contextlib.closing(StreamFile.open(descriptor, name=file.path, disk=disk))

    return _snapshot(opened, None, file.path, out, advance, disk or OsDisk())


def _snapshot(
    opened: Callable[[], contextlib.AbstractContextManager[StreamFile]],
    place: str | None,
    path: str | os.PathLike[str],
    out: str | os.PathLike[str],
    advance: Callable[[int, int], None],
    disk: Disk,
) -> Snapshot:
    """Copy what `opened()` gives; `place` is where the journal of an update would be, None: the
    file alone says whether one is under way."""
    target = os.fspath(out)
    if disk.exists(target):
        raise FileExists(target, "exists already; a snapshot is never written over something")
    before, changes = b"", 0
    for attempt in range(_TRIES):
        if attempt:
            time.sleep(_PAUSE_SECONDS)
        with opened() as source:
            try:
                for name in remove_left_overs(disk, target, source.file.access()):
                    _log.info("%s: removed; a snapshot that was killed has left it", name)
                # Of a writer in this process no change is under way meanwhile.
                with source.exclusive():
                    page = _settled_page(source, place, disk)
                    start = _StreamState(source.head, source.epoch)
                return _publish(source, page, start, target, disk, advance)
            except _WrongEndError as error:
                if page == before:  # nothing moves
                    raise DamagedEntry(path, error.at, str(error)) from None
                before = page
            except _MovedError as error:
                changes += error.changes
    raise StreamBusy(
        path,
        f"busy: the stream was truncated or updated {f'{changes} times' if changes else 'again'} "
        f"during {_TRIES} tries of a snapshot; try again, or end the writer",
    )


def _settled_page(source: StreamFile, place: str | None, disk: Disk) -> HeaderPage:
    """The header page at a moment when no change is under way. One that begins later raises the
    epoch before it writes; the undoing of one that a crash cut off would not, but its journal
    is there by then."""
    until = time.monotonic() + _PATIENCE_SECONDS
    while True:
        page = steady_page(source.file)
        if not page.changing and not _has_journal(source, place, disk, page):
            return page
        if not source.file.locked_elsewhere() and steady_page(source.file) == page:
            raise StreamFileError(
                source.path,
                "a crash cut off a truncation or update, and no snapshot is made of half of one; "
                "open it for writing once",
            )
        if time.monotonic() >= until:
            raise StreamBusy(
                source.path,
                f"busy: a truncation or update is under way for {_PATIENCE_SECONDS:g} s; try again",
            )
        time.sleep(_LOOK_SECONDS)


def _has_journal(source: StreamFile, place: str | None, disk: Disk, page: HeaderPage) -> bool:
    """Whether the journal of an update is there that is about the file as it is. One that is not
    means nothing: the next writer sets it aside."""
    if place is None:
        return False
    undo = journal.find(disk, place, source.file.access())
    return undo is not None and undone_by(undo, source.file, page) is not None


def _publish(
    source: StreamFile,
    page: HeaderPage,
    start: _StreamState,
    target: str,
    disk: Disk,
    advance: Callable[[int, int], None],
) -> Snapshot:
    try:
        with new_file(disk, target, source.file.access()) as file:
            return _copy(source, page, start, file, advance)
    except FileExistsError:
        raise FileExists(target, "exists already; a snapshot is never written over it") from None
    except FileNotFoundError as error:
        raise FileMissing(target, "no such folder") from error
    except OSError as error:
        if isinstance(error, StreamFileError):
            raise
        raise WriteFailed(
            target, f"the snapshot cannot be made: {error.strerror or error}"
        ) from error


def _copy(
    source: StreamFile,
    page: HeaderPage,
    state: _StreamState,
    target: File,
    advance: Callable[[int, int], None],
) -> Snapshot:
    watch = ChangeWatch(source.file, page)
    if watch.epoch not in (None, state.epoch):
        raise _MovedError("entries were truncated or updated before they were copied", 1)

    def copied(done: int, total: int) -> None:
        watch.look()  # in time: the page names some changes only
        advance(done, total)

    means = _copy_data(source.file, target, state.head.length, copied)
    (head, epoch), changed = _reconciled(source, target, state, watch)
    # As a writer leaves it: whole pages, and an unused byte behind the end.
    size = page_start(page_of(head.length) + 1)
    target.resize(head.length)
    target.resize(size)
    why = doubt(target, head)
    if why:
        what = f"the stream does not end there with entry {head.entries - 1}: {why}"
        if watch.epoch is not None and not changed:
            raise DamagedEntry(source.path, head.length, what)
        # A program that keeps no epoch may have truncated and appended; or this is damage.
        raise _WrongEndError(what, head.length)
    target.sync()
    version, system_id, stream_type, _, _ = source.header
    header = Header(version, system_id, stream_type, *head)
    copy = _header_page(header, source.stream_id, epoch)
    _keep_source(copy, source)
    target.write(copy, 0)
    return Snapshot(header, size, means)


# What changed meanwhile.


def _reconciled(
    source: StreamFile, target: File, state: _StreamState, watch: ChangeWatch
) -> tuple[_StreamState, bool]:
    """Bring the copy of `state` to one moment of the stream, after the changes that `watch`
    collects; gives that moment, and whether it is another one."""
    everything, lacking = Changes(), Changes()
    for attempt in range(_ROUNDS):
        if attempt:
            time.sleep(_LOOK_SECONDS)
        found = watch.take()
        everything.extend(found)
        lacking.extend(found)
        if lacking.unknown:
            raise _MovedError("entries were truncated or updated, which ones is not known", 1)
        if not lacking.touch(state.head.entries):
            return state, attempt > 0
        seen = None if watch.page.changing else watch.page.visible
        if seen is not None and _copy_on(source, target, state.head, seen[0], lacking, watch):
            state, lacking = _StreamState(*seen), Changes()
    cut = _cut_back(source, everything, watch)
    if cut is None:
        what = "entries were truncated and updated while they were copied"
        raise _MovedError(what, everything.count)
    return cut, True


def _copy_on(
    source: StreamFile, target: File, copied: Head, head: Head, changes: Changes, watch: ChangeWatch
) -> bool:
    """Bring a copy that goes up to `copied` and lacks `changes` to `head`; False where entries
    were changed meanwhile."""
    reader = Reader(source.file, source.path, head)
    good = copied.entries if changes.lowest is None else changes.lowest.start
    try:
        for number in changes.updated_below(copied.entries):
            target.write(reader.packed(number), reader.cursor(number).offset)
        offset = end_of(reader, min(good, copied.entries))
        while offset < head.length:
            part = source.file.read(min(_PART, head.length - offset), offset)
            if not part:
                return False
            target.write(part, offset)
            offset += len(part)
            watch.look()
    except (DamagedEntry, NotFound):
        return False
    return True


def _cut_back(source: StreamFile, changes: Changes, watch: ChangeWatch) -> _StreamState | None:
    """The moment after the lowest truncation: what the stream held then the copy begins with,
    and so does the stream ever since. None where an update changed that."""
    for _ in range(_ROUNDS):
        seen, lowest = watch.page.visible, changes.lowest
        length = None
        if seen is not None and lowest is not None:
            with contextlib.suppress(DamagedEntry, NotFound):
                length = end_of(Reader(source.file, source.path, seen[0]), lowest.start)
        changes.extend(watch.take())
        now = changes.lowest
        if changes.unknown or now is None or changes.updated_below(now.start):
            return None
        if length is not None and lowest is not None and now.start == lowest.start:
            return _StreamState(Head(length, now.start), now.epoch)
    return None


def _header_page(header: Header, stream_id: bytes, epoch: int) -> bytearray:
    """As a clean close leaves it: all is on disk, nothing is there to be judged."""
    page = records.new_page(header)
    head = Head(header.total_length, header.total_entries)
    records.put_record(
        page, CommitRecord(stream_id, epoch, boot_id(), head, head, head, NO_HASH, NO_HASH)
    )
    records.put_synced(page, 0, SyncedHeader(0, stream_id, epoch, header))
    records.put_mark(page, epoch, head)
    return page


def _keep_source(page: bytearray, source: StreamFile) -> None:
    """The epoch below which no source publishes holds for the copy, too."""
    try:
        last = source.source()
    except DamagedHeader:
        # Not "none": the copy has the same damage.
        there = steady_page(source.file)
        for start in records.SOURCE_OFFSETS:
            part = slice(start, start + records.SOURCE_SIZE)
            page[part] = there[part]
        return
    if last != PublisherRecord():
        for copy in range(len(records.SOURCE_OFFSETS)):
            records.put_source(page, copy, source.stream_id, last)


# The bytes.


def _copy_data(
    source: File, target: File, length: int, advance: Callable[[int, int], None]
) -> Means:
    """Bytes up to `length`, by what the system does best. The header page is still to come."""
    if isinstance(source, OsFile) and isinstance(target, OsFile):
        if _clone(source.fileno(), target.fileno()):
            target.resize(length)  # what stands behind is no part of the stream
            advance(length, length)
            return "reflink"
        if hasattr(os, "copy_file_range") and _copy_inside(
            source.fileno(), target.fileno(), length, advance
        ):
            return "copy_file_range"
    for offset in range(HEADER_PAGE_SIZE, length, _PART):
        part = source.read(min(_PART, length - offset), offset)
        target.write(part, offset)
        advance(offset + len(part), length)
    return "read and write"


def _clone(source: int, target: int) -> bool:
    """Whether the file system made `target` share all blocks of `source`."""
    if not sys.platform.startswith("linux"):
        return False
    try:
        fcntl.ioctl(target, _FICLONE, source)
    except OSError as error:
        if error.errno in _NOT_HERE:
            return False
        raise
    return True


def _copy_inside(
    source: int, target: int, length: int, advance: Callable[[int, int], None]
) -> bool:
    """Whether the kernel copied the data by itself; if not, nothing of it is to be relied on."""
    offset = HEADER_PAGE_SIZE
    while offset < length:
        try:
            done = os.copy_file_range(source, target, min(_PART, length - offset), offset, offset)
        except OSError as error:
            if error.errno in _NOT_HERE:
                return False
            raise
        if not done:
            return False
        offset += done
        advance(offset, length)
    return True
