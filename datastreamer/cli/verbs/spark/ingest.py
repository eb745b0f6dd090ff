"""`datastreamer spark ingest`: write a sequencer's stream to Parquet tables."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any, Final, cast

import typer

from datastreamer.cli.shared import logs
from datastreamer.cli.shared.addresses import server_address
from datastreamer.cli.shared.options import (
    SourceArgument,
    StreamTypeOption,
    fraction_option,
    number_option,
    text_option,
)
from datastreamer.cli.shared.signals import StopRequest
from datastreamer.cli.verbs.spark.running import MasterOption, spark_session

if TYPE_CHECKING:
    from datastreamer.spark.pipeline.ingest import Ingest
    from datastreamer.spark.pipeline.manifest import EntryRange
    from datastreamer.spark.pipeline.tables import Format

_LOOK_SECONDS = 1
_REPORT_SECONDS: Final = 10
_DELTA: Final = {
    "spark.sql.extensions": "io.delta.sql.DeltaSparkSessionExtension",
    "spark.sql.catalog.spark_catalog": "org.apache.spark.sql.delta.catalog.DeltaCatalog",
}


def _read_format(value: str) -> str:
    if value not in ("parquet", "delta"):
        raise typer.BadParameter(f"it is parquet or delta, not {value!r}")
    return value


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
    float, fraction_option("SECONDS", "With --follow: interval between writes.", least=0, most=1e6)
]
FormatOption = Annotated[
    str,
    text_option(
        "FORMAT",
        "Format of the tables: parquet, or delta with Delta's package in PYSPARK_SUBMIT_ARGS.",
        parser=_read_format,
    ),
]
CompactOption = Annotated[
    bool, typer.Option("--compact", help="Then join the files of earlier writes into fewer.")
]
ChunkOption = Annotated[int, number_option("N", "Number of entries per write.", least=1)]


def ingest(
    source: SourceArgument,
    out: OutArgument,
    *,
    follow: FollowOption = False,
    every: EveryOption = 10.0,
    chunk: ChunkOption = 1_000_000,
    format: FormatOption = "parquet",
    compact: CompactOption = False,
    master: MasterOption = "local[*]",
    stream_type: StreamTypeOption = None,
) -> None:
    """Write blocks, transactions and batches to Parquet.

    Transactions are decoded, with their senders; GER updates have a table as well. Rows with a
    time are partitioned by day. The next run continues where the last one ended, even if it was
    killed; each entry is in the tables once.

    Examples:
      datastreamer spark ingest stream.bin tables
      datastreamer spark ingest 127.0.0.1:6900 tables --follow
    """
    options = _options(source, stream_type)
    from datastreamer.spark import find_java
    from datastreamer.spark.pipeline.ingest import Ingest, ensure_openable
    from datastreamer.spark.pipeline.manifest import Manifest

    # Find missing requirements first: Spark needs seconds to start.
    ensure_openable()
    find_java()
    manifest = Manifest(options, out)
    before, total, begun = manifest.done, manifest.total(), manifest.begun()
    manifest.close()
    if before == total and not (begun or follow or compact):
        logs.say(f"{out}: nothing new; it has all entries before {before:,}")
        return
    with spark_session(master, _DELTA if format == "delta" else {}) as spark:
        job = Ingest(spark, options, out, cast("Format", format))
        try:
            began = time.monotonic()
            with _progress(spark, out) as note:
                done = job.backfill(chunk, note)
                if compact:
                    logs.say(f"{out}: its entries are in {job.compact()} ranges")
            seconds = time.monotonic() - began
            logs.say(
                f"{out}: {done:,} entries in {seconds:.1f} s; it has all entries before "
                f"{job.done:,}"
            )
            if follow:
                _follow(job, every, out)
        finally:
            job.close()


@contextmanager
def _progress(spark: Any, out: str) -> Iterator[Any]:
    """Report how far a backfill is, every 10 s; gives the function to call for each range."""
    tracker = spark.sparkContext.statusTracker()
    ended = threading.Event()
    now = ["Spark begins"]

    def note(wanted: EntryRange, total: int) -> None:
        share = 100 * wanted.start // total
        now[0] = f"entries {wanted.start:,} to {wanted.stop:,} of {total:,} ({share} % done)"

    def report() -> None:
        while not ended.wait(_REPORT_SECONDS):
            stages = [tracker.getStageInfo(stage) for stage in tracker.getActiveStageIds()]
            tasks = sum(stage.numTasks for stage in stages if stage)
            ready = sum(stage.numCompletedTasks for stage in stages if stage)
            logs.say(f"{out}: {now[0]}: {ready} of {tasks} tasks of this step")

    thread = threading.Thread(target=report, daemon=True)
    thread.start()
    try:
        yield note
    finally:
        ended.set()
        thread.join()


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
