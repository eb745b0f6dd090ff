"""Exports: parts that go on where they ended, what is refused, what damage leaves."""

from __future__ import annotations

import csv
import fcntl
import io
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.csv
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest

from datastreamer import DataStream, Where, arrow
from datastreamer.arrow.export import export
from datastreamer.arrow.parquet import PartWriter
from datastreamer.errors import (
    BadRange,
    DamagedPage,
    DecodeFailed,
    FileExists,
    NotFound,
    StreamFileError,
    UnknownEntry,
    UsageError,
)
from datastreamer.format import page_start
from datastreamer.storage.disk.access import Access
from datastreamer.zkevm import encode
from datastreamer.zkevm.events import L2Block
from tests.arrow.conftest import Make

COUNTS = {"entries": 34723, "blocks": 11318, "transactions": 465, "ger_updates": 0}


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def rows(folder: Path) -> Any:
    """All rows of a folder, read as others do."""
    return ds.dataset(folder, format="parquet").to_table().sort_by("number")


def add(path: Path, entries: list[tuple[int, bytes]]) -> None:
    with DataStream.open(path) as stream, stream.atomic_op() as op:
        for kind, data in entries:
            op.add_entry(kind, data)


@pytest.fixture
def three(make: Make) -> Path:
    return make([(1, b"a"), (2, b"b" * 300), (3, b"c")])


def test_a_file_has_the_rows(real_stream: Path, tmp_path: Path) -> None:
    for table, count in COUNTS.items():
        path = tmp_path / f"{table}.parquet"
        done = export(real_stream, path, table)
        assert done == (0, 34723, {table: count}, [path])
        found = pq.read_table(path)
        assert found.schema.remove_metadata() == arrow.schema(table)
        assert found.equals(arrow.ArrowStream(real_stream, table).reader().read_all())
    assert names(tmp_path) == sorted(f"{table}.parquet" for table in COUNTS)


def test_a_selection(make: Make, tmp_path: Path) -> None:
    """Rows of some entries; the next export continues after all that were read."""
    entries = [(1 + at % 3, b"key" + bytes([at % 2])) for at in range(60)]
    path, folder = make(entries), tmp_path / "out"
    where = [Where(2), Where(3, 3, b"\1")]
    done = export(path, folder, where=where, part_bytes=400)
    add(path, [(2, b"x"), (1, b"y"), (3, b"key\1")])
    again = export(path, folder, where=reversed(where))
    assert (done.first, done.next, again.first, again.next) == (0, 60, 60, 63)
    wanted = [
        n for n, (kind, data) in enumerate(entries) if kind == 2 or (kind, data[-1]) == (3, 1)
    ]
    found = rows(folder)
    assert found["number"].to_pylist() == [*wanted, 60, 62]
    assert found["data"].to_pylist()[-1] == b"key\1"
    for other, named in ((None, "every type"), ([Where(2)], "not of 2"), ([], "selects nothing")):
        with pytest.raises((StreamFileError, UsageError), match=named):
            export(path, folder, where=other)
    with pytest.raises(UsageError, match="where is for entries"):
        export(path, tmp_path / "blocks", "blocks", where=where)
    nothing = export(path, tmp_path / "none.parquet", where=[Where(9)])
    assert (nothing.rows, pq.read_table(nothing.files[0]).num_rows) == ({"entries": 0}, 0)


def test_all_tables_in_folders(real_stream: Path, tmp_path: Path) -> None:
    reported: list[tuple[int, int]] = []
    done = export(
        real_stream,
        tmp_path,
        "all",
        part_bytes=2_000_000,
        advance=lambda *progress: reported.append(progress),
    )
    assert names(tmp_path) == sorted(arrow.NAMES)
    assert reported[-1] == (34723, 34723)
    assert reported == sorted(reported)
    for table in arrow.NAMES:
        parts = names(tmp_path / table)
        assert len(parts) > 2
        assert parts[0].startswith(f"{table}-000000000000-")
        assert parts[-1].endswith("-000000034722.parquet")
        found = pa.concat_tables(pq.read_table(tmp_path / table / part) for part in parts)
        assert found.equals(arrow.ArrowStream(real_stream, table).reader().read_all())
        assert done.rows[table] == found.num_rows
    assert export(real_stream, tmp_path, "all").files == []


def test_names_of_files_in_capitals(three: Path, tmp_path: Path) -> None:
    for name in ("o.PARQUET", "o.Csv", "o.JSONL"):
        arrow.export(three, tmp_path / name)
        assert (tmp_path / name).is_file()
    assert pq.read_table(tmp_path / "o.PARQUET").num_rows > 0
    assert (tmp_path / "o.Csv").read_bytes().startswith(b"number,")


def test_an_export_to_a_folder_continues(three: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    first = export(three, out)
    assert names(out) == ["entries-000000000000-000000000002.parquet"]
    before = first.files[0].stat()  # without the access time, which a read changes
    assert export(three, out) == (3, 3, {"entries": 0}, [])
    add(three, [(4, b"d"), (5, b"")])
    again = export(three, out)
    assert again.rows == {"entries": 2}
    assert names(out)[1:] == ["entries-000000000003-000000000004.parquet"]
    after = first.files[0].stat()
    assert (after.st_ino, after.st_mtime_ns) == (before.st_ino, before.st_mtime_ns)
    assert rows(out).equals(arrow.ArrowStream(three).reader().read_all())
    assert export(three, out, start=0).files == export(three, out, start=5).files == []


def test_a_table_that_is_behind_catches_up(real_stream: Path, tmp_path: Path) -> None:
    export(real_stream, tmp_path, "all", stop=20_000)
    for part in (tmp_path / "blocks").iterdir():
        part.unlink()
    export(real_stream, tmp_path / "blocks", "blocks", stop=5_000)
    done = export(real_stream, tmp_path, "all")
    assert done.first == 5_000
    assert names(tmp_path / "blocks") == [
        "blocks-000000000000-000000004999.parquet",
        "blocks-000000005000-000000019999.parquet",
        "blocks-000000020000-000000034722.parquet",
    ]
    assert names(tmp_path / "entries") == [
        "entries-000000000000-000000019999.parquet",
        "entries-000000020000-000000034722.parquet",
    ]
    found = ds.dataset(tmp_path / "blocks").to_table().sort_by("entry_number")
    assert found.equals(arrow.ArrowStream(real_stream, "blocks").reader().read_all())


def test_a_range(real_stream: Path, tmp_path: Path) -> None:
    export(real_stream, tmp_path, start=100, stop=200)
    assert names(tmp_path) == ["entries-000000000100-000000000199.parquet"]
    export(real_stream, tmp_path, stop=250)
    assert rows(tmp_path).column("number").to_pylist() == list(range(100, 250))
    for start in (99, 251):
        with pytest.raises(StreamFileError, match=f"holds entries 100 to 249: .* entry {start}"):
            export(real_stream, tmp_path, start=start)


def test_parts_are_fit_for_ranges(real_stream: Path, tmp_path: Path) -> None:
    path = tmp_path / "blocks.parquet"
    export(real_stream, path, "blocks")
    metadata = pq.ParquetFile(path).metadata
    group = metadata.row_group(0)
    columns = {group.column(i).path_in_schema: group.column(i) for i in range(group.num_columns)}
    number = columns["number"]
    assert (number.statistics.min, number.statistics.max) == (0, 11317)
    assert "DELTA_BINARY_PACKED" in number.encodings
    assert number.has_column_index
    assert number.compression == "ZSTD"
    assert columns["hash"].statistics is None
    assert "RLE_DICTIONARY" in columns["coinbase"].encodings
    assert group.sorting_columns[0].column_index == 0


def test_row_groups_are_bounded(tmp_path: Path) -> None:
    batch = pa.RecordBatch.from_arrays(
        [pa.array([1]), pa.array([2]), pa.array([b"x" * 9_000_000])], schema=arrow.schema()
    )
    writer = PartWriter(tmp_path, "entries", arrow.schema(), Access.by_umask())
    for _ in range(9):
        writer.write(batch)
    from datastreamer.position import Position

    writer.publish(tmp_path / "out.parquet", 0, Position(9), None, [])
    writer.discard()
    metadata = pq.ParquetFile(tmp_path / "out.parquet").metadata
    assert [metadata.row_group(i).num_rows for i in range(metadata.num_row_groups)] == [4, 4, 1]
    assert names(tmp_path) == ["out.parquet"]


# Parts that do not fit.


def test_another_stream_is_refused(three: Path, make: Make, tmp_path: Path) -> None:
    out = tmp_path / "out"
    export(three, out)
    before = names(out)
    other = make([(1, b"a"), (2, b"B" * 300), (3, b"c"), (4, b"d")], name="other.bin")
    with pytest.raises(StreamFileError, match="entry 1 of the stream is not the one"):
        export(other, out)
    version = make([(1, b"a")] * 9, name="version.bin", version=3)
    with pytest.raises(StreamFileError, match="of a stream of version 2, system id 7, type 1, not"):
        export(version, out)
    with DataStream.open(three) as stream:
        stream.truncate(2)
    with pytest.raises(StreamFileError, match="ends with entry 2, but the stream holds 2 entries"):
        export(three, out)
    add(three, [(3, b"C"), (3, b"more")])
    with pytest.raises(StreamFileError, match="entry 2 of the stream is not the one"):
        export(three, out)
    assert names(out) == before


def test_a_copy_of_the_stream_will_do(three: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    export(three, out)
    copy = Path(shutil.copyfile(three, tmp_path / "copy.bin"))
    add(copy, [(9, b"x")])
    assert export(copy, out).rows == {"entries": 1}


def test_parts_with_a_gap_or_of_another_export(three: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    export(three, out, stop=1)
    export(three, out, stop=2)
    export(three, out)
    (out / "unrelated.parquet").write_bytes(b"")  # not named as a part: left alone
    (out / "entries-000000000001-000000000001.parquet").unlink()
    with pytest.raises(
        StreamFileError, match=r"begins with entry 2, but entries-0.* before entry 1"
    ):
        export(three, out)
    last = out / "entries-000000000002-000000000002.parquet"
    moved = out / "entries-000000000001-000000000001.parquet"
    last.rename(moved)
    with pytest.raises(StreamFileError, match="no export wrote it under this name"):
        export(three, out)
    moved.write_bytes(b"PAR1")
    with pytest.raises(StreamFileError, match="cannot be read"):
        export(three, out)
    pq.write_table(pa.table({"number": [1]}), moved)
    with pytest.raises(StreamFileError, match="no export wrote it"):
        export(three, out)


def test_other_columns_are_refused(make: Make, tmp_path: Path) -> None:
    path = make([(2, b""), (2, b"")])
    export(path, tmp_path / "out", "blocks", stop=1)
    with pytest.raises(StreamFileError, match="columns differ from those of this export"):
        export(path, tmp_path / "out", "blocks", on_error="null")


def test_another_version_is_refused(make: Make, tmp_path: Path) -> None:
    path = make([(2, b""), (2, b"")])
    out = tmp_path / "out"
    export(path, out, "all", stop=1)
    with pytest.raises(StreamFileError, match=r"blocks-0.* decoded as version 2, not 1: exp"):
        export(path, out, "all", version=1)
    assert export(path, out / "entries", version=1).rows == {"entries": 1}
    assert export(path, out, "all", version=2).rows["blocks"] == 1


def test_a_part_that_does_not_say_its_version(make: Make, tmp_path: Path) -> None:
    path = make([(2, b""), (2, b"")])
    (part,) = export(path, tmp_path / "out", "blocks", stop=1).files
    reported = json.loads(pq.read_metadata(part).metadata[b"datastreamer"])
    assert reported.pop("version") == 2
    table = pq.read_table(part)
    pq.write_table(table.replace_schema_metadata({"datastreamer": json.dumps(reported)}), part)
    assert export(path, tmp_path / "out", "blocks").rows == {"blocks": 1}


def test_two_exports_at_once(three: Path, tmp_path: Path) -> None:
    out = tmp_path / "entries"
    out.mkdir()
    left = out / ".entries.1.tmp"
    left.write_bytes(b"unfinished")
    other = os.open(out, os.O_RDONLY)
    fcntl.flock(other, fcntl.LOCK_EX)
    with pytest.raises(StreamFileError, match="another export is writing to it"):
        export(three, out)
    assert left.exists()
    with pytest.raises(StreamFileError, match="another export is writing to it"):
        export(three, tmp_path, "all")
    os.close(other)
    export(three, out)
    assert names(out) == ["entries-000000000000-000000000002.parquet"]


@pytest.mark.parametrize("name", ["x.parquet", "x.jsonl", "x.csv"])
def test_a_file_is_never_replaced(three: Path, tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("mine")
    with pytest.raises(FileExists, match="it exists already"):
        export(three, tmp_path / name)
    assert (tmp_path / name).read_text() == "mine"
    assert not [each for each in names(tmp_path) if each.endswith(".tmp")]


def test_what_is_refused(three: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match="there is no table 'logs'"):
        export(three, tmp_path / "out", "logs")
    with pytest.raises(UsageError, match="the table all needs a folder"):
        export(three, tmp_path / "out.csv", "all")
    for name in ("o.json", "o.csv.gz", "o.JSON"):
        with pytest.raises(UsageError, match=r"cannot be written: name a folder, or a new file"):
            arrow.export(three, tmp_path / name)
        assert not (tmp_path / name).exists()
    monkeypatch.chdir(tmp_path)
    before = names(tmp_path)
    with pytest.raises(UsageError, match="the path to export to is empty"):
        export(three, "")
    assert names(tmp_path) == before
    with pytest.raises(UsageError, match="part_bytes must be 1 or more"):
        export(three, tmp_path / "out", part_bytes=0)
    with pytest.raises(UnknownEntry):
        export(three, tmp_path / "out", start=4)
    with pytest.raises(BadRange):
        export(three, tmp_path / "out", start=2, stop=1)
    assert not (tmp_path / "out").exists()
    with pytest.raises(FileExists, match="it is a file: name a folder, or a new file"):
        export(three, three)


# Damage.


def test_what_precedes_damage_is_kept(make: Make, tmp_path: Path) -> None:
    path = make((2, bytes([0x72, 0]) * 150_000) for _ in range(9))  # three a page
    content = path.read_bytes()
    place = page_start(1) + 17 + 300_000
    path.write_bytes(content[:place] + b"\x07" + content[place + 1 :])
    out = tmp_path / "out"
    # Of the damaged page nothing is exported.
    with pytest.raises(DamagedPage, match=r"page 1 \(entries 3 to 5\)"):
        export(path, out, "all")
    assert names(out / "blocks") == ["blocks-000000000000-000000000002.parquet"]
    assert names(out / "entries") == ["entries-000000000000-000000000002.parquet"]
    with pytest.raises(DamagedPage):
        export(path, tmp_path / "one.parquet")
    assert "one.parquet" not in names(tmp_path)
    # Repaired, it continues there.
    path.write_bytes(content)
    assert export(path, out, "all").rows["blocks"] == 6


def test_an_entry_that_is_not_an_event(make: Make, tmp_path: Path) -> None:
    path = make([(1, b"\x08\x01"), (2, b"\x08\x01"), (2, b"\x07"), (4, b"\x01"), (2, b"")])
    out = tmp_path / "out"
    with pytest.raises(DecodeFailed, match="entry 2"):
        export(path, out, "all")
    for table in arrow.NAMES:
        assert names(out / table) == [f"{table}-000000000000-000000000001.parquet"]
    with pytest.raises(DecodeFailed, match="entry 2"):
        export(path, out, "all")
    assert export(path, out, "all", on_error="drop").rows == dict.fromkeys(arrow.NAMES, 0) | {
        "entries": 3,
        "blocks": 1,
    }
    reported = export(path, tmp_path / "null.jsonl", "blocks", on_error="null")
    assert reported.rows == {"blocks": 3}
    lines = [json.loads(line) for line in (tmp_path / "null.jsonl").read_text().splitlines()]
    assert [line["number"] for line in lines] == [1, None, 0]
    assert lines[1]["error"].startswith("entry 2: invalid L2Block")


def test_a_killed_export_continues(real_stream: Path, tmp_path: Path) -> None:
    program = (
        "import os; from datastreamer.arrow import export; "
        "export({!r}, {!r}, 'all', part_bytes=1, "
        "advance=lambda done, total: os._exit(9) if done > {} else None)"
    )
    for after in (1, 9_000, 20_000, 30_000):
        killed = subprocess.run(
            [sys.executable, "-c", program.format(str(real_stream), str(tmp_path), after)],
            check=False,
            timeout=60,
        )
        assert killed.returncode == 9
        assert [each for each in names(tmp_path / "blocks") if each.endswith(".tmp")]
    export(real_stream, tmp_path, "all")
    for table in arrow.NAMES:
        parts = names(tmp_path / table)
        assert len(parts) > 2
        found = pa.concat_tables(pq.read_table(tmp_path / table / part) for part in parts)
        assert found.equals(arrow.ArrowStream(real_stream, table).reader().read_all())


def test_a_disk_that_refuses(real_stream: Path, tmp_path: Path) -> None:
    program = (
        "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, 300_000)); "
        "from datastreamer.cli.main import main; raise SystemExit(main(['export', {!r}, {!r}]))"
    )
    for name in ("out", "out.parquet", "out.csv"):
        out = tmp_path / name
        done = subprocess.run(
            [sys.executable, "-c", program.format(str(real_stream), str(out))],
            check=False,
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode == 1
        assert done.stderr == f"error: {out}: it could not be written: File too large\n"
    assert names(tmp_path / "out") == []
    assert not [each for each in names(tmp_path) if each not in ("made.bin", "out")]


def test_places_that_cannot_be_written_or_read(three: Path, tmp_path: Path) -> None:
    def reported(out: Path, table: str = "entries") -> str:
        with pytest.raises(StreamFileError) as caught:
            export(three, out, table)
        return str(caught.value)

    gone = tmp_path / "gone"
    for name in ("out.csv", "out.parquet"):
        why = "it could not be written: No such file or directory"
        assert reported(gone / name) == f"{gone / name}: {why}"
    (tmp_path / "blocks").touch()
    assert reported(tmp_path, "all") == f"{tmp_path / 'blocks'}: it cannot be created: File exists"
    inside = tmp_path / "blocks" / "out"
    assert reported(inside) == f"{inside}: it cannot be created: Not a directory"
    part = tmp_path / "out" / "entries-000000000000-000000000000.parquet"
    part.parent.mkdir()
    part.symlink_to(gone)
    assert reported(part.parent) == f"{part}: is a symbolic link, which is not followed here"
    part.unlink()
    part.mkdir()
    assert reported(part.parent) == f"{part}: is not a regular file"


def test_what_others_keep_in_the_folder_stays(three: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    (out / ".drafts.tmp").mkdir(parents=True)
    others = (".notes.tmp", ".entries.tmp", ".entries.x.tmp", ".mine.12.tmp", "entries.12.tmp")
    for name in others:
        (out / name).write_text("mine")
    (out / ".blocks.12.tmp").write_text("left by an export that was killed")

    def advance(done: int, total: int) -> None:
        export(three, out)

    for name in ("single.parquet", "single.csv"):
        export(three, out / name, advance=advance)
    part = "entries-000000000000-000000000002.parquet"
    assert names(out) == sorted([*others, ".drafts.tmp", "single.parquet", "single.csv", part])
    assert rows(out / "single.parquet").num_rows == 3


@pytest.mark.parametrize("name", ["out", "out.parquet", "out.csv"])
@pytest.mark.parametrize("follow", [True, False])
def test_a_stream_that_is_truncated_meanwhile(
    make: Make, tmp_path: Path, name: str, follow: bool
) -> None:
    path = make([(1, b"before" * 100_000)] * 8)
    out = tmp_path / name
    with DataStream.open(path) as writer, DataStream.open(path, read_only=True, follow=follow) as s:

        def advance(done: int, total: int) -> None:
            if done == 3:
                writer.truncate(5)
                with writer.atomic_op() as op:
                    op.add_entry(1, b"after!" * 100_000)

        with pytest.raises(NotFound, match="was removed by a truncation during the read"):
            export(s, out, advance=advance)
    assert (names(out) if name == "out" else out.exists()) == (
        ["entries-000000000000-000000000005.parquet"] if name == "out" else False
    )
    if name == "out":
        assert export(path, out).files == []
        assert rows(out).column("data").to_pylist()[5] == b"after!" * 100_000


# Text.


def test_json_lines_and_csv(make: Make, tmp_path: Path) -> None:
    path = make([(1, b"\x01"), (2, bytes.fromhex("0807120100")[:2]), (3, b"")])
    export(path, tmp_path / "x.jsonl")
    assert (tmp_path / "x.jsonl").read_text().splitlines() == [
        '{"number": 0, "type": 1, "length": 1, "data": "0x01"}',
        '{"number": 1, "type": 2, "length": 2, "data": "0x0807"}',
        '{"number": 2, "type": 3, "length": 0, "data": "0x"}',
    ]
    export(path, tmp_path / "x.csv")
    with (tmp_path / "x.csv").open(newline="") as file:
        assert list(csv.reader(file)) == [
            ["number", "type", "data"],
            ["0", "1", "0x01"],
            ["1", "2", "0x0807"],
            ["2", "3", "0x"],
        ]
    export(path, tmp_path / "blocks.csv", "blocks")
    with (tmp_path / "blocks.csv").open(newline="") as file:
        (row,) = csv.DictReader(file)
    assert (row["entry_number"], row["number"], row["hash"], row["debug"]) == ("1", "7", "0x", "")


def test_the_limit_that_nodes_write(make: Make, tmp_path: Path) -> None:
    block = L2Block(7, block_gas_limit=2**64 - 1, base_fee=b"\x01" + bytes(8))
    path = make([encode(block, version=3)])
    numbers = {"block_gas_limit": 2**64 - 1, "base_fee": 2**64}
    export(path, tmp_path / "folder", "blocks")
    export(path, tmp_path / "blocks.jsonl", "blocks")
    export(path, tmp_path / "blocks.csv", "blocks")
    (row,) = rows(tmp_path / "folder").to_pylist()
    assert {name: row[name] for name in numbers} == numbers
    row = json.loads((tmp_path / "blocks.jsonl").read_text())
    assert {name: row[name] for name in numbers} == numbers
    with (tmp_path / "blocks.csv").open(newline="") as file:
        (row,) = csv.DictReader(file)
    assert {name: int(row[name]) for name in numbers} == numbers


@pytest.mark.parametrize("more", [[], ["r\rx", "\r", "\r\n", 'q"\r\n,', "\rr"]])
def test_csv_gives_texts_back(make: Make, tmp_path: Path, more: list[str]) -> None:
    texts = ["plain", "a,b", 'q"q', "n\nl", " ", "\t\x85\u2028", *more]
    path = make(encode(L2Block(debug=text), version=2) for text in texts)
    out = tmp_path / "blocks.csv"
    export(path, out, "blocks")
    with out.open(newline="", encoding="utf-8") as file:
        content = file.read()
    for field in ("plain", '"a,b"', '"q""q"', '"n\nl"', " ", "\t\x85\u2028"):
        assert f",{field},0,,,\n" in content
    debug = content.splitlines()[0].split(",").index("debug")
    assert [row[debug] for row in csv.reader(io.StringIO(content, newline=""))][1:] == texts
    options = pyarrow.csv.ParseOptions(newlines_in_values=True)
    assert pyarrow.csv.read_csv(out, parse_options=options)["debug"].to_pylist() == texts
    pandas = pytest.importorskip("pandas", reason="pandas is not installed")
    assert pandas.read_csv(out)["debug"].tolist() == texts
