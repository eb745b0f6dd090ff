"""Read a stream through Spark Connect: the server has the package, the client needs no Java.

    python examples/spark_connect.py sc://HOST:15002 /path/on/the/server/stream.bin
    python examples/spark_connect.py 'local[2]' stream.bin      a server of its own; needs Java

Needs pip install 'pyspark[connect]'; the server's Python needs pip install 'datastreamer[spark]'.
"""

from __future__ import annotations

import sys

from pyspark.sql import SparkSession


def main() -> None:
    if len(sys.argv) != 3:
        raise SystemExit(__doc__)
    remote, path = sys.argv[1:]
    spark = SparkSession.builder.remote(remote).getOrCreate()
    try:
        blocks = spark.read.format("datastream").option("table", "blocks").load(path)
        by_batch = blocks.groupBy("batch_number").count()
        print(f"{blocks.count():,} blocks in {by_batch.count():,} batches")
        by_batch.orderBy("batch_number").show(5)
    finally:
        spark.stop()


if __name__ == "__main__":
    main()
