"""The data source as Spark's workers call it, without Spark: plan, pickle, read."""

from __future__ import annotations

import pickle
from typing import Any

import pyarrow as pa
from pyspark.sql.datasource import InputPartition
from pyspark.sql.types import StructType

from datastreamer.spark.options import read_options
from datastreamer.spark.read.batch import BatchReader
from datastreamer.spark.source import DatastreamSource


class Query:
    """A planned query: its parts, and the rows of each."""

    def __init__(self, *, schema: StructType | None = None, **options: Any) -> None:
        given = {name: str(value) for name, value in options.items()}
        self.schema = DatastreamSource(given).schema() if schema is None else schema
        reader = BatchReader(read_options(given), self.schema)
        self.parts: list[InputPartition] = pickle.loads(pickle.dumps(list(reader.partitions())))
        self._reader: BatchReader = pickle.loads(pickle.dumps(reader))

    def part(self, at: int) -> list[Any]:
        return list(self._reader.read(self.parts[at]))

    def batches(self) -> list[Any]:
        return [batch for at in range(len(self.parts)) for batch in self.part(at)]

    def table(self) -> Any:
        batches = self.batches()
        table = pa.Table.from_batches(batches) if batches else pa.table({})
        table.validate(full=True)
        return table

    def rows(self) -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = self.table().to_pylist()
        return rows
