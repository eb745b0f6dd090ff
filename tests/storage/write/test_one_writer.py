"""One process writes: its lock, what other writers see, and what a kill or a fork leaves of it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import warnings
from pathlib import Path
from typing import IO, Any

import pytest

from datastreamer import DataStream
from datastreamer.errors import (
    StreamLocked,
)
from datastreamer.storage.disk.file_ops import OsDisk
from datastreamer.storage.header import records
from tests.storage.made import (
    FIRST,
    ONE,
    TWO,
    add,
    bookmarks_of,
    items,
    make,
    scan_file,
    size_of,
)

ROOT = Path(__file__).resolve().parents[3]

HOLD = """
import os, sys
from datastreamer import DataStream
stream = DataStream.open(sys.argv[1])
if "fork" in sys.argv[2:]:
    reading, writing = os.pipe()
    if not os.fork():
        os.write(writing, b"here")
        sys.stdin.readline()
        os._exit(0)
    os.read(reading, 4)
print(os.getpid(), flush=True)
if "write" in sys.argv[2:]:
    at = stream.total_entries
    while True:
        with stream.atomic_op() as op:
            for n in range(3):
                assert op.add_bookmark(at.to_bytes(4, "big")) == at
                op.add_entry(1, at.to_bytes(8, "big") * (at % 300))
                at += 2
        print(at, flush=True)
sys.stdin.readline()
"""


class Other:
    """Another process that has the stream open for writing."""

    def __init__(self, path: Path, *what: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", HOLD, str(path), *what],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        )
        self.pid = int(self.out.readline())

    @property
    def out(self) -> IO[str]:
        assert self.process.stdout is not None
        return self.process.stdout

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    def __enter__(self) -> Other:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None and self.process.stdin is not None:
            self.process.stdin.close()
            self.process.wait(30)
        for pipe in (self.process.stdin, self.out):
            if pipe is not None:
                pipe.close()


def test_the_second_writer_sees_the_first_one_s_pid(tmp_path: Path) -> None:
    path = make(tmp_path / "s.bin", ONE)
    with Other(path) as other:
        with pytest.raises(StreamLocked) as caught:
            DataStream.open(path)
        assert caught.value.pid == other.pid
        assert str(caught.value) == (
            f"{path}: locked by another writer, process {other.pid}; only one process may write: "
            "first stop that server, relay or other program"
        )
        with DataStream.open(path, read_only=True) as reader:
            assert items(reader) == ONE
        with pytest.raises(StreamLocked):  # and the reader's close freed nothing
            DataStream.open(path)
    with DataStream.open(path) as stream:
        add(stream, TWO)


def test_twice_in_one_process(tmp_path: Path) -> None:
    path = tmp_path / "s.bin"
    with DataStream.create(path) as stream:
        with pytest.raises(StreamLocked) as caught:
            DataStream.open(path)
        assert caught.value.pid == os.getpid()
        add(stream, ONE)
        with pytest.raises(StreamLocked):
            DataStream.open(path)
    with DataStream.open(path) as stream:
        assert items(stream) == ONE


def test_a_pid_of_another_boot_is_of_no_process(tmp_path: Path) -> None:
    path = tmp_path / "s.bin"
    with DataStream.create(path, index="memory"):
        with path.open("r+b") as file:
            page = bytearray(file.read(FIRST))
            records.put_writer(page, records.Writer(os.getpid(), b"an earlier boot."))
            file.seek(0)
            file.write(page)
        with pytest.raises(StreamLocked, match="locked by another writer, another process") as seen:
            DataStream.open(path)
        assert seen.value.pid == 0


def test_a_killed_writer_frees_the_lock(tmp_path: Path) -> None:
    """Whatever it was doing: what it said was committed is there, in whole operations."""
    path = make(tmp_path / "s.bin")
    reported = 0
    for commits in (1, 40):
        with Other(path, "write") as other:
            for _ in range(commits):
                reported = int(other.out.readline())
            other.kill()
            rest = other.out.read().split("\n")
            reported = int(rest[-2]) if len(rest) > 1 else reported
        with DataStream.open(path) as stream:
            assert reported <= stream.total_entries <= reported + 6
            assert stream.total_entries % 6 == 0
            known = bookmarks_of(scan_file(path))
            assert {key: stream.bookmark(key) for key in known} == known
            assert known == {n.to_bytes(4, "big"): n for n in range(0, stream.total_entries, 2)}
        size_of(path)


def test_a_follower_beside_another_process(tmp_path: Path) -> None:
    """What the writer has said it committed is seen at the next look, index and all."""
    path = make(tmp_path / "s.bin")
    with Other(path, "write") as other:  # leaves an index with a watermark behind
        reported = [int(other.out.readline()) for _ in range(30)][-1]
        other.kill()
    with DataStream.open(path) as stream:
        stream.bookmarks.wait()
    with Other(path, "write") as other, DataStream.open(path, follow=True) as follower:
        for round_ in range(200):
            reported = int(other.out.readline())
            follower.refresh()
            total = follower.total_entries
            assert total >= reported
            assert total % 6 == 0
            for number in (0, reported * round_ // 200 // 2 * 2, reported - 2):
                assert follower.bookmark(number.to_bytes(4, "big")) == number
                data = number.to_bytes(8, "big") * (number % 300)
                assert follower.entry(number + 1).data == data
        assert follower.bookmarks.trusted.index is not None
        assert follower.bookmarks.builder.thread is None  # the writer's index, none of its own
        other.kill()
        follower.refresh()
        assert [e.number for e in follower.entries()] == [*range(follower.total_entries)]


def test_a_forked_child_does_not_keep_the_lock(tmp_path: Path) -> None:
    path = make(tmp_path / "s.bin", ONE)
    with Other(path, "fork") as other:
        with pytest.raises(StreamLocked):
            DataStream.open(path)
        other.kill()  # its child lives on, with a copy of all its descriptors
        with DataStream.open(path) as stream:
            add(stream, TWO)
            assert items(stream) == ONE + TWO


def in_a_child(work: Any) -> str:
    """What `work()` gives in a forked child; its errors by name."""
    reading, writing = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of forks beside threads
        child = os.fork()
    if not child:
        os.close(reading)
        try:
            said = str(work())
        except BaseException as error:  # noqa: BLE001
            said = f"{type(error).__name__}: {error}"
        os.write(writing, said.encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as source:
        said = source.read()
    assert os.waitpid(child, 0)[1] == 0
    return said


def test_a_forked_child_has_nothing_of_the_stream(tmp_path: Path) -> None:
    path = tmp_path / "s.bin"
    with DataStream.create(path) as stream:
        add(stream, ONE)
        assert stream.bookmark(b"k") == 0
        stream.start_atomic_op()
        stream.add_entry(2, b"half an operation")
        closed = f"StreamClosed: {path}: the stream is closed"
        before = path.read_bytes()
        assert in_a_child(stream.commit_atomic_op) == closed
        assert in_a_child(stream.start_atomic_op) == closed
        assert in_a_child(lambda: stream.entry(0)) == closed
        assert in_a_child(lambda: stream.bookmark(b"k")) == closed
        assert in_a_child(lambda: stream.truncate(0)) == closed
        assert in_a_child(lambda: (stream.close(), stream.closed)[1]) == "True"
        assert in_a_child(lambda: os.fstat(stream.fileno())).startswith("OSError")

        def read_again() -> object:
            with DataStream.open(path, follow=True) as mine:
                return mine.bookmark(b"k"), mine.total_entries

        def write_again() -> object:
            return DataStream.open(path)

        def write_another() -> object:
            with DataStream.create(tmp_path / "child.bin") as mine:
                add(mine, ONE, TWO)
                return mine.bookmark(b"k")

        assert in_a_child(read_again) == "(0, 2)"
        assert in_a_child(write_again).startswith("StreamLocked")
        assert in_a_child(write_another) == "3"
        assert path.read_bytes() == before
        # Here everything continues.
        stream.add_entry(2, b"the other half")
        stream.commit_atomic_op()
        assert [data for _, data in items(stream)][2:] == [b"half an operation", b"the other half"]
        add(stream, TWO)
        stream.bookmarks.wait()
        assert stream.bookmark(b"k") == 5
        with pytest.raises(StreamLocked):
            DataStream.open(path)


def test_a_writer_that_has_ended_is_not_named(tmp_path: Path) -> None:
    """The lock's holder writes its process id late in its open, and `repair` at its end."""
    path = make(tmp_path / "s.bin", ONE)
    with Other(path) as other:
        ended = other.pid
    holder = OsDisk().open(str(path), write=True)
    try:
        assert holder.lock()
        with pytest.raises(StreamLocked, match="another process") as caught:
            DataStream.open(path)
        assert caught.value.pid != ended
    finally:
        holder.close()
