"""Followers: clients that are sent entries as they are committed, by Server-Sent Events.

Owns each follower's place in the stream. Keeps no entry in memory for a slow client, but for the
rest of one event: what it has not received is read again from the file. All followers of one kind
that have everything are sent the next event in one pass (`server/streaming/feed.py`).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, Final

import trio

from datastreamer._codec import EntryBatch
from datastreamer.errors import UnknownEntry
from datastreamer.http.answers.formats import json_items
from datastreamer.http.answers.reading import (
    HttpSource,
    Piece,
    Reading,
    Received,
    received,
)
from datastreamer.http.port.messages import (
    AnswerCut,
    BodyOutput,
    HttpAnswer,
    HttpProblem,
    HttpRequest,
    unless_gone,
)
from datastreamer.metrics.counters import HttpCounts
from datastreamer.selection.clauses import Selection
from datastreamer.selection.times import TimeMarks
from datastreamer.server.streaming import feed
from datastreamer.server.streaming.turns import EntryChange
from datastreamer.storage.header.records import Head
from datastreamer.storage.read.spans import Chunk, Cursor
from datastreamer.storage.stream import DataStream
from datastreamer.transport.server_stream import Buffer, Transport
from datastreamer.zkevm.entry_json import KnownTimes

EVENT_STREAM: Final = "text/event-stream"
EVENT_HEADERS: Final = [("Cache-Control", "no-cache, no-store"), ("X-Accel-Buffering", "no")]
_HEARTBEAT_SECONDS: Final = 15.0
# A comment without an empty line, after which some clients have an event without data.
_HEARTBEAT: Final = b":\n"
# How clients give the id of the last event that they have, if not in the header of that name.
_LAST_IDS: Final = ("lastEventId", "Last-Event-ID", "last-event-id")
# How long a browser waits before it connects again.
_RETRY: Final = b"retry: 1000\n"
# Updates that wait to be sent to one client; one with more has to connect again.
_MOST_UPDATES: Final = 1000
# Of entries that were just committed nothing is asked: their times are not known everywhere yet.
_NEW: Final = KnownTimes(lambda number, _: TimeMarks(next=number))
_UPDATED: Final = b"event: updated\n%bdata: [%b]\n\n"
_ID: Final = re.compile("([0-9]{1,20})(?:-([0-9]{1,20}))?")


class FollowQueries:
    """Answers `GET /v1/follow`."""

    def __init__(self, source: HttpSource) -> None:
        self._source = source

    async def follow(self, request: HttpRequest) -> HttpAnswer:
        parameters = request.parameters("from", *_LAST_IDS, repeated=["type", "prefix"])
        where = parameters.selection()
        reading = self._source.reading()
        begin, ids = parameters.text("from"), [parameters.text(name) for name in _LAST_IDS]
        # The header is newer: the page may have been opened with the parameter.
        seen = next(filter(None, [request.header(b"last-event-id"), *ids]), None)
        if seen is not None:
            at = _received(seen)
            if reading.missed(at.epoch) is None:
                raise HttpProblem(
                    410,
                    "it is not known which entries were truncated or updated since this "
                    "Last-Event-ID; begin again with from=N",
                )
        else:
            at = reading.received(reading.total if begin is None else await reading.first(begin))
            if at.number > reading.total:
                raise HttpProblem(
                    416,
                    f"there is no entry {at.number}; the stream has {reading.total} entries",
                )
        follower = Follower(reading, at, EventForm(where))
        return HttpAnswer(200, EVENT_STREAM, follower.send, EVENT_HEADERS, follows=True)


@dataclass(frozen=True)
class EventForm:
    """How events are written. Each is a chunk of the body. `where` selects the entries."""

    where: Selection | None = None
    most_bytes: ClassVar[int] = 12 * 1024
    """Bytes of the file in one event, which has at most about 64 KiB, or one entry."""
    reports_changes: ClassVar[bool] = True
    """Whether a follower is sent changes of what it has. If not, its answer ends."""

    def begin(self, at: Received, total: int) -> bytes:
        """What a follower is sent at once."""
        return b""

    def items(self, batch: EntryBatch, times: KnownTimes) -> bytes:
        """The selected entries as items of a JSON array; empty if there are no such entries."""
        chosen = batch if self.where is None else batch.select(self.where)
        return json_items(chosen, times) if len(chosen) else b""

    def entries(self, items: bytes, at: Received, up_to_date: bool) -> bytes:
        """An event with entries, after which the client is at `at`: its id is the number of the
        next entry, and the epoch if it is not 0."""
        return b"%bdata: [%b]\n\n" % (_id(at), items)

    def encode(self, stream: DataStream, entries: Chunk, end: Head) -> feed.Encoded | None:
        after = entries.next.number
        items = self.items(entries.batch, _NEW)
        if not items:
            return None  # each follower passes these entries by itself
        event = self.entries(items, received(stream, after), after >= end.entries)
        return feed.Encoded(b"%x\r\n%b\r\n" % (len(event), event))


class Follower:
    """One client. It has the entries before `at`; if the stream has fewer, they were truncated."""

    def __init__(
        self, reading: Reading, at: Received, form: EventForm, *, seconds: float | None = None
    ) -> None:
        """`seconds`: after which the client is asked to connect again."""
        self._reading = reading
        self._form = form
        self._until = trio.current_time() + (float("inf") if seconds is None else seconds)
        self._epoch = at.epoch
        # The position that the client knows by the last id, and when it was sent anything last.
        self._reported, self._heard_at = at.number, trio.current_time()
        self.cursor = Cursor(0, at.number)
        """The next entry; its offset is 0 until it is known."""
        self.transport: Transport
        # Where bytes are counted, and the rest of an event that the client has a part of.
        self._counts: HttpCounts
        self._rest: Buffer = b""
        # Of what the client has: entries from here on were truncated, and these were updated.
        self._cut: int | None = None
        self._updated: dict[range, None] = {}
        self._lost = False
        self._times = KnownTimes(reading.stream.time_marks)
        self._news = trio.Event()

    # Called by the server and by the pass.

    def changed(self, change: EntryChange) -> None:
        self._note(change.start, change.stop)

    def _note(self, start: int, stop: int | None) -> None:
        if start >= self.cursor.number:
            return
        if stop is None:
            self._cut = start if self._cut is None else min(self._cut, start)
        elif len(self._updated) < _MOST_UPDATES:
            self._updated[range(start, min(stop, self.cursor.number))] = None
        else:
            self._lost = True
        self.wake()

    def lost(self) -> None:
        self._lost = True
        self.wake()

    def wake(self) -> None:
        self._news.set()

    def took(self, piece: feed.FeedPiece, sent: int) -> bool:
        """As `Member.took`; its own task finds out that a connection is lost."""
        if sent > 0:
            self._counts.bytes_sent += sent
            self.cursor = piece.after
            self._reported, self._heard_at = piece.after.number, trio.current_time()
            self._rest = memoryview(piece.data)[sent:]
        return sent == len(piece.data) and not self.transport.holds_back

    # Sending.

    async def send(self, output: BodyOutput) -> None:
        """Send events until the client leaves or the server shuts down. Raises `AnswerCut` for
        damaged entries."""
        reading, readers = self._reading, self._reading.server.other_readers
        self.transport, self._counts = output.transport, output.counts
        await reading.broadcast.turns.settled()
        # From here to the entry among the readers no other task runs.
        missed = reading.missed(self._epoch)
        self._lost = missed is None or reading.gone
        for change in missed or ():
            self._note(change.start, change.stop)
        readers[self] = None
        output.on_finish(self.wake)
        try:
            await unless_gone(output.until_gone, partial(self._follow, output))
        finally:
            del readers[self]

    async def _follow(self, output: BodyOutput) -> None:
        reading, form = self._reading, self._form
        await output.send(_RETRY)
        if not self._changes and (
            begin := form.begin(reading.received(self.cursor.number), reading.total)
        ):
            await output.send(begin)
        while not (output.finishing or self._lost or trio.current_time() >= self._until):
            if self._cut is None and self.cursor.number > reading.total:
                self._cut = reading.total
            if self._changes:
                if not form.reports_changes:
                    return
                await self._report(output)
            elif self.cursor.number < reading.total:
                event = await self._next_event()
                if event:
                    self._heard_at = trio.current_time()
                    await output.send(event)
                elif trio.current_time() >= self._heard_at + _HEARTBEAT_SECONDS:
                    await self._send_heartbeat(output)
                else:
                    await trio.lowlevel.checkpoint()
            else:
                await self._wait(output)

    @property
    def _changes(self) -> bool:
        """Whether what the client has was changed."""
        return self._cut is not None or bool(self._updated)

    async def _report(self, output: BodyOutput) -> None:
        """Send the changes of what the client has. Its position moves with the last event, which
        has data, since clients ignore an id without: one that is lost before is sent all of them
        again."""
        reading = self._reading
        await reading.broadcast.turns.settled()
        cut, self._cut = self._cut, None
        updated, self._updated = self._updated, {}
        self._times = KnownTimes(reading.stream.time_marks)
        if cut is not None:
            self.cursor = Cursor(0, cut)
        at = reading.received(self.cursor.number)
        last = b""
        for entries in updated:
            first, stop = entries.start, min(entries.stop, at.number)
            while first < stop and (piece := await self._piece(Cursor(0, first), stop)):
                if piece.data:
                    if last:
                        await output.send(_UPDATED % (b"", last))
                    last = piece.data
                first = piece.number
        if cut is None:
            await output.send(_UPDATED % (_id(at), last))
        else:
            if last:
                await output.send(_UPDATED % (b"", last))
            words = b'event: truncated\n%bdata: {"total_entries": %d}\n\n'
            await output.send(words % (_id(at), at.number))
        self._reported, self._heard_at = at.number, trio.current_time()

    async def _next_event(self) -> bytes:
        """The next selected entries; empty if there are none, or if entries were truncated or
        others changed meanwhile."""
        reading = self._reading
        piece = await self._piece(self.cursor, reading.total)
        if piece is None or self._changes:
            return b""
        self.cursor = Cursor(piece.offset, piece.number)
        if not piece.data:
            return b""
        at = reading.received(piece.number)
        self._reported = at.number
        return self._form.entries(piece.data, at, piece.number >= reading.total)

    async def _piece(self, place: Cursor, stop: int) -> Piece[bytes] | None:
        """The next entries; None if they were truncated meanwhile. Raises `AnswerCut`."""
        reading = self._reading
        try:
            form = self._form
            items = partial(form.items, times=self._times)
            piece = await reading.piece(items, place, stop, form.most_bytes, inline=True)
        except UnknownEntry:
            return None
        except HttpProblem as problem:
            raise AnswerCut(problem.detail) from None
        return piece if piece.number > place.number else None

    async def _wait(self, output: BodyOutput) -> None:
        """Wait for commits; be sent their events in the pass, if that is possible."""
        self._news = trio.Event()
        broadcast = self._reading.broadcast
        if output.in_chunks:
            broadcast.join_feed(self, self._form)
        deadline = min(self._until, self._heard_at + _HEARTBEAT_SECONDS)
        try:
            with trio.move_on_at(deadline) as silence:
                await (self._news.wait() if output.in_chunks else self._reading.wait(self._news))
        finally:
            broadcast.feed.leave(self)
        if self._rest or self.transport.holds_back:
            rest, self._rest = self._rest, b""
            await output.send_rest(rest)
        elif silence.cancelled_caught:
            await self._send_heartbeat(output)

    async def _send_heartbeat(self, output: BodyOutput) -> None:
        """A comment; or the position behind entries that were not selected."""
        at = self._reading.received(self.cursor.number)
        passed, self._reported = at.number != self._reported, at.number
        self._heard_at = trio.current_time()
        await output.send(b"%b\n" % _id(at) if passed else _HEARTBEAT)


def _id(at: Received) -> bytes:
    return b"id: %d-%d\n" % (at.number, at.epoch) if at.epoch else b"id: %d\n" % at.number


def _received(event_id: str) -> Received:
    """The position that an event's id names. Raises `HttpProblem`."""
    found = _ID.fullmatch(event_id)
    if found is None:
        raise HttpProblem(400, f"Last-Event-ID is the id of an event, not {event_id!r:.80}")
    return Received(int(found[2] or 0), int(found[1]))
