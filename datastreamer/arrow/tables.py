"""The tables of a stream: which entries are their rows, and their columns.

A row is one entry, and the entry number is the first column, so any range of entries can be
converted alone. The columns of zkEVM tables are the fields of the messages (`zkevm.schema`), then
those that only version 1 has; fields that a version lacks are null. Unsigned numbers become
signed ones, as Spark and SQL need: those of 32 and 64 bits become int64, except that those that
chains fill become decimals, as amounts do.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import pyarrow as pa

from datastreamer.arrow.opened import OPENED
from datastreamer.errors import UsageError
from datastreamer.zkevm import fixed
from datastreamer.zkevm.schema import (
    BOOL,
    BYTES,
    DEBUG,
    ENUM,
    FIRST_PROTOBUF_VERSION,
    FULL_U64,
    MESSAGES,
    TYPE_BATCH_END,
    TYPE_BATCH_START,
    TYPE_BOOK_MARK,
    TYPE_L2_BLOCK,
    TYPE_L2_BLOCK_END,
    TYPE_TRANSACTION,
    TYPE_UPDATE_GER,
    U32,
    U64,
    WEI,
)

ENTRIES: Final = "entries"
TRANSACTIONS: Final = "transactions"
ERROR: Final = "error"
"""The column with the reason why a row's fields are null, with ``on_error="null"``."""

# The kind of the whole data of an entry, beside the kinds of the schema.
_DATA: Final = 9

_ARROW: Final = {
    U64: pa.int64(),
    U32: pa.int64(),
    BOOL: pa.bool_(),
    ENUM: pa.int32(),
    FULL_U64: pa.decimal128(20),
    WEI: pa.decimal128(38),
    BYTES: pa.binary(),
    DEBUG: pa.string(),
    _DATA: pa.binary(),
}


@dataclass(frozen=True)
class Table:
    """A table of zkEVM events.

    `type` is the entry type from version 2 on, `fixed_type` that of version 1 (None: it has no
    such event). `renamed` maps columns to their names in version 1, if these differ.
    """

    name: str
    type: int
    fixed_type: int | None
    columns: tuple[tuple[str, int], ...]
    message_columns: int
    renamed: Mapping[str, str] = field(default_factory=dict)

    def entry_type(self, version: int) -> int | None:
        """The type of the entries that are its rows in streams of this version."""
        return self.type if version >= FIRST_PROTOBUF_VERSION else self.fixed_type

    @property
    def data_column(self) -> str | None:
        """The column with the whole data of an entry; None if there is none."""
        return next((name for name, kind in self.columns if kind == _DATA), None)

    @property
    def message_names(self) -> tuple[str, ...]:
        """The columns that messages have, then the column of the whole data."""
        names = [name for name, _ in self.columns[: self.message_columns]]
        return tuple(names if self.data_column is None else [*names, self.data_column])

    @property
    def kinds(self) -> bytes:
        """The kinds of `message_names`, for the compiled decoder."""
        kinds = dict(self.columns)
        return bytes(kinds[name] for name in self.message_names)


def _table(
    name: str,
    type: int,
    fixed_type: int | None,
    *more: tuple[str, int],
    renamed: Mapping[str, str] | None = None,
) -> Table:
    fields = tuple((field.name, field.kind) for field in MESSAGES[type].fields)
    return Table(name, type, fixed_type, fields + more, len(fields), renamed or {})


TABLES: Final[dict[str, Table]] = {
    table.name: table
    for table in (
        _table(
            "blocks",
            TYPE_L2_BLOCK,
            fixed.TYPE_START_L2_BLOCK,
            ("fork_id", U64),
            ("chain_id", U64),
            ("l1_info_root", BYTES),
        ),
        _table(
            "block_ends",
            TYPE_L2_BLOCK_END,
            fixed.TYPE_END_L2_BLOCK,
            ("hash", BYTES),
            ("state_root", BYTES),
        ),
        _table(
            TRANSACTIONS,
            TYPE_TRANSACTION,
            fixed.TYPE_L2_TX,
            renamed={"im_state_root": "state_root"},
        ),
        _table("batches", TYPE_BATCH_START, None),
        _table("batch_ends", TYPE_BATCH_END, None),
        _table("ger_updates", TYPE_UPDATE_GER, fixed.TYPE_UPDATE_GER),
        _table("bookmarks", TYPE_BOOK_MARK, TYPE_BOOK_MARK, ("key", _DATA)),
    )
}
NAMES: Final = (ENTRIES, *TABLES)
"""The names of all tables."""

_ENTRIES_SCHEMA: Final = pa.schema(
    [
        pa.field("number", pa.int64(), nullable=False),
        pa.field("type", pa.int64(), nullable=False),
        pa.field("data", pa.binary(), nullable=False),
    ]
)


def _full_schema(name: str) -> Any:
    if name == ENTRIES:
        return _ENTRIES_SCHEMA
    table = TABLES.get(name)
    if table is None:
        raise UsageError(f"there is no table {name!r}: the tables are {', '.join(NAMES)}")
    return pa.schema(
        [
            pa.field("entry_number", pa.int64(), nullable=False),
            *(
                pa.field(column, _ARROW[kind], nullable=kind != _DATA)
                for column, kind in table.columns
            ),
        ]
    )


def schema(
    table: str = ENTRIES, columns: Sequence[str] | None = None, *, error: bool = False
) -> Any:
    """The `pyarrow.Schema` of a table, or of these columns of it in this order.

    Transactions have the columns of opened ones only if these are named. With `error`, tables of
    events end with the column that ``on_error="null"`` adds. Raises `UsageError` for an unknown
    table or column.
    """
    full = _full_schema(table)
    if error and table != ENTRIES:
        full = full.append(pa.field(ERROR, pa.string()))
    if columns is None:
        return full
    if table == TRANSACTIONS:
        full = pa.schema([*full, *OPENED])
    unknown = [column for column in columns if column not in full.names]
    if unknown or len(set(columns)) != len(columns):
        what = f"has no column {unknown[0]!r}" if unknown else "is asked for the same column twice"
        raise UsageError(f"the table {table} {what}: its columns are {', '.join(full.names)}")
    return pa.schema([full.field(column) for column in columns])
