"""What tests of relays need: streams, servers that come and go, and a relay of them."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing

from datastreamer.client.trio_driver import connect
from datastreamer.client.upstream import Upstream
from datastreamer.protocol.retry import Backoff
from datastreamer.relay import upstreams
from datastreamer.relay.relay import Relay
from datastreamer.relay.upstreams import Download
from datastreamer.server.server import Server
from datastreamer.storage.disk.file_ops import Disk
from datastreamer.storage.stream import DataStream
from datastreamer.transport.listeners import open_listeners
from tests.network.fixtures import PATIENCE

QUICK = Backoff(first=0.001, most=0.02)


def fill(stream: DataStream, count: int, *, salt: bytes = b"", size: int = 40) -> None:
    """`count` entries, every tenth a bookmark; `salt` makes another history."""
    total = stream.total_entries
    with stream.atomic_op() as op:
        for number in range(total, total + count):
            if number % 10 == 0:
                op.add_bookmark(number.to_bytes(4, "big"))
            else:
                op.add_entry(1 + number % 3, (salt + number.to_bytes(8, "big")).ljust(size))


def contents(stream: DataStream) -> list[tuple[int, int, bytes]]:
    return [
        (entry.number, entry.type, entry.data) for batch in stream.batches(0) for entry in batch
    ]


def packed(stream: DataStream) -> bytes:
    """All entries as they are in the file: quick to compare, again and again."""
    return b"".join(batch.packed() for batch in stream.batches(0))


def new(path: Path, **options: Any) -> DataStream:
    return DataStream.create(
        path, sync="os", index="memory", **{"version": 2, "system_id": 137, **options}
    )


class Running:
    """A server that can be stopped, and started again on the same port."""

    def __init__(self, stream: DataStream, nursery: trio.Nursery) -> None:
        self.stream = stream
        self.port = 0
        self.server: Server | None = None
        self._nursery = nursery
        self._scope = trio.CancelScope()
        self._ended = trio.Event()

    async def start(self) -> None:
        self._scope, self._ended = trio.CancelScope(), trio.Event()
        self.port = await self._nursery.start(self._run)

    async def _run(self, task_status: trio.TaskStatus[int]) -> None:
        with self._scope:
            async with trio.open_nursery() as nursery:
                server = self.server = Server(self.stream)
                [(_, port)] = await nursery.start(
                    server.run, open_listeners("127.0.0.1", self.port)
                )
                task_status.started(port)
        self._ended.set()

    async def stop(self) -> None:
        self._scope.cancel()
        await self._ended.wait()


@asynccontextmanager
async def nursery_for(patience: float = PATIENCE) -> AsyncIterator[trio.Nursery]:
    with trio.fail_after(patience):
        async with trio.open_nursery() as nursery:
            yield nursery
            nursery.cancel_scope.cancel()


async def serving(nursery: trio.Nursery, stream: DataStream) -> Running:
    server = Running(stream, nursery)
    await server.start()
    return server


class Rig:
    """A running relay."""

    def __init__(self, relay: Relay, port: int) -> None:
        self.relay = relay
        self.port = port
        self.scope = trio.CancelScope()
        self.ended = trio.Event()

    @property
    def stream(self) -> DataStream:
        assert self.relay.stream is not None
        return self.relay.stream

    @property
    def download(self) -> Download:
        return self.relay.download

    async def has(self, total: int) -> None:
        """Returns when a client of the relay has been sent `total` entries."""
        async with (
            connect("127.0.0.1", self.port) as client,
            client.batches(stop=total, on_rollback=lambda rollback: None) as batches,
        ):
            async for _ in batches:
                pass

    async def stop(self) -> None:
        self.scope.cancel()
        await self.ended.wait()


async def relaying(
    nursery: trio.Nursery,
    path: Path,
    *ports: int | Upstream,
    disk: Disk | None = None,
    **options: Any,
) -> Rig:
    upstreams = [port if isinstance(port, Upstream) else ("127.0.0.1", port) for port in ports]
    relay = Relay(
        upstreams,
        path,
        **{
            "host": "127.0.0.1",
            "port": 0,
            "sync": "os",
            "index": "memory",
            "backoff": QUICK,
            "look_seconds": 0.01,
            **options,
        },
    )
    relay._disk = disk
    rig = Rig(relay, 0)

    async def run(task_status: trio.TaskStatus[list[tuple[str, int]]]) -> None:
        with rig.scope:
            await relay.run(task_status=task_status)
        rig.ended.set()

    [(_, rig.port)] = await nursery.start(run)
    return rig


class Wire:
    """Between a relay and its upstream: connections that are cut after some bytes."""

    def __init__(self, port: int) -> None:
        self.upstream = port
        self.port = 0
        self.cuts: list[int] = []
        """For the connections that come next, how much of the upstream's they let through."""
        self._scopes: set[trio.CancelScope] = set()

    def cut(self) -> None:
        """End all connections that there are now."""
        for scope in self._scopes:
            scope.cancel()

    async def run(self, task_status: trio.TaskStatus[None]) -> None:
        async with trio.open_nursery() as nursery:
            [listener] = await nursery.start(
                functools.partial(trio.serve_tcp, self._pass, 0, host="127.0.0.1")
            )
            self.port = listener.socket.getsockname()[1]
            task_status.started()

    async def _pass(self, client: trio.SocketStream) -> None:
        left = self.cuts.pop(0) if self.cuts else 1 << 60
        with (
            contextlib.suppress(OSError, trio.BrokenResourceError),
            contextlib.ExitStack() as stack,
        ):
            server = await trio.open_tcp_stream("127.0.0.1", self.upstream)
            async with server, trio.open_nursery() as nursery:
                self._scopes.add(nursery.cancel_scope)
                stack.callback(self._scopes.discard, nursery.cancel_scope)

                async def there() -> None:
                    with contextlib.suppress(trio.BrokenResourceError):
                        async for data in client:
                            await server.send_all(data)
                    nursery.cancel_scope.cancel()

                nursery.start_soon(there)
                with contextlib.suppress(trio.BrokenResourceError):
                    async for data in server:
                        await client.send_all(data[:left])
                        left -= len(data)
                        if left <= 0:
                            break
                nursery.cancel_scope.cancel()


@contextmanager
def twin(path: Path, of: DataStream, count: int) -> Iterator[DataStream]:
    """Another stream with the first entries of this one."""
    with new(path) as made:
        with made.atomic_op() as op:
            for batch in of.batches(0, count):
                op.add_batch(batch)
        yield made


@pytest.fixture
def no_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """Relays do not ask for times: the question makes an upstream look at its pages, and so notice
    damage that a test has planted."""

    async def keep_no_times(*_: object) -> None:
        pass

    monkeypatch.setattr(upstreams, "keep_times", keep_no_times)
