"""The exchanges without any I/O: which bytes go out when, and what the caller gets."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import TypeVar

import pytest

from datastreamer._codec import Entry, pack_entry
from datastreamer.errors import (
    AlreadyStarted,
    AlreadyStopped,
    BadFromEntry,
    ConnectionLost,
    PeerError,
    ProtocolViolation,
    UnknownEntry,
    UsageError,
)
from datastreamer.format import Header
from datastreamer.protocol import exchanges
from datastreamer.protocol.client import ClientConnection
from datastreamer.protocol.commands import (
    Command,
    EntryQuery,
    HeaderQuery,
    Start,
    StartBookmark,
    Stop,
    encode_command,
)
from datastreamer.protocol.exchanges import Exchange, Lookup, Streaming
from datastreamer.protocol.messages import NOT_FOUND, OK, encode_answer, encode_result

T = TypeVar("T")
HEADER = OK + Header(1, 2, 1, 4096, 40).pack()
END = b""


def packed(*numbers: int) -> bytes:
    return b"".join(pack_entry(number, 7, b"data") for number in numbers)


def answers(*numbers: int) -> bytes:
    return b"".join(OK + encode_answer(number, 7, b"data") for number in numbers)


def sent(*commands: Command) -> bytes:
    return b"".join(encode_command(command, 1) for command in commands)


class Peer:
    """Drives exchanges: keeps what they send, and feeds them what the server says, in order."""

    def __init__(self, *says: bytes) -> None:
        self.connection = ClientConnection(1)
        self.says = list(says)
        self.heard = b""

    def drive(self, flow: Exchange[T]) -> T:
        self.heard = b""
        try:
            while True:
                data = next(flow)
                if data is None:
                    self.connection.feed(self.says.pop(0))
                else:
                    self.heard += data
        except StopIteration as done:
            outcome: T = done.value
            return outcome

    def begun(self, work: exchanges.Work[T]) -> exchanges.Work[T]:
        self.drive(work.begin(self.connection))
        return work


def numbers(entries: Sequence[Entry] | None) -> list[int]:
    assert entries is not None
    return [entry.number for entry in entries]


def test_a_query_is_one_request_and_one_answer() -> None:
    peer = Peer(HEADER[:20], HEADER[20:], answers(3))
    assert peer.drive(exchanges.header(peer.connection)).total_entries == 40
    assert peer.heard == sent(HeaderQuery())
    assert peer.drive(exchanges.entry(peer.connection, 3)).number == 3
    assert peer.heard == sent(EntryQuery(3))


def test_an_unknown_entry_is_reported_with_the_total() -> None:
    peer = Peer(OK + NOT_FOUND, HEADER)
    with pytest.raises(UnknownEntry, match="no entry 40: the stream holds 0 to 39"):
        peer.drive(exchanges.entry(peer.connection, 40))
    assert peer.heard == sent(EntryQuery(40), HeaderQuery())
    assert peer.connection.outstanding == 0


def test_entry_0_may_look_like_no_entry() -> None:
    """It has no data, and the type of that answer: only the total shows it."""
    peer = Peer(OK + NOT_FOUND, HEADER, OK + NOT_FOUND, HEADER)
    assert peer.drive(exchanges.entry(peer.connection, 0)) == Entry(0, 0xFFFFFFFF, b"")
    empty = OK + Header(1, 2, 1, 4096, 0).pack()
    peer = Peer(OK + NOT_FOUND, empty)
    with pytest.raises(UnknownEntry):
        peer.drive(exchanges.entry(peer.connection, 0))


def test_an_entry_that_the_header_knows_is_asked_for_again() -> None:
    peer = Peer(OK + NOT_FOUND, HEADER, answers(7))
    assert peer.drive(exchanges.entry(peer.connection, 7)).number == 7
    assert peer.heard == sent(EntryQuery(7), HeaderQuery(), EntryQuery(7))


@pytest.mark.parametrize(
    "says, message",
    [
        ([END], "without an answer: servers of another stream type than"),
        ([OK, END], "closed the connection; connect again$"),
        ([HEADER[:-1], END], "in the middle of an answer"),
    ],
)
def test_the_end_of_the_connection(says: list[bytes], message: str) -> None:
    peer = Peer(*says)
    with pytest.raises(ConnectionLost, match=message):
        peer.drive(exchanges.header(peer.connection))


def test_the_text_of_a_refusal_is_fit_for_a_terminal() -> None:
    peer = Peer(struct.pack(">BII", 0xFF, 17, 1) + b"\x1b[2J\x07\n\xff!")
    with pytest.raises(AlreadyStarted) as caught:
        peer.drive(exchanges.header(peer.connection))
    assert "?[2J??" in str(caught.value)
    assert str(caught.value).isprintable()


def test_a_streaming() -> None:
    peer = Peer(OK + packed(5), packed(6, 7), OK)
    work = peer.begun(Streaming(5))
    assert peer.heard == sent(Start(5))
    assert numbers(peer.drive(work.advance())) == [5]
    assert numbers(peer.drive(work.advance())) == [6, 7]
    assert peer.drive(work.end(None))
    assert peer.heard == sent(Stop())
    assert peer.drive(work.advance()) is None
    assert peer.drive(work.end(None))
    assert peer.heard == b""


def test_runs_that_have_arrived_need_no_steps() -> None:
    peer = Peer(OK, packed(5)[:10], packed(5)[10:] + packed(6), packed(7, 8, 9))
    work = Streaming(5, 9)
    peer.begun(work)
    for _ in range(2):
        assert work.arrived() is None
        assert work.hungry
        peer.connection.feed(peer.says.pop(0))
    assert not work.hungry
    assert numbers(work.arrived()) == [5, 6]
    assert work.arrived() is None
    peer.connection.feed(peer.says.pop(0))
    # Something is to be said with the last one, and so again and again.
    for _ in range(2):
        assert work.arrived() is None
        assert not work.hungry
    assert numbers(peer.drive(work.advance())) == [7, 8]
    assert peer.heard == sent(Stop())
    # Nothing more is waited for.
    assert work.arrived() is None
    assert not work.hungry
    assert peer.drive(work.advance()) is None


@pytest.mark.parametrize("says", [END, b"\0", encode_result(3, "no such entry")])
def test_what_is_not_a_run_is_reported_by_the_steps(says: bytes) -> None:
    peer = Peer(OK + packed(5))
    work = Streaming(5)
    peer.begun(work)
    assert numbers(work.arrived()) == [5]
    peer.connection.feed(says)
    assert work.arrived() is None
    assert not work.hungry
    with pytest.raises(PeerError):
        peer.drive(work.advance())


def test_a_streaming_to_a_number_sends_its_stop_with_the_last_entries() -> None:
    peer = Peer(OK + packed(5, 6), packed(7, 8, 9), packed(10), packed(11) + OK)
    work = peer.begun(Streaming(5, 9))
    assert numbers(peer.drive(work.advance())) == [5, 6]
    assert peer.heard == b""
    assert numbers(peer.drive(work.advance())) == [7, 8]
    assert peer.heard == sent(Stop())
    assert peer.drive(work.advance()) is None
    assert peer.says
    assert peer.drive(work.end(None))
    assert not peer.says
    assert peer.connection.outstanding == 0


def test_a_streaming_that_is_stopped_while_it_waits() -> None:
    peer = Peer(OK, packed(0), packed(1) + OK)
    work = peer.begun(Streaming(0))
    assert numbers(peer.drive(work.advance())) == [0]
    assert work.request_stop() == sent(Stop())
    assert work.request_stop() == b""
    assert numbers(peer.drive(work.advance())) == [1]
    assert peer.drive(work.advance()) is None


def test_a_streaming_from_a_bookmark_behind_its_end() -> None:
    peer = Peer(OK + packed(8, 9) + OK)
    work = peer.begun(Streaming(b"key", 5))
    assert peer.heard == sent(StartBookmark(b"key"))
    assert peer.drive(work.advance()) is None
    assert peer.drive(work.end(None))


def test_a_refused_start_begins_nothing() -> None:
    peer = Peer(encode_result(3))
    with pytest.raises(BadFromEntry):
        peer.begun(Streaming(50))
    assert peer.connection.outstanding == 0


def test_entries_behind_a_stop_have_a_limit() -> None:
    peer = Peer(OK, packed(*range(10)), packed(*range(10, 20)), OK)
    work = peer.begun(Streaming(0))
    assert not peer.drive(work.end(10 * 21))
    assert len(peer.says) == 1


def test_restore_ends_work_and_tries_what_is_suspect() -> None:
    peer = Peer(OK + packed(0), OK, HEADER)
    work = peer.begun(Streaming(0))
    assert peer.drive(exchanges.restore(peer.connection, work, True, None))
    assert peer.heard == sent(Stop(), HeaderQuery())
    assert peer.drive(exchanges.restore(peer.connection, None, False, None))
    assert peer.heard == b""


def test_restore_fails_where_everything_is_refused() -> None:
    peer = Peer(OK, encode_result(2))
    work = peer.begun(Streaming(0))
    with pytest.raises(AlreadyStopped):
        peer.drive(exchanges.restore(peer.connection, work, True, None))
    peer = Peer(encode_result(1))
    with pytest.raises(AlreadyStarted):
        peer.drive(exchanges.restore(peer.connection, None, True, None))


def test_a_look_up_asks_again_when_half_its_window_is_free() -> None:
    peer = Peer(answers(0), answers(1, 2), answers(3), answers(4, 5, 6))
    work = peer.begun(Lookup(range(7), 4))
    assert peer.heard == b""
    assert numbers(peer.drive(work.advance())) == [0]
    assert peer.heard == sent(*map(EntryQuery, range(4)))
    assert numbers(peer.drive(work.advance())) == [1, 2]
    assert peer.heard == b""
    assert numbers(peer.drive(work.advance())) == [3]
    assert peer.heard == sent(*map(EntryQuery, range(4, 7)))
    assert numbers(peer.drive(work.advance())) == [4, 5, 6]
    assert peer.drive(work.advance()) is None


def test_a_look_up_hands_out_what_came_before_the_missing() -> None:
    peer = Peer(answers(1, 2) + OK + NOT_FOUND + answers(4), HEADER)
    work = peer.begun(Lookup([1, 2, 99, 4], 9))
    assert numbers(peer.drive(work.advance())) == [1, 2]
    with pytest.raises(UnknownEntry, match="no entry 99: the stream holds 0 to 39"):
        peer.drive(work.advance())
    assert peer.connection.outstanding == 0


def test_a_look_up_of_no_number_leaves_the_connection_in_step() -> None:
    peer = Peer(answers(1), answers(2))
    work = peer.begun(Lookup([1, 2, -3], 2))
    assert numbers(peer.drive(work.advance())) == [1]
    with pytest.raises(UsageError, match="not -3"):
        peer.drive(work.advance())
    assert peer.connection.outstanding == 1
    assert peer.drive(work.end(None))
    assert peer.connection.outstanding == 0


def test_a_look_up_that_is_stopped_asks_no_more() -> None:
    peer = Peer(answers(0, 1), answers(2, 3))
    work = peer.begun(Lookup(range(100), 4))
    assert numbers(peer.drive(work.advance())) == [0, 1]
    assert work.request_stop() == b""
    assert numbers(peer.drive(work.advance())) == [2, 3]
    assert peer.heard == b""
    assert peer.drive(work.advance()) is None


def test_a_refusal_in_the_middle_of_a_look_up() -> None:
    peer = Peer(answers(0) + encode_result(1))
    work = peer.begun(Lookup(range(4), 4))
    with pytest.raises(AlreadyStarted):
        peer.drive(work.advance())


def test_the_end_in_the_middle_of_a_look_up() -> None:
    peer = Peer(answers(0) + OK, END)
    work = peer.begun(Lookup(range(4), 4))
    assert numbers(peer.drive(work.advance())) == [0]
    with pytest.raises(ConnectionLost):
        peer.drive(work.advance())


def test_an_answer_out_of_turn() -> None:
    peer = Peer(OK, answers(5))
    work = peer.begun(Streaming(0))
    peer.connection.request(EntryQuery(5))
    with pytest.raises(ProtocolViolation, match="sent EntryReceived at the wrong time"):
        peer.drive(work.advance())
