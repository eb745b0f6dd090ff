"""A driver with two executors and a streaming query that writes to a server. A test kills it, or
one of the executors. Arguments: the test's folder and the address of the server."""

from __future__ import annotations

import sys
from typing import Any

from datastreamer.spark import session
from tests.spark.settings import SETTINGS

PER_BATCH = 100


def start(spark: Any, folder: str, server: str, *, to_the_end: bool = False) -> Any:
    """Start the query, or continue it from its checkpoint; `to_the_end` in large batches."""
    most = 100 * PER_BATCH if to_the_end else PER_BATCH
    frame = spark.readStream.format("datastream").option("maxEntriesPerTrigger", most)
    frame = frame.option("partitionBytes", "10k").load(f"{folder}/source.bin")
    trigger: dict[str, Any] = (
        {"availableNow": True} if to_the_end else {"processingTime": "0 seconds"}
    )
    query = frame.select("type", "data").writeStream.format("datastream")
    return (
        query.option("server", server)
        .option("tokenFile", f"{folder}/token")
        .option("checkpointLocation", f"{folder}/checkpoint")
        .trigger(**trigger)
        .start()
    )


def main(folder: str, server: str, master: str) -> None:
    # An executor that is lost is replaced, however many are.
    settings = {"spark.executor.memory": "512m", "spark.deploy.maxExecutorRetries": "-1"}
    spark = session(master, "killed", SETTINGS | settings)
    spark.sparkContext.setLogLevel("OFF")
    query = start(spark, folder, server)
    printed = None
    while query.isActive:
        query.awaitTermination(0.02)
        progress = query.lastProgress
        if progress is not None and progress["batchId"] != printed:
            printed = progress["batchId"]
            print(printed, flush=True)
    sys.exit(str(query.exception()))


if __name__ == "__main__":
    main(*sys.argv[1:])
