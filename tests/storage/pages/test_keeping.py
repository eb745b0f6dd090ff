"""`FILE.sums` beside a stream that is written: right after everything that changes the stream."""

from __future__ import annotations

import errno
import logging
import os
import shutil
import stat
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from datastreamer import DataStream
from datastreamer.errors import DamagedEntry, WriteFailed
from datastreamer.storage.disk.access import Access
from datastreamer.storage.maintain.check import verify
from datastreamer.storage.maintain.repair import repair
from datastreamer.storage.pages.completer import MadeSums
from datastreamer.storage.write.opening import make_sums
from tests.storage.made import (
    FIRST,
    PAGE,
    FaultyDisk,
    FaultyFile,
    header_of,
    page_sums,
    scan_file,
)

SIZE = 300_000


def fill(stream: DataStream, pages: int, *, seed: int = 0) -> None:
    """Operations of one entry, three to a page, until the stream has that many whole pages."""
    while stream.header.total_length <= FIRST + pages * PAGE:
        number = stream.total_entries + seed
        with stream.atomic_op() as op:
            op.add_entry(1, number.to_bytes(4, "big") * (SIZE // 4))


def made(path: Path, pages: int = 4, **options: Any) -> Path:
    with DataStream.create(path, index="memory", **options) as stream:
        fill(stream, pages)
    return path


def sidecar(path: Path) -> Path:
    return path.with_name(path.name + ".sums")


def eventually(condition: Callable[[], bool]) -> None:
    until = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.01)


@pytest.mark.parametrize("sync", ["commit", "os", 20])
def test_every_whole_page_has_a_record(tmp_path: Path, sync: Any) -> None:
    assert len(page_sums(made(tmp_path / "s.bin", sync=sync))) == 4


def test_a_stream_of_one_page_has_no_sidecar(tmp_path: Path) -> None:
    path = made(tmp_path / "s.bin", 0)
    assert not sidecar(path).exists()
    with DataStream.open(path, index="memory") as stream:
        fill(stream, 0)
    assert not sidecar(path).exists()


def test_a_stream_of_one_page_needs_no_completion(tmp_path: Path) -> None:
    path = made(tmp_path / "s.bin", 0)
    with DataStream.open(path, index="memory") as stream:
        assert not stream._ensure_writable().sums_completer.complete_page()


def test_over_several_opens(tmp_path: Path) -> None:
    path = made(tmp_path / "s.bin", 2)
    for pages in (3, 5, 5):
        with DataStream.open(path, index="memory") as stream:
            fill(stream, pages)
        assert len(page_sums(path)) == pages


@pytest.mark.parametrize("number", [0, 1, 2, 3, 5, 8, 9, 12])
def test_a_truncation(tmp_path: Path, number: int) -> None:
    path = made(tmp_path / "s.bin")
    with DataStream.open(path, index="memory") as stream:
        stream.truncate(number)
    kept = max(0, (header_of(path)[-2] - FIRST - 1) // PAGE)
    if kept:
        assert len(page_sums(path)) == kept
    assert sidecar(path).stat().st_size == 512 + 64 * kept
    with DataStream.open(path, index="memory") as stream:
        fill(stream, 5, seed=1000)
    assert len(page_sums(path)) == 5
    assert verify(path).ok


@pytest.mark.parametrize("number", [0, 4, 9, -1])
def test_an_update(tmp_path: Path, number: int) -> None:
    path = made(tmp_path / "s.bin")
    with DataStream.open(path, index="memory") as stream:
        stream.update_entry(number % stream.total_entries, 1, b"new " * (SIZE // 4))
    page_sums(path)
    assert verify(path).ok


@pytest.mark.parametrize("repaired", [False, True])
def test_killed_at_any_step_of_an_update(tmp_path: Path, repaired: bool) -> None:
    """Whether the old bytes are restored or the new ones are there: no page is called damaged."""
    path, disk = made(tmp_path / "s.bin"), FaultyDisk()
    states: list[Path] = []

    def keep() -> None:
        folder = tmp_path / f"state {len(states)}"
        folder.mkdir()
        for each in tmp_path.glob("s.bin*"):
            shutil.copyfile(each, folder / each.name)
        states.append(folder / "s.bin")

    with DataStream.open(path, index="memory", disk=disk) as stream:
        disk.before = {"write": keep, "sync": keep}
        stream.update_entry(4, 1, b"new!" * (SIZE // 4))
        disk.before = {}
    assert len(states) > 8
    found = set()
    for state in states:
        if repaired:
            assert repair(state).report.ok
        with DataStream.open(state, index="memory", verify="always") as stream:
            found.add(stream.entry(4).data[:4])
            while stream._ensure_writable().sums_completer.complete_page():
                pass
            assert len([*stream.entries()]) == stream.total_entries
        report = verify(state)
        assert report.ok, (state, report.problems)
    assert len(found) == 2


def test_a_missing_sidecar_is_made_in_the_background(tmp_path: Path) -> None:
    path = made(tmp_path / "s.bin", 6)
    before = sidecar(path).read_bytes()
    sidecar(path).unlink()
    report = verify(path)
    assert report.ok
    assert any("6 pages (0 to 5) have no checksum" in note for note in report.notes)
    with DataStream.open(path, index="memory") as stream:
        sums = stream._ensure_writable().sums_completer
        eventually(lambda: not sums.incomplete(6))
        fill(stream, 7)
    assert len(page_sums(path)) == 7
    assert sidecar(path).read_bytes()[512 : len(before)] == before[512:]


@pytest.mark.parametrize("left", [0, 40, 512, 512 + 64, 512 + 64 * 2 + 30, 512 + 64 * 4])
def test_a_sidecar_that_is_cut_off_is_completed(tmp_path: Path, left: int) -> None:
    path = made(tmp_path / "s.bin")
    os.truncate(sidecar(path), left)
    assert verify(path).ok
    records = (left - 512) // 64 if left >= 512 else 0
    assert make_sums(path) == MadeSums(4, 4 - records, 0, "")
    page_sums(path)


@pytest.mark.parametrize("at", [0, 20, 30, 512, 512 + 70, 512 + 64 + 40, 512 + 64 * 4 - 1])
def test_a_damaged_sidecar_is_no_damage(tmp_path: Path, at: int) -> None:
    path = made(tmp_path / "s.bin")
    content = bytearray(sidecar(path).read_bytes())
    content[at] ^= 4
    sidecar(path).write_bytes(content)
    assert verify(path).ok
    with DataStream.open(path, index="memory", verify="always") as stream:
        assert sum(1 for _ in stream.entries()) == stream.total_entries
        fill(stream, 5)
    assert verify(path).ok


def test_a_sidecar_of_another_stream_is_replaced(tmp_path: Path) -> None:
    path, other = made(tmp_path / "s.bin"), made(tmp_path / "o.bin")
    sidecar(path).write_bytes(sidecar(other).read_bytes())
    assert verify(path).ok
    assert make_sums(path) == MadeSums(4, 4, 0, "")
    page_sums(path)


def test_a_sidecar_of_a_later_state_is_not_used(tmp_path: Path) -> None:
    """A backup of the stream was restored, and the sidecar was left."""
    path = made(tmp_path / "s.bin")
    backup = path.read_bytes()
    with DataStream.open(path, index="memory") as stream:
        stream.truncate(3)
        fill(stream, 4, seed=50)
    path.write_bytes(backup)
    assert verify(path).ok
    with DataStream.open(path, index="memory", verify="always") as stream:
        assert len([*stream.entries()]) == stream.total_entries


def test_a_page_of_an_earlier_time_is_noticed(tmp_path: Path) -> None:
    """Whole, with the right numbers, and not what was written last."""
    path = made(tmp_path / "s.bin")
    content = path.read_bytes()
    with DataStream.open(path, index="memory") as stream:
        stream.update_entry(4, 1, b"new " * (SIZE // 4))
    now = bytearray(path.read_bytes())
    now[FIRST + PAGE : FIRST + 2 * PAGE] = content[FIRST + PAGE : FIRST + 2 * PAGE]
    path.write_bytes(now)
    (problem,) = verify(path).problems
    assert problem.what == "page 1 (entries 3 to 5): the entries do not match their checksum"


def test_damage_is_not_hidden_by_a_change(tmp_path: Path) -> None:
    path = made(tmp_path / "s.bin")
    content = bytearray(path.read_bytes())
    content[FIRST + PAGE + 1000] ^= 1
    content[-PAGE + 1000] ^= 1
    path.write_bytes(content)
    with DataStream.open(path, index="memory", verify="never") as stream:
        with pytest.raises(DamagedEntry, match="damaged"):
            stream.update_entry(4, 1, b"new " * (SIZE // 4))
        with pytest.raises(DamagedEntry, match="damaged"):
            stream.truncate(4)
        stream.truncate(3)  # it removes the page as a whole
    assert verify(path).ok


def test_a_foreign_writer(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A program that keeps no checksums appends, or changes entries: nothing is called damaged."""
    path = made(tmp_path / "s.bin")
    content = bytearray(path.read_bytes())
    entries = scan_file(path)
    end = entries[-1].offset + 17 + len(entries[-1].data)
    number = len(entries)
    content[end : end + 20] = (
        b"\2"
        + (20).to_bytes(4, "big")
        + (9).to_bytes(4, "big")
        + (number.to_bytes(8, "big") + b"new")
    )
    content[38:46] = (end + 20).to_bytes(8, "big")
    content[46:54] = (number + 1).to_bytes(8, "big")
    content[FIRST + PAGE + 1000] ^= 1  # and updates an entry
    path.write_bytes(content)
    report = verify(path)
    assert report.ok
    assert any("another program wrote the stream last" in note for note in report.notes)
    with DataStream.open(path, read_only=True, verify="always") as stream:
        assert len([*stream.entries()]) == number + 1
    with caplog.at_level(logging.WARNING):
        assert make_sums(path) == MadeSums(4, 1, 0, "")
    assert any("before another program wrote the stream" in it for it in caplog.messages)
    page_sums(path)
    assert verify(path).ok


def test_bytes_are_accepted_as_they_are(tmp_path: Path) -> None:
    path = made(tmp_path / "s.bin")
    content = bytearray(path.read_bytes())
    last = scan_file(path)[-1].offset
    for at in (FIRST + 2000, last + 100):
        content[at] ^= 1
    path.write_bytes(content)
    assert len(verify(path).problems) == 2
    assert make_sums(path, accept=True) == MadeSums(4, 4, 0, "")
    assert verify(path).ok
    page_sums(path)


class RefusingDisk(FaultyDisk):
    """Sidecars cannot be opened, as files that the user may not read; nor removed if `keeps`."""

    def __init__(self, *, keeps: bool = False) -> None:
        super().__init__()
        self.keeps = keeps

    def open(self, path: str, *, write: bool, beside: Access | None = None) -> FaultyFile:
        if path.endswith(".sums"):
            raise PermissionError(errno.EACCES, "Permission denied", path)
        return super().open(path, write=write, beside=beside)

    def unlink(self, path: str) -> None:
        if self.keeps and path.endswith(".sums"):
            raise PermissionError(errno.EACCES, "Permission denied", path)
        super().unlink(path)


def links_elsewhere(path: Path) -> None:
    path.with_name("elsewhere").write_bytes(b"kept")
    path.symlink_to(path.with_name("elsewhere"))


def is_another_user_s(path: Path) -> None:
    path.write_bytes(b"theirs")
    try:
        os.chown(path, 12_345, -1)
    except PermissionError:
        pytest.skip("only root can give files away")


IN_ITS_PLACE: dict[str, Callable[[Path], object]] = {
    "a link": links_elsewhere,
    "a link to nothing": lambda path: path.symlink_to("nothing"),
    "a folder": Path.mkdir,
    "a pipe": os.mkfifo,
    "a socket": lambda path: os.mknod(path, stat.S_IFSOCK | 0o600),
    "another user's file": is_another_user_s,
}


@pytest.mark.parametrize("put", IN_ITS_PLACE.values(), ids=IN_ITS_PLACE)
def test_what_is_in_the_sidecar_s_place(
    tmp_path: Path, put: Callable[[Path], object], caplog: pytest.LogCaptureFixture
) -> None:
    """It is named once and left alone, and the stream can be changed."""
    path = made(tmp_path / "s.bin")
    sidecar(path).unlink()
    put(sidecar(path))
    before = os.lstat(sidecar(path))
    assert verify(path).ok
    with DataStream.open(path, read_only=True, verify="always") as stream:
        assert len([*stream.entries()]) == stream.total_entries
    caplog.clear()
    with DataStream.open(path, index="memory") as stream:
        fill(stream, 5)
        stream.update_entry(4, 1, b"new " * (SIZE // 4))
        stream.truncate(5)
        stream.update_entry(1, 1, b"new " * (SIZE // 4))
        assert [entry.data[:4] for entry in (stream.entry(1), stream.entry(4))] == [b"new "] * 2
    [warning] = [each for each in caplog.records if each.levelno >= logging.WARNING]
    assert warning.getMessage().startswith(f"{sidecar(path)}: checksums cannot be read (")
    assert os.lstat(sidecar(path)) == before
    assert verify(path).ok


@pytest.mark.parametrize("put", [*IN_ITS_PLACE.values(), None], ids=[*IN_ITS_PLACE, "unreadable"])
def test_an_interrupted_update_beside_it(
    tmp_path: Path, put: Callable[[Path], object] | None
) -> None:
    path, disk = made(tmp_path / "s.bin"), FaultyDisk()
    state = tmp_path / "state" / "s.bin"
    state.parent.mkdir()

    def keep() -> None:
        if Path(f"{path}.undo").exists() and not state.exists():
            for each in tmp_path.glob("s.bin*"):
                shutil.copyfile(each, state.parent / each.name)

    with DataStream.open(path, index="memory", disk=disk) as stream:
        disk.before = {"sync": keep}
        stream.update_entry(4, 1, b"new " * (SIZE // 4))
        disk.before = {}
    assert Path(f"{state}.undo").exists()
    if put is not None:
        sidecar(state).unlink()
        put(sidecar(state))
    disk = RefusingDisk() if put is None else FaultyDisk()
    with DataStream.open(state, index="memory", disk=disk) as stream:
        assert stream.entry(4).data[:4] == (4).to_bytes(4, "big")
    assert verify(state).ok


def test_a_sidecar_that_cannot_be_opened_is_removed_before_a_change(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = made(tmp_path / "s.bin")
    with DataStream.open(path, index="memory", disk=RefusingDisk()) as stream:
        stream.update_entry(4, 1, b"new " * (SIZE // 4))
        stream.truncate(5)
    assert not sidecar(path).exists()
    [warning] = [each for each in caplog.records if each.levelno >= logging.WARNING]
    assert str(sidecar(path)) in warning.getMessage()


def test_a_sidecar_that_can_be_neither_opened_nor_removed(tmp_path: Path) -> None:
    """A record would be left that is wrong after a change."""
    path = made(tmp_path / "s.bin")
    why = rf"{sidecar(path)} can be neither written nor removed \(Permission denied\)"
    with DataStream.open(path, index="memory", disk=RefusingDisk(keeps=True)) as stream:
        with pytest.raises(WriteFailed, match=why):
            stream.update_entry(4, 1, b"new " * (SIZE // 4))
        with pytest.raises(WriteFailed, match=why):
            stream.truncate(2)
        fill(stream, 5)
    assert verify(path).ok


def test_a_full_disk(tmp_path: Path) -> None:
    disk = FaultyDisk()
    path = made(tmp_path / "s.bin", 2)
    with DataStream.open(path, index="memory", disk=disk) as stream:
        stream._ensure_writable().uncommitted.grow(FIRST + 6 * PAGE)
        disk.faults["write"] = 28  # of the sidecar: commits write otherwise
        fill(stream, 4)
        disk.faults.clear()
    assert verify(path).ok
    assert make_sums(path) == MadeSums(4, 2, 0, "")
    page_sums(path)
