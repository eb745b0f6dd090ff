"""Selected entries: the answers to requests, and the frames of a stream.

Owns what goes into a frame, how much of the stream is scanned for it before other tasks run, and
the frame that a client is being sent. `catch_up.py` and `long_answers.py` send it and wait for
commits.
"""

from __future__ import annotations

from typing import NamedTuple

import trio

from datastreamer._filtered import Choice
from datastreamer.errors import DamagedPage
from datastreamer.format import U32_MAX
from datastreamer.protocol import messages
from datastreamer.protocol.commands import FilteredRead
from datastreamer.protocol.messages import encode_chosen_head
from datastreamer.selection.clauses import Selection
from datastreamer.server.limits import Limits
from datastreamer.server.streaming.broadcast import Broadcast
from datastreamer.server.streaming.turns import Changed
from datastreamer.storage.objects.waits import NotAtHand, at_hand_only
from datastreamer.storage.read.batch_bounds import KEPT_BYTES
from datastreamer.storage.read.reader import Reader
from datastreamer.storage.read.spans import Cursor
from datastreamer.storage.read.type_scan import SLICE_BYTES, Wanted

# Bytes of the file scanned for one request, and for one frame of a stream.
_READ_SCAN = 16 << 20
_FRAME_SCAN = 4 << 20
# Frames at the end of the stream that are kept for other clients with the same filter.
_SHARED = 16
# Interval of empty frames at the end of the stream, which report how far was scanned.
PROGRESS_SECONDS = 0.1
# The entries of a frame are kept in memory for a client that reads nothing for this long.
PATIENCE_SECONDS = 1.0


class Frame(NamedTuple):
    """The entries found from entry `first` up to `stop`: their number and their `size` in bytes.
    The bytes are `data`; if that is None, one run in the file from offset `start` to `stop`. The
    scan began at `begin`."""

    first: int
    begin: Cursor
    stop: Cursor
    entries: int
    size: int
    data: bytes | None
    start: int

    def head(self, total: int, epoch: int) -> bytes:
        return encode_chosen_head(
            self.entries, self.first, self.stop.number, total, epoch, self.size
        )


async def _look(
    broadcast: Broadcast,
    reader: Reader,
    choice: Choice,
    first: int,
    begin: Cursor,
    stop: int,
    *,
    most_entries: int,
    most_bytes: int,
    scan: int,
) -> Frame:
    """The frame from `begin` on, ending at entry `stop` at the latest. Raises `Changed`, and what
    the stream raises; no other task runs between the last look at the stream and the return."""
    place, entries, size, scanned = begin, 0, 0, 0
    parts: list[bytes] = []
    with broadcast.turns.one():
        while True:
            wanted = Wanted(
                *place, stop, choice, most_entries - entries, most_bytes - size, not entries
            )
            found = await broadcast.read_from(reader.matches, wanted, place.offset, SLICE_BYTES)
            if broadcast.turns.look():
                raise Changed
            broadcast.counts.filter_scanned += found.scanned
            scanned += found.scanned
            place = Cursor(found.offset, found.number)
            if found.data is None:
                return Frame(first, begin, place, found.entries, found.size, None, found.start)
            if found.entries:
                parts.append(found.data)
                entries, size = entries + found.entries, size + found.size
            if found.full or place.number >= stop or scanned >= scan:
                break
            await trio.lowlevel.checkpoint()
    data = parts[0] if len(parts) == 1 else b"".join(parts)
    return Frame(first, begin, place, entries, size, data, 0)


async def _look_up_to_damage(
    broadcast: Broadcast,
    reader: Reader,
    choice: Choice,
    first: int,
    begin: Cursor,
    stop: int,
    **limits: int,
) -> Frame:
    """As `_look`; the frame ends before a damaged page, unless it would begin in one."""
    while True:
        try:
            return await _look(broadcast, reader, choice, first, begin, stop, **limits)
        except DamagedPage as error:
            if not begin.number < error.first < stop:
                raise
            broadcast.pages.found(error)
            stop = error.first


class FilteredReads:
    """Answers one client's `FilteredRead` requests."""

    def __init__(self, broadcast: Broadcast, limits: Limits) -> None:
        self._broadcast = broadcast
        self._stream = broadcast.stream
        self._most_entries = min(limits.max_batch_count, U32_MAX)
        self._most_bytes = min(limits.max_batch_bytes, KEPT_BYTES)
        # The end of the last answer, where the next one begins if the stream is unchanged.
        self._place = Cursor(0, 0)
        self._changes = -1

    async def read(self, query: FilteredRead, looked: Frame | None = None) -> Frame | None:
        """The answer to `query` in the stream as it is now; None if it begins past the end.
        `looked` is the empty frame of an earlier scan for the same query, if no entry was changed
        since. Raises what the stream raises.

        No other task runs between the last look at the stream and the return.
        """

        async def read() -> Frame | None:
            nonlocal looked
            before, looked = looked, None
            return await self._read(query, before)

        return await self._broadcast.turns.steadily(read)

    async def _read(self, query: FilteredRead, looked: Frame | None) -> Frame | None:
        if query.from_entry > self._stream.total_entries:
            return None
        number, reader = query.from_entry, self._stream.reader
        head = reader.head
        stop = min(query.stop, head.entries)
        if looked is not None:
            begin = looked.stop
        elif stop <= number:
            begin = Cursor(head.length, number)
        elif self._place.number == number and self._changes == reader.turn:
            begin = self._place
        else:
            begin = await self._broadcast.read(reader.cursor, number)
        if stop <= begin.number:
            return Frame(number, begin, begin, 0, 0, b"", 0)
        changes = reader.turn
        frame = await _look_up_to_damage(
            self._broadcast,
            reader,
            Choice(query.where),
            number,
            begin,
            stop,
            most_entries=min(query.max_count or self._most_entries, self._most_entries),
            most_bytes=min(query.max_bytes or self._most_bytes, self._most_bytes),
            scan=_READ_SCAN,
        )
        self._place, self._changes = frame.stop, changes
        return frame

    def begins_with(self, frame: Frame) -> bytes:
        """Result and head of the answer with `frame`."""
        stream = self._stream
        self._broadcast.counts.filter_sent += frame.size
        return messages.OK + frame.head(stream.reader.head.entries, stream.epoch)


class FilteredSending:
    """The frames that a streaming client with a selection is sent, one after the other."""

    def __init__(self, broadcast: Broadcast, where: Selection) -> None:
        self.frame: Frame | None = None
        """The frame that is being sent."""
        self._broadcast = broadcast
        self._choice = Choice(where)
        # The frame's bytes without a long run, and how many of them are sent.
        self._head = b""
        self._data: bytes | None = None
        self._sent = 0
        # The end of a scan that found nothing and was not reported yet.
        self._looked: Cursor | None = None
        self._changes = -1
        self._reported_at = -PROGRESS_SECONDS

    async def find(self, cursor: Cursor, *, zero_copy_before: int, hurried: bool) -> float | None:
        """Make the next frame, from `cursor` on; or return how many seconds to wait for new entries
        before the next call.

        The frame refers to a long run in the file if the run ends at or before file offset
        `zero_copy_before`. With `hurried` an empty frame is reported at once.
        """
        broadcast, view = self._broadcast, self._broadcast.view
        if self._changes != view.turn:
            self._looked, self._changes = None, view.turn
        begin = self._looked or cursor
        total = view.head.entries
        if begin.number >= total:
            frame = Frame(cursor.number, cursor, begin, 0, 0, b"", 0)
        else:
            try:
                frame = await self._find(cursor.number, begin, total)
            except Changed:
                return 0.0
        now = trio.current_time()
        if not frame.entries and frame.stop.number >= total and not hurried:
            self._looked = frame.stop
            wait = self._reported_at + PROGRESS_SECONDS - now
            if wait > 0:
                return wait
        if frame.data is None and frame.stop.offset > zero_copy_before:
            try:
                with at_hand_only():
                    frame = frame._replace(data=view.raw(frame.start, frame.size))
            except NotAtHand:
                return 0.0  # it was dropped since
        self._looked = None
        self._reported_at = now
        self.frame = frame
        self._head = frame.head(broadcast.stream.reader.head.entries, broadcast.stream.epoch)
        self._data = frame.data or b""
        self._sent = 0
        return None

    async def _find(self, first: int, begin: Cursor, total: int) -> Frame:
        broadcast, what = self._broadcast, (self._choice.where, begin)
        known: Frame | None = broadcast.found.get(what)
        if known is not None:
            return known._replace(first=first)
        frame = await _look_up_to_damage(
            broadcast,
            broadcast.view,
            self._choice,
            first,
            begin,
            total,
            most_entries=U32_MAX,
            most_bytes=KEPT_BYTES,
            scan=_FRAME_SCAN,
        )
        at_end = frame.stop.number >= total and frame.data is not None
        if at_end and len(broadcast.found) < _SHARED:
            broadcast.found[what] = frame
        return frame

    async def rest(self) -> memoryview:
        """The bytes of the frame that are still to be sent, without a long run. Empty while the
        stream is being changed."""
        frame = self.frame
        assert frame is not None
        if self._data is None:
            try:
                again = await _look(
                    self._broadcast,
                    self._broadcast.view,
                    self._choice,
                    frame.first,
                    frame.begin,
                    frame.stop.number,
                    most_entries=frame.entries,
                    most_bytes=frame.size,
                    scan=2 * _FRAME_SCAN,
                )
            except Changed:
                return memoryview(b"")
            data = again.data
            if data is None:
                try:
                    with at_hand_only():
                        data = self._broadcast.view.raw(again.start, again.size)
                except NotAtHand:
                    return memoryview(b"")
            assert (again.stop.number, len(data)) == (frame.stop.number, frame.size)
            self._data = data
        if self._sent < len(self._head):
            return memoryview(self._head + self._data)[self._sent :]
        return memoryview(self._data)[self._sent - len(self._head) :]

    def took(self, count: int) -> bool:
        """`count` more bytes were sent; returns whether only a long run is left."""
        assert self._data is not None
        self._sent += count
        return self._sent == len(self._head) + len(self._data)

    def let_go(self) -> None:
        """Free the bytes of a client that stopped reading: they are read again when needed."""
        if self.frame is not None and self.frame.data:
            self.frame = self.frame._replace(data=b"")
            self._data = None

    def finish(self) -> int:
        """The frame was sent; returns its number of entries."""
        assert self.frame is not None
        entries, size = self.frame.entries, self.frame.size
        self._broadcast.counts.filter_sent += size
        self.frame = self._data = None
        return entries
