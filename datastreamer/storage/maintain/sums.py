"""Makes the checksums of a stream file, for `datastreamer sums`.

Owns the order: as a writer it takes the file over, then it reads the pages that lack a record.
"""

from __future__ import annotations

import contextlib

from datastreamer.storage.disk.file_ops import Disk
from datastreamer.storage.maintain.check import PathLike, Progress
from datastreamer.storage.pages.completer import MadeSums
from datastreamer.storage.write.opening import open_to_write


def make_sums(
    path: PathLike,
    *,
    accept: bool = False,
    progress: Progress = lambda done, total: None,
    disk: Disk | None = None,
) -> MadeSums:
    """Complete the sidecar of the stream at `path`.

    `accept`: discard it first, and take the bytes that the file has now for the stream. Raises
    what opening a stream for writing raises, and `WriteFailed` if the sidecar cannot be written.
    """
    with contextlib.closing(open_to_write(path, disk=disk, accept=accept)) as writer:
        return writer.sums_completer.complete(progress)
