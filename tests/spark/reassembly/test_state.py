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
    PayloadComplete,
    Reassembler,
    Splitter,
)
from datastreamer.spark.reassembly.event_rows import row_of
from datastreamer.spark.reassembly.state import Lane, LaneBatch, forget
from tests.reassembly.generated import deliveries, name, subscriptions
from tests.spark.reassembly.event_rows import followed, plain

many = settings(max_examples=150, deadline=None)


def batch(
    lane: Lane,
    messages: list[Any],
    subscribe: Any = None,
    max_age: float | None = None,
    threshold: int = 1000,
) -> tuple[Lane, list[Event]]:
    """A batch, and the lane as it is read again after it."""
    run = LaneBatch(lane, subscribe, max_age, 1 << 30, lane.hashes.__getitem__)
    events = list(run.dropped)
    for (key, value), source, position, now in messages:
        if followed(key, subscribe):
            events += run.receive(key, value, source, position, now or 0.0)
        else:
            events += run.expire(now or 0.0)
    forget(lane, threshold, 1 << 30)
    assert_held(lane, run)
    lane.touched, lane.added, lane.forgotten = set(), [], []
    assert {number: len(kept) for number, kept in lane.hashes.items()} == {
        number: one.kept for number, one in lane.known.items() if one.kept
    }
    return pickle.loads(pickle.dumps(lane)), events


def assert_held(lane: Lane, run: LaneBatch) -> None:
    """No more is kept than the core keeps; headers, of which it keeps a hash, come on top."""
    held = [held for of_node in lane.held.values() for held in of_node.values()]
    assert sum(held.key[:1] != b"\x00" for held in held) == run._core.stats().messages


@given(deliveries(), subscriptions, st.data())
@many
def test_batches_report_what_one_run_reports(made: Any, subscribe: Any, data: Any) -> None:
    core = Reassembler(subscribe, reorg_threshold=U32_MAX, max_age=3.0)
    cuts = sorted(data.draw(st.sets(st.integers(0, len(made)), max_size=4)))
    lane = Lane()
    for start, stop in zip([0, *cuts], [*cuts, len(made)], strict=True):
        expected = [
            event
            for (key, value), source, position, now in made[start:stop]
            for event in core.receive(key, value, source, position, now or 0.0)
        ]
        lane, events = batch(lane, made[start:stop], subscribe, 3.0)
        assert plain(map(row, events)) == plain(map(row, expected))
    last = LaneBatch(lane, subscribe, 3.0, 1 << 30, lane.hashes.__getitem__)
    assert plain(map(row, last.expire(1e9))) == plain(map(row, core.expire(1e9)))
    assert not lane.held


def row(event: Event) -> tuple[Any, ...]:
    reported = row_of(event)
    # From where it could be read again is Spark's business.
    return reported[:-1] if isinstance(event, Dropped) else reported


def payload(number: int) -> list[Any]:
    own = b"%032d" % number
    messages = Splitter().split(own, {name(1, own[:32])[:33]: [(b"", b"x")]})
    return [(message, "a", None, None) for message in messages]


def test_what_was_given_out_is_known_for_two_generations() -> None:
    lane = Lane()
    threshold = 10
    for number in range(45):
        run = LaneBatch(lane, None, None, 1 << 30, lane.hashes.__getitem__)
        reported = [event for message in payload(number) for event in run.receive(*flat(message))]
        assert len(reported) == 1
        # The last ones again, late.
        for late in range(max(0, number - threshold), number):
            for message in payload(late):
                assert not list(run.receive(*flat(message)))
        forget(lane, threshold, 1 << 30)
        assert not lane.held
        assert len(lane.known) <= 2 * threshold + 1
    assert lane.known
    run = LaneBatch(lane, None, None, 1 << 30, lane.hashes.__getitem__)
    again = [event for message in payload(0) for event in run.receive(*flat(message))]
    assert [event.id for event in again if isinstance(event, PayloadComplete)] == [b"%032d" % 0]


def flat(message: Any) -> tuple[Any, ...]:
    (key, value), source, position, now = message
    return key, value, source, position, now or 0.0


def test_a_smaller_budget_drops_what_was_held() -> None:
    lane = Lane()
    for number in range(20):
        lane, _ = batch(lane, payload(number)[1:])
    run = LaneBatch(lane, None, None, 1000, lane.hashes.__getitem__)
    assert {type(event) for event in run.dropped} == {Dropped}
    assert 0 < len(run.dropped) < 20
    assert len(lane.held) == 20 - len(run.dropped)


@given(
    st.integers(0, 6),
    st.lists(st.lists(st.tuples(st.integers(0, 15), st.booleans()), max_size=8), max_size=12),
)
@many
def test_the_threshold_holds_whatever_comes_again(threshold: int, batches: Any) -> None:
    """Payloads that come whole, again and again, and sometimes with a lie at the end: given out
    again only behind more than `threshold` others; and until then the conflict is reported."""
    lane = Lane()
    delivered: list[int] = []
    largest = 0
    for each in batches:
        largest = max(largest, len(each))
        messages = []
        for number, lies in each:
            messages += payload(number)
            if lies:
                (key, _), *where = payload(number)[-1]
                messages.append(((key, b"lie"), *where))
        lane, events = batch(lane, messages, threshold=threshold)
        again = [int(event.id) for event in events if isinstance(event, PayloadComplete)]
        for number in again:
            if number in delivered:
                since = len(delivered) - 1 - delivered[::-1].index(number)
                assert len(delivered) - 1 - since >= threshold
            delivered.append(number)
        conflicts = [event for event in events if isinstance(event, Conflict)]
        assert len(conflicts) == sum(lies for _, lies in each)
        assert len(events) == len(again) + len(conflicts)
        assert len(lane.known) <= 2 * (threshold + largest)


def test_of_the_oldest_only_the_names_are_kept_above_the_budget() -> None:
    lane = Lane()
    for number in range(10):
        lane, _ = batch(lane, payload(number))
    one = lane.known[0].kept
    assert one == 8 + 4 + 16
    forget(lane, 1000, 4 * one)
    assert [known.kept for known in lane.known.values()] == [0] * 6 + [one] * 4
    assert sorted(lane.hashes) == [6, 7, 8, 9]
    assert lane.stripped == [0, 1, 2, 3, 4, 5]
    lies = [((payload(number)[-1][0][0], b"lie"), "a", None, None) for number in range(10)]
    lane.stripped = []
    _, events = batch(lane, lies)
    assert [int(event.payload or b"") for event in events if isinstance(event, Conflict)] == [
        6,
        7,
        8,
        9,
    ]
    assert len(events) == 4
