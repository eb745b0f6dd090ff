"""Publishing: the order of entries, bookmarks and numbers, and what an exception leaves."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from datastreamer import DataStream
from datastreamer.errors import BadEvent, NoOperation, UsageError
from datastreamer.zkevm import SequenceCheck, decode, events, fixed
from datastreamer.zkevm.bookmark_keys import BookmarkName, key_of
from datastreamer.zkevm.events import BatchType, BookMark, BookmarkType
from datastreamer.zkevm.latest_state import SequencerState, latest_state
from datastreamer.zkevm.sequencer import Sequencer

H = [bytes([n]) * 32 for n in range(8)]
Make = Callable[[int], DataStream]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    streams: list[DataStream] = []

    def create(version: int) -> DataStream:
        path = tmp_path / f"{len(streams)}.bin"
        streams.append(DataStream.create(path, version=version, system_id=779, sync="os"))
        return streams[-1]

    yield create
    for stream in streams:
        stream.close()


def reported(stream: DataStream, start: int = 0) -> list[Any]:
    version = stream.header.version
    return [decode(entry, version=version) for entry in stream.entries(start)]


def in_order(stream: DataStream) -> bool:
    check = SequenceCheck(stream.header.version)
    for run in stream.batches():
        check.feed(run)
    return check.report().ok


def two_batches(sequencer: Sequencer) -> None:
    with sequencer.batch(type=BatchType.INJECTED) as batch:
        with batch.block(timestamp=100, hash=H[1], state_root=H[2]) as block:
            block.tx(b"one")
            block.tx(b"two", is_valid=False, effective_gas_price_percentage=7, im_state_root=H[2])
        with batch.block(timestamp=103, hash=H[3], state_root=H[4]):
            pass
    last = sequencer.batch(local_exit_root=H[6])
    with last as batch, batch.block(timestamp=103, hash=H[5], state_root=H[6]):
        pass


@pytest.mark.parametrize("atomic", ["block", "batch", "caller"])
@pytest.mark.parametrize("version", [2, 3])
def test_messages(make: Make, version: int, atomic: Any) -> None:
    stream = make(version)
    sequencer = Sequencer(stream, fork_id=9, atomic=atomic)
    if atomic == "caller":
        with pytest.raises(NoOperation):
            two_batches(sequencer)
        sequencer = Sequencer(stream, fork_id=9, atomic=atomic)
        stream.start_atomic_op()
    two_batches(sequencer)
    if atomic == "caller":
        assert stream.total_entries == 0
        stream.commit_atomic_op()

    def block(number: int, batch: int, timestamp: int, delta: int, hashes: int) -> list[Any]:
        event = events.L2Block(
            number, batch, timestamp, delta, 0, bytes(32), 0, H[hashes], H[hashes + 1],
            bytes(32), bytes(20),
        )  # fmt: skip
        return [BookMark(BookmarkType.L2_BLOCK, number), event]

    def end(number: int) -> list[Any]:
        return [events.L2BlockEnd(number)] if version >= 3 else []

    assert reported(stream) == [
        BookMark(BookmarkType.BATCH, 0),
        events.BatchStart(0, BatchType.INJECTED, 9, 779),
        *block(0, 0, 100, 0, 1),
        events.Transaction(0, 0, True, b"one", 255, H[2]),
        events.Transaction(0, 1, False, b"two", 7, H[2]),
        *end(0),
        *block(1, 0, 103, 3, 3),
        *end(1),
        events.BatchEnd(0, bytes(32), H[4]),
        BookMark(BookmarkType.BATCH, 1),
        events.BatchStart(1, BatchType.REGULAR, 9, 779),
        *block(2, 1, 103, 0, 5),
        *end(2),
        events.BatchEnd(1, H[6], H[6]),
    ]
    assert in_order(stream)
    assert stream.entry(stream.bookmark(key_of(version, BookmarkName("block", 2))) + 1).type == 2
    assert sequencer.state == latest_state(stream)


def test_a_block_has_what_the_caller_gives(make: Make) -> None:
    stream = make(3)
    given = {
        "delta_timestamp": 7,
        "min_timestamp": 5,
        "l1_blockhash": H[1],
        "l1_infotree_index": 3,
        "hash": H[2],
        "state_root": H[3],
        "global_exit_root": H[4],
        "coinbase": H[5][:20],
        "block_gas_limit": 2**64 - 1,
        "block_info_root": H[6],
        "debug": "x",
        "base_fee": b"\x09",
    }
    with Sequencer(stream).batch() as batch, batch.block(8, timestamp=100, **given):  # type: ignore[arg-type]
        pass
    found = next(each for each in reported(stream) if isinstance(each, events.L2Block))
    expected = {"number": 8, "batch_number": 0, "timestamp": 100, "unknown": b""} | given
    assert found._asdict() == expected


@pytest.mark.parametrize("atomic", ["block", "batch"])
def test_fixed_layouts(make: Make, atomic: Any) -> None:
    stream = make(1)
    sequencer = Sequencer(stream, atomic=atomic)
    two_batches(sequencer)

    def block(number: int, batch: int, timestamp: int, delta: int) -> list[Any]:
        event = fixed.StartL2Block(
            batch, number, timestamp, delta, 0, bytes(32), bytes(32), bytes(20), 9, 779
        )
        return [BookMark(BookmarkType.L2_BLOCK, number), event]

    assert reported(stream) == [
        BookMark(BookmarkType.BATCH, 0),
        *block(0, 0, 100, 0),
        fixed.L2Tx(255, True, H[2], b"one"),
        fixed.L2Tx(7, False, H[2], b"two"),
        fixed.EndL2Block(0, H[1], H[2]),
        *block(1, 0, 103, 3),
        fixed.EndL2Block(1, H[3], H[4]),
        BookMark(BookmarkType.BATCH, 1),
        *block(2, 1, 103, 0),
        fixed.EndL2Block(2, H[5], H[6]),
    ]
    assert in_order(stream)


class Noting:
    """A stream that notes how many entries there are after each commit."""

    def __init__(self, stream: DataStream) -> None:
        self._stream = stream
        self.seen: list[int] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def commit_atomic_op(self) -> None:
        self._stream.commit_atomic_op()
        self.seen.append(self._stream.total_entries)


@pytest.mark.parametrize("atomic, after", [("block", [7, 10, 11, 16, 17]), ("batch", [11, 17])])
def test_what_is_committed_together(make: Make, atomic: Any, after: list[int]) -> None:
    stream = Noting(make(3))
    two_batches(Sequencer(stream, atomic=atomic))  # type: ignore[arg-type]
    assert stream.seen == after


def broken(sequencer: Sequencer) -> None:
    with sequencer.batch() as batch:
        with batch.block(timestamp=100, hash=H[1], state_root=H[1]) as block:
            block.tx(b"whole")
        with batch.block(timestamp=101, hash=H[2], state_root=H[2]) as block:
            block.tx(b"half")
            raise RuntimeError("no power")


def test_a_batch_that_is_broken_off_stays_open(make: Make) -> None:
    stream = make(3)
    sequencer = Sequencer(stream)
    with pytest.raises(RuntimeError):
        broken(sequencer)
    assert [type(event).__name__ for event in reported(stream)] == [
        *("BookMark", "BatchStart", "BookMark", "L2Block", "Transaction", "L2BlockEnd")
    ]
    for continued in (sequencer, Sequencer(stream)):
        assert continued.state == SequencerState(0, True, 0, 100, H[1], True)
        with pytest.raises(UsageError, match=r"batch 0 has not ended: call resume\(\)"):
            continued.batch()
    with continued.resume(local_exit_root=H[7]) as batch, batch.block(timestamp=102):
        pass
    assert reported(stream, 6)[1].number == 1
    assert reported(stream)[-1] == events.BatchEnd(0, H[7], bytes(32))
    assert in_order(stream)
    with pytest.raises(UsageError, match="does not end in an open batch"):
        continued.resume()


def test_a_batch_of_one_operation_is_not_there_at_all(make: Make) -> None:
    stream = make(3)
    sequencer = Sequencer(stream, atomic="batch")
    with pytest.raises(RuntimeError):
        broken(sequencer)
    assert stream.total_entries == 0
    assert sequencer.state == SequencerState(block_ends=True)
    two_batches(sequencer)
    assert in_order(stream)


def test_a_block_that_cannot_be_written_leaves_nothing(make: Make) -> None:
    stream = make(1)
    sequencer = Sequencer(stream)
    bad = pytest.raises(BadEvent, match="l1_blockhash must be 32 bytes")
    with bad, sequencer.batch() as batch, batch.block(timestamp=1, l1_blockhash=b"short"):
        pass
    assert stream.total_entries == 0
    two_batches(sequencer)
    assert in_order(stream)


def test_time_does_not_run_backwards(make: Make) -> None:
    sequencer = Sequencer(make(3))
    two_batches(sequencer)
    bad = pytest.raises(BadEvent, match="block 3 has the time 102, before that of block 2, 103")
    with bad, sequencer.batch() as batch, batch.block(timestamp=102):
        pass


def test_one_batch_at_a_time(make: Make) -> None:
    sequencer = Sequencer(make(3))
    with sequencer.batch(), pytest.raises(UsageError, match="a batch is being written"):
        sequencer.batch()
    with pytest.raises(UsageError, match="atomic must be 'block', 'batch' or 'caller'"):
        Sequencer(sequencer.stream, atomic="never")  # type: ignore[arg-type]


@pytest.mark.parametrize("atomic", ["block", "batch"])
def test_one_block_at_a_time_and_only_where_it_is_written(make: Make, atomic: Any) -> None:
    """Otherwise blocks with one number, or transactions that are not written, would result."""
    stream = make(3)
    sequencer = Sequencer(stream, atomic=atomic)
    made_before = sequencer.batch()
    with sequencer.batch() as batch:
        early, late = batch.block(timestamp=100), batch.block(timestamp=100)
        with pytest.raises(UsageError, match="block 0 is not being written"):
            early.tx(b"early")
        with early as block:
            block.tx(b"in time")
            with pytest.raises(UsageError, match="block 0 is being written"):
                late.__enter__()
        with pytest.raises(UsageError, match="block 0 is not being written"):
            block.tx(b"late")
        for used in (early, late):
            with pytest.raises(UsageError, match="grown since block 0 was made"):
                used.__enter__()
        last = batch.block(timestamp=101)
    for old in (batch, made_before):
        with pytest.raises(UsageError, match="grown since batch 0 was made"):
            old.__enter__()
    with pytest.raises(UsageError, match="batch 0 is not being written"):
        last.__enter__()
    with sequencer.batch(), pytest.raises(UsageError, match="batch 0 is not being written"):
        last.__enter__()
    assert [
        event.encoded for event in reported(stream) if isinstance(event, events.Transaction)
    ] == [b"in time"]
    assert in_order(stream)


@pytest.mark.parametrize("version", [1, 2, 3])
def test_an_empty_batch_and_an_exit_root(make: Make, version: int) -> None:
    stream = make(version)
    sequencer = Sequencer(stream)
    two_batches(sequencer)
    before = stream.total_entries
    sequencer.update_ger(timestamp=104, global_exit_root=H[1], state_root=H[2], batch_number=2)
    (update,) = reported(stream, before)
    assert (update.batch_number, update.timestamp, update.state_root) == (2, 104, H[2])
    assert (update.global_exit_root, update.chain_id, update.fork_id) == (H[1], 779, 9)
    with sequencer.batch(5 if version == 1 else None):
        pass
    names = [type(event).__name__ for event in reported(stream, before + 1)]
    assert names == (["BookMark"] if version == 1 else ["BookMark", "BatchStart", "BatchEnd"])
    assert in_order(stream)


@pytest.mark.parametrize("atomic", ["block", "batch"])
def test_an_exit_root_between_blocks(make: Make, atomic: Any) -> None:
    stream = make(3)
    sequencer = Sequencer(stream, atomic=atomic)
    with sequencer.batch() as batch:
        with batch.block(timestamp=1):
            pass
        sequencer.update_ger(timestamp=1, global_exit_root=H[1], state_root=H[2])
        assert stream.total_entries == (6 if atomic == "block" else 0)
        with batch.block(timestamp=2):
            pass
    assert [type(event).__name__ for event in reported(stream)][4:7] == [
        *("L2BlockEnd", "UpdateGER", "BookMark")
    ]
    assert in_order(stream)


def test_continues_after_other_entries(make: Make) -> None:
    stream = make(2)
    two_batches(Sequencer(stream))
    with stream.atomic_op() as op:
        op.add_entries(99, [b"x"] * 5000)
        op.add_entry(2, b"\xff")
    assert Sequencer(stream).state == SequencerState(1, False, 2, 103, H[6], False)


def test_blocks_go_on_having_ends_where_they_had_some(make: Make) -> None:
    stream = make(2)
    with stream.atomic_op() as op:
        op.add_entry(6, b"")
    assert Sequencer(stream).state == SequencerState(block_ends=True)
