"""The client's channels: all bytes go out and come in, however little the socket takes."""

from __future__ import annotations

import math
import socket
import ssl
import sys
from typing import Any

import pytest
import trio
import trio.testing

from datastreamer.errors import ConnectionLost
from datastreamer.transport import trio_channel as channel_module
from datastreamer.transport.tcp_info import tcp_info
from datastreamer.transport.trio_channel import Channel, SocketChannel, StreamChannel, channel_over


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
    monkeypatch.setattr(channel_module, "_LARGE_BYTES", PIECE)
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


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock()
    monkeypatch.setattr(channel_module, "time", found)
    return found


class Clock:
    """The system's clock, in the test's hands."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now


async def test_what_comes_fast_is_taken_in_turns_with_others(
    counted_waits: list[object], clock: Clock, autojump_clock: trio.testing.MockClock
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
            clock.now += channel_module.TURN_SECONDS
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
    counted_waits: list[object], clock: Clock
) -> None:
    """Nothing is to be waited for in place behind them."""
    channel, theirs = full_pair()
    buffer = memoryview(bytearray(PIECE))
    for at in range(12):
        assert await channel.receive_into(buffer) == PIECE
        assert len(counted_waits) == at + 1
        clock.now += 0.0002
    await channel.aclose()
    theirs.close()


async def test_a_stream_that_slows_down_has_its_turn_ended(
    counted_waits: list[object], clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Large pieces for which the whole moment is waited would hold others up: a second in a row
    is the last."""
    channel, theirs = full_pair()
    buffer = memoryview(bytearray(PIECE))
    slow = iter([True, False, True, True])

    def select(*what: object) -> None:
        if next(slow):
            clock.now += channel_module._MOMENT_SECONDS

    monkeypatch.setattr(channel_module.select, "select", select)
    for _ in range(6):
        assert await channel.receive_into(buffer) == PIECE
    assert len(counted_waits) == 2
    assert next(slow, None) is None
    clock.now += 0.001
    assert await channel.receive_into(buffer) == PIECE
    assert len(counted_waits) == 3
    await channel.aclose()
    theirs.close()


@pytest.mark.parametrize("taken", [True, False])
async def test_the_next_piece_of_a_turn_is_waited_for_in_place(
    taken: bool, counted_waits: list[object], clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For a moment; not where `select` does not take so large a descriptor."""
    if not taken:
        monkeypatch.setattr(channel_module, "_MOST_DESCRIPTORS", 0)
    channel, theirs = full_pair(0)
    buffer = memoryview(bytearray(PIECE))
    for _ in range(12):
        assert await channel.receive_into(buffer) == PIECE
    assert len(counted_waits) == 2
    assert least(channel) == (channel_module._GATHERED_BYTES if taken else 1)
    select, waits = channel_module.select.select, 0

    def late(*what: Any) -> Any:
        nonlocal waits
        waits += 1
        theirs.sendall(b"late")
        return select(*what)

    monkeypatch.setattr(channel_module.select, "select", late)
    if not taken:
        theirs.sendall(b"late")
    assert await channel.receive_into(buffer) == 4
    assert waits == int(taken)
    # What was small ended the turn: the loop waits for what comes now.
    assert len(counted_waits) == 2
    theirs.sendall(b"later")
    assert await channel.receive_into(buffer) == 5
    assert waits == int(taken)
    assert len(counted_waits) == 3
    await channel.aclose()
    theirs.close()


async def test_a_piece_is_gathered_for_a_moment_only(counted_waits: list[object]) -> None:
    """What is less than was waited for is nevertheless received."""
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
        # Whatever pieces the system made of it, and however long that took.
        channel._in_turn, channel._turn_ends = True, math.inf
        await theirs.send_all(b"less")
        assert await channel.receive_into(buffer) == 4
        assert least(channel) == channel_module._GATHERED_BYTES
        assert len(counted_waits) == waited
        await theirs.send_all(b"l")
        assert await channel.receive_into(buffer) == 1
        assert len(counted_waits) == waited + 1
        assert least(channel) == 1
    await channel.aclose()


async def test_closing_it_within_a_turn(counted_waits: list[object], clock: Clock) -> None:
    channel, theirs = full_pair()
    buffer = memoryview(bytearray(PIECE))
    for _ in range(3):
        assert await channel.receive_into(buffer) == PIECE
    clock.now += 1

    async def take() -> None:
        while True:
            await channel.receive_into(buffer)
            await trio.lowlevel.checkpoint()

    async with trio.open_nursery() as nursery:
        # Of two that are ready at once either may be first.
        nursery.start_soon(channel.aclose)
        with pytest.raises(ConnectionLost):
            await take()
    theirs.close()


async def test_where_other_connections_are_busy_too_nothing_is_waited_for_in_place(
    counted_waits: list[object], clock: Clock, monkeypatch: pytest.MonkeyPatch
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
            clock.now += channel_module.TURN_SECONDS
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


async def test_closing_wakes_a_waiting_task() -> None:
    channel, theirs = await pair()

    async def wait() -> None:
        with pytest.raises(ConnectionLost):
            await channel.receive_into(memoryview(bytearray(10)))

    async with theirs, trio.open_nursery() as nursery:
        nursery.start_soon(wait)
        await trio.testing.wait_all_tasks_blocked()
        await channel.aclose()
