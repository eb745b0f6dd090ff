"""What a reassembly promises whatever happens: upstreams of all kinds at once, waits that are
given up anywhere, consumers that are cut off anywhere."""

from __future__ import annotations

import random
import sqlite3
from collections.abc import Awaitable, Callable
from contextlib import closing, suppress
from pathlib import Path
from typing import Any, TypeVar

import pytest
import trio
import trio.testing
from trio.testing import MockClock

from datastreamer.consumer.async_reassembly import Reassembly
from datastreamer.consumer.sqlite_store import SqliteStore
from datastreamer.consumer.state import SourceState
from datastreamer.consumer.trio_reassembly import reassemble
from datastreamer.reassembly import Conflict
from tests.network.fixtures import seeds
from tests.network.network import Message, Network, entries, hosts, messages_of
from tests.network.stub import Stub

T = TypeVar("T")


async def next_id(payloads: Reassembly) -> int:
    item: Any = await payloads.__anext__()
    return int(item.id)


async def silent(stream: trio.abc.Stream) -> None:
    """A server that takes what it is sent, and says nothing."""
    while await stream.receive_some(65536):
        pass


async def nonsense(stream: trio.abc.Stream) -> None:
    while await stream.receive_some(65536):
        await stream.send_all(b"HTTP/1.1 400 Bad Request\r\n\r\n" * 10)


async def hangs_up(stream: trio.abc.Stream) -> None:
    await stream.aclose()


def slowly(*messages: Message) -> Any:
    """A server whose every byte takes a second."""

    async def serve(stream: trio.abc.Stream) -> None:
        stub = Stub(entries(*messages))
        with suppress(trio.BrokenResourceError):
            while data := await stream.receive_some(65536):
                for byte in stub.receive(data):
                    await trio.sleep(1)
                    await stream.send_all(bytes([byte]))

    return serve


async def test_of_what_some_can_complete_nothing_is_delayed_by_others(
    network: Network, autojump_clock: MockClock
) -> None:
    """Two have everything between them. The others: no server, silence, nonsense, a closed port,
    one byte a second, a truncated stream, and one with a false message for each part."""
    payloads = [messages_of(number) for number in range(60)]
    everything = [message for each in payloads for message in each]
    halves = [[each for at, each in enumerate(everything) if at % 2 == half] for half in (0, 1)]
    one = network.stub("one", *halves[0][:60])
    two = network.stub("two", *halves[1][:60])
    liar = network.stub("liar")
    network.stub("cut", *(message for number in range(900, 980) for message in messages_of(number)))
    bad = {
        "absent": None,
        "silent": silent,
        "nonsense": nonsense,
        "closed": hangs_up,
        "slow": slowly(*everything),
    }
    for name, serve in bad.items():
        network.servers[name] = [serve]
    names = ["one", "two", "liar", "cut", *bad]
    reported: list[Any] = []
    async with reassemble(
        hosts(*names), max_age=None, on_event=reported.append, follow=True
    ) as found:
        before = sorted([await next_id(found) for _ in range(110)])
        assert before == [*range(30), *range(900, 980)]
        assert trio.current_time() < 1
        connections = network.live["cut"]
        network.stub("cut", messages_of(5)[0])
        for _, stream in connections:
            await stream.aclose()
        lies = [(key, b"lie" if key[0] else value) for key, value in everything]
        await network.commit("liar", liar, *lies)
        await network.commit("one", one, *halves[0][60:])
        await network.commit("two", two, *halves[1][60:])
        got = [await next_id(found) for _ in range(30)]
        assert sorted(got) == list(range(30, 60))
        assert trio.current_time() < 2
        # Only later is it known of all of them how they are.
        with trio.move_on_after(150):
            await found.__anext__()
        states = found.sources
    assert {name for name, state in states.items() if state is SourceState.reading} == {
        *("one", "two", "liar"),
    }
    waited_for = {states[name] for name in ("absent", "silent", "closed")}
    assert waited_for == {SourceState.connecting}
    assert states["nonsense"] is states["cut"] is SourceState.failed
    # Each false message is a conflict; or it came first, and then the true one is.
    conflicts = [event.key for event in reported if isinstance(event, Conflict)]
    assert sorted(conflicts) == sorted(key for key, _ in everything if key[0])


async def test_what_is_read_again_begins_with_the_oldest_that_is_not_whole(
    network: Network, tmp_path: Path
) -> None:
    before = [message for number in range(50) for message in messages_of(number)]
    unfinished = messages_of(50)[:-1]
    first = network.stub("a", *before, *unfinished)
    second = network.stub("b", *before)
    size = len(messages_of(0))

    async def run(number: int, *others: int) -> dict[str, int]:
        """What is read of each up to a payload that it alone has now, and nothing else given."""
        for stub, own in ((first, number), (second, number + 1)):
            stub.entries += entries(*messages_of(own), first=len(stub.entries))
        with SqliteStore(tmp_path / "db") as store:
            async with reassemble(
                hosts("a", "b"), store=store, max_age=None, follow=True
            ) as payloads:
                got = [await next_id(payloads) for _ in range(2 + len(others))]
                assert sorted(got) == sorted([number, number + 1, *others])
                return {name: one.received for name, one in payloads.stats.sources.items()}

    with trio.fail_after(60):
        await run(100, *range(50))
        for turn in range(1, 4):
            # However often it is begun again, and whatever came behind.
            again = await run(100 + 2 * turn)
            assert again == {"a": len(unfinished) + (1 + turn) * size, "b": size}
        first.entries += entries(messages_of(50)[-1], first=len(first.entries))
        await run(200, 50)
        assert await run(300) == {"a": size, "b": size}


class Crash(Exception):
    pass


async def given_up_after(turns: int, call: Callable[[], Awaitable[T]]) -> T | None:
    """The result of `call`, or None if it is cancelled after `turns` turns of the loop."""
    found: T | None = None
    async with trio.open_nursery() as nursery:

        async def give_up() -> None:
            for _ in range(turns):
                await trio.lowlevel.checkpoint()
            nursery.cancel_scope.cancel()

        nursery.start_soon(give_up)
        found = await call()
        nursery.cancel_scope.cancel()
    return found


async def take(payloads: Reassembly, database: sqlite3.Connection, chance: random.Random) -> None:
    """Write what comes, and fail in the end."""
    for _ in range(chance.randrange(1, 60)):
        payload: Any = await given_up_after(chance.randrange(0, 25), payloads.__anext__)
        if payload is not None:
            row = (int(payload.id), repr(payload.parts))
            database.execute("INSERT INTO result VALUES (?, ?)", row)
    raise Crash


@seeds(8, 200)
async def test_given_up_and_cut_off_anywhere(seed: int, network: Network, tmp_path: Path) -> None:
    """Waits for a payload are cancelled after any number of turns, and runs end by an error
    anywhere: what is committed is each payload once, right."""
    chance = random.Random(seed)
    count = 40
    everything = [message for number in range(count) for message in messages_of(number)]
    for name in "abc":
        places = [
            (at + chance.uniform(0, 40), each)
            for at, each in enumerate(everything)
            if chance.random() < 0.7 or name == "a"
        ]
        network.stub(name, *(each for _, each in sorted(places)))
    got: dict[int, str] = {}
    while len(got) < count:
        with closing(sqlite3.connect(tmp_path / "db", check_same_thread=False)) as database:
            database.execute("CREATE TABLE IF NOT EXISTS result (id INTEGER, parts TEXT)")
            store = SqliteStore(database)
            with pytest.raises(Crash):
                async with reassemble(hosts("a", "b", "c"), store=store, follow=True) as payloads:
                    await take(payloads, database, chance)
        with closing(sqlite3.connect(tmp_path / "db")) as database:
            rows = database.execute("SELECT id, parts FROM result").fetchall()
        got = dict(rows)
        assert len(got) == len(rows)
    for number, parts in got.items():
        assert parts == repr(sorted(messages_of(number)[1:]))
