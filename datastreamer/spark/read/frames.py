"""A DataFrame of a stream that this process plans and `mapInArrow` reads.

Spark checks each row that a data source returns, which costs the JVM a third more time with
`spark.read`. Options, columns, parts and rows are those of `spark.read`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from typing import Any, Final

from pyspark.serializers import CPickleSerializer
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.datasource import InputPartition
from pyspark.sql.types import StructType

from datastreamer.errors import ExtraMissing, UsageError
from datastreamer.spark.options import read_options
from datastreamer.spark.read.batch import BatchReader
from datastreamer.spark.source import DatastreamSource

Value = str | int | float | bool | os.PathLike[str]

_SERIALIZER: Final = CPickleSerializer()


def frame(
    spark: SparkSession,
    path: str | os.PathLike[str] | None = None,
    *,
    schema: StructType | str | None = None,
    **options: Value,
) -> DataFrame:
    """The rows that ``spark.read.format("datastream")`` gives with these options. `schema`
    selects columns.

    The query is planned now: the frame has the entries that are committed now, however often it
    is used. Raises what planning raises, and `ExtraMissing` without pandas.
    """
    # mapInArrow refuses to run without pandas, although it does not use it here.
    if find_spec("pandas") is None:
        raise ExtraMissing("Spark needs pandas for mapInArrow", "spark")
    if path is not None:
        options["path"] = path
    texts = {name: _text(value) for name, value in options.items()}
    source = DatastreamSource(texts)
    columns = source.schema() if schema is None else _columns(schema)
    reader = BatchReader(read_options(texts), columns)
    return frame_of(spark, reader, reader.partitions(), columns)


def frame_of(
    spark: SparkSession,
    reader: BatchReader,
    parts: Sequence[InputPartition],
    columns: StructType,
    convert: Callable[[Any], Any] | None = None,
) -> DataFrame:
    """The rows of the parts, of each batch what `convert` makes of it."""
    # One task per part, and one task if there is none.
    tasks = spark.range(0, len(parts), 1, max(1, len(parts)))
    pickled = [_SERIALIZER.dumps(part) for part in parts]  # type: ignore[no-untyped-call]
    return tasks.mapInArrow(_reading(reader, pickled, convert), columns)


def _columns(schema: StructType | str) -> StructType:
    found = StructType.fromDDL(schema) if isinstance(schema, str) else schema
    if not isinstance(found, StructType):
        raise UsageError(
            f"schema {schema!r} names no columns: use for example 'number BIGINT, type BIGINT'"
        )
    return found


def _text(value: Value) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _reading(
    reader: BatchReader, parts: Sequence[bytes], convert: Callable[[Any], Any] | None
) -> Callable[[Iterator[Any]], Iterator[Any]]:
    """The function that a task calls with the numbers of its parts.

    Each task receives all `parts`, pickled one by one, so that it unpickles only its own.
    """

    def read(numbers: Iterator[Any]) -> Iterator[Any]:
        for batch in numbers:
            for number in batch.column(0).to_pylist():
                part = _SERIALIZER.loads(parts[number])  # type: ignore[no-untyped-call]
                rows = reader.read(part)
                yield from rows if convert is None else map(convert, rows)

    return read
