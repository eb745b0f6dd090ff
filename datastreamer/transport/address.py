"""The address of a server as people write it: one syntax for the library and the programs.

``HOST``, ``HOST:PORT``, ``[::1]:6900``, ``tcp://HOST:PORT``, ``tcps://HOST:PORT`` for TLS, and
``unix:PATH``. Knows no sockets.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from datastreamer.errors import UsageError
from datastreamer.format import DEFAULT_PORT

UNIX = "unix:"
"""The prefix of a Unix socket's path."""

SERVERS = ("tcp://", "tcps://", UNIX)
"""What a text that names a server begins with where others are paths."""

_HOST = r"(?:\[(?P<v6>[^\[\]/]*)\]|(?P<host>[^:/\[\]\s]*))"
_PLACE = re.compile(rf"{_HOST}(?::(?P<port>[0-9]+))?")
_SCHEMES = {"tcp": False, "tcps": True}


class Address(NamedTuple):
    """The address of a server. Made by `parse_address`."""

    host: str
    """A name, an IP address without brackets, or ``unix:PATH``."""

    port: int
    """0 with a Unix socket."""

    tls: bool = False

    def __str__(self) -> str:
        """As messages name it: ``HOST:PORT`` or ``unix:PATH``."""
        if self.host.startswith(UNIX):
            return self.host
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def parse_address(text: str, default_port: int = DEFAULT_PORT) -> Address:
    """The address that a text names. Raises `UsageError`."""
    if text.startswith(UNIX):
        if text == UNIX:
            raise UsageError(f"{text!r} names no socket; write unix:/run/stream.sock")
        return Address(text, 0)
    scheme, colon, rest = text.rpartition("://")
    if colon and scheme not in _SCHEMES:
        raise UsageError(f"{text!r}: write the server as tcp://HOST:PORT or tcps://HOST:PORT")
    found = _PLACE.fullmatch(rest.removesuffix("/") if colon else text)
    if found is None:
        hint = "; write an IPv6 address as [::1]:6900" if rest.count(":") > 1 else ""
        shape = f"{scheme}://HOST:PORT" if colon else "HOST:PORT"
        raise UsageError(f"{text!r} is not {shape}{hint}")
    host, port = found["v6"] or found["host"], default_port
    if found["port"] is not None:
        digits = found["port"].lstrip("0")
        if not 0 < len(digits) <= 5 or int(digits) >= 1 << 16:
            raise UsageError(f"{text!r}: a port is a number from 1 to 65535")
        port = int(digits)
    if not host:
        raise UsageError(f"{text!r} names no host; write localhost:{port}")
    return Address(host, port, _SCHEMES.get(scheme, False))


def has_syntax(text: str) -> bool:
    """Whether a text is like ``HOST`` or ``HOST:PORT``."""
    return _PLACE.fullmatch(text) is not None


def locate(host: str, port: int) -> Address:
    """The address that a caller names by a host and a port. `host` may be a whole address, which
    may have another port. Raises `UsageError`."""
    if not isinstance(host, str):
        raise UsageError(
            f"a server's host is a text, not {host!r}; a list has addresses or (host, port)"
        )
    if host.startswith(UNIX) or "://" in host or (":" in host and has_syntax(host)):
        return parse_address(host, port)
    if "," in host:
        raise UsageError(f"{host!r}: several servers of one stream are a list, not one text")
    return Address(host[1:-1] if host[:1] + host[-1:] == "[]" else host, port)
