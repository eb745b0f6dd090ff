"""A bookmark index in memory, rebuilt from the file on each open."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice

from datastreamer.storage.bookmarks._pairs import Pairs
from datastreamer.storage.bookmarks.interface import BookmarkIndex, Pace, Watermark, at_once
from datastreamer.storage.disk.access import Access


class MemoryIndex(BookmarkIndex):
    """A dict from key to the ascending list of its entry numbers."""

    def __init__(self) -> None:
        self._numbers: dict[bytes, list[int]] = {}
        self._watermark: Watermark | None = None

    @property
    def on_disk(self) -> bool:
        return False

    def watermark(self) -> Watermark | None:
        return self._watermark

    def newest(self, key: bytes) -> int | None:
        numbers = self._numbers.get(key)
        return numbers[-1] if numbers else None

    def add(
        self, bookmarks: Iterable[tuple[bytes, int]], watermark: Watermark, pace: Pace = at_once
    ) -> None:
        # `pace` is not called: it may raise, and this must not end half-way.
        for key, number in bookmarks:
            self._numbers.setdefault(key, []).append(number)
        self._watermark = watermark

    def remove(self, bookmarks: Iterable[tuple[bytes, int]], watermark: Watermark) -> None:
        for key, number in bookmarks:
            numbers = self._numbers.get(key, [])
            if number in numbers:
                numbers.remove(number)
            if not numbers:
                self._numbers.pop(key, None)
        self._watermark = watermark

    def clear(self) -> None:
        self._numbers.clear()
        self._watermark = None

    def __len__(self) -> int:
        return len(self._numbers)

    def pairs(self) -> int:
        return sum(map(len, self._numbers.values()))

    def parts(self, size: int) -> Iterator[Pairs]:
        """All bookmarks, `size` at a time, in no order."""
        found = ((key, number) for key, numbers in self._numbers.items() for number in numbers)
        while part := list(islice(found, size)):
            yield Pairs(part)

    def close(self) -> None:
        """There is nothing to release."""


def open_index(path: str, write: bool, access: Access) -> MemoryIndex:
    """A new, empty index: nothing is kept beside the file."""
    return MemoryIndex()
