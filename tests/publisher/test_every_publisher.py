"""Every kind of publisher against a server in a thread of this process: one behaviour."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from datastreamer import Publishing, StreamServer
from datastreamer.errors import (
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
from datastreamer.protocol.publisher import SourceConnection
from datastreamer.protocol.retry import Backoff
from tests.network.drivers import kinds, publisher_of_kind

pytestmark = kinds

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


def publisher_of(kind: str, server: StreamServer, **options: Any) -> Any:
    options = {"token": TOKEN, "backoff": QUICK, **options}
    return publisher_of_kind(kind, "127.0.0.1", server.port, **options)


def put(publisher: Any, data: bytes) -> None:
    with publisher.atomic_op() as op:
        op.add_entry(3, data)


def contents(server: StreamServer) -> list[bytes]:
    return [entry.data for entry in server.stream.entries()]


def test_operations(kind: str, path: Path, token_file: Path) -> None:
    with served(path, token_file) as server:
        with publisher_of(kind, server) as publisher:
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
        if kind == "blocking":
            with pytest.raises(StreamClosed):
                put(publisher, b"late")
        assert server.stream.total_entries == 2006
        # (It has left, and this process writes again as soon as that is seen.)
        wait_until_left(kind, server)
        with server.stream.atomic_op() as local:
            local.add_entry(3, b"local")


def wait_until_left(kind: str, server: StreamServer) -> None:
    for _ in range(1000):
        try:
            with publisher_of(kind, server, lease=10):
                pass
        except SourceBusy:
            continue
        break
    while server.stream._op.lease is not None:
        threading.Event().wait(0.001)


def test_who_may_not(kind: str, path: Path, token_file: Path) -> None:
    with pytest.raises(UsageError, match="in_process=True"):
        StreamServer(path, port=0, publishing=Publishing(token_file=token_file))
    assert not path.exists()
    with served(path, token_file) as server:
        with pytest.raises(NotAllowed):
            publisher_of(kind, server, token=None).__enter__()
        with suppress(Fenced), publisher_of(kind, server) as first:
            with pytest.raises(SourceBusy):
                publisher_of(kind, server).__enter__()
            with publisher_of(kind, server, take_over=True) as second:
                put(second, b"of the second")
                with pytest.raises(Fenced):
                    put(first, b"of the first")
                with pytest.raises(Fenced):
                    first.flush()
                with pytest.raises(Fenced):
                    first.resend()
        with pytest.raises(Fenced):
            publisher_of(kind, server, epoch=1).__enter__()
        assert contents(server) == [b"of the second"]


def test_refusals(kind: str, path: Path, token_file: Path) -> None:
    with served(path, token_file, max_operation_bytes=1000) as server:
        with publisher_of(kind, server) as publisher:
            with pytest.raises(OperationTooLarge):
                put(publisher, bytes(1000))
            with pytest.raises(OperationTooLarge):
                publisher.flush()
            publisher.drop()
            put(publisher, b"small")
        wait_until_left(kind, server)
        with (
            pytest.raises(HistoryChanged),
            publisher_of(kind, server, next_entry=0) as again,
        ):
            put(again, b"other")
        assert contents(server) == [b"small"]


def test_an_unexpected_error_is_raised_by_the_calls(
    kind: str, path: Path, token_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def receive(source: SourceConnection, data: bytes) -> None:
        raise ZeroDivisionError("a defect")

    with (
        served(path, token_file) as server,
        suppress(ZeroDivisionError),
        publisher_of(kind, server) as publisher,
    ):
        put(publisher, b"one")
        monkeypatch.setattr(SourceConnection, "receive", receive)
        for _ in range(2):
            op = publisher.atomic_op()
            op.add_entry(3, b"two")
            with pytest.raises(ZeroDivisionError):
                op.commit()
            op.roll_back()
