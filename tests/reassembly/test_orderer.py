"""Parents before children, reorgs as they are due, gaps reported; against a plain chain."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from datastreamer.errors import BadArgument, UsageError
from datastreamer.reassembly import Applied, Block, Gap, Orderer, Rejected, Reorg

START = b"start"


class Follower:
    """Does what it is asked to, and checks."""

    def __init__(self, tip: bytes = START) -> None:
        self.start = tip
        self.chain: list[Block] = []
        self.reorgs = 0

    def tip(self) -> bytes:
        return self.chain[-1].hash if self.chain else self.start

    def follow(self, events: Any) -> None:
        for event in events:
            match event:
                case Applied(block, payload):
                    self.apply(block, payload)
                case Reorg(rolled_back, applied):
                    assert rolled_back
                    assert applied
                    self.reorgs += 1
                    before = self.chain[-1]
                    for block, payload in rolled_back:
                        assert payload == block.number
                        assert self.chain.pop() == block
                    for block, payload in applied:
                        self.apply(block, payload)
                    assert self.chain[-1].heavy > before.heavy

    def apply(self, block: Block, payload: Any) -> None:
        assert payload == block.number
        assert block.parent == self.tip()
        self.chain.append(block)


@st.composite
def trees(draw: st.DrawFn, most: int = 25, least: int = 1) -> list[Block]:
    """Blocks above START, parents first, with or without weights of their own."""
    weighted = draw(st.booleans())
    blocks: list[Block] = []
    for i in range(draw(st.integers(least, most))):
        parent = draw(st.integers(max(-1, i - 4), i - 1))
        below = blocks[parent] if parent >= 0 else Block(9, START, b"", 0 if weighted else None)
        weight = below.heavy + draw(st.integers(1, 5)) if weighted else None
        blocks.append(Block(below.number + 1, b"%d" % i, below.hash, weight))
    return blocks


@given(trees(), st.data())
@settings(max_examples=300, deadline=None)
def test_any_order_ends_on_the_heaviest_branch(blocks: list[Block], data: Any) -> None:
    lost = data.draw(st.sets(st.sampled_from(blocks), max_size=3)) if blocks else set()
    sent = [block for block in blocks if block not in lost]
    sent += data.draw(st.lists(st.sampled_from(blocks), max_size=5)) if not lost else []
    orderer: Orderer[int] = Orderer(START)
    follower = Follower()
    gaps = []
    for block in data.draw(st.permutations(sent)):
        events = orderer.receive(block, block.number, "a")
        follower.follow(events)
        gaps += [event for event in events if isinstance(event, Gap)]
    reached: dict[bytes, Block] = {}
    for block in blocks:
        if block not in lost and (block.parent == START or block.parent in reached):
            reached[block.hash] = block
    heaviest = max((block.heavy for block in reached.values()), default=None)
    assert (follower.chain[-1].heavy if follower.chain else None) == heaviest
    assert orderer.head == (follower.chain[-1] if follower.chain else None)
    assert [block for block, _ in orderer.chain] == follower.chain
    assert orderer.waiting == len(set(sent)) - len(reached)
    unknown = {block.parent for block in set(sent)} - {block.hash for block in sent} - {START}
    assert set(orderer.missing) == unknown
    assert {gap.missing for gap in gaps} >= unknown
    # What was missing comes at last.
    for block in blocks:
        follower.follow(orderer.receive(block, block.number))
    assert orderer.waiting == 0
    assert follower.chain[-1].heavy == max(block.heavy for block in blocks)


@given(trees(60), st.data(), st.integers(0, 5), st.integers(1, 6))
@settings(max_examples=300, deadline=None)
def test_a_small_window_never_breaks_the_chain(
    blocks: list[Block], data: Any, threshold: int, most_waiting: int
) -> None:
    orderer: Orderer[int] = Orderer(START, reorg_threshold=threshold, most_waiting=most_waiting)
    follower = Follower()
    for at in range(0, len(blocks), 10):
        for block in data.draw(st.permutations(blocks[at : at + 10])):
            follower.follow(orderer.receive(block, block.number))
            assert orderer.waiting <= most_waiting
            if orderer.head is not None:
                kept = [block for block, _ in orderer.chain]
                assert kept == follower.chain[len(follower.chain) - len(kept) :]
                assert len(kept) <= threshold + 1
                known = orderer._known.values()
                lowest = min(known.block.number for known in known)
                assert orderer.head.number - lowest <= threshold or orderer.head.weight


@given(trees(least=2), st.data())
@settings(max_examples=200, deadline=None)
def test_continues_after_a_restart(blocks: list[Block], data: Any) -> None:
    cut = data.draw(st.integers(1, len(blocks) - 1))
    orderer: Orderer[int] = Orderer(START)
    follower = Follower()
    for block in blocks[:cut]:
        follower.follow(orderer.receive(block, block.number))
    again: Orderer[int] = Orderer(applied=orderer.chain)
    assert again.chain == orderer.chain
    for block in blocks:
        if block.parent != START:
            follower.follow(again.receive(block, block.number))
    reached = {blocks[i].hash for i in range(cut)} & {block.hash for block in follower.chain}
    above = {block.hash for block, _ in orderer.chain}
    heaviest = 0
    for block in blocks:
        if block.hash in reached or block.parent in above:
            above.add(block.hash)
            heaviest = max(heaviest, block.heavy)
    assert follower.chain[-1].heavy == heaviest


def chain(start: int, stop: int, name: str = "a", parent: bytes = START) -> list[Block]:
    found = []
    for number in range(start, stop):
        own = f"{name}{number}".encode()
        found.append(Block(number, own, parent))
        parent = own
    return found


def test_a_heavier_branch() -> None:
    orderer: Orderer[str] = Orderer()
    main = chain(1, 4)
    side = chain(2, 5, "b", main[0].hash)
    for block in main:
        assert orderer.receive(block, "m") == [Applied(block, "m")]
    assert orderer.receive(side[0], "s") == []
    assert orderer.receive(side[1], "s") == []  # as heavy: what is applied stays
    assert orderer.receive(side[2], "s") == [
        Reorg([(main[2], "m"), (main[1], "m")], [(block, "s") for block in side])
    ]
    assert orderer.head == side[2]
    # And back again.
    more = chain(4, 6, "a", main[2].hash)
    assert orderer.receive(more[0], "m") == []
    assert orderer.receive(more[1], "m") == [
        Reorg(
            [(block, "s") for block in reversed(side)],
            [(block, "m") for block in [*main[1:], *more]],
        )
    ]


def test_a_gap_is_reported_once_and_closes() -> None:
    orderer: Orderer[int] = Orderer(START)
    blocks = chain(1, 6)
    assert orderer.receive(blocks[3], 4, "b") == [Gap(b"a3", 3, blocks[3], "b")]
    assert orderer.receive(blocks[3], 4, "c") == []
    assert orderer.receive(blocks[4], 5, "c") == []  # its parent waits itself
    assert orderer.receive(blocks[0], 1) == [Applied(blocks[0], 1)]
    assert orderer.missing == [b"a3"]
    assert orderer.receive(blocks[1], 2) == [Applied(blocks[1], 2)]
    assert orderer.receive(blocks[2], 3) == [Applied(block, block.number) for block in blocks[2:]]
    assert orderer.missing == []


def test_siblings_that_wait_come_in_the_order_in_which_they_came() -> None:
    orderer: Orderer[int] = Orderer(START)
    (parent,) = chain(1, 2)
    children = [chain(2, 3, each, parent.hash)[0] for each in "cab"]
    assert orderer.receive(children[0], 2) == [Gap(parent.hash, 1, children[0], None)]
    # One parent is missing, however many wait for it.
    assert orderer.receive(children[1], 2) == []
    assert orderer.receive(children[2], 2) == []
    assert orderer.missing == [parent.hash]
    assert orderer.receive(parent, 1) == [Applied(parent, 1), Applied(children[0], 2)]


def test_two_first_blocks() -> None:
    orderer: Orderer[int] = Orderer(START)
    main, side = chain(1, 2), chain(1, 3, "b")
    assert orderer.receive(main[0], 1) == [Applied(main[0], 1)]
    assert orderer.receive(side[0], 1) == []
    assert orderer.receive(side[1], 2) == [Reorg([(main[0], 1)], [(side[0], 1), (side[1], 2)])]


def test_two_first_blocks_with_a_restart_between() -> None:
    first: Orderer[int] = Orderer(START)
    main, side = chain(1, 2), chain(1, 3, "b")
    first.receive(main[0], 1)
    again: Orderer[int] = Orderer(applied=first.chain)
    assert again.chain == [(main[0], 1)]
    assert again.receive(side[0], 1) == []
    assert again.receive(side[1], 2) == [Reorg([(main[0], 1)], [(side[0], 1), (side[1], 2)])]
    assert again.chain == [(side[0], 1), (side[1], 2)]
    # Not where the first block is the last that can be rolled back to.
    last: Orderer[int] = Orderer(applied=[(main[0], 1)], reorg_threshold=0)
    assert last.receive(side[0], 1) == [Rejected("old", side[0], 1)]


def test_a_branch_from_too_far_down_is_refused() -> None:
    orderer: Orderer[int] = Orderer(START, reorg_threshold=3)
    main = chain(1, 11)
    side = chain(6, 14, "b", main[4].hash)
    for block in main[:8]:
        orderer.receive(block, block.number)
    assert orderer.receive(side[0], 6) == []
    assert orderer.receive(side[1], 7) == []
    for block in main[8:]:
        orderer.receive(block, block.number)
    # The fork, at 5, is forgotten by now.
    assert orderer.receive(side[2], 8) == []
    assert orderer.receive(side[3], 9) == []
    assert orderer.receive(side[4], 10) == []
    assert orderer.receive(side[5], 11) == [Rejected("old", side[5], 11)]
    assert orderer.receive(chain(3, 4, "c", b"?")[0], 3) == [
        Rejected("old", Block(3, b"c3", b"?"), 3)
    ]
    assert orderer.head == main[-1]


def test_what_waits_too_long_is_given_up() -> None:
    orderer: Orderer[int] = Orderer(START, reorg_threshold=2)
    orphan = Block(3, b"o", b"?")
    orderer.receive(chain(1, 2)[0], 1)
    assert isinstance(orderer.receive(orphan, 3)[0], Gap)
    events: list[Any] = []
    for block in chain(2, 6, parent=b"a1"):
        events += orderer.receive(block, block.number)
    assert [event for event in events if isinstance(event, Rejected)] == [
        Rejected("old", orphan, 3)
    ]
    assert orderer.waiting == 0


def test_each_that_waits_is_given_up_when_its_own_time_has_come() -> None:
    orderer: Orderer[int] = Orderer(START, reorg_threshold=2)
    orphans = {number: Block(number, b"o%d" % number, b"?%d" % number) for number in (5, 3, 7, 4)}
    main = chain(1, 12)
    orderer.receive(main[0], 1)
    for number, orphan in orphans.items():
        orderer.receive(orphan, number)
    for block in main[1:]:
        given_up = [Rejected("old", orphans[n], n) for n in (block.number - 2,) if n in orphans]
        assert orderer.receive(block, block.number) == [Applied(block, block.number), *given_up]


def test_the_furthest_ahead_goes_first_where_too_many_wait() -> None:
    orderer: Orderer[int] = Orderer(START, most_waiting=2)
    blocks = chain(1, 6)
    orderer.receive(blocks[4], 5)
    orderer.receive(blocks[1], 2)
    assert orderer.receive(blocks[2], 3) == [Rejected("room", blocks[4], 5)]


@pytest.mark.parametrize(
    "wrong", [Block(2, b"x", b"a1", 0), Block(2, b"x", b"a1", 5), Block(7, b"x", b"a1", 9)]
)
def test_a_block_that_does_not_follow_its_parent(wrong: Block) -> None:
    orderer: Orderer[int] = Orderer()
    orderer.receive(Block(1, b"a1", START, 5), 1)
    assert orderer.receive(wrong, 0) == [Rejected("weight", wrong, 0)]


def test_wrong_use() -> None:
    with pytest.raises(UsageError, match="its own parent"):
        Orderer().receive(Block(1, b"a", b"a"), None)
    with pytest.raises(UsageError, match="does not follow"):
        Orderer(applied=[(Block(1, b"a", b""), 1), (Block(3, b"b", b"a"), 3)])
    with pytest.raises(UsageError, match="`applied` says where to continue"):
        Orderer(b"x", applied=[(Block(1, b"a", b""), 1)])
    with pytest.raises(BadArgument, match="reorg_threshold"):
        Orderer(reorg_threshold=-1)
    with pytest.raises(BadArgument, match="most_waiting"):
        Orderer(most_waiting=0)


def test_what_waits_is_bounded_in_bytes() -> None:
    orderer: Orderer[bytes] = Orderer(b"0", budget=100, size_of=len)

    def block(number: int) -> Block:
        return Block(number, b"%d" % number, b"%d" % (number - 1))

    for number, size in [(3, 40), (5, 20), (9, 40)]:
        assert [type(event) for event in orderer.receive(block(number), bytes(size))] == [Gap]
    assert orderer._waiting_bytes == 100
    # The furthest ahead go, as many as it takes.
    assert orderer.receive(block(4), bytes(50)) == [
        Rejected("room", block(9), bytes(40)),
        Rejected("room", block(5), bytes(20)),
    ]
    assert (orderer.waiting, orderer._waiting_bytes) == (2, 90)
    # Itself, where it is the one.
    assert orderer.receive(block(7), bytes(11)) == [
        Gap(b"6", 6, block(7), None),
        Rejected("room", block(7), bytes(11)),
    ]
    # What is applied does not wait any more.
    orderer.receive(block(1), bytes(1000))
    assert len(orderer.receive(block(2), b"")) == 3
    assert (orderer.waiting, orderer._waiting_bytes) == (0, 0)
    # Nor what is too old. And one alone may be as large as it is.
    orderer = Orderer(b"0", reorg_threshold=1, budget=100, size_of=len)
    orderer.receive(block(3), bytes(1000))
    assert orderer._waiting_bytes == 1000
    orderer.receive(block(1), b"")
    for number in (2, 3, 4):
        orderer.receive(Block(number, b"other %d" % number, orderer.head.hash), b"")  # type: ignore[union-attr]
    assert (orderer.waiting, orderer._waiting_bytes) == (0, 0)


def test_a_budget_wants_sizes() -> None:
    with pytest.raises(BadArgument, match="at least 1 byte"):
        Orderer(budget=0, size_of=len)
    with pytest.raises(UsageError, match="`budget` and `size_of`"):
        Orderer(budget=1)
    with pytest.raises(UsageError, match="`budget` and `size_of`"):
        Orderer(size_of=len)
