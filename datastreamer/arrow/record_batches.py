"""Converts batches of entries to Arrow record batches.

Owns how the columns of the compiled decoder become Arrow arrays, without another copy, and how an
entry that is not an event is handled.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final, Literal, NamedTuple, get_args

import pyarrow as pa

from datastreamer._codec import EntryBatch
from datastreamer.arrow import _columns
from datastreamer.arrow.fixed_layouts import Layout, fixed_columns
from datastreamer.arrow.opened import OPENED, opened_columns
from datastreamer.arrow.tables import ENTRIES, ERROR, TABLES, TRANSACTIONS, schema
from datastreamer.errors import DecodeFailed, UsageError
from datastreamer.format import U64_MAX
from datastreamer.zkevm.decoding import Event, decode_data
from datastreamer.zkevm.schema import FIRST_PROTOBUF_VERSION, FULL_U64
from datastreamer.zkevm.transactions import load_tools

OnError = Literal["raise", "null", "drop"]
_BAD_ROWS: Final[dict[str, Literal[0, 1, 2]]] = {"raise": 0, "null": 1, "drop": 2}
_MOST: Final = U64_MAX >> 1


class Converted(NamedTuple):
    """The rows of a batch. With on_error "raise", they end before the first entry that is not an
    event, and `error` says why."""

    batch: Any
    error: DecodeFailed | None


class Converter:
    """Makes record batches of one table and schema."""

    def __init__(
        self,
        table: str,
        *,
        version: int | None,
        columns: Sequence[str] | None = None,
        on_error: OnError = "raise",
    ) -> None:
        if on_error not in get_args(OnError):
            raise UsageError(f"on_error is 'raise', 'null' or 'drop', not {on_error!r}")
        self.schema = schema(table, columns, error=on_error == "null")
        self._fields = {field.name: field for field in schema(table)}
        self._names = set(self.schema.names)
        is_opened = table == TRANSACTIONS
        self._opened = [name for name in OPENED.names if is_opened and name in self._names]
        if self._opened:
            load_tools()
            self._names.add("encoded")
        self._on_error = on_error
        self._table = TABLES.get(table)
        if self._table is not None:
            if version is None:
                raise UsageError(
                    f"the table {table} depends on the stream's version: pass version="
                )
            self._version = version
            self._type = self._table.entry_type(version)
            self._layouts: Sequence[Layout] | None = None
            # Columns that this generation lacks stay null.
            if version >= FIRST_PROTOBUF_VERSION:
                self._known = self._table.message_names
                self._kinds = self._table.kinds
            elif self._type is not None:
                self._known, self._kinds, self._layouts = fixed_columns(self._table)

    def convert(self, batch: EntryBatch) -> Converted:
        """The rows of `batch`. Raises `UsageError` for a value that is too large for Arrow."""
        if self._table is None:
            return Converted(self._convert_entries(batch), None)
        if self._type is None:
            return Converted(self._record_batch({}, 0), None)
        return self._convert_events(batch, self._type)

    def _record_batch(self, columns: dict[str, Any], rows: int) -> Any:
        arrays = [
            columns[field.name] if field.name in columns else pa.nulls(rows, field.type)
            for field in self.schema
        ]
        if not arrays:
            raise UsageError("name at least one column")
        return pa.RecordBatch.from_arrays(arrays, schema=self.schema)

    def _convert_entries(self, batch: EntryBatch) -> Any:
        rows = len(batch)
        numbers, types, offsets, values = _columns.entry_columns(
            batch, pa.allocate_buffer, data="data" in self._names
        )
        made = {
            "number": _array(pa.int64(), rows, numbers),
            "type": _array(pa.int64(), rows, types),
        }
        if offsets is not None:
            made["data"] = _array(pa.binary(), rows, offsets, values)
        return self._record_batch(made, rows)

    def _convert_events(self, batch: EntryBatch, type: int) -> Converted:
        wanted = bytes(name in self._names for name in self._known)
        rows, numbers, parts, valid, bad = _columns.event_columns(
            *(batch, type, self._kinds, wanted, _BAD_ROWS[self._on_error], pa.allocate_buffer),
            self._layouts,
        )
        made = {"entry_number": _array(pa.int64(), rows, numbers)}
        shared = None if valid is None else pa.py_buffer(valid)
        for name, part in zip(self._known, parts, strict=True):
            if part is None:
                continue
            buffers, own = part
            field = self._fields[name]
            validity = shared if own is None else pa.py_buffer(own)
            made[name] = pa.Array.from_buffers(
                field.type,
                rows,
                [validity if field.nullable else None, *map(pa.py_buffer, buffers)],
            )
        if self._opened:
            made |= opened_columns(made["encoded"], self._opened)
        errors = [(row, self._decode_error(batch, place, type)) for row, place in bad]
        if ERROR in self._names:
            made[ERROR] = _error_column(rows, errors)
        stops = self._on_error == "raise" and errors
        return Converted(self._record_batch(made, rows), errors[0][1] if stops else None)

    def _decode_error(self, batch: EntryBatch, place: int, type: int) -> DecodeFailed:
        """Why the entry at index `place` of a batch is no row."""
        number = batch.numbers[place]
        try:
            event = decode_data(
                type, bytes(batch.data(place)), version=self._version, number=number
            )
        except DecodeFailed as error:
            return error
        return _too_large(event, number, dict(self._table.columns) if self._table else {})


def _array(type: Any, rows: int, *buffers: Any) -> Any:
    """An array without nulls."""
    return pa.Array.from_buffers(type, rows, [None, *map(pa.py_buffer, buffers)])


def _error_column(rows: int, errors: list[tuple[int, DecodeFailed]]) -> Any:
    if not errors:
        return pa.nulls(rows, pa.string())
    texts: list[str | None] = [None] * rows
    for row, error in errors:
        texts[row] = str(error)
    return pa.array(texts, pa.string())


def _too_large(event: Event, number: int, kinds: dict[str, int]) -> DecodeFailed:
    for name, value in event._asdict().items():
        if type(value) is int and value > _MOST and kinds.get(name) != FULL_U64:
            what = f"{name} is {value}, above {_MOST}, the maximum of a signed column"
            break
    else:
        what = "base_fee has more than 38 digits, the maximum of its column"
    return DecodeFailed(number, what)


def to_record_batch(
    batch: EntryBatch,
    table: str = ENTRIES,
    *,
    version: int | None = None,
    columns: Sequence[str] | None = None,
    on_error: OnError = "raise",
) -> Any:
    """The entries of a batch as a `pyarrow.RecordBatch` of this table.

    `version` is the stream's (`Header.version`); every table but entries needs it. `columns`
    selects columns. An entry that is not an event raises `DecodeFailed`, which names it; with
    ``on_error="null"`` its fields are null and the column ``error`` says why, with "drop" it is
    skipped. Raises `UsageError` for invalid arguments, for entry numbers above 2**63 - 1 and for
    more than 2 GiB of bytes in a column, and `ExtraMissing` if columns of opened transactions need
    a package that is not installed.
    """
    converter = Converter(table, version=version, columns=columns, on_error=on_error)
    found = converter.convert(batch)
    if found.error is not None:
        raise found.error
    return found.batch


def record_batches(batches: Iterator[EntryBatch], converter: Converter) -> Iterator[Any]:
    """Record batches of batches of entries; the rows that precede an error come before it."""
    for batch in batches:
        found = converter.convert(batch)
        if found.batch.num_rows:
            yield found.batch
        if found.error is not None:
            raise found.error
