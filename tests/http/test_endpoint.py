"""The HTTP port as such: requests that are no good, limits, floods."""

from __future__ import annotations

import itertools
import json
import socket
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest
import trio

from datastreamer.http.serving import serve_metrics
from datastreamer.metrics import exposition
from datastreamer.storage.stream import DataStream
from tests.cli.process import running
from tests.http.asking import answering, ask


async def nothing(*, limit: int) -> exposition.MetricsSnapshot:
    return {"time": 1.0, "samples": {}, "clients": []}


HOST = b"Host: localhost\r\nConnection: close\r\n"


@pytest.mark.parametrize(
    "request_, code",
    [
        ("/", 404),
        ("/metricsx", 404),
        ("/metrics/", 404),
        ("/healthz?verbose=%ff", 400),
        ("/v1/clients?limit=0", 200),
        ("/v1/clients?limit=10000", 200),
        ("/v1/clients?limit=10001", 400),
        ("/v1/clients?limit=-1", 400),
        ("/v1/clients?limit=1&limit=2", 400),
        ("/v1/clients?limit", 400),
        ("/v1/clients?limit=" + "9" * 5000, 400),
        ("/v1/clients?limit=%C2%B2", 400),
        ("/v1/clients?limit=%FF", 400),
        (b"POST /metrics HTTP/1.1\r\n" + HOST + b"\r\n", 405),
        (b"DELETE /metrics HTTP/1.1\r\n" + HOST + b"\r\n", 405),
        (b"POST /metrics HTTP/1.1\r\n" + HOST + b"Content-Length: 3\r\n\r\nabc", 405),
        (b"GET /metrics HTTP/1.1\r\n" + HOST + b"Transfer-Encoding: chunked\r\n\r\n", 413),
        (b"GET /metrics HTTP/1.1\r\n\r\n", 400),
        (b"GET /metrics\r\n\r\n", 400),
        (b"GET /\xff HTTP/1.1\r\n" + HOST + b"\r\n", 400),
        (b"GET http://[ HTTP/1.1\r\n" + HOST + b"\r\n", 400),
        (b"\x00\x00\x00\x00\x00\x00\x00\x01\r\n\r\n", 400),
        (b"GET /metrics HTTP/1.1\r\nHost: evil.example\r\nConnection: close\r\n\r\n", 421),
        (
            b"GET /metrics HTTP/1.1\r\nHost: 127.0.0.1.evil\r\nConnection: close\r\n\r\n",
            421,
        ),
        (b"GET /metrics HTTP/1.1\r\n" + HOST + b"X: " + b"x" * 17000, 431),
        (b"GET /metrics HTTP/1.1\r\n" + HOST + b"X: " + b"x" * 17000 + b"\r\n\r\n", 431),
        (b"GET /healthz HTTP/1.1\r\n" + HOST + b"X: " + b"x" * 16000 + b"\r\n\r\n", 200),
        (b"GET /healthz HTTP/2.0\r\n" + HOST + b"\r\n", 505),
        (b"GET /healthz HTTP/1.9\r\n" + HOST + b"\r\n", 200),
        (b"GET /healthz HTTP/1.1\r\n" + HOST + b"X: \x00\r\n\r\n", 400),
        (b"HEAD /healthz HTTP/1.1\r\n" + HOST + b"\r\n", 200),
        (b"HEAD /healthz HTTP/1.1\r\n" + HOST + b"Content-Length: 1\r\n\r\n", 413),
        (b"HEAD /nothing HTTP/1.1\r\n" + HOST + b"\r\n", 404),
        (b"HEAD x HTTP/1.1\r\n" + HOST + b"\r\n", 400),
        (b"GET /healthz HTTP/1.0\r\n\r\n", 200),
        (b"GET http://127.0.0.1/healthz HTTP/1.1\r\n" + HOST + b"\r\n", 200),
        (b"OPTIONS /healthz HTTP/1.1\r\n" + HOST + b"\r\n", 204),
    ],
)
async def test_requests(request_: str | bytes, code: int, caplog: pytest.LogCaptureFixture) -> None:
    async with answering(partial(serve_metrics, gather=nothing)) as port:
        got, headers, body = await ask(port, request_)
    assert got == code
    assert headers["X-Content-Type-Options"] == "nosniff"
    assert [record for record in caplog.records if record.exc_info] == []
    if got >= 400:
        assert headers["Content-Type"] == "application/problem+json"
    if isinstance(request_, bytes) and request_.startswith(b"HEAD"):
        assert (int(headers["Content-Length"]) > 5, body) == (True, b"")
    elif got >= 400:
        problem = json.loads(body)
        assert (problem["status"], bool(problem["detail"])) == (code, True)
        assert "bytearray" not in problem["detail"]


async def test_a_failure_is_that_answers_alone(caplog: pytest.LogCaptureFixture) -> None:
    async def failing(*, limit: int) -> exposition.MetricsSnapshot:
        raise ZeroDivisionError("from the callback")

    async with answering(partial(serve_metrics, gather=failing)) as port:
        assert (await ask(port, "/metrics"))[0] == 500
        assert (await ask(port, "/healthz"))[0] == 200
    assert "from the callback" in caplog.text


async def test_who_says_nothing_is_closed(autojump_clock: trio.testing.MockClock) -> None:
    async with (
        answering(partial(serve_metrics, gather=nothing)) as port,
        await trio.open_tcp_stream("127.0.0.1", port) as silent,
        await trio.open_tcp_stream("127.0.0.1", port) as half,
    ):
        await half.send_all(b"GET /metrics HT")
        with suppress(trio.BrokenResourceError):
            assert await silent.receive_some() == b""
        assert (await half.receive_some()).startswith(b"HTTP/1.1 408 ")


async def test_a_request_that_follows_another_is_not_waited_for_longer(
    autojump_clock: trio.testing.MockClock,
) -> None:
    """Also one whose beginning arrived with the first."""
    async with (
        answering(partial(serve_metrics, gather=nothing)) as port,
        await trio.open_tcp_stream("127.0.0.1", port) as client,
    ):
        begun = trio.current_time()
        await client.send_all(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\nGET /metr")
        got = b"".join([part async for part in client])
        assert got.count(b"HTTP/1.1 408 ") == 1
        # The test's clock jumps: this is what the server waited for.
        assert trio.current_time() - begun < 30


async def test_a_full_endpoint_closes_the_oldest() -> None:
    async with answering(partial(serve_metrics, gather=nothing)) as port:
        silent = [await trio.open_tcp_stream("127.0.0.1", port) for _ in range(64)]
        assert (await ask(port, "/healthz"))[0] == 200
        with suppress(trio.BrokenResourceError):
            assert await silent[0].receive_some() == b""
        # The others are still there.
        for stream in silent[1:]:
            await stream.send_all(b"GET /healthz HTTP/1.1\r\n" + HOST + b"\r\n")
            assert (await stream.receive_some()).startswith(b"HTTP/1.1 200 OK")
        for stream in silent:
            await stream.aclose()


async def attack(port: int, rate: float) -> None:
    """Make `rate` connections a second, for ever: idle ones, slow ones, and some that do not read
    their answers."""
    async with trio.open_nursery() as nursery:
        for at in itertools.count():
            nursery.start_soon(attacker, port, at % 3)
            await trio.sleep(1 / rate)


async def attacker(port: int, kind: int) -> None:
    with suppress(OSError, trio.BrokenResourceError):
        made = trio.socket.socket()
        made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        await made.connect(("127.0.0.1", port))
        async with trio.SocketStream(made) as stream:
            if kind == 2:
                await stream.send_all(b"GET /metrics HTTP/1.1\r\n" + HOST + b"\r\n")
            while True:
                if kind == 1:
                    await stream.send_all(b"G")
                await trio.sleep(0.5)


@pytest.mark.parametrize("workers", [1, 2])
async def test_probes_beside_a_flood(path: Path, workers: int) -> None:
    """The port answers each probe, every 0.1 s, beside a hundred connections per second."""
    probes = 29
    with DataStream.create(path):
        pass
    words = ("serve", path, "--host", "127.0.0.1", "--port", "0", "--metrics-port", "0")
    with running(*words, "--workers", workers, cwd=path.parent) as server:
        port = int(server.err.until(r"metrics on http://127\.0\.0\.1:(\d+)/metrics")[1])
        answered: list[int] = []

        async def probe(target: str) -> None:
            with trio.fail_after(20):
                answered.append((await ask(port, target))[0])

        async with trio.open_nursery() as nursery:
            nursery.start_soon(attack, port, 100.0)
            await trio.sleep(1)
            async with trio.open_nursery() as probing:
                for at in range(probes):
                    target = ("/healthz", "/readyz", "/metrics")[at % 3]
                    probing.start_soon(probe, target)
                    await trio.sleep(0.1)
            nursery.cancel_scope.cancel()
        assert answered == [200] * probes
