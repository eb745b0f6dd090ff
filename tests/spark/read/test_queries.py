"""Queries that read one DataFrame several times, beside Parquet files of an independent decoder.

Spark plans a data source in Python once for all scans of a query, whatever each of them filters.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import pytest
from pyarrow import parquet

from datastreamer.format import HEADER_PAGE_SIZE
from datastreamer.spark import native_jar
from datastreamer.zkevm.proto import datastream_pb2 as messages
from tests import oracle
from tests.spark.read.test_batch import PUSHING

VIEWS: Final = ("entries", "blocks", "sent")

QUERIES: Final = {
    "a filtered scan and a full one": "select number from entries where number < 10 "
    "union all select number from entries",
    "two filters": "select number, type from entries where number < 10 "
    "union all select number, type from entries where type = 2 and number > 34000",
    "a filtered view and its table": "with few as (select * from entries where number < 10) "
    "select a.number, b.number as same from entries a left join few b on a.number = b.number",
    "self join": "select a.number, b.type from entries a join entries b "
    "on b.number = a.number + 1 where a.type = 176 and a.number < 1000",
    "outer self join": "select a.number, b.number as next from blocks a full join blocks b "
    "on b.number = a.number + 1 and b.number > 11000 and a.number < 11300",
    "anti join": "select number from entries a "
    "left anti join (select number from entries where number >= 100) b using (number)",
    "semi join": "select count(*) as many, sum(number) as total from entries a "
    "left semi join (select number from entries where type = 3) b using (number)",
    "in": "select entry_number from blocks "
    "where number in (select l2block_number from sent where entry_number < 20000)",
    "not exists": "select count(*) as many from blocks b "
    "where not exists (select 1 from sent s where s.l2block_number = b.number)",
    "scalar subqueries": "select count(*) as many, (select max(number) from entries) as last, "
    "(select min(number) from entries where type = 3) as first from entries where type = 2",
    "filtered aggregates": "select count(*) as all, count(*) filter (where number < 10) as few, "
    "sum(length(data)) filter (where type = 2) as bytes from entries",
    "except": "select number from entries except select number from entries where number > 7",
    "intersect": "select number from entries where number < 9 "
    "intersect select number from entries where number > 3",
    "windows": "select number, timestamp - lag(timestamp) over (order by number) as seconds, "
    "row_number() over (partition by batch_number order by number) as place from blocks "
    "where number between 5000 and 5100",
    "a window over a union": "select number, count(*) over (partition by number) as times from "
    "(select number from blocks where number < 50 union all select number from blocks) "
    "where number < 60",
    "three tables": "select b.number, count(s.entry_number) as many, max(e.type) as type "
    "from blocks b left join sent s on s.l2block_number = b.number and s.entry_number > 100 "
    "join entries e on e.number = b.entry_number where b.number < 300 group by b.number",
}

LIKE_OTHERS: Final = (
    *("outer self join", "semi join", "not exists", "intersect"),
    "a window over a union",
)
"""Queries that are planned as others are: for the soak tests."""


@pytest.fixture(scope="module")
def decoded(real_stream: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Parquet files of the stream, by the oracle and by Google's protobuf."""
    content = real_stream.read_bytes()
    data = content[HEADER_PAGE_SIZE : int.from_bytes(content[38:46], "big")]
    rows: dict[str, list[dict[str, Any]]] = {name: [] for name in VIEWS}
    for offset, size, kind, number in oracle.scan(data, 0, HEADER_PAGE_SIZE).entries:
        own = data[offset + 17 : offset + 17 + size]
        rows["entries"].append({"number": number, "type": kind, "data": own})
        event: Any
        if kind == 2:
            event = messages.L2Block.FromString(own)
            names = ("number", "batch_number", "timestamp", "hash")
            rows["blocks"].append(
                {"entry_number": number} | {name: getattr(event, name) for name in names}
            )
        elif kind == 3:
            event = messages.Transaction.FromString(own)
            names = ("l2block_number", "encoded")
            rows["sent"].append(
                {"entry_number": number} | {name: getattr(event, name) for name in names}
            )
    folder = tmp_path_factory.mktemp("decoded")
    for name in VIEWS:
        parquet.write_table(pa.Table.from_pylist(rows[name]), folder / f"{name}.parquet")
    return folder


@pytest.fixture(scope="module")
def answers(spark: Any, decoded: Path) -> dict[str, list[Any]]:
    """What the queries give over the Parquet files."""
    for name in VIEWS:
        spark.read.parquet(str(decoded / f"{name}.parquet")).createOrReplaceTempView(name)
    return {name: sorted_rows(spark.sql(query)) for name, query in QUERIES.items()}


def sorted_rows(found: Any) -> list[Any]:
    rows = [tuple(row) for row in found.collect()]
    return sorted(rows, key=lambda row: [(value is None, value or 0) for value in row])


@pytest.fixture(scope="module", params=["native", "python"])
def tables(
    spark: Any, answers: dict[str, list[Any]], real_stream: Path, request: pytest.FixtureRequest
) -> Iterator[dict[str, Any]]:
    """The same tables of the stream, as views, with Spark's own setting for filters on."""
    if request.param == "native" and native_jar() is None:
        pytest.skip("the reader in Java was not built: make jar")
    before = spark.conf.get(PUSHING)
    spark.conf.set(PUSHING, "true")
    made = {}
    for name in VIEWS:
        options = {"table": {"sent": "transactions"}.get(name, name), "partitionBytes": "4m"}
        reader = spark.read.format("datastream").options(**options, reader=request.param)
        made[name] = reader.load(str(real_stream))
        made[name].createOrReplaceTempView(name)
    yield made
    spark.conf.set(PUSHING, before)
    for name in VIEWS:
        spark.catalog.dropTempView(name)


@pytest.mark.parametrize(
    "names",
    [
        tuple(name for name in QUERIES if name not in LIKE_OTHERS),
        pytest.param(LIKE_OTHERS, marks=pytest.mark.soak),
    ],
    ids=["usual", "like others"],
)
def test_queries(
    spark: Any, tables: dict[str, Any], answers: dict[str, list[Any]], names: tuple[str, ...]
) -> None:
    for name in names:
        query = QUERIES[name]
        assert sorted_rows(spark.sql(query)) == answers[name], name
        assert answers[name], name


def test_one_frame_in_turns_and_at_once(tables: dict[str, Any]) -> None:
    entries = tables["entries"]
    few = entries.where("number < 10")
    assert (few.count(), entries.count(), few.count()) == (10, 34_723, 10)
    assert few.union(entries).count() == entries.union(few).count() == 34_733
    kept = few.cache()
    assert (kept.count(), entries.subtract(kept).count(), kept.count()) == (10, 34_713, 10)
    kept.unpersist()
    later = entries.where("number >= 34000").alias("later")
    assert (
        later.join(few.alias("few"), "type").count()
        == later.join(entries.where("number < 10"), "type").count()
    )


def test_tables_made_of_queries(spark: Any, tables: dict[str, Any]) -> None:
    spark.sql(
        "create table made using parquet as select number, type from entries where number < 723 "
        "union all select number, type from entries"
    )
    try:
        assert spark.table("made").count() == 723 + 34_723
        spark.sql(
            "insert into made select number, type from entries "
            "where number not in (select number from entries where number > 5)"
        )
        assert spark.table("made").count() == 723 + 34_723 + 6
    finally:
        spark.sql("drop table made")
