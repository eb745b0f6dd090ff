"""Filters and commits where one side is the reference: it is undisturbed, and does without."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import trio

from datastreamer import (
    Backoff,
    BlockingClient,
    BlockingRelay,
    DataStream,
    Entry,
    StreamServer,
    connect,
)
from datastreamer.errors import NotSupported
from tests.interop.peer import GoPeer, beside_reference
from tests.interop.plain import BOOKMARK, Plain, generated, keys, scan
from tests.interop.test_files import write_ours, write_theirs
from tests.interop.test_net import as_plain, without_place

pytestmark = beside_reference

PATIENCE = 60.0
QUICK = Backoff(0.01, 0.1)
Got = list[tuple[int, int, bytes]]


def of(entries: list[Plain], types: Collection[int]) -> Got:
    return [each for each in without_place(entries) if each[1] in types]


def plain(entries: Any) -> Got:
    return [(e.number, e.type, e.data) for e in entries]


def types_of(entries: list[Plain]) -> list[set[int]]:
    """Sets of types to ask for: one, some, bookmarks, none that is there, and more
    than a server is asked for."""
    there = sorted({e.type for e in entries} - {BOOKMARK})
    return [
        {there[0]},
        set(there[1::2]),
        {BOOKMARK},
        {BOOKMARK, there[-1]},
        {4_000_000_000},
        {*there, *range(1000, 1100)},
    ]


@pytest.fixture
def theirs(tmp_path: Path) -> Iterator[tuple[GoPeer, Path]]:
    path = tmp_path / "theirs.bin"
    with GoPeer.serve(path) as server:
        write_theirs(server, generated(110, 12, rollbacks=False))
        yield server, path


# --- our client, filtering, at the reference's server ---


def test_all_ways_to_filter_at_their_server(theirs: tuple[GoPeer, Path]) -> None:
    server, path = theirs
    entries = scan(path)
    total = len(entries)
    with BlockingClient(*server.address) as client:
        assert not client.capabilities().filters
        for types in types_of(entries):
            expected = of(entries, types)
            assert plain(client.entries(types=types, stop=total)) == expected
            for iteration in (client.batches, client.read_batches):
                got: Got = []
                reached = 7
                for batch in iteration(from_entry=7, types=types, stop=total):
                    # Of parts without any that is wanted nothing is handed out.
                    assert reached <= batch.first_number < batch.next_number
                    reached = batch.next_number
                    got += plain(batch)
                assert got == [each for each in expected if each[0] >= 7]
            got, reached = [], 0
            while reached < total:
                batch = client.batch_read(reached, max_count=20, types=types)
                assert batch.next_number > reached
                reached = batch.next_number
                got += plain(batch)
            assert got == expected
            with pytest.raises(NotSupported):
                client.batch_read(0, types=types, fallback=False)
        for key, number in islice(keys(entries).items(), 5):
            wanted = {e.type for e in entries[number::3]}
            found = client.entries(from_bookmark=key, types=wanted, stop=total)
            assert plain(found) == of(entries[number:], wanted)
        # It is as usable as ever.
        assert client.header().total_entries == total


@pytest.mark.parametrize("batch_reads", [True, False])
async def test_filtering_while_their_server_writes(
    theirs: tuple[GoPeer, Path], batch_reads: bool
) -> None:
    server, path = theirs
    types = {scan(path)[0].type, scan(path)[5].type, BOOKMARK}
    got: Got = []
    with trio.fail_after(PATIENCE):
        async with (
            connect(*server.address, batch_reads=batch_reads) as client,
            client.batches(types=types) as batches,
        ):
            for seed in range(111, 116):
                writing = generated(seed, 5, rollbacks=False)
                await trio.to_thread.run_sync(write_theirs, server, writing)
                # The last that is wanted is waited for, not the last of all.
                expected = of(scan(path), types)
                while len(got) < len(expected):
                    got += plain(await batches.__anext__())
                assert got == expected


def test_filtering_continues_from_our_server_to_theirs_and_back(tmp_path: Path) -> None:
    """What chooses changes under one iteration: server, client, server."""
    ours, theirs = tmp_path / "ours.bin", tmp_path / "theirs.bin"
    steps = list(generated(120, 20, rollbacks=False))
    with DataStream.create(ours, sync="os") as stream:
        write_ours(stream, steps[: len(steps) // 2 + _to_commit(steps)])
    with GoPeer.serve(theirs) as server:
        write_theirs(server, steps)
    entries = scan(theirs)
    half = len(scan(ours))
    assert without_place(scan(ours)) == without_place(entries[:half])
    types = {BOOKMARK, *sorted({e.type for e in entries})[::2]}
    expected = of(entries, types)
    first = len(of(entries[:half], types))
    with contextlib.ExitStack() as stack:
        with StreamServer(ours, host="127.0.0.1", port=0, sync="os") as served:
            port = served.port
            client = stack.enter_context(
                BlockingClient("127.0.0.1", port, backoff=QUICK, retry_for=PATIENCE)
            )
            assert client.capabilities().filters
            found: Iterator[Entry] = iter(client.entries(types=types))
            got = plain(islice(found, first))
        with GoPeer.serve(theirs, port=port):
            got += plain(islice(found, len(expected) - first))
            assert got == expected
        with DataStream.open(ours, sync="os") as stream, stream.atomic_op() as op:
            for entry in entries[half:]:
                if entry.type == BOOKMARK:
                    op.add_bookmark(entry.data)
                else:
                    op.add_entry(entry.type, entry.data)
        with StreamServer(ours, host="127.0.0.1", port=port, sync="os") as served:
            write_ours(served.stream, generated(121, 8, rollbacks=False))
            expected = of(scan(ours), types)
            got += plain(islice(found, len(expected) - len(got)))
            assert got == expected


def _to_commit(steps: list[Any]) -> int:
    """How many steps after the middle the operation ends."""
    return next(n for n, step in enumerate(steps[len(steps) // 2 :]) if step[0] == "commit") + 1


def test_filters_behind_relays_of_both(theirs: tuple[GoPeer, Path], tmp_path: Path) -> None:
    """Our relay of their server chooses, their relay of ours does not; the client sees no
    difference."""
    server, path = theirs
    entries = scan(path)
    total = len(entries)
    with BlockingRelay(
        [server.address], tmp_path / "first.bin", host="127.0.0.1", port=0, sync="os", backoff=QUICK
    ) as first:
        with BlockingClient(*first.addresses[0]) as client:
            assert client.capabilities().filters
            for types in types_of(entries):
                assert plain(client.entries(types=types, stop=total)) == of(entries, types)
        with (
            GoPeer.relay(first.addresses[0], tmp_path / "second.bin") as second,
            BlockingClient(*second.address) as client,
        ):
            # While it fills its file it may send what it truncates.
            while client.header().total_entries < total:
                pass
            assert not client.capabilities().filters
            for types in types_of(entries):
                assert plain(client.entries(types=types, stop=total)) == of(entries, types)


# --- the reference's client beside ours with filters, or with commit reports ---


def test_their_client_is_not_disturbed(tmp_path: Path) -> None:
    path = tmp_path / "ours.bin"
    with StreamServer(path, host="127.0.0.1", port=0, sync="os") as server:
        write_ours(server.stream, generated(130, 10))
        address = server.addresses[0]
        with contextlib.ExitStack() as stack:
            their = stack.enter_context(GoPeer.client(address))
            their.start(0)
            types = {BOOKMARK, scan(path)[1].type}
            ours = [stack.enter_context(BlockingClient(*address)) for _ in range(3)]
            streamed = iter(ours[0].batches(types=types))
            reported = ours[1].batches(commits=True)
            got: Got = []
            commits: Got = []
            for seed in range(131, 136):
                write_ours(server.stream, generated(seed, 4, rollbacks=False))
                entries = scan(path)
                while len(got) < len(of(entries, types)):
                    got += plain(next(streamed))
                while len(commits) < len(entries):
                    batch = next(reported)
                    assert reported.commit_ahead is not None
                    assert batch.next_number <= reported.commit_ahead <= len(entries)
                    commits += plain(batch)
                read: Got = []
                for batch in ours[2].read_batches(types=types):
                    read += plain(batch)
                assert got == read == of(entries, types)
            expected = without_place(entries)
            assert commits == expected
            assert as_plain(list(their.entries(len(expected)))) == expected
            assert not their.warnings


def test_their_server_reports_no_commits(theirs: tuple[GoPeer, Path]) -> None:
    server, path = theirs
    entries = scan(path)
    with BlockingClient(*server.address) as client:
        batches = client.batches(commits=True)
        got: Got = []
        while len(got) < len(entries):
            got += plain(next(batches))
            assert batches.commit_ahead is None
        assert got == without_place(entries)
