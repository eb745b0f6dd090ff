"""The undo journal of an update in place: `FILE.undo`, beside the stream file.

While entry data is overwritten, the old bytes are in the journal, on disk; it is removed once the
new bytes are on disk. An open that finds a journal restores the old bytes. Owns the journal's
bytes, which ``docs/FILE.md`` specifies, and how it is made and removed; knows no headers, locks or
entries.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
import struct
from typing import Final, NamedTuple

from xxhash import xxh3_64_intdigest

from datastreamer.errors import StreamFileError, UntrustedFile
from datastreamer.storage.disk.access import Access
from datastreamer.storage.disk.atomic_file import new_file
from datastreamer.storage.disk.file_ops import Disk, Readable

SUFFIX: Final = ".undo"

_HEAD: Final = struct.Struct(">8sII16sQ38s2xQQ")
_SUM: Final = struct.Struct(">Q")
_MAGIC: Final = b"DSundo__"


class Undo(NamedTuple):
    """What an update was about to change: `old` to `new` at file offset `offset`."""

    stream_id: bytes
    epoch: int
    header: bytes
    offset: int
    old: bytes
    new: bytes

    def pack(self) -> bytes:
        packed = _HEAD.pack(
            _MAGIC, 1, 0, self.stream_id, self.epoch, self.header, self.offset, len(self.old)
        )
        packed += self.old + self.new
        return packed + _SUM.pack(xxh3_64_intdigest(packed))

    @classmethod
    def unpack(cls, packed: bytes) -> Undo | None:
        """The journal; None if it is not whole: then nothing was overwritten yet."""
        if len(packed) < _HEAD.size + _SUM.size:
            return None
        magic, version, _, stream_id, epoch, header, offset, size = _HEAD.unpack_from(packed)
        if magic != _MAGIC or version != 1 or len(packed) != _HEAD.size + 2 * size + _SUM.size:
            return None
        if _SUM.unpack(packed[-_SUM.size :])[0] != xxh3_64_intdigest(packed[: -_SUM.size]):
            return None
        middle = _HEAD.size + size
        return cls(
            stream_id,
            epoch,
            header,
            offset,
            packed[_HEAD.size : middle],
            packed[middle : -_SUM.size],
        )

    def found_in(self, file: Readable) -> bytes | None:
        """The bytes in the file; None unless each one is the old or the new byte."""
        found = file.read(len(self.old), self.offset)
        if len(found) != len(self.old):
            return None
        # Usually whole sectors are new; but an interrupted write may end at any byte.
        bytes_of_each = zip(found, self.old, self.new, strict=True)
        return found if all(byte in pair for byte, *pair in bytes_of_each) else None

    def is_half_done(self, file: Readable) -> bool:
        """Whether some of its bytes in the file are old and some new."""
        found = self.found_in(file)
        return found is not None and found not in (self.old, self.new)


def path_of(path: str | os.PathLike[str]) -> str:
    """The path that a journal's name is made from: the stream file's own, not that of a symbolic
    link to it."""
    return os.path.realpath(os.fspath(path))


def put(disk: Disk, path: str, undo: Undo, beside: Access) -> None:
    """Write the journal of the stream file whose `path_of` is `path` and whose access is
    `beside`; on disk, with its name, on return.

    Requires the writer's lock. Raises `FileExistsError` if there is one. After any other
    exception no journal is left, unless its removal fails too.
    """
    name = path + SUFFIX
    try:
        with new_file(disk, name, beside) as file:
            file.write(undo.pack(), 0)
    except FileExistsError:
        raise
    except BaseException:
        # It may have its name, but not durably.
        with contextlib.suppress(OSError):
            disk.unlink(name)
        raise


def find(disk: Disk, path: str, beside: Access) -> Undo | None:
    """The journal of the stream file whose `path_of` is `path` and whose access is `beside`, if it
    is whole. A link, or a file of a user that is not trusted, is ignored: its bytes would be
    written into the stream."""
    name = path + SUFFIX
    if not disk.exists(name):
        return None
    # (In one look: the update may end at any moment.)
    mode = 0
    with contextlib.suppress(OSError):
        mode = os.stat(name).st_mode
    if mode and not stat.S_ISREG(mode):
        # Opening a named pipe would wait for a process at its other end.
        kind = "folder" if stat.S_ISDIR(mode) else "pipe or device"
        raise StreamFileError(
            name, f"a {kind} is in the place of the journal of an update; move it elsewhere"
        )
    try:
        file = disk.open(name, write=False, beside=beside)
    except (FileNotFoundError, UntrustedFile):
        return None  # the update has ended, or a user that is not trusted owns the file
    with contextlib.closing(file):
        return Undo.unpack(file.read(file.size(), 0))


def remove(disk: Disk, path: str, undo: Undo, beside: Access) -> None:
    """Remove the journal `undo`, durably; not one of the writer of another file, which is at this
    path now."""
    with contextlib.suppress(StreamFileError):  # a folder or a pipe
        if find(disk, path, beside) == undo:
            disk.unlink(path + SUFFIX)


def set_aside(disk: Disk, path: str) -> str:
    """Rename a journal that cannot be used; returns its new name."""
    name = f"{path}{SUFFIX}.{secrets.token_hex(4)}.unused"
    disk.publish(path + SUFFIX, name)
    return name
