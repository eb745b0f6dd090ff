"""What every rule of the laboratory goes through: a call that may not return, and what then.

The model is a list of committed entries, where operations end in it, how many of the
entries are certainly on disk and how many can be seen, and what else a crash may leave (the
outcome of a call that did not return). `Recovering.attempt` knows that the process may end
in the middle of a call; `crash` then takes from the disk what a power cut takes, opens what
is left in every way there is, and has the model go on with what was found.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, ClassVar
from unittest import mock

import pytest
from hypothesis.stateful import RuleBasedStateMachine

from datastreamer import DataStream
from datastreamer._packer import EntryPacker
from datastreamer.errors import (
    CommitInDoubt,
    DamagedEntry,
    DamagedFile,
    EntriesLost,
    StreamClosed,
    StreamFileError,
    WriteFailed,
)
from datastreamer.storage.disk import preallocation as room
from datastreamer.storage.header.records import PublisherRecord
from datastreamer.storage.pages import completer
from datastreamer.storage.write import sync_policy as durable
from datastreamer.storage.write.background import PendingCommit
from tests.storage.lab.background import Background, IdleSyncer, Turn
from tests.storage.lab.cuts import Crash, Cut, Fault, Trouble
from tests.storage.lab.disk import Gone, SimDisk
from tests.storage.lab.model import (
    Observer,
    abandon,
    booted,
    check_bookmarks,
    check_sums,
    cut_files,
    essence,
    offset_behind,
    plain,
    said_by,
)
from tests.storage.made import FIRST, Item, items

PATH = "/simulated/stream.bin"
# In place of 1 MiB: how much of an operation gathers before a part of it is placed.
SPILL = 10_000
# In place of 64 MiB, after which the policies but "commit" do not wait for their time.
UNSYNCED = 200_000
OS_SECONDS = 10.0


class Recovering(RuleBasedStateMachine):
    """See the module. Subclasses may set these, and `recovered`."""

    index: ClassVar[str] = "memory"
    path: str = PATH

    def __init__(self) -> None:
        super().__init__()
        self.committed: list[Item] = []
        # The numbers of entries at which an operation ended.
        self.ends = {0}
        # How many of the entries are certainly on disk, and can certainly be seen.
        self.durable = self.seen = 0
        # When those up to some number will be on disk at the latest, and what is to be notified.
        self.deadlines: list[tuple[int, float]] = []
        self.handles: list[tuple[PendingCommit, int]] = []
        self.op: list[Item] | None = None
        # The source that was granted a lease last, and those after it whose grant did not return.
        self.source, self.asked = PublisherRecord(), list[PublisherRecord]()
        # What else the stream may hold once it is opened again, because a call did not
        # return or failed in doubt.
        self.outcomes: list[list[Item]] = []
        # A call that changes what was committed is on its way; how many of them there were.
        self.changing = False
        self.changes = 0
        # Nothing is written until the disk does what it refused, or another open.
        self.failed = False
        # How often pages that a failed sync left clean, and that were lost, were mended.
        self.mended = 0
        # The mark may be as old as the last sync: a file system lost it.
        self.mark_lost = False
        self.coming: Crash | None = None
        self.observers: list[Observer] = []
        # The longest state that was visible in each epoch.
        self.histories: dict[int, list[Item]] = {}
        self.policy: Any = "commit"
        self.stream: DataStream | None = None
        self.opened = False
        self.background = Background()
        self.use(SimDisk())
        self.patches = contextlib.ExitStack()
        self.patches.enter_context(booted(lambda: self.disk.boot))
        for owner, name, value in (
            # How fast a file grows is a matter of time, and the disk's room none here.
            (room, "_MAX_STEP", 1),
            (durable, "_OS_SYNC_BYTES", UNSYNCED),
            (durable, "Syncer", self.background.syncer),
            (completer, "Syncer", IdleSyncer),
        ):
            self.patches.enter_context(mock.patch.object(owner, name, value))

    def recovered(self, disk: SimDisk) -> None:
        """Called with the disk whenever a crash was recovered from."""

    # Opening.

    def use(self, disk: SimDisk) -> None:
        self.disk = disk
        self.mended = disk.evictions
        self.process = disk.process()

    def begun(self) -> None:
        assert self.stream is not None
        EntryPacker.__init__(self.stream._op, SPILL)
        self.stream._ensure_writable().owned.syncing = Turn(self.background)  # type: ignore[assignment]
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
        self.background.end()
        if self.stream is not None:
            stream, self.stream = self.stream, None
            abandon(stream)
        self.opened = False
        self.op = None

    def forget_observers(self) -> None:
        for observer in self.observers:
            observer.stream.close()
        self.observers.clear()

    @property
    def live(self) -> DataStream:
        assert self.stream is not None
        return self.stream

    # Observing.

    def watched(self, what: str) -> None:
        """Between two operations of the writer."""
        self.look(self.observers[0])
        self.background.watched(what)

    @property
    def evicted(self) -> bool:
        """Whether pages went that a failed sync had left clean, and they were not mended yet:
        only what is on disk can be relied on."""
        return self.disk.evictions != self.mended

    def look(self, observer: Observer) -> None:
        if self.evicted:
            # What it is shown goes back, maybe, and comes again.
            observer.changes = -1
            observer.stream.refresh()
            if not (self.changing or observer.stream.changing):
                self.check_durable(observer.stream)
            return
        again = observer.look()
        assert not again or observer.changes != self.changes or self.changing, (
            "the epoch rose and nothing was changed"
        )
        observer.changes = self.changes
        if observer.stream.changing:
            return
        served = observer.served
        self.visible(observer.stream.epoch, served)
        ends = {*self.ends, *(len(outcome) for outcome in self.outcomes)}
        assert len(served) in ends, f"{len(served)} entries are served: a part of an operation"
        assert any(served == it[: len(served)] for it in [self.committed, *self.outcomes]), (
            f"{len(served)} entries are served that were never committed"
        )
        if self.policy == "commit" and self.opened and not self.changing:
            observer.safe = max(observer.safe, len(served))

    def check_durable(self, stream: DataStream) -> None:
        """What is on disk is served; damage behind it may be in the way, and is named."""
        end = min(self.durable, stream.total_entries)
        try:
            for number in range(end):
                entry = stream.entry(number)
                assert (entry.type, entry.data) == self.committed[number]
        except DamagedEntry as error:
            # The search goes by the starts of pages.
            if error.offset < offset_behind(self.committed[:end]):
                raise

    def visible(self, epoch: int, entries: list[Item]) -> None:
        """Two visible states of one epoch: one is the beginning of the other."""
        known = self.histories.setdefault(epoch, [])
        common = min(len(known), len(entries))
        assert known[:common] == entries[:common], (
            f"two visible states of epoch {epoch} have different entries"
        )
        if len(entries) > common:
            self.histories[epoch] = list(entries)

    # Attempts.

    def attempt(
        self, call: Callable[[], object], *outcomes: list[Item], changing: bool = False
    ) -> bool:
        """Whether `call` returned. `outcomes`: what the stream may hold besides if not.

        Where it did not, the process has ended and the stream has been recovered, or the
        call failed and the model knows what that leaves.
        """
        before, were_changing = list(self.outcomes), self.changing
        self.outcomes += outcomes
        self.changing |= changing
        self.changes += changing
        try:
            call()
        except Gone:
            return self.crash()
        except EntriesLost:
            self.process.interruption = None
            self.outcomes, self.changing = before, were_changing
            self.lost()
            return False
        except CommitInDoubt:
            # It may be either; and the disk does again what it refused.
            self.process.interruption = None
            self.see_failure(doubt=True)
            if self.evicted:
                self.outcomes += self.parts(self.durable)
            return False
        except (WriteFailed, StreamFileError):
            # As if it had not been called.
            self.process.interruption = None
            done = False
        else:
            done = True
        self.outcomes, self.changing = before, were_changing
        self.see_failure()
        return done

    def lost(self) -> None:
        """The stream went back to what is on disk, as by a truncation; or has before."""
        total = self.live.total_entries
        assert self.durable <= total
        if total < len(self.committed):
            assert self.evicted, "entries are lost, and the system had them all"
            self.changes += 1
            self.committed = self.committed[:total]
            assert total in self.ends
            self.ends = {end for end in self.ends if end <= total}
            for handle, end in self.handles:
                if end > total:
                    with pytest.raises(EntriesLost):
                        handle.done()
            self.handles = [(handle, end) for handle, end in self.handles if end <= total]
        self.see_failure()

    def see_failure(self, *, doubt: bool = False) -> None:
        """Whether the stream takes no writes, after a call; also one that noticed nothing."""
        stream = self.live
        failed = doubt or stream._ensure_writable().owned.failed
        if failed:
            self.process.interruption = None
            self.deadlines.clear()
        elif self.failed:
            # What waited was brought to disk, and the doubtful commit rolled back.
            self.outcomes = []
            self.synced()
        if not failed:
            self.mended = self.disk.evictions
        self.failed = failed
        if not stream._op.is_open:
            self.op = None

    def synced(self) -> None:
        """All that is committed is on disk, and can be seen."""
        self.durable = self.seen = len(self.committed)
        self.deadlines.clear()

    def ask_handles(self) -> None:
        """What a handle calls done no power cut may take."""
        for handle, end in self.handles:
            with contextlib.suppress(StreamFileError, StreamClosed):
                if handle.done():
                    self.durable = max(self.durable, end)

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

    def check_source(self, stream: DataStream) -> None:
        assert stream.source in (self.source, *self.asked), "a source is fenced no longer"

    # Recovery.

    def states(self, crash: Crash | None) -> list[list[Item]]:
        """What the stream may hold after this crash (None: after none)."""
        kept = [self.committed, *self.outcomes]
        nothing = crash is None or crash.cut is None or not crash.takes_something()
        if nothing and not self.evicted:
            return kept
        return self.parts(self.durable) + kept

    def parts(self, least: int) -> list[list[Item]]:
        """What was committed, up to the end of an operation behind the first `least` entries."""
        return [self.committed[:end] for end in sorted(self.ends) if end >= least]

    def crash(self) -> bool:
        """The process has ended; if the crash says so, the machine with it. Recovers."""
        crash = self.coming or Crash(0, None)
        self.coming = None
        self.ask_handles()
        self.end(crash)
        return False

    def end(self, crash: Crash) -> None:
        """The process ends, as `crash` says; the stream is open again when this returns."""
        self.drop()
        allowed = self.states(crash)
        # Who has not looked since entries were changed holds what is not so any more.
        reported = [o for o in self.observers if o.changes == self.changes and not self.changing]
        self.changing = True
        self.changes += 1
        lost = False
        while True:
            lost |= crash.cut is not None or self.evicted
            if not lost:
                # Programs that know no records judge nothing: its header goes by its entries.
                plain(self.disk.image(self.path))
            if crash.cut is not None:
                self.disk.watch = None
                allowed = [
                    it
                    for it in allowed
                    if any(it is outcome for outcome in self.outcomes)
                    or all(it[: o.safe] == o.served[: o.safe] for o in reported)
                ]
                self.forget_observers()
                reported = []
                tear, take = self.disk.tear, self.disk.power_cut
                if crash.detached:
                    take = self.disk.lose
                self.mark_lost = crash.detached
                self.use(take(crash.cut))
                self.disk.tear = tear
                if crash.early_reader:
                    self.observe()
                    self.disk.watch = self.beside_the_first_step
            else:
                self.process = self.disk.process()
            self.inspect(self.disk.copy(), allowed)
            if self.recover(allowed, crash.recovery):
                return
            # The next open is another program's.
            again = crash.recovery
            crash = again if isinstance(again, Crash) else Crash(0, None)
            allowed += self.states(crash)

    def recover(self, allowed: list[list[Item]], ending: Trouble) -> bool:
        """Open the stream for writing; False if the process ended in it or the disk refused
        something, as `ending` says."""
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
        except DamagedFile as error:
            raise AssertionError("what a crash left is taken for damage") from error
        except StreamFileError:
            assert isinstance(ending, Fault), "an open fails and the disk refused nothing"
            self.drop()
            return False
        self.process.interruption = None
        self.disk.watch = None
        self.mark_lost = False
        found = items(self.stream)
        self.accept(found, allowed)
        self.check_source(self.stream)
        self.ends = {end for end in self.ends if end < len(found)} | {len(found)}
        self.committed, self.outcomes, self.handles = found, [], []
        if self.evicted:
            # Nothing in the file says how far it went before they were lost.
            self.forget_observers()
            self.mended = self.disk.evictions
        self.synced()
        self.visible(self.stream.epoch, found)
        self.failed = False
        for observer in self.observers:
            self.look(observer)
        self.changing = False
        if not self.observers:
            self.observe()
        self.begun()
        self.recovered(self.disk)
        return True

    def beside_the_first_step(self, what: str) -> None:
        """A reader opens while the next writer is about to act on what it found."""
        self.disk.watch = None
        self.observe()
        for observer in self.observers:
            observer.look()
            assert any(observer.served == it[: len(observer.served)] for it in self.outcomes), (
                "entries are served that the writer cuts off"
            )

    def accept(self, found: list[Item], allowed: list[list[Item]]) -> None:
        assert found in allowed, (
            f"{len(found)} entries after the crash, {self.durable} of {len(self.committed)} "
            f"were acknowledged as on disk, and it might be "
            f"{sorted({len(it) for it in allowed})} entries"
        )

    def inspect(self, disk: SimDisk, allowed: list[list[Item]]) -> None:
        """Look at what a crash left in every way there is; on a copy."""
        with booted(lambda: disk.boot):
            left = disk.image(self.path)
            reader = disk.process()
            with DataStream.open(self.path, read_only=True, index="memory", disk=reader) as stream:
                if self.evicted:
                    self.check_durable(stream)
                    return
                found = items(stream)
                check_bookmarks(stream, found)
                check_sums(stream)
                self.check_source(stream)
            assert not reader.operations, "a reader changed something"
            # What a killed writer had not shown is shown when the next one has synced it.
            self.accept(found, allowed + self.parts(0 if self.mark_lost else self.seen))
            cuts = cut_files(disk)
            with DataStream.open(self.path, index="memory", disk=disk.process()) as stream:
                epoch = stream.epoch
                read, found = found, items(stream)
                assert found[: len(read)] == read, "the writer takes it for another stream"
                self.accept(found, allowed)
                check_bookmarks(stream, found)
                check_sums(stream)
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
