"""The tables equal the stream, however it was changed and wherever the ingest was killed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from datastreamer import DataStream, StreamServer
from datastreamer.spark.pipeline import ingest as pipeline
from datastreamer.spark.pipeline import manifest
from datastreamer.spark.pipeline.folder import TableFolder
from datastreamer.spark.pipeline.ingest import Ingest
from datastreamer.spark.pipeline.source import Seen, Source
from datastreamer.spark.pipeline.tables import ParquetTables
from tests.spark.pipeline.worlds import World, expected, manifest_of, rows_of

KEEP = 8


class Killed(BaseException):
    """In the place of a signal that ends the process."""


class Disturber:
    """Kills the ingest, or changes the stream, before or after a step of it. Before and after each
    step the tables are as they have to be for a reader."""

    def __init__(self, world: World, out: Path, patched: pytest.MonkeyPatch) -> None:
        self.world = world
        self.out = out
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
        assert self.world.is_a_prefix(rows_of(self.out, found), done)


def live(
    spark: Any,
    world: World,
    source: dict[str, str],
    out: Path,
    patched: pytest.MonkeyPatch,
    turns: int,
) -> None:
    choose, disturber = world.choose, Disturber(world, out, patched)
    ingest = Ingest(spark, source, out)
    for _ in range(turns):
        patched.setattr(manifest, "GRACE", choose.choice([-1.0, 600.0]))
        disturber.kills, disturber.changes = choose.choice([0, 0.04]), choose.choice([0, 0.04])
        try:
            ingest.backfill(chunk=choose.randint(5, 60))
            if choose.random() < 0.3:
                ingest.compact(entries=choose.randint(10, 200))
            if not disturber.changes:
                assert rows_of(out, manifest_of(out)) == expected(world.events())
        except Killed:
            ingest.close()
            ingest = Ingest(spark, source, out)
        if choose.random() < 0.7:
            world.change()
        else:
            world.append(choose.randint(1, 6))
    disturber.kills = disturber.changes = 0
    ingest.backfill()
    assert rows_of(out, manifest_of(out)) == expected(world.events())
    ingest.close()


def no_history(look: Callable[[Source], Seen]) -> Callable[[Source], Seen]:
    return lambda source: look(source)._replace(history=None)


@pytest.mark.parametrize("kind", ["file", "server", "foreign"])
@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(seed, marks=pytest.mark.soak) for seed in range(1, 68))]
)
def test_worlds(
    spark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, seed: int
) -> None:
    path, out = tmp_path / "stream.bin", tmp_path / "out"
    monkeypatch.setattr(manifest, "_LEAST_PIECE", 4)
    monkeypatch.setattr(pipeline, "_SMALL", 4)
    if kind == "server":
        with StreamServer(
            path, host="127.0.0.1", port=0, version=3, system_id=7, sync="os", in_process=True
        ) as server:
            source = {"server": f"127.0.0.1:{server.port}"}
            live(spark, World(server.stream, seed, KEEP), source, out, monkeypatch, 5)
        return
    if kind == "foreign":
        monkeypatch.setattr(Source, "look", no_history(Source.look))
    with DataStream.create(path, version=3, system_id=7, sync="os") as stream:
        live(spark, World(stream, seed, KEEP), {"path": str(path)}, out, monkeypatch, 5)
