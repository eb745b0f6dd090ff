"""Blocks of a stream as a streaming table, and the blocks of each batch."""

from __future__ import annotations

import os
from typing import Any

from pyspark import pipelines
from pyspark.sql import SparkSession
from pyspark.sql import functions as f

spark = SparkSession.active()
STREAM = os.environ["STREAM"]


@pipelines.table
def blocks() -> Any:
    """Every block once, however often the pipeline runs."""
    reader = spark.readStream.format("datastream").option("table", "blocks")
    return reader.schema("number BIGINT, batch_number BIGINT, timestamp BIGINT").load(STREAM)


@pipelines.materialized_view
def batches() -> Any:
    """How many blocks each batch has, and the times of its first and last one."""
    return (
        spark.read.table("blocks")
        .groupBy("batch_number")
        .agg(
            f.count("*").alias("blocks"),
            f.min("timestamp").alias("first"),
            f.max("timestamp").alias("last"),
        )
    )
