"""A commit after a pause wakes the thread that serves live clients at its beginning."""

from __future__ import annotations

import contextlib
import os
import random
import threading
import time

import pytest
import trio

from datastreamer.storage.stream import DataStream
from tests.network.fixtures import append, until
from tests.server.streaming.live_thread import (
    early_waker,
    in_thread,
    is_armed,
    modelled,
    readable,
    streaming,
)


def test_a_commit_says_that_it_begins(writer: DataStream, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before it writes, with the number of its CPU, after a pause, and if it will be visible."""
    with early_waker(writer) as early:
        file, found = writer._writer.owned.file, list[int]()  # type: ignore[union-attr]
        commit = file.commit

        def noted(*given: object) -> None:
            found.append(os.eventfd_read(early))
            commit(*given)  # type: ignore[arg-type]

        monkeypatch.setattr(file, "commit", noted)
        for begin in (append, lambda stream, entry: stream.append(*entry)):
            time.sleep(0.001)
            begin(writer, (1, b"after a pause"))
        assert len(found) == 2
        assert {value - 1 for value in found} <= os.sched_getaffinity(0)
        monkeypatch.undo()
        # Not a long one, nor one soon after another (on a busy machine two may be far apart).
        time.sleep(0.001)
        append(writer, (1, bytes(100_000)))
        assert not readable(early)
        for _ in range(1000):
            writer.append(1, b"one")
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(early)
            writer.append(1, b"another")
            if not readable(early):
                break
        else:
            pytest.fail("each commit says that it begins")
        writer.sync_policy = "commit"
        append(writer, (1, b"the first after the change"))
        for _ in range(3):
            time.sleep(0.001)
            append(writer, (1, b"visible when it is on the disk"))
        assert not readable(early)
    time.sleep(0.001)
    append(writer, (1, b"the descriptor is closed"))


@pytest.mark.usefixtures("only_the_thread")
@pytest.mark.parametrize("clients", [1, 33])
async def test_a_commit_that_is_announced_and_does_not_come(
    writer: DataStream, follower: DataStream, waker: int, clients: int
) -> None:
    """Nothing is sent, and the next commits come; the thread listens with a few clients only."""
    async with streaming(writer, follower, waker, clients) as (rig, peers):
        early = rig.server.broadcast._live._early
        os.eventfd_write(early, 1)
        await trio.sleep(0.05)
        # (On a busy machine it may rest with one, too.)
        assert readable(early) or clients == 1
        for turn in range(20):
            begin = writer.total_entries
            for cpu in range(1, turn):
                os.eventfd_write(early, cpu)
            append(writer, (1, b"%d" % turn))
            for peer in peers:
                await peer.expect(modelled(writer).packed(begin))
        assert is_armed(rig)
        for peer in peers:
            await peer.nothing_more()


@pytest.mark.usefixtures("only_the_thread")
async def test_it_waits_for_a_moment_only(
    writer: DataStream, follower: DataStream, waker: int
) -> None:
    """And after some commits that ended late, or did not come, it rests."""
    async with streaming(writer, follower, waker, 1) as (rig, [peer]):
        early = rig.server.broadcast._live._early
        begin, began = writer.total_entries, time.process_time()
        os.eventfd_write(early, 1)
        await trio.sleep(0.5)
        assert time.process_time() - began < 0.25
        for _ in range(9):
            # Of a processor that is not the thread's, so that it does not yield.
            os.eventfd_write(early, 1 << 20)
            with trio.move_on_after(0.05):
                await until(lambda: not readable(early))
            if readable(early):
                break
        else:
            pytest.fail("it does not rest")
        append(writer, (1, b"is sent"))
        await peer.expect(modelled(writer).packed(begin))


@pytest.mark.usefixtures("only_the_thread")
async def test_it_rests_where_others_need_its_processor(
    writer: DataStream, follower: DataStream, waker: int
) -> None:
    usual = os.sched_getaffinity(0)
    cpu = min(usual)
    os.sched_setaffinity(0, {cpu})
    try:
        async with streaming(writer, follower, waker, 1) as (rig, _):
            early = rig.server.broadcast._live._early
            # Fewer than the late commits in a row after which it rests on any processor.
            for _ in range(7):
                os.eventfd_write(early, cpu + 1)
                busy_until = time.monotonic() + 0.02
                while time.monotonic() < busy_until:
                    pass
                append(writer, (1, b"the end"))
                await trio.sleep(0.02)
                if readable(early):
                    break
            else:
                pytest.fail("it does not rest")
    finally:
        os.sched_setaffinity(0, usual)


@pytest.mark.usefixtures("only_the_thread")
async def test_announced_at_every_moment(
    writer: DataStream, follower: DataStream, waker: int
) -> None:
    def announce(stop: threading.Event) -> None:
        while not stop.is_set():
            with contextlib.suppress(BlockingIOError):
                os.eventfd_write(early, 1 + random.randrange(4))

    async with streaming(writer, follower, waker, 2) as (rig, peers):
        early = rig.server.broadcast._live._early
        with in_thread(announce):
            for turn in range(300):
                begin = writer.total_entries
                append(writer, (1, b"%d" % turn))
                for peer in peers:
                    await peer.expect(modelled(writer).packed(begin))
