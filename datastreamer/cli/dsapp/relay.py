"""`dsapp relay`: download a stream from a server and serve it."""

from __future__ import annotations

from typing import Annotated

import typer

from datastreamer.cli.dsapp.options import LogOption
from datastreamer.cli.dsapp.server import (
    FileOption,
    InactivityTimeoutOption,
    PortOption,
    WriteTimeoutOption,
)
from datastreamer.cli.shared.options import LogLevel
from datastreamer.cli.verbs.relay import relay_until, upstream_of
from datastreamer.relay.relay import DEFAULT_PORT, Relay
from datastreamer.server.limits import Limits

ServerOption = Annotated[
    str, typer.Option("--server", metavar="HOST:PORT", help="Server to download from.")
]


def relay(
    server: ServerOption = "127.0.0.1:6900",
    port: PortOption = DEFAULT_PORT,
    file: FileOption = "datarelay.bin",
    writetimeout: WriteTimeoutOption = 0,
    inactivitytimeout: InactivityTimeoutOption = 120,
    log: LogOption = LogLevel.info,
) -> None:
    """Download a stream, keep it in a file, and serve it."""
    limits = Limits(
        write_timeout=writetimeout / 1000,
        inactivity_timeout=inactivitytimeout,
        handshake_timeout=inactivitytimeout,
    )
    relay_until(Relay([upstream_of(server)], file, port=port, limits=limits))
