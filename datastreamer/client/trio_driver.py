"""Runs a client's engine in a Trio task, and makes the clients of Trio."""

from __future__ import annotations

import math
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from inspect import isawaitable
from typing import Any, NamedTuple

import trio

from datastreamer.client.async_client import Client
from datastreamer.client.effects import (
    AsyncDriver,
    Call,
    CancellationPoint,
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
    opener,
)
from datastreamer.client.introduction import connecting
from datastreamer.transport.connection_errors import connect_timeout
from datastreamer.transport.endpoint import Endpoint
from datastreamer.transport.trio_channel import Channel, channel_over, dial

Dial = Callable[[], Awaitable[trio.abc.Stream]]


class Dialled(NamedTuple):
    """A server, how it is connected to, and the requests that are sent first."""

    peer: str
    dial: Dial
    introduction: tuple[bytes, ...] = ()


class TrioDriver(AsyncDriver):
    """Its servers are `Dialled`."""

    cancelled = (trio.Cancelled,)
    _interruptible: trio.CancelScope | None = None

    def __init__(self, *servers: Dialled) -> None:
        super().__init__(*servers)
        self.turn = threading.Lock()

    def signal(self) -> Signal:
        return trio.Event()

    def now(self) -> float:
        return trio.current_time()

    def plain(self, error: BaseException) -> BaseException:
        # Nurseries, also Trio's own where it connects, raise cancellations in groups.
        while isinstance(error, BaseExceptionGroup) and error.split(trio.Cancelled)[1] is None:
            error = error.exceptions[0]
        return error

    async def perform(self, effect: Effect) -> Any:
        match effect:
            case Receive(channel, buffer, seconds):
                return await _within(seconds, partial(channel.receive_into, buffer))
            case Open(_, server):
                peer, dial_server, _ = self.servers[server]
                return channel_over(await dial_server(), peer)
            case Send(channel, data, seconds):
                await _within(seconds, partial(channel.send, data))
            case Connect(seconds, server):
                return await self._interruptibly(partial(self._connect, seconds, server))
            case Close(channel):
                with trio.CancelScope(shield=True):
                    await channel.aclose()
            case Now():
                return self.now()
            case Sleep(until):
                await self._interruptibly(partial(trio.sleep_until, until))
            case Interrupt(channel):
                if self._interruptible is not None:
                    self._interruptible.cancel()
                elif channel is not None:
                    with trio.CancelScope(shield=True):
                        await channel.aclose()
            case Wait(signal, seconds):
                await _within(seconds, signal.wait)
            case Call(function, arguments):
                outcome = function(*arguments)
                return await outcome if isawaitable(outcome) else outcome
            case InThread(function, arguments):
                return await trio.to_thread.run_sync(function, *arguments)
            case CancellationPoint():
                await trio.lowlevel.checkpoint_if_cancelled()
            case Race(racers):
                await self._race(racers)
        return None

    async def _race(self, racers: tuple[Steps[None], ...]) -> None:
        failures: list[Exception] = []
        async with trio.open_nursery() as nursery:

            async def run(steps: Steps[None]) -> None:
                try:
                    await self.run(steps)
                except Exception as error:  # noqa: BLE001 - raised below, in no group
                    failures.append(error)
                nursery.cancel_scope.cancel()

            for steps in racers:
                nursery.start_soon(run, steps)
        if failures:
            raise failures[0]

    @asynccontextmanager
    async def background(self, *steps: Steps[None]) -> AsyncIterator[None]:
        async with trio.open_nursery() as nursery:
            for each in steps:
                nursery.start_soon(self.run, each)
            yield
            nursery.cancel_scope.cancel()

    async def _connect(self, seconds: float, server: int) -> Channel:
        peer, _, introduction = self.servers[server]
        with trio.move_on_after(seconds):
            steps: Steps[Channel] = connecting(introduction, peer, seconds, server)
            return await self.run(steps)
        raise connect_timeout(peer, seconds)

    async def _interruptibly(self, wait: Callable[[], Awaitable[Any]]) -> Any:
        with trio.CancelScope() as scope:
            self._interruptible = scope
            try:
                return await wait()
            finally:
                self._interruptible = None
        raise Interrupted


async def _within(seconds: float | None, wait: Callable[[], Awaitable[Any]]) -> Any:
    with trio.move_on_after(math.inf if seconds is None else seconds):
        return await wait()
    raise TimeoutError


def trio_driver_to(*endpoints: Endpoint) -> TrioDriver:
    """A driver that connects to these servers."""
    return TrioDriver(
        *[Dialled(each.peer, partial(dial, each), each.introduction) for each in endpoints]
    )


connect = opener(Client, trio_driver_to, "connect", "datastreamer")
