"""What wakes a server when its stream's file is written to.

Owns the descriptors: an eventfd (or pipe) that the writer writes to after each commit, if it is in
this process or in the one that started it; else the system's reports of writes to the file. Where
there is neither, the file is to be looked at every `POLL_SECONDS`. Knows no clients.

Reports come after the write. A program that writes its entries before its header causes one for
each, and a look at the file that follows the reading of the report misses none. What causes no
report (stores to mapped memory) is found at the server's next tick.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
from typing import Final

import trio

from datastreamer.server._inotify import reports_of_writes
from datastreamer.storage.disk.mounts import on_network
from datastreamer.storage.stream import DataStream

_log = logging.getLogger(__name__)

POLL_SECONDS: Final = 0.010
"""Interval of looks at a file of which nothing is reported."""


class Wakes:
    """The wake-ups for one stream. `waker`: the descriptor that its writer in another process makes
    readable; None: there is no such writer."""

    def __init__(self, stream: DataStream, waker: int | None = None) -> None:
        self.reports = -1
        """The system's reports; -1: a writer's waker makes them needless, or there are none."""
        self.polls = False
        """Whether nothing reports writes."""
        self._stream = stream
        self._opened: set[int] = set()
        self._woken_by = -1
        if waker is not None:
            self.waker = waker
            return
        if hasattr(os, "eventfd"):
            self.waker = writing = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        else:
            self.waker, writing = os.pipe()
            os.set_blocking(self.waker, False)
            os.set_blocking(writing, False)
        self._opened = {self.waker, writing}
        if stream.writable:
            self._woken_by = writing
            stream.parts.writer.add_waker(writing, inside=True)
        else:
            self._watch()

    def _watch(self) -> None:
        path, why = self._stream.path, ""
        if kind := on_network(path):
            why = f"it is on a network file system ({kind})"
        else:
            try:
                self.reports = reports_of_writes(self._stream.fileno())
            except OSError as error:
                # Other systems than Linux have none.
                why = "" if error.errno == errno.ENOSYS else str(error)
        if self.reports >= 0:
            self._opened.add(self.reports)
            return
        self.polls = True
        if why:
            words = "%s: the system does not report writes of other programs, so the file is read "
            words += "every %g ms while a client waits: %s"
            _log.warning(words, path, POLL_SECONDS * 1000, why)

    async def wait(self) -> None:
        """Return when the file may have been written to. Look at it then."""
        fd = self.waker if self.reports < 0 else self.reports
        if self.polls:
            with trio.move_on_after(POLL_SECONDS):
                await until_readable(fd)
        else:
            # No deadline here: it would cost as much as the rest of the way to the clients.
            await until_readable(fd)

    def close(self) -> None:
        """Close the descriptors, which nothing uses any more."""
        if self._woken_by >= 0:
            self._stream.parts.writer.remove_waker(self._woken_by)
        for fd in self._opened:
            os.close(fd)


async def until_readable(fd: int) -> None:
    """Return when the non-blocking descriptor `fd` was readable, and is read."""
    await trio.lowlevel.wait_readable(fd)
    with contextlib.suppress(BlockingIOError):
        os.read(fd, 4096)
