"""A followed stream as Spark 4.0 and 4.1 call it, without start and limit."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from datastreamer import DataStream
from datastreamer.errors import UsageError
from datastreamer.spark.source import DatastreamSource
from datastreamer.spark.stream.unlimited import UnlimitedReader


@pytest.fixture
def growing(tmp_path: Path) -> Iterator[DataStream]:
    with DataStream.create(tmp_path / "growing.bin", version=2, system_id=7, sync="os") as stream:
        stream.append_many(1, [b"data"] * 10)
        yield stream


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch, growing: DataStream) -> Any:
    monkeypatch.setattr("datastreamer.spark.source.HAS_LIMITS", False)

    def made(**options: str) -> Any:
        source = DatastreamSource({"path": growing.path, **options})
        return source.streamReader(source.schema())

    return made


@pytest.mark.parametrize("changes", ["false", "true"])
def test_batches_follow_each_other(made: Any, growing: DataStream, changes: str) -> None:
    reader = made(changes=changes)
    assert isinstance(reader, UnlimitedReader)

    def batch(start: Any) -> tuple[Any, list[int]]:
        end = json.loads(json.dumps(reader.latestOffset()))
        parts = reader.partitions(start, end) if end != start else []
        name = "_entry" if changes == "true" else "number"
        rows = [row for part in parts for it in reader.read(part) for row in it.to_pylist()]
        return end, [row[name] for row in rows]

    offset = json.loads(json.dumps(reader.initialOffset()))
    offset, found = batch(offset)
    assert found == list(range(10))
    assert batch(offset) == (offset, [])
    growing.append(1, b"one more")
    offset, found = batch(offset)
    assert found == [10]
    reader.stop()
    # A query that is started again: Spark passes the end of its checkpoint as an empty range.
    growing.append(1, b"and one")
    reader = made(changes=changes)
    assert reader.partitions(offset, offset) == []
    assert batch(offset)[1] == [11]
    reader.stop()


@pytest.mark.parametrize("option", ["maxEntriesPerTrigger", "maxBytesPerTrigger"])
def test_limits_are_refused(made: Any, option: str) -> None:
    message = "cannot limit a batch of a source in Python: leave maxEntriesPerTrigger and"
    with pytest.raises(UsageError, match=message):
        made(**{option: "100"}).initialOffset()
