"""What is written comes to disk: by when, who waits for it, and what if the disk refuses.

Owns the sync policy, the syncs that follow commits, and the way out of a sync that failed: back
to what is on disk for sure, and the rest written again, or given up by number. The reasons
stand in ``docs/FILE.md``. Writes no entry that was not in the file before.
"""

from __future__ import annotations

import contextlib
import logging
import math
import threading
import time
from collections.abc import Callable
from typing import Literal

from xxhash import xxh3_64

from datastreamer.errors import CommitInDoubt, EntriesLost, StreamClosed, WriteFailed
from datastreamer.format import PAGE_SIZE
from datastreamer.storage.disk.file_ops import Disk, File
from datastreamer.storage.header import records
from datastreamer.storage.header.records import CommitRecord, Head, PublisherRecord
from datastreamer.storage.header.recovery import NO_HASH, Judgement, is_whole
from datastreamer.storage.write.state import OwnedFile, refused
from datastreamer.storage.write.syncer import Syncer

SyncPolicy = Literal["commit", "os"] | int

_log = logging.getLogger(__name__)

# Under the policy "os" syncs follow at this distance, so that a power cut leaves a bounded
# part of the stream to be checked, and bookmarks do not wait in memory for ever.
_OS_SYNC_SECONDS = 10.0
_OS_SYNC_BYTES = 64 << 20

_UNTIL_IT_WORKS = "nothing more is written until the disk takes writes again"


class DurableFile(OwnedFile):
    """What was committed without waiting lies between `head` and `written` until it is on disk,
    under the policy "commit"."""

    def __init__(
        self, file: File, path: str, page: bytes, judged: Judgement, sync: SyncPolicy, disk: Disk
    ) -> None:
        super().__init__(file, path, page, judged, disk)
        # Called, with the lock held, when more is on disk, and maybe to be seen, than before.
        self.on_settled: Callable[[], None] | None = None
        self._policy: SyncPolicy = sync
        # (Entering and leaving a lock is one step to a signal; a condition it can come into.)
        self._reaching = threading.Lock()
        self._reached = threading.Condition(self._reaching)
        self._syncer = Syncer(self._sync_behind)
        self._sync_asked = False
        self._sync_at = 0
        # Whether a failure can be mended, and where not all could.
        self._mendable = False
        # Whether a header that goes beyond `written` was given to the system, and another open
        # may find it.
        self._header_ahead = False
        self._gone_from: Head | None = None
        self._losses: list[tuple[int, int, EntriesLost]] = []
        self.failures = 0

    @property
    def policy(self) -> SyncPolicy:
        """When what is committed is brought to disk: "commit", "os", or milliseconds.

        It may be changed at any time; a change to "commit" syncs first.
        """
        return self._policy

    @policy.setter
    def policy(self, policy: SyncPolicy) -> None:
        with self.alone():
            if policy == "commit":
                self.sync()
            self._policy = policy
            self._sync_asked = False
            self.end.limit = -1
            if self.end.base != self.written:
                self._ask_for_sync()

    # Syncs.

    def sync(self) -> None:
        """All that is committed is on disk, in the file that the path leads to, when this
        returns. Raises `FileReplaced` where it leads elsewhere; the open file is synced then."""
        with self.alone():
            self.sync_open_file()
            self.ensure_in_place(always=True)

    def sync_open_file(self) -> None:
        """As `sync`, wherever the path leads."""
        with self.alone():
            self.ensure_writable()
            if self.end.base == self.written:
                return
            self.end.unfinished = True
            try:
                self._sync_timed()
            except OSError as error:
                self._fail(error)
            else:
                self._settle(self.written, self.commits)
                self.end.unfinished = False

    def keep_source(self, source: PublisherRecord) -> None:
        """Write `source` to the header page; both copies are on disk on return.

        Raises `StreamClosed`, `CommitInDoubt`, and `WriteFailed`: the file has `source` or the
        one before then, and the same call may be made again.
        """
        with self._syncing:
            for copy in range(len(records.SOURCE_OFFSETS)):
                with self._lock:
                    self.ensure_writable()
                    page = bytearray(self._page)
                    start, end = records.put_source(page, copy, self.stream_id, source)
                    try:
                        self.file.write(memoryview(page)[start:end], start)
                    except OSError as error:
                        self.end.refused()
                        raise WriteFailed(self.path, refused(error)) from error
                    self._page[start:end] = page[start:end]
                try:
                    self._sync_timed()
                except OSError as error:
                    with self._lock:
                        # The same sync was to bring data of operations to disk.
                        self._fail(error)
                    raise WriteFailed(self.path, refused(error)) from error

    def _sync_timed(self) -> None:
        began = time.monotonic_ns()
        try:
            self.file.sync()
        except OSError:
            self.end.refused()
            raise
        self.end.synced_in(time.monotonic_ns() - began)

    def _ask_for_sync(self) -> None:
        policy = self._policy
        self._sync_asked = True
        self._sync_at = self.end.base.length + _OS_SYNC_BYTES
        if policy == "commit" or self.written.length > self._sync_at:
            self._sync_at = self.written.length + _OS_SYNC_BYTES
            self._syncer.ask()
        elif policy == "os":
            self._syncer.ask(_OS_SYNC_SECONDS)
        else:
            # The sync takes its time too.
            self._syncer.ask(policy / 2000)

    def _sync_behind(self) -> None:
        """A sync while commits go on; in the syncer's thread."""
        with self._syncing:
            with self._lock:
                self._sync_asked = False
                self.end.limit = -1
                if self.failed:
                    self._tell_who_waits()
                if self._failure or self._closed or self.end.base == self.written:
                    return
                head, commits, failures = self.written, self.commits, self.failures
                end = self.end
                end.first, end.mid = end.running.intdigest(), head
                end.running = xxh3_64()
            try:
                self._sync_timed()
            except OSError as error:
                failed = error
            else:
                with self._lock:
                    # After a failure meanwhile, mending has settled more than this, or will.
                    if not self._failure and failures == self.failures:
                        try:
                            self._settle(head, commits)
                        except CommitInDoubt as doubt:
                            _log.error("%s", doubt)
                return
            with self._lock:
                try:
                    self._fail(failed)
                except WriteFailed as doubt:
                    _log.error("%s", doubt)

    def _settle(self, head: Head, commits: int) -> None:
        """Everything up to `head`, the first `commits` commits, is on disk. Holds the lock."""
        end = self.end
        if head == end.written:
            end.all_on_disk(head)
        else:
            end.base = end.mid = head
            end.first = NO_HASH
        seen = max(self.reader.head, head)
        end.put(head, head, end.written, NO_HASH, end.running.intdigest(), seen)
        self._put_synced(head)
        try:
            self._write_back()
        except OSError as error:
            self._fail(error)
            return
        end.durable = commits
        moved = seen != self.reader.head
        if moved:
            self.reader.head = seen
        if self.on_settled is not None:
            self.on_settled()
        if moved:
            self._wake_all()
        if head != self.written and not self._sync_asked:
            self._ask_for_sync()
        self._tell_who_waits()

    # Who waits.

    def _tell_who_waits(self) -> None:
        with self._reaching:
            self._reached.notify_all()

    def announce(self) -> None:
        """Have `on_settled` called now."""
        with self._lock:
            if self.on_settled is not None:
                self.on_settled()

    def reached(self, number: int) -> bool:
        """Whether commit `number` is on disk. Raises `CommitInDoubt` where it may never be, and
        `FileReplaced`."""
        for first, last, loss in self._losses:
            if first < number <= last:
                raise loss
        if number <= self.end.durable:
            self.ensure_in_place()
            return True
        if self._failure is not None:
            raise self.in_doubt()
        if self._closed:
            raise StreamClosed(f"{self.path}: the stream was closed before the sync")
        return False

    def wait_for(self, number: int, timeout: float | None) -> bool:
        """Return when commit `number` is on disk; False after `timeout` seconds."""
        if timeout is not None:
            if math.isnan(timeout):
                raise ValueError("the timeout is a number of seconds, not nan")
            timeout = min(timeout, threading.TIMEOUT_MAX)
        if self.reached(number):
            return True
        self._syncer.ask()
        with self._reaching:
            return self._reached.wait_for(lambda: self.reached(number), timeout)

    # Failures.

    def _fail(self, error: OSError) -> None:
        """After a header or sync that failed: nothing is trusted to be on disk that was not
        before. Returns where the unsynced commits are on disk after all; the caller's own
        writes are not."""
        self.failures += 1
        self._failure = refused(error)
        self._mendable = True
        self.end.limit = -1
        self.end.unfinished = False
        try:
            self._mend()
        except OSError as again:
            raise self.in_doubt() from again
        finally:
            self._tell_who_waits()
        if self._gone_from is not None:
            raise self.in_doubt() from error

    def in_doubt(self, then: str = _UNTIL_IT_WORKS) -> CommitInDoubt:
        """The error while the stream has `failed`: what may not be on disk, or may be, and
        `then` what there is to do."""
        if not self._mendable:
            return super().in_doubt()
        parts = [self._failure or ""]
        base, written = self.end.base.entries, self.written.entries
        if written > base:
            parts.append(f"entries {base} to {written - 1} may not be on disk")
        if self._header_ahead:
            parts.append(f"whether the operation from entry {written} on is on disk is not known")
        return CommitInDoubt(self.path, "; ".join([*parts, then]))

    def mend(self) -> Head | None:
        """Try to get over a failed sync: None where that is done (or nothing was to do).

        A head where the entries behind it cannot be brought to disk any more: the caller
        has to `give_up` them. Raises `CommitInDoubt` while the disk refuses.
        """
        if not self._mendable:
            return None
        with self.alone():
            if self._mendable and self._gone_from is None:
                try:
                    self._mend()
                except OSError as error:
                    raise self.in_doubt() from error
            return self._gone_from

    def take_header_back(self) -> None:
        """Return when no later open can find a commit that failed and was not made again.

        Raises `CommitInDoubt` while the disk does not take the header of before.
        """
        if not self._header_ahead:
            return
        try:
            self.mend()
        except CommitInDoubt:
            if self._header_ahead:
                raise

    def _mend(self) -> None:
        """First make what is on disk for sure the whole stream, on disk; then bring the rest
        there once more: the system may have marked it clean without having written it."""
        end = self.end
        base, mid, written = end.base, end.mid, end.written
        hashes = end.first, end.running.intdigest()
        seen = self.reader.head
        try:
            if written != base:
                # Should the process end in between, the next open finds here what there was.
                span = records.put_doubt(
                    self._page,
                    CommitRecord(
                        self.stream_id, self.epoch, self._boot, base, mid, written, *hashes
                    ),
                )
                self.file.write(memoryview(self._page)[slice(*span)], span[0])
            end.put(base, base, base, NO_HASH, NO_HASH, seen)
            self._write_header()
            self.file.sync()
            self._header_ahead = False
            for start, stop, expected in ((base, mid, hashes[0]), (mid, written, hashes[1])):
                if not is_whole(self.file, start, stop, expected):
                    self._gone_from = base
                    return
                write_again(self.file, start, stop)
            end.put(base, mid, written, *hashes, seen)
            self._write_header()
            self.file.sync()
        except OSError:
            # Should the process end now, the system still has what the disk does not take.
            end.put(base, mid, written, *hashes, seen)
            with contextlib.suppress(OSError):
                self._write_header()
            raise
        if written != base:
            _log.warning(
                "%s: a sync failed; entries %d to %d were written again and are on disk",
                self.path,
                base.entries,
                written.entries - 1,
            )
        self._failure, self._mendable = None, False
        self._settle(written, self.commits)
        with contextlib.suppress(OSError):
            self._forget_doubt()

    @property
    def interrupted(self) -> bool:
        """Whether only another open can tell what was written."""
        return self.failed and not self._mendable


def write_again(file: File, start: Head, stop: Head) -> None:
    """Write what stands between two heads to its place, so that the next sync syncs it."""
    offset = start.length
    while offset < stop.length:
        part = file.read(min(PAGE_SIZE, stop.length - offset), offset)
        if not part:
            return
        file.write(part, offset)
        offset += len(part)
