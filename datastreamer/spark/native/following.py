"""The answers about the stream that a streaming query follows: one in each process.

Owns the form of offsets: the text that the source in Python stores in a checkpoint.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Final

from pyspark.sql.types import StructType

from datastreamer.spark.native.plans import described, flat, for_tasks, options_of
from datastreamer.spark.options import BATCH_PART_BYTES
from datastreamer.spark.read.batch import BatchReader
from datastreamer.spark.stream.reader import TailReader
from datastreamer.spark.versions import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxBytes,
    ReadMaxRows,
)

Request = Mapping[str, Any]


class Following:
    """A followed stream; each method answers one kind of request."""

    def __init__(self, request: Request) -> None:
        self._options = options_of(request, BATCH_PART_BYTES)
        schema = StructType.fromJson(json.loads(request["schema"]))
        self._tail = TailReader(self._options, schema)
        self._reader = BatchReader(replace(self._options, from_latest=False), schema)

    def begun(self) -> dict[str, Any]:
        """The reader of parts, and the limit of a batch."""
        limit = self._tail.getDefaultReadLimit()
        return {
            **for_tasks(self._options, self._reader),
            "maxRows": limit.max_rows if isinstance(limit, ReadMaxRows) else None,
            "maxBytes": limit.max_bytes if isinstance(limit, ReadMaxBytes) else None,
        }

    def first(self, _: Request) -> dict[str, Any]:
        return _offset(self._tail.initialOffset())

    def available_now(self, _: Request) -> dict[str, Any]:
        self._tail.prepareForTriggerAvailableNow()
        return {}

    def latest(self, request: Request) -> dict[str, Any]:
        limit: ReadLimit = ReadAllAvailable()
        if request["maxRows"] is not None:
            limit = ReadMaxRows(request["maxRows"])
        elif request["maxBytes"] is not None:
            limit = ReadMaxBytes(request["maxBytes"])
        return _offset(self._tail.latestOffset(json.loads(request["start"]), limit))

    def reported(self, _: Request) -> dict[str, Any]:
        return _offset(self._tail.reportLatestOffset())

    def parts(self, request: Request) -> dict[str, Any]:
        start, end = json.loads(request["start"]), json.loads(request["end"])
        parts = flat(self._tail.partitions(start, end))
        first = self._options.start
        begin = first if isinstance(first, int) else 0
        found = described(self._options, parts, begin=begin)
        return {"plan": "", "reader": "", "where": None, **found}


def _offset(offset: dict[str, Any] | None) -> dict[str, Any]:
    return {"offset": None if offset is None else json.dumps(offset)}


ANSWERS: Final[dict[str, Callable[[Following, Request], dict[str, Any]]]] = {
    "initialOffset": Following.first,
    "availableNow": Following.available_now,
    "latestOffset": Following.latest,
    "reportLatestOffset": Following.reported,
    "partitions": Following.parts,
}
