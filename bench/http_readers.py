"""Raw readers of the HTTP port: ranges, followers, and what open consoles ask for.

Followers and consoles are processes of their own, as in `readers.py`. Knows the bytes on the wire
and the standard library only.
"""

from __future__ import annotations

import argparse
import heapq
import json
import os
import re
import select
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench.measure import Done, Latencies
from bench.readers import LiveReaders

_GATHERED = 64 << 10
# An entry of an event, with the u64 that its data begins with.
_STAMP = re.compile(rb'"number": (\d+), "type": 1, "length": \d+, "data": "0x([0-9a-f]{16})')
# What the overview of a console asks for, and how often.
_POLLED = {"/v1/stream": 1.0, "/v1/clients?limit=0": 2.0, "/readyz": 2.0}


def _asked(address: tuple[str, int], path: str, *, close: bool = False) -> socket.socket:
    connection = socket.create_connection(address[:2], timeout=60)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    _ask(connection, path, close=close)
    return connection


def _ask(connection: socket.socket, path: str, *, close: bool = False) -> None:
    last = "Connection: close\r\n" * close
    connection.sendall(f"GET {path} HTTP/1.1\r\nHost: localhost\r\n{last}\r\n".encode())


def _head(connection: socket.socket) -> bytes:
    """What comes after the head of an answer, as far as it has been received with it."""
    got = b""
    while b"\r\n\r\n" not in got:
        got += _received(connection)
    head, _, rest = got.partition(b"\r\n\r\n")
    if not head.startswith(b"HTTP/1.1 200 "):
        raise ConnectionError(f"the server answered {got[:200]!r}")
    return rest


def _received(connection: socket.socket) -> bytes:
    data = connection.recv(1 << 16)
    if not data:
        raise ConnectionError("the server closed")
    return data


def read_range(address: tuple[str, int], path: str, entries: int, least: int) -> Done:
    """Receive a range of entries, which has `least` bytes or more, without parsing it."""
    buffer = bytearray(1 << 20)
    begin = time.perf_counter()
    with _asked(address, path, close=True) as connection:
        got = len(_head(connection))
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, _GATHERED)
        while received := connection.recv_into(buffer):
            got += received
    if got < least or bytes(buffer[:5]) == b"HTTP/":
        raise ConnectionError(f"{got} of {least} bytes")
    return Done(entries, time.perf_counter() - begin)


class SseReaders(LiveReaders):
    """`LiveReaders` that follow by Server-Sent Events."""

    program = __file__


class Beside:
    """A process with clients of the HTTP port that go on until the end of the block: `followers`
    that receive what is committed, and `consoles`, each of which also shows the overview."""

    def __init__(self, address: tuple[str, int], *, followers: int = 0, consoles: int = 0) -> None:
        words = [address[0], address[1], "--followers", followers, "--consoles", consoles]
        self.process = subprocess.Popen(
            [sys.executable, __file__, *map(str, words)], stdout=subprocess.PIPE, text=True
        )

    def __enter__(self) -> Beside:
        assert self.process.stdout is not None
        if not json.loads(self.process.stdout.readline() or "{}").get("ready"):
            self.__exit__()
            raise ConnectionError("the clients over HTTP gave up")
        return self

    def __exit__(self, *error: object) -> None:
        self.process.kill()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()


# The processes.


def _beside(address: tuple[str, int], followers: int, consoles: int) -> None:
    """Receive what comes and ask what is due, forever; the kernel gathers events, so that this
    costs little."""
    buffer = bytearray(1 << 20)
    poll = select.poll()
    opened = {}
    due: list[tuple[float, int, str, float]] = []
    for _ in range(followers + consoles):
        connection = _asked(address, "/v1/follow")
        _head(connection)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, _GATHERED)
        opened[connection.fileno()] = connection
    for at in range(consoles):
        connection = _asked(address, "/")
        opened[connection.fileno()] = connection
        due += [
            (time.monotonic() + seconds * at / consoles, connection.fileno(), path, seconds)
            for path, seconds in _POLLED.items()
        ]
    heapq.heapify(due)
    for connection in opened.values():
        poll.register(connection, select.POLLIN)
    print('{"ready": true}', flush=True)
    while True:
        while due and due[0][0] <= time.monotonic():
            when, fileno, path, seconds = due[0]
            _ask(opened[fileno], path)
            heapq.heapreplace(due, (when + seconds, fileno, path, seconds))
        wait = max(0.0, due[0][0] - time.monotonic()) * 1000 + 1 if due else None
        for fileno, _ in poll.poll(wait):
            if not opened[fileno].recv_into(buffer):
                raise ConnectionError("the server closed")


def _live(
    address: tuple[str, int], clients: int, operations: int, start: int, entries: int
) -> Latencies:
    """The process of `SseReaders`."""
    connections, events = {}, {}
    for _ in range(clients):
        connection = _asked(address, f"/v1/follow?from={start}")
        events[connection.fileno()] = _head(connection)
        connections[connection.fileno()] = connection
    print('{"ready": true}', flush=True)
    poll = select.poll()
    for fileno in connections:
        poll.register(fileno, select.POLLIN)
    left = clients * operations
    waits = []
    while left > 0:
        for fileno, _ in poll.poll():
            received = _received(connections[fileno])
            now = time.time_ns()
            data = events[fileno] + received
            whole, end, events[fileno] = data.rpartition(b"\n\n")
            for number, stamp in _STAMP.findall(whole + end):
                if (int(number) - start) % entries == 0:
                    waits.append((now - int(stamp, 16)) / 1e9)
                    left -= 1
    return Latencies.of(waits)


def main() -> None:
    words = argparse.ArgumentParser()
    words.add_argument("host")
    words.add_argument("port", type=int)
    words.add_argument("live", type=float, nargs="*")
    words.add_argument("--followers", type=int, default=0)
    words.add_argument("--consoles", type=int, default=0)
    given = words.parse_args()
    address = (given.host, given.port)
    try:
        if given.live:
            # As `LiveReaders` passes them; an operation's bytes are those of 5 entries.
            clients, operations, start, _, _, _ = map(int, given.live)
            found: dict[str, Any] = _live(address, clients, operations, start, 5)._asdict()
            print(json.dumps(found), flush=True)
        else:
            _beside(address, given.followers, given.consoles)
    except OSError as error:
        print(json.dumps({"error": str(error)}), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
