"""A disk that nothing is written to: changes of its files are kept in memory.

For a plan, which carries out the steps of a repair and leaves everything as it is. Knows bytes and
offsets, nothing of pages or entries.
"""

from __future__ import annotations

import errno
import os
from typing import Any, Final, cast

from datastreamer.storage.disk.access import Access
from datastreamer.storage.disk.file_ops import Buffer, Disk, File

# Changes are kept in blocks of this size.
_BLOCK: Final = 64 * 1024


class _Changes:
    """What was written to one file: its size, and the blocks that were changed."""

    def __init__(self, size: int) -> None:
        self.size = size
        # Up to here the file itself has the bytes that are in no block.
        self.kept = size
        self.blocks: dict[int, bytearray] = {}


class DryRun:
    """Reads the files of `disk`. No file is made, renamed or removed: that raises `OSError`
    (EROFS)."""

    def __init__(self, disk: Disk) -> None:
        self._disk = disk
        self._changes: dict[str, _Changes] = {}

    def over(self, file: File, path: str) -> File:
        """The open file at `path`, with the changes that were made to it here."""
        changes = self._changes.setdefault(path, _Changes(file.size()))
        return cast("File", _DryFile(file, changes))

    def open(self, path: str, *, write: bool, beside: Access | None = None) -> File:
        del write
        return self.over(self._disk.open(path, write=False, beside=beside), path)

    def create(self, path: str, beside: Access | None = None) -> File:
        raise _refused(path)

    def publish(self, temporary: str, path: str) -> None:
        raise _refused(path)

    def unlink(self, path: str) -> None:
        raise _refused(path)

    def identity(self, path: str) -> tuple[int, int]:
        return self._disk.identity(path)

    def exists(self, path: str) -> bool:
        return self._disk.exists(path)

    def beside(self, path: str) -> list[str]:
        return self._disk.beside(path)


def _refused(path: str) -> OSError:
    return OSError(errno.EROFS, os.strerror(errno.EROFS), path)


class _DryFile:
    """One open file; all that is not a change is done by the file itself."""

    def __init__(self, file: File, changes: _Changes) -> None:
        self._file = file
        self._changes = changes

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def size(self) -> int:
        return self._changes.size

    def read(self, size: int, offset: int) -> bytes:
        stop = min(offset + size, self._changes.size)
        blocks = self._changes.blocks
        if not any(at in blocks for at in range(offset // _BLOCK, -(-stop // _BLOCK))):
            return self._unchanged(offset, stop)
        parts = []
        while offset < stop:
            at, inside = divmod(offset, _BLOCK)
            end = min(stop, (at + 1) * _BLOCK)
            if at in blocks:
                parts.append(bytes(blocks[at][inside : inside + end - offset]))
            else:
                parts.append(self._unchanged(offset, end))
            offset = end
        return b"".join(parts)

    def _unchanged(self, start: int, stop: int) -> bytes:
        """Bytes that are in no block."""
        kept = min(stop, self._changes.kept)
        found = self._file.read(kept - start, start) if start < kept else b""
        return found.ljust(max(0, stop - start), b"\0")

    def write(self, data: Buffer, offset: int) -> None:
        view, changes = memoryview(data), self._changes
        changes.size = max(changes.size, offset + len(view))
        while view:
            at, inside = divmod(offset, _BLOCK)
            if at not in changes.blocks:
                start = at * _BLOCK
                changes.blocks[at] = bytearray(self._unchanged(start, start + _BLOCK))
            part = view[: _BLOCK - inside]
            changes.blocks[at][inside : inside + len(part)] = part
            view, offset = view[len(part) :], offset + len(part)

    def resize(self, size: int) -> None:
        changes = self._changes
        changes.size, changes.kept = size, min(changes.kept, size)
        for at, block in list(changes.blocks.items()):
            left = size - at * _BLOCK
            if left <= 0:
                del changes.blocks[at]
            elif left < _BLOCK:
                block[left:] = bytes(_BLOCK - left)

    def sync(self) -> None:
        """Nothing has to reach the disk."""
