"""`spark.read`: a query planned on the driver, its parts read on executors.

Owns the order of things: options, columns, what there is now, parts, rows. How each is done
stands in the modules of those names.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from pyspark.sql.datasource import DataSourceReader, InputPartition
from pyspark.sql.types import StructType

from datastreamer.errors import UsageError
from datastreamer.spark import places
from datastreamer.spark.bounds import Bounds
from datastreamer.spark.files import look_at, read_pages
from datastreamer.spark.options import Options
from datastreamer.spark.parts import FilePart, cut_file
from datastreamer.spark.rows import RowMaker
from datastreamer.spark.schemas import wanted_columns


class BatchReader(DataSourceReader):
    """Reads what is committed when `partitions` is called."""

    def __init__(self, options: Options, schema: StructType) -> None:
        self._options = options
        self._columns = wanted_columns(options, schema)

    def partitions(self) -> Sequence[InputPartition]:
        """The parts of all files that the query names, or of its server's stream."""
        if self._options.servers or self._options.start or self._options.stop is not None:
            raise UsageError("servers and offsets are not read yet: give a path alone")
        parts: list[InputPartition] = []
        for place in places.find(self._options.paths):
            snapshot = look_at(place, self._options.stream_type)
            parts += cut_file(snapshot, Bounds(), self._options.partition_bytes)
        return parts

    def read(self, partition: InputPartition) -> Iterator[Any]:
        """The rows of a part, as record batches."""
        if isinstance(partition, FilePart):
            rows = RowMaker(self._options, self._columns, partition.snapshot.header)
            runs = read_pages(partition.snapshot, partition.first_page, partition.stop_page)
            yield from rows.batches(runs, partition.start, partition.stop)
