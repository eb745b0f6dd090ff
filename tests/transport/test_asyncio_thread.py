"""The event loop in a thread: what a close means for calls of other threads."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from datastreamer.errors import StreamClosed
from datastreamer.transport.asyncio_thread import AsyncioThread


def test_a_close_waits_for_calls_that_have_begun_and_accepts_no_others() -> None:
    thread = AsyncioThread("example")
    begun, ending = threading.Event(), asyncio.Event()

    async def serve() -> None:
        try:
            await asyncio.sleep(1000)
        finally:
            # As long as the call below waits, the loop runs.
            ending.set()

    async def work() -> str:
        begun.set()
        await ending.wait()
        await asyncio.sleep(0.01)
        return "done"

    thread.serve(serve())
    with ThreadPoolExecutor(4) as pool:
        working = pool.submit(thread.run, work())
        assert begun.wait(20)
        closing = [pool.submit(thread.close) for _ in range(3)]
        assert [each.result(20) for each in closing] == [None] * 3
        assert working.result(20) == "done"
    with pytest.raises(StreamClosed, match="the example is closed"):
        thread.call(lambda: None)
    with pytest.raises(StreamClosed):
        thread.call_soon(lambda: None)
    thread.close()
