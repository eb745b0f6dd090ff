"""Compares the LMDB index with its file: it must hold exactly the bookmarks that a scan finds.

Changes nothing. A missing, foreign or lagging index is not a fault: the next writer rebuilds it.
"""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Callable, Iterator

from datastreamer._codec import EntryBatch
from datastreamer.errors import CorruptEntries, DamagedEntry, IndexFailed, UnknownEntry
from datastreamer.format import TYPE_BOOKMARK
from datastreamer.printable import counted
from datastreamer.storage.bookmarks.interface import IndexUnmade, IndexUntrusted, Watermark
from datastreamer.storage.bookmarks.lmdb import LmdbIndex, index_folder
from datastreamer.storage.bookmarks.trust import fingerprint
from datastreamer.storage.disk.file_ops import File
from datastreamer.storage.header.records import Head
from datastreamer.storage.pages.compare import pages_in_words
from datastreamer.storage.read.reader import Reader

_MAX_PROBLEMS = 1000


class IndexAudit:
    """One comparison: `feed` it the file's entries from the first on, then `finish` and `close`.
    Bookmarks in damaged pages are not compared: whether the index is right is not known.

    `notes` and `problems` are sentences, `more` is the number of problems that are not listed, and
    `folder` is the index's.
    """

    def __init__(
        self,
        file: File,
        path: str,
        stream_id: bytes,
        epoch: int,
        head: Head,
        floor: int,
        differs: Callable[[int], bool],
        *,
        live: bool,
    ) -> None:
        """The index may lack older bookmarks of a key in pages below the `floor`. `differs` says
        whether the page that is fed does not match its checksum; of the last page, when `finish`
        is called."""
        self.notes: list[str] = []
        self.problems: list[str] = []
        self.more = 0
        self.folder = index_folder(os.path.abspath(path))
        self._file, self._path, self._head = file, path, head
        self._live = live
        self._floor = floor
        self._differs = differs
        # The page that was fed last; and pages that were left out, and their entries.
        self._latest: tuple[int, EntryBatch] | None = None
        self._left_out: list[int] = []
        self._unknown: list[range] = []
        self._found = 0
        self._until = 0
        self._index: LmdbIndex | None = None
        data = os.path.join(self.folder, "data.mdb")
        if not os.path.exists(data):
            self.notes.append("there is no bookmark index; the next writer or reindex builds it")
            return
        if not os.access(data, os.R_OK):
            self.notes.append(f"the bookmark index was not compared: no permission to read {data}")
            return
        try:
            self._index = LmdbIndex(self.folder, False, file.access(), beside_writer=live)
            mark = self._index.watermark()
        except IndexUnmade as error:
            self.notes.append(f"{error.what}; the next writer or reindex fills it")
            return
        except IndexUntrusted as error:
            self.notes.append(f"the bookmark index was not compared: {error}")
            return
        except IndexFailed as error:
            self._failed(error)
            return
        if not self._is_of(mark, stream_id, epoch, live):
            self.close()
        elif mark is not None:
            self._until = min(mark.entries, head.entries)
            lag = head.entries - self._until
            if lag:
                self.notes.append(
                    f"the bookmark index lags by {counted(lag)}; the next writer or reindex "
                    "adds them"
                )

    def _failed(self, error: IndexFailed) -> None:
        self.problems.append(error.what)
        self.close()

    def _is_of(self, mark: Watermark | None, stream_id: bytes, epoch: int, live: bool) -> bool:
        if mark is None:
            self.notes.append("the bookmark index is empty; the next writer or reindex fills it")
            return False
        beyond = mark.entries > self._head.entries or mark.length > self._head.length
        if (beyond and not live) or mark.identity != fingerprint(
            self._file, stream_id, epoch, mark.length
        ):
            self.notes.append(
                "the bookmark index was not compared: it does not include a truncation or update "
                "yet, or it belongs to another file; the writer updates or rebuilds it"
                if live
                else "the bookmark index belongs to another file, or another program has changed "
                "this one since; the next writer or reindex rebuilds it"
            )
            return False
        return True

    def feed(self, page: int, batch: EntryBatch) -> None:
        """The entries of the next page, in order and without gaps."""
        self._compare_latest()
        self._latest = page, batch
        if self._differs(page):
            self._compare_latest()

    def _compare_latest(self) -> None:
        if self._latest is None:
            return
        page, batch = self._latest
        self._latest = None
        if self._index is None or batch.first_number >= self._until:
            return
        if self._differs(page):
            self._left_out.append(page)
            self._unknown.append(range(batch.first_number, batch.next_number))
            return
        here = [item for item in batch.bookmarks() if item[1] < self._until]
        self._found += len(here)
        if not here:
            return
        try:
            lacking = self._index.lacks(sorted(here))
            self._found -= len(lacking)
            if page < self._floor:
                # An archive's lists have of each key the newest entry in a segment.
                lacking = [
                    (key, number)
                    for key, number in lacking
                    if (newest := self._index.newest(key)) is None or newest < number
                ]
        except IndexFailed as error:
            self._failed(error)
            return
        for key, number in sorted(lacking, key=lambda item: item[1]):
            self._add_problem(f"the index lacks entry {number} for the bookmark 0x{key.hex()}")

    def _add_problem(self, what: str) -> None:
        if len(self.problems) < _MAX_PROBLEMS:
            self.problems.append(what)
        else:
            self.more += 1

    def finish(self) -> None:
        """After the last entry: find what the index holds and the file does not."""
        self._compare_latest()
        if self._index is None:
            return
        if self._left_out:
            self.notes.append(
                f"the bookmarks in {pages_in_words(self._left_out)} were not compared with the "
                "index: what is there does not match its checksum"
            )
        try:
            if self._pairs(self._index) != self._found:
                for what in self._unexpected(self._index):
                    self._add_problem(what)
        except IndexFailed as error:
            self._failed(error)

    def _pairs(self, index: LmdbIndex) -> int:
        """The number of bookmarks in the index, without those of pages that were left out."""
        if not self._left_out:
            return index.pairs()
        return sum(not self._is_left_out(number) for _, number in index.everything())

    def _is_left_out(self, number: int) -> bool:
        at = bisect_right(self._unknown, number, key=lambda each: each.start)
        return at > 0 and number in self._unknown[at - 1]

    def _unexpected(self, index: LmdbIndex) -> Iterator[str]:
        reader = Reader(self._file, self._path, self._head)
        mark = index.watermark()
        end = self._until if mark is None else mark.entries
        for key, number in index.everything():
            # A live writer may add to the index at any moment.
            if self._until <= number and (self._live or number < end):
                continue
            if self._is_left_out(number):
                continue
            if number >= self._until or not _is_bookmark_at(reader, key, number):
                yield f"the index wrongly lists entry {number} for the bookmark 0x{key.hex()}"

    def close(self) -> None:
        if self._index is not None:
            self._index.close()
            self._index = None


def _is_bookmark_at(reader: Reader, key: bytes, number: int) -> bool:
    try:
        entry = reader.entry(number)
    except (UnknownEntry, DamagedEntry, CorruptEntries):
        return False
    return entry.type == TYPE_BOOKMARK and entry.data == key
