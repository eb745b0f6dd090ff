"""The laboratory bites: each way to get the order or the checks wrong is found by it.

A mutant is a change of one step of the core (or, for the steps of a commit, of the one place
where the simulated disk has them). The machine must fail with it within its examples.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from datastreamer.storage import file as file_module
from datastreamer.storage import recovery
from datastreamer.storage.bookmarks.keeper import BookmarkKeeper
from datastreamer.storage.operation import AtomicOp
from datastreamer.storage.record import Head, get_record
from datastreamer.storage.writer import StreamWriter
from tests.storage.lab import disk as disk_module
from tests.storage.lab.cuts import Crash, Trouble
from tests.storage.lab.disk import SimDisk, SimFile
from tests.storage.lab.machine import Laboratory

Mutant = Callable[[], contextlib.AbstractContextManager[Any]]


def commit_order(*order: str) -> Mutant:
    def patched() -> contextlib.AbstractContextManager[Any]:
        return mock.patch.object(disk_module, "COMMIT_ORDER", order)

    return patched


def replaced(owner: object, name: str, make: Callable[[Any], Any]) -> Mutant:
    """`owner.name` is what `make` gives for the original."""
    return lambda: mock.patch.object(owner, name, make(getattr(owner, name)))


def no_sync_but_in_a_commit(_: Any) -> Any:
    return lambda self: None


def no_epoch(change: Any) -> Any:
    def mutant(self: StreamWriter, *arguments: Any) -> None:
        self.epoch -= 1
        change(self, *arguments)

    return mutant


def no_sync_in_a_change(change: Any) -> Any:
    def mutant(self: StreamWriter, *arguments: Any) -> None:
        with mock.patch.object(SimFile, "sync"):
            change(self, *arguments)

    return mutant


def base_stays(write: Any) -> Any:
    def mutant(self: StreamWriter, packer: Any, hasher: Any = None, *, wait: bool = True) -> Head:
        end = self.end
        base, mid, first = end.base, end.mid, end.first
        running = (end.running if hasher is None else hasher()).copy()
        for part in packer.entry_spans():
            running.update(part)
        head: Head = write(self, packer, hasher, wait=wait)
        if wait and self.policy == "commit":
            end.base, end.mid, end.first, end.running = base, mid, first, running
        return head

    return mutant


def spilled_bytes_are_not_hashed(spill: Any) -> Any:
    def mutant(self: AtomicOp) -> None:
        with mock.patch.object(AtomicOp, "entry_spans", return_value=[]):
            spill(self)

    return mutant


def header_is_believed(_: Any) -> Any:
    def mutant(page: bytes) -> tuple[Head, int] | None:
        record = get_record(page)
        return None if record is None else (record.after, record.epoch)

    return mutant


def index_keeps_what_was_cut(_: Any) -> Any:
    @contextlib.contextmanager
    def mutant(self: BookmarkKeeper, head: Head) -> Iterator[None]:
        yield

    return mutant


def folder_is_not_synced(_: Any) -> Any:
    return lambda self: None


def nothing_kept(_: Any) -> Any:
    return lambda self, record: None


MUTANTS: dict[str, Mutant] = {
    "a commit without its sync": commit_order("data", "header", "mark"),
    "the mark before the sync": commit_order("data", "header", "mark", "sync"),
    "the header before the data": commit_order("header", "data", "sync", "mark"),
    "the data after the sync": commit_order("header", "sync", "data", "mark"),
    "no sync but in a commit": replaced(SimFile, "sync", no_sync_but_in_a_commit),
    "a truncation without a sync": replaced(StreamWriter, "_change_held", no_sync_in_a_change),
    "a truncation without an epoch": replaced(StreamWriter, "_change_held", no_epoch),
    "the record's hash is not checked": replaced(
        recovery, "longest_whole", lambda _: lambda file, record: record.after
    ),
    "the record's base is not moved on": replaced(StreamWriter, "commit", base_stays),
    "what is spilled is not hashed": replaced(AtomicOp, "spill", spilled_bytes_are_not_hashed),
    "readers believe the header": replaced(file_module, "visible", header_is_believed),
    "the index keeps what was cut off": replaced(
        BookmarkKeeper, "truncation", index_keeps_what_was_cut
    ),
    "a new file's folder is not synced": replaced(SimDisk, "sync_folder", folder_is_not_synced),
    "what a recovery cuts off is not kept": replaced(StreamWriter, "_keep_cut_bytes", nothing_kept),
}


class Narrow(Laboratory):
    """Commits, truncations, reopening and crashes alone: what the mutants stumble on, sooner."""

    add = commit = roll_back = update = sync = look_around = evict = None  # type: ignore[assignment]

    def begin(self) -> None:
        super().begin()

    def reopen(self, policy: Any, trouble: Trouble) -> None:
        """Crashes do it often enough."""

    def under(self, trouble: Trouble) -> contextlib.AbstractContextManager[None]:
        return super().under(trouble if isinstance(trouble, Crash) else None)


def run(examples: int) -> None:
    run_state_machine_as_test(
        Narrow,
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


def test_the_laboratory_lets_the_core_pass() -> None:
    """Else finding the mutants with the same examples would mean nothing."""
    run(30)


@pytest.mark.parametrize("name", MUTANTS)
def test_the_laboratory_finds(name: str) -> None:
    # What is said differs with the example; that the core passes the same ones stands above.
    with MUTANTS[name](), pytest.raises(Exception) as caught:  # noqa: PT011
        run(400)
    # A mutant that does not fit the core any more would be found for that.
    assert not any(isinstance(it, ROT) for it in within(caught.value))


ROT = (AttributeError, ImportError, NameError, TypeError)


def within(error: BaseException) -> Iterator[BaseException]:
    yield error
    for inner in getattr(error, "exceptions", ()):
        yield from within(inner)
