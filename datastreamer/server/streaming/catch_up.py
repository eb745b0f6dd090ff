"""Sends entries to one client while it streams.

Owns what is sent in each turn, and the rule that exactly one part writes to the connection at a
time: the session while the client is idle, this sender while the client catches up
(`entry_sending.py`), the broadcast (`broadcast.py`) while it is live. Knows no commands.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from functools import partial

import trio

from datastreamer.format import PAGE_SIZE, page_start
from datastreamer.selection.clauses import Selection
from datastreamer.server.streaming.broadcast import COPIED_TAIL, Broadcast
from datastreamer.server.streaming.change_reports import ChangeReports
from datastreamer.server.streaming.entry_sending import EntrySending
from datastreamer.server.streaming.feed import FeedPiece
from datastreamer.server.streaming.filtered import FilteredSending
from datastreamer.server.streaming.live_clients import LiveSender
from datastreamer.server.streaming.output import ClientOutput
from datastreamer.server.streaming.send_bounds import COMMITS, RAW
from datastreamer.server.streaming.turns import Changed
from datastreamer.storage.read.spans import Cursor
from datastreamer.transport.server_stream import Transport

_COPY_BYTES = 128 * 1024
# The pages of a stream up to this size are taken to be resident.
_INLINE_PLACE = 64 << 20
# With this many unsent Results, no further command of the client is read.
_WAITING_RESULTS = 64


class State(enum.Enum):
    IDLE = "idle"
    CATCH_UP = "catch-up"
    LIVE = "live"
    DRAINING = "draining"


class Sender(EntrySending):
    """Sends entries to one client, from a Start to its Stop or to the client's end."""

    def __init__(self, broadcast: Broadcast, transport: Transport, output: ClientOutput) -> None:
        super().__init__(broadcast, transport, output)
        self.state = State.IDLE
        # Results to send between two entries.
        self.results: list[bytes] = []
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
        """`run` will send the entries from `start` on; with `where` only those that it selects, in
        frames; with `commits` the ends of commits too, with `change_reports` also updates and
        truncations."""
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
        super()._begin_at(place)
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
        due = self._report_due
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
                    await self._send_next(_COPY_BYTES)
            else:
                # If a Result, a report or the end waits, only to the end of the entry.
                short = due or self.results or self._last == 0
                await self._send_next(1 if short else _COPY_BYTES)
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
        if view.head.length <= _INLINE_PLACE and not broadcast.pages.floor:
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

    async def _send_next(self, copy: int) -> None:
        """Send entries: about `copy` bytes of whole ones if they are copied."""
        filtered = self._filtered
        if filtered is None:
            await self._send_some(copy)
        elif not self.half_sent and (wait := await self._find_frame(filtered)) is not None:
            with trio.move_on_after(wait):
                await self._park()
        else:
            await self._send_frame(filtered)

    async def _find_frame(self, filtered: FilteredSending) -> float | None:
        copies = self.transport.socket_fd is None
        tail = 0 if copies else self._broadcast.view.head.length - COPIED_TAIL
        return await filtered.find(
            self.cursor, zero_copy_before=tail, hurried=self._last is not None
        )

    async def _park(self) -> None:
        """Wait for the view to move, or for a nudge."""
        await self._wait_in(self._broadcast.park)

    async def _wait_in(self, register: Callable[[LiveSender], None]) -> None:
        self._wake = trio.Event()
        register(self)
        await self._wake.wait()
        self._wake = None

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
