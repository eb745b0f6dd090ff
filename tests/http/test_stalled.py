"""Clients that do not read what they asked for: they are reset, and slow ones are not."""

from __future__ import annotations

import logging
import socket
from contextlib import suppress

import pytest
import trio
import trio.testing

from datastreamer.http.port import endpoint as endpoint_module
from datastreamer.http.port.endpoint import HttpEndpoint
from datastreamer.http.port.messages import BodyOutput, HttpAnswer, HttpRequest
from datastreamer.metrics.counters import HttpCounts
from datastreamer.storage.stream import DataStream
from datastreamer.transport.listeners import open_listeners
from datastreamer.transport.tcp_info import TcpInfo
from datastreamer.transport.tls import ServerTLS
from tests.http.asking import joined
from tests.http.serving import serving
from tests.http.test_follow import following, live
from tests.http.test_ranges import FORMATS, begun
from tests.network.fixtures import append
from tests.network.secure import Authority, dial
from tests.network.stream_transport import StreamTransport


@pytest.mark.parametrize("format", FORMATS)
async def test_a_range(stream: DataStream, format: str, caplog: pytest.LogCaptureFixture) -> None:
    append(stream, *[(1, b"x" * 1000)] * 20_000)
    with caplog.at_level(logging.DEBUG):
        async with serving(stream, write_timeout=0.2) as web:
            client = await begun(web, f"/v1/entries?format={format}")
            async with client.stream:
                while web.server.other_readers:
                    await trio.sleep(0.01)
                with pytest.raises((AssertionError, ValueError)):
                    joined((await client.rest()).partition(b"\r\n\r\n")[2])
    assert "it has received nothing for 0.2 s" in caplog.text


async def test_also_without_a_write_timeout(
    stream: DataStream, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(endpoint_module, "_WRITE_SECONDS", 0.2)
    append(stream, *[(1, b"x" * 1000)] * 20_000)
    async with serving(stream) as web:
        client = await begun(web, "/v1/entries?format=raw")
        async with client.stream:
            while web.server.other_readers:
                await trio.sleep(0.01)


async def test_with_tls(stream: DataStream, authority: Authority) -> None:
    append(stream, *[(1, b"x" * 1000)] * 20_000)
    tls = ServerTLS(authority.issue("web"))
    async with serving(stream, tls=tls, write_timeout=0.2) as web:
        address = ("127.0.0.1", web.port)
        client = await dial(address, authority.context(), receive_buffer=4096)
        request = b"GET /v1/entries?format=raw HTTP/1.1\r\nHost: localhost\r\n\r\n"
        await client.send_all(request)
        while not web.server.other_readers:
            await trio.lowlevel.checkpoint()
        while web.server.other_readers:
            await trio.sleep(0.01)
        await trio.aclose_forcefully(client)


async def test_followers(stream: DataStream) -> None:
    """One that reads nothing of what is committed is reset, one that waits for commits is not."""
    async with serving(stream, write_timeout=0.2) as web, following(web) as quick:
        async with following(web):
            await live(web, 2)
            while web.server.counts.http and web.server.counts.http.followers > 1:
                append(stream, (1, b"x" * 500_000))
                await quick.entries(1)
        append(stream, (1, b"last"))
        await quick.entries(1)


async def test_a_slow_client_is_not_stalled(
    autojump_clock: trio.testing.MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    acknowledged = [0]

    def info(made: socket.socket) -> TcpInfo:
        return TcpInfo(0, 0.0, acknowledged[-1], outstanding=True)

    async def endless(output: BodyOutput) -> None:
        while True:
            await output.send(b"x" * 1000)
            await trio.sleep(1)

    async def respond(request: HttpRequest) -> HttpAnswer:
        return HttpAnswer(200, "text/plain", endless)

    monkeypatch.setattr(endpoint_module, "tcp_info", info)
    endpoint = HttpEndpoint(respond, HttpCounts(), most=10, write_timeout=60)
    ours, theirs = trio.testing.memory_stream_pair()
    async with trio.open_nursery() as nursery:
        await nursery.start(endpoint.run, open_listeners("127.0.0.1", 0))
        with socket.socket() as made:
            nursery.start_soon(endpoint.serve, StreamTransport(theirs), made, "host")
            await ours.send_all(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
            for _ in range(100):
                last = trio.current_time()
                acknowledged.append(acknowledged[-1] + 1)
                await trio.sleep(50)
                assert await ours.receive_some()
            with suppress(trio.BrokenResourceError):
                while await ours.receive_some():
                    pass
            assert 60 <= trio.current_time() - last <= 60 + 2 * 60 / 4
        nursery.cancel_scope.cancel()
