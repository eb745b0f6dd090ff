"""Ingests a sequencer's stream into typed tables: a backfill, then a live tail.

Owns a folder with the tables. A range of entries is either complete or written again. Backfill and
live tail write the same kind of ranges, so each continues where the other ended.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

from pyspark.sql import DataFrame, SparkSession, Window
from pyspark.sql import functions as f
from pyspark.sql.streaming.query import StreamingQuery

from datastreamer.errors import ExtraMissing, StreamFileError
from datastreamer.spark.pipeline.manifest import EntryRange, Manifest
from datastreamer.spark.pipeline.tables import (
    TABLES,
    Format,
    ParquetTables,
    tables_in,
    with_day,
)
from datastreamer.spark.pipeline.transactions import decoded_transactions
from datastreamer.spark.read.frames import frame

CHUNK: Final = 1_000_000
"""Entries per range of a backfill."""

COMPACT: Final = 20_000_000
"""Entries per range after `Ingest.compact`."""

_MOST: Final = (1 << 63) - 1


class Ingest:
    """The tables of one stream in the folder `out`, which all executors must share.

    `source` names the stream with options of `spark.read`: ``{"path": ...}`` or
    ``{"server": ...}``. `format` is that of the tables, for a new folder (None: Parquet). The
    folder is locked until `close`. Raises what `Manifest` raises, `UsageError` for a folder of
    another format, and `ExtraMissing` without the packages that decode transactions.
    """

    def __init__(
        self,
        spark: SparkSession,
        source: Mapping[str, str],
        out: str | os.PathLike[str],
        format: Format | None = None,
    ) -> None:
        ensure_openable()
        self._spark = spark
        self._source = dict(source)
        self._out = Path(out).absolute()
        self._tables = tables_in(spark, self._out, format)
        self._manifest = Manifest(self._source, out)
        try:
            for begun in self._manifest.begun():
                # A crash interrupted this range.
                if begun.stop <= self._manifest.total():
                    self._write(begun)
                else:
                    self._tables.clear(begun.name)
                    self._manifest.forget(begun)
        except BaseException:
            self.close()
            raise

    @property
    def done(self) -> int:
        """The next entry to ingest: all entries before it are in the tables."""
        return self._manifest.done

    def backfill(
        self, chunk: int = CHUNK, begun: Callable[[EntryRange, int], None] | None = None
    ) -> int:
        """Ingest everything that is committed now; returns the number of entries.

        `begun` is called with each range before it is written, and the stream's total number of
        entries.
        """
        before = self.done
        total = self._manifest.total()
        while self.done < total:
            wanted = EntryRange(self.done, min(total, self.done + chunk))
            if begun is not None:
                begun(wanted, total)
            self._write(wanted)
        return self.done - before

    def compact(self, entries: int = COMPACT) -> int:
        """Join successive ranges of up to `entries` entries together, in fewer and larger files;
        returns the number of ranges.

        A query that reads the tables meanwhile may miss files, and fails then.
        """
        self._remove_replaced()
        for joined in self._manifest.joinable(entries):
            whole = EntryRange(joined[0].start, joined[-1].stop)
            names = [each.name for each in joined]
            self._tables.compact(names, whole.name)
            if isinstance(self._tables, ParquetTables):
                self._manifest.join(joined)
                self._remove_replaced()
        return len(self._manifest.ranges())

    def _remove_replaced(self) -> None:
        for replaced in self._manifest.replaced():
            self._tables.clear(replaced.name)
            self._manifest.remove(replaced)

    def follow(self, seconds: float = 10.0, *, available_now: bool = False) -> StreamingQuery:
        """Start a query that ingests new entries every `seconds` seconds, from the folder's end.

        Its checkpoint is in the folder; it skips what a backfill has ingested meanwhile.
        """
        numbers = (
            self._spark.readStream.format("datastream")
            .options(**self._source)
            .option("startingOffset", self.done)
            .schema("number long")
            .load()
        )
        writer = numbers.writeStream.foreachBatch(self._ingest_batch).option(
            "checkpointLocation", str(self._out / "_checkpoint")
        )
        if available_now:
            return writer.trigger(availableNow=True).start()
        return writer.trigger(processingTime=f"{round(seconds * 1000)} milliseconds").start()

    def _ingest_batch(self, numbers: DataFrame, _: int) -> None:
        found = numbers.agg(f.min("number"), f.max("number")).first()
        assert found is not None
        first, last = found
        if first is None or last < self.done:
            return
        if first > self.done:
            raise StreamFileError(
                str(self._out),
                f"entry {self.done} is missing: the query's checkpoint continues with {first}; "
                "ingest into another folder",
            )
        self._write(EntryRange(self.done, last + 1))

    def _write(self, wanted: EntryRange) -> None:
        """Write the rows of a range in all tables, replacing what exists of it."""
        self._manifest.begin(wanted)
        # What there is of it: its entries may have changed since, and the days of their blocks.
        self._tables.clear(wanted.name)
        for table in TABLES:
            rows = (
                self._transactions(wanted) if table == "transactions" else self._read(table, wanted)
            )
            if "timestamp" in rows.columns and "day" not in rows.columns:
                rows = with_day(rows)
            self._tables.save(rows, table, wanted.name)
        self._manifest.finish(wanted)

    def _read(self, table: str, wanted: EntryRange, start: int | None = None) -> DataFrame:
        # Not `spark.read`, which starts two Python processes to plan each table of each range.
        offsets = {
            "startingOffset": str(wanted.start if start is None else start),
            "endingOffset": str(wanted.stop),
        }
        return frame(self._spark, **{**self._source, "table": table, **offsets})

    def _transactions(self, wanted: EntryRange) -> DataFrame:
        """Decoded transactions with the day and time of their blocks; null for an unknown
        block."""
        opened, first = decoded_transactions(self._spark, self._source, wanted)
        start = wanted.start
        if first is not None:
            # The block of the first transaction may precede the range.
            start = min(start, self._manifest.entry_of_block(first, start))
        blocks = with_day(self._read("blocks", wanted, start)).select(
            "number", "entry_number", "timestamp", "day"
        )
        # A block number may occur twice. A block has the transactions up to the next block with
        # its number, and the first one also those before it.
        same = Window.partitionBy("number").orderBy("entry_number")
        blocks = blocks.select(
            f.col("number").alias("l2block_number"),
            f.when(f.lag("entry_number").over(same).isNotNull(), f.col("entry_number")).alias(
                "_from"
            ),
            f.lead("entry_number").over(same).alias("_to"),
            "timestamp",
            "day",
        )
        number = f.col("entry_number")
        within = (f.coalesce("_from", f.lit(0)) <= number) & (
            f.coalesce("_to", f.lit(_MOST)) > number
        )
        own = (opened["l2block_number"] == blocks["l2block_number"]) & within
        joined = opened.join(blocks, own, "left").drop(blocks["l2block_number"])
        return joined.drop("_from", "_to")

    def close(self) -> None:
        """Close the stream and unlock the folder."""
        self._manifest.close()


def ensure_openable() -> None:
    """Raise `ExtraMissing` if a package that decodes transactions is missing."""
    if any(importlib.util.find_spec(name) is None for name in ("rlp", "coincurve", "sha3")):
        raise ExtraMissing("decoding transactions needs packages that are not installed", "zkevm")
