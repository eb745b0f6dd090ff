"""DataFrames of a stream that this process plans and `mapInArrow` reads, for ingest.

`spark.read` starts two Python processes to plan each table of each range of entries, and a data
source cannot convert rows before Spark has them. Options, columns, parts and rows are those of
`spark.read`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from typing import Any, Final, TypeAlias, cast

from pyspark.serializers import CPickleSerializer
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.datasource import InputPartition
from pyspark.sql.types import StructType

from datastreamer.errors import ExtraMissing
from datastreamer.spark.options import read_options
from datastreamer.spark.read.batch import BatchReader
from datastreamer.spark.source import DatastreamSource

_SERIALIZER: Final = CPickleSerializer()


Convert: TypeAlias = Callable[[Iterator[Any]], Iterator[Any]]
"""Makes the record batches of a part from those that were read."""


def frame(
    spark: SparkSession,
    options: Mapping[str, str],
    schema: str | None = None,
    convert: Convert = iter,
) -> DataFrame:
    """The rows that are committed now, of all columns or those of `schema`, as `convert` makes them
    of those columns. Raises what planning raises, and `ExtraMissing` without pandas."""
    # mapInArrow refuses to run without pandas, although it does not use it here.
    if find_spec("pandas") is None:
        raise ExtraMissing("Spark needs pandas for mapInArrow", "spark")
    columns = DatastreamSource(dict(options)).schema()
    if schema is not None:
        columns = cast("StructType", StructType.fromDDL(schema))
    reader = BatchReader(read_options(options), columns)
    return frame_of(spark, reader, reader.partitions(), columns, convert)


def frame_of(
    spark: SparkSession,
    reader: BatchReader,
    parts: Sequence[InputPartition],
    columns: StructType,
    convert: Convert,
) -> DataFrame:
    """What `convert` makes of the rows of each part."""
    # One task per part, and one task if there is none.
    tasks = spark.range(0, len(parts), 1, max(1, len(parts)))
    pickled = [_SERIALIZER.dumps(part) for part in parts]  # type: ignore[no-untyped-call]
    return tasks.mapInArrow(_reading(reader, pickled, convert), columns)


def _reading(
    reader: BatchReader, parts: Sequence[bytes], convert: Convert
) -> Callable[[Iterator[Any]], Iterator[Any]]:
    """The function that a task calls with the numbers of its parts.

    Each task receives all `parts`, pickled one by one, so that it unpickles only its own.
    """

    def read(numbers: Iterator[Any]) -> Iterator[Any]:
        for batch in numbers:
            for number in batch.column(0).to_pylist():
                part = _SERIALIZER.loads(parts[number])  # type: ignore[no-untyped-call]
                yield from convert(reader.read(part))

    return read
