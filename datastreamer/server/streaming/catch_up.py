"""Sends entries to one client while it streams.

Owns the client's cursor and the rule that exactly one part writes to the connection at a time:
the session while the client is idle, this sender while the client catches up, the broadcast
(`broadcast.py`) while it is live. Keeps no entry in memory for a slow client: what it has not
received yet is read again from the file. Knows no commands.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from functools import partial

import trio

from datastreamer.errors import DamagedEntry, DamagedFile, DamagedPage
from datastreamer.format import ENTRY_HEAD_SIZE, PAGE_SIZE, page_of, page_start
from datastreamer.selection.clauses import Selection
from datastreamer.server.streaming.broadcast import COPIED_TAIL, Broadcast
from datastreamer.server.streaming.change_reports import ChangeReports
from datastreamer.server.streaming.feed import FeedPiece
from datastreamer.server.streaming.filtered import PATIENCE_SECONDS, FilteredSending
from datastreamer.server.streaming.live_clients import LiveSender
from datastreamer.server.streaming.output import ClientOutput
from datastreamer.server.streaming.send_bounds import COMMITS, RAW, SendBounds
from datastreamer.server.streaming.turns import Changed
from datastreamer.server.streaming.zero_copy import ZeroCopySends
from datastreamer.storage.read.spans import Cursor, Span
from datastreamer.transport.server_stream import Transport

_COPY_BYTES = 128 * 1024
# Bytes that a sender far from the head sends before it yields.
_SENDFILE_BYTES = 512 * 1024
# The pages of a stream up to this size are taken to be resident.
_INLINE_PLACE = 64 << 20
# With this many unsent Results, no further command of the client is read.
_WAITING_RESULTS = 64


class State(enum.Enum):
    IDLE = "idle"
    CATCH_UP = "catch-up"
    LIVE = "live"
    DRAINING = "draining"


class Sender:
    """Sends entries to one client, from a Start to its Stop or to the client's end."""

    def __init__(self, broadcast: Broadcast, transport: Transport, output: ClientOutput) -> None:
        self.state = State.IDLE
        self.streaming = False
        self.transport = transport
        self._output = output
        # The next entry to send, and the file offset of the next byte to send: ahead of the
        # cursor while an entry, or a span of entries, is half sent.
        self.cursor = Cursor(0, 0)
        self.at = 0
        self.span: Span | None = None
        self._bounds = SendBounds()
        # Set if the client receives reports of updates and truncations.
        self._change_reports: ChangeReports | None = None
        # Set if the client receives only selected entries.
        self._filtered: FilteredSending | None = None
        # Results to send between two entries.
        self.results: list[bytes] = []
        self._broadcast = broadcast
        self._stream = broadcast.stream
        self._zero_copy = ZeroCopySends(transport)
        # The file offset from which pages were just read before they are sent.
        self._warm = -1
        self._results_sent = trio.Event()
        self._ending = False
        # When the server shuts down: entries to send before the end; 0: finish the current entry.
        self._last: int | None = None
        self._wake: trio.Event | None = None
        self._done = trio.Event()

    # Called by the session.

    def begin(
        self,
        start: int,
        where: Selection = (),
        *,
        commits: bool = False,
        change_reports: ChangeReports | None = None,
    ) -> None:
        """`run` will send the entries from `start` on; with `where` only those that it
        selects, in frames; with
        `commits` the ends of commits too, with `change_reports` also updates and truncations."""
        self.state = State.CATCH_UP
        self._filtered = FilteredSending(self._broadcast, where) if where else None
        self._bounds.to_stream(start, commits=commits)
        self._change_reports = change_reports
        self._begin_at(Cursor(0, start))

    def begin_part(self, place: Cursor, bound: Cursor) -> None:
        """`run` will send the entries from `place` up to `bound`, excluded. The server is committed
        to send all of them: a change of any of them affects this client."""
        self._bounds.to_send_part(bound)
        self._filtered = self._change_reports = None
        self._begin_at(place)

    def end_part(self) -> None:
        """All of the part was sent."""
        self.streaming = False
        self._bounds.bound = None

    def _begin_at(self, place: Cursor) -> None:
        # From here on a change of the stream may affect it.
        self.streaming = True
        self.cursor, self.at = place, place.offset
        self._zero_copy.begin(place.number)
        self.span = None
        self._ending = False
        self.results = []
        self._done = trio.Event()

    async def run(self) -> bool:
        """Send until the end; only this task waits for the client.

        True if `end_with` ended it, False if it reached the bound of `finish` or `begin_part`.
        """
        while not (self._at_last() or await self._next_turn()):
            pass
        self.state = State.IDLE
        self._done.set()
        return self._ending

    def finish(self, entries: int) -> None:
        """Stop between two entries, once the first `entries` entries have been sent."""
        self._last = entries
        if self.unbounded:
            self.nudge()

    @property
    def unbounded(self) -> bool:
        """Whether entries are sent as they are committed, without a bound."""
        return self.streaming and self._bounds.bound is None

    async def end_with(self, result: bytes) -> None:
        """Finish the current entry, send `result` and stop; return when that is done."""
        self.results.append(result)
        self._ending = True
        self.nudge()
        await self._done.wait()
        self.streaming = False

    async def send_between_entries(self, result: bytes) -> None:
        """Send `result` between two entries. Waits if many Results are unsent."""
        self.results.append(result)
        self.nudge()
        if len(self.results) >= _WAITING_RESULTS:
            await self._results_sent.wait()

    # Called by the broadcast.

    def nudge(self) -> None:
        """Leave the broadcast: this sender has something to send itself."""
        if self._broadcast.leave(self):
            self.state = State.CATCH_UP
        self.wake()

    def fell_behind(self, cursor: Cursor, at: int) -> None:
        """The broadcast sent only up to file offset `at` of the run that began at `cursor`."""
        self.cursor, self.at = cursor, at
        self.state = State.CATCH_UP
        self.wake()

    def took(self, piece: FeedPiece, sent: int) -> bool:
        """As `Member.took`."""
        if sent > 0:
            self._broadcast.counts.bytes_sent += sent
            self._bounds.was_announced(piece.after, bytes(piece.data[sent : piece.ahead]))
        if sent < len(piece.data):
            entries = max(0, sent - piece.ahead)
            self.fell_behind(self.cursor, piece.at + entries if entries else self.cursor.offset)
            return False
        self._move(piece.after)
        self.at = piece.after.offset
        return not self.transport.holds_back

    def wake(self) -> None:
        if self._wake is not None:
            self._wake.set()

    # Sending.

    def _at_last(self) -> bool:
        last, bound = self._last, self._bounds.bound
        if bound is not None:
            return self.cursor.number >= bound.number
        if last is None or self.results or self.cursor.number < last:
            return False
        return not self.half_sent if last else self._between_entries()

    async def _next_turn(self) -> bool:
        """Send something, or wait for something to send; True after the Result of a Stop."""
        broadcast, located = self._broadcast, self.cursor.offset > 0
        lag = broadcast.view.head.entries - self.cursor.number
        due = self._change_reports is not None and self._change_reports.due
        if broadcast.turns.changing:
            await self._park()
        elif due and self._between_entries():
            await self._report_changes()
        elif located and self.results and self._between_entries():
            results, self.results = b"".join(self.results), []
            await self._send_before(results)
            self._results_sent.set()
            self._results_sent = trio.Event()
            return self._ending
        elif lag > 0:
            if not located:
                # The Result of a Stop that arrived with the Start follows the first entries.
                if await self._locate():
                    await self._send_some(_COPY_BYTES)
            else:
                # If a Result, a report or the end waits, only to the end of the entry.
                short = due or self.results or self._last == 0
                await self._send_some(1 if short else _COPY_BYTES)
        elif lag < 0 or self.half_sent or self._bounds.has_more(self.cursor.number):
            # Committed, but not in the view yet.
            await self._park()
        elif not located:
            await self._locate()
        elif self._last is not None:
            await self._park()
        else:
            await self._go_live()
        return False

    async def _report_changes(self) -> None:
        """Send reports of the changes since the last one, before any entry that is read later."""
        assert self._change_reports is not None
        reports = await self._change_reports.next()
        if reports:
            await self._send_before(reports)

    async def _locate(self) -> bool:
        """Find the file offset of the first entry; False if the stream was changed meanwhile."""
        broadcast, view = self._broadcast, self._broadcast.view
        if view.head.length <= _INLINE_PLACE:
            self.cursor = self._place_of(self.cursor.number)
        else:
            # This takes several reads of cold pages, one after the other.
            try:
                with broadcast.turns.one():
                    place = await broadcast.cold.run(self._place_of, self.cursor.number)
            except Changed:
                return False
            self.cursor = place
        self.at = self.cursor.offset
        return True

    def _place_of(self, number: int) -> Cursor:
        """The place of an entry. Its page may be resident afterwards because it was read here."""
        view, pages = self._broadcast.view, self._broadcast.pages
        if number < view.head.entries:
            start = page_start(view.page_holding(number))
            pages.is_ready(start, min(PAGE_SIZE, view.head.length - start))
        return view.cursor(number)

    def _move(self, cursor: Cursor) -> None:
        filtered = self._filtered
        sent = cursor.number - self.cursor.number if filtered is None else filtered.finish()
        self._broadcast.counts.entries_sent += sent
        self.cursor = cursor

    async def _park(self) -> None:
        """Wait for the view to move, or for a nudge."""
        await self._wait_in(self._broadcast.park)

    async def _wait_in(self, register: Callable[[LiveSender], None]) -> None:
        self._wake = trio.Event()
        register(self)
        await self._wake.wait()
        self._wake = None

    @property
    def half_sent(self) -> bool:
        """Whether a part of an entry, or of a span of entries, has been sent."""
        return self.at > self.cursor.offset or self._frame_end is not None

    @property
    def between_packets(self) -> bool:
        """Whether no packet is half sent."""
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
                place = self._broadcast.view.boundary(span, self.cursor.number, self.at)
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

    async def _send_some(self, copy: int) -> None:
        """One turn of catching up; about `copy` bytes of whole entries if they are copied."""
        if self._filtered is not None:
            await self._send_frame(self._filtered)
            return
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
                span = view.span(self.cursor)
                if self._enters(span.start):
                    return
                self.span = self._bounds.cut_span(span)
                self.at = self.span.start
            if self.span is not None:
                if self._bounds.unannounced and turns.is_at(turn):
                    await self._send_before(b"")
                overtaking = (
                    not self.half_sent and self._change_reports and self._change_reports.due
                )
                if turns.is_at(turn) and not overtaking:
                    await self._send_span(self.span)
                return
            # After the end of this entry sendfile continues.
            chunk = view.chunk(self.cursor, 1 if by_file else copy)
        except DamagedFile:
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
        """One turn of sending frames."""
        broadcast, transport = self._broadcast, self.transport
        if self.span is not None:
            if not await self._warmed() and not broadcast.turns.look():
                await self._send_span(self.span)
            return
        if filtered.frame is None:
            copies = transport.socket_fd is None
            tail = 0 if copies else broadcast.view.head.length - COPIED_TAIL
            wait = await filtered.find(
                self.cursor, zero_copy_before=tail, hurried=self._last is not None
            )
            if wait is not None:
                with trio.move_on_after(wait):
                    await self._park()
                return
        rest = await filtered.rest()
        if not rest:  # the stream is being changed
            return
        if transport.socket_fd is None:
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
                pages.ready.add(page)
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
        try:
            sent = self._output.send_file(self._stream.fileno(), self.at, count)
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

    async def _go_live(self) -> None:
        """Everything is sent: join the broadcast until a nudge. A client with a filter, which
        sends for itself, is live too."""
        broadcast, commits = self._broadcast, self._bounds.commits
        self.state = State.LIVE
        if self._filtered is not None:
            await self._wait_in(broadcast.park)
        elif commits or self.transport.socket_fd is None:
            if self.transport.holds_back:
                await self._output.wait_writable()
            else:
                await self._wait_in(partial(broadcast.join_feed, form=COMMITS if commits else RAW))
                broadcast.feed.leave(self)
        else:
            await self._wait_in(broadcast.join)
        self.state = State.CATCH_UP

    def owes(self, entries: int) -> bool:
        """Whether it streams and some of the first `entries` entries are not sent yet."""
        return self.unbounded and (self.cursor.number < entries or self.half_sent)

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
