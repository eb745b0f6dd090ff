"""A sequencer's stream as typed tables in Parquet: what there is now, and what comes.

Owns a folder with the tables and the record of which entries are in it, range after range: a
range is there whole, or it is written again. Backfill and live tail write the same ranges, so
the one goes on where the other ended. Reading is `batch`'s and `streaming`'s.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f
from pyspark.sql.streaming.query import StreamingQuery

from datastreamer.errors import DecodeFailed, ExtraMissing, StreamFileError, UsageError
from datastreamer.position import Identity
from datastreamer.spark.offsets import StreamOffset
from datastreamer.spark.options import read_options
from datastreamer.spark.upstreams import Upstream, upstream_of

TABLES: Final = ("blocks", "transactions", "batches", "batch_ends")
"""What there is in the folder; blocks and transactions by day."""

CHUNK: Final = 5_000_000
"""So many entries of a backfill are one range."""

_FIRST_VERSION: Final = 2
_RANGE: Final = re.compile(r"(\d{20})-(\d{20})")
_MOST: Final = (1 << 63) - 1
_OPENED: Final = (
    "kind int, nonce long, gas long, gas_price long, value string, to binary, hash binary, "
    "sender binary, open_error string"
)


class Range(NamedTuple):
    """Entries, from `start` up to, not including, `stop`."""

    start: int
    stop: int

    @property
    def name(self) -> str:
        """As folders and records are named by it: names sort by numbers."""
        return f"{self.start:020d}-{self.stop:020d}"


class Ingest:
    """One stream's tables in the folder `out`, which every executor has to see.

    `source` is how the stream is found: the options of `spark.read`, ``{"path": ...}`` or
    ``{"server": ...}``. One process writes to a folder at a time. Raises `UsageError` for a
    stream of version 1, `ExtraMissing` where transactions cannot be opened, and
    `StreamFileError` where the folder is another stream's or the stream was cut back.
    """

    def __init__(
        self, spark: SparkSession, source: Mapping[str, str], out: str | os.PathLike[str]
    ) -> None:
        if any(importlib.util.find_spec(name) is None for name in ("rlp", "coincurve", "sha3")):
            raise ExtraMissing(
                "opening transactions needs packages that are not installed", "zkevm"
            )
        self._spark = spark
        self._source = dict(source)
        self._out = Path(out).absolute()
        self._records = self._out / "_ranges"
        self._records.mkdir(parents=True, exist_ok=True)
        self._upstream: Upstream = upstream_of(read_options(self._source))
        self.done = self._ensure_same()
        for begun in self._recorded("begun"):
            # A crash cut it off. What there is of it is written over.
            self._write(begun)

    # What is there.

    def _recorded(self, state: str) -> list[Range]:
        """The ranges of a state, in order."""
        found = []
        for path in sorted(self._records.glob(f"*.{state}")):
            numbers = _RANGE.fullmatch(path.stem)
            if numbers is not None:
                found.append(Range(int(numbers[1]), int(numbers[2])))
        return found

    def _ensure_same(self) -> int:
        """The entry that is due; all before it are in the tables, each once, and still the
        stream's."""
        due = 0
        for there in self._recorded("done"):
            if there.start != due:
                raise StreamFileError(
                    str(self._records),
                    f"entry {due} is due, and the range {there.name} begins with {there.start}: "
                    "the folder is not whole; ingest into another one",
                )
            due = there.stop
            last = there
        header = self._upstream.look()
        if header.version < _FIRST_VERSION:
            raise UsageError(
                "this is a stream of version 1, whose transactions do not say in which block they "
                "are: the pipeline is for streams from version 2 on"
            )
        if due:
            told = StreamOffset.read(json.loads(self._record(last, "done").read_text()))
            same = header.total_entries >= due and told.stream == Identity.of(header)
            if not same or self._upstream.digest_before(due) != told.digest:
                raise self._upstream.changed(
                    f"the {due} entries in {self._out} are not this stream's any more: ingest into "
                    "another folder",
                    due,
                )
        return due

    def _record(self, of: Range, state: str) -> Path:
        return self._records / f"{of.name}.{state}"

    # Historic and live.

    def backfill(self, chunk: int = CHUNK) -> int:
        """Ingest all that is committed now; gives the number of entries."""
        before = self.done
        total = self._upstream.look().total_entries
        while self.done < total:
            self._write(Range(self.done, min(total, self.done + chunk)))
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
        self._write(Range(self.done, last + 1))

    # One range.

    def _write(self, wanted: Range) -> None:
        """All tables' rows of a range. Again, where it was begun before: it is written over."""
        begun = self._record(wanted, "begun")
        begun.touch()
        self._save(self._by_day(self._read("blocks", wanted)), "blocks", wanted, by_day=True)
        self._save(self._transactions(wanted), "transactions", wanted, by_day=True)
        for table in ("batches", "batch_ends"):
            self._save(self._read(table, wanted), table, wanted)
        header = self._upstream.look()
        digest = self._upstream.digest_before(wanted.stop)
        offset = StreamOffset(wanted.stop, digest, Identity.of(header))
        begun.write_text(json.dumps(offset.told()))
        begun.rename(self._record(wanted, "done"))
        self.done = wanted.stop

    def _read(self, table: str, wanted: Range, start: str | None = None) -> DataFrame:
        return (
            self._spark.read.format("datastream")
            .options(**self._source)
            .option("table", table)
            .option("startingOffset", start or str(wanted.start))
            .option("endingOffset", str(wanted.stop))
            .load()
        )

    def _by_day(self, blocks: DataFrame) -> DataFrame:
        return blocks.withColumn("day", f.to_date(f.timestamp_seconds("timestamp")))

    def _transactions(self, wanted: Range) -> DataFrame:
        """Transactions, opened, with the day and time of their blocks."""
        rows = self._read("transactions", wanted)
        first = rows.agg(f.min("l2block_number")).first()
        # A plain UDF: nearly all of its time is the opening, and Arrow's want pandas.
        opened = rows.withColumn("opened", f.udf(_opened, _OPENED, useArrow=False)("encoded"))
        opened = opened.select(*rows.columns, "opened.*").drop("encoded")
        # The first one's block may stand before the range.
        start = None if first is None or first[0] is None else f"block:{first[0]}"
        blocks = self._by_day(self._read("blocks", wanted, start)).select(
            f.col("number").alias("l2block_number"), "timestamp", "day"
        )
        return opened.join(blocks, "l2block_number", "left")

    def _save(self, rows: DataFrame, table: str, wanted: Range, *, by_day: bool = False) -> None:
        columns = ["day", "range"] if by_day else ["range"]
        rows = rows.withColumn("range", f.lit(wanted.name))
        # Of a table without a row there is no file that tells its columns.
        (self._records / f"{table}.json").write_text(rows.schema.json())
        (
            rows.write.mode("overwrite")
            .option("partitionOverwriteMode", "dynamic")
            .partitionBy(*columns)
            .parquet(str(self._out / table))
        )

    def close(self) -> None:
        """Let go of the stream."""
        self._upstream.close()


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
