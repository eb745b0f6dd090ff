"""Files beside the stream that keep bytes which are about to be given up."""

from __future__ import annotations

import secrets
import time

from datastreamer.format import HEADER_PAGE_SIZE, PAGE_SIZE
from datastreamer.storage.disk import Buffer, Disk, File
from datastreamer.storage.newfile import new_file


def keep_beside(
    disk: Disk, path: str, suffix: str, page: Buffer, file: File, start: int, stop: int
) -> str:
    """Copy `page` and bytes `start` to `stop` of `file` to a new, synced file; gives its path.

    It is named `path.<time>.<suffix>`. Raises `OSError`; there is no such file then.
    """
    side = f"{path}.{time.strftime('%Y%m%dT%H%M%S')}.{secrets.token_hex(2)}.{suffix}"
    with new_file(disk, side) as saved:
        saved.write(page, 0)
        offset, at = start, HEADER_PAGE_SIZE
        while offset < stop:
            part = file.read(min(PAGE_SIZE, stop - offset), offset)
            if not part:
                break
            saved.write(part, at)
            offset, at = offset + len(part), at + len(part)
    return side
