"""Single bits of a stream file that are changed on the disk."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from datastreamer.storage.stream import DataStream
from tests.network.fixtures import append

PAGE = 1 << 20
FIRST = 4096
SIZE = 20_000
A_PAGE = PAGE // (SIZE + 17)
"""Entries in a page of `written`."""


def written(path: Path, pages: int = 9) -> None:
    """A stream with that many whole pages, whose first page begins with the bookmark "key"; the
    first entry of page n > 0 is n * A_PAGE."""
    with DataStream.create(path, sync="os", index="memory") as made:
        entries = [(1, bytes([n % 251]) * SIZE) for n in range(pages * A_PAGE + 3)]
        entries[2 * A_PAGE + 5] = (0xB0, b"key")
        append(made, *entries)


def flip(path: Path, page: int, at: int = 5_000) -> None:
    """Change a bit of a page, at byte `at` in it, on the disk."""
    with path.open("r+b", buffering=0) as file:
        file.seek(FIRST + page * PAGE + at)
        old = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([old[0] ^ 4]))
    evict(path)


def evict(path: Path) -> None:
    """Remove the file from the page cache; skips the test if the system keeps it there."""
    with path.open("rb", buffering=0) as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        for offset in range(FIRST, FIRST + 3 * PAGE, PAGE // 4):
            try:
                os.preadv(file.fileno(), [bytearray(1)], offset, os.RWF_NOWAIT)
            except BlockingIOError:
                continue
            except OSError:
                pass
            pytest.skip("this file system keeps pages in memory, or cannot say")
