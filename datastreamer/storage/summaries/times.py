"""When the entries of a stream were committed, and which one was the first at or after a time.

Owns which records' marks are believed: those of the bytes that the file has. Reads the sidecar anew
for each question, since another process may write it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Final

from xxhash import xxh3_128_digest

from datastreamer.errors import DamagedEntry, TimeUnknown, UntrustedFile
from datastreamer.format import page_start
from datastreamer.selection.times import TimeMarks, moment_text
from datastreamer.storage.disk.atomic_file import new_file, remove_left_overs
from datastreamer.storage.disk.file_ops import Disk
from datastreamer.storage.header.records import Head
from datastreamer.storage.pages.hashes import last_page
from datastreamer.storage.read.file import StreamFile
from datastreamer.storage.summaries.records import (
    SUFFIX,
    Mark,
    PageSummary,
    StoredSummaries,
    pack_header,
)

# Records that are read at once.
_MANY: Final = 64
# Pages at the end whose marks may be on their way.
_RECENT: Final = 2


@contextlib.contextmanager
def opened_summaries(stream: StreamFile) -> Iterator[StoredSummaries | None]:
    """The sidecar of a stream; None if there is none that can be read."""
    stream.settle_summaries()
    place, file = stream.place(), None
    if place is not None:
        with contextlib.suppress(OSError, UntrustedFile):
            file = place[0].open(place[1] + SUFFIX, write=False, beside=stream.file.access())
    try:
        yield None if file is None else StoredSummaries(file)
    finally:
        if file is not None:
            file.close()


class StreamTimes:
    """The times of one stream."""

    def __init__(self, file: StreamFile) -> None:
        self._file = file
        # The last records that fit the bytes of their pages.
        self._fitting: dict[int, tuple[object, ...]] = {}

    def time_of(self, number: int) -> int | None:
        page = self._file.reader.page_holding(number)
        with opened_summaries(self._file) as stored:
            found = self._first(stored, page, page + 1)
        spans = [] if found is None else found[1].spans
        return next((ms for first, stop, ms in spans if first <= number < stop), None)

    def entry_at(self, ms: int) -> int:
        with opened_summaries(self._file) as stored:
            head = self._file.head
            low, high = -1, last_page(head.length) + 1
            before: PageSummary | None = None
            after: PageSummary | None = None
            while high - low > 1:
                middle = (low + high) // 2
                found = self._first(stored, middle, high)
                if found is not None and found[1].marks[0][1] < ms:
                    low, before = found
                else:
                    high, after = middle, after if found is None else found[1]
        return min(head.entries, self._between(ms, head, low, before, after))

    def _between(
        self, ms: int, head: Head, page: int, before: PageSummary | None, after: PageSummary | None
    ) -> int:
        """The first entry that may have been committed at or after a time: `before`, of this page,
        is the last record with an earlier mark, `after` the next one that has marks."""
        following = None if after is None else after.marks[0]
        if before is None:
            if not head.entries or (following is not None and following[0] == 0):
                return 0
            raise self._unknown(ms, None, following)
        earlier = [span for span in before.spans if span[2] < ms]
        first, end, last = earlier[-1]
        if ms < last + before.resolution:
            return first
        for entry, _, later in before.spans[len(earlier) :][:1]:
            following = entry, later
        if following is not None:
            if following[0] == end:
                return end
        elif (
            end >= head.entries
            or page > last_page(head.length) - _RECENT
            or self._file.writable
            or self._file.file.locked_elsewhere()
        ):
            return end
        raise self._unknown(ms, (first, last), following)

    def marks(self, first: int, most: int) -> TimeMarks:
        head = self._file.head
        marks: list[Mark] = []
        resolution, known_to = 0, first
        with opened_summaries(self._file) as stored:
            for record, (begin, end, ms) in self._spans(stored, first, head):
                same = begin == known_to and record.resolution == resolution
                if begin >= head.entries or len(marks) == most or (marks and not same):
                    break
                marks.append((begin, ms))
                resolution, known_to = record.resolution, min(end, head.entries)
        return TimeMarks(marks, resolution, known_to)

    def known_to(self) -> int:
        """The entry after the last one whose time is known."""
        with opened_summaries(self._file) as stored:
            for page in range(last_page(self._file.head.length), -1, -1):
                found = self._first(stored, page, page + 1)
                if found is not None:
                    return found[1].spans[-1][1]
        return 0

    def _spans(
        self, stored: StoredSummaries | None, first: int, head: Head
    ) -> Iterator[tuple[PageSummary, tuple[int, int, int]]]:
        """The spans of the entries from `first` on, each with its record."""
        page = self._file.reader.page_holding(first) if first < head.entries else None
        while page is not None:
            found = self._first(stored, page, last_page(head.length) + 1)
            page = None if found is None else found[0] + 1
            if found is not None:
                yield from ((found[1], span) for span in found[1].spans if span[1] > first)

    def _first(
        self, stored: StoredSummaries | None, start: int, stop: int
    ) -> tuple[int, PageSummary] | None:
        """The first of these pages that has marks, and its record."""
        many = 1
        while stored is not None and start < stop:
            following = min(start + many, stop)
            for page, packed in stored.each(start, following):
                if not any(packed[38:40]):
                    continue  # no marks
                found = stored.unpack(packed, page, self._file.stream_id)
                if found is not None and self._fits(page, found):
                    return page, found
            start, many = following, _MANY
        return None

    def _fits(self, page: int, found: PageSummary) -> bool:
        """Whether a record is about the bytes that the file has."""
        file = self._file
        fitting = found.digest, found.covered, file.epoch
        if self._fitting.get(page) == fitting:
            return True
        records = file.records() if page < last_page(file.head.length) else None
        known = None if records is None else records.get(page)
        if known is None or known.digest != found.digest:
            if records is not None:
                file.pages.before_read([page])
            try:
                content = file.reader.raw(page_start(page), found.covered)
            except (DamagedEntry, OSError):
                return False
            if xxh3_128_digest(content) != found.digest:
                return False
        if len(self._fitting) >= _MANY:
            self._fitting.clear()
        self._fitting[page] = fitting
        return True

    def _unknown(self, ms: int, before: Mark | None, after: Mark | None) -> TimeUnknown:
        said = [f"entry {mark[0]}, of {moment_text(mark[1])}" for mark in (before, after) if mark]
        known = f"the nearest known times are those of {' and '.join(said)}"
        if not said:
            known = "no entry's time is known"
        what = "it is not known which entry was committed first at or after"
        return TimeUnknown(f"{self._file.path}: {what} {moment_text(ms)}: {known}", before, after)


def copy_summaries(source: StreamFile, target: str, disk: Disk, pages: int) -> None:
    """Copy the records of the first pages of a stream to those of its copy at `target`. What was
    there before, for another file, is removed. Raises `OSError` and `UntrustedFile`."""
    path, access = target + SUFFIX, source.file.access()
    remove_left_overs(disk, path, access)
    if disk.exists(path):
        with contextlib.closing(disk.open(path, write=False, beside=access)) as old:
            if StoredSummaries(old).stream_id() is None:
                raise UntrustedFile(path, "is in the place of the copy's, and is none")
        disk.unlink(path)
    with opened_summaries(source) as stored:
        if stored is not None and not source.replaced:
            with new_file(disk, path, access) as file:
                file.write(pack_header(source.stream_id), 0)
                for first in range(0, pages, _MANY):
                    packed = stored.packed(first, min(first + _MANY, pages))
                    file.write(packed, stored.offset_of(first))
