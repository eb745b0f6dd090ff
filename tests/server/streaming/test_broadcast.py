"""Catch-up, live and between them, over loopback: slow clients, Results in mid-entry, joins."""

from __future__ import annotations

import logging
import os
import random
import struct
from contextlib import AsyncExitStack
from pathlib import Path
from types import SimpleNamespace

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from datastreamer.format import COMMAND_COMMIT_START
from datastreamer.server.streaming import broadcast as live_module
from datastreamer.server.streaming.broadcast import Broadcast
from datastreamer.server.streaming.catch_up import State
from datastreamer.storage.header.records import Head
from datastreamer.storage.stream import DataStream
from tests.network import filters
from tests.network import model as wire
from tests.network.fixtures import Open, Peer, Rig, append, over_loopback, until
from tests.network.model import BOOKMARK, OK, Model, packets, result

SMALL_BUFFER = 4096
MIB = 1 << 20


def modelled(stream: DataStream) -> Model:
    return Model(Path(stream.path).read_bytes())


def fill(stream: DataStream, size: int, seed: int = 1) -> None:
    """Append about `size` bytes in entries from nothing to a whole page."""
    choose = random.Random(seed)
    end = stream.header.total_length + size
    while stream.header.total_length < end:
        sizes = choose.choices(
            [0, 1, 100, 3_000, 60_000, 400_000, MIB - 17], [9, 9, 9, 9, 5, 2, 1], k=9
        )
        append(stream, (BOOKMARK, choose.randbytes(8)), *[(1, choose.randbytes(n)) for n in sizes])


async def stalled(rig: Rig) -> None:
    """Return when every sender has come to a stop, its client's buffers being full."""
    await wait_all_tasks_blocked(0.002)


async def read_to_result(peer: Peer) -> tuple[list[bytes], bytes]:
    entries = []
    while (packet := await peer.packet())[0] == 2:
        entries.append(packet)
    return entries, packet


MODES = {"copied": 3 * MIB, "by sendfile": 10 * MIB}
REQUESTS = {
    "Stop": (wire.stop(), result(0)),
    "unknown": (wire.unknown(), result(9)),
    "Header": (wire.header(), result(1)),
    "Entry and more": (wire.entry(0) + wire.stop() * 9, result(1)),
}


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("size", MODES.values(), ids=MODES)
@pytest.mark.parametrize(("request_", "answer"), REQUESTS.values(), ids=REQUESTS)
async def test_a_result_to_a_client_that_stopped_reading(
    stream: DataStream, size: int, request_: bytes, answer: bytes, seed: int
) -> None:
    fill(stream, size, seed)
    model = modelled(stream)
    async with over_loopback(stream, receive_buffer=SMALL_BUFFER) as rig, rig.client() as peer:
        first = len(model.entries) // 7 * seed
        await peer.ask(wire.start(first), OK)
        await stalled(rig)
        [session] = rig.server.sessions
        assert (session.sender.span is not None) == (size == MODES["by sendfile"])
        await peer.send(request_)
        await stalled(rig)
        entries, reported = await read_to_result(peer)
        assert reported == answer
        assert b"".join(entries) == model.packed(first, first + len(entries))
        # What was sent before is in buffers; the Result does not wait for the end.
        assert sum(map(len, entries)) < 2.7 * MIB
        if answer == result(0):
            await peer.ask(wire.header(), OK + model.header())
            await peer.ask(wire.start(first + len(entries)), OK)
            await peer.expect(model.packed(first + len(entries)))
        elif answer == result(9):
            await peer.expect(model.packed(first + len(entries)))
            await peer.nothing_more()
        else:
            await peer.ended()


@pytest.mark.parametrize("entry_size", [200, 70_000, 900_000, MIB - 20])
@pytest.mark.parametrize(("request_", "answer"), REQUESTS.values(), ids=REQUESTS)
async def test_a_result_to_a_client_that_fell_out_of_the_pass(
    stream: DataStream, entry_size: int, request_: bytes, answer: bytes
) -> None:
    async with over_loopback(stream, receive_buffer=SMALL_BUFFER) as rig, rig.client() as peer:
        await peer.ask(wire.start(0), OK)
        [session] = rig.server.sessions
        await until_live(rig)
        number = 0
        while session.state is State.LIVE:
            news = [
                (1, b"%02d" % n + b"e" * entry_size) for n in range(max(1, 50_000 // entry_size))
            ]
            append(stream, *news, (BOOKMARK, b"%d" % number))
            number += len(news) + 1
            await stalled(rig)
        if entry_size > 100_000:
            assert session.sender.half_sent
        append(stream, *[(2, b"later" * 50)] * 3)
        model = modelled(stream)
        await peer.send(request_)
        await stalled(rig)
        append(stream, (3, b"after the request"))
        entries, reported = await read_to_result(peer)
        assert reported == answer
        assert b"".join(entries) == model.packed(0, len(entries))
        model = modelled(stream)
        if answer == result(0):
            await peer.ask(wire.header(), OK + model.header())
        elif answer == result(9):
            await peer.expect(model.packed(len(entries)))
            append(stream, (4, b"live again"))
            await peer.expect(modelled(stream).packed(number + 4))
            await peer.nothing_more()
        else:
            await peer.ended()


@pytest.mark.parametrize("size", MODES.values(), ids=MODES)
async def test_the_whole_way_without_sendfile(
    stream: DataStream, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    """As on systems whose sendfile is another."""
    elsewhere = SimpleNamespace(platform="elsewhere")
    monkeypatch.setattr("datastreamer.transport.server_stream.sys", elsewhere)
    monkeypatch.delattr(os, "sendfile", raising=False)
    monkeypatch.delattr(os, "eventfd", raising=False)
    fill(stream, size)
    model = modelled(stream)
    async with over_loopback(stream, receive_buffer=SMALL_BUFFER) as rig, rig.client() as peer:
        await peer.ask(wire.start(0), OK)
        await stalled(rig)
        await peer.expect(model.packed())
        append(stream, (1, b"live"))
        await peer.expect(modelled(stream).packed(len(model.entries)))
        await peer.nothing_more()
        stream.update_entry(len(model.entries), 1, b"LIVE")
        stream.truncate(len(model.entries))
        assert await peer.was_reset() == b""


async def test_a_file_that_is_cut_under_a_client(
    stream: DataStream, caplog: pytest.LogCaptureFixture
) -> None:
    """By another program: one line, one connection, and the server lives."""
    append(stream, *[(1, bytes([n % 251]) * 20_000) for n in range(520)])
    model = modelled(stream)
    async with over_loopback(stream, receive_buffer=SMALL_BUFFER) as rig, rig.client() as peer:
        await peer.ask(wire.start(0), OK)
        await stalled(rig)
        [session] = rig.server.sessions
        size = os.path.getsize(stream.path)
        os.truncate(stream.path, session.sender.at + 1)
        got = await peer.was_reset()
        assert model.packed().startswith(got)
        errors = [r.getMessage() for r in caplog.records if r.levelno == logging.ERROR]
        assert len(errors) == 1
        assert "page 0 (entries 0 to 51): the file ends within the page" in errors[0]
        os.truncate(stream.path, size)
        async with rig.client() as other:
            await other.ask(wire.header(), OK + model.header())


async def test_one_pass_at_a_time_whichever_task_begins_it(
    stream: DataStream, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The poll finds a pass in the middle of its clients, at every turn: the view never goes
    back, and no client gets an entry twice."""
    monkeypatch.setattr(live_module, "_PASS_NS", 0)
    monkeypatch.setattr(live_module, "_LOOK_SECONDS", 0)
    move, views = Broadcast._move_view, []

    def noted(self: Broadcast, head: Head) -> None:
        views.append(head)
        move(self, head)

    monkeypatch.setattr(Broadcast, "_move_view", noted)
    async with over_loopback(stream) as rig, AsyncExitStack() as stack:
        peers = [await stack.enter_async_context(rig.client()) for _ in range(40)]
        for peer in peers:
            await peer.ask(wire.start(0), OK)
        await until(lambda: {s.state for s in rig.server.sessions} == {State.LIVE})
        for number in range(200):
            append(stream, (1, b"%d" % number))
            await trio.lowlevel.checkpoint()
        for peer in peers:
            await peer.expect(modelled(stream).packed())
            await peer.nothing_more()
    assert views == sorted(views)
    assert len(views) > 10


async def until_live(rig: Rig) -> None:
    await wait_all_tasks_blocked()
    assert all(session.state is State.LIVE for session in rig.server.sessions)


@pytest.mark.parametrize("kind", ["plain", "commits", "types", "tls"])
async def test_a_client_that_has_received_all_is_live(
    stream: DataStream, secured: Open, kind: str
) -> None:
    """Also those whom the pass does not serve: operators would see them catch up for ever."""
    request = {
        "commits": struct.pack(">QQQ", COMMAND_COMMIT_START, 1, 0),
        "types": filters.start(0, 1, 2),
    }.get(kind, wire.start(0))
    append(stream, (1, b"a"), (2, b"b"))
    rigged = secured(stream) if kind == "tls" else over_loopback(stream)
    async with rigged as rig, rig.client() as peer:
        await peer.ask(request, OK)
        for turn in range(3):
            await until(lambda due=2 + turn: rig.server.counts.entries_sent == due)
            await until(lambda: {s.state for s in rig.server.sessions} == {State.LIVE})
            append(stream, (2, b"more"))


async def test_a_client_that_reads_nothing_delays_no_other_and_loses_nothing(
    stream: DataStream,
) -> None:
    """A dozen live clients, one of which stops for a while; nothing is kept for it."""
    async with over_loopback(stream, receive_buffer=SMALL_BUFFER) as rig, AsyncExitStack() as stack:
        lazy, *eager = [await stack.enter_async_context(rig.client()) for _ in range(12)]
        for peer in (lazy, *eager):
            await peer.ask(wire.start(0), OK)
        await until_live(rig)
        sent = 0
        for turn in range(30):
            append(stream, *[(turn, b"%d" % turn * size) for size in (1, 50_000, 0, 150_000)])
            news = modelled(stream).packed(sent) if turn % 10 == 9 else b""
            if news:
                sent += 40
                async with trio.open_nursery() as nursery:
                    for peer in eager:
                        nursery.start_soon(peer.expect, news)
        behind = [s for s in rig.server.sessions if s.state is not State.LIVE]
        assert len(behind) == 1
        assert behind[0].sender.cursor.number < 20
        await lazy.expect(modelled(stream).packed())
        await until_live(rig)
        append(stream, (1, b"all together"))
        for peer in (lazy, *eager):
            await peer.expect(modelled(stream).packed(120))
            await peer.nothing_more()


@pytest.mark.parametrize("start", ["from the beginning", "from a bookmark", "at the end"])
async def test_joining_a_stream_that_moves(stream: DataStream, start: str) -> None:
    """Commits fall before, into and after the Start, many times: no loss, no repeat."""
    append(stream, (BOOKMARK, b"here"), (1, b"there"))
    async with over_loopback(stream) as rig, trio.open_nursery() as nursery:

        async def write() -> None:
            number = 0
            while True:
                number += 1
                append(stream, (1, b"%d" % number), *[(2, b"x" * 700)] * (number % 3))
                for _ in range(number % 7):
                    await trio.lowlevel.checkpoint()

        nursery.start_soon(write)
        choose = random.Random(5)
        for _ in range(60):
            async with rig.client() as peer:
                for _ in range(choose.randrange(6)):
                    await trio.lowlevel.checkpoint()
                first = {"from the beginning": 0, "from a bookmark": 0}.get(
                    start, stream.total_entries
                )
                request = wire.start_bookmark(b"here") if "bookmark" in start else wire.start(first)
                await peer.ask(request, OK)
                goal = stream.total_entries + choose.randrange(1, 40)
                got = [await peer.packet() for _ in range(first, goal)]
                assert b"".join(got) == modelled(stream).packed(first, goal)
                await peer.send(wire.stop() + wire.header())
                entries, reported = await read_to_result(peer)
                assert reported == OK
                model = modelled(stream)
                assert b"".join(entries) == model.packed(goal, goal + len(entries))
                assert (await peer.packet(), (await peer.packet())[0]) == (OK, 1)
        nursery.cancel_scope.cancel()


async def test_stop_and_start_again_on_one_connection(stream: DataStream) -> None:
    async with over_loopback(stream) as rig, rig.client() as peer, trio.open_nursery() as nursery:

        async def write() -> None:
            while True:
                append(stream, *[(1, b"z" * 300)] * 5)
                await trio.lowlevel.checkpoint()

        nursery.start_soon(write)
        choose = random.Random(3)
        first = 0
        for _ in range(80):
            await peer.ask(wire.start(first), OK)
            got = [await peer.packet() for _ in range(choose.randrange(30))]
            await peer.send(wire.stop())
            entries, reported = await read_to_result(peer)
            assert reported == OK
            got += entries
            assert b"".join(got) == modelled(stream).packed(first, first + len(got))
            await peer.ask(wire.entry(first), OK + b"\xfe" + modelled(stream).packed(first)[1:317])
            first = choose.choice([first + len(got), 0, stream.total_entries])
        nursery.cancel_scope.cancel()


async def test_a_command_to_a_client_already_served_while_the_pass_rests(
    stream: DataStream, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pass has no time for all; who has its run already asks for something meanwhile."""
    from datastreamer.server.streaming import broadcast as live_module

    monkeypatch.setattr(live_module, "_PASS_NS", 0)  # eight clients a call
    async with over_loopback(stream) as rig, AsyncExitStack() as stack:
        peers = [await stack.enter_async_context(rig.client()) for _ in range(40)]
        for peer in peers:
            await peer.ask(wire.start(0), OK)
        await until_live(rig)
        for turn in range(20):
            append(stream, (1, b"%d" % turn))
            for peer in peers:
                await peer.send(wire.unknown())
        model = modelled(stream)
        for peer in peers:
            got = packets(await peer.read(len(model.packed()) + 20 * len(result(9))))
            assert got.count(result(9)) == 20
            assert b"".join(p for p in got if p[0] == 2) == model.packed()
            await peer.nothing_more()


async def test_a_huge_operation_reaches_live_clients_whole(stream: DataStream) -> None:
    async with over_loopback(stream) as rig, AsyncExitStack() as stack:
        peers = [await stack.enter_async_context(rig.client()) for _ in range(4)]
        for peer in peers:
            await peer.ask(wire.start(0), OK)
        await until_live(rig)
        with stream.atomic_op() as op:
            op.add_entries(1, [bytes([n % 251]) * (n * 977 % 90_000) for n in range(400)])
            await wait_all_tasks_blocked()
            assert all(session.sender.at <= 4096 for session in rig.server.sessions)
        whole = modelled(stream).packed()
        assert len(whole) > 12 * MIB
        async with trio.open_nursery() as nursery:
            for peer in peers:
                nursery.start_soon(peer.expect, whole)
        for peer in peers:
            await peer.nothing_more()


async def test_a_client_that_vanishes_while_live(stream: DataStream) -> None:
    async with over_loopback(stream) as rig, rig.client() as stays:
        await stays.ask(wire.start(0), OK)
        for turn in range(10):
            async with rig.client() as goes:
                await goes.ask(wire.start(stream.total_entries), OK)
                await until_live(rig)
                goes.stream.setsockopt(  # type: ignore[attr-defined]
                    trio.socket.SOL_SOCKET, trio.socket.SO_LINGER, b"\1\0\0\0\0\0\0\0"
                )
            append(stream, (1, b"%d" % turn))
        await stays.expect(modelled(stream).packed())
        await wait_all_tasks_blocked()
        assert len(rig.server.sessions) == 1
