"""The tables that a stream is read as: which entries are their rows, which columns they have.

The one place that says it. A row is one entry, whatever table it is in, and its number is the
first column, so that a table is made from any range of entries without the others. Columns of
zkEVM tables are the fields of the messages (`zkevm.schema`), under the same names, and behind
them those that only version 1 has; what a generation lacks is null. Numbers are signed, as
Spark and SQL have them: all unsigned ones of 32 and 64 bits become int64.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import pyarrow as pa

from datastreamer.errors import UsageError
from datastreamer.zkevm import fixed
from datastreamer.zkevm.schema import (
    BOOL,
    BYTES,
    DEBUG,
    ENUM,
    FIRST_PROTOBUF_VERSION,
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
)

ENTRIES: Final = "entries"
ERROR: Final = "error"
"""The column that says why the fields of a row are null, with ``on_error="null"``."""

# The whole data of an entry, as the compiled decoder calls it.
_DATA: Final = 7

_ARROW: Final = {
    U64: pa.int64(),
    U32: pa.int64(),
    BOOL: pa.bool_(),
    ENUM: pa.int32(),
    BYTES: pa.binary(),
    DEBUG: pa.string(),
    _DATA: pa.binary(),
}


@dataclass(frozen=True)
class Table:
    """A table of zkEVM events: one event a row.

    `type` is the entries' type from version 2 on, `fixed_type` in version 1 (None: it has no
    such event), `renamed` says what version 1 calls columns that have another name there.
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
        """The column that has an entry's whole data, where one has."""
        return next((name for name, kind in self.columns if kind == _DATA), None)

    @property
    def message_names(self) -> tuple[str, ...]:
        """The columns that messages have, and the one of an entry's whole data."""
        names = [name for name, _ in self.columns[: self.message_columns]]
        return tuple(names if self.data_column is None else [*names, self.data_column])

    @property
    def kinds(self) -> bytes:
        """Their kinds, as the compiled decoder wants them."""
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
            "transactions",
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

    With `error` it ends with the column that ``on_error="null"`` adds to tables of events.
    Raises `UsageError` for a table or column that there is not.
    """
    full = _full_schema(table)
    if error and table != ENTRIES:
        full = full.append(pa.field(ERROR, pa.string()))
    if columns is None:
        return full
    unknown = [column for column in columns if column not in full.names]
    if unknown or len(set(columns)) != len(columns):
        what = f"has no column {unknown[0]!r}" if unknown else "is asked for a column twice"
        raise UsageError(f"the table {table} {what}: its columns are {', '.join(full.names)}")
    return pa.schema([full.field(column) for column in columns])
