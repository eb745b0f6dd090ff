"""What the tables hold after changes of the stream, and the files that they are in."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pyarrow import parquet

from datastreamer import DataStream, StreamServer, zkevm
from datastreamer.errors import StreamFileError, UsageError
from datastreamer.spark.pipeline import manifest, tables
from datastreamer.spark.pipeline.folder import TableFolder
from datastreamer.spark.pipeline.ingest import Ingest
from datastreamer.spark.pipeline.manifest import EntryRange, Manifest
from datastreamer.spark.pipeline.queries import QUERIES, open_tables
from datastreamer.spark.pipeline.source import Source
from datastreamer.spark.pipeline.tables import columns_of
from datastreamer.spark.read.history_client import HistoryClient
from tests.spark.pipeline.test_pipeline import TIME, add, put
from tests.spark.pipeline.worlds import manifest_of, paths_of, rows_of


def names_of(out: Path) -> list[str]:
    return [each["name"] for each in manifest_of(out)["ranges"]]


def test_what_a_crash_left_of_a_range_is_removed_if_the_stream_has_changed(
    spark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, out = tmp_path / "stream.bin", tmp_path / "out"

    def crashed() -> None:
        def crash(*_: Any) -> None:
            raise KeyboardInterrupt

        ingest = Ingest(spark, {"path": str(path)}, out)
        with monkeypatch.context() as patched:
            patched.setattr(Manifest, "put", crash)
            with pytest.raises(KeyboardInterrupt):
                ingest.backfill()
        ingest.close()

    with DataStream.create(path, version=3, system_id=7, sync="os") as stream:
        put(stream, [(number, TIME + 86_400 * number, 1) for number in range(6)])
        total = stream.total_entries
        crashed()
        left = set(out.glob("blocks/*/range=0*"))
        assert left
        stream.truncate(0)
        put(stream, [(0, TIME + 86_400 * 30, 1)])
        crashed()
        assert not {path for path in left if path.exists()}
        stream.truncate(0)
        put(stream, [(number, TIME + 86_400 * 60, 1) for number in range(6)])
        assert stream.total_entries == total
        ingest = Ingest(spark, {"path": str(path)}, out)
        ingest.backfill()
        ingest.close()
        assert rows_of(out, manifest_of(out))["blocks"] == [
            (3 * number + 1, number, TIME + 86_400 * 60, (TIME + 86_400 * 60) // 86_400)
            for number in range(6)
        ]


def test_what_a_crash_left_is_removed_after_a_truncation_between_ranges(tmp_path: Path) -> None:
    with DataStream.create(tmp_path / "stream.bin", version=3, system_id=7, sync="os") as stream:
        put(stream, [(number, TIME, 1) for number in range(2)])
    source = Source({"path": str(tmp_path / "stream.bin")})
    made = Manifest(TableFolder(str(tmp_path / "out")), source, columns_of(source.options))
    whole = EntryRange(made.begin(0, 3), 0, 3, ("",))
    made.put(0, 0, [whole], "state")
    left = made.begin(3, 6)
    made.put(1, 1, [], "another state")
    assert made.due() == [left]
    made.close()


def test_a_manifest_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "_manifest").mkdir()
    path = tmp_path / "_manifest" / "00000000000000000001.json"
    for text in ("", "[]", "{}", '{"ranges": [], "later": 1}'):
        path.write_text(text)
        with pytest.raises(StreamFileError, match="not a manifest of this version"):
            manifest.complete(TableFolder(str(tmp_path)))


def test_a_server_that_truncates_again_while_changes_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "stream.bin"
    with StreamServer(
        path, host="127.0.0.1", port=0, version=3, system_id=7, sync="os", in_process=True
    ) as server:
        put(server.stream, [(number, TIME, 1) for number in range(6)])
        source = Source({"server": f"127.0.0.1:{server.port}"})
        before, hashes = source.state(18), list(source.hashes([0, 6, 12]))
        server.stream.truncate(15)
        seen, changes = source.look(), HistoryClient.changes

        def disturbed(client: HistoryClient, *of: Any) -> Any:
            if server.stream.total_entries == 15:
                server.stream.truncate(9)
            return changes(client, *of)

        monkeypatch.setattr(HistoryClient, "changes", disturbed)
        assert source.first_change(before, seen) == 9
        assert not source.is_as(seen)
        assert list(source.hashes([0, 6, 12])) == [hashes[0], ""]
        source.close()


def test_a_stream_that_changes_while_it_is_read(
    spark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path, out = tmp_path / "stream.bin", tmp_path / "out"
    with DataStream.create(path, version=3, system_id=7, sync="os") as stream:
        put(stream, [(number, TIME, 1) for number in range(6)])
        ingest = Ingest(spark, {"path": str(path)}, out)
        save, changes = ingest._tables.save, [3, 9]

        def change(rows: Any, table: str, name: str) -> None:
            save(rows, table, name)
            if table == "blocks" and changes:
                stream.truncate(changes.pop())
                put(stream, [(number, TIME + 60, 1) for number in range(9, 11)])

        monkeypatch.setattr(ingest._tables, "save", change)
        assert ingest.backfill() == 9
        assert (changes, caplog.messages) == ([], [])
        found = rows_of(out, manifest_of(out))
        assert [(row[1], row[2] - TIME) for row in found["blocks"]] == [(0, 0), (9, 60), (10, 60)]
        # An update in place, of a block that is in the tables.
        updated = zkevm.L2Block(9, timestamp=TIME + 61)
        stream.update_entry(4, *zkevm.encode(updated, version=3))
        assert ingest.backfill() == 5
        assert "the stream was changed from entry 4 on: the tables lose" in caplog.text
        found = rows_of(out, manifest_of(out))
        assert [(row[1], row[2] - TIME) for row in found["blocks"]] == [(0, 0), (9, 61), (10, 60)]
        assert [row[5] - TIME for row in found["transactions"]] == [0, 61, 60]
        ingest.close()


def test_another_stream_is_refused(spark: Any, tmp_path: Path) -> None:
    out = tmp_path / "out"
    for name, system_id, hours in (("a", 7, 0), ("b", 8, 0), ("c", 7, 1)):
        path = tmp_path / f"{name}.bin"
        with DataStream.create(path, version=3, system_id=system_id, sync="os") as stream:
            put(stream, [(number, TIME + 3_600 * hours, 1) for number in range(3)])
    ingest = Ingest(spark, {"path": str(tmp_path / "a.bin")}, out)
    assert ingest.backfill() == 9
    ingest.close()
    with pytest.raises(StreamFileError, match="it holds tables of another stream than"):
        Ingest(spark, {"path": str(tmp_path / "b.bin")}, out)
    ingest = Ingest(spark, {"path": str(tmp_path / "c.bin")}, out)
    with pytest.raises(StreamFileError, match="the 9 entries in its tables are of another"):
        ingest.backfill()
    ingest.close()
    with pytest.raises(UsageError, match="its tables are parquet, not delta"):
        Ingest(spark, {"path": str(tmp_path / "a.bin")}, out, "delta")
    with pytest.raises(StreamFileError, match=r"differ in batch_ends.error, batches.error"):
        Ingest(spark, {"path": str(tmp_path / "a.bin"), "mode": "PERMISSIVE"}, out)
    assert len(rows_of(out, manifest_of(out))["blocks"]) == 3


def test_delta_without_its_package(spark: Any, tmp_path: Path) -> None:
    DataStream.create(tmp_path / "a.bin", version=3).close()
    source = {"path": str(tmp_path / "a.bin")}
    with pytest.raises(UsageError, match="Delta's package, which Spark does not have: export PY"):
        Ingest(spark, source, tmp_path / "out", "delta")
    job = Ingest(spark, source, tmp_path / "out")
    assert job.backfill() == 0
    job.close()


def test_a_block_number_that_is_repeated(spark: Any, tmp_path: Path) -> None:
    """A reorg inside the stream, without a truncation: each block has its own transactions."""
    path, out = tmp_path / "stream.bin", tmp_path / "out"
    with DataStream.create(path, version=3, system_id=7, sync="os") as stream:
        add(stream, zkevm.BatchStart(1))
        put(stream, [(1, TIME + 10, 2)])
        put(stream, [(1, TIME + 10, 3)])
        add(stream, zkevm.BatchEnd(1))
        add(stream, zkevm.BatchStart(2))
        put(stream, [(2, TIME + 20, 1)])
        add(stream, zkevm.BatchStart(1))
    ingest = Ingest(spark, {"path": str(path)}, out)
    ingest.backfill(chunk=4)
    ingest.close()
    found = open_tables(spark, out)
    rows = found["transactions"].orderBy("entry_number").collect()
    assert [row.block_entry for row in rows] == [2, 2, 6, 6, 6, 13]
    (per_block,) = spark.sql(QUERIES["transactions_per_block"].sql).collect()
    assert (per_block.blocks, per_block.transactions, per_block.most) == (3, 6, 3)
    (between,) = spark.sql(QUERIES["block_time"].sql).collect()
    assert (between.blocks, between.average) == (1, 10.0)
    # Batch 2, and batch 1 the second time.
    assert [tuple(row) for row in spark.sql(QUERIES["open_batches"].sql).collect()] == [
        (1, 15),
        (2, 11),
    ]


def test_files_are_joined(spark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, out = tmp_path / "many.bin", tmp_path / "out"
    with DataStream.create(path, version=3, system_id=7, sync="os") as stream:
        put(stream, [(number, TIME + number, 1) for number in range(8)])
        total = stream.total_entries
    ingest = Ingest(spark, {"path": str(path)}, out)
    assert ingest.backfill(chunk=6) == total
    assert len(manifest_of(out)["ranges"]) == 4
    before = rows_of(out, manifest_of(out))
    with monkeypatch.context() as patched:
        patched.setattr(Manifest, "put", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            ingest.compact()
    ingest.close()
    assert rows_of(out, manifest_of(out)) == before
    ingest = Ingest(spark, {"path": str(path)}, out)
    older = manifest_of(out)
    assert (ingest.done, ingest.backfill(), ingest.compact()) == (total, 0, 1)
    assert rows_of(out, manifest_of(out)) == before
    # A query that has begun goes on.
    assert rows_of(out, older) == before
    monkeypatch.setattr(manifest, "GRACE", -1.0)
    with DataStream.open(path) as stream:
        put(stream, [(8, TIME + 8, 1)])
    assert (ingest.backfill(), ingest.compact(entries=total)) == (3, 2)
    assert len(list(out.glob("blocks/day=2*/range=*"))) == 2
    assert ingest.compact() == 1
    ingest.close()
    assert len(rows_of(out, manifest_of(out))["transactions"]) == 9
    assert open_tables(spark, out)["transactions"].count() == 9


def test_files_are_as_large_as_wanted(
    spark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, out = tmp_path / "many.bin", tmp_path / "out"
    with DataStream.create(path, version=3, system_id=7, sync="os") as stream:
        put(stream, [(number, TIME + number % 2 * 86_400, 1) for number in range(3_000)])
        ingest = Ingest(spark, {"path": str(path)}, out)
        ingest.backfill(chunk=5_000)
        assert ingest.compact() == 1
        assert len(list(paths_of(out / "blocks", names_of(out)))) == 2
        put(stream, [(3_000, TIME, 1)])
        ingest.backfill()
    size = "spark.sql.adaptive.advisoryPartitionSizeInBytes"
    before = spark.conf.get(size)
    monkeypatch.setitem(tables._COPYING, size, "2000")
    least = "spark.sql.adaptive.coalescePartitions.minPartitionSize"
    monkeypatch.setitem(tables._COPYING, least, "1b")
    assert ingest.compact() == 1
    assert spark.conf.get(size) == before
    ingest.close()
    files = sorted(paths_of(out / "blocks", names_of(out)))
    # Of two days, and the tests' session makes no more than two parts.
    assert len(files) == 4
    first = parquet.ParquetFile(files[0])
    assert first.metadata.row_group(0).column(0).compression == "ZSTD"
    numbers = first.read(["entry_number"]).column(0).to_pylist()
    assert numbers == sorted(numbers)
    # A table without rows has its columns for all programs.
    (empty,) = out.glob("ger_updates/**/*.parquet")
    assert "global_exit_root" in parquet.read_schema(empty).names
