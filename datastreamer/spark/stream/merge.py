"""Applies the batches of a feed of changes to a table that others read: Delta, Iceberg."""

from __future__ import annotations

from collections.abc import Callable

from pyspark.sql import DataFrame, Window
from pyspark.sql import functions as F  # noqa: N812

from datastreamer.errors import UsageError
from datastreamer.spark.stream.changes import CHANGE, DELETE, ENTRY, EPOCH, INSERT


def apply_changes(
    frame: DataFrame,
    batch: int,
    table: str,
    then: Callable[[DataFrame, int], object] | None = None,
) -> None:
    """Apply a batch of a query with the option changes to `table`, in one MERGE by `_entry`; for
    `foreachBatch`. A batch that is repeated has the same result.

    `table` is what SQL calls it, such as ``blocks`` or ``delta.`/data/blocks` ``, and has the
    columns of `frame` without `_change`. `then` is called before with the batch's changes, of
    which deletes have all values: those that the table has. If the batch is repeated after its
    MERGE, these no longer come. Raises `UsageError` if `frame` has no changes.
    """
    missing = {CHANGE, EPOCH, ENTRY} - set(frame.columns)
    if missing:
        raise UsageError(f"the batch lacks {', '.join(sorted(missing))}: set the option changes")
    spark, view = frame.sparkSession, f"_datastream_changes_{batch}"
    columns = [f"`{name}`" for name in frame.columns if name != CHANGE]
    names, values = ", ".join(columns), ", ".join(f"s.{name}" for name in columns)
    updates = ", ".join(f"t.{name} = s.{name}" for name in columns)
    # All steps have the same entries, whatever becomes of the stream meanwhile.
    frame.persist()
    try:
        if then is not None:
            then(with_values(frame, spark.table(table)), batch)
        last_changes(frame).createOrReplaceTempView(view)
        spark.sql(
            f"MERGE INTO {table} AS t USING {view} AS s ON t.{ENTRY} = s.{ENTRY} "  # noqa: S608
            f"WHEN MATCHED AND s.{CHANGE} = '{DELETE}' THEN DELETE "
            f"WHEN MATCHED THEN UPDATE SET {updates} "
            f"WHEN NOT MATCHED AND s.{CHANGE} = '{INSERT}' "
            f"THEN INSERT ({names}) VALUES ({values})"
        )
        spark.catalog.dropTempView(view)
    finally:
        frame.unpersist()


def last_changes(changes: DataFrame) -> DataFrame:
    """Of each entry the insert, or else the delete: a MERGE accepts one row of each."""
    order = F.row_number().over(Window.partitionBy(ENTRY).orderBy(F.desc(CHANGE)))
    return changes.withColumn("_place", order).where("_place = 1").drop("_place")


def with_values(changes: DataFrame, table: DataFrame) -> DataFrame:
    """The changes, whose deletes have the values of the table's rows; those without a row are left
    out. Rows of the deletes' own epoch or a later one were inserted after them."""
    deletes = changes.where(f"{CHANGE} = '{DELETE}'").select(CHANGE, EPOCH, ENTRY).alias("d")
    kept = table.alias("t").join(deletes, ENTRY)
    kept = kept.where(f"coalesce(t.{EPOCH} < d.{EPOCH}, true)").drop(F.col(f"t.{EPOCH}"))
    return kept.unionByName(changes.where(f"{CHANGE} = '{INSERT}'")).select(changes.columns)
