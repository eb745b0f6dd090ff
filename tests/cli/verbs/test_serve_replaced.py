"""`serve` as a process while its stream file is removed, replaced and restored."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from datastreamer.client.blocking_client import BlockingClient
from datastreamer.errors import DatastreamerError
from datastreamer.storage.stream import DataStream
from tests.cli.process import Running, done, running

REMOVED = "the file was removed"
AT = ("--host", "127.0.0.1", "--port", "0")


def make(path: Path, *entries: bytes) -> None:
    with DataStream.create(path, sync="os", index="memory") as stream, stream.atomic_op() as op:
        for data in entries:
            op.add_bookmark(data[:16])
            op.add_entry(1, data)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "s.bin"
    make(path, b"old")
    return path


@contextmanager
def serving(path: Path, *words: object) -> Iterator[tuple[Running, int]]:
    with running("serve", path, *AT, *words, cwd=path.parent) as process:
        yield process, process.port()


def served(port: int, number: int) -> bytes:
    with BlockingClient("127.0.0.1", port) as client:
        return bytes(client.entry(number).data)


def until_served(port: int, number: int, data: bytes, tries: int = 600) -> None:
    """Several processes notice the new file independently; a connection may be to any of them."""
    agreed = 0
    for _ in range(tries):
        try:
            agreed = agreed + 1 if served(port, number) == data else 0
        except (DatastreamerError, OSError):
            agreed = 0
        if agreed == 8:
            return
    raise AssertionError(f"entry {number} is not {data!r}")


@pytest.mark.parametrize("workers", [1, 2])
def test_a_file_that_is_replaced(path: Path, workers: int) -> None:
    other = path.with_name("other.bin")
    make(other, b"new", b"newer")
    with serving(path, "--follow", "--workers", workers) as (process, port):
        assert served(port, 1) == b"old"
        os.replace(other, path)
        process.err.until(
            f"{REMOVED}, and another file is at its path now; its clients are disconnected"
        )
        process.err.until(r"now serving the stream at this path \(4 entries\)")
        until_served(port, 1, b"new")
        with DataStream.open(path, sync="os", index="memory") as stream:
            with stream.atomic_op() as op:
                op.add_entry(1, b"since")
            until_served(port, 4, b"since")
        process.signal(signal.SIGTERM)
        assert process.wait() == 0
        result = process.err.seen + process.err.rest()
        assert sum("its clients are disconnected" in line for line in result) == 1
        assert sum("serving the stream" in line for line in result) == 1


@pytest.mark.parametrize("workers", [1, 2])
def test_a_file_that_is_removed_and_created_later(path: Path, workers: int) -> None:
    with serving(path, "--follow", "--workers", workers) as (process, port):
        path.unlink()
        process.err.until(f"{REMOVED}; its clients are disconnected")
        process.err.until("waiting for a stream at this path: .*no such file")
        path.write_bytes(b"junk" * 10_000)
        process.err.until("waiting for a stream at this path: .*not a stream file")
        path.unlink()
        make(path, b"new")
        process.err.until("now serving the stream at this path")
        until_served(port, 1, b"new")
        with BlockingClient("127.0.0.1", port) as client:
            assert client.bookmark(b"new").data == b"new"
        process.signal(signal.SIGTERM)
        assert process.wait() == 0


def held(pid: int, path: Path) -> list[str]:
    """The removed files of `path` that a process has open."""
    found = []
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):  # the descriptor was closed meanwhile
            found.append(os.readlink(link))
    return [name for name in found if name == f"{path} (deleted)"]


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="there is no /proc")
@pytest.mark.parametrize("workers", [1, 2])
def test_the_old_file_is_closed(path: Path, workers: int) -> None:
    other = path.with_name("other.bin")
    make(other, b"new")
    with serving(path, "--follow", "--workers", workers) as (process, port):
        children = Path(f"/proc/{process.process.pid}/task/{process.process.pid}/children")
        pids = [process.process.pid, *map(int, children.read_text().split())]
        os.replace(other, path)
        process.err.until("serving the stream")
        until_served(port, 1, b"new")
        for _ in range(200):
            if not any(held(pid, path) for pid in pids):
                break
            served(port, 1)
            os.sched_yield()
            signal.sigtimedwait([], 0.05)
        assert not any(held(pid, path) for pid in pids)


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="there is no /proc")
def test_a_writing_server_logs_it_and_its_entries_can_be_copied(path: Path) -> None:
    with serving(path) as (process, port):
        path.unlink()
        found = process.err.until("run `datastreamer (snapshot /proc/[0-9]+/fd/[0-9]+) OUT`")
        assert served(port, 1) == b"old"
        saved = path.with_name("saved.bin")
        assert done(*found[1].split(), saved, cwd=path.parent).returncode == 0
        process.signal(signal.SIGTERM)
        assert process.wait() == 1
        assert "its 2 entries are not at this path" in process.err.rest()[-1]
    with DataStream.open(saved) as again:
        assert again.entry(1).data == b"old"


def test_a_follower_on_the_command_line(path: Path) -> None:
    with running("cat", path, "--follow", cwd=path.parent) as reading:
        reading.out.next()
        path.unlink()
        assert reading.wait() == 1
        [result] = reading.err.rest()
        assert result == f"error: {path}: {REMOVED}; open this path again to follow what is there"
