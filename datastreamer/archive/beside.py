"""What a process that writes a stream does with its archive; loads the extra if it has one."""

from __future__ import annotations

import logging
import os
import threading
from contextlib import AbstractContextManager, ExitStack, closing, nullcontext

from datastreamer.archive.options import ArchiveOptions
from datastreamer.errors import ArchiveMissing
from datastreamer.storage.stream import DataStream

_log = logging.getLogger(__name__)


def archiving(stream: DataStream, options: ArchiveOptions | None) -> AbstractContextManager[object]:
    """Archive a stream within the block, or follow its archive, as these options say.

    Raises `ExtraMissing`, `BadArgument`, `RetentionNotPossible`, `ArchiveMissing`, `NotAnArchive`
    and `ArchiveDenied`.
    """
    if options is None:
        return nullcontext()
    if options.mode == "push":
        from datastreamer.archive.archiver import Archiver

        return closing(Archiver(stream, options))
    with ExitStack() as stack:
        if options.mode == "follow":
            from datastreamer.archive.follower import ArchiveFollower

            stack.enter_context(closing(ArchiveFollower(stream, options)))
        if options.local_retention is not None:
            from datastreamer.archive.eviction import LocalRetention

            stack.enter_context(closing(LocalRetention(stream, options)))
        return stack.pop_all()


def restored(options: ArchiveOptions, path: str, abandoned: threading.Event | None = None) -> bool:
    """Make the stream file at `path` from the newest manifest, if it is missing; False if it is
    not, or nothing is archived yet. It ends soon after `abandoned` is set; a later call continues.

    Raises `StreamClosed` then, `ExtraMissing`, and what `restore.restore` raises.
    """
    if os.path.lexists(path):
        return False
    from datastreamer.archive.restore import restore
    from datastreamer.storage.objects.opened import OpenArchive
    from datastreamer.storage.objects.store import Store

    _log.info("%s: there is no file: it is made from %s", path, options.url)
    try:
        store = Store(options.url, timeout=options.timeout, abandoned=abandoned)
        archive = OpenArchive(store)
        manifest = archive.newest()[0]
    except ArchiveMissing as error:
        _log.warning("%s; the file begins empty", error)
        return False
    floor, kept = 0, options.local_retention
    if kept is not None:
        from datastreamer.archive.eviction import floor_for

        floor = floor_for(kept, manifest.head.length, manifest)
    made = restore(archive, path, manifest, from_page=floor, relay=True)
    fields = {"entries": made.header.total_entries, "file": path}
    _log.info("%s: restored %d entries", path, made.header.total_entries, extra=fields)
    return True
