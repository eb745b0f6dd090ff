"""Every kind of client behind one face of plain calls, so that one test is of all of them.

An asynchronous client lives in an event loop in a thread of its own; calls wait for it.
"""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, contextmanager
from types import TracebackType
from typing import Any, Protocol

import pytest
import trio

from datastreamer import (
    BlockingClient,
    BlockingPublisher,
    aio,
    connect,
    connect_publisher,
)

KINDS = ["trio", "asyncio", "blocking"]
kinds = pytest.mark.parametrize("kind", KINDS)


class Loop(Protocol):
    """An event loop in another thread."""

    def call(self, function: Callable[..., Awaitable[Any]], *arguments: Any) -> Any:
        """Await what `function` returns, there, and give its outcome."""


class AsyncioLoop:
    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self.thread.start()

    def call(self, function: Callable[..., Awaitable[Any]], *arguments: Any) -> Any:
        async def call() -> Any:
            return await function(*arguments)

        return asyncio.run_coroutine_threadsafe(call(), self.loop).result()

    def close(self) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join(20)
        self.loop.run_until_complete(self.loop.shutdown_default_executor())
        self.loop.close()


class TrioLoop:
    def __init__(self) -> None:
        self.token: trio.lowlevel.TrioToken
        started = threading.Event()

        async def main() -> None:
            self.token = trio.lowlevel.current_trio_token()
            self.over = trio.Event()
            started.set()
            await self.over.wait()

        self.thread = threading.Thread(target=trio.run, args=(main,), daemon=True)
        self.thread.start()
        assert started.wait(20)

    def call(self, function: Callable[..., Awaitable[Any]], *arguments: Any) -> Any:
        return trio.from_thread.run(function, *arguments, trio_token=self.token)

    def close(self) -> None:
        trio.from_thread.run_sync(self.over.set, trio_token=self.token)
        self.thread.join(20)


class Plain:
    """An asynchronous object whose coroutine methods are plain calls; what its other methods
    return is plain too, where it is asynchronous."""

    def __init__(self, wrapped: Any, loop: Loop) -> None:
        self.wrapped = wrapped
        self._loop = loop

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.wrapped, {"close": "aclose"}.get(name, name))
        if not callable(found):
            return found
        if inspect.iscoroutinefunction(found):
            return lambda *what, **named: self.plain(self._loop.call(lambda: found(*what, **named)))
        return lambda *what, **named: self.plain(found(*what, **named))

    def plain(self, found: Any) -> Any:
        asynchronous = hasattr(found, "__aenter__") or hasattr(found, "__aiter__")
        wrapped = hasattr(found, "wait") and inspect.iscoroutinefunction(found.wait)
        return Plain(found, self._loop) if asynchronous or wrapped else found

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        try:
            return self._loop.call(self.wrapped.__anext__)
        except StopAsyncIteration:
            raise StopIteration from None

    def __enter__(self) -> Any:
        self._loop.call(self.wrapped.__aenter__)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._loop.call(self.wrapped.__aexit__, kind, error, traceback)


@contextmanager
def within(kind: str, make: Callable[[], AbstractAsyncContextManager[Any]]) -> Iterator[Any]:
    """What `make()` gives, plain, in an event loop of this kind."""
    loop: TrioLoop | AsyncioLoop = TrioLoop() if kind == "trio" else AsyncioLoop()
    began: Future[Any] = Future()
    failures: list[BaseException] = []

    async def hold() -> None:
        # In one task from its beginning to its end: a background task belongs to it.
        over = trio.Event() if kind == "trio" else asyncio.Event()
        try:
            async with make() as found:
                began.set_result((found, over))
                await over.wait()
                if failures:
                    raise failures[0]
        except BaseException as error:
            if began.done():
                raise
            began.set_exception(error)

    try:
        with ThreadPoolExecutor(1) as holder:
            held = holder.submit(loop.call, hold)
            found, over = began.result(20)
            try:
                yield Plain(found, loop)
            except BaseException as error:  # noqa: BLE001 - raised where the block ends
                failures.append(error)
            loop.call(_set, over)
            held.result(60)
    finally:
        loop.close()


async def _set(event: Any) -> None:
    event.set()


@contextmanager
def client_of_kind(kind: str, *address: Any, **options: Any) -> Iterator[Any]:
    """A client of this kind, with the methods of a `BlockingClient`."""
    if kind == "blocking":
        with BlockingClient(*address, **options) as client:
            yield client
        return
    make: Callable[..., AbstractAsyncContextManager[Any]]
    make = connect if kind == "trio" else aio.connect
    with within(kind, lambda: make(*address, **options)) as client:
        yield client


@contextmanager
def publisher_of_kind(kind: str, *address: Any, **options: Any) -> Iterator[Any]:
    """A publisher of this kind, with the methods of a `BlockingPublisher`."""
    if kind == "blocking":
        with BlockingPublisher(*address, **options) as publisher:
            yield publisher
        return
    make: Callable[..., AbstractAsyncContextManager[Any]]
    make = connect_publisher if kind == "trio" else aio.connect_publisher
    with within(kind, lambda: make(*address, **options)) as publisher:
        yield publisher
