"""Finding entries by their numbers: in a large stream, cold and warm, and in a dense one."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from bench.measure import Done
from bench.stored import sparse_stream
from datastreamer import DataStream
from datastreamer.format import page_start

Versus = Callable[..., None]
SIZE = 200


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    """20 GiB, an entry a page (80 MB of disk; a smoke run's is small)."""
    pages = 200 if request.config.getoption("benchmark_disable") else 20 * 1024
    return sparse_stream(tmp_path_factory.mktemp("large") / "s.bin", pages)


@pytest.fixture(scope="module")
def dense(
    tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[DataStream]:
    """64 MB of entries of 200 B."""
    count = 2_000 if request.config.getoption("benchmark_disable") else 300_000
    path = tmp_path_factory.mktemp("dense") / "s.bin"
    with DataStream.create(path, sync="os", index="memory") as stream:
        with stream.atomic_op() as op:
            op.add_entries(1, [bytes(SIZE)] * count)
        yield stream


def numbers_below(total: int, count: int) -> list[int]:
    drawn = random.Random(42)
    return [drawn.randrange(total) for _ in range(count)]


def bare_search(path: Path, number: int) -> None:
    """The same by hand: open, a read of the header, one of each page's start on the way."""
    fd = os.open(path, os.O_RDONLY)
    try:
        total = int.from_bytes(os.pread(fd, 8, 46), "big")
        low, high = 0, total
        while high - low > 1:
            middle = (low + high) // 2
            found = int.from_bytes(os.pread(fd, 17, page_start(middle))[9:], "big")
            low, high = (middle, high) if found <= number else (low, middle)
        os.pread(fd, 17, page_start(low))
    finally:
        os.close(fd)


def test_cold(versus: Versus, smoke: bool, large: Path) -> None:
    """The first look-up after the stream was opened: a search over the starts of pages."""
    wanted = numbers_below(200, 3 if smoke else 300)

    def total() -> int:
        with DataStream.open(large, read_only=True) as stream:
            return stream.total_entries

    wanted = [number * total() // 200 for number in wanted]

    def ours() -> None:
        for number in wanted:
            with DataStream.open(large, read_only=True) as stream:
                assert stream.reader.cursor(number).number == number

    def bare() -> None:
        for number in wanted:
            bare_search(large, number)

    versus(
        "open and find one entry, 20 GiB",
        ours,
        {"open and bare preads": bare},
        unit="look-ups/s",
        amount=len(wanted),
    )


def test_warm(versus: Versus, smoke: bool, large: Path) -> None:
    """Page starts are known; the page itself is read and walked."""
    with DataStream.open(large, read_only=True) as stream:
        total = stream.total_entries
        wanted = numbers_below(total, 20 if smoke else 20_000)
        reader, fd = stream.reader, stream.fileno()
        for number in wanted:
            reader.cursor(number)

        def ours() -> None:
            for number in wanted:
                reader.cursor(number)

        def bare() -> None:
            for number in wanted:
                os.pread(fd, 17, page_start(number))

        versus(
            "find an entry, page starts known, 20 GiB",
            ours,
            {"one bare pread": bare},
            unit="look-ups/s",
            amount=len(wanted),
        )


def test_point_reads(versus: Versus, smoke: bool, dense: DataStream) -> None:
    """Entries by number, at random, 200 B: what a server does for each Entry command."""
    total = dense.total_entries
    wanted = numbers_below(total, 20 if smoke else 50_000)
    reader, fd = dense.reader, dense.fileno()
    per_page = (1 << 20) // (17 + SIZE)
    places = [page_start(n // per_page) + n % per_page * (17 + SIZE) for n in wanted]

    def ours() -> Done:
        packed = reader.packed
        begin = time.perf_counter()
        for number in wanted:
            packed(number)
        return Done(len(wanted), time.perf_counter() - begin)

    def bare() -> Done:
        begin = time.perf_counter()
        for place in places:
            os.pread(fd, 17 + SIZE, place)
        return Done(len(wanted), time.perf_counter() - begin)

    versus(
        "read an entry by number, 200 B, at random",
        ours,
        {"one bare pread at the known place": bare},
        unit="reads/s",
        at_least=0.1,
    )
