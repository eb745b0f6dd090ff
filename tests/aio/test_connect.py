"""What only the asyncio client can show: cancellation, TLS and Unix sockets in its own loop.

Its behaviour as a client is tested with that of all the others, in `tests/client`.
"""

from __future__ import annotations

import asyncio
import functools
import pydoc
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

import datastreamer
from datastreamer import aio
from datastreamer._codec import Entry
from datastreamer.errors import ConnectFailed, ConnectionLost, StreamClosed, TLSFailed, UsageError
from datastreamer.protocol.commands import EntryQuery, HeaderQuery, Start
from datastreamer.protocol.retry import Backoff
from datastreamer.service.embedded import StreamServer
from datastreamer.transport.asyncio_channel import AsyncioChannel, dial_asyncio
from datastreamer.transport.endpoint import endpoint_of
from datastreamer.transport.tls import ServerTLS
from tests.network.proxy import NONE, End, Fault, FaultyServer
from tests.network.secure import HOST, Authority
from tests.network.stub import Stub, StubServer, handler, sample

FIFTY = sample(50)


def asynchronous(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Run a test in an asyncio loop, in which each warning is an error."""

    @functools.wraps(test)
    def run(**fixtures: Any) -> None:
        asyncio.run(test(**fixtures), debug=True)

    return run


@asynccontextmanager
async def client_of(*stubs: Stub, **options: Any) -> AsyncIterator[aio.Client]:
    server = StubServer(*map(handler, stubs))
    with server:
        async with aio.connect("127.0.0.1", server.port, **options) as client:
            yield client


async def until_waiting() -> None:
    for _ in range(20):
        await asyncio.sleep(0.001)


def test_trio_is_not_loaded() -> None:
    code = "import sys, datastreamer.aio; sys.exit('trio' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


@asynchronous
async def test_a_cancelled_wait_loses_nothing(tmp_path: Path) -> None:
    with StreamServer(tmp_path / "s.bin", host="127.0.0.1", port=0, sync="os") as server:
        async with aio.connect(*server.addresses[0]) as client, client.entries() as entries:
            seen: list[Entry] = []

            async def take(count: int) -> None:
                while len(seen) < count:
                    seen.append(await entries.__anext__())

            for first in range(0, 400, 4):
                # Some cancellations hit the wait, some the moment in which entries arrive.
                task = asyncio.ensure_future(take(first + 4))
                await asyncio.sleep(0)
                with server.stream.atomic_op() as op:
                    op.add_entries(1, [b"data"] * 4)
                for _ in range(first % 7):
                    await asyncio.sleep(0.0001)
                task.cancel()
                await asyncio.wait([task])
                await asyncio.wait_for(take(first + 4), 20)
            assert [entry.number for entry in seen] == list(range(400))


@asynchronous
async def test_a_cancelled_query_costs_the_connection_at_most() -> None:
    async with client_of(Stub(FIFTY, deaf=(EntryQuery, HeaderQuery)), Stub(FIFTY)) as client:
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(client.entry(3), 0.05)
        assert await client.entry(3) == FIFTY[3]


@asynchronous
async def test_cancelled_while_it_waits_for_a_lost_server() -> None:
    plan = [(lambda: Stub(FIFTY[:20]), Fault(600, End.CLOSE))]
    with FaultyServer(*plan) as server:
        far = Backoff(600, 600)
        async with aio.connect("127.0.0.1", server.port, backoff=far) as client:
            seen: list[Entry] = []

            async def read() -> None:
                async for entry in client.entries():
                    seen.append(entry)  # noqa: PERF401

            with pytest.raises(asyncio.TimeoutError):
                await asyncio.wait_for(read(), 0.3)
            assert seen == FIFTY[: len(seen)]


@asynchronous
async def test_another_task_stops_an_iteration() -> None:
    async with client_of(Stub(FIFTY)) as client:
        seen: list[Entry] = []
        task = asyncio.ensure_future(client.run(seen.append))
        while len(seen) < 50:
            await asyncio.sleep(0.001)
        with pytest.raises(UsageError, match="in use"):
            await client.header()
        await client.stop()
        await asyncio.wait_for(task, 20)
        assert await client.entry(6) == FIFTY[6]


@pytest.mark.parametrize("end", ["stop", "aclose"])
@asynchronous
async def test_another_task_ends_the_wait_for_a_lost_server(end: str) -> None:
    plan = [(lambda: Stub(FIFTY), Fault(1200, End.CLOSE))]
    with FaultyServer(*plan) as server:
        far = Backoff(600, 600)
        async with aio.connect("127.0.0.1", server.port, backoff=far) as client:
            task = asyncio.ensure_future(client.run(lambda entry: None))
            while client._engine.channel is not None:
                await asyncio.sleep(0.001)
            await until_waiting()
            await getattr(client, end)()
            if end == "stop":
                await asyncio.wait_for(task, 20)
            else:
                with pytest.raises(StreamClosed):
                    await asyncio.wait_for(task, 20)


@asynchronous
async def test_closed_while_another_task_waits() -> None:
    async with client_of(Stub(FIFTY)) as client:
        task = asyncio.ensure_future(client.run(lambda entry: None))
        await until_waiting()
        await client.aclose()
        with pytest.raises(StreamClosed):
            await asyncio.wait_for(task, 20)


@asynchronous
async def test_run_awaits_what_its_callback_returns() -> None:
    async with client_of(Stub(FIFTY)) as client:
        seen: list[Entry] = []

        async def later(entry: Entry) -> None:
            await asyncio.sleep(0)
            seen.append(entry)

        await client.run(later, stop=5)
        assert seen == FIFTY[:5]


@asynchronous
async def test_a_silent_server_is_asked_on_a_second_connection() -> None:
    plan = [(lambda: Stub(FIFTY), Fault(300, End.HALF_OPEN))]
    plan += [(lambda: Stub(FIFTY), NONE)] * 9
    with FaultyServer(*plan) as server:
        async with aio.connect("127.0.0.1", server.port, heartbeat=0.02) as client:
            assert [entry async for entry in client.entries(stop=50)] == FIFTY


@asynchronous
async def test_no_answer_in_time() -> None:
    with (
        StubServer(handler(Stub(FIFTY, deaf=(Start,)))) as server,
        pytest.raises(ConnectionLost, match="no answer"),
    ):
        async with aio.connect("127.0.0.1", server.port, timeout=0.05, resume=False) as client:
            await client.entries().__anext__()


@asynchronous
async def test_tls(tmp_path: Path, authority: Authority) -> None:
    tls = ServerTLS(authority.issue("asyncio"))
    path = tmp_path / "stream.bin"
    with StreamServer(path, host=HOST, port=0, tls=tls, in_process=True) as server:
        with server.stream.atomic_op() as op:
            op.add_entries(1, [b"much" * 10_000] * 200)
        async with aio.connect(HOST, server.port, tls=authority.context()) as client:
            got = [entry async for entry in client.entries(stop=200)]
            assert [len(entry.data) for entry in got] == [40_000] * 200
            async with client.entries(from_entry=200) as entries:
                with pytest.raises(asyncio.TimeoutError):
                    await asyncio.wait_for(entries.__anext__(), 0.05)
                with server.stream.atomic_op() as op:
                    op.add_entry(1, b"later")
                assert (await asyncio.wait_for(entries.__anext__(), 20)).data == b"later"
        with pytest.raises(TLSFailed):
            async with aio.connect(HOST, server.port, tls=True, tls_server_name=HOST):
                pass


@contextmanager
def endless(context: ssl.SSLContext | None) -> Iterator[int]:
    """The port of a server that sends bytes for as long as a connection lasts."""
    with socket.create_server((HOST, 0)) as listener:

        def serve() -> None:
            connection, _ = listener.accept()
            if context is not None:
                connection = context.wrap_socket(connection, server_side=True)
            with connection, suppress(OSError):
                while True:
                    connection.sendall(bytes(1 << 20))

        thread = threading.Thread(target=serve)
        thread.start()
        yield listener.getsockname()[1]
        thread.join(20)


@pytest.mark.parametrize("secure", [False, True])
def test_a_fast_stream_does_not_hold_up_other_tasks(authority: Authority, secure: bool) -> None:
    context, client = None, None
    if secure:
        context, client = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), authority.context()
        context.load_cert_chain(*authority.issue("endless"))

    async def receive(channel: AsyncioChannel) -> None:
        room = memoryview(bytearray(1))
        for _ in range(600):
            await channel.receive_into(room)
            time.sleep(0.001)

    async def main(port: int) -> int:
        channel = await dial_asyncio(endpoint_of(HOST, port, client or False))
        ticks = 0
        receiving = asyncio.ensure_future(asyncio.wait_for(receive(channel), 0.2))
        while not receiving.done():
            await asyncio.sleep(0)
            ticks += 1
        channel.close(farewell=False)
        with pytest.raises(asyncio.TimeoutError):
            await receiving
        return ticks

    with endless(context) as port:
        assert asyncio.run(main(port)) > 20


@asynchronous
async def test_a_unix_socket(tmp_path: Path) -> None:
    path = tmp_path / "s.sock"
    with StreamServer(tmp_path / "s.bin", host=None, port=None, unix=path) as server:
        with server.stream.atomic_op() as op:
            op.add_entries(1, [b"data"] * 10)
        async with aio.connect(f"unix:{path}") as client:
            assert (await client.header()).total_entries == 10
    with pytest.raises(ConnectFailed):
        async with aio.connect(f"unix:{path}"):
            pass


def test_help_shows_the_functions() -> None:
    for function in (aio.connect, aio.connect_publisher, aio.reassemble, datastreamer.connect):
        assert pydoc.locate(f"{function.__module__}.{function.__qualname__}") is function
