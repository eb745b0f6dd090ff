"""Lifetimes: who is ended, when, and who is not."""

from __future__ import annotations

import logging
import socket
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from datastreamer.server import timeouts as guard_module
from datastreamer.server.streaming import broadcast as live_module
from datastreamer.storage.stream import DataStream
from datastreamer.transport.tcp_info import SERVER_KEEPALIVE, TcpInfo, keep_alive, tcp_info
from tests.network import model as wire
from tests.network.fixtures import Rig, append, in_memory, over_loopback
from tests.network.model import OK, Model
from tests.network.vanishing import linux, vanish

SMALL_BUFFER = 4096


@pytest.fixture
def clock(autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch) -> MockClock:
    """Jumps; the pass does not look by itself."""
    monkeypatch.setattr(live_module, "_LOOK_SECONDS", 1_000_000)
    return autojump_clock


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """The guard looks a hundred times as often: for real sockets, in real time."""
    monkeypatch.setattr(guard_module, "_LOOK_SECONDS", 0.01)


def modelled(stream: DataStream) -> Model:
    return Model(Path(stream.path).read_bytes())


def ends(caplog: pytest.LogCaptureFixture) -> Iterator[str]:
    for record in caplog.records:
        if record.levelno == logging.INFO and "connection ended" in record.getMessage():
            yield record.getMessage().partition("connection ended: ")[2]


async def test_who_says_nothing_after_the_connect(
    stream: DataStream, clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    async with in_memory(stream, patience=1e4) as rig, rig.client() as peer:
        began = trio.current_time()
        await peer.ended()
        assert 60 <= trio.current_time() - began < 62
        assert rig.server.counts.ended == {"handshake_timeout": 1}
    assert list(ends(caplog)) == ["it has sent nothing for 60 s since it connected"]


async def test_who_neither_streams_nor_asks(
    stream: DataStream, clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    header = OK + stream.header.pack()
    async with (
        in_memory(stream, patience=1e4) as rig,
        rig.client() as idle,
        rig.client() as asks,
        rig.client() as streams,
        rig.client() as stopped,
    ):
        await idle.ask(wire.header(), header)
        await streams.ask(wire.start(0), OK)
        await stopped.ask(wire.start(0), OK)
        for _ in range(10):
            await asks.ask(wire.header(), header)
            await trio.sleep(100)
        assert rig.server.counts.ended == {"inactivity_timeout": 1}
        assert await idle.rest() == b""
        await stopped.ask(wire.stop(), OK)
        began = trio.current_time()
        await stopped.ended()
        assert 120 <= trio.current_time() - began < 122
        assert rig.server.counts.ended == {"inactivity_timeout": 2 + 1}  # and who asked before
        append(stream, (1, b"still there"))
        await streams.expect(modelled(stream).packed())
    assert set(ends(caplog)) == {"it has neither streamed nor sent a command for 120 s"}


async def test_no_limit_ends_no_client(stream: DataStream, clock: MockClock) -> None:
    none = {"inactivity_timeout": None, "handshake_timeout": None, "command_timeout": 0}
    async with (
        in_memory(stream, patience=1e6, **none) as rig,
        rig.client() as silent,
        rig.client() as half,
    ):
        await half.send(wire.header()[:5])
        await trio.sleep(5_000)
        await half.ask(wire.header()[5:], OK + stream.header.pack())
        await silent.ask(wire.header(), OK + stream.header.pack())


@pytest.mark.parametrize("streaming", [False, True])
async def test_half_a_command_byte_by_byte(
    stream: DataStream, clock: MockClock, streaming: bool
) -> None:
    """Each byte that comes is no new beginning."""
    async with in_memory(stream, patience=1e4) as rig, rig.client() as slow:
        whole, half = wire.header(), wire.bookmark(b"k" * 16)
        if streaming:
            await slow.ask(wire.start(0), OK)
            whole, half = wire.unknown(), wire.stop()
        began, sent = trio.current_time(), 0
        # A whole one before it does not count for it.
        await slow.send(whole)
        with suppress(trio.BrokenResourceError):
            for at in range(len(half)):
                await slow.send(half[at : at + 1])
                await trio.sleep(40 / len(half))
                sent = at + 1
        assert sent < len(half)
        assert 30 <= trio.current_time() - began < 36
        assert rig.server.counts.ended == {"command_timeout": 1}


async def test_commands_one_after_the_other_are_not_half_ones(
    stream: DataStream, clock: MockClock
) -> None:
    """A client whose bytes come late, but come."""
    async with in_memory(stream, patience=1e4) as rig, rig.client() as slow:
        data = wire.header() * 20
        answers = 0
        for at in range(0, len(data), 7):
            await slow.send(data[at : at + 7])
            await trio.sleep(9)
            while answers < min(len(data), at + 7) // 16:
                await slow.expect(OK + stream.header.pack())
                answers += 1
        assert answers == 20


async def test_who_reads_nothing_is_left_alone(stream: DataStream, clock: MockClock) -> None:
    append(stream, *[(1, bytes(100_000))] * 30)
    async with in_memory(stream, patience=1e6) as rig, rig.client() as lazy:
        await lazy.send(wire.start(0))
        await trio.sleep(10_000)
        await lazy.expect(OK + modelled(stream).packed())


@linux
@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("request_", [wire.start(0), wire.entry(0) * 20], ids=["start", "entries"])
async def test_the_write_timeout_is_for_lack_of_progress(
    stream: DataStream, request_: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    """Who takes nothing is ended; who takes a little now and then is not."""
    caplog.set_level(logging.INFO)
    append(stream, *[(1, bytes(400_000))] * 20)
    async with (
        over_loopback(stream, receive_buffer=SMALL_BUFFER, write_timeout=0.4) as rig,
        rig.client() as slow,
        rig.client() as stuck,
    ):
        for peer in (slow, stuck):
            await peer.send(request_)
        began = trio.current_time()
        got = 0
        while trio.current_time() - began < 1.5:
            got += len(await slow.stream.receive_some(3_000))
            with trio.move_on_after(0.01):
                await trio.Event().wait()
        assert rig.server.counts.ended == {"write_timeout": 1}
        assert got < 3_000_000, "it was slow"
        await stuck.was_reset()
        assert await slow.stream.receive_some(1)
    assert list(ends(caplog)) == ["it has received nothing for 0.4 s"]


@pytest.mark.usefixtures("quick")
async def test_who_asks_and_takes_no_answer_is_inactive(stream: DataStream) -> None:
    append(stream, *[(1, bytes(400_000))] * 20)
    async with (
        over_loopback(stream, receive_buffer=SMALL_BUFFER, inactivity_timeout=0.3) as rig,
        rig.client() as peer,
        rig.client() as streams,
    ):
        await peer.send(wire.entry(0) * 100)
        await streams.send(wire.start(0))
        while not rig.server.counts.ended:
            await wait_all_tasks_blocked(0.002)
        assert rig.server.counts.ended == {"inactivity_timeout": 1}
        # Streaming, and as lazy, is another thing.
        await streams.expect(OK + modelled(stream).packed())


async def raw(rig: Rig) -> trio.socket.SocketType:
    made = trio.socket.socket()
    made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SMALL_BUFFER)
    await made.connect(rig.address)
    return made


@linux
@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("streaming", [True, False])
async def test_a_vanished_host_and_one_that_only_does_not_read(
    stream: DataStream, caplog: pytest.LogCaptureFixture, streaming: bool
) -> None:
    caplog.set_level(logging.INFO)
    append(stream, *[(1, bytes(100_000))] * 60)
    limits = {"dead_peer_timeout": 1.0, "inactivity_timeout": None}
    async with (
        over_loopback(stream, receive_buffer=SMALL_BUFFER, **limits) as rig,
        rig.client() as lazy,
    ):
        await lazy.send(wire.start(0))
        with await raw(rig) as dead:
            await dead.send(wire.start(59) if streaming else wire.header())
            got = 0
            while got < (100_000 if streaming else 49):
                got += len(await dead.recv(1 << 20))
            vanish(dead._sock)  # type: ignore[attr-defined]
            if streaming:
                append(stream, (1, b"live"))
            else:
                await dead.send(wire.header())
            began = trio.current_time()
            while not rig.server.counts.ended:
                await wait_all_tasks_blocked(0.002)
            assert trio.current_time() - began > 1
            assert rig.server.counts.ended == {"dead_peer_timeout": 1}
        # More than once as long without reading a byte, and still connected.
        await lazy.expect(OK + modelled(stream).packed())
    assert list(ends(caplog)) == ["its host has not answered for 1 s"]


@linux
def test_what_the_system_knows() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        socket.create_connection(listener.getsockname()) as ours,
    ):
        theirs, _ = listener.accept()
        with theirs:
            ours.sendall(b"x" * 1000)
            theirs.recv(1000)
            info = tcp_info(ours)
            assert info is not None
            assert 1000 <= info.acknowledged <= 1001
            assert not info.outstanding
            assert not info.dead_for(0)
            keep_alive(ours.setsockopt, SERVER_KEEPALIVE)
            assert ours.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
            assert ours.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == 60
            # Which kills living hosts whose window is closed.
            assert ours.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 0
    assert tcp_info(ours) is None
    one, two = socket.socketpair()
    with one, two:
        assert tcp_info(one) is None
        keep_alive(one.setsockopt, SERVER_KEEPALIVE)


@pytest.mark.parametrize(
    ("info", "dead"),
    [
        (TcpInfo(9, 61.0, 5, True), True),
        (TcpInfo(9, 59.0, 5, True), False),
        (TcpInfo(1, 119.0, 5, True), False),  # between two probes of a closed window
        (TcpInfo(0, 500.0, 5, False), False),  # nothing to confirm
    ],
)
def test_when_a_host_is_taken_for_dead(info: TcpInfo, dead: bool) -> None:
    assert info.dead_for(60) is dead


@pytest.mark.usefixtures("quick")
async def test_reasons_are_counted(stream: DataStream) -> None:
    append(stream, (1, b"one"))
    async with over_loopback(stream) as rig:
        async with rig.client() as peer:
            await peer.ask(wire.header(), OK + stream.header.pack())
        async with rig.client() as peer:
            await peer.send(wire.header(7))
            with suppress(trio.BrokenResourceError):
                await peer.rest()
        async with rig.client() as peer:
            await peer.send(wire.stop())
            await peer.rest()
        async with rig.client() as peer:
            await peer.ask(
                wire.entry(0) + wire.start(0), OK + b"\xfe" + wire.pack(0, 1, b"one")[1:]
            )
            await peer.expect(OK + wire.pack(0, 1, b"one"))
            stream.truncate(0)
            await peer.was_reset()
        async with rig.client() as peer:
            await peer.ask(wire.start(0) + wire.unknown(), OK + wire.result(9))
            while len(rig.server.sessions) > 1:
                await wait_all_tasks_blocked()
            counts = rig.server.counts
            assert counts.ended == {"left": 1, "refused": 2, "changed": 1}
    assert counts.ended["server_ended"] + counts.ended["left"] == 2
    assert counts.commands == {"header": 1, "entry": 1, "start": 2}
    assert counts.errors == {"dropped": 1, "already_stopped": 1, "invalid_command": 1}
    assert counts.entries_sent == 1
    sizes = 11 + 38, len(wire.result(2)), 11 + 20, 11 + 20, 11 + len(wire.result(9))
    assert counts.bytes_sent == sum(sizes)
