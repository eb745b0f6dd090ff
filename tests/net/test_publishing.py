"""Publishing, the server's side: exact bytes in, exact bytes out."""

from __future__ import annotations

import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing

from datastreamer.net.publishing import Publishing
from datastreamer.net.server import Server
from datastreamer.net.transport import StreamTransport
from datastreamer.protocol.publishing import (
    PublishQuery,
    encode_publish,
    encode_rollback,
    encode_where,
)
from datastreamer.storage.stream import DataStream
from tests.net import model as wire
from tests.net.conftest import PATIENCE, Peer, Rig

TOKEN = b"a token"
ONE, TWO = b"1" * 16, b"2" * 16
OK = wire.OK


@pytest.fixture
def token_file(tmp_path: Path) -> Path:
    path = tmp_path / "token"
    path.write_bytes(b"another\n" + TOKEN + b"\n")
    return path


@asynccontextmanager
async def publishable(stream: DataStream, token_file: Path, **terms: Any) -> AsyncIterator[Rig]:
    """A server in memory that takes publishers with `TOKEN`."""
    server = Server(stream, publishing=Publishing(token_file=token_file, **terms))
    with trio.fail_after(PATIENCE):
        async with trio.open_nursery() as nursery:
            await nursery.start(server.run, [])

            async def connect() -> Peer:
                ours, theirs = trio.testing.memory_stream_pair()
                nursery.start_soon(server.handle, StreamTransport(theirs))
                return Peer(ours)

            yield Rig(server, connect)
            nursery.cancel_scope.cancel()
    assert not server.sessions
    if not stream.closed:
        with stream.atomic_op():
            pass  # nobody holds it any more


def publish(source: bytes = ONE, epoch: int = 0, token: bytes = TOKEN, lease_ms: int = 0) -> bytes:
    return encode_publish(1, PublishQuery(source, epoch, lease_ms, token))


def entry(number: int, data: bytes, kind: int = 3) -> bytes:
    return struct.pack(">BIIQ", 2, 17 + len(data), kind, number) + data


def add(first: int, *entries: bytes) -> bytes:
    packed = b"".join(entries)
    return struct.pack(">QQQI", 0x1011, 1, first, len(packed)) + packed


def commit(first: int, count: int, *entries: bytes) -> bytes:
    packed = b"".join(entries)
    return struct.pack(">QQQII", 0x1012, 1, first, count, len(packed)) + packed


def receipt(first: int, count: int, total: int) -> bytes:
    return OK + struct.pack(">BIQIQ", 0xF9, 25, first, count, total)


async def lease_of(peer: Peer) -> tuple[int, int, bytes, int, int, int, int]:
    """(epoch, total entries, stream id, lease, most bytes, most underway, largest operation)."""
    await peer.expect(OK)
    packet = await peer.packet()
    assert packet[:5] == struct.pack(">BI", 0xFA, 57), packet
    found: tuple[int, int, bytes, int, int, int, int] = struct.unpack(">QQ16sIIIQ", packet[5:])
    return found


async def refusal(peer: Peer) -> tuple[int, str]:
    packet = await peer.packet()
    kind, _, number = struct.unpack_from(">BII", packet)
    assert kind == 0xFF
    return number, packet[9:].decode()


def contents(stream: DataStream) -> list[tuple[int, bytes]]:
    stream.sync()
    return [(e.type, e.data) for e in stream.entries()]


async def test_an_operation_is_acknowledged_and_there(stream: DataStream, token_file: Path) -> None:
    async with publishable(stream, token_file) as rig, rig.client() as peer:
        await peer.send(publish(lease_ms=5000))
        found = await lease_of(peer)
        assert found == (1, 0, stream.stream_id, 5000, 1 << 20, 4096, 1 << 30)
        await peer.send(commit(0, 2, entry(0, b"key", 0xB0), entry(1, b"one")))
        await peer.expect(receipt(0, 2, 2))
        assert contents(stream) == [(0xB0, b"key"), (3, b"one")]
        assert stream.bookmark(b"key") == 0
        await peer.send(encode_where(1))
        await peer.expect(receipt(2, 0, 2))
        await peer.send(add(2, entry(2, b"two")) + encode_rollback(1) + encode_where(1))
        await peer.expect(OK + receipt(2, 0, 2))
        await peer.send_bytewise(add(2, entry(2, b"2")) + commit(2, 2, entry(3, b"3")))
        await peer.expect(receipt(2, 2, 4))
        # Sent again, in two other pieces, and an empty one.
        await peer.send(commit(1, 3, entry(1, b"one"), entry(2, b"2"), entry(3, b"3")))
        await peer.expect(receipt(1, 3, 4))
        await peer.ask(commit(4, 0), receipt(4, 0, 4))
        assert rig.server.counts.published_operations == 3
        assert rig.server.counts.published_again == 1
        assert stream.total_entries == 4
