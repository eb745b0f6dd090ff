"""`datastreamer clients`: who is connected to a server, once."""

from __future__ import annotations

from datastreamer.cli.shared.exit_codes import write_out
from datastreamer.cli.shared.metrics_client import LimitOption, MetricsAddressArgument, ask, drawn
from datastreamer.cli.shared.options import (
    Format,
    JsonOption,
    ReportFormatOption,
    chosen_format,
)
from datastreamer.cli.shared.output import json_line


def clients(
    server: MetricsAddressArgument,
    limit: LimitOption = 1000,
    format: ReportFormatOption = None,
    json: JsonOption = False,
) -> None:
    """Show who is connected to a server, once; those furthest behind first.

    Asks the server's metrics port (serve --metrics-port). A line of JSON a client where
    standard output is no terminal.
    """
    shape = chosen_format(format, json)
    told = ask(server, limit)
    if shape is Format.table:
        write_out(drawn(told))
    else:
        write_out(b"".join([json_line(client) for client in told["clients"]]))
