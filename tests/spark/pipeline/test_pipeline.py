"""The pipeline: a stream's tables by backfill and live tail, and what is asked of them."""

from __future__ import annotations

import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from datastreamer import DataStream, zkevm
from datastreamer.errors import FileMissing, StreamFileError, UsageError
from datastreamer.spark.pipeline.ingest import Ingest
from datastreamer.spark.pipeline.manifest import EntryRange, Manifest
from datastreamer.spark.pipeline.queries import QUERIES, draw, open_tables

TIME = 1_700_000_000


def publish(stream: DataStream, blocks: int) -> None:
    """A batch with `blocks` blocks, the last one over midnight of another day; it is not ended
    where their number is odd."""
    sequencer = zkevm.Sequencer(stream, fork_id=9)
    batch = sequencer.batch()
    batch.__enter__()
    for _ in range(blocks):
        number = stream.total_entries
        with batch.block(
            timestamp=TIME + 60 * number, hash=b"h" * 32, state_root=b"s" * 32
        ) as block:
            for _ in range(number % 3):
                block.tx(b"not a transaction")
    if blocks % 2 == 0:
        batch.__exit__(None, None, None)


def put(stream: DataStream, blocks: list[tuple[int, int, int]]) -> None:
    """Blocks of these numbers and times, with `transactions` transactions each."""
    with stream.atomic_op() as op:
        for number, time, transactions in blocks:
            mark = zkevm.BookMark(zkevm.BookmarkType.L2_BLOCK, number)
            op.add_bookmark(zkevm.encode(mark, version=3)[1])
            op.add_entry(*zkevm.encode(zkevm.L2Block(number, timestamp=time), version=3))
            for _ in range(transactions):
                op.add_entry(*zkevm.encode(zkevm.Transaction(number, encoded=b"x"), version=3))


def events(path: Path) -> list[Any]:
    with DataStream.open(path, read_only=True) as stream:
        version = stream.header.version
        return [zkevm.decode(entry, version=version) for entry in stream.entries()]


@pytest.fixture
def ingested(spark: Any, real_stream: Path, tmp_path: Path) -> Path:
    """The real stream: a third by a backfill, the rest by a query that continues there."""
    out, path = tmp_path / "out", tmp_path / "real.bin"
    shutil.copy(real_stream, path)
    with DataStream.open(path) as stream:
        stream.truncate(12_003)
    ingest = Ingest(spark, {"path": str(path)}, out)
    assert ingest.backfill(chunk=10_000) == 12_003
    shutil.copy(real_stream, path)
    ingest.follow(available_now=True).awaitTermination()
    assert ingest.done == 34_723
    ingest.close()
    return out


def test_the_tables_of_the_real_stream(spark: Any, ingested: Path, real_stream: Path) -> None:
    found = open_tables(spark, ingested)
    scanned = events(real_stream)
    for table, kind in (
        ("blocks", zkevm.L2Block),
        ("transactions", zkevm.Transaction),
        ("batches", zkevm.BatchStart),
        ("batch_ends", zkevm.BatchEnd),
    ):
        numbers = [n for n, event in enumerate(scanned) if isinstance(event, kind)]
        rows = found[table].orderBy("entry_number").collect()
        assert [row.entry_number for row in rows] == numbers
    times = {event.number: event.timestamp for event in scanned if isinstance(event, zkevm.L2Block)}
    sent = [event for event in scanned if isinstance(event, zkevm.Transaction)]
    gas: Counter[str] = Counter()
    for row, event in zip(
        found["transactions"].orderBy("entry_number").collect(), sent, strict=True
    ):
        opened = event.open()
        assert (row.hash, row.sender, row.gas) == (opened.hash, opened.sender, opened.gas)
        assert row.timestamp == times[event.l2block_number]
        assert row.day.toordinal() == 719163 + row.timestamp // 86400
        gas["none" if opened.sender is None else f"0x{opened.sender.hex()}"] += opened.gas

    by_sender = spark.sql(QUERIES["gas_by_sender"].sql).collect()
    assert [(row.sender, row.gas) for row in by_sender] == sorted(
        gas.items(), key=lambda item: (-item[1], item[0])
    )[:10]
    (open_batch,) = spark.sql(QUERIES["open_batches"].sql).collect()
    assert open_batch.number == 101
    per_block = spark.sql(QUERIES["transactions_per_block"].sql).collect()
    assert sum(row.blocks for row in per_block) == len(times) == 11_318
    assert sum(row.transactions for row in per_block) == len(sent)
    between = spark.sql(QUERIES["block_time"].sql).collect()
    assert sum(row.blocks for row in between) == len(times) - 1
    drawn = draw(spark, ingested / "charts")
    assert [path.read_bytes()[:8] for path in drawn] == [b"\x89PNG\r\n\x1a\n"] * 2


def test_a_range_that_a_crash_cut_off_is_written_again(
    spark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, out = tmp_path / "stream.bin", tmp_path / "out"
    with DataStream.create(path, version=3, system_id=7, sync="os") as stream:
        publish(stream, 8)
        ingest = Ingest(spark, {"path": str(path)}, out)
        save = ingest._tables.save

        def crash(rows: Any, table: str, name: str) -> None:
            save(rows, table, name)
            if table == "transactions":
                raise KeyboardInterrupt

        monkeypatch.setattr(ingest._tables, "save", crash)
        with pytest.raises(KeyboardInterrupt):
            ingest.backfill()
        with pytest.raises(FileMissing, match="ingest a stream into it first"):
            open_tables(spark, out)
        with pytest.raises(StreamFileError, match="another ingest is writing to it"):
            Ingest(spark, {"path": str(path)}, out)
        ingest.close()
        publish(stream, 3)
        again = Ingest(spark, {"path": str(path)}, out)
        assert again.done < stream.total_entries, "the same range as before"
        again.backfill()
        tables = open_tables(spark, out)
        assert tables["blocks"].count() == 11
        sent = [event for event in events(path) if isinstance(event, zkevm.Transaction)]
        rows = tables["transactions"].collect()
        assert len(rows) == len(sent) > 0
        assert all(
            row.open_error.startswith("not a transaction") and row.hash is None for row in rows
        )
        assert spark.sql(QUERIES["open_batches"].sql).count() == 1

        again.close()
        stream.truncate(stream.total_entries - 1)
        with pytest.raises(StreamFileError, match="the stream no longer holds"):
            Ingest(spark, {"path": str(path)}, out)


def test_what_a_crash_left_of_a_range_is_removed_if_the_stream_has_changed(
    spark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, out = tmp_path / "stream.bin", tmp_path / "out"

    def crashed() -> None:
        def crash(self: Manifest, wanted: EntryRange) -> None:
            raise KeyboardInterrupt

        ingest = Ingest(spark, {"path": str(path)}, out)
        with monkeypatch.context() as patched:
            patched.setattr(Manifest, "finish", crash)
            with pytest.raises(KeyboardInterrupt):
                ingest.backfill()
        ingest.close()

    with DataStream.create(path, version=3, system_id=7, sync="os") as stream:
        put(stream, [(number, TIME + 86_400 * number, 1) for number in range(6)])
        total = stream.total_entries
        crashed()
        stream.truncate(0)
        put(stream, [(0, TIME + 86_400 * 30, 1)])
        # The range goes further than the stream does now: there is none.
        ingest = Ingest(spark, {"path": str(path)}, out)
        assert (ingest.done, list((out / "_ranges").glob("*.begun"))) == (0, [])
        ingest.close()
        crashed()
        stream.truncate(0)
        put(stream, [(number, TIME + 86_400 * 60, 1) for number in range(6)])
        assert stream.total_entries == total
        ingest = Ingest(spark, {"path": str(path)}, out)
        ingest.backfill()
        ingest.close()
        tables = open_tables(spark, out)
        for name, kind in (("blocks", zkevm.L2Block), ("transactions", zkevm.Transaction)):
            rows = tables[name].orderBy("entry_number").collect()
            numbers = [n for n, event in enumerate(events(path)) if isinstance(event, kind)]
            assert [row.entry_number for row in rows] == numbers
            assert {row.timestamp for row in rows} == {TIME + 86_400 * 60}


def test_a_range_of_two_histories_is_not_finished(tmp_path: Path) -> None:
    path, out = tmp_path / "stream.bin", tmp_path / "out"
    with DataStream.create(path, version=3, system_id=7, sync="os") as stream:
        put(stream, [(number, TIME, 1) for number in range(6)])
        wanted = EntryRange(0, stream.total_entries)
        ranges = Manifest({"path": str(path)}, out)
        for again in (3, 6):
            ranges.begin(wanted)
            stream.truncate(0)
            put(stream, [(number, TIME + again, 1) for number in range(again)])
            with pytest.raises(StreamFileError, match="truncated while they were ingested; run"):
                ranges.finish(wanted)
            assert (ranges.begun(), ranges.done) == ([wanted], 0)
            put(stream, [(number, TIME, 1) for number in range(again, 6)])
        ranges.begin(wanted)
        ranges.finish(wanted)
        assert (ranges.begun(), ranges.done) == ([], wanted.stop)
        ranges.close()


def test_blocks_that_no_sequencer_writes(spark: Any, tmp_path: Path) -> None:
    """Numbers that occur twice or not at all, and times that have no date."""
    path, out = tmp_path / "odd.bin", tmp_path / "out"
    times = [TIME, TIME + 86_400, TIME + 2 * 86_400, 2**62, 300_000_000_000, (1 << 63) - 1]
    with DataStream.create(path, version=3, system_id=7, sync="os") as stream:
        put(stream, [(1, times[0], 1), (2, times[1], 1), (2, times[2], 2)])
        first_range = stream.total_entries
        with stream.atomic_op() as op:
            for number in (2, 99):
                op.add_entry(*zkevm.encode(zkevm.Transaction(number, encoded=b"x"), version=3))
        put(stream, [(number, times[number], 1) for number in (3, 4, 5)])
        ingest = Ingest(spark, {"path": str(path)}, out)
        ingest.backfill(chunk=first_range)
        ingest.close()
    tables = open_tables(spark, out)
    rows = tables["transactions"].orderBy("entry_number").collect()
    assert [(row.l2block_number, row.timestamp) for row in rows] == [
        *((1, times[0]), (2, times[1]), (2, times[2]), (2, times[2]), (2, times[2]), (99, None)),
        *((number, times[number]) for number in (3, 4, 5)),
    ]
    none = [row.l2block_number for row in rows if row.day is None]
    assert none == [99, 3, 4, 5]
    blocks = tables["blocks"].orderBy("entry_number").collect()
    assert [row.timestamp for row in blocks] == times
    assert [row.day and row.day.day for row in blocks] == [14, 15, 16, None, None, None]
    for query in QUERIES.values():
        spark.sql(query.sql).collect()
    draw(spark, tmp_path / "charts")


def test_a_stream_of_version_1_is_refused(spark: Any, tmp_path: Path) -> None:
    with DataStream.create(tmp_path / "one.bin", version=1, system_id=7, sync="os"):
        pass
    with pytest.raises(UsageError, match="the pipeline needs a stream of version 2 or later"):
        Ingest(spark, {"path": str(tmp_path / "one.bin")}, tmp_path / "out")
