"""Streamings that report changes, hashes of ranges, and checksums of pages: bytes, and what each
side makes of them."""

from __future__ import annotations

import struct
from collections.abc import Callable
from itertools import pairwise

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from datastreamer._codec import Entry, pack_entry
from datastreamer.errors import EntriesDamaged, ProtocolViolation, UsageError
from datastreamer.format import PAGE_SIZE, TYPE_BOOKMARK, U64_MAX
from datastreamer.protocol import exchanges
from datastreamer.protocol.client import ClientConnection
from datastreamer.protocol.commands import (
    CommitStart,
    FollowStart,
    HashQuery,
    KnownHistory,
    Start,
    SumsQuery,
    encode_command,
)
from datastreamer.protocol.events import EntriesReceived, Event, ResultReceived
from datastreamer.protocol.exchanges import Streaming
from datastreamer.protocol.following import (
    ChangeReceived,
    FollowBegun,
    RangeHash,
    RangeSum,
    Reports,
    SumsFound,
    encode_truncation,
    encode_update,
)
from datastreamer.protocol.messages import OK, Capabilities, encode_commit, encode_result
from datastreamer.protocol.server import Refuse, ServerConnection

ID = b"stream id of 16."
BEGUN = FollowBegun(Reports.ALL, ID, 3, 9)
DIGEST = bytes(range(16))
SUMS = SumsFound(ID, 4, (RangeSum(5, 9, DIGEST), RangeSum(9, 12, ID)), RangeSum(12, 14, DIGEST))


def packed(*numbers: int, data: bytes = b"data", kind: int = 7) -> bytes:
    return b"".join(pack_entry(number, kind, data) for number in numbers)


def follows(from_entry: int = 5) -> ClientConnection:
    connection = ClientConnection(1, peer="stub:1")
    connection.request(FollowStart(from_entry, KnownHistory(ID, 3)))
    connection.feed(OK)
    assert isinstance(connection.next_event(), ResultReceived)
    return connection


def begun(from_entry: int = 5) -> ClientConnection:
    connection = follows(from_entry)
    connection.feed(BEGUN.pack())
    assert connection.next_event() == BEGUN
    return connection


def events(connection: ClientConnection) -> list[Event]:
    return list(iter(connection.next_event, None))


def test_bytes() -> None:
    """As `docs/RELAY.md` has them."""
    start = encode_command(FollowStart(7, KnownHistory(ID, 8)), 1)
    assert start == struct.pack(">QQQ16sQ", 0x1006, 1, 7, ID, 8)
    query = encode_command(HashQuery(7, 9, 1 << 20), 1)
    assert query == struct.pack(">QQQQI", 0x1007, 1, 7, 9, 1 << 20)
    assert BEGUN.pack() == struct.pack(">BIB16sQQ", 0xF5, 38, 1, ID, 3, 9)
    update = struct.pack(">BIQQQ", 0xF6, 29 + 21, 4, 7, 8) + packed(7)
    assert encode_update(4, packed(7)) == update
    assert encode_truncation(4, 7) == struct.pack(">BIQQQ", 0xF6, 29, 4, 7, U64_MAX)
    hashed = RangeHash(7, 9, 4, DIGEST)
    assert hashed.pack() == struct.pack(">BIQQQ16s", 0xF4, 45, 7, 9, 4, DIGEST)
    query = encode_command(SumsQuery(7, 4096), 1)
    assert query == struct.pack(">QQQI", 0x1009, 1, 7, 4096)
    head = struct.pack(">BI16sQI", 0xF3, 33 + 3 * 32, ID, 4, 2)
    sums = [
        struct.pack(">QQ16s", *each) for each in ((5, 9, DIGEST), (9, 12, ID), (12, 14, DIGEST))
    ]
    assert SUMS.pack() == head + b"".join(sums)
    nothing = SumsFound(ID, 4, ())
    assert nothing.pack() == struct.pack(">BI16sQI", 0xF3, 65, ID, 4, 0) + bytes(32)
    assert nothing.ranges == ()
    assert Capabilities().features & 128
    assert Capabilities().page_sums
    assert not Capabilities(127).page_sums
    assert str(SumsQuery(7)) == "checksums from entry 7 on"
    assert Capabilities().features & 32
    assert Capabilities().changes
    assert not Capabilities(31).changes
    assert (
        str(FollowStart(7, KnownHistory(ID, 8))) == "Start from entry 7, with changes since epoch 8"
    )
    assert str(HashQuery(7, 9)) == "a hash of entries 7 to before 9"


@pytest.mark.parametrize(
    "command",
    [
        FollowStart(1 << 64),
        FollowStart(0, KnownHistory(ID, -1)),
        HashQuery(-1, 7),
        HashQuery(7, 1 << 64),
        HashQuery(7, 9, 1 << 32),
        SumsQuery(-1),
        SumsQuery(1 << 64),
        SumsQuery(7, 1 << 32),
    ],
)
def test_what_cannot_be_asked(command: FollowStart | HashQuery | SumsQuery) -> None:
    with pytest.raises(UsageError):
        encode_command(command, 1)


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_a_server_takes_both(size: int) -> None:
    connection = ServerConnection(1)
    commands = [
        *(HashQuery(7, 9, 5), FollowStart(7, KnownHistory(ID, 8)), HashQuery(7, 9)),
        *(SumsQuery(7, 9), HashQuery(1, 2), SumsQuery(0)),
    ]
    sent = b"".join(encode_command(command, 1) for command in commands)
    found: list[object] = []
    for at in range(0, len(sent), size):
        connection.receive(sent[at : at + size])
        while (event := connection.next_event()) is not None:
            found.append(event)
            if isinstance(event, FollowStart):
                connection.started()
    # The last one came while it streams.
    assert found == [*commands[:2], Refuse(1, close=True)]


# A client.

UPDATE = ChangeReceived(4, 3, Entry(3, 7, b"data"))
SENT = (
    encode_update(4, packed(3))
    + encode_commit(8)
    + packed(5, 6)
    + encode_update(6, packed(6))
    + packed(7)
    + encode_truncation(9, 8)
)


@given(places=st.lists(st.integers(0, len(SENT)), max_size=8))
@example(places=list(range(len(SENT))))
def test_changes_come_in_order_between_entries(places: list[int]) -> None:
    """However the bytes are cut, and with bytes behind them."""
    connection = begun()
    found: list[object] = []
    data = SENT + encode_commit(9)
    for begin, end in pairwise(sorted({0, len(data), *places})):
        connection.feed(data[begin:end])
        for event in events(connection):
            if isinstance(event, EntriesReceived):
                found += [entry.number for entry in event.batch]
            else:
                found.append(event)
    six = ChangeReceived(6, 6, Entry(6, 7, b"data"))
    assert found == [UPDATE, 5, 6, six, 7, ChangeReceived(9, 8, None)]
    assert connection.streamed.commit_ahead == 9


@pytest.mark.parametrize("connect", [follows, begun])
def test_next_run_leaves_changes_to_next_event(
    connect: Callable[[], ClientConnection],
) -> None:
    connection = connect()
    connection.feed(encode_truncation(4, 3))
    assert connection.next_run() is None


@pytest.mark.parametrize(
    "data",
    [
        BEGUN.pack(),  # twice
        encode_update(3, packed(4)),  # an epoch that is known
        encode_update(2, packed(4)),
        encode_truncation(0, 4),
        encode_update(4, packed(4)) + encode_update(4, packed(3)),
        encode_update(4, packed(4, kind=TYPE_BOOKMARK, data=b"key")),
        encode_update(4, packed(4) + b"x"),
        encode_update(4, packed(4) + packed(5)),
        encode_update(4, packed(4)[:-1]),
        encode_update(4, b"\0" * 21),
        struct.pack(">BIQQQ", 0xF6, 29 + 21, 4, 7, 8) + packed(6),  # another number
        struct.pack(">BIQQQ", 0xF6, 29 + 21, 4, 7, 9) + packed(7),
        struct.pack(">BIQQQ", 0xF6, 29 + 21, 4, 7, 7) + packed(7),
        struct.pack(">BIQQQ", 0xF6, 29, 4, 7, 8),  # without the entry
        struct.pack(">BIQQQ", 0xF6, 29 + 21, 4, 7, U64_MAX) + packed(7),
        struct.pack(">BIQQQ", 0xF6, 28, 4, 7, 8),
        struct.pack(">BIQQQ", 0xF6, 29 + PAGE_SIZE + 1, 4, 7, 8),
    ],
)
def test_what_is_no_change(data: bytes) -> None:
    connection = begun()
    connection.feed(data)
    with pytest.raises(ProtocolViolation, match="stub:1 sent "):
        events(connection)
    with pytest.raises(ProtocolViolation):
        connection.next_event()


@pytest.mark.parametrize(
    "data",
    [
        encode_update(4, packed(4)),  # before the beginning
        struct.pack(">BIB16sQQ", 0xF5, 38, 3, ID, 3, 9),
        struct.pack(">BIB16sQQ", 0xF5, 39, 1, ID, 3, 9),
        struct.pack(">BIB16sQQ", 0xF5, 38, 1, ID, 9, 3),
    ],
)
def test_what_is_no_beginning(data: bytes) -> None:
    connection = follows()
    connection.feed(data)
    with pytest.raises(ProtocolViolation):
        events(connection)


@pytest.mark.parametrize("command", [Start(5), CommitStart(5)])
@pytest.mark.parametrize("data", [encode_truncation(4, 3), BEGUN.pack(), DIGEST])
def test_only_followers_receive_changes(command: Start | CommitStart, data: bytes) -> None:
    connection = ClientConnection(1)
    connection.request(command)
    connection.feed(OK + data)
    assert isinstance(connection.next_event(), ResultReceived)
    with pytest.raises(ProtocolViolation):
        connection.next_event()


def test_a_streaming_hands_out_a_run_of_nothing_for_each_change() -> None:
    connection = ClientConnection(1)
    streaming = Streaming(5, commits=True, known=KnownHistory(ID, 3))
    for due in streaming.begin(connection):
        if due is None:
            connection.feed(OK + BEGUN.pack() if streaming.begun is None else b"")
    assert streaming.begun == BEGUN
    connection.feed(SENT)
    found: list[object] = []
    while True:
        flow = streaming.advance()
        try:
            assert next(flow) is None
            break
        except StopIteration as done:
            batch = done.value
        found += [entry.number for entry in batch]
        if not batch:
            found.append(streaming.changes.popleft().epoch)
        assert not streaming.changes
    assert found == [4, 5, 6, 6, 7, 9]


# Hashes.


def asked(answer: bytes, size: int = 1 << 20) -> RangeHash:
    connection = ClientConnection(1)
    flow = exchanges.ask(connection, HashQuery(7, 9, 100), RangeHash)
    pieces = iter([answer[at : at + size] for at in range(0, len(answer), size)])
    try:
        while True:
            if next(flow) is None:
                connection.feed(next(pieces))
    except StopIteration as done:
        found: RangeHash = done.value
        return found


@pytest.mark.parametrize("size", [1, 1000])
@pytest.mark.parametrize("end", [8, 9])
def test_a_hash(size: int, end: int) -> None:
    hashed = RangeHash(7, end, 4, DIGEST)
    assert asked(OK + hashed.pack(), size) == hashed


@pytest.mark.parametrize(
    "hashed", [RangeHash(6, 9, 4, DIGEST), RangeHash(7, 7, 4, DIGEST), RangeHash(7, 10, 4, DIGEST)]
)
def test_a_hash_of_something_else(hashed: RangeHash) -> None:
    with pytest.raises(ProtocolViolation):
        asked(OK + hashed.pack())


def test_a_hash_that_was_not_asked_for() -> None:
    connection = begun()
    connection.feed(RangeHash(7, 9, 4, DIGEST).pack())
    with pytest.raises(ProtocolViolation, match="a hash that was not asked for"):
        events(connection)
    connection = ClientConnection(1)
    connection.request(HashQuery(7, 9))
    connection.feed(encode_result(3))
    refused = connection.next_event()
    assert isinstance(refused, ResultReceived)
    assert refused.number == 3


# Checksums of pages.


def found_for(query: SumsQuery, answer: bytes, size: int = 1 << 20) -> SumsFound:
    connection = ClientConnection(1, peer="stub:1")
    connection.request(query)
    for at in range(0, len(answer), size):
        connection.feed(answer[at : at + size])
        event = connection.next_event()
    assert isinstance(event, SumsFound)
    assert connection.outstanding == 0
    return event


@pytest.mark.parametrize("size", [1, 7, 1 << 20])
def test_checksums(size: int) -> None:
    for number in (5, 8, 9, 13, 14):
        assert found_for(SumsQuery(number), OK + SUMS.pack(), size) == SUMS
    assert found_for(SumsQuery(5, 2), OK + SUMS.pack(), size) == SUMS
    nothing = SumsFound(bytes(16), 0, ())
    assert found_for(SumsQuery(0), OK + nothing.pack(), size) == nothing
    only_tail = SumsFound(ID, 4, (), RangeSum(3, 9, DIGEST))
    assert found_for(SumsQuery(9), OK + only_tail.pack(), size) == only_tail


def test_many_checksums() -> None:
    pages = tuple(RangeSum(at, at + 1, DIGEST) for at in range(4096))
    many = SumsFound(ID, 0, pages, RangeSum(4096, 4097, ID))
    assert found_for(SumsQuery(0), OK + many.pack(), 10_000) == many
    one_more = SumsFound(ID, 0, (*pages, RangeSum(4096, 4097, ID)))
    with pytest.raises(ProtocolViolation, match=r"checksums of 131137 bytes|checksums of 131169"):
        found_for(SumsQuery(0), OK + one_more.pack())


@pytest.mark.parametrize(
    ("query", "sums"),
    [
        (SumsQuery(4), SUMS),
        (SumsQuery(15), SUMS),
        (SumsQuery(5, 1), SUMS),
        (SumsQuery(5), SumsFound(ID, 4, (RangeSum(5, 5, DIGEST),))),
        (SumsQuery(5), SumsFound(ID, 4, (RangeSum(5, 9, DIGEST), RangeSum(8, 12, ID)))),
        (SumsQuery(5), SumsFound(ID, 4, (RangeSum(5, 9, DIGEST),), RangeSum(10, 12, ID))),
    ],
)
def test_checksums_of_something_else(query: SumsQuery, sums: SumsFound) -> None:
    with pytest.raises(ProtocolViolation, match="checksum"):
        found_for(query, OK + sums.pack())


def test_a_packet_of_checksums_that_is_not_one() -> None:
    whole = SUMS.pack()
    for length in (0, 32, 64, len(whole) - 32, len(whole) + 32, 2**32 - 1):
        packed = whole[:1] + length.to_bytes(4, "big") + whole[5:] + bytes(64)
        with pytest.raises(ProtocolViolation):
            found_for(SumsQuery(5), OK + packed)
    connection = begun()
    connection.feed(whole)
    with pytest.raises(ProtocolViolation, match="a packet of checksums that was not"):
        events(connection)
    with pytest.raises(ProtocolViolation, match="a packet of checksums that was not"):
        found_for(HashQuery(5, 6), OK + whole)  # type: ignore[arg-type]


def test_checksums_that_a_server_refuses() -> None:
    connection = ClientConnection(1)
    flow = exchanges.ask(connection, SumsQuery(5), SumsFound)
    next(flow)
    connection.feed(encode_result(27, "Damaged: page 3"))
    with pytest.raises(EntriesDamaged, match=r"checksums from entry 5 on: Damaged: page 3"):
        next(flow)


# Anything at all.

GOOD = [
    SENT,
    encode_update(4, packed(4)),
    encode_truncation(5, 2),
    encode_commit(8),
    packed(5, 6, 7),
    BEGUN.pack(),
    RangeHash(7, 9, 4, DIGEST).pack(),
    SUMS.pack(),
]


@settings(max_examples=500, deadline=None)
@given(
    parts=st.lists(st.sampled_from(GOOD) | st.binary(max_size=60), max_size=5),
    flips=st.lists(st.tuples(st.integers(0, 1 << 16), st.integers(1, 255)), max_size=4),
    places=st.lists(st.integers(0, 1 << 16), max_size=6),
    query=st.sampled_from([None, HashQuery(7, 9), SumsQuery(7)]),
)
def test_any_bytes(
    parts: list[bytes],
    flips: list[tuple[int, int]],
    places: list[int],
    query: HashQuery | SumsQuery | None,
) -> None:
    """One clear error, or good events; the same however the bytes are cut."""
    data = bytearray(b"".join(parts))
    for at, bits in flips:
        if data:
            data[at % len(data)] ^= bits

    def played(bounds: list[int]) -> tuple[list[object], bool]:
        connection = begun()
        if query is not None:
            connection = ClientConnection(1, peer="stub:1")
            connection.request(query)
            connection.feed(OK)
        found: list[object] = []
        try:
            for begin, end in pairwise(bounds):
                connection.feed(bytes(data[begin:end]))
                for event in iter(connection.next_event, None):
                    if isinstance(event, EntriesReceived):
                        found += list(event.batch)
                    elif isinstance(event, ChangeReceived):
                        assert event.epoch > 3
                        assert event.entry is None or event.entry.type != TYPE_BOOKMARK
                        found.append(event)
                    else:
                        found.append(event)
        except ProtocolViolation:
            return found, True
        return found, False

    assert played(sorted({0, len(data)})) == played(
        sorted({0, len(data), *(place % (len(data) + 1) for place in places)})
    )
