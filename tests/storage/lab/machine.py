"""A stream on the simulated disk against a plain model, through every kind of crash.

The rules: what a program may do with a stream, what its thread that syncs in the background
does meanwhile, and what holds at any moment. Every rule that writes goes through
`Recovering.attempt` (`recovering.py`), which knows that the process may end in the middle of
it.
"""

from __future__ import annotations

import struct
import warnings
from collections.abc import Callable
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule

from datastreamer import DataStream
from datastreamer.storage.header.records import PublisherRecord
from tests.storage.lab.cuts import Crash, Cut, Fault, Trouble, cuts, faults, refusals, troubles
from tests.storage.lab.model import KEYS, batch_of, check_bookmarks, check_sums, put
from tests.storage.lab.recovering import (
    OS_SECONDS,
    SPILL,
    UNSYNCED,
    Recovering,
)
from tests.storage.made import BOOKMARK, FIRST, PAGE, Item, items

# Above this a stream is given small entries only: the time goes into the crashes.
FULL = FIRST + 4 * PAGE

# A size in bytes, or how many bytes of the page are left behind the entry.
sizes = st.one_of(
    st.sampled_from([0, 0, 1, 15, 40, 495, 600, 3000, 30_000, 130_000]).map(lambda n: ("size", n)),
    st.sampled_from([0, 0, 1, 16, 17, 18, 600]).map(lambda n: ("leave", n)),
)
keys = st.sampled_from(KEYS)
adds = st.one_of(sizes, sizes, sizes, keys.map(lambda key: ("key", key)))
_operation = st.tuples(st.lists(adds, min_size=1, max_size=3), st.booleans())
several = st.lists(_operation, min_size=1, max_size=4)
few = st.lists(_operation, min_size=1, max_size=2)
Operations = list[tuple[list[tuple[str, Any]], bool]]
# A failure of a rule that only looks, or brings all to disk, is reported sooner.
seldom = st.one_of(st.none(), st.none(), troubles)
policies = st.sampled_from(["commit", "commit", "os", 20, 2000])


class Laboratory(Recovering):
    """See the module."""

    def __init__(self) -> None:
        super().__init__()
        self.serial = 0
        self.more = False
        # Of the file, when the open operation began.
        self.size = 0

    @initialize(policy=policies, tear=st.integers(0, 1600))
    def create(self, policy: Any, tear: int) -> None:
        self.policy = policy
        self.stream = DataStream.create(self.path, sync=policy, index=self.index, disk=self.process)
        self.begun()
        self.disk.tear = tear
        self.observe()

    # Operations.

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

    @precondition(lambda self: self.op is None)
    @rule()
    def begin(self) -> None:
        size = self.live._ensure_writable().owned.file.size()
        if self.attempt(self.live.start_atomic_op):
            self.op, self.size = [], size

    @precondition(lambda self: self.op is not None)
    @rule(what=adds, trouble=troubles)
    def add(self, what: tuple[str, Any], trouble: Trouble) -> None:
        with self.under(trouble):
            self.added(what)

    def added(self, what: tuple[str, Any]) -> None:
        item, stream = self.made(what), self.live
        # Spills, now and then.
        if self.attempt(lambda: put(stream, item)):
            assert self.op is not None
            self.op.append(item)

    @precondition(lambda self: self.op is not None)
    @rule(what=st.lists(adds, min_size=1, max_size=3), trouble=troubles)
    def place(self, what: list[tuple[str, Any]], trouble: Trouble) -> None:
        with self.under(trouble):
            self.placed(what)

    def placed(self, what: list[tuple[str, Any]]) -> None:
        """Entries of a batch that came from elsewhere, written from its memory."""
        items, op = [self.made(one) for one in what], self.live.atomic_op()
        batch = batch_of(items, op.next_number)
        if self.attempt(lambda: op.place_batch(batch)):
            assert self.op is not None
            self.op += items

    @precondition(lambda self: self.op is not None)
    @rule(wait=st.booleans(), trouble=troubles)
    def commit(self, wait: bool, trouble: Trouble) -> None:
        with self.under(trouble):
            self.committed_now(wait)

    def committed_now(self, wait: bool) -> None:
        assert self.op is not None
        longer, stream = self.committed + self.op, self.live
        handles: list[Any] = []
        nothing = not self.op
        if not self.attempt(lambda: handles.append(stream.commit_atomic_op(wait=wait)), longer):
            return
        self.committed, self.op = longer, None
        self.ends.add(len(longer))
        if not wait:
            self.handles.append((handles[0], len(longer)))
        if not nothing:  # otherwise no reader sees more than before
            self.written_now(wait)

    def written_now(self, wait: bool) -> None:
        """What is committed was written, and is on disk if the policy says so."""
        longer = self.committed
        if self.policy != "commit":
            self.seen = len(longer)
        elif wait:
            self.synced()
            return
        self.deadlines.append((len(longer), self.background.now + self.patience()))

    @precondition(lambda self: self.op is None)
    @rule(
        what=st.lists(sizes, min_size=1, max_size=3),
        key=st.one_of(st.none(), keys),
        trouble=troubles,
    )
    def append(self, what: list[tuple[str, Any]], key: bytes | None, trouble: Trouble) -> None:
        """An operation in one call."""
        data, stream = [self.made(one)[1] for one in what], self.live
        kind = self.serial % 5
        mark = [] if key is None else [(BOOKMARK, key)]
        longer = [*self.committed, *mark, *((kind, one) for one in data)]
        with self.under(trouble):
            if self.attempt(lambda: stream.append_many(kind, data, bookmark=key), longer):
                self.committed = longer
                self.ends.add(len(longer))
                self.written_now(True)

    def patience(self) -> float:
        """How long what was committed now may take to be on disk, in seconds."""
        file = self.live._ensure_writable().owned
        if self.policy == "commit" or file.written.length - file.end.base.length > UNSYNCED:
            return 0
        return OS_SECONDS if self.policy == "os" else self.policy / 1000

    @precondition(lambda self: self.op is None)
    @rule(operations=several, trouble=troubles)
    def commit_several(self, operations: Operations, trouble: Trouble) -> None:
        """The trouble comes in the last of them."""
        for operation, wait in operations[:-1]:
            self.commit_one(operation, wait)
        with self.under(trouble):
            self.commit_one(*operations[-1])

    def commit_one(self, operation: list[tuple[str, Any]], wait: bool) -> None:
        self.begin()
        stream = self.stream
        for what in operation:
            if self.op is None or self.stream is not stream:
                return
            self.added(what)
        if self.op is not None and self.stream is stream:
            self.committed_now(wait)

    @precondition(lambda self: self.op is None)
    @rule(
        entries=st.integers(2, 6),
        late=st.integers(0, 15),
        kept=st.booleans(),
        wait=st.booleans(),
        trouble=st.one_of(troubles, refusals),
    )
    def huge(self, entries: int, late: int, kept: bool, wait: bool, trouble: Trouble) -> None:
        """An operation of as many parts; a thread writes all but the last one and those that find
        it busy."""
        with self.under(trouble):
            self.begin()
            stream = self.live
            self.process.lateness = late
            for _ in range(entries):
                if self.op is None or self.stream is not stream:
                    return
                self.added(("size", SPILL + 2000))
            if self.op is not None and self.stream is stream:
                if kept:
                    self.committed_now(wait)
                else:
                    self.rolled_back()

    @precondition(lambda self: self.op is not None)
    @rule(trouble=troubles)
    def roll_back(self, trouble: Trouble) -> None:
        with self.under(trouble):
            self.rolled_back()

    def rolled_back(self) -> None:
        """It is not found any more, whatever its commit came to."""
        stream, refused = self.live, self.process.refusals
        if self.attempt(stream.rollback_atomic_op):
            self.op = None
            self.outcomes = [it for it in self.outcomes if it == self.committed[: len(it)]]
            file = stream._ensure_writable()
            # A sync that failed behind the operation's back: the next one returns it.
            if not file.owned.failed and self.process.refusals == refused:
                assert file.owned.file.size() <= self.size

    @precondition(lambda self: self.seen and self.op is None and not self.failed)
    @rule(at=st.integers(0, 1000), trouble=troubles)
    def truncate(self, at: int, trouble: Trouble) -> None:
        shorter, stream = self.committed[: at % len(self.committed)], self.live
        with self.under(trouble):
            if self.attempt(lambda: stream.truncate(len(shorter)), shorter, changing=True):
                self.committed = shorter
                self.ends = {end for end in self.ends if end < len(shorter)} | {len(shorter)}
                # What was committed has been on disk, and is lost.
                self.handles.clear()
                self.synced()

    @precondition(lambda self: self.op is None and not self.failed and self.events())
    @rule(at=st.integers(0, 1000), trouble=troubles)
    def update(self, at: int, trouble: Trouble) -> None:
        events, stream = self.events(), self.live
        number = events[at % len(events)]
        kind, old = self.committed[number]
        self.serial += 1
        new = self.data(len(old))
        changed = [*self.committed]
        changed[number] = (kind, new)
        with self.under(trouble):
            if self.attempt(lambda: stream.update_entry(number, kind, new), changed, changing=True):
                self.committed = changed
                self.synced()

    def events(self) -> list[int]:
        visible = self.committed[: self.seen]
        return [number for number, (kind, _) in enumerate(visible) if kind != BOOKMARK]

    # Syncs.

    @rule(trouble=seldom)
    def sync(self, trouble: Trouble) -> None:
        """Also where a sync failed before: the disk may take writes again."""
        stream = self.live
        with self.under(trouble):
            if self.attempt(stream.sync):
                self.synced()

    @precondition(lambda self: not self.failed)
    @rule(trouble=troubles)
    def complete_sums(self, trouble: Trouble) -> None:
        """Missing checksums and summaries are made, one after the other."""
        completer = self.live._ensure_writable().sums_completer
        with self.under(trouble):
            for step in (completer.complete_page, completer.count_page):
                self.more = True
                while self.more:
                    if not self.attempt(self.once(step)):
                        return
                    if self.live._ensure_writable().sums_completer is not completer:
                        return

    def once(self, call: Callable[[], bool]) -> Callable[[], None]:
        def called() -> None:
            self.more = call()

        return called

    @precondition(lambda self: self.handles)
    @rule(at=st.integers(0, 1000), trouble=troubles)
    def wait_for(self, at: int, trouble: Trouble) -> None:
        handle, end = self.handles[at % len(self.handles)]

        def wait() -> None:
            syncer = self.live._ensure_writable().durability._syncer
            syncer.at_once = True  # type: ignore[attr-defined]
            try:
                assert handle.wait(0), "the sync that it asked for is over, and it is not done"
            finally:
                syncer.at_once = False  # type: ignore[attr-defined]

        with self.under(trouble):
            if self.attempt(wait):
                self.durable, self.seen = max(self.durable, end), max(self.seen, end)

    @precondition(lambda self: self.background.asked)
    @rule(hold=st.booleans(), trouble=troubles)
    def sync_behind(self, hold: bool, trouble: Trouble) -> None:
        """The background sync begins; the writer may go on while the disk is at it."""
        with self.under(trouble):
            self.attempt(lambda: self.background.run("sync" if hold else ""))

    @precondition(lambda self: self.op is None)
    @rule(before=few, during=few, trouble=troubles)
    def sync_behind_commits(self, before: Operations, during: Operations, trouble: Trouble) -> None:
        """Commits that do not wait, and more of any kind while the disk is at their sync."""
        for operation, _ in before:
            self.commit_one(operation, wait=False)
        if self.op is None:
            self.sync_behind(hold=True, trouble=None)
            self.commit_several(during, trouble)

    @precondition(lambda self: self.background.held)
    @rule(trouble=troubles)
    def go_on(self, trouble: Trouble) -> None:
        with self.under(trouble):
            self.attempt(self.background.finish)

    @rule(seconds=st.sampled_from([0.0, 0.02, 2.0, OS_SECONDS]), trouble=seldom)
    def pass_time(self, seconds: float, trouble: Trouble) -> None:
        """Whatever was due by then is on disk."""
        with self.under(trouble):
            if self.attempt(lambda: self.background.pass_time(seconds)):
                due = [end for end, at in self.deadlines if at <= self.background.now]
                self.durable = max(self.durable, *due, 0)

    @precondition(lambda self: not self.failed)
    @rule(policy=policies, trouble=seldom)
    def change_policy(self, policy: Any, trouble: Trouble) -> None:
        stream = self.live
        with self.under(trouble):
            if self.attempt(lambda: setattr(stream, "sync_policy", policy)):
                self.policy = policy
                if policy == "commit":
                    self.synced()
                due = self.background.now + self.patience()
                self.deadlines = [(end, due) for end, _ in self.deadlines]

    # Leases.

    @rule(trouble=troubles)
    def grant(self, trouble: Trouble) -> None:
        """The next epoch of a source elsewhere."""
        stream = self.live
        source = PublisherRecord(
            max([self.source, *self.asked]).epoch + 1, self.data(16).ljust(16, b".")
        )
        self.asked.append(source)
        with self.under(trouble):
            if self.attempt(lambda: stream.parts.writer.put_source(source)):
                self.source, self.asked = source, []

    # Ends.

    @rule(policy=policies, trouble=troubles, fault=st.one_of(st.none(), st.none(), faults))
    def reopen(self, policy: Any, trouble: Trouble, fault: Fault | None) -> None:
        """With a clean close, unless the disk refuses; the sync policy may be another."""
        with self.under(trouble):
            stream, evictions = self.live, self.disk.evictions
            refusals, seen = self.process.refusals, self.seen
            closed = self.attempt(lambda: _closed(stream))
            if not closed and self.stream is not stream:
                return  # it crashed, and the stream is open again
            if closed:
                self.outcomes = []
                # All is on disk; what only says so may have gone with the last sync.
                self.mark_lost = self.disk.evictions != evictions
                self.synced()
                if self.process.refusals != refusals:
                    self.seen = seen  # of what did not wait, a refused write was to show it
                assert all(handle.done() for handle, _ in self.handles)
        if self.stream is stream:
            self.policy = policy
            self.end(Crash(0, None, recovery=fault))

    @rule(cut=cuts)
    def evict(self, cut: Cut) -> None:
        """The system forgets pages that a failed sync left clean."""
        self.disk.evict(self.path, cut)
        if not self.failed:
            # They hold nothing that is read.
            self.mended = self.disk.evictions

    # What holds at any moment.

    @rule(index=st.booleans())
    def look_around(self, index: bool) -> None:
        """A new reader, and all that the old ones were served."""
        if index and not self.failed:
            self.live.bookmarks.wait()
        self.observe()
        for observer in self.observers:
            self.look(observer)
            if not (self.failed or self.evicted):
                assert len(observer.served) == self.live.total_entries
        if len(self.observers) > 3:
            self.observers.pop().stream.close()

    @invariant()
    def it_is_as_it_should_be(self) -> None:
        if self.stream is None:
            return
        stream = self.stream
        self.ask_handles()
        total = stream.total_entries
        # That nothing is seen too soon is for power cuts to find.
        assert self.seen <= total <= len(self.committed)
        self.seen = total
        visible = self.committed[:total]
        self.visible(stream.epoch, visible)
        if self.evicted:
            self.check_durable(stream)
            return
        if self.failed:
            assert items(stream) == visible
            return
        check_bookmarks(stream, visible)
        check_sums(stream)
        self.check_source(stream)
        assert (stream.file_size - FIRST) % PAGE == 0
        assert stream.file_size > stream.header.total_length


_WORD = struct.Struct(">QI")


def _closed(stream: DataStream) -> None:
    """Close a stream, also with an open operation."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        stream.close()
