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
    """The event loop of an object that messages call `called`; it runs until `close`."""

    def __init__(self, called: str, name: str) -> None:
        super().__init__()
        self._called = called
        self._loop = asyncio.new_event_loop()
        self._tasks: list[asyncio.Future[None]] = []
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Await `work` in the loop. An exception that interrupts the wait here, such as that of a
        signal's handler, cancels it. Raises `StreamClosed` once the loop is closed."""
        try:
            self._ensure_ours()
            if self._loop.is_closed():
                raise StreamClosed(f"the {self._called} is closed")
        except UsageError:
            work.close()
            raise
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
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
        """Call `function` in the loop, without waiting for that."""
        self._loop.call_soon_threadsafe(function)

    def serve(self, work: Coroutine[Any, Any, None]) -> None:
        """Run `work` in the loop until that is closed."""

        async def serve() -> None:
            self._tasks.append(asyncio.ensure_future(work))

        self.run(serve())

    def close(self) -> None:
        """Cancel what is served, and end the thread. A second call does nothing.

        Waits until the calls that are in progress have returned: each returns soon after what is
        served has ended.
        """

        async def end() -> None:
            for task in self._tasks:
                task.cancel()
            while others := asyncio.all_tasks() - {asyncio.current_task()}:
                await asyncio.wait(others)
            await self._loop.shutdown_default_executor()

        if self._loop.is_closed():
            return
        self.run(end())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
