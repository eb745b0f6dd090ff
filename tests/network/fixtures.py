"""A server under test and raw clients of it: bytes out, exact bytes in."""

from __future__ import annotations

import functools
import gc
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing

from datastreamer.client import trio_driver
from datastreamer.format import (
    PACKET_RESULT,
    RESULT_DAMAGED,
    RESULT_HEAD_SIZE,
    RESULT_HEAD_STRUCT,
)
from datastreamer.server.limits import Limits
from datastreamer.server.server import Server
from datastreamer.storage.pages.restore import Peer as HealingPeer
from datastreamer.storage.stream import DataStream
from datastreamer.transport.listeners import open_listeners
from datastreamer.transport.tls import ServerTLS
from tests.network import model
from tests.network.network import Network
from tests.network.secure import Authority, dial
from tests.network.stream_transport import StreamTransport

PATIENCE = 150.0


def seeds(short: int, long: int) -> pytest.MarkDecorator:
    """A parameter `seed`: a few always, many more in the long runs."""
    more = [pytest.param(seed, marks=pytest.mark.soak) for seed in range(short, long)]
    return pytest.mark.parametrize("seed", [*range(short), *more])


@pytest.fixture(autouse=True)
def no_leaks() -> Iterator[None]:
    """What a test leaves open is collected, and complains, within that test."""
    yield
    gc.collect(0)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "stream.bin"


@pytest.fixture
def stream(path: Path) -> Iterator[DataStream]:
    """An empty stream, open for writing."""
    with DataStream.create(path, sync="os", index="memory") as made:
        yield made


@pytest.fixture
async def network(nursery: trio.Nursery, monkeypatch: pytest.MonkeyPatch) -> Network:
    """Servers over memory streams, for what reads sources."""
    made = Network(nursery)
    monkeypatch.setattr(trio_driver, "dial", made.dial_endpoint)
    return made


class Peer:
    """A client that knows no protocol, over any stream of trio's."""

    def __init__(self, stream: trio.abc.HalfCloseableStream) -> None:
        self.stream = stream
        self._got = bytearray()

    async def send(self, data: bytes) -> None:
        await self.stream.send_all(data)

    async def send_bytewise(self, data: bytes) -> None:
        for at in range(len(data)):
            await self.stream.send_all(data[at : at + 1])
            await trio.lowlevel.checkpoint()

    async def read(self, size: int) -> bytes:
        """Exactly `size` bytes; fails where the connection ends before."""
        while len(self._got) < size:
            more = await self.more()
            assert more, (
                f"the connection ended; {len(self._got)} of {size} bytes: {self._got!r:.200}"
            )
            self._got += more
        data = bytes(self._got[:size])
        del self._got[:size]
        return data

    async def more(self) -> bytes:
        return bytes(await self.stream.receive_some(1 << 20))

    async def expect(self, data: bytes) -> None:
        """The next bytes are these."""
        got = await self.read(len(data))
        if got != data:
            at = next(n for n, (a, b) in enumerate(zip(got, data, strict=True)) if a != b)
            raise AssertionError(
                f"byte {at} of {len(data)}: got {got[at : at + 40]!r}, not {data[at : at + 40]!r}"
            )

    async def ask(self, request: bytes, answer: bytes) -> None:
        await self.send(request)
        await self.expect(answer)

    def unread(self, data: bytes) -> None:
        """Have these bytes read again."""
        self._got[:0] = data

    async def packet(self) -> bytes:
        head = await self.read(5)
        return head + await self.read(int.from_bytes(head[1:], "big") - 5)

    async def waits(self, seconds: float = 0.001) -> None:
        """Nothing comes, however long the server is given for what it can do now."""
        with trio.move_on_after(seconds) as scope:
            self.unread(await self.read(1))
        assert scope.cancelled_caught

    async def nothing_more(self) -> None:
        """Whatever was sent so far has been read: an unknown command is answered next."""
        await self.ask(model.unknown(), model.result(9))

    async def rest(self) -> bytes:
        """All that still comes, until the connection ends in good order."""
        while more := await self.stream.receive_some(1 << 20):
            self._got += more
        data = bytes(self._got)
        self._got.clear()
        return data

    async def ended(self) -> None:
        assert await self.rest() == b""

    async def was_reset(self) -> bytes:
        """What still comes until the connection is torn down."""
        with pytest.raises(trio.BrokenResourceError):
            await self.rest()
        return bytes(self._got)

    async def close(self) -> None:
        await trio.aclose_forcefully(self.stream)


class Rig:
    """A running server, and a way to become its client."""

    def __init__(
        self,
        server: Server,
        connect: Callable[[], Awaitable[Peer]],
        address: tuple[str, int] = ("", 0),
    ) -> None:
        self.server = server
        self.address = address
        self._connect = connect

    @asynccontextmanager
    async def client(self) -> AsyncIterator[Peer]:
        peer = await self._connect()
        try:
            yield peer
        finally:
            await peer.close()


async def until(holds: Callable[[], object]) -> None:
    """Look again and again whether this holds: for what reports no event."""
    with trio.fail_after(PATIENCE):
        while not holds():
            await trio.sleep(0.001)


async def half_sent(server: Server) -> None:
    """Wait until the server is half way through what it sends to one of its clients."""
    await until(lambda: any(session.blocked for session in server.sessions))


async def in_this_thread(
    call: Callable[[Any], Any], what: object, *, limiter: object = None
) -> Any:
    await trio.lowlevel.checkpoint()
    return call(what)


async def lost(peer: Peer) -> bytes:
    """What the peer gets until the server ends the connection."""
    got = bytearray()
    try:
        while more := await peer.more():
            got += more
    except trio.BrokenResourceError:
        pass
    return bytes(got)


async def turned_away(peer: Peer) -> bytes:
    """What the peer gets until a Result says that the next entries are damaged, or until the server
    ends the connection."""
    got = bytearray()
    with suppress(trio.BrokenResourceError):
        while more := await peer.more():
            got += more
            result = got.find(b"Damaged: at byte ") - RESULT_HEAD_SIZE
            if result >= 0:
                packet, length, number = RESULT_HEAD_STRUCT.unpack_from(got, result)
                assert (packet, number) == (PACKET_RESULT, RESULT_DAMAGED)
                if result + length == len(got):
                    return bytes(got[:result])
    return bytes(got)


@asynccontextmanager
async def in_memory(
    stream: DataStream, *, patience: float = PATIENCE, **limits: Any
) -> AsyncIterator[Rig]:
    """A server without listeners, whose clients come by memory streams."""
    server = Server(stream, limits=Limits(**limits))
    if isinstance(trio.lowlevel.current_clock(), trio.testing.MockClock):
        # Such a clock jumps ahead while a thread is at work.
        server.broadcast.cold.run = in_this_thread  # type: ignore[method-assign]
        server.scrub._in_thread = in_this_thread  # type: ignore[method-assign]
    with trio.fail_after(patience):
        async with trio.open_nursery() as nursery:
            await nursery.start(server.run, [])

            async def connect() -> Peer:
                ours, theirs = trio.testing.memory_stream_pair()
                nursery.start_soon(server.handle, StreamTransport(theirs))
                return Peer(ours)

            yield Rig(server, connect)
            nursery.cancel_scope.cancel()
    assert not server.sessions
    assert not server.broadcast.parked
    assert not server.broadcast.feed


@asynccontextmanager
async def over_loopback(
    stream: DataStream,
    *,
    patience: float = PATIENCE,
    receive_buffer: int | None = None,
    waker: int | None = None,
    early_waker: int | None = None,
    heal_from: Sequence[HealingPeer] = (),
    **limits: Any,
) -> AsyncIterator[Rig]:
    """A server on a free port. `receive_buffer` bounds what a client's kernel takes in."""
    server = Server(
        stream,
        limits=Limits(**limits),
        waker=waker,
        early_waker=early_waker,
        heal_from=heal_from,
    )
    with trio.fail_after(patience):
        async with trio.open_nursery() as nursery:
            [address] = await nursery.start(server.run, open_listeners("127.0.0.1", 0))

            async def connect() -> Peer:
                with trio.socket.socket() as made:
                    made.setsockopt(trio.socket.IPPROTO_TCP, trio.socket.TCP_NODELAY, 1)
                    if receive_buffer is not None:
                        made.setsockopt(
                            trio.socket.SOL_SOCKET, trio.socket.SO_RCVBUF, receive_buffer
                        )
                    await made.connect(address)
                    kept = trio.socket.from_stdlib_socket(made._sock.dup())
                return Peer(trio.SocketStream(kept))

            yield Rig(server, connect, address)
            nursery.cancel_scope.cancel()
    assert not server.sessions


Open = Callable[..., AbstractAsyncContextManager[Rig]]
"""How a server under test is begun: `in_memory`, `over_loopback` or one of these."""


@pytest.fixture(scope="session")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    """A CA."""
    return Authority(tmp_path_factory.mktemp("authority"), "trusted")


@pytest.fixture(scope="session")
def secured(authority: Authority) -> Open:
    """A server on a free port with TLS, and clients that trust it."""
    pair = authority.issue("rig")
    return functools.partial(over_tls, tls=ServerTLS(pair), context=authority.context())


@asynccontextmanager
async def over_tls(
    stream: DataStream,
    *,
    tls: ServerTLS,
    context: ssl.SSLContext,
    patience: float = PATIENCE,
    receive_buffer: int | None = None,
) -> AsyncIterator[Rig]:
    """A server on a free port, with TLS; its clients trust what `context` says."""
    server = Server(stream, tls=tls)
    with trio.fail_after(patience):
        async with trio.open_nursery() as nursery:
            [address] = await nursery.start(server.run, open_listeners("127.0.0.1", 0))

            async def connect() -> Peer:
                return Peer(await dial(address, context, receive_buffer=receive_buffer))

            yield Rig(server, connect, address)
            nursery.cancel_scope.cancel()
    assert not server.sessions


class _UnixPeer(Peer):
    async def more(self) -> bytes:
        if not (data := await super().more()):
            raise trio.BrokenResourceError("the connection ended")
        return data


@asynccontextmanager
async def over_unix(
    stream: DataStream, *, patience: float = PATIENCE, receive_buffer: int | None = None
) -> AsyncIterator[Rig]:
    """A server on a Unix socket; such have no buffer at the receiver's side.

    A connection that is torn down ends there like any other: each end is a broken resource.
    """
    path = Path(stream.path).with_suffix(".sock")
    server = Server(stream)
    with trio.fail_after(patience):
        async with trio.open_nursery() as nursery:
            [address] = await nursery.start(server.run, open_listeners(None, None, path))

            async def connect() -> Peer:
                return _UnixPeer(await trio.open_unix_socket(path))

            yield Rig(server, connect, address)
            nursery.cancel_scope.cancel()
    assert not server.sessions
    assert not path.exists()


def append(stream: DataStream, *entries: tuple[int, bytes]) -> None:
    """One atomic operation with these entries; bookmarks by their type."""
    with stream.atomic_op() as op:
        for kind, data in entries:
            if kind == model.BOOKMARK:
                op.add_bookmark(data)
            else:
                op.add_entry(kind, data)
