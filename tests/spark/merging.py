"""A table that a feed of changes is merged into, in a world of truncations, updates and kills."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from pyspark.errors import StreamingQueryException

from datastreamer import DataStream
from datastreamer.spark import apply_changes
from tests.spark.stream.change_sink import forget_commit
from tests.spark.stream.change_worlds import Stream


def merge_and_check(spark: Any, folder: Path, format: str, table: str, seed: int) -> None:
    """The table is the stream at the end, and each row that left it was given with its values."""
    chance = random.Random(f"{format} {seed}")
    path, checkpoint = folder / "stream.bin", folder / "checkpoint"
    rows = None
    given: list[tuple[str, int, bytes]] = []
    fails = False

    def then(changes: Any, _: int) -> None:
        given.extend((it["_change"], it["_entry"], bytes(it.data)) for it in changes.collect())

    def apply(frame: Any, batch: int) -> None:
        apply_changes(frame, batch, table, then)
        if fails:
            raise ValueError("killed after the MERGE")

    with DataStream.create(path, version=3, sync="os", index="memory") as stream:
        world = Stream(stream, chance, "entries")
        while stream.total_entries < 50:
            world.act(updates=True)
        rows = spark.readStream.format("datastream").options(changes="true").load(str(path))
        empty = spark.createDataFrame([], rows.drop("_change").schema)
        empty.write.format(format).saveAsTable(table)
        for at in range(6):
            fails = at in (1, 3)
            query = (
                rows.writeStream.foreachBatch(apply)
                .option("checkpointLocation", str(checkpoint))
                .trigger(availableNow=True)
                .start()
            )
            try:
                query.awaitTermination()
            except StreamingQueryException as error:
                if not fails or "killed after the MERGE" not in str(error):
                    raise
            if at == 2:
                forget_commit(checkpoint)
            if at < 4:
                for _ in range(3):
                    world.act(updates=True)
                stream.truncate(stream.total_entries - 2)
        found = {row["_entry"]: (row.type, bytes(row.data)) for row in spark.table(table).collect()}
        assert found == world.rows(0)
        assert spark.table(table).count() == len(found)
    assert any(change == "delete" for change, _, _ in given)
    inserted: set[tuple[int, bytes]] = set()
    for change, number, data in given:
        if change == "insert":
            inserted.add((number, data))
        else:
            assert (number, data) in inserted
