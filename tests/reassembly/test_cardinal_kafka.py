"""The example for Kafka, with a consumer in place of Kafka's."""

from __future__ import annotations

import random
import runpy
import sqlite3
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest

pytest.importorskip("fastavro", reason="fastavro is not installed: 'datastreamer[cardinal]'")

from tests.reassembly.cardinal_messages import block, worked_example

EXAMPLE = Path(__file__).resolve().parent.parent.parent / "examples" / "cardinal_kafka.py"
PREFIXES = ["a/", "b/", "q/"]


class Place(NamedTuple):
    topic: str
    partition: int
    offset: int


class Message:
    def __init__(
        self, partition: int, offset: int, reported: tuple[bytes, bytes], error: Any
    ) -> None:
        self._message = partition, offset, *reported, error

    def partition(self) -> int:
        return self._message[0]

    def offset(self) -> int:
        return self._message[1]

    def key(self) -> bytes:
        return self._message[2]

    def value(self) -> bytes:
        return self._message[3]

    def error(self) -> Any:
        return self._message[4]


class Killed(Exception):
    pass


class Consumer:
    """What the example asks of a confluent_kafka.Consumer, over lists of messages."""

    def __init__(self, partitions: list[list[tuple[bytes, bytes]]], die_after: int = 10**9) -> None:
        self.partitions = partitions
        self.die_after = die_after
        self.places: dict[int, int] = {}
        self.error: Any = None

    def list_topics(self, topic: str) -> Any:
        partitions = dict.fromkeys(range(len(self.partitions)))
        return SimpleNamespace(topics={topic: SimpleNamespace(partitions=partitions)})

    def assign(self, places: list[Place]) -> None:
        self.places = {place.partition: max(0, place.offset) for place in places}
        self.assigned = dict(self.places)

    def consume(self, most: int, timeout: float) -> list[Message]:
        if self.die_after <= 0:
            raise Killed
        self.die_after -= 1
        found = []
        for partition, messages in enumerate(self.partitions):
            at = self.places[partition]
            for reported in messages[at : at + 3]:
                found.append(Message(partition, at, reported, self.error))
                at += 1
            self.places[partition] = at
        return found


def topic(blocks: int) -> list[list[tuple[bytes, bytes]]]:
    """Two producers' messages over three partitions, in no order."""
    choose = random.Random(3)
    partitions: list[list[tuple[bytes, bytes]]] = [[], [], []]
    for producer in range(2):
        messages = worked_example()
        for number in range(blocks):
            values = {f"{'ab'[at % 2]}/{at}": b"%d" % number for at in range(number % 9)}
            messages += block(number, bytes([number]) * 32, bytes([number - 1 & 255]) * 32, values)
        choose.shuffle(messages)
        for at, message in enumerate(messages):
            partitions[(hash_of(message[0]) + at * producer) % 3].append(message)
    return partitions


def hash_of(key: bytes) -> int:
    return sum(key)


def run(consumer: Consumer, path: Path) -> None:
    database = sqlite3.connect(path)
    try:
        follow = runpy.run_path(str(EXAMPLE))["follow"]
        follow(consumer, Place, database, "blocks", PREFIXES, clock=lambda: 1.0, most=100)
    finally:
        database.close()


def test_each_block_once_over_restarts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    partitions = topic(20)
    for life in (1, 2, 3, 1, 4):
        with pytest.raises(Killed):
            run(Consumer(partitions, life), tmp_path / "d.sqlite")
    run(Consumer(partitions), tmp_path / "d.sqlite")
    database = sqlite3.connect(tmp_path / "d.sqlite")
    numbers = [row[0] for row in database.execute("SELECT number FROM block ORDER BY number")]
    assert numbers == [*range(20), 1337]
    values = database.execute("SELECT count(*) FROM value").fetchone()[0]
    assert values == sum(number % 9 for number in range(20)) + 5
    database.close()
    # All has been read, and nothing is unfinished: it continues at the end.
    last = Consumer(partitions)
    run(last, tmp_path / "d.sqlite")
    assert last.assigned == {at: len(messages) for at, messages in enumerate(partitions)}
    assert capsys.readouterr().err == ""


def test_a_producer_of_false_messages_is_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    messages = block(1, b"h" * 32, b"p" * 32, {"a/1": b"1", "a/2": b"2"})
    run(Consumer([[*messages[:2], (messages[1][0], b"lie"), *messages[2:]]]), tmp_path / "d.sqlite")
    assert "Conflict(what='value'" in capsys.readouterr().err


def test_an_error_of_kafka_ends_it(tmp_path: Path) -> None:
    consumer = Consumer([worked_example()])
    consumer.error = "the broker has ended"
    with pytest.raises(SystemExit, match="error: the broker has ended"):
        run(consumer, tmp_path / "d.sqlite")
