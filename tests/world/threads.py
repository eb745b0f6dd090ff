"""Threads that run in turns with the event loop, so that a run can be repeated.

A thread runs only while the event loop waits for it: it returns control whenever it would wait, so
that exactly one of the two runs. Neither gives up waiting, however long a busy machine makes it
wait: a deadlock is the test runner's to end. Knows no driver and no clock.
"""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, TypeVar

import trio

from tests.storage.lab.disk import Gone

T = TypeVar("T")


class Stepped:
    """A thread that runs while the event loop waits for it, and the other way round."""

    _running = threading.local()

    def __init__(self, main: Callable[[], Any], *, cancellable: bool = False) -> None:
        """`cancellable`: a cancellation while the thread waits is raised in it, as by
        `trio.from_thread.run`; otherwise it ends as its process does."""
        self.result: Any = None
        self._main = main
        self._passed = (Exception, trio.Cancelled) if cancellable else (Exception,)
        self._mine, self._loops = threading.Semaphore(0), threading.Semaphore(0)
        self._request: Callable[[], Awaitable[Any]] | None = None
        self._result: Any = None
        self._error: BaseException | None = None
        self._killed = False

    @classmethod
    def running(cls) -> Stepped:
        found = cls._running.stepped
        assert isinstance(found, Stepped)
        return found

    @classmethod
    def here(cls) -> bool:
        return hasattr(cls._running, "stepped")

    def wait(self, call: Callable[[], Awaitable[T]]) -> T:
        """Await `call()` in the event loop; the thread calls this."""
        if self._killed:
            raise Gone
        self._request = call
        self._loops.release()
        self._mine.acquire()
        if self._killed:
            raise Gone
        error, self._error = self._error, None
        if error is not None:
            raise error
        result: T = self._result
        return result

    def _work(self) -> None:
        self._mine.acquire()
        self._running.stepped = self
        try:
            self.result = self._main()
        except BaseException as error:  # noqa: BLE001 - raised in the event loop
            self._error = error
        self._request = None
        self._loops.release()

    def _go_on(self) -> None:
        self._mine.release()
        self._loops.acquire()

    async def run(self) -> None:
        """Run the thread to its end, and raise what it raises."""
        thread = threading.Thread(target=self._work, daemon=True)
        thread.start()
        try:
            self._go_on()
            while self._request is not None:
                try:
                    self._result = await self._request()
                except self._passed as error:
                    self._error = error
                self._go_on()
        finally:
            self._killed = True
            while self._request is not None:
                self._go_on()
            thread.join()
        if self._error is not None:
            raise self._error


async def run_stepped(call: Callable[..., T], *arguments: Any) -> T:
    """`call(*arguments)` in a thread that may use `from_thread_run`, with the task's context."""
    context = contextvars.copy_context()
    thread = Stepped(lambda: context.run(call, *arguments), cancellable=True)
    await thread.run()
    result: T = thread.result
    return result


def from_thread_run(call: Callable[..., Awaitable[T]], *arguments: Any) -> T:
    """Takes the place of `trio.from_thread.run` in such a thread."""
    return Stepped.running().wait(partial(call, *arguments))


def in_loop(call: Callable[[], object]) -> None:
    """`call()` in the event loop, from the loop or from a thread that takes turns with it."""
    if Stepped.here():
        from_thread_run_sync(call)
    else:
        call()


def from_thread_run_sync(call: Callable[..., T], *arguments: Any, **_: Any) -> T:
    """Takes the place of `trio.from_thread.run_sync` in such a thread."""

    async def run() -> T:
        return call(*arguments)

    return Stepped.running().wait(run)
