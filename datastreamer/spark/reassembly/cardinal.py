"""Cardinal Streams 1.0.0 in Spark: a topic's messages as `reassemble` takes them, and blocks.

Owns the columns before and behind; what the messages mean is `datastreamer.reassembly.cardinal`'s.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Final

import pyarrow as pa
from pyspark.sql import DataFrame

from datastreamer.reassembly import PayloadComplete
from datastreamer.reassembly.cardinal import Cardinal
from datastreamer.reassembly.splitter import PREFIX_SIZE

_MESSAGES: Final = "key BINARY, value BINARY, source STRING, position BIGINT"
_MESSAGE_COLUMNS: Final = ("key", "value", "source", "position")
_MESSAGE_ARROW: Final = pa.schema(
    [
        ("key", pa.binary()),
        ("value", pa.binary()),
        ("source", pa.string()),
        ("position", pa.int64()),
    ]
)
_BLOCKS: Final = (
    "hash BINARY, number BIGINT, parent BINARY, weight BINARY, "
    "values ARRAY<STRUCT<key: BINARY, value: BINARY>>, deletes ARRAY<BINARY>"
)
_BLOCK_ARROW: Final = pa.schema(
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

    `topic` is what Spark's Kafka source gives, or any frame with `key` and `value`, and `source`
    and `position` where there are any; of Kafka's columns `topic` and `partition` make the one,
    `offset` is the other. `prefixes` are as `Cardinal` has them. What is outside, and messages
    of reorgs, are left out; what is no message becomes one that `reassemble` calls malformed,
    with a key cut short to 32 bytes.
    """
    cardinal = Cardinal(prefixes)
    there = set(topic.columns)
    kafka = {"topic", "partition", "offset"} <= there
    source = "source" if "source" in there else "concat(topic, '/', partition)" if kafka else "''"
    position = "position" if "position" in there else "offset" if kafka else "NULL"

    def translate(batches: Iterator[Any]) -> Iterator[Any]:
        for batch in batches:
            rows: list[tuple[Any, ...]] = []
            for own_key, value, *place in zip(*(c.to_pylist() for c in batch.columns), strict=True):
                key = own_key or b""
                try:
                    if cardinal.reorg(key, value or b"") is None:
                        found = cardinal.translate(key, value or b"")
                        rows += [(*message, *place) for message in found]
                except ValueError:
                    rows.append((key[: PREFIX_SIZE - 1], value or b"", *place))
            if rows:
                yield _batch(rows, _MESSAGE_ARROW)

    columns = ("key", "value", f"CAST({source} AS STRING)", f"CAST({position} AS BIGINT)")
    shaped = topic.selectExpr(*columns).toDF(*_MESSAGE_COLUMNS)
    return shaped.mapInArrow(translate, _MESSAGES)


def cardinal_blocks(payloads: DataFrame, prefixes: Iterable[str]) -> DataFrame:
    """Blocks of payloads that `reassemble` or `reassemble_stream` gave: `hash`, `number`,
    `parent`, `weight` (32 bytes, which compare as the numbers do), `values` and `deletes`."""
    cardinal = Cardinal(prefixes)

    def opened(batches: Iterator[Any]) -> Iterator[Any]:
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
                    yield _batch(rows, _BLOCK_ARROW)
                    rows, size = [], 0
            if rows:
                yield _batch(rows, _BLOCK_ARROW)

    return payloads.select("id", "parts").mapInArrow(opened, _BLOCKS)


def _batch(rows: list[tuple[Any, ...]], schema: Any) -> Any:
    columns = zip(*rows, strict=True)
    arrays = [pa.array(column, of.type) for column, of in zip(columns, schema, strict=True)]
    return pa.record_batch(arrays, schema=schema)
