"""Batches as both clients ask for them: old servers, new ones, and lost connections."""

from __future__ import annotations

import functools
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio

from datastreamer._codec import Entry
from datastreamer.client.async_client import Client
from datastreamer.client.blocking_client import BlockingClient
from datastreamer.client.trio_driver import connect
from datastreamer.errors import (
    BadFromEntry,
    BadToBookmark,
    ConnectFailed,
    HistoryChanged,
    NotSupported,
    UnknownEntry,
)
from datastreamer.protocol.commands import (
    BatchQuery,
    CapabilitiesQuery,
    EntryQuery,
    HeaderQuery,
    RangeQuery,
)
from datastreamer.protocol.retry import Backoff
from datastreamer.storage.stream import DataStream
from tests.network.drivers import client_of_kind, kinds
from tests.network.fixtures import append, over_loopback, until
from tests.network.stub import Stub, StubServer, handler, key, sample

HUNDRED = sample(100)
SOON = Backoff(0, 0)
CLOSING = ["closed", "fatal"]
Call = Callable[..., Any]


class Trio:
    """Either client behind the same face: calls are awaited."""

    def __init__(self, client: Client | BlockingClient) -> None:
        self.client = client

    def __getattr__(self, name: str) -> Callable[..., Awaitable[Any]]:
        method = getattr(self.client, name)

        async def call(*what: Any, **named: Any) -> Any:
            if isinstance(self.client, Client):
                return await method(*what, **named)
            return await trio.to_thread.run_sync(functools.partial(method, *what, **named))

        return call

    async def listed(self, name: str, *what: Any, **named: Any) -> list[Entry]:
        items = getattr(self.client, name)(*what, **named)
        if isinstance(self.client, Client):
            return [entry async for batch in items for entry in batch]
        return await trio.to_thread.run_sync(lambda: [e for batch in items for e in batch])


@asynccontextmanager
async def opened(kind: str, port: int, **options: Any) -> AsyncIterator[Trio]:
    if kind == "trio":
        async with connect("127.0.0.1", port, **options) as client:
            yield Trio(client)
    else:
        made = client_of_kind(kind, "127.0.0.1", port, **options)
        client = await trio.to_thread.run_sync(made.__enter__)
        try:
            yield Trio(client)
        finally:
            await trio.to_thread.run_sync(made.__exit__, None, None, None)


def asked(stubs: Sequence[Stub], what: type) -> int:
    return sum(isinstance(event, what) for stub in stubs for event in stub.seen)


@kinds
async def test_the_calls(kind: str) -> None:
    stub = Stub(HUNDRED)
    with StubServer(handler(stub)) as server:
        async with opened(kind, server.port) as client:
            assert client.client.total_entries is None
            assert (await client.capabilities()).stream_id == b"s" * 16
            assert client.client.total_entries == 100
            for call in (
                client.batch_read,
                partial(client.batch_read, confirmed=False),
                partial(client.batch_read, fallback=False),
                partial(client.batch_read, confirmed=False, fallback=False),
            ):
                assert list(await call(10, 5)) == HUNDRED[10:15]
                assert list(await call(10, 0, 100)) == HUNDRED[10:13]
                assert list(await call(100)) == []
            for confirmed in (client.batch_read, partial(client.batch_read, fallback=False)):
                with pytest.raises(UnknownEntry):
                    await confirmed(101)
            for unconfirmed in (
                partial(client.batch_read, confirmed=False),
                partial(client.batch_read, confirmed=False, fallback=False),
            ):
                with pytest.raises(BadFromEntry):
                    await unconfirmed(101)
            assert await client.listed("read_batches", max_count=7) == HUNDRED
            assert await client.listed("read_batches", from_entry=3, stop=9) == HUNDRED[3:9]
            types = await client.listed("read_batches", types=[0xB0])
            assert types == [entry for entry in HUNDRED if entry.is_bookmark]
            between = await client.listed("between_bookmarks", key(10), key(40))
            assert between == HUNDRED[10:41]
            with pytest.raises(BadToBookmark):
                await client.listed("between_bookmarks", key(40), key(10))
            assert await client.entry(1) == HUNDRED[1]
    assert asked([stub], CapabilitiesQuery) == 1


@kinds
async def test_an_old_server_is_asked_once(kind: str) -> None:
    stub = Stub(HUNDRED, extensions="refused")
    with StubServer(handler(stub)) as server:
        async with opened(kind, server.port) as client:
            for _ in range(3):
                with pytest.raises(NotSupported, match="does not support batches"):
                    await client.batch_read(0, fallback=False)
                assert list(await client.batch_read(90)) == HUNDRED[90:]
                assert await client.listed("read_batches", from_entry=95) == HUNDRED[95:]
        assert server.accepted == 1
    assert asked([stub], CapabilitiesQuery) == 1
    assert asked([stub], BatchQuery) == 0


@kinds
@pytest.mark.parametrize("resume", [True, False])
@pytest.mark.parametrize("extensions", CLOSING)
async def test_a_server_that_closes_on_the_question_is_met_by_a_reconnect(
    kind: str, resume: bool, extensions: str
) -> None:
    stubs = [Stub(HUNDRED, extensions=extensions) for _ in range(3)]
    with StubServer(*map(handler, stubs)) as server:
        async with opened(kind, server.port, resume=resume) as client:
            assert list(await client.batch_read(90)) == HUNDRED[90:]
            with pytest.raises(NotSupported):
                await client.batch_read(0, fallback=False)
            assert list(await client.batch_read(0, 5)) == HUNDRED[:5]
            assert await client.listed("read_batches", from_entry=95) == HUNDRED[95:]
        assert server.accepted == 2
    assert asked(stubs, CapabilitiesQuery) == 1


@kinds
@pytest.mark.parametrize("extensions", CLOSING)
async def test_a_connection_that_was_good_before_may_have_been_stale(
    kind: str, extensions: str
) -> None:
    """What was taken for an answer to the question was a restart, or it was not."""
    stubs = [Stub(HUNDRED, extensions=extensions) for _ in range(3)]
    with StubServer(*map(handler, stubs)) as server:
        async with opened(kind, server.port) as client:
            await client.header()
            assert list(await client.batch_read(90)) == HUNDRED[90:]
        assert server.accepted == (3 if extensions == "closed" else 2)

    stubs = [Stub(HUNDRED, extensions="closed"), Stub(HUNDRED)]
    with StubServer(*map(handler, stubs)) as server:
        async with opened(kind, server.port) as client:
            await client.header()
            assert list(await client.batch_read(90)) == HUNDRED[90:]
        assert server.accepted == 2


@kinds
@pytest.mark.parametrize("extensions", CLOSING)
async def test_an_iteration_meets_such_a_server_too(kind: str, extensions: str) -> None:
    stubs = [Stub(HUNDRED, extensions=extensions) for _ in range(3)]
    with StubServer(*map(handler, stubs)) as server:
        async with opened(kind, server.port, resume=False) as client:
            assert await client.listed("read_batches", max_count=30) == HUNDRED
        assert server.accepted == 2


@kinds
async def test_a_lost_server_is_not_mistaken_for_an_old_one(kind: str) -> None:
    with StubServer(handler(Stub(HUNDRED, extensions="closed"))) as server:
        async with opened(kind, server.port, resume=False) as client:
            server.refuse()
            with pytest.raises(ConnectFailed):
                await client.batch_read(0)
            with StubServer(handler(Stub(HUNDRED)), port=server.port):
                assert list(await client.batch_read(90)) == HUNDRED[90:]


@kinds
async def test_single_reads_can_be_forced(kind: str) -> None:
    stub = Stub(HUNDRED)
    with StubServer(handler(stub)) as server:
        async with opened(kind, server.port, batch_reads=False) as client:
            assert list(await client.batch_read(90)) == HUNDRED[90:]
            assert await client.listed("read_batches", from_entry=95) == HUNDRED[95:]
            with pytest.raises(NotSupported):
                await client.batch_read(0, fallback=False)
    assert asked([stub], CapabilitiesQuery) == asked([stub], BatchQuery) == 0
    assert asked([stub], EntryQuery) > 0


@kinds
async def test_a_server_without_ranges_does_not_cost_the_connection(kind: str) -> None:
    stubs = [Stub(HUNDRED, extensions="refused")]
    with StubServer(*map(handler, stubs)) as server:
        async with opened(kind, server.port) as client:
            with pytest.raises(NotSupported, match="ranges between bookmarks"):
                await client.listed("between_bookmarks", key(10), key(40))
            assert await client.entry(3) == HUNDRED[3]
        assert server.accepted == 1
    assert asked(stubs, RangeQuery) == 0


@kinds
@pytest.mark.parametrize("size", [0, 36, 40, 700, 2_000, 4_321])
async def test_a_connection_that_breaks_is_replaced_and_no_entry_lost(kind: str, size: int) -> None:
    """The connection breaks after this number of bytes."""

    def breaks(connection: socket.socket) -> None:
        left = 48 + 24 + size
        stub = Stub(HUNDRED)
        while left > 0:
            sent = stub.receive(connection.recv(65536))[:left]
            connection.sendall(sent)
            left -= len(sent)

    stubs = [Stub(HUNDRED)]
    with StubServer(breaks, breaks, breaks, *map(handler, stubs)) as server:
        async with opened(kind, server.port, backoff=SOON) as client:
            assert await client.listed("read_batches", max_count=7) == HUNDRED


@kinds
async def test_another_history_is_seen_where_the_connection_is_replaced(kind: str) -> None:
    def breaks(connection: socket.socket) -> None:
        stub = Stub(HUNDRED)
        for _ in range(3):
            connection.sendall(stub.receive(connection.recv(65536)))

    others = [*HUNDRED[:10], *(Entry(n, 9, b"another") for n in range(10, 100))]
    with StubServer(breaks, handler(Stub(others))) as server:
        async with opened(kind, server.port, backoff=SOON) as client:
            with pytest.raises(HistoryChanged):
                await client.listed("read_batches", max_count=20, requests=1)


@kinds
async def test_the_long_poll_ends_with_a_commit_or_with_time(kind: str, stream: DataStream) -> None:
    append(stream, (1, b"one"))
    got: list[Entry] = []
    async with over_loopback(stream) as rig, opened(kind, rig.address[1], timeout=0.1) as client:
        assert list(await client.batch_read(1, wait=0.3)) == []

        async def poll() -> None:
            got.extend(await client.batch_read(1, wait=30))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(poll)
            await until(lambda: rig.server.broadcast.watchers)
            append(stream, (2, b"two"))
        assert got == [Entry(1, 2, b"two")]
        assert client.client.total_entries == 2


@kinds
async def test_with_a_real_server(kind: str, stream: DataStream) -> None:
    for start in range(0, 6_000, 500):
        append(stream, *[(n % 5, bytes([n % 256]) * (n % 900)) for n in range(start, start + 500)])
    due = list(stream.entries())
    async with over_loopback(stream) as rig, opened(kind, rig.address[1]) as client:
        for limits in (
            {},
            {"max_count": 100},
            {"max_count": 500, "requests": 5},
            {"max_count": 3_000, "max_bytes": 50_000},
            {"max_bytes": 200_000},
            {"max_bytes": 1 << 30},
        ):
            assert await client.listed("read_batches", **limits) == due
        with_rest = await client.listed("read_batches", from_entry=5_990, max_count=7)
        assert with_rest == due[5_990:]
        assert await client.listed("read_batches", from_entry=6_000) == []
        assert list(await client.batch_read(0, 1)) == due[:1]


async def test_an_iteration_that_waits_can_be_stopped(stream: DataStream) -> None:
    append(stream, (1, b"one"))
    async with over_loopback(stream) as rig, connect(*rig.address) as client:
        got: list[Entry] = []

        async def gather() -> None:
            async for batch in client.read_batches(stop=10):
                got.extend(batch)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(gather)
            await until(lambda: rig.server.broadcast.watchers)
            append(stream, (2, b"two"))
            await until(lambda: len(got) >= 2)
            await client.stop()
        assert [entry.data for entry in got] == [b"one", b"two"]
        assert (await client.header()).total_entries == 2


async def test_a_cancelled_batch_costs_the_connection_alone(path: Path) -> None:
    with DataStream.create(path, sync="os", index="memory") as stream:
        append(stream, (1, b"one"))
        async with over_loopback(stream) as rig, connect(*rig.address) as client:
            with trio.move_on_after(0.05) as scope:
                await client.batch_read(1, wait=20)
            assert scope.cancelled_caught
            assert list(await client.batch_read(0)) == list(stream.entries())


def test_the_check_costs_no_request() -> None:
    """The header goes with the question for capabilities, so that nothing is asked twice."""
    stub = Stub(HUNDRED)
    with StubServer(handler(stub)) as server, BlockingClient("127.0.0.1", server.port) as client:
        client.batch_read(0, 3)
        client.batch_read(3, 3)
    kinds_seen = [type(event) for event in stub.seen[:4]]
    assert kinds_seen == [CapabilitiesQuery, HeaderQuery, BatchQuery, BatchQuery]
