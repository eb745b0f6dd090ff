"""Bookmarks of operations that were committed without waiting, until the operations are visible.

Then the index receives them. Keeps at most as many in memory as one operation may have; the index
reads the others from the file.
"""

from __future__ import annotations

from collections import deque

from datastreamer._packer import KEPT_BOOKMARKS
from datastreamer.storage.bookmarks.keeper import BookmarkKeeper
from datastreamer.storage.header.records import Head
from datastreamer.storage.write.owned_file import OwnedFile


class PendingBookmarks:
    """Operations in the order of their commits."""

    def __init__(self, owned: OwnedFile, keeper: BookmarkKeeper) -> None:
        self._owned = owned
        self.keeper = keeper
        # Of each operation: its bookmarks (None: not kept), its first entry, and its end.
        self._waiting: deque[tuple[list[tuple[bytes, int]] | None, int, Head]] = deque()
        self._kept = 0

    def add(self, bookmarks: list[tuple[bytes, int]] | None, start: int, head: Head) -> None:
        """Add an operation that was committed, and is not visible. Requires the writer's lock."""
        if bookmarks is not None:
            if self._kept + len(bookmarks) > KEPT_BOOKMARKS:
                bookmarks = None
            else:
                self._kept += len(bookmarks)
        self._waiting.append((bookmarks, start, head))

    def settled(self) -> None:
        """More is on disk than before: pass what is visible to the index. Called with the writer's
        lock held, from any thread."""
        head, synced, waiting = self._owned.head, self._owned.end.base, self._waiting
        while waiting and waiting[0][2].entries <= head.entries:
            bookmarks, start, end = waiting.popleft()
            self._kept -= len(bookmarks or ())
            self.keeper.committed(bookmarks, start, end, synced)
        self.keeper.synced(synced)

    def clear(self) -> None:
        """Forget all operations: they are lost."""
        self._waiting.clear()
        self._kept = 0
