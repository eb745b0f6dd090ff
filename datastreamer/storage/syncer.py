"""A thread that syncs behind commits which did not wait for it.

Owns when a sync begins. What a sync is, and what its outcome means, is the writer's.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable


class Syncer:
    """Calls `work()` in a thread of its own, within the times that `ask` names.

    The thread starts with the first question. `work` must not raise. A signal's exception
    may end a call of `ask` anywhere, and leaves no lock behind: there is none.
    """

    def __init__(self, work: Callable[[], None], name: str) -> None:
        self._work = work
        self._name = name
        # Times at which it is to begin, by the monotonic clock; None: no more.
        self._asked: queue.SimpleQueue[float | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def ask(self, seconds: float = 0.0) -> None:
        """Have `work` begin within `seconds` from now: once for all who asked before it began."""
        self._asked.put(time.monotonic() + seconds)
        # One without an ident was not started: a signal's exception came before that.
        if self._thread is None or self._thread.ident is None:
            self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            self._thread.start()

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
                return
            due = asked if due is None else min(due, asked)

    def close(self) -> None:
        """Return when no `work` is under way; none begins any more."""
        self._asked.put(None)
        if self._thread is not None and self._thread.ident is not None:
            self._thread.join()
