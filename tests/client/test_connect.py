"""The Trio client over loopback: how it connects, and connects again."""

from __future__ import annotations

import functools
import re
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import trio
import trio.testing

from datastreamer._codec import pack_entry
from datastreamer.client.async_client import Client
from datastreamer.client.blocking_client import BlockingClient
from datastreamer.client.trio_driver import connect
from datastreamer.errors import (
    BadFromEntry,
    ConnectFailed,
    ConnectionLost,
    NoAnswer,
    ProtocolViolation,
    StreamClosed,
    UsageError,
)
from datastreamer.format import TYPE_BOOKMARK, Header
from datastreamer.protocol.commands import EntryQuery, HeaderQuery, RangeQuery, Start
from datastreamer.protocol.messages import OK, Capabilities
from tests.network.proxy import NONE, End, Fault, FaultyServer
from tests.network.stub import Stub, StubServer, handler, key, sample
from tests.network.wired import listed

TEN = sample(10)


async def test_connect() -> None:
    with StubServer(handler(Stub(sample(500)))) as server:
        async with connect("127.0.0.1", server.port) as client:
            assert client.peer == f"127.0.0.1:{server.port}"
            assert client.stream_type == 1
            assert (await client.header()).total_entries == 500
            assert await client.entry(499) == sample(500)[499]
            assert await client.bookmark(key(10)) == sample(500)[11]
            assert await listed(client.entries(stop=500)) == sample(500)
            found = await listed(client.entries_by_number(range(500), window=64))
            assert found == sample(500)
            async with client.batches(from_bookmark=key(490)) as batches:
                batch = await batches.__anext__()
                assert batch.first_number == 490
            assert await client.entry(7) == sample(500)[7]
        with pytest.raises(StreamClosed):
            await client.header()
        assert server.accepted == 1


async def test_connect_by_another_stream_type() -> None:
    with StubServer(handler(Stub(TEN, stream_type=77))) as server:
        async with connect("127.0.0.1", server.port, stream_type=77) as client:
            assert await client.entry(7) == TEN[7]


async def test_connect_over_ipv6() -> None:
    try:
        server = StubServer(handler(Stub(TEN)), host="::1")
    except OSError:
        pytest.skip("no IPv6 on loopback here")
    with server:
        async with connect("::1", server.port) as client:
            assert client.peer == f"[::1]:{server.port}"
            assert await client.entry(7) == TEN[7]


async def test_a_refused_connection_is_made_again_without_a_word() -> None:
    stubs = [Stub(TEN, after_refusal=kind) for kind in ("closed", "refusing", "usable")]
    with StubServer(*map(handler, stubs)) as server:
        async with connect("127.0.0.1", server.port) as client:
            for accepted in (1, 2, 3, 3):
                with pytest.raises(BadFromEntry):
                    await listed(client.entries(from_entry=11))
                assert server.accepted == accepted
            assert await client.entry(4) == TEN[4]


async def test_a_connection_cancelled_in_mid_query_is_made_again() -> None:
    stubs = Stub(TEN, deaf=(EntryQuery,)), Stub(TEN)
    with StubServer(*map(handler, stubs)) as server:
        async with connect("127.0.0.1", server.port) as client:
            with trio.move_on_after(0.01) as scope:
                await client.entry(3)
            assert scope.cancelled_caught
            assert await client.entry(3) == TEN[3]


async def test_a_lost_socket() -> None:
    def hang_up(connection: Any) -> None:
        connection.recv(16)

    with StubServer(hang_up, handler(Stub(TEN))) as server:
        async with connect("127.0.0.1", server.port) as client:
            with pytest.raises(ConnectionLost, match=re.escape(client.peer)):
                await client.entry(3)
            assert await client.entry(3) == TEN[3]


@pytest.mark.parametrize("words", [16, 24])
async def test_the_error_of_a_server_that_never_answers_names_possible_reasons(words: int) -> None:
    """Whether the server ends the connection or resets it, as one does that has no place."""

    def turn_away(connection: Any) -> None:
        connection.recv(words)

    message = r"without an answer: .*accept no more clients, and metrics ports$"
    with StubServer(turn_away, turn_away) as server:
        async with connect("127.0.0.1", server.port) as client:
            with pytest.raises(ConnectionLost, match=message):
                await client.header()
        with (
            BlockingClient("127.0.0.1", server.port) as blocking,
            pytest.raises(ConnectionLost, match=message),
        ):
            blocking.header()


async def test_who_was_answered_is_not() -> None:
    def once(connection: Any) -> None:
        stub = Stub(TEN)
        connection.sendall(stub.receive(connection.recv(24)))
        connection.recv(16)

    with StubServer(once) as server:
        async with connect("127.0.0.1", server.port, resume=False) as client:
            await client.header()
            with pytest.raises(ConnectionLost, match=r"connect again$"):
                await client.header()


STARTED = OK + pack_entry(4, 7, b"an event")
RANGED = OK + (5).to_bytes(8, "big")
MARKED = pack_entry(4, TYPE_BOOKMARK, b"k")


@pytest.mark.parametrize(
    "says, between",
    [
        (STARTED, False),
        (OK + pack_entry(4, TYPE_BOOKMARK, b"l"), False),
        (RANGED + pack_entry(4, 7, b"k") + pack_entry(5, TYPE_BOOKMARK, b"l"), True),
        (RANGED + MARKED + pack_entry(5, TYPE_BOOKMARK, b"k"), True),
    ],
)
async def test_another_entry_in_place_of_a_bookmark(says: bytes, between: bool) -> None:
    """As servers send whose index is behind their stream: such entries are not handed out."""

    def stale(connection: Any) -> None:
        if between:
            connection.recv(100)
            connection.sendall(OK + Capabilities().pack() + OK + Header(2, 1, 1, 4096, 6).pack())
        connection.recv(100)
        connection.sendall(says)
        connection.recv(100)

    message = "instead of bookmark 0x6[bc]: its index does not match"
    with StubServer(stale, stale) as server:
        place = ("127.0.0.1", server.port)
        async with connect(*place, resume=False) as client:
            entries = client.between_bookmarks(b"k", b"l") if between else None
            with pytest.raises(ProtocolViolation, match=message):
                await listed(entries or client.entries(from_bookmark=b"k"))
        with BlockingClient(*place, resume=False) as blocking:
            runs = blocking.between_bookmarks(b"k", b"l") if between else None
            with pytest.raises(ProtocolViolation, match=message):
                list(runs or blocking.batches(from_bookmark=b"k"))


async def test_a_bookmark_behind_which_nothing_comes() -> None:
    """It is there, so its entry is due: silence is not that of a quiet stream."""
    silent, asked = Fault(len(OK), End.HALF_OPEN, 65536), NONE
    servers = [(functools.partial(Stub, TEN), fault) for fault in (silent, asked) * 2]
    message = re.escape("sent nothing for 0.1 s, not even the bookmark's own entry")
    with FaultyServer(*servers) as server:
        place = ("127.0.0.1", server.port)
        async with connect(*place, resume=False, heartbeat=0.1) as client:
            with pytest.raises(ConnectionLost, match=message):
                await listed(client.entries(from_bookmark=key(0)))
        with (
            BlockingClient(*place, resume=False, heartbeat=0.1) as blocking,
            pytest.raises(ConnectionLost, match=message),
        ):
            list(blocking.entries(from_bookmark=key(0)))


@pytest.mark.parametrize(
    "iterate, deaf",
    [
        (lambda client: client.entries(), HeaderQuery),
        (lambda client: client.between_bookmarks(key(0), key(0)), RangeQuery),
        (lambda client: client.read_batches(), HeaderQuery),
    ],
)
async def test_a_beginning_that_is_not_answered(
    iterate: Callable[[Client], Any], deaf: type
) -> None:
    """`timeout` bounds it, also without `resume`."""
    stub = Stub(TEN, deaf=(Start, deaf))
    with StubServer(handler(stub)) as server:
        async with connect("127.0.0.1", server.port, resume=False, timeout=0.2) as client:
            with pytest.raises(NoAnswer, match=r"within 0\.2 s$"):
                await listed(iterate(client))


async def test_closing_a_socket_under_a_task() -> None:
    with StubServer(handler(Stub(TEN))) as server:
        async with connect("127.0.0.1", server.port) as client, trio.open_nursery() as nursery:

            async def follow() -> None:
                with pytest.raises(StreamClosed, match="while it was in use"):
                    await listed(client.entries())

            nursery.start_soon(follow)
            await trio.testing.wait_all_tasks_blocked(0.01)
            await client.aclose()


async def test_a_request_larger_than_the_socket_takes() -> None:
    # Never so in practice: the requests of a whole window fit.
    with StubServer(handler(Stub(TEN))) as server:
        async with connect("127.0.0.1", server.port) as client:
            assert await listed(client.entries_by_number([5] * 50_000, window=1024)) == (
                [TEN[5]] * 50_000
            )


async def test_a_port_without_a_listener() -> None:
    with StubServer() as server:
        port = server.port
    message = (
        rf"cannot connect to 127.0.0.1:{port}: Connection refused; is a server running there\?"
    )
    with pytest.raises(ConnectFailed, match=message):
        async with connect("127.0.0.1", port):
            raise AssertionError


async def test_no_such_host() -> None:
    with pytest.raises(ConnectFailed, match=r"^cannot connect to host.invalid:6900: [^;]+$"):
        async with connect("host.invalid"):
            raise AssertionError


@pytest.mark.parametrize("host", ["a..b", "a" * 64, "\ud800", "unix:\ud800"])
async def test_a_name_that_no_host_can_have(host: str) -> None:
    message = "cannot connect to .*: (?!TLS)[^;]+$"
    with pytest.raises(ConnectFailed, match=message):
        async with connect(host):
            raise AssertionError
    with pytest.raises(ConnectFailed, match=message):
        await trio.to_thread.run_sync(BlockingClient, host)


@pytest.mark.parametrize("port", [0, -1, 65536])
async def test_no_such_port(port: int) -> None:
    with pytest.raises(UsageError, match=str(port)):
        async with connect("127.0.0.1", port):
            raise AssertionError


async def test_no_answer_in_time(monkeypatch: pytest.MonkeyPatch, autojump_clock: Any) -> None:
    async def never(host: str, port: int) -> Awaitable[trio.abc.Stream]:
        await trio.sleep_forever()
        raise AssertionError

    monkeypatch.setattr(trio, "open_tcp_stream", never)
    with pytest.raises(ConnectFailed, match=r"127.0.0.1:6900: no answer within 3 s"):
        async with connect("127.0.0.1", timeout=3):
            raise AssertionError
    assert trio.current_time() == pytest.approx(3, abs=0.1)
