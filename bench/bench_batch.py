"""Entries for which the client asks: one by one, in batches, and streamed beside them.

The shape is BookKeeper's for its batched reads (BP-62): 1,000,100 entries of 100 B, one
connection, one reader. The server is ours, in a process of its own; the client is the Trio
client, which sees every entry's head. Waited: one request at a time.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import pytest
import trio

from bench.bench_serving import fill
from bench.measure import Done
from bench.processes import PROC, processor_seconds, serving
from bench.readers import point_reads, some_numbers
from datastreamer import Client, connect

SIZE = 100
SECONDS = {100: 0.8, 500: 0.5}
MIB = 1 << 20


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Any:
    """A stream of 100 B entries (117 MB; a smoke run's is small) and its server."""
    entries = 2_100 if request.config.getoption("benchmark_disable") else 1_000_100
    path = tmp_path_factory.mktemp("batches") / "stream.bin"
    fill(path, entries, SIZE)
    with serving(path) as (server, pid):
        yield path, entries, server.addresses[0], pid


def timed(address: tuple[str, int], amount: int, read: Callable[[Client], Any]) -> Done:
    """`read` returns what is iterated over; all `amount` entries have to arrive."""

    async def main() -> Done:
        async with connect(*address) as client:
            await client.capabilities()
            begin = time.perf_counter()
            got = 0
            async for part in read(client):
                got += len(part)
            seconds = time.perf_counter() - begin
            assert got == amount
            return Done(amount, seconds)

    return trio.run(main)


def batches(stored: Any, **limits: int) -> Done:
    _, entries, address, _ = stored
    return timed(address, entries, lambda client: client.read_batches(**limits))


def streamed(stored: Any) -> Done:
    _, entries, address, _ = stored
    return timed(address, entries, lambda client: client.batches(stop=entries))


def singles(stored: Any, count: int) -> Done:
    _, entries, address, _ = stored
    seconds = point_reads(address, some_numbers(entries, count), size=SIZE)
    return Done(count, sum(seconds))


def pipelined(stored: Any, count: int) -> Done:
    """By the client, 256 queries underway."""
    _, _, address, _ = stored

    async def main() -> Done:
        async with connect(*address) as client:
            begin, got = time.perf_counter(), 0
            async for _ in client.entries_by_number(range(count)):
                got += 1
            assert got == count
            return Done(count, time.perf_counter() - begin)

    return trio.run(main)


def test_singles(versus: Any, smoke: bool, stored: Any, reference: Any) -> None:
    count = 50 if smoke else 2_000

    def theirs() -> Done:
        with reference.serving(entries=20_000, size=SIZE) as server:
            times = reference.point_reads(server, some_numbers(20_000, count // 10), SIZE)
        return Done(count // 10, sum(times))

    versus(
        "100 B, singles, waited",
        lambda: singles(stored, count),
        {
            "reference's server (Go)": reference and theirs,
            "our client, 256 in flight": lambda: pipelined(stored, 500 if smoke else 50_000),
        },
        unit="entries/s",
    )


@pytest.mark.parametrize("count", [100, 500])
def test_batches(versus: Any, smoke: bool, stored: Any, count: int) -> None:
    versus(
        f"1,000,100 x 100 B, batch({count}), 2 in flight",
        lambda: batches(stored, max_count=count, max_bytes=0),
        {
            f"in {SECONDS[count]} s": 1_000_100 / SECONDS[count],
            f"batch({count}), waited": lambda: batches(
                stored, max_count=count, max_bytes=0, requests=1
            ),
            "our singles, waited": lambda: singles(stored, 50 if smoke else 2_000),
        },
        unit="entries/s",
        at_least={f"in {SECONDS[count]} s": 1.0, "our singles, waited": 20.0},
        rounds=3,
    )


def test_batches_of_a_mebibyte(versus: Any, stored: Any) -> None:
    versus(
        "1,000,100 x 100 B, batch(1 MiB), 2 in flight",
        lambda: batches(stored, max_bytes=MIB),
        {
            "streamed": lambda: streamed(stored),
            "batch(1 MiB), waited": lambda: batches(stored, max_bytes=MIB, requests=1),
            "batch(500), 2 in flight": lambda: batches(stored, max_count=500, max_bytes=0),
        },
        unit="entries/s",
        at_least={"streamed": 0.6, "batch(500), 2 in flight": 1.0},
        rounds=3,
    )


@pytest.mark.skipif(not PROC, reason="needs Linux's /proc")
def test_processor_time(record: Any, smoke: bool, stored: Any) -> None:
    """CPU seconds for a million entries, of the client and of the server."""
    _, entries, _, pid = stored
    for name, read in (
        ("batch(100)", lambda: batches(stored, max_count=100, max_bytes=0)),
        ("batch(500)", lambda: batches(stored, max_count=500, max_bytes=0)),
        ("batch(1 MiB)", lambda: batches(stored, max_bytes=MIB)),
        ("streamed", lambda: streamed(stored)),
    ):
        ours, theirs = [], []
        for _ in range(1 if smoke else 3):
            begin = time.process_time(), processor_seconds(pid)
            read()
            ours.append((time.process_time() - begin[0]) * 1e6 / entries)
            theirs.append((processor_seconds(pid) - begin[1]) * 1e6 / entries)
        unit = "CPU s / 1 M entries"
        record(f"client, {name}, 100 B", statistics.median(ours), unit=unit)
        record(f"server, {name}, 100 B", statistics.median(theirs), unit=unit)
