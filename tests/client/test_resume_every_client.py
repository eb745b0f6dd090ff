"""Every client's streaming over a server that is lost and comes back."""

from __future__ import annotations

import socket
import time
from typing import Any

import pytest

from datastreamer._codec import Entry
from datastreamer.client.blocking_client import BlockingClient
from datastreamer.client.trio_driver import connect
from datastreamer.errors import (
    BadFromEntry,
    ConnectionLost,
    HistoryChanged,
    ProtocolViolation,
)
from datastreamer.protocol.commands import HeaderQuery, Start
from datastreamer.protocol.resume import Rollback
from datastreamer.protocol.retry import Backoff
from datastreamer.transport.trio_channel import SocketChannel
from tests.client.test_resume import THOUSAND, Another, Closing, rewritten
from tests.network.drivers import client_of_kind, kinds
from tests.network.proxy import NONE, End, Fault, FaultyServer
from tests.network.stub import Stub, sample

AT_ONCE = Backoff(0, 0)


def behind(*stubs: Stub, faults: tuple[Fault, ...] = (), ends: bool = False) -> FaultyServer:
    """A server whose connections get these stubs in turn."""

    def giving(stub: Stub) -> Any:
        return lambda: stub

    all_faults = [*faults, *[NONE] * len(stubs)]
    plan = [(giving(stub), fault) for stub, fault in zip(stubs, all_faults, strict=False)]
    return FaultyServer(*plan, ends=ends)


def client_of(kind: str, server: FaultyServer, **options: Any) -> Any:
    return client_of_kind(kind, "127.0.0.1", server.port, backoff=AT_ONCE, **options)


def gather(items: Any, seen: list[Entry]) -> None:
    for item in items:
        seen.extend([item] if isinstance(item, Entry) else item)


@kinds
@pytest.mark.parametrize("method", ["entries", "batches"])
def test_it_continues_after_the_last_received_entry(
    kind: str, method: str, caplog: pytest.LogCaptureFixture
) -> None:
    back = Stub(THOUSAND)
    seen: list[Entry] = []
    with (
        behind(Closing(THOUSAND[:600]), back) as server,
        client_of(kind, server) as client,
    ):
        gather(getattr(client, method)(from_entry=5, stop=1000), seen)
        assert seen == THOUSAND[5:]
        assert client.entry(7) == THOUSAND[7]
        assert server.accepted == 2
    assert back.seen[:2] == [HeaderQuery(), Start(344)]
    peer = f"127.0.0.1:{server.port}"
    assert [record.getMessage() for record in caplog.records] == [
        f"lost the connection to {peer}, trying again: {peer} closed the connection",
        f"connected to {peer} again, continuing at entry 600",
    ]


@kinds
def test_another_history(kind: str) -> None:
    for other, message in (
        (Stub(THOUSAND[:590]), "entries 590 to 599, which were received, are missing"),
        (Stub(rewritten(THOUSAND, 400, 410)), "entry 400 is not the one that was received"),
        (Another(THOUSAND), "serves another stream"),
    ):
        with (
            behind(Closing(THOUSAND[:600]), other, Stub(THOUSAND)) as server,
            client_of(kind, server) as client,
        ):
            seen: list[Entry] = []
            with pytest.raises(HistoryChanged, match=message):
                gather(client.entries(), seen)
            assert seen == THOUSAND[:600]
            assert client.entry(7) == THOUSAND[7]


@kinds
def test_a_rollback_is_reported_and_followed(kind: str) -> None:
    other = rewritten(THOUSAND, 550, 900)
    mine: list[Entry] = []

    def go_back(rollback: Rollback) -> None:
        assert (rollback.to_entry, rollback.from_entry) == (550, 600)
        del mine[rollback.to_entry :]

    with (
        behind(Closing(THOUSAND[:600]), Stub(other)) as server,
        client_of(kind, server) as client,
    ):
        gather(client.batches(stop=1000, on_rollback=go_back), mine)
    assert mine == other


@kinds
def test_a_gap_twice_is_a_violation(kind: str) -> None:
    class Gap(Stub):
        def pump(self) -> bytes:
            at = self.cursor or 0
            super().pump()
            return b"".join(e.pack() for e in self.entries[at:] if e.number != 500)

    with (
        behind(Gap(THOUSAND), Gap(THOUSAND), Stub(THOUSAND)) as server,
        client_of(kind, server) as client,
    ):
        seen: list[Entry] = []
        with pytest.raises(ProtocolViolation, match="501 where 500"):
            gather(client.batches(), seen)
        assert seen == THOUSAND[:500]
        gather(client.batches(from_entry=500, stop=1000), seen)
        assert seen == THOUSAND


def test_a_server_that_does_not_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    monkeypatch.setattr(time, "sleep", lambda seconds: now.__setitem__(0, now[0] + seconds))
    with behind(Closing(THOUSAND[:600])) as server:
        client = BlockingClient("127.0.0.1", server.port, retry_for=60)
        batches = client.batches()
        while next(batches).next_number < 600:
            pass
    with pytest.raises(
        ConnectionLost, match=r"given up after (5\d\.\d|60\.0) s: cannot connect to"
    ):
        next(batches)
    assert 1055 <= now[0] <= 1060
    assert list(batches) == []
    client.close()


def test_an_interrupt_while_it_waits_loses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(seconds: float) -> None:
        raise KeyboardInterrupt

    with (
        behind(Closing(THOUSAND[:600]), Stub(THOUSAND)) as server,
        client_of("blocking", server) as client,
    ):
        seen: list[Entry] = []
        entries = client.entries(stop=1000)
        with monkeypatch.context() as patched:
            patched.setattr(time, "sleep", interrupted)
            with pytest.raises(KeyboardInterrupt):
                gather(entries, seen)
        assert seen == THOUSAND[:600]
        gather(entries, seen)
        assert seen == THOUSAND


@kinds
def test_silence(kind: str) -> None:
    deaf = Stub(THOUSAND, deaf=(HeaderQuery,))
    half = Fault(60, End.HALF_OPEN)
    grown = [Stub(THOUSAND) for _ in range(9)]
    with (
        behind(Stub(THOUSAND[:600]), *grown, faults=(half,)) as server,
        client_of(kind, server, heartbeat=0.01) as client,
    ):
        assert list(client.entries(from_entry=600, stop=1000)) == THOUSAND[600:]
        assert server.accepted >= 4
    with (
        behind(Stub(THOUSAND[:600]), deaf, *grown) as server,
        client_of(kind, server, heartbeat=0.01, timeout=0.05) as client,
    ):
        assert list(client.entries(stop=1000)) == THOUSAND
        assert server.accepted >= 3


@kinds
def test_a_query_over_a_stale_connection_is_asked_again(kind: str) -> None:
    class Brief(Stub):
        def answer(self, event: Any) -> bytes:
            if len(self.seen) > 1:
                self.closed = True
                return b""
            return super().answer(event)

    with (
        behind(*[Brief(THOUSAND) for _ in range(4)]) as server,
        client_of(kind, server) as client,
    ):
        for number in range(3):
            assert client.entry(number) == THOUSAND[number]
            assert server.accepted == number + 1


@kinds
def test_what_is_wrong_at_first_is_an_error(kind: str) -> None:
    with (
        behind(Stub(sample(10))) as server,
        client_of(kind, server) as client,
        pytest.raises(BadFromEntry),
    ):
        next(client.entries(from_entry=11))
    with (
        behind(Stub(sample(10), stream_type=2), Stub(sample(10))) as server,
        client_of(kind, server) as client,
        pytest.raises(ConnectionLost, match="another stream type"),
    ):
        next(client.entries())


async def test_the_system_watches_over_both_clients_connections() -> None:
    with (
        behind(Stub(sample(10)), Stub(sample(10))) as server,
        client_of("blocking", server) as client,
    ):
        async with connect("127.0.0.1", server.port) as other:
            channel = other._engine.channel
            assert isinstance(channel, SocketChannel)
            for made in (client._engine.channel, channel._socket):
                assert made is not None
                assert made.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
                if hasattr(socket, "TCP_KEEPIDLE"):
                    assert made.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == 30
