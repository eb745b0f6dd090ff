"""Entries of some types as both clients ask for them: the same from any server, over losses."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import trio
import trio.testing
from hypothesis import given, settings
from hypothesis import strategies as st

from datastreamer._codec import Entry
from datastreamer.client.async_client import Client
from datastreamer.client.blocking_client import BlockingClient
from datastreamer.errors import (
    BadEntryType,
    BadFromEntry,
    ConnectFailed,
    HistoryChanged,
    ProtocolViolation,
    UsageError,
)
from datastreamer.position import Position
from datastreamer.protocol.commands import (
    CapabilitiesQuery,
    FilteredRead,
    FilteredStart,
    FilteredStartBookmark,
    Start,
)
from datastreamer.protocol.resume import Rollback
from datastreamer.storage.stream import DataStream
from tests.client.test_batch_reads import SOON, Trio, asked, kinds, opened
from tests.client.test_faults import AT_ONCE, client_behind, later, spoken
from tests.client.test_resume import rewritten, seen_of
from tests.network.fixtures import append, over_loopback, until
from tests.network.proxy import NONE, Fault, FaultyServer
from tests.network.stub import Filtering, Stub, StubServer, handler, key, sample
from tests.network.wired import client_over

HUNDRED = sample(100)
THOUSAND = sample(1000)
TYPES = [{3}, {0xB0}, {1, 2, 0xB0}, {77}, set(range(7)) | {0xB0}]

# Servers, each of which a client gets the same from.
SERVERS: dict[str, Callable[[], list[Stub]]] = {
    "filters": lambda: [Filtering(HUNDRED) for _ in range(4)],
    "one frame": lambda: [Filtering(HUNDRED, span=1000) for _ in range(4)],
    "batches alone": lambda: [Stub(HUNDRED) for _ in range(4)],
    "old": lambda: [Stub(HUNDRED, extensions="refused") for _ in range(4)],
    "old, closes": lambda: [Stub(HUNDRED, extensions="closed") for _ in range(4)],
    "old, refuses and closes": lambda: [Stub(HUNDRED, extensions="fatal") for _ in range(4)],
}
servers = pytest.mark.parametrize("server", SERVERS)


class Closing(Filtering):
    """Closes the connection behind what it has."""

    def pump(self) -> bytes:
        self.closed = True
        return super().pump()


def of(entries: Sequence[Entry], types: set[int]) -> list[Entry]:
    return [entry for entry in entries if entry.type in types]


async def drained(client: Trio, method: str, **named: Any) -> tuple[list[Entry], Position | None]:
    """The entries, and the position behind them."""
    iteration = getattr(client.client, method)(**named)

    def in_thread() -> list[Entry]:
        return list(iteration) if method == "entries" else [e for b in iteration for e in b]

    if not isinstance(client.client, Client):
        found = await trio.to_thread.run_sync(in_thread)
    else:
        found = []
        await seen_of(iteration, found)
    return found, iteration.position


@kinds
@servers
@pytest.mark.parametrize("method", ["entries", "batches", "read_batches"])
async def test_the_same_from_any_server(kind: str, server: str, method: str) -> None:
    for types in TYPES:
        stubs = SERVERS[server]()
        with StubServer(*map(handler, stubs)) as listening:
            async with opened(kind, listening.port, backoff=SOON) as client:
                for start, stop in [(0, 100), (3, 50), (99, 100), (40, 40), (38, 41)]:
                    found, position = await drained(
                        client, method, from_entry=start, stop=stop, types=types
                    )
                    assert found == of(HUNDRED[start:stop], types)
                    assert position is None or position.next_entry == stop
                if method != "read_batches":
                    found, position = await drained(
                        client, method, from_bookmark=key(30), stop=63, types=types
                    )
                    assert found == of(HUNDRED[30:63], types)
                assert position is not None
                found, _ = await drained(
                    client, method, from_position=position, stop=80, types=types
                )
                assert found == of(HUNDRED[position.next_entry : 80], types)
                with pytest.raises(BadFromEntry):
                    await drained(client, method, from_entry=101, stop=200, types=types)
                assert await client.entry(5) == HUNDRED[5]
        filtered = server in ("filters", "one frame")
        expected = (FilteredRead,) if method == "read_batches" else (FilteredStart,)
        assert asked(stubs, expected[0]) > 0 if filtered else not asked(stubs, expected[0])
        if filtered:
            assert asked(stubs, CapabilitiesQuery) == listening.accepted
            assert asked(stubs, Start) == 0
            if method != "read_batches":
                assert asked(stubs, FilteredStartBookmark) == 1


@kinds
@servers
async def test_single_batches(kind: str, server: str) -> None:
    """From any server: what there is of the types up to where the batch says that it ends."""
    for types in TYPES:
        with StubServer(*map(handler, SERVERS[server]())) as listening:
            async with opened(kind, listening.port, backoff=SOON) as client:
                calls = [client.batch_read, partial(client.batch_read, confirmed=False)]
                if "old" not in server:
                    calls += [partial(call, fallback=False) for call in calls]
                for call in calls:
                    number = 0
                    while number < 100:
                        batch = await call(number, 3, types=types)
                        assert batch.first_number == number < batch.next_number
                        assert list(batch) == of(HUNDRED[number : batch.next_number], types)
                        assert len(batch) <= 3
                        number = batch.next_number
                    assert list(await call(100, types=types)) == []
                with pytest.raises(BadEntryType):
                    await client.batch_read(0, types=[-1])


@kinds
async def test_a_wait_for_some_types(kind: str, stream: DataStream) -> None:
    append(stream, (1, b"one"))
    got: list[Entry] = []
    async with over_loopback(stream) as rig, opened(kind, rig.address[1], timeout=0.5) as client:
        nothing = await client.batch_read(0, wait=0.05, types=[3])
        assert (len(nothing), nothing.next_number) == (0, 1)

        async def poll() -> None:
            got.extend(await client.batch_read(1, wait=30, types=[3]))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(poll)
            for kind_of_entry in (2, 2, 3):
                await until(lambda: rig.server.broadcast.watchers)
                append(stream, (kind_of_entry, b"more"))
        assert got == [Entry(3, 3, b"more")]


@kinds
async def test_a_server_is_asked_for_nothing_that_it_has_no_word_for(kind: str) -> None:
    many = set(range(100, 165))
    stubs = [Filtering(HUNDRED) for _ in range(3)]
    with StubServer(*map(handler, stubs)) as server:
        async with opened(kind, server.port) as client:
            with pytest.raises(UsageError, match="an empty list selects nothing"):
                await drained(client, "entries", stop=50, types=[])
            # More than can be named: all is sent, and left out here.
            found, _ = await drained(client, "entries", stop=50, types=many | {3})
            assert found == of(HUNDRED[:50], {3})
            assert asked(stubs, CapabilitiesQuery) == 0
    assert asked(stubs, FilteredStart) == 0
    stub = Filtering(HUNDRED)
    with StubServer(handler(stub)) as server:
        async with opened(kind, server.port, batch_reads=False) as client:
            for method in ("entries", "read_batches"):
                found, _ = await drained(client, method, stop=50, types={3})
                assert found == of(HUNDRED[:50], {3})
    assert asked([stub], CapabilitiesQuery) == asked([stub], FilteredStart) == 0


@kinds
async def test_the_next_request_is_underway_when_the_answer_has_said_how_far_it_goes(
    kind: str,
) -> None:
    stub = Filtering(HUNDRED, span=20)
    with StubServer(handler(stub)) as server:
        async with opened(kind, server.port) as client:
            found, _ = await drained(client, "read_batches", types={3}, max_count=2)
    assert found == of(HUNDRED, {3})
    reads = [event for event in stub.seen if isinstance(event, FilteredRead)]
    assert [read.max_count for read in reads] == [2] * len(reads)
    assert sorted({read.from_entry for read in reads}) == [read.from_entry for read in reads]


# Losses.


@pytest.mark.parametrize("types", TYPES)
@pytest.mark.parametrize("first, second", list(itertools.product(["new", "old"], repeat=2)))
async def test_it_continues_after_the_last_received_entry(
    types: set[int], first: str, second: str
) -> None:
    """From a server of either kind to one of either."""

    class OldClosing(Stub):
        def pump(self) -> bytes:
            self.closed = True
            return super().pump()

    lost: Stub = Closing(THOUSAND[:600]) if first == "new" else OldClosing(THOUSAND[:600])
    again: Stub = Closing(THOUSAND[:900]) if second == "new" else OldClosing(THOUSAND[:900])
    back: Stub = Filtering(THOUSAND) if first == "new" else Stub(THOUSAND)
    plan = [(stub, NONE) for stub in (lost, again, back)]
    async with client_behind(*plan) as (client, _):
        seen: list[Entry] = []
        batches = client.batches(from_entry=5, stop=1000, types=types)
        await seen_of(batches, seen)
        assert seen == of(THOUSAND[5:], types)
        assert batches.position is not None
        assert batches.position.next_entry == 1000
        assert batches.position == Position.from_json(batches.position.to_json())


async def test_what_is_remembered_is_asked_for_again_and_no_more() -> None:
    """The last 256 matching entries of a filtered reading, and their numbers."""
    lost, back = Closing(THOUSAND[:600]), Filtering(THOUSAND)
    async with client_behind((lost, NONE), (back, NONE)) as (client, _):
        seen: list[Entry] = []
        await seen_of(client.batches(stop=1000, types={1, 2, 3, 4, 5, 6}), seen)
    [begin] = [event for event in back.seen if isinstance(event, FilteredStart)]
    remembered = of(THOUSAND[:600], {1, 2, 3, 4, 5, 6})[-256:]
    assert begin.from_entry == remembered[0].number


WANTED = of(THOUSAND[:600], {3})


@pytest.mark.parametrize("follow", [False, True])
@pytest.mark.parametrize(
    "other, differing",
    [
        # Another entry; one that is missing; one too many; all behind; fewer.
        (rewritten(THOUSAND, WANTED[-3].number, WANTED[-3].number + 1), WANTED[-3].number),
        (
            [Entry(e.number, 4, e.data) if e is WANTED[-2] else e for e in THOUSAND],
            WANTED[-2].number,
        ),
        ([Entry(598, 3, b"more") if e.number == 598 else e for e in THOUSAND], 598),
        (rewritten(THOUSAND, 400, 1000), of(THOUSAND[400:], {3})[0].number),
        (THOUSAND[:590], 590),
    ],
    ids=["another", "missing", "more", "all", "fewer"],
)
async def test_another_history_of_what_is_wanted(
    follow: bool, other: list[Entry], differing: int
) -> None:
    rollbacks: list[Rollback] = []
    mine: list[Entry] = []

    def go_back(rollback: Rollback) -> None:
        rollbacks.append(rollback)
        mine[:] = [entry for entry in mine if entry.number < rollback.to_entry]

    back = Filtering(other, epoch=5, span=100)
    plan = [(Closing(THOUSAND[:600]), NONE), (back, NONE)]
    async with client_behind(*plan) as (client, wire):
        if not follow:
            with pytest.raises(HistoryChanged) as caught:
                await seen_of(client.batches(from_entry=5, types={3}), mine)
            assert caught.value.first_differing == differing
            return
        iteration = client.batches(stop=700, types={3}, on_rollback=go_back)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(seen_of, iteration, mine)
            await until(lambda: any(isinstance(event, FilteredStart) for event in back.seen))
            await trio.testing.wait_all_tasks_blocked()
            if len(other) < 700:
                other = [*other, *rewritten(THOUSAND, 0, 1000)[len(other) :]]
                await wire.server_end.send_all(back.append(*other[len(back.entries) :]))
    assert mine == of(other[:700], {3})
    [rollback] = rollbacks
    assert (rollback.to_entry, rollback.from_entry) == (differing, 600)
    assert rollback.position.next_entry == differing


async def test_what_is_not_wanted_may_change() -> None:
    other = [e if e.type == 3 else Entry(e.number, e.type, b"changed") for e in THOUSAND]
    plan = [(Closing(THOUSAND[:600]), NONE), (Filtering(other, epoch=5), NONE)]
    async with client_behind(*plan) as (client, _):
        seen: list[Entry] = []
        await seen_of(client.batches(stop=1000, types={3}), seen)
    assert seen == of(THOUSAND, {3})


@pytest.mark.parametrize("old", [False, True])
@pytest.mark.parametrize(
    "before, after", list(itertools.permutations([None, (3,), (3, 4), (5,)], 2))
)
async def test_a_position_goes_from_any_types_to_any(
    before: tuple[int, ...] | None, after: tuple[int, ...] | None, old: bool
) -> None:
    everything = set(range(7)) | {0xB0}
    first = Filtering(THOUSAND)
    async with client_behind((first, NONE)) as (client, _):
        seen: list[Entry] = []
        batches = client.batches(from_entry=7, stop=600, types=before)
        await seen_of(batches, seen)
        position = batches.position
    assert seen == of(THOUSAND[7:600], set(before or everything))
    assert position is not None
    position = Position.from_json(position.to_json())
    other = rewritten(THOUSAND, 590, 1000)
    for entries, same in ((THOUSAND, True), (other, False)):
        server = Stub(entries) if old else Filtering(entries)
        async with client_behind((server, NONE)) as (client, _):
            seen = []
            batches = client.batches(from_position=position, stop=900, types=after)
            if same:
                await seen_of(batches, seen)
                assert seen == of(THOUSAND[600:900], set(after or everything))
                continue
            with pytest.raises(HistoryChanged) as caught:
                await seen_of(batches, seen)
            differing = of(THOUSAND[590:600], set(before or everything))
            assert caught.value.first_differing == differing[0].number


@pytest.mark.parametrize("old", [False, True])
async def test_what_was_remembered_of_all_is_remembered_of_some(old: bool) -> None:
    """A reading of some types begins at a position of all, and loses its server at once."""

    class OldClosing(Stub):
        def pump(self) -> bytes:
            self.closed = self.cursor is not None
            return super().pump()

    class Closing(Filtering):
        def pump(self) -> bytes:
            self.closed = self.cursor is not None
            return super().pump()

    async with client_behind((Filtering(THOUSAND), NONE)) as (client, _):
        batches = client.batches(from_entry=7, stop=600, types=[3] if old else None)
        await seen_of(batches, [])
        position = batches.position
    other = rewritten(THOUSAND, 590, 1000)
    # Or the other way about: of some, and then a server that sends all.
    between = OldClosing(THOUSAND[:600]) if old else Closing(THOUSAND[:600])
    async with client_behind((between, NONE), (Filtering(other), NONE)) as (client, wire):
        with pytest.raises(HistoryChanged) as caught:
            await seen_of(client.batches(from_position=position, types=[3]), [])
        assert caught.value.first_differing == (
            of(THOUSAND[590:], {3})[0].number if not old else 590
        )
        assert wire.connections == 2


async def test_another_epoch_between_two_requests_has_the_last_entries_compared() -> None:
    """Entries were truncated and others appended in their place, on the same connection."""

    class Rewriting(Filtering):
        def answer(self, event: Any) -> bytes:
            reads = [seen for seen in self.seen if isinstance(seen, FilteredRead)]
            if len(reads) > 10:
                self.epoch = 5
                self.entries = rewritten(THOUSAND, 30, 40)
            return super().answer(event)

    plan = [(Rewriting(THOUSAND), NONE), (Filtering(rewritten(THOUSAND, 30, 40)), NONE)]
    async with client_behind(*plan) as (client, wire):
        seen: list[Entry] = []
        with pytest.raises(HistoryChanged) as caught:
            await seen_of(client.read_batches(types={3}), seen)
        assert caught.value.first_differing == of(THOUSAND[30:], {3})[0].number
        assert seen == of(THOUSAND, {3})[: len(seen)]
        assert wire.connections == 2


plans = st.tuples(spoken, st.lists(later, max_size=6)).map(lambda plan: [plan[0], *plan[1], NONE])


@given(
    plans,
    st.integers(0, 50),
    st.sampled_from(TYPES),
    st.sampled_from(["batches", "read_batches"]),
    st.lists(st.booleans(), min_size=8, max_size=8),
    st.integers(1, 20),
)
@settings(deadline=None, max_examples=80)
def test_cuts_anywhere_lose_nothing(
    plan: list[Fault], start: int, types: set[int], method: str, new: list[bool], span: int
) -> None:
    """With any losses of connections, and any server at the next connection."""
    history = sample(50)

    def stub(at: int) -> Stub:
        return Filtering(history, span=span) if new[at % 8] else Stub(history)

    async def main() -> None:
        # Who looks whether a server is there takes a connection too.
        faults = [*plan, *[NONE] * 8]
        stubs = [(stub(at), fault) for at, fault in enumerate(faults)]
        async with client_behind(*stubs, backoff=AT_ONCE) as (client, _):
            seen: list[Entry] = []
            iteration = getattr(client, method)(from_entry=start, stop=50, types=types)
            await seen_of(iteration, seen)
            assert seen == of(history[start:], types)

    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))


@pytest.mark.parametrize("cut", range(0, 900, 37))
def test_a_blocking_client_over_cuts(cut: int) -> None:
    plan = [(lambda: Filtering(sample(60)), Fault(48 + 30 + cut)) for _ in range(3)]
    with (
        FaultyServer(*plan, (lambda: Filtering(sample(60)), NONE)) as server,
        BlockingClient("127.0.0.1", server.port, backoff=SOON) as client,
    ):
        found = list(client.entries(stop=60, types=[3, 0xB0]))
    assert found == of(sample(60), {3, 0xB0})


# Servers that send something else.


@pytest.mark.parametrize(
    "change, message",
    [
        ({"first": 1}, "entries 1 to"),
        ({"stop": 0}, "entries 0 to 0"),
        ({"stop": 101}, "entries 0 to 101"),
        ({"count": 1}, "entries in a batch of 6, or others than selected"),
        ({"types": {2}}, "or others than selected"),
        ({"order": -1}, "entry number"),
        ({"beyond": 1}, "entry number"),
    ],
)
@pytest.mark.parametrize("method", ["batches", "read_batches"])
async def test_frames_that_are_wrong(change: dict[str, Any], message: str, method: str) -> None:
    class Wrong(Filtering):
        def frame(self, first: int, stop: int, chosen: Sequence[Entry]) -> bytes:
            if "types" in change:
                chosen = [e for e in self.entries[first:stop] if e.type in change["types"]]
            if "order" in change:
                chosen = chosen[::-1]
            if "beyond" in change:
                chosen = [*chosen, next(e for e in THOUSAND[stop:] if e.type == 3)]
            made = super().frame(change.get("first", first), change.get("stop", stop), chosen)
            if "count" in change:
                made = made[:5] + (len(chosen) + 1).to_bytes(4, "big") + made[9:]
            return made

    async with client_behind(*[(Wrong(HUNDRED, span=40), NONE) for _ in range(2)]) as (client, _):
        with pytest.raises(ProtocolViolation, match=message):
            await seen_of(getattr(client, method)(stop=90, types={3}), [])


async def test_an_entry_outside_of_the_frames() -> None:
    class Wrong(Filtering):
        def pump(self) -> bytes:
            return HUNDRED[0].pack()

    async with client_behind(*[(Wrong(HUNDRED), NONE) for _ in range(2)]) as (client, _):
        with pytest.raises(ProtocolViolation, match="an entry that was not asked for"):
            await seen_of(client.batches(types={0xB0}), [])


# A real server.


@kinds
async def test_with_a_real_server(kind: str, stream: DataStream) -> None:
    for start in range(0, 6_000, 500):
        append(stream, *[(n % 5, bytes([n % 256]) * (n % 900)) for n in range(start, start + 500)])
    due = list(stream.entries())
    async with over_loopback(stream) as rig, opened(kind, rig.address[1]) as client:
        for types in ({3}, {0, 1}, {9}, set(range(5))):
            for method in ("entries", "batches", "read_batches"):
                for start, stop in ((0, 6_000), (17, 5_999)):
                    found, position = await drained(
                        client, method, from_entry=start, stop=stop, types=types
                    )
                    assert found == of(due[start:stop], types)
                    assert position is not None
                    assert position.next_entry == stop
        assert rig.server.counts.filter_scanned > 0
        assert "start" not in rig.server.counts.commands


async def test_following_a_live_stream_over_restarts_of_its_server(stream: DataStream) -> None:
    """Commits all the while; the server goes and comes back."""
    rounds, each = 30, 10
    seen: list[Entry] = []
    total = rounds * each
    port = 0
    scope = trio.CancelScope()

    async def follow(dial: Any) -> None:
        client = client_over(await dial(), redial=dial, backoff=SOON)
        with scope:
            async for batch in client.batches(types={3}, stop=total):
                seen.extend(batch)
        await client.aclose()

    ready = trio.Event()

    async def dial() -> trio.abc.Stream:
        await ready.wait()
        try:
            return await trio.open_tcp_stream("127.0.0.1", port)
        except OSError as error:
            raise ConnectFailed(str(error)) from error

    with trio.fail_after(60):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(follow, dial)
            number = 0
            while number < total:
                async with over_loopback(stream) as rig:
                    port = rig.address[1]
                    ready.set()
                    for _ in range(rounds // 3):
                        append(stream, *[(n % 5, b"%d" % n) for n in range(number, number + each)])
                        number += each
                        await trio.sleep(0.002)
                    if number == total:
                        await until(lambda: len(seen) >= total // 5)
                    ready = trio.Event()
    assert [entry.number for entry in seen] == [n for n in range(total) if n % 5 == 3]
