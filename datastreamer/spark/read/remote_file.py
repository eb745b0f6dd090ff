"""A file of a `pyarrow.fs` file system (S3, HDFS, ...), with the read interface of storage files.

Owns how many bytes a request asks for: a request costs milliseconds, whatever its size.
"""

from __future__ import annotations

from typing import Any, Final

from datastreamer.errors import StreamFileError

AHEAD: Final = 8 << 20
"""Bytes per request while a file is read sequentially."""


class RemoteFile:
    """An open file; implements `storage.disk.file_ops.Readable`.

    Below file offset `until`, a read that continues the previous one requests `AHEAD` bytes.
    `bytes_read` counts the bytes received.
    """

    def __init__(self, file: Any, path: str) -> None:
        self._file = file
        self._path = path
        self._size: int = file.size()
        self._ahead = b""
        self._ahead_at = 0
        self._end = -1
        self.until = 0
        self.bytes_read = 0

    def size(self) -> int:
        return self._size

    def read(self, size: int, offset: int) -> bytes:
        """Up to `size` bytes; fewer only at the end of the file."""
        at = offset - self._ahead_at
        if at >= 0 and at + size <= len(self._ahead):
            self._end = offset + size
            return self._ahead[at : at + size]
        if offset != self._end or offset + size > self.until:
            self._end = offset + size
            return self._fetch(size, offset)
        self._end = offset + size
        self._ahead_at = offset
        self._ahead = self._fetch(max(size, min(AHEAD, self.until - offset)), offset)
        return self._ahead[:size]

    def _fetch(self, size: int, offset: int) -> bytes:
        size = min(size, self._size - offset)
        if size <= 0:
            return b""
        try:
            data: bytes = self._file.read_at(size, offset)
        except OSError as error:
            raise StreamFileError(self._path, f"cannot be read: {error}") from error
        self.bytes_read += len(data)
        return data

    def close(self) -> None:
        self._file.close()
