"""A relay: what it keeps and serves, and connections that go wrong."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing

from datastreamer.client.blocking_client import BlockingClient
from datastreamer.client.upstream import Upstream
from datastreamer.errors import FileMissing, ListenFailed, UsageError
from datastreamer.protocol.commands import HeaderQuery
from datastreamer.relay import upstreams as download_module
from datastreamer.relay.relay import Relay
from datastreamer.service.blocking_relay import BlockingRelay
from datastreamer.service.embedded import StreamServer
from datastreamer.storage.stream import DataStream
from datastreamer.transport.listeners import open_listeners
from tests.network.proxy import NONE, End, Fault, FaultyServer
from tests.network.stub import Stub, sample
from tests.relay.relaying import (
    QUICK,
    contents,
    fill,
    new,
    nursery_for,
    packed,
    relaying,
    serving,
)


@pytest.fixture
def upstream(tmp_path: Path) -> Iterator[DataStream]:
    with new(tmp_path / "upstream.bin") as made:
        yield made


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
        await relay.relay.until(lambda: relay.relay.lag == 0)
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


async def test_continues_in_the_middle(tmp_path: Path, upstream: DataStream) -> None:
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


async def test_serves_while_the_upstream_is_lost(tmp_path: Path, upstream: DataStream) -> None:
    fill(upstream, 50)
    async with nursery_for() as nursery:
        server = await serving(nursery, upstream)
        relay = await relaying(nursery, tmp_path / "relay.bin", server.port)
        await relay.has(50)
        await server.stop()
        await relay.relay.until(lambda: relay.download.current is None)
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


async def test_a_name_that_no_host_can_have_is_an_upstream_that_is_not_there(
    tmp_path: Path, upstream: DataStream
) -> None:
    fill(upstream, 50)
    async with nursery_for() as nursery:
        server = await serving(nursery, upstream)
        absent = Upstream("a..b")
        relay = await relaying(nursery, tmp_path / "relay.bin", absent, server.port)
        await relay.has(50)
        assert relay.download.states[0].lost.startswith("cannot connect to a..b:6900: ")


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


# Connections that go wrong.


@pytest.mark.parametrize("end", list(End))
@pytest.mark.parametrize("passes", [0, 30, 49, 50, 108, 168, 217, 218, 219, 400, 3000])
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
                timeout=0.2 if end is End.HALF_OPEN else 10.0,
            )
            if end is End.HALF_OPEN:
                await relay.relay.until(lambda: relay.download.current is not None)
            # If it has joined on the first connection that is cut, nothing reports that this one
            # has died; see the next test.
            if end is not End.HALF_OPEN or server.accepted > 3:
                await relay.has(120)
            assert contents(relay.stream) == [
                (e.number, e.type, e.data) for e in entries[: relay.stream.total_entries]
            ]


@pytest.mark.parametrize("then", ["gone", "frozen"])
async def test_a_silent_upstream_is_distinguished_from_a_quiet_one(
    tmp_path: Path, then: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It says nothing any more; the next upstream has the rest. Where it continues to take
    connections, and answers none, that it takes long to find out is no sign that all is well."""
    monkeypatch.setattr(download_module, "_STEADY_SECONDS", 0.05)
    entries = sample(120)
    good = functools.partial(Stub, entries)
    frozen = functools.partial(Stub, entries, deaf=(HeaderQuery,))
    half_open = Fault(600, End.HALF_OPEN)
    after = [(frozen, NONE)] * 100 if then == "frozen" else []
    with (
        FaultyServer((good, NONE), (good, half_open), *after) as first,
        FaultyServer(*[(good, NONE)] * 5) as second,
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
            assert relay.download.current is relay.download.states[1]


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
            await relay.relay.until(lambda: server.accepted == 6)
            await relay.has(30)
            assert contents(relay.stream) == [(e.number, e.type, e.data) for e in good[:30]]
    assert "an invalid entry" in caplog.text


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
        assert await relay.relay.finish(1)


async def test_one_that_was_ended_before_it_began_does_not_begin(
    tmp_path: Path, upstream: DataStream
) -> None:
    async with nursery_for() as nursery:
        server = await serving(nursery, upstream)
        relay = Relay([("127.0.0.1", server.port)], tmp_path / "relay.bin", port=0)
        for grace in (-1, math.nan, "1"):
            with pytest.raises(UsageError, match="grace must be 0 seconds or more"):
                await relay.finish(grace)  # type: ignore[arg-type]
        assert await relay.finish()
        with pytest.raises(UsageError, match="this relay was finished"):
            await relay.run()
        assert not (tmp_path / "relay.bin").exists()


async def test_one_that_is_ended_while_it_waits_for_an_upstream_serves_no_client(
    tmp_path: Path, upstream: DataStream
) -> None:
    async with nursery_for() as nursery:
        server = await serving(nursery, upstream)
        relay = Relay(
            [Upstream("a..b"), ("127.0.0.1", server.port)], tmp_path / "relay.bin", port=0
        )

        async def ended() -> None:
            await relay.until(lambda: relay.download.states[0].lost)
            assert await relay.finish()

        nursery.start_soon(ended)
        with pytest.raises(UsageError, match="this relay was finished"):
            await relay.run()
        assert relay.server is None


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


@pytest.mark.parametrize("listening", ["127.0.0.1", None, "unix"])
@pytest.mark.parametrize("begun", [False, True])
async def test_a_relay_is_no_upstream_of_its_own(
    tmp_path: Path, upstream: DataStream, listening: str | None, begun: bool
) -> None:
    # All relays may have the same list of upstreams. One that took itself for an upstream would
    # always have caught up with it, and never ask those behind it.
    path = tmp_path / "relay.bin"
    if begun:
        with new(path):
            pass
    unix = tmp_path / "r" if listening == "unix" else None
    listeners = open_listeners(None if unix else listening, None if unix else 0, unix)
    itself = f"unix:{unix}" if unix else "127.0.0.1"
    fill(upstream, 50)
    async with nursery_for() as nursery:
        server = await serving(nursery, upstream)
        relay = Relay(
            [(itself, 1 if unix else listeners[0].getsockname()[1]), ("127.0.0.1", server.port)],
            path,
            sync="os",
            index="memory",
            backoff=QUICK,
            look_seconds=0.01,
        )
        nursery.start_soon(relay.run, listeners)
        await relay.until(lambda: relay.caught_up)
        own, other = relay.download.states
        assert relay.download.current is other
        assert "is this relay itself" in own.lost
        # It is used as little when the other is lost.
        await server.stop()
        await relay.until(lambda: bool(other.lost))
        assert relay.download.current is None
        fill(upstream, 50)
        await server.start()
        assert relay.stream is not None
        await relay.until(lambda: packed(relay.stream) == packed(upstream))  # type: ignore[arg-type]


async def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    # No upstream has to be asked for that.
    with pytest.raises(FileMissing, match="no such folder"):
        await Relay([("127.0.0.1", 1)], tmp_path / "none" / "r", host="127.0.0.1", port=0).run()


def test_wrong_usage(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"127\.0\.0\.1:1 is given 2 times"):
        Relay([("127.0.0.1", 1), ("b", 1), ("127.0.0.1", 1)], tmp_path / "r")
    with pytest.raises(UsageError, match=r"^upstreams is a list such as .*, not .host:6900.$"):
        Relay("host:6900", tmp_path / "r")  # type: ignore[arg-type]
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
            assert repr(relay).endswith(f"b.bin': on 127.0.0.1:{relay.port}>")
        assert repr(relay).endswith("b.bin': closed>")
        with pytest.raises(ListenFailed):
            BlockingRelay(
                [("127.0.0.1", server.port)], tmp_path / "c.bin", host="127.0.0.1", port=server.port
            )
