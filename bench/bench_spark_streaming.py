"""Spark following a stream: how soon a batch has what was published, how many rows a second.

The rival of `session()`'s checkpoints on a local disk are those of Spark's default.
``SPARK_BENCH_ROWS`` says how many rows go into Parquet (3,000,000).
"""

from __future__ import annotations

import os
import queue
import random
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bench.measure import Done
from bench.spark_session import local_session
from datastreamer import DataStream, StreamServer
from tests.spark.native.real_time import start, written

_SIZE = 155  # of an entry, as in the streams of production nodes
_SPARKS_CHECKPOINT = (
    "spark.sql.streaming.checkpointFileManagerClass",
    "org.apache.spark.sql.execution.streaming.checkpointing.FileContextBasedCheckpointFileManager",
)


@pytest.fixture(scope="module")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with local_session(tmp_path_factory.mktemp("scratch")) as made:
        yield made


def _delays(
    spark: Any, source: dict[str, str], stream: DataStream, folder: Path, count: int
) -> Any:
    """Seconds from a commit until foreachBatch has its row, of `count` commits, one by one."""
    seen: queue.Queue[tuple[int, float]] = queue.Queue()

    def keep(frame: Any, _: int) -> None:
        rows = frame.collect()
        seen.put((max((row.number for row in rows), default=-1), time.perf_counter()))

    query = (
        spark.readStream.format("datastream")
        .options(**source)
        .option("startingOffset", "latest")
        .load()
        .writeStream.foreachBatch(keep)
        .option("checkpointLocation", str(folder))
        .start()
    )
    chance = random.Random(1)
    delays = []
    try:
        query.processAllAvailable()
        for _ in range(count):
            # At any moment between two looks at the stream, not always at the same.
            time.sleep(chance.uniform(0, 0.1))
            with stream.atomic_op() as op:
                number = op.add_entry(1, b"x" * _SIZE)
            published = time.perf_counter()
            while (found := seen.get(timeout=60))[0] < number:
                pass
            delays.append(found[1] - published)
    finally:
        query.stop()
    return delays


def test_latency(spark: Any, record: Any, smoke: bool, tmp_path: Path) -> None:
    count = 2 if smoke else 50
    path = tmp_path / "stream.bin"
    found = {}
    with StreamServer(path, host="127.0.0.1", port=0, index="memory") as server:
        sources = {
            "a file": {"path": str(path)},
            "a server": {"server": f"127.0.0.1:{server.port}"},
        }
        # Spark compiles what it runs meanwhile.
        _delays(spark, sources["a server"], server.stream, tmp_path / "warm", count)
        for name, source in sources.items():
            found[name] = _delays(spark, source, server.stream, tmp_path / name, count)
        name = "a file, checkpoint by Spark's default"
        spark.conf.set(*_SPARKS_CHECKPOINT)
        try:
            found[name] = _delays(spark, sources["a file"], server.stream, tmp_path / name, count)
        finally:
            spark.conf.unset(_SPARKS_CHECKPOINT[0])
    for name, delays in found.items():
        late = 1000 * sorted(delays)[9 * len(delays) // 10]
        record(
            f"publication to foreachBatch, {name}: p50 (p90 {late:.0f} ms)",
            1000 * statistics.median(delays),
            {"what is wanted": 200.0},
            unit="ms",
        )


def test_real_time(spark: Any, record: Any, smoke: bool, tmp_path: Path) -> None:
    """From a commit until a task has its row for the sink, in Real-Time Mode."""
    count = 2 if smoke else 200
    path, chance = tmp_path / "stream.bin", random.Random(1)
    spark.conf.set("spark.sql.streaming.realTimeMode.minBatchDuration", "1s")
    with StreamServer(path, host="127.0.0.1", port=0, sync="os", index="memory") as server:
        for name, source in {
            "a file": {"path": str(path)},
            "a server": {"server": f"127.0.0.1:{server.port}", "reader": "native"},
        }.items():
            rows = tmp_path / f"{name}.txt"
            frame = spark.readStream.format("datastream").options(**source).load()
            add_entry(server.stream)
            query = start(frame, rows, tmp_path / name, "3 seconds" if smoke else "20 seconds")
            try:
                while not written(rows):
                    time.sleep(0.05)
                # The second batch has begun.
                time.sleep(0.1 if smoke else 2)
                published = {}
                for _ in range(count):
                    time.sleep(chance.uniform(0, 0.05))
                    number = add_entry(server.stream)
                    published[number] = time.perf_counter_ns()
                while written(rows)[-1][1] < number:
                    time.sleep(0.05)
            finally:
                query.stop()
            late = sorted(at - published[row] for at, row in written(rows) if row in published)
            assert len(late) == count
            record(
                f"publication to a row, Real-Time Mode, {name}: p50 "
                f"(p90 {late[9 * len(late) // 10] / 1e6:.1f} ms)",
                statistics.median(late) / 1e6,
                {"what is wanted": 10.0},
                unit="ms",
            )


def add_entry(stream: DataStream) -> int:
    with stream.atomic_op() as op:
        return op.add_entry(1, b"x" * _SIZE)


def test_sink(spark: Any, versus: Any, smoke: bool, tmp_path: Path) -> None:
    """`df.write` into a stream, beside Parquet."""
    count = 1_000 if smoke else 300_000
    rows = spark.range(count, numPartitions=4).selectExpr(
        "1 as type", f"binary(rpad(string(id), {_SIZE - 17}, string(id * 7919))) as data"
    )
    path = tmp_path / "stream.bin"
    DataStream.create(path, index="memory").close()
    versus(
        "Spark, rows of 155 bytes into a stream",
        lambda: rows.write.format("datastream").mode("append").save(str(path)),
        {"into Parquet": lambda: rows.write.mode("overwrite").parquet(str(tmp_path / "rows"))},
        unit="writes/s",
    )


def _stream_of(path: Path, rows: int) -> None:
    chance = random.Random(1)
    noise = chance.randbytes(1 << 20)
    size = _SIZE - 17
    with DataStream.create(path, sync="os", index="memory") as stream:
        for first in range(0, rows, 10_000):
            places = [chance.randrange(len(noise) - size) for _ in range(min(10_000, rows - first))]
            with stream.atomic_op() as op:
                op.add_entries(9, [noise[at : at + size // 2] + bytes(size // 2) for at in places])


def test_throughput(spark: Any, versus: Any, smoke: bool, tmp_path: Path) -> None:
    """A stream into Parquet in batches of a million rows; the time of the first is left out."""
    batch = 1_000 if smoke else 1_000_000
    rows = 3 * batch if smoke else int(os.environ.get("SPARK_BENCH_ROWS", "3000000")) + batch
    path = tmp_path / "stream.bin"
    _stream_of(path, rows)
    runs = iter(range(100))

    def follow() -> Done:
        folder = tmp_path / f"out{next(runs)}"
        query = (
            spark.readStream.format("datastream")
            .option("maxEntriesPerTrigger", batch)
            .load(str(path))
            .writeStream.format("parquet")
            .option("path", str(folder / "rows"))
            .option("checkpointLocation", str(folder / "checkpoint"))
            .trigger(availableNow=True)
            .start()
        )
        query.awaitTermination()
        done = [each for each in query.recentProgress if each["numInputRows"]][1:]
        seconds = sum(each["durationMs"]["triggerExecution"] for each in done) / 1000
        return Done(sum(each["numInputRows"] for each in done), seconds)

    def write() -> Done:
        frame = spark.read.format("datastream").load(str(path))
        begin = time.perf_counter()
        frame.write.parquet(str(tmp_path / f"out{next(runs)}"))
        return Done(rows, time.perf_counter() - begin)

    versus(
        f"a stream of {_SIZE} B into Parquet, {batch:,} rows a batch",
        follow,
        {"spark.read into Parquet": write},
        unit="rows/s",
        rounds=1 if smoke else 3,
    )
