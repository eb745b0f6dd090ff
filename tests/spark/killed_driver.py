"""A driver with three streaming queries into Parquet. A test runs it and kills it.

Arguments: the test's folder and the address of a server. Prints a line when every query
has completed a batch, and again after later batches.
"""

from __future__ import annotations

import sys
import time
from typing import Any

from datastreamer.spark import STATE_SETTINGS, messages, reassemble_stream, session
from datastreamer.spark.versions import HAS_LIMITS
from tests.spark.settings import SETTINGS

PER_BATCH = 100


def start(spark: Any, folder: str, server: str, *, to_the_end: bool = False) -> list[Any]:
    """Start the queries, or continue them from their checkpoints; by small batches, or in one
    batch each, `to_the_end` of their streams."""
    reader = spark.readStream.format("datastream")
    if not to_the_end:
        # Several parts a batch.
        reader = reader.option("maxEntriesPerTrigger", PER_BATCH).option("partitionBytes", "20k")
    found = messages(reader.load(f"{folder}/messages.bin"), "s")
    rows = {
        "file": reader.load(f"{folder}/stream.bin"),
        "payloads": reassemble_stream(found, max_age=None).rows,
        # The last one: a reader keeps its options.
        "server": (reader if HAS_LIMITS else spark.readStream.format("datastream"))
        .option("server", server)
        .load(),
    }
    trigger: dict[str, Any] = (
        {"availableNow": True} if to_the_end else {"processingTime": "0 seconds"}
    )
    return [
        frame.writeStream.format("parquet")
        .option("path", f"{folder}/{name}")
        .option("checkpointLocation", f"{folder}/{name}-checkpoint")
        .trigger(**trigger)
        .start()
        for name, frame in rows.items()
    ]


def main(folder: str, server: str) -> None:
    spark = session("local[2]", "killed", SETTINGS | STATE_SETTINGS)
    spark.sparkContext.setLogLevel("OFF")
    queries = start(spark, folder, server)
    printed = None
    while all(query.isActive for query in queries):
        time.sleep(0.02)
        progress = [query.lastProgress for query in queries]
        completed = [each["batchId"] for each in progress if each is not None]
        if len(completed) == len(queries) and completed != printed:
            printed = completed
            print(*completed, flush=True)
    sys.exit("\n".join(str(query.exception()) for query in queries))


if __name__ == "__main__":
    main(*sys.argv[1:])
