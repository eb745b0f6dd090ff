"""How commits become durable: when syncs happen, who waits for them, and what a refusal means.

Owns the sync policy, the syncs after commits, and the recovery from a sync that failed: the
stream first goes back to what is known to be on disk, then the rest is written again, or the
caller gives it up. ``docs/FILE.md`` has the reasons. Writes no entry that was not in the file.
"""

from __future__ import annotations

import contextlib
import logging
import math
import threading
import time
from collections.abc import Callable
from typing import Literal

from datastreamer.errors import (
    BadArgument,
    CommitInDoubt,
    EntriesLost,
    StreamClosed,
    WriteFailed,
)
from datastreamer.format import PAGE_SIZE
from datastreamer.storage.disk.file_ops import File
from datastreamer.storage.header import records
from datastreamer.storage.header.judgement import longest_whole
from datastreamer.storage.header.records import CommitRecord, Head
from datastreamer.storage.write.background import Syncer
from datastreamer.storage.write.owned_file import OwnedFile, refusal

SyncPolicy = Literal["commit", "os"] | int

_log = logging.getLogger(__name__)

# Under the policy "os" a sync follows at this interval, so that a power cut leaves a bounded part
# of the stream to be checked, and memory keeps a bounded number of bookmarks.
_OS_SYNC_SECONDS = 10.0
_OS_SYNC_BYTES = 64 << 20


_MAX_MILLISECONDS = 24 * 60 * 60 * 1000


def check_policy(sync: object) -> None:
    """Raises `BadArgument` if this is not a sync policy."""
    milliseconds = (
        isinstance(sync, int) and not isinstance(sync, bool) and 0 < sync <= _MAX_MILLISECONDS
    )
    if not milliseconds and sync not in ("commit", "os"):
        raise BadArgument(
            f'the sync policy is "commit", "os" or a number of milliseconds, at most '
            f"{_MAX_MILLISECONDS} (a day), not {sync!r}"
        )


class Durability:
    """The syncs of one stream file.

    Under the policy "commit", what was committed without waiting lies between the file's `head`
    and `written` until it is on disk.
    """

    def __init__(self, owned: OwnedFile, policy: SyncPolicy) -> None:
        self._owned = owned
        self._end = owned.end
        # Called, with the lock held, when more is on disk, and perhaps visible, than before.
        self.on_settled: Callable[[], None] | None = None
        self._policy: SyncPolicy = policy
        self._end.waits = policy == "commit"
        # (A signal's exception cannot separate a lock's acquisition from its `with` block; entering
        # a condition runs Python code.)
        self._reaching = threading.Lock()
        self._reached = threading.Condition(self._reaching)
        self._syncer = Syncer(self.sync_in_background)
        # After a failed sync the entries from here on are lost; `_losses` has the numbers of
        # commits that were lost: after the first, up to the last.
        self.lost_from: Head | None = None
        self._losses: list[tuple[int, int, EntriesLost]] = []

    @property
    def policy(self) -> SyncPolicy:
        """When commits are synced: "commit", "os", or milliseconds.

        It can be changed at any time; a change to "commit" syncs first.
        """
        return self._policy

    @policy.setter
    def policy(self, policy: SyncPolicy) -> None:
        with self._owned.exclusive():
            if policy == "commit":
                self.sync()
            elif not self._owned.may_lose:
                self._allow_loss()
            self._policy = policy
            self._end.waits = policy == "commit"
            self._end.revoke()
            self._end.sync_at = -1
            if self._end.base != self._end.written:
                self.request_sync()

    def _allow_loss(self) -> None:
        """Write, durably, that a power cut may take what readers have seen. Raises `WriteFailed`,
        `CommitInDoubt`."""
        owned = self._owned
        owned.ensure_writable()
        try:
            owned.write_writer(open=True, may_lose=True)
            self.timed_sync()
        except OSError as error:
            self.fail(error)
            raise WriteFailed(owned.path, refusal(error)) from error
        owned.may_lose = True

    # Syncs.

    def sync(self) -> None:
        """On return, everything committed is on disk, in the file that the path leads to. Raises
        `FileReplaced` if it leads to another; the open file is synced nevertheless."""
        with self._owned.exclusive():
            self.sync_open_file()
            self._owned.ensure_in_place(always=True)

    def sync_open_file(self) -> None:
        """As `sync`, wherever the path leads."""
        with self._owned.exclusive():
            self._owned.ensure_writable()
            if self._end.base == self._end.written:
                return
            self._end.changing(self._sync_all)

    def _sync_all(self) -> None:
        try:
            self.timed_sync()
        except OSError as error:
            self.fail(error)
        else:
            self._settle(self._end.written, self._end.commits)

    def timed_sync(self) -> None:
        """Sync the file, and count the time or the failure. Raises `OSError`."""
        began = time.monotonic_ns()
        try:
            self._owned.file.sync()
        except OSError:
            self._end.refused()
            raise
        self._end.synced_in(time.monotonic_ns() - began)

    def request_sync(self) -> None:
        """Request a sync for the commits so far, within the time that the policy allows; a commit
        that ends far after them requests another. Requires the lock."""
        policy, end = self._policy, self._end
        end.sync_at = end.base.length + _OS_SYNC_BYTES
        if policy == "commit" or end.written.length > end.sync_at:
            end.sync_at = end.written.length + _OS_SYNC_BYTES
            self._syncer.request()
        elif policy == "os":
            self._syncer.request(_OS_SYNC_SECONDS)
        else:
            # Half of the time is left for the sync itself.
            self._syncer.request(policy / 2000)

    def sync_in_background(self) -> int:
        """Sync while other threads commit; the syncer's thread calls this. Returns how many commits
        this has brought to disk."""
        owned, end = self._owned, self._end
        with owned.syncing:
            with owned.lock:
                end.sync_at = -1
                if owned.failed:
                    self.notify_waiting()
                if owned.failed or owned.closed or end.base == end.written:
                    return 0
                head, commits, failures = end.written, end.commits, end.failures
                end.mid, end.mid_sum = head, end.sums.sum()
            try:
                self.timed_sync()
            except OSError as error:
                failed = error
            else:
                with owned.lock:
                    # After a failure in between, its repair has settled more than this, or will.
                    if not owned.failed and failures == end.failures:
                        before = end.durable
                        try:
                            self._settle(head, commits)
                        except CommitInDoubt as doubt:
                            _log.error("%s", doubt)
                        return commits - before
                return 0
            with owned.lock:
                try:
                    self.fail(failed)
                except WriteFailed as doubt:
                    _log.error("%s", doubt)
        return 0

    def _settle(self, head: Head, commits: int) -> None:
        """Everything up to `head`, the first `commits` commits, is on disk. Requires the lock."""
        owned, end = self._owned, self._end
        if head == end.written:
            end.all_on_disk(head)
        else:
            end.base, end.base_sum = head, end.mid_sum
        seen = max(owned.reader.head, head)
        end.put(*(head, head, end.written), *(end.base_sum, end.mid_sum, end.sums.sum()), seen)
        owned.put_synced_header(head)
        try:
            owned.write_committed()
        except OSError as error:
            self.fail(error)
            return
        end.durable = commits
        moved = seen != owned.reader.head
        if moved:
            owned.reader.head = seen
        self.announce()
        if moved:
            owned.wake_all()
        if head != end.written and end.sync_at < 0:
            self.request_sync()

    def announce(self) -> None:
        """More commits are on disk than before. Requires the lock."""
        if self.on_settled is not None:
            self.on_settled()
        self.notify_waiting()

    # Threads that wait for a commit.

    def notify_waiting(self) -> None:
        """Wake the threads that wait for a commit: each checks what became of it."""
        with self._reaching:
            self._reached.notify_all()

    def reached(self, number: int) -> bool:
        """Whether commit `number` is on disk. Raises `CommitInDoubt` if it may never be, and
        `FileReplaced`."""
        for first, last, loss in self._losses:
            if first < number <= last:
                raise loss
        if number <= self._end.durable:
            self._owned.ensure_in_place()
            return True
        if self._owned.failed:
            raise self._owned.in_doubt()
        if self._owned.closed:
            raise StreamClosed(f"{self._owned.path}: the stream was closed before the sync")
        return False

    def wait_for(self, number: int, timeout: float | None) -> bool:
        """Return when commit `number` is on disk; False after `timeout` seconds."""
        if timeout is not None:
            if math.isnan(timeout):
                raise ValueError("the timeout is a number of seconds, not nan")
            timeout = min(timeout, threading.TIMEOUT_MAX)
        if self.reached(number):
            return True
        self._syncer.request(urgent=True)
        with self._reaching:
            return self._reached.wait_for(lambda: self.reached(number), timeout)

    # Failures.

    def fail(self, error: OSError) -> None:
        """Recover from a header or sync that failed: what was not known to be on disk before is
        not trusted to be there. Returns if the commits before are on disk after all; the
        caller's own writes are not. Raises `CommitInDoubt` otherwise."""
        owned = self._owned
        self._end.failures += 1
        self._end.doubt(refusal(error))
        try:
            self._repair()
        except OSError as again:
            raise owned.in_doubt() from again
        finally:
            self.notify_waiting()
        if self.lost_from is not None:
            raise owned.in_doubt() from error

    def repair(self) -> Head | None:
        """Try again to recover from a failed sync; None if that succeeded, or nothing had failed.

        A head if the entries after it cannot be brought to disk any more: the caller has to give
        them up. Raises `CommitInDoubt` while the disk refuses.
        """
        owned = self._owned
        if self._end.state != "in doubt":
            return None
        with owned.exclusive():
            if self._end.state == "in doubt" and self.lost_from is None:
                try:
                    self._repair()
                except OSError as error:
                    raise owned.in_doubt() from error
            return self.lost_from

    def withdraw_header(self) -> None:
        """On return, no later open can find a commit that failed and was not repeated.

        Raises `CommitInDoubt` while the disk does not accept the previous header.
        """
        if not self._owned.header_ahead:
            return
        try:
            self.repair()
        except CommitInDoubt:
            if self._owned.header_ahead:
                raise

    def _repair(self) -> None:
        """First make what is known to be on disk the whole stream, durably; then bring the rest
        there again: the system may have marked it clean without having written it."""
        owned, end = self._owned, self._end
        heads = end.base, end.mid, end.written
        base, _, written = heads
        sums = end.base_sum, end.mid_sum, end.sums.sum()
        seen = owned.reader.head
        try:
            doubt = CommitRecord(owned.stream_id, owned.epoch, owned.boot, *heads, *sums)
            if written != base:
                # If the process ends in between, the next open finds here what there was.
                owned.write_span(records.put_doubt(owned.page, doubt))
            known = end.base_sum
            end.put(base, base, base, known, known, known, seen)
            owned.write_header()
            owned.file.sync()
            owned.header_ahead = False
            if longest_whole(owned.file, doubt) != written:
                self.lost_from = base
                return
            write_again(owned.file, base, written)
            end.put(*heads, *sums, seen)
            owned.write_header()
            owned.file.sync()
        except OSError:
            # If the process ends now, the system still has what the disk does not accept.
            end.put(*heads, *sums, seen)
            with contextlib.suppress(OSError):
                owned.write_header()
            raise
        if written != base:
            _log.warning(
                "%s: a sync failed; entries %d to %d were written again and are on disk",
                owned.path,
                base.entries,
                written.entries - 1,
            )
        end.repaired()
        self._settle(written, end.commits)
        with contextlib.suppress(OSError):
            owned.clear_doubt()

    def give_up(self, loss: EntriesLost) -> None:
        """Have the commits that are not on disk raise `loss`, and end the failure. Requires the
        lock; the caller truncates the entries."""
        self._losses.append((self._end.durable, self._end.commits, loss))
        self._end.repaired()
        self.lost_from = None
        self._end.durable = self._end.commits

    # The end.

    def stop(self) -> None:
        """Return when no background sync runs; none begins any more."""
        self._syncer.close()


def write_again(file: File, start: Head, stop: Head) -> None:
    """Write the bytes between two heads to their place again, so that the next sync syncs them."""
    offset = start.length
    while offset < stop.length:
        part = file.read(min(PAGE_SIZE, stop.length - offset), offset)
        if not part:
            return
        file.write(part, offset)
        offset += len(part)
