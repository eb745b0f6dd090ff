"""Entries of some types alone, as the server answers requests for them: rule by rule."""

from __future__ import annotations

import struct

import pytest
import trio
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from trio.testing import MockClock, wait_all_tasks_blocked

from datastreamer.server.streaming import filtered as filtering
from datastreamer.storage.stream import DataStream
from tests.network import model as wire
from tests.network.filters import (
    EVER,
    PAGE,
    Entries,
    Frame,
    answer,
    ask,
    begun,
    check,
    commit,
    frame,
    read,
    start,
    start_bookmark,
)
from tests.network.fixtures import in_memory
from tests.network.model import BOOKMARK, OK, pack


@pytest.fixture
def entries(stream: DataStream) -> Entries:
    """The entries of the stream."""
    return begun(stream)


async def test_the_frame_holds_the_wanted_entries_and_says_what_was_looked_at(
    stream: DataStream, entries: Entries, autojump_clock: MockClock
) -> None:
    async with in_memory(stream) as rig, rig.client() as peer:
        found = await ask(peer, entries, 0, 1)
        assert found == Frame(2, 0, 5, 5, stream.epoch, pack(1, 1, b"one") + pack(3, 1, b""))
        assert (await ask(peer, entries, 2, 1, 2)).count == 2
        assert (await ask(peer, entries, 0, 1, 2, BOOKMARK, 7)).count == 5
        assert (await ask(peer, entries, 0, 2, 2, 2)).count == 1
        nothing = await ask(peer, entries, 0, 7, 8)
        assert (nothing.count, nothing.next) == (0, 5)


async def test_bookmarks_are_entries_of_a_type_like_others(
    stream: DataStream, entries: Entries, autojump_clock: MockClock
) -> None:
    async with in_memory(stream) as rig, rig.client() as peer:
        assert (await ask(peer, entries, 0, BOOKMARK)).count == 2
        assert (await ask(peer, entries, 1, BOOKMARK)).count == 1


async def test_nothing_from_the_stop_entry_on(
    stream: DataStream, entries: Entries, autojump_clock: MockClock
) -> None:
    async with in_memory(stream) as rig, rig.client() as peer:
        for stop in range(7):
            for number in range(6):
                found = await ask(peer, entries, number, 1, 2, stop=stop, wait=60_000 * (stop < 6))
                assert found.next == max(number, min(stop, 5))


async def test_limits_count_what_is_wanted_alone(
    stream: DataStream, entries: Entries, autojump_clock: MockClock
) -> None:
    async with in_memory(stream) as rig, rig.client() as peer:
        # The next that is wanted is the first that was not looked at.
        assert (await ask(peer, entries, 0, 1, count=1)).next == 3
        assert (await ask(peer, entries, 0, 1, size=20)).next == 3
        assert (await ask(peer, entries, 0, 1, size=37)).next == 5
        assert (await ask(peer, entries, 0, 1, size=36)).next == 3
        assert (await ask(peer, entries, 0, BOOKMARK, count=1)).next == 4


async def test_the_first_wanted_entry_comes_even_when_it_alone_is_larger(
    stream: DataStream, entries: Entries, autojump_clock: MockClock
) -> None:
    commit(stream, entries, (3, b"l" * (PAGE - 17)), (3, b"behind"), (3, b"m" * 40_000))
    async with in_memory(stream, max_batch_bytes=1000) as rig, rig.client() as peer:
        assert (await ask(peer, entries, 0, 3, size=100)).next == 6
        assert (await ask(peer, entries, 0, 3)).next == 6
        assert (await ask(peer, entries, 6, 3, size=100)).next == 7
        assert (await ask(peer, entries, 7, 3, size=100)).next == 8


async def test_the_server_s_own_limits_cut_the_request_s_silently(
    stream: DataStream, entries: Entries, autojump_clock: MockClock
) -> None:
    rigged = in_memory(stream, max_batch_count=1, max_batch_bytes=60)
    async with rigged as rig, rig.client() as peer:
        assert (await ask(peer, entries, 0, 1, 2, count=9)).count == 1
        assert (await ask(peer, entries, 0, 1, 2, size=2**32 - 1)).next == 2


@pytest.mark.parametrize("wait", [0, 60_000])
async def test_past_the_end_is_error_3(
    stream: DataStream, entries: Entries, autojump_clock: MockClock, wait: int
) -> None:
    async with in_memory(stream) as rig, rig.client() as peer:
        for number in (6, EVER):
            await peer.ask(read(number, 1, wait=wait), wire.result(3))
            await peer.ask(read(number, 1, stop=2, wait=wait), wire.result(3))
        await ask(peer, entries, 0, 1)
        await peer.nothing_more()


@pytest.mark.parametrize("request_", [read(0, 1), start(0, 1), start_bookmark(b"first", 1)])
@pytest.mark.parametrize("begin", [wire.start(5), start(5, 1)])
async def test_not_while_streaming(
    stream: DataStream, entries: Entries, autojump_clock: MockClock, request_: bytes, begin: bytes
) -> None:
    async with in_memory(stream) as rig, rig.client() as peer:
        await peer.ask(begin, OK)
        await peer.send(request_)
        assert (await peer.rest()).endswith(wire.result(1))


@pytest.mark.parametrize("count", [0, 65, 2**32 - 1])
@pytest.mark.parametrize("begin", [read(0, 1), start(0, 1), start_bookmark(b"first", 1)])
async def test_a_set_of_another_size_ends_the_connection(
    stream: DataStream, entries: Entries, autojump_clock: MockClock, count: int, begin: bytes
) -> None:
    async with in_memory(stream) as rig, rig.client() as peer:
        await peer.send(begin[:-8] + struct.pack(">I", count))
        await peer.ended()
        assert rig.server.counts.errors["dropped"] == 1


async def test_64_types(stream: DataStream, entries: Entries, autojump_clock: MockClock) -> None:
    commit(stream, entries, *[(n, bytes([n])) for n in range(100)], (64, b""), (65, b""))
    async with in_memory(stream) as rig, rig.client() as peer:
        found = await ask(peer, entries, 0, *range(1, 65))
        assert found.count == 3 + 64 + 1
        far = [2**32 - 1 - n for n in range(64)]
        assert (await ask(peer, entries, 0, *far)).count == 0


async def test_a_wait_ends_with_a_wanted_entry_alone(
    stream: DataStream, entries: Entries, autojump_clock: MockClock
) -> None:
    async with in_memory(stream) as rig, rig.client() as peer:
        # Nothing wanted from there on, though the end is not there.
        for number in (3, 5):
            await peer.send(read(number, 7, wait=60_000))
            await peer.waits()
            for _ in range(3):
                commit(stream, entries, (1, b"not this"))
                await peer.waits()
            commit(stream, entries, (1, b""), (7, b"this"), (1, b""))
            found = await answer(peer)
            check(found, entries, number, (7,))
            assert found.next == len(entries)
            entries_before = len(entries)
            stream.truncate(5)
            del entries[5:]
            assert entries_before > len(entries)


async def test_a_wait_that_brings_nothing_says_how_far_was_looked(
    stream: DataStream, entries: Entries, autojump_clock: MockClock
) -> None:
    async with in_memory(stream) as rig, rig.client() as peer:
        began = trio.current_time()
        await peer.send(read(5, 7, wait=1500))
        await peer.waits(0.5)
        commit(stream, entries, (1, b"not this"))
        found = await answer(peer)
        assert 1.5 <= trio.current_time() - began < 1.6
        check(found, entries, 5, (7,))
        assert (found.count, found.next) == (0, 6)
        # At once without a wait, or where the stop entry is reached.
        assert (await ask(peer, entries, 6, 7)).next == 6
        assert (await ask(peer, entries, 0, 7, stop=6, wait=60_000)).next == 6
        assert trio.current_time() - began < 1.7


async def test_a_wait_up_to_the_stop_entry_ends_there(
    stream: DataStream, entries: Entries, autojump_clock: MockClock
) -> None:
    async with in_memory(stream) as rig, rig.client() as peer:
        await peer.send(read(5, 7, stop=7, wait=60_000))
        await peer.waits()
        commit(stream, entries, (1, b""))
        await peer.waits()
        commit(stream, entries, (1, b""), (1, b""), (7, b""))
        found = await answer(peer)
        check(found, entries, 5, (7,), stop=7)
        assert (found.count, found.next) == (0, 7)


async def test_only_committed_entries(
    stream: DataStream, entries: Entries, autojump_clock: MockClock
) -> None:
    async with in_memory(stream) as rig, rig.client() as peer:
        stream.start_atomic_op()
        stream.add_entry(1, b"not yet")
        assert (await ask(peer, entries, 0, 1)).count == 2
        await peer.send(read(5, 1, wait=10_000))
        await peer.waits()
        stream.rollback_atomic_op()
        assert (await answer(peer)).next == 5


async def test_a_truncation_ends_a_wait(
    stream: DataStream, entries: Entries, autojump_clock: MockClock
) -> None:
    async with in_memory(stream) as rig, rig.client() as peer:
        await peer.send(read(5, 7, wait=10_000))
        await peer.waits()
        stream.truncate(4)
        await peer.expect(wire.result(3))
        del entries[4:]
        await peer.send(read(2, 7, wait=10_000))
        await peer.waits()
        # Both before the server has a turn.
        stream.truncate(3)
        del entries[3:]
        commit(stream, entries, (7, b"another"))
        check(await answer(peer), entries, 2, (7,))
        await peer.send(read(2, 8, wait=10_000))
        await peer.waits()
        stream.truncate(3)
        del entries[3:]
        found = await answer(peer)
        check(found, entries, 2, (8,))
        assert (found.next, found.epoch) == (3, stream.epoch)


async def test_requests_are_pipelined_and_answered_in_order(
    stream: DataStream, entries: Entries, autojump_clock: MockClock
) -> None:
    asked = [(n % 6, n % 3) for n in range(300)]
    async with in_memory(stream) as rig, rig.client() as peer:
        await peer.send(b"".join(read(*what) for what in asked))
        for number, kind in asked:
            check(await answer(peer), entries, number, (kind,))
        for byte in read(2, 1):
            await peer.send(bytes([byte]))
        check(await answer(peer), entries, 2, (1,))
        await peer.send(read(5, 7, wait=1000) + wire.entry(9) + read(0, 1)[:20])
        await peer.waits()
        assert (await answer(peer)).next == 5
        await peer.expect(wire.NOT_FOUND)
        await peer.send(read(0, 1)[20:])
        check(await answer(peer), entries, 0, (1,))


async def test_a_client_that_leaves_and_the_server_s_end_end_a_wait(
    stream: DataStream, entries: Entries, autojump_clock: MockClock
) -> None:
    async with in_memory(stream) as rig, rig.client() as peer, rig.client() as other:
        began = trio.current_time()
        await peer.send(read(0, 7, wait=60_000))
        await peer.waits()
        await peer.stream.send_eof()
        assert (await answer(peer)).next == 5
        await peer.ended()
        await other.send(read(0, 7, wait=60_000))
        await other.waits()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(rig.server.finish, 5.0)
            assert (await answer(other)).next == 5
            await other.ended()
        assert trio.current_time() - began < 3


async def test_one_request_scans_a_limited_number_of_entries(
    stream: DataStream, autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    entries: Entries = []
    monkeypatch.setattr(filtering, "_READ_SCAN", 2 << 20)
    commit(stream, entries, *[(1, bytes(200_000))] * 40, (2, b"far"))
    async with in_memory(stream) as rig, rig.client() as peer:
        number = asked = 0
        while number < len(entries):
            found = await ask(peer, entries, number, 2, wait=60_000)
            number, asked = found.next, asked + 1
        assert found.count == 1
        assert asked == 3
        scanned = rig.server.counts.filter_scanned
        assert 8_000_000 < scanned < 9_000_000


async def test_what_was_sent_is_counted(
    stream: DataStream, entries: Entries, autojump_clock: MockClock
) -> None:
    async with in_memory(stream) as rig, rig.client() as peer:
        await ask(peer, entries, 0, 1)
        await ask(peer, entries, 5, 1)
        await peer.ask(start(0, 1), OK)
        assert (await frame(peer)).count == 2
        await peer.ask(wire.stop(), OK)
        await peer.ask(start_bookmark(b"first", 2), OK)
        assert (await frame(peer)).count == 1
        counts = rig.server.counts
        assert counts.commands == {
            "filtered_read": 2, "filtered_start": 1, "filtered_start_bookmark": 1, "stop": 1
        }  # fmt: skip
        assert counts.entries_sent == 2 + 2 + 1
        assert counts.filter_scanned == 3 * (5 * 17 + 5 + 3 + 100 + 4)
        assert counts.batch_bytes.histogram()["sum"] == 2 * 17 + 3


# Any request, with commits and truncations in between.

limit = st.sampled_from([0, 1, 2, 17, 18, 100, 2**32 - 1]) | st.integers(0, 300_000)
kinds = st.lists(st.integers(0, 5), min_size=1, max_size=3).map(tuple)
steps = st.one_of(
    st.tuples(
        st.just("read"),
        st.integers(0, 60),
        kinds,
        st.integers(0, 70) | st.just(EVER),
        limit,
        limit,
        st.sampled_from([0, 0, 1, 50]),
    ),
    st.tuples(st.just("commit"), st.lists(st.integers(0, 200_000), min_size=1, max_size=5)),
    st.tuples(st.just("small"), st.lists(st.integers(0, 60), min_size=1, max_size=20)),
    st.tuples(st.just("truncate"), st.integers(0, 60)),
)


@settings(
    deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(script=st.lists(steps, max_size=25), most=st.integers(1, 50), size=st.integers(1, 300_000))
def test_any_requests(
    tmp_path_factory: pytest.TempPathFactory, script: list[tuple], most: int, size: int
) -> None:
    path = tmp_path_factory.mktemp("any") / "stream.bin"
    with DataStream.create(path, sync="os", index="memory") as stream:
        trio.run(run_script, stream, script, most, size, clock=MockClock(autojump_threshold=0))
    path.unlink()


async def run_script(stream: DataStream, script: list[tuple], most: int, size: int) -> None:
    entries: Entries = []
    rigged = in_memory(stream, max_batch_count=most, max_batch_bytes=size)
    async with rigged as rig, rig.client() as peer:
        for what, *values in script:
            if what == "read":
                number, types, stop, count, most_bytes, wait = values
                limits = {"stop": stop, "count": count, "size": most_bytes, "wait": wait}
                if number > len(entries):
                    await peer.ask(read(number, *types, **limits), wire.result(3))
                    continue
                found = await ask(peer, entries, number, *types, **limits)
                assert found.count <= most
                assert len(found.payload) <= size or found.count == 1
            elif what == "truncate":
                if values[0] < len(entries):
                    # An answer whose sender has not returned yet is not over: it would be cut off.
                    await wait_all_tasks_blocked()
                    stream.truncate(values[0])
                    del entries[values[0] :]
            else:
                commit(stream, entries, *[(n % 5, bytes([n % 256]) * n) for n in values[0]])
        await peer.nothing_more()
