"""Payloads cut into messages, and back: every producer the same, nothing above the limit."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from datastreamer.errors import BadArgument, BadPayload
from datastreamer.format import MAX_DATA_SIZE
from datastreamer.reassembly import (
    PayloadComplete,
    Reassembler,
    Splitter,
    pack_message,
    pack_records,
    scan_records,
    unpack_message,
)
from tests.reassembly.generated import name

ID = b"i" * 32


@st.composite
def split_payloads(draw: st.DrawFn) -> dict[bytes, Any]:
    found: dict[bytes, Any] = {}
    for number in range(draw(st.integers(0, 8))):
        prefix = name(draw(st.sampled_from([1, 2, 0xFE])), b"%d" % number)
        if draw(st.booleans()):
            found[prefix] = draw(st.binary(max_size=400))
        else:
            found[prefix] = draw(
                st.dictionaries(st.binary(max_size=3), st.binary(max_size=20), max_size=5)
            ).items()
    return found


@given(split_payloads(), st.integers(111, 300), st.randoms())
@settings(max_examples=200, deadline=None)
def test_there_and_back(parts: dict[bytes, Any], limit: int, chance: Any) -> None:
    messages = Splitter(limit).split(ID, parts)
    assert all(len(key) + len(value) <= limit for key, value in messages)
    assert len({key for key, _ in messages}) == len(messages)
    # Another producer has them in another order.
    shuffled = list(parts)
    chance.shuffle(shuffled)
    other = {
        prefix: parts[prefix] if isinstance(parts[prefix], bytes) else list(parts[prefix])[::-1]
        for prefix in shuffled
    }
    assert Splitter(limit).split(ID, other) == messages

    chance.shuffle(messages)
    reassembler = Reassembler()
    events = [event for message in messages for event in reassembler.receive(*message)]
    assert len(events) == 1
    payload = events[0]
    assert isinstance(payload, PayloadComplete)
    assert payload.id == ID
    assert set(parts) == {prefix for prefix in payload.prefixes if prefix[0] != 0xFF}
    for prefix, part in parts.items():
        own = [(key[33:], value) for key, value in payload.parts if key[:33] == prefix]
        if isinstance(part, bytes):
            assert b"".join(value for _, value in own) == part
        else:
            assert own == sorted(part)


def test_a_small_payload_byte_for_byte() -> None:
    blob, items = name(1), name(2)
    assert Splitter(111).split(ID, {items: [(b"z", b"1"), (b"", b"2")], blob: b"x" * 75}) == [
        (b"\0" + ID, blob + bytes([0, 0, 0, 2]) + items + bytes([0, 0, 0, 2])),
        (blob + bytes(4), b"x" * 74),
        (blob + bytes([0, 0, 0, 1]), b"x"),
        (items, b"2"),
        (items + b"z", b"1"),
    ]


def test_nested_headers_where_one_is_not_enough() -> None:
    prefixes = [name(1, b"%d" % number) for number in range(7)]
    messages = Splitter(33 + 4 + 3 * 37).split(ID, dict.fromkeys(prefixes, b""))
    assert messages[0] == (b"\0" + ID, pack_records([(b"\xff" + ID, 3)]))
    nested = messages[1:4]
    assert [key for key, _ in nested] == [b"\xff" + ID + bytes([0, 0, 0, at]) for at in range(3)]
    assert [record for _, body in nested for record in scan_records(body)] == [
        (prefix, 1) for prefix in prefixes
    ]


def test_a_payload_of_nothing() -> None:
    assert Splitter().split(ID, {}) == [(b"\0" + ID, b"")]
    (event,) = Reassembler().receive(b"\0" + ID, b"")
    assert isinstance(event, PayloadComplete)
    assert (event.id, event.parts) == (ID, [])


def test_the_default_limit_fills_an_entry() -> None:
    messages = Splitter().split(ID, {name(1): bytes(3_000_000)})
    packed = [pack_message(key, value) for key, value in messages]
    assert max(len(data) for data in packed) == MAX_DATA_SIZE
    assert [unpack_message(data) for data in packed] == messages


@pytest.mark.parametrize(
    "id, parts, why",
    [
        (b"short", {}, "id must have 32 bytes, not 5"),
        (ID, {b"x": b""}, "invalid prefix 0x78"),
        (ID, {name(0): b""}, "invalid prefix 0x"),
        (ID, {name(0xFF): b""}, "invalid prefix 0x"),
        (ID, {name(1): [(b"a", b"1"), (b"a", b"2")]}, "is duplicated"),
        (ID, {name(1): [(b"a", bytes(200))]}, "above the limit of 200"),
    ],
)
def test_what_cannot_be_cut(id: bytes, parts: dict[bytes, Any], why: str) -> None:
    with pytest.raises(BadPayload, match=why):
        Splitter(200).split(id, parts)


def test_a_limit_too_small() -> None:
    Splitter(111)
    with pytest.raises(BadArgument, match="at least 111 bytes, not 110"):
        Splitter(110)
