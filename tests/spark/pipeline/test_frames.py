"""Ingest's frames: the rows of `spark.read`, by `mapInArrow`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from datastreamer import DataStream, StreamServer
from datastreamer.errors import ExtraMissing, FileMissing
from datastreamer.spark.pipeline.frames import frame
from tests.spark.conftest import Make
from tests.spark.read.test_batch import TABLES


@pytest.mark.parametrize("table", ["entries", "blocks", "transactions", "ger_updates"])
def test_it_gives_what_spark_reads(spark: Any, real_stream: Path, table: str) -> None:
    options = {"table": table, "partitionBytes": "1m"}
    made = frame(spark, {"path": str(real_stream), **options})
    rival = spark.read.format("datastream").options(**options, reader="python")
    rival = rival.load(str(real_stream))
    assert made.schema == rival.schema
    assert made.rdd.getNumPartitions() == rival.rdd.getNumPartitions() > 1
    rows = made.toArrow()
    assert rows.num_rows == TABLES[table]
    assert rows.equals(rival.toArrow())


def test_a_schema_and_offsets_narrow(spark: Any, real_stream: Path) -> None:
    options = {"path": str(real_stream), "table": "blocks"}
    options |= {"startingOffset": "block:3000", "endingOffset": "block:3010"}
    made = frame(spark, options, "timestamp BIGINT, number BIGINT")
    assert made.columns == ["timestamp", "number"]
    assert [row.number for row in made.collect()] == list(range(3000, 3010))


def test_the_end_is_where_it_was_when_it_was_made(spark: Any, tmp_path: Path) -> None:
    path = {"path": str(tmp_path / "grows.bin")}
    with DataStream.create(tmp_path / "grows.bin", sync="os", index="memory") as stream:
        empty = frame(spark, path)
        with stream.atomic_op() as op:
            op.add_entries(1, [b"a"] * 10)
        made = frame(spark, path)
        with stream.atomic_op() as op:
            op.add_entries(1, [b"b"] * 10)
        assert empty.count() == 0
        assert made.count() == made.count() == 10


def test_a_server(spark: Any, make: Make) -> None:
    path = make([(2, b"%d" % at) for at in range(1000)])
    with StreamServer(path, host="127.0.0.1", port=0, index="memory") as server:
        options = {"server": f"127.0.0.1:{server.port}", "partitionBytes": "5000"}
        made = frame(spark, options)
        assert made.rdd.getNumPartitions() > 1
        assert [row.number for row in made.collect()] == list(range(1000))


def test_pandas_that_is_missing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("datastreamer.spark.pipeline.frames.find_spec", lambda _: None)
    spark: Any = None
    with pytest.raises(ExtraMissing, match=r"pandas .*pip install 'datastreamer\[spark\]'"):
        frame(spark, {"path": "a.bin"})


def test_what_cannot_be_read_is_said_at_once(tmp_path: Path) -> None:
    spark: Any = None  # It comes to nothing before Spark is asked for anything.
    with pytest.raises(FileMissing, match=r"missing\.bin: no such file"):
        frame(spark, {"path": str(tmp_path / "missing.bin")})
