"""Writers that are killed, and systems that refuse: real processes, real file systems."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lmdb
import pytest

from datastreamer import DataStream
from datastreamer.errors import DamagedEntry, IndexFailed, StreamFileError
from datastreamer.storage.bookmarks.interface import Watermark
from datastreamer.storage.bookmarks.lmdb import LmdbIndex
from datastreamer.storage.disk.access import Access
from datastreamer.storage.maintain.check import verify
from tests.storage.made import BOOKMARK, scan_file

ROOT = Path(__file__).resolve().parents[3]

# Says what it is about to do, does it, says that it is done; for ever.
WRITER = """
import json, random, sys
from datastreamer import DataStream
path, seed, sync = sys.argv[1:]
choose = random.Random(int(seed))
stream = DataStream.open_or_create(path, sync=int(sync) if sync.isdigit() else sync)

def say(**what):
    print(json.dumps(what), flush=True)

say(ready=stream.total_entries)
number = 0
while True:
    number += 1
    total, what = stream.total_entries, choose.random()
    if what < 0.1 and total:
        to = choose.randrange(max(0, total - 20), total)
        say(do="truncate", to=to)
        stream.truncate(to)
    elif what < 0.2 and total:
        at = choose.randrange(max(0, total - 20), total)
        entry = stream.entry(at)
        if entry.is_bookmark:
            continue
        data = bytes([number % 256]) * len(entry.data)
        say(do="update", at=at, data=data.hex())
        stream.update_entry(at, entry.type, data)
    else:
        sizes = [choose.choice((0, 1, 200, 3000, 60_000)) for _ in range(choose.randrange(1, 6))]
        if choose.random() < 0.03:
            sizes = [500_000] * 12  # more than is kept in memory
        key = b"%d" % (number % 7)
        say(do="commit", key=key.hex(), sizes=sizes, fill=number % 256)
        wait = choose.random() < 0.7
        with stream.atomic_op() as op:
            op.add_bookmark(key)
            for size in sizes:
                op.add_entry(1, bytes([number % 256]) * size)
            handle = op.commit(wait=wait)
        if handle is not None and choose.random() < 0.5:
            handle.wait()
        if handle is not None:
            stream.sync()  # it is to be seen before the next is chosen
    say(done=True)
"""

Item = tuple[int, bytes]


def applied(entries: list[Item], what: dict[str, Any]) -> list[Item]:
    """The stream after an action."""
    if what["do"] == "truncate":
        return entries[: what["to"]]
    if what["do"] == "update":
        at = what["at"]
        return [*entries[:at], (entries[at][0], bytes.fromhex(what["data"])), *entries[at + 1 :]]
    events = [(1, bytes([what["fill"]]) * size) for size in what["sizes"]]
    return [*entries, (BOOKMARK, bytes.fromhex(what["key"])), *events]


def killed(path: Path, seed: int, sync: str, entries: list[Item]) -> list[list[Item]]:
    """Run a writer for a random while; what may be in the stream then."""
    process = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(path), str(seed), sync],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )
    assert process.stdout is not None
    ready = json.loads(process.stdout.readline())
    assert ready == {"ready": len(entries)}
    timer = threading.Timer(random.Random(seed).uniform(0, 0.25), process.kill)
    timer.start()
    said = process.stdout.read()
    _, errors = process.communicate(timeout=60)
    timer.join()
    assert process.returncode == -signal.SIGKILL, errors
    doing: dict[str, Any] | None = None
    for line in said.splitlines():
        if not line.endswith("}"):
            break  # killed while it spoke: what it was about to say was not begun
        what = json.loads(line)
        if "do" in what:
            doing = what
        elif doing is not None:
            entries, doing = applied(entries, doing), None
    return [entries] if doing is None else [entries, applied(entries, doing)]


def seen_by_a_reader(path: Path) -> int:
    try:
        with DataStream.open(path, read_only=True) as stream:
            return stream.total_entries
    except DamagedEntry as error:
        # Killed in the middle of the update's write; the next writer takes it back.
        if "a crash interrupted the update of an entry" not in str(error):
            raise
        return 0


def run(path: Path, seeds: range) -> None:
    entries: list[Item] = []
    for seed in seeds:
        sync = ("commit", "os", "20")[seed % 3]
        possible = killed(path, seed, sync, entries)
        total = seen_by_a_reader(path)
        with DataStream.open(path) as stream:
            assert stream.total_entries >= total
            entries = [(e.type, e.data) for e in stream.entries()]
            assert entries in possible, f"seed {seed}"
            newest = {data: at for at, (kind, data) in enumerate(entries) if kind == BOOKMARK}
            assert {key: stream.bookmark(key) for key in newest} == newest
            assert len(stream.bookmarks) == len(newest)
        assert not path.with_name(f"{path.name}.undo").exists()
        assert [(e.type, e.data) for e in scan_file(path)] == entries
        before = path.read_bytes()[4096:]
        with DataStream.open(path) as stream:
            assert stream.total_entries == len(entries)
        assert path.read_bytes()[4096:] == before
    assert entries


def test_writers_that_are_killed(tmp_path: Path) -> None:
    run(tmp_path / "s.bin", range(10))


@pytest.mark.soak
@pytest.mark.parametrize("first", range(1000, 1200, 20))
def test_many_writers_that_are_killed(tmp_path: Path, first: int) -> None:
    run(tmp_path / "s.bin", range(first, first + 20))


# Systems that refuse.


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    """A file system of 6 MiB."""
    folder = tmp_path / "small"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=6m", "tmpfs", str(folder)],
        capture_output=True,
        check=False,
    )
    if mounted.returncode:
        pytest.skip("mounting a small file system needs privileges that this user lacks")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_full_file_system(small: Path) -> None:
    path = small / "s.bin"
    with DataStream.create(path) as stream:
        with stream.atomic_op() as op:
            op.add_bookmark(b"k")
            op.add_entry(1, b"first")
        written = 0

        def write_on() -> None:
            nonlocal written
            while True:
                stream.start_atomic_op()
                stream.add_entry(1, bytes(400_000))
                stream.commit_atomic_op()
                written += 1

        with pytest.raises(StreamFileError, match="No space left on device"):
            write_on()
        assert written > 0
        assert stream.total_entries == written + 2
        assert stream.entry(written + 1).data == bytes(400_000)
        assert stream.bookmark(b"k") == 0
        # Space is back: the same operation again.
        subprocess.run(["mount", "-o", "remount,size=64m", str(small)], check=True)
        stream.commit_atomic_op()
        assert stream.total_entries == written + 3
    with DataStream.open(path) as stream:
        assert stream.total_entries == written + 3
        assert stream.bookmark(b"k") == 0


DIES_IN_AN_UPDATE = """
import os, signal, sys
from datastreamer.storage.disk.file_ops import OsDisk, OsFile
from datastreamer.storage.stream import DataStream

class Halting(OsFile):
    def write(self, data, offset):
        if len(data) != 1000:
            return super().write(data, offset)
        super().write(memoryview(data)[:500], offset)
        sys.stdin.readline()

class HaltingDisk(OsDisk):
    def open(self, path, *, write, beside=None):
        return Halting(super().open(path, write=write, beside=beside).fileno())

with DataStream.open(sys.argv[1], index="memory", disk=HaltingDisk()) as stream:
    print("open", flush=True)
    sys.stdin.readline()
    stream.update_entry(2, 1, b"B" * 1000)
"""


@pytest.mark.parametrize("looks", [False, True])
def test_a_writer_that_dies_in_the_middle_of_an_update(tmp_path: Path, looks: bool) -> None:
    """Who follows it hands out no mixture; the next writer puts the old bytes back."""
    path = tmp_path / "s.bin"
    with DataStream.create(path, index="memory") as stream, stream.atomic_op() as op:
        op.add_entries(1, [b"A" * 1000] * 5)
    writer = subprocess.Popen(
        [sys.executable, "-c", DIES_IN_AN_UPDATE, str(path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    with writer, DataStream.open(path, follow=True, index="memory") as follower:
        assert writer.stdin is not None
        assert writer.stdout is not None
        assert writer.stdout.readline() == b"open\n"
        follower.refresh()
        writer.stdin.write(b"\n")
        writer.stdin.flush()
        while b"BBBB" not in path.read_bytes():
            pass
        if looks:
            follower.refresh()
        writer.kill()
        writer.wait()
        for read in (lambda: follower.entry(2), lambda: list(follower.entries()), follower.refresh):
            with pytest.raises(DamagedEntry, match="a crash interrupted the update of an entry"):
                read()
        with DataStream.open(path, index="memory"):
            pass
        assert {entry.data for entry in follower.entries()} == {b"A" * 1000}


def test_what_a_killed_writer_leaves_beside_goes_with_the_next(tmp_path: Path) -> None:
    path = tmp_path / "s.bin"
    with DataStream.create(path, index="memory") as stream, stream.atomic_op() as op:
        op.add_entry(1, b"one")
    begun = [
        "s.bin.0123abcd.new",
        "s.bin.undo.89abcdef.new",
        "s.bin.20260102T030405.4567.cut.89abcdef.new",
        "s.bin.20260102T030405.4567.repair.89abcdef.new",
    ]
    for name in (*begun, "s.bin.other.new"):
        (tmp_path / name).write_bytes(b"begun")
    with DataStream.open(path, index="memory"):
        pass
    left = sorted(path.name for path in tmp_path.iterdir())
    assert left == ["s.bin", "s.bin.other.new", "s.bin.pages"]


def test_a_writer_killed_while_it_makes_the_index(tmp_path: Path) -> None:
    path = tmp_path / "s.bin"
    with DataStream.create(path) as stream, stream.atomic_op() as op:
        op.add_bookmark(b"k")
    folder = tmp_path / "s.bin.index"
    for file in folder.iterdir():
        file.unlink()
    lmdb.open(str(folder), max_dbs=2).close()
    report = verify(path)
    assert report.ok
    note = "the bookmark index is empty: its creation was interrupted; the next writer or reindex"
    assert report.notes == [f"{note} fills it"]
    with DataStream.open(path, follow=True) as follower:
        assert follower.bookmark(b"k") == 0
    with DataStream.open(path) as stream:
        assert stream.bookmark(b"k") == 0
    assert verify(path).notes == []


def test_an_index_on_a_full_file_system(small: Path) -> None:
    """LMDB itself speaks of an input/output error."""
    index = LmdbIndex(str(small / "index"), True, Access.private())
    try:
        first = 0

        def write_on() -> None:
            nonlocal first
            while True:
                pairs = [(b"%016d" % number, number) for number in range(first, first + 5000)]
                index.add(pairs, Watermark(4096, 0, b""))
                first += 5000

        with pytest.raises(IndexFailed, match=r"index: No space left on device \(mdb_"):
            write_on()
    finally:
        index.close()


def test_a_read_only_file_system(small: Path) -> None:
    path = small / "s.bin"
    with DataStream.create(path) as stream, stream.atomic_op() as op:
        op.add_bookmark(b"k")
        op.add_entry(1, b"first")
    subprocess.run(["mount", "-o", "remount,ro", str(small)], check=True)
    with pytest.raises(StreamFileError, match="Read-only file system"):
        DataStream.open(path)
    for how in ({"read_only": True}, {"follow": True}):
        with DataStream.open(path, **how) as stream:  # type: ignore[arg-type]
            assert stream.entry(1).data == b"first"
            assert stream.bookmark(b"k") == 0


def test_no_descriptors_left(tmp_path: Path) -> None:
    code = """
import os, resource, sys
from datastreamer import DataStream
from datastreamer.errors import DamagedEntry, StreamFileError
with DataStream.create(sys.argv[1]) as stream:
    with stream.atomic_op() as op:
        op.add_entry(1, b"first")
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
    taken = []
    try:
        while True:
            taken.append(os.open("/dev/null", os.O_RDONLY))
    except OSError:
        pass
    # What is open continues.
    with stream.atomic_op() as op:
        op.add_entry(1, b"second")
    print([e.data for e in stream.entries()])
    for what in (lambda: DataStream.open(sys.argv[1], read_only=True),
                 lambda: stream.update_entry(0, 1, b"FIRST")):
        try:
            what()
        except StreamFileError as error:
            print(error.what)
    for fd in taken:
        os.close(fd)
    stream.update_entry(0, 1, b"FIRST")
    print([e.data for e in stream.entries()])
"""
    path = tmp_path / "s.bin"
    found = subprocess.run(
        [sys.executable, "-c", code, str(path)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=False,
    )
    assert found.stderr == ""
    first, opened, changed, last = found.stdout.splitlines()
    assert first == "[b'first', b'second']"
    assert "Too many open files" in opened
    assert "Too many open files" in changed
    assert last == "[b'FIRST', b'second']"
    assert os.path.exists(path)
