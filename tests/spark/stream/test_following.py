"""Files that grow and servers, followed batch by batch as Spark's driver does it."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from datastreamer import DataStream, StreamServer
from datastreamer.errors import (
    BadPosition,
    ConnectFailed,
    FileReplaced,
    HistoryChanged,
    StreamFileError,
    UnknownBookmark,
    UnknownEntry,
    UsageError,
)
from datastreamer.spark.stream.offsets import StreamOffset
from datastreamer.zkevm.bookmark_keys import BookmarkName, key_of
from tests.arrow.damage import damaged, write_pages
from tests.spark.read.reading import Query
from tests.spark.stream.following import Driver


def add(stream: DataStream, count: int, mark: str = "", size: int = 100) -> None:
    """`count` entries in one operation; their numbers and `mark` determine their data."""
    with stream.atomic_op() as op:
        for number in range(stream.total_entries, stream.total_entries + count):
            op.add_entry(1 + number % 3, f"{number}{mark}".encode().ljust(size, b"."))


def add_block(stream: DataStream, number: int) -> None:
    with stream.atomic_op() as op:
        op.add_bookmark(key_of(2, BookmarkName("block", number)))
        op.add_entry(2, b"a block")


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


Serve = Callable[..., StreamServer]


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Serve]:
    """``serve("name")``: a server of a stream with the entries of `growing`."""
    with ExitStack() as stack:

        def serve(name: str, port: int = 0) -> StreamServer:
            path = tmp_path / f"{name}.bin"
            new = not path.exists()
            server = stack.enter_context(
                StreamServer(
                    path,
                    host="127.0.0.1",
                    port=port,
                    version=2,
                    system_id=7,
                    sync="os",
                    index="memory",
                    in_process=True,
                )
            )
            if new:
                add(server.stream, 1000)
            return server

        yield serve


def at(server: StreamServer) -> str:
    return f"127.0.0.1:{server.port}"


# Where a query begins, how far a batch goes.


def test_batches_are_what_came_since(growing: DataStream) -> None:
    driver = Driver(path=growing.path)
    assert [row["number"] for row in driver.batch() or ()] == list(range(1000))
    assert driver.batch() is None
    add(growing, 50)
    assert [row["number"] for row in driver.batch() or ()] == list(range(1000, 1050))
    assert driver.reader.reportLatestOffset() == {"entry": 1050, "digest": ""}


def test_what_is_read_is_what_is_written(growing: DataStream) -> None:
    (rows,) = Driver(path=growing.path, partitionBytes=1).batches()
    written = [entry for batch in growing.batches(0) for entry in batch]
    assert [(row["number"], row["type"], row["data"]) for row in rows] == [
        (entry.number, entry.type, bytes(entry.data)) for entry in written
    ]


def test_limits(growing: DataStream) -> None:
    def sizes(**options: Any) -> list[int]:
        return [len(batch) for batch in Driver(path=growing.path, **options).batches()]

    assert sizes(maxEntriesPerTrigger=300) == [300, 300, 300, 100]
    assert sizes(maxBytesPerTrigger=117 * 400) == [400, 400, 200]
    assert sizes(maxBytesPerTrigger=1, startingOffset=998) == [1, 1]
    assert sizes(maxEntriesPerTrigger=300, maxBytesPerTrigger=117 * 400) == [300, 300, 300, 100]
    assert sizes(maxEntriesPerTrigger=500, maxBytesPerTrigger=117 * 400) == [400, 400, 200]
    driver = Driver(path=growing.path, maxEntriesPerTrigger=300)
    driver.batch()
    assert driver.all_there_is()["entry"] == 1000, "Spark may ask for all, whatever the limit"


def test_limits_in_bytes_go_over_pages(growing: DataStream) -> None:
    add(growing, 30000)
    sizes = [len(rows) for rows in Driver(path=growing.path, maxBytesPerTrigger="1m").batches()]
    assert sum(sizes) == 31000
    assert all(8950 <= size <= 8963 for size in sizes[:3])


def test_a_batch_has_parts_for_several_cores(growing: DataStream) -> None:
    add(growing, 100, size=(1 << 20) - 17)
    driver = Driver(path=growing.path)
    start = driver.offset = driver.reader.initialOffset()
    assert len(driver.reader.partitions(start, driver.planned())) == 3


def test_a_query_begins_at_its_starting_entry(growing: DataStream) -> None:
    add_block(growing, 5)
    for start, first in {"earliest": 0, "990": 990, "block:5": 1000, "1002": 1002}.items():
        found = Driver(path=growing.path, startingOffset=start).numbers()
        assert found == list(range(first, 1002))


def test_latest_is_what_comes_from_now_on(growing: DataStream) -> None:
    driver = Driver(path=growing.path, startingOffset="latest")
    assert driver.batch() is None
    add(growing, 5)
    assert driver.numbers() == list(range(1000, 1005))


def test_what_is_available_now_is_fixed(growing: DataStream) -> None:
    driver = Driver(path=growing.path, maxEntriesPerTrigger=600)
    driver.reader.prepareForTriggerAvailableNow()
    add(growing, 50)
    assert [len(batch) for batch in driver.batches()] == [600, 400]


@pytest.mark.parametrize(
    "options, error, message",
    [
        ({"endingOffset": 5}, UsageError, "endingOffset is for spark.read"),
        ({"startingOffset": 1001}, UnknownEntry, "no entry 1001: the stream holds 0 to 999"),
        ({"startingOffset": "batch:9"}, UnknownBookmark, "no bookmark batch:9"),
    ],
)
def test_what_cannot_be_followed_is_said(
    growing: DataStream, options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        Driver(path=growing.path, **options).batch()


def test_a_folder_is_not_followed(growing: DataStream) -> None:
    with pytest.raises(UsageError, match="only one file can be followed"):
        Driver(path=Path(growing.path).parent).batch()


def test_a_checkpoint_of_something_else_is_an_error(growing: DataStream) -> None:
    for message in ({}, {"entry": -1, "digest": ""}, {"entry": 1}, {"entry": "1", "digest": ""}):
        with pytest.raises(BadPosition, match="is not an offset in a stream"):
            Driver(message, path=growing.path).batch()
    message = StreamOffset(3, "00").as_json()
    assert StreamOffset.from_json(message) == StreamOffset(3, "00")


# Selections.

THIRD = {"types": "1", "prefixes": "0x30,0:0x39"}
"""Of `add`'s entries, those of type 1 whose number begins with 0 or 9."""


def third(numbers: Iterable[int]) -> list[int]:
    return [n for n in numbers if n % 3 == 0 and str(n)[0] in "09"]


def test_offsets_go_on_over_what_is_not_selected(growing: DataStream, serve: Serve) -> None:
    server = serve("served")
    for place in ({"path": growing.path}, {"server": at(server), "partitionBytes": "8k"}):
        driver = Driver(**place, **THIRD, maxEntriesPerTrigger=100)
        batches = driver.batches()
        assert len(batches) == 10
        assert [] in batches
        assert [row["number"] for rows in batches for row in rows] == third(range(1000))
        assert driver.offset is not None
        assert driver.offset["entry"] == 1000
        assert driver.offset == Driver(**place).planned_from_start()


def test_a_checkpoint_goes_on_with_another_selection(growing: DataStream, serve: Serve) -> None:
    """From there on: what came before does not come again."""
    driver = Driver(path=growing.path, **THIRD)
    assert driver.numbers() == third(range(1000))
    server = serve("served")
    for stream in (growing, server.stream):
        add(stream, 60)
    for place in ({"path": growing.path}, {"server": at(server)}):
        assert Driver(driver.offset, **place, types="2").numbers() == list(range(1000, 1060, 3))
        assert Driver(driver.offset, **place).numbers() == list(range(1000, 1060))
        again = Driver(Driver(**place).planned_from_start(), **place, **THIRD)
        assert again.numbers() == []


def test_a_truncation_is_noticed_whatever_is_selected(growing: DataStream, serve: Serve) -> None:
    server = serve("served")
    followed = [
        (growing, Driver(path=growing.path, types="77"), StreamFileError),
        (server.stream, Driver(server=at(server), types="77"), HistoryChanged),
    ]
    for stream, driver, error in followed:
        assert driver.numbers() == []
        stream.truncate(990)
        add(stream, 30, "another history")
        with pytest.raises(error, match="the entries before 1000 are not those that"):
            driver.batch()


# Data that is lost.


def test_a_truncated_stream_is_an_error(growing: DataStream) -> None:
    driver = Driver(path=growing.path)
    driver.batch()
    growing.truncate(600)
    message = (
        "growing.bin: the stream was truncated: it holds 600 entries, and the query has read "
        "1000. Start again with a new checkpoint, or set failOnDataLoss to false"
    )
    for follower in (driver, Driver(driver.offset, path=growing.path)):
        with pytest.raises(StreamFileError, match=message):
            follower.batch()


def test_a_stream_that_was_truncated_and_grew_again_is_an_error(growing: DataStream) -> None:
    driver = Driver(path=growing.path)
    driver.batch()
    growing.truncate(999)
    add(growing, 1, "another history")
    again = Driver(driver.offset, path=growing.path)
    add(growing, 200)
    for follower in (driver, again):
        with pytest.raises(StreamFileError, match="the entries before 1000 are not those that"):
            follower.batch()


def test_entries_truncated_before_they_were_read_are_no_loss(growing: DataStream) -> None:
    driver = Driver(path=growing.path)
    driver.batch()
    add(growing, 100)
    growing.truncate(1050)
    add(growing, 10, "another history")
    assert driver.numbers() == list(range(1000, 1060))


def test_a_batch_that_was_planned_is_of_the_same_entries_or_an_error(growing: DataStream) -> None:
    driver = Driver(path=growing.path)
    driver.batch()
    add(growing, 100)
    start, end = driver.offset, driver.planned()
    assert start is not None
    again = Driver(start, path=growing.path)
    assert [row["number"] for row in again.rows(start, end)] == list(range(1000, 1100))
    growing.truncate(1050)
    add(growing, 100, "another history")
    with pytest.raises(StreamFileError, match="the entries before 1100 are not those that"):
        Driver(start, path=growing.path).rows(start, end)
    growing.truncate(1050)
    with pytest.raises(StreamFileError, match="it holds 1050 entries, and the query has read"):
        Driver(start, path=growing.path).rows(start, end)
    allowed = Driver(start, path=growing.path, failOnDataLoss="false")
    assert len(allowed.rows(start, end)) == 50


def test_a_part_that_is_read_after_a_truncation_is_an_error(growing: DataStream) -> None:
    driver = Driver(path=growing.path)
    first = driver.reader.initialOffset()
    driver.offset = first
    (part,) = driver.reader.partitions(first, driver.planned())
    growing.truncate(500)
    with pytest.raises(StreamFileError, match="truncated or changed since this query was planned"):
        list(driver.reader.read(part))


def test_another_stream_under_the_name_is_an_error(growing: DataStream, tmp_path: Path) -> None:
    driver = Driver(path=growing.path)
    driver.batch()
    with DataStream.create(tmp_path / "other.bin", version=2, system_id=8, sync="os") as other:
        add(other, 2000)
    shutil.move(tmp_path / "other.bin", growing.path)
    with pytest.raises(StreamFileError, match="the stream was replaced: it is version 2, sys"):
        driver.batch()
    with pytest.raises(FileReplaced):
        growing.close()


def test_a_file_that_went_is_an_error(growing: DataStream) -> None:
    driver = Driver(path=growing.path)
    driver.batch()
    Path(growing.path).unlink()
    with pytest.raises(StreamFileError, match=r"growing\.bin: no such file"):
        driver.batch()
    with pytest.raises(FileReplaced):
        growing.close()


def test_a_query_that_allows_losses_continues_with_what_there_is(growing: DataStream) -> None:
    driver = Driver(path=growing.path, failOnDataLoss="false")
    driver.batch()
    growing.truncate(600)
    assert driver.numbers() == []
    add(growing, 20, "new")
    assert driver.numbers() == list(range(600, 620))
    growing.truncate(500)
    add(growing, 200, "another history")
    assert driver.numbers() == list(range(620, 700))


def test_a_loss_that_is_allowed_ends_what_is_available_now(growing: DataStream) -> None:
    driver = Driver(path=growing.path, failOnDataLoss="false")
    driver.batch()
    growing.truncate(600)
    again = Driver(driver.offset, path=growing.path, failOnDataLoss="false")
    again.reader.prepareForTriggerAvailableNow()
    assert again.batches() == [[]]


@pytest.mark.parametrize("start", [465, 477])
@pytest.mark.parametrize("mode", ["PERMISSIVE", "DROPMALFORMED"])
def test_a_loss_is_reported_once_in_any_batches(tmp_path: Path, mode: str, start: int) -> None:
    path = tmp_path / "pages.bin"
    write_pages(path)
    options = {"path": path, "mode": mode, "startingOffset": start}
    with damaged(path, 95, "noise") as lost:
        assert list(lost) == [475, 476, 477, 478, 479]
        due = Query(**options).rows()
        for limit in ({}, {"maxEntriesPerTrigger": 2}, {"maxBytesPerTrigger": "500k"}):
            batches = Driver(**options, **limit).batches()
            assert [row for rows in batches for row in rows] == due


# Servers.


def test_a_server_is_followed(serve: Serve, growing: DataStream) -> None:
    server = serve("served")
    driver = Driver(server=at(server), partitionBytes="32k")
    assert driver.numbers() == list(range(1000))
    add(server.stream, 70)
    assert driver.numbers() == list(range(1000, 1070))
    add(growing, 70)
    of_file = Driver(driver.offset, path=growing.path)
    assert of_file.batch() is None, "a checkpoint is the stream's, wherever it is read"


def test_a_server_is_followed_from_a_place_and_within_limits(serve: Serve) -> None:
    server = serve("served")
    add_block(server.stream, 5)
    assert Driver(server=at(server), startingOffset="block:5").numbers() == [1000, 1001]
    sizes = [len(rows) for rows in Driver(server=at(server), maxBytesPerTrigger="40k").batches()]
    assert sum(sizes) == 1002
    assert all(300 <= size <= 400 for size in sizes[:2])
    with pytest.raises(UnknownBookmark, match="no bookmark block:6"):
        Driver(server=at(server), startingOffset="block:6").batch()


def test_a_server_may_be_away_for_a_while(serve: Serve) -> None:
    server = serve("served")
    driver = Driver(server=at(server), retryFor="forever")
    driver.batch()
    server.close()
    assert driver.batch() is None
    back = serve("served", server.port)
    add(back.stream, 30)
    while not (rows := driver.batch()):
        pass
    assert [row["number"] for row in rows] == list(range(1000, 1030))


def test_a_server_that_is_away_is_waited_for_where_a_batch_is_due(serve: Serve) -> None:
    server = serve("served")
    driver = Driver(server=at(server))
    driver.batch()
    start = driver.offset
    assert start is not None
    add(server.stream, 30)
    end = driver.planned()
    server.close()
    again = Driver(start, server=at(server), retryFor=0)
    with pytest.raises(ConnectFailed, match=at(server)):
        again.rows(start, end)
    serve("served", server.port)
    assert len(again.rows(start, end)) == 30


def test_a_server_that_is_away_for_too_long_is_an_error(serve: Serve) -> None:
    server = serve("served")
    driver = Driver(server=at(server), retryFor=0)
    driver.batch()
    server.close()
    with pytest.raises(ConnectFailed, match=at(server)):
        driver.batch()
    patient = Driver(driver.offset, server=at(server), retryFor=0.3)
    with pytest.raises(ConnectFailed, match=at(server)):
        list(iter(patient.batch, []))


def test_a_server_that_was_started_anew_is_not_away(serve: Serve) -> None:
    server = serve("served")
    driver = Driver(server=at(server), retryFor=0)
    driver.batch()
    server.close()
    add(serve("served", server.port).stream, 30)
    assert driver.numbers() == list(range(1000, 1030))


def test_another_server_takes_over(serve: Serve) -> None:
    first, second = serve("first"), serve("second")
    driver = Driver(server=f"{at(first)},{at(second)}")
    driver.batch()
    add(first.stream, 30)
    add(second.stream, 30)
    first.close()
    assert driver.numbers() == list(range(1000, 1030))


def test_a_server_with_another_history_is_an_error(serve: Serve) -> None:
    server = serve("served")
    driver = Driver(server=at(server))
    driver.batch()
    server.stream.truncate(500)
    add(server.stream, 600, "another history")
    with pytest.raises(HistoryChanged, match=f"{at(server)}: the stream was replaced: the entr"):
        driver.batch()
    again = Driver(driver.offset, server=at(server), failOnDataLoss="false")
    assert again.numbers() == list(range(1000, 1100))


def test_a_batch_of_a_server_that_was_changed_meanwhile_is_an_error(serve: Serve) -> None:
    """Before it is handed out, wherever in the stream that was."""
    server = serve("served")
    driver = Driver(server=at(server))
    start = driver.offset = driver.reader.initialOffset()
    (part,) = driver.reader.partitions(start, driver.planned())
    assert len(list(driver.reader.read(part))) > 0
    server.stream.update_entry(5, 3, b"updated".ljust(100))
    with pytest.raises(HistoryChanged, match="truncated or changed since this query was planned"):
        list(driver.reader.read(part))
    assert driver.numbers() == list(range(1000)), "a batch that is planned anew"
