"""A damaged page is replaced by other entries, and that is cut off: by a kill, or a power cut."""

from __future__ import annotations

import functools

import pytest

from datastreamer._codec import Entry
from datastreamer.storage.pages import completer
from datastreamer.storage.stream import DataStream
from datastreamer.storage.write import sync_policy
from tests.storage.lab.background import IdleSyncer
from tests.storage.lab.cuts import ARRIVED, MODES, Cut
from tests.storage.lab.disk import Gone, Interruption, SimDisk
from tests.storage.lab.model import abandon
from tests.storage.lab.recovering import booted
from tests.storage.made import FIRST, PAGE

PATH = "/lab/s.bin"
SIZE = 200_000
A_PAGE = PAGE // (SIZE + 17)
TOTAL = 2 * A_PAGE + 3
# In the replaced page, the entry that an upstream has updated, and the one that is damaged.
UPDATED, BAD = 1, 2


def entries(page: int) -> list[Entry]:
    """Those of a page as they are elsewhere."""
    first = page * A_PAGE
    return [
        Entry(number, 1, bytes([number + 100 * (number == first + UPDATED)]) * SIZE)
        for number in range(first, min(first + A_PAGE, TOTAL))
    ]


@functools.cache
def damaged(page: int) -> SimDisk:
    """A disk with a stream of three pages, one of which is damaged."""
    disk = SimDisk()
    with (
        booted(lambda: disk.boot),
        DataStream.create(PATH, index="memory", disk=disk.process()) as stream,
    ):
        for number in range(TOTAL):
            with stream.atomic_op() as op:
                op.add_entry(1, bytes([number]) * SIZE)
    disk = disk.power_cut(Cut(ARRIVED))
    inode = disk.find(PATH)
    for image in (inode.seen, inode.durable):
        image.write(b"!", FIRST + page * PAGE + BAD * (SIZE + 17) + 1000)
    return disk


def replace(stream: DataStream, page: int) -> str:
    return stream.parts.relay.replace_page(page, b"".join(entry.pack() for entry in entries(page)))


def replaced(disk: SimDisk, page: int, after: int, torn: float) -> bool:
    """Replace the page in a process that is killed after that many operations; whether it was."""
    process = disk.process()
    with booted(lambda: disk.boot):
        stream = DataStream.open(PATH, index="memory", verify="never", disk=process)
        process.interruption = Interruption(after, torn=torn)
        try:
            assert replace(stream, page)
        except Gone:
            abandon(stream)
            return True
        process.interruption = None
        stream.close()
    return False


def look(disk: SimDisk, page: int) -> bool:
    """Open it, and replace the page if that is not done; whether it was."""
    with (
        booted(lambda: disk.boot),
        DataStream.open(PATH, index="memory", verify="never", disk=disk.process()) as stream,
    ):
        start = FIRST + page * PAGE
        done = not stream.parts.pages.damaged_around(start)
        if done:
            # Copies of it that have other entries have to compare.
            assert stream.recorded_changes(0) is None
            assert stream.epoch >= 2
        else:
            assert replace(stream, page)
        assert not stream.parts.pages.damaged_around(start)
        for at in range(3):
            found = list(stream.entries(at * A_PAGE, min(TOTAL, (at + 1) * A_PAGE)))
            assert at != page or found == entries(page)
            assert at == page or all(set(each.data) == {each.number} for each in found)
        with stream.atomic_op() as op:
            op.add_entry(1, bytes([TOTAL]) * SIZE)
    return done


@pytest.mark.parametrize(
    ("page", "mode"),
    [
        # Each mode with one page; the soak tests have all pairs.
        pytest.param(page, mode, marks=() if (i + j) % 2 == 0 else pytest.mark.soak)
        for i, page in enumerate([0, 2])
        for j, mode in enumerate([None, *MODES])
    ],
)
def test_it_is_damaged_or_replaced(
    page: int, mode: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also as far as checksums say, and no open is refused. Without a mode the system continues."""
    for module in (sync_policy, completer):
        monkeypatch.setattr(module, "Syncer", IdleSyncer)
    killed, after, outcomes = True, 0, set()
    while killed:
        disk = damaged(page).copy()
        killed = replaced(disk, page, after, torn=0.5 * (after % 3))
        if mode is not None:
            disk = disk.power_cut(Cut(mode, after))
        done = look(disk, page)
        assert done or killed
        outcomes.add(done)
        after += 1
    assert after > 10
    assert outcomes == {False, True}
