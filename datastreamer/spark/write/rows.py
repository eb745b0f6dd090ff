"""The rows that become entries: their columns, and what makes one of them no entry.

Owns how tasks pack rows for the driver. Must not know where the entries go.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.types import ArrayType, BinaryType, DataType, IntegralType, StructType

from datastreamer.errors import BadPayload, UsageError
from datastreamer.format import MAX_BOOKMARK_SIZE, MAX_DATA_SIZE, TYPE_BOOKMARK, U32_MAX
from datastreamer.reassembly import pack_message
from datastreamer.reassembly.producer import MESSAGE_TYPE
from datastreamer.reassembly.splitter import PREFIX_SIZE, Part, Splitter

PACKED: Final = pa.schema(
    [
        ("operation", pa.int64()),
        ("bookmark", pa.binary()),
        ("type", pa.int64()),
        # (Of all rows that are sorted, more than 2 GiB.)
        ("data", pa.large_binary()),
    ]
)
"""The rows of a task. Columns that the frame lacks are null."""

# Of a message's key and value.
_LIMIT: Final = MAX_DATA_SIZE - 2
_ENTRIES: Final = {"type", "data"}
_PAYLOADS: Final = {"id", "parts"}
# What a frame of payloads may have beside them, as those that were read.
_OF_PAYLOADS: Final = {"prefixes", "source", "position"}
_KINDS: Final[dict[str, type[DataType]]] = {
    "operation": IntegralType,
    "bookmark": BinaryType,
    "type": IntegralType,
    "data": BinaryType,
    "id": BinaryType,
    "parts": ArrayType,
    "prefixes": ArrayType,
}


def check_columns(schema: StructType) -> None:
    """Raise `UsageError` unless rows with these columns become entries."""
    found = {field.name: field.dataType for field in schema}
    names = set(found)
    entries = _ENTRIES <= names <= _ENTRIES | {"operation", "bookmark"}
    payloads = _PAYLOADS <= names <= _PAYLOADS | _OF_PAYLOADS | {"operation"}
    fits = all(isinstance(kind, _KINDS.get(name, DataType)) for name, kind in found.items())
    if not (entries or payloads) or not fits:
        there = ", ".join(f"{field.name} {field.dataType.simpleString()}" for field in schema)
        raise UsageError(
            "a stream is written from the columns type (an integer) and data (binary), or id and "
            "parts of payloads, and, if wanted, bookmark (binary) and operation (an integer), not "
            f"from {there}: select these. Entries are numbered anew, in the order of the rows"
        )


def packed(batch: Any, partition: int, row: int) -> Any:
    """A batch of a task's rows as entries, with the columns `PACKED`; `row` is the number of the
    first one. Raises `UsageError` for a row that is not an entry."""
    columns: dict[str, Any] = {
        name: batch.column(name).cast(PACKED.field(name).type)
        for name in PACKED.names
        if name in batch.schema.names
    }

    def refuse(wrong: Any, why: str) -> None:
        at = pc.index(wrong, pa.scalar(True)).as_py()
        if at >= 0:
            raise UsageError(f"row {row + at} of partition {partition} is not an entry: {why}")

    if "operation" in columns:
        refuse(pc.is_null(columns["operation"]), "operation is null")
    if "parts" in batch.schema.names:
        return _payloads(batch, columns.get("operation"), f"of partition {partition}", row)
    kinds, data = columns["type"], columns["data"]
    sizes = pc.binary_length(data)
    bookmarks = pc.equal(kinds, TYPE_BOOKMARK)
    size = f"its data exceeds {MAX_DATA_SIZE:,} bytes, or its key is not 1 to {MAX_BOOKMARK_SIZE}"
    most = pc.if_else(bookmarks, MAX_BOOKMARK_SIZE, MAX_DATA_SIZE)
    least = pc.if_else(bookmarks, 1, 0)
    refuse(pc.or_(pc.is_null(kinds), pc.is_null(data)), "type or data is null")
    refuse(pc.or_(pc.less(kinds, 0), pc.greater(kinds, U32_MAX)), "its type is not a u32")
    refuse(pc.or_(pc.greater(sizes, most), pc.less(sizes, least)), size)
    if "bookmark" in columns:
        sizes = pc.binary_length(columns["bookmark"])
        wrong = pc.or_(pc.greater(sizes, MAX_BOOKMARK_SIZE), pc.less(sizes, 1))
        refuse(wrong, f"its bookmark is not 1 to {MAX_BOOKMARK_SIZE} bytes")
    nulls = [columns.get(it.name, pa.nulls(batch.num_rows, it.type)) for it in PACKED]
    return pa.RecordBatch.from_arrays(nulls, schema=PACKED)


def _payloads(batch: Any, operations: Any, where: str, row: int) -> Any:
    """Payloads as entries of their messages; the id is the bookmark of the first one."""
    splitter = Splitter(_LIMIT)
    rows: list[tuple[int | None, bytes | None, int, bytes]] = []
    for at, each in enumerate(batch.to_pylist()):
        try:
            messages = splitter.split(each["id"], _parts(each))
        except (BadPayload, TypeError) as error:
            raise UsageError(f"row {row + at} {where} is not a payload: {error}") from None
        number = None if operations is None else operations[at].as_py()
        key: bytes | None = each["id"][:MAX_BOOKMARK_SIZE]
        for message in messages:
            rows.append((number, key, MESSAGE_TYPE, pack_message(*message)))
            key = None
    arrays = zip(*rows, strict=True) if rows else ([], [], [], [])
    return pa.RecordBatch.from_arrays(
        [pa.array(values, field.type) for values, field in zip(arrays, PACKED, strict=True)],
        schema=PACKED,
    )


def _parts(payload: dict[str, Any]) -> dict[bytes, Part]:
    """Raises `TypeError` for what is null."""
    found: dict[bytes, list[tuple[bytes, bytes]]] = {
        bytes(prefix): [] for prefix in payload.get("prefixes") or ()
    }
    for part in payload["parts"]:
        key, value = (bytes(memoryview(it)) for it in part.values())
        found.setdefault(key[:PREFIX_SIZE], []).append((key[PREFIX_SIZE:], value))
    # A value whose key is a prefix alone may be too large for one message.
    return {
        prefix: pairs[0][1] if len(pairs) == 1 and _is_blob(*pairs[0]) else pairs
        for prefix, pairs in found.items()
    }


def _is_blob(suffix: bytes, value: bytes) -> bool:
    return not suffix and PREFIX_SIZE + len(value) > _LIMIT


def operations(batches: Iterator[Any]) -> Iterator[tuple[int, Iterator[Any]]]:
    """Packed rows of all tasks, in their order, as operations in the order of their numbers: one,
    if the rows have none."""
    for first in batches:
        if first.column("operation").null_count:
            yield 0, _chained(first, batches)
            return
        table = pa.Table.from_batches([first, *batches])
        table = table.take(pc.sort_indices(table, [("operation", "ascending")]))
        numbers = table.column("operation")
        ends = pc.indices_nonzero(pc.not_equal(numbers[:-1], numbers[1:])).to_pylist()
        begin = 0
        for end in [*(it + 1 for it in ends), table.num_rows]:
            yield numbers[begin].as_py(), iter(table.slice(begin, end - begin).to_batches())
            begin = end


def _chained(first: Any, rest: Iterator[Any]) -> Iterator[Any]:
    yield first
    yield from rest


def add(op: Any, batch: Any) -> None:
    """Add packed rows to an operation, of a stream or of a publisher."""
    kinds, data = batch.column("type").to_pylist(), batch.column("data").to_pylist()
    keys = batch.column("bookmark")
    if keys.null_count == len(keys) and TYPE_BOOKMARK not in kinds:
        op.add_entries(kinds, data)
        return
    for key, kind, item in zip(keys.to_pylist(), kinds, data, strict=True):
        if key is not None:
            op.add_bookmark(key)
        if kind == TYPE_BOOKMARK:
            op.add_bookmark(item)
        else:
            op.add_entry(kind, item)
