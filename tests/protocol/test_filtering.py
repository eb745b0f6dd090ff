"""Commands and frames of filtered readings: exact bytes, and what is refused."""

from __future__ import annotations

import struct
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from datastreamer._codec import EntryBatch, scan, scan_chosen
from datastreamer.errors import (
    BadBookmark,
    BadEntryType,
    BadPosition,
    CorruptEntries,
    ProtocolViolation,
    UsageError,
)
from datastreamer.format import U64_MAX
from datastreamer.position import Chosen, Position
from datastreamer.protocol.batches import asked_for
from datastreamer.protocol.client import ClientConnection
from datastreamer.protocol.commands import (
    Command,
    FilteredRead,
    FilteredStart,
    FilteredStartBookmark,
    decode_command,
    encode_command,
)
from datastreamer.protocol.events import BatchReceived, EntriesReceived
from datastreamer.protocol.messages import OK, Capabilities, encode_chosen_head
from datastreamer.protocol.server import Drop, ServerConnection
from tests.codec.generated import damaged, exactly, kinds, thorough, usual
from tests.oracle import pack


@pytest.mark.parametrize(
    "command, packed",
    [
        (
            FilteredRead(7, (1, 0xB0), 9, 3, 4, 5),
            struct.pack(">QQQQIIIIII", 0x1002, 1, 7, 9, 3, 4, 5, 2, 1, 0xB0),
        ),
        (
            FilteredRead(0, (2,)),
            struct.pack(">QQQQIIIII", 0x1002, 1, 0, 2**64 - 1, 0, 0, 0, 1, 2),
        ),
        (FilteredStart(7, (2,)), struct.pack(">QQQII", 0x1003, 1, 7, 1, 2)),
        (
            FilteredStartBookmark(b"key", (2, 3)),
            struct.pack(">QQI", 0x1004, 1, 3) + b"key" + struct.pack(">III", 2, 2, 3),
        ),
    ],
)
def test_commands(command: Command, packed: bytes) -> None:
    assert encode_command(command, 1) == packed
    connection = ServerConnection(1)
    for byte in packed[:-1]:
        connection.receive(bytes([byte]))
        assert connection.next_event() is None
    connection.receive(packed[-1:] + packed)
    assert [connection.next_event() for _ in range(3)] == [command, command, None]


def test_the_head_of_a_frame() -> None:
    due = struct.pack(">BIIQQQQ", 0xFA, 41 + 100, 2, 3, 9, 11, 4)
    assert encode_chosen_head(2, 3, 9, 11, 4, 100) == due


@pytest.mark.parametrize(
    "command, error",
    [
        (FilteredRead(-1, (1,)), UsageError),
        (FilteredRead(2**64, (1,)), UsageError),
        (FilteredRead(0, (1,), stop=2**64), UsageError),
        (FilteredRead(0, (1,), max_bytes=2**32), UsageError),
        (FilteredRead(0, ()), UsageError),
        (FilteredRead(0, tuple(range(65))), UsageError),
        (FilteredStart(0, (2**32,)), BadEntryType),
        (FilteredStart(2**64, (1,)), UsageError),
        (FilteredStartBookmark(b"", (1,)), BadBookmark),
        (FilteredStartBookmark(bytes(17), (1,)), BadBookmark),
    ],
)
def test_commands_that_cannot_be_sent(command: Command, error: type[Exception]) -> None:
    with pytest.raises(error):
        encode_command(command, 1)


@pytest.mark.parametrize("count", [0, 65, 2**32 - 1])
def test_an_invalid_count_is_reported_as_soon_as_it_is_received(count: int) -> None:
    connection = ServerConnection(1)
    connection.receive(struct.pack(">QQQI", 0x1003, 1, 0, count))
    event = connection.next_event()
    assert isinstance(event, Drop)
    assert event.reason == f"a selection of {count} clauses, not of 1 to 64"


@pytest.mark.parametrize("length", [0, 17])
def test_a_bookmark_that_is_none_too(length: int) -> None:
    connection = ServerConnection(1)
    connection.receive(struct.pack(">QQI", 0x1004, 1, length))
    assert isinstance(connection.next_event(), Drop)


types = st.sets(kinds, min_size=1, max_size=64).map(lambda found: tuple(sorted(found)))
commands: st.SearchStrategy[Command] = st.one_of(
    st.builds(
        FilteredRead,
        st.integers(0, U64_MAX),
        types,
        st.integers(0, U64_MAX),
        *[st.integers(0, 2**32 - 1)] * 3,
    ),
    st.builds(FilteredStart, st.integers(0, U64_MAX), types),
    st.builds(FilteredStartBookmark, st.binary(min_size=1, max_size=16), types),
)


@given(st.lists(commands, min_size=1, max_size=3), st.integers(1, 40))
@usual
def test_what_is_sent_is_what_arrives(sent: list[Command], piece: int) -> None:
    data = b"".join(encode_command(command, 1) for command in sent)
    connection = ServerConnection(1)
    seen = []
    for at in range(0, len(data), piece):
        connection.receive(data[at : at + piece])
        while (event := connection.next_event()) is not None:
            seen.append(event)
    assert seen == sent


def test_types_in_any_order_and_more_than_once() -> None:
    data = struct.pack(">QIIIIII", 5, 5, 9, 1, 9, 1, 3)
    assert decode_command(0x1003, data, 0) == (FilteredStart(5, (1, 3, 9)), len(data))


def test_what_a_server_can_be_asked_for() -> None:
    able = Capabilities()
    assert asked_for(able, None) is asked_for(able, ()) is asked_for(able, tuple(range(65))) is None
    assert asked_for(able, (1, 3)) == (1, 3)
    assert asked_for(able, tuple(range(64))) == tuple(range(64))
    assert asked_for(Capabilities(1), (1, 3)) is None


# Entries with gaps.


@st.composite
def frames(draw: st.DrawFn) -> tuple[bytes, int, int, list[tuple[int, int, bytes]]]:
    """Entries under rising numbers, and from where to where they were chosen."""
    first = draw(st.integers(0, 300) | st.integers(0, 2**64 - 100_000))
    steps = draw(st.lists(st.tuples(st.integers(0, 50), kinds, st.binary(max_size=40)), max_size=8))
    number, found = first, []
    for step, kind, data in steps:
        found.append((number + step, kind, data))
        number += step + 1
    packed = b"".join(pack(*entry) for entry in found)
    return packed, first, number + draw(st.integers(0, 9)), found


def listed(batch: EntryBatch) -> list[tuple[int, int, bytes]]:
    return [(entry.number, entry.type, entry.data) for entry in batch]


@given(frames(), st.binary(max_size=5))
@usual
def test_entries_with_gaps(
    made: tuple[bytes, int, int, list[tuple[int, int, bytes]]], around: bytes
) -> None:
    packed, first, following, due = made
    start, end = len(around), len(around) + len(packed)
    batch = scan_chosen(around + packed + around, first, following, start=start, end=end)
    assert listed(batch) == due
    assert (batch.first_number, batch.next_number) == (first, following)
    assert (batch.start, batch.end, batch.nbytes) == (start, end, len(packed))
    assert list(batch.numbers) == [number for number, _, _ in due]
    assert batch.packed() == packed
    assert not batch.more
    assert (batch[:9].first_number, batch[:9].next_number) == (first, following)
    # A part of it.
    for number in {first, following, *(number + d for number, _, _ in due for d in (0, 1))}:
        before, since = batch.before(number), batch.since(number)
        assert listed(before) == [entry for entry in due if entry[0] < number]
        assert listed(since) == [entry for entry in due if entry[0] >= number]
        assert (before.first_number, before.next_number) == (first, number)
        assert (since.first_number, since.next_number) == (number, following)


def test_parts_of_a_run_without_gaps() -> None:
    run = scan(b"".join(pack(n, n % 3, b"") for n in range(10, 20)))
    for number in range(25):
        before, since = run.before(number), run.since(number)
        inside = min(max(number, 10), 20)
        assert listed(before) == listed(run[: inside - 10])
        assert listed(since) == listed(run[inside - 10 :])
        assert (before.first_number, before.next_number) == (10, inside)
        assert (since.first_number, since.next_number) == (inside, 20)
    chosen = run.select({1})
    assert (chosen.before(14).next_number, len(chosen.before(14))) == (14, 2)
    assert (chosen.since(14).first_number, chosen.since(14)[0].number) == (14, 16)


@given(st.data(), frames())
@thorough
def test_damage(data: st.DataObject, made: tuple[bytes, int, int, list]) -> None:
    """Against the same, said with `struct` alone."""
    packed, first, following, _ = made
    content = data.draw(damaged(packed))
    expected: object
    try:
        batch = scan_chosen(exactly(content), first, following, start=0, end=len(content))
    except CorruptEntries:
        expected = None
    else:
        expected = listed(batch)
        assert b"".join(pack(*entry) for entry in listed(batch)) == content
        places = [number for number, _, _ in listed(batch)]
        assert places == sorted(set(places))
        assert all(first <= number < following for number in places)
    again, at, due = [], 0, first
    while at < len(content):
        if len(content) - at < 17:
            break
        packet, length, kind, number = struct.unpack_from(">BIIQ", content, at)
        if packet != 2 or not 17 <= length <= min(1 << 20, len(content) - at):
            break
        if not due <= number < following:
            break
        again.append((number, kind, content[at + 17 : at + length]))
        due, at = number + 1, at + length
    assert expected == (again if at == len(content) else None)


# Positions of filtered readings.


def test_a_position_says_whose_trail_it_is() -> None:
    position = Position(90, bytes(24), None, Chosen((1, 0xB0), 20, (20, 30, 89)))
    assert Position.from_json(position.to_json()) == position
    empty = Position(90, b"", None, Chosen((3,), 90))
    assert Position.from_json(empty.to_json()) == empty


@pytest.mark.parametrize(
    "chosen",
    [
        Chosen((), 0, (1,)),
        Chosen((2, 1), 0, (1,)),
        Chosen((-1,), 0, (1,)),
        Chosen((2**32,), 0, (1,)),
        Chosen((1,), 0, ()),
        Chosen((1,), 0, (1, 2)),
        Chosen((1,), 2, (1,)),
        Chosen((1,), -1, (1,)),
        Chosen((1,), 0, (9,)),
    ],
)
def test_positions_that_are_none(chosen: Chosen) -> None:
    with pytest.raises(BadPosition, match="invalid trail"):
        Position(9, bytes(8), None, chosen)


@pytest.mark.parametrize(
    "reported",
    [
        '{"next_entry": 9, "trail": "", "types": [1]}',
        '{"next_entry": 9, "trail": "", "types": [1], "first_entry": "x"}',
        '{"next_entry": 9, "trail": "", "types": 1, "first_entry": 0}',
        '{"next_entry": 9, "trail": "", "types": [true], "first_entry": 0, "steps": []}',
        '{"next_entry": 9, "trail": "", "types": [1], "first_entry": 0, "steps": [0.5]}',
    ],
)
def test_json_that_is_none(reported: str) -> None:
    with pytest.raises(BadPosition, match="not a position"):
        Position.from_json(reported)


# Any bytes at all, to the client's side.


def heard(pieces: list[bytes], command: Command) -> list[object]:
    """What a client makes of the bytes, which nothing but a violation ends."""
    connection = ClientConnection(1, extensions=False)
    connection.request(command)
    events: list[object] = []
    for piece in pieces:
        try:
            connection.feed(piece)
            while (event := connection.next_event()) is not None:
                if isinstance(event, EntriesReceived | BatchReceived):
                    events.append((listed(event.batch), event.batch.next_number))
                else:
                    events.append(type(event).__name__)
        except ProtocolViolation:
            return [*events, "violation"]
    return events


@given(st.data(), st.lists(frames(), min_size=1, max_size=3), st.booleans())
@thorough
def test_any_bytes_of_a_server(
    data: st.DataObject, parts: list[tuple[bytes, int, int, list]], streamed: bool
) -> None:
    types = (1, 2, 0xB0)
    sent = OK
    number = parts[0][1]
    for _, first, following, found in parts:
        # Each continues where the last one ended.
        stop = following - first + number
        moved = [pack(n - first + number, types[k % 3], d) for n, k, d in found]
        size = sum(map(len, moved))
        head = encode_chosen_head(len(moved), number, stop, 2**64 - 2, 4, size)
        sent += b"".join((head, *moved))
        number = stop
    command: Command = (
        FilteredStart(parts[0][1], types) if streamed else FilteredRead(parts[0][1], types)
    )
    content = data.draw(st.just(sent) | damaged(sent))
    places = data.draw(st.lists(st.integers(0, len(content)), max_size=6).map(sorted))
    bounds = [0, *places, len(content)]
    whole = heard([content] if content else [], command)
    assert heard([content[a:b] for a, b in pairwise(bounds) if b > a], command) == whole
    assert heard([bytes([byte]) for byte in content], command) == whole
