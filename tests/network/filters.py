"""The filter's bytes, written anew from their description, and the rules that answers keep."""

from __future__ import annotations

import struct
from typing import NamedTuple

from datastreamer.storage.stream import DataStream
from tests.network.fixtures import Peer, append
from tests.network.model import BOOKMARK, OK, pack

PAGE = 1 << 20
EVER = 2**64 - 1
Entries = list[tuple[int, bytes]]
FIRST: Entries = [(BOOKMARK, b"first"), (1, b"one"), (2, b"t" * 100), (1, b""), (BOOKMARK, b"last")]


class Frame(NamedTuple):
    count: int
    first: int
    next: int
    total: int
    epoch: int
    payload: bytes


def types_of(*types: int) -> bytes:
    return struct.pack(f">I{len(types)}I", len(types), *types)


def read(
    number: int, *types: int, stop: int = EVER, count: int = 0, size: int = 0, wait: int = 0
) -> bytes:
    parameters = struct.pack(">QQQQIII", 0x1002, 1, number, stop, count, size, wait)
    return parameters + types_of(*types)


def start(number: int, *types: int) -> bytes:
    return struct.pack(">QQQ", 0x1003, 1, number) + types_of(*types)


def start_bookmark(key: bytes, *types: int) -> bytes:
    return struct.pack(">QQI", 0x1004, 1, len(key)) + key + types_of(*types)


def chosen(entries: Entries, first: int, stop: int, types: tuple[int, ...]) -> bytes:
    part = enumerate(entries[first:stop], first)
    return b"".join(pack(number, kind, data) for number, (kind, data) in part if kind in types)


async def frame(peer: Peer) -> Frame:
    packet = await peer.packet()
    kind, length, *fields = struct.unpack_from(">BIIQQQQ", packet)
    assert (kind, length) == (0xFA, len(packet))
    return Frame(*fields, packet[41:])


async def answer(peer: Peer) -> Frame:
    await peer.expect(OK)
    return await frame(peer)


async def ask(peer: Peer, entries: Entries, number: int, *types: int, **limits: int) -> Frame:
    """What `read` is answered with, which keeps all rules that it can be held to."""
    await peer.send(read(number, *types, **limits))
    found = await answer(peer)
    check(found, entries, number, types, **limits)
    return found


def check(
    found: Frame,
    entries: Entries,
    number: int,
    types: tuple[int, ...],
    *,
    stop: int = EVER,
    count: int = 0,
    size: int = 0,
    wait: int = 0,
) -> None:
    assert (found.first, found.total) == (number, len(entries))
    until = max(number, min(stop, len(entries)))
    assert number < found.next <= until or number == found.next == until
    assert found.payload == chosen(entries, number, found.next, types)
    assert found.count == sum(kind in types for kind, _ in entries[number : found.next])
    assert found.count <= (count or found.count)
    assert len(found.payload) <= (size or 2**32) or found.count == 1


def begun(stream: DataStream) -> Entries:
    """Put `FIRST` into the stream; returns its entries."""
    append(stream, *FIRST)
    return list(FIRST)


def commit(stream: DataStream, entries: Entries, *more: tuple[int, bytes]) -> None:
    entries += more
    append(stream, *more)
