"""One client: a task that reads its commands, and one that sends while it streams.

Owns the client's cursor and the rule that exactly one writes to the connection at a
time: the reading task while the client is idle, the sender while it streams and is
behind, the server's pass (`server.py`) while it is live. Decides nothing about the
protocol (`protocol.server` does) and keeps no entry in memory for a slow client: what
was not taken yet is read again from the file.
"""

from __future__ import annotations

import contextlib
import enum
import fcntl
import logging
import struct
import termios
from typing import TYPE_CHECKING, TypeAlias

import trio

from datastreamer.errors import (
    DamagedEntry,
    DamagedFile,
    DatastreamerError,
    UnknownBookmark,
    UnknownEntry,
)
from datastreamer.format import (
    PACKET_ANSWER,
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

Question: TypeAlias = EntryQuery | BookmarkQuery | HeaderQuery
# A client that asks without a pause lets the others have theirs after so many questions.
_QUESTIONS_A_TURN = 64
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
        # What the kernel was only pointed to, in this streaming or in an earlier one that it
        # may still be busy with: nothing before this entry, nothing behind this offset.
        self._sent_from = 0
        self._sent_by_file = 0
        self._span: Span | None = None
        # Answers that wait to be sent together, the epoch that they were read in, and what
        # was asked, to be read again should that have changed.
        self._answers: list[bytes] = []
        self._questions: list[Question | None] = []
        self._answers_epoch = 0
        self._answered = 0
        # While streaming: Results to put between two entries, and what to do after them.
        self._results: list[bytes] = []
        self._results_sent = trio.Event()
        self._ending = False
        self._wake: trio.Event | None = None
        self._streaming_done = trio.Event()
        self._scope = trio.CancelScope()

    # The reading task.

    async def run(self) -> None:
        """Serve the client until it is done. Its failures are its own: they are logged."""
        with self._scope:
            async with trio.open_nursery() as nursery:
                try:
                    await self._read_commands(nursery)
                except Exception as error:  # noqa: BLE001 - nobody else is to suffer from it
                    self._failed(error)
                self._scope.cancel()

    def end(self) -> None:
        """Tear the connection down: what is still under way to the client is dropped."""
        self._server.leave_live(self)
        self.transport.reset()
        self._scope.cancel()

    @property
    def streaming(self) -> bool:
        """Whether it is to be sent entries, and has not been ended."""
        return self._protocol.streaming and not self._scope.cancel_called

    def _failed(self, error: Exception) -> None:
        if isinstance(error, (trio.BrokenResourceError, trio.ClosedResourceError)):
            _log.debug("%s: gone: %s", self.transport.peer, error)
            self._scope.cancel()
            return
        if isinstance(error, DatastreamerError):
            _log.error("%s: connection ended: %s", self.transport.peer, error)
        else:
            _log.error(
                "%s: connection ended by a fault of the server", self.transport.peer, exc_info=error
            )
        self.end()

    async def _read_commands(self, nursery: trio.Nursery) -> None:
        protocol = self._protocol
        server = self._server
        asked = 0
        while True:
            event = protocol.next_event()
            if event is None:
                if self._answers:
                    await self._send_answers()
                    await trio.lowlevel.checkpoint()
                protocol.receive(await self.transport.receive())
                continue
            if not isinstance(event, EntryQuery):
                self._stream.refresh()
            if server.changing:
                await server.settled()
            if not self._answers:
                self._answers_epoch = self._stream.epoch
            if isinstance(event, EntryQuery):
                self._answer(self._entry(event.number), event)
            elif isinstance(event, (BookmarkQuery, HeaderQuery)):
                self._answer(await self._answer_to(event), event)
            elif isinstance(event, Start):
                await self._start(nursery, self._entry_to_start(event.from_entry))
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
            asked += 1
            if self._answered >= _ANSWERS_BYTES or asked >= _QUESTIONS_A_TURN:
                asked = 0
                if self._answers:
                    await self._send_answers()
                await trio.lowlevel.checkpoint()

    def _answer(self, answer: bytes, question: Question | None = None) -> None:
        self._answers.append(answer)
        self._questions.append(question)
        self._answered += len(answer)

    async def _send_answers(self) -> None:
        stream = self._stream
        if not stream.writable:
            # Another process may have changed the file while they were read.
            stream.refresh()
            while stream.epoch != self._answers_epoch:
                await self._server.settled()
                self._answers_epoch = stream.epoch
                for at, question in enumerate(self._questions):
                    if question is not None:
                        self._answers[at] = await self._answer_to(question)
                stream.refresh()
        answers, self._answers, self._questions = self._answers, [], []
        self._answered = 0
        data = answers[0] if len(answers) == 1 else b"".join(answers)
        sent = self.transport.send_now(data)
        if sent < len(data):
            await self.transport.send(memoryview(data)[sent:])

    async def _answer_to(self, question: Question) -> bytes:
        if isinstance(question, EntryQuery):
            return self._entry(question.number)
        if isinstance(question, HeaderQuery):
            return messages.OK + self._stream.header.pack()
        try:
            return await self._first_event(question.key)
        except DamagedFile:
            if not self._server.outdated():
                raise
            return b""  # changed just now: it is read again before it is sent

    def _entry(self, number: int) -> bytes:
        packed = self._stream.reader.packed
        try:
            return packed(number, prefix=messages.OK, packet_type=PACKET_ANSWER)
        except UnknownEntry:
            if self._stream.refresh():
                with contextlib.suppress(UnknownEntry):
                    return packed(number, prefix=messages.OK, packet_type=PACKET_ANSWER)
            return messages.OK + messages.NOT_FOUND
        except DamagedFile:
            if not self._server.outdated():
                raise
            return b""  # changed just now: it is read again before it is sent

    async def _bookmark(self, key: bytes) -> int | None:
        """The newest entry with this key. A long way to it is gone in a thread, and again
        where the stream was changed meanwhile."""
        stream, server = self._stream, self._server
        while True:
            epoch = stream.epoch
            number: int | None = None
            try:
                with contextlib.suppress(UnknownBookmark):
                    if stream.bookmarks.unread() <= _INLINE_SCAN:
                        return stream.bookmark(key)
                    number = await trio.to_thread.run_sync(stream.bookmark, key)
            except DamagedFile:
                if not server.outdated() and stream.epoch == epoch:
                    raise
                epoch = -1
            await server.settled()
            if stream.epoch == epoch:
                return number

    async def _first_event(self, key: bytes) -> bytes:
        number = await self._bookmark(key)
        event = None if number is None else self._stream.reader.first_event(number)
        if event is None:
            return messages.OK + messages.NOT_FOUND
        return messages.OK + messages.encode_answer(event.number, event.type, event.data)

    def _entry_to_start(self, number: int) -> int | Refuse:
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
        # From here on a change of the stream may concern it.
        self._protocol.started()
        self.state = State.CATCH_UP
        self.cursor, self.at = Cursor(0, start), 0
        if not self._unacknowledged():
            self._sent_from, self._sent_by_file = start, 0
        self._sent_from = min(self._sent_from, start)
        self._span = None
        self._ending = False
        self._results = []
        self._streaming_done = trio.Event()
        self._answer(messages.OK)
        await self._send_answers()
        nursery.start_soon(self._send_entries)

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

    async def _send_entries(self) -> None:
        """The sender: whatever has to wait for this client waits here."""
        try:
            while not await self._next_turn():
                pass
            self.state = State.IDLE
            self._streaming_done.set()
        except Exception as error:  # noqa: BLE001 - nobody else is to suffer from it
            self._failed(error)

    async def _next_turn(self) -> bool:
        """Send something, or wait until there is something; True after a Stop's Result."""
        server, placed = self._server, self.cursor.offset > 0
        behind = server.view.head.entries - self.cursor.number
        if server.changing:
            await self._park()
        elif placed and self._results and self._between_entries():
            results, self._results = b"".join(self._results), []
            await self.transport.send(results)
            self._results_sent.set()
            self._results_sent = trio.Event()
            return self._ending
        elif behind > 0:
            if not placed:
                self._take_place()
                # A Stop that came with the Start does not overtake the first entries.
                await self._send_some(_COPY_BYTES)
            else:
                # Where a Result waits, only to the end of the entry.
                await self._send_some(1 if self._results else _COPY_BYTES)
        elif behind < 0 or self._half_sent():
            # Committed, but the pass is not through with it.
            await self._park()
        elif not placed:
            self._take_place()
        else:
            await self._go_live()
        return False

    def _take_place(self) -> None:
        self.cursor = self._server.view.cursor(self.cursor.number)
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

    async def _send_some(self, copy: int) -> None:
        """One turn of catching up; `copy` bytes of whole entries where they are copied."""
        view = self._server.view
        far = self.cursor.offset < view.head.length - _COPIED_TAIL
        by_file = far and self.transport.socket_fd is not None
        try:
            if by_file and self._span is None and not self._half_sent():
                self._span = view.span(self.cursor)
                self.at = self._span.start
            if self._span is not None:
                if not self._server.outdated():
                    await self._send_span(self._span)
                return
            # After the end of this entry sendfile goes on.
            chunk = view.chunk(self.cursor, 1 if by_file else copy)
        except DamagedFile:
            if self._server.outdated():
                return
            raise
        if self._server.outdated():
            return
        at = max(self.at, chunk.start)
        rest = chunk.data[at - chunk.start :]
        if self.transport.socket_fd is None:
            sent = len(rest)
            place = chunk.boundary(at + sent)
            del chunk  # one that stops reading holds the rest in memory, once
            self.at = at + sent  # on its way: what changes there now concerns this client
            await self.transport.send(rest)
        else:
            sent = self.transport.send_now(rest)
            place = chunk.boundary(at + sent)
            del chunk
        self.cursor = place
        self.at = max(at + sent, place.offset)
        if sent < len(rest):
            del rest  # a client that stops reading holds no entry in memory
            await self.transport.wait_writable()
        else:
            await trio.lowlevel.checkpoint()

    async def _send_span(self, span: Span) -> None:
        count = min(span.end - self.at, _SENDFILE_BYTES)
        try:
            sent = self.transport.send_file(self._stream.fileno(), self.at, count)
        except EOFError:
            raise DamagedEntry(self._stream.path, self.at, "the file ends there") from None
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
        if self.streaming:
            half_sent = self._half_sent()
            if stop is None and (self.cursor.number > start or (half_sent and self.at > offset)):
                return True
            if half_sent and offset < self.at < end:
                return True  # it would get the end of another entry than the beginning
        if self._sent_by_file <= offset or self._scope.cancel_called:
            return False
        unsent = self._unacknowledged()
        if not unsent or stop is None:
            return unsent > 0
        return self._sent_from < stop and min(self.at, self._sent_by_file) - unsent < end

    def cut_short(self, start: int, offset: int) -> None:
        """The entries from `start` on, at file offset `offset`, are about to go."""
        span = self._span
        if span is not None and span.end > offset:
            self._span = Span(span.start, offset, Cursor(offset, start))

    def _unacknowledged(self) -> int:
        """An upper bound for the bytes that the kernel was pointed to and the peer has not
        confirmed."""
        fd = self.transport.socket_fd
        if fd is None or not self.transport.by_reference:
            return 0
        packed = fcntl.ioctl(fd, termios.TIOCOUTQ, b"\0\0\0\0")
        queued = int(struct.unpack("i", packed)[0])
        # File offsets count the padding between pages, the socket does not.
        return queued and queued + (1 << 20) * (1 + queued // (1 << 20))
