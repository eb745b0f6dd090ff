"""The addresses of servers to read from, with what a client needs to connect to them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

from datastreamer.errors import UsageError
from datastreamer.format import DEFAULT_PORT
from datastreamer.protocol.commands import Authenticate, ClientName, Command, encode_command
from datastreamer.transport.address import Address, parse_address
from datastreamer.transport.endpoint import Endpoint, check_endpoint, endpoint_of

if TYPE_CHECKING:
    import ssl


@dataclass(frozen=True, slots=True)
class Upstream:
    """A server to read from: arguments of `connect`; `host` may be a whole address. Raises
    `UsageError` for an invalid one."""

    host: str
    port: int = DEFAULT_PORT
    tls: bool | ssl.SSLContext = False
    tls_server_name: str | None = None
    token: bytes | str | None = field(default=None, repr=False)
    client_name: str | None = None

    def __post_init__(self) -> None:
        address = check_endpoint(self.host, self.port, self.tls, self.tls_server_name)
        object.__setattr__(self, "host", address.host)
        object.__setattr__(self, "port", address.port)
        object.__setattr__(self, "tls", self.tls or address.tls)
        self._introduction(0)

    @property
    def name(self) -> str:
        """Its name in messages."""
        return str(Address(self.host, self.port))

    def endpoint(self, stream_type: int) -> Endpoint:
        """Where to connect to, with the requests that its token and the client's name make."""
        requests = self._introduction(stream_type)
        return endpoint_of(self.host, self.port, self.tls, self.tls_server_name, requests)

    def _introduction(self, stream_type: int) -> tuple[bytes, ...]:
        commands: list[Command] = []
        if self.token is not None:
            token = self.token.encode() if isinstance(self.token, str) else self.token
            commands.append(Authenticate(token))
        if self.client_name is not None:
            commands.append(ClientName(self.client_name.encode()))
        return tuple(encode_command(command, stream_type) for command in commands)


ServerAddress: TypeAlias = str | Sequence[Upstream | tuple[str, int] | str]
"""A server's host; or the servers of one stream, each an `Upstream`, (host, port) or a host."""


def upstreams_of(
    host: ServerAddress,
    port: int,
    tls: bool | ssl.SSLContext,
    tls_server_name: str | None,
    token: bytes | str | None,
    client_name: str | None = None,
) -> list[Upstream]:
    """The servers that arguments of `connect` name. Raises `UsageError`."""
    options = tls, tls_server_name, token, client_name
    places: Sequence[Any] = host if isinstance(host, list | tuple) else [host]
    found = []
    for place in places:
        if isinstance(place, Upstream):
            found.append(place)
        elif isinstance(place, tuple) and len(place) == 2:
            found.append(Upstream(place[0], place[1], *options))
        else:
            found.append(Upstream(place, port, *options))
    if not found:
        raise UsageError("name a server to connect to, or several servers of one stream")
    return found


def upstream_of(address: Upstream | tuple[str, int] | str) -> Upstream:
    """The upstream that a caller named. Raises `UsageError`."""
    if isinstance(address, Upstream):
        return address
    if isinstance(address, str):
        return Upstream(*parse_address(address))
    if not isinstance(address, tuple | list) or len(address) != 2:
        raise UsageError(f"an upstream is an Upstream, (host, port) or an address, not {address!r}")
    return Upstream(*address)
