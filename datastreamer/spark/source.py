"""The data source that Spark calls: its name, its columns, its readers and its writer.

Spark pickles it by this module's name, so executors need the package installed.
"""

from __future__ import annotations

from collections.abc import Mapping

from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    DataSourceStreamReader,
    DataSourceStreamWriter,
    DataSourceWriter,
)
from pyspark.sql.types import StructType

from datastreamer.errors import DatastreamerError, UsageError
from datastreamer.spark.failures import one_line
from datastreamer.spark.options import (
    BATCH_PART_BYTES,
    PARTITION_BYTES,
    Options,
    read_options,
)
from datastreamer.spark.read.batch import BatchReader
from datastreamer.spark.read.paths import is_single
from datastreamer.spark.read.schemas import table_schema
from datastreamer.spark.stream.changes import ChangeReader, with_changes
from datastreamer.spark.stream.reader import RefusedReader, TailReader
from datastreamer.spark.stream.unlimited import UnlimitedReader
from datastreamer.spark.versions import HAS_LIMITS
from datastreamer.spark.write.sink import QuerySink, StreamSink


@one_line
class DatastreamSource(DataSource):
    """``format("datastream")``, of ``spark.read``, ``spark.readStream`` and ``df.write``."""

    @classmethod
    def name(cls) -> str:
        """The argument of `format`."""
        return "datastream"

    def schema(self) -> StructType:
        """All columns of the table. Raises `UsageError` for invalid options."""
        options = read_options(self.options)
        found = table_schema(options, system_id=_has_system_id(options))
        return with_changes(found) if options.changes else found

    def reader(self, schema: StructType) -> DataSourceReader:
        """A reader of these columns of what is committed now."""
        return BatchReader(_read_options(self.options, PARTITION_BYTES), schema)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802
        """A reader of these columns as the stream grows.

        Raises nothing: Spark's worker fails with an error of its own, after ours, if this does.
        """
        try:
            options = _read_options(self.options, BATCH_PART_BYTES)
            reader = (ChangeReader if options.changes else TailReader)(options, schema)
            return reader if HAS_LIMITS else UnlimitedReader(reader)
        except DatastreamerError as error:
            return RefusedReader(error)

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        """A writer that appends these columns to a stream."""
        return StreamSink(read_options(self.options), schema, overwrite=overwrite)

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamWriter:  # noqa: N802
        """A writer that appends the batches of a query to a stream, each once."""
        return QuerySink(read_options(self.options), schema, overwrite=overwrite)


def _read_options(given: Mapping[str, str], part_bytes: int) -> Options:
    options = read_options(given, part_bytes)
    if options.reader == "native":
        raise UsageError(
            "option reader: Spark has no native reader: add the jar that "
            "datastreamer.spark.native_jar() names to spark.jars before the session starts"
        )
    return options


def _has_system_id(options: Options) -> bool:
    if options.system_id is not None:
        return options.system_id
    return bool(options.paths) and not is_single(options.paths)
