"""Creates a file atomically: it appears under its name complete and durable, or not at all.

Until then it has a temporary name in the same folder, which ends in ``.new``, and a lock, which
distinguishes a file that is being written from one that a killed process left. Side files, which
keep bytes that are about to be removed from a stream file, are created in this way.
"""

from __future__ import annotations

import contextlib
import re
import secrets
import time
from collections.abc import Iterator
from typing import Final

from datastreamer.errors import UntrustedFile
from datastreamer.format import HEADER_PAGE_SIZE, PAGE_SIZE
from datastreamer.storage.disk.access import Access
from datastreamer.storage.disk.file_ops import Buffer, Disk, File

NEW: Final = r"\.[0-9a-f]{8}\.new"
"""The end of the names of files that are being written."""

_LEFT_OVER = re.compile(NEW)
_KEPT = r"\.\d{8}T\d{6}\.[0-9a-f]{4}\."
BEGUN: Final = re.compile(_KEPT + "(?:cut|repair)" + NEW)
"""The endings of unfinished copies beside a stream."""


@contextlib.contextmanager
def new_file(disk: Disk, path: str, beside: Access | None = None) -> Iterator[File]:
    """A file to write. When the block ends it is synced and has the name `path`, durably.
    It has at most the permissions of the stream that has the access `beside`.

    It never replaces anything. Raises `OSError`, and `FileExistsError` if there is something at
    `path`; after that, or an exception of the block, the file is removed (if only the sync of the
    name failed, the name may remain).
    """
    file, temporary = _created(disk, path, beside)
    try:
        yield file
        file.sync()
        disk.publish(temporary, path)
        # Closing is not enough: a copy of the descriptor in the child of a fork holds the lock.
        with contextlib.suppress(OSError):
            file.unlock()
    except BaseException:
        with contextlib.suppress(OSError):
            disk.unlink(temporary)
        raise
    finally:
        file.close()


def _created(disk: Disk, path: str, beside: Access | None) -> tuple[File, str]:
    while True:
        temporary = f"{path}.{secrets.token_hex(4)}.new"
        file = disk.create(temporary, beside)
        try:
            locked = file.lock()
        except OSError:
            locked = True  # a file system without locks: no process removes it as a left-over there
        # Between the two lines above another process may have removed it as a left-over.
        if locked and disk.exists(temporary):
            return file, temporary
        file.close()


def remove_left_overs(
    disk: Disk, path: str, beside: Access, ending: re.Pattern[str] = _LEFT_OVER
) -> list[str]:
    """Unlink what killed processes have left beside `path`; returns the names.

    `beside` is the access of the stream, `ending` matches the names after `path`. Files that
    cannot be removed or that a process is writing remain, as do links and other users' files.
    """
    found = [name for name in disk.beside(path) if ending.fullmatch(name, len(path))]
    return [name for name in found if _unlinked(disk, name, beside)]


def _unlinked(disk: Disk, name: str, beside: Access) -> bool:
    """Whether the file could be removed: that is ours, and no process is writing it."""
    with contextlib.suppress(OSError, UntrustedFile):
        file = disk.open(name, write=True, beside=beside)
        try:
            if file.lock():
                disk.unlink(name)
                return True
        finally:
            file.close()
    return False


def keep_beside(
    disk: Disk, path: str, suffix: str, page: Buffer, file: File, start: int, stop: int
) -> str:
    """Copy `page` and bytes `start` to `stop` of `file` to a new, synced file; returns its path.

    It is named `path.<time>.<suffix>`. Raises `OSError`; no file is left then.
    """
    while True:
        side = f"{path}.{time.strftime('%Y%m%dT%H%M%S')}.{secrets.token_hex(2)}.{suffix}"
        # One repair may make many in a second.
        with contextlib.suppress(FileExistsError), new_file(disk, side, file.access()) as saved:
            saved.write(page, 0)
            offset, at = start, HEADER_PAGE_SIZE
            while offset < stop:
                part = file.read(min(PAGE_SIZE, stop - offset), offset)
                if not part:
                    break
                saved.write(part, at)
                offset, at = offset + len(part), at + len(part)
            return side


def remove_older(disk: Disk, path: str, suffix: str, beside: Access, most: int) -> list[str]:
    """Unlink what `keep_beside` made with this suffix, except the newest `most`; returns the names.
    Others remain as with `remove_left_overs`."""
    ending = re.compile(_KEPT + re.escape(suffix))
    found = sorted(name for name in disk.beside(path) if ending.fullmatch(name, len(path)))
    return [name for name in found[:-most] if _unlinked(disk, name, beside)]
