"""`datastreamer spark ingest`: write a sequencer's stream to Parquet tables."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

import typer

from datastreamer.cli.shared import logs
from datastreamer.cli.shared.addresses import server_address
from datastreamer.cli.shared.exit_codes import exit_zero_on_signal
from datastreamer.cli.shared.options import (
    SourceArgument,
    StreamTypeOption,
    fraction_option,
    number_option,
)
from datastreamer.cli.verbs.spark.running import MasterOption, spark_session

if TYPE_CHECKING:
    from datastreamer.spark.pipeline.ingest import Ingest
    from datastreamer.spark.pipeline.tables import Format

_REPORT_SECONDS: Final = 10
_DELTA: Final = {
    "spark.sql.extensions": "io.delta.sql.DeltaSparkSessionExtension",
    "spark.sql.catalog.spark_catalog": "org.apache.spark.sql.delta.catalog.DeltaCatalog",
}


OutArgument = Annotated[
    str,
    typer.Argument(
        metavar="OUT",
        help="Folder or URL (s3a:, hdfs:) of the tables, where an earlier ingest is continued.",
    ),
]
FollowOption = Annotated[
    bool, typer.Option("--follow", help="Continue with later commits, until SIGINT or SIGTERM.")
]
EveryOption = Annotated[
    float, fraction_option("SECONDS", "With --follow: interval between writes.", least=0, most=1e6)
]
FormatOption = Annotated[
    Literal["parquet", "delta"],
    typer.Option(
        help="Set the format of the tables: parquet, or delta with Delta's package in "
        "PYSPARK_SUBMIT_ARGS.",
    ),
]
CompactOption = Annotated[
    bool, typer.Option("--compact", help="Afterwards join the files of earlier writes into fewer.")
]
ChunkOption = Annotated[int, number_option("N", "Number of entries per write.", least=1)]
ModeOption = Annotated[
    Literal["FAILFAST", "PERMISSIVE", "DROPMALFORMED"],
    typer.Option(
        case_sensitive=False,
        help="Set what to do about damaged pages and entries that are not events: fail, write "
        "nulls and a column with the reason, or drop them.",
    ),
]


def ingest(
    source: SourceArgument,
    out: OutArgument,
    *,
    follow: FollowOption = False,
    every: EveryOption = 10.0,
    chunk: ChunkOption = 1_000_000,
    format: FormatOption = "parquet",
    compact: CompactOption = False,
    mode: ModeOption = "FAILFAST",
    master: MasterOption = "local[*]",
    stream_type: StreamTypeOption = None,
) -> None:
    """Write blocks, transactions and batches to Parquet.

    Transactions are decoded, with their senders; GER updates have a table as well. Rows with a
    time are partitioned by day. The next run continues where the last one ended, even if it was
    killed; each entry is in the tables once. After a truncation or an update of the stream, first
    removes the rows of entries that the stream no longer has.

    Examples:
      datastreamer spark ingest stream.bin tables
      datastreamer spark ingest 127.0.0.1:6900 tables --follow
    """
    options = _options(source, stream_type, mode)
    from datastreamer.spark import find_java
    from datastreamer.spark.pipeline.ingest import Ingest, ensure_openable

    # Find missing requirements first: Spark needs seconds to start.
    ensure_openable()
    find_java()
    if (done := _done_already(options, out, format)) is not None and not (follow or compact):
        logs.say(f"{out}: nothing new; it has all entries before {done:,}")
        return
    with spark_session(master, _DELTA if format == "delta" else {}) as spark:
        job = Ingest(spark, options, out, format)
        try:
            with _progress(spark, job, out):
                began = time.monotonic()
                count = job.backfill(chunk)
                seconds = time.monotonic() - began
                if compact:
                    logs.say(f"{out}: its entries are in {job.compact()} ranges")
            logs.say(
                f"{out}: {count:,} entries in {seconds:.1f} s; it has all entries before "
                f"{job.done:,}"
            )
            if follow:
                exit_zero_on_signal()
                for count in job.follow(every, chunk=chunk):
                    logs.say(
                        f"{out}: {count:,} more entries; it has all entries before {job.done:,}"
                    )
        finally:
            job.close()


def _done_already(options: dict[str, str], out: str, format: Format) -> int | None:
    """How many entries the tables hold, if that is all; None if not, or if only Spark knows.

    Raises what is wrong with the stream or the folder.
    """
    from datastreamer.spark.pipeline.folder import TableFolder
    from datastreamer.spark.pipeline.manifest import Manifest
    from datastreamer.spark.pipeline.source import Source
    from datastreamer.spark.pipeline.tables import columns_of
    from datastreamer.spark.read.paths import local_path

    source, path = Source(options), local_path(out)
    if path is None:
        return None
    manifest = Manifest(TableFolder(path), source, columns_of(source.options), format)
    try:
        done = manifest.now.done
        return done if source.look().total == done and manifest.unchanged() else None
    finally:
        manifest.close()


@contextmanager
def _progress(spark: Any, job: Ingest, out: str) -> Iterator[None]:
    """Report how far a backfill is, every 10 s."""
    tracker = spark.sparkContext.statusTracker()
    ended = threading.Event()

    def report() -> None:
        while not ended.wait(_REPORT_SECONDS):
            now = job.progress
            if now is None:
                continue
            stages = [tracker.getStageInfo(stage) for stage in tracker.getActiveStageIds()]
            tasks = sum(stage.numTasks for stage in stages if stage)
            ready = sum(stage.numCompletedTasks for stage in stages if stage)
            share = 100 * now.share(ready / max(1, tasks))
            logs.say(
                f"{out}: {share:.1f} % of {now.total:,} entries: {now.table} of entries "
                f"{now.start:,} to {now.stop:,}, {ready} of {tasks} tasks"
            )

    thread = threading.Thread(target=report, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _options(source: str, stream_type: int | None, mode: str) -> dict[str, str]:
    """SOURCE as options of the Spark data source."""
    address = server_address(source)
    if address is None:
        found = {"path": source}
    else:
        found = {"server": f"tcps://{address}" if address.tls else str(address)}
    if stream_type is not None:
        found["streamType"] = str(stream_type)
    return {**found, "mode": mode}
