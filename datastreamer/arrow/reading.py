"""A stream, or a part of it, as something that Arrow's users read.

Owns what may be read (a file's path, an open `DataStream`, a client) and where reading ends:
at a number that is fixed when it begins, so that a stream that grows gives one consistent table.
Must not know trio or sockets: a client is whoever has `header()` and `batches()`.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from typing import Any, Protocol, TypeAlias

import pyarrow as pa

from datastreamer._codec import EntryBatch
from datastreamer.arrow.batches import Converter, OnError, record_batches
from datastreamer.arrow.tables import ENTRIES
from datastreamer.errors import BadRange, UnknownEntry, UsageError
from datastreamer.format import PAGE_SIZE, Header
from datastreamer.storage.read.reader import cut_back
from datastreamer.storage.stream import DataStream
from datastreamer.storage.view import StreamView


class StreamClient(Protocol):
    """A client as this needs it; `BlockingClient` is one."""

    def header(self) -> Header: ...
    def batches(
        self, *, from_entry: int, stop: int
    ) -> contextlib.AbstractContextManager[Iterator[EntryBatch]]: ...


StreamSource: TypeAlias = str | os.PathLike[str] | StreamView | StreamClient


class ArrowStream:
    """A range of a stream as a table, read anew by each of its readers.

    `source` is a stream file's path, an open `DataStream` or a `BlockingClient`; `start` the
    first entry's number, `stop` the one behind the last (None: all that is committed when a
    reader begins). `table`, `columns` and `on_error` are as in `to_record_batch`; `version`
    takes the place of the header's. Batches hold about `batch_bytes` of the file, at most a
    page's entries.

    It has Arrow's stream interface (``__arrow_c_stream__``), so Polars, DuckDB, pandas and
    pyarrow take it as it is. Raises `UsageError` for arguments that say nothing and what
    opening a file raises.
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
            raise UsageError(f"start {start} and batch_bytes {batch_bytes}: too small")
        if stop is not None and stop < start:
            raise BadRange(f"stop {stop} stands before start {start}")
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
        """The `pyarrow.Schema` of all its batches."""
        return self._converter.schema

    def reader(self) -> Any:
        """A `pyarrow.RecordBatchReader` over the range.

        Reading raises what the source raises, where it stands: `DamagedEntry` for a damaged
        page, after the entries before it; `DecodeFailed` for an entry that is no event, after
        the rows before it; `NotFound` where entries of the range are taken back meanwhile.
        Raises `UnknownEntry` where the stream ends before `start`.
        """
        runs = self._runs()
        return pa.RecordBatchReader.from_batches(self.schema, record_batches(runs, self._converter))

    def __arrow_c_stream__(self, requested_schema: object | None = None) -> object:
        """Arrow's C stream interface: a capsule with a stream over the range."""
        return self.reader().__arrow_c_stream__(requested_schema)

    def _runs(self) -> Iterator[EntryBatch]:
        """What is read is checked now, not when the first batch is asked for."""
        with opened(self._source) as source:
            total = header_of(source).total_entries
        if self._start > total:
            raise UnknownEntry(self._start, total)
        stop = total if self._stop is None else min(self._stop, total)
        return self._read(stop)

    def _read(self, stop: int) -> Iterator[EntryBatch]:
        if self._start < stop:
            # Not before: a reader that nobody reads holds no file.
            with opened(self._source) as source:
                yield from runs(source, self._start, stop, self._batch_bytes)


def opened(source: StreamSource) -> contextlib.AbstractContextManager[StreamView | StreamClient]:
    """The source, open; one that was open before stays so."""
    if isinstance(source, str | os.PathLike):
        return DataStream.open(os.fspath(source), read_only=True)
    return contextlib.nullcontext(source)


def header_of(source: StreamView | StreamClient) -> Header:
    """What is committed now."""
    if isinstance(source, StreamView):
        source.refresh()
        return source.header
    return source.header()


def runs(
    source: StreamView | StreamClient, start: int, stop: int, batch_bytes: int = PAGE_SIZE
) -> Iterator[EntryBatch]:
    """The entries from `start` up to, not including, `stop`, which are committed.

    Raises `NotFound` where the stream is cut back before all are read.
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
        raise cut_back(number)


def reader(
    source: StreamSource,
    table: str = ENTRIES,
    *,
    start: int = 0,
    stop: int | None = None,
    columns: Sequence[str] | None = None,
    on_error: OnError = "raise",
    version: int | None = None,
    batch_bytes: int = PAGE_SIZE,
) -> Any:
    """A `pyarrow.RecordBatchReader` over a range of a stream: `ArrowStream(...).reader()`."""
    return ArrowStream(
        source,
        table,
        start=start,
        stop=stop,
        columns=columns,
        on_error=on_error,
        version=version,
        batch_bytes=batch_bytes,
    ).reader()
