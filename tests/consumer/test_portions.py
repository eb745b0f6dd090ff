"""A consumer of some portions: servers send only their messages, and it delivers what a consumer of
all entries delivers of them."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
import trio

from datastreamer.consumer.sqlite_store import SqliteStore
from datastreamer.consumer.state import SourceFailed
from datastreamer.consumer.trio_reassembly import reassemble
from datastreamer.protocol.retry import Backoff
from datastreamer.reassembly import Splitter, pack_message, wanted
from datastreamer.reassembly.producer import MESSAGE_TYPE
from datastreamer.selection.clauses import Where
from datastreamer.storage.stream import DataStream
from tests.network.fixtures import Rig, append, over_loopback
from tests.network.stub import Filtering, StubServer, handler

PORTIONS = (b"\x01", b"\x02", b"\x02\x07", b"\x30")


def own(number: int) -> bytes:
    return number.to_bytes(32, "little")


def prefix_of(portion: bytes, number: int, at: int = 0) -> bytes:
    """A name, then bytes of the payload's id."""
    return (portion + at.to_bytes(2, "big") + own(number))[:33]


def made(chance: random.Random, number: int) -> list[tuple[bytes, bytes]]:
    """The messages of a payload; many prefixes make nested headers."""
    parts = {}
    for portion in PORTIONS:
        for at in range(chance.choice([0, 1, 1, 2, 30])):
            values = [
                (b"%d" % n, chance.randbytes(chance.choice([0, 5, 300]))) for n in range(1, 3)
            ]
            parts[prefix_of(portion, number, at)] = values
    return list(Splitter(1000).split(own(number), parts))


def world(seed: int) -> tuple[list[list[bytes]], int]:
    """What each of two producers publishes: the same messages, in an order of its own, some of them
    twice, some with another value, one payload without an end."""
    chance = random.Random(seed)
    payloads = 12
    streams: list[list[bytes]] = []
    messages = [made(chance, number) for number in range(payloads)]
    for _ in range(2):
        found: list[bytes] = []
        for number, each in enumerate(messages):
            mine = list(each)
            chance.shuffle(mine)
            if chance.random() < 0.3:
                mine += chance.sample(mine, min(3, len(mine)))
            if chance.random() < 0.2 and len(mine) > 2:
                key, _value = mine[-1]
                mine.append((key, b"another"))
            if number == payloads - 1:
                mine = mine[: len(mine) // 2]
            found += [pack_message(*message) for message in mine]
        streams.append(found)
    return streams, payloads


def packed(entries: list[bytes]) -> list[tuple[int, bytes]]:
    """Among entries of other types, and messages whose keys are no keys."""
    found: list[tuple[int, bytes]] = []
    for at, data in enumerate(entries):
        if at % 7 == 3:
            found.append((5, data))
        found.append((MESSAGE_TYPE, data))
    return found


async def collected(upstreams: Any, **options: Any) -> tuple[dict[bytes, list[Any]], list[str]]:
    """The payloads, and the events that are about payloads."""
    events: list[str] = []
    payloads: dict[bytes, list[Any]] = {}

    def note(event: object) -> None:
        events.append(type(event).__name__)

    options = {"on_event": note, **options}
    async with reassemble(upstreams, **options) as found:
        async for payload in found:
            assert payload.id not in payloads
            payloads[payload.id] = sorted(payload.parts)
    return payloads, sorted(set(events))


@pytest.fixture
def streams(tmp_path: Path) -> Iterator[list[DataStream]]:
    with (
        DataStream.create(tmp_path / "a.bin", sync="os", index="memory") as first,
        DataStream.create(tmp_path / "b.bin", sync="os", index="memory") as second,
    ):
        yield [first, second]


def sent_by(rigs: list[Rig]) -> int:
    return sum(rig.server.counts.bytes_sent for rig in rigs)


@pytest.mark.parametrize("seed", range(8))
async def test_what_a_full_read_delivers(streams: list[DataStream], seed: int) -> None:
    """From servers that select, from servers that are asked for nothing, and from files."""
    entries, _ = world(seed)
    for stream, mine in zip(streams, entries, strict=True):
        append(stream, *packed(mine))
        stream.sync()
    async with AsyncExitStack() as stack:
        rigs = [await stack.enter_async_context(over_loopback(each)) for each in streams]
        upstreams = {name: rig.address for name, rig in zip("ab", rigs, strict=True)}
        files = {name: Path(each.path) for name, each in zip("ab", streams, strict=True)}
        for subscribe in ([b"\x01"], [b"\x02\x07", b"\x30"], [prefix_of(b"\x02", 3)], [b""]):
            before = sent_by(rigs)
            found = await collected(upstreams, subscribe=subscribe)
            selected, before = sent_by(rigs) - before, sent_by(rigs)
            whole = await collected(upstreams, subscribe=subscribe, batch_reads=False)
            assert found == whole
            assert found == await collected(files, subscribe=subscribe)
            assert found[0]
            assert all(
                any(key.startswith(each) for each in (*subscribe, b"\xff"))
                for parts in found[0].values()
                for key, _ in parts
            )
            if subscribe != [b""]:
                assert selected < sent_by(rigs) - before


async def test_the_goal(stream: DataStream) -> None:
    """Of payloads of 10 kB, each with 5 wanted bytes, at most 200 bytes are sent."""
    payloads = 200
    for number in range(payloads):
        parts = {
            prefix_of(b"\x01", number): [(b"", b"five!")],
            prefix_of(b"\x02", number): [(b"%d" % at, bytes(990)) for at in range(10)],
        }
        append(
            stream,
            *(
                (MESSAGE_TYPE, pack_message(*message))
                for message in Splitter().split(own(number), parts)
            ),
        )
    async with over_loopback(stream) as rig:
        found, _ = await collected([rig.address], subscribe=[b"\x01"])
        assert len(found) == payloads
        assert all([value for _, value in parts] == [b"five!"] for parts in found.values())
        assert rig.server.counts.bytes_sent <= 200 * payloads


async def test_one_server_is_older(streams: list[DataStream]) -> None:
    entries, _ = world(99)
    for stream, mine in zip(streams, entries, strict=True):
        append(stream, *packed(mine))
    stubs = [Filtering(list(streams[1].entries()), span=7) for _ in range(4)]
    with StubServer(*map(handler, stubs)) as old:
        async with over_loopback(streams[0]) as new:
            upstreams = {"new": new.address, "old": ("127.0.0.1", old.port)}
            whole = await collected(upstreams, subscribe=[b"\x02"], batch_reads=False)
            assert await collected(upstreams, subscribe=[b"\x02"]) == whole
            assert whole[0]


def test_the_clauses() -> None:
    assert wanted([b"\x01", b"\xff"]) == [
        Where(MESSAGE_TYPE, 2, b"\x00"),
        Where(MESSAGE_TYPE, 2, b"\x01"),
        Where(MESSAGE_TYPE, 2, b"\xff"),
    ]
    assert wanted([bytes(40)], 7)[1] == Where(7, 2, bytes(33))
    assert Where(3) in wanted([b""], 3)


async def test_a_truncation_where_nothing_was_wanted(stream: DataStream) -> None:
    """A source goes back, as one of all entries does, also if it has received nothing yet."""
    append(stream, *((5, b"%d" % n) for n in range(1000)))
    events: list[object] = []
    messages = Splitter().split(own(7), {prefix_of(b"\x01", 7): [(b"", b"value")]})
    async with (
        over_loopback(stream) as rig,
        reassemble(
            [rig.address],
            subscribe=[b"\x01"],
            start="latest",
            on_event=events.append,
            backoff=Backoff(0.01, 0.05),
            follow=True,
        ) as payloads,
        trio.open_nursery() as nursery,
    ):

        async def write() -> None:
            await trio.sleep(0.2)
            append(stream, *((5, b"%d" % n) for n in range(300)))
            await trio.sleep(0.3)
            await trio.to_thread.run_sync(stream.truncate, 1200)
            for message in messages:
                append(stream, (MESSAGE_TYPE, pack_message(*message)))

        nursery.start_soon(write)
        with trio.fail_after(20):
            payload = await anext(payloads)
    assert payload.id == own(7)
    assert not any(isinstance(event, SourceFailed) for event in events)


async def test_a_store_that_is_continued_with_less(stream: DataStream, tmp_path: Path) -> None:
    """The entries that an earlier run remembers count for the next selection, too."""
    for number in range(20):
        parts = {prefix_of(name, number): [(b"", name)] for name in (b"\x01", b"\x02")}
        append(
            stream,
            *((MESSAGE_TYPE, pack_message(*each)) for each in Splitter().split(own(number), parts)),
        )
    async with over_loopback(stream) as rig:
        with SqliteStore(tmp_path / "db") as store:
            found, _ = await collected([rig.address], subscribe=[b"\x01", b"\x02"], store=store)
            assert len(found) == 20
        total = stream.total_entries
        with SqliteStore(tmp_path / "db") as store:
            await collected([rig.address], subscribe=[b"\x01"], store=store)
        await trio.to_thread.run_sync(stream.truncate, total - 1)
        parts = {prefix_of(b"\x01", 77): [(b"", b"again")]}
        append(
            stream,
            *((MESSAGE_TYPE, pack_message(*each)) for each in Splitter().split(own(77), parts)),
        )
        with SqliteStore(tmp_path / "db") as store:
            found, events = await collected([rig.address], subscribe=[b"\x01"], store=store)
    assert own(77) in found
    assert "SourceFailed" not in events
