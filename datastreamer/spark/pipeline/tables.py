"""The files of the ingested tables: written by ranges, copied, and opened, as Parquet or Delta.

Owns the layout of a table's folder, its columns, and those that `open_tables` adds for people.
Must not know streams.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, Literal, TypeAlias

import pyarrow as pa
import pyarrow.parquet as pq
from pyspark import SparkContext
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f
from pyspark.sql.pandas.types import from_arrow_schema, to_arrow_schema
from pyspark.sql.types import BinaryType, DateType, LongType, StringType, StructField, StructType

from datastreamer.arrow.opened import OPENED
from datastreamer.errors import UsageError
from datastreamer.spark.options import Options
from datastreamer.spark.pipeline.folder import TableFolder, escaped
from datastreamer.spark.read.schemas import table_schema

Format: TypeAlias = Literal["parquet", "delta"]

TABLES: Final = ("blocks", "transactions", "batches", "batch_ends", "ger_updates")
"""The tables in the folder. Those whose rows have a `timestamp` are partitioned by day."""

_COPYING: Final = {
    # Files of about two thirds of this, which is counted before Parquet's encoding.
    "spark.sql.adaptive.advisoryPartitionSizeInBytes": str(192 << 20),
    "spark.sql.adaptive.coalescePartitions.parallelismFirst": "false",
    "spark.sql.adaptive.enabled": "true",
}
"""Settings of Spark while ranges are copied."""

# The first and the last second of the years 1 to 9999, the range of Python dates.
_DATES: Final = (-62_135_596_800, 253_402_300_799)
# Amounts of 256 bits, which are text or exceed BIGINT in sums.
_AMOUNTS: Final = ("value", "gas_price", "max_priority_fee_per_gas", "max_fee_per_gas")
# The folder of the file without rows, from which other programs learn a table's columns.
_EMPTY: Final = "none"
_NO_DAY: Final = "day=__HIVE_DEFAULT_PARTITION__/"


def columns_of(options: Options) -> dict[str, StructType]:
    """The columns of all tables, of a stream that is read with these options."""
    found = {}
    for table in TABLES:
        own = table_schema(replace(options, table=table), system_id=False)
        fields = [field for field in own if field.name != "encoded"]
        if table == "transactions":
            fields += from_arrow_schema(OPENED).fields
            fields += [StructField(name, LongType()) for name in ("block_entry", "timestamp")]
        if any(field.name == "timestamp" for field in fields):
            fields.append(StructField("day", DateType()))
        found[table] = StructType([*fields, StructField("range", StringType())])
    return found


class ParquetTables:
    """The tables in one folder, whose rows have the column `range`, the name of their range.

    Each range has folders `day=…/range=…`, so that it can be removed.
    """

    def __init__(
        self, spark: SparkSession, folder: TableFolder, columns: Mapping[str, StructType]
    ) -> None:
        self._spark = spark
        self._folder = folder
        self._columns = columns

    def save(self, rows: DataFrame, table: str, name: str) -> None:
        """Write the rows of a range, of which there is nothing yet."""
        schema = self._columns[table]
        by = [column for column in ("day", "range") if column in schema.names]
        empty = f"{table}/{_NO_DAY if by[1:] else ''}range={_EMPTY}"
        if not self._folder.names(empty):
            own = StructType([field for field in schema if field.name not in by])
            sink = pa.BufferOutputStream()
            pq.write_table(to_arrow_schema(own).empty_table(), sink)
            self._folder.put(f"{empty}/columns.parquet", sink.getvalue().to_pybytes())
        (
            rows.withColumn("range", f.lit(name))
            .select(schema.names)
            .write.mode("append")
            .option("compression", "zstd")
            .partitionBy(*by)
            .parquet(f"{self._folder.url}/{table}")
        )

    def clear(self, names: Sequence[str]) -> None:
        """Remove what there is of these ranges."""
        for table in TABLES:
            for name in names:
                self._folder.remove(f"{table}/range={name}")
                self._folder.remove(f"{table}/day=*/range={name}")

    def read(self, table: str, names: Sequence[str]) -> DataFrame:
        """The rows of these ranges."""
        schema = self._columns[table]
        days = "day=*/" if "day" in schema.names else ""
        root = f"{self._folder.url}/{table}"
        wanted = f"{escaped(root)}/{days}range={{{','.join([_EMPTY, *names])}}}"
        return self._spark.read.schema(schema).option("basePath", root).parquet(wanted)


class DeltaTables(ParquetTables):
    """Delta tables: a range is one commit of each table.

    The session needs Delta's package and its two settings.
    """

    def save(self, rows: DataFrame, table: str, name: str) -> None:
        schema = self._columns[table]
        (
            rows.withColumn("range", f.lit(name))
            .select(schema.names)
            .write.format("delta")
            .mode("append")
            .partitionBy(*(["day"] if "day" in schema.names else []))
            .save(f"{self._folder.url}/{table}")
        )

    def clear(self, names: Sequence[str]) -> None:
        texts = ", ".join(f"'{name}'" for name in names)
        for table in TABLES:
            if names and self._folder.names(f"{table}/_delta_log"):
                path = f"delta.`{self._folder.url}/{table}`"
                self._spark.sql(f"delete from {path} where range in ({texts})")  # noqa: S608

    def read(self, table: str, names: Sequence[str]) -> DataFrame:
        found = self._spark.read.format("delta").load(f"{self._folder.url}/{table}")
        return found.where(found["range"].isin(list(names)))


def tables_in(
    spark: SparkSession, folder: TableFolder, format: Format, columns: Mapping[str, StructType]
) -> ParquetTables:
    """The tables of a folder, in the format that it has. Raises `UsageError` if Spark lacks it."""
    if format == "parquet":
        return ParquetTables(spark, folder, columns)
    jvm: Any = SparkContext._jvm
    if not jvm.org.apache.spark.util.Utils.classIsLoadable("io.delta.tables.DeltaTable"):
        raise UsageError(
            "Delta tables need Delta's package, which Spark does not have: export "
            "PYSPARK_SUBMIT_ARGS='--packages io.delta:delta-spark_SPARK_2.13:VERSION pyspark-shell'"
        )
    return DeltaTables(spark, folder, columns)


def copy(tables: ParquetTables, names: Sequence[str], stop: int, name: str) -> None:
    """Write the rows of these ranges before entry `stop` again, as those of the range `name`, in
    the order of entries and in few files."""
    for table in TABLES:
        rows = tables.read(table, names)
        kept = rows.where(rows["entry_number"] < stop).repartitionByRange("entry_number")
        # In the order that partitions of the table need, so that Spark does not sort again.
        by = [column for column in ("day", "entry_number") if column in rows.columns]
        conf = rows.sparkSession.conf
        before = {setting: conf.get(setting) or "" for setting in _COPYING}
        try:
            for setting, value in _COPYING.items():
                conf.set(setting, value)
            tables.save(kept.sortWithinPartitions(*by), table, name)
        finally:
            for setting, known in before.items():
                conf.set(setting, known)


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
