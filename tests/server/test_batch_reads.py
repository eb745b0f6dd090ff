"""Batches and ranges, as the server answers them: the exact bytes, rule by rule."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path

import pytest
import trio
import trio.testing
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from trio.testing import MockClock

from datastreamer.metrics.counters import Counts
from datastreamer.storage.stream import DataStream
from tests.network import model as wire
from tests.network.fixtures import (
    Open,
    Peer,
    Rig,
    append,
    half_sent,
    in_memory,
    over_loopback,
    until,
)
from tests.network.model import BOOKMARK, OK, Conversation, Model

PAGE = 1 << 20
FIRST = [(BOOKMARK, b"first"), (1, b"one"), (2, b"t" * 100), (1, b""), (BOOKMARK, b"last")]


@pytest.fixture
def talk(stream: DataStream) -> Conversation:
    """What is due on one connection to `stream`, which holds `FIRST`."""
    model = Model()
    model.stream_id, model.epoch = stream.stream_id, stream.epoch
    conversation = Conversation(model)
    commit(stream, conversation, *FIRST)
    return conversation


def commit(stream: DataStream, talk: Conversation, *entries: tuple[int, bytes]) -> None:
    talk.model.pending += entries
    talk.model.commit()
    append(stream, *entries)


async def ask(peer: Peer, talk: Conversation, request: bytes) -> bytes:
    """The answer to `request`, which is what the model says."""
    await peer.send(request)
    due = talk.feed(request)
    await peer.expect(due)
    return due


def count_of(answer: bytes) -> int:
    assert answer.startswith(OK)
    return int(struct.unpack_from(">BII", answer, len(OK))[2])


async def test_capabilities(
    stream: DataStream, talk: Conversation, autojump_clock: MockClock
) -> None:
    talk.model.most_entries, talk.model.most_bytes = 7, 12_345
    rigged = in_memory(stream, max_batch_count=7, max_batch_bytes=12_345)
    async with rigged as rig, rig.client() as peer:
        answer = await ask(peer, talk, wire.capabilities())
        assert stream.stream_id in answer
        assert any(stream.stream_id)
        epoch = stream.epoch
        stream.truncate(4)
        talk.model.truncate(4)
        assert stream.epoch != epoch
        talk.model.epoch = stream.epoch
        await ask(peer, talk, wire.capabilities())


@pytest.mark.parametrize("request_", [wire.capabilities(), wire.batch(0), wire.batch(99)])
async def test_not_while_streaming(
    stream: DataStream, talk: Conversation, autojump_clock: MockClock, request_: bytes
) -> None:
    async with in_memory(stream) as rig, rig.client() as peer:
        await ask(peer, talk, wire.start(0))
        assert await ask(peer, talk, request_) == wire.result(1)
        await peer.ended()


async def test_never_none_while_there_are_some(
    stream: DataStream, talk: Conversation, autojump_clock: MockClock
) -> None:
    async with in_memory(stream) as rig, rig.client() as peer:
        for number in range(5):
            assert count_of(await ask(peer, talk, wire.batch(number))) == 5 - number
            assert count_of(await ask(peer, talk, wire.batch(number, 1))) == 1
            assert count_of(await ask(peer, talk, wire.batch(number, 2, 1))) == 1


async def test_the_first_entry_comes_even_when_it_alone_is_larger_than_max_bytes(
    stream: DataStream, talk: Conversation, autojump_clock: MockClock
) -> None:
    commit(stream, talk, (1, b"l" * (PAGE - 17)), (1, b"behind"))
    async with in_memory(stream, max_batch_bytes=1000) as rig, rig.client() as peer:
        talk.model.most_bytes = 1000
        answer = await ask(peer, talk, wire.batch(5, 10, 40))
        assert count_of(answer) == 1
        assert len(answer) == 11 + 25 + PAGE
        assert count_of(await ask(peer, talk, wire.batch(4, 10, 40))) == 1


async def test_the_server_s_own_limits_cut_the_request_s_silently(
    stream: DataStream, talk: Conversation, autojump_clock: MockClock
) -> None:
    talk.model.most_entries, talk.model.most_bytes = 3, 60
    rigged = in_memory(stream, max_batch_count=3, max_batch_bytes=60)
    async with rigged as rig, rig.client() as peer:
        assert count_of(await ask(peer, talk, wire.batch(0, 1000, 1 << 31))) == 2
        assert count_of(await ask(peer, talk, wire.batch(0))) == 2
        assert count_of(await ask(peer, talk, wire.batch(2, 1000))) == 1
        assert count_of(await ask(peer, talk, wire.batch(3))) == 2


async def test_at_the_end_there_are_none_at_once(
    stream: DataStream, talk: Conversation, autojump_clock: MockClock
) -> None:
    async with in_memory(stream) as rig, rig.client() as peer:
        answer = await ask(peer, talk, wire.batch(5))
        assert count_of(answer) == 0
        assert struct.unpack_from(">QQ", answer, len(OK) + 9) == (5, 5)


@pytest.mark.parametrize("wait", [0, 60_000])
async def test_past_the_end_is_error_3(
    stream: DataStream, talk: Conversation, autojump_clock: MockClock, wait: int
) -> None:
    async with in_memory(stream) as rig, rig.client() as peer:
        assert await ask(peer, talk, wire.batch(6, wait=wait)) == wire.result(3)
        assert await ask(peer, talk, wire.batch(2**64 - 1, wait=wait)) == wire.result(3)
        await ask(peer, talk, wire.batch(4))
        await peer.nothing_more()


async def test_none_after_the_time_that_it_was_to_wait(
    stream: DataStream, talk: Conversation, autojump_clock: MockClock
) -> None:
    async with in_memory(stream) as rig, rig.client() as peer:
        began = trio.current_time()
        await ask(peer, talk, wire.batch(5, wait=1_500))
        await peer.expect(talk.woken())
        assert 1.5 <= trio.current_time() - began < 1.6


async def test_entries_as_soon_as_a_commit_brings_them(
    stream: DataStream, talk: Conversation, autojump_clock: MockClock
) -> None:
    async with in_memory(stream) as rig, rig.client() as peer:
        await ask(peer, talk, wire.batch(5, 2, wait=2**32 - 1))
        await peer.waits()
        began = trio.current_time()
        commit(stream, talk, (1, b"x"), (1, b"y"), (1, b"z"))
        answer = talk.woken()
        assert count_of(answer) == 2
        await peer.expect(answer)
        # It does not wait, although no client streams.
        assert trio.current_time() == began


async def test_only_committed_entries(
    stream: DataStream, talk: Conversation, autojump_clock: MockClock
) -> None:
    async with in_memory(stream) as rig, rig.client() as peer:
        stream.start_atomic_op()
        stream.add_entry(1, b"not yet")
        assert count_of(await ask(peer, talk, wire.batch(0))) == 5
        assert count_of(await ask(peer, talk, wire.batch(5))) == 0
        await ask(peer, talk, wire.batch(5, wait=10_000))
        await peer.waits()
        stream.rollback_atomic_op()
        await peer.waits()
        await peer.expect(talk.woken())


async def test_a_truncation_ends_the_wait_with_error_3(
    stream: DataStream, talk: Conversation, autojump_clock: MockClock
) -> None:
    async with in_memory(stream) as rig, rig.client() as peer:
        await ask(peer, talk, wire.batch(5, wait=10_000))
        await peer.waits()
        stream.truncate(4)
        talk.model.truncate(4)
        due = talk.woken()
        assert due == wire.result(3)
        await peer.expect(due)
        await ask(peer, talk, wire.batch(4))


async def test_a_truncation_and_what_follows_end_the_wait(
    stream: DataStream, talk: Conversation, autojump_clock: MockClock
) -> None:
    async with in_memory(stream) as rig, rig.client() as peer:
        await ask(peer, talk, wire.batch(5, wait=10_000))
        await peer.waits()
        # Both before the server has a turn.
        stream.truncate(4)
        talk.model.truncate(4)
        commit(stream, talk, (1, b"another"))
        answer = talk.woken()
        assert count_of(answer) == 0
        await peer.expect(answer)


async def test_requests_are_pipelined_and_answered_in_order(
    stream: DataStream, talk: Conversation, autojump_clock: MockClock
) -> None:
    requests = [wire.batch(n % 6, n % 4, n * 7) for n in range(300)]
    requests[7:7] = [wire.header(), wire.entry(2), wire.capabilities(), wire.unknown()]
    requests[90:90] = [wire.batch(7), wire.range_bookmark(b"first", b"last")]
    async with in_memory(stream) as rig, rig.client() as peer:
        await ask(peer, talk, b"".join(requests))
        for at in range(60):
            await ask(peer, talk, b"".join(requests)[at : at + 1])
        await ask(peer, talk, b"".join(requests)[60:240])


async def test_what_is_asked_behind_a_wait_is_answered_behind_it(
    stream: DataStream, talk: Conversation, autojump_clock: MockClock
) -> None:
    async with in_memory(stream) as rig, rig.client() as peer:
        await ask(peer, talk, wire.header() + wire.batch(5, wait=1000) + wire.batch(0, 2))
        await peer.waits()
        await ask(peer, talk, wire.entry(1))
        await ask(peer, talk, wire.header()[:7])
        await peer.waits()
        await peer.expect(talk.woken())
        await ask(peer, talk, wire.header()[7:])


async def test_a_client_that_leaves_is_not_waited_for(
    stream: DataStream, talk: Conversation, autojump_clock: MockClock
) -> None:
    async with in_memory(stream) as rig, rig.client() as peer:
        began = trio.current_time()
        await ask(peer, talk, wire.batch(5, wait=60_000))
        await peer.waits()
        await peer.stream.send_eof()
        await peer.expect(talk.woken())
        await peer.ended()
        assert trio.current_time() - began < 2
        # A client that disconnects leaves no watcher.
        async with rig.client() as other:
            await other.send(wire.batch(5, wait=60_000))
            await other.waits()
        await until(lambda: not rig.server.sessions)
        assert not rig.server.broadcast.watchers


async def test_the_server_s_end_ends_the_wait(
    stream: DataStream, talk: Conversation, autojump_clock: MockClock
) -> None:
    async with in_memory(stream) as rig, rig.client() as peer:
        await ask(peer, talk, wire.batch(5, wait=60_000))
        await peer.waits()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(rig.server.finish, 5.0)
            await peer.expect(talk.woken())
            await peer.ended()


async def test_a_client_that_asks_much_while_it_waits_is_held(
    stream: DataStream, talk: Conversation, autojump_clock: MockClock
) -> None:
    """What it asks is not read on and on into memory."""
    async with in_memory(stream) as rig, rig.client() as peer:
        await ask(peer, talk, wire.batch(5, wait=60_000))
        [session] = rig.server.sessions
        for _ in range(400):
            with trio.move_on_after(0.001):
                await peer.send(wire.header() * 64)
        assert session.protocol.pending < 200_000


async def test_ranges(stream: DataStream, talk: Conversation, autojump_clock: MockClock) -> None:
    commit(stream, talk, *[(1, bytes([n]) * 30_000) for n in range(90)], (BOOKMARK, b"far"))
    async with in_memory(stream) as rig, rig.client() as peer:
        for first, last in [(b"first", b"last"), (b"last", b"far"), (b"first", b"far")]:
            answer = await ask(peer, talk, wire.range_bookmark(first, last))
            assert answer.startswith(OK)
        for first, last in [(b"far", b"first"), (b"x", b"first"), (b"far", b"x"), (b"x", b"y")]:
            assert len(await ask(peer, talk, wire.range_bookmark(first, last))) < 30
        await ask(peer, talk, wire.range_bookmark(b"first", b"first"))
        await peer.nothing_more()


async def test_what_was_sent_is_counted(
    stream: DataStream, talk: Conversation, autojump_clock: MockClock
) -> None:
    async with in_memory(stream) as rig, rig.client() as peer:
        for request in (wire.batch(0), wire.batch(5), wire.batch(3, 1)):
            await ask(peer, talk, request)
        await ask(peer, talk, wire.range_bookmark(b"first", b"last"))
        await ask(peer, talk, wire.capabilities())
        counts: Counts = rig.server.counts
        assert counts.commands == {"batch_read": 3, "range_bookmark": 1, "capabilities": 1}
        assert counts.entries_sent == 5 + 0 + 1 + 5
        sizes = counts.batch_bytes.histogram()
        assert sizes["buckets"][0] == 2
        assert sizes["buckets"][-1] == 3
        assert sizes["sum"] == 5 * 17 + 5 + 3 + 100 + 4 + 17
        assert counts.batch_seconds.histogram()["buckets"][-1] == 3


# Any request, with commits and truncations in between.

limit = st.sampled_from([0, 1, 2, 17, 18, 100, 2**32 - 1]) | st.integers(0, 300_000)
steps = st.one_of(
    st.tuples(
        st.just("batch"),
        st.integers(0, 60) | st.sampled_from([2**64 - 1]),
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
@example(script=[("batch", 0, 1, 1, 1)] * 3, limits=(1, 1))
@given(
    script=st.lists(steps, max_size=25),
    limits=st.tuples(st.integers(1, 50), st.integers(1, 300_000)),
)
def test_any_requests(
    tmp_path_factory: pytest.TempPathFactory, script: list[tuple], limits: tuple[int, int]
) -> None:
    path = tmp_path_factory.mktemp("any") / "stream.bin"
    with DataStream.create(path, sync="os", index="memory") as stream:
        trio.run(run_script, stream, script, limits, clock=MockClock(autojump_threshold=0))
    path.unlink()


async def run_script(stream: DataStream, script: list[tuple], limits: tuple[int, int]) -> None:
    most, size = limits
    talk = Conversation(Model())
    talk.model.most_entries, talk.model.most_bytes = most, size
    rigged = in_memory(stream, max_batch_count=most, max_batch_bytes=size)
    async with rigged as rig, rig.client() as peer:
        for what, *values in script:
            if what == "batch":
                await ask(peer, talk, wire.batch(*values))
                continue
            if what == "truncate":
                if values[0] >= len(talk.model.entries):
                    continue
                stream.truncate(values[0])
                talk.model.truncate(values[0])
            else:
                commit(stream, talk, *[(n % 5, bytes([n % 256]) * n) for n in values[0]])
            await peer.expect(talk.woken())
        await trio.sleep(1)
        while talk.waiting is not None:
            await peer.expect(talk.woken())
        await peer.nothing_more()


# Over sockets: large ones, straight from the file.

OPENS: list[Callable[[pytest.FixtureRequest], Open]] = [
    lambda request: over_loopback,
    lambda request: request.getfixturevalue("secured"),
]
SIZES = [90, 200, 5_000, 40_000, 300_000]


def fill(stream: DataStream, megabytes: int) -> Conversation:
    talk = Conversation(Model())
    talk.model.stream_id, talk.model.epoch = stream.stream_id, stream.epoch
    at = number = 0
    while at < megabytes << 20:
        size = SIZES[number % len(SIZES)] + number % 7
        commit(stream, talk, (1, bytes([number % 256]) * size))
        number += 1
        at += size
    return talk


@pytest.mark.parametrize("kind", [0, 1], ids=["plain", "tls"])
async def test_large_batches_from_anywhere(
    stream: DataStream, request: pytest.FixtureRequest, kind: int
) -> None:
    talk = fill(stream, 12)
    commit(stream, talk, *[(3, bytes([n % 256]) * (n % 90)) for n in range(4_000)])
    total = len(talk.model.entries)
    async with OPENS[kind](request)(stream) as rig, rig.client() as peer:
        for count, size in [(0, 0), (0, PAGE), (50, 0), (0, 300_000), (4_000, 128 * 1024)]:
            number = 0
            while number < total:
                number += count_of(await ask(peer, talk, wire.batch(number, count, size)))
        await peer.nothing_more()


async def test_a_client_that_does_not_read_delays_no_other(stream: DataStream) -> None:
    talk = fill(stream, 12)
    due = OK + talk.model.batch(0, 0, 0)
    async with over_loopback(stream, receive_buffer=4096) as rig, rig.client() as slow:
        await slow.send(wire.batch(0) * 50)
        async with rig.client() as peer:
            for number in range(20):
                await ask(peer, talk, wire.batch(number, 3))
            commit(stream, talk, (1, b"news"))
            await ask(peer, talk, wire.batch(len(talk.model.entries) - 1))
        [session] = [s for s in rig.server.sessions if s.blocked]
        # One answer is under way: what was asked behind it is not even looked at.
        assert session.taken == 1
        await slow.expect(due)


async def promised(stream: DataStream, rig: Rig, peer: Peer, talk: Conversation) -> int:
    """Have the server half way through a batch of some MiB; gives its number of entries."""
    await peer.send(wire.batch(0))
    await peer.read(11 + 25 + 1000)
    await half_sent(rig.server)
    return count_of(OK + talk.model.batch(0, 0, 0))


async def test_a_truncation_of_what_was_promised_ends_the_connection(stream: DataStream) -> None:
    talk = fill(stream, 14)
    async with over_loopback(stream, receive_buffer=4096) as rig, rig.client() as peer:
        count = await promised(stream, rig, peer, talk)
        stream.truncate(count - 1)
        assert len(await peer.was_reset()) < 4 << 20


async def test_a_truncation_behind_what_was_promised_does_not(stream: DataStream) -> None:
    talk = fill(stream, 14)
    due = talk.model.batch(0, 0, 0)
    async with over_loopback(stream, receive_buffer=4096) as rig, rig.client() as peer:
        count = await promised(stream, rig, peer, talk)
        stream.truncate(count)
        talk.model.truncate(count)
        await peer.expect(due[25 + 1000 :])
        await ask(peer, talk, wire.batch(count))


async def test_a_truncation_by_another_process_ends_what_was_promised(path: Path) -> None:
    with DataStream.create(path, sync="os", index="memory") as writer:
        talk = fill(writer, 14)
        with DataStream.open(path, follow=True, index="memory") as stream:
            async with over_loopback(stream, receive_buffer=4096) as rig, rig.client() as peer:
                await promised(stream, rig, peer, talk)
                writer.truncate(3)
                assert len(await peer.was_reset()) < 4 << 20
