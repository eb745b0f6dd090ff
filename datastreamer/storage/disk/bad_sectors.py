"""A file of which the disk cannot read parts: the check and the repair of a stream read around
these, and find what they held to be damaged.

Knows offsets and bytes, nothing of pages or entries.
"""

from __future__ import annotations

import errno
import logging
from typing import Any, Final, cast

from datastreamer.storage.disk.file_ops import File

_log = logging.getLogger(__name__)

# What a disk can read or not as a whole is at most this long, in bytes.
_BLOCK: Final = 4096


def read_around(file: File, path: str) -> File:
    """The same file; bytes that the disk cannot read (EIO) are read as zeros, and logged. `path`
    is for messages."""
    return cast("File", _ReadsAround(file, path))


class _ReadsAround:
    def __init__(self, file: File, path: str) -> None:
        self._file = file
        self._path = path
        self._logged: set[int] = set()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def read(self, size: int, offset: int) -> bytes:
        try:
            return self._file.read(size, offset)
        except OSError as error:
            if error.errno != errno.EIO:
                raise
        stop = min(offset + size, self._file.size())
        found = bytearray()
        while offset < stop:
            end = min(stop, offset - offset % _BLOCK + _BLOCK)
            found += self._read_block(offset, end)
            offset = end
        return bytes(found)

    def _read_block(self, start: int, stop: int) -> bytes:
        try:
            return self._file.read(stop - start, start)
        except OSError as error:
            if error.errno != errno.EIO:
                raise
            if start not in self._logged:
                self._logged.add(start)
                words = "%s: the disk cannot read bytes %d to %d: %s"
                _log.error(words, self._path, start, stop - 1, error.strerror)
            return bytes(stop - start)
