"""Listeners, limits and lifetimes: what the server is beyond one session."""

from __future__ import annotations

import contextlib
import errno
import functools
import logging
import os
import socket
import subprocess
import sys
import threading
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from datastreamer.errors import ListenFailed
from datastreamer.server.server import Server
from datastreamer.server.streaming.catch_up import State
from datastreamer.service.serve import serve
from datastreamer.storage.stream import DataStream
from datastreamer.transport.listeners import address_of, open_listeners
from tests.network import model as wire
from tests.network.fixtures import Peer, append, over_loopback
from tests.network.model import OK, Model


def modelled(stream: DataStream) -> Model:
    return Model(Path(stream.path).read_bytes())


async def connect(address: tuple[str, int]) -> Peer:
    return Peer(await trio.open_tcp_stream(*address))


async def test_serve_gives_its_addresses_and_serves_on_each(stream: DataStream) -> None:
    async with trio.open_nursery() as nursery:
        addresses = await nursery.start(functools.partial(serve, stream, port=0))
        assert len({port for _, port in addresses}) == 1
        assert {host for host, _ in addresses} <= {"0.0.0.0", "::"}
        for host, port in addresses:
            peer = await connect(({"0.0.0.0": "127.0.0.1", "::": "::1"}[host], port))
            await peer.ask(wire.header(), OK + modelled(stream).header())
            await peer.close()
        nursery.cancel_scope.cancel()
    for host, port in addresses:
        with pytest.raises(OSError, match=r"refused|all attempts"):
            await trio.open_tcp_stream({"0.0.0.0": "127.0.0.1", "::": "::1"}[host], port)


async def test_a_port_in_use_is_said_before_anything_starts(stream: DataStream) -> None:
    [taken] = open_listeners("127.0.0.1", 0)
    with taken:
        port = taken.getsockname()[1]
        with pytest.raises(ListenFailed, match=rf"cannot listen on 127\.0\.0\.1:{port}: .*in use"):
            await serve(stream, host="127.0.0.1", port=port)


@pytest.mark.parametrize(
    ("host", "port"),
    [("no.such.host.invalid", 0), ("192.0.2.1", 0), ("127.0.0.1", 70_000), ("x" * 70, 0)],
)
def test_addresses_that_cannot_be_had(host: str, port: int) -> None:
    with pytest.raises(ListenFailed, match=f"cannot listen on {host}:{port}: ") as caught:
        open_listeners(host, port)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("error", [errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL])
def test_a_machine_without_ipv6(monkeypatch: pytest.MonkeyPatch, error: int) -> None:
    real = socket.socket

    class Without(real):  # type: ignore[misc, valid-type]
        def __init__(self, family: int, *rest: int) -> None:
            if family == socket.AF_INET6 and error == errno.EAFNOSUPPORT:
                raise OSError(error, os.strerror(error))
            super().__init__(family, *rest)

        def bind(self, address: tuple[object, ...]) -> None:
            if self.family == socket.AF_INET6:
                raise OSError(error, os.strerror(error))
            super().bind(address)

    monkeypatch.setattr(socket, "socket", Without)
    listeners = open_listeners(None, 0)
    assert [listener.family for listener in listeners] == [socket.AF_INET]
    for listener in listeners:
        listener.close()
    if error == errno.EAFNOSUPPORT:
        with pytest.raises(ListenFailed, match="this machine has no IPv4 or IPv6 address"):
            open_listeners("::1", 0)


def test_the_names_of_addresses() -> None:
    assert address_of(("127.0.0.1", 5)) == "127.0.0.1:5"
    assert address_of(("::1", 5, 0, 0)) == "[::1]:5"
    assert address_of("/run/socket") == "/run/socket"
    assert address_of("") == "local"


async def test_a_unix_socket_serves_too(stream: DataStream, tmp_path: Path) -> None:
    append(stream, (1, b"x" * 500_000))
    name = str(tmp_path / "socket")
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(name)
    listener.listen()  # a blocking one
    async with trio.open_nursery() as nursery:
        await nursery.start(functools.partial(serve, stream, listeners=[listener]))
        peer = Peer(await trio.open_unix_socket(name))
        await peer.ask(wire.start(0), OK + modelled(stream).packed())
        await wait_all_tasks_blocked()
        append(stream, (1, b"live"))
        await peer.expect(modelled(stream).packed(1))
        await peer.close()
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize("limit", [1, 3, 7])
async def test_no_more_clients_than_the_limit(
    stream: DataStream, caplog: pytest.LogCaptureFixture, limit: int
) -> None:
    """All of them knock at once; later ones come in as others leave."""
    async with over_loopback(stream, max_clients=limit) as rig, AsyncExitStack() as stack:
        knocking = [socket.create_connection(rig.address) for _ in range(8)]
        peers = []
        for made in knocking:
            made.setblocking(False)
            peers.append(Peer(trio.SocketStream(trio.socket.from_stdlib_socket(made))))
            stack.push_async_callback(peers[-1].close)
        await wait_all_tasks_blocked(0.002)
        assert len(rig.server.sessions) == limit
        answered = []
        for peer in peers:
            try:
                await peer.ask(wire.header(), OK + modelled(stream).header())
                answered.append(peer)
            except (AssertionError, trio.BrokenResourceError):
                pass
        assert len(answered) == limit
        assert rig.server.counts.refused == {"max_clients": 8 - limit}
        assert rig.server.counts.accepted == limit
        # One line for all of them; a later line counts the rest.
        [refusal] = [r for r in caplog.records if r.levelno == logging.WARNING]
        assert f"refused: {limit} client" in refusal.getMessage()
        assert "connected, which is the limit" in refusal.getMessage()
        for peer in answered:
            await peer.close()
            await wait_all_tasks_blocked(0.002)
            async with rig.client() as late:
                await late.ask(wire.header(), OK + modelled(stream).header())
            await wait_all_tasks_blocked(0.002)


OUT_OF_DESCRIPTORS = """
import logging, resource, sys
import trio
from datastreamer.service.serve import serve
from datastreamer.storage.stream import DataStream

async def main():
    with DataStream.create(sys.argv[1], sync="os", index="memory") as stream:
        async with trio.open_nursery() as nursery:
            async def start(task_status):
                await serve(stream, host="127.0.0.1", port=0, task_status=task_status)
            [address] = await nursery.start(start)
            used = len(__import__("os").listdir("/proc/self/fd"))
            resource.setrlimit(resource.RLIMIT_NOFILE, (used + 10, used + 10))
            print(address[1], flush=True)
            await trio.to_thread.run_sync(sys.stdin.read)
            nursery.cancel_scope.cancel()

logging.basicConfig(level="WARNING")
trio.run(main)
"""


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="counts descriptors in /proc")
def test_out_of_descriptors(path: Path) -> None:
    """One line in the log; those inside are served; those outside come in as others leave."""
    process = subprocess.Popen(
        [sys.executable, "-W", "error", "-c", OUT_OF_DESCRIPTORS, str(path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert process.stdout is not None
    assert process.stderr is not None
    clients = []
    try:
        address = ("127.0.0.1", int(process.stdout.readline()))
        for _ in range(40):
            made = socket.create_connection(address, timeout=20)
            made.sendall(wire.header())
            clients.append(made)
        first_line = process.stderr.readline()
        for made in clients:  # accepted in the order they came
            assert made.recv(11) == OK
            assert made.recv(38)[0] == 1
            made.close()
    finally:
        for made in clients:
            made.close()
        _, said = process.communicate(timeout=20)
    assert process.returncode == 0, said
    # Once a time that it runs out, not ten times a second.
    assert len(said.strip().splitlines()) < 10, said
    assert "cannot accept connections: Too many open files" in first_line


async def test_errors_of_accept_that_pass(stream: DataStream) -> None:
    class Troubled:
        """A listener whose next connections were closed before they were accepted."""

        def __init__(self, real: socket.socket) -> None:
            self.real = real
            self.errors = [errno.ECONNABORTED, errno.EPROTO, errno.ENETDOWN, errno.EPERM] * 5

        def accept(self) -> tuple[socket.socket, object]:
            if self.errors:
                code = self.errors.pop()
                raise OSError(code, os.strerror(code))
            return self.real.accept()

        def __getattr__(self, name: str) -> object:
            return getattr(self.real, name)

    [real] = open_listeners("127.0.0.1", 0)
    async with trio.open_nursery() as nursery:
        server = Server(stream)
        [address] = await nursery.start(server.run, [Troubled(real)])
        peer = await connect(address)
        await peer.ask(wire.header(), OK + modelled(stream).header())
        await peer.close()
        nursery.cancel_scope.cancel()


async def test_a_listener_that_is_shut_down_is_an_error_not_a_loop(stream: DataStream) -> None:
    [listener] = open_listeners("127.0.0.1", 0)
    with trio.fail_after(5), pytest.RaisesGroup(OSError, flatten_subgroups=True):
        async with trio.open_nursery() as nursery:
            await nursery.start(Server(stream).run, [listener])
            listener.shutdown(socket.SHUT_RDWR)


async def test_cancelling_closes_every_connection(stream: DataStream) -> None:
    append(stream, (1, b"first"))
    peers = []
    async with over_loopback(stream) as rig:
        for request in (b"", wire.header(), wire.start(0), wire.start(1), wire.entry(0)[:9]):
            peer = await connect(rig.address)
            await peer.send(request)
            peers.append(peer)
        await wait_all_tasks_blocked(0.002)
        assert len(rig.server.sessions) == len(peers)
        states = {session.state for session in rig.server.sessions}
        assert states == {State.IDLE, State.LIVE}
    for peer in peers:
        await peer.rest()
        await peer.close()


async def test_a_server_after_another_on_one_stream(stream: DataStream) -> None:
    """Wakers and callbacks of the first are removed with it."""
    for turn in range(3):
        async with over_loopback(stream) as rig, rig.client() as peer:
            await peer.ask(wire.start(turn), OK)
            append(stream, (1, b"%d" % turn))
            await peer.expect(modelled(stream).packed(turn))
    assert stream._file.inside_wakers == []
    assert stream.parts.feed._listeners == []
    append(stream, (1, b"no listener"))
    stream.truncate(1)


async def test_two_servers_of_one_stream(stream: DataStream) -> None:
    async with (
        over_loopback(stream) as one,
        over_loopback(stream) as two,
        one.client() as first,
        two.client() as second,
    ):
        for peer in (first, second):
            await peer.ask(wire.start(0), OK)
        for turn in range(5):
            append(stream, (1, b"%d" % turn))
            for peer in (first, second):
                await peer.expect(modelled(stream).packed(turn))
        stream.truncate(2)
        for peer in (first, second):
            await peer.was_reset()


async def test_drain_waits_until_all_is_sent(stream: DataStream) -> None:
    async with over_loopback(stream, receive_buffer=4096) as rig, AsyncExitStack() as stack:
        lazy, live, idle = [await stack.enter_async_context(rig.client()) for _ in range(3)]
        assert await rig.server.drain(0)
        await live.ask(wire.start(0), OK)
        await lazy.ask(wire.start(0), OK)
        await idle.ask(wire.header(), OK + modelled(stream).header())
        append(stream, *[(1, bytes(100_000))] * 30)
        whole = modelled(stream).packed()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(live.expect, whole)
        assert not await rig.server.drain(0.05)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(lazy.expect, whole)
            assert await rig.server.drain(10)
        assert await rig.server.drain(0)


async def test_a_commit_is_sent_without_waiting_for_the_poll(
    stream: DataStream, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("datastreamer.server.streaming.broadcast._LOOK_SECONDS", 1_000)
    async with over_loopback(stream) as rig, rig.client() as peer:
        await peer.ask(wire.start(0), OK)
        for turn in range(50):
            await wait_all_tasks_blocked()
            if turn % 2:
                append(stream, (1, b"%d" % turn))
            else:
                await trio.to_thread.run_sync(append, stream, (1, b"%d" % turn))
            await peer.expect(modelled(stream).packed(turn))


async def test_servers_come_and_go_under_a_writer(stream: DataStream) -> None:
    """The writer never waits for one that has ended, nor writes to its descriptors."""
    over = threading.Event()
    failed: list[BaseException] = []
    number = 0

    def write() -> None:
        nonlocal number
        try:
            while not over.is_set():
                append(stream, *[(1, b"%d" % number)] * 3)
                number += 1
                if number % 3 == 0:
                    stream.truncate(stream.total_entries - 2)
                if number % 5 == 0:
                    stream.update_entry(0, 1, b"0")
        except BaseException as error:
            failed.append(error)
            raise

    append(stream, (1, b"0"))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(trio.to_thread.run_sync, write)
        try:
            for _ in range(25):
                async with over_loopback(stream) as rig, rig.client() as peer:
                    await peer.ask(wire.entry(0), OK + wire.pack(0, 1, b"0", packet=0xFE))
                    with contextlib.suppress(trio.BrokenResourceError):  # truncated just then
                        await peer.ask(wire.start(0), OK + wire.pack(0, 1, b"0"))
                readers, writers = zip(*[os.pipe() for _ in range(8)], strict=True)
                began = number
                while number < began + 3:
                    await trio.lowlevel.checkpoint()
                for fd in readers:
                    os.set_blocking(fd, False)
                    with pytest.raises(BlockingIOError):
                        os.read(fd, 8)
                for fd in (*readers, *writers):
                    os.close(fd)
        finally:
            over.set()
    assert not failed
