"""Runs an engine in an asyncio task; or its background, in a thread. Must not import trio."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from inspect import isawaitable
from typing import Any

from datastreamer.client.effects import (
    AsyncDriver,
    Beside,
    Call,
    Close,
    Connect,
    Effect,
    Interrupt,
    Interrupted,
    InThread,
    Now,
    Open,
    Race,
    Receive,
    Send,
    Signal,
    Sleep,
    Steps,
    Wait,
)
from datastreamer.client.introduction import connecting
from datastreamer.client.thread_driver import ThreadDriver
from datastreamer.transport.asyncio_channel import AsyncioChannel, dial_asyncio
from datastreamer.transport.asyncio_thread import AsyncioThread
from datastreamer.transport.connection_errors import connect_timeout
from datastreamer.transport.endpoint import Endpoint


class AsyncioDriver(AsyncDriver):
    """Its servers are `Endpoint`s."""

    cancelled = (asyncio.CancelledError,)
    _interruptible: asyncio.Task[Any] | None = None

    def __init__(self, *servers: Endpoint) -> None:
        super().__init__(*servers)
        self.turn = threading.Lock()

    def signal(self) -> Signal:
        return asyncio.Event()

    def now(self) -> float:
        return time.monotonic()

    async def perform(self, effect: Effect) -> Any:
        match effect:
            case Receive(channel, buffer, seconds):
                return await channel.receive_into(buffer, seconds)
            case Send(channel, data, seconds):
                await channel.send(data, seconds)
            case Connect(seconds, server):
                return await self._connect(seconds, server)
            case Open(_, server):
                return await dial_asyncio(self.servers[server])
            case Close(channel, farewell):
                channel.close(farewell=farewell)
            case Now():
                return self.now()
            case Sleep(until):
                seconds = max(0.0, until - self.now())
                await self._interruptibly(asyncio.sleep(seconds), None)
            case Interrupt(channel):
                if self._interruptible is not None:
                    self._interruptible.cancel()
                elif channel is not None:
                    channel.close()
            case Wait(signal, seconds):
                await _finish(asyncio.ensure_future(signal.wait()), seconds)
            case Call(function, arguments):
                outcome = function(*arguments)
                return await outcome if isawaitable(outcome) else outcome
            case InThread(function, arguments):
                return await _in_thread(function, *arguments)
            case Race(racers):
                await self._race([asyncio.ensure_future(self.run(steps)) for steps in racers])
        return None

    async def _race(self, tasks: Sequence[asyncio.Future[None]]) -> None:
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            with suppress(Exception):
                await _end(tasks)
            raise
        await _end(tasks)

    @asynccontextmanager
    async def background(self, *steps: Steps[None]) -> AsyncIterator[None]:
        tasks = [asyncio.ensure_future(self.run(each)) for each in steps]
        yield
        await _end(tasks)

    async def _connect(self, seconds: float, server: int) -> AsyncioChannel:
        endpoint: Endpoint = self.servers[server]
        made: list[AsyncioChannel] = []

        async def connect() -> None:
            steps = connecting(endpoint.introduction, endpoint.peer, seconds, server)
            made.append(await self.run(steps))

        try:
            await self._interruptibly(connect(), seconds)
        except BaseException as error:
            for channel in made:
                channel.close()
            if isinstance(error, TimeoutError):
                raise connect_timeout(endpoint.peer, seconds) from None
            raise
        return made[0]

    async def _interruptibly(self, wait: Coroutine[Any, Any, None], seconds: float | None) -> None:
        task = self._interruptible = asyncio.ensure_future(wait)
        try:
            await _finish(task, seconds)
        finally:
            self._interruptible = None
        if task.cancelled():
            raise Interrupted
        task.result()


class LoopDriver(ThreadDriver):
    """Runs an engine in the caller's thread, and its background in an event loop in a thread of its
    own, which alone connects to these servers: it renews a lease, or reads sources, while the
    caller does something else."""

    _thread: AsyncioThread

    def __init__(self, *endpoints: Endpoint) -> None:
        super().__init__()
        self.guard = threading.Lock()
        self._loop = AsyncioDriver(*endpoints)
        self._name = "".join(endpoint.peer for endpoint in endpoints) or "sources"
        self._calling = False

    def signal(self) -> Signal:
        return self._loop.signal()

    @contextmanager
    def background(self, *steps: Steps[None]) -> Iterator[None]:
        """Perform these in the loop until the block ends."""
        self._thread = AsyncioThread(f"loop of {self._name}")
        for each in steps:
            self._thread.serve(self._loop.run(each))
        yield
        if self._thread.ours:
            self._thread.close()

    def soon(self, function: Callable[[], object]) -> None:
        """Call `function` in the loop, without waiting for that: once, also for several calls."""
        if not self._calling:
            self._calling = True
            self._thread.call_soon(lambda: self._call(function))

    def call(self, function: Callable[[], object]) -> None:
        """Call `function` in the loop."""
        self._thread.call(function)

    def _call(self, function: Callable[[], object]) -> None:
        self._calling = False
        function()

    def _perform(self, effect: Effect) -> Any:
        if isinstance(effect, Beside):
            return self._thread.run((effect.driver or self._loop).run(effect.steps))
        return super()._perform(effect)


async def _finish(task: asyncio.Future[Any], seconds: float | None = None) -> None:
    """Wait until `task` is done; it is cancelled with the caller, and after `seconds`
    (`TimeoutError`)."""
    try:
        await asyncio.wait({task}, timeout=seconds)
        in_time = task.done()
    finally:
        task.cancel()
        await _until_done([task])
    if not in_time:
        raise TimeoutError


async def _end(tasks: Sequence[asyncio.Future[None]]) -> None:
    """Cancel them. Raises what the first of them that failed did."""
    for task in tasks:
        task.cancel()
    await _until_done(tasks)
    for task in tasks:
        if not task.cancelled():
            task.result()


async def _until_done(tasks: Sequence[asyncio.Future[Any]]) -> None:
    """Wait until all `tasks` are done. A cancellation of the caller is raised then, once: however
    many there were, asyncio counts them in the caller's task."""
    cancellation: asyncio.CancelledError | None = None
    while pending := [task for task in tasks if not task.done()]:
        try:
            await asyncio.wait(pending)
        except asyncio.CancelledError as error:
            cancellation = error
    for task in tasks:
        if not task.cancelled():
            # Otherwise asyncio logs an exception that nothing has asked for.
            task.exception()
    if cancellation is not None:
        raise cancellation


async def _in_thread(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call it in a thread; a cancellation is raised when it has returned."""
    call = asyncio.get_running_loop().run_in_executor(None, function, *arguments)
    await _until_done([call])
    return call.result()
