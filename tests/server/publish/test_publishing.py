"""Publishing, the server's side: exact bytes in, exact bytes out."""

from __future__ import annotations

import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing
from trio.testing import MockClock

from datastreamer.errors import DamagedHeader, LeaseHeld, UsageError
from datastreamer.format import COMMAND_PUBLISH_ROLLBACK
from datastreamer.protocol.publish.messages import (
    ANY_EPOCH,
    PublishQuery,
    encode_publish,
    encode_where,
)
from datastreamer.server.publish.policy import Publishing
from datastreamer.server.server import Server
from datastreamer.storage.header.records import (
    SOURCE_OFFSETS,
    PublisherRecord,
    get_sources,
    put_source,
)
from datastreamer.storage.stream import DataStream
from tests.network import model as wire
from tests.network.fixtures import PATIENCE, Peer, Rig, append
from tests.network.stream_transport import StreamTransport
from tests.storage.write.test_publisher_epoch import flip

TOKEN = b"a token"
ONE, TWO = b"1" * 16, b"2" * 16
OK = wire.OK
ROLLBACK = struct.pack(">QQ", COMMAND_PUBLISH_ROLLBACK, 1)


@pytest.fixture
def token_file(tmp_path: Path) -> Path:
    path = tmp_path / "token"
    path.write_bytes(b"another\n" + TOKEN + b"\n")
    path.chmod(0o600)
    return path


@asynccontextmanager
async def publishable(stream: DataStream, token_file: Path, **terms: Any) -> AsyncIterator[Rig]:
    """A server in memory that takes publishers with `TOKEN`."""
    server = Server(stream, publishing=Publishing(token_file=token_file, **terms))
    # (A clock that a test moves by itself makes it impatient.)
    with trio.fail_after(1000 * PATIENCE):
        async with trio.open_nursery() as nursery:
            await nursery.start(server.run, [])

            async def connect() -> Peer:
                ours, theirs = trio.testing.memory_stream_pair()
                nursery.start_soon(server.handle, StreamTransport(theirs))
                return Peer(ours)

            yield Rig(server, connect)
            nursery.cancel_scope.cancel()
    assert not server.sessions
    if not stream.closed:
        with stream.atomic_op():
            pass  # no publisher holds it any more


def publish(source: bytes = ONE, epoch: int = 0, token: bytes = TOKEN, lease_ms: int = 0) -> bytes:
    return encode_publish(1, PublishQuery(source, epoch, lease_ms, token))


def entry(number: int, data: bytes, kind: int = 3) -> bytes:
    return struct.pack(">BIIQ", 2, 17 + len(data), kind, number) + data


def add(first: int, *entries: bytes) -> bytes:
    packed = b"".join(entries)
    return struct.pack(">QQQI", 0x1011, 1, first, len(packed)) + packed


def commit(first: int, count: int, *entries: bytes) -> bytes:
    packed = b"".join(entries)
    return struct.pack(">QQQII", 0x1012, 1, first, count, len(packed)) + packed


def receipt(first: int, count: int, total: int) -> bytes:
    return OK + struct.pack(">BIQIQ", 0xF9, 25, first, count, total)


async def lease_of(peer: Peer) -> tuple[int, int, bytes, int, int, int, int]:
    """(epoch, total entries, stream id, lease, most bytes, most underway, largest operation)."""
    await peer.expect(OK)
    packet = await peer.packet()
    assert packet[:5] == struct.pack(">BI", 0xF8, 57), packet
    found: tuple[int, int, bytes, int, int, int, int] = struct.unpack(">QQ16sIIIQ", packet[5:])
    return found


async def refusal(peer: Peer) -> tuple[int, str]:
    packet = await peer.packet()
    kind, _, number = struct.unpack_from(">BII", packet)
    assert kind == 0xFF
    return number, packet[9:].decode()


def contents(stream: DataStream) -> list[tuple[int, bytes]]:
    stream.sync()
    return [(e.type, e.data) for e in stream.entries()]


async def test_an_operation_is_acknowledged_and_there(stream: DataStream, token_file: Path) -> None:
    async with publishable(stream, token_file) as rig, rig.client() as peer:
        await peer.send(publish(lease_ms=5000))
        found = await lease_of(peer)
        assert found == (1, 0, stream.stream_id, 5000, 1 << 20, 4096, 1 << 30)
        await peer.send(commit(0, 2, entry(0, b"key", 0xB0), entry(1, b"one")))
        await peer.expect(receipt(0, 2, 2))
        assert contents(stream) == [(0xB0, b"key"), (3, b"one")]
        assert stream.bookmark(b"key") == 0
        await peer.send(encode_where(1))
        await peer.expect(receipt(2, 0, 2))
        await peer.send(add(2, entry(2, b"two")) + ROLLBACK + encode_where(1))
        await peer.expect(OK + receipt(2, 0, 2))
        await peer.send_bytewise(add(2, entry(2, b"2")) + commit(2, 2, entry(3, b"3")))
        await peer.expect(receipt(2, 2, 4))
        # Sent again, in two other pieces, and an empty one.
        await peer.send(commit(1, 3, entry(1, b"one"), entry(2, b"2"), entry(3, b"3")))
        await peer.expect(receipt(1, 3, 4))
        await peer.ask(commit(4, 0), receipt(4, 0, 4))
        assert rig.server.counts.published_operations == 3
        assert rig.server.counts.published_again == 1
        assert stream.total_entries == 4


async def test_a_wrong_token_learns_nothing(stream: DataStream, token_file: Path) -> None:
    """The same answer whatever is wrong, and whichever publisher holds the lease."""
    reported = set()
    async with publishable(stream, token_file) as rig:
        for held in (False, True):
            async with rig.client() as holder:
                if held:
                    await holder.send(publish(ONE, 7))
                    await lease_of(holder)
                for query in (
                    publish(token=b""),
                    publish(token=b"another "),
                    publish(TWO, 1, TOKEN + b"x"),
                    publish(TWO, 99, b"\x00" * 1024),
                ):
                    async with rig.client() as peer:
                        began = trio.current_time()
                        await peer.send(query)
                        reported.add(await refusal(peer))
                        assert trio.current_time() - began >= 0.5
                        await peer.ended()
        assert rig.server.publish_lease is not None
        assert rig.server.publish_lease.last.epoch == 7
        async with rig.client() as peer:
            await peer.send(publish(TWO, token=b"another"))
            await lease_of(peer)
    [(number, text)] = reported
    assert number == 16
    assert text.startswith("Not allowed: ")


async def test_the_token_file_is_read_at_each_try(stream: DataStream, token_file: Path) -> None:
    async with publishable(stream, token_file) as rig:
        token_file.write_bytes(b"new")
        async with rig.client() as peer:
            await peer.send(publish())
            assert (await refusal(peer))[0] == 16
        async with rig.client() as peer:
            await peer.send(publish(token=b"new"))
            await lease_of(peer)
        token_file.unlink()
        async with rig.client() as peer:
            await peer.send(publish(TWO, token=b"new"))
            assert (await refusal(peer))[0] == 16


async def test_terms_that_cannot_be_kept(path: Path, token_file: Path) -> None:
    with pytest.raises(UsageError, match="a token file or the names"):
        Publishing()
    with pytest.raises(UsageError, match="cannot be read"):
        Publishing(token_file=path.with_name("none")).tokens()
    # A file is taken as a whole: the beginning of a token must not do for it.
    token_file.write_bytes((b"t" * 1000 + b"\n") * 1049)
    with pytest.raises(UsageError, match="is larger than 1048576 bytes"):
        Publishing(token_file=token_file).tokens()
    token_file.write_bytes(TOKEN)
    with DataStream.create(path, index="memory") as stream:
        with pytest.raises(UsageError, match="need TLS with a client CA"):
            Server(stream, publishing=Publishing(client_certs=("source",)))
        follower = DataStream.open(path, follow=True, index="memory")
        with follower, pytest.raises(UsageError, match="open for writing"):
            Server(follower, publishing=Publishing(token_file=token_file))
        flip(path, *SOURCE_OFFSETS)
        with pytest.raises(DamagedHeader, match="record of the stream's source is damaged"):
            Server(stream, publishing=Publishing(token_file=token_file))


@pytest.mark.parametrize("copy", [0, 1])
async def test_a_grant_after_one_that_was_cut_off_writes_both_copies(
    path: Path, token_file: Path, copy: int
) -> None:
    """The source asks again for the epoch that one copy has."""
    with DataStream.create(path, index="memory") as stream:
        stream.parts.writer.put_source(PublisherRecord(5, TWO))
        stream_id = stream.stream_id
    page = bytearray(path.read_bytes()[:4096])
    start, end = put_source(page, copy, stream_id, PublisherRecord(6, ONE))
    with path.open("r+b") as file:
        file.seek(start)
        file.write(page[start:end])
    with DataStream.open(path, index="memory") as stream:
        async with publishable(stream, token_file) as rig, rig.client() as peer:
            await peer.send(publish(ONE, 6))
            assert (await lease_of(peer))[0] == 6
            kept = get_sources(path.read_bytes()[:4096])
    assert kept == [(stream_id, PublisherRecord(6, ONE))] * 2


async def test_a_server_without_terms_does_not_know_the_command(stream: DataStream) -> None:
    server = Server(stream)
    with trio.fail_after(PATIENCE):
        async with trio.open_nursery() as nursery:
            await nursery.start(server.run, [])
            ours, theirs = trio.testing.memory_stream_pair()
            nursery.start_soon(server.handle, StreamTransport(theirs))
            peer = Peer(ours)
            for command in range(0x1010, 0x1015):
                await peer.ask(struct.pack(">QQ", command, 1), wire.result(9))
            await peer.close()
            nursery.cancel_scope.cancel()


async def test_one_source_at_a_time(stream: DataStream, token_file: Path) -> None:
    async with publishable(stream, token_file) as rig, rig.client() as first:
        await first.send(publish(ONE))
        assert (await lease_of(first))[0] == 1
        async with rig.client() as second:
            await second.send(publish(TWO))
            assert await refusal(second) == (
                17,
                "Another source holds the lease: its epoch is 1",
            )
            await second.ended()
        async with rig.client() as second:
            await second.send(publish(TWO, 1))
            assert await refusal(second) == (
                18,
                "Fenced: epoch 1 has ended; the last publisher has epoch 1",
            )
        # The first was not disturbed by any of it.
        await first.ask(commit(0, 1, entry(0, b"x")), receipt(0, 1, 1))
        # When it has left, the next is welcome, with the next epoch.
        await first.close()
        async with rig.client() as second:
            while (
                rig.server.publish_lease is not None and rig.server.publish_lease.holder is not None
            ):
                await trio.testing.wait_all_tasks_blocked()
            await second.send(publish(TWO))
            assert (await lease_of(second))[:2] == (2, 1)


@pytest.mark.parametrize("epoch", [5, 2**64 - 1])
async def test_who_is_fenced_hears_so_and_commits_no_more(
    stream: DataStream, token_file: Path, epoch: int
) -> None:
    async with publishable(stream, token_file) as rig, rig.client() as first:
        await first.send(publish(ONE))
        await lease_of(first)
        await first.ask(commit(0, 1, entry(0, b"x")), receipt(0, 1, 1))
        await first.send(add(1, entry(1, b"of an open operation")))
        async with rig.client() as second:
            await second.send(publish(TWO, epoch))
            granted = await lease_of(second)
            assert granted[:2] == (5 if epoch == 5 else 2, 1)
            await first.send(commit(1, 1))
            assert await refusal(first) == (
                18,
                f"Fenced: another publisher has the lease, with epoch {granted[0]}",
            )
            await second.ask(commit(1, 1, entry(1, b"y")), receipt(1, 1, 2))
            assert contents(stream) == [(3, b"x"), (3, b"y")]
        async with rig.client() as again:
            await again.send(publish(ONE, 1))
            assert (await refusal(again))[0] == 18


async def test_a_source_comes_back_with_its_epoch(stream: DataStream, token_file: Path) -> None:
    """Its older connection is over, whether it knows that or not."""
    async with publishable(stream, token_file) as rig, rig.client() as first:
        await first.send(publish(ONE))
        await lease_of(first)
        await first.send(add(0, entry(0, b"never committed")))
        async with rig.client() as second:
            await second.send(publish(ONE, 1))
            assert (await lease_of(second))[:2] == (1, 0)
            number, text = await refusal(first)
            assert (number, "this publisher, on another connection" in text) == (18, True)
            await second.ask(commit(0, 1, entry(0, b"x")), receipt(0, 1, 1))


async def test_epochs_outlive_the_server(path: Path, token_file: Path) -> None:
    for turn in range(3):
        with DataStream.open_or_create(path, index="memory") as stream:
            async with publishable(stream, token_file) as rig:
                async with rig.client() as peer:
                    await peer.send(publish(TWO, 10 * turn))
                    assert (await lease_of(peer))[0] == (10 * turn or 1)
                async with rig.client() as peer:
                    await peer.send(publish(ONE, 10 * turn or 1))
                    assert (await refusal(peer))[0] == 18
    with DataStream.open(path, index="memory") as stream:
        async with publishable(stream, token_file) as rig, rig.client() as peer:
            await peer.send(publish(ONE, 20))
            assert (await refusal(peer))[0] == 18


async def test_behind_the_last_epoch_to_ask_for_there_are_others(
    stream: DataStream, token_file: Path
) -> None:
    """Who got one of these comes back with it, as with any."""
    most = (1 << 63) - 1
    async with publishable(stream, token_file) as rig:
        for source, asked, got in (
            (ONE, most, most),
            (TWO, ANY_EPOCH, most + 1),
            (TWO, most + 1, most + 1),
            (ONE, ANY_EPOCH, most + 2),
            (ONE, most + 2, most + 2),
        ):
            async with rig.client() as peer:
                await peer.send(publish(source, asked))
                assert (await lease_of(peer))[0] == got
        for epoch, number in ((most, 18), (most + 1, 18), (most + 3, 22)):
            async with rig.client() as peer:
                await peer.send(publish(TWO, epoch))
                assert (await refusal(peer))[0] == number


async def test_this_process_does_not_write_meanwhile(stream: DataStream, token_file: Path) -> None:
    append(stream, (3, b"local"))
    async with publishable(stream, token_file) as rig:
        stream.start_atomic_op()
        async with rig.client() as peer:
            await peer.send(publish(ONE))
            assert (await refusal(peer))[0] == 17
        stream.rollback_atomic_op()
        async with rig.client() as peer:
            await peer.send(publish(ONE))
            await lease_of(peer)
            for write in (
                stream.start_atomic_op,
                lambda: stream.truncate(0),
                lambda: stream.update_entry(0, 3, b"LOCAL"),
                lambda: stream.parts.writer.lend(object()),
            ):
                with pytest.raises(LeaseHeld, match="publisher holds the lease"):
                    write()
            await peer.ask(commit(1, 1, entry(1, b"x")), receipt(1, 1, 2))
        while rig.server.publish_lease is not None and rig.server.publish_lease.holder is not None:
            await trio.testing.wait_all_tasks_blocked()
        append(stream, (3, b"local again"))
    assert [data for _, data in contents(stream)] == [b"local", b"x", b"local again"]


# Operations that are refused.

BAD = {
    "a number out of step": commit(1, 1, entry(2, b"x")),
    "half an entry": commit(1, 1, entry(1, b"x")[:-1]),
    "bytes behind": commit(1, 1, entry(1, b"x") + b"\x00"),
    "another packet type": commit(1, 1, b"\x01" + entry(1, b"x")[1:]),
    "a bookmark without a key": commit(1, 1, entry(1, b"", 0xB0)),
    "a bookmark with a long key": commit(1, 1, entry(1, b"x" * 17, 0xB0)),
    "a count that is too high": commit(1, 2, entry(1, b"x")),
    "a count that is too low": commit(1, 0, entry(1, b"x")),
    "a count over two requests": add(1, entry(1, b"x")) + commit(1, 1, entry(2, b"y")),
    "another operation": add(1, entry(1, b"x")) + commit(2, 1, entry(2, b"y")),
    "no command": struct.pack(">QQ", 0x1015, 1),
    "a second request for the lease": publish(TWO),
    "another stream type": struct.pack(">QQ", 0x1014, 2),
}


@pytest.mark.parametrize("what", BAD)
async def test_a_bad_operation_ends_the_connection(
    stream: DataStream, token_file: Path, what: str
) -> None:
    append(stream, (3, b"first"))
    async with publishable(stream, token_file) as rig, rig.client() as peer:
        await peer.send(publish(ONE))
        await lease_of(peer)
        # What follows it is not read any more.
        await peer.send(BAD[what] + commit(1, 1, entry(1, b"x")))
        number, text = await refusal(peer)
        assert (number, text[:15]) == (22, "Bad operation: ")
        await peer.ended()
    assert contents(stream) == [(3, b"first")]


async def test_before_the_lease_nothing_is_taken(stream: DataStream, token_file: Path) -> None:
    async with publishable(stream, token_file) as rig:
        for request in (add(0), commit(0, 0), ROLLBACK, encode_where(1)):
            async with rig.client() as peer:
                await peer.send(request)
                assert await refusal(peer) == (19, "No lease: request the lease first")
                await peer.ended()
        for query in (
            struct.pack(">QQIQ16sII", 0x1010, 1, 2, 0, ONE, 0, 0),
            struct.pack(">QQIQ16sII", 0x1010, 1, 1, 0, ONE, 0, 1025),
            struct.pack(">QQIQ16sII", 0x1010, 1, 1, 0, bytes(16), 0, 0),
        ):
            async with rig.client() as peer:
                await peer.send(query)
                assert (await refusal(peer))[0] == 22


async def test_what_is_at_its_place(stream: DataStream, token_file: Path) -> None:
    append(stream, (3, b"a"), (3, b"b"), (0xB0, b"key"), (4, b"c" * 900_000))
    append(stream, (4, b"d" * 900_000), (3, b"e"))
    large = [entry(3, b"c" * 900_000, 4), entry(4, b"d" * 900_000, 4)]
    async with publishable(stream, token_file) as rig, rig.client() as peer:
        await peer.send(publish(ONE))
        await lease_of(peer)
        await peer.ask(commit(0, 2, entry(0, b"a"), entry(1, b"b")), receipt(0, 2, 6))
        # Over two pages, with padding between.
        await peer.send(add(2, entry(2, b"key", 0xB0)) + add(2, large[0]) + add(2, large[1]))
        await peer.ask(commit(2, 4, entry(5, b"e")), receipt(2, 4, 6))
        for other in (
            commit(1, 1, entry(1, b"B")),
            commit(1, 1, entry(1, b"b", 4)),
            commit(1, 1, entry(1, b"bb")),
            commit(5, 2, entry(5, b"e"), entry(6, b"f")),
            add(2, entry(2, b"key", 0xB0))
            + add(2, large[1][:9] + large[0][9:17] + bytes(900_000))
            + commit(2, 2),
        ):
            await peer.send(other)
            number, text = await refusal(peer)
            assert (number, text[:15]) == (21, "Other entries: ")
        await peer.send(commit(7, 1, entry(7, b"x")) + encode_where(1))
        assert await refusal(peer) == (
            20,
            "Past the end: the operation begins with entry 7; the next entry is 6",
        )
        await peer.expect(receipt(6, 0, 6))
        await peer.ask(commit(6, 1, entry(6, b"f")), receipt(6, 1, 7))


async def test_too_large(stream: DataStream, token_file: Path) -> None:
    async with (
        publishable(stream, token_file, max_operation_bytes=100) as rig,
        rig.client() as peer,
    ):
        await peer.send(publish(ONE))
        assert (await lease_of(peer))[6] == 100
        fits, more = entry(0, bytes(83)), entry(1, b"")
        await peer.send(add(0, fits) + add(0, more) + add(0, entry(2, b"")) + commit(0, 3))
        assert await refusal(peer) == (
            23,
            "Too large: an operation of more than 100 bytes of entries",
        )
        await peer.send(commit(0, 2, fits, more))
        assert (await refusal(peer))[0] == 23
        # Also where it comes together with others that are not.
        small = commit(0, 1, entry(0, b""))
        await peer.send(small + commit(1, 1, entry(1, bytes(84))) + commit(1, 1, more))
        assert (await peer.read(36))[16:28] == struct.pack(">QI", 0, 1)
        assert (await refusal(peer))[0] == 23
        assert (await peer.read(36))[16:28] == struct.pack(">QI", 1, 1)
        await peer.send(struct.pack(">QQQI", 0x1011, 1, 2, (1 << 20) + 1))
        assert (await refusal(peer))[0] == 23
        await peer.ended()


async def test_one_of_many_that_come_together(stream: DataStream, token_file: Path) -> None:
    """Those before it are there, and those behind it begin past the end."""
    async with publishable(stream, token_file) as rig, rig.client() as peer:
        await peer.send(publish(ONE))
        await lease_of(peer)
        good = [commit(n, 1, entry(n, b"x")) for n in range(300)]
        await peer.send(b"".join(good))
        await peer.expect(b"".join(receipt(n, 1, 300) for n in range(300))[:36])
        got = [await peer.read(36) for _ in range(299)]
        assert [each[16:28] for each in got] == [struct.pack(">QI", n, 1) for n in range(1, 300)]
        await peer.send(commit(300, 1, entry(300, b"y")) + commit(302, 1, entry(302, b"z")))
        await peer.expect(receipt(300, 1, 301))
        assert (await refusal(peer))[0] == 20
        await peer.send(commit(301, 0) + commit(301, 2, entry(301, b"1"), entry(302, b"2")))
        assert (await peer.read(36))[16:28] == struct.pack(">QI", 301, 0)
        await peer.expect(receipt(301, 2, 303))
        assert stream.total_entries == 303


# Time.


async def test_who_says_nothing_loses_the_lease(
    stream: DataStream, token_file: Path, mock_clock: MockClock
) -> None:
    async with publishable(stream, token_file) as rig, rig.client() as peer:
        await peer.send(publish(ONE, lease_ms=9000))
        await lease_of(peer)
        for _ in range(5):
            mock_clock.jump(8.5)
            await peer.ask(encode_where(1), receipt(0, 0, 0))
            await trio.testing.wait_all_tasks_blocked()
        mock_clock.jump(9.5)
        assert await refusal(peer) == (19, "No lease: nothing was received for 9 s")
        await peer.ended()
        async with rig.client() as second:
            await second.send(publish(TWO))
            await lease_of(second)


async def _jump_on(clock: MockClock) -> None:
    while True:
        await trio.testing.wait_all_tasks_blocked(0.01)
        clock.jump(1)


async def test_an_operation_does_not_stay_open(
    stream: DataStream, token_file: Path, mock_clock: MockClock
) -> None:
    """Neither by keeping the lease, nor by sending it byte by byte."""
    slow = add(0, entry(0, b"never committed"))
    for pieces in ([slow, encode_where(1), encode_where(1)], [slow[:5], slow[5:6], slow[6:7]]):
        async with (
            publishable(stream, token_file, operation_timeout=20, lease=600) as rig,
            rig.client() as peer,
            trio.open_nursery() as nursery,
        ):
            await peer.send(publish(ONE))
            await lease_of(peer)
            for piece in pieces:
                await peer.send(piece)
                await trio.testing.wait_all_tasks_blocked(0.01)
                mock_clock.jump(9)
            if pieces[0] is slow:
                await peer.expect(receipt(0, 0, 0) * 2)
            # The operation began when the server had its first byte, which may be later.
            nursery.start_soon(_jump_on, mock_clock)
            number, text = await refusal(peer)
            assert (number, text) == (26, "Too slow: the operation was open for 20 s")
            await peer.ended()
            nursery.cancel_scope.cancel()
    assert contents(stream) == []


async def test_the_end_of_the_server(stream: DataStream, token_file: Path) -> None:
    """What was committed is acknowledged, what is open is rolled back."""
    async with publishable(stream, token_file) as rig, rig.client() as peer:
        await peer.send(publish(ONE))
        await lease_of(peer)
        await peer.send(commit(0, 1, entry(0, b"x")) + add(1, entry(1, b"y")))
        await peer.expect(receipt(0, 1, 1))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(rig.server.finish)
            await peer.ended()
            await peer.close()
    assert contents(stream) == [(3, b"x")]


@pytest.mark.parametrize(
    "bad",
    [
        commit(1, 2, entry(1, b"x")) + commit(3, 0, entry(2, b"y")),
        commit(1, 0, entry(1, b"x")) + commit(1, 1),
        commit(1, 1, entry(1, b"x" * 17, 0xB0)),
        commit(1, 1, entry(1, b"x")[:5]) + commit(2, 0, entry(1, b"x")[5:]),
    ],
    ids=["a count too high", "a count too low", "a bad bookmark", "an entry over two operations"],
)
async def test_a_bad_operation_among_others(
    stream: DataStream, token_file: Path, bad: bytes
) -> None:
    """Those before it are there, also where it comes out even with the one behind it."""
    async with publishable(stream, token_file) as rig, rig.client() as peer:
        await peer.send(publish(ONE))
        await lease_of(peer)
        await peer.send(commit(0, 1, entry(0, b"good")) + bad)
        await peer.expect(receipt(0, 1, 1))
        assert (await refusal(peer))[0] == 22
        await peer.ended()
    assert contents(stream) == [(3, b"good")]
