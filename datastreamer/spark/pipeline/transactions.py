"""Decoded transactions of a range of entries, as a DataFrame, with their blocks.

They have the columns of opened transactions (`arrow.opened`). Recovering a sender takes most of the
time, so tasks have equal numbers of transactions, wherever these are in the stream.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, Final

import numpy as np
import pyarrow as pa
from pyspark import Broadcast
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.pandas.types import from_arrow_schema, to_arrow_schema
from pyspark.sql.types import LongType, StructField, StructType

from datastreamer.arrow.opened import OPENED, opened_columns
from datastreamer.spark.options import read_options
from datastreamer.spark.pipeline.frames import Convert, frame, frame_of
from datastreamer.spark.read.batch import BatchReader
from datastreamer.spark.read.planning import plan_ranges
from datastreamer.spark.read.schemas import table_schema

_PER_MARK: Final = 1_000
"""Transactions between two entries at which a task may begin."""

FEWEST: Final = 5
"""The fewest marks of a task, if there are more: about 0.3 s of work."""

MOST: Final = 4 * FEWEST
"""The most: a task costs some 0.2 s of its own, and writes a file."""

_TASKS_PER_CORE: Final = 4
"""As many tasks let no core wait long for the last one."""


class BlocksOfRange:
    """The blocks of the entries from `start` up to before `stop`, found by their transactions,
    which are there, too.

    `blocks` is an Arrow table with `number`, `entry_number` and `timestamp`. A block has the
    transactions after it, up to the next block, or, if transactions are `named`, that is have the
    number of their block, up to the next block with this number.
    """

    def __init__(self, blocks: Any, start: int, stop: int, *, named: bool) -> None:
        numbers, entries = blocks["number"], blocks["entry_number"]
        self._numbers = np.sort(numbers.drop_null()) if named else None
        self._start, self._span = start, stop - start
        places = self._places(numbers, entries)
        order = np.argsort(places)
        self._ordered = places[order]
        own = {"block_entry": entries, "timestamp": blocks["timestamp"]}
        if not named:
            own["l2block_number"] = numbers
        self._columns = {name: column.combine_chunks().take(order) for name, column in own.items()}
        # Where entries are lost, there is a row without a number.
        self._known = numbers.is_valid().to_numpy()[order]

    def of(self, numbers: Any, entries: Any) -> dict[str, Any]:
        """The columns of the blocks of transactions with these numbers of blocks, at these entries;
        null without a block."""
        wanted = self._places(numbers, entries)
        before = np.searchsorted(self._ordered, wanted) - 1
        found = before >= 0
        at = before[found]
        same = self._ordered[at] // self._span == wanted[found] // self._span
        found[found] = same & self._known[at]
        rows = pa.array(before, mask=~found)
        return {name: column.take(rows) for name, column in self._columns.items()}

    def _places(self, numbers: Any, entries: Any) -> Any:
        """Numbers in the order of the blocks' numbers and entries; of each number there are
        `_span`."""
        groups: Any = 0
        if self._numbers is not None:
            # The sum of both ends differs for any two numbers of which one is that of a block.
            values = numbers.fill_null(0).to_numpy()
            ends = (np.searchsorted(self._numbers, values, side) for side in ("left", "right"))
            groups = np.where(numbers.is_valid(), sum(ends), -1)
        return groups * self._span + (entries.to_numpy() - self._start)


def decoded_transactions(
    spark: SparkSession,
    source: Mapping[str, str],
    start: int,
    stop: int,
    blocks: Broadcast[BlocksOfRange],
) -> DataFrame:
    """The transactions of the entries from `start` up to before `stop`, which are in `blocks`."""
    given = {
        **source,
        "table": "transactions",
        "startingOffset": str(start),
        "endingOffset": str(stop),
    }
    schema = "entry_number long"
    found = frame(spark, given, schema, _marks)
    marks = sorted(row.entry_number for row in found.collect())
    options = read_options(given)
    full = table_schema(options, system_id=False)
    tasks = tasks_for(len(marks), spark.sparkContext.defaultParallelism)
    inner = [marks[at * len(marks) // tasks] for at in range(1, tasks)]
    parts = list(plan_ranges(options, [start, *inner, stop] if marks else []))
    kept = [field for field in full if field.name != "encoded"]
    places = [StructField(name, LongType()) for name in ("block_entry", "timestamp")]
    columns = StructType([*kept, *from_arrow_schema(OPENED), *places])
    return frame_of(spark, BatchReader(options, full), parts, columns, _decoder(columns, blocks))


def tasks_for(marks: int, cores: int) -> int:
    """The number of tasks of equal work: more than the cores only if each core has as many."""
    fewest, most = -(-marks // MOST), -(-marks // FEWEST)
    wanted = max(fewest, min(most, _TASKS_PER_CORE * cores))
    return wanted if wanted <= cores else -(-wanted // cores) * cores


def _marks(batches: Iterator[Any]) -> Iterator[Any]:
    """Each transaction after `_PER_MARK` others, and the first one."""
    seen = 0
    for batch in batches:
        yield batch.take(pa.array(range(-seen % _PER_MARK, batch.num_rows, _PER_MARK), pa.int64()))
        seen += batch.num_rows


def _decoder(columns: StructType, blocks: Broadcast[BlocksOfRange]) -> Convert:
    """Replaces the column `encoded` by the decoded fields, and adds the columns of blocks."""
    schema = to_arrow_schema(columns)

    def decode(batch: Any) -> Any:
        made = opened_columns(batch.column("encoded"), OPENED.names)
        made |= blocks.value.of(batch.column("l2block_number"), batch.column("entry_number"))
        return pa.RecordBatch.from_arrays(
            [made[name] if name in made else batch.column(name) for name in schema.names],
            schema=schema,
        )

    return partial(map, decode)
