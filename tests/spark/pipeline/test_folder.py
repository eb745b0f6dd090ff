"""The folder of the tables, on a disk and through Hadoop."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from datastreamer import DataStream
from datastreamer.errors import StreamFileError, UsageError
from datastreamer.spark.pipeline.folder import HadoopFolder, TableFolder, folder_of
from datastreamer.spark.pipeline.ingest import Ingest
from datastreamer.spark.pipeline.queries import open_tables
from tests.spark.pipeline.worlds import World, expected, manifest_of, rows_of
from tests.spark.settings import ROOT


@pytest.fixture(params=["local", "hadoop"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> TableFolder:
    if request.param == "local":
        return TableFolder(str(tmp_path / "out"))
    request.getfixturevalue("spark")
    return HadoopFolder(f"file://{tmp_path}/out/")


def test_files(folder: TableFolder, tmp_path: Path) -> None:
    assert (folder.names("a"), folder.read("a/b")) == ([], None)
    folder.lock()
    for name in ("a/2", "a/1", "a/day=1/range=x/f", "a/day=2/range=x/f", "a/day=2/range=y/f"):
        folder.put(name, name.encode())
    assert folder.read("a/1") == b"a/1"
    assert folder.names("a/day=2") == ["range=x", "range=y"]
    folder.remove("a/day=*/range=x")
    folder.remove("a/1")
    folder.remove("a/3")
    assert folder.names("a/day=1") == []
    assert [name for name in folder.names("a") if not name.startswith(".")] == [
        "2",
        "day=1",
        "day=2",
    ]
    (tmp_path / "out" / "file").write_bytes(b"")
    with pytest.raises(StreamFileError):
        folder.put("file/x", b"")
    folder.close()


def test_two_ingests(spark: Any, tmp_path: Path) -> None:
    first, second = (TableFolder(str(tmp_path)) for _ in range(2))
    first.lock()
    with pytest.raises(StreamFileError, match="another ingest is writing to it"):
        second.lock()
    first.close()
    second.lock()
    second.close()
    folder = HadoopFolder(f"file://{tmp_path}")
    folder.put("_manifest/1", b"1")
    with pytest.raises(StreamFileError, match="another ingest is writing to it"):
        folder.put("_manifest/1", b"2")
    assert folder.read("_manifest/1") == b"1"


def test_folders_by_name(spark: Any, tmp_path: Path) -> None:
    assert folder_of("tables").url == str(Path("tables").absolute())
    assert folder_of(f"file://{tmp_path}", spark).url == str(tmp_path)
    with pytest.raises(UsageError, match="only a Spark session reaches it"):
        folder_of("s3a://bucket/tables")
    with pytest.raises(StreamFileError, match="nowhere"):
        folder_of("nowhere://bucket/tables", spark)


@pytest.fixture
def mounted(spark: Any, tmp_path: Path) -> Iterator[str]:
    """A URL of another scheme than `file`, of the test's folder."""
    conf = spark._jsc.hadoopConfiguration()
    name = "fs.viewfs.mounttable.tests.link./here"
    conf.set(name, f"file://{tmp_path}")
    yield "viewfs://tests/here"
    conf.unset(name)


def test_tables_at_a_url(spark: Any, tmp_path: Path, mounted: str) -> None:
    with DataStream.create(tmp_path / "stream.bin", version=3, system_id=7, sync="os") as stream:
        world = World(stream, 1, 8)
        source = {"path": str(tmp_path / "stream.bin")}
        ingest = Ingest(spark, source, f"{mounted}/out")
        ingest.backfill(chunk=10)
        stream.truncate(13)
        world.append(3)
        assert ingest.backfill() == stream.total_entries - 13
        assert ingest.compact() == 1
        found = rows_of(tmp_path / "out", manifest_of(tmp_path / "out"))
        assert found == expected(world.events())
        tables = open_tables(spark, f"{mounted}/out")
        assert tables["blocks"].count() == len(found["blocks"])
        # A second one begins, and the first one must not go on.
        second = Ingest(spark, source, f"{mounted}/out")
        world.append(2)
        assert second.backfill() > 0
        with pytest.raises(StreamFileError, match="another ingest is writing to it"):
            ingest.backfill()
        found = rows_of(tmp_path / "out", manifest_of(tmp_path / "out"))
        assert found == expected(world.events())


def test_a_folder_with_signs_of_patterns(spark: Any, tmp_path: Path) -> None:
    out = tmp_path / "a[1]{b,c}*"
    with DataStream.create(tmp_path / "stream.bin", version=3, system_id=7, sync="os") as stream:
        World(stream, 1, 8)
        ingest = Ingest(spark, {"path": str(tmp_path / "stream.bin")}, out)
        ingest.backfill()
        ingest.close()
    assert open_tables(spark, out)["blocks"].count() == 4


def test_duckdb_reads_what_the_manifest_names(spark: Any, tmp_path: Path) -> None:
    """The example of the page, in the folder of the tables."""
    page = (ROOT / "docs" / "SPARK_STREAMING.md").read_text()
    (example,) = re.findall(r"tables of spark ingest -->\n```python\n(.*?)```", page, re.DOTALL)
    with DataStream.create(tmp_path / "stream.bin", version=3, system_id=7, sync="os") as stream:
        world = World(stream, 1, 8)
        ingest = Ingest(spark, {"path": str(tmp_path / "stream.bin")}, tmp_path / "tables")
        ingest.backfill(chunk=10)
        stream.truncate(13)
        world.append(3)
        ingest.backfill()
        ingest.close()
        rows = expected(world.events())["blocks"]
    # What Spark writes meanwhile.
    half = tmp_path / "tables" / "blocks" / "_temporary" / "0" / "day=2023-11-14" / "range=1"
    half.mkdir(parents=True)
    (half / "part.parquet").write_bytes(b"PAR1")
    done = subprocess.run(
        [sys.executable, "-c", example], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{[(len(rows), max(row[1] for row in rows))]}\n"
