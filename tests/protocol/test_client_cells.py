"""Which packets are legal when: one case for each state of a connection and each packet."""

from __future__ import annotations

from typing import Any

import pytest

from datastreamer._codec import pack_entry
from datastreamer.errors import ProtocolViolation
from datastreamer.format import (
    PACKET_ANSWER,
    PACKET_BATCH,
    PACKET_CAPABILITIES,
    PACKET_CHANGE,
    PACKET_CHOSEN,
    PACKET_COMMIT,
    PACKET_ENTRY,
    PACKET_FOLLOW,
    PACKET_HEADER,
    PACKET_PAGE_SUMS,
    PACKET_RANGE_HASH,
    PACKET_RESULT,
    PACKET_TIMES,
)
from datastreamer.protocol import client
from datastreamer.protocol.client import ClientConnection
from datastreamer.protocol.commands import (
    BatchQuery,
    BookmarkQuery,
    CapabilitiesQuery,
    Command,
    CommitStart,
    EntryQuery,
    FilteredRead,
    FilteredStart,
    FilteredStartBookmark,
    FollowStart,
    HashQuery,
    HeaderQuery,
    KnownHistory,
    MarksQuery,
    RangeQuery,
    Start,
    StartBookmark,
    Stop,
    SumsQuery,
    TimeQuery,
)
from datastreamer.protocol.events import EntriesReceived, RangeReceived, ResultReceived
from datastreamer.protocol.following import FollowBegun, Reports
from datastreamer.protocol.messages import OK

PACKETS = [
    *(PACKET_RESULT, PACKET_ANSWER, PACKET_ENTRY, PACKET_HEADER, PACKET_BATCH, PACKET_CHOSEN),
    *(PACKET_CAPABILITIES, PACKET_RANGE_HASH, PACKET_PAGE_SUMS, PACKET_COMMIT, PACKET_FOLLOW),
    *(PACKET_CHANGE, PACKET_TIMES, 3),
]
FOLLOWING = FollowStart(0, KnownHistory(bytes(16), 0))
BEGUN = FollowBegun(Reports.ALL, bytes(16), 0, 0).pack()
RAW = {PACKET_RESULT, PACKET_ENTRY}

# The commands, what has arrived since, and the packets that are legal then.
STATES: dict[str, tuple[list[Command], bytes, set[int]]] = {
    "idle": ([], b"", set()),
    "a result is due": ([Start(0)], b"", {PACKET_RESULT}),
    "an entry's answer": ([EntryQuery(0)], OK, {PACKET_ANSWER}),
    "a bookmark's answer": ([BookmarkQuery(b"k")], OK, {PACKET_ANSWER}),
    "a header": ([HeaderQuery()], OK, {PACKET_HEADER}),
    "a batch": ([BatchQuery(0)], OK, {PACKET_BATCH}),
    "chosen entries": ([FilteredRead(0, (1,))], OK, {PACKET_CHOSEN}),
    "capabilities": ([CapabilitiesQuery()], OK, {PACKET_CAPABILITIES}),
    "a hash": ([HashQuery(0, 5)], OK, {PACKET_RANGE_HASH}),
    "checksums": ([SumsQuery(0)], OK, {PACKET_PAGE_SUMS}),
    "an entry at a time": ([TimeQuery(0)], OK, {PACKET_TIMES}),
    "times": ([MarksQuery(0)], OK, {PACKET_TIMES}),
    "a range": ([RangeQuery(b"a", b"b")], OK + (3).to_bytes(8, "big"), {PACKET_ENTRY}),
    "streaming": ([Start(0)], OK, RAW),
    "streaming from a bookmark": ([StartBookmark(b"k")], OK, RAW),
    "streaming, and a stop": ([Start(0), Stop()], OK, RAW),
    "streaming, and a range": (
        [Start(0), RangeQuery(b"a", b"b")],
        OK + OK + (3).to_bytes(8, "big"),
        RAW,
    ),
    "streaming with commits": ([CommitStart(0)], OK, {*RAW, PACKET_COMMIT}),
    "a report of changes": ([FOLLOWING], OK, {PACKET_RESULT, PACKET_FOLLOW}),
    "following": ([FOLLOWING], OK + BEGUN, {*RAW, PACKET_COMMIT, PACKET_CHANGE}),
    "filtered": ([FilteredStart(0, (1,))], OK, {PACKET_RESULT, PACKET_CHOSEN}),
    "filtered from a bookmark": (
        [FilteredStartBookmark(b"k", (1,))],
        OK,
        {PACKET_RESULT, PACKET_CHOSEN},
    ),
    "stopped": ([Start(0), Stop()], OK + OK, {PACKET_ENTRY}),
    "stopped, and a header": ([Stop(), HeaderQuery()], OK + OK, {PACKET_ENTRY, PACKET_HEADER}),
    "a range has ended": (
        [RangeQuery(b"a", b"b")],
        OK + (0).to_bytes(8, "big") + pack_entry(0, 1, b""),
        set(),
    ),
}


@pytest.mark.parametrize("packet", PACKETS)
@pytest.mark.parametrize("state", STATES)
def test_a_packet_is_legal_only_if_it_has_a_cell(state: str, packet: int) -> None:
    check(state, packet)


def check(state: str, packet: int) -> None:
    commands, arrived, legal = STATES[state]
    connection = ClientConnection(peer="stub:1")
    for command in commands:
        connection.request(command)
    if arrived:
        connection.feed(arrived)
    while connection.next_event() is not None:
        assert not connection.over
    assert connection.hungry
    connection.feed(bytes([packet]))
    if packet in legal:
        assert connection.next_event() is None
        assert not connection.over
    else:
        words = "that was not asked for|where the answer to .* was due"
        with pytest.raises(ProtocolViolation, match=words) as caught:
            connection.next_event()
        with pytest.raises(ProtocolViolation) as again:
            connection.next_event()
        assert again.value is caught.value


def test_a_run_is_not_of_a_range() -> None:
    """`next_run` returns what `next_event` would return as streamed entries."""
    connection = ClientConnection(peer="stub:1")
    connection.request(Start(0))
    connection.request(RangeQuery(b"a", b"b"))
    connection.feed(OK + OK + (3).to_bytes(8, "big") + pack_entry(3, 1, b""))
    assert isinstance(connection.next_event(), ResultReceived)
    assert isinstance(connection.next_event(), RangeReceived)
    assert connection.next_run() is None
    assert connection.outstanding == 1
    assert isinstance(connection.next_event(), EntriesReceived)
    assert connection.outstanding == 0


@pytest.mark.parametrize(
    "state, cells, packet, cell",
    [
        ("streaming", client._RAW, PACKET_COMMIT, ClientConnection._commit),
        ("a report of changes", client._FOLLOW, PACKET_CHANGE, ClientConnection._change),
        ("a header", client._BODIES[HeaderQuery], PACKET_ANSWER, ClientConnection._answer),
        ("stopped", client._STOPPED, PACKET_RESULT, ClientConnection._damaged),
    ],
)
def test_a_cell_too_many_is_caught(
    monkeypatch: pytest.MonkeyPatch, state: str, cells: Any, packet: int, cell: Any
) -> None:
    """Mutants of the tables."""
    check(state, packet)
    monkeypatch.setitem(cells, packet, cell)
    with pytest.raises(pytest.fail.Exception, match="DID NOT RAISE"):
        check(state, packet)
