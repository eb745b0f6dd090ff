"""Many clients of a server process: what they cost it, and what those that stall cost others.

The server is a process of its own, so that its memory is its own; the clients are plain
sockets here, as many as descriptors allow.
"""

from __future__ import annotations

import faulthandler
import os
import random
import resource
import selectors
import socket
import struct
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from datastreamer.server.limits import room_for_clients
from datastreamer.storage.stream import DataStream
from tests.cli.process import running
from tests.network import model as wire
from tests.network.fixtures import append
from tests.network.model import OK, Model

pytestmark = pytest.mark.skipif(
    not os.path.exists("/proc/self/statm"), reason="reads memory from /proc"
)
MIB = 1 << 20
HEADER_ANSWER = 49
# Connections of one address to one port.
PER_ADDRESS = 15_000


class Crowd:
    """Clients of the server with process id `pid`, on `port`."""

    def __init__(self, pid: int, port: int, stack: ExitStack) -> None:
        self.pid = pid
        self.port = port
        self._stack = stack
        self._made = 0

    def memory(self) -> int:
        """Bytes of the server's memory that are its own."""
        resident, shared = Path(f"/proc/{self.pid}/statm").read_text().split()[1:3]
        return (int(resident) - int(shared)) * resource.getpagesize()

    def connect(self, *, small_buffer: bool = False) -> socket.socket:
        made = self._stack.enter_context(socket.socket())
        made.settimeout(30)
        if small_buffer:
            made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        # Ports of one address run out.
        made.bind((f"127.0.0.{1 + self._made // PER_ADDRESS}", 0))
        self._made += 1
        made.connect(("127.0.0.1", self.port))
        return made


def ask(client: socket.socket, request: bytes, size: int) -> bytes:
    client.sendall(request)
    got = b""
    while len(got) < size:
        more = client.recv(size - len(got))
        assert more, "the connection ended"
        got += more
    return got


@contextmanager
def crowd(path: Path) -> Iterator[Crowd]:
    command = ("serve", path, "--follow", "--host", "127.0.0.1", "--port", "0")
    with running(*command, cwd=path.parent) as serving, ExitStack() as stack:
        yield Crowd(serving.process.pid, serving.port(), stack)


@pytest.fixture
def writer(path: Path) -> Iterator[DataStream]:
    with DataStream.create(path, sync="os") as made:
        yield made


@pytest.mark.slow
def test_what_an_idle_client_costs(writer: DataStream, path: Path) -> None:
    """Ten thousand clients in less than 250 MB, if the process has descriptors for them."""
    append(writer, (1, b"x"))
    count = room_for_clients(10_000)[0]
    with crowd(path) as clients:
        for _ in range(20):
            ask(clients.connect(), wire.header(), HEADER_ANSWER)
        before = clients.memory()
        for turn in range(count - 20):
            client = clients.connect()
            if turn % 4:
                ask(client, wire.header(), HEADER_ANSWER)
            else:
                ask(client, wire.start(1), len(OK))
        grown = clients.memory() - before
        each = grown / (count - 20)
        print(f"{count} clients, {grown / 1e6:.0f} MB more, {each / 1000:.1f} kB each")
        assert each < 20_000
        assert before + grown < 250e6
        # And they are served.
        append(writer, (2, b"live"))
        entry = Model(path.read_bytes()).packed(1)
        late = clients.connect() if count < 10_000 else client
        assert ask(late, wire.start(1), len(OK + entry)).endswith(entry)


@pytest.mark.parametrize(
    ("stalled", "reading"),
    [(1, 99), pytest.param(2_000, 100, marks=pytest.mark.slow)],
)
def test_stalled_clients_cost_the_others_nothing(
    writer: DataStream, path: Path, stalled: int, reading: int
) -> None:
    """Each client that reads gets every entry, in order; the server keeps nothing for the rest."""
    if room_for_clients(stalled + reading)[0] < stalled + reading:
        pytest.skip("too few descriptors")
    append(writer, *[(1, bytes([n]) * 30_000) for n in range(20)])
    with crowd(path) as clients:
        for _ in range(stalled):
            ask(clients.connect(small_buffer=True), wire.start(0), len(OK))
        readers = [clients.connect() for _ in range(reading)]
        for reader in readers:
            ask(reader, wire.start(20), len(OK))
        first, before = 20, 0
        for turn in range(40):
            news = [(turn, bytes([n]) * 25_000) for n in range(20)]
            append(writer, *news)
            read_all(readers, b"".join(wire.pack(first + n, *new) for n, new in enumerate(news)))
            first += 20
            before = before or clients.memory()
        grown = clients.memory() - before
        print(f"{stalled} stalled: {grown / 1e6:+.1f} MB while each reader got 20 MB")
        assert grown < 8 * MIB


def read_all(readers: list[socket.socket], expected: bytes) -> None:
    """Each reads `expected`, all at the same time."""
    left = dict.fromkeys(readers, 0)
    with selectors.DefaultSelector() as ready:
        for reader in readers:
            ready.register(reader, selectors.EVENT_READ)
        while left:
            events = ready.select(30)
            assert events, f"{len(left)} clients wait for entries"
            for key, _ in events:
                reader = key.fileobj
                assert isinstance(reader, socket.socket)
                at = left[reader]
                got = reader.recv(len(expected) - at)
                assert got == expected[at : at + len(got)]
                assert got
                left[reader] += len(got)
                if left[reader] == len(expected):
                    ready.unregister(reader)
                    del left[reader]


def churn(clients: Crowd, count: int, choose: random.Random) -> None:
    """Clients that come, ask, stream, stall and go, some without a word."""
    open_ones: list[socket.socket] = []
    for _ in range(count):
        client = clients.connect(small_buffer=choose.random() < 0.3)
        open_ones.append(client)
        match choose.randrange(5):
            case 0:
                ask(client, wire.header(), HEADER_ANSWER)
            case 1:
                client.sendall(wire.entry(3)[: choose.randrange(25)])
            case 2:
                ask(client, wire.start(0), len(OK))
            case 3:
                ask(client, wire.start(0), 100_000)
            case _:
                client.sendall(wire.stop())
        if len(open_ones) > 100:
            goes = open_ones.pop(choose.randrange(len(open_ones)))
            if choose.random() < 0.5:
                goes.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            goes.close()
    for client in open_ones:
        client.close()


@pytest.mark.parametrize(
    "count",
    [
        pytest.param(6_000, marks=pytest.mark.slow),
        pytest.param(1_500_000, marks=pytest.mark.soak),
    ],
)
def test_memory_is_flat_while_clients_come_and_go(
    writer: DataStream, path: Path, count: int
) -> None:
    if count > 10_000:
        faulthandler.cancel_dump_traceback_later()  # this one is meant to take long
    append(writer, *[(1, bytes([n]) * 20_000) for n in range(200)])
    choose = random.Random(7)

    with crowd(path) as clients:
        churn(clients, count // 3, choose)
        before = clients.memory()
        churn(clients, count - count // 3, choose)
        grown = clients.memory() - before
        print(f"{count} clients, {grown / 1e6:+.1f} MB")
        assert grown < 6 * MIB
        ask(clients.connect(), wire.header(), HEADER_ANSWER)
