"""Entries of some types alone, as the server streams them: live, and large ones from the file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import trio
from trio.testing import MockClock

from datastreamer.storage.stream import DataStream
from tests.network import model as wire
from tests.network.filters import (
    Entries,
    Frame,
    ask,
    begun,
    chosen,
    commit,
    frame,
    start,
    start_bookmark,
)
from tests.network.fixtures import Open, Peer, half_sent, in_memory, over_loopback, until
from tests.network.model import BOOKMARK, OK, pack


@pytest.fixture
def entries(stream: DataStream) -> Entries:
    """The entries of the stream."""
    return begun(stream)


async def streamed(
    peer: Peer, entries: Entries, number: int, types: tuple[int, ...], stop: int
) -> list[Frame]:
    """The frames from `number` up to `stop`: each begins where the last one ended."""
    found = []
    while number < stop:
        part = await frame(peer)
        assert part.first == number < part.next <= part.total
        assert part.payload == chosen(entries, number, part.next, types)
        assert part.count == sum(kind in types for kind, _ in entries[number : part.next])
        number = part.next
        found.append(part)
    assert number == stop
    return found


async def test_a_streaming_of_some_types(
    stream: DataStream, entries: Entries, autojump_clock: MockClock
) -> None:
    async with in_memory(stream) as rig, rig.client() as peer:
        await peer.ask(start(1, 1), OK)
        await streamed(peer, entries, 1, (1,), 5)
        commit(stream, entries, (1, b"live"), (2, b""), (1, b""))
        await streamed(peer, entries, 5, (1,), 8)
        await peer.ask(wire.stop(), OK)
        await peer.ask(start_bookmark(b"last", 1, BOOKMARK), OK)
        await streamed(peer, entries, 4, (1, BOOKMARK), 8)
        await peer.ask(wire.stop(), OK)
        await peer.ask(start(8, 1), OK)
        await peer.waits()
        await peer.ask(wire.stop(), OK)
        await peer.ask(start(9, 1), wire.result(3))
        await peer.ask(start_bookmark(b"none", 1), wire.result(4))
        # And all of them again, as any client has them.
        await peer.ask(wire.start(0), OK)
        await peer.expect(b"".join(pack(n, *entry) for n, entry in enumerate(entries)))


async def test_that_nothing_was_found_is_reported_at_once_and_then_ten_times_a_second(
    stream: DataStream, entries: Entries, autojump_clock: MockClock
) -> None:
    async with in_memory(stream) as rig, rig.client() as peer:
        await peer.ask(start(5, 7), OK)
        began = trio.current_time()
        commit(stream, entries, (1, b""))
        assert (await frame(peer)).next == 6
        assert trio.current_time() == began
        for _ in range(5):
            commit(stream, entries, (1, b""))
            await peer.waits()
        assert (await frame(peer))[:3] == (0, 6, 11)
        assert 0.099 < trio.current_time() - began < 0.101
        # A frame with entries is sent at once and covers the progress not reported yet.
        commit(stream, entries, (1, b""))
        await peer.waits()
        commit(stream, entries, (7, b"this"))
        assert (await frame(peer))[:3] == (1, 11, 13)
        assert trio.current_time() - began < 0.11
        # Nothing was looked through twice.
        assert rig.server.counts.filter_scanned == 7 * 17 + 21


async def test_clients_that_want_the_same_have_it_looked_for_once(
    stream: DataStream, entries: Entries
) -> None:
    async with over_loopback(stream) as rig:
        async with rig.client() as one, rig.client() as two, rig.client() as three:
            peers = [(one, (7,)), (two, (7,)), (three, (8,))]
            for peer, types in peers:
                await peer.ask(start(5, *types), OK)
            for _ in range(3):
                before, number = rig.server.counts.filter_scanned, len(entries)
                commit(stream, entries, (7, b"this"), (8, b"that"))
                for peer, types in peers:
                    await streamed(peer, entries, number, types, number + 2)
                assert rig.server.counts.filter_scanned - before == 2 * 2 * 21
            async with rig.client() as peer:
                await peer.ask(start(0, 7), OK)
                await streamed(peer, entries, 0, (7,), 11)
            # Another history has nothing of it.
            stream.truncate(5)
            for peer, _ in peers:
                await peer.was_reset()
            del entries[5:]
            async with rig.client() as peer:
                await peer.ask(start(0, 7), OK)
                await streamed(peer, entries, 0, (7,), 5)
        async with rig.client() as peer:
            commit(stream, entries, (8, b"this"), (7, b"that"))
            await peer.ask(start(5, 7), OK)
            await streamed(peer, entries, 5, (7,), 7)


async def test_a_truncation_of_what_was_scanned_and_not_reported(
    stream: DataStream, entries: Entries, autojump_clock: MockClock
) -> None:
    async with in_memory(stream) as rig, rig.client() as peer:
        await peer.ask(start(5, 7), OK)
        commit(stream, entries, (1, b""))
        assert (await frame(peer)).next == 6
        commit(stream, entries, (1, b""), (1, b""), (1, b""))
        await peer.waits()
        stream.truncate(6)
        del entries[6:]
        commit(stream, entries, (7, b"this"), (1, b""))
        assert (await frame(peer))[:3] == (1, 6, 8)


async def test_a_truncation_of_what_was_reported_ends_the_connection(
    stream: DataStream, entries: Entries
) -> None:
    async with over_loopback(stream) as rig, rig.client() as peer:
        await peer.ask(start(0, 7), OK)
        await streamed(peer, entries, 0, (7,), 5)
        stream.truncate(4)
        await peer.was_reset()


async def test_the_server_s_end_comes_after_all_that_is_committed(
    stream: DataStream, entries: Entries, autojump_clock: MockClock
) -> None:
    async with in_memory(stream) as rig, rig.client() as peer:
        await peer.ask(start(5, 7), OK)
        commit(stream, entries, (1, b""))
        await streamed(peer, entries, 5, (7,), 6)
        commit(stream, entries, (1, b""))
        await peer.waits()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(rig.server.finish, 5.0)
            await streamed(peer, entries, 6, (7,), 7)
            await peer.ended()


# Over sockets: large ones, straight from the file.

OPENS: list[Callable[[pytest.FixtureRequest], Open]] = [
    lambda request: over_loopback,
    lambda request: request.getfixturevalue("secured"),
]
SIZES = [90, 200, 5_000, 40_000, 300_000, 17, 90_000, 0]


def fill(stream: DataStream, megabytes: int) -> Entries:
    entries: Entries = []
    at = number = 0
    while at < megabytes << 20:
        size = SIZES[number % len(SIZES)] + number % 7
        # Runs of the same type, of all lengths.
        kind = (number // (1 + number % 5)) % 4
        commit(stream, entries, (kind, bytes([number % 256]) * size))
        number += 1
        at += size
    commit(stream, entries, *[(n % 10, bytes([n % 256]) * (n % 90)) for n in range(20_000)])
    return entries


@pytest.mark.parametrize("kind", [0, 1], ids=["plain", "tls"])
async def test_large_ones_from_anywhere(
    stream: DataStream, request: pytest.FixtureRequest, kind: int
) -> None:
    entries = fill(stream, 12)
    total = len(entries)
    async with OPENS[kind](request)(stream) as rig, rig.client() as peer:
        for types in [(1,), (2, 3), (0, 1, 2, 3), (9,), (77,)]:
            for limits in ({}, {"count": 50}, {"size": 300_000}):
                number = 0
                while number < total:
                    number = (await ask(peer, entries, number, *types, **limits)).next
            await peer.ask(start(3, *types), OK)
            await streamed(peer, entries, 3, types, total)
            await peer.ask(wire.stop(), OK)
        await peer.nothing_more()


async def test_a_client_that_does_not_read_keeps_nothing_in_memory_and_loses_nothing(
    stream: DataStream, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("datastreamer.server.streaming.entry_sending.PATIENCE_SECONDS", 0.01)
    entries = fill(stream, 12)
    async with over_loopback(stream, receive_buffer=4096) as rig, rig.client() as slow:
        await slow.ask(start(0, 1, 2, 3, 4, 5), OK)
        await half_sent(rig.server)
        [session] = rig.server.sessions
        filtered = session.sender._filtered
        assert filtered is not None
        await until(
            lambda: filtered.frame is not None and not filtered.frame.data and not filtered._data
        )
        async with rig.client() as peer:
            await ask(peer, entries, 5, 1)
            commit(stream, entries, (1, b"news"))
        await streamed(slow, entries, 0, (1, 2, 3, 4, 5), len(entries))
        await slow.ask(wire.stop(), OK)


@pytest.mark.parametrize("change", ["truncate", "update"])
async def test_a_change_of_what_a_frame_promised_ends_the_connection(
    stream: DataStream, change: str
) -> None:
    entries = fill(stream, 1)
    async with over_loopback(stream, receive_buffer=4096) as rig, rig.client() as peer:
        # A frame, half of which is in the client's buffers.
        commit(stream, entries, *[(9, bytes(100))] * 40_000)
        await peer.ask(start(0, 9), OK)
        await half_sent(rig.server)
        [session] = rig.server.sessions
        end = session.sender._frame_end
        assert end is not None
        if change == "truncate":
            stream.truncate(end.number - 1)
        else:
            stream.update_entry(end.number - 1, 9, bytes(len(entries[end.number - 1][1])))
        await peer.was_reset()


async def test_a_truncation_behind_what_a_frame_promised_does_not(stream: DataStream) -> None:
    entries: Entries = []
    commit(stream, entries, *[(n % 2, bytes([n % 256]) * 100) for n in range(80_000)])
    async with over_loopback(stream, receive_buffer=4096) as rig, rig.client() as peer:
        await peer.ask(start(0, 1), OK)
        await half_sent(rig.server)
        [session] = rig.server.sessions
        end = session.sender._frame_end
        assert end is not None
        stream.truncate(end.number)
        del entries[end.number :]
        commit(stream, entries, (1, b"another"), (0, b""), (1, b"history"))
        await streamed(peer, entries, 0, (1,), len(entries))


async def test_a_truncation_by_another_process_ends_what_was_promised(path: Path) -> None:
    with DataStream.create(path, sync="os", index="memory") as writer:
        entries: Entries = []
        commit(writer, entries, *[(n % 2, bytes(100)) for n in range(80_000)])
        with DataStream.open(path, follow=True, index="memory") as stream:
            async with over_loopback(stream, receive_buffer=4096) as rig, rig.client() as peer:
                await peer.ask(start(0, 1), OK)
                await half_sent(rig.server)
                writer.truncate(3)
                await peer.was_reset()


async def test_many_clients_are_served_beside_one_that_has_much_looked_through(
    stream: DataStream,
) -> None:
    """Between two pieces of 1 MiB others have their turn."""
    entries: Entries = []
    for _ in range(16):
        commit(stream, entries, *[(1, bytes(40))] * 16_000)
    async with over_loopback(stream) as rig, rig.client() as peer, rig.client() as other:
        answers = 0
        done = False

        async def look() -> None:
            nonlocal done
            for _ in range(20):
                await ask(peer, entries, 0, 7)
            done = True

        async with trio.open_nursery() as nursery:
            nursery.start_soon(look)
            while not done:
                await other.ask(wire.entry(5), OK + pack(5, 1, bytes(40), 0xFE))
                answers += 1
        # 20 requests are some 280 pieces.
        assert answers > 100
