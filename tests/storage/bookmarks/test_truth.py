"""The index equals a scan of the committed file, whatever happened to either.

Each case ends in the same judgement: every key of the scan is found where the scan has
it, no other key that the file ever had is found, for a reader, a follower and a writer;
and after the writer the index itself holds the same, asked without the keeper.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Container, Iterator
from pathlib import Path
from typing import Any

import pytest

from datastreamer import DataStream
from datastreamer.errors import IndexFailed, UnknownBookmark
from datastreamer.storage.bookmarks import builder, lmdb, registry
from datastreamer.storage.bookmarks import lmdb_environment as environment
from datastreamer.storage.bookmarks.builder import IndexBuilder
from datastreamer.storage.disk.access import Access
from tests.interop.peer import GoPeer
from tests.programs import needs
from tests.storage.made import BOOKMARK, Item, add, bookmarks_of, header_of, make, scan_file

# More than the 64 KiB that a watermark's fingerprint covers, the same in every operation.
LONG: list[Item] = [(1, bytes(50_000))] * 2
KEYS = [b"old", b"twice", b"new", b"other", b"third", b"k" * 16, b"\0", b"lost", b"n", b"l" * 16]
KEYS += [b"n%d" % n for n in range(30)]
READERS: list[dict[str, Any]] = [{"read_only": True}, {"follow": True}]


def index_of(path: Path) -> Path:
    return path.with_name(path.name + ".index")


def found_by(stream: DataStream, first: Container[bytes] = ()) -> dict[bytes, int]:
    """The bookmarks that are found. A look-up that finds the index wrong has it built again, so
    keys that a wrong index might lack are looked up `first`."""
    found = {}
    for key in sorted(KEYS, key=lambda key: key not in first):
        try:
            found[key] = stream.bookmark(key)
        except UnknownBookmark:
            continue
    return found


def judge(path: Path) -> None:
    entries = scan_file(path)
    truth = bookmarks_of(entries)
    assert truth.keys() <= set(KEYS)
    for mode in READERS:
        with DataStream.open(path, **mode) as stream:
            # After a crash a reader sees what the writer had made visible.
            seen = bookmarks_of(entries[: stream.total_entries])
            assert found_by(stream, truth) == seen
            assert found_by(stream, truth) == seen
    with DataStream.open(path) as stream:
        assert found_by(stream, truth) == truth
        stream.bookmarks.wait()
        assert stream.bookmarks.lag() == 0
        assert found_by(stream) == truth
        assert len(stream.bookmarks) == len(truth)
    judge_index(path, truth)


def judge_index(path: Path, truth: dict[bytes, int]) -> None:
    index = registry.index_opener("lmdb")(str(path), False, Access.private())
    try:
        assert {key: index.newest(key) for key in truth} == truth
        assert len(index) == len(truth)
    finally:
        index.close()


def start(path: Path) -> None:
    make(
        path,
        [(BOOKMARK, b"old"), *LONG, (BOOKMARK, b"twice"), *LONG],
        [(BOOKMARK, b"k" * 16), (BOOKMARK, b"\0"), *LONG],
    )


# Actions of a writer of this package.


def commits(stream: DataStream) -> None:
    add(stream, [(BOOKMARK, b"twice"), (BOOKMARK, b"new"), *LONG], [(BOOKMARK, b"other")])


def rolls_back(stream: DataStream) -> None:
    stream.start_atomic_op()
    for key in (b"old", b"lost"):
        stream.add_bookmark(key)
    stream.rollback_atomic_op()


def leaves_an_operation_open(stream: DataStream) -> None:
    stream.start_atomic_op()
    stream.add_bookmark(b"lost")


def truncates_to_an_older_duplicate(stream: DataStream) -> None:
    at = stream.total_entries
    add(stream, [(BOOKMARK, b"old"), (BOOKMARK, b"lost"), *LONG])
    stream.bookmarks.wait()
    stream.truncate(at)


def truncates_what_is_not_indexed(stream: DataStream) -> None:
    at = stream.total_entries
    add(stream, [(BOOKMARK, b"old"), (BOOKMARK, b"lost"), *LONG])
    stream.truncate(at)
    add(stream, [(BOOKMARK, b"new")])


def truncates_to_nothing(stream: DataStream) -> None:
    stream.truncate(0)


def writes_another_history_of_the_same_length(stream: DataStream) -> None:
    stream.truncate(6)
    add(stream, [(BOOKMARK, b"n" + b"1" * 15)], [(BOOKMARK, b"\0")])
    stream.truncate(6)
    add(stream, [(BOOKMARK, b"k" * 16), (BOOKMARK, b"\0"), *LONG])


def updates_an_event_near_the_end(stream: DataStream) -> None:
    stream.update_entry(stream.total_entries - 1, 1, b"u" * 50_000)


def updates_an_event_far_from_it(stream: DataStream) -> None:
    stream.update_entry(1, 1, b"u" * 50_000)


def builds_it_again(stream: DataStream) -> None:
    stream.bookmarks.rebuild()


WRITES = [
    commits,
    rolls_back,
    pytest.param(
        leaves_an_operation_open,
        marks=pytest.mark.filterwarnings("ignore:.*discarded:ResourceWarning"),
    ),
    truncates_to_an_older_duplicate,
    truncates_what_is_not_indexed,
    truncates_to_nothing,
    writes_another_history_of_the_same_length,
    updates_an_event_near_the_end,
    updates_an_event_far_from_it,
    builds_it_again,
]


@pytest.mark.parametrize("sync", ["commit", "os"])
@pytest.mark.parametrize("does", WRITES, ids=lambda it: it.__name__)
def test_after_our_writer(tmp_path: Path, does: Callable[[DataStream], None], sync: Any) -> None:
    path = tmp_path / "s.bin"
    start(path)
    with DataStream.open(path, sync=sync) as stream:
        does(stream)
    judge(path)


@pytest.mark.parametrize("does", WRITES, ids=lambda it: it.__name__)
def test_beside_our_writer(tmp_path: Path, does: Callable[[DataStream], None]) -> None:
    path = tmp_path / "s.bin"
    start(path)
    with DataStream.open(path) as stream, DataStream.open(path, follow=True) as follower:
        found_by(follower)
        does(stream)
        follower.refresh()
        truth = bookmarks_of(scan_file(path))
        assert found_by(stream) == found_by(follower) == truth
        stream.bookmarks.wait()
        assert found_by(stream) == found_by(follower) == truth
        # The follower uses the writer's index.
        assert not follower.bookmarks.trusted.private


@pytest.mark.parametrize("does", WRITES[-3:-1], ids=lambda it: it.__name__)
def test_an_update_keeps_the_index(tmp_path: Path, does: Callable[[DataStream], None]) -> None:
    path = tmp_path / "s.bin"
    start(path)
    with DataStream.open(path) as stream:
        does(stream)
    with DataStream.open(path, read_only=True) as stream:
        assert stream.bookmarks.lag() == 0


# Files and indexes of mixed ages.


def histories(path: Path) -> Iterator[None]:
    """States of one file, each closed. The second to fourth have the same length and the same last
    64 KiB; the second and the fourth have the same content."""
    make(path, [(BOOKMARK, b"old"), (1, b"")])
    yield
    for key in (b"twice", b"other", b"twice"):
        with DataStream.open(path) as stream:
            if stream.total_entries > 2:
                stream.truncate(2)
            add(stream, [(BOOKMARK, key), *LONG])
        yield
    with DataStream.open(path) as stream:
        add(stream, [(BOOKMARK, b"third"), *LONG])
    yield


AGES = range(5)


@pytest.fixture(scope="module")
def aged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`s.bin` with copies of it and of its index at every age."""
    folder = tmp_path_factory.mktemp("ages")
    path = folder / "s.bin"
    for age, _ in enumerate(histories(path)):
        shutil.copyfile(path, folder / f"file.{age}")
        shutil.copytree(index_of(path), folder / f"index.{age}")
    return path


@pytest.mark.parametrize("index_age", AGES)
@pytest.mark.parametrize("file_age", AGES)
def test_a_file_and_an_index_of_other_ages(aged: Path, file_age: int, index_age: int) -> None:
    # In place: the file keeps its inode.
    aged.write_bytes((aged.parent / f"file.{file_age}").read_bytes())
    shutil.rmtree(index_of(aged))
    shutil.copytree(aged.parent / f"index.{index_age}", index_of(aged))
    judge(aged)


@pytest.mark.parametrize("identical", [False, True])
def test_an_index_of_another_file_of_the_same_name(tmp_path: Path, identical: bool) -> None:
    path, before = tmp_path / "s.bin", tmp_path / "before.bin"
    start(path)
    path.rename(before)
    if identical:
        shutil.copyfile(before, path)
    else:
        make(path, [(BOOKMARK, b"other"), *LONG, (BOOKMARK, b"old"), *LONG])
    judge(path)


# Damage.


def _each(path: Path, change: Callable[[bytes], bytes]) -> None:
    for file in index_of(path).iterdir():
        file.write_bytes(change(file.read_bytes()))


def _noise(size: int, seed: int = 1) -> bytes:
    return random.Random(seed).randbytes(size)


def _spoiled(pages: slice, fill: Callable[[int], bytes]) -> Callable[[Path], None]:
    def spoil(path: Path) -> None:
        data = index_of(path) / "data.mdb"
        content = bytearray(data.read_bytes())
        span = slice(*(at and at * 4096 for at in (pages.start, pages.stop)))
        content[span] = fill(len(content[span]))
        data.write_bytes(content)

    return spoil


DAMAGES: dict[str, Callable[[Path], None]] = {
    "deleted": lambda path: shutil.rmtree(index_of(path)),
    "no data": lambda path: (index_of(path) / "data.mdb").unlink(),
    "no lock": lambda path: (index_of(path) / "lock.mdb").unlink(),
    "emptied": lambda path: _each(path, lambda content: b""),
    "cut to a byte": lambda path: _each(path, lambda content: content[:1]),
    "cut to half": lambda path: _each(path, lambda content: content[: len(content) // 2]),
    "cut by a byte": lambda path: _each(path, lambda content: content[:-1]),
    "zeros": lambda path: _each(path, lambda content: bytes(len(content))),
    "noise": lambda path: _each(path, lambda content: _noise(len(content))),
    "longer": lambda path: _each(path, lambda content: content + _noise(5000)),
    "no metas": _spoiled(slice(0, 2), bytes),
    "noise in the first meta": _spoiled(slice(0, 1), _noise),
    "noise in the second meta": _spoiled(slice(1, 2), _noise),
    "pages of zeros": _spoiled(slice(2, None), bytes),
    "pages of noise": _spoiled(slice(2, None), _noise),
}


@pytest.mark.parametrize("how", DAMAGES)
def test_a_damaged_index(tmp_path: Path, how: str) -> None:
    path = tmp_path / "s.bin"
    start(path)
    DAMAGES[how](path)
    judge(path)


@pytest.mark.parametrize("replaced", [False, True])
def test_the_index_is_removed_beside_the_writer(tmp_path: Path, replaced: bool) -> None:
    """The writer continues with its open index, and does not change the files that replace it."""
    path, other = tmp_path / "s.bin", tmp_path / "other.bin"
    start(path)
    make(other, [(BOOKMARK, b"lost"), *LONG, (BOOKMARK, b"old")])
    with DataStream.open(path) as stream, DataStream.open(path, follow=True) as follower:
        found_by(follower)
        index_of(path).rename(tmp_path / "aside")
        if replaced:
            shutil.copytree(index_of(other), index_of(path))
        for does in (commits, updates_an_event_far_from_it, truncates_to_an_older_duplicate):
            does(stream)
            follower.refresh()
            truth = bookmarks_of(scan_file(path))
            assert found_by(stream, truth) == found_by(follower, truth) == truth
            stream.bookmarks.wait()
            assert found_by(stream, truth) == found_by(follower, truth) == truth
            with DataStream.open(path, read_only=True) as reader:
                assert found_by(reader, truth) == truth
    judge(path)


# A process that is killed.

WRITER = """
import random, sys
from datastreamer import DataStream
draw = random.Random(int(sys.argv[2]))
with DataStream.open(sys.argv[1], sync=draw.choice(["commit", "os"])) as stream:
    print("ready", flush=True)
    while True:
        with stream.atomic_op() as op:
            for _ in range(draw.randrange(4)):
                op.add_bookmark(b"n%d" % draw.randrange(30))
                op.add_entry(1, bytes(draw.randrange(60_000)))
        what = draw.random()
        if what < 0.1:
            stream.truncate(draw.randrange(stream.total_entries // 2, stream.total_entries))
        elif what < 0.3:
            stream.sync()
            stream.bookmarks.wait()
        print(flush=True)
"""


@pytest.mark.parametrize("seed", range(8))
def test_killed(tmp_path: Path, seed: int) -> None:
    path = tmp_path / "s.bin"
    start(path)
    draw = random.Random(seed)
    for turn in range(2):
        with subprocess.Popen(
            [sys.executable, "-c", WRITER, str(path), str(seed + turn)], stdout=subprocess.PIPE
        ) as process:
            assert process.stdout is not None
            for _ in range(draw.randrange(1, 60)):
                assert process.stdout.readline()
            process.send_signal(signal.SIGKILL)
    judge(path)


# Another program, which does not know the index.


@needs("go")
def test_appended_by_the_reference(tmp_path: Path) -> None:
    path = tmp_path / "s.bin"
    start(path)
    with GoPeer.serve(path) as peer:
        peer.start_op()
        for key in (b"twice", b"new"):
            peer.add_bookmark(key)
        peer.commit()
    judge(path)


@needs("go")
@pytest.mark.parametrize("kept", [0, 3, 6])
def test_truncated_and_written_again_by_the_reference(tmp_path: Path, kept: int) -> None:
    """To the same length."""
    path = tmp_path / "s.bin"
    start(path)
    entries, header = scan_file(path), header_of(path)
    others = {1: b"n", 3: b"n10", 5: b"other", 16: b"l" * 16}
    with GoPeer.serve(path) as peer:
        peer.truncate(kept)
        peer.start_op()
        for entry in entries[kept:]:
            if entry.type == BOOKMARK:
                peer.add_bookmark(others[len(entry.data)])
            else:
                peer.add_entry(entry.type, b"x" * len(entry.data))
        peer.commit()
    assert header_of(path) == header
    judge(path)


# A large file: all keys at once, in ascending order.


@pytest.fixture
def small_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(builder, "_FILL_BYTES", 1)
    monkeypatch.setattr(builder, "_CATCH_UP_BYTES", 1)
    monkeypatch.setattr(lmdb, "_RUN", 5)
    monkeypatch.setattr(lmdb, "_BATCH", 1)


@pytest.mark.usefixtures("small_runs")
@pytest.mark.parametrize("index", ["lmdb", "memory"])
def test_filled_from_many_runs(tmp_path: Path, index: str) -> None:
    path = tmp_path / "s.bin"
    operations = [[(BOOKMARK, b"n%d" % (n * 7 % 30)), (1, bytes(90_000))] for n in range(100)]
    make(path, *operations, index="memory")
    truth = bookmarks_of(scan_file(path))
    with DataStream.open(path, index=index) as stream:
        stream.bookmarks.wait()
        assert stream.bookmarks.lag() == 0
        assert found_by(stream) == truth
        stream.truncate(len(operations))  # every older duplicate is found
        assert found_by(stream) == bookmarks_of(scan_file(path))
    if index == "lmdb":
        judge(path)


@pytest.mark.usefixtures("small_runs")
@pytest.mark.parametrize("after", range(5))
def test_a_fill_that_ends_early(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, after: int
) -> None:
    """The index has half of the blocks and no watermark: it covers nothing."""
    path = tmp_path / "s.bin"
    operations: list[list[Item]] = [
        [*((BOOKMARK, b"n%d" % (n * 7 % 30)) for n in range(start, start + 15)), (1, bytes(90_000))]
        for start in range(40)
    ]
    make(path, *operations, index="memory")
    left = [after]
    put = lmdb._put

    def failing(*what: Any) -> int:
        left[0] -= 1
        if left[0] < 0:
            os._exit(1)
        return put(*what)

    child = os.fork()
    if child == 0:
        monkeypatch.setattr(lmdb, "_put", failing)
        stream = DataStream.open(path)
        stream.bookmarks.wait()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 256
    monkeypatch.setattr(builder, "_FILL_BYTES", 1 << 60)  # a fill would clear the index
    judge(path)


@pytest.mark.usefixtures("small_runs")
def test_a_truncation_does_not_wait_for_a_fill(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "s.bin"
    make(path, *[[(BOOKMARK, b"old"), (1, bytes(90_000))]] * 40, index="memory")
    arrived, go_on = threading.Event(), threading.Event()
    pause = IndexBuilder._pause_or_end

    def held(self: IndexBuilder) -> None:
        arrived.set()
        assert go_on.wait(30)
        pause(self)

    monkeypatch.setattr(IndexBuilder, "_pause_or_end", held)
    with DataStream.open(path) as stream:
        assert arrived.wait(30)
        truncated = threading.Thread(target=lambda: stream.truncate(10))
        truncated.start()
        while not stream.bookmarks.trusted.urgent:
            assert truncated.is_alive()
        go_on.set()
        truncated.join(30)
        assert not truncated.is_alive()
        assert stream.bookmark(b"old") == 8
    judge(path)


# Little address space.

LIMITED = """
import resource, sys
from datastreamer import DataStream
used = int(open("/proc/self/statm").read().split()[0]) * 4096
limit = used + (400 << 20)
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
with DataStream.open(sys.argv[1]) as stream:
    size = stream.bookmarks.trusted.index._shared.opened.env.info()["map_size"]
    assert size < 1 << 40, size
    for start in range(0, 400_000, 10_000):
        with stream.atomic_op() as op:
            for number in range(start, start + 10_000):
                op.add_bookmark(number.to_bytes(16, "little"))
        stream.bookmarks.wait()
        assert stream.bookmarks.lag() == 0
    for number in range(0, 400_000, 4099):
        assert stream.bookmark(number.to_bytes(16, "little")) == number, number
"""


@pytest.mark.skipif(sys.platform != "linux", reason="/proc is Linux's")
def test_no_address_space_for_the_whole_map(tmp_path: Path) -> None:
    path = tmp_path / "s.bin"
    with DataStream.create(path):
        pass
    done = subprocess.run(
        [sys.executable, "-c", LIMITED, str(path)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_a_full_map(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The index is not written any more, and look-ups read the stream."""
    monkeypatch.setattr(environment, "_MAP_SIZE", 1 << 18)
    with DataStream.create(tmp_path / "s.bin") as stream:
        add(stream, [(BOOKMARK, number.to_bytes(16, "little")) for number in range(30_000)])
        with pytest.raises(IndexFailed, match=r"needs more address space \(ulimit -v\)"):
            stream.bookmarks.wait()
        assert stream.bookmarks.lag() == 30_000
        assert stream.bookmark((77).to_bytes(16, "little")) == 77


def test_a_reader_whose_map_is_smaller_than_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "s.bin"
    start(path)
    monkeypatch.setattr(environment, "_MAP_SIZE", 1 << 16)
    with DataStream.open(path, follow=True) as follower:
        assert follower.bookmark(b"old") == 0
        grow = "import sys\nfrom datastreamer import DataStream\n" + GROW
        subprocess.run([sys.executable, "-c", grow, str(path)], check=True)
        follower.refresh()
        assert follower.bookmark((77).to_bytes(16, "little")) >= 77
        assert follower.bookmark(b"old") == 0


GROW = """
with DataStream.open(sys.argv[1]) as stream:
    with stream.atomic_op() as op:
        for number in range(50_000):
            op.add_bookmark(number.to_bytes(16, "little"))
    stream.bookmarks.wait()
"""
