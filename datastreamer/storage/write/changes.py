"""Changes of what is committed: truncation, an update in place, entries that are given up.

Owns the order of their steps: a crash in the middle of one leaves the old or the new state, and
readers learn from the epoch that entries were truncated or changed. ``docs/FILE.md`` has the
reasons. Knows nothing of commits.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from itertools import pairwise

from xxhash import xxh3_64_intdigest, xxh3_128_digest

from datastreamer._codec import Entry, scan
from datastreamer.errors import (
    BadEntryType,
    DamagedEntry,
    EntriesLost,
    FileReplaced,
    UpdateRefused,
    WriteFailed,
)
from datastreamer.format import (
    HEADER_PAGE_SIZE,
    PAGE_SIZE,
    TYPE_BOOKMARK,
    page_of,
    page_start,
)
from datastreamer.storage.disk.atomic_file import keep_beside
from datastreamer.storage.disk.bad_sectors import read_around
from datastreamer.storage.header import records
from datastreamer.storage.header import undo_journal as journal
from datastreamer.storage.header.judgement import hash_last_page, sums_up_to
from datastreamer.storage.header.records import Change, Head
from datastreamer.storage.header.undo_journal import Undo
from datastreamer.storage.pages._page_sums import PageSums
from datastreamer.storage.pages.hashes import SealedTail, last_page
from datastreamer.storage.pages.sidecar import PageSum
from datastreamer.storage.write.owned_file import OwnedFile, refusal
from datastreamer.storage.write.sync_policy import Durability
from datastreamer.storage.write.undo_after_crash import keep_journal, opened_sums

_log = logging.getLogger(__name__)


class ChangeWriter:
    """Truncates and updates the committed entries of one stream file."""

    def __init__(self, owned: OwnedFile, durability: Durability) -> None:
        self._owned = owned
        self._durability = durability

    def truncate(self, head: Head, settle: Callable[[], None]) -> None:
        """Truncate to an end that `end_at` gave; durable on return. `settle` is that of
        `Floor.truncating`."""
        owned = self._owned
        with owned.exclusive():
            owned.ensure_writable()
            self._durability.sync()
            self._cut(head, self._sums_up_to(head), settle)

    def _cut(
        self,
        head: Head,
        sums: PageSums,
        settle: Callable[[], None],
        begin: Callable[[], None] = lambda: None,
    ) -> None:
        owned, before = self._owned, self._owned.written.length
        marks = owned.summaries.marks_of(sums.page)
        self._invalidate_sums(lambda: owned.sums.before_truncation(sums.page, owned.epoch + 1))
        begin()
        # From then on nothing that is asked of the last page waits for the archive, or fails by it.
        self._change(lambda: None, head, head.entries, None, sums, lambda: sums, settle)
        owned.sums.changed(owned.epoch)
        owned.summaries.truncated(marks)
        owned.note_truncated(before)

    def update(self, number: int, offset: int, old: bytes, new: bytes) -> None:
        """Replace the `old` bytes of entry `number`'s data at `offset`; durable on return. After
        a crash the entry has all old or all new bytes."""
        owned = self._owned
        with owned.exclusive():
            owned.ensure_writable()
            self._durability.sync()
            # No range of the record may cover what is about to change: after a power cut its
            # hash would not match.
            try:
                owned.file.sync()
            except OSError as error:
                self._durability.fail(error)
                raise WriteFailed(owned.path, refusal(error)) from error
            page = page_of(offset)
            undo = Undo(owned.stream_id, owned.epoch, owned.header.pack(), offset, old, new)
            self._clear_journal()
            marks = owned.summaries.marks_of(page)
            self._invalidate_sums(lambda: owned.sums.before_update(page, owned.epoch + 1))
            owned.end.changing(lambda: self._update(number, offset, undo))
            owned.summaries.changed(page, marks)

    def _update(self, number: int, offset: int, undo: Undo) -> None:
        owned, new, page = self._owned, undo.new, page_of(offset)
        try:
            journal.put(owned.disk, owned.journal_path, undo, owned.file.access())
        except OSError as error:
            if owned.disk.exists(owned.journal_path + journal.SUFFIX):
                # The next open would undo an update that did not begin.
                owned.end.interrupt(f"{refusal(error)}; open the stream again to go on")
                raise owned.in_doubt() from error
            owned.end.ended()
            raise WriteFailed(owned.path, refusal(error)) from error
        try:
            # After the journal is made: if another file is at the path, the next open there
            # must not find the journal of this one.
            owned.ensure_in_place(always=True)
        except FileReplaced:
            with contextlib.suppress(OSError):
                self._remove_journal(undo)
            owned.end.ended()
            raise

        def write() -> None:
            owned.file.part(offset, offset + len(new))
            owned.file.write(new, offset)

        def clean_up() -> None:
            # A process that finds no journal has to find the mark, after a power cut too.
            owned.file.sync()
            self._remove_journal(undo)

        before = owned.end.sums
        self._change(
            *(write, owned.head, number, number + 1, before),
            lambda: self._sums_after(page),
            clean_up,
        )

    def _invalidate_sums(self, work: Callable[[], None]) -> None:
        """Durably remove the checksums of what is about to change. Raises `WriteFailed`."""
        try:
            work()
        except OSError as error:
            raise WriteFailed(self._owned.path, refusal(error)) from error

    def _sums_up_to(self, head: Head) -> PageSums:
        """The hashes of the entries up to an earlier end. Raises `DamagedEntry`."""
        if not head.entries:
            return PageSums()
        owned, page = self._owned, last_page(head.length)
        now, known = owned.end.sums, owned.sums.get(page)
        same = page == now.page
        chain, chained_from = (
            (now.chain, now.chained_from) if same else owned.sums.chain_before(page)
        )
        if known is not None and known.next_number == head.entries:
            # All of the page remains, also if it is damaged.
            end = page_start(page) + known.end
            tail = SealedTail(known.digest)
            return PageSums(page, chain=chain, chained_from=chained_from, end=end, tail=tail)
        sums = hash_last_page(owned.file, head, chain, chained_from)
        if sums is None:
            what = f"no entry {head.entries - 1} ends at byte {head.length}"
            raise DamagedEntry(owned.path, page_start(page), what)
        return sums

    # Damaged pages.

    def updatable(self, number: int, type: int, new: bytes) -> Entry:
        """The entry `number`, if an update may replace its data by `new`. Raises as
        `DataStream.update_entry`."""
        owned = self._owned
        if 0 <= number < owned.written.entries:
            self._ensure_undamaged(owned.page_of_entry(number))
        entry = owned.reader.entry(number)
        if entry.type == TYPE_BOOKMARK:
            raise UpdateRefused(f"entry {number} is a bookmark, which cannot be updated")
        if type == TYPE_BOOKMARK:
            raise BadEntryType("0xb0 is the type of bookmarks")
        if entry.type != type:
            raise UpdateRefused(f"entry {number} is of type {entry.type}, not {type}; keep it")
        if len(entry.data) != len(new):
            found = f"entry {number} has {len(entry.data)} bytes, not {len(new)}"
            raise UpdateRefused(f"{found}; keep its length")
        return entry

    def end_at(self, number: int) -> Head:
        """The end of the first `number` entries, which are not all, for a truncation. Nothing is
        read of a page that begins with the next entry. Raises `DamagedEntry`."""
        if not number:
            return Head(HEADER_PAGE_SIZE, 0)
        owned = self._owned
        page = owned.page_of_entry(number)
        end = owned.end_before(page)
        if end == (page_start(page), number):
            return end
        self._ensure_undamaged(page)
        return Head(*owned.reader.cursor(number))

    def _ensure_undamaged(self, page: int) -> None:
        """Raises `DamagedPage` if a page is not what was written: its new checksum would hide the
        damage."""
        command = f"`datastreamer repair {self._owned.path} --from HOST:PORT`"
        advice = f": it is damaged, and is not changed; {command} restores it"
        damage = self._owned.damage_of(page, advice)
        if damage is not None:
            raise damage

    def replace_page(self, page: int, entries: bytes) -> str:
        """Write other entries over those of a page that does not match its checksum; durable on
        return. The damaged bytes are in the file whose path is returned (empty: the page is whole).

        After a crash the page is replaced, or is damaged. The epoch rises by more than the number
        of entries that differ, and no change says which: copies of the stream have to compare.
        Raises `UpdateRefused` if the entries do not have the numbers and the size of those that the
        page held, and `WriteFailed`.
        """
        owned = self._owned
        with owned.exclusive():
            owned.ensure_writable()
            self._durability.sync()
            damage = owned.damage_of(page)
            if damage is None:
                return ""
            sums, start = owned.end.sums, page_start(page)
            known = None if page == sums.page else owned.sums.get(page)
            if not _fits(owned, page, known, entries):
                raise UpdateRefused(f"{damage}: other entries do not fit in their place")
            file, marks = read_around(owned.file, owned.path), owned.summaries.marks_of(page)
            old = file.read(PAGE_SIZE, start)
            content = entries
            if known is not None or owned.written.length == start + PAGE_SIZE:
                content = entries.ljust(PAGE_SIZE, b"\0")
            rise = _differing(old, entries) + 2
            try:
                kept = keep_beside(
                    owned.disk, owned.path, "repair", owned.page, file, start, start + len(old)
                )
                # (The last page has no record.)
                owned.sums.before_update(sums.page, owned.epoch + rise)
            except OSError as error:
                raise WriteFailed(owned.path, refusal(error)) from error
            digest, replaced = xxh3_128_digest(entries), sums.copy()
            chain = owned.sums.chain_with(page, digest, sums.page) if known is not None else None
            if chain is not None:
                replaced.rechain(*chain)

            def write() -> None:
                # The epoch, and both chains, are on disk before the record and an entry change:
                # until the page is written, one of them proves that it is damaged.
                owned.file.sync()
                if known is not None:
                    padding = xxh3_64_intdigest(content[known.end :])
                    record = known._replace(digest=digest, padding=padding)
                    with opened_sums(owned.disk, owned.journal_path, owned.file) as sidecar:
                        if sidecar is not None:
                            sidecar.put(page, [record], owned.stream_id)
                            sidecar.file.sync()
                    owned.sums.proven.put(page, digest)
                    owned.sums.rechain(page)
                owned.file.part(start, start + len(content))
                owned.file.write(content, start)

            # For those that look for the change it is a truncation of no entries.
            self._change(
                *(write, owned.head, owned.head.entries, None, replaced),
                lambda: self._sums_after(page),
                rise=rise,
                base=sums,
            )
            owned.pages.written(page)
            owned.summaries.changed(page, marks)
        return kept

    def _sums_after(self, page: int) -> PageSums:
        """The hashes of the entries up to the end, after entries of a page were replaced."""
        owned, sums = self._owned, self._owned.end.sums
        owned.sums.changed(owned.epoch, None if page == sums.page else page)
        if page != sums.page:
            sums = sums.copy()
            sums.rechain(*owned.sums.chain_before(sums.page))
            return sums
        fresh = hash_last_page(owned.file, owned.written, sums.chain, sums.chained_from)
        assert fresh is not None, "an update leaves the entries whole"
        return fresh

    def _clear_journal(self) -> None:
        """Set aside any file in the journal's place: no update of this stream is under way.
        Raises `WriteFailed`."""
        owned = self._owned
        owned.ensure_in_place(always=True)
        try:
            if owned.disk.exists(owned.journal_path + journal.SUFFIX):
                keep_journal(owned.disk, owned.journal_path, owned.path)
        except OSError as error:
            why = f"{owned.journal_path}{journal.SUFFIX} is in the way of the journal of an update"
            raise WriteFailed(owned.path, f"{why}: {refusal(error)}; move it elsewhere") from error

    def _remove_journal(self, undo: Undo) -> None:
        owned = self._owned
        journal.remove(owned.disk, owned.journal_path, undo, owned.file.access())

    def give_up(self, head: Head) -> EntriesLost:
        """Truncate to `head`, after which the entries could not be brought to disk."""
        owned = self._owned
        with owned.exclusive():
            loss = EntriesLost(owned.path, head.entries, owned.written.entries)
            sums = sums_up_to(owned.file, head, owned.end.base_sum)
            if sums is None:
                raise owned.in_doubt("the last page is damaged; open the stream again to go on")
            self._cut(head, sums, lambda: None, lambda: self._durability.give_up(loss))
            with contextlib.suppress(OSError):
                owned.clear_doubt()
            _log.error("%s", loss)
            return loss

    def _change(
        self,
        write: Callable[[], None],
        head: Head,
        start: int,
        stop: int | None,
        before: PageSums,
        after: Callable[[], PageSums],
        clean_up: Callable[[], None] = lambda: None,
        *,
        rise: int = 1,
        base: PageSums | None = None,
    ) -> None:
        """Raise the epoch by `rise` around a change of the entries from `start` to `stop`, which
        leaves `head`; call `clean_up` once it is on disk. The hashes up to `head` are `before`
        (with `base`: or these), and `after()` once `write` has written."""
        owned = self._owned

        def work() -> None:
            owned.epoch += rise
            change = Change(owned.epoch, start, stop)
            span = records.put_change(owned.page, change)
            try:
                # First: a reader that sees the epoch finds the change.
                owned.write_span(span)
                owned.put_header(head, before.sum(), None if base is None else base.sum())
                owned.write_header()
                write()
                owned.file.sync()
                sums = after()
                owned.put_header(head, sums.sum())
                owned.put_synced(head)
                owned.write_committed()
                clean_up()
            except OSError as error:
                # The change may be half done; the next open decides. Until then readers here have
                # the old entries, and their epoch.
                owned.epoch -= rise
                owned.end.interrupt(
                    f"{refusal(error)} in the middle of a truncation or update; open the stream "
                    "again"
                )
                raise owned.in_doubt() from error
            owned.known_changes.append(change)
            owned.end.written = head
            owned.end.sums = sums
            owned.end.all_on_disk(head)
            owned.reader.head = head

        with owned.reader.changing():
            owned.end.changing(work)
            owned.pages_changed()
        owned.wake_all()


def _fits(owned: OwnedFile, page: int, known: PageSum | None, entries: bytes) -> bool:
    """Whether these entries have the numbers and the size of those of a page. `known` is its
    record; None: it is the last page."""
    start, size, written = page_start(page), len(entries), owned.written
    if not entries:
        return False
    batch = scan(entries, None)
    first, stop = batch.first_number, batch.next_number if batch.end == size else -1
    if owned.end_before(page) != (start, first):
        return False
    if known is not None:
        return (size, stop) == (known.end, known.next_number)
    held = written.length - start
    # After a page to which nothing is added the stream ends at the start of the next.
    return stop == written.entries and (size == held or size <= held == PAGE_SIZE)


def _differing(old: bytes, entries: bytes) -> int:
    """How many of these entries differ from the bytes in their places in `old`."""
    begins = scan(entries, None).offsets
    spans = pairwise([*begins, len(entries)])
    return sum(old[begin:end] != entries[begin:end] for begin, end in spans)
