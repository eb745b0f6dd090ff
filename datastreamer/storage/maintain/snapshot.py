"""A consistent copy of a stream, also while it is written.

Committed bytes change only under a new epoch, and the header page names the changes of the last
epochs. What was truncated or updated during the copy is copied again, until nothing changed
meanwhile; if that does not end, the copy is truncated to the lowest truncation, right after which
the stream held exactly these entries. The copy is the same stream at an earlier moment, closed
cleanly: it has the same id and epoch. It has no bookmark index; its first writer makes one.

Owns the copy until it has its name. Writes nothing to the stream and acquires no lock.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import time
from collections.abc import Callable
from typing import Literal, NamedTuple

from datastreamer.errors import (
    DamagedEntry,
    FileExists,
    FileMissing,
    NotFound,
    StreamBusy,
    StreamFileError,
    UntrustedFile,
    WriteFailed,
)
from datastreamer.format import PAGE_SIZE, Header, page_of, page_start
from datastreamer.storage.disk.atomic_file import new_file, remove_left_overs
from datastreamer.storage.disk.file_ops import Disk, File, OsDisk, OsFile, boot_id
from datastreamer.storage.header import records
from datastreamer.storage.header import undo_journal as journal
from datastreamer.storage.header.judgement import undone_by
from datastreamer.storage.header.page import HeaderPage
from datastreamer.storage.header.records import Head
from datastreamer.storage.pages.copy import Copied, CopySums
from datastreamer.storage.pages.hashes import EndSum, last_page
from datastreamer.storage.pages.sidecar import SUFFIX, SumsFile
from datastreamer.storage.read.change_watch import (
    ChangedError,
    Changes,
    ChangeWatch,
    steady_page,
)
from datastreamer.storage.read.evicted import PagedFile
from datastreamer.storage.read.file import StreamFile
from datastreamer.storage.read.page_scan import doubt
from datastreamer.storage.read.reader import Reader, end_of
from datastreamer.storage.summaries.times import copy_summaries

_log = logging.getLogger(__name__)

_TRIES = 10
# How often changes are copied again before the copy is truncated, or begun again.
_ROUNDS = 20
_PAUSE_SECONDS = 0.05
# How long to wait for the end of a change, which needs some syncs, and between two checks.
_PATIENCE_SECONDS = 10.0
_LOOK_SECONDS = 0.001
_PART = 16 * PAGE_SIZE
# Errors of a system that cannot copy between two files by itself.
_NOT_HERE = {
    errno.EBADF,
    errno.EINVAL,
    errno.ENOSYS,
    errno.EOPNOTSUPP,
    errno.EPERM,
    errno.ETXTBSY,
    errno.EXDEV,
}

Means = Literal["copy_file_range", "read and write"]


class Snapshot(NamedTuple):
    """A copy: its header, its size in bytes, how the data was copied, and how many of its pages
    were compared with a checksum that the stream has (all but the last one can have one)."""

    header: Header
    size: int
    means: Means
    verified: int


class _WrongEndError(ChangedError):
    """The copy does not end where its header says."""


class _Way(NamedTuple):
    """How a copy is made: `certain` means that what looks like damage at the end is damage."""

    advance: Callable[[int, int], None]
    verify: bool
    whole: bool
    certain: bool = False


class _StreamState(NamedTuple):
    """The stream at one moment: its end, its epoch, and what its commit record knows of the entries
    up to the end."""

    head: Head
    epoch: int
    end_sum: EndSum | None = None


def snapshot(
    path: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    verify: bool = True,
    whole: bool = False,
    advance: Callable[[int, int], None] = lambda done, total: None,
    disk: Disk | None = None,
) -> Snapshot:
    """Copy the visible stream at `path` to a new file `out`; durable on return.

    `verify`: read the copy, and compare each page with the checksum that the stream has of it;
    otherwise a damaged stream is copied as it is. The copy's checksums, in ``OUT.sums``, are those
    of the stream; for other pages they are made of the copy if it is read. ``OUT.pages`` has the
    stream's records.

    The copy of a file whose first pages are in an archive alone has the same ones there; with
    `whole` it has all pages itself.

    `advance(done, total)` is called with bytes; it begins at 0 again when the copy does, and when
    the copy is read. `out` appears when it is complete, and never replaces anything. Files that
    killed snapshots to `out` have left beside it (``OUT.<8 hex digits>.new``, ``OUT.sums`` and
    ``OUT.sums.<8 hex digits>.new``; the same for ``OUT.pages``) are removed.

    Raises `FileExists`, what opening the stream for reading raises, `WriteFailed` if the copy
    cannot be made, `DamagedPage` for a page that differs from its checksum, `DamagedEntry` if the
    stream is damaged at its end, `StreamBusy` if it changes faster than it can be copied, and
    `StreamFileError` if a crash left an update or truncation unfinished.
    """
    disk = disk or OsDisk()

    def opened() -> contextlib.closing[StreamFile]:
        return contextlib.closing(StreamFile.open(path, disk=disk))

    return _snapshot(opened, journal.path_of(path), path, out, disk, _Way(advance, verify, whole))


def snapshot_of(
    file: StreamFile,
    out: str | os.PathLike[str],
    *,
    verify: bool = True,
    whole: bool = False,
    advance: Callable[[int, int], None] = lambda done, total: None,
    disk: Disk | None = None,
) -> Snapshot:
    """As `snapshot`, for an open file, wherever its path leads."""

    def opened() -> contextlib.AbstractContextManager[StreamFile]:
        if file.writable:
            return contextlib.nullcontext(file)
        # A second view of the file: this one is not moved.
        descriptor = file.file.fileno()
        return contextlib.closing(StreamFile.open(descriptor, name=file.path, disk=disk))

    return _snapshot(opened, None, file.path, out, disk or OsDisk(), _Way(advance, verify, whole))


def _snapshot(
    opened: Callable[[], contextlib.AbstractContextManager[StreamFile]],
    place: str | None,
    path: str | os.PathLike[str],
    out: str | os.PathLike[str],
    disk: Disk,
    way: _Way,
) -> Snapshot:
    """Copy the file that `opened()` returns. `place` is where an update's journal would be; None:
    the file alone says whether an update is under way."""
    target = os.fspath(out)
    if disk.exists(target):
        raise FileExists(target, "exists already; choose another path")
    before, changes = b"", 0
    for attempt in range(_TRIES):
        if attempt:
            time.sleep(_PAUSE_SECONDS)
        with opened() as source:
            _remove_left_overs(disk, target, source)
            try:
                # A writer in this process changes nothing meanwhile.
                with source.exclusive():
                    page = _settled_page(source, place, disk)
                    known = None if page.record is None else page.record.sum_at(source.head)
                    start = _StreamState(source.head, source.epoch, known)
                certain = page == before  # nothing has changed
                return _publish(source, page, start, target, disk, way._replace(certain=certain))
            except _WrongEndError:
                before = page
            except ChangedError as error:
                changes += error.changes
    raise StreamBusy(
        path,
        f"busy: the stream was truncated or updated {f'{changes} times' if changes else 'again'} "
        f"during {_TRIES} tries of a snapshot; try again, or end the writer",
    )


def _remove_left_overs(disk: Disk, target: str, source: StreamFile) -> None:
    """Remove what killed snapshots to `target` have left, and checksums of a file that was there
    before. Raises `FileExists` for another file in their place."""
    access, sidecar = source.file.access(), target + SUFFIX
    names = remove_left_overs(disk, target, access) + remove_left_overs(disk, sidecar, access)
    try:
        found = SumsFile.open(disk, sidecar, access)
        if found is not None:
            with contextlib.closing(found):
                if found.header() is None:
                    raise UntrustedFile(sidecar, "holds no checksums")
            disk.unlink(sidecar)
            names.append(sidecar)
    except (OSError, UntrustedFile) as error:
        raise FileExists(sidecar, f"is in the place of the copy's checksums: {error}") from None
    for name in names:
        _log.info("%s: removed what a killed snapshot had left", name)


def _settled_page(source: StreamFile, place: str | None, disk: Disk) -> HeaderPage:
    """The header page at a moment without a change. A later change raises the epoch before it
    writes; undoing an interrupted update does not, but its journal is there then."""
    until = time.monotonic() + _PATIENCE_SECONDS
    while True:
        page = steady_page(source.file)
        if not page.changing and not _has_journal(source, place, disk, page):
            return page
        if not source.file.locked_elsewhere() and steady_page(source.file) == page:
            raise StreamFileError(
                source.path,
                "a crash interrupted a truncation or update, and half of one cannot be copied; "
                "open it for writing once",
            )
        if time.monotonic() >= until:
            raise StreamBusy(
                source.path,
                f"busy: a truncation or update is under way for {_PATIENCE_SECONDS:g} s; try again",
            )
        time.sleep(_LOOK_SECONDS)


def _has_journal(source: StreamFile, place: str | None, disk: Disk, page: HeaderPage) -> bool:
    """Whether there is an update's journal that matches the file. The next writer sets any other
    one aside."""
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
    way: _Way,
) -> Snapshot:
    access = source.file.access()
    # The checksums get their name after the copy: a crash leaves none that are not its own.
    with contextlib.ExitStack() as later:

        def sidecar() -> File:
            return later.enter_context(new_file(disk, target + SUFFIX, access))

        try:
            with new_file(disk, target, access) as file:
                taken = _copy(source, page, start, file, target, sidecar, way)
        except FileExistsError:
            raise FileExists(target, "exists already; choose another path") from None
        except FileNotFoundError as error:
            raise FileMissing(target, "no such folder") from error
        except OSError as error:
            if isinstance(error, StreamFileError):
                raise
            raise WriteFailed(
                target, f"the snapshot cannot be made: {error.strerror or error}"
            ) from error
        made = later.pop_all()
    try:
        made.close()
    except OSError as error:
        _log.warning("%s%s cannot be made: %s; the copy is unverified", target, SUFFIX, error)
    try:
        copy_summaries(source, target, disk, last_page(taken.header.total_length) + 1)
    except (OSError, UntrustedFile) as error:
        _log.warning("%s: what its pages hold, and times, cannot be copied: %s", target, error)
    return taken


def _copy(
    source: StreamFile,
    page: HeaderPage,
    state: _StreamState,
    target: File,
    path: str,
    sidecar: Callable[[], File],
    way: _Way,
) -> Snapshot:
    watch = ChangeWatch(source.file, page)
    if watch.epoch not in (None, state.epoch):
        raise ChangedError("entries were truncated or updated before they were copied", 1)

    def copied(done: int, total: int) -> None:
        watch.look()  # often enough: the page names the newest changes only
        way.advance(done, total)

    mark = None if way.whole else page.evicted
    floor = 0 if mark is None else mark.floor
    means = _copy_data(source.file, target, page_start(floor), state.head.length, copied)
    (head, epoch, end_sum), changed = _reconciled(source, target, state, watch)
    # As a writer leaves it: whole pages, and an unused byte after the end.
    if HeaderPage.of(source.file).floor < floor:
        raise ChangedError("evicted entries were truncated or updated while it was copied", 1)
    size = page_start(page_of(head.length) + 1)
    target.resize(head.length)
    target.resize(size)
    why = doubt(target, head)
    if why:
        what = f"the stream does not end there with entry {head.entries - 1}: {why}"
        if not (way.certain or (watch.epoch is not None and not changed)):
            # A program that keeps no epoch may have truncated and appended; or this is damage.
            raise _WrongEndError(what)
        if way.verify and end_sum is None:
            raise DamagedEntry(source.path, head.length, what)
    sums = CopySums(source, watch, sidecar, verify=way.verify)
    known = sums.make(Copied(target, path, head, epoch, end_sum, floor), way.advance)
    target.sync()
    version, system_id, stream_type, _, _ = source.header
    header = Header(version, system_id, stream_type, *head)
    copy = records.settled_page(header, known, source.stream_id, epoch, boot_id())
    if mark is not None:
        records.put_magic(copy, marked=True)
        records.put_evicted(copy, mark)
    # Sources with lower epochs cannot publish to the copy either. A damaged record remains damaged:
    # its epoch is not known.
    there = steady_page(source.file)
    for start in records.SOURCE_OFFSETS:
        part = slice(start, start + records.SOURCE.size)
        copy[part] = there[part]
    target.write(copy, 0)
    return Snapshot(header, size, means, sums.verified)


# What changed meanwhile.


def _reconciled(
    source: StreamFile, target: File, state: _StreamState, watch: ChangeWatch
) -> tuple[_StreamState, bool]:
    """Bring the copy of `state` to one moment of the stream, after the changes that `watch`
    collects; returns that moment, and whether it is another one."""
    everything, lacking = Changes(), Changes()
    for attempt in range(_ROUNDS):
        if attempt:
            time.sleep(_LOOK_SECONDS)
        found = watch.take()
        everything.extend(found)
        lacking.extend(found)
        if lacking.unknown:
            raise ChangedError("entries were truncated or updated, which ones is not known", 1)
        if not lacking.touch(state.head.entries):
            return state, attempt > 0
        seen = None if watch.page.changing else watch.page.visible
        if seen is not None and _copy_on(source, target, state.head, seen[0], lacking, watch):
            record = watch.page.record
            end_sum = None if record is None else record.sum_at(seen[0])
            state, lacking = _StreamState(*seen, end_sum), Changes()
    cut = _after_lowest_truncation(source, everything, watch)
    if cut is None:
        what = "entries were truncated and updated while they were copied"
        raise ChangedError(what, everything.count)
    return cut, True


def _copy_on(
    source: StreamFile, target: File, copied: Head, head: Head, changes: Changes, watch: ChangeWatch
) -> bool:
    """Bring a copy that ends at `copied` and lacks `changes` to `head`; False if entries were
    changed meanwhile."""
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


def _after_lowest_truncation(
    source: StreamFile, changes: Changes, watch: ChangeWatch
) -> _StreamState | None:
    """The moment after the lowest truncation: the copy and the stream both begin with what the
    stream held then. None if an update changed that."""
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


# The bytes.


def _copy_data(
    source: File, target: File, start: int, length: int, advance: Callable[[int, int], None]
) -> Means:
    """Copy the bytes from offset `start` to `length`: in the kernel if it can, which then shares
    blocks where the file system can."""
    if (
        isinstance(source, PagedFile)
        and start >= page_start(source.floor())
        and isinstance(target, OsFile)
        and hasattr(os, "copy_file_range")
        and _copy_inside(source, target, start, length, advance)
    ):
        return "copy_file_range"
    for offset in range(start, length, _PART):
        part = source.read(min(_PART, length - offset), offset)
        target.write(part, offset)
        advance(offset + len(part), length)
    return "read and write"


def _copy_inside(
    source: PagedFile,
    target: OsFile,
    offset: int,
    length: int,
    advance: Callable[[int, int], None],
) -> bool:
    """Whether the kernel copied the data by itself; if not, all of it has to be copied again."""
    while offset < length:
        try:
            size, before = min(_PART, length - offset), source.look()
            done = os.copy_file_range(source.fileno(), target.fileno(), size, offset, offset)
        except OSError as error:
            if error.errno in _NOT_HERE:
                return False
            raise
        if not done:
            return False
        if not source.look().was_above(page_of(offset), before):
            # Its pages were evicted meanwhile, and may have been holes.
            target.write(source.read(done, offset), offset)
        offset += done
        advance(offset, length)
    return True
