"""Fifty clients at different places while a thread commits: no gap, no repeat, no reordering.

Every entry's bytes are known beforehand, so each client compares all that it reads.
"""

from __future__ import annotations

import functools
import random
from contextlib import AbstractAsyncContextManager

import pytest
import trio

from datastreamer.storage.stream import DataStream
from tests.network import model as wire
from tests.network.fixtures import Open, Peer, Rig, append, in_memory, over_loopback, over_unix
from tests.network.model import BOOKMARK, OK

MIB = 1 << 20
CLIENTS = 50


class Plan:
    """What the writer will commit: operations of entries, and the bytes of all of them."""

    def __init__(self, seed: int, operations: int) -> None:
        choose = random.Random(seed)
        sizes = [0, 1, 17, 200, 1_000, 5_000, 40_000, 300_000, MIB - 17]
        weights = [4, 4, 4, 20, 20, 10, 4, 1, 0.5]
        self.operations: list[list[tuple[int, bytes]]] = []
        self.keys: list[tuple[bytes, int]] = []
        self.starts = [0]
        parts = []
        number = 0
        for at in range(operations):
            count = choose.choice([0, 1, 2, 5, 12]) if at % 40 else 300  # a huge one now and then
            operation = [(BOOKMARK, b"op%d" % at)]
            self.keys.append((b"op%d" % at, number))
            for size in choose.choices(sizes, weights, k=count):
                block = b"%d:%d " % (seed, number + len(operation))
                operation.append((1, (block * (size // len(block) + 1))[:size]))
            self.operations.append(operation)
            for kind, data in operation:
                parts.append(wire.pack(number, kind, data))
                self.starts.append(self.starts[-1] + len(parts[-1]))
                number += 1
        self.packed = b"".join(parts)
        self.total = number

    def bytes(self, first: int, last: int) -> bytes:
        return self.packed[self.starts[first] : self.starts[last]]


async def one_client(
    rig: Rig, plan: Plan, stream: DataStream, seed: int, rounds: int, *, lazy: bool
) -> None:
    choose = random.Random(seed)
    async with rig.client() as peer:
        first = 0
        for _ in range(rounds):
            now = stream.total_entries
            first = choose.choice([0, now, max(0, now - 5), choose.randrange(now + 1)])
            if first < now and choose.random() < 0.3:
                key, first = choose.choice([k for k in plan.keys if k[1] < now])
                await peer.ask(wire.start_bookmark(key), OK)
            else:
                await peer.ask(wire.start(first), OK)
            last = min(plan.total, first + choose.choice([0, 1, 10, 100, 400]))
            await read_checked(peer, plan.bytes(first, last), lazy=lazy)
            await peer.send(wire.stop())
            over = last
            while (packet := await peer.packet()) != OK:
                assert packet == plan.bytes(over, over + 1)
                over += 1
            number = choose.randrange(max(1, over))
            if over:
                answer = OK + b"\xfe" + plan.bytes(number, number + 1)[1:]
                await peer.ask(wire.entry(number), answer)
        await peer.ask(wire.start(first), OK)
        await read_checked(peer, plan.bytes(first, plan.total), lazy=lazy)
        await peer.nothing_more()


async def read_checked(peer: Peer, expected: bytes, *, lazy: bool) -> None:
    step = 30_000 if lazy else MIB
    for at in range(0, len(expected), step):
        await peer.expect(expected[at : at + step])
        if lazy:
            for _ in range(5):
                await trio.lowlevel.checkpoint()


async def stress(open_server: Open, stream: DataStream, seed: int, rounds: int, size: int) -> None:
    plan = Plan(seed, size)

    def write() -> None:
        pause = random.Random(seed)
        for operation in plan.operations:
            append(stream, *operation)
            for _ in range(pause.randrange(8)):
                trio.from_thread.run(trio.lowlevel.checkpoint)  # the others' turn

    append(stream)
    async with open_server(stream) as rig:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(trio.to_thread.run_sync, write)
            for number in range(CLIENTS):
                one = functools.partial(one_client, lazy=number % 10 == 0)
                nursery.start_soon(one, rig, plan, stream, seed * 1000 + number, rounds)
        assert stream.total_entries == plan.total


@pytest.mark.parametrize("seed", [1])
async def test_over_memory_streams(stream: DataStream, seed: int) -> None:
    await stress(in_memory, stream, seed, rounds=2, size=80)


@pytest.mark.parametrize("seed", [2])
async def test_over_loopback(stream: DataStream, seed: int) -> None:
    await stress(over_loopback, stream, seed, rounds=2, size=80)


async def test_over_tls(stream: DataStream, secured: Open) -> None:
    await stress(secured, stream, 4, rounds=2, size=80)


async def test_over_a_unix_socket(stream: DataStream) -> None:
    await stress(over_unix, stream, 5, rounds=2, size=80)


@pytest.mark.parametrize("seed", [3])
async def test_over_loopback_through_small_buffers(stream: DataStream, seed: int) -> None:
    def narrow(stream: DataStream) -> AbstractAsyncContextManager[Rig]:
        return over_loopback(stream, receive_buffer=8192)

    await stress(narrow, stream, seed, rounds=2, size=50)


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(100, 140))
@pytest.mark.parametrize("open_server", [in_memory, over_loopback])
async def test_for_long(stream: DataStream, open_server: Open, seed: int) -> None:
    def patient(stream: DataStream) -> AbstractAsyncContextManager[Rig]:
        return open_server(stream, patience=300)

    await stress(patient, stream, seed, rounds=10, size=600)
