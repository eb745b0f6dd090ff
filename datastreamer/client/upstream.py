"""The address of a server to read from, with what a client needs to connect to it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from datastreamer.errors import UsageError
from datastreamer.format import DEFAULT_PORT
from datastreamer.protocol.authentication import token_request
from datastreamer.transport.address import Address, parse_address
from datastreamer.transport.endpoint import check_endpoint

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

    def __post_init__(self) -> None:
        address = check_endpoint(self.host, self.port, self.tls, self.tls_server_name)
        object.__setattr__(self, "host", address.host)
        object.__setattr__(self, "port", address.port)
        object.__setattr__(self, "tls", self.tls or address.tls)
        token_request(0, self.token)

    @property
    def name(self) -> str:
        """Its name in messages."""
        return str(Address(self.host, self.port))


def upstream_of(address: Upstream | tuple[str, int] | str) -> Upstream:
    """The upstream that a caller named. Raises `UsageError`."""
    if isinstance(address, Upstream):
        return address
    if isinstance(address, str):
        return Upstream(*parse_address(address))
    if not isinstance(address, tuple | list) or len(address) != 2:
        raise UsageError(f"an upstream is an Upstream, (host, port) or an address, not {address!r}")
    return Upstream(*address)
