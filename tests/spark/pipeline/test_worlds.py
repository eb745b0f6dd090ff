"""The tables equal the stream, however it was changed and wherever the ingest was killed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from datastreamer import BlockingClient, DataStream, StreamServer, zkevm
from datastreamer.errors import UnknownEntry
from datastreamer.spark.pipeline import ingest as pipeline
from datastreamer.spark.pipeline import manifest
from datastreamer.spark.pipeline.folder import TableFolder
from datastreamer.spark.pipeline.ingest import Ingest
from datastreamer.spark.pipeline.tables import ParquetTables
from datastreamer.spark.stream.sources import GrowingFile
from tests.spark.pipeline.test_pipeline import put
from tests.spark.pipeline.worlds import (
    QUERIES,
    START,
    Rows,
    World,
    expected,
    manifest_of,
    rows_of,
)

KEEP = 8

Read = Callable[[Path, dict[str, Any]], Rows]


class Killed(BaseException):
    """In the place of a signal that ends the process."""


class Disturber:
    """Kills the ingest, or changes the stream, before or after a step of it. Before and after each
    step the tables are as they have to be for a reader."""

    def __init__(self, world: World, out: Path, patched: pytest.MonkeyPatch, read: Read) -> None:
        self.world = world
        self.out = out
        self.rows_of = read
        self.kills = self.changes = 0.0
        self.killed = self.changed = 0
        for owner, name in (
            (TableFolder, "put"),
            (TableFolder, "remove"),
            (ParquetTables, "save"),
            (ParquetTables, "clear"),
        ):
            patched.setattr(owner, name, self.around(getattr(owner, name)))

    def around(self, step: Callable[..., None]) -> Callable[..., None]:
        def disturbed(*arguments: Any) -> None:
            self.disturb()
            step(*arguments)
            if step.__name__ == "put":
                self.read()
            self.disturb()

        return disturbed

    def disturb(self) -> None:
        if self.world.choose.random() < self.changes:
            self.changed += 1
            self.world.change()
        if self.world.choose.random() < self.kills:
            self.killed += 1
            raise Killed

    def read(self) -> None:
        if not list((self.out / "_manifest").glob("*.json")):
            return
        found = manifest_of(self.out)
        done = found["ranges"][-1]["stop"] if found["ranges"] else 0
        assert self.world.is_a_prefix(self.rows_of(self.out, found), done)


def live(
    spark: Any,
    world: World,
    source: dict[str, str],
    out: Path,
    patched: pytest.MonkeyPatch,
    turns: int,
    read: Read = rows_of,
) -> Disturber:
    choose, disturber = world.choose, Disturber(world, out, patched, read)
    ingest = Ingest(spark, source, out)
    for _ in range(turns):
        patched.setattr(manifest, "GRACE", choose.choice([-1.0, 600.0]))
        disturber.kills, disturber.changes = choose.choice([0, 0.04]), choose.choice([0, 0.04])
        try:
            ingest.backfill(chunk=choose.randint(15, 60))
            if choose.random() < 0.3:
                ingest.compact(entries=choose.randint(10, 200))
            if not disturber.changes:
                assert read(out, manifest_of(out)) == expected(world.events())
        except Killed:
            ingest.close()
            ingest = Ingest(spark, source, out)
        if choose.random() < 0.7:
            world.change()
        else:
            world.append(choose.randint(1, 6))
    disturber.kills = disturber.changes = 0
    ingest.backfill()
    assert read(out, manifest_of(out)) == expected(world.events())
    ingest.close()
    return disturber


def in_world(
    spark: Any,
    kind: str,
    seed: int,
    folder: Path,
    patched: pytest.MonkeyPatch,
    turns: int,
    read: Read = rows_of,
) -> Disturber:
    path, out = folder / "stream.bin", folder / "out"
    patched.setattr(manifest, "_LEAST_PIECE", 4)
    patched.setattr(pipeline, "_SMALL", 4)
    if kind == "server":
        with StreamServer(
            path, host="127.0.0.1", port=0, version=3, system_id=7, sync="os", in_process=True
        ) as server:
            world, source = World(server.stream, seed, KEEP), f"127.0.0.1:{server.port}"
            return live(spark, world, {"server": source}, out, patched, turns, read)
    if kind == "foreign":
        patched.setattr(GrowingFile, "history", lambda _: None)
    with DataStream.create(path, version=3, system_id=7, sync="os") as stream:
        world = World(stream, seed, KEEP)
        return live(spark, world, {"path": str(path)}, out, patched, turns, read)


@pytest.mark.parametrize("kind", ["file", "server", "foreign"])
@pytest.mark.parametrize(
    ("seed", "turns"),
    [(0, 1), *(pytest.param(seed, 4, marks=pytest.mark.soak) for seed in range(20))],
)
def test_worlds(
    spark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, seed: int, turns: int
) -> None:
    in_world(spark, kind, seed, tmp_path, monkeypatch, turns)


# The same without Spark, which takes seconds for each range: rows are decoded here, and the files
# are of text.


def write_tables(self: Ingest, start: int, stop: int, name: str) -> None:
    client = self._options.get("server")
    if client is None:
        with DataStream.open(self._options["path"], read_only=True) as stream:
            entries = list(stream.entries(0, stop))
    else:
        with BlockingClient(client) as connection:
            entries = []
            while len(entries) < stop:
                batch = connection.batch_read(len(entries))
                entries += batch
                if not batch:
                    raise UnknownEntry(stop - 1, len(entries))
    rows = expected([zkevm.decode(entry, version=3) for entry in entries[:stop]])
    for table, found in rows.items():
        self._tables.save([row for row in found if row[0] >= start], table, name)  # type: ignore[arg-type]


def save(self: ParquetTables, rows: Any, table: str, name: str) -> None:
    self._folder.put(f"{table}/range={name}/rows", json.dumps(rows).encode())


def copy(tables: ParquetTables, names: list[str], stop: int, name: str) -> None:
    found = [{"name": each} for each in names]
    for table, rows in read_text(Path(tables._folder.url), {"ranges": found}).items():
        tables.save([row for row in rows if row[0] < stop], table, name)  # type: ignore[arg-type]


def read_text(out: Path, found: dict[str, Any]) -> Rows:
    names = [each["name"] for each in found["ranges"]]
    return {
        table: [
            tuple(row)
            for name in names
            for row in json.loads((out / table / f"range={name}" / "rows").read_text())
        ]
        for table in QUERIES
    }


def test_a_stream_that_changes_often(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Too often for the range that is wanted."""
    with DataStream.create(tmp_path / "stream.bin", version=3, system_id=7, sync="os") as stream:
        world = World(stream, 1, KEEP)
        world.append(40)

        def write(ingest: Ingest, start: int, stop: int, name: str) -> None:
            if stop - start > 10:
                stream.truncate(stream.total_entries - 1)
            write_tables(ingest, start, stop, name)

        monkeypatch.setattr(Ingest, "_write_tables", write)
        monkeypatch.setattr(ParquetTables, "save", save)
        monkeypatch.setattr(pipeline, "copy", copy)
        ingest = Ingest(None, {"path": str(stream.path)}, tmp_path / "out")
        ingest.backfill(chunk=40)
        assert ingest.done == stream.total_entries
        ingest.close()
        found = read_text(tmp_path / "out", manifest_of(tmp_path / "out"))
        assert found == expected(world.events())


def test_small_ranges_are_joined_by_themselves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, out = tmp_path / "stream.bin", tmp_path / "out"
    monkeypatch.setattr(pipeline, "_SMALL", 3)
    monkeypatch.setattr(Ingest, "_write_tables", write_tables)
    monkeypatch.setattr(ParquetTables, "save", save)
    monkeypatch.setattr(pipeline, "copy", copy)
    with DataStream.create(path, version=3, system_id=7, sync="os") as stream:
        put(stream, [(number, START, 0) for number in range(13)])
        events = [zkevm.decode(entry, version=3) for entry in stream.entries()]
    ingest = Ingest(None, {"path": str(path)}, out)
    ingest.backfill(chunk=2)
    ingest.close()
    found = manifest_of(out)
    assert [each["stop"] - each["start"] for each in found["ranges"]] == [24, 2]
    assert read_text(out, found) == expected(events)


@pytest.mark.parametrize("kind", ["file", "server", "foreign"])
@pytest.mark.parametrize(
    "first", [70, *(pytest.param(first, marks=pytest.mark.soak) for first in range(0, 70, 10))]
)
def test_many_worlds(tmp_path: Path, kind: str, first: int) -> None:
    killed = changed = 0
    count = 10 if first < 70 else 2
    for seed in range(first, first + count):
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(Ingest, "_write_tables", write_tables)
            patched.setattr(ParquetTables, "save", save)
            patched.setattr(pipeline, "copy", copy)
            folder = tmp_path / str(seed)
            folder.mkdir()
            seen = in_world(None, kind, seed, folder, patched, 12, read_text)
            killed, changed = killed + seen.killed, changed + seen.changed
    assert killed > count
    assert changed > count
