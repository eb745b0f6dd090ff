"""Messages of Cardinal Streams 1.0.0, built by its published schema, come out as blocks."""

from __future__ import annotations

import random
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("fastavro", reason="fastavro is not installed: 'datastreamer[cardinal]'")

from datastreamer.reassembly import Applied, Conflict, Dropped, Malformed, Orderer
from datastreamer.reassembly.cardinal import (
    CardinalPayload,
    CardinalReassembler,
    CardinalReorg,
)
from tests.reassembly.cardinal_messages import (
    HASH,
    PREFIXES,
    SUB,
    avro,
    batch,
    record,
    updated,
    worked_example,
)


def whole(reassembler: CardinalReassembler, messages: Any, source: str = "a") -> list[Any]:
    return [
        event
        for at, (key, value) in enumerate(messages)
        for event in reassembler.receive(key, value, source, at)
    ]


@given(st.randoms(use_true_random=False))
@settings(max_examples=100, deadline=None)
def test_any_order_and_repetition(choose: random.Random) -> None:
    messages = worked_example() + choose.choices(worked_example(), k=5)
    choose.shuffle(messages)
    [event] = whole(CardinalReassembler(PREFIXES), messages)
    assert isinstance(event, CardinalPayload)
    assert event.id == event.block.hash == HASH
    assert event.block == (1337, HASH, bytes(32), 0x2674)
    assert event.parts == [
        (b"a/b", b"\x88"),
        (b"b/s/5", b"\xab\xcd"),
        (b"other", b"direct"),
        (b"q/17", b"\x12\x34"),
        (b"q/18", b"\x56\x78"),
    ]
    assert event.deletes == (b"b/c", b"b/s/4", b"gone")


@pytest.mark.parametrize("lost", range(8))
def test_nothing_comes_before_it_is_all_there(lost: int) -> None:
    messages = worked_example()
    missing = messages.pop(lost)
    reassembler = CardinalReassembler(PREFIXES)
    assert whole(reassembler, messages) == []
    # The same ones again, from elsewhere, make up for nothing.
    assert whole(reassembler, messages, "b") == []
    [event] = whole(reassembler, [missing], "c")
    assert isinstance(event, CardinalPayload)
    assert (event.source, event.position) == ("c", 0)


def test_prefixes_without_a_subscription_are_left_out() -> None:
    reassembler = CardinalReassembler(["q/"])
    [event] = whole(reassembler, worked_example())
    assert [key for key, _ in event.parts] == [b"b/s/5", b"other", b"q/17", b"q/18"]
    assert event.deletes == (b"b/s/4", b"gone")
    assert reassembler.stats().sources["a"].outside == 2
    assert reassembler.positions() == {"a": 8}


def test_prefixes_that_are_patterns() -> None:
    messages = [
        (
            b"\0" + HASH,
            batch(1, SUB, 1, {"c/1f/s/": record(count=2), "c/20/s/": record(count=1)}),
        ),
        (b"\3" + HASH + b"c/1f/s/x", b"1"),
        (b"\3" + HASH + b"c/1f/s/y", b"2"),
        # One more of a prefix does not replace one of another.
        (b"\3" + HASH + b"c/1f/s/z", b"3"),
    ]
    reassembler = CardinalReassembler(PREFIXES)
    [excess] = whole(reassembler, messages)
    assert isinstance(excess, Malformed)
    assert excess.key == messages[3][0]
    assert "one more than the 2 messages" in excess.reason
    [event] = whole(reassembler, [(b"\4" + HASH + b"c/20/s/x", b"")])
    assert [key for key, _ in event.parts] == [b"c/1f/s/x", b"c/1f/s/y"]
    assert event.deletes == (b"c/20/s/x",)


def test_a_producer_that_disagrees() -> None:
    reassembler = CardinalReassembler(PREFIXES)
    messages = worked_example()
    lies = [(messages[0][0], batch(1338, bytes(32), 1, {})), (messages[2][0], b"lie")]
    reported = whole(reassembler, messages[:3]) + whole(reassembler, lies, "liar")
    reported += whole(reassembler, messages[3:])
    conflicts = [event for event in reported if isinstance(event, Conflict)]
    assert {(event.what, event.key, event.source) for event in conflicts} == {
        ("value", lies[0][0], "liar"),
        ("value", lies[1][0], "liar"),
    }
    [block] = [event.block for event in reported if isinstance(event, CardinalPayload)]
    assert block.number == 1337
    assert len(reported) == len(conflicts) + 1


def test_a_block_without_anything() -> None:
    messages = [(b"\0" + HASH, batch(7, SUB, 0, {"a/": record(), "x": record()}))]
    [event] = whole(CardinalReassembler(PREFIXES), messages)
    # Nothing under a prefix is a count of 0, elsewhere it is an empty value.
    assert event.parts == [(b"x", b"")]
    assert event.block.weight == 0


def test_reorgs() -> None:
    reported = whole(
        CardinalReassembler(PREFIXES),
        [(b"\5" + HASH, avro("long", 1 << 40)), (b"\6" + HASH, avro("long", 3))],
    )
    assert reported == [
        CardinalReorg(1 << 40, HASH, False, "a", 0),
        CardinalReorg(3, HASH, True, "a", 1),
    ]


@pytest.mark.parametrize(
    "key, value, reason",
    [
        (b"", b"", "a key of 0 bytes"),
        (b"\7" + HASH, b"", "unknown message type 0x07"),
        (b"\0" + HASH + b"x", b"", "a key of 34 bytes in a message of type 0x00"),
        (b"\1" + HASH, b"", "a key of 33 bytes in a message of type 0x01"),
        (b"\2" + HASH + SUB, updated({}), "a key of 65 bytes in a message of type 0x02"),
        (b"\3" + HASH[:-1], b"", "a key of 32 bytes in a message of type 0x03"),
        (b"\5" + HASH + b"x", avro("long", 1), "a key of 34 bytes in a message of type 0x05"),
        (b"\5" + HASH, b"", "invalid Avro: EOFError()"),
        (b"\0" + HASH, b"\x80" * 20, "invalid Avro: "),
        (b"\0" + HASH, batch(1, SUB, 1, {})[:-1], "invalid Avro: "),
        (b"\0" + HASH, batch(1, SUB, 1, {}) + b"x", "1 bytes after the Avro value"),
        (b"\0" + HASH, batch(1, SUB, 1, {"a/": record(count=-1)}), "-1 messages of the prefix"),
        (b"\1" + HASH + SUB, avro("int", -1), "a sub-batch of -1 messages"),
        (b"\2" + HASH + SUB + b"\0", b"\x05", "invalid Avro: "),
    ],
)
def test_what_is_no_message(key: bytes, value: bytes, reason: str) -> None:
    reassembler = CardinalReassembler(PREFIXES)
    [event] = reassembler.receive(key, value, "a", 5)
    assert isinstance(event, Malformed)
    assert event.reason.startswith(reason)
    assert (event.key, event.source, event.position) == (key, "a", 5)
    assert reassembler.positions() == {"a": 6}
    assert reassembler.stats().sources["a"].malformed == 1
    # The stream continues.
    assert len(whole(reassembler, worked_example())) == 1


@given(st.binary(max_size=80), st.binary(max_size=80), st.sampled_from(range(7)))
@settings(max_examples=300, deadline=None)
def test_any_bytes(key: bytes, value: bytes, kind: int) -> None:
    for event in CardinalReassembler(PREFIXES).receive(bytes([kind]) + key, value):
        assert isinstance(event, Malformed | CardinalReorg | CardinalPayload)


def test_age_and_restart() -> None:
    messages = worked_example()
    first = CardinalReassembler(PREFIXES, max_age=10)
    for at, message in enumerate(messages[:4]):
        assert first.receive(*message, "a", 100 + at, 1.0) == []
    checkpoint = first.checkpoint()
    [dropped] = first.expire(12.0)
    assert isinstance(dropped, Dropped)
    assert dropped.payload == HASH
    assert checkpoint.positions == {"a": 100}
    second = CardinalReassembler(PREFIXES, resume=checkpoint)
    assert len(whole(second, messages)) == 1
    third = CardinalReassembler(PREFIXES, resume=second.checkpoint())
    assert whole(third, messages) == []


def test_blocks_in_the_order_of_the_chain() -> None:
    names = [bytes([at]) * 32 for at in range(4)]
    messages = [(b"\0" + names[at], batch(at, names[at - 1], at * 10, {})) for at in (3, 2, 1)]
    orderer: Orderer[CardinalPayload] = Orderer(after=names[0])
    applied = [
        reported.block.number
        for event in whole(CardinalReassembler(PREFIXES), messages)
        for reported in orderer.receive(event.block, event)
        if isinstance(reported, Applied)
    ]
    assert applied == [1, 2, 3]


def test_the_page() -> None:
    page = Path(__file__).resolve().parent.parent.parent / "docs" / "REASSEMBLY.md"
    examples = re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
    [example] = (each for each in examples if "CardinalReassembler" in each)
    found: dict[str, Any] = {}
    exec(compile(example, "docs/REASSEMBLY.md", "exec"), found)
    messages = [("a", at, *message) for at, message in enumerate(worked_example())]
    [(number, parts, deletes)] = found["blocks"](messages, PREFIXES)
    assert (number, len(parts), len(deletes)) == (1337, 5, 3)
