"""Spark's Real-Time Mode: rows reach the sink as their entries are committed."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from inspect import signature
from pathlib import Path
from typing import Any

import pytest
from pyspark.errors import StreamingQueryException
from pyspark.sql.streaming import DataStreamWriter

from datastreamer import DataStream, StreamServer
from datastreamer.errors import StreamFileError
from datastreamer.spark.options import read_options
from datastreamer.spark.read.schemas import table_schema
from datastreamer.spark.stream.live import NEXT, live_rows
from datastreamer.zkevm import Sequencer
from tests.spark.native.real_time import start, written

SHORTEST = "spark.sql.streaming.realTimeMode.minBatchDuration"


@pytest.fixture
def real_time(native: Any) -> Iterator[Any]:
    """The session, with batches of seconds; skips where Spark lacks the mode."""
    if "realTime" not in signature(DataStreamWriter.trigger).parameters:
        pytest.skip(f"PySpark {native.version} has no Real-Time Mode")
    native.conf.set(SHORTEST, "1s")
    yield native
    native.conf.unset(SHORTEST)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[StreamServer]:
    with StreamServer(
        tmp_path / "stream.bin", host="127.0.0.1", port=0, version=3, in_process=True, sync="os"
    ) as server:
        yield server


def add(stream: DataStream, first: int, count: int) -> None:
    for number in range(first, first + count):
        with stream.atomic_op() as op:
            op.add_entry(1 + number % 2, b"%d" % number)


def until(query: Any, happened: Callable[[], object]) -> None:
    while not happened():
        if (error := query.exception()) is not None:
            raise error
        assert query.isActive
        time.sleep(0.05)


def wait_for(query: Any, path: Path, count: int) -> list[int]:
    until(query, lambda: len(written(path)) >= count)
    return [number for _, number in written(path)]


def is_recorded(query: Any, entry: int, checkpoint: Path) -> bool:
    """Whether a batch begins at this entry, and the one before is in the checkpoint. Spark reports
    a batch before it records that, and repeats it after a stop in between."""
    progress = query.lastProgress
    if progress is None or f'"entry": {entry}' not in str(progress.sources[0].startOffset):
        return False
    return (checkpoint / "commits" / str(progress.batchId - 1)).exists()


@pytest.mark.parametrize("source", ["file", "server"])
def test_rows_come_within_a_batch(
    real_time: Any, server: StreamServer, tmp_path: Path, source: str
) -> None:
    """In the first batch, in a later one, and after a restart of the query."""
    frame = real_time.readStream.format("datastream").option("types", "2")
    if source == "file":
        frame = frame.load(str(tmp_path / "stream.bin"))
    else:
        frame = frame.options(server=f"127.0.0.1:{server.port}", reader="native").load()
    rows, checkpoint = tmp_path / "rows.txt", tmp_path / "checkpoint"
    add(server.stream, 0, 40)
    query = start(frame, rows, checkpoint)
    try:
        wait_for(query, rows, 20)
        add(server.stream, 40, 20)
        wait_for(query, rows, 30)
        until(query, lambda: len(query.recentProgress) >= 2)
        add(server.stream, 60, 20)
        assert wait_for(query, rows, 40) == list(range(1, 80, 2))
        until(query, lambda: is_recorded(query, 80, checkpoint))
    finally:
        query.stop()
    query = start(frame, rows, checkpoint)
    try:
        add(server.stream, 80, 2)
        assert wait_for(query, rows, 41) == list(range(1, 82, 2))
    finally:
        query.stop()


def test_java_follows_a_server_in_this_mode_only(
    native: Any, server: StreamServer, tmp_path: Path
) -> None:
    add(server.stream, 0, 1)
    frame = native.readStream.format("datastream")
    frame = frame.options(server=f"127.0.0.1:{server.port}", reader="native").load()
    writer = frame.writeStream.format("noop").option("checkpointLocation", str(tmp_path / "c"))
    with pytest.raises(Exception, match="Java follows a server in Real-Time Mode only"):
        writer.trigger(availableNow=True).start().awaitTermination()


@pytest.mark.parametrize("source", ["file", "server"])
def test_record_batches_say_where_to_continue(
    server: StreamServer, tmp_path: Path, source: str
) -> None:
    with Sequencer(server.stream).batch() as batch, batch.block(timestamp=1, hash=b"h" * 32):
        pass
    place = {"path": str(tmp_path / "stream.bin")}
    if source == "server":
        place = {"server": f"127.0.0.1:{server.port}"}
    options = read_options({**place, "table": "blocks"})
    schema = table_schema(options, system_id=False)
    found = live_rows(options, type(schema)(schema.fields[1:3]), 0)
    first = next(found)
    assert first.schema.names == ["number", "batch_number", "entry_number"]
    total = server.stream.total_entries
    while source == "file" and int(first.schema.metadata[NEXT]) < total:
        first = next(found)
    if source == "file":
        # A server does not send an entry that is no row.
        add(server.stream, 0, 1)
        nothing = next(found)
        assert nothing.num_rows == 0
        assert int(nothing.schema.metadata[NEXT]) == total + 1
    found.close()


@pytest.mark.parametrize("allowed", ["true", "false"])
def test_a_query_that_begins_after_a_loss(real_time: Any, tmp_path: Path, allowed: str) -> None:
    """With `failOnDataLoss` false it continues with what there is, and its offset with it."""
    path, rows, checkpoint = tmp_path / "stream.bin", tmp_path / "rows.txt", tmp_path / "checkpoint"
    frame = real_time.readStream.format("datastream").option("failOnDataLoss", allowed)
    with DataStream.create(path, version=2, sync="os") as stream:
        add(stream, 0, 6)
        frame = frame.load(str(path))
        query = start(frame, rows, checkpoint)
        try:
            wait_for(query, rows, 6)
            until(query, lambda: is_recorded(query, 6, checkpoint))
        finally:
            query.stop()
        stream.truncate(4)
        query = start(frame, rows, checkpoint)
        try:
            if allowed == "true":
                with pytest.raises(StreamingQueryException, match="it holds 4 entries"):
                    query.awaitTermination()
                return
            until(query, lambda: is_recorded(query, 4, checkpoint))
            add(stream, 10, 3)
            assert wait_for(query, rows, 9) == [0, 1, 2, 3, 4, 5, 4, 5, 6]
        finally:
            query.stop()


def test_a_query_that_waits_for_rows_can_be_stopped(real_time: Any, tmp_path: Path) -> None:
    """Long before its batch ends: Spark interrupts the task."""

    def is_waiting() -> bool:
        threads = real_time._jvm.java.lang.Thread.getAllStackTraces().keySet()
        return any(thread.getName() == "datastreamer live rows" for thread in threads)

    path = tmp_path / "stream.bin"
    DataStream.create(path, version=2).close()
    frame = real_time.readStream.format("datastream").load(str(path))
    query = start(frame, tmp_path / "rows.txt", tmp_path / "checkpoint", batch="1 hour")
    try:
        until(query, is_waiting)
    finally:
        query.stop()
    end = time.monotonic() + 60
    while is_waiting():
        assert time.monotonic() < end
        time.sleep(0.05)


def test_entries_that_change_end_the_rows(tmp_path: Path) -> None:
    path = tmp_path / "stream.bin"
    with DataStream.create(path, version=2, sync="os") as stream:
        add(stream, 0, 5)
        options = read_options({"path": str(path)})
        found = live_rows(options, table_schema(options, system_id=False), 0)
        assert next(found).num_rows == 5
        stream.truncate(3)
        with pytest.raises(
            StreamFileError, match="entries that were read, before 5, or later ones changed"
        ):
            next(found)
