"""Keeps `FILE.pages` beside a stream that is written.

Decides when a commit's time is noted, which records are written, and which remain when entries are
changed. Nothing is synced, and a refusal of the system ends the use of the sidecar:
the stream does not depend on it.
"""

from __future__ import annotations

import contextlib
import logging
import struct
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final, NamedTuple

from xxhash import xxh3_128_digest

from datastreamer.errors import UntrustedFile
from datastreamer.format import page_start
from datastreamer.storage.disk.file_ops import Disk, File
from datastreamer.storage.pages.hashes import PageHash
from datastreamer.storage.pages.keeper import SumsKeeper
from datastreamer.storage.pages.sidecar import PageSum
from datastreamer.storage.summaries.records import (
    RESOLUTION,
    SUFFIX,
    UNKNOWN_TIME,
    Mark,
    PageSummary,
    StoredSummaries,
    pack_header,
    thinned,
)
from datastreamer.storage.write._lane import CommitLane

_log = logging.getLogger(__name__)

_FLUSH_SECONDS: Final = 1.0
_PAGE_SECONDS: Final = 0.08
# Records that are looked at while commits wait for the lock.
_FEW: Final = 64
_NEVER: Final = 1 << 62


class Marks(NamedTuple):
    """Marks of one page, and their resolution."""

    marks: list[Mark]
    resolution: int = RESOLUTION


class SummaryKeeper:
    """The sidecar of one stream that is open for writing. For one thread at a time: the caller
    holds the lock of the stream's file."""

    def __init__(
        self, disk: Disk, path: str, file: File, stream_id: bytes, sums: SumsKeeper, end: CommitLane
    ) -> None:
        """`path` is that of the stream, symbolic links resolved; `file` is the stream's."""
        self._disk = disk
        self._path = path + SUFFIX
        self._stream = file
        self._stream_id = stream_id
        self._sums = sums
        self._end = end
        self._file: File | None = None
        self.before_read: Callable[[Iterable[int]], object] = lambda pages: None
        """Called with the pages that are about to be read."""
        self.usable = True
        self.marking = True
        """Whether commits are noted."""
        self.on_news: Callable[[float], None] = lambda seconds: None
        """Called if there will be something to write, within some seconds."""
        # The last page: its number, its first entry, and its marks.
        self._page = self._first = 0
        self._open = Marks([])
        # Records that are not written yet, and that of the last page as it was written.
        self._waiting: dict[int, PageSummary] = {}
        self._written: PageSummary | None = None
        # The next page whose record is looked at: it may not be counted. And the first page that
        # this process finished.
        self._look_at = 0
        self._fresh_from = _NEVER

    # Begin and end.

    def take_over(self) -> None:
        """Begin to keep the sidecar: the stream is open, and nothing was committed."""
        page = self._end.sums.page
        with self._failing_softly("read"):
            if self._disk.exists(self._path):
                access = self._stream.access()
                self._file = file = self._disk.open(self._path, write=True, beside=access)
                if StoredSummaries(file).stream_id() != self._stream_id:
                    file.resize(0)
                    file.write(pack_header(self._stream_id), 0)
                self._cut(page + 1)
        for record in self._stored(max(0, page - 1), page + 1):
            if record is not None and record.marks:
                # Commits after the last mark were less than a resolution later.
                latest = record.spans[-1][2]
                back = latest > time.time() * 1000
                self._end.latest_ms = latest + (record.resolution - 1 if back else 0)
        self._reopen(page, self.marks_of(page))

    def close(self) -> None:
        """Idempotent."""
        file, self._file = self._file, None
        self.usable = False
        if file is not None:
            file.close()

    # Commits.

    def committed(self, first: int, pages: Sequence[PageHash]) -> int:
        """A commit that began with entry `first` has made `pages` whole. Returns from when on the
        next one has to be reported even if it makes no page whole, in Unix ms."""
        clock = int(time.time() * 1000)
        self._end.latest_ms = now = max(clock, self._end.latest_ms)
        if not pages or first < pages[0].next_number:
            self._note(first, now)
        for page in pages:
            self._waiting[page.page] = PageSummary(
                *(page.digest, self._first, page.end, page.next_number - self._first),
                *(self._open.resolution, tuple(self._open.marks)),
            )
            self._fresh_from = min(self._fresh_from, page.page)
            self._page, self._first, self._open = page.page + 1, page.next_number, Marks([])
            self._note(page.next_number, now)
        if pages:
            # At once: a kill loses no times but those of the last page.
            self.flush()
        if self.usable:
            self.on_news(_PAGE_SECONDS if pages else _FLUSH_SECONDS)
        if not (self.marking and self.usable):
            return _NEVER
        marks, resolution = self._open
        return min(clock + RESOLUTION, marks[-1][1] + resolution)

    def _note(self, entry: int, now: int) -> None:
        marks, resolution = self._open
        timed = [ms for _, ms in marks[-2:] if ms != UNKNOWN_TIME]
        if not self.marking:
            return
        if not timed or now >= timed[-1] + resolution:
            kept = [mark for mark in marks if mark[0] < entry]
            self._open = Marks(*thinned([*kept, (entry, now)], resolution))
        elif marks[-1][1] == UNKNOWN_TIME:
            # Entries whose time is not known were committed between these two.
            self._open = Marks(marks[:-1], resolution)

    def flush(self) -> None:
        """Bring the sidecar up to date."""
        if not self.usable:
            self._waiting.clear()
            return
        with self._failing_softly("written"):
            if self._file is not None and not self._disk.exists(self._path):
                _log.warning("%s was removed; it is made again, without older times", self._path)
                self._file.close()
                self._file, self._written, self._look_at = None, None, 0
            if self._open.marks and (record := self._last_record()) != self._written:
                self._waiting[self._page] = self._written = record
            for page, record in self._waiting.items():
                self._put(page, record)
            self._waiting.clear()

    def _last_record(self) -> PageSummary:
        """The record of the last page as it is now."""
        sums, (marks, resolution) = self._end.sums, self._open
        covered = sums.end - page_start(self._page)
        digest, entries = sums.sum().tail, self._end.written.entries - self._first
        return PageSummary(digest, self._first, covered, entries, resolution, tuple(marks))

    def _put(self, page: int, record: PageSummary) -> None:
        if self._file is None:
            self._file = self._disk.create(self._path, self._stream.access())
            self._file.write(pack_header(self._stream_id), 0)
        self._file.write(record.pack(page, self._stream_id), StoredSummaries.offset_of(page))

    def _cut(self, pages: int) -> None:
        """Keep the records of that many pages at most."""
        size = StoredSummaries.offset_of(pages)
        if self._file is not None and self._file.size() > size:
            self._file.resize(size)

    def _record(self, page: int) -> PageSummary | None:
        return self._waiting.get(page) or self._stored(page, page + 1)[0]

    def _stored(self, first: int, stop: int) -> list[PageSummary | None]:
        with self._failing_softly("read"):
            if self._file is not None:
                return StoredSummaries(self._file).get_many(first, stop, self._stream_id)
        return [None] * (stop - first)

    # Changes of what is committed.

    def marks_of(self, page: int) -> Marks:
        """The marks of a page as it is in the file, as far as these are known."""
        if page == self._page and self._open.marks:
            return self._open
        record, beyond, content = self._record(page), self._first_of(page + 1), b""
        if record is None or not record.marks or beyond is None:
            return Marks([])
        with contextlib.suppress(OSError):
            self.before_read([page])
            content = self._stream.read(record.covered, page_start(page))
        return _marks_in(record, content, beyond)

    def changed(self, page: int, marks: Marks) -> None:
        """Entries of a page, which had these marks, were replaced."""
        if page != self._page:
            first, known = self._first_of(page), self._sums.get(page)
            if known is not None and first is not None:
                self._waiting[page] = _summary_of(known, first, marks)
            self.look_at(page)
        self.flush()

    def truncated(self, marks: Marks) -> None:
        """The stream was truncated. What is the last page now had these marks."""
        page, end = self._end.sums.page, self._end.written
        for each in [each for each in self._waiting if each >= page]:
            del self._waiting[each]
        with self._failing_softly("written"):
            self._cut(page)
        self._look_at, self._fresh_from = min(self._look_at, page), min(self._fresh_from, page)
        kept = [mark for mark in marks.marks if mark[0] < end.entries]
        self._reopen(page, Marks(kept, marks.resolution))
        self.flush()

    def leave_times(self) -> None:
        """Do not note when entries are committed: `put_marks` says it."""
        self.marking, self._end.mark_at = False, _NEVER
        self._leave_open()

    def put_marks(
        self, marks: Sequence[Mark], resolution: int, known_to: int, page_of: Callable[[int], int]
    ) -> None:
        """Note the times of the entries from the first of `marks` up to `known_to`; `page_of` gives
        the page of an entry."""
        known_to = min(known_to, self._end.written.entries)
        if not marks or marks[0][0] >= known_to:
            return
        start = page_of(marks[0][0])
        before_page = self.marks_of(start - 1).marks if start else []
        latest = max((ms for _, ms in before_page if ms != UNKNOWN_TIME), default=0)
        for page in range(start, page_of(known_to - 1) + 1):
            first, known = self._first_of(page), self._sums.get(page)
            if first is None or not (known or page == self._page):
                continue
            beyond = self._end.written.entries if known is None else known.next_number
            mine = [mark for mark in marks if first <= mark[0] < min(beyond, known_to)]
            before = [mark for mark in marks if mark[0] <= first][-1:]
            if before and before[0][0] < first:
                # It was committed before the next mark, and less than a resolution after the last.
                following = [mark[1] for mark in marks if mark[0] > first][:1]
                mine.insert(0, (first, min([before[0][1] + resolution - 1, *following])))
            if not mine:
                continue
            old, least = self.marks_of(page), mine[0]
            kept = [mark for mark in old.marks if mark[0] < least[0]]
            latest = max([latest, *(ms for _, ms in kept if ms != UNKNOWN_TIME)])
            for entry, ms in mine:
                # What is known of a page's first entry may have been too late.
                latest = max(latest, ms)
                kept.append((entry, latest))
            if page == self._page or known_to < beyond:
                kept.append((known_to, UNKNOWN_TIME))
            found = Marks(*thinned(kept, max(old.resolution, resolution)))
            if page == self._page:
                self._open = found
            elif known is not None:
                self._waiting[page] = _summary_of(known, first, found)
                self.look_at(page)
        self.flush()

    def _reopen(self, page: int, marks: Marks) -> None:
        first = self._first_of(page)
        self._page, self._first = page, self._end.written.entries if first is None else first
        self._open = Marks([]) if first is None else marks
        self._written, self._end.mark_at = None, 0
        if not self.marking:
            self._leave_open()

    def _leave_open(self) -> None:
        """The times of entries that come are not known by the marks that there are."""
        marks, resolution = self._open
        if marks and marks[-1][1] != UNKNOWN_TIME:
            end = self._end.written.entries, UNKNOWN_TIME
            self._open = Marks(*thinned([*marks, end], resolution))

    def _first_of(self, page: int) -> int | None:
        """The first entry of a page; None if it cannot be read."""
        end = self._end.written
        if end.length <= page_start(page):
            return end.entries
        before = self._sums.get(page - 1) if page else None
        if before is not None:
            # The page itself may be damaged.
            return before.next_number
        with contextlib.suppress(OSError):
            self.before_read([page])
            found = int.from_bytes(self._stream.read(17, page_start(page))[9:], "big")
            return found if found < end.entries else None
        return None

    # For the completion (`pages/completer.py`).

    def look_at(self, page: int) -> None:
        """The summary of a page can be made, or has to be made again."""
        if page < self._look_at:
            self._look_at = page
            self.on_news(_PAGE_SECONDS)

    def next_to_count(self, *, fresh: bool = False) -> tuple[int, PageSum] | None:
        """A page that is to be counted, and its checksum; None if there is none. `fresh`: of those
        that this process finished."""
        self.flush()
        pages = self._end.sums.page
        if fresh:
            self._look_at = max(self._look_at, self._fresh_from)
        while self.usable and self._look_at < pages:
            first, stop = self._look_at, min(self._look_at + _FEW, pages)
            both = zip(self._stored(first, stop), self._sums.get_many(first, stop), strict=True)
            for found, known in both:
                page, self._look_at = self._look_at, self._look_at + 1
                if known is None:
                    continue  # the checksum is made first
                if found is None or not found.counted or found.digest != known.digest:
                    return page, known
        return None

    def counted(self, page: int, known: PageSum, found: PageSummary, content: bytes) -> None:
        """A page with the checksum `known` was counted."""
        if self.usable and self._sums.get(page) == known:
            record = self._record(page)
            if record is not None and record.marks:
                marks, resolution = _marks_in(record, content, found.next_number)
                found = found._replace(marks=tuple(marks), resolution=resolution)
            with self._failing_softly("written"):
                self._put(page, found)

    # The system.

    @contextlib.contextmanager
    def _failing_softly(self, what: str) -> Iterator[None]:
        """A block in which a refusal of the system ends the use of the sidecar."""
        try:
            yield
        except (OSError, UntrustedFile, struct.error) as error:  # the last: of damaged numbers
            self.close()
            why = error.what if isinstance(error, UntrustedFile) else str(error)
            _log.warning(
                "%s cannot be %s (%s); what the pages hold and when their entries were committed "
                "is not recorded",
                *(self._path, what, why),
            )


def _summary_of(known: PageSum, first: int, marks: Marks) -> PageSummary:
    entries = known.next_number - first
    return PageSummary(
        *(known.digest, first, known.end, entries, marks.resolution, tuple(marks.marks))
    )


def count_page(known: PageSum, content: bytes) -> PageSummary | None:
    """What a page with this content holds; None if that does not match its checksum."""
    if xxh3_128_digest(content[: known.end]) != known.digest:
        return None
    return _summary_of(known, int.from_bytes(content[9:17], "big"), Marks([])).counting(content)


def _marks_in(record: PageSummary, content: bytes, beyond: int) -> Marks:
    """The marks of a record, if it is about a page that begins with `content`, and has the entries
    up to `beyond` now: the times of those that it does not cover are not known."""
    marks = list(record.marks)
    if xxh3_128_digest(content[: record.covered]) != record.digest:
        return Marks([])
    if record.next_number < beyond and marks[-1][1] != UNKNOWN_TIME:
        marks.append((record.next_number, UNKNOWN_TIME))
    return Marks(*thinned(marks, record.resolution))
