"""One client: a task that reads its commands, and one that sends while it streams.

Owns the connection's course: which command is next, who acts on it, how it ends. Decides
nothing about the protocol (`protocol.server` does), reads nothing from the stream
(`answers.py`, `sender.py`).
"""

from __future__ import annotations

import itertools
import logging
import socket
import time
from typing import Final, TypeAlias

import trio

from datastreamer.errors import DatastreamerError
from datastreamer.format import RESULT_BAD_FROM_ENTRY, RESULT_NOT_ALLOWED
from datastreamer.metrics.counters import DROPPED, FAULT, kind_of
from datastreamer.protocol import messages
from datastreamer.protocol.authentication import Authenticate
from datastreamer.protocol.filter.messages import FilteredRead, FilteredStart, FilteredStartBookmark
from datastreamer.protocol.following import FollowStart, HashQuery
from datastreamer.protocol.messages import (
    BatchQuery,
    BookmarkQuery,
    CapabilitiesQuery,
    CommitStart,
    EntryQuery,
    HeaderQuery,
    RangeQuery,
    Start,
    StartBookmark,
    Stop,
)
from datastreamer.protocol.publishing import PublishQuery, encode_refusal
from datastreamer.protocol.server import Drop, End, Event, Refuse, ServerConnection
from datastreamer.server.admission.client_proof import ClientProof
from datastreamer.server.admission.gate import EVICTED, ConnectionSlot, Gate, Pace, TrustLevel
from datastreamer.server.admission.tokens import TokenExaminer
from datastreamer.server.limits import Limits
from datastreamer.server.publish.lease import PublishLease
from datastreamer.server.publish.session import PublishSession
from datastreamer.server.queries import QueryAnswers
from datastreamer.server.read_ahead import ReadAhead
from datastreamer.server.streaming.broadcast import Broadcast
from datastreamer.server.streaming.change_reports import ChangeReports, ChangesForgotten, hash_of
from datastreamer.server.streaming.sender import Sender, State
from datastreamer.server.timeouts import LIFETIMES, Activity
from datastreamer.storage.read.spans import Cursor
from datastreamer.transport.server_stream import Transport

_log = logging.getLogger(__name__)
_ids = itertools.count(1)

_DRAIN_SECONDS = 1.0
# A client that asks without a pause lets the others have theirs after so many questions.
_QUESTIONS_A_TURN = 64
# What a client asks while it waits for a commit is read up to so much.
_HEARD_AHEAD = 64 * 1024
_LIMITS: Final = Limits()


# Why a connection is over, beside the reasons of `guard.py`.
LEFT: Final = "left"
GONE: Final = "gone"
REFUSED: Final = "refused"
CHANGED: Final = "changed"
FAILED: Final = "failed"
SERVER_ENDED: Final = "server_ended"
REASONS: Final = (LEFT, GONE, REFUSED, CHANGED, FAILED, SERVER_ENDED, EVICTED, *LIFETIMES)

_ENTRY: Final = "entry"
_KINDS: Final = {
    EntryQuery: _ENTRY,
    BookmarkQuery: "bookmark",
    HeaderQuery: "header",
    CapabilitiesQuery: "capabilities",
    BatchQuery: "batch_read",
    FilteredRead: "filtered_read",
    FilteredStart: "filtered_start",
    FilteredStartBookmark: "filtered_start_bookmark",
    RangeQuery: "range_bookmark",
    Start: "start",
    CommitStart: "commit_start",
    FollowStart: "follow_start",
    HashQuery: "range_hash",
    StartBookmark: "start_bookmark",
    Stop: "stop",
}
PUBLISH: Final = "publish"
AUTHENTICATE: Final = "authenticate"
COMMANDS: Final = tuple(_KINDS.values())
"""What commands are counted as; beside these there are `PUBLISH` and `AUTHENTICATE`, where the
server accepts them."""


AnyStart: TypeAlias = (
    Start | CommitStart | FollowStart | StartBookmark | FilteredStart | FilteredStartBookmark
)

_QUESTIONS: Final = (EntryQuery, BookmarkQuery, HeaderQuery, CapabilitiesQuery)


class Session:
    """One connection of a server.

    `connection` is the socket under the transport, where there is one: for what the system
    knows of it. `place` is its place at `gate`, if it was accepted there; without a place of
    its own the client has to prove who it is before it is served. `examiner` judges tokens.
    """

    def __init__(
        self,
        live: Broadcast,
        transport: Transport,
        *,
        connection: socket.socket | None = None,
        limits: Limits = _LIMITS,
        desk: PublishLease | None = None,
        examiner: TokenExaminer | None = None,
        gate: Gate | None = None,
        place: ConnectionSlot | None = None,
    ) -> None:
        self.id = next(_ids)
        """Unlike that of any other in this process."""
        self.transport = transport
        self._proof = ClientProof(transport, gate, place, examiner)
        self.socket = connection
        self.sender = Sender(live, transport)
        self.answers = QueryAnswers(live, transport, limits)
        self.protocol = ServerConnection(
            live.stream.header.stream_type,
            publishing=desk is not None,
            authenticating=self._proof.takes_tokens,
        )
        now = trio.current_time()
        self.watch = Activity(now)
        self.heard = False
        """Whether the client has sent anything."""
        self.waiting = False
        """Whether it is the client's turn to say something."""
        self.taken = 0
        """Commands taken, refused ones too."""
        self.reason = ""
        """Why it was ended; empty until then."""
        self.place = place
        if place is not None:
            place.session = self
        self._desk = desk
        self._publication: PublishSession | None = None
        self._live = live
        self._counts = live.counts
        self._stream = live.stream
        rate = limits.request_rate
        self._pace = None if rate is None else Pace(rate, now)
        self._receiver = ReadAhead(transport)
        # Set by whatever ends the wait for a commit.
        self._news = trio.Event()
        self._finishing = False
        self._draining = False
        self._scope = trio.CancelScope()
        self._nursery: trio.Nursery | None = None

    @property
    def state(self) -> State:
        return State.DRAINING if self._draining else self.sender.state

    @property
    def streaming(self) -> bool:
        """Whether it is to be sent entries as they are committed, and has not been ended."""
        return self.sender.unbounded and not self._scope.cancel_called

    @property
    def sending(self) -> bool:
        """Whether it is being sent entries, those of a batch or range too."""
        return self.sender.streaming and not self._scope.cancel_called

    @property
    def over(self) -> bool:
        """Whether nothing is expected of the client any more."""
        return self._draining or self._scope.cancel_called

    @property
    def standing(self) -> TrustLevel:
        """What the client has proven."""
        return self._proof.standing

    @property
    def pending(self) -> int:
        """Bytes received of a command that is not complete yet."""
        return self.protocol.pending

    def note_received(self) -> None:
        """No change concerns bytes that the peer has confirmed."""
        self.sender.note_received()

    def idle_since(self) -> float | None:
        """Since when the client has neither streamed nor asked, as the last look found; None
        where it does, or the server is at work for it."""
        if self.over or not self.waiting or self.streaming or self.taken != self.watch.taken:
            return None
        return self.watch.asked_at

    @property
    def blocked(self) -> bool:
        """Whether something waits for the client to take it."""
        return self.sender.blocked or self.answers.blocked

    @property
    def sent(self) -> tuple[int, int]:
        """Changes whenever the system took a byte for the client."""
        return self.sender.at + self.sender.taken, self.answers.sent

    def concerned(self, start: int, offset: int, stop: int | None, end: int, late: bool) -> bool:
        """As `Sender.concerned`; nothing concerns who has been ended."""
        if self._scope.cancel_called:
            return False
        return self.sender.concerned(start, offset, stop, end, late=late)

    # The end.

    def end(self, reason: str, words: str, *, reset: bool = True) -> None:
        """End the connection, now. With `reset`, what is under way to the client is dropped."""
        if not self.reason:
            self.reason = reason
            told = self._told(reason)
            _log.info("%s: connection ended: %s", self.transport.peer, words, extra=told)
        self._live.leave(self.sender)
        if reset:
            self.transport.reset()
        self._scope.cancel()

    def dismiss(self) -> None:
        """End a connection that has no place, now."""
        self.reason = self.reason or REFUSED
        self._scope.cancel()

    def finish(self, entries: int) -> None:
        """Come to a good end: answer what was asked, stream on to entry number `entries` or
        to the end of the entry that is being sent, then say goodbye."""
        self._finishing = True
        self.sender.finish(entries)
        self._news.set()
        self._proof.finish()
        if self._publication is not None:
            self._publication.finish()
        if self.waiting and not self.sender.streaming and not self.over:
            assert self._nursery is not None
            self._nursery.start_soon(self._say_goodbye)

    def _told(self, reason: str) -> dict[str, object]:
        """The end, in fields for the log."""
        at = self.sender.cursor.number if self.sender.streaming else None
        return {"peer": self.transport.peer, "reason": reason, "entry": at}

    def _failed(self, error: Exception) -> None:
        if isinstance(error, (trio.BrokenResourceError, trio.ClosedResourceError)):
            self.reason = self.reason or GONE
            _log.debug("%s: gone: %s", self.transport.peer, error)
            self._scope.cancel()
            return
        known = isinstance(error, DatastreamerError)
        self._counts.errors[type(error).__name__ if known else FAULT] += 1
        self.reason = self.reason or FAILED
        told = {**self._told(FAILED), "error": type(error).__name__}
        if known:
            _log.error("%s: connection ended: %s", self.transport.peer, error, extra=told)
        else:
            _log.error(
                "%s: connection ended by a fault of the server",
                self.transport.peer,
                exc_info=error,
                extra=told,
            )
        self.end(FAILED, "")

    # The reading task.

    async def run(self) -> None:
        """Serve the client until it is done. Its failures are its own: they are logged."""
        with self._scope:
            async with trio.open_nursery() as nursery:
                self._nursery = nursery
                try:
                    await self._read_commands(nursery)
                except Exception as error:  # noqa: BLE001 - nobody else is to suffer from it
                    self._failed(error)
                self._scope.cancel()
        self._nursery = None

    async def _read_commands(self, nursery: trio.Nursery) -> None:
        protocol, answers, live = self.protocol, self.answers, self._live
        asked = 0
        event = protocol.next_event()
        while not self._draining:
            if event is None:
                if answers:
                    await answers.send()
                    await trio.lowlevel.checkpoint()
                if self._finishing and not self.sender.streaming:
                    self.reason = self.reason or SERVER_ENDED
                    await self._hang_up()
                    return
                self.waiting = True
                data = await self._receiver.receive()
                self.waiting = False
                self.heard = True
                protocol.receive(data)
                event = protocol.next_event()
                continue
            if self._proof.undecided and not self._proof.allows(event):
                self.reason = self.reason or REFUSED
                if answers:
                    await answers.send()
                return
            # The most frequent question has the shortest way.
            if type(event) is EntryQuery and self._pace is None and not live.changing:
                most = _QUESTIONS_A_TURN - asked
                answered, event = answers.answer_entries(event, protocol.next_event, most)
                asked += answered
                self.taken += answered
                self._counts.commands[_ENTRY] += answered
                if event is None:
                    continue
            if asked < _QUESTIONS_A_TURN and not answers.full:
                self.taken += 1
                if self._pace is not None:
                    await self._keep_pace(self._pace)
                if await self._obey(nursery, event):
                    return
                event = protocol.next_event()
                asked += 1
            if asked >= _QUESTIONS_A_TURN or answers.full:
                asked = 0
                if answers:
                    await answers.send()
                await trio.lowlevel.checkpoint()
        await self._run_dry()

    async def _obey(self, nursery: trio.Nursery, event: Event) -> bool:
        """Do what was asked; True when the connection is over with it."""
        answers, live = self.answers, self._live
        if not isinstance(event, EntryQuery):
            self._stream.refresh_open_file()
        if live.changing:
            await live.settled()
        answers.begin()
        if isinstance(event, (Refuse, Drop, End)):
            return await self._refuse_or_leave(event)
        if isinstance(event, PublishQuery):
            await self._publish(event)
            return True
        if isinstance(event, Authenticate):
            return await self._authenticate(event)
        self._counts.commands[_KINDS[type(event)]] += 1
        if isinstance(event, _QUESTIONS):
            await answers.answer(event)
        elif isinstance(event, BatchQuery):
            await self._send_batch(nursery, event)
        elif isinstance(event, FilteredRead):
            await self._send_filtered(nursery, event)
        elif isinstance(event, RangeQuery):
            await self._send_range(event)
        elif isinstance(event, HashQuery):
            await self._send_hash(event)
        elif isinstance(event, Stop):
            await self.sender.end_with(messages.OK)
            self.protocol.stopped()
        else:
            await self._start(nursery, event)
        return False

    async def _keep_pace(self, pace: Pace) -> None:
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
        types = command.types if isinstance(command, filtered) else ()
        following = None
        if isinstance(command, FollowStart):
            following = ChangeReports(self._live, command.known)
        self.sender.begin(
            place,
            types,
            commits=isinstance(command, (CommitStart, FollowStart)),
            following=following,
        )
        self.protocol.started()
        self.answers.add(messages.OK)
        await self.answers.send()
        nursery.start_soon(self._send)

    # Who the client is.

    async def _authenticate(self, command: Authenticate) -> bool:
        """Judge a client's token; True when the connection is over with it."""
        self._counts.commands[AUTHENTICATE] += 1
        if self.answers:
            await self.answers.send()
        proof, token = self._proof, command.token
        allowed = await proof.examine(AUTHENTICATE, lambda: proof.knows(token))
        if allowed and proof.accept(TrustLevel.KNOWN):
            self.answers.add(messages.OK)
            return False
        self.reason = self.reason or REFUSED
        if allowed is False:
            why = "the server does not know this token"
            return await self._refuse(Refuse(RESULT_NOT_ALLOWED, close=True, why=why))
        return True

    async def _publish(self, query: PublishQuery) -> None:
        """All that is left of this connection is a source's."""
        assert self._desk is not None
        self._counts.commands[PUBLISH] += 1
        if self.answers:
            await self.answers.send()
        desk, transport = self._desk, self.transport
        allowed = await self._proof.examine(PUBLISH, lambda: desk.allows(query, transport))
        if allowed is False:
            why = "neither token nor certificate allows this client to publish"
            await self._refuse(Refuse(RESULT_NOT_ALLOWED, close=True, why=why))
        if not allowed or not self._proof.accept(TrustLevel.PUBLISHER):
            self.reason = self.reason or REFUSED
            return
        receive = self._receiver.receive
        left = self.protocol.hand_over()
        self._publication = PublishSession(self._desk, self.transport, receive, left)
        if self._finishing:
            self._publication.finish()
        last = await self._publication.run(query)
        self.reason = self.reason or (REFUSED if last else LEFT)
        if last:
            self.answers.begin()
            self.answers.add(last)
        await self._hang_up()

    # Many entries for one question.

    async def _send_batch(self, nursery: trio.Nursery, query: BatchQuery) -> None:
        if query.wait_ms and query.from_entry == self._stream.total_entries:
            await self._wait_for_entries(nursery, query.from_entry, query.wait_ms / 1000)
        began = time.perf_counter()
        batch = await self.answers.batches.read(query)
        if batch is not None and batch.data is None and self.answers:
            await self.answers.send()
            batch = await self.answers.batches.read(query)
        if batch is None:
            await self._refuse(Refuse(RESULT_BAD_FROM_ENTRY, close=False))
            return
        if batch.data is None:
            await self._send_part(batch.head, batch.start, batch.stop)
        else:
            self.answers.add(batch.head + batch.data, query)
            self._counts.entries_sent += batch.stop.number - batch.start.number
        self._counts.batch_seconds.add(time.perf_counter() - began)
        self._counts.batch_bytes.add(batch.size)

    async def _send_filtered(self, nursery: trio.Nursery, query: FilteredRead) -> None:
        filters, stream = self.answers.filters, self._stream
        frame = await filters.read(query)
        until = trio.current_time() + query.wait_ms / 1000
        while (
            frame is not None
            and not frame.entries
            and frame.stop.number == stream.total_entries < query.stop
            and (left := until - trio.current_time()) > 0
        ):
            epoch = stream.epoch
            if not await self._wait_for_entries(nursery, frame.stop.number, left):
                until = 0
            frame = await filters.read(query, frame if stream.epoch == epoch else None)
            if stream.epoch != epoch:
                break
        began = time.perf_counter()
        if frame is not None and frame.data is None and self.answers:
            await self.answers.send()
            frame = await filters.read(query)
        if frame is None:
            await self._refuse(Refuse(RESULT_BAD_FROM_ENTRY, close=False))
            return
        head = filters.begins_with(frame)
        if frame.data is None:
            first = frame.stop.number - frame.entries
            await self._send_part(head, Cursor(frame.start, first), frame.stop)
        else:
            self.answers.add(head + frame.data, query)
            self._counts.entries_sent += frame.entries
        self._counts.batch_seconds.add(time.perf_counter() - began)
        self._counts.batch_bytes.add(frame.size)

    async def _send_range(self, query: RangeQuery) -> None:
        if self.answers:
            await self.answers.send()
        place = await self.answers.range(query)
        if isinstance(place, Refuse):
            await self._refuse(place)
            return
        start, stop = place
        await self._send_part(messages.encode_range_head(stop.number - 1), start, stop)

    async def _send_hash(self, query: HashQuery) -> None:
        # By itself: others that were kept back for it would be read again with each change.
        if self.answers:
            await self.answers.send()
        began = time.perf_counter()
        answer = await hash_of(self._live, self._live.hashing, query)
        self.answers.begin()
        if answer is None:
            await self._refuse(Refuse(RESULT_BAD_FROM_ENTRY, close=False))
            return
        self.answers.add(messages.OK + answer)
        self._counts.hash_seconds += time.perf_counter() - began
        await self.answers.send()

    async def _send_part(self, head: bytes, start: Cursor, stop: Cursor) -> None:
        """Send `head` and the entries from `start` to `stop`, which stand there now."""
        self.sender.begin_part(start, stop)
        self.answers.add(head)
        await self.answers.send()
        await self.sender.run()
        self.sender.end_part()

    async def _wait_for_entries(self, nursery: trio.Nursery, number: int, seconds: float) -> bool:
        """Wait for entry `number`, which is the next to be committed: True where there are news
        of it, False where the client is to be told that there are none."""
        if self.answers:
            await self.answers.send()
        stream, live, protocol = self._stream, self._live, self.protocol
        epoch, leaves = stream.epoch, False
        with trio.move_on_after(seconds):
            while number == stream.total_entries and stream.epoch == epoch:
                if self._finishing or leaves:
                    break
                self._news = trio.Event()
                live.watch(self._news)
                if protocol.pending < _HEARD_AHEAD:
                    self._receiver.listen(nursery, self._news.set)
                try:
                    await self._news.wait()
                finally:
                    live.watchers.discard(self._news)
                if self._receiver.heard:
                    leaves = not await self._hear()
        await live.settled()
        return number != stream.total_entries or stream.epoch != epoch

    async def _hear(self) -> bool:
        """Take what the client said meanwhile; False where that was its last word."""
        try:
            data = await self._receiver.receive()
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            data = b""
        self.protocol.receive(data)
        return bool(data)

    async def _send(self) -> None:
        try:
            if not await self.sender.run():
                await self._say_goodbye()
        except ChangesForgotten:
            self.end(CHANGED, "more was changed than can be reported to this client")
        except Exception as error:  # noqa: BLE001 - nobody else is to suffer from it
            self._failed(error)

    async def _refuse_or_leave(self, event: Refuse | Drop | End) -> bool:
        """True when the connection is over with it."""
        if isinstance(event, Refuse):
            _log.debug("%s: refused with Result %d", self.transport.peer, event.number)
            return await self._refuse(event)
        if isinstance(event, Drop):
            self._proof.note_drop(event)
            self._counts.errors[DROPPED] += 1
        self.reason = self.reason or (REFUSED if isinstance(event, Drop) else LEFT)
        if not self.protocol.streaming:
            await self._hang_up()
        return True

    async def _refuse(self, refusal: Refuse) -> bool:
        """Send a Result other than OK; True when the connection is over with it."""
        self._counts.errors[kind_of(refusal.number)] += 1
        result = messages.encode_result(refusal.number)
        if refusal.why:
            result = encode_refusal(refusal.number, refusal.why)
        if not self.protocol.streaming:
            self.answers.add(result)
        elif refusal.close:
            await self.sender.end_with(result)
        else:
            await self.sender.put_in(result)
        if refusal.close:
            self.reason = self.reason or REFUSED
            await self._hang_up()
        return refusal.close

    async def _hang_up(self) -> None:
        """End our side, and let what still comes run dry: else a reset eats the Result."""
        self._draining = True
        if self.answers:
            await self.answers.send()
        await self.transport.end_sending()
        await self._run_dry()

    async def _run_dry(self) -> None:
        with trio.move_on_after(_DRAIN_SECONDS):
            while await self.transport.receive():
                pass

    async def _say_goodbye(self) -> None:
        """As `_hang_up`, from beside the reading task, which throws away what still comes."""
        self.reason = self.reason or SERVER_ENDED
        self._draining = True
        await self.transport.end_sending()
        await trio.sleep(_DRAIN_SECONDS)
        self._scope.cancel()
