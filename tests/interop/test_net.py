"""Over TCP: each one's client at the other's server, while that one writes."""

from __future__ import annotations

import functools
import shutil
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import pytest
import trio

from datastreamer import (
    Backoff,
    BlockingClient,
    DataStream,
    Rollback,
    StreamServer,
    connect,
    serve,
)
from datastreamer.errors import NotSupported, UnknownBookmark, UnknownEntry
from tests.interop.peer import Answer, GoPeer, PeerFailed, beside_reference
from tests.interop.plain import BOOKMARK, Plain, digest, generated, keys, scan
from tests.interop.test_files import write_ours, write_theirs

pytestmark = beside_reference

PATIENCE = 60.0


@pytest.fixture
def real_copy(real_stream: Path, tmp_path: Path) -> Path:
    path = tmp_path / "real.bin"
    shutil.copyfile(real_stream, path)
    return path


@pytest.fixture
def written(tmp_path: Path) -> Path:
    """A stream of ours with a little of everything."""
    path = tmp_path / "written.bin"
    with DataStream.create(path) as stream:
        write_ours(stream, generated(1))
    return path


@pytest.fixture(params=["child process", "thread"])
def our_server(request: pytest.FixtureRequest, written: Path) -> Iterator[StreamServer]:
    in_process = request.param == "thread"
    with StreamServer(written, host="127.0.0.1", port=0, in_process=in_process) as server:
        yield server


def as_plain(answers: list[Answer]) -> list[tuple[int, int, bytes]]:
    return [(a["number"], a["type"], bytes.fromhex(a["data"])) for a in answers]


def without_place(entries: list[Plain]) -> list[tuple[int, int, bytes]]:
    return [(e.number, e.type, e.data) for e in entries]


def first_event(entries: list[Plain], key: bytes) -> Plain | None:
    after = (e for e in entries[keys(entries)[key] :] if e.type != BOOKMARK)
    return next(after, None)


# --- the reference's client at our server ---


def test_their_client_reads_the_real_stream(real_copy: Path) -> None:
    entries = scan(real_copy)
    with StreamServer(real_copy, host="127.0.0.1", port=0) as server:
        address = server.addresses[0]
        everything = GoPeer.read(address)
        assert everything["entries"] == len(entries) == 34_723
        assert everything["sha256"] == digest(entries)
        half = GoPeer.read(address, start=17_000)
        assert half["sha256"] == digest(entries[17_000:])
        batch = GoPeer.read(address, bookmark=bytes.fromhex("08011002"), count=1_000)
        assert batch["sha256"] == digest(entries[12:1_012])


def test_their_client_asks_our_server(our_server: StreamServer, written: Path) -> None:
    entries = scan(written)
    with GoPeer.client(our_server.addresses[0]) as client:
        header = our_server.stream.header
        assert client.header() == {k: v for k, v in header._asdict().items() if k != "stream_type"}
        for entry in entries:
            assert as_plain([client.entry(entry.number)]) == [entry[1:]]
        for key in keys(entries):
            event = first_event(entries, key)
            if event is None:
                with pytest.raises(PeerFailed, match="bookmark not found"):
                    client.bookmark(key)
            else:
                assert as_plain([client.bookmark(key)]) == [event[1:]]
        with pytest.raises(PeerFailed, match="entry not found"):
            client.entry(len(entries))
        with pytest.raises(PeerFailed, match="bookmark not found"):
            client.bookmark(b"no such key")
        assert not client.warnings


def test_their_client_continues_after_a_refusal(our_server: StreamServer, written: Path) -> None:
    entries = scan(written)
    with GoPeer.client(our_server.addresses[0]) as client:
        with pytest.raises(PeerFailed, match="result command error"):
            client.start(len(entries) + 1)
        with pytest.raises(PeerFailed, match="result command error"):
            client.start_bookmark(b"no such key")
        assert client.header()["total_entries"] == len(entries)
        client.start(len(entries) - 1)
        assert as_plain(list(client.entries(1))) == [entries[-1][1:]]
        assert not client.warnings


def test_their_client_follows_our_server(our_server: StreamServer, written: Path) -> None:
    address = our_server.addresses[0]
    old = scan(written)
    with GoPeer.client(address) as early, GoPeer.client(address) as late:
        early.start(0)
        late.start(len(old))
        for seed in range(40, 60):
            write_ours(our_server.stream, generated(seed, 1))
        entries = scan(written)
        assert as_plain(list(early.entries(len(entries)))) == without_place(entries)
        assert as_plain(list(late.entries(len(entries) - len(old)))) == without_place(
            entries[len(old) :]
        )
        assert not early.warnings
        assert not late.warnings


def test_their_client_stops_and_starts_again(our_server: StreamServer, written: Path) -> None:
    with GoPeer.client(our_server.addresses[0]) as client:
        for seed in range(60, 64):
            start = len(scan(written))
            client.start(start)
            write_ours(our_server.stream, generated(seed, 3, rollbacks=False))
            entries = scan(written)[start:]
            assert as_plain(list(client.entries(len(entries)))) == without_place(entries)
            client.stop()
            assert client.header()["total_entries"] == start + len(entries)
        assert not client.warnings


async def test_their_client_follows_a_server_in_our_event_loop(written: Path) -> None:
    old = scan(written)
    with trio.fail_after(PATIENCE):
        async with trio.open_nursery() as nursery:
            with DataStream.open(written) as stream:
                start = functools.partial(serve, stream, host="127.0.0.1", port=0)
                addresses = await nursery.start(start)
                with await trio.to_thread.run_sync(GoPeer.client, addresses[0]) as client:
                    await trio.to_thread.run_sync(client.start, 0)
                    for seed in range(70, 80):
                        write_ours(stream, generated(seed, 1))
                        await trio.lowlevel.checkpoint()
                    entries = scan(written)
                    assert len(entries) > len(old)
                    got = await trio.to_thread.run_sync(list, client.entries(len(entries)))
                    assert as_plain(got) == without_place(entries)
                    assert not client.warnings
                nursery.cancel_scope.cancel()


def test_their_relay_of_our_server(our_server: StreamServer, written: Path, tmp_path: Path) -> None:
    copy = tmp_path / "relay.bin"
    with GoPeer.relay(our_server.addresses[0], copy) as relay, GoPeer.client(relay.address) as end:
        write_ours(our_server.stream, generated(80, 5))
        entries = scan(written)
        # While it fills its file, their relay may send an entry twice.
        while end.header()["total_entries"] < len(entries):
            pass
        end.start(0)
        assert as_plain(list(end.entries(len(entries)))) == without_place(entries)
    assert scan(copy) == entries


# --- our clients at the reference's server ---


async def test_our_client_reads_the_real_stream(real_copy: Path) -> None:
    entries = scan(real_copy)
    with GoPeer.serve(real_copy) as server, trio.fail_after(PATIENCE):
        async with connect(*server.address) as client:
            assert (await client.header()).total_entries == len(entries)
            got: list[tuple[int, int, bytes]] = []
            async for batch in client.batches(from_entry=0):
                got += [(e.number, e.type, e.data) for e in batch]
                if len(got) >= len(entries):
                    break
            assert got == without_place(entries)


async def test_our_client_asks_their_server(tmp_path: Path) -> None:
    path = tmp_path / "theirs.bin"
    with GoPeer.serve(path, stream_type=3) as server, trio.fail_after(PATIENCE):
        write_theirs(server, generated(2, rollbacks=False))
        entries = scan(path)
        async with connect(*server.address, stream_type=3) as client:
            assert (await client.header())._asdict() == {
                **server.get_header(),
                "stream_type": 3,
            }
            for entry in entries[:50]:
                got = await client.entry(entry.number)
                assert (got.number, got.type, got.data) == entry[1:]
            for key in keys(entries):
                event = first_event(entries, key)
                if event is not None:
                    got = await client.bookmark(key)
                    assert (got.number, got.type, got.data) == event[1:]
            with pytest.raises(UnknownEntry):
                await client.entry(len(entries))
            with pytest.raises(UnknownBookmark):
                await client.bookmark(b"no such key")


async def test_our_client_follows_their_server(tmp_path: Path) -> None:
    path = tmp_path / "theirs.bin"
    with GoPeer.serve(path) as server, trio.fail_after(PATIENCE):
        server.append(10)
        async with connect(*server.address) as client:
            got: list[tuple[int, int, bytes]] = []
            async for entry in client.entries(from_entry=0):
                got.append((entry.number, entry.type, entry.data))
                if entry.number == 49:
                    # What was there has come: the rest is live.
                    await trio.to_thread.run_sync(write_theirs, server, generated(3, 20))
                    expected = scan(path)
                if entry.number >= 49 and len(got) == len(expected):
                    break
            assert got == without_place(expected)
            await client.stop()
            assert (await client.header()).total_entries == len(expected)


async def test_our_clients_read_in_batches_from_their_server(tmp_path: Path) -> None:
    """One query on the first connection, and no byte of it read as part of anything else."""
    path = tmp_path / "theirs.bin"
    with GoPeer.serve(path) as server, trio.fail_after(PATIENCE):
        write_theirs(server, generated(4, rollbacks=False))
        entries = without_place(scan(path))
        async with connect(*server.address) as client:
            assert not (await client.capabilities()).batch_reads
            with pytest.raises(NotSupported, match="does not support batches"):
                await client.batch_read(0, fallback=False)
            got = []
            while len(got) < len(entries):
                got += await client.batch_read(len(got), 7, 10_000)
            assert [(e.number, e.type, e.data) for e in got] == entries
            with pytest.raises(UnknownEntry):
                await client.batch_read(len(entries) + 1)
            assert len(await client.batch_read(len(entries), wait=0.2)) == 0
            assert list(await client.batch_read(-3)) == got[-3:]
            again = [e async for batch in client.read_batches(max_count=9) for e in batch]
            assert again == got
            with pytest.raises(NotSupported, match="does not support ranges"):
                _ = [batch async for batch in client.between_bookmarks(b"a", b"b")]
            assert await client.entry(0) == got[0]

    with GoPeer.serve(path) as server, BlockingClient(*server.address, batch_reads=False) as other:
        assert list(other.batch_read(3, 5)) == got[3:8]
        assert [e for batch in other.read_batches(from_entry=3) for e in batch] == got[3:]


def test_our_blocking_client_at_their_server(tmp_path: Path) -> None:
    path = tmp_path / "theirs.bin"
    with GoPeer.serve(path) as server:
        write_theirs(server, generated(4, rollbacks=False))
        entries = scan(path)
        with BlockingClient(*server.address) as client:
            assert client.header().total_entries == len(entries)
            got = islice(client.entries(from_entry=0), len(entries))
            assert [(e.number, e.type, e.data) for e in got] == without_place(entries)


@pytest.mark.parametrize("end", ["kill", "close"])
def test_our_client_outlives_their_server(tmp_path: Path, end: str) -> None:
    path = tmp_path / "theirs.bin"
    got: list[tuple[int, int, bytes]] = []

    def go_back(rollback: Rollback) -> None:
        del got[rollback.to_entry :]

    server = GoPeer.serve(path)
    try:
        server.append(100)
        with BlockingClient(*server.address, backoff=Backoff(0.01, 0.1)) as client:
            entries = client.entries(on_rollback=go_back)

            def take(total: int) -> None:
                while len(got) < total:
                    entry = next(entries)
                    assert entry.number == len(got)
                    got.append((entry.number, entry.type, entry.data))

            take(500)
            port = server.address[1]
            getattr(server, end)()
            server = GoPeer.serve(path, port=port)
            server.append(100)
            take(1000)
            assert got == without_place(scan(path))
            # It feeds its clients other entries under the same numbers then.
            server.truncate(900)
            server.append(30)
            take(1050)
            assert got == without_place(scan(path))
    finally:
        server.close()


async def test_our_client_behind_their_relay(written: Path, tmp_path: Path) -> None:
    entries = scan(written)
    with (
        StreamServer(written, host="127.0.0.1", port=0) as server,
        GoPeer.relay(server.addresses[0], tmp_path / "relay.bin") as relay,
        trio.fail_after(PATIENCE),
    ):
        async with connect(*relay.address) as client:
            # To a client that joins while the file is being filled it may send entries that are not
            # committed, and others in their place later.
            while (await client.header()).total_entries < len(entries):
                pass
            got = []
            async for entry in client.entries(from_entry=0):
                got.append((entry.number, entry.type, entry.data))
                if len(got) == len(entries):
                    break
            assert got == without_place(entries)
