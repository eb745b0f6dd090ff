"""`datastreamer clients`: list the clients of a server."""

from __future__ import annotations

from datastreamer.cli.shared.exit_codes import write_out
from datastreamer.cli.shared.metrics_client import LimitOption, MetricsAddressArgument, ask, drawn
from datastreamer.cli.shared.options import ReportOutput
from datastreamer.cli.shared.output import json_line


def clients(
    server: MetricsAddressArgument, *, limit: LimitOption = 1000, output: ReportOutput
) -> None:
    """List the clients of a server.

    The client with the largest lag is first. Reads the metrics port of the server (serve
    --metrics-port). Prints one line of JSON per client if standard output is not a terminal.

    Examples:
      datastreamer clients 127.0.0.1:9600
      datastreamer clients 127.0.0.1:9600 --json | jq -r .client
    """
    shape = output.chosen()
    state = ask(server, limit)
    if shape == "table":
        write_out(drawn(state))
    else:
        write_out(b"".join([json_line(client) for client in state["clients"]]))
