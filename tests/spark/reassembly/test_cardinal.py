"""A topic of Cardinal Streams in Spark: its messages reassembled, and opened as blocks."""

from __future__ import annotations

import random
from typing import Any

import pyarrow as pa
import pytest

pytest.importorskip("fastavro", reason="fastavro is not installed: 'datastreamer[cardinal]'")

from datastreamer.reassembly.cardinal import CardinalPayload, CardinalReassembler
from datastreamer.spark import reassemble
from datastreamer.spark.reassembly.cardinal import cardinal_blocks, cardinal_messages
from tests.reassembly.cardinal_messages import HASH, PREFIXES, avro, block, worked_example


def topic() -> list[tuple[Any, ...]]:
    """What two producers wrote, as rows of Kafka's source."""
    choose = random.Random(5)
    rows: list[tuple[Any, ...]] = []
    for _ in range(2):
        messages = worked_example()
        for number in range(10):
            values = {f"{'ab'[at % 2]}/{at}": b"%d" % number for at in range(number)}
            messages += block(number, bytes([number]) * 32, bytes(32), values)
        messages += [(b"\5" + HASH, avro("long", 5)), (b"\x09" + HASH, b""), (b"\0" + HASH, b"x")]
        choose.shuffle(messages)
        rows += [(*message, "blocks", at % 3, at) for at, message in enumerate(messages)]
    return rows


def test_the_same_as_the_core(spark: Any) -> None:
    rows = topic()
    types = [pa.binary(), pa.binary(), pa.string(), pa.int32(), pa.int64()]
    columns = zip(*rows, strict=True)
    arrays = [pa.array(list(column), of) for column, of in zip(columns, types, strict=True)]
    names = ["key", "value", "topic", "partition", "offset"]
    kafka = spark.createDataFrame(pa.table(arrays, names))
    found = reassemble(cardinal_messages(kafka, PREFIXES))
    blocks = {
        bytes(row.hash): (
            *(row.number, bytes(row.parent), int.from_bytes(row.weight, "big")),
            [(bytes(key), bytes(value)) for key, value in row["values"]],
            tuple(map(bytes, row.deletes)),
        )
        for row in cardinal_blocks(found.payloads, PREFIXES).collect()
    }
    core = CardinalReassembler(PREFIXES)
    expected = {}
    malformed = 0
    for key, value, name, partition, offset in rows:
        for event in core.receive(key, value, f"{name}/{partition}", offset):
            if isinstance(event, CardinalPayload):
                own = event.block
                expected[own.hash] = (
                    *(own.number, own.parent, own.weight),
                    event.parts,
                    event.deletes,
                )
            malformed += type(event).__name__ == "Malformed"
    assert blocks == expected
    assert len(expected) == 11
    events = found.events.collect()
    assert [(row.event, len(row.key)) for row in events] == [("malformed", 32)] * malformed
    assert {row.source for row in events} <= {"blocks/0", "blocks/1", "blocks/2"}
