"""Pages of a relay's own file are damaged, and the upstream changes or removes their entries.

Each test ends with the same entries at both, with a file that `verify` finds whole, and with a
relay that still downloads.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import trio

from datastreamer._codec import Entry
from datastreamer.client.async_client import Batches
from datastreamer.client.trio_driver import connect
from datastreamer.errors import DamagedFile, HistoryChanged, UpstreamRewritten
from datastreamer.storage.maintain.check import verify
from datastreamer.storage.stream import DataStream
from tests.relay.relaying import (
    QUICK,
    Rig,
    Running,
    contents,
    fill,
    new,
    nursery_for,
    packed,
    relaying,
    serving,
)
from tests.storage.made import FIRST, PAGE, FaultyDisk, evict

LAST = 3
"""The last page of the source, which is not whole."""

# In each page: the entry with a changed bit, one before it, and one after it.
BEFORE, BAD, AFTER = 50, 100, 150


class Source:
    """The upstream's stream, and what its entries have been."""

    def __init__(self, stream: DataStream) -> None:
        self.stream = stream
        self._versions: dict[int, set[tuple[int, bytes]]] = {}

    def grow(self, operations: int, *, salt: bytes = b"", size: int = 2000) -> None:
        for _ in range(operations):
            fill(self.stream, 10, salt=salt, size=size)
        self._note()

    def update(self, number: int) -> None:
        entry = self.stream.entry(number)
        if entry.is_bookmark:
            entry = self.stream.entry(number + 1)
        data = b"%08d" % self.stream.epoch * (len(entry.data) // 8)
        self.stream.update_entry(entry.number, entry.type, data)
        self._note()

    def truncate(self, number: int) -> None:
        """Other entries take the places of those that are removed."""
        self.stream.truncate(number)
        self.grow(3, salt=b"%d" % self.stream.epoch)

    def first(self, page: int) -> int:
        return self.stream.reader.first_number(page)

    def _note(self) -> None:
        for number, kind, data in contents(self.stream):
            self._versions.setdefault(number, set()).add((kind, data))

    def knows(self, entry: Entry) -> bool:
        return (entry.type, entry.data) in self._versions[entry.number]


@pytest.fixture
def source(tmp_path: Path) -> Iterator[Source]:
    with new(tmp_path / "source.bin") as stream:
        made = Source(stream)
        made.grow(195)
        assert stream.header.total_length // PAGE == LAST
        assert stream.total_entries > made.first(LAST) + AFTER + 1
        yield made


Damage = Callable[[Path, int], None]


def a_bit(path: Path, page: int) -> None:
    """Of an entry's data, so that only the checksum shows it."""
    _overwrite(path, FIRST + page * PAGE + BAD * 1817, lambda old: bytes([old[0] ^ 4]), 1)


def all_of_it(path: Path, page: int) -> None:
    _overwrite(path, FIRST + page * PAGE, lambda old: os.urandom(len(old)), PAGE)


def the_head(path: Path, page: int) -> None:
    """The number of the first entry, by which others are looked for: another one that is
    possible."""
    _overwrite(path, FIRST + page * PAGE + 9, lambda old: (1900).to_bytes(8, "big"), 8)


def _overwrite(path: Path, start: int, make: Callable[[bytes], bytes], size: int) -> None:
    """On the disk: the system's memory has nothing of the file afterwards."""
    with path.open("r+b", buffering=0) as file:
        file.seek(start)
        old = file.read(size)
        file.seek(start)
        file.write(make(old))
    evict(path)


Change = Callable[[Source, int], None]

UPDATES: dict[str, Change] = {
    "update of the damaged entry": lambda source, page: source.update(source.first(page) + BAD),
    "update of another entry": lambda source, page: source.update(source.first(page) + AFTER),
    "several updates": lambda source, page: [
        source.update(source.first(page) + at) for at in (AFTER, BAD, BEFORE, BAD)
    ],
}
TRUNCATIONS: dict[str, Change] = {
    "truncation before it": lambda source, page: source.truncate(source.first(page) + BEFORE),
    "truncation after it": lambda source, page: source.truncate(source.first(page) + AFTER),
    "truncation to the page's start": lambda source, page: source.truncate(source.first(page)),
    "truncation to the page's end": lambda source, page: source.truncate(
        min(source.stream.total_entries - 1, source.first(min(page + 1, LAST)))
    ),
    "update and truncation": lambda source, page: [
        source.update(source.first(page) + BAD),
        source.truncate(source.first(page) + AFTER),
    ],
    "truncation and update": lambda source, page: [
        source.truncate(source.first(page) + AFTER),
        source.update(source.first(page) + BAD),
    ],
}
CHANGES = UPDATES | TRUNCATIONS
DAMAGES: list[Damage] = [a_bit, all_of_it, the_head]
PAGES = [0, 1, LAST]
pages = pytest.mark.parametrize("page", PAGES)


def _every(change: int, damage: int, page: int) -> pytest.MarkDecorator | tuple[()]:
    """Each two of them are together in one test; all three are, in the soak tests."""
    return () if (change + damage + page) % 3 == 0 else pytest.mark.soak


each_kind = pytest.mark.parametrize(
    ("change", "damage", "page"),
    [
        pytest.param(
            CHANGES[name],
            damage,
            page,
            marks=_every(i, j, k),
            id=f"{name}-{damage.__name__}-{page}",
        )
        for i, name in enumerate(CHANGES)
        for j, damage in enumerate(DAMAGES)
        for k, page in enumerate(PAGES)
    ],
)


class Watcher:
    """A client that receives everything from a relay, from the first entry on, and again if the
    relay has truncated more than a client remembers."""

    def __init__(self, source: Source, port: int) -> None:
        self.next = 0
        self.rollbacks = 0
        self._source = source
        self._port = port
        self._progress = trio.Event()

    async def run(self) -> None:
        while True:
            with suppress(HistoryChanged):
                async with connect("127.0.0.1", self._port, backoff=QUICK) as client:
                    await self._receive(client.batches(from_entry=0, on_rollback=self._roll_back))
            self.rollbacks += 1

    def _roll_back(self, rollback: object) -> None:
        self.rollbacks += 1

    async def _receive(self, received: Batches) -> None:
        async with received as batches:
            async for batch in batches:
                for entry in batch:
                    assert self._source.knows(entry)
                self.next = batch.next_number
                self._progress.set()
                self._progress = trio.Event()

    async def has(self, total: int) -> None:
        while self.next < total:
            await self._progress.wait()


class Place:
    """A source, its server, and a relay."""

    def __init__(self, nursery: trio.Nursery, source: Source, path: Path) -> None:
        self.source = source
        self.path = path
        self.server: Running
        self.rig: Rig
        self.nursery = nursery

    async def start_relay(self, **options: Any) -> None:
        self.rig = await relaying(self.nursery, self.path, self.server.port, **options)

    def watch(self, rig: Rig | None = None) -> Watcher:
        watcher = Watcher(self.source, (rig or self.rig).port)
        self.nursery.start_soon(watcher.run)
        return watcher

    async def agree(self, rig: Rig | None = None) -> None:
        """Returns when the relay has the source's entries."""
        rig, stream = rig or self.rig, self.source.stream

        def equal() -> bool:
            assert rig.relay.failure is None
            if not rig.relay.caught_up or rig.stream.total_entries != stream.total_entries:
                return False
            try:
                return packed(rig.stream) == packed(stream)
            except (DamagedFile, OSError):
                return False

        await rig.relay.until(equal)

    async def end(self) -> None:
        """They agree, the relay still downloads, and its file is whole."""
        await self.agree()
        self.source.grow(1)
        await self.agree()
        await self.rig.stop()
        report = verify(self.path)
        assert report.problems == []
        assert report.entries == self.source.stream.total_entries


@asynccontextmanager
async def place(tmp_path: Path, source: Source, **options: Any) -> AsyncIterator[Place]:
    """The relay has all entries."""
    async with nursery_for() as nursery:
        made = Place(nursery, source, tmp_path / "relay.bin")
        made.server = await serving(nursery, source.stream)
        await made.start_relay(**options)
        await made.agree()
        yield made


FOLLOW = {"on_rewrite": "follow"}


@each_kind
async def test_while_it_runs(
    tmp_path: Path, source: Source, page: int, damage: Damage, change: Change
) -> None:
    async with place(tmp_path, source, **FOLLOW) as here:
        if page < LAST:  # which is not compared before it is sent
            await here.watch().has(source.stream.total_entries)
        damage(here.path, page)
        change(source, page)
        await here.end()


@each_kind
async def test_while_it_is_stopped(
    tmp_path: Path, source: Source, page: int, damage: Damage, change: Change
) -> None:
    async with place(tmp_path, source, **FOLLOW) as here:
        await here.rig.stop()
        damage(here.path, page)
        change(source, page)
        await here.start_relay(**FOLLOW)
        here.watch()
        await here.end()


@pytest.mark.parametrize(
    ("change", "page"),
    [
        pytest.param(CHANGES[name], page, marks=_every(i, 0, k), id=f"{name}-{page}")
        for i, name in enumerate(CHANGES)
        for k, page in enumerate(PAGES)
    ],
)
async def test_while_the_upstream_is_away(
    tmp_path: Path, source: Source, page: int, change: Change
) -> None:
    async with place(tmp_path, source, **FOLLOW) as here:
        await here.server.stop()
        a_bit(here.path, page)
        change(source, page)
        await here.server.start()
        await here.end()


@pytest.mark.parametrize(
    ("change", "damaged"),
    [
        # Each change and each set of pages is in several; the soak tests have all pairs.
        pytest.param(name, pages, marks=() if (i + j) % 2 == 0 else pytest.mark.soak)
        for i, name in enumerate(CHANGES)
        for j, pages in enumerate([(0, 2), (0, 1), (1, 2, LAST), (0, 1, 2, LAST)])
    ],
)
async def test_several_pages(
    tmp_path: Path, source: Source, damaged: tuple[int, ...], change: str
) -> None:
    """The upstream changes entries of one or of all of them."""
    async with place(tmp_path, source, **FOLLOW) as here:
        for stopped in (True, False):
            if stopped:
                await here.rig.stop()
            for page in damaged:
                all_of_it(here.path, page)
            for page in reversed(damaged if change in UPDATES else damaged[:1]):
                (UPDATES | TRUNCATIONS)[change](source, page)
            if stopped:
                await here.start_relay(**FOLLOW)
            # Whatever concerns no change is found by a client.
            await here.watch().has(source.stream.total_entries)
            await here.agree()
            source.grow(195)
            # (Damage beside what is being written concerns a client, too.)
            await here.agree()
        await here.end()


@pytest.mark.parametrize(
    ("damage", "change"),
    [
        pytest.param(
            damage,
            UPDATES[name],
            marks=() if (i + j) % 2 == 0 else pytest.mark.soak,
            id=f"{name}-{damage.__name__}",
        )
        for i, name in enumerate(UPDATES)
        for j, damage in enumerate([a_bit, all_of_it])
    ],
)
async def test_updates_remove_nothing(
    tmp_path: Path, source: Source, damage: Damage, change: Change
) -> None:
    """No client of the relay notices them, and a relay of it gets them. Neither follows a rewritten
    history."""
    async with place(tmp_path, source) as here:
        second = await relaying(here.nursery, tmp_path / "second.bin", here.rig.port)
        total = source.stream.total_entries
        watchers = [here.watch(), here.watch(second)]
        for watcher in watchers:
            await watcher.has(total)
        for page in (0, 1, LAST):
            damage(here.path, page)
            change(source, page)
            await here.agree()
            await here.agree(second)
        source.grow(1)
        for watcher in watchers:
            await watcher.has(total + 10)
            assert watcher.rollbacks == 0
        await here.end()
        await second.stop()
        assert verify(tmp_path / "second.bin").problems == []


async def test_updates_that_the_upstream_cannot_report(tmp_path: Path, source: Source) -> None:
    """It has forgotten them, so older entries are compared by hashes, and some cannot be read."""
    async with place(tmp_path, source) as here:
        await here.rig.stop()
        await here.server.stop()
        for at in range(20):
            source.update(source.first(0) + 7 * at)
        for page in (0, 1):
            a_bit(here.path, page)
        source.stream.close()
        with DataStream.open(source.stream.path, sync="os", index="memory") as stream:
            source.stream = here.server.stream = stream
            await here.server.start()
            await here.start_relay()
            await here.rig.relay.until(lambda: here.rig.download.uncompared == 0)
            await here.end()


@pytest.mark.parametrize("page", [1, LAST])
async def test_another_history(tmp_path: Path, source: Source, page: int) -> None:
    """Other entries of other sizes came in the place of those in a damaged page."""
    async with place(tmp_path, source) as here:
        await here.server.stop()
        a_bit(here.path, page)
        source.stream.truncate(source.first(page) + BEFORE)
        source.grow(200, size=1900)
        await here.server.start()
        await here.rig.relay.until(lambda: here.rig.relay.failure is not None)
        assert isinstance(here.rig.relay.failure, UpstreamRewritten)
        await here.rig.stop()
        await here.start_relay(**FOLLOW)
        await here.end()


async def test_the_last_entry_in_common_is_searched_past_damage(
    tmp_path: Path, source: Source
) -> None:
    async with place(tmp_path, source, **FOLLOW) as here:
        await here.rig.stop()
        for page in (0, 1):
            all_of_it(here.path, page)
        source.stream.truncate(source.first(2) + BEFORE)
        source.grow(100, salt=b"other")
        await here.start_relay(**FOLLOW)
        await here.end()


async def test_a_page_without_a_checksum(tmp_path: Path, source: Source) -> None:
    """Nothing of it is kept if the history is rewritten there."""
    async with place(tmp_path, source, **FOLLOW) as here:
        await here.rig.stop()
        here.path.with_name("relay.bin.sums").unlink()
        all_of_it(here.path, 1)
        source.stream.truncate(source.first(1) + AFTER)
        source.grow(100, salt=b"other")
        await here.start_relay(**FOLLOW)
        await here.end()


async def test_the_upstream_is_damaged_too(tmp_path: Path, source: Source) -> None:
    """Damage never replaces an entry."""
    async with place(tmp_path, source) as here:
        source_path = Path(source.stream.path)
        update = UPDATES["update of another entry"]
        update(source, 1)
        await here.agree()
        a_bit(here.path, 1)
        update(source, 1)
        a_bit(source_path, 1)
        [state] = here.rig.download.states
        await here.rig.relay.until(lambda: bool(state.lost))
        first = source.first(1)
        assert here.rig.stream.parts.pages.damaged(first, first + 1)
        a_bit(source_path, 1)
        await here.end()


async def test_stored_entries_are_not_the_upstream_s_damage(tmp_path: Path, source: Source) -> None:
    """A page of the relay that was damaged when it was opened is continued in the next one: the
    upstream's next checksum is about entries that the relay has stored before."""
    async with place(tmp_path, source) as here:
        await here.rig.stop()
        a_bit(here.path, LAST)
        await here.start_relay()
        await here.agree()
        source.grow(20)
        await here.agree()
        stored = here.rig.stream.reader.first_number(LAST + 1)
        assert stored < source.stream.total_entries
        a_bit(here.path, LAST + 1)
        source.grow(60)
        await here.end()
        [state] = here.rig.download.states
        assert state.damaged == 0


@pages
async def test_sectors_that_the_disk_cannot_read(tmp_path: Path, source: Source, page: int) -> None:
    disk = FaultyDisk()
    async with place(tmp_path, source, disk=disk) as here:
        for change in UPDATES.values():
            evict(here.path)
            disk.bad_sectors = {FIRST + page * PAGE + 512 * at for at in (300, 700)}
            change(source, page)
            await here.agree()
            assert disk.bad_sectors == set()
        await here.end()
