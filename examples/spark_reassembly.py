"""Whole payloads of what several producers published, by Spark, into Parquet.

    python examples/spark_reassembly.py OUT SOURCE...

A SOURCE is a stream's file, or HOST:PORT of a server. OUT/payloads has the payloads, OUT/events
where producers disagree and what is missing of what. Needs
pip install 'datastreamer[spark-reassembly]' and a Java 17 or 21.
"""

from __future__ import annotations

import os
import sys
from functools import reduce

from pyspark.sql import DataFrame, SparkSession

from datastreamer import DatastreamerError
from datastreamer.spark import events_of, messages, payloads_of, reassemble, session


def main() -> None:
    if len(sys.argv) < 3:
        raise SystemExit(__doc__)
    out, *sources = sys.argv[1:]
    try:
        spark = session(settings={"spark.ui.enabled": "false", "spark.log.level": "ERROR"})
        try:
            run(spark, out, sources)
        finally:
            spark.stop()
    except DatastreamerError as error:
        raise SystemExit(f"error: {error}") from None


def run(spark: SparkSession, out: str, sources: list[str]) -> None:
    """Reassemble the messages of all sources into the folder `out`, which is made."""
    told = reassemble(reduce(DataFrame.union, [read(spark, source) for source in sources])).rows
    # In one pass: what is told goes to disk once, and the rest is read from there.
    told.write.parquet(f"{out}/told")
    told = spark.read.parquet(f"{out}/told")
    payloads_of(told).write.parquet(f"{out}/payloads")
    events_of(told).write.parquet(f"{out}/events")
    print(f"{payloads_of(told).count():,} payloads")
    for row in events_of(told).groupBy("event", "what").count().orderBy("event", "what").collect():
        print(f"{row['count']:,} {row.event}: {row.what}")


def read(spark: SparkSession, source: str) -> DataFrame:
    """The messages of a source, which is named by where it is."""
    place = ("path", source) if os.path.exists(source) else ("server", source)
    entries = spark.read.format("datastream").option(*place).load()
    return messages(entries, source=source)


if __name__ == "__main__":
    main()
