"""Sources that are slow, silent, cut off or late: over memory streams, with time that jumps."""

from __future__ import annotations

from typing import Any

import pytest
import trio
from trio.testing import MockClock

from datastreamer.consumer.state import SourceBack, SourceFailed, SourceLost
from datastreamer.consumer.trio_reassembly import reassemble
from datastreamer.errors import ConnectionLost, ProtocolViolation, UsageError
from datastreamer.reassembly import Dropped
from datastreamer.reassembly.progress import ReassemblyProgress
from tests.network.network import SOON, Network, Serve, entries, hosts, messages_of, own
from tests.network.stub import Stub


class Kept:
    """A store in memory that remembers when it was asked."""

    def __init__(self, progress: ReassemblyProgress | None = None) -> None:
        self.progress = progress
        self.saves: list[ReassemblyProgress] = []

    def load(self) -> ReassemblyProgress | None:
        return self.progress

    def save(self, progress: ReassemblyProgress) -> None:
        self.saves.append(progress)


async def trickle(stream: trio.abc.Stream) -> None:
    """A server whose every byte takes a second."""
    await serve_slowly(Stub(entries(*messages_of(2))), stream)


async def serve_slowly(stub: Stub, stream: trio.abc.Stream) -> None:
    while data := await stream.receive_some(65536):
        for byte in stub.receive(data):
            await trio.sleep(1)
            await stream.send_all(bytes([byte]))


async def silent(stream: trio.abc.Stream) -> None:
    """A server that takes what it is sent, and says nothing."""
    while await stream.receive_some(65536):
        pass


async def test_a_slow_one_delays_nothing(network: Network, autojump_clock: MockClock) -> None:
    network.stub("quick", *messages_of(1), *messages_of(2)[:3], *messages_of(3))
    network.servers["slow"] = [trickle]
    async with reassemble(
        hosts("slow", "quick"), timeout=1e6, max_age=None, follow=True
    ) as payloads:
        before = trio.current_time()
        assert [int((await payloads.__anext__()).id) for _ in range(2)] == [1, 3]
        assert trio.current_time() - before < 1
        assert int((await payloads.__anext__()).id) == 2
        assert trio.current_time() - before > 100


async def test_a_silent_one_is_tried_again(network: Network, autojump_clock: MockClock) -> None:
    network.stub("good", *messages_of(1))
    honest = network.stub("late", *messages_of(2))
    network.servers["late"].insert(0, silent)
    reported: list[Any] = []
    async with reassemble(
        hosts("good", "late"),
        on_event=reported.append,
        timeout=5,
        backoff=SOON,
        follow=True,
    ) as payloads:
        assert int((await payloads.__anext__()).id) == 1
        assert trio.current_time() < 1
        assert int((await payloads.__anext__()).id) == 2
        assert 5 <= trio.current_time() < 7
        await network.commit("late", honest, *messages_of(3))
        assert int((await payloads.__anext__()).id) == 3
    assert reported[1:] == [SourceBack("late", 0)]
    assert isinstance(reported[0], SourceLost)


async def test_one_that_falls_silent_ends_where_ends_are_waited_for(
    network: Network, autojump_clock: MockClock
) -> None:
    network.stub("good", *messages_of(1))
    # It claims more than it sends.
    network.stub("odd", *messages_of(2), header_total=9)
    reported: list[Any] = []
    async with reassemble(hosts("good", "odd"), on_event=reported.append) as payloads:
        assert sorted([int(payload.id) async for payload in payloads]) == [1, 2]
    [failed] = reported
    assert isinstance(failed, SourceFailed)
    assert isinstance(failed.error, ConnectionLost)
    assert failed.source == "odd"


async def test_a_source_continues_after_a_lost_connection(
    network: Network, autojump_clock: MockClock
) -> None:
    """The connection ends within an entry, again and again."""
    network.stub("good", *messages_of(1)[:2])

    def cut(at: int) -> Serve:
        async def serve(stream: trio.abc.Stream) -> None:
            stub = Stub(entries(*messages_of(1), *messages_of(2)))
            while data := await stream.receive_some(65536):
                sent = stub.receive(data)
                if stub.cursor is not None:
                    await stream.send_all(sent[:at])
                    await stream.aclose()
                    return
                await stream.send_all(sent)

        return serve

    network.stub("cut", *messages_of(1), *messages_of(2))
    network.servers["cut"][:0] = [cut(at) for at in (20, 200, 300, 350, 420)]
    async with reassemble(hosts("good", "cut"), backoff=SOON, follow=True) as payloads:
        assert [int((await payloads.__anext__()).id) for _ in range(2)] == [1, 2]
    assert network.dialled.count("cut") == 6


async def test_one_that_sends_nonsense_fails_alone(
    network: Network, autojump_clock: MockClock
) -> None:
    async def nonsense(stream: trio.abc.Stream) -> None:
        stub = Stub(entries(*messages_of(2)))
        while data := await stream.receive_some(65536):
            sent = stub.receive(data)
            await stream.send_all(sent if stub.cursor is None else sent[:-60] + b"\xff" * 60)

    honest = network.stub("good", *messages_of(1))
    network.servers["mad"] = [nonsense]
    reported: list[Any] = []
    async with reassemble(
        hosts("mad", "good"), on_event=reported.append, backoff=SOON, follow=True
    ) as payloads:
        assert int((await payloads.__anext__()).id) == 1
        await network.commit("good", honest, *messages_of(3))
        assert int((await payloads.__anext__()).id) == 3
        with trio.move_on_after(60):
            await payloads.__anext__()
    # Once may be chance; test_outages counts the attempts.
    assert [type(event) for event in reported] == [SourceLost, SourceBack, SourceFailed]
    assert isinstance(reported[-1].error, ProtocolViolation)


async def test_a_source_that_is_unreachable_for_that_long(
    network: Network, autojump_clock: MockClock
) -> None:
    network.servers["dead"] = [None]
    network.stub("good", *messages_of(1))
    reported: list[Any] = []
    async with reassemble(
        hosts("dead", "good"),
        on_event=reported.append,
        retry_for=20,
        backoff=SOON,
        follow=True,
    ) as payloads:
        await payloads.__anext__()
        with trio.move_on_after(60):
            await payloads.__anext__()
    assert [type(event) for event in reported] == [SourceLost, SourceFailed]
    with pytest.raises(ConnectionLost, match="given up after"):
        async with reassemble(hosts("dead"), retry_for=20, backoff=SOON, follow=True) as payloads:
            await payloads.__anext__()


async def test_what_is_too_old_is_given_up_but_not_for_the_consumer(
    network: Network, autojump_clock: MockClock
) -> None:
    honest = network.stub("a", *messages_of(1), *messages_of(2)[:3])
    reported: list[Any] = []
    async with reassemble(
        hosts("a"), max_age=30, on_event=reported.append, follow=True
    ) as payloads:
        await payloads.__anext__()
        # The consumer takes an hour for it: that makes nothing old.
        await trio.sleep(3600)
        with trio.move_on_after(25):
            await payloads.__anext__()
        assert reported == []
        assert payloads.oldest_seconds == pytest.approx(25, abs=2)
        with trio.move_on_after(25):
            await payloads.__anext__()
        [dropped] = reported
        assert isinstance(dropped, Dropped)
        assert (dropped.why, dropped.payload, dropped.positions) == ("age", own(2), {"a": 4})
        # From there it can be had.
        await network.commit("a", honest, messages_of(2)[3])
        async with reassemble(hosts("a"), start=dropped.positions["a"], follow=True) as again:
            assert int((await again.__anext__()).id) == 2


async def test_places_are_saved_without_payloads_too(
    network: Network, autojump_clock: MockClock
) -> None:
    honest = network.stub("a", *messages_of(1))
    store = Kept()
    async with reassemble(hosts("a"), store=store, subscribe=[b"\x02"], follow=True) as payloads:
        # Nothing of it is subscribed to: its header reports it.
        assert (await payloads.__anext__()).parts == []
        for number in range(2, 50):
            with trio.move_on_after(1):
                await payloads.__anext__()
            part = messages_of(number)[1]
            await network.commit("a", honest, part)
    assert 5 <= len(store.saves) < 12
    assert store.saves[-1].places["a"].position > 45


async def test_a_wait_that_is_given_up_loses_nothing(
    network: Network, autojump_clock: MockClock
) -> None:
    honest = network.stub("a")
    async with reassemble(hosts("a"), follow=True) as payloads:
        for number in range(20):
            with trio.move_on_after(0.3):
                await payloads.__anext__()
            await network.commit("a", honest, *messages_of(number))
            assert int((await payloads.__anext__()).id) == number


async def test_one_task_at_a_time(
    network: Network, autojump_clock: MockClock, nursery: trio.Nursery
) -> None:
    network.stub("a")
    async with reassemble(hosts("a"), follow=True) as payloads, trio.open_nursery() as inner:
        inner.start_soon(payloads.__anext__)
        await trio.testing.wait_all_tasks_blocked()
        with pytest.raises(UsageError, match="another call"):
            await payloads.__anext__()
        inner.cancel_scope.cancel()
