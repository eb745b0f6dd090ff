"""`spark.readStream` of a file: the reader in Java and the source in Python share checkpoints."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from pyspark.errors import StreamingQueryException

from datastreamer import DataStream
from datastreamer.spark.versions import HAS_LIMITS
from tests.spark.read.reading import Query


def follow(spark: Any, path: Path, folder: Path, **options: str) -> Any:
    """Read what is there into Parquet files in `folder`; gives the query, which has ended."""
    query = (
        spark.readStream.format("datastream")
        .options(**options)
        .load(str(path))
        .writeStream.format("parquet")
        .option("checkpointLocation", str(folder / "checkpoint"))
        .trigger(availableNow=True)
        .start(str(folder / "rows"))
    )
    query.awaitTermination()
    return query


def test_either_reader_continues_where_the_other_ended(native: Any, tmp_path: Path) -> None:
    path, chance = tmp_path / "growing.bin", random.Random(8)
    with DataStream.create(path, version=3, sync="os", index="memory") as stream:
        for reader in ("native", "python", "native"):
            with stream.atomic_op() as op:
                for _ in range(90):
                    op.add_entry(9, chance.randbytes(chance.choice((0, 10, 40_000))))
            limited = reader == "native" or HAS_LIMITS
            limits = {"maxBytesPerTrigger": "500k"} if limited else {}
            query = follow(native, path, tmp_path, reader=reader, **limits)
            assert len(query.recentProgress) > 1 or not limited
    rows = native.read.parquet(str(tmp_path / "rows")).orderBy("number").collect()
    found = [(row.number, row.type, bytes(row.data)) for row in rows]
    assert found == [(row["number"], row["type"], row["data"]) for row in Query(path=path).rows()]


def test_a_stream_from_its_end_joins_a_table(native: Any, tmp_path: Path) -> None:
    """Spark asks for the size of both: that of a stream is not known."""
    path = tmp_path / "growing.bin"
    with DataStream.create(path, version=3, sync="os", index="memory") as stream:
        for data in (b"before", b"after"):
            with stream.atomic_op() as op:
                op.add_entry(9, data)
            table = native.createDataFrame([(0, "zero"), (1, "one")], "number LONG, name STRING")
            found = native.readStream.format("datastream").option("startingOffset", "latest")
            query = (
                found.load(str(path))
                .join(table, "number")
                .writeStream.format("parquet")
                .option("checkpointLocation", str(tmp_path / "checkpoint"))
                .trigger(availableNow=True)
                .start(str(tmp_path / "rows"))
            )
            query.awaitTermination()
    rows = native.read.parquet(str(tmp_path / "rows")).collect()
    assert [(row.number, bytes(row.data), row.name) for row in rows] == [(1, b"after", "one")]


def test_a_server_is_not_for_the_reader_in_java(native: Any) -> None:
    """But in Real-Time Mode."""
    found = native.read.format("datastream").options(server="127.0.0.1:1", reader="native")
    with pytest.raises(Exception, match="the native reader reads files, not servers: leave it"):
        found.schema("number LONG, type LONG, data BINARY").load().collect()


def test_a_refused_option_ends_a_query_with_its_reason(native: Any, tmp_path: Path) -> None:
    path = tmp_path / "stream.bin"
    with DataStream.create(path, version=3, sync="os") as stream, stream.atomic_op() as op:
        op.add_entry(9, b"")
    with pytest.raises(StreamingQueryException, match="endingOffset is for spark"):
        follow(native, path, tmp_path, reader="native", endingOffset="5")
