"""The check of `dsapp client --sanitycheck`: sequences of entries and of bookmarks."""

from __future__ import annotations

import logging

from datastreamer._codec import EntryBatch
from datastreamer.zkevm.bookmark_keys import Kind, name_of_key

_log = logging.getLogger(__name__)


class Sanity:
    """Checks that entries, blocks and batches are numbered without gaps.

    Errors are logged and counted in `errors`; ``str()`` is the summary.
    """

    def __init__(self, version: int) -> None:
        self.errors = 0
        self._version = version
        self._entries: tuple[int, int] | None = None
        self._marks: dict[Kind, tuple[int, int]] = {}

    def check(self, batch: EntryBatch) -> None:
        """Check the next entries."""
        if self._entries is None:
            self._entries = batch.first_number, batch.first_number
        first, due = self._entries
        if batch.first_number != due:
            self._report("entry", batch.first_number, batch.first_number, due)
        self._entries = first, batch.next_number
        for key, number in batch.bookmarks():
            mark = name_of_key(self._version, key)
            if mark is None:
                continue
            first, due = self._marks.get(mark.kind, (mark.number, mark.number))
            if mark.number != due:
                self._report(mark.kind, number, mark.number, due)
            self._marks[mark.kind] = first, mark.number + 1

    def _report(self, what: str, entry: int, found: int, due: int) -> None:
        self.errors += 1
        _log.warning("at entry %d: found %s %d, expected %d", entry, what, found, due)

    def __str__(self) -> str:
        seen = {"entries": self._entries, "blocks": self._marks.get("block")}
        seen["batches"] = self._marks.get("batch")
        parts = [
            f"{what} {span[0]} to {span[1] - 1}" if span else f"no {what}"
            for what, span in seen.items()
        ]
        return f"{', '.join(parts)}: {f'{self.errors} errors' if self.errors else 'in order'}"
