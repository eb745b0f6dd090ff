"""The broadcast of new entries to all live clients of one stream.

Owns the view (the head up to which entries have been broadcast), the clients that wait for new
entries, and the pass over live clients, which a thread makes if it can (`live_clients.py`).
`turns.py` says whether committed entries are being changed. Knows senders, not sessions:
`server.py` decides which sessions a change affects.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import trio

from datastreamer.errors import UNREADABLE, StreamFileError
from datastreamer.format import PAGE_SIZE, page_start
from datastreamer.metrics.counters import Counts
from datastreamer.server.streaming._feed_pass import fan_out
from datastreamer.server.streaming.cold_reads import ColdReads
from datastreamer.server.streaming.feed import Feed, FeedForm, Member
from datastreamer.server.streaming.live_clients import LiveClients, LiveSender, socket_of
from datastreamer.server.streaming.turns import Turns
from datastreamer.server.ticks import TICK_SECONDS, until_tick
from datastreamer.server.wakes import Wakes, until_readable
from datastreamer.storage.header.records import Head
from datastreamer.storage.objects.waits import NotAtHand, at_hand_only
from datastreamer.storage.pages.page_states import pages_between
from datastreamer.storage.read.spans import Cursor
from datastreamer.storage.stream import DataStream

_log = logging.getLogger(__name__)

# A pass sends at most this much to each client and runs at most this long before it yields.
_PASS_BYTES = 128 * 1024
_PASS_NS = 2_000_000
# Interval of the looks for what caused no wake-up.
_LOOK_SECONDS = TICK_SECONDS
# Pause after a header that cannot be read.
_DAMAGE_PAUSE = 1.0

COPIED_TAIL = 4 << 20
"""Entries this near to the head are read in the event loop and copied into the socket. Older ones
are sent with sendfile, which queues references to the file's pages, so that a later update of these
would reach the client."""

T = TypeVar("T")
A = TypeVar("A")


class Placed(Protocol):
    """Something read from the file, up to a file offset."""

    @property
    def offset(self) -> int: ...


R = TypeVar("R", bound=Placed)


class Broadcast:
    """The head of one stream, as clients see it. `run` and `tick` keep it going."""

    def __init__(self, stream: DataStream, counts: Counts, early_waker: int | None = None) -> None:
        self.stream = stream
        self.turns = Turns(stream)
        self.feed = Feed(stream, self.turns)
        """Live clients that are sent entries in other forms, or over TLS."""
        self.view = stream.new_reader()
        self.counts = counts
        self.pages = stream.parts.pages.for_server()
        """What is known of the file's pages."""
        self.cold = ColdReads(stream.parts.pages.file, self.pages)
        self.backlog_turns = 0
        """How often a client was sent entries far from the head."""
        self.hashing = trio.CapacityLimiter(1)
        """Range hashes are computed one at a time for all clients."""
        self.parked: set[LiveSender] = set()
        self.watchers: set[trio.Event] = set()
        """Each is set once, when new entries are visible or entries were truncated."""
        self.found: dict[object, Any] = {}
        """Frames found by filtered reads up to the view, shared by clients with the same filter."""
        self.features = 0
        """Optional features of this server, as bits of Capabilities."""
        self.trouble = ""
        """Why new entries cannot be read; empty if they can."""
        self._live = LiveClients(stream, counts, early_waker)
        # A pass is running; another is due.
        self._looking = False
        self._due = False
        # Set when a client waits for commits, or for the end of a change.
        self._company = trio.Event()
        self.turns.on_wait = self._attend
        if stream.writable:
            self.doubt_unindexed()

    def doubt_unindexed(self) -> range:
        """The pages that this process reads to index bookmarks: they are compared before they are
        sent, because they will be resident."""
        length = self.stream.reader.head.length
        unread = self.stream.bookmarks.unread()
        pages = pages_between(max(length - unread, page_start(0)), length) if unread else range(0)
        self.pages.before_read(pages)
        return pages

    async def run(self, wakes: Wakes, start_over: Callable[[], None]) -> None:
        """Make a pass at each of the `wakes`, or have the thread make it, forever. When another
        process has changed committed entries, `start_over` is called, which calls `begin_anew`."""
        try:
            while True:
                await self._look(start_over)
                turns, feed = self.turns, self.feed
                if not (self._live or self.parked or self.watchers or feed or turns.awaited):
                    # No client waits: `tick` handles many commits in one turn.
                    self._company = trio.Event()
                    await self._company.wait()
                if self._arm(wakes):
                    # The thread waits for `wakes`.
                    await until_readable(self._live.notice)
                else:
                    await wakes.wait()
        finally:
            self.disarm()
            self._live.close()

    def _attend(self) -> None:
        """A client waits."""
        self._report_if_awaited()
        self._company.set()

    def _arm(self, wakes: Wakes) -> bool:
        """Have the thread serve the live clients, if it can; whether it does."""
        # First: a change that begins from now on changes the page.
        page = self._settled_page()
        if page is None or self._looking or self.turns.changing or self.trouble:
            return self._live.armed
        armed = self._live.arm(wakes, page, Cursor(*self.view.head))
        self._report_if_awaited()
        return armed

    def _settled_page(self) -> bytes | None:
        return self.stream.parts.feed.settled_page()

    def _report_if_awaited(self) -> None:
        """Have the thread report each pass while a client waits for the view to move."""
        self._live.want(bool(self.parked or self.watchers or self.feed), self.view.head.entries)

    async def tick(self, start_over: Callable[[], None]) -> None:
        """Make a pass at each tick of the server for what wakes no part of it, forever."""
        while True:
            await until_tick(_LOOK_SECONDS)
            if not self._looking:
                await self._look(start_over)
                if self.stream.reader.head.entries > self.view.head.entries:
                    self._live.wake()

    async def _look(self, start_over: Callable[[], None]) -> None:
        """Make a pass; if one is running, it continues with the new entries."""
        self._due = True
        if self._looking:
            return
        self._looking = True
        try:
            while self._due:
                self._due = False
                await self.turns.until_idle()
                self._collect()
                try:
                    self.stream.refresh_open_file()
                except (StreamFileError, OSError) as error:
                    # The file may be repaired.
                    if str(error) != self.trouble:
                        self.trouble = str(error)
                        _log.error("clients receive no new entries: %s", self.trouble)
                    await trio.sleep(_DAMAGE_PAUSE)
                    self._due = True
                    continue
                self.trouble = ""
                if self.turns.changing or self._settled_page() is None:
                    self.disarm()
                if self.stream.epoch != self.turns.epoch:
                    start_over()
                self.turns.settle_if_awaited()
                if not self._live.armed:
                    await self._catch_up_live()
                self._report_if_awaited()
                self.feed.wake()
                # After the pass, because clients wait for it.
                self.pages.forget_residency(trio.current_time())
        finally:
            self._looking = False

    # Live clients.

    def join(self, sender: LiveSender) -> None:
        """Send new entries to this client, whose cursor is at the view. If the thread has moved the
        view since, the client is woken at once and is not live."""
        self._collect()
        if sender.cursor.number != self.view.head.entries:
            sender.wake()
            return
        self._live.add(sender)
        self._company.set()

    def join_feed(self, member: Member, form: FeedForm) -> None:
        """Send new entries in this form to this client, until it leaves."""
        self.feed.join(member, form)
        self._attend()

    def park(self, sender: LiveSender) -> None:
        """Wake this client when the view moves."""
        self.parked.add(sender)
        self._attend()

    def watch(self, watcher: trio.Event) -> None:
        """Set `watcher` when the view moves or entries were truncated."""
        self.watchers.add(watcher)
        self._attend()

    def leave(self, sender: LiveSender) -> bool:
        """The client's sender writes to the connection again, which may be closed; returns whether
        the client was live."""
        left = self._live.remove(sender)
        if left:
            self._collect()
        return left or self.feed.leave(sender)

    def forget(self, sender: LiveSender) -> None:
        """Remove a client whose connection is about to be closed."""
        self.parked.discard(sender)
        self.leave(sender)

    # What the thread has done.

    def locate(self) -> None:
        """Set the cursors of live clients to what they were sent."""
        self._collect()
        self._live.locate()

    def disarm(self) -> None:
        """On return the thread sends nothing, until a pass is done that follows, and the cursors
        are those of what it has sent."""
        self._move_to(self._live.disarm())

    def _collect(self) -> None:
        self._move_to(self._live.collect())

    def _move_to(self, top: Cursor | None) -> None:
        """The thread has sent entries up to `top`; None: it was not armed."""
        if top is None:
            return
        if top.number > self.view.head.entries:
            self._move_view(Head(*top))
        if not self._live.armed:
            # It was stopped in the middle of a pass.
            at = self.view.head.entries
            self._dismiss([s for s in self._live if s.cursor.number != at])

    # The pass.

    async def _catch_up_live(self) -> None:
        turns = self.turns
        while not turns.changing:
            turn, head = turns.now, self.stream.reader.head
            place = Cursor(*self.view.head)
            if place.number >= head.entries:
                return
            if not self._live:
                self._move_view(head)
                return
            try:
                chunk = self.stream.reader.chunk(place, _PASS_BYTES)
            except UNREADABLE:
                # Each client meets the damage in its own sender, which ends that client.
                if turns.is_at(turn):
                    self._dismiss(list(self._live))
                    self._move_view(head)
                continue
            if not turns.is_at(turn):
                return
            while due := [s for s in self._live if s.cursor.number == place.number]:
                results = fan_out(list(map(socket_of, due)), chunk.data, _PASS_NS)
                size = len(chunk.data)
                served = 0
                for sender, sent in zip(due, results, strict=False):
                    if sent == size:
                        sender.cursor, sender.at = chunk.next, chunk.next.offset
                        served += 1
                    else:
                        self._drop_out(sender, place, chunk.start, sent)
                self.counts.bytes_sent += served * size
                self.counts.entries_sent += served * (chunk.next.number - place.number)
                if len(results) < len(due):
                    await trio.lowlevel.checkpoint()
                    if not turns.is_at(turn):
                        # Clients that have this run already wait for the next by themselves.
                        self._dismiss([s for s in self._live if s.cursor.number > place.number])
                        return
            self._move_view(Head(*chunk.next))
            await trio.lowlevel.checkpoint()

    def _move_view(self, head: Head) -> None:
        self.found.clear()
        self.view.head = head
        self._wake_parked()

    def _dismiss(self, senders: list[LiveSender]) -> None:
        for sender in senders:
            sender.nudge()

    def _drop_out(self, sender: LiveSender, place: Cursor, start: int, sent: int) -> None:
        """A client received less than the whole run, or has left: its own sender continues."""
        self._live.remove(sender)
        if sent < 0 and -sent not in (errno.EAGAIN, errno.EWOULDBLOCK):
            _log.debug("%s: connection lost: %s", sender.transport.peer, os.strerror(-sent))
        sent = max(sent, 0)
        self.counts.bytes_sent += sent
        sender.fell_behind(place, start + sent if sent else place.offset)

    def _wake_parked(self) -> None:
        parked, self.parked = self.parked, set()
        for sender in parked:
            sender.wake()
        watchers, self.watchers = self.watchers, set()
        for watcher in watchers:
            watcher.set()

    # Truncations and updates of committed entries.

    def is_resident(self, number: int) -> bool:
        """Whether entry `number` is known to be resident."""
        page = self.stream.reader.page_with(number)
        return page is not None and self.pages.is_ready(*page)

    async def read(
        self, call: Callable[[int], T], number: int, last: Callable[[T], int] | None = None
    ) -> T:
        """`call(number)`, in a thread if entry `number` may not be resident; it reads this entry,
        or all up to entry `last(result)`. Raises `DamagedPage`, and what `call` raises."""
        if number >= self.stream.reader.head.entries:
            return call(number)
        if self.is_resident(number):
            with contextlib.suppress(NotAtHand), at_hand_only():
                found = call(number)
                if last is None or self.is_resident(last(found)):
                    return found

        def read(number: int) -> T:
            # Now: after the read it is resident.
            start = page_start(self.stream.reader.page_holding(number))
            self.pages.are_ready(start, PAGE_SIZE, self.stream.reader.head.length)
            return call(number)

        def pages(found: T) -> range:
            return self.pages_of(number, number if last is None else last(found))

        return await self.cold.run_verified(read, number, pages)

    async def read_from(self, call: Callable[[A], R], what: A, start: int, count: int) -> R:
        """`call(what)`, which reads the file from `start` to the result's `offset`, probably
        `count` bytes; in a thread if they may not be resident. Raises `DamagedPage`, and what
        `call` raises."""
        pages, length = self.pages, self.stream.reader.head.length
        if pages.are_ready(start, count, length):
            with contextlib.suppress(NotAtHand), at_hand_only():
                found = call(what)
                if pages.are_ready(start, found.offset - start, length):
                    return found
        self.counts.cold_reads += 1

        def read(found: R) -> range:
            return pages_between(start, found.offset)

        return await self.cold.run_verified(call, what, read)

    def pages_of(self, first: int, last: int) -> range:
        """The pages of these entries, and those between them."""
        holding = self.stream.reader.page_holding
        return range(holding(first), holding(last) + 1)

    def hold(self, head: Head | None) -> None:
        """A change begins; `head` is the new end of the stream if entries are truncated."""
        self.turns.begin()
        if head is not None:
            self.cut_short(head)

    def cut_short(self, head: Head) -> None:
        """Move the view back to `head`; entries after it are not sent any more."""
        self.view.head = min(self.view.head, head)

    def release(self) -> None:
        """The change is done: waiting clients continue."""
        self.turns.end()
        self.begin_anew(self.stream.epoch)

    def begin_anew(self, epoch: int) -> None:
        """Forget what was read before the changes up to `epoch`; sessions that these changes
        affect have been notified."""
        self.view.forget()
        self.found.clear()
        self.turns.settle(epoch)
        # A report of the change may be due.
        self.feed.dismiss()
        self._wake_parked()
