"""Rows as their entries are committed, for Spark's Real-Time Mode: of a file or of servers.

Owns how a task waits for entries. A change of what was read before ends it with an error.
"""

from __future__ import annotations

import contextlib
import os
import select
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Final

import pyarrow as pa
from pyspark.sql.types import LongType, StructField, StructType

from datastreamer._codec import EntryBatch
from datastreamer.errors import StreamFileError, UsageError
from datastreamer.format import U64_MAX
from datastreamer.server._inotify import reports_of_writes
from datastreamer.spark.options import Options
from datastreamer.spark.read.paths import find
from datastreamer.spark.read.rows import RowMaker
from datastreamer.spark.read.schemas import FILE, OFFSET, PAGE, number_column, wanted_columns
from datastreamer.spark.read.servers import (
    Servers,
    ServerSnapshot,
    history_of,
    position_at,
    read_entries,
)
from datastreamer.storage.stream import DataStream

NEXT: Final = b"next"
"""In the metadata of a record batch: the entry to continue with after all its rows."""

# How often a file is looked at of which no writes are reported.
_POLL_SECONDS: Final = 0.005
_LOOK_SECONDS: Final = 1.0


def live_rows(options: Options, schema: StructType, start: int) -> Iterator[Any]:
    """The rows of the entries from `start` on, as record batches. Behind these columns they have
    the number of each row's entry.

    Raises `HistoryChanged` or `StreamFileError` if entries that were read change.
    """
    options = replace(options, from_latest=False)
    if not {FILE, PAGE, OFFSET}.isdisjoint(schema.names):
        raise UsageError(f"Real-Time Mode has no columns {FILE}, {PAGE} and {OFFSET}")
    number = StructField(number_column(options.table), LongType(), False)
    own = [field for field in schema if field.name != number.name]
    columns = wanted_columns(options, StructType([*own, number]))
    if options.servers:
        servers = Servers.of(options)
        index, client = servers.connect_any()
        with client:
            header, end = client.header(), position_at(client, start)
            snapshot = ServerSnapshot(servers, header, end, {index: history_of(client)})
        rows = RowMaker(options, columns, header)
        entries = read_entries(snapshot, start, U64_MAX, index, rows.where)
    else:
        (location,) = find(options.paths)
        if location.uri is not None:
            raise UsageError(f"{location.path}: Real-Time Mode follows local files and servers")
        stream = DataStream.open(
            location.path, follow=True, verify="cold" if options.verify else "never"
        )
        rows = RowMaker(options, columns, stream.header)
        entries = _follow(stream, start)
    for batch in entries:
        found = list(rows.batches([batch], start, U64_MAX))
        last = found.pop() if found else pa.RecordBatch.from_pylist([], columns.schema)
        yield from (_ordered(each, schema) for each in found)
        yield _ordered(last, schema).replace_schema_metadata({NEXT: str(batch.next_number)})


def _ordered(batch: Any, schema: StructType) -> Any:
    """The columns as Spark wants them, then the numbers."""
    names = [*schema.names, batch.schema.names[-1]]
    columns = [batch.column(name) for name in names]
    return pa.RecordBatch.from_arrays(columns, names=names)


def _follow(stream: DataStream, entry: int) -> Iterator[EntryBatch]:
    with stream, contextlib.ExitStack() as opened:
        epoch, reports, waiting = stream.epoch, -1, select.poll()
        with contextlib.suppress(OSError):
            reports = reports_of_writes(stream.fileno())
            waiting.register(reports, select.POLLIN)
            opened.callback(os.close, reports)
        seconds = _POLL_SECONDS if reports < 0 else _LOOK_SECONDS
        while True:
            if stream.epoch != epoch or stream.total_entries < entry:
                raise StreamFileError(
                    stream.path, f"entries that were read, before {entry}, or later ones changed"
                )
            for batch in stream.batches(entry):
                yield batch
                entry = batch.next_number
            if waiting.poll(seconds * 1000):
                os.read(reports, 4096)
            stream.refresh()
