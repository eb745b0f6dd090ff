"""Raw readers: the least that a client can be, the same for our server and a rival's.

`catch_up` drains a socket; `point_reads` asks for entries one by one; `LiveReaders`
is a process of its own with many connections that all wait for operations as they
are committed, and takes the time from commit to receipt. Knows the bytes on the
wire and the standard library only, so that no one's client is measured with a
server.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import os
import queue
import select
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench.measure import Done, Latencies

HEAD = 17
RESULT_OK = struct.pack(">BII", 0xFF, 11, 0) + b"OK"
START = struct.Struct(">QQQ")
STAMP = struct.Struct(">Q")


def _connect(address: tuple[str, int], timeout: float = 60.0) -> socket.socket:
    connection = socket.create_connection(address[:2], timeout=timeout)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection


def _receive(connection: socket.socket, size: int) -> bytes:
    received = b""
    while len(received) < size:
        more = connection.recv(size - len(received))
        if not more:
            raise ConnectionError(f"the server closed after {len(received)} of {size} bytes")
        received += more
    return received


def _start(connection: socket.socket, entry: int, stream_type: int) -> None:
    connection.sendall(START.pack(1, stream_type, entry))
    result = _receive(connection, len(RESULT_OK))
    if result != RESULT_OK:
        raise ConnectionError(f"the server answered {result!r} to a Start")


def catch_up(
    address: tuple[str, int],
    *,
    entries: int,
    size: int,
    start: int = 0,
    stream_type: int = 1,
    chunk: int = 1 << 20,
) -> Done:
    """Receive `entries` entries of `size` bytes of data, without parsing them.

    Reads large chunks and lets the kernel gather them (SO_RCVLOWAT): a reader that
    wakes for every segment is what would be measured.
    """
    with _connect(address) as connection:
        begin = time.perf_counter()
        _start(connection, start, stream_type)
        drain(connection, entries * (HEAD + size), chunk)
        return Done(entries, time.perf_counter() - begin)


_GATHERED = 64 << 10
_KEPT = 256 << 20


def drain(connection: socket.socket, left: int, chunk: int = 1 << 20) -> None:
    """Receive that many bytes in large chunks, which the kernel gathers (SO_RCVLOWAT)."""
    buffer = bytearray(chunk)
    wanted, least = _GATHERED, 0
    connection.settimeout(1.0)
    while left:
        wanted = min(wanted, left)
        if least != wanted:
            least = wanted
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, least)
        try:
            received = connection.recv_into(buffer, min(chunk, left))
        except TimeoutError:
            if wanted == 1:
                raise
            # The receive buffer may be full with fewer bytes, and then no more come.
            wanted = 1
            continue
        if not received:
            raise ConnectionError(f"the server closed {left} bytes too early")
        left -= received
        wanted = _GATHERED


def point_reads(
    address: tuple[str, int], numbers: Iterable[int], *, size: int, stream_type: int = 1
) -> list[float]:
    """Ask for one entry after the other, each waited for; seconds of each.

    All of them have `size` bytes of data.
    """
    waits = []
    expected = len(RESULT_OK) + HEAD + size
    with _connect(address) as connection:
        for number in numbers:
            begin = time.perf_counter()
            connection.sendall(START.pack(5, stream_type, number))
            answer = _receive(connection, expected)
            waits.append(time.perf_counter() - begin)
            if struct.unpack_from(">Q", answer, len(RESULT_OK) + 9)[0] != number:
                raise ConnectionError(f"another entry than {number} came: {answer[:28]!r}")
    return waits


class Question(NamedTuple):
    """A request, and the size of its answer."""

    request: bytes
    answer: int


def asked_in_turn(
    address: tuple[str, int], questions: Sequence[Question], connections: int
) -> Done:
    """Ask on that many connections, each of which waits for its answer before it asks again."""
    left = iter(questions)
    opened = {one.fileno(): one for one in (_connect(address) for _ in range(connections))}
    due: dict[int, int] = {}
    poll: Any = select.epoll() if hasattr(select, "epoll") else select.poll()
    begin = time.perf_counter()
    for fileno, connection in opened.items():
        if question := next(left, None):
            poll.register(fileno, select.POLLIN)
            connection.sendall(question.request)
            due[fileno] = question.answer
    while due:
        for fileno, _ in poll.poll():
            connection = opened[fileno]
            received = len(connection.recv(due[fileno]))
            if not received:
                raise ConnectionError("the server closed too early")
            due[fileno] -= received
            if not due[fileno]:
                del due[fileno]
                if question := next(left, None):
                    connection.sendall(question.request)
                    due[fileno] = question.answer
    seconds = time.perf_counter() - begin
    for connection in opened.values():
        connection.close()
    return Done(len(questions), seconds)


def asked_at_once(address: tuple[str, int], questions: Sequence[Question], in_flight: int) -> Done:
    """Ask on one connection, with several questions in flight."""
    ends = list(itertools.accumulate(len(question.request) for question in questions))
    request = b"".join(question.request for question in questions)
    answer = questions[0].answer
    with _connect(address) as connection:
        begin = time.perf_counter()
        sent, got, total = 0, 0, len(questions) * answer
        while got < total:
            window = ends[min(got // answer + in_flight, len(ends)) - 1]
            if sent < window:
                sent += connection.send(request[sent:window])
            received = len(connection.recv(1 << 16))
            if not received:
                raise ConnectionError(f"the server closed after {got} of {total} bytes")
            got += received
        return Done(len(questions), time.perf_counter() - begin)


def some_numbers(entries: int, count: int) -> list[int]:
    """`count` numbers of entries, near to no order."""
    step = 7919
    return [(at * step) % entries for at in range(count)]


def pipelined(
    address: tuple[str, int], *, count: int, entries: int, size: int, in_flight: int = 100
) -> Done:
    """Ask for `count` of the first `entries` entries, with several queries in flight."""
    answer = len(RESULT_OK) + HEAD + size
    questions = [Question(START.pack(5, 1, at), answer) for at in some_numbers(entries, count)]
    return asked_at_once(address, questions, in_flight)


def echoes(address: tuple[str, int], count: int, *, size: int) -> list[float]:
    """As `point_reads`, of a server that answers anything with `size` bytes."""
    waits = []
    with _connect(address) as connection:
        for _ in range(count):
            begin = time.perf_counter()
            connection.sendall(START.pack(5, 1, 0))
            _receive(connection, size)
            waits.append(time.perf_counter() - begin)
    return waits


class Stalled:
    """`clients` connections that ask for the stream from entry `start` on and read nothing;
    a context manager."""

    def __init__(
        self, address: tuple[str, int], *, clients: int, start: int = 0, stream_type: int = 1
    ) -> None:
        self.connections: list[socket.socket] = []
        for _ in range(clients):
            connection = socket.socket()
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            connection.settimeout(60)
            connection.connect(address[:2])
            self.connections.append(connection)
            _start(connection, start, stream_type)

    def __enter__(self) -> Stalled:
        return self

    def __exit__(self, *error: object) -> None:
        for connection in self.connections:
            connection.close()


class LiveReaders:
    """`clients` connections in a process of their own that wait for `operations`
    operations, from entry `start` on; a context manager, ready when entered.

    Each operation is `entries` entries of `size` bytes of data, and the data of its
    first entry begins with the u64 (big-endian) of ``time.time_ns()`` at its commit.
    """

    program = __file__

    def __init__(
        self,
        address: tuple[str, int],
        *,
        clients: int,
        operations: int,
        start: int,
        entries: int = 5,
        size: int = 200,
        stream_type: int = 1,
        timeout: float = 60.0,
    ) -> None:
        self.timeout = timeout
        words = [address[0], address[1], clients, operations, start, entries * (HEAD + size)]
        self.process = subprocess.Popen(
            [sys.executable, self.program, *map(str, words), str(stream_type), str(timeout)],
            stdout=subprocess.PIPE,
            text=True,
        )
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._lines.put(line)
        self._lines.put("{}")

    def _answer(self) -> dict[str, Any]:
        answer: dict[str, Any] = json.loads(self._lines.get(timeout=self.timeout + 5))
        if not answer or "error" in answer:
            raise ConnectionError(f"the readers gave up: {answer.get('error', 'no word')}")
        return answer

    def result(self) -> Latencies:
        """Waits for the last operation at the last client; from commit to receipt,
        over all operations and clients."""
        return Latencies(**self._answer())

    def __enter__(self) -> LiveReaders:
        try:
            self._answer()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self.process.kill()
        self.process.wait()
        self._thread.join()
        assert self.process.stdout is not None
        self.process.stdout.close()


def _live(
    address: tuple[str, int],
    clients: int,
    operations: int,
    start: int,
    size: int,
    stream_type: int,
    timeout: float,
) -> Latencies:
    """The process of `LiveReaders`: `size` is the bytes of one operation."""
    connections = {}
    for _ in range(clients):
        connection = _connect(address, timeout)
        _start(connection, start, stream_type)
        connection.setblocking(False)
        connections[connection.fileno()] = connection
    poll: Any = select.epoll() if hasattr(select, "epoll") else select.poll()
    for fileno in connections:
        poll.register(fileno, select.POLLIN)
    left = clients * operations * size
    kept = left <= _KEPT
    # All is looked at when all has come, and the memory for it is there before, so that a client
    # costs as little as it can. (More memory than this would cost more than a look.)
    room = memoryview(bytearray(b"0") * ((left if kept else 0) + _GATHERED))
    gc.disable()
    print('{"ready": true}', flush=True)
    received = _receipts(connections, poll, room, left, timeout, kept)
    if kept:
        received = iter(list(received))
    return Latencies.of([wait / 1e9 for wait in _waits(received, room, size)])


def _receipts(
    connections: dict[int, socket.socket],
    poll: Any,
    room: memoryview,
    left: int,
    timeout: float,
    kept: bool,
) -> Iterator[tuple[int, int, int, int]]:
    """The descriptor, the place in `room`, the size and the time of each receipt, up to `left`
    bytes in all. Unless they are `kept`, each overwrites the one before."""
    receive = {fileno: connection.recv_into for fileno, connection in connections.items()}
    deadline = time.monotonic() + timeout
    unit = 1 if hasattr(select, "epoll") else 1000
    at = 0
    while left > 0:
        events = poll.poll(max(0.0, deadline - time.monotonic()) * unit)
        if not events:
            raise TimeoutError(f"{left} bytes did not come in {timeout} s")
        for fileno, _ in events:
            size = receive[fileno](room[at : at + _GATHERED])
            yield fileno, at, size, time.time_ns()
            if not size:
                raise ConnectionError(f"the server closed, {left} bytes too early")
            left -= size
            if kept:
                at += size
    if left:
        raise ConnectionError(f"{-left} bytes came that had come already")


def _waits(
    received: Iterable[tuple[int, int, int, int]], room: memoryview, size: int
) -> Iterator[int]:
    """From commit to receipt of the last byte, in ns: of each operation of each connection."""
    begun: dict[int, bytes] = {}  # the start of an operation
    for fileno, start, count, at in received:
        data = begun.get(fileno, b"") + room[start : start + count]
        place = 0
        while len(data) - place >= size:
            yield at - STAMP.unpack_from(data, place + HEAD)[0]
            place += size
        begun[fileno] = data[place:]


def main() -> None:
    words = argparse.ArgumentParser()
    words.add_argument("host")
    for name in ("port", "clients", "operations", "start", "size", "stream_type"):
        words.add_argument(name, type=int)
    words.add_argument("timeout", type=float)
    given = vars(words.parse_args())
    address = (given.pop("host"), given.pop("port"))
    try:
        print(json.dumps(_live(address, **given)._asdict()), flush=True)
    except OSError as error:
        print(json.dumps({"error": str(error)}), flush=True)
    os._exit(0)  # hundreds of sockets are closed by the system, not one by one


if __name__ == "__main__":
    main()
