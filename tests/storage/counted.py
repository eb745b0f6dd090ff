"""A history with every kind of page, and a reader of it whose reads are counted."""

from __future__ import annotations

from pathlib import Path

from datastreamer.storage.disk.file_ops import OsDisk, OsFile
from datastreamer.storage.header.records import Head
from datastreamer.storage.read.reader import Reader
from tests.storage.made import BOOKMARK, LARGEST, PAGE, Item, header_of

# Page 0: filled to the last byte. Page 1: small ones, then padding. Page 2: the largest
# entry alone. Page 3: 17 bytes are left, and filled by an empty entry. Page 4: 16 are left.
# Page 5: one byte is left. Page 6: the rest.
HISTORY: list[list[Item]] = [
    [(1, b"a" * 1000), (1, b"b" * (PAGE - 1017 - 17))],
    [(BOOKMARK, b"k"), *[(2, bytes([n]) * n) for n in range(1, 200)]],
    [(3, b"c" * LARGEST)],
    [(4, b"d" * (PAGE - 34)), (4, b"")],
    [(5, b"e" * (PAGE - 33))],
    [(6, b"f" * (PAGE - 18)), (6, b"")],
    [(BOOKMARK, b"l"), (BOOKMARK, b"m"), (7, b"last")],
]


class Counted(OsFile):
    """Counts what is read."""

    reads = 0
    bytes_read = 0

    def read(self, size: int, offset: int) -> bytes:
        self.reads += 1
        self.bytes_read += size
        return super().read(size, offset)


def open_reader(path: Path, head: Head | None = None) -> tuple[Counted, Reader]:
    opened = OsDisk().open(str(path), write=False)
    file = Counted(opened.fileno())
    opened._fd = -1
    return file, Reader(file, str(path), head or Head(*header_of(path)[-2:]))
