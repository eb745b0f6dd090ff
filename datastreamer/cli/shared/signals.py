"""A stop request by signal, for work that must not be interrupted at any point.

Owns the handlers and what they set. `threading.Event` cannot be used: the code that the
handler interrupts may hold its lock.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from types import FrameType

from datastreamer.cli import early_signals

_DAY_MS = 86_400_000  # poll(2) waits at most 24 days


class StopRequest:
    """Set once, by a signal. The main thread waits for it. The handler calls `then`."""

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
        """Wait until it is set, for at most `timeout` seconds; returns whether it is set."""
        until = time.monotonic() + timeout
        while not self._set and (left := until - time.monotonic()) > 0:
            self._poll.poll(min(left * 1000, _DAY_MS))
            with contextlib.suppress(BlockingIOError):
                os.read(self._reading, 4096)
        return self._set

    @contextlib.contextmanager
    def by(self, numbers: Iterable[signal.Signals]) -> Iterator[None]:
        """Within the block, these signals set it."""

        def note(number: int, frame: FrameType | None) -> None:
            self._set = True
            if self._then is not None:
                self._then()

        # The C handler writes to this descriptor at once. Python's handler alone would run too
        # late for a wait that begins in between.
        wakeup = signal.set_wakeup_fd(self._writing, warn_on_full_buffer=False)
        before = {number: signal.signal(number, note) for number in numbers}
        try:
            yield
        finally:
            early_signals.restore(before)
            signal.set_wakeup_fd(wakeup)

    def close(self) -> None:
        os.close(self._reading)
        os.close(self._writing)


@contextlib.contextmanager
def stop_on_signal(then: Callable[[], None] | None = None) -> Iterator[StopRequest]:
    """Within the block, SIGINT and SIGTERM set the request and call `then`."""
    request = StopRequest(then)
    try:
        with request.by(early_signals.SIGNALS):
            yield request
    finally:
        request.close()
