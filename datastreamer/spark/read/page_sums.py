"""The checksums of the pages of a stream file, local or remote.

Owns where they come from: whole pages have records in `PATH.sums`, on the file system of the
stream; the last page has a hash in the header page, of which a snapshot keeps a copy. The task that
reads pages reads their records too, so that the plan stays small, and the driver reads no records
of pages that the query does not need. A page that has no record that can be relied on is not
compared.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Final, NamedTuple

from datastreamer.errors import DamagedPage, FileMissing, StreamFileError
from datastreamer.format import page_start
from datastreamer.spark.read.archives import ArchivedSums
from datastreamer.spark.read.paths import FileLocation
from datastreamer.storage.disk.file_ops import OsDisk, OsFile, Readable
from datastreamer.storage.header import undo_journal as journal
from datastreamer.storage.header.judgement import last_page_matches
from datastreamer.storage.header.records import NO_ID, Head
from datastreamer.storage.pages.compare import differs
from datastreamer.storage.pages.hashes import EndSum, last_page
from datastreamer.storage.pages.proof import KnownChain
from datastreamer.storage.pages.records import RecordReader, SidecarRecords, is_about
from datastreamer.storage.pages.sidecar import SUFFIX, PageSum, StoredSums, SumsHeader

_log = logging.getLogger(__name__)

# Records that are read at once.
_MANY: Final = 4096


class SumsState(NamedTuple):
    """The state of a stream that its checksums have to be about. `end_sum` is what the commit
    record knows of the entries up to `head`."""

    stream_id: bytes
    epoch: int
    head: Head
    end_sum: EndSum | None

    @property
    def chains(self) -> list[KnownChain]:
        """The chain that the pages have to lead to."""
        known = KnownChain.of(self.head, self.end_sum)
        return [] if known is None else [known]


def open_records(location: FileLocation, file: Readable, state: SumsState) -> RecordReader:
    """The records beside the stream file that is open as `file`."""
    if location.uri is None and isinstance(file, OsFile):
        path = journal.path_of(location.path)
        known = state.stream_id, state.epoch
        return SidecarRecords(OsDisk(), path, file, lambda: known, lambda: state.chains)
    if location.uri is not None and location.archive is not None:
        return ArchivedSums(location.uri, location.archive, file)
    return RemoteRecords(location, file, state)


class RemoteRecords(RecordReader):
    """The records beside a remote file. A file of a stream without an id cannot be identified."""

    def __init__(self, location: FileLocation, file: Readable, state: SumsState) -> None:
        super().__init__(file, lambda: state.chains, most_computed=0)
        self._path = location.path + SUFFIX
        self._epoch = state.epoch
        self._file: StoredSums | None = None
        self._header: SumsHeader | None = None
        if state.stream_id == NO_ID:
            return
        beside = location.beside(SUFFIX)
        try:
            self._file = StoredSums(beside.open_remote())
            header = self._file.header()
            if header is not None and is_about(header, state.stream_id, state.epoch):
                self._header = header
        except FileMissing:
            return
        except StreamFileError as error:
            _log.warning("%s; the pages of the stream are not verified", error)

    def _usable(self) -> tuple[StoredSums, SumsHeader, int] | None:
        file, header = self._file, self._header
        return None if file is None or header is None else (file, header, self._epoch)

    def close(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            file.close()


class PageComparison:
    """Compares the pages of a part, in order."""

    def __init__(self, path: str, records: RecordReader, state: SumsState, stop: int) -> None:
        """`path` is for messages; no page from `stop` on is asked for."""
        self._path = path
        self._records = records
        self._state = state
        self._last = last_page(state.head.length)
        self._stop = min(stop, self._last)
        self._start = 0
        self._known: list[PageSum | None] = []

    def damage(
        self, page: int, content: bytes, first: Callable[[], int | None]
    ) -> DamagedPage | None:
        """How a page with this content, up to the end of the stream, differs from its checksum.

        `first()` is its first entry as far as that is known otherwise.
        """
        if page == self._last:
            head, known = self._state.head, self._state.end_sum
            if known is None or last_page_matches(content, head, known):
                return None
            what, end = "the entries do not match their checksum", head.entries
        else:
            record = self._at(page)
            what = "" if record is None else differs(content, record)
            if record is None or not what:
                return None
            end = record.next_number
        before = self._at(page - 1) if page else None
        begin = 0 if not page else first() if before is None else before.next_number
        return DamagedPage(self._path, page_start(page), what, page, begin or 0, end)

    def _at(self, page: int) -> PageSum | None:
        if not self._start <= page < self._start + len(self._known):
            # With the page before it, whose record says which entry is the first.
            self._start = max(0, page - 1)
            stop = max(page + 1, min(self._start + _MANY, self._stop))
            self._known = self._records.get_many(self._start, stop)
        return self._known[page - self._start]
