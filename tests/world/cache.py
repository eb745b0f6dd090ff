"""The system's page cache over simulated disks: which blocks of a file are in memory.

The package asks the system by file descriptors, so the files of this module have one, a negative
one, and `CacheOs` takes the place of the module `os` where the package asks. Blocks are in memory
from when they are written or read until they are evicted. Knows no streams.
"""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Iterator
from typing import Any
from unittest import mock
from weakref import WeakValueDictionary

from datastreamer.server.streaming import cold_reads
from datastreamer.storage.disk import residency, uncached
from datastreamer.storage.disk.file_ops import Buffer
from datastreamer.storage.pages import page_states
from tests.storage.lab.disk import Process, SimFile
from tests.storage.lab.image import BLOCK, Inode

_files: WeakValueDictionary[int, CachedFile] = WeakValueDictionary()
_numbers = itertools.count(2)


def _blocks(start: int, count: int) -> range:
    return range(start // BLOCK, -(-(start + count) // BLOCK))


class CachedFile(SimFile):
    """An open file whose blocks may be on the disk only."""

    def __init__(self, process: Process, inode: Inode, writes: bool) -> None:
        super().__init__(process, inode, writes)
        self._fd = -next(_numbers)
        _files[self._fd] = self

    def fileno(self) -> int:
        return self._fd

    def read(self, size: int, offset: int) -> bytes:
        self.load(offset, size)
        return super().read(size, offset)

    def _write(self, data: Buffer, offset: int, what: str) -> None:
        super()._write(data, offset, what)
        self.load(offset, len(memoryview(data)))

    def load(self, start: int, count: int) -> None:
        if self._inode.cold:
            self._inode.cold.difference_update(_blocks(start, count))

    def evict(self, start: int, count: int) -> None:
        """What is not on disk yet remains."""
        if not self._inode.pending:
            self._inode.cold.update(_blocks(start, count))

    def is_cold(self, offset: int) -> bool:
        return offset // BLOCK in self._inode.cold


class CacheOs:
    """The module `os`, for descriptors of these files too."""

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)

    def preadv(self, fd: int, buffers: Any, offset: int, flags: int = 0) -> int:
        file = _files.get(fd)
        if file is None:
            return os.preadv(fd, buffers, offset, flags)
        if file.is_cold(offset):
            raise BlockingIOError
        return len(buffers[0])

    def pread(self, fd: int, count: int, offset: int) -> bytes:
        file = _files.get(fd)
        return os.pread(fd, count, offset) if file is None else file.read(count, offset)

    def posix_fadvise(self, fd: int, offset: int, count: int, advice: int) -> None:
        file = _files.get(fd)
        if file is None:
            os.posix_fadvise(fd, offset, count, advice)
        elif advice == os.POSIX_FADV_DONTNEED:
            file.evict(offset, count)
        elif advice == os.POSIX_FADV_WILLNEED:
            # At once; and nobody has looked at it.
            file.load(offset, count)


@contextlib.contextmanager
def simulated() -> Iterator[None]:
    """The package asks these files what is in memory."""
    with contextlib.ExitStack() as patches:
        for module in (cold_reads, page_states, residency, uncached):
            patches.enter_context(mock.patch.object(module, "os", CacheOs()))
            if hasattr(module, "_NOWAIT"):
                patches.enter_context(mock.patch.object(module, "_NOWAIT", 8))
        yield
