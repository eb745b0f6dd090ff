"""The events of a reassembly as rows: complete payloads, and everything else it reports.

Owns the columns of both, and how an event becomes a row.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final, NamedTuple

import pyarrow as pa
from pyspark.sql import DataFrame
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    LongType,
    MapType,
    StringType,
    StructField,
    StructType,
)

from datastreamer.reassembly import Conflict, Dropped, Event, Malformed, PayloadComplete

COMPLETE: Final = "complete"
CONFLICT: Final = "conflict"
MALFORMED: Final = "malformed"
DROPPED: Final = "dropped"
SHOWN: Final = 1024
"""Bytes of a key that an event shows."""

_PART: Final = StructType(
    [StructField("key", BinaryType(), False), StructField("value", BinaryType(), False)]
)

EVENT_SCHEMA: Final = StructType(
    [
        StructField("event", StringType(), False),
        StructField("id", BinaryType()),
        StructField("parts", ArrayType(_PART, False)),
        StructField("prefixes", ArrayType(BinaryType(), False)),
        StructField("what", StringType()),
        StructField("key", BinaryType()),
        StructField("prefix", BinaryType()),
        StructField("messages", LongType()),
        StructField("bytes", LongType()),
        StructField("missing", LongType()),
        StructField("source", StringType()),
        StructField("position", LongType()),
        StructField("positions", MapType(StringType(), LongType(), False)),
    ]
)
"""Every event as a row; columns that an event does not have are null."""

_OF_PAYLOADS: Final = ("id", "parts", "prefixes", "source", "position")
_OF_EVENTS: Final = (
    *("event", "what", "key", "prefix", "id", "messages", "bytes", "missing"),
    *("source", "position", "positions"),
)

_ARROW: Final = to_arrow_schema(EVENT_SCHEMA)


class Reassembled(NamedTuple):
    """The result of a reassembly: three views, none of which is computed yet.

    `payloads` has a row for each complete payload: `id`, `parts` (an array of key and value,
    ordered by key), `prefixes`, and `source` and `position` of the message that completed it.
    `events` has everything else: `event` is conflict, malformed or dropped, and `what` says which
    conflict, what is malformed, or why it was dropped. `rows` has both, to be written in one pass;
    `payloads_of` and `events_of` separate them again.
    """

    payloads: DataFrame
    events: DataFrame
    rows: DataFrame


def views(rows: DataFrame) -> Reassembled:
    """The views of rows of events."""
    return Reassembled(payloads_of(rows), events_of(rows), rows)


def payloads_of(rows: DataFrame) -> DataFrame:
    """The complete payloads among rows of events."""
    return rows.where(f"event = '{COMPLETE}'").select(*_OF_PAYLOADS)


def events_of(rows: DataFrame) -> DataFrame:
    """All rows of events but complete payloads."""
    return rows.where(f"event <> '{COMPLETE}'").select(*_OF_EVENTS)


def row_of(event: Event, ended: bool = False) -> tuple[Any, ...]:
    """An event as a row of `EVENT_SCHEMA`. `ended`: dropped because the input has ended."""
    row: dict[str, Any] = dict.fromkeys(EVENT_SCHEMA.names)
    if isinstance(event, Dropped):
        row.update(
            event=DROPPED,
            what="end" if ended else event.why,
            id=event.payload,
            prefix=event.prefix,
            messages=event.messages,
            bytes=event.bytes,
            missing=event.missing,
            positions=dict(event.positions),
        )
        return tuple(row.values())
    row["source"], row["position"] = event.source, event.position
    if isinstance(event, PayloadComplete):
        # Sorted, so that the row does not depend on the order of the messages.
        prefixes = sorted(event.prefixes)
        row.update(event=COMPLETE, id=event.id, parts=event.parts, prefixes=prefixes)
    elif isinstance(event, Conflict):
        row.update(
            event=CONFLICT, what=event.what, key=event.key, prefix=event.prefix, id=event.payload
        )
    else:
        assert isinstance(event, Malformed)
        row.update(event=MALFORMED, what=event.reason, key=event.key)
    return tuple(row.values())


def without_key(value: bytes, source: str | None, position: int | None) -> Malformed:
    """The event for an entry whose data does not hold its key."""
    reason = f"an entry of {len(value)} bytes does not hold its key"
    return Malformed(value[2:][:SHOWN], reason, source or "", position)


def size_of(row: Sequence[Any]) -> int:
    """The approximate size of a row in bytes."""
    parts = row[2]
    return 200 + sum(len(key) + len(value) + 16 for key, value in parts or ())


def batches_of(rows: Iterable[tuple[Any, ...]], most: int = 1 << 20) -> Iterator[Any]:
    """Rows as record batches of about `most` bytes, with at least one row each."""
    gathered: list[tuple[Any, ...]] = []
    size = 0
    for row in rows:
        gathered.append(row)
        size += size_of(row)
        if size >= most:
            yield _batch(gathered)
            gathered, size = [], 0
    if gathered:
        yield _batch(gathered)


def _batch(rows: list[tuple[Any, ...]]) -> Any:
    columns = list(zip(*rows, strict=True))
    parts = EVENT_SCHEMA.names.index("parts")
    positions = EVENT_SCHEMA.names.index("positions")
    columns[parts] = tuple(
        None if found is None else [{"key": key, "value": value} for key, value in found]
        for found in columns[parts]
    )
    columns[positions] = tuple(
        None if found is None else list(found.items()) for found in columns[positions]
    )
    return pa.record_batch(
        [pa.array(column, field.type) for column, field in zip(columns, _ARROW, strict=True)],
        schema=_ARROW,
    )
