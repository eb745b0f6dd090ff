"""The reader in Java decompresses the pages of archives itself."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from datastreamer.storage.stream import DataStream
from tests.spark.native.comparing import frame, python_parts, rows_of
from tests.spark.native.fuzz import write_stream
from tests.spark.read.reading import Query
from tests.spark.read.test_archive import pushed


@pytest.mark.parametrize("table", ["entries", "blocks"])
def test_rows_are_those_of_the_file(native: Any, tmp_path: Path, table: str) -> None:
    path = tmp_path / "stream.bin"
    write_stream(path, random.Random(5), 6)
    options = {"table": table, "mode": "PERMISSIVE"}
    uri = pushed(path, tmp_path / "archive")
    expected = Query(path=str(path), **options).rows()
    for more in ({}, {"partitionBytes": "1m"}):
        found = frame(native, path=uri, **options, **more)
        assert rows_of(found) == expected
        assert python_parts(found) == 0


def test_a_damaged_object_is_an_error_of_one_line(native: Any, tmp_path: Path) -> None:
    path = tmp_path / "stream.bin"
    with DataStream.create(path) as stream:
        for number in range(40):
            stream.append(2, bytes([number]) * 100_000)
    uri = pushed(path, tmp_path / "archive")
    (first, *_) = sorted((tmp_path / "archive" / "s").iterdir())
    packed = bytearray(first.read_bytes())
    packed[60] ^= 1
    first.write_bytes(packed)
    with pytest.raises(Exception, match=r"(?s)pages? 0") as caught:
        rows_of(frame(native, path=uri, table="entries"))
    assert first.name in str(caught.value)


def test_a_stream_of_an_archive_grows(native: Any, tmp_path: Path) -> None:
    path, rows = tmp_path / "stream.bin", []
    with DataStream.create(path) as stream:
        stream.append(2, b"first")
        uri = pushed(path, tmp_path / "archive")
        read = native.readStream.format("datastream").option("path", uri).load()
        query = (
            read.writeStream.option("checkpointLocation", str(tmp_path / "checkpoint"))
            .foreachBatch(lambda batch, _: rows.extend(row.number for row in batch.collect()))
            .start()
        )
        try:
            query.processAllAvailable()
            for _ in range(3):
                stream.append(2, b"more")
            pushed(path, tmp_path / "archive")
            query.processAllAvailable()
        finally:
            query.stop()
    assert rows == [0, 1, 2, 3]
