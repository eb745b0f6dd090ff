"""Every kind of client against stub servers on loopback: one engine, one behaviour."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from datastreamer._codec import Entry
from datastreamer.errors import (
    AlreadyStarted,
    BadBookmark,
    BadFromEntry,
    BadRange,
    ConnectFailed,
    ConnectionLost,
    ProtocolViolation,
    StreamClosed,
    UnknownBookmark,
    UnknownEntry,
    UsageError,
)
from datastreamer.format import Header
from datastreamer.protocol.commands import EntryQuery, Start, Stop
from datastreamer.service.embedded import StreamServer
from tests.network.drivers import client_of_kind, kinds
from tests.network.stub import Stub, StubServer, handler, key, sample
from tests.network.vanishing import linux

pytestmark = kinds

TEN = sample(10)
HUNDRED = sample(100)


@contextmanager
def client_of(kind: str, *stubs: Stub, timeout: float = 10) -> Iterator[tuple[Any, StubServer]]:
    with (
        StubServer(*map(handler, stubs)) as server,
        client_of_kind(kind, "127.0.0.1", server.port, timeout=timeout, resume=False) as client,
    ):
        yield client, server


def gather(items: Any, seen: list[Entry]) -> None:
    """What comes before an error, too."""
    for item in items:
        seen.append(item)  # noqa: PERF402


def test_queries(kind: str) -> None:
    with client_of(kind, Stub(sample(25))) as (client, server):
        assert client.peer == f"127.0.0.1:{server.port}"
        assert client.header() == Header(2, 137, 1, 4096 + 25, 25)
        assert client.entry(13) == sample(25)[13]
        assert client.bookmark(key(20)) == sample(25)[21]
        with pytest.raises(UnknownEntry, match="no entry 25: the stream holds 0 to 24"):
            client.entry(25)
        with pytest.raises(UnknownBookmark):
            client.bookmark(b"no")
        assert client.entry(14) == sample(25)[14]
        assert server.accepted == 1


def test_what_cannot_be_asked(kind: str) -> None:
    with client_of(kind, Stub(TEN)) as (client, _):
        with pytest.raises(UsageError, match="-1"):
            client.entry(-1)
        with pytest.raises(BadBookmark):
            client.bookmark(bytes(17))
        with pytest.raises(BadRange):
            client.batches(from_entry=5, stop=4)
        assert client.entry(1) == TEN[1]


def test_entries_and_batches(kind: str) -> None:
    with client_of(kind, Stub(HUNDRED)) as (client, _):
        assert list(client.entries(stop=100)) == HUNDRED
        assert list(client.entries(from_entry=98, stop=99)) == HUNDRED[98:99]
        assert list(client.entries(from_bookmark=key(30), stop=33)) == HUNDRED[30:33]
        assert [e for batch in client.batches(stop=100) for e in batch] == HUNDRED
        assert list(client.entries(from_entry=7, stop=7)) == []
        assert client.entry(5) == HUNDRED[5]


def test_leaving_early_leaves_the_client_usable(kind: str) -> None:
    stub = Stub(HUNDRED, behind_stop=[Entry(n, 1, b"rest") for n in range(100, 150)])
    with client_of(kind, stub) as (client, server):
        with client.entries(from_entry=5) as entries:
            assert next(entries) == HUNDRED[5]
        assert list(entries) == []
        assert client.entry(3) == HUNDRED[3]
        for _entry in client.entries():
            break
        assert client.entry(4) == HUNDRED[4]
        batches = client.batches()
        assert next(batches).first_number == 0
        client.header()
        with pytest.raises(UsageError, match="ended by a later call"):
            next(batches)
        batches.close()
        assert server.accepted == 1
    assert stub.seen[:6] == [Start(5), Stop(), EntryQuery(3), Start(0), Stop(), EntryQuery(4)]


def test_stop_inside_the_loop(kind: str) -> None:
    with client_of(kind, Stub(HUNDRED)) as (client, _):
        client.stop()
        seen = []
        for entry in client.entries():
            seen.append(entry.number)
            if entry.number == 5:
                client.stop()
        assert seen == [0, 1, 2, 3, 4, 5]
        assert client.entry(6) == HUNDRED[6]


def test_where_operations_end(kind: str, tmp_path: Path) -> None:
    with (
        StreamServer(tmp_path / "s.bin", host="127.0.0.1", port=0, sync="os") as server,
        client_of_kind(kind, *server.addresses[0]) as client,
        client.batches(commits=True) as batches,
    ):
        reached = 0
        for count in (3, 1, 5):
            with server.stream.atomic_op() as op:
                op.add_entries(1, [b"data"] * count)
            total = server.stream.total_entries
            while reached < total:
                reached = next(batches).next_number
                assert batches.commit_ahead == total


@pytest.mark.parametrize("window", [1, 3, 1024])
def test_entries_by_number(kind: str, window: int) -> None:
    numbers = [n * 37 % 100 for n in range(3000)]
    with client_of(kind, Stub(HUNDRED)) as (client, _):
        found = list(client.entries_by_number(numbers, window=window))
        assert found == [HUNDRED[n] for n in numbers]
        seen: list[Entry] = []
        with pytest.raises(UnknownEntry, match="777"):
            gather(client.entries_by_number([3, 4, 777, 5], window=window), seen)
        assert seen == HUNDRED[3:5]
        with client.entries_by_number(range(100), window=window) as entries:
            assert next(entries) == HUNDRED[0]
        assert client.entry(6) == HUNDRED[6]


@pytest.mark.parametrize(
    "after_refusal, connections", [("usable", 1), ("closed", 2), ("refusing", 2)]
)
def test_a_refusal_is_raised_and_the_client_stays_usable(
    kind: str, after_refusal: str, connections: int
) -> None:
    with client_of(kind, Stub(TEN, after_refusal=after_refusal), Stub(TEN)) as (client, server):
        with pytest.raises(BadFromEntry, match="Start from entry 11: Bad from entry"):
            list(client.entries(from_entry=11))
        assert client.entry(4) == TEN[4]
        assert server.accepted == connections


def test_a_refused_look_up(kind: str) -> None:
    stub = Stub(TEN)
    stub.refusing = True
    with client_of(kind, stub, Stub(TEN)) as (client, server):
        with pytest.raises(AlreadyStarted):
            list(client.entries_by_number([3, 4, 5]))
        assert client.entry(3) == TEN[3]
        assert server.accepted == 2


def test_the_wait_for_entries_has_no_bound(kind: str) -> None:
    stub = Stub(TEN[:1])

    def later(connection: socket.socket) -> None:
        connection.sendall(stub.receive(connection.recv(100)))
        # Longer than the client waits for an answer; nothing else shows that it waits.
        connection.settimeout(0.1)
        with pytest.raises(TimeoutError):
            connection.recv(1)
        connection.sendall(stub.append(TEN[1]))
        connection.settimeout(None)
        handler(stub)(connection)

    with (
        StubServer(later) as server,
        client_of_kind(kind, "127.0.0.1", server.port, timeout=0.05, resume=False) as client,
    ):
        assert list(client.entries(stop=2)) == TEN[:2]


def test_a_gap_is_a_violation_and_costs_the_connection(kind: str) -> None:
    class Gap(Stub):
        def pump(self) -> bytes:
            return b"".join(entry.pack() for entry in (*TEN[:5], *TEN[6:]))

    with client_of(kind, Gap(TEN), Stub(TEN)) as (client, server):
        seen: list[Entry] = []
        with pytest.raises(ProtocolViolation, match=r"127.0.0.1:\d+ sent .*6 where 5"):
            gather(client.entries(), seen)
        assert seen == TEN[:5]
        assert client.entry(3) == TEN[3]
        assert server.accepted == 2


def test_the_end_of_the_connection(kind: str) -> None:
    class Short(Stub):
        def pump(self) -> bytes:
            self.closed = True
            return super().pump()

    with client_of(kind, Short(TEN), Stub(TEN)) as (client, _):
        seen: list[Entry] = []
        with pytest.raises(ConnectionLost, match="closed the connection"):
            gather(client.entries(), seen)
        assert seen == TEN
        assert client.entry(3) == TEN[3]


def test_a_wrong_stream_type_shows_at_the_first_request(kind: str) -> None:
    message = "another stream type than"
    with (
        client_of(kind, Stub(TEN, stream_type=2)) as (client, _),
        pytest.raises(ConnectionLost, match=message),
    ):
        client.header()


def test_a_closed_client(kind: str) -> None:
    with client_of(kind, Stub(TEN)) as (client, _):
        entries = client.entries()
        next(entries)
        client.close()
        client.close()
        with pytest.raises(StreamClosed):
            client.header()
        with pytest.raises(StreamClosed):
            next(client.entries())
        assert list(entries) == []


def test_a_port_without_a_listener(kind: str) -> None:
    with StubServer() as server:
        port = server.port
    message = (
        rf"cannot connect to 127.0.0.1:{port}: Connection refused; is a server running there\?"
    )
    with pytest.raises(ConnectFailed, match=message):
        client_of_kind(kind, "127.0.0.1", port).__enter__()


def test_no_such_host_or_port(kind: str) -> None:
    with pytest.raises(ConnectFailed, match=r"cannot connect to host.invalid:6900: "):
        client_of_kind(kind, "host.invalid").__enter__()
    with pytest.raises(UsageError, match="65536"):
        client_of_kind(kind, "127.0.0.1", 65536).__enter__()


@linux
def test_a_host_whose_first_address_does_not_answer(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (
        socket.create_server(("127.0.0.2", 0), backlog=0) as full,
        contextlib.ExitStack() as stack,
        StubServer(handler(Stub(TEN))) as server,
    ):
        for _ in range(4):
            waiting = stack.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(full.getsockname())
        addresses = [full.getsockname(), ("127.0.0.1", server.port)]
        found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", address) for address in addresses]
        monkeypatch.setattr(socket, "getaddrinfo", lambda *words, **options: found)
        with client_of_kind(kind, "two.example", 6900, timeout=1) as client:
            assert client.header().total_entries == 10
