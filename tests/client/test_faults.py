"""Whatever becomes of the connections, a client's sequence is exact: no gap, no duplicate."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest
import trio
import trio.testing
from hypothesis import given, settings
from hypothesis import strategies as st

from datastreamer._codec import Entry
from datastreamer.client.async_client import Client
from datastreamer.client.blocking_client import BlockingClient
from datastreamer.errors import ConnectionLost
from datastreamer.protocol.resume import Rollback
from datastreamer.protocol.retry import Backoff
from tests.network.fixtures import PATIENCE
from tests.network.proxy import NONE, End, Fault, FaultyServer, serve_faulty
from tests.network.stub import Stub, sample
from tests.network.wired import client_over

HISTORY = sample(50)
AT_ONCE = Backoff(0, 0)
# Connections of a client that gives up on a server that the busy machine keeps waiting.
SPARE = [NONE] * 1_000
WAITING = settings(deadline=None, max_examples=60)

pieces = st.sampled_from([1, 7, 100, 65536])
delays = st.sampled_from([0, 0, 0, 0.3, 3])
# A client that never heard of its server gives up: the first connection says something.
spoken = st.builds(Fault, st.integers(1, 2500), st.sampled_from(End), pieces)
later = st.builds(Fault, st.integers(0, 2500), st.sampled_from(End), pieces)
plans = st.tuples(spoken, st.lists(later, max_size=6)).map(lambda plan: [plan[0], *plan[1], NONE])
slow = st.tuples(plans, st.lists(delays, min_size=8, max_size=8)).map(
    lambda drawn: [replace(f, delay=d) for f, d in zip(drawn[0], drawn[1], strict=False)]
)


class Faulty:
    """Dials to a stub behind the next fault of a plan."""

    def __init__(self, nursery: trio.Nursery, plan: Sequence[tuple[Stub, Fault]]) -> None:
        self.nursery = nursery
        self.plan = list(plan)
        self.connections = 0

    async def dial(self) -> trio.abc.Stream:
        ours, theirs = trio.testing.memory_stream_pair()
        stub, fault = self.plan[min(self.connections, len(self.plan) - 1)]
        self.connections += 1
        self.server_end = theirs
        self.nursery.start_soon(serve_faulty, stub, theirs, fault, ours)
        return ours


@asynccontextmanager
async def client_behind(
    *plan: tuple[Stub, Fault],
    heartbeat: float | None = 1,
    timeout: float = 5,
    backoff: Backoff = AT_ONCE,
    retry_for: float | None = None,
) -> AsyncIterator[tuple[Client, Faulty]]:
    if not isinstance(trio.lowlevel.current_clock(), trio.testing.MockClock):
        # In real time a server is silent because the machine is busy.
        heartbeat, timeout = None, PATIENCE
    async with trio.open_nursery() as nursery:
        faulty = Faulty(nursery, plan)
        client = client_over(
            await faulty.dial(),
            redial=faulty.dial,
            timeout=timeout,
            backoff=backoff,
            retry_for=retry_for,
            heartbeat=heartbeat,
        )
        yield client, faulty
        await client.aclose()
        nursery.cancel_scope.cancel()


@given(slow, st.integers(0, 50), st.booleans())
@WAITING
def test_trio_client(plan: list[Fault], start: int, in_batches: bool) -> None:
    async def main() -> None:
        # A connection that the heartbeat makes is of the plan, too.
        made = [(Stub(HISTORY), fault) for fault in [*plan, *[NONE] * 20]]
        async with client_behind(*made) as (client, _):
            seen: list[Entry] = []
            if in_batches:
                async for batch in client.batches(from_entry=start, stop=50):
                    seen += batch
            else:
                async for entry in client.entries(from_entry=start, stop=50):
                    seen.append(entry)
            assert seen == HISTORY[start:]

    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))


def read_all(
    server: FaultyServer, seen: list[Entry], read: Callable[[BlockingClient], None]
) -> None:
    """A client gives up on a server that it never heard of, and on a busy machine the first
    connection may say nothing in time."""
    for _ in SPARE:
        try:
            with BlockingClient(
                "127.0.0.1", server.port, timeout=0.05, backoff=AT_ONCE, heartbeat=0.02
            ) as client:
                read(client)
            return
        except ConnectionLost:
            if seen:
                raise
    raise AssertionError("no connection said anything in time")


@given(plans, st.integers(0, 50), st.booleans())
@settings(deadline=None, max_examples=30)
def test_blocking_client(plan: list[Fault], start: int, in_batches: bool) -> None:
    made = [(lambda: Stub(HISTORY), fault) for fault in [*plan, *SPARE]]
    seen: list[Entry] = []

    def read(client: BlockingClient) -> None:
        if in_batches:
            for batch in client.batches(from_entry=start, stop=50):
                seen.extend(batch)
        else:
            for entry in client.entries(from_entry=start, stop=50):
                seen.append(entry)  # noqa: PERF402

    with FaultyServer(*made) as server:
        read_all(server, seen, read)
    assert seen == HISTORY[start:]


@pytest.mark.parametrize("passes", [1, 49, 60, 71, 72, 1000])
async def test_half_open_at_any_point(passes: int, autojump_clock: trio.testing.MockClock) -> None:
    half = Fault(passes, End.HALF_OPEN)
    good = [(Stub(HISTORY), NONE) for _ in range(5)]
    async with client_behind((Stub(HISTORY), half), *good) as (client, _):
        assert [entry async for entry in client.entries(stop=50)] == HISTORY


@pytest.mark.parametrize("cut", range(1, 700, 9))
async def test_a_cut_at_any_byte(cut: int) -> None:
    history = HISTORY[:20]
    async with client_behind((Stub(history), Fault(cut)), (Stub(history), NONE)) as (client, _):
        assert [entry async for entry in client.entries(stop=20)] == history


async def test_half_open_without_a_heartbeat_waits(autojump_clock: trio.testing.MockClock) -> None:
    half = Fault(1000, End.HALF_OPEN)
    async with client_behind((Stub(HISTORY), half), heartbeat=None) as (client, faulty):
        with trio.move_on_after(3600) as scope:
            async for _ in client.batches(stop=50):
                pass
        assert scope.cancelled_caught
        assert faulty.connections == 1


def generated(first: int, count: int, generation: int) -> list[Entry]:
    numbers = range(first, first + count)
    return [Entry(number, 3, b"%d: %d" % (generation, number)) for number in numbers]


@st.composite
def changing(draw: st.DrawFn) -> list[tuple[list[Entry], Fault]]:
    """Histories, each the one before, truncated and continued differently, served with faults.

    The last one alone has 60 entries, and no fault.
    """
    history: list[Entry] = []
    plan: list[tuple[list[Entry], Fault]] = []
    for generation in range(draw(st.integers(2, 6))):
        last = draw(st.integers(0, 9)) == 0 or generation == 5
        del history[draw(st.integers(0, len(history))) :]
        grown = draw(st.integers(0, 59 - len(history)))
        history += generated(len(history), grown, generation)
        plan.append((list(history), draw(later if plan else spoken)))
        if last:
            break
    history += generated(len(history), 60 - len(history), 99)
    return [*plan, *[(list(history), NONE)] * 20]


@given(changing(), st.booleans())
@WAITING
def test_trio_client_over_changing_histories(
    plan: list[tuple[list[Entry], Fault]], in_batches: bool
) -> None:
    mine: list[Entry] = []

    def go_back(rollback: Rollback) -> None:
        assert rollback.from_entry == len(mine)
        del mine[rollback.to_entry :]

    async def main() -> None:
        made = [(Stub(history), fault) for history, fault in plan]
        async with client_behind(*made) as (client, _):
            if in_batches:
                async for batch in client.batches(stop=60, on_rollback=go_back):
                    mine.extend(batch)
            else:
                async for entry in client.entries(stop=60, on_rollback=go_back):
                    mine.append(entry)  # noqa: PERF401

    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))
    assert mine == plan[-1][0]


@given(changing())
@settings(deadline=None, max_examples=30)
def test_blocking_client_over_changing_histories(plan: list[tuple[list[Entry], Fault]]) -> None:
    mine: list[Entry] = []

    def stub_of(history: list[Entry]) -> Callable[[], Stub]:
        return lambda: Stub(history)

    def go_back(rollback: Rollback) -> None:
        assert rollback.from_entry == len(mine)
        del mine[rollback.to_entry :]

    def read(client: BlockingClient) -> None:
        for batch in client.batches(stop=60, on_rollback=go_back):
            mine.extend(batch)

    with FaultyServer(
        *[(stub_of(history), fault) for history, fault in plan],
        *[(stub_of(plan[-1][0]), fault) for fault in SPARE],
    ) as server:
        read_all(server, mine, read)
    assert mine == plan[-1][0]
