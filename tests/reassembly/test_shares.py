"""Who gives way above the budget: a source that sends more than its share, not the others."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from datastreamer.reassembly import Dropped, Event, PayloadComplete, Reassembler
from tests.reassembly.generated import Message, name, records

HONEST = "abc"
Sent = tuple[str, Message]


def part(number: int | str, size: int = 100) -> Message:
    """A message whose prefix no header announces."""
    return name(1, f"{number}"), bytes(size)


def payload(number: int, parts: int = 10, first: int = 1) -> list[Message]:
    """A header, and parts of 100 bytes."""
    own, prefix = name(0, f"honest {number}"), name(first, f"honest {number}")
    messages = [(prefix + b"%d" % at, bytes(100)) for at in range(parts)]
    return [(own, records((prefix, parts))), *messages]


def honest(payloads: int, chance: random.Random) -> Iterator[Sent]:
    """Three sources in turn, each with all payloads in an order of its own, messages of which
    are at most 30 places away from where they belong."""
    messages = [message for number in range(payloads) for message in payload(number)]
    orders = [
        sorted(enumerate(messages), key=lambda place: place[0] + chance.randrange(30))
        for _ in HONEST
    ]
    for at in range(len(messages)):
        for source, order in zip(HONEST, orders, strict=True):
            yield source, order[at][1]


def beside(
    messages: Iterator[Sent], lies: Iterator[Message], times: int, liar: str = "liar"
) -> Iterator[Sent]:
    for sent in messages:
        yield sent
        # This multiple of what one of them sends: the three of them are three times as fast.
        if sent[0] == HONEST[0]:
            for _ in range(times):
                yield liar, next(lies)


def receive(reassembler: Reassembler, messages: Iterator[Sent]) -> list[Event]:
    positions: dict[str, int] = {}
    events: list[Event] = []
    for source, message in messages:
        positions[source] = at = positions.get(source, -1) + 1
        events += reassembler.receive(*message, source, at)
    return events


def lone_parts(_: random.Random) -> Iterator[Message]:
    """Parts that no header comes to."""
    number = 0
    while True:
        number += 1
        yield part(f"lie {number}")


def headers_alone(_: random.Random) -> Iterator[Message]:
    """Headers of payloads that never come, with many prefixes each."""
    number = 0
    while True:
        number += 1
        reported = [(name(1, f"{number}, {at}"), 1) for at in range(20)]
        yield name(0, f"lie {number}"), records(*reported)


def all_but_one(_: random.Random) -> Iterator[Message]:
    """Payloads that lack their last part."""
    number = 0
    while True:
        number += 1
        yield from payload(-number, 30)[:-1]


def one_without_end(_: random.Random) -> Iterator[Message]:
    """A payload that becomes larger and larger."""
    own, prefix = name(0, "lie"), name(1, "lie")
    yield own, records((prefix, 2**32 - 1))
    number = 0
    while True:
        number += 1
        yield prefix + b"%d" % number, bytes(100)


def beside_what_is_true(chance: random.Random) -> Iterator[Message]:
    """Parts that no header comes to; and what the honest ones have sent, and will send."""
    truth = [message for number in range(100) for message in payload(number)]
    for at, lie in enumerate(lone_parts(chance)):
        yield lie if at % 10 else truth[(at * 7 + chance.randrange(300)) % len(truth)]


LIES = [lone_parts, headers_alone, all_but_one, one_without_end, beside_what_is_true]


@pytest.mark.parametrize("lies", LIES)
def test_a_flood_of_lies_costs_none_of_what_the_others_send(lies: object) -> None:
    """Three honest sources, and one that sends ten times what each of them does."""
    assert callable(lies)
    chance = random.Random(1)
    # Some five payloads are underway at any time, of 2 KB each, and twelve are known.
    reassembler = Reassembler(budget=50_000, reorg_threshold=5)
    events = receive(reassembler, beside(honest(100, chance), lies(chance), 10))
    dropped = [event for event in events if isinstance(event, Dropped)]
    done = {event.id for event in events if isinstance(event, PayloadComplete)}
    assert len(dropped) > 50 if lies is not one_without_end else dropped
    assert {*event_sources(dropped)} == {"liar"}
    assert done == {payload(number)[0][0][1:] for number in range(100)}
    assert reassembler.stats().used <= 50_000 + 12 * 144


def event_sources(dropped: list[Dropped]) -> Iterator[str]:
    for event in dropped:
        yield from event.positions


@given(
    st.integers(0, 2**32).map(random.Random),
    st.sampled_from(LIES),
    st.integers(1, 20),
    st.integers(60_000, 120_000),
)
@settings(max_examples=30, deadline=None)
def test_whatever_is_sent_beside_them_honest_payloads_are_whole(
    chance: random.Random, lies: object, times: int, budget: int
) -> None:
    assert callable(lies)
    reassembler = Reassembler(budget=budget, reorg_threshold=5)
    events = receive(reassembler, beside(honest(30, chance), lies(chance), times))
    done = [event.id for event in events if isinstance(event, PayloadComplete)]
    assert sorted(done) == sorted(payload(number)[0][0][1:] for number in range(30))
    for event in events:
        if isinstance(event, Dropped):
            # Where it sends ahead what is true, it is not alone in what goes.
            assert "liar" in event.positions


def test_of_two_sources_the_one_with_more_gives_way() -> None:
    reassembler = Reassembler(budget=5000)
    reassembler.receive(*part("a1", 2000), "a", 3)
    reassembler.receive(*part("b1", 1000), "b", 9)
    reassembler.receive(*part("b2", 100), "b", 10)
    (event,) = reassembler.receive(*part("b3", 1500), "b", 11)
    assert isinstance(event, Dropped)
    assert event.positions == {"b": 9}
    # Now it is the other one.
    (event,) = reassembler.receive(*part("b4", 1000), "c", 0)
    assert isinstance(event, Dropped)
    assert event.positions == {"a": 3}


def test_of_two_sources_with_as_much_the_one_that_came_first() -> None:
    for first, second in ("ab", "ba"):
        reassembler = Reassembler(budget=4000)
        reassembler.receive(*part(1, 1500), first, 0)
        reassembler.receive(*part(2, 1500), second, 0)
        (event,) = reassembler.receive(*part(3, 1000), "c", 0)
        assert isinstance(event, Dropped)
        assert event.positions == {first: 0}


def test_what_two_have_sent_is_neither_s() -> None:
    reassembler = Reassembler(budget=5000)
    for source in "ab":
        reassembler.receive(*part("both", 2000), source, 0)
    reassembler.receive(*part("c1", 500), "c", 0)
    (event,) = reassembler.receive(*part("c2", 2000), "c", 1)
    assert isinstance(event, Dropped)
    assert event.positions == {"c": 0}
    # Who sends it a second time alone changes nothing.
    reassembler.receive(*part("c2", 2000), "c", 2)
    (event,) = reassembler.receive(*part("c3", 500), "c", 3)
    assert isinstance(event, Dropped)
    assert event.positions == {"c": 1}


def test_where_sources_agree_about_what_never_ends_there_is_room_for_what_comes() -> None:
    """What no source can complete does not stay because several have sent it."""
    reassembler = Reassembler(budget=20_000, max_age=None)
    for number in range(200):
        for source in "ab":
            reassembler.receive(*part(number, 500), source, number)
    events: list[Event] = []
    for message in payload(1, 20):
        events += reassembler.receive(*message, "a")
    assert [type(event) for event in events if not isinstance(event, Dropped)] == [PayloadComplete]


def test_a_source_cannot_hide_behind_what_others_send() -> None:
    """Where it puts what no other sends makes no difference."""
    reassembler = Reassembler(budget=50_000)
    prefix = name(1, "theirs")
    for source in "ab":
        reassembler.receive(prefix + b"true", bytes(100), source, 0)
    reassembler.receive(*part("b's own", 5000), "b", 1)
    for number in range(1000):
        events = reassembler.receive(prefix + b"lie %d" % number, bytes(100), "liar", number)
        if events:
            break
    (event,) = events
    assert isinstance(event, Dropped)
    assert event.prefix == prefix
    assert reassembler.stats().in_flight == 1


def test_something_small_that_never_ends_does_not_cost_what_is_behind_it() -> None:
    """It keeps from being forgotten what was given out since: that is its own cost."""
    reassembler = Reassembler(budget=30_000, reorg_threshold=1, max_age=None)
    reassembler.receive(*part("never", 1), "liar", 0)
    dropped: list[Event] = []
    for message in payload(0, 5)[:3]:
        reassembler.receive(*message, "a")
    for number in range(1000):
        for source in "ab":
            # Two payloads overlap: there is always one in flight.
            later = payload(number + 1, 5)[:3]
            for message in [*payload(number, 5)[3:], *later]:
                events = reassembler.receive(*message, source)
                dropped += [event for event in events if isinstance(event, Dropped)]
    assert [event.prefix for event in dropped if isinstance(event, Dropped)] == [part("never")[0]]
    assert reassembler.stats().known <= 4
