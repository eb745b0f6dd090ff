"""One client: a task that reads its commands, and one that sends while it streams.

Owns the connection's course: which command is next, who acts on it, how it ends. Decides
nothing about the protocol (`protocol.server` does), reads nothing from the stream
(`answers.py`, `sender.py`).
"""

from __future__ import annotations

import logging

import trio

from datastreamer.errors import DatastreamerError
from datastreamer.net.answers import Answers
from datastreamer.net.live import Live
from datastreamer.net.sender import Sender, State
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

_log = logging.getLogger(__name__)

_DRAIN_SECONDS = 1.0
# A client that asks without a pause lets the others have theirs after so many questions.
_QUESTIONS_A_TURN = 64


class Session:
    """One connection of a server."""

    def __init__(self, live: Live, transport: Transport) -> None:
        self.transport = transport
        self.sender = Sender(live, transport)
        self.answers = Answers(live, transport)
        self.protocol = ServerConnection(live.stream.header.stream_type)
        self._live = live
        self._counts = live.counts
        self._stream = live.stream
        self._draining = False
        self._scope = trio.CancelScope()

    @property
    def state(self) -> State:
        return State.DRAINING if self._draining else self.sender.state

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
        self._live.leave(self.sender)
        self.transport.reset()
        self._scope.cancel()

    @property
    def streaming(self) -> bool:
        """Whether it is to be sent entries, and has not been ended."""
        return self.sender.streaming and not self._scope.cancel_called

    def concerned(self, start: int, offset: int, stop: int | None, end: int) -> bool:
        """As `Sender.concerned`; nothing concerns who has been ended."""
        return not self._scope.cancel_called and self.sender.concerned(start, offset, stop, end)

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
        protocol, answers, live = self.protocol, self.answers, self._live
        asked = 0
        while True:
            event = protocol.next_event()
            if event is None:
                if answers:
                    await answers.send()
                    await trio.lowlevel.checkpoint()
                protocol.receive(await self.transport.receive())
                continue
            if not isinstance(event, EntryQuery):
                self._stream.refresh()
            if live.changing:
                await live.settled()
            answers.begin()
            if isinstance(event, EntryQuery):
                answers.answer_entry(event)
            elif isinstance(event, (BookmarkQuery, HeaderQuery)):
                await answers.answer(event)
            elif isinstance(event, (Start, StartBookmark)):
                await self._start(nursery, event)
            elif isinstance(event, Stop):
                await self.sender.end_with(messages.OK)
                protocol.stopped()
            elif isinstance(event, Refuse):
                _log.debug("%s: refused with Result %d", self.transport.peer, event.number)
                if await self._refuse(event):
                    return
            else:
                await self._leave(event)
                return
            asked += 1
            if answers.full or asked >= _QUESTIONS_A_TURN:
                asked = 0
                if answers:
                    await answers.send()
                await trio.lowlevel.checkpoint()

    async def _start(self, nursery: trio.Nursery, command: Start | StartBookmark) -> None:
        place = await self.answers.place(command)
        if isinstance(place, Refuse):
            await self._refuse(place)
            return
        self.sender.begin(place)
        self.protocol.started()
        self.answers.add(messages.OK)
        await self.answers.send()
        nursery.start_soon(self._send)

    async def _send(self) -> None:
        try:
            await self.sender.run()
        except Exception as error:  # noqa: BLE001 - nobody else is to suffer from it
            self._failed(error)

    async def _refuse(self, refusal: Refuse) -> bool:
        """Send a Result other than OK; True when the connection is over with it."""
        result = messages.encode_result(refusal.number)
        if not self.protocol.streaming:
            self.answers.add(result)
        elif refusal.close:
            await self.sender.end_with(result)
        else:
            await self.sender.put_in(result)
        if refusal.close:
            await self._hang_up()
        return refusal.close

    async def _leave(self, event: Drop | End) -> None:
        if isinstance(event, Drop):
            _log.debug("%s: closed: %s", self.transport.peer, event.reason)
        if not self.protocol.streaming:
            await self._hang_up()

    async def _hang_up(self) -> None:
        """End our side, and let what still comes run dry: else a reset eats the Result."""
        self._draining = True
        if self.answers:
            await self.answers.send()
        await self.transport.end_sending()
        with trio.move_on_after(_DRAIN_SECONDS):
            while await self.transport.receive():
                pass
