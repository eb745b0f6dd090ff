"""The network between simulated machines: sockets whose bytes arrive late, or not at all.

Both ends of a connection are real sockets of this process, so the package uses its own transports.
Between them the network receives and sends: with latency, in order, through a bounded window.
A connection may be lost, a link may be cut in one direction or both, and a machine without power
neither answers nor says goodbye. Knows machines by name, and no protocol.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import random
import socket
from collections import deque
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, Protocol, TypeVar

import trio
from trio.lowlevel import wait_readable, wait_writable

from tests.world.trace import Trace

T = TypeVar("T")

# Bytes under way in one direction, and in a socket.
_WINDOW = 48 << 10
_SOCKET_BYTES = 16 << 10
_PIECE = 16 << 10
# After an outage the sender has backed off.
_RETRANSMISSION_SECONDS = 1.0


class Host(Protocol):
    """A machine, as the network knows it."""

    name: str

    @property
    def powered(self) -> bool:
        """Whether its system runs."""

    @property
    def incarnation(self) -> int:
        """Raised whenever its system starts."""

    def accept(self, connection: socket.socket, peer: str) -> bool:
        """Serve a connection; False if no program listens."""


class Network:
    """All links and connections. Everything random comes from `chance`."""

    def __init__(self, nursery: trio.Nursery, chance: random.Random, trace: Trace) -> None:
        self.hosts: dict[str, Host] = {}
        self.connections: list[Connection] = []
        self.trace = trace
        self.chance = chance
        # Directions that carry nothing now, and how slow each host is.
        self._cut: set[tuple[str, str]] = set()
        self._seconds: dict[str, float] = {}
        self._changed = trio.Event()
        self._nursery = nursery
        self._numbers = itertools.count()

    # Faults.

    def cut(self, one: str, other: str, *, both: bool = True) -> None:
        """Nothing gets from `one` to `other`; with `both` nor back."""
        self._cut.add((one, other))
        if both:
            self._cut.add((other, one))

    def join(self, one: str, other: str) -> None:
        self._cut -= {(one, other), (other, one)}
        self._change()

    def slow(self, name: str, seconds: float) -> None:
        """Bytes from and to this host need up to `seconds` longer."""
        self._seconds[name] = seconds

    def heal(self) -> None:
        self._cut.clear()
        self._seconds.clear()
        self._change()

    def lose(self, at: int) -> None:
        """One of the connections is reset, at both ends."""
        if self.connections:
            self.connections[at % len(self.connections)].reset()

    def forget(self, name: str, *, silently: bool) -> None:
        """A program at `name` has ended: its connections are reset, or `silently` its system has
        ended with it."""
        for connection in list(self.connections):
            if name in connection.ends:
                if silently:
                    connection.lose_end(name)
                else:
                    connection.reset()

    def powered(self, name: str) -> None:
        """A machine is on again."""
        self._change()

    def _change(self) -> None:
        self._changed.set()
        self._changed = trio.Event()

    # Traffic.

    def latency(self, source: str, target: str) -> float:
        slow = self._seconds.get(source, 0.0) + self._seconds.get(target, 0.0)
        return 0.0002 + self.chance.random() * (0.004 + slow)

    async def passable(self, source: str, target: str) -> bool:
        """Return when bytes get from `source` to `target`; whether that was at once."""
        waited = False
        while (source, target) in self._cut:
            await self._changed.wait()
            waited = True
        if waited:
            await trio.sleep(self.chance.random() * _RETRANSMISSION_SECONDS)
        return not waited

    async def connect(self, source: str, target: str) -> socket.socket:
        """A connection from one host to the program that listens at another. Raises `OSError`;
        waits while nothing answers."""
        await trio.sleep(self.latency(source, target))
        while not self.hosts[target].powered:
            await self._changed.wait()
        await self.passable(source, target)
        await self.passable(target, source)
        outer, near = _pair()
        far, inner = _pair()
        number = next(self._numbers)
        if not self.hosts[target].accept(inner, f"{source}#{number}"):
            for each in (outer, near, far, inner):
                each.close()
            raise ConnectionRefusedError(errno.ECONNREFUSED, os.strerror(errno.ECONNREFUSED))
        self.trace.note("connect", number, source, target)
        made = Connection(self, number, (source, target), (near, far))
        self.connections.append(made)
        self._nursery.start_soon(made.run)
        try:
            await trio.sleep(self.latency(target, source))
        except BaseException:
            outer.close()
            raise
        return outer


class Connection:
    """One connection: two flows between two sockets that only the network has."""

    def __init__(
        self,
        network: Network,
        number: int,
        ends: tuple[str, str],
        sockets: tuple[socket.socket, socket.socket],
    ) -> None:
        self.network = network
        self.number = number
        self.ends = ends
        self._sockets = sockets
        self._scope = trio.CancelScope()
        # Ends that vanished, with the incarnation of the machine that had them.
        self._lost: dict[str, int] = {}

    async def run(self) -> None:
        near, far = self._sockets
        client, server = self.ends
        try:
            with self._scope:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(Flow(self, client, near, server, far).run)
                    nursery.start_soon(Flow(self, server, far, client, near).run)
        finally:
            for each in self._sockets:
                trio.lowlevel.notify_closing(each)
                each.close()
        self.network.connections.remove(self)
        self.network.trace.note("closed", self.number)

    def reset(self) -> None:
        self.network.trace.note("reset", self.number)
        self._scope.cancel()

    def lose_end(self, name: str) -> None:
        self._lost[name] = self.network.hosts[name].incarnation

    def has_lost(self, name: str) -> bool:
        return name in self._lost

    def is_unknown(self, name: str) -> bool:
        """Whether the machine was started again since, and resets what it does not know."""
        host = self.network.hosts[name]
        return host.powered and host.incarnation != self._lost[name]


class Flow:
    """One direction."""

    def __init__(
        self,
        connection: Connection,
        source: str,
        receiver: socket.socket,
        target: str,
        sender: socket.socket,
    ) -> None:
        self._connection = connection
        self._source, self._target = source, target
        self._receiver, self._sender = receiver, sender
        # Bytes that are under way, and when they arrive; b"" is the end.
        self._sent: deque[tuple[float, bytes]] = deque()
        self._size = 0
        self._moved = trio.Event()

    def _move(self) -> None:
        self._moved.set()
        self._moved = trio.Event()

    async def run(self) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._receive)
            await self._deliver()

    async def _receive(self) -> None:
        network, due = self._connection.network, 0.0
        while True:
            while self._size >= _WINDOW:
                await self._moved.wait()
            data = await _ready(wait_readable, self._receiver, self._receiver.recv, _PIECE)
            if self._connection.has_lost(self._source):
                return  # the system that closed it has no power
            due = max(due, trio.current_time() + network.latency(self._source, self._target))
            self._sent.append((due, data or b""))
            self._size += len(data or b"")
            self._move()
            if not data:
                return

    async def _deliver(self) -> None:
        connection = self._connection
        network = connection.network
        while True:
            while not self._sent:
                await self._moved.wait()
            due, data = self._sent[0]
            await trio.sleep_until(due)
            await network.passable(self._source, self._target)
            if connection.has_lost(self._target):
                if connection.is_unknown(self._target):
                    connection.reset()
                    return
            elif data:
                network.trace.note("arrived", connection.number, self._target, data)
                rest = memoryview(data)
                while rest:
                    sent = await _ready(wait_writable, self._sender, self._sender.send, rest)
                    if sent is None:
                        connection.reset()
                        return
                    rest = rest[sent:]
            else:
                with contextlib.suppress(OSError):
                    self._sender.shutdown(socket.SHUT_WR)
                return
            self._sent.popleft()
            self._size -= len(data)
            self._move()


async def _ready(
    wait: Callable[[socket.socket], Awaitable[None]],
    connection: socket.socket,
    call: Callable[[Any], T],
    what: Any,
) -> T | None:
    """The result of `call(what)` when its socket is ready; None if the other end is closed."""
    while True:
        try:
            return call(what)
        except BlockingIOError:
            await wait(connection)
        except OSError:
            return None


def _send(data: memoryview, connection: socket.socket) -> int:
    return connection.send(data)


def _pair() -> tuple[socket.socket, socket.socket]:
    pair = socket.socketpair()
    for each in pair:
        each.setblocking(False)
        each.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SOCKET_BYTES)
    return pair


class ClientStream(trio.abc.Stream):
    """The client's end of a connection, for Trio."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection

    async def receive_some(self, max_bytes: int | None = None) -> bytes:
        count = _PIECE if max_bytes is None else max_bytes
        return await self._attempt(wait_readable, lambda s: s.recv(count))

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        rest = memoryview(data)
        while rest:
            rest = rest[await self._attempt(wait_writable, partial(_send, rest)) :]

    async def _attempt(
        self,
        wait: Callable[[socket.socket], Awaitable[None]],
        call: Callable[[socket.socket], T],
    ) -> T:
        while True:
            await trio.lowlevel.checkpoint()
            if self._socket.fileno() < 0:
                raise trio.ClosedResourceError
            try:
                return call(self._socket)
            except BlockingIOError:
                await wait(self._socket)
            except OSError as error:
                raise trio.BrokenResourceError(str(error)) from error

    def setsockopt(self, *_: int) -> None:
        """Accept the options that detect dead hosts; this network has none."""

    async def wait_send_all_might_not_block(self) -> None:
        await wait_writable(self._socket)

    async def aclose(self) -> None:
        if self._socket.fileno() >= 0:
            trio.lowlevel.notify_closing(self._socket)
            self._socket.close()
        await trio.lowlevel.checkpoint()
