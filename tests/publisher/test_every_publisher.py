"""Every kind of publisher against a server in a thread of this process: one behaviour."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from datastreamer import Publishing, StreamServer
from datastreamer.errors import (
    ConnectFailed,
    Fenced,
    HistoryChanged,
    LeaseHeld,
    NoOperation,
    NotAllowed,
    NotSupported,
    OperationOpen,
    OperationTooLarge,
    SourceBusy,
    StreamClosed,
    UsageError,
)
from datastreamer.protocol.publish.publisher import SourceConnection
from datastreamer.protocol.retry import Backoff
from datastreamer.transport.tls import ServerTLS
from tests.network.drivers import kinds, publisher_of_kind
from tests.network.secure import Authority

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
    with serving(path, Publishing(token_file=token_file, **terms)) as server:
        yield server


def serving(path: Path, publishing: Publishing | None, **options: Any) -> StreamServer:
    options = {"host": "127.0.0.1", "port": 0, **options}
    return StreamServer(path, index="memory", in_process=True, publishing=publishing, **options)


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
    while server.stream._op.appender.lease is not None:
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
        assert contents(server) == [b"small"]


def test_another_history(kind: str, path: Path, token_file: Path) -> None:
    """Operations that the stream holds are compared; those after them are appended."""
    with served(path, token_file) as server:
        with server.stream.atomic_op() as op:
            op.add_entries(3, [b"a", b"b", b"c"])
        with publisher_of(kind, server, next_entry=1) as publisher:
            for data in (b"b", b"c", b"d"):
                put(publisher, data)
        for number, message in ((2, "differ from those in the stream"), (5, "next entry is 4")):
            wait_until_left(kind, server)
            with (
                pytest.raises(HistoryChanged, match=message) as caught,
                publisher_of(kind, server, next_entry=number) as again,
            ):
                put(again, b"C")
            assert caught.value.total_entries == 4
        assert contents(server) == [b"a", b"b", b"c", b"d"]


def test_a_server_that_accepts_no_publishers(kind: str, path: Path) -> None:
    with (
        serving(path, None) as server,
        pytest.raises(NotSupported, match="accepts no publishers"),
        publisher_of(kind, server),
    ):
        pass


def test_a_commit_waits_when_much_is_unacknowledged(
    kind: str, path: Path, token_file: Path
) -> None:
    with (
        served(path, token_file, max_underway=2) as server,
        publisher_of(kind, server, max_unacknowledged=3000) as publisher,
    ):
        most = 0
        for number in range(100):
            op = publisher.atomic_op()
            op.add_entry(3, number.to_bytes(2, "big") * 500)
            op.commit(wait=False)
            most = max(most, publisher._engine.source.size)
        publisher.flush()
        assert most < 4200
        assert len(contents(server)) == 100


def test_a_publisher_that_is_faster_than_it_may_be_waits(
    kind: str, path: Path, token_file: Path
) -> None:
    with (
        served(path, token_file, max_operations_per_second=50.0) as server,
        publisher_of(kind, server) as publisher,
    ):
        began = time.monotonic()
        for number in range(60):
            op = publisher.atomic_op()
            op.add_entry(3, b"%d" % number)
            op.commit(wait=False)
        publisher.flush()
        # The operations of one second at once, the others at that rate.
        assert time.monotonic() - began >= 0.18
        assert contents(server) == [b"%d" % number for number in range(60)]


def test_a_client_certificate(kind: str, path: Path, authority: Authority) -> None:
    tls = ServerTLS(authority.issue("server"), client_ca=authority.file)
    with serving(path, Publishing(client_certs=("source.example",)), tls=tls) as server:
        reader = authority.context(authority.issue("reader", "reader.example"))
        source = authority.context(authority.issue("source", "source.example"))
        with pytest.raises(NotAllowed), publisher_of(kind, server, token=None, tls=reader):
            pass
        with publisher_of(kind, server, token=None, tls=source) as publisher:
            put(publisher, bytes(500_000))
        assert contents(server) == [bytes(500_000)]


def test_a_unix_socket(kind: str, path: Path, token_file: Path, tmp_path: Path) -> None:
    socket = tmp_path / "s.sock"
    publishing = Publishing(token_file=token_file)
    with serving(path, publishing, host=None, port=None, unix=socket) as server:
        with publisher_of_kind(kind, f"unix:{socket}", token=TOKEN) as publisher:
            put(publisher, b"one")
        assert contents(server) == [b"one"]


def test_the_lease_is_kept_and_a_lost_server_waited_for(
    kind: str, path: Path, token_file: Path
) -> None:
    with ExitStack() as stack:
        with served(path, token_file, lease=0.6) as server:
            port = server.port
            stack.enter_context(pytest.raises(ConnectFailed))
            publisher = stack.enter_context(publisher_of(kind, server))
            put(publisher, b"one")
            # For longer than the lease nothing is sent: another source is not accepted.
            threading.Event().wait(1.0)
            with pytest.raises(SourceBusy), publisher_of(kind, server):
                pass
            op = publisher.atomic_op()
            op.add_entry(3, b"two")
        with serving(path, Publishing(token_file=token_file), port=port) as server:
            op.commit()
            put(publisher, b"three")
            assert publisher.epoch == 1
            assert contents(server) == [b"one", b"two", b"three"]
        with pytest.raises(ConnectFailed), publisher_of(kind, server):
            pass
        op = publisher.atomic_op()
        op.add_entry(3, b"four")
        publisher.give_up()
        # Leaving the block raises it, too.
        with pytest.raises(ConnectFailed):
            op.commit()


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
