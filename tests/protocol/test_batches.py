"""Reading in batches, as steps: each flow against a server in memory, without any socket."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from datastreamer._codec import Entry, EntryBatch
from datastreamer.errors import (
    BadFromBookmark,
    BadFromEntry,
    BadToBookmark,
    ConnectionLost,
    NotSupported,
    ProtocolViolation,
    UnknownEntry,
    UsageError,
)
from datastreamer.format import ENTRY_HEAD_SIZE, PAGE_SIZE
from datastreamer.protocol.batches import (
    BatchLimits,
    BatchReading,
    RangeReading,
    Read,
    not_supported,
    probe,
    read,
    wait_ms,
)
from datastreamer.protocol.client import ClientConnection
from datastreamer.protocol.commands import (
    BatchQuery,
    CapabilitiesQuery,
    EntryQuery,
    HeaderQuery,
    RangeQuery,
    Start,
)
from datastreamer.protocol.exchanges import Exchange
from datastreamer.protocol.messages import (
    NO_EXTENSIONS,
    OK,
    Capabilities,
    encode_batch_head,
    encode_range_head,
)
from tests.network.stub import Stub, key, sample

T = TypeVar("T")


class Wire:
    """A connection and the server at its other end; `size` cuts what the server sends."""

    def __init__(self, stub: Stub, size: int = 1 << 20, *, extensions: bool = True) -> None:
        self.stub = stub
        self.size = size
        self.connection = ClientConnection(peer="stub:1", extensions=extensions)
        self.under_way = bytearray()
        self.trips = 0

    def drive(self, flow: Exchange[T]) -> T:
        try:
            while True:
                data = next(flow)
                if data:
                    self.under_way += self.stub.receive(data)
                    self.trips += 1
                elif data is None:
                    piece = bytes(self.under_way[: self.size])
                    del self.under_way[: self.size]
                    assert piece or self.stub.closed, "the client waits for ever"
                    self.connection.feed(piece)
        except StopIteration as done:
            outcome: T = done.value
            return outcome

    def all(self, work: Any) -> Iterator[EntryBatch]:
        self.drive(work.begin(self.connection))
        while (batch := self.drive(work.advance())) is not None:
            yield batch


def entries_of(batches: Iterator[EntryBatch]) -> list[Entry]:
    return [entry for batch in batches for entry in batch]


# What a server can do.


@pytest.mark.parametrize("size", [1 << 20, 1, 13])
def test_capabilities_are_asked_for_once(size: int) -> None:
    wire = Wire(Stub(sample(5)), size)
    for _ in range(3):
        assert wire.drive(probe(wire.connection)) == Capabilities(3, b"s" * 16, 4, 1000, 100_000)
    assert wire.stub.seen == [CapabilitiesQuery(), HeaderQuery()]
    assert wire.trips == 1
    assert wire.connection.total_entries == 5


def test_a_later_revision_may_say_more() -> None:
    connection = ClientConnection()
    connection.request(CapabilitiesQuery())
    said = bytearray(Capabilities(3 | 1 << 60, b"s" * 16, 4, 5, 6, revision=9).pack() + b"more")
    said[1:5] = len(said).to_bytes(4, "big")
    connection.request(HeaderQuery())
    connection.feed(OK + said)
    [event] = iter(connection.next_event, None)
    assert event == Capabilities(3 | 1 << 60, b"s" * 16, 4, 5, 6, 9)
    assert event.batch_reads


def test_an_old_server_costs_one_round_trip_once() -> None:
    wire = Wire(Stub(sample(5), extensions="refused"))
    for _ in range(2):
        assert wire.drive(probe(wire.connection)) is NO_EXTENSIONS
        with pytest.raises(NotSupported, match="stub:1 does not support batches"):
            wire.drive(read(wire.connection, Read(0, fallback=False)))
    assert wire.trips == 1
    assert not wire.connection.outstanding


@pytest.mark.parametrize("extensions", ["closed", "fatal"])
def test_a_server_that_ends_the_connection_on_the_question(extensions: str) -> None:
    wire = Wire(Stub(sample(5), extensions=extensions))
    with pytest.raises(ConnectionLost):
        wire.drive(probe(wire.connection))
    assert wire.connection.probing


# One batch.


def test_one_batch() -> None:
    wire = Wire(Stub(sample(50)))
    batch = wire.drive(read(wire.connection, Read(3, 4)))
    assert list(batch) == sample(50)[3:7]
    assert len(wire.drive(read(wire.connection, Read(50)))) == 0
    assert wire.connection.total_entries == 50


@pytest.mark.parametrize("max_count", [0, 1, 3])
def test_a_gap_is_no_end(max_count: int) -> None:
    """Where single entries are asked for, and one in the middle is not found."""
    wire = Wire(Stub(sample(5), extensions="refused", header_total=8))
    with pytest.raises(UnknownEntry, match="no entry 5: the stream holds 0 to 7"):
        wire.drive(read(wire.connection, Read(5, max_count)))


@pytest.mark.parametrize("fallback", [False, True])
@pytest.mark.parametrize("extensions", ["known", "refused"])
def test_past_the_end(extensions: str, fallback: bool) -> None:
    wire = Wire(Stub(sample(5), extensions=extensions))
    if extensions == "refused" and not fallback:
        return
    # As far as the client knows, then as far as the server says.
    assert len(wire.drive(read(wire.connection, Read(5, fallback=fallback)))) == 0
    asked = wire.trips
    with pytest.raises(UnknownEntry, match="no entry 6: the stream holds 0 to 4"):
        wire.drive(read(wire.connection, Read(6, fallback=fallback)))
    assert wire.trips == asked + 1
    assert wire.stub.seen[-1] == HeaderQuery()
    with pytest.raises(BadFromEntry):
        wire.drive(read(wire.connection, Read(6, checked=False, fallback=fallback)))
    wire.stub.append(*sample(9)[5:])
    assert list(wire.drive(read(wire.connection, Read(6, fallback=fallback)))) == sample(9)[6:]


def test_the_wait_is_asked_for() -> None:
    wire = Wire(Stub(sample(5)))
    wire.drive(read(wire.connection, Read(5, 6, 7, wait_ms(1.5))))
    assert wire.stub.seen[-1] == BatchQuery(5, 6, 7, 1500)
    for seconds in (-1, 5e6, float("nan")):
        with pytest.raises(UsageError, match="wait must be 0 to 4294967 seconds"):
            wait_ms(seconds)


def expected(entries: list[Entry], wanted: Read, most: int, size: int) -> list[Entry]:
    found: list[Entry] = []
    left = min(wanted.max_bytes or size, size)
    for entry in entries[wanted.from_entry :][: min(wanted.max_count or most, most)]:
        left -= ENTRY_HEAD_SIZE + len(entry.data)
        if found and left < 0:
            break
        found.append(entry)
    return found


@settings(deadline=None, max_examples=80)
@given(
    number=st.integers(0, 130),
    count=st.integers(0, 140),
    size=st.integers(0, 20_000),
    limits=st.tuples(st.integers(1, 200), st.integers(1, 20_000)),
    cut=st.sampled_from([1, 17, 1000, 1 << 20]),
)
def test_with_fallback_the_result_is_the_same_from_any_server(
    number: int, count: int, size: int, limits: tuple[int, int], cut: int
) -> None:
    entries = sample(120)
    results = []
    for extensions in ("known", "refused"):
        stub = Stub(
            entries,
            extensions=extensions,
            max_batch_count=limits[0],
            max_batch_bytes=limits[1],
        )
        wire = Wire(stub, cut)
        wanted = Read(number, count, size)
        try:
            results.append(list(wire.drive(read(wire.connection, wanted))))
        except UnknownEntry:
            results.append([])
            assert number > len(entries)
        assert not wire.connection.outstanding
    assert results[0] == expected(entries, wanted, *limits)
    # One that has no limits of its own gives as much or more, within those of the request.
    assert results[1] == expected(entries, wanted, 1 << 30, PAGE_SIZE)


def test_single_reads_can_be_forced() -> None:
    wire = Wire(Stub(sample(30)), extensions=False)
    with pytest.raises(NotSupported):
        wire.drive(read(wire.connection, Read(0, fallback=False)))
    assert list(wire.drive(read(wire.connection, Read(3, 5)))) == sample(30)[3:8]
    assert all(type(event) in (EntryQuery, HeaderQuery) for event in wire.stub.seen)


# Many batches.


@settings(deadline=None, max_examples=150)
@given(
    start=st.integers(0, 120),
    length=st.none() | st.integers(0, 120),
    limits=st.builds(BatchLimits, st.integers(0, 50), st.integers(0, 20_000), st.integers(1, 5)),
    own=st.tuples(st.integers(1, 60), st.integers(1, 20_000)),
    cut=st.sampled_from([1, 30, 60, 1000, 1 << 20]),
    extensions=st.sampled_from(["known", "known", "refused"]),
)
def test_all_entries_in_order_whatever_the_limits(
    start: int,
    length: int | None,
    limits: BatchLimits,
    own: tuple[int, int],
    cut: int,
    extensions: str,
) -> None:
    stub = Stub(sample(120), max_batch_count=own[0], max_batch_bytes=own[1], extensions=extensions)
    wire = Wire(stub, cut)
    stop = None if length is None else min(start + length, 120)
    due = sample(120)[start:stop]
    work = BatchReading(start, stop, limits)
    assert entries_of(wire.all(work)) == due
    assert wire.drive(work.end(None))
    assert not wire.connection.outstanding
    assert wire.drive(read(wire.connection, Read(0, 1)))[0] == sample(1)[0]


def test_the_next_is_asked_for_before_the_last_is_answered() -> None:
    stub = Stub(sample(100))
    wire = Wire(stub)
    batches = wire.all(BatchReading(0, None, BatchLimits(10, 0, 3)))
    next(batches)
    asked = [event for event in stub.seen if isinstance(event, BatchQuery)]
    assert [query.from_entry for query in asked] == [0, 10, 20]
    next(batches)
    assert stub.seen[-1] == BatchQuery(30, 10, 100_000)


def test_where_bytes_are_the_limit_the_head_says_what_to_ask_next() -> None:
    """Nothing is asked in vain, and the next request is on its way before the entries are."""
    stub = Stub(sample(100), max_batch_bytes=2_000)
    wire = Wire(stub, 500)
    asked: list[tuple[int, int]] = []
    for batch in wire.all(BatchReading(0, None, BatchLimits(0, 0, 2))):
        queries = [event for event in stub.seen if isinstance(event, BatchQuery)]
        asked.append((queries[-1].from_entry, batch.next_number))
    starts = [query.from_entry for query in stub.seen if isinstance(query, BatchQuery)]
    assert len(starts) == len(set(starts)) == len(asked)
    # For all but the last the request behind it was sent before it had come as a whole.
    assert all(last == behind for last, behind in asked[:-1])


def test_at_the_end_it_waits_for_what_is_committed_later() -> None:
    stub = Stub(sample(10))
    wire = Wire(stub)
    work = BatchReading(8, 13, BatchLimits(2))
    assert len(next(wire.all(work))) == 2
    stub.commits = iter([[], sample(14)[10:]])
    assert wire.drive(work.advance()).next_number == 12
    assert stub.seen[-2:] == [BatchQuery(10, 2, 1 << 20, 1000)] * 2
    batch = wire.drive(work.advance())
    assert (batch.first_number, batch.next_number) == (12, 13)
    assert wire.drive(work.advance()) is None


def test_a_stream_that_went_back_is_a_lost_connection() -> None:
    stub = Stub(sample(100))
    wire = Wire(stub)
    batches = wire.all(BatchReading(0, None, BatchLimits(10, 0, 1)))
    next(batches)
    del stub.entries[5:]
    with pytest.raises(ConnectionLost, match="the stream of stub:1 was truncated"):
        next(batches)


def test_limits_that_cannot_be() -> None:
    for requests in (0, 65):
        with pytest.raises(UsageError, match=f"requests must be 1 to 64, not {requests}"):
            BatchLimits(requests=requests)
    with pytest.raises(UsageError, match="the limits of a batch must be 0 to"):
        BatchLimits(max_count=-1)
    with pytest.raises(UsageError, match="the limits of a batch must be 0 to"):
        BatchLimits(max_bytes=1 << 32)
    with pytest.raises(UsageError, match=r"limits 0 to .*wait_ms 4294967296"):
        ClientConnection().request(BatchQuery(0, 0, 0, 1 << 32))


# Ranges.


@pytest.mark.parametrize("size", [1 << 20, 1, 29])
def test_a_range(size: int) -> None:
    wire = Wire(Stub(sample(55)), size)
    for first, last in [(10, 30), (0, 50), (20, 20)]:
        found = entries_of(wire.all(RangeReading(key(first), key(last))))
        assert found == sample(55)[first : last + 1]
        assert not wire.connection.outstanding
    assert wire.drive(read(wire.connection, Read(0, 1)))[0] == sample(1)[0]


def test_a_range_that_is_refused_leaves_the_connection() -> None:
    wire = Wire(Stub(sample(55)))
    with pytest.raises(BadFromBookmark):
        wire.drive(RangeReading(b"none", key(10)).begin(wire.connection))
    for last in (b"none", key(10)):
        with pytest.raises(BadToBookmark):
            wire.drive(RangeReading(key(20), last).begin(wire.connection))
    assert len(entries_of(wire.all(RangeReading(key(10), key(20))))) == 11


@pytest.mark.parametrize("extensions", [True, False])
def test_a_server_that_does_not_know_ranges_is_never_sent_them(extensions: bool) -> None:
    """It would read the bookmarks as its next command."""
    wire = Wire(Stub(sample(55), extensions="refused"), extensions=extensions)
    with pytest.raises(NotSupported, match="does not support ranges between bookmarks"):
        wire.drive(RangeReading(key(10), key(20)).begin(wire.connection))
    assert not any(isinstance(event, RangeQuery) for event in wire.stub.seen)
    assert list(wire.drive(read(wire.connection, Read(3, 2)))) == sample(55)[3:5]


def test_a_range_that_was_left_is_read_to_its_end() -> None:
    wire = Wire(Stub(sample(55)), 100)
    work = RangeReading(key(0), key(50))
    next(wire.all(work))
    assert not wire.drive(work.end(50))
    assert wire.drive(work.end(None))
    assert not wire.connection.outstanding


# What servers must not answer.


def hear(connection: ClientConnection, answer: bytes, size: int) -> None:
    for at in range(0, len(answer), size):
        connection.feed(answer[at : at + size])
        while connection.next_event() is not None:
            pass


def packed(*numbers: int) -> bytes:
    return b"".join(sample(100)[number].pack() for number in numbers)


def batch_of(count: int, first: int, total: int, payload: bytes) -> bytes:
    return encode_batch_head(count, first, total, len(payload)) + payload


@pytest.mark.parametrize(
    "answer, words",
    [
        (batch_of(4, 5, 100, packed(5, 6, 7, 8)), "4 entries in 94 bytes in answer to"),
        (batch_of(2, 6, 100, packed(6, 7)), "entries 6 to 8 of 100 for a batch from entry 5"),
        (batch_of(2, 5, 6, packed(5, 6)), "entries 5 to 7 of 6 for"),
        (batch_of(0, 5, 6, b""), "entries 5 to 5 of 6 for a batch from entry 5"),
        (batch_of(2, 5, 100, packed(5)), "2 entries in 22 bytes in answer to"),
        (batch_of(1, 5, 100, packed(5, 6)), "2 entries in a batch of 1"),
        (batch_of(2, 5, 100, packed(5) + bytes(18)), "1 entries in a batch of 2"),
        (batch_of(1, 5, 100, packed(5)[:-1]), "0 entries in a batch of 1"),
        (batch_of(1, 5, 100, packed(7)), "invalid entry: entry number 7 where 5 is due"),
        (batch_of(0, 5, 5, packed(5)), "1 entries in a batch of 0"),
        (encode_batch_head(3, 5, 100, PAGE_SIZE + 1), "3 entries in 1048577 bytes in answer to"),
        (OK + b"\xfb" + bytes(24), "a batch of 0 bytes"),
        (OK + Capabilities().pack(), "a packet of capabilities that was not asked for"),
        (OK + sample(6)[5].pack(0xFE), "an answer that was not asked for"),
    ],
)
def test_answers_that_are_none(answer: bytes, words: str) -> None:
    for size in (1 << 20, 1):
        connection = ClientConnection(peer="stub:1")
        connection.request(BatchQuery(5, 3, 1000))
        with pytest.raises(ProtocolViolation, match=words):
            hear(connection, answer, size)


@pytest.mark.parametrize(
    "answer, words",
    [
        (encode_range_head(3) + packed(1, 2, 3, 4), "entry 4 in a range that ends at 3"),
        (encode_range_head(3) + packed(4), "entry 4 in a range that ends at 3"),
        (encode_range_head(3) + packed(1, 3), "entry number 3 where 2 is due"),
        (encode_range_head(3) + packed(1) + OK, "where the answer to the range"),
    ],
)
def test_ranges_that_are_none(answer: bytes, words: str) -> None:
    connection = ClientConnection(peer="stub:1")
    connection.request(RangeQuery(b"a", b"b"))
    connection.request(Start(0))
    with pytest.raises(ProtocolViolation, match=words):
        hear(connection, answer, 1 << 20)


def test_batches_and_capabilities_without_a_request() -> None:
    for packet in (batch_of(1, 5, 100, packed(5))[11:], Capabilities().pack()):
        with pytest.raises(ProtocolViolation, match="not asked for"):
            hear(ClientConnection(), packet, 1 << 20)


def test_the_error_of_a_server_without_them() -> None:
    assert "request single entries" in str(not_supported(ClientConnection(), "batches"))
