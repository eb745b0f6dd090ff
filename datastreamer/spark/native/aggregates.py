"""Counts of rows, and least and greatest values of columns, without reading all pages.

Owns which pages answer by their summaries. The others, as at the ends of a query, are read here if
they are few; a page whose rows cannot be made is for tasks, which say why.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import pyarrow.compute as pc
from pyspark.sql.types import LongType, StructField, StructType

from datastreamer.arrow.tables import ENTRIES
from datastreamer.errors import DatastreamerError
from datastreamer.format import U64_MAX
from datastreamer.spark.options import Options
from datastreamer.spark.read.batch import BatchReader
from datastreamer.spark.read.page_summaries import RANGES, PageFilter, proven
from datastreamer.spark.read.partitions import FilePart
from datastreamer.spark.read.schemas import number_column
from datastreamer.storage.summaries.records import PageSummary
from datastreamer.zkevm.schema import FIRST_PROTOBUF_VERSION

# A task starts sooner than more pages are read here.
_MOST_READ: Final = 8
# What a column holds.
_MOST: Final = U64_MAX >> 1

Function = tuple[str, str | None]
"""``count`` of rows, or ``min`` or ``max`` of a column."""


def values_of(
    options: Options, parts: list[FilePart], functions: Sequence[Function]
) -> list[int | None] | None:
    """The values of these functions over all rows of the parts, each a number or, of no rows,
    None; None if tasks have to find them. Raises what opening a file raises."""
    columns = sorted({column for _, column in functions if column is not None})
    types = options.where is None or all(isinstance(it, int) for it in options.where)
    known = all((options.table, column) in RANGES for column in columns)
    if options.mode != "FAILFAST" or not types or not known:
        return None
    if options.table == ENTRIES and options.where is None:
        # The headers of the files have it.
        count = sum(part.stop - part.start for part in parts)
        return [count] * len(functions)
    found = _Tally(options, columns)
    unread: list[FilePart] = []
    for part in parts:
        unread += part.of_runs(found.summed_up(part))
        if len(unread) > _MOST_READ:
            return None
    try:
        for part in unread:
            found.read(part)
    except DatastreamerError:
        return None
    choices = {"min": min, "max": max}
    return [
        found.count if column is None else choices[name](found.values[column], default=None)
        for name, column in functions
    ]


class _Tally:
    """The number of rows, and values of which the least and the greatest are those of all."""

    def __init__(self, options: Options, columns: list[str]) -> None:
        self._options = options
        self.count = 0
        self.values: dict[str, list[int]] = {column: [] for column in columns}

    def summed_up(self, part: FilePart) -> list[range]:
        """Add the pages of a part whose summaries say enough; returns the others, or some of them
        if they are too many."""
        header, given = part.snapshot.header, self._options.version
        has_ranges = (header.version if given is None else given) >= FIRST_PROTOBUF_VERSION
        wanted = PageFilter.of(self._options, header.version)
        known = proven(self._options, part.snapshot, part.pages) if has_ranges else {}
        left: list[range] = []
        for page in part.pages:
            summary = known.get(page)
            ranges = None if summary is None else self._ranges(part, summary)
            rows = None if summary is None or ranges is None else wanted.rows(summary)
            if rows is None or ranges is None:
                left.append(range(page, page + 1))
                if len(left) > _MOST_READ:
                    break
                continue
            self.count += rows
            for column, found in ranges.items():
                self.values[column] += found
        return left

    def _ranges(
        self, part: FilePart, summary: PageSummary
    ) -> dict[str, tuple[int, int] | tuple[()]] | None:
        """The least and the greatest values of a page, none if it has no row; None if these are not
        those of its rows."""
        within = part.start <= summary.first and summary.next_number <= part.stop
        if not within or not summary.has_ranges:
            return None
        ranges = {it: summary.range(RANGES[self._options.table, it]) or () for it in self.values}
        # Tasks say what is too large for its column.
        return None if any(max(it, default=0) > _MOST for it in ranges.values()) else ranges

    def read(self, part: FilePart) -> None:
        names = list(self.values) or [number_column(self._options.table)]
        schema = StructType([StructField(name, LongType()) for name in names])
        for batch in BatchReader(self._options, schema).read(part):
            self.count += batch.num_rows
            for column, values in self.values.items():
                found = pc.min_max(batch.column(column)).as_py()
                values += [it for it in found.values() if it is not None]
