"""Batches that are received and dealt with in a thread, for a turn."""

from __future__ import annotations

import functools
import socket
from collections.abc import Callable, Iterator
from contextlib import AbstractAsyncContextManager, contextmanager
from pathlib import Path
from typing import Any, cast

import pytest
import trio

from datastreamer._codec import Entry, EntryBatch, scan
from datastreamer.client.bulk_receive import PIECE_BYTES
from datastreamer.client.iteration import Iteration
from datastreamer.errors import ConnectionLost, ProtocolViolation
from datastreamer.protocol.receiving import STREAM_BUFFER
from datastreamer.protocol.resume import Resumable
from datastreamer.relay import writer as keeping
from datastreamer.relay.apply_changes import ChangeApplier
from datastreamer.relay.client import RelayBatches, RelayClient, connect_relay
from datastreamer.transport.trio_channel import SocketChannel
from tests.network.proxy import NONE, End, Fault, FaultyServer
from tests.network.stub import Stub, sample
from tests.relay.relaying import contents, fill, new, nursery_for, relaying, serving


def alone(port: int) -> AbstractAsyncContextManager[RelayClient]:
    return connect_relay("127.0.0.1", port, resume=False)


def nothing() -> None:
    pass


async def pour_on(
    batches: RelayBatches,
    take: Callable[[EntryBatch], object],
    settle: Callable[[], object] = nothing,
) -> None:
    while True:
        await batches.pour(take, settle, 5.0)


async def test_all_comes_in_order_and_a_turn_ends_with_it(tmp_path: Path) -> None:
    taken: list[EntryBatch] = []
    with new(tmp_path / "stream.bin") as stream:
        fill(stream, 20_000, size=500)
        async with nursery_for() as nursery:
            server = await serving(nursery, stream)
            async with alone(server.port) as client, client.batches() as batches:
                taken.append(await batches.__anext__())
                while taken[-1].next_number < 20_000:
                    await batches.pour(taken.append, nothing, 5.0)
                # Nothing is left: a turn ends at once, and the event loop continues.
                await batches.pour(taken.append, nothing, 5.0)
                fill(stream, 10)
                taken.append(await batches.__anext__())
                got = [(e.number, e.type, e.data) for batch in taken for e in batch]
                assert got == contents(stream)[: len(got)]
                assert len(got) > 20_000


async def test_a_turn_ends_when_its_time_is_over(tmp_path: Path) -> None:
    taken: list[EntryBatch] = []
    with new(tmp_path / "stream.bin") as stream:
        fill(stream, 20_000, size=500)
        async with nursery_for() as nursery:
            server = await serving(nursery, stream)
            async with alone(server.port) as client, client.batches() as batches:
                await batches.pour(taken.append, nothing, 0.0)
                assert taken == []


async def test_there_is_room_for_a_large_piece(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread waits for it for a moment, and the memory of a client that streams is smaller."""
    rooms: list[int] = []
    pieces: list[int] = []
    least: list[int] = []
    usual = SocketChannel.for_thread

    @contextmanager
    def watched(channel: SocketChannel, piece: int) -> Iterator[Callable[[memoryview], int | None]]:
        pieces.append(piece)
        with usual(channel, piece) as receive:
            least.append(channel.connection().getsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT))

            def watched_receive(room: memoryview) -> int | None:
                rooms.append(len(room))
                return receive(room)

            yield watched_receive

    monkeypatch.setattr(SocketChannel, "for_thread", watched)
    with new(tmp_path / "stream.bin") as stream:
        fill(stream, 20_000, size=500)
        async with nursery_for() as nursery:
            server = await serving(nursery, stream)
            async with alone(server.port) as client, client.batches() as batches:
                await batches.__anext__()
                await batches.pour(lambda batch: None, nothing, 5.0)
    # A part of an entry may be in the buffer already.
    assert rooms[0] > PIECE_BYTES // 2 > STREAM_BUFFER
    assert pieces[0] == PIECE_BYTES
    assert least[0] > 1


async def test_what_is_raised_by_who_takes_is_raised(tmp_path: Path) -> None:
    def refuse(batch: EntryBatch) -> None:
        raise LookupError("from the callback")

    with new(tmp_path / "stream.bin") as stream:
        fill(stream, 100)
        async with nursery_for() as nursery:
            server = await serving(nursery, stream)
            async with alone(server.port) as client, client.batches() as batches:
                with pytest.raises(LookupError, match="from the callback"):
                    await pour_on(batches, refuse)


@pytest.mark.parametrize("end", [End.CLOSE, End.RESET])
async def test_a_connection_that_is_lost(end: End) -> None:
    entries = sample(120)
    taken: list[EntryBatch] = []
    with FaultyServer((functools.partial(Stub, entries), Fault(400, end, 65536))) as server:
        async with nursery_for(), alone(server.port) as client, client.batches() as batches:
            with pytest.raises(ConnectionLost):
                await pour_on(batches, taken.append)
    got = [entry for batch in taken for entry in batch]
    assert got == entries[: len(got)]


async def test_it_is_settled_when_all_that_came_was_taken(tmp_path: Path) -> None:
    """Where nothing more has come behind a batch, and at the end of the turn, whatever it is."""
    reported: list[str] = []

    def take(batch: EntryBatch) -> None:
        reported.append("taken")
        if batch.first_number:
            raise LookupError("from the callback")

    with new(tmp_path / "stream.bin") as stream:
        fill(stream, 100)
        async with nursery_for() as nursery:
            server = await serving(nursery, stream)
            async with alone(server.port) as client, client.batches() as batches:
                while not reported:
                    await batches.pour(take, lambda: reported.append("settled"), 5.0)
                # A small one has nothing behind it; then the turn ends.
                assert reported[-3:] == ["taken", "settled", "settled"]
                fill(stream, 100)
                with pytest.raises(LookupError, match="from the callback"):
                    await pour_on(batches, take, lambda: reported.append("settled"))
                assert reported[-2:] == ["taken", "settled"]


@pytest.mark.parametrize("size", [keeping.COMMIT_BYTES // 4 + 1, keeping.COMMIT_BYTES + 1])
def test_a_commit_is_some_mib(tmp_path: Path, size: int) -> None:
    """Or all that was taken, before whatever goes wrong."""
    work = Resumable(0)
    with new(tmp_path / "stream.bin") as stream:
        # The upstream does not report where its commits end.
        applying = ChangeApplier(stream, "the upstream", None)
        batches = RelayBatches(cast("Any", None), Iteration(cast("Any", None), work))
        pouring = keeping.RelayWriter(stream, batches, [], 0, applying)
        expected = []
        for first in range(0, 40, 8):
            entries = [Entry(first + n, 1, bytes(size // 8 - 17)) for n in range(8)]
            pouring.place(scan(b"".join([entry.pack() for entry in entries]), first))
            expected.append(stream.total_entries)
        each = -(-keeping.COMMIT_BYTES // (size // 8 * 8))
        assert expected == [(n + 1) // each * each * 8 for n in range(5)]
        with pytest.raises(ProtocolViolation, match="received entry 41, but entry 40 is the next"):
            pouring.place(scan(Entry(41, 1, b"").pack(), 41))
        pouring.commit()
        assert stream.total_entries == 40
        pouring.commit()


async def test_wrong_numbers(tmp_path: Path) -> None:
    good = sample(60)
    stub = functools.partial(Stub, [*good[:30], *good[31:]])
    taken: list[EntryBatch] = []
    with FaultyServer((stub, NONE)) as server:
        async with nursery_for(), alone(server.port) as client, client.batches() as batches:
            with pytest.raises(ProtocolViolation):
                await pour_on(batches, taken.append)
    assert [entry for batch in taken for entry in batch] == good[:30]


@pytest.mark.parametrize("sync", ["os", "commit"])
async def test_a_relay_pours_much(tmp_path: Path, sync: str) -> None:
    """Pages, bookmarks and operations of all sizes, while more comes."""
    with new(tmp_path / "stream.bin") as stream:
        for part in range(30):
            fill(stream, 1 + 700 * (part % 4), size=1 + 97 * part)
        async with nursery_for() as nursery:
            server = await serving(nursery, stream)
            relay = await relaying(nursery, tmp_path / "relay.bin", server.port, sync=sync)
            for _ in range(20):
                fill(stream, 300, size=2000)
                await trio.lowlevel.checkpoint()
            await relay.has(stream.total_entries)
            assert contents(relay.stream) == contents(stream)
            key = (stream.total_entries // 10 * 10 - 10).to_bytes(4, "big")
            assert relay.stream.bookmark(key) == stream.bookmark(key)
