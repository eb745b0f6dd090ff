"""Served streams whose file is removed or replaced: who notices, and what is served then."""

from __future__ import annotations

import os
import urllib.error
import urllib.request
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import pytest
import trio
import trio.testing

from datastreamer.client.blocking_client import BlockingClient
from datastreamer.client.trio_driver import connect
from datastreamer.errors import (
    DifferentStream,
    FileReplaced,
    HistoryChanged,
    NotWritten,
    PublishInDoubt,
)
from datastreamer.publisher.trio_publisher import connect_publisher
from datastreamer.relay.relay import Relay
from datastreamer.server import file_watch
from datastreamer.server.metrics import collect
from datastreamer.server.publish.lease import Publishing
from datastreamer.server.server import Server
from datastreamer.service.embedded import StreamServer
from datastreamer.storage.disk.file_ops import OsFile
from datastreamer.storage.stream import DataStream
from datastreamer.storage.write import owned_file as owned
from datastreamer.storage.write.sync_policy import SyncPolicy
from datastreamer.transport.listeners import open_listeners
from tests.network import model
from tests.network.fixtures import PATIENCE, append, in_memory, until
from tests.network.model import OK
from tests.relay.relaying import QUICK

REMOVED = "the file was removed"
REPLACED = "the file was removed, and another file is at its path now"


@pytest.fixture(autouse=True)
def always_look(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(owned, "LOOK_SECONDS", 0.0)
    monkeypatch.setattr(file_watch, "_OPEN_SECONDS", 0.01)


def make(path: Path, *entries: bytes, **options: int) -> None:
    with DataStream.create(path, sync="os", index="memory", **options) as stream:
        append(stream, *[(1, data) for data in entries])


async def test_a_follower_serves_the_stream_that_is_there_now(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    make(path, b"old")
    other = path.with_name("other.bin")
    make(other, b"new", b"newer")
    with DataStream.open(path, follow=True, index="memory") as stream:
        async with in_memory(stream) as rig:
            async with rig.client() as peer, rig.client() as idle:
                await peer.ask(model.start(0), OK)
                await peer.packet()
                before = rig.server.stream
                os.replace(other, path)
                await peer.ended()
                await idle.ended()
            await until(lambda: rig.server.stream is not before)
            await until(lambda: not rig.server.unready)
            assert before.closed
            async with rig.client() as peer:
                await peer.ask(model.start(0), OK)
                assert (await peer.packet())[17:] == b"new"
                assert (await peer.packet())[17:] == b"newer"
                with DataStream.open(path, index="memory") as writer:
                    append(writer, (1, b"committed since"))
                    assert (await peer.packet())[17:] == b"committed since"
            assert rig.server.counts.ended["changed"] == 2
            now = rig.server.stream
    assert now.closed
    reported = [line for line in caplog.messages if line.startswith(str(path))]
    assert reported == [
        f"{path}: {REPLACED}; its clients are disconnected",
        f"{path}: now serving the stream at this path (2 entries)",
    ]


async def test_a_follower_waits_for_a_stream(
    path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Removed; junk; a stream of another type; half a copy; and at last a stream."""
    make(path, b"old", stream_type=1)
    good = path.with_name("good.bin")
    make(good, b"good")
    other_type = path.with_name("type.bin")
    make(other_type, b"other", stream_type=2)
    with DataStream.open(path, follow=True, index="memory") as stream:
        async with in_memory(stream) as rig:
            tries = []
            opened = rig.server.watch._open

            def counted() -> DataStream:
                tries.append(1)
                return opened()

            monkeypatch.setattr(rig.server.watch, "_open", counted)

            async def tried_again() -> None:
                some = len(tries)
                await until(lambda: len(tries) >= some + 2)

            async with rig.client() as peer:
                await peer.ask(model.start(1), OK)
                path.unlink()
                await peer.ended()
            await tried_again()
            samples = (await collect(rig.server))["samples"]
            assert samples["datastreamer_file_replaced"] == [([], 1)]
            assert rig.server.unready == f"{path}: {REMOVED}"
            async with rig.client() as peer:
                await peer.ended()  # new clients are refused
            path.write_text("junk")
            await tried_again()
            os.replace(other_type, path)
            await tried_again()
            content = good.read_bytes()
            path.unlink()
            path.write_bytes(content[:4100])  # less than the header says is on disk
            await tried_again()
            path.write_bytes(content)
            await until(lambda: rig.server.stream is not stream)
            await until(lambda: not rig.server.unready)
            async with rig.client() as peer:
                await peer.ask(model.start(0), OK)
                assert (await peer.packet())[17:] == b"good"
            samples = (await collect(rig.server))["samples"]
            assert samples["datastreamer_file_replaced"] == [([], 0)]
    reported = [line for line in caplog.messages if line.startswith(str(path))]
    assert reported[0] == f"{path}: {REMOVED}; its clients are disconnected"
    assert "no such file" in reported[1]
    assert all("waiting for a stream at this path" in line for line in reported[1:-1])
    # One line for each kind of obstacle, and not for each attempt.
    assert len(reported) <= 7, reported


async def test_a_file_that_comes_back(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    make(path, b"old")
    away = path.with_name("away.bin")
    with DataStream.open(path, follow=True, index="memory") as stream:
        async with in_memory(stream) as rig:
            async with rig.client() as peer:
                await peer.ask(model.start(1), OK)
                path.rename(away)
                await peer.ended()
            await until(lambda: len(caplog.messages) >= 2)
            away.rename(path)
            await until(lambda: not rig.server._stream_missing)
            assert rig.server.stream is stream
            async with rig.client() as peer:
                await peer.ask(model.start(0), OK)
                assert (await peer.packet())[17:] == b"old"
    assert "leads to the open file again; serving it" in caplog.messages[-1]


async def test_it_can_be_ended_while_it_waits(path: Path) -> None:
    make(path, b"old")
    with DataStream.open(path, follow=True, index="memory") as stream:
        async with in_memory(stream) as rig:
            path.unlink()
            await until(lambda: rig.server._stream_missing)
            assert await rig.server.finish(1)


async def test_again_and_again(path: Path) -> None:
    """Each new stream is held, and no other."""
    make(path, b"0")
    other = path.with_name("other.bin")
    with DataStream.open(path, follow=True, index="memory") as stream:
        async with in_memory(stream) as rig:
            await trio.testing.wait_all_tasks_blocked()
            descriptors = len(os.listdir("/dev/fd"))
            for number in range(1, 6):
                make(other, b"%d" % number)
                before = rig.server.stream
                os.replace(other, path)
                await until(lambda: rig.server.stream is not before)  # noqa: B023
                await until(lambda: before.closed and not rig.server._stream_missing)  # noqa: B023
                async with rig.client() as peer:
                    await peer.ask(model.start(0), OK)
                    assert (await peer.packet())[17:] == b"%d" % number
            assert len(os.listdir("/dev/fd")) == descriptors


async def test_a_client_that_resumes_hears_of_the_new_history(path: Path) -> None:
    make(path, *(b"old %d" % number for number in range(50)))
    other = path.with_name("other.bin")
    make(other, *(b"new %d" % number for number in range(80)))
    with DataStream.open(path, follow=True, index="memory") as stream, trio.fail_after(PATIENCE):
        async with trio.open_nursery() as nursery:
            server = Server(stream)
            [(_, port)] = await nursery.start(server.run, open_listeners("127.0.0.1", 0))
            async with connect("127.0.0.1", port, backoff=QUICK) as client:

                async def read_on() -> None:
                    async with client.batches(from_entry=0) as batches:
                        async for batch in batches:
                            assert b"new" not in batch.packed()
                            if batch.next_number == 50:
                                os.replace(other, path)

                with pytest.raises((DifferentStream, HistoryChanged)):
                    await read_on()
            nursery.cancel_scope.cancel()


async def test_a_writing_server_serves_what_it_has_and_says_so(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    stream = DataStream.create(path, index="memory")
    append(stream, (1, b"one"))
    async with in_memory(stream) as rig, rig.client() as peer:
        await peer.ask(model.start(0), OK)
        await peer.packet()
        path.unlink()
        await until(lambda: rig.server.watch.lost)
        assert rig.server.unready == f"{path}: {REMOVED}"
        samples = (await collect(rig.server))["samples"]
        assert samples["datastreamer_file_replaced"] == [([], 1)]
        with pytest.raises(FileReplaced):
            append(stream, (1, b"two"))
        async with rig.client() as other:
            await other.ask(model.start(0), OK)
            assert (await other.packet())[17:] == b"one"
        await peer.waits()
        await until(lambda: caplog.messages)
        [reported] = caplog.messages
        assert reported.startswith(
            f"{path}: {REMOVED}; its 1 entries are served from the open file"
        )
        assert "snapshot" in reported
        stream.snapshot(path)
        await until(lambda: "another file" in rig.server.unready)
    with pytest.raises(FileReplaced):
        stream.close()


async def test_a_writing_server_continues_if_the_file_comes_back(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    away = path.with_name("away.bin")
    with DataStream.create(path, index="memory") as stream:
        async with in_memory(stream) as rig, rig.client() as peer:
            await peer.ask(model.start(0), OK)
            path.rename(away)
            await until(lambda: rig.server.watch.lost)
            away.rename(path)
            await until(lambda: not rig.server.unready)
            append(stream, (1, b"one"))
            assert (await peer.packet())[17:] == b"one"
            await until(lambda: len(caplog.messages) >= 2)
    assert "leads to the open file again" in caplog.messages[-1]


@asynccontextmanager
async def publishable(stream: DataStream, tmp_path: Path) -> AsyncIterator[int]:
    token_file = tmp_path / "token"
    token_file.write_bytes(b"token\n")
    token_file.chmod(0o600)
    server = Server(stream, publishing=Publishing(token_file=token_file))
    with trio.fail_after(PATIENCE):
        async with trio.open_nursery() as nursery:
            [(_, port)] = await nursery.start(server.run, open_listeners("127.0.0.1", 0))
            yield port
            nursery.cancel_scope.cancel()


@pytest.mark.parametrize("sync", ["commit", "os", 5])
async def test_a_publisher_is_refused(
    path: Path, tmp_path: Path, sync: SyncPolicy, caplog: pytest.LogCaptureFixture
) -> None:
    stream = DataStream.create(path, sync=sync, index="memory")
    away = path.with_name("away.bin")
    async with publishable(stream, tmp_path) as port:
        publish = partial(connect_publisher, "127.0.0.1", port, token=b"token", backoff=QUICK)
        async with publish() as publisher:
            async with publisher.atomic_op() as op:
                op.add_entry(1, b"one")
            path.rename(away)
            with pytest.raises(NotWritten, match="moved away; nothing more is committed") as caught:
                async with publisher.atomic_op() as op:
                    op.add_entry(1, b"two")
            assert "\n" not in str(caught.value)
            assert stream.total_entries == 1
            publisher.resend()
            with pytest.raises(NotWritten):
                await publisher.flush()
            away.rename(path)
            publisher.resend()
            await publisher.flush()
        assert [bytes(entry.data) for entry in stream.entries()] == [b"one", b"two"]
        path.unlink()
        # A lease is not granted if every operation would be refused.
        with pytest.raises(NotWritten, match=REMOVED):
            async with publish():
                raise AssertionError("a lease was granted")
    assert any("its operations are refused" in line for line in caplog.messages)
    with pytest.raises(FileReplaced):
        stream.close()


async def test_a_sync_that_comes_too_late_acknowledges_nothing(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file goes while the sync is under way that an operation waits for."""
    stream = DataStream.create(path, index="memory")
    sync = OsFile.sync

    def removed(self: OsFile) -> None:
        path.unlink(missing_ok=True)
        sync(self)

    async with publishable(stream, tmp_path) as port:

        async def publish() -> None:
            async with connect_publisher("127.0.0.1", port, token=b"token") as publisher:
                with monkeypatch.context() as patched:
                    patched.setattr(OsFile, "sync", removed)
                    async with publisher.atomic_op() as op:
                        op.add_entry(1, b"one")

        with pytest.raises((PublishInDoubt, NotWritten), match=REMOVED):
            await publish()
    with pytest.raises(FileReplaced):
        stream.close()


def ready(server: StreamServer) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(
            f"http://127.0.0.1:{server.metrics_port}/readyz", timeout=20
        ) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_an_embedded_server(path: Path, workers: int, caplog: pytest.LogCaptureFixture) -> None:
    """In a thread of the writer's, in a process, in two."""
    serving = {"in_process": True} if not workers else {"workers": workers}
    server = StreamServer(path, host="127.0.0.1", port=0, metrics_port=0, **serving)
    append(server.stream, (1, b"one"))
    assert server.drain(20)
    assert ready(server)[0] == 200
    path.unlink()
    make(path, b"another's")
    code, why = ready(server)
    assert (code, why.strip()) == (503, f"{path}: {REPLACED}")
    with pytest.raises(FileReplaced):
        append(server.stream, (1, b"two"))
    with BlockingClient("127.0.0.1", server.port) as client:
        assert client.entry(0).data == b"one"
        assert client.header().total_entries == 1
    with pytest.raises(FileReplaced):
        server.close()
    with DataStream.open(path) as other:
        assert [bytes(entry.data) for entry in other.entries()] == [b"another's"]


async def test_a_relay_whose_own_file_goes(tmp_path: Path, path: Path) -> None:
    """It serves its entries, appends none, and continues once the file is back."""
    kept = tmp_path / "kept.bin"
    away = tmp_path / "away.bin"
    with DataStream.create(path, sync="os", index="memory") as upstream:
        append(upstream, (1, b"one"))
        with trio.fail_after(PATIENCE):
            async with trio.open_nursery() as nursery:
                source = Server(upstream)
                [(_, port)] = await nursery.start(source.run, open_listeners("127.0.0.1", 0))
                relay = Relay(
                    [("127.0.0.1", port)],
                    kept,
                    host="127.0.0.1",
                    port=0,
                    index="memory",
                    backoff=QUICK,
                )
                [(_, ours)] = await nursery.start(relay.run)
                await relay.until(lambda: relay.caught_up)
                assert relay.stream is not None
                stream = relay.stream
                await until(lambda: stream.total_entries == 1)
                kept.rename(away)
                append(upstream, (1, b"two"))
                await relay.until(lambda: "moved away" in relay.download.states[0].lost)
                assert "moved away" in relay._unready()
                assert stream.total_entries == 1
                async with connect("127.0.0.1", ours) as client:
                    assert (await client.entry(0)).data == b"one"
                away.rename(kept)
                await relay.until(lambda: stream.total_entries == 2)
                nursery.cancel_scope.cancel()


async def test_no_lease_is_granted_for_a_replaced_file(path: Path, tmp_path: Path) -> None:
    """The second server's source and its epoch are not written over by the first server."""
    first = DataStream.create(path, index="memory")
    async with publishable(first, tmp_path) as port:
        path.unlink()
        with DataStream.create(path, index="memory") as second:
            async with publishable(second, tmp_path) as other:
                async with connect_publisher("127.0.0.1", other, token=b"token", epoch=7):
                    pass
                kept = second.source
                assert kept.epoch == 7
                with pytest.raises(NotWritten, match="another file is at its path"):
                    async with connect_publisher("127.0.0.1", port, token=b"token", epoch=9):
                        raise AssertionError("a lease was granted")
                assert second.source == kept
    with pytest.raises(FileReplaced):
        first.close()


async def test_a_receipt_without_an_operation_acknowledges_nothing_more(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A source that asks where the stream is, to keep its lease, does not hear of entries that
    only the removed file holds."""
    stream = DataStream.create(path, index="memory")
    sync = OsFile.sync

    def removed(self: OsFile) -> None:
        path.unlink(missing_ok=True)
        sync(self)

    async with publishable(stream, tmp_path) as port:

        async def publish() -> None:
            async with connect_publisher("127.0.0.1", port, token=b"token") as publisher:
                source = publisher._engine.source
                with monkeypatch.context() as patched:
                    patched.setattr(OsFile, "sync", removed)
                    with pytest.raises((PublishInDoubt, NotWritten), match=REMOVED):
                        async with publisher.atomic_op() as op:
                            op.add_entry(1, b"one")
                assert stream.parts.writer.durable_entries == 1  # in the open file
                source.ask_where()
                publisher._engine._news.set()
                await until(lambda: not source.asking)
                assert source.granted
                assert source.total_entries == 0

        with pytest.raises((PublishInDoubt, NotWritten), match=REMOVED):
            await publish()
    with pytest.raises(FileReplaced):
        stream.close()
