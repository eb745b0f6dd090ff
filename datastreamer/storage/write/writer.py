"""The one writer of a stream file: commits operations to it, and closes it.

Owns the order of writes that makes a commit whole or absent, and holds the parts that do the
rest. `opening.py` makes it. ``docs/FILE.md`` has the reasons. Knows nothing of bookmarks' keys or
of the state of operations; `atomic_op.py` does.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import NoReturn

from datastreamer._packer import EntryPacker
from datastreamer.errors import CommitInDoubt, EntriesLost, WriteFailed
from datastreamer.format import page_of, page_start
from datastreamer.storage.disk._commit import EntriesNotWritten
from datastreamer.storage.header.records import Head
from datastreamer.storage.pages._page_sums import PageSums
from datastreamer.storage.pages.completer import SumsCompleter
from datastreamer.storage.write.changes import ChangeWriter
from datastreamer.storage.write.durability import Durability, SyncPolicy
from datastreamer.storage.write.owned_file import OwnedFile, refusal
from datastreamer.storage.write.source_records import SourceRecords
from datastreamer.storage.write.uncommitted import UncommittedSpace

_log = logging.getLogger(__name__)

_CLOSED = (
    "the stream is closed; open it for writing when the disk works: that keeps the entries that "
    "are whole, and reports which are not"
)


class StreamWriter:
    """A stream file open for writing. Safe between threads; the caller sees to it that one
    operation is open at a time."""

    def __init__(self, owned: OwnedFile, sync: SyncPolicy) -> None:
        self.owned = owned
        self.end = owned.end
        self.durability = Durability(owned, sync)
        self.uncommitted = UncommittedSpace(owned, self.durability)
        self.changes = ChangeWriter(owned, self.durability)
        self.notes = SourceRecords(owned, self.durability)
        self.sums_completer = SumsCompleter(owned)

    def commit(
        self,
        packer: EntryPacker,
        placed: Callable[[], PageSums] | None = None,
        *,
        wait: bool = True,
        begins: Head | None = None,
    ) -> Head:
        """Make the packer's entries part of the stream; returns its new end.

        `placed()` returns the hashes up to the end of what was placed before (None: nothing was).
        `begins` is where the entries begin; raises `EntriesLost` if the stream was truncated to
        before that in between. Returns as the sync policy says: under "commit" when all is on
        disk, unless `wait` is false; then the entries are visible once they are on disk.

        Raises `WriteFailed` or `FileReplaced` if nothing happened and the call can be repeated,
        `CommitInDoubt` if it is not known what is on disk; the stream is read-only until
        `Durability.repair` succeeds.
        """
        if placed is None:
            head = self.end.commit_on(packer, self, wait)
            if head is not None:
                return head
        policy = self.durability.policy
        sync = wait and policy == "commit"
        if sync or self.uncommitted.syncs_to_grow(packer.total_length):
            with self.owned.syncing:
                return self._commit(packer, placed, policy, sync, begins)
        return self._commit(packer, placed, policy, sync, begins)

    def _commit(
        self,
        packer: EntryPacker,
        placed: Callable[[], PageSums] | None,
        policy: SyncPolicy,
        sync: bool,
        begins: Head | None,
    ) -> Head:
        owned, end, durability, space = self.owned, self.end, self.durability, self.uncommitted
        with owned.lock:
            space.finish_placing(wanted=placed is not None)
            owned.ensure_writable()
            owned.ensure_in_place()
            if begins is not None and begins != end.written:
                raise EntriesLost(owned.path, end.written.entries, begins.entries)
            owned.abandon_truncated()
            if packer.total_length >= space.room.size:
                space.claim()
                space.grow(packer.total_length)
            placed_sums = None if placed is None else placed()
            if placed_sums is not None and placed_sums.chained_from != end.sums.chained_from:
                # Checksums of all pages became known in between.
                placed_sums.rechain(end.sums.chain, end.sums.chained_from)
            visible = sync or policy != "commit"
            durable = end.durable
            try:
                head = end.commit(
                    packer,
                    placed_sums,
                    None if visible else owned.reader.head,
                    sync,
                    owned.wakers if visible else (),
                )
            except OSError as error:
                self.not_committed(error)
            self.pages_finished()  # first: a reader looks for the records
            if visible:
                owned.reader.head = head
            end.unfinished = False
            space.committed()
            if not sync:
                durability.committed(head)
            elif durable + 1 < end.commits and durability.on_settled is not None:
                durability.on_settled()
            # (Another policy may have been set before the lock was acquired.)
            if policy == durability.policy:
                end.synced, end.hidden = sync, not visible
                end.limit = space.room.size - 1
                if not sync:
                    end.limit = min(end.limit, durability.sync_at)
            if visible and owned.inside_wakers:
                owned.wake_inside()
            return head

    def not_committed(self, error: OSError) -> NoReturn:
        """Raise the error for a commit that failed: page and end are as before it."""
        if isinstance(error, EntriesNotWritten):
            self.end.unfinished = False
        else:
            self.owned.header_ahead = True
            self.durability.fail(error)
        raise WriteFailed(self.owned.path, refusal(error)) from error

    def can_commit_at_once(self, size: int) -> bool:
        """Whether an operation of `size` packed bytes fits into the file's present size: a commit
        without waiting is a few writes then, and no sync."""
        offset = self.end.written.length
        following = page_start(page_of(offset) + 1)
        end = offset + size if offset + size <= following else following + size
        return not self.owned.failed and end < self.uncommitted.room.size

    def pages_finished(self) -> None:
        """Write the checksums of pages that became whole by a commit. Requires the lock."""
        pages = self.end.sums.finished
        if pages:
            self.owned.sums.finished(pages)
            pages.clear()

    def sums(self) -> PageSums:
        """A copy of the hashes of the entries up to the end."""
        with self.owned.lock:
            return self.end.sums.copy()

    # The end.

    def close(self) -> None:
        """Sync and close the file, so that a power cut removes nothing.

        Raises `CommitInDoubt` if what is committed cannot be brought to disk, or a commit or
        change was interrupted, and `FileReplaced` if the path does not lead to that file; the
        file is closed nevertheless.
        """
        owned = self.owned
        self.durability.stop()
        self.sums_completer.stop()
        try:
            with owned.exclusive():
                if owned.closed:
                    return
                try:
                    self.uncommitted.finish_placing(wanted=False)
                    self._settle_all()
                    self.uncommitted.release()
                    self._leave_clean()
                except CommitInDoubt as doubt:
                    elsewhere = owned.replaced_at_close()
                    if elsewhere is None:
                        raise
                    what = f"{doubt.what}; besides, {elsewhere.what}"
                    raise CommitInDoubt(owned.path, what) from doubt
                else:
                    elsewhere = owned.replaced_at_close()
                    if elsewhere is not None:
                        raise elsewhere
                finally:
                    owned.close()
        finally:
            self.durability.notify_waiting()

    def _settle_all(self) -> None:
        """On return everything committed is on disk, and nothing else of this writer."""
        owned, end, durability = self.owned, self.end, self.durability
        try:
            if durability.repair() is None:
                durability.sync_open_file()
        except CommitInDoubt as doubt:
            if not owned.repairable:
                # Interrupted by a signal, as a rule. What was acknowledged before is to survive.
                try:
                    owned.file.sync()
                except OSError as error:
                    base, written = end.base.entries, end.written.entries
                    if written > base:
                        what = f"entries {base} to {written - 1} may not be on disk"
                        why = f"{doubt.what}; {what}: {refusal(error)}"
                        raise CommitInDoubt(owned.path, why) from doubt
                raise
            if owned.header_ahead or end.base != end.written:
                raise owned.in_doubt(_CLOSED) from doubt
            # The sync succeeded, and only the header page's last write failed.
            end.durable = end.commits
        if durability.lost_from is not None:
            raise owned.in_doubt(_CLOSED)

    def _leave_clean(self) -> None:
        owned, entries = self.owned, self.end.written.entries
        # Of commits that did not wait, the last write of the last sync shows the entries.
        shown = owned.reader.head.entries
        try:
            owned.write_clean()
            owned.write_writer(open=False, may_lose=owned.may_lose)
            owned.file.sync()
        except OSError as error:
            _log.warning(
                "%s: all %d entries are on disk, but the clean end could not be written (%s); the "
                "next open for writing compares the last entries with their hashes%s",
                owned.path,
                entries,
                refusal(error),
                f", and readers see only the first {shown} until then" if shown < entries else "",
            )
