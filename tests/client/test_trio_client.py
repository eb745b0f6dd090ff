"""The Trio client against stub servers: queries, streamings, look-ups, whose turn it is."""

from __future__ import annotations

from typing import Any

import pytest
import trio
import trio.testing

from datastreamer._codec import Entry
from datastreamer.client.effects import Connect, Steps
from datastreamer.client.trio_driver import Dialled, TrioDriver
from datastreamer.errors import BadBookmark, BadRange, UnknownBookmark, UnknownEntry, UsageError
from datastreamer.format import TYPE_BOOKMARK, Header
from datastreamer.protocol.commands import EntryQuery, HeaderQuery, Start, StartBookmark, Stop
from datastreamer.protocol.messages import OK, encode_answer
from tests.network.stub import Stub, key, sample
from tests.network.wired import client_of, commands, gather, listed

TEN = sample(10)


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


async def test_a_bookmark_in_answer_to_a_bookmark_is_not_an_event() -> None:
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
        with pytest.raises(UsageError, match="pass only one of"):
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


async def test_stop_by_some_tasks_and_by_one_that_gives_up() -> None:
    stub = Stub(TEN, deaf=(Stop,))
    async with client_of(stub) as (client, wire), trio.open_nursery() as nursery:
        nursery.start_soon(client.run, lambda entry: None)
        await trio.testing.wait_all_tasks_blocked()
        for gives_up in (True, False, False):
            async with trio.open_nursery() as stopping:
                (stopping if gives_up else nursery).start_soon(client.stop)
                await trio.testing.wait_all_tasks_blocked()
                stopping.cancel_scope.cancel()
        await wire.server_end.send_all(stub.answer(Stop()))
        await client.stop()
        assert await client.entry(6) == TEN[6]
    assert commands(stub) == [Start(0), Stop(), EntryQuery(6)]


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
            with pytest.raises(UsageError, match="this client is in use"):
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


async def test_a_cancelled_connect_is_one_cancellation(autojump_clock: Any) -> None:
    """Not a group, as nurseries raise: Trio connects in one."""
    raised: list[BaseException] = []

    async def dial() -> trio.abc.Stream:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(trio.sleep_forever)
            await trio.sleep_forever()
        raise AssertionError

    def connecting() -> Steps[None]:
        try:
            yield Connect(9)
        except BaseException as error:
            raised.append(error)
            raise

    with trio.move_on_after(1) as scope:
        await TrioDriver(Dialled("the server", dial)).run(connecting())
    assert scope.cancelled_caught
    assert [type(error) for error in raised] == [trio.Cancelled]
