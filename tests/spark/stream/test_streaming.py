"""`spark.readStream.format("datastream")`: files that grow and servers, followed batch by batch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from pyspark.errors import StreamingQueryException

from datastreamer import DataStream, StreamServer
from datastreamer.spark import lag
from datastreamer.spark.failures import reason


def add(stream: DataStream, count: int, mark: str = "", size: int = 100) -> None:
    """`count` entries in one operation; their numbers and `mark` determine their data."""
    with stream.atomic_op() as op:
        for number in range(stream.total_entries, stream.total_entries + count):
            op.add_entry(1 + number % 3, f"{number}{mark}".encode().ljust(size, b"."))


@pytest.fixture
def growing(tmp_path: Path) -> Iterator[DataStream]:
    """A stream of 1,000 entries, open for writing."""
    with DataStream.create(tmp_path / "growing.bin", version=2, system_id=7, sync="os") as stream:
        add(stream, 1000)
        yield stream


class Following:
    """A streaming query whose batches are kept, as lists of (number, data)."""

    def __init__(self, spark: Any, checkpoint: Path, options: dict[str, Any]) -> None:
        self.batches: list[list[tuple[int, bytes]]] = []
        reader = spark.readStream.format("datastream")
        for name, value in options.items():
            reader = reader.option(name, value)
        self._writer = (
            reader.load()
            .select("number", "data")
            .writeStream.foreachBatch(self._keep)
            .option("checkpointLocation", str(checkpoint))
        )

    def _keep(self, frame: Any, _: int) -> None:
        self.batches.append(sorted((row.number, bytes(row.data)) for row in frame.collect()))

    @property
    def numbers(self) -> list[int]:
        return [number for batch in self.batches for number, _ in batch]

    def all_available(self) -> Any:
        """Run up to what is there now; gives the query, which has ended."""
        query = self._writer.trigger(availableNow=True).start()
        query.awaitTermination()
        return query

    @contextmanager
    def running(self) -> Iterator[Any]:
        query = self._writer.start()
        try:
            yield query
        finally:
            query.stop()


@pytest.fixture
def follow(spark: Any, tmp_path: Path) -> Any:
    def follow(checkpoint: str = "checkpoint", **options: Any) -> Following:
        return Following(spark, tmp_path / checkpoint, options)

    return follow


def test_a_file_is_followed_as_it_grows(growing: DataStream, follow: Any) -> None:
    found = follow(path=growing.path)
    with found.running() as query:
        query.processAllAvailable()
        assert found.numbers == list(range(1000))
        for _ in range(3):
            add(growing, 50)
            query.processAllAvailable()
        assert found.numbers == list(range(1150))
        assert [data for batch in found.batches for _, data in batch] == [
            bytes(entry.data) for batch in growing.batches(0) for entry in batch
        ]
        assert lag(query.lastProgress) == 0


def test_a_query_continues_at_its_checkpoint(growing: DataStream, follow: Any) -> None:
    found = follow(path=growing.path, maxEntriesPerTrigger=300)
    query = found.all_available()
    assert [len(batch) for batch in found.batches] == [300, 300, 300, 100]
    assert found.numbers == list(range(1000))
    assert [lag(progress) for progress in query.recentProgress[:4]] == [700, 400, 100, 0]
    add(growing, 10)
    again = follow(path=growing.path)
    again.all_available()
    assert again.numbers == list(range(1000, 1010))
    growing.truncate(600)
    with pytest.raises(StreamingQueryException) as raised:
        follow(path=growing.path).all_available()
    reported = str(raised.value)
    assert "growing.bin: the stream was truncated: it holds 600 entries" in reported
    assert "the query has read 1010. Start again with a new checkpoint" in reported


def test_a_server_is_followed(follow: Any, tmp_path: Path) -> None:
    path = tmp_path / "served.bin"
    with StreamServer(path, host="127.0.0.1", port=0, index="memory", sync="os") as server:
        add(server.stream, 1000)
        found = follow(server=f"127.0.0.1:{server.port}", partitionBytes="64k")
        with found.running() as query:
            query.processAllAvailable()
            add(server.stream, 70)
            query.processAllAvailable()
        assert found.numbers == list(range(1070))


def test_lag_is_of_our_sources_alone() -> None:
    assert lag(None) is None
    assert lag({"sources": []}) is None
    assert lag({"sources": [{"endOffset": "7", "latestOffset": "9"}]}) is None


def test_the_last_line_of_a_refusal_is_the_reason(
    spark: Any, growing: DataStream, tmp_path: Path
) -> None:
    following = Following(
        spark, tmp_path / "checkpoint", {"path": growing.path, "endingOffset": "10"}
    )
    with pytest.raises(StreamingQueryException) as failed:
        following.all_available()
    assert "UnboundLocalError" not in str(failed.value)
    assert reason(failed.value) == ("endingOffset is for spark.read: a streaming query has no end")
