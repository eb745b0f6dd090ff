"""A stream, or a range of it, in Arrow's stream interface.

Owns which sources can be read (a file's path, an open `DataStream`, a client) and where reading
ends: at an entry that is fixed when it begins, so that a growing stream gives a consistent table.
Must not know trio or sockets: a client is any object with `header()` and `batches()`.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from typing import Any, Protocol, TypeAlias

import pyarrow as pa

from datastreamer._codec import EntryBatch
from datastreamer.arrow.record_batches import Converter, OnError, record_batches
from datastreamer.arrow.tables import ENTRIES
from datastreamer.errors import BadRange, UnknownEntry, UsageError
from datastreamer.format import PAGE_SIZE, Header
from datastreamer.storage.read.reader import truncated_below
from datastreamer.storage.stream import DataStream
from datastreamer.storage.view import StreamView


class StreamClient(Protocol):
    """The methods of a client that are used here; `BlockingClient` has them."""

    def header(self) -> Header: ...
    def batches(
        self, *, from_entry: int, stop: int
    ) -> contextlib.AbstractContextManager[Iterator[EntryBatch]]: ...


StreamSource: TypeAlias = str | os.PathLike[str] | StreamView | StreamClient


class ArrowStream:
    """A range of a stream as a table; each reader reads it again.

    `source` is the path of a stream file, an open `DataStream` or a `BlockingClient`; `start` is
    the first entry, `stop` the entry after the last one (None: the head when a reader begins).
    `table`, `columns` and `on_error` are as in `to_record_batch`; `version` overrides the header's.
    Batches hold about `batch_bytes` of the file, at most the entries of one page.

    It has Arrow's stream interface (``__arrow_c_stream__``), which Polars, DuckDB, pandas and
    pyarrow accept. Raises `UsageError` for invalid arguments, and what opening a file raises.
    """

    def __init__(
        self,
        source: StreamSource,
        table: str = ENTRIES,
        *,
        start: int = 0,
        stop: int | None = None,
        columns: Sequence[str] | None = None,
        on_error: OnError = "raise",
        version: int | None = None,
        batch_bytes: int = PAGE_SIZE,
    ) -> None:
        if start < 0 or batch_bytes < 1:
            raise UsageError(
                f"start must be at least 0, batch_bytes at least 1, not {start} and {batch_bytes}"
            )
        if stop is not None and stop < start:
            raise BadRange(f"stop {stop} is before start {start}")
        self._source = source
        self._start = start
        self._stop = stop
        self._batch_bytes = batch_bytes
        if table != ENTRIES and version is None:
            with opened(source) as found:
                version = header_of(found).version
        self._converter = Converter(table, version=version, columns=columns, on_error=on_error)

    @property
    def schema(self) -> Any:
        """The `pyarrow.Schema` of all batches."""
        return self._converter.schema

    def reader(self) -> Any:
        """A `pyarrow.RecordBatchReader` over the range.

        Reading raises what the source raises, after the rows that precede it: `DamagedEntry` for a
        damaged page, `DecodeFailed` for an entry that is not an event, `NotFound` if entries of the
        range are truncated meanwhile. Raises `UnknownEntry` if the stream ends before `start`.
        """
        batches = record_batches(self._batches(), self._converter)
        return pa.RecordBatchReader.from_batches(self.schema, batches)

    def __arrow_c_stream__(self, requested_schema: object | None = None) -> object:
        """Arrow's C stream interface: a capsule with a reader of the range."""
        return self.reader().__arrow_c_stream__(requested_schema)

    def _batches(self) -> Iterator[EntryBatch]:
        """Checks the range now, not at the first batch."""
        with opened(self._source) as source:
            total = header_of(source).total_entries
        if self._start > total:
            raise UnknownEntry(self._start, total)
        stop = total if self._stop is None else min(self._stop, total)
        return self._read(stop)

    def _read(self, stop: int) -> Iterator[EntryBatch]:
        if self._start < stop:
            # Opened at the first batch: an unused reader holds no file.
            with opened(self._source) as source:
                yield from read_batches(source, self._start, stop, self._batch_bytes)


def opened(source: StreamSource) -> contextlib.AbstractContextManager[StreamView | StreamClient]:
    """The source, opened if it is a path, to verify all pages; an open source stays open."""
    if isinstance(source, str | os.PathLike):
        return DataStream.open(os.fspath(source), read_only=True, verify="always")
    return contextlib.nullcontext(source)


def header_of(source: StreamView | StreamClient) -> Header:
    """The header as it is now."""
    if isinstance(source, StreamView):
        source.refresh()
        return source.header
    return source.header()


def read_batches(
    source: StreamView | StreamClient, start: int, stop: int, batch_bytes: int = PAGE_SIZE
) -> Iterator[EntryBatch]:
    """The entries from `start` up to, not including, `stop`, which must be committed.

    Raises `NotFound` if the stream is truncated before all are read.
    """
    number = start
    with contextlib.ExitStack() as stack:
        if isinstance(source, StreamView):
            found = source.batches(start, stop, max_bytes=batch_bytes)
        else:
            found = stack.enter_context(source.batches(from_entry=start, stop=stop))
        for batch in found:
            number = batch.next_number
            yield batch
    if number < stop:
        raise truncated_below(number)
