"""The live clients of one stream, and the thread that sends to them.

Owns which part sends to live clients: the thread (`_live_thread.pyx`) while it is *armed*, else
the event loop's pass (`broadcast.py`). The thread follows a file that another process writes, as
its header page shows it; it is armed while nothing but commits happens. Without it, or if the
system has no eventfd, the pass serves all clients.
"""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Iterator
from typing import Protocol

from datastreamer.metrics.counters import Counts
from datastreamer.server.streaming._live_thread import LiveThread
from datastreamer.server.streaming.feed import FeedPiece
from datastreamer.server.wakes import Wakes
from datastreamer.storage.read.spans import Cursor
from datastreamer.storage.stream import DataStream
from datastreamer.transport.server_stream import Transport

_log = logging.getLogger(__name__)


class LiveSender(Protocol):
    """One client's sender, as the broadcast knows it."""

    transport: Transport
    cursor: Cursor
    at: int

    def wake(self) -> None: ...

    def nudge(self) -> None: ...

    def fell_behind(self, cursor: Cursor, at: int) -> None: ...

    def took(self, piece: FeedPiece, sent: int) -> bool: ...


def socket_of(sender: LiveSender) -> int:
    fd = sender.transport.socket_fd
    assert fd is not None
    return fd


class LiveClients:
    """Senders of clients that have received everything, in the order in which they became live."""

    def __init__(self, stream: DataStream, counts: Counts, early: int | None = None) -> None:
        """`early`: an eventfd that becomes readable when a commit begins after a pause."""
        self.armed = False
        """Whether the thread sends, as far as is known here: it may have stopped by itself."""
        self.notice = -1
        """Becomes readable when the armed thread has something for `collect`."""
        self._stream = stream
        self._counts = counts
        self._early = -1 if early is None else early
        self._thread: LiveThread | None = None
        # The sender, and its slot in the thread if there is a thread.
        self._slots: dict[LiveSender, int] = {}
        self._senders: dict[int, LiveSender] = {}
        self._wants = False
        # The thread has stopped by itself, and the pass has not run for a commit since.
        self._stopped = False
        always = stream.parts.pages.verify == "always"
        self._able = stream.follows and hasattr(os, "eventfd") and not always

    def __len__(self) -> int:
        return len(self._slots)

    def __iter__(self) -> Iterator[LiveSender]:
        return iter(self._slots)

    def __contains__(self, sender: LiveSender) -> bool:
        return sender in self._slots

    def add(self, sender: LiveSender) -> None:
        """This sender has nothing to send now."""
        fd = socket_of(sender)
        self._put(sender, -1 if self._thread is None else self._thread.add(fd, *sender.cursor))

    def _put(self, sender: LiveSender, slot: int) -> None:
        self._slots[sender] = slot
        if slot >= 0:
            self._senders[slot] = sender

    def remove(self, sender: LiveSender) -> bool:
        """The thread does not use the sender's descriptor any more; whether it was live."""
        slot = self._slots.pop(sender, None)
        if slot is None:
            return False
        if self._thread is not None and slot >= 0:
            del self._senders[slot]
            offset, number, at = self._thread.remove(slot)
            if self.armed:
                sender.cursor, sender.at = Cursor(offset, number), at
        return True

    # The thread.

    def arm(self, wakes: Wakes, page: bytes, view: Cursor) -> bool:
        """Have the thread send what follows `view` to all clients, at each of the `wakes`; False if
        that is not possible now. `page` is the header page while nothing but commits happens."""
        if self.armed:
            return True
        if not self._able or not self._slots:
            return False
        if self._stopped:
            # Otherwise a page that only the thread refuses would keep both busy.
            self._stopped = False
            return False
        if any(sender.cursor.number != view.number for sender in self):
            return False
        thread = self._thread or self._start(wakes)
        if thread is None:
            return False
        thread.arm(page, *view)
        self.armed = True
        return True

    def _start(self, wakes: Wakes) -> LiveThread | None:
        notice = -1
        try:
            notice = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
            self._thread = LiveThread(
                *(self._stream.fileno(), wakes.waker, notice, self._early, wakes.reports),
                polls=wakes.polls,
            )
        except OSError as error:
            if notice >= 0:
                os.close(notice)
            if error.errno not in (errno.EMFILE, errno.ENFILE):
                # (Descriptors become free when clients leave.)
                self._able = False
                _log.warning("no thread can be started, clients are served without one: %s", error)
            return None
        self.notice = notice
        for sender in self._slots:
            self._put(sender, self._thread.add(socket_of(sender), *sender.cursor))
        return self._thread

    def wake(self) -> None:
        """Have the thread look for entries now, if it is armed."""
        if self.armed and self._thread is not None:
            self._thread.wake()

    def want(self, wants: bool, number: int) -> None:
        """Whether `notice` becomes readable whenever clients were sent entries. With `wants` it
        does now if they were sent entries after entry `number`."""
        if self.armed and self._thread is not None and (wants or self._wants):
            self._wants = wants
            self._thread.want(wants, number)

    def collect(self) -> Cursor | None:
        """Count what the thread has sent, and return how far; have the senders continue whose
        clients received less. Disarms the thread if it has stopped or has no clients. None if it
        is not armed."""
        if not self.armed or self._thread is None:
            return None
        self._stopped, top = self._collect(self._thread)
        return self.disarm() if self._stopped or not self._slots else top

    def _collect(self, thread: LiveThread) -> tuple[bool, Cursor]:
        stopped, top, (size, entries), dropped = thread.collect()
        self._counts.bytes_sent += size
        self._counts.entries_sent += entries
        for slot, offset, number, at, error in dropped:
            sender = self._senders.pop(slot)
            del self._slots[sender]
            if error:
                _log.debug("%s: connection lost: %s", sender.transport.peer, os.strerror(error))
            sender.fell_behind(Cursor(offset, number), at)
        return stopped, Cursor(*top)

    def locate(self) -> None:
        """Set the cursors of the senders to what the thread has sent."""
        if self.armed and self._thread is not None:
            self._set(self._thread.positions())

    def _set(self, positions: list[tuple[int, int, int]]) -> None:
        for slot, offset, number in positions:
            sender = self._senders[slot]
            sender.cursor, sender.at = Cursor(offset, number), offset

    def disarm(self) -> Cursor | None:
        """On return the thread sends nothing, and the cursors are those of what it has sent. As
        `collect`."""
        if not self.armed or self._thread is None:
            return None
        self.armed = False
        self._set(self._thread.disarm())
        os.eventfd_write(self.notice, 1)
        return self._collect(self._thread)[1]

    def close(self) -> None:
        """End the thread, which is not armed."""
        if self._thread is not None:
            self._thread.close()
            self._thread = None
            os.close(self.notice)
            self._senders.clear()
            self._slots = dict.fromkeys(self._slots, -1)
