"""Where commits end, reported among the entries: what a client accepts and rejects."""

from __future__ import annotations

import struct
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from datastreamer._codec import pack_entry
from datastreamer.errors import ConnectionLost, ProtocolViolation, UsageError
from datastreamer.format import Header
from datastreamer.protocol.client import ClientConnection
from datastreamer.protocol.commands import Command, CommitStart, Start, Stop, encode_command
from datastreamer.protocol.events import EntriesReceived, ResultReceived
from datastreamer.protocol.messages import OK, Capabilities, encode_commit
from datastreamer.protocol.resume import Resumable
from datastreamer.protocol.server import Refuse, ServerConnection


def packed(*numbers: int) -> bytes:
    return b"".join(pack_entry(number, 7, b"data") for number in numbers)


def streaming(command: Command) -> ClientConnection:
    connection = ClientConnection(1)
    connection.request(command)
    connection.feed(OK)
    assert isinstance(connection.next_event(), ResultReceived)
    return connection


def events(connection: ClientConnection) -> list[object]:
    return list(iter(connection.next_event, None))


def test_bytes() -> None:
    assert encode_command(CommitStart(7), 1) == struct.pack(">QQQ", 0x1005, 1, 7)
    assert encode_commit(9) == struct.pack(">BIQ", 0xF7, 13, 9)
    assert str(CommitStart(7)) == "Start from entry 7, with commits"
    assert Capabilities().features & 16
    assert Capabilities().commits
    assert not Capabilities(15).commits
    with pytest.raises(UsageError):
        encode_command(CommitStart(1 << 64), 1)


def test_a_server_takes_it_as_a_start() -> None:
    connection = ServerConnection(1)
    connection.receive(encode_command(CommitStart(7), 1) * 2)
    assert connection.next_event() == CommitStart(7)
    connection.started()
    assert connection.next_event() == Refuse(1, close=True)


@given(
    sizes=st.lists(st.integers(1, 5), min_size=1, max_size=6),
    places=st.lists(st.integers(0, 2000), max_size=8),
    start=st.integers(0, 1 << 40),
)
def test_the_end_of_a_commit_is_known_with_its_first_entry(
    sizes: list[int], places: list[int], start: int
) -> None:
    """However the bytes are cut; no batch goes past an end."""
    connection = streaming(CommitStart(start))
    assert connection.streamed.commit_ahead == start
    data, ends, total = b"", [], start
    for size in sizes:
        data += encode_commit(total + size) + packed(*range(total, total + size))
        total += size
        ends.append(total)
    bounds = sorted({0, len(data), *(place % len(data) for place in places)})
    reached, seen = start, []
    for begin, end in pairwise(bounds):
        connection.feed(data[begin:end])
        while (event := connection.next_event()) is not None:
            assert isinstance(event, EntriesReceived)
            assert event.batch.first_number == reached
            reached = event.batch.next_number
            assert connection.streamed.commit_ahead == min(end for end in ends if end >= reached)
            seen += [reached] if reached == connection.streamed.commit_ahead else []
    assert seen == ends
    assert connection.total_entries == total


@pytest.mark.parametrize(
    "data",
    [
        packed(5),  # none was reported
        encode_commit(5),
        encode_commit(4),
        encode_commit(7) + packed(5, 6, 7),
        encode_commit(7) + packed(5) + encode_commit(8),
        encode_commit(7) + encode_commit(8),
        struct.pack(">BIQI", 0xF7, 17, 7, 0),
    ],
)
def test_what_is_no_such_streaming(data: bytes) -> None:
    connection = streaming(CommitStart(5))
    connection.feed(data)
    with pytest.raises(ProtocolViolation):
        events(connection)


def test_only_clients_that_request_them_receive_reports() -> None:
    connection = streaming(Start(5))
    assert connection.streamed.commit_ahead is None
    connection.feed(encode_commit(7))
    with pytest.raises(ProtocolViolation, match="that was not asked for"):
        connection.next_event()


def test_another_start_on_the_same_connection() -> None:
    connection = streaming(CommitStart(0))
    connection.feed(encode_commit(2) + packed(0))
    assert isinstance(connection.next_event(), EntriesReceived)
    connection.request(Stop())
    connection.feed(OK)
    assert isinstance(connection.next_event(), ResultReceived)
    connection.request(Start(0))
    connection.feed(OK + packed(0, 1))
    assert isinstance(connection.next_event(), ResultReceived)
    assert isinstance(connection.next_event(), EntriesReceived)
    assert connection.streamed.commit_ahead is None


@pytest.mark.parametrize("promised", [5, 6, (1 << 64) - 1])
def test_a_commit_that_was_reported_and_does_not_come(promised: int) -> None:
    """A server that says it holds no more, and is silent, is nevertheless considered lost."""
    work, connection = Resumable(0, careful=False, commits=True), ClientConnection(1)
    header = Header(2, 137, 1, 4096, 5)
    probed = OK + Capabilities().pack() + OK + header.pack()
    sent = iter([probed, OK, encode_commit(promised) + packed(0, 1, 2, 3, 4)])
    for flow in (work.begin(connection), work.advance()):
        for due in flow:
            if due is None:
                connection.feed(next(sent))
    assert work.next_number == 5
    work.silent(header, "server", 10)
    if promised == 5:
        work.silent(header, "server", 10)
        return
    with pytest.raises(
        ConnectionLost, match=f"holds 5 entries, reported a commit to entry {promised}"
    ):
        work.silent(header, "server", 10)
