"""A stream on the simulated disk against a plain model, through every kind of crash.

The model is a list of entries, where operations end in it, how many of the entries are
acknowledged as being on disk, and what else a crash may leave (the outcome of a call that
did not return). Every rule that writes goes through `Laboratory.attempt`, which knows that
the process may end in the middle of it.
"""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Callable, Iterator
from typing import Any, ClassVar
from unittest import mock

from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from datastreamer import DataStream
from datastreamer._packer import EntryPacker
from datastreamer.errors import CommitInDoubt, StreamFileError, UnknownBookmark, WriteFailed
from datastreamer.storage import file as file_module
from datastreamer.storage import owned as owned_module
from datastreamer.storage import record as records
from datastreamer.storage import room
from datastreamer.storage import writer as writer_module
from tests import oracle
from tests.storage.lab.cuts import Crash, Cut, Trouble, cuts, troubles
from tests.storage.lab.disk import Gone, Image, SimDisk
from tests.storage.made import BOOKMARK, FIRST, HEADER, PAGE, Item, items

# What the core does not promise yet.
UPDATE_IS_ATOMIC = True
FAILED_SYNCS_ARE_DISTRUSTED = False
FAILED_CHANGES_KEEP_THEIR_EPOCH = True
CHANGES_FAIL_PRECISELY = True

PATH = "/simulated/stream.bin"
KEYS = (b"k", b"l", b"m" * 16, b"\0")
SPILL = 100_000
# Above this a stream is given small entries only: the time goes into the crashes.
FULL = FIRST + 4 * PAGE

# A size in bytes, or how many bytes of the page are left behind the entry.
sizes = st.one_of(
    st.sampled_from([0, 0, 1, 15, 40, 495, 600, 3000, 30_000, 130_000]).map(lambda n: ("size", n)),
    st.sampled_from([0, 0, 1, 16, 17, 18, 600]).map(lambda n: ("leave", n)),
)
keys = st.sampled_from(KEYS)
adds = st.one_of(sizes, sizes, sizes, keys.map(lambda key: ("key", key)))
several = st.lists(st.lists(adds, min_size=1, max_size=3), min_size=1, max_size=4)
policies = st.sampled_from(["commit", "commit", "os"])


class Observer:
    """A reader beside the writer, that keeps all it was served."""

    def __init__(self, stream: DataStream) -> None:
        self.stream = stream
        self.epoch = stream.epoch
        self.served: list[Item] = []
        # How many of them no power cut may take: they were served under "commit".
        self.safe = 0
        # How many changes of what was committed there were, as it last looked.
        self.changes = -1

    def look(self) -> bool:
        """Take what is new; True if the entries served before stand no more."""
        stream = self.stream
        stream.refresh()
        again = stream.epoch != self.epoch
        if again:
            self.served, self.safe, self.epoch = [], 0, stream.epoch
        assert stream.total_entries >= len(self.served), "entries are gone and no epoch tells"
        if not stream.changing:
            self.served += [(e.type, e.data) for e in stream.entries(len(self.served))]
        return again


def said_by(image: Image) -> int:
    """How many entries the header page counts, before a failed sync where one was got over."""
    page = image.read(FIRST, 0)
    record = records.get_record(page)
    doubt = None if record is None else records.get_doubt(page, record)
    return HEADER.unpack(page[16:54])[-1] if doubt is None else doubt.after.entries


class Laboratory(RuleBasedStateMachine):
    """See the module. Subclasses may set what stands here, and `recovered`."""

    index: ClassVar[str] = "memory"
    path: str = PATH

    def __init__(self) -> None:
        super().__init__()
        self.serial = 0
        self.committed: list[Item] = []
        # The numbers of entries at which an operation ended.
        self.ends = {0}
        self.durable = 0
        self.op: list[Item] | None = None
        # What else the stream may hold once it is opened again, because a call did not
        # return or failed in doubt; and the entry whose bytes may be mixed by it.
        self.outcomes: list[list[Item]] = []
        self.mixed: int | None = None
        # A call that changes what was committed is on its way; how many of them there were.
        self.changing = False
        self.changes = 0
        # Set where a commit, sync or change failed: only a new open helps.
        self.failed = False
        # The next change may have the epoch of one that failed, which readers have seen.
        self.epoch_in_doubt = False
        self.coming: Crash | None = None
        self.observers: list[Observer] = []
        self.policy: Any = "commit"
        self.stream: DataStream | None = None
        self.opened = False
        self.use(SimDisk())
        self.patches = contextlib.ExitStack()
        self.patches.enter_context(booted(lambda: self.disk.boot))
        # How fast a file grows is a matter of time, and the disk's room none here.
        self.patches.enter_context(mock.patch.object(room, "_MAX_STEP", 1))

    def recovered(self, disk: SimDisk) -> None:
        """Called with a copy of each disk on which a crash was recovered from."""

    # Opening.

    def use(self, disk: SimDisk) -> None:
        self.disk = disk
        disk.failed_sync_cleans = FAILED_SYNCS_ARE_DISTRUSTED
        self.process = disk.process()

    @initialize(policy=policies, tear=st.integers(0, 1600))
    def create(self, policy: Any, tear: int) -> None:
        self.policy = policy
        self.stream = DataStream.create(self.path, sync=policy, index=self.index, disk=self.process)
        self.begun()
        self.disk.tear = tear
        self.observe()

    def begun(self) -> None:
        assert self.stream is not None
        EntryPacker.__init__(self.stream._op, SPILL)
        self.disk.watch = self.watched
        self.opened = True

    def observe(self) -> None:
        reader = self.disk.process()
        stream = DataStream.open(self.path, follow=True, index="memory", disk=reader)
        self.observers.append(Observer(stream))

    def teardown(self) -> None:
        self.disk.watch = None
        self.drop()
        self.forget_observers()
        self.patches.close()

    def drop(self) -> None:
        """What the end of the process does."""
        self.process.end()
        if self.stream is not None:
            stream, self.stream = self.stream, None
            abandon(stream)
        self.opened = False
        self.op = None

    def forget_observers(self) -> None:
        for observer in self.observers:
            observer.stream.close()
        self.observers.clear()

    # Observing.

    def watched(self, what: str) -> None:
        """Between two operations of the writer."""
        self.look(self.observers[0])

    def look(self, observer: Observer) -> None:
        again = observer.look()
        assert not again or observer.changes != self.changes or self.changing, (
            "the epoch rose and nothing was changed"
        )
        observer.changes = self.changes
        if observer.stream.changing:
            return
        served = observer.served
        ends = {*self.ends, *(len(outcome) for outcome in self.outcomes)}
        assert len(served) in ends, f"{len(served)} entries are served: a part of an operation"
        assert any(
            self.same(served, it[: len(served)]) for it in [self.committed, *self.outcomes]
        ), f"{len(served)} entries are served that were never committed"
        if self.policy == "commit" and self.opened and not self.changing:
            observer.safe = max(observer.safe, len(served))

    def same(self, found: list[Item], wanted: list[Item]) -> bool:
        """Equal, but for an entry that a crash may have left in the middle of an update."""
        if found == wanted:
            return True
        if self.mixed is None or len(found) != len(wanted):
            return False
        return all(
            f == w or (at == self.mixed and f[0] == w[0] and len(f[1]) == len(w[1]))
            for at, (f, w) in enumerate(zip(found, wanted, strict=True))
        )

    # Attempts.

    def attempt(
        self, call: Callable[[], object], *outcomes: list[Item], changing: bool = False
    ) -> bool:
        """Whether `call` returned. `outcomes`: what the stream may hold besides if not.

        Where it did not, the process has ended and the stream has been recovered, or the
        call failed and the model knows what that leaves.
        """
        kept = list(self.outcomes)
        self.outcomes += outcomes
        self.changing = changing
        self.changes += changing
        try:
            call()
        except Gone:
            return self.crash()
        except (CommitInDoubt, OSError) as error:
            # An error of the system that comes through as it is tells nothing either.
            if not isinstance(error, StreamFileError) and (CHANGES_FAIL_PRECISELY or not changing):
                raise
            # What fails for good is mended when it was noticed.
            self.process.interruption = None
            self.failed = True
            self.epoch_in_doubt = changing and not FAILED_CHANGES_KEEP_THEIR_EPOCH
            self.op = None
            return False
        except (WriteFailed, StreamFileError):
            # As if it had not been called.
            self.process.interruption = None
            self.outcomes = kept
            self.changing = False
            return False
        self.outcomes = kept
        self.changing = False
        return True

    def synced(self) -> None:
        """All that is committed was acknowledged as being on disk."""
        self.durable = len(self.committed)

    # Operations.

    @property
    def live(self) -> DataStream:
        assert self.stream is not None
        return self.stream

    def made(self, what: tuple[str, Any]) -> Item:
        kind, value = what
        if kind == "key":
            return BOOKMARK, value
        self.serial += 1
        if kind == "leave":
            end = self.live._op.total_length
            if end > FULL:
                value = 100
            else:
                room = PAGE - (end - FIRST) % PAGE
                value = max(0, room - 17 - value)
        return self.serial % 5, self.data(value)

    def data(self, size: int) -> bytes:
        """Bytes that no other entry has, and no other sector of this one."""
        words = -(-size // 12)
        if words > 1000:
            part = self.data(12_000)
            return (part * (size // 12_000 + 1))[:size]
        serial = self.serial
        return b"".join([_WORD.pack(serial, at) for at in range(words)])[:size]

    @precondition(lambda self: self.op is None and not self.failed)
    @rule()
    def begin(self) -> None:
        self.live.start_atomic_op()
        self.op = []

    @precondition(lambda self: self.op is not None)
    @rule(what=adds, trouble=troubles)
    def add(self, what: tuple[str, Any], trouble: Trouble) -> None:
        with self.under(trouble):
            self.added(what)

    def added(self, what: tuple[str, Any]) -> None:
        assert self.op is not None
        item = self.made(what)
        # Spills, now and then.
        if self.attempt(lambda: put(self.live, item)):
            self.op.append(item)

    @precondition(lambda self: self.op is not None)
    @rule(trouble=troubles)
    def commit(self, trouble: Trouble) -> None:
        with self.under(trouble):
            self.committed_now()

    def committed_now(self) -> None:
        assert self.op is not None
        longer = self.committed + self.op
        if self.attempt(self.live.commit_atomic_op, longer):
            self.committed, self.op = longer, None
            self.ends.add(len(longer))
            if self.policy == "commit":
                self.synced()

    @precondition(lambda self: self.op is None and not self.failed)
    @rule(operations=several, trouble=troubles)
    def commit_several(self, operations: list[list[tuple[str, Any]]], trouble: Trouble) -> None:
        """The trouble comes in the last of them."""
        for operation in operations[:-1]:
            self.commit_one(operation)
        with self.under(trouble):
            self.commit_one(operations[-1])

    def commit_one(self, operation: list[tuple[str, Any]]) -> None:
        self.begin()
        stream = self.stream
        for what in operation:
            self.added(what)
            if self.op is None or self.stream is not stream:
                return
        self.committed_now()

    @precondition(lambda self: self.op is not None)
    @rule()
    def roll_back(self) -> None:
        self.live.rollback_atomic_op()
        self.op = None

    @precondition(lambda self: not self.failed)
    @rule(trouble=troubles)
    def sync(self, trouble: Trouble) -> None:
        with self.under(trouble):
            if self.attempt(self.live.sync):
                self.synced()

    @precondition(lambda self: self.committed and self.op is None and not self.failed)
    @rule(at=st.integers(0, 1000), trouble=troubles)
    def truncate(self, at: int, trouble: Trouble) -> None:
        shorter = self.committed[: at % len(self.committed)]
        with self.under(trouble):
            if self.attempt(lambda: self.live.truncate(len(shorter)), shorter, changing=True):
                self.committed = shorter
                self.ends = {end for end in self.ends if end < len(shorter)} | {len(shorter)}
                self.synced()

    @precondition(lambda self: self.op is None and not self.failed and self.events())
    @rule(at=st.integers(0, 1000), trouble=troubles)
    def update(self, at: int, trouble: Trouble) -> None:
        events = self.events()
        number = events[at % len(events)]
        kind, old = self.committed[number]
        self.serial += 1
        new = self.data(len(old))
        changed = [*self.committed]
        changed[number] = (kind, new)
        stream = self.live
        with self.under(trouble):
            self.mixed = None if UPDATE_IS_ATOMIC else number
            if self.attempt(lambda: stream.update_entry(number, kind, new), changed, changing=True):
                self.committed = changed
                self.synced()
            if not self.failed:
                self.mixed = None

    def events(self) -> list[int]:
        return [number for number, (kind, _) in enumerate(self.committed) if kind != BOOKMARK]

    # Ends.

    @rule(policy=policies, trouble=troubles)
    def reopen(self, policy: Any, trouble: Trouble) -> None:
        """With a clean close, where nothing has failed; the sync policy may be another."""
        failed = self.failed
        with self.under(trouble):
            stream = self.live
            closed = self.attempt(stream.close)
            if not closed and self.stream is not stream:
                return  # it crashed, and the stream is open again
            if closed and not failed:
                self.synced()
        if self.stream is not stream:
            return
        self.drop()
        self.policy = policy
        self.process = self.disk.process()
        self.changes += 1
        self.recover(self.states(None), None)

    @contextlib.contextmanager
    def under(self, trouble: Trouble) -> Iterator[None]:
        """The disk refuses something in the block, or the process ends in it or behind it."""
        self.coming = trouble if isinstance(trouble, Crash) else None
        if trouble is not None:
            self.process.interruption = trouble.interruption()
        yield
        self.process.interruption = None
        if self.coming is not None:
            self.crash()

    @precondition(lambda self: FAILED_SYNCS_ARE_DISTRUSTED)
    @rule(cut=cuts)
    def evict(self, cut: Cut) -> None:
        """The system forgets pages that a failed sync left clean."""
        self.disk.evict(self.path, cut)

    # Recovery.

    def states(self, crash: Crash | None) -> list[list[Item]]:
        """What the stream may hold after this crash (None: after none)."""
        kept = [self.committed, *self.outcomes]
        if crash is None or crash.cut is None:
            return kept
        least = self.durable
        if self.mixed is not None:
            # An update that is not atomic takes with it what its record's hash covers.
            least = 0
        elif not crash.takes_something():
            return kept
        return [self.committed[:end] for end in sorted(self.ends) if end >= least] + kept

    def crash(self) -> bool:
        """The process has ended; if the crash says so, the machine with it. Recovers."""
        crash = self.coming or Crash(0, None)
        self.coming = None
        self.drop()
        allowed = self.states(crash)
        # Who has not looked since entries were changed holds what is not so any more.
        told = [o for o in self.observers if o.changes == self.changes and not self.changing]
        if self.mixed is not None:
            told = []
        self.changing = True
        self.changes += 1
        while True:
            if crash.cut is not None:
                self.disk.watch = None
                allowed = [
                    it
                    for it in allowed
                    if any(it is outcome for outcome in self.outcomes)
                    or all(it[: o.safe] == o.served[: o.safe] for o in told)
                ]
                self.forget_observers()
                told = []
                tear = self.disk.tear
                self.use(self.disk.power_cut(crash.cut))
                self.disk.tear = tear
                if crash.early_reader:
                    self.observe()
            else:
                self.process = self.disk.process()
            self.inspect(self.disk.copy(), allowed)
            if self.recover(allowed, crash.recovery):
                return False
            assert crash.recovery is not None
            crash = crash.recovery
            allowed += self.states(crash)

    def recover(self, allowed: list[list[Item]], ending: Crash | None) -> bool:
        """Open the stream for writing; False if the process ended in it, as `ending` says."""
        self.changing = True
        self.outcomes = allowed
        if ending is not None:
            self.process.interruption = ending.interruption()
        try:
            self.stream = DataStream.open(
                self.path, sync=self.policy, index=self.index, disk=self.process
            )
        except Gone:
            self.drop()
            return False
        self.process.interruption = None
        found = items(self.stream)
        self.accept(found, allowed)
        self.ends = {end for end in self.ends if end < len(found)} | {len(found)}
        self.committed, self.outcomes, self.mixed = found, [], None
        self.synced()
        self.failed = False
        if self.epoch_in_doubt:
            self.forget_observers()
        self.epoch_in_doubt = False
        for observer in self.observers:
            self.look(observer)
        self.changing = False
        if not self.observers:
            self.observe()
        self.begun()
        self.recovered(self.disk)
        return True

    def accept(self, found: list[Item], allowed: list[list[Item]]) -> None:
        assert any(self.same(found, it) for it in allowed), (
            f"{len(found)} entries stand after the crash, {self.durable} of {len(self.committed)} "
            f"were acknowledged as on disk, and it might be "
            f"{sorted({len(it) for it in allowed})} entries"
        )

    def inspect(self, disk: SimDisk, allowed: list[list[Item]]) -> None:
        """Look at what a crash left in every way there is; on a copy."""
        with booted(lambda: disk.boot):
            left = disk.image(self.path)
            reader = disk.process()
            with DataStream.open(self.path, read_only=True, index="memory", disk=reader) as stream:
                found = items(stream)
                check_bookmarks(stream, found)
            assert not reader.operations, "a reader changed something"
            self.accept(found, allowed)
            cuts = cut_files(disk)
            with DataStream.open(self.path, index="memory", disk=disk.process()) as stream:
                epoch = stream.epoch
                read, found = found, items(stream)
                # What a killed writer had not synced is shown when the next one has.
                assert found[: len(read)] == read, "the writer takes it for another stream"
                self.accept(found, allowed)
                check_bookmarks(stream, found)
            assert plain(disk.image(self.path)) == found, "the file does not hold what was read"
            went_back = said_by(left) != len(found)
            kept = [name for name in cut_files(disk) if name not in cuts]
            assert len(kept) == went_back, "what is cut off is kept, once"
            for name in kept:
                assert disk.image(name).read(FIRST, 0) == left.read(FIRST, 0)
                assert name in disk.power_cut(Cut("nothing arrived")).names()
            before, names = disk.image(self.path), disk.names()
            with DataStream.open(self.path, index="memory", disk=disk.process()) as stream:
                assert stream.epoch == epoch
                assert items(stream) == found
            assert essence(disk.image(self.path)) == essence(before), "a second open changes it"
            assert disk.names() == names

    # What holds at any moment.

    @rule(index=st.booleans())
    def look_around(self, index: bool) -> None:
        """A new reader, and all that the old ones were served."""
        if index and not self.failed:
            self.live.bookmarks.wait()
        self.observe()
        for observer in self.observers:
            self.look(observer)
            if not self.failed:
                assert observer.served == self.committed
        if len(self.observers) > 3:
            self.observers.pop().stream.close()

    @invariant()
    def it_is_as_it_should_be(self) -> None:
        if self.stream is None:
            return
        stream = self.stream
        assert stream.total_entries == len(self.committed)
        if self.failed:
            if self.mixed is None:
                assert items(stream) == self.committed
            return
        check_bookmarks(stream, self.committed)
        assert (stream.file_size - FIRST) % PAGE == 0
        assert stream.file_size > stream.header.total_length


_WORD = struct.Struct(">QI")


@contextlib.contextmanager
def booted(boot: Callable[[], bytes]) -> Iterator[None]:
    """The core takes `boot()` for the running system's id."""
    with contextlib.ExitStack() as patches:
        for module in (file_module, owned_module, writer_module):
            patches.enter_context(mock.patch.object(module, "boot_id", boot))
        yield


def put(stream: DataStream, item: Item) -> None:
    kind, data = item
    if kind == BOOKMARK:
        stream.add_bookmark(data)
    else:
        stream.add_entry(kind, data)


def abandon(stream: DataStream) -> None:
    """Let go of a stream whose process has ended, threads and all, without a word to its file."""
    keeper = stream._keeper
    if keeper is not None:
        keeper._write = False
        keeper.close()
    stream._abandon()


def check_bookmarks(stream: DataStream, entries: list[Item]) -> None:
    """Each key is found where a scan finds it last, or not at all."""
    last = {data: number for number, (kind, data) in enumerate(entries) if kind == BOOKMARK}
    for key in KEYS:
        try:
            found = stream.bookmark(key)
        except UnknownBookmark:
            found = None
        assert found == last.get(key), f"bookmark {key!r}"


def plain(image: Image) -> list[Item]:
    """The file read by what the format says alone."""
    *_, total_length, total_entries = HEADER.unpack(image.read(HEADER.size, 16))
    data = image.read(total_length - FIRST, FIRST)
    found = oracle.scan(data, 0, FIRST)
    assert len(found.entries) == total_entries
    # Cut back to a page's start: the padding before it counts.
    assert found.end == len(data) or (not data[found.end] and len(data) % PAGE == 0)
    assert image.size > total_length
    assert (image.size - FIRST) % PAGE == 0
    return [(kind, data[at + 17 : at + 17 + size]) for at, size, kind, _ in found.entries]


def essence(image: Image) -> tuple[object, ...]:
    """A stream file without the records that each open writes anew (slots and writer)."""
    page = image.read(FIRST, 0)
    rest = {at: block for at, block in image.blocks.items() if at}
    return page[:512], page[1536:2048], image.size, rest


def cut_files(disk: SimDisk) -> list[str]:
    return [name for name in disk.names() if name.endswith(".cut")]
