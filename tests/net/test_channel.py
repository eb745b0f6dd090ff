"""The client's channels: all bytes go out and come in, however little the socket takes."""

from __future__ import annotations

import socket
import ssl
import sys
from typing import Any

import pytest
import trio
import trio.testing

from datastreamer.errors import ConnectionLost
from datastreamer.net import channel as channel_module
from datastreamer.net.channel import Channel, SocketChannel, StreamChannel, channel_over
from datastreamer.net.tcp import tcp_info


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


PIECE = 4096


def full_pair(more: int = 1000) -> tuple[SocketChannel, socket.socket]:
    """A socket channel to which 12 pieces and `more` bytes have been sent, and its other end."""
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    channel = SocketChannel(trio.SocketStream(trio.socket.from_stdlib_socket(ours)), "peer:1")
    theirs.sendall(bytes(12 * PIECE + more))
    return channel, theirs


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


async def test_what_lies_ready_is_taken_in_turns_with_others(
    monkeypatch: pytest.MonkeyPatch,
    autojump_clock: trio.testing.MockClock,
) -> None:
    """Large pieces in a row for a moment, where each filled its buffer; and a cancellation comes
    first."""
    monkeypatch.setattr(channel_module, "PIECE_BYTES", 2 * PIECE)
    channel, theirs = full_pair()
    buffer = memoryview(bytearray(PIECE))
    wait, waits = trio.lowlevel.wait_readable, 0

    async def counted(found: socket.socket) -> None:
        nonlocal waits
        waits += 1
        await wait(found)

    monkeypatch.setattr(trio.lowlevel, "wait_readable", counted)
    for turn in (1, 2, 3):
        for _ in range(3):
            assert await channel.receive_into(buffer) == len(buffer)
        assert waits == turn
        autojump_clock.jump(channel_module.TURN_SECONDS)
    assert await channel.receive_into(buffer) == len(buffer)
    with trio.CancelScope() as scope:
        scope.cancel()
        await channel.receive_into(buffer)
    assert scope.cancelled_caught
    # What is left is less than a buffer: then it waits for more, as ever.
    assert await channel.receive_into(buffer) == len(buffer)
    assert await channel.receive_into(buffer) == len(buffer)
    assert await channel.receive_into(buffer) == 1000
    assert waits == 4
    with trio.move_on_after(0) as scope:
        await channel.receive_into(buffer)
    assert scope.cancelled_caught
    theirs.send(b"more")
    assert await channel.receive_into(buffer) == 4
    theirs.close()
    assert await channel.receive_into(buffer) == 0
    await channel.aclose()


@pytest.mark.parametrize("taken", [True, False])
async def test_the_next_piece_of_a_turn_is_waited_for_in_place(
    taken: bool, monkeypatch: pytest.MonkeyPatch, autojump_clock: trio.testing.MockClock
) -> None:
    """For a moment; not where `select` does not take so large a descriptor."""
    monkeypatch.setattr(channel_module, "PIECE_BYTES", 2 * PIECE)
    channel, theirs = full_pair(1024)
    buffer = memoryview(bytearray(PIECE))
    for at in range(12):
        assert await channel.receive_into(buffer) == PIECE
        if at == 6:
            # The next turn follows one of the same connection.
            autojump_clock.jump(channel_module.TURN_SECONDS)
    assert await channel.receive_into(buffer) == 1024
    select, waits = channel_module.select.select, 0

    def counted(*what: Any) -> Any:
        nonlocal waits
        waits += 1
        theirs.sendall(b"late")
        if not taken:
            raise ValueError("filedescriptor out of range in select()")
        return select(*what)

    monkeypatch.setattr(channel_module.select, "select", counted)
    assert await channel.receive_into(buffer) == 4
    assert waits == 1
    # What was small ended the turn: the loop waits for what comes now.
    theirs.sendall(b"later")
    assert await channel.receive_into(buffer) == 5
    assert waits == 1
    await channel.aclose()
    theirs.close()


async def test_where_other_connections_are_busy_too_nothing_is_waited_for_in_place(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: trio.testing.MockClock
) -> None:
    """The moments would add up."""
    monkeypatch.setattr(channel_module, "PIECE_BYTES", 2 * PIECE)
    pairs = [full_pair(1024), full_pair(1024)]
    buffer = memoryview(bytearray(PIECE))
    for at in range(12):
        for channel, _ in pairs:
            assert await channel.receive_into(buffer) == PIECE
        if at == 6:
            autojump_clock.jump(channel_module.TURN_SECONDS)
    waits: list[object] = []
    monkeypatch.setattr(channel_module.select, "select", lambda *what: waits.append(what))
    for channel, theirs in pairs:
        assert await channel.receive_into(buffer) == 1024
        with trio.move_on_after(1) as scope:
            await channel.receive_into(buffer)
        assert scope.cancelled_caught
        await channel.aclose()
        theirs.close()
    assert not waits


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


async def test_the_system_is_asked_about_what_is_under_tls() -> None:
    [listener] = await trio.open_tcp_listeners(0, host="127.0.0.1")
    stream = await trio.open_tcp_stream(*listener.socket.getsockname())
    plain = channel_over(stream, "peer:1")
    found = plain.connection()
    assert found is not None
    fileno = found.fileno()
    under = trio.SocketStream(trio.socket.from_stdlib_socket(found))
    secured = channel_over(trio.SSLStream(under, ssl.create_default_context()), "peer:1")
    found = secured.connection()
    assert found is not None
    assert found.fileno() == fileno
    assert tcp_info(found) is not None or sys.platform != "linux"
    await trio.aclose_forcefully(under)
    await listener.aclose()


async def test_in_memory_there_is_nothing_to_ask() -> None:
    ours, _ = trio.testing.memory_stream_pair()
    assert channel_over(ours, "peer:1").connection() is None


async def test_closing_wakes_whoever_waits() -> None:
    channel, theirs = await pair()

    async def wait() -> None:
        with pytest.raises(trio.ClosedResourceError):
            await channel.receive_into(memoryview(bytearray(10)))

    async with theirs, trio.open_nursery() as nursery:
        nursery.start_soon(wait)
        await trio.testing.wait_all_tasks_blocked()
        await channel.aclose()
