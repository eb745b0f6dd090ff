"""Where a stream ends if its damaged pages remain in their place, for `check.py`.

Every data page begins with an entry that has its number, so damage in one page makes no other page
unreadable. An end is kept if a record names it, or if the last page ends exactly there; then all
numbers remain as they are. Otherwise the stream ends at the last entry that can be read.
"""

from __future__ import annotations

from datastreamer._codec import EntryBatch
from datastreamer.format import U64_MAX, page_start
from datastreamer.storage.disk.file_ops import File
from datastreamer.storage.header.judgement import longest_whole
from datastreamer.storage.header.records import Head
from datastreamer.storage.maintain.report import Examination
from datastreamer.storage.read.page_scan import doubt


class Reach:
    """The end of the readable entries with the highest numbers, which are below `most`; `page` is
    the present one."""

    def __init__(self) -> None:
        self.page = 0
        self.most = U64_MAX
        self.end = Head()

    def see(self, batch: EntryBatch) -> None:
        """The readable entries of the present page."""
        # A page of another place may be there, with other numbers.
        lowest = max(self.page, self.end.entries)
        if batch.first_number >= lowest and batch.next_number <= self.most:
            self.end = Head(page_start(self.page) + batch.end, batch.next_number)


def find_kept_end(
    file: File, found: Examination, named: Head | None, whole: Head, reach: Reach
) -> None:
    """Set `kept_end` and `heal_end` of a file that was examined; `named` is where a record says
    that the stream ends, `whole` the end of the entries before any damage."""
    claimed, record = found.claimed, found.page.record
    found.heal_end = named if record is not None or claimed is None else claimed
    if record is None and named is not None and claimed is not None and doubt(file, claimed):
        proven = found.page.known_record
        if proven is not None and proven.after == named:
            found.heal_end = named
    if not found.damaged or found.unread or found.live:
        found.kept_end = claimed if found.live and found.damaged else found.end
        return
    known = found.page.known_record
    end = None
    if record is not None:
        end = longest_whole(file, record)
    elif claimed is not None and not doubt(file, claimed):
        end = claimed
    elif named is not None and known is not None and known.after == named:
        end = longest_whole(file, known)
    elif named is not None and not doubt(file, named):
        end = named
    if end is not None and end.length <= found.size:
        found.kept_end = end
    else:
        found.kept_end = reach.end if reach.end.entries > whole.entries else found.end
