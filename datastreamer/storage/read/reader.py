"""Reads a stream file: the places of entries, runs of entries, spans to send.

Owns the head and what is known of the pages (`page_directory.py`), which belong together. Reads
committed bytes only: everything is bounded by `Reader.head`, which the owner moves. Knows nothing
of writing, locks or bookmarks. Safe to use from several threads.
"""

from __future__ import annotations

import contextlib
import threading
from bisect import bisect_right
from collections.abc import Callable, Iterator
from functools import wraps
from typing import Concatenate, ParamSpec, TypeVar

from datastreamer._codec import Entry, EntryBatch, scan
from datastreamer._pages import entry_at
from datastreamer.errors import CorruptEntries, DamagedEntry, NotFound, UnknownEntry
from datastreamer.format import (
    ENTRY_HEAD_SIZE,
    ENTRY_HEAD_STRUCT,
    HEADER_PAGE_SIZE,
    PACKET_ENTRY,
    PACKET_PADDING,
    PAGE_SIZE,
    TYPE_BOOKMARK,
    U64_MAX,
    page_of,
    page_start,
)
from datastreamer.storage.disk.file_ops import Readable
from datastreamer.storage.header.records import Head
from datastreamer.storage.read._at_hand import ReadsAtHand
from datastreamer.storage.read._head import HeadCell, SeenState
from datastreamer.storage.read.batch_bounds import Measure, Portion, take
from datastreamer.storage.read.page_directory import Pages
from datastreamer.storage.read.page_scan import Page
from datastreamer.storage.read.spans import Chunk, Cursor, Span
from datastreamer.storage.read.type_scan import Matches, Wanted, look

P = ParamSpec("P")
T = TypeVar("T")


def _steadily(
    read: Callable[Concatenate[Reader, SeenState, P], T],
) -> Callable[Concatenate[Reader, P], T]:
    """A method that is called with a state of the stream: again if entries were changed meanwhile,
    and before damage is believed."""

    @wraps(read)
    def steady(self: Reader, /, *words: P.args, **named: P.kwargs) -> T:
        doubted = False
        while True:
            state = self.cell.now
            if state.turn & 1:
                with self._change:
                    # Still odd: a signal's exception came before the end of the change.
                    self._end_change(Head(0, U64_MAX))
                continue
            try:
                found = read(self, state, *words, **named)
            except DamagedEntry:
                if state.turn == self.turn:
                    if doubted:
                        raise
                    doubted = True
                    state.pages.clear()
            else:
                if state.turn == self.turn:
                    return found

    return steady


class Reader:
    """Committed entries of one file.

    `path` is for messages. Raises `DamagedEntry` with the file's offset if the
    bytes do not match the format in two reads.
    """

    def __init__(
        self,
        file: Readable,
        path: str,
        head: Head,
        *,
        data: Readable | None = None,
        at_hand: ReadsAtHand | None = None,
    ) -> None:
        """`data` and `at_hand` read the same file, for entries that are returned. None: `file`
        does, and no entry is at hand."""
        self._probe = file
        self._file = data = file if data is None else data
        self.at_hand = at_hand
        """Reads at once, by a `state` in whose turn no change runs; None: nothing is ever at hand.
        If `turn` is another afterwards, what it read is no state of the stream."""
        self._path = path
        self.cell = HeadCell(head, Pages(file, path, data))
        # Held while entries are changed.
        self._change = threading.Lock()
        # The number of entries after each truncation.
        self._cuts: list[int] = []

    @property
    def head(self) -> Head:
        """The end of what is read."""
        return self.cell.now.head

    @head.setter
    def head(self, head: Head) -> None:
        self.cell.publish(head)

    @property
    def state(self) -> SeenState:
        """Another object whenever `head` or `turn` are others than before."""
        return self.cell.now

    @property
    def turn(self) -> int:
        """Rises by 2 whenever entries were truncated or changed; odd while they are."""
        return self.cell.now.turn

    def forget(self, head: Head | None = None) -> None:
        """Unknown entries were truncated or changed; the stream now ends at `head`."""
        now = self.cell.now
        self._cuts.append(0)
        self.cell.change(head or now.head, now.turn + 2, self._new_pages())

    def look_again(self) -> None:
        """A damaged page was restored: forget what was read of it."""
        self.cell.now.pages.clear()

    def _new_pages(self) -> Pages:
        return Pages(self._probe, self._path, self._file)

    @contextlib.contextmanager
    def changing(self) -> Iterator[None]:
        """Around a change of entries by the writer's thread: readers wait."""
        with self._change:
            before = self.cell.now
            self.cell.change(before.head, before.turn | 1, before.pages)
            try:
                yield
            finally:
                self._end_change(before.head)

    def _end_change(self, before: Head) -> None:
        now = self.cell.now
        if now.turn & 1:
            if now.head.entries < before.entries:
                self._cuts.append(now.head.entries)
            self.cell.change(now.head, now.turn + 1, self._new_pages())

    # Places of entries.

    @_steadily
    def cursor(self, state: SeenState, number: int) -> Cursor:
        """The place of entry `number`; for the total, the place of the next entry."""
        if number == state.head.entries:
            return Cursor(state.head.length, number)
        if not number:
            return Cursor(HEADER_PAGE_SIZE, 0)
        offset, number_there, _ = state.pages.near(state.head, number)
        if number_there == number:
            return Cursor(offset, number)
        _, offset, at, _ = self._look_up(state, number)
        return Cursor(offset + at, number)

    def packed(self, number: int, *, prefix: bytes = b"", packet_type: int = PACKET_ENTRY) -> bytes:
        """`prefix` and entry `number` with its 17-byte head, as in the file except for the packet
        type."""
        state = self.cell.now
        if 0 <= number < state.head.entries and not state.turn & 1:
            first_numbers, tables = state.pages.directory
            at = bisect_right(first_numbers, number) - 1
            if at >= 0 and number < tables[at].next_number:
                found = tables[at].read(number, self._file.read, prefix, packet_type)
                if found is not None and state.turn == self.turn:
                    return found
        near, _, start, size = self._find(number)
        return b"%b%c%b" % (prefix, packet_type, near[start + 1 : start + ENTRY_HEAD_SIZE + size])

    def page_with(self, number: int) -> tuple[int, int] | None:
        """File offset and size of the part of a page with entries that holds entry `number`; None
        if that is not known without reading the file."""
        state = self.cell.now
        head = state.head
        if not 0 <= number < head.entries:
            return None
        first_numbers, tables = state.pages.directory
        at = bisect_right(first_numbers, number) - 1
        if at < 0:
            return None
        start, behind = tables[at].page_file_offset, tables[at].page_file_offset + PAGE_SIZE
        if number >= tables[at].next_number and behind < head.length:
            # It may be in a later page, unless that one is known to begin after it.
            following = tables[at + 1].page_file_offset if at + 1 < len(tables) else 0
            if following != behind:
                return None
        return start, min(behind, head.length) - start

    @_steadily
    def page_holding(self, state: SeenState, number: int) -> int:
        """The page of entry `number`, found by the first entries of pages alone."""
        return state.pages.holding(state.head, number)

    def entry(self, number: int) -> Entry:
        near, _, at, size = self._find(number)
        kind = ENTRY_HEAD_STRUCT.unpack_from(near, at)[2]
        at += ENTRY_HEAD_SIZE
        return Entry(number, kind, near[at : at + size])

    def first_event(self, number: int) -> Entry | None:
        """The first entry from `number` on that is not a bookmark."""
        cursor, size = self.cursor(number), 4096
        while cursor.number < self.head.entries:
            batch, cursor = self.run(cursor, size)
            for at, kind in enumerate(batch.types):
                if kind != TYPE_BOOKMARK:
                    return batch[at]
            size = min(2 * size, PAGE_SIZE)
        return None

    def _look_up(self, state: SeenState, number: int) -> tuple[bytes, int, int, int]:
        """Bytes that hold entry `number`, their file offset, the offset of its head in them, its
        data's size."""
        offset, number_there, limit = state.pages.near(state.head, number)
        near = self._file.read(limit - offset, offset)
        try:
            at, size, _ = entry_at(near, number, start_number=number_there)
        except CorruptEntries as error:
            raise DamagedEntry(self._path, offset + error.offset, error.reason) from None
        return near, offset, at, size

    _find = _steadily(_look_up)

    def first_number(self, page: int) -> int:
        """The number of the entry that data page `page` starts with."""
        return self.cell.now.pages.first_number(page)

    # Runs and spans.

    @_steadily
    def run(
        self, state: SeenState, cursor: Cursor, max_bytes: int = PAGE_SIZE
    ) -> tuple[EntryBatch, Cursor]:
        """The whole entries from `cursor`, at most `max_bytes` of file, and the place after.

        They are in one page, so their bytes are contiguous. At least one entry if any is
        committed after the cursor, even one larger than `max_bytes`; none after damage, which
        raises only if a run begins with it.
        """
        (offset, number), head = cursor, state.head
        if number > head.entries:
            raise DamagedEntry(
                self._path, offset, f"entry {number} is due, and there are {head.entries}"
            )
        size = max_bytes
        while True:
            until = min(head.length, page_start(page_of(offset) + 1), offset + size)
            near = self._file.read(max(0, until - offset), offset)
            try:
                batch = scan(near, number, file_offset=offset)
            except CorruptEntries as error:
                batch = scan(near, number, file_offset=offset, end=error.offset)
                behind = page_start(page_of(offset) + 1)
                head_there = behind + ENTRY_HEAD_SIZE <= head.length
                following = self._probe.read(ENTRY_HEAD_SIZE, behind) if head_there else b""
                batch = self._in_place(near, offset, batch, error.reason, following)
            else:
                if batch and not batch.more and batch.end < len(near):
                    batch = self._before_padding(state, near, offset, batch)
            place = Cursor(offset + batch.end, batch.next_number)
            if batch or number == head.entries:
                break
            if not near:
                raise DamagedEntry(
                    self._path,
                    offset,
                    f"the data ends at entry {number}, the header counts {head.entries}",
                )
            if batch.more and size < PAGE_SIZE:
                size = max(batch.needed, 2 * size)
            elif batch.more:
                raise DamagedEntry(self._path, offset, f"entry {number} is cut off")
            else:
                offset = self._past_padding(state, Cursor(offset, number))
        if place.offset >= head.length or place.number >= head.entries:
            try:
                place = self._end(place, head)
            except DamagedEntry:
                if place.number != head.entries or len(batch) < 2:
                    raise
                # It is the last entry that does not end where it should.
                place = Cursor(offset + batch.offsets[-1], head.entries - 1)
                batch = batch[:-1]
        return batch, place

    def _in_place(
        self, near: bytes, offset: int, batch: EntryBatch, what: str, following: bytes = b""
    ) -> EntryBatch:
        """Entries before damage, read at `offset`, without the last one if the next is not where it
        ends. `following` is as in `Page.broken_at`. Raises `DamagedEntry` if none is left."""
        found = Page(offset, near, batch, None).broken_at(what, following)
        if not found.batch:
            assert found.broken is not None
            raise DamagedEntry(self._path, offset + found.broken[0], found.broken[1])
        return found.batch

    def _before_padding(
        self, state: SeenState, near: bytes, offset: int, batch: EntryBatch
    ) -> EntryBatch:
        """The same for entries before padding, which may be the first byte of a length if the entry
        before is parsed one byte too long."""
        behind = page_start(page_of(offset) + 1)
        if behind < state.head.length:
            if state.pages.head_at(behind) == batch.next_number:
                return batch
        elif batch.next_number == state.head.entries:
            return batch
        what = f"padding, but the next page does not begin with entry {batch.next_number}"
        return self._in_place(near, offset, batch, what)

    def _end(self, place: Cursor, head: Head) -> Cursor:
        """The head's own place, if the entries that end at `place` are the stream's last.

        After a truncation to the first entry of a page the head is there, after the padding of
        the page before.
        """
        fits = place.number == head.entries and (
            place.offset == head.length
            or (
                page_start(page_of(place.offset) + 1) == head.length
                and self._padding_at(place.offset)
            )
        )
        if not fits:
            raise DamagedEntry(
                self._path,
                place.offset,
                f"the data ends before entry {place.number} at byte {place.offset}, the header "
                f"says entry {head.entries} at byte {head.length}",
            )
        return Cursor(*head)

    def _padding_at(self, offset: int) -> bool:
        """Whether there is a padding mark; never at the start of a page."""
        inside = offset > page_start(page_of(offset))
        return inside and self._probe.read(1, offset) == bytes([PACKET_PADDING])

    def chunk(self, cursor: Cursor, max_bytes: int) -> Chunk:
        """As `run`, with the bytes themselves and their offset."""
        batch, following = self.run(cursor, max_bytes)
        data = memoryview(batch.base)[batch.start : batch.end]
        start = cursor.offset
        if batch and start + len(data) != following.offset and self._padding_at(start):
            start = page_start(page_of(start) + 1)
        return Chunk(start, data, batch, following)

    def batches(
        self, start: int, stop: int | None = None, max_bytes: int = PAGE_SIZE
    ) -> Iterator[EntryBatch]:
        """Runs of the entries from `start` to `stop` (excluded; None: the head now)."""
        cuts = len(self._cuts)
        began = self.cell.now
        total = began.head.entries
        stop = total if stop is None else min(stop, total)
        if start < 0 or start > total:
            raise UnknownEntry(start, total)
        if start >= stop:
            return
        try:
            cursor = self.cursor(start)
        except UnknownEntry:
            raise truncated_below(start) from None
        while cursor.number < stop:
            try:
                batch, cursor = self.run(cursor, max_bytes)
            except DamagedEntry:
                if began.turn == self.turn:
                    raise
                batch = None
            if not batch or any(cut < cursor.number for cut in self._cuts[cuts:]):
                raise truncated_below(cursor.number)
            if cursor.number > stop:
                batch = batch[: stop - batch.first_number]
            yield batch

    @_steadily
    def span(self, state: SeenState, cursor: Cursor) -> Span:
        """The entries from `cursor` to the end of its page or to the head, unread.

        Empty (start = end) if nothing is committed after the cursor. The entry at the cursor is
        read; the page directory confirms the others.
        """
        return self._span(state, cursor)

    def _span(self, state: SeenState, cursor: Cursor) -> Span:
        offset, number = cursor
        head, pages = state.head, state.pages
        if number >= head.entries:
            return Span(offset, offset, cursor)
        first = pages.head_at(offset)
        if first != number:
            offset = self._past_padding(state, cursor)
        page = page_of(offset)
        following = page_start(page + 1)
        if head.length < following:
            return Span(offset, head.length, Cursor(*head))
        at_head = head.length == following
        beyond = head.entries if at_head else pages.first_number(page + 1)
        end = pages.end_of(page, beyond)
        return Span(offset, end, Cursor(following, beyond))

    @_steadily
    def portion(self, state: SeenState, wanted: Measure) -> Portion:
        """As many entries as `wanted` allows: counted and measured, and read if they are few."""

        def span(offset: int, number: int) -> Span:
            return self._span(state, Cursor(offset, number))

        return take(wanted, state.head, self._path, self._file.read, span)

    @_steadily
    def matches(self, state: SeenState, wanted: Wanted) -> Matches:
        """The matches of `wanted` in the next part of the file."""
        return look(wanted, state.head, self._path, self._file.read)

    def raw(self, start: int, count: int) -> bytes:
        """`count` bytes of entries from file offset `start` on."""
        data = self._file.read(count, start)
        if len(data) < count:
            raise DamagedEntry(self._path, start, "the file ends here")
        return data

    def _past_padding(self, state: SeenState, cursor: Cursor) -> int:
        """The next page's start, if the cursor is at padding that can be believed."""
        offset, number = cursor
        if not self._padding_at(offset):
            raise DamagedEntry(self._path, offset, f"entry {number} is due, and is not there")
        following = page_start(page_of(offset) + 1)
        if following >= state.head.length or state.pages.head_at(following) != number:
            raise DamagedEntry(
                self._path,
                offset,
                f"padding, but the next page does not begin with entry {number}",
            )
        return following

    def boundary(self, span: Span, number: int, offset: int) -> Cursor:
        """The first place between two entries of `span` at or after `offset`.

        `number` is that of the span's first entry.
        """
        content = self._file.read(min(span.end - span.start, PAGE_SIZE), span.start)
        try:
            batch = scan(content, number, file_offset=span.start)
        except CorruptEntries as error:
            raise DamagedEntry(self._path, span.start + error.offset, error.reason) from None
        for at, start in enumerate(batch.offsets):
            if span.start + start >= offset:
                return Cursor(span.start + start, number + at)
        return span.next


def truncated_below(number: int) -> NotFound:
    """The error of an iteration whose next entry was `number`."""
    return NotFound(f"entry {number} was removed by a truncation during the read")


def end_of(reader: Reader, entries: int) -> int:
    """The file offset after the first `entries` entries."""
    if not entries:
        return HEADER_PAGE_SIZE
    return reader.cursor(entries - 1).offset + len(reader.packed(entries - 1))
