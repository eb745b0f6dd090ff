"""The thread that writes a huge operation's bytes: what it writes, and what ends before it."""

from __future__ import annotations

import os
import re
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from datastreamer import DataStream
from datastreamer.errors import BadBookmark, WriteFailed
from datastreamer.storage.disk._placement import Placement, Placer
from datastreamer.storage.disk.file_ops import OsFile, Placing
from tests.storage.made import BOOKMARK, FIRST, PAGE, Item, add, items

ROOT = Path(__file__).resolve().parents[3]
LARGE = 1_000_000


@pytest.fixture
def fd(tmp_path: Path) -> Iterator[int]:
    fd = os.open(tmp_path / "bytes", os.O_RDWR | os.O_CREAT)
    yield fd
    os.close(fd)


def test_every_segment_is_in_its_place(fd: int) -> None:
    arena = bytearray(b"abcdefgh")
    placed = Placement(fd, arena, [(10, 0, 3), (2, 4, 2), (20, 8, 0)])
    with pytest.raises(BufferError):
        arena.append(0)  # it is exported
    placed.finish()
    placed.finish()
    assert os.pread(fd, 20, 0) == b"\0\0ef\0\0\0\0\0\0abc"
    arena.append(0)


def test_what_is_dropped_is_written_no_more(fd: int) -> None:
    data = os.urandom(20 << 20)
    Placement(fd, data, [(0, 0, len(data))]).drop()
    os.ftruncate(fd, 0)
    placed = Placement(fd, data, [(0, 0, len(data))])
    del placed  # as after a signal's exception
    os.ftruncate(fd, 0)
    assert os.fstat(fd).st_size == 0


@pytest.mark.parametrize("segment", [(0, 0, 4), (0, -1, 2), (-1, 0, 2), (0, 3, 1), (0, 0, -1)])
def test_segments_outside_of_the_arena(fd: int, segment: tuple[int, int, int]) -> None:
    arena = bytearray(b"abc")
    with pytest.raises(ValueError, match="outside the arena"):
        Placement(fd, arena, [segment])
    arena.append(0)


def test_what_the_thread_was_refused_is_tried_again(tmp_path: Path) -> None:
    path = tmp_path / "bytes"
    path.touch()
    fd = os.open(path, os.O_RDONLY)
    try:
        placed = Placement(fd, b"abc", [(0, 0, 3)])
        for _ in range(2):
            with pytest.raises(OSError, match="Bad file descriptor"):
                placed.finish()
        written = os.open(path, os.O_RDWR)
        os.dup2(written, fd)
        os.close(written)
        placed.finish()
        assert path.read_bytes() == b"abc"
    finally:
        os.close(fd)


def test_a_signal_while_a_file_is_closed(tmp_path: Path) -> None:
    """No thread writes any more then: the descriptor may be that of another file soon."""

    class Interrupted:
        ended = False

        def __init__(self, placed: Placing) -> None:
            self.placed = placed

        def finish(self) -> None:
            raise AssertionError("nobody wants it")

        def drop(self) -> None:
            self.placed.drop()
            raise KeyboardInterrupt

    data = bytes(32 << 20)
    with DataStream.create(tmp_path / "s.bin", index="memory", sync="os") as stream:
        space = stream._ensure_writable().uncommitted
        file = stream._ensure_writable().owned.file
        placed = [file.place(data, [(FIRST + n * len(data), 0, len(data))]) for n in range(3)]
        space._placing.extend(map(Interrupted, placed))
        with pytest.raises(KeyboardInterrupt):
            space.finish_placing(wanted=False)
        space._placing.clear()
        assert all(one.ended for one in placed)


def entries(count: int) -> list[Item]:
    return [(n, bytes([n]) * LARGE) for n in range(1, count + 1)]


def test_a_disk_that_takes_no_more(tmp_path: Path) -> None:
    """An error in a thread is reported at a later turn, and is not lost."""
    path = tmp_path / "s.bin"
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    with DataStream.create(path, index="memory", sync="os") as stream:
        with stream.atomic_op() as op:
            for kind, data in entries(30):
                op.add_entry(kind, data)
        size = path.stat().st_size
        stream.truncate(0)  # so that the file need not grow
        assert path.stat().st_size == size
        stream.start_atomic_op()
        resource.setrlimit(resource.RLIMIT_FSIZE, (FIRST + 7 * PAGE, before[1]))
        refusals: list[str] = []
        try:
            for kind, data in entries(30):
                while True:
                    try:
                        stream.add_entry(kind, data)
                        break
                    except WriteFailed as error:
                        refusals.append(str(error))
                        if len(refusals) == 3:
                            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        assert len(refusals) == 3
        assert all("File too large" in refusal for refusal in refusals)
        stream.commit_atomic_op()
        assert items(stream) == entries(30)
    with DataStream.open(path, read_only=True) as stream:
        assert items(stream) == entries(30)


def test_a_few_arenas_are_used_in_turn(tmp_path: Path) -> None:
    with DataStream.create(tmp_path / "s.bin", index="memory", sync="os") as stream:
        stream.start_atomic_op()
        op, seen = stream.atomic_op(), set()
        for kind, data in entries(60):
            op.add_entry(kind, data)
            seen.add(id(op.arena.obj))
        assert 2 <= len(seen) <= 3
        stream.rollback_atomic_op()


def test_an_operation_given_up_with_its_block(tmp_path: Path) -> None:
    """Nothing of it is written over the next one."""
    with DataStream.create(tmp_path / "s.bin", index="memory", sync="os") as stream:
        for count in (14, 19, 24):
            given_up = [(200, bytes([200]) * LARGE)] * count
            with pytest.raises(BadBookmark):
                add(stream, [*given_up, (BOOKMARK, b"")])
            with stream.atomic_op() as op:
                for kind, data in entries(count):
                    op.add_entry(kind, data)
            assert items(stream) == entries(count)
            stream.truncate(0)


def test_one_thread_writes_one_placement_after_another(fd: int) -> None:
    """The thread keeps their order, whatever the order in which they are waited for."""
    placer = Placer()
    for turn in range(100):
        placed = [Placement(fd, bytes([turn, at]), [(0, 0, 2)], placer) for at in range(4)]
        for at in (1, 0, 3, 2):
            placed[at].finish()
            assert all(one.ended for one in placed[: at + 1])
        assert os.pread(fd, 3, 0) == bytes([turn, 3])


def test_a_placement_that_nobody_waited_for(fd: int) -> None:
    """It has been written when it is gone, also with others before and after it."""
    placer, data = Placer(), os.urandom(4 << 20)
    first, second, third = (Placement(fd, data, [(0, 0, len(data))], placer) for _ in range(3))
    del second
    third.finish()
    assert first.ended
    os.ftruncate(fd, 0)
    del first, placer
    assert os.fstat(fd).st_size == 0


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="threads are not listed")
def test_a_file_has_one_thread_and_none_once_it_is_closed(tmp_path: Path) -> None:
    tasks = Path("/proc/self/task")
    before = set(tasks.iterdir())
    fd = os.open(tmp_path / "bytes", os.O_RDWR | os.O_CREAT)
    file = OsFile(fd)
    seen = set()
    for at in range(10):
        placed = file.place(b"abc", [(3 * at, 0, 3)])
        seen |= set(tasks.iterdir()) - before
        placed.finish()
    assert len(seen) == 1
    file.close()
    (task,) = seen
    deadline = time.monotonic() + 30
    while task.is_dir() and time.monotonic() < deadline:  # it has said that it ends
        os.sched_yield()
    assert not task.is_dir()


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="threads are not listed")
def test_signals_pass_it_by(fd: int) -> None:
    """One that it took would not end what the main thread waits for."""
    data, tasks = bytes(1 << 20), Path("/proc/self/task")
    before = set(tasks.iterdir())
    placed = Placement(fd, data, [(0, 0, len(data))])
    (task,) = set(tasks.iterdir()) - before
    masks = set(re.findall(r"SigBlk:\s*(\w+)", (task / "status").read_text()))
    placed.finish()
    assert masks
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGALRM):
        assert all(int(mask, 16) >> (number - 1) & 1 for mask in masks), masks
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, [])


FORKED = """
import os, sys
from datastreamer import DataStream
stream = DataStream.create(sys.argv[1], index="memory", sync="os")
stream.start_atomic_op()
for n in range(40):
    stream.add_entry(n, bytes([n]) * 1_000_000)
    if n % 4 == 3:
        child = os.fork()
        if not child:
            stream._op.begin(4096, 0)
            del stream
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
stream.commit_atomic_op()
assert [entry.data[:1] for entry in stream.entries()] == [bytes([n]) for n in range(40)]
stream.close()
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="nothing forks here")
def test_a_fork_while_it_writes(tmp_path: Path) -> None:
    """The child has no such thread, and does not wait for it."""
    words = [sys.executable, "-c", FORKED, str(tmp_path / "s.bin")]
    done = subprocess.run(words, cwd=ROOT, timeout=60, check=False, capture_output=True)
    assert done.returncode == 0, done.stderr.decode()


CHILD = """
import os, sys
from datastreamer.storage.disk.file_ops import OsFile
file = OsFile(os.open(sys.argv[1], os.O_RDWR | os.O_CREAT))
file.place(b"parent", [(0, 0, 6)]).finish()
child = os.fork()
if child:
    sys.exit(os.waitpid(child, 0)[1] != 0)
placed = [file.place(b"child", [(6 + 5 * n, 0, 5)]) for n in range(20)]
assert len(os.listdir("/proc/self/task")) == 2
placed[-1].finish()
assert all(one.ended for one in placed)
assert os.pread(file.fileno(), 200, 0) == b"parent" + 20 * b"child"
os._exit(0)
"""


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="threads are not listed")
def test_the_child_of_a_fork_has_one_thread_of_its_own(tmp_path: Path) -> None:
    words = [sys.executable, "-c", CHILD, str(tmp_path / "bytes")]
    done = subprocess.run(words, cwd=ROOT, timeout=60, check=False, capture_output=True)
    assert done.returncode == 0, done.stderr.decode()


def test_signals_while_it_writes(tmp_path: Path) -> None:
    """Whenever an exception comes, the operation can be given up, and the next one is whole."""
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    interrupted = 0
    try:
        with DataStream.create(tmp_path / "s.bin", index="memory", sync="os") as stream:
            for turn in range(40):
                try:
                    signal.setitimer(signal.ITIMER_REAL, 0.0005 + turn * 0.0001)
                    stream.start_atomic_op()
                    for _ in range(30):
                        stream.add_entry(200, bytes([200]) * LARGE)
                    signal.setitimer(signal.ITIMER_REAL, 0)
                    # The interpreter may not have come to a signal yet.
                    signal.pthread_sigmask(signal.SIG_BLOCK, [])
                except KeyboardInterrupt:
                    interrupted += 1
                signal.setitimer(signal.ITIMER_REAL, 0)
                if stream.atomic_op().is_open:
                    stream.rollback_atomic_op()
                if turn % 8 == 0:
                    with stream.atomic_op() as op:
                        for kind, data in entries(12):
                            op.add_entry(kind, data)
                    assert items(stream) == entries(12)
                    stream.truncate(0)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert interrupted > 5
