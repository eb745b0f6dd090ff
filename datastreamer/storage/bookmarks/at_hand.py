"""Look-ups of bookmarks that follow each other without a wait, in memory and the index alone.

Owns that a result is of one state of both. Must not know the file or threads.
"""

from __future__ import annotations

from datastreamer.errors import IndexFailed
from datastreamer.storage.bookmarks.builder import IndexBuilder
from datastreamer.storage.bookmarks.trust import TrustedIndex
from datastreamer.storage.header.records import Head


class NotAtHandError(Exception):
    """The look-up needs a repair first, not only memory and the index."""


class LookUpsAtHand:
    """Look-ups that follow each other at once, at one state of the bookmarks, in memory and the
    index alone. Raises `NotAtHandError` if they need more; `end` releases the state."""

    __slots__ = ("_builder", "_indexed", "_memory", "_reading", "_state", "_trusted")

    def __init__(
        self,
        trusted: TrustedIndex,
        builder: IndexBuilder,
        memory: dict[bytes, int],
        indexed: Head,
        state: object,
    ) -> None:
        """`memory` has the bookmarks of all entries that are not `indexed`, as of the reader's
        `state`."""
        self._state = state
        self._trusted = trusted
        self._builder = builder
        self._memory = memory
        self._indexed = indexed
        index = trusted.index
        self._reading = None if index is None or not indexed.entries else index.reading()

    def hold_at(self, state: object) -> bool:
        """Whether they see all bookmarks of the reader's `state`, and no others."""
        trusted = self._trusted
        same = state is self._state and trusted.indexed is self._indexed
        return same and not trusted.recent.unfinished

    def newest(self, key: bytes) -> int | None:
        """The highest committed entry number that is a bookmark with this key."""
        found = self._memory.get(key)
        if found is not None:
            return found
        if self._reading is not None:
            try:
                found = self._reading.newest(key)
            except IndexFailed:
                raise NotAtHandError from None
        if self._trusted.indexed is not self._indexed:
            # Bookmarks may have left the memory for a newer state of the index.
            raise NotAtHandError
        if found is None and self._builder.damage is not None:
            raise NotAtHandError
        return found

    def end(self) -> None:
        """Release the state."""
        if self._reading is not None:
            self._reading.end()
