"""Requests that are made to confuse: mutated ones, two in one, slow ones."""

from __future__ import annotations

import random

import pytest
import trio

from datastreamer.storage.stream import DataStream
from tests.http.asking import ask
from tests.http.serving import serving
from tests.network.fixtures import append, seeds

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
