"""Clients far behind, whose bytes are on the disk only: the loop does not wait for it."""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from datastreamer.server.answers import bookmark_queries
from datastreamer.server.streaming import catch_up as sender_module
from datastreamer.server.streaming import cold_reads as cold_module
from datastreamer.server.streaming.cold_reads import ColdReads
from datastreamer.storage.disk.file_ops import File, Readable
from datastreamer.storage.disk.residency import CAN_SAY, Residency
from datastreamer.storage.header.records import Head
from datastreamer.storage.pages.page_states import PageRegister
from datastreamer.storage.stream import DataStream
from tests.network import model as wire
from tests.network.fixtures import Rig, append, in_memory, over_loopback
from tests.network.model import BOOKMARK, OK, Model

MIB = 1 << 20


def modelled(stream: DataStream) -> Model:
    return Model(Path(stream.path).read_bytes())


@pytest.fixture
def old(stream: DataStream) -> DataStream:
    """12 MiB."""
    append(stream, *[(1, bytes([n % 251]) * 20_000) for n in range(600)])
    return stream


def cold_reads(fd: int) -> ColdReads:
    """Of a file without checksums."""
    register = PageRegister(cast("Readable", None), "file", None, lambda: Head(0, 0), fd=fd)
    return ColdReads(cast("File", SimpleNamespace(fileno=lambda: fd)), register)


class SlowDisk(ColdReads):
    """Nothing is in memory; what was read once is. Reads wait for `turning`."""

    def __init__(self, real: ColdReads) -> None:
        super().__init__(real._file, real._pages)
        real._pages.resident = self.resident  # type: ignore[method-assign]
        self.turning = threading.Event()
        self.read_from: list[tuple[int, int]] = []

    def resident(self, start: int, count: int) -> bool:
        return any(a <= start and start + count <= a + n for a, n in self.read_from)

    def _read(self, start: int, count: int) -> None:
        assert threading.current_thread() is not threading.main_thread()
        assert self.turning.wait(20)
        super()._read(start, count)
        self.read_from.append((start, count))


def on_slow_disk(rig: Rig) -> SlowDisk:
    disk = SlowDisk(rig.server.broadcast.cold)
    rig.server.broadcast.cold = disk
    return disk


def count_runs(disk: ColdReads) -> list[object]:
    """What is read in a thread from now on, once `turning` is set."""
    runs: list[object] = []
    run = disk.run

    async def counted(call: Callable[[object], object], what: object, **more: Any) -> object:
        runs.append(what)

        def when_it_turns(what: object) -> object:
            assert not isinstance(disk, SlowDisk) or disk.turning.wait(20)
            return call(what)

        return await run(when_it_turns, what, **more)

    disk.run = counted  # type: ignore[method-assign, assignment]
    return runs


@pytest.mark.parametrize("open_server", [over_loopback, in_memory])
async def test_one_cold_reader_delays_no_other(
    old: DataStream, open_server: Callable[..., trio.abc.AsyncResource]
) -> None:
    async with (
        open_server(old) as rig,  # type: ignore[attr-defined]
        rig.client() as cold,
        rig.client() as live,
        rig.client() as asks,
    ):
        disk = on_slow_disk(rig)
        await live.ask(wire.start(600), OK)
        await cold.ask(wire.start(0), OK)
        await wait_all_tasks_blocked(0.002)
        assert rig.server.counts.cold_reads == 1
        for n in range(20):  # the disk is blocked meanwhile
            append(old, (2, b"%d" % n))
            await live.expect(modelled(old).packed(600 + n))
            await asks.ask(wire.header(), OK + modelled(old).header())
        disk.turning.set()
        await cold.expect(modelled(old).packed())
        # All but the tail was read ahead, each page once.
        starts = [start for start, _ in disk.read_from]
        assert len(starts) == len(set(starts)) >= 7
        assert disk.read_from[0][0] == 4096


async def test_what_was_evicted_again_is_sent_nevertheless(old: DataStream) -> None:
    async with over_loopback(old) as rig, rig.client() as cold:
        disk = on_slow_disk(rig)
        disk.turning.set()
        rig.server.broadcast.pages.resident = lambda start, count: False  # type: ignore[method-assign]
        await cold.ask(wire.start(0), OK + modelled(old).packed())


async def test_an_end_while_the_disk_is_read(old: DataStream) -> None:
    """A truncation, a Stop, the client's end, the server's: none waits on the loop."""
    async with over_loopback(old) as rig, rig.client() as cut, rig.client() as stops:
        disk = on_slow_disk(rig)
        disk.read_from.append((old.reader.cursor(500).offset, 4 * MIB))
        await cut.ask(wire.start(550), OK)
        await cut.expect(modelled(old).packed(550))
        async with rig.client() as gone:
            await gone.ask(wire.start(0), OK)
            await wait_all_tasks_blocked(0.002)
        await stops.ask(wire.start(0), OK)
        await stops.send(wire.stop())
        await wait_all_tasks_blocked(0.002)
        old.truncate(500)
        await cut.was_reset()
        disk.turning.set()
        got = b""
        while (packet := await stops.packet()) != OK:
            got += packet
        assert modelled(old).packed(0, 500).startswith(got)
        await stops.ask(wire.header(), OK + modelled(old).header())


@pytest.mark.parametrize("number", [0, 300, 600])
async def test_the_place_is_found_in_a_thread(
    old: DataStream, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    monkeypatch.setattr(sender_module, "_INLINE_PLACE", 0)
    async with over_loopback(old) as rig, rig.client() as peer:
        await peer.ask(wire.start(number), OK)
        await peer.expect(modelled(old).packed(number))
        append(old, (2, b"live"))
        await peer.expect(modelled(old).packed(600))


async def test_a_change_while_the_place_is_found(
    old: DataStream, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is found again, in the stream as it is."""
    monkeypatch.setattr(sender_module, "_INLINE_PLACE", 0)
    async with over_loopback(old) as rig, rig.client() as peer, rig.client() as beyond:
        cold = rig.server.broadcast.cold
        calls = 0
        run = cold.run

        async def run_after_a_change(call: Callable[[int], object], number: int) -> object:
            nonlocal calls
            calls += 1
            if calls == 1:
                old.truncate(400)
                append(old, *[(3, b"another")] * 5)
            return await run(call, number)

        cold.run = run_after_a_change  # type: ignore[method-assign, assignment]
        await peer.ask(wire.start(390), OK)
        while calls < 2:
            await trio.lowlevel.checkpoint()
        await peer.expect(modelled(old).packed(390))
        assert calls == 2
        await beyond.ask(wire.start(406), wire.result(3))


@pytest.mark.skipif(not CAN_SAY, reason="the system cannot say")
async def test_a_real_cold_file(old: DataStream) -> None:
    whole = modelled(old).packed()
    fd = old.fileno()
    os.fsync(fd)
    async with over_loopback(old) as rig:
        # What counts and indexes the entries may read the file in between.
        for _ in range(20):
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            if Residency(fd).holds(0, 4 * MIB):
                pytest.skip("this file system keeps all in memory")
            async with rig.client() as peer:
                await peer.ask(wire.start(0), OK + whole)
            if rig.server.counts.cold_reads:
                break
        assert rig.server.counts.cold_reads >= 1


def test_a_file_that_cannot_be_read(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"some")
    with (tmp_path / "file").open("rb") as file:
        trio.run(cold_reads(file.fileno()).read, 0, 100)
        monkeypatch.delattr(os, "posix_fadvise", raising=False)
        trio.run(cold_reads(file.fileno()).read, 0, 100)
    trio.run(cold_reads(-1).read, 0, 100)  # the sender meets the error and reports it


@pytest.mark.parametrize("open_server", [over_loopback, in_memory])
async def test_queries_about_cold_entries_delay_no_client(
    old: DataStream, open_server: Callable[..., trio.abc.AsyncResource]
) -> None:
    """By number and by bookmark; while the disk is blocked the others are served."""
    append(old, (BOOKMARK, b"key"), *[(1, b"%d" % n) for n in range(50)])
    async with (
        open_server(old) as rig,  # type: ignore[attr-defined]
        rig.client() as asks,
        rig.client() as finds,
        rig.client() as live,
    ):
        disk = on_slow_disk(rig)
        reads = count_runs(disk)
        await live.ask(wire.start(651), OK)
        await asks.send(wire.entry(3) + wire.entry(599) + wire.entry(650))
        await finds.send(wire.bookmark(b"key"))
        await wait_all_tasks_blocked(0.002)
        assert len(reads) == 2, "the first question of each waits"
        for n in range(20):
            append(old, (2, b"%d" % n))
            await live.expect(modelled(old).packed(651 + n))
        disk.turning.set()
        for number in (3, 599):
            expected = OK + wire.pack(number, 1, bytes([number % 251]) * 20_000, packet=0xFE)
            await asks.expect(expected)
        await asks.expect(OK + wire.pack(650, 1, b"49", packet=0xFE))
        await finds.expect(OK + wire.pack(601, 1, b"0", packet=0xFE))


@pytest.mark.parametrize("index_at_hand", [False, True])
async def test_starting_at_an_old_bookmark_delays_no_client(
    stream: DataStream, monkeypatch: pytest.MonkeyPatch, index_at_hand: bool
) -> None:
    """Neither the look into the index, nor that at the bookmark's own entry."""
    monkeypatch.setattr(cold_module, "_QUICK_LOOKUPS", 0 if index_at_hand else 1)
    append(stream, (BOOKMARK, b"key"), *[(1, bytes([n]) * 20_000) for n in range(200)])
    async with over_loopback(stream) as rig, rig.client() as finds, rig.client() as live:
        disk = on_slow_disk(rig)
        reads = count_runs(disk)
        await live.ask(wire.start(201), OK)
        await finds.send(wire.start_bookmark(b"key"))
        await wait_all_tasks_blocked(0.002)
        assert reads == [b"key"]
        for n in range(20):
            append(stream, (2, b"%d" % n))
            await live.expect(modelled(stream).packed(201 + n))
        disk.turning.set()
        await finds.expect(OK + modelled(stream).packed())


async def test_an_index_in_memory_is_asked_without_a_thread(stream: DataStream) -> None:
    """Once that has shown; a look-up that waits for the disk has them all in threads again."""
    append(stream, (BOOKMARK, b"key"), (1, b"event"))
    expected = OK + wire.pack(1, 1, b"event", packet=0xFE)
    waits = 0
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(cold_module, "_waits", lambda: waits)
        async with over_loopback(stream) as rig, rig.client() as asks:
            disk = rig.server.broadcast.cold
            rig.server.broadcast.pages.resident = lambda start, count: True  # type: ignore[method-assign]
            reads = count_runs(disk)
            for _ in range(30):
                await asks.ask(wire.bookmark(b"key"), expected)
            assert reads.count(b"key") == 16
            # The view that the last of them shared is released before look-ups are slow.
            await wait_all_tasks_blocked(0.001)
            patched.setattr(cold_module, "_waits", iter(range(1 << 20)).__next__)
            patched.setattr(bookmark_queries, "_QUICK_SECONDS", -1.0)
            for _ in range(4):
                await asks.ask(wire.bookmark(b"key"), expected)
                # (Look-ups without a pause share a view for a moment.)
                await wait_all_tasks_blocked(0.001)
            assert reads.count(b"key") == 18, "the second one found out"


@pytest.mark.skipif(cold_module._THREAD is None, reason="the system does not say")
def test_what_a_thread_waits_for_is_counted(tmp_path: Path) -> None:
    (tmp_path / "map").write_bytes(bytes(MIB))
    with open(tmp_path / "map", "rb") as file, mmap.mmap(file.fileno(), 0, prot=1) as mapped:
        cold = cold_reads(file.fileno())
        for _ in range(16):
            assert not cold.index_at_hand
            assert cold.look_up(mapped.__getitem__, 5) == 0
        assert cold.index_at_hand


async def test_questions_about_entries_in_memory_take_no_thread(old: DataStream) -> None:
    async with over_loopback(old) as rig, rig.client() as asks:
        disk = on_slow_disk(rig)
        disk.turning.set()
        rig.server.broadcast.pages.resident = lambda start, count: True  # type: ignore[method-assign]
        reads = count_runs(disk)
        for _ in range(3):
            for number in (600, 599, 3, 10, 3):
                expected = wire.pack(number, 1, bytes([number % 251]) * 20_000, packet=0xFE)
                await asks.ask(
                    wire.entry(number), OK + expected if number < 600 else wire.NOT_FOUND
                )
            append(old, (2, b"more"))
            total = old.total_entries
            await asks.ask(
                wire.entry(total - 1), OK + wire.pack(total - 1, 2, b"more", packet=0xFE)
            )
            old.truncate(600)
        # Half of them: each that a page is first looked into for finds out whether it is resident.
        assert len(reads) <= 9


async def test_a_change_while_a_cold_entry_is_read(old: DataStream) -> None:
    """The answer is of the stream as it is when it is sent."""
    async with over_loopback(old) as rig, rig.client() as asks, rig.client() as other:
        disk = on_slow_disk(rig)
        count_runs(disk)
        await asks.send(wire.entry(500) + wire.entry(400))
        await other.send(wire.entry(599))
        await wait_all_tasks_blocked(0.002)
        await trio.to_thread.run_sync(old.truncate, 450)
        append(old, *[(3, b"another")] * 60)
        disk.turning.set()
        await asks.expect(OK + wire.pack(500, 3, b"another", packet=0xFE))
        await asks.expect(OK + wire.pack(400, 1, bytes([400 % 251]) * 20_000, packet=0xFE))
        await other.expect(wire.NOT_FOUND)
