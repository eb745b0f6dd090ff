"""The rules of order that all versions share: bookmarks, and consecutive numbers.

Owns what must follow a bookmark, and what the next batch and block must be.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, NamedTuple

from datastreamer.zkevm.events import BookMark, BookmarkType

NAMES: Final[dict[int, str]] = {BookmarkType.BATCH: "batch", BookmarkType.L2_BLOCK: "block"}

ReportBreach = Callable[[int, str, str], None]


class PreviousBlock(NamedTuple):
    """What the next block is compared with."""

    number: int
    timestamp: int
    hash: bytes


class Order:
    """Checks events one by one; calls `report(entry, rule, what)` for each breach.

    `batches` and `blocks` are the first and the last number.
    """

    # Whether bookmarks of a batch and a block may precede the same event.
    allows_two_bookmarks = False

    def __init__(self, report: ReportBreach) -> None:
        self._report = report
        self.batches: tuple[int, int] | None = None
        self.blocks: tuple[int, int] | None = None
        self._previous: PreviousBlock | None = None
        # Bookmarks that their event has not followed yet, by type: value and entry.
        self._bookmarks: dict[int, tuple[int, int]] = {}
        self.on: dict[type, Callable[[int, Any], None]] = {BookMark: self._book_mark}

    def notes(self) -> list[str]:
        """What is incomplete at the end, and other remarks that are no breaches."""
        return [
            f"the stream ends before the event of the bookmark in entry {entry}"
            for _, entry in self._bookmarks.values()
        ]

    @property
    def parents(self) -> int:
        """The number of blocks whose parent was checked."""
        return 0

    def _book_mark(self, entry: int, event: BookMark) -> None:
        if event.type not in (BookmarkType.BATCH, BookmarkType.L2_BLOCK):
            self._report(entry, "bookmark", f"a bookmark of unknown type {event.type!s}")
            return
        for kind in [event.type] if self.allows_two_bookmarks else list(self._bookmarks):
            self._drop_bookmark(kind)
        self._bookmarks[event.type] = event.value, entry

    def _drop_bookmarks(self) -> None:
        for kind in list(self._bookmarks):
            self._drop_bookmark(kind)

    def _drop_bookmark(self, kind: int) -> None:
        """Report the pending bookmark of this type, if any: its event does not follow."""
        if kind in self._bookmarks:
            value, entry = self._bookmarks.pop(kind)
            self._report(entry, "bookmark", f"{NAMES[kind]} {value} does not follow it")

    def _match_bookmark(
        self, entry: int, kind: BookmarkType, number: int, *, required: bool = True
    ) -> None:
        """Compare an event with the bookmark that must precede it."""
        value, at = self._bookmarks.pop(kind, (None, 0))
        name = NAMES[kind]
        if value is None:
            if required:
                self._report(entry, "bookmark", f"no bookmark precedes {name} {number}")
        elif value != number:
            self._report(at, "bookmark", f"it names {name} {value}, but {name} {number} follows")

    def _next_batch(self, entry: int, number: int) -> None:
        if self.batches is None:
            self.batches = number, number
            return
        first, last = self.batches
        if number != last + 1:
            self._report(entry, "batch", f"batch {number} begins, but {last + 1} is expected")
        self.batches = first, number

    def _next_block(
        self, entry: int, number: int, timestamp: int, delta: int | None
    ) -> PreviousBlock | None:
        """Compare a block with the previous one; returns that if this is its successor."""
        before = self._previous
        if before is None:
            self.blocks = number, number
            return None
        assert self.blocks is not None
        self.blocks = self.blocks[0], number
        if timestamp < before.timestamp:
            self._report(
                entry,
                "timestamp",
                f"block {number} has the time {timestamp}, but block {before.number} before it has "
                f"{before.timestamp}",
            )
        if number != before.number + 1:
            self._report(
                entry, "block", f"block {number} begins, but {before.number + 1} is expected"
            )
            return None
        if delta is not None and timestamp >= before.timestamp:
            passed = timestamp - before.timestamp
            # Deployed nodes write the first block's whole timestamp.
            first = number == 1 and delta == timestamp
            if delta != passed and not first:
                self._report(
                    entry,
                    "timestamp",
                    f"block {number} reports {delta} s since the block before it, but the "
                    f"timestamps differ by {passed}",
                )
        return before


def as_hex(data: bytes) -> str:
    """Bytes as messages show them."""
    return f"0x{data.hex()}"
