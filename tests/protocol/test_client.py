"""The client's side: answers matched with requests, runs of entries, and what is no protocol."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest

from datastreamer._codec import Entry, pack_entry
from datastreamer.errors import BadBookmark, ProtocolViolation, UsageError
from datastreamer.format import HEADER_SIZE, PAGE_SIZE, Header
from datastreamer.protocol.client import ClientConnection
from datastreamer.protocol.commands import (
    BookmarkQuery,
    Command,
    EntryQuery,
    HeaderQuery,
    Start,
    StartBookmark,
    Stop,
)
from datastreamer.protocol.events import (
    EntriesReceived,
    EntryReceived,
    PeerEnded,
    ResultReceived,
)
from datastreamer.protocol.messages import NOT_FOUND, OK, encode_answer, encode_result

Cut = Callable[[bytes], Iterable[bytes]]
HEADER = Header(2, 1440, 1, 4849, 16)


def whole(data: bytes) -> Iterable[bytes]:
    return [data]


def bytewise(data: bytes) -> Iterable[bytes]:
    return [data[at : at + 1] for at in range(len(data))]


def in_elevens(data: bytes) -> Iterable[bytes]:
    return [data[at : at + 11] for at in range(0, len(data), 11)]


cuts = pytest.mark.parametrize("cut", [whole, bytewise, in_elevens])


def packed(*numbers: int, size: int = 5) -> bytes:
    return b"".join(pack_entry(number, 7, bytes([number % 256]) * size) for number in numbers)


def entries(*numbers: int, size: int = 5) -> list[Entry]:
    return [Entry(number, 7, bytes([number % 256]) * size) for number in numbers]


def asked(*commands: Command) -> ClientConnection:
    connection = ClientConnection(1, peer="stub:1")
    for command in commands:
        connection.request(command)
    return connection


@pytest.fixture(params=["events", "runs"], autouse=True)
def runs_first(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything is reported the same if runs of entries are requested one by one."""
    monkeypatch.setattr("tests.protocol.test_client.RUNS_FIRST", request.param == "runs")


RUNS_FIRST = False


def taken(connection: ClientConnection) -> list[Any]:
    """The events that are ready, runs of entries as entries."""
    events: list[Any] = []
    while True:
        while RUNS_FIRST and (run := connection.next_run()) is not None:
            assert run
            events += list(run)
        hungry = connection.hungry
        event = connection.next_event()
        if event is None:
            assert connection.hungry
            break
        assert not hungry
        if isinstance(event, EntriesReceived):
            assert not (RUNS_FIRST and connection.streamed.command)
            events += list(event.batch)
        else:
            events.append(event)
            if isinstance(event, PeerEnded):
                break
    return events


def fed(connection: ClientConnection, pieces: Iterable[bytes]) -> list[Any]:
    events: list[Any] = []
    for piece in pieces:
        connection.feed(piece)
        events += taken(connection)
    return events


def streaming(from_entry: int = 0) -> ClientConnection:
    connection = asked(Start(from_entry))
    assert fed(connection, [OK]) == [ResultReceived(Start(from_entry), 0, "OK")]
    return connection


def violation(connection: ClientConnection, pieces: Iterable[bytes]) -> str:
    with pytest.raises(ProtocolViolation) as caught:
        fed(connection, pieces)
    with pytest.raises(ProtocolViolation) as again:
        connection.next_event()
    assert again.value is caught.value
    assert connection.over
    return str(caught.value)


def test_requests_are_counted_until_they_are_answered() -> None:
    connection = ClientConnection(3)
    sent = connection.request(EntryQuery(5)) + connection.request(HeaderQuery())
    assert sent == bytes.fromhex(
        "0000000000000005 0000000000000003 0000000000000005 0000000000000003 0000000000000003"
    )
    assert connection.outstanding == 2
    fed(connection, [OK + encode_answer(5, 1, b"x")])
    assert connection.outstanding == 1
    fed(connection, [OK])
    assert connection.outstanding == 1
    fed(connection, [HEADER.pack()])
    assert connection.outstanding == 0


def test_a_request_that_cannot_be_sent_is_not_waited_for() -> None:
    connection = ClientConnection()
    with pytest.raises(UsageError):
        connection.request(EntryQuery(-1))
    with pytest.raises(BadBookmark):
        connection.request(BookmarkQuery(b""))
    assert connection.outstanding == 0


@cuts
def test_answers_come_in_the_order_of_the_requests(cut: Cut) -> None:
    queries = [
        EntryQuery(3),
        HeaderQuery(),
        BookmarkQuery(b"k"),
        EntryQuery(4),
        BookmarkQuery(b"x"),
    ]
    connection = asked(*queries)
    answers = [
        OK + encode_answer(3, 9, b"data"),
        OK + HEADER.pack(),
        OK + encode_answer(12, 2, b""),
        OK + NOT_FOUND,
        OK + NOT_FOUND,
    ]
    assert fed(connection, cut(b"".join(answers))) == [
        EntryReceived(EntryQuery(3), Entry(3, 9, b"data")),
        HEADER,
        EntryReceived(BookmarkQuery(b"k"), Entry(12, 2, b"")),
        EntryReceived(EntryQuery(4), None),
        EntryReceived(BookmarkQuery(b"x"), None),
    ]
    assert connection.outstanding == 0


@cuts
def test_an_entry_may_have_the_type_of_not_found(cut: Cut) -> None:
    connection = asked(EntryQuery(3), EntryQuery(0))
    sent = OK + encode_answer(3, 0xFFFFFFFF, b"") + OK + encode_answer(0, 0xFFFFFFFF, b"x")
    assert fed(connection, cut(sent)) == [
        EntryReceived(EntryQuery(3), Entry(3, 0xFFFFFFFF, b"")),
        EntryReceived(EntryQuery(0), Entry(0, 0xFFFFFFFF, b"x")),
    ]


@cuts
@pytest.mark.parametrize("number", [1, 2, 3, 4, 5, 9, 77])
def test_a_refusal_answers_any_request(cut: Cut, number: int) -> None:
    commands = [HeaderQuery(), EntryQuery(1), Start(9), StartBookmark(b"k"), Stop()]
    connection = asked(*commands)
    refused = encode_result(number, "No, thank you")
    assert fed(connection, cut(refused * len(commands))) == [
        ResultReceived(command, number, "No, thank you") for command in commands
    ]
    assert connection.streamed.command is None


@pytest.mark.parametrize("cut", [whole, in_elevens])
def test_the_largest_answer(cut: Cut) -> None:
    data = bytes(range(256)) * 4095 + bytes(239)
    assert len(data) + 17 == PAGE_SIZE
    connection = asked(EntryQuery(7), HeaderQuery())
    pieces = [*cut(OK + encode_answer(7, 1, data) + OK), HEADER.pack()]
    answer, header = fed(connection, pieces)
    assert answer.entry == Entry(7, 1, data)
    assert header == HEADER


@cuts
def test_entries_follow_a_start(cut: Cut) -> None:
    connection = asked(Start(254))
    assert fed(connection, cut(OK + packed(254, 255, 256))) == [
        ResultReceived(Start(254), 0, "OK"),
        *entries(254, 255, 256),
    ]
    assert connection.streamed.command is not None
    assert fed(connection, cut(packed(257))) == entries(257)


@cuts
def test_after_a_bookmark_the_first_entry_says_its_number(cut: Cut) -> None:
    connection = asked(StartBookmark(b"k"))
    assert fed(connection, cut(OK + packed(7, 8)))[1:] == entries(7, 8)
    assert "entry number 10 where 9" in violation(connection, cut(packed(10)))


@cuts
def test_results_between_entries(cut: Cut) -> None:
    connection = asked(Start(0), Stop())
    sent = OK + packed(0, 1) + OK
    assert fed(connection, cut(sent)) == [
        ResultReceived(Start(0), 0, "OK"),
        *entries(0, 1),
        ResultReceived(Stop(), 0, "OK"),
    ]
    assert connection.streamed.command is None


@cuts
def test_damage_of_the_next_entries_ends_the_streaming(cut: Cut) -> None:
    damaged = encode_result(27, "Damaged: at byte 4096")
    connection = streaming(3)
    *batches, end = fed(connection, cut(packed(3, 4) + damaged))
    assert batches == entries(3, 4)
    assert end == ResultReceived(Start(3), 27, "Damaged: at byte 4096")
    assert connection.streamed.command is None
    assert "was not asked" in violation(connection, cut(damaged))
    assert "was not asked" in violation(streaming(), cut(encode_result(3)))


def test_a_refused_command_leaves_the_streaming() -> None:
    connection = asked(Start(0), HeaderQuery(), Stop())
    sent = OK + packed(0) + encode_result(1) + packed(1, 2) + OK
    assert fed(connection, [sent]) == [
        ResultReceived(Start(0), 0, "OK"),
        *entries(0),
        ResultReceived(HeaderQuery(), 1, "Already started"),
        *entries(1, 2),
        ResultReceived(Stop(), 0, "OK"),
    ]


@cuts
def test_the_rest_of_an_operation_behind_a_stop_is_dropped(cut: Cut) -> None:
    connection = asked(Start(0), Stop(), HeaderQuery(), Start(1), EntryQuery(0))
    sent = [
        OK + packed(0),
        OK + packed(1, 2, size=3000),
        OK + packed(3) + HEADER.pack() + packed(4),
        OK + packed(1, 2),
        encode_result(1),
    ]
    assert fed(connection, cut(b"".join(sent))) == [
        ResultReceived(Start(0), 0, "OK"),
        *entries(0),
        ResultReceived(Stop(), 0, "OK"),
        HEADER,
        ResultReceived(Start(1), 0, "OK"),
        *entries(1, 2),
        ResultReceived(EntryQuery(0), 1, "Already started"),
    ]


@cuts
def test_start_again_at_another_place(cut: Cut) -> None:
    connection = asked(Start(5), Stop(), Start(2))
    sent = OK + packed(5) + OK + OK + packed(2, 3)
    assert [e for e in fed(connection, cut(sent)) if isinstance(e, Entry)] == entries(5, 2, 3)


def test_entries_that_arrive_together_come_in_one_batch() -> None:
    connection = streaming()
    connection.feed(packed(*range(1000)) + packed(1000)[:9])
    event = connection.next_event()
    assert isinstance(event, EntriesReceived)
    assert (event.batch.first_number, event.batch.next_number) == (0, 1000)
    assert connection.next_event() is None


@cuts
@pytest.mark.parametrize(
    "numbers, words",
    [
        ((0, 1, 3), "entry number 3 where 2"),
        ((0, 1, 1), "entry number 1 where 2"),
        ((0, 1, 0), "entry number 0 where 2"),
        ((1,), "entry number 1 where 0"),
    ],
)
def test_numbers_follow_one_another(cut: Cut, numbers: tuple[int, ...], words: str) -> None:
    connection = streaming()
    connection_events: list[Any] = []

    def feed() -> None:
        for piece in cut(packed(*numbers)):
            connection.feed(piece)
            while (event := connection.next_event()) is not None:
                connection_events.append(event)

    with pytest.raises(ProtocolViolation, match=f"stub:1 sent .*{words}"):
        feed()
    # What came before the damage is handed out, however the bytes were cut.
    before = [entry for event in connection_events for entry in event.batch]
    assert before == entries(*numbers[:2] if len(numbers) > 1 else ())


@cuts
@pytest.mark.parametrize("length", [0, 16, PAGE_SIZE + 1, 2**32 - 1])
def test_lengths_that_no_entry_has(cut: Cut, length: int) -> None:
    head = b"\x02" + length.to_bytes(4, "big") + bytes(12)
    words = violation(streaming(), cut(packed(0) + head))
    assert str(length) in words
    head = b"\xfe" + head[1:]
    assert str(length) in violation(asked(EntryQuery(0)), cut(OK + head))


def test_an_answer_that_is_too_long_and_all_there() -> None:
    head = b"\xfe" + (PAGE_SIZE + 1).to_bytes(4, "big") + bytes(12)
    words = violation(asked(EntryQuery(0)), [OK + head + bytes(PAGE_SIZE)])
    assert "an answer of 1048577 bytes" in words


@cuts
@pytest.mark.parametrize("packet", [0, 3, 0x80, 0xF9, 0xFC])
def test_packets_that_there_are_not(cut: Cut, packet: int) -> None:
    for connection in (streaming(), asked(HeaderQuery()), ClientConnection(peer="stub:1")):
        assert f"a packet of unknown type {packet}" in violation(
            connection, cut(bytes([packet]) * 20)
        )


@cuts
def test_what_was_not_requested(cut: Cut) -> None:
    def idle() -> ClientConnection:
        return ClientConnection(1, peer="stub:1")

    assert "was not asked" in violation(idle(), cut(OK))
    assert "was not asked" in violation(idle(), cut(packed(0)))
    assert "was not asked" in violation(idle(), cut(NOT_FOUND))
    assert "was not asked" in violation(idle(), cut(HEADER.pack()))
    assert "was not asked" in violation(asked(EntryQuery(0)), cut(NOT_FOUND))
    assert "was not asked" in violation(asked(HeaderQuery()), cut(OK + NOT_FOUND))
    assert "was not asked" in violation(asked(EntryQuery(0)), cut(OK + HEADER.pack()))
    assert "was not asked" in violation(asked(Start(0)), cut(packed(0)))
    for sent in (OK + OK, OK + OK + encode_answer(0, 1, b"data")):
        assert "where the answer to Entry 0 was due" in violation(asked(EntryQuery(0)), cut(sent))


@cuts
def test_the_answer_to_another_question(cut: Cut) -> None:
    sent = OK + encode_answer(6, 1, b"")
    assert "entry 6 in answer to Entry 5" in violation(asked(EntryQuery(5)), cut(sent))


@cuts
@pytest.mark.parametrize("length", [0, 8, 9 + 1025, 2**32 - 1])
def test_results_of_odd_lengths(cut: Cut, length: int) -> None:
    sent = b"\xff" + length.to_bytes(4, "big") + bytes(4)
    assert f"a Result of {length} bytes" in violation(asked(Stop()), cut(sent))


@cuts
def test_a_header_that_is_none(cut: Cut) -> None:
    sent = OK + HEADER.pack()[:4] + b"\x27" + HEADER.pack()[5:]
    assert "a header of 39 bytes" in violation(asked(HeaderQuery()), cut(sent))


def test_the_end_is_reported_at_each_request() -> None:
    connection = streaming()
    connection.feed(packed(0))
    connection.feed(b"")
    assert taken(connection) == [*entries(0), PeerEnded(0)]
    assert connection.next_event() == PeerEnded(0)
    assert connection.over


@pytest.mark.parametrize(
    "command, sent",
    [
        (EntryQuery(0), OK + encode_answer(0, 1, b"abc")),
        (Stop(), OK),
        (HeaderQuery(), OK + HEADER.pack()),
    ],
)
def test_the_end_inside_an_answer(command: Command, sent: bytes) -> None:
    for size in range(len(sent)):
        connection = asked(command)
        connection.feed(sent[:size])
        connection.feed(b"")
        unread = size if size < len(OK) else size - len(OK)
        assert taken(connection) == [PeerEnded(unread)]


def test_whether_anything_was_heard() -> None:
    connection = asked(HeaderQuery())
    assert not connection.received_bytes
    connection.feed(OK)
    assert connection.received_bytes


class TestBuffers:
    """Bytes are received where they are scanned, and stay while a batch holds them."""

    def stream(self, connection: ClientConnection, total: int, size: int, piece: int) -> list[Any]:
        """Feed `total` entries; the batches in which they came."""
        data = b"".join(packed(n, size=size) for n in range(total))
        batches = []
        for at in range(0, len(data), piece):
            connection.feed(data[at : at + piece])
            while (event := connection.next_event()) is not None:
                assert isinstance(event, EntriesReceived)
                batches.append(event.batch)
        return batches

    @pytest.mark.parametrize("piece", [1_000, 77_777, 3_000_000])
    @pytest.mark.parametrize("size", [0, 200, 60_000])
    def test_batches_that_are_kept_keep_their_bytes(self, piece: int, size: int) -> None:
        total = 5_000_000 // (size + 17)
        batches = self.stream(streaming(), total, size, piece)
        assert len(batches) > 1
        numbers = [entry.number for batch in batches for entry in batch]
        assert numbers == list(range(total))
        for batch in batches:
            for entry in batch:
                assert entry.data == bytes([entry.number % 256]) * size

    def test_one_buffer_serves_many_batches(self) -> None:
        batches = self.stream(streaming(), 3000, 200, 2000)
        assert len({id(batch.base) for batch in batches}) <= 3 < len(batches)

    def test_buffers_without_a_holder_are_used_again(self) -> None:
        connection = streaming()
        data, bases, last = packed(*range(100), size=1000), set(), None
        for round_ in range(200):
            shifted = b"".join(pack_entry(round_ * 100 + n, 7, data[17:1017]) for n in range(100))
            connection.feed(shifted)
            event = connection.next_event()
            assert isinstance(event, EntriesReceived)
            # As a loop does, the last batch is held until the next has come.
            last = event.batch
            bases.add(id(last.base))
        assert last is not None
        assert len(bases) <= 4

    def test_room_is_never_small(self) -> None:
        connection = streaming()
        for number in range(2000):
            with connection.receive_buffer() as room:
                assert len(room) >= 8192
            connection.feed(packed(number, size=3000))
            connection.next_event()

    def test_an_entry_larger_than_the_buffer(self) -> None:
        connection = streaming()
        large = pack_entry(0, 1, bytes(PAGE_SIZE - 17))
        for at in range(0, len(large), 5000):
            assert connection.next_event() is None
            connection.feed(large[at : at + 5000])
        event = connection.next_event()
        assert isinstance(event, EntriesReceived)
        assert event.batch.packed() == large

    def test_queries_go_on_in_a_small_buffer(self) -> None:
        connection = ClientConnection()
        rooms = set()
        for number in range(5000):
            connection.request(EntryQuery(number))
            with connection.receive_buffer() as room:
                rooms.add(len(room))
            connection.feed(OK + encode_answer(number, 1, bytes(100)))
            assert isinstance(connection.next_event(), EntryReceived)
        assert rooms == {32 << 10}

    def test_reading_in_place(self) -> None:
        connection = asked(HeaderQuery())
        answer = OK + HEADER.pack()
        with connection.receive_buffer() as room:
            room[: len(answer)] = answer
        connection.received(len(answer))
        assert connection.next_event() == HEADER
        connection.received(0)
        assert connection.next_event() == PeerEnded(0)
        assert len(answer) == 11 + HEADER_SIZE
