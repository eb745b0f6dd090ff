"""Spark over a stream file, beside Spark over Parquet files (zstd) with the same rows.

The reader in Java is measured if it was built (`make jar`); the source in Python beside it.

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

from bench.bench_selections import payloads
from bench.measure import Done
from bench.spark_session import local_session
from datastreamer import DataStream, arrow
from datastreamer.spark import read_messages
from datastreamer.zkevm import BatchEnd, BatchStart, L2Block, L2BlockEnd, Transaction, encode
from datastreamer.zkevm.bookmark_keys import BookmarkName, key_of

__all__ = ["payloads"]

_SIZE = 155  # of an entry, as in the streams of production nodes
_OPERATION = 10_000
_BLOCK_SIZE = 877  # of the mixed stream, by block


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
    """Blocks as a sequencer writes them, each with three hashes of its own, and nothing else;
    Parquet files beside it."""
    tiny = request.config.getoption("benchmark_disable")
    folder = tmp_path_factory.mktemp("blocks")
    root = bytes(range(32))
    chance = random.Random(3)
    with DataStream.create(folder / "stream.bin", version=3, sync="os", index="memory") as made:
        for first in range(0, 1_000 if tiny else 1_000_000, 10_000):
            some = [
                L2Block(
                    *(number, number // 100, 1_700_000_000 + number, 3, 0, root, 7),
                    *(chance.randbytes(32), chance.randbytes(32), root, root[:20], 30_000_000),
                    chance.randbytes(32),
                )
                for number in range(first, first + 10_000)
            ]
            with made.atomic_op() as op:
                op.add_entries(2, [encode(block, version=3)[1] for block in some])
    arrow.export(folder / "stream.bin", folder / "parquet", "blocks")
    yield folder / "stream.bin"
    shutil.rmtree(folder)


@pytest.fixture(scope="module")
def chain(tmp_path_factory: pytest.TempPathFactory, request: Any) -> Iterator[Path]:
    """300,000 blocks with bookmarks and a transaction each; their Parquet files beside them."""
    tiny = request.config.getoption("benchmark_disable")
    folder = tmp_path_factory.mktemp("chain")
    noise = random.Random(2).randbytes(1 << 16)
    count = 3_000 if tiny else 300_000
    with DataStream.create(folder / "stream.bin", version=3, sync="os", index="memory") as made:
        for first in range(0, count, 1_000):
            with made.atomic_op() as op:
                for number in range(first, first + 1_000):
                    op.add_bookmark(key_of(3, BookmarkName("block", number)))
                    time, own = 1_700_000_000 + number, noise[number % 60_000 :][:32]
                    op.add_entry(*encode(L2Block(number, number // 100, time, hash=own), version=3))
                    op.add_entry(*encode(Transaction(number, 0, True, noise[:500]), version=3))
    arrow.export(folder / "stream.bin", folder / "parquet", "blocks")
    yield folder / "stream.bin"
    shutil.rmtree(folder)


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory, request: Any) -> Iterator[Path]:
    """Ten days of a chain: blocks of two transactions each, in batches, with their bookmarks. The
    Parquet files of the tables are beside it."""
    tiny = request.config.getoption("benchmark_disable")
    megabytes = 2 if tiny else int(os.environ.get("SPARK_BENCH_MB", "1000"))
    count = megabytes * 1_000_000 // _BLOCK_SIZE // 1_000 * 1_000
    folder = tmp_path_factory.mktemp("mixed")
    chance, root = random.Random(5), bytes(range(32))
    noise = chance.randbytes(1 << 20)

    def piece(size: int) -> bytes:
        at = chance.randrange(len(noise) - size)
        return noise[at : at + size]

    with DataStream.create(folder / "stream.bin", version=3, sync="os", index="memory") as made:
        for first in range(0, count, 1_000):
            with made.atomic_op() as op:

                def put(event: Any) -> None:
                    op.add_entry(*encode(event, version=3))

                batch = first // 1_000
                op.add_bookmark(key_of(3, BookmarkName("batch", batch)))
                put(BatchStart(batch))
                for number in range(first, first + 1_000):
                    op.add_bookmark(key_of(3, BookmarkName("block", number)))
                    time = 1_700_000_000 + number * 864_000 // count
                    hashes = piece(32), piece(32), root, root[:20], 30_000_000, piece(32)
                    put(L2Block(number, batch, time, 3, 0, root, 7, *hashes))
                    for index in range(2):
                        data = piece(130) + bytes(100)
                        put(Transaction(number, index, True, data, 255, piece(32)))
                    put(L2BlockEnd(number))
                put(BatchEnd(batch, piece(32), piece(32)))
    for table in ("blocks", "transactions", "batches"):
        arrow.export(folder / "stream.bin", folder / table, table)
    yield folder / "stream.bin"
    shutil.rmtree(folder)


def _count(frame: Any) -> object:
    return frame.count()


def _sum(frame: Any) -> object:
    return frame.selectExpr("sum(length(data))").collect()


def _noop(frame: Any) -> object:
    return frame.write.format("noop").mode("overwrite").save()


def _cpu_seconds(spark: Any) -> float:
    """The CPU time of the JVM and of all processes that it started."""
    tree = {int(spark._jvm.java.lang.ProcessHandle.current().pid())}
    total = 0
    # A process has a higher number than its parent.
    for folder in sorted(Path("/proc").glob("[0-9]*"), key=lambda found: int(found.name)):
        try:
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(folder.name) in tree or int(fields[1]) in tree:
            tree.add(int(folder.name))
            total += int(fields[11]) + int(fields[12])
    return total / os.sysconf("SC_CLK_TCK")


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
        (_count, "count", 0.9),
        (_sum, "sum(length(data))", 2.0),
        (_noop, "all columns to nowhere", 2.0),
    ],
)
def test_entries(
    versus: Any,
    spark: Any,
    stream: Path,
    work: Callable[[Any], object],
    name: str,
    promised: float,
) -> None:
    ours = spark.read.format("datastream").load(str(stream))
    python = spark.read.format("datastream").option("reader", "python").load(str(stream))
    rival = spark.read.parquet(str(stream.parent / "parquet"))
    assert ours.count() == python.count() == rival.count()
    versus(
        f"Spark, entries of {_SIZE} bytes: {name}",
        lambda: work(ours),
        {
            "spark.read.parquet": lambda: work(rival),
            "reader python": lambda: work(python),
        },
        unit="GB/s",
        amount=stream.stat().st_size / 1e9,
        at_least=promised,
    )


def test_cpu(versus: Any, spark: Any, stream: Path) -> None:
    ours = spark.read.format("datastream").load(str(stream))
    rival = spark.read.parquet(str(stream.parent / "parquet"))
    size = stream.stat().st_size / 1e9

    def run(frame: Any) -> Done:
        before = _cpu_seconds(spark)
        _sum(frame)
        return Done(size, max(0.01, _cpu_seconds(spark) - before))

    versus(
        "Spark, CPU of sum(length(data))",
        lambda: run(ours),
        {"spark.read.parquet": lambda: run(rival)},
        unit="GB per CPU second",
        amount=size,
        at_least=2.0,
    )


@pytest.mark.parametrize("columns, promised", [("*", 2.0), ("number, timestamp", 1.0)])
def test_blocks(versus: Any, spark: Any, blocks: Path, columns: str, promised: float) -> None:
    names = columns.split(", ")
    ours = spark.read.format("datastream").option("table", "blocks").load(str(blocks))
    rival = spark.read.parquet(str(blocks.parent / "parquet"))
    rows = rival.count()
    assert ours.count() == rows
    versus(
        f"Spark, blocks: {columns} to nowhere",
        lambda: _noop(ours.select(*names)),
        {"spark.read.parquet": lambda: _noop(rival.select(*names))},
        unit="rows/s",
        amount=rows,
        at_least=promised,
    )


def test_to_parquet(versus: Any, spark: Any, stream: Path, tmp_path: Path) -> None:
    def run(reader: Any) -> object:
        return reader.write.mode("overwrite").parquet(str(tmp_path / "written"))

    ours = spark.read.format("datastream").load(str(stream))
    rival = spark.read.parquet(str(stream.parent / "parquet"))
    versus(
        f"Spark, entries of {_SIZE} bytes: to Parquet",
        lambda: run(ours),
        {"spark.read.parquet": lambda: run(rival)},
        unit="GB/s",
        amount=stream.stat().st_size / 1e9,
        at_least=1.1,
    )


def test_a_range_of_blocks(versus: Any, spark: Any, chain: Path) -> None:
    ours = spark.read.format("datastream").option("table", "blocks").load(str(chain))
    rival = spark.read.parquet(str(chain.parent / "parquet"))

    def run(frame: Any) -> object:
        return frame.where("number BETWEEN 2000 AND 3000").selectExpr("sum(timestamp)").collect()

    assert run(ours) == run(rival)
    versus(
        "Spark, a range of 1,001 blocks of 300,000",
        lambda: run(ours),
        {"spark.read.parquet": lambda: run(rival)},
        unit="queries/s",
        at_least=1.0,
    )


def _middle(frame: Any, column: str, part: float, rows: int) -> Any:
    first = int(rows * 0.3)
    return frame.where(f"{column} BETWEEN {first} AND {first + int(rows * part) - 1}")


@pytest.mark.parametrize(
    "name, table, work, promised",
    [
        (
            "1,001 blocks by number",
            "blocks",
            lambda frame, rows: (
                _middle(frame, "number", 1_001 / rows, rows).selectExpr("sum(timestamp)").collect()
            ),
            1.0,
        ),
        (
            "two columns of blocks",
            "blocks",
            lambda frame, _: _noop(frame.select("number", "timestamp")),
            0.8,
        ),
        ("all columns of blocks", "blocks", lambda frame, _: _noop(frame), 1.2),
        ("count of blocks", "blocks", lambda frame, _: frame.count(), 1.0),
        (
            "transactions of one day of ten",
            "transactions",
            lambda frame, rows: _noop(_middle(frame, "l2block_number", 0.1, rows)),
            1.5,
        ),
    ],
)
def test_a_mixed_stream(
    versus: Any,
    spark: Any,
    mixed: Path,
    name: str,
    table: str,
    work: Callable[[Any, int], object],
    promised: float,
) -> None:
    ours = spark.read.format("datastream").option("table", table).load(str(mixed))
    rival = spark.read.parquet(str(mixed.parent / table))
    rows = spark.read.parquet(str(mixed.parent / "blocks")).count()
    assert work(ours, rows) == work(rival, rows)
    versus(
        f"Spark, a mixed stream: {name}",
        lambda: work(ours, rows),
        {"spark.read.parquet": lambda: work(rival, rows)},
        unit="queries/s",
        at_least=promised,
    )


def test_a_small_side_of_a_join(versus: Any, spark: Any, mixed: Path) -> None:
    blocks, batches = (
        spark.read.format("datastream").option("table", table).load(str(mixed))
        for table in ("blocks", "batches")
    )
    batches = batches.withColumnRenamed("number", "batch_number")

    def run(side: Any) -> object:
        return blocks.join(side, "batch_number").selectExpr("sum(timestamp)").collect()

    hinted = batches.hint("broadcast")
    assert run(batches) == run(hinted)
    versus(
        "Spark, a mixed stream: blocks joined with their batches",
        lambda: run(batches),
        {"with a hint to broadcast them": lambda: run(hinted)},
        unit="queries/s",
        at_least=0.95,
    )


# All of a file is read and checked, whatever is selected.
@pytest.mark.parametrize("place, promised", [("server", 2.0), ("file", 1.5)])
def test_a_portion(versus: Any, spark: Any, payloads: Any, place: str, promised: float) -> None:
    count, path, (host, port) = payloads
    source = str(path) if place == "file" else f"tcp://{host}:{port}"
    whole, portion = (
        read_messages(spark, {"it": source}, subscribe) for subscribe in (None, [b"\x01"])
    )
    # A header, the portion and ten other parts for each payload.
    assert (portion.count(), whole.count()) == (2 * count, 12 * count)
    versus(
        f"Spark, messages of a portion, 5 B of payloads of 10 kB, from a {place}",
        lambda: _noop(portion),
        {"all messages": lambda: _noop(whole)},
        unit="GB/s of the stream",
        amount=path.stat().st_size / 1e9,
        at_least=promised,
    )


def test_memory(record: Any, spark: Any, stream: Path) -> None:
    _noop(spark.read.format("datastream").option("reader", "python").load(str(stream)))
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
