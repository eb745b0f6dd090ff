"""`datastreamer`, as a program that SIGKILL ends in the middle of a commit's writes.

The first two words say which commit, counted from 1, and how much of it is written before: "half"
of its entries, or all "entries" and no header.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence

from datastreamer._packer import EntryPacker
from datastreamer.cli.main import main
from datastreamer.storage.disk import file_ops as disk
from datastreamer.storage.disk._commit import Descriptor

_begun = 0


def commit(
    self: disk.OsFile,
    packer: EntryPacker,
    page: bytearray,
    before: tuple[int, int],
    after: tuple[int, int],
    sync: bool,
    wakers: Sequence[int],
) -> None:
    global _begun
    _begun += 1
    if _begun == int(sys.argv[1]):
        room = sum(length for _, _, length in packer.segments)
        if sys.argv[2] == "half":
            room //= 2
        for offset, start, length in packer.segments:
            self.write(packer.arena[start : start + min(length, room)], offset)
            room -= min(length, room)
        os.kill(os.getpid(), signal.SIGKILL)
        signal.pause()
    Descriptor.commit(self, packer, page, before, after, sync, wakers)


if __name__ == "__main__":
    disk.OsFile.commit = commit  # type: ignore[assignment,method-assign]
    sys.exit(main(sys.argv[3:]))
