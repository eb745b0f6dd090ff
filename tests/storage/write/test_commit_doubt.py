"""A disk that refuses: what a rollback and a close promise then, at every step, on a disk that
loses what it may.

Each scenario runs on the simulated disk once for each of its operations, with that one refused
(once, or from then on), until it runs through without. Behind it the process is killed, and then
the power is cut, or the file system alone loses what was not synced, in several ways.
"""

from __future__ import annotations

import contextlib
import errno
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from datastreamer import DataStream
from datastreamer.errors import CommitInDoubt, WriteFailed
from tests.storage.lab.cuts import MODES, Cut
from tests.storage.lab.disk import Interruption, Process, SimDisk
from tests.storage.lab.model import booted
from tests.storage.made import FaultyDisk, Item, add, items

PATH = "/simulated/stream.bin"
A: list[Item] = [(1, b"a" * 700)]
B: list[Item] = [(2, b"b" * 1500), (2, b"bb")]
C: list[Item] = [(3, b"c" * 900)]


class Known:
    """What the caller of a scenario knows at its end: which entries have to be there, and which
    may be there behind them. `settled`: no power cut takes any of them."""

    def __init__(self) -> None:
        self.certain: list[Item] = []
        self.possible: list[list[Item]] = []
        self.settled = False

    def outcomes(self, *, all_is_kept: bool) -> list[list[Item]]:
        kept = [self.certain, *(self.certain + more for more in self.possible)]
        if all_is_kept or self.settled:
            return kept
        # Operations are one of A, B, C each: those from the end may be lost.
        return kept + [part for it in kept for part in prefixes(it)]


def prefixes(entries: list[Item]) -> list[list[Item]]:
    ends = [n for n in range(len(entries)) if n == 0 or entries[n][0] != entries[n - 1][0]]
    return [entries[:end] for end in ends]


def begin(stream: DataStream, entries: list[Item]) -> None:
    stream.start_atomic_op()
    for kind, data in entries:
        stream.add_entry(kind, data)


def committed(stream: DataStream, known: Known, entries: list[Item]) -> None:
    """Commit, and roll back where that fails; what was rolled back may never be seen again."""
    begin(stream, entries)
    try:
        stream.commit_atomic_op()
        known.certain = known.certain + entries
    except CommitInDoubt:
        try:
            stream.rollback_atomic_op()
        except CommitInDoubt:
            known.possible.append(entries)
            raise
    except WriteFailed:
        stream.rollback_atomic_op()


def closed(stream: DataStream, known: Known) -> None:
    try:
        stream.close()
    except CommitInDoubt:
        known.settled = known.settled and stream.sync_policy == "commit"
    else:
        known.settled = True
        # Whatever was in doubt has been rolled back for good.
        known.possible.clear()
    assert stream.closed
    stream.close()


def commit_and_roll_back(stream: DataStream, known: Known) -> None:
    for entries in (B, C):
        with contextlib.suppress(CommitInDoubt):
            committed(stream, known, entries)
            # One that succeeded has put the header back first.
            known.possible.clear()


def leave_blocks(stream: DataStream, known: Known) -> None:
    """The same with `with`: an exception says whether it was rolled back."""
    for entries in (B, C):
        try:
            with stream.atomic_op() as op:
                for kind, data in entries:
                    op.add_entry(kind, data)
        except CommitInDoubt:
            known.possible.append(entries)
        except WriteFailed:
            known.possible.clear()
        else:
            known.possible.clear()
            known.certain = known.certain + entries


def take_back_a_lease(stream: DataStream, known: Known) -> None:
    stream.parts.writer.lend("lease")
    try:
        stream.start_atomic_op(lease="lease")
        for kind, data in B:
            stream.add_entry(kind, data)
        stream.commit_atomic_op()
        known.certain = known.certain + B
    except WriteFailed:
        pass
    try:
        stream.parts.writer.end_lease("lease")
    except CommitInDoubt:
        known.possible.append(B)
    stream.parts.writer.lend("another")
    stream.parts.writer.end_lease("another")


def sync_in_between(stream: DataStream, known: Known) -> None:
    with contextlib.suppress(CommitInDoubt):
        committed(stream, known, B)
        known.possible.clear()
    with contextlib.suppress(CommitInDoubt):
        stream.sync()
        known.possible.clear()
    with contextlib.suppress(CommitInDoubt):
        committed(stream, known, C)
        known.possible.clear()


SCENARIOS = [commit_and_roll_back, leave_blocks, take_back_a_lease, sync_in_between]


def run(
    scenario: Callable[[DataStream, Known], None], sync: Any, fault: Interruption, *, close: bool
) -> tuple[SimDisk, Known, Process]:
    disk, known = SimDisk(), Known()
    process = disk.process()
    with booted(lambda: disk.boot):
        stream = DataStream.create(PATH, sync=sync, index="memory", disk=process)
        add(stream, A)
        stream.sync()
        known.certain, known.settled = [*A], sync == "commit"
        process.interruption = fault
        scenario(stream, known)
        if close:
            closed(stream, known)
        process.end()
        stream._abandon()
    return disk, known, process


def opened(disk: SimDisk) -> tuple[list[Item], list[Item]]:
    """What a reader finds, and what a writer."""
    with booted(lambda: disk.boot):
        reading = DataStream.open(PATH, read_only=True, index="memory", disk=disk.process())
        with reading as stream:
            read = items(stream)
        with DataStream.open(PATH, index="memory", disk=disk.process()) as stream:
            found = items(stream)
            assert found[: len(read)] == read
            add(stream, [(9, b"behind it")])
            return read, found


@pytest.mark.parametrize(
    ("scenario", "sync", "lasting"),
    [
        # Each two of them are together in one test; all three are, in the soak tests.
        pytest.param(
            scenario,
            sync,
            lasting,
            marks=() if lasting in (0, 1, 100) and (i + j + lasting) % 2 == 0 else pytest.mark.soak,
        )
        for i, scenario in enumerate(SCENARIOS)
        for j, sync in enumerate(["commit", "os"])
        for lasting in (0, 1, 2, 3, 5, 100)
    ],
)
def test_every_step_refused(
    scenario: Callable[[DataStream, Known], None], sync: Any, lasting: int
) -> None:
    """At step n, and at as many behind it."""
    for after in range(100):
        for close in (True, False):
            fault = Refusals(after, lasting)
            disk, known, process = run(scenario, sync, fault, close=close)
            done = process.interruption is fault and not fault.begun
            _, found = opened(disk.copy())
            assert found in known.outcomes(all_is_kept=True), (after, close)
            for mode in MODES:
                for left in (disk.power_cut(Cut(mode, after)), disk.lose(Cut(mode, after))):
                    _, found = opened(left)
                    assert found in known.outcomes(all_is_kept=False), (after, close, mode)
        if done:
            assert after
            return
    raise AssertionError("it does not come to its end")


class Refusals(Interruption):
    """As many operations as `more` are refused behind the first one."""

    def __init__(self, after: int, more: int) -> None:
        super().__init__(after, errno.EIO, lasting=True)
        self.more = more
        self.begun = False

    @property
    def lasting(self) -> bool:
        self.begun = True
        self.more -= 1
        return self.more >= 0

    @lasting.setter
    def lasting(self, value: bool) -> None:
        pass


# The messages, and what is released.


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "s.bin"


ALL_REFUSED = dict.fromkeys(["commit sync", "write", "sync", "resize"], errno.EIO)


def test_a_rollback_after_a_doubt(path: Path) -> None:
    disk = FaultyDisk()
    stream = DataStream.create(path, index="memory", disk=disk)
    add(stream, A)
    begin(stream, B)
    disk.faults = ALL_REFUSED
    with pytest.raises(CommitInDoubt):
        stream.commit_atomic_op()
    with pytest.raises(CommitInDoubt) as caught:
        stream.rollback_atomic_op()
    assert str(caught.value) == (
        f"{path}: the system refused to write: Input/output error; whether the operation from "
        "entry 1 on is on disk is not known; nothing more is written until the disk accepts writes "
        "again"
    )
    assert not stream.atomic_op().is_open
    disk.faults = {}
    stream.sync()
    add(stream, C)
    assert items(stream) == A + C
    stream.close()


def test_a_rollback_puts_the_header_back(path: Path) -> None:
    disk = FaultyDisk()
    stream = DataStream.create(path, index="memory", disk=disk)
    add(stream, A)
    begin(stream, B)
    disk.faults = ALL_REFUSED
    with pytest.raises(CommitInDoubt):
        stream.commit_atomic_op()
    synced: list[int] = []
    disk.faults, disk.before = {}, {"sync": lambda: synced.append(1)}
    stream.rollback_atomic_op()
    assert synced
    with DataStream.open(path, read_only=True) as reader:
        assert items(reader) == A
    stream.close()


def test_a_rollback_before_any_commit_needs_no_disk(path: Path) -> None:
    """Nothing of the operation was ever in a header, whatever has failed besides."""
    disk = FaultyDisk()
    stream = DataStream.create(path, sync="os", index="memory", disk=disk)
    add(stream, A)
    begin(stream, B)
    disk.faults = ALL_REFUSED
    with pytest.raises(CommitInDoubt):
        stream.sync()
    stream.rollback_atomic_op()
    disk.faults = {}
    stream.close()


def test_a_block_left_with_a_doubt_that_is_over(path: Path) -> None:
    """The commit fails, and so does putting the header back; the rollback succeeds."""
    disk = FaultyDisk()
    with DataStream.create(path, index="memory", disk=disk) as stream:
        add(stream, A)
        writes = 0

        def once() -> None:
            nonlocal writes
            writes += 1
            if writes == 2:
                disk.faults = {}

        disk.faults = {"commit sync": errno.EIO, "write": errno.EIO}
        disk.before = {"write": once}
        with pytest.raises(WriteFailed, match="was rolled back, and nothing of it is stored") as it:
            add(stream, B)
        assert not isinstance(it.value, CommitInDoubt)
        assert isinstance(it.value.__cause__, CommitInDoubt)
        add(stream, C)
    with DataStream.open(path) as stream:
        assert items(stream) == A + C


@pytest.mark.parametrize("sync", ["os", 60_000])
def test_a_close_says_what_may_not_be_on_disk(path: Path, sync: Any) -> None:
    disk = FaultyDisk()
    stream = DataStream.create(path, sync=sync, disk=disk)
    add(stream, A)
    stream.sync()
    add(stream, B, C)
    begin(stream, A)
    threads = threading.active_count()
    disk.faults = {"sync": errno.EIO}
    with pytest.raises(CommitInDoubt) as caught:
        stream.close()
    assert str(caught.value) == (
        f"{path}: the system refused to write: Input/output error; entries 1 to 3 may not be on "
        "disk; the stream is closed; open it for writing when the disk works: that keeps the "
        "entries that are whole, and reports which are not"
    )
    assert stream.closed
    assert threading.active_count() <= threads
    stream.close()
    # Lock and index are free.
    with DataStream.open(path) as again:
        assert items(again) == A + B + C


def test_a_close_that_gets_over_it(path: Path) -> None:
    """What was rolled back in doubt is rolled back for good; what was acknowledged is on disk."""
    disk = FaultyDisk()
    stream = DataStream.create(path, sync="os", index="memory", disk=disk)
    add(stream, A)
    begin(stream, B)
    disk.faults = {"commit mark": errno.EIO, "write": errno.EIO}
    with pytest.raises(CommitInDoubt, match="whether the operation from entry 1 on"):
        stream.commit_atomic_op()
    with pytest.raises(CommitInDoubt):
        stream.rollback_atomic_op()
    disk.faults = {}
    stream.close()
    with DataStream.open(path) as again:
        assert items(again) == A


def test_a_clean_end_that_cannot_be_written(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Nothing is in doubt then: all was on disk before."""
    disk = FaultyDisk()
    stream = DataStream.create(path, index="memory", disk=disk)
    add(stream, A)
    disk.faults = {"sync": errno.EIO}
    stream.close()
    assert "all 1 entries are on disk, but the clean end could not be written" in caplog.text
    with DataStream.open(path) as again:
        assert items(again) == A


def test_on_disk_and_hidden_until_the_next_open(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The disk syncs an operation that did not wait, and refuses the write that shows it."""
    disk = FaultyDisk()
    stream = DataStream.create(path, index="memory", disk=disk)
    add(stream, A)
    disk.before["sync"] = lambda: disk.faults.update({"write": errno.EIO})
    begin(stream, B)
    stream.commit_atomic_op(wait=False)
    stream.close()
    assert f"readers see only the first {len(A)} until then" in caplog.text
    with DataStream.open(path, read_only=True, index="memory") as reader:
        assert items(reader) == A
    with DataStream.open(path, index="memory") as again:
        assert items(again) == A + B
    with DataStream.open(path, read_only=True, index="memory") as reader:
        assert items(reader) == A + B


@pytest.mark.parametrize("raised", [ValueError("in the block"), None])
def test_leaving_the_block_of_a_stream(path: Path, raised: Exception | None) -> None:
    disk = FaultyDisk()
    with (  # noqa: PT012
        pytest.raises(CommitInDoubt, match="entries 0 to 0 may not be on disk") as caught,
        DataStream.create(path, sync="os", index="memory", disk=disk) as stream,
    ):
        add(stream, A)
        disk.faults = {"sync": errno.EIO}
        if raised is not None:
            raise raised
    assert stream.closed
    chain: list[BaseException] = []
    error: BaseException | None = caught.value
    while error is not None:
        chain.append(error)
        error = error.__context__
    assert raised is None or raised in chain
