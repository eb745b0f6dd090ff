"""To be asked to end by a signal, for work that must not be cut off anywhere.

Owns the handlers and what they set. A `threading.Event` will not do: its lock may be held by
the very code that the handler interrupts.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from types import FrameType

from datastreamer.cli import early_signals as early

_DAY_MS = 86_400_000  # the system's poll takes some 24 days at most


class StopRequest:
    """Set once, by a signal. For the main thread to wait on. `then` is called by the handler."""

    def __init__(self, then: Callable[[], None] | None = None) -> None:
        self._set = False
        self._then = then
        self._reading, self._writing = os.pipe()
        for fd in (self._reading, self._writing):
            os.set_blocking(fd, False)
        self._poll = select.poll()
        self._poll.register(self._reading, select.POLLIN)

    def is_set(self) -> bool:
        return self._set

    def wait(self, timeout: float) -> bool:
        """Whether it is set, at the latest after `timeout` seconds."""
        until = time.monotonic() + timeout
        while not self._set and (left := until - time.monotonic()) > 0:
            self._poll.poll(min(left * 1000, _DAY_MS))
            with contextlib.suppress(BlockingIOError):
                os.read(self._reading, 4096)
        return self._set

    @contextlib.contextmanager
    def by(self, numbers: Iterable[signal.Signals]) -> Iterator[None]:
        """Set by these signals meanwhile."""

        def note(number: int, frame: FrameType | None) -> None:
            self._set = True
            if self._then is not None:
                self._then()

        # What the system calls writes to it at once. Python's handler alone would be too late
        # for a wait that begins between the two.
        wakeup = signal.set_wakeup_fd(self._writing, warn_on_full_buffer=False)
        before = {number: signal.signal(number, note) for number in numbers}
        try:
            yield
        finally:
            early.restore(before)
            signal.set_wakeup_fd(wakeup)

    def close(self) -> None:
        os.close(self._reading)
        os.close(self._writing)


@contextlib.contextmanager
def stop_on_signal(then: Callable[[], None] | None = None) -> Iterator[StopRequest]:
    """What SIGINT and SIGTERM set meanwhile; they call `then`, too."""
    asked = StopRequest(then)
    try:
        with asked.by(early.SIGNALS):
            yield asked
    finally:
        asked.close()
