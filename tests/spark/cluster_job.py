"""A job on a cluster with one executor process, which is killed in the middle. A test runs it.

Argument: the stream file. Prints the result as one JSON object.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from pyspark.sql import SparkSession

from datastreamer.spark import native_jar, register
from tests.spark.settings import SETTINGS


def parent_of(pid: int) -> int:
    """The parent of a process, from /proc."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def digests(rows: Iterable[Any]) -> Iterator[tuple[int, int, int]]:
    """The number, a digest and the executor of each entry.

    The first attempt at the third part kills its executor in the middle."""
    from pyspark import TaskContext

    context = TaskContext.get()
    assert context is not None
    # A daemon, which the executor started, has forked this worker.
    executor = parent_of(os.getppid())
    for at, row in enumerate(rows):
        if context.partitionId() == 2 and context.attemptNumber() == 0 and at == 20:
            os.kill(executor, signal.SIGKILL)
        found = hashlib.sha256(repr((row.number, row.type, bytes(row.data))).encode()).digest()
        yield row.number, int.from_bytes(found[:8], "big"), executor


def damaged_rows(spark: Any, path: str) -> int:
    """The rows with an error, of a copy with a damaged entry."""
    content = bytearray(Path(path).read_bytes())
    content[4096] ^= 1
    Path(f"{path}.damaged").write_bytes(content)
    read = spark.read.format("datastream").option("mode", "PERMISSIVE")
    return int(read.load(f"{path}.damaged").where("error IS NOT NULL").count())


def main(path: str) -> None:
    settings = SETTINGS | {
        "spark.executor.memory": "512m",
        # Executors run the driver's Python, whatever their own environment names.
        "spark.executorEnv.PYSPARK_PYTHON": "/nowhere/python",
        # The jar is in the driver's class path alone.
        "spark.driver.extraClassPath": native_jar() or "",
    }
    builder = SparkSession.builder.master("local-cluster[1,1,1024]").config(map=settings)
    spark = builder.getOrCreate()
    register(spark)
    spark.sparkContext.setLogLevel("OFF")
    frame = spark.read.format("datastream").option("partitionBytes", "2m").load(path)
    parts = frame.rdd.getNumPartitions()
    rows = sorted(frame.rdd.mapPartitions(digests).collect())
    result = {
        "parts": parts,
        "rows": len(rows),
        "digest": hashlib.sha256(b"".join(b"%d %d," % row[:2] for row in rows)).hexdigest(),
        "executors": len({row[2] for row in rows}),
        "errors": damaged_rows(spark, path),
    }
    print(json.dumps(result))
    spark.stop()


if __name__ == "__main__":
    main(sys.argv[1])
