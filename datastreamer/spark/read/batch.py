"""`spark.read`: the driver plans a query; executors read its parts.

Owns the order of the steps: options, columns, plan, parts, rows. Other modules do each step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from pyspark.sql.datasource import DataSourceReader, InputPartition
from pyspark.sql.types import StructType

from datastreamer.errors import UsageError
from datastreamer.spark.failures import one_line
from datastreamer.spark.options import Options
from datastreamer.spark.read.files import read_pages
from datastreamer.spark.read.partitions import FilePart, PackedParts, ServerPart
from datastreamer.spark.read.planning import plan
from datastreamer.spark.read.rows import RowMaker
from datastreamer.spark.read.schemas import wanted_columns
from datastreamer.spark.read.servers import read_entries


@one_line
class BatchReader(DataSourceReader):
    """Reads what is committed when `partitions` is called.

    It accepts no filters of Spark's. Spark plans a source in Python once for all scans of a query
    and of a DataFrame, so that a filter of one scan would remove rows of the others.
    """

    def __init__(self, options: Options, schema: StructType) -> None:
        if options.from_latest:
            raise UsageError("startingOffset latest is for spark.readStream: a batch has an end")
        if options.changes:
            raise UsageError("option changes is for spark.readStream: a batch has no changes")
        self._options = options
        self._columns = wanted_columns(options, schema)

    def partitions(self) -> Sequence[InputPartition]:
        """The parts of all files that the query names, or of the server's stream."""
        return list(plan(self._options))

    def read(self, partition: InputPartition, begin: int | None = None) -> Iterator[Any]:
        """The rows of a part, as record batches. `begin` is the first entry of the whole query if
        several plans read it."""
        if isinstance(partition, PackedParts):
            for part in partition.parts:
                yield from self.read(part, begin)
        elif isinstance(partition, FilePart):
            file, header = partition.snapshot.location.path, partition.snapshot.header
            rows = RowMaker(self._options, self._columns, header, file)
            first, stop = partition.first_page, partition.stop_page
            runs = read_pages(partition.snapshot, first, stop, verify=self._options.verify)
            yield from rows.batches(runs, partition.start, partition.stop, begin)
        elif isinstance(partition, ServerPart):
            rows = RowMaker(self._options, self._columns, partition.snapshot.header)
            start, stop = partition.start, partition.stop
            entries = read_entries(partition.snapshot, start, stop, partition.turn, rows.where)
            yield from rows.batches(entries, start, stop)
