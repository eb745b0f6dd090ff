"""The one writer of a stream file: commits operations to it, and closes it.

Owns the order of writes that makes a commit whole or absent, and holds the parts that do the
rest. `opening.py` makes it. ``docs/FILE.md`` has the reasons. Knows nothing of bookmarks' keys or
of the state of operations; `atomic_op.py` does.
"""

from __future__ import annotations

import logging
from typing import NoReturn

from datastreamer._packer import EntryPacker
from datastreamer.errors import CommitInDoubt, EntriesLost, WriteFailed
from datastreamer.format import page_of, page_start
from datastreamer.storage.disk._commit import EntriesNotWritten
from datastreamer.storage.pages.completer import SumsCompleter
from datastreamer.storage.write._lane import Appender
from datastreamer.storage.write.changes import ChangeWriter
from datastreamer.storage.write.floor import Floor
from datastreamer.storage.write.owned_file import OwnedFile, refusal
from datastreamer.storage.write.source_records import SourceRecords
from datastreamer.storage.write.sync_policy import Durability, SyncPolicy
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
        self.floor = Floor(owned, self.durability)
        self.changes = ChangeWriter(owned, self.durability)
        self.notes = SourceRecords(owned, self.durability)
        self.sums_completer = SumsCompleter(owned)

    def prepare(self, packer: EntryPacker, operation: Appender, syncing: bool) -> bool:
        """Answer what a commit has to know first, and admit it: the one slow branch of a commit,
        which has changed nothing if this raises. Requires the lock.

        False if the file has to grow, with a sync, and the caller does not hold `syncing`. Raises
        `EntriesLost` if the stream was truncated to before the operation in between, `WriteFailed`
        or `FileReplaced` if the call can be repeated, and `CommitInDoubt` if it is not known what
        is on disk; the stream is read-only until `Durability.repair` succeeds.
        """
        owned, end, space, placed = self.owned, self.end, self.uncommitted, operation.placed
        space.finish_placing(wanted=placed is not None)
        owned.ensure_writable()
        owned.ensure_in_place()
        if operation.start != end.written:
            packer.close()
            space.release()
            raise EntriesLost(owned.path, end.written.entries, operation.start.entries)
        if placed is not None:
            if operation.failures != end.failures:
                # A later sync may succeed without having written what the system marked clean
                # then.
                raise WriteFailed(
                    owned.path,
                    "a sync failed, and a part of the operation is no longer in memory; roll it "
                    "back and begin it again",
                )
            if placed.chained_from != end.sums.chained_from:
                # Checksums of all pages became known in between.
                placed.rechain(end.sums.chain, end.sums.chained_from)
        owned.abandon_truncated()
        if packer.total_length >= space.room.size:
            if not syncing and end.waits:
                return False
            space.claim()
            space.grow(packer.total_length)
        end.admit(space.room.size - 1)
        return True

    def not_committed(self, error: OSError) -> NoReturn:
        """Raise the error for a commit that failed: page and end are as before it."""
        if isinstance(error, EntriesNotWritten):
            self.end.ended()
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
            self.sums_completer.finish()
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
            if end.state != "in doubt":
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
