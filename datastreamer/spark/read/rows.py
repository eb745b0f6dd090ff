"""Entries as the record batches that a query wants, and what becomes of bad ones.

Owns the modes: FAILFAST raises, PERMISSIVE makes a row that says what is wrong, DROPMALFORMED
leaves it out - of an entry that is no event as of a page that is damaged.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Final

import pyarrow as pa

from datastreamer._codec import EntryBatch
from datastreamer.arrow.batches import Converter
from datastreamer.arrow.tables import ENTRIES, ERROR
from datastreamer.errors import UsageError
from datastreamer.format import U64_MAX, Header
from datastreamer.spark.options import Options
from datastreamer.spark.read.files import Lost
from datastreamer.spark.read.pushdown import Bounds
from datastreamer.spark.read.schemas import SYSTEM_ID, Columns, number_column

_MOST: Final = U64_MAX >> 1


class RowMaker:
    """Makes the record batches of one part of one stream."""

    def __init__(self, options: Options, columns: Columns, header: Header) -> None:
        self._columns = columns
        self._mode = options.mode
        self._number = number_column(options.table)
        self._system_id = header.system_id
        version = header.version if options.version is None else options.version
        # Rows are counted by a column, so there is one, wanted or not.
        own = columns.own or (self._number,)
        if ERROR in columns.schema.names and options.table != ENTRIES:
            own += (ERROR,)
        self._converter = Converter(
            options.table, version=version, columns=own, on_error=options.on_error
        )
        if SYSTEM_ID in columns.schema.names and header.system_id > _MOST:
            raise UsageError(
                f"the system id {header.system_id} is above {_MOST}, the most that a column of "
                "signed numbers holds: leave the column system_id out"
            )

    def batches(
        self, runs: Iterable[EntryBatch | Lost], bounds: Bounds, begin: int | None = None
    ) -> Iterator[Any]:
        """The rows of the entries within the bounds: their numbers and types, that is.

        What is lost is told of at the first of it that the query wants: it begins with entry
        `begin` (None: with the bounds), and others read what is before these bounds. Raises
        `DamagedEntry` and `DecodeFailed` in mode FAILFAST, after the rows before.
        """
        for run in runs:
            if isinstance(run, Lost):
                yield from self._lost(run, bounds, bounds.start if begin is None else begin)
                continue
            within = _within(run, bounds)
            if not within:
                continue
            found = self._converter.convert(within)
            if found.batch.num_rows:
                yield self._shaped(found.batch)
            if found.error is not None:
                raise found.error

    def _shaped(self, batch: Any) -> Any:
        """A batch of the converter's with the columns that the query wants."""
        rows = batch.num_rows
        columns = [
            self._constant(rows)
            if field.name == SYSTEM_ID
            else batch.column(field.name)
            if field.name in batch.schema.names
            else pa.nulls(rows, field.type)
            for field in self._columns.schema
        ]
        return pa.RecordBatch.from_arrays(columns, schema=self._columns.schema)

    def _constant(self, rows: int) -> Any:
        return pa.repeat(pa.scalar(self._system_id, pa.int64()), rows)

    def _lost(self, lost: Lost, bounds: Bounds, begin: int) -> Iterator[Any]:
        first = lost.first if lost.first is not None else max(0, (lost.next or 1) - 1)
        before = lost.next is not None and lost.next <= bounds.start
        if first >= bounds.stop or before:
            return
        if self._mode == "FAILFAST":
            raise lost.error
        first = max(first, begin)
        # Of a lost entry no type is known, so a query for types does not want it.
        if self._mode == "PERMISSIVE" and bounds.types is None and first >= bounds.start:
            told = {self._number: first, SYSTEM_ID: self._system_id, ERROR: _what(lost)}
            columns = [
                pa.array([told.get(field.name)], field.type) for field in self._columns.schema
            ]
            yield pa.RecordBatch.from_arrays(columns, schema=self._columns.schema)


def _within(run: EntryBatch, bounds: Bounds) -> EntryBatch:
    """The entries of a run that are within the bounds."""
    start, stop = bounds.start, bounds.stop
    if run.first_number < start or run.next_number > stop:
        run = run.since(start).before(min(stop, U64_MAX))
    return run if bounds.types is None else run.select(bounds.types)


def _what(lost: Lost) -> str:
    which = "an unknown number of entries"
    if lost.first is not None and lost.next is not None:
        count = lost.next - lost.first
        which = f"entry {lost.first}" if count == 1 else f"entries {lost.first} to {lost.next - 1}"
    return f"{lost.error}; {which} cannot be read"
