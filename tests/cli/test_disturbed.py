"""Every command, ended by a signal in its work, or with a full disk: the exit code says that the
work is not complete."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from datastreamer.archive.archived_file import ArchivedFile
from datastreamer.archive.writer import ArchiveWriter
from datastreamer.errors import UsageError
from datastreamer.service.embedded import StreamServer
from datastreamer.storage.objects.store import Store
from datastreamer.storage.stream import DataStream
from tests.cli.process import ENVIRONMENT, PATIENCE
from tests.cli.test_hostile_text import CASES
from tests.conftest import Golden

# What each command is given: its words, where the signal arrives, and the exit code of SIGTERM. S
# is a stream, M a metrics port, P a server's port, D the Go program's index of the stream. What is
# not here is done at once.
WORK: dict[str, tuple[list[str], str, int]] = {
    "serve": (["S", "--port", "0"], "S", 0),
    "relay": (["--server", "P", "--file", "relay.bin", "--port", "0"], "relay.bin", 0),
    "tail": (["S"], "S", 0),
    "top": (["M"], "socket.connect", 0),
    # There is a last update, or entry.
    "top ": (["M", "--count", "3"], "socket.connect", 143),
    "cat ": (["S", "--follow", "--count", "100000"], "S", 143),
    "cat  ": (["S", "--follow", "--to", "100000"], "S", 143),
    **{
        name: (words, at, 143)
        for name, (words, at) in {
            "health": (["P"], "socket.connect"),
            "clients": (["M"], "socket.connect"),
            "info": (["S"], "S"),
            "cat": (["S"], "S"),
            "entry": (["S", "1"], "S"),
            "bookmark": (["S", "block:1"], "S"),
            "export": (["S", "tables"], "S"),
            "reassemble": (["S"], "S"),
            "append": (["S"], "S"),
            "split": (["S"], "S"),
            "truncate": (["S", "10", "--yes"], "S"),
            "snapshot": (["S", "copy.bin"], "S"),
            "demo": (["S", "--ops", "100000"], "S"),
            "verify": (["S"], "S"),
            "repair": (["S"], "S"),
            "reindex": (["S"], "S"),
            "sums": (["S"], "S"),
            "import-leveldb": (["S", "--db", "D"], "S"),
            "bench": (["--seconds", "0.01"], "stream.bin"),
            "archive push": (["S", "U"], "S"),
            "archive restore": (["A", "copy.bin"], "copy.bin.restoring"),
            "archive verify": (["A", "--against", "S"], "S"),
            # What reads the store alone opens nothing that Python reports.
            "archive list": (["A"], "import"),
            "archive prune": (["A", "--yes"], "import"),
            "zkevm check": (["S"], "S"),
            "zkevm batch": (["S", "1"], "S"),
            "zkevm block": (["S", "1"], "S"),
            "zkevm diff": (["S", "S"], "S"),
        }.items()
    },
}
AT_ONCE = {"completion", *(f"context {name}" for name in ("add", "ls", "remove", "show", "use"))}
# These start Java, to which they connect.
SPARK = {
    "spark ingest": ["S", "tables", "--master", "local[1]"],
    "spark ingest ": ["S", "tables", "--master", "local[1]", "--follow"],
    "spark report": ["ingested", "--master", "local[1]"],
}
PRINTS = [
    *("info", "cat", "entry", "bookmark", "export", "truncate", "snapshot", "import-leveldb"),
    *("archive push", "archive restore", "archive verify", "archive list"),
    *("verify", "repair", "reindex", "sums", "bench", "zkevm check", "zkevm batch", "zkevm block"),
]


@pytest.fixture
def place(made: Path, golden: Golden, tmp_path: Path) -> Path:
    golden.database("small")
    shutil.copyfile(made, tmp_path / "operations.bin")
    (tmp_path / "operations").write_text('{"type": 3, "text": "a"}\n{"commit": true}\n' * 3)
    return tmp_path


def walked(place: Path, runs: list[dict[str, Any]], **variables: str) -> list[tuple[int, str]]:
    """Exit codes and errors of commands; S, M and P in their words are what `WORK` says."""
    source, archived = place / "operations.bin", place / "archive"
    with closing(ArchivedFile(source)) as file:
        ArchiveWriter(file, Store(archived.as_uri())).publish()
    with StreamServer(source, host="127.0.0.1", port=0, metrics_port=0, in_process=True) as server:
        names = {
            "P": f"127.0.0.1:{server.port}",
            "M": f"127.0.0.1:{server.metrics_port}",
            "D": str(place / "small.db"),
            "A": archived.as_uri(),
            "U": (place / "pushed").as_uri(),
        }
        for number, run in enumerate(runs):
            folder = place / str(number)
            folder.mkdir()
            stream = folder / "s.bin"
            shutil.copyfile(source, stream)
            here = {**names, "S": str(stream)}
            run["words"] = [
                here.get(word, f"{folder}/{word}" if word.endswith((".bin", "tables")) else word)
                for word in run["words"]
            ]
            run["at"] = "s.bin" if run.get("at") == "S" else run.get("at")
            run["input"] = str(place / "operations")
        done = subprocess.run(
            [sys.executable, "-m", "tests.cli.walk"],
            input=json.dumps(runs),
            capture_output=True,
            text=True,
            check=True,
            timeout=PATIENCE,
            cwd=place,
            env={**ENVIRONMENT, "PYTHONPATH": str(Path(__file__).parents[2]), **variables},
        )
    return [(code, errors) for code, errors in json.loads(done.stdout)]


def test_every_command_is_here() -> None:
    known = {name for name in CASES if not name.startswith("dsapp")}
    assert known == {*AT_ONCE, *(name.strip() for name in (*WORK, *SPARK))}


def test_a_signal_in_the_work(place: Path) -> None:
    runs = [
        {"words": [*name.split(), *words], "at": at, "signal": int(signal.SIGTERM)}
        for name, (words, at, _) in WORK.items()
    ]
    results = walked(place, runs)
    for (name, (_, _, code)), (found, errors) in zip(WORK.items(), results, strict=True):
        assert (name, found, errors) == (name, code, errors)
        assert ("error: " in errors and "ended by SIGTERM" in errors) == (code == 143), errors


def test_a_signal_in_spark(place: Path) -> None:
    pytest.importorskip("pyspark")
    from datastreamer.spark import find_java
    from datastreamer.spark.pipeline.folder import TableFolder
    from datastreamer.spark.pipeline.manifest import EntryRange, Manifest
    from datastreamer.spark.pipeline.source import Source
    from datastreamer.spark.pipeline.tables import columns_of
    from tests.spark import settings

    try:
        find_java()
    except UsageError as error:
        pytest.skip(str(error))
    # pyspark leaves the pipe to Java to the garbage collection.
    variables = {**settings.ENVIRONMENT, "PYTHONWARNINGS": "ignore"}
    source, ingested = Source({"path": str(place / "operations.bin")}), str(place / "ingested")
    with closing(Manifest(TableFolder(ingested), source, columns_of(source.options))) as manifest:
        total = source.look().total
        name = manifest.begin(0, total)
        manifest.put(0, 0, [EntryRange(name, 0, total, ("",))], source.state(total))
    runs = [
        {
            "words": [*name.split(), *(ingested if w == "ingested" else w for w in words)],
            "at": "socket.connect",
            "signal": int(signal.SIGTERM),
        }
        for name, words in SPARK.items()
    ]
    for name, (code, errors) in zip(SPARK, walked(place, runs, **variables), strict=True):
        # Java writes its own lines.
        assert (name, code, "Traceback" in errors) == (name, 143, False), errors
        assert "error: ended by SIGTERM" in errors.splitlines()


def test_a_full_disk_for_what_is_printed(place: Path) -> None:
    runs = [{"words": [*name.split(), *WORK[name][0], "--json"], "full": True} for name in PRINTS]
    for name, (code, errors) in zip(PRINTS, walked(place, runs), strict=True):
        assert (name, code) == (name, 1), errors
        last = errors.splitlines()[-1]
        assert (name, last) == (name, "error: standard output: No space left on device")


def test_a_full_disk_for_what_is_written(place: Path) -> None:
    """A limit of the size of files fails writes as a full disk does."""
    with DataStream.open(place / "operations.bin") as stream, stream.atomic_op() as op:
        op.add_entries(3, [os.urandom(100_000) for _ in range(30)])
    words = [
        ["demo", "S", "--ops", "100000"],
        ["append", "S"],
        ["snapshot", "S", "copy.bin"],
        ["export", "S", "tables"],
        ["export", "S", "tables.jsonl"],
    ]
    runs = [{"words": each, "limit": 2_000_000} for each in words]
    for run, (code, errors) in zip(words, walked(place, runs), strict=True):
        assert (run, code) == (run, 1), errors
        assert (run, errors.splitlines()[-1][:7]) == (run, "error: ")
