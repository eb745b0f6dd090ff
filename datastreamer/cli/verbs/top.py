"""`datastreamer top`: watch a server and its clients."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Iterator
from typing import Annotated

from datastreamer.cli.shared.console import live_display, text
from datastreamer.cli.shared.exit_codes import Failure, exit_zero_on_signal, write_out
from datastreamer.cli.shared.metrics_client import (
    LimitOption,
    MetricsAddressArgument,
    Overview,
    ask,
    drawn,
    table,
    with_rates,
)
from datastreamer.cli.shared.options import ReportOutput, fraction_option, number_option
from datastreamer.cli.shared.output import json_line

_log = logging.getLogger(__name__)


IntervalOption = Annotated[
    float, fraction_option("SECONDS", "Interval between updates.", least=0.1, most=3600)
]
CountOption = Annotated[int, number_option("N", "Exit after N updates; 0: run until SIGINT.")]


def top(
    server: MetricsAddressArgument,
    *,
    interval: IntervalOption = 1.0,
    count: CountOption = 0,
    limit: LimitOption = 20,
    output: ReportOutput,
) -> None:
    """Watch a server's head and its clients.

    Shows position, lag and throughput, until SIGINT. Reads the metrics port of the server
    (serve --metrics-port). Prints one line of JSON per update if standard output is not a
    terminal. If the server is lost, it is retried.

    Examples:
      datastreamer top 127.0.0.1:9600
      datastreamer top 127.0.0.1:9600 --count 1 --json | jq .head_entries
    """
    shape = output.chosen()
    if not count:
        exit_zero_on_signal()
    if shape == "table" and sys.stdout.isatty():
        _live(lambda lost: _updates(server, interval, count, limit, lost))
        return

    def lost(why: str) -> None:
        _log.warning("lost %s, trying again: %s", server, why)

    for state in _updates(server, interval, count, limit, lost):
        write_out(drawn(state) if shape == "table" else json_line(state))


def _updates(
    server: str,
    interval: float,
    count: int,
    limit: int,
    lost: Callable[[str], None],
) -> Iterator[Overview]:
    """The state of the server, at each update. After the first, a server that is lost is asked
    again; `lost` is called with the reason, once."""
    before: Overview | None = None
    updates, down = 0, False
    while True:
        try:
            state = ask(server, limit)
        except Failure as failure:
            if not updates:
                raise
            if not down:
                lost(str(failure).removeprefix(f"{server}: ").partition(";")[0])
            # After a restart clients and counters are new.
            before, down = None, True
        else:
            yield with_rates(state, before)
            before, down = state, False
            updates += 1
            if updates == count:
                return
        time.sleep(interval)


def _live(updates: Callable[[Callable[[str], None]], Iterator[Overview]]) -> None:
    from rich.console import Group

    with live_display() as live:

        def lost(why: str) -> None:
            live.update(Group(text(f"lost, trying again: {why}"), live.renderable), refresh=True)

        for state in updates(lost):
            live.update(table(state), refresh=True)
