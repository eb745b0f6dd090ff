"""The server's side: what is asked, what is refused, and when that is decided."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from datastreamer.protocol.commands import (
    BatchQuery,
    BookmarkQuery,
    Command,
    EntryQuery,
    HeaderQuery,
    RangeQuery,
    Start,
    StartBookmark,
    Stop,
    encode_command,
)
from datastreamer.protocol.server import Drop, End, Event, Refuse, ServerConnection, query_of

ALREADY_STARTED = Refuse(1, close=True)
ALREADY_STOPPED = Refuse(2, close=True)
INVALID_COMMAND = Refuse(9, close=False)

IDLE_COMMANDS: list[Command] = [
    HeaderQuery(),
    EntryQuery(0),
    EntryQuery(2**64 - 1),
    BookmarkQuery(b"k"),
    BookmarkQuery(b"0123456789abcdef"),
    Start(0),
    Start(2**64 - 1),
    StartBookmark(b"k"),
    StartBookmark(b"0123456789abcdef"),
]

Cut = Callable[[bytes], Iterable[bytes]]


def whole(data: bytes) -> Iterable[bytes]:
    return [data]


def bytewise(data: bytes) -> Iterable[bytes]:
    return [data[at : at + 1] for at in range(len(data))]


def in_sevens(data: bytes) -> Iterable[bytes]:
    return [data[at : at + 7] for at in range(0, len(data), 7)]


cuts = pytest.mark.parametrize("cut", [whole, bytewise, in_sevens])


def request(command: int, stream_type: int = 1, parameters: bytes = b"") -> bytes:
    return command.to_bytes(8, "big") + stream_type.to_bytes(8, "big") + parameters


def encoded(*commands: Command) -> bytes:
    return b"".join(encode_command(command, 1) for command in commands)


def streaming() -> ServerConnection:
    connection = ServerConnection(1)
    connection.started()
    return connection


def taken(connection: ServerConnection) -> list[Event]:
    """All events that are ready; Start and Stop are answered OK as they come."""
    events: list[Event] = []
    while (event := connection.next_event()) is not None:
        events.append(event)
        if isinstance(event, Start | StartBookmark):
            connection.started()
        elif event == Stop():
            connection.stopped()
    return events


def fed(connection: ServerConnection, pieces: Iterable[bytes]) -> list[Event]:
    events: list[Event] = []
    for piece in pieces:
        connection.receive(piece)
        events += taken(connection)
    return events


@cuts
@pytest.mark.parametrize("command", IDLE_COMMANDS)
def test_an_idle_connection_takes_every_command_but_stop(cut: Cut, command: Command) -> None:
    assert fed(ServerConnection(1), cut(encode_command(command, 1))) == [command]


@cuts
def test_commands_in_one_segment_come_one_by_one(cut: Cut) -> None:
    commands = [
        HeaderQuery(),
        Start(3),
        Stop(),
        EntryQuery(9),
        BookmarkQuery(b"key"),
        StartBookmark(b"x"),
        Stop(),
        HeaderQuery(),
    ]
    sent = b"".join(encode_command(command, 1) for command in commands)
    assert fed(ServerConnection(1), cut(sent)) == commands


def test_each_event_waits_until_the_one_before_is_answered() -> None:
    connection = ServerConnection(1)
    connection.receive(encoded(Start(0), Stop(), HeaderQuery()))
    assert connection.next_event() == Start(0)
    assert not connection.streaming
    connection.started()
    assert connection.streaming
    assert connection.next_event() == Stop()
    connection.stopped()
    assert not connection.streaming
    assert connection.next_event() == HeaderQuery()
    assert connection.next_event() is None


def test_a_start_that_the_stream_refuses_leaves_the_connection_as_it_was() -> None:
    connection = ServerConnection(1)
    connection.receive(encoded(Start(99), HeaderQuery(), StartBookmark(b"x")))
    assert connection.next_event() == Start(99)
    assert connection.next_event() == HeaderQuery()
    assert connection.next_event() == StartBookmark(b"x")
    assert not connection._closed


@pytest.mark.parametrize("size", range(1, 16))
def test_nothing_is_decided_on_less_than_16_bytes(size: int) -> None:
    connection = ServerConnection(1)
    connection.receive(request(99, 2)[:size])
    assert connection.next_event() is None
    assert connection.pending == size


@pytest.mark.parametrize(
    "command, sizes",
    [
        (encoded(Start(5)), range(16, 24)),
        (encoded(EntryQuery(5)), range(16, 24)),
        (encoded(BookmarkQuery(b"abc")), range(16, 23)),
        (encoded(StartBookmark(b"abc")), range(16, 23)),
        (encoded(RangeQuery(b"abc", b"de")), range(16, 29)),
        (encoded(BatchQuery(5, 6, 7, 8)), range(16, 36)),
    ],
)
def test_parameters_are_waited_for(command: bytes, sizes: range) -> None:
    for size in sizes:
        connection = ServerConnection(1)
        connection.receive(command[:size])
        assert connection.next_event() is None
        connection.receive(command[size:])
        assert len(taken(connection)) == 1


@cuts
@pytest.mark.parametrize("command", [*range(1, 8), 0x1000, 0x1001])
@pytest.mark.parametrize("stream_type", [0, 2, 2**64 - 1])
def test_another_stream_type_is_dropped_on_the_first_16_bytes(
    cut: Cut, command: int, stream_type: int
) -> None:
    (event,) = fed(ServerConnection(1), cut(request(command, stream_type)))
    assert event == Drop(f"stream type {stream_type}, but 1 is served")


def test_the_stream_type_is_judged_before_command_and_state() -> None:
    for connection in (ServerConnection(1), streaming()):
        assert isinstance(fed(connection, [request(99, 2)])[0], Drop)
    assert isinstance(fed(ServerConnection(1), [request(2, 2)])[0], Drop)
    assert isinstance(fed(streaming(), [request(1, 2)])[0], Drop)


def test_every_request_must_name_the_stream_type() -> None:
    events = fed(ServerConnection(1), [encoded(HeaderQuery()) + encode_command(HeaderQuery(), 2)])
    assert events[0] == HeaderQuery()
    assert isinstance(events[1], Drop)


def test_a_stream_of_another_type_is_served_under_its_own() -> None:
    assert fed(ServerConnection(7), [encode_command(HeaderQuery(), 7)]) == [HeaderQuery()]
    assert isinstance(fed(ServerConnection(7), [encoded(HeaderQuery())])[0], Drop)


@cuts
@pytest.mark.parametrize("command", [1, 3, 4, 5, 6, 7, 0x1000, 0x1001])
def test_while_streaming_only_stop_is_taken(cut: Cut, command: int) -> None:
    connection = streaming()
    assert fed(connection, cut(request(command))) == [ALREADY_STARTED]
    assert connection._closed


@cuts
def test_stop_while_not_streaming_is_refused(cut: Cut) -> None:
    connection = ServerConnection(1)
    assert fed(connection, cut(encoded(Stop(), HeaderQuery()))) == [ALREADY_STOPPED]
    assert connection._closed


@cuts
@pytest.mark.parametrize("number", [0, 8, 99, 0xFFF, 0x1010, 2**63, 2**64 - 1])
def test_an_unknown_command_takes_16_bytes_and_leaves_the_connection(cut: Cut, number: int) -> None:
    sent = request(number) + encoded(HeaderQuery())
    assert fed(ServerConnection(1), cut(sent)) == [INVALID_COMMAND, HeaderQuery()]


@cuts
def test_an_unknown_command_while_streaming_leaves_the_streaming(cut: Cut) -> None:
    connection = streaming()
    assert fed(connection, cut(request(8) + encoded(Stop()))) == [INVALID_COMMAND, Stop()]


@cuts
def test_parameters_of_an_unknown_command_are_read_as_the_next_command(cut: Cut) -> None:
    sent = request(99, 1, bytes(8)) + encoded(HeaderQuery())
    events = fed(ServerConnection(1), cut(sent))
    assert events == [INVALID_COMMAND, Drop("stream type 3, but 1 is served")]


@cuts
@pytest.mark.parametrize("command", [4, 6])
@pytest.mark.parametrize("length", [0, 17, 2**32 - 1])
def test_a_bookmark_of_a_wrong_length_is_dropped_on_its_length_alone(
    cut: Cut, command: int, length: int
) -> None:
    sent = request(command, 1, length.to_bytes(4, "big"))
    (event,) = fed(ServerConnection(1), cut(sent))
    assert event == Drop(f"a bookmark of {length} bytes, not 1 to 16")


def test_a_bookmark_of_a_wrong_length_while_streaming_is_a_start_too_many() -> None:
    assert fed(streaming(), [request(4, 1, bytes(4))]) == [ALREADY_STARTED]


@pytest.mark.parametrize(
    "last", [request(99, 2), request(2), request(6, 1, bytes(4)), b""], ids=repr
)
def test_nothing_follows_the_last_event(last: bytes) -> None:
    connection = ServerConnection(1)
    connection.receive(last)
    assert connection.next_event() is not None
    for more in (encoded(HeaderQuery()), encoded(Stop()), b""):
        connection.receive(more)
        assert connection.next_event() is None
    assert connection.pending == 0


@cuts
def test_whole_commands_before_the_end_are_served(cut: Cut) -> None:
    connection = ServerConnection(1)
    sent = encoded(HeaderQuery(), EntryQuery(5))
    assert fed(connection, [*cut(sent), b""]) == [HeaderQuery(), EntryQuery(5), End()]
    assert connection._closed


@pytest.mark.parametrize("size", [1, 5, 8, 12, 16, 19, 23])
def test_half_a_command_before_the_end_is_dropped(size: int) -> None:
    connection = ServerConnection(1)
    connection.receive(encoded(HeaderQuery()))
    connection.receive(encoded(EntryQuery(5))[:size])
    connection.receive(b"")
    assert taken(connection) == [HeaderQuery(), End()]


def test_the_end_while_streaming() -> None:
    assert fed(streaming(), [b""]) == [End()]


def test_bytes_that_the_caller_uses_again_are_copied() -> None:
    connection = ServerConnection(1)
    for command in (encoded(EntryQuery(1)), encoded(EntryQuery(2))):
        for half in (command[:20], command[20:]):
            reused = bytearray(half)
            connection.receive(memoryview(reused))
            reused[:] = bytes(len(reused))
    assert taken(connection) == [EntryQuery(1), EntryQuery(2)]


def test_what_is_pending_is_what_was_not_taken() -> None:
    connection = ServerConnection(1)
    connection.receive(encoded(HeaderQuery()) * 100 + b"\0\0\0")
    assert connection.pending == 1603
    for _ in range(100):
        assert connection.next_event() == HeaderQuery()
    assert connection.next_event() is None
    assert connection.pending == 3
    connection.receive(encoded(HeaderQuery())[3:])
    assert connection.next_event() == HeaderQuery()
    assert connection.pending == 0


FREQUENT: list[Command] = [
    HeaderQuery(),
    EntryQuery(0),
    EntryQuery(2**64 - 1),
    BookmarkQuery(b"k"),
    BookmarkQuery(b"0123456789abcdef"),
]


@given(st.lists(st.sampled_from([*FREQUENT * 3, Start(7), BatchQuery(1, 2, 3, 4)])), st.data())
def test_queries_are_the_events_to_come(commands: list[Command], data: st.DataObject) -> None:
    """However the bytes are cut, and however many are taken at a time."""
    sent = b"".join(encode_command(command, 1) for command in commands)
    connection, events = ServerConnection(1), []
    while sent or connection.pending:
        cut = data.draw(st.integers(0, len(sent)))
        connection.receive(sent[:cut] or sent[:1] or b"")
        sent = sent[cut or 1 :]
        while True:
            most = data.draw(st.integers(0, 5))
            queries = connection.queries(most)
            assert len(queries) <= most
            taken = data.draw(st.integers(0, len(queries)))
            events += map(query_of, queries[:taken])
            connection.took(taken)
            if taken < len(queries):
                event = connection.next_event()
                assert event == query_of(queries[taken])
            else:
                event = connection.next_event()
            if event is None:
                break
            events.append(event)
        if not sent:
            break
    assert events == commands


@pytest.mark.parametrize(
    "wrong",
    [
        request(5, 2, bytes(8)),
        request(6, 1, (0).to_bytes(4, "big")),
        request(6, 1, (17).to_bytes(4, "big") + bytes(17)),
        request(6, 1, (2**32 - 1).to_bytes(4, "big")),
        request(6, 1, (3).to_bytes(4, "big") + b"ke"),
        request(5, 1, bytes(7)),
        request(3)[:15],
        request(0),
        request(99),
    ],
)
def test_queries_end_before_what_is_none(wrong: bytes) -> None:
    connection = ServerConnection(1)
    connection.receive(encode_command(EntryQuery(5), 1) + wrong)
    assert connection.queries(10) == [5]
    connection.took(1)
    assert connection.queries(10) == []
    assert connection.pending == len(wrong)


def test_no_queries_while_streaming_or_after_the_end() -> None:
    connection = streaming()
    connection.receive(encode_command(HeaderQuery(), 1))
    assert connection.queries(10) == []
    assert connection.next_event() == ALREADY_STARTED
    assert connection.queries(10) == []
