"""Publishing over loopback: operations of five entries of 200 B, acknowledged when on disk.

Beside it the same operations committed in the process itself, without waiting for each, and what
the disk allows: one bare pwrite and fdatasync for each, or for as many as are underway. The
server is a process of its own.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import trio

from bench.measure import Done
from datastreamer import BlockingPublisher, DataStream, connect_publisher

Versus = Callable[..., None]
SIZE = 200
OPERATION = 5
DATA = bytes(SIZE)
PACKED = OPERATION * (17 + SIZE)


@contextmanager
def served(folder: Path) -> Iterator[int]:
    """A server that takes publishers, in a process of its own; its port."""
    token = folder / "token"
    token.write_text("a token")
    token.chmod(0o600)
    path = folder / "published.bin"
    words = ("serve", path, "--create", "--host", "127.0.0.1", "--port", "0",
             "--publish-token-file", token, "--index", "memory")  # fmt: skip
    process = subprocess.Popen(
        [sys.executable, "-m", "datastreamer", *map(str, words)],
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stderr is not None
        yield int(process.stderr.readline().rsplit(":", 1)[1])
    finally:
        process.terminate()
        process.communicate()
        for left in folder.glob("published.bin*"):
            left.unlink()


def blocking(port: int, operations: int) -> Done:
    with BlockingPublisher("127.0.0.1", port, token="a token", take_over=True) as publisher:
        began = time.perf_counter()
        for _ in range(operations):
            op = publisher.atomic_op()
            for _ in range(OPERATION):
                op.add_entry(3, DATA)
            op.commit(wait=False)
        publisher.flush()
        return Done(operations * OPERATION, time.perf_counter() - began)


def under_trio(port: int, operations: int) -> Done:
    async def publish() -> Done:
        async with connect_publisher(
            "127.0.0.1", port, token="a token", take_over=True
        ) as publisher:
            began = time.perf_counter()
            for _ in range(operations):
                op = publisher.atomic_op()
                for _ in range(OPERATION):
                    op.add_entry(3, DATA)
                await op.commit(wait=False)
            await publisher.flush()
            return Done(operations * OPERATION, time.perf_counter() - began)

    return trio.run(publish)


def local(folder: Path, operations: int) -> Done:
    path = folder / "local.bin"
    with DataStream.create(path, index="memory") as stream:
        began = time.perf_counter()
        pending = None
        for _ in range(operations):
            op = stream.atomic_op()
            stream.start_atomic_op()
            for _ in range(OPERATION):
                op.add_entry(3, DATA)
            pending = op.commit(wait=False)
        assert pending is not None
        pending.wait()
        seconds = time.perf_counter() - began
    path.unlink()
    return Done(operations * OPERATION, seconds)


def bare(folder: Path, operations: int, together: int) -> Done:
    """One pwrite and one fdatasync for this number of operations."""
    path = folder / "bare.bin"
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL)
    try:
        total = operations * PACKED
        os.posix_fallocate(fd, 0, total)
        os.fsync(fd)
        part = bytes(together * PACKED)
        began = time.perf_counter()
        for at in range(0, total, len(part)):
            os.pwrite(fd, part, at)
            os.fdatasync(fd)
        return Done(operations * OPERATION, time.perf_counter() - began)
    finally:
        os.close(fd)
        path.unlink()


# What is underway at once at the most, without Trio: what one sync may cover.
TOGETHER = 512
PROMISED = 100_000


@pytest.mark.parametrize("client", [blocking, under_trio], ids=["blocking", "trio"])
def test_publishing(
    versus: Versus, smoke: bool, tmp_path: Path, client: Callable[[int, int], Done]
) -> None:
    operations = 100 if smoke else 20_000
    with served(tmp_path) as port:
        versus(
            f"publish over loopback, operations of 5, 200 B, all on disk ({client.__name__})",
            lambda: client(port, operations),
            {
                "promised": float(PROMISED),
                "committed in the process, none waits": lambda: local(tmp_path, operations),
                "one bare pwrite and fdatasync each": lambda: bare(tmp_path, operations // 50, 1),
                f"the same for {TOGETHER} at once": lambda: bare(tmp_path, operations, TOGETHER),
            },
            unit="entries/s",
            rounds=3,
            at_least=1.0,
        )
