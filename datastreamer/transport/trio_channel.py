"""The byte stream of a client's connection under Trio: a raw socket, or any Trio stream.

Owns connecting and the meaning of the system's errors. Must not know the protocol.

Sockets are used without Trio's wrappers: each call of these costs an additional turn of the event
loop, which the latency of a query consists of.
"""

from __future__ import annotations

import math
import select
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, ClassVar, Final, Protocol, cast

import trio

from datastreamer.transport.connection_errors import (
    closed_here,
    connect_failed,
    connection_lost,
)
from datastreamer.transport.endpoint import Endpoint
from datastreamer.transport.listeners import tune
from datastreamer.transport.tcp_info import CLIENT_KEEPALIVE, keep_alive

if TYPE_CHECKING:
    import ssl

# Time limit for sending the TLS close to a server that reads nothing.
_FAREWELL_SECONDS = 1.0

_PIECE_MILLISECONDS: Final = 2
"""Longest wait of a receiving thread for a large piece: smaller ones cost more work."""

TURN_SECONDS: Final = 0.001
"""Time after which a fast stream yields to other tasks."""

_MOMENT_SECONDS: Final = 0.0002
"""Longest wait for more bytes within a turn; they are due after some 30 us."""

_LARGE_BYTES: Final = 256 << 10
_MUCH_BYTES: Final = 32 << 10
_SOON_SECONDS: Final = 0.00015
"""Two pieces of `_MUCH_BYTES` within `_SOON_SECONDS` belong to a stream that arrives as fast as it
is received: a turn begins."""

_GATHERED_BYTES: Final = 64 << 10
"""Within a turn, wait for this many bytes for a moment: receiving as fast as possible would split
the stream into too many pieces. If the wait takes the whole moment, the turn ends: the stream is
slower, and waiting would only delay other tasks."""

# `select` accepts descriptors below this.
_MOST_DESCRIPTORS: Final = 1024


class Channel(Protocol):
    """The byte stream of a connection. Errors are `ConnectionLost`."""

    async def send(self, data: bytes) -> None:
        """Send all of `data`. If cancelled, it may have sent a part."""

    async def receive_into(self, buffer: memoryview) -> int:
        """Receive bytes; 0 if the other side has ended. If cancelled, it has received none."""

    def connection(self) -> socket.socket | None:
        """The socket, for the system's information; None without one."""

    async def aclose(self) -> None:
        """Close at once. A task that waits raises `ConnectionLost`."""


class SocketChannel:
    """A TCP or Unix connection through its raw non-blocking socket."""

    # The channel that had the last turn.
    _last: ClassVar[SocketChannel | None] = None

    def __init__(self, stream: trio.SocketStream, peer: str) -> None:
        self._socket = socket.socket(fileno=stream.socket.detach())
        tune(self._socket)
        keep_alive(self._socket.setsockopt, CLIENT_KEEPALIVE)
        self._peer = peer
        # Whether a turn is in progress, and until when.
        self._in_turn = False
        self._turn_ends = 0.0
        # Whether the last wait within the turn took the whole moment.
        self._slow = False
        # When the last piece arrived outside of a turn.
        self._came_at = -math.inf
        # Whether no other connection received since the last turn or piece: the waits of many busy
        # connections would add up.
        self._alone = False
        # Whether the socket is ready only for `_GATHERED_BYTES`.
        self._gathers = False
        self._can_gather = self._socket.fileno() < _MOST_DESCRIPTORS

    async def send(self, data: bytes) -> None:
        sent = self._send_now(data)
        while sent < len(data):
            try:
                await trio.lowlevel.wait_writable(self._socket)
            except trio.ClosedResourceError:
                raise closed_here(self._peer) from None
            sent += self._send_now(memoryview(data)[sent:])

    def _send_now(self, data: bytes | memoryview) -> int:
        try:
            return self._socket.send(data)
        except BlockingIOError:
            return 0
        except OSError as error:
            raise connection_lost(self._peer, error) from None

    async def receive_into(self, buffer: memoryview) -> int:
        # Wait before the first attempt, which would mostly fail: an answer takes longer than the
        # way back here, and a stream arrives in larger pieces. Not in a turn, when much arrives.
        if self._in_turn:
            # By the system's clock, even if the event loop has another one.
            if time.monotonic() < self._turn_ends:
                await trio.lowlevel.checkpoint_if_cancelled()
            else:
                await trio.lowlevel.checkpoint()
                self._begin_turn(time.monotonic())
            slow = self._alone and self._can_gather and not self._gather()
            count = self._receive_now(buffer)
            if count is not None:
                self._in_turn = not (slow and self._slow) and self._is_much(count, len(buffer))
                self._slow = slow
                return count
        self._set_gathers(False)
        while True:
            try:
                await trio.lowlevel.wait_readable(self._socket)
            except trio.ClosedResourceError:
                raise closed_here(self._peer) from None
            count = self._receive_now(buffer)
            if count is not None:
                break
        now = time.monotonic()
        soon = now - self._came_at < _SOON_SECONDS
        self._came_at = now
        self._begin_turn(now)
        self._in_turn = soon and self._is_much(count, len(buffer))
        return count

    def _is_much(self, count: int, room: int) -> bool:
        """Whether to receive again without the event loop; among several busy connections only one
        whose large buffer was filled."""
        return count >= (_MUCH_BYTES if self._alone else max(room, _LARGE_BYTES))

    def _begin_turn(self, now: float) -> None:
        self._turn_ends = now + TURN_SECONDS
        self._alone, SocketChannel._last = SocketChannel._last is self, self

    def _receive_now(self, buffer: memoryview) -> int | None:
        try:
            return self._socket.recv_into(buffer)
        except BlockingIOError:
            return None
        except OSError as error:
            if self._socket.fileno() < 0:
                raise closed_here(self._peer) from None
            raise connection_lost(self._peer, error) from None

    def _gather(self) -> bool:
        """Wait for a moment without the event loop, which would take as long; whether the bytes
        arrived within it."""
        self._set_gathers(True)
        begin = time.monotonic()
        # If the socket was closed meanwhile, the next read reports it.
        with suppress(ValueError, OSError):
            select.select((self._socket,), (), (), _MOMENT_SECONDS)
        return time.monotonic() - begin < _MOMENT_SECONDS

    def _set_gathers(self, gathers: bool) -> None:
        if gathers != self._gathers:
            self._set_least(_GATHERED_BYTES if gathers else 1)
            self._gathers = gathers

    def _set_least(self, least: int) -> None:
        """Set how many bytes make the socket ready; its end always does."""
        # Some systems refuse it for a connection that has ended.
        with suppress(OSError):
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, least)

    def connection(self) -> socket.socket:
        return self._socket

    @contextmanager
    def for_thread(self, piece: int) -> Iterator[Callable[[memoryview], int | None]]:
        """A `receive_into` for a thread that uses the socket alone: it waits for `piece` bytes, for
        a moment, and returns None if nothing arrived."""
        connection = self._socket
        poll = select.poll()
        poll.register(connection, select.POLLIN)

        def receive_into(buffer: memoryview) -> int | None:
            poll.poll(_PIECE_MILLISECONDS)
            try:
                return connection.recv_into(buffer)
            except BlockingIOError:
                return None
            except OSError as error:
                raise connection_lost(self._peer, error) from None

        self._set_least(piece)
        try:
            yield receive_into
        finally:
            self._set_least(1)
            self._gathers = False

    async def aclose(self) -> None:
        if SocketChannel._last is self:
            SocketChannel._last = None
        trio.lowlevel.notify_closing(self._socket)
        self._socket.close()


class StreamChannel:
    """Any Trio byte stream: TLS, or memory streams in tests."""

    def __init__(self, stream: trio.abc.Stream, peer: str) -> None:
        self._stream = stream
        self._peer = peer

    async def send(self, data: bytes) -> None:
        try:
            await self._stream.send_all(data)
        except trio.BrokenResourceError as error:
            raise connection_lost(self._peer, error) from None
        except trio.ClosedResourceError:
            raise closed_here(self._peer) from None

    async def receive_into(self, buffer: memoryview) -> int:
        try:
            data = await self._stream.receive_some(len(buffer))
        except trio.BrokenResourceError as error:
            raise connection_lost(self._peer, error) from None
        except trio.ClosedResourceError:
            raise closed_here(self._peer) from None
        buffer[: len(data)] = data
        return len(data)

    def connection(self) -> socket.socket | None:
        stream = self._stream
        if isinstance(stream, trio.SSLStream):
            stream = stream.transport_stream
        if not isinstance(stream, trio.SocketStream):
            return None
        return cast("socket.socket", stream.socket)

    async def aclose(self) -> None:
        if isinstance(self._stream, trio.SSLStream):
            with trio.move_on_after(_FAREWELL_SECONDS):
                await self._stream.aclose()
        else:
            await trio.aclose_forcefully(self._stream)


def channel_over(stream: trio.abc.Stream, peer: str) -> Channel:
    """The best channel over `stream`, which it takes over."""
    if isinstance(stream, trio.SocketStream):
        return SocketChannel(stream, peer)
    return StreamChannel(stream, peer)


async def dial(place: Endpoint) -> trio.abc.Stream:
    """Connect to `place`, with TLS. Raises `ConnectFailed`, and `TLSFailed` if the handshake
    fails."""
    try:
        if place.path is not None:
            return await trio.open_unix_socket(place.path)
        stream = await trio.open_tcp_stream(place.host, place.port)
    except (OSError, UnicodeError) as error:
        raise connect_failed(place.peer, error) from None
    if place.context is None:
        return stream
    return await _with_tls(stream, place, place.context)


async def _with_tls(
    stream: trio.SocketStream, place: Endpoint, context: ssl.SSLContext
) -> trio.abc.Stream:
    from datastreamer.transport.tls import tls_failed

    keep_alive(stream.setsockopt, CLIENT_KEEPALIVE)
    try:
        secure = trio.SSLStream(stream, context, server_hostname=place.server_name)
        await secure.do_handshake()
    except BaseException as error:
        await trio.aclose_forcefully(stream)
        if isinstance(error, (trio.BrokenResourceError, ValueError)):
            raise tls_failed(place.peer, error.__cause__ or error) from None
        raise
    return secure
