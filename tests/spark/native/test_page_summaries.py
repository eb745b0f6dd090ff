"""What `FILE.pages` lets both readers leave out, and that the rows are those of a full read."""

from __future__ import annotations

import json
import random
import shutil
import struct
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
from pyspark.errors import PySparkException

from datastreamer import DataStream
from datastreamer.arrow.tables import NAMES
from datastreamer.format import page_start
from datastreamer.spark.failures import reason
from datastreamer.spark.native import plans
from datastreamer.spark.options import read_options
from datastreamer.spark.read.schemas import number_column, table_schema
from datastreamer.zkevm import encode, events
from datastreamer.zkevm.bookmark_keys import BookmarkName, key_of
from tests.spark.native.comparing import frame, rows_of
from tests.spark.read.reading import Query
from tests.spark.summaries import put, sidecar, signed, stream_id_of, write_summaries

COLUMNS = {
    "entries": ["number", "type"],
    "blocks": ["number", "batch_number", "timestamp", "entry_number"],
    "block_ends": ["number"],
    "transactions": ["l2block_number", "entry_number", "index"],
    "batches": ["number"],
    "batch_ends": ["number"],
    "ger_updates": ["batch_number", "timestamp"],
    "bookmarks": ["entry_number"],
}
DAY = 86_400


def write_world(path: Path, chance: random.Random, pages: int = 24) -> None:
    """Times in which there are blocks, only other entries, or only bookmarks; block numbers rise,
    except that some come again."""
    number, batch, kind = 0, 0, "blocks"
    length = page_start(pages) - (1 << 19)
    with DataStream.create(path, version=3, system_id=7, sync="os", index="memory") as made:
        while made.header.total_length < length:
            if chance.random() < 0.05:
                kind = chance.choice(("blocks", "blocks", "other", "bookmarks"))
            with made.atomic_op() as op:
                for _ in range(10):
                    if kind != "blocks":
                        op.add_entry(chance.choice((9, 11)), bytes(chance.choice((5, 90_000))))
                        op.add_bookmark(key_of(3, BookmarkName("block", number)))
                        continue
                    number += 1
                    if chance.random() < 0.002:
                        number -= 50
                    time = 1_700_000_000 + number * 600
                    if number % 7 == 0:
                        batch += 1
                        op.add_entry(*encode(events.BatchStart(batch), version=3))
                    op.add_bookmark(key_of(3, BookmarkName("block", number)))
                    block = events.L2Block(number, batch, time, hash=chance.randbytes(32))
                    op.add_entry(*encode(block, version=3))
                    data = chance.randbytes(chance.choice((0, 300, 30_000)))
                    op.add_entry(*encode(events.Transaction(number, 0, True, data), version=3))
                    op.add_entry(*encode(events.L2BlockEnd(number), version=3))
                    if number % 11 == 0:
                        op.add_entry(*encode(events.UpdateGER(batch, time), version=3))
                        op.add_entry(*encode(events.BatchEnd(batch), version=3))


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("world") / "world.bin"
    write_world(path, random.Random(5))
    sidecar(path).unlink(missing_ok=True)
    return path


@pytest.fixture
def copy(world: Path, tmp_path: Path) -> Callable[[], Path]:
    """Makes a copy of the stream with its checksums, and the sidecar."""

    def copy() -> Path:
        path = tmp_path / "world.bin"
        shutil.copy(world, path)
        shutil.copy(f"{world}.sums", f"{path}.sums")
        write_summaries(path)
        return path

    return copy


def scan(path: Path, *filters: tuple[str, int | None, int | None], **options: Any) -> Any:
    """A plan as the reader in Java asks for it."""
    given = {"path": str(path), **options}
    schema = table_schema(read_options(given), system_id=False).json()
    return plans.scan(
        {
            "options": given,
            "schema": schema,
            "table": schema,
            "plan": None,
            "tasks": 2,
            "filters": [dict(zip(("column", "least", "most"), it, strict=True)) for it in filters],
        }
    )


def pages_of(plan: Any) -> set[int]:
    return {page for part in plan["parts"] for page in range(part["first"], part["stop"])}


def conditions(chance: random.Random, rows: list[dict[str, Any]], column: str) -> tuple[str, Any]:
    """A condition in SQL and as a function of a row."""
    values = [row[column] for row in rows] or [0]
    a, b = sorted(chance.choice(values) + chance.choice((-1, 0, 0, 1)) for _ in range(2))
    if chance.random() < 0.4:
        b = a + chance.randrange(20)
    return chance.choice(
        (
            (f"{column} BETWEEN {a} AND {b}", lambda it: a <= it <= b),
            (f"{column} >= {a}", lambda it: it >= a),
            (f"{column} < {b}", lambda it: it < b),
            (f"{column} = {a}", lambda it: it == a),
            (f"{column} IN ({a}, {b})", lambda it: it in (a, b)),
            (f"{column} > {a} AND {column} <= {b}", lambda it: a < it <= b),
        )
    )


@pytest.fixture(scope="module")
def rows(world: Path) -> dict[str, list[dict[str, Any]]]:
    """All rows of all tables, without the sidecar."""
    return {table: Query(path=world, table=table).rows() for table in NAMES}


def _ask(
    spark: Any, path: Path, rows: dict[str, list[dict[str, Any]]], seeds: Iterable[int]
) -> tuple[int, int]:
    """Random queries of both readers; returns how many pages their plans have, and would have
    without the sidecar."""
    read = whole = 0
    for seed in seeds:
        chance = random.Random(seed)
        table = chance.choice(NAMES)
        options: dict[str, Any] = {"table": table}
        expected, number = rows[table], number_column(table)
        total = len(rows["entries"])
        if chance.random() < 0.4:
            start, stop = sorted(chance.sample(range(total), 2))
            options |= {"startingOffset": str(start), "endingOffset": str(stop)}
            expected = [row for row in expected if start <= row[number] < stop]
        if table == "entries" and chance.random() < 0.5:
            types = chance.choice(((1,), (5, 4), (0xB0,), (9, 11), (77,)))
            options["types"] = ",".join(map(str, types))
            expected = [row for row in expected if row["type"] in types]
        options["partitionBytes"] = chance.choice(("1m", "4m", "128m"))
        assert Query(path=path, **options).rows() == expected, seed
        read += sum(len(part.pages) for part in plans.flat(Query(path=path, **options).parts))
        whole += -(-(path.stat().st_size - 4096) // (1 << 20))
        found = frame(spark, path=str(path), **options)
        for column in chance.sample(COLUMNS[table], chance.randrange(len(COLUMNS[table]) + 1)):
            text, accepts = conditions(chance, expected, column)
            found = found.where(text)
            expected = [row for row in expected if accepts(row[column])]
        assert rows_of(found) == expected, seed
        assert found.count() == len(expected), seed
    return read, whole


def test_rows_are_those_of_a_full_read(
    native: Any, copy: Callable[[], Path], rows: dict[str, list[dict[str, Any]]]
) -> None:
    # Tables with filters on each of their columns.
    read, whole = _ask(native, copy(), rows, (1, 2, 4, 5, 11, 14, 15, 17))
    assert read < 0.9 * whole


@pytest.mark.soak
def test_rows_are_those_of_a_full_read_for_long(
    native: Any, copy: Callable[[], Path], rows: dict[str, list[dict[str, Any]]]
) -> None:
    _ask(native, copy(), rows, range(1_000, 1_400))


def test_pages_that_are_skipped(
    copy: Callable[[], Path], rows: dict[str, list[dict[str, Any]]]
) -> None:
    path = copy()
    numbers = [row["number"] for row in rows["blocks"]]
    middle = numbers[len(numbers) // 2]
    times = 1_700_000_000 + middle * 600
    everything = pages_of(scan(path, table="entries"))
    assert len(everything) == 24
    for filters, options in (
        ([("number", middle, middle + 3)], {"table": "blocks"}),
        ([("timestamp", times, times + DAY)], {"table": "blocks"}),
        ([("l2block_number", None, 5)], {"table": "transactions"}),
        ([("number", -5, -1)], {"table": "blocks"}),
        ([("type", 5, 5)], {"table": "entries"}),
        ([], {"table": "entries", "types": "77"}),
    ):
        narrowed = pages_of(scan(path, *filters, **options))
        # The last page has no summary.
        assert 23 in narrowed
        assert len(narrowed) < 16, (filters, options)
        tolerant = pages_of(scan(path, *filters, **options, mode="PERMISSIVE"))
        assert tolerant == everything == pages_of(scan(path, *filters, **options, verify="false"))
    sidecar(path).unlink()
    assert pages_of(scan(path, ("number", middle, middle), table="blocks")) == everything


def spoilt(how: str, path: Path, records: list[bytes], chance: random.Random) -> None:
    """Make the sidecar say something wrong, in a way that shows."""
    stream_id, at = stream_id_of(path), chance.randrange(len(records))
    if how == "foreign":
        other = bytes(16)
        put(path, [signed(it, page, other) for page, it in enumerate(records)], other)
    elif how == "foreign records":
        put(path, [signed(it, page, bytes(16)) for page, it in enumerate(records)], stream_id)
    elif how == "torn":
        for page in range(0, len(records), 2):
            records[page] = records[page][:500] + records[page - 1][500:]
        put(path, records, stream_id)
    elif how == "exchanged":
        records[at], records[at - 1] = records[at - 1], records[at]
        put(path, records, stream_id)
    elif how == "of other pages":
        turned = records[1:] + records[:1]
        put(path, [signed(it, page, stream_id) for page, it in enumerate(turned)], stream_id)
    elif how == "empty":
        empty = [struct.pack(">QQ", 2**64 - 1, 0) * 9 + bytes(968 - 144)] * len(records)
        bare = [it[:48] + no for it, no in zip(records, empty, strict=True)]
        wrong = [bytes([it[0] ^ 1]) + it[1:] for it in bare]
        put(path, [signed(it, page, stream_id) for page, it in enumerate(wrong)], stream_id)
    elif how == "cut":
        put(path, [*records[:at], records[at][:700]], stream_id)
    elif how == "a folder":
        sidecar(path).unlink()
        sidecar(path).mkdir()
    elif how == "marks only":
        bare = [it[:32] + bytes(4) + it[36:] for it in records]
        put(path, [signed(it, page, stream_id) for page, it in enumerate(bare)], stream_id)
    else:
        sidecar(path).write_bytes(chance.randbytes(5_000))


@pytest.mark.parametrize(
    "how",
    [
        *("foreign", "foreign records", "torn", "exchanged", "of other pages", "empty", "cut"),
        *("a folder", "marks only", "noise"),
    ],
)
@pytest.mark.parametrize(
    "seeds", [(17,), pytest.param(range(200, 206), marks=pytest.mark.soak)], ids=["one", "all"]
)
def test_a_sidecar_that_is_of_no_use(
    native: Any,
    copy: Callable[[], Path],
    rows: dict[str, list[dict[str, Any]]],
    how: str,
    seeds: Iterable[int],
) -> None:
    path = copy()
    spoilt(how, path, write_summaries(path), random.Random(3))
    _ask(native, path, rows, seeds)
    aggregated(native, path, rows["blocks"])


def aggregated(spark: Any, path: Path, blocks: list[dict[str, Any]], **options: Any) -> bool:
    """Count, least and greatest are those of the rows; returns whether no task found them."""
    found = frame(spark, path=str(path), table="blocks", **options).selectExpr(
        "count(*)", "min(number)", "max(number)", "max(timestamp)", "min(batch_number)"
    )
    column = {name: [row[name] for row in blocks] for name in COLUMNS["blocks"]}
    assert tuple(found.collect()[0]) == (
        len(blocks),
        min(column["number"], default=None),
        max(column["number"], default=None),
        max(column["timestamp"], default=None),
        min(column["batch_number"], default=None),
    )
    return "LocalTableScan" in found._jdf.queryExecution().executedPlan().toString()


def test_aggregates(
    native: Any, copy: Callable[[], Path], rows: dict[str, list[dict[str, Any]]]
) -> None:
    path = copy()
    assert aggregated(native, path, rows["blocks"])
    chance = random.Random(11)
    for _ in range(10):
        start, stop = sorted(chance.sample(range(len(rows["entries"]) + 1), 2))
        within = [row for row in rows["blocks"] if start <= row["entry_number"] < stop]
        offsets = {"startingOffset": str(start), "endingOffset": str(stop)}
        assert aggregated(native, path, within, **offsets)
    for table in NAMES:
        found = frame(native, path=str(path), table=table)
        assert found.count() == len(rows[table])
    for types in ("5,4", "176", "77"):
        expected = [row for row in rows["entries"] if str(row["type"]) in types.split(",")]
        assert frame(native, path=str(path), types=types).count() == len(expected)
    prefixed = frame(native, path=str(path), types="9", prefixes="1:0x00").count()
    assert prefixed == sum(row["type"] == 9 for row in rows["entries"])
    # Groups, other functions and filters are for tasks.
    found = frame(native, path=str(path), table="blocks")
    assert found.where("number > 5").count() == sum(row["number"] > 5 for row in rows["blocks"])
    assert found.selectExpr("sum(number)", "count(*)").collect()[0][1] == len(rows["blocks"])
    assert (
        found.selectExpr("max(entry_number)").collect()[0][0] == rows["blocks"][-1]["entry_number"]
    )
    # Without checks, and without the sidecar, tasks read all pages.
    assert not aggregated(native, path, rows["blocks"], verify="false")
    sidecar(path).unlink()
    assert not aggregated(native, path, rows["blocks"])


def test_events_that_are_none(native: Any, tmp_path: Path) -> None:
    """A page with such an event is read, in whatever order."""
    path = tmp_path / "bad.bin"
    with DataStream.create(path, version=3, sync="os", index="memory") as made:
        for at in range(60):
            with made.atomic_op() as op:
                op.add_entry(9, bytes(200_000))
                op.add_entry(*encode(events.L2Block(at, at), version=3))
                if at == 30:
                    op.add_entry(2, b"\x08")
    write_summaries(path)
    for query in (
        frame(native, path=str(path), table="blocks").where("number = 3"),
        frame(native, path=str(path), table="blocks").groupBy().count(),
        frame(native, path=str(path), table="blocks").selectExpr("max(number)"),
    ):
        with pytest.raises(PySparkException, match="entry 62: "):
            query.collect()


def test_a_number_above_those_of_a_column(native: Any, tmp_path: Path) -> None:
    path = tmp_path / "large.bin"
    with DataStream.create(path, version=3, sync="os", index="memory") as made:
        for at in range(30):
            number = 2**63 if at == 15 else at
            with made.atomic_op() as op:
                op.add_entry(9, bytes(200_000))
                op.add_entry(*encode(events.L2Block(number, at), version=3))
    write_summaries(path)
    found = frame(native, path=str(path), table="blocks")
    assert [row.number for row in found.where("number < 4").collect()] == [0, 1, 2, 3]
    with pytest.raises(PySparkException, match="entry 31"):
        found.selectExpr("max(number)").collect()


def test_many_types(native: Any, tmp_path: Path) -> None:
    """More types in a page than a summary has room for."""
    path = tmp_path / "types.bin"
    with DataStream.create(path, version=3, sync="os", index="memory") as made:
        for at in range(60):
            with made.atomic_op() as op:
                op.add_entry(at % 20 + 1000, bytes(50_000))
    write_summaries(path)
    for kind in (1000, 1019, 5):
        expected = 3 if kind >= 1000 else 0
        assert frame(native, path=str(path), types=str(kind)).count() == expected
        found = frame(native, path=str(path)).where(f"type = {kind}")
        assert len(found.collect()) == expected


def test_damage_in_pages_that_are_read_and_in_others(
    native: Any, copy: Callable[[], Path], rows: dict[str, list[dict[str, Any]]]
) -> None:
    path = copy()
    blocks = rows["blocks"]
    least = min(row["number"] for row in blocks)
    few = [row for row in blocks if row["number"] < least + 20]
    query = frame(native, path=str(path), table="blocks").where(f"number < {least + 20}")
    read = pages_of(scan(path, ("number", None, least + 19), table="blocks"))
    content = bytearray(path.read_bytes())
    other = next(page for page in range(23) if page not in read)
    content[page_start(other) + 9 + 40] ^= 1
    path.write_bytes(content)
    assert rows_of(query) == few
    content[page_start(min(read)) + 9 + 40] ^= 1
    path.write_bytes(content)
    with pytest.raises(PySparkException, match="checksum"):
        query.collect()
    # A mode that makes rows of damage reads all pages.
    tolerant = {"path": str(path), "table": "blocks", "mode": "PERMISSIVE"}
    assert rows_of(frame(native, **tolerant)) == Query(**tolerant).rows()


def test_python_reads_the_rest_of_a_part(native: Any, copy: Callable[[], Path]) -> None:
    """From a doubtful page on, and neither rows twice nor those of skipped pages."""
    path = copy()
    number = Query(path=path, table="blocks").rows()[-1]["number"] // 2
    condition = f"number < 30 OR number > {number}"
    sidecar(path).rename(path.with_name("kept"))
    expected = rows_of(frame(native, path=str(path), table="blocks").where(condition))
    path.with_name("kept").rename(sidecar(path))
    query = frame(native, path=str(path), table="blocks", verify="true").where(condition)
    assert rows_of(query) == expected


def test_growth_and_truncation(native: Any, tmp_path: Path) -> None:
    path = tmp_path / "growing.bin"

    def add(stream: DataStream, numbers: range) -> None:
        for at in numbers:
            with stream.atomic_op() as op:
                op.add_entry(9, bytes(150_000))
                op.add_entry(*encode(events.L2Block(at, at), version=3))

    with DataStream.create(path, version=3, sync="os", index="memory") as stream:
        add(stream, range(60))
        stale = write_summaries(path)
        found = frame(native, path=str(path), table="blocks")
        assert found.count() == 60
        assert found.where("number >= 50").count() == 10
        add(stream, range(60, 90))
        # The frame has what was there first; others have the rest, of which nothing is known.
        assert found.where("number >= 50").count() == 10
        assert found.count() == found.selectExpr("max(number) + 1").collect()[0][0] == 60
        later = frame(native, path=str(path), table="blocks")
        assert later.count() == 90
        assert later.where("number >= 50").count() == 40
        stream.truncate(40)
        add(stream, range(100, 200))
        # Pages of the stream before it was truncated.
        put(path, stale, stream_id_of(path))
        again = frame(native, path=str(path), table="blocks")
        assert again.count() == 120
        assert [row.number for row in again.where("number < 30").collect()] == list(range(20))
        assert again.where("number >= 20").count() == 100
        put(path, write_summaries(path), stream_id_of(path))
        stream.update_entry(15, 2, encode(events.L2Block(107, 7), version=3)[1])
        changed = frame(native, path=str(path), table="blocks")
        assert changed.where("number = 7").count() == 0
        assert changed.where("number = 107").count() == 2
    for query in (found.where("number >= 40"), found.groupBy().count()):
        with pytest.raises(PySparkException) as raised:
            query.collect()
        assert "the stream was truncated or changed since this query was planned" in reason(
            raised.value
        )


def test_statistics(
    native: Any, copy: Callable[[], Path], rows: dict[str, list[dict[str, Any]]]
) -> None:
    path = copy()
    for table in ("blocks", "transactions", "ger_updates"):
        plan = scan(path, table=table)
        assert plan["rows"] == pytest.approx(len(rows[table]), rel=0.1)
        held = sum(len(json.dumps(row, default=repr)) for row in rows[table])
        assert held / 8 < plan["bytes"] < 8 * held
    assert scan(path)["rows"] == len(rows["entries"])
    assert scan(path, ("number", 0, 9))["rows"] == 10
    blocks = frame(native, path=str(path), table="blocks").select("number", "timestamp")
    blocks.createOrReplaceTempView("known_blocks")
    frame(native, path=str(path), table="transactions").createOrReplaceTempView("known_txs")
    query = "SELECT count(*) FROM known_txs JOIN known_blocks ON number = l2block_number"
    native.conf.set("spark.sql.autoBroadcastJoinThreshold", "256k")
    native.conf.set("spark.sql.adaptive.enabled", "false")
    try:
        planned = native.sql(query)._jdf.queryExecution().executedPlan().toString()
        assert "BroadcastHashJoin" in planned
        sidecar(path).unlink()
        for table, view in (("blocks", "known_blocks"), ("transactions", "known_txs")):
            frame(native, path=str(path), table=table).createOrReplaceTempView(view)
        planned = native.sql(query)._jdf.queryExecution().executedPlan().toString()
        assert "SortMergeJoin" in planned
    finally:
        native.conf.unset("spark.sql.autoBroadcastJoinThreshold")
        native.conf.unset("spark.sql.adaptive.enabled")
