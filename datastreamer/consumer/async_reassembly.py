"""The reassembly of tasks: payloads as asynchronous iteration.

Owns the public face for Trio and for asyncio; which of them it is, its drivers know. Must not
import trio.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial

from datastreamer.client.effects import AsyncDriver, InThread, Steps
from datastreamer.client.upstream import Upstream
from datastreamer.consumer.engine import ConsumerEngine, ReassemblyOptions
from datastreamer.consumer.face import ReassemblyFace
from datastreamer.consumer.readers import Arrivals, readers_of
from datastreamer.reassembly.merge import Item
from datastreamer.reassembly.progress import ReassemblyProgress

DriverTo = Callable[[Upstream | None, float, int], tuple[AsyncDriver, str]]
"""A driver that connects to an upstream, or to none, and the server as messages name it."""


class Reassembly(ReassemblyFace):
    """An asynchronous iterator over payloads, made by `reassemble`. One task at a time."""

    def __init__(self, driver: AsyncDriver, engine: ConsumerEngine) -> None:
        self._driver = driver
        self._engine = engine

    async def save(self) -> None:
        """Save that everything that was delivered has been dealt with."""
        await self._driver.run(self._engine.save(at_end=True))

    async def next(self, seconds: float | None) -> Item | None:
        """The next payload. None: at the end, and where none came for that many seconds.

        Cancelled, it can be called again, and nothing is lost.
        """
        return await self._driver.run(self._engine.next(seconds))

    def __aiter__(self) -> Reassembly:
        return self

    async def __anext__(self) -> Item:
        item = await self.next(None)
        if item is None:
            raise StopAsyncIteration
        return item


@asynccontextmanager
async def reassembling(
    options: ReassemblyOptions, driver_to: DriverTo
) -> AsyncIterator[Reassembly]:
    """A reassembly whose sources are read while the block runs, and which is saved at its end."""
    driver, _ = driver_to(None, 0.0, 0)
    resume = None if options.store is None else await driver.run(_load(options))
    engine = ConsumerEngine(driver, options, resume)
    arrivals = Arrivals(driver, len(engine.sources))
    engine.receive_from(arrivals.receive)
    readers = readers_of(engine.sources, engine.merge, engine.reading, arrivals, driver_to)
    failure: BaseException | None = None
    async with driver.background(*(partial(each.run, steps) for each, steps in readers)):
        try:
            payloads = Reassembly(driver, engine)
            yield payloads
            await payloads.save()
        except BaseException as error:  # noqa: BLE001 - raised below, in no group of exceptions
            failure = error
    if failure is not None:
        raise failure


def _load(options: ReassemblyOptions) -> Steps[ReassemblyProgress | None]:
    assert options.store is not None
    progress: ReassemblyProgress | None = yield InThread(options.store.load)
    return progress
