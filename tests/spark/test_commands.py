"""`datastreamer spark` as a user's shell runs it."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from pyspark.errors import PySparkException

from datastreamer import DataStream, StreamServer
from datastreamer.spark.failures import reason
from datastreamer.spark.pipeline.folder import TableFolder
from datastreamer.spark.pipeline.manifest import EntryRange, Manifest
from datastreamer.spark.pipeline.source import Source
from datastreamer.spark.pipeline.tables import columns_of
from datastreamer.spark.versions import VERSION
from tests.cli import process
from tests.spark import settings
from tests.spark.pipeline.test_pipeline import publish
from tests.spark.pipeline.worlds import World, expected, manifest_of, rows_of
from tests.spark.settings import ROOT


def process_environment() -> dict[str, str]:
    return {**process.ENVIRONMENT, **settings.ENVIRONMENT}


def run(*words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *words],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**process_environment(), **variables},
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
    """With the words of the tutorial, the command apart that goes on until it is stopped."""
    page = (ROOT / "docs" / "tutorials" / "DATA_ENGINEER.md").read_text()
    shown = re.findall("^datastreamer spark (.*)$", page, re.MULTILINE)
    ingest, follow, report = map(shlex.split, shown)
    assert follow == [*ingest, "--follow", "--every", "2"]
    path = tmp_path / "stream.bin"
    with StreamServer(
        path, host="127.0.0.1", port=0, version=3, system_id=7, sync="os", in_process=True
    ) as server:
        publish(server.stream, 9)
        total = server.stream.total_entries
        here = {
            "127.0.0.1:6900": f"127.0.0.1:{server.port}",
            "spark-tables/": str(tmp_path / "out"),
            "charts/": str(tmp_path),
        }
        words = [[here.get(word, word) for word in each] for each in (ingest, report)]
        done = run("-c", BOTH, json.dumps(words))
    assert done.returncode == 0, done.stderr
    assert f"{total} entries in" in done.stderr
    assert "Closing" not in done.stderr
    assert f"it has all entries before {total}" in done.stderr
    message = {line["query"]: line["rows"] for line in map(json.loads, done.stdout.splitlines())}
    assert [row["number"] for row in message["open_batches"]] == [0]
    assert sum(row["blocks"] for row in message["transactions_per_block"]) == 9
    assert sorted(path.name for path in tmp_path.glob("*.png")) == ["blocks.png", "senders.png"]


def test_a_run_with_nothing_new_starts_no_spark(tmp_path: Path) -> None:
    with DataStream.create(tmp_path / "stream.bin", version=3, system_id=7, sync="os") as stream:
        publish(stream, 4)
        total = stream.total_entries
    source = Source({"path": str(tmp_path / "stream.bin")})
    folder = TableFolder(str(tmp_path / "out"))
    manifest = Manifest(folder, source, columns_of(source.options))
    name = manifest.begin(0, total)
    manifest.put(0, 0, [EntryRange(name, 0, total, ("",))], source.state(total))
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


@pytest.mark.parametrize("name", ["PYSPARK_DRIVER_PYTHON", "PYSPARK_PYTHON"])
def test_a_wrong_python_is_named(java: None, tmp_path: Path, name: str) -> None:
    if VERSION < (4, 1) and name == "PYSPARK_DRIVER_PYTHON":
        pytest.skip("Spark 4.0 looks for the source with PYSPARK_PYTHON alone, and the rest works")
    with DataStream.create(tmp_path / "stream.bin", version=3, system_id=7, sync="os") as stream:
        publish(stream, 1)
    words = ("ingest", tmp_path / "stream.bin", tmp_path / "out", "--master", "local[1]")
    done = command(*words, **{name: "/nowhere/python"})
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == (
        f"error: {name} is /nowhere/python, which cannot load this package: No such file or "
        f"directory: unset it, or name a Python that can, such as {sys.executable}"
    )


@pytest.mark.slow
def test_an_ingest_that_is_killed(java: None, tmp_path: Path) -> None:
    path, out = tmp_path / "stream.bin", tmp_path / "out"
    words = ("ingest", path, out, "--chunk", "6", "--master", "local[2]")
    with DataStream.create(path, version=3, system_id=7, sync="os") as stream:
        world = World(stream, 3, 8)
        world.append(40)
        for ending in (signal.SIGINT, signal.SIGKILL):
            seen = len(list(out.glob("_manifest/*.json")))
            with (tmp_path / "said").open("w") as errors:
                killed = subprocess.Popen(
                    [sys.executable, "-m", "datastreamer", "spark", *map(str, words)],
                    cwd=ROOT,
                    env={**process_environment(), "PYTHONWARNINGS": "ignore"},
                    stderr=errors,
                    start_new_session=True,
                )
            until = time.monotonic() + 120
            while len(list(out.glob("_manifest/*.json"))) < seen + 2:
                assert time.monotonic() < until
                assert killed.poll() is None
                time.sleep(0.02)
            time.sleep(world.choose.uniform(0, 2))
            os.killpg(killed.pid, ending)
            said = (tmp_path / "said").read_text
            code = 130 if ending == signal.SIGINT else -signal.SIGKILL
            assert killed.wait() == code, said()
            assert "java_gateway" not in said()
            found = manifest_of(out)
            assert world.is_a_prefix(rows_of(out, found), found["ranges"][-1]["stop"])
            world.change()
        done = command(*words[:3], "--master", "local[2]")
        assert done.returncode == 0, done.stderr
        assert rows_of(out, manifest_of(out)) == expected(world.events())


# Each command in one process, with its exit code after its error. No server is waited for.
EACH = """
import json, sys
from datastreamer.cli.main import main
from datastreamer.spark import options
options.RETRY_SECONDS = 0.5
for words in json.loads(sys.argv[1]):
    print(main(["spark", *words]), file=sys.stderr)
"""


def test_what_is_wrong_is_said_before_spark_starts(java: None, tmp_path: Path) -> None:
    (tmp_path / "text").write_text("no stream")
    with DataStream.create(tmp_path / "two.bin", version=2, system_id=7, sync="os"):
        pass
    wrong = {
        "report {}": "{}: it holds no tables: ingest a stream into it first",
        "ingest {}/none {}/out": "{}/none: no such file",
        "ingest {}/text {}/out": "{}/text: not a stream file",
        "ingest {}/two.bin {}/text": "{}/text: cannot be created: File exists",
        "ingest 127.0.0.1:1 {}/out": "cannot connect to 127.0.0.1:1",
    }
    words = [[word.replace("{}", str(tmp_path)) for word in line.split()] for line in wrong]
    done = run("-c", EACH, json.dumps(words))
    assert done.stdout == ""
    said = [line for line in done.stderr.splitlines() if not line.endswith("; retrying")]
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
    message += "\nCaused by: java.OtherError: no\nCaused by: java.io.IOException: disk full\n\tat y"
    assert reason(Exception(message)) == "java.SomeError: no: disk full"
