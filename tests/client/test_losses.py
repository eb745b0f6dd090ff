"""What a call of the Trio client costs: cancelled, refused, answered by a server that misbehaves
or leaves. Each says whether the connection was lost by it, and that the client continues.
"""

from __future__ import annotations

from typing import Any

import pytest
import trio
import trio.testing

from datastreamer._codec import Entry
from datastreamer.errors import (
    AlreadyStarted,
    BadFromBookmark,
    BadFromEntry,
    ConnectionLost,
    ProtocolViolation,
    StreamClosed,
)
from datastreamer.protocol.commands import EntryQuery, HeaderQuery, Start, Stop
from tests.network.stub import Stub, sample, serve_stream
from tests.network.wired import client_of, client_over, gather, listed

TEN = sample(10)


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


async def test_a_cancelled_look_up_continues(autojump_clock: Any) -> None:
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
        client = client_over(await dial(), redial=dial)
        entries = client.entries_by_number([1, 2, 3])
        with trio.move_on_after(0.01) as scope:
            await entries.__anext__()
        assert scope.cancelled_caught
        with pytest.raises(ConnectionLost, match="cancelled in the middle of a request"):
            await entries.__anext__()
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
        message = r"the server refused Start from entry 11: Bad from entry \(error 3\)"
        with pytest.raises(BadFromEntry, match=message) as caught:
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
        with pytest.raises(ConnectionLost, match=r"another stream type than 1"):
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
