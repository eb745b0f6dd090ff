"""The data source as Spark sees it: its name, its columns, who reads and writes it.

Spark pickles it by this module's name, so executors need the package installed.
"""

from __future__ import annotations

from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    DataSourceStreamReader,
    DataSourceStreamWriter,
    DataSourceWriter,
)
from pyspark.sql.types import StructType

from datastreamer.errors import UsageError
from datastreamer.spark.options import BATCH_PART_BYTES, Options, read_options
from datastreamer.spark.read import paths as places
from datastreamer.spark.read.batch import batch_reader
from datastreamer.spark.read.schemas import table_schema
from datastreamer.spark.stream.reader import TailReader
from datastreamer.spark.write.sink import StreamSink


class DatastreamSource(DataSource):
    """``format("datastream")``, of ``spark.read``, ``spark.readStream`` and ``df.write``."""

    @classmethod
    def name(cls) -> str:
        """What `format` calls it."""
        return "datastream"

    def schema(self) -> StructType:
        """All columns of the table. Raises `UsageError` for options that say nothing."""
        options = read_options(self.options)
        return table_schema(options, system_id=_has_system_id(options))

    def reader(self, schema: StructType) -> DataSourceReader:
        """Who reads these columns."""
        return batch_reader(read_options(self.options), schema)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802
        """Who reads these columns as the stream grows."""
        return TailReader(read_options(self.options, BATCH_PART_BYTES), schema)

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        """Who appends these columns to a stream."""
        return StreamSink(read_options(self.options), schema, overwrite=overwrite)

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamWriter:  # noqa: N802
        """Nobody: raises `UsageError`."""
        raise UsageError(
            "a streaming query writes to no stream by itself: write its batches, "
            ".writeStream.foreachBatch(lambda frame, _: frame.write.format('datastream')...)"
        )


def _has_system_id(options: Options) -> bool:
    if options.system_id is not None:
        return options.system_id
    return bool(options.paths) and not places.is_single(options.paths)
