"""`datastreamer spark ingest`: write a sequencer's stream to Parquet tables."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated

import typer

from datastreamer.cli.shared import logs
from datastreamer.cli.shared.addresses import server_address
from datastreamer.cli.shared.options import (
    SourceArgument,
    StreamTypeOption,
    fraction_option,
    number_option,
)
from datastreamer.cli.shared.signals import StopRequest
from datastreamer.cli.verbs.spark.running import MasterOption, spark_session

if TYPE_CHECKING:
    from datastreamer.spark.pipeline.ingest import Ingest

_LOOK_SECONDS = 1

OutArgument = Annotated[
    str,
    typer.Argument(
        metavar="OUT", help="Folder of the tables, where an earlier ingest is continued."
    ),
]
FollowOption = Annotated[
    bool, typer.Option("--follow", help="Continue with later commits, until SIGINT or SIGTERM.")
]
EveryOption = Annotated[
    float,
    fraction_option(
        "--every", "SECONDS", "With --follow: interval between writes.", least=0, most=1e6
    ),
]
ChunkOption = Annotated[int, number_option("--chunk", "N", "Number of entries per write.", least=1)]


def ingest(
    source: SourceArgument,
    out: OutArgument,
    *,
    follow: FollowOption = False,
    every: EveryOption = 10.0,
    chunk: ChunkOption = 5_000_000,
    master: MasterOption = "local[*]",
    stream_type: StreamTypeOption = None,
) -> None:
    """Write blocks, transactions (decoded, with senders), batches and their ends to Parquet.

    Blocks and transactions are partitioned by day. The next run continues where the last one
    ended, even if it was killed; each entry is in the tables once.
    """
    options = _options(source, stream_type)
    from datastreamer.spark import find_java
    from datastreamer.spark.pipeline.ingest import Ingest, ensure_openable
    from datastreamer.spark.pipeline.manifest import Manifest

    # Find missing requirements first: Spark needs seconds to start.
    ensure_openable()
    find_java()
    Manifest(options, out).close()
    with spark_session(master) as spark:
        job = Ingest(spark, options, out)
        try:
            began = time.monotonic()
            done = job.backfill(chunk)
            seconds = time.monotonic() - began
            logs.say(
                f"{out}: {done:,} entries in {seconds:.1f} s; it has all entries before "
                f"{job.done:,}"
            )
            if follow:
                _follow(job, every, out)
        finally:
            job.close()


def _options(source: str, stream_type: int | None) -> dict[str, str]:
    """SOURCE as options of the Spark data source."""
    address = server_address(source)
    if address is None:
        found = {"path": source}
    else:
        found = {"server": f"tcps://{address}" if address.tls else str(address)}
    if stream_type is not None:
        found["streamType"] = str(stream_type)
    return found


def _follow(job: Ingest, every: float, out: str) -> None:
    before = job.done
    with StopRequest() as stop:
        query = job.follow(every)
        try:
            while not stop.is_set() and not query.awaitTermination(_LOOK_SECONDS):
                if job.done > before:
                    logs.say(
                        f"{out}: {job.done - before:,} more entries; it has all entries before "
                        f"{job.done:,}"
                    )
                    before = job.done
        finally:
            query.stop()
