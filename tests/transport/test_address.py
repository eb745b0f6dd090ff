"""The syntax of a server's address."""

from __future__ import annotations

import pytest

from datastreamer.errors import UsageError
from datastreamer.transport.address import Address, locate, parse_address


@pytest.mark.parametrize(
    "text, address",
    [
        ("localhost", Address("localhost", 6900)),
        ("localhost:7", Address("localhost", 7)),
        ("a:00080", Address("a", 80)),
        ("[::1]", Address("::1", 6900)),
        ("[::1]:7", Address("::1", 7)),
        ("tcp://10.0.0.1:7", Address("10.0.0.1", 7)),
        ("tcp://example.org/", Address("example.org", 6900)),
        ("tcp://[fe80::1%eth0]:6900", Address("fe80::1%eth0", 6900)),
        ("tcps://example.org", Address("example.org", 6900, tls=True)),
        ("unix:/run/socket", Address("unix:/run/socket", 0)),
    ],
)
def test_addresses(text: str, address: Address) -> None:
    assert parse_address(text) == address
    assert locate(text, 6900) == address
    assert parse_address(str(address)) == address._replace(tls=False)


@pytest.mark.parametrize(
    "text, message",
    [
        ("", "names no host"),
        (":7", "names no host; write localhost:7"),
        ("tcp://", "names no host"),
        ("[]:7", "names no host"),
        ("a:0", "a port is a number from 1 to 65535"),
        ("a:65536", "a port is a number"),
        ("a:" + "9" * 5000, "a port is a number"),
        ("a:port", "is not HOST:PORT"),
        ("a:7/", "is not HOST:PORT"),
        ("a b", "is not HOST:PORT"),
        ("::1", r"is not HOST:PORT; write an IPv6 address as \[::1\]:6900"),
        ("tcps://a:7/x", "is not tcps://HOST:PORT"),
        ("http://a:7", "write the server as tcp://HOST:PORT or tcps://"),
        ("unix:", "names no socket"),
    ],
)
def test_what_is_no_address(text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        parse_address(text)


def test_a_host_and_a_port() -> None:
    assert locate("::1", 7) == locate("[::1]", 7) == Address("::1", 7)
    assert locate("tcps://a", 7) == Address("a", 7, tls=True)
    assert locate("a:8", 7) == Address("a", 8)
    for text in ("a:8,b:9", "a,b"):
        with pytest.raises(UsageError, match="several servers of one stream are a list"):
            locate(text, 7)
