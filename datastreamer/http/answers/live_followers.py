"""The pass over all followers of one kind that have everything.

Owns the place up to which they have been sent entries. Reads and encodes each commit once, and
sends it to all of them; a follower whose socket accepts less leaves the pass and continues by
itself.
"""

from __future__ import annotations

import logging
from typing import Final, Protocol

import trio

from datastreamer.errors import UnknownEntry
from datastreamer.http.answers.formats import json_items
from datastreamer.http.answers.reading import EVENT_BYTES, Reading, Received
from datastreamer.http.port.messages import HttpProblem
from datastreamer.metrics.counters import HttpCounts
from datastreamer.server.streaming._fanout import fan_out
from datastreamer.server.streaming.other_readers import EntryChange
from datastreamer.storage.read.spans import Cursor
from datastreamer.transport.server_stream import Buffer

_log = logging.getLogger(__name__)

# The pass runs at most this long before other tasks run: TCP clients come first.
_PASS_NS: Final = 1_000_000


class EventForm(Protocol):
    """How events are written."""

    @property
    def reports_changes(self) -> bool:
        """Whether a follower is sent changes of what it has. If not, its answer ends."""

    def begin(self, at: Received, total: int) -> bytes:
        """What a follower is sent at once."""

    def entries(self, items: bytes, at: Received, up_to_date: bool) -> bytes:
        """An event with entries, after which the client is at `at`."""


class LiveFollower(Protocol):
    """One follower, as the pass knows it."""

    place: Cursor
    rest: Buffer

    def wake(self) -> None: ...


class LiveFollowers:
    """The followers whose events are of one form. `run` keeps the pass going."""

    def __init__(self, form: EventForm, counts: HttpCounts) -> None:
        self.form = form
        self._counts = counts
        self._live: dict[LiveFollower, int] = {}
        self._reading: Reading | None = None
        self._place = Cursor(0, 0)
        self._company = trio.Event()
        self._news = trio.Event()

    def join(self, follower: LiveFollower, fd: int, reading: Reading) -> bool:
        """Let the pass send to the socket `fd` of a follower that has everything; False if the pass
        is at another place."""
        if not self._live:
            self._reading, self._place = reading, follower.place
        elif self._reading is None or (
            self._reading.broadcast is not reading.broadcast
            or self._place.number != follower.place.number
        ):
            return False
        self._live[follower] = fd
        self._company.set()
        return True

    def leave(self, follower: LiveFollower) -> None:
        """The follower's own task sends again."""
        self._live.pop(follower, None)
        if not self._live:
            self._news.set()

    async def run(self) -> None:
        """Make a pass at each commit, forever."""
        while True:
            if not self._live:
                self._company = trio.Event()
                await self._company.wait()
            reading = self._reading
            assert reading is not None
            reading.server.other_readers[self] = None
            try:
                while self._live:
                    await self._next_pass(reading)
            finally:
                del reading.server.other_readers[self]

    def changed(self, change: EntryChange) -> None:
        if change.start < self._place.number:
            self._dismiss()

    def lost(self) -> None:
        self._dismiss()

    def _dismiss(self) -> None:
        """Let all followers continue by themselves."""
        live, self._live = self._live, {}
        for follower in live:
            follower.wake()
        self._news.set()

    async def _next_pass(self, reading: Reading) -> None:
        place = self._place
        if place.number >= reading.total:
            self._news = trio.Event()
            await reading.wait(self._news)
            return
        try:
            piece = await reading.piece(json_items, place, reading.total, EVENT_BYTES, inline=True)
        except (HttpProblem, UnknownEntry):
            # Each follower meets the damage, or the truncation, by itself.
            self._dismiss()
            return
        if place.number != self._place.number or not self._live:
            return
        after = Cursor(piece.offset, piece.number)
        at = reading.received(piece.number)
        event = self.form.entries(piece.data, at, piece.number >= reading.total)
        self._place = after
        await self._send(reading, b"%x\r\n%b\r\n" % (len(event), event), place.number, after)

    async def _send(self, reading: Reading, frame: bytes, number: int, after: Cursor) -> None:
        """Send `frame`, which was read in this turn, to the followers that are at entry `number`;
        they are at `after` then."""
        turns = reading.broadcast.turns
        turn = turns.now
        while turns.is_at(turn) and (due := [f for f in self._live if f.place.number == number]):
            results = fan_out([self._live[each] for each in due], frame, _PASS_NS)
            for follower, sent in zip(due, results, strict=False):
                if sent > 0:
                    follower.place = after
                    self._counts.bytes_sent += sent
                if sent < len(frame):
                    # Its own task continues, or finds out that the connection is lost.
                    if sent > 0:
                        follower.rest = memoryview(frame)[sent:]
                    del self._live[follower]
                    follower.wake()
            await trio.lowlevel.checkpoint()
