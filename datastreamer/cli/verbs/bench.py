"""`datastreamer bench`: the performance of this machine, or of a server, in a few seconds.

The project's own benchmarks are in bench/.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from datastreamer.cli.shared import logs
from datastreamer.cli.shared.console import rendered
from datastreamer.cli.shared.exit_codes import Failure, write_out
from datastreamer.cli.shared.options import (
    ReportOutput,
    SourceOptions,
    fraction_option,
    text_option,
)
from datastreamer.cli.shared.output import json_line

if TYPE_CHECKING:
    from datastreamer.storage.stream import DataStream

_DATA = bytes(200)
# Of no use to a program that reads the stream: "benc".
_TYPE = 0x62656E63
_AT_ONCE = 10_000
_IN_OPERATION = 5
# 217 MB.
_MOST_ENTRIES = 1_000_000


SecondsOption = Annotated[
    float, fraction_option("SECONDS", "Duration of each measurement.", least=0.01, most=60)
]
ServerArgument = Annotated[
    str | None,
    typer.Argument(
        metavar="SERVER", help="Measure this server: HOST:PORT, tcps://HOST:PORT, unix:PATH."
    ),
]
TokenOption = Annotated[
    str | None,
    text_option(
        "FILE",
        "For a server: also measure live latency. Appends entries of 200 bytes and of type "
        f"0x{_TYPE:x}, with the first token in this file; they stay in the stream.",
    ),
]
FolderOption = Annotated[
    Path,
    text_option(
        "FOLDER", "Folder on the disk to measure; up to 0.5 GB is written there, and removed."
    ),
]


class _Figure(NamedTuple):
    work: str
    figure: float
    unit: str


def bench(
    server: ServerArgument = None,
    folder: FolderOption = Path(),
    seconds: SecondsOption = 0.5,
    *,
    publish_token_file: TokenOption = None,
    output: ReportOutput,
    options: SourceOptions,
) -> None:
    """Measure this machine, or a server.

    Of this machine, measures writing, reading and serving, with entries of 200 bytes, over the
    loopback interface. Of a server, measures catching up, queries one by one, and the rate of its
    commits; only reads, unless --publish-token-file is given. Takes a few seconds.

    Examples:
      datastreamer bench
      datastreamer bench sequencer:6900 --seconds 5 --json
    """
    shape = output.chosen()
    figures = []

    def show(work: Generator[_Figure, None, None]) -> None:
        # Closed here: what it measures ends before the folder is removed.
        with closing(work) as found:
            for each in found:
                figures.append(each)
                if shape == "jsonl":
                    figure = round(each.figure, 3 if each.unit == "ms" else 1)
                    write_out(json_line({**each._asdict(), "figure": figure}))

    if server is None and publish_token_file is not None:
        raise typer.BadParameter("--publish-token-file is for a server")
    if server is not None:
        show(_of_server(server, seconds, options))
        if publish_token_file is None:
            logs.say(
                "live latency was not measured: that needs entries whose commit this program sees; "
                "--publish-token-file appends some"
            )
        else:
            show(_of_delivery(server, seconds, options, publish_token_file))
    elif not folder.is_dir():
        raise Failure(f"{folder}: no such folder")
    else:
        with tempfile.TemporaryDirectory(prefix="datastreamer-bench-", dir=folder) as place:
            show(_measured(Path(place), seconds))
    if shape == "table":
        write_out(_table(figures))


def _rate(seconds: float, work: str, unit: str, once: Callable[[], int]) -> _Figure:
    """The rate of `once`, which returns how much it did, 0 at its end."""
    done, begin = 0, time.perf_counter()
    while True:
        more = once()
        done += more
        spent = time.perf_counter() - begin
        if not more or spent >= seconds:
            return _Figure(work, done / spent, unit)


def _times(seconds: float, work: str, once: Callable[[], object]) -> Iterator[_Figure]:
    """The median and the 99th percentile of what `once` takes."""
    taken: list[float] = []
    until = time.perf_counter() + seconds
    while not taken or time.perf_counter() < until:
        begin = time.perf_counter()
        once()
        taken.append(1000 * (time.perf_counter() - begin))
    taken.sort()
    yield _Figure(f"{work}, one by one, median", taken[len(taken) // 2], "ms")
    yield _Figure(f"{work}, one by one, 99 %", taken[len(taken) * 99 // 100], "ms")


def _of_delivery(
    server: str, seconds: float, options: SourceOptions, token_file: str
) -> Generator[_Figure, None, None]:
    from datastreamer.cli.shared.addresses import address_of
    from datastreamer.cli.shared.source import ServerSource
    from datastreamer.cli.verbs.written import PublisherOptions, RemoteStream

    terms = PublisherOptions(token_file=token_file)
    with (
        RemoteStream(server, options.stream_type, terms, options) as remote,
        ServerSource(address_of(server), options=options) as source,
        source.client.batches(from_entry=remote.total_entries) as live,
    ):

        def deliver() -> None:
            op = remote.publisher.atomic_op()
            op.add_entry(_TYPE, _DATA)
            op.commit(wait=False)
            next(live)

        # From the second one on the client is live.
        deliver()
        yield from _times(seconds, "commit to a live client", deliver)


def _of_server(
    server: str, seconds: float, options: SourceOptions
) -> Generator[_Figure, None, None]:
    from datastreamer.cli.shared.addresses import address_of
    from datastreamer.cli.shared.source import ServerSource

    with ServerSource(address_of(server), options=options) as source:
        client, total = source.client, source.header().total_entries
        times = partial(_times, seconds)
        yield from times("header", client.header)
        if not total:
            return
        numbers = _scattered(total)
        yield from times("entry by number", lambda: client.entry(next(numbers)))
        entries, size, begin = 0, 0, time.perf_counter()
        with client.batches(from_entry=0, stop=total) as batches:
            for batch in batches:
                entries, size = entries + len(batch), size + batch.nbytes
                if time.perf_counter() - begin >= seconds:
                    break
        spent = time.perf_counter() - begin
        yield _Figure("catch up", entries / spent, "entries/s")
        yield _Figure("catch up", size / spent / 1e6, "MB/s")
        before, begin = client.header().total_entries, time.perf_counter()
        time.sleep(seconds)
        committed = client.header().total_entries - before
        yield _Figure("committed", committed / (time.perf_counter() - begin), "entries/s")


def _measured(place: Path, seconds: float) -> Generator[_Figure, None, None]:
    from datastreamer.client.blocking_client import BlockingClient
    from datastreamer.service.embedded import StreamServer
    from datastreamer.storage.stream import DataStream

    rate = partial(_rate, seconds)

    def operation(stream: DataStream) -> int:
        with stream.atomic_op() as op:
            for _ in range(_IN_OPERATION):
                op.add_entry(1, _DATA)
        return 1

    def many(stream: DataStream) -> int:
        if stream.total_entries >= _MOST_ENTRIES:
            return 0
        with stream.atomic_op() as op:
            op.add_entries(1, [_DATA] * _AT_ONCE)
        return _AT_ONCE

    with DataStream.create(place / "synced.bin", sync="commit", index="memory") as stream:
        work = f"write, operations of {_IN_OPERATION}, each on disk (--sync commit)"
        yield rate(work, "operations/s", lambda: operation(stream))
    with DataStream.create(place / "stream.bin", sync="os", index="memory") as stream:
        work = f"write, operations of {_IN_OPERATION}, --sync os"
        yield rate(work, "operations/s", lambda: operation(stream))
        work = f"write, operations of {_AT_ONCE:,}, --sync os"
        yield rate(work, "entries/s", lambda: many(stream))
        total = stream.total_entries
        numbers = _scattered(total)
        yield rate(
            "read the file, in batches", "entries/s", lambda: sum(map(len, stream.batches(0, None)))
        )
        yield rate(
            "read the file, entry by number",
            "entries/s",
            lambda: len([stream.entry(next(numbers)) for _ in range(100)]),
        )
    with (
        StreamServer(
            place / "stream.bin", host="127.0.0.1", port=0, sync="os", index="memory"
        ) as server,
        BlockingClient(*server.addresses[0]) as client,
    ):
        yield rate(
            "one client catches up, loopback",
            "entries/s",
            lambda: sum(map(len, client.batches(from_entry=0, stop=total))),
        )
        yield rate(
            "one client asks for entries by number, one by one, loopback",
            "entries/s",
            lambda: len([client.entry(next(numbers)) for _ in range(10)]),
        )


def _scattered(total: int) -> Iterator[int]:
    """Numbers of entries in scattered order, endlessly."""
    at = 0
    while True:
        yield at % total
        at += 7919


def _table(figures: list[_Figure]) -> bytes:
    from rich.table import Table

    made = Table("work")
    made.add_column("figure", justify="right")
    made.add_column("unit")
    for work, figure, unit in figures:
        made.add_row(work, f"{figure:,.0f}" if unit != "ms" else f"{figure:,.3f}", unit)
    return rendered(made, width=120, styled=False)
