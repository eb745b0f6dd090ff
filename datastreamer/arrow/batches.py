"""A run of entries as a record batch.

Owns how the columns that the compiled decoder makes become Arrow's (no value is copied once
more), and what becomes of an entry that is no event. Knows no source.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final, Literal, NamedTuple, get_args

import pyarrow as pa

from datastreamer._codec import EntryBatch
from datastreamer.arrow import _columns
from datastreamer.arrow.layouts import Layout, fixed_columns
from datastreamer.arrow.tables import ENTRIES, ERROR, TABLES, schema
from datastreamer.errors import DecodeFailed, UsageError
from datastreamer.format import U64_MAX
from datastreamer.zkevm.decoding import Event, decode_data
from datastreamer.zkevm.schema import FIRST_PROTOBUF_VERSION

OnError = Literal["raise", "null", "drop"]
_BAD_ROWS: Final[dict[str, Literal[0, 1, 2]]] = {"raise": 0, "null": 1, "drop": 2}
_MOST: Final = U64_MAX >> 1


class Converted(NamedTuple):
    """The rows of a run, up to the first entry that is no event where that is to be raised."""

    batch: Any
    error: DecodeFailed | None


class Converter:
    """Makes record batches of runs of entries, all of one table and schema."""

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
        self._names = frozenset(self.schema.names)
        self._on_error = on_error
        self._table = TABLES.get(table)
        if self._table is not None:
            if version is None:
                raise UsageError(f"the table {table} depends on the stream's version: say which")
            self._version = version
            self._type = self._table.entry_type(version)
            self._layouts: Sequence[Layout] | None = None
            # The decoder knows these columns; those of the other generation stay null.
            if version >= FIRST_PROTOBUF_VERSION:
                self._known = self._table.message_names
                self._kinds = self._table.kinds
            elif self._type is not None:
                self._known, self._kinds, self._layouts = fixed_columns(self._table)

    def convert(self, batch: EntryBatch) -> Converted:
        """The rows of `batch`. Raises `UsageError` where a value is too large for Arrow."""
        if self._table is None:
            return Converted(self._entries(batch), None)
        if self._type is None:
            return Converted(self._made({}, 0), None)
        return self._events(batch, self._type)

    def _made(self, columns: dict[str, Any], rows: int) -> Any:
        arrays = [
            columns[field.name] if field.name in columns else pa.nulls(rows, field.type)
            for field in self.schema
        ]
        if not arrays:
            raise UsageError("a table of no columns has no rows: ask for one at least")
        return pa.RecordBatch.from_arrays(arrays, schema=self.schema)

    def _entries(self, batch: EntryBatch) -> Any:
        rows = len(batch)
        numbers, types, offsets, values = _columns.entry_columns(
            batch, pa.allocate_buffer, data="data" in self._names
        )
        made = {
            "number": _plain(pa.int64(), rows, numbers),
            "type": _plain(pa.int64(), rows, types),
        }
        if offsets is not None:
            made["data"] = _plain(pa.binary(), rows, offsets, values)
        return self._made(made, rows)

    def _events(self, batch: EntryBatch, type: int) -> Converted:
        wanted = bytes(name in self._names for name in self._known)
        rows, numbers, parts, valid, bad = _columns.event_columns(
            *(batch, type, self._kinds, wanted, _BAD_ROWS[self._on_error], pa.allocate_buffer),
            self._layouts,
        )
        made = {"entry_number": _plain(pa.int64(), rows, numbers)}
        shared = None if valid is None else pa.py_buffer(valid)
        for name, part in zip(self._known, parts, strict=True):
            if part is None:
                continue
            buffers, own = part
            field = self.schema.field(name)
            validity = shared if own is None else pa.py_buffer(own)
            made[name] = pa.Array.from_buffers(
                field.type,
                rows,
                [validity if field.nullable else None, *map(pa.py_buffer, buffers)],
            )
        errors = [(row, self._fault(batch, place, type)) for row, place in bad]
        if ERROR in self._names:
            made[ERROR] = _texts(rows, errors)
        stops = self._on_error == "raise" and errors
        return Converted(self._made(made, rows), errors[0][1] if stops else None)

    def _fault(self, batch: EntryBatch, place: int, type: int) -> DecodeFailed:
        """Why the entry at `place` of a run is no row."""
        number = batch.numbers[place]
        try:
            event = decode_data(
                type, bytes(batch.data(place)), version=self._version, number=number
            )
        except DecodeFailed as error:
            return error
        return _too_large(event, number)


def _plain(type: Any, rows: int, *buffers: Any) -> Any:
    """An array without nulls."""
    return pa.Array.from_buffers(type, rows, [None, *map(pa.py_buffer, buffers)])


def _texts(rows: int, errors: list[tuple[int, DecodeFailed]]) -> Any:
    if not errors:
        return pa.nulls(rows, pa.string())
    texts: list[str | None] = [None] * rows
    for row, error in errors:
        texts[row] = str(error)
    return pa.array(texts, pa.string())


def _too_large(event: Event, number: int) -> DecodeFailed:
    name, value = next(
        (name, value)
        for name, value in event._asdict().items()
        if type(value) is int and value > _MOST
    )
    return DecodeFailed(
        number, f"{name} is {value}, above the most that a signed column holds, {_MOST}"
    )


def to_record_batch(
    batch: EntryBatch,
    table: str = ENTRIES,
    *,
    version: int | None = None,
    columns: Sequence[str] | None = None,
    on_error: OnError = "raise",
) -> Any:
    """The entries of a run as a `pyarrow.RecordBatch` of this table.

    `version` is the stream's (`Header.version`), which all tables but entries need. `columns`
    are those that are made. An entry that is no event raises `DecodeFailed`, which names it; with
    ``on_error="null"`` its fields are null and the column ``error`` says why, with "drop" it is
    left out. Raises `UsageError` for arguments that say nothing, for numbers above 2**63 - 1
    and for more than 2 GiB of bytes in a column.
    """
    converter = Converter(table, version=version, columns=columns, on_error=on_error)
    found = converter.convert(batch)
    if found.error is not None:
        raise found.error
    return found.batch


def record_batches(batches: Iterator[EntryBatch], converter: Converter) -> Iterator[Any]:
    """Record batches of runs as they come; the rows before an error are given before it."""
    for batch in batches:
        found = converter.convert(batch)
        if found.batch.num_rows:
            yield found.batch
        if found.error is not None:
            raise found.error
