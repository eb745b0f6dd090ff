"""A stream file that this process writes: its header page, its failures, who is told.

Owns what is known of the file's end, the bytes of the header page and their way to the file,
and whether anything may be written at all. Knows no order of steps and no syncs; `durable.py`,
`changes.py` and `writer.py`, which build upon it in turn, do.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator

from datastreamer.errors import CommitInDoubt, FileReplaced, StreamClosed
from datastreamer.storage.disk._commit import StreamEnd
from datastreamer.storage.disk.file_ops import Disk, File, boot_id
from datastreamer.storage.disk.identity import LOOK_SECONDS, OpenPath
from datastreamer.storage.header import records
from datastreamer.storage.header import undo_journal as journal
from datastreamer.storage.header.records import CommitRecord, Head, SyncedHeader
from datastreamer.storage.header.recovery import NO_HASH, Judgement
from datastreamer.storage.read.file import StreamFile

_INTERRUPTED = (
    "a commit or change was interrupted, by Ctrl-C perhaps; it may be in the file; open the "
    "stream again to go on"
)


class OwnedFile(StreamFile):
    """A stream file whose writer's lock is held.

    `head` is how far readers go, `written` where the next operation begins.
    """

    writable = True

    def __init__(self, file: File, path: str, page: bytes, judged: Judgement, disk: Disk) -> None:
        super().__init__(file, path, page, judged)
        # Descriptors that a commit writes to: those of other processes, which read the mark,
        # and those of threads of this one, which read `head`.
        self.wakers: list[int] = []
        self.inside_wakers: list[int] = []
        self._disk = disk
        self.opened_by: OpenPath = OpenPath(disk, path, file)
        # Why none of it is acknowledged any more, where a close found its path to lead elsewhere.
        self._closed_elsewhere: FileReplaced | None = None
        self._place = journal.place_of(path)
        self._boot = boot_id()
        # Its `limit` is set by a commit that has looked at all there is, and taken back by
        # whatever changes what that commit saw: policy, failure, a sync that has been asked for.
        self.end = StreamEnd(file, self._page, judged.head, records.COMMIT_LAYOUT)
        # Taken before the lock by whoever syncs: of two syncs at once, only one is told of a
        # failure.
        self._syncing = threading.RLock()
        # Why nothing is written any more.
        self._failure: str | None = None
        # Up to this offset stand bytes of entries that were taken back.
        self._taken_back = 0

    # State.

    @property
    def written(self) -> Head:
        """Where the next operation begins."""
        return self.end.written

    @property
    def commits(self) -> int:
        """How many commits were written."""
        return self.end.commits

    @property
    def synced(self) -> Head:
        """How far it is known to be on disk."""
        return self.end.base

    @property
    def hashed_from(self) -> Head:
        """Where the running hash began, which `hasher` gives."""
        return self.end.mid

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """No commit, sync or change by another thread meanwhile."""
        with self._syncing, self._lock:
            yield

    def refresh(self) -> bool:
        return False  # nobody else writes

    # Whether it may be written.

    def ensure_writable(self) -> None:
        """Raises `StreamClosed`, `CommitInDoubt`."""
        if self._closed:
            raise StreamClosed(f"{self.path}: the stream is closed")
        if self.failed:
            raise self.in_doubt()

    def in_doubt(self) -> CommitInDoubt:
        """The error for a stream that has `failed`."""
        return CommitInDoubt(self.path, self._failure or "")

    def ensure_in_place(self, *, always: bool = False) -> None:
        """Raises `FileReplaced` where the path does not lead to the open file any more, or did
        not at the close. Looks where the last look is nearly a second old, or was in vain, or
        `always`."""
        end = self.end
        if self._closed_elsewhere is not None:
            raise self._closed_elsewhere
        if not (always or end.look_due):
            return
        began = end.looking()
        why = self.opened_by.difference()
        if why:
            end.look_again()
            raise FileReplaced(
                self.path,
                f"{why}; nothing more is committed until this path leads to the open file again; "
                f"to save what is committed, {self.opened_by.way_to_save} before this process ends",
            )
        end.looked(began, LOOK_SECONDS)

    @property
    def failed(self) -> bool:
        """Whether a header or sync failed, or was interrupted: nothing more is written."""
        if self._failure is None and not self.end.unfinished:
            return False  # without the lock: a commit may fail right behind any answer
        with self._lock:
            if self.end.unfinished and self._failure is None:
                self._failure = _INTERRUPTED
            return self._failure is not None

    def interrupt(self) -> None:
        """Write nothing more until another open: a signal came, and it is not known to whom a
        commit was told."""
        with self._lock:
            self.end.unfinished = True
            self.end.limit = -1

    def abandon(self) -> None:
        self.end.limit = -1
        super().abandon()

    # The header page.

    def _write_clean(self) -> None:
        """A record with an empty range: nothing is left that a power cut could take."""
        head = self.written
        self.end.all_on_disk(head)
        records.put_header(self._page, self._header_at(head))
        self._put_record(head)
        self._put_synced(head)
        records.put_mark(self._page, self.epoch, head)
        self._write_back()

    def _write_header(self) -> None:
        start, end = records.BEFORE_SYNC
        self.file.write(memoryview(self._page)[start:end], start)

    def _write_back(self) -> None:
        start, end = records.WITHOUT_SYNC
        self.file.write(memoryview(self._page)[start:end], start)

    def _put_record(self, head: Head) -> None:
        records.put_record(
            self._page,
            CommitRecord(
                self.stream_id, self.epoch, self._boot, head, head, head, NO_HASH, NO_HASH
            ),
        )

    def _put_synced(self, head: Head) -> None:
        self.end.sequence += 1
        sequence = self.end.sequence
        records.put_synced(
            self._page,
            sequence & 1,
            SyncedHeader(sequence, self.stream_id, self.epoch, self._header_at(head)),
        )

    def _forget_doubt(self) -> None:
        self._clear(records.DOUBT_OFFSET)

    def _forget_changes(self) -> None:
        """The epoch rises for a reason that the changes in the page do not tell."""
        self._clear(records.CHANGES_OFFSET)

    def _clear(self, start: int) -> None:
        size = 512
        if any(self._page[start : start + size]):
            self._page[start : start + size] = bytes(size)
            self.file.write(bytes(size), start)

    # What was taken back.

    def _note_taken_back(self, length: int) -> None:
        """Before the next write behind the end, see to the bytes up to `length`."""
        self._taken_back = max(self._taken_back, length)
        # A commit has to look.
        self.end.limit = -1

    def _abandon_taken_back(self) -> None:
        """Whom the kernel was pointed to entries that were taken back for is not to find new ones
        there instead; holds the lock."""
        if self._taken_back:
            if self._taken_back > self.written.length:
                self.file.abandon(self.written.length, self._taken_back)
            self._taken_back = 0

    # Who is told.

    def _wake_all(self) -> None:
        _wake([*self.wakers, *self.inside_wakers])

    def wake_inside(self) -> None:
        _wake(self.inside_wakers)

    def add_waker(self, fd: int, *, inside: bool) -> None:
        with self._lock:
            (self.inside_wakers if inside else self.wakers).append(fd)

    def remove_waker(self, fd: int) -> None:
        """Nothing is written to `fd` any more when this returns."""
        with self._lock:
            for wakers in (self.wakers, self.inside_wakers):
                with contextlib.suppress(ValueError):
                    wakers.remove(fd)


def refused(error: OSError) -> str:
    """What went wrong, for a message."""
    return f"the system refused to write: {error.strerror or error}"


def _wake(wakers: list[int]) -> None:
    for waker in wakers:
        with contextlib.suppress(BlockingIOError):
            os.write(waker, b"\0\0\0\0\0\0\0\1")
