"""A followed stream for Spark before 4.2, which passes neither start nor limit of a batch.

Spark ends a run of Trigger.AvailableNow after one batch then, so a batch has all there is.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from pyspark.sql.datasource import DataSourceStreamReader, InputPartition

from datastreamer.errors import UsageError
from datastreamer.spark.failures import one_line
from datastreamer.spark.stream.reader import TailReader
from datastreamer.spark.versions import VERSION, ReadAllAvailable


@one_line
class UnlimitedReader(DataSourceStreamReader):
    """Knows where a batch begins from the calls that precede it.

    Raises `UsageError` if the options limit a batch.
    """

    def __init__(self, reader: TailReader) -> None:
        if not isinstance(reader.getDefaultReadLimit(), ReadAllAvailable):
            raise UsageError(
                f"Spark {VERSION[0]}.{VERSION[1]} cannot limit a batch of a source in Python: "
                "leave maxEntriesPerTrigger and maxBytesPerTrigger out, follow a file with the "
                "reader in Java, or use Spark 4.2 or later"
            )
        self._reader = reader
        self._last: dict[str, Any] | None = None

    def initialOffset(self) -> dict[str, Any]:  # noqa: N802
        """The first offset of a query without a checkpoint."""
        self._last = self._reader.initialOffset()
        return self._last

    def latestOffset(self) -> dict[str, Any]:  # type: ignore[override]  # noqa: N802
        """The end of the next batch, as `TailReader.latestOffset`."""
        return self._reader.latestOffset(self._last or self.initialOffset(), ReadAllAvailable())

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        """The parts of a batch. Spark also passes the end of a checkpoint, as both."""
        self._last = end
        if start == end:
            self._reader.reach()
            return []
        return self._reader.partitions(start, end)

    def read(self, partition: InputPartition) -> Iterator[Any]:
        """The rows of a part, as record batches."""
        return self._reader.read(partition)

    def stop(self) -> None:
        """Close the file or the connection."""
        self._reader.stop()
