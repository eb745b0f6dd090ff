"""Serving: catch-up, point reads and live latency of our server.

Every server here is a process of its own, as an operator runs it; what drains it are
the raw readers of `readers.py`, the same for the reference's server. Limits are what
the same machine does with nothing but sockets: a bare sendfile of the same bytes, a
bare Trio echo of the same sizes.
"""

from __future__ import annotations

import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from bench.measure import Done, Latencies
from bench.readers import (
    LiveReaders,
    Stalled,
    catch_up,
    drain,
    echoes,
    pipelined,
    point_reads,
    some_numbers,
)
from datastreamer import DataStream, StreamServer
from datastreamer.format import HEADER_PAGE_SIZE
from datastreamer.server.limits import room_for_clients
from tests.interop.peer import PeerFailed

SIZE = 200
ANSWER = 11 + 17 + SIZE


def fill(path: Path, entries: int, size: int = SIZE) -> None:
    with DataStream.create(path, sync="os", index="memory") as stream:
        data = [bytes(size)] * 10_000
        while (left := entries - stream.total_entries) > 0:
            with stream.atomic_op() as op:
                op.add_entries(3, data[:left])


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Any:
    """A stream of 200 B entries (217 MB; a smoke run's is small) and its server."""
    entries = 2_000 if request.config.getoption("benchmark_disable") else 1_000_000
    path = tmp_path_factory.mktemp("stored") / "stream.bin"
    fill(path, entries)
    with StreamServer(path, host="127.0.0.1", port=0, sync="os", index="memory") as server:
        yield path, entries, server.addresses[0]


@contextmanager
def helper(code: str, *words: object) -> Iterator[tuple[str, int]]:
    """A server in a process of its own that prints its port; the address."""
    process = subprocess.Popen(
        [sys.executable, "-c", code, *map(str, words)], stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        yield "127.0.0.1", int(process.stdout.readline())
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


BARE_SENDFILE = """
import os, socket, sys
file = os.open(sys.argv[1], os.O_RDONLY)
listener = socket.create_server(("127.0.0.1", 0))
print(listener.getsockname()[1], flush=True)
while True:
    connection, _ = listener.accept()
    connection.recv(100)
    connection.sendall(bytes.fromhex("ff0000000b00000000") + b"OK")
    offset, end = int(sys.argv[2]), int(sys.argv[3])
    while offset < end:
        offset += os.sendfile(connection.fileno(), file, offset, end - offset)
    connection.recv(1)
    connection.close()
"""

BARE_ECHO = """
import sys, trio
answer = bytes(int(sys.argv[1]))
async def main():
    async with trio.open_nursery() as nursery:
        async def handle(stream):
            while await stream.receive_some(65536):
                await stream.send_all(answer)
        listeners = await nursery.start(trio.serve_tcp, handle, 0)
        print(listeners[0].socket.getsockname()[1], flush=True)
trio.run(main)
"""


def bare_catch_up(address: tuple[str, int], size: int) -> Done:
    """Read `size` bytes and a Result after a Start at 0, as `readers.catch_up` does, whatever they
    are."""
    with socket.create_connection(address) as connection:
        begin = time.perf_counter()
        connection.sendall(bytes.fromhex("000000000000000100000000000000010000000000000000"))
        drain(connection, size + 11)
        return Done(size / (17 + SIZE), time.perf_counter() - begin)


def test_catch_up(versus: Any, reference: Any, smoke: bool, stored: Any) -> None:
    path, entries, address = stored
    size = entries * (17 + SIZE)
    with helper(BARE_SENDFILE, path, HEADER_PAGE_SIZE, HEADER_PAGE_SIZE + size) as bare:
        rivals: dict[str, Any] = {"bare sendfile": lambda: bare_catch_up(bare, size)}
        if reference is None:
            versus(
                "catch-up, server only, 200 B",
                lambda: catch_up(address, entries=entries, size=SIZE),
                rivals,
                unit="entries/s",
                rounds=9,
                at_least=0.8,
            )
            return
        theirs = 2_000 if smoke else 200_000
        with reference.serving(entries=theirs, size=SIZE) as server:
            rivals["reference (Go)"] = lambda: reference.catch_up(server, theirs, SIZE)
            versus(
                "catch-up, server only, 200 B",
                lambda: catch_up(address, entries=entries, size=SIZE),
                rivals,
                unit="entries/s",
                rounds=9,
                at_least=0.8,
            )


def test_point_reads(record: Any, smoke: bool, stored: Any) -> None:
    """One connection, each waited for; the limit is a Trio echo of the same sizes."""
    _, entries, address = stored
    count = 50 if smoke else 5_000
    numbers = some_numbers(entries, count)
    with helper(BARE_ECHO, ANSWER) as bare:
        ours: list[Latencies] = []
        limits: list[Latencies] = []
        for _ in range(1 if smoke else 5):
            ours.append(Latencies.of(point_reads(address, numbers, size=SIZE)))
            limits.append(Latencies.of(echoes(bare, count, size=ANSWER)))
    record(
        "entry by number, 1 connection, waited",
        1e3 / statistics.median(one.p50 for one in ours),
        {"bare Trio echo": 1e3 / statistics.median(one.p50 for one in limits)},
        unit="entries/s",
        at_least=0.75,
        less_is_better=False,
    )
    record(
        "entry by number, waited, p99",
        statistics.median(one.p99 for one in ours),
        {"bare Trio echo": statistics.median(one.p99 for one in limits)},
        unit="ms",
    )


def test_pipelined(versus: Any, smoke: bool, stored: Any) -> None:
    """Entries by number, 100 requests in flight, read by a raw socket."""
    _, entries, address = stored
    count = 500 if smoke else 50_000
    versus(
        "entry by number, 100 in flight",
        lambda: pipelined(address, count=count, entries=entries, size=SIZE),
        {"100,000 a second": 1e5},
        unit="entries/s",
        at_least=1.0,
    )


def live(
    server: StreamServer,
    clients: int,
    operations: int,
    rate: float,
    busy: bool = False,
    size: int = SIZE,
    readers: type[LiveReaders] = LiveReaders,
    address: tuple[str, int] | None = None,
) -> Latencies:
    """From just before the commit to receipt, over all clients and operations. The readers connect
    to `address` (None: where the server speaks the stream protocol)."""
    stream = server.stream
    rest = [bytes(size)] * 4
    tail = bytes(size - 8)
    with readers(
        address or server.addresses[0],
        clients=clients,
        operations=operations,
        start=stream.total_entries,
        size=size,
    ) as reading:
        begin = time.perf_counter()
        for at in range(operations):
            due = begin + at / rate
            while (left := due - time.perf_counter()) > 0:
                if not busy:
                    time.sleep(left)
                else:
                    sum(range(200))
            stream.append_many(1, [time.time_ns().to_bytes(8, "big") + tail, *rest])
        return reading.result()


def its_live(reference: Any, clients: int, operations: int, rate: int) -> Latencies | None:
    """The reference's figures, or None: now and then it loses or repeats entries of a client
    that joins, and then their times are not known."""
    try:
        return reference.live(clients=clients, operations=operations, rate=rate, timeout=20.0)
    except ConnectionError:
        return None


FOLLOWING = """
import functools, sys, trio
from datastreamer import DataStream, serve
async def main():
    with DataStream.open(sys.argv[1], follow=True, index="memory") as stream:
        async with trio.open_nursery() as nursery:
            served = functools.partial(serve, stream, host="127.0.0.1", port=0)
            [(_, port)] = await nursery.start(served)
            print(port, flush=True)
trio.run(main)
"""


def test_followed(record: Any, reference: Any, smoke: bool, tmp_path: Path) -> None:
    """A file that another program writes, and no waker: the reference, beside its own server, and
    ours, beside the process that it starts itself."""
    operations, rate = (5, 100) if smoke else (200, 100)
    found: dict[str, list[Latencies]] = {}
    for turn in range(1 if smoke else 3):
        path = tmp_path / f"ours{turn}.bin"
        with StreamServer(path, host="127.0.0.1", port=0, sync="os") as server:
            with helper(FOLLOWING, path) as follower:
                followed = live(server, 10, operations, rate, address=follower)
            found.setdefault("ours", []).append(followed)
            found.setdefault("its own server", []).append(live(server, 10, operations, rate))
        if reference is None:
            continue
        path = tmp_path / f"reference{turn}.bin"
        with reference.serving(path) as peer, helper(FOLLOWING, path) as follower:
            for name, address, start in (
                ("reference", follower, 0),
                ("reference (Go)", peer.address, 5 * operations),
            ):
                readers = LiveReaders(address, clients=10, operations=operations, start=start)
                with readers as reading:
                    peer.append(operations, rate=rate)
                    found.setdefault(name, []).append(reading.result())
    p50 = {name: statistics.median(one.p50 for one in each) for name, each in found.items()}
    rows: list[tuple[str, str, dict[str, float | None]]] = [
        ("ours writes", "ours", {"its own server": p50["its own server"]})
    ]
    if reference is not None:
        rows.append(
            (
                "the reference writes",
                "reference",
                {"reference (Go)": p50["reference (Go)"], "1 ms": 1.0},
            )
        )
    for writer, name, rivals in rows:
        record(
            f"a followed file that {writer}, 10 clients, {rate} op/s of 5, p50",
            p50[name],
            rivals,
            unit="ms",
            at_least={"1 ms": 1.0} if "1 ms" in rivals else None,
        )


# The reference refuses the 101st client.
ITS_CLIENTS = 100


@pytest.mark.parametrize("rate", [10, 100, 1000], ids="{}op".format)
@pytest.mark.parametrize("clients", [1, 10, 100, 1000], ids="{}clients".format)
def test_live(
    record: Any, reference: Any, smoke: bool, tmp_path: Path, clients: int, rate: int
) -> None:
    """10 ms blocks are the 100 operations a second: the longest wait says whether they hold."""
    if room_for_clients(clients)[0] < clients:
        pytest.skip("too few descriptors")
    rounds = 1 if smoke or rate == 10 or clients == 1000 else 5 if rate == 100 else 3
    operations = 5 if smoke else rate + 10
    # At 1,000 operations per second to 100 clients its lag grows by a second each second.
    compared = reference is not None and clients <= ITS_CLIENTS
    ours: list[Latencies] = []
    theirs: list[Latencies] = []
    with StreamServer(tmp_path / "live.bin", host="127.0.0.1", port=0, sync="os") as server:
        # In turn: within a minute an idle machine may come to wake twice as fast.
        for _ in range(rounds):
            ours.append(live(server, clients, operations, rate))
            if compared and (one := its_live(reference, clients, operations, rate)) is not None:
                theirs.append(one)
    promised: dict[str, float] = {"p50": 1.0, "p99": 1.0} if rate > 10 else {}
    if rate == 100:
        # At most 0.95, 0.65 and 0.4 of its time.
        promised["p50"] = {1: 1.05, 10: 1.54, 100: 2.5}.get(clients, 1.0)
    for name in ("p50", "p99", "longest"):
        record(
            f"live, {clients} clients, {rate} op/s of 5, {name}",
            statistics.median(getattr(one, name) for one in ours),
            {
                "reference (Go)": statistics.median(getattr(one, name) for one in theirs)
                if theirs
                else None
            },
            unit="ms",
            at_least=promised.get(name),
        )


@pytest.mark.parametrize(
    ("reading", "stalled"), [(99, 1), (100, 2_000)], ids=["1of100", "2000of2100"]
)
def test_live_beside_stalled(
    record: Any, reference: Any, smoke: bool, tmp_path: Path, reading: int, stalled: int
) -> None:
    """Clients that stop reading, with all their buffers full: what the others see of it."""
    if smoke:
        reading, stalled = 9, 1 + stalled // 1000
    if room_for_clients(reading + stalled)[0] < reading + stalled:
        pytest.skip("too few descriptors")
    operations, rate = (5, 100) if smoke else (400, 200)
    ours: dict[str, list[Latencies]] = {"beside": [], "alone": []}
    with StreamServer(tmp_path / "live.bin", host="127.0.0.1", port=0, sync="os") as server:
        with server.stream.atomic_op() as op:
            op.add_entries(1, [bytes(1_000_000)] * 8)
        for _ in range(1 if smoke else 3):
            ours["alone"].append(live(server, reading, operations, rate))
            with Stalled(server.addresses[0], clients=stalled):
                ours["beside"].append(live(server, reading, operations, rate))
    for name in ("p50", "p99", "longest"):
        beside, alone = (
            statistics.median(getattr(one, name) for one in found) for found in ours.values()
        )
        record(
            f"live, {reading} clients, {stalled} more read nothing, {rate} op/s, {name}",
            beside,
            {"the same without those": alone},
            unit="ms",
            at_least=0.5 if name != "longest" else None,
        )


def test_a_stall_and_the_reference(
    record: Any, reference: Any, smoke: bool, tmp_path: Path
) -> None:
    """One of ten stops reading: the longest wait of the others."""
    operations, rate = (5, 100) if smoke else (4_000, 1_000)  # of 5 kB: no buffer takes all
    with (
        StreamServer(tmp_path / "live.bin", host="127.0.0.1", port=0, sync="os") as server,
        Stalled(server.addresses[0], clients=1),
    ):
        ours = live(server, 9, operations, rate, size=1_000)
    rivals: dict[str, float | None] = {"reference (Go)": None}
    if reference is not None:
        rivals = its_stall(reference, 9, operations, rate)
    record(
        f"live, 9 clients, one more reads nothing, {rate} op/s, longest",
        ours.longest,
        rivals,
        unit="ms",
        at_least=1.0,
    )


def its_stall(reference: Any, clients: int, operations: int, rate: int) -> dict[str, float | None]:
    seconds = 10.0
    try:
        found = reference.live(
            clients=clients,
            operations=operations,
            rate=rate,
            size=1_000,
            timeout=seconds,
            stalled=1,
        )
    except (ConnectionError, PeerFailed):
        # It was not through when its time was over.
        return {"reference (Go), given up": seconds * 1e3}
    return {"reference (Go)": found.longest}


# Readers are processes of their own: one interpreter for all is what would be measured.
READ_ALL = """
import sys, time
from bench.readers import catch_up
host, port, begin, entries, size = sys.argv[1:]
time.sleep(max(0.0, float(begin) - time.monotonic()))
catch_up((host, int(port)), entries=int(entries), size=int(size))
print(time.monotonic())
"""
ASK_ALL = """
import sys, time
from bench.readers import pipelined
host, port, begin, count, entries, size = sys.argv[1:]
time.sleep(max(0.0, float(begin) - time.monotonic()))
pipelined((host, int(port)), count=int(count), entries=int(entries), size=int(size))
print(time.monotonic())
"""
ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.parametrize("work", ["catch-up", "entry by number, 100 in flight"])
@pytest.mark.parametrize("readers", [2, 8])
def test_workers(versus: Any, smoke: bool, tmp_path: Path, work: str, readers: int) -> None:
    """Several clients at the same time, of two processes and of one. They want processors of
    their own: where they share two with the servers, nothing can grow."""
    path = tmp_path / "stream.bin"
    entries = 2_000 if smoke else 300_000
    questions = 200 if smoke else 50_000
    fill(path, entries)
    code, words, each = READ_ALL, [entries, SIZE], entries
    if work != "catch-up":
        code, words, each = ASK_ALL, [questions, entries, SIZE], questions

    def all_at_once(workers: int) -> Done:
        with StreamServer(
            path, host="127.0.0.1", port=0, index="memory", workers=workers
        ) as server:
            begin = time.monotonic() + (0.2 if smoke else 0.2 + 0.1 * readers)
            command = [sys.executable, "-c", code, *server.addresses[0], begin, *words]
            processes = [
                subprocess.Popen(
                    list(map(str, command)), stdout=subprocess.PIPE, text=True, cwd=ROOT
                )
                for _ in range(readers)
            ]
            ended = [float(process.communicate()[0]) for process in processes]
        return Done(each * readers, max(ended) - begin)

    versus(
        f"{work}, {readers} readers at once, two workers",
        lambda: all_at_once(2),
        {"one worker": lambda: all_at_once(1)},
        unit="entries/s",
        rounds=3,
    )


def test_busy_writer(record: Any, smoke: bool, tmp_path: Path) -> None:
    """A writer that burns CPU between its commits: served from a child process, as by
    default, beside a writer that sleeps, and beside the same from a thread of its own."""
    operations = 10 if smoke else 300
    ours: dict[str, list[Latencies]] = {"burns": [], "sleeps": [], "thread": []}
    for at in range(1 if smoke else 3):
        for name, thread in (("burns", False), ("sleeps", False), ("thread", True)):
            path = tmp_path / f"{name}{at}.bin"
            with StreamServer(
                path, host="127.0.0.1", port=0, sync="os", in_process=thread
            ) as server:
                ours[name].append(live(server, 10, operations, 100, busy=name != "sleeps"))
    for figure in ("p50", "p99"):
        burns, sleeps, thread = (
            statistics.median(getattr(one, figure) for one in found) for found in ours.values()
        )
        record(
            f"live, 10 clients, writer burns CPU, {figure}",
            burns,
            {"writer sleeps": sleeps, "served from a thread of the writer": thread},
            unit="ms",
        )
