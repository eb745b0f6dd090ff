"""Serving clients that receive the ends of commits: `CommitStart`."""

from __future__ import annotations

import contextlib
import random

import pytest
import trio
import trio.testing

from datastreamer.protocol.client import ClientConnection
from datastreamer.protocol.commands import CommitStart, Stop, encode_command
from datastreamer.protocol.events import EntriesReceived, ResultReceived
from datastreamer.protocol.messages import OK, encode_commit
from datastreamer.storage.stream import DataStream
from tests.network import model
from tests.network.fixtures import Open, Peer, half_sent, in_memory, over_loopback, over_unix

START = encode_command(CommitStart(0), 1)
STOP = encode_command(Stop(), 1)


def commit(stream: DataStream, count: int, size: int = 20) -> None:
    with stream.atomic_op() as op:
        for number in range(count):
            op.add_entry(1, bytes([number % 256]) * size)


def entries(stream: DataStream, start: int, stop: int) -> bytes:
    return b"".join(stream.reader.packed(number) for number in range(start, stop))


async def over(peer: Peer) -> None:
    """Returns when the connection was ended, in whatever way."""
    with contextlib.suppress(trio.BrokenResourceError):
        await peer.rest()


@pytest.mark.parametrize("serve", [in_memory, over_loopback, over_unix])
async def test_each_end_precedes_the_entries(stream: DataStream, serve: Open) -> None:
    commit(stream, 5)
    commit(stream, 3)
    async with serve(stream) as rig, rig.client() as peer:
        # The backlog is announced as one commit.
        await peer.ask(START, OK + encode_commit(8) + entries(stream, 0, 8))
        for count in (1, 4, 2):
            commit(stream, count)
            total = stream.total_entries
            await peer.expect(encode_commit(total) + entries(stream, total - count, total))
        await peer.ask(STOP, OK)
        # From the end, and in the middle of what is there.
        await peer.ask(encode_command(CommitStart(15), 1), OK)
        commit(stream, 1)
        await peer.expect(encode_commit(16) + entries(stream, 15, 16))
        await peer.ask(STOP, OK)
        await peer.ask(
            encode_command(CommitStart(3), 1), OK + encode_commit(16) + entries(stream, 3, 16)
        )
        await peer.ask(STOP, OK)
        await peer.ask(encode_command(CommitStart(17), 1), model.result(3))


@pytest.mark.parametrize("serve", [in_memory, over_loopback, over_unix])
@pytest.mark.parametrize("seed", range(3))
async def test_no_entry_follows_an_end_that_was_not_reported(
    stream: DataStream, serve: Open, seed: int
) -> None:
    """Large ones and small ones, in pages and across them, to a client that is slow at times."""
    chance = random.Random(seed)
    ends = set()
    for _ in range(3):
        commit(stream, 9_000, 300)
        ends.add(stream.total_entries)
    async with serve(stream) as rig, rig.client() as peer:
        connection = ClientConnection(1)
        await peer.send(connection.request(CommitStart(0)))
        reached, reported = 0, []
        while reached < 40_000:
            connection.feed(await peer.more())
            while (event := connection.next_event()) is not None:
                if isinstance(event, ResultReceived):
                    continue
                assert isinstance(event, EntriesReceived)
                for entry in event.batch:
                    assert entry == stream.entry(reached)
                    reached += 1
                if reached == connection.streamed.commit_ahead:
                    reported.append(reached)
            most = 40_000 - stream.total_entries
            if most and (reached == stream.total_entries or chance.random() < 0.3):
                commit(stream, min(most, chance.choice([1, 2, 10, 3000])), chance.randrange(2000))
                ends.add(stream.total_entries)
        assert set(reported) <= ends
        assert reported[0] >= 27_000
        assert reported[-1] == 40_000


async def test_a_truncation_of_what_was_reported_ends_the_connection(stream: DataStream) -> None:
    """Also if none of the truncated entries was sent."""
    commit(stream, 4)
    commit(stream, 4, 1_000_000)
    commit(stream, 4, 1_000_000)
    async with over_loopback(stream, receive_buffer=65_536) as rig, rig.client() as peer:
        await peer.send(START)
        await peer.expect(OK + encode_commit(12) + entries(stream, 0, 2))
        await half_sent(rig.server)
        stream.truncate(11)
        await over(peer)


async def test_a_truncation_of_what_was_not_reported_does_not(stream: DataStream) -> None:
    commit(stream, 4)
    commit(stream, 4)
    async with in_memory(stream) as rig, rig.client() as peer:
        await peer.ask(encode_command(CommitStart(4), 1), OK + encode_commit(8))
        await peer.expect(entries(stream, 4, 8))
        commit(stream, 4)
        await peer.expect(encode_commit(12) + entries(stream, 8, 12))
        stream.truncate(11)
        await over(peer)
    async with in_memory(stream) as rig, rig.client() as peer:
        await peer.ask(START, OK + encode_commit(11) + entries(stream, 0, 11))
        stream.update_entry(3, 1, bytes(20))
        commit(stream, 1)
        await peer.expect(encode_commit(12) + entries(stream, 11, 12))


async def refused_between(stream: DataStream, peer: Peer) -> None:
    await peer.ask(START, OK + encode_commit(1) + entries(stream, 0, 1))
    await peer.ask(model.unknown(), model.result(9))


@pytest.mark.parametrize("serve", [in_memory, over_loopback])
async def test_results_are_between_packets(stream: DataStream, serve: Open) -> None:
    commit(stream, 1)
    async with serve(stream) as rig, rig.client() as peer:
        await refused_between(stream, peer)
        commit(stream, 2)
        await peer.expect(encode_commit(3) + entries(stream, 1, 3))
        await peer.send(START)
        assert await peer.rest() == model.result(1)


async def test_an_old_client_sees_no_difference(stream: DataStream) -> None:
    commit(stream, 3)
    async with in_memory(stream) as rig, rig.client() as peer, rig.client() as old:
        await peer.ask(START, OK + encode_commit(3) + entries(stream, 0, 3))
        await old.ask(model.start(0), OK + entries(stream, 0, 3))
        commit(stream, 2)
        await old.expect(entries(stream, 3, 5))
        await peer.expect(encode_commit(5) + entries(stream, 3, 5))
        await old.ask(STOP, OK)
        await old.nothing_more()
        await trio.lowlevel.checkpoint()
