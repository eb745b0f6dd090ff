"""What every client streams from: the view, the pass over live clients, and changes of both.

Owns the view (how far the pass has come), who is live, who waits for either, and whether
committed entries are being taken back or changed just now. Knows senders, not sessions:
whom a change concerns is `server.py`'s to find out.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import trio

from datastreamer.errors import DamagedFile, StreamFileError
from datastreamer.metrics.counters import Counts
from datastreamer.server.streaming._fanout import fan_out
from datastreamer.server.streaming.page_cache import ColdReads
from datastreamer.storage.header.records import Head
from datastreamer.storage.read.spans import Cursor
from datastreamer.storage.stream import DataStream
from datastreamer.transport.server_stream import Transport

_log = logging.getLogger(__name__)

# One pass sends so much to each client, and takes so long, before others have a turn.
_PASS_BYTES = 128 * 1024
_PASS_NS = 2_000_000
# A commit wakes the pass; this often it looks for one that did not.
_POLL_SECONDS = 0.010
# After a header that cannot be read.
_DAMAGE_PAUSE = 1.0


class LiveSender(Protocol):
    """One client's sender, as the broadcast knows it."""

    transport: Transport
    cursor: Cursor
    at: int

    def wake(self) -> None: ...

    def nudge(self) -> None: ...

    def fell_behind(self, cursor: Cursor, at: int) -> None: ...


class Broadcast:
    """The end of one stream, as clients see it. `run` and `poll` keep it going."""

    def __init__(self, stream: DataStream, counts: Counts) -> None:
        self.stream = stream
        self.view = stream.new_reader()
        self.counts = counts
        self.cold = ColdReads(stream.fileno())
        self.hashing = trio.CapacityLimiter(1)
        """Hashes of ranges are made one at a time, for all clients."""
        self.parked: set[LiveSender] = set()
        self.watchers: set[trio.Event] = set()
        """Set once, when the next entries can be seen or some were taken back."""
        self.found: dict[object, Any] = {}
        """What was found for a client up to where the pass is: for others who want the same."""
        self.features = 0
        """What the server accepts beyond what every server does, as Capabilities says it."""
        self.trouble = ""
        """Why nothing new can be seen, where that is so."""
        self._live: dict[LiveSender, int] = {}
        self._epoch = stream.epoch
        # How many changes of what was committed are under way in this process.
        self._held = 0
        self._settling = trio.lowlevel.ParkingLot()
        # A pass is under way; another is due; when the last look at the file was.
        self._looking = False
        self._due = False
        self._looked_at = 0.0
        # Set when somebody waits for commits.
        self._company = trio.Event()

    async def run(self, wakeup: int, start_over: Callable[[], None]) -> None:
        """Make a pass whenever `wakeup` can be read, for ever. `start_over` is called, and
        calls `begin_anew`, when another process has changed what was committed."""
        while True:
            await self._look(start_over)
            if not self._live and not self.parked and not self.watchers:
                # Nobody waits for commits: many of them are one turn of `poll`.
                self._company = trio.Event()
                await self._company.wait()
            # Without a deadline, which would cost as much as the rest of the way from here to
            # the clients.
            await trio.lowlevel.wait_readable(wakeup)
            with contextlib.suppress(BlockingIOError):
                os.read(wakeup, 4096)

    async def poll(self, start_over: Callable[[], None]) -> None:
        """Beside `run`, which nothing may have woken: make a pass where there has been none for a
        moment, for ever."""
        rest = 0.0
        while True:
            await trio.sleep(rest if rest > 0 else _POLL_SECONDS)
            rest = self._looked_at + _POLL_SECONDS - trio.current_time()
            if rest <= 0 and not self._looking:
                await self._look(start_over)

    async def _look(self, start_over: Callable[[], None]) -> None:
        """Make a pass; where one is under way, that goes on to what is new."""
        self._due = True
        if self._looking:
            return
        self._looking = True
        try:
            while self._due:
                self._due = False
                if self._held:
                    await self._settle()
                try:
                    self.stream.refresh_open_file()
                except (StreamFileError, OSError) as error:
                    # The file may be repaired.
                    if str(error) != self.trouble:
                        self.trouble = str(error)
                        _log.error("nothing new can be seen: %s", self.trouble)
                    await trio.sleep(_DAMAGE_PAUSE)
                    self._due = True
                    continue
                self.trouble = ""
                if self.stream.epoch != self._epoch:
                    start_over()
                if self._settling and not self.changing:
                    self.begin_anew(self._epoch)
                await self._catch_up_live()
                # Behind the pass, for which clients wait.
                self._looked_at = trio.current_time()
                self.cold.look_again(self._looked_at)
        finally:
            self._looking = False

    # Who is live.

    def join(self, sender: LiveSender) -> None:
        """Have the pass serve a client whose cursor is where the last pass ended."""
        fd = sender.transport.socket_fd
        assert fd is not None and sender.cursor.number == self.view.head.entries
        self._live[sender] = fd
        self._company.set()

    def park(self, sender: LiveSender) -> None:
        """Have a client woken when the pass has moved, or is nudged."""
        self.parked.add(sender)
        self._company.set()

    def watch(self, watcher: trio.Event) -> None:
        """Have `watcher` set when the pass has moved, or entries were taken back."""
        self.watchers.add(watcher)
        self._company.set()

    def leave(self, sender: LiveSender) -> bool:
        """The client's sender writes by itself again; whether it was live."""
        return self._live.pop(sender, None) is not None

    def forget(self, sender: LiveSender) -> None:
        """The connection is about to be closed: its descriptor leaves the pass before."""
        self.parked.discard(sender)
        self.leave(sender)

    # The pass.

    async def _catch_up_live(self) -> None:
        while not self.changing:
            head = self.stream.reader.head
            place = Cursor(*self.view.head)
            if place.number >= head.entries:
                return
            if not self._live:
                self._move_view(head)
                return
            try:
                chunk = self.stream.reader.chunk(place, _PASS_BYTES)
            except DamagedFile:
                # Not the pass's to judge: each client comes there by itself, and ends there.
                if not self.outdated():
                    self._dismiss(list(self._live))
                    self._move_view(head)
                continue
            if self.outdated():
                return
            while behind := [s for s in self._live if s.cursor.number == place.number]:
                results = fan_out([self._live[s] for s in behind], chunk.data, _PASS_NS)
                size = len(chunk.data)
                served = 0
                for sender, sent in zip(behind, results, strict=False):
                    if sent == size:
                        sender.cursor, sender.at = chunk.next, chunk.next.offset
                        served += 1
                    else:
                        self._drop_out(sender, place, chunk.start, sent)
                self.counts.bytes_sent += served * size
                self.counts.entries_sent += served * (chunk.next.number - place.number)
                if len(results) < len(behind):
                    await trio.lowlevel.checkpoint()
                    if self.changing:
                        # Who has this run already waits for the next one by himself.
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
        """A client took less than the whole run, or is gone: its own sender goes on."""
        del self._live[sender]
        if sent < 0 and -sent not in (errno.EAGAIN, errno.EWOULDBLOCK):
            _log.debug("%s: gone: %s", sender.transport.peer, os.strerror(-sent))
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

    # Changes of what was sent already.

    @property
    def changing(self) -> bool:
        """Whether committed entries are being taken back or changed, or were just now.

        Nothing is read or sent then, but by whom it cannot concern.
        """
        stream = self.stream
        return self._held > 0 or stream.epoch != self._epoch or stream.changing

    @property
    def epoch(self) -> int:
        """The stream's epoch that everybody here is at."""
        return self._epoch

    def outdated(self) -> bool:
        """Whether what was just read may be of another history, or half changed."""
        self.stream.refresh_open_file()
        return self.changing

    async def settled(self) -> None:
        """Return when no change is under way."""
        while self.changing:
            await self._settling.park()

    async def _settle(self) -> None:
        """Wait for the end of a change in this process."""
        while self._held:
            await self._settling.park()

    def hold(self, head: Head | None) -> None:
        """Entries are about to go or to change; `head` is where they will end, where they go."""
        self._held += 1
        if head is not None:
            self.cut_short(head)

    def cut_short(self, head: Head) -> None:
        """Who waits at the end waits at `head`; nothing behind it is sent any more."""
        self.view.head = min(self.view.head, head)

    def release(self) -> None:
        """That is done: whoever waits goes on."""
        self._held -= 1
        self.begin_anew(self.stream.epoch)

    def begin_anew(self, epoch: int) -> None:
        """What was known of the entries is of a history that is over; whom the changes up to
        `epoch` concern knows of them."""
        self.view.forget()
        self.found.clear()
        self._epoch = epoch
        self._settling.unpark_all()
        self._wake_parked()


@contextlib.contextmanager
def wakeup(stream: DataStream, waker: int | None) -> Iterator[int]:
    """A descriptor to read that becomes readable with each commit."""
    if waker is not None:
        yield waker
        return
    if hasattr(os, "eventfd"):
        reading = writing = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
    else:
        reading, writing = os.pipe()
        os.set_blocking(reading, False)
        os.set_blocking(writing, False)
    stream.add_waker(writing, inside=True)
    try:
        yield reading
    finally:
        stream.remove_waker(writing)
        for fd in {reading, writing}:
            os.close(fd)
