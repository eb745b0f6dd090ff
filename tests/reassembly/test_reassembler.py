"""What a reassembler makes of messages, by example; `test_against_twin.py` has the rest."""

from __future__ import annotations

import itertools
import random
import threading
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from datastreamer._codec import scan
from datastreamer.errors import BadArgument, UsageError
from datastreamer.reassembly import (
    Checkpoint,
    Conflict,
    Dropped,
    Malformed,
    PayloadComplete,
    Reassembler,
    Splitter,
    pack_message,
)
from tests.oracle import pack
from tests.reassembly.generated import Made, Message, name, records, worlds

A, B = b"a".ljust(32, b"."), b"b".ljust(32, b".")
P, Q = name(1, b"p"), name(2, b"q")


def header(id: bytes, *announced: tuple[bytes, int]) -> Message:
    return b"\0" + id, records(*announced)


def feed(reassembler: Reassembler, *messages: Message, source: str = "") -> list[Any]:
    return [event for message in messages for event in reassembler.receive(*message, source)]


def whole(events: list[Any]) -> list[tuple[bytes, list[Message]]]:
    return [(event.id, event.parts) for event in events if isinstance(event, PayloadComplete)]


@pytest.mark.parametrize("order", list(itertools.permutations(range(4))))
def test_any_order(order: tuple[int, ...]) -> None:
    messages = [header(A, (P, 2), (Q, 1)), (P + b"2", b"two"), (P + b"1", b"one"), (Q, b"")]
    events = feed(Reassembler(), *(messages[at] for at in order))
    assert whole(events) == [(A, [(P + b"1", b"one"), (P + b"2", b"two"), (Q, b"")])]
    assert len(events) == 1
    assert set(events[0].prefixes) == {P, Q}


@given(worlds(), st.randoms(use_true_random=False))
@settings(max_examples=100, deadline=None)
def test_the_same_payloads_whatever_happens_on_the_way(
    made: list[Made], chance: random.Random
) -> None:
    """Three producers, each with losses, in any order, some things twice; nothing is lost on
    all of them."""
    sent: list[tuple[str, Message]] = []
    for payload in made:
        for message in payload.messages:
            sources = [name for name in "abc" if chance.random() < 0.7] or ["a"]
            sent += [(source, message) for source in sources]
    sent += [chance.choice(sent) for _ in range(chance.randrange(10))]
    chance.shuffle(sent)
    reassembler = Reassembler()
    events = [event for source, message in sent for event in reassembler.receive(*message, source)]
    assert sorted(whole(events)) == sorted((payload.id, payload.parts) for payload in made)
    assert len(events) == len(made)
    stats = reassembler.stats()
    assert stats.in_flight == stats.messages == stats.message_bytes == 0
    duplicates = sum(counts.duplicates for counts in stats.sources.values())
    assert duplicates == len(sent) - sum(len(payload.messages) for payload in made)


def test_zero_counts_and_no_records() -> None:
    reassembler = Reassembler()
    assert whole(feed(reassembler, header(A))) == [(A, [])]
    assert whole(feed(reassembler, header(B, (P, 0), (Q, 0)))) == [(B, [])]
    assert whole(feed(reassembler, header(A), header(B, (P, 0), (Q, 0)))) == []


def test_nested_to_any_depth_in_any_order() -> None:
    depth = 3000
    prefixes = [name(0xFF, b"%d" % at) for at in range(depth)]
    messages = [header(A, (prefixes[0], 1))]
    messages += [(one, records((other, 1))) for one, other in itertools.pairwise(prefixes)]
    messages += [(prefixes[-1] + b"suffix", records((P, 1))), (P, b"deep")]
    for order in (messages, messages[::-1], random.Random(1).sample(messages, len(messages))):
        reassembler = Reassembler()
        assert whole(feed(reassembler, *order)) == [(A, [(P, b"deep")])]
        assert reassembler.stats().messages == 0


# Conflicts.


def test_the_first_value_stays() -> None:
    reassembler = Reassembler()
    early = feed(reassembler, (P, b"waiting"), (P, b"other"), source="x")
    assert early == [Conflict("value", P, P, None, "x", None)]
    feed(reassembler, header(A, (P, 1), (Q, 2)))
    assert reassembler.receive(Q, b"1", "x", 7) == ()
    assert reassembler.receive(Q, b"2", "liar", 8) == (Conflict("value", Q, Q, A, "liar", 8),)
    other = header(A, (P, 2))
    assert feed(reassembler, other) == [Conflict("value", other[0], other[0], A, "", None)]
    assert whole(feed(reassembler, (Q + b"2", b""))) == [
        (A, [(P, b"waiting"), (Q, b"1"), (Q + b"2", b"")])
    ]
    # And what comes late is judged as well.
    assert feed(reassembler, (Q, b"1"), header(A, (P, 1), (Q, 2))) == []
    assert feed(reassembler, (Q, b"2")) == [Conflict("value", Q, Q, A, "", None)]
    assert feed(reassembler, other) == [Conflict("value", other[0], other[0], A, "", None)]
    (late,) = feed(reassembler, (Q + b"new", b""))
    assert isinstance(late, Malformed)
    assert reassembler.stats().sources["liar"].conflicts == 1


def test_late_messages_of_large_prefixes_are_judged_too() -> None:
    reassembler = Reassembler()
    messages = [(P + b"%d" % at, b"value %d" % at) for at in range(1000)]
    assert len(whole(feed(reassembler, header(A, (P, 1000)), *messages))) == 1
    assert feed(reassembler, *messages) == []
    lies = [(key, value + b"!") for key, value in messages]
    assert [type(event) for event in feed(reassembler, *lies)] == [Conflict] * 1000


def test_a_prefix_belongs_to_the_payload_that_announced_it() -> None:
    reassembler = Reassembler()
    feed(reassembler, header(A, (P, 1)))
    assert feed(reassembler, header(B, (Q, 1), (P, 3))) == [
        Conflict("prefix", b"\0" + B, P, A, "", None)
    ]
    # Nothing of the refused header was taken: a right one is welcome.
    assert feed(reassembler, (Q, b"x")) == []
    assert whole(feed(reassembler, header(B, (Q, 1)))) == [(B, [(Q, b"x")])]
    # Of a nested one neither, not even when it had to wait.
    nested = name(0xFF, b"n")
    third = b"c".ljust(32, b".")
    feed(reassembler, (nested + b"1", records((P, 1))), (nested + b"2", records((name(3), 1))))
    assert feed(reassembler, header(third, (nested, 1))) == [
        Conflict("prefix", nested + b"1", P, A, None, None)
    ]
    assert whole(feed(reassembler, (name(3), b"y"))) == [(third, [(name(3), b"y")])]
    # Nor where its payload waits for it.
    fourth, later = b"d".ljust(32, b"."), name(0xFF, b"later")
    feed(reassembler, header(fourth, (later, 1)))
    assert feed(reassembler, (later, records((P, 1)))) == [
        Conflict("prefix", later, P, A, "", None)
    ]
    assert whole(feed(reassembler, (later, b""))) == [(fourth, [])]


def test_two_counts_for_one_prefix_never_give_a_payload_out_early() -> None:
    nested = name(0xFF, b"n")
    for counts in ((1, 2), (2, 1)):
        reassembler = Reassembler()
        feed(reassembler, header(A, (nested, 2)), (P + b"1", b""))
        feed(reassembler, (nested + b"1", records((P, counts[0]))))
        (conflict,) = feed(reassembler, (nested + b"2", records((P, counts[1]))))
        assert conflict == Conflict("count", nested + b"2", P, A, "", None)
        assert whole(feed(reassembler, (P + b"2", b""))) == [
            (A, [(P + b"1", b""), (P + b"2", b"")])
        ]


def test_a_part_beyond_the_smaller_of_two_counts_is_taken_when_it_comes_again() -> None:
    nested = name(0xFF, b"n")
    reassembler = Reassembler()
    feed(reassembler, header(A, (nested, 2)), (nested + b"1", records((P, 1))), (P + b"1", b""))
    (early,) = feed(reassembler, (P + b"2", b""), source="a")
    assert isinstance(early, Malformed)
    (conflict,) = feed(reassembler, (nested + b"2", records((P, 2))))
    assert isinstance(conflict, Conflict)
    assert whole(feed(reassembler, (P + b"2", b""), source="b")) == [
        (A, [(P + b"1", b""), (P + b"2", b"")])
    ]


@pytest.mark.parametrize(
    "key, value, reason",
    [
        (b"", b"", "a key of 0 bytes, less than 33"),
        (b"\1" * 32, b"", "a key of 32 bytes, less than 33"),
        (b"\0" * 34, b"", "a header's key must have 33 bytes, not 34"),
        (b"\0" * 33, bytes(36), "36 bytes are not a whole number of 37-byte records"),
        (name(0xFF), b"x", "1 bytes are not a whole number of 37-byte records"),
        (b"\0" * 33, records((P, 1), (name(0), 1)), "record 1 announces a prefix of headers"),
    ],
)
def test_malformed(key: bytes, value: bytes, reason: str) -> None:
    reassembler = Reassembler()
    (event,) = reassembler.receive(key, value, "a", 5)
    assert isinstance(event, Malformed)
    assert (event.key, event.source, event.position) == (key, "a", 5)
    assert reason in event.reason
    assert reassembler.stats().sources["a"].malformed == 1
    assert reassembler.stats().used == 0
    assert reassembler.positions().get("a") == 6
    # The stream continues, and a correct one of the same key is accepted.
    assert whole(feed(reassembler, header(A))) == [(A, [])]


def test_more_messages_than_announced() -> None:
    reassembler = Reassembler()
    feed(reassembler, header(A, (P, 1), (Q, 1)), (P + b"1", b""))
    (event,) = feed(reassembler, (P + b"2", b""))
    assert isinstance(event, Malformed)
    assert event.key == P + b"2"
    assert "one more than the 1 messages announced" in event.reason
    # Those that waited are in the order in which they came.
    reassembler = Reassembler()
    events = feed(reassembler, (P + b"2", b""), (P + b"1", b""), header(A, (P, 1)))
    assert [type(event) for event in events] == [Malformed, PayloadComplete]
    assert events[0].key == P + b"1"
    assert whole(events) == [(A, [(P + b"2", b"")])]


def test_many_that_waited_where_fewer_were_announced() -> None:
    reassembler = Reassembler()
    waiting = [(P + b"%02d" % at, b"x") for at in range(40)]
    events = feed(reassembler, *waiting, header(A, (P, 25), (Q, 1)))
    assert [event.key for event in events] == [key for key, _ in waiting[25:]]
    # What was refused is not there any more; the rest is.
    again = feed(reassembler, *waiting)
    assert [event.key for event in again] == [key for key, _ in waiting[25:]]
    assert {type(event) for event in again} == {Malformed}
    assert reassembler.stats().sources[""].duplicates == 25
    assert whole(feed(reassembler, (Q, b""))) == [(A, [*waiting[:25], (Q, b"")])]


# What is known of payloads that were given out.


@pytest.mark.parametrize("threshold", [0, 1, 3])
def test_known_for_at_least_the_threshold(threshold: int) -> None:
    reassembler = Reassembler(reorg_threshold=threshold)
    payload = [header(A, (P, 1)), (P, b"x")]
    assert len(whole(feed(reassembler, *payload))) == 1
    for number in range(threshold):
        feed(reassembler, header(b"%32d" % number))
        assert feed(reassembler, *payload) == []
    for number in range(2 * threshold + 2):
        feed(reassembler, header(b"%32d" % (number + 100)))
    assert reassembler.known_count <= 2 * threshold + 2
    # Forgotten, prefixes and all.
    assert feed(reassembler, (P, b"other")) == []
    assert whole(feed(reassembler, header(B, (P, 1)))) == [(B, [(P, b"other")])]
    assert len(whole(feed(reassembler, header(A)))) == 1


def test_memory_does_not_grow_with_payloads() -> None:
    reassembler = Reassembler(reorg_threshold=10)
    for number in range(1000):
        own_id = b"%32d" % number
        feed(reassembler, header(own_id, (b"\1" + own_id, 1)), (b"\1" + own_id, b"x"))
    assert reassembler.known_count <= 22
    assert reassembler.stats().used <= 22 * (2 * 144 + 24)


# Subscription.


def test_only_what_is_subscribed_to() -> None:
    reassembler = Reassembler([b"\2"])
    assert feed(reassembler, (P, b"x"), header(A, (P, 5), (Q, 1))) == []
    assert reassembler.stats().messages == 0
    assert reassembler.stats().sources[""].outside == 1
    (event,) = feed(reassembler, (Q, b"y"))
    assert (event.parts, event.prefixes) == ([(Q, b"y")], (Q,))
    # Without any, payloads are reported nevertheless.
    assert whole(feed(Reassembler([]), header(A, (P, 5)))) == [(A, [])]


def test_nested_headers_are_followed_when_subscribed_to() -> None:
    nested = name(0xFF, b"n")
    messages = [header(A, (nested, 1)), (nested, records((P, 1), (Q, 1))), (P, b"x"), (Q, b"y")]
    assert whole(feed(Reassembler([b"\1"]), *messages)) == [(A, [])]
    assert whole(feed(Reassembler([b"\1", b"\xff"]), *messages)) == [(A, [(P, b"x")])]


def test_a_subscription_longer_than_a_prefix() -> None:
    reassembler = Reassembler([P + b"1"])
    events = feed(reassembler, header(A, (P, 2)), (P + b"2", b"no"), (P + b"10", b"yes"))
    assert whole(events) == [(A, [(P + b"10", b"yes")])]


# Budget and age.


def test_above_the_budget_the_oldest_goes() -> None:
    reassembler = Reassembler(budget=5000)
    reassembler.receive(*header(A, (P, 2)), "a", 3)
    reassembler.receive(P, bytes(2000), "a", 4)
    assert reassembler.positions().get("a") == 3
    assert reassembler.receive(Q, bytes(1000), "a", 9) == ()
    (event,) = reassembler.receive(name(3), bytes(2000), "a", 10)
    assert event == Dropped("budget", A, None, 1, 33 + 2000, 1, 0.0, {"a": 3})
    assert reassembler.positions().get("a") == 9
    (event,) = reassembler.receive(name(4), bytes(2000), "a", 11)
    assert event == Dropped("budget", None, Q, 1, 33 + 1000, None, 0.0, {"a": 9})
    stats = reassembler.stats()
    assert stats.dropped == 2
    assert stats.used <= 5000
    # What was dropped can come again.
    assert whole(feed(reassembler, header(A, (P, 1)), (P, b"x"))) == [(A, [(P, b"x")])]


def test_something_larger_than_the_budget() -> None:
    reassembler = Reassembler(budget=1000)
    (event,) = reassembler.receive(P, bytes(2000))
    assert isinstance(event, Dropped)
    assert event.bytes == 2033
    assert reassembler.stats().used == 0


def test_what_was_given_out_gives_way_before_what_is_in_flight() -> None:
    reassembler = Reassembler(budget=3000)
    for number in range(100):
        own_id = b"%32d" % number
        assert feed(
            reassembler, header(own_id, *((name(1, b"%d,%d" % (number, at)), 0) for at in range(9)))
        )
    assert feed(reassembler, header(A, (P, 1))) == []
    assert whole(feed(reassembler, (P, b"x"))) == [(A, [(P, b"x")])]
    # They are known nevertheless.
    assert feed(reassembler, *(header(b"%32d" % number) for number in range(100))) == [
        Conflict("value", key, key, key[1:], "", None)
        for key in (b"\0%32d" % number for number in range(100))
    ]


def test_age() -> None:
    reassembler = Reassembler(max_age=10.0)
    reassembler.receive(P, b"x", "a", 0, now=100.0)
    reassembler.receive(Q, b"x", "a", 1, now=105.0)
    assert reassembler.stats().oldest == 100.0
    assert reassembler.expire(110.0) == ()
    (event,) = reassembler.expire(110.5)
    assert event == Dropped("age", None, P, 1, 34, None, 100.0, {"a": 0})
    # The header takes over the age of what waited for it.
    assert reassembler.receive(*header(A, (Q, 2)), "a", 2, now=114.0) == ()
    (event,) = reassembler.receive(name(3), b"", "a", 3, now=116.0)
    assert event == Dropped("age", A, None, 1, 34, 1, 105.0, {"a": 1})
    assert reassembler.positions().get("a") == 3


def test_time_does_not_go_back_and_none_is_no_time() -> None:
    reassembler = Reassembler(max_age=10.0)
    reassembler.receive(P, b"x", now=100.0)
    reassembler.receive(Q, b"x", now=50.0)
    assert reassembler.stats().oldest == 100.0
    assert feed(reassembler, (name(3), b"")) == []
    events = reassembler.expire(110.5)
    assert [(event.prefix, event.since) for event in events] == [
        (P, 100.0),
        (Q, 100.0),
        (name(3), 100.0),
    ]
    assert Reassembler(max_age=None).expire(1e12) == ()


def test_since_is_the_first_message() -> None:
    reassembler = Reassembler()
    reassembler.receive(P, b"x", now=3.0)
    reassembler.receive(*header(A, (P, 2)), now=5.0)
    (event,) = reassembler.receive(P + b"2", b"x", "z", 77, now=6.0)
    assert isinstance(event, PayloadComplete)
    assert (event.since, event.source, event.position) == (3.0, "z", 77)


# Positions.


def test_positions_are_held_by_what_is_in_flight() -> None:
    reassembler = Reassembler()
    assert reassembler.positions().get("a") is None
    reassembler.receive(P, b"x", "a", 10)
    reassembler.receive(Q, b"x", "a", 11)
    reassembler.receive(Q, b"x", "b", 500)  # a duplicate: b alone could be left
    assert reassembler.positions() == {"a": 10, "b": 500}
    reassembler.receive(*header(A, (P, 1)), "b", 501)
    assert reassembler.positions() == {"a": 11, "b": 500}
    reassembler.receive(*header(B, (Q, 1)), "a", 12)
    assert reassembler.positions() == {"a": 13, "b": 502}
    reassembler.receive(b"short", b"", "c", 1)
    assert reassembler.positions() == {"a": 13, "b": 502, "c": 2}


@pytest.mark.parametrize(
    "places, order",
    [
        # Where the lowest of the rest ends up below a higher one, unless it rises.
        ([3, 5, 4, 2, 6, 1, 0], [5, 0, 1, 2, 3, 4, 6]),
        *((random.Random(seed).sample(range(1000), 300), None) for seed in range(3)),
    ],
)
def test_the_position_is_the_lowest_held_whatever_ends_first(
    places: list[int], order: list[int] | None
) -> None:
    chance = random.Random(1)
    reassembler = Reassembler()
    for position in places:
        own = b"%32d" % position
        reassembler.receive(*header(own, (b"\1" + own, 1)), "a", position)
    held = set(places)
    for position in order or chance.sample(places, len(places)):
        assert reassembler.positions().get("a") == min(held)
        assert len(reassembler.receive(b"\1%32d" % position, b"")) == 1
        held.remove(position)
    assert reassembler.positions().get("a") == max(places) + 1


# Batches of entries.


def batch_of(messages: list[tuple[int, bytes]], first: int = 0) -> Any:
    return scan(b"".join(pack(first + i, *entry) for i, entry in enumerate(messages)))


def test_a_batch() -> None:
    reassembler = Reassembler()
    messages = [header(A, (P, 1)), (P, b"x"), header(B, (Q, 1)), (Q, b"y")]
    entries = [(0x10, pack_message(*message)) for message in messages]
    entries[1:1] = [
        (0xB0, b"bookmark"),
        (7, b"of another type"),
        (0x10, b"\xff\xffcut"),
        (0x10, b""),
    ]
    events = reassembler.receive_batch(batch_of(entries, 100), "a")
    first = next(events)
    assert first == Malformed(b"cut", "an entry of 5 bytes does not hold its key", "a", 103)
    second = next(events)
    assert second == Malformed(b"", "an entry of 0 bytes does not hold its key", "a", 104)
    # What has been reported is all that has been received.
    assert reassembler.positions().get("a") == 100
    assert next(events) == PayloadComplete(A, [(P, b"x")], (P,), 0.0, "a", 105)
    assert reassembler.positions().get("a") == 106
    assert next(events) == PayloadComplete(B, [(Q, b"y")], (Q,), 0.0, "a", 107)
    assert list(events) == []
    assert reassembler.positions().get("a") == 108
    assert reassembler.stats().sources["a"].received == 6


def test_a_batch_of_another_type_and_a_selection() -> None:
    entries = [(5, pack_message(*header(A))), (0x10, pack_message(*header(B)))]
    batch = batch_of(entries, 3)
    assert whole(list(Reassembler().receive_batch(batch, type=5))) == [(A, [])]
    (event,) = Reassembler().receive_batch(batch.select([0x10]), "s", now=4.0)
    assert isinstance(event, PayloadComplete)
    assert (event.id, event.position, event.since) == (B, 4, 4.0)


@given(worlds(), st.randoms(use_true_random=False), st.integers(1, 9))
@settings(max_examples=100, deadline=None)
def test_batches_and_single_messages_are_the_same(
    made: list[Made], chance: random.Random, size: int
) -> None:
    messages = [message for payload in made for message in payload.messages]
    chance.shuffle(messages)
    singly, batched = Reassembler(), Reassembler()
    expected = [
        event
        for position, message in enumerate(messages)
        for event in singly.receive(*message, "a", position)
    ]
    found: list[Any] = []
    for at in range(0, len(messages), size):
        entries = [(0x10, pack_message(*message)) for message in messages[at : at + size]]
        found += batched.receive_batch(batch_of(entries, at), "a")
    assert found == expected
    assert batched.stats() == singly.stats()
    assert batched.checkpoint() == singly.checkpoint()


# Arguments.


def test_any_buffer_will_do_and_is_copied() -> None:
    reassembler = Reassembler()
    value = bytearray(b"first")
    feed(reassembler, header(A, (P, 2)))
    reassembler.receive(memoryview(P), value)
    value[:] = b"other"
    assert whole(feed(reassembler, (P + b"2", b""))) == [(A, [(P, b"first"), (P + b"2", b"")])]


@pytest.mark.parametrize(
    "wrong",
    [{"reorg_threshold": -1}, {"budget": 0}, {"max_age": 0.0}, {"max_age": float("nan")}],
)
def test_wrong_options(wrong: dict[str, Any]) -> None:
    with pytest.raises(BadArgument, match=next(iter(wrong)).replace("_", ".")):
        Reassembler(**wrong)


def test_wrong_arguments() -> None:
    reassembler = Reassembler()
    with pytest.raises(TypeError, match="the name of a source must be a str, not int"):
        reassembler.receive(P, b"", 7)  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        reassembler.receive("text", b"")  # type: ignore[arg-type]
    with pytest.raises(BadArgument, match="a position must be at most"):
        reassembler.receive(P, b"", "a", 2**64 - 1)
    with pytest.raises(TypeError, match="a subscription must be bytes"):
        Reassembler(["0x01"])  # type: ignore[list-item]
    with pytest.raises(BadArgument, match="id must have 32 bytes"):
        Reassembler(resume=Checkpoint({}, {}, [(b"x", [])]))
    with pytest.raises(BadArgument, match="prefix must have 33 bytes"):
        Reassembler(resume=Checkpoint({}, {}, [(A, [b"x"])]))
    # All of them left it as it was.
    assert whole(feed(reassembler, header(A))) == [(A, [])]


def test_a_source_may_be_any_str() -> None:
    class Name(str):
        __slots__ = ()

    reassembler = Reassembler()
    reassembler.receive(P, b"", Name("a"), 1)
    reassembler.receive(P, b"", "a", 2)
    assert reassembler.positions() == {"a": 1}
    assert reassembler.stats().sources["a"].duplicates == 1


def test_one_caller_at_a_time() -> None:
    reassembler = Reassembler()

    class Clock:
        def __float__(self) -> float:
            with pytest.raises(UsageError, match="in use by another caller"):
                reassembler.receive(P, b"")
            return 1.0

    reassembler.receive(P, b"", now=Clock())  # type: ignore[arg-type]
    assert reassembler.stats().messages == 1


def test_threads_that_take_turns() -> None:
    reassembler = Reassembler()
    lock = threading.Lock()
    messages = Splitter(300).split(A, {P: bytes(50_000)})
    events: list[Any] = []

    def work(source: str) -> None:
        for message in random.Random(source).sample(messages, len(messages)):
            with lock:
                events.extend(reassembler.receive(*message, source))

    threads = [threading.Thread(target=work, args=(name,)) for name in "abc"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(events) == 1
    assert b"".join(value for _, value in events[0].parts) == bytes(50_000)
