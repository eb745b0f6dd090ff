"""Entries selected by bytes in their data: the same from any server, over losses, live and TLS."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio

from datastreamer._codec import Entry
from datastreamer.errors import ProtocolViolation, UsageError
from datastreamer.position import Position
from datastreamer.protocol.commands import CapabilitiesQuery, FilteredRead, FilteredStart, Start
from datastreamer.protocol.resume import Rollback
from datastreamer.selection.clauses import Clause, Where, selected, within
from datastreamer.storage.stream import DataStream
from tests.client.test_batch_reads import SOON, asked, kinds, opened
from tests.client.test_faults import client_behind
from tests.client.test_filtered_reads import HUNDRED, drained
from tests.client.test_resume import seen_of
from tests.network.fixtures import append, over_loopback, until
from tests.network.proxy import NONE
from tests.network.stub import Filtering, Selecting, Stub, StubServer, handler, is_wanted, key

WHERES: list[list[Clause]] = [
    [Where(3, 0, b"\x1f")],
    [Where(3, 40, b"\x2d"), Where(0xB0, 3, b"\x14"), Where(0xB0, 3, b"\x46")],
    [2, Where(3, 0, b"")],
    [Where(5, 0, bytes([n, n])) for n in range(80)],  # more than a server takes
    [Where(77, 9, b"nothing")],
]

SERVERS: dict[str, Callable[[], list[Stub]]] = {
    "selects": lambda: [Selecting(HUNDRED) for _ in range(4)],
    "one frame": lambda: [Selecting(HUNDRED, span=1000) for _ in range(4)],
    "filters types alone": lambda: [Filtering(HUNDRED) for _ in range(4)],
    "batches alone": lambda: [Stub(HUNDRED) for _ in range(4)],
    "old": lambda: [Stub(HUNDRED, extensions="refused") for _ in range(4)],
    "old, closes": lambda: [Stub(HUNDRED, extensions="closed") for _ in range(4)],
}
servers = pytest.mark.parametrize("server", SERVERS)


def of(entries: Sequence[Entry], where: Sequence[Clause]) -> list[Entry]:
    return [entry for entry in entries if is_wanted(entry, where)]


@kinds
@servers
@pytest.mark.parametrize("method", ["entries", "batches", "read_batches"])
async def test_the_same_from_any_server(kind: str, server: str, method: str) -> None:
    for where in WHERES:
        stubs = SERVERS[server]()
        with StubServer(*map(handler, stubs)) as listening:
            async with opened(kind, listening.port, backoff=SOON) as client:
                for start, stop in [(0, 100), (40, 40), (3, 50)]:
                    found, position = await drained(
                        client, method, from_entry=start, stop=stop, where=where
                    )
                    assert found == of(HUNDRED[start:stop], where)
                    assert position is None or position.next_entry == stop
                if method != "read_batches":
                    found, position = await drained(
                        client, method, from_bookmark=key(30), stop=63, where=where
                    )
                    assert found == of(HUNDRED[30:63], where)
                assert position is not None
                again = Position.from_json(position.to_json())
                found, _ = await drained(client, method, from_position=again, stop=80, where=where)
                assert found == of(HUNDRED[position.next_entry : 80], where)
        selects = server in ("selects", "one frame")
        near = within(selected(where=where) or ())
        typed = server == "filters types alone" and all(isinstance(it, int) for it in near)
        expected = FilteredRead if method == "read_batches" else FilteredStart
        assert (asked(stubs, expected) > 0) == (selects or typed)
        assert not (selects and asked(stubs, Start))
        assert asked(stubs, CapabilitiesQuery) <= listening.accepted


@kinds
@servers
async def test_single_batches(kind: str, server: str) -> None:
    for where in WHERES:
        with StubServer(*map(handler, SERVERS[server]())) as listening:
            async with opened(kind, listening.port, backoff=SOON) as client:
                number, found = 0, list[Entry]()
                while number < 100:
                    batch = await client.batch_read(number, 7, where=where, fallback=True)
                    assert batch.first_number == number < batch.next_number
                    found += batch
                    number = batch.next_number
                assert found == of(HUNDRED, where)


async def called(call: Callable[..., Any], named: dict[str, Any], *, wait: bool) -> None:
    found = call(**named)
    if wait:
        await found


@kinds
async def test_what_cannot_be_asked_for(kind: str) -> None:
    with StubServer(handler(Selecting(HUNDRED))) as server:
        async with opened(kind, server.port) as client:
            for method in ("entries", "batches", "read_batches", "batch_read"):
                call = partial(getattr(client.client, method))
                if method == "batch_read":
                    call = partial(client.batch_read, 0)
                for named, says in (
                    ({"where": [Where(1)], "types": [1]}, "name one of them"),
                    ({"where": []}, "selects nothing"),
                    ({"where": [Where(1, 70_000, b"a")]}, "offset"),
                ):
                    with pytest.raises(UsageError, match=says):
                        await called(call, named, wait=method == "batch_read")
            for selection in ({"where": [Where(1, 0, b"a")]}, {"types": [1]}):
                with pytest.raises(UsageError, match="commits are not reported"):
                    client.client.batches(commits=True, **selection)


class Careless(Selecting):
    """Sends what was not asked for."""

    def answer(self, event: Any) -> bytes:
        if isinstance(event, FilteredStart | FilteredRead):
            event = replace(event, where=(3,))
        return super().answer(event)


@pytest.mark.parametrize("method", ["batches", "read_batches"])
async def test_an_entry_that_was_not_selected(method: str) -> None:
    stubs = [(Careless(HUNDRED, span=40), NONE) for _ in range(2)]
    async with client_behind(*stubs) as (client, _):
        with pytest.raises(ProtocolViolation, match="or others than selected"):
            await seen_of(getattr(client, method)(stop=90, where=[Where(3, 0, b"\x1f")]), [])


def made(chance: random.Random, number: int) -> tuple[int, bytes]:
    kind = chance.choice([16, 16, 16, 2])
    size = chance.choice([0, 1, 2, 3, 40, 3000])
    return kind, (b"\0\5" + bytes([number % 4]) + bytes(size))[: size + 3]


WANTED: list[Clause] = [Where(16, 2, b"\1"), Where(16, 2, b"\3\0\0"), Where(2, 2, b"\2")]


@pytest.mark.parametrize("seed", range(6))
async def test_history_and_live_over_changes(path: Path, seed: int) -> None:
    """A client of a selection beside a writer that truncates, updates and continues, over lost
    connections: what it keeps is what a full read selects."""
    chance = random.Random(seed)
    got: dict[int, Entry] = {}
    with DataStream.create(path, sync="os") as stream:
        append(stream, *(made(chance, n) for n in range(3000)))
        before = dict(enumerate(stream.entries()))
        updated: set[int] = set()
        async with over_loopback(stream) as rig:

            def back(rollback: Rollback) -> None:
                for number in [n for n in got if n >= rollback.to_entry]:
                    del got[number]

            async def receive() -> None:
                async with opened("trio", rig.address[1], backoff=SOON) as client:
                    batches = client.client.batches(where=WANTED, on_rollback=back)
                    async with batches:
                        async for batch in batches:
                            for entry in batch:
                                assert is_wanted(entry, WANTED)
                                got[entry.number] = entry
                            if batch.next_number >= stream.total_entries and done.is_set():
                                return

            done = trio.Event()
            async with trio.open_nursery() as nursery:
                nursery.start_soon(receive)
                for turn in range(25):
                    await trio.sleep(0.01)
                    what = chance.random()
                    if what < 0.25:
                        total = stream.total_entries
                        to = max(1, total - chance.randint(1, 200))
                        await trio.to_thread.run_sync(stream.truncate, to)
                        updated = {n for n in updated if n < to}
                    elif what < 0.4:
                        number = chance.randrange(stream.total_entries)
                        old = stream.entry(number)
                        data = bytes(old.data[:2]) + bytes([turn % 4]) + bytes(old.data[3:])
                        if len(data) == len(old.data):
                            await trio.to_thread.run_sync(
                                stream.update_entry, number, old.type, data
                            )
                            updated.add(number)
                    first = stream.total_entries
                    append(stream, *(made(chance, first + n) for n in range(chance.randint(1, 90))))
                done.set()
                append(stream, (16, b"\0\5\1the last"))
            del before
            wanted = {e.number: e for e in stream.entries() if is_wanted(e, WANTED)}
            for number in updated:
                # A client that has passed an updated entry is sent nothing of it.
                got.pop(number, None)
                wanted.pop(number, None)
            assert got == wanted


@kinds
async def test_live_entries_cost_what_is_wanted(kind: str, stream: DataStream) -> None:
    """Of a thousand payloads, each with parts of 10 kB and 5 bytes, the 5 bytes are sent."""
    for _ in range(100):
        append(stream, (16, b"\0\5\0" + bytes(9)), (16, b"\0\5\2" + bytes(10_000)))
        append(stream, (16, b"\0\5\1five!"))
    async with over_loopback(stream) as rig, opened(kind, rig.address[1]) as client:
        where = [Where(16, 2, b"\0"), Where(16, 2, b"\1")]
        before = rig.server.counts.bytes_sent
        found, position = await drained(client, "batches", stop=300, where=where)
        assert len(found) == 200
        assert rig.server.counts.bytes_sent - before < 100 * 80
        batch = await client.batch_read(300, wait=0.01, where=where)
        assert (len(batch), batch.next_number) == (0, 300)

        async def ask() -> None:
            got.extend(await client.batch_read(300, wait=30, where=where))

        got: list[Entry] = []
        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask)
            for data in (b"\0\5\2no", b"\0", b"\0\5\1yes"):
                await until(lambda: rig.server.broadcast.watchers)
                append(stream, (16, data))
        assert [bytes(entry.data) for entry in got] == [b"\0\5\1yes"]
        assert position is None or position.next_entry == 300
