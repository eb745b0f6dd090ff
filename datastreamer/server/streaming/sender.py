"""What one client is sent while it streams: its place in the stream, and the way on.

Owns the client's cursor and the rule that exactly one writes to the connection at a
time: the session while the client is idle, this sender while it streams and is behind,
the pass (`live.py`) while it is live. Keeps no entry in memory for a slow client: what
was not taken yet is read again from the file. Knows no commands.
"""

from __future__ import annotations

import enum

import trio

from datastreamer.errors import DamagedEntry, DamagedFile, UnknownEntry
from datastreamer.format import ENTRY_HEAD_SIZE, page_of, page_start
from datastreamer.server.streaming.broadcast import Broadcast
from datastreamer.server.streaming.change_reports import ChangeReports
from datastreamer.server.streaming.filtered import PATIENCE_SECONDS, FilteredSending
from datastreamer.server.streaming.send_bounds import SendBounds
from datastreamer.server.streaming.zero_copy import ZeroCopySends
from datastreamer.storage.read.spans import Cursor, Span
from datastreamer.transport.server_stream import Transport

# Entries this near to the end are copied into the socket; older ones go by sendfile,
# which queues references to the file's pages and would show a later change of them.
_COPIED_TAIL = 4 << 20
_COPY_BYTES = 128 * 1024
# One turn of a sender that is far behind; then the other clients have theirs.
_SENDFILE_BYTES = 512 * 1024
# Where a stream is no longer than this, its pages are in memory, or soon.
_INLINE_PLACE = 64 << 20
# A client that asks on while it streams and reads nothing is not asked what else it wants.
_WAITING_RESULTS = 64


class State(enum.Enum):
    IDLE = "idle"
    CATCH_UP = "catch-up"
    LIVE = "live"
    DRAINING = "draining"


class Sender:
    """Sends entries to one client, from a Start to its Stop or to the client's end."""

    def __init__(self, live: Broadcast, transport: Transport) -> None:
        self.state = State.IDLE
        self.streaming = False
        self.transport = transport
        # Where the next entry to send stands, and the file offset of the next byte to
        # send: ahead of the cursor while an entry, or a span of them, is half sent.
        self.cursor = Cursor(0, 0)
        self.at = 0
        self.span: Span | None = None
        self._promised = SendBounds()
        # Where it is told of changes of what was committed.
        self._following: ChangeReports | None = None
        # Where it is sent the entries of some types alone.
        self._filtered: FilteredSending | None = None
        # Results to put between two entries, and what to do after them.
        self.results: list[bytes] = []
        self.blocked = False
        """Whether the client has not taken what was there for it."""
        self._live = live
        self._stream = live.stream
        self._referred = ZeroCopySends(transport)
        # The last file offset from which on something was read ahead of sending it.
        self._warm = -1
        self._results_sent = trio.Event()
        self._ending = False
        # At the server's end: how far to go. 0: to the end of the entry that is being sent.
        self._last: int | None = None
        self._wake: trio.Event | None = None
        self._done = trio.Event()

    # What the session asks for.

    def begin(
        self,
        start: int,
        types: tuple[int, ...] = (),
        *,
        commits: bool = False,
        following: ChangeReports | None = None,
    ) -> None:
        """The client will be sent the entries from `start` on, by `run`; with `types` those
        alone, in frames; with `commits` it is told where operations end, with `following` also
        what is changed."""
        self.state = State.CATCH_UP
        self._filtered = FilteredSending(self._live, types) if types else None
        self._promised.to_stream(start, commits=commits)
        self._following = following
        self._set_out(Cursor(0, start))

    def begin_part(self, place: Cursor, bound: Cursor) -> None:
        """The client will be sent the entries from `place` to `bound`, and no more, by `run`.
        It is promised them: a change of any of these concerns it."""
        self._promised.to_send_part(bound)
        self._filtered = self._following = None
        self._set_out(place)

    def end_part(self) -> None:
        """It was sent them."""
        self.streaming = False
        self._promised.bound = None

    def _set_out(self, place: Cursor) -> None:
        # From here on a change of the stream may concern it.
        self.streaming = True
        self.cursor, self.at = place, place.offset
        self._referred.begin(place.number)
        self.span = None
        self._ending = False
        self.results = []
        self._done = trio.Event()

    async def run(self) -> bool:
        """The sending task: whatever has to wait for this client waits here.

        True when it ended as `end_with` asked, False when it came to where `finish` or
        `begin_part` said.
        """
        while not (self._at_last() or await self._next_turn()):
            pass
        self.state = State.IDLE
        self._done.set()
        return self._ending

    def finish(self, entries: int) -> None:
        """Stop, between two entries, once the first `entries` of the stream have been sent."""
        self._last = entries
        if self.unbounded:
            self.nudge()

    @property
    def unbounded(self) -> bool:
        """Whether it is sent entries as they are committed, from a Start on."""
        return self.streaming and self._promised.bound is None

    async def end_with(self, result: bytes) -> None:
        """End the entry that is being sent, send `result` and stop; return when that is done."""
        self.results.append(result)
        self._ending = True
        self.nudge()
        await self._done.wait()
        self.streaming = False

    async def put_in(self, result: bytes) -> None:
        """Send `result` between two entries. Waits where many are waiting already."""
        self.results.append(result)
        self.nudge()
        if len(self.results) >= _WAITING_RESULTS:
            await self._results_sent.wait()

    # What the pass asks for.

    def nudge(self) -> None:
        """There is something to do other than to be live."""
        if self._live.leave(self):
            self.state = State.CATCH_UP
        self.wake()

    def fell_behind(self, cursor: Cursor, at: int) -> None:
        """The pass got only to file offset `at`, in the run that began at `cursor`."""
        self.cursor, self.at = cursor, at
        self.state = State.CATCH_UP
        self.wake()

    def wake(self) -> None:
        if self._wake is not None:
            self._wake.set()

    # Sending.

    def _at_last(self) -> bool:
        last, bound = self._last, self._promised.bound
        if bound is not None:
            return self.cursor.number >= bound.number
        if last is None or self.results or self.cursor.number < last:
            return False
        return not self.half_sent if last else self._between_entries()

    async def _next_turn(self) -> bool:
        """Send something, or wait until there is something; True after a Stop's Result."""
        live, placed = self._live, self.cursor.offset > 0
        behind = live.view.head.entries - self.cursor.number
        due = self._following is not None and self._following.due
        if live.changing:
            await self._park()
        elif due and self._between_entries():
            await self._report_changes()
        elif placed and self.results and self._between_entries():
            # Of what is told before the next entries a part may be sent.
            results, self.results = b"".join((self._promised.untold, *self.results)), []
            self._promised.untold = b""
            self.blocked = True
            await self.transport.send(results)
            self.blocked = False
            live.counts.bytes_sent += len(results)
            self._results_sent.set()
            self._results_sent = trio.Event()
            return self._ending
        elif behind > 0:
            if not placed:
                # A Stop that came with the Start does not overtake the first entries.
                if await self._take_place():
                    await self._send_some(_COPY_BYTES)
            else:
                # Where a Result or a report waits, or the end, only to the end of the entry.
                short = due or self.results or self._last == 0
                await self._send_some(1 if short else _COPY_BYTES)
        elif behind < 0 or self.half_sent or self._promised.bound is not None:
            # Committed, but the pass is not through with it.
            await self._park()
        elif not placed:
            await self._take_place()
        elif self._last is not None:
            await self._park()
        else:
            await self._go_live()
        return False

    async def _report_changes(self) -> None:
        """What was changed since the last report; no entry that was read later overtakes it."""
        assert self._following is not None
        reports = await self._following.next()
        if not reports:
            return
        # Of what is told before the next entries a part may be sent.
        told, self._promised.untold = self._promised.untold, b""
        self.blocked = True
        await self.transport.send(told + reports)
        self.blocked = False
        self._live.counts.bytes_sent += len(told) + len(reports)

    async def _take_place(self) -> bool:
        """Find where the first entry stands; False where the stream was changed meanwhile."""
        live, view = self._live, self._live.view
        if view.head.length <= _INLINE_PLACE:
            self.cursor = view.cursor(self.cursor.number)
        else:
            # That is some reads at old places, one after the other.
            epoch = self._stream.epoch
            try:
                place = await live.cold.run(view.cursor, self.cursor.number)
            except (DamagedFile, UnknownEntry):
                if not live.outdated() and self._stream.epoch == epoch:
                    raise
                return False
            if live.outdated() or self._stream.epoch != epoch:
                return False
            self.cursor = place
        self.at = self.cursor.offset
        return True

    def _move(self, cursor: Cursor) -> None:
        filtered = self._filtered
        sent = cursor.number - self.cursor.number if filtered is None else filtered.finish()
        self._live.counts.entries_sent += sent
        self.cursor = cursor

    async def _park(self) -> None:
        """Wait for the pass to move, or for a nudge."""
        self._wake = trio.Event()
        self._live.park(self)
        await self._wake.wait()
        self._wake = None

    @property
    def half_sent(self) -> bool:
        """Whether the client has a part of an entry, or of a span of them, already."""
        return self.at > self.cursor.offset or self._frame_end is not None

    @property
    def _frame_end(self) -> Cursor | None:
        """How far the frame goes that the client is being sent."""
        filtered = self._filtered
        return None if filtered is None or filtered.frame is None else filtered.frame.stop

    def _frame_touches(self, start: int, stop: int) -> bool:
        """Whether that frame is of some of these entries, and maybe looked for again."""
        end = self._frame_end
        return end is not None and start < end.number and self.cursor.number < stop

    @property
    def taken(self) -> int:
        """Changes with bytes that the system took and that do not move `at`."""
        return 0 if self._filtered is None else self._filtered.taken

    def _between_entries(self) -> bool:
        """Whether nothing is half sent; tries to make the cursor say so."""
        if self._filtered is not None:
            return not self.half_sent
        span = self.span
        if span is not None:
            if self.at < span.end:
                place = self._live.view.boundary(span, self.cursor.number, self.at)
                if place.offset == self.at:
                    self._move(place)
                    self.span = None
                else:
                    # Go on to the end of this entry, and no farther.
                    self.span = Span(span.start, min(place.offset, span.end), place)
            else:
                self._move(span.next)
                self.span = None
        return not self.half_sent

    async def _send_some(self, copy: int) -> None:
        """One turn of catching up; `copy` bytes of whole entries where they are copied."""
        if self._filtered is not None:
            await self._send_frame(self._filtered)
            return
        live, view = self._live, self._live.view
        far = self.cursor.offset < view.head.length - _COPIED_TAIL
        by_file = far and self.transport.socket_fd is not None
        if far and await self._warmed():
            return
        if self._promised.is_told_at(self.cursor.number):
            if live.outdated():
                return
            self._promised.tell(self._stream.reader.head)
        try:
            if by_file and self.span is None and not self.half_sent:
                self.span = self._promised.cut_span(view.span(self.cursor))
                self.at = self.span.start
            if self.span is not None:
                if self._promised.untold and not live.outdated():
                    self.blocked = True
                    await self._send_before(b"")
                    self.blocked = False
                overtaking = not self.half_sent and self._following and self._following.due
                if not live.outdated() and not overtaking:
                    await self._send_span(self.span)
                return
            # After the end of this entry sendfile goes on.
            chunk = view.chunk(self.cursor, 1 if by_file else copy)
        except DamagedFile:
            if live.outdated():
                return
            raise
        if live.outdated():
            return
        chunk = self._promised.cut_chunk(chunk)
        at = max(self.at, chunk.start)
        rest = chunk.data[at - chunk.start :]
        if self.transport.socket_fd is None:
            sent = len(rest)
            place = chunk.boundary(at + sent)
            del chunk  # one that stops reading holds the rest in memory, once
            self.at = at + sent  # on its way: what changes there now concerns this client
            self.blocked = True
            await self._send_before(rest)
            self.blocked = False
        else:
            sent = await self._send_now(rest)
            place = chunk.boundary(at + sent)
            del chunk
        live.counts.bytes_sent += sent
        self._move(place)
        self.at = max(at + sent, place.offset)
        if sent < len(rest):
            del rest  # a client that stops reading holds no entry in memory
            await self._wait_writable()
        else:
            await trio.lowlevel.checkpoint()

    async def _send_before(self, rest: memoryview | bytes) -> None:
        """What is to be told before these entries, and the entries."""
        told, self._promised.untold = self._promised.untold, b""
        self._live.counts.bytes_sent += len(told)
        await self.transport.send(b"".join((told, rest)) if told else rest)

    async def _send_now(self, rest: memoryview) -> int:
        """The same, as much as goes without waiting; how many bytes of the entries that were."""
        told = self._promised.untold
        if not told:
            return self.transport.send_now(rest)
        sent = self.transport.send_now(b"".join((told, rest)))
        if sent >= len(told):
            self._promised.untold = b""
            self._live.counts.bytes_sent += len(told)
            return sent - len(told)
        self._promised.untold = told[sent:]
        self._live.counts.bytes_sent += sent
        return 0

    async def _send_frame(self, filtered: FilteredSending) -> None:
        """One turn of sending frames."""
        live, transport = self._live, self.transport
        if self.span is not None:
            if not await self._warmed() and not live.outdated():
                await self._send_span(self.span)
            return
        if filtered.frame is None:
            tail = live.view.head.length - _COPIED_TAIL if transport.socket_fd is not None else 0
            wait = await filtered.find(
                self.cursor, referred_before=tail, hurried=self._last is not None
            )
            if wait is not None:
                with trio.move_on_after(wait):
                    await self._park()
                return
        rest = await filtered.rest()
        if not rest:  # it is changed just now
            return
        if transport.socket_fd is None:
            sent = len(rest)
            self.blocked = True
            await transport.send(rest)
            self.blocked = False
        else:
            sent = transport.send_now(rest)
        del rest
        live.counts.bytes_sent += sent
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
        """As `_wait_writable`; what a client does not take for long is not kept in memory."""
        self.blocked = True
        with trio.move_on_after(PATIENCE_SECONDS) as patience:
            await self.transport.wait_writable()
        if patience.cancelled_caught:
            filtered.let_go()
            await self.transport.wait_writable()
        self.blocked = False

    async def _warmed(self) -> bool:
        """Whether what comes next had to be read from the disk first, which takes this turn."""
        span, cold = self.span, self._live.cold
        start = self.cursor.offset if span is None else self.at
        number = page_of(start)
        page = page_start(number)
        if page in cold.warm:
            return False
        if span is None:
            # To the end of the page, which is looked at as a whole, and the next one's head.
            count = page_start(number + 1) - start + ENTRY_HEAD_SIZE
        else:
            count = min(span.end - start, _SENDFILE_BYTES)
        # Where memory is so short that it is gone again already, it is sent all the same.
        if start == self._warm:
            return False
        if cold.resident(start, count):
            if start <= page + ENTRY_HEAD_SIZE and span is None:
                cold.warm.add(page)
            return False
        self._warm = start
        self._live.counts.cold_reads += 1
        await self._live.cold.read(start, count)
        return True

    async def _send_span(self, span: Span) -> None:
        count = min(span.end - self.at, _SENDFILE_BYTES)
        try:
            sent = self.transport.send_file(self._stream.fileno(), self.at, count)
        except EOFError:
            raise DamagedEntry(self._stream.path, self.at, "the file ends there") from None
        self._live.counts.bytes_sent += sent
        self.at += sent
        self._referred.sent(self.at)
        if self.at == span.end:
            self._move(span.next)
            self.span = None
            self.at = self.cursor.offset
        if sent < count:
            await self._wait_writable()
        else:
            await trio.lowlevel.checkpoint()

    async def _wait_writable(self) -> None:
        self.blocked = True
        await self.transport.wait_writable()
        self.blocked = False

    async def _go_live(self) -> None:
        """Nothing left to send: leave it to the pass until there is a reason not to."""
        alone = self._filtered is not None or self._promised.commits
        if self.transport.socket_fd is None or alone:
            # No part of the pass, and as live to whoever looks.
            self.state = State.LIVE
            await self._park()
            self.state = State.CATCH_UP
            return
        self._wake = trio.Event()
        self._live.join(self)
        self.state = State.LIVE
        await self._wake.wait()
        self._wake = None

    def owes(self, entries: int) -> bool:
        """Whether it streams and has not been given all of the first `entries` entries."""
        return self.unbounded and (self.cursor.number < entries or self.half_sent)

    # Changes of what was sent.

    def concerned(
        self, start: int, offset: int, stop: int | None, end: int, *, late: bool = False
    ) -> bool:
        """Whether a change of the entries from `start` to `stop` may reach this client.

        They stand from file offset `offset` to `end`. A truncation (`stop` None) concerns
        who has been sent any of them; an update who may not have received yet what the
        kernel only refers to. With `late` it was made some time ago, and the peer may have
        confirmed such bytes since.
        """
        if self.streaming:
            half_sent = self.half_sent
            promised = self._frame_end or self._promised.end
            if stop is None and promised is not None and promised.number > start:
                return True
            if stop is not None and self._frame_touches(start, stop):
                return True
            if stop is None and (self.cursor.number > start or (half_sent and self.at > offset)):
                return True
            if half_sent and offset < self.at < end:
                return True  # it would get the end of another entry than the beginning
        return self._referred.concerned(offset, stop, end, self.at, late=late)

    def note_received(self) -> None:
        """No change concerns bytes that the peer has confirmed before it."""
        if self._referred.any and not self._live.outdated():
            self._referred.note_received()

    def cut_short(self, start: int, offset: int) -> None:
        """The entries from `start` on, at file offset `offset`, are about to go."""
        span = self.span
        if span is not None and span.end > offset:
            self.span = Span(span.start, offset, Cursor(offset, start))
