"""Every row once in a file sink although the driver is killed in the middle of batches."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from pyspark.errors import StreamingQueryException

from datastreamer import DataStream, StreamServer
from datastreamer.reassembly import pack_message
from datastreamer.spark.reassembly.event_rows import EVENT_SCHEMA
from tests.spark import killed_driver
from tests.spark.reassembly.event_rows import core_events, plain
from tests.spark.reassembly.test_frames import produced
from tests.spark.settings import ENVIRONMENT, ROOT

ENTRIES = 8_000
PAYLOADS = 30
ATTEMPTS = 5
"""Spark gives a Python process ten seconds to start, which other load may exceed."""


def add(stream: DataStream) -> None:
    with stream.atomic_op() as op:
        first = stream.total_entries
        op.add_entries(2, [b"%d" % number * 100 for number in range(first, first + ENTRIES)])


def run_and_kill(folder: Path, server: str, seed: int) -> None:
    """Run the queries in another process, and kill it at some moment after the first batches."""
    choose = random.Random(seed)
    log = folder / "driver.log"
    for _ in range(ATTEMPTS):
        with log.open("wb") as errors:
            process = subprocess.Popen(
                [sys.executable, "-m", "tests.spark.killed_driver", str(folder), server],
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                cwd=ROOT,
                env={**os.environ, **ENVIRONMENT},
                start_new_session=True,
            )
        assert process.stdout is not None
        with process.stdout as said:
            if all(said.readline() for _ in range(choose.randint(1, 2))):
                # The JVM, which is the driver, is in its process group.
                delay, kill = choose.uniform(0, 0.4), (process.pid, signal.SIGKILL)
                timer = threading.Timer(delay, os.killpg, kill)
                timer.start()
                said.read()
                timer.join()
                assert process.wait(60) == -signal.SIGKILL
                return
        process.wait(60)
    raise AssertionError(f"the driver ended by itself: {log.read_text()[-3000:]}")


def finish(spark: Any, folder: Path, server: str) -> None:
    """Continue the queries up to the end of their streams."""
    for left in reversed(range(ATTEMPTS)):
        queries = killed_driver.start(spark, str(folder), server, to_the_end=True)
        try:
            for query in queries:
                query.awaitTermination()
            return
        except StreamingQueryException as error:
            if not left or "Python worker failed to connect back" not in str(error):
                raise
        finally:
            for query in queries:
                query.stop()


def kill_and_check(spark: Any, folder: Path, seeds: range) -> None:
    payloads = PAYLOADS * len(seeds)
    made = [message for at in range(3) for message in produced(at, payloads)]
    made += made[: -len(made) % len(seeds)]  # as many in each round; duplicates change nothing
    rest = [pack_message(*message) for message in made]
    path = folder / "stream.bin"
    with StreamServer(path, host="127.0.0.1", port=0, sync="os", in_process=True) as server:
        address = f"127.0.0.1:{server.port}"
        for seed in seeds:
            add(server.stream)
            now, rest = rest[: len(made) // len(seeds)], rest[len(made) // len(seeds) :]
            with (
                DataStream.open_or_create(
                    folder / "messages.bin", version=1, system_id=1
                ) as messages,
                messages.atomic_op() as op,
            ):
                op.add_entries(0x10, now)
            run_and_kill(folder, address, seed)
        stream = server.stream
        for name in ("file", "server"):
            written = len(os.listdir(folder / name))
            assert stream.total_entries > killed_driver.PER_BATCH * written, (
                "the killed driver left work"
            )
        finish(spark, folder, address)
        expected = [bytes(entry.data) for batch in stream.batches(0) for entry in batch]
    for name in ("file", "server"):
        table = spark.read.parquet(str(folder / name)).orderBy("number").toArrow()
        assert table.column("number").to_pylist() == list(range(len(expected)))
        assert table.column("data").to_pylist() == expected
    reported = spark.read.schema(EVENT_SCHEMA).parquet(str(folder / "payloads")).collect()
    events = core_events([(*message, "s", at) for at, message in enumerate(made)])
    assert plain(reported) == plain(events)
    assert {row.event for row in reported} == {"complete"}
    assert len(reported) == payloads


@pytest.mark.slow
def test_a_driver_that_is_killed(stateful: Any, tmp_path: Path) -> None:
    kill_and_check(stateful, tmp_path, range(1))


@pytest.mark.soak
@pytest.mark.parametrize("start", range(100, 140, 4))
def test_a_driver_that_is_killed_often(stateful: Any, tmp_path: Path, start: int) -> None:
    kill_and_check(stateful, tmp_path, range(start, start + 4))
