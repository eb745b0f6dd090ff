"""How callers name the servers that a relay or a reassembly reads from."""

from __future__ import annotations

from typing import Any

import pytest

from datastreamer.client.upstream import Upstream, upstream_of
from datastreamer.errors import UsageError


def test_a_host_and_a_port() -> None:
    assert upstream_of(("a", 1)) == upstream_of(Upstream("a", 1)) == Upstream("a", 1)


def test_an_address() -> None:
    assert upstream_of("tcps://a:1") == Upstream("a", 1, tls=True) == Upstream("tcps://a:1")
    assert upstream_of("[::1]") == Upstream("::1") == Upstream("[::1]", 6900)
    assert upstream_of("unix:/run/s").name == "unix:/run/s"
    assert Upstream("a:7", token="t" * 16).name == "a:7"


@pytest.mark.parametrize("address", [5, ("a",), ("a", 1, 2), None])
def test_what_names_no_server(address: Any) -> None:
    with pytest.raises(UsageError, match=r"^an upstream is an Upstream, \(host, port\) or "):
        upstream_of(address)
