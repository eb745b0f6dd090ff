"""The publisher, against a server on loopback and through connections that are cut."""

from __future__ import annotations

import contextlib
import errno
import shutil
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing

from datastreamer.errors import (
    ConnectionLost,
    Fenced,
    NotAllowed,
    NotWritten,
    OperationOpen,
    PublishInDoubt,
    SourceBusy,
    WriteFailed,
)
from datastreamer.protocol.retry import Backoff
from datastreamer.publisher.async_publisher import Publisher
from datastreamer.publisher.trio_publisher import connect_publisher
from datastreamer.server.publish.policy import Publishing
from datastreamer.server.server import Server
from datastreamer.storage.header.records import PublisherRecord
from datastreamer.storage.maintain.snapshot import snapshot
from datastreamer.storage.stream import DataStream
from datastreamer.transport.listeners import open_listeners
from tests.network.fixtures import PATIENCE
from tests.network.vanishing import linux, vanish
from tests.storage.made import FaultyDisk

TOKEN = b"a token"
QUICK = Backoff(0.001, 0.01)


@pytest.fixture
def token_file(tmp_path: Path) -> Path:
    path = tmp_path / "token"
    path.write_bytes(TOKEN)
    path.chmod(0o600)
    return path


@pytest.fixture
def durable(path: Path) -> Any:
    with DataStream.create(path, sync="commit", index="memory") as made:
        yield made


@asynccontextmanager
async def serving(
    stream: DataStream, token_file: Path, **terms: Any
) -> AsyncIterator[tuple[Server, int]]:
    server = Server(stream, publishing=Publishing(token_file=token_file, **terms))
    with trio.fail_after(PATIENCE):
        async with trio.open_nursery() as nursery:
            [(_, port)] = await nursery.start(server.run, open_listeners("127.0.0.1", 0))
            yield server, port
            nursery.cancel_scope.cancel()


publisher_at = partial(connect_publisher, "127.0.0.1", token=TOKEN, backoff=QUICK)


def contents(stream: DataStream) -> list[tuple[int, bytes]]:
    return [(e.type, e.data) for e in stream.entries()]


async def test_operations_are_on_disk_when_they_return(
    durable: DataStream, token_file: Path
) -> None:
    async with serving(durable, token_file) as (_, port), publisher_at(port) as publisher:
        async with publisher.atomic_op() as op:
            assert op.add_bookmark(b"key") == 0
            assert op.add_entry(3, b"one") == 1
            with pytest.raises(OperationOpen):
                publisher.atomic_op()
            assert durable.total_entries == 0
        assert durable.total_entries == publisher.total_entries == 2
        op = publisher.atomic_op()
        op.add_entry(3, b"forgotten")
        op.roll_back()
        pending = []
        for number in range(200):
            op = publisher.atomic_op()
            op.add_entry(4, b"%d" % number)
            pending.append(await op.commit(wait=False))
        receipts = [await each.wait() for each in pending]
        assert [r.first_entry for r in receipts] == list(range(2, 202))
        op = publisher.atomic_op()
        for _ in range(8):
            op.add_entry(5, bytes(900_000))
        op.add_entry(5, bytes(1_048_559))
        await op.commit()
        assert publisher.unacknowledged == 0
    assert [data for kind, data in contents(durable) if kind == 4] == [
        b"%d" % n for n in range(200)
    ]
    assert durable.total_entries == 211


async def test_a_block_that_is_cancelled_as_it_begins_leaves_nothing_open(
    durable: DataStream, token_file: Path
) -> None:
    async with serving(durable, token_file) as (_, port), publisher_at(port) as publisher:
        with trio.CancelScope() as scope:
            scope.cancel()
            await put(publisher, b"never")
        await put(publisher, b"one")
    assert contents(durable) == [(3, b"one")]


async def put(publisher: Publisher, data: bytes) -> None:
    async with publisher.atomic_op() as op:
        op.add_entry(3, data)


async def put_one(port: int, data: bytes, **options: Any) -> None:
    async with publisher_at(port, **options) as publisher:
        await put(publisher, data)


# Connections that are cut.


class Cutting:
    """Passes bytes on between clients and a server; the first connection only so many of them.

    `up` and `down` are what may pass to the server and to the client; the connection is torn
    down on both sides with the byte behind, or `silently` nothing passes that way any more.
    """

    def __init__(self, port: int, up: int, down: int, *, silently: bool = False) -> None:
        self.connections = 0
        self._silently = silently
        self.passed = [0, 0]
        self._target = port
        self._limits = [up, down]

    async def run(self, task_status: trio.TaskStatus[int]) -> None:
        listeners = await trio.open_tcp_listeners(0, host="127.0.0.1")
        task_status.started(listeners[0].socket.getsockname()[1])
        await trio.serve_listeners(self._pass_on, listeners)

    async def _pass_on(self, client: trio.SocketStream) -> None:
        self.connections += 1
        limits = self._limits if self.connections == 1 else [1 << 40, 1 << 40]
        server = await trio.open_tcp_stream("127.0.0.1", self._target)
        async with client, server, trio.open_nursery() as nursery:
            for way, (source, target) in enumerate([(client, server), (server, client)]):
                nursery.start_soon(self._pump, source, target, way, limits[way], nursery)

    async def _pump(
        self,
        source: trio.SocketStream,
        target: trio.SocketStream,
        way: int,
        left: int,
        nursery: trio.Nursery,
    ) -> None:
        with contextlib.suppress(trio.BrokenResourceError, trio.ClosedResourceError):
            while left and (data := await source.receive_some(65536)):
                if self.connections == 1:
                    self.passed[way] += len(data[:left])
                await target.send_all(data[:left])
                left -= len(data[:left])
        if self._silently and not left:
            await trio.sleep_forever()
        nursery.cancel_scope.cancel()


async def publish_three(port: int, mark: bytes, **options: Any) -> None:
    async with publisher_at(port, **options) as publisher:
        async with publisher.atomic_op() as op:
            op.add_bookmark(mark)
            op.add_entry(3, mark + b"1")
        for number in (2, 3):
            op = publisher.atomic_op()
            op.add_entry(3, mark + b"%d" % number)
            await op.commit(wait=False)


def three(mark: bytes) -> list[tuple[int, bytes]]:
    return [(0xB0, mark), *((3, mark + b"%d" % number) for number in (1, 2, 3))]


@pytest.mark.parametrize("step", [3, pytest.param(1, marks=pytest.mark.soak)])
@pytest.mark.parametrize("way", ["to the server", "to the publisher"])
async def test_exactly_once_over_cuts_at_every_byte(
    stream: DataStream, token_file: Path, way: str, step: int
) -> None:
    """At every third one here; at every one in the soak tests."""
    wanted: list[tuple[int, bytes]] = []
    async with serving(stream, token_file) as (server, port):
        cut, all_of_it = 0, 1 << 40
        while cut < all_of_it:
            mark = b"m%d" % cut
            up, down = (cut, 1 << 40) if way == "to the server" else (1 << 40, cut)
            cutting = Cutting(port, up, down)
            async with trio.open_nursery() as nursery:
                between = await nursery.start(cutting.run)
                try:
                    # (The one before may have been granted a lease and not heard of it.)
                    await publish_three(between, mark, take_over=True)
                except ConnectionLost:
                    # Before the lease nothing is tried again.
                    assert server.publish_lease is not None
                    assert cutting.connections == 1
                    assert stream.total_entries == len(wanted)
                else:
                    wanted += three(mark)
                nursery.cancel_scope.cancel()
            stream.sync()
            assert stream.total_entries == len(wanted), (cut, cutting.connections)
            if cutting.connections == 1 and contents(stream)[-4:] == three(mark):
                all_of_it = cut
            cut += step
        assert server.counts.published_again > 0
    assert contents(stream) == wanted
    assert all_of_it > 150


async def test_a_path_that_is_cut_and_nobody_says_so(stream: DataStream, token_file: Path) -> None:
    """That it is still there is not answered: another connection is made before it is needed."""
    async with serving(stream, token_file) as (server, port), trio.open_nursery() as nursery:
        # Up to in the middle of the answer behind the lease.
        cutting = Cutting(port, 1 << 40, 150, silently=True)
        between = await nursery.start(cutting.run)
        async with publisher_at(between, lease=0.5, timeout=2) as publisher:
            while server.counts.commands["publish"] < 2:
                await publisher._driver.run(publisher._engine.moves())
            assert cutting.passed[1] == 150
            await put(publisher, b"x")
        nursery.cancel_scope.cancel()
    assert contents(stream) == [(3, b"x")]


# What a publisher reads.


class Muting:
    """Passes bytes on, until it is mute: then nothing that comes is passed on or answered, on the
    connections that are there, and on those that come while it is. Or the first one's host is
    gone, for the system, and the others are served."""

    def __init__(self, port: int) -> None:
        self.mute = False
        self.accepted: list[trio.SocketStream] = []
        self._target = port

    async def run(self, task_status: trio.TaskStatus[int]) -> None:
        listeners = await trio.open_tcp_listeners(0, host="127.0.0.1")
        task_status.started(listeners[0].socket.getsockname()[1])
        await trio.serve_listeners(self._pass_on, listeners)

    async def _pass_on(self, client: trio.SocketStream) -> None:
        self.accepted.append(client)
        if self.mute:
            await trio.sleep_forever()
        server = await trio.open_tcp_stream("127.0.0.1", self._target)
        async with client, server, trio.open_nursery() as nursery:
            nursery.start_soon(self._pump, client, server)
            nursery.start_soon(self._pump, server, client)

    async def _pump(self, source: trio.SocketStream, target: trio.SocketStream) -> None:
        with contextlib.suppress(trio.BrokenResourceError, trio.ClosedResourceError):
            while data := await source.receive_some(65536):
                if self.mute:
                    await trio.sleep_forever()
                await target.send_all(data)
            await target.aclose()


async def silenced(
    stream: DataStream,
    token_file: Path,
    caplog: pytest.LogCaptureFixture,
    silence: Callable[[Muting], object],
) -> int:
    """The port of a path on which nothing comes any more while an operation is underway, until
    that is noticed; the operation is sent again."""
    async with serving(stream, token_file) as (_, port), trio.open_nursery() as nursery:
        muting = Muting(port)
        between: int = await nursery.start(muting.run)
        async with publisher_at(between, lease=0.5, retry_for=PATIENCE) as publisher:
            publisher._engine.timeout = 2
            await put(publisher, b"before")
            caplog.clear()
            silence(muting)
            op = publisher.atomic_op()
            op.add_entry(3, b"underway")
            pending = await op.commit(wait=False)
            while "trying again" not in caplog.text:
                await trio.testing.wait_all_tasks_blocked(0.002)
            muting.mute, publisher._engine.timeout = False, 10
            await pending.wait()
        nursery.cancel_scope.cancel()
    assert contents(stream) == [(3, b"before"), (3, b"underway")]
    return between


async def test_a_path_that_falls_silent_with_operations_underway(
    stream: DataStream, token_file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Nor is a question answered on another connection: the operation is sent again on a third."""
    await silenced(stream, token_file, caplog, lambda muting: setattr(muting, "mute", True))
    assert "for 2.5 s, and no answer on another connection within 2 s" in caplog.text


@linux
async def test_a_host_that_is_gone_with_operations_underway(
    stream: DataStream, token_file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The system sees it, long before it gives the connection up."""
    between = await silenced(
        stream, token_file, caplog, lambda muting: vanish(muting.accepted[-1].socket)
    )
    assert f"the host of 127.0.0.1:{between} has not acknowledged anything for" in caplog.text


async def test_a_lease_that_cannot_be_kept_on_disk(
    stream: DataStream, token_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(source: PublisherRecord) -> None:
        raise WriteFailed(stream.path, "No space left on device")

    async with serving(stream, token_file) as (_, port):
        monkeypatch.setattr(stream.parts.writer, "put_source", full)
        with pytest.raises(NotWritten, match="the lease cannot be written to disk: No space left"):
            await put_one(port, b"x")
        monkeypatch.undo()
        await put_one(port, b"x")
    assert contents(stream) == [(3, b"x")]


async def test_a_source_comes_back_behind_an_operation_of_the_server_s_own(
    stream: DataStream, token_file: Path
) -> None:
    async with serving(stream, token_file) as (server, port), publisher_at(port) as publisher:
        await put(publisher, b"x")
        assert server.publish_lease is not None
        holder = server.publish_lease.holder
        assert holder is not None
        holder.finish()
        await holder.left.wait()
        stream.start_atomic_op()
        while not server.counts.errors["another_source_holds_the_lease"]:
            await publisher._driver.run(publisher._engine.moves())
        stream.rollback_atomic_op()
        await put(publisher, b"y")
    assert contents(stream) == [(3, b"x"), (3, b"y")]


async def test_a_wrong_token_and_a_second_source(stream: DataStream, token_file: Path) -> None:
    async with serving(stream, token_file) as (_, port):
        with pytest.raises(NotAllowed):
            async with publisher_at(port, token=b"wrong"):
                pass
        with contextlib.suppress(Fenced):  # leaving the block raises it, too
            async with publisher_at(port) as first:
                with pytest.raises(SourceBusy, match="its epoch is 1"):
                    await put_one(port, b"x")
                async with publisher_at(port, take_over=True) as second:
                    assert second.epoch == 2
                    await put(second, b"of the second")
                    with pytest.raises(
                        Fenced, match="another publisher has the lease, with epoch 2"
                    ):
                        await put(first, b"of the first")
                    with pytest.raises(Fenced):
                        first.resend()
                    with pytest.raises(Fenced):
                        await first.flush()
        with pytest.raises(Fenced, match="epoch 2 has ended"):
            await put_one(port, b"x", epoch=2)
    assert contents(stream) == [(3, b"of the second")]


@pytest.mark.parametrize("restore", [snapshot, shutil.copyfile])
async def test_a_source_that_was_fenced_stays_so_on_a_restored_copy(
    stream: DataStream, token_file: Path, tmp_path: Path, restore: Callable[[Path, Path], object]
) -> None:
    async with serving(stream, token_file) as (_, port):
        with contextlib.suppress(Fenced):  # leaving the block raises it, too
            async with publisher_at(port) as fenced:
                await put(fenced, b"x")
                await put_one(port, b"y", take_over=True)
                with pytest.raises(Fenced):
                    await put(fenced, b"z")
    copy = tmp_path / "restored.bin"
    restore(Path(stream.path), copy)
    with DataStream.open(copy, index="memory") as restored:
        async with serving(restored, token_file) as (_, port):
            with pytest.raises(Fenced, match="epoch 1 has ended; the last publisher has epoch 2"):
                await put_one(port, b"z", epoch=1)
        assert contents(restored) == [(3, b"x"), (3, b"y")]


async def test_a_full_disk_is_told_and_tried_again(
    path: Path, token_file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    disk = FaultyDisk()
    with DataStream.create(path, index="memory", disk=disk) as stream:
        async with serving(stream, token_file) as (_, port), publisher_at(port) as publisher:
            async with publisher.atomic_op() as op:
                op.add_entry(3, b"fits")
            disk.largest = stream.file_size
            op = publisher.atomic_op()
            for _ in range(3):
                op.add_entry(3, bytes(1_000_000))
            large = await op.commit(wait=False)
            op = publisher.atomic_op()
            op.add_entry(3, b"behind")
            behind = await op.commit(wait=False)
            for pending in (large, behind):
                with pytest.raises(NotWritten, match="No space left on device"):
                    await pending.wait()
            publisher.resend()
            with pytest.raises(NotWritten):
                await large.wait()
            assert contents(stream) == [(3, b"fits")]
            reported = [r.getMessage() for r in caplog.records if r.levelname == "ERROR"]
            assert reported
            assert all("its operations are refused: " in line for line in reported)
            assert "No space left on device" in reported[0]
            disk.largest = None
            publisher.resend()
            assert (await behind.wait()).total_entries == 5
            assert (await large.wait()).first_entry == 1
            # And given up: the next operation stands in its place.
            disk.largest = stream.file_size
            op = publisher.atomic_op()
            for _ in range(3):
                op.add_entry(3, bytes(1_000_000))
            with pytest.raises(NotWritten):
                await op.commit()
            disk.largest = None
            publisher.drop()
            async with publisher.atomic_op() as op:
                assert op.add_entry(3, b"in its place") == 5
        assert [data for _, data in contents(stream)][-2:] == [b"behind", b"in its place"]


async def test_a_sync_that_fails_leaves_nothing_twice(path: Path, token_file: Path) -> None:
    disk = FaultyDisk()
    with DataStream.create(path, index="memory", disk=disk) as stream:
        async with serving(stream, token_file) as (_, port), publisher_at(port) as publisher:
            for turn in range(20):
                if turn % 4 == 1:
                    disk.faults["sync"] = errno.EIO
                op = publisher.atomic_op()
                op.add_entry(3, b"%d" % turn)
                pending = await op.commit(wait=False)
                if turn % 4 == 1:
                    with pytest.raises((PublishInDoubt, NotWritten)):
                        await pending.wait()
                    disk.faults.clear()
                    publisher.resend()
                await pending.wait()
        assert [data for _, data in contents(stream)] == [b"%d" % turn for turn in range(20)]
