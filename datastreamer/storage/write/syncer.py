"""A thread that syncs after commits that did not wait.

Owns when a sync begins; `durability.py` syncs.
"""

from __future__ import annotations

import _thread
import queue
import time
from collections.abc import Callable

# A pause follows a sync that `_MANY` commits share: `_TIMES` as long as the sync, but no more than
# `_MOST_PAUSE` seconds. The committing threads need the processor too, and more commits share the
# next sync.
_MANY = 8
_TIMES = 3
_MOST_PAUSE = 0.002


class Syncer:
    """Calls `work()` in a thread of its own, within the times that `request` names.

    The thread starts with the first request. `work` returns how many commits it has brought to
    disk, if it counts them, and must not raise. A signal's exception may end a
    call of `request` at any point: it holds no lock.
    """

    def __init__(self, work: Callable[[], int | None]) -> None:
        self._work = work
        # Times by which `work` must begin, by the monotonic clock, and whether it may be later
        # because of a pause; None: end the thread.
        self._asked: queue.SimpleQueue[tuple[float, bool] | None] = queue.SimpleQueue()
        self._started = False
        self._ended: queue.SimpleQueue[None] = queue.SimpleQueue()

    def request(self, seconds: float = 0.0, *, urgent: bool = False) -> None:
        """Begin `work` within `seconds`: once for all requests that precede its begin. Without
        `seconds`, after a pause at most, unless the request is `urgent`."""
        self._asked.put((time.monotonic() + seconds, not (seconds or urgent)))
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
                many = (self._work() or 0) >= _MANY
                ended = time.monotonic()
                rested = ended + min(_TIMES * (ended - began), _MOST_PAUSE) if many else 0.0
                continue
            if asked is None:
                self._asked.put(None)
                self._ended.put(None)
                return
            begin, may_pause = asked
            begin = max(begin, rested) if may_pause else begin
            due = begin if due is None else min(due, begin)

    def close(self) -> None:
        """Return when no `work` is in progress; none begins after that."""
        self._asked.put(None)
        if self._started:
            self._ended.get()
            self._ended.put(None)
