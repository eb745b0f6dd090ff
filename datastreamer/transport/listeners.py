"""Listening sockets, the names of addresses, and the options of connections.

Synchronous, so that a process can bind before any event loop runs and pass the sockets to another.
Knows no protocol.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import importlib.util
import os
import socket
import stat
import struct
import sys
import time
from collections.abc import Iterable, Iterator
from ipaddress import IPv4Address, IPv6Address, ip_address
from typing import Any, Protocol

from datastreamer.errors import ExtraMissing, ListenFailed
from datastreamer.transport.address import UNIX

BACKLOG = 1024
# Maximum unsent bytes in the kernel for one connection: enough to keep the network busy, few enough
# that a stalled client costs little memory (0.2 MB, not 4).
NOTSENT_LOWAT = 128 * 1024
_TCP_NOTSENT_LOWAT = getattr(socket, "TCP_NOTSENT_LOWAT", 25 if sys.platform == "linux" else 0x201)
# A free port of one address may be in use on the next: number of ports to try.
_FREE_PORT_TRIES = 20
# Time limit for two servers that start at once to wait for each other at a Unix socket's path.
_TURN_SECONDS = 2.0
_CREDENTIALS = struct.Struct("iII")
# The prefix of an IPv4 address at an IPv6 listener that accepts both, as systemd makes them.
_MAPPED = bytes(10) + b"\xff\xff"

Hosts = str | Iterable[str] | None
# Metrics contain the clients' addresses, so the default is this machine only.
_METRICS_HOST = "127.0.0.1"

# Family, and the address as for bind.
_Place = tuple[int, tuple[object, ...]]


def open_listeners(
    host: Hosts, port: int | None, unix: str | os.PathLike[str] | None = None
) -> list[socket.socket]:
    """Non-blocking sockets that listen: on `host` and `port`, and on the Unix socket `unix`.

    `host` is an address or name, or several; None is every interface. A link-local IPv6
    address includes its interface (``fe80::1%eth0``). Port 0 selects a free one, the same for all
    addresses; None: no TCP. Raises `ListenFailed`.
    """
    if port is None and unix is None:
        raise ListenFailed("nothing to listen on: give a port, or a path for a Unix socket")
    listeners: list[socket.socket] = []
    try:
        if unix is not None:
            listeners.append(UnixListener.at(unix))
        if port is not None:
            listeners += _open_tcp(host, port)
    except BaseException:
        _close(listeners)
        raise
    return listeners


def metrics_listeners(host: Hosts, port: int) -> list[socket.socket]:
    """Listening sockets of the metrics endpoint; `host` None: only this machine.

    Raises `ListenFailed`, and `ExtraMissing` without prometheus-client.
    """
    if importlib.util.find_spec("prometheus_client") is None:
        raise ExtraMissing("metrics need prometheus-client, which is not installed", "metrics")
    return open_listeners(host or _METRICS_HOST, port)


def _open_tcp(host: Hosts, port: int) -> list[socket.socket]:
    hosts: list[str | None] = [host] if host is None or isinstance(host, str) else list(host)
    if not hosts:
        raise ListenFailed(f"cannot listen on port {port}: the list of addresses is empty")
    places: dict[_Place, str] = {}
    for each in hosts:
        for place in _resolve(each, port):
            places.setdefault(place, address_of((each or "*", port)))
    tries = 1 if port else _FREE_PORT_TRIES
    while True:
        tries -= 1
        listeners: list[socket.socket] = []
        shown = ""
        try:
            for (family, address), name in places.items():
                shown = name
                taken = listeners[0].getsockname()[1] if listeners else port
                listener = _listen(family, (address[0], taken, *address[2:]))
                if listener is not None:
                    listeners.append(listener)
        except OSError as error:
            _close(listeners)
            if listeners and tries and error.errno == errno.EADDRINUSE:
                continue
            raise _failed(shown, error) from error
        if not listeners:
            names = ", ".join(dict.fromkeys(places.values()))
            raise ListenFailed(
                f"cannot listen on {names}: this machine has no IPv4 or IPv6 address for it"
            )
        return listeners


def _resolve(host: str | None, port: int) -> Iterator[_Place]:
    """The addresses to bind for one host."""
    if host and host[:1] + host[-1:] == "[]":
        host = host[1:-1]
    shown = address_of((host or "*", port))
    if not 0 <= port < 1 << 16:
        raise ListenFailed(f"cannot listen on {shown}: ports run from 0 to 65535")
    try:
        found = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE, proto=socket.IPPROTO_TCP
        )
    except (OSError, UnicodeError) as error:
        why = getattr(error, "strerror", None) or error
        raise ListenFailed(f"cannot listen on {shown}: {why}") from error
    for family, *_, address in found:
        if family in (socket.AF_INET, socket.AF_INET6):
            yield family, address


def _failed(shown: str, error: OSError) -> ListenFailed:
    hint = {
        errno.EADDRINUSE: "; stop the program that listens there, or choose another port",
        errno.EACCES: "; choose a port above 1023",
        errno.EADDRNOTAVAIL: "; this machine does not have that address",
        errno.EINVAL: "; a link-local address needs its interface, as in fe80::1%eth0",
    }.get(error.errno or 0, "")
    return ListenFailed(f"cannot listen on {shown}: {error.strerror or error}{hint}")


def _close(listeners: Iterable[socket.socket]) -> None:
    for listener in listeners:
        listener.close()


def _listen(family: int, address: tuple[object, ...]) -> socket.socket | None:
    try:
        listener = socket.socket(family, socket.SOCK_STREAM)
    except OSError:
        return None  # an address family that this machine does not support
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        listener.setblocking(False)
        listener.bind(address)
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        disabled = family == socket.AF_INET6 and error.errno == errno.EADDRNOTAVAIL
        if disabled and address[0] in ("::", "::1"):
            return None
        raise
    return listener


class UnixListener(socket.socket):
    """A listening Unix socket, and the file that is its address.

    `close` removes the file in the process that created it; closing a copy of the descriptor does
    not.
    """

    # Its path, device and inode, and the process that made it.
    _file: tuple[str, int, int, int] | None = None

    @classmethod
    def at(cls, path: str | os.PathLike[str]) -> UnixListener:
        """Listen at a path that does not exist, or is the socket of a server that has ended.

        Raises `ListenFailed`.
        """
        # An absolute path, because the working directory may change before `close`.
        name = os.path.abspath(path)
        made = cls(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            made.setblocking(False)
            with _turn_at(os.path.dirname(name)):
                _make_room(name)
                made.bind(name)
                made.listen(BACKLOG)
                found = os.stat(name)
        except BaseException as error:
            made.close()
            if not isinstance(error, OSError) or isinstance(error, ListenFailed):
                raise
            hint = {
                errno.EADDRINUSE: "; another server has just started there",
                errno.ENOENT: "; create the folder first",
                errno.EACCES: "; make the folder writable for this user",
            }.get(error.errno or 0, "")
            why = error.strerror or f"{error}; choose a shorter one"
            raise ListenFailed(f"cannot listen on {UNIX}{name}: {why}{hint}") from error
        made._file = (name, found.st_dev, found.st_ino, os.getpid())
        return made

    def close(self) -> None:
        """Remove the file, if it is still this socket's, and close."""
        file, self._file = self._file, None
        if file is not None and file[3] == os.getpid():
            with contextlib.suppress(OSError):
                found = os.lstat(file[0])
                if (found.st_dev, found.st_ino) == file[1:3]:
                    os.unlink(file[0])
        super().close()


def _make_room(path: str) -> None:
    """Remove the socket of a server that has ended. Raises `ListenFailed`."""
    try:
        found = os.lstat(path)
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(found.st_mode):
        raise ListenFailed(
            f"cannot listen on {UNIX}{path}: the path exists and is not a socket; move it away, or "
            "choose another path"
        )
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            os.unlink(path)
            return
        except BlockingIOError:
            pass  # it is alive, with a full queue
    raise ListenFailed(
        f"cannot listen on {UNIX}{path}: another server listens there; stop it, or choose "
        "another path"
    )


@contextlib.contextmanager
def _turn_at(folder: str) -> Iterator[None]:
    """One server at a time: a second one could take the new socket of the first for a stale one.

    If another program keeps the folder locked, this continues without the lock.
    """
    fd = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        until = time.monotonic() + _TURN_SECONDS
        while time.monotonic() < until:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                time.sleep(0.01)
            except OSError:
                break  # a file system without locks
        yield
    finally:
        os.close(fd)


def tune(connection: socket.socket) -> None:
    """Set the options of an accepted or outgoing connection."""
    connection.setblocking(False)
    if connection.family == socket.AF_UNIX:
        return
    for level, option, value in (
        (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
        (socket.IPPROTO_TCP, _TCP_NOTSENT_LOWAT, NOTSENT_LOWAT),
        (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    ):
        with contextlib.suppress(OSError):
            connection.setsockopt(level, option, value)


def name_of(listener: socket.socket) -> tuple[str, int]:
    """Host and port of a listening socket; of a Unix socket ``unix:`` and its path, and 0."""
    name = listener.getsockname()
    if not isinstance(name, tuple):
        return UNIX + os.fsdecode(name), 0
    return _host(name), name[1]


class _Named(Protocol):
    """The two ends of a connection's socket."""

    def getsockname(self) -> Any: ...
    def getpeername(self) -> Any: ...


def leads_to(connection: _Named, listeners: Iterable[socket.socket]) -> bool:
    """Whether `connection`, opened by this process, ends at one of its own `listeners`."""
    try:
        here, there = connection.getsockname(), connection.getpeername()
        names = [listener.getsockname() for listener in listeners]
    except OSError:
        return False
    if not isinstance(there, tuple):
        return bool(there) and there in names
    ended = _plain(there)
    # A listener on every address has a name that no connection has.
    inside = ended.is_loopback or ended == _plain(here)
    listening = (_plain(name) for name in names if isinstance(name, tuple) and name[1] == there[1])
    return any(inside if at.is_unspecified else at == ended for at in listening)


def _plain(name: tuple[object, ...]) -> IPv4Address | IPv6Address:
    """The address without its interface; an IPv4-mapped address as IPv4."""
    found = ip_address(str(name[0]).partition("%")[0])
    return (found.ipv4_mapped or found) if isinstance(found, IPv6Address) else found


def peer_of(connection: socket.socket, address: object) -> str:
    """The name of the client of an accepted connection in messages."""
    if connection.family == socket.AF_UNIX and hasattr(socket, "SO_PEERCRED"):
        with contextlib.suppress(OSError):
            packed = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
            return f"process {_CREDENTIALS.unpack(packed)[0]}"
    return address_of(address)


def host_of(address: object) -> str:
    """The address by which clients are limited.

    That is the IPv4 address, or the /64 network of an IPv6 address, which belongs to one host; a
    link-local address is used whole. For a Unix socket it is "local".
    """
    if not isinstance(address, tuple):
        return "local"
    host = str(address[0])
    if ":" not in host:
        return host
    packed = socket.inet_pton(socket.AF_INET6, host.partition("%")[0])
    if packed.startswith(_MAPPED):
        return socket.inet_ntop(socket.AF_INET, packed[len(_MAPPED) :])
    if packed.startswith(b"\xfe") and packed[1] & 0xC0 == 0x80:
        return host
    return socket.inet_ntop(socket.AF_INET6, packed[:8] + bytes(8)) + "/64"


def is_local(host: str) -> bool:
    """Whether `host`, as `host_of` gives it, is this machine: loopback, or a Unix socket."""
    return host == "local" or host.startswith("127.") or host == "::/64"


def address_of(name: object) -> str:
    """`host:port` of the result of getsockname or getpeername."""
    if isinstance(name, tuple) and len(name) >= 2:
        host, port = _host(name), name[1]
        if host.startswith(UNIX):
            return host
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    return os.fsdecode(name) if isinstance(name, bytes) else str(name) or "local"


def _host(name: tuple[object, ...]) -> str:
    """The host, with the interface of a link-local address."""
    host = str(name[0])
    if len(name) == 4 and isinstance(name[3], int) and name[3] and "%" not in host:
        try:
            return f"{host}%{socket.if_indextoname(name[3])}"
        except OSError:
            return f"{host}%{name[3]}"
    return host
