"""What clients of large entries cost others: memory while they read nothing, and time."""

from __future__ import annotations

import random
import threading
import tracemalloc
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import pytest
import trio

from datastreamer.http.answers import ranges
from datastreamer.storage.stream import DataStream
from tests.http.asking import ask
from tests.http.serving import Web, serving
from tests.network.fixtures import append, until

LARGE = 900_000
AS_JSON = 2 * LARGE
CLIENTS = 6
# More than there are threads for all purposes.
COMPRESSING = 45


@asynccontextmanager
async def stalled(web: Web, path: str, received: int) -> AsyncIterator[None]:
    """Clients that have each `received` this number of bytes, and read nothing more."""

    async def begin(client: trio.SocketStream) -> None:
        lines = (f"GET {path} HTTP/1.1", "Host: localhost", "Accept-Encoding: gzip", "", "")
        await client.send_all("\r\n".join(lines).encode())
        left = received
        while left > 0:
            left -= len(await client.receive_some(65536))

    counts = web.server.counts.http
    assert counts is not None
    async with AsyncExitStack() as stack, trio.open_nursery() as nursery:
        for _ in range(CLIENTS):
            made = trio.socket.socket()
            made.setsockopt(trio.socket.SOL_SOCKET, trio.socket.SO_RCVBUF, 4096)
            await made.connect(("127.0.0.1", web.port))
            client = await stack.enter_async_context(trio.SocketStream(made))
            nursery.start_soon(begin, client)
        await until(lambda: not nursery.child_tasks)
        sent, steady = -1, 0
        while steady < 10:
            steady = steady + 1 if counts.bytes_sent == sent else 0
            sent = counts.bytes_sent
            await trio.sleep(0.02)
        yield


@pytest.mark.parametrize(
    ("target", "received", "most"),
    [
        ("/v1/entries?format=ndjson", 1000, AS_JSON),
        ("/v1/entries?format=arrow", LARGE + 1000, LARGE),
        ("/v1/entries/0", 1000, AS_JSON),
        ("/v1/entries?from=0&to=0", 1000, AS_JSON),
        ("/v1/follow?from=0", AS_JSON + 1000, AS_JSON),
    ],
)
async def test_a_client_that_reads_nothing_costs_one_entry(
    stream: DataStream, target: str, received: int, most: int
) -> None:
    chance = random.Random(1)
    append(stream, *[(1, chance.randbytes(LARGE)) for _ in range(12)])
    async with serving(stream) as web:
        if "format" in target:
            await ask(web.port, f"{target}&to=0")  # which imports what it needs
        tracemalloc.start()
        try:
            async with stalled(web, target, received):
                held, _ = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
    assert held / CLIENTS < most + 400_000  # a connection, a compressor


class Compressor:
    """One that compresses nothing until it may."""

    running = 0
    most = 0
    lock = threading.Lock()
    may = threading.Event()

    def compress(self, data: bytes) -> bytes:
        with self.lock:
            Compressor.running += 1
            Compressor.most = max(self.most, self.running)
        if len(data) > 100_000:
            assert self.may.wait(30)
        with self.lock:
            Compressor.running -= 1
        return data

    def flush(self) -> bytes:
        return b""


async def test_many_compressions_do_not_delay_others(
    stream: DataStream, monkeypatch: pytest.MonkeyPatch
) -> None:
    append(stream, *[(1, bytes(100_000))] * 3, *[(2, b"small" * 100)] * 3)
    monkeypatch.setattr(ranges, "compressor_of", lambda encoding: Compressor())
    gzip = "Accept-Encoding: gzip"
    answers: list[int] = []
    async with serving(stream) as web, trio.open_nursery() as nursery:

        async def large() -> None:
            code, _, body = await ask(web.port, "/v1/entries?to=2", gzip)
            answers.append(code)
            assert len(body) > 600_000

        for _ in range(COMPRESSING):
            nursery.start_soon(large)
        try:
            await until(lambda: len(web.server.other_readers) == COMPRESSING)
            for headers in ([], [gzip]):
                code, _, body = await ask(web.port, "/v1/entries?from=3&to=5", *headers)
                assert (code, len(body) > 3000) == (200, True)
            assert answers == []
        finally:
            Compressor.may.set()
    assert answers == [200] * COMPRESSING
    assert Compressor.most <= 3  # a small one is compressed in the event loop
