"""The examples of the pages about Spark run, and their tables of options are the code's."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from datastreamer import DataStream, Publishing, StreamServer
from datastreamer.reassembly import Producer
from datastreamer.spark import STATE_SETTINGS
from datastreamer.spark.options import NAMES_OF_OPTIONS, read_options
from datastreamer.zkevm import Sequencer

ROOT = Path(__file__).resolve().parent.parent.parent
TEXT = (ROOT / "docs" / "SPARK.md").read_text()
FOLLOWING = (ROOT / "docs" / "SPARK_STREAMING.md").read_text()
EXAMPLES = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
OPTIONS = TEXT.partition("\n## Options\n")[2].partition("\n## ")[0]
TABLE = re.findall(r"^\| (`.*?) \| .* \| (.*?) ?\|$", OPTIONS, re.MULTILINE)


@pytest.mark.parametrize(
    "example, printed",
    [
        (0, ["11318"]),
        (1, ["+-----------+--------------+"]),
        (2, ["100"]),
        (4, ["+------+-----+-------+"]),
    ],
    ids=["blocks", "SQL", "a range", "where a row is"],
)
def test_examples(
    example: int,
    printed: list[str],
    spark: Any,
    real_stream: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(real_stream.parent)
    # Python workers are in another folder.
    shown = EXAMPLES[example].replace("stream.bin", str(real_stream))
    exec(compile(shown, "docs/SPARK.md", "exec"), {})
    assert capsys.readouterr().out.split("\n")[0].split()[-1:] == printed


def test_examples_of_following_and_writing(
    spark: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In the order of the page, with the names that are made on the way."""
    examples = re.findall(r"```python\n(.*?)```", FOLLOWING, re.DOTALL)
    # Those of Delta need packages that `[dev]` does not install; that of DuckDB reads tables; that
    # of Real-Time Mode runs for minutes.
    following, shown, writing, batches = (
        it for it in examples if not re.search("delta|duckdb|iceberg|realTime", it)
    )
    following = following.replace("query.awaitTermination()", "")
    with StreamServer(
        tmp_path / "stream.bin", host="127.0.0.1", port=0, version=3, in_process=True
    ) as server:
        with Sequencer(server.stream).batch() as batch:
            for at in range(3):
                with batch.block(timestamp=at, hash=b"h" * 32, state_root=b"s" * 32):
                    pass
        names: dict[str, Any] = {}
        run(following.replace("127.0.0.1:6900", f"127.0.0.1:{server.port}"), names, tmp_path)
        try:
            names["query"].processAllAvailable()
        finally:
            names["query"].stop()
        run(shown, names, tmp_path)
        assert capsys.readouterr().out == "0\n"
        blocks = spark.read.parquet(str(tmp_path / "blocks"))
        assert blocks.orderBy("number").toArrow().column("number").to_pylist() == [0, 1, 2]
        before = server.stream.total_entries
    names["frame"] = spark.read.format("datastream").load(str(tmp_path / "stream.bin"))
    run(writing, names, tmp_path)
    with DataStream.open(tmp_path / "stream.bin", read_only=True) as stream:
        assert stream.total_entries == 2 * before
    (tmp_path / "token").write_text("t" * 32)
    (tmp_path / "token").chmod(0o600)
    publishing = Publishing(token_file=tmp_path / "token")
    names["rows"] = spark.readStream.format("datastream").load(str(tmp_path / "stream.bin"))
    with StreamServer(
        tmp_path / "written.bin", host="127.0.0.1", port=0, in_process=True, publishing=publishing
    ) as server:
        run(batches.replace("127.0.0.1:6900", f"127.0.0.1:{server.port}"), names, tmp_path)
        try:
            names["query"].processAllAvailable()
        finally:
            names["query"].stop()
        assert server.stream.total_entries == 2 * before + 1  # the fence


def run(example: str, names: dict[str, Any], folder: Path) -> None:
    """An example, with its files in a folder: Spark and its workers are in others."""
    for name in ("stream.bin", "blocks/", "blocks-checkpoint/", "token", "written-checkpoint/"):
        example = example.replace(f'"{name}"', f'"{folder / name}"')
    exec(compile(example, "docs/SPARK_STREAMING.md", "exec"), names)


def test_the_options_are_those_of_the_code() -> None:
    shown = set(re.findall(r"`(\w+)`", " ".join(names for names, _ in TABLE if "`" in names)))
    shown -= {"FAILFAST", "PERMISSIVE", "DROPMALFORMED"}
    # Those that only unbounded queries and writes have are on their own page.
    others = set(NAMES_OF_OPTIONS) - shown - {"paths", "file"}
    assert shown <= set(NAMES_OF_OPTIONS)
    assert len(others) == 7
    assert {name for name in others if f"`{name}`" in FOLLOWING} == others


def test_the_defaults_are_those_of_the_code() -> None:
    shown = {}
    for names, default in TABLE:
        for name in re.findall(r"`(\w+)`", names):
            if name in NAMES_OF_OPTIONS and default.strip("`") and default != "as above":
                shown[name] = default.strip("`")
    assert len(shown) == 13
    one = read_options({"server": "a:1"} | shown)
    assert one == read_options({"server": "a:1"})


def test_reassembly(
    spark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    blocks = {b"%032d" % at: {b"\x01" + b"%032d" % at: b"value"} for at in range(3)}
    for producer in ("alice", "bob"):
        with DataStream.create(tmp_path / f"{producer}.bin", version=1, system_id=1) as stream:
            for own, parts in blocks.items():
                Producer(stream).publish(own, parts)
    monkeypatch.chdir(tmp_path)
    text = (ROOT / "docs" / "SPARK_REASSEMBLY.md").read_text()
    first, second = re.findall(r"```python\n(.*?)```", text, re.DOTALL)[:2]
    shown = re.sub(r'"(alice|bob)\.bin"', rf'"{tmp_path}/\1.bin"', first)
    exec(compile(shown, "docs/SPARK_REASSEMBLY.md", "exec"), {})
    said = capsys.readouterr().out.split("\n")
    assert said[:3] == [f"{own!r} 1 alice" for own in blocks]
    selecting = EXAMPLES[3].replace('"alice.bin"', f'"{tmp_path}/alice.bin"')
    exec(compile(selecting, "docs/SPARK.md", "exec"), {})
    assert capsys.readouterr().out == "3\n"
    for name in ("alice.bin", "rows/", "rows-checkpoint/"):
        second = second.replace(f'"{name}"', f'"{tmp_path}/{name}"')
    found: dict[str, Any] = {}
    exec(compile(second, "docs/SPARK_REASSEMBLY.md", "exec"), found)
    try:
        found["query"].processAllAvailable()
    finally:
        found["query"].stop()
        for setting in STATE_SETTINGS:
            spark.conf.unset(setting)
    rows = spark.read.schema(found["rows"].schema).parquet(f"{tmp_path}/rows").collect()
    assert sorted(bytes(row.id) for row in rows) == sorted(blocks)
