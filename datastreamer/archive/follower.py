"""Keeps a stream that this process serves up to date with an archive, in a thread of its own: a
relay without an upstream.

Owns which entries the file and the archive have in common, and what happens if the archive has
another history. Each manifest becomes one operation: it ends with a whole one.
"""

from __future__ import annotations

import logging
import threading
from contextlib import closing

from datastreamer.archive.archived_file import ArchivedFile, chains_at, now_ms
from datastreamer.archive.eviction import local_numbers
from datastreamer.archive.options import ArchiveOptions
from datastreamer.archive.reading import ArchiveStream
from datastreamer.errors import ArchiveChanged, DatastreamerError
from datastreamer.metrics.writer_numbers import REQUESTS
from datastreamer.storage.objects.manifest import ArchiveManifest
from datastreamer.storage.objects.opened import OpenArchive
from datastreamer.storage.pages.hashes import HASH_SIZE
from datastreamer.storage.stream import DataStream

_log = logging.getLogger(__name__)

_LAST_SECONDS = 10.0


class ArchiveFollower:
    """Appends what is archived to one stream, from its construction until `close`."""

    def __init__(self, stream: DataStream, options: ArchiveOptions) -> None:
        """Raises `ArchiveMissing`, `NotAnArchive`, `BadArgument` and `ArchiveDenied`."""
        self._stream = stream
        self._options = options
        self._archive = OpenArchive.open(options.url, timeout=options.timeout)
        self._manifest: ArchiveManifest | None = None
        self._ending = threading.Event()
        self._error: type[Exception] | None = None
        self._failures = self._in_a_row = 0
        self._numbers = stream.parts.counters.share()
        self._reached = now_ms()
        self._thread = threading.Thread(target=self._run, name="archive follower", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End soon; what is not appended yet is appended by the next start."""
        self._ending.set()
        self._thread.join(_LAST_SECONDS)
        self._archive.store.abandon()

    def _run(self) -> None:
        while not self._ending.is_set():
            try:
                began = now_ms()
                self._catch_up()
                self._error, self._in_a_row, self._reached = None, 0, began
            except ArchiveChanged as error:
                _log.error("nothing is appended any more: %s", error)
                self._count(diverged=True)
                return
            except DatastreamerError as error:
                if type(error) is not self._error:
                    _log.error("not up to date with the archive: %s", error)
                self._error = type(error)
                self._failures, self._in_a_row = self._failures + 1, self._in_a_row + 1
            except Exception:  # noqa: BLE001 - the stream is served without it
                _log.exception("%s: the follower of the archive failed", self._options.url)
            self._count()
            self._ending.wait(self._options.interval)

    def _count(self, *, diverged: bool = False) -> None:
        """It counts as lagging since it was last read."""
        newest = self._manifest
        if self._numbers is not None:
            self._numbers.put_archive(
                (
                    *(1, self._reached * (diverged or self._in_a_row > 0)),
                    *(0 if newest is None else newest.head.entries, 0),
                    *(0 if newest is None else newest.generation, 0, 0, 0),
                    *(self._failures, self._in_a_row, 0, diverged),
                    int(1000 * self._options.ready_lag),
                    *local_numbers(self._stream, self._options),
                    *(self._archive.store.requests[each] for each in REQUESTS),
                )
            )

    def _catch_up(self) -> None:
        before, stream = self._manifest, self._stream
        newest, _ = self._archive.newest(0 if before is None else before.number)
        if before is None or newest.generation != before.generation:
            stream.sync()
            with closing(ArchivedFile(stream.absolute_path)) as file:
                common = in_common(self._archive, newest, file)
            if common < stream.total_entries:
                if not self._options.takeover:
                    raise ArchiveChanged(
                        self._options.url,
                        f"the archive ({newest.reason}) has other entries than {stream.path} from "
                        f"entry {common} on; run it with --on-rewrite follow, which truncates the "
                        "file there, or with another file",
                    )
                _log.warning("%s: truncated to %d entries (%s)", stream.path, common, newest.reason)
                stream.truncate(common)
        if newest.head.entries > stream.total_entries:
            with ArchiveStream.of(self._archive, newest) as archived, stream.atomic_op() as op:
                for batch in archived.batches(stream.total_entries):
                    op.add_batch(batch)
                    if self._ending.is_set():
                        op.rollback()
                        return
        self._manifest = newest


def in_common(archive: OpenArchive, manifest: ArchiveManifest, file: ArchivedFile) -> int:
    """The number of entries with which a file and an archive begin alike, page by page."""
    state = file.state()
    total = state.head.entries
    digests = bytes(file.digests(state.pages))
    whole = [row for row in manifest.segments if row.stop <= state.pages]
    chains = chains_at(digests, [row.stop for row in whole])
    equal = [row.chain == chain.hex() for row, chain in zip(whole, chains, strict=True)]
    for row in manifest.rows[[*equal, False].index(False) :]:
        number = row.first_entry
        for page in range(row.first_page, row.stop):
            known = archive.footer(row).pages[row.frame + page - row.first_page].sum
            found = digests[page * HASH_SIZE : (page + 1) * HASH_SIZE]
            if found != known.digest:
                break
            number = known.next_number
        else:
            continue
        if page > state.pages or not total:
            return min(number, total)
        if page < state.pages:
            return number
        (content,) = archive.pages(row, page, page + 1, last=row is manifest.tail)
        ours, theirs = file.last_page(state, 0).entries, content[: known.end]
        size = min(len(ours), len(theirs))
        # (A page that was truncated may end sooner than the file's, and be followed by others.)
        return number if ours[:size] != theirs[:size] else min(known.next_number, total)
    return min(total, manifest.head.entries)
