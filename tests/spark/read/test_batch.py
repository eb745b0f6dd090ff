"""`spark.read.format("datastream")`: what Spark makes of files and servers."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from datastreamer import StreamServer, arrow
from datastreamer.format import HEADER_PAGE_SIZE, PAGE_SIZE, page_start
from datastreamer.spark.versions import VERSION
from tests import oracle
from tests.spark.conftest import Make
from tests.spark.read.reading import Query

TABLES = {
    "entries": 34723,
    "blocks": 11318,
    "block_ends": 11317,
    "transactions": 465,
    "batches": 102,
    "batch_ends": 101,
    "ger_updates": 0,
    "bookmarks": 11420,
}
PUSHING = "spark.sql.python.filterPushdown.enabled"


def digest(rows: Iterable[tuple[Any, ...]]) -> str:
    found = hashlib.sha256()
    for row in rows:
        values = (bytes(it) if isinstance(it, bytearray) else it for it in row)
        found.update(repr(tuple(values)).encode())
    return found.hexdigest()


@pytest.fixture
def read(spark: Any) -> Callable[..., Any]:
    def read(path: Any = None, *, schema: str | None = None, **options: Any) -> Any:
        reader = spark.read.format("datastream").options(**options)
        if schema is not None:
            reader = reader.schema(schema)
        return reader.load() if path is None else reader.load(str(path))

    return read


def test_the_real_stream_is_what_a_scan_says(read: Callable[..., Any], real_stream: Path) -> None:
    content = real_stream.read_bytes()
    data = content[HEADER_PAGE_SIZE : int.from_bytes(content[38:46], "big")]
    scanned = [
        (number, kind, data[at + 17 : at + 17 + size])
        for number, (at, size, kind, _) in enumerate(oracle.scan(data, 0, 4096).entries)
    ]
    frame = read(real_stream, partitionBytes="2m")
    assert frame.rdd.getNumPartitions() > 1
    assert frame.count() == len(scanned) == 34723
    assert digest(sorted(frame.collect())) == digest(scanned)


@pytest.mark.parametrize("table", TABLES)
def test_the_real_stream_by_table_without_spark(real_stream: Path, table: str) -> None:
    expected = arrow.ArrowStream(real_stream, table).reader().read_all()
    query = Query(path=real_stream, table=table, partitionBytes="2m")
    assert query.rows() == expected.to_pylist()
    assert expected.num_rows == TABLES[table]


@pytest.mark.parametrize("table", ["blocks", "transactions", "ger_updates", "bookmarks"])
def test_the_real_stream_by_table(read: Callable[..., Any], real_stream: Path, table: str) -> None:
    expected = arrow.ArrowStream(real_stream, table).reader().read_all()
    frame = read(real_stream, table=table, partitionBytes="2m")
    assert frame.columns == expected.column_names
    assert [field.nullable for field in frame.schema] == [it.nullable for it in expected.schema]
    rows = sorted(frame.collect(), key=lambda row: row[0])
    assert len(rows) == TABLES[table]
    assert digest(rows) == digest(zip(*expected.to_pydict().values(), strict=True))


@pytest.fixture(params=["true", "false"])
def pushing(spark: Any, request: pytest.FixtureRequest) -> Iterator[bool]:
    before = spark.conf.get(PUSHING, "false")
    spark.conf.set(PUSHING, request.param)
    yield request.param == "true"
    spark.conf.set(PUSHING, before)


def test_filters_give_the_same_with_and_without_sparks_setting(
    read: Callable[..., Any], real_stream: Path, pushing: bool
) -> None:
    entries = read(real_stream, partitionBytes="1m")
    few = entries.where("number >= 1000 and number < 1010 and type = 2")
    assert [row.number for row in few.collect()] == [1002, 1005, 1008]
    assert entries.where("type in (2, 3) or number < 2").count() == 11318 + 465 + 2
    assert few.union(entries.select("*")).count() == 34726
    # What would read less is refused: Spark would use one scan's filters for all scans.
    with pytest.raises(Exception, match="UsageError: there is no option 'push"):
        read(real_stream, pushFilters="true")


def test_pages_that_offsets_rule_out_are_not_read(
    read: Callable[..., Any], real_stream: Path, tmp_path: Path
) -> None:
    """They may be damaged, and are not read."""
    path = tmp_path / "damaged.bin"
    shutil.copyfile(real_stream, path)
    with path.open("r+b") as file:
        file.seek(page_start(4))
        file.write(b"\x77" * PAGE_SIZE)
    first = read(path, table="blocks", schema="number BIGINT").agg({"number": "min"})
    options = {"startingOffset": "block:3000", "endingOffset": "block:3010"}
    assert read(path, table="blocks", **options).count() == 10
    with pytest.raises(Exception, match=r"DamagedEntry: .*damaged\.bin: at byte"):
        first.collect()
    good = read(path, mode="DROPMALFORMED", schema="number BIGINT").count()
    (row,) = read(path, mode="PERMISSIVE").where("error is not null").collect()
    assert row.type is None
    first, last = row.error.partition("entries ")[2].split()[0:3:2]
    assert int(last) - int(first) + 1 + good == 34723


def test_a_schema_narrows(read: Callable[..., Any], real_stream: Path) -> None:
    frame = read(real_stream, table="blocks", schema="number BIGINT, hash BINARY")
    assert frame.columns == ["number", "hash"]
    assert frame.count() == 11318
    with pytest.raises(Exception, match="the column number is bigint, not int"):
        read(real_stream, table="blocks", schema="number INT").count()


def test_invalid_options_are_reported(read: Callable[..., Any], real_stream: Path) -> None:
    with pytest.raises(Exception, match="UsageError: there is no option 'tabel'"):
        read(real_stream, tabel="blocks")
    with pytest.raises(Exception, match=r"FileMissing: /nowhere/a\.bin: no such file"):
        read("/nowhere/a.bin").count()


def test_it_is_found_without_being_registered(spark: Any, real_stream: Path) -> None:
    other = spark.newSession()
    frame = other.read.format("datastream").load(str(real_stream))
    assert frame.columns == ["number", "type", "data"]


def test_sql(spark: Any, real_stream: Path) -> None:
    spark.sql(
        "create temporary view seen_blocks using datastream "
        f"options (path '{real_stream}', table 'blocks')"
    )
    try:
        (row,) = spark.sql("select count(*), max(number) - min(number) from seen_blocks").collect()
        assert tuple(row) == (11318, 11317)
    finally:
        spark.catalog.dropTempView("seen_blocks")


def test_a_folder(
    read: Callable[..., Any], spark: Any, real_stream: Path, make: Make, tmp_path: Path
) -> None:
    made = make([(1, b"a"), (2, b"b")])
    assert made.parent == tmp_path
    shutil.copyfile(real_stream, tmp_path / "real.bin")
    frame = read(tmp_path)
    counts = {row.system_id: row["count"] for row in frame.groupBy("system_id").count().collect()}
    assert sorted(counts.values()) == [2, 34723]
    assert counts[7] == 2
    several = spark.read.format("datastream").load([str(made), str(tmp_path / "real.bin")])
    assert several.count() == 34725


def test_a_server(read: Callable[..., Any], make: Make) -> None:
    path = make([(1, b"a" * 1000), (2, b"b")] * 5000)
    with StreamServer(path, host="127.0.0.1", port=0, index="memory") as server:
        frame = read(server=f"127.0.0.1:{server.port}", partitionBytes="1m")
        assert frame.rdd.getNumPartitions() == 5
        rows = frame.collect()
        assert [row.number for row in rows] == list(range(10_000))
        assert {(row.type, len(row.data)) for row in rows} == {(1, 1000), (2, 1)}
        with server.stream.atomic_op() as op:
            op.add_entry(3, b"later")
        # A frame stays what it was when it was planned first, except in Spark 4.0.
        assert frame.where("number >= 9990").count() == (10 if VERSION >= (4, 1) else 11)
        anew = read(server=f"127.0.0.1:{server.port}", startingOffset=9990)
        assert anew.count() == 11


def test_a_join_of_blocks_and_transactions(read: Callable[..., Any], real_stream: Path) -> None:
    """The words of the documentation: transactions by block, of the last blocks that have any."""
    blocks = read(real_stream, table="blocks", schema="number BIGINT, timestamp BIGINT")
    transactions = read(real_stream, table="transactions", schema="l2block_number BIGINT")
    by_block = transactions.groupBy("l2block_number").count()
    joined = by_block.join(blocks, by_block.l2block_number == blocks.number)
    assert joined.agg({"count": "sum"}).collect()[0][0] == 465
