"""When entries were committed, as a server is asked for it: exact bytes over loopback."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest
import trio

from datastreamer.format import RESULT_ALREADY_STARTED, RESULT_TIME_UNKNOWN
from datastreamer.storage.stream import DataStream
from tests.conftest import GOLDEN, Golden
from tests.network import model
from tests.network.fixtures import Open, Peer, over_loopback
from tests.network.model import OK
from tests.network.timed import PLACES, SEVEN, TOTAL, Clock, ms, timed
from tests.protocol.test_times import packed


def at_time(time: int) -> bytes:
    return struct.pack(">QQQ", 0x100D, 1, time)


def marks_from(number: int) -> bytes:
    return struct.pack(">QQQ", 0x100E, 1, number)


async def refused(peer: Peer, request: bytes) -> str:
    """The text of the refusal, after which the connection can be used."""
    await peer.send(request)
    packet = await peer.packet()
    assert (packet[0], int.from_bytes(packet[5:9], "big")) == (0xFF, RESULT_TIME_UNKNOWN)
    await peer.nothing_more()
    return packet[9:].decode("ascii")


async def test_golden(stream: DataStream) -> None:
    """Bytes that were packed by hand, of a stream with these marks."""
    clock = Clock(stream)
    steps = Golden(GOLDEN, Path()).transcript("times")
    [[step], [other]] = steps.values()
    clock.commit(step["entries"])
    marks = [tuple(mark) for mark in step["marks"]]
    stream.parts.relay.put_time_marks(marks, step["resolution"], step["entries"])
    async with over_loopback(stream) as rig, rig.client() as peer:
        for each in (step, other):
            await peer.ask(bytes.fromhex(each["send_hex"]), bytes.fromhex(each["recv_hex"]))
        # Several at once, among others.
        sent = [bytes.fromhex(each["send_hex"]) for each in (step, other)]
        received = [bytes.fromhex(each["recv_hex"]) for each in (step, other)]
        await peer.send(b"".join([*sent, model.unknown(), *sent]))
        await peer.expect(b"".join([*received, model.result(9), *received]))


async def test_entries_at_times(stream: DataStream) -> None:
    clock = timed(stream)
    async with over_loopback(stream) as rig, rig.client() as peer:
        for seconds, number in PLACES:
            await peer.ask(at_time(ms(seconds)), OK + packed([], 0, number))
        await peer.ask(at_time(0), OK + packed([], 0, 0))
        await peer.ask(at_time(2**64 - 1), OK + packed([], 0, TOTAL))
        # It grows, and is truncated.
        clock.commit(5, 4000.0)
        await peer.ask(at_time(ms(3700.0)), OK + packed([], 0, TOTAL))
        await peer.ask(at_time(ms(4000.5)), OK + packed([], 0, TOTAL))
        await peer.ask(at_time(ms(5000.0)), OK + packed([], 0, TOTAL + 5))
        stream.truncate(7)
        await peer.ask(at_time(ms(3000.0)), OK + packed([], 0, 7))
        await peer.ask(at_time(ms(10.0)), OK + packed([], 0, 5))
        clock.commit(1, 9000.0)
        await peer.ask(at_time(ms(3000.0)), OK + packed([], 0, 7))
        await peer.ask(marks_from(5), OK + packed([(5, ms(60)), (7, ms(9000))], 1000, 8))


async def test_marks(stream: DataStream) -> None:
    timed(stream)
    marks = [(0, ms(0)), (3, ms(1.2)), (5, ms(60)), (9, ms(3600))]
    async with over_loopback(stream) as rig, rig.client() as peer:
        await peer.ask(marks_from(0), OK + packed(marks, 1000, TOTAL))
        # The first is the one that is in force there.
        await peer.ask(marks_from(4), OK + packed(marks[1:], 1000, TOTAL))
        await peer.ask(marks_from(11), OK + packed(marks[3:], 1000, TOTAL))
        # Nothing is known yet of what comes next.
        await peer.ask(marks_from(TOTAL), OK + packed([], 0, TOTAL))
        await peer.ask(marks_from(2**64 - 1), OK + packed([], 0, 2**64 - 1))


async def test_times_that_are_not_known(stream: DataStream) -> None:
    clock = Clock(stream)
    async with over_loopback(stream) as rig, rig.client() as peer:
        await peer.ask(at_time(SEVEN), OK + packed([], 0, 0))
        await peer.ask(marks_from(0), OK + packed([], 0, 0))
        clock.commit(5)
        clock.commit(5, 10.0)
        text = await refused(peer, at_time(SEVEN))
        words = "Time unknown: it is not known which entry was committed first at or after "
        assert text.startswith(f"{words}2026-11-29T07:00:00.000Z")
        assert "entry 5, of 2026-11-29T07:00:10" in text
        assert stream.path not in text
        await peer.ask(at_time(ms(10.5)), OK + packed([], 0, 5))
        await peer.ask(marks_from(2), OK + packed([(5, ms(10))], 1000, 10))


async def test_while_streaming_they_are_refused(stream: DataStream) -> None:
    timed(stream)
    for request in (at_time(SEVEN), marks_from(0)):
        async with over_loopback(stream) as rig, rig.client() as peer:
            await peer.ask(model.start(TOTAL), OK)
            await peer.ask(request, model.result(RESULT_ALREADY_STARTED))
            await peer.ended()


async def test_a_server_of_a_file_that_another_process_writes(stream: DataStream) -> None:
    """A reader's answers come from the file beside the stream, also where it was made later."""
    clock = Clock(stream)
    with DataStream.open(stream.path, follow=True) as follower:
        async with over_loopback(follower) as rig, rig.client() as peer:
            await peer.ask(at_time(SEVEN), OK + packed([], 0, 0))
            clock.commit(5, 0.0)
            clock.commit(5, 100.0)
            await peer.ask(at_time(ms(50.0)), OK + packed([], 0, 5))
            stream.truncate(3)
            clock.commit(4, 200.0)
            await peer.ask(at_time(ms(150.0)), OK + packed([], 0, 3))
            await peer.ask(marks_from(0), OK + packed([(0, ms(0)), (3, ms(200))], 1000, 7))


@pytest.mark.parametrize("over", ["loopback", "tls"])
async def test_many_ask_at_once(stream: DataStream, secured: Open, over: str) -> None:
    timed(stream)
    opened = over_loopback if over == "loopback" else secured
    async with opened(stream) as rig, trio.open_nursery() as nursery:

        async def ask() -> None:
            async with rig.client() as peer:
                for seconds, number in PLACES * 3:
                    await peer.ask(at_time(ms(seconds)), OK + packed([], 0, number))

        for _ in range(8):
            nursery.start_soon(ask)
