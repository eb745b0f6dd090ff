"""A consistent copy of a stream, whoever writes it meanwhile.

Committed bytes change only under a new epoch, so a copy of all of them is whole if the
epoch stands still from before it to after it; else it is begun again. The copy is the same
stream at an earlier moment, closed in good order: same id, same epoch, records that leave
nothing to be judged. It has no bookmark index; its first writer makes one.

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
    StreamFileError,
    WriteFailed,
)
from datastreamer.format import HEADER_PAGE_SIZE, PAGE_SIZE, Header, page_of, page_start
from datastreamer.storage import journal
from datastreamer.storage import record as records
from datastreamer.storage.disk import Disk, File, OsDisk, OsFile, boot_id
from datastreamer.storage.file import StreamFile, read_page
from datastreamer.storage.newfile import new_file, remove_left_overs
from datastreamer.storage.reader import doubt
from datastreamer.storage.record import CommitRecord, Head, Source, SyncedHeader
from datastreamer.storage.recovery import NO_HASH, changing

_log = logging.getLogger(__name__)

_TRIES = 10
_PAUSE_SECONDS = 0.05
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


class _Start(NamedTuple):
    """What is copied."""

    header: Header
    head: Head
    epoch: int


class _MovedError(Exception):
    """Entries were taken back or changed while they were copied."""


class _WrongEndError(_MovedError):
    """The copy does not end as its header says; `at` is the byte where that ends."""

    def __init__(self, what: str, at: int) -> None:
        super().__init__(what)
        self.at = at


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
    copy cannot be made, `DamagedEntry` where the stream is damaged at its end, and
    `StreamFileError` where it does not hold still.
    """
    disk = disk or OsDisk()

    def opened() -> contextlib.closing[StreamFile]:
        return contextlib.closing(StreamFile.open(path, disk=disk))

    return _snapshot(opened, journal.place_of(path), path, out, advance, disk)


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
    before = b""
    for attempt in range(_TRIES):
        if attempt:
            time.sleep(_PAUSE_SECONDS)
        with opened() as source:
            try:
                for name in remove_left_overs(disk, target, source.file.access()):
                    _log.info("%s: removed; a snapshot that was killed has left it", name)
                # Of a writer in this process none is under way meanwhile.
                with source.alone():
                    page = read_page(source.file)
                    _ensure_settled(source, place, disk)
                    start = _Start(source.header, source.head, source.epoch)
                return _publish(source, start, target, disk, advance)
            except _WrongEndError as error:
                if page == before:  # nothing moves
                    raise DamagedEntry(path, error.at, str(error)) from None
                why = str(error)
                before = page
            except _MovedError as error:
                why = str(error)
    raise StreamFileError(
        path, f"no snapshot after {_TRIES} tries: {why}; try again when the stream holds still"
    )


def _ensure_settled(source: StreamFile, place: str | None, disk: Disk) -> None:
    """No change is under way. One that begins later raises the epoch before it writes; the
    undoing of one that a crash cut off would not, but its journal stands by then."""
    journals = place is not None and disk.exists(place + journal.SUFFIX)
    if changing(read_page(source.file)) or journals:
        raise _MovedError(
            "a truncation or update is under way, or a crash cut one off; if nobody writes the "
            "stream, open it for writing once"
        )


def _publish(
    source: StreamFile,
    start: _Start,
    target: str,
    disk: Disk,
    advance: Callable[[int, int], None],
) -> Snapshot:
    try:
        with new_file(disk, target, source.file.access()) as file:
            return _copy(source, start, file, advance)
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
    source: StreamFile, start: _Start, target: File, advance: Callable[[int, int], None]
) -> Snapshot:
    header, head, epoch = start
    # As a writer leaves it: whole pages, and an unused byte behind the end.
    size = page_start(page_of(head.length) + 1)
    means = _copy_data(source.file, target, head.length, advance)
    target.resize(size)
    source.refresh()
    if source.epoch != epoch:  # also where a program that keeps none went back
        raise _MovedError("entries were taken back or changed while they were copied")
    why = doubt(target, head)
    if why:
        # A program that keeps no epoch may have cut back and appended; or this is damage.
        what = f"the stream does not end there with entry {head.entries - 1}: {why}"
        raise _WrongEndError(what, head.length)
    target.sync()
    page = _header_page(header, source.stream_id, epoch)
    _keep_source(page, source)
    target.write(page, 0)
    return Snapshot(header, size, means)


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
        there = read_page(source.file)
        for start in records.SOURCE_OFFSETS:
            part = slice(start, start + records.SOURCE_SIZE)
            page[part] = there[part]
        return
    if last != Source():
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
