"""The endpoint of a server - TCP, TLS or a Unix socket - and blocking connections to it.

Owns the address, its checks, and the connection for synchronous clients. Must not import trio.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from datastreamer.errors import UsageError
from datastreamer.transport.address import UNIX, Address, locate
from datastreamer.transport.connection_errors import (
    check_port,
    connect_failed,
    connect_timeout,
)
from datastreamer.transport.listeners import tune

if TYPE_CHECKING:
    import ssl

# The longest name that TLS can send.
_LONGEST_NAME = 255


@dataclass(frozen=True, slots=True)
class Endpoint:
    """The address of a server. Made by `endpoint_of`."""

    peer: str
    """Its name in messages."""

    path: str | None
    """The path of its Unix socket; None: TCP."""

    host: str
    port: int
    context: ssl.SSLContext | None
    """None: without TLS."""

    server_name: str
    """The name that its certificate must have."""

    introduction: tuple[bytes, ...] = ()
    """The requests that are sent first on each connection, with a token and a client's name."""


def endpoint_of(
    host: str,
    port: int,
    tls: bool | ssl.SSLContext = False,
    server_name: str | None = None,
    introduction: tuple[bytes, ...] = (),
) -> Endpoint:
    """The endpoint of a server; `host` may be a whole address, see `parse_address`.

    `tls` True is TLS with the system's CAs. Raises `UsageError`.
    """
    address = check_endpoint(host, port, tls, server_name)
    peer = str(address)
    if address.host.startswith(UNIX):
        path = os.path.abspath(address.host[len(UNIX) :])
        return Endpoint(UNIX + path, path, address.host, 0, None, "", introduction)
    context = None
    if address.tls:
        from datastreamer.transport.tls import client_tls

        context = client_tls() if isinstance(tls, bool) else tls
    # Certificates do not have the interface of a link-local address.
    name = server_name or address.host.partition("%")[0]
    return Endpoint(peer, None, address.host, address.port, context, name, introduction)


def check_endpoint(
    host: str, port: int, tls: bool | ssl.SSLContext, server_name: str | None
) -> Address:
    """The address of the server, with `tls` if `tls` or the address asks for it. Raises
    `UsageError` for one that no server can have."""
    address = locate(host, port)
    secured = address.tls or tls is not False
    if server_name is not None and not secured:
        raise UsageError("tls_server_name needs TLS; set tls=True or pass a context")
    if server_name:
        try:
            length = 0 if "\0" in server_name else len(server_name.encode("idna"))
        except UnicodeError:
            length = 0
        if not 1 <= length <= _LONGEST_NAME:
            raise UsageError(f"tls_server_name: no certificate can name {server_name!r}")
    if not address.host.startswith(UNIX):
        check_port(address.port)
    elif secured:
        raise UsageError(f"{host}: TLS is not used on a Unix socket; leave it out")
    return address._replace(tls=secured)


def connect_blocking(place: Endpoint, timeout: float) -> socket.socket:
    """Connect to `place`, with TLS, each step within `timeout` seconds.

    Raises `ConnectFailed`, and `TLSFailed` if the handshake fails.
    """
    try:
        if place.path is None:
            made = socket.create_connection((place.host, place.port), timeout)
        else:
            made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            made.settimeout(timeout)
            with _closed_on_failure(made):
                made.connect(place.path)
    except TimeoutError:
        raise connect_timeout(place.peer, timeout) from None
    except (OSError, UnicodeError) as error:
        raise connect_failed(place.peer, error) from None
    tune(made)
    if place.context is None:
        return made
    from datastreamer.transport.tls import tls_failed

    try:
        with _closed_on_failure(made):
            made.settimeout(timeout)
            return place.context.wrap_socket(made, server_hostname=place.server_name)
    except TimeoutError:
        raise connect_timeout(place.peer, timeout) from None
    except (OSError, ValueError) as error:
        raise tls_failed(place.peer, error) from None


def close_blocking(connection: socket.socket) -> None:
    """Close a connection, with a TLS close if it fits into the socket."""
    unwrap = getattr(connection, "unwrap", None)
    if unwrap is not None:
        with contextlib.suppress(OSError, ValueError):
            connection.settimeout(0)
            unwrap()
    connection.close()


@contextlib.contextmanager
def _closed_on_failure(connection: socket.socket) -> Iterator[None]:
    try:
        yield
    except BaseException:
        connection.close()
        raise
