"""Listening sockets and the options of connections.

Synchronous, so that a process can bind before any event loop runs and hand the
sockets to another.
"""

from __future__ import annotations

import contextlib
import errno
import socket
import sys

from datastreamer.errors import ListenFailed

BACKLOG = 1024
# How much may wait in the kernel unsent for one connection: enough to keep the wire
# busy, little enough that a stalled client costs next to nothing (0.2 MB, not 4).
NOTSENT_LOWAT = 128 * 1024
_TCP_NOTSENT_LOWAT = getattr(socket, "TCP_NOTSENT_LOWAT", 25 if sys.platform == "linux" else 0x201)


def open_listeners(host: str | None, port: int) -> list[socket.socket]:
    """Non-blocking sockets that listen on `host` (None: every interface) and `port`.

    Port 0 takes a free one, the same for IPv4 and IPv6. Raises `ListenFailed`.
    """
    shown = f"{host or '*'}:{port}"
    if not 0 <= port < 1 << 16:
        raise ListenFailed(f"cannot listen on {shown}: ports run from 0 to 65535")
    try:
        found = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE, proto=socket.IPPROTO_TCP
        )
    except (OSError, UnicodeError) as error:
        why = getattr(error, "strerror", None) or error
        raise ListenFailed(f"cannot listen on {shown}: {why}") from error
    listeners: list[socket.socket] = []
    try:
        for family, kind, protocol, _, address in dict.fromkeys(found):
            if family not in (socket.AF_INET, socket.AF_INET6):
                continue
            taken = listeners[0].getsockname()[1] if listeners else port
            place = (address[0], taken, *address[2:])
            listener = _listen(family, kind, protocol, place)
            if listener is not None:
                listeners.append(listener)
    except OSError as error:
        for listener in listeners:
            listener.close()
        hint = {
            errno.EADDRINUSE: "; stop the program that listens there, or choose another port",
            errno.EACCES: "; choose a port above 1023",
            errno.EADDRNOTAVAIL: "; that is no address of this machine",
        }.get(error.errno or 0, "")
        raise ListenFailed(f"cannot listen on {shown}: {error.strerror or error}{hint}") from error
    if not listeners:
        raise ListenFailed(f"cannot listen on {shown}: it has no IPv4 or IPv6 address here")
    return listeners


def _listen(
    family: int, kind: int, protocol: int, address: tuple[object, ...]
) -> socket.socket | None:
    try:
        listener = socket.socket(family, kind, protocol)
    except OSError:
        return None  # a family that this machine does not speak
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        listener.setblocking(False)
        listener.bind(address)
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        if family == socket.AF_INET6 and error.errno == errno.EADDRNOTAVAIL:
            return None  # IPv6 is known and switched off
        raise
    return listener


def tune(connection: socket.socket) -> None:
    """The options every served or made connection has."""
    connection.setblocking(False)
    for level, option, value in (
        (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
        (socket.IPPROTO_TCP, _TCP_NOTSENT_LOWAT, NOTSENT_LOWAT),
        (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    ):
        with contextlib.suppress(OSError):
            connection.setsockopt(level, option, value)


def address_of(name: object) -> str:
    """`host:port` of what getsockname or getpeername gave."""
    if isinstance(name, tuple) and len(name) >= 2:
        host, port = name[0], name[1]
        return f"[{host}]:{port}" if ":" in str(host) else f"{host}:{port}"
    return str(name) or "local"
