"""The transport of a session, and the pass over many sockets: bytes sent, errors reported."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest
import trio
import trio.testing

from datastreamer.server.streaming._feed_pass import fan_out
from datastreamer.transport.listeners import NOTSENT_LOWAT
from datastreamer.transport.server_stream import RECEIVE_SIZE, SocketTransport
from tests.network.stream_transport import StreamTransport

Pair = tuple[socket.socket, socket.socket]


@pytest.fixture
def pair() -> Iterator[Pair]:
    """Two ends of a TCP connection: the transport's, and the peer's (blocking)."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        theirs = socket.create_connection(listener.getsockname(), timeout=20)
        ours, _ = listener.accept()
    with ours, theirs:
        yield ours, theirs


def read_to_the_end(peer: socket.socket) -> None:
    while peer.recv(1 << 20):
        pass


def fill(transport: SocketTransport) -> int:
    """Send until nothing more is taken; how much was."""
    total = 0
    while taken := transport.send_now(bytes(65536)):
        total += taken
    return total


async def test_bytes_both_ways(pair: Pair) -> None:
    ours, theirs = pair
    transport = SocketTransport(ours)
    assert transport.peer == f"127.0.0.1:{theirs.getsockname()[1]}"
    theirs.sendall(b"question")
    assert await transport.receive() == b"question"
    await transport.send(b"answer")
    await transport.send(memoryview(b" and more"))
    assert theirs.recv(100) == b"answer and more"
    theirs.sendall(bytes(RECEIVE_SIZE + 5))
    got = 0
    while got < RECEIVE_SIZE + 5:
        more = await transport.receive()
        assert 0 < len(more) <= RECEIVE_SIZE
        got += len(more)
    await transport.end_sending()
    assert theirs.recv(1) == b""
    theirs.shutdown(socket.SHUT_WR)
    assert await transport.receive() == b""
    await transport.close()
    await transport.close()
    assert transport.socket_fd is None


async def test_options_of_served_connections(pair: Pair) -> None:
    SocketTransport(pair[0])
    tcp = socket.IPPROTO_TCP
    assert pair[0].getsockopt(tcp, socket.TCP_NODELAY)
    assert pair[0].getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
    if hasattr(socket, "TCP_NOTSENT_LOWAT"):
        assert pair[0].getsockopt(tcp, socket.TCP_NOTSENT_LOWAT) == NOTSENT_LOWAT
    # It would end a living peer whose window is closed.
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        assert pair[0].getsockopt(tcp, socket.TCP_USER_TIMEOUT) == 0


async def test_a_full_connection_takes_nothing_until_it_is_read(pair: Pair) -> None:
    transport = SocketTransport(pair[0])
    sent = fill(transport)
    assert transport.send_now(b"x") == 0
    with trio.move_on_after(0.01) as scope:
        await transport.wait_writable()
    assert scope.cancelled_caught

    def drain() -> int:
        got = 0
        while got < sent:
            got += len(pair[1].recv(1 << 20))
        return got

    async with trio.open_nursery() as nursery:
        nursery.start_soon(trio.to_thread.run_sync, drain)
        await transport.wait_writable()
    assert transport.send_now(b"x") == 1


async def test_a_file_is_sent_by_parts(pair: Pair, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(range(256)) * 20)
    transport = SocketTransport(pair[0])
    with path.open("rb") as file:
        assert transport.send_file(file.fileno(), 10, 100) == 100
        assert pair[1].recv(200) == path.read_bytes()[10:110]
        assert transport.send_file(file.fileno(), 5_000, 1_000) == 120
        assert transport.send_file(file.fileno(), 0, 0) == 0
        with pytest.raises(EOFError, match="5120"):
            transport.send_file(file.fileno(), 5_120, 10)
        fill(transport)
        assert transport.send_file(file.fileno(), 0, 100) == 0


async def test_a_closed_peer_is_a_broken_resource(pair: Pair, tmp_path: Path) -> None:
    ours, theirs = pair
    transport = SocketTransport(ours)
    (tmp_path / "file").write_bytes(b"content")
    theirs.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    theirs.close()
    with pytest.raises(trio.BrokenResourceError):
        await transport.receive()
    with pytest.raises(trio.BrokenResourceError):
        transport.send_now(b"x")
    with pytest.raises(trio.BrokenResourceError):
        await transport.send(b"x")
    with (tmp_path / "file").open("rb") as file, pytest.raises(trio.BrokenResourceError):
        transport.send_file(file.fileno(), 0, 7)
    await transport.end_sending()
    await transport.close()


async def test_a_reset_drops_what_is_under_way_and_wakes_who_waits(pair: Pair) -> None:
    ours, theirs = pair
    transport = SocketTransport(ours)
    fill(transport)
    woken = []

    async def wait(what: str) -> None:
        with pytest.raises((trio.ClosedResourceError, trio.BrokenResourceError)):
            await (transport.receive() if what == "read" else transport.wait_writable())
        woken.append(what)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(wait, "read")
        nursery.start_soon(wait, "write")
        await trio.testing.wait_all_tasks_blocked()
        transport.reset()
    assert sorted(woken) == ["read", "write"]
    with pytest.raises(ConnectionResetError):
        read_to_the_end(theirs)
    for call in (transport.receive, transport.wait_writable):
        with pytest.raises((trio.ClosedResourceError, trio.BrokenResourceError)):
            await call()
    with pytest.raises(trio.BrokenResourceError):
        transport.send_now(b"x")
    transport.reset()
    await transport.close()


async def test_who_has_always_something_to_say_lets_others_have_a_turn(pair: Pair) -> None:
    transport = SocketTransport(pair[0])
    turns = 0

    async def other() -> None:
        nonlocal turns
        while True:
            turns += 1
            await trio.lowlevel.checkpoint()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(other)
        for _ in range(1_000):
            pair[1].sendall(b"more")
            await transport.receive()
        assert turns > 50
        nursery.cancel_scope.cancel()


async def test_any_stream_will_do() -> None:
    ours, theirs = trio.testing.memory_stream_pair()
    transport = StreamTransport(ours)
    assert transport.socket_fd is None
    await theirs.send_all(b"question")
    assert await transport.receive() == b"question"
    assert transport.send_now(b"nothing of it") == 0
    await transport.wait_writable()
    await transport.send(b"answer")
    assert await theirs.receive_some() == b"answer"
    with pytest.raises(RuntimeError):
        transport.send_file(0, 0, 1)
    await transport.end_sending()
    assert await theirs.receive_some() == b""
    transport.reset()
    with pytest.raises(trio.ClosedResourceError):
        await transport.send(b"x")
    await transport.close()
    with pytest.raises(trio.BrokenResourceError):
        await theirs.send_all(b"x")


# --- the pass ---


def test_each_socket_takes_what_it_can() -> None:
    pairs = [socket.socketpair() for _ in range(20)]
    try:
        for ours, _ in pairs:
            ours.setblocking(False)
        full = pairs[3][0]
        with contextlib.suppress(BlockingIOError):
            while True:
                full.send(bytes(65536))
        pairs[5][1].close()
        fds = [ours.fileno() for ours, _ in pairs]
        fds[7] = 1_000_000
        data = os.urandom(3_000)
        results = fan_out(fds, data, 10**9)
        expected = [3_000] * 20
        expected[3], expected[5], expected[7] = -errno.EAGAIN, -errno.EPIPE, -errno.EBADF
        assert results == expected
        for at, (_, theirs) in enumerate(pairs):
            if at not in (3, 5, 7):
                assert theirs.recv(5_000) == data
    finally:
        for ends in pairs:
            for end in ends:
                end.close()


def test_it_never_waits_even_where_a_socket_would() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.setblocking(True)
        data = bytes(50 << 20)
        [sent] = fan_out([ours.fileno()], data, 10**9)
        assert 0 < sent < len(data)
        assert fan_out([ours.fileno()], data, 10**9) == [-errno.EAGAIN]


@pytest.mark.parametrize("budget", [0, -1, 10**12])
def test_its_budget(budget: int) -> None:
    """Some are always served; the clock is looked at now and then."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        results = fan_out([ours.fileno()] * 100, b"x", budget)
        assert len(results) == (100 if budget > 0 else 8)
        assert theirs.recv(1_000) == b"x" * len(results)


@pytest.mark.parametrize(
    "data", [b"abc", bytearray(b"abc"), memoryview(b"xabcx")[1:4]], ids=["bytes", "array", "view"]
)
def test_any_contiguous_bytes(data: bytes | bytearray | memoryview) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        assert fan_out([ours.fileno()], data, 10**9) == [3]
        assert theirs.recv(10) == b"abc"


def test_what_it_refuses() -> None:
    assert fan_out([], b"abc", 10**9) == []
    with pytest.raises(BufferError):
        fan_out([1], memoryview(b"abcdef")[::2], 10**9)
    with pytest.raises(TypeError):
        fan_out([1], "text", 10**9)  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        fan_out(["no descriptor"], b"abc", 10**9)  # type: ignore[list-item]
    with pytest.raises(OverflowError):
        fan_out([1 << 40], b"abc", 10**9)
