"""What the tests of storage work on: small streams, an independent scan, disks that fail.

The scan is a few lines of `struct`, so that nothing is compared with itself.
"""

from __future__ import annotations

import ctypes
import errno
import hashlib
import mmap
import os
import shutil
import struct
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import xxhash

from datastreamer import DataStream
from datastreamer.storage.disk.access import Access, create_file, open_file
from datastreamer.storage.disk.file_ops import Buffer, File, OsDisk, OsFile
from datastreamer.storage.header import records
from datastreamer.storage.header import undo_journal as journal
from datastreamer.storage.header.undo_journal import Undo
from datastreamer.storage.pages.hashes import EndSum
from datastreamer.storage.pages.sidecar import PageSum, SumsHeader
from tests.storage.steps import SteppedCommit, Writes

PAGE = 1 << 20
FIRST = 4096
BOOKMARK = 0xB0
LARGEST = PAGE - 17
HEAD = struct.Struct(">BIIQ")
HEADER = struct.Struct(">BIBQQQQ")
OTHER_BOOT = b"another boot, 16"

Item = tuple[int, bytes]

ONE: list[Item] = [(BOOKMARK, b"k"), (1, b"one")]
TWO: list[Item] = [(2, b"two" * 100), (BOOKMARK, b"k")]
THREE: list[Item] = [(3, b"three"), (3, b"")]
# The ways to open a stream.
MODES: list[dict[str, Any]] = [{"read_only": True}, {"follow": True}, {"index": "memory"}]


class Scanned(NamedTuple):
    number: int
    type: int
    data: bytes
    offset: int


def header_of(path: Path) -> tuple[int, ...]:
    """packet type, length, version, system id, stream type, total length, total entries."""
    with path.open("rb") as source:
        source.seek(16)
        return HEADER.unpack(source.read(HEADER.size))


def scan_file(path: Path) -> list[Scanned]:
    """Every committed entry, read as the format says it, with nothing of the package."""
    content = path.read_bytes()
    total_length, total_entries = header_of(path)[-2:]
    found: list[Scanned] = []
    at = FIRST
    while at < total_length:
        if content[at] == 0:
            at = FIRST + -(-(at - FIRST) // PAGE) * PAGE
            continue
        packet, length, kind, number = HEAD.unpack_from(content, at)
        assert packet == 2
        assert number == len(found)
        assert (at - FIRST) % PAGE + length <= PAGE
        found.append(Scanned(number, kind, content[at + 17 : at + length], at))
        at += length
    assert (at, len(found)) == (total_length, total_entries)
    return found


def sum_at(content: bytes, head: Sequence[int], *, chained_from: int = 0) -> EndSum:
    """What a record says of the entries up to a head, from the bytes of a file: each page's hash
    is that of its entries, and the chain runs over the pages before the last one."""
    length, entries = head
    chain, tail, page, at, number = bytes(16), b"", chained_from, FIRST + chained_from * PAGE, None
    while at < length:
        if (at - FIRST) // PAGE != page:
            digest = xxhash.xxh3_128_digest(tail)
            chain, tail, page = xxhash.xxh3_128_digest(chain + digest), b"", page + 1
        if content[at] == 0:
            if FIRST + (page + 1) * PAGE >= length:
                break
            at = FIRST + (page + 1) * PAGE
            continue
        _, size, _, number = HEAD.unpack_from(content, at)
        assert size >= HEAD.size
        tail += content[at : at + size]
        at += size
    assert number == (entries - 1 if entries else None)
    return EndSum(chain, chained_from, xxhash.xxh3_128_digest(tail))


def page_sums(path: Path) -> list[PageSum]:
    """Compare `FILE.sums` with an independent reading of the stream; returns the records."""
    content, packed = path.read_bytes(), path.with_name(path.name + ".sums").read_bytes()
    record, chain, found = record_of(path), bytes(16), []
    header = SumsHeader.unpack(packed)
    assert header is not None
    assert header.stream_id == record.stream_id
    assert header.epoch == header.next_epoch == record.epoch
    assert header.trusted == 2**64 - 1
    entries: dict[int, list[tuple[int, int, int]]] = {}
    for number, _, data, offset in scan_file(path):
        entries.setdefault((offset - FIRST) // PAGE, []).append(
            (number, offset, offset + 17 + len(data))
        )
    pages = sorted(entries)[:-1]
    assert len(packed) == 512 + 64 * len(pages)
    for page in pages:
        start, stop = entries[page][0][1], entries[page][-1][2]
        digest = xxhash.xxh3_128_digest(content[start:stop])
        chain = xxhash.xxh3_128_digest(chain + digest)
        padding = xxhash.xxh3_64_intdigest(content[stop : FIRST + (page + 1) * PAGE])
        known = PageSum(chain, digest, entries[page][-1][0] + 1, stop - start, padding)
        at = 512 + 64 * page
        assert packed[at : at + 64] == known.pack(page, record.stream_id)
        found.append(known)
    assert record.after_sum.chain == chain
    assert record.after_sum.chained_from == 0
    return found


def bookmarks_of(entries: Iterable[Scanned]) -> dict[bytes, int]:
    """What a bookmark index has to say: each key's last entry."""
    return {e.data: e.number for e in entries if e.type == BOOKMARK and 1 <= len(e.data) <= 16}


def add(stream: DataStream, *operations: Sequence[Item]) -> None:
    """Commit each operation: items (type, data), bookmarks by their type."""
    for operation in operations:
        with stream.atomic_op() as op:
            for kind, data in operation:
                if kind == BOOKMARK:
                    op.add_bookmark(data)
                else:
                    op.add_entry(kind, data)


def make(path: Path, *operations: Sequence[Item], **options: Any) -> Path:
    """A closed stream file with these operations."""
    with DataStream.create(path, **options) as stream:
        add(stream, *operations)
    return path


def items(stream: DataStream) -> list[Item]:
    return [(entry.type, entry.data) for entry in stream.entries()]


def digest(parts: Iterable[bytes]) -> str:
    hasher = hashlib.sha256()
    for part in parts:
        hasher.update(part)
    return hasher.hexdigest()


def trace_of(folder: Path) -> dict[str, tuple[int, int, int, str]]:
    """All that a look at a folder and its files can show: nothing may have changed in it."""
    found = {}
    for path in [folder, *sorted(folder.rglob("*"))]:
        stat = path.stat()
        content = "" if path.is_dir() else hashlib.sha256(path.read_bytes()).hexdigest()
        found[str(path)] = (stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, content)
    return found


# Power cuts.


def power_cut(
    source: Path,
    target: Path,
    *lost: tuple[int, int],
    boot: bytes = OTHER_BOOT,
    change: Callable[[bytearray], None] | None = None,
) -> Path:
    """A copy of a stream file as another boot of the machine finds it.

    The bytes of each span in `lost` are zeros: they never reached the disk. The commit
    record says that it was written under `boot`.
    """
    content = bytearray(source.read_bytes())
    record = records.get_record(content)
    assert record is not None
    page = content[:FIRST]
    records.put_record(page, record._replace(boot_id=boot))
    content[:FIRST] = page
    for start, end in lost:
        content[start:end] = bytes(end - start)
    if change is not None:
        change(content)
    target.write_bytes(content)
    return target


def copied(path: Path, name: str) -> Path:
    """The file as it is now, beside it: what a crash at this moment leaves."""
    target = path.with_name(name)
    shutil.copyfile(path, target)
    return target


def half_update(path: Path, offset: int, old: bytes, new: bytes) -> None:
    """A crash in the middle of an update: its journal, and some sectors of the new bytes."""
    content = path.read_bytes()
    record = records.get_record(content[:FIRST])
    assert record is not None
    undo = Undo(record.stream_id, record.epoch, content[16:54], offset, old, new)
    with path.open("rb") as stream:
        journal.put(OsDisk(), str(path), undo, Access.of(stream.fileno()))
    half = 512 - offset % 512
    assert 0 < half < len(new)
    path.write_bytes(content[:offset] + new[:half] + content[offset + half :])


def record_of(path: Path) -> records.CommitRecord:
    record = records.get_record(path.read_bytes()[:4096])
    assert record is not None
    return record


def sides(path: Path) -> list[Path]:
    """The files that an open has kept beside the stream."""
    return sorted(path.parent.glob(f"{path.name}.*.cut"))


def size_of(path: Path) -> int:
    size = path.stat().st_size
    assert (size - FIRST) % PAGE == 0
    return size


def evict(path: Path, start: int = 0, count: int = 0) -> None:
    """Remove the file, or `count` bytes of it, from the page cache; skips the test if the system
    keeps them there."""
    with path.open("rb", buffering=0) as file:
        os.fsync(file.fileno())
        for _ in range(_TRIES):
            os.posix_fadvise(file.fileno(), start, count, os.POSIX_FADV_DONTNEED)
            if not _resident(file.fileno(), start, count):
                return
            # Other processors may hold pages for a moment.
            time.sleep(0.01)
    pytest.skip("this file system keeps pages in memory, or cannot say")


def _resident(fd: int, start: int, count: int) -> int:
    """The number of blocks in the page cache, found without a read, which would fill it."""
    with mmap.mmap(fd, 0, flags=mmap.MAP_PRIVATE) as mapped:
        blocks = (ctypes.c_ubyte * -(-len(mapped) // mmap.PAGESIZE))()
        address = ctypes.addressof(begin := ctypes.c_char.from_buffer(mapped))
        libc = ctypes.CDLL(None, use_errno=True)
        failed = libc.mincore(ctypes.c_void_p(address), ctypes.c_size_t(len(mapped)), blocks)
        del begin
        first, stop = start // mmap.PAGESIZE, (start + count) // mmap.PAGESIZE or None
        return len(blocks) if failed else sum(block & 1 for block in blocks[first:stop])


# A disk that fails on demand.

_SECTOR = 512
_TRIES = 100


class FaultyFile(SteppedCommit, OsFile):
    def __init__(self, fd: int, disk: FaultyDisk) -> None:
        super().__init__(fd)
        self.disk = disk

    def read(self, size: int, offset: int) -> bytes:
        if any(offset < bad + _SECTOR and bad < offset + size for bad in self.disk.bad_sectors):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return super().read(size, offset)

    def write(self, data: Buffer, offset: int) -> None:
        self.disk.meet("write")
        super().write(data, offset)
        stop = offset + len(data)
        self.disk.bad_sectors -= {
            bad for bad in self.disk.bad_sectors if offset <= bad and bad + _SECTOR <= stop
        }

    def sync(self) -> None:
        self.disk.meet("sync")
        super().sync()

    def resize(self, size: int) -> None:
        self.disk.resized.append(size)
        self.disk.meet("resize", size)
        super().resize(size)

    def do_step(self, step: str, writes: Writes) -> None:
        self.disk.meet(f"commit {step}")
        if step == "sync":
            super().sync()
        for data, offset in writes:
            super().write(data, offset)


class FaultyDisk(OsDisk):
    """The real disk, but what `faults` names fails: a name of an operation -> errno.

    ``commit data|header|sync|mark``, ``write``, ``sync``, ``resize``; `largest` bounds
    the sizes that a resize may have. What is in `before` is called before the
    operation of that name. Sectors at the offsets `bad_sectors` cannot be read until they are
    written.
    """

    def __init__(self) -> None:
        self.faults: dict[str, int] = {}
        self.before: dict[str, Callable[[], object]] = {}
        self.largest: int | None = None
        self.bad_sectors: set[int] = set()
        self.resized: list[int] = []

    def meet(self, what: str, size: int = 0) -> None:
        if what in self.before:
            self.before[what]()
        number = self.faults.get(what)
        if self.largest is not None and size > self.largest:
            number = errno.ENOSPC
        if number is not None:
            raise OSError(number, os.strerror(number))

    def open(self, path: str, *, write: bool, beside: Access | None = None) -> FaultyFile:
        if beside is not None:
            return FaultyFile(open_file(path, beside, write=write), self)
        fd = os.open(path, (os.O_RDWR if write else os.O_RDONLY) | os.O_CLOEXEC)
        return FaultyFile(fd, self)

    def create(self, path: str, beside: Access | None = None) -> FaultyFile:
        return FaultyFile(create_file(path, beside), self)


class Stop(BaseException):
    """The process is killed here."""


class KilledDisk(FaultyDisk):
    """Simulates a kill before one of the disk's operations."""

    def __init__(self, left: int) -> None:
        super().__init__()
        self.left = left

    def meet(self, what: str, size: int = 0) -> None:
        if self.left == 0:
            raise Stop
        self.left -= 1


def _is_file(file: FaultyFile) -> File:
    return file  # mypy says here where the double no longer fits the protocol
