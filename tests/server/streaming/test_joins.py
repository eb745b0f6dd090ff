"""Joins to a stream that is being written: each client moves from old entries to new ones
without a loss or a repeat, however many come at once."""

from __future__ import annotations

import faulthandler
import random
import selectors
import socket
import threading
from contextlib import ExitStack
from pathlib import Path

import pytest

from datastreamer.server.limits import room_for_clients
from datastreamer.service.embedded import StreamServer
from tests.network import model as wire
from tests.network.model import OK

# Operations of two entries whose data is their own number.
A_SECOND = 1_000
ENTRY = len(wire.pack(0, 1, bytes(8)))
# The most entries before the end where a client begins, and after it that it follows.
BEHIND = 5_000
BEYOND = 200
# More than the 1,024 descriptors that `select` knows; and in the long runs.
AT_ONCE, AT_MOST = 1_200, 3_000
PATIENCE = 60


class Writer:
    """Commits until the block ends; `packed` are the bytes of all that is committed, and of
    the operation under way."""

    def __init__(self, server: StreamServer) -> None:
        self._stream = server.stream
        self.packed = bytearray()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._write)

    def commit(self) -> None:
        number = len(self.packed) // ENTRY
        data = [at.to_bytes(8, "big") for at in (number, number + 1)]
        for at, each in enumerate(data):
            self.packed += wire.pack(number + at, 1, each)
        with self._stream.atomic_op() as op:
            op.add_entries(1, data)

    def _write(self) -> None:
        while not self._over.wait(1 / A_SECOND):
            self.commit()

    def __enter__(self) -> Writer:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()


def join_at_once(count: int, writer: Writer, server: StreamServer, choose: random.Random) -> int:
    """`count` clients join, and stay until each has been sent `BEYOND` entries after it came. Every
    byte is looked at."""
    with ExitStack() as stack, selectors.DefaultSelector() as ready:
        places: dict[socket.socket, list[int]] = {}
        for at in range(count):
            client = stack.enter_context(socket.socket())
            client.settimeout(PATIENCE)
            client.connect(("127.0.0.1", server.port))
            total = server.stream.total_entries
            # Every fourth at the very end.
            start = total - (0 if at % 4 == 0 else choose.randrange(min(BEHIND, total)))
            client.sendall(wire.start(start))
            client.setblocking(False)
            ready.register(client, selectors.EVENT_READ)
            places[client] = [start * ENTRY - len(OK), start * ENTRY, (total + BEYOND) * ENTRY]
        left = set(places)
        while left:
            events = ready.select(PATIENCE)
            assert events, f"{len(left)} of {count} clients wait"
            for key, _ in events:
                client = key.fileobj
                assert isinstance(client, socket.socket)
                got = client.recv(1 << 18)
                place = places[client]
                at, first, target = place
                assert got, f"the client from entry {first // ENTRY} on was ended"
                due = (OK[at - first :] if at < first else b"") + writer.packed[
                    max(at, first) : at + len(got)
                ]
                assert got == due[: len(got)], f"from entry {first // ENTRY}, byte {at - first}"
                place[0] += len(got)
                if place[0] >= target and client in left:
                    left.discard(client)
                    ready.unregister(client)
        return count


@pytest.mark.slow
@pytest.mark.parametrize(
    ("workers", "joins"),
    [
        (1, AT_ONCE),
        (2, AT_ONCE),
        pytest.param(1, 100_000, marks=pytest.mark.soak),
        pytest.param(2, 100_000, marks=pytest.mark.soak),
    ],
)
def test_joins_to_a_live_stream(path: Path, workers: int, joins: int) -> None:
    at_once = min(joins, AT_MOST)
    if room_for_clients(2 * at_once)[0] < 2 * at_once:
        pytest.skip("too few descriptors")
    if joins > 10_000:
        faulthandler.cancel_dump_traceback_later()  # this one is meant to take long
    choose = random.Random(joins + workers)
    with StreamServer(path, host="127.0.0.1", port=0, sync="os", workers=workers) as server:
        writer = Writer(server)
        for _ in range(BEHIND):
            writer.commit()
        with writer:
            done = 0
            while done < joins:
                done += join_at_once(at_once, writer, server, choose)
        print(f"{done} joins while {server.stream.total_entries} entries were written")
