"""Checks whether a path still leads to the file that was opened by it.

Compares device and inode of the path, symbolic links followed, with those of the open file, and
checks that the open file has a name. Knows nothing of streams; the caller acts on a difference.
"""

from __future__ import annotations

import errno
import os
import sys
from typing import Final

from datastreamer.storage.disk.file_ops import Disk, File

LOOK_SECONDS: Final = 0.9
"""Interval between checks: less than the documented second, by more than the resolution of the
clocks."""

_NOTHING_THERE: Final = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP)


class OpenPath:
    """The path that a file was opened by, and the open file."""

    def __init__(self, disk: Disk, path: str, file: File) -> None:
        self.disk = disk
        self._file = file
        # Absolute, as the process may change its working directory. Not normalised: "link/../x" is
        # beside the folder that the link leads to.
        self.absolute = os.path.join(os.getcwd(), path) if not os.path.isabs(path) else path

    @property
    def way_to_save(self) -> str:
        """How to copy the open file, for a message."""
        call = "call stream.snapshot(OUT)"
        if not sys.platform.startswith("linux"):  # no process opens the descriptors of another
            return call
        place = f"/proc/{os.getpid()}/fd/{self._file.fileno()}"
        return f"{call} or run `datastreamer snapshot {place} OUT`"

    def difference(self) -> str:
        """Why the path no longer leads to the open file, for a message; "" if it does, or if the
        file is closed."""
        try:
            there = self.disk.identity(self.absolute)
        except OSError as error:
            if error.errno not in _NOTHING_THERE:
                return f"the path cannot be looked up ({error.strerror or error})"
            there = None
        try:
            ours, linked = self._file.identity(), self._file.links() > 0
        except OSError as error:
            if error.errno == errno.EBADF:
                return ""  # closed meanwhile, by another thread
            raise
        if there is None:
            return "the file was moved away" if linked else "the file was removed"
        if there != ours:
            lost = "moved away" if linked else "removed"
            return f"the file was {lost}, and another file is at its path now"
        return "" if linked else "the file was removed"
