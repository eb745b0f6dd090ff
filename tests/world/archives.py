"""A world of archives: machines that write a stream and archive it in one bucket, and a follower.
With `relays`, the second machine is a relay of the first one, and archives what it has.

At any time each of two machines may believe that it is the writer: one sleeps, loses its power or
the bucket, and an operator restores the other one's file from there and goes on with it. Each
manifest is read in the moment in which it appears: what it describes was committed, all of it on
disk, and byte by byte that of one machine's file. What the bucket does refuses no commit and loses
none. In the end faults stop, one machine takes the archive over, and a restored file is like its.
"""

from __future__ import annotations

import contextlib
import random
import sys
import time
from collections.abc import Callable
from contextlib import closing
from typing import Any
from unittest import mock

import trio
from xxhash import xxh3_128_digest

from datastreamer.archive import archiver, follower
from datastreamer.archive.archived_file import ArchivedFile, DurableState
from datastreamer.archive.check import check
from datastreamer.archive.restore import restore
from datastreamer.archive.writer import ArchiveWriter
from datastreamer.errors import DatastreamerError, EvictedEntry, FileMissing
from datastreamer.format import HEADER_PAGE_SIZE, PAGE_SIZE, page_start
from datastreamer.storage.header.page import HeaderPage
from datastreamer.storage.objects.manifest import ArchiveManifest
from datastreamer.storage.objects.opened import MANIFESTS, OpenArchive
from datastreamer.storage.objects.store import Store
from datastreamer.storage.stream import DataStream
from tests.archive.stores import MemoryStore
from tests.storage.lab.cuts import MODES, Cut
from tests.storage.lab.disk import SimDisk
from tests.storage.lab.image import Image
from tests.world import bucket as bucket_module
from tests.world import faults, retention
from tests.world.archivers import (
    FOLLOWER,
    INTERVAL,
    RETRY_SECONDS,
    SEGMENT_PAGES,
    WRITERS,
    Content,
    Follower,
    Part,
    RelayArchiver,
    Writer,
    content_by,
    extended,
    hash_of,
    part_of,
    parts_of,
    prefixes_of,
)
from tests.world.bucket import URL, Bucket, BucketClient, disk_here
from tests.world.clock import SimTime, boot_here
from tests.world.drivers import Drivers, name_here
from tests.world.faults import Event, Plan
from tests.world.happenings import LOOK_SECONDS, Happenings
from tests.world.machines import Machine
from tests.world.model import Wrong
from tests.world.network import Network
from tests.world.retention import CLIENT, Evictions, Orphan, process_on
from tests.world.servers import PATH, image_of
from tests.world.trace import Trace, logged
from tests.world.world import Outcome, carried_out

_BOUND_SECONDS = 120.0
# With eviction, the world reads the whole archive after every fourth event only.
_SELDOM = 4


class ArchiveWorld(Happenings):
    """One plan of archives, carried out."""

    def __init__(self, plan: Plan, chance: random.Random, sim_time: SimTime) -> None:
        self.plan = plan
        self.chance = chance
        self.time = sim_time
        self.trace = Trace(sim_time.monotonic)
        self.machines: dict[str, Machine] = {}
        self.ends: set[tuple[int, bytes]] = {(0, b"")}
        """The streams that were ever committed, and those that are just being committed."""
        self.prefixes: set[tuple[int, bytes]] = {(0, b"")}
        self.sources: set[Content] = set()
        """What was on a disk of a writer when it was looked at in order to archive it."""
        self.restored = False
        """Whether the archive was ever restored."""
        self.relays = bool(plan.relays)
        """Whether the second machine archives as a relay of the first one."""
        self.relay_name = WRITERS[1]
        self.evictions = Evictions(self)
        self.published = self.checked = self._looks = 0
        self.settled = False
        self.bucket: Bucket
        self.writers_of: dict[str, str] = {}
        """The ids of those that published the manifests, by their names."""
        self._newest: ArchiveManifest | None = None
        self._parts: dict[tuple[str, int], Part] = {}
        self._fenced: set[str] = set()
        self._settling = False
        self._wrong: Exception | None = None
        self._nursery: trio.Nursery

    async def run(self) -> None:
        with contextlib.ExitStack() as stack:
            async with trio.open_nursery() as self._nursery:
                self.network = Network(self._nursery, self.chance, self.trace)
                self.bucket = Bucket(self.chance, self.trace, self._nursery)
                self.bucket.put_now = self._noted(self._appeared)
                stack.enter_context(bucket_module.simulated(self.bucket, self.time))
                if self.plan.evicts:
                    stack.enter_context(retention.simulated(self.evictions))
                stack.enter_context(Drivers(self.network).replaced(self.time))
                stack.enter_context(logged(self.trace, name_here))
                state = _watched(ArchivedFile.state, self._noted(self._looked))
                stack.enter_context(mock.patch.object(ArchivedFile, "state", state))
                for module in (archiver, follower):
                    # It logs what no program should raise.
                    log = mock.patch.object(module._log, "exception", self._noted(_raised))
                    stack.enter_context(log)
                one, two = (Writer(name, self.plan.sync, self) for name in WRITERS)
                one.writes, one.serves = True, self.relays
                self.writers = {
                    one.name: one,
                    two.name: RelayArchiver(self) if self.relays else two,
                }
                self.follower = Follower(self)
                for name, writer in self.writers.items():
                    self._machine(name, writer.run)
                self._machine(FOLLOWER, self.follower.run)
                if self.plan.evicts:
                    for name in self.machines:
                        self._nursery.start_soon(self.evictions.read_beside, name)
                    if self.relays:
                        self._machine(CLIENT, self.evictions.run_client)
                self._nursery.start_soon(self._watch)
                async with trio.open_nursery() as self._faults:
                    for event in self.plan.events:
                        await trio.sleep(event.after)
                        self.happen(event)
                        self._look()
                await self._settle()
                self.settled = True
                self._nursery.cancel_scope.cancel()

    # What holds at any time.

    def _noted(self, look: Callable[..., None]) -> Callable[..., None]:
        """`look`, whose error ends the world: it is called by programs that go on after errors."""

        def noted(*arguments: Any) -> None:
            try:
                look(*arguments)
            except Exception as error:
                self._wrong = self._wrong or error
                raise

        return noted

    async def _watch(self) -> None:
        while self._wrong is None:
            await trio.sleep(LOOK_SECONDS)
        raise self._wrong

    def _looked(self, source: ArchivedFile, found: DurableState) -> None:
        """What is to be archived is durable: a power cut now leaves it."""
        machine = self.machines[name_here.get()]
        if machine.name == FOLLOWER:
            return
        image, length = image_of(machine), found.head.length
        try:
            parts = list(parts_of(self.evictions.reading(image, length), length))
        except Orphan:
            return
        content = content_by(parts)
        if self.relays and machine.name == WRITERS[1]:
            # While a relay follows changes, it has a history of its own.
            self.prefixes |= prefixes_of(parts)
            self.ends.add(content[:2])
        if content[:2] not in self.ends or content.entries != found.head.entries:
            raise Wrong(f"{machine.name} archives {content[:2]}, which was never committed")
        mode = self.chance.choice(MODES)
        left = machine.disk.power_cut(Cut(mode, self.chance.randrange(2048)))
        token = boot_here.set(lambda: left.boot)
        try:
            with (
                self.bucket.honestly(),
                closing(
                    DataStream.open(PATH, read_only=True, verify="never", disk=process_on(left))
                ) as stream,
            ):
                if stream.epoch == found.epoch and hash_of(stream, content.entries) != content[:2]:
                    raise Wrong(f"{machine.name} archives what a power cut takes ({mode})")
        except EvictedEntry:
            # (The floor that is on disk is the one before.)
            if not self.evictions.is_orphan(left.find(PATH).seen):
                raise
            return
        except FileMissing:
            # (A restore, or what creates a file, ends with its name, which may not be on disk yet.
            # It has nothing that the archive does not have.)
            writes = self.writers[machine.name].stream is not None
            if writes or (content.entries and content not in self.sources):
                raise
        finally:
            boot_here.reset(token)
        self.sources.add(content)

    def _appeared(self, name: str, data: bytes) -> None:
        """A manifest is what one writer had, and follows the newest one."""
        if not name.startswith(MANIFESTS):
            return
        found, before = ArchiveManifest.unpack(data), self._newest
        if before is not None and found.number <= before.number:
            # Those that fenced its writer were pruned, and it finds the newest one.
            self._fenced.add(found.writer.id)
            self.trace.note("late manifest", name)
            return
        if found.writer.id in self._fenced:
            raise Wrong(f"{name} is of a writer that was fenced")
        if before is not None:
            if found.number != before.number + 1 or found.generation < before.generation:
                raise Wrong(f"{name} does not follow {before.number}")
            if found.writer.id != before.writer.id:
                self._fenced.add(before.writer.id)
                if found.writer.term <= before.writer.term:
                    raise Wrong(f"{name} has term {found.writer.term}, not a later one")
        self._ensure_archived(found)
        self._newest = found
        self.writers_of[name] = found.writer.id
        self.published += 1

    def _ensure_archived(self, manifest: ArchiveManifest) -> None:
        archive = self._reliable()
        rows = [
            (row, page, row is manifest.tail)
            for row in manifest.rows
            for page in range(row.first_page, row.stop)
        ]

        def part(page: int) -> Part:
            row, _, last = rows[page]
            key = row.object, row.frame + page - row.first_page
            if key not in self._parts:
                content = archive.pages(row, page, page + 1, last=last)[0]
                self._parts[key] = part_of(content, page)
            return self._parts[key]

        content = content_by(map(part, range(len(rows))))
        if content not in self.sources:
            known = content[:2] in {each[:2] for each in self.sources}
            raise Wrong(f"manifest {manifest.number} is of no file ({known=})")

    def _reliable(self) -> OpenArchive:
        """The archive without faults."""
        memory = MemoryStore()
        memory.objects = self.bucket.objects
        return OpenArchive(Store(URL, timeout=0.0, backend=memory))

    def ensure_restored(self, image: Image, manifest: ArchiveManifest) -> None:
        """A restored file is one that was archived, and all zeros behind the entries of a page."""
        self.restored = True
        length = manifest.head.length
        try:
            read = self.evictions.reading(image, length)
        except Orphan:
            return
        content = content_by(parts_of(read, length))
        if content not in self.sources:
            raise Wrong(f"a file restored from manifest {manifest.number} is of no writer")
        pages = -(-(length - page_start(0)) // PAGE_SIZE)
        plain = b""
        for page in range(pages):
            whole = image.read(PAGE_SIZE, page_start(page))
            if page < HeaderPage(image.read(HEADER_PAGE_SIZE, 0)).floor:
                whole = read(page)
            plain = extended(plain, xxh3_128_digest(whole.ljust(PAGE_SIZE, b"\0")))
        if plain != content.pages:
            raise Wrong("a restored file has bytes behind its entries")

    def _look(self) -> None:
        """All that the archive names is there, and the follower has a prefix of some history."""
        self._looks += 1
        seldom = self.plan.evicts and self._looks % _SELDOM
        if not seldom and any(name.startswith(MANIFESTS) for name in self.bucket.objects):
            found = check(self._reliable())
            if found.problems:
                raise Wrong(f"the archive is damaged: {found.problems[:3]}")
            self.checked += 1
        if self.plan.evicts:
            for name in (*WRITERS, FOLLOWER):
                disk = self.machines[name].disk
                self.evictions.check_file(name, disk.copy(), "now", exact=True)
            self.evictions.check_cut(self.machines[self.chance.choice((*WRITERS, FOLLOWER))])
        stream = self.follower.stream
        if stream is not None:
            total = stream.total_entries
            if self.plan.evicts:
                return  # that was read in another process
            if hash_of(stream, total) not in self.prefixes:
                raise Wrong(f"the follower has {total} entries of no history")

    # What happens.

    def happen(self, event: Event) -> None:
        action = _ACTIONS.get(event.what)
        if action is None:
            super().happen(event)
        else:
            self.trace.note("event", event)
            action(self, event)

    def _servers(self) -> list[Machine]:
        return [self.machines[name] for name in WRITERS]

    def _may_lose(self, machine: Machine) -> None:
        """Its writer looks what is left."""

    def _writer(self, event: Event) -> Writer | RelayArchiver:
        return self.writers[WRITERS[event.pick % len(WRITERS)]]

    def truncate(self, event: Event) -> None:
        self._changed_by(event, ("truncate", event.more))

    def update(self, event: Event) -> None:
        self._changed_by(event, ("update", event.more))

    def _changed_by(self, event: Event, change: tuple[str, int]) -> None:
        writer = self._writer(event)
        if isinstance(writer, Writer):
            writer.due.append(change)

    def out(self, event: Event) -> None:
        self.bucket.out = True
        self._later(event.seconds, lambda: setattr(self.bucket, "out", False))

    def cut_off(self, event: Event) -> None:
        name = self._pick(event).name
        self.bucket.cut.add(name)
        self._later(event.seconds, lambda: self.bucket.cut.discard(name))

    def flaky(self, event: Event) -> None:
        self.bucket.odds = (0.05, 0.2, 0.5)[event.pick % 3]
        self._later(2 * event.seconds, lambda: setattr(self.bucket, "odds", 0.0))

    def sleep(self, event: Event) -> None:
        """Once in a while for longer than manifests are kept."""
        seconds = event.seconds * (10 if event.more % 5 == 0 else 2)
        self.bucket.sleeps[self._writer(event).name] = seconds

    def decide_now(self, event: Event) -> None:
        self._writer(event).takes_over = True

    def end_eviction(self, event: Event) -> None:
        names = [*WRITERS, FOLLOWER]
        self.evictions.end_next(event, names[event.pick // 2 % 3])

    def in_place(self, event: Event) -> None:
        machine = self._pick(event)
        if machine.name != CLIENT:
            self._in_background(self.evictions.bring_back, machine, event)

    def note_items(self, items: list[bytes]) -> None:
        """A writer is about to have these entries."""
        self.evictions.items.update(enumerate(items))

    def is_orphan(self, name: str) -> bool:
        return self.plan.evicts and self.evictions.is_orphan(image_of(self.machines[name]))

    def first_page(self, manifest: ArchiveManifest) -> int:
        """The first page that a restored file is to have."""
        if not self.plan.evicts or self.chance.random() < 0.5:
            return 0
        return self.chance.randint(0, len(manifest.rows) and manifest.whole_pages)

    def decide(self, writer: Writer | RelayArchiver, stuck: bool) -> None:
        """What an operator does with a writer that archives nothing any more."""
        choice = self.chance.randrange(3) if stuck and not self._settling else 0
        if self.is_orphan(writer.name):
            choice = max(choice, 1)  # it has not all that it would archive
        self.trace.note("decided", writer.name, choice)
        writer.takes_over = choice < 2
        if choice:
            self.anew(writer)

    def anew(self, writer: Writer | RelayArchiver) -> None:
        """Its machine begins with the archive."""
        self.restored = True
        if isinstance(writer, Writer):
            writer.writes = True
        self.empty(writer.name)

    def empty(self, name: str) -> None:
        machine = self.machines[name]

        def empty() -> None:
            boot, machine.disk = machine.disk.boot, SimDisk()
            machine.disk.boot = boot

        self._nursery.start_soon(machine.kill, 0.5, empty)

    def restore(self, event: Event) -> None:
        writer = self._writer(event)
        if self._newest is None or (isinstance(writer, Writer) and writer.serves):
            return
        writer.takes_over = bool(event.more % 2)
        if isinstance(writer, Writer):
            writer.generation = None
        if isinstance(writer, Writer) and event.more % 3 == 0:
            writer.generation = max(1, self._newest.generation - event.more % 4)
        self.anew(writer)

    def push(self, event: Event) -> None:
        """Another process archives the file, in the middle of what its writer does."""
        machine, left = self.machines[self._writer(event).name], event.more % 40
        disk = machine.disk

        def watch(what: str) -> None:
            nonlocal left
            left -= 1
            if left < 0:
                disk.watch = None
                self._push(machine, takeover=bool(event.pick % 3))

        disk.watch = watch

    def _push(self, machine: Machine, *, takeover: bool) -> None:
        tokens = disk_here.set(process_on(machine.disk)), name_here.set(machine.name)
        booted = boot_here.set(lambda: machine.disk.boot)
        try:
            # Its writer waits in the middle of an operation, with locks.
            self.bucket.hurries = True
            store = Store(URL, timeout=0.0, backend=BucketClient(self.bucket, machine.name))
            with closing(ArchivedFile(PATH)) as source:
                pushed = ArchiveWriter(
                    source,
                    store,
                    segment_pages=SEGMENT_PAGES,
                    interval=INTERVAL,
                    takeover=takeover,
                ).publish()
            self.trace.note("pushed", machine.name, pushed)
        except DatastreamerError as error:
            self.trace.note("not pushed", machine.name, error)
        finally:
            self.bucket.hurries = False
            boot_here.reset(booted)
            name_here.reset(tokens[1])
            disk_here.reset(tokens[0])

    # The end.

    async def _settle(self) -> None:
        self.trace.note("faults are over")
        self.evictions.faults_are_over()
        self.bucket.out, self.bucket.odds = False, 0.0
        self.bucket.cut.clear()
        self.bucket.sleeps.clear()
        for machine in self.machines.values():
            machine.disk.watch = None
            if machine.program is not None:
                machine.program.disk.interruption = None
        await trio.sleep(bucket_module.LATE_SECONDS)
        self._settling = True
        last = self.writers[WRITERS[0 if self.relays else self.plan.seed % 2]]
        assert isinstance(last, Writer)
        last.writes = True
        other = next(each for each in self.writers.values() if each is not last)
        if isinstance(other, Writer):
            self._nursery.start_soon(self.machines[other.name].kill, 1e9)
            last.takes_over = True
        else:
            other.takes_over = True
        await trio.sleep(INTERVAL)
        last.resting = True
        with trio.move_on_after(_BOUND_SECONDS) as bound:
            while lacking := self._lacking(last):
                await trio.sleep(RETRY_SECONDS)
        if bound.cancelled_caught:
            raise Wrong(f"{_BOUND_SECONDS:g} s after the last fault: {lacking}")
        self._look()
        assert last.stream is not None
        archive = self._reliable()
        newest = archive.newest()[0]
        for manifest in archive.generations():
            self._restore_aside(archive, manifest)
        if newest.head.entries != last.end[0]:
            raise Wrong("the archive is not what its last writer has")

    def _restore_aside(self, archive: OpenArchive, manifest: ArchiveManifest) -> None:
        """On an empty disk of its own."""
        disk = SimDisk()
        token = disk_here.set(disk.process())
        booted = boot_here.set(lambda: disk.boot)
        try:
            restore(archive, PATH, manifest, relay=True)
            self.ensure_restored(disk.image(PATH), manifest)
        finally:
            boot_here.reset(booted)
            disk_here.reset(token)

    def _lacking(self, last: Writer) -> str:
        """What is not as it should be yet."""
        if last.stream is None:
            return f"{last.name} does not run"
        newest, end = self._newest, last.end
        if newest is None or newest.head.entries != end[0]:
            return f"{newest and newest.head.entries} of {end[0]} entries are archived"
        stream = self.follower.stream
        with self.bucket.honestly():
            if stream is None or hash_of(stream, stream.total_entries) != end:
                return f"the follower has {stream and stream.total_entries} of {end[0]} entries"
        return ""


def _raised(*_: object) -> None:
    error = sys.exc_info()[1]
    assert error is not None
    raise error


def _watched(
    state: Callable[[ArchivedFile], DurableState],
    look: Callable[[ArchivedFile, DurableState], None],
) -> Callable[[ArchivedFile], DurableState]:
    def watched(self: ArchivedFile) -> DurableState:
        found = state(self)
        look(self, found)
        return found

    return watched


_ACTIONS: dict[str, Callable[[ArchiveWorld, Event], None]] = {
    faults.OUT: ArchiveWorld.out,
    faults.CUT_OFF: ArchiveWorld.cut_off,
    faults.FLAKY: ArchiveWorld.flaky,
    faults.SLEEP: ArchiveWorld.sleep,
    faults.DECIDE: ArchiveWorld.decide_now,
    faults.RESTORE: ArchiveWorld.restore,
    faults.PUSH: ArchiveWorld.push,
    faults.END_EVICTION: ArchiveWorld.end_eviction,
    faults.IN_PLACE: ArchiveWorld.in_place,
}


def run(plan: Plan, *, trace_file: str | None = None) -> Outcome:
    """Carry out a plan, as `world.run`; operations acknowledged are manifests, rollbacks their
    generations."""
    began = time.process_time()
    world, seconds = carried_out(ArchiveWorld, plan, trace_file)
    newest = world._newest
    return Outcome(
        world.trace.digest(),
        world.trace.events,
        seconds,
        time.process_time() - began,
        0 if newest is None else newest.head.entries,
        world.published,
        0 if newest is None else newest.generation,
        injected=world.bucket.injected,
        counts=world.evictions.counts,
    )
