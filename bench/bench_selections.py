"""Entries selected by bytes in their data: how fast a file is searched, what crosses the wire, and
what it costs the client.
"""

from __future__ import annotations

import os
import select
import socket
import time
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import trio

from bench.measure import Done
from bench.processes import PROC, processor_seconds, serving
from datastreamer import DataStream, Where, connect
from datastreamer._filtered import Choice
from datastreamer.format import CHOSEN_HEAD_SIZE, HEADER_PAGE_SIZE
from datastreamer.protocol.commands import FilteredStart, encode_command
from datastreamer.reassembly import Splitter, pack_message, wanted
from datastreamer.reassembly.producer import MESSAGE_TYPE
from datastreamer.selection.clauses import Clause, selected
from datastreamer.storage.read.type_scan import Wanted

KEY_AT = 2
NONE = b"\xfe" * 33
"""A prefix that no message has."""


def filled(path: Path, size: int, total: int) -> None:
    """Messages of `size` bytes, of one type, whose keys begin with one of 100 portions."""
    with DataStream.create(path, sync="os", index="memory") as stream:
        number = 0
        while stream.header.total_length < total:
            with stream.atomic_op() as op:
                for _ in range(max(1, (1 << 20) // (size + 17))):
                    key = bytes([1 + number % 100]) + number.to_bytes(32, "little")
                    data = (b"\0\x21" + key + bytes(size))[:size]
                    op.add_entry(MESSAGE_TYPE, data)
                    number += 1


class Search:
    """The whole file, a slice after the other, as the server searches it."""

    def __init__(self, stream: DataStream, where: Sequence[Clause]) -> None:
        self.stream = stream
        self.choice = Choice(where)
        self.slices: list[float] = []

    def __call__(self) -> Done:
        reader, total = self.stream.reader, self.stream.total_entries
        offset, number = HEADER_PAGE_SIZE, 0
        begin = time.perf_counter()
        while number < total:
            at = time.perf_counter()
            found = reader.matches(Wanted(offset, number, total, self.choice, 1 << 31, 1 << 30))
            self.slices.append(time.perf_counter() - at)
            offset, number = found.offset, found.number
        return Done(self.stream.header.total_length / 1e9, time.perf_counter() - begin)


@pytest.mark.parametrize("size", [60, 200, 2_000, 200_000])
def test_a_file_in_memory(
    versus: Any, tmp_path: Path, size: int, request: pytest.FixtureRequest
) -> None:
    quick = request.config.getoption("benchmark_disable")
    filled(tmp_path / "s.bin", size, 3 << 20 if quick else 200 << 20)
    with DataStream.open(tmp_path / "s.bin", read_only=True, verify="never") as stream:
        by_type = Search(stream, [3])
        one = Search(stream, [Where(MESSAGE_TYPE, KEY_AT, NONE)])
        name = f"search of messages of {size:,} B"
        versus(f"{name}: 1 clause", one, {"by type": by_type}, unit="GB/s", at_least=1 / 1.3)


def test_many_clauses(
    versus: Any, record: Any, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """64 portions of one type; the stream has no message of them."""
    quick = request.config.getoption("benchmark_disable")
    filled(tmp_path / "s.bin", 60, 3 << 20 if quick else 200 << 20)
    with DataStream.open(tmp_path / "s.bin", read_only=True, verify="never") as stream:
        many = [Where(MESSAGE_TYPE, KEY_AT, bytes([n, 200])) for n in range(64)]
        search = Search(stream, many)
        name = "search of messages of 60 B: 64 clauses"
        versus(name, search, {"the promise": 1.0}, unit="GB/s", at_least=1.0)
        slices = sorted(search.slices)
        p99 = slices[len(slices) * 99 // 100] * 1e3
        record(f"{name}, a slice, p99", p99, {"the promise": 5.0}, unit="ms", at_least=1.0)


@pytest.fixture(scope="module")
def payloads(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Any:
    """Payloads of 10 kB, each with a portion of 5 bytes, and their server."""
    count = 100 if request.config.getoption("benchmark_disable") else 20_000
    path = tmp_path_factory.mktemp("payloads") / "stream.bin"
    with DataStream.create(path, sync="os", index="memory") as stream:
        for number in range(count):
            own = number.to_bytes(32, "little")
            parts = {
                b"\x01" + own: [(b"", b"five!")],
                b"\x02" + own: [(b"%d" % at, bytes(990)) for at in range(10)],
            }
            messages = [pack_message(*message) for message in Splitter().split(own, parts)]
            stream.append_many(MESSAGE_TYPE, messages)
    with serving(path) as (server, _):
        yield count, path, server.addresses[0]


class CatchUp:
    """All payloads, once: the bytes that came, and the client's time of the processor."""

    def __init__(self, payloads: Any, where: Sequence[Where] | None) -> None:
        self.count, path, self.address = payloads
        self.size = os.stat(path).st_size
        self.where = where
        self.came = 0
        self.processor = 0.0

    def __call__(self) -> Done:
        before = time.thread_time()
        done = trio.run(self.read)
        self.processor = time.thread_time() - before
        return done

    async def read(self) -> Done:
        async with connect(*self.address) as client:
            total = (await client.header()).total_entries
            begin, self.came = time.perf_counter(), 0
            async for batch in client.batches(stop=total, where=self.where):
                self.came += batch.nbytes + (CHOSEN_HEAD_SIZE if self.where else 0)
            return Done(self.size / 1e9, time.perf_counter() - begin)


def test_a_portion(versus: Any, record: Any, payloads: Any) -> None:
    work = "catch-up of a portion, 5 B of payloads of 10 kB"
    portion, whole = CatchUp(payloads, wanted([b"\x01"])), CatchUp(payloads, None)
    rival = "plain read"
    versus(work, portion, {rival: whole}, unit="GB/s of the stream", at_least=0.8)
    record(
        f"{work}: bytes that come",
        portion.came / payloads[0],
        {rival: whole.came / payloads[0]},
        unit="B a payload",
        at_least=50.0,
    )
    record(
        f"{work}: processor of the client",
        portion.processor * 1e6 / payloads[0],
        {rival: whole.processor * 1e6 / payloads[0]},
        unit="us a payload",
        at_least=10.0,
    )


LIVE_CLIENTS = 300


class Live:
    """Clients with one selection, which wait for commits of one wanted entry each."""

    def __init__(self, address: tuple[str, int]) -> None:
        request = encode_command(FilteredStart(0, selected(where=wanted([b"\x01"])) or ()), 1)
        self.poll = select.poll()
        self.connections: dict[int, socket.socket] = {}
        for _ in range(LIVE_CLIENTS):
            connection = socket.create_connection(address)
            self.connections[connection.fileno()] = connection
            connection.sendall(request)
            connection.recv(4096)
            self.poll.register(connection, select.POLLIN)

    def received(self, data: bytes) -> None:
        """Return when each client has this entry."""
        waiting = set(self.connections)
        while waiting:
            for descriptor, _ in self.poll.poll(20_000):
                if data in self.connections[descriptor].recv(4096):
                    waiting.discard(descriptor)

    def close(self) -> None:
        for connection in self.connections.values():
            connection.close()


@pytest.mark.skipif(not PROC, reason="needs Linux's /proc")
def test_live(record: Any, smoke: bool, tmp_path: Path) -> None:
    commits = 5 if smoke else 400
    with (
        serving(tmp_path / "s.bin") as (server, pid),
        closing(Live(server.addresses[0])) as live,
    ):
        before, longest = processor_seconds(pid), []
        for number in range(commits):
            data = pack_message(b"\x01" + number.to_bytes(32), b"five!")
            begin = time.perf_counter()
            server.stream.append(MESSAGE_TYPE, data)
            live.received(data)
            longest.append(time.perf_counter() - begin)
        spent = processor_seconds(pid) - before
    name = f"live, {LIVE_CLIENTS} clients with one selection"
    record(
        f"{name}: processor of the server",
        spent * 1e6 / commits / LIVE_CLIENTS,
        {"the promise": 45.0},
        unit="us a client and commit",
        at_least=1.0,
    )
    record(f"{name}: until all have it, p50", sorted(longest)[commits // 2] * 1e3, unit="ms")
