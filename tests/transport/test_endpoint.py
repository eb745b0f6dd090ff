"""Addresses of servers that callers pass."""

from __future__ import annotations

from typing import Any

import pytest

from datastreamer import BlockingClient, BlockingPublisher
from datastreamer.errors import UsageError
from datastreamer.transport.endpoint import check_endpoint


@pytest.mark.parametrize("host", [5, None, b"a", ("a", 1)])
def test_a_host_that_is_not_text(host: Any) -> None:
    with pytest.raises(UsageError, match=r"^a server's host is a text, not "):
        check_endpoint(host, 6900, tls=False, server_name=None)


@pytest.mark.parametrize("kind", [BlockingClient, BlockingPublisher])
def test_a_client_of_a_port_alone(kind: Any) -> None:
    with pytest.raises(UsageError, match=r"^a server's host is a text, not 6900;"):
        kind(6900)
