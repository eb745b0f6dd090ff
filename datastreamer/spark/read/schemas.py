"""The tables as Spark's types, and a query's own schema as the columns that are made.

Owns which columns there are beyond the Arrow tables' own: ``system_id`` where rows may be of
several streams, ``error`` where bad entries become rows (mode PERMISSIVE). Reads no stream.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import pyarrow as pa
from pyspark.sql.types import (
    BinaryType,
    BooleanType,
    DataType,
    IntegerType,
    LongType,
    StringType,
    StructField,
    StructType,
)

from datastreamer.arrow.tables import ENTRIES, ERROR, schema
from datastreamer.errors import UsageError
from datastreamer.spark.options import Options

SYSTEM_ID: Final = "system_id"

_SPARK_TYPES: Final[dict[Any, DataType]] = {
    pa.int64(): LongType(),
    pa.int32(): IntegerType(),
    pa.bool_(): BooleanType(),
    pa.binary(): BinaryType(),
    pa.string(): StringType(),
}


class Columns(NamedTuple):
    """What a query wants: its schema in Arrow's words, and those columns of the table's own."""

    schema: Any
    own: tuple[str, ...]


def number_column(table: str) -> str:
    """The column that holds the number of a row's entry."""
    return "number" if table == ENTRIES else "entry_number"


def table_schema(options: Options, *, system_id: bool) -> StructType:
    """All columns of the query's table.

    In mode PERMISSIVE all but the entry's number may be null, and the last column says why.
    """
    permissive = options.mode == "PERMISSIVE"
    number = number_column(options.table)
    fields = [
        StructField(
            field.name,
            _SPARK_TYPES[field.type],
            field.nullable or (permissive and field.name != number),
        )
        for field in schema(options.table)
    ]
    if system_id:
        fields.append(StructField(SYSTEM_ID, LongType(), False))
    if permissive:
        fields.append(StructField(ERROR, StringType(), True))
    return StructType(fields)


def wanted_columns(options: Options, wanted: StructType) -> Columns:
    """The columns of the schema that the query reads with, which may leave out what it does
    not need. Raises `UsageError` for a column that there is not, or of another type."""
    full = {field.name: field for field in table_schema(options, system_id=True)}
    fields, own = [], []
    for field in wanted:
        there = full.get(field.name)
        if there is None:
            if field.name == ERROR:
                raise UsageError("the column error is for mode PERMISSIVE")
            raise UsageError(
                f"the table {options.table} has no column {field.name!r}: its columns are "
                f"{', '.join(full)}"
            )
        if there.dataType != field.dataType:
            raise UsageError(
                f"the column {field.name} is {there.dataType.simpleString()}, not "
                f"{field.dataType.simpleString()}: read it as it is, and cast it in a select"
            )
        if there.nullable and not field.nullable:
            raise UsageError(f"the column {field.name} may be null: leave NOT NULL out")
        arrow_type = next(a for a, spark in _SPARK_TYPES.items() if spark == field.dataType)
        # Spark wants the batches to say of nulls what its own schema says.
        fields.append(pa.field(field.name, arrow_type, nullable=field.nullable))
        if field.name not in (SYSTEM_ID, ERROR):
            own.append(field.name)
    if not fields:
        raise UsageError("a schema without a column: ask for one at least")
    return Columns(pa.schema(fields), tuple(own))
