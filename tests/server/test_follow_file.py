"""A server of a file that another process writes: woken by it or by the system, at any moment."""

from __future__ import annotations

import contextlib
import errno
import logging
import mmap
import os
import random
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from datastreamer.server import timeouts as guard_module
from datastreamer.server import wakes as wakes_module
from datastreamer.server.streaming import broadcast as live_module
from datastreamer.storage.disk.access import Access
from datastreamer.storage.disk.file_ops import Buffer, OsDisk, OsFile
from datastreamer.storage.header.records import get_record, put_record
from datastreamer.storage.stream import DataStream
from tests.conftest import Golden
from tests.network import model as wire
from tests.network.fixtures import append, over_loopback, seeds, until
from tests.network.model import BOOKMARK, NOT_FOUND, OK, Model
from tests.oracle import lay_out

MIB = 1 << 20
SMALL_BUFFER = 4096


def modelled(path: Path) -> Model:
    return Model(path.read_bytes())


@pytest.fixture
def writer(path: Path) -> Iterator[DataStream]:
    with DataStream.create(path, sync="os", index="memory") as made:
        append(made, (BOOKMARK, b"one"), (1, b"first"))
        yield made


@pytest.fixture
def follower(writer: DataStream, path: Path) -> Iterator[DataStream]:
    with DataStream.open(path, follow=True, index="memory") as opened:
        yield opened


@pytest.mark.parametrize("sync", ["os", "commit"])
async def test_commits_of_another_process(path: Path, sync: str) -> None:
    program = """
import sys
from datastreamer.storage.stream import DataStream
with DataStream.create(sys.argv[1], sync=sys.argv[2], index="memory") as stream:
    print("ready", flush=True)
    for line in sys.stdin:
        with stream.atomic_op() as op:
            for _ in range(int(line)):
                op.add_entry(1, b"%d" % op.next_number * 100)
        print(stream.total_entries, flush=True)
"""
    process = subprocess.Popen(
        [sys.executable, "-c", program, str(path), sync],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == "ready\n"
        with DataStream.open(path, follow=True, index="memory") as stream:
            async with over_loopback(stream) as rig, rig.client() as peer, rig.client() as asker:
                await peer.ask(wire.start(0), OK)
                total = 0
                for count in (1, 0, 3, 5_000, 1, 2):
                    process.stdin.write(f"{count}\n")
                    process.stdin.flush()
                    total += count
                    assert int(process.stdout.readline()) == total
                    # A question sees at once what was committed before it.
                    request = wire.header() + wire.entry(max(0, total - 1))
                    answer = wire.Conversation(modelled(path)).feed(request)
                    await asker.ask(request, answer)
                    await peer.expect(modelled(path).packed(total - count))
                await peer.nothing_more()
    finally:
        process.communicate(timeout=20)


async def test_the_waker_alone_is_enough(
    writer: DataStream, follower: DataStream, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live_module, "_LOOK_SECONDS", 1_000)
    waker = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
    writer.parts.writer.add_waker(waker)
    try:
        async with over_loopback(follower, waker=waker) as rig, rig.client() as peer:
            await peer.ask(wire.start(0), OK + modelled(path).packed())
            for turn in range(30):
                await wait_all_tasks_blocked()
                append(writer, (1, b"%d" % turn))
                await peer.expect(modelled(path).packed(2 + turn))
    finally:
        writer.parts.writer.remove_waker(waker)
        os.close(waker)


@pytest.mark.parametrize("without", ["", "a watch", "a local disk"])
async def test_nothing_but_the_file_is_enough(
    writer: DataStream,
    follower: DataStream,
    path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    without: str,
) -> None:
    """The system reports writes; where it does not, the file is read often while a client waits, by
    the event loop and by the thread, and one line says why."""

    def refuse(_: int) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(live_module, "_LOOK_SECONDS", 1_000)
    if without == "a watch":
        monkeypatch.setattr(wakes_module, "reports_of_writes", refuse)
    elif without:
        monkeypatch.setattr(wakes_module, "on_network", lambda _: "nfs4")
    async with over_loopback(follower) as rig, rig.client() as peer:
        await peer.ask(wire.start(0), OK + modelled(path).packed())
        for turn in range(20):
            append(writer, (1, b"%d" % turn))
            await peer.expect(modelled(path).packed(2 + turn))
        await until(lambda: rig.server.broadcast._live.armed)
    warned = [it.getMessage() for it in caplog.records if it.levelno >= logging.WARNING]
    assert len(warned) == bool(without)
    why = {"": "", "a watch": os.strerror(errno.ENOSPC), "a local disk": "(nfs4)"}[without]
    assert all("the system does not report writes" in line and why in line for line in warned)


async def test_the_tick_alone_is_enough(
    writer: DataStream, follower: DataStream, path: Path
) -> None:
    """For the event loop and, at the end, for the thread."""
    waker = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
    try:
        async with over_loopback(follower, waker=waker) as rig, rig.client() as peer:
            await peer.ask(wire.start(0), OK + modelled(path).packed())
            live = rig.server.broadcast._live
            for turn in range(3):
                append(writer, (1, b"%d" % turn))
                await peer.expect(modelled(path).packed(2 + turn))
                os.eventfd_write(waker, 1)
                await until(lambda: live.armed)
    finally:
        os.close(waker)


async def test_a_header_that_is_written_after_the_entries(
    golden: Golden, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The entries wake the server in vain, and the header wakes it again."""
    monkeypatch.setattr(live_module, "_LOOK_SECONDS", 1_000)
    path = golden.unpack("small")
    foreign = Foreign(path)
    with foreign.file, DataStream.open(path, follow=True, index="memory") as stream:
        async with over_loopback(stream) as rig, rig.client() as live:
            first = len(foreign.model.entries)
            await live.ask(wire.start(first), OK)
            for number in range(first, first + 10):
                entry = wire.pack(number, 1, b"%d" % number)
                foreign.put(entry, foreign.model.total_length)
                await live.nothing_more()
                foreign.append((1, b"%d" % number))
                await live.expect(entry)


async def test_stores_to_mapped_memory_are_found_at_a_tick(golden: Golden) -> None:
    """Nothing reports them."""
    path = golden.unpack("small")
    foreign = Foreign(path)
    with (
        foreign.file,
        mmap.mmap(foreign.file.fileno(), 0) as memory,
        DataStream.open(path, follow=True, index="memory") as stream,
    ):

        def store(data: bytes, offset: int) -> None:
            memory[offset : offset + len(data)] = data

        foreign.put = store
        async with over_loopback(stream) as rig, rig.client() as live:
            first = len(foreign.model.entries)
            await live.ask(wire.start(first), OK)
            for number in range(first, first + 3):
                foreign.append((1, b"%d" % number))
                await live.expect(wire.pack(number, 1, b"%d" % number))


async def test_nothing_of_an_open_operation(
    writer: DataStream, follower: DataStream, path: Path
) -> None:
    async with over_loopback(follower) as rig, rig.client() as live, rig.client() as asker:
        await live.ask(wire.start(0), OK + modelled(path).packed())
        writer.start_atomic_op()
        number = writer.add_bookmark(b"open")
        writer.add_entries(1, [b"\xee" * 500_000] * 20)  # on disk before the commit
        await asker.ask(wire.entry(number) + wire.bookmark(b"open"), NOT_FOUND * 2)
        await asker.ask(wire.header(), OK + modelled(path).header())
        await live.nothing_more()
        writer.commit_atomic_op()
        await live.expect(modelled(path).packed(2))
        await asker.ask(wire.bookmark(b"open"), OK + b"\xfe" + modelled(path).packed(3, 4)[1:])


async def test_truncation_elsewhere_ends_who_streams_and_not_who_asks(
    writer: DataStream, follower: DataStream, path: Path
) -> None:
    append(writer, *[(1, b"%d" % n) for n in range(20)])
    async with over_loopback(follower) as rig, rig.client() as live, rig.client() as asker:
        await live.ask(wire.start(0), OK + modelled(path).packed())
        await asker.ask(wire.entry(15), OK + b"\xfe" + modelled(path).packed(15, 16)[1:])
        writer.truncate(10)
        await asker.ask(wire.entry(15), NOT_FOUND)
        assert await live.was_reset() == b""
        append(writer, *[(2, b"again %d" % n) for n in range(20)])
        await asker.ask(wire.entry(15), OK + b"\xfe" + modelled(path).packed(15, 16)[1:])
        await asker.ask(wire.start(8), OK + modelled(path).packed(8))


async def test_truncation_and_as_many_entries_again_between_two_looks(
    writer: DataStream, follower: DataStream, path: Path
) -> None:
    """Head, offsets and numbers are those of before: only the epoch differs."""
    append(writer, *[(1, b"old%d" % (n % 10)) for n in range(20)])
    async with over_loopback(follower) as rig, rig.client() as live, rig.client() as late:
        await live.ask(wire.start(0), OK + modelled(path).packed())
        writer.truncate(5)
        append(writer, *[(1, b"new%d" % (n % 10)) for n in range(17)])
        append(writer, *[(1, b"more")] * 3)
        assert await live.was_reset() == b""
        await late.ask(wire.entry(15), OK + b"\xfe" + modelled(path).packed(15, 16)[1:])
        await late.ask(wire.start(0), OK + modelled(path).packed())


async def test_update_elsewhere(writer: DataStream, follower: DataStream, path: Path) -> None:
    async with over_loopback(follower) as rig, rig.client() as live, rig.client() as asker:
        await live.ask(wire.start(0), OK + modelled(path).packed())
        writer.update_entry(1, 1, b"FIRST")
        await asker.ask(wire.entry(1), OK + wire.pack(1, 1, b"FIRST", packet=0xFE))
        await asker.ask(wire.start(0), OK + modelled(path).packed())
        append(writer, (1, b"later"))
        for peer in (live, asker):  # neither waits for bytes of the entry
            await peer.expect(modelled(path).packed(2))


async def test_truncation_elsewhere_lets_go_on_who_is_before_it(
    writer: DataStream, follower: DataStream, path: Path
) -> None:
    append(writer, *[(1, bytes([n % 251]) * 20_000) for n in range(518)])
    async with (
        over_loopback(follower, receive_buffer=SMALL_BUFFER) as rig,
        AsyncExitStack() as stack,
    ):
        live, early, stopped = [await stack.enter_async_context(rig.client()) for _ in range(3)]
        await live.ask(wire.start(520), OK)
        await early.ask(wire.start(0), OK)
        await stopped.ask(wire.start(510), OK + modelled(path).packed(510))
        await stopped.ask(wire.stop(), OK)
        await wait_all_tasks_blocked(0.002)
        writer.update_entry(519, 1, bytes(20_000))
        writer.truncate(510)
        append(writer, *[(2, b"new" * 1000)] * 40)
        writer.truncate(515)
        append(writer, *[(2, b"newer" * 1000)] * 40)
        assert await live.was_reset() == b""
        await early.expect(modelled(path).packed())
        await stopped.ask(wire.start(540), OK + modelled(path).packed(540))
        append(writer, (3, b"live"))
        for peer in (early, stopped):
            await peer.expect(modelled(path).packed(555))
            await peer.nothing_more()


@pytest.mark.parametrize("changed", [2, 30])
async def test_a_change_that_a_thread_sees_while_clients_are_notified_of_another(
    writer: DataStream,
    follower: DataStream,
    path: Path,
    monkeypatch: pytest.MonkeyPatch,
    changed: int,
) -> None:
    """The second is about entries that are in the client's hands, and the first about one that
    may be gone since."""
    append(writer, *[(1, b"%03d" % number) for number in range(2, 40)])
    async with over_loopback(follower) as rig, rig.client() as live:
        await live.ask(wire.start(0), OK + modelled(path).packed())
        affected = rig.server._affected

        def meanwhile(start: int, stop: int | None, *, late: bool) -> object:
            monkeypatch.undo()
            writer.truncate(20)
            thread = threading.Thread(target=follower.refresh)
            thread.start()
            thread.join()
            return affected(start, stop, late=late)

        monkeypatch.setattr(rig.server, "_affected", meanwhile)
        writer.update_entry(changed, 1, b"new")
        assert await live.was_reset() == b""
        append(writer, *[(1, b"%03d" % number) for number in range(20, 60)])
        async with rig.client() as peer:
            await peer.ask(wire.start(0), OK + modelled(path).packed())


async def test_an_update_elsewhere_of_what_was_received_in_between(
    writer: DataStream, follower: DataStream, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the kernel was pointed to may have been read and confirmed since the bytes changed,
    and before this server looks."""
    monkeypatch.setattr(live_module, "_LOOK_SECONDS", 1_000)
    monkeypatch.setattr(guard_module, "_LOOK_SECONDS", 1_000)
    append(writer, *[(1, bytes([n % 251]) * 20_000) for n in range(600)])
    waker = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
    try:
        async with (
            over_loopback(follower, waker=waker) as rig,
            rig.client() as late,
            rig.client() as copied,
            rig.client() as received,
        ):
            old = modelled(path)
            await received.ask(wire.start(0), OK + old.packed())
            for session in rig.server.sessions:
                session.sender.note_received()
            await late.ask(wire.start(0), OK + old.packed())
            await copied.ask(wire.start(590), OK + old.packed(590))
            writer.update_entry(10, 1, bytes(20_000))
            os.eventfd_write(waker, 1)
            assert await late.was_reset() == b""
            append(writer, (1, b"later"))
            os.eventfd_write(waker, 1)
            for peer in (copied, received):
                await peer.expect(modelled(path).packed(602))
    finally:
        os.close(waker)


async def test_changes_elsewhere_without_a_report(
    writer: DataStream, follower: DataStream, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the file records fewer changes than were made, all streaming clients are ended."""
    monkeypatch.setattr(live_module, "_LOOK_SECONDS", 1_000)
    waker = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
    try:
        async with over_loopback(follower, waker=waker) as rig, rig.client() as live:
            await live.ask(wire.start(0), OK + modelled(path).packed())
            for turn in range(17):
                writer.update_entry(1, 1, b"%05d" % turn)
            os.eventfd_write(waker, 1)
            assert await live.was_reset() == b""
            await rig.server.broadcast.turns.settled()
    finally:
        os.close(waker)


class Foreign:
    """A writer that knows nothing of records: entries, then the header's two totals."""

    def __init__(self, path: Path) -> None:
        self.file = path.open("r+b")
        self.model = modelled(path)
        self.put = self._write

    def _write(self, data: bytes, offset: int) -> None:
        os.pwrite(self.file.fileno(), data, offset)

    def append(self, *entries: tuple[int, bytes]) -> None:
        at = self.model.total_length, len(self.model.entries)
        pieces, length = lay_out(list(entries), *at)
        size = self.file.seek(0, os.SEEK_END)
        if length >= size:
            self.file.truncate(4096 + (length // MIB + 2) * MIB)
        for offset, piece in pieces.items():
            self.put(piece, offset)
        self.model.pending = list(entries)
        self.model.commit()
        self.put_totals()

    def truncate(self, number: int) -> None:
        self.model.truncate(number)
        self.put_totals()

    def put_totals(self) -> None:
        totals = struct.pack(">QQ", self.model.total_length, len(self.model.entries))
        self.put(totals, 38)


@pytest.mark.parametrize("name", ["small", "boundary"])
async def test_a_writer_that_keeps_no_records(golden: Golden, name: str) -> None:
    path = golden.unpack(name)
    foreign = Foreign(path)
    with foreign.file, DataStream.open(path, follow=True, index="memory") as stream:
        async with over_loopback(stream) as rig, rig.client() as live, rig.client() as asker:
            first = len(foreign.model.entries)
            await live.ask(wire.start(first), OK)
            for entries in (
                [(1, b"one")],
                [(BOOKMARK, b"key"), (2, b""), (3, b"x" * 700_000)],
                [(4, b"y" * 700_000), (5, b"z" * (MIB - 17)), (6, b"")],
            ):
                foreign.append(*entries)
                await live.expect(foreign.model.packed(first))
                first = len(foreign.model.entries)
            await asker.ask(wire.header(), OK + foreign.model.header())
            talk = wire.Conversation(foreign.model)
            for request in (wire.bookmark(b"key"), wire.entry(first - 1), wire.entry(first)):
                await asker.ask(request, talk.feed(request))
            foreign.truncate(first - 2)
            assert await live.was_reset() == b""
            await asker.ask(wire.header(), OK + foreign.model.header())
            foreign.append((7, b"again"))
            await asker.ask(wire.start(0), OK + foreign.model.packed())


async def test_a_foreign_writer_takes_over_a_file_with_records(
    writer: DataStream, path: Path
) -> None:
    writer.close()
    foreign = Foreign(path)
    with foreign.file, DataStream.open(path, follow=True, index="memory") as stream:
        async with over_loopback(stream) as rig, rig.client() as live:
            await live.ask(wire.start(0), OK + foreign.model.packed())
            foreign.append((1, b"unrecorded"))
            await live.expect(foreign.model.packed(2))
            foreign.append((1, b"and more"))
            await live.expect(foreign.model.packed(3))


async def test_damage_in_the_middle(
    writer: DataStream, follower: DataStream, path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A client that reaches it is ended with one log line; a client past it continues."""
    append(writer, *[(1, bytes([n]) * 1000) for n in range(50)])
    model = modelled(path)
    async with over_loopback(follower) as rig, rig.client() as live, rig.client() as asker:
        await live.ask(wire.start(52), OK)
        place = writer.reader.cursor(30).offset
        with path.open("r+b") as file:
            file.seek(place + 13)
            file.write(b"\xff")
        async with rig.client() as comer:
            await comer.send(wire.start(0))
            assert await comer.was_reset() == OK + model.packed(0, 30)
        assert [r.levelno for r in caplog.records] == [logging.ERROR]
        assert f"at byte {place}" in caplog.text
        append(writer, (1, b"on"))
        model.pending = [(1, b"on")]
        model.commit()
        await live.expect(model.packed(52))
        await asker.ask(wire.header(), OK + model.header())


async def test_damage_that_live_clients_come_to(
    writer: DataStream, follower: DataStream, path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """They are ended, each with one line; the server continues past the place."""
    async with over_loopback(follower) as rig, AsyncExitStack() as stack:
        peers = [await stack.enter_async_context(rig.client()) for _ in range(3)]
        for peer in peers:
            await peer.ask(wire.start(0), OK + modelled(path).packed())
        await wait_all_tasks_blocked()
        # The thread of the live clients looks at the file no more: the event loop does.
        rig.server.broadcast.disarm()
        writer.start_atomic_op()
        for _ in range(5):
            writer.add_entry(1, b"part of it")
        place = writer.header.total_length
        writer.commit_atomic_op()
        with path.open("r+b") as file:  # nobody looks in between: this is the event loop's thread
            file.seek(place + 27)
            file.write(b"\x99")
        for peer in peers:
            assert await peer.was_reset() in (b"", wire.pack(2, 1, b"part of it"))
        errors = [r for r in caplog.records if r.levelno == logging.ERROR]
        assert len(errors) == 3
        async with rig.client() as late:
            await late.ask(wire.start(7), OK)
            append(writer, (1, b"behind"))
            await late.expect(wire.pack(7, 1, b"behind"))
            append(writer, (1, b"live"))
            await late.expect(wire.pack(8, 1, b"live"))


async def test_a_header_page_that_cannot_be_read_for_a_while(
    writer: DataStream,
    follower: DataStream,
    path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(live_module, "_DAMAGE_PAUSE", 0.01)
    fd = os.open(path, os.O_RDWR)
    with contextlib.closing(os.fdopen(fd, "r+b", buffering=0)) as file:
        async with over_loopback(follower) as rig, rig.client() as live, rig.client() as asker:
            await live.ask(wire.start(0), OK + modelled(path).packed())
            good = os.pread(file.fileno(), 4096, 0)
            os.pwrite(file.fileno(), b"\0" * 4096, 0)
            while not caplog.records:
                await wait_all_tasks_blocked()
            # The server cannot know whether the entries that it requests are still the same.
            await asker.send(wire.entry(1))
            assert await asker.was_reset() == b""
            assert [r.name.rpartition(".")[2] for r in caplog.records] == ["broadcast", "session"]
            os.pwrite(file.fileno(), good, 0)
            append(writer, (1, b"on"))
            await live.expect(modelled(path).packed(2))


@seeds(3, 300)
async def test_changes_elsewhere_at_random(
    writer: DataStream, follower: DataStream, path: Path, seed: int
) -> None:
    """Whatever a client was given had been committed so, and numbers follow one another."""
    choose = random.Random(seed)
    sizes = [0, 3, 300, 5_000, 70_000]
    versions: dict[int, set[bytes]] = {}
    generation = 0

    def note(number: int, data: bytes) -> None:
        versions.setdefault(number, set()).add(wire.pack(number, 1, data))

    def write() -> None:
        nonlocal generation
        for _ in range(15):
            generation += 1
            total = writer.total_entries
            recent = [
                n
                for n in range(max(2, total - 40), total)
                if writer.reader.cursor(n).offset > writer.header.total_length - MIB
            ]
            what = choose.random()
            if what < 0.25 and recent:
                writer.truncate(choose.choice(recent))
            elif what < 0.4 and recent:
                number = choose.choice(recent)
                data = bytes([generation % 256]) * len(writer.entry(number).data)
                note(number, data)
                updated.add(number)
                writer.update_entry(number, 1, data)
            elif what < 0.5:
                # Never committed, and after the end for a follower with an old head.
                writer.start_atomic_op()
                for n in range(40):
                    writer.add_entry(1, b"\xee" * sizes[(total + n) % 5])
                op = writer.atomic_op()
                op.spill()
                writer.rollback_atomic_op()
            else:
                count = choose.randrange(1, 10)
                datas = [
                    bytes([generation % 256]) * sizes[n % 5] for n in range(total, total + count)
                ]
                for at, data in enumerate(datas):
                    note(total + at, data)
                append(writer, *[(1, data) for data in datas])

    for number, entry in enumerate(writer.entries()):
        versions[number] = {entry.pack()}
    ended = 0
    updated: set[int] = set()
    kept: list[tuple[int, list[bytes]]] = []
    done = trio.Event()
    async with over_loopback(follower) as rig:

        async def client(first: int) -> None:
            nonlocal ended
            async with rig.client() as peer:
                await peer.send(wire.start(first))
                number = first
                got: list[bytes] = []
                try:
                    if await peer.packet() != OK:
                        return
                    while True:
                        got.append(await peer.packet())
                        assert got[-1] in versions[number]
                        number += 1
                except trio.BrokenResourceError:
                    ended += 1
                except trio.Cancelled:
                    kept.append((first, got))
                    raise

        async def asker() -> None:
            async with rig.client() as peer:
                while not done.is_set():
                    number = max(0, writer.total_entries - choose.randrange(30))
                    await peer.send(wire.entry(number) * 5)
                    for _ in range(5):
                        assert await peer.packet() == OK
                        answer = await peer.packet()
                        known = b"\x02" + answer[1:] in versions.get(number, ())
                        assert known or OK + answer == NOT_FOUND

        async with trio.open_nursery() as nursery:
            for _ in range(12):
                nursery.start_soon(asker)
                for _ in range(3):
                    nursery.start_soon(client, choose.randrange(writer.total_entries))
                await trio.to_thread.run_sync(write)
            done.set()
            # Nothing is truncated from this one; of the others few come so far.
            nursery.start_soon(client, writer.total_entries)
            await wait_all_tasks_blocked(0.002)
            note(writer.total_entries, b"last")
            append(writer, (1, b"last"))
            with trio.fail_after(20):
                while (
                    rig.server.broadcast.turns.epoch != writer.epoch
                    or rig.server.broadcast.turns.changing
                ):
                    await trio.lowlevel.checkpoint()
            await wait_all_tasks_blocked(0.002)
            nursery.cancel_scope.cancel()
    assert ended
    assert kept
    for first, got in kept:
        for number, packet in enumerate(got, first):
            # An update does not concern who has the entry before it.
            assert number in updated or packet == writer.entry(number).pack()


class HaltingFile(OsFile):
    """Stops in the middle of a write of `halting` bytes, until it is to continue."""

    halting = 0
    halfway: Callable[[], None]

    def write(self, data: Buffer, offset: int) -> None:
        if len(data) != HaltingFile.halting:
            super().write(data, offset)
            return
        half = len(data) // 2
        super().write(memoryview(data)[:half], offset)
        HaltingFile.halfway()
        super().write(memoryview(data)[half:], offset + half)


class HaltingDisk(OsDisk):
    def open(self, path: str, *, write: bool, beside: Access | None = None) -> OsFile:
        plain = super().open(path, write=write, beside=beside)
        return HaltingFile(plain.fileno())


async def test_an_entry_that_is_half_written_over(path: Path) -> None:
    """A client that asks meanwhile waits for its end."""
    size = 10_000
    token = trio.lowlevel.current_trio_token()
    at_half, go_on = trio.Event(), threading.Event()

    def halfway() -> None:
        trio.from_thread.run_sync(at_half.set, trio_token=token)
        assert go_on.wait(20)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(HaltingFile, "halting", size)
        patch.setattr(HaltingFile, "halfway", staticmethod(halfway), raising=False)
        with (
            DataStream.create(path, sync="os", index="memory", disk=HaltingDisk()) as writer,
            contextlib.ExitStack() as stack,
        ):
            append(writer, (BOOKMARK, b"key"), (1, b"a" * size), (1, b"behind"))
            follower = stack.enter_context(DataStream.open(path, follow=True, index="memory"))
            new = wire.pack(1, 1, b"b" * size)
            async with (
                over_loopback(follower) as rig,
                rig.client() as live,
                rig.client() as one,
                rig.client() as two,
                rig.client() as three,
            ):
                await live.ask(wire.start(0), OK + modelled(path).packed())
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(
                        trio.to_thread.run_sync, writer.update_entry, 1, 1, b"b" * size
                    )
                    await at_half.wait()
                    await one.send(wire.entry(1))
                    await two.send(wire.bookmark(b"key"))
                    await three.send(wire.start(1))
                    await wait_all_tasks_blocked()
                    go_on.set()
                    for asker in (one, two):
                        await asker.expect(OK + b"\xfe" + new[1:])
                    await three.expect(OK + new + wire.pack(2, 1, b"behind"))
                append(writer, (1, b"on"))
                for peer in (live, three):
                    await peer.expect(wire.pack(3, 1, b"on"))


async def test_a_writer_that_died_in_the_middle_of_a_change(path: Path) -> None:
    """No process will end it: the entries in the file are served."""
    with DataStream.create(path, sync="os", index="memory") as writer:
        append(writer, (1, b"one"), (1, b"two"), (1, b"three"))
    page = bytearray(path.read_bytes()[:4096])
    record = get_record(page)
    assert record is not None
    put_record(page, record._replace(epoch=record.epoch + 1))
    with path.open("r+b") as file:
        file.write(page)
    with DataStream.open(path, follow=True, index="memory") as follower:
        async with over_loopback(follower) as rig, rig.client() as peer:
            await peer.ask(wire.entry(1), OK + wire.pack(1, 1, b"two", packet=0xFE))
            await peer.ask(wire.start(0), OK + modelled(path).packed())
