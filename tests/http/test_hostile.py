"""Requests that are made to confuse: mutated ones, two in one, slow ones."""

from __future__ import annotations

import random
import socket
from contextlib import AsyncExitStack

import pytest
import trio

from datastreamer.storage.stream import DataStream
from tests.http.asking import ask
from tests.http.serving import serving
from tests.http.test_follow import following, live
from tests.network.fixtures import append, seeds, until

VALID = (
    b"GET /v1/entries?from=0&to=1&format=json HTTP/1.1\r\nHost: localhost\r\n"
    b'Accept-Encoding: gzip\r\nIf-None-Match: "x"\r\nLast-Event-ID: 1\r\n\r\n'
)


def mutated(chance: random.Random) -> bytes:
    data = bytearray(VALID * chance.randrange(1, 3))
    for _ in range(chance.randrange(1, 8)):
        at = chance.randrange(len(data))
        what = chance.randrange(4)
        if what == 0:
            data[at] = chance.randrange(256)
        elif what == 1:
            del data[at : at + chance.randrange(1, 20)]
        elif what == 2:
            data[at:at] = bytes(chance.randrange(256) for _ in range(chance.randrange(1, 20)))
        else:
            data[at:at] = data[: chance.randrange(40)]
        if not data:
            break
    return bytes(data)


@seeds(3, 60)
async def test_mutated_requests(
    stream: DataStream, seed: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Each is answered or refused, none fails in the server, and others are served."""
    chance = random.Random(seed)
    append(stream, *[(1, b"one")] * 3)
    async with serving(stream) as web:
        for _ in range(60):
            async with await trio.open_tcp_stream("127.0.0.1", web.port) as client:
                await client.send_all(mutated(chance))
                await client.send_eof()
                got = b""
                try:
                    while more := await client.receive_some():
                        got += more
                except trio.BrokenResourceError:
                    pass
                assert not got or got.startswith(b"HTTP/1.1 ")
                assert b"HTTP/1.1 500" not in got
        assert (await ask(web.port, "/v1/entries/2"))[0] == 200
    assert [record for record in caplog.records if record.exc_info] == []


SMUGGLED = b"GET /v1/entries/1 HTTP/1.1\r\nHost: localhost\r\n\r\n"


@pytest.mark.parametrize(
    "headers",
    [
        b"Content-Length: %d\r\n" % len(SMUGGLED),
        b"Content-Length: 0\r\nContent-Length: %d\r\n" % len(SMUGGLED),
        b"Content-Length: 0\r\nTransfer-Encoding: chunked\r\n",
        b"Transfer-Encoding: chunked\r\nTransfer-Encoding: identity\r\n",
        b"Transfer-Encoding : chunked\r\n",
        b"Transfer-Encoding: xchunked\r\n",
        b"Content-Length: +0\r\n",
        b"Content-Length: 0, %d\r\n" % len(SMUGGLED),
        b"Content-Length:\t%d\r\n" % len(SMUGGLED),
        b"Content-Length: 0x%x\r\n" % len(SMUGGLED),
        b"Content-Length: %d\r\nTransfer-Encoding: chunked\r\n" % len(SMUGGLED),
        b"Transfer-Encoding: chunked, identity\r\n",
        b"Transfer-Encoding:\x0bchunked\r\n",
        b"X: y\r\n Transfer-Encoding: chunked\r\nContent-Length: %d\r\n" % len(SMUGGLED),
        b"X: y\nTransfer-Encoding: chunked\n",
        b"X: y\rTransfer-Encoding: chunked\r\nContent-Length: %d\r\n" % len(SMUGGLED),
        b"X: y\x00\r\n",
        b"Content_Length: 0\r\nContent-Length: %d\r\n" % len(SMUGGLED),
    ],
)
async def test_a_second_request_in_a_body_is_not_answered(
    stream: DataStream, headers: bytes
) -> None:
    append(stream, *[(1, b"one")] * 3)
    request = b"GET /v1/stream HTTP/1.1\r\nHost: localhost\r\n" + headers + b"\r\n" + SMUGGLED
    async with (
        serving(stream) as web,
        await trio.open_tcp_stream("127.0.0.1", web.port) as client,
    ):
        await client.send_all(request)
        got = b"".join([part async for part in client])
    assert got.count(b"HTTP/1.1 ") == 1
    assert got.startswith((b"HTTP/1.1 4", b"HTTP/1.1 501"))
    assert b"6f6e65" not in got


async def test_a_request_byte_by_byte(stream: DataStream) -> None:
    append(stream, *[(1, b"one")] * 3)
    async with (
        serving(stream) as web,
        await trio.open_tcp_stream("127.0.0.1", web.port) as client,
    ):
        for at in range(len(SMUGGLED)):
            await client.send_all(SMUGGLED[at : at + 1])
            await trio.lowlevel.checkpoint()
        assert (await client.receive_some()).startswith(b"HTTP/1.1 200 ")


async def test_many_requests_at_once_let_other_tasks_run(stream: DataStream) -> None:
    turns = 0

    async def other() -> None:
        nonlocal turns
        while True:
            turns += 1
            await trio.lowlevel.checkpoint()

    request = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n"
    count = 1000
    async with (
        serving(stream) as web,
        await trio.open_tcp_stream("127.0.0.1", web.port) as client,
        trio.open_nursery() as nursery,
    ):
        nursery.start_soon(other)
        await client.send_all(request * count)
        got = b""
        while got.count(b"HTTP/1.1 200 ") < count:
            got += await client.receive_some()
        nursery.cancel_scope.cancel()
    # One for each request, but for those around the first and the last one.
    assert turns > count // 2


PATHS = [
    "//",
    "//evil.example/v1/stream",
    "/v1/stream#x",
    "/../etc/passwd",
    "/console/../../../etc/passwd",
    "/console/..%2f..%2fetc%2fpasswd",
    "/console/.",
    "/console/%2e%2e/options.py",
    "/console/__init__.py",
    "/console/index.html%00",
    "/console/index.html/",
    "/console//index.html",
    "/console\\index.html",
    "/CONSOLE/main.js",
    "/v1/%73tream",
    "/v1/streams/..",
    "/v1/entries/",
    "/v1/entries/..",
    "/v1/entries/%31%00",
    "/v1/entries/0x1",
    "/v1/entries/-1",
    "/v1/entries/+1",
    "/v1/entries/1e0",
    "/v1/entries/%EF%BC%91",
    "/v1/entries/18446744073709551616",
    "/v1/bookmarks/%FF",
    "/v1/bookmarks/%00",
    "/v1/bookmarks/",
    "/v1/blocks/block:1",
    "/v1/batches/%20",
    "/v1/entries?from=%C2%B2",
    "/v1/entries?from=%D9%A1",
    "/v1/entries?from=block:%D9%A1",
    "/v1/follow?from=1e9",
    "/v1/entries?limit=0",
    "/v1/entries?to=-1",
    "/v1/entries?type=4294967296",
    "/v1/entries?format=../raw",
]
LONG_PATHS = [
    "/v1/entries/" + "9" * 5000,
    "/v1/bookmarks/" + "a" * 9000,
    "/v1/bookmarks/0x" + "0" * 9001,
    "/v1/entries?" + "a=1&" * 99,
]


async def test_paths_that_lead_nowhere(stream: DataStream) -> None:
    append(stream, *[(1, b"one")] * 3)
    async with serving(stream) as web:
        for path in (*PATHS, *LONG_PATHS):
            code, headers, body = await ask(web.port, path)
            assert 400 <= code < 500, (path, body)
            assert headers["Content-Type"] == "application/problem+json"
            assert b"root:" not in body


HOSTS = [
    "evil.example",
    "localhost.evil.example",
    "127.0.0.1.evil.example",
    "localhost@evil.example",
    "evil.example:80",
    "localhost:80:80",
    "localhost:999999",
    "127.0.0.1.",
    "[::1].evil.example",
    "[::2]",
    "::1",
    "0.0.0.0",
    "2130706433",
    "127.1",
    "localhost,evil.example",
    "locälhost",
]


async def test_another_host(stream: DataStream) -> None:
    """A page elsewhere cannot have its own name lead here."""
    async with serving(stream) as web:
        for host in HOSTS:
            request = f"GET /v1/stream HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n"
            code, _, body = await ask(web.port, request.encode("latin-1"))
            assert code in (400, 421), host
            assert b"total_entries" not in body
        both = b"Host: localhost\r\nHost: evil.example\r\nConnection: close\r\n\r\n"
        assert (await ask(web.port, b"GET /v1/stream HTTP/1.1\r\n" + both))[0] == 400
        # What counts is what the page asked for.
        target = b"GET http://localhost/v1/stream HTTP/1.1\r\n"
        other = b"Host: evil.example\r\nConnection: close\r\n\r\n"
        assert (await ask(web.port, target + other))[0] == 421


async def test_another_host_where_one_listener_is_not_loopback(stream: DataStream) -> None:
    """What counts is the address that the connection was made to."""
    request = b"GET /v1/stream HTTP/1.1\r\nHost: evil.example\r\nConnection: close\r\n\r\n"
    async with serving(stream, host="0.0.0.0") as web:
        assert (await ask(web.port, request))[0] == 421
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as route:
            try:
                route.connect(("192.0.2.1", 9))
            except OSError:
                pytest.skip("this machine has no other address")
            own = route.getsockname()[0]
        async with await trio.open_tcp_stream(own, web.port) as client:
            await client.send_all(request)
            assert (await client.receive_some()).startswith(b"HTTP/1.1 200 ")


ODD_HEADERS = [
    *("Accept: */*;q=nan", "Accept: */*;q=inf", "Accept: */*;q=-1", "Accept: " + "a/b," * 3000),
    *("Accept-Encoding: gzip;q=nan", "Accept-Encoding: " + "," * 9000, "If-None-Match: *"),
    *("If-None-Match: " + '"x",' * 3000, "Range: bytes=0-" + "9" * 3000, "Last-Event-ID: -1"),
    *("Authorization: Bearer", "Authorization: " + "x" * 9000, "Origin: null", "Cookie: \u00ff"),
    *("Expect: 100-continue", "Upgrade: h2c", "Connection: close, upgrade", "TE: trailers"),
]


async def test_odd_headers(stream: DataStream, caplog: pytest.LogCaptureFixture) -> None:
    append(stream, *[(1, b"one")] * 3)
    async with serving(stream) as web:
        for header in ODD_HEADERS:
            for path in ("/v1/entries?to=1", "/v1/entries/1", "/v1/follow?from=9"):
                lines = (f"GET {path} HTTP/1.1", "Host: localhost", header, "Connection: close")
                request = "".join(f"{line}\r\n" for line in (*lines, ""))
                code, _, _ = await ask(web.port, request.encode("latin-1"))
                assert code in (200, 304, 400, 406, 416), header
    assert [record for record in caplog.records if record.exc_info] == []


async def test_a_flood_of_a_full_port_costs_few_descriptors(stream: DataStream) -> None:
    async with (
        serving(stream, max_clients=2, max_followers=2) as web,
        following(web) as one,
        following(web),
        AsyncExitStack() as stack,
    ):
        await live(web, 2)
        counts = web.server.counts.http
        assert counts is not None
        most = 0
        for _ in range(200):
            made = await trio.open_tcp_stream("127.0.0.1", web.port)
            await stack.enter_async_context(made)
            most = max(most, counts.connections)
        # Each that is refused is either answered, or closed at once.
        assert 2 < most < 60
        append(stream, (1, b"new"))
        assert await one.entries(1) == [(0, 1, b"new")]
        # As soon as they have been answered, the next one is.
        await until(lambda: counts.connections == 2)
        assert (await ask(web.port, "/healthz"))[0] == 503
