"""Single bits of a stream file that are changed on the disk."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from datastreamer.storage.stream import DataStream
from tests.network.fixtures import append

PAGE = 1 << 20
FIRST = 4096
SIZE = 20_000
PAGES = 9
_TRIES = 100
A_PAGE = PAGE // (SIZE + 17)
"""Entries in a page of `written`."""


def written(path: Path) -> None:
    """A stream with `PAGES` whole pages, and one more that is not; page n begins with entry
    n * A_PAGE. Page 2 has the bookmark "key"."""
    with DataStream.create(path, sync="os") as made:
        entries = [(1, bytes([n % 251]) * SIZE) for n in range(PAGES * A_PAGE + 3)]
        key = 2 * A_PAGE + 5
        # Both are as long as two others.
        entries[key : key + 2] = [(0xB0, b"key"), (1, bytes(2 * (SIZE + 17) - 20 - 17))]
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
        for _ in range(_TRIES):
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            pages = range(FIRST, FIRST + PAGES * PAGE, PAGE)
            if not any(_resident(file.fileno(), start) for start in pages):
                return
            # Other processors may hold pages for a moment.
            time.sleep(0.01)
    pytest.skip("this file system keeps pages in memory, or cannot say")


def _resident(fd: int, start: int) -> bool:
    """Whether samples of a page are in the page cache."""
    try:
        for offset in range(start, start + PAGE, PAGE // 4):
            os.preadv(fd, [bytearray(1)], offset, os.RWF_NOWAIT)
    except BlockingIOError:
        return False
    except OSError:
        pass
    return True
