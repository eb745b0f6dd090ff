"""What a process that writes a stream does with its archive; loads the extra if it has one."""

from __future__ import annotations

import logging
import os
import threading
from contextlib import AbstractContextManager, closing, nullcontext

from datastreamer.archive.options import ArchiveOptions
from datastreamer.errors import ArchiveMissing
from datastreamer.storage.stream import DataStream

_log = logging.getLogger(__name__)


def archiving(stream: DataStream, options: ArchiveOptions | None) -> AbstractContextManager[object]:
    """Archive a stream within the block, or follow its archive, as these options say.

    Raises `ExtraMissing`, `BadArgument`, `ArchiveMissing`, `NotAnArchive` and `ArchiveDenied`.
    """
    if options is None or options.mode == "read":
        return nullcontext()
    if options.mode == "follow":
        from datastreamer.archive.follower import ArchiveFollower

        return closing(ArchiveFollower(stream, options))
    from datastreamer.archive.archiver import Archiver

    return closing(Archiver(stream, options))


def restored(options: ArchiveOptions, path: str, abandoned: threading.Event | None = None) -> bool:
    """Make the stream file at `path` from the newest manifest, if it is missing; False if it is
    not, or nothing is archived yet. It ends soon after `abandoned` is set; a later call continues.

    Raises `StreamClosed` then, `ExtraMissing`, and what `restore.restore` raises.
    """
    if os.path.lexists(path):
        return False
    from datastreamer.archive.opened import OpenArchive
    from datastreamer.archive.restore import restore
    from datastreamer.archive.store import Store

    _log.info("%s: there is no file: it is made from %s", path, options.url)
    try:
        store = Store(options.url, timeout=options.timeout, abandoned=abandoned)
        archive = OpenArchive(store)
        manifest = archive.newest()[0]
    except ArchiveMissing as error:
        _log.warning("%s; the file begins empty", error)
        return False
    made = restore(archive, path, manifest, relay=True)
    fields = {"entries": made.header.total_entries, "file": path}
    _log.info("%s: restored %d entries", path, made.header.total_entries, extra=fields)
    return True
