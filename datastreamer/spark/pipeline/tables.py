"""The files of the ingested tables: written by ranges, compacted, and opened, as Parquet or Delta.

Owns the layout of a table's folder, and the columns that `open_tables` adds for people. Must not
know streams.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Final, Literal, Protocol, TypeAlias

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f
from pyspark.sql.types import BinaryType, StructType

from datastreamer.errors import StreamFileError, UsageError

Format: TypeAlias = Literal["parquet", "delta"]

TABLES: Final = ("blocks", "transactions", "batches", "batch_ends", "ger_updates")
"""The tables in the folder. Those whose rows have a `timestamp` are partitioned by day."""

# The first and the last second of the years 1 to 9999, the range of Python dates.
_DATES: Final = (-62_135_596_800, 253_402_300_799)
# Amounts of 256 bits, which are text or exceed BIGINT in sums.
_AMOUNTS: Final = ("value", "gas_price", "max_priority_fee_per_gas", "max_fee_per_gas")


class Tables(Protocol):
    """The tables in one folder. Rows have the column `range`, the name of their range."""

    def save(self, rows: DataFrame, table: str, name: str) -> None:
        """Write the rows of a range, in the place of what there is of it."""

    def clear(self, name: str) -> None:
        """Remove what there is of a range."""

    def read(self, table: str) -> DataFrame:
        """All rows of a table."""

    def compact(self, names: list[str], name: str) -> None:
        """Write the rows of these ranges again, as those of range `name`, in fewer files."""


class ParquetTables:
    """A folder `day=…/range=…` for each range, so that it can be removed and written again."""

    def __init__(self, spark: SparkSession, out: Path) -> None:
        self._spark = spark
        self._out = out

    def save(self, rows: DataFrame, table: str, name: str) -> None:
        rows = rows.withColumn("range", f.lit(name))
        # Without rows, no Parquet file records the columns.
        (self._out / "_ranges" / f"{table}.json").write_text(rows.schema.json())
        (
            rows.write.mode("overwrite")
            .option("partitionOverwriteMode", "dynamic")
            .partitionBy(*(column for column in ("day", "range") if column in rows.columns))
            .parquet(str(self._out / table))
        )

    def clear(self, name: str) -> None:
        for table in TABLES:
            for pattern in (f"range={name}", f"day=*/range={name}"):
                for left in (self._out / table).glob(pattern):
                    try:
                        shutil.rmtree(left)
                    except OSError as error:
                        what = f"cannot be removed: {error.strerror}"
                        raise StreamFileError(str(left), what) from None

    def read(self, table: str) -> DataFrame:
        text = (self._out / "_ranges" / f"{table}.json").read_text()
        schema = StructType.fromJson(json.loads(text))
        return self._spark.read.schema(schema).parquet(str(self._out / table))

    def compact(self, names: list[str], name: str) -> None:
        self.clear(name)
        for table in TABLES:
            rows = self.read(table).where(f.col("range").isin(names))
            # One file for each day.
            key = f.col("day") if "day" in rows.columns else f.lit(0)
            self.save(rows.drop("range").repartition(key), table, name)


class DeltaTables:
    """Delta tables: a range replaces itself in one commit of each table.

    The session needs Delta's package and its two settings.
    """

    def __init__(self, spark: SparkSession, out: Path) -> None:
        self._spark = spark
        self._out = out

    def save(self, rows: DataFrame, table: str, name: str) -> None:
        (
            rows.withColumn("range", f.lit(name))
            .write.format("delta")
            .mode("overwrite")
            .option("replaceWhere", f"range = '{name}'")
            .partitionBy(*(["day"] if "day" in rows.columns else []))
            .save(str(self._out / table))
        )

    def clear(self, name: str) -> None:
        for table in TABLES:
            if (self._out / table).exists():
                self.save(self.read(table).where("false").drop("range"), table, name)

    def read(self, table: str) -> DataFrame:
        return self._spark.read.format("delta").load(str(self._out / table))

    def compact(self, names: list[str], name: str) -> None:
        """Delta's own compaction: ranges keep their names."""
        for table in TABLES:
            self._spark.sql(f"optimize delta.`{self._out / table}`")


def tables_in(spark: SparkSession, out: Path, wanted: Format | None = None) -> Tables:
    """The tables of a folder, in the format that it has; `wanted` for a new folder.

    Raises `UsageError` if it has another format than the wanted one.
    """
    found: Format | None = None
    if any((out / table / "_delta_log").exists() for table in TABLES):
        found = "delta"
    elif any((out / table).exists() for table in TABLES):
        found = "parquet"
    if found is not None and wanted not in (None, found):
        raise UsageError(f"{out}: its tables are {found}, not {wanted}: use another folder")
    return (DeltaTables if (found or wanted) == "delta" else ParquetTables)(spark, out)


def with_day(rows: DataFrame) -> DataFrame:
    """The rows with the day of their `timestamp` in UTC; null outside the years 1 to 9999."""
    day = f.date_from_unix_date(f.floor(f.col("timestamp") / 86400).cast("int"))
    return rows.withColumn("day", f.when(f.col("timestamp").between(*_DATES), day))


def readable(rows: DataFrame) -> DataFrame:
    """The rows with columns for people beside the raw ones: `time` as TIMESTAMP, `NAME_hex` as
    ``0x`` text, `NAME_wei` as DECIMAL(38,0), null if an amount has more digits."""
    more = {
        f"{field.name}_hex": f.concat(f.lit("0x"), f.lower(f.hex(field.name)))
        for field in rows.schema
        if isinstance(field.dataType, BinaryType)
    }
    more |= {
        f"{name}_wei": f.col(name).try_cast("decimal(38,0)")
        for name in _AMOUNTS
        if name in rows.columns
    }
    if "timestamp" in rows.columns:
        seconds = f.when(f.col("timestamp").between(*_DATES), f.col("timestamp"))
        more["time"] = f.timestamp_seconds(seconds)
    return rows.withColumns(more)
