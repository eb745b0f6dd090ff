"""What a relay receives is compared with the checksums of its upstream's pages."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import trio

from datastreamer.client.upstream import Upstream
from datastreamer.relay.download import Download, UpstreamState
from datastreamer.storage.stream import DataStream
from tests.relay.relaying import QUICK, new, nursery_for, serving

FIRST, PAGE = 4096, 1 << 20


def grow(stream: DataStream, pages: float, *, seed: int = 7) -> None:
    """Operations of small entries and bookmarks until the stream has that many pages."""
    source = random.Random(seed)
    while stream.header.total_length < FIRST + pages * PAGE:
        with stream.atomic_op() as op:
            op.add_bookmark(stream.total_entries.to_bytes(8, "big"))
            for _ in range(40):
                op.add_entry(source.randrange(5), source.randbytes(source.randrange(900)))


def flip(stream: DataStream, offset: int, bit: int) -> None:
    """Change one bit of the file, in the page cache."""
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
                assert relay._internals.next_entry == 0, (offset, bit)
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
