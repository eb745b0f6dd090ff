"""Options that the commands of `dsapp` share."""

from __future__ import annotations

from typing import Annotated

import typer

from datastreamer.cli.shared import logs
from datastreamer.cli.shared.options import number_option, text_option
from datastreamer.server.limits import Limits


def _set_level(level: logs.Level) -> logs.Level:
    logs.set_level(level)
    return level


LogOption = Annotated[
    logs.Level, typer.Option(callback=_set_level, help="Set the lowest level to log, to stderr.")
]
PortOption = Annotated[int, number_option("PORT", "Port to listen on.", most=65535)]
FileOption = Annotated[str, text_option("FILE", "The stream file.")]
WriteTimeoutOption = Annotated[
    int,
    number_option("MS", "Disconnect a client that receives no byte for MS milliseconds; 0: never."),
]
InactivityTimeoutOption = Annotated[
    int,
    number_option(
        "SECONDS",
        "Disconnect a client that neither streams nor sends commands for this time; 0: never.",
    ),
]


def limits_of(writetimeout: int, inactivitytimeout: int) -> Limits:
    """The limits of a server with these timeouts."""
    return Limits(
        write_timeout=writetimeout / 1000,
        inactivity_timeout=inactivitytimeout,
        handshake_timeout=inactivitytimeout,
    )
