"""`spark.read`: a query planned on the driver, its parts read on executors.

Owns the order of things: options, columns, what there is now, parts, rows. How each is done
stands in the modules of those names.
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
from datastreamer.spark.read.pushdown import Bounds, take_filters
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
        """The parts of all files that the query names, or of its server's stream."""
        return [] if self._bounds.empty else list(plan(self._options, self._bounds))

    def read(self, partition: InputPartition, begin: int | None = None) -> Iterator[Any]:
        """The rows of a part, as record batches. `begin`: where the query begins that reads its
        entries in several plans."""
        if isinstance(partition, FilePart):
            rows = RowMaker(self._options, self._columns, partition.snapshot.header)
            runs = read_pages(partition.snapshot, partition.first_page, partition.stop_page)
            within = self._bounds.within(partition.start, partition.stop)
            yield from rows.batches(runs, within, begin)
        elif isinstance(partition, ServerPart):
            rows = RowMaker(self._options, self._columns, partition.snapshot.header)
            start, stop, types = partition.start, partition.stop, self._bounds.types
            entries = read_entries(partition.snapshot, start, stop, partition.turn, types)
            yield from rows.batches(entries, self._bounds.within(start, stop))


class FilteringReader(BatchReader):
    """The same, which is told the query's filters."""

    def pushFilters(self, filters: list[Filter]) -> Iterable[Filter]:  # noqa: N802
        """Take what spares reading; give back what Spark has to look at itself."""
        self._bounds, rest = take_filters(self._options.table, filters)
        return rest


def batch_reader(options: Options, schema: StructType) -> BatchReader:
    """Who reads: with filters only where the query allows it and Spark hands any on.

    Spark 4.3 keeps the plan of a filtered query and takes it for the next query of the same
    DataFrame, if that one has no filter: rows are missing then without a word. And while its
    setting ``spark.sql.python.filterPushdown.enabled`` is false, as it is by default, it refuses
    every query of a reader that takes filters.
    """
    # The module of the worker that hands filters on, which no other worker loads.
    told = "pyspark.sql.worker.data_source_pushdown_filters" in sys.modules
    return (FilteringReader if told and options.push_filters else BatchReader)(options, schema)
