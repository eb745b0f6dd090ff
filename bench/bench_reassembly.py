"""Whole payloads from messages of 200 B, beside the same in dicts.

The rival is the tests' oracle, which does all that ours does, with Python's dicts. Messages come
from three producers, each in its own order, so that two of three are duplicates; or from one
producer, without duplicates.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

from datastreamer._codec import EntryBatch, scan
from datastreamer.reassembly import PayloadComplete, Reassembler, pack_message, pack_records
from tests.oracle import pack
from tests.reassembly.twin import Twin

Versus = Callable[..., None]
Message = tuple[bytes, bytes]

_PARTS = 100
_SIZE = 200


def made(count: int) -> list[Message]:
    """Some `count` messages: headers and parts of 200 bytes, keys and all."""
    messages: list[Message] = []
    value = bytes(_SIZE - 37)
    for number in range(count // _PARTS):
        own_id = b"%32d" % number
        messages.append((b"\0" + own_id, pack_records([(b"\1" + own_id, _PARTS - 1)])))
        messages += [
            (b"\1" + own_id + part.to_bytes(4, "big"), value) for part in range(_PARTS - 1)
        ]
    return messages


def shuffled(messages: list[Message], chance: random.Random) -> list[Message]:
    """The same, each at most some 500 places away: a producer's order."""
    places = [(at + chance.randrange(500), message) for at, message in enumerate(messages)]
    return [message for _, message in sorted(places, key=lambda place: place[0])]


def payloads(receive: Callable[..., Any], messages: list[tuple[Message, str, int]]) -> int:
    found = 0
    for (key, value), source, position in messages:
        for event in receive(key, value, source, position):
            assert type(event) is PayloadComplete
            found += 1
    return found


def batches(messages: list[Message]) -> list[EntryBatch]:
    step = 1000
    return [
        scan(
            b"".join(
                pack(first + at, 0x10, pack_message(*message))
                for at, message in enumerate(messages[first : first + step])
            )
        )
        for first in range(0, len(messages), step)
    ]


@pytest.mark.parametrize("producers", [1, 3])
def test_receive(versus: Versus, smoke: bool, producers: int) -> None:
    count = 1_000 if smoke else 200_000
    once = made(count)
    orders = [shuffled(once, random.Random(number)) for number in range(producers)]
    messages = [
        (orders[number][at], "abc"[number], at)
        for at in range(len(once))
        for number in range(producers)
    ]

    def ours() -> None:
        assert payloads(Reassembler().receive, messages) == count // _PARTS

    def rival() -> None:
        assert payloads(Twin().receive, messages) == count // _PARTS

    versus(
        f"reassembly, 200 B, {producers} producer{'s' * (producers > 1)}, message by message",
        ours,
        {"the same in Python's dicts": rival},
        unit="messages/s",
        amount=len(messages),
        at_least=3.0,
    )


def test_receive_batches(versus: Versus, smoke: bool) -> None:
    count = 1_000 if smoke else 200_000
    messages = made(count)
    entries = batches(messages)

    def ours() -> None:
        reassembler = Reassembler()
        found = sum(1 for batch in entries for _ in reassembler.receive_batch(batch, "a"))
        assert found == count // _PARTS

    singly = [(message, "a", at) for at, message in enumerate(messages)]

    def rival() -> None:
        assert payloads(Reassembler().receive, singly) == count // _PARTS

    versus(
        "reassembly, 200 B, batches of entries",
        ours,
        {"message by message": rival},
        unit="messages/s",
        amount=count,
        at_least=1.0,
    )
