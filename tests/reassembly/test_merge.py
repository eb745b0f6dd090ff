"""What is to be kept at each moment, between bytes: places, and what was given out."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from datastreamer._codec import EntryBatch, scan
from datastreamer.errors import UsageError
from datastreamer.position import Position
from datastreamer.reassembly import (
    Applied,
    Block,
    Gap,
    PayloadComplete,
    Rejected,
    Reorg,
    Splitter,
    pack_message,
)
from datastreamer.reassembly.merge import Merge, Payload
from datastreamer.reassembly.progress import ReassemblyProgress, SourceProgress
from tests.oracle import pack
from tests.reassembly.generated import name

Message = tuple[bytes, bytes]


def messages_of(number: int) -> list[Message]:
    own = b"%032d" % number
    return Splitter().split(own, {name(1, own[8:]): [(b"0", b"a"), (b"1", b"b")]})


def batch_of(*messages: Message, first: int = 0) -> EntryBatch:
    packed = [pack(first + at, 0x10, pack_message(*each)) for at, each in enumerate(messages)]
    return scan(b"".join(packed))


def taken(merge: Merge, source: str, batch: EntryBatch) -> list[int]:
    events = merge.receive(source, batch, Position(batch.next_number))
    return [int(event.id) for event in events if isinstance(event, PayloadComplete)]


def test_a_place_is_true_to_the_event_that_was_given_last() -> None:
    merge = Merge(["a"])
    merge.begin("a", Position(0))
    events = merge.receive("a", batch_of(*messages_of(1), *messages_of(2)), Position(6))
    for number in (1, 2):
        event = next(events)
        assert isinstance(event, PayloadComplete)
        assert int(event.id) == number
        assert merge.progress().places["a"] == SourceProgress(3 * number, 3 * number, Position(0))
        assert [int(own) for own, _ in merge.progress().known] == [number]
        merge.saved()
    assert list(events) == []
    assert merge.progress() == ReassemblyProgress(
        {"a": SourceProgress(6, 6, Position(6))}, [], 2, subscribed=(b"",)
    )


def test_what_is_not_whole_is_read_again_from_all() -> None:
    merge = Merge(["a", "b"])
    assert taken(merge, "a", batch_of(*messages_of(1), *messages_of(2)[:2])) == [1]
    assert taken(merge, "b", batch_of(*messages_of(3), *messages_of(2)[:1])) == [3]
    progress = merge.progress()
    assert {source: place.position for source, place in progress.places.items()} == {"a": 3, "b": 3}
    again = Merge(["a", "b"], resume=progress)
    assert taken(again, "b", batch_of(*messages_of(2)[:1], first=3)) == []
    assert taken(again, "a", batch_of(*messages_of(2)[:2], *messages_of(2)[2:], first=3)) == [2]


def test_a_source_that_took_entries_back_is_where_it_is_now() -> None:
    merge = Merge(["a"])
    assert taken(merge, "a", batch_of(*messages_of(1), *messages_of(2), *messages_of(3))) == [
        1,
        2,
        3,
    ]
    merge.rewind("a", Position(4))
    assert merge.progress().places == {"a": SourceProgress(4, 4, Position(4))}
    assert taken(merge, "a", batch_of(*messages_of(4), first=4)) == [4]
    assert merge.progress().places == {"a": SourceProgress(7, 7, Position(7))}
    assert taken(merge, "a", batch_of(*messages_of(5), *messages_of(6), first=7)) == [5, 6]
    assert merge.progress().places == {"a": SourceProgress(13, 13, Position(13))}


def test_a_source_that_is_again_where_it_was_has_places_as_any_other() -> None:
    merge = Merge(["a"])
    assert taken(merge, "a", batch_of(*messages_of(1), *messages_of(2))) == [1, 2]
    merge.rewind("a", Position(3))
    assert taken(merge, "a", batch_of(*messages_of(3), first=3)) == [3]
    events = merge.receive("a", batch_of(*messages_of(4), *messages_of(5), first=6), Position(12))
    assert isinstance(next(events), PayloadComplete)
    # To the message, not to the batch.
    assert merge.progress().places["a"] == SourceProgress(9, 9, Position(6))


def test_a_source_may_roll_back_what_an_earlier_run_had_finished() -> None:
    first = Merge(["a"])
    assert taken(first, "a", batch_of(*messages_of(1), *messages_of(2))) == [1, 2]
    again = Merge(["a"], resume=first.progress())
    again.rewind("a", Position(3))
    assert again.progress().places == {"a": SourceProgress(3, 3, Position(3))}
    assert taken(again, "a", batch_of(*messages_of(3), *messages_of(4), first=3)) == [3, 4]


@pytest.mark.parametrize("threshold", [0, 1000])
def test_of_several_sources_a_batch_is_far_behind_another(threshold: int) -> None:
    """Each is read a batch at a time, and the next one brings the same payloads."""
    batch = batch_of(*(each for number in range(6000) for each in messages_of(number)))
    merge = Merge(["a", "b", "c"], reorg_threshold=threshold)
    assert taken(merge, "a", batch) == list(range(6000))
    again = Merge(["a", "b", "c"], reorg_threshold=threshold, resume=merge.progress())
    for source in ("b", "c"):
        assert taken(merge, source, batch) == []
        assert taken(again, source, batch) == []


@pytest.mark.parametrize("type", [-1, 0xB0, 1 << 32])
def test_types_that_no_message_has(type: int) -> None:
    with pytest.raises(UsageError, match=f"a u32 entry type that is not 0xb0, not {type}$"):
        Merge(["a"], type=type)


def test_entries_before_the_place_are_done_with() -> None:
    """They come where a source is joined earlier, to see whether it reports the same."""
    first = Merge(["a"], reorg_threshold=0)
    messages = [message for number in range(9) for message in messages_of(number)]
    assert taken(first, "a", batch_of(*messages)) == list(range(9))
    progress = first.progress()
    # As a store keeps it.
    progress = replace(progress, known=progress.known[-progress.known_count :])
    again = Merge(["a"], reorg_threshold=0, resume=progress)
    assert taken(again, "a", batch_of(*messages, *messages_of(9))) == [9]


def test_sources_that_are_not_read_now_keep_nothing_waiting() -> None:
    first = Merge(["a", "b"])
    taken(first, "a", batch_of(*messages_of(1)))
    taken(first, "b", batch_of(*messages_of(2)[:1]))
    again = Merge(["a"], resume=first.progress())
    assert again.source_progress("b") is None
    assert set(again.progress().places) == {"a"}


def block_of(payload: PayloadComplete) -> Block:
    number = int(payload.id)
    return Block(number, b"%d" % number, b"%d" % (number - 1))


def test_a_chain_continues_while_what_it_had_is_read_again() -> None:
    def ordered(resume: ReassemblyProgress | None) -> Merge:
        return Merge(["a", "b"], order=block_of, after=b"0", reorg_threshold=2, resume=resume)

    def applied(merge: Merge, source: str, first: int, *numbers: int) -> list[int]:
        messages = [message for number in numbers for message in messages_of(number)]
        batch = batch_of(*messages, first=first)
        found = []
        for event in merge.receive(source, batch, Position(batch.next_number)):
            assert isinstance(event, Applied)
            found.append(event.block.number)
        return found

    first = ordered(None)
    first.begin("a", Position(0))
    first.begin("b", Position(0))
    assert applied(first, "a", 0, 1, 2, 3, 4) == [1, 2, 3, 4]
    progress = first.progress()
    # What can still be rolled back is kept as a chain, and its payloads are read again.
    assert [block.number for block, _ in progress.chain] == [2, 3, 4]
    assert [int(own) for own, _ in progress.known] == [1]
    assert progress.places["a"].position <= 3
    again = ordered(progress)
    assert applied(again, "b", 0, 5, 6, 7, 8) == [5, 6, 7, 8]
    assert applied(again, "a", 3, 2, 3, 4, 5) == []
    assert applied(again, "a", 15, 9) == [9]
    assert [block.number for block, _ in again.progress().chain] == [7, 8, 9]


def test_a_reorg_comes_back_to_blocks_that_are_not_read_again_yet() -> None:
    tree = {
        number: Block(height, b"%d" % number, b"%d" % parent)
        for number, height, parent in [
            *((1, 1, 0), (2, 2, 1), (3, 3, 2)),  # the chain of the run before
            *((12, 2, 1), (13, 3, 12), (14, 4, 13)),  # heavier for a while
            *((4, 4, 3), (5, 5, 4)),  # and back
        ]
    }

    def ordered(resume: ReassemblyProgress | None) -> Merge:
        return Merge(
            ["a", "b"], order=lambda payload: tree[int(payload.id)], after=b"0", resume=resume
        )

    def reported(merge: Merge, source: str, *numbers: int, first: int = 0) -> list[object]:
        batch = batch_of(
            *(message for each in numbers for message in messages_of(each)), first=first
        )
        return list(merge.receive(source, batch, Position(batch.next_number)))

    def numbers_of(blocks: Sequence[tuple[Block, Payload]]) -> list[int]:
        return [int(block.hash) for block, _ in blocks]

    first = ordered(None)
    assert len(reported(first, "a", 1, 2, 3)) == 3
    again = ordered(first.progress())
    (away,) = reported(again, "b", 12, 13, 14)
    assert isinstance(away, Reorg)
    assert numbers_of(away.rolled_back) == [3, 2]
    (back,) = reported(again, "b", 4, 5, first=9)
    assert isinstance(back, Reorg)
    assert numbers_of(back.rolled_back) == [14, 13, 12]
    assert numbers_of(back.applied) == [2, 3, 4, 5]
    assert [payload.complete is None for _, payload in back.applied] == [True, True, False, False]
    chain = again.progress().chain
    assert [int(block.hash) for block, _ in chain] == [2, 3, 4, 5]
    assert [int(own) for _, (own, _) in chain] == [2, 3, 4, 5]
    # Read again at last, they are nothing new.
    assert reported(again, "a", 1, 2, 3) == []


def test_what_a_source_brought_that_began_later_is_read_again_too() -> None:
    """The oldest block that is held came before the source: the later ones came from it."""
    for late in (False, True):
        first = Merge(["a", "b"], order=block_of, after=b"0")
        first.begin("a", Position(0))
        if not late:
            first.begin("b", Position(5))
        batch = batch_of(*messages_of(1))
        assert len(list(first.receive("a", batch, Position(3)))) == 1
        first.begin("b", Position(5))
        batch = batch_of(*messages_of(3), first=5)
        (gap,) = first.receive("b", batch, Position(8))
        assert isinstance(gap, Gap)
        progress = first.progress()
        assert {name: place.position for name, place in progress.places.items()} == {"a": 0, "b": 5}
        again = Merge(["a", "b"], order=block_of, resume=progress)
        assert len(list(again.receive("b", batch, Position(8)))) == 1
        events = list(again.receive("a", batch_of(*messages_of(2), first=3), Position(6)))
        assert [event.block.number for event in events if isinstance(event, Applied)] == [2, 3]


def test_what_had_no_room_to_wait_is_read_again_by_a_later_run() -> None:
    def bare(number: int) -> Message:
        (header,) = Splitter().split(b"%032d" % number, {})
        return header

    def numbers_of(events: Iterable[object]) -> list[int]:
        return [event.block.number for event in events if isinstance(event, Applied)]

    first = Merge(["a", "b"], order=block_of, after=b"0")
    for source in "ab":
        first.begin(source, Position(0))
    ahead = batch_of(*(bare(number) for number in range(2, 10_003)))
    *_, refused = first.receive("a", ahead, Position(ahead.next_number))
    assert isinstance(refused, Rejected)
    assert (refused.why, refused.block.number) == ("room", 10_002)
    parent = batch_of(bare(1))
    assert numbers_of(first.receive("b", parent, Position(1))) == list(range(1, 10_002))
    progress = first.progress()
    again = Merge(["a", "b"], order=block_of, resume=progress)
    at = progress.places["a"].position
    rest = again.receive("a", ahead[at:], Position(ahead.next_number))
    assert numbers_of(rest) == [10_002]


def test_two_payloads_of_one_block_are_reported_once() -> None:
    """What came second is known, too, when the block is too old to be looked for."""

    def ordered(resume: ReassemblyProgress | None) -> Merge:
        return Merge(
            ["a", "b"],
            order=lambda payload: block_of_(int(payload.id) % 100),
            after=b"0",
            reorg_threshold=2,
            resume=resume,
        )

    def block_of_(number: int) -> Block:
        return Block(number, b"%d" % number, b"%d" % (number - 1))

    def reported(merge: Merge, source: str, *numbers: int, first: int) -> list[object]:
        batch = batch_of(
            *(message for number in numbers for message in messages_of(number)), first=first
        )
        return list(merge.receive(source, batch, Position(batch.next_number)))

    first = ordered(None)
    for source in "ab":
        first.begin(source, Position(0))
    # 101 is block 1 again.
    events = reported(first, "a", 1, 101, 2, 3, 4, first=0)
    assert [type(event) for event in events] == [Applied] * 4
    progress = first.progress()
    assert [int(own) for own, _ in progress.known] == [101, 1]
    again = ordered(progress)
    assert reported(again, "b", 1, 101, 2, 3, 4, first=0) == []


class Kept:
    """What a store keeps of its input."""

    def __init__(self) -> None:
        self.progress = ReassemblyProgress()

    def save(self, merge: Merge) -> None:
        reported, before = merge.progress(), self.progress
        known = [*before.known, *reported.known]
        chain = list(before.chain)
        if reported.chain:
            begin = reported.chain[0][0].number
            chain = [each for each in chain if reported.chain_floor <= each[0].number < begin]
            chain += reported.chain
        known = known[max(0, len(known) - reported.known_count) :]
        self.progress = ReassemblyProgress(
            {**before.places, **reported.places}, known, len(known), chain
        )
        merge.saved()


@given(st.integers(0, 2**32).map(random.Random), st.sampled_from([1, 2, 3]))
@settings(max_examples=150, deadline=None)
def test_what_a_slow_source_brings_is_known_however_blocks_are_settled(
    chance: random.Random, threshold: int
) -> None:
    """A chain with many branches, and payloads without a block between: a store that keeps as many
    names as it is configured to has those of the last ones at every moment."""
    tree = {0: Block(0, b"0", b"")}
    tip = tree[0]
    numbers = list(range(1, chance.randrange(2, 30)))
    for number in numbers:
        kind = chance.random()
        if kind < 0.2:
            continue
        parent = tip.hash if kind < 0.6 or not tip.number else tip.parent
        made = Block(tree[int(parent)].number + 1, b"%d" % number, parent)
        tree[number] = made
        tip = max(tip, made, key=lambda block: block.number)

    def ordered(resume: ReassemblyProgress | None) -> Merge:
        return Merge(
            ["a", "b"],
            order=lambda payload: tree.get(int(payload.id)),
            after=b"0",
            reorg_threshold=threshold,
            resume=resume,
        )

    def bare(number: int, first: int) -> EntryBatch:
        return batch_of(*Splitter().split(b"%032d" % number, {}), first=first)

    store, merge, begun = Kept(), ordered(None), 0
    for source in "ab":
        merge.begin(source, Position(0))
    for at, number in enumerate(numbers):
        list(merge.receive("a", bare(number, at), Position(at + 1)))
        store.save(merge)
        if chance.random() < 0.1:
            merge, begun = ordered(store.progress), at + 1
            begin = store.progress.places["a"].position
            for again in range(begin, at + 1):
                events = list(merge.receive("a", bare(numbers[again], again), Position(again + 1)))
                assert not any(isinstance(event, PayloadComplete) for event in events)
            store.save(merge)
    merge = ordered(store.progress)
    # Of blocks and others twice the threshold is known, of those of the last run.
    for at, number in enumerate(numbers[begun:][-2 * threshold - 1 :]):
        events = list(merge.receive("b", bare(number, at), Position(at + 1)))
        assert not any(isinstance(event, PayloadComplete) for event in events)


def test_blocks_that_wait_take_no_more_than_the_budget() -> None:
    """What is given up is reported, and read again by a later run."""

    def large(number: int) -> list[Message]:
        own = b"%032d" % number
        return Splitter().split(own, {b"\1" + own: [(b"", bytes(1000))]})

    def applied(events: Iterable[object]) -> list[int]:
        return [event.block.number for event in events if isinstance(event, Applied)]

    first = Merge(["a", "b"], order=block_of, after=b"0", budget=10_000)
    for source in "ab":
        first.begin(source, Position(0))
    refused = []
    for number in range(2, 22):
        at = 2 * (number - 2)
        events = first.receive("a", batch_of(*large(number), first=at), Position(at + 2))
        refused += [event.block.number for event in events if isinstance(event, Rejected)]
    # Of 1,161 bytes each eight are below it.
    assert refused == list(range(10, 22))
    assert applied(first.receive("b", batch_of(*large(1)), Position(2))) == list(range(1, 10))
    progress = first.progress()
    assert progress.places["a"].position == 0
    again = Merge(["a", "b"], order=block_of, budget=10_000, resume=progress)
    whole = batch_of(*(message for number in range(2, 22) for message in large(number)))
    assert applied(again.receive("a", whole, Position(40))) == list(range(10, 22))


def test_the_names_that_are_kept_do_not_grow_with_the_stream(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Blocks, with payloads that have none between them; and one that waits for ever."""
    monkeypatch.setattr("datastreamer.reassembly.merge._MOST_READ_AGAIN", 30)

    def order(payload: PayloadComplete) -> Block | None:
        number = int(payload.id)
        return None if number % 2 else Block(number // 2, b"%d" % number, b"%d" % (number - 2))

    for how, most, begin in ((order, 17, 1), (order, 31, 0), (None, 9, 1)):
        store, merge = Kept(), Merge(["a"], order=how, after=how and b"0", reorg_threshold=3)
        merge.begin("a", Position(0))
        for at in range(begin, 300):
            # Block 500 comes first, or not at all.
            batch = batch_of(*Splitter().split(b"%032d" % (at or 1000), {}), first=at)
            list(merge.receive("a", batch, Position(at + 1)))
            store.save(merge)
            assert len(store.progress.known) <= most


def headers_of(first: int, count: int, limit: int = 1_000_000) -> list[Message]:
    """The headers, also nested ones, of payloads with parts 0x01 and 0x02."""
    found = []
    for number in range(first, first + count):
        own = b"%032d" % number
        parts = {name(kind, own[8:] + bytes([at])): b"" for kind in (1, 2) for at in range(2)}
        found += [each for each in Splitter(limit).split(own, parts) if each[0][0] in (0, 0xFF)]
    return found


@pytest.mark.parametrize("limit", [1_000_000, 111])
def test_a_subscription_that_nothing_matches(limit: int) -> None:
    merge = Merge(["a", "b"], [b"\x03", b"\xff"])
    for source in ("a", "b"):
        merge.begin(source, Position(0))
    taken(merge, "a", batch_of(*headers_of(0, 99, limit)))
    taken(merge, "b", batch_of(*headers_of(200, 99, limit)))
    assert merge.warnings() == []
    taken(merge, "b", batch_of(*headers_of(300, 2, limit), first=10_000))
    [message] = merge.warnings()
    assert message.startswith(
        "b has sent 100 payloads without a part of the subscription to 0x03; the last one has the "
        f"prefixes 0x{2 if limit == 111 else 1:02}3030"
    )
    taken(merge, "b", batch_of(*headers_of(400, 200, limit), first=20_000))
    assert merge.warnings() == []


def test_nested_headers_that_come_first() -> None:
    """The root header completes the payload, and names nested headers alone."""
    merge = Merge(["a"], [b"\x03", b"\xff"])
    merge.begin("a", Position(0))
    taken(merge, "a", batch_of(*reversed(headers_of(0, 100, 111))))
    [message] = merge.warnings()
    assert "the prefixes 0xff3030" in message


def test_a_subscription_that_something_matches() -> None:
    merge = Merge(["a"], [b"\x01", b"\xff"])
    merge.begin("a", Position(0))
    messages = messages_of(500)
    taken(merge, "a", batch_of(*messages, *headers_of(0, 0)))
    empty = [each for number in range(200) for each in Splitter().split(b"%032d" % number, {})]
    taken(merge, "a", batch_of(*empty, first=10))
    headers = Merge(["a"], [b"\xff"])
    headers.begin("a", Position(0))
    assert len(taken(headers, "a", batch_of(*headers_of(0, 200)))) == 200
    assert merge.warnings() == headers.warnings() == []
