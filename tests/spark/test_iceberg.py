"""Iceberg tables with its package for Spark, by `make test-lakes`: a sink, MERGE, changes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from datastreamer.spark import session
from tests.spark.lakes import ICEBERG, missing, settings
from tests.spark.merging import merge_and_check

pytestmark = [
    pytest.mark.soak,
    pytest.mark.skipif(bool(missing(ICEBERG)), reason=missing(ICEBERG)),
]


@pytest.fixture(scope="module")
def spark(java: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    folder = str(tmp_path_factory.mktemp("spark"))
    own = {
        "spark.sql.extensions": (
            "org.apache.iceberg.spark.extensions.IcebergSparkSessionExtensions"
        ),
        "spark.sql.catalog.lake": "org.apache.iceberg.spark.SparkCatalog",
        "spark.sql.catalog.lake.type": "hadoop",
        "spark.sql.catalog.lake.warehouse": f"{folder}/warehouse",
        "spark.local.dir": folder,
    }
    made = session("local[2]", "iceberg", {**settings(ICEBERG), **own})
    made.sparkContext.setLogLevel("ERROR")
    yield made
    made.stop()


def test_a_sink(spark: Any, real_stream: Path, tmp_path: Path) -> None:
    """The table grows by a query that is started again."""
    blocks = spark.readStream.format("datastream").option("table", "blocks").load(str(real_stream))
    empty = spark.createDataFrame([], blocks.schema)
    empty.writeTo("lake.chain.blocks").create()
    writer = blocks.writeStream.format("iceberg").option("checkpointLocation", f"{tmp_path}/state")
    for _ in range(2):
        writer.trigger(availableNow=True).toTable("lake.chain.blocks").awaitTermination()
        assert spark.table("lake.chain.blocks").count() == 11_318


@pytest.mark.parametrize("seed", range(3))
def test_changes_are_merged(spark: Any, tmp_path: Path, seed: int) -> None:
    """The recipe of docs/SPARK_STREAMING.md."""
    merge_and_check(spark, tmp_path, "iceberg", f"lake.chain.changes_{seed}", seed)
