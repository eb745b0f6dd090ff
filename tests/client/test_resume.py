"""A streaming whose server is lost and comes back: as it was, shorter, rewritten, or another."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import pytest
import trio
import trio.testing

from datastreamer._codec import Entry
from datastreamer.client.async_client import Client
from datastreamer.client.trio_driver import Dialled, TrioDriver
from datastreamer.errors import (
    BadEntryType,
    BadFromBookmark,
    BadFromEntry,
    ConnectFailed,
    ConnectionLost,
    HistoryChanged,
    ProtocolViolation,
    StreamClosed,
    UsageError,
)
from datastreamer.format import Header
from datastreamer.position import Position
from datastreamer.protocol.commands import EntryQuery, HeaderQuery, Start, StartBookmark
from datastreamer.protocol.messages import OK
from datastreamer.protocol.resume import Rollback
from datastreamer.protocol.retry import UNANSWERED_LIMIT, Backoff
from tests.client.test_faults import Faulty, client_behind
from tests.network.proxy import NONE, End, Fault
from tests.network.stub import Stub, key, sample
from tests.network.wired import client_over

THOUSAND = sample(1000)


def rewritten(entries: Sequence[Entry], first: int, stop: int) -> list[Entry]:
    """The same, but entries `first` to `stop` - 1 have other data of the same length."""
    return [
        Entry(e.number, e.type, bytes(byte ^ 1 for byte in e.data) or b"!")
        if first <= e.number < stop
        else e
        for e in entries
    ]


class Closing(Stub):
    """Closes the connection behind what it has."""

    def pump(self) -> bytes:
        self.closed = True
        return super().pump()


class Another(Stub):
    """A stream of another system."""

    def answer(self, event: Any) -> bytes:
        if isinstance(event, HeaderQuery):
            total = len(self.entries)
            return OK + Header(2, 138, 1, 4096 + total, total).pack()
        return super().answer(event)


async def seen_of(items: Any, seen: list[Entry]) -> None:
    async for item in items:
        if isinstance(item, Entry):
            seen.append(item)
        else:
            seen.extend(item)


@pytest.mark.parametrize("method", ["entries", "batches"])
async def test_it_continues_after_the_last_received_entry(
    method: str, caplog: pytest.LogCaptureFixture
) -> None:
    back = Stub(THOUSAND)
    async with client_behind((Closing(THOUSAND[:600]), NONE), (back, NONE)) as (client, _):
        seen: list[Entry] = []
        await seen_of(getattr(client, method)(from_entry=5, stop=1000), seen)
        assert seen == THOUSAND[5:]
    assert back.seen[:2] == [HeaderQuery(), Start(344)]
    assert [record.getMessage() for record in caplog.records] == [
        "lost the connection to stub:1, trying again: stub:1 closed the connection",
        "connected to stub:1 again, continuing at entry 600",
    ]


async def test_after_a_connection_without_progress_the_next_entry_is_requested_alone() -> None:
    """Not on the one after that: a server that does not know the request may end it there."""

    class Old(Closing):
        def answer(self, event: Any) -> bytes:
            self.closed = isinstance(event, EntryQuery)
            return b"" if self.closed else super().answer(event)

    stubs = [*[Old(THOUSAND[:600], header_total=1000) for _ in range(4)], Stub(THOUSAND)]
    async with client_behind(*[(stub, NONE) for stub in stubs]) as (client, _):
        seen: list[Entry] = []
        await seen_of(client.batches(stop=1000), seen)
        assert seen == THOUSAND
    begins = [HeaderQuery(), Start(344)]
    asks = [HeaderQuery(), EntryQuery(600), Start(344)]
    assert [stub.seen[:3] for stub in stubs[1:4]] == [begins, asks[:2], begins]
    assert stubs[4].seen[:3] == asks


async def test_without_resume_it_is_an_error() -> None:
    async with trio.open_nursery() as nursery:
        faulty = Faulty(nursery, [(Closing(THOUSAND[:6]), NONE), (Stub(THOUSAND), NONE)])
        client = client_over(await faulty.dial(), redial=faulty.dial, resume=False)
        seen: list[Entry] = []
        with pytest.raises(ConnectionLost):
            await seen_of(client.entries(), seen)
        assert seen == THOUSAND[:6]
        assert faulty.connections == 1
        await client.aclose()


async def test_a_server_with_fewer_entries() -> None:
    plan = (Closing(THOUSAND[:600]), NONE), *[(Stub(THOUSAND[:590]), NONE) for _ in range(2)]
    async with client_behind(*plan) as (client, _):
        seen: list[Entry] = []
        message = "it holds 590 entries, and entries 590 to 599, which were received, are missing"
        with pytest.raises(HistoryChanged, match=message) as caught:
            await seen_of(client.batches(), seen)
        assert seen == THOUSAND[:600]
        error = caught.value
        assert (error.next_entry, error.total_entries, error.first_differing) == (600, 590, 590)
        assert (await client.header()).total_entries == 590


async def test_a_rewritten_block_that_ends_in_the_same_bytes() -> None:
    other = rewritten(THOUSAND, 400, 410)
    plan = (Closing(THOUSAND[:600]), NONE), (Stub(other), NONE)
    async with client_behind(*plan) as (client, _):
        with pytest.raises(HistoryChanged, match="entry 400 is not the one that was re") as caught:
            await seen_of(client.entries(), [])
        assert caught.value.first_differing == 400


@pytest.mark.parametrize("method", ["entries", "batches"])
@pytest.mark.parametrize(
    "other, to_entry",
    [
        (THOUSAND[:590], 590),
        (rewritten(THOUSAND, 400, 410), 400),
        (rewritten(THOUSAND, 599, 900), 599),
        (rewritten(THOUSAND, 550, 900)[:580], 550),
    ],
)
async def test_a_rollback_is_reported_and_followed(
    method: str, other: list[Entry], to_entry: int
) -> None:
    back = Stub(other)
    rollbacks: list[Rollback] = []
    mine: list[Entry] = []

    async def go_back(rollback: Rollback) -> None:
        await trio.lowlevel.checkpoint()
        rollbacks.append(rollback)
        del mine[rollback.to_entry :]

    async with client_behind((Closing(THOUSAND[:600]), NONE), (back, NONE)) as (client, wire):
        iteration = getattr(client, method)(stop=700, on_rollback=go_back)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(seen_of, iteration, mine)
            await trio.testing.wait_all_tasks_blocked()
            if len(other) < 700:
                last = back.append(*rewritten(THOUSAND, 0, 1000)[len(other) :])
                await wire.server_end.send_all(last)
    expected = [*other, *rewritten(THOUSAND, 0, 1000)[len(other) :]][:700]
    assert mine == expected
    [rollback] = rollbacks
    assert (rollback.to_entry, rollback.from_entry) == (to_entry, 600)
    assert rollback.position.next_entry == to_entry


async def test_a_history_that_changed_before_all_that_is_remembered() -> None:
    for other, message in (
        (
            rewritten(THOUSAND, 100, 900),
            "all of entries 344 to 599 differ from those that were received",
        ),
        (THOUSAND[:343], "it holds 343 entries, and entry 600 is the next one needed"),
    ):
        plan = (Closing(THOUSAND[:600]), NONE), (Stub(other), NONE)
        async with client_behind(*plan) as (client, _):
            with pytest.raises(HistoryChanged, match=message) as caught:
                await seen_of(client.entries(on_rollback=pytest.fail), [])
            assert caught.value.first_differing is None


async def test_all_of_a_history_changed() -> None:
    plan = (Closing(THOUSAND[:20]), NONE), (Stub(rewritten(THOUSAND, 0, 900)), NONE)
    async with client_behind(*plan) as (client, _):
        rollbacks: list[Rollback] = []
        seen: list[Entry] = []
        await seen_of(client.entries(stop=21, on_rollback=rollbacks.append), seen)
        assert [rollback.to_entry for rollback in rollbacks] == [0]
        assert seen == [*THOUSAND[:20], *rewritten(THOUSAND, 0, 900)[:21]]


async def test_another_stream_is_no_rollback() -> None:
    message = r"another stream: version 2, system id 138, type 1, not version 2, system id 137"
    for entries in (THOUSAND[:600], THOUSAND):
        plan = (Closing(THOUSAND[:600]), NONE), (Another(entries), NONE)
        async with client_behind(*plan) as (client, _):
            with pytest.raises(HistoryChanged, match=message):
                await seen_of(client.entries(on_rollback=pytest.fail), [])


async def test_a_rollback_is_reported_again_after_its_callback_failed() -> None:
    plan = (Closing(THOUSAND[:600]), NONE), (Stub(THOUSAND[:590]), NONE)
    message: list[int] = []

    def fail_first(rollback: Rollback) -> None:
        message.append(rollback.to_entry)
        if len(message) == 1:
            raise RuntimeError

    async with client_behind(*plan) as (client, _):
        batches = client.batches(on_rollback=fail_first)
        with pytest.raises(RuntimeError):
            await seen_of(batches, [])
        for _ in range(2):
            with trio.move_on_after(0):
                await seen_of(batches, [])
            assert message == [590, 590]


async def test_a_gap_is_got_over_once(caplog: pytest.LogCaptureFixture) -> None:
    class Gap(Stub):
        def pump(self) -> bytes:
            at = self.cursor or 0
            super().pump()
            return b"".join(e.pack() for e in self.entries[at:] if e.number != 500)

    async with client_behind((Gap(THOUSAND), NONE), (Stub(THOUSAND), NONE)) as (client, _):
        seen: list[Entry] = []
        await seen_of(client.batches(stop=1000), seen)
        assert seen == THOUSAND
    assert "501 where 500" in caplog.text
    plan = [(Gap(THOUSAND), NONE) for _ in range(9)]
    async with client_behind(*plan) as (client, wire):
        seen = []
        with pytest.raises(ProtocolViolation, match="501 where 500"):
            await seen_of(client.batches(stop=1000), seen)
        assert seen == THOUSAND[:500]
        assert wire.connections == 2


class Absent:
    """A way to a server that is not there from the second connection on, for some time."""

    def __init__(self, first: Callable[..., Any], until: float, error: Exception) -> None:
        self.first = first
        self.until = until
        self.error = error
        self.tries: list[float] = []

    async def dial(self) -> trio.abc.Stream:
        await trio.lowlevel.checkpoint()
        self.tries.append(trio.current_time())
        if trio.current_time() < self.until:
            raise self.error
        stream: trio.abc.Stream = await self.first()
        return stream


@pytest.fixture
def refused() -> ConnectFailed:
    return ConnectFailed("cannot connect to stub:1: Connection refused")


def absent(client: Client, wire: Any, until: float, error: Exception) -> Absent:
    way = Absent(wire.dial, trio.current_time() + until, error)
    cast("TrioDriver", client._driver).servers = (Dialled("stub:1", way.dial),)
    return way


async def test_a_server_is_waited_for_without_end(
    autojump_clock: Any, refused: ConnectFailed, caplog: pytest.LogCaptureFixture
) -> None:
    plan = (Closing(THOUSAND[:600]), NONE), (Stub(THOUSAND), NONE)
    async with client_behind(*plan, backoff=Backoff(0.1, 5)) as (client, wire):
        way = absent(client, wire, 86_400, refused)
        seen: list[Entry] = []
        await seen_of(client.entries(stop=1000), seen)
        assert seen == THOUSAND
    waits = [after - before for before, after in zip(way.tries, way.tries[1:], strict=False)]
    assert all(0.05 <= wait <= 5.001 for wait in waits)
    assert all(wait >= 2.5 for wait in waits[8:])
    assert len(set(waits)) > 100
    assert len(caplog.records) == 2


async def test_a_server_is_waited_for_at_most_that_long(
    autojump_clock: Any, refused: ConnectFailed
) -> None:
    plan = (Closing(THOUSAND[:600]), NONE), (Stub(THOUSAND), NONE)
    async with client_behind(*plan, backoff=Backoff(0.1, 5), retry_for=60) as (client, wire):
        absent(client, wire, 86_400, refused)
        seen: list[Entry] = []
        begin = trio.current_time()
        with pytest.raises(ConnectionLost, match=r"given up after 60\.0 s: cannot connect"):
            await seen_of(client.entries(stop=1000), seen)
        assert trio.current_time() - begin == pytest.approx(60, abs=1)
        assert seen == THOUSAND[:600]


async def test_the_wait_counts_from_the_last_entry(
    autojump_clock: Any, refused: ConnectFailed
) -> None:
    plan: list[tuple[Stub, Fault]] = [(Closing(THOUSAND[: 100 * n]), NONE) for n in range(1, 10)]
    plan.append((Stub(THOUSAND), NONE))
    async with client_behind(*plan, backoff=Backoff(1, 1), retry_for=3) as (client, _):
        seen: list[Entry] = []
        await seen_of(client.entries(stop=1000), seen)
        assert seen == THOUSAND


async def test_a_server_that_hangs_up_at_once(
    autojump_clock: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """It is retried like any other: it may be full, or behind a proxy."""

    def deaf(count: int) -> list[tuple[Stub, Fault]]:
        return [(Stub(THOUSAND, stream_type=2), NONE) for _ in range(count)]

    some = deaf(3 * UNANSWERED_LIMIT)
    plan = (Closing(THOUSAND[:600]), NONE), *some, (Stub(THOUSAND), NONE)
    async with client_behind(*plan) as (client, _):
        seen: list[Entry] = []
        await seen_of(client.entries(stop=1000), seen)
        assert seen == THOUSAND
    message = [record.getMessage() for record in caplog.records]
    assert [("another stream type" in line, " again, continuing" in line) for line in message] == [
        (False, False),
        (True, False),
        (False, True),
    ]
    plan = (Closing(THOUSAND[:600]), NONE), *deaf(60)
    async with client_behind(*plan, retry_for=60, backoff=Backoff()) as (client, _):
        begin = trio.current_time()
        with pytest.raises(ConnectionLost, match=r"given up after 60\.0 s: .* stream type"):
            await seen_of(client.entries(), [])
        assert trio.current_time() - begin == pytest.approx(60, abs=1)
    async with client_behind(*deaf(2)) as (client, wire):
        with pytest.raises(ConnectionLost, match="another stream type"):
            await seen_of(client.entries(), [])
        assert wire.connections == 1


async def test_a_server_that_hangs_is_waited_for(autojump_clock: Any) -> None:
    hanging = [(Stub(THOUSAND, deaf=(HeaderQuery,)), NONE) for _ in range(3 * UNANSWERED_LIMIT)]
    plan = (Closing(THOUSAND[:600]), NONE), *hanging, (Stub(THOUSAND), NONE)
    async with client_behind(*plan) as (client, _):
        seen: list[Entry] = []
        await seen_of(client.entries(stop=1000), seen)
        assert seen == THOUSAND


async def test_each_loss_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    # Reachable for a moment, twice, and lost again: the log shows each change.
    flapping = [(Closing(THOUSAND[:600]), NONE) for _ in range(3)]
    deaf = [(Stub(THOUSAND, stream_type=2), NONE) for _ in range(3)]
    async with client_behind(*flapping, *deaf, (Stub(THOUSAND), NONE)) as (client, _):
        await seen_of(client.entries(stop=1000), [])
    message = [record.getMessage().split(",")[0] for record in caplog.records]
    assert message == ["lost the connection to stub:1", "connected to stub:1 again"] * 3


async def test_refusals_of_a_server_that_comes_up_are_got_over() -> None:
    class Refusing(Stub):
        refusing = True

        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            self.refusing = True

    plan = (Closing(THOUSAND[:600]), NONE), (Refusing(THOUSAND), NONE), (Stub(THOUSAND), NONE)
    async with client_behind(*plan) as (client, _):
        seen: list[Entry] = []
        await seen_of(client.entries(stop=1000), seen)
        assert seen == THOUSAND


async def test_what_is_refused_at_first_is_an_error() -> None:
    async with client_behind((Stub(THOUSAND), NONE)) as (client, wire):
        with pytest.raises(BadFromEntry):
            await seen_of(client.entries(from_entry=1001), [])
        with pytest.raises(BadFromBookmark):
            await seen_of(client.entries(from_bookmark=b"none"), [])
        assert wire.connections == 1


async def test_from_a_bookmark() -> None:
    class Mute(Stub):
        """Answers a Start, and ends before any entry."""

        def pump(self) -> bytes:
            self.closed = True
            return b""

    third = Closing(THOUSAND[:600])
    plan = [(stub, NONE) for stub in (Mute(THOUSAND), Mute(THOUSAND), third, Stub(THOUSAND))]
    async with client_behind(*plan) as (client, _):
        seen: list[Entry] = []
        await seen_of(client.entries(from_bookmark=key(30), stop=700), seen)
        assert seen == THOUSAND[30:700]
        assert third.seen[:2] == [HeaderQuery(), StartBookmark(key(30))]
    gone = [Entry(e.number, 5, e.data) for e in THOUSAND]
    async with client_behind((Mute(THOUSAND), NONE), (Stub(gone), NONE)) as (client, _):
        with pytest.raises(BadFromBookmark):
            await seen_of(client.entries(from_bookmark=key(30)), [])


async def test_a_head_that_went_below_a_start_at_the_head() -> None:
    class Quiet(Stub):
        def pump(self) -> bytes:
            self.closed = True
            return b""

    plan = (Quiet(THOUSAND[:600]), NONE), (Stub(THOUSAND[:599]), NONE)
    async with client_behind(*plan) as (client, _):
        with pytest.raises(HistoryChanged, match="599 entries, and entry 600 is the next"):
            await seen_of(client.entries(from_entry=600), [])


async def test_types_are_chosen_over_all_connections() -> None:
    plan = (Closing(THOUSAND[:600]), NONE), (Stub(THOUSAND), NONE)
    for types in ({3}, [0xB0, 3], {77}):
        async with client_behind(*plan) as (client, _):
            seen: list[Entry] = []
            batches = client.batches(stop=1000, types=types)
            await seen_of(batches, seen)
            assert seen == [entry for entry in THOUSAND if entry.type in types]
            assert batches.position is not None
            assert batches.position.next_entry == 1000
        plan = (Closing(THOUSAND[:600]), NONE), (Stub(THOUSAND), NONE)


async def test_invalid_types_are_rejected_at_once() -> None:
    async with client_behind((Stub(THOUSAND), NONE)) as (client, _):
        with pytest.raises(BadEntryType, match="not 4294967296"):
            client.batches(types={3, 2**32})


# Tasks


async def test_a_wait_for_the_server_can_be_cancelled_and_continued(
    autojump_clock: Any, refused: ConnectFailed
) -> None:
    plan = (Closing(THOUSAND[:600]), NONE), (Stub(THOUSAND), NONE)
    async with client_behind(*plan, backoff=Backoff(1, 4)) as (client, wire):
        way = absent(client, wire, 100, refused)
        seen: list[Entry] = []
        entries = client.entries(stop=1000)
        while len(seen) < 1000:
            with trio.move_on_after(0.5):
                await seen_of(entries, seen)
                break
        assert seen == THOUSAND
        assert len(way.tries) < 60


@pytest.mark.parametrize("how", ["stop", "aclose"])
async def test_a_wait_for_the_server_is_ended_by_another_task(
    how: str, autojump_clock: Any, refused: ConnectFailed
) -> None:
    plan = (Closing(THOUSAND[:600]), NONE)
    async with client_behind(plan, backoff=Backoff(10, 10)) as (client, wire):
        absent(client, wire, 86_400, refused)
        seen: list[Entry] = []

        async def follow() -> None:
            if how == "stop":
                await seen_of(client.entries(), seen)
                return
            with pytest.raises(StreamClosed, match="while it was in use"):
                await seen_of(client.entries(), seen)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(follow)
            await trio.sleep(60)
            await getattr(client, how)()
        assert seen == THOUSAND[:600]


async def test_leaving_while_the_server_is_away() -> None:
    plan = (Closing(THOUSAND[:600]), NONE), (Stub(THOUSAND), NONE)
    async with client_behind(*plan) as (client, wire):
        async with client.entries() as entries:
            async for entry in entries:
                if entry.number == 599:
                    break
        assert await client.entry(3) == THOUSAND[3]
        assert wire.connections == 2


# Silence


async def test_a_quiet_stream_is_left_in_peace(autojump_clock: Any) -> None:
    plan = [(Stub(THOUSAND[:600]), NONE) for _ in range(200)]
    async with client_behind(*plan, heartbeat=10) as (client, wire):
        seen: list[Entry] = []
        with trio.move_on_after(1000):
            await seen_of(client.entries(), seen)
        assert seen == THOUSAND[:600]
        assert not any(isinstance(event, Start) for stub, _ in plan[1:] for event in stub.seen)
        assert 90 <= wire.connections <= 100


async def test_a_stream_that_grew_in_silence_is_joined_again(autojump_clock: Any) -> None:
    half = Fault(60, End.HALF_OPEN)
    plan = (Stub(THOUSAND[:600]), half), *[(Stub(THOUSAND), NONE) for _ in range(9)]
    async with client_behind(*plan, heartbeat=10) as (client, _):
        seen: list[Entry] = []
        await seen_of(client.entries(from_entry=600, stop=1000), seen)
        assert seen == THOUSAND[600:]
        assert 20 <= trio.current_time() <= 30


async def test_a_server_that_answers_no_client_is_given_up(autojump_clock: Any) -> None:
    deaf = Stub(THOUSAND, deaf=(HeaderQuery,))
    plan = (Stub(THOUSAND[:600]), NONE), (deaf, NONE), (Stub(THOUSAND), NONE)
    async with client_behind(*plan, heartbeat=10, timeout=5) as (client, _):
        seen: list[Entry] = []
        await seen_of(client.entries(stop=1000), seen)
        assert seen == THOUSAND
        assert 14 <= trio.current_time() <= 16


async def test_a_slow_answer_is_an_answer(autojump_clock: Any) -> None:
    # The last entries take longer than an answer may, but something comes all the time.
    slow = Fault(1 << 40, piece=5000, delay=3)
    plan = (Closing(THOUSAND[:600]), NONE), (Stub(THOUSAND), slow)
    async with client_behind(*plan, heartbeat=None, timeout=5) as (client, wire):
        seen: list[Entry] = []
        await seen_of(client.entries(stop=1000), seen)
        assert seen == THOUSAND
        assert wire.connections == 2
        assert trio.current_time() > 30


# Queries


async def test_a_query_over_a_stale_connection_is_asked_again() -> None:
    class Brief(Stub):
        """Answers once and closes at the next request."""

        def answer(self, event: Any) -> bytes:
            if len(self.seen) > 1:
                self.closed = True
                return b""
            return super().answer(event)

    stubs = [(Brief(THOUSAND), NONE) for _ in range(4)]
    async with client_behind(*stubs) as (client, wire):
        for number in range(3):
            assert await client.entry(number) == THOUSAND[number]
            assert wire.connections == number + 1


async def test_a_query_is_not_asked_a_third_time() -> None:
    plan = [(Stub(THOUSAND), Fault(49)), (Stub(THOUSAND), Fault(0)), (Stub(THOUSAND), NONE)]
    async with client_behind(*plan) as (client, wire):
        await client.header()
        with pytest.raises(ConnectionLost):
            await client.entry(3)
        assert wire.connections == 2
        assert await client.entry(3) == THOUSAND[3]


async def test_half_an_answer_is_not_asked_again() -> None:
    plan = (Stub(THOUSAND), Fault(49 + 20)), (Stub(THOUSAND), NONE)
    async with client_behind(*plan) as (client, wire):
        await client.header()
        with pytest.raises(ConnectionLost, match="in the middle"):
            await client.entry(900)
        assert wire.connections == 1
        assert not any(event == EntryQuery(900) for event in plan[1][0].seen)


@pytest.mark.parametrize("options", [{"heartbeat": 0}, {"heartbeat": -1}, {"retry_for": -1}])
def test_waits_that_are_none(options: dict[str, Any]) -> None:
    ours, _ = trio.testing.memory_stream_pair()
    with pytest.raises(UsageError):
        client_over(ours, **options)


@pytest.mark.parametrize("waits", [(2, 1), (-1, 1), (1, 2, 0.5)])
def test_a_backoff_that_is_none(waits: tuple[float, ...]) -> None:
    with pytest.raises(UsageError):
        Backoff(*waits)


async def test_a_position_says_where_it_is() -> None:
    async with client_behind((Stub(THOUSAND), NONE)) as (client, _):
        async with client.entries(from_bookmark=key(10)) as entries:
            assert entries.position is None
            first = await entries.__anext__()
            assert entries.position is not None
            assert entries.position.next_entry == first.number + 1 == 11
            assert len(entries.position.trail) == 8
        assert client.entries_by_number([1]).position is None
        position = entries.position
        assert position == Position.from_json(position.to_json())
