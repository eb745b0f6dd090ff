"""Payloads from several servers at once: whole, each once, whatever becomes of one of them."""

from __future__ import annotations

import asyncio
import random
import sqlite3
from collections.abc import Coroutine, Iterator
from contextlib import AsyncExitStack, ExitStack
from pathlib import Path
from typing import Any

import pytest
import trio

from datastreamer import aio
from datastreamer.client.upstream import Upstream
from datastreamer.consumer.blocking_reassembly import BlockingReassembly
from datastreamer.consumer.options import named
from datastreamer.consumer.sqlite_store import SqliteStore
from datastreamer.consumer.state import (
    Arrived,
    SourceBack,
    SourceFailed,
    SourceLost,
    SourceRolledBack,
    SourceState,
)
from datastreamer.consumer.trio_reassembly import reassemble
from datastreamer.errors import ConnectFailed, HistoryChanged, StreamClosed, UsageError
from datastreamer.protocol.retry import Backoff
from datastreamer.reassembly import (
    Applied,
    Block,
    Conflict,
    Gap,
    Malformed,
    PayloadComplete,
    Reorg,
    Splitter,
    pack_message,
)
from datastreamer.storage.stream import DataStream
from datastreamer.transport.asyncio_thread import AsyncioThread
from tests.network.fixtures import append, over_loopback
from tests.network.stub import Stub, StubServer, handler

MESSAGE = 0x10
SOON = Backoff(0.01, 0.05)
Message = tuple[bytes, bytes]


def own(number: int) -> bytes:
    return b"%032d" % number


def messages_of(number: int, parts: int = 3, text: bytes = b"part") -> list[Message]:
    """A payload: its header, then its parts."""
    prefix = b"\x01" + own(number)
    return Splitter().split(
        own(number), {prefix: [(bytes([at]), text + b"%d" % at) for at in range(parts)]}
    )


def put(stream: DataStream, *messages: Message) -> None:
    """Each in an operation of its own."""
    for message in messages:
        append(stream, (MESSAGE, pack_message(*message)))


@pytest.fixture
def streams(tmp_path: Path) -> Iterator[list[DataStream]]:
    with ExitStack() as stack:
        yield [
            stack.enter_context(
                DataStream.create(tmp_path / f"{name}.bin", sync="os", index="memory")
            )
            for name in "abc"
        ]


class Served:
    """Streams, each with a server of its own."""

    def __init__(self, streams: list[DataStream]) -> None:
        self.streams = streams
        self.upstreams: dict[str, tuple[str, int]] = {}
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Served:
        for name, stream in zip("abc", self.streams, strict=False):
            rig = await self._stack.enter_async_context(over_loopback(stream))
            self.upstreams[name] = rig.address
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()


@pytest.fixture(params=["trio", "asyncio", "threads"], autouse=True)
def way(request: pytest.FixtureRequest) -> Iterator[None]:
    """How `collected` reads."""
    WAYS.append(request.param)
    yield
    WAYS.pop()


WAYS: list[str] = []


async def collected(upstreams: Any, **options: Any) -> list[Any]:
    """All payloads up to the sources' ends."""
    if WAYS[-1] == "asyncio":

        async def gathered() -> list[Any]:
            async with aio.reassemble(upstreams, **options) as payloads:
                return [payload async for payload in payloads]

        return await trio.to_thread.run_sync(asyncio.run, gathered())
    if WAYS[-1] == "threads":

        def listed() -> list[Any]:
            with BlockingReassembly(upstreams, **options) as payloads:
                return list(payloads)

        return await trio.to_thread.run_sync(listed)
    async with reassemble(upstreams, **options) as payloads:
        return [payload async for payload in payloads]


def ids(payloads: list[Any]) -> list[int]:
    return sorted(int(payload.id) for payload in payloads)


async def test_what_one_lacks_another_has(streams: list[DataStream]) -> None:
    chance = random.Random(1)
    for number in range(200):
        for message in messages_of(number):
            sent = [stream for stream in streams if chance.random() < 0.7]
            for stream in sent or streams[:1]:
                put(stream, message)
    async with Served(streams) as served:
        reported: list[Any] = []
        found = await collected(served.upstreams, on_event=reported.append)
    assert ids(found) == list(range(200))
    assert found[0].parts == messages_of(int(found[0].id))[1:]
    assert reported == []


async def test_subscription_with_nested_headers(streams: list[DataStream]) -> None:
    prefixes = [bytes([first]) + b"%032d" % at for first in (1, 2) for at in range(50)]
    made = Splitter(400).split(own(1), {prefix: [(b"", b"v")] for prefix in prefixes})
    assert any(key[0] == 0xFF for key, _ in made)
    put(streams[0], *made)
    async with Served(streams[:1]) as served:
        [found] = await collected(served.upstreams, subscribe=[b"\x01", b"\xff"])
        [without] = await collected(served.upstreams, subscribe=[b"\x01"])
    assert found.parts == [(prefix, b"v") for prefix in prefixes[:50]]
    assert without.parts == found.parts, "nested headers are always subscribed to"


async def test_files_are_sources_too(streams: list[DataStream]) -> None:
    put(streams[0], *messages_of(1)[:2])
    put(streams[1], *messages_of(1)[2:])
    async with Served(streams[:1]) as served:
        found = await collected([served.upstreams["a"], Path(streams[1].path)])
    assert ids(found) == [1]


async def test_where_it_begins(streams: list[DataStream]) -> None:
    for number in range(5):
        with streams[0].atomic_op() as op:
            op.add_bookmark(b"%d" % number)
            op.add_entries(MESSAGE, [pack_message(*each) for each in messages_of(number)])
    async with Served(streams[:1]) as served:
        for start, expected in ((10, [2, 3, 4]), (b"3", [3, 4]), ("latest", [])):
            assert ids(await collected(served.upstreams, start=start)) == expected
            path = [Path(streams[0].path)]
            streams[0].sync()
            assert ids(await collected(path, start=start)) == expected


async def test_a_dead_one_delays_nothing_and_is_waited_for(streams: list[DataStream]) -> None:
    put(streams[0], *messages_of(1), *messages_of(2)[:2])
    put(streams[1], *messages_of(2)[2:])
    with socket_that_refuses() as (host, port):
        pass
    async with Served(streams[:1]) as served:
        reported: list[Any] = []
        upstreams = {**served.upstreams, "dead": (host, port)}
        async with reassemble(
            upstreams, on_event=reported.append, backoff=SOON, follow=True
        ) as payloads:
            with trio.fail_after(20):
                assert int((await payloads.__anext__()).id) == 1
                while not reported:
                    with trio.move_on_after(0.01):
                        await payloads.__anext__()
                assert payloads.sources == {
                    "a": SourceState.reading,
                    "dead": SourceState.connecting,
                }
                # It comes, and has what was missing.
                entries = [entry for batch in streams[1].batches(0, None) for entry in batch]
                stub = [handler(Stub(entries)) for _ in range(3)]
                with StubServer(*stub, port=port):
                    assert int((await payloads.__anext__()).id) == 2
    lost, back = reported
    assert back == SourceBack("dead", 0)
    assert isinstance(lost, SourceLost)
    assert lost.source == "dead"
    assert isinstance(lost.error, ConnectFailed)


def socket_that_refuses() -> Any:
    """The address of a port without a listener after the end of the block."""
    import contextlib
    import socket

    @contextlib.contextmanager
    def found() -> Iterator[tuple[str, int]]:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            yield listener.getsockname()

    return found()


async def test_one_failure_is_reported_and_the_failure_of_all_is_raised(
    streams: list[DataStream],
) -> None:
    put(streams[0], *messages_of(1))
    with socket_that_refuses() as dead:
        pass
    async with Served(streams[:1]) as served:
        reported: list[Any] = []
        found = await collected({**served.upstreams, "dead": dead}, on_event=reported.append)
    assert ids(found) == [1]
    assert [type(event) for event in reported] == [SourceFailed]
    with pytest.raises(ConnectFailed):
        await collected([dead])


async def test_a_false_message_is_reported(streams: list[DataStream]) -> None:
    put(streams[0], *messages_of(1))
    put(streams[1], *messages_of(1, text=b"lie "), (b"short", b""))
    async with Served(streams[:1]) as served:
        reported: list[Any] = []
        async with reassemble(
            {**served.upstreams, "liar": Path(streams[1].path)},
            on_event=reported.append,
        ) as payloads:
            found = [payload async for payload in payloads]
            samples = payloads.samples()
    assert ids(found) == [1]
    conflicts = [event for event in reported if isinstance(event, Conflict)]
    assert len(conflicts) == 3
    assert len({event.source for event in conflicts}) == 1
    assert [type(event) for event in reported if not isinstance(event, Conflict)] == [Malformed]
    by_source = {
        labels[0]: value for labels, value in samples["datastreamer_reassembly_conflicts_total"]
    }
    assert sum(by_source.values()) == 3  # type: ignore[arg-type]


async def test_a_slow_consumer_makes_the_servers_wait(streams: list[DataStream]) -> None:
    for number in range(40):
        put(streams[0], *messages_of(number, parts=2, text=bytes(200_000)))
    async with Served(streams[:1]) as served, reassemble(served.upstreams, follow=True) as payloads:
        await payloads.__anext__()
        arrivals = payloads._engine._arrivals
        while not arrivals.full:
            await trio.lowlevel.checkpoint()
        # In memory: what has arrived and what the reader holds, not the stream's 16 MB.
        assert payloads.stats.completed == 1
        assert payloads.stats.message_bytes < 1_000_000
        for _ in range(39):
            await payloads.__anext__()


async def test_a_restart_gives_each_once(streams: list[DataStream], tmp_path: Path) -> None:
    chance = random.Random(2)
    for stream in streams:
        order = [message for number in range(120) for message in messages_of(number)]
        window = [(at + chance.uniform(0, 60), message) for at, message in enumerate(order)]
        put(stream, *(message for _, message in sorted(window, key=lambda each: each[0])))
    got: list[int] = []
    async with Served(streams) as served:
        while len(got) < 120:
            database = sqlite3.connect(tmp_path / "db", check_same_thread=False)
            database.execute("CREATE TABLE IF NOT EXISTS result (id INTEGER PRIMARY KEY)")
            store = SqliteStore(database)
            most = chance.randrange(1, 20)
            async with reassemble(served.upstreams, store=store) as payloads:
                async for payload in payloads:
                    database.execute("INSERT INTO result VALUES (?)", (int(payload.id),))
                    most -= 1
                    if not most:
                        # Its end is a crash: what is open is lost.
                        database.close()
                        break
                payloads._engine.state.saved(0)
            database.close()
            database = sqlite3.connect(tmp_path / "db")
            got = [number for (number,) in database.execute("SELECT id FROM result")]
            database.close()
    assert sorted(got) == list(range(120))


async def test_the_end_of_the_block_saves(streams: list[DataStream], tmp_path: Path) -> None:
    put(streams[0], *messages_of(1), *messages_of(2))
    async with Served(streams[:1]) as served:
        for expected in ([1, 2], []):
            with SqliteStore(tmp_path / "db") as store:
                assert ids(await collected(served.upstreams, store=store)) == expected
        put(streams[0], *messages_of(3))
        with SqliteStore(tmp_path / "db") as store:
            assert ids(await collected(served.upstreams, store=store)) == [3]
            progress = store.load()
    assert progress is not None
    assert progress.places["a"].position == 12
    assert [int(name) for name, _ in progress.known] == [1, 2, 3]


async def test_a_source_that_took_entries_back(streams: list[DataStream], tmp_path: Path) -> None:
    first, second = streams[:2]
    put(first, *messages_of(1), *messages_of(2)[:2])
    async with Served(streams[:2]) as served:
        reported: list[Any] = []
        store = SqliteStore(tmp_path / "db")
        async with reassemble(
            served.upstreams,
            store=store,
            on_event=reported.append,
            backoff=SOON,
            follow=True,
        ) as payloads:
            with trio.fail_after(20):
                assert int((await payloads.__anext__()).id) == 1
                while payloads.stats.messages < 1:
                    with trio.move_on_after(0.01):
                        await payloads.__anext__()
                first.truncate(5)
                put(first, *messages_of(3))
                assert int((await payloads.__anext__()).id) == 3
                put(second, *messages_of(2)[1:])
                assert int((await payloads.__anext__()).id) == 2
        progress = store.load()
        store.close()
    assert [type(event) for event in reported] == [SourceLost, SourceBack, SourceRolledBack]
    assert progress is not None
    assert progress.places["a"].position == progress.places["a"].seen == 9


@pytest.mark.parametrize("as_file", [False, True], ids=["server", "file"])
async def test_another_history_after_a_restart(
    streams: list[DataStream], tmp_path: Path, as_file: bool
) -> None:
    stream = streams[0]
    append(stream, *[(1, b"no message")] * 300)
    put(stream, *messages_of(1), *messages_of(2)[:2], *messages_of(3))

    async def read(reported: list[Any]) -> list[int]:
        async with Served([stream]) as served:
            upstreams: Any = {"a": Path(stream.path)} if as_file else served.upstreams
            stream.sync()
            with SqliteStore(tmp_path / "db") as store:
                found = await collected(upstreams, store=store, on_event=reported.append)
        return ids(found)

    reported: list[Any] = []
    assert await read(reported) == [1, 3]
    # The last entries are others now, of which some are read again anyhow.
    stream.truncate(308)
    put(stream, *messages_of(4), *messages_of(2)[2:])
    assert await read(reported) == [2, 4]
    assert [type(event) for event in reported] == [SourceRolledBack]
    assert reported[0].rollback.to_entry == 308
    # It is shorter than it was, and still has something of what is remembered.
    put(stream, *messages_of(50)[:1], *messages_of(51))
    assert await read(reported) == [51]
    stream.truncate(stream.total_entries - 2)
    assert await read(reported) == []
    assert [event.rollback.to_entry for event in reported] == [308, stream.total_entries]
    put(stream, *messages_of(52), *messages_of(50)[1:])
    assert sorted(await read(reported)) == [50, 52]
    assert len(reported) == 2
    # None of what is remembered is there.
    stream.truncate(0)
    append(stream, *[(2, b"something else")] * 300)
    put(stream, *(message for number in range(5, 20) for message in messages_of(number)))
    with pytest.raises(HistoryChanged):
        await read(reported)


def block_of(payload: PayloadComplete) -> Block:
    number, own_hash, parent = payload.parts[0][1].split(b",")
    return Block(int(number), own_hash, parent)


def block(number: int, name: bytes, parent: bytes) -> list[Message]:
    text = b"%d,%s,%s" % (number, name, parent)
    identity = name.ljust(32, b".")
    return Splitter().split(identity, {b"\x01" + identity: [(b"", text), (b"x", b"more")]})


async def test_in_order_over_restarts(streams: list[DataStream], tmp_path: Path) -> None:
    chance = random.Random(3)
    made = [block(number, b"a%d" % number, b"a%d" % (number - 1)) for number in range(1, 60)]
    branch = [(30, b"b30", b"a29"), (31, b"b31", b"b30"), (60, b"a60", b"a59")]
    made += [block(*each) for each in branch]
    for stream in streams:
        places = [(at + chance.uniform(0, 8), each) for at, each in enumerate(made)]
        put(stream, *(m for _, each in sorted(places, key=lambda p: p[0]) for m in each))
    applied: list[bytes] = []
    reported: list[Any] = []
    async with Served(streams) as served:
        while len(applied) < 60:
            with SqliteStore(tmp_path / "db") as store:
                async with reassemble(
                    served.upstreams,
                    store=store,
                    order=block_of,
                    after=b"a0",
                    reorg_threshold=40,
                    on_event=reported.append,
                ) as payloads:
                    most = chance.randrange(1, 9)
                    async for item in payloads:
                        assert isinstance(item, Applied)
                        assert item.payload.complete is not None
                        applied.append(item.block.hash)
                        most -= 1
                        if not most:
                            break
        assert applied == [b"a%d" % number for number in range(1, 61)]
        assert [event for event in reported if not isinstance(event, Gap)] == []
        # The branch becomes the heavier one: both its older blocks came in a run before.
        put(streams[0], *block(61, b"b61", b"b60"))
        for number in range(32, 61):
            put(streams[1], *block(number, b"b%d" % number, b"b%d" % (number - 1)))
        with SqliteStore(tmp_path / "db") as store:
            [item] = await collected(
                served.upstreams, store=store, order=block_of, reorg_threshold=40
            )
    assert isinstance(item, Reorg)
    assert [each.hash for each, _ in item.rolled_back] == [b"a%d" % n for n in range(60, 29, -1)]
    assert [each.hash for each, _ in item.applied] == [b"b%d" % n for n in range(30, 62)]
    assert all(payload.complete is not None for _, payload in item.applied)


def test_an_interrupt_loses_nothing(
    streams: list[DataStream], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C where a batch has just arrived: it is not gone on with behind that."""
    put(streams[0], *messages_of(1), *messages_of(2))
    streams[0].sync()
    paths = [Path(streams[0].path)]
    run = AsyncioThread.run

    def interrupted(self: AsyncioThread, work: Coroutine[Any, Any, Any]) -> Any:
        if isinstance(arrival := run(self, work), Arrived):
            raise KeyboardInterrupt
        return arrival

    store = SqliteStore(tmp_path / "db")
    with BlockingReassembly(paths, store=store) as payloads:
        with monkeypatch.context() as patched:
            patched.setattr(AsyncioThread, "run", interrupted)
            with pytest.raises(KeyboardInterrupt):
                next(payloads)
        with pytest.raises(StreamClosed):
            next(payloads)
    with BlockingReassembly(paths, store=store) as payloads:
        assert ids(list(payloads)) == [1, 2]
    store.close()


def test_names() -> None:
    assert list(named([("a", 1), Upstream("b", 2), Path("c.bin")])) == ["a:1", "b:2", "c.bin"]
    assert list(named({"x": ("a", 1)})) == ["x"]
    with pytest.raises(UsageError, match="named twice"):
        named([("a", 1), ("a", 1)])
    with pytest.raises(UsageError, match="one source"):
        named([])
