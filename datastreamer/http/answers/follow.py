"""Followers: clients that are sent entries as they are committed, by Server-Sent Events.

Owns each follower's place in the stream. Keeps no entry in memory for a slow client, but for the
rest of one event: what it has not received is read again from the file. All followers of one kind
that have everything are sent the next event in one pass, as TCP clients are (`live_followers.py`).
"""

from __future__ import annotations

import contextlib
from typing import Final

import trio

from datastreamer.errors import UnknownEntry
from datastreamer.http.answers.formats import json_items
from datastreamer.http.answers.live_followers import EventForm, LiveFollowers
from datastreamer.http.answers.reading import EVENT_BYTES, HttpSource, Reading
from datastreamer.http.port.messages import (
    AnswerCut,
    BodyOutput,
    HttpAnswer,
    HttpProblem,
    HttpRequest,
    number,
)
from datastreamer.server.streaming.other_readers import EntryChange
from datastreamer.storage.read.spans import Cursor

EVENT_STREAM: Final = "text/event-stream"
EVENT_HEADERS: Final = [("Cache-Control", "no-store"), ("X-Accel-Buffering", "no")]
_HEARTBEAT_SECONDS: Final = 15.0
_HEARTBEAT: Final = b":\n\n"
# How long a browser waits before it connects again.
_RETRY: Final = b"retry: 1000\n\n"


class FollowQueries:
    """Answers `GET /v1/follow`."""

    def __init__(self, source: HttpSource, live: LiveFollowers) -> None:
        self._source = source
        self._live = live

    async def follow(self, request: HttpRequest) -> HttpAnswer:
        parameters = request.parameters("from")
        reading = self._source.reading()
        begin, seen = parameters.text("from"), request.header(b"last-event-id")
        if seen is not None:
            first = number("Last-Event-ID", seen)
        else:
            first = reading.total if begin is None else await reading.first(begin)
            if first > reading.total:
                raise HttpProblem(416, f"there is no entry {first}; the stream has {reading.total}")
        follower = Follower(reading, first, self._live)
        return HttpAnswer(200, EVENT_STREAM, follower.send, EVENT_HEADERS, follows=True)


class Follower:
    """One client, from entry `first` on. If there are fewer entries, those that it has seen were
    truncated."""

    def __init__(
        self, reading: Reading, first: int, live: LiveFollowers, *, seconds: float | None = None
    ) -> None:
        """`seconds`: after which the client is asked to connect again."""
        self._reading = reading
        self._live = live
        self._form: EventForm = live.form
        self._until = trio.current_time() + (float("inf") if seconds is None else seconds)
        self.place = Cursor(0, first)
        """The next entry; its offset is 0 until it is known."""
        self.rest = b""
        """The rest of an event that the client has a part of."""
        # Entries from here on were truncated.
        self._cut: int | None = None
        self._lost = False
        self._news = trio.Event()

    # Called by the server and by the pass.

    def changed(self, change: EntryChange) -> None:
        if change.stop is None and change.start < self.place.number:
            self._cut = change.start if self._cut is None else min(self._cut, change.start)
            self.wake()

    def lost(self) -> None:
        self._lost = True
        self.wake()

    def wake(self) -> None:
        self._news.set()

    # Sending.

    async def send(self, output: BodyOutput) -> None:
        """Send events until the client leaves or the server shuts down. Raises `AnswerCut` for
        damaged entries."""
        readers = self._reading.server.other_readers
        readers[self] = None
        output.on_finish(self.wake)
        try:
            # Not in a group: an error of the other task only says that the client has left.
            failure: Exception | None = None
            async with trio.open_nursery() as nursery:
                nursery.start_soon(_cancel_when_gone, output, nursery.cancel_scope)
                try:
                    await output.send(_RETRY)
                    await self._follow(output)
                except (AnswerCut, trio.BrokenResourceError, trio.TooSlowError) as error:
                    failure = error
                nursery.cancel_scope.cancel()
            if failure is not None:
                raise failure
        finally:
            del readers[self]

    async def _follow(self, output: BodyOutput) -> None:
        reading, form = self._reading, self._form
        begin = form.begin(self.place.number, reading.total)
        if begin:
            await output.send(begin)
        while not (output.finishing or self._lost or trio.current_time() >= self._until):
            if self._cut is None and self.place.number > reading.total:
                self._cut = reading.total
            if self._cut is not None:
                await reading.broadcast.settled()
                cut, self._cut = self._cut, None
                self.place = Cursor(0, cut)
                event = form.truncated(cut)
                if not event:
                    return
                await output.send(event)
            elif self.place.number < reading.total:
                event = await self._next_event()
                if event:
                    await output.send(event)
            else:
                await self._wait(output)

    async def _next_event(self) -> bytes:
        """The next entries; nothing if they were truncated meanwhile."""
        reading, place = self._reading, self.place
        try:
            if not place.offset:
                place = await reading.place(place.number)
            piece = await reading.piece(json_items, place, reading.total, EVENT_BYTES, inline=True)
        except UnknownEntry:
            return b""
        except HttpProblem as problem:
            raise AnswerCut(problem.detail) from None
        if self._cut is not None or piece.number == place.number:
            return b""
        self.place = Cursor(piece.offset, piece.number)
        return self._form.entries(piece.data, piece.number, piece.number >= reading.total)

    async def _wait(self, output: BodyOutput) -> None:
        """Wait for commits; be sent their events in the pass, if that is possible."""
        self._news = trio.Event()
        broadcast, fd = self._reading.broadcast, output.direct_fd
        live = fd is not None and self._live.join(self, fd, self._reading)
        if not live:
            broadcast.watch(self._news)
        deadline = min(self._until, trio.current_time() + _HEARTBEAT_SECONDS)
        try:
            with trio.move_on_at(deadline) as silence:
                await self._news.wait()
        finally:
            self._live.leave(self)
            broadcast.watchers.discard(self._news)
        if self.rest:
            rest, self.rest = self.rest, b""
            await output.send_rest(rest)
        elif silence.cancelled_caught:
            await output.send(_HEARTBEAT)


async def _cancel_when_gone(output: BodyOutput, scope: trio.CancelScope) -> None:
    with contextlib.suppress(trio.BrokenResourceError, trio.ClosedResourceError):
        await output.until_gone()
    scope.cancel()


class Events:
    """The events of `/v1/follow`. An event's id is the number of the next entry."""

    def begin(self, first: int, total: int) -> bytes:
        return b""

    def entries(self, items: bytes, after: int, up_to_date: bool) -> bytes:
        return b"id: %d\ndata: [%b]\n\n" % (after, items)

    def truncated(self, total: int) -> bytes:
        return b'event: truncated\nid: %d\ndata: {"total_entries": %d}\n\n' % (total, total)
