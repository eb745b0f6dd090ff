"""`dsapp relay`: download a stream from a server and serve it."""

from __future__ import annotations

from typing import Annotated

from datastreamer.cli.dsapp.options import (
    FileOption,
    InactivityTimeoutOption,
    LogOption,
    PortOption,
    WriteTimeoutOption,
    limits_of,
)
from datastreamer.cli.shared.addresses import address_of
from datastreamer.cli.shared.options import text_option
from datastreamer.cli.verbs.relay import relay_until
from datastreamer.client.upstream import Upstream
from datastreamer.relay.relay import DEFAULT_PORT, Relay

ServerOption = Annotated[str, text_option("HOST:PORT", "Server to download from.")]


def relay(
    server: ServerOption = "127.0.0.1:6900",
    port: PortOption = DEFAULT_PORT,
    file: FileOption = "datarelay.bin",
    writetimeout: WriteTimeoutOption = 0,
    inactivitytimeout: InactivityTimeoutOption = 120,
    log: LogOption = "info",
) -> None:
    """Download a stream, keep it in a file, and serve it."""
    limits = limits_of(writetimeout, inactivitytimeout)
    relay_until(Relay([Upstream(*address_of(server, "--server"))], file, port=port, limits=limits))
