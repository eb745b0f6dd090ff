"""Admission: who is let in, who is refused, what is said about it, and the pace."""

from __future__ import annotations

import logging
import socket
from contextlib import AsyncExitStack

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st
from trio.testing import wait_all_tasks_blocked

from datastreamer.net.counts import Counts
from datastreamer.net.gate import Gate, Pace
from datastreamer.net.limits import Limits
from datastreamer.storage.stream import DataStream
from tests.net import model as wire
from tests.net.conftest import over_loopback
from tests.net.model import OK


def test_so_many_at_a_time() -> None:
    counts = Counts()
    gate = Gate(Limits(max_clients=2), counts)
    assert [gate.admit("a", "a:1", 0) for _ in range(3)] == [True, True, False]
    gate.leave("a")
    assert [gate.admit("b", "b:1", 0) for _ in range(2)] == [True, False]
    assert (counts.accepted, counts.refused) == (3, {"max_clients": 2})


def test_so_many_of_one_address() -> None:
    counts = Counts()
    gate = Gate(Limits(max_clients=4, max_clients_per_address=2), counts)
    assert [gate.admit("a", "a:1", 0) for _ in range(3)] == [True, True, False]
    assert [gate.admit("b", "b:1", 0) for _ in range(3)] == [True, True, False]
    gate.leave("a")
    assert gate.admit("c", "c:1", 0)
    assert not gate.admit("a", "a:1", 0)
    assert counts.refused == {"max_clients_per_address": 1, "max_clients": 2}
    for host in "abbc":
        gate.leave(host)
    assert not gate._by_address, "addresses are not kept for ever"
    assert gate.clients == 0


def test_a_line_every_few_seconds(caplog: pytest.LogCaptureFixture) -> None:
    gate = Gate(Limits(max_clients=1), Counts())
    gate.admit("a", "a:1", 100)

    def lines() -> list[str]:
        found = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
        caplog.clear()
        return found

    for at in range(1_000):
        gate.admit("b", f"b:{at}", 100 + at / 1000)
    assert lines() == ["b:0 refused: 1 clients are connected, which is the limit"]
    gate.tell(104.9)
    assert lines() == []
    gate.tell(105)
    [line] = lines()
    assert line == (
        "b:999 refused: 1 clients are connected, which is the limit "
        "(999 refused since the last such line)"
    )
    gate.tell(200)
    assert lines() == []


@given(
    rate=st.floats(0.1, 1000),
    waits=st.lists(st.floats(0, 5), min_size=1, max_size=200),
)
def test_a_pace_is_kept(rate: float, waits: list[float]) -> None:
    """Never more than one second's together, never more than the rate in the long run."""
    now = start = 1000.0
    pace = Pace(rate, now)
    for steps, wait in enumerate(waits):
        now += wait
        now += pace.step(now)
        assert steps + 1 <= max(1, rate) + (now - start) * rate + 1e-6


def test_who_is_slower_than_the_pace_never_waits() -> None:
    pace = Pace(10, 0)
    assert all(pace.step(0.2 * at) == 0 for at in range(100))
    assert all(pace.step(30) == 0 for _ in range(10))
    assert pace.step(30) == pytest.approx(0.1)
    assert pace.step(30.1) == pytest.approx(0.1)


async def test_connections_of_one_address(stream: DataStream) -> None:
    async with (
        over_loopback(stream, max_clients_per_address=2) as rig,
        AsyncExitStack() as stack,
    ):
        header = OK + stream.header.pack()
        inside = [await stack.enter_async_context(rig.client()) for _ in range(2)]
        for peer in inside:
            await peer.ask(wire.header(), header)
        async with rig.client() as third:
            await third.ended()
        other = await trio.open_tcp_stream(*rig.address, local_address="127.0.0.2")
        await other.send_all(wire.header())
        assert await other.receive_some() == header
        await other.aclose()
        await inside[0].close()
        while len(rig.server.sessions) > 1:
            await wait_all_tasks_blocked()
        async with rig.client() as late:
            await late.ask(wire.header(), header)
    assert rig.server.counts.refused == {"max_clients_per_address": 1}
    assert rig.server._gate.clients == 0


async def test_who_comes_faster_than_the_rate_waits_and_is_served(stream: DataStream) -> None:
    header = OK + stream.header.pack()
    async with over_loopback(stream, accept_rate=40) as rig:
        began = trio.current_time()
        knocking = [socket.create_connection(rig.address) for _ in range(60)]
        try:
            for made in knocking:
                made.sendall(wire.header())
            await trio.to_thread.run_sync(
                lambda: [_read(made, len(header)) == header or 1 / 0 for made in knocking]
            )
            took = trio.current_time() - began
            assert took > 0.9 * (60 - 40) / 40
        finally:
            for made in knocking:
                made.close()
    assert not rig.server.counts.refused
    assert rig.server.counts.accepted == 60


def _read(connection: socket.socket, size: int) -> bytes:
    connection.settimeout(20)
    data = b""
    while len(data) < size:
        more = connection.recv(size - len(data))
        assert more
        data += more
    return data
