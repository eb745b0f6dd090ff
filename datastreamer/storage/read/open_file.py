"""How a stream file is opened, and what keeps it from being read.

Owns the errors of a file that cannot be opened, and of one that a crash left within an update.
"""

from __future__ import annotations

import os

from datastreamer.errors import (
    DamagedEntry,
    FileMissing,
    NotAStream,
    StreamFileError,
    UnknownEntry,
)
from datastreamer.storage.disk.file_ops import Disk, File, OsFile
from datastreamer.storage.header import records
from datastreamer.storage.header import undo_journal as journal
from datastreamer.storage.header.judgement import undone_by
from datastreamer.storage.header.page import HeaderPage
from datastreamer.storage.header.records import Head
from datastreamer.storage.read.evicted import PagedFile
from datastreamer.storage.read.reader import Reader


def ensure_whole(disk: Disk, place: str, file: File, path: str) -> None:
    """Raises `DamagedEntry` if an update in place was interrupted, and left old and new bytes."""
    if file.locked_elsewhere():
        return
    page = HeaderPage.of(file)
    number, undo = page.updating, journal.find(disk, place, file.access())
    error = None
    if number is not None and (undo is None or undone_by(undo, file, page) is None):
        error = cannot_undo(file, page, path, number, place)
    elif undo is not None and undo.is_half_done(file):
        error = DamagedEntry(
            path,
            undo.offset,
            "a crash interrupted the update of an entry; open the stream for writing once, which "
            "restores the old bytes",
        )
    # (A writer that undoes the update writes the page before it removes the journal.)
    if error is not None and not file.locked_elsewhere() and HeaderPage.of(file) == page:
        raise error


def cannot_undo(file: File, page: HeaderPage, path: str, number: int, place: str) -> DamagedEntry:
    """The error for an interrupted update of entry `number` that has no journal."""
    try:
        offset = Reader(file, path, Head(*page.header(path)[3:])).cursor(number).offset
    except (DamagedEntry, UnknownEntry):
        offset = records.CHANGES_OFFSET
    return DamagedEntry(
        path,
        offset,
        f"a crash interrupted the update of entry {number}, and {place}{journal.SUFFIX}, which has "
        "its old bytes, is missing, damaged, a link or another user's: restore it (it belongs "
        "beside the path that the stream was updated by), or let `datastreamer repair` keep the "
        "entry as it is, perhaps with old and new bytes",
    )


def open_file(disk: Disk, path: str | os.PathLike[str] | int, shown: str, *, write: bool) -> File:
    """The file at `path`, or of a descriptor. Raises `FileMissing`, `NotAStream`."""
    try:
        if isinstance(path, int):
            return PagedFile(os.dup(path), shown)
        if os.path.isdir(path):
            raise NotAStream(shown, "is a folder, not a stream file")
        if os.path.exists(path) and not os.path.isfile(path):
            # Opening a named pipe would wait for a process at its other end.
            raise NotAStream(shown, "is a device or a pipe, not a stream file")
        file = disk.open(os.fspath(path), write=write)
        return PagedFile.of(file, shown) if type(file) is OsFile else file
    except OSError as error:
        raise os_error(shown, error, "cannot be opened") from error


def os_error(
    path: str, error: OSError, doing: str, missing: str = "no such file"
) -> StreamFileError:
    if isinstance(error, StreamFileError):
        return error
    why = error.strerror or str(error)
    if isinstance(error, FileNotFoundError):
        return FileMissing(path, missing)
    return StreamFileError(path, f"{doing}: {why}")
