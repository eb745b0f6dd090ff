"""A streaming query's reader as Spark calls it, without Spark: offsets as JSON, parts pickled."""

from __future__ import annotations

import json
import pickle
from typing import Any, ClassVar
from unittest.mock import patch

from datastreamer.spark.source import DatastreamSource
from datastreamer.spark.stream.reader import RefusedReader, TailReader
from datastreamer.spark.versions import ReadAllAvailable

Rows = list[dict[str, Any]]


def made_by(source: DatastreamSource, schema: Any = None) -> Any:
    """The reader as Spark 4.2 and the reader in Java have it, with each version of Spark."""
    with patch("datastreamer.spark.source.HAS_LIMITS", True):
        return source.streamReader(schema or source.schema())


class Driver:
    """The driver of one query. `offset` is what the checkpoint has."""

    started: ClassVar[list[Driver]] = []

    def __init__(self, offset: dict[str, Any] | None = None, **options: Any) -> None:
        self._source = DatastreamSource({name: str(value) for name, value in options.items()})
        self.reader = self._made()
        self.offset = offset
        self.started.append(self)

    @classmethod
    def stop_all(cls) -> None:
        """Spark stops its readers when their query ends."""
        for driver in cls.started:
            driver.reader.stop()
        cls.started.clear()

    def _made(self) -> TailReader:
        made = made_by(self._source)
        if isinstance(made, RefusedReader):
            made.initialOffset()
        assert isinstance(made, TailReader)
        return made

    def batch(self) -> Rows | None:
        """The next batch's rows; None where there is nothing new."""
        if self.offset is None:
            self.offset = _through_json(self.reader.initialOffset())
        end = self.planned()
        if end == self.offset:
            return None
        rows = self.rows(self.offset, end)
        self.offset = end
        return rows

    def batches(self) -> list[Rows]:
        """Batches, until there is nothing new."""
        return list(iter(self.batch, None))

    def numbers(self) -> list[int]:
        """The numbers of all entries up to where there is nothing new."""
        return [row["number"] for rows in self.batches() for row in rows]

    def planned(self) -> dict[str, Any]:
        """How far the next batch would go."""
        limit = self.reader.getDefaultReadLimit()
        return _through_json(self.reader.latestOffset(self.offset or {}, limit))

    def planned_from_start(self) -> dict[str, Any]:
        """How far the first batch would go."""
        self.offset = _through_json(self.reader.initialOffset())
        return self.planned()

    def all_there_is(self) -> dict[str, Any]:
        """The same, with no limit."""
        return _through_json(self.reader.latestOffset(self.offset or {}, ReadAllAvailable()))

    def rows(self, start: dict[str, Any], end: dict[str, Any]) -> Rows:
        """What executors read of a batch."""
        parts = pickle.loads(pickle.dumps(list(self.reader.partitions(start, end))))
        executor: TailReader = pickle.loads(pickle.dumps(self._made()))
        return [row for part in parts for batch in executor.read(part) for row in batch.to_pylist()]


def _through_json(offset: dict[str, Any]) -> dict[str, Any]:
    given: dict[str, Any] = json.loads(json.dumps(offset))
    return given
