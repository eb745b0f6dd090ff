"""Decoded transactions of a range of entries, as a DataFrame.

They have the columns of opened transactions (`arrow.opened`). Recovering a sender takes most of the
time, so tasks have equal numbers of transactions, wherever these are in the stream.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

import numpy as np
import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.pandas.types import from_arrow_schema, to_arrow_schema
from pyspark.sql.types import StructType

from datastreamer.arrow.opened import OPENED, opened_columns
from datastreamer.spark.options import read_options
from datastreamer.spark.pipeline.frames import frame, frame_of
from datastreamer.spark.read.batch import BatchReader
from datastreamer.spark.read.planning import plan_ranges
from datastreamer.spark.read.schemas import table_schema

PER_TASK: Final = 5_000
"""The fewest transactions of a task that others follow: about 0.4 s of work."""

MOST_PER_TASK: Final = 4 * PER_TASK
"""The most: a task costs some 0.2 s of its own, and writes a file."""

_TASKS_PER_CORE: Final = 4
"""As many tasks let no core wait long for the last one."""


def decoded_transactions(
    spark: SparkSession, source: Mapping[str, str], start: int, stop: int, blocks: Any = None
) -> DataFrame:
    """The transactions of the entries from `start` up to before `stop`.

    `blocks` are an Arrow table of the entries (`block_entry`) and numbers of the blocks, of a
    stream whose transactions do not name theirs: `l2block_number` is that of the block before.
    """
    given = {
        **source,
        "table": "transactions",
        "startingOffset": str(start),
        "endingOffset": str(stop),
    }
    schema = "entry_number long"
    found = frame(spark, given, schema).mapInArrow(_marks, schema)
    marks = sorted(row.entry_number for row in found.collect())
    options = read_options(given)
    full = table_schema(options, system_id=False)
    inner = marks[:: marks_per_task(len(marks), spark.sparkContext.defaultParallelism)][1:]
    parts = list(plan_ranges(options, [start, *inner, stop] if marks else []))
    kept = [field for field in full if field.name != "encoded"]
    columns = StructType([*kept, *from_arrow_schema(OPENED)])
    ordered = None if blocks is None else blocks.sort_by("block_entry").combine_chunks()
    reader = BatchReader(options, full)
    return frame_of(spark, reader, parts, columns, _decoder(columns, ordered))


def marks_per_task(marks: int, cores: int) -> int:
    """How many of the marks, one for `PER_TASK` transactions, each task has."""
    return max(1, min(marks // (_TASKS_PER_CORE * cores), MOST_PER_TASK // PER_TASK))


def _marks(batches: Iterator[Any]) -> Iterator[Any]:
    """Each transaction after `PER_TASK` others, and the first one."""
    seen = 0
    for batch in batches:
        yield batch.take(pa.array(range(-seen % PER_TASK, batch.num_rows, PER_TASK), pa.int64()))
        seen += batch.num_rows


def _decoder(columns: StructType, blocks: Any) -> Callable[[Any], Any]:
    """The function that replaces the column `encoded` of a batch by the decoded fields."""
    schema = to_arrow_schema(columns)

    def decode(batch: Any) -> Any:
        opened = opened_columns(batch.column("encoded"), OPENED.names)
        if blocks is not None:
            entries = batch.column("entry_number").to_numpy()
            before = np.searchsorted(blocks["block_entry"].to_numpy(), entries) - 1
            # Of a transaction before the first block, null.
            places = pa.array(before, mask=before < 0)
            opened["l2block_number"] = blocks["l2block_number"].combine_chunks().take(places)
        return pa.RecordBatch.from_arrays(
            [
                opened[field.name] if field.name in opened else batch.column(field.name)
                for field in schema
            ],
            schema=schema,
        )

    return decode
