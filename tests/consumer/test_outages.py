"""Sources that are lost, or fail, while others continue: reports, and later attempts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import trio
from trio.testing import MockClock

from datastreamer.consumer.async_reassembly import Reassembly
from datastreamer.consumer.sqlite_store import SqliteStore
from datastreamer.consumer.state import (
    SourceBack,
    SourceFailed,
    SourceLost,
    SourceRolledBack,
    SourceState,
)
from datastreamer.consumer.trio_reassembly import reassemble
from datastreamer.errors import (
    BadFromBookmark,
    ConnectionLost,
    DifferentStream,
    FileMissing,
    HistoryChanged,
    ProtocolViolation,
    TLSFailed,
    UnknownEntry,
)
from datastreamer.format import Header
from datastreamer.protocol.commands import HeaderQuery
from datastreamer.protocol.messages import OK
from datastreamer.protocol.server import Event
from datastreamer.reassembly import pack_message
from datastreamer.storage.stream import DataStream
from tests.network.fixtures import append
from tests.network.network import SOON, Message, Network, entries, hosts, messages_of
from tests.network.stub import Stub, serve_stream


async def next_id(payloads: Reassembly) -> int:
    item: Any = await payloads.__anext__()
    return int(item.id)


async def nothing_for(payloads: Reassembly, seconds: float) -> None:
    with trio.move_on_after(seconds) as scope:
        pytest.fail(f"{await payloads.__anext__()} came")
    assert scope.cancelled_caught


async def nonsense(stream: trio.abc.Stream) -> None:
    """A server that sends something else in place of its last entry."""
    stub = Stub(entries(*messages_of(2)))
    size = len(stub.entries[-1].pack())
    while data := await stream.receive_some(65536):
        sent = stub.receive(data)
        await stream.send_all(sent if stub.cursor is None else sent[:-size] + b"\xff" * size)


async def test_a_loss_is_reported_and_so_is_its_end(
    network: Network, autojump_clock: MockClock
) -> None:
    good = network.stub("good", *messages_of(1))
    late = network.stub("late", *messages_of(2))
    reported: list[Any] = []
    async with reassemble(
        hosts("good", "late"),
        on_event=reported.append,
        backoff=SOON,
        follow=True,
    ) as payloads:
        assert sorted([await next_id(payloads) for _ in range(2)]) == [1, 2]
        assert reported == []
        for turn in range(2):
            honest = network.servers["late"]
            network.servers["late"] = [None]
            await network.cut("late")
            await nothing_for(payloads, 10)
            [lost] = reported
            assert isinstance(lost, SourceLost)
            assert (lost.source, type(lost.error)) == ("late", ConnectionLost)
            assert payloads.sources["late"] is SourceState.connecting
            # The others go on meanwhile.
            await network.commit("good", good, *messages_of(10 + turn))
            assert await next_id(payloads) == 10 + turn
            network.servers["late"] = honest
            await nothing_for(payloads, 1)
            assert reported[1:] == [SourceBack("late", len(late.entries))]
            assert payloads.sources["late"] is SourceState.reading
            await network.commit("late", late, *messages_of(20 + turn))
            assert await next_id(payloads) == 20 + turn
            reported.clear()
        losses = payloads.samples()["datastreamer_reassembly_source_losses_total"]
        assert losses == [(["good"], 0), (["late"], 2)]


@pytest.mark.parametrize(
    "failure", [TLSFailed("a certificate that has expired"), nonsense], ids=["tls", "nonsense"]
)
async def test_one_that_failed_is_tried_again_ever_more_rarely(
    failure: Any, network: Network, autojump_clock: MockClock
) -> None:
    good = network.stub("good", *messages_of(1))
    network.stub("bad", *messages_of(2))
    mended = network.servers["bad"]
    network.servers["bad"] = [failure]
    reported: list[Any] = []
    async with reassemble(
        hosts("good", "bad"), on_event=reported.append, max_age=None, follow=True
    ) as payloads:
        assert await next_id(payloads) == 1
        await nothing_for(payloads, 3600)
        failed = reported.pop()
        assert (failed.source, failed.again) == ("bad", True)
        assert isinstance(failed.error, TLSFailed | ProtocolViolation)
        assert payloads.sources["bad"] is SourceState.failed
        assert payloads.errors == {"bad": failed.error}
        samples = payloads.samples()["datastreamer_reassembly_source_state"]
        assert (["bad", "failed"], 1) in samples
        # After 5 s at most, then twice that, and so on up to 5 minutes: of nonsense the first
        # time may be chance, so each attempt is two connections.
        attempts = network.dialled.count("bad") // (2 if failure is nonsense else 1)
        assert 1 + 6 + 10 <= attempts <= 1 + 7 + 24
        reported.clear()
        network.servers["bad"] = mended
        with trio.fail_after(300):
            assert await next_id(payloads) == 2
        assert [type(event) for event in reported] == [SourceBack]
        assert payloads.sources["bad"] is SourceState.reading
        assert payloads.errors == {}
        # What had been taken is not taken another time, and the other was not waited for.
        await network.commit("good", good, *messages_of(3))
        assert await next_id(payloads) == 3


class Foreign(Stub):
    """A server of another stream."""

    def answer(self, event: Event) -> bytes:
        if isinstance(event, HeaderQuery):
            return OK + Header(2, 999, 1, 4096, 0).pack()
        return super().answer(event)


async def foreign(stream: trio.abc.Stream) -> None:
    await serve_stream(Foreign([]), stream)


async def test_another_stream_for_a_while(network: Network, autojump_clock: MockClock) -> None:
    network.stub("good", *messages_of(1))
    moved = network.stub("moved", *messages_of(2), *messages_of(3)[:2])
    reported: list[Any] = []
    async with reassemble(
        hosts("good", "moved"),
        on_event=reported.append,
        max_age=None,
        follow=True,
    ) as payloads:
        assert sorted([await next_id(payloads) for _ in range(2)]) == [1, 2]
        right = network.servers["moved"]
        network.servers["moved"] = [foreign]
        await network.cut("moved")
        await nothing_for(payloads, 600)
        assert [type(event) for event in reported] == [SourceLost, SourceFailed]
        assert isinstance(reported[1].error, DifferentStream)
        assert reported[1].again
        network.servers["moved"] = right
        before = payloads.stats.sources["moved"].received
        moved.entries += entries(messages_of(3)[2], first=len(moved.entries))
        moved.entries += entries(messages_of(3)[3], first=len(moved.entries))
        assert await next_id(payloads) == 3
        assert reported[2:] == [SourceBack("moved", 6)]
        assert payloads.stats.sources["moved"].received == before + 2


async def test_another_history_needs_a_decision(
    network: Network, autojump_clock: MockClock
) -> None:
    network.stub("good", *messages_of(1))
    many = [message for number in range(100, 200) for message in messages_of(number)]
    network.stub("bad", *many)
    reported: list[Any] = []
    async with reassemble(hosts("good", "bad"), on_event=reported.append, follow=True) as payloads:
        for _ in range(101):
            await next_id(payloads)
        old = network.live["bad"]
        network.stub("bad", *messages_of(2))
        for _, stream in old:
            await stream.aclose()
        await nothing_for(payloads, 3600)
        assert [type(event) for event in reported] == [SourceLost, SourceFailed]
        assert isinstance(reported[1].error, HistoryChanged)
        assert not reported[1].again
        assert network.dialled.count("bad") == 2


@pytest.mark.parametrize("start", [7, b"mark"], ids=["entry", "bookmark"])
async def test_a_place_that_is_not_there_yet(
    start: Any, network: Network, autojump_clock: MockClock
) -> None:
    before = [message for number in range(3) for message in messages_of(number)]
    network.stub("good", *before, *messages_of(50))
    behind = network.stub("behind", *before[:4])
    reported: list[Any] = []
    async with reassemble(
        hosts("good", "behind"),
        start=start,
        on_event=reported.append,
        follow=True,
    ) as payloads:
        if start == 7:
            assert [await next_id(payloads) for _ in range(2)] == [2, 50]
            await nothing_for(payloads, 60)
            [failed] = reported
            assert isinstance(failed.error, UnknownEntry)
            behind.entries += entries(*before[4:], *messages_of(60), first=4)
            assert await next_id(payloads) == 60
            assert [type(event) for event in reported] == [SourceFailed, SourceBack]
        else:
            # No source has it: that is reported at once.
            with pytest.raises(BadFromBookmark):
                await next_id(payloads)


async def test_all_of_them(network: Network, autojump_clock: MockClock) -> None:
    """Where none was ever read it is an error; an outage of all is waited out."""
    expired = TLSFailed("a certificate that has expired")
    network.servers["a"] = network.servers["b"] = [expired]
    reported: list[Any] = []
    with pytest.raises(TLSFailed):
        async with reassemble(hosts("a", "b"), on_event=reported.append, follow=True) as payloads:
            await next_id(payloads)
    assert [event.again for event in reported] == [True, True]
    one = network.stub("a", *messages_of(1))
    reported.clear()
    async with reassemble(hosts("a", "b"), on_event=reported.append, follow=True) as payloads:
        assert await next_id(payloads) == 1
        honest, network.servers["a"] = network.servers["a"], [expired]
        await network.cut("a")
        await nothing_for(payloads, 600)
        assert set(payloads.sources.values()) == {SourceState.failed}
        network.servers["a"] = honest
        one.entries += entries(*messages_of(2), first=4)
        assert await next_id(payloads) == 2


async def test_not_longer_than_it_shall_be_tried(
    network: Network, autojump_clock: MockClock
) -> None:
    network.stub("good", *messages_of(1))
    network.servers["bad"] = [TLSFailed("a certificate that has expired")]
    reported: list[Any] = []
    async with reassemble(
        hosts("good", "bad"), on_event=reported.append, retry_for=60, follow=True
    ) as payloads:
        await next_id(payloads)
        await nothing_for(payloads, 59)
        attempts = network.dialled.count("bad")
        await nothing_for(payloads, 3600)
        assert attempts <= network.dialled.count("bad") <= attempts + 1
    assert [(type(event), event.again) for event in reported] == [
        (SourceFailed, True),
        (SourceFailed, False),
    ]


def put(stream: DataStream, *messages: Message) -> None:
    for message in messages:
        append(stream, (0x10, pack_message(*message)))


async def test_a_file_that_comes_and_changes(tmp_path: Path) -> None:
    """Entries that were truncated are compared, as those of a server are."""
    path = tmp_path / "late.bin"
    reported: list[Any] = []
    with DataStream.create(tmp_path / "good.bin", sync="os", index="memory") as good:
        put(good, *messages_of(1))
        store = SqliteStore(tmp_path / "db")
        upstreams = {"good": Path(good.path), "late": path}
        async with reassemble(
            upstreams,
            store=store,
            on_event=reported.append,
            backoff=SOON,
            follow=True,
        ) as payloads:
            with trio.fail_after(60):
                assert await next_id(payloads) == 1
                while not reported:
                    with trio.move_on_after(0.01):
                        await payloads.__anext__()
                assert isinstance(reported[0].error, FileMissing)
                with DataStream.create(path, sync="os", index="memory") as late:
                    put(late, *messages_of(2), *messages_of(3)[:2])
                    assert await next_id(payloads) == 2
                    while payloads.stats.messages < 1:
                        with trio.move_on_after(0.01):
                            await payloads.__anext__()
                    late.truncate(5)
                    put(late, messages_of(3)[2], *messages_of(4))
                    assert await next_id(payloads) == 4
                    put(late, messages_of(3)[3])
                    assert await next_id(payloads) == 3
        progress = store.load()
        store.close()
    assert [type(event) for event in reported] == [SourceFailed, SourceBack, SourceRolledBack]
    assert progress is not None
    assert progress.places["late"].position == 11
