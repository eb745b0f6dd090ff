"""A stream as a DataFrame by the shorter way: planned in this process, read by `mapInArrow`.

Spark looks after each row that a data source gives, so that `spark.read` costs the JVM a third
more. Owns no more than the way: options, columns, parts and rows are those of `spark.read`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from typing import Any

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.datasource import InputPartition
from pyspark.sql.types import StructType

from datastreamer.errors import ExtraMissing, UsageError
from datastreamer.spark.options import read_options
from datastreamer.spark.read.batch import BatchReader
from datastreamer.spark.source import DatastreamSource

Value = str | int | float | bool | os.PathLike[str]


def frame(
    spark: SparkSession,
    path: str | os.PathLike[str] | None = None,
    *,
    schema: StructType | str | None = None,
    **options: Value,
) -> DataFrame:
    """The rows that ``spark.read.format("datastream")`` gives with these options and this
    schema, which narrows the columns.

    The stream is looked at now: whoever uses the frame, and as often as it is used, the entries
    are those that are committed now. Raises what looking at the stream raises, and `UsageError`
    for `pushFilters`, since Spark hands no filters on here; `ExtraMissing` without pandas.
    """
    # Nothing of it is used, but without it Spark hands nothing over.
    if find_spec("pandas") is None:
        raise ExtraMissing("Spark needs pandas for mapInArrow", "spark")
    if path is not None:
        options["path"] = path
    told = {name: _text(value) for name, value in options.items()}
    source = DatastreamSource(told)
    columns = source.schema() if schema is None else _columns(schema)
    wanted = read_options(told)
    if wanted.push_filters:
        raise UsageError("pushFilters is for spark.read: give startingOffset and endingOffset here")
    reader = BatchReader(wanted, columns)
    parts = reader.partitions()
    # A task has a part; of an empty stream there is none, and one task that finds that.
    tasks = spark.range(0, len(parts), 1, max(1, len(parts)))
    return tasks.mapInArrow(_reading(reader, parts), columns)


def _columns(schema: StructType | str) -> StructType:
    found = StructType.fromDDL(schema) if isinstance(schema, str) else schema
    if not isinstance(found, StructType):
        raise UsageError(f"schema {schema!r} names no columns: 'number BIGINT, type BIGINT', say")
    return found


def _text(value: Value) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _reading(
    reader: BatchReader, parts: Sequence[InputPartition]
) -> Callable[[Iterator[Any]], Iterator[Any]]:
    """What a task does with the numbers of its parts."""

    def read(numbers: Iterator[Any]) -> Iterator[Any]:
        for batch in numbers:
            for number in batch.column(0).to_pylist():
                yield from reader.read(parts[number])

    return read
