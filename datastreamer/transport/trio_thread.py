"""Trio in a thread, for synchronous callers.

Owns the thread, its event loop and the calls into it from other threads.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import trio

T = TypeVar("T")


class TrioThread:
    """An event loop that runs `main` in a daemon thread.

    `main` gets a function that it calls when it is ready; the constructor returns then, or when
    `main` has ended. `failure` is what `main` raised, out of any exception groups.
    """

    def __init__(self, name: str, main: Callable[[Callable[[], None]], Awaitable[None]]) -> None:
        self.failure: BaseException | None = None
        self._main = main
        self._scope = trio.CancelScope()
        self._token: trio.lowlevel.TrioToken | None = None
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()
        try:
            self._ready.wait()
        except BaseException:
            self._cancel()
            raise

    def _run(self) -> None:
        async def run() -> None:
            self._token = trio.lowlevel.current_trio_token()
            with self._scope:
                await self._main(self._ready.set)

        try:
            trio.run(run)
        except BaseException as error:  # noqa: BLE001 - the owner raises or reports it
            while inner := getattr(error, "exceptions", ()):
                error = inner[0]
            self.failure = error
        finally:
            self._ready.set()

    def call(self, function: Callable[[], Awaitable[T]]) -> T:
        """Await `function()` in the loop, from any other thread, and return its result.

        Raises what it raises, and `trio.RunFinishedError` or `trio.Cancelled` if the loop ends.
        """

        def call() -> T:
            return trio.from_thread.run(function, trio_token=self._token)

        return outside_of_loops(call)

    def close(self) -> None:
        """Cancel `main` and return when the thread has ended. A second call does nothing."""
        self._cancel()
        self._thread.join()

    def _cancel(self) -> None:
        if self._token is not None:
            with contextlib.suppress(trio.RunFinishedError):
                self._token.run_sync_soon(self._scope.cancel)


def outside_of_loops(call: Callable[[], T]) -> T:
    """`call()`, in another thread if this one runs an event loop: trio does not allow a thread
    with a loop to wait for another loop."""
    if current_loop() is None:
        return call()
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(call).result()


def current_loop() -> trio.lowlevel.TrioToken | None:
    try:
        return trio.lowlevel.current_trio_token()
    except RuntimeError:
        return None
