"""A relay commits where its upstream's commits end, whatever happens to the connection."""

from __future__ import annotations

import contextlib
import functools
import logging
import tempfile
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trio
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from datastreamer.client.trio_driver import connect
from datastreamer.errors import StreamFileError
from datastreamer.relay import truncation_point as truncation_module
from datastreamer.relay import writer
from datastreamer.relay.relay import Relay
from datastreamer.relay.truncation_point import truncation_point
from datastreamer.storage.parts import ChangeBegins, ChangeEnds
from datastreamer.storage.stream import DataStream
from tests.network.proxy import NONE, FaultyServer
from tests.network.stub import Stub, sample
from tests.relay.relaying import QUICK, Rig, Wire, contents, new, nursery_for, serving

MIB = 1 << 20


class Watched(Relay):
    """A relay that notes to where each of its commits goes, and each of its cuts."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.seen: list[int] = []
        self.cuts: list[int] = []

    async def _open(self) -> DataStream:
        stream = await super()._open()

        def before_commit() -> None:
            self.seen.append(stream.atomic_op().next_number)

        def on_change(event: ChangeBegins | ChangeEnds) -> None:
            if event.stop is None and isinstance(event, ChangeEnds):
                self.cuts.append(event.start)

        stream.commit_guard = before_commit
        stream.parts.feed.subscribe(on_change)
        return stream


async def watching(
    nursery: trio.Nursery,
    path: Path,
    *ports: int,
    made: type[Watched] | None = None,
    on_rewrite: str = "stop",
    **options: Any,
) -> tuple[Rig, Watched]:
    relay = (made or Watched)(
        [("127.0.0.1", port) for port in ports],
        path,
        **{
            "host": "127.0.0.1",
            "port": 0,
            "sync": "os",
            "index": "memory",
            "backoff": QUICK,
            "look_seconds": 1000,
            "heartbeat": None,
            "on_rewrite": on_rewrite,
            **options,
        },
    )
    rig = Rig(relay, 0)

    async def run(task_status: trio.TaskStatus[list[tuple[str, int]]]) -> None:
        with rig.scope:
            await relay.run(task_status=task_status)
        rig.ended.set()

    [(_, rig.port)] = await nursery.start(run)
    return rig, relay


@asynccontextmanager
async def observing(port: int, path: Path) -> AsyncIterator[set[int]]:
    """The totals that a client hears from Header and BatchRead, and a follower sees."""
    totals: set[int] = set()

    async def ask() -> None:
        with DataStream.open(path, follow=True, index="memory") as follower:
            while True:
                with contextlib.suppress(Exception):
                    async with connect("127.0.0.1", port, resume=False) as client:
                        while True:
                            totals.add((await client.header()).total_entries)
                            await client.batch_read(0, max_count=1, confirmed=False)
                            assert client.total_entries is not None
                            totals.add(client.total_entries)
                            follower.refresh()
                            totals.add(follower.total_entries)
                await trio.lowlevel.checkpoint()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(ask)
        yield totals
        nursery.cancel_scope.cancel()


class Source:
    """The upstream's stream, and where each of its commits ended."""

    def __init__(self, stream: DataStream) -> None:
        self.stream = stream
        self.ends = {0}

    def commit(self, sizes: Sequence[int], salt: bytes = b"") -> None:
        with self.stream.atomic_op() as op:
            for at, size in enumerate(sizes):
                number = op.next_number
                if at == 0:
                    op.add_bookmark(salt + number.to_bytes(8, "big"))
                else:
                    op.add_entry(1 + number % 3, (salt + number.to_bytes(8, "big")).ljust(size))
        self.ends.add(self.stream.total_entries)


@pytest.fixture
def source(tmp_path: Path) -> Iterator[Source]:
    with new(tmp_path / "upstream.bin") as made:
        yield Source(made)


# Operations of all sizes.


@pytest.mark.parametrize("sync", ["os", "commit"])
async def test_operations_are_seen_whole(tmp_path: Path, source: Source, sync: str) -> None:
    """Those that were there and those that come, small and large."""
    source.commit([500] * 60_000)
    async with nursery_for() as nursery:
        server = await serving(nursery, source.stream)
        rig, relay = await watching(nursery, tmp_path / "relay.bin", server.port, sync=sync)
        async with observing(rig.port, tmp_path / "relay.bin") as totals:
            await rig.has(source.stream.total_entries)
            for sizes in ([10] * 3, [1_000_000] * 12, [300] * 1000, [40]):
                source.commit(sizes)
                await rig.has(source.stream.total_entries)
            for _ in range(50):
                source.commit([200] * 5)
                await trio.lowlevel.checkpoint()
            await rig.has(source.stream.total_entries)
        assert contents(rig.stream) == contents(source.stream)
    assert set(relay.seen) | totals <= source.ends
    assert relay.seen[0] == 60_000
    assert totals


async def test_a_chain_reports_the_same_commits(tmp_path: Path, source: Source) -> None:
    async with nursery_for() as nursery:
        port = (await serving(nursery, source.stream)).port
        relays, observed = [], []
        async with contextlib.AsyncExitStack() as stack:
            for hop in range(2):
                rig, relay = await watching(nursery, tmp_path / f"{hop}.bin", port)
                relays.append(relay)
                path = tmp_path / f"{hop}.bin"
                observed.append(await stack.enter_async_context(observing(rig.port, path)))
                port = rig.port
            for part in range(30):
                source.commit([1 + part * 4000] * (1 + part % 7))
                await trio.lowlevel.checkpoint()
            await rig.has(source.stream.total_entries)
        assert contents(rig.stream) == contents(source.stream)
    for relay, totals in zip(relays, observed, strict=True):
        assert set(relay.seen) | totals <= source.ends


# Cuts and restarts.

small = st.lists(st.integers(8, 300), min_size=1, max_size=6)
large = st.lists(st.sampled_from([8, 5_000, 40_000, 300_000]), min_size=1, max_size=12)
operation = small | large
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("commit"), operation),
        st.tuples(st.just("commits"), st.lists(operation, max_size=5)),
        st.tuples(st.just("cut"), st.lists(st.integers(0, 200_000), min_size=1, max_size=2)),
        st.tuples(st.just("upstream"), st.none()),
        st.tuples(st.just("relay"), st.none()),
        st.tuples(st.just("chained"), st.none()),
        st.tuples(st.just("wait"), st.none()),
        st.tuples(st.just("truncate"), st.floats(0, 1)),
    ),
    min_size=1,
    max_size=10,
)


async def play(folder: Path, steps: Sequence[tuple[str, Any]], sync: str) -> None:
    """No two operations begin with the same entry, so that each history differs from the others
    where an operation begins."""
    truncates = any(what == "truncate" for what, _ in steps)
    policy: dict[str, Any] = {"on_rewrite": "follow" if truncates else "stop", "sync": sync}
    seen: list[Watched] = []
    with new(folder / "upstream.bin") as stream:
        source = Source(stream)
        async with nursery_for() as nursery:
            server = await serving(nursery, stream)
            wire = Wire(server.port)
            await nursery.start(wire.run)

            async def start(name: str, port: int) -> Rig:
                rig, relay = await watching(nursery, folder / name, port, **policy)
                seen.append(relay)
                return rig

            first = await start("first.bin", wire.port)
            second_wire = Wire(first.port)
            await nursery.start(second_wire.run)
            second = await start("second.bin", second_wire.port)
            for salt, (what, value) in enumerate(steps):
                if what == "commit":
                    source.commit(value, salt.to_bytes(2, "big"))
                elif what == "commits":
                    for sizes in value:
                        source.commit(sizes, salt.to_bytes(2, "big"))
                elif what == "cut":
                    wire.cuts += value
                    second_wire.cuts += value
                    await server.stop()
                    await server.start()
                elif what == "upstream":
                    await server.stop()
                    await server.start()
                elif what == "relay":
                    await first.stop()
                    first = await start("first.bin", wire.port)
                    second_wire.upstream = first.port
                elif what == "chained":
                    await second.stop()
                    second = await start("second.bin", second_wire.port)
                elif what == "wait":
                    await first.has(stream.total_entries)
                elif stream.total_entries:
                    ends = sorted(end for end in source.ends if end < stream.total_entries)
                    stream.truncate(ends[int(value * (len(ends) - 1))])
                await trio.lowlevel.checkpoint()
            # More than there ever were: a relay with that many has truncated where the source did.
            source.commit([8] * (1 + max(source.ends) - stream.total_entries), b"last")
            await second.has(stream.total_entries)
            assert contents(second.stream) == contents(stream)
            assert contents(first.stream) == contents(stream)
    for relay in seen:
        assert set(relay.seen) <= source.ends, (relay.seen, source.ends)


@settings(
    max_examples=25,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(steps=STEPS, sync=st.sampled_from(["os", "commit"]))
def test_whatever_happens_every_commit_is_one_of_the_upstreams(
    steps: list[tuple[str, Any]], sync: str
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        trio.run(play, Path(folder), steps, sync)


@pytest.mark.parametrize("restarted", [False, True])
async def test_a_relay_that_follows_goes_back_to_the_end_of_a_commit(
    tmp_path: Path, source: Source, restarted: bool
) -> None:
    """Though more entries are the same; where it was started anew, by the bookmark."""
    source.commit([8] * 5)
    async with nursery_for() as nursery:
        server = await serving(nursery, source.stream)
        path = tmp_path / "relay.bin"
        rig, relay = await watching(nursery, path, server.port, on_rewrite="follow")
        await rig.has(5)
        source.commit([8] * 5)
        await rig.has(10)
        if restarted:
            await rig.stop()
        await server.stop()
        source.stream.truncate(5)
        # Bookmark and first event are as they were.
        source.commit([8, 8, 100, 8, 8, 8])
        await server.start()
        if restarted:
            rig, relay = await watching(nursery, path, server.port, on_rewrite="follow")
        await rig.has(11)
        assert contents(rig.stream) == contents(source.stream)
    assert relay.cuts == [5]
    assert relay.seen[-1] == 11


def test_where_a_file_is_truncated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """To a commit's end that is near, else to before a bookmark that is, else where it differs."""
    with new(tmp_path / "stream.bin") as stream:
        with stream.atomic_op() as op:
            op.add_entries(1, [b"no bookmark"] * 1000)
        assert truncation_point(stream.reader, 700, []) == 700
        assert truncation_point(stream.reader, 700, [1, 600]) == 600
        with stream.atomic_op() as op:
            op.add_bookmark(b"block")
            op.add_entries(1, [bytes(1000)] * 2000)
        for common in (1000, 1001, 1300, 3000):
            assert truncation_point(stream.reader, common, []) == 1000
            assert truncation_point(stream.reader, common, [20]) == 20
        assert truncation_point(stream.reader, 999, []) == 999
        assert truncation_point(stream.reader, 0, []) == 0
        monkeypatch.setattr(truncation_module, "MAX_EXTRA_BYTES", MIB)
        assert truncation_point(stream.reader, 1300, [20]) == 20
        assert truncation_point(stream.reader, 2020, [20]) == 1000
        assert truncation_point(stream.reader, 3000, [20]) == 3000


# A long backlog, which clients are not to wait for.


async def test_a_long_backlog_is_shown_as_it_comes(
    tmp_path: Path, source: Source, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In parts that end before a bookmark; what comes later, however long, is seen whole."""
    monkeypatch.setattr(writer, "BACKLOG_BYTES", 2 * MIB)
    for _ in range(400):
        source.commit([200] * 200)
    async with nursery_for() as nursery:
        server = await serving(nursery, source.stream)
        rig, relay = await watching(nursery, tmp_path / "relay.bin", server.port)
        await rig.has(source.stream.total_entries)
        parts = len(relay.seen)
        with source.stream.atomic_op() as op:
            for _ in range(30_000):
                op.add_bookmark(op.next_number.to_bytes(8, "big"))
                op.add_entry(1, bytes(200))
        await rig.has(source.stream.total_entries)
        assert contents(rig.stream) == contents(source.stream)
    assert set(relay.seen[:parts]) <= source.ends
    assert 3 <= parts <= 9
    assert relay.seen[parts:] == [source.stream.total_entries]


async def test_a_long_backlog_without_bookmarks(
    tmp_path: Path, source: Source, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer, "BACKLOG_BYTES", 1 * MIB)
    monkeypatch.setattr(writer, "UNMARKED_BYTES", 4 * MIB)
    with source.stream.atomic_op() as op:
        op.add_entries(1, [bytes(1000)] * 16_000)
    async with nursery_for() as nursery:
        server = await serving(nursery, source.stream)
        rig, relay = await watching(nursery, tmp_path / "relay.bin", server.port)
        await rig.has(16_000)
        assert contents(rig.stream) == contents(source.stream)
    assert 3 <= len(relay.seen) <= 5


@pytest.mark.parametrize("there", [0, 5])
async def test_what_comes_after_the_backlog_is_seen_whole(
    tmp_path: Path, source: Source, monkeypatch: pytest.MonkeyPatch, there: int
) -> None:
    """Also where there was none: a relay that joins at the end."""
    monkeypatch.setattr(writer, "BACKLOG_BYTES", 2 * MIB)
    monkeypatch.setattr(writer, "UNMARKED_BYTES", 4 * MIB)
    if there:
        source.commit([8] * there)
    async with nursery_for() as nursery:
        server = await serving(nursery, source.stream)
        rig, relay = await watching(nursery, tmp_path / "relay.bin", server.port)
        await rig.has(there)
        await rig.stop()
        rig, relay = await watching(nursery, tmp_path / "relay.bin", server.port)
        await relay.until(lambda: relay.caught_up)
        with source.stream.atomic_op() as op:
            for _ in range(40_000):
                op.add_bookmark(op.next_number.to_bytes(8, "big"))
                op.add_entry(1, bytes(200))
        await rig.has(source.stream.total_entries)
    assert relay.seen == [source.stream.total_entries]


# What fails.


async def test_what_fails_after_each_join_is_said_once(
    tmp_path: Path, source: Source, caplog: pytest.LogCaptureFixture
) -> None:
    """A disk that is full, say: the upstream is there, and nothing of it can be kept."""
    caplog.set_level(logging.INFO)
    tries = 0

    class Full(Watched):
        async def _open(self) -> DataStream:
            stream = await super()._open()
            noted = stream.commit_guard

            def before_commit() -> None:
                nonlocal tries
                tries += 1
                if 2 <= tries <= 6:
                    raise StreamFileError("relay.bin", "the disk is full")
                assert noted is not None
                noted()

            stream.commit_guard = before_commit
            return stream

    source.commit([8] * 5)
    async with nursery_for() as nursery:
        server = await serving(nursery, source.stream)
        path = tmp_path / "relay.bin"
        rig, relay = await watching(nursery, path, server.port, made=Full)
        await rig.has(5)
        await relay.until(lambda: relay.caught_up)
        source.commit([8] * 5)
        await rig.has(10)
        await relay.until(lambda: relay.caught_up)
    assert relay.seen == [5, 10]
    said = [record.getMessage() for record in caplog.records if ".relay." in record.name]
    name = f"127.0.0.1:{server.port}"
    assert said == [
        f"relaying from {name}: next entry 0, the upstream holds 5",
        f"caught up with {name} at entry 5",
        f"{name}: relay.bin: the disk is full",
        f"relaying from {name}: next entry 5, the upstream holds 10",
        f"caught up with {name} at entry 10",
    ]


async def test_an_upstream_without_entries_is_not_caught_up_with(
    tmp_path: Path, source: Source, caplog: pytest.LogCaptureFixture
) -> None:
    """It may be a relay that is catching up itself."""
    caplog.set_level(logging.INFO)
    async with nursery_for() as nursery:
        server = await serving(nursery, source.stream)
        rig, relay = await watching(nursery, tmp_path / "relay.bin", server.port)
        await relay.until(lambda: relay.caught_up)
        source.commit([8] * 5)
        await rig.has(5)
    assert "caught up with" not in caplog.text


# Upstreams that report no ends of commits.


@pytest.mark.parametrize("extensions", ["known", "refused", "closed"])
async def test_an_upstream_without_reports_is_relayed_as_it_comes(
    tmp_path: Path, extensions: str
) -> None:
    entries = sample(120)
    stub = functools.partial(Stub, entries, extensions=extensions)
    with FaultyServer(*[(stub, NONE)] * 9) as server:
        async with nursery_for() as nursery:
            rig, _ = await watching(nursery, tmp_path / "relay.bin", server.port)
            await rig.has(120)
            assert contents(rig.stream) == [(e.number, e.type, e.data) for e in entries]
