"""Entries to events and back: known bytes, every value, and bytes that are none."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from datastreamer import Entry
from datastreamer.errors import BadEvent, DatastreamerError, DecodeFailed
from datastreamer.zkevm import decode, decode_batch, decode_data, encode, events, fixed
from datastreamer.zkevm.decoding import CODECS, as_json, kind_of
from datastreamer.zkevm.events import BatchType, BookMark, BookmarkType
from datastreamer.zkevm.schema import MESSAGES
from tests.zkevm.generated import changes, layouts, messages, mutated

KNOWN = [
    (2, 0xB0, "08011001", BookMark(BookmarkType.BATCH, 1)),
    (1, 0xB0, "010000000000000001", BookMark(BookmarkType.BATCH, 1)),
    (1, 0xB0, "000000000000000001", BookMark(BookmarkType.L2_BLOCK, 1)),
    (2, 1, "080110031809208b06", events.BatchStart(1, BatchType.INJECTED, 9, 779)),
    (3, 1, "08012a040a026869", events.BatchStart(1, debug="hi")),
    (3, 1, "2a00", events.BatchStart(debug="")),
    (3, 1, "10ffffffffffffffffff01", events.BatchStart(type=-1)),
    (3, 3, "0801100218012202c0de28ff01", events.Transaction(1, 2, True, b"\xc0\xde", 255)),
    (3, 4, "08071a02abcd", events.BatchEnd(7, b"", b"\xab\xcd")),
    (3, 5, "08073a01ff", events.UpdateGER(7, state_root=b"\xff")),
    (3, 6, "0801", events.L2BlockEnd(1)),
    (3, 6, "", events.L2BlockEnd(0)),
]


@pytest.mark.parametrize("version, type, data, event", KNOWN)
def test_known_bytes(version: int, type: int, data: str, event: Any) -> None:
    entry = Entry(7, type, bytes.fromhex(data))
    assert decode(entry, version=version) == event
    assert decode(entry, version=version).__class__ is event.__class__
    assert encode(event, version=version) == (type, bytes.fromhex(data))


@pytest.mark.parametrize("number", messages)
def test_every_message_comes_back(number: int) -> None:
    @given(messages[number], st.sampled_from([2, 3, 255]))
    def check(event: Any, version: int) -> None:
        kind, data = encode(event, version=version)
        assert kind == number
        found = decode_data(kind, data, version=version)
        assert found == event
        assert [value.__class__ for value in found] == [value.__class__ for value in event]
        assert decode_data(kind, memoryview(data), version=version) == event  # type: ignore[arg-type]

    check()


@pytest.mark.parametrize("number", layouts)
def test_every_fixed_layout_comes_back(number: int) -> None:
    @given(layouts[number])
    def check(event: Any) -> None:
        kind, data = encode(event, version=1)
        assert kind == number
        found = decode_data(kind, data, version=1)
        # A transaction whose own bytes look like a root and a length is taken for the newer.
        ambiguous = isinstance(event, fixed.L2Tx) and event.state_root is None
        assert found == event or (ambiguous and encode(found, version=1)[1] == data)

    check()


@given(st.integers(0, 6) | st.just(0xB0), st.binary(max_size=200), st.sampled_from([1, 2, 3]))
def test_any_bytes_are_an_event_or_an_error(type: int, data: bytes, version: int) -> None:
    error = None
    try:
        event = decode_data(type, data, version=version, number=5)
    except DecodeFailed as failed:
        error = failed
    if error is None:
        assert as_json(event)
        again = encode(event, version=version)[1]
        assert decode_data(type, again, version=version) == event
    else:
        assert error.number == 5
        assert str(error) == f"entry 5: {error.reason}"
        assert "\n" not in error.reason


def oracle(name: str, data: bytes) -> dict[str, Any] | None:
    """What the protobuf library reads; None where it refuses."""
    from google.protobuf.message import DecodeError

    from datastreamer.zkevm.proto import datastream_pb2

    try:
        message = getattr(datastream_pb2, name).FromString(data)
    except DecodeError:
        return None
    fields = {field.name: getattr(message, field.name) for field in message.DESCRIPTOR.fields}
    if "debug" in fields:
        fields["debug"] = message.debug.message if message.HasField("debug") else None
    if name != "BookMark":
        for field in message.DESCRIPTOR.fields:
            message.ClearField(field.name)
        fields["unknown"] = message.SerializeToString()
    return fields


def compare(number: int, data: bytes) -> None:
    name = MESSAGES[number].name
    expected = oracle(name, data)
    try:
        found = CODECS[number].read(data)
    except ValueError:
        assert expected is None
    else:
        assert found._asdict() == expected
        assert oracle(name, CODECS[number].write(found)) == expected


@pytest.mark.parametrize("number", messages)
def test_mutated_messages_as_the_protobuf_library_reads_them(number: int) -> None:
    pytest.importorskip("google.protobuf", reason="protobuf is not installed")

    @given(messages[number], changes)
    def check(event: Any, how: list[tuple[int, int, int]]) -> None:
        compare(number, mutated(CODECS[number].write(event), how))

    check()


@given(st.sampled_from(sorted(MESSAGES)), st.binary(max_size=60))
@example(1, bytes.fromhex("0b0c0801"))  # a group where a number is due
@example(1, bytes.fromhex("a301a4010801"))  # an unknown group
@example(1, bytes.fromhex("a301a301a401a4010801"))
@example(1, bytes.fromhex("a301ac010801"))  # a group that ends as another
@example(1, bytes.fromhex("a3010008a4010801"))  # field 0 inside one
@example(1, bytes.fromhex("a401"))
@example(1, bytes.fromhex("080180808080808080808001"))
@example(1, bytes.fromhex("08ffffffffffffffffff02"))
@example(1, bytes.fromhex("08ffffffffffffffffff8001"))
@example(1, bytes.fromhex("8880808000"))  # a tag longer than it need be
@example(1, bytes.fromhex("888080808000"))
@example(1, bytes.fromhex("0001"))  # field 0
@example(1, bytes.fromhex("2a030a01ff"))  # no UTF-8
@example(1, bytes.fromhex("2a020a05"))
@example(1, bytes.fromhex("2a03120161"))
@example(1, bytes.fromhex("2a030a01612a00"))  # debug twice: they merge
@example(1, bytes.fromhex("2a030a01612a030a0162"))
@example(1, bytes.fromhex("2affffffffffffffffff01"))
@example(1, bytes.fromhex("a201ffffffff0f"))
@example(1, bytes.fromhex("a10100000000000000"))
@example(1, bytes.fromhex("a50100000000"))
@example(2, bytes.fromhex("20ffffffffff01"))  # more than a u32
@example(1, bytes.fromhex("2a80808080808080808002"))  # a length of more than 64 bits
@example(1, bytes.fromhex("2a8080808000"))
@example(1, bytes.fromhex("2a808080808000"))
@example(1, bytes.fromhex("a20180808080808080808002"))
@example(1, bytes.fromhex("a001ffffffffffffffffff7f"))
@example(1, bytes.fromhex("8880808010"))  # a tag of more than 32 bits
@example(1, bytes.fromhex("888080801001"))
@example(1, bytes.fromhex("08010a01612803"))  # known numbers with other wire types
@example(1, bytes.fromhex("0d0100000009010000000000000008010b0c"))
@example(1, bytes.fromhex("2a050a01610801"))  # in debug, too
@example(2, bytes.fromhex("7805080182010161"))  # another schema's field 15, and 16
@example(0xB0, bytes.fromhex("080110011a0161"))
def test_any_bytes_as_the_protobuf_library_reads_them(number: int, data: bytes) -> None:
    pytest.importorskip("google.protobuf", reason="protobuf is not installed")
    compare(number, data)


def test_fields_that_have_no_name_are_written_again() -> None:
    # Another schema of nodes has a number as field 15, and more fields.
    data = bytes.fromhex("080778058201026869f80101")
    event = decode_data(2, data, version=3)
    assert event == events.L2Block(7, unknown=data[2:])
    assert encode(event, version=3) == (2, data)
    assert as_json(event)["unknown"] == "0x78058201026869f80101"
    known = decode_data(2, bytes.fromhex("08077a0207d0"), version=3)
    assert known == events.L2Block(7, base_fee=b"\x07\xd0")
    assert "unknown" not in as_json(known)
    assert decode_data(0xB0, bytes.fromhex("080110011a0161"), version=3) == BookMark(1, 1)


def test_many_fields_that_have_no_name_take_no_time() -> None:
    data = b"\xf8\x01\x01" * 300_000
    assert encode(decode_data(6, data, version=3), version=3) == (6, data)


def test_deep_groups_are_refused_in_time() -> None:
    deep = b"\xa3\x01" * 100_000
    with pytest.raises(DecodeFailed, match="unknown field 20 is cut off"):
        decode_data(6, deep, version=3)


@pytest.mark.parametrize(
    "version, type, data, message",
    [
        (3, 2, "0801100218", "entry 9: invalid L2Block: at byte 4: timestamp is cut off"),
        (3, 2, "3205", ("entry 9: invalid L2Block: at byte 0: l1_blockhash has a length of 5 "
         "bytes, but 0 follow")),
        (3, 2, "30", "entry 9: invalid L2Block: at byte 0: unknown field 6 is cut off"),
        (3, 1, "2a030a01ff", "entry 9: invalid BatchStart: at byte 4: debug.message is not UTF-8"),
        (3, 6, "00", "entry 9: invalid L2BlockEnd: at byte 0: no field begins there"),
        (3, 7, "", "entry 9: streams of version 3 have no event of type 7"),
        (1, 6, "", "entry 9: streams of version 1 have no event of type 6"),
        (1, 1, "00", ("entry 9: invalid StartL2Block: 1 bytes, "
         "but the layouts have 78, 110, 122, 142")),
        (1, 2, "ff0100000005aa", ("entry 9: invalid L2Tx: 7 bytes, which does not match "
         "its transaction's length")),
        (1, 3, "", "entry 9: invalid EndL2Block: 0 bytes, but the layout has 72"),
        (1, 4, "", "entry 9: invalid UpdateGER: 0 bytes, but the layouts have 102, 106"),
        (1, 0xB0, "020000000000000001", ("entry 9: invalid BookMark: its kind is 2, neither "
         "0 (a block) nor 1 (a batch)")),
    ],
)  # fmt: skip
def test_what_is_wrong_is_said(version: int, type: int, data: str, message: str) -> None:
    with pytest.raises(DecodeFailed) as caught:
        decode(Entry(9, type, bytes.fromhex(data)), version=version)
    assert str(caught.value) == message
    assert caught.value.number == 9
    assert isinstance(caught.value, DatastreamerError)


@pytest.mark.parametrize(
    "version, event, message",
    [
        (3, events.L2BlockEnd(-1), "L2BlockEnd.number must be 0 to 18446744073709551615, not -1"),
        (3, events.L2BlockEnd(1 << 64), "not 18446744073709551616"),
        (3, events.L2Block(delta_timestamp=1 << 32), "delta_timestamp must be 0 to 4294967295"),
        (3, events.L2Block(hash="0x00"), "L2Block.hash must be bytes, not '0x00'"),  # type: ignore[arg-type]
        (3, events.L2BlockEnd("7"), "L2BlockEnd.number must be a number, not '7'"),  # type: ignore[arg-type]
        (3, events.BatchEnd(debug=b"x"), "debug must be text or None"),  # type: ignore[arg-type]
        (3, events.BatchEnd(debug="\ud800"), "cannot be encoded as UTF-8"),
        (3, events.BatchStart(type=1 << 31), "type must be -2147483648 to 2147483647"),
        (3, events.Transaction(is_valid=2), "is_valid must be 0 to 1, not 2"),  # type: ignore[arg-type]
        (3, events.L2BlockEnd(1, b"\x08\x01"), "L2BlockEnd.unknown has a field that is known"),
        (3, events.L2BlockEnd(1, b"\xf8"), "at byte 2: no field begins there"),
        (3, events.L2BlockEnd(1, "x"), "L2BlockEnd.unknown must be bytes, not 'x'"),  # type: ignore[arg-type]
        (3, fixed.EndL2Block(1, bytes(32), bytes(32)), "version 3 have no .*fixed.EndL2Block"),
        (1, events.L2BlockEnd(1), "version 1 have no .*events.L2BlockEnd"),
        (1, BookMark(0, 1), r"BookMark.type must be 1 \(batch\) or 2 \(block\)"),
        (1, BookMark(77, 1), r"BookMark.type must be 1 \(batch\) or 2 \(block\)"),
        (1, BookMark(1, -1), "BookMark: "),
        (1, fixed.EndL2Block(1, b"", bytes(32)), "EndL2Block.hash must be 32 bytes, not b''"),
        (1, fixed.EndL2Block(-1, bytes(32), bytes(32)), "EndL2Block: "),
        (1, fixed.L2Tx(256, True, None, b""), "L2Tx: "),
        (1, fixed.StartL2Block(1, 1, 1, 1, None, None, bytes(32), bytes(20), 1, None),
         "no layout of StartL2Block has exactly these fields"),
    ],
)  # fmt: skip
def test_what_cannot_be_written(version: int, event: Any, message: str) -> None:
    with pytest.raises(BadEvent, match=message):
        encode(event, version=version)


def test_a_tuple_is_not_an_event() -> None:
    with pytest.raises(BadEvent, match=r"have no builtins\.tuple"):
        encode((1,), version=3)  # type: ignore[arg-type]


def test_for_json() -> None:
    block = events.BatchStart(1, BatchType.FORCED, debug="x")
    assert as_json(block) == {
        "number": 1,
        "type": "FORCED",
        "fork_id": 0,
        "chain_id": 0,
        "debug": "x",
    }
    assert as_json(events.BatchStart(type=77))["type"] == 77
    assert as_json(events.BatchEnd(1, b"\xab"))["local_exit_root"] == "0xab"


def test_kinds_by_version() -> None:
    assert kind_of(3, 1) == "EndL2Block"
    assert kind_of(3, 2) == "Transaction"
    assert kind_of(6, 1) is None
    assert kind_of(0xB0, 1) == kind_of(0xB0, 9) == "BookMark"


def test_the_real_stream(real_stream: object) -> None:
    from datastreamer import DataStream

    with DataStream.open(real_stream, read_only=True) as stream:  # type: ignore[arg-type]
        version = stream.header.version
        entries = {entry.number: entry for entry in stream.entries()}
        found = [pair for run in stream.batches() for pair in decode_batch(run, version=version)]
    assert len(found) == 34_723
    assert [number for number, _ in found] == list(entries)
    for number, event in found:
        entry = entries[number]
        assert encode(event, version=version) == (entry.type, entry.data)
        expected = oracle(type(event).__name__, entry.data)
        assert event._asdict() == expected
