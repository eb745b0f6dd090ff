"""The end of an update that a crash interrupted: the old bytes come back from its journal.

Owns the order of these steps. `changes.py` makes updates; `header/undo_journal.py` has the journal.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator

from datastreamer.errors import UntrustedFile
from datastreamer.format import page_of
from datastreamer.storage.disk.file_ops import Disk, File
from datastreamer.storage.header import records
from datastreamer.storage.header import undo_journal as journal
from datastreamer.storage.header.judgement import undone_by
from datastreamer.storage.header.page import HeaderPage
from datastreamer.storage.header.undo_journal import Undo
from datastreamer.storage.pages.sidecar import SUFFIX as SUMS_SUFFIX
from datastreamer.storage.pages.sidecar import SumsFile, discard
from datastreamer.storage.read.open_file import cannot_undo

_log = logging.getLogger(__name__)


def undo_update(disk: Disk, file: File, path: str, shown: str) -> bool:
    """Restore what an update that a crash interrupted has overwritten; True if there was one.

    `path` is where its journal is (`journal.path_of`). Raises `DamagedEntry` if the journal is
    missing or unusable.
    """
    page = HeaderPage.of(file)
    undo = journal.find(disk, path, file.access())
    found = None if undo is None else undone_by(undo, file, page)
    if undo is not None and found is not None:
        mark = page.mark
        if found == undo.new and mark is not None and mark.epoch > undo.epoch:
            # It was complete and visible. A process that finds no journal has to find the mark.
            start, stop = records.MARK_OFFSET, records.WRITER_OFFSET
            file.write(page[start:stop], start)
            file.sync()
            journal.remove(disk, path, undo, file.access())
            return False
        # Also if the old bytes are there: an earlier open may have restored them, and failed to
        # bring them to disk.
        _forget_sums(disk, path, file, undo)
        file.write(undo.old, undo.offset)
        if page.updating is not None:
            # The page must not ask for a journal once that is removed.
            file.write(bytes(records.CHANGES_SIZE), records.CHANGES_OFFSET)
        file.sync()
        _log.warning(
            "%s: a crash interrupted an update; the %d bytes at %d are restored",
            shown,
            len(undo.old),
            undo.offset,
        )
        journal.remove(disk, path, undo, file.access())
        return True
    number = page.updating
    if number is not None:
        raise cannot_undo(file, page, shown, number, path)
    if disk.exists(path + journal.SUFFIX):
        keep_journal(disk, path, shown)
    return False


def _forget_sums(disk: Disk, path: str, file: File, undo: Undo) -> None:
    """The checksum of the page may be that of the bytes that are about to be overwritten. Raises
    `OSError`."""
    try:
        with opened_sums(disk, path, file) as sums:
            if sums is not None:
                sums.forget(page_of(undo.offset), undo.stream_id)
                sums.file.sync()
    except UntrustedFile:
        pass  # no reader uses it
    except OSError:
        discard(disk, path + SUMS_SUFFIX, file.access())


@contextlib.contextmanager
def opened_sums(disk: Disk, path: str, file: File) -> Iterator[SumsFile | None]:
    """`FILE.sums` of the stream at `path`, to be written. Raises `UntrustedFile` and `OSError`."""
    sums = SumsFile.open(disk, path + SUMS_SUFFIX, file.access(), write=True)
    try:
        yield sums
    finally:
        if sums is not None:
            sums.file.close()


def keep_journal(disk: Disk, path: str, shown: str) -> None:
    """Rename a journal that cannot be used. Raises `UntrustedFile` if it is a link or another
    user's and the system does not allow to move it."""
    try:
        kept = journal.set_aside(disk, path)
    except PermissionError as error:
        raise UntrustedFile(
            path + journal.SUFFIX,
            "is in the place of the journal of updates, is not this stream's, and cannot be moved "
            f"({error.strerror}); remove it",
        ) from error
    _log.warning(
        "%s: the journal of an update is damaged, is a link or another user's, or does not match "
        "the file, which was changed since; it is kept as %s",
        shown,
        kept,
    )
