"""The last epoch of a stream's source, and whose it was: `FILE.source`, beside the stream file.

Two sectors, written in turn: whatever becomes of the one that is being written, the other
stands. Owns their bytes and which of them counts; knows no leases, connections or entries.

=======  ==========  ======================================================
offset   size        value
=======  ==========  ======================================================
0        8, 4, 4     ``DSsource``, u32 version = 1, u32 0
16       8           sequence: the higher one counts
24       16          stream id
40       8           epoch
48       16          source id
64       8           xxh3 (64 bits) of all before
=======  ==========  ======================================================
"""

from __future__ import annotations

import struct
from typing import Final, NamedTuple

from xxhash import xxh3_64_intdigest

from datastreamer.errors import DamagedFile
from datastreamer.storage.disk import Disk, OsDisk
from datastreamer.storage.newfile import new_file, remove_left_overs

SUFFIX: Final = ".source"
SECTOR: Final = 512

_SLOT: Final = struct.Struct(">8sIIQ16sQ16s")
_SUM: Final = struct.Struct(">Q")
_MAGIC: Final = b"DSsource"


class Source(NamedTuple):
    """Who was the source last. All zeros: there was none yet."""

    epoch: int = 0
    source_id: bytes = bytes(16)


class SourceFile:
    """The file beside one stream. Whoever calls holds the stream's writer lock.

    Raises `DamagedFile` where there is one and neither sector is whole, and `OSError`.
    """

    def __init__(self, path: str, stream_id: bytes, disk: Disk | None = None) -> None:
        self.path = path + SUFFIX
        self._stream_id = stream_id
        self._disk = disk or OsDisk()
        self._sequence = 0
        self.last = Source()
        """What is on disk."""
        remove_left_overs(self._disk, self.path)
        if self._disk.exists(self.path):
            self._read()

    def _read(self) -> None:
        file = self._disk.open(self.path, write=False)
        try:
            content = file.read(2 * SECTOR, 0)
        finally:
            file.close()
        found = [slot for at in (0, SECTOR) if (slot := _unpack(content[at : at + SECTOR]))]
        if not found:
            raise DamagedFile(
                self.path,
                0,
                "neither record of the stream's source is whole; remove the file when no source "
                "is running, and start the source anew",
            )
        self._sequence, stream_id, last = max(found)
        if stream_id == self._stream_id:
            self.last = last

    def put(self, source: Source) -> None:
        """Keep `source`; on disk on return. Where it raises `OSError`, what is kept is `last` or
        `source`, and the next `put` tries again."""
        sequence = self._sequence + 1
        packed = _SLOT.pack(_MAGIC, 1, 0, sequence, self._stream_id, *source)
        packed += _SUM.pack(xxh3_64_intdigest(packed))
        sector = packed.ljust(SECTOR, b"\0")
        if self._disk.exists(self.path):
            file = self._disk.open(self.path, write=True)
            try:
                # What a failed attempt has left here is not the sector that counts.
                file.write(sector, (sequence & 1) * SECTOR)
                file.sync()
            finally:
                file.close()
        else:
            other = bytes(SECTOR)
            with new_file(self._disk, self.path) as file:
                file.write(other + sector if sequence & 1 else sector + other, 0)
        self._sequence, self.last = sequence, source


def _unpack(sector: bytes) -> tuple[int, bytes, Source] | None:
    packed = sector[: _SLOT.size]
    if len(sector) != SECTOR:
        return None
    if _SUM.unpack_from(sector, _SLOT.size)[0] != xxh3_64_intdigest(packed):
        return None
    magic, version, _, sequence, stream_id, epoch, source_id = _SLOT.unpack(packed)
    if magic != _MAGIC or version != 1:
        return None
    return sequence, stream_id, Source(epoch, source_id)
