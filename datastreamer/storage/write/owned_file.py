"""A stream file whose writer's lock this process holds.

Owns the end of the file, the bytes of the header page and how they are written, whether anything
may be written, what is known of damaged pages, and the descriptors that a commit wakes. Knows no
order of steps and no syncs: `sync_policy.py`, `uncommitted.py`, `changes.py` and `writer.py` do.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterable, Iterator

from datastreamer.errors import CommitInDoubt, DamagedPage, FileReplaced, StreamClosed
from datastreamer.format import PAGE_SIZE, page_start
from datastreamer.storage.disk.bad_sectors import read_around
from datastreamer.storage.disk.file_ops import Disk, File, boot_id
from datastreamer.storage.disk.identity import LOOK_SECONDS, OpenPath
from datastreamer.storage.header import records
from datastreamer.storage.header import undo_journal as journal
from datastreamer.storage.header.judgement import Judgement
from datastreamer.storage.header.records import Head, SyncedHeader
from datastreamer.storage.pages._page_sums import PageSums
from datastreamer.storage.pages.compare import RecordSource
from datastreamer.storage.pages.hashes import EndSum, hash_page
from datastreamer.storage.pages.keeper import SumsKeeper
from datastreamer.storage.pages.page_states import Verify
from datastreamer.storage.read.file import StreamFile
from datastreamer.storage.read.range_sums import page_with
from datastreamer.storage.summaries.keeper import SummaryKeeper
from datastreamer.storage.write._lane import CommitLane

_UNTIL_IT_WORKS = "nothing more is written until the disk accepts writes again"


class OwnedFile(StreamFile):
    """`head` is the end of what readers see, `written` is where the next operation begins."""

    writable = True

    def __init__(
        self,
        file: File,
        path: str,
        page: bytes,
        judged: Judgement,
        disk: Disk,
        sums: PageSums,
    ) -> None:
        """`sums` are the hashes of the entries up to the end."""
        super().__init__(file, path, page, judged)
        self.disk = disk
        self.opened_by: OpenPath = OpenPath(disk, path, file)
        # The journal of an update is beside this path.
        self.journal_path = journal.path_of(path)
        self.boot = boot_id()
        self.end = CommitLane(file, self.page, judged.head, sums)
        place = disk, self.journal_path, file, self.stream_id
        self.sums = SumsKeeper(*place)
        self.summaries = SummaryKeeper(*place, self.sums, self.end)
        self.summaries.before_read = self._before_read
        # A thread that syncs acquires this before `lock`: of two simultaneous syncs, the system
        # reports a failure to one only.
        self.syncing = threading.RLock()
        # Descriptors that a commit writes to: of other processes, which read the mark in the
        # header page, and of threads of this process, which read `head`.
        self.wakers: list[int] = []
        self.inside_wakers: list[int] = []
        # Eventfds of other processes: a commit after a pause writes to them when it begins.
        self.early_wakers: list[int] = []
        self.end.belong_to(self)
        # Whether the system has received a header beyond `written`, which another open may find.
        self.header_ahead = False
        # Whether readers may see what is not on disk; the file says so, durably.
        self.may_lose = False
        # Bytes of truncated entries end at this offset.
        self._truncated_to = 0
        # Set by a close that finds another file at the path.
        self._closed_elsewhere: FileReplaced | None = None

    # State.

    @property
    def written(self) -> Head:
        return self.end.written

    @contextlib.contextmanager
    def exclusive(self) -> Iterator[None]:
        """Keep other threads from committing, syncing and changing entries."""
        with self.syncing, self.lock:
            yield

    def refresh(self) -> bool:
        return False  # no other process writes

    def verify_reads(self, verify: Verify) -> None:
        super().verify_reads(verify)
        self.end.belong_to(self)  # with the new reader

    def settle_summaries(self) -> None:
        with self.lock:
            if not self.closed:
                self.summaries.flush()

    @property
    def recorded_epoch(self) -> int | None:
        return self.epoch

    def records(self) -> RecordSource:
        return self.sums

    def _before_read(self, pages: Iterable[int]) -> None:
        """What comes from the disk by this read is compared again before a server sends it."""
        known = self._pages
        if known is not None:
            known.suspect(
                [each for each in pages if not known.resident(page_start(each), PAGE_SIZE)]
            )

    # Whether it may be written.

    def ensure_writable(self) -> None:
        """Raises `StreamClosed`, `CommitInDoubt`."""
        if self.closed:
            raise StreamClosed(f"{self.path}: the stream is closed")
        if self.failed:
            raise self.in_doubt()

    @property
    def failed(self) -> bool:
        """Whether a header or sync failed, or was interrupted: nothing more is written."""
        return self.end.state in ("in doubt", "interrupted")

    def in_doubt(self, remedy: str = _UNTIL_IT_WORKS) -> CommitInDoubt:
        """The error while the file has `failed`: which entries may not be on disk, or may be."""
        failure = self.end.failure or ""
        if self.end.state != "in doubt":
            return CommitInDoubt(self.path, failure)
        parts = [failure]
        base, written = self.end.base.entries, self.written.entries
        if written > base:
            parts.append(f"entries {base} to {written - 1} may not be on disk")
        if self.header_ahead:
            parts.append(f"whether the operation from entry {written} on is on disk is not known")
        return CommitInDoubt(self.path, "; ".join([*parts, remedy]))

    def ensure_in_place(self, *, always: bool = False) -> None:
        """Raises `FileReplaced` if the path does not lead to the open file any more, or did not
        at the close. Checks the path if the last check is nearly a second old or failed, or
        `always`."""
        if self._closed_elsewhere is not None:
            raise self._closed_elsewhere
        began = self.end.coarse_time()
        if began < self.end.path_check_at and not always:
            return
        why = self.opened_by.difference()
        self.end.path_check_at = 0 if why else began + int(LOOK_SECONDS * 1e9)
        if why:
            raise FileReplaced(
                self.path,
                f"{why}; nothing more is committed until this path leads to the open file again; "
                f"to save what is committed, {self.opened_by.way_to_save} before this process ends",
            )

    def replaced_at_close(self) -> FileReplaced | None:
        """The error if the path does not lead to the file that is about to be closed."""
        why = self.opened_by.difference()
        if why:
            entries = self.written.entries
            self._closed_elsewhere = FileReplaced(
                self.path,
                f"{why}; the stream is closed, and its {entries} entries are not at this path as "
                "far as that can be checked",
            )
        return self._closed_elsewhere

    def close(self) -> None:
        self.end.close()
        self.sums.close()
        self.summaries.close()
        super().close()

    # The header page.

    def continue_chain(self) -> bool:
        """If the hashes of more pages are proven than the chain at the end covers, continue the one
        that covers them. Requires the lock, and that all entries are on disk."""
        sums = self.end.sums
        chain, chained_from = self.sums.chain_before(sums.page)
        if chained_from > sums.chained_from or chain == sums.chain:
            return False
        sums.rechain(chain, chained_from)
        self.end.all_on_disk(self.end.written)
        return True

    def write_span(self, span: tuple[int, int]) -> None:
        """Write a part of the header page to its place in the file."""
        start, end = span
        self.file.write(memoryview(self.page)[start:end], start)

    def write_header(self) -> None:
        """Write header and commit record: what a sync has to follow."""
        self.write_span(records.BEFORE_SYNC)

    def write_committed(self) -> None:
        """Write all records that a commit changes, the visible mark included."""
        self.write_span(records.WITHOUT_SYNC)

    def write_clean(self) -> None:
        """Write a record with an empty range: a power cut can take nothing."""
        head = self.written
        self.end.all_on_disk(head)
        self.put_header(head, self.end.base_sum)
        self.put_synced(head)
        self.write_committed()

    def put_header(self, head: Head, end_sum: EndSum, before: EndSum | None = None) -> None:
        """Put a header, and a commit record with an empty range, that end at `head` into the
        page. `before` is as for `records.put_settled`."""
        header = self.header_at(head)
        state = self.stream_id, self.epoch, self.boot
        records.put_settled(self.page, header, end_sum, *state, before=before)

    def put_synced(self, head: Head) -> None:
        """Put a synced header and a visible mark that end at `head` into the page."""
        self.put_synced_header(head)
        records.put_mark(self.page, self.epoch, head)

    def put_synced_header(self, head: Head) -> None:
        self.end.sequence += 1
        sequence = self.end.sequence
        records.put_synced(
            self.page,
            sequence & 1,
            SyncedHeader(sequence, self.stream_id, self.epoch, self.header_at(head)),
        )

    def write_writer(self, *, open: bool, may_lose: bool) -> None:
        writer = records.Writer(os.getpid(), self.boot, open, may_lose)
        self.write_span(records.put_writer(self.page, writer))

    def clear_doubt(self) -> None:
        self._clear(records.DOUBT_OFFSET)

    def clear_changes(self) -> None:
        """For a new epoch whose reason the changes in the page do not name."""
        self._clear(records.CHANGES_OFFSET)

    def _clear(self, start: int) -> None:
        size = 512
        if any(self.page[start : start + size]):
            self.page[start : start + size] = bytes(size)
            self.file.write(bytes(size), start)

    # Truncated bytes.

    def note_truncated(self, length: int) -> None:
        """The next write after the end has to `abandon_truncated`, up to offset `length`."""
        self._truncated_to = max(self._truncated_to, length)
        self.end.revoke()

    def abandon_truncated(self) -> None:
        """Detach the memory of truncated entries from the file: a connection to which the kernel
        sends them must not send new entries in their place. Requires the lock."""
        if self._truncated_to:
            if self._truncated_to > self.written.length:
                self.file.abandon(self.written.length, self._truncated_to)
            self._truncated_to = 0

    # Damaged pages. What the disk cannot read is read as zeros.

    def damage_of(self, page: int, advice: str = "") -> DamagedPage | None:
        """How a page differs from its checksum, with `advice`; None if it does not, has none, or is
        evicted: what brings it back compares it."""
        with self.lock:
            if page < self.pages.floor:
                return None
            if page == self.end.sums.page:
                self.pages.judge_end(self.written, self.end.sums.sum())
            found = self.pages.damage(page, still=True)
            if found is None:
                return None
            first = self.end_before(page).entries
        return DamagedPage(self.path, found.offset, found.why + advice, page, first, found.end)

    def end_before(self, page: int) -> Head:
        """The end of the pages before a page; of fewer if the number of the entry after them is not
        known."""
        file = read_around(self.file, self.path)
        while page > 0:
            before, start = page - 1, page_start(page - 1)
            known = self.sums.get(before) or hash_page(file.read(PAGE_SIZE, start), before)
            if known is not None:
                return Head(page_start(page), known.next_number)
            page = before
        return Head()

    def page_of_entry(self, number: int) -> int:
        """The page of a committed entry, by checksums if all that are needed are known. Raises
        `DamagedEntry`."""
        return page_with(self, self.sums, number, self.end.sums.page)

    # Wakers.

    def wake_all(self) -> None:
        _wake([*self.wakers, *self.inside_wakers])

    def wake_inside(self) -> None:
        _wake(self.inside_wakers)

    def add_waker(self, fd: int, *, inside: bool) -> None:
        with self.lock:
            (self.inside_wakers if inside else self.wakers).append(fd)

    def add_early_waker(self, fd: int) -> None:
        with self.lock:
            self.early_wakers.append(fd)

    def remove_waker(self, fd: int) -> None:
        with self.lock:
            for wakers in (self.wakers, self.inside_wakers, self.early_wakers):
                with contextlib.suppress(ValueError):
                    wakers.remove(fd)


def refusal(error: OSError) -> str:
    """What went wrong, for a message."""
    return f"the system refused to write: {error.strerror or error}"


def _wake(wakers: list[int]) -> None:
    for waker in wakers:
        with contextlib.suppress(BlockingIOError):
            os.write(waker, b"\0\0\0\0\0\0\0\1")
