"""Serving copies of a stream: reports of changes between entries, and hashes of ranges."""

from __future__ import annotations

import contextlib
import struct
from pathlib import Path

import pytest
import trio
import xxhash
from trio.testing import wait_all_tasks_blocked

from datastreamer.protocol.commands import (
    FollowStart,
    HashQuery,
    KnownHistory,
    Stop,
    encode_command,
)
from datastreamer.protocol.following import (
    FollowBegun,
    RangeHash,
    Reports,
    encode_truncation,
    encode_update,
)
from datastreamer.protocol.messages import OK, encode_commit
from datastreamer.server.streaming import change_reports as following
from datastreamer.storage.read import file as storage_file
from datastreamer.storage.read.range_sums import hash_range
from datastreamer.storage.read.reader import Reader, truncated_below
from datastreamer.storage.stream import DataStream
from tests.network import model
from tests.network.fixtures import Open, half_sent, in_memory, over_loopback, over_unix
from tests.server.streaming.test_commit_reports import commit, entries, over

STOP = encode_command(Stop(), 1)
everywhere = pytest.mark.parametrize("serve", [in_memory, over_loopback, over_unix])


def follow(stream: DataStream, number: int, epoch: int, stream_id: bytes = b"") -> bytes:
    return encode_command(
        FollowStart(number, KnownHistory(stream_id or stream.stream_id, epoch)), 1
    )


def begun(stream: DataStream, since: int, reports: Reports = Reports.ALL) -> bytes:
    return FollowBegun(reports, stream.stream_id, since, stream.epoch).pack()


def update(stream: DataStream, number: int, byte: int) -> bytes:
    """Update an entry; gives the report of it."""
    entry = stream.entry(number)
    stream.update_entry(number, entry.type, bytes([byte]) * len(entry.data))
    return encode_update(stream.epoch, stream.reader.packed(number))


def truncate(stream: DataStream, number: int) -> bytes:
    stream.truncate(number)
    return encode_truncation(stream.epoch, number)


@everywhere
async def test_changes_are_reported_where_they_come(stream: DataStream, serve: Open) -> None:
    commit(stream, 8)
    async with serve(stream) as rig, rig.client() as peer:
        sent = encode_commit(8) + entries(stream, 0, 8)
        await peer.ask(follow(stream, 0, 0), OK + begun(stream, 0) + sent)
        for number in (0, 7, 7):
            await peer.expect(update(stream, number, 10 * number + stream.epoch))
        commit(stream, 2)
        await peer.expect(encode_commit(10) + entries(stream, 8, 10))
        await peer.ask(STOP, OK)
        # Nothing is reported to a client that does not follow any more; the next start says it.
        reports = update(stream, 1, 91) + update(stream, 2, 92)
        await peer.ask(model.header(), OK + stream.header.pack())
        await peer.ask(follow(stream, 10, 3), OK + begun(stream, 3) + reports)
        await peer.expect(update(stream, 1, 93))
        await peer.nothing_more()


@everywhere
async def test_what_a_server_can_say_of_the_past(stream: DataStream, serve: Open) -> None:
    commit(stream, 40)
    reports = [update(stream, number, number) for number in range(20)]
    assert stream.epoch == 20
    async with serve(stream) as rig, rig.client() as peer:
        for since in (0, 3, 19, 20):
            seen = b"".join(reports[since:])
            await peer.ask(follow(stream, 40, since), OK + begun(stream, since) + seen)
            await peer.ask(STOP, OK)
        unknown = OK + begun(stream, 20, Reports.UNKNOWN)
        await peer.ask(follow(stream, 40, 21), unknown)
        await peer.ask(STOP, OK)
        await peer.ask(follow(stream, 40, 20, b"another's id 16."), unknown)
        await peer.expect(update(stream, 4, 77))
        await peer.ask(STOP, OK)
        await peer.ask(follow(stream, 41, 20), model.result(3))


async def test_a_file_that_is_opened_again_knows_the_last_changes(path: Path) -> None:
    with DataStream.create(path, sync="os", index="memory") as stream:
        commit(stream, 40)
        reports = [update(stream, number, number) for number in range(20)]
    with DataStream.open(path, index="memory") as stream:
        async with in_memory(stream) as rig, rig.client() as peer:
            expected = OK + begun(stream, 4) + b"".join(reports[4:])
            await peer.ask(follow(stream, 40, 4), expected)
            await peer.ask(STOP, OK)
            expected = OK + begun(stream, 20, Reports.UNKNOWN)
            await peer.ask(follow(stream, 40, 3), expected)


async def test_a_follower_of_the_file_reports_the_same(path: Path) -> None:
    with (
        DataStream.create(path, sync="os", index="memory") as stream,
        DataStream.open(path, follow=True, index="memory") as follower,
    ):
        commit(stream, 40)
        report = update(stream, 3, 3)
        async with in_memory(follower) as rig, rig.client() as peer:
            await peer.ask(follow(stream, 40, 0), OK + begun(stream, 0) + report)
            for number in range(20):
                await peer.expect(update(stream, number, number + 100))
            await peer.ask(STOP, OK)
            commit(stream, 1)
            report = truncate(stream, 40) + update(stream, 39, 39)
            await peer.ask(follow(stream, 40, 21), OK + begun(stream, 21) + report)


async def test_an_updated_entry_that_was_truncated_later(stream: DataStream) -> None:
    commit(stream, 40)
    update(stream, 39, 1)
    report = truncate(stream, 30)
    async with in_memory(stream) as rig, rig.client() as peer:
        await peer.ask(follow(stream, 30, 0), OK + begun(stream, 0) + report)
        await peer.expect(update(stream, 29, 2))


async def test_a_file_from_elsewhere_reports_nothing(stream: DataStream) -> None:
    commit(stream, 4)
    with contextlib.suppress(AttributeError):
        stream._file.stream_id = bytes(16)
    async with in_memory(stream) as rig, rig.client() as peer:
        never = FollowBegun(Reports.NEVER, bytes(16), 0, 0).pack()
        await peer.ask(follow(stream, 4, 0), OK + never)
        update(stream, 1, 1)
        commit(stream, 1)
        await peer.expect(encode_commit(5) + entries(stream, 4, 5))


@everywhere
async def test_a_truncation_of_what_was_not_promised(stream: DataStream, serve: Open) -> None:
    """An update of an entry that went by it is no report of its own."""
    commit(stream, 8)
    async with serve(stream) as rig, rig.client() as peer:
        await peer.ask(follow(stream, 4, 0), OK + begun(stream, 0) + encode_commit(8))
        await peer.expect(entries(stream, 4, 8))
        commit(stream, 3)
        await peer.expect(encode_commit(11) + entries(stream, 8, 11))
        await peer.ask(STOP, OK)
        await wait_all_tasks_blocked()
        update(stream, 9, 9)
        reports = update(stream, 1, 1) + truncate(stream, 9)
        commit(stream, 2)
        reports += update(stream, 9, 99)
        await peer.ask(follow(stream, 8, 0), OK + begun(stream, 0) + reports)
        await peer.expect(encode_commit(11) + entries(stream, 8, 11))
        stream.truncate(10)
        await over(peer)


async def test_more_changes_than_are_known(
    stream: DataStream, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client that does not keep up is ended; then it hears that anything may have changed."""
    commit(stream, 40)
    commit(stream, 4, 1_000_000)
    stream._file.known_changes = type(stream._file.known_changes)(maxlen=4)
    assert storage_file._KNOWN_CHANGES > 1000
    async with over_loopback(stream, receive_buffer=4096) as rig, rig.client() as peer:
        await peer.ask(follow(stream, 0, 0), OK + begun(stream, 0))
        await half_sent(rig.server)
        for number in range(20):
            update(stream, number, number)
        await over(peer)
    async with in_memory(stream) as rig, rig.client() as peer:
        expected = OK + begun(stream, 20, Reports.UNKNOWN)
        await peer.ask(follow(stream, 44, 3), expected)


async def test_reports_do_not_fall_into_an_entry(stream: DataStream) -> None:
    """To a client that is slow; what comes behind a report is from after the change."""
    commit(stream, 4, 1_000_000)
    async with over_loopback(stream, receive_buffer=4096) as rig, rig.client() as peer:
        first = entries(stream, 0, 1)
        await peer.ask(follow(stream, 0, 0), OK + begun(stream, 0) + encode_commit(4))
        await half_sent(rig.server)
        reports = update(stream, 3, 33)
        await peer.expect(first)
        rest = await peer.read(len(reports) + len(entries(stream, 1, 4)))
        at = rest.find(reports[:29])
        packed = entries(stream, 1, 4)
        assert rest == packed[:at] + reports + packed[at:]
        assert at in (0, len(first), 2 * len(first))


async def test_many_large_reports_come_in_parts(
    stream: DataStream, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(following, "_REPORT_BYTES", 1)
    commit(stream, 10, 100_000)
    async with in_memory(stream) as rig, rig.client() as peer:
        reports = b"".join([update(stream, number, number + 50) for number in range(10)])
        await peer.ask(follow(stream, 10, 0), OK + begun(stream, 0) + reports)


# Hashes.


def hashed(stream: DataStream, first: int, end: int) -> bytes:
    digest = xxhash.xxh3_128_digest(entries(stream, first, end))
    return OK + RangeHash(first, end, stream.epoch, digest).pack()


@everywhere
async def test_hashes_of_ranges(stream: DataStream, serve: Open) -> None:
    commit(stream, 5000, 700)  # across pages
    async with serve(stream) as rig, rig.client() as peer:

        async def ask(first: int, end: int, expected: bytes, most: int = 0) -> None:
            await peer.ask(encode_command(HashQuery(first, end, most), 1), expected)

        for first, end in ((0, 1), (0, 5000), (17, 18), (4999, 5000), (1000, 4000)):
            await ask(first, end, hashed(stream, first, end))
        await ask(10, 9000, hashed(stream, 10, 5000))
        await ask(10, 5000, hashed(stream, 10, 11), 1)
        update(stream, 1500, 1)
        await ask(1000, 4000, hashed(stream, 1000, 4000))
        for first, end in ((5000, 5001), (7, 7), (8, 7), (2**64 - 1, 2**64 - 1)):
            await ask(first, end, model.result(3))
        assert rig.server.counts.commands["range_hash"] == 12
        assert rig.server.counts.hash_seconds > 0
        # Several at once are answered in order, by one thread.
        several = [(0, 100), (50, 60), (100, 5000)]
        await peer.ask(
            b"".join(encode_command(HashQuery(*each), 1) for each in several),
            b"".join(hashed(stream, *each) for each in several),
        )
        await peer.ask(model.start(5000), OK)
        await peer.ask(encode_command(HashQuery(0, 1), 1), model.result(1))


async def test_a_hash_has_a_limit(stream: DataStream, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(following, "MAX_HASH_BYTES", 100_000)
    commit(stream, 2000, 483)
    async with in_memory(stream) as rig, rig.client() as peer:
        for most in (0, 2**32 - 1):
            await peer.send(encode_command(HashQuery(0, 2000, most), 1))
            answer = await peer.read(len(hashed(stream, 0, 1)))
            [end] = struct.unpack_from(">Q", answer, len(OK) + 13)
            assert 200 <= end <= 420
            assert answer == hashed(stream, 0, end)


async def test_a_hash_is_made_again_after_an_update(
    stream: DataStream, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reader takes an update in the middle of a range for a truncation."""
    commit(stream, 3000)
    limits: list[int] = []

    def disturbed(reader: Reader, first: int, end: int, most_bytes: int) -> tuple[int, bytes]:
        limits.append(most_bytes)
        if len(limits) < 3:
            trio.from_thread.run_sync(update, stream, 7, len(limits))
            raise truncated_below(first)
        return hash_range(reader, first, end, most_bytes)

    monkeypatch.setattr(following, "hash_range", disturbed)
    async with over_loopback(stream) as rig, rig.client() as peer:
        await peer.send(encode_command(HashQuery(0, 3000, 1 << 16), 1))
        answer = await peer.read(len(hashed(stream, 0, 1)))
        [end] = struct.unpack_from(">Q", answer, len(OK) + 13)
        assert answer == hashed(stream, 0, end)
        # Each time less is read, so that it comes to an end.
        assert limits == [1 << 16, 1 << 14, 1 << 12]


async def test_hashes_while_entries_change(stream: DataStream) -> None:
    commit(stream, 3000, 1000)
    async with over_loopback(stream) as rig, rig.client() as peer, trio.open_nursery() as nursery:

        async def change() -> None:
            for turn in range(60):
                await trio.to_thread.run_sync(update, stream, turn * 7, turn)

        nursery.start_soon(change)
        while stream.epoch < 60:
            await peer.send(encode_command(HashQuery(0, 3000), 1))
            answer = await peer.read(len(hashed(stream, 0, 1)))
            # Less than all where an update came in the middle.
            end, epoch = struct.unpack_from(">QQ", answer, len(OK) + 13)
            if epoch == stream.epoch and not rig.server.broadcast.turns.changing:
                assert answer == hashed(stream, 0, end)
        await wait_all_tasks_blocked()
        await peer.ask(encode_command(HashQuery(0, 3000), 1), hashed(stream, 0, 3000))
