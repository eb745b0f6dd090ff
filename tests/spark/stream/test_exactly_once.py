"""Every entry once in a file sink, whenever the driver is killed and a server goes away."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from pyspark.errors import StreamingQueryException

from datastreamer import DataStream, StreamServer
from datastreamer.server.limits import Limits
from tests.spark.conftest import QUICKLY, ROOT
from tests.spark.stream.following import Driver

ENTRIES = 40_000
PATIENCE = 20
"""So often Python may be started anew: Spark gives it ten seconds for that, which may be too few
beside other work."""

# A driver of its own: follows a stream into Parquet, and says so after each batch.
DRIVER = """
import sys
from datastreamer.spark import session
kind, place, out, checkpoint = sys.argv[1:]
spark = session("local[2]", "killed", {
    "spark.ui.enabled": "false",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.driver.host": "127.0.0.1",
    "spark.driver.memory": "1g",
})
spark.sparkContext.setLogLevel("OFF")
query = (
    spark.readStream.format("datastream").option(kind, place)
    .option("maxEntriesPerTrigger", 400).option("partitionBytes", "30k").load()
    .writeStream.format("parquet").option("path", out).option("checkpointLocation", checkpoint)
    .start()
)
batch = -1
while not query.awaitTermination(0.02):
    progress = query.lastProgress
    if progress and progress["batchId"] != batch:
        batch = progress["batchId"]
        print(batch, flush=True)
"""


def add(stream: DataStream, count: int, size: int = 100) -> None:
    with stream.atomic_op() as op:
        first = stream.total_entries
        op.add_entries(2, [b"%d" % number * size for number in range(first, first + count)])


def run_and_kill(kind: str, location: str, out: Path, checkpoint: Path, seed: int) -> None:
    """Follow a stream in another process, and kill that at some moment after a few batches."""
    choose = random.Random(seed)
    for _ in range(PATIENCE):
        process = subprocess.Popen(
            [sys.executable, "-c", DRIVER, kind, location, str(out), str(checkpoint)],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            cwd=ROOT,
            env={**os.environ, **QUICKLY, "PYTHONPATH": str(ROOT), "SPARK_LOCAL_IP": "127.0.0.1"},
            start_new_session=True,
        )
        assert process.stdout is not None
        with process.stdout as said:
            if all(said.readline() for _ in range(choose.randint(1, 4))):
                # The JVM, which is the driver, is in its process group.
                delay, kill = choose.uniform(0, 0.4), (process.pid, signal.SIGKILL)
                timer = threading.Timer(delay, os.killpg, kill)
                timer.start()
                said.read()
                timer.join()
                assert process.wait(60) == -signal.SIGKILL
                return
        process.wait(60)
    raise AssertionError("the driver ended by itself")


def check(spark: Any, stream: DataStream, out: Path, checkpoint: Path) -> None:
    """Go on to the end, and hold what the sink has against the stream."""
    for left in reversed(range(PATIENCE)):
        query = (
            spark.readStream.format("datastream")
            .load(stream.path)
            .writeStream.format("parquet")
            .option("path", str(out))
            .option("checkpointLocation", str(checkpoint))
            .trigger(availableNow=True)
            .start()
        )
        try:
            query.awaitTermination()
            break
        except StreamingQueryException as error:
            if not left or "Python worker failed to connect back" not in str(error):
                raise
    table = spark.read.parquet(str(out)).orderBy("number").toArrow()
    assert table.column("number").to_pylist() == list(range(stream.total_entries))
    written = [bytes(entry.data) for batch in stream.batches(0) for entry in batch]
    assert table.column("data").to_pylist() == written


def kill_again_and_again(spark: Any, folder: Path, seeds: range) -> None:
    out, checkpoint = folder / "out", folder / "checkpoint"
    path = folder / "stream.bin"
    with StreamServer(path, host="127.0.0.1", port=0, sync="os", in_process=True) as server:
        for seed in seeds:
            add(server.stream, ENTRIES)
            if seed % 2:
                run_and_kill("path", str(path), out, checkpoint, seed)
            else:
                run_and_kill("server", f"127.0.0.1:{server.port}", out, checkpoint, seed)
        assert server.stream.total_entries > 400 * len(os.listdir(out)), "there is work left"
        check(spark, server.stream, out, checkpoint)


@pytest.mark.slow
def test_a_driver_that_is_killed(spark: Any, tmp_path: Path) -> None:
    kill_again_and_again(spark, tmp_path, range(2))


@pytest.mark.soak
@pytest.mark.parametrize("start", range(100, 140, 4))
def test_a_driver_that_is_killed_often(spark: Any, tmp_path: Path, start: int) -> None:
    kill_again_and_again(spark, tmp_path, range(start, start + 4))


def test_a_server_that_is_started_anew_in_the_middle_of_a_batch(tmp_path: Path) -> None:
    path = tmp_path / "stream.bin"
    limits = Limits(grace=0)

    def serve(port: int) -> StreamServer:
        return StreamServer(
            path, host="127.0.0.1", port=port, sync="os", in_process=True, limits=limits
        )

    with serve(0) as server:
        add(server.stream, ENTRIES, 250)
        port = server.port
        driver = Driver(server=f"127.0.0.1:{port}")
        driver.offset = driver.reader.initialOffset()
        end = driver.planned()
        (part,) = driver.reader.partitions(driver.offset, end)
        driver.reader.stop()
        batches = driver.reader.read(part)
        found = [next(batches)]
    assert found[0].num_rows < ENTRIES / 2
    with serve(port):
        found += batches
    numbers = [number for batch in found for number in batch.column("number").to_pylist()]
    assert numbers == list(range(ENTRIES))
