"""The clients: catch-up decoded in batches, entries and lines; point reads.

The server is ours, in a process of its own. Limits: a loop that receives the same
bytes and looks at none, and a Trio client of a bare Trio echo.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

import trio

from bench.bench_serving import ANSWER, BARE_ECHO, SIZE, helper, stored
from bench.measure import Done, Latencies
from bench.readers import catch_up, some_numbers
from datastreamer import BlockingClient, connect
from datastreamer._lines import json_lines
from datastreamer.format import TYPE_BOOKMARK

__all__ = ["stored"]  # the fixture


def _timed(stored: Any, read: Callable[[BlockingClient, int], None]) -> Callable[[], Done]:
    """`read` by a blocking client, which gets the number of entries as an argument."""
    _, entries, address = stored

    def ours() -> Done:
        with BlockingClient(*address) as client:
            begin = time.perf_counter()
            read(client, entries)
            return Done(entries, time.perf_counter() - begin)

    return ours


def _recv_loop(stored: Any) -> dict[str, Any]:
    _, entries, address = stored
    return {"bare recv loop, our server": lambda: catch_up(address, entries=entries, size=SIZE)}


def test_batches(versus: Any, reference: Any, stored: Any) -> None:
    _, entries, address = stored

    def ours() -> Done:
        async def main() -> float:
            async with connect(*address) as client:
                begin = time.perf_counter()
                got = 0
                async with client.batches(from_entry=0, stop=entries) as batches:
                    async for batch in batches:
                        got += len(batch)
                assert got == entries
                return time.perf_counter() - begin

        return Done(entries, trio.run(main))

    versus(
        "catch-up, Trio client, batches, 200 B",
        ours,
        {
            **_recv_loop(stored),
            "5 M a second": 5e6,
            "reference's client (Go), our server": reference
            and (lambda: reference.client_catch_up(address, entries)),
        },
        unit="entries/s",
        at_least={"5 M a second": 1.0, "bare recv loop, our server": 0.7},
    )


def test_blocking_batches(versus: Any, stored: Any) -> None:
    def read(client: BlockingClient, entries: int) -> None:
        assert sum(len(batch) for batch in client.batches(from_entry=0, stop=entries)) == entries

    versus(
        "catch-up, blocking client, batches, 200 B",
        _timed(stored, read),
        _recv_loop(stored),
        unit="entries/s",
        at_least=0.7,
    )


def test_json_lines(versus: Any, stored: Any) -> None:
    def read(client: BlockingClient, entries: int) -> None:
        nowhere.writelines(
            json_lines(batch) for batch in client.batches(from_entry=0, stop=entries)
        )

    with open(os.devnull, "wb", buffering=0) as nowhere:
        versus(
            "catch-up as JSON lines, as cat writes them, 200 B",
            _timed(stored, read),
            {"1 M a second": 1e6},
            unit="entries/s",
            at_least=1.0,
        )


def test_types(versus: Any, stored: Any) -> None:
    def read(client: BlockingClient, entries: int) -> None:
        batches = client.batches(from_entry=0, stop=entries, types={TYPE_BOOKMARK})
        assert sum(len(batch) for batch in batches) < entries

    versus(
        "catch-up, blocking client, bookmarks alone, entries passed over",
        _timed(stored, read),
        _recv_loop(stored),
        unit="entries/s",
        at_least=0.7,
    )


def test_objects(versus: Any, stored: Any) -> None:
    def read(client: BlockingClient, entries: int) -> None:
        last = None
        for entry in client.entries(from_entry=0, stop=entries):
            last = entry
        assert last is not None
        assert last.number == entries - 1

    versus(
        "catch-up, blocking client, an object an entry, 200 B",
        _timed(stored, read),
        _recv_loop(stored),
        unit="entries/s",
    )


async def _ask(address: tuple[str, int], numbers: list[int]) -> list[float]:
    waits = []
    async with connect(*address) as client:
        for number in numbers:
            begin = time.perf_counter()
            entry = await client.entry(number)
            waits.append(time.perf_counter() - begin)
            assert entry.number == number
    return waits


async def _echo(address: tuple[str, int], count: int) -> list[float]:
    waits = []
    stream = await trio.open_tcp_stream(*address)
    async with stream:
        for _ in range(count):
            begin = time.perf_counter()
            await stream.send_all(bytes(24))
            left = ANSWER
            while left:
                left -= len(await stream.receive_some(left))
            waits.append(time.perf_counter() - begin)
    return waits


def test_point_reads(record: Any, smoke: bool, stored: Any) -> None:
    _, entries, address = stored
    count = 50 if smoke else 5_000
    numbers = some_numbers(entries, count)
    ours, echoes = [], []
    with helper(BARE_ECHO, ANSWER) as bare:
        for _ in range(1 if smoke else 5):
            ours.append(Latencies.of(trio.run(_ask, address, numbers)))
            echoes.append(Latencies.of(trio.run(_echo, bare, count)))
    middle = len(ours) // 2
    p50 = [sorted(one.p50 for one in side)[middle] for side in (ours, echoes)]
    p99 = [sorted(one.p99 for one in side)[middle] for side in (ours, echoes)]
    record(
        "entry by number, Trio client, waited",
        1e3 / p50[0],
        {"Trio client of a bare Trio echo": 1e3 / p50[1]},
        unit="entries/s",
        at_least=0.9,
        less_is_better=False,
    )
    record(
        "entry by number, Trio client, waited, p99",
        p99[0],
        {"Trio client of a bare Trio echo": p99[1]},
        unit="ms",
    )


def test_pipelined(versus: Any, smoke: bool, stored: Any) -> None:
    _, entries, address = stored
    numbers = some_numbers(entries, 500 if smoke else 50_000)

    def ours() -> Done:
        with BlockingClient(*address) as client:
            begin = time.perf_counter()
            got = sum(1 for _ in client.entries_by_number(numbers))
            assert got == len(numbers)
            return Done(got, time.perf_counter() - begin)

    versus(
        "entry by number, blocking client, pipelined",
        ours,
        {"100,000 a second": 1e5},
        unit="entries/s",
        at_least=1.0,
    )
