"""One pass over a file that may break the format: every check, and where the stream ends.

If header and data disagree, the end must include no entry that was not committed, and should lose
none that was. Entries alone prove nothing: those that were rolled back are whole too. So a record
has to name the end: the header, if one of its totals matches the entries; the header that the
commit record's sum proves; a synced header or the mark. If entries are damaged before that end,
there are two answers (`kept_end.py`): with the damaged pages in their place the stream ends there
nevertheless; a stream without damage ends at the last whole operation that the commit record names
and that no damage precedes, or else at the last whole entry.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable

from datastreamer._codec import EntryBatch
from datastreamer.errors import DamagedEntry, NotFound, UnknownEntry
from datastreamer.format import (
    ENTRY_HEAD_SIZE,
    HEADER_OFFSET,
    HEADER_PAGE_SIZE,
    PAGE_SIZE,
    TYPE_BOOKMARK,
    page_of,
    page_start,
)
from datastreamer.printable import counted
from datastreamer.storage.bookmarks.audit import IndexAudit
from datastreamer.storage.disk.file_ops import Disk, File, OsDisk, boot_id
from datastreamer.storage.header import records
from datastreamer.storage.header import undo_journal as journal
from datastreamer.storage.header.judgement import longest_whole, undone_by
from datastreamer.storage.header.page import HeaderPage
from datastreamer.storage.header.records import CommitRecord, Head
from datastreamer.storage.maintain.kept_end import Reach, find_kept_end
from datastreamer.storage.maintain.page_problems import first_damaged, page_problems
from datastreamer.storage.maintain.report import Examination, Help, Report
from datastreamer.storage.maintain.sums_audit import SumsAudit
from datastreamer.storage.read.page_scan import Walk, doubt, entries_before, walk_file
from datastreamer.storage.read.reader import Reader, end_of

Progress = Callable[[int, int], None]
"""Called with the bytes that are done, and their total."""

_TOTAL_LENGTH_OFFSET = 38
_TOTAL_ENTRIES_OFFSET = 46


class Examiner:
    """One pass over a file."""

    def __init__(
        self,
        file: File,
        path: str,
        disk: Disk,
        page: HeaderPage,
        progress: Progress,
        most: int | None,
    ) -> None:
        self._file = file
        self._path = path
        self._disk = disk
        self._progress = progress
        self._most = most
        self.page = page
        self._size = file.size()
        self._report = Report()
        record = page.record
        live = record is not None and file.locked_elsewhere() and record.boot_id == boot_id()
        self._done = Examination(self._report, path, page, self._size, live)
        self._problem = self._done.problem
        self._odd_bookmarks = 0
        self._audit: IndexAudit | None = None
        self._whole = Head()  # the end of the entries before the first damage found
        self._reach = Reach()
        # Where a record says that the stream ends, whatever the entries are.
        self._named: Head | None = None
        # Whether entries that a writer shows do not match its commit record.
        self.unmatched = False

    def run(self) -> Examination:
        page, done = self.page, self._done
        if len(page) < HEADER_PAGE_SIZE:
            done.page = HeaderPage(page.ljust(HEADER_PAGE_SIZE, b"\0"))
            what = f"the file ends here, inside the header page of {HEADER_PAGE_SIZE} bytes"
            self._problem(self._size, what, Help.NOTHING)
        elif (page.wrong and page.wrong[0][0] == 0) and page.known_header is None:
            self._problem(0, f"{page.wrong[0][1]}: not a stream file", Help.NOTHING)
        else:
            self._examine()
        done.finish()
        return done

    def _examine(self) -> None:
        page, done = self.page, self._done
        self._check_header()
        self._check_records()
        done.claimed = self._claim()
        limit = self._limit()
        if done.claimed is not None:
            self._reach.most = done.claimed.entries
            self._audit = IndexAudit(
                *(self._file, self._path, *page.identity, done.claimed, page.floor),
                self._differs,
                live=done.live,
            )
        proven = done.claimed is not None and done.claimed == self._proven
        place = journal.path_of(self._path)
        self._sums = SumsAudit(self._disk, place, self._file, page, done.claimed, proven=proven)
        try:
            walk = self._walk(limit)
            self._judge_end(walk)
            self._check_sums(walk)
            self._check_size()
            self._check_index()
            find_kept_end(self._file, done, self._named, self._whole, self._reach)
        finally:
            if self._audit is not None:
                self._audit.close()
        self._check_update()
        self._look_around()

    # The header page.

    def _check_header(self) -> None:
        page, done = self._done.page, self._done
        known = page.known_header
        for offset, what in page.wrong:
            self._problem(offset, what, Help.HEADER)
        done.header = page.raw if known is None else known
        if page.record is not None:
            done.header = page.raw
        elif known is not None and known[:3] != page.raw[:3]:
            names = ("version", "system id", "stream type")
            stored = ", ".join(f"{n} {v}" for n, v in zip(names, page.raw[:3], strict=True))
            last = ", ".join(f"{n} {v}" for n, v in zip(names, known[:3], strict=True))
            what = f"the header says {stored}; the last one known to be on disk says {last}"
            self._problem(HEADER_OFFSET, what, Help.HEADER)

    def _check_records(self) -> None:
        page = self._done.page
        for name, offset in page.broken:
            record = name if name.endswith("record") else f"record of the {name}"
            what = f"the {record} is damaged: its sum does not fit it"
            self._problem(offset, what, Help.RECORDS)
        if page.record is not None and page.record.after != page.raw[3:]:
            what = "the commit record is about another header, though its sum fits"
            self._problem(HEADER_OFFSET, what, Help.RECORDS)
        whole = all(name != "source" for name, _ in page.broken)
        if whole and records.get_source(page, page.identity[0]) is None:
            what = "the record of the stream's source is about another stream"
            self._problem(records.SOURCE_OFFSETS[0], what, Help.RECORDS)

    # Where the stream ends.

    def _claim(self) -> Head | None:
        """The end that the header names (beside a writer: the visible end), if it is possible."""
        if self._done.live:
            seen, record = self.page.visible, self.page.record
            if seen is not None and record is not None:
                return self._held_still(self._shown_by_writer(seen[0], record))
        _, _, _, length, entries = self._done.page.raw
        proven = self._proven
        if not HEADER_PAGE_SIZE <= length < 1 << 63:
            what = f"the header's total length {length} is not possible"
            self._problem(_TOTAL_LENGTH_OFFSET, what, Help.TOTALS)
            return proven
        room = length - HEADER_PAGE_SIZE
        if entries > room // ENTRY_HEAD_SIZE or (entries == 0 and room):
            what = f"the header counts {counted(entries)} in {room} bytes"
            self._problem(_TOTAL_ENTRIES_OFFSET, what, Help.TOTALS)
            return proven
        if proven is not None and self._is_disproved(Head(length, entries), proven):
            what = (
                f"the header says that the stream ends with {counted(entries)} at byte {length}, "
                f"and it does not; the commit record proves that it ended with {proven.entries} "
                f"entries at byte {proven.length}"
            )
            self._problem(_TOTAL_LENGTH_OFFSET, what, Help.TOTALS)
            return proven
        if length > self._size:
            what = f"the file ends here, but its data ends at byte {length}"
            self._problem(self._size, what, Help.CUT)
        return Head(length, entries)

    @property
    def _proven(self) -> Head | None:
        """The end in the header that the commit record was made with, if another one is stored."""
        header = self.page.proven
        return None if header is None else Head(*header[3:])

    def _is_disproved(self, claimed: Head, proven: Head) -> bool:
        """Whether the stored header, which the commit record does not fit, is damaged: no entry
        ends there, and no other program has appended entries that are damaged now."""
        if claimed.length <= self._size and not doubt(self._file, claimed):
            return False
        if claimed.length <= proven.length or claimed.entries <= proven.entries:
            return True
        whole = walk_file(self._file, self._size, to_first_damage=True).whole
        return whole.entries <= proven.entries

    def _shown_by_writer(self, seen: Head, record: CommitRecord) -> Head:
        """Without the entries that the stream's writer may be about to truncate."""
        reached = longest_whole(self._file, record)
        if reached < seen:
            self.unmatched = True
            self._report.notes.append(
                f"entries {reached.entries} to {seen.entries - 1} are not what was committed; "
                "their writer has yet to compare them with the commit record, or lost them in a "
                "failed sync: they were not checked"
            )
        return min(seen, reached)

    def _held_still(self, head: Head) -> Head:
        """The part of the stream that was not truncated during earlier passes."""
        if self._most is None or head.entries <= self._most:
            return head
        reader = Reader(self._file, self._path, head)
        length = 0
        # Damage may prevent one of these, and not the other.
        with contextlib.suppress(DamagedEntry, NotFound):
            length = reader.cursor(self._most).offset
        with contextlib.suppress(DamagedEntry, NotFound):
            length = end_of(reader, self._most)
        if not length:
            return head
        self._report.notes.append(
            f"entries from {self._most} on were truncated while they were checked; the "
            f"{self._most} before them were checked"
        )
        return Head(length, self._most)

    def _limit(self) -> int:
        """The offset at which to stop looking for entries."""
        done = self._done
        if done.claimed is not None:
            return min(done.claimed.length, self._size)
        done.end = self._named_end()
        return HEADER_PAGE_SIZE if done.end is None else min(done.end.length, self._size)

    def _walk(self, limit: int) -> Walk:
        total = limit - HEADER_PAGE_SIZE

        def report(offset: int) -> None:
            self._progress(offset - HEADER_PAGE_SIZE, total)

        def inspect(page: int, content: bytes) -> None:
            self._reach.page = page
            self._sums.inspect(page, content)

        walk = walk_file(self._file, limit, visit=self._visit, inspect=inspect, progress=report)
        self._report.pages = walk.pages
        self._done.unread = walk.unread
        self._whole = max(self._whole, walk.whole)
        self._done.reach = self._whole.length
        return walk

    def _visit(self, batch: EntryBatch, whole: bool) -> None:
        self._report.entries += len(batch)
        self._reach.see(batch)
        marks = batch.count(TYPE_BOOKMARK)
        if marks:
            usual = len(batch.bookmarks())
            self._report.bookmarks += usual
            self._odd_bookmarks += marks - usual
        if self._audit is not None and whole:
            self._audit.feed(self._reach.page, batch)

    def _differs(self, page: int) -> bool:
        """Whether this page, the one that was compared last, does not match its checksum."""
        return any(each.page == page for each in self._sums.damaged[-1:])

    def _judge_end(self, walk: Walk) -> None:
        """Find where the stream ends; report a problem if the header differs."""
        done, record = self._done, self._done.page.known_record
        claimed = done.claimed
        if claimed is not None and claimed == self._proven:
            # What follows is kept when the header is written.
            full = walk_file(self._file, self._size, to_first_damage=True).whole
            done.reach = max(done.reach, full.length)
        if claimed is not None and walk.ends_at(claimed):
            done.end = claimed
            self._check_unsynced(claimed)
            self._named = done.end
            return
        if claimed is not None and not walk.damages:
            self._problem(
                _TOTAL_LENGTH_OFFSET,
                f"the header says that the stream ends with {counted(claimed.entries)} at byte "
                f"{claimed.length}; up to there are {counted(walk.whole.entries)}, which end at "
                f"byte {walk.whole.length}",
                Help.CUT if self._done.page.record is not None else Help.TOTALS,
            )
        if done.unread:
            return
        if done.page.record is not None:
            done.end = done.page.record.after
        elif claimed is not None:
            done.end = self._named_end()
        self._named = done.end
        if done.end is None:
            return
        if record is not None and done.end == record.after:
            done.end = self._last_operation(record)
        elif done.end.length > self._whole.length:
            done.end = self._whole

    def _last_operation(self, record: CommitRecord) -> Head:
        """The last end of an operation that the record names and whole entries reach; if they do
        not reach its base, the last end of an entry."""
        base, whole = record.base, self._whole
        if base.entries <= whole.entries and not doubt(self._file, base):
            self._done.truncated_by_open = record.base != record.after and not self._done.live
            return longest_whole(self._file, record)
        if whole.entries < record.after.entries:
            return whole
        # All are there, and the last one ends elsewhere: its length is wrong.
        last = record.after.entries - 1
        return Head(Reader(self._file, self._path, whole).cursor(last).offset, last)

    def _check_unsynced(self, claimed: Head) -> None:
        """The entries that the record does not know to be on disk, by their hashes."""
        done, record = self._done, self._done.page.known_record
        if done.live or record is None or record.after != claimed or record.base == claimed:
            return
        reached = longest_whole(self._file, record)
        if reached == claimed:
            self._report.notes.append(
                f"entries {record.base.entries} to {claimed.entries - 1} were not yet known to be "
                "on disk; they are whole"
            )
            return
        done.end, done.truncated_by_open = reached, True
        self._problem(
            reached.length,
            f"entries {reached.entries} to {claimed.entries - 1} are not what was committed: the "
            "commit record has another hash of them",
            Help.CUT,
        )

    def _named_end(self) -> Head | None:
        """The best end that a record names, for a header that cannot be believed."""
        page, file = self._done.page, self._file
        if self._done.claimed is not None and self._done.claimed == self._proven:
            return self._done.claimed
        full = walk_file(file, self._size, to_first_damage=True).whole
        self._whole = full
        self._done.reach = max(self._done.reach, full.length)
        named = [
            head
            for head in page.known_ends
            if head.length <= full.length and entries_before(file, head.length) == head.entries
        ]
        length, entries = page.raw[3:]
        for head in named:
            if head.length == length or head.entries == entries:
                return head
        if HEADER_PAGE_SIZE < length <= full.length:
            count = entries_before(file, length)
            if count is not None:
                return Head(length, count)
        if 0 < entries <= full.entries:
            return self._end_of(entries, full)
        possible = ENTRY_HEAD_SIZE * entries <= length - HEADER_PAGE_SIZE < 1 << 63
        if possible and entries > 0:
            # Both totals of the header are beyond the entries: these are damaged.
            return Head(length, entries)
        if named:
            return named[0]
        # Damage before these ends keeps them from being compared with all entries up to there.
        if page.known_record is not None:
            return page.known_record.after
        return next((head for head in page.known_ends if not doubt(file, head)), None)

    def _end_of(self, entries: int, full: Head) -> Head | None:
        if entries == full.entries:
            return full
        try:
            return Head(Reader(self._file, self._path, full).cursor(entries).offset, entries)
        except (DamagedEntry, UnknownEntry):
            return None

    # Other checks.

    def _check_size(self) -> None:
        if (self._size - HEADER_PAGE_SIZE) % PAGE_SIZE:
            what = (
                f"the file's size is {self._size} bytes, not {HEADER_PAGE_SIZE} + k x {PAGE_SIZE}"
            )
            self._problem(self._size, what, Help.SIZE)

    def _check_index(self) -> None:
        done, audit = self._done, self._audit
        if audit is None:
            return
        if done.end != done.claimed:
            self._report.notes.append("the bookmark index was not compared: entries are damaged")
            return
        audit.finish()
        self._report.notes += audit.notes
        for what in audit.problems:
            self._problem(audit.folder, what, Help.REINDEX)
        done.left_out += audit.more

    def _check_sums(self, walk: Walk) -> None:
        """Report damaged entries, and pages that differ from their checksums."""
        done, sums, named = self._done, self._sums, self._named
        short = named is not None and named.length > self._size
        known_to = done.end
        if walk.damages and not (short or done.live or done.truncated_by_open):
            known_to = named
        sums.finish(known_to)
        total = None if done.claimed is None else done.claimed.entries
        problems = page_problems(walk.damages, sums.damaged, total)
        for problem in problems:
            self._problem(*problem[:3])
        first = first_damaged(problems, sums.damaged, done.end, named, self._size)
        done.first_damaged = first
        done.proven_before = first is not None and sums.proves(first - 1)
        if sums.refuted is not None:
            self.unmatched = True
            self._problem(page_start(sums.refuted.first), sums.refuted.refuted(), Help.CHAIN)
        if done.page.lost_record:
            sums.notes.append(
                "the last page was checked only by its form: its checksum is in the commit record, "
                "which is damaged; `repair --from` compares it with a server's"
            )
        self._report.notes += sums.notes

    def _look_around(self) -> None:
        """Note what is unusual and no fault."""
        done, notes = self._done, self._report.notes
        page, end = done.page, done.end
        if page.proven is not None and self._report.ok:
            note = (
                "a program that keeps no commit record wrote the header last; it fits the entries"
            )
            if self._proven is not None and end is not None and end < self._proven:
                note += (
                    f"; before, the stream had {counted(self._proven.entries)}: if no program "
                    f"truncated it to {end.entries}, the header is damaged"
                )
            notes.append(note)
        if self._odd_bookmarks:
            notes.append(
                f"{self._odd_bookmarks} entries have the bookmarks' type, but their data is not 1 "
                "to 16 bytes; they are in no index"
            )
        if end is None or done.live:
            return
        if self._size == end.length and self._size > HEADER_PAGE_SIZE:
            notes.append("no byte is left after the last entry; the next writer adds a page")
        if done.claimed != end:
            return  # damage ended the stream there: what follows may be the rest of it
        if any(self._file.read(page_start(page_of(end.length) + 1) - end.length, end.length)):
            notes.append(
                f"bytes after the end, from byte {end.length} on, are not part of the stream"
            )

    def _check_update(self) -> None:
        """Check for an update in place that a crash interrupted."""
        place = journal.path_of(self._path)
        name = place + journal.SUFFIX
        if self._done.live:
            return
        exists, number = os.path.lexists(name), self.page.updating
        undo = journal.find(OsDisk(), place, self._file.access())
        fits = undo is not None and undone_by(undo, self._file, self.page) is not None
        self._done.bad_journal = exists and not fits and (undo is None or number is not None)
        if number is not None and not fits:
            self._done.unproven = number
            what = (
                f"a crash interrupted its update, and {name} is missing or damaged: the entry may "
                "have old and new bytes"
            )
            self._problem(f"entry {number}", what, Help.UNPROVEN)
        elif self._done.bad_journal:
            what = (
                "the journal of an update is damaged, a link or another user's; no update is known "
                "to be under way"
            )
            self._problem(name, what, Help.JOURNAL)
        elif exists:
            self._report.notes.append(
                f"an update was under way: its journal is {name}; the next open for writing undoes "
                "or completes it"
            )
        if undo is not None and self._done.unproven is None and undo.is_half_done(self._file):
            self._done.half_updated = True
            what = f"{len(undo.old)} bytes are half of an update that a crash interrupted"
            self._problem(undo.offset, what, Help.UNDO)
