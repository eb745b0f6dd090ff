"""The writer's thread that syncs behind its commits, as far as a machine lets it.

Replaces ``datastreamer/storage/write/background.py``. Nothing runs by itself: the machine says
when a sync that was asked for begins, and may hold it before one of its operations while
the writer continues. Only one of the two threads ever runs, and time is a number, so that an
example does the same each time it is run.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import TracebackType

# A thread that does not come back is a deadlock, and a failure.
_PATIENCE = 60


class Background:
    """The syncers of one machine, of which the newest is at work. `now` is in seconds."""

    def __init__(self) -> None:
        self.now = 0.0
        self._syncer: SimSyncer | None = None
        self._held: _Held | None = None

    def syncer(self, work: Callable[[], None]) -> SimSyncer:
        """Takes the place of the class `Syncer`."""
        self._syncer = SimSyncer(self, work)
        return self._syncer

    @property
    def asked(self) -> bool:
        """Whether a sync may begin."""
        return self._syncer is not None and self._syncer.due is not None

    @property
    def held(self) -> bool:
        return self._held is not None

    def run(self, hold: str = "") -> None:
        """Do the work that was asked for, up to the first operation whose name begins with
        `hold`. Raises what the work raises, here as in the rest."""
        self.finish()
        syncer = self._syncer
        if syncer is None or syncer.due is None:
            return
        syncer.due = None
        if hold:
            self._held = _Held(syncer.work, hold)
            self._on(self._held)
        else:
            syncer.work()

    def finish(self) -> None:
        """Let what is held go on to its end."""
        if self._held is not None:
            self._on(self._held)

    def _on(self, held: _Held) -> None:
        try:
            held.go_on()
        finally:
            if held.done:
                self._held = None

    def watched(self, what: str) -> None:
        """Before each operation of either thread."""
        if self._held is not None:
            self._held.before(what)

    def pass_time(self, seconds: float) -> None:
        """Do all that falls due meanwhile, in its order."""
        until = self.now + seconds
        self.finish()
        while self._syncer is not None:
            due = self._syncer.due
            if due is None or due > until:
                break
            self.now = max(self.now, due)
            self.run()
        self.now = until

    def end(self) -> None:
        """The process has ended: what is held finds that out."""
        held, self._held, self._syncer = self._held, None, None
        if held is not None:
            held.let_go()


class SimSyncer:
    """The `Syncer` of a writer."""

    def __init__(self, background: Background, work: Callable[[], None]) -> None:
        self._background = background
        self.work = work
        self.due: float | None = None
        # If the caller waits for the sync that it requests, the sync is done at once.
        self.at_once = False

    def request(self, seconds: float = 0.0, *, urgent: bool = False) -> None:
        due = self._background.now + seconds
        self.due = due if self.due is None else min(self.due, due)
        if self.at_once:
            self._background.run()

    def close(self) -> None:
        self._background.finish()
        self.due = None


class IdleSyncer:
    """For work that the machine does by a rule of its own."""

    def __init__(self, work: Callable[[], None]) -> None:
        pass

    def request(self, seconds: float = 0.0, *, urgent: bool = False) -> None:
        pass

    def close(self) -> None:
        pass


class Turn:
    """A lock of the writer's; who finds it taken has the held thread go on and give it back."""

    def __init__(self, background: Background) -> None:
        self._background = background
        self._lock = threading.RLock()

    def acquire(self) -> bool:
        if not self._lock.acquire(blocking=False):
            self._background.finish()
            assert self._lock.acquire(blocking=False), "a sync is over and keeps its lock"
        return True

    def release(self) -> None:
        self._lock.release()

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.release()


class _Held:
    """Work in a thread that stops before one operation."""

    def __init__(self, work: Callable[[], None], hold: str) -> None:
        self.done = False
        self._work = work
        self._hold = hold
        self._failed: BaseException | None = None
        self._mine, self._others = threading.Semaphore(0), threading.Semaphore(0)
        self._thread = threading.Thread(target=self._run, name="held sync", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        self._mine.acquire(timeout=_PATIENCE)
        try:
            self._work()
        except BaseException as error:  # noqa: BLE001
            # For the one that lets it continue.
            self._failed = error
        self.done = True
        self._others.release()

    def before(self, what: str) -> None:
        mine = threading.current_thread() is self._thread
        if mine and self._hold and what.startswith(self._hold):
            self._hold = ""
            self._others.release()
            self._mine.acquire(timeout=_PATIENCE)

    def go_on(self) -> None:
        """Return when the thread is held, or done. Raises what its work raised."""
        self._mine.release()
        assert self._others.acquire(timeout=_PATIENCE), "the held sync does not come back"
        if self.done:
            self._thread.join()
            if self._failed is not None:
                raise self._failed

    def let_go(self) -> None:
        """The same; whatever it raises is of no interest any more."""
        self._mine.release()
        assert self._others.acquire(timeout=_PATIENCE), "the held sync does not come back"
        self._thread.join()
