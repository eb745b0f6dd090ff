"""Keeps an archive up to date with a stream that this process writes, in a thread of its own.

Owns when it publishes, and what it does about errors. A commit never waits for it, and no error of
the store reaches the stream.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
import time
from contextlib import closing

from datastreamer.archive.archived_file import ArchivedFile, now_ms
from datastreamer.archive.check import prunable, prune
from datastreamer.archive.eviction import Eviction, local_numbers
from datastreamer.archive.options import ArchiveOptions
from datastreamer.archive.writer import ArchiveWriter
from datastreamer.errors import (
    ArchiveDiverged,
    ArchiveFenced,
    DatastreamerError,
    StreamBusy,
    StreamReadOnly,
)
from datastreamer.format import PAGE_SIZE
from datastreamer.metrics.writer_numbers import REQUESTS
from datastreamer.storage.objects.manifest import ArchiveManifest
from datastreamer.storage.objects.opened import OpenArchive
from datastreamer.storage.objects.store import Store
from datastreamer.storage.stream import DataStream

_log = logging.getLogger(__name__)

# Interval between looks at the stream's end.
_LOOK_SECONDS = 1.0
# The end of a process waits this long for the last publication.
_LAST_SECONDS = 10.0
_PRUNE_SECONDS = 86400.0
# How much less than other threads the system runs this one.
_NICENESS = 10


class Archiver:
    """Archives one stream from its construction until `close`."""

    def __init__(self, stream: DataStream, options: ArchiveOptions) -> None:
        """Raises `BadArgument`, `StreamReadOnly` and `ArchiveDenied`."""
        if not stream.writable:
            raise StreamReadOnly(
                f"{stream.path}: only the process that writes a stream archives it"
            )
        self._options = options
        self._stream = stream
        self._numbers = stream.parts.counters.share()
        self._store = Store(options.url, timeout=options.timeout)
        self._prune_at = 0.0
        self._source = ArchivedFile(stream.absolute_path)
        self._writer = ArchiveWriter(
            self._source,
            self._store,
            segment_pages=options.segment // PAGE_SIZE,
            level=options.level,
            interval=options.interval,
            takeover=options.takeover,
            threads=1,
        )
        kept = options.local_retention
        self._eviction = (
            None if kept is None else Eviction(stream, self._own_newest, kept, options.url)
        )
        self._ending = threading.Event()
        self._published = self._failures = self._in_a_row = 0
        self._lacking_since = 0
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="archiver", daemon=True)
        self._thread.start()
        _log.info("%s: archives %s", options.url, stream.path)

    def close(self) -> None:
        """Publish a last time, if the store answers within some seconds, and end."""
        with contextlib.suppress(DatastreamerError):
            self._stream.sync()
        self._ending.set()
        self._thread.join(_LAST_SECONDS)
        newest, url = self._writer.newest, self._options.url
        archived = 0 if newest is None else newest.head.entries
        if self._thread.is_alive() or archived < self._stream.total_entries:
            self._store.abandon()
            what = "%s: archived up to entry %d of %d; the next start continues"
            _log.warning(what, url, archived, self._stream.total_entries)
        else:
            _log.info("%s: all %d entries are archived", url, archived)

    def _run(self) -> None:
        if sys.platform.startswith("linux"):
            with contextlib.suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
        with closing(self._source):
            due = 0.0
            self._count()
            while not self._ending.is_set():
                if time.monotonic() >= due or self._is_segment_full():
                    again = self._publish()
                    due = time.monotonic() + again
                self._count()
                self._ending.wait(_LOOK_SECONDS)
            if not self._in_a_row:
                self._publish()
            self._count()

    def _lag(self) -> int:
        """The bytes of the stream that the archive lacks."""
        newest = self._writer.newest
        archived = 0 if newest is None else newest.head.length
        return max(0, self._stream.reader.head.length - archived)

    def _is_segment_full(self) -> bool:
        return not self._in_a_row and self._lag() >= self._options.segment

    def _publish(self) -> float:
        """Publish if there is news; returns the seconds until the next time."""
        began = now_ms()
        try:
            if self._stream.sync_policy == "os":
                # Only what is on disk is archived, and nothing else syncs.
                self._stream.sync()
            news = self._writer.publish()
        except StreamBusy:
            return _LOOK_SECONDS
        except DatastreamerError as error:
            self._note(error)
        except Exception as error:  # noqa: BLE001 - the stream is served and written without it
            self._note(error)
            _log.exception("%s: the archiver failed", self._options.url)
        else:
            self._published += news
            # What was committed meanwhile is not archived yet.
            self._lacking_since = began
            if self._error is not None:
                _log.info("%s: archives again", self._options.url)
            self._error, self._in_a_row = None, 0
            if news and (newest := self._writer.newest) is not None:
                _log.debug("%s: manifest %d", self._options.url, newest.number)
                self._prune()
            self._evict()
        return self._options.interval

    def _own_newest(self) -> tuple[OpenArchive, ArchiveManifest]:
        """The archive with its newest manifest, which says that this process is its writer."""
        self._writer.publish(anew=True)
        return self._writer.ensure_newest()

    def _evict(self) -> None:
        """Evict what the archive has, in batches."""
        try:
            while self._eviction is not None and not self._ending.is_set():
                if not self._eviction.step():
                    return
                self._count()
        except (DatastreamerError, OSError) as error:
            self._note(error, "nothing is evicted")

    def _prune(self) -> None:
        """Once a day, delete what the archive no longer needs."""
        if time.monotonic() < self._prune_at or self._ending.is_set():
            return
        self._prune_at = time.monotonic() + _PRUNE_SECONDS
        try:
            archive = OpenArchive(self._store)
            prune(archive, prunable(archive))
        except DatastreamerError as error:
            _log.warning("the archive is not pruned: %s", error)

    def _note(self, error: Exception, what: str = "not archived") -> None:
        """Log an error once for each of its kinds in a row."""
        if isinstance(error, ArchiveFenced):
            self._ending.set()
        if type(error) is not type(self._error):
            _log.error("%s: %s", what, error)
        self._error = error
        self._failures += 1
        self._in_a_row += 1

    def _count(self) -> None:
        lag, newest = self._lag(), self._writer.newest
        if not lag:
            self._lacking_since = 0
        elif not self._lacking_since:
            self._lacking_since = now_ms()
        if self._numbers is not None:
            self._numbers.put_archive(
                (
                    *(1, self._lacking_since),
                    *(0 if newest is None else newest.head.entries, lag),
                    *(0 if newest is None else newest.generation, self._writer.term),
                    *(self._writer.uploaded, self._published, self._failures, self._in_a_row),
                    isinstance(self._error, ArchiveFenced),
                    isinstance(self._error, ArchiveDiverged),
                    int(1000 * self._options.ready_lag),
                    *local_numbers(self._stream, self._options),
                    *(self._store.requests[each] for each in REQUESTS),
                )
            )
