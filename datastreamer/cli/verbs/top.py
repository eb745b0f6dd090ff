"""`datastreamer top`: a server and its clients, live."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator
from typing import Annotated

import typer

from datastreamer.cli.shared.console import new_console, text
from datastreamer.cli.shared.exit_codes import Failure, write_out
from datastreamer.cli.shared.metrics_client import (
    LimitOption,
    MetricsAddressArgument,
    Overview,
    ask,
    drawn,
    table,
    with_rates,
)
from datastreamer.cli.shared.options import (
    Format,
    JsonOption,
    ReportFormatOption,
    chosen_format,
    number_option,
    seconds_parser,
)
from datastreamer.cli.shared.output import json_line
from datastreamer.cli.shared.signals import StopRequest, stop_on_signal

_log = logging.getLogger(__name__)


IntervalOption = Annotated[
    float,
    typer.Option(
        "--interval", parser=seconds_parser(0.1, 3600), metavar="S", help="Look so often."
    ),
]
CountOption = Annotated[
    int, number_option("--count", "N", "End after so many looks. 0: when it is told to.")
]


def top(
    server: MetricsAddressArgument,
    interval: IntervalOption = 1.0,
    count: CountOption = 0,
    limit: LimitOption = 20,
    format: ReportFormatOption = None,
    json: JsonOption = False,
) -> None:
    """Show a server's head and its clients, again and again: position, lag, throughput.

    Asks the server's metrics port (serve --metrics-port). A line of JSON a look where standard
    output is no terminal. A server that is lost is waited for. SIGINT ends it.
    """
    shape = chosen_format(format, json)
    with stop_on_signal() as ending:
        if shape is Format.table and sys.stdout.isatty():
            _live(lambda lost: _looks(server, interval, count, limit, ending, lost))
            return

        def lost(why: str) -> None:
            _log.warning("lost %s, trying again: %s", server, why)

        for told in _looks(server, interval, count, limit, ending, lost):
            write_out(drawn(told) if shape is Format.table else json_line(told))


def _looks(
    server: str,
    interval: float,
    count: int,
    limit: int,
    ending: StopRequest,
    lost: Callable[[str], None],
) -> Iterator[Overview]:
    """What the server tells, each time. One that has told something before is waited for;
    `lost` is told why, once."""
    before: Overview | None = None
    looked, down = 0, False
    while not ending.is_set():
        try:
            told = ask(server, limit)
        except Failure as failure:
            if not looked:
                raise
            if not down:
                lost(str(failure).removeprefix(f"{server}: ").partition(";")[0])
            # It comes back with other clients, and has counted nothing.
            before, down = None, True
        else:
            yield with_rates(told, before)
            before, down = told, False
            looked += 1
            if looked == count:
                return
        if ending.wait(interval):
            return


def _live(looks: Callable[[Callable[[str], None]], Iterator[Overview]]) -> None:
    from rich.console import Group
    from rich.live import Live

    console = new_console(sys.stdout)
    with Live(console=console, auto_refresh=False, vertical_overflow="crop") as live:

        def lost(why: str) -> None:
            live.update(Group(text(f"lost, trying again: {why}"), live.renderable), refresh=True)

        for told in looks(lost):
            live.update(table(told), refresh=True)
