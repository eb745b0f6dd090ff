"""The tables as Spark schemas, and the columns that a query selects.

Owns the columns beyond those of the Arrow tables: ``system_id`` if rows may be of several streams,
``error`` if bad entries become rows (mode PERMISSIVE), and those that say where in a file a row's
entry is, which only a query that names them has.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

from pyspark.sql.pandas.types import from_arrow_schema, to_arrow_schema
from pyspark.sql.types import LongType, StringType, StructField, StructType

from datastreamer.arrow.tables import ENTRIES, ERROR, schema
from datastreamer.errors import UsageError
from datastreamer.spark.options import Options

SYSTEM_ID: Final = "system_id"
FILE: Final = "_file"
PAGE: Final = "_page"
OFFSET: Final = "_offset"

_PLACE: Final = (
    StructField(FILE, StringType()),
    StructField(PAGE, LongType()),
    StructField(OFFSET, LongType()),
)


class Columns(NamedTuple):
    """A query's columns: their Arrow schema, and the names of those that the table itself has."""

    schema: Any
    own: tuple[str, ...]


def number_column(table: str) -> str:
    """The column that holds the number of a row's entry."""
    return "number" if table == ENTRIES else "entry_number"


def table_schema(options: Options, *, system_id: bool) -> StructType:
    """All columns of the query's table.

    In mode PERMISSIVE every column except the entry number is nullable, and an error column is
    added.
    """
    permissive = options.mode == "PERMISSIVE"
    number = number_column(options.table)
    fields = [
        StructField(
            field.name,
            field.dataType,
            field.nullable or (permissive and field.name != number),
        )
        for field in from_arrow_schema(schema(options.table))
    ]
    if system_id:
        fields.append(StructField(SYSTEM_ID, LongType(), False))
    if permissive:
        fields.append(StructField(ERROR, StringType(), True))
    return StructType(fields)


def wanted_columns(options: Options, wanted: StructType) -> Columns:
    """The columns of a query's schema, which may leave out columns of the table.

    Raises `UsageError` for an unknown column or a column of another type.
    """
    full = {field.name: field for field in table_schema(options, system_id=True)}
    if options.paths:
        full |= {field.name: field for field in _PLACE}
    own = []
    for field in wanted:
        column = full.get(field.name)
        if column is None:
            if field.name == ERROR:
                raise UsageError("the column error exists only in mode PERMISSIVE")
            raise UsageError(
                f"the table {options.table} has no column {field.name!r}: its columns are "
                f"{', '.join(full)}"
            )
        if column.dataType != field.dataType:
            raise UsageError(
                f"the column {field.name} is {column.dataType.simpleString()}, not "
                f"{field.dataType.simpleString()}: read it as that type and cast it later"
            )
        if column.nullable and not field.nullable:
            raise UsageError(f"the column {field.name} may be null: leave NOT NULL out")
        if field.name not in (SYSTEM_ID, ERROR, FILE, PAGE, OFFSET):
            own.append(field.name)
    if not wanted.fields:
        raise UsageError("the schema has no column: name at least one")
    # Spark requires the nullability of its own schema in the batches.
    return Columns(to_arrow_schema(wanted), tuple(own))
