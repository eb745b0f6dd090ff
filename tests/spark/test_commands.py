"""`datastreamer spark` as a user's shell runs it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from pyspark.errors import PySparkException

from datastreamer import DataStream
from datastreamer.spark.failures import reason
from datastreamer.spark.pipeline.manifest import EntryRange, Manifest
from tests.cli import process
from tests.spark import settings
from tests.spark.pipeline.test_pipeline import publish
from tests.spark.settings import ROOT


def run(*words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *words],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**process.ENVIRONMENT, **settings.ENVIRONMENT, **variables},
        timeout=600,
        check=False,
    )


def command(*words: str | Path, **variables: str) -> subprocess.CompletedProcess[str]:
    return run("-m", "datastreamer", "spark", *map(str, words), **variables)


# Both commands in one process, so that they share a JVM.
BOTH = """
import json, sys
from datastreamer.cli.main import main
sys.exit(max(main(["spark", *words, "--master", "local[2]"]) for words in json.loads(sys.argv[1])))
"""


@pytest.mark.slow
def test_a_stream_is_ingested_and_reported_on(java: None, tmp_path: Path) -> None:
    with DataStream.create(tmp_path / "stream.bin", version=3, system_id=7, sync="os") as stream:
        publish(stream, 9)
        total = stream.total_entries
    out = str(tmp_path / "out")
    words = [
        ["ingest", str(tmp_path / "stream.bin"), out],
        ["report", out, "--charts", str(tmp_path)],
    ]
    done = run("-c", BOTH, json.dumps(words))
    assert done.returncode == 0, done.stderr
    assert f"{total} entries in" in done.stderr
    assert f"it has all entries before {total}" in done.stderr
    message = {line["query"]: line["rows"] for line in map(json.loads, done.stdout.splitlines())}
    assert [row["number"] for row in message["open_batches"]] == [0]
    assert sum(row["blocks"] for row in message["transactions_per_block"]) == 9
    assert sorted(path.name for path in tmp_path.glob("*.png")) == ["blocks.png", "senders.png"]


def test_a_run_with_nothing_new_starts_no_spark(tmp_path: Path) -> None:
    with DataStream.create(tmp_path / "stream.bin", version=3, system_id=7, sync="os") as stream:
        publish(stream, 4)
        total = stream.total_entries
    manifest = Manifest({"path": str(tmp_path / "stream.bin")}, tmp_path / "out")
    wanted = EntryRange(0, total)
    manifest.begin(wanted)
    manifest.finish(wanted)
    manifest.close()
    (tmp_path / "bin").mkdir()
    java = tmp_path / "bin" / "java"
    # Says its version when it is looked for, and fails when Spark starts it.
    java.write_text('#!/bin/sh\n[ "$1" = -version ] && echo \'version "17.0.1"\'\n')
    java.chmod(0o755)
    words = ("ingest", tmp_path / "stream.bin", tmp_path / "out")
    done = command(*words, JAVA_HOME=str(tmp_path))
    assert (done.returncode, done.stdout) == (0, "")
    assert done.stderr == (f"{tmp_path}/out: nothing new; it has all entries before {total:,}\n")


def test_without_java_it_says_so_in_a_line(tmp_path: Path) -> None:
    done = command("report", tmp_path, JAVA_HOME=str(tmp_path))
    assert (done.returncode, done.stdout) == (1, "")
    assert "Spark needs Java 17 or 21, but JAVA_HOME is" in done.stderr
    assert len(done.stderr.splitlines()) == 1


# Each command in one process, with its exit code after its error.
EACH = """
import json, sys
from datastreamer.cli.main import main
for words in json.loads(sys.argv[1]):
    print(main(["spark", *words]), file=sys.stderr)
"""


def test_what_is_wrong_is_said_before_spark_starts(java: None, tmp_path: Path) -> None:
    (tmp_path / "text").write_text("no stream")
    for version, name in ((1, "one"), (2, "two")):
        with DataStream.create(tmp_path / f"{name}.bin", version=version, system_id=7, sync="os"):
            pass
    wrong = {
        "report {}": "{}: it holds no tables: ingest a stream into it first",
        "ingest {}/none {}/out": "{}/none: no such file",
        "ingest {}/text {}/out": "{}/text: not a stream file",
        "ingest {}/one.bin {}/out": "the stream is of version 1",
        "ingest {}/two.bin {}/text": "{}/text: cannot be created: Not a directory",
        "ingest 127.0.0.1:1 {}/out": "cannot connect to 127.0.0.1:1",
    }
    words = [[word.replace("{}", str(tmp_path)) for word in line.split()] for line in wrong]
    done = run("-c", EACH, json.dumps(words))
    assert done.stdout == ""
    said = done.stderr.splitlines()
    assert said[1::2] == ["1"] * len(wrong)
    for line, message in zip(said[::2], wrong.values(), strict=True):
        assert line.startswith(f"error: {message.replace('{}', str(tmp_path))}")
    assert not (tmp_path / "out").exists()


def test_no_master_of_sparks(tmp_path: Path) -> None:
    done = command("report", tmp_path, "--master", "somewhere")
    assert (done.returncode, done.stdout) == (2, "")
    assert "--master': it is local[2], local[*], spark://HOST:7077" in done.stderr


def test_the_reason_of_an_error_is_our_own_line() -> None:
    message = (
        "[SOMETHING] failed\nTraceback:\ndatastreamer.errors.UsageError: no such table\n\tat x"
    )
    assert reason(PySparkException(message)) == "no such table"
    assert reason(PySparkException("[SOMETHING] failed\nTraceback")) == "[SOMETHING] failed"
    message = (
        "An exception was thrown from the Python worker:\nTraceback (most recent call last):\n"
        '  File "a.py", line 1, in f\n    f()\nKeyError: 7\n\nDuring handling of the above '
        "exception, another exception occurred:\n\nTraceback (most recent call last):\n"
        '  File "a.py", line 2, in g\n    g()\n    ^^^\nValueError: it is too long\n\n\tat x'
    )
    assert reason(PySparkException(message)) == "ValueError: it is too long"
    message = "An error occurred while calling None.JavaSparkContext.\n: java.SomeError: no\n\tat x"
    assert reason(Exception(message)) == "java.SomeError: no"
