"""A relay: what it keeps and serves, and what it makes of upstreams that come and go."""

from __future__ import annotations

import functools
import logging
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing

from datastreamer.errors import HistoryChanged, ListenFailed, UsageError
from datastreamer.net.blocking import BlockingClient
from datastreamer.net.blocking_relay import BlockingRelay
from datastreamer.net.client import connect
from datastreamer.net.embed import StreamServer
from datastreamer.net.listen import open_listeners
from datastreamer.net.relay import Relay
from datastreamer.net.server import Server
from datastreamer.net.upstream import AnotherStream, Behind, Rewritten, Upstream
from datastreamer.protocol.resume import Backoff
from datastreamer.storage.stream import DataStream
from tests.net.conftest import PATIENCE
from tests.net.proxy import NONE, End, Fault, FaultyServer
from tests.net.stub import Stub, sample

QUICK = Backoff(first=0.001, most=0.02)


def fill(stream: DataStream, count: int, *, salt: bytes = b"", size: int = 40) -> None:
    """`count` entries, every tenth a bookmark; `salt` makes another history."""
    total = stream.total_entries
    with stream.atomic_op() as op:
        for number in range(total, total + count):
            if number % 10 == 0:
                op.add_bookmark(number.to_bytes(4, "big"))
            else:
                op.add_entry(1 + number % 3, (salt + number.to_bytes(8, "big")).ljust(size))


def contents(stream: DataStream) -> list[tuple[int, int, bytes]]:
    return [
        (entry.number, entry.type, entry.data) for batch in stream.batches(0) for entry in batch
    ]


@pytest.fixture
def upstream(tmp_path: Path) -> Iterator[DataStream]:
    with new(tmp_path / "upstream.bin") as made:
        yield made


def new(path: Path, **options: Any) -> DataStream:
    return DataStream.create(
        path, sync="os", index="memory", **{"version": 2, "system_id": 137, **options}
    )


class Running:
    """A server that can be stopped, and started again on the same port."""

    def __init__(self, stream: DataStream, nursery: trio.Nursery) -> None:
        self.stream = stream
        self.port = 0
        self._nursery = nursery
        self._scope = trio.CancelScope()
        self._ended = trio.Event()

    async def start(self) -> None:
        self._scope, self._ended = trio.CancelScope(), trio.Event()
        self.port = await self._nursery.start(self._run)

    async def _run(self, task_status: trio.TaskStatus[int]) -> None:
        with self._scope:
            async with trio.open_nursery() as nursery:
                server = Server(self.stream)
                [(_, port)] = await nursery.start(
                    server.run, open_listeners("127.0.0.1", self.port)
                )
                task_status.started(port)
        self._ended.set()

    async def stop(self) -> None:
        self._scope.cancel()
        await self._ended.wait()


@asynccontextmanager
async def nursery_for(patience: float = PATIENCE) -> AsyncIterator[trio.Nursery]:
    with trio.fail_after(patience):
        async with trio.open_nursery() as nursery:
            yield nursery
            nursery.cancel_scope.cancel()


async def serving(nursery: trio.Nursery, stream: DataStream) -> Running:
    server = Running(stream, nursery)
    await server.start()
    return server


class Rig:
    """A running relay."""

    def __init__(self, relay: Relay, port: int) -> None:
        self.relay = relay
        self.port = port
        self.scope = trio.CancelScope()
        self.ended = trio.Event()

    @property
    def stream(self) -> DataStream:
        assert self.relay.stream is not None
        return self.relay.stream

    async def has(self, total: int) -> None:
        """Returns when a client of the relay has been sent `total` entries."""
        async with (
            connect("127.0.0.1", self.port) as client,
            client.batches(stop=total, on_rollback=lambda rollback: None) as batches,
        ):
            async for _ in batches:
                pass

    async def stop(self) -> None:
        self.scope.cancel()
        await self.ended.wait()


async def relaying(
    nursery: trio.Nursery, path: Path, *ports: int | Upstream, **options: Any
) -> Rig:
    upstreams = [port if isinstance(port, Upstream) else ("127.0.0.1", port) for port in ports]
    relay = Relay(
        upstreams,
        path,
        **{
            "host": "127.0.0.1",
            "port": 0,
            "sync": "os",
            "index": "memory",
            "backoff": QUICK,
            "look_seconds": 0.01,
            **options,
        },
    )
    rig = Rig(relay, 0)

    async def run(task_status: trio.TaskStatus[list[tuple[str, int]]]) -> None:
        with rig.scope:
            await relay.run(task_status=task_status)
        rig.ended.set()

    [(_, rig.port)] = await nursery.start(run)
    return rig


async def until(condition: Callable[[], bool]) -> None:
    """Let others run until it is so."""
    while not condition():
        await trio.sleep(0.002)


# What it keeps.


@pytest.mark.parametrize("sync", ["os", "commit", 5])
async def test_a_new_file_becomes_the_upstreams_stream(
    tmp_path: Path, upstream: DataStream, sync: Any
) -> None:
    fill(upstream, 3000, size=900)
    async with nursery_for() as nursery:
        server = await serving(nursery, upstream)
        relay = await relaying(nursery, tmp_path / "relay.bin", server.port, sync=sync)
        await relay.has(3000)
        for _ in range(20):
            fill(upstream, 7)
        await relay.has(3140)
        assert contents(relay.stream) == contents(upstream)
        header = relay.stream.header
        assert (header.version, header.system_id, header.stream_type) == (2, 137, 1)
        assert header.total_length == upstream.header.total_length
        assert relay.stream.bookmark((3130).to_bytes(4, "big")) == 3130
        await until(lambda: relay.relay.lag == 0)
        await relay.stop()
    name = tmp_path / "relay.bin"
    with DataStream.open(name, read_only=True, index="memory") as kept:
        assert contents(kept) == contents(upstream)


async def test_entries_as_large_as_a_page(tmp_path: Path, upstream: DataStream) -> None:
    with upstream.atomic_op() as op:
        for number in range(12):
            op.add_entry(1, bytes([number]) * (1_048_559 if number % 3 else 100))
    async with nursery_for() as nursery:
        server = await serving(nursery, upstream)
        relay = await relaying(nursery, tmp_path / "relay.bin", server.port)
        await relay.has(12)
        assert contents(relay.stream) == contents(upstream)
        assert relay.stream.header == upstream.header


async def test_goes_on_in_the_middle(tmp_path: Path, upstream: DataStream) -> None:
    fill(upstream, 500)
    async with nursery_for() as nursery:
        server = await serving(nursery, upstream)
        relay = await relaying(nursery, tmp_path / "relay.bin", server.port)
        await relay.has(500)
        await relay.stop()
        fill(upstream, 500)
        again = await relaying(nursery, tmp_path / "relay.bin", server.port)
        await again.has(1000)
        assert contents(again.stream) == contents(upstream)


async def test_serves_while_the_upstream_is_gone(tmp_path: Path, upstream: DataStream) -> None:
    fill(upstream, 50)
    async with nursery_for() as nursery:
        server = await serving(nursery, upstream)
        relay = await relaying(nursery, tmp_path / "relay.bin", server.port)
        await relay.has(50)
        await server.stop()
        await until(lambda: relay.relay.current is None)
        await relay.has(50)
        assert relay.relay.lag is None
        await relay.stop()
        # And when it is started without one.
        alone = await relaying(nursery, tmp_path / "relay.bin", server.port)
        await alone.has(50)
        fill(upstream, 50)
        await server.start()
        await alone.has(100)
        assert contents(alone.stream) == contents(upstream)


async def test_waits_for_an_upstream_to_say_whose_stream_it_is(
    tmp_path: Path, upstream: DataStream
) -> None:
    fill(upstream, 50)
    async with nursery_for() as nursery:
        server = await serving(nursery, upstream)
        await server.stop()
        started = trio.Event()
        rigs = []

        async def begin() -> None:
            rigs.append(await relaying(nursery, tmp_path / "relay.bin", server.port))
            started.set()

        nursery.start_soon(begin)
        await trio.testing.wait_all_tasks_blocked()
        assert not started.is_set()
        await server.start()
        await started.wait()
        await rigs[0].has(50)


async def test_a_chain_of_relays(tmp_path: Path, upstream: DataStream) -> None:
    fill(upstream, 100)
    async with nursery_for() as nursery:
        port = (await serving(nursery, upstream)).port
        for hop in range(3):
            relay = await relaying(nursery, tmp_path / f"{hop}.bin", port)
            port = relay.port
        await relay.has(100)
        fill(upstream, 100)
        await relay.has(200)
        assert contents(relay.stream) == contents(upstream)


# Upstreams that change.


async def test_stops_where_the_upstream_was_cut_back(
    tmp_path: Path, upstream: DataStream, caplog: pytest.LogCaptureFixture
) -> None:
    fill(upstream, 100)
    async with nursery_for() as nursery:
        server = await serving(nursery, upstream)
        relay = await relaying(nursery, tmp_path / "relay.bin", server.port)
        await relay.has(100)
        upstream.truncate(60)
        await until(lambda: relay.relay.failure is not None)
        assert isinstance(relay.relay.failure, Behind)
        assert "holds 60 entries, and entries 60 to 99" in str(relay.relay.failure)
        fill(upstream, 100, salt=b"other")
        await relay.has(100)
        assert relay.stream.total_entries == 100
    assert "nothing is downloaded any more, 100 entries are served on" in caplog.text


async def test_stops_where_the_upstream_was_rewritten(tmp_path: Path, upstream: DataStream) -> None:
    fill(upstream, 100)
    async with nursery_for() as nursery:
        server = await serving(nursery, upstream)
        relay = await relaying(nursery, tmp_path / "relay.bin", server.port)
        await relay.has(100)
        await relay.stop()
        before = contents(relay_file := DataStream.open(tmp_path / "relay.bin", index="memory"))
        relay_file.close()
        upstream.truncate(99)
        fill(upstream, 10, salt=b"other")
        again = await relaying(nursery, tmp_path / "relay.bin", server.port)
        await until(lambda: again.relay.failure is not None)
        assert isinstance(again.relay.failure, Rewritten)
        assert again.relay.failure.first_differing == 99
        assert contents(again.stream) == before


@pytest.mark.parametrize("back_to", [0, 1, 40, 900, 999])
@pytest.mark.parametrize("more", [0, 5, 2000])
async def test_follows_the_upstream_back(
    tmp_path: Path, upstream: DataStream, back_to: int, more: int
) -> None:
    fill(upstream, 1000)
    async with nursery_for() as nursery:
        server = await serving(nursery, upstream)
        relay = await relaying(nursery, tmp_path / "r.bin", server.port, on_rewrite="follow")
        await relay.has(1000)
        await server.stop()
        upstream.truncate(back_to)
        if more:
            fill(upstream, more, salt=b"other")
        await server.start()
        await until(lambda: relay.stream.total_entries == upstream.total_entries)
        fill(upstream, 10)
        await relay.has(upstream.total_entries)
        assert contents(relay.stream) == contents(upstream)
        assert relay.relay.failure is None


async def test_entries_that_happen_to_be_the_same_do_not_mislead(
    tmp_path: Path, upstream: DataStream
) -> None:
    """Far behind the difference every second run of entries is the same again."""
    with new(tmp_path / "relay.bin") as ours:
        fill(ours, 200)
        for part in range(20):
            fill(ours, 100, salt=b"ours" if part % 2 else b"")
    fill(upstream, 200)
    for part in range(20):
        fill(upstream, 100, salt=b"theirs" if part % 2 else b"")
    async with nursery_for() as nursery:
        server = await serving(nursery, upstream)
        relay = await relaying(nursery, tmp_path / "relay.bin", server.port, on_rewrite="follow")
        await until(lambda: relay.stream.total_entries <= 301)
        fill(upstream, 10)
        await until(lambda: relay.stream.total_entries == 2210)
        assert contents(relay.stream) == contents(upstream)


async def test_a_client_is_ended_by_a_relay_that_goes_back(
    tmp_path: Path, upstream: DataStream
) -> None:
    fill(upstream, 100)
    async with nursery_for() as nursery:
        server = await serving(nursery, upstream)
        relay = await relaying(nursery, tmp_path / "r.bin", server.port, on_rewrite="follow")
        await relay.has(100)
        async with connect("127.0.0.1", relay.port) as client, client.entries() as entries:
            for _ in range(100):
                await entries.__anext__()
            upstream.truncate(51)
            fill(upstream, 10, salt=b"other")
            with pytest.raises(HistoryChanged) as caught:
                await entries.__anext__()
            assert caught.value.first_differing == 51


async def test_another_stream_is_never_followed(tmp_path: Path, upstream: DataStream) -> None:
    fill(upstream, 100)
    with new(tmp_path / "relay.bin", system_id=138) as ours:
        fill(ours, 10)
    async with nursery_for() as nursery:
        server = await serving(nursery, upstream)
        relay = await relaying(nursery, tmp_path / "relay.bin", server.port, on_rewrite="follow")
        await until(lambda: relay.relay.failure is not None)
        assert isinstance(relay.relay.failure, AnotherStream)
        assert "system id 137" in str(relay.relay.failure)
        assert relay.stream.total_entries == 10
        await relay.has(10)


# More than one upstream.


@contextmanager
def twin(path: Path, of: DataStream, count: int) -> Iterator[DataStream]:
    """Another stream with the first entries of this one."""
    with new(path) as made:
        with made.atomic_op() as op:
            for batch in of.batches(0, count):
                op.add_batch(batch)
        yield made


async def test_fails_over_and_goes_back(
    tmp_path: Path, upstream: DataStream, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    fill(upstream, 100)
    with twin(tmp_path / "second.bin", upstream, 100) as second:
        fill(second, 20)
        async with nursery_for() as nursery:
            one, two = await serving(nursery, upstream), await serving(nursery, second)
            relay = await relaying(nursery, tmp_path / "relay.bin", one.port, two.port)
            await relay.has(100)
            await one.stop()
            await relay.has(120)
            assert relay.relay.current is relay.relay.states[1]
            # There again, but with less than we have: that is no reason to go back.
            await one.start()
            await until(lambda: relay.relay.states[0].entries == 100)
            assert relay.relay.current is relay.relay.states[1]
            fill(upstream, 30)
            await until(lambda: relay.relay.current is relay.relay.states[0])
            await relay.has(130)
            assert contents(relay.stream) == contents(upstream)
    assert "is there again, going back to it" in caplog.text


async def test_waits_for_an_upstream_that_is_merely_behind(
    tmp_path: Path, upstream: DataStream, caplog: pytest.LogCaptureFixture
) -> None:
    fill(upstream, 100)
    with twin(tmp_path / "second.bin", upstream, 90) as second:
        async with nursery_for() as nursery:
            one, two = await serving(nursery, upstream), await serving(nursery, second)
            relay = await relaying(
                nursery, tmp_path / "relay.bin", one.port, two.port, on_rewrite="follow"
            )
            await relay.has(100)
            await one.stop()
            await until(lambda: relay.relay.states[1].behind_since is not None)
            assert relay.stream.total_entries == 100
            with second.atomic_op() as op:
                for batch in upstream.batches(90):
                    op.add_batch(batch)
            fill(second, 5)
            await relay.has(105)
            assert contents(relay.stream) == contents(second)
    assert "entries 90 to 99, which are here, are in doubt" in caplog.text


async def test_follows_one_that_stays_behind_when_patience_ends(
    tmp_path: Path, upstream: DataStream
) -> None:
    fill(upstream, 100)
    with twin(tmp_path / "second.bin", upstream, 90) as second:
        async with nursery_for() as nursery:
            one, two = await serving(nursery, upstream), await serving(nursery, second)
            relay = await relaying(
                nursery,
                tmp_path / "relay.bin",
                one.port,
                two.port,
                on_rewrite="follow",
                patience=0.05,
            )
            await relay.has(100)
            await one.stop()
            await until(lambda: relay.stream.total_entries == 90)
            assert contents(relay.stream) == contents(second)


async def test_another_stream_on_the_second_upstream(tmp_path: Path, upstream: DataStream) -> None:
    fill(upstream, 100)
    with new(tmp_path / "second.bin", system_id=9) as second:
        fill(second, 500)
        async with nursery_for() as nursery:
            one, two = await serving(nursery, upstream), await serving(nursery, second)
            relay = await relaying(nursery, tmp_path / "relay.bin", one.port, two.port)
            await relay.has(100)
            await one.stop()
            await until(lambda: relay.relay.states[1].set_aside is not None)
            assert relay.relay.failure is None
            fill(upstream, 1)
            await one.start()
            await relay.has(101)
            assert contents(relay.stream) == contents(upstream)


async def test_another_history_on_the_second_upstream(tmp_path: Path, upstream: DataStream) -> None:
    fill(upstream, 100)
    with twin(tmp_path / "second.bin", upstream, 95) as second:
        fill(second, 50, salt=b"other")
        async with nursery_for() as nursery:
            one, two = await serving(nursery, upstream), await serving(nursery, second)
            relay = await relaying(nursery, tmp_path / "relay.bin", one.port, two.port)
            await relay.has(100)
            await one.stop()
            await until(lambda: relay.relay.states[1].set_aside is not None)
            assert isinstance(relay.relay.states[1].set_aside, Rewritten)
            assert relay.stream.total_entries == 100


# Connections that go wrong.


@pytest.mark.parametrize("end", list(End))
@pytest.mark.parametrize("passes", [0, 30, 60, 107, 108, 400, 3000])
@pytest.mark.parametrize("piece", [1, 65536])
async def test_a_connection_that_is_cut_anywhere(
    tmp_path: Path, end: End, passes: int, piece: int
) -> None:
    entries = sample(120)
    stub = functools.partial(Stub, entries)
    cut = (stub, Fault(passes, end, piece))
    with FaultyServer((stub, NONE), cut, cut, (stub, NONE), (stub, NONE)) as server:
        async with nursery_for() as nursery:
            relay = await relaying(
                nursery,
                tmp_path / "relay.bin",
                server.port,
                look_seconds=1000,
                heartbeat=None,
                timeout=0.2 if end is End.HALF_OPEN and passes < 109 else 10.0,
            )
            if end is End.HALF_OPEN and passes >= 109:
                # Nobody says that it is gone; see the next test.
                await until(lambda: relay.relay.current is not None)
            else:
                await relay.has(120)
            assert contents(relay.stream) == [
                (e.number, e.type, e.data) for e in entries[: relay.stream.total_entries]
            ]


async def test_a_silent_upstream_is_told_from_a_quiet_one(tmp_path: Path) -> None:
    """It takes connections and says nothing on them; the next upstream has the rest."""
    entries = sample(120)
    silent = functools.partial(Stub, entries)
    half_open = Fault(600, End.HALF_OPEN)
    with (
        FaultyServer((silent, NONE), (silent, half_open)) as first,
        FaultyServer(*[(silent, NONE)] * 5) as second,
    ):
        async with nursery_for() as nursery:
            relay = await relaying(
                nursery,
                tmp_path / "relay.bin",
                first.port,
                second.port,
                look_seconds=1000,
                heartbeat=0.05,
                timeout=0.2,
            )
            await relay.has(120)
            assert relay.relay.current is relay.relay.states[1]


async def test_wrong_numbers_are_never_kept(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    good = sample(60)
    bad = [*good[:30], *good[31:]]
    plan = [(functools.partial(Stub, bad, header_total=59), NONE)] * 6
    with FaultyServer(*plan) as server:
        async with nursery_for() as nursery:
            relay = await relaying(
                nursery, tmp_path / "relay.bin", server.port, look_seconds=1000, timeout=0.1
            )
            await until(lambda: server.accepted == 6)
            await relay.has(30)
            assert contents(relay.stream) == [(e.number, e.type, e.data) for e in good[:30]]
    assert "bytes that are no entry" in caplog.text


# How it is begun and ended.


async def test_ends_in_good_order(tmp_path: Path, upstream: DataStream) -> None:
    fill(upstream, 100)
    async with nursery_for() as nursery:
        server = await serving(nursery, upstream)
        relay = await relaying(nursery, tmp_path / "relay.bin", server.port, sync="commit")
        await relay.has(100)
        assert await relay.relay.finish(1)
        await relay.ended.wait()
        assert relay.stream._file.closed


async def test_a_port_in_use_leaves_no_file(tmp_path: Path, upstream: DataStream) -> None:
    async with nursery_for() as nursery:
        server = await serving(nursery, upstream)
        with pytest.raises(ListenFailed):
            await Relay(
                [("127.0.0.1", server.port)],
                tmp_path / "relay.bin",
                host="127.0.0.1",
                port=server.port,
            ).run()
    assert not (tmp_path / "relay.bin").exists()


def test_wrong_usage(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="needs a server"):
        Relay([], tmp_path / "r")
    with pytest.raises(UsageError, match="on_rewrite"):
        Relay([("a", 1)], tmp_path / "r", on_rewrite="go")  # type: ignore[arg-type]


def test_for_synchronous_code(tmp_path: Path) -> None:
    with StreamServer(
        tmp_path / "a.bin", host="127.0.0.1", port=0, sync="os", in_process=True
    ) as server:
        fill(server.stream, 100)
        with BlockingRelay(
            [("127.0.0.1", server.port)],
            tmp_path / "b.bin",
            host="127.0.0.1",
            port=0,
            sync="os",
        ) as relay:
            with BlockingClient("127.0.0.1", relay.port) as client:
                numbers = [entry.number for entry in client.entries(stop=100)]
            assert numbers == list(range(100))
            assert relay.total_entries == 100
            assert relay.failure is None
        with pytest.raises(ListenFailed):
            BlockingRelay(
                [("127.0.0.1", server.port)], tmp_path / "c.bin", host="127.0.0.1", port=server.port
            )
