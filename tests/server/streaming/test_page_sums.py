"""Serving the checksums of pages; and hashes, which damaged pages do not get."""

from __future__ import annotations

import os
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
import xxhash

from datastreamer.format import page_of
from datastreamer.protocol.commands import HashQuery, SumsQuery, encode_command
from datastreamer.protocol.following import NO_SUM, RangeHash, RangeSum, SumsFound
from datastreamer.protocol.messages import OK
from datastreamer.protocol.publish.messages import encode_refusal
from datastreamer.server.streaming import change_reports
from datastreamer.storage.stream import DataStream
from tests.network import model
from tests.network.fixtures import Open, Peer, in_memory, over_loopback, over_unix
from tests.server.streaming.test_commit_reports import commit, entries

FIRST, PAGE = 4096, 1 << 20
everywhere = pytest.mark.parametrize("serve", [in_memory, over_loopback, over_unix])


def ask(first: int, pages: int = 0) -> bytes:
    return encode_command(SumsQuery(first, pages), 1)


def hashed(stream: DataStream, first: int, end: int) -> bytes:
    return encode_command(HashQuery(first, end), 1)


def pages_of(stream: DataStream) -> list[RangeSum]:
    """The sums of all pages, the last one too, from an independent reading."""
    starts: dict[int, int] = {}
    for number in range(stream.total_entries):
        starts.setdefault(page_of(stream.reader.cursor(number).offset), number)
    bounds = [*starts.values(), stream.total_entries]
    return [
        RangeSum(first, end, xxhash.xxh3_128_digest(entries(stream, first, end)))
        for first, end in pairwise(bounds)
    ]


def answer(stream: DataStream, sums: list[RangeSum], tail: RangeSum = NO_SUM) -> bytes:
    return OK + SumsFound(stream.stream_id, stream.epoch, tuple(sums), tail).pack()


def damage(stream: DataStream, number: int) -> None:
    """Change a bit of an entry's data, in the page cache."""
    offset = stream.reader.cursor(number).offset + 20
    fd = os.open(stream.path, os.O_RDWR)
    try:
        os.pwrite(fd, bytes([os.pread(fd, 1, offset)[0] ^ 4]), offset)
    finally:
        os.close(fd)


@pytest.fixture
def pages(stream: DataStream) -> DataStream:
    """A stream of three whole pages and a bit."""
    commit(stream, 4500, 700)
    assert len(pages_of(stream)) == 4
    return stream


@everywhere
async def test_checksums(pages: DataStream, serve: Open) -> None:
    async with serve(pages) as rig, rig.client() as peer:
        for _ in range(2):
            sums = pages_of(pages)
            for at, (first, end, _) in enumerate(sums):
                for number in (first, (first + end) // 2, end - 1):
                    await peer.ask(ask(number), answer(pages, sums[at:3], sums[3]))
            await peer.ask(ask(pages.total_entries), answer(pages, [], sums[3]))
            await peer.ask(ask(0, 2), answer(pages, sums[:2]))
            await peer.ask(ask(0, 3), answer(pages, sums[:3], sums[3]))
            await peer.ask(ask(sums[1].first, 2**32 - 1), answer(pages, sums[1:3], sums[3]))
            for number in (pages.total_entries + 1, 2**64 - 1):
                await peer.ask(ask(number), model.result(3))
            pages.update_entry(7, 1, b"new" * 233 + b"!")
        assert rig.server.counts.commands["page_sums"] == 2 * 18
        # Several at once, and between other questions.
        several = ask(0, 1) + model.header() + ask(0)
        sums = pages_of(pages)
        header = OK + pages.header.pack()
        expected = answer(pages, sums[:1]) + header + answer(pages, sums[:3], sums[3])
        await peer.ask(several, expected)
        await peer.ask(model.start(pages.total_entries), OK)
        await peer.ask(ask(0), model.result(1))


async def test_the_answer_follows_commits_and_truncations(pages: DataStream) -> None:
    async with over_loopback(pages) as rig, rig.client() as peer:
        for change in (
            lambda: commit(pages, 1),
            lambda: commit(pages, 3000, 600),
            lambda: pages.truncate(2000),
            lambda: commit(pages, 10),
            lambda: pages.truncate(1),
            lambda: pages.truncate(0),
        ):
            change()
            sums = pages_of(pages)
            tail = sums[-1] if sums else NO_SUM
            await peer.ask(ask(0), answer(pages, sums[:-1], tail))


async def test_the_server_has_a_limit(pages: DataStream, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(change_reports, "MAX_SUMS_PAGES", 2)
    async with in_memory(pages) as rig, rig.client() as peer:
        sums = pages_of(pages)
        for most in (0, 2, 3, 2**32 - 1):
            await peer.ask(ask(0, most), answer(pages, sums[:2]))


@pytest.fixture
def reread(pages: DataStream, path: Path) -> Iterator[DataStream]:
    """The same for a server of a file that another process writes."""
    with DataStream.open(path, follow=True, index="memory") as follower:
        yield follower


async def test_a_follower_reads_the_sidecar(pages: DataStream, reread: DataStream) -> None:
    async with over_loopback(reread) as rig, rig.client() as peer:
        for _ in range(3):
            sums = pages_of(pages)
            await peer.ask(ask(0), answer(pages, sums[:-1], sums[-1]))
            await peer.ask(ask(sums[1].first + 1, 1), answer(pages, sums[1:2]))
            commit(pages, 1600, 800)


async def test_only_consecutive_records_that_can_be_relied_on(
    pages: DataStream, reread: DataStream, path: Path
) -> None:
    sums = pages_of(pages)
    sidecar = path.with_name(path.name + ".sums")
    whole = sidecar.read_bytes()
    async with over_loopback(reread) as rig, rig.client() as peer:
        torn = bytearray(whole)
        torn[512 + 64 + 20] ^= 1  # of page 1
        sidecar.write_bytes(torn)
        await peer.ask(ask(0), answer(pages, sums[:1]))
        await peer.ask(ask(sums[1].first), answer(pages, []))
        # The first entry of page 2 is known from the stream itself.
        await peer.ask(ask(sums[2].first), answer(pages, sums[2:3], sums[3]))
        sidecar.write_bytes(whole[:512])
        await peer.ask(ask(0), answer(pages, []))
        await peer.ask(ask(sums[3].first), answer(pages, [], sums[3]))


async def test_a_file_without_checksums(stream: DataStream, path: Path) -> None:
    """Another program wrote the header last: nothing can be relied on."""
    commit(stream, 4500, 700)
    stream.close()
    content = bytearray(path.read_bytes())
    content[64:4096] = bytes(4096 - 64)
    path.write_bytes(content)
    with DataStream.open(path, follow=True, index="memory") as follower:
        async with over_loopback(follower) as rig, rig.client() as peer:
            nothing = OK + SumsFound(bytes(16), 0, ()).pack()
            await peer.ask(ask(0), nothing)
            await peer.ask(ask(4500), nothing)


# Damage.


async def refused(peer: Peer, request: bytes, page: int, first: int, end: int) -> None:
    await peer.send(request)
    what = f"page {page} (entries {first} to {end - 1}): the entries do not match their checksum"
    due = encode_refusal(27, f"at byte {FIRST + page * PAGE}: {what}")
    assert await peer.read(len(due)) == due


@pytest.mark.parametrize("follow", [False, True])
async def test_a_damaged_page_gets_no_hash(
    pages: DataStream, reread: DataStream, follow: bool
) -> None:
    sums = pages_of(pages)
    served = reread if follow else pages
    async with over_loopback(served) as rig, rig.client() as peer:
        for page in (1, 3):
            first, end, _ = sums[page]
            good = {at: entries(pages, *sums[at][:2]) for at in range(4) if at != page}
            damage(pages, first + 3)
            for request in (
                hashed(pages, first, end),
                hashed(pages, first + 3, first + 4),
                hashed(pages, end - 1, end),  # another entry of the page
                hashed(pages, 0, 4500),
            ):
                await refused(peer, request, page, first, end)
            # The others have one, and the page's checksum is what it was.
            for at, content in good.items():
                digest = xxhash.xxh3_128_digest(content)
                whole = RangeHash(*sums[at][:2], 0, digest).pack()
                await peer.ask(hashed(pages, *sums[at][:2]), OK + whole)
            await peer.ask(ask(0), answer(pages, sums[:3], sums[3]))
            damage(pages, first + 3)
        assert rig.server.counts.errors["damaged"] == 8


async def test_damage_does_not_hide_checksums(pages: DataStream) -> None:
    """The head of an entry, from which pages are found: records say which page holds it."""
    sums = pages_of(pages)
    with DataStream.open(pages.path, follow=True, index="memory") as follower:
        for page in (1, 2, 3):
            fd = os.open(pages.path, os.O_RDWR)
            os.pwrite(fd, b"\xff" * 8, FIRST + page * PAGE + 9)
            os.close(fd)
        async with over_loopback(follower) as rig, rig.client() as peer:
            await peer.ask(ask(sums[1].first + 1), answer(pages, sums[1:3], sums[3]))
            await peer.ask(ask(0), answer(pages, sums[:3], sums[3]))
