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
from collections.abc import Callable, Iterable
from types import FrameType

from datastreamer.cli import early_signals

_DAY_MS = 86_400_000  # poll(2) waits at most 24 days


class StopRequest:
    """Within its block, SIGINT and SIGTERM set it and call `then`. The main thread waits for it.

    `number` is that of the newest signal; 0: none.
    """

    def __init__(
        self,
        then: Callable[[], None] | None = None,
        signals: Iterable[signal.Signals] = early_signals.SIGNALS,
    ) -> None:
        self._set = False
        self.number = 0
        self._then = then
        self._signals = signals

    def __enter__(self) -> StopRequest:
        self._reading, self._writing = os.pipe()
        for fd in (self._reading, self._writing):
            os.set_blocking(fd, False)
        self._poll = select.poll()
        self._poll.register(self._reading, select.POLLIN)
        # The C handler writes to this descriptor at once. Python's handler alone would run too
        # late for a wait that begins in between.
        self._wakeup = signal.set_wakeup_fd(self._writing, warn_on_full_buffer=False)
        self._before = {number: signal.signal(number, self._note) for number in self._signals}
        return self

    def __exit__(self, *_: object) -> None:
        early_signals.restore(self._before)
        signal.set_wakeup_fd(self._wakeup)
        os.close(self._reading)
        os.close(self._writing)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._set, self.number = True, number
        if self._then is not None:
            self._then()

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
