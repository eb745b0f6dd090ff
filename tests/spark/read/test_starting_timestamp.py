"""The option `startingTimestamp`: of files and servers, of batches and streaming queries."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from datastreamer import DataStream, StreamServer
from datastreamer.errors import TimeUnknown, UsageError
from datastreamer.spark.native import plans
from datastreamer.spark.options import read_options
from datastreamer.spark.read.files import entry_at
from datastreamer.spark.read.paths import FileLocation
from datastreamer.spark.read.schemas import table_schema
from datastreamer.storage.summaries import keeper
from tests.spark.read.reading import Query
from tests.spark.stream.following import Driver

BEGIN = 1_764_400_000_000


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Five entries each ten seconds, a hundred times: some pages."""
    clock = SimpleNamespace(time=lambda: now / 1000)
    monkeypatch.setattr(keeper, "time", clock)
    made = tmp_path / "timed.bin"
    with DataStream.create(made, version=3, sync="os", index="memory") as stream:
        for turn in range(100):
            now = BEGIN + turn * 10_000
            with stream.atomic_op() as op:
                op.add_entries(9, [bytes(10_000)] * 5)
    return made


@pytest.fixture(params=["file", "server"])
def place(request: pytest.FixtureRequest, path: Path) -> Iterator[dict[str, str]]:
    if request.param == "file":
        yield {"path": str(path)}
        return
    with StreamServer(path, host="127.0.0.1", port=0) as server:
        yield {"server": f"127.0.0.1:{server.port}"}


@pytest.fixture(autouse=True)
def stopped() -> Iterator[None]:
    yield
    Driver.stop_all()


def first_of(rows: Callable[[str], list[int]], ms: int) -> list[int]:
    """The first row for each form of a time."""
    texts = [str(ms), datetime.fromtimestamp(ms / 1000, UTC).isoformat()]
    found = [rows(text) for text in texts]
    assert found[0] == found[1]
    return found[0][:1]


def test_the_first_entry_at_or_after_a_time(place: dict[str, str]) -> None:
    def batch(text: str) -> list[int]:
        return [row["number"] for row in Query(**place, startingTimestamp=text).rows()]

    def stream(text: str) -> list[int]:
        return Driver(**place, startingTimestamp=text).numbers()

    for rows in (batch, stream):
        assert first_of(rows, BEGIN - 5_000) == [0]
        for turn in (1, 7, 50, 99):
            at = BEGIN + turn * 10_000
            assert first_of(rows, at) == [turn * 5]
            assert first_of(rows, at - 1_000) == [turn * 5]
        assert rows(str(BEGIN + 2_000_000)) == []
    both = Query(**place, startingTimestamp=str(BEGIN + 20_000), endingOffset="12").rows()
    assert [row["number"] for row in both] == [10, 11]
    until = Query(**place, startingOffset="8", endingTimestamp=str(BEGIN + 20_000)).rows()
    assert [row["number"] for row in until] == [8, 9]


def test_the_reader_in_java_asks_for_it(path: Path) -> None:
    options = {"path": str(path), "startingTimestamp": str(BEGIN + 500_000)}
    schema = table_schema(read_options(options), system_id=False).json()
    request = {"options": options, "schema": schema, "table": schema, "plan": None, "tasks": 2}
    plan = plans.scan({**request, "filters": []})
    assert {(part["start"], part["end"]) for part in plan["parts"]} == {(250, 500)}
    assert plan["rows"] == 250


def test_times_that_are_not_known(place: dict[str, str], path: Path) -> None:
    path.with_name("timed.bin.pages").unlink()
    for ask in (Query, _start):
        with pytest.raises(TimeUnknown, match="no entry's time is known"):
            ask(**place, startingTimestamp=str(BEGIN + 5))


def _start(**options: Any) -> None:
    Driver(**options).batch()


def test_what_is_no_time() -> None:
    for text in ("yesterday", "7", "2026-13-01"):
        with pytest.raises(UsageError, match=r"option startingTimestamp: .* is not a time"):
            read_options({"path": "a", "startingTimestamp": text})
    for offset in ("5", "latest", "earliest"):
        with pytest.raises(UsageError, match="startingOffset or startingTimestamp, not both"):
            read_options({"path": "a", "startingTimestamp": "2026-11-29", "startingOffset": offset})
    with pytest.raises(UsageError, match="give startingOffset"):
        entry_at(FileLocation("b.bin", "mock://a/b.bin"), 1, 5)
