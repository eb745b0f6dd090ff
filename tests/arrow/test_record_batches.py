"""Runs of entries to record batches: every value, entries that are no event, what is refused."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from datastreamer import EntryBatch, arrow
from datastreamer._codec import pack_entry, scan
from datastreamer.arrow.tables import TABLES
from datastreamer.errors import DecodeFailed, UsageError
from datastreamer.zkevm import L2Block, decode_data, encode
from tests.zkevm.generated import changes, layouts, messages, mutated

MOST = 2**63 - 1
TYPES = {table.type: name for name, table in TABLES.items()}
FIXED = {table.fixed_type: name for name, table in TABLES.items() if table.fixed_type is not None}


def batch_of(entries: list[tuple[int, bytes]], first: int = 5) -> EntryBatch:
    packed = b"".join(pack_entry(first + i, *entry) for i, entry in enumerate(entries))
    return scan(packed, first)


def plain(event: Any) -> dict[str, Any]:
    """An event's values as a row has them."""
    found = {
        name: int(value) if type(value) is not bool and isinstance(value, int) else value
        for name, value in event._asdict().items()
        if name != "unknown"
    }
    if "base_fee" in found:
        found["base_fee"] = int.from_bytes(found["base_fee"], "big")
    return found


def fits(event: Any) -> bool:
    values = plain(event)
    values.pop("block_gas_limit", None)
    return values.pop("base_fee", 0) < 10**38 and all(
        not isinstance(value, int) or value <= MOST for value in values.values()
    )


entries = st.lists(
    st.tuples(st.sampled_from([0, 1, 7, 0xB0, 2**31, 2**32 - 1]), st.binary(max_size=50)),
    max_size=20,
)


@given(entries, st.integers(0, 2**40))
def test_entries_come_back(given: list[tuple[int, bytes]], first: int) -> None:
    batch = batch_of(given, first)
    found = arrow.to_record_batch(batch)
    found.validate(full=True)
    assert found.schema == arrow.schema()
    assert [tuple(row.values()) for row in found.to_pylist()] == [
        (first + i, *entry) for i, entry in enumerate(given)
    ]
    part = arrow.to_record_batch(batch[1:], columns=["data", "number"])
    assert part.to_pylist() == [
        {"data": row["data"], "number": row["number"]} for row in found.to_pylist()[1:]
    ]
    chosen = arrow.to_record_batch(batch.select([7]))
    assert chosen.to_pylist() == [row for row in found.to_pylist() if row["type"] == 7]


examples = pytest.mark.parametrize("examples", [25, pytest.param(100, marks=pytest.mark.soak)])


@examples
@pytest.mark.parametrize("kind", messages)
def test_every_message_comes_back(kind: int, examples: int) -> None:
    table = TYPES[kind]

    @settings(max_examples=examples)
    @given(st.lists(messages[kind].filter(fits), max_size=12), st.sampled_from([2, 3]))
    def check(events: list[Any], version: int) -> None:
        # Entries of other types are in between.
        packed = [encode(event, version=version) for event in events]
        run = [entry for pair in packed for entry in (pair, (99, b"\xff"))]
        found = arrow.to_record_batch(batch_of(run), table, version=version)
        found.validate(full=True)
        assert found.schema == arrow.schema(table)
        absent = dict.fromkeys(found.schema.names)
        assert found.to_pylist() == [
            absent
            | {"entry_number": 5 + 2 * i}
            | ({"key": packed[i][1]} if table == "bookmarks" else {})
            | plain(event)
            for i, event in enumerate(events)
        ]

    check()


@examples
@pytest.mark.parametrize("kind", layouts)
def test_every_fixed_layout_comes_back(kind: int, examples: int) -> None:
    table = FIXED[kind]

    @settings(max_examples=examples)
    @given(st.lists(layouts[kind].filter(fits), max_size=8))
    def check(events: list[Any]) -> None:
        packed = [encode(event, version=1) for event in events]
        found = arrow.to_record_batch(batch_of(packed), table, version=1)
        found.validate(full=True)
        assert found.schema == arrow.schema(table)
        for i, (row, (_, data)) in enumerate(zip(found.to_pylist(), packed, strict=True)):
            # What the bytes mean: a transaction's may be of either generation.
            event = plain(decode_data(kind, data, version=1))
            if table == "transactions":
                event["im_state_root"] = event.pop("state_root")
            if table == "bookmarks":
                event["key"] = data
            expected = dict.fromkeys(row) | {"entry_number": 5 + i} | event
            assert row == expected

    check()


@examples
@pytest.mark.parametrize(
    "version, kind", [*((2, kind) for kind in messages), *((1, kind) for kind in layouts)]
)
def test_damaged_messages_are_judged_as_decode_does(kind: int, version: int, examples: int) -> None:
    made = messages if version == 2 else layouts
    table = TYPES[kind] if version == 2 else FIXED[kind]

    @settings(max_examples=examples)
    @given(st.lists(st.tuples(made[kind], changes), min_size=1, max_size=6))
    def check(given: list[tuple[Any, list[tuple[int, int, int]]]]) -> None:
        run = [
            (kind, mutated(encode(event, version=version)[1], change)) for event, change in given
        ]
        batch = batch_of(run)
        reported: list[str | None] = []
        rows = []
        for i, (_, data) in enumerate(run):
            try:
                event = decode_data(kind, data, version=version, number=5 + i)
            except DecodeFailed as error:
                reported.append(str(error))
                continue
            if fits(event):
                reported.append(None)
                values = plain(event)
                if version == 1 and table == "transactions":
                    values["im_state_root"] = values.pop("state_root")
                rows.append(values)
            else:
                reported.append("too large")
        found = arrow.to_record_batch(batch, table, version=version, on_error="null")
        found.validate(full=True)
        assert found.schema == arrow.schema(table, error=True)
        for row, text in zip(found.to_pylist(), reported, strict=True):
            if text == "too large":
                assert "the maximum of " in row["error"]
            else:
                assert row["error"] == text
            if text is not None:
                kept = {"entry_number", "error", "key"}
                assert all(value is None for name, value in row.items() if name not in kept)
        good = arrow.to_record_batch(batch, table, version=version, on_error="drop")
        good.validate(full=True)
        assert good.to_pylist() == [
            {name: value for name, value in row.items() if name != "error"}
            for row in found.to_pylist()
            if row["error"] is None
        ]
        assert [{name: row[name] for name in rows[0]} for row in good.to_pylist()] == rows
        worst = next((text for text in reported if text is not None), None)
        if worst is None:
            assert arrow.to_record_batch(batch, table, version=version).equals(good)
        else:
            with pytest.raises(DecodeFailed) as caught:
                arrow.to_record_batch(batch, table, version=version)
            assert worst in ("too large", str(caught.value))
            assert caught.value.number == 5 + reported.index(worst)

    check()


@given(st.binary(max_size=12))
@example(b"\xed\xa0\x80")
@example(b"\xf4\x90\x80\x80")
@example(b"\xf0\x8f\xbf\xbf")
@example(b"\xe0\x9f\xbf")
@example(b"\xc1\xbf")
@example("aé€😀\U0010ffff".encode())
@example("😀".encode()[:3])
@example(b"\xe2\x82a")
def test_text_is_what_python_takes_for_utf8(text: bytes) -> None:
    debug = bytes([10, len(text)]) + text
    batch = batch_of([(1, bytes([42, len(debug)]) + debug)])
    found = arrow.to_record_batch(batch, "batches", version=2, on_error="drop")
    try:
        expected = [text.decode()]
    except UnicodeDecodeError:
        expected = []
    assert found.column("debug").to_pylist() == expected


def test_columns_are_made_as_asked() -> None:
    event = decode_data(2, bytes.fromhex("0807100320e807"), version=2)
    run = batch_of([encode(event, version=2), (2, b"\x01")])
    found = arrow.to_record_batch(
        run, "blocks", version=2, columns=["error", "number", "fork_id"], on_error="null"
    )
    assert found.to_pylist() == [
        {"error": None, "number": 7, "fork_id": None},
        {
            "error": "entry 6: invalid L2Block: at byte 0: no field begins there",
            "number": None,
            "fork_id": None,
        },
    ]


@pytest.mark.parametrize("limit", [0, 2**63, 2**64 - 1])
@pytest.mark.parametrize(
    "fee", [0, 7, 2**64 - 1, 2**64, 2**120 - 1, 2**120, 10**38 - 1, 10**38, 2**127, 2**256 - 1]
)
def test_numbers_that_chains_fill_are_decimals(limit: int, fee: int) -> None:
    for zeros in (0, 3):
        wei = bytes(zeros) + fee.to_bytes((fee.bit_length() + 7) // 8, "big")
        run = batch_of([encode(L2Block(block_gas_limit=limit, base_fee=wei), version=3)])
        found = arrow.to_record_batch(run, "blocks", version=3, on_error="null").to_pylist()[0]
        if fee < 10**38:
            numbers = (found["block_gas_limit"], found["base_fee"], found["error"])
            assert numbers == (limit, fee, None)
        else:
            assert found["block_gas_limit"] is found["base_fee"] is None
            assert found["error"] == (
                "entry 5: base_fee has more than 38 digits, the maximum of its column"
            )


def test_numbers_are_signed() -> None:
    with pytest.raises(UsageError, match=f"entry number {MOST + 1} is above {MOST}"):
        arrow.to_record_batch(batch_of([(1, b"")], MOST + 1))
    with pytest.raises(UsageError, match=f"entry number {MOST + 1} is above {MOST}"):
        arrow.to_record_batch(batch_of([(1, b"")], MOST + 1), "batches", version=2)
    assert arrow.to_record_batch(batch_of([(1, b"")], MOST)).to_pylist()[0]["number"] == MOST


@pytest.mark.parametrize(
    "options, message",
    [
        ({"table": "logs"}, "there is no table 'logs': the tables are entries, blocks"),
        ({"table": "blocks"}, "the table blocks depends on the stream's version"),
        ({"columns": ["number", "hash"]}, "the table entries has no column 'hash'"),
        ({"columns": ["data", "data"]}, "asked for the same column twice"),
        ({"columns": []}, "name at least one column"),
        ({"on_error": "ignore"}, "on_error is 'raise', 'null' or 'drop', not 'ignore'"),
        ({"columns": ["error"]}, "has no column 'error'"),
    ],
)
def test_what_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        arrow.to_record_batch(batch_of([(1, b"")]), **options)


@pytest.mark.parametrize("name", arrow.NAMES)
def test_schemas_suit_spark(name: str) -> None:
    for field in arrow.schema(name, error=True):
        numbers = (pa.int64(), pa.int32(), pa.decimal128(20), pa.decimal128(38))
        assert field.type in (*numbers, pa.bool_(), pa.binary(), pa.string())
    first = arrow.schema(name).field(0)
    assert first.name == ("number" if name == "entries" else "entry_number")
    assert not first.nullable
