"""One file of the simulated disk: what programs see of it, and what a power cut may leave.

`Inode` keeps the bytes that are on disk, and all that changed since its last sync: writes
sector by sector of 512 bytes, and sizes. What of that arrives is for the disk to choose.
Knows no names, no processes and no streams.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from datastreamer.storage.disk.file_ops import Buffer

if TYPE_CHECKING:
    from tests.storage.lab.disk import SimFile

SECTOR = 512
BLOCK = 4096  # what an image keeps together; also what a killed write is whole in
_ZEROS = bytes(BLOCK)


class Image:
    """The bytes of a file, sparse and cheap to copy."""

    __slots__ = ("blocks", "size")

    def __init__(self, blocks: dict[int, bytes] | None = None, size: int = 0) -> None:
        self.blocks = blocks or {}
        self.size = size

    def copy(self) -> Image:
        return Image(dict(self.blocks), self.size)

    def read(self, size: int, offset: int) -> bytes:
        end = min(offset + size, self.size)
        if offset >= end:
            return b""
        first, last = offset // BLOCK, (end - 1) // BLOCK
        get = self.blocks.get
        if first == last:
            return get(first, _ZEROS)[offset - first * BLOCK : end - first * BLOCK]
        joined = b"".join([get(at, _ZEROS) for at in range(first, last + 1)])
        return joined[offset - first * BLOCK : end - first * BLOCK]

    def write(self, data: Buffer, offset: int) -> None:
        view = memoryview(data)
        end = offset + len(view)
        self.size = max(self.size, end)
        at = offset
        while at < end:
            block, start = divmod(at, BLOCK)
            take = min(BLOCK - start, end - at)
            part = bytes(view[at - offset : at - offset + take])
            if take < BLOCK:
                old = self.blocks.get(block, _ZEROS)
                part = b"%b%b%b" % (old[:start], part, old[start + take :])
            if part == _ZEROS:
                self.blocks.pop(block, None)
            else:
                self.blocks[block] = part
            at += take

    def resize(self, size: int) -> None:
        if size < self.size:
            last, rest = divmod(size, BLOCK)
            for block in [at for at in self.blocks if at >= last + bool(rest)]:
                del self.blocks[block]
            if rest and last in self.blocks:
                self.blocks[last] = self.blocks[last][:rest].ljust(BLOCK, b"\0")
        self.size = size

    def content(self) -> bytes:
        return self.read(self.size, 0)


class Wrote(NamedTuple):
    """The sectors that a write touched, as they were right after it."""

    sector: int
    content: bytes

    def parts(self) -> Iterator[tuple[int, bytes]]:
        for at in range(0, len(self.content), SECTOR):
            yield self.sector + at // SECTOR, self.content[at : at + SECTOR]


class Resized(NamedTuple):
    size: int


@dataclass
class Inode:
    number: int
    seen: Image = field(default_factory=Image)
    durable: Image = field(default_factory=Image)
    # In order, since the last sync.
    pending: list[Wrote | Resized] = field(default_factory=list)
    # How many have left it: two syncs may be under way at once, and each speaks of its own.
    left: int = 0
    # After a sync that failed: what these sectors may be on disk, though no sync will write
    # them again.
    doubtful: dict[int, list[bytes]] = field(default_factory=dict)
    locker: SimFile | None = None
    # Blocks that are not in the system's cache.
    cold: set[int] = field(default_factory=set)

    @property
    def identity(self) -> tuple[int, int]:
        return 1, self.number

    def copy(self) -> Inode:
        doubtful = {sector: list(found) for sector, found in self.doubtful.items()}
        seen, durable = self.seen.copy(), self.durable.copy()
        return Inode(self.number, seen, durable, list(self.pending), self.left, doubtful)

    def write(self, data: Buffer, offset: int) -> None:
        size = self.seen.size
        self.seen.write(data, offset)
        if self.seen.size > size:
            self.pending.append(Resized(self.seen.size))
        first = offset // SECTOR
        last = (offset + len(memoryview(data)) - 1) // SECTOR
        content = self.seen.read((last + 1 - first) * SECTOR, first * SECTOR)
        self.pending.append(Wrote(first, content))

    def resize(self, size: int) -> None:
        if size < self.seen.size:
            # The old bytes read as zeros when the file grows again.
            first = -(-size // SECTOR)
            zeros = bytes(max(0, self.seen.size // SECTOR - first) * SECTOR)
            if zeros:
                self.pending.append(Wrote(first, zeros))
        self.seen.resize(size)
        self.pending.append(Resized(size))

    def changes(self) -> int:
        """How many there were, for `settle` and `give_up`: a sync is about those before it."""
        return self.left + len(self.pending)

    def settle(self, upto: int) -> None:
        """The changes before number `upto` are on disk."""
        count = max(0, upto - self.left)
        for change in self.pending[:count]:
            if isinstance(change, Resized):
                self.durable.resize(change.size)
                continue
            self.durable.write(change.content, change.sector * SECTOR)
            if self.doubtful:
                for sector, _ in change.parts():
                    self.doubtful.pop(sector, None)
        del self.pending[:count]
        self.left += count

    def give_up(self, upto: int) -> None:
        """A sync failed: the system takes for clean what may never have reached the disk."""
        count = max(0, upto - self.left)
        kept: list[Wrote | Resized] = []
        for change in self.pending[:count]:
            if isinstance(change, Wrote):
                for sector, part in change.parts():
                    self.doubtful.setdefault(sector, []).append(part)
            else:
                kept.append(change)
        self.pending[:count] = kept
        self.left += count - len(kept)

    def versions(self) -> tuple[dict[int, list[bytes]], list[int]]:
        """What each sector, and the size, may be after a power cut; the oldest first."""
        sizes = [self.durable.size]
        sectors: dict[int, list[bytes]] = {}

        def put(sector: int, part: bytes) -> None:
            found = sectors.get(sector)
            if found is None:
                old = self.durable.read(SECTOR, sector * SECTOR).ljust(SECTOR, b"\0")
                found = sectors[sector] = [old]
            found.append(part)

        for sector, parts in self.doubtful.items():
            for part in parts:
                put(sector, part)
        for change in self.pending:
            if isinstance(change, Resized):
                if change.size > sizes[-1]:
                    # Grown, and not all the way.
                    sizes.append((sizes[-1] + change.size) // 2 // SECTOR * SECTOR)
                sizes.append(change.size)
            else:
                for sector, part in change.parts():
                    put(sector, part)
        return sectors, sizes
