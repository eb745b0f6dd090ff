"""`spark.read`: the driver plans a query; executors read its parts.

Owns the order of the steps: options, columns, plan, parts, rows. Other modules do each step.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from pyspark.sql.datasource import DataSourceReader, Filter, InputPartition
from pyspark.sql.types import StructType

from datastreamer.errors import UsageError
from datastreamer.spark.options import Options
from datastreamer.spark.read.files import read_pages
from datastreamer.spark.read.partitions import FilePart, ServerPart
from datastreamer.spark.read.planning import plan
from datastreamer.spark.read.pushdown import Bounds, split_filters
from datastreamer.spark.read.rows import RowMaker
from datastreamer.spark.read.schemas import wanted_columns
from datastreamer.spark.read.servers import read_entries


class BatchReader(DataSourceReader):
    """Reads what is committed when `partitions` is called."""

    def __init__(self, options: Options, schema: StructType) -> None:
        if options.from_latest:
            raise UsageError("startingOffset latest is for spark.readStream: a batch has an end")
        self._options = options
        self._columns = wanted_columns(options, schema)
        self._bounds = Bounds()

    def partitions(self) -> Sequence[InputPartition]:
        """The parts of all files that the query names, or of the server's stream."""
        return [] if self._bounds.empty else list(plan(self._options, self._bounds))

    def read(self, partition: InputPartition, begin: int | None = None) -> Iterator[Any]:
        """The rows of a part, as record batches. `begin` is the first entry of the whole query if
        several plans read it."""
        if isinstance(partition, FilePart):
            rows = RowMaker(self._options, self._columns, partition.snapshot.header)
            first, stop = partition.first_page, partition.stop_page
            runs = read_pages(partition.snapshot, first, stop, verify=self._options.verify)
            within = self._bounds.within(partition.start, partition.stop)
            yield from rows.batches(runs, within, begin)
        elif isinstance(partition, ServerPart):
            rows = RowMaker(self._options, self._columns, partition.snapshot.header)
            start, stop, types = partition.start, partition.stop, self._bounds.types
            entries = read_entries(partition.snapshot, start, stop, partition.turn, types)
            yield from rows.batches(entries, self._bounds.within(start, stop))


class FilteringReader(BatchReader):
    """A `BatchReader` that accepts the query's filters."""

    def pushFilters(self, filters: list[Filter]) -> Iterable[Filter]:  # noqa: N802
        """Apply the filters that limit what is read; return those that Spark has to apply."""
        self._bounds, rest = split_filters(self._options.table, filters)
        return rest


def batch_reader(options: Options, schema: StructType) -> BatchReader:
    """A reader that accepts filters if the query permits it and Spark passes any.

    Spark 4.3 reuses the plan of a filtered query for the next query of the same DataFrame if that
    query has no filter: it then silently lacks rows. And while
    ``spark.sql.python.filterPushdown.enabled`` is false, the default, Spark fails every query
    whose reader accepts filters.
    """
    # Only the worker that pushes filters loads this module.
    pushes = "pyspark.sql.worker.data_source_pushdown_filters" in sys.modules
    return (FilteringReader if pushes and options.push_filters else BatchReader)(options, schema)
