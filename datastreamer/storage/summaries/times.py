"""When the entries of a stream were committed, and which one was the first at or after a time.

Owns which records' marks are believed: those of the bytes that the file has. Reads the sidecar anew
for each question, since another process may write it.
"""

from __future__ import annotations

import contextlib
from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Final, NamedTuple

from xxhash import xxh3_128_digest

from datastreamer.errors import DamagedEntry, TimeUnknown, UntrustedFile
from datastreamer.format import page_start
from datastreamer.storage.header.records import Head
from datastreamer.storage.pages.hashes import last_page
from datastreamer.storage.read.file import StreamFile
from datastreamer.storage.summaries.records import (
    SUFFIX,
    UNKNOWN_TIME,
    Mark,
    PageSummary,
    StoredSummaries,
)

# Records that are read at once.
_MANY: Final = 64
# Pages at the end whose marks may be on their way.
_RECENT: Final = 2


class TimeMarks(NamedTuple):
    """Consecutive marks (entry, Unix ms), of commits at that entry, with one resolution: the times
    of all entries from the first mark up to, not including, `next` are known by them, and the
    commits between two of them were less than `resolution` ms after the first."""

    marks: list[Mark]
    resolution: int
    next: int


class StreamTimes:
    """The times of one stream."""

    def __init__(self, file: StreamFile) -> None:
        self._file = file
        # The last records that fit the bytes of their pages.
        self._fitting: dict[int, tuple[object, ...]] = {}

    def time_of(self, number: int) -> int | None:
        page = self._file.reader.page_holding(number)
        with self._stored() as stored:
            found = self._first(stored, page, page + 1)
        if found is None or number >= _known_to(found[1]):
            return None
        marks = found[1].marks
        at = bisect_right(marks, number, key=lambda mark: mark[0])
        return marks[at - 1][1] if at else None

    def entry_at(self, ms: int) -> int:
        with self._stored() as stored:
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
        marks = before.marks
        at = bisect_left(marks, ms, key=lambda mark: mark[1])
        last = marks[at - 1]
        if ms < last[1] + before.resolution:
            return last[0]
        end = marks[at][0] if at < len(marks) else before.next_number
        if at < len(marks) and marks[at][1] != UNKNOWN_TIME:
            return end
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
        raise self._unknown(ms, last, following)

    def marks(self, first: int, most: int) -> TimeMarks:
        total = self._file.head.entries
        if first >= total:
            return TimeMarks([], 0, first)
        page, stop = self._file.reader.page_holding(first), last_page(self._file.head.length) + 1
        marks: list[Mark] = []
        resolution = known_to = 0
        with self._stored() as stored:
            while page < stop and (found := self._first(stored, page, stop)) is not None:
                at, record = found
                if marks and (record.marks[0][0] != known_to or record.resolution != resolution):
                    break
                page, resolution, known_to = at + 1, record.resolution, _known_to(record)
                timed = [mark for mark in record.marks if mark[1] != UNKNOWN_TIME]
                begin = bisect_right(timed, first, key=lambda mark: mark[0]) - 1
                marks += timed[max(0, begin) :] if known_to > first else []
                if len(marks) > most:
                    return TimeMarks(marks[:most], resolution, marks[most][0])
        return TimeMarks(marks, resolution, min(known_to, total) if marks else first)

    def summaries(self, first: int, stop: int) -> list[PageSummary | None]:
        """The records with counts of these pages, if they have the proven digests of these."""
        with self._stored() as stored:
            records = self._file.records()
            if stored is None or records is None:
                return [None] * (stop - first)
            found = stored.get_many(first, stop, self._file.stream_id)
            return [
                it
                if it is not None and it.counted and known and known.digest == it.digest
                else None
                for it, known in zip(found, records.get_many(first, stop), strict=True)
            ]

    def known_to(self) -> int:
        """The entry after the last one whose time is known."""
        with self._stored() as stored:
            for page in range(last_page(self._file.head.length), -1, -1):
                found = self._first(stored, page, page + 1)
                if found is not None:
                    return _known_to(found[1])
        return 0

    @contextlib.contextmanager
    def _stored(self) -> Iterator[StoredSummaries | None]:
        """The sidecar; None if there is none that can be read."""
        self._file.settle_summaries()
        place, file = self._file.place(), None
        if place is not None:
            with contextlib.suppress(OSError, UntrustedFile):
                access = self._file.file.access()
                file = place[0].open(place[1] + SUFFIX, write=False, beside=access)
        try:
            yield None if file is None else StoredSummaries(file)
        finally:
            if file is not None:
                file.close()

    def _first(
        self, stored: StoredSummaries | None, start: int, stop: int
    ) -> tuple[int, PageSummary] | None:
        """The first of these pages that has marks, and its record."""
        many = 1
        while stored is not None and start < stop:
            following = min(start + many, stop)
            for page, packed in enumerate(stored.packed(start, following), start):
                if any(packed[38:40]):
                    found = PageSummary.unpack(packed, page, self._file.stream_id)
                    known = found is not None and found.marks[0][1] != UNKNOWN_TIME
                    if known and self._fits(page, found):
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
        what = (
            f"{self._file.path}: it is not known which entry was committed first at or after "
            f"{_in_words(ms)}"
        )
        if before is None and after is None:
            what += ": the time of no entry is known"
        if before is not None:
            what += f"; the last one before it whose time is known is entry {_of(before)}"
        if after is not None:
            what += f"; the next one whose time is known is entry {_of(after)}"
        return TimeUnknown(what, before, after)


def _known_to(record: PageSummary) -> int:
    """The entry after the last one whose time a record knows."""
    entry, ms = record.marks[-1]
    return entry if ms == UNKNOWN_TIME else record.next_number


def _of(mark: Mark) -> str:
    return f"{mark[0]}, of {_in_words(mark[1])}"


def _in_words(ms: int) -> str:
    try:
        found = datetime.fromtimestamp(ms / 1000, UTC)
    except (OverflowError, ValueError):
        return f"{ms} ms"
    return found.isoformat(timespec="milliseconds" if ms % 1000 else "seconds").replace(
        "+00:00", "Z"
    )
