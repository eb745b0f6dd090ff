"""Commits that did not wait: the thread that syncs after them, and their handle.

Decides when a sync begins; `sync_policy.py` syncs, and knows which commits are on disk.
"""

from __future__ import annotations

import _thread
import queue
import time
from collections.abc import Callable
from typing import Protocol

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
        self.closing = False
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
        self.closing = True
        self._asked.put(None)
        if self._started:
            self._ended.get()
            self._ended.put(None)


class Waiting(Protocol):
    """What knows which commits are on disk: `Durability`."""

    def reached(self, number: int) -> bool: ...
    def wait_for(self, number: int, timeout: float | None) -> bool: ...


class PendingCommit:
    """An operation that was committed without waiting for the disk."""

    __slots__ = ("_durability", "_number")

    def __init__(self, durability: Waiting, number: int) -> None:
        self._durability = durability
        self._number = number

    def done(self) -> bool:
        """Whether it is on disk. Raises `CommitInDoubt` if it may never be."""
        return self._durability.reached(self._number)

    def wait(self, timeout: float | None = None) -> bool:
        """Return True when it is on disk, or False after `timeout` seconds.

        Requests a sync, which all that wait share. Raises `CommitInDoubt`, `EntriesLost`.
        """
        return self._durability.wait_for(self._number, timeout)
