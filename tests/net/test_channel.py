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


@pytest.fixture
def counted_waits(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """What the loop was asked to wait for; and pieces of `PIECE` are large ones."""
    monkeypatch.setattr(channel_module, "PIECE_BYTES", 2 * PIECE)
    monkeypatch.setattr(channel_module, "_MUCH_BYTES", PIECE)
    waits: list[object] = []
    wait = trio.lowlevel.wait_readable

    async def counted(found: socket.socket) -> None:
        waits.append(found)
        await wait(found)

    monkeypatch.setattr(trio.lowlevel, "wait_readable", counted)
    return waits


def least(channel: SocketChannel) -> int:
    """From how many bytes on the socket is ready."""
    return channel.connection().getsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT)


async def test_what_comes_fast_is_taken_in_turns_with_others(
    counted_waits: list[object], autojump_clock: trio.testing.MockClock
) -> None:
    """Large pieces in a row for a moment; and a cancellation comes first."""
    channel, theirs = full_pair()
    buffer = memoryview(bytearray(PIECE))
    others = 0

    async def count() -> None:
        nonlocal others
        while True:
            others += 1
            await trio.lowlevel.checkpoint()

    async with trio.open_nursery() as nursery:
        for _ in range(6):
            assert await channel.receive_into(buffer) == PIECE
        # The first two showed that it comes fast.
        assert len(counted_waits) == 2
        nursery.start_soon(count)
        for turn in range(2):
            autojump_clock.jump(channel_module.TURN_SECONDS)
            for _ in range(2):
                assert await channel.receive_into(buffer) == PIECE
            # Of those that are ready at once the loop takes any first.
            assert turn <= others <= turn + 1
        with trio.CancelScope() as scope:
            scope.cancel()
            await channel.receive_into(buffer)
        assert scope.cancelled_caught
        for _ in range(2):
            assert await channel.receive_into(buffer) == PIECE
        # A small piece ends the turn, and the next is one by the loop, however small it is.
        assert await channel.receive_into(buffer) == 1000
        assert least(channel) > 1
        assert len(counted_waits) == 2
        nursery.cancel_scope.cancel()
    with trio.move_on_after(0) as scope:
        await channel.receive_into(buffer)
    assert scope.cancelled_caught
    assert least(channel) == 1
    theirs.send(b"more")
    assert await channel.receive_into(buffer) == 4
    theirs.close()
    assert await channel.receive_into(buffer) == 0
    await channel.aclose()


async def test_large_pieces_that_come_one_by_one_have_no_turn(
    counted_waits: list[object], autojump_clock: trio.testing.MockClock
) -> None:
    """Nothing is to be waited for in place behind them."""
    channel, theirs = full_pair()
    buffer = memoryview(bytearray(PIECE))
    for at in range(12):
        assert await channel.receive_into(buffer) == PIECE
        assert len(counted_waits) == at + 1
        autojump_clock.jump(0.001)
    await channel.aclose()
    theirs.close()


@pytest.mark.parametrize("taken", [True, False])
async def test_the_next_piece_of_a_turn_is_waited_for_in_place(
    taken: bool, counted_waits: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """For a moment; not where `select` does not take so large a descriptor."""
    channel, theirs = full_pair(0)
    buffer = memoryview(bytearray(PIECE))
    monkeypatch.setattr(channel_module, "_SOON_SECONDS", 60)
    monkeypatch.setattr(channel_module, "TURN_SECONDS", 60)
    for _ in range(12):
        assert await channel.receive_into(buffer) == PIECE
    assert len(counted_waits) == 2
    select, waits = channel_module.select.select, 0

    def late(*what: Any) -> Any:
        nonlocal waits
        waits += 1
        theirs.sendall(b"late")
        if not taken:
            raise ValueError("filedescriptor out of range in select()")
        return select(*what)

    monkeypatch.setattr(channel_module.select, "select", late)
    assert await channel.receive_into(buffer) == 4
    assert waits == 1
    assert len(counted_waits) == 2
    # What was small ended the turn: the loop waits for what comes now.
    theirs.sendall(b"later")
    assert await channel.receive_into(buffer) == 5
    assert waits == 1
    assert len(counted_waits) == 3
    await channel.aclose()
    theirs.close()


async def test_a_piece_is_gathered_for_a_moment_only(
    counted_waits: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is less than was waited for is taken all the same."""
    monkeypatch.setattr(channel_module, "_SOON_SECONDS", 60)
    monkeypatch.setattr(channel_module, "TURN_SECONDS", 60)
    channel, theirs = await pair()
    assert isinstance(channel, SocketChannel)
    buffer = memoryview(bytearray(PIECE))
    async with theirs:
        for _ in range(2):
            await theirs.send_all(bytes(PIECE))
            got = 0
            while got < PIECE:
                got += await channel.receive_into(buffer[got:])
        waited = len(counted_waits)
        channel._much = True  # whatever pieces the system made of it
        await theirs.send_all(b"less")
        assert await channel.receive_into(buffer) == 4
        assert least(channel) == channel_module._GATHERED_BYTES
        assert len(counted_waits) == waited
        await theirs.send_all(b"l")
        assert await channel.receive_into(buffer) == 1
        assert len(counted_waits) == waited + 1
        assert least(channel) == 1
    await channel.aclose()


async def test_where_other_connections_are_busy_too_nothing_is_waited_for_in_place(
    counted_waits: list[object],
    monkeypatch: pytest.MonkeyPatch,
    autojump_clock: trio.testing.MockClock,
) -> None:
    """The moments would add up."""
    pairs = [full_pair(1024), full_pair(1024)]
    buffer = memoryview(bytearray(PIECE))
    gathered: list[object] = []
    monkeypatch.setattr(channel_module.select, "select", lambda *what: gathered.append(what))
    for at in range(12):
        for channel, _ in pairs:
            assert await channel.receive_into(buffer) == PIECE
        if at == 6:
            autojump_clock.jump(channel_module.TURN_SECONDS)
    # What lies ready and fills the buffer is taken in turns here, too.
    assert len(counted_waits) < 24
    for channel, _ in pairs:
        assert await channel.receive_into(buffer) == 1024
    assert not gathered
    for channel, theirs in pairs:
        await channel.aclose()
        theirs.close()


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
