"""The warning of a server that serves everyone."""

from __future__ import annotations

import pytest

from datastreamer.cli.shared.server_options import ServerOptions


@pytest.mark.parametrize(
    "host, warned",
    [
        ("0.0.0.0", True),
        ("::", True),
        ("10.0.0.1", True),
        ("fe80::1%eth0", True),
        ("127.0.0.1", False),
        ("127.3.2.1", False),
        ("::1", False),
        ("unix:/run/s", False),
    ],
)
def test_addresses_that_others_reach(
    caplog: pytest.LogCaptureFixture, host: str, warned: bool
) -> None:
    ServerOptions().warn_of_everyone([("127.0.0.1", 1), (host, 6900)])
    assert len(caplog.records) == warned
    if warned:
        assert "is served, without authentication" in caplog.text
        assert "127.0.0.1:1 " not in caplog.text


def test_client_certificates_are_authentication(caplog: pytest.LogCaptureFixture) -> None:
    ServerOptions(tls_client_ca="ca.pem").warn_of_everyone([("::", 6900)])
    assert caplog.records == []
