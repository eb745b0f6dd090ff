"""The programs of a world of archives: a writer that archives, and a follower of the archive.

Owns what a writer may find in its file after a crash, and what is compared of a stream. Knows no
fault.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import trio
from xxhash import xxh3_128_digest

from datastreamer._codec import scan
from datastreamer.archive.archiver import Archiver
from datastreamer.archive.eviction import LocalRetention
from datastreamer.archive.follower import ArchiveFollower
from datastreamer.archive.options import ArchiveOptions
from datastreamer.archive.restore import restore
from datastreamer.errors import (
    ArchiveDiverged,
    ArchiveError,
    ArchiveFenced,
    DatastreamerError,
    EvictedEntry,
)
from datastreamer.format import PAGE_SIZE, page_start
from datastreamer.relay.relay import Relay
from datastreamer.server.server import Server
from datastreamer.storage.objects.opened import OpenArchive
from datastreamer.storage.objects.store import Store
from datastreamer.storage.stream import DataStream
from datastreamer.storage.write.sync_policy import SyncPolicy
from tests.storage.lab.model import abandon
from tests.world.bucket import URL, Bucket, BucketClient, disk_here
from tests.world.machines import Program
from tests.world.model import Wrong
from tests.world.retention import retention_of
from tests.world.servers import BACKOFF, LIMITS, PATH, closed, image_of, opened, serve_by
from tests.world.threads import run_stepped

if TYPE_CHECKING:
    from tests.world.archives import ArchiveWorld

WRITERS = ("first", "second")
FOLLOWER = "follower"
INTERVAL = 2.0
SEGMENT_PAGES = 3
RETRY_SECONDS = 1.0

_TIMEOUT = 3.0
# An operator looks at a writer that archives nothing any more after this time.
_DECIDES_SECONDS = 15.0
_SIZES = (40, 40, 3_000, 200_000, 400_000)
_MOST_ENTRIES = 4
# Of the operations.
_CHANGED = 0.06
# Where files are evicted, a stream is truncated that is longer.
_MOST_BYTES = 16 * PAGE_SIZE


class Content(NamedTuple):
    """A stream up to an entry: a hash over its entries, and one over its bytes from 4096 on."""

    entries: int
    items: bytes
    pages: bytes


Part = tuple[list[bytes], bytes]
"""Of a page: the hashes of its entries, and its bytes without what the padding holds."""


def part_of(content: bytes, page: int) -> Part:
    batch = scan(content, None, file_offset=page_start(page))
    items = [xxh3_128_digest(b"%d %s" % (each.type, bytes(each.data))) for each in batch]
    return items, xxh3_128_digest(content[: batch.end].ljust(PAGE_SIZE, b"\0"))


def extended(before: bytes, item: bytes) -> bytes:
    return xxh3_128_digest(before + item)


def content_by(parts: Iterable[Part]) -> Content:
    count, items, pages = 0, b"", b""
    for found, page in parts:
        for item in found:
            items = extended(items, item)
        count, pages = count + len(found), extended(pages, page)
    return Content(count, items, pages)


def prefixes_of(parts: Iterable[Part]) -> set[tuple[int, bytes]]:
    """The number of entries, and the hash over them, of all that a stream begins with."""
    count, found, prefixes = 0, b"", set()
    for items, _ in parts:
        for item in items:
            count, found = count + 1, extended(found, item)
            prefixes.add((count, found))
    return prefixes


def parts_of(read: Callable[[int], bytes], length: int) -> Iterator[Part]:
    """The parts of a stream file of a length, whose pages `read` reads."""
    return (part_of(read(page), page) for page in range(-(-(length - page_start(0)) // PAGE_SIZE)))


@dataclass
class Writer:
    """A machine that writes the stream, if it has it, and archives it."""

    name: str
    sync: SyncPolicy
    world: ArchiveWorld
    writes: bool = False
    """Whether it has a stream, or is to restore it."""
    takes_over: bool = False
    generation: int | None = None
    """That it restores; None: the newest."""
    stream: DataStream | None = None
    archiver: Archiver | None = None
    resting: bool = False
    serves: bool = False
    """Whether a relay of it archives."""

    def __post_init__(self) -> None:
        self.due: list[tuple[str, int]] = []
        """Changes that it is about to make, and a number that says which."""
        self._items: list[bytes] = []
        # The ends that the stream may have after a crash, under sync policy "commit".
        self._possible: set[tuple[int, bytes]] = {(0, b"")}

    @property
    def end(self) -> tuple[int, bytes]:
        return len(self._items), self._hash(self._items)

    @staticmethod
    def _hash(items: list[bytes]) -> bytes:
        found = b""
        for item in items:
            found = extended(found, item)
        return found

    async def run(self, program: Program) -> None:
        disk_here.set(program.disk)
        while not self.writes:
            await trio.sleep(RETRY_SECONDS)
        if self.name != WRITERS[0] or self.world.restored:
            await self._restore(program)
        stream = await opened(program, self.sync)
        try:
            if not self._opened(stream):
                self.world.anew(self)
                await trio.sleep_forever()
            if self.serves:
                await self._serve(program, stream)
            options = options_of(self.world, takeover=self.takes_over)
            self.archiver = Archiver(stream, options)
            self.takes_over = False
            self.stream = stream
            await self._write(stream)
            await run_stepped(self.archiver.close)
        finally:
            self.stream = self.archiver = None
            closed(program, stream)

    async def _serve(self, program: Program, stream: DataStream) -> None:
        """Until its program ends."""
        server = Server(stream, limits=LIMITS)
        async with trio.open_nursery() as nursery:
            await nursery.start(server.run, [])
            program.listen(serve_by(program, lambda: server))
            self.stream = stream
            await self._write(stream)

    async def _restore(self, program: Program) -> None:
        while not program.disk.exists(PATH):
            try:
                await run_stepped(self._restored)
            except ArchiveError as error:
                self.world.trace.note("not restored", self.name, error)
                self.generation = None
                await trio.sleep(RETRY_SECONDS)
            else:
                self._possible.clear()

    def _restored(self) -> None:
        archive = OpenArchive(store_of(self.name, self.world.bucket))
        manifest = archive.chosen(generation=self.generation)
        restore(archive, PATH, manifest, from_page=self.world.first_page(manifest))
        self.world.ensure_restored(image_of(self.world.machines[self.name]), manifest)

    def _opened(self, stream: DataStream) -> bool:
        """What it committed is there; False if its file is an orphan."""
        self.due.clear()
        with self.world.bucket.honestly():
            try:
                self._items = _items(stream)
            except EvictedEntry:
                if not self.world.is_orphan(self.name):
                    raise
                return False
        if self.end not in self.world.ends:
            raise Wrong(f"{self.name} has {self.end[0]} entries that were never committed so")
        if self.sync == "commit" and self._possible and self.end not in self._possible:
            raise Wrong(f"{self.name} has {self.end[0]} entries, and had committed others")
        self._possible = {self.end}
        return True

    async def _write(self, stream: DataStream) -> None:
        chance, stuck = self.world.chance, 0.0
        while True:
            pause = chance.random()
            await trio.sleep(pause)
            error = None if self.archiver is None else self.archiver._error
            is_stuck = isinstance(error, (ArchiveFenced, ArchiveDiverged)) or (
                isinstance(error, EvictedEntry) and self.world.is_orphan(self.name)
            )
            stuck = stuck + pause if is_stuck else 0.0
            if stuck > _DECIDES_SECONDS or (self.takes_over and not self.serves):
                self.world.decide(self, stuck > 0)
                return
            if not self.resting and (choice := chance.random()) < _CHANGED:
                kind = "truncate" if choice < _CHANGED / 2 else "update"
                self.due.append((kind, chance.randrange(1000)))
            elif not self.resting:
                self._append(stream)
            if self.world.plan.evicts and stream.header.total_length > _MOST_BYTES:
                self.due.append(("shorten", chance.randrange(1000)))
            while self.due:
                kind, pick = self.due.pop(0)
                await run_stepped(getattr(self, kind), pick)

    def _append(self, stream: DataStream) -> None:
        chance = self.world.chance
        items = []
        for _ in range(chance.randint(1, _MOST_ENTRIES)):
            # No two entries are alike, so that no two histories are.
            data = chance.randbytes(16)
            if chance.random() < 0.2:
                items.append((0xB0, data))
            else:
                items.append((2, data + bytes([data[0]]) * chance.choice(_SIZES)))

        def append() -> None:
            with stream.atomic_op() as op:
                for kind, data in items:
                    if kind == 0xB0:
                        op.add_bookmark(data)
                    else:
                        op.add_entry(kind, data)

        new = [xxh3_128_digest(b"%d %s" % item) for item in items]
        self._change(self._items + new, append)

    def _change(self, items: list[bytes], change: Callable[[], None]) -> None:
        """No change is refused, whatever the bucket does."""
        count, found = 0, b""
        self.world.prefixes.add((0, b""))
        for count, item in enumerate(items, 1):
            found = extended(found, item)
            self.world.prefixes.add((count, found))
        after = len(items), found
        self.world.ends.add(after)
        self._possible.add(after)
        self.world.note_items(items)
        try:
            change()
        except EvictedEntry as error:
            # The bucket does not give what the change needs: nothing has changed.
            self.world.trace.note("refused", self.name, error)
            self._possible = {self.end}
            if self.stream is not None and self.stream.total_entries != len(self._items):
                raise Wrong(f"{self.name}: a change was refused, and made") from error
            return
        self._items, self._possible = items, {after}

    def truncate(self, pick: int) -> None:
        if self._items:
            self._truncate(len(self._items) - 1 - pick % min(len(self._items), 1 + pick % 60))

    def shorten(self, pick: int) -> None:
        self._truncate(len(self._items) * pick // 1000)

    def _truncate(self, keep: int) -> None:
        if self.stream is not None:
            self._change(self._items[:keep], partial(self.stream.truncate, keep))

    def update(self, pick: int) -> None:
        if self.stream is None or not self._items:
            return
        first, old = pick % len(self._items), None
        with suppress(EvictedEntry):
            old = next((each for each in self.stream.entries(first) if each.type == 2), None)
        if old is not None:
            data = self.world.chance.randbytes(16).ljust(len(old.data), b"u")
            item = xxh3_128_digest(b"%d %s" % (2, data))
            items = [*self._items[: old.number], item, *self._items[old.number + 1 :]]
            self._change(items, partial(self.stream.update_entry, old.number, 2, data))


@dataclass
class RelayArchiver:
    """A machine with a relay of the first one, which archives what it has."""

    world: ArchiveWorld
    takes_over: bool = False
    relay: Relay | None = None
    name: str = WRITERS[1]

    @property
    def stream(self) -> DataStream | None:
        return None if self.relay is None or self.relay.server is None else self.relay.stream

    async def run(self, program: Program) -> None:
        disk_here.set(program.disk)
        relay = self.relay = Relay(
            [(WRITERS[0], 6900)],
            PATH,
            index="memory",
            limits=LIMITS,
            on_rewrite="follow",
            patience=10.0,
            timeout=4.0,
            heartbeat=4.0,
            backoff=BACKOFF,
            look_seconds=5.0,
            archive=options_of(self.world, takeover=self.takes_over),
        )
        relay._disk, self.takes_over = program.disk, False

        class Started:
            def started(self, _: object) -> None:
                program.listen(serve_by(program, lambda: relay.server))

        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._watch, nursery.cancel_scope)
                try:
                    await relay.run([], task_status=Started())
                except DatastreamerError as error:
                    self.world.trace.note("the relay has ended", error)
                nursery.cancel_scope.cancel()
        finally:
            self.relay = None
            if relay.stream is not None and not program.alive:
                abandon(relay.stream)

    async def _watch(self, scope: trio.CancelScope) -> None:
        stuck = 0.0
        while stuck <= _DECIDES_SECONDS and not self.takes_over:
            await trio.sleep(RETRY_SECONDS)
            numbers = None if self.stream is None else self.stream.parts.counters.share()
            found = {} if numbers is None else numbers.samples()
            names = ("datastreamer_archive_fenced", "datastreamer_archive_diverged")
            is_stuck = any(found[name][0][1] for name in names if name in found)
            is_stuck = is_stuck or self.world.is_orphan(self.name)
            stuck = stuck + RETRY_SECONDS if is_stuck else 0.0
        self.world.decide(self, stuck > 0)
        scope.cancel()


@dataclass
class Follower:
    """A machine that serves what is in the archive."""

    world: ArchiveWorld
    stream: DataStream | None = None

    async def run(self, program: Program) -> None:
        disk_here.set(program.disk)
        while not program.disk.exists(PATH):
            try:
                await run_stepped(self._restored)
            except ArchiveError:
                await trio.sleep(RETRY_SECONDS)
        stream = await opened(program, "commit")
        running: ArchiveFollower | None = None
        try:
            while running is None:
                options = options_of(self.world, mode="follow")
                with suppress(ArchiveError):
                    running = await run_stepped(ArchiveFollower, stream, options)
                await trio.sleep(RETRY_SECONDS)
            if options.local_retention is not None:
                LocalRetention(stream, options)
            self.stream, stuck = stream, 0.0
            while stuck <= _DECIDES_SECONDS:
                await trio.sleep(RETRY_SECONDS)
                stuck = stuck + RETRY_SECONDS if self.world.is_orphan(FOLLOWER) else 0.0
            self.world.empty(FOLLOWER)
            await trio.sleep_forever()
        finally:
            self.stream = None
            closed(program, stream)

    def _restored(self) -> None:
        archive = OpenArchive(store_of(FOLLOWER, self.world.bucket))
        manifest = archive.newest()[0]
        restore(archive, PATH, manifest, relay=True, from_page=self.world.first_page(manifest))
        self.world.ensure_restored(image_of(self.world.machines[FOLLOWER]), manifest)


def options_of(world: ArchiveWorld, **more: Any) -> ArchiveOptions:
    takeover = more.pop("takeover", more.get("mode") == "follow")
    made = ArchiveOptions(URL, interval=INTERVAL, timeout=_TIMEOUT, takeover=takeover, **more)
    # Fewer than an operator may choose.
    object.__setattr__(made, "segment", SEGMENT_PAGES * PAGE_SIZE)
    if world.plan.evicts:
        object.__setattr__(made, "local_retention", retention_of(world.plan.seed))
    return made


def store_of(name: str, bucket: Bucket) -> Store:
    return Store(URL, timeout=_TIMEOUT, backend=BucketClient(bucket, name))


def _items(stream: DataStream) -> list[bytes]:
    return [xxh3_128_digest(b"%d %s" % (e.type, bytes(e.data))) for e in stream.entries()]


def hash_of(stream: DataStream, count: int) -> tuple[int, bytes]:
    """The first entries of a stream, if it has so many."""
    items = _items(stream)[:count]
    return len(items), Writer._hash(items)
