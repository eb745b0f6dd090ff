"""A sequencer's stream as typed tables in Parquet: what there is now, and what comes.

Owns a folder with the tables: a range of entries is there whole, or it is written again. Backfill
and live tail write the same ranges, so the one goes on where the other ended. The record of them
is `ranges`', reading is `batch`'s and `streaming`'s.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from pyspark.sql import DataFrame, SparkSession, Window
from pyspark.sql import functions as f
from pyspark.sql.streaming.query import StreamingQuery

from datastreamer.errors import DecodeFailed, ExtraMissing, StreamFileError
from datastreamer.spark.pipeline.manifest import EntryRange, Manifest

TABLES: Final = ("blocks", "transactions", "batches", "batch_ends")
"""What there is in the folder; blocks and transactions by day."""

CHUNK: Final = 5_000_000
"""So many entries of a backfill are one range."""

_MOST: Final = (1 << 63) - 1
# The first and the last second that have a date in Python, and in everything else.
_DATES: Final = (-62_135_596_800, 253_402_300_799)
_OPENED: Final = (
    "kind int, nonce long, gas long, gas_price long, value string, to binary, hash binary, "
    "sender binary, open_error string"
)


class Ingest:
    """One stream's tables in the folder `out`, which every executor has to see.

    `source` is how the stream is found: the options of `spark.read`, ``{"path": ...}`` or
    ``{"server": ...}``. The folder is this one's alone until `close`. Raises what `Manifest` does,
    and `ExtraMissing` where transactions cannot be opened.
    """

    def __init__(
        self, spark: SparkSession, source: Mapping[str, str], out: str | os.PathLike[str]
    ) -> None:
        ensure_openable()
        self._spark = spark
        self._source = dict(source)
        self._out = Path(out).absolute()
        self._ranges = Manifest(self._source, out)
        try:
            for begun in self._ranges.begun():
                # A crash cut it off.
                if begun.stop <= self._ranges.total():
                    self._write(begun)
                else:
                    self._clear(begun)
                    self._ranges.forget(begun)
        except BaseException:
            self.close()
            raise

    @property
    def done(self) -> int:
        """The entry that is due: all before it are in the tables."""
        return self._ranges.done

    # Historic and live.

    def backfill(self, chunk: int = CHUNK) -> int:
        """Ingest all that is committed now; gives the number of entries."""
        before = self.done
        total = self._ranges.total()
        while self.done < total:
            self._write(EntryRange(self.done, min(total, self.done + chunk)))
        return self.done - before

    def follow(self, seconds: float = 10.0, *, available_now: bool = False) -> StreamingQuery:
        """A query that ingests what comes, every so many seconds, from where the folder ends.

        It goes on by its own checkpoint in the folder; what a backfill did meanwhile is passed
        over.
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
                f"entry {self.done} is due, and the query's checkpoint goes on with {first}: the "
                "folder is not whole; ingest into another one",
            )
        self._write(EntryRange(self.done, last + 1))

    # One range.

    def _write(self, wanted: EntryRange) -> None:
        """All tables' rows of a range, in the place of what there is of it already."""
        self._ranges.begin(wanted)
        self._clear(wanted)
        self._save(self._by_day(self._read("blocks", wanted)), "blocks", wanted, by_day=True)
        self._save(self._transactions(wanted), "transactions", wanted, by_day=True)
        for table in ("batches", "batch_ends"):
            self._save(self._read(table, wanted), table, wanted)
        self._ranges.finish(wanted)

    def _clear(self, wanted: EntryRange) -> None:
        """Remove what was written of a range: other entries may stand in the stream there now,
        of other days."""
        for table in TABLES:
            for pattern in (f"range={wanted.name}", f"day=*/range={wanted.name}"):
                for left in (self._out / table).glob(pattern):
                    try:
                        shutil.rmtree(left)
                    except OSError as error:
                        what = f"cannot be removed: {error.strerror}"
                        raise StreamFileError(str(left), what) from None

    def _read(self, table: str, wanted: EntryRange, start: int | None = None) -> DataFrame:
        return (
            self._spark.read.format("datastream")
            .options(**self._source)
            .option("table", table)
            .option("startingOffset", wanted.start if start is None else start)
            .option("endingOffset", wanted.stop)
            .load()
        )

    def _by_day(self, blocks: DataFrame) -> DataFrame:
        """Blocks with their days in UTC; null for a time that is in no year from 1 to 9999."""
        day = f.date_from_unix_date(f.floor(f.col("timestamp") / 86400).cast("int"))
        return blocks.withColumn("day", f.when(f.col("timestamp").between(*_DATES), day))

    def _transactions(self, wanted: EntryRange) -> DataFrame:
        """Transactions, opened, with the day and time of their blocks; null where there is no
        such block."""
        rows = self._read("transactions", wanted)
        first = rows.agg(f.min_by("l2block_number", "entry_number")).first()
        # A plain UDF: nearly all of its time is the opening, and Arrow's want pandas.
        opened = rows.withColumn("opened", f.udf(_opened, _OPENED, useArrow=False)("encoded"))
        opened = opened.select(*rows.columns, "opened.*").drop("encoded")
        start = wanted.start
        if first is not None and first[0] is not None:
            # The first one's block may stand before the range.
            start = min(start, self._ranges.entry_of_block(first[0], start))
        blocks = self._by_day(self._read("blocks", wanted, start)).select(
            "number", "entry_number", "timestamp", "day"
        )
        # A number may stand there twice: a block has the transactions up to the next of its number,
        # and the first one those before it, too.
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

    def _save(
        self, rows: DataFrame, table: str, wanted: EntryRange, *, by_day: bool = False
    ) -> None:
        columns = ["day", "range"] if by_day else ["range"]
        rows = rows.withColumn("range", f.lit(wanted.name))
        # Of a table without a row there is no file that tells its columns.
        (self._ranges.folder / f"{table}.json").write_text(rows.schema.json())
        (
            rows.write.mode("overwrite")
            .option("partitionOverwriteMode", "dynamic")
            .partitionBy(*columns)
            .parquet(str(self._out / table))
        )

    def close(self) -> None:
        """Let go of the stream and of the folder."""
        self._ranges.close()


def ensure_openable() -> None:
    """Raise `ExtraMissing` where the packages are not there that open transactions."""
    if any(importlib.util.find_spec(name) is None for name in ("rlp", "coincurve", "sha3")):
        raise ExtraMissing("opening transactions needs packages that are not installed", "zkevm")


def _opened(encoded: bytes | None) -> dict[str, Any]:
    """A transaction's fields that tables are asked for, and its sender; or why it is none."""
    from datastreamer.zkevm.transactions import open_transaction

    try:
        opened = open_transaction(bytes(encoded or b""))
    except DecodeFailed as error:
        return {"open_error": error.reason}
    price = opened.max_fee_per_gas if opened.gas_price is None else opened.gas_price
    return {
        "kind": opened.type,
        "nonce": _signed(opened.nonce),
        "gas": _signed(opened.gas),
        "gas_price": _signed(price),
        "value": str(opened.value),
        "to": opened.to,
        "hash": opened.hash,
        "sender": opened.sender,
    }


def _signed(number: int | None) -> int | None:
    """A number as tables have it; null where 63 bits do not hold it."""
    return number if number is not None and number <= _MOST else None
