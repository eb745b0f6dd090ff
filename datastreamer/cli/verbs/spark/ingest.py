"""`datastreamer spark ingest`: a sequencer's stream as typed tables in Parquet."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Annotated

import typer

from datastreamer.cli.shared import logs
from datastreamer.cli.shared.options import (
    SourceArgument,
    StreamTypeOption,
    number_option,
    seconds_parser,
)
from datastreamer.cli.shared.signals import stop_on_signal
from datastreamer.cli.shared.source import parse_address
from datastreamer.cli.verbs.spark.running import MasterOption, spark_session
from datastreamer.transport.listeners import address_of

if TYPE_CHECKING:
    from datastreamer.spark.pipeline.ingest import Ingest

_LOOK_SECONDS = 1

OutArgument = Annotated[str, typer.Argument(metavar="OUT", help="A folder, which is gone on with.")]
FollowOption = Annotated[
    bool, typer.Option("--follow", help="Go on with what comes, until told to end.")
]


EveryOption = Annotated[
    float,
    typer.Option(
        "--every", parser=seconds_parser(0, 1e6), metavar="S", help="With --follow: so often."
    ),
]
ChunkOption = Annotated[
    int, number_option("--chunk", "N", "Write so many entries at a time.", least=1)
]


def ingest(
    source: SourceArgument,
    out: OutArgument,
    follow: FollowOption = False,
    every: EveryOption = 10.0,
    chunk: ChunkOption = 5_000_000,
    master: MasterOption = "local[*]",
    stream_type: StreamTypeOption = None,
) -> None:
    """Write blocks, transactions (opened, with senders), batches and their ends to Parquet.

    Blocks and transactions stand in folders by day. The next run goes on where the last one
    ended, however it did; each entry is in the tables once.
    """
    options = _options(source, stream_type)
    from datastreamer.spark import find_java
    from datastreamer.spark.pipeline.ingest import Ingest, ensure_openable
    from datastreamer.spark.pipeline.manifest import Manifest

    # Spark takes seconds to start, and is not quiet about it.
    ensure_openable()
    find_java()
    Manifest(options, out).close()
    with spark_session(master) as spark:
        job = Ingest(spark, options, out)
        try:
            began = time.monotonic()
            done = job.backfill(chunk)
            seconds = time.monotonic() - began
            logs.say(f"{out}: {done:,} entries in {seconds:.1f} s; it has all before {job.done:,}")
            if follow:
                _follow(job, every, out)
        finally:
            job.close()


def _options(source: str, stream_type: int | None) -> dict[str, str]:
    """SOURCE in the words of Spark's options."""
    address = None if os.path.lexists(source) else parse_address(source)
    if address is None:
        found = {"path": source}
    elif address.tls:
        found = {"server": address_of(address[:2]), "tls": "true"}
    else:
        found = {"server": address_of(address[:2])}
    if stream_type is not None:
        found["streamType"] = str(stream_type)
    return found


def _follow(job: Ingest, every: float, out: str) -> None:
    before = job.done
    with stop_on_signal() as ending:
        query = job.follow(every)
        try:
            while not ending.is_set() and not query.awaitTermination(_LOOK_SECONDS):
                if job.done > before:
                    logs.say(f"{out}: {job.done - before:,} entries more, all before {job.done:,}")
                    before = job.done
        finally:
            query.stop()
