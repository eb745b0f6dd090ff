"""The Trio client on memory streams: its server is a stub for each connection.

Owns what its tests share; how a stub behaves is `stub.py`'s.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import trio
import trio.testing

from datastreamer._codec import Entry
from datastreamer.client.async_client import Client
from datastreamer.client.trio_driver import Dial, Dialled, TrioDriver
from datastreamer.transport.trio_channel import channel_over
from tests.network.stub import Stub, serve_stream


def client_over(stream: trio.abc.Stream, *, redial: Dial | None = None, **options: Any) -> Client:
    """A client that owns `stream`, its first connection; `redial` makes another."""
    driver = TrioDriver(*([] if redial is None else [Dialled("stub:1", redial)]))
    client = Client(lambda *_: driver, "stub", 1, **options)
    client._engine.channel = channel_over(stream, "stub:1")
    return client


class Wire:
    """A client on memory streams; each new connection is served by the next of `stubs`."""

    def __init__(self, nursery: trio.Nursery, stubs: tuple[Stub, ...], size: int) -> None:
        self.nursery = nursery
        self.stubs = list(stubs)
        self.size = size
        self.connections = 0
        self.server_end: trio.testing.MemoryStapled  # type: ignore[name-defined]

    async def dial(self) -> trio.abc.Stream:
        ours, theirs = trio.testing.memory_stream_pair()
        self.server_end = theirs
        self.nursery.start_soon(serve_stream, self.stubs[self.connections], theirs, self.size)
        self.connections += 1
        return ours


@asynccontextmanager
async def client_of(
    *stubs: Stub, redial: bool = False, size: int = 65536, timeout: float = 10
) -> AsyncIterator[tuple[Client, Wire]]:
    async with trio.open_nursery() as nursery:
        wire = Wire(nursery, stubs, size)
        client = client_over(
            await wire.dial(),
            redial=wire.dial if redial else None,
            timeout=timeout,
            resume=False,
        )
        yield client, wire
        await client.aclose()
        nursery.cancel_scope.cancel()


async def listed(items: Any) -> list[Entry]:
    return [item async for item in items]


async def gather(items: Any, seen: list[Entry]) -> None:
    """As `listed`, keeping what came before an error."""
    async for item in items:
        seen.append(item)  # noqa: PERF401


def commands(stub: Stub) -> list[object]:
    return [event for event in stub.seen if not str(event).startswith("End")]
