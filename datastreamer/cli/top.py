"""`datastreamer top`: a server and its clients, live."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Annotated

import typer

from datastreamer.cli.ending import Ending, asked_to_end
from datastreamer.cli.options import (
    Format,
    JsonOption,
    LogFormatOption,
    LogLevelOption,
    ReportFormatOption,
    chosen_format,
    number_option,
)
from datastreamer.cli.outcome import write_out
from datastreamer.cli.output import json_line
from datastreamer.cli.watching import (
    LimitOption,
    MetricsAddressArgument,
    Overview,
    ask,
    rendered,
    table,
    with_rates,
)


def _read_interval(value: str | float) -> float:
    try:
        seconds = float(value)
    except ValueError:
        seconds = 0.0
    if not 0.1 <= seconds <= 3600:
        raise typer.BadParameter(f"it is seconds from 0.1 to 3600, not {value!r}")
    return seconds


IntervalOption = Annotated[
    float,
    typer.Option("--interval", parser=_read_interval, metavar="S", help="Look so often."),
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
    log_level: LogLevelOption = None,
    log_format: LogFormatOption = None,
) -> None:
    """Show a server's head and its clients, again and again: position, lag, throughput.

    Asks the server's metrics port (serve --metrics-port). A line of JSON a look where standard
    output is no terminal. SIGINT ends it.
    """
    shape = chosen_format(format, json)
    with asked_to_end() as ending:
        looks = _looks(server, interval, count, limit, ending)
        if shape is Format.table and sys.stdout.isatty():
            _live(looks)
            return
        for told in looks:
            write_out(rendered(told) if shape is Format.table else json_line(told))


def _looks(
    server: str, interval: float, count: int, limit: int, ending: Ending
) -> Iterator[Overview]:
    before: Overview | None = None
    looked = 0
    while not ending.is_set():
        told = ask(server, limit)
        yield with_rates(told, before)
        before = told
        looked += 1
        if looked == count or ending.wait(interval):
            return


def _live(looks: Iterator[Overview]) -> None:
    from rich.live import Live

    with Live(auto_refresh=False, vertical_overflow="crop") as live:
        for told in looks:
            live.update(table(told), refresh=True)
