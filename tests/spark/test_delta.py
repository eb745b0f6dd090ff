"""Delta tables, with Delta's own package for Spark: ingest, compaction, a sink, MERGE, changes.

`make test-lakes` runs this.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from datastreamer import DataStream
from datastreamer.errors import UsageError
from datastreamer.spark import Ingest, open_tables, session
from tests.spark.lakes import DELTA as PACKAGE
from tests.spark.lakes import missing, settings
from tests.spark.merging import merge_and_check
from tests.spark.pipeline.worlds import World, expected

pytestmark = [
    pytest.mark.soak,
    pytest.mark.skipif(bool(missing(PACKAGE)), reason=missing(PACKAGE)),
]

DELTA = {
    "spark.sql.extensions": "io.delta.sql.DeltaSparkSessionExtension",
    "spark.sql.catalog.spark_catalog": "org.apache.spark.sql.delta.catalog.DeltaCatalog",
    # Of 50 tasks that read a table's log, 48 have no work here.
    "spark.databricks.delta.snapshotPartitions": "2",
}


@pytest.fixture(scope="module")
def spark(java: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    folder = str(tmp_path_factory.mktemp("spark"))
    scratch = {"spark.local.dir": folder, "spark.sql.warehouse.dir": f"{folder}/warehouse"}
    made = session("local[2]", "delta", {**settings(PACKAGE), **DELTA, **scratch})
    made.sparkContext.setLogLevel("ERROR")
    yield made
    made.stop()


def test_ingest(spark: Any, real_stream: Path, tmp_path: Path) -> None:
    out = tmp_path / "tables"
    ingest = Ingest(spark, {"path": str(real_stream)}, out, "delta")
    try:
        assert ingest.backfill(chunk=20_000) == 34_723
        ingest.compact()
    finally:
        ingest.close()
    counts = {name: table.count() for name, table in open_tables(spark, out).items()}
    assert counts == {
        "blocks": 11_318,
        "transactions": 465,
        "batches": 102,
        "batch_ends": 101,
        "ger_updates": 0,
    }
    with pytest.raises(UsageError, match="its tables are delta, not parquet"):
        Ingest(spark, {"path": str(real_stream)}, out, "parquet")


def test_a_sink_and_a_merge(spark: Any, real_stream: Path, tmp_path: Path) -> None:
    table = str(tmp_path / "blocks")
    blocks = (
        spark.readStream.format("datastream")
        .options(table="blocks", maxEntriesPerTrigger="20000")
        .schema("number BIGINT, timestamp BIGINT")
        .load(str(real_stream))
    )
    writer = blocks.writeStream.format("delta").option("checkpointLocation", f"{tmp_path}/state")
    for _ in range(2):
        writer.trigger(availableNow=True).start(table).awaitTermination()
        assert spark.read.format("delta").load(table).count() == 11_318
    rows = spark.read.format("datastream").option("table", "blocks").load(str(real_stream))
    rows.createOrReplaceTempView("merged")
    # Both sides read the view, with different filters.
    spark.sql(
        f"merge into delta.`{table}` b using (select number from merged where number < 100 "
        "union select number + 1000000 from merged where number >= 11000) s "
        "on b.number = s.number when matched then delete "
        "when not matched then insert (number, timestamp) values (s.number, 0)"
    )
    assert spark.read.format("delta").load(table).count() == 11_318 - 100 + 318


@pytest.mark.parametrize("seed", range(3))
def test_changes_are_merged(spark: Any, tmp_path: Path, seed: int) -> None:
    """The recipe of docs/SPARK_STREAMING.md."""
    merge_and_check(spark, tmp_path, "delta", f"changes_{seed}", seed)


def test_tables_after_a_truncation(
    spark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "tables"
    monkeypatch.setattr("datastreamer.spark.pipeline.manifest.GRACE", -1.0)
    with DataStream.create(tmp_path / "stream.bin", version=3, system_id=7, sync="os") as stream:
        world = World(stream, 1, 8)
        ingest = Ingest(spark, {"path": str(tmp_path / "stream.bin")}, out, "delta")
        ingest.backfill(chunk=10)
        stream.truncate(13)
        world.append(3)
        ingest.backfill(chunk=5)
        assert ingest.compact() == 1
        world.append(1)
        ingest.backfill()
        ingest.close()
        rows = expected(world.events())["transactions"]
    table = open_tables(spark, out)["transactions"]
    columns = ("entry_number", "l2block_number", "index", "nonce", "block_entry", "timestamp")
    found = table.select(*columns).orderBy("entry_number").collect()
    assert [tuple(row) for row in found] == [row[:-1] for row in rows]
    # What is no longer named is removed.
    there = spark.read.format("delta").load(str(out / "transactions"))
    assert there.select("range").distinct().count() <= 2
