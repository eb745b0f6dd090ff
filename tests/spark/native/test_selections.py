"""The options `types` and `prefixes` of the reader in Java: the rows of the source in Python."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from pyspark.errors import PySparkException

from datastreamer import DataStream
from datastreamer.format import page_start
from datastreamer.spark.failures import reason
from datastreamer.spark.versions import HAS_LIMITS
from tests.spark.conftest import Make
from tests.spark.native.comparing import assert_equal, frame, python_parts, rows_of
from tests.spark.native.fuzz import damaged_copy, write_stream
from tests.spark.native.test_following import follow
from tests.spark.read.reading import Query
from tests.spark.read.test_selections import SELECTIONS, random_entries, selected
from tests.spark.read.test_selections import rows_of as plain

BLOCKS = {"types": "2,9", "prefixes": "0x08,1:0x00"}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("stream") / "stream.bin"
    write_stream(made, random.Random(2), 5)
    return made


def test_the_rows_of_an_oracle(native: Any, make: Make) -> None:
    entries = random_entries(4, 900, (0, 1, 2, 3, 4, 60, 5_000, 65_001, 65_000))
    path = make((it.type, it.data) for it in entries)
    for options, where in SELECTIONS:
        found = frame(native, path=str(path), partitionBytes="1m", **options)
        rows = [(row.number, row.type, bytes(row.data)) for row in found.collect()]
        assert rows == selected(entries, where)
        assert found.count() == len(rows)
        assert python_parts(found) == 0
        numbers = found.where("number > 400").select("number").collect()
        assert [row.number for row in numbers] == [it[0] for it in rows if it[0] > 400]
    some = frame(native, path=str(path), startingOffset="33", endingOffset="600", types="16")
    assert len(some.collect()) == len(selected(entries[33:600], [16]))


def test_a_limit_is_of_rows(native: Any, path: Path) -> None:
    found = frame(native, path=str(path), **BLOCKS)
    rows = rows_of(found)
    assert rows == Query(path=path, **BLOCKS).rows()
    assert 20 < len(rows) < len(Query(path=path).rows()) / 3
    assert rows_of(found.limit(20)) == rows[:20]


def test_a_count_reads_the_pages(native: Any, path: Path, tmp_path: Path) -> None:
    copy = tmp_path / "damaged.bin"
    content = bytearray(path.read_bytes())
    content[page_start(2) + 9 + 7] ^= 1
    copy.write_bytes(content)
    assert frame(native, path=str(copy)).count() == len(Query(path=path).rows())
    for reader in ("native", "python"):
        options = {"path": str(copy), "types": "77", "reader": reader}
        with pytest.raises(PySparkException) as raised:
            native.read.format("datastream").options(**options).load().count()
        assert "at byte" in reason(raised.value)
    assert frame(native, path=str(path), types="77").count() == 0


@pytest.mark.parametrize("mode", ["PERMISSIVE", "DROPMALFORMED", "FAILFAST"])
def test_random_damage(native: Any, path: Path, tmp_path: Path, mode: str) -> None:
    paths = []
    for seed in range(100, 112):
        paths.append(tmp_path / f"{seed}.bin")
        damaged_copy(path, paths[-1], random.Random(seed))
    part_bytes = "128m" if mode == "FAILFAST" else "2m"
    assert_equal(native, paths, mode=mode, partitionBytes=part_bytes, **BLOCKS)


def test_a_followed_file(native: Any, tmp_path: Path) -> None:
    """Either reader continues where the other ended, over batches without a row."""
    path = tmp_path / "growing.bin"
    options = {"types": "16", "prefixes": "2:0x01"}
    with DataStream.create(path, version=3, sync="os", index="memory") as stream:
        for seed, reader in enumerate(("native", "python", "native")):
            made = random_entries(seed, 120, (2, 3, 60))
            stream.append_many(16, [it.data for it in made])
            stream.append_many(5, [b""] * 100)
            limits = {"maxEntriesPerTrigger": "50"} if reader == "native" or HAS_LIMITS else {}
            query = follow(native, path, tmp_path, reader=reader, **options, **limits)
            assert not limits or 0 in [each.numInputRows for each in query.recentProgress]
    rows = native.read.parquet(str(tmp_path / "rows")).orderBy("number").collect()
    found = [(row.number, row.type, bytes(row.data)) for row in rows]
    assert found == plain(Query(path=path, types="16", prefixes="2:0x01")) != []


def test_wrong_options(native: Any, path: Path) -> None:
    for options, message in (
        ({"table": "blocks", "types": "2"}, "types and prefixes are for the table entries"),
        ({"prefixes": "0x01"}, "option prefixes: a prefix is compared in entries of a type"),
    ):
        for reader in ("native", "python"):
            reading = native.read.format("datastream").options(reader=reader, **options)
            with pytest.raises(PySparkException) as raised:
                reading.load(str(path))
            assert message in reason(raised.value)
