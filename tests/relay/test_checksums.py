"""What a relay receives is compared with the checksums of its upstream's pages."""

from __future__ import annotations

import logging
import os
import random
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import trio

from datastreamer.client.upstream import Upstream
from datastreamer.errors import NoAnswer
from datastreamer.format import FEATURE_PAGE_SUMS
from datastreamer.protocol.messages import Capabilities
from datastreamer.protocol.retry import Backoff
from datastreamer.relay import checksums
from datastreamer.relay import compare as comparing
from datastreamer.relay.upstream_state import UpstreamState
from datastreamer.relay.upstreams import Download
from datastreamer.storage.maintain.check import verify
from datastreamer.storage.pages.proof import Digests
from datastreamer.storage.stream import DataStream
from tests.relay.relaying import (
    QUICK,
    Rig,
    contents,
    new,
    nursery_for,
    packed,
    relaying,
    serving,
    twin,
)

FIRST, PAGE = 4096, 1 << 20

pytestmark = pytest.mark.usefixtures("no_times")


def grow(stream: DataStream, pages: float, *, seed: int = 7) -> None:
    """Operations of small entries and bookmarks until the stream has that many pages."""
    source = random.Random(seed)
    while stream.header.total_length < FIRST + pages * PAGE:
        with stream.atomic_op() as op:
            op.add_bookmark(stream.total_entries.to_bytes(8, "big"))
            for _ in range(40):
                op.add_entry(source.randrange(5), source.randbytes(source.randrange(900)))


def flip(stream: DataStream, offset: int, bit: int = 3) -> None:
    """Change one bit of the file, in the page cache; a second time restores it."""
    fd = os.open(stream.path, os.O_RDWR)
    try:
        byte = os.pread(fd, 1, offset)[0]
        os.pwrite(fd, bytes([byte ^ 1 << bit]), offset)
    finally:
        os.close(fd)


def download_from(*ports: int) -> Download:
    return Download(
        [Upstream("127.0.0.1", port) for port in ports],
        stream_type=None,
        follow=False,
        patience=0.0,
        timeout=2.0,
        heartbeat=0.2,
        backoff=QUICK,
        look_seconds=1000.0,
    )


class Awaiting(logging.Handler):
    """Sets an event when these words are logged."""

    def __init__(self, words: str) -> None:
        super().__init__()
        self.words, self.found = words, trio.Event()

    def emit(self, record: logging.LogRecord) -> None:
        if self.words in record.getMessage():
            self.found.set()


@pytest.fixture
def logged() -> Iterator[Callable[[str], trio.Event]]:
    """Makes an event that is set when the event loop logs these words."""
    logger, handlers = logging.getLogger("datastreamer"), list[Awaiting]()

    def event(words: str) -> trio.Event:
        handlers.append(Awaiting(words))
        logger.addHandler(handlers[-1])
        return handlers[-1].found

    yield event
    for handler in handlers:
        logger.removeHandler(handler)


@pytest.fixture
def source(tmp_path: Path) -> Iterator[DataStream]:
    with new(tmp_path / "source.bin") as made:
        yield made


def positions(stream: DataStream, count: int, seed: int) -> Iterator[tuple[int, int]]:
    """Single bits of committed entries, their headers included."""
    chosen, reader = random.Random(seed), stream.reader
    for _ in range(count):
        number = chosen.randrange(stream.total_entries)
        size = len(reader.packed(number))
        yield reader.cursor(number).offset + chosen.randrange(size), chosen.randrange(8)


async def test_the_second_connection_has_a_name(
    tmp_path: Path, source: DataStream, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    grow(source, 1.2)
    async with nursery_for() as nursery:
        server = await serving(nursery, source)
        rig = await relaying(nursery, tmp_path / "relay.bin", server.port)
        await rig.has(source.total_entries)
        await rig.stop()
        await server.stop()
    assert re.search(r"127\.0\.0\.1:\d+ \(relay: checksums\): disconnected", caplog.text)


@pytest.mark.parametrize("count", [100, pytest.param(10_000, marks=pytest.mark.soak)])
async def test_a_bootstrap_notices_every_bit(
    tmp_path: Path, source: DataStream, count: int
) -> None:
    """In any committed byte, headers of entries included: nothing of the operation is stored."""
    grow(source, 2.4)
    bits = list(positions(source, count, seed=count))
    async with nursery_for(60 + count) as nursery:
        server = await serving(nursery, source)
        download = download_from(server.port)
        [state] = download.states
        with new(tmp_path / "relay.bin") as relay:
            download.stream = relay
            for offset, bit in bits:
                state.lost = ""
                flip(source, offset, bit)
                with trio.move_on_after(20):
                    await download._relay_from(state, relay)
                flip(source, offset, bit)
                assert state.lost, (offset, bit)
                assert relay.parts.writer.next_entry == 0, (offset, bit)
            # Most of them are in data, and only checksums show them.
            assert state.damaged > count * 0.9
            with trio.move_on_after(20):
                await nursery.start(_until_caught_up, download, state, relay)
            assert relay.total_entries == source.total_entries


async def _until_caught_up(
    download: Download,
    state: UpstreamState,
    relay: DataStream,
    task_status: trio.TaskStatus[None],
) -> None:
    """Download until the relay has everything."""
    async with trio.open_nursery() as nursery:
        nursery.start_soon(download._relay_from, state, relay)
        await download.until(lambda: download.caught_up)
        nursery.cancel_scope.cancel()
    task_status.started()


def data_of(stream: DataStream, number: int) -> int:
    """The offset of a byte of an event's data, of this entry or one of the next."""
    while len(stream.entry(number).data) < 30 or stream.entry(number).is_bookmark:
        number += 1
    return stream.reader.cursor(number).offset + 20


async def same(rig: Rig, stream: DataStream) -> None:
    await rig.relay.until(lambda: rig.stream.total_entries == stream.total_entries)
    await rig.relay.until(lambda: rig.relay.caught_up)
    assert contents(rig.stream) == contents(stream)


def messages(caplog: pytest.LogCaptureFixture, level: int) -> list[str]:
    return [each.getMessage() for each in caplog.records if each.levelno >= level]


# An upstream is not used for some seconds, which suffice to receive all from another one.
AVOIDING = Backoff(first=0.05, most=0.05)


async def test_another_upstream_is_used_at_once(
    tmp_path: Path, source: DataStream, caplog: pytest.LogCaptureFixture
) -> None:
    grow(source, 2.4)
    with twin(tmp_path / "second.bin", source, source.total_entries) as second:
        bad = data_of(source, source.reader.first_number(1) + 5)
        flip(source, bad)
        async with nursery_for() as nursery:
            one, two = await serving(nursery, source), await serving(nursery, second)
            rig = await relaying(
                nursery, tmp_path / "relay.bin", one.port, two.port, backoff=AVOIDING
            )
            await same(rig, second)
            first, other = rig.download.states
            assert (first.damaged, other.damaged) == (1, 0)
            assert rig.download.current is other
            assert first.lost
            begin, end = (source.reader.first_number(page) for page in (1, 2))
            [line] = messages(caplog, logging.ERROR)
            assert line.startswith(f"127.0.0.1:{one.port} is not used for ")
            assert f"entries {begin} to {end - 1} received from 127.0.0.1:{one.port}" in line
            # What is damaged is of no concern any more once it was received whole elsewhere.
            flip(source, bad)
            await rig.relay.until(lambda: rig.download.current is first)
            grow(source, 3.5, seed=8)
            await same(rig, source)
            assert first.damaged == 1


async def test_the_only_upstream_is_tried_again_and_again(
    tmp_path: Path, source: DataStream, caplog: pytest.LogCaptureFixture
) -> None:
    grow(source, 1.5)
    bad = data_of(source, 100)
    flip(source, bad)
    async with nursery_for() as nursery:
        server = await serving(nursery, source)
        rig = await relaying(nursery, tmp_path / "relay.bin", server.port)
        [state] = rig.download.states
        await rig.relay.until(lambda: state.damaged >= 3)
        assert rig.stream.total_entries == 0
        assert rig.relay.failure is None
        waits = [float(line.split()[5]) for line in messages(caplog, logging.ERROR)]
        assert waits[-1] <= 60 * QUICK.most
        flip(source, bad)
        await same(rig, source)
        assert state.damaged_in_a_row == 0


async def test_live_operations_are_compared_when_their_page_is_whole(
    tmp_path: Path, source: DataStream, caplog: pytest.LogCaptureFixture
) -> None:
    async with nursery_for() as nursery:
        server = await serving(nursery, source)
        rig = await relaying(nursery, tmp_path / "relay.bin", server.port)
        [state] = rig.download.states
        for turn in range(1, 40):
            grow(source, turn * 0.1, seed=turn)
            await same(rig, source)
        assert verify(rig.stream.path).ok
        # Nothing else runs between the commits and the damage.
        total = source.total_entries
        grow(source, 5.1, seed=41)
        flip(source, bad := data_of(source, total + 5))
        await rig.relay.until(lambda: state.damaged >= 1)
        assert rig.stream.total_entries == total
        first = source.reader.first_number(3)
        [line] = messages(caplog, logging.ERROR)
        assert line.endswith(f"; entries {first} to {total - 1} had been stored before")
        flip(source, bad)
        await same(rig, source)


@pytest.mark.parametrize("attempts", [2, pytest.param(20, marks=pytest.mark.soak)])
async def test_updates_meanwhile_are_no_damage(
    tmp_path: Path, source: DataStream, attempts: int
) -> None:
    """In pages that are on their way, that are compared, and that are not whole yet."""
    grow(source, 3.3)
    chosen = random.Random(3)

    def update() -> None:
        while True:
            entry = source.entry(chosen.randrange(source.total_entries))
            if not entry.is_bookmark:
                source.update_entry(entry.number, entry.type, chosen.randbytes(len(entry.data)))
                return

    async with nursery_for() as nursery:
        server = await serving(nursery, source)
        for attempt in range(attempts):
            rig = await relaying(nursery, tmp_path / f"{attempt}.bin", server.port)
            [state] = rig.download.states
            pages = source.header.total_length / PAGE
            for turn in range(40):
                update()
                if turn % 4 == 0:
                    pages += 0.1
                    grow(source, pages, seed=100 * attempt + turn)
                    if chosen.randrange(2):
                        await rig.relay.until(
                            lambda rig=rig: rig.stream.total_entries == source.total_entries
                        )
                await trio.lowlevel.checkpoint()
            await rig.relay.until(lambda rig=rig: packed(rig.stream) == packed(source))
            assert state.damaged == 0
            await rig.stop()


async def test_pages_that_begin_elsewhere(tmp_path: Path) -> None:
    """An upstream has continued after a damaged page: its next pages hold other entries than the
    relay's. They are compared before the commit nevertheless."""
    with new(tmp_path / "source.bin") as source:
        grow(source, 1.4)
        bad = data_of(source, source.reader.first_number(1) + 5)
    flip(source, bad)
    with DataStream.open(tmp_path / "source.bin", index="memory") as source:
        grow(source, 4.3, seed=8)
        flip(source, bad)
        async with nursery_for() as nursery:
            server = await serving(nursery, source)
            rig = await relaying(nursery, tmp_path / "relay.bin", server.port)
            await same(rig, source)
            starts = [stream.reader.first_number(3) for stream in (source, rig.stream)]
            assert starts[0] != starts[1]
            grow(source, 6.3, seed=9)
            await same(rig, source)
            [state] = rig.download.states
            assert state.damaged == 0
            await rig.stop()
            for page in (0, 2, 3, 5, 6):
                flip(source, at := data_of(source, source.reader.first_number(page) + 9))
                rig = await relaying(nursery, tmp_path / f"{page}.bin", server.port)
                [state] = rig.download.states
                await rig.relay.until(lambda state=state: state.damaged > 0)
                assert rig.stream.total_entries == 0
                await rig.stop()
                flip(source, at)


async def test_a_chain_of_relays(tmp_path: Path, source: DataStream) -> None:
    grow(source, 2.4)
    async with nursery_for() as nursery:
        server = await serving(nursery, source)
        first = await relaying(nursery, tmp_path / "1.bin", server.port)
        await same(first, source)
        bad = data_of(first.stream, 500)
        flip(first.stream, bad)
        second = await relaying(nursery, tmp_path / "2.bin", first.port)
        [state] = second.download.states
        await second.relay.until(lambda: state.damaged > 0)
        assert second.stream.total_entries == 0
        flip(first.stream, bad)
        await same(second, source)
        assert first.download.states[0].damaged == 0


async def test_a_server_without_checksums_is_not_asked(
    tmp_path: Path, source: DataStream, monkeypatch: pytest.MonkeyPatch
) -> None:
    older = Capabilities().features & ~FEATURE_PAGE_SUMS
    monkeypatch.setattr(Capabilities.__new__, "__defaults__", (older, *Capabilities()[1:]))
    assert not Capabilities().page_sums
    grow(source, 2.4)
    flip(source, data_of(source, 100))
    async with nursery_for() as nursery:
        server = await serving(nursery, source)
        rig = await relaying(nursery, tmp_path / "relay.bin", server.port)
        await same(rig, source)
        grow(source, 3.4, seed=8)
        await same(rig, source)
        assert server.server is not None
        assert server.server.counts.commands["page_sums"] == 0
        assert server.server.counts.errors == {}


async def test_an_upstream_whose_checksums_are_missing(
    tmp_path: Path, source: DataStream, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pages without are not compared; those after them are."""
    monkeypatch.setattr(checksums, "_AGAIN_SECONDS", 0.0)
    grow(source, 3.4)
    sums = source._ensure_writable().owned.sums
    known, sums.proven = sums.proven, Digests()
    async with nursery_for() as nursery:
        server = await serving(nursery, source)
        rig = await relaying(nursery, tmp_path / "relay.bin", server.port)
        [state] = rig.download.states
        await same(rig, source)
        grow(source, 4.4, seed=8)
        await same(rig, source)
        sums.proven = known
        total = source.total_entries
        grow(source, 5.4, seed=9)
        flip(source, bad := data_of(source, total + 5))
        await rig.relay.until(lambda: state.damaged > 0)
        assert rig.stream.total_entries == total
        flip(source, bad)
        await same(rig, source)


@pytest.mark.parametrize("lost", [1, 2, 3])
async def test_answers_that_are_lost(
    tmp_path: Path,
    source: DataStream,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    lost: int,
) -> None:
    """Checksums are requested again; only if no answer ever arrives, nothing is compared."""
    grow(source, 1.4)
    flip(source, data_of(source, 5))
    ask, left = checksums.SumsClient.ask, [lost]

    async def unlucky(client: checksums.SumsClient, question: Any) -> Any:
        left[0] -= 1
        if left[0] >= 0:
            raise NoAnswer("too late")
        return await ask(client, question)

    monkeypatch.setattr(checksums.SumsClient, "ask", unlucky)
    async with nursery_for() as nursery:
        server = await serving(nursery, source)
        rig = await relaying(nursery, tmp_path / "relay.bin", server.port)
        [state] = rig.download.states
        if lost < 3:
            await rig.relay.until(lambda: state.damaged > 0)
            assert rig.stream.total_entries == 0
        else:
            await same(rig, source)
            assert "is not compared with checksums: too late" in caplog.text


# Damage is taken for nothing else.


async def test_damage_is_no_missed_update(
    tmp_path: Path,
    source: DataStream,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    logged: Callable[[str], trio.Event],
) -> None:
    """Older entries are compared by hashes after a failover; as many may differ as the relay's
    own stream was updated."""
    monkeypatch.setattr(comparing, "_DAMAGED_SECONDS", 0.05)
    grow(source, 2.4)
    with twin(tmp_path / "second.bin", source, source.total_entries) as second:
        async with nursery_for() as nursery:
            server = await serving(nursery, source)
            rig = await relaying(nursery, tmp_path / "relay.bin", server.port)
            await same(rig, source)
            for _ in range(3):
                entry = source.entry(1)
                source.update_entry(1, entry.type, entry.data)
            await rig.relay.until(lambda: rig.stream.entry(1) == source.entry(1))
            await rig.stop()
            before = contents(source)
            flip(second, bad := data_of(second, 1000))
            other = await serving(nursery, second)
            uncompared = logged("are left uncompared")
            rig = await relaying(nursery, tmp_path / "relay.bin", other.port)
            await rig.relay.until(lambda: rig.relay.caught_up)
            await uncompared.wait()
            [line] = [it for it in messages(caplog, logging.ERROR) if "uncompared" in it]
            assert "error 27" in line
            assert contents(rig.stream) == before
            assert rig.download.uncompared > 1000
            flip(second, bad)
            await rig.relay.until(lambda: rig.download.uncompared == 0)
            assert contents(rig.stream) == before


@pytest.mark.parametrize("on_rewrite", ["stop", "follow"])
async def test_damage_is_no_other_history(
    tmp_path: Path, source: DataStream, on_rewrite: str
) -> None:
    """Among the last entries, which are compared at each new connection."""
    grow(source, 2.4)
    async with nursery_for() as nursery:
        server = await serving(nursery, source)
        options = {"on_rewrite": on_rewrite}
        rig = await relaying(nursery, tmp_path / "relay.bin", server.port, **options)
        await same(rig, source)
        await rig.stop()
        total = source.total_entries
        flip(source, bad := data_of(source, total - 50))
        rig = await relaying(nursery, tmp_path / "relay.bin", server.port, **options)
        [state] = rig.download.states
        await rig.relay.until(lambda: state.damaged > 0)
        assert state.set_aside is None
        assert rig.stream.total_entries == total
        flip(source, bad)
        grow(source, 3.4, seed=8)
        await same(rig, source)
