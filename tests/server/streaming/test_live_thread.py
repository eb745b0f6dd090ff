"""The thread that serves live clients: what it sends, when it stops, and whose sockets it uses."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import platform
import random
import select
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from datastreamer.format import COMMAND_COMMIT_START, PAGE_SIZE
from datastreamer.server._inotify import reports_of_writes
from datastreamer.server.admission.gate import EVICTED
from datastreamer.server.streaming import broadcast as broadcast_module
from datastreamer.server.streaming import live_clients as live_module
from datastreamer.server.streaming._live_thread import LiveThread
from datastreamer.server.streaming.catch_up import State
from datastreamer.storage.header.records import MARK, MARK_OFFSET, VISIBLE_LAYOUT
from datastreamer.storage.parts import ChangeBegins, ChangeEnds
from datastreamer.storage.stream import DataStream
from tests.network import model as wire
from tests.network.fixtures import append, over_loopback, until
from tests.network.model import OK
from tests.server.streaming.live_thread import (
    PATIENCE,
    armed,
    in_thread,
    is_armed,
    modelled,
    streaming,
)

SMALL_BUFFER = 4096
TOTALS_OFFSET = VISIBLE_LAYOUT[0]


# What it sends.


@pytest.mark.usefixtures("only_the_thread")
async def test_operations_of_all_sizes(
    writer: DataStream, follower: DataStream, waker: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Entries of nothing and of whole pages, padding, many pages at once; every byte is counted."""
    choose = random.Random(4)
    async with streaming(writer, follower, waker, 3) as (rig, peers):
        monkeypatch.setattr(broadcast_module, "fan_out", None)  # the pass of the event loop
        counts = rig.server.counts
        rig.server.broadcast.locate()
        bytes_before, entries_before, first = (
            counts.bytes_sent,
            counts.entries_sent,
            writer.total_entries,
        )
        for _ in range(40):
            sizes = choose.choices([0, 1, 100, 60_000, 400_000, PAGE_SIZE - 17], [9, 9, 9, 5, 2, 1])
            begin = writer.total_entries
            append(writer, *[(1, choose.randbytes(size)) for size in sizes * choose.randrange(4)])
            news = modelled(writer).packed(begin)
            async with trio.open_nursery() as nursery:
                for peer in peers:
                    nursery.start_soon(peer.expect, news)
        await until(lambda: {s.state for s in rig.server.sessions} == {State.LIVE})
        for peer in peers:
            await peer.nothing_more()
        rig.server.broadcast.locate()
        whole = modelled(writer).packed(first)
        refusals = 3 * len(wire.result(9))
        assert counts.bytes_sent - bytes_before == 3 * len(whole) + refusals
        assert counts.entries_sent - entries_before == 3 * (writer.total_entries - first)
        total = writer.total_entries
        assert {s.sender.cursor.number for s in rig.server.sessions} == {total}


@pytest.mark.usefixtures("only_the_thread")
async def test_nothing_before_it_is_visible(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under the policy "commit" the header is ahead of what readers may have."""
    with DataStream.create(path, sync="commit", index="memory") as writer:
        append(writer, (1, b"first"))
        waker = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        writer.parts.writer.add_waker(waker)
        on_disk = threading.Event()
        with DataStream.open(path, follow=True, index="memory") as follower:
            async with streaming(writer, follower, waker, 1) as (_, [peer]):
                durability = writer._writer.durability  # type: ignore[union-attr]
                sync = durability.timed_sync

                def slow_sync() -> None:
                    assert on_disk.wait(PATIENCE)
                    sync()

                monkeypatch.setattr(durability, "timed_sync", slow_sync)
                begin = writer.parts.writer.next_entry
                writer.start_atomic_op()
                writer.add_entry(1, b"not on disk yet")
                pending = writer.commit_atomic_op(wait=False)
                os.eventfd_write(waker, 1)
                await peer.nothing_more()
                assert writer.total_entries == begin
                on_disk.set()
                assert pending is not None
                await trio.to_thread.run_sync(pending.wait)
                await peer.expect(wire.pack(begin, 1, b"not on disk yet"))
        writer.parts.writer.remove_waker(waker)
        os.close(waker)


@pytest.mark.usefixtures("only_the_thread")
async def test_clients_of_the_event_loop_beside_it(
    writer: DataStream, follower: DataStream, waker: int
) -> None:
    """Who is served by a sender of its own waits for the thread's report of each pass."""
    async with streaming(writer, follower, waker, 2) as (rig, peers), rig.client() as commits:
        await commits.ask(struct.pack(">QQQ", COMMAND_COMMIT_START, 1, writer.total_entries), OK)
        await until(lambda: len(rig.server.broadcast.feed) == 1)
        for turn in range(50):
            begin = writer.total_entries
            append(writer, (1, b"%d" % turn))
            for peer in peers:
                await peer.expect(modelled(writer).packed(begin))
            await commits.packet()  # the end of the commit
            await commits.expect(modelled(writer).packed(begin))
        assert is_armed(rig)


async def test_joining_while_it_sends(writer: DataStream, follower: DataStream, waker: int) -> None:
    """Commits fall before, into and after the Start, many times: no loss, no repeat."""
    choose = random.Random(5)

    def write(stop: threading.Event) -> None:
        number = 0
        while not stop.wait(0.001):
            number += 1
            append(writer, (1, b"%d" % number), *[(2, b"x" * 700)] * (number % 3))

    async with streaming(writer, follower, waker, 1) as (rig, [stays]):
        begin = writer.total_entries
        received: list[bytes] = []

        async def read_all() -> None:
            while True:
                received.append(await stays.packet())

        async with trio.open_nursery() as nursery:
            nursery.start_soon(read_all)
            with in_thread(write):
                for _ in range(40):
                    async with rig.client() as peer:
                        first = writer.total_entries - choose.choice([0, 0, 1])
                        await peer.ask(wire.start(first), OK)
                        goal = writer.total_entries + choose.randrange(1, 9)
                        got = [await peer.packet() for _ in range(first, goal)]
                        await peer.send(wire.stop() + wire.header())
                        while (packet := await peer.packet())[0] == 2:
                            got.append(packet)
                        assert packet == OK
                        assert b"".join(got) == modelled(writer).packed(first, first + len(got))
                        assert (await peer.packet(), (await peer.packet())[0]) == (OK, 1)
            await until(lambda: len(received) == writer.total_entries - begin)
            nursery.cancel_scope.cancel()
        assert b"".join(received) == modelled(writer).packed(begin)


@pytest.mark.usefixtures("only_the_thread")
async def test_a_client_that_reads_nothing_delays_no_other_and_loses_nothing(
    writer: DataStream, follower: DataStream, waker: int
) -> None:
    async with streaming(writer, follower, waker, 8, receive_buffer=SMALL_BUFFER) as (rig, peers):
        lazy, *eager = peers
        begin = at = writer.total_entries
        for turn in range(30):
            append(writer, *[(turn, b"%d" % turn * size) for size in (1, 50_000, 0, 150_000)])
            if turn % 10 == 9:
                news, at = modelled(writer).packed(at), writer.total_entries
                async with trio.open_nursery() as nursery:
                    for peer in eager:
                        nursery.start_soon(peer.expect, news)
        await until(lambda: [s.state for s in rig.server.sessions].count(State.LIVE) == 7)
        [behind] = [s for s in rig.server.sessions if s.state is not State.LIVE]
        assert behind.sender.cursor.number < begin + 80
        assert behind.blocked
        await lazy.expect(modelled(writer).packed(begin))
        await until(lambda: {s.state for s in rig.server.sessions} == {State.LIVE})
        append(writer, (1, b"all together"))
        for peer in peers:
            await peer.expect(modelled(writer).packed(at))
            await peer.nothing_more()


@pytest.mark.usefixtures("only_the_thread")
async def test_drain_and_finish_know_what_it_has_sent(
    writer: DataStream, follower: DataStream, waker: int
) -> None:
    async with streaming(writer, follower, waker, 5) as (rig, peers):
        for turn in range(20):
            append(writer, (1, b"%d" % turn))
            assert await rig.server.drain(PATIENCE)
        begin = writer.total_entries - 20
        append(writer, (1, b"last"))
        assert await rig.server.finish(PATIENCE)
        for peer in peers:
            assert await peer.rest() == modelled(writer).packed(begin)


# When it stops.


@pytest.mark.usefixtures("only_the_thread")
async def test_nothing_is_sent_between_the_begin_and_the_end_of_a_change(
    writer: DataStream, follower: DataStream, waker: int
) -> None:
    """The writer waits for the begin: from then on it may overwrite any of these bytes."""

    def write(stop: threading.Event) -> None:
        while not stop.wait(0.0005):
            append(writer, (1, bytes(200)))

    async with streaming(writer, follower, waker, 10) as (rig, peers):
        counts, begin = rig.server.counts, writer.total_entries
        async with trio.open_nursery() as nursery:
            received = [0] * len(peers)

            async def read(at: int) -> None:
                number = begin
                while True:
                    assert await peers[at].packet() == wire.pack(number, 1, bytes(200))
                    number += 1
                    received[at] += 1

            for at in range(len(peers)):
                nursery.start_soon(read, at)
            with in_thread(write):
                for _ in range(30):
                    before = sum(received)
                    await until(lambda before=before: sum(received) > before and is_armed(rig))
                    rig.server.change(ChangeBegins(0, 1))
                    assert not is_armed(rig)
                    live = list(rig.server.broadcast._live)
                    at = {s: (s.cursor, s.at) for s in live}
                    sent = counts.bytes_sent
                    head = writer.total_entries
                    await until(lambda head=head: writer.total_entries > head + 10)
                    rig.server.broadcast.locate()
                    assert counts.bytes_sent == sent
                    assert {s: (s.cursor, s.at) for s in live} == at
                    rig.server.change(ChangeEnds(0, 1))
            total = writer.total_entries - begin
            await until(lambda: received == [total] * len(peers))
            nursery.cancel_scope.cancel()


async def test_a_stream_that_another_process_truncates_all_the_time(
    writer: DataStream, follower: DataStream, waker: int
) -> None:
    """Without a word before the change: no client is sent bytes that were never committed, or
    misses that what it has was truncated."""
    committed: set[bytes] = set()
    choose = random.Random(2)

    def write(stop: threading.Event) -> None:
        turn = 0
        while not stop.is_set():
            turn += 1
            begin = writer.total_entries
            news = [(turn % 100, b"%d" % turn * choose.randrange(400)) for _ in range(5)]
            committed.update(wire.pack(begin + at, *each) for at, each in enumerate(news))
            append(writer, *news)
            if turn % 20 == 0:
                writer.truncate(writer.total_entries - choose.randrange(1, 60))

    async with over_loopback(follower, waker=waker) as rig:

        async def read() -> None:
            while True:
                async with rig.client() as peer:
                    number = max(0, writer.total_entries - 5)
                    await peer.send(wire.start(number))
                    with contextlib.suppress(trio.BrokenResourceError, AssertionError):
                        if await peer.packet() != OK:
                            continue
                        while True:
                            packet = await peer.packet()
                            got.append((number, packet))
                            number += 1

        got: list[tuple[int, bytes]] = []
        append(writer, *[(7, b"%d" % n) for n in range(100)])
        committed.update(wire.pack(n + 1, 7, b"%d" % n) for n in range(100))
        with in_thread(write):
            async with trio.open_nursery() as nursery:
                for _ in range(6):
                    nursery.start_soon(read)
                await until(lambda: len(got) > 5_000)
                nursery.cancel_scope.cancel()
    assert not [packet for _, packet in got if packet not in committed]
    assert all(struct.unpack_from(">Q", packet, 9) == (number,) for number, packet in got)


async def test_a_mark_that_is_not_whole(writer: DataStream, follower: DataStream) -> None:
    """The thread sends nothing by it, and stops if it stays so."""
    page, head = settled_page(follower), follower.reader.head
    with bare_thread(follower) as (thread, notice, wake), client_of(thread, follower) as peer:
        append(writer, (1, b"not visible yet"))
        with open(writer.path, "r+b", buffering=0) as file:
            file.seek(MARK_OFFSET + MARK.sum_offset)
            whole = file.read(8)
            file.seek(MARK_OFFSET + MARK.sum_offset)
            file.write(bytes(8))
            thread.arm(page, *head)
            wake()
            with trio.fail_after(PATIENCE):
                await trio.lowlevel.wait_readable(notice)
            assert thread.collect()[0]
            peer.setblocking(False)
            with pytest.raises(BlockingIOError):
                peer.recv(1)
            file.seek(MARK_OFFSET + MARK.sum_offset)
            file.write(whole)
        thread.arm(page, *head)
        wake()
        await trio.lowlevel.wait_readable(peer)
        assert peer.recv(1 << 16) == modelled(writer).packed(1)


async def test_another_program_appends_after_the_writer(
    writer: DataStream, follower: DataStream, waker: int
) -> None:
    """It writes the header's totals and no commit record, so the thread cannot see its commits."""
    async with streaming(writer, follower, waker, 2) as (rig, peers):
        total, length = writer.total_entries, writer.header.total_length
        writer.close()
        with open(writer.path, "r+b", buffering=0) as file:
            for number in range(total, total + 5):
                entry = wire.pack(number, 1, b"by another program")
                file.seek(length)
                file.write(entry)
                length += len(entry)
                file.seek(TOTALS_OFFSET)
                file.write(struct.pack(">QQ", length, number + 1))
                for peer in peers:
                    await peer.expect(entry)
        assert not is_armed(rig)


def test_totals_without_a_commit_record(writer: DataStream, follower: DataStream) -> None:
    """The thread stops, as it does at everything that it cannot judge."""
    page, head = settled_page(follower), follower.reader.head
    with bare_thread(follower) as (thread, notice, wake), client_of(thread, follower):
        with open(writer.path, "r+b", buffering=0) as file:
            file.seek(TOTALS_OFFSET)
            file.write(struct.pack(">QQ", head.length + 20, head.entries + 1))
        thread.arm(page, *head)
        wake()
        assert select.select([notice], [], [], PATIENCE)[0]
        assert thread.collect()[0]


@pytest.mark.parametrize("damage", ["number", "length", "kind"])
@pytest.mark.usefixtures("only_the_thread")
async def test_damage_ends_only_who_comes_to_it(
    writer: DataStream, follower: DataStream, waker: int, damage: str
) -> None:
    """The event loop's pass judges it."""
    async with streaming(writer, follower, waker, 2) as (rig, peers):
        at, total = writer.header.total_length, writer.total_entries
        rig.server.broadcast.disarm()
        rig.server.broadcast.hold(None)  # nobody looks until the bytes are wrong
        append(writer, (1, b"damaged"), (1, b"more"))
        with open(writer.path, "r+b", buffering=0) as file:
            file.seek(at + {"kind": 0, "length": 4, "number": 16}[damage])
            file.write(b"\x07")
        rig.server.broadcast.release()
        for peer in peers:
            with contextlib.suppress(trio.BrokenResourceError):
                assert await peer.rest() == b""
        async with rig.client() as another:
            await another.ask(wire.start(0), OK + modelled_before(writer, total))
    assert rig.server.counts.ended["failed"] >= 2


def modelled_before(stream: DataStream, total: int) -> bytes:
    return b"".join(
        wire.pack(number, stream.entry(number).type, stream.entry(number).data)
        for number in range(total)
    )


# Whose sockets it uses.


def settled_page(follower: DataStream) -> bytes:
    follower.refresh()
    page = follower.parts.feed.settled_page()
    assert page is not None
    return page


@contextlib.contextmanager
def bare_thread(
    follower: DataStream, flags: int = os.EFD_NONBLOCK, *, reports: int = -1, polls: bool = False
) -> Iterator[tuple[LiveThread, int, Callable[[], None]]]:
    """The thread alone, its `notice`, and what wakes it."""
    wakeup, notice = (os.eventfd(0, flags | os.EFD_CLOEXEC) for _ in range(2))
    thread = LiveThread(follower.fileno(), wakeup, notice, -1, reports, polls=polls)
    try:
        yield thread, notice, lambda: os.eventfd_write(wakeup, 1)
    finally:
        thread.close()
        os.close(wakeup)
        os.close(notice)


@contextlib.contextmanager
def client_of(thread: LiveThread, follower: DataStream) -> Iterator[socket.socket]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        slot = thread.add(theirs.fileno(), *follower.reader.head)
        yield ours
        thread.remove(slot)


def test_a_removed_descriptor_is_not_used_any_more(
    writer: DataStream, follower: DataStream
) -> None:
    """Its number is reused at once, for something that must not receive a byte."""
    with bare_thread(follower) as (thread, _, wake):
        others = [socket.socketpair() for _ in range(20)]
        for ours, theirs in others:
            ours.setblocking(False)
            thread.add(theirs.fileno(), *follower.reader.head)
        for _ in range(300):
            ours, theirs = socket.socketpair()
            slot = thread.add(theirs.fileno(), *follower.reader.head)
            thread.arm(settled_page(follower), *follower.reader.head)
            append(writer, (1, b"seen"))
            wake()
            assert ours.recv(1) == b"\2"
            append(writer, (1, b"while it is removed"))
            wake()
            thread.remove(slot)
            fd = theirs.detach()
            reading, writing = os.pipe()
            os.set_blocking(reading, False)
            os.dup2(writing, fd)
            append(writer, (1, b"to the others"))
            wake()
            for other, _ in others:
                with contextlib.suppress(BlockingIOError):
                    other.recv(1 << 16)
            with pytest.raises(BlockingIOError):
                os.read(reading, 1)
            for each in (fd, reading, writing):
                os.close(each)
            ours.close()
        for pair in others:
            for each in pair:
                each.close()


@pytest.mark.parametrize("reported", [False, True])
def test_commits_that_do_not_wake_it(
    writer: DataStream, follower: DataStream, reported: bool
) -> None:
    """The system reports them, or it looks for them; it does not wait in a read of `wakeup`, which
    may block."""
    page, head = settled_page(follower), follower.reader.head
    with contextlib.ExitStack() as stack:
        reports = reports_of_writes(follower.fileno()) if reported else -1
        if reported:
            stack.callback(os.close, reports)
        its = bare_thread(follower, 0, reports=reports, polls=not reported)
        thread, _, _wake = stack.enter_context(its)
        peer = stack.enter_context(client_of(thread, follower))
        peer.settimeout(PATIENCE)
        thread.arm(page, *head)
        for turn in range(3):
            begin = writer.total_entries
            append(writer, (1, b"%d" % turn))
            assert peer.recv(1 << 16) == modelled(writer).packed(begin)


def test_no_descriptor_left_for_it(follower: DataStream) -> None:
    """No other descriptor is closed."""
    before = os.fstat(0)
    with pytest.raises(OSError, match="Bad file descriptor"):
        LiveThread(-1, -1, -1)
    assert os.path.sameopenfile(0, 0)
    assert os.fstat(0) == before


def flood(writer: DataStream, stop: threading.Event) -> None:
    while not stop.wait(0.0002):
        append(writer, *[(1, bytes(100))] * 10)


def test_a_client_that_joins_during_a_pass_is_served(
    writer: DataStream, follower: DataStream
) -> None:
    """The pass may have gone past its slot: the thread looks again at once."""
    wakeup, notice = (os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC) for _ in range(2))
    thread = LiveThread(follower.fileno(), wakeup, notice)
    try:
        thread.arm(settled_page(follower), *follower.reader.head)
        with client_of(thread, follower):
            assert os.eventfd_read(wakeup) == 1
    finally:
        thread.close()
        os.close(wakeup)
        os.close(notice)


@pytest.mark.parametrize("blocking", [False, True])
def test_a_pipe_wakes_it(writer: DataStream, follower: DataStream, blocking: bool) -> None:
    """It is read while the thread is armed, so that it does not become full, and is left to the
    event loop then."""
    wakeup, written = os.pipe()
    os.set_blocking(wakeup, blocking)
    notice = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
    thread = LiveThread(follower.fileno(), wakeup, notice)
    try:
        os.write(written, bytes(8))
        thread.arm(settled_page(follower), *follower.reader.head)
        with client_of(thread, follower) as client:
            append(writer, (1, b"an entry"))
            assert client.recv(100) == wire.pack(1, 1, b"an entry")
            deadline = time.monotonic() + PATIENCE
            while select.select([wakeup], [], [], 0)[0]:
                assert time.monotonic() < deadline
                time.sleep(0.001)
            for _ in range(20):
                thread.disarm()
                os.write(written, bytes(8))
                time.sleep(0.002)
                assert os.read(wakeup, 100) == bytes(8)
                thread.arm(settled_page(follower), *writer.reader.head)
                time.sleep(0.002)  # it waits again
    finally:
        thread.disarm()
        os.write(written, bytes(8))  # what wakes it at its end
        thread.close()
        for fd in (wakeup, written, notice):
            os.close(fd)


async def test_sessions_that_end_while_it_sends(
    writer: DataStream, follower: DataStream, waker: int
) -> None:
    """They are reset by either side; new ones have the numbers of their descriptors."""
    choose = random.Random(3)
    linger = trio.socket.SOL_SOCKET, trio.socket.SO_LINGER, b"\1\0\0\0\0\0\0\0"
    async with streaming(writer, follower, waker, 1) as (rig, [stays]):
        begin = writer.total_entries
        with in_thread(lambda stop: flood(writer, stop)):
            for _ in range(15):
                async with AsyncExitStack() as stack:
                    peers = [await stack.enter_async_context(rig.client()) for _ in range(10)]
                    for peer in peers:
                        await peer.ask(wire.start(begin), OK)
                        await peer.expect(wire.pack(begin, 1, bytes(100)))
                    # (The first session is that of the client that stays.)
                    for session in choose.sample(
                        sorted(rig.server.sessions, key=lambda s: s.id)[1:], 3
                    ):
                        session.end(EVICTED, "by the test")
                    for peer in choose.sample(peers, 5):
                        peer.stream.setsockopt(*linger)  # type: ignore[attr-defined]
        await stays.expect(modelled(writer).packed(begin))
        await stays.nothing_more()


FORK = """
import os, sys, threading
import trio
from datastreamer.server.server import Server
from datastreamer.storage.stream import DataStream
from datastreamer.transport.listeners import open_listeners

path, how = sys.argv[1:]
writer = DataStream.create(path, sync="os", index="memory")
follower = DataStream.open(path, follow=True, index="memory")
waker = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
writer.parts.writer.add_waker(waker)
armed, done = threading.Event(), trio.Event()

def append():
    with writer.atomic_op() as op:
        op.add_entry(1, b"x" * 100)

async def serve():
    global token
    token = trio.lowlevel.current_trio_token()
    server = Server(follower, waker=waker)
    async with trio.open_nursery() as nursery:
        [address] = await nursery.start(server.run, open_listeners("127.0.0.1", 0))
        client = await trio.open_tcp_stream(*address)
        await client.send_all(bytes([0] * 7 + [1] + [0] * 7 + [1] + [0] * 8))
        while not server.broadcast._live.armed:
            append()
            await trio.sleep(0.001)
        armed.set()
        await done.wait()
        await client.aclose()
        nursery.cancel_scope.cancel()

served = threading.Thread(target=trio.run, args=(serve,), daemon=True)
served.start()
armed.wait()
for _ in range(5):
    append()
    pid = os.fork()
    if not pid:
        # AddressSanitizer's allocator may stay locked in the child of a process with threads.
        if how == "exit" or "ASAN_OPTIONS" in os.environ:
            os._exit(0)
        sys.exit(0)
    assert os.waitpid(pid, 0)[1] == 0
append()
if how != "leave":
    token.run_sync_soon(done.set)
    served.join()
print("ended")
"""


@pytest.mark.parametrize("how", ["exit", "collect", "leave"])
def test_a_process_that_forks_or_ends_while_it_sends(path: Path, how: str) -> None:
    """In the child there is no thread to wait for; at the end nobody waits for it."""
    ended = subprocess.run(
        [sys.executable, "-c", FORK, str(path), how],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        check=False,
    )
    assert (ended.returncode, ended.stdout) == (0, "ended\n"), ended.stderr


# Without it.


async def test_no_descriptor_left_for_some_time(
    writer: DataStream, follower: DataStream, waker: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The event loop serves the clients until there is one."""

    def refuse(*_: object) -> int:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    eventfd = os.eventfd
    async with over_loopback(follower, waker=waker) as rig, rig.client() as peer:
        monkeypatch.setattr(os, "eventfd", refuse)
        await peer.ask(wire.start(0), OK + modelled(writer).packed())
        for turn in range(5):
            begin = writer.total_entries
            append(writer, (1, b"%d" % turn))
            await peer.expect(modelled(writer).packed(begin))
            assert not is_armed(rig)
        monkeypatch.setattr(os, "eventfd", eventfd)
        begin = writer.total_entries
        await armed(rig, writer)
        await peer.expect(modelled(writer).packed(begin))


@pytest.mark.parametrize("without", ["eventfd", "threads"])
async def test_without_a_thread(
    writer: DataStream,
    follower: DataStream,
    waker: int,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    without: str,
) -> None:
    def refuse(*_: object, **_options: object) -> None:
        raise BlockingIOError(11, "no thread left")

    if without == "eventfd":
        monkeypatch.delattr(os, "eventfd")
    else:
        monkeypatch.setattr(live_module, "LiveThread", refuse)
    async with over_loopback(follower, waker=waker) as rig, rig.client() as peer:
        await peer.ask(wire.start(0), OK + modelled(writer).packed())
        await wait_all_tasks_blocked(0.002)
        for turn in range(10):
            begin = writer.total_entries
            append(writer, (1, b"%d" % turn))
            await peer.expect(modelled(writer).packed(begin))
        assert not is_armed(rig)
    assert caplog.text.count("clients are served without one") == (without == "threads")


def slice_of(task: int) -> int:
    """What Linux knows as the thread's slice, in ns."""
    attributes = ctypes.create_string_buffer(48)
    number = {"x86_64": 315, "aarch64": 275}[platform.machine()]
    if ctypes.CDLL(None, use_errno=True).syscall(number, task, attributes, 48, 0):
        raise OSError(ctypes.get_errno(), "sched_getattr")
    return int(struct.unpack("IIQiIQQQ", attributes.raw)[5])


def knows_slices() -> bool:
    release = tuple(map(int, platform.release().split(".")[:2]))
    linux = sys.platform == "linux" and platform.machine() in {"x86_64", "aarch64"}
    return linux and release >= (6, 12)


@pytest.mark.skipif(
    not knows_slices(), reason="needs Linux 6.12, where a thread can ask for a slice"
)
def test_it_asks_to_run_soon_with_some_clients(writer: DataStream, waker: int) -> None:
    tasks = Path("/proc/self/task")
    before = set(tasks.iterdir())
    notice = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
    file = writer._ensure_writable().owned
    thread = LiveThread(file.file.fileno(), waker, notice)
    pairs = [socket.socketpair() for _ in range(129)]
    try:
        (task,) = (int(task.name) for task in set(tasks.iterdir()) - before)
        usual, head = slice_of(task), file.written

        def settles(wanted: int) -> None:
            deadline = time.monotonic() + PATIENCE
            while slice_of(task) != wanted:
                assert time.monotonic() < deadline, slice_of(task)

        thread.arm(bytes(file.page), head.length, head.entries)
        slots = []
        for count, (ours, _) in enumerate(pairs, 1):
            slots.append(thread.add(ours.fileno(), head.length, head.entries))
            if count in {1, 2, 128, 129}:
                settles(500_000 if 2 <= count <= 128 else usual)
        for slot in slots[:-1]:
            thread.remove(slot)
            if slot in {0, 127}:
                thread.wake()
                settles(500_000 if slot == 0 else usual)
    finally:
        thread.close()
        os.close(notice)
        for pair in pairs:
            for end in pair:
                end.close()
    assert usual != 500_000
