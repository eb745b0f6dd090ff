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
from datastreamer.arrow.tables import ENTRIES, ERROR, TABLES, Table, schema
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

    def convert(self, batch: EntryBatch) -> Converted:
        """The rows of `batch`. Raises `UsageError` where a value is too large for Arrow."""
        if self._table is None:
            return Converted(self._entries(batch), None)
        if self._type is None:
            return Converted(self._made({}, 0), None)
        if self._version >= FIRST_PROTOBUF_VERSION:
            return self._messages(batch, self._table, self._type)
        return self._layouts(batch.select([self._type]), self._table)

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

    def _messages(self, batch: EntryBatch, table: Table, type: int) -> Converted:
        # The decoder knows fields and data; columns of the other generation stay null.
        known = [
            column
            for at, column in enumerate(table.columns)
            if at < table.message_columns or column[0] == "key"
        ]
        wanted = bytes(name in self._names for name, _ in known)
        rows, numbers, parts, valid, bad = _columns.message_columns(
            batch, type, table.kinds, wanted, _BAD_ROWS[self._on_error], pa.allocate_buffer
        )
        made = {"entry_number": _plain(pa.int64(), rows, numbers)}
        shared = None if valid is None else pa.py_buffer(valid)
        for (name, _), part in zip(known, parts, strict=True):
            if part is None:
                continue
            type_of = self.schema.field(name).type
            if len(part) == 1:
                buffers = [shared, pa.py_buffer(part[0])]
            else:
                offsets, values, own = part
                validity = shared if own is None else pa.py_buffer(own)
                if name == "key":
                    validity = None
                buffers = [validity, pa.py_buffer(offsets), pa.py_buffer(values)]
            made[name] = pa.Array.from_buffers(type_of, rows, buffers)
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

    def _layouts(self, batch: EntryBatch, table: Table) -> Converted:
        """As `_messages`, for the fixed layouts of version 1: through the events."""
        numbers: list[int] = []
        events: list[Event | None] = []
        keys: list[bytes] = []
        errors: list[tuple[int, DecodeFailed]] = []
        for entry in batch:
            event: Event | None
            try:
                event = decode_data(
                    entry.type, entry.data, version=self._version, number=entry.number
                )
                if any(type(value) is int and value > _MOST for value in event):
                    raise _too_large(event, entry.number)
            except DecodeFailed as error:
                errors.append((len(events), error))
                if self._on_error == "raise":
                    break
                if self._on_error == "drop":
                    continue
                event = None
            numbers.append(entry.number)
            events.append(event)
            keys.append(entry.data)
        made = {"entry_number": pa.array(numbers, pa.int64())}
        rows = [{} if event is None else event._asdict() for event in events]
        for name, _ in table.columns:
            if name not in self._names:
                continue
            field = self.schema.field(name)
            if name == "key":
                made[name] = pa.array(keys, field.type)
                continue
            here = table.renamed.get(name, name)
            made[name] = pa.array([row.get(here) for row in rows], field.type)
        if ERROR in self._names:
            made[ERROR] = _texts(len(events), errors)
        stops = self._on_error == "raise" and errors
        return Converted(self._made(made, len(events)), errors[0][1] if stops else None)


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
