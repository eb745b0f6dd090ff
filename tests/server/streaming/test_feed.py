"""The pass over live clients in other forms and over TLS: one read a commit, and what leaves it."""

from __future__ import annotations

from contextlib import AsyncExitStack
from typing import Any

import pytest
import trio
import trio.testing

from datastreamer.format import PACKET_ENTRY
from datastreamer.protocol.commands import CommitStart, encode_command
from datastreamer.protocol.messages import OK, encode_commit
from datastreamer.server.streaming import feed as feed_module
from datastreamer.storage.read.reader import Reader
from datastreamer.storage.stream import DataStream
from tests.network import model as wire
from tests.network.fixtures import Open, Peer, Rig, append, over_loopback, over_unix, until

REQUESTS = {"commits": encode_command(CommitStart(0), 1), "raw": wire.start(0)}


@pytest.fixture(params=["commits over TCP", "commits over a Unix socket", "raw over TLS"])
def way(request: pytest.FixtureRequest, secured: Open) -> tuple[Open, str]:
    form, _, where = request.param.partition(" over ")
    return {"TCP": over_loopback, "a Unix socket": over_unix, "TLS": secured}[where], form


def sent(stream: DataStream, form: str, first: int) -> bytes:
    """What a client is sent of one commit, the last one."""
    total = stream.total_entries
    ahead = encode_commit(total) if form == "commits" else b""
    return ahead + b"".join(stream.reader.packed(number) for number in range(first, total))


async def entries(peer: Peer, count: int) -> bytes:
    """The next entries, whatever is announced before them."""
    found: list[bytes] = []
    while len(found) < count:
        packet = await peer.packet()
        if packet[0] == PACKET_ENTRY:
            found.append(packet)
    return b"".join(found)


async def all_live(rig: Rig, count: int) -> None:
    await until(lambda: len(rig.server.broadcast.feed) == count)


async def test_one_read_a_commit_for_all(
    stream: DataStream, way: tuple[Open, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    serve, form = way
    async with serve(stream) as rig, AsyncExitStack() as stack:
        peers = [await stack.enter_async_context(rig.client()) for _ in range(20)]
        for peer in peers:
            await peer.ask(REQUESTS[form], OK)
        await all_live(rig, 20)
        chunk, reads = Reader.chunk, []

        def noted(self: Reader, *what: Any) -> Any:
            reads.append(what)
            return chunk(self, *what)

        monkeypatch.setattr(Reader, "chunk", noted)
        for turn in range(10):
            total = stream.total_entries
            append(stream, (1, b"%d" % turn), (2, b"x" * 1000))
            news = sent(stream, form, total)
            for peer in peers:
                await peer.expect(news)
        assert len(reads) == 10


async def test_a_client_that_reads_nothing_leaves_and_loses_nothing(
    stream: DataStream, way: tuple[Open, str]
) -> None:
    serve, form = way
    async with serve(stream, receive_buffer=4096) as rig, AsyncExitStack() as stack:
        lazy, eager = [await stack.enter_async_context(rig.client()) for _ in range(2)]
        for peer in (lazy, eager):
            await peer.ask(REQUESTS[form], OK)
        await all_live(rig, 2)
        commits = 0
        while len(rig.server.broadcast.feed) > 1 or commits < 40:
            total = stream.total_entries
            append(stream, *[(1, b"%d" % commits * 10_000)] * 3)
            await eager.expect(sent(stream, form, total))
            commits += 1
            assert commits < 2000
        got = await entries(lazy, stream.total_entries)
        assert got == b"".join(map(stream.reader.packed, range(stream.total_entries)))
        await all_live(rig, 2)
        total = stream.total_entries
        append(stream, (1, b"together"))
        for peer in (lazy, eager):
            await peer.expect(sent(stream, form, total))


async def test_a_pass_gives_way_between_two_members(
    stream: DataStream, way: tuple[Open, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(feed_module, "_PASS_NS", -1)
    serve, form = way
    async with serve(stream) as rig, AsyncExitStack() as stack:
        peers = [await stack.enter_async_context(rig.client()) for _ in range(20)]
        for peer in peers:
            await peer.ask(REQUESTS[form], OK)
        await all_live(rig, 20)
        for turn in range(20):
            append(stream, (1, b"first %d" % turn))
            while len({s.sender.cursor.number for s in rig.server.sessions}) < 2:
                await trio.lowlevel.checkpoint()
            # As while a thread updates entry 0.
            with stream.parts.feed.change(0, 1):
                await trio.testing.wait_all_tasks_blocked()
            append(stream, (2, b"second %d" % turn))
        whole = b"".join(map(stream.reader.packed, range(40)))
        for peer in peers:
            assert await entries(peer, 40) == whole
