"""The client's engine with several servers, by a driver by hand: whom it asks, and when."""

from __future__ import annotations

import math
from typing import Any

import pytest

from datastreamer._codec import Entry
from datastreamer.client.effects import Connect, Effect, Receive, Send
from datastreamer.client.engine import ClientEngine
from datastreamer.client.iteration import Iteration
from datastreamer.errors import ConnectFailed, ConnectionLost, UsageError
from datastreamer.protocol import exchanges
from datastreamer.protocol.batches import BatchLimits, Read, read
from datastreamer.protocol.commands import EntryQuery
from datastreamer.protocol.resume import Resumable
from datastreamer.protocol.retry import Backoff
from tests.client.test_engine import ByHand, Cancelled
from tests.client.test_resume import Another, rewritten
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
            case Receive(Slow() as stub, room, float(seconds)) if self.sent[stub]:
                # A byte in a second.
                self.clock += min(seconds, 1)
                if seconds < 1:
                    raise TimeoutError
                return super().perform(Receive(stub, room[:1]))
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


class Slow(Stub):
    """Its answers arrive byte by byte."""


class Full(Stub):
    """It has no room for a client."""

    def receive(self, data: bytes) -> bytes:
        self.closed = True
        return b""


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


def cancelled(driver: Several, iteration: Iteration[Any]) -> None:
    with pytest.raises(Cancelled):
        driver.run(iteration.next())


def test_a_cancelled_question_to_another_server_is_not_repeated_at_once() -> None:
    driver, engine = made(Stub(FIFTY), Stub(FIFTY), heartbeat=3.0, max_lag=10)
    iteration = streaming(driver, engine)
    driver.clock = 3.0
    driver.fails = lambda effect: Cancelled() if effect == Connect(1.0, 1) else None
    cancelled(driver, iteration)
    driver.news_at = 4.0
    assert driver.run(iteration.next()).next_number == 51
    assert driver.asked == []


@pytest.mark.parametrize("kind", [Connect, Send, Receive])
def test_what_fails_at_another_server_leaves_the_streaming_as_it_is(kind: type) -> None:
    driver, engine = made(Stub(FIFTY), Stub(FIFTY), heartbeat=3.0, max_lag=10)
    iteration = streaming(driver, engine)
    own, driver.clock = engine.channel, 3.0

    def fail(effect: Effect) -> BaseException | None:
        if isinstance(effect, Receive) and effect.channel is own:
            return Cancelled()
        aside = isinstance(effect, kind) and getattr(effect, "channel", None) is not own
        return ConnectionLost("gone") if aside else None

    driver.fails = fail
    cancelled(driver, iteration)
    driver.fails = lambda effect: None
    driver.news_at = 4.0
    assert driver.run(iteration.next()).next_number == 51
    assert engine.channel is own


def test_a_cancelled_request_of_a_streaming_is_made_again() -> None:
    """On another connection: a part of it may have been sent."""
    driver, engine = made(Stub(FIFTY), Stub(FIFTY))
    iteration = Iteration(engine, Resumable(0, stop=50, batched=BatchLimits(10)))
    driver.run(iteration.begin())
    driver.fails = lambda effect: Cancelled() if isinstance(effect, Send) else None
    cancelled(driver, iteration)
    driver.fails = lambda effect: None
    found: list[int] = []
    while (batch := driver.run(iteration.next())) is not None:
        found += batch.numbers
    assert found == list(range(50))


@pytest.mark.parametrize("resume", [True, False])
def test_an_iteration_that_a_cancellation_ends_says_so(resume: bool) -> None:
    driver, engine = made(Stub(FIFTY), resume=resume)
    work = Resumable(0, stop=50, batched=BatchLimits(10)) if not resume else None
    iteration = Iteration(engine, work or exchanges.Lookup(range(50), 5))
    driver.run(iteration.begin())
    driver.fails = lambda effect: Cancelled() if isinstance(effect, Send) else None
    with pytest.raises(Cancelled):
        list(iter(lambda: driver.run(iteration.next()), None))
    with pytest.raises(ConnectionLost, match="cancelled in the middle of a request"):
        driver.run(iteration.next())


def test_an_answer_is_due_as_a_whole() -> None:
    driver, engine = made(Stub(FIFTY), Slow(FIFTY), Stub(FIFTY), timeout=5.0)
    driver.servers[0] = None
    engine.channel.closed = True
    assert driver.run(engine.ask(exchanges.entry, 3)) == FIFTY[3]
    assert engine.peer == "stub:2"
    assert driver.clock == 5


def test_an_answer_may_be_slow_if_it_is_long() -> None:
    class Large(Stub):
        def __init__(self, entries: Any) -> None:
            super().__init__([Entry(0, 1, bytes(300_000))])

    driver, engine = made(Large(FIFTY), timeout=5.0)

    def perform(effect: Effect) -> Any:
        if isinstance(effect, Receive):
            driver.clock += 2
            effect.buffer = effect.buffer[:50_000]
        return Several.perform(driver, effect)

    driver.perform = perform  # type: ignore[method-assign]
    assert len(driver.run(engine.ask(exchanges.entry, 0)).data) == 300_000


def test_a_slow_server_delays_a_streaming_for_a_second() -> None:
    driver, engine = made(Stub(FIFTY), Slow(FIFTY), heartbeat=3.0, max_lag=10)
    iteration = streaming(driver, engine)
    driver.clock, driver.news_at = 3.0, 3.5
    assert driver.run(iteration.next()).next_number == 51
    assert driver.clock <= 7


@pytest.mark.parametrize("other, moves", [(sample(60), False), (sample(61), True)])
def test_a_server_without_room_for_questions_may_lag(other: Any, moves: bool) -> None:
    driver, engine = made(Stub(FIFTY), Stub(other), heartbeat=3.0, max_lag=10)
    iteration = streaming(driver, engine)
    driver.servers[0], driver.clock = Full(FIFTY), 3.0
    # Never silent.
    driver.news_at = 3.0
    assert driver.run(iteration.next()).next_number == (61 if moves else 51)


@pytest.mark.parametrize("other, moves", [(FIFTY, False), (sample(51), True)])
def test_a_quiet_server_without_room_for_questions_is_kept(other: Any, moves: bool) -> None:
    """Unless another one holds the next entry."""
    driver, engine = made(Stub(FIFTY), Stub(other), heartbeat=3.0, max_lag=None)
    iteration = streaming(driver, engine)
    own, driver.servers[0] = engine.channel, Full(FIFTY)
    driver.news_at = 20
    assert driver.run(iteration.next()).next_number == 51
    assert (engine.channel is own) != moves


@pytest.mark.parametrize("max_lag", [10, None])
def test_a_server_with_another_history_is_not_moved_to(
    max_lag: int | None, caplog: pytest.LogCaptureFixture
) -> None:
    other = Stub(rewritten(FIVE_HUNDRED, 30, 500))
    driver, engine = made(Stub(FIFTY), other, heartbeat=3.0, max_lag=max_lag)
    iteration = Iteration(engine, Resumable(0, stop=200))
    assert driver.run(iteration.next()).next_number == 50
    driver.news_at = 30
    assert driver.run(iteration.next()).next_number == 51
    assert engine.peer == "stub:0"
    assert caplog.messages == [
        (
            "stub:1 is not used: stub:1 changed its history: it holds 500 entries, and entry 49 is "
            "not the one that was received"
        )
    ]


@pytest.mark.parametrize("batched", [None, BatchLimits()])
def test_a_range_that_its_server_does_not_hold(batched: BatchLimits | None) -> None:
    driver, engine = made(Stub(FIFTY), None, Stub(FIVE_HUNDRED), heartbeat=3.0, max_lag=None)
    iteration = Iteration(engine, Resumable(0, stop=100, batched=batched))
    found: list[int] = []
    while (batch := driver.run(iteration.next())) is not None:
        found += batch.numbers
    assert found == list(range(100))
    assert engine.peer == "stub:2"


@pytest.mark.parametrize("types", [None, {0, 1, 2, 3, 4, 5, 6, 176}])
def test_at_the_end_of_one_server_others_are_asked_for_more(types: Any) -> None:
    driver, engine = made(Stub(FIFTY), None, Stub(sample(60)), Stub(sample(70)), heartbeat=3.0)

    def batch_read(number: int) -> Any:
        return driver.run(
            engine.ask(read, Read(number, where=None if types is None else tuple(sorted(types))))
        )

    assert batch_read(50).next_number == 70
    assert engine.peer == "stub:3"
    driver.asked.clear()
    assert not batch_read(70)
    assert driver.asked == []
    driver.clock += 3
    driver.servers[0] = Stub(rewritten(sample(80), 60, 80))
    assert not batch_read(70)
    assert driver.asked == [0, 1, 2]
    assert engine.peer == "stub:3"
