"""An asyncio event loop in a thread of its own, for calls from plain synchronous code.

Must not import trio.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from datastreamer.errors import StreamClosed, UsageError
from datastreamer.transport.fork_guard import ForkGuard

T = TypeVar("T")


class AsyncioThread(ForkGuard):
    """An event loop that runs until `close`; messages call it by its name."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self._called = name
        self._loop = asyncio.new_event_loop()
        self._tasks: list[asyncio.Future[None]] = []
        # A signal's handler may close it while this thread holds the lock.
        self._lock = threading.RLock()
        self._closing = False
        self._thread = threading.Thread(target=self._run_loop, name=name, daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Await `work` in the loop. An exception that interrupts the wait here, such as that of a
        signal's handler, cancels it. Raises `StreamClosed` once `close` was called."""
        try:
            self._ensure_ours()
            with self._lock:
                self._ensure_open()
                future = asyncio.run_coroutine_threadsafe(work, self._loop)
        except UsageError:
            work.close()
            raise
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def call(self, function: Callable[[], T]) -> T:
        """Call `function` in the loop."""

        async def call() -> T:
            return function()

        return self.run(call())

    def call_soon(self, function: Callable[[], object]) -> None:
        """Call `function` in the loop, without waiting for that. Raises `StreamClosed` once `close`
        was called."""
        with self._lock:
            self._ensure_open()
            self._loop.call_soon_threadsafe(function)

    def serve(self, work: Coroutine[Any, Any, None]) -> None:
        """Run `work` in the loop until that is closed."""

        async def serve() -> None:
            self._tasks.append(asyncio.ensure_future(work))

        self.run(serve())

    def close(self) -> None:
        """Cancel what is served, and return when the thread has ended; each call waits for that.

        The thread ends when the calls that are in progress have returned: each returns soon after
        what is served has ended.
        """
        self._ensure_ours()
        with self._lock:
            begins, self._closing = not self._closing, True
            if begins:
                asyncio.run_coroutine_threadsafe(self._end(), self._loop)
        self._thread.join()

    def _ensure_open(self) -> None:
        if self._closing:
            raise StreamClosed(f"the {self._called} is closed")

    def _run_loop(self) -> None:
        self._loop.run_forever()
        self._loop.close()

    async def _end(self) -> None:
        for task in self._tasks:
            task.cancel()
        # No call begins any more: these have begun before, and their callers get their results.
        while others := asyncio.all_tasks() - {asyncio.current_task()}:
            await asyncio.wait(others)
        await self._loop.shutdown_default_executor()
        self._loop.stop()
