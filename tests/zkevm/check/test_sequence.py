"""The check of a stream's order: each rule is broken once, and the real stream."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from datastreamer import DataStream
from datastreamer._codec import pack_entry, scan
from datastreamer.errors import ExtraMissing
from datastreamer.zkevm import SequenceCheck, encode, events, fixed
from datastreamer.zkevm.check import message_order
from datastreamer.zkevm.check.sequence import Breach, SequenceReport
from datastreamer.zkevm.decoding import Event, decode_batch
from datastreamer.zkevm.events import BookMark, BookmarkType

H = [bytes([n]) * 32 for n in range(20)]
Raw = tuple[int, bytes]


def report(version: int, story: list[Event | Raw], first: int = 0) -> SequenceReport:
    """What the check says to these events, or types and data, in this order."""
    packed = [
        event if type(event) is tuple else encode(event, version=version)  # type: ignore[arg-type]
        for event in story
    ]
    check = SequenceCheck(version)
    entries = [pack_entry(at, *pair) for at, pair in enumerate(packed, first)]
    for number, entry in enumerate(entries, first):
        check.feed(scan(entry, number))
    return check.report()


def batch_mark(number: int) -> BookMark:
    return BookMark(BookmarkType.BATCH, number)


def block_mark(number: int) -> BookMark:
    return BookMark(BookmarkType.L2_BLOCK, number)


def block(number: int, batch: int, timestamp: int, delta: int) -> events.L2Block:
    return events.L2Block(
        number, batch, timestamp, delta, hash=H[number], state_root=H[number + 10]
    )


def story() -> list[Any]:
    """Two batches of two blocks in order: entries 0 to 22."""
    return [
        batch_mark(5),  # 0
        events.BatchStart(5, 1, 9, 779),
        block_mark(1),  # 2
        block(1, 5, 100, 0),
        events.Transaction(1, 0, True, b"a"),  # 4
        events.Transaction(1, 1, True, b"b"),
        events.L2BlockEnd(1),  # 6
        block_mark(2),
        block(2, 5, 102, 2),  # 8
        events.L2BlockEnd(2),
        events.BatchEnd(5, b"", H[12]),  # 10
        events.UpdateGER(6, 103),
        batch_mark(6),  # 12
        events.BatchStart(6, 1, 9, 779),
        block_mark(3),  # 14
        block(3, 6, 103, 1),
        events.L2BlockEnd(3),  # 16
        block_mark(4),
        block(4, 6, 103, 0),  # 18
        events.Transaction(4, 0, True, b"c"),
        events.L2BlockEnd(4),  # 20
        events.BatchEnd(6, b"", H[14]),
    ]


def test_fields_of_a_newer_schema_are_noted() -> None:
    events_, at = story(), 8
    plain = report(3, events_)
    for number in (at, at + 1):
        events_[number] = events_[number]._replace(unknown=b"\xf8\x7d\x01")
    found = report(3, events_)
    assert found.ok
    note = "2 events have fields that are not examined, the first in entry 8: a newer schema"
    assert found.notes == [*plain.notes, f"{note} wrote them"]


def test_all_in_order() -> None:
    found = report(3, story())
    assert found.breaches == []
    assert found.ok
    assert (found.entries, found.batches, found.blocks) == (22, (5, 6), (1, 4))
    assert found.events["Transaction"] == 3
    assert found.notes == [
        "parents of fork 9 are not checked: no block has the expected header hash"
    ] or (found.notes == [])
    assert found.as_dict()["ok"] is True


def replaced(at: int, event: Any) -> Callable[[list[Any]], None]:
    def change(reported: list[Any]) -> None:
        reported[at] = event

    return change


def left_out(at: int, count: int = 1) -> Callable[[list[Any]], None]:
    def change(reported: list[Any]) -> None:
        del reported[at : at + count]

    return change


def put_in(at: int, event: Any) -> Callable[[list[Any]], None]:
    return lambda reported: reported.insert(at, event)


BREACHES: list[tuple[Callable[[list[Any]], None], list[tuple[int, str, str]]]] = [
    (replaced(8, (2, b"\xff")), [
        (7, "bookmark", "block 2 does not follow it"),
        (8, "decode", "invalid L2Block: at byte 0"),
        (9, "order", "block 2 ends, but none is open"),
        (10, "root", "batch 5 ends with the state root 0x0c0c"),
        (15, "block", "block 3 begins, but 2 is expected"),
    ]),
    (put_in(10, (99, b"")), [
        (10, "decode", "streams of version 3 have no event of type 99"),
    ]),
    (left_out(12), [(12, "bookmark", "no bookmark precedes batch 6")]),
    (left_out(7), [(7, "bookmark", "no bookmark precedes block 2")]),
    (replaced(12, batch_mark(7)), [(12, "bookmark", "it names batch 7, but batch 6 follows")]),
    (replaced(14, block_mark(9)), [(14, "bookmark", "it names block 9, but block 3 follows")]),
    (put_in(10, block_mark(3)), [(10, "bookmark", "block 3 does not follow it")]),
    (put_in(2, batch_mark(8)), [(2, "bookmark", "batch 8 does not follow it")]),
    (put_in(2, (0xB0, b"\x08\x03")), [(2, "bookmark", "a bookmark of unknown type 3")]),
    (replaced(13, events.BatchStart(8, 1, 9)), [
        (12, "bookmark", "it names batch 6, but batch 8 follows"),
        (13, "batch", "batch 8 begins, but 6 is expected"),
        (15, "block", "block 3 is of batch 6, but batch 8 is open"),
        (18, "block", "block 4 is of batch 6, but batch 8 is open"),
        (21, "batch", "batch 6 ends, but batch 8 is open"),
    ]),
    (left_out(10), [(12, "batch", "batch 6 begins before batch 5 has ended")]),
    (put_in(11, events.BatchEnd(5)), [(11, "batch", "batch 5 ends, but none is open")]),
    (replaced(10, events.BatchEnd(5, b"", H[1])), [
        (10, "root", "batch 5 ends with the state root 0x0101"),
    ]),
    (left_out(12, 2), [
        (13, "block", "block 3 begins outside of a batch"),
        (16, "block", "block 4 begins outside of a batch"),
        (19, "batch", "batch 6 ends, but none is open"),
    ]),
    (replaced(18, block(5, 6, 103, 0)), [
        (17, "bookmark", "it names block 4, but block 5 follows"),
        (18, "block", "block 5 begins, but 4 is expected"),
        (19, "transaction", "a transaction of block 4 inside block 5"),
        (20, "order", "block 4 ends inside block 5"),
        (21, "root", "batch 6 ends"),
    ]),
    (replaced(15, block(3, 6, 101, 1)), [
        (15, "timestamp", "block 3 has the time 101, but block 2 before it has 102"),
        (18, "timestamp", ("block 4 reports 0 s since the block before it, but the "
         "timestamps differ by 2")),
    ]),
    (replaced(15, block(3, 6, 103, 9)), [(15, "timestamp", "block 3 reports 9 s since")]),
    (replaced(15, block(3, 6, 103, 1)._replace(min_timestamp=104)), [
        (15, "timestamp", "block 3 has the time 103, before its minimum 104"),
    ]),
    (replaced(15, block(3, 6, 103, 1)._replace(hash=H[2])), [
        (15, "parent", "block 3 has its parent's hash"),
    ]),
    (put_in(7, events.Transaction(1, 2)), [(7, "order", "a transaction of block 1 outside of a")]),
    (replaced(4, events.Transaction(2, 0)), [
        (4, "transaction", "a transaction of block 2 inside block 1"),
    ]),
    (replaced(5, events.Transaction(1, 2)), [
        (5, "transaction", "its index is 2, but 1 is expected"),
    ]),
    (replaced(19, events.Transaction(4, 1)), [
        (19, "transaction", "its index is 1, but 0 is expected"),
    ]),
    (left_out(9), [(9, "order", "batch 5 ends before the L2BlockEnd of block 2")]),
    (left_out(6), [(7, "order", "block 2 begins before the L2BlockEnd of block 1")]),
    (left_out(9, 2), [
        (9, "order", "UpdateGER before the L2BlockEnd of block 2"),
        (11, "batch", "batch 6 begins before batch 5 has ended"),
    ]),
    (replaced(6, events.L2BlockEnd(2)), [(6, "order", "block 2 ends inside block 1")]),
    (put_in(7, events.L2BlockEnd(1)), [(7, "order", "block 1 ends, but none is open")]),
]  # fmt: skip


@pytest.mark.parametrize("change, expected", BREACHES)
def test_breaches(
    change: Callable[[list[Any]], None], expected: list[tuple[int, str, str]]
) -> None:
    reported = story()
    change(reported)
    found = report(3, reported)
    assert not found.ok
    assert [(entry, rule) for entry, rule, _ in found.breaches] == [
        (entry, rule) for entry, rule, _ in expected
    ]
    for breach, (_, _, message) in zip(found.breaches, expected, strict=True):
        assert breach.what.startswith(message), breach


def test_entries_that_lack() -> None:
    (breach,) = report(3, story(), first=3).breaches
    assert breach == (3, "entry", "entry 3 follows, but 0 is expected")


def test_breaches_that_are_reported_are_not_kept() -> None:
    reported: list[Breach] = []
    check = SequenceCheck(3, reported.append)
    packed = b"".join(pack_entry(number, 2, b"\xff") for number in range(20))
    check.feed(scan(packed, 0))
    assert [(breach.entry, breach.rule) for breach in reported] == [
        (at, "decode") for at in range(20)
    ]
    found = check.report()
    assert (found.ok, found.breaches) == (False, [])
    assert (found.broken, found.first) == ({"decode": 20}, 0)


@pytest.mark.parametrize(
    "indices, wrong",
    [
        ([0, 0, 0, 5], [(1, 0), (2, 0), (3, 5)]),
        ([0, 1, 0, 3], [(2, 0)]),
        ([3, 0, 0], [(0, 3), (1, 0), (2, 0)]),
        ([0, 0, 0], []),
        ([0, 1, 2], []),
    ],
)
def test_indices_of_transactions(indices: list[int], wrong: list[tuple[int, int]]) -> None:
    reported: list[Event | Raw] = [batch_mark(1), events.BatchStart(1), block_mark(1)]
    reported += [events.L2Block(1, 1), *(events.Transaction(1, index) for index in indices)]
    found = report(3, [*reported, events.L2BlockEnd(1), events.BatchEnd(1)])
    assert [(breach.entry - 4, breach.what) for breach in found.breaches] == [
        (due, f"its index is {index}, but {due} is expected") for due, index in wrong
    ]


def test_what_is_open_is_no_breach() -> None:
    found = report(3, story()[:5])
    assert found.ok
    assert found.notes[:2] == ["block 1 has no end yet", "batch 5 has no end yet"]
    assert report(3, story()[:3]).notes[0] == (
        "the stream ends before the event of the bookmark in entry 2"
    )


def test_version_2_has_no_ends_or_all() -> None:
    reported = [event for event in story() if not isinstance(event, events.L2BlockEnd)]
    found = report(2, reported)
    assert found.ok
    assert "no block has an L2BlockEnd, which version 3 introduced" in found.notes
    reported = story()
    del reported[6]
    found = report(2, reported)
    assert found.ok
    assert "1 block without an L2BlockEnd, before the stream's first one" in found.notes
    reported = story()
    del reported[20]
    assert [breach.entry for breach in report(2, reported).breaches] == [20]


def test_transactions_that_are_not_numbered() -> None:
    reported = story()
    reported[5] = reported[5]._replace(index=0)
    found = report(3, reported)
    assert found.ok
    assert "1 block with several transactions, all of index 0" in found.notes


def test_without_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> Any:
        raise ExtraMissing("hashing takes a package", "zkevm")

    monkeypatch.setattr(message_order, "keccak", missing)
    found = report(3, story())
    assert found.ok
    assert found.parents == 0
    (note,) = found.notes
    assert note == (
        "parents are not checked: hashing takes a package: install it with pip install "
        "'datastreamer[zkevm]'"
    )


# Version 1.


def start(number: int, batch: int, timestamp: int, delta: int | None) -> fixed.StartL2Block:
    return fixed.StartL2Block(batch, number, timestamp, delta, 0, H[0], H[0], H[0][:20], 9, 779)


def old_story() -> list[Any]:
    return [
        batch_mark(0),  # 0
        block_mark(0),
        start(0, 0, 100, 5),  # 2
        fixed.L2Tx(255, True, H[1], b"a"),
        fixed.EndL2Block(0, H[2], H[1]),  # 4
        block_mark(1),
        start(1, 0, 101, 1),  # 6
        fixed.L2Tx(255, True, None, b"a"),
        fixed.EndL2Block(1, H[2], H[1]),  # 8
        fixed.FixedUpdateGER(1, 102, H[0], H[0][:20], 9, 779, H[0]),
        batch_mark(2),  # 10
        block_mark(2),
        start(2, 2, 103, 2),  # 12
        fixed.EndL2Block(2, H[2], H[3]),
    ]


OLD_BREACHES: list[tuple[Callable[[list[Any]], None], list[tuple[int, str, str]]]] = [
    (left_out(0), [(1, "bookmark", "no bookmark precedes batch 0")]),
    (left_out(5), [(5, "bookmark", "no bookmark precedes block 1")]),
    (replaced(10, batch_mark(3)), [(10, "bookmark", "it names batch 3, but batch 2 follows")]),
    (put_in(5, batch_mark(9)), [(5, "bookmark", "it names batch 9, but batch 0 follows")]),
    (put_in(10, block_mark(9)), [(10, "bookmark", "block 9 does not follow it")]),
    (replaced(12, start(2, 4, 103, 2)), [
        (10, "bookmark", "it names batch 2, but batch 4 follows"),
        (12, "batch", "batch 4 begins, but 2 is expected"),
    ]),
    (replaced(12, start(2, 2, 99, 2)), [(12, "timestamp", "block 2 has the time 99, but block 1")]),
    (replaced(12, start(2, 2, 103, 7)), [(12, "timestamp", "block 2 reports 7 s since")]),
    (replaced(12, start(3, 2, 103, 2)), [
        (11, "bookmark", "it names block 2, but block 3 follows"),
        (12, "block", "block 3 begins, but 2 is expected"),
        (13, "order", "block 2 ends inside block 3"),
    ]),
    (left_out(4), [(5, "order", "block 1 begins before the EndL2Block of block 0")]),
    (put_in(5, fixed.EndL2Block(0, H[2], H[1])), [(5, "order", "block 0 ends, but none is open")]),
    (put_in(5, fixed.L2Tx(1, True, None, b"")), [(5, "order", "a transaction outside of a block")]),
    (put_in(4, fixed.FixedUpdateGER(0, 102, H[0], H[0][:20], 9, None, H[0])), [
        (4, "order", "UpdateGER inside block 0"),
    ]),
    (replaced(4, fixed.EndL2Block(0, H[2], H[2])), [
        (4, "root", "block 0 ends with the state root 0x0202"),
    ]),
    (replaced(3, (2, b"")), [(3, "decode", "invalid L2Tx: 0 bytes")]),
]  # fmt: skip


def test_version_1_in_order() -> None:
    found = report(1, old_story())
    assert found.breaches == []
    assert (found.batches, found.blocks, found.notes) == ((0, 2), (0, 2), [])
    assert report(1, old_story()[:3]).notes == ["block 0 has no end yet"]


@pytest.mark.parametrize("change, expected", OLD_BREACHES)
def test_breaches_of_version_1(
    change: Callable[[list[Any]], None], expected: list[tuple[int, str, str]]
) -> None:
    reported = old_story()
    change(reported)
    found = report(1, reported)
    assert [(entry, rule) for entry, rule, _ in found.breaches] == [
        (entry, rule) for entry, rule, _ in expected
    ]
    for breach, (_, _, message) in zip(found.breaches, expected, strict=True):
        assert breach.what.startswith(message), breach


# The real stream.


@pytest.fixture(scope="module")
def real_story(real_stream: Path) -> list[Any]:
    with DataStream.open(real_stream, read_only=True) as stream:
        return [event for run in stream.batches() for _, event in decode_batch(run, version=2)]


def test_the_real_stream(real_stream: Path) -> None:
    pytest.importorskip("sha3", reason="safe-pysha3 is not installed")
    check = SequenceCheck(2)
    with DataStream.open(real_stream, read_only=True) as stream:
        for run in stream.batches():
            check.feed(run)
    found = check.report()
    assert found.entries == 34_723
    assert found.events == {
        "BatchEnd": 101,
        "BatchStart": 102,
        "BookMark": 11_420,
        "L2Block": 11_318,
        "L2BlockEnd": 11_317,
        "Transaction": 465,
    }
    assert (found.batches, found.blocks) == ((0, 101), (0, 11_317))
    # All but block 0, which has no parent, and the 47 with transactions.
    assert found.parents == 11_318 - 1 - 47
    # Block 1 has its whole timestamp as the difference, as nodes write it.
    assert found.ok
    assert found.notes == [
        "batch 101 has no end yet",
        "1 block without an L2BlockEnd, before the stream's first one",
        "38 blocks with several transactions, all of index 0",
    ]


def test_another_parent_is_found(real_story: list[Any]) -> None:
    pytest.importorskip("sha3", reason="safe-pysha3 is not installed")
    reported = real_story[:900]
    places = [at for at, event in enumerate(reported) if isinstance(event, events.L2Block)]
    at = places[-5]
    reported[at] = reported[at]._replace(hash=bytes(32))
    found = report(2, reported)
    wrong = [(breach.entry, breach.rule) for breach in found.breaches]
    # Neither its own hash fits its fields, nor the next block's the hash of its parent.
    assert wrong == [(at, "parent"), (places[-4], "parent")]


def test_a_wrong_block_before_the_first_right_one(real_story: list[Any]) -> None:
    pytest.importorskip("sha3", reason="safe-pysha3 is not installed")
    reported = real_story[:60]
    reported[15] = reported[15]._replace(timestamp=reported[15].timestamp, state_root=H[1])
    found = report(2, reported)
    assert [(breach.entry, breach.rule) for breach in found.breaches] == [(15, "parent")]


@pytest.mark.parametrize("delta, wrong", [(100, 0), (7, 0), (99, 1), (0, 1)])
def test_the_first_difference_may_be_the_whole_timestamp(delta: int, wrong: int) -> None:
    opening = [batch_mark(0), events.BatchStart(0, 1, 9), block_mark(0), block(0, 0, 93, 0)]
    reported = [*opening, events.L2BlockEnd(0), block_mark(1), block(1, 0, 100, delta)]
    found = report(3, [*reported, events.L2BlockEnd(1), events.BatchEnd(0, b"", H[11])])
    assert [(each.entry, each.rule) for each in found.breaches] == [(6, "timestamp")] * wrong


def test_no_later_difference_is_a_whole_timestamp() -> None:
    reported = story()
    reported[8] = block(2, 5, 102, 102)
    (breach,) = report(3, reported).breaches
    assert (breach.entry, breach.rule) == (8, "timestamp")


def london(numbers: range, begins: int, fee: int) -> list[Any]:
    """A batch of fork 12 of these blocks, which have a base fee from `begins` on. Their hashes are
    those of headers that another library encodes."""
    rlp = pytest.importorskip("rlp", reason="rlp is not installed")
    sha3 = pytest.importorskip("sha3", reason="safe-pysha3 is not installed")
    empty = sha3.keccak_256(rlp.encode(b"")).digest()
    no_uncles = sha3.keccak_256(rlp.encode([])).digest()
    made: list[Any] = [batch_mark(5), events.BatchStart(5, 1, 12, 779)]
    parent = bytes(32)
    for number in numbers:
        header = [parent, no_uncles, H[5][:20], H[7], empty, empty, bytes(256), 0, number]
        header += [2**64 - 1, 0, 1000 + number, b"", bytes(32), bytes(8)]
        header += [fee] if number >= begins else []
        parent = sha3.keccak_256(rlp.encode(header)).digest()
        wei = fee.to_bytes((fee.bit_length() + 7) // 8, "big") if number >= begins else b""
        fields = {"hash": parent, "state_root": H[7], "coinbase": H[5][:20], "base_fee": wei}
        new = events.L2Block(number, 5, 1000 + number, int(number > numbers[0]), **fields)  # type: ignore[arg-type]
        new = new._replace(block_gas_limit=2**64 - 1)
        made += [block_mark(number), new, events.L2BlockEnd(number)]
    return [*made, events.BatchEnd(5, b"", H[7])]


@pytest.mark.parametrize("fee", [7, 1_000_000_000, 0])
def test_london_begins_within_a_fork(fee: int) -> None:
    reported = london(range(1, 11), 6, fee)
    found = report(3, reported)
    assert (found.breaches, found.parents, found.notes) == ([], 9, [])
    at = [i for i, event in enumerate(reported) if isinstance(event, events.L2Block)]
    for wrong in (3, 8):
        changed = list(reported)
        changed[at[wrong]] = changed[at[wrong]]._replace(state_root=H[1])
        assert [(b.entry, b.rule) for b in report(3, changed).breaches] == [(at[wrong], "parent")]
    if fee:
        for other in (b"\x08", b""):
            reported[at[8]] = reported[at[8]]._replace(base_fee=other)
            assert [b.entry for b in report(3, reported).breaches] == [at[8]]


def test_a_base_fee_that_no_header_has() -> None:
    reported = london(range(1, 11), 11, 0)
    reported[-3] = reported[-3]._replace(base_fee=b"\1" * 200)
    found = report(3, reported)
    assert found.notes == [
        "parents of fork 12 with a base fee are not checked: no block has the expected header hash"
    ]
