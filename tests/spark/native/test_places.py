"""The columns that say where a row's entry is: `_file`, `_page` and `_offset`."""

from __future__ import annotations

import random
import shutil
from pathlib import Path
from typing import Any

import pytest
from pyspark.errors import PySparkException
from pyspark.sql.types import LongType, StringType, StructField, StructType

from datastreamer import StreamServer
from datastreamer.errors import UsageError
from datastreamer.format import page_of
from datastreamer.spark.options import read_options
from datastreamer.spark.read.schemas import number_column, table_schema
from datastreamer.spark.stream.live import live_rows
from tests.spark.native.comparing import frame, python_parts
from tests.spark.native.fuzz import write_stream
from tests.spark.read.reading import Query

PLACE = ["_file", "_page", "_offset"]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("stream") / "stream.bin"
    write_stream(made, random.Random(2), 6)
    return made


def assert_placed(path: Path, rows: list[Any]) -> None:
    """The entries of rows (number, file, page, offset) are where they say."""
    content = path.read_bytes()
    assert rows
    for number, file, page, offset in rows:
        assert (file, page) == (str(path), page_of(offset))
        assert content[offset] == 2
        assert int.from_bytes(content[offset + 9 : offset + 17], "big") == number


@pytest.mark.parametrize("table", ["entries", "blocks", "transactions"])
def test_each_row_says_where_its_entry_is(native: Any, path: Path, table: str) -> None:
    number = number_column(table)
    found = frame(native, path=str(path), table=table)
    assert set(PLACE).isdisjoint(found.columns)
    rows = found.select(number, *PLACE).collect()
    assert_placed(path, rows)
    assert len(rows) == found.count()
    assert len({row._page for row in rows}) > 5
    # Only these columns; with filters on others and on them.
    assert found.select("_offset").collect() == [(row._offset,) for row in rows]
    some = found.where(f"_page = 3 AND {number} % 2 = 0").select("_offset", number)
    assert some.collect() == [
        (row._offset, row[number]) for row in rows if row._page == 3 and row[number] % 2 == 0
    ]
    assert found.agg({"_offset": "max"}).collect() == [(rows[-1]._offset,)]


def test_a_selection_of_entries_and_several_files(native: Any, path: Path, tmp_path: Path) -> None:
    copies = [Path(shutil.copy(path, tmp_path / f"{name}.bin")) for name in "ab"]
    found = frame(native, path=str(tmp_path), types="2")
    for copy in copies:
        rows = found.where(f"_file = '{copy}'").select("number", *PLACE)
        assert_placed(copy, rows.collect())
    by_file = {row._file: row["count"] for row in found.groupBy("_file").count().collect()}
    assert by_file.keys() == {str(copy) for copy in copies}
    assert len(set(by_file.values())) == 1
    named = found.select("_file", "_offset", "data")
    assert named.join(found.select("_file", "_offset", "number"), ["_file", "_offset"]).count() == (
        found.count()
    )


def test_python_says_it_of_a_part_in_doubt(native: Any, path: Path, tmp_path: Path) -> None:
    damaged = Path(shutil.copy(path, tmp_path / "damaged.bin"))
    on_page = frame(native, path=str(path)).where("_page = 3").select("_offset").collect()
    middle = on_page[len(on_page) // 2]._offset
    with damaged.open("r+b") as file:
        file.seek(middle)
        file.write(b"\x77" * 17)
    for table in ("entries", "blocks"):
        number = number_column(table)
        found = frame(native, path=str(damaged), table=table, mode="PERMISSIVE")
        rows = found.select(number, *PLACE, "error")
        assert python_parts(rows) == 1
        whole = rows.where("error IS NULL").drop("error").collect()
        assert {row._page for row in whole} >= {2, 3, 4, 5}
        assert_placed(damaged, whole)
        lost = rows.where(f"error LIKE '%{damaged}%'").select(*PLACE).collect()
        assert lost == [(str(damaged), 3, middle)]


def test_the_source_in_python_has_them_if_its_schema_names_them(native: Any, path: Path) -> None:
    wanted = native.read.format("datastream").schema(
        "_offset BIGINT, number BIGINT, _page BIGINT, _file STRING"
    )
    # A query that cuts the first page.
    options = {"path": str(path), "startingOffset": "5", "types": "2", "prefixes": "0:0x08"}
    for reader in ("python", "native"):
        found = wanted.options(reader=reader, **options).load()
        assert_placed(path, found.select("number", *PLACE).collect())


def test_servers_and_other_sources_have_none(native: Any, path: Path, tmp_path: Path) -> None:
    copy = shutil.copy(path, tmp_path / "served.bin")
    with StreamServer(copy, host="127.0.0.1", port=0, index="memory") as server:
        address = f"127.0.0.1:{server.port}"
        served = native.read.format("datastream").option("server", address).load()
        python = native.read.format("datastream").option("reader", "python").load(str(path))
        for found in (served, python):
            with pytest.raises(PySparkException, match="UNRESOLVED_COLUMN"):
                found.select("_offset").collect()
        place = StructType([StructField("_page", LongType()), StructField("_file", StringType())])
        with pytest.raises(UsageError, match="the table entries has no column '_page'"):
            Query(server=address, schema=place)


def test_a_streaming_query_has_them(native: Any, path: Path, tmp_path: Path) -> None:
    found = native.readStream.format("datastream").option("maxBytesPerTrigger", "1m")
    query = (
        found.load(str(path))
        .where("_page <> 2")
        .select("_page", "number", "_file", "_offset")
        .writeStream.format("parquet")
        .option("checkpointLocation", str(tmp_path / "checkpoint"))
        .trigger(availableNow=True)
        .start(str(tmp_path / "rows"))
    )
    query.awaitTermination()
    rows = native.read.parquet(str(tmp_path / "rows")).select("number", *PLACE).collect()
    assert_placed(path, rows)
    assert {0, 1, 2, 3, 4, 5} - {row._page for row in rows} == {2}


def test_real_time_mode_has_none(path: Path) -> None:
    options = read_options({"path": str(path)})
    schema = table_schema(options, system_id=False).add("_offset", "long")
    with pytest.raises(UsageError, match="_offset"):
        next(live_rows(options, schema, 0))


def test_one_query_by_another_reader(native: Any, path: Path, tmp_path: Path) -> None:
    native.conf.set("spark.sql.catalog.places", "datastreamer.spark.Catalog")
    native.conf.set("spark.sql.catalog.places.s.path", str(path))
    rows = native.sql("SELECT number, _file, _page, _offset FROM places.s.blocks").collect()
    assert len(rows) > 10
    python = native.read.option("reader", "python").table("places.s.entries")
    assert_placed(path, python.select("number", *PLACE).collect())
    assert python.columns == ["number", "type", "data"]
    assert python.collect() == native.table("places.s.entries").collect()
    follow = native.readStream.option("reader", "python").table("places.s.entries")
    query = (
        follow.select("number", *PLACE)
        .writeStream.format("parquet")
        .option("checkpointLocation", str(tmp_path / "checkpoint"))
        .trigger(availableNow=True)
        .start(str(tmp_path / "rows"))
    )
    query.awaitTermination()
    assert_placed(path, native.read.parquet(str(tmp_path / "rows")).collect())
