"""`export`: files and servers to files."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from datastreamer import DataStream
from tests.cli.conftest import BLOCKS, ENTRIES, Invoke

pq = pytest.importorskip(
    "pyarrow.parquet", reason="pyarrow is not installed: pip install 'datastreamer[arrow]'"
)


def test_a_folder_and_again(invoke: Invoke, source: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    done = invoke("export", source, out, "--to", ENTRIES // 2 - 1)
    assert (done.code, done.out) == (0, b"")
    half = ENTRIES // 2
    assert done.err == f"{out}: {half} entries, from entries 0 to {half - 1}, in 1 new file\n"
    done = invoke("export", source, out)
    numbers = f"from entries {half} to {ENTRIES - 1}"
    assert done.err == f"{out}: {half} entries, {numbers}, in 1 new file\n"
    done = invoke("export", source, out)
    assert (done.code, done.err) == (0, f"{out} already has all entries before {ENTRIES}\n")
    assert sum(pq.read_table(part).num_rows for part in out.iterdir()) == ENTRIES


def test_json_lines_are_those_of_cat(invoke: Invoke, source: str, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    assert invoke("export", source, out, "--from", 3, "--to", 17).code == 0
    lines = invoke("cat", source, "--from", 3, "--to", 17, "--json").out
    # An export is of the entries, not of what this machine knows of them.
    assert out.read_bytes() == re.sub(rb', "time": "[^"]*"', b"", lines)


def test_a_selection(invoke: Invoke, source: str, tmp_path: Path) -> None:
    words = ("--type", "3", "--prefix", "2:0x00")
    assert invoke("export", source, tmp_path / "a.jsonl", *words).code == 0
    lines = (tmp_path / "a.jsonl").read_text().splitlines()
    found = [(line["number"], line["type"]) for line in map(json.loads, lines)]
    wanted = [(e["number"], e["type"]) for e in invoke("cat", source, *words, "--json").objects]
    assert found == wanted
    assert found
    assert "--prefix: " in invoke("export", source, "a.csv", "--prefix", "0x00").failed(2)
    assert "--prefix: " in invoke("export", source, "a.csv", "--type", "3", "--prefix", "x").failed(
        2
    )
    blocks = invoke("export", source, tmp_path / "b.csv", "--table", "blocks", "--type", "3")
    assert "--type is for --table entries" in blocks.failed(2)


def test_all_tables(invoke: Invoke, source: str, tmp_path: Path) -> None:
    # The demo stream has version 1.
    done = invoke("export", source, tmp_path, "--table", "all")
    assert done.code == 0
    assert f"{ENTRIES} entries, {BLOCKS} blocks, {BLOCKS} block_ends" in done.err
    assert done.err.endswith(f"from entries 0 to {ENTRIES - 1}, in 8 new files\n")
    (blocks,) = (tmp_path / "blocks").iterdir()
    decoded = [
        json.loads(line)
        for line in invoke("cat", source, "--type", 1, "--decode", "zkevm", "--json").lines
    ]
    result = pq.read_table(blocks).to_pylist()
    assert [row["entry_number"] for row in result] == [line["number"] for line in decoded]
    assert [row["number"] for row in result] == [line["fields"]["number"] for line in decoded]
    assert [f"0x{row['coinbase'].hex()}" for row in result] == [
        line["fields"]["coinbase"] for line in decoded
    ]


def test_errors(invoke: Invoke, made: Path, tmp_path: Path) -> None:
    assert "'logs' is not one of" in invoke("export", made, "x", "--table", "logs").failed(2)
    assert "OUT is empty" in invoke("export", made, "").failed(2)
    order = invoke("export", made, "x", "--from", 2, "--to", 1).failed(2)
    assert order.endswith("--to 1 is less than --from 2")
    one = tmp_path / "all.parquet"
    assert "the table all needs a folder" in invoke("export", made, one, "--table", "all").failed(2)
    one.touch()
    assert "it exists already" in invoke("export", made, one).failed()
    missing = tmp_path / "missing.bin"
    assert "no such file" in invoke("export", missing, tmp_path / "out").failed()
    result = invoke("export", made, tmp_path / "out", "--from", ENTRIES + 1).failed()
    assert result.startswith(f"{made}: no entry {ENTRIES + 1}")


def test_advice_about_entries_that_are_not_events(
    invoke: Invoke, made: Path, tmp_path: Path
) -> None:
    # Blocks of version 1 are not protobuf messages.
    table = ("--table", "blocks", "--stream-version", 2)
    one, folder = tmp_path / "one.csv", tmp_path / "folder"
    result = invoke("export", made, one, *table).failed()
    assert result.startswith(f"{made}: entry ")
    assert result.endswith("; --on-error null or drop continues past such entries")
    assert invoke("export", made, one, *table, "--on-error", "null").code == 0
    result = invoke("export", made, folder, *table).failed()
    assert result.endswith(
        "; --on-error drop continues past such entries; null needs another folder"
    )
    assert len(list(folder.iterdir())) == 1
    result = invoke("export", made, folder, *table, "--on-error", "null").failed()
    assert result.endswith(
        "columns differ from those of this export (on_error may differ): export to another folder"
    )
    assert invoke("export", made, tmp_path / "other", *table, "--on-error", "null").code == 0
    assert invoke("export", made, folder, *table, "--on-error", "drop").code == 0


def test_an_empty_stream(invoke: Invoke, tmp_path: Path) -> None:
    DataStream.create(tmp_path / "empty.bin").close()
    result = invoke("export", tmp_path / "empty.bin", tmp_path / "out")
    assert (result.code, result.err) == (0, f"{tmp_path / 'empty.bin'} holds no entries\n")


def test_without_pyarrow_the_error_names_the_extra(made: Path, tmp_path: Path) -> None:
    program = (
        "import sys; sys.modules['pyarrow'] = None; from datastreamer.cli.main import main; "
        f"sys.exit(main(['export', {str(made)!r}, {str(tmp_path / 'out')!r}]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], check=False, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 1
    assert done.stderr == (
        "error: Arrow needs a package that is not installed: install it with pip install "
        "'datastreamer[arrow]'\n"
    )


def test_a_file_that_cannot_be_written_is_wrong_usage(invoke: Invoke, tmp_path: Path) -> None:
    with DataStream.create(tmp_path / "s.bin"):
        pass
    out = tmp_path / "x.txt"
    assert "cannot be written" in invoke("export", tmp_path / "s.bin", out).failed(2)
    assert not out.exists()
