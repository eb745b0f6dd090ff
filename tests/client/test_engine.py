"""The client's engine alone: a driver by hand, which says what each effect comes to."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from datastreamer.client.effects import (
    Close,
    Connect,
    Effect,
    Now,
    Receive,
    Send,
    Signal,
    Sleep,
    Steps,
)
from datastreamer.client.engine import ClientEngine
from datastreamer.client.iteration import Iteration
from datastreamer.errors import ConnectFailed, ConnectionLost, NoAnswer
from datastreamer.protocol import exchanges
from datastreamer.protocol.batches import Read
from datastreamer.protocol.resume import Resumable
from datastreamer.protocol.retry import Backoff
from tests.network.stub import Stub, sample

FIFTY = sample(50)


class Cancelled(BaseException):
    """What this driver's cancellations are."""


class ByHand:
    """Serves each connection with the next stub; `fails` raises in place of an effect."""

    cancelled = (Cancelled,)
    threaded = False
    reconnects = True

    def __init__(self, *stubs: Stub) -> None:
        self.turn = threading.Lock()
        self.stubs = list(stubs)
        self.sent: dict[Stub, bytes] = {}
        self.done: list[Effect] = []
        self.clock = 0.0
        self.fails: Callable[[Effect], BaseException | None] = lambda effect: None

    def signal(self) -> Signal:
        return threading.Event()

    def now(self) -> float:
        return self.clock

    def run(self, steps: Steps[Any]) -> Any:
        result, failure = None, None
        try:
            while True:
                effect = steps.send(result) if failure is None else steps.throw(failure)
                self.done.append(effect)
                failure, result = self.fails(effect), None
                if failure is None:
                    try:
                        result = self.perform(effect)
                    except (ConnectFailed, TimeoutError) as error:
                        failure = error
        except StopIteration as done:
            return done.value

    def perform(self, effect: Effect) -> Any:
        match effect:
            case Connect():
                stub = self.stubs.pop(0)
                self.sent[stub] = b""
                return stub
            case Send(stub, data):
                self.sent[stub] += stub.receive(data)
            case Receive(stub, buffer):
                data = self.sent[stub][: len(buffer)]
                assert data or stub.closed, "this would wait for ever"
                buffer[: len(data)] = data
                self.sent[stub] = self.sent[stub][len(data) :]
                return len(data)
            case Now():
                return self.clock
            case Sleep(until):
                self.clock = max(self.clock, until)
        return None

    def kinds(self) -> list[type]:
        return [type(effect) for effect in self.done]


def made(*stubs: Stub, **options: Any) -> tuple[ByHand, ClientEngine]:
    driver = ByHand(*stubs)
    options = {"stream_type": 1, "timeout": 5.0, "backoff": Backoff(1, 1), **options}
    engine = ClientEngine(driver, "stub:1", **options)
    driver.run(engine.open())
    driver.done.clear()
    return driver, engine


def test_a_query_is_one_send_and_one_receive() -> None:
    driver, engine = made(Stub(FIFTY))
    assert driver.run(engine.ask(exchanges.entry, 3)) == FIFTY[3]
    assert driver.kinds() == [Send, Receive]


def test_each_run_that_arrives_is_one_receive() -> None:
    driver, engine = made(Stub(FIFTY), resume=False)
    iteration = Iteration(engine, Resumable(0, careful=False))
    driver.run(iteration.begin())
    stub = engine.channel
    driver.run(iteration.next())
    driver.done.clear()
    for _ in range(3):
        driver.sent[stub] += stub.append(*sample(len(stub.entries) + 10)[-10:])
        assert len(driver.run(iteration.next())) == 10
    assert driver.kinds() == [Receive] * 3


def test_limits_of_time_are_those_of_the_effects() -> None:
    driver, engine = made(Stub(FIFTY), answer_timeout=7.0, resume=False)
    driver.run(engine.read(Read(50), 2.0))
    assert [effect.seconds for effect in driver.done if isinstance(effect, Receive)] == [9.0, 9.0]
    driver.fails = lambda effect: TimeoutError() if isinstance(effect, Receive) else None
    with pytest.raises(NoAnswer, match="within 7 s"):
        driver.run(engine.ask(exchanges.header))
    assert driver.kinds()[-1] is Close
    # A server without batches does not wait.
    driver, engine = made(Stub(FIFTY, extensions="refused"), answer_timeout=7.0)
    driver.run(engine.read(Read(49), 2.0))
    driver.run(engine.read(Read(50), 2.0))
    waits = [effect.seconds for effect in driver.done if isinstance(effect, Receive)]
    assert set(waits[2:]) == {7.0}


@pytest.mark.parametrize("kind, kept", [(Receive, True), (Send, False)])
def test_what_a_cancellation_leaves(kind: type, kept: bool) -> None:
    """A cancelled wait for entries nothing; a cancelled request may be half sent."""
    driver, engine = made(Stub(FIFTY[:20]), Stub(FIFTY))
    iteration = Iteration(engine, Resumable(0))
    driver.run(iteration.begin())
    assert len(driver.run(iteration.next())) == 20
    driver.fails = lambda effect: Cancelled() if isinstance(effect, kind) else None
    steps: Steps[Any] = iteration.next() if kind is Receive else engine.ask(exchanges.header)
    with pytest.raises(Cancelled):
        driver.run(steps)
    assert (engine.channel is not None) == kept


def test_a_lost_server_is_tried_again_after_waits() -> None:
    gone = Stub(FIFTY[:20])
    driver, engine = made(gone, Stub(FIFTY))
    iteration = Iteration(engine, Resumable(0, None, 50))
    assert len(driver.run(iteration.next())) == 20
    gone.closed = True
    failures = iter([ConnectionLost("again"), ConnectionLost("and again")])
    driver.fails = lambda effect: next(failures, None) if isinstance(effect, Connect) else None
    driver.done.clear()
    assert driver.run(iteration.next()).next_number == 50
    assert driver.kinds().count(Sleep) == driver.kinds().count(Connect) == 3
    assert 1.5 <= driver.clock <= 3
