"""Spark over a stream file, beside Spark over Parquet files with the same rows.

``SPARK_BENCH_MB`` says how large the stream is (1,000). Both read from the page cache.
"""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from bench.measure import Done
from bench.spark_session import local_session
from datastreamer import DataStream, arrow
from datastreamer.spark import frame
from datastreamer.zkevm import L2Block, encode

_SIZE = 155  # of an entry, as in the streams of production nodes
_OPERATION = 10_000


@pytest.fixture(scope="module")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with local_session(
        tmp_path_factory.mktemp("scratch"), {"spark.sql.shuffle.partitions": "2"}
    ) as made:
        yield made


@pytest.fixture(scope="module")
def stream(tmp_path_factory: pytest.TempPathFactory, request: Any) -> Iterator[Path]:
    """Blocks and other entries, half of whose bytes zstd can save; Parquet files beside it."""
    tiny = request.config.getoption("benchmark_disable")
    megabytes = 2 if tiny else int(os.environ.get("SPARK_BENCH_MB", "1000"))
    folder = tmp_path_factory.mktemp("stream")
    chance = random.Random(1)
    noise = chance.randbytes(1 << 20)
    size = _SIZE - 17
    with DataStream.create(folder / "stream.bin", version=3, sync="os", index="memory") as made:
        for _ in range(max(1, megabytes * 1_000_000 // _SIZE // _OPERATION)):
            places = [chance.randrange(len(noise) - size) for _ in range(_OPERATION)]
            half = size // 2
            with made.atomic_op() as op:
                op.add_entries(9, [noise[at : at + half] + bytes(size - half) for at in places])
    arrow.export(folder / "stream.bin", folder / "parquet")
    yield folder / "stream.bin"
    shutil.rmtree(folder)


@pytest.fixture(scope="module")
def blocks(tmp_path_factory: pytest.TempPathFactory, request: Any) -> Iterator[Path]:
    """Blocks as a sequencer writes them, nothing else; Parquet files beside it."""
    tiny = request.config.getoption("benchmark_disable")
    folder = tmp_path_factory.mktemp("blocks")
    root = bytes(range(32))
    with DataStream.create(folder / "stream.bin", version=3, sync="os", index="memory") as made:
        for first in range(0, 1_000 if tiny else 1_000_000, 10_000):
            some = [
                L2Block(
                    *(number, number // 100, 1_700_000_000 + number, 3, 0, root, 7),
                    *(root, root, root, root[:20], 30_000_000, root),
                )
                for number in range(first, first + 10_000)
            ]
            with made.atomic_op() as op:
                op.add_entries(2, [encode(block, version=3)[1] for block in some])
    arrow.export(folder / "stream.bin", folder / "parquet", "blocks")
    yield folder / "stream.bin"
    shutil.rmtree(folder)


def _count(frame: Any) -> object:
    return frame.count()


def _sum(frame: Any) -> object:
    return frame.selectExpr("sum(length(data))").collect()


def _noop(frame: Any) -> object:
    return frame.write.format("noop").mode("overwrite").save()


def _worker_megabytes() -> float:
    """The most memory that a Python worker of Spark's has had."""
    most = 0
    for status in Path("/proc").glob("[0-9]*/status"):
        try:
            if b"pyspark.daemon" in (status.parent / "cmdline").read_bytes():
                lines = dict(line.split(":", 1) for line in status.read_text().splitlines())
                most = max(most, int(lines["VmHWM"].split()[0]))
        except (OSError, KeyError, ValueError):
            continue
    return most / 1024


@pytest.mark.parametrize(
    "work, name, promised",
    [
        (_count, "count", None),
        (_sum, "sum(length(data))", 1 / 1.1),
        (_noop, "all columns to nowhere", 1 / 1.1),
    ],
)
def test_entries(
    versus: Any,
    spark: Any,
    stream: Path,
    work: Callable[[Any], object],
    name: str,
    promised: float | None,
) -> None:
    ours = spark.read.format("datastream").load(str(stream))
    shorter = frame(spark, stream)
    rival = spark.read.parquet(str(stream.parent / "parquet"))
    assert ours.count() == shorter.count() == rival.count()
    versus(
        f"Spark, entries of {_SIZE} bytes: {name}",
        lambda: work(ours),
        {"spark.read.parquet": lambda: work(rival), "frame": lambda: work(shorter)},
        unit="GB/s",
        amount=stream.stat().st_size / 1e9,
        rounds=3,
        at_least=promised,
    )


@pytest.mark.parametrize("columns", ["*", "number, timestamp"])
def test_blocks(versus: Any, spark: Any, blocks: Path, columns: str) -> None:
    reader = spark.read.format("datastream").option("table", "blocks")
    if columns != "*":
        reader = reader.schema("number BIGINT, timestamp BIGINT")
    ours = reader.load(str(blocks))
    rival = spark.read.parquet(str(blocks.parent / "parquet")).selectExpr(*columns.split(", "))
    rows = rival.count()
    assert ours.count() == rows
    versus(
        f"Spark, blocks: {columns} to nowhere",
        lambda: _noop(ours),
        {"spark.read.parquet": lambda: _noop(rival)},
        unit="rows/s",
        amount=rows,
        rounds=3,
    )


def test_memory(record: Any, spark: Any, stream: Path) -> None:
    _noop(spark.read.format("datastream").load(str(stream)))
    record("Spark: memory of a Python worker", _worker_megabytes(), unit="MB")


def test_another_size_of_parts(versus: Any, spark: Any, stream: Path) -> None:
    def run(size: str) -> Done:
        frame = spark.read.format("datastream").option("partitionBytes", size).load(str(stream))
        _noop(frame)
        return Done()

    versus(
        "Spark, all columns to nowhere: parts of 128 MiB",
        lambda: run("128m"),
        {f"of {size}": (lambda size=size: run(size)) for size in ("32m", "256m")},
        unit="GB/s",
        amount=stream.stat().st_size / 1e9,
        rounds=3,
    )
