"""Options that the commands of `dsapp` share."""

from __future__ import annotations

from typing import Annotated

import typer

from datastreamer.cli.shared import logs
from datastreamer.cli.shared.options import LogLevel


def _set_level(level: LogLevel) -> LogLevel:
    logs.set_level(level.value)
    return level


LogOption = Annotated[
    LogLevel,
    typer.Option("--log", callback=_set_level, help="Set the lowest level to log, to stderr."),
]
