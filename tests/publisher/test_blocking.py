"""The publisher without Trio, against a server in a thread of this process."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

from datastreamer import BlockingPublisher, Publishing, StreamServer
from datastreamer.errors import (
    ConnectFailed,
    Fenced,
    HistoryChanged,
    LeaseHeld,
    NoOperation,
    NotAllowed,
    OperationOpen,
    OperationTooLarge,
    SourceBusy,
    StreamClosed,
    UsageError,
)
from datastreamer.protocol.retry import Backoff

TOKEN = "a token"
QUICK = Backoff(0.001, 0.01)


@pytest.fixture
def token_file(tmp_path: Path) -> Path:
    path = tmp_path / "token"
    path.write_text(TOKEN)
    path.chmod(0o600)
    return path


@contextmanager
def served(path: Path, token_file: Path, **terms: Any) -> Iterator[StreamServer]:
    publishing = Publishing(token_file=token_file, **terms)
    with StreamServer(
        path, host="127.0.0.1", port=0, index="memory", in_process=True, publishing=publishing
    ) as server:
        yield server


def publisher_of(server: StreamServer, **options: Any) -> BlockingPublisher:
    options = {"token": TOKEN, "backoff": QUICK, **options}
    return BlockingPublisher("127.0.0.1", server.port, **options)


def put(publisher: BlockingPublisher, data: bytes) -> None:
    with publisher.atomic_op() as op:
        op.add_entry(3, data)


def contents(server: StreamServer) -> list[bytes]:
    return [entry.data for entry in server.stream.entries()]


def test_operations(path: Path, token_file: Path) -> None:
    with served(path, token_file) as server:
        with publisher_of(server) as publisher:
            put(publisher, b"one")
            assert server.stream.total_entries == publisher.total_entries == 1
            with pytest.raises(LeaseHeld):
                server.stream.start_atomic_op()
            op = publisher.atomic_op()
            with pytest.raises(OperationOpen):
                publisher.atomic_op()
            op.roll_back()
            with pytest.raises(NoOperation):
                op.commit()
            pending = []
            for number in range(1000):
                op = publisher.atomic_op()
                op.add_entries(3, [b"%d" % number] * 2)
                pending.append(op.commit(wait=False))
            assert [each.wait().first_entry for each in pending] == [*range(1, 2001, 2)]
            op = publisher.atomic_op()
            for _ in range(5):
                op.add_entry(4, bytes(1_000_000))
            op.commit(wait=False)
        with pytest.raises(StreamClosed):
            put(publisher, b"late")
        assert server.stream.total_entries == 2006
        # (It has left, and this process writes again as soon as that is seen.)
        wait_until_left(server)
        with server.stream.atomic_op() as local:
            local.add_entry(3, b"local")


def wait_until_left(server: StreamServer) -> None:
    for _ in range(1000):
        try:
            with publisher_of(server, lease=10):
                pass
        except SourceBusy:
            continue
        break
    while server.stream._lease is not None:
        threading.Event().wait(0.001)


def test_who_may_not(path: Path, token_file: Path) -> None:
    with pytest.raises(UsageError, match="in_process=True"):
        StreamServer(path, port=0, publishing=Publishing(token_file=token_file))
    assert not path.exists()
    with served(path, token_file) as server:
        with pytest.raises(NotAllowed):
            publisher_of(server, token=None)
        with closing(publisher_of(server)) as first:
            with pytest.raises(SourceBusy):
                publisher_of(server)
            with publisher_of(server, take_over=True) as second:
                put(second, b"of the second")
                with pytest.raises(Fenced):
                    put(first, b"of the first")
                with pytest.raises(Fenced):
                    first.flush()
                with pytest.raises(Fenced):
                    first.resend()
        with pytest.raises(Fenced):
            publisher_of(server, epoch=1)
        assert contents(server) == [b"of the second"]


def test_refusals(path: Path, token_file: Path) -> None:
    with served(path, token_file, max_operation_bytes=1000) as server:
        with publisher_of(server) as publisher:
            with pytest.raises(OperationTooLarge):
                put(publisher, bytes(1000))
            with pytest.raises(OperationTooLarge):
                publisher.flush()
            publisher.drop()
            put(publisher, b"small")
        wait_until_left(server)
        again = publisher_of(server, next_entry=0)
        with closing(again), pytest.raises(HistoryChanged):
            put(again, b"other")
        assert contents(server) == [b"small"]


def test_the_lease_is_kept_and_a_lost_server_waited_for(path: Path, token_file: Path) -> None:
    with served(path, token_file, lease=0.6) as server:
        port = server.port
        publisher = publisher_of(server)
        put(publisher, b"one")
        # Longer than the lease, without a word: another source is not let in.
        threading.Event().wait(1.0)
        with pytest.raises(SourceBusy):
            publisher_of(server)
        op = publisher.atomic_op()
        op.add_entry(3, b"two")
    with StreamServer(
        path,
        host="127.0.0.1",
        port=port,
        index="memory",
        in_process=True,
        publishing=Publishing(token_file=token_file),
    ) as server:
        op.commit()
        put(publisher, b"three")
        assert publisher.epoch == 1
        assert contents(server) == [b"one", b"two", b"three"]
    with pytest.raises(ConnectFailed):
        BlockingPublisher("127.0.0.1", port, token=TOKEN)
    op = publisher.atomic_op()
    op.add_entry(3, b"four")
    publisher._retry_for = 0.05
    with pytest.raises(ConnectFailed):
        op.commit()
    publisher.close()


def test_it_loads_no_trio() -> None:
    program = "import sys; from datastreamer import BlockingPublisher; print('trio' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", program], check=True, capture_output=True, text=True, timeout=60
    )
    assert done.stdout.strip() == "False"


class Interrupted:
    """A socket that is interrupted, as by Ctrl-C, when `size` bytes of a send went out."""

    def __init__(self, made: socket.socket, size: int) -> None:
        self._made = made
        self._size = size

    def __getattr__(self, name: str) -> Any:
        return getattr(self._made, name)

    def sendall(self, data: bytes) -> None:
        size, self._size = self._size, -1
        if size < 0:
            return self._made.sendall(data)
        self._made.sendall(data[:size])
        raise KeyboardInterrupt


@pytest.mark.parametrize("size", [0, 1, 36, 53, 200, 1053])
def test_an_interrupt_in_mid_request_leaves_no_half_of_it(
    path: Path, token_file: Path, size: int
) -> None:
    """What comes next is not taken for the rest of it, and what was committed is there."""
    with served(path, token_file) as server, publisher_of(server) as publisher:
        publisher._socket = Interrupted(publisher._socket, size)  # type: ignore[arg-type]
        op = publisher.atomic_op()
        op.add_entry(3, b"a" * 1000)
        with pytest.raises(KeyboardInterrupt):
            op.commit()
        op.roll_back()
        put(publisher, b"b" * 5000)
        assert contents(server) == [b"a" * 1000, b"b" * 5000]
