"""One client's session over memory streams: no sockets, no real time."""

from __future__ import annotations

import logging
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
import trio
import trio.testing
from trio.testing import MockClock, wait_all_tasks_blocked

from datastreamer.server.server import Server
from datastreamer.storage.stream import DataStream
from tests.network import model as wire
from tests.network.fixtures import Peer, append, in_memory, turned_away
from tests.network.model import BOOKMARK, OK, Conversation, Model, packets, result
from tests.network.stream_transport import StreamTransport

ENTRIES = [
    (BOOKMARK, b"first"),
    (1, b""),
    (2, b"x" * 5000),
    (BOOKMARK, b"\x00" * 16),
    (BOOKMARK, b"third"),
    (0xFFFFFFFE, b"after two bookmarks"),
    (3, b"y"),
    (BOOKMARK, b"nothing follows"),
]


@pytest.fixture
def talk(stream: DataStream) -> Conversation:
    """A stream with `ENTRIES`, and what a new connection must be answered."""
    append(stream, *ENTRIES)
    return Conversation(modelled(stream))


def modelled(stream: DataStream) -> Model:
    return Model(Path(stream.path).read_bytes())


async def say(peer: Peer, talk: Conversation, request: bytes) -> None:
    await peer.ask(request, talk.feed(request))


def commit(stream: DataStream, talk: Conversation, *entries: tuple[int, bytes]) -> bytes:
    """Append to stream and model; gives what a streaming client is to be sent."""
    append(stream, *entries)
    talk.model.pending += entries
    talk.model.commit()
    return talk.moved()


QUERIES = [
    wire.header(),
    wire.entry(0),
    wire.entry(5),
    wire.entry(8),
    wire.entry(2**64 - 1),
    wire.bookmark(b"first"),
    wire.bookmark(b"\x00" * 16),
    wire.bookmark(b"third"),
    wire.bookmark(b"nothing follows"),
    wire.bookmark(b"unknown"),
    wire.start(9),
    wire.start(2**64 - 1),
    wire.start_bookmark(b"unknown"),
    wire.unknown(0),
    wire.unknown(8),
    wire.unknown(2**64 - 1),
]


async def test_queries_and_refusals_that_leave_the_connection_usable(
    stream: DataStream, talk: Conversation, autojump_clock: MockClock
) -> None:
    async with in_memory(stream) as rig, rig.client() as peer:
        for request in QUERIES:
            await say(peer, talk, request)
        assert not talk.closed


async def test_pipelined_queries_are_answered_in_order(
    stream: DataStream, talk: Conversation, autojump_clock: MockClock
) -> None:
    request = b"".join(QUERIES) * 50
    async with in_memory(stream) as rig, rig.client() as peer:
        await say(peer, talk, request)
        await peer.nothing_more()


async def test_queries_byte_by_byte(
    stream: DataStream, talk: Conversation, autojump_clock: MockClock
) -> None:
    request = b"".join([*QUERIES, wire.start(3), wire.stop(), wire.header()])
    async with in_memory(stream) as rig, rig.client() as peer:
        for at in range(len(request)):
            await say(peer, talk, request[at : at + 1])
        assert not talk.unread


async def test_a_whole_life(
    stream: DataStream, talk: Conversation, autojump_clock: MockClock
) -> None:
    async with in_memory(stream) as rig, rig.client() as peer:
        await say(peer, talk, wire.start(2))
        await peer.expect(commit(stream, talk, (1, b"live"), (BOOKMARK, b"live")))
        await peer.expect(commit(stream, talk, (1, b"z" * 300_000)))
        await say(peer, talk, wire.unknown())
        await peer.expect(commit(stream, talk, (1, b"after an error 9")))
        await say(peer, talk, wire.stop())
        assert commit(stream, talk, (1, b"unrequested")) == b""
        await say(peer, talk, wire.header())
        await say(peer, talk, wire.start_bookmark(b"live"))
        await peer.expect(commit(stream, talk, (1, b"live again")))
        await say(peer, talk, wire.stop())
        await say(peer, talk, wire.start(len(talk.model.entries)))
        await peer.expect(commit(stream, talk, (1, b"the next one")))
        await peer.nothing_more()


@pytest.mark.parametrize("start", [0, 3, 8])
async def test_from_an_empty_or_filled_stream_to_live(
    stream: DataStream, start: int, autojump_clock: MockClock
) -> None:
    if start:
        append(stream, *ENTRIES)
    talk = Conversation(modelled(stream))
    async with in_memory(stream) as rig, rig.client() as peer:
        await say(peer, talk, wire.start(start))
        for number in range(20):
            await peer.expect(commit(stream, talk, *[(1, b"e" * number)] * (number % 4)))
        await peer.nothing_more()


async def test_nothing_of_an_open_operation(
    stream: DataStream, talk: Conversation, autojump_clock: MockClock
) -> None:
    async with in_memory(stream) as rig, rig.client() as peer, rig.client() as early:
        await early.ask(wire.start(8), OK)
        stream.start_atomic_op()
        number = stream.add_bookmark(b"open")
        stream.add_entries(1, [b"\xee" * 500_000] * 30)  # written to its place before the commit
        for request in (wire.header(), wire.entry(number), wire.bookmark(b"open")):
            await say(peer, talk, request)
        await say(peer, talk, wire.start(number + 1))  # refused
        await say(peer, talk, wire.start(0))
        for client in (peer, early):
            await client.nothing_more()
        stream.rollback_atomic_op()
        news = commit(stream, talk, (1, b"in its place"))
        for client in (peer, early):
            await client.expect(news)
            await client.nothing_more()


CLOSING = {
    "Start while streaming": (True, wire.start(0)),
    "Start's first 16 bytes while streaming": (True, wire.start(0)[:16]),
    "StartBookmark while streaming": (True, wire.start_bookmark(b"first")),
    "StartBookmark, bad length, while streaming": (True, wire.start_bookmark(b"")),
    "Header while streaming": (True, wire.header()),
    "Entry while streaming": (True, wire.entry(0)),
    "Bookmark while streaming": (True, wire.bookmark(b"first")),
    "Stop when stopped": (False, wire.stop()),
    "wrong type": (False, wire.header(2)),
    "wrong type, unknown command": (False, wire.unknown(99, 0)),
    "empty bookmark": (False, wire.bookmark(b"")),
    "bookmark of 17 bytes": (False, wire.bookmark(b"x" * 17)),
    "length of a bookmark alone": (False, wire.start_bookmark(b"x" * 17)[:20]),
}


@pytest.mark.parametrize(("streaming", "request_"), CLOSING.values(), ids=CLOSING)
@pytest.mark.parametrize("extra", [b"", b"unread " * 20_000], ids=["alone", "more behind"])
async def test_refusals_that_close(
    stream: DataStream,
    talk: Conversation,
    streaming: bool,
    request_: bytes,
    extra: bytes,
    autojump_clock: MockClock,
) -> None:
    async with in_memory(stream) as rig, rig.client() as peer:
        await say(peer, talk, wire.header())
        if streaming:
            await say(peer, talk, wire.start(8))
        answer = talk.feed(request_)
        assert talk.closed
        await peer.send(request_ + extra)
        assert await peer.rest() == answer
        # It reads on for a moment, so that no reset overtakes the Result; then it is closed.
        began = trio.current_time()
        while rig.server.sessions:
            await trio.sleep(0.1)
        assert trio.current_time() - began == pytest.approx(1, abs=0.15)


async def test_a_refused_client_that_closes_is_let_go_at_once(
    stream: DataStream, talk: Conversation, autojump_clock: MockClock
) -> None:
    async with in_memory(stream) as rig, rig.client() as peer:
        await say(peer, talk, wire.stop())
        await peer.ended()
        await peer.stream.send_eof()
        await wait_all_tasks_blocked()
        assert not rig.server.sessions


@pytest.mark.parametrize(
    ("streaming", "size"),
    [*[(False, size) for size in (0, 1, 8, 15, 16, 19, 23)], *[(True, n) for n in (0, 1, 8, 15)]],
)
async def test_half_a_command_then_the_end(
    stream: DataStream, talk: Conversation, size: int, streaming: bool, autojump_clock: MockClock
) -> None:
    async with in_memory(stream) as rig, rig.client() as peer:
        if streaming:
            await say(peer, talk, wire.start(0))
        await peer.send(wire.entry(0)[:size])
        await wait_all_tasks_blocked()
        await peer.stream.send_eof()
        await peer.ended()


async def test_whole_commands_before_the_end_are_served(
    stream: DataStream, talk: Conversation, autojump_clock: MockClock
) -> None:
    async with in_memory(stream) as rig, rig.client() as peer:
        request = wire.entry(1) + wire.header() + wire.entry(2)[:20]
        await peer.send(request)
        await peer.stream.send_eof()
        assert await peer.rest() == talk.feed(request)


async def test_a_stop_with_the_start_gets_the_first_entries(
    stream: DataStream, talk: Conversation, autojump_clock: MockClock
) -> None:
    async with in_memory(stream) as rig, rig.client() as peer:
        await say(peer, talk, wire.start(0) + wire.stop() + wire.header())
        await say(peer, talk, wire.start(8) + wire.stop() + wire.start(0) + wire.stop())
        await peer.nothing_more()


class Lockstep:
    """A client whose connection holds nothing: what it does not read is not sent."""

    def __init__(self, server: Server, nursery: trio.Nursery) -> None:
        ours, theirs = trio.testing.lockstep_stream_pair()
        self.peer = Peer(ours)
        nursery.start_soon(server.handle, StreamTransport(theirs))


@pytest.fixture
def long_stream(stream: DataStream) -> DataStream:
    """Some 3 MB in entries of very different sizes."""
    sizes = [0, 1, 1_000_000, 3, 200_000, 17, 17, 900_000, 100_000, 5, 800_000, 0]
    for at, size in enumerate(sizes):
        append(stream, (BOOKMARK, b"%d" % at), (1, bytes([at]) * size))
    return stream


@pytest.mark.parametrize("taken", [1, 18, 19, 40, 5_000, 300_000, 1_500_000])
@pytest.mark.parametrize("how", ["stop", "unknown", "header"])
async def test_a_result_lands_between_two_entries(
    long_stream: DataStream, how: str, taken: int, autojump_clock: MockClock
) -> None:
    request = {"stop": wire.stop(), "unknown": wire.unknown(), "header": wire.header()}[how]
    async with in_memory(long_stream) as rig, trio.open_nursery() as nursery:
        peer = Lockstep(rig.server, nursery).peer
        await peer.ask(wire.start(0), OK)
        peer.unread(await peer.read(taken))
        await peer.send(request)
        entries, answer = await entries_and_what_follows(peer)
        assert answer == result({"stop": 0, "unknown": 9, "header": 1}[how])
        # It does not wait for the end of catch-up: what is in progress is sent, no more.
        assert sum(len(e) for e in entries) < taken + 1_000_100 or how == "unknown"
        model = modelled(long_stream)
        if how == "unknown":
            await peer.expect(model.packed(len(entries)))
            await peer.nothing_more()
        elif how == "stop":
            await peer.ask(wire.entry(0), Conversation(model).feed(wire.entry(0)))
            await peer.ask(wire.start(23), OK + model.packed(23))
        else:
            await peer.ended()
        assert b"".join(entries) == model.packed(0, len(entries))
        nursery.cancel_scope.cancel()


async def entries_and_what_follows(peer: Peer) -> tuple[list[bytes], bytes]:
    entries = []
    while (packet := await peer.packet())[0] == 2:
        entries.append(packet)
    return entries, packet


async def test_many_unknown_commands_to_a_client_that_reads_nothing(
    long_stream: DataStream, autojump_clock: MockClock
) -> None:
    """Each has its Result, and the session does not pile them up meanwhile."""
    async with in_memory(long_stream) as rig, trio.open_nursery() as nursery:
        peer = Lockstep(rig.server, nursery).peer
        await peer.send(wire.start(0))
        asked = 1000

        async def ask() -> None:
            for _ in range(asked):
                await peer.send(wire.unknown())

        nursery.start_soon(ask)
        await wait_all_tasks_blocked()
        [session] = rig.server.sessions
        assert len(session.sender.results) < 100
        whole = modelled(long_stream).packed()
        got = packets(await peer.read(len(OK) + len(whole) + asked * len(result(9))))
        assert got.count(result(9)) == asked
        assert b"".join(p for p in got if p[0] == 2) == whole
        nursery.cancel_scope.cancel()


async def test_a_session_of_a_client_that_reads_nothing_holds_no_entries(
    long_stream: DataStream, autojump_clock: MockClock
) -> None:
    async with in_memory(long_stream) as rig, rig.client() as reader, AsyncExitStack() as stack:
        nursery = await stack.enter_async_context(trio.open_nursery())
        stack.callback(nursery.cancel_scope.cancel)
        lazy = Lockstep(rig.server, nursery).peer
        await lazy.ask(wire.start(0), OK)
        talk = Conversation(modelled(long_stream))
        await say(reader, talk, wire.start(24))
        for _ in range(50):
            await reader.expect(commit(long_stream, talk, (1, b"more" * 100)))
        await reader.nothing_more()
        await lazy.expect(talk.model.packed())
        await lazy.nothing_more()


async def test_what_is_no_socket_catches_up_in_runs_too(
    stream: DataStream, monkeypatch: pytest.MonkeyPatch, autojump_clock: MockClock
) -> None:
    sends = 0
    real = StreamTransport.send

    async def count(self: StreamTransport, data: bytes) -> None:
        nonlocal sends
        sends += 1
        await real(self, data)

    monkeypatch.setattr(StreamTransport, "send", count)
    for _ in range(6):
        append(stream, *[(1, b"x" * 1_000)] * 1_500)
    async with in_memory(stream) as rig, rig.client() as peer:
        await peer.ask(wire.start(0), OK)
        await peer.expect(modelled(stream).packed())
    assert sends < 100


async def test_a_page_whose_damage_a_client_meets(
    long_stream: DataStream, caplog: pytest.LogCaptureFixture, autojump_clock: MockClock
) -> None:
    """It ends there, with one line in the log; a client past that place continues. The entries
    before the damage are sent to further clients, too."""
    model = modelled(long_stream)
    place = long_stream.reader.cursor(8).offset
    with open(long_stream.path, "r+b") as file:
        file.seek(place)
        file.write(b"\x07")
    async with in_memory(long_stream) as rig, rig.client() as behind:
        await behind.ask(wire.start(20), OK + model.packed(20))
        for _ in range(2):
            async with rig.client() as peer:
                await peer.send(wire.start(0))
                assert await peer.rest() == OK + model.packed(0, 8)
        errors = [r for r in caplog.records if r.levelno >= logging.WARNING]
        assert [r.levelname for r in errors] == ["ERROR"]
        assert "page 0 (entries 0 to 8): the entries do not match" in errors[0].getMessage()
        assert "\n" not in errors[0].getMessage()
        assert [each.page for each in rig.server.broadcast.pages.damaged] == [0]
        talk = Conversation(model)
        talk.streaming, talk.sent = True, 24
        await behind.expect(commit(long_stream, talk, (1, b"unconcerned")))
        async with rig.client() as asker:
            await asker.send(wire.entry(8))
            assert await turned_away(asker) == b""
            await asker.ask(wire.entry(20), talk_of(model, wire.entry(20)))


def talk_of(model: Model, request: bytes) -> bytes:
    return Conversation(model).feed(request)


async def test_a_fault_in_a_session_ends_that_session_alone(
    stream: DataStream,
    talk: Conversation,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    autojump_clock: MockClock,
) -> None:
    def fault(self: object, number: int, **how: object) -> bytes:
        raise RuntimeError("from the callback")

    async with in_memory(stream) as rig, rig.client() as other, rig.client() as peer:
        with monkeypatch.context() as patch:
            patch.setattr("datastreamer.storage.read.reader.Reader.packed", fault)
            await peer.send(wire.entry(0))
            await peer.ended()
        assert [r.levelname for r in caplog.records] == ["ERROR"]
        assert "from the callback" in caplog.text
        await say(other, talk, wire.entry(0))


async def test_truncation_ends_who_is_past_it(
    stream: DataStream, talk: Conversation, autojump_clock: MockClock
) -> None:
    async with in_memory(stream) as rig, AsyncExitStack() as stack:
        idle, past, waiting = [await stack.enter_async_context(rig.client()) for _ in range(3)]
        await say(idle, talk, wire.header())
        await past.ask(wire.start(5), OK + talk.model.packed(5))
        await waiting.ask(wire.start(8), OK)
        stream.truncate(6)
        talk.model.truncate(6)
        await past.ended()
        await waiting.ended()
        assert len(rig.server.sessions) == 1
        await say(idle, talk, wire.start(6))
        await idle.expect(commit(stream, talk, (1, b"another seventh")))
        stream.truncate(6)
        await idle.ended()


async def test_truncation_does_not_end_who_is_before_it(
    long_stream: DataStream, autojump_clock: MockClock
) -> None:
    model = modelled(long_stream)
    async with in_memory(long_stream) as rig, trio.open_nursery() as nursery:
        peer = Lockstep(rig.server, nursery).peer
        await peer.ask(wire.start(0), OK)
        got = await peer.read(100)
        long_stream.truncate(22)
        append(long_stream, (9, b"new"))
        model.truncate(22)
        model.pending = [(9, b"new")]
        model.commit()
        got += await peer.read(len(model.packed()) - len(got))
        assert got == model.packed()
        await peer.nothing_more()
        nursery.cancel_scope.cancel()


async def test_truncation_of_what_is_on_its_way(
    long_stream: DataStream, autojump_clock: MockClock
) -> None:
    """The client takes a run in bits; what follows the cut is not sent as if it were there."""
    model = modelled(long_stream)
    async with in_memory(long_stream) as rig, trio.open_nursery() as nursery:
        peer = Lockstep(rig.server, nursery).peer
        await peer.ask(wire.start(0), OK)
        await peer.expect(model.packed()[:10])
        long_stream.truncate(1)
        append(long_stream, (9, b"new"))
        got = await peer.rest()
        assert model.packed().startswith(model.packed()[:10] + got)
        assert len(got) < 100
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize("number", [3, 5, 9])
async def test_update_under_a_client_in_the_middle_of_the_entry(
    long_stream: DataStream, number: int, autojump_clock: MockClock
) -> None:
    """It is given the old entry whole; who comes later is given the new one."""
    model = modelled(long_stream)
    old = model.packed()
    async with in_memory(long_stream) as rig, trio.open_nursery() as nursery:
        peer = Lockstep(rig.server, nursery).peer
        await peer.ask(wire.start(0), OK)
        peer.unread(await peer.read(len(model.packed(0, number)) + 17))
        kind, data = model.entries[number]
        long_stream.update_entry(number, kind, b"\xcc" * len(data))
        model.entries[number] = (kind, b"\xcc" * len(data))
        await peer.expect(old)
        await peer.send(wire.stop())
        await peer.expect(OK)
        await peer.ask(wire.start(0), OK)
        await peer.expect(model.packed())
        nursery.cancel_scope.cancel()


async def test_start_while_a_truncation_is_waiting_for_the_loop(
    stream: DataStream, talk: Conversation, autojump_clock: MockClock
) -> None:
    """A Start that was answered, with not one entry sent yet, is ended like any other."""
    async with in_memory(stream) as rig, trio.open_nursery() as nursery:
        peer = Lockstep(rig.server, nursery).peer
        await peer.send(wire.start(8))
        await wait_all_tasks_blocked()  # the OK waits to be read
        stream.truncate(3)
        with pytest.raises((AssertionError, trio.BrokenResourceError)):
            await peer.read(len(OK) + 1)
        nursery.cancel_scope.cancel()


async def test_cancelling_the_server_ends_all_clients(
    stream: DataStream, talk: Conversation, autojump_clock: MockClock
) -> None:
    clients: list[Peer] = []
    async with in_memory(stream) as rig:
        nursery = trio.lowlevel.current_task().parent_nursery
        assert nursery is not None
        for request in (wire.header(), wire.start(0), wire.start(8), wire.entry(1)[:20]):
            peer = await rig._connect()
            clients.append(peer)
            await peer.send(request)
        await wait_all_tasks_blocked()
        assert len(rig.server.sessions) == 4
    for peer in clients:
        await peer.rest()
        await peer.close()


async def test_a_client_that_asks_faster_than_the_rate(
    stream: DataStream, autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It gets all its answers, later; who streams gets his entries at once."""
    monkeypatch.setattr("datastreamer.server.streaming.broadcast._LOOK_SECONDS", 1_000_000)
    append(stream, (1, b"one"))
    answer = OK + stream.header.pack()
    async with (
        in_memory(stream, patience=1e4, request_rate=5) as rig,
        rig.client() as asks,
        rig.client() as streams,
    ):
        await streams.ask(wire.start(0), OK + modelled(stream).packed())
        began = trio.current_time()
        await asks.send(wire.header() * 105)
        await asks.expect(answer * 5)
        append(stream, *[(2, b"%d" % n) for n in range(1_000)])
        await streams.expect(modelled(stream).packed(1))
        assert trio.current_time() == began
        for _ in range(100):
            await asks.read(len(answer))
        assert trio.current_time() - began == pytest.approx(100 / 5, abs=0.3)
