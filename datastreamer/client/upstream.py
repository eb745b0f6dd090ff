"""The address of a server to read from, with what a client needs to connect to it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from datastreamer.errors import UsageError
from datastreamer.format import DEFAULT_PORT
from datastreamer.protocol.authentication import token_request
from datastreamer.transport.endpoint import check_endpoint
from datastreamer.transport.listeners import UNIX, address_of

if TYPE_CHECKING:
    import ssl


@dataclass(frozen=True, slots=True)
class Upstream:
    """A server to read from: arguments of `connect`. Raises `UsageError` for an invalid one."""

    host: str
    port: int = DEFAULT_PORT
    tls: bool | ssl.SSLContext = False
    tls_server_name: str | None = None
    token: bytes | str | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        check_endpoint(self.host, self.port, self.tls, self.tls_server_name)
        token_request(0, self.token)

    @property
    def name(self) -> str:
        """Its name in messages."""
        return self.host if self.host.startswith(UNIX) else address_of((self.host, self.port))


def upstream_of(address: Upstream | tuple[str, int]) -> Upstream:
    """The upstream that a caller named. Raises `UsageError`."""
    if isinstance(address, Upstream):
        return address
    if not isinstance(address, tuple | list) or len(address) != 2:
        raise UsageError(f"an upstream is an Upstream or (host, port), not {address!r}")
    return Upstream(*address)
