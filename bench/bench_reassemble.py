"""The whole way: payloads from three servers over loopback, each in a process of its own.

Messages are of 200 B, each server has all of them in an order of its own: two of three are
duplicates. Limits: the same clients that look at nothing, one server after the other; and the
reassembler alone, fed from memory.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import trio

from bench.bench_reassembly import batches, made, shuffled
from bench.measure import Done
from datastreamer import BlockingReassembly, DataStream, StreamServer, connect, reassemble
from datastreamer.reassembly import Reassembler, pack_message

NAMES = "abc"
_PARTS = 100


class Producers:
    """Three servers, and what they have."""

    def __init__(self, addresses: dict[str, tuple[str, int]], orders: list[Any]) -> None:
        self.addresses = addresses
        self.orders = orders
        self.each = len(orders[0])
        self.amount = self.each * len(orders)


@pytest.fixture
def producers(tmp_path: Path, smoke: bool) -> Iterator[Producers]:
    once = made(1_000 if smoke else 200_000)
    orders = [shuffled(once, random.Random(number)) for number in range(3)]
    addresses = {}
    with ExitStack() as stack:
        for name, order in zip(NAMES, orders, strict=True):
            path = tmp_path / f"{name}.bin"
            with (
                DataStream.create(path, sync="os", index="memory") as stream,
                stream.atomic_op() as op,
            ):
                op.add_entries(0x10, [pack_message(*message) for message in order])
            server = StreamServer(path, host="127.0.0.1", port=0)
            addresses[name] = ("127.0.0.1", stack.enter_context(server).port)
        yield Producers(addresses, orders)


def test_three_servers(versus: Any, producers: Producers) -> None:
    wanted = producers.each // _PARTS

    def ours() -> Done:
        async def main() -> float:
            begin = time.perf_counter()
            async with reassemble(producers.addresses) as payloads:
                found = 0
                async for _ in payloads:
                    found += 1
            assert found == wanted
            return time.perf_counter() - begin

        return Done(producers.amount, trio.run(main))

    def threads() -> Done:
        begin = time.perf_counter()
        with BlockingReassembly(producers.addresses) as payloads:
            assert sum(1 for _ in payloads) == wanted
        return Done(producers.amount, time.perf_counter() - begin)

    def clients() -> Done:
        async def main() -> float:
            begin = time.perf_counter()
            for address in producers.addresses.values():
                async with connect(*address) as client:
                    async for _ in client.batches(from_entry=0, stop=producers.each):
                        pass
            return time.perf_counter() - begin

        return Done(producers.amount, trio.run(main))

    runs = [batches(order) for order in producers.orders]

    def core() -> None:
        reassembler = Reassembler()
        found = 0
        for together in zip(*runs, strict=True):
            for name, batch in zip(NAMES, together, strict=True):
                found += sum(1 for _ in reassembler.receive_batch(batch, name))
        assert found == wanted

    versus(
        "reassembly, 200 B, three servers",
        ours,
        {
            "BlockingReassembly": threads,
            "the clients alone": clients,
            "the reassembler alone": core,
        },
        unit="messages/s",
        amount=producers.amount,
    )
