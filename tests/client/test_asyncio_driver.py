"""The driver for asyncio: no cancellation is lost, whatever it meets."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from typing import Any

import pytest

from datastreamer.client.asyncio_driver import AsyncioDriver
from datastreamer.client.effects import InThread, Now, Race, Sleep, Steps, Wait
from datastreamer.errors import ConnectionLost

FOREVER = 1000.0


def after_turns(turns: int, task: asyncio.Task[Any]) -> None:
    """Cancel `task` after that many turns of the event loop."""
    if turns:
        asyncio.get_running_loop().call_soon(after_turns, turns - 1, task)
    else:
        task.cancel()


def sleeping() -> Steps[None]:
    yield Sleep((yield Now()) + FOREVER)


def run(main: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(main, 20))


def test_a_race_whose_loser_does_not_end_at_once() -> None:
    over = threading.Event()

    def winner() -> Steps[None]:
        return
        yield

    def loser() -> Steps[None]:
        yield InThread(over.wait, (20,))

    def steps() -> Steps[None]:
        yield Race((winner(), loser()))
        yield from sleeping()

    async def main() -> None:
        task = asyncio.ensure_future(AsyncioDriver().run(steps()))
        for _ in range(2):
            await asyncio.sleep(0.02)
            task.cancel()
        over.set()
        with pytest.raises(asyncio.CancelledError):
            await task

    run(main())


def test_a_race_in_which_the_cancellation_makes_a_racer_fail() -> None:
    def failing() -> Steps[None]:
        try:
            yield from sleeping()
        finally:
            raise ConnectionLost("closed")

    async def main() -> None:
        task = asyncio.ensure_future(AsyncioDriver().run(racing()))
        await asyncio.sleep(0.02)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    def racing() -> Steps[None]:
        yield Race((failing(), sleeping()))

    run(main())


@pytest.mark.parametrize("turns", range(6))
def test_a_wait_that_times_out_as_it_is_cancelled(turns: int) -> None:
    def steps(driver: AsyncioDriver) -> Steps[None]:
        try:
            yield Wait(driver.signal(), 0.02)
        except TimeoutError:
            yield from sleeping()

    async def main() -> None:
        driver = AsyncioDriver()
        task = asyncio.ensure_future(driver.run(steps(driver)))
        await asyncio.sleep(0)
        asyncio.get_running_loop().call_later(0.02, after_turns, turns, task)
        with pytest.raises(asyncio.CancelledError):
            await task

    run(main())


@pytest.mark.parametrize("turns", range(4))
def test_a_block_whose_background_ends_as_it_is_cancelled(turns: int) -> None:
    async def main() -> None:
        driver = AsyncioDriver()

        async def block() -> None:
            async with driver.background(sleeping()):
                after_turns(turns, task)
            await asyncio.sleep(FOREVER)

        task = asyncio.ensure_future(block())
        with pytest.raises(asyncio.CancelledError):
            await task

    run(main())
