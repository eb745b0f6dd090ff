"""Relays of both kinds, upstream and downstream of servers of both kinds; crowds of clients."""

from __future__ import annotations

import contextlib
import shutil
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

from datastreamer import Backoff, BlockingClient, BlockingRelay, DataStream, StreamServer
from tests.interop.peer import GoPeer, beside_reference
from tests.interop.plain import generated, scan
from tests.interop.test_files import write_ours, write_theirs
from tests.interop.test_net import as_plain, without_place

pytestmark = beside_reference

QUICK = Backoff(0.01, 0.1)
PATIENCE = 60.0
CROWD = 50


@contextlib.contextmanager
def our_relay(path: Path, *upstreams: tuple[str, int]) -> Iterator[BlockingRelay]:
    with BlockingRelay(
        upstreams, path, host="127.0.0.1", port=0, sync="os", backoff=QUICK, look_seconds=0.1
    ) as relay:
        yield relay


@contextlib.contextmanager
def our_server(path: Path, port: int = 0) -> Iterator[StreamServer]:
    with StreamServer(path, host="127.0.0.1", port=port, sync="os") as server:
        yield server


def received(address: tuple[str, int], total: int) -> list[tuple[int, int, bytes]]:
    """What our client gets there, up to `total` entries."""
    with BlockingClient(*address, backoff=QUICK, retry_for=PATIENCE) as client:
        return [(e.number, e.type, e.data) for e in client.entries(stop=total)]


def test_our_relay_of_their_server(tmp_path: Path) -> None:
    path = tmp_path / "theirs.bin"
    with GoPeer.serve(path, version=3, system_id=1101) as server:
        server.append(50)
        with our_relay(tmp_path / "relay.bin", server.address) as relay:
            assert len(received(relay.addresses[0], 250)) == 250
            write_theirs(server, generated(90, 10, rollbacks=False))
            entries = scan(path)
            # Their client follows our relay live.
            with GoPeer.client(relay.addresses[0]) as client:
                assert client.header()["system_id"] == 1101
                client.start(0)
                assert as_plain(list(client.entries(len(entries)))) == without_place(entries)
                server.append(3)
                more = scan(path)[len(entries) :]
                assert as_plain(list(client.entries(len(more)))) == without_place(more)
                assert not client.warnings
    assert scan(tmp_path / "relay.bin") == scan(path)


def test_chains_of_both(tmp_path: Path) -> None:
    """Server and relays, ours and theirs in turn; all files are the same bytes in the end."""
    with ExitStack() as stack:
        server = stack.enter_context(our_server(tmp_path / "0.bin"))
        first = stack.enter_context(GoPeer.relay(server.addresses[0], tmp_path / "1.bin"))
        write_ours(server.stream, generated(91, 5))
        total = server.stream.total_entries
        # While it fills its file, their relay may send what it truncates.
        with BlockingClient(*first.address) as client:
            while client.header().total_entries < total:
                pass
        second = stack.enter_context(our_relay(tmp_path / "2.bin", first.address))
        assert len(received(second.addresses[0], total)) == total
        third = stack.enter_context(GoPeer.relay(second.addresses[0], tmp_path / "3.bin"))
        end = stack.enter_context(GoPeer.client(third.address))
        # Nor does it count what it has sent to a client that catches up while it writes.
        while end.header()["total_entries"] < total:
            pass
        end.start(0)
        got = as_plain(list(end.entries(total)))
        write_ours(server.stream, generated(92, 5))
        entries = scan(tmp_path / "0.bin")
        got += as_plain(list(end.entries(len(entries) - total)))
        assert got == without_place(entries)
    for hop in range(1, 4):
        assert scan(tmp_path / f"{hop}.bin") == entries


def test_fails_over_between_ours_and_theirs(tmp_path: Path) -> None:
    ours, theirs = tmp_path / "ours.bin", tmp_path / "theirs.bin"
    with DataStream.create(ours, sync="os") as stream:
        write_ours(stream, generated(93, 5))
    shutil.copyfile(ours, theirs)
    with ExitStack() as stack:
        other = stack.enter_context(GoPeer.serve(theirs))
        with our_server(ours) as server:
            port = server.port
            upstreams = (server.addresses[0], other.address)
            relay = stack.enter_context(our_relay(tmp_path / "relay.bin", *upstreams))
            total = server.stream.total_entries
            assert len(received(relay.addresses[0], total)) == total
        other.append(20)
        entries = scan(theirs)
        assert received(relay.addresses[0], len(entries)) == without_place(entries)
        # Ours is there again, with the same entries and more.
        with DataStream.open(ours, sync="os") as stream, stream.atomic_op() as op:
            for entry in entries[total:]:
                if entry.type == 0xB0:
                    op.add_bookmark(entry.data)
                else:
                    op.add_entry(entry.type, entry.data)
        with our_server(ours, port) as server:
            write_ours(server.stream, generated(94, 5))
            entries = scan(ours)
            assert received(relay.addresses[0], len(entries)) == without_place(entries)
            assert relay.failure is None


def test_a_crowd_of_theirs_while_ours_rolls_back_restarts_and_truncates(tmp_path: Path) -> None:
    path = tmp_path / "ours.bin"
    with DataStream.create(path, sync="os") as stream:
        write_ours(stream, generated(95, 5))
    with ExitStack() as stack, ThreadPoolExecutor(8) as pool:
        with our_server(path) as server:
            port, address = server.port, server.addresses[0]
            crowd = list(pool.map(lambda _: GoPeer.client(address), range(CROWD)))
            for client in crowd:
                stack.enter_context(client)
                client.start(0)
            got = 0

            def all_have(total: int) -> None:
                nonlocal got
                expected = without_place(scan(path))[got:total]
                for client in crowd:
                    found = as_plain(list(client.entries(total - got, PATIENCE)))
                    assert found == expected
                got = total

            all_have(server.stream.total_entries)
            for seed in range(96, 100):
                # Operations that are rolled back among them: no client receives any of these.
                server.stream.start_atomic_op()
                server.stream.add_entries(7, [b"never committed"] * 100)
                server.stream.rollback_atomic_op()
                write_ours(server.stream, generated(seed, 3))
            all_have(server.stream.total_entries)
        with our_server(path, port) as server:
            # They reconnect by themselves, and resume where they were.
            write_ours(server.stream, generated(101, 3, rollbacks=False))
            all_have(server.stream.total_entries)
            before = [len(client.warnings) for client in crowd]
            server.stream.truncate(got - 10)
            write_ours(server.stream, generated(102, 6, rollbacks=False))
            entries = scan(path)
            # Each client notices the end of its connection; a new client gets the right entries.
            deadline = time.monotonic() + PATIENCE
            while any(len(c.warnings) <= seen for c, seen in zip(crowd, before, strict=True)):
                assert time.monotonic() < deadline
            answer = GoPeer.read(server.addresses[0])
            assert answer["entries"] == len(entries)
            assert received(server.addresses[0], len(entries)) == without_place(entries)


def test_their_truncation_stops_our_relay(tmp_path: Path) -> None:
    """Their server cuts back under its clients without a word, and feeds them other entries
    under numbers that they have; none of these is kept."""
    path = tmp_path / "theirs.bin"
    with GoPeer.serve(path) as server:
        server.append(40)
        with our_relay(tmp_path / "relay.bin", server.address) as relay:
            assert len(received(relay.addresses[0], 200)) == 200
            before = without_place(scan(path))
            server.truncate(150)
            write_theirs(server, generated(103, 20, rollbacks=False))
            deadline = time.monotonic() + PATIENCE
            while relay.failure is None:
                assert time.monotonic() < deadline
            assert received(relay.addresses[0], 200) == before
