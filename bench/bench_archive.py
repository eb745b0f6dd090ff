"""Archives: how small a stream becomes, how fast it is archived, restored and read, and what a
writer notices of its archiver.

The store is a folder, so that these are the costs of this program, and not of a network.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from bench.measure import Done
from datastreamer import DataStream
from datastreamer.archive.archived_file import ArchivedFile
from datastreamer.archive.beside import archiving
from datastreamer.archive.options import ArchiveOptions
from datastreamer.archive.reading import Archive
from datastreamer.archive.restore import restore
from datastreamer.archive.writer import ArchiveWriter
from datastreamer.format import HEADER_PAGE_SIZE
from datastreamer.storage.objects.opened import OpenArchive
from datastreamer.storage.objects.store import Store
from tests.conftest import real_stream
from tests.programs import missing

__all__ = ["real_stream"]

Versus = Callable[..., None]
Record = Callable[..., None]
MB = 1_000_000


@pytest.fixture(scope="module")
def stream(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    """A demo sequencer's stream."""
    path = tmp_path_factory.mktemp("archived") / "s.bin"
    size = "3MB" if request.config.getoption("benchmark_disable") else "500MB"
    program = [sys.executable, "-m", "datastreamer", "demo", str(path), "--size", size]
    subprocess.run([*program, "--sync", "os"], check=True, capture_output=True)
    return path


@pytest.fixture(scope="module")
def archive(stream: Path) -> Iterator[OpenArchive]:
    folder = stream.with_name("archive")
    push(stream, folder)
    yield OpenArchive.open(folder.as_uri())
    shutil.rmtree(folder)


@pytest.fixture(scope="module")
def node(
    real_stream: Path, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Path:
    """Entries of a production node, again and again."""
    path = tmp_path_factory.mktemp("node") / "s.bin"
    with (
        DataStream.open(real_stream, read_only=True) as once,
        DataStream.create(path, version=once.header.version, sync="os") as stream,
    ):
        batches = list(once.batches())
        for _ in range(1 if request.config.getoption("benchmark_disable") else 40):
            with stream.atomic_op() as op:
                for batch in batches:
                    op.add_batch(batch)
    return path


def push(path: Path, folder: Path, threads: int = 4) -> None:
    source = ArchivedFile(path)
    try:
        ArchiveWriter(source, Store(folder.as_uri()), threads=threads).publish()
    finally:
        source.close()


def size_of(path: Path) -> float:
    with DataStream.open(path, read_only=True) as stream:
        return (stream.header.total_length - HEADER_PAGE_SIZE) / MB


def test_size(record: Record, stream: Path, archive: OpenArchive) -> None:
    packed = sum(row.size for row in archive.newest()[0].rows) / MB
    record(
        "an archive of a demo sequencer's stream",
        packed,
        {"1 / 1.8 of the stream": size_of(stream) / 1.8},
        unit="MB",
        at_least=1.0,
        less_is_better=True,
    )


@pytest.mark.parametrize("threads", [1, 4])
def test_push(versus: Versus, stream: Path, tmp_path: Path, threads: int) -> None:
    def ours() -> None:
        shutil.rmtree(tmp_path / "archive", ignore_errors=True)
        push(stream, tmp_path / "archive", threads)

    versus(
        f"push to an archive, {threads} thread{'s' if threads > 1 else ''}",
        ours,
        {"the goal": 250.0},
        unit="MB/s",
        amount=size_of(stream),
        at_least=1.0,
    )


def test_push_of_a_node(versus: Versus, node: Path, tmp_path: Path) -> None:
    def ours() -> None:
        shutil.rmtree(tmp_path / "archive", ignore_errors=True)
        push(node, tmp_path / "archive", 1)

    versus(
        "push a production node's stream to an archive, 1 thread",
        ours,
        {"the goal": 250.0},
        unit="MB/s",
        amount=size_of(node),
        at_least=1.0,
    )


def test_restore(versus: Versus, stream: Path, archive: OpenArchive, tmp_path: Path) -> None:
    manifest = archive.newest()[0]

    def clean() -> None:
        for each in tmp_path.iterdir():
            shutil.rmtree(each) if each.is_dir() else each.unlink()

    def ours() -> Done:
        clean()
        begin = time.perf_counter()
        restore(archive, tmp_path / "r.bin", manifest)
        return Done(None, time.perf_counter() - begin)

    def snapshot() -> Done:
        clean()
        begin = time.perf_counter()
        with DataStream.open(stream, read_only=True) as opened:
            opened.snapshot(tmp_path / "r.bin")
        return Done(None, time.perf_counter() - begin)

    versus(
        "restore of an archive, with checksums and index",
        ours,
        {"the goal": 400.0, "a snapshot of the file": snapshot},
        unit="MB/s",
        amount=size_of(stream),
        at_least=1.0,
    )


def test_read(versus: Versus, stream: Path, archive: OpenArchive) -> None:
    def ours() -> None:
        with Archive.open(archive.url) as opened:
            assert sum(len(batch) for batch in opened.batches())

    def file() -> None:
        with DataStream.open(stream, read_only=True) as opened:
            assert sum(len(batch) for batch in opened.batches())

    versus(
        "read an archive from entry 0",
        ours,
        {"the goal": 500.0, "the file, from the page cache": file},
        unit="MB/s",
        amount=size_of(stream),
        at_least=1.0,
    )


def test_java_decodes(record: Record, archive: OpenArchive) -> None:
    decode_in_java(record, archive, "pages of an archive, decoded in Java")


def test_java_decodes_a_node(record: Record, node: Path, tmp_path: Path) -> None:
    push(node, tmp_path)
    what = "pages of a production node's archive, decoded in Java"
    decode_in_java(record, OpenArchive.open(tmp_path.as_uri()), what)


def decode_in_java(record: Record, archive: OpenArchive, what: str) -> None:
    """The frames of one segment, in one thread."""
    spark = find_spec("pyspark")
    if spark is None or spark.origin is None or missing("java"):
        pytest.skip("needs java and pyspark, which has zstd for it")
    jars = Path(spark.origin).with_name("jars").glob("zstd-jni-*.jar")
    row = max(archive.newest()[0].rows, key=lambda row: row.pages)
    source = Path(__file__).with_name("Decode.java")
    command = ["java", "--class-path", ":".join(map(str, jars)), source]
    ran = subprocess.run(
        [*command, Path(archive.url.removeprefix("file://")) / row.object],
        check=True,
        capture_output=True,
        text=True,
    )
    record(
        what,
        float(ran.stdout),
        {"the goal": 2000.0},
        unit="MB/s",
        at_least=1.0,
        less_is_better=False,
    )


@pytest.mark.parametrize("which", [50, 99])
def test_commits_beside_an_archiver(
    record: Record, smoke: bool, tmp_path: Path, which: int
) -> None:
    """Of operations of 5 entries of 200 B, some 5,000 a second, with sync policy os."""
    seconds = 0.2 if smoke else 8.0

    def latencies(options: ArchiveOptions | None, name: str) -> list[float]:
        found = []
        with (
            DataStream.create(tmp_path / f"{name}.bin", sync="os") as stream,
            archiving(stream, options),
        ):
            end = time.perf_counter() + seconds
            due = time.perf_counter()
            while (now := time.perf_counter()) < end:
                if now < due:
                    time.sleep(due - now)
                due += 0.0002
                begin = time.perf_counter()
                with stream.atomic_op() as op:
                    for _ in range(5):
                        op.add_entry(2, bytes(200))
                found.append(time.perf_counter() - begin)
        return sorted(found)

    rounds: list[tuple[float, float]] = []
    for at in range(1 if smoke else 5):
        options = ArchiveOptions((tmp_path / f"archive{at}").as_uri(), interval=1.0)
        pair = latencies(options, f"with{at}"), latencies(None, f"without{at}")
        with_it, without = (each[len(each) * which // 100] * 1e6 for each in pair)
        rounds.append((with_it, without))
    ours, plain = (sorted(each)[len(rounds) // 2] for each in zip(*rounds, strict=True))
    record(
        f"commits beside an archiver, p{which}",
        ours,
        {"without": plain},
        unit="µs",
        at_least=1 / (1.05 if which == 50 else 1.15),
        less_is_better=True,
    )
