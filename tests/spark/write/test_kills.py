"""Every row once in a stream although drivers and executors are killed in the middle of batches."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from datastreamer import DataStream, Publishing, StreamServer
from tests.spark.settings import ENVIRONMENT, ROOT
from tests.spark.write import killed_writer

ROWS = 500


@contextlib.contextmanager
def driver(folder: Path, server: str, master: str) -> Iterator[subprocess.Popen[str]]:
    environment = {**os.environ, **ENVIRONMENT}
    environment.pop("SPARK_LOCAL_HOSTNAME", None)
    with (folder / "driver.log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.spark.write.killed_writer", str(folder), server, master],
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            cwd=ROOT,
            env=environment,
            start_new_session=True,
        )
    with process:
        try:
            yield process
        finally:
            os.killpg(process.pid, signal.SIGKILL)


def executors(group: int) -> list[int]:
    """The JVMs of executors of that driver."""
    found = []
    for each in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if each.name.isdecimal() and os.getpgid(int(each.name)) == group:
                command = (each / "cmdline").read_bytes()
                if b"CoarseGrainedExecutorBackend" in command and b"java" in command[:200]:
                    found.append(int(each.name))
    return found


def kill_and_check(
    spark: Any, folder: Path, seed: int, drivers: int, executors_of_each: int
) -> None:
    choose = random.Random(seed)
    (folder / "token").write_text("token-of-32-bytes-or-more-for-the-sink")
    (folder / "token").chmod(0o600)
    publishing = Publishing(token_file=folder / "token")
    target = folder / "written.bin"
    DataStream.create(target, version=2, system_id=7).close()
    # Two cores and an executor on each, in processes of their own, or threads of the driver.
    master = "local-cluster[2,1,512]" if executors_of_each else "local[2]"
    rows = 0
    with (
        DataStream.create(folder / "source.bin", version=2, sync="os") as source,
        StreamServer(
            target, host="127.0.0.1", port=0, in_process=True, publishing=publishing, sync="os"
        ) as server,
    ):
        address = f"127.0.0.1:{server.port}"
        for _ in range(drivers):
            with driver(folder, address, master) as process:
                assert process.stdout is not None
                for _ in range(max(1, executors_of_each)):
                    rows = add(source, rows)
                    said = process.stdout.readline()
                    assert said, (folder / "driver.log").read_text()[-3000:]
                    time.sleep(choose.uniform(0, 0.4))
                    running = executors(process.pid) if executors_of_each else []
                    if running:
                        os.kill(choose.choice(running), signal.SIGKILL)
        query = killed_writer.start(spark, str(folder), address, to_the_end=True)
        query.awaitTermination()
        found = [
            bytes(entry.data)
            for batch in server.stream.batches(0)
            for entry in batch
            if not entry.is_bookmark
        ]
    assert found == [b"%d" % number for number in range(rows)]


def add(stream: DataStream, first: int) -> int:
    with stream.atomic_op() as op:
        op.add_entries(1, [b"%d" % number for number in range(first, first + ROWS)])
    return first + ROWS


@pytest.mark.skipif(sys.platform != "linux", reason="finds the executors in /proc")
def test_killed_drivers(spark: Any, tmp_path: Path) -> None:
    kill_and_check(spark, tmp_path, 1, drivers=1, executors_of_each=0)


@pytest.mark.soak
@pytest.mark.parametrize("drivers, executors_of_each", [(20, 0), (5, 6)])
@pytest.mark.parametrize("seed", [2, 3])
def test_a_hundred_kills(
    spark: Any, tmp_path: Path, seed: int, drivers: int, executors_of_each: int
) -> None:
    """50 drivers and up to 60 executors in all."""
    kill_and_check(spark, tmp_path, seed, drivers, executors_of_each)
