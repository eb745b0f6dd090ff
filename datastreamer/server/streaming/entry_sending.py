"""Sends entries of the file to one client, a part in each turn.

Owns the client's position, what is half sent, and what of it a change of the stream may affect.
`catch_up.py` says when a turn comes. Keeps no entry in memory for a slow client: what it has not
received yet is read again from the file. Knows no commands.
"""

from __future__ import annotations

import trio

from datastreamer.errors import UNREADABLE, DamagedEntry, DamagedPage
from datastreamer.format import ENTRY_HEAD_SIZE, PAGE_SIZE, page_of, page_start
from datastreamer.server.streaming.broadcast import COPIED_TAIL, Broadcast
from datastreamer.server.streaming.change_reports import ChangeReports
from datastreamer.server.streaming.filtered import PATIENCE_SECONDS, FilteredSending
from datastreamer.server.streaming.output import ClientOutput
from datastreamer.server.streaming.send_bounds import SendBounds
from datastreamer.server.streaming.zero_copy import ZeroCopySends
from datastreamer.storage.objects.waits import NotAtHand, at_hand_only
from datastreamer.storage.read.spans import Cursor, Span
from datastreamer.transport.server_stream import Transport

# Bytes that a sender far from the head sends before it yields.
_SENDFILE_BYTES = 512 * 1024


class EntrySending:
    """Where one client is in the stream, and the sending of what comes next."""

    def __init__(self, broadcast: Broadcast, transport: Transport, output: ClientOutput) -> None:
        self.streaming = False
        self.transport = transport
        # The next entry to send, and the file offset of the next byte to send: ahead of the
        # cursor while an entry, or a span of entries, is half sent.
        self.cursor = Cursor(0, 0)
        self.at = 0
        self.span: Span | None = None
        self._output = output
        self._bounds = SendBounds()
        # Set if the client receives reports of updates and truncations.
        self._change_reports: ChangeReports | None = None
        # Set if the client receives only selected entries.
        self._filtered: FilteredSending | None = None
        self._broadcast = broadcast
        self._stream = broadcast.stream
        self._zero_copy = ZeroCopySends(transport)
        # The file offset from which pages were just read before they are sent.
        self._warm = -1

    def _begin_at(self, place: Cursor) -> None:
        # From here on a change of the stream may affect it.
        self.streaming = True
        self.cursor, self.at = place, place.offset
        self._zero_copy.begin(place.number)
        self.span = None

    @property
    def half_sent(self) -> bool:
        """Whether a part of an entry, or of a span of entries, has been sent."""
        return self.at > self.cursor.offset or self._frame_end is not None

    @property
    def between_packets(self) -> bool:
        return not self.half_sent and not self._bounds.unannounced

    @property
    def _frame_end(self) -> Cursor | None:
        """The end of the frame that is being sent."""
        filtered = self._filtered
        return None if filtered is None or filtered.frame is None else filtered.frame.stop

    def _frame_touches(self, start: int, stop: int) -> bool:
        """Whether that frame may have some of these entries and be read again."""
        end = self._frame_end
        return end is not None and start < end.number and self.cursor.number < stop

    def _between_entries(self) -> bool:
        """Whether nothing is half sent; moves the cursor past what was sent whole."""
        if self._filtered is not None:
            return not self.half_sent
        span = self.span
        if span is not None:
            if self.at < span.end:
                try:
                    with at_hand_only():
                        place = self._broadcast.view.boundary(span, self.cursor.number, self.at)
                except NotAtHand:
                    return False  # after the whole span
                if place.offset == self.at:
                    self._move(place)
                    self.span = None
                else:
                    # Continue to the end of this entry only.
                    self.span = Span(span.start, min(place.offset, span.end), place)
            else:
                self._move(span.next)
                self.span = None
        return not self.half_sent

    @property
    def _report_due(self) -> bool:
        """Whether changes are to be reported before the next entry."""
        return self._change_reports is not None and self._change_reports.due

    def _move(self, cursor: Cursor) -> None:
        filtered = self._filtered
        sent = cursor.number - self.cursor.number if filtered is None else filtered.finish()
        self._broadcast.counts.entries_sent += sent
        self.cursor = cursor

    async def _send_some(self, copy: int) -> None:
        """One turn of sending all entries; about `copy` bytes of whole ones if they are copied."""
        broadcast, view = self._broadcast, self._broadcast.view
        turns, turn = broadcast.turns, broadcast.turns.now
        far = self.cursor.offset < view.head.length - COPIED_TAIL
        by_file = far and self.transport.socket_fd is not None
        broadcast.backlog_turns += far
        if broadcast.pages.can_differ(page_of(self.cursor.offset)) and await self._warmed():
            return
        if self._bounds.announces_at(self.cursor.number):
            if not turns.is_at(turn):
                return
            self._bounds.announce(self._stream.reader.head)
        try:
            if by_file and self.span is None and not self.half_sent:
                with at_hand_only():
                    span = view.span(self.cursor)
                if self._enters(span.start):
                    return
                self.span = self._bounds.cut_span(span)
                self.at = self.span.start
            if self.span is not None:
                if self._bounds.unannounced and turns.is_at(turn):
                    await self._send_before(b"")
                if turns.is_at(turn) and (self.half_sent or not self._report_due):
                    await self._send_span(self.span)
                return
            # After the end of this entry sendfile continues.
            with at_hand_only():
                chunk = view.chunk(self.cursor, 1 if by_file else copy)
        except NotAtHand:
            await self._fetch_again(self.cursor.offset)
            return
        except UNREADABLE:
            if not turns.is_at(turn):
                return
            raise
        if not turns.is_at(turn) or self._enters(chunk.start):
            return
        chunk = self._bounds.cut_chunk(chunk)
        at = max(self.at, chunk.start)
        rest = chunk.data[at - chunk.start :]
        if self.transport.socket_fd is None:
            sent = len(rest)
            place = chunk.boundary(at + sent)
            del chunk  # a client that stops reading keeps only the rest in memory
            self.at = at + sent  # being sent: a change there affects this client
            await self._send_before(rest)
        else:
            sent = self._send_now(rest)
            place = chunk.boundary(at + sent)
            del chunk
        self._move(place)
        self.at = max(at + sent, place.offset)
        if sent < len(rest):
            del rest  # a client that stops reading keeps no entry in memory
            await self._output.wait_writable()
        else:
            await trio.lowlevel.checkpoint()

    async def _send_before(self, rest: memoryview | bytes) -> None:
        """Send what is left of the announcement for the next entries, and `rest`."""
        if self._bounds.unannounced:
            rest, self._bounds.unannounced = b"".join((self._bounds.unannounced, rest)), b""
        await self._output.send(rest)

    def _send_now(self, rest: memoryview) -> int:
        """The same without waiting; returns how many bytes of the entries were sent."""
        announcement = self._bounds.unannounced
        if not announcement:
            return self._output.send_now(rest)
        sent = self._output.send_now(b"".join((announcement, rest)))
        self._bounds.unannounced = announcement[sent:]
        return max(0, sent - len(announcement))

    async def _send_frame(self, filtered: FilteredSending) -> None:
        if self.span is not None:
            if not await self._warmed() and not self._broadcast.turns.look():
                await self._send_span(self.span)
            return
        rest = await filtered.rest()
        if not rest:  # the stream is being changed
            return
        if self.transport.socket_fd is None:
            sent = len(rest)
            await self._output.send(rest)
        else:
            sent = self._output.send_now(rest)
        del rest
        if not filtered.took(sent):
            await self._wait_for_room(filtered)
            return
        frame = filtered.frame
        assert frame is not None
        if frame.data is None:
            self.span = Span(frame.start, frame.stop.offset, frame.stop)
            self.at = frame.start
        else:
            self._move(frame.stop)
            self.at = self.cursor.offset
        await trio.lowlevel.checkpoint()

    async def _wait_for_room(self, filtered: FilteredSending) -> None:
        """Wait for room in the socket; free the frame's bytes if the client reads nothing for
        long."""
        with trio.move_on_after(PATIENCE_SECONDS) as patience:
            await self._output.wait_writable()
        if patience.cancelled_caught:
            filtered.let_go()
            await self._output.wait_writable()

    async def _warmed(self) -> bool:
        """Read the next bytes from the disk if they are not resident, or if their page is to be
        compared; True if it used this turn. Raises `DamagedPage`."""
        span, broadcast, pages = self.span, self._broadcast, self._broadcast.pages
        start = self.cursor.offset if span is None else self.at
        number = page_of(start)
        page = page_start(number)
        if span is None and pages.can_differ(number + 1):
            # `_enters` asks, after bytes of that page were read.
            pages.is_ready(page_start(number + 1), PAGE_SIZE)
        if page in pages.ready:
            return False
        if span is None:
            # To the end of the page, which is scanned as a whole, and the next one's head.
            count = page_start(number + 1) - start + ENTRY_HEAD_SIZE
        else:
            count = min(span.end - start, _SENDFILE_BYTES)
        due = pages.is_due(number)
        # If memory is so short that the pages were evicted again, they are sent anyway.
        if start == self._warm and not due:
            self._warm = -1  # not after a wait for a client that reads nothing
            return False
        resident = pages.resident(start, count)
        if resident and not due:
            if start <= page + ENTRY_HEAD_SIZE and span is None:
                pages.note_ready(number)
            return False
        self._warm = start
        broadcast.counts.cold_reads += not resident
        turn = broadcast.turns.now
        try:
            await broadcast.cold.read(start, count)
        except DamagedPage:
            if broadcast.turns.is_at(turn):
                raise
        return True

    def _enters(self, start: int) -> bool:
        """Whether the next entry, at `start`, is in a page after the cursor's that has to be
        examined before it is sent; then the cursor is there, after the padding."""
        number, pages = page_of(start), self._broadcast.pages
        if number == page_of(self.cursor.offset) or page_start(number) in pages.ready:
            return False
        if self.at > self.cursor.offset:
            return False  # it was examined before the entry was begun
        if not pages.can_differ(number):
            return False
        pages.before_read([number])
        self.cursor = Cursor(start, self.cursor.number)
        self.at = start
        return True

    async def _send_span(self, span: Span) -> None:
        count = min(span.end - self.at, _SENDFILE_BYTES)
        held = self._stream.parts.pages.holder(self.at)
        if held is None:
            await self._fetch_again(self.at)
            return
        file, stop = held
        count = min(count, stop - self.at)
        try:
            sent = self._output.send_file(file.fileno(), self.at, count)
        except EOFError:
            raise DamagedEntry(self._stream.path, self.at, "the file ends here") from None
        self.at += sent
        self._zero_copy.sent(self.at)
        if self.at == span.end:
            self._move(span.next)
            self.span = None
            self.at = self.cursor.offset
        if sent < count:
            await self._output.wait_writable()
        else:
            await trio.lowlevel.checkpoint()

    async def _fetch_again(self, at: int) -> None:
        """What is due at an offset was fetched, and dropped for others since."""
        self._broadcast.pages.ready.discard(page_start(page_of(at)))
        self._warm = -1
        await trio.lowlevel.checkpoint()

    # Updates and truncations of entries that were sent.

    def affected(
        self, start: int, offset: int, stop: int | None, end: int, *, late: bool = False
    ) -> bool:
        """Whether a change of the entries from `start` to `stop` may affect what this client gets.

        The entries are at file offsets `offset` to `end`. A truncation (`stop` None) affects a
        client that was sent any of them; an update affects a client that may not have received
        bytes sent with sendfile. With `late` the change was made some time ago, and the peer may
        have acknowledged such bytes since.
        """
        if self.streaming:
            half_sent = self.half_sent
            promised = self._frame_end or self._bounds.end
            if stop is None and promised is not None and promised.number > start:
                return True
            if stop is not None and self._frame_touches(start, stop):
                return True
            if stop is None and (self.cursor.number > start or (half_sent and self.at > offset)):
                return True
            if half_sent and offset < self.at < end:
                return True  # it would receive the start of one version and the end of another
        return self._zero_copy.affected(offset, stop, end, self.at, late=late)

    @property
    def refers(self) -> bool:
        """Whether the peer may still receive bytes by reference to the file's pages."""
        self.note_received()
        return self._zero_copy.any

    def note_received(self) -> None:
        """Note which bytes the peer has acknowledged: a later change of them does not affect it."""
        if self._zero_copy.any and not self._broadcast.turns.look():
            self._zero_copy.note_received()

    def cut_short(self, start: int, offset: int) -> None:
        """The entries from `start` on, at file offset `offset`, are about to be truncated."""
        span = self.span
        if span is not None and span.end > offset:
            self.span = Span(span.start, offset, Cursor(offset, start))
