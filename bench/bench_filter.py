"""One type of ten wanted: chosen by the server, beside a client that is sent all and chooses.

The server is ours, in a process of its own; the client is the Trio client, one connection.
"""

from __future__ import annotations

import time
from typing import Any

import pytest
import trio

from bench.measure import Done
from bench.processes import processor_seconds, serving
from datastreamer import DataStream, connect
from datastreamer.format import CHOSEN_HEAD_SIZE

SIZE = 200
WANTED = 3


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Any:
    """A stream of 200 B entries (217 MB), each tenth of the type that is wanted; its server."""
    entries = 2_000 if request.config.getoption("benchmark_disable") else 1_000_000
    path = tmp_path_factory.mktemp("mixed") / "stream.bin"
    with DataStream.create(path, sync="os", index="memory") as stream:
        while stream.total_entries < entries:
            with stream.atomic_op() as op:
                for number in range(1_000):
                    op.add_entry(number % 10, bytes(SIZE))
    with serving(path) as (server, pid):
        yield entries, server.addresses[0], pid


class Reading:
    """All entries of the type, once: how long it took, the bytes that came, the time of the
    processors."""

    def __init__(self, mixed: Any, *, chosen_by_server: bool, batched: bool) -> None:
        self.entries, self.address, self.pid = mixed
        self.chosen_by_server = chosen_by_server
        self.batched = batched
        self.came = 0
        self.processors = 0.0

    def __call__(self) -> Done:
        before = self.both()
        done = trio.run(self.read)
        self.processors = self.both() - before
        return done

    def both(self) -> float:
        return time.process_time() + (processor_seconds(self.pid) if self.pid else 0.0)

    async def read(self) -> Done:
        types = [WANTED] if self.chosen_by_server else None
        async with connect(*self.address) as client:
            await client.capabilities()
            begin, got, self.came = time.perf_counter(), 0, 0
            reading = client.read_batches if self.batched else client.batches
            async for part in reading(stop=self.entries, types=types):
                self.came += part.nbytes + (CHOSEN_HEAD_SIZE if self.chosen_by_server else 0)
                got += len(part if self.chosen_by_server else part.select([WANTED]))
            assert got == self.entries // 10
            return Done(self.entries, time.perf_counter() - begin)


@pytest.mark.parametrize("batched", [False, True], ids=["streamed", "batches"])
def test_one_type_of_ten(versus: Any, record: Any, mixed: Any, batched: bool) -> None:
    work = f"200 B, one type of ten, {'in batches' if batched else 'streamed'}"
    server = Reading(mixed, chosen_by_server=True, batched=batched)
    client = Reading(mixed, chosen_by_server=False, batched=batched)
    rival = "the client chooses"
    versus(f"{work}: the server chooses", server, {rival: client}, unit="entries/s", at_least=1.0)
    record(
        f"{work}: bytes that come",
        server.came / mixed[0],
        {rival: client.came / mixed[0]},
        unit="B an entry",
        at_least=9.0,
    )
    record(
        f"{work}: processors of both",
        server.processors * 1e6 / mixed[0],
        {rival: client.processors * 1e6 / mixed[0]},
        unit="CPU s / 1 M entries",
    )
