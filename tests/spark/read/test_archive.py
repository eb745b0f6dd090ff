"""Archives as tables: the rows are those of the stream file."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from datastreamer.archive.archived_file import ArchivedFile
from datastreamer.archive.writer import ArchiveWriter
from datastreamer.errors import DatastreamerError
from datastreamer.storage.objects.store import Store
from datastreamer.storage.stream import DataStream
from tests.spark.native.fuzz import write_stream
from tests.spark.read.reading import Query


def pushed(path: Path, folder: Path, pages: int = 2) -> str:
    """The URL of an archive with the file's entries, as a path of a table."""
    url = folder.as_uri()
    source = ArchivedFile(path)
    try:
        ArchiveWriter(source, Store(url), segment_pages=pages).publish()
    finally:
        source.close()
    return f"archive:{url}"


@pytest.fixture
def stream(tmp_path: Path) -> Path:
    path = tmp_path / "stream.bin"
    write_stream(path, random.Random(7), 5)
    return path


@pytest.mark.parametrize("table", ["entries", "blocks", "transactions"])
def test_the_rows_are_those_of_the_file(stream: Path, tmp_path: Path, table: str) -> None:
    uri = pushed(stream, tmp_path / "archive")
    options = {"table": table, "mode": "PERMISSIVE"}
    for given in ({}, {"startingOffset": "100", "endingOffset": "300"}, {"partitionBytes": "1m"}):
        expected = Query(path=str(stream), **options, **given).rows()
        assert Query(path=uri, **options, **given).rows() == expected


def test_a_generation(stream: Path, tmp_path: Path) -> None:
    before = Query(path=str(stream)).rows()
    uri = pushed(stream, tmp_path / "archive")
    with DataStream.open(stream) as opened:
        opened.truncate(opened.total_entries // 2)
    pushed(stream, tmp_path / "archive")
    assert Query(path=uri).rows() == Query(path=str(stream)).rows()
    assert Query(path=uri, generation="1").rows() == before
    with pytest.raises(DatastreamerError, match="no manifest of generation 9"):
        Query(path=uri, generation="9").rows()


def test_what_is_no_archive(tmp_path: Path) -> None:
    with pytest.raises(DatastreamerError, match="no archive there"):
        Query(path=f"archive:{tmp_path.as_uri()}").rows()
    with pytest.raises(DatastreamerError, match="is not the URL of an archive"):
        Query(path="archive:nothing").rows()
