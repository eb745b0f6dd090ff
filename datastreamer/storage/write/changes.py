"""Changes of what is committed: truncation, an update in place, entries that are given up.

Owns the order of their steps: a crash in the middle of one leaves the old or the new, and
readers tell by the epoch that entries were taken back or changed. The reasons stand in
``docs/FILE.md``. Knows nothing of commits.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable

from datastreamer.errors import (
    CommitInDoubt,
    EntriesLost,
    FileReplaced,
    UntrustedFile,
    WriteFailed,
)
from datastreamer.storage.disk.file_ops import Disk, File
from datastreamer.storage.header import records
from datastreamer.storage.header import undo_journal as journal
from datastreamer.storage.header.records import Agreement, Change, Head
from datastreamer.storage.header.recovery import undone_by, updating
from datastreamer.storage.header.undo_journal import Undo
from datastreamer.storage.read.file import cannot_undo, read_page
from datastreamer.storage.write.state import refused
from datastreamer.storage.write.sync_policy import DurableFile

_log = logging.getLogger(__name__)


class ChangeableFile(DurableFile):
    """A stream file in which what is committed can be taken back or changed."""

    def truncate(self, number: int, offset: int) -> None:
        """Cut back to `number` entries, which end at `offset`; durable on return."""
        with self.alone():
            self.ensure_writable()
            self.sync()
            gone = self.written.length
            self._change(lambda: None, Head(offset, number), number, None)
            self._note_taken_back(gone)

    def update(self, number: int, offset: int, old: bytes, new: bytes) -> None:
        """Replace the `old` bytes of entry `number`'s data at `offset`; durable on return, and
        after a crash the one or the other."""
        with self.alone():
            self.ensure_writable()
            self.sync()
            # No range of the record may cover what is about to change: a power cut would
            # take its hash for lost bytes.
            try:
                self.file.sync()
            except OSError as error:
                self._fail(error)
                raise WriteFailed(self.path, refused(error)) from error
            undo = Undo(self.stream_id, self.epoch, self.header.pack(), offset, old, new)
            self._clear_journal()
            self.end.unfinished = True
            try:
                journal.put(self._disk, self._place, undo, self.file.access())
            except OSError as error:
                if self._disk.exists(self._place + journal.SUFFIX):
                    # The next open would take it for an update that was cut off.
                    self._failure = f"{refused(error)}; open the stream again to go on"
                    raise CommitInDoubt(self.path, self._failure) from error
                self.end.unfinished = False
                raise WriteFailed(self.path, refused(error)) from error
            try:
                # Now that the journal is there: without it the next open at the path, should
                # that be of another file, would find one that is none of its own.
                self.ensure_in_place(always=True)
            except FileReplaced:
                with contextlib.suppress(OSError):
                    journal.remove(self._disk, self._place, undo, self.file.access())
                self.end.unfinished = False
                raise

            def write() -> None:
                self.file.part(offset, offset + len(new))
                self.file.write(new, offset)

            self._change(
                write,
                self.head,
                number,
                number + 1,
                lambda: self._end_update(undo),
            )

    def _clear_journal(self) -> None:
        """Whatever is in the place of the journal is not about this stream: no update is under
        way. Raises `WriteFailed` where it cannot be set aside."""
        self.ensure_in_place(always=True)
        try:
            if self._disk.exists(self._place + journal.SUFFIX):
                keep_journal(self._disk, self._place, self.path)
        except OSError as error:
            why = f"{self._place}{journal.SUFFIX} is in the way of the journal of an update"
            raise WriteFailed(self.path, f"{why}: {refused(error)}; move it elsewhere") from error

    def _end_update(self, undo: Undo) -> None:
        # Who finds no journal has to find the mark, after a power cut too.
        self.file.sync()
        journal.remove(self._disk, self._place, undo, self.file.access())

    @property
    def recorded_epoch(self) -> int | None:
        return self.epoch

    @property
    def agreement(self) -> Agreement | None:
        """With which state of an upstream the file agrees; None: with none that is known."""
        return records.get_agreement(self._page)

    def note_agreement(self, agreement: Agreement | None) -> None:
        """Keep it in the file. It is on disk with the next sync: an older one that a power cut
        leaves has changes applied again. Raises `WriteFailed`."""
        with self.alone():
            self.ensure_writable()
            page = bytearray(self._page)
            start, end = records.put_agreement(page, agreement)
            try:
                self.file.write(memoryview(page)[start:end], start)
            except OSError as error:
                self.end.refused()
                raise WriteFailed(self.path, refused(error)) from error
            self._page[start:end] = page[start:end]

    def give_up(self, head: Head) -> EntriesLost:
        """Go back to `head`, behind which the entries could not be brought to disk."""
        with self.alone():
            loss = EntriesLost(self.path, head.entries, self.written.entries)
            self._losses.append((self.end.durable, self.commits, loss))
            self._failure, self._mendable, self._gone_from = None, False, None
            gone = self.written.length
            self._change(lambda: None, head, head.entries, None)
            self._note_taken_back(gone)
            self.end.durable = self.commits
            with contextlib.suppress(OSError):
                self._forget_doubt()
            _log.error("%s", loss)
            return loss

    def _change(
        self,
        write: Callable[[], None],
        head: Head,
        start: int,
        stop: int | None,
        clean_up: Callable[[], None] = lambda: None,
    ) -> None:
        """Raise the epoch around a change of the entries from `start` to `stop`, which leaves
        `head`; `clean_up` once it is on disk."""
        with self.reader.changing():
            self._change_held(write, head, start, stop, clean_up)
        self._wake_all()

    def _change_held(
        self,
        write: Callable[[], None],
        head: Head,
        start: int,
        stop: int | None,
        clean_up: Callable[[], None],
    ) -> None:
        self.end.unfinished = True
        self.epoch += 1
        header = self._header_at(head)
        change = Change(self.epoch, start, stop)
        span = records.put_change(self._page, change)
        try:
            # First: who sees the epoch finds what it is about.
            self.file.write(memoryview(self._page)[slice(*span)], span[0])
            records.put_header(self._page, header)
            self._put_record(head)
            self._write_header()
            write()
            self.file.sync()
            self._put_synced(head)
            records.put_mark(self._page, self.epoch, head)
            self._write_back()
            clean_up()
        except OSError as error:
            # Half done, maybe; what is to be believed is for the next open to say.
            self._failure = (
                f"{refused(error)} in the middle of a truncation or update; open the stream again"
            )
            self.end.limit = -1
            self.end.unfinished = False
            raise CommitInDoubt(self.path, self._failure) from error
        self._known_changes.append(change)
        self.end.written = head
        self.end.all_on_disk(head)
        self.reader.head = head
        self.end.unfinished = False


def undo_update(disk: Disk, file: File, path: str, shown: str) -> bool:
    """Put back what an update that a crash cut off has overwritten; True if there was one.

    `path` is where its journal stands (`journal.place_of`). Raises `DamagedEntry` where it is
    not there, or is of no use.
    """
    page = read_page(file)
    undo = journal.find(disk, path, file.access())
    found = None if undo is None else undone_by(undo, file, page)
    if undo is not None and found is not None:
        mark = records.get_mark(page)
        if found == undo.new and mark is not None and mark.epoch > undo.epoch:
            # It had come to its end, and has been seen. Who finds no journal has to find the mark.
            start, stop = records.MARK_OFFSET, records.WRITER_OFFSET
            file.write(page[start:stop], start)
            file.sync()
            journal.remove(disk, path, undo, file.access())
            return False
        # Also where they stand there: an open before this one may have put them back, and
        # failed to bring them to disk.
        file.write(undo.old, undo.offset)
        if updating(page) is not None:
            # The journal goes: from now on the page does not ask for it.
            file.write(bytes(records.CHANGES_SIZE), records.CHANGES_OFFSET)
        file.sync()
        _log.warning(
            "%s: a crash cut off an update; the %d bytes at %d are as before it",
            shown,
            len(undo.old),
            undo.offset,
        )
        journal.remove(disk, path, undo, file.access())
        return True
    number = updating(page)
    if number is not None:
        raise cannot_undo(file, page, shown, number, path)
    if disk.exists(path + journal.SUFFIX):
        keep_journal(disk, path, shown)
    return False


def keep_journal(disk: Disk, path: str, shown: str) -> None:
    """Give a journal that is of no use another name. Raises `UntrustedFile` if it is a link or
    another user's and the system does not let us move it."""
    try:
        kept = journal.set_aside(disk, path)
    except PermissionError as error:
        raise UntrustedFile(
            path + journal.SUFFIX,
            "is in the place of the journal of updates, is not this stream's, and cannot be moved "
            f"({error.strerror}); remove it",
        ) from error
    _log.warning(
        "%s: the journal of an update is damaged, is a link or another user's, or does not fit the "
        "file, which was changed since; it is kept as %s",
        shown,
        kept,
    )
