"""What a writer truncates or updates in a stream file while it is read.

Reads a whole header page beside a writer, and collects the changes that it names. Committed bytes
change only under a new epoch, and the header page names the changes of the last epochs: other
entries are unchanged. Knows nothing of entries' places.
"""

from __future__ import annotations

import time

from datastreamer.format import HEADER_PAGE_SIZE
from datastreamer.storage.disk.file_ops import File
from datastreamer.storage.header.page import HeaderPage
from datastreamer.storage.header.records import Change

# A header page that is damaged in this many reads, a millisecond apart, is damaged.
_READS = 50
_PAUSE_SECONDS = 0.001


def steady_page(file: File) -> HeaderPage:
    """The header page. A read beside a writer may return half of each of two pages; it is
    repeated until every record in it is whole, for 50 ms at most."""
    page = HeaderPage.of(file)
    for attempt in range(_READS):
        if len(page) < HEADER_PAGE_SIZE or not page.broken:
            break
        if attempt:
            time.sleep(_PAUSE_SECONDS)
        if attempt > 1 and not file.locked_elsewhere():
            break
        page = HeaderPage.of(file)
    return page


class ChangedError(Exception):
    """Entries were truncated or updated while they were read, `changes` times."""

    def __init__(self, what: str, changes: int = 0) -> None:
        super().__init__(what)
        self.changes = changes


class Changes:
    """Truncations and updates, in the order in which they came."""

    def __init__(self) -> None:
        self.count = 0
        self.unknown = False
        """Whether the stream changed in an unknown place."""
        self.lowest: Change | None = None
        """The truncation to the fewest entries; of several equal ones the last."""
        self._updated: set[int] = set()

    def add(self, change: Change) -> None:
        self.count += 1
        if change.stop is not None:
            self._updated.update(range(change.start, change.stop))
        elif self.lowest is None or change.start <= self.lowest.start:
            self.lowest = change

    def extend(self, later: Changes) -> None:
        """Add those of `later`."""
        self.count += later.count
        self.unknown |= later.unknown
        self._updated |= later._updated
        lowest = later.lowest
        if lowest is not None and (self.lowest is None or lowest.start <= self.lowest.start):
            self.lowest = lowest

    def updated_below(self, entries: int) -> list[int]:
        """Which of the first `entries` entries were updated, ascending, without those that were
        truncated too."""
        if self.lowest is not None:
            entries = min(entries, self.lowest.start)
        return sorted(number for number in self._updated if number < entries)

    def touch(self, entries: int) -> bool:
        """Whether any of the first `entries` entries was changed."""
        cut = self.lowest is not None and self.lowest.start < entries
        return self.unknown or cut or bool(self.updated_below(entries))


class ChangeWatch:
    """Collects the changes of a stream file since a header page was read.

    Call `look` often enough: a header page names the last 16 changes only. `page` is that of the
    last look, `epoch` its epoch (None: a program that keeps no records wrote it).
    """

    def __init__(self, file: File, page: HeaderPage) -> None:
        self._file = file
        self._found = Changes()
        record = page.record
        self.page = page
        self.epoch = None if record is None else record.epoch
        self._stream_id = None if record is None else record.stream_id

    def take(self) -> Changes:
        """What changed since the last call."""
        self.look()
        found, self._found = self._found, Changes()
        return found

    def look(self) -> None:
        """Read the header page, and collect the changes that it names."""
        before, self.page = self.page, steady_page(self._file)
        if self.page == before:
            return
        record = self.page.record
        if record is None or self.epoch is None or record.stream_id != self._stream_id:
            # If a program keeps no records, only lower totals in the header show a truncation.
            was, now = before.raw, self.page.raw
            shorter = now.total_length < was.total_length
            fewer = now.total_entries < was.total_entries
            kept = self.epoch is not None or record is not None
            self._found.unknown |= kept or shorter or fewer
        elif record.epoch != self.epoch:
            changes = self.page.changes_between(self.epoch, record.epoch)
            self.epoch = record.epoch
            self._found.unknown |= changes is None
            for change in changes or ():
                self._found.add(change)
