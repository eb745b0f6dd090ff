"""A cancelled block of a publisher, under both event loops."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio

from datastreamer import aio, connect_publisher
from tests.publisher.test_every_publisher import QUICK, TOKEN, served, token_file

__all__ = ["token_file"]


@pytest.mark.parametrize("kind", ["trio", "asyncio"])
def test_a_cancelled_block_ends_at_once(kind: str, path: Path, token_file: Path) -> None:
    """While it waits for an operation that a lost server has not acknowledged."""

    async def publish(lose: Callable[[], None], end: Callable[[], None], connect: Any) -> None:
        async with connect("127.0.0.1", server.port, token=TOKEN, backoff=QUICK) as publisher:
            lose()
            async with publisher.atomic_op() as op:
                op.add_entry(3, b"never")
                end()
        raise AssertionError("the block was not cancelled")

    async def in_trio() -> bool:
        with trio.move_on_after(20), trio.CancelScope() as scope:
            scope_ends = partial(setattr, scope, "deadline", trio.current_time() + 0.1)
            await publish(server.close, scope_ends, connect_publisher)
        return scope.cancelled_caught

    async def in_asyncio() -> bool:
        def end() -> None:
            asyncio.get_running_loop().call_later(0.1, task.cancel)

        task = asyncio.ensure_future(publish(server.close, end, aio.connect_publisher))
        await asyncio.wait([task], timeout=20)
        return task.cancelled()

    with served(path, token_file) as server:
        assert trio.run(in_trio) if kind == "trio" else asyncio.run(in_asyncio())
