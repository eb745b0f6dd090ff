"""Whether a path still leads to the file that was opened by it.

Owns the comparison: device and inode of the path, symbolic links followed, with those of the
open file, and the number of links that the open file has. Knows nothing of streams; what
follows from a difference is for the caller to decide.
"""

from __future__ import annotations

import errno
import os
import sys
from typing import Final

from datastreamer.storage.disk.file_ops import Disk, File

LOOK_SECONDS: Final = 0.9
"""The interval of the looks: less than the second that is documented, by more than the
resolution of the clocks that are compared with it."""

_NOTHING_THERE: Final = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP)


class OpenPath:
    """The path that a file was opened by, and the open file."""

    def __init__(self, disk: Disk, path: str, file: File) -> None:
        self.disk = disk
        self._file = file
        # The process may work in another folder later. Not normalised: "link/../x" is beside the
        # folder that the link leads to.
        self.absolute = os.path.join(os.getcwd(), path) if not os.path.isabs(path) else path

    @property
    def way_to_save(self) -> str:
        """How the open file is copied wherever its path leads, in words."""
        call = "call stream.snapshot(OUT)"
        if not sys.platform.startswith("linux"):  # no process opens the descriptors of another
            return call
        place = f"/proc/{os.getpid()}/fd/{self._file.fileno()}"
        return f"{call} or run `datastreamer snapshot {place} OUT`"

    def difference(self) -> str:
        """Why the path does not lead to the open file any more, for a message; "" if it does, and
        where the file is closed."""
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
