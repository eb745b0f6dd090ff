"""The reader in Java gives the rows and the messages of the source in Python, row by row.

Over the streams of the reference implementation, and over whole and damaged ones.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from pyspark.errors import PySparkException

from datastreamer.arrow.tables import NAMES
from datastreamer.zkevm import encode, fixed
from tests.arrow.damage import HOW, damaged, write_pages
from tests.conftest import Golden
from tests.spark.conftest import Make
from tests.spark.native.comparing import assert_equal, frame, python_parts, rows_of
from tests.spark.native.fuzz import damaged_copy, write_stream
from tests.spark.read.reading import Query

TOLERANT = ("PERMISSIVE", "DROPMALFORMED")
TABLES = ("entries", "blocks", "transactions", "bookmarks")


@pytest.mark.parametrize("mode", ["FAILFAST", "PERMISSIVE"])
def test_streams_of_the_reference(native: Any, golden: Golden, mode: str) -> None:
    assert_equal(native, [golden.unpack(name) for name in golden.names()], mode=mode)


@pytest.fixture(scope="module")
def streams(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """One of four pages, one of version 1, and one that fits in a page."""
    folder = tmp_path_factory.mktemp("streams")
    chance = random.Random(1)
    for name, pages, version in (("four", 4, 3), ("old", 2, 1), ("short", 1, 3)):
        write_stream(folder / f"{name}.bin", chance, pages, version)
    return [folder / f"{name}.bin" for name in ("four", "old", "short")]


@pytest.mark.parametrize("table", NAMES)
def test_all_tables(native: Any, streams: list[Path], table: str) -> None:
    for path in streams[::2]:
        found = frame(native, path=str(path), table=table)
        assert rows_of(found) == Query(path=path, table=table).rows()
        assert python_parts(found) == 0


def test_fixed_layouts(native: Any, make: Make) -> None:
    """Version 1: every table, with columns that one layout has and another lacks."""
    events = [
        fixed.StartL2Block(1, 2, 3, 4, 5, b"l" * 32, b"g" * 32, b"c" * 20, 9, 137),
        fixed.StartL2Block(1, 2, 3, None, None, None, b"g" * 32, b"c" * 20, 9, None),
        fixed.L2Tx(255, True, b"s" * 32, b"tx"),
        fixed.L2Tx(7, False, None, b""),
        fixed.EndL2Block(7, b"h" * 32, b"s" * 32),
    ]
    entries = [
        *(encode(event, version=1) for event in events),
        (0xB0, bytes(9)),
        (0xB0, b"\x01" + bytes(7) + b"\x09"),
    ]
    path = make(entries, version=1)
    for table in NAMES:
        found = frame(native, path=str(path), table=table)
        assert rows_of(found) == Query(path=path, table=table).rows()
        assert python_parts(found) == 0
    bad = make([*entries, (1, b"short")], version=1, name="bad.bin")
    for mode in TOLERANT:
        assert_equal(native, [bad], table="blocks", mode=mode)


@pytest.mark.parametrize(
    "data",
    [
        b"\x08",
        b"\x08" + b"\xff" * 11,
        b"\x12\x7f",
        b"\x32\x8a" + b"\x80" * 5 + b"\x00",
        b"\x3b\x3c",
        b"\x08\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01",
        b"\x72\x03\x0a\x01\xff",
    ],
)
def test_data_that_is_no_message(native: Any, make: Make, data: bytes) -> None:
    path = make([(2, b"\x08\x05"), (2, data), (2, b"")])
    for mode in (*TOLERANT, "FAILFAST"):
        assert_equal(native, [path], table="blocks", mode=mode)


@pytest.mark.parametrize(
    "data",
    [
        b"\x08\x85\x80\x80\x80\x80\x80\x80\x80\x80\x00",
        b"\x7d1234",
        b"\x81\x0112345678",
        b"\x82\x01\x02ab",
        b"\x08\x01\x08\x02",
        b"\x72\x04\x10\x01\x0a\x00",
        b"\x43\x44",
    ],
)
def test_unusual_messages(native: Any, make: Make, data: bytes) -> None:
    """Long varints, fields of a later version, repeated fields, groups."""
    path = make([(2, b"\x08\x05"), (2, data), (2, b"")])
    assert_equal(native, [path], table="blocks")


@pytest.mark.soak
@pytest.mark.parametrize("how", HOW)
def test_damage_of_each_kind(native: Any, hundred: Path, how: str) -> None:
    with damaged(hundred, 50, how):
        for mode in (*TOLERANT, "FAILFAST"):
            assert_equal(native, [hundred], mode=mode, partitionBytes="40m")


@pytest.fixture(scope="module")
def hundred(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("hundred") / "hundred.bin"
    write_pages(path)
    return path


def _fuzz(spark: Any, source: Path, folder: Path, seeds: range, **options: Any) -> None:
    paths = []
    for seed in seeds:
        path = folder / f"{seed}.bin"
        damaged_copy(source, path, random.Random(seed))
        paths.append(path)
    try:
        # With several parts it is by chance of which damage a failing query reports.
        part_bytes = "128m" if options["mode"] == "FAILFAST" else "2m"
        assert_equal(spark, paths, partitionBytes=part_bytes, **options)
    finally:
        for path in paths:
            path.unlink()
            path.with_name(f"{path.name}.sums").unlink(missing_ok=True)


@pytest.mark.parametrize("mode", TOLERANT)
def test_random_damage(native: Any, streams: list[Path], tmp_path: Path, mode: str) -> None:
    _fuzz(native, streams[0], tmp_path, range(8), mode=mode)


def test_random_damage_and_a_filter(native: Any, streams: list[Path], tmp_path: Path) -> None:
    numbers = range(150, 400)
    _fuzz(native, streams[0], tmp_path, range(62, 70), mode="PERMISSIVE", numbers=numbers)


def test_random_damage_to_events(native: Any, streams: list[Path], tmp_path: Path) -> None:
    _fuzz(native, streams[0], tmp_path, range(30, 38), mode="PERMISSIVE", table="transactions")


def test_random_damage_ends_a_query(native: Any, streams: list[Path], tmp_path: Path) -> None:
    _fuzz(native, streams[0], tmp_path, range(50, 56), mode="FAILFAST")


def _fuzz_narrowed(spark: Any, source: Path, folder: Path, seeds: range) -> int:
    """A filter in mode FAILFAST: each entry once, or an error. Returns how many queries raised."""
    total, raised = len(Query(path=source).rows()), 0
    for seed in seeds:
        chance = random.Random(seed)
        path = folder / "damaged.bin"
        damaged_copy(source, path, chance)
        first, last = sorted(chance.sample(range(total), 2))
        if chance.random() < 0.3:
            last = total - 1
        query = frame(spark, path=str(path), partitionBytes=chance.choice(("1m", "128m")))
        try:
            rows = rows_of(query.where(f"number >= {first} AND number <= {last}"))
        except PySparkException:
            raised += 1
        else:
            assert [row["number"] for row in rows] == list(range(first, last + 1)), seed
            readable = Query(path=path, mode="DROPMALFORMED").rows()
            python = {(row["number"], row["data"]) for row in readable}
            assert all((row["number"], row["data"]) in python for row in rows), seed
        path.unlink()
        path.with_name(f"{path.name}.sums").unlink(missing_ok=True)
    return raised


def test_random_damage_and_a_filter_that_narrows(
    native: Any, streams: list[Path], tmp_path: Path
) -> None:
    assert 2 < _fuzz_narrowed(native, streams[0], tmp_path, range(10)) < 10


@pytest.mark.soak
def test_much_random_damage_and_a_filter_that_narrows(
    native: Any, streams: list[Path], tmp_path: Path
) -> None:
    _fuzz_narrowed(native, streams[0], tmp_path, range(10_000, 11_500))


@pytest.mark.soak
@pytest.mark.parametrize("begin", range(1_000, 9_000, 500))
def test_much_random_damage(native: Any, streams: list[Path], tmp_path: Path, begin: int) -> None:
    for turn, first in enumerate(range(begin, begin + 500, 50)):
        table = TABLES[turn % len(TABLES)]
        mode = TOLERANT[begin // 500 % 2]
        source = streams[turn % 3 == 2]
        numbers = range(100, 500) if turn % 2 else None
        seeds = range(first, first + 50)
        _fuzz(native, source, tmp_path, seeds, mode=mode, table=table, numbers=numbers)
