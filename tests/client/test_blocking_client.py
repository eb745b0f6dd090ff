"""The blocking client against stub servers on loopback."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from datastreamer._codec import Entry
from datastreamer.client.blocking_client import BlockingClient
from datastreamer.client.thread_driver import ThreadDriver
from datastreamer.errors import (
    BadFromEntry,
    ConnectFailed,
    ConnectionLost,
    StreamClosed,
    UsageError,
)
from datastreamer.protocol.commands import EntryQuery, HeaderQuery
from datastreamer.protocol.retry import Backoff
from datastreamer.service.embedded import StreamServer
from datastreamer.transport.tls import ServerTLS
from tests.network.secure import HOST, Authority
from tests.network.stub import Stub, StubServer, handler, sample

TEN = sample(10)
HUNDRED = sample(100)


@contextmanager
def client_of(*stubs: Stub, timeout: float = 10) -> Iterator[tuple[BlockingClient, StubServer]]:
    with (
        StubServer(*map(handler, stubs)) as server,
        BlockingClient("127.0.0.1", server.port, timeout=timeout, resume=False) as client,
    ):
        yield client, server


def gather(items: Any, seen: list[Entry]) -> None:
    """What comes before an error, too."""
    for item in items:
        seen.append(item)  # noqa: PERF402


def test_trio_is_not_loaded() -> None:
    code = "import sys, datastreamer.client.blocking_client; sys.exit('trio' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_its_repr_says_what_it_is() -> None:
    with client_of(Stub(TEN)) as (client, server):
        shown = f"<BlockingClient of 127.0.0.1:{server.port}, stream type 1: "
        assert repr(client) == shown + "connected>"
        client.close()
        assert repr(client) == shown + "closed>"


def test_run(capsys: pytest.CaptureFixture[str]) -> None:
    with client_of(Stub(TEN)) as (client, _):
        client.run(stop=3)
        assert capsys.readouterr().out == "0 176 4\n1 1 1\n2 2 2\n"
        seen: list[Entry] = []

        def callback(entry: Entry) -> None:
            seen.append(entry)
            if entry.number == 6:
                client.stop()

        client.run(callback, from_entry=3)
        assert seen == TEN[3:7]
        assert client.entry(6) == TEN[6]


def test_a_call_from_within_another() -> None:
    with client_of(Stub(TEN)) as (client, _):

        def numbers() -> Iterator[int]:
            yield 3
            client.header()

        with pytest.raises(UsageError, match="in use"):
            list(client.entries_by_number(numbers()))
        assert client.entry(3) == TEN[3]


def test_a_server_that_goes_silent() -> None:
    stubs = Stub(TEN, deaf=(EntryQuery,)), Stub(TEN, deaf=(HeaderQuery,)), Stub(TEN)
    with client_of(*stubs, timeout=0.05) as (client, server):
        with pytest.raises(ConnectionLost, match=r"no answer from 127.0.0.1:\d+ within 0.05 s"):
            client.entry(3)
        with pytest.raises(BadFromEntry):
            list(client.entries(from_entry=11))
        assert client.entry(3) == TEN[3]
        assert server.accepted == 3


def test_an_interrupt_costs_the_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> int:
        raise KeyboardInterrupt

    with client_of(Stub(TEN), Stub(TEN), Stub(TEN)) as (client, server):
        with monkeypatch.context() as patched:
            patched.setattr(ThreadDriver, "_receive", interrupted)
            with pytest.raises(KeyboardInterrupt):
                client.header()
        batches = client.batches()
        assert next(batches).first_number == 0
        with monkeypatch.context() as patched:
            patched.setattr(ThreadDriver, "_receive", interrupted)
            with pytest.raises(KeyboardInterrupt):
                next(batches)
        with pytest.raises(ConnectionLost, match="cancelled in the middle of a request"):
            next(batches)
        assert client.entry(3) == TEN[3]
        assert server.accepted == 3


class Reader(threading.Thread):
    """Reads all entries in a thread of its own; `waits` once nothing has come for it yet."""

    def __init__(self, client: BlockingClient, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__(daemon=True)
        self.client = client
        self.seen: list[Entry] = []
        self.error: Exception | None = None
        self.waits = threading.Event()
        receive = ThreadDriver._receive

        def noted(*words: Any) -> int:
            if self.seen:
                self.waits.set()
            return receive(*words)

        monkeypatch.setattr(ThreadDriver, "_receive", noted)
        self.start()

    def run(self) -> None:
        try:
            gather(self.client.entries(), self.seen)
        except Exception as error:  # noqa: BLE001 - the test's own thread judges it
            self.error = error

    def over(self) -> None:
        self.join(20)
        assert not self.is_alive()


@pytest.mark.parametrize("resume", [False, True])
def test_closed_while_another_thread_waits(monkeypatch: pytest.MonkeyPatch, resume: bool) -> None:
    with (
        StubServer(handler(Stub(TEN))) as server,
        BlockingClient("127.0.0.1", server.port, resume=resume) as client,
    ):
        reader = Reader(client, monkeypatch)
        assert reader.waits.wait(20)
        client.close()
        reader.over()
        assert reader.seen == TEN
        assert isinstance(reader.error, StreamClosed)
        with pytest.raises(StreamClosed):
            client.header()


@pytest.mark.parametrize("resume", [False, True])
def test_stopped_while_another_thread_waits(monkeypatch: pytest.MonkeyPatch, resume: bool) -> None:
    with (
        StubServer(handler(Stub(TEN)), handler(Stub(TEN))) as server,
        BlockingClient("127.0.0.1", server.port, resume=resume) as client,
    ):
        reader = Reader(client, monkeypatch)
        assert reader.waits.wait(20)
        with pytest.raises(UsageError, match="each thread its own"):
            client.header()
        client.stop()
        reader.over()
        assert reader.seen == TEN
        assert reader.error is None
        assert client.entry(3) == TEN[3]


def test_another_thread_ends_the_wait_for_a_lost_server(monkeypatch: pytest.MonkeyPatch) -> None:
    sleeps, sleep = threading.Event(), time.sleep

    def noted(seconds: float) -> None:
        sleeps.set()
        sleep(min(seconds, 0.001))

    monkeypatch.setattr(time, "sleep", noted)
    for end in ("stop", "close"):
        with StubServer(handler(Stub(TEN))) as server:
            far = Backoff(first=600, most=600)
            client = BlockingClient("127.0.0.1", server.port, backoff=far)
            with monkeypatch.context() as patched:
                reader = Reader(client, patched)
                assert reader.waits.wait(20)
        assert sleeps.wait(20)
        getattr(client, end)()
        reader.over()
        assert reader.seen == TEN
        assert isinstance(reader.error, StreamClosed if end == "close" else type(None))
        client.close()
        sleeps.clear()


@pytest.mark.parametrize("end", ["stop", "close"])
def test_another_thread_ends_a_wait_over_tls(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, authority: Authority, end: str
) -> None:
    tls = ServerTLS(authority.issue("blocking"))
    path = tmp_path / "stream.bin"
    with StreamServer(path, host=HOST, port=0, tls=tls, in_process=True) as server:
        with server.stream.atomic_op() as op:
            op.add_entry(1, b"first")
        with BlockingClient(HOST, server.port, tls=authority.context()) as client:
            reader = Reader(client, monkeypatch)
            assert reader.waits.wait(20)
            getattr(client, end)()
            reader.over()
            assert [entry.data for entry in reader.seen] == [b"first"]
            assert isinstance(reader.error, StreamClosed if end == "close" else type(None))


def test_no_answer_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(place: object, timeout: float) -> socket.socket:
        raise TimeoutError

    monkeypatch.setattr(socket, "create_connection", never)
    with pytest.raises(ConnectFailed, match="no answer within 3 s"):
        BlockingClient("127.0.0.1", timeout=3)
