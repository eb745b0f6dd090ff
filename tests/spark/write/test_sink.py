"""`df.write.format("datastream")`: all rows in one atomic operation, or none."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql.functions import udf
from pyspark.sql.types import BinaryType, IntegerType, StructField, StructType

from datastreamer import DataStream
from datastreamer.errors import StreamFileError
from datastreamer.spark.options import read_options
from datastreamer.spark.write.sink import StreamSink
from datastreamer.zkevm.bookmark_keys import BookmarkName, key_of
from tests.spark.settings import ROOT


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A stream of one entry."""
    path = tmp_path / "stream" / "written.bin"
    path.parent.mkdir()
    with DataStream.create(path, version=2, system_id=7) as stream, stream.atomic_op() as op:
        op.add_entry(1, b"first")
    return path


def entries(path: Path) -> list[tuple[int, bytes]]:
    with DataStream.open(path, read_only=True) as stream:
        return [(entry.type, bytes(entry.data)) for batch in stream.batches(0) for entry in batch]


def write(frame: Any, path: Path, **options: str) -> None:
    writer = frame.write.format("datastream").mode("append")
    for name, value in options.items():
        writer = writer.option(name, value)
    writer.save(str(path))


def numbered(spark: Any, rows: int, partitions: int = 4) -> Any:
    return spark.range(rows, numPartitions=partitions).selectExpr(
        "cast(1 + id % 3 as int) as type", "binary(lpad(string(id), 8, '0')) as data"
    )


def test_rows_are_appended_in_the_order_of_the_partitions(spark: Any, path: Path) -> None:
    write(numbered(spark, 5000), path)
    assert entries(path) == [
        (1, b"first"),
        *((1 + number % 3, b"%08d" % number) for number in range(5000)),
    ]
    assert [found for found in os.listdir(path.parent) if "staging" in found] == []
    frame = spark.read.format("datastream").load(str(path))
    assert frame.selectExpr("count(*)", "max(number)").first() == (5001, 5000)


def test_bookmarks_are_entries_of_their_type(spark: Any, path: Path, tmp_path: Path) -> None:
    key = key_of(2, BookmarkName("block", 5))
    rows = [(0xB0, bytearray(key)), (2, bytearray(b"a block")), (3, bytearray())]
    frame = spark.createDataFrame(rows, "type long, data binary").coalesce(1)
    write(frame, path, stagingPath=str(tmp_path / "staging"))
    assert entries(path)[1:] == [(0xB0, key), (2, b"a block"), (3, b"")]
    with DataStream.open(path, read_only=True) as stream:
        assert stream.bookmark(key) == 1


def spoil(data: bytes) -> bytes:
    """Data as it is, and a task that fails in the middle of one of the partitions."""
    if data == b"00002000":
        raise RuntimeError("this task fails")
    return data


def test_a_task_that_fails_leaves_nothing(spark: Any, path: Path) -> None:
    before = path.read_bytes()
    spoiled = udf(spoil, "binary", useArrow=False)
    frame = numbered(spark, 5000).withColumn("data", spoiled("data"))
    with pytest.raises(Exception, match="this task fails"):
        write(frame, path)
    assert path.read_bytes() == before
    assert [found for found in os.listdir(path.parent) if "staging" in found] == []


@pytest.mark.parametrize(
    "kind, data, message",
    [
        (
            "-1 as type",
            "binary('x')",
            "row 0 of partition 0 is not an entry: its type is not a u32",
        ),
        ("1 as type", "cast(null as binary)", "type or data is null"),
        ("176 as type", "binary('')", "or its key is not 1 to 16"),
        ("1 as type", "binary(repeat('x', 1048560))", "its data exceeds 1,048,559 bytes"),
        ("1 as kind", "binary('x')", "not from kind int, data binary: select these"),
        ("1 as type", "'x'", "not from type int, data string: select these"),
    ],
)
def test_what_is_not_an_entry_is_reported(
    spark: Any, path: Path, kind: str, data: str, message: str
) -> None:
    with pytest.raises(Exception, match=message):
        write(spark.range(1, numPartitions=1).selectExpr(kind, f"{data} as data"), path)
    assert entries(path) == [(1, b"first")]


def test_a_stream_that_another_process_writes_is_an_error(spark: Any, path: Path) -> None:
    with (
        DataStream.open(path) as stream,
        pytest.raises(Exception, match="only one process may write"),
    ):
        write(numbered(spark, 10), path)
    assert stream.total_entries == 1
    assert entries(path) == [(1, b"first")]


def test_a_stream_that_is_not_there_is_an_error(spark: Any, path: Path) -> None:
    with pytest.raises(Exception, match=r"gone\.bin: no such file; create the stream first"):
        write(numbered(spark, 10), path.with_name("gone.bin"))
    with pytest.raises(Exception, match=f"{path.parent}: a folder, not a file; create the stream"):
        write(numbered(spark, 10), path.parent)


def test_a_stream_is_not_overwritten(spark: Any, path: Path) -> None:
    with pytest.raises(Exception, match="a stream can only be appended to"):
        numbered(spark, 10).write.format("datastream").mode("overwrite").save(str(path))
    assert entries(path) == [(1, b"first")]


def test_a_frame_without_rows_appends_nothing(spark: Any, path: Path) -> None:
    write(spark.createDataFrame([], "type int, data binary"), path)
    write(numbered(spark, 100).where("type > 9"), path)
    assert entries(path) == [(1, b"first")]


def test_of_two_attempts_at_a_partition_the_one_that_spark_commits_is_written(path: Path) -> None:
    """A task that is slow is started again elsewhere, where Spark speculates."""
    schema = StructType([StructField("type", IntegerType()), StructField("data", BinaryType())])
    sink = StreamSink(read_options({"path": str(path)}), schema, overwrite=False)

    def batches(*data: bytes) -> Any:
        kinds = pa.array([1] * len(data), pa.int32())
        yield pa.RecordBatch.from_arrays([kinds, pa.array(data)], ["type", "data"])

    behind = sink.pack(1, 7, None, batches(b"c"))
    sink.pack(0, 5, None, batches(b"slow"))
    ahead = sink.pack(0, 6, None, batches(b"a", b"b"))
    sink.commit([behind, None, ahead])
    assert entries(path) == [(1, b"first"), (1, b"a"), (1, b"b"), (1, b"c")]
    assert [found for found in os.listdir(path.parent) if "staging" in found] == []


def test_a_task_that_comes_too_late_leaves_nothing(path: Path) -> None:
    """Spark does not wait for the others when it gives up a write for one that failed."""
    schema = StructType([StructField("type", IntegerType()), StructField("data", BinaryType())])
    sink = StreamSink(read_options({"path": str(path)}), schema, overwrite=False)
    (staging,) = [found for found in os.listdir(path.parent) if "staging" in found]
    sink.abort([])
    with pytest.raises(StreamFileError, match="or the write has ended"):
        sink.pack(0, 0, None, iter(()))
    assert not path.with_name(staging).exists()


SINK = """
import subprocess, sys
child = '''
import sys
from pyspark.sql.types import BinaryType, IntegerType, StructField, StructType
from datastreamer.spark.options import read_options
from datastreamer.spark.write.sink import StreamSink
schema = StructType([StructField("type", IntegerType()), StructField("data", BinaryType())])
StreamSink(read_options({"path": sys.argv[1]}), schema, overwrite=False)
'''
subprocess.run([sys.argv[2], "-c", child, sys.argv[1]], check=True)
print("begun", flush=True)
sys.stdin.read()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="finds the driver in /proc")
def test_what_a_killed_driver_left_goes_with_the_next_write(path: Path, tmp_path: Path) -> None:
    """A process with the name of Spark's, whose workers make the sinks."""
    java = tmp_path / "java"
    java.symlink_to(sys.executable)

    def staging() -> set[str]:
        return {found for found in os.listdir(path.parent) if "staging" in found}

    def drive() -> subprocess.Popen[bytes]:
        driver = subprocess.Popen(
            [java, "-c", SINK, path, sys.executable],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
        assert driver.stdout is not None
        assert driver.stdout.readline() == b"begun\n"
        return driver

    drivers = [drive()]
    try:
        (left,) = staging()
        drivers.append(drive())
        assert len(staging()) == 2, "the first one is at work"
        drivers[0].kill()
        drivers[0].wait()
        drivers.append(drive())
        assert len(staging()) == 2
        assert left not in staging()
    finally:
        for driver in drivers:
            driver.kill()
            driver.communicate()
