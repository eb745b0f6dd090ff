"""The options of an HTTP port.

Owns the values and their defaults. Knows no connection.
"""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from datastreamer.errors import UsageError
from datastreamer.server.publish.policy import read_tokens
from datastreamer.transport.listeners import Hosts

MAX_CLIENTS: Final = 1000
LOOPBACK: Final = "127.0.0.1"
_ORIGIN: Final = re.compile(r"\*|[a-z][a-z0-9+.-]*://[^\sA-Z/?#@]+")


@dataclass(frozen=True, kw_only=True, slots=True)
class HttpOptions:
    """Where a server answers HTTP, and whom: ``StreamServer(path, http=HttpOptions(port=8080))``.

    Raises `UsageError` for a value out of range.
    """

    port: int
    """TCP port; 0: any free one, which is logged."""

    host: Hosts = LOOPBACK
    """Address or addresses to listen on."""

    token_file: str | os.PathLike[str] | None = None
    """Clients must send ``Authorization: Bearer TOKEN``, a line of this file, which is read at each
    request. None: every client that reaches the port may read."""

    cors: Sequence[str] = ()
    """Origins whose pages may read, as ``https://example.org``; ``*``: every page."""

    max_clients: int = MAX_CLIENTS
    """Maximum number of connections."""

    max_followers: int = MAX_CLIENTS
    """Maximum number of connections that wait for commits."""

    explorer: bool = False
    """Index the hashes and addresses of a zkEVM stream in ``FILE.explorer`` from the start on; else
    from the first search on."""

    def __post_init__(self) -> None:
        for name in ("max_clients", "max_followers"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise UsageError(f"{name} is a whole number from 1, not {value!r}")
        if isinstance(self.cors, str):
            raise UsageError(f'cors is a list such as ["https://example.org"], not {self.cors!r}')
        for origin in self.cors:
            if not _ORIGIN.fullmatch(origin):
                raise UsageError(
                    "an origin is written as a browser sends it, https://example.org with neither "
                    f"path nor slash at the end, not {origin!r}"
                )
        if self.token_file is not None:
            # A serving process may have another working directory.
            object.__setattr__(self, "token_file", os.path.abspath(self.token_file))

    def check(self) -> None:
        """Raises `UsageError` if the token file has no tokens, or cannot be read."""
        if self.token_file is not None:
            read_tokens(self.token_file)

    def share(self, of: int) -> HttpOptions:
        """The options of one of `of` processes that answer together."""
        return dataclasses.replace(
            self,
            max_clients=-(-self.max_clients // of),
            max_followers=-(-self.max_followers // of),
        )

    def as_json(self) -> dict[str, Any]:
        """The options as JSON values: ``HttpOptions(**options.as_json()) == options``."""
        host = self.host
        listed = host if host is None or isinstance(host, str) else list(host)
        return {**dataclasses.asdict(self), "host": listed, "cors": list(self.cors)}
