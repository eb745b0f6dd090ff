"""The answers about the stream that a streaming query follows: one in each process.

Owns the form of offsets: the text that the source in Python stores in a checkpoint.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any, Final

from pyspark.sql.types import StructType

from datastreamer.errors import UsageError
from datastreamer.spark.native.plans import described, flat, for_tasks
from datastreamer.spark.options import BATCH_PART_BYTES, read_options
from datastreamer.spark.read.batch import BatchReader
from datastreamer.spark.stream.live import live_rows
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
        self._options = read_options(request["options"], BATCH_PART_BYTES)
        schema = StructType.fromJson(json.loads(request["schema"]))
        self._tail = TailReader(self._options, schema)
        # The offset at which a batch of Real-Time Mode began.
        self._start: dict[str, Any] = {}
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

    def at(self, request: Request) -> dict[str, Any]:
        """The offset of an entry up to which tasks have read."""
        self._tail.kept(self._start)
        return _offset(self._tail.offset_of(request["entry"]))

    def kept(self, request: Request) -> dict[str, Any]:
        """The entry to continue with after an offset. Raises what `latestOffset` does if the
        entries before it are not kept."""
        self._start = json.loads(request["start"])
        return {"entry": self._tail.kept(self._start)}

    def parts(self, request: Request) -> dict[str, Any]:
        if self._options.servers:
            raise UsageError(
                "option reader: Java follows a server in Real-Time Mode only: use "
                "trigger(realTime=...), or leave the option out"
            )
        start, end = json.loads(request["start"]), json.loads(request["end"])
        parts = flat(self._tail.partitions(start, end))
        first = self._options.start
        begin = first if isinstance(first, int) else 0
        found = described(self._options, parts, begin=begin)
        return {"plan": "", "reader": "", "where": None, **found}


def live(request: Request) -> Iterator[Any]:
    """The rows from an entry on, as they are committed."""
    options = read_options(request["options"])
    schema = StructType.fromJson(json.loads(request["schema"]))
    tail = TailReader(options, schema)
    try:
        # What the driver has asked, of the stream that this machine sees now.
        start = tail.kept(json.loads(request["start"]))
    finally:
        tail.stop()
    return live_rows(options, schema, start)


def _offset(offset: dict[str, Any] | None) -> dict[str, Any]:
    return {"offset": None if offset is None else json.dumps(offset)}


ANSWERS: Final[dict[str, Callable[[Following, Request], dict[str, Any]]]] = {
    "initialOffset": Following.first,
    "availableNow": Following.available_now,
    "latestOffset": Following.latest,
    "reportLatestOffset": Following.reported,
    "partitions": Following.parts,
    "offset": Following.at,
    "kept": Following.kept,
}
