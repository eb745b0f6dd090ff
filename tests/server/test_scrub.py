"""The scrub reads every page of an idle server's stream, at a rate, and finds what is damaged."""

from __future__ import annotations

import logging
import os
import threading
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import trio
from trio.testing import MockClock

from datastreamer.errors import DamagedPage
from datastreamer.metrics.counters import Counts
from datastreamer.server import scrub as scrub_module
from datastreamer.server.limits import Limits
from datastreamer.server.metrics import collect
from datastreamer.server.scrub import DAMAGED, MATCHES, UNVERIFIED, Scrub
from datastreamer.server.server import Server
from datastreamer.server.streaming.broadcast import Broadcast
from datastreamer.storage.disk import uncached
from datastreamer.storage.stream import DataStream
from tests.network import model as wire
from tests.network.damage import A_PAGE, FIRST, PAGE, PAGES, evict, flip, written
from tests.network.fixtures import in_memory, in_this_thread, over_loopback, turned_away
from tests.network.model import OK, Model

RATE = 50e6
LAST = PAGES
"""The page that is not whole."""


@pytest.fixture
def whole(path: Path) -> Iterator[DataStream]:
    written(path)
    with DataStream.open(path, verify="never") as stream:
        yield stream


def scrub_of(rate: float, stream: DataStream) -> tuple[Scrub, Broadcast, Counts]:
    """A scrub without a server, whose reads take no time of the clock."""
    counts = Counts()
    scrub = Scrub(rate, counts)
    scrub._in_thread = in_this_thread  # type: ignore[method-assign]
    return scrub, Broadcast(stream, counts), counts


async def passes(scrub: Scrub, broadcast: Broadcast, seconds: float) -> None:
    with trio.move_on_after(seconds):
        await scrub.run(broadcast)


def bad_lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelno >= logging.ERROR]


@pytest.mark.parametrize("rate", [100e3, 1e6, 50e6, 1e9])
async def test_the_rate_is_that_of_the_option(
    whole: DataStream, rate: float, autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scrub_module, "_PASS_SECONDS", 0)
    monkeypatch.setattr(scrub_module, "_QUIET_SECONDS", 0)
    scrub, broadcast, counts = scrub_of(rate, whole)
    seconds = 40 * PAGE / rate
    await passes(scrub, broadcast, seconds)
    assert 0.8 <= counts.scrub_bytes / seconds / rate <= 1.2
    assert counts.scrub_bytes == counts.scrubbed[MATCHES] // (PAGES + 1) * PAGES * PAGE + (
        counts.scrubbed[MATCHES] % (PAGES + 1) * PAGE
    )


async def test_a_pass_begins_once_a_minute(whole: DataStream, autojump_clock: MockClock) -> None:
    scrub, broadcast, counts = scrub_of(RATE, whole)
    await passes(scrub, broadcast, 299)
    assert counts.scrubbed == Counter({MATCHES: 5 * (PAGES + 1)})
    assert 57 < scrub.age < 59


async def test_a_delay_is_not_made_up_for(
    whole: DataStream, autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a disk that hung the next reads keep their distance."""
    scrub, broadcast, _ = scrub_of(1e6, whole)
    times: list[float] = []

    async def slow(call: Any, what: Any) -> Any:
        times.append(trio.current_time())
        if len(times) == 2:
            await trio.sleep(30)
        return await in_this_thread(call, what)

    scrub._in_thread = slow  # type: ignore[method-assign]
    await passes(scrub, broadcast, 45)
    gaps = [b - a for a, b in pairwise(times[:PAGES])]
    assert gaps[1] == pytest.approx(30 + PAGE / 1e6)
    assert all(gap >= PAGE / 1e6 - 1e-6 for gap in gaps)


@pytest.mark.parametrize("follow", [False, True])
@pytest.mark.parametrize("page", [0, 4, PAGES - 1, LAST])
@pytest.mark.parametrize("at", [0, 7, 17, 5_000])
async def test_a_flip_anywhere_is_found(
    path: Path, page: int, at: int, follow: bool, autojump_clock: MockClock
) -> None:
    written(path)
    with DataStream.open(path, follow=follow, verify="never") as stream:
        stream.bookmarks.wait()
        flip(path, page, at)
        scrub, broadcast, counts = scrub_of(RATE, stream)
        await passes(scrub, broadcast, 50)
        [error] = broadcast.pages.damaged
        end = (page + 1) * A_PAGE if page != LAST else stream.total_entries
        assert (error.page, error.first, error.end) == (page, page * A_PAGE, end)
        assert counts.scrubbed == Counter({DAMAGED: 1, MATCHES: PAGES})


@pytest.mark.parametrize(("at", "damaged"), [(5_000, [3]), (PAGE - 5, [])])
async def test_a_flip_in_the_page_cache_and_in_the_padding(
    whole: DataStream, path: Path, at: int, damaged: list[int], autojump_clock: MockClock
) -> None:
    """What is after the padding mark is not the stream's."""
    scrub, broadcast, _ = scrub_of(RATE, whole)
    with path.open("r+b", buffering=0) as file:
        file.seek(FIRST + 3 * PAGE + at)
        file.write(b"\x55")  # neither evicted nor synced
        await passes(scrub, broadcast, 50)
    assert [each.page for each in broadcast.pages.damaged] == damaged


async def test_only_the_disk_is_damaged(
    whole: DataStream, path: Path, autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is resident is right: the page counts as damaged, and its clients are served."""

    class Flipped(scrub_module.UncachedFile):
        def read(self, size: int, offset: int) -> bytes:
            data = super().read(size, offset)
            return data if offset != FIRST + 3 * PAGE else bytes([data[0] ^ 1]) + data[1:]

    monkeypatch.setattr(scrub_module, "UncachedFile", Flipped)
    expected = Model(path.read_bytes()).packed(3 * A_PAGE, 3 * A_PAGE + 1)
    async with in_memory(whole, scrub_rate=RATE) as rig:
        await trio.sleep(30)
        async with rig.client() as peer:
            await peer.ask(wire.entry(3 * A_PAGE), OK + b"\xfe" + expected[1:])
        assert [each.page for each in rig.server.broadcast.pages.damaged] == [3]
        monkeypatch.undo()
        assert rig.server.counts.scrubbed[DAMAGED] == 1


async def test_the_log_the_metrics_and_the_next_pass(
    path: Path, autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    written(path)
    with DataStream.open(path, verify="never") as stream:
        for page in (1, 7, LAST):
            flip(path, page)
        reported: list[list[int]] = []
        async with in_memory(stream, patience=1e4, scrub_rate=RATE) as rig:
            server, began = rig.server, trio.current_time()
            pages = server.broadcast.pages
            pages.on_damage = lambda: reported.append([each.page for each in pages.damaged])
            for turn in range(1, 4):
                await trio.sleep_until(began + 60 * turn - 5)
                lines = bad_lines(caplog)
                assert len(lines) == 3 * turn, "each once a pass"
                for page, line in zip((1, 7, LAST), lines[-3:], strict=True):
                    assert line.startswith(f"{path}: at byte {FIRST + page * PAGE}: page {page} (")
            assert reported == [[1], [1, 7], [1, 7, LAST]]
            samples = (await collect(server))["samples"]
            assert samples["datastreamer_damaged_pages"] == [([], 3)]
            assert samples["datastreamer_scrub_pages_total"] == [
                ([DAMAGED], 9),
                ([MATCHES], 3 * (PAGES - 2)),
                ([UNVERIFIED], 0),
            ]
            assert samples["datastreamer_scrub_bytes_total"] == [([], 3 * PAGES * PAGE)]
            [(_, age)] = samples["datastreamer_scrub_age_seconds"]
            assert isinstance(age, float)
            assert 40 < age < 60
            assert server.unready == ""
            # What it found is sent to no client, resident or not.
            async with rig.client() as peer:
                await peer.send(wire.start(7 * A_PAGE))
                assert await turned_away(peer) == b""
            # Whole again: the next pass notices.
            for page in (1, 7):
                flip(path, page)
            await trio.sleep(65)
            samples = (await collect(server))["samples"]
            assert samples["datastreamer_damaged_pages"] == [([], 1)]


async def test_pages_without_a_checksum(
    path: Path, autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    written(path)
    os.unlink(f"{path}.sums")
    monkeypatch.setattr(scrub_module, "_PASSED_OVER", 4)
    with DataStream.open(path, follow=True, verify="never") as stream:
        scrub, broadcast, counts = scrub_of(RATE, stream)
        await passes(scrub, broadcast, 50)
        assert counts.scrubbed == Counter({UNVERIFIED: PAGES, MATCHES: 1})
        assert counts.scrub_bytes == 0


async def test_it_waits_while_a_backlog_is_sent(
    whole: DataStream, autojump_clock: MockClock
) -> None:
    scrub, broadcast, counts = scrub_of(RATE, whole)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(scrub.run, broadcast)
        for turn in range(20):
            await trio.sleep(0.9)
            broadcast.backlog_turns += turn % 2
            broadcast.cold.reads += 1 - turn % 2
            assert not counts.scrubbed
        await trio.sleep(0.9)
        assert not counts.scrubbed
        await trio.sleep(2)
        assert counts.scrubbed[MATCHES] == PAGES + 1
        scrub.stop()


async def test_a_client_far_from_the_head_is_a_backlog_and_a_live_one_is_none(
    whole: DataStream, path: Path
) -> None:
    async with over_loopback(whole) as rig, rig.client() as live, rig.client() as late:
        broadcast = rig.server.broadcast
        await live.ask(wire.start(whole.total_entries), OK)
        with whole.atomic_op() as op:
            number = op.add_entry(1, b"new")
        await live.expect(Model(path.read_bytes()).packed(number))
        assert broadcast.backlog_turns == 0
        await late.ask(wire.start(0), OK + Model(path.read_bytes()).packed())
        assert broadcast.backlog_turns > 0


@pytest.mark.parametrize("direct", [True, False])
async def test_what_was_cold_stays_cold(
    path: Path, autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch, direct: bool
) -> None:
    """With direct reads, and where the system refuses them."""
    if not direct:
        monkeypatch.setattr(uncached, "_DIRECT", 0)
    written(path)
    evict(path)
    with DataStream.open(path, follow=True, verify="never") as stream:
        scrub, broadcast, counts = scrub_of(RATE, stream)
        await passes(scrub, broadcast, 50)
        assert counts.scrubbed[MATCHES] == PAGES + 1
        pages = broadcast.pages
        # (The system may keep pages that another processor holds at the moment.)
        assert sum(pages.resident(FIRST + page * PAGE, PAGE) for page in range(PAGES)) <= 2


async def test_a_disk_that_cannot_read(
    path: Path, autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Failing(scrub_module.UncachedFile):
        def read(self, size: int, offset: int) -> bytes:
            if offset == FIRST + 2 * PAGE:
                raise OSError(5, "Input/output error")
            return super().read(size, offset)

    monkeypatch.setattr(scrub_module, "UncachedFile", Failing)
    written(path)
    with DataStream.open(path, follow=True, verify="never") as stream:
        scrub, broadcast, counts = scrub_of(RATE, stream)
        await passes(scrub, broadcast, 50)
        [error] = broadcast.pages.damaged
        assert isinstance(error, DamagedPage)
        assert "page 2 (entries 104 to 155): the disk cannot read it" in str(error)
        assert counts.scrubbed == Counter({DAMAGED: 1, MATCHES: PAGES})


async def test_an_end_while_the_disk_is_read(
    whole: DataStream, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server waits for the read that is in progress, and begins no other."""
    begun, turning = threading.Event(), threading.Event()
    examine, calls = scrub_module._examine, 0

    def slow(*what: Any) -> Any:
        nonlocal calls
        calls += 1
        begun.set()
        assert turning.wait(20)
        return examine(*what)

    monkeypatch.setattr(scrub_module, "_examine", slow)
    monkeypatch.setattr(scrub_module, "_QUIET_SECONDS", 0)
    server = Server(whole, limits=Limits(scrub_rate=RATE))
    ended = False

    async def run(*, task_status: trio.TaskStatus[Any]) -> None:
        nonlocal ended
        await server.run([], task_status=task_status)
        ended = True

    with trio.fail_after(60):
        async with trio.open_nursery() as nursery:
            await nursery.start(run)
            await trio.to_thread.run_sync(begun.wait, 20)
            assert await server.finish()
            assert not ended
            turning.set()
    assert ended
    assert calls == 1


async def test_it_costs_nothing_when_it_is_off(whole: DataStream) -> None:
    server = Server(whole)
    await server.scrub.run(server.broadcast)
    assert "datastreamer_scrub_age_seconds" not in (await collect(server))["samples"]


def test_one_of_several_processes_scrubs() -> None:
    shares = [Limits(scrub_rate=RATE).share(at, 3).scrub_rate for at in range(3)]
    assert shares == [RATE, None, None]
