"""Cardinal Streams 1.0.0 in Spark: from a topic to messages, and from payloads to blocks.

Owns the columns of both; `datastreamer.reassembly.cardinal` owns the meaning of messages.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Final

import pyarrow as pa
from pyspark.sql import DataFrame
from pyspark.sql.pandas.types import from_arrow_schema

from datastreamer.reassembly import PayloadComplete
from datastreamer.reassembly.cardinal import Cardinal
from datastreamer.reassembly.splitter import PREFIX_SIZE

_MESSAGES: Final = pa.schema(
    [
        ("key", pa.binary()),
        ("value", pa.binary()),
        ("source", pa.string()),
        ("position", pa.int64()),
    ]
)
_BLOCKS: Final = pa.schema(
    [
        ("hash", pa.binary()),
        ("number", pa.int64()),
        ("parent", pa.binary()),
        ("weight", pa.binary()),
        ("values", pa.list_(pa.struct([("key", pa.binary()), ("value", pa.binary())]))),
        ("deletes", pa.list_(pa.binary())),
    ]
)
_MOST: Final = 1 << 20


def cardinal_messages(topic: DataFrame, prefixes: Iterable[str]) -> DataFrame:
    """The messages of a topic, for `reassemble` and `reassemble_stream`.

    `topic` is a frame of Spark's Kafka source, or any frame with `key` and `value`, and optionally
    `source` and `position`. Kafka's `topic` and `partition` become `source`, its `offset` becomes
    `position`. `prefixes` are those of `Cardinal`. Messages outside of them and messages of reorgs
    are left out; an invalid message keeps 32 bytes of its key, so that `reassemble` reports it as
    malformed.
    """
    cardinal = Cardinal(prefixes)
    columns_of_topic = set(topic.columns)
    kafka = {"topic", "partition", "offset"} <= columns_of_topic
    source = "''"
    if "source" in columns_of_topic:
        source = "source"
    elif kafka:
        source = "concat(topic, '/', partition)"
    position = "position" if "position" in columns_of_topic else "offset" if kafka else "NULL"

    def translate(batches: Iterator[Any]) -> Iterator[Any]:
        for batch in batches:
            rows: list[tuple[Any, ...]] = []
            for own_key, value, *position in zip(
                *(c.to_pylist() for c in batch.columns), strict=True
            ):
                key = own_key or b""
                try:
                    if cardinal.reorg(key, value or b"") is None:
                        found = cardinal.translate(key, value or b"")
                        rows += [(*message, *position) for message in found]
                except ValueError:
                    rows.append((key[: PREFIX_SIZE - 1], value or b"", *position))
            if rows:
                yield _batch(rows, _MESSAGES)

    columns = ("key", "value", f"CAST({source} AS STRING)", f"CAST({position} AS BIGINT)")
    shaped = topic.selectExpr(*columns).toDF(*_MESSAGES.names)
    return shaped.mapInArrow(translate, from_arrow_schema(_MESSAGES))


def cardinal_blocks(payloads: DataFrame, prefixes: Iterable[str]) -> DataFrame:
    """The blocks of payloads from `reassemble` or `reassemble_stream`: `hash`, `number`, `parent`,
    `weight` (32 bytes, big-endian), `values` and `deletes`."""
    cardinal = Cardinal(prefixes)

    def decode(batches: Iterator[Any]) -> Iterator[Any]:
        for batch in batches:
            rows: list[tuple[Any, ...]] = []
            size = 0
            for own, parts in zip(*(c.to_pylist() for c in batch.columns), strict=True):
                found = [(part["key"], part["value"]) for part in parts]
                block = cardinal.payload(PayloadComplete(own, found, (), 0.0, "", None))
                number, hash_, parent, weight = block.block
                values = [{"key": key, "value": value} for key, value in block.parts]
                rows.append(
                    (
                        *(hash_, number, parent, (weight or 0).to_bytes(32, "big")),
                        *(values, list(block.deletes)),
                    )
                )
                size += sum(len(key) + len(value) for key, value in found)
                if size > _MOST:
                    yield _batch(rows, _BLOCKS)
                    rows, size = [], 0
            if rows:
                yield _batch(rows, _BLOCKS)

    return payloads.select("id", "parts").mapInArrow(decode, from_arrow_schema(_BLOCKS))


def _batch(rows: list[tuple[Any, ...]], schema: Any) -> Any:
    columns = zip(*rows, strict=True)
    arrays = [pa.array(column, of.type) for column, of in zip(columns, schema, strict=True)]
    return pa.record_batch(arrays, schema=schema)
