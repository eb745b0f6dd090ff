"""Bookmarks: how fast a file's are indexed and looked up, and what they cost a commit.

Keys are those of blocks in a zkEVM stream: protobuf, so that neighbours in number are no
neighbours in order. The rival puts the same pairs, sorted beforehand, into a bare LMDB.
"""

from __future__ import annotations

import itertools
import os
import random
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import lmdb
import pytest

from bench.measure import Done, Latencies
from datastreamer import DataStream
from datastreamer.storage.write.sync_policy import SyncPolicy
from datastreamer.zkevm.bookmark_keys import raw_key

Versus = Callable[..., None]
Record = Callable[..., None]
BLOCK = 2
SIZE = 200
OPERATION = 5


def block_key(number: int) -> bytes:
    return raw_key(2, BLOCK, number)


def write_blocks(path: Path, count: int, events: int = 0) -> None:
    """A stream of `count` block bookmarks, each followed by events of 200 B; not indexed."""
    data = [bytes(SIZE)] * events
    with DataStream.create(path, version=2, sync="os", index="memory") as stream:
        # The keeper would have them all in memory, which is not what is measured here.
        for start in range(0, count, 100_000):
            with stream.atomic_op() as op:
                for number in range(start, min(count, start + 100_000)):
                    op.add_bookmark(block_key(number))
                    if data:
                        op.add_entries(1, data)


def remove_index(path: Path) -> None:
    shutil.rmtree(f"{path}.index", ignore_errors=True)


def index_size(path: Path) -> int:
    return os.path.getsize(f"{path}.index/data.mdb")


def index(path: Path) -> float:
    """Seconds to build the index of a stream that has none."""
    remove_index(path)
    with DataStream.open(path) as stream:
        begin = time.perf_counter()
        stream.bookmarks.wait()
        seconds = time.perf_counter() - begin
        assert stream.bookmarks.lag() == 0
    return seconds


def bare_puts(folder: Path, items: list[tuple[bytes, bytes]]) -> float:
    """Seconds to put sorted pairs into an LMDB with nothing around, in one transaction."""
    place = folder / "bare"
    env = lmdb.open(str(place), map_size=1 << 40, max_dbs=1)
    keys = env.open_db(b"keys", dupsort=True, dupfixed=True)
    try:
        begin = time.perf_counter()
        with env.begin(write=True) as transaction, transaction.cursor(db=keys) as cursor:
            cursor.putmulti(items)
        return time.perf_counter() - begin
    finally:
        env.close()
        shutil.rmtree(place)


@pytest.mark.parametrize("count", [1_000_000, 10_000_000])
def test_index_a_file(versus: Versus, smoke: bool, tmp_path: Path, count: int) -> None:
    """The file holds nothing but bookmarks."""
    count = 20_000 if smoke else count
    path = tmp_path / "s.bin"
    write_blocks(path, count)
    items = sorted((block_key(number), number.to_bytes(8, "big")) for number in range(count))
    versus(
        f"index a file of {count // 1_000_000 or 0} M bookmarks",
        lambda: Done(count, index(path)),
        {"bare putmulti of sorted pairs": lambda: Done(count, bare_puts(tmp_path, items))},
        unit="keys/s",
        rounds=1 if smoke else 3,
        at_least=0.5,
    )


def test_size(record: Record, smoke: bool, tmp_path: Path) -> None:
    """Bytes of index a bookmark: built from the file, and written commit by commit."""
    for count in [20_000] if smoke else [1_000_000, 10_000_000]:
        path = tmp_path / f"{count}.bin"
        write_blocks(path, count)
        index(path)
        record(f"index of {count:,} bookmarks, built", index_size(path) / count, unit="bytes/key")
        path.unlink()
        remove_index(path)
    count = 1_000 if smoke else 1_000_000
    path = tmp_path / "live.bin"
    with DataStream.create(path, version=2, sync="os") as stream:
        for number in range(count):
            with stream.atomic_op() as op:
                op.add_bookmark(block_key(number))
            if number % 20_000 == 0:
                stream.sync()
                stream.bookmarks.wait()
    record(
        f"index of {count:,} bookmarks, 20,000 at a time",
        index_size(path) / count,
        unit="bytes/key",
    )


def test_scan_among_events(versus: Versus, smoke: bool, tmp_path: Path) -> None:
    """A bookmark to 50 events of 200 B, as blocks have: what is left is the scan."""
    count = 200 if smoke else 20_000
    path = tmp_path / "s.bin"
    write_blocks(path, count, events=50)
    size = path.stat().st_size / 1e6

    def scan() -> Done:
        with DataStream.open(path, read_only=True) as stream:
            begin = time.perf_counter()
            for _ in stream.batches():
                pass
            return Done(size, time.perf_counter() - begin)

    versus(
        "index a file of 20,000 bookmarks among 1 M events",
        lambda: Done(size, index(path)),
        {"scan": scan},
        unit="MB/s",
        rounds=1 if smoke else 5,
    )


def test_look_up(versus: Versus, smoke: bool, tmp_path: Path) -> None:
    count = 2_000 if smoke else 1_000_000
    path = tmp_path / "s.bin"
    write_blocks(path, count)
    index(path)
    drawn = random.Random(42)
    wanted = [drawn.randrange(count) for _ in range(20 if smoke else 50_000)]
    keys = [block_key(number) for number in wanted]
    with DataStream.open(path, read_only=True) as stream:

        def ours() -> None:
            for key, number in zip(keys, wanted, strict=True):
                assert stream.bookmark(key) == number

        ours_alone = stream.bookmarks.newest

        def keeper() -> None:
            for key in keys:
                ours_alone(key)

        versus(
            "look up a bookmark among 1 M, and check the entry",
            ours,
            {"without the check": keeper},
            unit="look-ups/s",
            amount=len(keys),
        )


def commits(stream: DataStream, numbers: Iterator[int], count: int, key: bool) -> list[float]:
    """Seconds of each of `count` commits: five events and a bookmark, or a small event."""
    took, data = list[float](), bytes(SIZE)
    for _ in range(count):
        extra = block_key(next(numbers))
        begin = time.perf_counter()
        with stream.atomic_op() as op:
            if key:
                op.add_bookmark(extra)
            else:
                op.add_entry(1, extra)
            for _ in range(OPERATION):
                op.add_entry(1, data)
        took.append(time.perf_counter() - begin)
    return took


@pytest.mark.parametrize("sync", ["commit", "os"])
def test_commit(record: Record, smoke: bool, tmp_path: Path, sync: SyncPolicy) -> None:
    """Both in turn, a stretch each, so that a disk that drifts drifts for both. The index is
    written meanwhile: under "os" as far as occasional syncs allow."""
    stretch = 5 if smoke else 500 if sync == "commit" else 10_000
    times: dict[bool, list[float]] = {True: [], False: []}
    with (
        DataStream.create(tmp_path / "with.bin", version=2, sync=sync) as marked,
        DataStream.create(tmp_path / "without.bin", version=2, sync=sync) as plain,
    ):
        numbers = itertools.count()
        for _ in range(2 if smoke else 10):
            for stream in (marked, plain):
                key = stream is marked
                for _ in range(2 if smoke else 4):
                    times[key] += commits(stream, numbers, stretch, key)
                    stream.sync()
                stream.bookmarks.wait()  # not beside the other's commits
    _compare(record, f"commit of 5 x 200 B and a bookmark, {sync}", times)


def _compare(record: Record, what: str, times: dict[bool, Sequence[float]]) -> None:
    ours, rival = Latencies.of(times[True]), Latencies.of(times[False])
    for name, at_least in (("p50", None), ("p99", 0.9), ("longest", None)):
        record(
            f"{what}, {name}",
            getattr(ours, name),
            {"a small event in its place": getattr(rival, name)},
            unit="ms",
            at_least=at_least,
        )
