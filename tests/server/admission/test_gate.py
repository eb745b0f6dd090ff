"""Admission: who is accepted, who is refused, what is logged, and the pace."""

from __future__ import annotations

import logging
import socket
from collections import Counter
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any, cast

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st
from trio.testing import wait_all_tasks_blocked

from datastreamer.metrics.counters import Counts
from datastreamer.server.admission.fair_slots import FairSlots
from datastreamer.server.admission.gate import (
    EVICTED,
    PROOF_SECONDS,
    ConnectionSlot,
    Gate,
    Idle,
    Pace,
    TrustLevel,
)
from datastreamer.server.limits import PROVISIONAL_CLIENTS, Limits
from datastreamer.storage.stream import DataStream
from datastreamer.transport.listeners import host_of, is_local
from datastreamer.transport.refusal_log import RefusalLog
from tests.network import model as wire
from tests.network.fixtures import over_loopback
from tests.network.model import OK

if TYPE_CHECKING:
    from datastreamer.server.session import Session


class Door:
    """A gate, and the connections that have come to it."""

    def __init__(self, reserved: int = 0, publishing: bool = False, **limits: Any) -> None:
        self.counts = Counts()
        self.gate = Gate(Limits(**limits), self.counts, None, reserved, publishing)
        self.now = 1000.0

    def come(self, host: str = "a") -> ConnectionSlot | None:
        return self.gate.admit(host, f"{host}:1", self.now)

    def placed(self, host: str = "a") -> bool:
        place = self.come(host)
        return place is not None and place.held

    def prove(self, place: ConnectionSlot | None, trust: TrustLevel = TrustLevel.KNOWN) -> bool:
        assert place is not None
        return self.gate.prove(place, trust, self.now)

    def leave(self, place: ConnectionSlot | None) -> None:
        assert place is not None
        self.gate.leave(place, self.now)


def test_at_most_the_limit_at_a_time() -> None:
    door = Door(max_clients=2)
    first, _, third = [door.come() for _ in range(3)]
    assert first is not None
    assert third is None
    door.leave(first)
    door.leave(first)  # a second time is none
    assert [door.placed("b") for _ in range(2)] == [True, False]
    assert (door.counts.accepted, door.counts.refused) == (3, {"max_clients": 2})


def test_at_most_the_limit_of_one_address() -> None:
    door = Door(max_clients=4, max_clients_per_address=2)
    ours = [door.come("a") for _ in range(3)]
    theirs = [door.come("b") for _ in range(3)]
    assert [place is not None for place in (*ours, *theirs)] == [True, True, False] * 2
    door.leave(ours[0])
    last = door.come("c")
    assert door.come("a") is None
    assert door.counts.refused == {"max_clients_per_address": 2, "max_clients": 1}
    for place in (ours[1], theirs[0], theirs[1], last):
        door.leave(place)
    assert not door.gate._by_address, "addresses are not kept for ever"
    assert door.gate.clients == 0


def test_an_address_has_a_tenth_unless_it_is_this_machine() -> None:
    for total, most in ((10_000, 1_000), (2_000, 200), (50, 64)):
        assert Limits(max_clients=total).most_of("10.0.0.1") == most
        for own in ("127.0.0.1", "127.8.0.1", "::/64", "local"):
            assert Limits(max_clients=total).most_of(own) is None
            assert Limits(max_clients=total, max_clients_per_address=3).most_of(own) == 3
    assert Limits(max_clients_per_address=0).most_of("10.0.0.1") is None
    part = Limits(max_clients=10_000).share(1, 4)
    assert (part.max_clients, part.most_of("10.0.0.1")) == (2_500, 1_000)
    door = Door(max_clients=1_000)
    assert [door.placed("10.0.0.1") for _ in range(101)] == [*[True] * 100, False]
    assert [door.placed("127.0.0.1") for _ in range(200)] == [True] * 200
    assert door.placed("10.0.0.2")


def test_hosts_that_are_this_machine() -> None:
    for address in (("127.0.0.1", 1), ("::1", 1, 0, 0), ("::ffff:127.0.0.9", 1, 0, 0), b""):
        assert is_local(host_of(address))
    for address in (("10.0.0.1", 1), ("2001:db8::1", 1, 0, 0), ("::ffff:10.0.0.1", 1, 0, 0)):
        assert not is_local(host_of(address))


def test_reserved_slots_are_for_who_proves_it() -> None:
    door = Door(reserved=3, max_clients=2)
    readers = [door.come() for _ in range(2)]
    ninth = door.come()
    assert ninth is not None
    assert not ninth.held
    assert door.gate.provisional == 1
    assert not door.gate.confirm(ninth, door.now), "it asks, and proves nothing"
    assert ninth.over
    assert door.gate.provisional == 0
    known = [door.come() for _ in range(3)]
    assert [door.prove(place) for place in known] == [True] * 3
    assert (door.gate.reserved_in_use, door.gate.clients) == (3, 5)
    fourth = door.come()
    assert not door.prove(fourth), "no slot is left, and no client is idle"
    assert door.counts.refused == {"max_clients": 2}
    # Known clients in other places leave the reserve to others.
    for place in readers:
        door.leave(place)
    assert not door.placed(), "there are three, of two"
    assert door.prove(door.come())
    for place in known:
        door.leave(place)
    assert door.placed()


def test_two_of_the_reserved_slots_are_for_publishers() -> None:
    door = Door(reserved=3, publishing=True, max_clients=1)
    assert door.placed()
    assert door.prove(door.come())
    assert not door.prove(door.come())
    assert door.prove(door.come(), TrustLevel.PUBLISHER)
    assert door.prove(door.come(), TrustLevel.PUBLISHER)
    assert not door.prove(door.come(), TrustLevel.PUBLISHER)


def test_places_of_publishers_that_they_have_are_not_reserved_twice() -> None:
    door = Door(reserved=4, publishing=True, max_clients=1)
    reader = door.come()
    assert door.prove(door.come(), TrustLevel.PUBLISHER)
    for _ in range(2):
        assert door.prove(door.come())
    assert not door.prove(door.come())
    door.leave(reader)
    publisher = door.come()
    assert door.prove(publisher, TrustLevel.PUBLISHER)  # in an ordinary place
    assert door.prove(door.come())
    door.leave(publisher)
    assert not door.prove(door.come())
    assert door.prove(door.come(), TrustLevel.PUBLISHER)


def test_the_limit_of_an_address_is_not_that_of_who_proves_it() -> None:
    door = Door(reserved=1, max_clients=10, max_clients_per_address=1)
    assert door.placed()
    second = door.come()
    assert second is not None
    assert not second.held
    assert door.prove(second)
    third = door.come()
    assert third is not None
    assert not door.gate.confirm(third, door.now)
    assert door.counts.refused == {"max_clients_per_address": 1}


def test_a_place_that_is_free_when_a_client_asks_is_had() -> None:
    door = Door(reserved=1, max_clients=1)
    reader, waiting = door.come(), door.come()
    assert waiting is not None
    door.leave(reader)
    assert door.gate.confirm(waiting, door.now)
    assert (waiting.short_of, door.counts.accepted) == ("", 2)
    assert not door.counts.refused


def test_who_does_not_prove_it_in_time_is_closed() -> None:
    door = Door(reserved=1, max_clients=1)
    assert door.placed()
    slow = door.come()
    assert slow is not None
    door.gate.tick(door.now + PROOF_SECONDS - 0.1)
    assert not slow.over
    door.gate.tick(door.now + PROOF_SECONDS)
    assert slow.over
    assert (door.gate.provisional, door.counts.refused) == (0, {"max_clients": 1})
    assert not door.prove(slow), "too late"


def test_a_flood_displaces_its_own() -> None:
    """However many come from one address, another's has its time to prove itself."""
    door = Door(reserved=1, max_clients=1)
    assert door.placed()
    quiet = door.come("b")
    flood = [door.come("a") for _ in range(1_000)]
    assert door.gate.provisional == PROVISIONAL_CLIENTS
    assert quiet is not None
    assert not quiet.over
    closed = [place for place in flood if place is not None and place.over]
    assert closed == flood[: len(closed)]
    assert len(closed) == 1_000 - (PROVISIONAL_CLIENTS - 1)
    assert door.counts.refused == {"max_clients": len(closed)}
    assert door.prove(quiet)


class Idler:
    """A session that is idle, until it is ended."""

    reason = ""

    def __init__(self, place: ConnectionSlot, since: float) -> None:
        self.place = place
        self.since: float | None = since

    def idle_since(self) -> float | None:
        return self.since

    def end(self, reason: str, words: str, *, reset: bool = True) -> None:
        assert (self.reason, reason) == (EVICTED, EVICTED)
        assert self.place.over


def idle_client(place: ConnectionSlot, since: float) -> Idle:
    return place.trust, since, cast("Session", Idler(place, since))


def test_the_idle_client_that_has_proven_least_leaves_first() -> None:
    door = Door(reserved=2, max_clients=3)
    places = [door.come() for _ in range(5)]
    assert all(door.prove(place) for place in places[3:])
    known, reader, asking = (place for place in places[:3] if place is not None)
    assert door.prove(known)
    idle = [idle_client(known, 1), idle_client(reader, 3), idle_client(asking, 2)]
    cast("Idler", idle[2][2]).since = 900.0  # it has asked since the last look
    door.gate.note_idle(idle)
    assert door.placed(), "the reader has left"
    assert (reader.over, asking.over, known.over) == (True, False, False)
    assert not door.placed(), "a known client does not leave for a reader"
    late = door.come()
    assert door.prove(late)
    assert known.over
    assert (door.gate.clients, door.gate.reserved_in_use) == (5, 2)


@given(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 30)), max_size=120))
def test_places_are_counted(steps: list[tuple[int, int]]) -> None:
    """Whatever comes, proves itself, is idle, leaves or waits for too long."""
    door = Door(reserved=3, publishing=True, max_clients=4, max_clients_per_address=3)
    gate, came = door.gate, 0
    places: list[ConnectionSlot] = []
    for step, number in steps:
        chosen = places[number % len(places)] if places else None
        if step <= 1 or chosen is None:
            place = door.come("abcdefg"[number % 7])
            assert place is not None
            came += 1
            places.append(place)
        elif step == 2:
            door.prove(chosen, TrustLevel(1 + number % 2))
        elif step == 3:
            gate.confirm(chosen, door.now)
        elif step == 4:
            door.leave(chosen)
        elif step == 5:
            gate.note_idle([idle_client(each, 1.0) for each in places if each.held])
        else:
            door.now += number / 10
            gate.tick(door.now)
        held = [place for place in places if place.held]
        waiting = [place for place in places if not place.held and not place.over]
        assert gate.clients == len(held) <= 7
        assert gate.provisional == len(waiting)
        assert sum(place.trust < TrustLevel.PUBLISHER for place in held) <= 5
        assert gate._by_address == Counter(place.host for place in held)
        assert door.counts.accepted + sum(door.counts.refused.values()) + len(waiting) == came
    for place in places:
        door.leave(place)
    assert (gate.clients, gate.provisional, gate._by_address) == (0, 0, {})


def test_slots_are_shared_fairly() -> None:
    slots: FairSlots[int] = FairSlots(4)
    assert [slots.add(n, "a") for n in range(5)] == [None] * 4 + [0]
    assert [slots.add(n, "b") for n in range(10, 13)] == [1, 2, 10]
    assert (sorted(slots), len(slots)) == ([3, 4, 11, 12], 4)
    slots.discard(3, "a")
    slots.discard(3, "a")
    assert len(slots) == 3
    assert slots.add(20, "c") is None
    assert slots.add(21, "d") == 11


def lines_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    found = [r.getMessage() for r in caplog.records]
    caplog.clear()
    return found


def test_one_of_several_processes_says_whose_limit_it_is(caplog: pytest.LogCaptureFixture) -> None:
    gate = Gate(Limits(max_clients=5).share(0, 2), Counts())
    for number in range(4):
        gate.admit("a", f"a:{number}", 100)
    assert lines_of(caplog) == [
        "a:3: refused: 3 clients are connected, which is this process's share of the limit"
    ]


def test_a_line_every_few_seconds(caplog: pytest.LogCaptureFixture) -> None:
    gate = Gate(Limits(max_clients=1), Counts())
    gate.admit("a", "a:1", 100)
    for at in range(1_000):
        gate.admit("b", f"b:{at}", 100 + at / 1000)
    assert lines_of(caplog) == ["b:0: refused: 1 client is connected, which is the limit"]
    gate.tick(104.9)
    assert lines_of(caplog) == []
    gate.tick(105)
    [line] = lines_of(caplog)
    assert line == (
        "b:999: refused: 1 client is connected, which is the limit "
        "(999 refused since the last such line)"
    )
    gate.tick(200)
    assert lines_of(caplog) == []


def test_each_kind_has_its_lines(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    refusals = RefusalLog(logging.getLogger("test"))
    for _ in range(3):
        refusals.note("TLS", "a:1", "no TLS", 10)
        refusals.note("token", "b:2", "a wrong token", 10, logging.WARNING)
    assert lines_of(caplog) == ["a:1: no TLS", "b:2: a wrong token"]
    refusals.flush(11, last=True)
    assert lines_of(caplog) == [
        "a:1: no TLS (2 refused since the last such line)",
        "b:2: a wrong token (2 refused since the last such line)",
    ]
    for n in range(1_000):
        refusals.note(f"kind {n}", "c:3", "what a client sent", 20)
    assert len(lines_of(caplog)) <= 65


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
    assert rig.server.gate.clients == 0


async def test_a_slot_is_free_as_soon_as_its_session_is_gone(stream: DataStream) -> None:
    """Who sees in the metrics that a client is gone may connect in its place."""
    async with over_loopback(stream, max_clients=3) as rig:
        for _ in range(20):  # Trio runs tasks in random order
            async with AsyncExitStack() as stack:
                for _ in range(3):
                    peer = await stack.enter_async_context(rig.client())
                    await peer.ask(wire.header(), OK + stream.header.pack())
            while rig.server.sessions:
                assert rig.server.gate.clients == len(rig.server.sessions)
                await trio.lowlevel.checkpoint()
            assert rig.server.gate.clients == 0


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
