"""A stream's blocks in Parquet, each once, also after a crash: for spark-submit on any cluster.

    spark-submit [options] spark_blocks.py SOURCE OUT [--once]

SOURCE is a file, or HOST:PORT of a server; OUT a folder that all machines see, for the table and
its checkpoint. With --once the job reads what is there, and ends.
"""

from __future__ import annotations

import re
import sys

from pyspark.sql import SparkSession

from datastreamer.spark import register


def main() -> None:
    once = "--once" in sys.argv
    words = [word for word in sys.argv[1:] if word != "--once"]
    if len(words) != 2:
        raise SystemExit(__doc__)
    source, out = words
    spark = SparkSession.builder.appName("blocks").getOrCreate()
    register(spark)
    where = "server" if re.fullmatch(r"[^/]+:\d+", source) else "path"
    blocks = spark.readStream.format("datastream").options(table="blocks", **{where: source}).load()
    writer = blocks.writeStream.format("parquet").option("checkpointLocation", f"{out}/checkpoint")
    if once:
        writer = writer.trigger(availableNow=True)
    writer.start(f"{out}/blocks").awaitTermination()
    spark.stop()


if __name__ == "__main__":
    main()
