"""A full server: which clients it accepts or evicts, and what it costs to guess tokens."""

from __future__ import annotations

import contextlib
import logging
import socket
import struct
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
import trio
from trio.testing import MockClock

from datastreamer.client.blocking_client import BlockingClient
from datastreamer.client.trio_driver import connect
from datastreamer.client.upstream import Upstream
from datastreamer.errors import ConnectFailed, NoAnswer, NotAllowed, PeerError, UsageError
from datastreamer.protocol.commands import Authenticate, encode_command
from datastreamer.publisher.blocking_publisher import BlockingPublisher
from datastreamer.publisher.trio_publisher import connect_publisher
from datastreamer.server.admission.gate import IDLE_SECONDS, PROOF_SECONDS
from datastreamer.server.admission.token_throttle import LONGEST_WAIT, TokenThrottle
from datastreamer.server.limits import PROVISIONAL_CLIENTS, Limits
from datastreamer.server.metrics import collect
from datastreamer.server.publish.policy import Publishing
from datastreamer.server.server import Server
from datastreamer.service.blocking_relay import BlockingRelay
from datastreamer.service.embedded import StreamServer
from datastreamer.storage.stream import DataStream
from datastreamer.transport.listeners import open_listeners
from datastreamer.transport.tls import ServerTLS
from tests.cli.process import Running, running
from tests.network import model as wire
from tests.network.drivers import client_of_kind, kinds
from tests.network.fixtures import PATIENCE, Peer, append, until
from tests.network.model import OK
from tests.network.secure import Authority, dial
from tests.network.stub import StubServer
from tests.server.publish.test_publishing import ONE, lease_of, publish, refusal

TOKEN = b"a token"
IDLE_READERS = 60


@pytest.fixture
def token_file(tmp_path: Path) -> Path:
    path = tmp_path / "token"
    path.write_bytes(TOKEN + b"\n")
    path.chmod(0o600)
    return path


class Rig:
    """A server in this process, on a free port."""

    def __init__(self, server: Server, port: int) -> None:
        self.server = server
        self.port = port

    @contextlib.asynccontextmanager
    async def client(self, local: str = "127.0.0.1") -> AsyncIterator[Peer]:
        stream = await trio.open_tcp_stream("127.0.0.1", self.port, local_address=local)
        peer = Peer(stream)
        try:
            yield peer
        finally:
            await peer.close()

    async def counted(self, number: int) -> None:
        await until(lambda: len(self.server.sessions) == number)


@contextlib.asynccontextmanager
async def serving(
    stream: DataStream,
    publishing: Publishing | None = None,
    tls: ServerTLS | None = None,
    **limits: Any,
) -> AsyncIterator[Rig]:
    server = Server(stream, limits=Limits(**limits), publishing=publishing, tls=tls)
    with trio.fail_after(100 * PATIENCE):
        async with trio.open_nursery() as nursery:
            [(_, port)] = await nursery.start(server.run, open_listeners("127.0.0.1", 0))
            yield Rig(server, port)
            nursery.cancel_scope.cancel()
    assert not server.sessions
    assert server.gate.clients == server.gate.provisional == 0


@contextlib.contextmanager
def idle_readers(port: int, count: int = IDLE_READERS) -> Iterator[list[socket.socket]]:
    """This many connections that send nothing."""
    with contextlib.ExitStack() as stack:
        made = []
        for _ in range(count):
            made.append(stack.enter_context(socket.create_connection(("127.0.0.1", port))))
            made[-1].settimeout(30)
        yield made


# The measured attack: 60 readers that are idle, and places for 50.


def test_a_publisher_gets_in_past_idle_readers(path: Path, token_file: Path) -> None:
    with DataStream.create(path):
        pass
    words = ("serve", path, "--host", "127.0.0.1", "--port", "0", "--max-clients", "50")
    tokens = ("--publish-token-file", token_file)
    with running(*words, *tokens, cwd=path.parent) as server:
        port = server.port()
        with (
            idle_readers(port),
            BlockingPublisher("127.0.0.1", port, token=TOKEN) as publisher,
        ):
            with publisher.atomic_op() as op:
                op.add_entry(3, b"in")
            publisher.flush()
        assert [entry.data for entry in DataStream.open(path, follow=True).entries()] == [b"in"]


@pytest.mark.parametrize("workers", [1, 2])
def test_a_relay_with_a_certificate_gets_in(
    path: Path, authority: Authority, tmp_path: Path, workers: int
) -> None:
    """At its first attempt, also where the readers have certificates too, and are silent."""
    with DataStream.create(path) as stream:
        append(stream, (1, b"one"))
    cert, key = authority.issue("full-server")
    words = ["serve", path, "--host", "127.0.0.1", "--port", "0", "--max-clients", "50"]
    words += ["--workers", workers, "--tls-cert", cert, "--tls-key", key]
    words += ["--tls-client-ca", authority.file]
    context = authority.context(authority.issue("relay"))
    with (
        running(*words, cwd=path.parent) as server,
        idle_readers(server.port()) as readers,
        contextlib.ExitStack() as stack,
    ):
        port = readers[0].getpeername()[1]
        for reader in readers[: IDLE_READERS // 2]:
            copy = context.wrap_socket(reader.dup(), server_hostname="127.0.0.1")
            stack.enter_context(copy)
        with BlockingClient("127.0.0.1", port, tls=context) as known:
            assert known.header().total_entries == 1
        with BlockingRelay(
            [Upstream("127.0.0.1", port, context)], tmp_path / "relay.bin", host="127.0.0.1", port=0
        ) as relay:
            entries_arrive(relay, 1)


@pytest.mark.parametrize("workers", [1, 2])
def test_a_relay_with_a_token_gets_in(
    path: Path, token_file: Path, tmp_path: Path, workers: int
) -> None:
    """By the commands: the readers ask, and hold their places."""
    with DataStream.create(path) as stream:
        append(stream, (1, b"one"))
    words = ("serve", path, "--host", "127.0.0.1", "--port", "0", "--max-clients", "50")
    tokens = ("--client-token-file", token_file, "--workers", workers)
    with running(*words, *tokens, cwd=path.parent) as server:
        port = server.port()
        with active_readers(port, 50):
            with pytest.raises(PeerError), BlockingClient("127.0.0.1", port) as plain:
                plain.header()
            relaying = ("relay", "--server", f"127.0.0.1:{port}", "--file", tmp_path / "r.bin")
            listening = ("--host", "127.0.0.1", "--port", "0", "--server-token-file", token_file)
            with running(*relaying, *listening, cwd=tmp_path) as relay:
                served(relay, 1)
            with BlockingClient("127.0.0.1", port, token=TOKEN) as known:
                assert known.header().total_entries == 1


@contextlib.contextmanager
def active_readers(port: int, count: int) -> Iterator[list[socket.socket]]:
    """This many clients that stream, and have been answered."""
    with idle_readers(port, count) as readers:
        for reader in readers:
            reader.sendall(wire.start(0))
            assert reader.recv(len(OK), socket.MSG_WAITALL) == OK
        yield readers


def served(relay: Running, entries: int) -> None:
    """The relay's clients get this many entries."""
    with BlockingClient("127.0.0.1", relay.port()) as client, client.batches() as batches:
        assert next(iter(batches)).next_number >= entries


def entries_arrive(relay: BlockingRelay, count: int) -> None:
    with BlockingClient("127.0.0.1", relay.port) as client, client.batches() as batches:
        assert next(iter(batches)).next_number >= count


async def test_known_clients_get_in_past_active_readers(
    stream: DataStream, token_file: Path
) -> None:
    """And readers do not, however many come; each is refused when it asks."""
    terms = Publishing(token_file=token_file)
    async with (
        serving(stream, terms, max_clients=3, client_token_file=str(token_file)) as rig,
        contextlib.AsyncExitStack() as stack,
    ):
        readers = [await stack.enter_async_context(rig.client()) for _ in range(3)]
        for reader in readers:
            await reader.ask(wire.start(0), OK)
        for _ in range(10):
            refused = await stack.enter_async_context(rig.client())
            await refused.send(wire.header())
            with contextlib.suppress(trio.BrokenResourceError):
                await refused.ended()
        known = [await stack.enter_async_context(rig.client()) for _ in range(6)]
        for client in known:
            await client.ask(encode_command(Authenticate(TOKEN), 1), OK)
            await client.ask(wire.start(0), OK)
        async with rig.client() as seventh:
            await seventh.send(encode_command(Authenticate(TOKEN), 1))
            with contextlib.suppress(trio.BrokenResourceError):
                await seventh.ended()
        async with (
            connect_publisher("127.0.0.1", rig.port, token=TOKEN) as publisher,
            publisher.atomic_op() as op,
        ):
            op.add_entry(3, b"in")
        for reader in (*readers, *known):
            await reader.expect(wire.pack(0, 3, b"in"))
        samples = (await collect(rig.server))["samples"]
        assert samples["datastreamer_reserved_clients"] == [([], 6)]
        assert samples["datastreamer_reserved_clients_limit"] == [([], 8)]
        assert rig.server.counts.refused == {"max_clients": 11}
        assert rig.server.counts.accepted == 10


async def test_a_publisher_gets_in_past_its_own_old_connection(
    stream: DataStream, token_file: Path
) -> None:
    async with (
        serving(
            stream, Publishing(token_file=token_file), max_clients=1, max_clients_per_address=1
        ) as rig,
        rig.client() as half_open,
        rig.client() as again,
    ):
        await half_open.send(publish(ONE, token=TOKEN))
        epoch = (await lease_of(half_open))[0]
        await again.send(publish(ONE, epoch, token=TOKEN))
        assert (await lease_of(again))[0] == epoch
        assert (await refusal(half_open))[0] == 18


async def test_a_publisher_with_a_certificate_gets_in_past_readers_with_certificates(
    stream: DataStream, authority: Authority
) -> None:
    tls = ServerTLS(authority.issue("full-publishing"), client_ca=authority.file)
    terms = Publishing(client_certs=("source.example",))
    reader = authority.context(authority.issue("reader", "reader.example"))
    source = authority.context(authority.issue("source", "source.example"))
    async with (
        serving(stream, terms, tls, max_clients=1, reserved_clients=3) as rig,
        contextlib.AsyncExitStack() as stack,
    ):

        async def read() -> Peer:
            peer = Peer(await dial(("127.0.0.1", rig.port), reader))
            stack.push_async_callback(peer.close)
            await peer.ask(wire.start(0), OK)
            return peer

        readers = [await read() for _ in range(2)]
        with pytest.raises((AssertionError, trio.BrokenResourceError)):
            await read()
        async with (
            connect_publisher("127.0.0.1", rig.port, tls=source) as publisher,
            publisher.atomic_op() as op,
        ):
            op.add_entry(3, b"in")
        for peer in readers:
            await peer.expect(wire.pack(0, 3, b"in"))
        # The two places are for who publishes, not for who may.
        async with connect("127.0.0.1", rig.port, tls=source) as known:
            with pytest.raises(PeerError):
                await known.header()


@pytest.mark.parametrize("first", [b"", wire.header()[:7]])
async def test_a_flood_of_connections_leaves_a_publisher_its_time(
    stream: DataStream, token_file: Path, first: bytes
) -> None:
    """Silent, or slow: those of the flood's own address leave for new ones."""
    async with (
        serving(stream, Publishing(token_file=token_file), max_clients=2) as rig,
        contextlib.AsyncExitStack() as stack,
    ):

        async def come(local: str) -> Peer:
            peer = await stack.enter_async_context(rig.client(local))
            await peer.send(first)
            return peer

        for _ in range(2):
            await come("127.0.0.3")
        await rig.counted(2)
        quiet = await stack.enter_async_context(rig.client("127.0.0.2"))
        await rig.counted(3)
        flood = [await come("127.0.0.3") for _ in range(3 * PROVISIONAL_CLIENTS)]
        for peer in flood[:PROVISIONAL_CLIENTS]:
            with contextlib.suppress(trio.BrokenResourceError):
                await peer.ended()
        await quiet.send(publish(ONE, token=TOKEN))
        await lease_of(quiet)


async def test_a_proof_has_its_time(
    stream: DataStream, token_file: Path, autojump_clock: MockClock
) -> None:
    async with (
        serving(stream, max_clients=1, client_token_file=str(token_file)) as rig,
        rig.client() as reader,
    ):
        await reader.ask(wire.start(0), OK)
        began = trio.current_time()
        async with rig.client() as slow:
            # What a server can do may be asked for; that is no reason to stay.
            await slow.send(wire.capabilities())
            await slow.expect(OK)
            await slow.packet()
            await slow.ended()
        assert PROOF_SECONDS <= trio.current_time() - began <= PROOF_SECONDS + 2
    assert rig.server.counts.refused == {"max_clients": 1}
    assert sum(rig.server.counts.ended.values()) == rig.server.counts.accepted == 1


async def test_the_server_ends_while_a_connection_is_dismissed(
    stream: DataStream, token_file: Path
) -> None:
    async with (
        serving(stream, max_clients=1, client_token_file=str(token_file)) as rig,
        rig.client() as reader,
        rig.client(),
    ):
        await reader.ask(wire.start(0), OK)
        await rig.counted(2)
        [session] = [s for s in rig.server.sessions if s.place is not None and not s.place.held]
        assert session.place is not None
        rig.server.gate.tick(trio.current_time() + PROOF_SECONDS)
        while session in rig.server.sessions:
            session.finish(0)
            await trio.lowlevel.checkpoint()


async def test_without_any_proof_no_client_waits(stream: DataStream) -> None:
    async with (
        serving(stream, max_clients=1, reserved_clients=9) as rig,
        rig.client() as reader,
        rig.client() as second,
    ):
        await reader.ask(wire.start(0), OK)
        with contextlib.suppress(trio.BrokenResourceError):
            await second.ended()
        assert rig.server.gate.reserved == 0


# Idle clients of a full server.


async def test_the_client_that_is_idle_longest_leaves(
    stream: DataStream, autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    append(stream, (1, b"x"))
    header = OK + stream.header.pack()
    async with (
        serving(stream, max_clients=3) as rig,
        rig.client() as live,
        rig.client() as silent,
        rig.client() as asking,
        contextlib.AsyncExitStack() as stack,
    ):
        await live.ask(wire.start(1), OK)
        await rig.counted(3)
        await trio.sleep(IDLE_SECONDS / 2)
        await asking.ask(wire.header(), header)
        early = await stack.enter_async_context(rig.client())
        with contextlib.suppress(trio.BrokenResourceError):
            await early.ended()
        await trio.sleep(IDLE_SECONDS / 2 + 2)
        # Silent since it connected: it leaves for a new one. Who asked meanwhile does not.
        late = await stack.enter_async_context(rig.client())
        await late.ask(wire.header(), header)
        await silent.ended()
        await asking.ask(wire.header(), header)
        another = await stack.enter_async_context(rig.client())
        with contextlib.suppress(trio.BrokenResourceError):
            await another.ended()
        await trio.sleep(10 * IDLE_SECONDS)
        for _ in range(2):
            await (await stack.enter_async_context(rig.client())).ask(wire.header(), header)
        await late.ended()
        await asking.ended()
        append(stream, (2, b"live"))
        await live.expect(wire.pack(1, 2, b"live"))
    assert rig.server.counts.ended["evicted"] == 3
    assert rig.server.counts.refused == {"max_clients": 2}
    lines = [r for r in caplog.records if r.__dict__.get("reason") == "evicted"]
    assert sum(r.__dict__["refused"] for r in lines) == 3
    assert "closed for another client after " in lines[0].getMessage()


async def test_a_client_that_waits_for_a_commit_is_not_idle(
    stream: DataStream, autojump_clock: MockClock
) -> None:
    async with (
        serving(stream, max_clients=1, inactivity_timeout=None) as rig,
        rig.client() as waiting,
    ):
        await waiting.send(wire.batch(0, wait=1_000_000))
        await trio.sleep(3 * IDLE_SECONDS)
        async with rig.client() as second:
            with contextlib.suppress(trio.BrokenResourceError):
                await second.ended()
    assert not rig.server.counts.ended["evicted"]


async def test_known_clients_that_are_idle_leave_for_known_ones_alone(
    stream: DataStream, token_file: Path, autojump_clock: MockClock
) -> None:
    limits: dict[str, Any] = {"client_token_file": str(token_file), "inactivity_timeout": None}
    async with (
        serving(stream, max_clients=1, reserved_clients=1, **limits) as rig,
        contextlib.AsyncExitStack() as stack,
    ):
        idle = [await stack.enter_async_context(rig.client()) for _ in range(2)]
        for client in idle:
            await client.ask(encode_command(Authenticate(TOKEN), 1), OK)
            await trio.sleep(1)
        await trio.sleep(2 * IDLE_SECONDS)
        async with rig.client() as reader:
            await reader.send(wire.header())
            with contextlib.suppress(trio.BrokenResourceError):
                await reader.ended()
        async with rig.client() as known:
            await known.ask(encode_command(Authenticate(TOKEN), 1), OK)
            await idle[0].ended()
            await idle[1].ask(wire.header(), OK + stream.header.pack())
    assert rig.server.counts.ended["evicted"] == 1


# Tokens.


async def ask(kind: str, port: int, token: bytes | str, **options: Any) -> int:
    """The total that a client of this kind receives over a new connection."""

    def block() -> int:
        with client_of_kind(kind, "127.0.0.1", port, token=token, **options) as client:
            total: int = client.header().total_entries
            return total

    return await trio.to_thread.run_sync(block)


@kinds
async def test_a_token_is_shown_on_each_connection(
    kind: str, stream: DataStream, token_file: Path
) -> None:
    async with serving(stream, client_token_file=str(token_file)) as rig:
        assert await ask(kind, rig.port, TOKEN) == 0
        assert await ask(kind, rig.port, TOKEN.decode()) == 0
        with pytest.raises(NotAllowed, match="does not know this token"):
            await ask(kind, rig.port, "wrong")
        for bad in (b"", bytes(1025)):
            with pytest.raises(UsageError, match="a token must have 1 to 1024 bytes"):
                await ask(kind, rig.port, bad)
    assert rig.server.counts.commands["authenticate"] == 3
    assert rig.server.counts.not_allowed == {"authenticate": 1}


@kinds
async def test_a_server_without_tokens_is_connected_to_without_one(
    kind: str, stream: DataStream, caplog: pytest.LogCaptureFixture
) -> None:
    async with serving(stream) as rig:
        assert await ask(kind, rig.port, TOKEN) == 0
    assert "asks readers for no token" in caplog.text
    assert not any(TOKEN.decode() in r.getMessage() for r in caplog.records)


@kinds
async def test_a_server_that_does_not_answer_a_token(kind: str) -> None:
    def wait(connection: socket.socket) -> None:
        while connection.recv(1024):
            pass

    with (
        StubServer(wait) as server,
        pytest.raises((ConnectFailed, NoAnswer), match=r"no answer .*within 0.1 s"),
    ):
        await ask(kind, server.port, TOKEN, timeout=0.1)


async def test_a_token_of_no_length_is_no_request(stream: DataStream, token_file: Path) -> None:
    async with serving(stream, client_token_file=str(token_file)) as rig:
        for length in (0, 1025, 2**32 - 1):
            async with rig.client() as peer:
                await peer.send(struct.pack(">QQI", 0x1008, 1, length))
                await peer.ended()
        async with rig.client() as peer:
            await peer.ask(wire.start(0), OK)
            await peer.send(encode_command(Authenticate(TOKEN), 1))
            assert (await refusal(peer))[0] == 1


def test_a_token_file_that_is_of_no_use(path: Path, tmp_path: Path) -> None:
    limits = Limits(client_token_file=str(tmp_path / "none"))
    for in_process in (True, False):
        with pytest.raises(UsageError, match="none: cannot be read"):
            StreamServer(path, port=0, host="127.0.0.1", limits=limits, in_process=in_process)
    with DataStream.open_or_create(path):
        pass  # the lock is free


async def test_guesses_are_slowed_down_by_address(
    stream: DataStream,
    token_file: Path,
    autojump_clock: MockClock,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A publisher elsewhere is answered at once meanwhile."""
    terms = Publishing(token_file=token_file)
    guesses = 0
    async with serving(stream, terms, client_token_file=str(token_file)) as rig:

        async def guess(at: int) -> None:
            nonlocal guesses
            wrong = b"guess %d" % at
            message = (
                publish(ONE, token=wrong) if at % 2 else encode_command(Authenticate(wrong), 1)
            )
            with contextlib.suppress(trio.BrokenResourceError, AssertionError):
                async with rig.client("127.0.0.9") as peer:
                    await peer.send(message)
                    assert (await refusal(peer))[0] == 16
                    guesses += 1

        async with trio.open_nursery() as nursery:
            for at in range(200):
                nursery.start_soon(guess, at)
            await trio.sleep(1)
            began = trio.current_time()
            async with rig.client("127.0.0.8") as peer:
                await peer.ask(encode_command(Authenticate(TOKEN), 1), OK)
            assert trio.current_time() - began < 0.5
            async with rig.client("127.0.0.8") as peer:
                await peer.send(publish(ONE, token=TOKEN))
                await lease_of(peer)
        # 0, 0, 0, 0.5, 1, 2, ... 30 s apart; those that would wait for over a minute are closed.
        assert guesses == 10
        counted = rig.server.counts.not_allowed
        assert sum(counted.values()) == 200
        samples = (await collect(rig.server))["samples"]
        assert samples["datastreamer_authentication_failures_total"] == [
            (["authenticate"], counted["authenticate"]),
            (["publish"], counted["publish"]),
        ]
    lines = [r for r in caplog.records if "not allowed" in str(r.__dict__.get("reason"))]
    assert len(lines) < 30
    assert sum(r.__dict__["refused"] for r in lines) == 200


def test_how_fast_an_address_may_guess() -> None:
    guesses, now, waits = TokenThrottle(), 1000.0, []
    for _ in range(14):
        wait = guesses.wait("a", now)
        assert wait is not None
        waits.append(wait)
        now += wait
        assert guesses.wait("b", now) == 0
        guesses.succeeded("b", now)
    assert waits == [0, 0, 0, 0, 0.5, 1, 2, 4, 8, 16, 30, 30, 30, 30]
    # Those that come together are examined one after the other, a few of them.
    together = [guesses.wait("a", now) for _ in range(10)]
    assert together == [30, 60, *[None] * 8]
    assert max(wait or 0 for wait in together) <= LONGEST_WAIT
    assert guesses.wait("a", now + 3600) == 0, "it is forgotten"
    burst = [guesses.wait("c", now) for _ in range(1_000)]
    assert sum(wait is not None for wait in burst) == 10


def test_an_address_with_a_right_token_is_not_slowed_down() -> None:
    guesses = TokenThrottle()
    guesses.succeeded("a", 0)
    assert {guesses.wait("a", at) for at in range(1, 3600)} == {0}
    assert any(guesses.wait("a", 3600) != 0 for _ in range(10))


def test_a_spray_of_addresses_costs_no_memory() -> None:
    guesses = TokenThrottle()
    guesses.succeeded("trusted", 0)
    for n in range(100_000):
        assert guesses.wait(f"2001:db8:{n >> 16:x}:{n & 0xFFFF:x}::/64", n / 1000) == 0
    assert len(guesses) == 4097
    assert {guesses.wait("trusted", 101) for _ in range(20)} == {0}


# The log.


async def test_what_is_refused_is_logged_together(
    stream: DataStream, caplog: pytest.LogCaptureFixture
) -> None:
    """Another stream type, TLS where none is spoken, a bookmark that is none."""
    caplog.set_level(logging.DEBUG)
    requests = {
        "stream type": struct.pack(">QQ", 3, 9),
        "no TLS here": b"\x16\x03" + bytes(30),
        "protocol": struct.pack(">QQI", 4, 1, 99),
    }
    async with serving(stream) as rig:
        for _ in range(20):
            for request in requests.values():
                async with rig.client() as peer:
                    await peer.send(request)
                    with contextlib.suppress(trio.BrokenResourceError):
                        await peer.ended()
    for kind in requests:
        lines = [r for r in caplog.records if r.__dict__.get("reason") == kind]
        assert [r.__dict__["refused"] for r in lines] == [1, 19]
        assert lines[1].getMessage().endswith("(19 refused since the last such line)")


def test_the_documentation_names_these_times() -> None:
    text = (Path(__file__).parents[3] / "docs" / "SERVING.md").read_text()
    for seconds in (IDLE_SECONDS, PROOF_SECONDS, LONGEST_WAIT):
        assert f"{seconds:g} s" in text
