"""One client: a task that reads its commands, and one that sends while it streams.

Owns the order of commands, which part executes each, and how the connection ends. Decides
nothing about the protocol (`protocol.server` does) and reads nothing from the stream
(`queries.py` and `catch_up.py` do).
"""

from __future__ import annotations

import itertools
import logging
import socket
from typing import Final

import trio

from datastreamer.errors import UNREADABLE, DamagedPage, DatastreamerError, StreamFileError
from datastreamer.format import RESULT_NOT_ALLOWED
from datastreamer.metrics.counters import DROPPED, FAULT, kind_of
from datastreamer.printable import one_line
from datastreamer.protocol import messages
from datastreamer.protocol.commands import (
    Authenticate,
    ClientName,
    CommitStart,
    EntryQuery,
    FilteredStart,
    FilteredStartBookmark,
    FollowStart,
    Start,
    StartBookmark,
    Stop,
)
from datastreamer.protocol.publish.messages import PublishQuery, encode_refusal
from datastreamer.protocol.server import Drop, End, Event, Refuse, ServerConnection
from datastreamer.server import damage
from datastreamer.server.admission.client_proof import ClientProof
from datastreamer.server.admission.gate import ConnectionSlot, Gate, Pace, TrustLevel
from datastreamer.server.admission.tokens import TokenExaminer
from datastreamer.server.answers.bookmark_queries import BookmarkQueries
from datastreamer.server.answers.long_answers import LongAnswers, LongQuery
from datastreamer.server.answers.queries import AnyStart, QueryAnswers, Question
from datastreamer.server.command_labels import AUTHENTICATE, KINDS, PUBLISH
from datastreamer.server.limits import Limits
from datastreamer.server.publish.lease import PublishLease
from datastreamer.server.publish.session import PublishSession
from datastreamer.server.read_ahead import ReadAhead
from datastreamer.server.streaming.broadcast import Broadcast
from datastreamer.server.streaming.catch_up import Sender, State
from datastreamer.server.streaming.change_reports import ChangeReports, ChangesForgotten
from datastreamer.server.streaming.output import ClientOutput
from datastreamer.transport.server_stream import Transport

_log = logging.getLogger(__name__)
_ids = itertools.count(1)

_DRAIN_SECONDS = 1.0
# A client that asks without a pause yields to the others after this many queries.
_QUESTIONS_A_TURN = 64

# Why a connection ended, in addition to the reasons of `timeouts.py`.
LEFT: Final = "left"
GONE: Final = "gone"
REFUSED: Final = "refused"
CHANGED: Final = "changed"
FAILED: Final = "failed"
SERVER_ENDED: Final = "server_ended"


class Activity:
    """State of one client when `timeouts.py` last checked it, and when each time limit began."""

    __slots__ = ("acknowledged", "asked_at", "came_at", "half_at", "moved_at", "probe_at",
                 "sent", "taken")  # fmt: skip

    def __init__(self, now: float) -> None:
        self.came_at = self.asked_at = self.half_at = self.moved_at = now
        self.probe_at = now
        self.taken = self.acknowledged = 0
        self.sent = (0, 0)


class Session:
    """One connection of a server.

    `connection` is the socket under the transport, if there is one, to read TCP information from.
    `place` is its slot at `gate`, if it was accepted there; a client whose slot is provisional has
    to prove who it is before it is served. `token_examiner` checks tokens.
    """

    def __init__(
        self,
        broadcast: Broadcast,
        transport: Transport,
        *,
        bookmark_queries: BookmarkQueries,
        connection: socket.socket | None,
        limits: Limits,
        publish_lease: PublishLease | None,
        token_examiner: TokenExaminer,
        gate: Gate,
        place: ConnectionSlot | None,
    ) -> None:
        self.id = next(_ids)
        """Unique in this process."""
        self.transport = transport
        self._token_examiner = token_examiner
        self.client_proof = ClientProof(transport, gate, place, token_examiner)
        self.socket = connection
        self._output = ClientOutput(transport, broadcast.counts)
        self.sender = Sender(broadcast, transport, self._output)
        self.answers = QueryAnswers(broadcast, bookmark_queries, self._output, limits)
        self.protocol = ServerConnection(
            broadcast.stream.header.stream_type,
            publishing=publish_lease is not None,
            authenticating=token_examiner.takes_tokens,
        )
        now = trio.current_time()
        self.watch = Activity(now)
        self.heard = False
        """Whether the client has sent anything."""
        self.waiting = False
        """Whether the server waits for a command of the client."""
        self.taken = 0
        """Commands received, refused ones too."""
        self.reason = ""
        """Why it was ended; empty until then."""
        self.place = place
        if place is not None:
            place.session = self
        self._publish_lease = publish_lease
        self._publish_session: PublishSession | None = None
        self._broadcast = broadcast
        self._counts = broadcast.counts
        self._stream = broadcast.stream
        rate = limits.request_rate
        self._pace = None if rate is None else Pace(rate, now)
        self._read_ahead = ReadAhead(transport)
        self._long_answers = LongAnswers(
            broadcast, self.answers, self.sender, self._read_ahead, self.protocol
        )
        # Whether a client that streams knows a Result that it did not request.
        self._explains = False
        self._finishing = False
        self._draining = False
        self._scope = trio.CancelScope()
        self._nursery: trio.Nursery | None = None

    @property
    def state(self) -> State:
        return State.DRAINING if self._draining else self.sender.state

    @property
    def streaming(self) -> bool:
        """Whether it is sent entries as they are committed, and was not ended."""
        return self.sender.unbounded and not self._scope.cancel_called

    @property
    def sending(self) -> bool:
        """Whether entries are being sent, those of a batch or range too."""
        return self.sender.streaming and not self._scope.cancel_called

    @property
    def over(self) -> bool:
        """Whether no further command of the client is executed."""
        return self._draining or self._scope.cancel_called

    def idle_since(self) -> float | None:
        """Since when the client has neither streamed nor sent a command, as the last check found;
        None if it does, or the server works for it."""
        if self.over or not self.waiting or self.streaming or self.taken != self.watch.taken:
            return None
        return self.watch.asked_at

    @property
    def blocked(self) -> bool:
        return self._output.blocked

    @property
    def sent(self) -> tuple[int, int]:
        """Changes whenever the kernel accepted a byte for the client."""
        return self.sender.at, self._output.sent

    def affected(self, start: int, offset: int, stop: int | None, end: int, late: bool) -> bool:
        """As `Sender.affected`; False for a session that was ended."""
        if self._scope.cancel_called:
            return False
        return self.sender.affected(start, offset, stop, end, late=late)

    # The end.

    def end(self, reason: str, words: str, *, reset: bool = True) -> None:
        """End the connection now. With `reset`, bytes that are not sent yet are dropped."""
        self._broadcast.leave(self.sender)
        if not self.reason:
            self.reason = reason
            fields = self._end_fields(reason)
            _log.info("%s: connection ended: %s", self.transport.peer, words, extra=fields)
        if reset:
            self.transport.reset()
        self._scope.cancel()

    def dismiss(self) -> None:
        """End a connection that has only a provisional slot, now."""
        self.reason = self.reason or REFUSED
        self._scope.cancel()

    def finish(self, entries: int) -> None:
        """Shut down in order: answer the commands received, stream up to entry `entries` or to the
        end of the current entry, then close."""
        self._finishing = True
        self.sender.finish(entries)
        self._long_answers.finish()
        self.client_proof.finish()
        if self._publish_session is not None:
            self._publish_session.finish()
        if self.waiting and not self.sender.streaming and not self.over:
            assert self._nursery is not None
            self._nursery.start_soon(self._end_beside_reader)

    def _end_fields(self, reason: str) -> dict[str, object]:
        at = self.sender.cursor.number if self.sender.streaming else None
        return {"peer": self.transport.peer, "reason": reason, "entry": at}

    async def _failed(self, error: Exception) -> None:
        if isinstance(error, (trio.BrokenResourceError, trio.ClosedResourceError)):
            self.reason = self.reason or GONE
            _log.debug("%s: connection lost: %s", self.transport.peer, error)
            self._scope.cancel()
            return
        if isinstance(error, UNREADABLE):
            error = await damage.noted(self._broadcast, error)
        known = isinstance(error, DatastreamerError)
        # The damage of a page is logged once, not for each of its clients.
        level = logging.DEBUG if isinstance(error, DamagedPage) else logging.ERROR
        self._counts.errors[type(error).__name__ if known else FAULT] += 1
        self.reason = self.reason or FAILED
        fields = {**self._end_fields(FAILED), "error": type(error).__name__}
        if known:
            _log.log(level, "%s: connection ended: %s", self.transport.peer, error, extra=fields)
        else:
            _log.error(
                "%s: connection ended by an error in the server",
                self.transport.peer,
                exc_info=error,
                extra=fields,
            )
        self.end(FAILED, "")

    # The reading task.

    async def run(self) -> None:
        """Serve the client until the connection ends. Failures are logged and affect this client
        alone."""
        with self._scope:
            async with trio.open_nursery() as nursery:
                self._nursery = nursery
                try:
                    await self._read_commands(nursery)
                except Exception as error:  # noqa: BLE001 - other clients go on
                    await self._failed(error)
                self._scope.cancel()
        self._nursery = None

    async def _read_commands(self, nursery: trio.Nursery) -> None:
        protocol, answers, broadcast = self.protocol, self.answers, self._broadcast
        asked = 0
        while not self._draining:
            if asked >= _QUESTIONS_A_TURN or answers.full:
                asked = 0
                if answers:
                    await answers.send()
                await trio.lowlevel.checkpoint()
                continue
            # The most frequent queries have the shortest path.
            if (
                self._pace is None
                and not self.client_proof.undecided
                and not broadcast.turns.changing
            ):
                queries = protocol.queries(_QUESTIONS_A_TURN - asked)
                if queries:
                    answered = answers.answer_at_hand(queries)
                    protocol.took(answered)
                    asked += answered
                    self.taken += answered
                    if asked >= _QUESTIONS_A_TURN or answers.full:
                        continue
            event = protocol.next_event()
            if event is None:
                if answers:
                    await answers.send()
                if self._finishing and not self.sender.streaming:
                    self.reason = self.reason or SERVER_ENDED
                    await self._hang_up()
                    return
                self.waiting = True
                data = await self._read_ahead.receive()
                self.waiting = False
                self.heard = True
                protocol.receive(data)
                continue
            if self.client_proof.undecided and not self.client_proof.allows(event):
                self.reason = self.reason or REFUSED
                if answers:
                    await answers.send()
                return
            self.taken += 1
            if self._pace is not None:
                await self._limit_rate(self._pace)
            if await self._execute(nursery, event):
                return
            asked += 1
        await self._drain_input()

    async def _execute(self, nursery: trio.Nursery, event: Event) -> bool:
        """Execute one command; True if the connection ends with it."""
        answers, broadcast = self.answers, self._broadcast
        if not isinstance(event, EntryQuery):
            self._stream.refresh_open_file()
        if broadcast.turns.changing:
            await broadcast.turns.settled()
        answers.begin()
        if isinstance(event, (Refuse, Drop, End)):
            return await self._refuse_or_end(event)
        if isinstance(event, PublishQuery):
            await self._publish(event)
            return True
        if isinstance(event, Authenticate):
            return await self._authenticate(event)
        self._counts.commands[KINDS[type(event)]] += 1
        if isinstance(event, LongQuery):
            refusal = await self._long_answers.send(nursery, event)
            if refusal is not None:
                await self._refuse(refusal)
        elif isinstance(event, AnyStart):
            await self._start(nursery, event)
        elif isinstance(event, Stop):
            await self.sender.end_with(messages.OK)
            self.protocol.stopped()
        elif isinstance(event, Question):
            await answers.answer(event)
        elif isinstance(event, ClientName):
            name = one_line(event.name.decode("utf-8", "replace"))
            self.transport.peer = f"{self.transport.peer.partition(' (')[0]} ({name})"
            answers.add(messages.OK)
        return False

    async def _limit_rate(self, pace: Pace) -> None:
        seconds = pace.step(trio.current_time())
        if seconds:
            if self.answers:
                await self.answers.send()
            await trio.sleep(seconds)

    async def _start(self, nursery: trio.Nursery, command: AnyStart) -> None:
        place = await self.answers.place(command)
        if isinstance(place, Refuse):
            await self._refuse(place)
            return
        filtered = (FilteredStart, FilteredStartBookmark)
        where = command.where if isinstance(command, filtered) else ()
        change_reports = None
        if isinstance(command, FollowStart):
            change_reports = ChangeReports(self._broadcast, command.known)
        self.sender.begin(
            place,
            where,
            commits=isinstance(command, (CommitStart, FollowStart)),
            change_reports=change_reports,
        )
        self.protocol.started()
        self._explains = not isinstance(command, (Start, StartBookmark))
        self.answers.add(messages.OK)
        await self.answers.send()
        nursery.start_soon(self._send)

    # Authentication.

    async def _authenticate(self, command: Authenticate) -> bool:
        self._counts.commands[AUTHENTICATE] += 1
        if self.answers:
            await self.answers.send()
        proof, token = self.client_proof, command.token
        allowed = await proof.examine(AUTHENTICATE, lambda: self._token_examiner.knows(token))
        if allowed and proof.accept(TrustLevel.KNOWN):
            self.answers.add(messages.OK)
            return False
        self.reason = self.reason or REFUSED
        if allowed is False:
            why = "the server does not know this token"
            return await self._refuse(Refuse(RESULT_NOT_ALLOWED, close=True, why=why))
        return True

    async def _publish(self, query: PublishQuery) -> None:
        """The rest of this connection belongs to a publisher."""
        assert self._publish_lease is not None
        self._counts.commands[PUBLISH] += 1
        if self.answers:
            await self.answers.send()
        publish_lease, transport = self._publish_lease, self.transport
        allowed = await self.client_proof.examine(
            PUBLISH, lambda: publish_lease.allows(query, transport)
        )
        if allowed is False:
            why = "neither token nor certificate allows this client to publish"
            await self._refuse(Refuse(RESULT_NOT_ALLOWED, close=True, why=why))
        if not allowed or not self.client_proof.accept(TrustLevel.PUBLISHER):
            self.reason = self.reason or REFUSED
            return
        receive = self._read_ahead.receive
        left = self.protocol.hand_over()
        self._publish_session = PublishSession(self._publish_lease, self.transport, receive, left)
        if self._finishing:
            self._publish_session.finish()
        last = await self._publish_session.run(query)
        self.reason = self.reason or (REFUSED if last else LEFT)
        if last:
            self.answers.begin()
            self.answers.add(last)
        await self._hang_up()

    async def _send(self) -> None:
        try:
            if not await self.sender.run():
                await self._end_beside_reader()
        except ChangesForgotten:
            self.end(CHANGED, "more entries were changed than can be reported to this client")
        except Exception as error:  # noqa: BLE001 - other clients go on
            try:
                if not isinstance(error, UNREADABLE) or not await self._explain(error):
                    await self._failed(error)
            except Exception as another:  # noqa: BLE001 - other clients go on
                await self._failed(another)

    async def _explain(self, error: StreamFileError) -> bool:
        """The next entries are damaged: end the streaming with a Result that says so, and the
        connection; False if the client may not understand it, or something is half sent."""
        if not self._explains or not self.sender.between_packets:
            return False
        refusal = await damage.refusal(self._broadcast, error, "the next entries")
        self._counts.errors[kind_of(refusal.number)] += 1
        self.reason = self.reason or FAILED
        await self._output.send(encode_refusal(refusal.number, refusal.why))
        await self._end_beside_reader()
        return True

    async def _refuse_or_end(self, event: Refuse | Drop | End) -> bool:
        if isinstance(event, Refuse):
            _log.debug("%s: refused with Result %d", self.transport.peer, event.number)
            return await self._refuse(event)
        if isinstance(event, Drop):
            self.client_proof.note_drop(event)
            self._counts.errors[DROPPED] += 1
            if event.answer:
                self.answers.add(event.answer)
        self.reason = self.reason or (REFUSED if isinstance(event, Drop) else LEFT)
        if not self.protocol.streaming:
            await self._hang_up()
        return True

    async def _refuse(self, refusal: Refuse) -> bool:
        """Send a Result other than OK; True if the connection ends with it."""
        self._counts.errors[kind_of(refusal.number)] += 1
        result = messages.encode_result(refusal.number)
        if refusal.why:
            result = encode_refusal(refusal.number, refusal.why)
        if not self.protocol.streaming:
            self.answers.add(result)
        elif refusal.close:
            await self.sender.end_with(result)
        else:
            await self.sender.send_between_entries(result)
        if refusal.close:
            self.reason = self.reason or REFUSED
            await self._hang_up()
        return refusal.close

    async def _hang_up(self) -> None:
        """End our side and discard further input: a reset would destroy the Result on its way."""
        self._draining = True
        if self.answers:
            await self.answers.send()
        await self.transport.end_sending()
        await self._drain_input()

    async def _drain_input(self) -> None:
        with trio.move_on_after(_DRAIN_SECONDS):
            while await self.transport.receive():
                pass

    async def _end_beside_reader(self) -> None:
        """As `_hang_up`, called beside the reading task, which discards further input."""
        self.reason = self.reason or SERVER_ENDED
        self._draining = True
        await self.transport.end_sending()
        await trio.sleep(_DRAIN_SECONDS)
        self._scope.cancel()
