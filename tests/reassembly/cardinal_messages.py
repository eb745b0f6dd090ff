"""Blocks as the messages of Cardinal Streams 1.0.0, by the schemas as they are published."""

from __future__ import annotations

import io
from typing import Any

import fastavro

Message = tuple[bytes, bytes]

BATCH: Any = fastavro.parse_schema(
    {
        "type": "record",
        "name": "batch",
        "avro.codec": "snappy",
        "namespace": "cloud.rivet.cardinal",
        "fields": [
            {"name": "num", "type": "long"},
            {"name": "weight", "type": "bytes"},
            {"name": "parent", "type": {"name": "par", "type": "fixed", "size": 32}},
            {
                "name": "updates",
                "type": {
                    "name": "upd",
                    "type": "map",
                    "values": {
                        "type": "record",
                        "name": "update",
                        "fields": [
                            {"name": "value", "type": "bytes"},
                            {"name": "count", "type": "int"},
                            {"name": "delete", "type": "boolean"},
                            {
                                "name": "subbatch",
                                "type": {"name": "subb", "type": "fixed", "size": 32},
                            },
                        ],
                    },
                },
            },
        ],
    }
)
UPDATE: Any = fastavro.parse_schema(
    {
        "type": "record",
        "name": "update",
        "fields": [
            {"name": "delete", "type": {"name": "del", "type": "array", "items": "string"}},
            {"name": "updates", "type": {"name": "upd", "type": "map", "values": "bytes"}},
        ],
    }
)
PREFIXES = ["a/", "b/", "q/", "c/[0-9a-f]+/s/"]


def avro(schema: Any, datum: Any) -> bytes:
    body = io.BytesIO()
    fastavro.schemaless_writer(body, schema, datum)
    return body.getvalue()


def record(**reported: Any) -> dict[str, Any]:
    return {"value": b"", "count": 0, "delete": False, "subbatch": bytes(32)} | reported


def batch(number: int, parent: bytes, weight: int, updates: dict[str, Any]) -> bytes:
    size = (weight.bit_length() + 7) // 8
    reported = {"num": number, "weight": weight.to_bytes(size, "big"), "parent": parent}
    return avro(BATCH, reported | {"updates": updates})


def updated(updates: dict[str, bytes], delete: list[str] | None = None) -> bytes:
    return avro(UPDATE, {"delete": delete or [], "updates": updates})


HASH = bytes.fromhex("deadbeef0123456789abcdef00000000000000fedcba987654321fffffffffff".zfill(64))
SUB = bytes(31) + b"\x01"


def worked_example() -> list[tuple[bytes, bytes]]:
    """The block of the protocol's own example."""
    return [
        (
            b"\0" + HASH,
            batch(
                1337,
                bytes(32),
                0x2674,
                {
                    "a/": record(count=1),
                    "b/": record(count=1),
                    "q/": record(count=2),
                    "b/s": record(subbatch=SUB),
                    "other": record(value=b"direct"),
                    "gone": record(delete=True),
                },
            ),
        ),
        (b"\3" + HASH + b"a/b", b"\x88"),
        (b"\3" + HASH + b"q/17", b"\x12\x34"),
        (b"\3" + HASH + b"q/18", b"\x56\x78"),
        (b"\4" + HASH + b"b/c", b"whatever"),
        (b"\1" + HASH + SUB, avro("int", 2)),
        (b"\2" + HASH + SUB + avro("int", 0), updated({"b/s/5": b"\xab\xcd"})),
        (b"\2" + HASH + SUB + avro("int", 1), updated({}, ["b/s/4"])),
    ]


def block(number: int, hash_: bytes, parent: bytes, values: dict[str, bytes]) -> list[Message]:
    """A block of values under the prefixes a/ and b/, which no sub-batch has."""
    counts = {prefix: sum(key.startswith(prefix) for key in values) for prefix in ("a/", "b/")}
    updates = {prefix: record(count=count) for prefix, count in counts.items() if count}
    return [
        (b"\0" + hash_, batch(number, parent, number, updates)),
        *((b"\3" + hash_ + key.encode(), value) for key, value in values.items()),
    ]
