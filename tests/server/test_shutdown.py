"""Shutdown: no client is accepted, queries are answered, streams end between entries."""

from __future__ import annotations

import logging
import socket
from contextlib import AsyncExitStack, suppress
from pathlib import Path

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from datastreamer.server import server as server_module
from datastreamer.server.limits import Limits
from datastreamer.server.server import Server
from datastreamer.server.streaming import broadcast as live_module
from datastreamer.service.serve import serve
from datastreamer.storage.stream import DataStream
from datastreamer.transport.listeners import open_listeners
from tests.network import model as wire
from tests.network.fixtures import Open, Peer, append, in_memory, over_loopback, over_unix, until
from tests.network.model import OK, Model

SMALL_BUFFER = 4096


def modelled(stream: DataStream) -> Model:
    return Model(Path(stream.path).read_bytes())


@pytest.mark.parametrize("way", ["tcp", "tls", "unix"])
async def test_all_clients_receive_all_and_then_the_end(
    stream: DataStream, way: str, secured: Open
) -> None:
    """Idle, live, behind by much, just connected: each connection is closed, without a wait."""
    append(stream, *[(1, bytes([n]) * 90_000) for n in range(100)])
    got: dict[str, bytes] = {}

    async def read(name: str, peer: Peer) -> None:
        got[name] = await peer.rest()
        await peer.close()

    open_server = {"tcp": over_loopback, "tls": secured, "unix": over_unix}[way]
    async with open_server(stream, receive_buffer=SMALL_BUFFER) as rig, AsyncExitStack() as stack:
        names = ("silent", "idle", "live", "behind", "stopped")
        peers = {name: await stack.enter_async_context(rig.client()) for name in names}
        await peers["idle"].ask(wire.header(), OK + modelled(stream).header())
        await peers["live"].ask(wire.start(100), OK)
        await peers["stopped"].ask(wire.start(100) + wire.stop(), OK + OK)
        await peers["behind"].ask(wire.start(0), OK)
        await wait_all_tasks_blocked(0.002)
        append(stream, (2, b"the last"))
        async with trio.open_nursery() as nursery:
            for name, peer in peers.items():
                nursery.start_soon(read, name, peer)
            assert await rig.server.finish(10)
        model = modelled(stream)
        assert got["behind"] == model.packed()
        assert got["live"] == model.packed(100)
        assert got["silent"] == got["idle"] == got["stopped"] == b""
        assert not rig.server.sessions
        assert rig.server.counts.ended == {"server_ended": 5}
        if way != "unix":
            with pytest.raises(OSError, match=r"refused|all attempts"):
                await trio.open_tcp_stream(*rig.address)


async def test_run_returns_then(stream: DataStream) -> None:
    listeners = open_listeners("127.0.0.1", 0)
    async with trio.open_nursery() as nursery:
        server = Server(stream)
        await nursery.start(server.run, listeners)
        assert await server.finish()
    assert [listener.fileno() for listener in listeners] == [-1]


@pytest.mark.parametrize("cancelled", [False, True])
async def test_serve_ends_when_its_event_is_set(stream: DataStream, cancelled: bool) -> None:
    append(stream, *[(1, bytes([n]) * 90_000) for n in range(100)])
    stop, ended = trio.Event(), trio.Event()

    async def run(task_status: trio.TaskStatus[list[tuple[str, int]]]) -> None:
        with trio.CancelScope() as scope:
            if cancelled:
                nursery.start_soon(cancel_after_stop, scope)
            limits = Limits(grace=30)
            await serve(
                stream, host="127.0.0.1", port=0, limits=limits, stop=stop, task_status=task_status
            )
        assert scope.cancelled_caught is cancelled
        ended.set()

    async def cancel_after_stop(scope: trio.CancelScope) -> None:
        await stop.wait()
        await wait_all_tasks_blocked(0.002)
        scope.cancel()

    async with trio.open_nursery() as nursery:
        [address] = await nursery.start(run)
        client = await trio.open_tcp_stream(*address)
        if cancelled:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SMALL_BUFFER)
        await client.send_all(wire.start(0))
        await wait_all_tasks_blocked(0.002)
        stop.set()
        if cancelled:
            await ended.wait()  # though the client has received almost nothing
        received = b""
        with suppress(trio.BrokenResourceError):
            while data := await client.receive_some():
                received += data
        await ended.wait()
        await client.aclose()
    assert (received == OK + modelled(stream).packed()) is not cancelled


async def test_what_was_asked_is_answered(stream: DataStream) -> None:
    append(stream, *[(1, bytes([n]) * 1_000) for n in range(50)])
    model = modelled(stream)
    asked = [n * 7 % 50 for n in range(300)]
    async with (
        over_loopback(stream, receive_buffer=SMALL_BUFFER) as rig,
        rig.client() as peer,
        trio.open_nursery() as nursery,
    ):
        nursery.start_soon(peer.send, b"".join(map(wire.entry, asked)))
        await until(lambda: any(each.blocked for each in rig.server.sessions))
        [session] = rig.server.sessions
        nursery.start_soon(rig.server.finish, 10)
        await until(lambda: rig.server.unready)
        await wait_all_tasks_blocked(0.002)
        taken = session.taken
        for number in asked[:taken]:
            await peer.expect(OK + wire.pack(number, 1, bytes([number]) * 1_000, packet=0xFE))
        rest = await peer.rest()
        await peer.close()
    whole = [OK + b"\xfe" + model.packed(number, number + 1)[1:] for number in asked]
    assert b"".join(whole[taken:]).startswith(rest)
    assert len(rest) % len(whole[0]) == 0, "an answer was cut off"


@pytest.mark.parametrize("size", [200, 70_000, 900_000], ids=["small", "medium", "large"])
@pytest.mark.parametrize("total", [3_000_000, 9_000_000], ids=["by copy", "by sendfile"])
async def test_who_cannot_take_all_ends_between_two_entries(
    stream: DataStream,
    size: int,
    total: int,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # 0.08 s for all, the rest of 2 s for the end of an entry.
    monkeypatch.setattr(server_module, "_UNHURRIED", 0.04)
    append(stream, *[(1, bytes([n % 251]) * size) for n in range(total // size)])
    got = bytearray()
    async with over_loopback(stream, receive_buffer=SMALL_BUFFER) as rig, rig.client() as slow:
        await slow.ask(wire.start(0), OK)
        await wait_all_tasks_blocked(0.002)

        async def read_slowly() -> None:
            # The hurry begins when it has a part of the stream; from then on it reads.
            with trio.move_on_after(0.3):
                await trio.Event().wait()
            got.extend(await slow.rest())
            await slow.close()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(read_slowly)
            assert not await rig.server.finish(2)
    entries = len(got) // (17 + size)
    assert 0 < entries < total // size
    assert bytes(got) == modelled(stream).packed(0, entries)
    [line] = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert line == "1 clients did not receive all committed entries within 2 s"


async def test_who_reads_nothing_is_cut_off_after_the_grace(stream: DataStream) -> None:
    append(stream, *[(1, bytes(100_000))] * 100)
    async with over_loopback(stream, receive_buffer=SMALL_BUFFER) as rig, rig.client() as lazy:
        await lazy.ask(wire.start(0), OK)
        began = trio.current_time()
        assert not await rig.server.finish(0.3)
        assert 0.3 <= trio.current_time() - began < rig.server.limits.grace
        await wait_all_tasks_blocked(0.002)
        assert not rig.server.sessions


async def test_the_grace_is_not_waited_for_if_no_client_needs_it(
    stream: DataStream, autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live_module, "_LOOK_SECONDS", 1_000_000)
    async with in_memory(stream, patience=1e6, grace=10_000) as rig, rig.client() as peer:
        await peer.ask(wire.start(0), OK)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(rig.server.finish)
            await peer.ended()
            await peer.close()
        assert trio.current_time() < 1


async def test_a_client_that_does_not_close_is_closed_after_a_second(
    stream: DataStream, autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live_module, "_LOOK_SECONDS", 1_000_000)
    async with in_memory(stream, patience=1e6, grace=10_000) as rig, AsyncExitStack() as stack:
        for request in (b"", wire.start(0), wire.header() * 3, wire.header()[:7]):
            peer = await stack.enter_async_context(rig.client())
            await peer.send(request)
        await wait_all_tasks_blocked()
        began = trio.current_time()
        await rig.server.finish()
        assert 1 <= trio.current_time() - began < 2


@pytest.mark.parametrize(
    "request_", [wire.stop(), wire.unknown() * 3, wire.start(0), wire.header()]
)
async def test_commands_while_the_server_ends(stream: DataStream, request_: bytes) -> None:
    """Whatever comes crosswise: whole packets, then the end."""
    append(stream, *[(1, bytes([n]) * 90_000) for n in range(60)])
    async with over_loopback(stream, receive_buffer=SMALL_BUFFER) as rig, rig.client() as peer:
        await peer.ask(wire.start(0), OK)
        await wait_all_tasks_blocked(0.002)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(rig.server.finish, 10)
            await wait_all_tasks_blocked(0.002)
            await peer.send(request_)
            got = await peer.rest()
            await peer.close()
    entries = 0
    packed = modelled(stream).packed()
    at = 0
    while at < len(got):
        size = int.from_bytes(got[at + 1 : at + 5], "big")
        if got[at] == 2:
            assert got[at : at + size] == packed[entries * 90_017 : (entries + 1) * 90_017]
            entries += 1
        else:
            assert got[at] == 0xFF
        at += size
    assert at == len(got)
    assert entries == 60 or request_ != wire.unknown() * 3


async def test_connections_that_come_while_it_ends(stream: DataStream) -> None:
    """Let in before the end began, not served yet: said goodbye as the others."""
    listeners = open_listeners("127.0.0.1", 0)
    address = listeners[0].getsockname()
    async with trio.open_nursery() as nursery:
        server = Server(stream, limits=Limits(grace=5))
        await nursery.start(server.run, listeners)
        knocking = [socket.create_connection(address) for _ in range(20)]
        async with trio.open_nursery() as ending:
            ending.start_soon(server.finish)
            for made in knocking:
                made.settimeout(10)
                with suppress(ConnectionResetError):
                    assert await trio.to_thread.run_sync(made.recv, 1) == b""
                made.close()


async def test_followers_get_what_is_committed_when_it_ends(stream: DataStream) -> None:
    """What the pass had no time for yet is sent, too."""
    with DataStream.open(stream.path, follow=True, index="memory") as follower:
        async with over_loopback(follower) as rig, rig.client() as peer:
            await peer.ask(wire.start(0), OK)
            await wait_all_tasks_blocked(0.002)
            append(stream, *[(1, bytes([n]) * 30_000) for n in range(100)])
            began = trio.current_time()
            async with trio.open_nursery() as nursery:
                nursery.start_soon(rig.server.finish, 60)
                assert await peer.rest() == modelled(stream).packed()
                await peer.close()
            assert trio.current_time() - began < 50, "it waited for the hurry"
