"""Counts of rows, and least and greatest values of columns, without reading all pages.

Owns which pages answer by their summaries. The others, as at the ends of a query, are read here if
they are few; a page whose rows cannot be made is for tasks, which say why.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
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
    options: Options, parts: Iterable[FilePart], functions: Sequence[Function]
) -> list[int | None] | None:
    """The values of these functions over all rows of the parts, each a number or, of no rows,
    None; None if tasks have to find them. Raises what opening a file raises."""
    values: dict[str, list[int]] = {column: [] for _, column in functions if column is not None}
    types = options.where is None or all(isinstance(it, int) for it in options.where)
    known = all((options.table, column) in RANGES for column in values)
    if options.mode != "FAILFAST" or not types or not known:
        return None
    if options.table == ENTRIES and options.where is None:
        # The headers of the files have it.
        return [sum(part.stop - part.start for part in parts)] * len(functions)
    count, unread = 0, list[FilePart]()
    for part in parts:
        version = options.version_of(part.snapshot.header)
        wanted, readable = PageFilter.of(options, version), version >= FIRST_PROTOBUF_VERSION
        summaries = proven(options, part.snapshot, part.pages) if readable else {}
        for page in part.pages:
            summary = summaries.get(page)
            rows = None if summary is None else wanted.rows(summary)
            if summary is None or rows is None or not _is_exact(part, summary):
                unread.append(replace(part, first_page=page, stop_page=page + 1))
                if len(unread) > _MOST_READ:
                    return None
                continue
            count += rows
            for column, found in values.items():
                found.extend(summary.range(RANGES[options.table, column]) or ())
    schema = StructType(
        [StructField(name, LongType()) for name in values or [number_column(options.table)]]
    )
    try:
        for part in unread:
            for batch in BatchReader(options, schema).read(part):
                count += batch.num_rows
                for column, found in values.items():
                    least_and_most = pc.min_max(batch.column(column)).as_py().values()
                    found.extend(it for it in least_and_most if it is not None)
    except DatastreamerError:
        return None
    choices = {"min": min, "max": max}
    return [
        count if column is None else choices[name](values[column], default=None)
        for name, column in functions
    ]


def _is_exact(part: FilePart, summary: PageSummary) -> bool:
    """Whether a summary is that of the rows of a page, and these have no number that is too large
    for its column: that is for tasks, too."""
    within = part.start <= summary.first and summary.next_number <= part.stop
    return within and summary.has_ranges and max(summary.ranges[1::2]) <= _MOST
