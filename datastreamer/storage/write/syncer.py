"""A thread that syncs after commits that did not wait.

Owns when a sync begins; `durability.py` syncs.
"""

from __future__ import annotations

import _thread
import queue
import time
from collections.abc import Callable

_MOST_PAUSE = 0.002  # seconds


class Syncer:
    """Calls `work()` in a thread of its own, within the times that `request` names.

    The thread starts with the first request. `work` must not raise. A signal's exception may end a
    call of `request` at any point: it holds no lock.
    """

    def __init__(self, work: Callable[[], None]) -> None:
        self._work = work
        # Times by which `work` must begin, by the monotonic clock; None: end the thread.
        self._asked: queue.SimpleQueue[float | None] = queue.SimpleQueue()
        self._started = False
        self._ended: queue.SimpleQueue[None] = queue.SimpleQueue()

    def request(self, seconds: float = 0.0, *, urgent: bool = False) -> None:
        """Begin `work` within `seconds`: once for all requests that precede its begin. Between two
        calls there is a pause, three times as long as the first one and at most `_MOST_PAUSE`,
        unless a request is `urgent`: committing threads need the processor too, and more commits
        share a sync."""
        self._asked.put(0.0 if urgent else time.monotonic() + seconds)
        if not self._started:
            # Not threading.Thread: its start() waits for an event, and a signal's exception during
            # that wait leaves the event's lock acquired.
            _thread.start_new_thread(self._run, ())
            self._started = True

    def _run(self) -> None:
        due: float | None = None
        rested = 0.0
        while True:
            try:
                left = None if due is None else due - time.monotonic()
                asked = self._asked.get(left is None or left > 0, left)
            except queue.Empty:
                due, began = None, time.monotonic()
                self._work()
                ended = time.monotonic()
                rested = ended + min(3 * (ended - began), _MOST_PAUSE)
                continue
            if asked is None:
                self._asked.put(None)
                self._ended.put(None)
                return
            asked = asked and max(asked, rested)
            due = asked if due is None else min(due, asked)

    def close(self) -> None:
        """Return when no `work` is in progress; none begins after that."""
        self._asked.put(None)
        if self._started:
            self._ended.get()
            self._ended.put(None)
