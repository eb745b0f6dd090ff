"""An idle server sleeps: how often its processes wake, as Linux counts it."""

from __future__ import annotations

import math
import re
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from datastreamer.storage.stream import DataStream
from tests.cli.process import Running, running
from tests.network import model as wire
from tests.network.fixtures import append
from tests.network.model import OK, Model

WAKES_A_SECOND = 5
SECONDS = 2.0
PATIENCE = 60.0

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="counts in /proc")


def family(process: int) -> Iterator[int]:
    """A process and its children."""
    yield process
    for task in Path(f"/proc/{process}/task").iterdir():
        for child in (task / "children").read_text().split():
            yield from family(int(child))


def wakes(process: int) -> dict[str, int]:
    """How often each thread of a process has gone to sleep so far."""
    found = {}
    for task in Path(f"/proc/{process}/task").iterdir():
        status = (task / "status").read_text()
        [count] = re.findall(r"^voluntary_ctxt_switches:\s+(\d+)", status, re.MULTILINE)
        found[task.name] = int(count)
    return found


def fewest_wakes(processes: list[int], enough: float) -> dict[int, float]:
    """The fewest wake-ups a second of each process in any two seconds, until all have at most
    `enough`: it may have work left from its start, and other programs wake it, too."""
    fewest: dict[int, float] = {}
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end:
        began, before = time.monotonic(), {each: wakes(each) for each in processes}
        time.sleep(SECONDS)
        seconds = time.monotonic() - began
        for each, threads in before.items():
            now = wakes(each)
            rate = sum(now[it] - count for it, count in threads.items() if it in now) / seconds
            fewest[each] = min(rate, fewest.get(each, rate))
        if max(fewest.values()) <= enough:
            break
    return fewest


def streaming(server: Running, stack: ExitStack, written: bytes) -> socket.socket:
    client = stack.enter_context(socket.create_connection(("127.0.0.1", server.port()), PATIENCE))
    client.sendall(wire.start(0))
    expect(client, OK + written)
    return client


def expect(client: socket.socket, data: bytes) -> None:
    got = b""
    while len(got) < len(data):
        piece = client.recv(len(data) - len(got))
        assert piece
        got += piece
    assert got == data


def test_an_idle_server_wakes_at_most_five_times_a_second(tmp_path: Path) -> None:
    """One that writes, one that follows with its HTTP port, one of several processes, and a relay;
    each has a client that receives what is committed."""
    followed, served = tmp_path / "followed.bin", tmp_path / "served.bin"
    with DataStream.create(served, index="memory") as made:
        append(made, (1, b"first"))
    port = ("--host", "127.0.0.1", "--port", 0)
    with ExitStack() as stack, DataStream.create(followed, index="memory") as writer:
        append(writer, (1, b"first"))
        first = Model(followed.read_bytes()).packed()

        def start(*words: object) -> Running:
            return stack.enter_context(running(*words, *port, cwd=tmp_path))

        origin = start("serve", served, "--http-port", 0)
        followers = [
            start("serve", followed, "--follow", "--http-port", 0),
            start("serve", followed, "--follow", "--workers", 2),
        ]
        upstream = f"127.0.0.1:{origin.port()}"
        relay = start("relay", "--server", upstream, "--file", tmp_path / "relay.bin")
        clients = [streaming(each, stack, first) for each in followers]
        # A commit: the threads that send to live clients work from now on.
        for turn in range(3):
            append(writer, (1, b"%d" % turn))
            for client in clients:
                expect(client, wire.pack(1 + turn, 1, b"%d" % turn))
        processes = [it for each in (origin, *followers, relay) for it in family(each.process.pid)]
        assert len(processes) == 6
        fewest = fewest_wakes(processes, WAKES_A_SECOND)
        assert max(fewest.values()) <= WAKES_A_SECOND, fewest
        # And still awake for what comes.
        append(writer, (1, b"last"))
        for client in clients:
            expect(client, wire.pack(4, 1, b"last"))


def test_each_wake_up_is_counted(tmp_path: Path) -> None:
    program = "import time\nprint('ready', flush=True)\nwhile True: time.sleep(0.01)"
    script = tmp_path / "wakes.py"
    script.write_text(program)
    with running(cwd=tmp_path, module="wakes") as often:
        often.out.until("ready")
        [rate] = fewest_wakes([often.process.pid], math.inf).values()
        assert rate > 3 * WAKES_A_SECOND
