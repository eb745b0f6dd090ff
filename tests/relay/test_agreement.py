"""Whatever happens to a chain of relays, each holds what the source holds, byte for byte.

A source that appends, updates and truncates at random; connections that are cut at random bytes;
relays and servers that end and begin again. At quiet points all entries are compared.
"""

from __future__ import annotations

import contextlib
import random
from pathlib import Path

import pytest
import trio

from datastreamer.relay import compare as comparing
from datastreamer.storage.stream import DataStream
from tests.network.fixtures import seeds
from tests.relay.relaying import Rig, Running, Wire, new, nursery_for, packed, relaying, serving

HOPS = 3


def differing(ours: DataStream, source: DataStream) -> list[int]:
    pairs = zip(ours.entries(), source.entries(), strict=True)
    return [one.number for one, other in pairs if one != other]


class Writer:
    """Changes to the source, all of them at random."""

    def __init__(self, stream: DataStream, chance: random.Random) -> None:
        self.stream = stream
        self.updates = 0
        self._chance = chance
        self._salt = 0

    def append(self) -> None:
        chance = self._chance
        count, size = chance.choice([(1, 40), (5, 300), (60, 900), (400, 1500), (3, 200_000)])
        with self.stream.atomic_op() as op:
            op.add_bookmark(op.next_number.to_bytes(8, "big"))
            for _ in range(count):
                op.add_entry(1 + chance.randrange(3), chance.randbytes(chance.randrange(size)))

    def update(self) -> None:
        chance, total = self._chance, self.stream.total_entries
        near = min(total, chance.choice([total, 1000, 5]))
        number = total - 1 - chance.randrange(near)
        entry = self.stream.entry(number)
        if not entry.is_bookmark:
            self.stream.update_entry(number, entry.type, chance.randbytes(len(entry.data)))
            self.updates += 1

    def truncate(self) -> None:
        total = self.stream.total_entries
        self.stream.truncate(total - 1 - self._chance.randrange(min(total, 300)))
        self._salt += 1

    def step(self, truncates: bool) -> None:
        chance = self._chance.random()
        if chance < 0.4:
            self.append()
        elif chance < 0.97 or not truncates:
            self.update()
        else:
            self.truncate()


class Chain:
    """A server of the source, and relays one behind the other."""

    def __init__(self, nursery: trio.Nursery, folder: Path, server: Running) -> None:
        self.rigs: list[Rig] = []
        self.wires: list[Wire] = []
        self.server = server
        self._nursery = nursery
        self._folder = folder

    async def start(self) -> None:
        port = self.server.port
        for _ in range(HOPS):
            wire = Wire(port)
            await self._nursery.start(wire.run)
            self.wires.append(wire)
            self.rigs.append(await self._relay(len(self.rigs)))
            port = self.rigs[-1].port

    async def _relay(self, hop: int) -> Rig:
        return await relaying(
            self._nursery,
            self._folder / f"{hop}.bin",
            self.wires[hop].port,
            on_rewrite="follow",
            heartbeat=None,
        )

    async def restart(self, hop: int) -> None:
        await self.rigs[hop].stop()
        self.rigs[hop] = await self._relay(hop)
        if hop + 1 < HOPS:
            self.wires[hop + 1].upstream = self.rigs[hop].port

    async def restart_server(self) -> None:
        await self.server.stop()
        await self.server.start()
        self.wires[0].upstream = self.server.port

    def heal(self) -> None:
        for wire in self.wires:
            wire.cuts.clear()

    async def agree(self, source: DataStream) -> None:
        wanted = packed(source)
        for rig in self.rigs:
            while rig.stream.total_entries != source.total_entries or packed(rig.stream) != wanted:
                with trio.move_on_after(0.05):
                    await rig.relay.until(lambda: False)
            assert rig.relay.failure is None


async def play(
    folder: Path, chance: random.Random, rounds: int, steps: int, *, follows: bool
) -> int:
    """How many updates there were. With `follows` the source is served by one that follows its
    file, as another process does."""
    with contextlib.ExitStack() as stack:
        source = served = stack.enter_context(new(folder / "source.bin"))
        if follows:
            served = DataStream.open(folder / "source.bin", follow=True, index="memory")
            stack.enter_context(served)
        writer = Writer(source, chance)
        for _ in range(20):
            writer.append()
        async with nursery_for(60 + rounds * 20) as nursery:
            chain = Chain(nursery, folder, await serving(nursery, served))
            await chain.start()
            for _ in range(rounds):
                for _ in range(steps):
                    writer.step(truncates=True)
                    event = chance.random()
                    if event < 0.5:
                        await trio.sleep(chance.random() * 0.004)
                    elif event < 0.6:
                        wire = chance.choice(chain.wires)
                        wire.cuts.append(chance.randrange(300_000))
                        wire.cut()
                    elif event < 0.63:
                        await chain.restart(chance.randrange(HOPS))
                    elif event < 0.64:
                        await chain.restart_server()
                chain.heal()
                try:
                    with trio.fail_after(40):
                        await chain.agree(source)
                except trio.TooSlowError:
                    for rig in chain.rigs:
                        stream = rig.stream
                        if stream.total_entries == source.total_entries:
                            assert differing(stream, source) == []
                    raise
        return writer.updates


@seeds(1, 24)
@pytest.mark.parametrize("follows", [False, True], ids=["written", "followed"])
async def test_all_entries_agree(
    tmp_path: Path, seed: int, follows: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(comparing, "_PAUSE_SECONDS", 0.01)
    monkeypatch.setattr(comparing, "_PIECE_BYTES", 1 << 20)
    chance = random.Random(seed)
    assert await play(tmp_path, chance, rounds=3, steps=80, follows=follows) > 50
