"""A streaming reassembly from batch to batch, without Spark: the same as one core's."""

from __future__ import annotations

import pickle
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from datastreamer.format import U32_MAX
from datastreamer.reassembly import (
    Conflict,
    Dropped,
    Event,
    Malformed,
    PayloadComplete,
    Reassembler,
    Splitter,
)
from datastreamer.spark.lanes import Lane, Run, forget
from datastreamer.spark.told import row_of
from tests.reassembly.made_up import deliveries, name, subscriptions
from tests.spark.told import followed, plain

many = settings(max_examples=150, deadline=None)


def batch(
    lane: Lane, messages: list[Any], subscribe: Any = None, max_age: float | None = None
) -> tuple[Lane, list[Event]]:
    """A batch, and the lane as it is read again after it."""
    run = Run(lane, subscribe, max_age, 1 << 30)
    events = list(run.dropped)
    for (key, value), source, position, now in messages:
        if followed(key, subscribe):
            events += run.take(key, value, source, position, now or 0.0)
        else:
            events += run.expire(now or 0.0)
    forget(lane, 1000)
    assert_held(lane, run)
    lane.touched, lane.added, lane.forgotten = set(), [], []
    return pickle.loads(pickle.dumps(lane)), events


def assert_held(lane: Lane, run: Run) -> None:
    """No more is kept than the core keeps; headers, of which it keeps a hash, come on top."""
    held = [held for of_node in lane.held.values() for held in of_node.values()]
    assert sum(held.key[:1] != b"\x00" for held in held) == run._core.stats().messages


@given(deliveries(), subscriptions, st.data())
@many
def test_batches_tell_what_one_run_tells(made: Any, subscribe: Any, data: Any) -> None:
    core = Reassembler(subscribe, reorg_threshold=U32_MAX, max_age=3.0)
    cuts = sorted(data.draw(st.sets(st.integers(0, len(made)), max_size=4)))
    lane = Lane()
    done: set[bytes] = set()
    for start, stop in zip([0, *cuts], [*cuts, len(made)], strict=True):
        before = set(done)
        expected = []
        for (key, value), source, position, now in made[start:stop]:
            for event in core.receive(key, value, source, position, now or 0.0):
                if isinstance(event, PayloadComplete):
                    done.update((b"\0" + event.id, *event.prefixes))
                # Of what was given out in a batch before nothing but the names is known.
                late = isinstance(event, Malformed | Conflict) and event.key[:33] in before
                if not late or (isinstance(event, Malformed) and "one more" not in event.reason):
                    expected.append(event)
        lane, events = batch(lane, made[start:stop], subscribe, 3.0)
        assert plain(map(row, events)) == plain(map(row, expected))
    last = Run(lane, subscribe, 3.0, 1 << 30)
    assert plain(map(row, last.expire(1e9))) == plain(map(row, core.expire(1e9)))
    assert not lane.held


def row(event: Event) -> tuple[Any, ...]:
    told = row_of(event)
    # From where it could be read again is Spark's business.
    return told[:-1] if isinstance(event, Dropped) else told


def payload(number: int) -> list[Any]:
    own = b"%032d" % number
    messages = Splitter().split(own, {name(1, own[:32])[:33]: [(b"", b"x")]})
    return [(message, "a", None, None) for message in messages]


def test_what_was_given_out_is_known_for_two_generations() -> None:
    lane = Lane()
    threshold = 10
    for number in range(45):
        run = Run(lane, None, None, 1 << 30)
        told = [event for message in payload(number) for event in run.take(*flat(message))]
        assert len(told) == 1
        # The last ones again, late.
        for late in range(max(0, number - threshold), number):
            for message in payload(late):
                assert not list(run.take(*flat(message)))
        forget(lane, threshold)
        assert not lane.held
        assert len(lane.known) <= 2 * threshold + 1
    assert lane.known
    run = Run(lane, None, None, 1 << 30)
    again = [event for message in payload(0) for event in run.take(*flat(message))]
    assert [event.id for event in again if isinstance(event, PayloadComplete)] == [b"%032d" % 0]


def flat(message: Any) -> tuple[Any, ...]:
    (key, value), source, position, now = message
    return key, value, source, position, now or 0.0


def test_a_smaller_budget_drops_what_was_held() -> None:
    lane = Lane()
    for number in range(20):
        lane, _ = batch(lane, payload(number)[1:])
    run = Run(lane, None, None, 1000)
    assert {type(event) for event in run.dropped} == {Dropped}
    assert 0 < len(run.dropped) < 20
    assert len(lane.held) == 20 - len(run.dropped)
