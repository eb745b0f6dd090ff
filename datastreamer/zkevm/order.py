"""What the orders of both generations have in common: bookmarks, and numbers that go on.

Owns what a bookmark promises and what the next batch and block are held to.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, NamedTuple

from datastreamer.zkevm.events import BookMark, BookmarkType

NAMES: Final[dict[int, str]] = {BookmarkType.BATCH: "batch", BookmarkType.L2_BLOCK: "block"}

Complain = Callable[[int, str, str], None]


class Seen(NamedTuple):
    """What the next block is held to."""

    number: int
    timestamp: int
    hash: bytes


class Order:
    """Looks at events one by one; `complain` is told entry, rule and what is wrong.

    `batches` and `blocks` are the first and last number there was.
    """

    # Whether a batch's bookmark may stand before a block's without an event between them.
    marks_gather = False

    def __init__(self, complain: Complain) -> None:
        self._complain = complain
        self.batches: tuple[int, int] | None = None
        self.blocks: tuple[int, int] | None = None
        self._seen: Seen | None = None
        # Bookmarks that no event has followed yet, by what they mark: value and entry.
        self._marks: dict[int, tuple[int, int]] = {}
        self.on: dict[type, Callable[[int, Any], None]] = {BookMark: self._book_mark}

    def notes(self) -> list[str]:
        """What stands open, and what there is to say without its being a breach."""
        return [
            f"the stream ends before the event of the bookmark in entry {entry}"
            for _, entry in self._marks.values()
        ]

    @property
    def parents(self) -> int:
        """Of so many blocks the parent was checked."""
        return 0

    def _book_mark(self, entry: int, event: BookMark) -> None:
        if event.type not in (BookmarkType.BATCH, BookmarkType.L2_BLOCK):
            self._complain(entry, "bookmark", f"a bookmark of type {event.type!s} marks nothing")
            return
        for kind in [event.type] if self.marks_gather else list(self._marks):
            self._drop(kind)
        self._marks[event.type] = event.value, entry

    def _drop_marks(self) -> None:
        for kind in list(self._marks):
            self._drop(kind)

    def _drop(self, kind: int) -> None:
        """No event of the bookmark that is pending for this kind, if one is, comes any more."""
        if kind in self._marks:
            value, entry = self._marks.pop(kind)
            self._complain(entry, "bookmark", f"{NAMES[kind]} {value} does not follow it")

    def _marked(self, entry: int, kind: BookmarkType, number: int, *, due: bool = True) -> None:
        """An event begins that a bookmark of `kind` stands before."""
        value, at = self._marks.pop(kind, (None, 0))
        name = NAMES[kind]
        if value is None:
            if due:
                self._complain(entry, "bookmark", f"{name} {number} has no bookmark before it")
        elif value != number:
            self._complain(at, "bookmark", f"it names {name} {value}, and {name} {number} follows")

    def _next_batch(self, entry: int, number: int) -> None:
        if self.batches is None:
            self.batches = number, number
            return
        first, last = self.batches
        if number != last + 1:
            self._complain(entry, "batch", f"batch {number} begins, where {last + 1} is due")
        self.batches = first, number

    def _next_block(
        self, entry: int, number: int, timestamp: int, delta: int | None
    ) -> Seen | None:
        """Hold a block to the one before it; gives that where this is the next."""
        before = self._seen
        if before is None:
            self.blocks = number, number
            return None
        assert self.blocks is not None
        self.blocks = self.blocks[0], number
        if timestamp < before.timestamp:
            self._complain(
                entry,
                "timestamp",
                f"block {number} is of {timestamp}, and block {before.number} before it of "
                f"{before.timestamp}",
            )
        if number != before.number + 1:
            self._complain(
                entry, "block", f"block {number} begins, where {before.number + 1} is due"
            )
            return None
        if delta is not None and timestamp >= before.timestamp:
            passed = timestamp - before.timestamp
            if delta != passed:
                self._complain(
                    entry,
                    "timestamp",
                    f"block {number} says that {delta} s have passed since the block before it; "
                    f"the timestamps say {passed}",
                )
        return before


def as_hex(data: bytes) -> str:
    """For messages."""
    return f"0x{data.hex()}"
