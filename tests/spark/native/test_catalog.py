"""Streams in SQL by name: `spark.sql.catalog.NAME` with the class `Catalog`, and `CREATE TABLE`."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from datastreamer import DataStream, StreamServer
from datastreamer.arrow.tables import NAMES
from datastreamer.spark.options import read_options
from datastreamer.spark.read.column_comments import with_comments
from datastreamer.spark.read.schemas import table_schema
from datastreamer.zkevm import Sequencer

_NUMBERS = itertools.count()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A stream of five blocks."""
    path = tmp_path / "chain.bin"
    with DataStream.create(path, version=3) as stream, Sequencer(stream).batch() as batch:
        for number in range(5):
            with batch.block(timestamp=100 + number, hash=b"h" * 32, state_root=b"s" * 32):
                pass
    return path


@pytest.fixture
def catalog(native: Any, path: Path, tmp_path: Path) -> Iterator[str]:
    """A catalog of that stream, as a file and of a server, and of one without entries."""
    DataStream.create(tmp_path / "empty.bin").close()
    name = f"catalog{next(_NUMBERS)}"
    native.conf.set(f"spark.sql.catalog.{name}", "datastreamer.spark.Catalog")
    served = shutil.copy(path, tmp_path / "served.bin")
    with StreamServer(served, host="127.0.0.1", port=0, in_process=True) as server:
        for option, value in {
            "mainnet.path": str(path),
            "empty.path": str(tmp_path / "empty.bin"),
            "served.server": f"127.0.0.1:{server.port}",
        }.items():
            native.conf.set(f"spark.sql.catalog.{name}.{option}", value)
        yield name


def rows(spark: Any, query: str) -> list[tuple[Any, ...]]:
    return [tuple(row) for row in spark.sql(query).collect()]


@pytest.mark.parametrize("stream", ["mainnet", "served"])
def test_tables_of_a_stream(native: Any, catalog: str, stream: str) -> None:
    assert rows(native, f"show namespaces in {catalog}") == [("empty",), ("mainnet",), ("served",)]
    shown = rows(native, f"show tables in {catalog}.{stream}")
    assert {name for _, name, _ in shown} == set(NAMES)
    assert rows(native, f"select number, timestamp from {catalog}.{stream}.Blocks") == [
        (number, 100 + number) for number in range(5)
    ]
    described = rows(native, f"describe {catalog}.{stream}.blocks")
    assert ("timestamp", "bigint", "Unix seconds") in described
    described = rows(native, f"describe extended {catalog}.{stream}.blocks")
    assert "table=blocks" in dict(row[:2] for row in described)["Table Properties"]
    assert native.table(f"{catalog}.{stream}.blocks").where("number = 3").count() == 1
    assert native.readStream.table(f"{catalog}.{stream}.blocks").isStreaming


@pytest.mark.parametrize("stream", ["mainnet", "served"])
def test_options_of_one_query(native: Any, catalog: str, stream: str) -> None:
    table = f"{catalog}.{stream}.entries"
    assert native.read.option("endingOffset", "3").table(table).count() == 3
    assert native.table(table).count() > 3
    with pytest.raises(Exception, match=r"(?i)there is no option 'endoffset'"):
        native.read.option("endOffset", "3").table(table).count()


def test_keys_in_a_uri_are_not_shown(native: Any) -> None:
    native.conf.set("spark.sql.catalog.keys", "datastreamer.spark.Catalog")
    keys = ("very-private", "v/very-private", "v@very-private")
    for at, key in enumerate(keys):
        uri = f"s3://me:{key}@b/x.bin?k=very-private"
        native.conf.set(f"spark.sql.catalog.keys.s{at}.path", uri)
    for at in range(len(keys)):
        shown = str(rows(native, f"describe namespace extended keys.s{at}"))
        assert "s3://b/x.bin" in shown
        assert "very-private" not in shown


def test_a_table_as_it_was(native: Any, catalog: str) -> None:
    table = f"{catalog}.mainnet.entries"
    assert rows(native, f"select count(*) from {table} version as of 3") == [(3,)]
    assert rows(native, f"select max(number) from {table} version as of 3") == [(2,)]
    assert rows(native, f"select count(*) from {table} timestamp as of '2001-01-01'") == [(0,)]
    (everything,) = rows(native, f"select count(*) from {table} timestamp as of '2101-01-01'")
    assert everything == rows(native, f"select count(*) from {table}")[0]


@pytest.mark.parametrize(
    "query, message",
    [
        ("select * from {}.mainnet.nothing", "TABLE_OR_VIEW_NOT_FOUND"),
        ("select * from {}.nothing.blocks", "TABLE_OR_VIEW_NOT_FOUND"),
        ("show tables in {}.nothing", "SCHEMA_NOT_FOUND"),
        ("select * from {}.mainnet.blocks version as of 'x'", "option endingOffset: 'x' is not"),
        ("drop table {}.mainnet.blocks", "DROP TABLE: the streams of the catalog .* are its sett"),
        ("drop namespace {}.empty", "DROP NAMESPACE: the streams of the catalog"),
        ("create namespace {}.more", "CREATE NAMESPACE: the streams of the catalog"),
        ("create table {}.mainnet.more (a int)", "CREATE TABLE: the streams of the catalog"),
        ("alter table {}.mainnet.blocks rename to blocks2", "RENAME TABLE: the streams of the"),
    ],
)
def test_what_is_refused(native: Any, catalog: str, query: str, message: str) -> None:
    with pytest.raises(Exception, match=message):
        native.sql(query.format(catalog)).collect()


def test_a_setting_that_names_no_option(native: Any) -> None:
    native.conf.set("spark.sql.catalog.wrong", "datastreamer.spark.Catalog")
    native.conf.set("spark.sql.catalog.wrong.path", "chain.bin")
    with pytest.raises(Exception, match=r"such as spark\.sql\.catalog\.wrong\.mainnet\.path"):
        native.sql("show namespaces in wrong")


def test_insert(native: Any, catalog: str, tmp_path: Path) -> None:
    native.sql(f"insert into {catalog}.empty.entries select 7 as type, X'0102' as data")
    assert rows(native, f"select * from {catalog}.empty.entries") == [(0, 7, b"\x01\x02")]
    with pytest.raises(Exception, match="a stream is written from the columns type"):
        native.sql(f"insert into {catalog}.empty.blocks select 7 as number")


@pytest.mark.parametrize(
    "said", ["options (path '{}', table 'blocks')", "location '{}' tblproperties (table 'blocks')"]
)
def test_a_table_of_the_catalog_of_spark(native: Any, path: Path, said: str) -> None:
    name = f"kept{next(_NUMBERS)}"
    native.sql(f"create table {name} using datastream " + said.format(path))
    try:
        assert rows(native, f"select min(timestamp), count(*) from {name}") == [(100, 5)]
        assert "l1_info_root" in native.table(name).columns
    finally:
        native.sql(f"drop table {name}")
    assert path.exists()


def test_a_table_of_a_server_in_the_catalog_of_spark(native: Any, path: Path) -> None:
    name = f"kept{next(_NUMBERS)}"
    with StreamServer(path, host="127.0.0.1", port=0, in_process=True) as server:
        server_option = f"server '127.0.0.1:{server.port}'"
        native.sql(
            f"create table {name} using datastream options ({server_option}, table 'blocks')"
        )
        try:
            assert rows(native, f"select min(timestamp), count(*) from {name}") == [(100, 5)]
        finally:
            native.sql(f"drop table {name}")


def test_a_table_without_a_place(native: Any) -> None:
    with pytest.raises(Exception, match="say where the stream is"):
        native.sql("create table nowhere using datastream")


@pytest.mark.parametrize("table", NAMES)
def test_every_column_has_a_comment(table: str) -> None:
    options = read_options({"path": "a", "table": table, "mode": "PERMISSIVE"})
    columns = with_comments(table, table_schema(options, system_id=True))
    assert all(column.metadata["comment"] for column in columns)


def test_progress_of_a_query_says_how_far_it_is(native: Any, path: Path, tmp_path: Path) -> None:
    frame = native.readStream.format("datastream").option("maxEntriesPerTrigger", "4")
    query = (
        frame.load(str(path))
        .writeStream.format("noop")
        .option("checkpointLocation", str(tmp_path / "checkpoint"))
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()
    progress = [each["sources"][0] for each in query.recentProgress]
    said = f"datastream {{maxEntriesPerTrigger=4, path={path}}}"
    assert {each["description"] for each in progress} == {said}
    behind = [int(each["metrics"]["entriesBehind"]) for each in progress]
    assert behind == [max(0, behind[0] - 4 * at) for at in range(len(behind))]
    assert behind[-1] == 0
    assert float(progress[1]["metrics"]["entriesPerSecond"]) > 0


def test_the_rate_after_a_truncation_is_not_negative(
    native: Any, path: Path, tmp_path: Path
) -> None:
    frame = native.readStream.format("datastream").option("failOnDataLoss", "false")
    query = (
        frame.load(str(path))
        .writeStream.format("noop")
        .option("checkpointLocation", str(tmp_path / "checkpoint"))
        .start()
    )
    try:
        query.processAllAvailable()
        with DataStream.open(path) as stream:
            stream.truncate(4)
        query.processAllAvailable()
        rates = [
            float(each["sources"][0]["metrics"].get("entriesPerSecond", 0))
            for each in query.recentProgress
        ]
        # Of some versions of Spark it is JSON, of others a dict's text.
        end = str(query.lastProgress["sources"][0]["endOffset"])
        assert "'entry': 4," in end.replace('"', "'")
        assert min(rates) >= 0
    finally:
        query.stop()
