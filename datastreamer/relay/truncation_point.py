"""Where to truncate a relay's file so that it ends at an operation boundary.

Owns the choice between known ends of commits and bookmarks. Only reads the file.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from datastreamer.position import KEPT
from datastreamer.storage.stream import DataStream

MAX_EXTRA_BYTES: Final = 64 << 20
"""Maximum number of extra bytes to truncate so that the file ends at an operation boundary."""


def truncation_point(stream: DataStream, common: int, commits: Sequence[int]) -> int:
    """The number of entries to keep if only the first `common` are the same.

    `commits` are the known ends of commits up to `common`, in order: the result is the last one,
    or, if none is known, the last bookmark, with which an operation usually begins. If neither is
    within `MAX_EXTRA_BYTES`, it is `common`.
    """
    if commits and _is_near(stream, commits[-1], common):
        return commits[-1]
    # The first entry that differs may be a bookmark itself.
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
    return reader.cursor(common).offset - reader.cursor(number).offset <= MAX_EXTRA_BYTES
