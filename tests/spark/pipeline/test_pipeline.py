"""The pipeline: a stream's tables by backfill and live tail, and what is asked of them."""

from __future__ import annotations

import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import coincurve
import pytest
import rlp
import sha3
from matplotlib.figure import Figure

from datastreamer import DataStream, zkevm
from datastreamer.cli.demo import DemoSequencer
from datastreamer.errors import FileMissing, StreamFileError
from datastreamer.spark.pipeline import queries
from datastreamer.spark.pipeline.ingest import Ingest, Progress
from datastreamer.spark.pipeline.queries import QUERIES, draw, open_tables
from datastreamer.spark.pipeline.transactions import tasks_for

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


def add(stream: DataStream, event: Any) -> None:
    with stream.atomic_op() as op:
        op.add_entry(*zkevm.encode(event, version=3))


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
    assert ingest.backfill(chunk=20_000) == 12_003
    shutil.copy(real_stream, path)
    stops = iter([False, False, True])
    assert list(ingest.follow(0, lambda _: next(stops), chunk=20_000)) == [34_723 - 12_003]
    ranges = [each.stop for each in ingest._manifest.now.ranges]
    assert ranges == [12_003, 32_003, 34_723]
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
        ("ger_updates", zkevm.UpdateGER),
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
        fees = (opened.max_priority_fee_per_gas, opened.max_fee_per_gas)
        assert (row.max_priority_fee_per_gas, row.max_fee_per_gas) == fees
        assert (row.input, row.creates_contract) == (opened.input, opened.to is None)
        called = opened.to is not None and len(opened.input) >= 4
        assert row.selector == (opened.input[:4] if called else None)
        assert (row.contract is None) == (opened.to is not None or opened.sender is None)
        assert row.value_wei == int(opened.value)
        assert row.hash_hex == f"0x{opened.hash.hex()}"
        assert row.time.timestamp() == row.timestamp
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


def test_blocks_that_no_sequencer_writes(spark: Any, tmp_path: Path) -> None:
    """Numbers that occur twice or not at all, and times that have no date."""
    path, out = tmp_path / "odd.bin", tmp_path / "out"
    times = [TIME, TIME + 86_400, TIME + 2 * 86_400, 2**62, 300_000_000_000, (1 << 63) - 1]
    with DataStream.create(path, version=3, system_id=7, sync="os") as stream:
        put(stream, [(1, times[0], 1), (2, times[1], 1), (2, times[2], 2)])
        ingest = Ingest(spark, {"path": str(path)}, out)
        ingest.backfill()
        with stream.atomic_op() as op:
            for number in (2, 99):
                op.add_entry(*zkevm.encode(zkevm.Transaction(number, encoded=b"x"), version=3))
        put(stream, [(number, times[number], 1) for number in (3, 4, 5)])
        ingest.backfill()
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


def test_many_blocks_leave_no_file_of_the_session(spark: Any, tmp_path: Path) -> None:
    path = tmp_path / "blocks.bin"
    with DataStream.create(path, version=3, system_id=7, sync="os") as stream:
        put(stream, [(number, TIME, int(number == 0)) for number in range(50_000)])
    ingest = Ingest(spark, {"path": str(path)}, tmp_path / "out")
    folder = Path(spark.sparkContext._temp_dir)
    before = set(folder.iterdir())
    ingest.backfill()
    ingest.close()
    assert set(folder.iterdir()) == before
    (row,) = open_tables(spark, tmp_path / "out")["transactions"].collect()
    assert (row.block_entry, row.timestamp) == (1, TIME)


def test_a_stream_of_version_1(spark: Any, tmp_path: Path) -> None:
    """Its transactions do not name their block. One range begins between a block and its own."""
    path, out = tmp_path / "one.bin", tmp_path / "out"
    with DataStream.create(path, version=1, system_id=7, sync="os") as stream:
        sequencer = DemoSequencer(stream)
        for _ in range(3):
            sequencer.write()
        total = stream.total_entries
    ingest = Ingest(spark, {"path": str(path)}, out)
    assert ingest.backfill(chunk=8) == total == 15
    ingest.close()
    blocks: list[tuple[Any, ...]] = []
    sent = []
    for number, event in enumerate(events(path)):
        if isinstance(event, zkevm.StartL2Block):
            blocks.append((number, event.number, event.timestamp))
        elif isinstance(event, zkevm.L2Tx):
            sent.append((number, event.open().hash, *blocks[-1]))
    tables = open_tables(spark, out)
    rows = tables["transactions"].orderBy("entry_number").collect()
    own = [
        (it.entry_number, it.hash, it.block_entry, it.l2block_number, it.timestamp) for it in rows
    ]
    assert own == sent
    assert len(sent) == tables["blocks"].count() == 3
    (per_block,) = spark.sql(QUERIES["transactions_per_block"].sql).collect()
    assert (per_block.blocks, per_block.transactions, per_block.most) == (3, 3, 1)
    assert spark.sql(QUERIES["open_batches"].sql).collect() == []


def test_transactions_of_every_kind(spark: Any, tmp_path: Path) -> None:
    """A creation, a call with fees, an amount of 256 bits, and a GER update."""
    key = coincurve.PrivateKey.from_int(7)
    big = 2**255
    sent = [
        legacy(key, [5, 1, 21_000, b"", 0, b"\x60\x80\x60\x40\x52"]),
        dynamic(key, [1, 6, 2_000, 30_000, 21_000, b"t" * 20, 10**38 - 1, b"\xa9\x05\x9c\xbb" * 2]),
        legacy(key, [7, 2**70, 21_000, b"t" * 20, big, b"\x01"]),
    ]
    path, out = tmp_path / "kinds.bin", tmp_path / "out"
    with DataStream.create(path, version=3, system_id=7, sync="os") as stream:
        put(stream, [(1, TIME, 0)])
        with stream.atomic_op() as op:
            for encoded in sent:
                op.add_entry(*zkevm.encode(zkevm.Transaction(1, encoded=encoded), version=3))
            update = zkevm.UpdateGER(3, TIME + 1, b"g" * 32, b"c" * 20, 9, 1101, b"s" * 32)
            op.add_entry(*zkevm.encode(update, version=3))
    ingest = Ingest(spark, {"path": str(path)}, out)
    ingest.backfill()
    ingest.close()
    tables = open_tables(spark, out)
    made, called, large = tables["transactions"].orderBy("entry_number").collect()
    sender = zkevm.open_transaction(sent[0]).sender
    assert sender is not None
    digest = sha3.keccak_256(rlp.encode([sender, 5])).digest()
    assert (made.creates_contract, made.to, made.contract) == (True, None, digest[-20:])
    assert (made.selector, made.contract_hex) == (None, f"0x{digest[-20:].hex()}")
    assert (called.creates_contract, called.contract) == (False, None)
    assert (called.selector, called.input) == (b"\xa9\x05\x9c\xbb", b"\xa9\x05\x9c\xbb" * 2)
    assert (called.gas_price, called.max_priority_fee_per_gas) == (30_000, 2_000)
    assert (called.max_fee_per_gas, called.value_wei) == (30_000, 10**38 - 1)
    assert (large.value, large.value_wei, large.gas_price) == (str(big), None, None)
    assert (large.selector, large.input) == (None, b"\x01")
    (ger,) = tables["ger_updates"].collect()
    assert (ger.batch_number, ger.timestamp, ger.day.day) == (3, TIME + 1, 14)
    assert ger.global_exit_root_hex == f"0x{(b'g' * 32).hex()}"


def signed(key: Any, payload: bytes) -> tuple[int, int, int]:
    signature = key.sign_recoverable(sha3.keccak_256(payload).digest(), hasher=None)
    r, s = (int.from_bytes(signature[at : at + 32], "big") for at in (0, 32))
    return signature[64], r, s


def legacy(key: Any, fields: list[Any]) -> bytes:
    parity, r, s = signed(key, rlp.encode(fields))
    return bytes(rlp.encode([*fields, 27 + parity, r, s]))


def dynamic(key: Any, fields: list[Any]) -> bytes:
    parity, r, s = signed(key, b"\x02" + rlp.encode([*fields, []]))
    return b"\x02" + bytes(rlp.encode([*fields, [], parity, r, s]))


@pytest.mark.parametrize(
    "marks, cores, tasks",
    [
        (0, 2, 0),
        (1, 1, 1),
        (5, 2, 1),
        (6, 2, 2),
        (15, 2, 4),
        (15, 8, 3),
        (40, 2, 8),
        (300, 2, 16),
        (301, 2, 16),
        (1_000, 100, 200),
        (1_000, 300, 200),
        (1_000, 7, 56),
    ],
)
def test_tasks_have_equal_work_on_all_cores(marks: int, cores: int, tasks: int) -> None:
    assert tasks_for(marks, cores) == tasks
    assert tasks <= max(1, marks)


@pytest.mark.parametrize(
    "values, seconds, labels",
    [
        ([1.0, 4.0], False, ["0", "1", "2", "3", "4"]),
        ([0.25, 0.5], False, None),
        ([2.0] * 9 + [1_500.0], False, ["0", "2", "10", "50", "200", "1,000"]),
        ([120.0, 320.0], True, ["0 s", "1 min", "2 min", "3 min", "4 min", "5 min"]),
        ([5.0] * 9 + [7_300.0], True, ["0 s", "1 s", "5 s", "30 s", "2 min", "10 min", "1 h"]),
        ([86_400.0 * 9], True, ["0 s", "2 d", "4 d", "6 d", "8 d"]),
        ([], True, None),
    ],
)
def test_axes_have_numbers_that_people_read(
    values: list[float], seconds: bool, labels: list[str] | None
) -> None:
    chart = Figure().subplots()
    chart.plot(range(len(values)), values)
    queries.scale(chart, values, seconds=seconds)
    shown = [label.get_text() for label in chart.get_yticklabels()]
    assert labels is None or shown == labels
    assert not any("^" in label for label in shown)
    assert chart.get_ylim()[0] == 0


def test_the_block_before_is_found_in_another_part_of_a_window(spark: Any) -> None:
    """No task sorts all blocks: there is a part for each million of entries."""
    blocks = spark.range(12).selectExpr(
        "id * 300000 as entry_number",
        "if(id < 6, id, id - 2) as number",
        "id * id as timestamp",
        "date '2024-01-01' as day",
        "timestamp_seconds(id) as time",
    )
    blocks.createOrReplaceTempView("blocks")
    rows = spark.sql(queries._BLOCK_SECONDS).orderBy("entry_number").collect()
    # Numbers 0 to 5, then 4 to 9: the first 4 of these does not follow the 5.
    expected = [None, 1, 3, 5, 7, 9, None, 13, 15, 17, 19, 21]
    assert [row.seconds for row in rows] == expected


def test_progress_moves_within_a_range() -> None:
    begun = Progress(1_000, 2_000, 4_000, "blocks", 0)
    shares = [begun.share(0.0), begun.share(0.5), begun._replace(tables=1).share(0.0)]
    assert shares == [0.25, 0.275, 0.3]
    assert begun._replace(tables=4).share(1.0) == 0.5
