"""The examples as processes that are killed, while the stream grows and is truncated."""

from __future__ import annotations

import signal
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from datastreamer.service.embedded import StreamServer
from datastreamer.storage.stream import DataStream
from tests.cli.process import ENVIRONMENT, Running

EXAMPLES = Path(__file__).resolve().parent.parent.parent / "examples"


def example(name: str, *words: object) -> list[str]:
    return [sys.executable, "-W", "error", str(EXAMPLES / name), *map(str, words)]


@contextmanager
def running(words: list[str], cwd: Path) -> Iterator[Running]:
    started = Running(words, cwd)
    try:
        yield started
    finally:
        started.process.kill()
        started.process.wait()
        started.out.rest()
        started.err.rest()
        for stream in (started.process.stdout, started.process.stderr):
            assert stream is not None
            stream.close()


# A signal from outside may come before or after the position of a batch is saved.
DIES_WITHIN = """
import os, signal, sys
sys.path.insert(0, sys.argv[1])
import at_least_once

process = at_least_once.process

def and_die(batch):
    process(batch)
    if batch.next_number == 200:
        os.kill(os.getpid(), signal.SIGKILL)

at_least_once.process = and_die
at_least_once.follow(sys.argv[2], int(sys.argv[3]), sys.argv[4], None)
"""


def finish(words: list[str], cwd: Path) -> str:
    done = subprocess.run(
        words, cwd=cwd, env=ENVIRONMENT, capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def add(stream: DataStream, count: int, mark: bytes = b"") -> None:
    with stream.atomic_op() as op:
        for number in range(stream.total_entries, stream.total_entries + count):
            op.add_entry(3, mark + str(number).encode())


def test_at_least_once(tmp_path: Path) -> None:
    with StreamServer(tmp_path / "s.bin", host="127.0.0.1", port=0) as server:
        add(server.stream, 100)
        words = example("at_least_once.py", "127.0.0.1", server.port, "cursor")
        dying = [sys.executable, "-W", "error", "-c", DIES_WITHIN, str(EXAMPLES), *words[4:]]
        with running(dying, tmp_path) as following:
            assert following.out.next() == "entries 0 to 99"
            add(server.stream, 100)
            assert following.out.next() == "entries 100 to 199"
            assert following.wait() == -signal.SIGKILL
        # The second batch was not said to be dealt with.
        assert finish([*words, "200"], tmp_path) == "entries 100 to 199\n"
        assert finish([*words, "200"], tmp_path) == ""
        add(server.stream, 1)
        assert finish([*words, "201"], tmp_path) == "entries 200 to 200\n"


def test_exactly_once(tmp_path: Path) -> None:
    def rows() -> list[tuple[int, bytes]]:
        database = sqlite3.connect(tmp_path / "d.sqlite")
        found = database.execute("SELECT number, data FROM entry ORDER BY rowid").fetchall()
        database.close()
        return found

    with StreamServer(tmp_path / "s.bin", host="127.0.0.1", port=0) as server:
        add(server.stream, 100)
        words = example("exactly_once.py", "127.0.0.1", server.port, "d.sqlite")
        with running(words, tmp_path) as following:
            assert following.out.next() == "up to entry 99"
            add(server.stream, 100)
            assert following.out.next() == "up to entry 199"
            following.signal(signal.SIGKILL)
            following.wait()
        add(server.stream, 100)
        finish([*words, "300"], tmp_path)
        assert rows() == [(number, str(number).encode()) for number in range(300)]
        # Between two runs, and under one.
        server.stream.truncate(290)
        add(server.stream, 20, b"new ")
        with running([*words, "320"], tmp_path) as following:
            assert following.out.next() == "up to entry 309"
            server.stream.truncate(305)
            add(server.stream, 15, b"newer ")
            following.out.until("up to entry 319")
            assert following.wait() == 0
        assert rows() == [
            *[(number, str(number).encode()) for number in range(290)],
            *[(number, b"new %d" % number) for number in range(290, 305)],
            *[(number, b"newer %d" % number) for number in range(305, 320)],
        ]
