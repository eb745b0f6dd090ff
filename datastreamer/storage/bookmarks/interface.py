"""What a bookmark index has to do, whatever keeps it.

An index is derived data: for each key the numbers of all entries that carry it, and a
watermark that says how much of which file it covers. It decides nothing; the keeper
(`keeper.py`) feeds it and judges it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import NamedTuple

from datastreamer.errors import IndexFailed, StreamFileError
from datastreamer.storage.bookmarks._pairs import Pairs

Pace = Callable[[], object]
"""Called by a backend now and then during a long write; may sleep, so that other threads
of the process come to their turn, and may raise, which ends the write."""


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


class BookmarkIndex(ABC):
    """A map from key (1 to 16 bytes) to entry numbers.

    Called from several threads for reading, from one at a time for writing. Each method
    that writes, except `fill`, is atomic: after a crash, or an exception, it happened in
    full or not at all.
    """

    @property
    def on_disk(self) -> bool:
        """Whether it outlives the process."""
        return True

    @abstractmethod
    def watermark(self) -> Watermark | None:
        """How much the index covers; None if it is new."""

    @abstractmethod
    def newest(self, key: bytes) -> int | None:
        """The highest entry number with this key."""

    @abstractmethod
    def add(
        self, bookmarks: Iterable[tuple[bytes, int]], watermark: Watermark, pace: Pace = at_once
    ) -> None:
        """Take in bookmarks that lie between the old and the new watermark."""

    def fill(
        self, parts: Iterable[Pairs], watermark: Callable[[], Watermark], pace: Pace = at_once
    ) -> None:
        """Replace everything with these: as many as there are in a whole file.

        `watermark` is called after all parts were read. If this ends early there may be
        bookmarks and no watermark: that is an index of nothing, to be cleared.
        """
        self.clear()
        whole = Pairs()
        for part in parts:
            whole.extend(part)
        self.add(whole, watermark(), pace)

    @abstractmethod
    def remove(self, bookmarks: Iterable[tuple[bytes, int]], watermark: Watermark) -> None:
        """Take out exactly these; durable on return."""

    @abstractmethod
    def clear(self) -> None:
        """Forget everything, the watermark too."""

    def upkeep(self, pace: Pace = at_once) -> None:  # noqa: B027
        """Called every few seconds by the thread that writes the index, between two writes."""

    def in_place(self) -> bool:
        """Whether opening the index now gives this one: it was not removed or replaced."""
        return True

    @abstractmethod
    def __len__(self) -> int:
        """The number of distinct keys."""

    @abstractmethod
    def close(self) -> None:
        """Give up what is held. Idempotent."""


class IndexDamaged(IndexFailed):
    """It will not be written again before it was cleared."""


class IndexWentBack(IndexFailed):
    """It covers less of the file than it did, and does not hold what it was asked for."""


class IndexElsewhere(IndexFailed):
    """The stream's path leads to another file by now, and the index there is that file's."""


class IndexUnmade(IndexFailed):
    """Nothing was ever put into it: its maker was ended before."""


class IndexUntrusted(IndexFailed):
    """A link or another user's file is in its place, or others can change it: it is not opened."""


class IndexReadOnly(StreamFileError):
    """An index opened for reading is not there, or cannot be used as it is."""
