"""Repairs that truncate: the lock, the order of steps, and the result if one is interrupted.

`test_damage.py` tests the result for each kind of damage, `test_keep.py` what remains without
`cut`, and `../pages/test_restore.py` what servers restore.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from datastreamer import DataStream
from datastreamer.errors import NotAStream, StreamLocked, WriteFailed
from datastreamer.storage.bookmarks.lmdb import LmdbIndex
from datastreamer.storage.disk.access import Access
from datastreamer.storage.maintain.check import verify
from datastreamer.storage.maintain.repair import plan, repair
from tests.storage.made import (
    BOOKMARK,
    FIRST,
    PAGE,
    FaultyDisk,
    Item,
    KilledDisk,
    Stop,
    add,
    bookmarks_of,
    copied,
    half_update,
    items,
    make,
    power_cut,
    scan_file,
    trace_of,
)

ITEMS: list[Item] = [
    *[(BOOKMARK, b"one"), (1, b"a" * 500_000), (1, b"b" * 500_000)],
    *[(BOOKMARK, b"two"), (1, b"c" * 500_000), (BOOKMARK, b"one")],
]


@pytest.fixture
def whole(tmp_path: Path) -> Path:
    folder = tmp_path / "made"
    folder.mkdir()
    return make(folder / "stream.bin", ITEMS[:2], ITEMS[2:4], ITEMS[4:])


@pytest.fixture
def damaged(whole: Path) -> Path:
    """Entry 4 cannot be read."""
    content = bytearray(whole.read_bytes())
    content[scan_file(whole)[4].offset] = 9
    whole.write_bytes(content)
    return whole


def test_a_healthy_file_is_not_touched(whole: Path) -> None:
    before = trace_of(whole.parent)
    done = repair(whole)
    assert done.plan.healthy
    assert done.kept is None
    assert trace_of(whole.parent) == before


def test_a_plan_changes_nothing(damaged: Path) -> None:
    before = trace_of(damaged.parent)
    made = plan(damaged, cut=True)
    assert trace_of(damaged.parent) == before
    assert made.entries_cut == 2
    assert made.steps[1] == "truncate the stream to 4 entries: 2 entries, 4 to 5, are lost"
    assert repair(damaged, cut=True).plan.steps == made.steps


def test_the_repaired_file_opens_with_its_bookmarks(damaged: Path) -> None:
    done = repair(damaged, cut=True)
    assert (done.report.ok, done.report.notes[:-1]) == (True, [])
    with DataStream.open(damaged) as stream:
        assert items(stream) == ITEMS[:4]
        assert stream.bookmarks.lag() == 0
        assert [stream.bookmark(key) for key in (b"one", b"two")] == [0, 3]
    assert bookmarks_of(scan_file(damaged)) == {b"one": 0, b"two": 3}


def test_readers_notice_it(damaged: Path) -> None:
    with DataStream.open(damaged, follow=True) as follower:
        epoch = follower.epoch
        repair(damaged, cut=True)
        assert follower.refresh()
        assert follower.epoch > epoch
        assert follower.total_entries == 4


def test_beside_a_writer(damaged: Path) -> None:
    with DataStream.open(damaged):
        before = damaged.read_bytes()
        with pytest.raises(StreamLocked, match=f"process {os.getpid()}"):
            repair(damaged)
        assert damaged.read_bytes() == before
        assert plan(damaged, cut=True).entries_cut == 2
        assert plan(damaged).entries_lost == 2


def test_the_kept_bytes_undo_the_repair(damaged: Path) -> None:
    before = damaged.read_bytes()
    done = repair(damaged, cut=True)
    assert done.kept is not None
    kept = Path(done.kept).read_bytes()
    content = bytearray(damaged.read_bytes())
    content[:FIRST] = kept[:FIRST]
    content[done.plan.keep_from : done.plan.keep_to] = kept[FIRST:]
    assert content == before


# To the last operation, if the record names one.


def test_back_to_the_last_operation(tmp_path: Path) -> None:
    path = tmp_path / "open.bin"
    with DataStream.create(path, index="memory") as stream:
        add(stream, ITEMS[:2], [(1, b"x"), (1, b"y"), (1, b"z")])
        found = copied(path, "found.bin")
    content = bytearray(found.read_bytes())
    content[scan_file(found)[4].offset] = 9  # z; x and y are whole, the operation is not
    found.write_bytes(content)
    assert repair(found).report.entries == 2
    assert items_of(found) == ITEMS[:2]


def items_of(path: Path) -> list[Item]:
    return [(entry.type, entry.data) for entry in scan_file(path)]


@pytest.mark.parametrize("same_boot", [True, False])
def test_a_last_operation_with_a_wrong_hash(tmp_path: Path, same_boot: bool) -> None:
    path = tmp_path / "open.bin"
    with DataStream.create(path, index="memory") as stream:
        add(stream, ITEMS[:2], [(1, b"xyzzy")])
        found = copied(path, "found.bin")
    content = bytearray(found.read_bytes())
    content[content.index(b"xyzzy")] ^= 1
    found.write_bytes(content)
    if not same_boot:
        found = power_cut(found, tmp_path / "cut.bin")
    assert not verify(found).ok
    assert repair(found).report.entries == 2
    assert items_of(found) == ITEMS[:2]


# The index alone.


def test_a_wrong_index(whole: Path) -> None:
    index = LmdbIndex(f"{whole}.index", True, Access.private())
    mark = index.watermark()
    assert mark is not None
    index.add([(b"one", 1)], mark)
    index.close()
    before = whole.read_bytes()
    done = repair(whole)
    assert done.plan.steps == ["rebuild the bookmark index"]
    assert (done.kept, done.report.ok, done.report.notes) == (None, True, [])
    assert whole.read_bytes() == before


def test_an_index_that_cannot_be_read(whole: Path) -> None:
    (whole.parent / "stream.bin.index" / "data.mdb").write_bytes(b"no index" * 1000)
    assert repair(whole).report.notes == []


# An update that a crash interrupted.


def test_half_an_update_is_undone(whole: Path) -> None:
    offset = scan_file(whole)[1].offset + 17
    half_update(whole, offset, b"a" * 500_000, b"n" * 500_000)
    assert plan(whole).steps == [
        "restore the old bytes of an entry whose update a crash interrupted"
    ]
    done = repair(whole)
    assert done.report.ok
    # The checksum of its page is made again.
    assert all("has no checksum" in note for note in done.report.notes)
    assert items_of(whole) == ITEMS


def test_half_an_update_of_a_damaged_file(damaged: Path) -> None:
    offset = FIRST + 17 + 3 + 17  # of entry 1's data
    half_update(damaged, offset, b"a" * 500_000, b"n" * 500_000)
    assert repair(damaged, cut=True).report.ok
    # The checksum of the page that was updated is not known then, and no page confirms its end.
    assert items_of(damaged) == []


# Interrupted repairs.


@pytest.mark.parametrize("at", [0, 100_000], ids=["a packet type", "a byte of data"])
def test_killed_at_any_write(whole: Path, at: int) -> None:
    """The second run comes to the same result."""
    content = bytearray(whole.read_bytes())
    content[scan_file(whole)[4].offset + at] ^= 9
    original = bytes(content) + b"\0\0\0"  # and of a wrong size
    sums = whole.with_name("stream.bin.sums")
    known = sums.read_bytes()
    for left in range(100):
        whole.write_bytes(original)
        sums.write_bytes(known)
        disk = KilledDisk(left)
        try:
            repair(whole, cut=True, disk=disk)
        except Stop:
            pass
        else:
            assert left > 5, "no operation was met"
            break
        done = repair(whole, cut=True)
        assert done.report.ok
        assert items_of(whole) == ITEMS[:4]
        if not done.plan.healthy:
            assert verify(whole).ok
    else:
        raise AssertionError("it never ends")


def test_killed_at_any_write_of_a_damaged_header(whole: Path) -> None:
    original = bytearray(whole.read_bytes())
    original[38:46] = bytes(8)
    for left in range(100):
        whole.write_bytes(original)
        try:
            repair(whole, disk=KilledDisk(left))
        except Stop:
            assert repair(whole).report.ok
            assert items_of(whole) == ITEMS
        else:
            break


def test_a_full_disk(damaged: Path) -> None:
    before = damaged.read_bytes()
    disk = FaultyDisk()
    disk.faults["write"] = errno.ENOSPC
    with pytest.raises(WriteFailed, match="No space left on device; run it again"):
        repair(damaged, cut=True, disk=disk)
    assert damaged.read_bytes() == before
    disk.faults.clear()
    assert repair(damaged, cut=True, disk=disk).report.ok


def test_damage_that_no_repair_solves(whole: Path) -> None:
    content = bytearray(whole.read_bytes())
    content[:FIRST] = bytes(FIRST)
    whole.write_bytes(content)
    before = trace_of(whole.parent)
    with pytest.raises(NotAStream, match="restore from a copy"):
        repair(whole)
    assert trace_of(whole.parent) == before


def test_entries_of_another_program(whole: Path, tmp_path: Path) -> None:
    """It keeps no records: those in the page name the earlier end, and its header decides."""
    early = make(tmp_path / "early.bin", ITEMS[:2]).read_bytes()
    content = bytearray(whole.read_bytes())
    content[64:FIRST] = early[64:FIRST]
    whole.write_bytes(content)
    assert verify(whole).ok
    content[scan_file(whole)[4].offset] = 9
    whole.write_bytes(content)
    assert repair(whole).report.ok
    assert items_of(whole) == ITEMS[:4]


def test_stale_entries_are_not_included(whole: Path) -> None:
    """Whole entries that a truncation removed follow the end: no totals make them committed."""
    with DataStream.open(whole) as stream:
        stream.truncate(3)
    content = bytearray(whole.read_bytes())
    content[38:54] = b"\xff" * 16
    whole.write_bytes(content)
    done = repair(whole)
    assert done.report.entries == 3
    assert items_of(whole) == ITEMS[:3]
    assert done.plan.keep_to > scan_file(whole)[2].offset + PAGE // 2


def test_a_repair_removes_the_files_of_a_killed_one(tmp_path: Path) -> None:
    path = make(tmp_path / "s.bin", [(1, b"one")])
    begun = path.with_name(f"{path.name}.20260102T030405.4567.repair.89abcdef.new")
    begun.write_bytes(b"begun")
    repair(path)
    assert not begun.exists()
