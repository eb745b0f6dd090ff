"""The interface of a bookmark index.

An index is derived data: for each key the numbers of all entries that have it, and a watermark
that says how much of which file it covers. `keeper.py` decides whether to trust it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import NamedTuple

from datastreamer.errors import IndexFailed, StreamFileError
from datastreamer.storage.bookmarks._pairs import Pairs

Pace = Callable[[], object]
"""A backend calls this regularly during a long write. It may sleep, so that other threads run, and
may raise, which ends the write."""


def at_once() -> None:
    """The pace of a write without pauses."""


class Watermark(NamedTuple):
    """How much of which file an index covers.

    All bookmarks of the entries before number `entries`, which end at file offset
    `length`, are in the index; `identity` is the keeper's fingerprint of that file.
    """

    length: int
    entries: int
    identity: bytes


class IndexReading(ABC):
    """One state of an index, for look-ups that follow each other at once."""

    __slots__ = ()

    @abstractmethod
    def newest(self, key: bytes) -> int | None:
        """The highest entry number with this key."""

    def end(self) -> None:  # noqa: B027
        """Release the state: call this soon."""


class BookmarkIndex(IndexReading):
    """A map from key (1 to 16 bytes) to entry numbers.

    Several threads may read at once, one at a time may write. Each method that writes, except
    `fill`, is atomic: after a crash or an exception it has happened in full or not at all.
    """

    @property
    def on_disk(self) -> bool:
        """Whether it outlives the process."""
        return True

    @abstractmethod
    def watermark(self) -> Watermark | None:
        """How much the index covers; None if it is new."""

    def reading(self) -> IndexReading:
        """The index as it is now; without transactions, as it is at each look-up."""
        return self

    @abstractmethod
    def add(
        self, bookmarks: Iterable[tuple[bytes, int]], watermark: Watermark, pace: Pace = at_once
    ) -> None:
        """Add the bookmarks between the old and the new watermark."""

    def fill(
        self, parts: Iterable[Pairs], watermark: Callable[[], Watermark], pace: Pace = at_once
    ) -> None:
        """Replace everything with these bookmarks of a whole file.

        `watermark` is called after all parts were read. If this ends early, the index may have
        bookmarks and no watermark, and must be cleared.
        """
        self.clear()
        whole = Pairs()
        for part in parts:
            whole.extend(part)
        self.add(whole, watermark(), pace)

    @abstractmethod
    def remove(self, bookmarks: Iterable[tuple[bytes, int]], watermark: Watermark) -> None:
        """Remove exactly these; durable on return."""

    @abstractmethod
    def clear(self) -> None:
        """Remove everything, the watermark too."""

    def upkeep(self, pace: Pace = at_once) -> None:
        """The thread that writes the index calls this every few seconds, between two writes."""

    def in_place(self) -> bool:
        """Whether the index on disk was neither removed nor replaced since it was opened."""
        return True

    @abstractmethod
    def __len__(self) -> int:
        """The number of distinct keys."""

    @abstractmethod
    def close(self) -> None:
        """Release all resources. Idempotent."""


class IndexDamaged(IndexFailed):
    """The index is damaged: it must be cleared before it is written again."""


class IndexWentBack(IndexFailed):
    """The index covers less of the file than before, and does not have the key looked up."""


class IndexElsewhere(IndexFailed):
    """The stream's path now leads to another file, to which the index there belongs."""


class IndexUnmade(IndexFailed):
    """The process that created the index ended before writing to it."""


class IndexUntrusted(IndexFailed):
    """The index is a link, another user's file, or writable by others, and is not opened."""


class IndexReadOnly(StreamFileError):
    """An index to read does not exist, or cannot be used as it is."""
