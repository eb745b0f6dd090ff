"""The changes of a stream, as a query follows them: without Spark."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from datastreamer import DataStream, StreamServer
from datastreamer.errors import BadPosition, ConnectionLost, StreamFileError, UsageError
from datastreamer.spark.options import read_options
from datastreamer.spark.source import DatastreamSource
from tests.spark.read.reading import Query
from tests.spark.stream.change_worlds import HOW, run
from tests.spark.stream.following import Driver, Rows, made_by


def add(stream: DataStream, count: int, mark: str = "", size: int = 100) -> None:
    """`count` entries in one operation; their numbers and `mark` determine their data."""
    with stream.atomic_op() as op:
        for number in range(stream.total_entries, stream.total_entries + count):
            op.add_entry(1 + number % 3, f"{number}{mark}".encode().ljust(size, b"."))


@pytest.fixture
def growing(tmp_path: Path) -> Iterator[DataStream]:
    """A stream of 1,000 entries, open for writing."""
    path = tmp_path / "growing.bin"
    with DataStream.create(path, version=2, system_id=7, sync="os", index="memory") as stream:
        add(stream, 1000)
        yield stream


@pytest.fixture(autouse=True)
def stopped() -> Iterator[None]:
    yield
    Driver.stop_all()


def follow(offset: dict[str, Any] | None = None, **options: Any) -> Driver:
    return Driver(offset, changes="true", **options)


def changes(rows: Rows | None) -> tuple[list[int], list[int]]:
    """The numbers of the entries that are deleted, and of those that are inserted."""
    deletes, inserts = (
        [row["_entry"] for row in rows or () if row["_change"] == change]
        for change in ("delete", "insert")
    )
    assert len(deletes) + len(inserts) == len(rows or ())
    return deletes, inserts


NUMBERS = list(range(2000))


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize(
    "seed", [*range(4), *(pytest.param(seed, marks=pytest.mark.soak) for seed in range(4, 20))]
)
def test_the_changes_give_the_stream_in_random_worlds(how: str, seed: int, tmp_path: Path) -> None:
    run(seed, tmp_path, how)


def test_the_columns_of_changes(growing: DataStream) -> None:
    driver = follow(path=growing.path, types="2")
    rows = driver.batch() or []
    assert {(row["_change"], row["_epoch"]) for row in rows} == {("insert", growing.epoch)}
    assert all(row["_entry"] == row["number"] and row["data"] for row in rows)
    growing.truncate(997)
    assert driver.batch() == [
        {"number": None, "type": None, "data": None, "_change": "delete", "_epoch": epoch} | entry
        for epoch in (growing.epoch,)
        for entry in ({"_entry": 997}, {"_entry": 998}, {"_entry": 999})
    ]
    assert driver.batch() is None


def test_a_truncation_gives_deletes_then_what_replaced_them(growing: DataStream) -> None:
    driver = follow(path=growing.path)
    assert changes(driver.batch()) == ([], NUMBERS[:1000])
    growing.truncate(900)
    add(growing, 150, "another history")
    assert changes(driver.batch()) == (NUMBERS[900:1000], NUMBERS[900:1050])
    assert driver.batch() is None
    add(growing, 1)
    assert changes(driver.batch()) == ([], [1050])


def test_an_update_in_place_is_a_delete_and_an_insert(growing: DataStream) -> None:
    driver = follow(path=growing.path)
    driver.batch()
    growing.update_entry(5, 3, b"updated".ljust(100))
    growing.update_entry(6, 1, b"updated".ljust(100))
    growing.update_entry(700, 2, b"updated".ljust(100))
    add(growing, 2)
    rows = driver.batch()
    assert changes(rows) == ([5, 6, 700], [5, 6, 700, 1000, 1001])
    assert [row["data"][:7] for row in rows or () if row["data"]][:3] == [b"updated"] * 3
    assert driver.batch() is None


def test_more_changes_than_the_file_names(growing: DataStream) -> None:
    driver = follow(path=growing.path, startingOffset=100)
    driver.batch()
    for number in range(200, 217):
        growing.update_entry(number, 1 + number % 3, b"updated".ljust(100))
    assert changes(driver.batch()) == (NUMBERS[100:1000], NUMBERS[100:1000])


def test_a_server_names_more_changes(tmp_path: Path) -> None:
    with StreamServer(
        tmp_path / "served.bin", host="127.0.0.1", port=0, sync="os", in_process=True
    ) as server:
        add(server.stream, 1000)
        driver = follow(server=f"127.0.0.1:{server.port}")
        driver.batch()
        for number in range(200, 260):
            server.stream.update_entry(number, 1 + number % 3, b"updated".ljust(100))
        assert changes(driver.batch()) == (NUMBERS[200:260], NUMBERS[200:260])
        server.stream.truncate(990)
        add(server.stream, 10, "another history")
        assert changes(driver.batch()) == (NUMBERS[990:1000], NUMBERS[990:1000])
        assert driver.batch() is None
        Driver.stop_all()


def test_marks_find_the_common_ancestor_without_epochs(tmp_path: Path) -> None:
    """A backfill of one batch has marks within, so that little is deleted for a short reorg."""
    with StreamServer(
        tmp_path / "served.bin", host="127.0.0.1", port=0, sync="os", in_process=True
    ) as server:
        add(server.stream, 100_000, size=10)
        driver = follow(server=f"127.0.0.1:{server.port}", batchReads="false")
        assert len(driver.batch() or ()) == 100_000
        server.stream.truncate(99_990)
        add(server.stream, 50, "another history")
        deletes, inserts = changes(driver.batch())
        kept = deletes[0]
        assert 99_990 - 256 <= kept <= 99_990
        assert deletes == list(range(kept, 100_000))
        assert inserts == list(range(kept, 100_040))
        for _ in range(3):
            add(server.stream, 40)
            driver.batch()
        server.stream.truncate(70_000)
        deletes, inserts = changes(driver.batch())
        assert 100_160 - 2 * 30_160 <= deletes[0] <= 70_000
        assert inserts == list(range(deletes[0], 70_000))
        Driver.stop_all()


def test_a_history_that_comes_back_without_epochs(tmp_path: Path) -> None:
    """Marks of entries that were replaced are forgotten, and so is what an offset no longer has."""
    with StreamServer(
        tmp_path / "served.bin", host="127.0.0.1", port=0, sync="os", in_process=True
    ) as server:
        place = {"server": f"127.0.0.1:{server.port}", "batchReads": "false"}
        driver = follow(**place)
        for count in (900, 50, 50):
            add(server.stream, count)
            driver.batch()
        server.stream.truncate(900)
        start, end = driver.offset, driver.planned()
        assert start is not None
        add(server.stream, 100)
        assert changes(driver.rows(start, end)) == (NUMBERS[900:1000], [])
        driver.offset = end
        assert changes(driver.batch()) == ([], NUMBERS[900:1000])

        add(server.stream, 50)
        assert changes(driver.batch()) == ([], NUMBERS[1000:1050])
        server.stream.truncate(900)
        add(server.stream, 200, "another history")
        assert changes(driver.batch()) == (NUMBERS[900:1050], NUMBERS[900:1100])
        server.stream.truncate(900)
        add(server.stream, 100)
        assert changes(driver.batch()) == (NUMBERS[900:1100], NUMBERS[900:1000])
        Driver.stop_all()


def test_marks_are_few_and_rise_with_their_distance(growing: DataStream) -> None:
    driver = follow(path=growing.path)
    for _ in range(150):
        driver.batch()
        add(growing, 3)
    assert driver.offset is not None
    end, numbers = (
        driver.offset["entry"],
        [number for number, _ in driver.offset["delivered"]["marks"]],
    )
    assert numbers == sorted(numbers)
    assert len(numbers) <= end.bit_length()
    assert all(end - b >= (end - a) // 4 for a, b in itertools.pairwise(numbers))


def test_a_batch_that_was_planned_before_a_truncation(growing: DataStream) -> None:
    driver = follow(path=growing.path)
    driver.batch()
    add(growing, 100)
    start, end = driver.offset, driver.planned()
    assert start is not None
    growing.truncate(950)
    add(growing, 10, "another history")
    again = follow(start, path=growing.path)
    assert changes(again.rows(start, end)) == (NUMBERS[950:1000], NUMBERS[950:960])
    again.offset = end
    assert changes(again.batch()) == (NUMBERS[950:1100], NUMBERS[950:960])
    assert again.batch() is None


def test_a_batch_is_not_read_from_a_server_that_lags_the_one_it_was_planned_on(
    tmp_path: Path,
) -> None:
    """Its old entries would stay in the table once the other server is back."""
    with ExitStack() as stack:
        first, second = (
            stack.enter_context(
                StreamServer(tmp_path / name, host="127.0.0.1", port=0, sync="os", in_process=True)
            )
            for name in ("first.bin", "second.bin")
        )
        for server in (first, second):
            add(server.stream, 1000)
        place = {"server": f"127.0.0.1:{first.port},127.0.0.1:{second.port}", "retryFor": "0.2"}
        driver = follow(**place)
        driver.batch()
        start = driver.offset
        first.stream.truncate(990)
        add(first.stream, 10, "another history")
        end = driver.planned()
        first.close()
        again = follow(start, **place)
        assert start is not None
        with pytest.raises(ConnectionLost, match="not the one that this batch was planned for"):
            again.rows(start, end)
        second.stream.truncate(990)
        add(second.stream, 10, "another history")
        deletes, inserts = changes(again.rows(start, end))
        assert deletes == inserts
        assert deletes[-11:] == NUMBERS[989:1000]
        again.offset = end
        assert changes(again.batch()) == ([], []), "the history of the second server"
        assert again.batch() is None
        Driver.stop_all()


def test_a_truncation_in_the_middle_of_a_part_does_not_end_it(growing: DataStream) -> None:
    add(growing, 40, size=200_000)
    driver = follow(path=growing.path)
    start = driver.offset = driver.reader.initialOffset()
    end = driver.planned()
    (part,) = driver.reader.partitions(start, end)
    batches = driver.reader.read(part)
    rows = next(batches).to_pylist()
    growing.truncate(1020)
    add(growing, 5, "another history")
    rows += [row for batch in batches for row in batch.to_pylist()]
    deletes, inserts = changes(rows)
    assert (deletes, inserts) == ([], NUMBERS[:1025])
    driver.offset = end
    assert changes(driver.batch()) == (NUMBERS[1020:1040], NUMBERS[1020:1025])


def test_what_precedes_the_start_is_never_a_row(growing: DataStream) -> None:
    driver = follow(path=growing.path, startingOffset=990)
    assert changes(driver.batch()) == ([], NUMBERS[990:1000])
    growing.update_entry(3, 1, b"updated".ljust(100))
    growing.truncate(900)
    assert changes(driver.batch()) == (NUMBERS[990:1000], [])
    add(growing, 50)
    assert driver.batch() is None
    add(growing, 50)
    assert changes(driver.batch()) == ([], NUMBERS[990:1000])


def test_limits_bound_the_inserts(growing: DataStream) -> None:
    driver = follow(path=growing.path, maxEntriesPerTrigger=400)
    assert [changes(rows)[1] for rows in driver.batches()] == [
        NUMBERS[:400],
        NUMBERS[400:800],
        NUMBERS[800:1000],
    ]
    growing.truncate(100)
    add(growing, 500, "another history")
    assert [changes(rows) for rows in driver.batches()] == [
        (NUMBERS[100:1000], NUMBERS[100:500]),
        ([], NUMBERS[500:600]),
    ]


def test_a_stream_that_was_replaced(growing: DataStream, tmp_path: Path) -> None:
    driver = follow(path=growing.path)
    driver.batch()
    with DataStream.create(tmp_path / "other.bin", version=2, system_id=8, sync="os") as other:
        add(other, 5)
    growing.close()
    (tmp_path / "other.bin").rename(growing.path)
    with pytest.raises(StreamFileError, match=r"system id 8.*set failOnDataLoss to false"):
        driver.batch()
    again = follow(driver.offset, path=growing.path, failOnDataLoss="false")
    assert changes(again.batch()) == (NUMBERS[:1000], NUMBERS[:5])


def test_a_copy_of_the_stream_continues(growing: DataStream, tmp_path: Path) -> None:
    """Another file with the same entries has no change to report."""
    driver = follow(path=growing.path)
    driver.batch()
    with DataStream.create(tmp_path / "copy.bin", version=2, system_id=7, sync="os") as copy:
        add(copy, 1010)
        again = follow(driver.offset, path=copy.path)
        assert changes(again.batch()) == ([], NUMBERS[1000:1010])


def test_a_checkpoint_without_changes_is_refused(growing: DataStream) -> None:
    driver = Driver(path=growing.path)
    driver.batch()
    add(growing, 1)
    with pytest.raises(BadPosition, match="the checkpoint is of a query without it"):
        follow(driver.offset, path=growing.path).batch()
    offset = follow(path=growing.path).planned_from_start()
    add(growing, 1)
    assert Driver(offset, path=growing.path).numbers() == [1001], "and the other way it goes on"
    offset["delivered"]["marks"] = [["x"]]
    with pytest.raises(BadPosition, match="is not an offset in a stream"):
        follow(offset, path=growing.path).batch()


def test_the_option_is_refused_where_there_are_no_changes(growing: DataStream) -> None:
    with pytest.raises(UsageError, match=r"option changes is for spark\.readStream"):
        Query(path=growing.path, changes="true")
    with pytest.raises(UsageError, match=r"option changes: the reader in Java .* has no changes"):
        read_options({"path": growing.path, "changes": "true", "reader": "native"})
    with pytest.raises(UsageError, match="option changes: 'yes' is not true or false"):
        read_options({"path": growing.path, "changes": "yes"})


def test_chosen_columns(growing: DataStream) -> None:
    source = DatastreamSource({"path": growing.path, "changes": "true"})
    for schema, message in (
        (
            "data BINARY NOT NULL, _entry BIGINT",
            "the column data is binary, and may be null: leave NOT NULL",
        ),
        ("data BINARY, _entry INT", "the column _entry is bigint, and"),
        ("data BINARY, _other INT", "has no column '_other'"),
    ):
        with pytest.raises(UsageError, match=message):
            made_by(source, _parsed(schema)).initialOffset()
    reader = made_by(source, _parsed("_change STRING, data BINARY"))
    start = reader.initialOffset()
    end = reader.latestOffset(start, reader.getDefaultReadLimit())
    (part,) = reader.partitions(start, end)
    (batch,) = reader.read(part)
    assert batch.schema.names == ["_change", "data"]
    assert batch.num_rows == 1000
    reader.stop()


def _parsed(schema: str) -> Any:
    from pyspark.sql.types import BinaryType, IntegerType, LongType, StringType, StructType

    types = {"BINARY": BinaryType(), "INT": IntegerType(), "BIGINT": LongType()}
    found = StructType()
    for column in schema.split(", "):
        name, kind, *constraint = column.split(" ")
        found.add(name, types.get(kind, StringType()), not constraint)
    return found
