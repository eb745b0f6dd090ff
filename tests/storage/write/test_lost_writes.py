"""Unsynced writes that a file system loses while the kernel runs on: judged as after a reboot.

A volume that is detached and attached again, ext4 after its shutdown ioctl, an evicted page that
a failed sync left clean. It is played on a copy of the file whose record keeps this boot's id.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from datastreamer import DataStream
from datastreamer.errors import BadFileSize, DamagedEntry
from datastreamer.storage.disk.access import Access
from datastreamer.storage.disk.file_ops import OsDisk, OsFile, boot_id
from datastreamer.storage.header import records
from datastreamer.storage.header.records import Head
from datastreamer.storage.maintain.check import verify
from datastreamer.storage.maintain.repair import repair
from datastreamer.storage.maintain.snapshot import snapshot
from tests.storage.made import (
    FIRST,
    HEADER,
    MODES,
    ONE,
    PAGE,
    THREE,
    TWO,
    add,
    copied,
    header_of,
    items,
    make,
    power_cut,
    record_of,
    scan_file,
    sides,
    sum_at,
)


def killed(tmp_path: Path, sync: Any = "os") -> Path:
    """ONE is on disk; TWO and THREE are visible and not synced, and their writer was killed."""
    with DataStream.create(tmp_path / "open.bin", sync=sync, index="memory") as stream:
        add(stream, ONE)
        stream.sync()
        add(stream, TWO, THREE)
        return copied(tmp_path / "open.bin", "killed.bin")


def lost(source: Path, *spans: tuple[int, int], **more: Any) -> Path:
    """A copy in which the spans are zeros, under the boot of now."""
    return power_cut(source, source.with_name("lost.bin"), *spans, boot=boot_id(), **more)


def zeroed(tmp_path: Path) -> Path:
    found = killed(tmp_path)
    at = record_of(found).base.length + 20
    return lost(found, (at, at + 3))


@contextlib.contextmanager
def locked(path: Path) -> Iterator[OsFile]:
    """A writer that has the lock, and has not judged the file yet."""
    file = OsDisk().open(str(path), write=True)
    assert file.lock()
    try:
        yield file
    finally:
        file.close()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("span", ["all", "a byte", "the last byte", "a head", "a page"])
def test_what_was_lost_is_cut_off(
    tmp_path: Path, mode: dict[str, Any], span: str, caplog: pytest.LogCaptureFixture
) -> None:
    found = killed(tmp_path)
    record = record_of(found)
    start, end = record.base.length, record.after.length
    assert (record.base.entries, record.after.entries) == (2, 6)
    path = lost(
        found,
        {
            "all": (start, end),
            "a byte": (start + 17, start + 18),
            "the last byte": (start + 20, start + 21),
            "a head": (end - 17, end - 12),
            "a page": (start, FIRST + 4096),
        }[span],
    )
    before = path.read_bytes()
    with DataStream.open(path, **mode) as stream:
        assert items(stream) == ONE
        assert stream.header.total_length == start
        assert stream.bookmark(b"k") == 0
        assert not stream.refresh()
        assert stream.total_entries == 2
        assert stream.epoch == record.epoch + ("index" in mode)
    if "index" not in mode:
        assert path.read_bytes() == before
        assert sides(path) == []
        return
    (side,) = sides(path)
    assert side.read_bytes() == before[:FIRST] + before[start:end]
    (reported,) = [r for r in caplog.records if r.levelno == logging.WARNING]
    assert reported.getMessage().startswith(
        f"{path}: entries 2 to 5 (bytes {start} to {end}) are not what was written, though the "
        "machine has not restarted since"
    )
    assert str(side) in reported.getMessage()
    with DataStream.open(path) as stream:
        add(stream, THREE)
        assert items(stream) == ONE + THREE
    assert len(sides(path)) == 1


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("left", [5, 0, 300])
def test_a_size_that_was_lost(tmp_path: Path, mode: dict[str, Any], left: int) -> None:
    """The file is shorter than its header says, and of no form."""
    found = killed(tmp_path)
    base = record_of(found).base.length
    path = lost(found, change=lambda content: content.__delitem__(slice(base + left, None)))
    assert path.stat().st_size < header_of(path)[-2]
    with DataStream.open(path, **mode) as stream:
        assert items(stream) == ONE
        if stream.writable:
            add(stream, THREE)
            assert (stream.file_size - FIRST) % PAGE == 0
            assert items(stream) == ONE + THREE


def test_a_size_that_was_lost_behind_the_entries(tmp_path: Path) -> None:
    for found in (killed(tmp_path), make(tmp_path / "closed.bin", ONE, TWO, THREE)):
        path = lost(found, change=lambda content: content.__delitem__(slice(60_000, None)))
        for mode in MODES:
            with DataStream.open(path, **mode) as stream:
                assert items(stream) == ONE + TWO + THREE
        assert path.stat().st_size == FIRST + PAGE


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("mark", ["newer", "older", "lost", "of a later epoch"])
@pytest.mark.parametrize("whole", [True, False])
def test_sectors_of_the_header_page_from_different_times(
    tmp_path: Path, mode: dict[str, Any], mark: str, whole: bool
) -> None:
    """The header is that of TWO; the mark is newer than it, or as old as the last sync."""
    with DataStream.create(tmp_path / "open.bin", sync="os", index="memory") as stream:
        add(stream, ONE)
        stream.sync()
        synced = stream.header.total_length
        add(stream, TWO)
        two = copied(tmp_path / "open.bin", "two.bin")
        add(stream, THREE)
        three = copied(tmp_path / "open.bin", "three.bin")
    content = bytearray(three.read_bytes())
    content[:512] = two.read_bytes()[:512]
    page = content[:FIRST]
    if mark == "older":
        records.put_mark(page, 0, Head(synced, 2))
    elif mark == "of a later epoch":
        records.put_mark(page, 1, Head(synced, 2))
    elif mark == "lost":
        page[1536:1584] = bytes(48)
    content[:FIRST] = page
    if not whole:
        content[synced + 30] ^= 1
    path = tmp_path / "torn.bin"
    path.write_bytes(content)
    left = ONE + TWO if whole else ONE
    # A reader goes no farther than what is known to be on disk, where no mark says more.
    shown = left if mark == "newer" or "index" in mode else ONE
    with DataStream.open(path, **mode) as stream:
        assert items(stream) == shown
        assert not stream.refresh()
    with DataStream.open(path) as stream:
        assert items(stream) == left


@pytest.mark.parametrize("readers", [{"read_only": True}, {"follow": True}])
def test_beside_a_writer_that_has_yet_to_judge(tmp_path: Path, readers: dict[str, Any]) -> None:
    path = zeroed(tmp_path)
    with locked(path):
        reader = DataStream.open(path, **readers)
        assert items(reader) == ONE
        assert not reader.refresh()
        assert items(reader) == ONE
    with DataStream.open(path) as stream:
        add(stream, THREE)
        if "follow" in readers:
            assert reader.refresh()
            assert reader.epoch == stream.epoch == 1
            assert items(reader) == ONE + THREE
        else:
            assert items(reader) == ONE
    reader.close()


def test_a_follower_whose_writer_is_killed_and_whose_file_goes_back(tmp_path: Path) -> None:
    """The header page that it finds then is judged, whatever it was shown before."""
    found = killed(tmp_path)
    path = lost(found)
    with locked(path):
        follower = DataStream.open(path, follow=True)
        assert items(follower) == ONE + TWO + THREE
    content = bytearray(path.read_bytes())
    content[record_of(path).base.length + 20] ^= 1
    page = content[:FIRST]
    records.put_mark(page, 0, Head(scan_file(path)[4].offset, 4))
    with path.open("r+b") as file:
        file.write(bytes(page) + content[FIRST:])
    assert follower.refresh()
    assert items(follower) == ONE
    follower.close()


def test_a_snapshot_has_what_is_whole(tmp_path: Path) -> None:
    path = zeroed(tmp_path)
    assert snapshot(path, tmp_path / "alone.bin").header.total_entries == 2
    with locked(path):
        assert snapshot(path, tmp_path / "beside.bin").header.total_entries == 2
    for name in ("alone.bin", "beside.bin"):
        with DataStream.open(tmp_path / name) as stream:
            assert items(stream) == ONE
            assert stream.epoch == 0
        assert verify(tmp_path / name).ok


def test_verify_says_what_the_next_open_does(tmp_path: Path) -> None:
    path = zeroed(tmp_path)
    base = record_of(path).base.length
    (problem,) = verify(path).problems
    assert problem.where == f"byte {base}"
    assert problem.what.startswith("entries 2 to 5 are not what was committed")
    assert problem.repair == "the next open for writing, or repair, truncates to 2 entries"
    with locked(path):
        report = verify(path)
        assert report.ok
        assert report.entries == 2
        assert any("entries 2 to 5 are not what was committed" in it for it in report.notes)
    # Where the chain of entries breaks, too.
    broken = power_cut(path, tmp_path / "broken.bin", (base, base + 9), boot=boot_id())
    reported = {problem.repair for problem in verify(broken).problems}
    assert reported == {"the next open for writing, or repair, truncates to 2 entries"}
    with DataStream.open(broken) as stream:
        assert items(stream) == ONE
    assert verify(broken).ok
    repair(path)
    with DataStream.open(path) as stream:
        assert items(stream) == ONE


def test_damage_below_what_was_synced_stays_damage(tmp_path: Path) -> None:
    found = killed(tmp_path)
    base = record_of(found).base.length
    at = FIRST + 1
    path = lost(found, (at, at + 8))
    with DataStream.open(path, index="memory") as stream:
        assert stream.total_entries == 6
        with pytest.raises(DamagedEntry):
            items(stream)
    assert sides(path) == []
    (problem,) = {problem.repair for problem in verify(path).problems}
    assert problem.endswith(
        "--from HOST:PORT`: it restores the page from a server of the same stream"
    )
    short = lost(found, change=lambda content: content.__delitem__(slice(base - 1, None)))
    for mode in MODES:
        with pytest.raises(BadFileSize, match="its data ends at byte"):
            DataStream.open(short, **mode)


def test_what_a_program_without_records_wrote_is_not_cut(tmp_path: Path) -> None:
    """Its header fits no record; hashes of an earlier one mean nothing."""
    path = lost(killed(tmp_path))
    entries = scan_file(path)
    content = bytearray(path.read_bytes())
    at = entries[3].offset
    content[at : at + 20] = (
        b"\2" + (20).to_bytes(4, "big") + (9).to_bytes(4, "big") + (3).to_bytes(8, "big") + b"abc"
    )
    content[16:54] = HEADER.pack(*header_of(path)[:-2], at + 20, 4)
    path.write_bytes(content)
    for mode in MODES:
        with DataStream.open(path, **mode) as stream:
            assert items(stream) == [*ONE, TWO[0], (9, b"abc")]
    assert sides(path) == []


def test_what_is_kept_is_written_again(tmp_path: Path) -> None:
    """The system may have marked it clean without having written it: then no sync writes it."""
    found = killed(tmp_path)
    record = record_of(found)
    entries = scan_file(found)
    content = bytearray(found.read_bytes())
    mid = Head(entries[4].offset, 4)
    page = content[:FIRST]

    records.put_record(page, record._replace(mid=mid, mid_sum=sum_at(content, mid)))
    content[:FIRST] = page
    found.write_bytes(content)
    path = lost(found, (mid.length + 18, mid.length + 20))
    written: list[tuple[int, bytes]] = []

    class Noted(OsFile):
        def write(self, data: Any, offset: int) -> None:
            written.append((offset, bytes(data)))
            super().write(data, offset)

    class Disk(OsDisk):
        def open(self, path: str, *, write: bool, beside: Access | None = None) -> OsFile:
            if beside is not None:
                return super().open(path, write=write, beside=beside)
            return Noted(os.open(path, os.O_RDWR if write else os.O_RDONLY))

    with DataStream.open(path, index="memory", disk=Disk()) as stream:
        assert items(stream) == ONE + TWO
    assert (record.base.length, bytes(content[record.base.length : mid.length])) in written
