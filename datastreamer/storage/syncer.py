"""A thread that syncs behind commits which did not wait for it.

Owns when a sync begins. What a sync is, and what its outcome means, is the writer's.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable


class Syncer:
    """Calls `work()` in a thread of its own, within the times that `ask` names.

    The thread starts with the first question. `work` must not raise.
    """

    def __init__(self, work: Callable[[], None], name: str) -> None:
        self._work = work
        self._name = name
        self._changed = threading.Condition()
        self._due: float | None = None
        self._thread: threading.Thread | None = None
        self._closing = False

    def ask(self, seconds: float = 0.0) -> None:
        """Have `work` begin within `seconds` from now: once for all who asked before it began."""
        due = time.monotonic() + seconds
        with self._changed:
            if self._closing or (self._due is not None and self._due <= due):
                return
            self._due = due
            # One without an ident was not started: a signal's exception came before that.
            if self._thread is None or self._thread.ident is None:
                self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                self._thread.start()
            else:
                self._changed.notify()

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._closing:
                    now = time.monotonic()
                    if self._due is not None and self._due <= now:
                        break
                    self._changed.wait(None if self._due is None else self._due - now)
                if self._closing:
                    return
                self._due = None
            self._work()

    def close(self) -> None:
        """Return when no `work` is under way; none begins any more."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        if self._thread is not None and self._thread.ident is not None:
            self._thread.join()
