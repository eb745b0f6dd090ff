"""A new file that appears at its name whole and on disk, or not at all.

Until then it has a name of its own beside, which ends in ``.new``, and a lock: by that a file
which a killed process left is told from one that is being written. Knows nothing of what
stands in it.
"""

from __future__ import annotations

import contextlib
import re
import secrets
from collections.abc import Iterator
from typing import Final

from datastreamer.errors import UntrustedFile
from datastreamer.storage.disk.access import Access
from datastreamer.storage.disk.file_ops import Disk, File

NEW: Final = r"\.[0-9a-f]{8}\.new"
"""How the names of files that are being written end."""

_LEFT_OVER = re.compile(NEW)


@contextlib.contextmanager
def new_file(disk: Disk, path: str, beside: Access | None = None) -> Iterator[File]:
    """A file to write, which is synced and has its name `path`, durably, when the block is left.
    It has no more permissions than the stream that has the access `beside`.

    It never replaces anything. Raises `OSError`, `FileExistsError` if there is something at
    `path`; after that, or an exception of the block, no trace of the file is left
    (of one that could not be brought to disk under its name, the name may be).
    """
    file, temporary = _created(disk, path, beside)
    try:
        yield file
        file.sync()
        disk.publish(temporary, path)
        # Not by closing: a copy of the descriptor in the child of a fork would hold it on.
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
            locked = True  # a file system without locks: no process treats it as a left-over there
        # Between the two lines above another process may have removed it as a left-over.
        if locked and disk.exists(temporary):
            return file, temporary
        file.close()


def remove_left_overs(
    disk: Disk, path: str, beside: Access, ending: re.Pattern[str] = _LEFT_OVER
) -> list[str]:
    """Unlink what killed processes have left beside `path`; returns the names.

    `beside` is the access of the stream, `ending` is how the names go on behind `path`. What
    cannot be removed stays, as does what somebody is writing, and what is a link or another
    user's.
    """
    removed = []
    for name in disk.beside(path):
        if not ending.fullmatch(name, len(path)):
            continue
        with contextlib.suppress(OSError, UntrustedFile):
            file = disk.open(name, write=True, beside=beside)
            try:
                if file.lock():
                    disk.unlink(name)
                    removed.append(name)
            finally:
                file.close()
    return removed
