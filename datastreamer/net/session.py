"""One client: a task that reads its commands, and one that sends while it streams.

Owns the client's cursor and the rule that exactly one writes to the connection at a
time: the reading task while the client is idle, the sender while it streams and is
behind, the server's pass (`server.py`) while it is live. Decides nothing about the
protocol (`protocol.server` does) and keeps no entry in memory for a slow client: what
was not taken yet is read again from the file.
"""

from __future__ import annotations

import enum
import fcntl
import logging
import struct
import sys
import termios
from typing import TYPE_CHECKING

import trio

from datastreamer.errors import DatastreamerError, UnknownBookmark, UnknownEntry
from datastreamer.format import (
    RESULT_BAD_FROM_BOOKMARK,
    RESULT_BAD_FROM_ENTRY,
)
from datastreamer.net.transport import Transport
from datastreamer.protocol import messages
from datastreamer.protocol.messages import (
    BookmarkQuery,
    EntryQuery,
    HeaderQuery,
    Start,
    StartBookmark,
    Stop,
)
from datastreamer.protocol.server import Drop, End, Refuse, ServerConnection
from datastreamer.storage.reader import Cursor, Span

if TYPE_CHECKING:
    from datastreamer.net.server import Server

_log = logging.getLogger(__name__)

# Entries this near to the end are copied into the socket; older ones go by sendfile,
# which queues references to the file's pages and would show a later change of them.
_COPIED_TAIL = 4 << 20
_COPY_BYTES = 128 * 1024
# One turn of a sender that is far behind; then the other clients have theirs.
_SENDFILE_BYTES = 512 * 1024
# Answers to queries that came together are sent together, up to about so much.
_ANSWERS_BYTES = 64 * 1024
# A client that asks on while it streams and reads nothing is not asked what else it wants.
_WAITING_RESULTS = 64
_DRAIN_SECONDS = 1.0
# A look-up that has to read more than this from the stream is done in a thread.
_INLINE_SCAN = 1 << 20


class State(enum.Enum):
    IDLE = "idle"
    CATCH_UP = "catch-up"
    LIVE = "live"
    DRAINING = "draining"


class Session:
    """One connection of a server."""

    def __init__(self, server: Server, transport: Transport) -> None:
        self.state = State.IDLE
        self.transport = transport
        # Where the next entry to send stands, and the file offset of the next byte to
        # send: ahead of the cursor while an entry, or a span of them, is half sent.
        self.cursor = Cursor(0, 0)
        self.at = 0
        self._server = server
        self._stream = server.stream
        self._protocol = ServerConnection(server.stream.header.stream_type)
        self._started_from = 0
        self._sent_by_file = 0
        self._span: Span | None = None
        self._answers: list[bytes] = []
        self._answered = 0
        # While streaming: Results to put between two entries, and what to do after them.
        self._results: list[bytes] = []
        self._results_sent = trio.Event()
        self._ending = False
        self._wake: trio.Event | None = None
        self._streaming_done = trio.Event()

    # The reading task.

    async def run(self) -> None:
        """Serve the client until it is done. Its failures are its own: they are logged."""
        async with trio.open_nursery() as nursery:
            try:
                await self._read_commands(nursery)
            except Exception as error:
                self._failed(error)
            nursery.cancel_scope.cancel()

    def _failed(self, error: Exception) -> None:
        if isinstance(error, (trio.BrokenResourceError, trio.ClosedResourceError)):
            _log.debug("%s: gone: %s", self.transport.peer, error)
            return
        if isinstance(error, DatastreamerError):
            _log.error("%s: connection ended: %s", self.transport.peer, error)
        else:
            _log.error(
                "%s: connection ended by a fault of the server", self.transport.peer, exc_info=error
            )
        self.transport.reset()

    async def _read_commands(self, nursery: trio.Nursery) -> None:
        protocol = self._protocol
        while True:
            event = protocol.next_event()
            if event is None:
                if self._answers:
                    await self._send_answers()
                protocol.receive(await self.transport.receive())
            elif isinstance(event, EntryQuery):
                self._answer(self._entry(event.number))
            elif isinstance(event, BookmarkQuery):
                self._answer(await self._first_event(event.key))
            elif isinstance(event, HeaderQuery):
                self._stream.refresh()
                self._answer(messages.OK + self._stream.header.pack())
            elif isinstance(event, Start):
                await self._start(nursery, await self._entry_to_start(event.from_entry))
            elif isinstance(event, StartBookmark):
                await self._start(nursery, await self._bookmark_to_start(event.key))
            elif isinstance(event, Stop):
                await self._end_streaming(messages.OK)
                protocol.stopped()
            elif isinstance(event, Refuse):
                _log.debug("%s: refused with Result %d", self.transport.peer, event.number)
                if await self._refuse(event):
                    return
            else:
                await self._leave(event)
                return
            if self._answered >= _ANSWERS_BYTES:
                await self._send_answers()

    def _answer(self, answer: bytes) -> None:
        self._answers.append(answer)
        self._answered += len(answer)

    async def _send_answers(self) -> None:
        answers, self._answers, self._answered = self._answers, [], 0
        data = answers[0] if len(answers) == 1 else b"".join(answers)
        sent = self.transport.send_now(data)
        if sent < len(data):
            await self.transport.send(memoryview(data)[sent:])

    def _entry(self, number: int) -> bytes:
        try:
            return messages.OK + self._stream.reader.answer(number)
        except UnknownEntry:
            if not self._stream.refresh():
                return messages.OK + messages.NOT_FOUND
        try:
            return messages.OK + self._stream.reader.answer(number)
        except UnknownEntry:
            return messages.OK + messages.NOT_FOUND

    async def _bookmark(self, key: bytes) -> int | None:
        self._stream.refresh()
        try:
            if self._stream.bookmarks.unread() <= _INLINE_SCAN:
                return self._stream.bookmark(key)
            return await trio.to_thread.run_sync(self._stream.bookmark, key)
        except UnknownBookmark:
            return None

    async def _first_event(self, key: bytes) -> bytes:
        number = await self._bookmark(key)
        event = None if number is None else self._stream.reader.first_event(number)
        if event is None:
            return messages.OK + messages.NOT_FOUND
        return messages.OK + messages.encode_answer(event.number, event.type, event.data)

    async def _entry_to_start(self, number: int) -> int | Refuse:
        if number > self._stream.total_entries:
            self._stream.refresh()
        if number > self._stream.total_entries:
            return Refuse(RESULT_BAD_FROM_ENTRY, close=False)
        return number

    async def _bookmark_to_start(self, key: bytes) -> int | Refuse:
        number = await self._bookmark(key)
        return Refuse(RESULT_BAD_FROM_BOOKMARK, close=False) if number is None else number

    async def _refuse(self, refusal: Refuse) -> bool:
        """Send a Result other than OK; True when the connection is over with it."""
        result = messages.encode_result(refusal.number)
        if not self._protocol.streaming:
            self._answer(result)
        elif refusal.close:
            await self._end_streaming(result)
        else:
            self._results.append(result)
            self._nudge()
            if len(self._results) >= _WAITING_RESULTS:
                await self._results_sent.wait()
        if refusal.close:
            await self._hang_up()
        return refusal.close

    async def _leave(self, event: Drop | End) -> None:
        if isinstance(event, Drop):
            _log.debug("%s: closed: %s", self.transport.peer, event.reason)
        if not self._protocol.streaming:
            await self._hang_up()

    async def _hang_up(self) -> None:
        """End our side, and let what still comes run dry: else a reset eats the Result."""
        self.state = State.DRAINING
        if self._answers:
            await self._send_answers()
        await self.transport.end_sending()
        with trio.move_on_after(_DRAIN_SECONDS):
            while await self.transport.receive():
                pass

    # Streaming.

    async def _start(self, nursery: trio.Nursery, start: int | Refuse) -> None:
        if isinstance(start, Refuse):
            await self._refuse(start)
            return
        self._answer(messages.OK)
        await self._send_answers()
        self._protocol.started()
        self.state = State.CATCH_UP
        self.cursor = Cursor(0, start)
        self._started_from = start
        self._sent_by_file = 0
        self._span = None
        self._ending = False
        self._results = []
        self._streaming_done = trio.Event()
        nursery.start_soon(self._send_entries, nursery.cancel_scope)

    async def _end_streaming(self, result: bytes) -> None:
        """Have the sender end the entry it is in, send `result` and stop."""
        self._results.append(result)
        self._ending = True
        self._nudge()
        await self._streaming_done.wait()

    def _nudge(self) -> None:
        self._server.leave_live(self)
        self.wake()

    def fell_behind(self, cursor: Cursor, at: int) -> None:
        """The pass got only to file offset `at`, in the run that began at `cursor`."""
        self.cursor, self.at = cursor, at
        self.state = State.CATCH_UP
        self.wake()

    async def _send_entries(self, scope: trio.CancelScope) -> None:
        """The sender: whatever has to wait for this client waits here."""
        try:
            await self._find_place()
            while True:
                if self._results and self._between_entries():
                    results, self._results = b"".join(self._results), []
                    await self.transport.send(results)
                    self._results_sent.set()
                    self._results_sent = trio.Event()
                    if self._ending:
                        break
                    continue
                if self.cursor.number < self._server.view.head.entries or self._half_sent():
                    await self._send_some()
                else:
                    await self._go_live()
            self.state = State.IDLE
            self._streaming_done.set()
        except Exception as error:
            self._failed(error)
            scope.cancel()

    async def _find_place(self) -> None:
        number = self.cursor.number
        while number > self._server.view.head.entries:
            # Committed, but the pass has not come to it yet.
            await self._park()
        self.cursor = self._server.view.cursor(number)
        self.at = self.cursor.offset

    async def _park(self) -> None:
        """Wait for the pass to move, or for a nudge."""
        self._wake = trio.Event()
        self._server.parked.add(self)
        await self._wake.wait()
        self._wake = None

    def wake(self) -> None:
        if self._wake is not None:
            self._wake.set()

    def _half_sent(self) -> bool:
        return self.at > self.cursor.offset

    def _between_entries(self) -> bool:
        """Whether nothing is half sent; tries to make the cursor say so."""
        span = self._span
        if span is not None:
            if self.at < span.end:
                place = self._server.view.boundary(span, self.cursor.number, self.at)
                if place.offset == self.at:
                    self.cursor, self._span = place, None
                else:
                    # Go on to the end of this entry, and no farther.
                    self._span = Span(span.start, min(place.offset, span.end), place)
            else:
                self.cursor, self._span = span.next, None
        return not self._half_sent()

    async def _send_some(self) -> None:
        """One turn of catching up."""
        view = self._server.view
        if self._span is not None:
            await self._send_span(self._span)
            return
        far = self.cursor.offset < view.head.length - _COPIED_TAIL
        if far and not self._half_sent() and self.transport.socket_fd is not None:
            span = view.span(self.cursor)
            self._span, self.at = span, span.start
            await self._send_span(span)
            return
        # Only to the end of the entry where a Result waits, or sendfile goes on from there.
        chunk = view.chunk(self.cursor, 1 if self._results or far else _COPY_BYTES)
        at = max(self.at, chunk.start)
        rest = chunk.data[at - chunk.start :]
        if self.transport.socket_fd is None:
            await self.transport.send(rest)
            sent = len(rest)
        else:
            sent = self.transport.send_now(rest)
        self._advance(chunk.boundary(at + sent), at + sent)
        if sent < len(rest):
            del chunk, rest  # a client that stops reading holds no entry in memory
            await self.transport.wait_writable()
        else:
            await trio.lowlevel.checkpoint()

    def _advance(self, boundary: Cursor, at: int) -> None:
        self.cursor = boundary
        self.at = max(at, boundary.offset)

    async def _send_span(self, span: Span) -> None:
        fd = self._stream.fileno()
        count = min(span.end - self.at, _SENDFILE_BYTES)
        sent = self.transport.send_file(fd, self.at, count)
        self.at += sent
        self._sent_by_file = max(self._sent_by_file, self.at)
        if self.at == span.end:
            self.cursor, self._span = span.next, None
            self.at = self.cursor.offset
        if sent < count:
            await self.transport.wait_writable()
        else:
            await trio.lowlevel.checkpoint()

    async def _go_live(self) -> None:
        """Nothing left to send: leave it to the pass until there is a reason not to."""
        if self.transport.socket_fd is None:
            await self._park()
            return
        self._wake = trio.Event()
        self._server.join_live(self)
        await self._wake.wait()
        self._wake = None

    def owes(self, entries: int) -> bool:
        """Whether it streams and has not been given all of the first `entries` entries."""
        return self._protocol.streaming and (self.cursor.number < entries or self._half_sent())

    # Changes of what was sent.

    def concerned(self, start: int, offset: int, stop: int | None, end: int) -> bool:
        """Whether a change of the entries from `start` to `stop` may reach this client.

        They stand from file offset `offset` to `end`. A truncation (`stop` None) concerns
        who has been sent any of them; an update who may not have received yet what the
        kernel only refers to.
        """
        if not self._protocol.streaming:
            return False
        if stop is None:
            return self.cursor.number > start or (self._half_sent() and self.at > offset)
        if self._started_from >= stop or self._sent_by_file <= offset:
            return False
        return self.at - self._unacknowledged() < end

    def _unacknowledged(self) -> int:
        """An upper bound for the bytes sent that the peer has not confirmed."""
        fd = self.transport.socket_fd
        if fd is None:
            return 0
        if not sys.platform.startswith("linux"):
            return self.at
        packed = fcntl.ioctl(fd, termios.TIOCOUTQ, b"\0\0\0\0")
        queued = int(struct.unpack("i", packed)[0])
        # File offsets count the padding between pages, the socket does not.
        return queued and queued + (1 << 20) * (1 + queued // (1 << 20))
