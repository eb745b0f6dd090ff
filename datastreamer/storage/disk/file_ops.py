"""The file operations of storage.

All of storage reads and writes through `File` and `Disk`, so that a test can use a simulated disk.
Knows nothing of headers, pages or entries. Raises the system's `OSError`; callers explain it.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
import struct
import sys
from collections.abc import Sequence
from typing import Protocol

from datastreamer._packer import EntryPacker
from datastreamer.errors import StreamClosed
from datastreamer.storage.disk._commit import Descriptor
from datastreamer.storage.disk.access import Access, create_file, open_file

Buffer = bytes | bytearray | memoryview
# (offset in the file, start in an arena, length) of each part of an operation.
Segments = Sequence[tuple[int, int, int]]

_LINUX = sys.platform.startswith("linux")
# struct flock of 64-bit Linux: l_type, l_whence, l_start, l_len, l_pid.
_FLOCK = struct.Struct("hhqqi4x")

# The unit of the page cache and of direct writes, in bytes.
_BLOCK = 4096
_DIRECT: int = getattr(os, "O_DIRECT", 0)
# Modes of fallocate, <linux/falloc.h>.
_KEEP_SIZE, _PUNCH_HOLE, _ZERO_RANGE = 1, 2, 16


class Placing(Protocol):
    """The writes that `File.place` started; see `_placement.Placement`."""

    @property
    def ended(self) -> bool:
        """Whether `finish` will not have to wait."""

    def finish(self) -> None:
        """Wait until all is written. Raises `OSError`; the next call tries again."""

    def drop(self) -> None:
        """Return when nothing of it, and of what was placed before it, is written any more."""


class Readable(Protocol):
    """An open file to read. Offsets and sizes are in bytes."""

    def size(self) -> int: ...
    def read(self, size: int, offset: int) -> bytes:
        """Up to `size` bytes; fewer only at the end of the file."""

    def close(self) -> None: ...


class Numbered(Readable, Protocol):
    """A stream that is read from elsewhere, where the numbers of its pages' entries are known."""

    def page_holding(self, number: int) -> int:
        """The page that holds an entry."""

    def first_number(self, page: int) -> int:
        """The number of the first entry of a page."""


class File(Readable, Protocol):
    """One open file of a disk."""

    def fileno(self) -> int: ...
    def identity(self) -> tuple[int, int]:
        """Device and inode: the same for two descriptors of one file."""

    def links(self) -> int:
        """The number of its names; 0 if it was removed."""

    def access(self) -> Access:
        """Which users may read and write it."""

    def write(self, data: Buffer, offset: int) -> None:
        """Write all of `data` at `offset`."""

    def commit(
        self,
        packer: EntryPacker,
        page: Buffer,
        before: tuple[int, int],
        after: tuple[int, int],
        sync: bool,
        wakers: Sequence[int],
    ) -> None:
        """Data, header, sync, mark and wake-up in one call; see `_commit.Descriptor.commit`."""

    def place(self, arena: Buffer, segments: Segments) -> Placing:
        """Start to write each segment (offset in the file, start in `arena`, length) in a
        thread."""

    def sync(self) -> None:
        """Make data, and the metadata needed to read it back, durable."""

    def resize(self, size: int) -> None:
        """Set the size; growing allocates the space."""

    def part(self, start: int, stop: int) -> None:
        """Move the bytes from `start` to `stop` to other pages of the page cache, if the file
        system can: data that sendfile has queued on connections refers to the old pages, and so
        does not change with later writes to the file."""

    def abandon(self, start: int, stop: int) -> None:
        """As `part`, for any number of bytes whose content is no longer needed."""

    def punch(self, start: int, stop: int) -> None:
        """Return the space of these bytes, which read as zeros then; what sendfile has queued
        keeps its bytes. Raises `OSError` if the file system has no holes."""

    def lock(self) -> bool:
        """Acquire the writer's lock on this descriptor; False if another open file holds it."""

    def unlock(self) -> None:
        """Release the lock, also for copies of the descriptor."""

    def locked_elsewhere(self) -> bool:
        """Whether another open file holds the writer's lock."""


class OsFile(Descriptor):
    """A file of the operating system. `commit` and `place` are `Descriptor`'s."""

    def fileno(self) -> int:
        return self._fd

    def size(self) -> int:
        return os.fstat(self._fd).st_size

    def identity(self) -> tuple[int, int]:
        found = os.fstat(self._fd)
        return found.st_dev, found.st_ino

    def links(self) -> int:
        return os.fstat(self._fd).st_nlink

    def access(self) -> Access:
        return Access.of(self._fd)

    def read(self, size: int, offset: int) -> bytes:
        fd = self._fd
        try:
            data = os.pread(fd, size, offset)
            if len(data) < size and data:
                data = _read_on(fd, data, size, offset)
        except OSError:
            if self._fd != fd or fd < 0:
                raise _closed() from None
            raise
        if self._fd != fd:
            # Another file may have the number since.
            raise _closed()
        return data

    def write(self, data: Buffer, offset: int) -> None:
        view = memoryview(data)
        while view:
            done = os.pwrite(self._fd, view, offset)
            view = view[done:]
            offset += done

    def sync(self) -> None:
        if _LINUX:
            os.fdatasync(self._fd)
        else:  # macOS: fsync does not flush the drive's cache, F_FULLFSYNC does
            fcntl.fcntl(self._fd, getattr(fcntl, "F_FULLFSYNC", 51))

    def resize(self, size: int) -> None:
        now = self.size()
        # The size changes in one step before space is allocated: if the process is killed in
        # between, the size is a requested one.
        os.ftruncate(self._fd, size)
        if size > now and hasattr(os, "posix_fallocate"):
            try:
                os.posix_fallocate(self._fd, now, size - now)
            except OSError:
                os.ftruncate(self._fd, now)
                raise

    def part(self, start: int, stop: int) -> None:
        # A direct write drops the file's pages from the page cache. Queued data of connections
        # keeps the old pages.
        with contextlib.suppress(OSError):
            self._part(start, stop)

    def _part(self, start: int, stop: int) -> None:
        """Raises `OSError` if the file system takes no direct writes."""
        first, last = start // _BLOCK * _BLOCK, -(-stop // _BLOCK) * _BLOCK
        again = os.open(f"/proc/self/fd/{self._fd}", os.O_WRONLY | os.O_CLOEXEC | _DIRECT)
        try:
            with mmap.mmap(-1, last - first) as aligned:  # as direct writes require
                count = aligned.write(OsFile.read(self, last - first, first))
                if count == last - first:
                    os.pwrite(again, aligned, first)
        finally:
            os.close(again)

    def abandon(self, start: int, stop: int) -> None:
        # A page at either end may also hold bytes that are still needed.
        self.part(start, start + 1)
        self.part(stop - 1, stop)
        first, last = -(-start // _BLOCK) * _BLOCK, -(-stop // _BLOCK) * _BLOCK
        if not _LINUX or first == last:
            return
        with contextlib.suppress(OSError):
            try:
                self._fallocate(_ZERO_RANGE, first, last - first)
            except OSError:
                self._fallocate(_PUNCH_HOLE, first, last - first)
                os.posix_fallocate(self._fd, first, last - first)

    def punch(self, start: int, stop: int) -> None:
        # The system clears what it has in memory of blocks that the hole's edges cut (of large
        # folios on ext4), also if connections have it queued; a direct write takes it out of the
        # page cache first.
        self._part(start, start + _BLOCK)
        self._part(stop - _BLOCK, stop)
        self._fallocate(_PUNCH_HOLE, start, stop - start)

    def _fallocate(self, mode: int, start: int, size: int) -> None:
        if not _LINUX:
            raise OSError(errno.EOPNOTSUPP, "this system makes no holes in files")
        fallocate = ctypes.CDLL(None, use_errno=True).fallocate
        fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
        if fallocate(self._fd, mode | _KEEP_SIZE, start, size):
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))

    def lock(self) -> bool:
        try:
            if _LINUX:
                # An open-file-description lock belongs to this descriptor: closing another
                # descriptor of the file does not release it.
                fcntl.fcntl(self._fd, fcntl.F_OFD_SETLK, _FLOCK.pack(fcntl.F_WRLCK, 0, 0, 0, 0))
            else:
                fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            return False
        return True

    def unlock(self) -> None:
        if _LINUX:
            fcntl.fcntl(self._fd, fcntl.F_OFD_SETLK, _FLOCK.pack(fcntl.F_UNLCK, 0, 0, 0, 0))
        else:
            fcntl.flock(self._fd, fcntl.LOCK_UN)

    def locked_elsewhere(self) -> bool:
        if _LINUX:
            asked = _FLOCK.pack(fcntl.F_WRLCK, 0, 0, 0, 0)
            answer = fcntl.fcntl(self._fd, fcntl.F_OFD_GETLK, asked)
            return bool(_FLOCK.unpack(answer)[0] != fcntl.F_UNLCK)
        try:
            fcntl.flock(self._fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        fcntl.flock(self._fd, fcntl.LOCK_UN)
        return False

    def close(self) -> None:
        fd, self._fd = self._fd, -1
        self._placer = None
        if fd >= 0:
            os.close(fd)


def _read_on(fd: int, data: bytes, size: int, offset: int) -> bytes:
    parts, got = [data], len(data)
    while got < size and (data := os.pread(fd, size - got, offset + got)):
        parts.append(data)
        got += len(data)
    return b"".join(parts)


def _closed() -> StreamClosed:
    return StreamClosed("the stream was closed while it was read")


class Disk(Protocol):
    """Operations on names in folders, not on an open file."""

    def open(self, path: str, *, write: bool, beside: Access | None = None) -> File:
        """Open an existing file. If it is beside the stream that has the access `beside`, no
        symbolic link is followed, and `UntrustedFile` is raised for another user's file."""

    def create(self, path: str, beside: Access | None = None) -> File:
        """Create an empty file, with at most the permissions of the stream that has the access
        `beside`. Raises `FileExistsError`."""

    def publish(self, temporary: str, path: str) -> None:
        """Give a finished, synced file its name, durably; never replaces anything."""

    def identity(self, path: str) -> tuple[int, int]:
        """`File.identity` of the file that `path` leads to, symbolic links followed."""

    def unlink(self, path: str) -> None: ...
    def exists(self, path: str) -> bool: ...
    def beside(self, path: str) -> list[str]:
        """The paths in the folder of `path` that start with `path`; empty if it is not a folder."""


class OsDisk:
    """The operating system's file systems."""

    def open(self, path: str, *, write: bool, beside: Access | None = None) -> OsFile:
        if beside is not None:
            return OsFile(open_file(path, beside, write=write))
        return OsFile(os.open(path, (os.O_RDWR if write else os.O_RDONLY) | os.O_CLOEXEC))

    def create(self, path: str, beside: Access | None = None) -> OsFile:
        return OsFile(create_file(path, beside))

    def publish(self, temporary: str, path: str) -> None:
        os.link(temporary, path, follow_symlinks=False)
        os.unlink(temporary)
        sync_folder(path)

    def identity(self, path: str) -> tuple[int, int]:
        found = os.stat(path)
        return found.st_dev, found.st_ino

    def unlink(self, path: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
            sync_folder(path)

    def exists(self, path: str) -> bool:
        return os.path.lexists(path)

    def beside(self, path: str) -> list[str]:
        folder, name = os.path.split(path)
        try:
            found = os.listdir(folder or os.curdir)
        except OSError:
            return []
        return [os.path.join(folder, other) for other in found if other.startswith(name)]


def read_ahead(file: Readable, wanted: bool) -> None:
    """Whether the system reads bytes ahead that were not requested. A reader that compares what
    comes from the disk wants that it does not: bytes that were read ahead look like bytes that were
    in memory before."""
    if isinstance(file, OsFile) and hasattr(os, "posix_fadvise"):
        advice = os.POSIX_FADV_NORMAL if wanted else os.POSIX_FADV_RANDOM
        with contextlib.suppress(OSError):
            os.posix_fadvise(file.fileno(), 0, 0, advice)


def sync_folder(path: str) -> None:
    """Make the name `path` durable, or its removal."""
    fd = os.open(os.path.dirname(os.path.abspath(path)), os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def boot_id() -> bytes:
    """16 bytes that change with each boot of this machine; zeros if unknown."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as source:
            return bytes.fromhex(source.read().strip().replace("-", ""))
    except OSError:
        pass
    if sys.platform == "darwin":
        import subprocess
        import uuid

        asked = ["/usr/sbin/sysctl", "-n", "kern.bootsessionuuid"]
        with contextlib.suppress(OSError, ValueError, subprocess.SubprocessError):
            answer = subprocess.run(asked, capture_output=True, text=True, check=True, timeout=5)
            return uuid.UUID(answer.stdout.strip()).bytes
    return bytes(16)
