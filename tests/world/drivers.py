"""The package's drivers on the simulated network: of Trio, of asyncio, and of threads.

The drivers are the real ones; only how a connection is made is replaced. An asyncio event loop
runs in steps within a Trio task, a thread as `threads.py` says.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import socket
from collections.abc import Awaitable, Callable, Iterator
from contextvars import ContextVar
from functools import partial
from typing import Any, TypeVar
from unittest import mock

import trio

from datastreamer.client import asyncio_driver, thread_driver, trio_driver
from datastreamer.transport.asyncio_channel import AsyncioChannel
from datastreamer.transport.connection_errors import connect_failed, connect_timeout
from datastreamer.transport.endpoint import Endpoint
from datastreamer.transport.trio_channel import _with_tls
from tests.world.clock import SimTime
from tests.world.network import ClientStream, Network
from tests.world.threads import Stepped

T = TypeVar("T")

name_here: ContextVar[str] = ContextVar("name_here")
"""The name of the machine whose program runs."""


class Drivers:
    """Connects every driver to `network`."""

    def __init__(self, network: Network) -> None:
        self.network = network

    async def _dial(self, endpoint: Endpoint) -> socket.socket:
        try:
            return await self.network.connect(name_here.get(), endpoint.host)
        except OSError as error:
            raise connect_failed(endpoint.peer, error) from None

    async def _dial_trio(self, endpoint: Endpoint) -> trio.abc.Stream:
        stream: trio.abc.Stream = ClientStream(await self._dial(endpoint))
        if endpoint.context is not None:
            stream = await _with_tls(stream, endpoint, endpoint.context)
        return stream

    async def _dial_asyncio(self, endpoint: Endpoint) -> AsyncioChannel:
        dial = partial(self._dial, endpoint)
        return AsyncioChannel(await SteppedLoop.running().until(dial), endpoint.peer)

    def _connect_blocking(self, endpoint: Endpoint, timeout: float) -> socket.socket:
        async def connect() -> socket.socket:
            with trio.move_on_after(timeout):
                return await self._dial(endpoint)
            raise connect_timeout(endpoint.peer, timeout)

        return ThreadSocket(Stepped.running().wait(connect))

    @contextlib.contextmanager
    def replaced(self, time: SimTime) -> Iterator[None]:
        """The drivers connect through the simulated network."""
        thread_time = ThreadTime(time)
        with contextlib.ExitStack() as patches:
            for owner, name, value in (
                (trio_driver, "dial", self._dial_trio),
                (asyncio_driver, "dial_asyncio", self._dial_asyncio),
                (thread_driver, "connect_blocking", self._connect_blocking),
                (thread_driver, "keep_alive", lambda *_: None),
                (thread_driver, "time", thread_time),
            ):
                patches.enter_context(mock.patch.object(owner, name, value))
            yield


class SteppedLoop(asyncio.SelectorEventLoop):
    """An asyncio event loop that a Trio task steps, by Trio's clock."""

    def __init__(self, nursery: trio.Nursery) -> None:
        super().__init__()
        self._trio = nursery

    @staticmethod
    def running() -> SteppedLoop:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, SteppedLoop)
        return loop

    def time(self) -> float:
        return trio.current_time()

    async def until(self, call: Callable[[], Awaitable[T]]) -> T:
        """Await a Trio call in an asyncio task. A result that comes after a cancellation is
        closed."""
        future: asyncio.Future[T] = self.create_future()
        scope = trio.CancelScope()

        async def run() -> None:
            with scope:
                try:
                    found = await call()
                except Exception as error:  # noqa: BLE001 - raised in the asyncio task
                    if not future.done():
                        future.set_exception(error)
                else:
                    if future.done():
                        found.close()  # type: ignore[attr-defined]
                    else:
                        future.set_result(found)
            self._write_to_self()  # type: ignore[attr-defined]

        self._trio.start_soon(run)
        try:
            return await future
        finally:
            scope.cancel()

    async def run(self, main: Callable[[], Awaitable[None]]) -> None:
        """Await `main()` in the loop."""
        task = self.create_task(_awaited(main))
        try:
            while not task.done():
                self._step()
                if self._ready or task.done():  # type: ignore[attr-defined]
                    await trio.lowlevel.checkpoint()
                    continue
                timers = self._scheduled  # type: ignore[attr-defined]
                due = min((timer.when() for timer in timers if not timer.cancelled()), default=None)
                with trio.move_on_at(math.inf if due is None else due):
                    await trio.lowlevel.wait_readable(self._selector.fileno())  # type: ignore[attr-defined]
            task.result()
        finally:
            # Again and again: what is cancelled once may wait for an answer to its farewell.
            while not task.done():
                task.cancel()
                self._step()
            if not task.cancelled():
                task.exception()
            self.close()

    def _step(self) -> None:
        """Run what is due now, and nothing that comes later."""
        self.call_soon(self.stop)
        self.run_forever()


async def _awaited(main: Callable[[], Awaitable[None]]) -> None:
    await main()


class ThreadTime:
    """The module `time` for the threads that run in steps."""

    def __init__(self, time: SimTime) -> None:
        self.monotonic = time.monotonic

    def sleep(self, seconds: float) -> None:
        Stepped.running().wait(partial(trio.sleep, seconds))


class ThreadSocket(socket.socket):
    """A client's end of a connection, with a timeout, for a thread that runs in steps."""

    def __init__(self, connection: socket.socket) -> None:
        super().__init__(fileno=connection.detach())
        super().settimeout(0)
        self._seconds: float | None = None

    def gettimeout(self) -> float | None:
        return self._seconds

    def settimeout(self, value: float | None) -> None:
        self._seconds = value

    def recv_into(self, buffer: Any, nbytes: int = 0, flags: int = 0) -> int:
        return self._attempt(trio.lowlevel.wait_readable, partial(super().recv_into, buffer))

    def sendall(self, data: Any, flags: int = 0) -> None:
        rest = memoryview(data)
        while rest:
            rest = rest[self._attempt(trio.lowlevel.wait_writable, partial(super().send, rest)) :]

    def _attempt(
        self, ready: Callable[[socket.socket], Awaitable[None]], call: Callable[[], int]
    ) -> int:
        async def wait() -> None:
            with trio.move_on_after(math.inf if self._seconds is None else self._seconds):
                await ready(self)
                return
            raise TimeoutError

        while True:
            try:
                return call()
            except BlockingIOError:
                Stepped.running().wait(wait)
