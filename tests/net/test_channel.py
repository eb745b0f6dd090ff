"""The client's channels: all bytes go out and come in, however little the socket takes."""

from __future__ import annotations

import socket

import pytest
import trio
import trio.testing

from datastreamer.errors import ConnectionLost
from datastreamer.net.channel import Channel, SocketChannel, StreamChannel, channel_over


async def pair() -> tuple[Channel, trio.SocketStream]:
    """A socket channel with small buffers, and trio's stream at its other end."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 8192)
        ours = await trio.open_tcp_stream(*listener.getsockname())
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 8192)
        accepted, _ = listener.accept()
    accepted.setblocking(False)
    theirs = trio.SocketStream(trio.socket.from_stdlib_socket(accepted))
    return channel_over(ours, "peer:1"), theirs


async def test_what_the_socket_does_not_take_at_once_is_sent_later() -> None:
    channel, theirs = await pair()
    assert isinstance(channel, SocketChannel)
    data = bytes(range(256)) * 8192
    async with theirs, trio.open_nursery() as nursery:
        nursery.start_soon(channel.send, data)
        got = bytearray()
        while len(got) < len(data):
            got += await theirs.receive_some()
        assert got == data
    await channel.aclose()


async def test_receiving() -> None:
    channel, theirs = await pair()
    buffer = bytearray(10)
    async with theirs:
        await theirs.send_all(b"hello")
        assert await channel.receive_into(memoryview(buffer)[2:]) == 5
        assert buffer == b"\0\0hello\0\0\0"
    assert await channel.receive_into(memoryview(buffer)) == 0
    await channel.aclose()


@pytest.mark.parametrize("over", ["socket", "stream"])
async def test_a_connection_that_broke(over: str) -> None:
    channel, theirs = await pair()
    if over == "stream":
        ours, other = trio.testing.memory_stream_pair()
        assert isinstance(channel_over(ours, "peer:1"), StreamChannel)
        await channel.aclose()
        channel = channel_over(ours, "peer:1")
        await other.aclose()
    theirs.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    await theirs.aclose()

    async def use() -> None:
        while True:
            await channel.send(b"x" * 1000)
            await trio.lowlevel.checkpoint()

    with pytest.raises(ConnectionLost, match=r"the connection to peer:1 is lost: \w"):
        await use()
    await channel.aclose()


async def test_closing_wakes_whoever_waits() -> None:
    channel, theirs = await pair()

    async def wait() -> None:
        with pytest.raises(trio.ClosedResourceError):
            await channel.receive_into(memoryview(bytearray(10)))

    async with theirs, trio.open_nursery() as nursery:
        nursery.start_soon(wait)
        await trio.testing.wait_all_tasks_blocked()
        await channel.aclose()
