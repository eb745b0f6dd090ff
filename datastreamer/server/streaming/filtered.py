"""Entries of some types, looked for in the stream: the answers to requests, and a streaming's
frames.

Owns what goes into a frame, how much is looked through for it before others have a turn, and
the frame that a client is being sent. The sending is `sender.py`'s and `answers.py`'s, the
waiting for a commit `session.py`'s.
"""

from __future__ import annotations

from typing import NamedTuple

import trio

from datastreamer._filtered import Choice
from datastreamer.errors import DamagedFile, UnknownEntry
from datastreamer.format import PAGE_SIZE, U32_MAX, page_of, page_start
from datastreamer.protocol import messages
from datastreamer.protocol.filter.messages import FilteredRead, encode_head
from datastreamer.server.limits import Limits
from datastreamer.server.streaming.broadcast import Broadcast
from datastreamer.storage.read.batch_bounds import KEPT_BYTES
from datastreamer.storage.read.reader import Reader
from datastreamer.storage.read.spans import Cursor
from datastreamer.storage.read.type_scan import SLICE_BYTES, Wanted

# One request, and one frame of a streaming, have so much of the file looked through.
_READ_SCAN = 16 << 20
_FRAME_SCAN = 4 << 20
# So many frames at the end of the stream are kept for others who want the same.
_SHARED = 16
# That nothing was found is told no more often than this, at the end of the stream.
PROGRESS_SECONDS = 0.1
# Of a frame that a client does not take, the entries are kept in memory for so long.
PATIENCE_SECONDS = 1.0


class Frame(NamedTuple):
    """Entries found from `first` on up to `stop`: so many, `size` bytes, which are `data`; or,
    where that is None, stand in the file from `start` to where `stop` is. `begin` is where
    they were looked for."""

    first: int
    begin: Cursor
    stop: Cursor
    entries: int
    size: int
    data: bytes | None
    start: int

    def head(self, total: int, epoch: int) -> bytes:
        """What is sent before the entries."""
        return encode_head(self.entries, self.first, self.stop.number, total, epoch, self.size)


class Changed(Exception):
    """The stream was changed while it was looked through; never leaves this module."""


async def _look(
    live: Broadcast,
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
    """What is found from `begin` on before entry `stop`. Raises `Changed`, and what the stream
    raises; nobody else had a turn between the last look at the stream and the return."""
    place, entries, size, scanned = begin, 0, 0, 0
    parts: list[bytes] = []
    epoch = live.stream.epoch
    while True:
        wanted = Wanted(
            *place, stop, choice, most_entries - entries, most_bytes - size, not entries
        )
        try:
            if _is_warm(live, place.offset):
                found = reader.matches(wanted)
            else:
                live.counts.cold_reads += 1
                found = await live.cold.run(reader.matches, wanted)
        except (DamagedFile, UnknownEntry):
            if live.outdated() or live.stream.epoch != epoch:
                raise Changed from None
            raise
        if live.outdated() or live.stream.epoch != epoch:
            raise Changed
        live.counts.filter_scanned += found.scanned
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
        if live.outdated() or live.stream.epoch != epoch:
            raise Changed
    data = parts[0] if len(parts) == 1 else b"".join(parts)
    return Frame(first, begin, place, entries, size, data, 0)


def _is_warm(live: Broadcast, offset: int) -> bool:
    """Whether what is looked through next is in memory: up to two pages."""
    length, cold = live.stream.reader.head.length, live.cold
    last = min(offset + SLICE_BYTES, length) - 1
    pages = range(page_of(offset), page_of(last) + 1)
    starts = [page_start(page) for page in pages]
    return all(cold.is_warm(at, min(PAGE_SIZE, length - at)) for at in starts)


class FilteredReads:
    """What one client asks for by `FilteredRead`."""

    def __init__(self, live: Broadcast, limits: Limits) -> None:
        self._live = live
        self._stream = live.stream
        self._most_entries = min(limits.max_batch_count, U32_MAX)
        self._most_bytes = min(limits.max_batch_bytes, KEPT_BYTES)
        # Where the last answer ended, and in which history: the next one begins there.
        self._place = Cursor(0, 0)
        self._changes = -1

    async def read(self, query: FilteredRead, looked: Frame | None = None) -> Frame | None:
        """What `query` is to be answered with, in the stream as it is now; None where it asks
        for entries behind the end. `looked` is what was found for it before, nothing, in the
        same history. Raises what the stream raises.

        Nobody else had a turn between the last look at the stream and the return.
        """
        stream, live = self._stream, self._live
        while True:
            if query.from_entry > stream.total_entries:
                return None
            try:
                return await self._read(query, looked)
            except Changed:
                looked = None
            await live.settled()

    async def _read(self, query: FilteredRead, looked: Frame | None) -> Frame:
        number, reader = query.from_entry, self._stream.reader
        head = reader.head
        stop = min(query.stop, head.entries)
        if looked is not None:
            begin = looked.stop
        elif stop <= number:
            begin = Cursor(head.length, number)
        else:
            begin = await self._place_of(number)
        if stop <= begin.number:
            return Frame(number, begin, begin, 0, 0, b"", 0)
        changes = reader.changes
        frame = await _look(
            self._live,
            reader,
            Choice(query.types),
            number,
            begin,
            stop,
            most_entries=min(query.max_count or self._most_entries, self._most_entries),
            most_bytes=min(query.max_bytes or self._most_bytes, self._most_bytes),
            scan=_READ_SCAN,
        )
        self._place, self._changes = frame.stop, changes
        return frame

    async def _place_of(self, number: int) -> Cursor:
        stream, live, reader = self._stream, self._live, self._stream.reader
        if self._place.number == number and self._changes == reader.changes:
            return self._place
        page = reader.page_with(number)
        if page is not None and live.cold.is_warm(*page):
            return reader.cursor(number)
        epoch = stream.epoch
        try:
            place = await live.cold.run(reader.cursor, number)
        except (DamagedFile, UnknownEntry):
            if live.outdated() or stream.epoch != epoch:
                raise Changed from None
            raise
        if live.outdated() or stream.epoch != epoch:
            raise Changed
        return place

    def begins_with(self, frame: Frame) -> bytes:
        """Result and head of the answer that has `frame`."""
        stream = self._stream
        return messages.OK + frame.head(stream.reader.head.entries, stream.epoch)


class FilteredSending:
    """What a client that streams is sent of the types that it wants: frame after frame."""

    def __init__(self, live: Broadcast, types: tuple[int, ...]) -> None:
        self.frame: Frame | None = None
        """What it is being sent."""
        self.taken = 0
        """Bytes of frames that the system took, those of long runs left out."""
        self._live = live
        self._choice = Choice(types)
        # The frame's bytes as far as they are copied, and how many of them are sent.
        self._head = b""
        self._data: bytes | None = None
        self._sent = 0
        # How far nothing was found that was not told yet, and in which history.
        self._looked: Cursor | None = None
        self._changes = -1
        self._told_at = -PROGRESS_SECONDS

    async def find(self, cursor: Cursor, *, referred_before: int, hurried: bool) -> float | None:
        """Make the frame that comes next, from `cursor` on; or say how many seconds to wait
        before this is asked again, or for news.

        A long run that ends at or before file offset `referred_before` is told by its place.
        Where it is `hurried`, also that nothing was found is told at once.
        """
        live, view = self._live, self._live.view
        if self._changes != view.changes:
            self._looked, self._changes = None, view.changes
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
            wait = self._told_at + PROGRESS_SECONDS - now
            if wait > 0:
                return wait
        if frame.data is None and frame.stop.offset > referred_before:
            frame = frame._replace(data=view.raw(frame.start, frame.size))
        self._looked = None
        self._told_at = now
        self.frame = frame
        self._head = frame.head(live.stream.reader.head.entries, live.stream.epoch)
        self._data = frame.data or b""
        self._sent = 0
        return None

    async def _find(self, first: int, begin: Cursor, total: int) -> Frame:
        live, what = self._live, (self._choice.types, begin)
        known: Frame | None = live.found.get(what)
        if known is not None:
            return known._replace(first=first)
        frame = await _look(
            live,
            live.view,
            self._choice,
            first,
            begin,
            total,
            most_entries=U32_MAX,
            most_bytes=KEPT_BYTES,
            scan=_FRAME_SCAN,
        )
        at_end = frame.stop.number >= total and frame.data is not None
        if at_end and len(live.found) < _SHARED:
            live.found[what] = frame
        return frame

    async def rest(self) -> memoryview:
        """What of the frame is still to be sent, the long run left out. Nothing where the
        stream is being changed."""
        frame = self.frame
        assert frame is not None
        if self._data is None:
            try:
                again = await _look(
                    self._live,
                    self._live.view,
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
                data = self._live.view.raw(again.start, again.size)
            assert (again.stop.number, len(data)) == (frame.stop.number, frame.size)
            self._data = data
        if self._sent < len(self._head):
            return memoryview(self._head + self._data)[self._sent :]
        return memoryview(self._data)[self._sent - len(self._head) :]

    def took(self, count: int) -> bool:
        """So many more bytes were sent: whether that is all of them but a long run's."""
        assert self._data is not None
        self._sent += count
        self.taken += count
        return self._sent == len(self._head) + len(self._data)

    def let_go(self) -> None:
        """Keep nothing in memory for a client that stopped reading: it is looked for again."""
        if self.frame is not None and self.frame.data:
            self.frame = self.frame._replace(data=b"")
            self._data = None

    def finish(self) -> int:
        """The frame was sent; how many entries that were."""
        assert self.frame is not None
        entries, self.frame, self._data = self.frame.entries, None, None
        return entries
