"""The laboratory bites: each way to get the order or the checks wrong is found by it.

A mutant is a change of one step of the core (or, for the steps of a commit, of the one place
where the simulated disk has them). The machine must fail with it within its examples.
"""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)

from datastreamer import DataStream
from datastreamer.errors import CommitInDoubt
from datastreamer.format import Header
from datastreamer.storage.bookmarks.keeper import BookmarkKeeper
from datastreamer.storage.header import judgement
from datastreamer.storage.header.judgement import Judgement
from datastreamer.storage.header.page import HeaderPage
from datastreamer.storage.header.records import CommitRecord, Head, Writer, get_record
from datastreamer.storage.pages.completer import SumsCompleter
from datastreamer.storage.pages.keeper import SumsKeeper
from datastreamer.storage.pages.sidecar import SumsFile
from datastreamer.storage.read import file as file_module
from datastreamer.storage.write import changes as changes_module
from datastreamer.storage.write import opening
from datastreamer.storage.write import sync_policy as durable
from datastreamer.storage.write.atomic_op import AtomicOp
from datastreamer.storage.write.changes import ChangeWriter
from datastreamer.storage.write.source_records import SourceRecords
from datastreamer.storage.write.sync_policy import Durability
from datastreamer.storage.write.uncommitted import UncommittedSpace
from datastreamer.storage.write.writer import StreamWriter
from tests.storage.lab import disk as disk_module
from tests.storage.lab.background import SimSyncer
from tests.storage.lab.cuts import Crash, Cut, Fault, Trouble, crashes, cuts
from tests.storage.lab.disk import SimDisk, SimFile, SimPlacement
from tests.storage.lab.machine import Laboratory, Operations, few
from tests.storage.lab.recovering import OS_SECONDS

Mutant = Callable[[], contextlib.AbstractContextManager[Any]]


def commit_order(*order: str) -> Mutant:
    def patched() -> contextlib.AbstractContextManager[Any]:
        return mock.patch.object(disk_module, "COMMIT_ORDER", order)

    return patched


def replaced(owner: object, name: str, make: Callable[[Any], Any]) -> Mutant:
    """`owner.name` is what `make` gives for the original."""
    return lambda: mock.patch.object(owner, name, make(getattr(owner, name)))


def both(one: Mutant, other: Mutant) -> Mutant:
    @contextlib.contextmanager
    def mutants() -> Iterator[None]:
        with one(), other():
            yield

    return mutants


def no_sync_but_in_a_commit(_: Any) -> Any:
    return lambda self: None


def no_epoch(change: Any) -> Any:
    def mutant(self: ChangeWriter, *arguments: Any) -> None:
        self._owned.epoch -= 1
        change(self, *arguments)

    return mutant


def no_sync_in_a_change(change: Any) -> Any:
    def mutant(self: ChangeWriter, *arguments: Any) -> None:
        with mock.patch.object(SimFile, "sync"):
            change(self, *arguments)

    return mutant


def no_sync_of_a_source(keep: Any) -> Any:
    def mutant(self: SourceRecords, source: Any) -> None:
        with mock.patch.object(SimFile, "sync"):
            keep(self, source)

    return mutant


def base_stays(commit: Any) -> Any:
    def mutant(self: DataStream, *words: Any, wait: bool = True, **named: Any) -> Any:
        end = self._ensure_writable().end
        before = end.base, end.mid, end.base_sum, end.mid_sum
        result = commit(self, *words, **({} if wait else {"wait": False}), **named)
        if wait and end.waits:
            end.base, end.mid, end.base_sum, end.mid_sum = before
        return result

    return mutant


def spilled_bytes_are_not_hashed(spill: Any) -> Any:
    def mutant(self: AtomicOp) -> None:
        with mock.patch.object(AtomicOp, "entry_parts", return_value=[]):
            spill(self)

    return mutant


def placed_bytes_are_not_hashed(place: Any) -> Any:
    def mutant(self: AtomicOp, arena: Any, segments: Any, length: int, _: Any, **how: bool) -> Any:
        return place(self, arena, segments, length, [], **how)

    return mutant


def not_waited_for(which: bool) -> Callable[[Any], Any]:
    """What is placed is not waited for where it is wanted, or where it is given up."""

    def make(finish: Any) -> Any:
        def mutant(self: UncommittedSpace, *, wanted: bool) -> None:
            if wanted is which:
                self._placing.clear()
            finish(self, wanted=wanted)

        return mutant

    return make


def refused_parts_are_left(finish: Any) -> Any:
    def mutant(self: SimPlacement) -> None:
        with contextlib.suppress(OSError):
            finish(self)
        self._write = None

    return mutant


def header_after_commits_is_believed(_: Any) -> Any:
    def mutant(page: bytes, before: bytes) -> Head | None:
        record = get_record(page)
        return None if record is None or page[:16] != before[:16] else record.after

    return mutant


def header_is_believed(_: Any) -> Any:
    def mutant(page: HeaderPage) -> tuple[Head, int] | None:
        record = page.record
        return None if record is None else (record.after, record.epoch)

    return property(mutant)


def index_keeps_what_was_cut(_: Any) -> Any:
    @contextlib.contextmanager
    def mutant(self: BookmarkKeeper, head: Head) -> Iterator[None]:
        yield

    return mutant


def folder_is_not_synced(_: Any) -> Any:
    return lambda self: None


def nothing_kept(_: Any) -> Any:
    return lambda owned, record, cut: None


def done_when_written(_: Any) -> Any:
    return lambda self, number: number <= self._end.commits


def no_sync_when_set(policy: Any) -> Any:
    def mutant(self: Durability, value: Any) -> None:
        with mock.patch.object(Durability, "sync"):
            policy.fset(self, value)

    return policy.setter(mutant)


def ready_after_a_failure(_: Any) -> Any:
    def mutant(self: Durability, error: OSError) -> None:
        self._end.failures += 1
        self._end.doubt(str(error))
        self._end.repaired()
        self.notify_waiting()

    return mutant


def seen_at_once(commit: Any) -> Any:
    def mutant(self: DataStream, *, wait: bool = True) -> Any:
        end = self._ensure_writable().end
        waits, end.waits = end.waits, end.waits and wait
        try:
            return commit(self, wait=wait)
        finally:
            end.waits = waits

    return mutant


def without(name: str) -> Callable[[Any], Any]:
    """Of the records, this field of the writer's is never set."""

    def make(get: Any) -> Any:
        def mutant(page: bytes) -> Writer | None:
            found: Writer | None = get(page)
            return None if found is None else found._replace(**{name: False})

        return mutant

    return make


def same_boot_is_not_judged(judge: Any) -> Any:
    def mutant(file: Any, page: bytes, path: str, header: Header) -> Judgement:
        record = get_record(page)
        if record is None or record.boot_id != opening.boot_id():
            found: Judgement = judge(file, page, path, header)
            return found
        return unjudged(header, record)

    return mutant


def beside_a_writer_nothing_is_judged(judge: Any) -> Any:
    def mutant(file: Any, page: bytes, path: str, header: Header) -> Judgement:
        record = get_record(page)
        if record is not None and file.locked_elsewhere():
            return unjudged(header, record)
        found: Judgement = judge(file, page, path, header)
        return found

    return mutant


def unjudged(header: Header, record: CommitRecord) -> Judgement:
    return Judgement(header, record.after, record, record.stream_id, record.epoch, record.after_sum)


def header_is_not_withdrawn(_: Any) -> Any:
    return lambda self: None


def doubts_are_kept_quiet(settle: Any) -> Any:
    def mutant(self: StreamWriter) -> None:
        with contextlib.suppress(CommitInDoubt):
            settle(self)

    return mutant


def all_that_is_written(settle: Any) -> Any:
    return lambda self, head, commits: settle(self, self._end.written, self._end.commits)


def times_are_forgotten(ask: Any) -> Any:
    def mutant(self: Any, seconds: float = 0.0) -> None:
        if not seconds:
            ask(self)

    return mutant


def nothing(_: Any) -> Any:
    return lambda self, *arguments, **named: None


def not_written_again(_: Any) -> Any:
    return lambda file, start, stop: None


def taken_for_whole(_: Any) -> Any:
    return lambda file, record: record.after


MUTANTS: dict[str, Mutant] = {
    "a commit without its sync": commit_order("data", "header", "mark"),
    "the mark before the sync": commit_order("data", "header", "mark", "sync"),
    "the header before the data": commit_order("header", "data", "sync", "mark"),
    "the data after the sync": commit_order("header", "sync", "data", "mark"),
    "no sync but in a commit": replaced(SimFile, "sync", no_sync_but_in_a_commit),
    "a truncation without a sync": replaced(ChangeWriter, "_change", no_sync_in_a_change),
    "a truncation without an epoch": replaced(ChangeWriter, "_change", no_epoch),
    "the record's hash is not checked": replaced(
        judgement, "longest_whole", lambda _: lambda file, record: record.after
    ),
    "the record's base is not moved on": both(
        replaced(DataStream, "commit_atomic_op", base_stays),
        replaced(DataStream, "append_many", base_stays),
    ),
    "what is spilled is not hashed": replaced(AtomicOp, "spill", spilled_bytes_are_not_hashed),
    "a commit does not wait for what is placed": replaced(
        UncommittedSpace, "finish_placing", not_waited_for(True)
    ),
    "what is placed and given up is not waited for": replaced(
        UncommittedSpace, "finish_placing", not_waited_for(False)
    ),
    "a part that was refused is not placed again": replaced(
        SimPlacement, "finish", refused_parts_are_left
    ),
    "what is placed is not hashed": replaced(AtomicOp, "_place", placed_bytes_are_not_hashed),
    "a commit does not wait for a batch that is placed": replaced(
        UncommittedSpace, "finish_placing", not_waited_for(True)
    ),
    "readers believe the header": both(
        replaced(HeaderPage, "visible", header_is_believed),
        replaced(file_module.records, "committed_since", header_after_commits_is_believed),
    ),
    "the index keeps what was cut off": replaced(
        BookmarkKeeper, "truncation", index_keeps_what_was_cut
    ),
    "a new file's folder is not synced": replaced(SimDisk, "sync_folder", folder_is_not_synced),
    "a lease before its epoch is on disk": replaced(
        SourceRecords, "put_publisher", no_sync_of_a_source
    ),
    "what a recovery cuts off is not kept": replaced(opening, "keep_cut_bytes", nothing_kept),
    "nothing is judged under the same boot": both(
        replaced(file_module, "judge", same_boot_is_not_judged),
        replaced(opening, "judge", same_boot_is_not_judged),
    ),
    "nothing is judged beside a writer": replaced(
        file_module, "judge", beside_a_writer_nothing_is_judged
    ),
    "what a power cut may have taken is not asked": replaced(
        opening.records, "get_writer", without("may_lose")
    ),
}

# Of what runs after the commits.
MUTANTS_BEHIND: dict[str, Mutant] = {
    "a handle that is done before the sync": replaced(Durability, "reached", done_when_written),
    "a change to the policy commit without a sync": replaced(
        Durability, "policy", no_sync_when_set
    ),
    "what does not wait is seen at once": replaced(DataStream, "commit_atomic_op", seen_at_once),
    "a sync speaks for what was written during it": replaced(
        Durability, "_settle", all_that_is_written
    ),
    "a change from the policy commit that the file does not show": replaced(
        Durability, "_allow_loss", nothing
    ),
    "a sync that is never due": replaced(SimSyncer, "request", times_are_forgotten),
    "what a failed sync left is not written again": replaced(
        durable, "write_again", not_written_again
    ),
    "what a failed sync left is not looked at": replaced(durable, "longest_whole", taken_for_whole),
}


# Of what is rolled back, and closed, while the disk refuses.
MUTANTS_IN_DOUBT: dict[str, Mutant] = {
    "commits begin after a sync that failed": replaced(Durability, "fail", ready_after_a_failure),
    "a rollback leaves the header of a commit that failed": replaced(
        Durability, "withdraw_header", header_is_not_withdrawn
    ),
    "a close keeps its doubts quiet": replaced(StreamWriter, "_settle_all", doubts_are_kept_quiet),
}


def a_page_of_before_is_taken(hashed: Any) -> Any:
    """The page that was read first is taken, whatever was changed in between."""
    kept: dict[int, Any] = {}

    def mutant(self: SumsCompleter, page: int, found: Any) -> None:
        hashed(self, page, kept.setdefault(page, found))

    return mutant


# Of the checksums beside the stream.
MUTANTS_OF_SUMS: dict[str, Mutant] = {
    "a truncation leaves its checksums": replaced(SumsKeeper, "before_truncation", nothing),
    "an update leaves its checksum": both(
        replaced(SumsKeeper, "before_update", nothing), replaced(SumsKeeper, "changed", nothing)
    ),
    "an open keeps what is after the end": replaced(SumsFile, "truncate", nothing),
    "a page is hashed before it changes": replaced(
        SumsCompleter, "hashed", a_page_of_before_is_taken
    ),
    "an update does not make the hash again": replaced(changes_module, "hash_last_page", nothing),
}


class Summed(Laboratory):
    """Pages that become whole, and what changes them."""

    place = grant = evict = change_policy = None  # type: ignore[assignment]
    sync_behind = sync_behind_commits = go_on = wait_for = None  # type: ignore[assignment]


class Huge(Laboratory):
    """Commits, truncations, reopening and crashes alone: what the mutants stumble on, sooner."""

    add = update = sync = look_around = evict = place = None  # type: ignore[assignment]
    sync_behind = sync_behind_commits = go_on = wait_for = None  # type: ignore[assignment]
    complete_sums = pass_time = change_policy = grant = None  # type: ignore[assignment]

    @initialize(policy=st.sampled_from(["commit", "commit", "os"]), tear=st.integers(0, 1600))
    def create(self, policy: Any, tear: int) -> None:
        super().create(policy, tear)

    def begin(self) -> None:
        super().begin()

    def commit_one(self, operation: list[tuple[str, Any]], wait: bool) -> None:
        super().commit_one(operation, wait=True)

    def reopen(self, policy: Any, trouble: Trouble, fault: Fault | None) -> None:
        """Crashes do it often enough."""

    def under(self, trouble: Trouble) -> contextlib.AbstractContextManager[None]:
        refused = isinstance(trouble, Fault) and trouble.only != "place"
        return super().under(None if refused else trouble)


class Narrow(Huge):
    """The same without huge operations."""

    huge = commit = roll_back = None  # type: ignore[assignment]


class Leased(Narrow):
    """The same with leases for sources elsewhere."""

    grant = Laboratory.grant


class Placed(Narrow):
    """The same with batches, which a thread writes."""

    def added(self, what: tuple[str, Any]) -> None:
        self.placed([what])


class Behind(Laboratory):
    """Commits, the syncs behind them and what changes when these come, with every trouble."""

    add = commit = roll_back = update = truncate = look_around = None  # type: ignore[assignment]
    sync = huge = place = grant = None  # type: ignore[assignment]

    def begin(self) -> None:
        super().begin()

    def reopen(self, policy: Any, trouble: Trouble, fault: Fault | None) -> None:
        """It would leave less to be lost."""


class Timed(Behind):
    """No sync is asked for, and none begins before it is due."""

    sync_behind = sync_behind_commits = go_on = wait_for = None  # type: ignore[assignment]

    @precondition(lambda self: self.op is None)
    @rule(
        operations=few,
        seconds=st.sampled_from([None, 0.02, 2.0, OS_SECONDS]),
        crash=crashes,
    )
    def crash_in_time(self, operations: Operations, seconds: float | None, crash: Crash) -> None:
        self.commit_several(operations, None)
        if seconds is None:
            self.look(self.observers[0])
        else:
            self.pass_time(seconds, None)
        with self.under(crash):
            """It ends behind them."""

    @precondition(lambda self: self.op is None and not self.failed)
    @rule(operations=few, crash=crashes)
    def crash_behind_a_change(self, operations: Operations, crash: Crash) -> None:
        self.change_policy("os", None)
        self.commit_several(operations, None)
        self.change_policy("commit", None)
        with self.under(crash):
            """It ends behind it."""


class Unsynced(Timed):
    """What was seen and never synced, and what has its numbers after a power cut."""

    @precondition(lambda self: self.op is None and not self.failed)
    @rule(before=few, after=few, policy=st.sampled_from(["os", 20]), cut=cuts)
    def cut_behind_commits(
        self, before: Operations, after: Operations, policy: Any, cut: Cut
    ) -> None:
        self.change_policy("commit", None)
        self.change_policy(policy, None)
        self.commit_several(before, None)
        self.look(self.observers[0])
        with self.under(Crash(0, cut)):
            """It ends behind them."""
        self.commit_several(after, None)


class Doubtful(Laboratory):
    """Commits that fail, what is rolled back and closed then, and what is there after that."""

    add = update = truncate = look_around = huge = place = None  # type: ignore[assignment]
    sync_behind = sync_behind_commits = go_on = wait_for = None  # type: ignore[assignment]
    complete_sums = pass_time = change_policy = evict = None  # type: ignore[assignment]

    @initialize(policy=st.sampled_from(["commit", "os"]), tear=st.integers(0, 1600))
    def create(self, policy: Any, tear: int) -> None:
        super().create(policy, tear)

    def begin(self) -> None:
        super().begin()

    def commit_one(self, operation: list[tuple[str, Any]], wait: bool) -> None:
        super().commit_one(operation, wait=True)

    @precondition(lambda self: self.op is None and not self.failed)
    @rule(operation=few, after=st.integers(1, 4), crash=crashes)
    def crash_behind_a_rollback(self, operation: Operations, after: int, crash: Crash) -> None:
        """Of a commit that failed in the middle, and whose header the disk did not restore."""
        self.begin()
        for what in operation[0][0]:
            self.added(what)
        with self.under(Fault(after, errno.EIO, lasting=True)):
            self.committed_now(True)
        if self.op is not None:
            self.roll_back(None)
        with self.under(crash):
            """It ends behind it."""


class Refused(Behind):
    """What syncs that fail leave, and what is made of it."""

    def sync(self, trouble: Trouble) -> None:
        super().sync(trouble)

    def under(self, trouble: Trouble) -> contextlib.AbstractContextManager[None]:
        return super().under(trouble if isinstance(trouble, Fault) else None)


MACHINES: dict[str, type[Laboratory]] = {
    **dict.fromkeys(MUTANTS, Narrow),
    **dict.fromkeys(
        ("what is placed is not hashed", "a commit does not wait for a batch that is placed"),
        Placed,
    ),
    "a lease before its epoch is on disk": Leased,
    **dict.fromkeys(MUTANTS_BEHIND, Behind),
    **dict.fromkeys(
        (
            "what is spilled is not hashed",
            "a commit does not wait for what is placed",
            "what is placed and given up is not waited for",
            "a part that was refused is not placed again",
        ),
        Huge,
    ),
    **dict.fromkeys(
        (
            "a sync that is never due",
            "a change to the policy commit without a sync",
            "what does not wait is seen at once",
        ),
        Timed,
    ),
    **dict.fromkeys(
        (
            "what a power cut may have taken is not asked",
            "a change from the policy commit that the file does not show",
        ),
        Unsynced,
    ),
    "what a failed sync left is not looked at": Refused,
    **dict.fromkeys(MUTANTS_IN_DOUBT, Doubtful),
    **dict.fromkeys(MUTANTS_OF_SUMS, Summed),
}


def run(machine: type[Laboratory], examples: int) -> None:
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=20,
            deadline=None,
            database=None,
            derandomize=True,
            print_blob=False,
            report_multiple_bugs=False,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        ),
    )


@pytest.mark.parametrize("examples", [3, pytest.param(30, marks=pytest.mark.soak)])
@pytest.mark.parametrize(
    "machine",
    [Huge, Narrow, Leased, Placed, Behind, Timed, Unsynced, Refused, Doubtful, Summed],
)
def test_the_laboratory_lets_the_core_pass(machine: type[Laboratory], examples: int) -> None:
    """Else finding the mutants with the same examples would mean nothing."""
    run(machine, examples)


# Mutants that take tens of seconds to find.
LATE = {
    "a close keeps its doubts quiet",
    "a page is hashed before it changes",
    "a truncation leaves its checksums",
    "a truncation without a sync",
    "a truncation without an epoch",
    "an open keeps what is after the end",
    "an update does not make the hash again",
    "what a failed sync left is not written again",
    "what does not wait is seen at once",
}


@pytest.mark.mutants
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.soak) if name in LATE else name for name in MACHINES],
)
def test_the_laboratory_finds(name: str) -> None:
    # What is said differs with the example; that the core passes the same ones is checked above.
    mutant = {**MUTANTS, **MUTANTS_BEHIND, **MUTANTS_IN_DOUBT, **MUTANTS_OF_SUMS}[name]
    with mutant(), pytest.raises(Exception) as caught:  # noqa: PT011
        run(MACHINES[name], 800)
    # A mutant that does not fit the core any more would be found for that.
    assert not any(isinstance(it, ROT) for it in within(caught.value))


ROT = (AttributeError, ImportError, NameError, TypeError)


def within(error: BaseException) -> Iterator[BaseException]:
    yield error
    for inner in getattr(error, "exceptions", ()):
        yield from within(inner)
