"""Converts entries to the record batches that a query needs, and handles bad entries.

Owns the modes, which treat an entry that is not an event like a damaged page: FAILFAST raises,
PERMISSIVE makes a row with the error, DROPMALFORMED skips it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc

from datastreamer._codec import EntryBatch
from datastreamer.arrow.record_batches import Converter
from datastreamer.arrow.tables import ENTRIES, ERROR, TABLES
from datastreamer.errors import UsageError
from datastreamer.format import U64_MAX, Header, page_of
from datastreamer.selection.clauses import Selection
from datastreamer.spark.options import Options
from datastreamer.spark.read.files import Lost, PageEntries
from datastreamer.spark.read.schemas import (
    FILE,
    OFFSET,
    PAGE,
    SYSTEM_ID,
    Columns,
    number_column,
)

_MOST: Final = U64_MAX >> 1


class RowMaker:
    """Makes the record batches of one part of one stream."""

    def __init__(
        self, options: Options, columns: Columns, header: Header, file: str | None = None
    ) -> None:
        self._columns = columns
        self._file = file
        self._placed = not {FILE, PAGE, OFFSET}.isdisjoint(columns.schema.names)
        self._mode = options.mode
        self._number = number_column(options.table)
        self._system_id = header.system_id
        version = options.version_of(header)
        kind = None if options.table == ENTRIES else TABLES[options.table].entry_type(version)
        self.where: Selection | None = options.where if kind is None else (kind,)
        """The entries that are rows; None: all."""

        # A converter of events passes over entries of other types itself.
        self._selection = options.where
        # The converter counts rows by a column, so it needs one even if the query has none.
        own = columns.own or (self._number,)
        if self._placed and self._number not in own:
            own += (self._number,)
        if ERROR in columns.schema.names and options.table != ENTRIES:
            own += (ERROR,)
        self._converter = Converter(
            options.table, version=version, columns=own, on_error=options.on_error
        )
        if SYSTEM_ID in columns.schema.names and header.system_id > _MOST:
            raise UsageError(
                f"the system id {header.system_id} is above {_MOST}, the maximum of a LONG column: "
                "leave the column system_id out"
            )

    def batches(
        self,
        runs: Iterable[EntryBatch | PageEntries | Lost],
        start: int,
        stop: int,
        begin: int | None = None,
    ) -> Iterator[Any]:
        """The rows of the entries from `start` up to, not including, `stop`.

        `Lost` entries become one row, at the first of them that the query reads: the query begins
        at entry `begin` (None: at `start`), and other parts report what precedes `start`. Behind
        `Lost` entries whose numbers go back, entries of the query may come again: it is reported
        wherever it is.
        In mode FAILFAST, raises `DamagedEntry` or `DecodeFailed` after the rows that precede it.
        """
        for run in runs:
            if isinstance(run, Lost):
                yield from self._lost(run, start, stop, start if begin is None else begin)
                continue
            within, page_start = run if isinstance(run, PageEntries) else (run, 0)
            if within.first_number < start or within.next_number > stop:
                within = within.since(start).before(stop)
            if self._selection is not None:
                within = within.select(self._selection)
            if not within:
                continue
            found = self._converter.convert(within)
            if found.batch.num_rows:
                places = self._places(found.batch, within, page_start) if self._placed else {}
                yield self._shaped(found.batch, places)
            if found.error is not None:
                raise found.error

    def _places(self, batch: Any, entries: EntryBatch, page_start: int) -> dict[str, Any]:
        """Where the entries of the rows are in the file."""
        numbers, offsets = (
            pa.Array.from_buffers(pa.int64(), len(entries), [None, pa.py_buffer(column)])
            for column in (entries.numbers, entries.offsets)
        )
        found = offsets.take(pc.index_in(batch.column(self._number), numbers))
        return {
            FILE: pa.repeat(pa.scalar(self._file, pa.string()), len(found)),
            PAGE: pa.repeat(pa.scalar(page_of(page_start), pa.int64()), len(found)),
            OFFSET: pc.add(found, page_start),
        }

    def _shaped(self, batch: Any, places: dict[str, Any]) -> Any:
        """The converter's batch with the columns that the query needs."""
        rows = batch.num_rows
        columns = [
            pa.repeat(pa.scalar(self._system_id, pa.int64()), rows)
            if field.name == SYSTEM_ID
            else places[field.name]
            if field.name in places
            else batch.column(field.name)
            if field.name in batch.schema.names
            else pa.nulls(rows, field.type)
            for field in self._columns.schema
        ]
        return pa.RecordBatch.from_arrays(columns, schema=self._columns.schema)

    def _lost(self, lost: Lost, start: int, stop: int, begin: int) -> Iterator[Any]:
        first = lost.first if lost.first is not None else max(0, (lost.next or 1) - 1)
        if lost.next is not None and lost.next < first:
            first = min(first, stop - 1)
        elif first >= stop or (lost.next is not None and lost.next <= start):
            return
        if self._mode == "FAILFAST":
            raise lost.error
        first = max(first, begin)
        if self._mode == "PERMISSIVE" and first >= start:
            offset = lost.error.offset
            values = {self._number: first, SYSTEM_ID: self._system_id, ERROR: _what(lost)}
            values |= {FILE: self._file, PAGE: page_of(offset), OFFSET: offset}
            columns = [
                pa.array([values.get(field.name)], field.type) for field in self._columns.schema
            ]
            yield pa.RecordBatch.from_arrays(columns, schema=self._columns.schema)


def _what(lost: Lost) -> str:
    which = "an unknown number of entries"
    if lost.first is not None and lost.next is not None:
        count = lost.next - lost.first
        which = f"entry {lost.first}" if count == 1 else f"entries {lost.first} to {lost.next - 1}"
    return f"{lost.error}; {which} cannot be read"
