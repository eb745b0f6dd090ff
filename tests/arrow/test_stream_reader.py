"""Files and servers as Arrow streams: the real stream's rows, damage, and who takes them."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from datastreamer import BlockingClient, DataStream, StreamServer, arrow
from datastreamer.arrow.tables import TABLES
from datastreamer.cli import main
from datastreamer.errors import (
    BadRange,
    DamagedEntry,
    DecodeFailed,
    FileMissing,
    UnknownEntry,
    UsageError,
)
from datastreamer.format import HEADER_PAGE_SIZE, PAGE_SIZE, page_start
from datastreamer.zkevm import encode, events
from datastreamer.zkevm.schema import MESSAGES
from tests import oracle
from tests.arrow.conftest import Make
from tests.arrow.damage import CASES, damaged, without_checksums, write_pages
from tests.arrow.test_record_batches import fits, plain
from tests.zkevm.generated import messages

REAL = {
    "blocks": 11318,
    "block_ends": 11317,
    "transactions": 465,
    "batches": 102,
    "batch_ends": 101,
    "ger_updates": 0,
    "bookmarks": 11420,
}


def digest(rows: list[tuple[int, int, bytes]]) -> str:
    found = hashlib.sha256()
    for number, kind, data in rows:
        found.update(b"%d %d %d " % (number, kind, len(data)) + data)
    return found.hexdigest()


@pytest.fixture(scope="module")
def scanned(real_stream: Path) -> list[tuple[int, int, bytes]]:
    """Number, type and data of each entry, by the few lines that are not ours to test."""
    content = real_stream.read_bytes()
    end = int.from_bytes(content[38:46], "big")
    found = oracle.scan(content[HEADER_PAGE_SIZE:end], 0, HEADER_PAGE_SIZE)
    data = content[HEADER_PAGE_SIZE:]
    return [
        (number, kind, data[at + 17 : at + 17 + size])
        for number, (at, size, kind, _) in enumerate(found.entries)
    ]


def test_the_real_stream_is_what_cat_and_a_scan_say(
    real_stream: Path,
    scanned: list[tuple[int, int, bytes]],
    capsysbinary: pytest.CaptureFixture[bytes],
) -> None:
    assert len(scanned) == 34723
    table = arrow.ArrowStream(real_stream).reader().read_all()
    table.validate(full=True)
    rows = list(zip(*(table.column(name).to_pylist() for name in table.schema.names), strict=True))
    assert main.main(["cat", str(real_stream), "--format", "raw"]) == 0
    raw = capsysbinary.readouterr().out
    catted = [
        (number, kind, raw[at + 17 : at + 17 + size])
        for at, size, kind, number in oracle.scan(raw, 0, None).entries
    ]
    assert digest(rows) == digest(scanned) == digest(catted)


def wire(row: dict[str, Any]) -> dict[str, Any]:
    """A row with the values of its event; the real stream has no base fee."""
    if "base_fee" in row:
        assert row["base_fee"] == 0
        row |= {"block_gas_limit": int(row["block_gas_limit"]), "base_fee": b""}
    return row


@pytest.mark.parametrize("name", REAL)
def test_the_real_stream_by_table(
    real_stream: Path, scanned: list[tuple[int, int, bytes]], name: str
) -> None:
    kind = TABLES[name].type
    cls = getattr(events, MESSAGES[kind].name)
    table = arrow.ArrowStream(real_stream, name).reader().read_all()
    table.validate(full=True)
    # A row has all that its message has: encoded again it is the entry.
    names = [field.name for field in MESSAGES[kind].fields]
    rows = [
        (row["entry_number"], *encode(cls(**{name: row[name] for name in names}), version=2))
        for row in map(wire, table.to_pylist())
    ]
    expected = [entry for entry in scanned if entry[1] == kind]
    assert len(rows) == REAL[name]
    assert digest(rows) == digest(expected)


def test_a_range(real_stream: Path) -> None:
    whole = arrow.ArrowStream(real_stream).reader().read_all()
    with DataStream.open(real_stream, read_only=True) as stream:
        part = arrow.ArrowStream(stream, start=100, stop=20_100, batch_bytes=5_000).reader()
        batches = list(part)
        assert max(batch.nbytes for batch in batches) < 60_000
        assert pa.Table.from_batches(batches) == whole.slice(100, 20_000)
        assert arrow.ArrowStream(stream, stop=10**9).reader().read_all() == whole
        assert arrow.ArrowStream(stream, start=34723).reader().read_all().num_rows == 0
        blocks = arrow.ArrowStream(stream, "blocks", start=9, stop=5000).reader().read_all()
        assert blocks.column("entry_number").to_pylist()[0] > 9
        with pytest.raises(UnknownEntry):
            arrow.ArrowStream(stream, start=34724).reader()
        # What others opened stays open.
        assert stream.entry(0).type == 0xB0


def test_a_stream_that_grows_is_read_to_where_it_was(make: Make) -> None:
    path = make([(1, b"a"), (1, b"b")])
    with DataStream.open(path) as stream:
        found = arrow.ArrowStream(stream, columns=["data"])
        begun = found.reader()
        with stream.atomic_op() as op:
            op.add_entry(1, b"c")
        assert begun.read_all().column("data").to_pylist() == [b"a", b"b"]
        assert found.reader().read_all().column("data").to_pylist() == [b"a", b"b", b"c"]


@pytest.mark.parametrize("cut", [0, 5])
@pytest.mark.parametrize("how", ["path", "read_only", "follow"])
def test_a_truncated_stream_is_not_read_on(make: Make, how: str, cut: int) -> None:
    """Before the place that is read or ahead of it, with others in place of the entries."""
    path = make([(1, b"before" * 100_000)] * 8)
    with contextlib.ExitStack() as stack:
        writer = stack.enter_context(DataStream.open(path))
        if how == "path":
            batches = iter(arrow.ArrowStream(path).reader())
        else:
            source = stack.enter_context(DataStream.open(path, **{how: True}))
            batches = iter(arrow.ArrowStream(source).reader())
        seen = next(batches)["data"].to_pylist()
        writer.truncate(cut)
        with writer.atomic_op() as op:
            for _ in range(6 - cut):
                op.add_entry(1, b"after!" * 100_000)
        with pytest.raises(Exception, match="was removed by a truncation during the read"):
            seen.extend(data for batch in batches for data in batch["data"].to_pylist())
    assert {data[:6] for data in seen[:5]} == {b"before"}
    assert {data[:6] for data in seen[5:]} <= {b"after!"}


def test_a_server_gives_the_same(make: Make) -> None:
    # Not the read-only file of the session: a server writes beside what it serves.
    block = encode(events.L2Block(7, 1, 1_700_000_000, hash=b"h" * 32), version=2)
    path = make([(0xB0, b"\x08\x02\x10\x07"), block, (3, b""), (9, b"x" * 3000)] * 500)
    with (
        StreamServer(path, host="127.0.0.1", port=0) as server,
        BlockingClient("127.0.0.1", server.port) as client,
    ):
        for name in ("entries", "blocks", "transactions", "bookmarks"):
            here = arrow.ArrowStream(server.stream, name, start=3, stop=1990).reader().read_all()
            assert here.num_rows
            assert arrow.ArrowStream(client, name, start=3, stop=1990).reader().read_all() == here
        assert arrow.ArrowStream(client).reader().read_all().num_rows == 2000
        # The client is free again.
        assert client.entry(1).data == block[1]


def test_the_version_chooses_the_layouts(first_version: Path) -> None:
    blocks = arrow.ArrowStream(first_version, "blocks").reader().read_all().to_pylist()
    assert [block["number"] for block in blocks] == [3]
    assert blocks[0]["fork_id"] == 9
    assert blocks[0]["hash"] is None
    with pytest.raises(DecodeFailed, match="entry 0"):
        arrow.ArrowStream(first_version, "batches", version=2).reader().read_all()
    assert arrow.ArrowStream(first_version, "batches").reader().read_all().num_rows == 0
    assert arrow.ArrowStream(first_version, "batches").reader().schema == arrow.schema("batches")


@pytest.fixture
def first_version(make: Make) -> Path:
    """A stream of version 1 with a block."""
    from datastreamer.zkevm import fixed

    start = fixed.StartL2Block(1, 3, 5, None, None, None, b"g" * 32, b"c" * 20, 9, None)
    return make([encode(start, version=1)], version=1)


@pytest.mark.parametrize("examples", [15, pytest.param(40, marks=pytest.mark.soak)])
def test_all_events_through_a_file(tmp_path: Path, examples: int) -> None:
    """Encoded, appended, read back: every table has its events in order, at their numbers."""
    kinds = {table.type: name for name, table in TABLES.items()}
    events_of_all = st.one_of(
        [st.tuples(st.just(kind), made) for kind, made in messages.items()]
    ).filter(lambda pair: fits(pair[1]))
    # A bookmark's key is 1 to 16 bytes; entries that fill pages are in between.
    anything = st.lists(
        events_of_all.filter(lambda pair: pair[0] != 0xB0 or 1 <= len(packed(pair)) <= 16)
        | st.just((9, None)),
        max_size=30,
    )
    counter = itertools.count()

    def packed(pair: tuple[int, Any]) -> bytes:
        return bytes(400_000) if pair[1] is None else encode(pair[1], version=3)[1]

    @settings(max_examples=examples)
    @given(anything)
    def check(pairs: list[tuple[int, Any]]) -> None:
        path = tmp_path / f"{next(counter)}.bin"
        with (
            DataStream.create(path, version=3, sync="os", index="memory") as stream,
            stream.atomic_op() as op,
        ):
            for pair in pairs:
                add = op.add_bookmark if pair[0] == 0xB0 else partial(op.add_entry, pair[0])
                add(packed(pair))
        rows = arrow.ArrowStream(path).reader().read_all().to_pylist()
        assert [(row["type"], row["data"]) for row in rows] == [
            (pair[0], packed(pair)) for pair in pairs
        ]
        for kind, name in kinds.items():
            table = arrow.ArrowStream(path, name).reader().read_all()
            table.validate(full=True)
            expected = [
                {"entry_number": i} | plain(event)
                for i, (its_kind, event) in enumerate(pairs)
                if its_kind == kind
            ]
            found = [
                {column: row[column] for column in want}
                for row, want in zip(table.to_pylist(), expected, strict=True)
            ]
            assert found == expected
        path.unlink()

    check()


# Damage.


@pytest.fixture
def paged(make: Make) -> Path:
    """Six pages with three entries each: entry 3 * p begins page p. Only the last has a
    checksum."""
    sizes = [300_000, 300_000, 400_000] * 6
    path = make((2, bytes([0x72, 0]) * (size // 2)) for size in sizes)
    without_checksums(path)
    with DataStream.open(path, read_only=True) as stream:
        assert [stream.reader.first_number(page) for page in range(6)] == [0, 3, 6, 9, 12, 15]
    return path


def hurt(path: Path, offset: int, content: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(content)


def numbers(reader: Any) -> tuple[list[int], Exception | None]:
    """The entries that a reader gives, and what ends it."""
    found: list[int] = []
    try:
        for batch in reader:
            found += batch.column(0).to_pylist()
    except Exception as error:  # noqa: BLE001
        return found, error
    return found, None


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
def test_of_a_hundred_pages_one_is_lost(hundred: Path, whole: Any, page: int, how: str) -> None:
    with damaged(hundred, page, how) as lost:
        given: list[Any] = []
        with pytest.raises(DamagedEntry):
            given.extend(arrow.ArrowStream(hundred).reader())
        before = pa.Table.from_batches(given, whole.schema)
        assert before.equals(whole.slice(0, lost.start))
        # Behind it all is well.
        behind = arrow.ArrowStream(hundred, start=lost.stop).reader().read_all()
        assert behind.equals(whole.slice(lost.stop))


@pytest.mark.parametrize(
    "page, how",
    [
        pytest.param(*case, marks=() if n % 3 == 0 else pytest.mark.soak)
        for n, case in enumerate(CASES[::3])
    ],
)
def test_an_export_has_what_precedes_damage(
    hundred: Path, whole: Any, tmp_path: Path, page: int, how: str
) -> None:
    out = tmp_path / "out"
    with damaged(hundred, page, how) as lost:
        with pytest.raises(DamagedEntry):
            arrow.export(hundred, out)
        parts = [path.name for path in sorted(out.glob("*.parquet"))]
        assert parts == ([f"entries-000000000000-{lost.start - 1:012d}.parquet"] * bool(lost.start))
        if lost.start:
            assert pq.read_table(out).equals(whole.slice(0, lost.start))
        # A single file has all or is not there; behind the damage there is all.
        with pytest.raises(DamagedEntry):
            arrow.export(hundred, tmp_path / "whole.parquet")
        assert not (tmp_path / "whole.parquet").exists()
        arrow.export(hundred, tmp_path / "behind.parquet", start=lost.stop)
        assert pq.read_table(tmp_path / "behind.parquet").equals(whole.slice(lost.stop))
    # Repaired, it continues where it ended.
    arrow.export(hundred, out)
    assert pq.read_table(out).sort_by("number").equals(whole)


def test_a_damaged_page_costs_no_other(paged: Path) -> None:
    place = page_start(3) + 17 + 300_000
    hurt(paged, place, b"\x07")
    for name in ("entries", "blocks"):
        found, error = numbers(arrow.ArrowStream(paged, name).reader())
        assert found == list(range(10))
        assert isinstance(error, DamagedEntry)
        assert error.offset == place
        assert "packet type 7" in str(error)
        # Behind it all is well.
        assert numbers(arrow.ArrowStream(paged, name, start=12).reader()) == (
            list(range(12, 18)),
            None,
        )
        assert numbers(arrow.ArrowStream(paged, name, stop=10).reader()) == (list(range(10)), None)


def test_a_message_that_is_none_costs_no_other(paged: Path) -> None:
    place = page_start(2) + 17 + 300_000 + 17
    hurt(paged, place, b"\x07")
    found, error = numbers(arrow.ArrowStream(paged, "blocks").reader())
    assert found == list(range(7))
    assert isinstance(error, DecodeFailed)
    assert error.number == 7
    assert numbers(arrow.ArrowStream(paged).reader()) == (list(range(18)), None)
    table = arrow.ArrowStream(paged, "blocks", on_error="null").reader().read_all()
    assert table.num_rows == 18
    reported = table.column("error").to_pylist()
    assert [i for i, text in enumerate(reported) if text is not None] == [7]
    assert reported[7] == str(error)
    left = arrow.ArrowStream(paged, "blocks", on_error="drop").reader().read_all()
    assert left.column("entry_number").to_pylist() == [*range(7), *range(8, 18)]


def test_what_is_refused(make: Make, tmp_path: Path) -> None:
    path = make([(1, b"")])
    with pytest.raises(FileMissing):
        arrow.ArrowStream(tmp_path / "missing").reader()
    with pytest.raises(BadRange, match="stop 1 is before start 2"):
        arrow.ArrowStream(path, start=2, stop=1).reader()
    with pytest.raises(UsageError, match="must be at least 0, batch_bytes"):
        arrow.ArrowStream(path, start=-1).reader()
    with pytest.raises(UsageError, match="must be at least 0, batch_bytes"):
        arrow.ArrowStream(path, batch_bytes=0).reader()
    with pytest.raises(UnknownEntry):
        arrow.ArrowStream(path, start=2).reader()


def test_an_unused_reader_holds_no_file(make: Make) -> None:
    arrow.ArrowStream(make([(1, b"")])).reader()  # an open file would warn, and warnings are errors


# The C stream interface.


def test_pyarrow_takes_a_stream(real_stream: Path) -> None:
    stream = arrow.ArrowStream(real_stream, "batches")
    assert pa.RecordBatchReader.from_stream(stream).read_all() == stream.reader().read_all()
    assert pa.table(stream) == stream.reader().read_all()  # again: it is read anew


def test_polars_takes_a_stream(real_stream: Path) -> None:
    polars = pytest.importorskip("polars", reason="polars is not installed: pip install '.[dev]'")
    stream = arrow.ArrowStream(real_stream, "blocks", columns=["number", "hash"])
    frame = polars.DataFrame(stream)
    assert frame.shape == (11318, 2)
    assert frame["number"].sum() == 11317 * 11318 // 2
    assert frame["hash"].n_unique() == 11318


def test_duckdb_takes_a_stream(real_stream: Path) -> None:
    duckdb = pytest.importorskip("duckdb", reason="duckdb is not installed: pip install '.[dev]'")
    blocks = arrow.ArrowStream(real_stream, "blocks")
    transactions = arrow.ArrowStream(real_stream, "transactions")
    assert blocks.schema.names[0] == transactions.schema.names[0] == "entry_number"
    with duckdb.connect() as connection:
        connection.register("blocks", blocks)
        connection.register("transactions", transactions)
        found = connection.sql(
            "select count(*), count(distinct b.number), sum(octet_length(encoded)) "
            "from transactions t join blocks b on t.l2block_number = b.number"
        ).fetchall()
        again = connection.sql("select count(*) from transactions").fetchall()
    rows = transactions.reader().read_all()
    sizes = [len(data) for data in rows.column("encoded").to_pylist()]
    blocks_there = set(rows.column("l2block_number").to_pylist())
    assert found == [(465, len(blocks_there), sum(sizes))]
    assert again == [(465,)]


def test_a_consumer_is_notified_of_damage(paged: Path) -> None:
    duckdb = pytest.importorskip("duckdb", reason="duckdb is not installed: pip install '.[dev]'")
    hurt(paged, page_start(3), b"\x07")
    entries = arrow.ArrowStream(paged, columns=["number"])
    with duckdb.connect() as connection:
        connection.register("entries", entries)
        with pytest.raises(duckdb.Error, match="the next page does not begin with entry 9"):
            connection.sql("select sum(number) from entries").fetchall()
    assert paged.stat().st_size > 6 * PAGE_SIZE
