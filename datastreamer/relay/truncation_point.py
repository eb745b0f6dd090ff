"""Where to cut a file back, so that it ends with a whole operation.

Owns the choice between what is known of commits and what bookmarks tell. Reads the file alone,
and changes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from datastreamer.position import KEPT
from datastreamer.storage.stream import DataStream

MOST_BYTES: Final = 64 << 20
"""So many bytes more are taken back for the sake of a whole operation."""


def whole_before(stream: DataStream, common: int, commits: Sequence[int]) -> int:
    """To how many entries to go back where only the first `common` are the same.

    `commits` are ends of commits at or before that, as far as any are known, in order: it is the
    last. Else it is before the last bookmark, with which an operation begins as a rule. Where
    neither is within `MOST_BYTES`, it is `common`.
    """
    if commits and _is_near(stream, commits[-1], common):
        return commits[-1]
    # The first entry that is not the same may be a bookmark itself.
    end, count = min(common + 1, stream.total_entries), KEPT
    while end > 0:
        first = max(0, end - count)
        marks = [number for batch in stream.batches(first, end) for _, number in batch.bookmarks()]
        if marks:
            return marks[-1] if _is_near(stream, marks[-1], common) else common
        if not _is_near(stream, first, common):
            break
        end, count = first, 2 * count
    return common


def _is_near(stream: DataStream, number: int, common: int) -> bool:
    reader = stream.reader
    return reader.cursor(common).offset - reader.cursor(number).offset <= MOST_BYTES
