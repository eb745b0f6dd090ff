"""Single bits of a stream file that are changed on the disk."""

from __future__ import annotations

import os
from pathlib import Path

from datastreamer.storage.stream import DataStream
from tests.network.fixtures import append
from tests.storage.made import evict

PAGE = 1 << 20
FIRST = 4096
SIZE = 20_000
PAGES = 9
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


def flip(
    path: Path, page: int, at: int = 5_000, *, only_page: bool = False, in_memory: bool = False
) -> None:
    """Change a bit of a page, at byte `at` in it, on the disk. Evicts the file, or `only_page`;
    with `in_memory` nothing, so that readers find the bit changed in the page cache."""
    with path.open("r+b", buffering=0) as file:
        file.seek(FIRST + page * PAGE + at)
        old = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([old[0] ^ 4]))
    if only_page:
        evict(path, FIRST + page * PAGE, PAGE)
    elif not in_memory:
        evict(path)
