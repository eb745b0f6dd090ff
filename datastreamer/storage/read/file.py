"""An open stream file: what of it may be read, now and as it grows.

Owns the judgement of the header page. Changes nothing in the file; `StreamWriter` does. Knows
nothing of bookmarks or operations.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from datastreamer.errors import DamagedFile, DamagedHeader
from datastreamer.format import Header, page_of
from datastreamer.storage.disk.file_ops import (
    Disk,
    File,
    OsDisk,
    OsFile,
    Readable,
    boot_id,
    read_ahead,
)
from datastreamer.storage.disk.identity import OpenPath
from datastreamer.storage.header import records
from datastreamer.storage.header import undo_journal as journal
from datastreamer.storage.header.judgement import (
    Judgement,
    as_shown,
    judge,
    shown,
    undone_by,
)
from datastreamer.storage.header.page import HeaderPage
from datastreamer.storage.header.records import Change, Head, PublisherRecord
from datastreamer.storage.pages.compare import RecordSource
from datastreamer.storage.pages.hashes import EndSum, last_page
from datastreamer.storage.pages.page_states import PageRegister, VerifiedFile, Verify
from datastreamer.storage.pages.proof import known_chains
from datastreamer.storage.pages.records import SidecarRecords
from datastreamer.storage.read._at_hand import ReadsAtHand
from datastreamer.storage.read.change_watch import steady_page
from datastreamer.storage.read.open_file import ensure_whole, open_file, os_error
from datastreamer.storage.read.reader import Reader

_TORN_READS = 20
_PAUSE_SECONDS = 0.001
_KNOWN_RISES = 64
_KNOWN_CHANGES = 4096
# JSON programs read whole numbers up to twice this exactly.
_OWN_EPOCHS = 1 << 52
# The part of the header page that commits and changes write.
_SEEN_BYTES = records.WITHOUT_SYNC[1]


class _Rise(NamedTuple):
    old: int
    new: int
    changes: Sequence[Change] | None


class StreamFile:
    """One stream file, open for reading; `OwnedFile` is one open for writing.

    `header` is the committed, readable state; `reader` reads it. Once the file is open, `path`
    is for messages only.
    """

    writable = False

    def __init__(self, file: File, path: str, page: bytes | bytearray, judged: Judgement) -> None:
        self.path = path
        self.file = file
        # None if only a descriptor is known.
        self.opened_by: OpenPath | None = None
        self._header = judged.header
        self.stream_id = judged.stream_id
        # As reported; and as the file has it. The first is this reader's own if it saw entries
        # vanish without a new epoch (by another program, or by a failed sync).
        self.epoch = self._written_epoch = judged.epoch
        # Through which entries are read.
        self._data: Readable = file
        self.verify: Verify = "never"
        self._pages: PageRegister | None = None
        self.reader = self._reader_from(judged.head)
        self.page = bytearray(page)
        # The part of it that a reader beside a writer read last.
        self._seen = bytes(page[:_SEEN_BYTES])
        self._unsettled = False
        # Whether its record confirmed that part: only then `refresh` may look at it alone.
        self._by_record = False
        # The path beside which an update's journal is; None if only a descriptor is known.
        self._named: tuple[Disk, str] | None = None
        # The rises of `epoch` that this reader saw, and the changes of each.
        self._rises: deque[_Rise] = deque(maxlen=_KNOWN_RISES)
        # The newest changes that were made or seen while the file was open: the header page names
        # a few only.
        self.known_changes: deque[Change] = deque(maxlen=_KNOWN_CHANGES)
        self.closed = False
        self.lock = threading.RLock()
        self._end_sum = judged.end_sum, judged.head
        self._records: SidecarRecords | None = None

    @classmethod
    def open(
        cls,
        path: str | os.PathLike[str] | int,
        *,
        stream_type: int | None = None,
        disk: Disk | None = None,
        name: str | None = None,
    ) -> StreamFile:
        """Open an existing stream file for reading; `path` may be a descriptor.

        Raises what `errors.StreamFileError` has below it.
        """
        disk = disk or OsDisk()
        called = name or (f"descriptor {path}" if isinstance(path, int) else os.fspath(path))
        file = open_file(disk, path, called, write=False)
        read_ahead(file, False)  # `verify_reads` decides
        try:
            opened = cls.judged(file, called, stream_type)
            if not isinstance(path, int):
                opened._named = disk, journal.path_of(path)
                ensure_whole(*opened._named, file, called)
            if name is not None or not isinstance(path, int):
                opened.opened_by = OpenPath(disk, called, file)
            return opened
        except OSError as error:
            file.close()
            raise os_error(called, error, "cannot be read") from error
        except BaseException:
            file.close()
            raise

    @classmethod
    def judged(cls, file: File, path: str, stream_type: int | None) -> StreamFile:
        """The file as it may be read now. Also beside a writer the entries are compared with the
        record's hashes: a writer that just opened the file may not have done so yet."""
        boot, before = boot_id(), None
        for attempt in range(_TORN_READS):
            if attempt:
                time.sleep(_PAUSE_SECONDS)
            locked = file.locked_elsewhere()
            page = HeaderPage.of(file)
            if page == before:
                continue
            opened, refusal, before = None, None, page
            try:
                header = page.header(path, stream_type)
                judged = judge(file, page, path, header)
            except DamagedFile as error:
                refusal = error
            else:
                opened = cls(file, path, page, as_shown(page, judged, boot))
                opened._by_record = locked and _is_whole(judged) and page.visible is not None
                opened._unsettled = locked and page.changing
            if not locked or (opened is not None and opened._by_record):
                break
            # Half of a page that is being written, or entries that are being truncated. If the
            # page stays as it is, its writer has not compared the entries yet.
        if opened is None:
            assert refusal is not None
            raise refusal
        return opened

    # Checksums.

    def records(self) -> RecordSource | None:
        """The checksums of the pages, for any thread; None if only a descriptor is known."""
        if self._records is None:
            place = self.place()
            if place is None:
                return None
            self._records = SidecarRecords(
                *place,
                self.file,
                lambda: (self.stream_id, self.recorded_epoch),
                lambda: known_chains(HeaderPage(self.page).record),
                is_current=self._is_current,
            )
        return self._records

    def place(self) -> tuple[Disk, str] | None:
        """The path beside which the stream's other files are, and its disk; None if only a
        descriptor is known."""
        if self._named is None and self.opened_by is not None:
            return self.opened_by.disk, journal.path_of(self.opened_by.absolute)
        return self._named

    def settle_summaries(self) -> None:
        """Bring `FILE.pages` up to date, if this process writes it."""

    def verify_reads(self, verify: Verify) -> None:
        """From now on `reader` compares pages with their checksums when it first reads them."""
        records, self.verify = self.records(), verify
        if verify != "cold" or records is None:
            read_ahead(self.file, True)
        if verify == "never" or records is None:
            return
        cold = self.file.fileno() if verify == "cold" else None
        self._data = VerifiedFile(self.file, self.pages, cold=cold)
        self.reader = self.new_reader()

    @property
    def pages(self) -> PageRegister:
        """What is known of the file's pages, for its readers and its server."""
        with self.lock:
            if self._pages is None:
                self._pages = self._new_register()
            return self._pages

    def _new_register(self) -> PageRegister:
        records = self.records()
        pages = PageRegister(
            self.file,
            self.path,
            records,
            lambda: self.reader.head,
            self.end_sum,
            fd=self.file.fileno(),
        )
        known, head = self._end_sum
        if (
            records is not None
            and not self._unsettled
            and head == self.reader.head
            and self._updated_page() != last_page(head.length)
        ):
            pages.judge_end(head, known)
        return pages

    def pages_changed(self) -> None:
        """Entries were changed: what is known of pages is forgotten."""
        if self._pages is not None:
            self._pages.forget()

    def _is_current(self) -> bool:
        """Whether the file is in the state of the last `refresh`, apart from commits."""
        record = HeaderPage.of(self.file).record
        return record is not None and record.epoch == self.recorded_epoch

    def ensure_undamaged(self, number: int) -> None:
        """Compare the page that an entry was just looked up in. Raises `DamagedPage`."""
        place = self.reader.page_with(number)
        if place is not None:
            self.pages.verify(page_of(place[0]))

    def end_sum(self) -> tuple[Head, EndSum | None]:
        """The head, and what the header page knows of the entries up to it (None: nothing, or
        entries are being changed)."""
        with self.lock:
            head = self.reader.head
            # Another process may have written since the last `refresh`.
            page = HeaderPage(self.page) if self.writable else HeaderPage.of(self.file)
        record = page.record
        if record is None or page.changing or self._is_updated():
            return head, None
        return head, record.sum_at(head)

    def _is_updated(self) -> bool:
        place = self.place()
        return place is not None and place[0].exists(place[1] + journal.SUFFIX)

    def _updated_page(self) -> int | None:
        """The page that an update changes, or that an interrupted one has left with old or new
        bytes until a writer opens the file: the commit record may have either hash of it."""
        place = self.place()
        undo = None if place is None else journal.find(*place, self.file.access())
        if undo is None or undone_by(undo, self.file, HeaderPage(self.page)) is None:
            return None
        return page_of(undo.offset)

    def new_reader(self) -> Reader:
        return self._reader_from(self.head)

    def _reader_from(self, head: Head) -> Reader:
        at_hand = None
        if isinstance(self.file, OsFile):
            at_hand = ReadsAtHand(self.file, self._pages if self._data is not self.file else None)
        return Reader(self.file, self.path, head, data=self._data, at_hand=at_hand)

    # State.

    @property
    def header(self) -> Header:
        return self.header_at(self.reader.head)

    def header_at(self, head: Head) -> Header:
        return Header(*self._header[:3], *head)

    @contextlib.contextmanager
    def exclusive(self) -> Iterator[None]:
        """Keep other threads from changing these fields."""
        with self.lock:
            yield

    @property
    def head(self) -> Head:
        return self.reader.head

    def source(self) -> PublisherRecord:
        """The last source that was granted a lease; `PublisherRecord()` if there was none.

        Raises `DamagedHeader` if its record is damaged.
        """
        found = records.get_source(steady_page(self.file), self.stream_id)
        if found is not None:
            return found
        raise DamagedHeader(
            self.path,
            records.SOURCE_OFFSETS[0],
            "the record of the stream's source is damaged, so the last epoch is not known; end "
            "all sources of the stream, run `datastreamer repair`, which clears the record, and "
            "start one source with an epoch that no source had before",
        )

    def refresh(self) -> bool:
        """Read the header page again (beside a writer); True if the stream moved.

        A rise of `epoch` means that entries were truncated or changed.
        """
        # An unchanged page keeps its judgement, also of what did not reach the disk.
        moved = False
        before = self._seen
        seen = self.file.read(_SEEN_BYTES, 0)
        if seen != before:
            with self.lock:
                # Another thread may have read a later page meanwhile.
                found = self._see_commits(seen) if self._seen is before else None
                moved = self._see(HeaderPage.of(self.file)) if found is None else found
        self._ensure_whole()
        return moved

    def _see_commits(self, seen: bytes) -> bool | None:
        """As `_see`, for the part of the page that commits write; None if more has changed."""
        if not self._by_record or self._unsettled or len(seen) < _SEEN_BYTES:
            return None
        head, before = records.committed_since(seen, self._seen), self.reader.head
        if head is None or head.length < before.length or head.entries < before.entries:
            return None
        self.page[:_SEEN_BYTES] = seen
        self.reader.head = head
        self._seen = seen
        return head != before

    def settled_page(self) -> bytes | None:
        """The part of the header page that commits write, as of the last `refresh`, if the commits
        of another process can be followed by that part alone: until other bytes in it change than
        commits change (`records.committed_since`), entries up to the mark are committed."""
        return self._seen if self._by_record and not self._unsettled else None

    def _ensure_whole(self) -> None:
        """Raises `DamagedEntry` if the writer ended in the middle of an update."""
        if self._unsettled and self._named is not None:
            ensure_whole(*self._named, self.file, self.path)

    def outdated(self) -> bool:
        """Whether entries were truncated or changed since the last `refresh`.

        Reads without a `refresh` may then return other entries, or bytes of an operation that is
        not committed, in the place of entries that this reader still counts.
        """
        for _ in range(_TORN_READS):
            page = HeaderPage.of(self.file)
            if page[:_SEEN_BYTES] == self._seen:
                self._ensure_whole()
                return False
            record = page.record
            if record is not None:
                return record.epoch != self._written_epoch
        # Another program's header; or one that is being written, and until it is whole, no bytes
        # are overwritten.
        fewer = page.header(self.path).total_entries < self.head.entries
        return fewer and not self.file.locked_elsewhere()

    @property
    def changing(self) -> bool:
        """Whether a writer in another process is truncating or changing entries, as of the last
        `refresh`.

        Reads may return half old and half new bytes meanwhile.
        """
        return self._unsettled and self.file.locked_elsewhere()

    def changes_since(self, epoch: int) -> Sequence[Change] | None:
        with self.lock:
            found: list[Change] = []
            for rise in self._rises:
                if rise.old == epoch and rise.changes is not None:
                    found += rise.changes
                    epoch = rise.new
            return found if epoch == self.epoch else None

    @property
    def recorded_epoch(self) -> int | None:
        record = HeaderPage(self.page).record
        return None if record is None else record.epoch

    def recorded_changes(self, epoch: int) -> Sequence[Change] | None:
        with self.lock:
            now = self.recorded_epoch
            if now is None or epoch > now:
                return None
            known = {change.epoch: change for change in HeaderPage(self.page).changes}
            known.update((change.epoch, change) for change in self.known_changes)
            found = [known.get(each) for each in range(max(epoch, now - len(known)) + 1, now + 1)]
            complete = [change for change in found if change is not None]
            return complete if len(complete) == now - epoch else None

    def _see(self, page: HeaderPage) -> bool:
        """Accept a header page that is confirmed; True if the stream moved."""
        before = (self.head, self._written_epoch)
        for _ in range(_TORN_READS):
            header = page.header(self.path)
            record, seen = page.record, page.visible
            by_record = seen is not None
            if not self.file.locked_elsewhere() and (by_record or HeaderPage.of(self.file) == page):
                # No writer that keeps records is at work, and the page does not change.
                seen = Head(header.total_length, header.total_entries), self._written_epoch
                if record is not None:
                    judged = judge(self.file, page, self.path, header)
                    seen = shown(page, judged, boot_id()), record.epoch
                    by_record = by_record and _is_whole(judged)
            if seen is not None:
                break
            page = HeaderPage.of(self.file)
        else:
            return False
        if record is not None:
            self.stream_id = record.stream_id
        self._by_record = by_record
        self.page[:] = page
        self._unsettled = page.changing
        head, epoch = seen
        if seen != before:
            self._written_epoch = epoch
            self._header = header
            if _is_another_history(before[0], head) or epoch != before[1]:
                changes = page.changes_between(before[1], epoch)
                old, self.epoch = self.epoch, _epoch_after(self.epoch, epoch)
                self._rises.append(_Rise(old, self.epoch, changes))
                if changes is None:
                    self.known_changes.clear()
                else:
                    self.known_changes.extend(changes)
                self.pages_changed()
                self.reader.forget(head)
            else:
                self.reader.head = head
        # Last: a thread that compares the page with the file, without the lock, trusts the rest.
        self._seen = page[:_SEEN_BYTES]
        return seen != before

    # The end.

    @property
    def replaced(self) -> str:
        return "" if self.opened_by is None else self.opened_by.difference()

    def close(self) -> None:
        """Close the descriptor, and write nothing. Idempotent."""
        self.closed = True
        if self._records is not None:
            self._records.close()
        self.file.close()


def _epoch_after(reported: int, recorded: int) -> int:
    """The epoch that a reader reports after a change. If the file has no new one, it is one that no
    other reader reports and no file will have: both may come to other entries."""
    if recorded > reported:
        return recorded
    return reported + 1 if reported >= _OWN_EPOCHS else _OWN_EPOCHS + secrets.randbits(51)


def _is_whole(judged: Judgement) -> bool:
    """Whether the entries are those that the record is about."""
    return judged.record is not None and judged.record.after == judged.head


def _is_another_history(before: Head, head: Head) -> bool:
    """Whether entries were truncated, and perhaps others appended, as far as that is visible."""
    longer, more = head.length > before.length, head.entries > before.entries
    return head.entries < before.entries or longer != more or head.length < before.length
