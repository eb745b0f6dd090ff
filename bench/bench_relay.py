"""Relays: catching up with much, and what each hop of a chain adds to a live entry.

The upstream is ours, in a process of its own; the relays of the chain are processes too,
as an operator runs them. What is promised is a part of the limit: what the machine receives,
writes and syncs unlooked at.
"""

from __future__ import annotations

import os
import queue
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio

from bench.bench_serving import SIZE, fill
from bench.measure import Done, Latencies
from datastreamer import BlockingClient, Relay, StreamServer, connect
from datastreamer.protocol.commands import Start, encode_command
from datastreamer.protocol.messages import OK

HOPS = 3
SYNC_BYTES = 64 << 20
LIMIT = "limit: bare recv and pwrite in two threads, a sync each 64 MiB"
START = encode_command(Start(0), 1)


@pytest.fixture(scope="module")
def much(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Any:
    """A stream of 200 B entries, 1.09 GB of it (a smoke run's is small), and its server."""
    entries = 2_000 if request.config.getoption("benchmark_disable") else 5_000_000
    path = tmp_path_factory.mktemp("much") / "stream.bin"
    fill(path, entries)
    with StreamServer(path, host="127.0.0.1", port=0, sync="os", index="memory") as server:
        yield entries, server.addresses[0]
    path.unlink()


def client_alone(address: tuple[str, int], entries: int) -> Done:
    async def main() -> float:
        async with connect(*address) as client:
            begin = time.perf_counter()
            async with client.batches(stop=entries) as batches:
                async for _ in batches:
                    pass
            return time.perf_counter() - begin

    return Done(entries * (17 + SIZE), trio.run(main))


@contextmanager
def bare_stream(path: Path, address: tuple[str, int]) -> Iterator[tuple[int, socket.socket]]:
    """A new file and a connection; the file is removed at the end."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL)
    try:
        with socket.create_connection(address) as connection:
            yield fd, connection
    finally:
        os.close(fd)
        path.unlink()


def bare_pieces(
    connection: socket.socket, total: int, buffers: Callable[[], memoryview]
) -> Iterator[tuple[memoryview, int]]:
    """The streamed bytes with their Result, in full buffers, and the offset of each."""
    connection.sendall(START)
    at, end = 0, total + len(OK)
    while at < end:
        buffer = buffers()
        got = connection.recv_into(buffer[: end - at], 0, socket.MSG_WAITALL)
        if not got:
            raise AssertionError("the server ended the connection")
        yield buffer[:got], at
        at += got


def bare_copy(path: Path, address: tuple[str, int], total: int) -> Done:
    """Receive the same bytes and write them to a new file, unlooked at; in pieces that stay in
    a processor's own cache in between, which is quicker than a MiB at a time."""
    buffer = memoryview(bytearray(256 << 10))
    with bare_stream(path, address) as (fd, connection):
        begin = time.perf_counter()
        for piece, at in bare_pieces(connection, total, lambda: buffer):
            os.pwrite(fd, piece, at)
        return Done(total, time.perf_counter() - begin)


def bare_copy_by_two(
    path: Path, address: tuple[str, int], total: int, *, synced: bool = False
) -> Done:
    """The same by two threads, one receives and one writes: what a relay that does nothing else
    would reach. Larger pieces than these or of 1 MiB are slower here: 1.9 and 2.0 GB/s, of 2 MiB
    0.65, of 4 MiB 1.0 or 2.5.

    If `synced`, a third one syncs each 64 MiB meanwhile, as the policy "os" does."""
    free: queue.SimpleQueue[memoryview] = queue.SimpleQueue()
    full: queue.SimpleQueue[tuple[memoryview, int] | None] = queue.SimpleQueue()
    due: queue.SimpleQueue[bool] = queue.SimpleQueue()
    for _ in range(3):
        free.put(memoryview(bytearray(512 << 10)))
    with bare_stream(path, address) as (fd, connection):

        def write() -> None:
            unsynced = 0
            while (found := full.get()) is not None:
                piece, at = found
                os.pwrite(fd, piece, at)
                whole = piece.obj
                assert isinstance(whole, bytearray)
                free.put(memoryview(whole))
                unsynced += len(piece)
                if synced and unsynced >= SYNC_BYTES and due.empty():
                    due.put(True)
                    unsynced = 0
            due.put(False)

        def sync() -> None:
            while due.get():
                os.fdatasync(fd)

        threads = [threading.Thread(target=work) for work in (write, sync)]
        begin = time.perf_counter()
        for thread in threads:
            thread.start()
        try:
            for found in bare_pieces(connection, total, free.get):
                full.put(found)
        finally:
            full.put(None)
            threads[0].join()
        seconds = time.perf_counter() - begin
        threads[1].join()
        return Done(total, seconds)


def relayed(path: Path, address: tuple[str, int], entries: int, sync: Any) -> Done:
    """A new relay, in this process, until all is there and, under "commit", on disk."""

    async def main() -> float:
        relay = Relay([address], path, host="127.0.0.1", port=0, sync=sync, index="memory")
        async with trio.open_nursery() as nursery:
            begin = time.perf_counter()
            await nursery.start(relay.run)
            stream = relay.stream
            assert stream is not None
            await relay.until(lambda: relay.caught_up)
            if sync == "commit":
                await trio.to_thread.run_sync(stream.sync)
            assert stream.total_entries == entries
            seconds = time.perf_counter() - begin
            nursery.cancel_scope.cancel()
            return seconds

    try:
        return Done(entries * (17 + SIZE), trio.run(main))
    finally:
        path.unlink()


@pytest.mark.parametrize("sync", ["os", "commit"])
def test_catch_up(versus: Any, much: Any, tmp_path: Path, sync: str) -> None:
    entries, address = much
    versus(
        f"relaying 1.09 GB of 200 B entries, sync {sync}",
        partial(relayed, tmp_path / "relay.bin", address, entries, sync),
        {
            "our client alone, same upstream": partial(client_alone, address, entries),
            "bare recv and pwrite, same upstream": partial(
                bare_copy, tmp_path / "bare", address, entries * (17 + SIZE)
            ),
            LIMIT: partial(
                bare_copy_by_two, tmp_path / "bare", address, entries * (17 + SIZE), synced=True
            ),
        },
        unit="B/s",
        at_least={LIMIT: 0.8} if sync == "os" else None,
        rounds=5,
    )


def test_limit(versus: Any, much: Any, tmp_path: Path) -> None:
    """How much of what our client alone takes in any relay could keep: where the server has one
    of two processors, less than is promised."""
    entries, address = much
    versus(
        "limit of relaying: bare recv and pwrite in two threads",
        partial(bare_copy_by_two, tmp_path / "bare", address, entries * (17 + SIZE)),
        {"our client alone, same upstream": partial(client_alone, address, entries)},
        unit="B/s",
        rounds=5,
    )


@contextmanager
def relay_process(upstream: tuple[str, int], path: Path) -> Iterator[tuple[str, int]]:
    """`datastreamer relay --sync os` and its address."""
    words = ["relay", "--server", f"{upstream[0]}:{upstream[1]}", "--file", str(path)]
    words += ["--host", "127.0.0.1", "--port", "0", "--sync", "os", "--index", "memory"]
    process = subprocess.Popen(
        [sys.executable, "-m", "datastreamer", *words],
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )
    try:
        assert process.stderr is not None
        for line in process.stderr:
            if found := re.search(r"serving .* on (.*):(\d+)$", line.strip()):
                yield found[1], int(found[2])
                return
        raise AssertionError("the relay did not start")
    finally:
        process.kill()
        process.wait()
        assert process.stderr is not None
        process.stderr.close()


def test_chain(record: Any, smoke: bool, tmp_path: Path) -> None:
    """From the start of a commit to its receipt at the server and after 1, 2, 3 relays."""
    count = 20 if smoke else 2_000
    with ExitStack() as stack:
        server = stack.enter_context(
            StreamServer(tmp_path / "0.bin", host="127.0.0.1", port=0, sync="os", index="memory")
        )
        addresses = [server.addresses[0]]
        for hop in range(1, HOPS + 1):
            addresses.append(
                stack.enter_context(relay_process(addresses[-1], tmp_path / f"{hop}.bin"))
            )
        direct: Latencies | None = None
        for hop, address in enumerate(addresses):
            waits = []
            with BlockingClient(*address) as client:
                batches = client.batches(from_entry=0)
                for number in range(server.stream.total_entries + count):
                    begin = time.perf_counter()
                    if number >= server.stream.total_entries:
                        with server.stream.atomic_op() as op:
                            op.add_entry(1, bytes(SIZE))
                        while next(batches).next_number <= number:
                            pass
                        waits.append(time.perf_counter() - begin)
            found = Latencies.of(waits[len(waits) // 10 :])
            direct = direct or found
            behind = "at the server" if not hop else f"behind {hop} relay{'s' * (hop > 1)}"
            rivals = {"at the server": (direct.p50, direct.p99)} if hop else {}
            for name, at, figure in (("p50", 0, found.p50), ("p99", 1, found.p99)):
                record(
                    f"commit to receipt {behind}, {name}",
                    figure,
                    {rival: figures[at] for rival, figures in rivals.items()},
                    unit="ms",
                )
