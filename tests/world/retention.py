"""Local retention in a world of archives: files that keep their newest pages only.

Owns what has to hold of a page before the floor is above it, and of what a power cut leaves; how
a simulated file is read whose first pages are in the bucket; and the readers of such files: in
another process beside their writer, and over the network. Retentions are a few pages, so that
pages are evicted every few seconds.
"""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from datetime import timedelta
from functools import lru_cache, partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest import mock

import trio
from xxhash import xxh3_128_digest

from datastreamer import connect
from datastreamer._codec import scan
from datastreamer.archive import eviction
from datastreamer.archive.archiver import Archiver
from datastreamer.archive.eviction import Eviction
from datastreamer.errors import (
    CorruptEntries,
    DamagedEntry,
    DatastreamerError,
    EvictedEntry,
    StreamFileError,
    StreamLocked,
)
from datastreamer.format import HEADER_PAGE_SIZE, PAGE_SIZE, page_of, page_start
from datastreamer.storage import stream as stream_module
from datastreamer.storage.disk.file_ops import OsFile
from datastreamer.storage.header.page import HeaderPage
from datastreamer.storage.header.records import Evicted
from datastreamer.storage.objects import TIMEOUT, page_runs, store
from datastreamer.storage.objects import opened as opened_module
from datastreamer.storage.objects.manifest import ArchiveManifest
from datastreamer.storage.objects.opened import MANIFESTS, SEGMENTS, OpenArchive
from datastreamer.storage.objects.page_cache import PageCache
from datastreamer.storage.pages.hashes import last_page
from datastreamer.storage.pages.page_states import Verify
from datastreamer.storage.read import evicted as evicted_module
from datastreamer.storage.read import open_file as open_module
from datastreamer.storage.read import page_directory
from datastreamer.storage.read.evicted import PagedFile
from datastreamer.storage.stream import DataStream
from datastreamer.storage.write import floor as floor_module
from datastreamer.storage.write.floor import Floor
from tests.storage.lab.cuts import MODES, Cut
from tests.storage.lab.disk import Gone, Interruption, Process, SimDisk
from tests.storage.lab.image import Image
from tests.world import network
from tests.world.bucket import Bucket, _Event, _Thread, disk_here
from tests.world.cache import CachedFile
from tests.world.clock import boot_here, nursery_here
from tests.world.drivers import name_here
from tests.world.faults import Event
from tests.world.machines import Machine, Program, _without_end
from tests.world.model import Wrong
from tests.world.servers import BACKOFF, PATH, image_of
from tests.world.threads import Stepped, from_thread_run, in_loop, run_stepped

if TYPE_CHECKING:
    from tests.world.archives import ArchiveWorld

CLIENT = "client"
_BATCH, _NEVER, SETTLE_SECONDS = 2, 2, 0.3
_RETENTIONS = (3 * PAGE_SIZE, 6 * PAGE_SIZE, timedelta(seconds=8), timedelta(0))
# Pages in a cache: too few for those that are fetched ahead, or enough.
_CACHED = 6, 40
# Share of the reads before which a reader stops; that for the page that is evicted next; seconds.
_STOPPED, _STOPPED_SOON, _STOPPED_SECONDS = 0.05, 0.5, 3.0
_READ_SECONDS, _CLIENT_SECONDS = 6.0, 60.0
_LOCK_SECONDS = 0.005
# Share of the moves of a floor that are looked at so closely.
_LOOKED_AT = 0.5

eviction_here: ContextVar[Eviction] = ContextVar("eviction_here")


def retention_of(seed: int) -> int | timedelta:
    return _RETENTIONS[seed // 2 % len(_RETENTIONS)]


class Orphan(Exception):
    """The archive has another history now than the pages that a file has there, and may have pruned
    theirs: someone has taken it over."""


# Files.


class _AsOs(CachedFile, OsFile):
    """What `PagedFile` takes for a file of the operating system. A process that reads beside a
    machine's program may be stopped before any read, and after it."""

    bucket: Bucket

    def read(self, size: int, offset: int) -> bytes:
        chance, waits = self.bucket.chance, Stepped.here() and not self.bucket.honest
        # (A program that writes may have locks that the event loop waits for.)
        elsewhere = type(self._process) is Process and not self._writes
        stops = offset >= HEADER_PAGE_SIZE and waits and elsewhere and not _has_lock()
        if stops and chance.random() < (_STOPPED_SOON if self.goes_soon(offset) else _STOPPED):
            from_thread_run(trio.sleep, chance.random() * _STOPPED_SECONDS)
        found = CachedFile.read(self, size, offset)
        if stops and chance.random() < _STOPPED:
            from_thread_run(trio.sleep, chance.random() * _STOPPED_SECONDS)
        return found

    def goes_soon(self, offset: int) -> bool:
        """Whether the page of a byte is the next one to be evicted."""
        floor = HeaderPage(self._inode.seen.read(HEADER_PAGE_SIZE, 0)).floor
        return 0 <= page_of(offset) - floor < _BATCH


class SimPagedFile(PagedFile, _AsOs):
    """A `PagedFile` on a simulated disk."""

    def __init__(self, file: CachedFile, path: str) -> None:
        _AsOs.__init__(self, file._process, file._inode, file._writes)
        file._process._files.append(self)
        self._path = path
        self._guard = SimLock()  # type: ignore[assignment]
        self._evicted = self._cache = None
        self._timeout, self._ended = TIMEOUT, threading.Event()

    @classmethod
    def of(cls, file: CachedFile, path: str) -> SimPagedFile:  # type: ignore[override]
        return cls(file, path)


def process_on(disk: SimDisk) -> Process:
    """Another process on a machine."""
    process = disk.process()
    process.opens = CachedFile
    return process


class SimLock:
    """Takes the place of a lock that a thread has while it waits for the bucket. The event loop,
    which cannot wait for a thread, passes."""

    def __init__(self) -> None:
        self._owner: Stepped | None = None
        self._depth = 0

    def __enter__(self) -> SimLock:
        if Stepped.here():
            me = Stepped.running()
            while self._owner not in (None, me):
                from_thread_run(trio.sleep, _LOCK_SECONDS)
            self._owner, self._depth = me, self._depth + 1
        else:
            self.pass_by()
        return self

    def pass_by(self) -> None:
        """The event loop passes."""

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        """Waits for as long as it takes."""
        self.__enter__()
        return True

    def release(self) -> None:
        self.__exit__()

    def __exit__(self, *_: object) -> None:
        if Stepped.here():
            self._depth -= 1
            if not self._depth:
                self._owner = None


class FloorLock(SimLock):
    def pass_by(self) -> None:
        assert self._owner is None, "the floor is moved in the event loop"


def _has_lock() -> bool:
    """Whether this thread has a lock of a stream's writer: nobody can commit meanwhile."""
    writers = [each._writer.owned for each in stream_module._open_streams if each._writer]
    return any(it.lock._is_owned() or it.syncing._is_owned() for it in writers)  # type: ignore[attr-defined]


# The checks.


class Evictions:
    """What is known of the evictions of one world."""

    def __init__(self, world: ArchiveWorld) -> None:
        self.world = world
        self.counts: Counter[str] = Counter()
        self.items: set[tuple[int, bytes]] = {(-1, b"")}
        """Each entry that there ever was, by its number."""
        # What each eviction has read of segments; when it listed manifests, and what was the newest
        # one then.
        self._reads: dict[Eviction, list[tuple[int, str, int, int]]] = {}
        self._lists: dict[Eviction, tuple[int, str]] = {}
        self._turn = 0
        # What is to end a machine's next eviction.
        self._ends: dict[str, Event] = {}
        self._archive: OpenArchive | None = None

    # The archive.

    @property
    def archive(self) -> OpenArchive:
        """That of the world, without faults."""
        if self._archive is None:
            self._archive = self.world._reliable()
        return self._archive

    def _manifests(self) -> Iterator[ArchiveManifest]:
        """The newest one first."""
        for number in reversed(self.archive.numbers()):
            yield self.archive.manifest(number)[0]

    def _holding(self, floor: int, chain: bytes) -> Iterator[ArchiveManifest]:
        """The manifests that have these pages."""
        found = self._manifests()
        return (it for it in found if self.archive.chain_before(it, floor) == chain)

    def mark_of(self, image: Image) -> Evicted | None:
        return HeaderPage(image.read(HEADER_PAGE_SIZE, 0)).evicted

    def is_orphan(self, image: Image) -> bool:
        """Whether the newest manifest has another history than a file's evicted pages."""
        mark = self.mark_of(image)
        newest = None if mark is None else next(self._manifests(), None)
        if mark is None or newest is None:
            return False
        return self.archive.chain_before(newest, mark.floor) != mark.chain

    def reading(self, image: Image, length: int) -> Callable[[int], bytes]:
        """What reads a page of a file, or of the archive if it is evicted. Raises `Orphan`, and
        `Wrong` if the archive does not have it."""
        mark = self.mark_of(image)
        manifest = None if mark is None else next(self._holding(mark.floor, mark.chain), None)
        if mark is not None and manifest is None:
            if self.is_orphan(image):
                self.counts["orphaned"] += 1
                raise Orphan
            raise Wrong(f"no manifest has the {mark.floor} pages below the floor")

        def read(page: int) -> bytes:
            # (Until a truncation is complete the end may be in an evicted page.)
            start, size = page_start(page), min(PAGE_SIZE, length - page_start(page))
            if mark is not None and manifest is not None and page < mark.floor:
                return self.archive.pages(manifest.row_of(page), page, page + 1)[0][:size]
            return image.read(size, start)

        return read

    # What is proven.

    def watching(self, machine: str, operation: str, name: str, start: int, stop: int) -> None:
        eviction = eviction_here.get(None)
        if eviction is None:
            return
        self._turn += 1
        if operation == "list" and name == MANIFESTS:
            names = [each for each in self.world.bucket.objects if each.startswith(MANIFESTS)]
            self._lists[eviction] = self._turn, max(names, default="")
        elif operation == "get_range" and name.startswith(SEGMENTS):
            self._reads.setdefault(eviction, []).append((self._turn, name, start, stop))

    def has_risen(self, image: Image, floor: int, mark: Evicted | None, wanted: Evicted) -> None:
        """The floor of this machine's file has risen, and the file has no hole there yet."""
        name = name_here.get()
        chain = bytes(16) if mark is None else mark.chain
        if wanted.chain != self._chain_of(image, floor, wanted.floor, chain):
            raise Wrong(f"{name} evicts other pages than those of its file")
        manifests = list(self._holding(wanted.floor, wanted.chain))
        if not manifests:
            raise Wrong(f"{name} evicts {wanted.floor} pages that no manifest has")
        last, eviction = 0, eviction_here.get()
        for page in range(floor, wanted.floor):
            read = [each for it in manifests if (each := self._read_back(it, page))]
            if not read:
                raise Wrong(f"{name} evicts page {page}, and has not read it back")
            last = max(last, *read)
        self._reads.pop(eviction, None)
        owner = getattr(eviction._newest, "__self__", None)
        turn, newest = self._lists.get(eviction, (0, ""))
        if isinstance(owner, Archiver):
            if turn < last:
                raise Wrong(f"{name} evicts, and has not looked who publishes since it read back")
            found = self.world.writers_of.get(newest)
            if found != owner._writer._id:
                raise Wrong(f"{name} evicts, though {newest} is another writer's")
        self.counts["evictions"] += 1
        self.counts["evicted pages"] += wanted.floor - floor

    def _chain_of(self, image: Image, floor: int, stop: int, chain: bytes) -> bytes | None:
        """The chain over the pages of a file before `stop`; it is `chain` at the floor."""
        for page in range(floor, stop):
            content = image.read(PAGE_SIZE, page_start(page))
            try:
                batch = scan(content, None, file_offset=page_start(page))
            except CorruptEntries:
                return None
            chain = xxh3_128_digest(chain + xxh3_128_digest(content[: batch.end]))
        return chain

    def _read_back(self, manifest: ArchiveManifest, page: int) -> int:
        """When the eviction has read a page as a manifest names it; 0: not at all."""
        row = manifest.row_of(page)
        start, size = self.archive.footer(row).places[page - row.first_page + row.frame]
        for turn, found, first, stop in reversed(self._reads.get(eviction_here.get(), [])):
            if found == row.object and first <= start and start + size <= stop:
                return turn
        return 0

    # What a power cut leaves.

    def check_cut(self, machine: Machine) -> None:
        """All entries are there after a power cut now."""
        world = self.world
        cut = Cut(world.chance.choice(MODES), world.chance.randrange(2048))
        left = machine.disk.power_cut(cut)
        durable = self.world.plan.sync == "commit"
        self.check_file(machine.name, left, f"after a power cut ({cut.mode})", exact=durable)
        self.counts["power cuts looked at"] += 1

    def _ends_of(self, name: str) -> set[tuple[int, bytes]]:
        """What a machine's stream may be now; empty if that is not known."""
        writer = self.world.writers.get(name)
        known = writer is not None and writer.stream is not None
        return getattr(writer, "_possible", set()) if known else set()

    def check_file(self, name: str, disk: SimDisk, when: str, *, exact: bool) -> None:
        """What a new process finds in a machine's file is what was committed; with `exact`, all of
        it."""
        if not disk.process().exists(PATH):
            return
        token = boot_here.set(lambda: disk.boot)
        try:
            with self.world.bucket.honestly():
                stream = DataStream.open(
                    PATH, read_only=True, index="memory", verify="never", disk=process_on(disk)
                )
                with contextlib.closing(stream):
                    found = self.take(name, stream, when)
            ends = self._ends_of(name)
            if exact and ends and found not in ends:
                raise Wrong(f"{name} {when}: it has {found[0]} entries, and had committed others")
        except DamagedEntry as error:
            if "a crash interrupted the update" not in str(error):
                raise Wrong(f"{name} {when}: {error}") from error
        except EvictedEntry as error:
            if not self.is_orphan(disk.image(PATH)):
                raise Wrong(f"{name} {when}: {error}") from error
            self.counts["orphaned"] += 1
        except StreamFileError as error:
            raise Wrong(f"{name} {when}: {error}") from error
        finally:
            boot_here.reset(token)

    def take(self, name: str, stream: DataStream, when: str) -> tuple[int, bytes]:
        """Read a stream from entry 0 on; its end. Raises `Wrong` for what never was."""
        turn, count, found = stream.epoch, 0, b""
        for batch in stream.batches():
            for each in batch:
                item = xxh3_128_digest(b"%d %s" % (each.type, bytes(each.data)))
                if each.number != count or (count, item) not in self.items:
                    raise Wrong(f"{name} {when}: entry {each.number} never was")
                count, found = count + 1, xxh3_128_digest(found + item)
        self.counts["entries read"] += count
        if self.world.relays and name == self.world.relay_name:
            return count, found  # while it follows changes, it has a history of its own
        steady = stream.epoch == turn and not stream.outdated
        if steady and (count, found) not in self.world.prefixes:
            raise Wrong(f"{name} {when}: its {count} entries never were a stream")
        return count, found

    # The ends of evictions.

    def end_next(self, event: Event, name: str) -> None:
        self._ends[name] = event

    def faults_are_over(self) -> None:
        self._ends.clear()

    def begins(self, machine: Machine) -> None:
        """An eviction, or the opposite, begins on a machine."""
        event = self._ends.pop(machine.name, None)
        program = machine.program
        if event is None or program is None:
            return
        left = event.more % 13
        if event.pick % 2:
            torn = (0.0, 0.5, 1.0)[event.more % 3]
            program.disk.interruption = Interruption(left, torn=torn)
            self.counts["ends planned"] += 1
            return
        disk = machine.disk

        def watch(what: str) -> None:
            nonlocal left
            left -= 1
            if left < 0:
                disk.watch = None
                self.counts["power cuts within evictions"] += 1
                program.kill(silently=True)
                cut = partial(machine.cut_power, Cut(event.mode, event.more), event.seconds)
                in_loop(lambda: self.world._nursery.start_soon(cut))

        disk.watch = watch

    # Readers.

    async def read_beside(self, name: str) -> None:
        """Processes on a machine that read its file, one after the other."""
        world, chance = self.world, self.world.chance
        name_here.set(name)
        while True:
            await trio.sleep(chance.random() * _READ_SECONDS)
            machine = world.machines[name]
            if machine.powered and machine.disk.process().exists(PATH):
                disk = machine.disk
                boot_here.set(lambda disk=disk: disk.boot)  # type: ignore[misc]
                try:
                    await run_stepped(self._read, machine, disk)
                except Exception as error:  # noqa: BLE001 - it ends the world
                    world._wrong = world._wrong or error
                    return

    def _read(self, machine: Machine, disk: SimDisk) -> None:
        chance, follow = self.world.chance, self.world.chance.random() < 0.6
        verify: Verify = chance.choice(("cold", "always", "never"))
        place = process_on(disk)
        disk_here.set(place)
        try:
            with contextlib.closing(
                DataStream.open(
                    PATH,
                    read_only=not follow,
                    follow=follow,
                    index="memory",
                    verify=verify,
                    disk=place,
                )
            ) as stream:
                for _ in range(chance.randint(1, 4)):
                    try:
                        self._take_page(machine.name, stream)
                        self.take(machine.name, stream, f"beside ({verify}, {follow=})")
                        self.counts["reads beside"] += 1
                    except EvictedEntry as error:
                        self.world.trace.note("evicted", machine.name, error)
                        self.counts["reads refused"] += 1
                    from_thread_run(trio.sleep, chance.random() * _READ_SECONDS)
                    if machine.disk is not disk or not place.exists(PATH):
                        return
                    stream.refresh()
        except DamagedEntry as error:
            if machine.disk is disk and "a crash interrupted the update" not in str(error):
                raise Wrong(f"{machine.name} beside ({verify}, {follow=}): {error}") from error
        except Wrong:
            if machine.disk is disk:
                raise
        except DatastreamerError as error:
            self.world.trace.note("not read", machine.name, type(error).__name__, error)
            self.counts[f"not read: {type(error).__name__}"] += 1

    def _take_page(self, name: str, stream: DataStream) -> None:
        """Read the bytes of a page at once that is about to be evicted: readers of entries read
        what seems to be damaged again."""
        pages = stream.parts.pages
        page = pages.floor_page + self.world.chance.randrange(_BATCH)
        if page >= last_page(stream.header.total_length):
            return
        content = pages.file.read(PAGE_SIZE, page_start(page))
        if stream.outdated:
            return
        try:
            batch = scan(content, None, file_offset=page_start(page))
        except CorruptEntries as error:
            raise Wrong(f"{name} beside: page {page}: {error}") from error
        items = [xxh3_128_digest(b"%d %s" % (each.type, bytes(each.data))) for each in batch]
        if not items or not self.items.issuperset(enumerate(items, batch.first_number)):
            raise Wrong(f"{name} beside: page {page} never was")
        self.counts["pages read beside"] += 1

    async def run_client(self, program: Program) -> None:
        """A client that reads from entry 0 on, across the floor of a relay."""
        world, chance = self.world, self.world.chance
        while True:
            await trio.sleep(chance.random() * _CLIENT_SECONDS)
            try:
                async with connect(
                    (world.relay_name,), timeout=8.0, heartbeat=4.0, backoff=BACKOFF, retry_for=8.0
                ) as client:
                    total = (await client.header()).total_entries
                    count = 0
                    async for batch in client.batches(from_entry=0, stop=total):
                        for each in batch:
                            item = xxh3_128_digest(b"%d %s" % (each.type, bytes(each.data)))
                            if each.number != count or (count, item) not in self.items:
                                raise Wrong(f"a client gets entry {each.number} that never was")
                            count += 1
                    self.counts["reads of clients"] += 1
                    self.counts["entries sent"] += count
            except DatastreamerError as error:
                world.trace.note("client failed", type(error).__name__, error)
                self.counts[f"client: {type(error).__name__}"] += 1

    # All pages again.

    async def bring_back(self, machine: Machine, event: Event) -> None:
        """`restore --in-place`, while the machine's program is stopped; it may end in the
        middle."""
        disk = machine.disk
        name_here.set(machine.name)
        boot_here.set(lambda: disk.boot)

        async def restored() -> None:
            try:
                async with trio.open_nursery() as nursery:
                    nursery_here.set(nursery)
                    await run_stepped(self._bring_back, disk, event)
                    nursery.cancel_scope.cancel()
            except BaseException as error:  # noqa: BLE001 - the end of a process is not one
                if (rest := _without_end(error)) is not None:
                    raise rest from None

        await machine.stopped(restored)

    def _bring_back(self, disk: SimDisk, event: Event) -> None:
        process = process_on(disk)
        if not process.exists(PATH):
            return
        if event.more % 2:
            process.interruption = Interruption(
                event.more % 40, torn=(0.0, 0.5)[event.more % 4 > 1]
            )
        try:
            with DataStream.open(PATH, index="memory", disk=process) as stream:
                pages, many = stream.parts.pages, 1 + event.pick % 3
                floor = pages.floor_page
                while (at := pages.floor_page) > 0:
                    pages.bring_back(max(0, at - many))
            assert self.mark_of(disk.image(PATH)) is None
            self.counts["restores in place"] += floor > 0
        except Gone:
            self.counts["restores in place that ended"] += 1
        except DatastreamerError as error:
            self.world.trace.note("not restored in place", error)
            self.counts["restores in place refused"] += not isinstance(error, StreamLocked)
        finally:
            process.end()


# Replacements.


@contextlib.contextmanager
def simulated(evictions: Evictions) -> Iterator[None]:
    """Files on simulated disks have evicted pages, and each move of a floor is checked."""
    world = evictions.world
    raise_to, punch, lower = Floor.raise_to, Floor.punch, Floor._lower
    bringing_back, step, tried = Floor.bringing_back, Eviction.step, store.Store._tried

    def is_of_machine(floor: Floor) -> Machine | None:
        """The machine whose program has the file; None for another process."""
        machine = world.machines.get(name_here.get(""))
        file = floor._owned.file
        assert isinstance(file, SimPagedFile)
        program = None if machine is None else machine.program
        return machine if program is not None and file._process is program.disk else None

    @contextlib.contextmanager
    def looked_at_before_syncs(floor: Floor, machine: Machine | None) -> Iterator[None]:
        """What a power cut leaves is also looked at before each sync."""
        file = floor._owned.file
        sync = file.sync

        def looked_at() -> None:
            if machine is not None:
                world._noted(evictions.check_cut)(machine)
            sync()

        if world.chance.random() < _LOOKED_AT:
            file.sync = looked_at  # type: ignore[method-assign]
        try:
            yield
        finally:
            vars(file).pop("sync", None)

    def checked_raise(floor: Floor, wanted: Evicted, first: int = 0) -> None:
        machine = is_of_machine(floor)
        assert machine is not None
        evictions.begins(machine)
        with floor.still, looked_at_before_syncs(floor, machine):
            before = floor.page, HeaderPage(floor._owned.page).evicted
            raise_to(floor, wanted, first)
        world._noted(evictions.has_risen)(image_of(machine), *before, wanted)
        world._noted(evictions.check_cut)(machine)

    def checked_punch(floor: Floor, first: int, stop: int) -> None:
        machine = is_of_machine(floor)
        assert machine is not None
        if world.chance.random() < 0.3:
            evictions.begins(machine)
        punch(floor, first, stop)
        evictions.counts["holes"] += 1
        world._noted(evictions.check_cut)(machine)

    def checked_lower(floor: Floor, page: int) -> None:
        machine = is_of_machine(floor)
        with looked_at_before_syncs(floor, machine):
            lower(floor, page)
        evictions.counts["floors lowered"] += 1
        if machine is not None:
            world._noted(evictions.check_cut)(machine)

    @contextlib.contextmanager
    def ended_bringing_back(floor: Floor, page: int, *rest: int) -> Iterator[None]:
        machine = is_of_machine(floor)
        if machine is not None and page < floor.page:
            evictions.begins(machine)
        with bringing_back(floor, page, *rest):
            yield

    def known_step(self: Eviction) -> int:
        token = eviction_here.set(self)
        try:
            return step(self)
        finally:
            eviction_here.reset(token)

    def once_in_the_loop(self: store.Store, *arguments: Any) -> Any:
        """The event loop cannot wait between two attempts."""
        if Stepped.here() and not _has_lock():
            return tried(self, *arguments)
        kept, self._timeout = self._timeout, 0.0
        try:
            return tried(self, *arguments)
        finally:
            self._timeout = kept

    def has_lock() -> bool:
        found = _has_lock()
        if found and not world.bucket.honest:
            evictions.counts["requests with the writer's lock"] += 1
            world.trace.note("with the writer's lock")
        return found

    locks = SimpleNamespace(Lock=SimLock, RLock=FloorLock, Thread=_Thread)
    threads = SimpleNamespace(Event=_Event, Thread=_Thread)
    world.bucket.watching = evictions.watching
    world.bucket.locked = has_lock
    _AsOs.bucket = world.bucket
    with contextlib.ExitStack() as patches:
        for owner, attribute, value in (
            (open_module, "OsFile", CachedFile),
            (open_module, "PagedFile", SimPagedFile),
            (evicted_module, "threading", locks),
            (evicted_module, "PageCache", lambda *_: _in_memory(_CACHED[world.plan.seed % 2])),
            (page_runs, "threading", locks),
            (opened_module, "threading", locks),
            # Checks read the same pages again and again.
            (opened_module, "read_page", lru_cache(128)(opened_module.read_page)),
            (page_directory, "threading", locks),
            (floor_module, "threading", locks),
            (eviction, "threading", threads),
            (eviction, "_ensure_possible", lambda *_: None),
            (eviction, "_BATCH", _BATCH),
            (eviction, "_NEVER", _NEVER),
            (eviction, "_SETTLE_SECONDS", SETTLE_SECONDS),
            # Whole pages go over it.
            *((network, name, 1 << 18) for name in ("_WINDOW", "_SOCKET_BYTES", "_PIECE")),
            (store.Store, "_tried", once_in_the_loop),
            (Floor, "raise_to", checked_raise),
            (Floor, "punch", checked_punch),
            (Floor, "_lower", checked_lower),
            (Floor, "bringing_back", ended_bringing_back),
            (Eviction, "step", known_step),
        ):
            patches.enter_context(mock.patch.object(owner, attribute, value))
        yield


def _in_memory(pages: int) -> PageCache:
    cache = PageCache("", pages * PAGE_SIZE)
    cache._folder = None
    return cache
