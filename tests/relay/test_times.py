"""A relay keeps the times of its upstream's commits, not those of its own."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import cast

import pytest
import trio

from datastreamer.client.trio_driver import connect
from datastreamer.errors import NotFound, NotSupported, TimeUnknown
from datastreamer.format import FEATURE_TIMES
from datastreamer.protocol.messages import Capabilities
from datastreamer.relay import times
from datastreamer.relay.checksums import SumsClient
from datastreamer.storage.stream import DataStream
from tests.client.test_resume_every_client import behind
from tests.network.fixtures import seeds, until
from tests.network.stub import Stub, sample
from tests.network.timed import COMMITS, PLACES, TOTAL, Clock, ms, timed
from tests.relay.relaying import Rig, contents, new, nursery_for, relaying, serving

MARKS = [(first, ms(seconds)) for first, seconds in COMMITS]


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(times, "_PAUSE_SECONDS", 0.01)


@pytest.fixture
def upstream(tmp_path: Path) -> Iterator[DataStream]:
    with new(tmp_path / "upstream.bin") as made:
        yield made


def known(stream: DataStream) -> list[int | None]:
    return [stream.time_of(number) for number in range(stream.total_entries)]


async def same(relay: Rig, upstream: DataStream) -> None:
    """Wait until the relay has the upstream's entries and times."""

    def holds() -> bool:
        with suppress(NotFound):  # it is truncated meanwhile
            same = contents(relay.stream) == contents(upstream)
            return same and known(relay.stream) == known(upstream)
        return False

    await until(holds)


async def test_the_times_are_the_upstreams(tmp_path: Path, upstream: DataStream) -> None:
    clock = timed(upstream)
    async with nursery_for() as nursery:
        server = await serving(nursery, upstream)
        relay = await relaying(nursery, tmp_path / "relay.bin", server.port)
        await same(relay, upstream)
        clock.commit(5, 4000.0)
        clock.commit(5, 8000.0)
        await same(relay, upstream)
        async with connect("127.0.0.1", relay.port) as client:
            for seconds, number in PLACES[:-2]:
                assert await client.entry_at(ms(seconds)) == number
            assert (await client.time_marks(0)).marks[:4] == MARKS
            assert await client.entry_at(ms(9000.0)) == TOTAL + 10


async def test_a_relay_of_a_relay(tmp_path: Path, upstream: DataStream) -> None:
    clock = timed(upstream)
    async with nursery_for() as nursery:
        server = await serving(nursery, upstream)
        first = await relaying(nursery, tmp_path / "first.bin", server.port)
        second = await relaying(nursery, tmp_path / "second.bin", first.port)
        third = await relaying(nursery, tmp_path / "third.bin", second.port)
        await same(third, upstream)
        clock.commit(7, 5000.0)
        await same(third, upstream)
        assert third.stream.entry_at(ms(4999.0)) == TOTAL


async def test_many_pages(tmp_path: Path, upstream: DataStream) -> None:
    """More marks than an answer has, over pages that end within a commit."""
    clock = Clock(upstream)
    for at in range(60):
        first = upstream.total_entries
        with upstream.atomic_op() as op:
            for _ in range(3):
                op.add_entry(1, bytes([at]) * 20_000)
        if at % 7:
            clock.stream.parts.relay.put_time_marks([(first, ms(2.0 * at))], 1000, first + 3)
    async with nursery_for() as nursery:
        server = await serving(nursery, upstream)
        relay = await relaying(nursery, tmp_path / "relay.bin", server.port)
        await same(relay, upstream)


async def test_it_continues_after_a_restart(tmp_path: Path, upstream: DataStream) -> None:
    clock = timed(upstream)
    async with nursery_for() as nursery:
        server = await serving(nursery, upstream)
        relay = await relaying(nursery, tmp_path / "relay.bin", server.port)
        await same(relay, upstream)
        await relay.stop()
        clock.commit(4, 7000.0)
        with DataStream.open(tmp_path / "relay.bin", read_only=True, index="memory") as kept:
            assert known(kept) == known(upstream)[:TOTAL]
        relay = await relaying(nursery, tmp_path / "relay.bin", server.port)
        await same(relay, upstream)


async def test_truncations_and_updates(tmp_path: Path, upstream: DataStream) -> None:
    clock = timed(upstream)
    async with nursery_for() as nursery:
        server = await serving(nursery, upstream)
        relay = await relaying(nursery, tmp_path / "relay.bin", server.port, on_rewrite="follow")
        await same(relay, upstream)
        upstream.update_entry(6, 1, b"ENTRY 6, 60.0")
        await same(relay, upstream)
        upstream.truncate(7)
        clock.commit(3, 9000.0)
        await same(relay, upstream)
        assert relay.stream.entry_at(ms(4000.0)) == 7


@seeds(1, 60)
async def test_worlds(tmp_path: Path, upstream: DataStream, seed: int) -> None:
    """Appends at times that are known or not, updates, truncations and restarts, over pages."""
    chance, clock, seconds = random.Random(seed), Clock(upstream), 0.0
    async with nursery_for() as nursery:
        server = await serving(nursery, upstream)
        first = await relaying(nursery, tmp_path / "a.bin", server.port, on_rewrite="follow")
        second = await relaying(nursery, tmp_path / "b.bin", first.port, on_rewrite="follow")
        for _ in range(12):
            for _ in range(chance.randint(1, 5)):
                seconds += chance.choice([0.3, 1.0, 7.0, 4000.0])
                known_at = None if chance.random() < 0.2 else seconds
                clock.commit(chance.randint(1, 9), known_at, size=chance.choice([30, 90_000]))
            total = upstream.total_entries
            match chance.randint(0, 4):
                case 0:
                    upstream.truncate(chance.randint(max(0, total - 30), total - 1))
                case 1:
                    entry = upstream.entry(chance.randrange(total))
                    upstream.update_entry(entry.number, entry.type, entry.data[::-1])
                case 2:
                    await first.stop()
                    first = await relaying(
                        nursery,
                        tmp_path / "a.bin",
                        server.port,
                        port=first.port,
                        on_rewrite="follow",
                    )
            if chance.random() < 0.5:
                await same(second, upstream)
        await same(second, upstream)


async def test_what_the_upstream_does_not_know(tmp_path: Path, upstream: DataStream) -> None:
    clock = Clock(upstream)
    clock.commit(20)
    async with nursery_for() as nursery:
        server = await serving(nursery, upstream)
        relay = await relaying(nursery, tmp_path / "relay.bin", server.port)
        await until(lambda: relay.stream.total_entries == 20)
        clock.commit(5, 30.0)
        await same(relay, upstream)
        assert known(relay.stream) == [None] * 20 + [ms(30.0)] * 5
        async with connect("127.0.0.1", relay.port) as client:
            with pytest.raises(TimeUnknown):
                await client.entry_at(ms(0.0))


async def test_an_older_upstream(
    tmp_path: Path, upstream: DataStream, monkeypatch: pytest.MonkeyPatch
) -> None:
    Clock(upstream).commit(20, 5.0)
    older = Capabilities().features & ~FEATURE_TIMES
    async with nursery_for() as nursery:
        server = await serving(nursery, upstream)
        with monkeypatch.context() as patched:
            defaults = (older, *Capabilities()[1:])
            patched.setattr(Capabilities.__new__, "__defaults__", defaults)
            relay = await relaying(nursery, tmp_path / "relay.bin", server.port)
            await until(lambda: relay.stream.total_entries == 20)
            await trio.sleep(0.1)
            assert known(relay.stream) == [None] * 20
            assert server.server is not None
            assert server.server.counts.commands["time_marks"] == 0
            await relay.stop()
        # It gets the times once the upstream is a newer one.
        relay = await relaying(nursery, tmp_path / "relay.bin", server.port)
        await same(relay, upstream)


async def test_an_upstream_that_was_replaced_by_an_older_one(upstream: DataStream) -> None:
    """It is not asked again on this connection."""
    Clock(upstream).commit(3, 5.0)

    class Older:
        async def ask(self, _: object) -> object:
            raise NotSupported("it does not report when entries were committed")

    async def at_once(condition: Callable[[], bool]) -> None:
        assert condition()

    with trio.fail_after(10):
        upstream.append(1, b"later")
        await times.keep_times(cast("SumsClient", Older()), upstream, at_once)


async def test_an_upstream_of_another_program(tmp_path: Path) -> None:
    stubs = [Stub(sample(20), extensions="refused") for _ in range(9)]
    async with nursery_for() as nursery:
        with behind(*stubs) as server:
            relay = await relaying(nursery, tmp_path / "relay.bin", server.port, look_seconds=1e3)
            await until(lambda: relay.stream.total_entries == 20)
            await trio.sleep(0.1)
            assert known(relay.stream) == [None] * 20
            async with connect("127.0.0.1", relay.port) as client:
                assert (await client.time_marks(0)).marks == []
            await relay.stop()
