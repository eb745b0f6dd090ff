"""Truncates a relay's file so that it ends at an operation boundary, past damage too.

Owns the choice between known ends of commits and bookmarks.
"""

from __future__ import annotations

from collections.abc import MutableSequence, Sequence
from typing import Final

from datastreamer.errors import DamagedEntry
from datastreamer.format import page_of
from datastreamer.position import KEPT
from datastreamer.relay.apply_changes import ensure_whole, keeping_agreement
from datastreamer.storage.pages.hashes import last_page
from datastreamer.storage.read.reader import Reader
from datastreamer.storage.stream import DataStream

MAX_EXTRA_BYTES: Final = 64 << 20
"""Maximum number of extra bytes to truncate so that the file ends at an operation boundary."""


def truncate_file(
    stream: DataStream, common: int, commits: MutableSequence[int], *, boundary: bool
) -> int:
    """Truncate the file to its first `common` entries, or to an operation boundary before them;
    returns how many are left. Of `commits`, known ends of commits in order, those after the new end
    are removed.

    With `boundary`, `common` is such a boundary. Nothing is kept of a damaged page if some of its
    entries come after `common`; if none does, it can be restored. Raises `DamagedEntry` then, and
    as `DataStream.truncate`.
    """
    total, reader, parts = stream.total_entries, stream.reader, stream.parts
    while True:
        try:
            number = common if boundary else truncation_point(reader, common, commits)
            ensure_whole(stream, number - 1, number)
            if number < total:
                with keeping_agreement(stream):
                    stream.truncate(number)
            break
        except DamagedEntry as damage:
            page = min(page_of(damage.offset), last_page(reader.head.length))
            end = parts.relay.end_before(page)
            restorable = any(
                each.end <= common for each in parts.pages.damaged_around(damage.offset)
            )
            if restorable or end == reader.head:
                raise
            reader, common, boundary = stream.new_reader(), min(common, end.entries), False
            reader.head = end
    while commits and commits[-1] > number:
        commits.pop()
    return number


def truncation_point(reader: Reader, common: int, commits: Sequence[int]) -> int:
    """The number of entries to keep if only the first `common` are the same.

    `commits` are known ends of commits, in order. The result is the last of these up to `common`;
    if there is none, the last bookmark, since an operation usually begins with one. It is `common`
    if more than `MAX_EXTRA_BYTES` would be truncated otherwise.
    """
    whole = next((end for end in reversed(commits) if end <= common), None)
    if whole is not None and _is_near(reader, whole, common):
        return whole
    # The first entry that differs may be a bookmark itself.
    end, count = min(common + 1, reader.head.entries), KEPT
    while end > 0:
        first = max(0, end - count)
        marks = [number for batch in reader.batches(first, end) for _, number in batch.bookmarks()]
        if marks:
            return marks[-1] if _is_near(reader, marks[-1], common) else common
        if not _is_near(reader, first, common):
            break
        end, count = first, 2 * count
    return common


def _is_near(reader: Reader, number: int, common: int) -> bool:
    return reader.cursor(common).offset - reader.cursor(number).offset <= MAX_EXTRA_BYTES
