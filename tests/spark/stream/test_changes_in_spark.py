"""A feed of changes by Spark itself, with a table that its batches are applied to."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from pyspark.errors import StreamingQueryException

from datastreamer import DataStream, StreamServer
from datastreamer.spark import native_jar
from datastreamer.spark.stream.merge import last_changes, with_values
from datastreamer.spark.versions import HAS_LIMITS
from tests.spark.stream.change_sink import forget_commit
from tests.spark.stream.change_worlds import Stream


class Sink:
    """A query whose batches are applied to a table in memory: deletes, then inserts."""

    def __init__(self, spark: Any, checkpoint: Path, **options: str) -> None:
        self._checkpoint = checkpoint
        self._rows = spark.readStream.format("datastream").options(changes="true", **options).load()
        self.table: dict[int, tuple[int, bytes]] = {}
        self.deletes = 0
        self._fail = False

    def _apply(self, frame: Any, _: int) -> None:
        rows = frame.collect()
        for row in rows:
            if row["_change"] == "delete":
                self.table.pop(row["_entry"], None)
                self.deletes += 1
        for row in rows:
            if row["_change"] == "insert":
                self.table[row["_entry"]] = row.type, bytes(row.data)
        if self._fail:
            raise ValueError("killed in the middle of a batch")

    def run(self, *, fail: bool = False) -> None:
        self._fail = fail
        query = (
            self._rows.writeStream.foreachBatch(self._apply)
            .option("checkpointLocation", str(self._checkpoint))
            .trigger(availableNow=True)
            .start()
        )
        if fail:
            with pytest.raises(StreamingQueryException, match="killed in the middle of a batch"):
                query.awaitTermination()
        else:
            query.awaitTermination()


@pytest.mark.parametrize("served", [False, True], ids=["file", "server"])
def test_the_table_is_the_stream(spark: Any, tmp_path: Path, served: bool) -> None:
    chance = random.Random(f"changes {served}")
    with StreamServer(
        tmp_path / "stream.bin", host="127.0.0.1", port=0, sync="os", in_process=True
    ) as server:
        world = Stream(server.stream, chance, "entries")
        place = {"server": f"127.0.0.1:{server.port}"} if served else {"path": server.stream.path}
        limits = {"maxEntriesPerTrigger": "300"} if HAS_LIMITS else {}
        sink = Sink(spark, tmp_path / "checkpoint", **limits, **place)
        while server.stream.total_entries < 100:
            world.act(updates=False)
        for at in range(6):
            sink.run(fail=at in (2, 4))
            if at in (1, 3):
                forget_commit(tmp_path / "checkpoint")
            for _ in range(4):
                world.act(updates=True)
            server.stream.truncate(server.stream.total_entries - 5)
        sink.run()
        assert sink.table == world.rows(0)
        assert sink.deletes >= 5


@pytest.mark.skipif(native_jar() is None, reason="the reader in Java was not built: make jar")
def test_the_reader_in_java_leaves_changes_to_python(spark: Any, tmp_path: Path) -> None:
    path = tmp_path / "stream.bin"
    with DataStream.create(path, version=3, sync="os", index="memory") as stream:
        with stream.atomic_op() as op:
            op.add_entries(2, [b"one", b"two"])
        sink = Sink(spark, tmp_path / "checkpoint", path=str(path), reader="auto")
        sink.run()
        stream.truncate(1)
        sink.run()
    assert sink.table == {0: (2, b"one")}
    with pytest.raises(Exception, match="option changes: the reader in Java"):
        Sink(spark, tmp_path / "other", path=str(path), reader="native").run()


COLUMNS = "number BIGINT, _change STRING, _epoch BIGINT, _entry BIGINT"


def test_deletes_get_their_values_from_the_table(spark: Any) -> None:
    table = spark.createDataFrame(
        [(50, 1, 0), (51, 1, 1), (52, 1, 2), (53, 2, 3), (54, None, 4)],
        "number BIGINT, _epoch BIGINT, _entry BIGINT",
    )
    found = [(None, "delete", 2, at) for at in (1, 2, 3, 9)] + [(None, "delete", None, 4)]
    batch = spark.createDataFrame([*found, (99, "insert", 2, 2)], COLUMNS)
    full = [tuple(row) for row in with_values(batch, table).collect()]
    assert sorted(full, key=lambda row: (row[1], row[3])) == [
        (51, "delete", 2, 1),
        (52, "delete", 2, 2),
        (54, "delete", None, 4),
        (99, "insert", 2, 2),
    ]


def test_an_entry_has_one_row_in_a_merge(spark: Any) -> None:
    batch = spark.createDataFrame(
        [(None, "delete", 2, 1), (None, "delete", 2, 2), (7, "insert", 2, 1)], COLUMNS
    )
    rows = sorted(map(tuple, last_changes(batch).collect()), key=lambda row: row[3])
    assert rows == [(7, "insert", 2, 1), (None, "delete", 2, 2)]
