"""Random lives of a stream: what its pages hold and when its entries were committed is right after
everything that happens to it."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import islice
from pathlib import Path

import pytest

from datastreamer import DataStream
from tests.storage.summaries.oracle import compare
from tests.storage.summaries.worlds import World, check, payloads


class Life:
    """What happens in one world, as its seed has it."""

    def __init__(self, world: World, seed: int) -> None:
        self.world, self.chance = world, random.Random(seed)
        self.events = payloads(self.chance)
        # A stream that has lost times cannot know that the clock went back.
        back = [] if world.loses else [-5000, -1]
        self.waiting = [100, 1000, 3000, 60_000, 10**7, *back]

    def live(self, steps: int) -> None:
        happenings: dict[Callable[[], None], int] = {
            self.appends: 30,
            self.waits: 10,
            self.works: 5,
            self.truncates: 2,
            self.updates: 3,
            self.world.reopen: 1,
        }
        if self.world.loses:
            happenings |= {self.world.kill: 2, self.others_append: 1, self.sidecar_is_lost: 1}
        for _ in range(steps):
            self.chance.choices([*happenings], [*happenings.values()])[0]()

    def appends(self) -> None:
        for _ in range(self.chance.choice([1, 1, 5, 100])):
            many = self.chance.choice([1, 1, 2, 10, 100])
            self.world.commit(*islice(self.events, many))
            if self.chance.random() < 0.5:
                self.world.clock.now += self.chance.choice([1, 10, 400, 1500])

    def waits(self) -> None:
        self.world.clock.now += self.chance.choice(self.waiting)

    def works(self) -> None:
        self.world.work()
        compare(self.world.path)

    def truncates(self) -> None:
        total = len(self.world.times)
        if total:
            self.world.truncate(self.chance.randrange(self.chance.choice([0, total // 2]), total))

    def updates(self) -> None:
        stream, total = self.world.stream, len(self.world.times)
        for _ in range(10 if total else 0):
            entry = stream.entry(self.chance.randrange(total))
            if entry.type != 0xB0:
                data = self.chance.randbytes(len(entry.data))
                stream.update_entry(entry.number, entry.type, data)
                return

    def others_append(self) -> None:
        many = self.chance.choice([1, 10, 300])
        self.world.append_as_others_do(*islice(self.events, many))

    def sidecar_is_lost(self) -> None:
        """Removed, or damaged, while the stream is closed."""
        self.world.stream.close()
        path = self.world.path.with_name("s.bin.pages")
        if path.exists():
            content = bytearray(path.read_bytes())
            if self.chance.random() < 0.3:
                path.unlink()
            elif self.chance.random() < 0.5:
                path.write_bytes(content[: self.chance.randrange(len(content))])
            else:
                content[self.chance.randrange(len(content))] ^= 1 << self.chance.randrange(8)
                path.write_bytes(content)
        self.world.open(damaged=True)


@pytest.mark.parametrize(
    "seed", [1, *(pytest.param(seed, marks=pytest.mark.soak) for seed in (0, *range(2, 12)))]
)
def test_lives(seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chance = random.Random(seed)
    world = World(tmp_path, monkeypatch, loses=seed % 3 > 0, sync=chance.choice(["os", 1000]))
    life = Life(world, seed)
    for _ in range(6):
        life.live(15)
        check(world, world.stream, chance)
        with DataStream.open(world.path, read_only=True, verify="never") as reader:
            check(world, reader, chance)
    world.work()
    compare(world.path)
    world.close()
    compare(world.path)
    with DataStream.open(world.path, read_only=True) as reader:
        check(world, reader, chance)
