"""A thread that syncs after commits that did not wait.

Owns when a sync begins. What a sync is, and what its outcome means, is the writer's.
"""

from __future__ import annotations

import _thread
import queue
import time
from collections.abc import Callable


class Syncer:
    """Calls `work()` in a thread of its own, within the times that `request` names.

    The thread starts with the first question. `work` must not raise. A signal's exception
    may end a call of `request` anywhere: it holds no lock.
    """

    def __init__(self, work: Callable[[], None]) -> None:
        self._work = work
        # Times at which it is to begin, by the monotonic clock; None: no more.
        self._asked: queue.SimpleQueue[float | None] = queue.SimpleQueue()
        self._started = False
        self._ended: queue.SimpleQueue[None] = queue.SimpleQueue()

    def request(self, seconds: float = 0.0) -> None:
        """Have `work` begin within `seconds` from now: once for all requests before it began."""
        self._asked.put(time.monotonic() + seconds)
        if not self._started:
            # Not a Thread of threading's: its start() waits for an event, and the exception of
            # a signal that comes then leaves the event's lock behind.
            _thread.start_new_thread(self._run, ())
            self._started = True

    def _run(self) -> None:
        due: float | None = None
        while True:
            try:
                left = None if due is None else due - time.monotonic()
                asked = self._asked.get(left is None or left > 0, left)
            except queue.Empty:
                due = None
                self._work()
                continue
            if asked is None:
                self._asked.put(None)
                self._ended.put(None)
                return
            due = asked if due is None else min(due, asked)

    def close(self) -> None:
        """Return when no `work` is under way; none begins any more."""
        self._asked.put(None)
        if self._started:
            self._ended.get()
            self._ended.put(None)
