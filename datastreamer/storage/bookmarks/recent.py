"""Bookmarks in memory: those of the newest entries, which the index may not hold yet.

Knows no index or thread. The caller holds the lock that guards these fields, except for the report
of a commit.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice
from threading import Lock
from typing import Final

from datastreamer.format import PAGE_SIZE
from datastreamer.storage.bookmarks._pairs import Pairs, ReportedBookmarks
from datastreamer.storage.header.records import Head
from datastreamer.storage.read.reader import Reader
from datastreamer.storage.read.spans import Cursor

# The index is written when this many bookmarks wait.
FLUSH_KEYS: Final = 20_000
# The maximum number of bookmarks kept in memory; the file has all of them.
_MAX_KEYS: Final = 200_000
# The maximum number of unreported bytes that one look-up reads and keeps.
_MAX_UNREPORTED_BYTES: Final = 16 * PAGE_SIZE


class MovedError(Exception):
    """The index or the stream changed during a look-up."""


class RecentBookmarks(ReportedBookmarks):
    """The bookmarks of the entries from `start` to `end`."""

    def __init__(self, head: Head, guard: Lock, *, for_writer: bool) -> None:
        super().__init__(head, guard, for_writer, _MAX_KEYS, FLUSH_KEYS)
        self.start = Cursor(*head)

    def clear(self) -> None:
        super().clear()
        self.start = Cursor(*self.end)

    def read_from(self, reader: Reader) -> None:
        """Add those of the entries up to the reader's head. Raises `MovedError`.

        A writer reports its commits, but a signal may interrupt it between a commit and the report,
        and another thread may look up a bookmark in between.
        """
        head = reader.head
        if head.entries <= self.end.entries:
            return
        if head.length - self.end.length > _MAX_UNREPORTED_BYTES:
            self.begin_at(head)
            return
        while self.end.entries < reader.head.entries:
            batch, cursor = reader.run(Cursor(*self.end))
            if not batch:
                raise MovedError
            self.add(batch.bookmarks(), Head(*cursor))
        self.limit()

    def truncate(self, head: Head) -> None:
        """Forget those from `head` on."""
        self.waiting.drop_from(head.entries)
        self.newest = dict(self.waiting)
        if head.entries < self.start.number:
            self.start = Cursor(*head)
        if head.entries < self.end.entries:
            self.end = head

    def indexed(self, head: Head) -> None:
        """The waiting bookmarks before `head` are in the index."""
        self.waiting.drop_before(head.entries)
        if self.start.number < head.entries:  # otherwise they were forgotten meanwhile
            self.start = Cursor(*head)

    def drop_before(self, head: Head) -> None:
        """Forget a reader's bookmarks before `head`, which the index holds."""
        self.newest = {key: number for key, number in self.newest.items() if number >= head.entries}
        self.start = Cursor(*head)

    def drop(self, bookmarks: Iterable[tuple[bytes, int]]) -> None:
        """Forget these unless a newer one has the key."""
        for key, number in bookmarks:
            if self.newest.get(key) == number:
                del self.newest[key]


def in_parts(bookmarks: Pairs, size: int) -> Iterable[list[tuple[bytes, int]]]:
    """The bookmarks, `size` at a time."""
    items = iter(bookmarks)
    while part := list(islice(items, size)):
        yield part
