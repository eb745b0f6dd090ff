"""Complete payloads of what several producers published, by Spark, into Parquet.

    python examples/spark_reassembly.py OUT SOURCE...

A SOURCE is a stream's file, or tcp://HOST:PORT of a server. OUT/payloads gets the payloads,
OUT/events the conflicts between producers and what is missing. Needs
pip install 'datastreamer[spark-reassembly]' and Java 17 or 21.
"""

from __future__ import annotations

import sys

from pyspark.sql import SparkSession

from datastreamer import DatastreamerError
from datastreamer.spark import events_of, payloads_of, read_messages, reassemble, session


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
    """Reassemble the messages of all sources into the new folder `out`."""
    rows = reassemble(read_messages(spark, {source: source for source in sources})).rows
    # Reassemble once: write all rows, and read the two views from there.
    rows.write.parquet(f"{out}/rows")
    rows = spark.read.parquet(f"{out}/rows")
    payloads_of(rows).write.parquet(f"{out}/payloads")
    events_of(rows).write.parquet(f"{out}/events")
    print(f"{payloads_of(rows).count():,} payloads")
    for row in events_of(rows).groupBy("event", "what").count().orderBy("event", "what").collect():
        print(f"{row['count']:,} {row.event}: {row.what}")


if __name__ == "__main__":
    main()
