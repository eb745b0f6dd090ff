"""The compiled reassembler and its twin of dicts, step by step: the same events and places."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from datastreamer.reassembly import Event, Malformed, PayloadComplete, Reassembler
from tests.reassembly.generated import Message, deliveries, name, records, subscriptions
from tests.reassembly.twin import Twin

many = settings(max_examples=150, deadline=None)


def reported(events: Any) -> list[Event]:
    """Events without what is said in words, or in no order."""
    plain: list[Event] = []
    for event in events:
        if isinstance(event, Malformed):
            plain.append(replace(event, reason=""))
        elif isinstance(event, PayloadComplete):
            plain.append(replace(event, prefixes=tuple(sorted(event.prefixes))))
        else:
            plain.append(event)
    return plain


def known(what: Reassembler | Twin) -> list[tuple[bytes, list[bytes]]]:
    return [(own_id, sorted(prefixes)) for own_id, prefixes in what.known()]


def same(ours: Reassembler, twin: Twin) -> None:
    stats = ours.stats()
    assert ours.positions() == twin.positions()
    assert known(ours) == known(twin)
    assert ours.known_count == stats.known == len(twin.finished)
    assert stats.in_flight == len(twin.flight)
    assert stats.used == twin.used
    assert stats.oldest == next((item.since for item in twin.flight.values()), None)
    waiting = [prefix for prefix in twin.prefixes.values() if not finished(prefix)]
    assert stats.messages == sum(len(prefix.messages) for prefix in waiting)
    for source, counts in stats.sources.items():
        for what in ("received", "duplicates", "conflicts", "malformed", "outside"):
            assert getattr(counts, what) == twin.counts.get((source, what), 0), what


def finished(prefix: Any) -> bool:
    return prefix.payload is not None and prefix.payload.finished


options = st.fixed_dictionaries(
    {
        "subscribe": subscriptions,
        "reorg_threshold": st.sampled_from([0, 1, 2, 1000]),
        "budget": st.sampled_from([1, 500, 1000, 2000, 4000, 1 << 30]),
        "max_age": st.sampled_from([None, 3.0, 10.0]),
    }
)


@given(deliveries(), options)
@many
def test_same(made: Any, given_options: dict[str, Any]) -> None:
    ours, twin = Reassembler(**given_options), Twin(**given_options)
    for (key, value), source, position, now in made:
        events = ours.receive(key, value, source, position, now)
        assert reported(events) == reported(twin.receive(key, value, source, position, now))
        same(ours, twin)
    assert reported(ours.expire(1e9)) == reported(twin.expire(1e9))
    same(ours, twin)
    if given_options["max_age"] is not None:
        assert ours.stats().in_flight == ours.stats().messages == 0


@given(deliveries(), options, st.data())
@many
def test_same_after_a_restart(made: Any, given_options: dict[str, Any], data: Any) -> None:
    ours, twin = Reassembler(**given_options), Twin(**given_options)
    cut = data.draw(st.integers(0, len(made)))
    for (key, value), source, position, now in made[:cut]:
        ours.receive(key, value, source, position, now)
        twin.receive(key, value, source, position, now)
    checkpoint = ours.checkpoint()
    assert checkpoint.positions == twin.checkpoint().positions
    assert checkpoint.seen == twin.checkpoint().seen
    ours = Reassembler(**given_options, resume=checkpoint)
    twin = Twin(**given_options, resume=checkpoint)
    same(ours, twin)
    assert ours.positions() == checkpoint.positions
    assert ours.checkpoint().seen == checkpoint.seen
    for (key, value), source, position, now in made:
        if position is None or position >= checkpoint.positions.get(source, 0):
            events = ours.receive(key, value, source, position, now)
            assert reported(events) == reported(twin.receive(key, value, source, position, now))
            same(ours, twin)


def long_payload(chance: random.Random, number: int) -> list[Message]:
    """A header with two prefixes, one of them of a nested header, and all their parts."""
    own, flat, nested, inner = (name(first, f"{number}") for first in (0, 1, 0xFF, 2))
    flats, inners = chance.randrange(1, 6), chance.randrange(4)
    return [
        (own, records((flat, flats), (nested, 1))),
        (nested, records((inner, inners))),
        *((flat + b"%d" % at, bytes(chance.randrange(300))) for at in range(flats)),
        *((inner + b"%d" % at, b"inner") for at in range(inners)),
    ]


def long_world(chance: random.Random) -> Iterator[tuple[Message, str, int, float]]:
    """One source or three send 40 payloads, each in an order of its own, some messages never and
    some twice, and in addition what is not subscribed to."""
    messages = [message for number in range(40) for message in long_payload(chance, number)]
    apart, lost = chance.choice([0, 5, 40]), chance.choice([0.0, 0.02, 0.3])
    lone = chance.choice([0, 0, 1, 8])
    reported = []
    for source in chance.choice(["a", "abc", "abc"]):
        order = [(at + chance.uniform(0, apart), key) for at, key in enumerate(messages)]
        order += chance.sample(order, 20)
        for number in range(lone * (source == "a") * 40):
            order.append((7.3 * number, (name(3, f"lone {number}"), bytes(200))))
        kept = [place for place in order if chance.random() >= lost]
        pace = chance.choice([1.0, 1.0, 1.5])
        reported += [(pace * at, source, key) for at, key in kept]
    positions = dict.fromkeys("abc", -1)
    for at, source, message in sorted(reported):
        positions[source] += 1
        yield message, source, positions[source], at + chance.choice([0.0, 0.0, -30.0])


@pytest.mark.parametrize("seed", range(60))
def test_same_for_long(seed: int) -> None:
    """Until what was given out is forgotten, thinned and its place used again."""
    chance = random.Random(seed)
    given_options: dict[str, Any] = {
        "reorg_threshold": chance.choice([0, 1, 2, 5, 20]),
        "budget": chance.choice([1500, 3000, 6000, 12_000, 40_000, 1 << 30]),
        "max_age": chance.choice([None, 20.0, 100.0]),
    }
    ours, twin = Reassembler(**given_options), Twin(**given_options)
    world = list(long_world(chance))
    restart = chance.randrange(2 * len(world))
    again = {}
    if restart < len(world):
        for (key, value), source, position, now in world[:restart]:
            ours.receive(key, value, source, position, now)
            twin.receive(key, value, source, position, now)
        checkpoint = ours.checkpoint()
        again = checkpoint.positions
        ours = Reassembler(**given_options, resume=checkpoint)
        twin = Twin(**given_options, resume=checkpoint)
    for (key, value), source, position, now in world:
        if position >= again.get(source, 0):
            events = ours.receive(key, value, source, position, now)
            assert reported(events) == reported(twin.receive(key, value, source, position, now))
            same(ours, twin)
    assert reported(ours.expire(1e9)) == reported(twin.expire(1e9))
    same(ours, twin)
