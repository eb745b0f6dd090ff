"""Selections of entries by type and by bytes at a fixed place in their data, against an oracle."""

from __future__ import annotations

import struct
from collections.abc import Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from datastreamer._codec import scan
from datastreamer._filtered import Choice
from datastreamer.errors import BadEntryType, UsageError
from datastreamer.position import Chosen, Position
from datastreamer.protocol.commands import (
    FilteredRead,
    FilteredStart,
    FilteredStartBookmark,
    decode_command,
    encode_command,
)
from datastreamer.selection.clauses import (
    Clause,
    Where,
    normal,
    read_prefix,
    selected,
    within,
)
from tests.network.model import pack

FIRST, PAGE = 4096, 1 << 20


def oracle(clauses: Iterable[Clause], kind: int, data: bytes) -> bool:
    """Whether an entry is wanted, as the contract says it."""
    for clause in clauses:
        wanted, offset, prefix = Where(clause) if isinstance(clause, int) else clause
        held = data[offset : offset + len(prefix)]
        if kind == wanted and (not prefix or held == prefix):
            return True
    return False


kinds = st.sampled_from([1, 2, 66, 0xB0, 2**32 - 1])
# Few letters and lengths: clauses and data meet.
letters = st.lists(st.sampled_from([0, 1, 0xFF]), max_size=6).map(bytes)
wheres = st.builds(Where, kinds, st.integers(0, 4), letters)
clauses_ = st.lists(kinds | wheres, min_size=1, max_size=9)
entries_ = st.lists(st.tuples(kinds, letters), max_size=30)


@given(clauses=clauses_, entries=entries_)
def test_the_normal_form_selects_the_same(
    clauses: list[Clause], entries: list[tuple[int, bytes]]
) -> None:
    found = selected(where=clauses)
    assert found is not None
    assert selected(where=found) == found == selected(where=reversed(clauses))
    for kind, data in entries:
        assert oracle(found, kind, data) == oracle(clauses, kind, data)


@given(clauses=clauses_, entries=entries_)
def test_a_batch(clauses: list[Clause], entries: list[tuple[int, bytes]]) -> None:
    packed = b"".join(pack(5 + at, *entry) for at, entry in enumerate(entries))
    batch = scan(packed, 5)
    wanted = [5 + at for at, entry in enumerate(entries) if oracle(clauses, *entry)]
    assert list(batch.select(clauses).numbers) == wanted


@settings(max_examples=60)
@given(
    clauses=clauses_,
    entries=st.lists(st.tuples(kinds, letters), min_size=1, max_size=30),
    cuts=st.lists(st.integers(1, 80), min_size=1, max_size=10),
)
def test_a_page_in_buffers_of_any_size(
    clauses: list[Clause], entries: list[tuple[int, bytes]], cuts: list[int]
) -> None:
    """What decides about an entry may be in the next buffer."""
    packed = b"".join(pack(at, *entry) for at, entry in enumerate(entries))
    choice, at, number, found, turn = Choice(clauses), 0, 0, b"", 0
    size = cuts[0]
    while at < len(packed):
        end, after, _, data, run, full, padding = choice.gather(
            packed[at : at + size],
            number,
            file_offset=FIRST + at,
            committed=len(packed) - at,
            stop=2**64 - 1,
            most_entries=2**32 - 1,
            most_bytes=2**30,
            alone=not found,
        )
        assert data is not None
        assert run == -1
        assert not full
        assert not padding
        turn += 1
        # A buffer that does not hold what is needed grows, as one that begins with the entry does.
        size = size + 40 if after == number else cuts[turn % len(cuts)]
        at, number, found = at + end, after, found + data
    wanted = [pack(at, *entry) for at, entry in enumerate(entries) if oracle(clauses, *entry)]
    assert found == b"".join(wanted)


def test_many_prefixes_with_one_first_byte() -> None:
    keys = [bytes([1, at, at ^ 3]) for at in range(64)]
    where = [Where(2, 2, key) for key in keys]
    choice = Choice(where)
    assert len(choice.where) == 64
    data = [b"\0\3" + key for key in keys] + [b"\0\3\1\x40\x43", b"\0\3\1", b"", b"\0\3\1\5"]
    packed = b"".join(pack(at, 2, each) for at, each in enumerate(data))
    assert list(scan(packed, 0).select(where).numbers) == list(range(64))


def test_more_clauses_than_a_server_takes() -> None:
    where = [Where(1, 0, struct.pack(">H", at)) for at in range(300)]
    packed = b"".join(pack(at, 1, struct.pack(">H", at)) for at in range(400))
    assert list(scan(packed, 0).select(where).numbers) == list(range(300))
    near = within(normal(where))
    assert near == (Where(1, 0, b"\0"), Where(1, 0, b"\1"))
    assert within(tuple(range(65))) == tuple(range(65))
    assert within(normal([Where(at, 0, b"\1") for at in range(70)]), 70) != ()
    with pytest.raises(UsageError):
        Choice(where)


@given(clauses=clauses_, entries=entries_, most=st.integers(1, 4))
def test_fewer_clauses_select_no_fewer_entries(
    clauses: list[Clause], entries: list[tuple[int, bytes]], most: int
) -> None:
    near = within(selected(where=clauses) or (), most)
    assert len(near) <= max(most, len({it if isinstance(it, int) else it.type for it in near}))
    for kind, data in entries:
        assert oracle(near, kind, data) or not oracle(clauses, kind, data)


@pytest.mark.parametrize(
    ("arguments", "error", "says"),
    [
        ({"types": [1], "where": [Where(1)]}, UsageError, "name one of them"),
        ({"where": []}, UsageError, "selects nothing"),
        ({"where": [Where(-1)]}, BadEntryType, "not -1"),
        ({"where": [Where(2**32, 0, b"a")]}, BadEntryType, "not 4294967296"),
        ({"where": [Where(1, -1, b"a")]}, UsageError, "offset"),
        ({"where": [Where(1, 65536, b"a")]}, UsageError, "offset"),
        ({"where": [Where(1, 0, bytes(256))]}, UsageError, "prefix"),
        ({"where": [Where(1, 0, "0x01")]}, UsageError, "prefix"),  # type: ignore[arg-type]
        ({"types": ["1"]}, BadEntryType, "not '1'"),
    ],
)
def test_what_selects_nothing(arguments: dict, error: type[Exception], says: str) -> None:  # type: ignore[type-arg]
    with pytest.raises(error, match=says):
        selected(**arguments)


# The wire.

CLAUSES = (2, Where(0x10, 2, b"\0"), Where(0x10, 2, b"\1abc"), Where(0xB0, 0, b"k"))
ENCODED = b"".join(
    [
        struct.pack(">I", 4),
        struct.pack(">IHB", 2, 0, 0),
        struct.pack(">IHB", 0x10, 2, 1) + b"\0",
        struct.pack(">IHB", 0x10, 2, 4) + b"\1abc",
        struct.pack(">IHB", 0xB0, 0, 1) + b"k",
    ]
)
REQUESTS = [
    (
        FilteredRead(7, CLAUSES, 9, 3, 4, 5),
        struct.pack(">QQQQIII", 0x100A, 1, 7, 9, 3, 4, 5) + ENCODED,
    ),
    (FilteredStart(7, CLAUSES), struct.pack(">QQQ", 0x100B, 1, 7) + ENCODED),
    (FilteredStartBookmark(b"key", CLAUSES), struct.pack(">QQI", 0x100C, 1, 3) + b"key" + ENCODED),
]


@pytest.mark.parametrize(("command", "encoded"), REQUESTS)
def test_the_bytes_of_a_request(command: FilteredRead, encoded: bytes) -> None:
    assert encode_command(command, 1) == encoded
    number = int.from_bytes(encoded[:8], "big")
    assert decode_command(number, encoded + b"more", 16) == (command, len(encoded))
    for size in range(16, len(encoded)):
        assert decode_command(number, encoded[:size], 16) is None


@pytest.mark.parametrize("count", [0, 65, 2**32 - 1])
def test_a_number_of_clauses_that_no_selection_has(count: int) -> None:
    with pytest.raises(ValueError, match="clauses, not of 1 to 64"):
        decode_command(0x100B, struct.pack(">QI", 0, count), 0)


def test_a_selection_of_types_has_the_older_form() -> None:
    assert encode_command(FilteredStart(7, (2,)), 1) == struct.pack(">QQQII", 0x1003, 1, 7, 1, 2)
    # A server accepts both.
    data = struct.pack(">QI", 7, 2) + struct.pack(">IHB", 5, 9, 0) + struct.pack(">IHB", 2, 0, 0)
    assert decode_command(0x100B, data, 0) == (FilteredStart(7, (2, 5)), len(data))


# Positions.


def test_a_position_in_a_selection() -> None:
    where = (3, Where(0x10, 2, b"\0"))
    position = Position(9, bytes(range(16)), None, Chosen(where, 2, (4, 7)))
    text = position.to_json()
    assert Position.from_json(text) == position
    assert '"clauses": [3, [16, 2, "00"]]' in text
    # A program that knows no clauses continues without a comparison.
    assert '"trail"' not in text
    assert '"types"' not in text
    typed = Position(9, bytes(8), None, Chosen((3,), 2, (4,))).to_json()
    assert '"types": [3]' in typed
    assert '"trail"' in typed


@pytest.mark.parametrize(
    "where",
    [(), (3, 3), (4, 3), (Where(3, 0, b"a"), 3), (Where(3, 70_000, b"a"),), (Where(-1, 0, b"a"),)],
)
def test_a_position_with_another_form(where: tuple[Clause, ...]) -> None:
    with pytest.raises(ValueError, match="invalid trail"):
        Position(9, bytes(8), None, Chosen(where, 2, (4,)))


class HexBytes(bytes):
    """As programs for Ethereum have them."""

    def hex(self, *args: object) -> str:
        return "0x" + super().hex()


def test_bytes_of_another_class() -> None:
    where = selected(where=[Where(16, 2, HexBytes(b"\1"))])
    assert where == (Where(16, 2, b"\1"),)
    batch = scan(pack(0, 16, b"\0\0\1"), 0)
    assert len(batch.select([Where(16, 2, HexBytes(b"\1"))])) == 1
    text = Position(1, bytes(8), None, Chosen(where, 0, (0,))).to_json()
    assert Position.from_json(text).to_json() == text


@pytest.mark.parametrize("where", [Where(16, 2, b"\1"), [(2,)], [None], [2.0], [b"\1"], "0x01"])
def test_what_is_no_list_of_clauses(where: object) -> None:
    with pytest.raises(UsageError, match="where is a list"):
        selected(where=where)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "found"),
    [("0x01", (0, b"\1")), ("2:0X01ff", (2, b"\1\xff")), ("65535:0x00", (65535, b"\0"))],
)
def test_prefixes_as_text(text: str, found: tuple[int, bytes]) -> None:
    assert read_prefix(text) == found


@pytest.mark.parametrize(
    "text",
    [
        *("", "0x", "0x1", "01", "2:", "2:01", ":0x01", "-1:0x01", "65536:0x01", "1:2:0x01"),
        *("0x01 02", "0x01\r\n", " 0x01", "0x01\n", f"{'9' * 5000}:0x01", "0x" + "00" * 256),
        "\u0661:0x01",
    ],
)
def test_texts_that_are_no_prefix(text: str) -> None:
    with pytest.raises(UsageError, match=r"a prefix is \[OFFSET:\]0xHEX"):
        read_prefix(text)
