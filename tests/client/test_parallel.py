"""One part of a stream over several connections: in order, whole, and bounded in memory."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from datastreamer._codec import Entry
from datastreamer.client import parallel as pieces
from datastreamer.client.thread_parallel import blocking_parallel_read
from datastreamer.client.trio_parallel import parallel_read
from datastreamer.errors import (
    ConnectFailed,
    ConnectionLost,
    HistoryChanged,
    UnknownEntry,
    UsageError,
)
from datastreamer.protocol.retry import Backoff
from datastreamer.storage.stream import DataStream
from tests.network.fixtures import append, over_loopback
from tests.network.stub import Stub, StubServer, handler, sample

HUNDRED = sample(100)
SOON = Backoff(0, 0)


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pieces, "PIECE_BYTES", 100_000)


@pytest.fixture
def filled(stream: DataStream) -> DataStream:
    for start in range(0, 8_000, 500):
        append(stream, *[(n % 5, bytes([n % 256]) * (n % 700)) for n in range(start, start + 500)])
    return stream


Read = Callable[..., Awaitable[list[Entry]]]


async def with_trio(servers: Sequence[tuple[str, int]], *what: Any, **named: Any) -> list[Entry]:
    async with parallel_read(servers, *what, **named) as batches:
        return [entry async for batch in batches for entry in batch]


async def with_threads(servers: Sequence[tuple[str, int]], *what: Any, **named: Any) -> list[Entry]:
    def listed() -> list[Entry]:
        batches = blocking_parallel_read(servers, *what, **named)
        return [entry for batch in batches for entry in batch]

    return await trio.to_thread.run_sync(listed)


@pytest.fixture(params=[with_trio, with_threads], ids=["trio", "threads"])
def read(request: pytest.FixtureRequest) -> Read:
    """Either way to read everything."""
    found: Read = request.param
    return found


@pytest.mark.parametrize("connections", [1, 2, 7])
async def test_all_in_order(
    filled: DataStream, small_pieces: None, connections: int, read: Read
) -> None:
    due = list(filled.entries())
    async with over_loopback(filled) as rig:
        for start, stop in [
            (0, None),
            (0, 8_000),
            (17, 7_003),
            (7_999, None),
            (5, 5),
            (8_000, None),
        ]:
            got = await read([rig.address], start, stop, connections=connections, max_bytes=9_000)
            assert got == due[start:stop]
        assert rig.server.counts.accepted > 2 * connections


async def test_what_is_not_taken_is_not_kept(filled: DataStream, small_pieces: None) -> None:
    async with over_loopback(filled) as rig:
        async with parallel_read([rig.address], connections=2, max_bytes=10_000) as batches:
            first = await anext(batches)
            assert first.first_number == 0
            # All but the server's looks at the file have come to a rest.
            await wait_all_tasks_blocked(0.005)
        # 4 pieces of 100 kB at most are underway, of which 4 batches are read ahead each.
        assert rig.server.counts.entries_sent < 8_000 / 3


async def test_a_lost_connection_is_made_again(small_pieces: None, read: Read) -> None:
    def breaks(connection: socket.socket) -> None:
        stub = Stub(HUNDRED)
        left = 600
        while left > 0 and not stub.closed:
            sent = stub.receive(connection.recv(65536))[:left]
            connection.sendall(sent)
            left -= len(sent)

    stubs = [Stub(HUNDRED) for _ in range(4)]
    with StubServer(*map(handler, stubs[:1]), breaks, breaks, *map(handler, stubs[1:])) as server:
        address = ("127.0.0.1", server.port)
        assert await read([address], connections=1, backoff=SOON) == HUNDRED
        assert server.accepted == 5


async def test_another_server_goes_on_where_one_is_lost(
    filled: DataStream, small_pieces: None
) -> None:
    due = list(filled.entries())
    got: list[Entry] = []
    async with over_loopback(filled) as first, over_loopback(filled) as second:
        servers = [first.address, second.address]
        async with parallel_read(servers, connections=4, max_bytes=9_000) as batches:
            async for batch in batches:
                got += batch
                if len(got) < 2_000:
                    continue
                for session in list(first.server.sessions):
                    session.end("failed", "for the test")
        assert second.server.counts.entries_sent > 4_000
    assert got == due


async def test_a_server_that_is_not_there_is_passed_over(filled: DataStream, read: Read) -> None:
    with socket.create_server(("127.0.0.1", 0)) as nobody:
        gone = nobody.getsockname()
    async with over_loopback(filled) as rig:
        assert len(await read([gone, rig.address], connections=3)) == 8_000
    with pytest.raises(ConnectFailed):
        await read([gone], connections=3)


class Leaving(StubServer):
    """Serves a connection that asks for the header, and half of another; then it is gone."""

    def __init__(self, most: int) -> None:
        super().__init__(handler(Stub(HUNDRED)), self.leave)
        self.most = most

    def leave(self, connection: socket.socket) -> None:
        stub, left = Stub(HUNDRED), self.most
        while left > 0 and (data := connection.recv(65536)):
            sent = stub.receive(data)[:left]
            connection.sendall(sent)
            left -= len(sent)
        self.listener.close()


async def test_one_that_is_gone_at_the_end_need_not_tell(read: Read) -> None:
    with (
        Leaving(1_000) as first,
        StubServer(*[handler(Stub(HUNDRED)) for _ in range(2)]) as second,
    ):
        servers = [(server.host, server.port) for server in (first, second)]
        assert await read(servers, connections=1, max_bytes=300) == HUNDRED
        assert (first.accepted, second.accepted) == (2, 2)


async def test_somebody_is_to_tell_at_the_end(read: Read) -> None:
    with Leaving(1 << 20) as only, pytest.raises((ConnectFailed, ConnectionLost)):
        await read([(only.host, only.port)], connections=1)


@pytest.mark.parametrize("connections", [1, 3])
async def test_a_stop_behind_the_end_is_not_waited_for(
    filled: DataStream, connections: int, read: Read
) -> None:
    async with over_loopback(filled) as rig:
        with pytest.raises(UnknownEntry, match="no entry 8000: the stream holds 0 to 7999"):
            await read([rig.address], 7_000, 8_001, connections=connections)


async def test_what_a_server_lacks_is_read_from_the_next(read: Read) -> None:
    with (
        StubServer(*[handler(Stub(HUNDRED[:50])) for _ in range(3)]) as behind,
        StubServer(*[handler(Stub(HUNDRED)) for _ in range(3)]) as ahead,
    ):
        servers = [(server.host, server.port) for server in (behind, ahead)]
        assert await read(servers, 0, 100, connections=1) == HUNDRED


async def test_none_that_has_it_is_an_error(read: Read) -> None:
    def closes(connection: socket.socket) -> None:
        stub = Stub(HUNDRED)
        for _ in range(2):
            connection.sendall(stub.receive(connection.recv(65536)))

    stubs = [handler(Stub(HUNDRED))] + [closes] * 9
    with StubServer(*stubs) as server, pytest.raises(ConnectionLost):
        await read([("127.0.0.1", server.port)], connections=1, resume=False)


async def test_a_stream_that_was_changed_meanwhile_is_told(
    filled: DataStream, small_pieces: None
) -> None:
    """Even where each entry was there when it was asked for."""
    async with over_loopback(filled) as rig:

        async def reads() -> None:
            async with parallel_read([rig.address], connections=2, max_bytes=9_000) as batches:
                async for batch in batches:
                    if batch.first_number == 0:
                        filled.truncate(7_999)
                        append(filled, (1, b"another"))

        with pytest.raises(HistoryChanged, match="another history"):
            await reads()


async def test_servers_of_different_streams_are_told_apart(
    filled: DataStream, tmp_path: Any, small_pieces: None, read: Read
) -> None:
    other = DataStream.create(tmp_path / "other.bin", system_id=7, sync="os", index="memory")
    with other:
        append(other, *[(1, b"x") for _ in range(8_000)])
        async with over_loopback(filled) as rig, over_loopback(other) as wrong:
            with pytest.raises(HistoryChanged, match="another stream"):
                await read([rig.address, wrong.address], connections=2)


async def test_an_error_of_the_reader_comes_out_as_it_is(filled: DataStream) -> None:
    async with over_loopback(filled) as rig:

        async def fails() -> None:
            async with parallel_read([rig.address]) as batches:
                async for batch in batches:
                    assert len(batch) / 0

        with pytest.raises(ZeroDivisionError):
            await fails()
        async with parallel_read([rig.address]) as batches:
            assert (await anext(batches)).first_number == 0


async def test_an_old_server_is_read_too(small_pieces: None, read: Read) -> None:
    stubs = [Stub(HUNDRED, extensions="refused") for _ in range(4)]
    with StubServer(*map(handler, stubs)) as server:
        assert await read([("127.0.0.1", server.port)], connections=1) == HUNDRED


async def test_wrong_usage(read: Read) -> None:
    for servers, connections in ([], 1), ([("a", 1)], 0):
        with pytest.raises(UsageError, match="one server at least"):
            await read(servers, connections=connections)


def test_threads_end_with_the_iterator() -> None:
    before = threading.active_count()
    with StubServer(*[handler(Stub(HUNDRED))] + [handler(Stub(HUNDRED)) for _ in range(5)]) as made:
        batches = blocking_parallel_read([("127.0.0.1", made.port)], connections=1, max_bytes=300)
        assert next(batches).first_number == 0
        assert threading.active_count() > before
        batches.close()  # type: ignore[attr-defined]
    assert threading.active_count() == before


def test_trio_is_not_loaded() -> None:
    code = "import sys, datastreamer.client.thread_parallel; sys.exit('trio' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
