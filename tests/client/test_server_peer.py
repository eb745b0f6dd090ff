"""Servers that pages are restored from: what they send, and servers that do not answer."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from datastreamer.client.blocking_client import BlockingClient
from datastreamer.client.server_peer import ServerPeer
from datastreamer.client.upstream import Upstream
from datastreamer.errors import ConnectFailed, NoAnswer, PeerError
from datastreamer.protocol.messages import encode_result
from datastreamer.service.embedded import StreamServer
from datastreamer.storage.stream import DataStream
from tests.network.stub import Handler, Stub, StubServer, handler, sample
from tests.ports import free_port
from tests.storage.made import FIRST, make


def test_entries_as_a_file_has_them(tmp_path: Path) -> None:
    path = make(tmp_path / "s.bin", [(1, b"one"), (2, b"two"), (3, b"three")], system_id=4)
    with DataStream.open(path, read_only=True) as stream:
        stream_id = stream.stream_id
    with (
        StreamServer(path, host="127.0.0.1", port=0, create=False, in_process=True) as server,
        ServerPeer(Upstream("127.0.0.1", server.port)) as peer,
    ):
        assert peer.name == f"127.0.0.1:{server.port}"
        assert peer.header().system_id == 4
        assert peer.stream_id() == stream_id
        content = path.read_bytes()[FIRST + 20 : FIRST + 20 + 20 + 22]
        assert peer.entries(1, 3, 1000) == content
        assert peer.entries(1, 3, 1000) == content


def test_a_server_that_has_fewer_entries_than_it_says() -> None:
    with (
        StubServer(handler(Stub(sample(50), header_total=100))) as server,
        ServerPeer(Upstream("127.0.0.1", server.port), answer_within=0.3) as peer,
    ):
        began = time.monotonic()
        with pytest.raises(NoAnswer, match=r"entries 40 to 59 did not arrive in 0\.3 s"):
            peer.entries(40, 60, 1000)
        with pytest.raises(NoAnswer):
            peer.header()
        assert time.monotonic() - began < 5


@pytest.mark.parametrize(
    ("ask", "what"),
    [
        (ServerPeer.header, "the header"),
        (ServerPeer.stream_id, "the stream's id"),
        (lambda peer: peer.page_sums(1), "the checksums"),
        (lambda peer: peer.entries(10, 12, 1000), "entries 10 to 11"),
    ],
)
def test_a_server_that_sends_a_byte_now_and_then(
    ask: Callable[[ServerPeer], object], what: str
) -> None:
    """Each byte ends a wait for an answer, but does not extend the time for it."""
    with (
        StubServer(trickling(Stub(sample(50)))) as server,
        ServerPeer(Upstream("127.0.0.1", server.port), answer_within=0.3) as peer,
        pytest.raises(NoAnswer, match=rf"{server.port}: {what} did not arrive in 0\.3 s"),
    ):
        ask(peer)


def test_an_answer_to_a_token_that_comes_byte_by_byte() -> None:
    def handle(connection: socket.socket) -> None:
        connection.recv(1000)
        slowly(connection, encode_result(9))

    with (
        StubServer(handle) as server,
        pytest.raises(NoAnswer, match=r"no answer from 127\.0\.0\.1:\d+ within 0\.3 s"),
    ):
        BlockingClient("127.0.0.1", server.port, timeout=0.3, token="one")


def trickling(stub: Stub) -> Handler:
    """Serves one connection, a byte of the answers at a time."""

    def handle(connection: socket.socket) -> None:
        while True:
            slowly(connection, stub.receive(connection.recv(65536)))

    return handle


def slowly(connection: socket.socket, answer: bytes) -> None:
    for at in range(len(answer)):
        time.sleep(0.05)
        connection.sendall(answer[at : at + 1])


def test_a_server_that_is_gone_is_asked_once() -> None:
    port = free_port()
    with ServerPeer(Upstream("127.0.0.1", port)) as peer:
        with pytest.raises(ConnectFailed, match=f"127.0.0.1:{port}"):
            peer.header()
        # Now it is there, and is not asked.
        with socket.create_server(("127.0.0.1", port)) as listener:
            listener.settimeout(0.1)
            with pytest.raises(ConnectFailed):
                peer.entries(0, 1, 1000)
            with pytest.raises(TimeoutError):
                listener.accept()


def test_a_server_that_sends_more_than_fits() -> None:
    """Entries that cannot have been in these pages are not collected in memory."""
    with (
        StubServer(handler(Stub(sample(50)))) as server,
        ServerPeer(Upstream("127.0.0.1", server.port)) as peer,
    ):
        assert peer.entries(0, 50, 1 << 20)
        with pytest.raises(PeerError, match="entries 0 to 49 have more than 99 bytes"):
            peer.entries(0, 50, 99)
