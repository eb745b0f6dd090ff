"""Random worlds of servers that send all entries or some, are cut off and truncate: each payload
comes once, whatever was asked of which server when its place was saved."""

from __future__ import annotations

import random
import sqlite3
from collections.abc import Callable
from contextlib import closing, suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio

from datastreamer._codec import Entry
from datastreamer.consumer.options import ReassemblyOptions
from datastreamer.consumer.sqlite_store import SqliteStore
from datastreamer.consumer.state import SourceBack, SourceLost, SourceRolledBack
from datastreamer.consumer.trio_reassembly import reassemble
from datastreamer.protocol.commands import FilteredStart, Start
from datastreamer.protocol.retry import Backoff
from datastreamer.reassembly import pack_message
from datastreamer.reassembly.progress import ReassemblyProgress
from datastreamer.selection.clauses import selected
from tests.consumer.test_sources import Kept
from tests.network.fixtures import seeds
from tests.network.network import Network, hosts, messages_of
from tests.network.stub import Filtering, Stub, serve_stream

MESSAGE = 0x10
SOON = Backoff(0.001, 0.002)
CHOICES = [None, [MESSAGE], [1, MESSAGE]]

SERVERS: list[Callable[[list[Entry]], Stub]] = [
    Filtering,
    partial(Filtering, span=40),
    Stub,
    partial(Stub, extensions="refused"),
    partial(Stub, extensions="closed"),
]


def filter_by(monkeypatch: pytest.MonkeyPatch, types: list[int] | None) -> None:
    """Have servers send the entries of these types alone."""
    where = selected(types)
    monkeypatch.setattr(ReassemblyOptions, "where", property(lambda _: where))


class Crash(Exception):
    pass


class Source:
    """A stream of messages and other entries, and its servers."""

    def __init__(self, name: str, network: Network, chance: random.Random) -> None:
        self.name = name
        self.entries: list[Entry] = []
        self.served: list[trio.abc.Stream] = []
        self._network = network
        self._chance = chance

    def add(self, kind: int, data: bytes) -> None:
        self.entries.append(Entry(len(self.entries), kind, data))

    def add_noise(self, most: int) -> None:
        for _ in range(self._chance.randrange(most)):
            self.add(self._chance.choice([1, 2]), self._chance.randbytes(4))

    def truncate(self) -> None:
        """What was removed comes again, in another order."""
        at = max(0, len(self.entries) - self._chance.randrange(1, 60))
        removed = [entry.data for entry in self.entries[at:] if entry.type == MESSAGE]
        del self.entries[at:]
        self._chance.shuffle(removed)
        for data in removed:
            self.add_noise(6)
            self.add(MESSAGE, data)

    def serve_by(self, make: Callable[[list[Entry]], Stub], cuts: int) -> None:
        """Its next connections: some are cut off, and the stream may be truncated then."""

        async def serve(stream: trio.abc.Stream, after: int | None = None) -> None:
            stub = make(self.entries)
            stub.entries = self.entries
            if after is None:
                await serve_stream(stub, stream, 100)
                return
            with suppress(trio.BrokenResourceError):
                while not stub.closed and after > 0:
                    data = await stream.receive_some(65536)
                    if not data:
                        break
                    sent = stub.receive(data)
                    await stream.send_all(sent[:after])
                    after -= len(sent)
            if self._chance.random() < 0.5:
                self.truncate()
            await stream.aclose()

        self._network.servers[self.name] = [
            *(partial(serve, after=self._chance.randrange(9000)) for _ in range(cuts)),
            serve,
        ]


@seeds(5, 200)
async def test_each_payload_once(
    seed: int, network: Network, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chance = random.Random(seed)
    streams = [Source(name, network, chance) for name in "ab"]
    for stream in streams:
        # Never complete: it is read again from here, as if a producer had failed.
        stream.add(MESSAGE, pack_message(*messages_of(999)[0]))
        stream.add_noise(700)
    expected: set[int] = set()
    waiting: list[tuple[bytes, bytes]] = []
    for phase in range(6):
        numbers = range(20 * phase, 20 * phase + chance.randrange(1, 20))
        sent = waiting + [message for number in numbers for message in messages_of(number)]
        chance.shuffle(sent)
        cut = len(sent) if phase == 5 else chance.randrange(len(sent) + 1)
        sent, waiting = sent[:cut], sent[cut:]
        for message in sent:
            for stream in [each for each in streams if chance.random() < 0.6] or streams[:1]:
                stream.add(MESSAGE, pack_message(*message))
                stream.add_noise(5)
        expected.update(numbers)
        late = {int(key[1:]) if key[0] == 0 else int(key[1:33]) for key, _ in waiting}
        filter_by(monkeypatch, chance.choice(CHOICES))
        for stream in streams:
            stream.add_noise(30)
            if chance.random() < 0.3:
                stream.truncate()
            stream.serve_by(chance.choice(SERVERS), chance.randrange(4))
        await read(tmp_path / "db", expected - late, chance)


@pytest.mark.parametrize("types", [None, [MESSAGE]], ids=["all", "filtered"])
async def test_what_is_remembered_is_compared_until_it_is_read_again(
    types: list[int] | None, network: Network, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The source is lost and truncated while it sends what an earlier run has read."""
    filter_by(monkeypatch, types)
    stream = Source("a", network, random.Random(1))
    messages = [each for number in range(90) for each in messages_of(number)]
    for message in [messages_of(999)[0], *messages]:
        stream.add(MESSAGE, pack_message(*message))
        stream.add(1, b"")
    stream.serve_by(Filtering, 0)
    store = Kept()
    async with reassemble(hosts("a"), store=store) as payloads:
        assert len([payload async for payload in payloads]) == 90
    total = len(stream.entries)
    known = [name for each in store.saves for name in each.known]
    before = ReassemblyProgress(store.saves[-1].places, known, len(known))
    assert (before.places["a"].position, before.places["a"].read.next_entry) == (0, total)

    async def cut(connection: trio.abc.Stream) -> None:
        stub = Filtering(stream.entries)
        begun = False
        while not begun:
            sent = stub.receive(await connection.receive_some(65536))
            # What is remembered is compared from a later entry on.
            begun = not {Start(0), FilteredStart(0, (MESSAGE,))}.isdisjoint(stub.seen)
            await connection.send_all(sent[: 2000 if begun else len(sent)])
        await trio.sleep(0.05)
        del stream.entries[-9:]
        for message in messages_of(1000):
            stream.add(MESSAGE, pack_message(*message))
        await connection.aclose()

    network.servers["a"].insert(0, cut)
    reported: list[Any] = []
    async with reassemble(
        hosts("a"),
        store=Kept(before),
        on_event=reported.append,
        backoff=SOON,
        follow=True,
    ) as payloads:
        with trio.fail_after(60):
            assert int((await payloads.__anext__()).id) == 1000
    assert [type(event) for event in reported] == [SourceLost, SourceRolledBack, SourceBack]
    rollback = reported[1].rollback
    assert (rollback.to_entry, rollback.from_entry) == (total - 9, total)


async def read(path: Path, expected: set[int], chance: random.Random) -> None:
    """Take payloads until these are there, in runs that end anywhere."""
    reported: list[Any] = []
    found: list[int] = []
    while set(found) != expected:
        with closing(sqlite3.connect(path, check_same_thread=False)) as database:
            database.execute("PRAGMA synchronous=OFF")
            database.execute("CREATE TABLE IF NOT EXISTS result (id INTEGER)")
            database.commit()
            rows = database.execute("SELECT id FROM result").fetchall()
            left = len(expected) - len(rows)
            with suppress(Crash), trio.fail_after(60):
                async with reassemble(
                    hosts("a", "b"),
                    store=SqliteStore(database),
                    on_event=reported.append,
                    backoff=SOON,
                    follow=True,
                ) as payloads:
                    for _ in range(chance.choice([left, left, chance.randrange(left + 1)])):
                        payload: Any = await payloads.__anext__()
                        database.execute("INSERT INTO result VALUES (?)", (int(payload.id),))
                    if chance.random() < 0.3:
                        raise Crash
        with closing(sqlite3.connect(path)) as database:
            found = [number for (number,) in database.execute("SELECT id FROM result")]
        assert len(found) == len(set(found))
    assert {type(event) for event in reported} <= {SourceLost, SourceBack, SourceRolledBack}
