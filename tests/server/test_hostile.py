"""Clients that mean harm, or know no better: the server lives, the others are served."""

from __future__ import annotations

import gc
import os
import random
import socket
import struct
import threading
import tracemalloc
from collections.abc import Iterator
from contextlib import AsyncExitStack, contextmanager, suppress
from itertools import pairwise
from pathlib import Path

import pytest
import trio
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from trio.testing import MockClock, wait_all_tasks_blocked

from datastreamer.storage.stream import DataStream
from tests.network import model as wire
from tests.network.fixtures import Rig, append, in_memory, over_loopback
from tests.network.model import BOOKMARK, OK, Conversation, Model, result
from tests.protocol.mutilated import mutilated

KEYS = [b"k", b"key", b"0123456789abcdef"]


def modelled(stream: DataStream) -> Model:
    return Model(Path(stream.path).read_bytes())


def filled(stream: DataStream) -> DataStream:
    for key in KEYS:
        append(stream, (BOOKMARK, key), *[(n, bytes([n]) * n * 30) for n in range(6)])
    return stream


# What a client may send: commands that are right, nearly right, and not at all.
numbers = st.one_of(st.integers(0, 30), st.sampled_from([2**63, 2**64 - 1]))
lengths = st.one_of(st.integers(0, 18), st.sampled_from([2**31, 2**32 - 1]))
keys = st.one_of(st.sampled_from(KEYS), st.binary(min_size=1, max_size=16))
# The model knows few of our extensions, and has another stream id.
others = st.integers(0, 2**64 - 1).filter(lambda number: not 0x1000 <= number < 0x1020)
commands = st.one_of(
    numbers.map(wire.entry),
    numbers.map(wire.start),
    keys.map(wire.bookmark),
    keys.map(wire.start_bookmark),
    st.builds(wire.header, st.sampled_from([1, 1, 1, 1, 0, 2])),
    st.just(wire.stop()),
    others.map(wire.unknown),
    st.builds(lambda command, length, data: struct.pack(">QQI", command, 1, length) + data,
              st.sampled_from([4, 6]), lengths, st.binary(max_size=4)),
    st.builds(lambda request, size: request[:size], numbers.map(wire.entry), st.integers(0, 23)),
    st.binary(max_size=40),
)  # fmt: skip
steps = st.lists(st.one_of(commands, commands, st.integers(0, 4)), max_size=12)
cuts = st.lists(st.integers(0, 200), max_size=4)


@settings(
    max_examples=150,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(steps=steps, cuts=cuts)
def test_any_bytes_get_the_answers_of_the_model(
    stream: DataStream, steps: list[bytes | int], cuts: list[int]
) -> None:
    """Numbers are commits of that many entries between what the client sends."""
    if stream.total_entries > 200:
        stream.truncate(0)
    if not stream.total_entries:
        filled(stream)

    async def play() -> None:
        talk = Conversation(modelled(stream))
        async with in_memory(stream) as rig, rig.client() as peer:
            for step in steps:
                if isinstance(step, int):
                    news = [(7, b"n" * step)] * step
                    append(stream, *news)
                    talk.model.pending = news
                    talk.model.commit()
                    await peer.expect(talk.moved())
                    continue
                with suppress(trio.BrokenResourceError):  # closed before the last part
                    for part in cut(step, cuts):
                        await peer.send(part)
                answer = talk.feed(step)
                if talk.dropped and talk.streaming:
                    # What was on its way is not waited for.
                    assert answer.startswith(await peer.rest())
                    return
                await peer.expect(answer)
                if talk.closed:
                    await peer.ended()
                    return
            if not talk.unread:
                await peer.nothing_more()

    trio.run(play, clock=MockClock(autojump_threshold=0))


def cut(data: bytes, places: list[int]) -> Iterator[bytes]:
    bounds = sorted({0, len(data), *(place % (len(data) + 1) for place in places)})
    for first, last in pairwise(bounds):
        yield data[first:last]


@settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(many=st.lists(st.tuples(mutilated(), st.booleans(), cuts), min_size=1, max_size=12))
def test_mutilated_commands_over_loopback(
    stream: DataStream, many: list[tuple[bytes, bool, list[int]]]
) -> None:
    """Recorded commands, mutilated, of several clients at once; some are torn away. The
    server lives, another is served meanwhile, and no session is left."""
    if not stream.total_entries:
        filled(stream)
    model = modelled(stream)

    async def attack(rig: Rig, data: bytes, reset: bool, places: list[int]) -> None:
        async with rig.client() as peer:
            with suppress(trio.BrokenResourceError):
                for part in cut(data, places):
                    await peer.send(part)
                if not reset:
                    await peer.stream.send_eof()
                    await peer.rest()

    async def play() -> None:
        async with over_loopback(stream) as rig, rig.client() as asker:
            async with trio.open_nursery() as nursery:
                for data, reset, places in many:
                    nursery.start_soon(attack, rig, data, reset, places)
                await asker.ask(wire.entry(2), OK + b"\xfe" + model.packed(2, 3)[1:])
            while len(rig.server.sessions) > 1:
                await wait_all_tasks_blocked()
            await asker.ask(wire.header(), OK + model.header())
            counts = rig.server.counts
            assert sum(counts.ended.values()) == counts.accepted - 1 == len(many)
            assert not counts.ended["failed"]
            assert counts.errors["fault"] == 0

    trio.run(play)


async def test_garbage_over_loopback_beside_others(stream: DataStream) -> None:
    filled(stream)
    choose = random.Random(9)
    async with over_loopback(stream) as rig, rig.client() as live, rig.client() as asker:
        await live.ask(wire.start(0), OK + modelled(stream).packed())
        for turn in range(60):
            async with rig.client() as peer:
                with suppress(trio.BrokenResourceError):
                    for _ in range(choose.randrange(5)):
                        await peer.send(
                            choose.randbytes(choose.choice([1, 16, 20, 3_000, 100_000]))
                        )
                    if turn % 3 == 0:
                        await peer.stream.send_eof()
                        await peer.rest()
            total = stream.total_entries
            append(stream, (1, b"%d" % turn))
            await live.expect(modelled(stream).packed(total))
            await asker.ask(wire.header(), OK + modelled(stream).header())
        while len(rig.server.sessions) > 2:
            await wait_all_tasks_blocked()


@contextmanager
def flooding(server: tuple[str, int], request: bytes, *, reading: bool) -> Iterator[None]:
    """A client in threads that sends without a pause, and may read the answers."""
    connection = socket.create_connection(server)
    over = threading.Event()

    def send() -> None:
        with suppress(OSError):
            while not over.is_set():
                connection.sendall(request)

    def receive() -> None:
        with suppress(OSError):
            while not over.is_set() and connection.recv(1 << 20):
                pass

    threads = [threading.Thread(target=send)]
    if reading:
        threads.append(threading.Thread(target=receive))
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        over.set()
        with suppress(OSError):
            connection.shutdown(socket.SHUT_RDWR)
        for thread in threads:
            thread.join()
        connection.close()


@pytest.mark.parametrize(
    ("request_", "reading"),
    [
        (wire.entry(3) * 3_000, True),
        (wire.header() * 3_000, True),
        (wire.bookmark(b"key") * 3_000, True),
        (wire.unknown() * 3_000, True),
        (wire.entry(3) * 3_000, False),
        (wire.stop() + b"after the refusal" * 5_000, False),
        (wire.header(7) + b"after the drop" * 5_000, False),
        (wire.start(0) + wire.unknown() * 5_000, True),
        (wire.start(0) + wire.unknown() * 5_000, False),
        (wire.start(0) + wire.start(0) + b"!" * 50_000, True),
    ],
    ids=[
        "entries",
        "headers",
        "bookmarks",
        "unknown",
        "entries, unread",
        "after a refusal",
        "after a drop",
        "unknown while streaming",
        "unknown while streaming, unread",
        "after a refusal while streaming",
    ],
)
async def test_a_client_that_never_pauses(
    stream: DataStream, request_: bytes, reading: bool
) -> None:
    filled(stream)
    model = modelled(stream)
    async with over_loopback(stream) as rig, rig.client() as asker, rig.client() as live:
        await live.ask(wire.start(len(model.entries)), OK)
        with flooding(rig.address, request_, reading=reading):
            for turn in range(20):
                await asker.ask(wire.entry(2), OK + b"\xfe" + model.packed(2, 3)[1:])
                append(stream, (1, b"%d" % turn))
                await live.expect(modelled(stream).packed(len(model.entries) + turn))
            for session in rig.server.sessions:
                assert session.answers.size < 200_000
                assert session.protocol.pending < 200_000


async def test_a_refused_client_that_continues_sending_is_closed_after_a_second(
    stream: DataStream,
) -> None:
    async with over_loopback(stream) as rig:
        with flooding(rig.address, wire.stop() + b"more" * 5_000, reading=False):
            while not rig.server.sessions:
                await trio.lowlevel.checkpoint()
            began = trio.current_time()
            while rig.server.sessions:
                await trio.lowlevel.checkpoint()
            assert 0.9 < trio.current_time() - began < 20


async def test_questions_without_reading_the_answers(stream: DataStream) -> None:
    """The server stops asking what else is wanted; what it owes stays small, and right."""
    append(stream, *[(1, bytes([n]) * 10_000) for n in range(50)])
    model = modelled(stream)
    asked = [n * 7 % 50 for n in range(4_000)]
    async with over_loopback(stream, receive_buffer=4096) as rig, rig.client() as peer:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(peer.send, b"".join(map(wire.entry, asked)))
            await wait_all_tasks_blocked(0.002)
            [session] = rig.server.sessions
            assert session.answers.size + session.protocol.pending < 300_000
            for number in asked:
                await peer.expect(OK + b"\xfe" + model.packed(number, number + 1)[1:])
        await peer.nothing_more()


async def test_hundreds_of_half_commands(stream: DataStream) -> None:
    filled(stream)
    model = modelled(stream)
    async with over_loopback(stream) as rig, AsyncExitStack() as stack:
        slow = [await stack.enter_async_context(rig.client()) for _ in range(300)]
        for at, peer in enumerate(slow):
            await peer.send(wire.entry(at % 20)[: at % 24])
        async with rig.client() as asker:
            await asker.ask(wire.entry(2), OK + b"\xfe" + model.packed(2, 3)[1:])
        for at, peer in enumerate(slow):
            await peer.ask(
                wire.entry(at % 20)[at % 24 :],
                OK + b"\xfe" + model.packed(at % 20, at % 20 + 1)[1:],
            )
        assert len(rig.server.sessions) >= 300


@pytest.mark.parametrize("connects", [1_000, pytest.param(10_000, marks=pytest.mark.slow)])
async def test_quick_connects_and_resets(stream: DataStream, connects: int) -> None:
    filled(stream)
    model = modelled(stream)
    abort = struct.pack("ii", 1, 0)
    async with over_loopback(stream) as rig, rig.client() as stays:
        await stays.ask(wire.start(0), OK + model.packed())
        await wait_all_tasks_blocked()
        before = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0
        for turn in range(connects):
            connection = socket.create_connection(rig.address)
            if turn % 4 == 1:
                connection.sendall(wire.header())
            elif turn % 4 == 2:
                connection.sendall(wire.start(0))
            if turn % 2:
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, abort)
            connection.close()
            if turn % 50 == 0:
                await trio.lowlevel.checkpoint()
            if turn % 500 == 499:
                await wait_all_tasks_blocked()  # no more than the system's queue takes
        append(stream, (1, b"still there"))
        await stays.expect(modelled(stream).packed(len(model.entries)))
        while len(rig.server.sessions) > 1:
            await wait_all_tasks_blocked()
        gc.collect()
        if before:
            assert len(os.listdir("/proc/self/fd")) <= before + 2
        assert sum(rig.server.counts.ended.values()) == connects
        assert len(rig.server.counts.ended) < 6


async def test_slowloris(
    stream: DataStream, autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three hundred clients, a byte now and then: gone after the time for half a command."""
    monkeypatch.setattr("datastreamer.server.streaming.broadcast._LOOK_SECONDS", 1_000_000)
    filled(stream)
    model = modelled(stream)
    gone = 0

    async def dribble(rig: Rig, request: bytes) -> None:
        nonlocal gone
        async with rig.client() as peer:
            with suppress(trio.BrokenResourceError):
                for at in range(len(request)):
                    await peer.send(request[at : at + 1])
                    await trio.sleep(5)
        gone += 1

    async with in_memory(stream, patience=1e4) as rig, rig.client() as asker:
        async with trio.open_nursery() as nursery:
            for turn in range(300):
                request = (wire.entry(1), wire.bookmark(b"k" * 16), wire.start(0))[turn % 3]
                nursery.start_soon(dribble, rig, request)
            while gone < 300:
                await asker.ask(wire.entry(2), OK + b"\xfe" + model.packed(2, 3)[1:])
                await trio.sleep(1)
        assert trio.current_time() < 40
        assert rig.server.counts.ended == {"command_timeout": 300}


async def test_many_that_ask_and_never_read(stream: DataStream) -> None:
    """What the server holds for each is bounded; who asks and reads is served."""
    append(stream, *[(1, bytes([n]) * 5_000) for n in range(50)])
    model = modelled(stream)
    async with over_loopback(stream, receive_buffer=4096) as rig, AsyncExitStack() as stack:
        asker = await stack.enter_async_context(rig.client())
        greedy = [await stack.enter_async_context(rig.client()) for _ in range(40)]
        await asker.ask(wire.header(), OK + model.header())
        flood = wire.entry(3) * 20_000
        gc.collect()
        tracemalloc.start()
        try:
            async with trio.open_nursery() as nursery:
                for peer in greedy:
                    nursery.start_soon(peer.send, flood)
                for _ in range(50):
                    await wait_all_tasks_blocked(0.002)
                    await asker.ask(wire.entry(2), OK + b"\xfe" + model.packed(2, 3)[1:])
                gc.collect()
                held, _ = tracemalloc.get_traced_memory()
                nursery.cancel_scope.cancel()
        finally:
            tracemalloc.stop()
        sessions = [session for session in rig.server.sessions if session.blocked]
        assert len(sessions) == 40
        # 64 KiB of answers and one more, 64 KiB of questions.
        assert held / 40 < 150_000
        assert all(session.protocol.pending <= 64 * 1024 for session in sessions)


async def test_memory_does_not_grow_with_the_lag_of_clients(stream: DataStream) -> None:
    """Fifty clients stop reading; 40 MB are committed; the server's memory stays."""
    async with over_loopback(stream, receive_buffer=4096) as rig, AsyncExitStack() as stack:
        peers = [await stack.enter_async_context(rig.client()) for _ in range(50)]
        for peer in peers:
            await peer.ask(wire.start(0), OK)
        append(stream, (1, bytes(900_000)))
        await wait_all_tasks_blocked(0.002)
        gc.collect()
        tracemalloc.start()
        try:
            for _ in range(40):
                append(stream, (1, bytes(1_000_000)))
                await wait_all_tasks_blocked(0.002)
            gc.collect()
            grown, _ = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert grown < 3_000_000
        assert all(session.sender.cursor.number < 3 for session in rig.server.sessions)
        await peers[7].expect(modelled(stream).packed())


def test_results_of_the_model_are_those_of_the_format() -> None:
    assert result(0).hex() == "ff0000000b000000004f4b"
    assert result(9).hex() == "ff0000001800000009496e76616c696420636f6d6d616e64"
