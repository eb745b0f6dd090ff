"""The byte stream of a client's connection under asyncio: a non-blocking socket, also with TLS.

Owns connecting and the meaning of the system's errors. Must not know the protocol.

A wait ends when the socket is ready, so a cancelled wait has consumed nothing. Needs an event loop
with `add_reader`, as those of Unix systems have.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Final, TypeVar

from datastreamer.transport.connection_errors import (
    closed_here,
    connect_failed,
    connection_lost,
)
from datastreamer.transport.endpoint import Endpoint, close_blocking
from datastreamer.transport.listeners import tune
from datastreamer.transport.tcp_info import CLIENT_KEEPALIVE, keep_alive
from datastreamer.transport.tls import tls_failed

T = TypeVar("T")

_HEAD_START_SECONDS: Final = 0.25
"""Wait for an address before the next one of the same host is tried as well (RFC 8305)."""

_TURN_SECONDS: Final = 0.001
"""Time after which a stream that never waits yields to other tasks and to timers."""


class AsyncioChannel:
    """A TCP or Unix connection, with or without TLS. Owns the socket."""

    def __init__(self, connection: socket.socket, peer: str) -> None:
        connection.setblocking(False)
        self._socket = connection
        self._peer = peer
        self._waits: set[asyncio.Future[None]] = set()
        # Whether to receive before waiting: TLS may hold decrypted bytes, and after a full buffer
        # more has usually arrived. Otherwise the attempt would mostly fail.
        self._tries = self._secure = isinstance(connection, ssl.SSLSocket)
        self._turn_ends = 0.0

    def connection(self) -> socket.socket:
        """The socket, for the system's information."""
        return self._socket

    async def send(self, data: bytes, seconds: float | None = None) -> None:
        """Send all of `data`. Raises `TimeoutError` if the other side receives nothing for
        `seconds`; then, or if cancelled, it may have sent a part."""
        rest = memoryview(data)
        while rest:
            sent = await self._attempt(self._socket.send, rest, write=True, seconds=seconds)
            rest = rest[sent:]

    async def receive_into(self, buffer: memoryview, seconds: float | None = None) -> int:
        """Receive bytes; 0 if the other side has ended. Raises `TimeoutError` after `seconds`. If
        cancelled, it has received none."""
        if not self._tries:
            await self._ready(write=False, seconds=seconds)
        elif time.monotonic() >= self._turn_ends:
            await asyncio.sleep(0)
            self._begin_turn()
        count = await self._attempt(self._socket.recv_into, buffer, seconds=seconds)
        self._tries = self._secure or count == len(buffer)
        return count

    async def shake_hands(self, connection: ssl.SSLSocket) -> None:
        """Do the TLS handshake over `connection`. Raises what `ssl` raises."""
        self._socket = connection
        self._tries = self._secure = True
        while True:
            try:
                connection.do_handshake()
            except ssl.SSLWantReadError:
                await self._ready(write=False, seconds=None)
            except ssl.SSLWantWriteError:
                await self._ready(write=True, seconds=None)
            else:
                return

    async def _attempt(
        self,
        call: Callable[[Any], int],
        data: memoryview,
        *,
        write: bool = False,
        seconds: float | None,
    ) -> int:
        """The result of `call(data)`, as soon as the socket is ready for it."""
        while True:
            try:
                return call(data)
            except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
                pass
            except OSError as error:
                self._ensure_open()
                raise connection_lost(self._peer, error) from None
            await self._ready(write=write, seconds=seconds)

    async def _ready(self, *, write: bool, seconds: float | None) -> None:
        """Wait until the socket is readable, or writable."""
        self._ensure_open()
        loop = asyncio.get_running_loop()
        future = loop.create_future()
        timer = None if seconds is None else loop.call_later(seconds, _fail, future, TimeoutError())
        self._waits.add(future)
        if write:
            loop.add_writer(self._socket, _wake, future)
        else:
            loop.add_reader(self._socket, _wake, future)
        try:
            await future
            self._begin_turn()
        finally:
            self._waits.discard(future)
            if timer is not None:
                timer.cancel()
            if self._socket.fileno() >= 0:
                (loop.remove_writer if write else loop.remove_reader)(self._socket)

    def _begin_turn(self) -> None:
        self._turn_ends = time.monotonic() + _TURN_SECONDS

    def _ensure_open(self) -> None:
        if self._socket.fileno() < 0:
            raise closed_here(self._peer)

    def close(self, *, farewell: bool = True) -> None:
        """Close at once; a task that waits raises `ConnectionLost`. With `farewell`, the TLS close
        is sent first."""
        if self._socket.fileno() < 0:
            return
        loop = asyncio.get_running_loop()
        loop.remove_reader(self._socket)
        loop.remove_writer(self._socket)
        for future in self._waits:
            _fail(future, closed_here(self._peer))
        if farewell:
            close_blocking(self._socket)
        else:
            socket.socket.close(self._socket)


def _wake(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


def _fail(future: asyncio.Future[None], error: Exception) -> None:
    if not future.done():
        future.set_exception(error)


async def dial_asyncio(endpoint: Endpoint) -> AsyncioChannel:
    """Connect to `endpoint`, with TLS. Raises `ConnectFailed`, and `TLSFailed` if the handshake
    fails."""
    made = await _connect(endpoint)
    tune(made)
    keep_alive(made.setsockopt, CLIENT_KEEPALIVE)
    channel = AsyncioChannel(made, endpoint.peer)
    if endpoint.context is None:
        return channel
    try:
        secure = endpoint.context.wrap_socket(
            made, server_hostname=endpoint.server_name, do_handshake_on_connect=False
        )
        await channel.shake_hands(secure)
    except BaseException as error:
        channel.close(farewell=False)
        made.close()
        if isinstance(error, (OSError, ValueError)):
            raise tls_failed(endpoint.peer, error) from None
        raise
    return channel


async def _connect(endpoint: Endpoint) -> socket.socket:
    loop = asyncio.get_running_loop()
    try:
        if endpoint.path is not None:
            return await _connect_to(socket.AF_UNIX, endpoint.path)
        host, port = endpoint.host, endpoint.port
        found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        return await _connect_to_first([(family, address) for family, *_, address in found])
    except (OSError, UnicodeError) as error:
        raise connect_failed(endpoint.peer, error) from None


async def _connect_to_first(addresses: Sequence[tuple[int, Any]]) -> socket.socket:
    """A connection to the address that answers first; each has a head start over the next."""
    attempts: list[asyncio.Task[socket.socket]] = []
    made: socket.socket | None = None

    def close_other(attempt: asyncio.Task[socket.socket]) -> None:
        if not attempt.cancelled() and not attempt.exception() and attempt.result() is not made:
            attempt.result().close()

    if not addresses:
        raise OSError("its name has no address")
    try:
        for family, address in addresses:
            attempts.append(asyncio.ensure_future(_connect_to(family, address)))
            pending = [attempt for attempt in attempts if not attempt.done()]
            await asyncio.wait(
                pending, timeout=_HEAD_START_SECONDS, return_when=asyncio.FIRST_COMPLETED
            )
            if any(attempt.done() and not attempt.exception() for attempt in attempts):
                break
        for attempt in asyncio.as_completed(attempts):
            with suppress(OSError):
                made = await attempt
                return made
        return await attempts[0]
    finally:
        for each in attempts:
            each.cancel()
            each.add_done_callback(close_other)


async def _connect_to(family: int, address: Any) -> socket.socket:
    made = socket.socket(family, socket.SOCK_STREAM)
    try:
        made.setblocking(False)
        await asyncio.get_running_loop().sock_connect(made, address)
    except BaseException:
        made.close()
        raise
    return made
