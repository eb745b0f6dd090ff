"""Serving over TLS: handshakes good and bad, exact bytes, ends and messages."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import random
import signal
import socket
import ssl
import struct
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from datastreamer.client.blocking_client import BlockingClient
from datastreamer.client.trio_driver import connect
from datastreamer.client.upstream import Upstream
from datastreamer.errors import (
    BadCertificate,
    ConnectFailed,
    ConnectionLost,
    InvalidCommand,
    ServerFailed,
    StreamClosed,
    TLSFailed,
    UsageError,
)
from datastreamer.relay.relay import Relay
from datastreamer.service.embedded import StreamServer
from datastreamer.service.serve import serve
from datastreamer.storage.stream import DataStream
from datastreamer.transport import tls_stream as secure
from datastreamer.transport.tls import ServerTLS, client_tls
from datastreamer.transport.tls_stream import TLSTransport, reload_on_hangup
from tests.network import model as wire
from tests.network.fixtures import Open, Peer, append, over_tls, until
from tests.network.model import OK, Model
from tests.network.secure import HOST, Authority, TLSStream, dial

MIB = 1 << 20
RESET = struct.pack("ii", 1, 0)


def modelled(stream: DataStream) -> Model:
    return Model(Path(stream.path).read_bytes())


@pytest.fixture
def tls(authority: Authority) -> ServerTLS:
    return ServerTLS(authority.issue("server"))


@pytest.fixture(scope="module")
def stranger(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    """A CA that is not trusted."""
    return Authority(tmp_path_factory.mktemp("stranger"), "unknown")


@asynccontextmanager
async def serving(stream: DataStream, tls: ServerTLS | None) -> AsyncIterator[int]:
    """A server of the library's, on a port of its own."""
    async with trio.open_nursery() as nursery:
        call = functools.partial(serve, stream, host=HOST, port=0, tls=tls)
        [(_, port)] = await nursery.start(call)
        yield port
        nursery.cancel_scope.cancel()


# Bytes.


async def test_catching_up_and_live(stream: DataStream, secured: Open) -> None:
    """Ten MiB, an entry larger than what is sent at a time among them, then what comes."""
    append(stream, *[(1, bytes([n % 251]) * 20_000) for n in range(450)])
    append(stream, (2, os.urandom(MIB - 17)))
    model = modelled(stream)
    async with secured(stream) as rig, rig.client() as peer, rig.client() as other:
        await peer.ask(wire.start(0), OK + model.packed())
        await other.ask(wire.start(451), OK)
        await wait_all_tasks_blocked()
        for number in range(5):
            append(stream, (3, b"live %d" % number))
            late = modelled(stream).packed(451 + number)
            await peer.expect(late)
            await other.expect(late)
        await peer.ask(wire.stop(), OK)
        await peer.ask(wire.header(), OK + modelled(stream).header())
        await peer.nothing_more()


async def test_queries_in_records_of_any_size(stream: DataStream, secured: Open) -> None:
    """Of one record each, in parts, and several in one record."""
    append(stream, (1, b"entry"))
    answer = OK + wire.pack(0, 1, b"entry", packet=0xFE)
    async with secured(stream) as rig, rig.client() as peer:
        for _ in range(60):
            await peer.ask(wire.entry(0), answer)
        await peer.send_bytewise(wire.entry(0))
        await peer.expect(answer)
        await peer.ask(wire.entry(0) * 40, answer * 40)


async def test_a_truncation_ends_only_clients_that_are_past_it(
    stream: DataStream, secured: Open
) -> None:
    append(stream, *[(1, bytes([n % 251]) * 20_000) for n in range(520)])
    old = modelled(stream)
    async with secured(stream, receive_buffer=4096) as rig, AsyncExitStack() as stack:
        live, past, stalled = [await stack.enter_async_context(rig.client()) for _ in range(3)]
        await live.ask(wire.start(520), OK)
        await past.ask(wire.start(490), OK + old.packed(490))
        await stalled.ask(wire.start(0), OK)
        await wait_all_tasks_blocked(0.002)
        stream.truncate(500)
        assert await live.was_reset() == b""
        assert await past.was_reset() == b""
        append(stream, *[(2, b"new" * 1000)] * 40)
        await stalled.expect(modelled(stream).packed())
        append(stream, (3, b"live"))
        await stalled.expect(modelled(stream).packed(540))
        await stalled.nothing_more()


async def test_a_client_that_reads_nothing_holds_little(
    stream: DataStream, tls: ServerTLS, authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of what waits for the socket one record is encrypted, not all that is to be sent."""
    made: list[TLSTransport] = []
    init = TLSTransport.__init__

    def keep(self: TLSTransport, *words: object) -> None:
        made.append(self)
        init(self, *words)  # type: ignore[arg-type]

    monkeypatch.setattr(TLSTransport, "__init__", keep)
    append(stream, *[(1, bytes(MIB - 17))] * 12)
    async with (
        over_tls(stream, tls=tls, context=authority.context(), receive_buffer=4096) as rig,
        rig.client() as peer,
    ):
        await peer.ask(wire.start(0), OK)
        await wait_all_tasks_blocked(0.002)
        [transport] = made
        assert 0 < len(transport._unsent) + transport._outgoing.pending < 20_000
        await peer.expect(modelled(stream).packed())


# Ends.


async def test_the_ends_of_both_sides(stream: DataStream, secured: Open) -> None:
    async with secured(stream) as rig:
        async with rig.client() as peer:
            await peer.stream.send_eof()
            await peer.ended()
        async with rig.client() as peer:
            await peer.ask(wire.stop(), wire.result(2))  # a refusal that closes
            await peer.ended()
        async with rig.client() as peer:
            await peer.ask(wire.header(), OK + modelled(stream).header())
        await wait_all_tasks_blocked()
        assert not rig.server.sessions


async def test_the_end_of_the_server_is_reported(
    stream: DataStream, tls: ServerTLS, authority: Authority
) -> None:
    async with serving(stream, tls) as port:
        peer = Peer(await dial((HOST, port), authority.context()))
        await peer.ask(wire.start(0), OK)
        await wait_all_tasks_blocked()
    await peer.ended()
    await peer.close()


async def test_the_end_does_not_wait_for_who_reads_nothing(
    stream: DataStream, tls: ServerTLS, authority: Authority, autojump_clock: object
) -> None:
    append(stream, *[(1, bytes(MIB - 17))] * 8)
    before = trio.current_time()
    async with serving(stream, tls) as port:
        peer = Peer(await dial((HOST, port), authority.context(), receive_buffer=4096))
        await peer.ask(wire.start(0), OK)
        await wait_all_tasks_blocked(0.01)
        before = trio.current_time()
    assert trio.current_time() - before < 0.5
    await peer.close()


async def test_a_client_that_is_torn_down(stream: DataStream, secured: Open) -> None:
    append(stream, *[(1, bytes(MIB - 17))] * 8)
    async with secured(stream, receive_buffer=4096) as rig:
        for asked in (b"", wire.start(0)):
            async with rig.client() as peer:
                await peer.send(asked)
                await wait_all_tasks_blocked(0.002)
                assert isinstance(peer.stream, TLSStream)
                peer.stream.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
            await wait_all_tasks_blocked(0.002)
            assert not rig.server.sessions
        async with rig.client() as peer:
            await peer.ask(wire.header(), OK + modelled(stream).header())


async def test_garbage_behind_the_handshake(stream: DataStream, secured: Open) -> None:
    async with secured(stream) as rig, rig.client() as peer:
        assert isinstance(peer.stream, TLSStream)
        await peer.stream._stream.send_all(b"\x17\x03\x03\x00\x20" + bytes(32))
        with pytest.raises(trio.BrokenResourceError) as caught:
            await peer.rest()
        assert "BAD_RECORD_MAC" in str(caught.value.__cause__)


# Handshakes that come to nothing.


def refused(caplog: pytest.LogCaptureFixture, words: str) -> int:
    """How many connections the log says were refused so, in two lines at most: the first at
    once, the others when the server ends."""
    lines = [r for r in caplog.records if f"refused: {words}" in r.getMessage()]
    assert len(lines) <= 2
    return sum(r.__dict__["refused"] for r in lines)


async def test_a_handshake_takes_no_longer_than_it_may(
    stream: DataStream,
    tls: ServerTLS,
    authority: Authority,
    caplog: pytest.LogCaptureFixture,
    autojump_clock: object,
) -> None:
    """Byte by byte, or not at all; others come in meanwhile."""
    caplog.set_level(logging.INFO)
    async with serving(stream, tls) as port, AsyncExitStack() as stack:
        silent, half, slow = [
            await stack.enter_async_context(await trio.open_tcp_stream(HOST, port))
            for _ in range(3)
        ]
        await half.send_all(b"\x16\x03\x01\x02\x00" + bytes(100))
        peer = Peer(await dial((HOST, port), authority.context()))
        await peer.ask(wire.header(), OK + modelled(stream).header())
        before = trio.current_time()

        async def dribble() -> None:
            with contextlib.suppress(trio.BrokenResourceError):
                for byte in b"\x16\x03\x01\x02\x00" + bytes(500):
                    await slow.send_all(bytes([byte]))
                    await trio.sleep(1)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(dribble)
            for waiting in (silent, half, slow):
                with contextlib.suppress(trio.BrokenResourceError):
                    assert await waiting.receive_some() == b""
            nursery.cancel_scope.cancel()
        assert trio.current_time() - before <= secure.HANDSHAKE_SECONDS + 2
        await peer.ask(wire.header(), OK + modelled(stream).header())
        await peer.close()
    assert refused(caplog, "no TLS handshake within 10 s") == 3


async def test_half_a_handshake_then_a_reset(
    stream: DataStream, tls: ServerTLS, authority: Authority, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    context = authority.context()
    outgoing = ssl.MemoryBIO()
    half = context.wrap_bio(ssl.MemoryBIO(), outgoing, server_hostname=HOST)
    with pytest.raises(ssl.SSLWantReadError):
        half.do_handshake()
    hello = outgoing.read()
    async with serving(stream, tls) as port:
        for size in (0, 1, 5, 100, len(hello)):
            made = await trio.open_tcp_stream(HOST, port)
            await made.send_all(hello[:size])
            await wait_all_tasks_blocked(0.002)
            made.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
            await made.aclose()
        # A client that sends nothing is not logged: it may only check whether a server listens.
        quiet = await trio.open_tcp_stream(HOST, port)
        await quiet.send_eof()
        assert await quiet.receive_some() == b""
        await quiet.aclose()
        peer = Peer(await dial((HOST, port), context))
        await peer.ask(wire.header(), OK + modelled(stream).header())
        await peer.close()
    assert refused(caplog, "it closed the connection in the handshake") == 5


@pytest.mark.parametrize(
    "first", [b"\x16", b"\x16\x03\x01", b"\x16\x03\x01\x00\x40\x01\x00\x00\x3c\x03\x03"]
)
async def test_garbage_for_a_handshake(
    stream: DataStream, tls: ServerTLS, authority: Authority, first: bytes
) -> None:
    choose = random.Random(len(first))
    async with serving(stream, tls) as port:
        for size in (1, 10, 100, 1_000, 100_000):
            made = await trio.open_tcp_stream(HOST, port)
            with contextlib.suppress(trio.BrokenResourceError):
                await made.send_all(first + choose.randbytes(size))
                await made.send_eof()
                while await made.receive_some():
                    pass
            await made.aclose()
        peer = Peer(await dial((HOST, port), authority.context()))
        await peer.ask(wire.header(), OK + modelled(stream).header())
        await peer.close()


async def ask_both(
    port: int, context: ssl.SSLContext | None, error: type[Exception], message: str
) -> None:
    """Both clients fail in the same way."""

    def block() -> None:
        with BlockingClient(HOST, port, tls=context or False) as client:
            client.header()

    with pytest.raises(error, match=message):
        await trio.to_thread.run_sync(block)
    with pytest.raises(error, match=message):
        async with connect(HOST, port, tls=context or False) as client:
            await client.header()


async def test_a_client_without_tls_is_notified(
    stream: DataStream, tls: ServerTLS, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    async with serving(stream, tls) as port:
        await ask_both(
            port, None, InvalidCommand, "This server requires TLS: connect to tcps://HOST:PORT"
        )
    assert refused(caplog, "it does not use TLS") == 2


async def test_a_server_without_tls_is_reported(
    stream: DataStream, authority: Authority, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "datastreamer")
    async with serving(stream, None) as port:
        message = f"no TLS connection to {HOST}:{port}: it closed .* does the server use TLS"
        # As from a server that is shutting down: the client may try again.
        await ask_both(port, authority.context(), ConnectFailed, message)
    lines = [r.getMessage() for r in caplog.records]
    assert sum("it uses TLS, which this port does not" in line for line in lines) == 2


async def test_a_server_that_speaks_something_else(authority: Authority) -> None:
    async def greet(stream: trio.SocketStream) -> None:
        async with stream:
            await stream.send_all(b"220 mail.example ESMTP\r\n" * 10)
            with contextlib.suppress(trio.BrokenResourceError):
                while await stream.receive_some():
                    pass

    async with trio.open_nursery() as nursery:
        [listener] = await nursery.start(functools.partial(trio.serve_tcp, greet, 0, host=HOST))
        port = listener.socket.getsockname()[1]
        await ask_both(port, authority.context(), TLSFailed, "does the server use TLS")
        nursery.cancel_scope.cancel()


async def test_a_server_that_says_nothing(authority: Authority) -> None:
    with socket.create_server((HOST, 0)) as listener:
        port = listener.getsockname()[1]
        with pytest.raises(ConnectFailed, match=r"no answer within 0\.05 s"):
            async with connect(HOST, port, tls=authority.context(), timeout=0.05):
                pass
        with pytest.raises(ConnectFailed, match=r"no answer within 0\.05 s"):
            BlockingClient(HOST, port, tls=authority.context(), timeout=0.05)


async def test_a_server_that_is_not_trusted(
    stream: DataStream,
    authority: Authority,
    stranger: Authority,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    async with serving(stream, ServerTLS(stranger.issue("server"))) as port:
        message = "the server's certificate is not accepted: .*issuer.*; give the CA"
        await ask_both(port, authority.context(), TLSFailed, message)
        with pytest.raises(TLSFailed, match="the server's certificate is not accepted"):
            async with connect(HOST, port, tls=True):
                pass
    async with serving(stream, ServerTLS(authority.issue("named", "stream.example"))) as port:
        message = "not valid for '127.0.0.1'; connect by the name in it"
        await ask_both(port, authority.context(), TLSFailed, message)
        async with connect(
            HOST, port, tls=authority.context(), tls_server_name="stream.example"
        ) as client:
            assert (await client.header()).total_entries == 0
    assert any("does not accept our certificate" in r.getMessage() for r in caplog.records)


async def test_mutual_tls(
    stream: DataStream,
    authority: Authority,
    stranger: Authority,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    append(stream, (1, b"secret"))
    tls = ServerTLS(authority.issue("server"), client_ca=authority.file)
    async with serving(stream, tls) as port:
        known = authority.context(authority.issue("client", "client.example"))
        async with connect(HOST, port, tls=known) as client:
            assert (await client.entry(0)).data == b"secret"

        def block() -> bytes:
            with BlockingClient(HOST, port, tls=known) as client:
                return client.entry(0).data

        assert await trio.to_thread.run_sync(block) == b"secret"
        message = f"no TLS connection to {HOST}:{port}: it requires a client certificate"
        await ask_both(port, authority.context(), TLSFailed, message)
        unknown = client_tls(authority.file, *stranger.issue("client", "client.example"))
        message = "it does not accept this client's certificate: it does not trust the CA"
        await ask_both(port, unknown, TLSFailed, message)
    assert refused(caplog, "it presents no certificate") == 2
    assert refused(caplog, "its certificate is not accepted: ") == 2


async def test_an_older_client(
    stream: DataStream, tls: ServerTLS, authority: Authority, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    old = authority.context()
    old.minimum_version = old.maximum_version = ssl.TLSVersion.TLSv1_2
    async with serving(stream, tls) as port:
        await ask_both(port, old, TLSFailed, "it does not support TLS 1.3")
    assert any("refused: it does not support TLS 1.3" in r.getMessage() for r in caplog.records)


# Other files, later.


def identity(port: int, context: ssl.SSLContext, name: str) -> bytes:
    with (
        socket.create_connection((HOST, port), 20) as made,
        context.wrap_socket(made, server_hostname=name) as secured,
    ):
        return secured.getpeercert(binary_form=True) or b""


async def test_a_hangup_reads_the_files_again(
    stream: DataStream, authority: Authority, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    cert, key = authority.issue("renewed")
    tls = ServerTLS((cert, key))
    context = authority.context()
    ask = functools.partial(trio.to_thread.run_sync, identity)
    async with serving(stream, tls) as port, trio.open_nursery() as nursery:
        await nursery.start(reload_on_hangup, tls)
        peer = Peer(await dial((HOST, port), context))
        first = await ask(port, context, HOST)
        other_cert, other_key = authority.issue("other")
        cert.write_bytes(other_cert.read_bytes())
        os.kill(os.getpid(), signal.SIGHUP)
        await until(lambda: "stay in use" in caplog.text)
        assert "this is not the key of the certificate" in caplog.text
        assert await ask(port, context, HOST) == first
        key.write_bytes(other_key.read_bytes())
        os.kill(os.getpid(), signal.SIGHUP)
        await until(lambda: "were read again" in caplog.text)
        assert await ask(port, context, HOST) != first
        # Earlier connections continue.
        await peer.ask(wire.header(), OK + modelled(stream).header())
        await peer.close()
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize("in_process", [False, True], ids=["child", "thread"])
def test_an_embedded_server(path: Path, authority: Authority, in_process: bool) -> None:
    cert, key = authority.issue(f"embedded-{in_process}")
    context = authority.context()
    tls = ServerTLS((cert, key))
    options = {"host": HOST, "port": 0, "sync": "os", "in_process": in_process}
    with (
        StreamServer(path, tls=tls, **options) as server,  # type: ignore[arg-type]
        BlockingClient(HOST, server.port, tls=context) as client,
    ):
        with client.entries(from_entry=0) as entries, server.stream.atomic_op() as op:
            op.add_entry(1, b"over TLS")
            server.stream.commit_atomic_op()
            assert next(entries).data == b"over TLS"
        first = identity(server.port, context, HOST)
        other_cert, other_key = authority.issue("replaced")
        cert.write_bytes(other_cert.read_bytes())
        with pytest.raises(BadCertificate, match="not the key"):
            server.reload_tls()
        assert identity(server.port, context, HOST) == first
        key.write_bytes(other_key.read_bytes())
        server.reload_tls()
        assert identity(server.port, context, HOST) != first
        assert client.header().total_entries == 1
    with pytest.raises(StreamClosed):
        server.reload_tls()


def test_a_serving_process_that_cannot_read_the_files(
    path: Path, authority: Authority, capfd: pytest.CaptureFixture[str]
) -> None:
    """They are closed for it and not for its parent: that is what a race looks like."""
    cert, key = authority.issue("vanishing")
    tls = ServerTLS((cert, key))
    with StreamServer(path, host=HOST, port=0, sync="os", tls=tls) as server:
        key.unlink()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(tls, "reload", lambda: None)
            with pytest.raises(ServerFailed, match="could not read the TLS files again"):
                server.reload_tls()
        with BlockingClient(HOST, server.port, tls=authority.context()) as client:
            assert client.header().total_entries == 0
    key.write_bytes(b"")
    with pytest.raises(ServerFailed, match="did not start"):
        StreamServer(path, host=HOST, port=0, sync="os", tls=tls)
    assert "vanishing.key: the file has no private key in PEM" in capfd.readouterr().err


# Clients.


async def test_a_client_makes_another_connection(
    stream: DataStream, secured: Open, authority: Authority
) -> None:
    append(stream, *[(1, b"%d" % number) for number in range(100)])
    async with secured(stream) as rig, connect(*rig.address, tls=authority.context()) as client:
        for _ in range(2):
            assert (await client.entry(7)).data == b"7"
            [session] = rig.server.sessions
            session.end("changed", "a test ends it")
            with contextlib.suppress(ConnectionLost):
                await client.header()
        assert (await client.entry(8)).data == b"8"


def test_where_a_server_cannot_be(authority: Authority) -> None:
    for words, message in (
        ({"tls_server_name": "x"}, "tls_server_name needs TLS"),
        (
            {"host": "unix:/x", "tls": True},
            "unix:/x: TLS is not used on a Unix socket",
        ),
        ({"port": 70_000}, "a port to connect to is a number from 1 to 65535"),
        ({"port": "1"}, "a port to connect to is a number from 1 to 65535"),
        *(
            ({"tls": True, "tls_server_name": name}, "tls_server_name: no certificate can name")
            for name in ("a\0b", "a..b", "a" * 64, "a." * 150, "\ud800")
        ),
    ):
        place: dict[str, Any] = {"host": HOST, "port": 1, **words}
        with pytest.raises(UsageError, match=message):
            BlockingClient(**place)
        with pytest.raises(UsageError, match=message):
            Relay([("localhost", 1), Upstream(**place)], "nowhere.bin")
    with pytest.raises(UsageError, match="a port to connect to"):
        Relay([("localhost", 1), ("localhost", 0)], "nowhere.bin")
