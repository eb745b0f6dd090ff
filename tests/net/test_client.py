"""The Trio client against stub servers: over memory streams, and over loopback."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from typing import Any

import pytest
import trio
import trio.testing

from datastreamer._codec import Entry
from datastreamer.errors import (
    AlreadyStarted,
    BadBookmark,
    BadFromBookmark,
    BadFromEntry,
    BadRange,
    ConnectFailed,
    ConnectionLost,
    ProtocolViolation,
    StreamClosed,
    UnknownBookmark,
    UnknownEntry,
    UsageError,
)
from datastreamer.format import TYPE_BOOKMARK, Header
from datastreamer.net.client import Client, connect
from datastreamer.protocol.messages import (
    OK,
    EntryQuery,
    HeaderQuery,
    Start,
    StartBookmark,
    Stop,
    encode_answer,
)
from tests.net.stub import Stub, StubServer, handler, key, sample, serve_stream

TEN = sample(10)


class Wire:
    """A client on memory streams; each new connection is served by the next of `stubs`."""

    def __init__(self, nursery: trio.Nursery, stubs: tuple[Stub, ...], size: int) -> None:
        self.nursery = nursery
        self.stubs = list(stubs)
        self.size = size
        self.connections = 0
        self.server_end: trio.testing.MemoryStapled  # type: ignore[name-defined]

    async def dial(self) -> trio.abc.Stream:
        ours, theirs = trio.testing.memory_stream_pair()
        self.server_end = theirs
        self.nursery.start_soon(serve_stream, self.stubs[self.connections], theirs, self.size)
        self.connections += 1
        return ours


@asynccontextmanager
async def client_of(
    *stubs: Stub, redial: bool = False, size: int = 65536, timeout: float = 10
) -> AsyncIterator[tuple[Client, Wire]]:
    async with trio.open_nursery() as nursery:
        wire = Wire(nursery, stubs, size)
        client = Client(
            await wire.dial(),
            redial=wire.dial if redial else None,
            timeout=timeout,
            peer="stub:1",
            resume=False,
        )
        yield client, wire
        await client.aclose()
        nursery.cancel_scope.cancel()


async def listed(items: Any) -> list[Entry]:
    return [item async for item in items]


async def gather(items: Any, seen: list[Entry]) -> None:
    """As `listed`, keeping what came before an error."""
    async for item in items:
        seen.append(item)  # noqa: PERF401


def commands(stub: Stub) -> list[object]:
    return [event for event in stub.seen if not str(event).startswith("End")]


# Queries


async def test_queries() -> None:
    async with client_of(Stub(sample(25))) as (client, _):
        assert await client.header() == Header(2, 137, 1, 4096 + 25, 25)
        assert await client.entry(13) == sample(25)[13]
        assert await client.entry(0) == sample(25)[0]
        assert await client.bookmark(key(20)) == sample(25)[21]


async def test_what_is_not_there() -> None:
    async with client_of(Stub(sample(21))) as (client, _):
        with pytest.raises(UnknownEntry, match="no entry 21: the stream holds 0 to 20") as caught:
            await client.entry(21)
        assert (caught.value.number, caught.value.total_entries) == (21, 21)
        with pytest.raises(UnknownBookmark, match="no bookmark 0xff"):
            await client.bookmark(b"\xff")
        with pytest.raises(UnknownBookmark):
            await client.bookmark(key(20))
        assert (await client.header()).total_entries == 21


async def test_an_entry_that_is_committed_while_it_is_asked_for() -> None:
    class Growing(Stub):
        def answer(self, event: Any) -> bytes:
            if event == HeaderQuery():
                self.entries = TEN
            return super().answer(event)

    async with client_of(Growing(TEN[:5])) as (client, _):
        assert await client.entry(7) == TEN[7]


async def test_a_server_whose_header_promises_more_than_it_has() -> None:
    async with client_of(Stub(TEN, header_total=12)) as (client, _):
        with pytest.raises(UnknownEntry):
            await client.entry(11)


async def test_a_bookmark_in_answer_to_a_bookmark_is_no_event() -> None:
    class Odd(Stub):
        def answer(self, event: Any) -> bytes:
            return OK + encode_answer(9, TYPE_BOOKMARK, b"last")

    async with client_of(Odd(TEN)) as (client, _):
        with pytest.raises(UnknownBookmark, match="no event follows bookmark 0x6b"):
            await client.bookmark(b"k")


async def test_what_cannot_be_asked() -> None:
    stub = Stub(TEN)
    async with client_of(stub) as (client, _):
        with pytest.raises(UsageError, match="-1"):
            await client.entry(-1)
        with pytest.raises(BadBookmark):
            await client.bookmark(b"")
        with pytest.raises(BadRange):
            client.entries(from_entry=5, stop=4)
        with pytest.raises(UsageError, match="not at both"):
            client.entries(from_entry=5, from_bookmark=b"k")
        with pytest.raises(UsageError, match="window"):
            client.entries_by_number([1], window=0)
        assert await client.entry(1) == TEN[1]
    assert commands(stub) == [EntryQuery(1)]


# Streaming


@pytest.mark.parametrize("size", [65536, 1, 50])
async def test_entries_to_a_number(size: int) -> None:
    stub = Stub(sample(60))
    async with client_of(stub, size=size) as (client, _):
        assert await listed(client.entries(stop=60)) == sample(60)
        assert await listed(client.entries(from_entry=57, stop=59)) == sample(60)[57:59]
        assert await listed(client.entries(from_bookmark=key(30), stop=33)) == sample(60)[30:33]
        assert await client.entry(5) == sample(60)[5]
    assert commands(stub) == [
        *(Start(0), Stop(), Start(57), Stop(), StartBookmark(key(30)), Stop()),
        EntryQuery(5),
    ]


async def test_nothing_is_asked_for_nothing() -> None:
    stub = Stub(TEN)
    async with client_of(stub) as (client, _):
        assert await listed(client.entries(from_entry=4, stop=4)) == []
        assert await listed(client.entries(from_entry=99, stop=99)) == []
        async with client.batches(stop=0) as batches:
            assert await listed(batches) == []
        assert await listed(client.entries(from_bookmark=key(0), stop=0)) == []
        assert await client.entry(5) == TEN[5]
    assert commands(stub) == [StartBookmark(key(0)), Stop(), EntryQuery(5)]


async def test_batches_are_runs() -> None:
    async with client_of(Stub(sample(60))) as (client, _):
        numbers: list[int] = []
        count = 0
        async for batch in client.batches(from_entry=2, stop=60):
            count += 1
            numbers += range(batch.first_number, batch.next_number)
            assert list(batch) == sample(60)[batch.first_number : batch.next_number]
        assert numbers == list(range(2, 60))
        assert count == 1


async def test_entries_go_on_as_they_are_committed() -> None:
    stub = Stub(TEN[:3])
    async with client_of(stub) as (client, wire):
        entries = client.entries()
        for number in range(3):
            assert await entries.__anext__() == TEN[number]
        for number in range(3, 10):
            await wire.server_end.send_all(stub.append(TEN[number]))
            assert await entries.__anext__() == TEN[number]
        await entries.aclose()
        assert (await client.header()).total_entries == 10


async def test_a_streaming_begins_when_it_is_entered() -> None:
    stub = Stub(TEN)
    async with client_of(stub) as (client, _):
        entries = client.entries(from_entry=9)
        assert commands(stub) == []
        async with entries:
            assert commands(stub) == [Start(9)]
        assert commands(stub) == [Start(9), Stop()]


@pytest.mark.parametrize("kind", ["entries", "batches"])
async def test_leaving_early_leaves_the_client_usable(kind: str) -> None:
    stub = Stub(sample(100))
    async with client_of(stub, size=100) as (client, _):
        for _round in range(3):
            items = getattr(client, kind)(from_entry=5)
            async for _item in items:
                break
            await items.aclose()
            await items.aclose()
            assert await listed(items) == []
            assert await client.entry(3) == sample(100)[3]
    assert commands(stub) == [Start(5), Stop(), EntryQuery(3)] * 3


async def test_an_error_in_the_block_ends_the_streaming() -> None:
    stub = Stub(sample(100))
    async with client_of(stub) as (client, _):

        async def fail() -> None:
            async with client.entries() as entries:
                async for entry in entries:
                    if entry.number == 5:
                        raise LookupError

        with pytest.raises(LookupError):
            await fail()
        assert await client.entry(3) == sample(100)[3]
    assert commands(stub) == [Start(0), Stop(), EntryQuery(3)]


async def test_a_call_ends_an_iteration_that_was_left_open() -> None:
    stub = Stub(sample(100))
    async with client_of(stub) as (client, _):
        async for _entry in client.entries():
            break
        assert await client.entry(3) == sample(100)[3]
        entries = client.entries()
        assert await entries.__anext__() == sample(100)[0]
        await client.header()
        with pytest.raises(UsageError, match="ended by a later call"):
            await entries.__anext__()
        await entries.aclose()
        assert await client.entry(4) == sample(100)[4]


async def test_another_iteration_ends_the_one_before() -> None:
    async with client_of(Stub(sample(100))) as (client, _):
        first, second = client.entries(), client.entries(from_entry=50)
        assert (await first.__anext__()).number == 0
        assert (await second.__anext__()).number == 50
        assert (await second.__anext__()).number == 51
        with pytest.raises(UsageError):
            await first.__anext__()


@pytest.mark.parametrize("redial", [False, True])
async def test_old_servers_send_the_rest_of_an_operation_behind_a_stop(redial: bool) -> None:
    stub = Stub(sample(20)[:15], behind_stop=sample(20)[15:])
    async with client_of(stub, redial=redial, size=40) as (client, wire):
        async with client.entries(from_entry=14) as entries:
            assert await entries.__anext__() == sample(20)[14]
        assert await client.entry(2) == sample(20)[2]
        assert await listed(client.entries(from_entry=10, stop=15)) == sample(20)[10:15]
        assert (await client.header()).total_entries == 15
        assert wire.connections == 1


async def test_stop_inside_the_loop() -> None:
    async with client_of(Stub(sample(100))) as (client, _):
        seen = []
        async for entry in client.entries():
            seen.append(entry.number)
            if entry.number == 5:
                await client.stop()
        assert seen == [0, 1, 2, 3, 4, 5]
        assert await client.entry(6) == sample(100)[6]


async def test_stop_with_nothing_to_stop() -> None:
    stub = Stub(TEN)
    async with client_of(stub) as (client, _):
        await client.stop()
        assert await client.entry(6) == TEN[6]
        await client.stop()
    assert commands(stub) == [EntryQuery(6)]


async def test_stop_by_another_task_ends_a_run() -> None:
    stub = Stub(TEN)
    async with client_of(stub) as (client, _), trio.open_nursery() as nursery:
        seen: list[Entry] = []
        nursery.start_soon(client.run, seen.append)
        await trio.testing.wait_all_tasks_blocked()
        assert seen == TEN
        await client.stop()
        assert await client.entry(6) == TEN[6]
    assert commands(stub) == [Start(0), Stop(), EntryQuery(6)]


async def test_stop_waits_for_the_server_and_the_iteration_does_not() -> None:
    stub = Stub(TEN, deaf=(Stop,))
    async with client_of(stub) as (client, wire), trio.open_nursery() as nursery:
        held, go, ran, stopped = (trio.Event() for _ in range(4))

        async def callback(entry: Entry) -> None:
            held.set()
            await go.wait()

        async def run() -> None:
            await client.run(callback)
            ran.set()

        async def stop() -> None:
            await client.stop()
            stopped.set()

        nursery.start_soon(run)
        await held.wait()
        nursery.start_soon(stop)
        await trio.testing.wait_all_tasks_blocked()
        go.set()
        await ran.wait()
        assert not stopped.is_set()
        await wire.server_end.send_all(stub.answer(Stop()))
        await stopped.wait()
        assert await client.entry(6) == TEN[6]


async def test_stop_by_another_task_while_the_first_is_busy_elsewhere() -> None:
    stub = Stub(TEN)
    async with client_of(stub) as (client, _), trio.open_nursery() as nursery:
        held, go = trio.Event(), trio.Event()

        async def callback(entry: Entry) -> None:
            if entry.number == 4:
                held.set()
                await go.wait()

        nursery.start_soon(client.run, callback)
        await held.wait()
        await client.stop()
        assert await client.entry(6) == TEN[6]
        go.set()
        await trio.testing.wait_all_tasks_blocked()
        assert await client.entry(7) == TEN[7]
    assert commands(stub) == [Start(0), Stop(), EntryQuery(6), EntryQuery(7)]


async def test_run_prints_a_line_an_entry(capsys: pytest.CaptureFixture[str]) -> None:
    async with client_of(Stub(TEN)) as (client, _):
        await client.run(stop=3)
        assert capsys.readouterr().out == "0 176 4\n1 1 1\n2 2 2\n"


async def test_run_calls_back() -> None:
    async with client_of(Stub(TEN)) as (client, _):
        seen: list[Entry] = []

        async def later(entry: Entry) -> None:
            await trio.lowlevel.checkpoint()
            seen.append(entry)

        await client.run(seen.append, from_entry=8, stop=10)
        await client.run(later, from_bookmark=key(0), stop=2)
        assert seen == [*TEN[8:], *TEN[:2]]


# Entries by number


@pytest.mark.parametrize("window", [1, 2, 7, 1024])
async def test_entries_by_number_in_the_order_asked_for(window: int) -> None:
    numbers = [n * 37 % 50 for n in range(300)]
    async with client_of(Stub(sample(50)), size=300) as (client, _):
        found = await listed(client.entries_by_number(numbers, window=window))
        assert [entry.number for entry in found] == numbers
        assert found == [sample(50)[n] for n in numbers]
        assert await client.entry(1) == sample(50)[1]


async def test_the_window_bounds_what_is_underway() -> None:
    most = 0

    class Slow(Stub):
        """Answers one request at a time, and only when no more come."""

        def __init__(self) -> None:
            super().__init__(sample(50))
            self.waiting: list[Any] = []

        def receive(self, data: bytes) -> bytes:
            self.connection.receive(data)
            while (event := self.connection.next_event()) is not None:
                self.waiting.append(event)
            nonlocal most
            most = max(most, len(self.waiting))
            return b""

    stub = Slow()
    async with client_of(stub) as (client, wire), trio.open_nursery() as nursery:
        found: list[Entry] = []

        async def look_up() -> None:
            found.extend(await listed(client.entries_by_number(range(50), window=8)))

        nursery.start_soon(look_up)
        for _ in range(50):
            await trio.testing.wait_all_tasks_blocked()
            await wire.server_end.send_all(stub.answer(stub.waiting.pop(0)))
    assert found == sample(50)
    assert most == 8


async def test_a_number_that_is_not_there_ends_a_look_up() -> None:
    async with client_of(Stub(TEN), size=100) as (client, _):
        seen: list[Entry] = []
        with pytest.raises(UnknownEntry, match="no entry 77: the stream holds 0 to 9"):
            await gather(client.entries_by_number([3, 4, 77, 5, 6, 78]), seen)
        assert seen == TEN[3:5]
        assert await client.entry(6) == TEN[6]


async def test_a_number_that_is_none_ends_a_look_up() -> None:
    async with client_of(Stub(TEN)) as (client, _):
        with pytest.raises(UsageError, match="not -1"):
            await listed(client.entries_by_number([3, -1]))
        assert await client.entry(6) == TEN[6]


async def test_an_error_of_the_numbers_ends_a_look_up() -> None:
    def numbers() -> Any:
        yield from range(5)
        raise LookupError("no more")

    async with client_of(Stub(TEN)) as (client, _):
        with pytest.raises(LookupError, match="no more"):
            await listed(client.entries_by_number(numbers(), window=4))
        assert await client.entry(6) == TEN[6]


async def test_leaving_a_look_up_early() -> None:
    async with client_of(Stub(sample(50)), size=64) as (client, _):
        async with client.entries_by_number(range(50), window=20) as entries:
            async for entry in entries:
                if entry.number == 3:
                    break
        assert await client.entry(6) == sample(50)[6]
        entries = client.entries_by_number(range(50), window=20)
        assert (await entries.__anext__()).number == 0
        await client.stop()
        assert await listed(entries) == []
        assert await client.entry(7) == sample(50)[7]


async def test_stop_by_another_task_ends_a_look_up() -> None:
    stub = Stub(sample(50))
    async with client_of(stub) as (client, wire), trio.open_nursery() as nursery:
        stub.deaf = (EntryQuery,)
        found: list[Entry] = []

        async def look_up() -> None:
            found.extend(await listed(client.entries_by_number(range(50), window=4)))

        nursery.start_soon(look_up)
        await trio.testing.wait_all_tasks_blocked()
        nursery.start_soon(client.stop)
        await trio.testing.wait_all_tasks_blocked()
        stub.deaf = ()
        for number in range(4):
            await wire.server_end.send_all(stub.answer(EntryQuery(number)))
    assert found == sample(50)[: len(found)]
    assert len(commands(stub)) == 4


# Turns


async def test_one_task_at_a_time() -> None:
    stub = Stub(TEN, deaf=(EntryQuery,))
    async with client_of(stub) as (client, wire), trio.open_nursery() as nursery:
        found: list[Entry] = []

        async def ask() -> None:
            found.append(await client.entry(3))

        nursery.start_soon(ask)
        await trio.testing.wait_all_tasks_blocked()
        for call in (client.header, client.entries().__anext__, client.entries().__aenter__):
            with pytest.raises(UsageError, match="another task is using this client"):
                await call()
        await wire.server_end.send_all(stub.answer(EntryQuery(3)))
        await trio.testing.wait_all_tasks_blocked()
        assert found == [TEN[3]]
        assert (await client.header()).total_entries == 10


async def test_a_second_task_does_not_disturb_an_iteration() -> None:
    stub = Stub(TEN[:5])
    async with client_of(stub) as (client, wire), trio.open_nursery() as nursery:
        seen: list[Entry] = []

        async def follow() -> None:
            seen.extend(await listed(client.entries(stop=7)))

        nursery.start_soon(follow)
        await trio.testing.wait_all_tasks_blocked()
        with pytest.raises(UsageError):
            await client.header()
        await wire.server_end.send_all(stub.append(*TEN[5:7]))
        await trio.testing.wait_all_tasks_blocked()
        assert seen == TEN[:7]


# Cancellation


async def test_a_cancelled_query_costs_the_connection() -> None:
    async with client_of(Stub(TEN, deaf=(EntryQuery,)), Stub(TEN), redial=True) as (client, wire):
        with trio.move_on_after(0) as scope:
            await client.entry(3)
        assert scope.cancelled_caught
        assert wire.connections == 1
        assert await client.entry(4) == TEN[4]
        assert wire.connections == 2


async def test_a_cancelled_query_without_a_way_to_connect_again() -> None:
    async with client_of(Stub(TEN, deaf=(EntryQuery,))) as (client, _):
        with trio.move_on_after(0):
            await client.entry(3)
        for _ in range(2):
            with pytest.raises(ConnectionLost, match="stub:1 is lost; make a new client"):
                await client.entry(4)


async def test_a_cancelled_start_costs_the_connection() -> None:
    async with client_of(Stub(TEN, deaf=(Start,)), Stub(TEN), redial=True) as (client, wire):
        entries = client.entries()
        with trio.move_on_after(0) as scope:
            await entries.__anext__()
        assert scope.cancelled_caught
        assert await entries.__anext__() == TEN[0]
        assert wire.connections == 2


async def test_a_cancelled_wait_for_entries_loses_nothing(autojump_clock: Any) -> None:
    stub = Stub(TEN[:3])
    async with client_of(stub, Stub(TEN), redial=True) as (client, wire):
        entries = client.entries()
        seen: list[Entry] = []
        for round_ in range(3, 10):
            with trio.move_on_after(1) as scope:
                await gather(entries, seen)
            assert scope.cancelled_caught
            assert seen == TEN[:round_]
            await wire.server_end.send_all(stub.append(TEN[round_]))
        await entries.aclose()
        assert (await client.header()).total_entries == 10
        assert wire.connections == 1


async def test_a_cancelled_block_ends_its_streaming() -> None:
    async with client_of(Stub(TEN), Stub(TEN), redial=True) as (client, wire):
        with trio.CancelScope() as scope:
            async with client.entries() as entries:
                async for entry in entries:
                    if entry.number == 5:
                        scope.cancel()
        assert scope.cancelled_caught
        assert await client.entry(4) == TEN[4]
        assert wire.connections == 2


async def test_a_cancelled_look_up_goes_on(autojump_clock: Any) -> None:
    stub = Stub(TEN, deaf=(EntryQuery,))
    async with client_of(stub) as (client, wire):
        entries = client.entries_by_number([1, 2, 3], window=3)
        with trio.move_on_after(1) as scope:
            await entries.__anext__()
        assert scope.cancelled_caught
        for number in (1, 2, 3):
            await wire.server_end.send_all(stub.answer(EntryQuery(number)))
        assert await listed(entries) == TEN[1:4]


async def test_a_request_that_is_cancelled_half_sent_costs_the_connection(
    autojump_clock: Any,
) -> None:
    stub, dialled = Stub(TEN), []

    async def dial() -> trio.abc.Stream:
        # The first one blocks in sending, as a full socket does.
        ours, theirs = trio.testing.lockstep_stream_pair()
        if dialled:
            nursery.start_soon(serve_stream, stub, theirs)
        dialled.append(ours)
        return ours

    async with trio.open_nursery() as nursery:
        client = Client(await dial(), redial=dial)
        entries = client.entries_by_number([1, 2, 3])
        with trio.move_on_after(0.01) as scope:
            await entries.__anext__()
        assert scope.cancelled_caught
        assert await listed(entries) == []
        assert await client.entry(4) == TEN[4]
        assert len(dialled) == 2
        await client.aclose()


# Refusals


@pytest.mark.parametrize(
    "after_refusal, connections", [("usable", 1), ("closed", 2), ("refusing", 2)]
)
async def test_a_refusal_is_raised_and_the_client_stays_usable(
    after_refusal: str, connections: int
) -> None:
    stubs = Stub(TEN, after_refusal=after_refusal), Stub(TEN)
    async with client_of(*stubs, redial=True) as (client, wire):
        told = r"the server refused Start from entry 11: Bad from entry \(error 3\)"
        with pytest.raises(BadFromEntry, match=told) as caught:
            await listed(client.entries(from_entry=11))
        assert (caught.value.number, caught.value.text) == (3, "Bad from entry")
        assert await client.entry(4) == TEN[4]
        assert wire.connections == connections
        assert await listed(client.entries(from_entry=8, stop=10)) == TEN[8:]


async def test_a_refused_bookmark() -> None:
    async with client_of(Stub(TEN)) as (client, _):
        with pytest.raises(BadFromBookmark, match="Start from bookmark 0x6e6f"):
            async with client.entries(from_bookmark=b"no"):
                pass
        assert await client.entry(4) == TEN[4]


@pytest.mark.parametrize("after_refusal", ["closed", "refusing"])
async def test_a_refusal_that_costs_the_only_connection(after_refusal: str) -> None:
    async with client_of(Stub(TEN, after_refusal=after_refusal)) as (client, _):
        with pytest.raises(BadFromEntry):
            await listed(client.entries(from_entry=11))
        with pytest.raises(ConnectionLost):
            await client.entry(4)


async def test_a_server_that_goes_silent_after_a_refusal(autojump_clock: Any) -> None:
    stubs = Stub(TEN, deaf=(HeaderQuery,)), Stub(TEN)
    async with client_of(*stubs, redial=True, timeout=7) as (client, wire):
        with pytest.raises(BadFromEntry):
            await listed(client.entries(from_entry=11))
        start = trio.current_time()
        assert await client.entry(4) == TEN[4]
        assert trio.current_time() - start == 7
        assert wire.connections == 2


async def test_a_refused_query() -> None:
    stub = Stub(TEN)
    stub.refusing = True
    async with client_of(stub, Stub(TEN), redial=True) as (client, wire):
        with pytest.raises(AlreadyStarted, match="refused Entry 3: Already started"):
            await client.entry(3)
        assert await client.entry(3) == TEN[3]
        assert wire.connections == 2


async def test_a_refused_look_up() -> None:
    stub = Stub(TEN)
    stub.refusing = True
    async with client_of(stub, Stub(TEN), redial=True) as (client, wire):
        with pytest.raises(AlreadyStarted):
            await listed(client.entries_by_number([3, 4, 5]))
        assert await client.entry(3) == TEN[3]
        assert wire.connections == 2


# Servers that misbehave, and connections that end


async def test_a_gap_is_a_violation_and_costs_the_connection() -> None:
    class Gap(Stub):
        def pump(self) -> bytes:
            return b"".join(entry.pack() for entry in (*TEN[:5], *TEN[6:]))

    async with client_of(Gap(TEN), Stub(TEN), redial=True) as (client, wire):
        seen: list[Entry] = []
        with pytest.raises(ProtocolViolation, match=r"stub:1 sent .*6 where 5"):
            await gather(client.entries(), seen)
        assert seen == TEN[:5]
        assert await client.entry(3) == TEN[3]
        assert wire.connections == 2


async def test_a_server_that_never_stops(autojump_clock: Any) -> None:
    class Endless(Stub):
        def answer(self, event: Any) -> bytes:
            return b"" if event == Stop() else super().answer(event)

    large = [Entry(n, 1, bytes(500_000)) for n in range(60)]
    for stub, redialled in ((Endless(large), True), (Endless(TEN), True), (Endless(TEN), False)):
        async with client_of(stub, Stub(TEN), redial=redialled) as (client, wire):
            async for _entry in client.entries():
                break
            if redialled:
                assert await client.entry(3) == TEN[3]
                assert wire.connections == 2
            else:
                with pytest.raises(ConnectionLost):
                    await client.entry(3)


async def test_the_end_of_the_connection() -> None:
    async with client_of(Stub(TEN), Stub(TEN), Stub(TEN), redial=True) as (client, wire):
        entries = client.entries()
        assert [await entries.__anext__() for _ in TEN] == TEN
        await wire.server_end.aclose()
        with pytest.raises(ConnectionLost, match=r"stub:1 closed the connection; connect again"):
            await entries.__anext__()
        assert await client.entry(3) == TEN[3]
        await wire.server_end.aclose()
        with pytest.raises(ConnectionLost):
            await client.entry(3)
        assert await client.entry(3) == TEN[3]
        assert wire.connections == 3


async def test_the_end_in_the_middle_of_an_answer() -> None:
    stub = Stub(TEN, deaf=(EntryQuery,))
    async with client_of(stub) as (client, wire), trio.open_nursery() as nursery:

        async def end() -> None:
            await trio.testing.wait_all_tasks_blocked()
            await wire.server_end.send_all(stub.answer(EntryQuery(3))[:-1])
            await wire.server_end.send_eof()

        nursery.start_soon(end)
        with pytest.raises(ConnectionLost, match="in the middle of an answer"):
            await client.entry(3)


async def test_a_wrong_stream_type_shows_at_the_first_request() -> None:
    async with client_of(Stub(TEN, stream_type=2)) as (client, _):
        with pytest.raises(ConnectionLost, match="another stream type than theirs: is it 1"):
            await client.header()


async def test_a_closed_client() -> None:
    async with client_of(Stub(TEN)) as (client, _):
        entries = client.entries()
        await entries.__anext__()
        await client.aclose()
        await client.aclose()
        for call in (client.header, client.entries().__anext__):
            with pytest.raises(StreamClosed, match="closed"):
                await call()
        assert await listed(entries) == []
        await client.stop()


async def test_closing_a_client_under_a_task() -> None:
    async with client_of(Stub(TEN)) as (client, _), trio.open_nursery() as nursery:

        async def follow() -> None:
            with pytest.raises(StreamClosed, match="while it was in use"):
                await listed(client.entries())

        nursery.start_soon(follow)
        await trio.testing.wait_all_tasks_blocked()
        await client.aclose()


# Over loopback


async def test_connect() -> None:
    with StubServer(handler(Stub(sample(500)))) as server:
        async with connect("127.0.0.1", server.port) as client:
            assert client.peer == f"127.0.0.1:{server.port}"
            assert client.stream_type == 1
            assert (await client.header()).total_entries == 500
            assert await client.entry(499) == sample(500)[499]
            assert await client.bookmark(key(10)) == sample(500)[11]
            assert await listed(client.entries(stop=500)) == sample(500)
            found = await listed(client.entries_by_number(range(500), window=64))
            assert found == sample(500)
            async with client.batches(from_bookmark=key(490)) as batches:
                batch = await batches.__anext__()
                assert batch.first_number == 490
            assert await client.entry(7) == sample(500)[7]
        with pytest.raises(StreamClosed):
            await client.header()
        assert server.accepted == 1


async def test_connect_by_another_stream_type() -> None:
    with StubServer(handler(Stub(TEN, stream_type=77))) as server:
        async with connect("127.0.0.1", server.port, stream_type=77) as client:
            assert await client.entry(7) == TEN[7]


async def test_connect_over_ipv6() -> None:
    try:
        server = StubServer(handler(Stub(TEN)), host="::1")
    except OSError:
        pytest.skip("no IPv6 on loopback here")
    with server:
        async with connect("::1", server.port) as client:
            assert client.peer == f"[::1]:{server.port}"
            assert await client.entry(7) == TEN[7]


async def test_a_refused_connection_is_made_again_without_a_word() -> None:
    stubs = [Stub(TEN, after_refusal=kind) for kind in ("closed", "refusing", "usable")]
    with StubServer(*map(handler, stubs)) as server:
        async with connect("127.0.0.1", server.port) as client:
            for accepted in (1, 2, 3, 3):
                with pytest.raises(BadFromEntry):
                    await listed(client.entries(from_entry=11))
                assert server.accepted == accepted
            assert await client.entry(4) == TEN[4]


async def test_a_connection_cancelled_in_mid_query_is_made_again() -> None:
    stubs = Stub(TEN, deaf=(EntryQuery,)), Stub(TEN)
    with StubServer(*map(handler, stubs)) as server:
        async with connect("127.0.0.1", server.port) as client:
            with trio.move_on_after(0.01) as scope:
                await client.entry(3)
            assert scope.cancelled_caught
            assert await client.entry(3) == TEN[3]


async def test_a_lost_socket() -> None:
    def hang_up(connection: Any) -> None:
        connection.recv(16)

    with StubServer(hang_up, handler(Stub(TEN))) as server:
        async with connect("127.0.0.1", server.port) as client:
            with pytest.raises(ConnectionLost, match=re.escape(client.peer)):
                await client.entry(3)
            assert await client.entry(3) == TEN[3]


async def test_closing_a_socket_under_a_task() -> None:
    with StubServer(handler(Stub(TEN))) as server:
        async with connect("127.0.0.1", server.port) as client, trio.open_nursery() as nursery:

            async def follow() -> None:
                with pytest.raises(StreamClosed, match="while it was in use"):
                    await listed(client.entries())

            nursery.start_soon(follow)
            await trio.testing.wait_all_tasks_blocked(0.01)
            await client.aclose()


async def test_a_request_larger_than_the_socket_takes() -> None:
    # Never so in practice: the requests of a whole window fit.
    with StubServer(handler(Stub(TEN))) as server:
        async with connect("127.0.0.1", server.port) as client:
            assert await listed(client.entries_by_number([5] * 50_000, window=1024)) == (
                [TEN[5]] * 50_000
            )


async def test_nobody_listens() -> None:
    with StubServer() as server:
        port = server.port
    told = rf"cannot connect to 127.0.0.1:{port}: Connection refused; is a server running there\?"
    with pytest.raises(ConnectFailed, match=told):
        async with connect("127.0.0.1", port):
            raise AssertionError


async def test_no_such_host() -> None:
    with pytest.raises(ConnectFailed, match=r"cannot connect to host.invalid:6900: "):
        async with connect("host.invalid"):
            raise AssertionError


@pytest.mark.parametrize("port", [0, -1, 65536])
async def test_no_such_port(port: int) -> None:
    with pytest.raises(UsageError, match=str(port)):
        async with connect("127.0.0.1", port):
            raise AssertionError


async def test_nobody_answers_in_time(monkeypatch: pytest.MonkeyPatch, autojump_clock: Any) -> None:
    async def never(host: str, port: int) -> Awaitable[trio.abc.Stream]:
        await trio.sleep_forever()
        raise AssertionError

    monkeypatch.setattr(trio, "open_tcp_stream", never)
    with pytest.raises(ConnectFailed, match=r"127.0.0.1:6900: no answer within 3 s"):
        async with connect("127.0.0.1", timeout=3):
            raise AssertionError
    assert trio.current_time() == pytest.approx(3, abs=0.1)
