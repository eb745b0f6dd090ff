"""A disk in memory that can lose what a power cut may take.

Implements the `File` and `Disk` of ``datastreamer/storage/disk/file_ops.py``. A file is what
programs see of it, what is on disk, and all that changed since its last sync; names are
kept the same way. `SimDisk.power_cut` makes a disk of what is on disk and any part of the
rest: sector by sector of 512 bytes in any version since the last sync, sizes and names
each on their own (`image.py`). Knows nothing of streams.

Each program is a `Process` of its own: it may be killed, or end after a number of operations,
or have one of them fail.
"""

from __future__ import annotations

import contextlib
import errno
import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from datastreamer.storage.disk.access import Access
from datastreamer.storage.disk.file_ops import Buffer, Disk
from tests.storage.lab.image import BLOCK, SECTOR, Image, Inode, Wrote
from tests.storage.steps import COMMIT_ORDER, SteppedCommit, Writes


class Gone(BaseException):
    """The process has ended: killed, or the power is cut. No code may catch it and continue."""


class Unsettled(NamedTuple):
    """Something that a power cut may leave in any of `versions` ways, the oldest first."""

    what: str  # "name", "size" or "sector"
    path: str
    at: int  # which sector
    versions: int


Choose = Callable[[Sequence[Unsettled]], Sequence[int]]


@dataclass
class Interruption:
    """What ends or fails a process: at its operation number `after` from now.

    With `only` just the operations count whose name begins so. `error` is an errno; None
    ends the process. A write gets as far as `torn` of its bytes. `lasting`: whatever comes
    after it fails too, until it is removed.
    """

    after: int
    error: int | None = None
    lasting: bool = False
    torn: float = 0.0
    only: str = ""
    # What of it is on disk, where the system drops at once what a sync that fails left clean.
    evicts: Choose | None = None


class SimDisk:
    """Names and files. `boot` is the running system's id."""

    def __init__(self) -> None:
        self.boot = (1).to_bytes(16, "big")
        self.order: Sequence[str] = COMMIT_ORDER  # a mutant has another
        # How often pages went that a failed sync had left clean.
        self.evictions = 0
        # Called between the operations that change something, and in the middle of a write
        # to the first block (up to byte `tear` of it), with what is about to be done.
        self.watch: Callable[[str], None] | None = None
        self.tear = 0
        self.mutex = threading.RLock()
        self._inodes = 0
        self._names: dict[str, Inode] = {}
        self._durable_names: dict[str, Inode] = {}
        self._pending_names: list[tuple[str, Inode | None]] = []

    def process(self) -> Process:
        return Process(self)

    # What a test looks at.

    def image(self, path: str) -> Image:
        """The file as programs see it; a copy."""
        return self._names[path].seen.copy()

    def names(self) -> list[str]:
        return sorted(self._names)

    def unsettled(self) -> bool:
        """Whether a power cut now could take anything."""
        changed = any(inode.pending or inode.doubtful for inode in self._names.values())
        return changed or bool(self._pending_names)

    def copy(self) -> SimDisk:
        """The same disk under the same boot, with no process and no observer."""
        with self.mutex:
            new = self._like(self.boot)
            made: dict[int, Inode] = {}

            def copied(inode: Inode) -> Inode:
                return made.setdefault(inode.number, inode.copy())

            new._names = {name: copied(inode) for name, inode in self._names.items()}
            new._durable_names = {n: copied(inode) for n, inode in self._durable_names.items()}
            new._pending_names = [(n, i and copied(i)) for n, i in self._pending_names]
            return new

    def power_cut(self, choose: Choose) -> SimDisk:
        """What the next boot finds; `choose` says which version of each unsettled thing."""
        return self._left(choose, (int.from_bytes(self.boot, "big") + 1).to_bytes(16, "big"))

    def lose(self, choose: Choose) -> SimDisk:
        """The same under the boot of now: the volume was detached, and attached again."""
        return self._left(choose, self.boot)

    def _left(self, choose: Choose, boot: bytes) -> SimDisk:
        with self.mutex:
            new = self._like(boot)
            names: dict[str, list[Inode | None]] = {}
            for name, inode in self._pending_names:
                names.setdefault(name, [self._durable_names.get(name)]).append(inode)
            inodes: dict[int, tuple[str, Inode]] = {}
            for name, inode in [*self._durable_names.items(), *self._pending_names]:
                if inode is not None:
                    inodes.setdefault(inode.number, (name, inode))
            found = [(name, inode, *inode.versions()) for name, inode in inodes.values()]
            things = [Unsettled("name", name, 0, len(them)) for name, them in names.items()]
            for name, _, sectors, sizes in found:
                if len(sizes) > 1:
                    things.append(Unsettled("size", name, 0, len(sizes)))
                things += [Unsettled("sector", name, at, len(v)) for at, v in sectors.items()]
            picks = iter(choose(things))
            kept = dict(self._durable_names)
            for name, them in names.items():
                chosen = them[next(picks)]
                if chosen is None:
                    kept.pop(name, None)
                else:
                    kept[name] = chosen
            made: dict[int, Inode] = {}
            for _, inode, sectors, sizes in found:
                image = inode.durable.copy()
                size = sizes[next(picks) if len(sizes) > 1 else 0]
                image.resize(max(image.size, *sizes))
                for sector, versions in sectors.items():
                    pick = next(picks)
                    if pick:
                        image.write(versions[pick], sector * SECTOR)
                image.resize(size)
                made[inode.number] = Inode(inode.number, image, image.copy())
            new._names = {name: made[inode.number] for name, inode in kept.items()}
            new._durable_names = dict(new._names)
            return new

    def evict(self, path: str, choose: Choose) -> None:
        """The system drops clean pages: what a failed sync did not write is read from disk."""
        self.evict_from(self._names[path], path, choose)

    def evict_from(self, inode: Inode, path: str, choose: Choose) -> None:
        with self.mutex:
            dirty = {s for c in inode.pending if isinstance(c, Wrote) for s, _ in c.parts()}
            clean = [sector for sector in inode.doubtful if sector not in dirty]
            counts = [len(inode.doubtful[sector]) + 1 for sector in clean]
            things = [Unsettled("sector", path, s, n) for s, n in zip(clean, counts, strict=True)]
            size = inode.seen.size
            for sector, pick in zip(clean, choose(things), strict=True):
                parts = inode.doubtful.pop(sector)
                if pick:
                    inode.durable.write(parts[pick - 1], sector * SECTOR)
                stored = inode.durable.read(SECTOR, sector * SECTOR).ljust(SECTOR, b"\0")
                inode.seen.write(stored, sector * SECTOR)
            # There are no pages behind the end of a file that shrank.
            inode.seen.resize(size)
            self.evictions += bool(clean)

    def _like(self, boot: bytes) -> SimDisk:
        new = SimDisk()
        new.boot, new.order, new._inodes = boot, self.order, self._inodes
        return new

    # What processes do.

    def find(self, path: str) -> Inode:
        with self.mutex:
            if path not in self._names:
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
            return self._names[path]

    def link(self, path: str, inode: Inode | None = None) -> Inode:
        with self.mutex:
            if path in self._names:
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path)
            if inode is None:
                self._inodes += 1
                inode = Inode(self._inodes)
            self._name(path, inode)
            return inode

    def unlink(self, path: str) -> None:
        with self.mutex:
            self.find(path)
            self._name(path, None)

    def rename(self, old: str, new: str) -> None:
        """As rename(2): what was at `new` loses that name."""
        with self.mutex:
            inode = self.find(old)
            self._name(old, None)
            self._name(new, inode)

    def links(self, inode: Inode) -> int:
        with self.mutex:
            return sum(other is inode for other in self._names.values())

    def _name(self, path: str, inode: Inode | None) -> None:
        if inode is None:
            del self._names[path]
        else:
            self._names[path] = inode
        self._pending_names.append((path, inode))

    def sync_folder(self) -> None:
        with self.mutex:
            self._durable_names = dict(self._names)
            self._pending_names.clear()


class Process(Disk):
    """One program's view of the disk: its files, its locks, and how it ends."""

    def __init__(self, disk: SimDisk) -> None:
        self.disk = disk
        self.alive = True
        self.interruption: Interruption | None = None
        # How many operations that change something it has begun.
        self.operations = 0
        # How many of them it was refused.
        self.refusals = 0
        # Of each four placements those whose bit is set are written as late as can be, the
        # others at once.
        self.lateness = 0b0101
        self.placements = 0
        self.late: list[SimPlacement] = []
        self._files: list[SimFile] = []
        self.opens = SimFile

    def end(self) -> None:
        """As `kill -9`: what the system was given it has, locks are free, and no more comes."""
        self.alive = False
        for file in self._files:
            file.unlock()

    def step(self, what: str, torn: Callable[[float], object] | None = None) -> None:
        """Before each operation that changes something. Raises what is to become of it."""
        if self.alive and self.disk.watch is not None:
            self.disk.watch(what)
        if not self.alive:
            raise Gone
        self.operations += 1
        coming = self.interruption
        if coming is None or not what.startswith(coming.only):
            return
        if coming.after:
            coming.after -= 1
            return
        if torn is not None and coming.torn:
            torn(coming.torn)
        if coming.error is None:
            self.end()
            raise Gone
        if not coming.lasting:
            self.interruption = None
        self.refusals += 1
        raise OSError(coming.error, os.strerror(coming.error))

    # The `Disk`.

    def open(self, path: str, *, write: bool, beside: Access | None = None) -> SimFile:
        return self._opened(self.disk.find(path), write)

    def create(self, path: str, beside: Access | None = None) -> SimFile:
        self.step(f"create {path}")
        return self._opened(self.disk.link(path), True)

    def publish(self, temporary: str, path: str) -> None:
        self.step(f"link {path}")
        self.disk.link(path, self.disk.find(temporary))
        self.step(f"unlink {temporary}")
        self.disk.unlink(temporary)
        self._sync_folder()

    def unlink(self, path: str) -> None:
        self.step(f"unlink {path}")
        with contextlib.suppress(FileNotFoundError):
            self.disk.unlink(path)
            self._sync_folder()

    def exists(self, path: str) -> bool:
        return path in self.disk.names()

    def identity(self, path: str) -> tuple[int, int]:
        return self.disk.find(path).identity

    def beside(self, path: str) -> list[str]:
        return [name for name in self.disk.names() if name.startswith(path)]

    def _sync_folder(self) -> None:
        self.step("sync folder")
        self.disk.sync_folder()

    def _opened(self, inode: Inode, write: bool) -> SimFile:
        file = self.opens(self, inode, write)
        self._files.append(file)
        return file


class SimPlacement:
    """A `Placing` whose thread is quick; or has not begun when it is waited for, and comes
    after the next commit if it is not."""

    def __init__(self, write: Callable[[], None]) -> None:
        self._write: Callable[[], None] | None = write
        self.ended = False

    def begin(self) -> None:
        self.ended = True
        with contextlib.suppress(OSError):
            self.finish()

    def finish(self) -> None:
        if self._write is not None:
            self._write()
            self._write = None

    def drop(self) -> None:
        """Late, or cut off by a disk that refuses: no difference to its caller."""
        if self._write is not None:
            with contextlib.suppress(OSError):
                self._write()
            self._write = None


class SimFile(SteppedCommit):
    """One open file of a process."""

    def __init__(self, process: Process, inode: Inode, writes: bool) -> None:
        self._process = process
        self._inode = inode
        self._writes = writes

    def fileno(self) -> int:
        return -1

    def size(self) -> int:
        return self._inode.seen.size

    def access(self) -> Access:
        return Access(0, 0, 0o644)

    def identity(self) -> tuple[int, int]:
        return self._inode.identity

    def links(self) -> int:
        return self._process.disk.links(self._inode)

    def read(self, size: int, offset: int) -> bytes:
        return self._inode.seen.read(size, offset)

    def write(self, data: Buffer, offset: int) -> None:
        self._write(data, offset, "write")

    def _write(self, data: Buffer, offset: int, what: str) -> None:
        assert self._writes, "a reader writes"
        view = memoryview(data)
        if not view:
            return
        disk = self._process.disk

        def in_part(much: float) -> None:
            # A write is cut short between two pages of the system's cache only.
            end = (offset + int(len(view) * much)) // BLOCK * BLOCK
            if end > offset:
                with disk.mutex:
                    self._inode.write(view[: end - offset], offset)

        self._process.step(f"{what} {offset}+{len(view)}", in_part)
        if offset < BLOCK and disk.watch is not None and disk.tear:
            # A reader may look while the bytes are copied; the disk's own write is whole.
            before = self._inode.seen.blocks.get(0)
            self._inode.seen.write(view[: disk.tear % len(view)], offset)
            disk.watch(f"half of {what}")
            if before is not None:
                self._inode.seen.blocks[0] = before
        with disk.mutex:
            self._inode.write(view, offset)

    def place(self, arena: Buffer, segments: Sequence[tuple[int, int, int]]) -> SimPlacement:
        data = memoryview(arena)
        pieces = [(data[start : start + length], offset) for offset, start, length in segments]
        placed = SimPlacement(lambda: self._place(pieces))
        turn = self._process.placements % 4
        self._process.placements += 1
        if self._process.lateness >> turn & 1:
            self._process.late.append(placed)
        else:
            placed.begin()
        return placed

    def _place(self, pieces: Writes) -> None:
        for data, offset in pieces:
            self._write(data, offset, "place")

    def commit(self, *arguments: Any) -> None:
        super().commit(*arguments)
        late, self._process.late = self._process.late, []
        for placed in late:
            placed.begin()

    def commit_order(self) -> Sequence[str]:
        return self._process.disk.order

    def do_step(self, step: str, writes: Writes) -> None:
        if step == "sync":
            self.sync()
        for data, offset in writes:
            self._write(data, offset, f"commit {step}")

    def sync(self) -> None:
        disk = self._process.disk
        with disk.mutex:
            begun = self._inode.changes()
        coming = self._process.interruption
        try:
            self._process.step("sync")
        except OSError:
            # As Linux does it: no page is dirty any more.
            with disk.mutex:
                self._inode.give_up(begun)
                if coming is not None and coming.evicts is not None:
                    disk.evict_from(self._inode, "", coming.evicts)
            raise
        # What was written meanwhile waits for the next sync.
        with disk.mutex:
            self._inode.settle(begun)

    def resize(self, size: int) -> None:
        assert self._writes, "a reader writes"
        self._process.step(f"resize {size}")
        with self._process.disk.mutex:
            now = self._inode.seen.size
            self._inode.resize(size)
        if size > now:
            try:
                self._process.step(f"reserve {size}")
            except OSError:
                with self._process.disk.mutex:
                    self._inode.resize(now)
                raise

    def part(self, start: int, stop: int) -> None:
        first, last = start // BLOCK * BLOCK, -(-stop // BLOCK) * BLOCK
        with contextlib.suppress(OSError):
            self._write(self.read(last - first, first), first, "part")

    def abandon(self, start: int, stop: int) -> None:
        self.part(start, start + 1)
        self.part(stop - 1, stop)
        first, last = -(-start // BLOCK) * BLOCK, -(-stop // BLOCK) * BLOCK
        with contextlib.suppress(OSError):
            self._write(bytes(last - first), first, "abandon")

    def punch(self, start: int, stop: int) -> None:
        self._write(bytes(stop - start), start, "punch")

    def lock(self) -> bool:
        with self._process.disk.mutex:
            if self._inode.locker not in (None, self):
                return False
            self._inode.locker = self
            return True

    def locked_elsewhere(self) -> bool:
        return self._inode.locker not in (None, self)

    def unlock(self) -> None:
        with self._process.disk.mutex:
            if self._inode.locker is self:
                self._inode.locker = None

    def close(self) -> None:
        self.unlock()
