"""Blocks of Cardinal Streams 1.0.0 from a Kafka topic into SQLite, each exactly once.

    python examples/cardinal_kafka.py BROKERS TOPIC DATABASE PREFIX...

A PREFIX is a regular expression, as the application names its prefixes: '^c/[0-9a-f]+/b/'.
Needs pip install 'datastreamer[cardinal]' confluent-kafka.
"""

from __future__ import annotations

import sqlite3
import sys
import time
from collections.abc import Callable, Iterable
from typing import Any

from datastreamer.reassembly import CardinalPayload, CardinalReassembler, Checkpoint

TABLES = """
    CREATE TABLE IF NOT EXISTS block (hash BLOB PRIMARY KEY, number INTEGER, parent BLOB);
    CREATE TABLE IF NOT EXISTS value (hash BLOB, key BLOB, value BLOB, PRIMARY KEY (hash, key));
    CREATE TABLE IF NOT EXISTS checkpoint (one INTEGER PRIMARY KEY, json TEXT);
"""
BEGINNING = -2  # confluent_kafka.OFFSET_BEGINNING


def main() -> None:
    if len(sys.argv) < 5:
        raise SystemExit(__doc__)
    from confluent_kafka import Consumer, TopicPartition

    brokers, topic, path, *prefixes = sys.argv[1:]
    # The position is in the database, with the blocks; Kafka stores none.
    consumer = Consumer(
        {"bootstrap.servers": brokers, "group.id": "unused", "enable.auto.commit": False}
    )
    database = sqlite3.connect(path)
    try:
        follow(consumer, TopicPartition, database, topic, prefixes)
    finally:
        consumer.close()
        database.close()


def follow(
    consumer: Any,
    partition_at: Callable[[str, int, int], Any],
    database: sqlite3.Connection,
    topic: str,
    prefixes: Iterable[str],
    clock: Callable[[], float] = time.monotonic,
    most: int | None = None,
) -> None:
    """Consume messages, forever or `most` batches; one transaction has blocks and checkpoint."""
    database.executescript(TABLES)
    found = database.execute("SELECT json FROM checkpoint").fetchone()
    before = Checkpoint.from_json(found[0]) if found else None
    reassembler = CardinalReassembler(prefixes, resume=before)

    # Each partition is a source of its own.
    positions = before.positions if before else {}
    partitions = consumer.list_topics(topic).topics[topic].partitions
    consumer.assign(
        [
            partition_at(topic, partition, positions.get(f"{topic}/{partition}", BEGINNING))
            for partition in partitions
        ]
    )
    while most is None or most > 0:
        most = None if most is None else most - 1
        messages = consumer.consume(1000, 1.0)
        events = reassembler.expire(clock())
        for message in messages:
            if message.error() is not None:
                raise SystemExit(f"error: {message.error()}")
            source = f"{topic}/{message.partition()}"
            key, value = message.key() or b"", message.value() or b""
            events += reassembler.receive(key, value, source, message.offset(), clock())
        if not messages and not events:
            continue
        with database:  # a transaction
            for event in events:
                if isinstance(event, CardinalPayload):
                    store(database, event)
                else:
                    print(event, file=sys.stderr)
            checkpoint = reassembler.checkpoint().to_json()
            database.execute("INSERT OR REPLACE INTO checkpoint VALUES (1, ?)", [checkpoint])


def store(database: sqlite3.Connection, payload: CardinalPayload) -> None:
    """Insert a block and its values. A second one would be an error: each comes once."""
    block = payload.block
    database.execute("INSERT INTO block VALUES (?, ?, ?)", [block.hash, block.number, block.parent])
    database.executemany(
        "INSERT INTO value VALUES (?, ?, ?)",
        [(block.hash, key, value) for key, value in payload.parts],
    )


if __name__ == "__main__":
    main()
