"""A consumer that stores the checkpoint with its results: each payload once, over any restarts."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from datastreamer.errors import BadPosition
from datastreamer.reassembly import Checkpoint, PayloadComplete, Reassembler
from tests.reassembly.generated import Made, Message, name, records, worlds

many = settings(max_examples=120, deadline=None)


class Consumer:
    """What survives: results and a checkpoint, stored in one transaction."""

    def __init__(self, sources: dict[str, list[Message]], **options: Any) -> None:
        self.sources = sources
        self.options = options
        self.results: list[tuple[bytes, list[Message]]] = []
        self.stored: Checkpoint | None = None
        self.read = 0
        self.start()

    def start(self) -> None:
        self.reassembler = Reassembler(**self.options, resume=self.stored)
        positions = self.stored.positions if self.stored else {}
        self.at = {source: positions.get(source, 0) for source in self.sources}

    def step(self, source: str) -> None:
        """Read one message of a source, if there is one."""
        at = self.at[source]
        if at < len(self.sources[source]):
            self.at[source] += 1
            self.read += 1
            events = self.reassembler.receive(*self.sources[source][at], source, at)
            for event in events:
                if isinstance(event, PayloadComplete):
                    self.results.append((event.id, event.parts))
            if events:
                self.stored = self.reassembler.checkpoint()

    def finish(self, chance: random.Random) -> None:
        while open_ := [s for s in self.sources if self.at[s] < len(self.sources[s])]:
            self.step(chance.choice(open_))


@given(worlds(8), st.randoms(use_true_random=False), st.sampled_from([1, 2, 3]))
@many
def test_each_payload_once(made: list[Made], chance: random.Random, count: int) -> None:
    names = "abc"[:count]
    sources: dict[str, list[Message]] = {source: [] for source in names}
    for payload in made:
        for message in payload.messages:
            for source in [n for n in names if chance.random() < 0.6] or [chance.choice(names)]:
                sources[source].append(message)
    for messages in sources.values():
        chance.shuffle(messages)
    consumer = Consumer(sources)
    for _ in range(chance.randrange(4)):
        for _ in range(chance.randrange(60)):
            consumer.step(chance.choice(names))
        consumer.start()
    consumer.finish(chance)
    assert sorted(consumer.results) == sorted((payload.id, payload.parts) for payload in made)


@given(st.randoms(use_true_random=False), st.integers(0, 2))
@many
def test_something_that_never_ends_does_not_bring_old_payloads_back(
    chance: random.Random, threshold: int
) -> None:
    """It holds the position, so that far more is read again than the threshold covers."""
    messages: list[Message] = [(name(9), b"without a header")]
    for number in range(30):
        own_id = b"%32d" % number
        payload = [(b"\0" + own_id, records((b"\1" + own_id, 1))), (b"\1" + own_id, b"x")]
        chance.shuffle(payload)
        messages += payload
    consumer = Consumer({"a": messages}, reorg_threshold=threshold)
    for _ in range(5):
        for _ in range(chance.randrange(60)):
            consumer.step("a")
        consumer.start()
    consumer.finish(chance)
    assert sorted(own_id for own_id, _ in consumer.results) == [
        b"%32d" % number for number in range(30)
    ]
    # Once it is given up, the rest may go as well.
    consumer.reassembler.expire(1e9)
    for number in range(2 * threshold + 2):
        consumer.reassembler.receive(b"\0%32d" % (number + 100), b"", "a", 1000 + number)
    assert consumer.reassembler.known_count <= 2 * threshold + 2


def test_any_one_source_may_be_lost_over_a_restart() -> None:
    """What both had sent is held at both: the one that is left has all of it."""
    payload = [(name(0, b"a"), records((name(1), 3)))]
    payload += [(name(1) + b"%d" % part, b"x") for part in range(3)]
    first = Consumer({"a": payload[:3], "b": payload})
    for source in "aaabbb":
        first.step(source)
    first.stored = first.reassembler.checkpoint()
    assert first.stored.positions == {"a": 0, "b": 0}
    left = Consumer({"b": payload})
    left.stored = Checkpoint({"b": first.stored.positions["b"]}, {}, first.stored.known)
    left.start()
    left.finish(random.Random(0))
    assert len(left.results) == 1


def test_a_source_that_does_not_come_back_keeps_nothing_for_ever() -> None:
    known = [(b"%32d" % number, [b"\1%32d" % number]) for number in range(50)]
    checkpoint = Checkpoint({"a": 0, "dead": 0}, {"a": 10, "dead": 10}, known)
    reassembler = Reassembler(resume=checkpoint, reorg_threshold=1, budget=30_000)
    # While it is not where it was, what it may bring again is known ...
    for number in range(100):
        reassembler.receive(b"\0%32d" % (number + 100), b"", "a", number)
    assert reassembler.known_count == 150
    # ... but not at the price of the budget.
    for number in range(200):
        reassembler.receive(b"\0%32d" % (number + 200), b"", "a", number + 100)
    assert reassembler.known_count < 20
    assert reassembler.stats().used <= 30_000 + 4 * 144


@given(worlds())
@settings(max_examples=30, deadline=None)
def test_a_checkpoint_is_a_line_of_text(made: list[Made]) -> None:
    reassembler = Reassembler()
    for position, message in enumerate(m for payload in made for m in payload.messages[:-1]):
        reassembler.receive(*message, "tcp://a", position)
    checkpoint = reassembler.checkpoint()
    text = checkpoint.to_json()
    assert "\n" not in text
    assert Checkpoint.from_json(text) == checkpoint
    bare = reassembler.checkpoint(known=False)
    assert bare == Checkpoint(checkpoint.positions, checkpoint.seen, [])


@pytest.mark.parametrize(
    "text",
    [
        *("", "[]", "7", "{}", '{"positions": {}, "seen": {}}'),
        '{"positions": {"a": -1}, "seen": {}, "known": []}',
        '{"positions": {"a": true}, "seen": {}, "known": []}',
        '{"positions": {}, "seen": {"a": 18446744073709551615}, "known": []}',
        '{"positions": {}, "seen": {}, "known": [["00"]]}',
        '{"positions": {}, "seen": {}, "known": [[]]}',
        '{"positions": {}, "seen": {}, "known": ["xy"]}',
        '{"positions": [1], "seen": {}, "known": []}',
    ],
)
def test_text_that_is_no_checkpoint(text: str) -> None:
    with pytest.raises(BadPosition, match="not a checkpoint of a reassembly"):
        Checkpoint.from_json(text)


def test_reading_again_ends() -> None:
    known = [(b"%32d" % number, []) for number in range(50)]
    reassembler = Reassembler(resume=Checkpoint({"a": 3}, {"a": 5}, known), reorg_threshold=1)
    assert reassembler.positions() == {"a": 3}
    assert reassembler.checkpoint() == Checkpoint(
        {"a": 3}, {"a": 5}, [(own_id, ()) for own_id, _ in known]
    )
    for position in (3, 4, 5):
        assert reassembler.receive(b"\0" + known[position][0], b"", "a", position) == ()
    assert reassembler.known_count == 50
    for number in range(4):
        reassembler.receive(b"\0%32d" % (number + 100), b"", "a", number + 6)
    assert reassembler.known_count <= 4


def test_a_checkpoint_above_the_budget_is_cut_at_once() -> None:
    known = [(b"%32d" % number, [b"\1%32d" % number]) for number in range(50)]
    reassembler = Reassembler(resume=Checkpoint({}, {}, known), budget=1000)
    assert reassembler.known_count == 50
    assert reassembler.stats().used <= 1000 + 50 * 144


def test_above_the_budget_what_may_come_again_is_known_until_something_may_go() -> None:
    known = [(b"%32d" % number, []) for number in range(50)]
    checkpoint = Checkpoint({"dead": 0}, {"dead": 10}, known)
    reassembler = Reassembler(resume=checkpoint, reorg_threshold=3, budget=1000)
    for number in range(3):
        assert reassembler.replaying
        reassembler.receive(b"\0%32d" % (number + 100), b"", "a", number)
    assert reassembler.known_count == 53
    # One more than the threshold: those of before go, all at once.
    reassembler.receive(b"\0%32d" % 200, b"", "a", 3)
    assert not reassembler.replaying
    assert reassembler.known_count == 4
