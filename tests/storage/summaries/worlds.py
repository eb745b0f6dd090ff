"""A stream with a clock of the test's, and what is known of when its entries were committed."""

from __future__ import annotations

import random
import shutil
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import xxhash

from datastreamer import DataStream
from datastreamer.errors import TimeUnknown
from datastreamer.storage.pages import completer
from datastreamer.storage.summaries import keeper
from tests.storage.lab.background import IdleSyncer
from tests.storage.made import FIRST, PAGE
from tests.storage.summaries.oracle import UNKNOWN, Page, records

BEGIN = 1_000_000_000_000
"""In 2001: before any time that the machine's own clock gives."""


class Clock:
    """Takes the place of the module `time`, in ms."""

    def __init__(self) -> None:
        self.now = BEGIN

    def time(self) -> float:
        return self.now / 1000


def by(clock: Clock) -> Callable[..., int]:
    """Has commits noted when the writer wants them to be, by a clock that the commit lane, which
    is compiled, does not know: it asks at each commit, as that clock is long past 2001."""
    noted, due = keeper.SummaryKeeper.committed, 0

    def committed(summaries: Any, first: int, pages: Any) -> int:
        nonlocal due
        end = summaries._end
        if end.mark_at and not pages and clock.now < due:
            end.latest_ms = max(end.latest_ms, clock.now)
        else:
            due = noted(summaries, first, pages)
        return 1  # 0: entries were changed since

    return committed


class World:
    """One stream. The thread in the background does nothing but what the test has it do."""

    def __init__(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch, *, loses: bool = True, **options: Any
    ) -> None:
        """`loses`: times may be lost, and the clock does not go back."""
        self.loses = loses
        self.clock = Clock()
        monkeypatch.setattr(keeper, "time", self.clock)
        monkeypatch.setattr(completer, "Syncer", IdleSyncer)
        monkeypatch.setattr(keeper.SummaryKeeper, "committed", by(self.clock))
        self.folder, self.kills = folder, 0
        self.path = folder / "s.bin"
        self.stream = DataStream.create(self.path, index="memory", **options)
        # The time of each entry's commit, which never falls, and whether the stream has to know it.
        self.times: list[int] = []
        self.known: list[bool] = []
        self.latest = 0

    @property
    def summaries(self) -> keeper.SummaryKeeper:
        return self.stream._ensure_writable().owned.summaries

    def commit(self, *entries: tuple[int, bytes]) -> None:
        with self.stream.atomic_op() as op:
            for kind, data in entries:
                op.add_bookmark(data) if kind == 0xB0 else op.add_entry(kind, data)
        self._committed(len(entries), known=True)

    def _committed(self, count: int, *, known: bool) -> None:
        self.latest = max(self.clock.now, self.latest)
        self.times += [self.latest] * count
        self.known += [known] * count

    def truncate(self, number: int) -> None:
        self.stream.truncate(number)
        del self.times[number:], self.known[number:]

    def work(self) -> None:
        """What the thread does."""
        made = self.stream._ensure_writable().sums_completer
        while made.complete_page() or made.count_page():
            pass

    def close(self) -> None:
        self.stream.close()

    def reopen(self) -> None:
        self.stream.close()
        self.open()

    def open(self, *, damaged: bool = False) -> None:
        """Open the stream again. The times that are lost are those that no record has. If the
        sidecar is `damaged`, its records are read after that."""
        self.latest = max(self.times, default=0)
        if damaged:
            self.stream = DataStream.open(self.path, index="memory")
        content, covered = self.path.read_bytes(), set()
        for page, record in enumerate(records(self.path)):
            start = FIRST + page * PAGE
            if record is not None and record.marks:
                entries = content[start : start + record.covered]
                if xxhash.xxh3_128_digest(entries) == record.digest:
                    covered.update(range(record.marks[0][0], known_to(record)))
        self.known = [it and entry in covered for entry, it in enumerate(self.known)]
        if not damaged:
            self.stream = DataStream.open(self.path, index="memory")

    def kill(self) -> None:
        """The process is killed, and another one opens the stream."""
        folder = self.folder / f"kill {self.kills}"
        folder.mkdir()
        self.kills += 1
        for each in self.path.parent.glob("s.bin*"):
            shutil.copy(each, folder / each.name)
        self.stream.close()
        self.path = folder / "s.bin"
        self.open()

    def append_as_others_do(self, *entries: tuple[int, bytes]) -> None:
        """A program that keeps no records of ours appends to the closed stream."""
        self.stream.close()
        content = bytearray(self.path.read_bytes())
        at, total = struct.unpack_from(">QQ", content, 38)
        for number, (kind, data) in enumerate(entries, total):
            packed = struct.pack(">BIIQ", 2, 17 + len(data), kind, number) + data
            room = PAGE - (at - FIRST) % PAGE
            if len(packed) > room:
                content[at : at + room] = bytes(room)
                at += room
            content[at : at + len(packed)] = packed
            at += len(packed)
        size = FIRST + -(-(at + 1 - FIRST) // PAGE) * PAGE
        content = content[:size].ljust(size, b"\0")
        struct.pack_into(">QQ", content, 38, at, total + len(entries))
        self.path.write_bytes(content)
        self._committed(len(entries), known=False)
        self.open()


def known_to(record: Page) -> int:
    """The entry after the last one whose time a record knows."""
    entry, ms = record.marks[-1]
    return entry if ms == UNKNOWN else record.end


def check(world: World, stream: DataStream, chance: random.Random) -> None:
    """Compare the times that a stream says with those of the world."""
    times, total = world.times, len(world.times)
    assert stream.total_entries == total
    pages = [page for page in records(world.path) if page is not None]
    resolution = max([1000, *(page.resolution for page in pages)])
    some = chance.sample(range(total), min(30, total))
    for number in {*some, *range(min(1, total)), *range(total - 1, total)} if total else ():
        found = stream.time_of(number)
        if world.known[number]:
            assert found is not None, number
            if world.loses:
                assert found <= times[number] < found + resolution, number
            else:  # the clock may have gone back before an open
                assert abs(found - times[number]) < resolution, number
        else:
            assert found is None or found <= times[number] < found + resolution, number
    probes = [BEGIN - 1, BEGIN, world.clock.now + 10**7, *(times[number] for number in some)]
    for ms in [*probes, *(ms + chance.choice([1, -1, 500, 999, 1000, 5000]) for ms in probes)]:
        truth = next((entry for entry, time in enumerate(times) if time >= ms), total)
        try:
            found = stream.entry_at(ms)
        except TimeUnknown:
            assert not all(world.known), ms
            continue
        assert found <= truth, (
            ms,
            found,
            truth,
            times[truth - 1],
            times[truth],
            world.known[truth],
        )
        for entry in range(found, truth):
            assert not world.known[entry] or times[entry] > ms - 2 * resolution, (ms, entry)
            assert not (world.loses and world.known[entry]) or times[entry] > ms - resolution


def payloads(chance: random.Random) -> Iterator[tuple[int, bytes]]:
    """Events of all types, good and bad, and bookmarks."""

    def varint(value: int) -> bytes:
        found = b""
        while value > 127:
            found += bytes([value & 127 | 128])
            value >>= 7
        return found + bytes([value])

    while True:
        kind = chance.choice([1, 2, 3, 4, 5, 6, 6, 0xB0, chance.randrange(7, 30)])
        if kind == 0xB0:
            yield kind, chance.randbytes(chance.randrange(1, 17))
            continue
        data = b""
        for number in range(1, 4):
            if chance.random() < 0.8:
                data += varint(number << 3) + varint(chance.randrange(1 << chance.randrange(1, 64)))
        padding = chance.randbytes(chance.choice([10, 100, 1000, 60_000]))
        data += b"\x22" + varint(len(padding)) + padding
        if chance.random() < 0.0005:
            data += b"\xff"
        yield kind, data
