"""Files and servers, planned and read as Spark's workers do it, without Spark."""

from __future__ import annotations

import os
import re
import shutil
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql.types import (
    BinaryType,
    IntegerType,
    LongType,
    StringType,
    StructField,
    StructType,
)

from datastreamer import DataStream, Limits, StreamServer, arrow
from datastreamer.errors import (
    BadFileSize,
    BadRange,
    DamagedEntry,
    FileMissing,
    HistoryChanged,
    NotAStream,
    StreamFileError,
    UnknownBookmark,
    UnknownEntry,
    UsageError,
)
from datastreamer.format import PAGE_SIZE, page_start
from datastreamer.storage.disk.file_ops import OsFile
from datastreamer.zkevm import encode, events
from tests.arrow.damage import CASES, PAGES, damaged, write_pages
from tests.network.stub import Stub, StubServer, handler, sample
from tests.spark.conftest import Make
from tests.spark.read.reading import Query


def schema(*fields: tuple[str, Any]) -> StructType:
    return StructType([StructField(name, kind, True) for name, kind in fields])


def as_arrow(path: Path, table: str = "entries", **options: Any) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = (
        arrow.ArrowStream(path, table, **options).reader().read_all().to_pylist()
    )
    return rows


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """How many bytes of files were read since this was asked last."""
    total = 0
    read = OsFile.read

    def counting(self: OsFile, size: int, offset: int) -> bytes:
        nonlocal total
        data = read(self, size, offset)
        total += len(data)
        return data

    def reported() -> int:
        nonlocal total
        so_far, total = total, 0
        return so_far

    monkeypatch.setattr(OsFile, "read", counting)
    return reported


@pytest.fixture(scope="module")
def chain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """100 pages of batches of blocks of transactions, as a sequencer writes them."""
    path = tmp_path_factory.mktemp("chain") / "chain.bin"
    write_chain(path, 100)
    return path


def write_chain(path: Path, pages: int, system_id: int = 7) -> None:
    """Batches of four blocks, blocks of two transactions of some 100 kB, up to `pages` pages."""
    with DataStream.create(path, version=3, system_id=system_id, sync="os", index="memory") as made:
        block = 0
        for batch in range(1, 100_000):
            if made.header.total_length > page_start(pages - 1):
                return
            with made.atomic_op() as op:

                def put(event: Any) -> None:
                    op.add_entry(*encode(event, version=3))

                op.add_bookmark(encode(events.BookMark(1, batch), version=3)[1])
                put(events.BatchStart(batch, 1, 9, 7))
                for _ in range(4):
                    block += 1
                    op.add_bookmark(encode(events.BookMark(2, block), version=3)[1])
                    put(events.L2Block(block, batch, 1_700_000_000 + block, hash=b"h" * 32))
                    for index in range(2):
                        put(events.Transaction(block, index, True, bytes([index]) * 100_000))
                    put(events.L2BlockEnd(block))
                put(events.BatchEnd(batch))
    raise AssertionError


TABLES = (
    *("entries", "blocks", "block_ends", "transactions", "batches", "batch_ends"),
    *("ger_updates", "bookmarks"),
)


@pytest.mark.parametrize("table", TABLES)
def test_every_table_in_parts_is_what_the_arrow_reader_gives(chain: Path, table: str) -> None:
    query = Query(path=chain, table=table, partitionBytes="9m")
    # Of pages without such an entry only the last one is read: no summary says that of it.
    assert len(query.parts) == (1 if table == "ger_updates" else 11)
    assert query.rows() == as_arrow(chain, table)


@pytest.mark.parametrize("part_bytes", ["1", "1m", "3m", "1g"])
def test_parts_are_whole_pages(chain: Path, part_bytes: str) -> None:
    wanted = schema(("number", LongType()))
    query = Query(path=chain, partitionBytes=part_bytes, schema=wanted)
    assert len(query.parts) == {"1": 100, "1m": 100, "3m": 33, "1g": 1}[part_bytes]
    numbers = [row["number"] for row in query.rows()]
    assert numbers == list(range(numbers[-1] + 1))


def test_a_schema_of_its_own_narrows_what_is_made(chain: Path) -> None:
    wanted = schema(("number", LongType()), ("system_id", LongType()), ("hash", BinaryType()))
    query = Query(path=chain, table="blocks", schema=wanted)
    assert query.table().column_names == ["number", "system_id", "hash"]
    assert query.rows()[1] == {"number": 2, "system_id": 7, "hash": b"h" * 32}
    only = Query(path=chain, table="blocks", schema=schema(("system_id", LongType())))
    assert only.rows() == [{"system_id": 7}] * len(query.rows())


@pytest.mark.parametrize(
    "field, message",
    [
        (("nmuber", LongType()), "the table entries has no column 'nmuber': its columns are numb"),
        (("number", IntegerType()), "the column number is bigint, not int: read it as that type"),
        (("error", BinaryType()), "the column error exists only in mode PERMISSIVE"),
    ],
)
def test_a_schema_that_does_not_fit(chain: Path, field: tuple[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Query(path=chain, schema=schema(field))


def test_a_schema_may_not_say_that_nothing_is_null(chain: Path) -> None:
    wanted = StructType([StructField("debug", BinaryType(), False)])
    with pytest.raises(UsageError, match="string"):
        Query(path=chain, table="blocks", schema=wanted)
    wanted = StructType([StructField("hash", BinaryType(), False)])
    with pytest.raises(UsageError, match="the column hash may be null"):
        Query(path=chain, table="blocks", schema=wanted)


# Offsets.


def test_offsets_are_entries_blocks_or_batches(chain: Path, counted: Callable[[], int]) -> None:
    rows = as_arrow(chain)
    for verify, most in ((True, 7), (False, 5)):
        counted()
        query = Query(path=chain, startingOffset=1000, endingOffset=1010, verify=verify)
        assert query.rows() == rows[1000:1010]
        assert counted() < most * PAGE_SIZE
    blocks = Query(path=chain, table="blocks", startingOffset="block:100", endingOffset="block:103")
    assert [row["number"] for row in blocks.rows()] == [100, 101, 102]
    batch = Query(path=chain, startingOffset="batch:20", endingOffset="batch:21").rows()
    assert batch[0]["data"] == encode(events.BookMark(1, 20), version=3)[1]
    assert (batch[1]["type"], batch[-1]["type"], len(batch)) == (1, 4, 2 + 4 * 5 + 1)
    assert Query(path=chain, startingOffset=len(rows)).rows() == []
    assert Query(path=chain, startingOffset=7, endingOffset=7).rows() == []
    with pytest.raises(BadRange, match="endingOffset is entry 6, before starting"):
        Query(path=chain, startingOffset=7, endingOffset=6)
    with pytest.raises(UnknownEntry):
        Query(path=chain, startingOffset=len(rows) + 1)
    with pytest.raises(UnknownBookmark, match="no bookmark block:100000"):
        Query(path=chain, startingOffset="block:100000")


def test_a_search_among_small_entries_is_short(tmp_path: Path, counted: Callable[[], int]) -> None:
    path = tmp_path / "small.bin"
    with DataStream.create(path, version=3, sync="os", index="memory") as stream:
        for first in range(0, 40_000, 1000):
            with stream.atomic_op() as op:
                for number in range(first, first + 1000):
                    op.add_bookmark(encode(events.BookMark(2, number), version=3)[1])
                    op.add_entry(*encode(events.L2Block(number, 1), version=3))
                    op.add_entry(
                        *encode(events.Transaction(number, 0, encoded=b"t" * 600), version=3)
                    )
        assert stream.header.total_length > 25 * PAGE_SIZE
    for number in (1, 777, 20_000, 39_999):
        counted()
        wanted = {"startingOffset": f"block:{number}", "endingOffset": 3 * number + 3}
        Query(path=path, table="blocks", verify=False, **wanted)
        # The halves cost little; the page where it is found is read, to the place.
        assert counted() < 3.2 * PAGE_SIZE
        query = Query(path=path, table="blocks", **wanted)
        # To be verified, the pages of a search in 28 pages are read as a whole, and the last one.
        assert counted() < (3.2 + 6 + 1) * PAGE_SIZE
        assert [row["number"] for row in query.rows()] == [number]
        assert counted() < 2.1 * PAGE_SIZE


def test_blocks_without_a_bookmark_of_their_own_are_not_found(make: Make) -> None:
    """Bookmarks of every third block, in pages of a block or two."""
    entries = []
    for number in range(60):
        if number % 3 == 0:
            entries.append((0xB0, encode(events.BookMark(2, number), version=2)[1]))
        entries.append(encode(events.L2Block(number, 1), version=2))
        entries.append((9, bytes(300_000)))
    path = make(entries)
    for number in (0, 3, 33, 57):
        query = Query(path=path, table="blocks", startingOffset=f"block:{number}")
        assert [row["number"] for row in query.rows()] == list(range(number, 60))
    for number in (1, 32, 58, 59, 60):
        with pytest.raises(UnknownBookmark, match=f"no bookmark block:{number}"):
            Query(path=path, startingOffset=f"block:{number}")


def test_a_bookmark_far_from_others_is_found(make: Make) -> None:
    mark = (0xB0, encode(events.BookMark(1, 7), version=2)[1])
    path = make([(9, bytes(1_000_000))] * 6 + [mark] + [(9, bytes(1_000_000))] * 8)
    (row,) = Query(path=path, startingOffset="batch:7", endingOffset=7).rows()
    assert (row["number"], row["type"]) == (6, 0xB0)
    with pytest.raises(UnknownBookmark, match="no bookmark batch:8"):
        Query(path=path, startingOffset="batch:8")
    with path.open("r+b") as file:
        file.seek(page_start(5) + 1_000_017)
        file.write(b"\x77" * 10)
    with pytest.raises(DamagedEntry, match="at byte"):
        Query(path=path, startingOffset="batch:7")


# Many files.


def test_a_folder_and_a_glob_name_their_streams(tmp_path: Path) -> None:
    for system_id in (3, 4):
        write_chain(tmp_path / f"s{system_id}.bin", 2, system_id)
    write_chain(tmp_path / "_hidden.bin", 1, 9)
    (tmp_path / "notes.txt").write_text("no stream")
    (tmp_path / "s3.bin.index").mkdir(exist_ok=True)
    one = len(as_arrow(tmp_path / "s3.bin"))
    for path in (tmp_path, tmp_path / "s?.bin", f"file://{tmp_path}"):
        query = Query(path=path)
        assert query.schema.names == ["number", "type", "data", "system_id"]
        ids = query.table().column("system_id").to_pylist()
        assert ids == [3] * one + [4] * one
    both = f'["{tmp_path}/s3.bin", "{tmp_path}/s4.bin"]'
    assert Query(paths=both).table().num_rows == 2 * one
    single = Query(path=tmp_path / "s3.bin")
    assert single.schema.names == ["number", "type", "data"]
    assert Query(path=tmp_path / "s3.bin", systemId="true").rows()[0]["system_id"] == 3
    assert "system_id" not in Query(path=tmp_path, systemId="false").rows()[0]


def test_folders_in_a_folder(tmp_path: Path) -> None:
    """Read if that is asked for, without hidden ones; folders `key=value` are no columns."""
    for name in ("day=1/a.bin", "day=1/deeper/b.bin", "day=2/a.bin", "_old/a.bin", "day=2/.c.bin"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        write_chain(path, 1)
    (tmp_path / "day=2" / "notes.txt").write_text("no stream")
    with pytest.raises(FileMissing, match=r"in its subfolders set recursiveFileLookup to true$"):
        Query(path=tmp_path)
    place = StructType([StructField("_file", StringType())])
    for path in (tmp_path, f"file://{tmp_path}", tmp_path / "day=?"):
        deep = Query(path=path, recursiveFileLookup="true", schema=place).table()
        files = [os.path.relpath(it, tmp_path) for it in dict.fromkeys(deep["_file"].to_pylist())]
        assert files == ["day=1/a.bin", "day=1/deeper/b.bin", "day=2/a.bin"]
    one = len(as_arrow(tmp_path / "day=1" / "a.bin"))
    deep = Query(path=tmp_path, recursiveFileLookup="true")
    assert deep.table().num_rows == 3 * one
    assert "system_id" in deep.schema.names
    assert Query(path=tmp_path / "day=1").table().num_rows == one
    (tmp_path / "day=1" / "loop").symlink_to(tmp_path)
    assert Query(path=tmp_path, recursiveFileLookup="true").table().num_rows == 3 * one
    (tmp_path / "nothing").mkdir()
    with pytest.raises(FileMissing, match=r"it holds no stream file$"):
        Query(path=tmp_path / "nothing", recursiveFileLookup="true")


def test_paths_that_lead_nowhere(tmp_path: Path) -> None:
    for path, message in (
        (tmp_path / "missing.bin", "missing.bin: no such file"),
        (tmp_path, "it holds no stream file"),
        (tmp_path / "*.bin", "it holds no stream file"),
    ):
        with pytest.raises(FileMissing, match=message):
            Query(path=path)
    (tmp_path / "text.bin").write_text("no stream")
    with pytest.raises(NotAStream, match=r"text\.bin"):
        Query(path=tmp_path / "*.bin")
    with pytest.raises(UsageError, match="nope://"):
        Query(path="nope://bucket/a.bin")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(StreamFileError, match=r"pipe: neither a file nor a folder$"):
        Query(path=tmp_path / "pipe")


def test_hdfs_without_its_client_is_an_error_of_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("JAVA_HOME", "HADOOP_HOME", "CLASSPATH", "ARROW_LIBHDFS_DIR"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(UsageError, match="; HDFS needs Hadoop's client") as reported:
        Query(path="hdfs://nowhere:1/a.bin")
    assert "\n" not in str(reported.value)


def test_a_path_that_looks_like_a_file_uri_is_used_unchanged(tmp_path: Path) -> None:
    write_chain(tmp_path / "a b.bin", 1)
    rows = Query(path=tmp_path / "a b.bin").rows()
    for name in ("a%20b.bin", "a b.bin", "[a] b.bin"):
        assert Query(path=f"file://{tmp_path}/{name}", systemId="false").rows() == rows
    with pytest.raises(UsageError, match=r"^file://a b\.bin: Cannot parse URI"):
        Query(path="file://a b.bin")


def test_a_name_with_brackets_is_a_name(tmp_path: Path) -> None:
    write_chain(tmp_path / "a[1].bin", 1)
    assert Query(path=tmp_path / "a[1].bin").table().num_rows > 0


def test_small_files_are_packed_into_parts(tmp_path: Path) -> None:
    sizes = [100] * 5 + [5_000_000] + [100] * 4
    for at, size in enumerate(sizes):
        with DataStream.create(tmp_path / f"{at}.bin", system_id=at, index="memory") as stream:
            for _ in range(max(1, size // 500_000)):
                stream.append(1, bytes(min(size, 500_000)))
    query = Query(path=tmp_path, partitionBytes="4m")
    ids = [
        [row["system_id"] for batch in query.part(at) for row in batch.to_pylist()] for at in (0, 1)
    ]
    assert ids == [[0, 1, 2], [3, 4]]
    assert len(query.parts) == 2 + 1 + 2
    found = [(row["system_id"], row["number"]) for row in query.rows()]
    assert found == [(at, n) for at in range(10) for n in range(10 if at == 5 else 1)]
    few = Query(path=tmp_path, partitionBytes="4m", startingOffset=1, endingOffset=1)
    assert few.parts == []
    # Each file's errors name it.
    with (tmp_path / "4.bin").open("r+b") as file:
        file.seek(page_start(0))
        file.write(b"\x77")
    with pytest.raises(DamagedEntry, match=r"4\.bin: at byte"):
        query.part(1)
    (row,) = [
        row for row in Query(path=tmp_path, mode="PERMISSIVE", verify=False).rows() if row["error"]
    ]
    assert (row["system_id"], row["number"]) == (4, 0)


# Streams that change.


def test_the_end_is_where_it_was_when_the_query_was_planned(tmp_path: Path) -> None:
    path = tmp_path / "grows.bin"
    with DataStream.create(path, sync="os", index="memory") as stream:

        def add(count: int, size: int = 100_000) -> None:
            with stream.atomic_op() as op:
                for at in range(count):
                    op.add_entry(1, bytes([at % 256]) * size)

        add(5)
        one_page = Query(path=path)
        add(20)
        several = Query(path=path, partitionBytes="1m")
        add(20)
        assert len(one_page.rows()) == 5
        assert len(several.parts) == 3
        assert [row["number"] for row in several.rows()] == list(range(25))
        assert len(Query(path=path).rows()) == 45


def test_an_empty_stream_has_no_rows(tmp_path: Path) -> None:
    path = tmp_path / "empty.bin"
    DataStream.create(path, index="memory").close()
    assert Query(path=path).batches() == []
    assert Query(path=path, table="blocks").batches() == []


@pytest.mark.parametrize("again", [0, 30])
def test_a_truncated_stream_is_an_error(tmp_path: Path, again: int) -> None:
    """Also if the stream has as many entries again."""
    path = tmp_path / "cut.bin"
    with DataStream.create(path, sync="os", index="memory") as stream:
        for data in (b"a", b"b"):
            with stream.atomic_op() as op:
                op.add_entries(1, [data * 200_000] * 10)
        query = Query(path=path, partitionBytes="1m")
        stream.truncate(10)
        if again:
            with stream.atomic_op() as op:
                op.add_entries(1, [b"c" * 200_000] * again)
        for at in range(len(query.parts)):
            with pytest.raises(StreamFileError, match=r"truncated or changed since .* run the q"):
                query.part(at)


def test_a_stream_that_is_truncated_while_a_part_is_read(tmp_path: Path) -> None:
    path = tmp_path / "cut.bin"
    with DataStream.create(path, sync="os", index="memory") as stream:
        with stream.atomic_op() as op:
            op.add_entries(1, [b"a" * 200_000] * 30)
        query = Query(path=path)
        reading = query._reader.read(query.parts[0])
        next(reading)
        stream.truncate(20)
        with pytest.raises(StreamFileError, match="truncated or changed"):
            list(reading)


@pytest.mark.parametrize("mode", ["FAILFAST", "PERMISSIVE", "DROPMALFORMED"])
def test_a_file_that_was_cut_off_is_an_error_in_each_mode(tmp_path: Path, mode: str) -> None:
    """As it is when a query is planned: its rows would be missing without a word."""
    path = tmp_path / "cut.bin"
    write_chain(path, 6)
    query = Query(path=path, mode=mode, partitionBytes="2m")
    os.truncate(path, page_start(3) + 500)
    for at in range(len(query.parts)):
        with pytest.raises(BadFileSize, match="the file ends here, but its data ends at byte"):
            query.part(at)


def test_a_file_that_is_cut_off_while_a_part_is_read(tmp_path: Path) -> None:
    path = tmp_path / "cut.bin"
    write_chain(path, 6)
    query = Query(path=path, mode="DROPMALFORMED")
    reading = query._reader.read(query.parts[0])
    next(reading)
    os.truncate(path, page_start(3))
    with pytest.raises(BadFileSize, match="the file ends here, but its data ends at byte"):
        list(reading)


# Damage.


@pytest.fixture(scope="module")
def hundred(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of 100 pages, to be damaged."""
    path = tmp_path_factory.mktemp("hundred") / "hundred.bin"
    write_pages(path)
    return path


@pytest.fixture(scope="module")
def whole(hundred: Path) -> Any:
    """Its content."""
    return arrow.ArrowStream(hundred).reader().read_all()


@pytest.mark.parametrize("page, how", CASES)
def test_a_damaged_page_costs_that_page(hundred: Path, whole: Any, page: int, how: str) -> None:
    # Parts begin with page 49 or 50, or there is one.
    part_bytes = {49: "7m", 50: "5m", 99: "200m"}.get(page, "10m")
    options = {"path": hundred, "partitionBytes": part_bytes}
    with damaged(hundred, page, how) as lost:
        numbers = [number for number in range(5 * PAGES) if number not in lost]
        good = whole.take(numbers)

        dropping = Query(mode="DROPMALFORMED", **options).table()
        assert dropping.cast(good.schema).equals(good)

        permissive = Query(mode="permissive", **options).table()
        bad = permissive.filter(permissive["error"].is_valid())
        kept = permissive.filter(permissive["error"].is_null()).drop_columns("error")
        assert kept.cast(good.schema).equals(good)
        (reported,) = bad.to_pylist()
        assert reported["number"] == lost.start
        assert reported["type"] is reported["data"] is None
        at = int(reported["error"].partition("hundred.bin: at byte ")[2].partition(":")[0])
        assert page_start(page) <= at < page_start(page + 1)
        which = f"entries {lost.start} to {lost.stop - 1}" if len(lost) > 1 else f"entry {lost[0]}"
        assert f"{which} cannot be read" in reported["error"]

        failing = Query(**options)
        given: list[int] = []
        failed = []
        for at, part in enumerate(failing.parts):
            try:
                for batch in failing.part(at):
                    given += batch.column("number").to_pylist()
            except DamagedEntry as error:
                assert part.first_page <= page < part.stop_page  # type: ignore[attr-defined]
                failed.append(error)
        assert len(failed) == 1
        assert page_start(page) <= failed[0].offset < page_start(page + 1)
        assert set(given) <= set(numbers)


def test_damage_elsewhere_is_no_matter(hundred: Path) -> None:
    whole = as_arrow(hundred, "blocks", start=255)
    with damaged(hundred, 50, "noise") as lost:
        before = Query(path=hundred, endingOffset=lost.start)
        assert before.table().num_rows == lost.start == 250
        behind = Query(path=hundred, startingOffset=lost.stop, table="blocks")
        assert behind.rows() == whole


@pytest.fixture
def half_bad(make: Make) -> Path:
    good = encode(events.L2Block(7, 1, hash=b"h"), version=2)
    return make([good, (2, b"\xff\xff"), good, (9, b"other")])


def test_an_entry_that_is_not_an_event(half_bad: Path) -> None:
    options: dict[str, Any] = {"path": half_bad, "table": "blocks"}
    assert [row["entry_number"] for row in Query(mode="DROPMALFORMED", **options).rows()] == [0, 2]
    rows = Query(mode="PERMISSIVE", **options).rows()
    assert [(row["entry_number"], row["number"]) for row in rows] == [(0, 7), (1, None), (2, 7)]
    assert rows[1]["error"].startswith("entry 1: ")
    assert rows[0]["error"] is rows[2]["error"] is None
    wanted = schema(("number", LongType()))
    narrow = Query(mode="PERMISSIVE", schema=wanted, **options).rows()
    assert narrow == [{"number": 7}, {"number": None}, {"number": 7}]
    with pytest.raises(ValueError, match="entry 1: "):
        Query(**options).rows()


# Servers.


@pytest.fixture
def server(tmp_path: Path) -> Iterator[StreamServer]:
    path = tmp_path / "served.bin"
    write_chain(path, 6)
    # A client in the middle of a part is not waited for.
    limits = Limits(grace=0)
    options = {"index": "memory", "limits": limits, "metrics_port": 0}
    with StreamServer(path, host="127.0.0.1", port=0, **options) as served:
        yield served


@pytest.mark.parametrize("table", TABLES)
def test_a_server_gives_what_its_file_does(server: StreamServer, table: str) -> None:
    query = Query(server=f"127.0.0.1:{server.port}", table=table, partitionBytes="2m")
    assert len(query.parts) == 3
    assert query.rows() == as_arrow(Path(server.stream.path), table)


def test_a_servers_parts_are_those_that_are_wanted(server: StreamServer) -> None:
    at = f"127.0.0.1:{server.port}"
    rows = as_arrow(Path(server.stream.path))
    assert Query(server=at, startingOffset=5, endingOffset=9).rows() == rows[5:9]
    blocks = Query(server=at, table="blocks", startingOffset="block:9", endingOffset="block:10")
    assert [row["number"] for row in blocks.rows()] == [9]
    with pytest.raises(UnknownBookmark, match="block:100000"):
        Query(server=at, startingOffset="block:100000")


def test_a_server_sends_only_the_entries_of_the_table(server: StreamServer) -> None:
    at = f"127.0.0.1:{server.port}"
    rows = as_arrow(Path(server.stream.path), "blocks")
    few = Query(server=at, table="blocks", startingOffset=5, endingOffset=60)
    assert few.rows() == [row for row in rows if 5 <= row["entry_number"] < 60]
    with urllib.request.urlopen(f"http://127.0.0.1:{server.metrics_port}/metrics") as reported:
        text = reported.read().decode()
    assert re.search(r'datastreamer_commands_total\{command="filtered_start"\} [1-9]', text)


def test_a_servers_end_is_where_it_was_when_the_query_was_planned(server: StreamServer) -> None:
    query = Query(server=f"127.0.0.1:{server.port}", partitionBytes="2m")
    before = server.stream.total_entries
    with server.stream.atomic_op() as op:
        op.add_entry(9, b"later")
    assert len(query.rows()) == before


def test_a_server_that_is_lost_is_followed_by_another(server: StreamServer, tmp_path: Path) -> None:
    copy = tmp_path / "copy.bin"
    shutil.copyfile(server.stream.path, copy)
    rows = as_arrow(copy)
    with StreamServer(copy, host="127.0.0.1", port=0, index="memory") as other:
        query = Query(server=f"127.0.0.1:{server.port},127.0.0.1:{other.port}", retryFor=0)
        reading = query._reader.read(query.parts[0])
        first = next(reading)
        server.close()
        rest = list(reading)
        assert [row for batch in (first, *rest) for row in batch.to_pylist()] == rows
        assert Query(server=f"127.0.0.1:{server.port},127.0.0.1:{other.port}").rows() == rows


def test_no_server_at_all(server: StreamServer) -> None:
    server.close()
    with pytest.raises(ConnectionError, match=f"127.0.0.1:{server.port}"):
        Query(server=f"127.0.0.1:{server.port}", retryFor=0)


@pytest.mark.parametrize("again", [b"", b"other"])
def test_a_servers_truncated_stream_is_an_error(server: StreamServer, again: bytes) -> None:
    query = Query(server=f"127.0.0.1:{server.port}")
    stream = server.stream
    total = stream.total_entries
    stream.truncate(total - 2)
    if again:
        with stream.atomic_op() as op:
            op.add_entries(9, [again] * 2)
    with pytest.raises(HistoryChanged, match="since this query was planned; run it again"):
        query.rows()


@pytest.fixture
def many(tmp_path: Path) -> Iterator[StreamServer]:
    """A stream of 3,000 entries of 1 kB: more than the last 256 follow one another."""
    path = tmp_path / "many.bin"
    options = {"index": "memory", "limits": Limits(grace=0), "sync": "os"}
    with StreamServer(path, host="127.0.0.1", port=0, **options) as served:
        with served.stream.atomic_op() as op:
            op.add_entries(1, [number.to_bytes(4, "big") * 250 for number in range(3000)])
        yield served


def test_an_entry_that_a_server_updated_is_an_error(many: StreamServer) -> None:
    query = Query(server=f"127.0.0.1:{many.port}", partitionBytes="1m")
    many.stream.update_entry(5, 1, b"u" * 1000)
    for at in range(len(query.parts)):
        with pytest.raises(HistoryChanged, match="entries were truncated or changed since this"):
            query.part(at)


@pytest.mark.parametrize("cut", [False, True])
def test_a_servers_stream_that_changes_while_a_part_is_read(many: StreamServer, cut: bool) -> None:
    """Also where nothing shows it but the epoch."""
    query = Query(server=f"127.0.0.1:{many.port}", partitionBytes="1500k")
    assert len(query.parts) == 2
    reading = query._reader.read(query.parts[0])
    next(reading)
    query.part(1)
    if cut:
        many.stream.truncate(1400)
        with many.stream.atomic_op() as op:
            op.add_entries(9, [b"other"] * 200)
    else:
        many.stream.update_entry(5, 1, b"u" * 1000)
    with pytest.raises(HistoryChanged, match="since this query was planned; run it again"):
        list(reading)


def test_each_of_several_servers_has_its_own_history(many: StreamServer, tmp_path: Path) -> None:
    """As relays do, whose epochs are their own."""
    copy = tmp_path / "copy.bin"
    with StreamServer(copy, host="127.0.0.1", port=0, index="memory", sync="os") as other:
        with other.stream.atomic_op() as op:
            op.add_entries(1, [entry.data for entry in many.stream.entries()])
        query = Query(server=f"127.0.0.1:{many.port},127.0.0.1:{other.port}", partitionBytes="1m")
        assert [row["number"] for row in query.rows()] == list(range(3000))
        other.stream.update_entry(5, 1, b"u" * 1000)
        assert query.part(0)
        with pytest.raises(HistoryChanged, match=f"127.0.0.1:{other.port}: entries were trunca"):
            query.part(1)


@pytest.mark.parametrize("extensions", ["refused", "closed"])
def test_a_server_that_reports_no_history_is_read(extensions: str) -> None:
    entries = sample(300)
    stubs = [Stub(entries, extensions=extensions) for _ in range(6)]
    with StubServer(*map(handler, stubs)) as server:
        rows = Query(server=f"127.0.0.1:{server.port}").rows()
        assert [row["data"] for row in rows] == [entry.data for entry in entries]
