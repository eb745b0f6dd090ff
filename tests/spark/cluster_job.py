"""A job on a cluster of executor processes, one of which dies in the middle. Run by a test.

Arguments: the stream file. Prints one JSON object: what came of it.
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

from datastreamer.spark import session

SETTINGS = {
    "spark.ui.enabled": "false",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.driver.host": "127.0.0.1",
    "spark.sql.shuffle.partitions": "2",
    "spark.executor.memory": "512m",
}


def parent_of(pid: int) -> int:
    """By Linux's own word."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def digests(rows: Iterable[Any]) -> Iterator[tuple[int, int, int]]:
    """Of each entry; kills its executor in the middle of the fifth part, the first time."""
    from pyspark import TaskContext

    context = TaskContext.get()
    assert context is not None
    # A worker's parent is the daemon that forked it, and that one's the executor.
    executor = parent_of(os.getppid())
    for at, row in enumerate(rows):
        if context.partitionId() == 4 and context.attemptNumber() == 0 and at == 20:
            os.kill(executor, signal.SIGKILL)
        found = hashlib.sha256(repr((row.number, row.type, bytes(row.data))).encode()).digest()
        yield row.number, int.from_bytes(found[:8], "big"), executor


def main(path: str) -> None:
    spark = session("local-cluster[2,1,1024]", "cluster", SETTINGS)
    spark.sparkContext.setLogLevel("OFF")
    frame = spark.read.format("datastream").option("partitionBytes", "3m").load(path)
    parts = frame.rdd.getNumPartitions()
    rows = sorted(frame.rdd.mapPartitions(digests).collect())
    told = {
        "parts": parts,
        "rows": len(rows),
        "digest": hashlib.sha256(b"".join(b"%d %d," % row[:2] for row in rows)).hexdigest(),
        "executors": len({row[2] for row in rows}),
    }
    print(json.dumps(told))
    spark.stop()


if __name__ == "__main__":
    main(sys.argv[1])
