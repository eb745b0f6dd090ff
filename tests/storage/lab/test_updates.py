"""An update that is cut off, an open behind it that is cut off too, and then a power cut."""

from __future__ import annotations

import pytest

from datastreamer.storage.pages import completer
from datastreamer.storage.stream import DataStream
from tests.storage.lab.background import IdleSyncer
from tests.storage.lab.disk import Gone, Interruption, SimDisk
from tests.storage.lab.model import check_sums
from tests.storage.lab.recovering import booted

PATH = "/lab/s.bin"
OLD, NEW = b"o" * 2000, b"n" * 2000


def updated(after: int, more: int = 0) -> tuple[SimDisk, bool]:
    """A disk on which an update was killed after that many operations; whether it came to that.
    `more` bytes follow the entry."""
    disk = SimDisk()
    process = disk.process()
    with booted(lambda: disk.boot):
        stream = DataStream.create(PATH, version=1, system_id=1, index="memory", disk=process)
        with stream.atomic_op() as op:
            op.add_entry(1, OLD)
            for _ in range(more // 500_000):
                op.add_entry(1, bytes(500_000))
        process.interruption = Interruption(after=after)
        try:
            stream.update_entry(0, 1, NEW)
        except Gone:
            return disk, True
        process.interruption = None
        stream.close()
    return disk, False


def test_its_old_bytes_are_no_damage(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the header page a power cut leaves the first sector: the commit record is the later one,
    and the bytes are those before."""
    monkeypatch.setattr(completer, "Syncer", IdleSyncer)
    killed, begun = True, 0
    while killed:
        disk, killed = updated(begun, 3_000_000)
        begun += 1
        left = disk.power_cut(
            lambda things: [
                t.versions - 1 if t.path != PATH or (t.what, t.at) == ("sector", 0) else 0
                for t in things
            ]
        )
        for _ in range(2):
            with (
                booted(lambda left=left: left.boot),  # type: ignore[misc]
                DataStream.open(PATH, index="memory", disk=left.process()) as stream,
            ):
                assert stream.entry(0).data in (OLD, NEW)
                check_sums(stream)
                stream.append(1, b"more")


def opened(disk: SimDisk, after: int) -> bool:
    """Open it for writing, in a process that is killed after that many operations; whether it
    was."""
    process = disk.process()
    process.interruption = Interruption(after=after)
    with booted(lambda: disk.boot):
        try:
            stream = DataStream.open(PATH, index="memory", disk=process)
        except Gone:
            return True
        process.interruption = None
        stream.close()
    return False


def test_it_is_old_or_new_and_never_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    # The threads of a process that was killed do not run on.
    monkeypatch.setattr(completer, "Syncer", IdleSyncer)
    killed, begun = True, 0
    while killed:
        disk, killed = updated(begun)
        begun += 1
        interrupted, done = killed, 0
        while interrupted:
            again = disk.copy()
            interrupted = opened(again, done)
            done += 1
            # Nothing that was not synced is there.
            left = again.power_cut(lambda things: [0] * len(things))
            with (
                booted(lambda left=left: left.boot),  # type: ignore[misc]
                DataStream.open(PATH, index="memory", disk=left.process()) as stream,
            ):
                assert stream.entry(0).data in (OLD, NEW)
    assert begun > 10
