"""Ingests a sequencer's stream into typed Parquet tables: a backfill, then a live tail.

Owns a folder with the tables. A range of entries is either complete or written again. Backfill and
live tail write the same kind of ranges, so each continues where the other ended.
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
"""The tables in the folder. Blocks and transactions are partitioned by day."""

CHUNK: Final = 5_000_000
"""Entries per range of a backfill."""

_MOST: Final = (1 << 63) - 1
# The first and the last second of the years 1 to 9999, the range of Python dates.
_DATES: Final = (-62_135_596_800, 253_402_300_799)
_DECODED: Final = (
    "kind int, nonce long, gas long, gas_price long, value string, to binary, hash binary, "
    "sender binary, open_error string"
)


class Ingest:
    """The tables of one stream in the folder `out`, which all executors must share.

    `source` names the stream with options of `spark.read`: ``{"path": ...}`` or
    ``{"server": ...}``. The folder is locked until `close`. Raises what `Manifest` raises, and
    `ExtraMissing` without the packages that decode transactions.
    """

    def __init__(
        self, spark: SparkSession, source: Mapping[str, str], out: str | os.PathLike[str]
    ) -> None:
        ensure_openable()
        self._spark = spark
        self._source = dict(source)
        self._out = Path(out).absolute()
        self._manifest = Manifest(self._source, out)
        try:
            for begun in self._manifest.begun():
                # A crash interrupted this range.
                if begun.stop <= self._manifest.total():
                    self._write(begun)
                else:
                    self._clear(begun)
                    self._manifest.forget(begun)
        except BaseException:
            self.close()
            raise

    @property
    def done(self) -> int:
        """The next entry to ingest: all entries before it are in the tables."""
        return self._manifest.done

    def backfill(self, chunk: int = CHUNK) -> int:
        """Ingest everything that is committed now; returns the number of entries."""
        before = self.done
        total = self._manifest.total()
        while self.done < total:
            self._write(EntryRange(self.done, min(total, self.done + chunk)))
        return self.done - before

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
        self._clear(wanted)
        self._save(self._by_day(self._read("blocks", wanted)), "blocks", wanted, by_day=True)
        self._save(self._transactions(wanted), "transactions", wanted, by_day=True)
        for table in ("batches", "batch_ends"):
            self._save(self._read(table, wanted), table, wanted)
        self._manifest.finish(wanted)

    def _clear(self, wanted: EntryRange) -> None:
        """Remove what was written of a range: its entries may have changed since, and the days of
        their blocks."""
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
        """Blocks with their days in UTC; null outside the years 1 to 9999."""
        day = f.date_from_unix_date(f.floor(f.col("timestamp") / 86400).cast("int"))
        return blocks.withColumn("day", f.when(f.col("timestamp").between(*_DATES), day))

    def _transactions(self, wanted: EntryRange) -> DataFrame:
        """Decoded transactions with the day and time of their blocks; null for an unknown
        block."""
        rows = self._read("transactions", wanted)
        first = rows.agg(f.min_by("l2block_number", "entry_number")).first()
        # Not an Arrow UDF, which needs pandas: nearly all of the time is spent decoding.
        opened = rows.withColumn("opened", f.udf(_decoded, _DECODED, useArrow=False)("encoded"))
        opened = opened.select(*rows.columns, "opened.*").drop("encoded")
        start = wanted.start
        if first is not None and first[0] is not None:
            # The block of the first transaction may precede the range.
            start = min(start, self._manifest.entry_of_block(first[0], start))
        blocks = self._by_day(self._read("blocks", wanted, start)).select(
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

    def _save(
        self, rows: DataFrame, table: str, wanted: EntryRange, *, by_day: bool = False
    ) -> None:
        columns = ["day", "range"] if by_day else ["range"]
        rows = rows.withColumn("range", f.lit(wanted.name))
        # Without rows, no Parquet file records the columns.
        (self._manifest.folder / f"{table}.json").write_text(rows.schema.json())
        (
            rows.write.mode("overwrite")
            .option("partitionOverwriteMode", "dynamic")
            .partitionBy(*columns)
            .parquet(str(self._out / table))
        )

    def close(self) -> None:
        """Close the stream and unlock the folder."""
        self._manifest.close()


def ensure_openable() -> None:
    """Raise `ExtraMissing` if a package that decodes transactions is missing."""
    if any(importlib.util.find_spec(name) is None for name in ("rlp", "coincurve", "sha3")):
        raise ExtraMissing("decoding transactions needs packages that are not installed", "zkevm")


def _decoded(encoded: bytes | None) -> dict[str, Any]:
    """The fields of a transaction that the table has, with its sender; or the error."""
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
    """The number, or null if it exceeds a signed 64-bit column."""
    return number if number is not None and number <= _MOST else None
