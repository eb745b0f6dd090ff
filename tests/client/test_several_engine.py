"""The client's engine with several servers, by a driver by hand: whom it asks, and when."""

from __future__ import annotations

import math
from typing import Any

import pytest

from datastreamer.client.effects import Connect, Effect, Receive
from datastreamer.client.engine import ClientEngine
from datastreamer.client.iteration import Iteration
from datastreamer.errors import ConnectFailed, ConnectionLost, UsageError
from datastreamer.protocol import exchanges
from datastreamer.protocol.messages import EntryQuery
from datastreamer.protocol.resume import Resumable
from datastreamer.protocol.retry import Backoff
from tests.client.test_engine import ByHand
from tests.client.test_resume import Another
from tests.network.stub import Stub, sample

FIFTY = sample(50)
FIVE_HUNDRED = sample(500)


class Several(ByHand):
    """Each connection to a server is served by another copy of its stub; None: it is down. At
    `news_at` the server 0 commits an entry."""

    def __init__(self, *servers: Stub | None) -> None:
        super().__init__()
        self.servers = list(servers)
        self.asked: list[int] = []
        self.news_at = math.inf

    def perform(self, effect: Effect) -> Any:
        match effect:
            case Connect(_, server):
                self.asked.append(server)
                stub = self.servers[server]
                if stub is None:
                    raise ConnectFailed(f"cannot connect to {server}")
                self.stubs = [type(stub)(stub.entries)]
            case Receive(stub, _, float(seconds)) if not self.sent[stub] and not stub.closed:
                self.clock += seconds
                if self.clock < self.news_at or stub.cursor is None:
                    raise TimeoutError
                total = len(stub.entries)
                self.sent[stub] += stub.append(*sample(total + 1)[total:])
        return super().perform(effect)


def made(*servers: Stub | None, **options: Any) -> tuple[Several, ClientEngine]:
    driver = Several(*servers)
    options = {"stream_type": 1, "timeout": 5.0, "backoff": Backoff(8, 8), **options}
    names = [f"stub:{number}" for number in range(len(servers))]
    engine = ClientEngine(driver, *names, **options)
    driver.run(engine.open())
    driver.asked.clear()
    return driver, engine


def streaming(driver: Several, engine: ClientEngine) -> Iteration[Any]:
    iteration: Iteration[Any] = Iteration(engine, Resumable(0))
    assert driver.run(iteration.next()).next_number == 50
    driver.done.clear()
    return iteration


class Deaf(Stub):
    def answer(self, event: Any) -> bytes:
        return b"" if isinstance(event, EntryQuery) else super().answer(event)


class Curt(Stub):
    """Ends the connection instead of answering a query for an entry."""

    def answer(self, event: Any) -> bytes:
        self.closed = isinstance(event, EntryQuery)
        return b"" if self.closed else super().answer(event)


def test_each_server_is_asked_once() -> None:
    driver, engine = made(Deaf(FIFTY), Curt(FIFTY), Deaf(FIFTY), Stub(FIFTY))
    assert driver.run(engine.ask(exchanges.entry, 3)) == FIFTY[3]
    assert driver.asked == [1, 2, 3]
    assert driver.clock == 10
    # It stays there.
    assert driver.run(engine.ask(exchanges.entry, 4)) == FIFTY[4]
    # A connection that was lost in the meantime is made again.
    engine.channel.closed = True
    assert driver.run(engine.ask(exchanges.entry, 5)) == FIFTY[5]
    assert driver.asked == [1, 2, 3, 3]


def test_it_waits_after_each_round_only() -> None:
    driver, engine = made(Stub(FIFTY), None, None)
    iteration = streaming(driver, engine)
    engine.channel.closed, driver.servers[0] = True, None
    # The servers that were asked, and the times at which.
    asked: list[tuple[int, float]] = []

    def watch(effect: Effect) -> None:
        if isinstance(effect, Connect):
            asked.append((effect.server, driver.clock))
            if len(asked) == 7:
                driver.servers[1] = Stub(sample(60))

    driver.fails = watch
    assert driver.run(iteration.next()).next_number == 60
    assert [server for server, _ in asked] == [1, 2, 0, 1, 2, 0, 1]
    first, second = asked[2][1], asked[5][1]
    assert [time for _, time in asked] == [0, 0, first, first, first, second, second]
    assert 4 <= first <= 8
    assert 4 <= second - first <= 8


def test_all_are_asked_once_before_it_gives_up() -> None:
    driver, engine = made(Stub(FIFTY), None, None, retry_for=0)
    iteration = streaming(driver, engine)
    engine.channel.closed, driver.servers[0] = True, None
    message = (
        "^given up after 0.0 s: asked 3 servers: stub:0 closed the connection; "
        "stub:1: cannot connect to 1; stub:2: cannot connect to 2$"
    )
    with pytest.raises(ConnectionLost, match=message):
        driver.run(iteration.next())
    assert driver.asked == [1, 2]


@pytest.mark.parametrize(
    "other, moves",
    [
        (Stub(sample(60)), False),
        (Stub(sample(61)), True),
        (Another(FIVE_HUNDRED), False),
        (None, False),
    ],
)
def test_servers_are_compared_at_each_heartbeat(other: Stub | None, moves: bool) -> None:
    driver, engine = made(Stub(FIFTY), other, heartbeat=3.0, max_lag=10)
    iteration = streaming(driver, engine)
    driver.news_at = 100
    assert driver.run(iteration.next()).next_number == (61 if moves else 51)
    # At each heartbeat the own server, which was silent, and the other one.
    others = driver.asked.count(1)
    if moves:
        assert driver.asked == [0, 1, 0, 1]
    elif other is None:
        # After 3, 6, 12, 24, 24, 24 s.
        assert 5 <= others <= 7
    else:
        assert 30 <= others <= 35


def test_without_a_bound_they_are_not_compared() -> None:
    driver, engine = made(Stub(FIFTY), Stub(FIVE_HUNDRED), heartbeat=3.0, max_lag=None)
    iteration = streaming(driver, engine)
    driver.news_at = 100
    assert driver.run(iteration.next()).next_number == 51
    assert set(driver.asked) == {0}
    for wrong in (-1, 1.5, "many"):
        with pytest.raises(UsageError):
            made(Stub(FIFTY), Stub(FIFTY), max_lag=wrong)
