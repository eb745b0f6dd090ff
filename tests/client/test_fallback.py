"""A call's second way: a server without extensions. Each option holds, or is refused by name."""

from __future__ import annotations

import inspect
import logging
import math
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import pytest
import trio
import trio.testing

from datastreamer._codec import Entry
from datastreamer.client.base import ClientBase
from datastreamer.client.blocking_client import BlockingClient
from datastreamer.errors import (
    BadFromEntry,
    NotSupported,
    StreamClosed,
    UnknownEntry,
    UsageError,
)
from datastreamer.position import Position
from datastreamer.protocol.commands import (
    BatchQuery,
    CapabilitiesQuery,
    EntryQuery,
    HeaderQuery,
    RangeQuery,
)
from datastreamer.protocol.server import Event
from datastreamer.selection.clauses import Where
from tests.client.test_batch_reads import HUNDRED, SOON, Trio, asked, kinds, opened
from tests.client.test_faults import client_behind
from tests.network.fixtures import PATIENCE, until
from tests.network.proxy import NONE
from tests.network.stub import Filtering, Stub, StubServer, handler, is_wanted, key
from tests.network.wired import client_of, commands

SIZES = [len(entry.pack()) for entry in HUNDRED]


def old(**options: Any) -> Stub:
    return Stub(HUNDRED, extensions="refused", **options)


# The wait for a commit.


class Clocked(Stub):
    """Notes when queries of entries arrived, on Trio's clock."""

    def answer(self, event: Event) -> bytes:
        if isinstance(event, EntryQuery):
            self.times = [*getattr(self, "times", []), trio.current_time()]
        return super().answer(event)


async def test_a_wait_at_an_old_server_is_a_query_now_and_then(
    autojump_clock: trio.testing.MockClock,
) -> None:
    stub = Clocked(HUNDRED, extensions="refused")
    async with client_of(stub) as (client, _):
        await client.capabilities()
        for call in range(3):
            began, before = trio.current_time(), len(commands(stub))
            stub.times = []
            batch = await client.batch_read(100, wait=5)
            assert (len(batch), batch.first_number, batch.next_number) == (0, 100, 100)
            assert trio.current_time() - began == pytest.approx(5)
            # A call that continues the wait of the last one begins with a pause.
            times = ([] if call else [0.0]) + [0.02, 0.06, 0.14, 0.3, 0.62, 1.26, 2.26, 3.26, 4.26]
            assert [at - began for at in stub.times] == pytest.approx(times)
            assert len(times) <= 10
            # At the end the total is requested: the entry may be there, or the stream be shorter.
            queries = commands(stub)[before:]
            assert isinstance(queries[-1], HeaderQuery)
            assert len(queries) == len(times) + 1
        assert len(await client.batch_read(100, wait=0)) == 0


async def test_a_commit_in_the_last_moment_of_the_wait(
    autojump_clock: trio.testing.MockClock,
) -> None:
    stub = old()
    async with client_of(stub) as (client, _), trio.open_nursery() as nursery:

        async def commit() -> None:
            await trio.sleep(4.9)
            stub.append(Entry(100, 1, b"late"))

        nursery.start_soon(commit)
        assert list(await client.batch_read(100, wait=5)) == [Entry(100, 1, b"late")]
        assert trio.current_time() == pytest.approx(5, abs=0.1)


async def test_a_truncation_during_the_wait(autojump_clock: trio.testing.MockClock) -> None:
    for confirmed, error in ((True, UnknownEntry), (False, BadFromEntry)):
        stub = old()
        async with client_of(stub) as (client, _), trio.open_nursery() as nursery:

            async def truncate(stub: Stub = stub) -> None:
                await trio.sleep(1)
                del stub.entries[50:]

            nursery.start_soon(truncate)
            with pytest.raises(error):
                await client.batch_read(100, wait=5, confirmed=confirmed)


@kinds
@pytest.mark.parametrize("confirmed", [True, False])
async def test_a_commit_ends_the_wait(kind: str, confirmed: bool) -> None:
    stub = old()
    got: list[Entry] = []
    with StubServer(handler(stub)) as server:
        async with opened(kind, server.port, timeout=1) as client:
            began = trio.current_time()

            async def poll() -> None:
                got.extend(await client.batch_read(100, wait=PATIENCE, confirmed=confirmed))

            async with trio.open_nursery() as nursery:
                nursery.start_soon(poll)
                await until(lambda: asked([stub], EntryQuery) >= 2)
                stub.entries.extend([Entry(100, 1, b"one"), Entry(101, 2, b"two")])
            assert got[0] == Entry(100, 1, b"one")
            assert trio.current_time() - began < PATIENCE / 2
            assert list(await client.batch_read(100)) == stub.entries[100:]


@kinds
@pytest.mark.parametrize("server", ["old", "batches"])
async def test_a_wait_for_some_types_goes_on_at_others(kind: str, server: str) -> None:
    """From the wait's first entry on, as from a server that filters."""
    stub = old() if server == "old" else Stub(HUNDRED)
    stub.commits = iter([[Entry(100, 1, b"")], [Entry(101, 2, b"")], [Entry(102, 3, b"it")]])
    if server == "old":
        real = stub.answer

        def answer(event: Event) -> bytes:
            if isinstance(event, EntryQuery) and event.number == len(stub.entries):
                stub.entries.extend(next(stub.commits, ()))
            return real(event)

        stub.answer = answer  # type: ignore[method-assign]
    with StubServer(handler(stub)) as listening:
        async with opened(kind, listening.port) as client:
            batch = await client.batch_read(100, wait=PATIENCE, types=[3])
            assert list(batch) == [Entry(102, 3, b"it")]
            assert (batch.first_number, batch.next_number) == (100, 103)
            batch = await client.batch_read(100, wait=0.1, types=[77])
            assert (len(batch), batch.first_number, batch.next_number) == (0, 100, 103)


async def during(client: Trio, stub: Stub, act: Callable[[], Awaitable[Any]]) -> Any:
    """What a wait gives that `act` ends, and after how many seconds."""
    outcome: list[Any] = []
    ended: list[float] = []

    async def poll() -> None:
        try:
            outcome.append(await client.batch_read(100, wait=600))
        except StreamClosed as error:
            outcome.append(error)
        ended.append(trio.current_time())

    async with trio.open_nursery() as nursery:
        nursery.start_soon(poll)
        await until(lambda: asked([stub], EntryQuery) >= 6 or asked([stub], BatchQuery) >= 1)
        await trio.sleep(0.1)
        began = trio.current_time()
        await act()
    assert ended[0] - began < 1
    return outcome[0]


@kinds
@pytest.mark.parametrize("server", ["old", "batches"])
async def test_stop_ends_the_wait_at_once(kind: str, server: str) -> None:
    """Whether the server waits itself or not; also if it never answers again."""
    stubs = [old() if server == "old" else Stub(HUNDRED, deaf=(BatchQuery,)) for _ in range(3)]
    with StubServer(*map(handler, stubs)) as listening:
        async with opened(kind, listening.port, backoff=SOON) as client:

            async def stop() -> None:
                stubs[0].deaf = (EntryQuery, HeaderQuery, BatchQuery)
                await client.stop()

            batch = await during(client, stubs[0], stop)
            assert (len(batch), batch.first_number, batch.next_number) == (0, 100, 100)
            assert await client.entry(7) == HUNDRED[7]
            # There is nothing to stop, now and later.
            await client.stop()
            if server == "old":
                assert len(await client.batch_read(100, wait=0.1)) == 0


@kinds
async def test_closing_ends_the_wait_at_once(kind: str) -> None:
    stub = old()
    with StubServer(handler(stub)) as listening:
        async with opened(kind, listening.port) as client:
            close = client.close if kind == "blocking" else client.aclose
            assert isinstance(await during(client, stub, close), StreamClosed)


async def test_cancellation_ends_the_wait_at_once(autojump_clock: trio.testing.MockClock) -> None:
    stub = old()
    async with client_of(stub) as (client, wire):
        with trio.move_on_after(0.5) as scope:
            await client.batch_read(100, wait=600)
        assert scope.cancelled_caught
        assert trio.current_time() == pytest.approx(0.5)
        # Between two queries it costs nothing, not even the connection.
        assert await client.entry(7) == HUNDRED[7]
        assert wire.connections == 1


async def test_a_wait_survives_lost_connections(autojump_clock: trio.testing.MockClock) -> None:
    class Short(Stub):
        def answer(self, event: Event) -> bytes:
            self.closed = sum(isinstance(e, EntryQuery) for e in self.seen) > 3
            return b"" if self.closed else super().answer(event)

    plan = [(Short(HUNDRED, extensions="refused"), NONE) for _ in range(3)]
    last = old()
    async with (
        client_behind(*plan, (last, NONE)) as (client, _),
        trio.open_nursery() as nursery,
    ):

        async def commit() -> None:
            await trio.sleep(5)
            last.append(Entry(100, 1, b"one"))

        nursery.start_soon(commit)
        assert list(await client.batch_read(100, wait=600)) == [Entry(100, 1, b"one")]
        assert asked([last], EntryQuery) > 1


@pytest.mark.parametrize("extensions", ["known", "refused"])
async def test_the_last_entries_are_those_of_the_total(extensions: str) -> None:
    """Not what is committed after the total was sent."""

    class Growing(Stub):
        def answer(self, event: Event) -> bytes:
            sent = super().answer(event)
            if isinstance(event, HeaderQuery):
                self.append(Entry(len(self.entries), 1, b"more"))
            return sent

    stub = Growing(HUNDRED, extensions=extensions)
    async with client_of(stub) as (client, _):
        assert list(await client.batch_read(-3)) == HUNDRED[97:]
        batch = await client.batch_read(-3)
        assert batch.next_number == len(stub.entries) - 1


# What is logged.


@kinds
@pytest.mark.parametrize("forced", [False, True])
async def test_single_entries_are_reported_once_a_server(
    kind: str, forced: bool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "datastreamer")
    with StubServer(handler(old())) as server:
        async with opened(kind, server.port, batch_reads=not forced) as client:
            for number in range(5):
                assert list(await client.batch_read(number, 1)) == [HUNDRED[number]]
    [record] = [each for each in caplog.records if "single entries" in each.getMessage()]
    assert record.levelno == logging.INFO
    assert record.getMessage() == (
        f"batch_read requests single entries from 127.0.0.1:{server.port}, without batches"
    )
    caplog.clear()
    with StubServer(handler(Stub(HUNDRED))) as server:
        async with opened(kind, server.port) as client:
            await client.batch_read(0, 1)
    assert "single entries" not in caplog.text


# Each option of each call with a second way.

SERVERS: dict[str, Callable[[], Stub]] = {
    "filters": lambda: Filtering(HUNDRED, span=1000),
    "batches": lambda: Stub(HUNDRED),
    "old": old,
    "closes": lambda: Stub(HUNDRED, extensions="closed"),
    "forced": lambda: Stub(HUNDRED),
}
servers = pytest.mark.parametrize("server", SERVERS)


def is_old(server: str) -> bool:
    return server in ("old", "closes", "forced")


Check = Callable[[Trio, str], Awaitable[None]]
OPTIONS: dict[str, dict[str, Check]] = {}


def holds(call: str, *options: str) -> Callable[[Check], Check]:
    """The decorated function checks that these options of the call hold from any server."""

    def note(check: Check) -> Check:
        for option in options:
            OPTIONS.setdefault(call, {})[option] = check
        return check

    return note


def fitting(entries: list[Entry], size: int) -> list[Entry]:
    """At least one, and no more than `size` bytes of them."""
    count = next((n for n in range(1, len(entries)) if sizes(entries[: n + 1]) > size), 100)
    return entries[:count]


def sizes(entries: Any) -> int:
    return sum(len(entry.pack()) for entry in entries)


@holds("batch_read", "from_entry", "max_count", "max_bytes", "confirmed")
async def limits_of_a_batch(client: Trio, server: str) -> None:
    for confirmed in (True, False):
        call = partial(client.batch_read, confirmed=confirmed)
        assert list(await call(10, 5)) == HUNDRED[10:15]
        for size in (1, 18, 100, 1000, 3000):
            assert list(await call(31, 0, size)) == fitting(HUNDRED[31:], size)
        assert list(await call(100)) == []
        with pytest.raises(UnknownEntry if confirmed else BadFromEntry):
            await call(101)
        # From the end.
        for last in (1, 3, 100):
            assert list(await call(-last)) == HUNDRED[-last:]
        assert list(await call(-500)) == HUNDRED
        assert list(await call(-5, 2)) == HUNDRED[95:97]
        assert list(await call(-5, 7)) == HUNDRED[95:]
        assert list(await call(-5, 0, 1)) == HUNDRED[95:96]
    with pytest.raises(UsageError, match="from_entry must be an integer from -"):
        await client.batch_read(-(1 << 64))


@holds("batch_read", "types")
async def types_of_a_batch(client: Trio, server: str) -> None:
    batch = await client.batch_read(3, types=[3])
    assert list(batch) == [e for e in HUNDRED[3 : batch.next_number] if e.type == 3]
    assert batch.first_number == 3 < batch.next_number
    batch = await client.batch_read(-10, types=[3])
    assert list(batch) == [e for e in HUNDRED[-10:] if e.type == 3]


@holds("batch_read", "wait")
async def wait_of_a_batch(client: Trio, server: str) -> None:
    began = trio.current_time()
    assert len(await client.batch_read(100, wait=0.1)) == 0
    # The stubs with batches answer at once.
    assert trio.current_time() - began >= (0.1 if is_old(server) else 0)
    for wait in (-1, math.nan, 5e6):
        with pytest.raises(UsageError, match="wait must be"):
            await client.batch_read(100, wait=wait)


@holds("batch_read", "fallback")
async def refusal_of_a_batch(client: Trio, server: str) -> None:
    if is_old(server):
        with pytest.raises(NotSupported, match="batches"):
            await client.batch_read(0, fallback=False)
    else:
        assert list(await client.batch_read(0, 5, fallback=False)) == HUNDRED[:5]


@holds("read_batches", "from_entry", "stop", "max_count", "max_bytes", "requests", "types")
async def limits_of_long_reads(client: Trio, server: str) -> None:
    for count, size, requests in [(7, 0, 2), (0, 500, 1), (3, 200, 5), (0, 0, 1), (1000, 1, 3)]:
        batches = await listed(
            client,
            "read_batches",
            from_entry=3,
            stop=95,
            max_count=count,
            max_bytes=size,
            requests=requests,
        )
        assert [entry for batch in batches for entry in batch] == HUNDRED[3:95]
        for batch in batches:
            assert 1 <= len(batch) <= (count or 100)
            assert len(batch) == 1 or sizes(batch) <= (size or 1 << 30)
        of_type = await client.listed("read_batches", max_count=2, max_bytes=size, types=[3])
        assert of_type == [entry for entry in HUNDRED if entry.type == 3]


@holds("read_batches", "from_position", "cursor", "on_rollback")
async def positions_of_long_reads(client: Trio, server: str) -> None:
    class Cursor:
        saved: Position | None = None

        def load(self) -> Position | None:
            return self.saved

        def save(self, position: Position) -> None:
            self.saved = position

    cursor = Cursor()
    named = {"max_count": 9, "cursor": cursor, "on_rollback": print}
    assert await client.listed("read_batches", stop=20, **named) == HUNDRED[:20]
    assert cursor.saved is not None
    assert cursor.saved.next_entry == 20
    assert await client.listed("read_batches", **named) == HUNDRED[20:]
    position = cursor.saved
    assert await client.listed("read_batches", from_position=position) == []


@holds("between_bookmarks", "first", "last")
async def ranges(client: Trio, server: str) -> None:
    if is_old(server):
        with pytest.raises(NotSupported, match="ranges between bookmarks"):
            await client.listed("between_bookmarks", key(10), key(40))
    else:
        assert await client.listed("between_bookmarks", key(10), key(40)) == HUNDRED[10:41]


@holds("batches", "types", "from_entry", "from_bookmark", "stop", "from_position")
async def streamed_types(client: Trio, server: str) -> None:
    for start in ({"from_entry": 30}, {"from_bookmark": key(30)}, {"from_position": Position(30)}):
        found = await client.listed("batches", stop=63, types=[3, 0xB0], **start)
        assert found == [e for e in HUNDRED[30:63] if e.type in (3, 0xB0)]


WHERE = [Where(3, 0, b"\x1f"), Where(0xB0, 3, b"\x28"), Where(5, 1, b"\x0c")]


@holds("batches", "where")
@holds("read_batches", "where")
@holds("batch_read", "where")
async def selected_entries(client: Trio, server: str) -> None:
    wanted = [entry for entry in HUNDRED if is_wanted(entry, WHERE)]
    assert len(wanted) == 3
    for call in ("batches", "read_batches"):
        assert await client.listed(call, from_entry=0, stop=100, where=WHERE) == wanted
    batch = await client.batch_read(3, where=WHERE)
    assert batch.first_number == 3 < batch.next_number
    assert list(batch) == [e for e in wanted if 3 <= e.number < batch.next_number]


@holds("batches", "commits")
async def reports_of_commits(client: Trio, server: str) -> None:
    assert await client.listed("batches", from_entry=30, stop=63, commits=True) == HUNDRED[30:63]
    for named in ({"types": [3]}, {"where": WHERE}, {"from_bookmark": key(30)}):
        with pytest.raises(UsageError, match="commits are not reported"):
            await client.listed("batches", stop=63, commits=True, **named)


async def listed(client: Trio, name: str, **named: Any) -> list[Any]:
    items = getattr(client.client, name)(**named)
    if isinstance(client.client, BlockingClient) or hasattr(items, "__next__"):
        return await trio.to_thread.run_sync(list, items)
    return [batch async for batch in items]


@holds("read_batches", "from_time")
@holds("batches", "from_time")
async def no_times(client: Trio, server: str) -> None:
    """None of these servers knows when entries were committed."""
    for call in ("read_batches", "batches"):
        with pytest.raises(NotSupported, match="does not report when entries were committed"):
            await client.listed(call, from_time="2026-11-29", stop=100)


CHECKS = {check.__name__: check for checks in OPTIONS.values() for check in checks.values()}


@kinds
@servers
@pytest.mark.parametrize("check", CHECKS)
async def test_each_option_holds_or_is_refused(kind: str, server: str, check: str) -> None:
    stubs = [SERVERS[server]() for _ in range(4)]
    with StubServer(*map(handler, stubs)) as listening:
        options = {"batch_reads": False} if server == "forced" else {}
        async with opened(kind, listening.port, backoff=SOON, **options) as client:
            await CHECKS[check](client, server)
            assert await client.entry(7) == HUNDRED[7]
    if server == "forced":
        extensions = (CapabilitiesQuery, BatchQuery, RangeQuery)
        assert not any(isinstance(event, extensions) for stub in stubs for event in stub.seen)


def test_every_option_of_these_calls_is_listed() -> None:
    for call in ("batch_read", "read_batches", "between_bookmarks"):
        face = BlockingClient if call == "batch_read" else ClientBase
        parameters = set(inspect.signature(getattr(face, call)).parameters) - {"self"}
        assert parameters == set(OPTIONS[call]), call
    # Of a streaming, these two use an extension; `entries` is the same without the last.
    batches = set(inspect.signature(ClientBase.batches).parameters)
    entries = set(inspect.signature(ClientBase.entries).parameters)
    assert batches - entries == {"commits"}
    assert {"commits", "types"} <= set(OPTIONS["batches"])


# Several servers, of which one has no batches.


@pytest.mark.parametrize("first", ["old", "batches"])
async def test_the_wait_moves_to_another_server(first: str) -> None:
    """The first server is lost during the wait; the second has no entry yet either."""

    class Lost(Stub):
        def answer(self, event: Event) -> bytes:
            queries = sum(isinstance(e, EntryQuery | BatchQuery) for e in self.seen)
            self.closed = queries > (3 if first == "old" else 0)
            return b"" if self.closed else super().answer(event)

    extensions = ["refused", "known"] if first == "old" else ["known", "refused"]
    lost = Lost(HUNDRED, extensions=extensions[0])
    stubs = [Stub(HUNDRED, extensions=extensions[1]) for _ in range(4)]
    for stub in stubs:
        stub.commits = iter([[Entry(100, 1, b"one")]])

    async def commit() -> None:
        await until(lambda: asked(stubs, EntryQuery) > 3)
        for stub in stubs:
            stub.entries.append(Entry(100, 1, b"one"))

    with StubServer(handler(lost)) as one, StubServer(*map(handler, stubs)) as two:
        servers = [("127.0.0.1", one.port), ("127.0.0.1", two.port)]
        read = partial(BlockingClient.batch_read, from_entry=100, wait=PATIENCE)
        with BlockingClient(servers, backoff=SOON, timeout=1) as client:
            async with trio.open_nursery() as nursery:
                if first == "batches":
                    nursery.start_soon(commit)
                batch = await trio.to_thread.run_sync(read, client)
            assert list(batch) == [Entry(100, 1, b"one")]
            assert client.peer == f"127.0.0.1:{two.port}"
