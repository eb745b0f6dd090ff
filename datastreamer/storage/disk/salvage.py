"""Side files: copies of bytes that are about to be removed from a stream file."""

from __future__ import annotations

import re
import secrets
import time

from datastreamer.format import HEADER_PAGE_SIZE, PAGE_SIZE
from datastreamer.storage.disk.atomic_file import NEW, new_file, remove_left_overs
from datastreamer.storage.disk.file_ops import Buffer, Disk, File

_BEGUN = re.compile(r"\.\d{8}T\d{6}\.[0-9a-f]{4}\.(?:cut|repair)" + NEW)


def keep_beside(
    disk: Disk, path: str, suffix: str, page: Buffer, file: File, start: int, stop: int
) -> str:
    """Copy `page` and bytes `start` to `stop` of `file` to a new, synced file; returns its path.

    It is named `path.<time>.<suffix>`. Raises `OSError`; no file is left then.
    """
    side = f"{path}.{time.strftime('%Y%m%dT%H%M%S')}.{secrets.token_hex(2)}.{suffix}"
    with new_file(disk, side, file.access()) as saved:
        saved.write(page, 0)
        offset, at = start, HEADER_PAGE_SIZE
        while offset < stop:
            part = file.read(min(PAGE_SIZE, stop - offset), offset)
            if not part:
                break
            saved.write(part, at)
            offset, at = offset + len(part), at + len(part)
    return side


def remove_begun(disk: Disk, path: str, file: File) -> None:
    """Unlink the unfinished copies that killed processes left beside the stream `file` at
    `path`."""
    remove_left_overs(disk, path, file.access(), _BEGUN)
